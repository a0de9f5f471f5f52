"""`explain`: compile a function once and say what was fused, what was not, and why."""

from __future__ import annotations

import inspect
import re
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
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
    Compile caches are left aside, so the report is complete; ``flashsampling.strict`` and ``enabled`` are ignored,
    since the report says more. ``fn`` may be compiled already: what it was made from is explained, with its own mode
    and options where none are passed.

    >>> print(fs_inductor.explain(decode_step)(input_ids, cache))
    """
    if not callable(fn):
        raise TypeError(f"explain takes the function or module that torch.compile would, not {type(fn).__name__}")
    mode = None
    if options is None:
        mode, options = _compiled_with(fn)
    Options.split(options)  # a bad option is an error here, not at the call
    relaxed = {**(options or {}), "flashsampling.strict": False, "flashsampling.enabled": True}
    original = _uncompiled(fn)

    def explained(*args: Any, **kwargs: Any) -> Report:
        report = Report()
        located: list[str] = []

        def flashsampling(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable:  # torch's errors name it
            reason = getattr(gm, "compile_subgraph_reason", None)
            if reason is not None and reason.graph_break:
                located.append(reason.reason)
                report.graph_breaks.append(_sentence(reason.reason, reason.user_stack))
            return compile_graph(gm, example_inputs, mode, relaxed, report)

        before = dict(counters["graph_break"])
        torch._dynamo.reset()
        with inductor_config.patch(force_disable_caches=True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")  # that is what was asked for
            torch.compile(original, backend=flashsampling, dynamic=dynamic)(*args, **kwargs)
        # A break before the first tensor op leaves no graph to carry its place.
        new = [reason for reason, count in counters["graph_break"].items() if count > before.get(reason, 0)]
        report.graph_breaks += [_sentence(reason, ()) for reason in new if reason not in located]
        return report

    return explained


def _uncompiled(fn: Callable) -> Callable:
    """What ``fn`` was compiled from; ``fn`` itself if it was not."""
    if isinstance(fn, torch._dynamo.eval_frame.OptimizedModule):
        return fn._orig_mod
    if isinstance(fn, torch.nn.Module):
        if fn._compiled_call_impl is not None:
            return fn._call_impl  # after `module.compile()`, to call the module would run that code
        forward = fn.__dict__.get("forward")  # `module.forward = torch.compile(module.forward)`
        return getattr(forward, "_torchdynamo_orig_callable", fn)
    if inspect.ismethod(fn):
        # A compiled function in a class knows what it was made from, but not the object that it is called on.
        return types.MethodType(_uncompiled(fn.__func__), fn.__self__)
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def _compiled_with(fn: Callable) -> tuple[str | None, Mapping[str, Any] | None]:
    """The mode and the options that ``fn`` was compiled with for our backend, None for what torch does not tell."""
    if isinstance(fn, torch.nn.Module) and not isinstance(fn, torch._dynamo.eval_frame.OptimizedModule):
        fn = fn._compiled_call_impl or fn.forward
    fn = getattr(fn, "__func__", fn)
    callback = getattr(getattr(fn, "dynamo_ctx", None), "callback", None)
    if callback is None and inspect.isfunction(fn):
        callback = inspect.getclosurevars(fn).nonlocals.get("callback")
    while callback is not None and getattr(callback, "compiler_name", None) is None:
        # Dynamo's own wrappers of the backend; newer versions of torch call it by the first name.
        callback = getattr(callback, "_torchdynamo_orig_backend", getattr(callback, "_torchdynamo_orig_callable", None))
    if getattr(callback, "compiler_name", None) != "flashsampling":
        return None, None
    return callback.kwargs.get("mode"), callback.kwargs.get("options")


def _sentence(reason: str, stack: Sequence[Any]) -> str:
    """Dynamo's reason for a graph break, where it says what happened and what it needs, without its debugging notes."""
    text = " ".join(re.split(r"Developer debug context:|For more details about", reason)[0].split())
    if text.startswith("generic_jump"):
        text = "Data-dependent branching: a Python branch on the value of a tensor"
    what, *hints = re.split(r" Hint: ", re.sub(r"\.? Explanation: ", ": ", text))
    ours = [hint for word, hint in _HINTS.items() if word in reason or word in text]
    where = f"{stack[-1].filename}:{stack[-1].lineno} ({stack[-1].name}): " if stack else ""
    return where + ". What to do: ".join([what.rstrip("."), *(ours or hints)[:1]])


# What to do about the breaks that sampling code is known for.
_HINTS = {
    "Generator": "drop generator=: the compiled step follows torch.manual_seed; or call fs_inductor.linear_sample.",
    "Tensor.item()": "keep the value in a tensor: divide by a temperature tensor, choose with torch.where.",
    "Data-dependent branching": "choose with torch.where instead of a Python branch on a tensor.",
}
