"""Which of several tiles is fastest on this GPU for one product: measured at compile time, remembered on disk.

Nothing is measured at run time, and so nothing while a CUDA graph is captured. Tokens do not depend on the choice.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import triton

from . import tiles
from .tiles import Case, Tile

log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=4096)
def pick(case: Case) -> Tile:
    """The tile for `case`: the one `tune` has chosen, in this process or in an earlier one, or that of the table."""
    chosen = _chosen().get(_name(case))
    return tiles.pick(case) if chosen is None else Tile(**chosen)


def tune(case: Case, run: Callable[[Tile], object]) -> Tile:
    """Measure the candidates for `case`, unless that was done before, and let `pick` return the fastest from now on.

    run(tile): launch the kernel once on the current stream with that tile. A candidate that cannot run is passed over.
    Returns what `pick` now returns.
    """
    from triton.testing import do_bench  # costs an import that few processes need

    name = _name(case)
    if name in _chosen():
        return pick(case)
    times: dict[Tile, float] = {}
    for tile in tiles.candidates(case):
        try:
            times[tile] = do_bench(functools.partial(run, tile), warmup=10, rep=40, return_mode="median")
        except Exception as error:  # too much shared memory on this card, or none left for what it measures with
            log.debug("%s does not run for %s: %s", tile, name, error)
    if times:
        best = min(times, key=times.__getitem__)
        log.info("for %s, %s takes %.1f us; others %s", name, best, 1e3 * times[best], sorted(times.values())[1:])
        _remember(name, best)
    return pick(case)


def forget() -> None:
    """Drop what this process knows; the disk keeps it."""
    _chosen.cache_clear()
    pick.cache_clear()


@functools.cache
def _chosen() -> dict[str, dict]:
    try:
        return json.loads(_file().read_text())
    except (OSError, ValueError):  # never tuned here, or cut short by a full disk
        return {}


def _remember(name: str, tile: Tile) -> None:
    pick.cache_clear()
    _chosen()[name] = asdict(tile)
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and moved, since other ranks and processes read and write the same file.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(_chosen(), file)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("the choice of tiles is not kept for the next process: %s", error)


@functools.cache
def _file() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(__file__).parent
    digest = hashlib.sha256(f"{torch.__version__} {triton.__version__}".encode())
    for source in sorted(folder.glob("*.py")):
        digest.update(source.read_bytes())
    if torch.cuda.is_available():
        digest.update(torch.cuda.get_device_name().encode())
    return Path(cache_dir()) / "flashsampling" / f"tiles-{digest.hexdigest()[:16]}.json"


def _name(case: Case) -> str:
    case = case._replace(batch=tiles.bucket(case.batch), dtype=str(case.dtype).removeprefix("torch."))
    return ", ".join(f"{key}={value}" for key, value in case._asdict().items())
