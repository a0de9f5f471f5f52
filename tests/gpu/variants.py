"""Every variant of the kernel once, small: for compute-sanitizer, which follows each access.

compute-sanitizer --tool memcheck python tests/gpu/variants.py [I N]      (also --tool racecheck, synccheck)

With I and N, every N-th variant from the I-th on, so that several processes can share the compiling.

In kernels of several groups of warps (TURNS), racecheck takes Triton's own handshake between them for a race: the last
twelve bytes of a kernel's shared memory, which say what each warp is to run, written before a barrier of all warps and
read after it. `handshake.py` shows the same without any of our code. Another place than that would be a finding: with
`--racecheck-report all --print-limit 100000` each hazard is told by its address.
"""

import sys

import torch

from fs_inductor.kernels import gemm_sample, scratch
from fs_inductor.kernels.tiles import SQUARE, TURNS, WIDE, Tile

DEVICE = "cuda"
ROUND = {
    torch.bfloat16: "x0 = round(acc, bf16)",
    torch.float16: "x0 = round(acc, f16)",
    torch.float32: "x0 = add(acc, 0.0)",
}
RICH = (
    "; x1 = div(x0, 30.0); x2 = tanh(x1); x3 = mul(x2, 30.0); x4 = add(x3, a1); x5 = where(a2, -inf, x4)"
    "; x6 = div(x5, a0)"
)
SEED = torch.tensor(7, device=DEVICE)


def run(
    rows,
    vocab,
    depth,
    dtype,
    draws=1,
    row_seeds=False,
    id_base=0,
    rich=True,
    rounded=True,
    config=None,
    transposed=False,
):
    hidden = torch.randn(rows, depth, device=DEVICE, dtype=dtype)
    weight = torch.randn(vocab, depth, device=DEVICE, dtype=dtype)
    if transposed:
        weight = weight.t().contiguous().t()
    operands = [
        torch.rand(rows, 1, device=DEVICE) + 0.5,
        torch.randn(vocab, device=DEVICE),
        torch.rand(rows, vocab, device=DEVICE) < 0.3,
    ]
    program = ROUND[dtype if rounded else torch.float32] + RICH * rich
    operands = operands * rich
    seed = torch.arange(rows, device=DEVICE) if row_seeds else SEED
    drawn = gemm_sample.sample(hidden, weight, seed, operands, program, draws, id_base, config)
    greedy = gemm_sample.argmax(hidden, weight, operands, program, id_base, config)
    both = gemm_sample.sample_and_argmax(hidden, weight, seed, operands, program, ROUND[dtype], draws, id_base, config)
    for tokens in (drawn, greedy, *both):
        assert ((tokens >= id_base) & (tokens < id_base + vocab)).all()


def variants():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, vocab, depth in ((1, 1000, 72), (33, 999, 64), (130, 515, 136), (300, 129, 40)):
            yield {"rows": rows, "vocab": vocab, "depth": depth, "dtype": dtype}
    for options in (
        {"rows": 5, "vocab": 1, "depth": 64},
        {"rows": 5, "vocab": 700, "depth": 33},  # no descriptor: odd depth
        {"rows": 20, "vocab": 700, "depth": 64, "draws": 3},
        {"rows": 20, "vocab": 700, "depth": 64, "row_seeds": True},
        {"rows": 20, "vocab": 700, "depth": 64, "id_base": 40},
        {"rows": 20, "vocab": 704, "depth": 64, "transposed": True},
        {"rows": 600, "vocab": 300, "depth": 64, "rich": False},
        {"rows": 600, "vocab": 300, "depth": 64, "config": WIDE},
        {"rows": 300, "vocab": 20000, "depth": 520, "config": TURNS},
        {"rows": 300, "vocab": 20000, "depth": 520, "rich": False, "row_seeds": True, "id_base": 40, "config": TURNS},
        {"rows": 300, "vocab": 20000, "depth": 520, "rounded": False, "config": TURNS},
        {"rows": 20, "vocab": 700, "depth": 64, "config": Tile(16, 128, 64, 4, 3, use_tma=False)},
        {"rows": 130, "vocab": 515, "depth": 136, "config": SQUARE},
        {"rows": 40, "vocab": 70000, "depth": 64, "rich": False},  # tiles enough for every second program to start late
    ):
        yield {"dtype": torch.bfloat16, **options}


def main() -> None:
    torch.manual_seed(0)
    scratch.reserve(torch.device(DEVICE, torch.cuda.current_device()))
    start, step = (int(n) for n in sys.argv[1:3]) if len(sys.argv) > 2 else (0, 1)
    mine = list(variants())[start::step]
    for options in mine:
        run(**options)
    torch.cuda.synchronize()
    print(f"{len(mine)} variants ran")


if __name__ == "__main__":
    main()
