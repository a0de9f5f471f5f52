"""What all GPU tests share."""

import pytest

from fs_inductor import gain


@pytest.fixture(autouse=True)
def exact_float32_fuses(monkeypatch):
    """Float32 heads are tested though they do not pay on a GPU."""
    monkeypatch.setitem(gain.RULES, "cuda, float32", gain.RULES["cuda"])
