"""Runs a function in several processes, one a rank, as torchrun would; none outlives its test."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Forked from a server that has imported torch once: a rank starts in a tenth of a second, not in several.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "fs_inductor.tp_ops",
        "fs_inductor.kernels.exchange_triton",
        "torch._dynamo",
        "torch.distributed.tensor.parallel",
        "transformers.models.llama.modeling_llama",
    ]
)


class RankError(AssertionError):
    """A rank raised, died, or ran too long."""


def run_ranks(function: Callable, world: int, *args: Any, seconds: float = 60, group_seconds: float = 30) -> list:
    """`function(rank, world, *args)` in `world` processes with a gloo group; what they return, in the order of ranks.

    Tensors among args that are in shared memory are shared. Raises RankError if a rank raises, exits without
    returning, or has not returned after `seconds`; all ranks are then killed.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as processes:
        pipes: dict[Connection, int] = {}
        for rank in range(world):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main, args=(sender, function, rank, world, folder, group_seconds, args), daemon=True
            )
            process.start()
            sender.close()
            processes.callback(_end, process)
            pipes[receiver] = rank
        results: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while pipes:
            ready = wait(list(pipes), timeout=max(0, deadline - time.monotonic()))
            if not ready:
                raise RankError(f"ranks {sorted(pipes.values())} of {world} did not return within {seconds} s")
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    failure, results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    last_words = (Path(folder) / f"rank{rank}").read_text()
                    raise RankError(f"rank {rank} of {world} died\n{last_words}") from None
                if failure:
                    raise RankError(f"rank {rank} of {world} raised\n{failure}")
        return [results[rank] for rank in range(world)]


def _end(process) -> None:
    process.join(0.5)
    if process.is_alive():
        process.kill()
        process.join()


def _rank_main(sender: Connection, function, rank: int, world: int, folder: str, group_seconds: float, args) -> None:
    torch.set_num_threads(1)
    faulthandler.enable(open(f"{folder}/rank{rank}", "w"))  # noqa: SIM115 - open as long as the process lives
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=group_seconds),
        )
        answer = (None, function(rank, world, *args))
    except BaseException:
        answer = (traceback.format_exc(), None)
    # Not `send`, which would leave tensors in memory that ends with this process.
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    # Not destroy_process_group, which waits for ranks that a test has killed.
    os._exit(0)
