"""Functions written in Triton as functions of Gluon, so that kernels in either language share them.

Gluon is Triton with layouts in the open, and compiles what Triton functions call but for a few constructors, which
take a layout. Those get one here that Gluon infers from what the value meets.
"""

from __future__ import annotations

import threading
import types

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

# What is `tl` to a twin. It bears Gluon's name, since a kernel may call what modules of known names hold.
_language = types.ModuleType(gl.__name__)
_language.__dict__.update(vars(tl))
for _name in ("arange", "full", "zeros", "zeros_like"):
    setattr(_language, _name, getattr(gl, _name))

_lock = threading.RLock()


def instead_of(fn: JITFunction):
    """What twins call where the Triton function calls `fn`."""

    def register(other: JITFunction) -> JITFunction:
        fn.twin = other
        return other

    return register


def twin(fn: JITFunction) -> JITFunction:
    """`fn` for Gluon, with twins of what it calls."""
    if triton.knobs.runtime.interpret:  # where nothing of Gluon runs
        return fn
    f = fn.fn
    if fn.is_gluon() or f.__module__.startswith("triton."):  # serves both languages
        return fn
    with _lock:
        if not hasattr(fn, "twin"):
            scope = dict(f.__globals__)
            other = types.FunctionType(f.__code__, scope, f.__name__, f.__defaults__, f.__closure__)
            other.__kwdefaults__, other.__annotations__ = f.__kwdefaults__, f.__annotations__
            other.__qualname__, other.__doc__ = f.__qualname__, f.__doc__
            fn.twin = gluon.jit(other)  # before the names below, of which one may be its own
            for name in f.__code__.co_names:
                if isinstance(scope.get(name), JITFunction):
                    scope[name] = twin(scope[name])
            scope.update((name, _language) for name, value in scope.items() if value is tl)
        return fn.twin
