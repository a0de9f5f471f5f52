"""Shared test set-up: Triton's interpreter where there is no GPU, and the `gpu` marker."""

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton reads this when a kernel is defined, so it has to be set before any kernel module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(skip)
