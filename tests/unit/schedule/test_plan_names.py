"""Behaviour follows from the properties of a shape, never from the name of a plan."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import nestpipe
from nestpipe.schedule import PLANS, PlanOptions, Retrieval, plan, usable

SOURCES = Path(nestpipe.__file__).parent
ALLOWED = {SOURCES / "schedule" / "plans.py", SOURCES / "bench" / "torchrec_lab.py"}
"""Where plans get their names, and where a report reads the labels of its own rows."""


def names_in(node: ast.AST) -> set[str]:
    """Names of plans among the constants below a node."""
    constants = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    return {value for value in constants if isinstance(value, str) and value in PLANS}


def comparisons(tree: ast.AST) -> Iterator[int]:
    """Lines that compare something with the name of a plan."""
    for node in ast.walk(tree):
        # A set of names is there to be compared with.
        if isinstance(node, ast.Compare | ast.MatchValue | ast.Set) and names_in(node):
            yield node.lineno


def naming(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Those files, and their text, that have a plan's name as a string: few need be parsed."""
    quoted = re.compile(rf"""["']({"|".join(PLANS)})["']""")
    for path in paths:
        if quoted.search(text := path.read_text()):
            yield path, text


def test_no_module_compares_the_names_of_plans() -> None:
    found = [
        f"{path.relative_to(SOURCES)}:{line}"
        for path, text in naming(sorted(SOURCES.rglob("*.py")))
        if path not in ALLOWED
        for line in comparisons(ast.parse(text))
    ]
    assert not found, "make it a property of Shape: " + ", ".join(found)


@pytest.mark.parametrize(
    "line",
    [
        'if shape.plan == "serial": pass',
        'early = name in ("dual_buffer", "nested")',
        'AHEAD = frozenset({"nested"})',
    ],
)
def test_a_comparison_would_be_found(line: str) -> None:
    assert list(comparisons(ast.parse(line))) == [1]


def test_what_plans_are_told_apart_by() -> None:
    def names(wanted: str) -> set[str]:
        return {name for name in PLANS if getattr(plan(name).shape, wanted)}

    assert names("overlaps") == set(PLANS) - {"serial"}
    assert names("window_overlaps") == {"frozen_window", "nested"}
    assert names("retrieves_ahead") == {"stale_prefetch", "dual_buffer", "nested"}
    assert names("refreshes_ahead") == {"dual_buffer", "nested"}
    assert names("stale") == {"stale_prefetch"}


def test_options_that_a_plan_has_no_use_for_are_left_out() -> None:
    options = PlanOptions(micro_batches=2, speculative_rows=True, buffers=3)
    used = {name: usable(name, options) for name in PLANS}
    assert {name for name, of in used.items() if of.speculative_rows} == {"nested"}
    assert {name for name, of in used.items() if of.buffers == 3} == {"dual_buffer", "nested"}
    assert all(of.micro_batches == 2 for of in used.values())
    pooled = usable("nested", replace(options, retrieval=Retrieval.POOLED))
    assert (pooled.speculative_rows, pooled.buffers) == (False, 3)
