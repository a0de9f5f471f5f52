"""Shipped tiles compile for their GPU, fit its shared memory and keep values in registers; no GPU needed.

Compiled in a subprocess, because here Triton interprets kernels. `python tests/test_offline_compile.py` prints
registers, stack (where spilled values go) and shared memory of every case.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROUND = "x0 = round(acc, bf16)"
SOFTCAP = f"{ROUND}; x1 = div(x0, 30.0); x2 = tanh(x1); x3 = mul(x2, 30.0); x4 = div(x3, a0); x5 = add(x4, a1)"
MASKED = f"{SOFTCAP}; x6 = where(a2, -inf, x5)"

# Compute capability, dtype, batch, epilogue program, greedy, and the stack allowed in bytes: where it is not zero,
# it holds values that no loop of the product touches, such as addresses that never change.
CASES = [
    (90, "bfloat16", 16, ROUND, False, 16),
    (90, "bfloat16", 64, MASKED, False, 16),
    (90, "bfloat16", 128, ROUND, True, 0),
    (90, "bfloat16", 256, ROUND, False, 96),
    (90, "float32", 16, "", False, 0),
    (80, "bfloat16", 64, SOFTCAP, False, 0),
    (100, "bfloat16", 256, ROUND, False, 96),
]
SHARED_MEMORY = {80: 166912, 90: 232448, 100: 232448}  # the most one block may have, in bytes


@pytest.fixture(scope="module")
def table():
    path = os.pathsep.join(filter(None, sys.path))
    env = dict(os.environ, TRITON_INTERPRET="0", TRITON_CACHE_DIR=tempfile.mkdtemp(), PYTHONPATH=path)
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=env, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("n", range(len(CASES)), ids=[f"sm_{c[0]}-{c[1]}-{c[2]}" for c in CASES])
def test_shipped_tiles(table, n):
    row = table[n]
    assert row["cubin"] > 0
    assert row["shared"] <= SHARED_MEMORY[CASES[n][0]]
    assert row["stack"] <= CASES[n][5], row
    assert row["alone"], f"threads that hold one row read its best score apart, and may part at a branch: {row}"


def compile_case(arch, dtype, batch, program, greedy):
    """The compiled kernel that a call with these arguments would launch."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from fs_inductor.kernels import gemm_sample, tiles
    from fs_inductor.kernels.epilogue import Program

    class NoGpu:
        def get_current_target(self):
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

    class CompileOnly:
        def __getitem__(self, grid):
            def run(*args, **kwargs):
                self.result = kernel.warmup(*args, grid=grid, **kwargs)

            return run

    driver.set_active(NoGpu())
    gemm_sample.gemm_sample_kernel.device_caches.clear()  # they remember the target of the last case
    kernel, gemm_sample.gemm_sample_kernel = gemm_sample.gemm_sample_kernel, CompileOnly()
    tiles.device_info = lambda device: tiles.DeviceInfo(f"sm_{arch}", 132, arch >= 90)
    vocab, depth = 151936, 2048
    # Never touched, so never backed by memory.
    hidden, weight = (torch.empty(rows, depth, dtype=getattr(torch, dtype)) for rows in (batch, vocab))
    operands = [torch.empty(batch, 1), torch.empty(vocab), torch.empty(batch, vocab, dtype=torch.bool)]
    operands = operands[: Program.parse(program).num_operands]
    try:
        if greedy:
            gemm_sample.argmax(hidden, weight, operands, program)
        else:
            gemm_sample.sample(hidden, weight, torch.zeros((), dtype=torch.int64), operands, program)
        return gemm_sample.gemm_sample_kernel.result
    finally:
        gemm_sample.gemm_sample_kernel = kernel


def describe(compiled):
    """What pytest asserts, as a dict."""
    from triton.backends import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared": compiled.metadata.shared,
        "cubin": len(compiled.asm["cubin"]),
        "alone": reads_alone(compiled.asm["ttgir"]),
    }


def reads_alone(ttgir):
    """Whether the layouts of volatile loads give every element to one thread only."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg.blocked<\{(.*?)\}>", ttgir, re.M))
    found = re.findall(r"tt.load .*isVolatile = true.*tensor<([0-9x]+)x!tt.ptr<i64>, (#\w+)>", ttgir)
    for shape, name in found:
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
    for case in CASES:
        print(json.dumps({"case": case[:3], **describe(compile_case(*case[:5]))}), flush=True)
