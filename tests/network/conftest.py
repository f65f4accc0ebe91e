import pytest

from nestpipe.bench.hosts import why_not


def pytest_collection_modifyitems(items):
    """These tests need hosts of their own; where they cannot be had, they say why and skip."""
    reason = why_not()
    if reason is None:
        return
    for item in items:
        if "tests/network" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason=reason))
