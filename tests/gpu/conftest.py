import pytest
import torch


def pytest_collection_modifyitems(items):
    """These tests need a GPU; without one they say so and are skipped."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch finds no GPU on this machine")
    for item in items:
        if "tests/gpu" in item.nodeid:
            item.add_marker(skip)
