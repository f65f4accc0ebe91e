import pytest


def pytest_collection_modifyitems(items):
    """These tests make hosts of their own, of network namespaces."""
    for item in items:
        if "tests/network" in item.nodeid:
            item.add_marker(pytest.mark.needs("ip", "tc", "unshare", "nsenter", "taskset"))
