"""The `torch.compile` entry: parse our options, put the pass in place, hand over to Inductor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.registry import list_backends, register_backend
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from . import ops, tp_ops  # noqa: F401 - compiled code, cached code too, calls the registered ops
from .gain import may_guard
from .graph_pass import FlashSamplingPass, PassSequence
from .options import Options
from .report import NO_PASSES, Report
from .seeds import SeedViews

log = logging.getLogger(__name__)


def flashsampling(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable:
    """Inductor with the sampling pass: what ``torch.compile(fn, backend="flashsampling")`` calls for each graph.

    ``mode`` and ``options`` mean what they mean for Inductor; options with the prefix ``flashsampling.`` are ours
    (see `Options`).

    Raises:
        ValueError, TypeError: an unknown option of ours, or a bad value; ``strict`` where Inductor runs no passes.
        NotFusedError: under ``flashsampling.strict``, a sink was not fused.
    """
    return compile_graph(gm, example_inputs, mode, options, None)


if flashsampling.__name__ not in list_backends(exclude_tags=()):
    # Not installed, so there is no entry point: a checkout on the path, where importing this module is enough.
    register_backend(flashsampling)


def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
    report: Report | None,
) -> Callable:
    """The backend, with an optional report that collects the records of several graphs."""
    ours, rest = Options.split(options)
    inductor = torch._TorchCompileInductorWrapper(mode, rest, None)
    if ours.enabled and not inductor.config.get("use_joint_graph_passes", inductor_config.use_joint_graph_passes):
        if ours.strict:
            raise ValueError(f"flashsampling.strict is set, but {NO_PASSES}")
        if report is None:
            log.warning("%s", NO_PASSES)
        else:
            report.no_passes = True
    elif ours.enabled:
        _reserve_scratch(example_inputs)
        fuse = FlashSamplingPass(ours, report, may_guard(example_inputs))
        for name, each in (("joint_custom_pre_pass", fuse), ("joint_custom_post_pass", SeedViews())):
            user = inductor.config.get(name, getattr(inductor_config, name))
            inductor.config[name] = _with_users_pass(each, user)
    hits = _cache_hits()
    compiled = inductor(gm, example_inputs)
    if ours.enabled and _cache_hits() > hits:
        # AOTAutograd's cache keeps the code and none of our records. (Inductor's own is asked after the pass.)
        log.info(
            "a compiled graph came from the cache: its sinks, if any, were logged when it was put there. "
            "To see them again, call fs_inductor.explain or set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
        )
    return compiled


def _cache_hits() -> int:
    return counters["aot_autograd"]["autograd_cache_hit"]


def _with_users_pass(ours: CustomGraphPass, user: Any) -> CustomGraphPass:
    if not user:
        return ours
    return PassSequence([*(user if isinstance(user, (list, tuple)) else [user]), ours])


def _reserve_scratch(example_inputs: Sequence[Any]) -> None:
    """Takes the kernel's scratch words now: under graph capture it would be too late."""
    devices = {x.device for x in example_inputs if isinstance(x, torch.Tensor) and x.device.type == "cuda"}
    if devices:
        from .kernels import scratch

        for device in devices:
            scratch.reserve(device)
