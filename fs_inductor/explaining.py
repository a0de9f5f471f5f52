"""`explain`: compile a function once and say what was fused, what was not, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from .backend import compile_graph
from .options import Options
from .report import Report


def explain(
    fn: Callable, *, options: Mapping[str, Any] | None = None, dynamic: bool | None = None
) -> Callable[..., Report]:
    """Returns a function that takes ``fn``'s arguments, compiles ``fn``, runs it once, and returns a `Report`.

    options: as for ``torch.compile(backend="flashsampling", options=...)``; ``dynamic``: as for ``torch.compile``.
    Compile caches are left aside, so the report is complete; ``flashsampling.strict`` is ignored, since the report
    says more. ``fn`` may be compiled already: what it was made from is explained.

    >>> print(fs_inductor.explain(decode_step)(input_ids, cache))
    """
    Options.split(options)  # a bad option is an error here, not at the call
    relaxed = {**(options or {}), "flashsampling.strict": False}
    original = getattr(fn, "_torchdynamo_orig_callable", fn)
    if isinstance(fn, torch._dynamo.eval_frame.OptimizedModule):
        original = fn._orig_mod

    def explained(*args: Any, **kwargs: Any) -> Report:
        report = Report()

        def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable:
            return compile_graph(gm, example_inputs, None, relaxed, report)

        before = dict(counters["graph_break"])
        torch._dynamo.reset()
        with inductor_config.patch(force_disable_caches=True):
            torch.compile(original, backend=backend, dynamic=dynamic)(*args, **kwargs)
        report.graph_breaks = [
            _one_line(reason) for reason, count in counters["graph_break"].items() if count > before.get(reason, 0)
        ]
        return report

    return explained


def _one_line(reason: str) -> str:
    return " ".join(reason.split())
