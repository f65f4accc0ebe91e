"""The tree stays one that a reader finds their way through; `tools/structure.py` has the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from support.tools import load_tool

structure = load_tool("structure")
KEPT = (
    structure.too_many_files,
    structure.crowded_folders,
    structure.short_modules,
    structure.repeated_class_names,
    structure.wide_markdown,
    structure.missing_files,
)


@pytest.mark.parametrize("rule", KEPT, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_to(rule: Callable[[], Iterator[str]]):
    assert list(rule()) == []
