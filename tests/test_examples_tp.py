"""The benchmark of tensor parallelism runs on two CPU processes, and does not hang without its peers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

ROOT = Path(__file__).parent.parent
BENCHMARK = [str(ROOT / "examples" / "benchmark.py"), "--tp", "--device", "cpu"]


def run(command: list[str], **extra: str) -> subprocess.CompletedProcess:
    keep = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = keep | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | extra
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, timeout=300)


def test_two_ranks_measure_every_variant_and_agree(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sizes = ["--shapes", "301x16", "--batches", "2", "--steps", "30", "--rounds", "2", "--calls", "2"]
    finished = run([*torchrun, *BENCHMARK, *sizes, "--out", str(tmp_path)])
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "tensor_parallel_2.json").read_text())
    (cell,) = result["cells"]
    assert [cell[key] for key in "VDB"] == [301, 16, 2]
    assert len(cell["us"]) == 6 and min(cell["us"].values()) > 0
    assert set(cell["checked"]) == {"op: sample_sharded", "compiled: fused"}
    for found in cell["checked"].values():
        assert found["steps"] == 30 and found["agree"]
    # Each call of the compiled step has a seed of its own; the op's is fixed.
    assert cell["checked"]["compiled: fused"]["different"] > 10
    assert result["environment"]["world"] == 2 and result["environment"]["torch"]
    assert "yes, 60 steps" in (tmp_path / "tensor_parallel_2.md").read_text()
    assert (tmp_path / "tensor_parallel_2.png").stat().st_size > 0


def test_without_torchrun_it_says_how_to_start():
    finished = run(BENCHMARK)
    assert finished.returncode == 2
    assert "torchrun --nproc-per-node 2 examples/benchmark.py --tp" in finished.stderr


def test_a_missing_rank_ends_it():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    finished = run([*BENCHMARK, "--timeout", "2"], **place)
    assert finished.returncode == 1
    assert "Timed out" in finished.stderr or "timeout" in finished.stderr.lower()
