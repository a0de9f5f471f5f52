"""Why a site was left alone: the exception that recognition and checks raise, with a stable code."""

from __future__ import annotations

from torch.fx import Node

# Stable codes: programs may match on them. README.md has the table with hints.
CODES = (
    "NO_LINEAR",
    "LOGITS_ESCAPE",
    "PROBS_ESCAPE",
    "LOGPROBS",
    "NUM_SAMPLES",
    "EPILOGUE_OP",
    "SAMPLING_DIM",
    "DTYPE",
    "LAYOUT",
    "NOISE",
    "SMALL_VOCAB",
    "NO_GAIN",
    "FALLBACK_RANDOM",
    "DEVICE",
    "TP_LAYOUT",
    "TOP_K",
    "TOP_P",
    "MIN_P",
    "QUANTIZED",
    "INTERNAL",
)


class Miss(Exception):
    """A sink that is not fused: ``code`` (of CODES), ``reason`` and ``hint`` (sentences), ``node`` (the culprit)."""

    def __init__(self, code: str, reason: str, hint: str, node: Node | None = None):
        assert code in CODES, code
        super().__init__(reason)
        self.code, self.reason, self.hint, self.node = code, reason, hint, node
