"""What all GPU tests share."""

import pytest

from fs_inductor import gain


@pytest.fixture(autouse=True)
def exact_float32_fuses(monkeypatch):
    """Float32 heads are tested though they do not pay on a GPU."""
    for kind in ("cuda, float32", "cuda, tf32"):
        monkeypatch.setitem(gain.RULES, kind, gain.RULES["cuda"])
