"""Shipped tiles compile for their GPU, fit its shared memory and keep values in registers; no GPU needed.

Compiled in a subprocess, because here Triton interprets kernels. `python tests/test_offline_compile.py
nvidia` (or `amd`) prints registers, spills and shared memory of every case.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest

ROUND = "x0 = round(acc, bf16)"
TEMPERED = f"{ROUND}; x1 = div(x0, a0)"
SOFTCAP = f"{ROUND}; x1 = div(x0, 30.0); x2 = tanh(x1); x3 = mul(x2, 30.0); x4 = div(x3, a0); x5 = add(x4, a1)"
MASKED = f"{SOFTCAP}; x6 = where(a2, -inf, x5)"
LATE = f"{ROUND}; x1 = add(x0, a3)"  # numbers of the logits' shape
LATE_MASKED = f"{MASKED}; x7 = add(x6, a3)"
UNROUNDED = "x0 = mul(acc, 2.0); x1 = tanh(x0); x2 = div(x1, a0); x3 = add(x2, a1); x4 = where(a2, -inf, x3)"

# Architecture, dtype, batch, hidden size, epilogue program, greedy (whether, or by which program beside the draw):
# every tile of the tables in tiles.py, by a draw, and what else a program can be. Then the tile, where it is not the
# table's.
CASES = [
    *((90, "bfloat16", batch, 2048, TEMPERED, False) for batch in (16, 32, 64, 128, 256)),
    (90, "bfloat16", 64, 4096, TEMPERED, False),
    (90, "bfloat16", 128, 8192, TEMPERED, False),
    *((90, "float32", batch, 2048, "", False) for batch in (16, 64)),
    *((90, "tf32", batch, 2048, "", False) for batch in (16, 32, 64, 128, 256)),
    *((80, "bfloat16", batch, 2048, TEMPERED, False) for batch in (16, 32, 64, 128)),
    (100, "bfloat16", 256, 2048, TEMPERED, False),
    *(("gfx942", "bfloat16", batch, 2048, TEMPERED, False) for batch in (16, 128)),
    (90, "bfloat16", 128, 2048, ROUND, True),
    (80, "bfloat16", 64, 2048, SOFTCAP, False),
    *((90, "bfloat16", batch, 2048, MASKED, False) for batch in (16, 32, 64, 128, 256)),
    (90, "bfloat16", 64, 4096, MASKED, False),
    (90, "bfloat16", 16, 2048, TEMPERED, "x0 = mul(acc, 5.0)"),
    *((90, "bfloat16", 128, 2048, program, False, "SQUARE") for program in (TEMPERED, MASKED)),
    *((90, "bfloat16", 256, 2048, program, False, "WIDE") for program in (TEMPERED, MASKED)),
    *((arch, "bfloat16", batch, 2048, LATE, False) for arch in (90, 100) for batch in (64, 128)),
    *((90, "bfloat16", batch, 2048, LATE_MASKED, False) for batch in (16, 32, 64, 128)),
    *((90, "bfloat16", 256, 2048, UNROUNDED, greedy) for greedy in (False, True)),
    *((90, "float16", 256, 2048, program.replace("bf16", "f16"), False) for program in (TEMPERED, MASKED)),
    (90, "bfloat16", 256, 2048, ROUND, True),
    (90, "bfloat16", 256, 2048, "", False),
    (90, "bfloat16", 256, 2048, "x0 = mul(a0, 2.0)", False),  # nothing of the product
]
SHARED_MEMORY = {80: 166912, 90: 232448, 100: 232448, "gfx942": 65536}  # the most one block may have, in bytes
# Bytes that are stored once a launch: by Triton 3.7 where two groups take turns and there is a mask, by 3.6 for the
# wide tile on Blackwell. By the others, and for all else, none.
SPILLED = {("3.7", 90): 8, ("3.6", 100): 16}


@pytest.fixture(scope="module")
def table():
    path = os.pathsep.join(filter(None, sys.path))
    env = dict(os.environ, TRITON_INTERPRET="0", TRITON_CACHE_DIR=tempfile.mkdtemp(), PYTHONPATH=path)
    rows = {}
    for vendor in ("nvidia", "amd"):
        command = [sys.executable, __file__, vendor]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1200)
        assert done.returncode == 0, done.stderr[-4000:]
        rows |= {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}
    return rows


@pytest.mark.parametrize("n", range(len(CASES)), ids=["-".join(map(str, c[:4])) for c in CASES])
def test_shipped_tiles(table, n):
    row = table[n]
    assert row["code"] > 0
    assert row["shared"] <= SHARED_MEMORY[CASES[n][0]], row
    arch, dtype, batch, depth = CASES[n][:4]
    turns = arch == 90 and dtype.endswith("16") and (batch == 256 or (batch, depth) == (128, 2048))
    assert row["turns"] == (turns and len(CASES[n]) == 6 and CASES[n][4] not in (LATE, LATE_MASKED))
    may_spill = (row["turns"] and "where" in CASES[n][4]) or (arch, batch) == (100, 256)
    assert row["spilled"] <= (SPILLED.get((version("triton")[:3], arch), 0) if may_spill else 0), row
    assert not row["turns"] or row["together"], "a stage is given back by a thread that has not waited for the others"
    assert row["reads_first"], "the last program may zero winners that another of its threads has yet to read"
    assert row["greedy"] or not isinstance(CASES[n][5], str), "the greedy token goes by the draw's program"
    assert row["alone"], f"threads that hold one row read its best score apart, and may part at a branch: {row}"


def compile_case(arch, dtype, batch, depth, program, greedy, tile=None):
    """The compiled kernel that a call with these arguments would launch.

    arch: 90 for sm_90, or a name like gfx942. tile: the name of one in tiles.py, for another than the table's.
    """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from fs_inductor.kernels import gemm_sample, tiles
    from fs_inductor.kernels.epilogue import Program

    amd = isinstance(arch, str)

    class NoGpu:
        def get_current_target(self):
            return GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", arch, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

    class CompileOnly:
        def __init__(self, kernel):
            self.kernel = kernel
            kernel.device_caches.clear()  # they remember the target of the last case

        def __getitem__(self, grid):
            return lambda *args, **kwargs: results.append(self.kernel.warmup(*args, grid=grid, **kwargs))

    results = []
    driver.set_active(NoGpu())
    pingpong = gemm_sample._pingpong()
    name = arch if amd else f"sm_{arch}"
    tiles.device_info = lambda device: tiles.DeviceInfo(name, 132, not amd and arch >= 90, 64 if amd else 32)
    torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    dtype = "float32" if dtype == "tf32" else dtype
    vocab = 151936
    # Never touched, so never backed by memory.
    hidden, weight = (torch.empty(rows, depth, dtype=getattr(torch, dtype)) for rows in (batch, vocab))
    operands = [torch.empty(batch, 1), torch.empty(vocab), torch.empty(batch, vocab, dtype=torch.bool)]
    operands.append(torch.empty(batch, vocab))
    operands = operands[: Program.parse(program).num_operands]
    seed = torch.zeros((), dtype=torch.int64)
    config = tile and getattr(tiles, tile)
    with (
        patch.object(gemm_sample, "gemm_sample_kernel", CompileOnly(gemm_sample.gemm_sample_kernel)),
        patch.object(pingpong, "pingpong_kernel", CompileOnly(pingpong.pingpong_kernel)),
    ):
        if isinstance(greedy, str):
            gemm_sample.sample_and_argmax(hidden, weight, seed, operands, program, greedy)
        elif greedy:
            gemm_sample.argmax(hidden, weight, operands, program, config=config)
        else:
            gemm_sample.sample(hidden, weight, seed, operands, program, config=config)
    return results[0]


def describe(compiled):
    """What pytest asserts, as a dict. spilled: bytes of stack, or registers that AMD's compiler has spilled.
    greedy: whether the kernel multiplies by 5, as the second program of CASES does."""
    found = {"shared": compiled.metadata.shared, "alone": reads_alone(compiled.asm["ttgir"])}
    found["turns"] = "warp_specialize" in compiled.asm["ttgir"]
    found["reads_first"] = reads_first(compiled.asm)
    found["greedy"] = "5.000000e+00" in compiled.asm["ttgir"]
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"{name}: +(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")
        )
        return found | {"registers": registers, "spilled": spilled, "code": len(compiled.asm["hsaco"])}
    from triton.backends import nvidia

    found["together"] = arrives_together(compiled.asm["ptx"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return found | {"registers": registers, "spilled": stack, "code": len(compiled.asm["cubin"])}


def arrives_together(ptx):
    """Whether threads arrive for their group, and always just behind its barrier: after all products waited for."""
    steps = re.findall(r"wgmma.wait_group|bar.sync|mbarrier.arrive.shared", ptx)
    before = [steps[n - 1] for n, step in enumerate(steps) if step == "mbarrier.arrive.shared"]
    return set(before) == {"bar.sync"}


def reads_first(asm):
    """Whether a barrier stands between the last reads of winners and the stores of zeros."""
    amd = "amdgcn" in asm
    load, barrier, store = (
        ("buffer_load_dwordx2", "s_barrier", "buffer_store_dwordx2")
        if amd
        else ("ld.volatile.global", "bar.sync", "st.global")
    )
    steps = re.findall("|".join(map(re.escape, (load, barrier, store))), asm["amdgcn" if amd else "ptx"])
    behind = steps[len(steps) - steps[::-1].index(load) :]
    # Tokens, whose stores wait for all reads, then zeros.
    return f"{store} {barrier} {store}" in " ".join(behind)


def reads_alone(ttgir):
    """Whether the layouts of volatile loads give every element to one thread only."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg.(?:blocked|linear)<\{(.*?)\}>", ttgir, re.M))
    found = re.findall(r"tt.load .*isVolatile = true.*tensor<([0-9x]+)x!tt.ptr<i64>, (#\w+)>", ttgir)
    # AMD's compiler has an op of its own for loads that reach from one pointer.
    found += re.findall(r"buffer_load %scratch_words.*(?:->|:) tensor<([0-9x]+)xi64, (#\w+)>", ttgir)
    for shape, name in found:
        if layouts[name].startswith("register"):  # Gluon's, by the bits of an element's place
            bits = re.findall(r"\[([0-9, ]+)\]", layouts[name])
            size = math.prod(int(n) for n in shape.split("x"))
            if 2 ** len(bits) > size or len(set(bits)) < len(bits) or not all(bit.strip("0, ") for bit in bits):
                return False
            continue
        axes = re.findall(r"(?:PerThread|PerWarp|PerCTA) = \[(.*?)\]", layouts[name])
        axes = [axis.split(",") for axis in axes]
        for axis, size in enumerate(shape.split("x")):
            span = 1
            for factors in axes:
                span *= int(factors[axis])
            if span > int(size):
                return False
    return bool(found)


if __name__ == "__main__":
    wanted = [case for case in CASES if (sys.argv[1] == "amd") == isinstance(case[0], str)]
    if sys.argv[1] == "amd":
        import torch

        torch.version.hip = "offline"  # the kernels' own choices for AMD are made at import
    for case in wanted:
        row = {"case": CASES.index(case), **describe(compile_case(*case))}
        print(json.dumps(row), flush=True)
