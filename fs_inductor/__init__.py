"""FlashSampling for PyTorch: ``torch.compile(step, backend="flashsampling")`` samples without writing the logits.

Importing this package is not needed for the backend: torch finds it by its entry point.
"""

from typing import Any

from .functional import linear_argmax, linear_sample
from .options import Options

__all__ = ["NotFusedError", "Options", "explain", "linear_argmax", "linear_sample"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # These two need the compiler, which takes seconds to import; the plain functions do not.
    if name == "explain":
        from .explaining import explain

        return explain
    if name == "NotFusedError":
        from .report import NotFusedError

        return NotFusedError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
