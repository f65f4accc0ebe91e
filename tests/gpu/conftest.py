import pytest
import torch

# Autograd's thread has no CUDA context before its first kernel; where that is cuBLAS's, torch makes
# one and says so, once per process, in whichever test comes first.
NO_CONTEXT_YET = "ignore:Attempting to run cuBLAS, but there was no current CUDA context"


def pytest_collection_modifyitems(items):
    """These tests need a GPU; without one they say so and are skipped."""
    for item in items:
        if "tests/gpu" not in item.nodeid:
            continue
        item.add_marker(pytest.mark.filterwarnings(NO_CONTEXT_YET))
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU on this machine"))
