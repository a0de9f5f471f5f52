"""FlashSampling for PyTorch: ``torch.compile(step, backend="flashsampling")`` samples without writing the logits.

Importing this package is not needed for the backend: torch finds it by its entry point.
"""

from .explaining import explain
from .functional import linear_argmax, linear_sample
from .options import Options
from .report import NotFusedError

__all__ = ["NotFusedError", "Options", "explain", "linear_argmax", "linear_sample"]
__version__ = "0.1.0"
