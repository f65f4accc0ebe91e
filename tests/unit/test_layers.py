"""Imports point downwards only, and the packages that must do without torch do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import nestpipe

LAYER = {
    "cli": 7,
    "bench": 6,
    **dict.fromkeys(["loadtest", "planner"], 5),
    **dict.fromkeys(["train", "serve"], 4),
    **dict.fromkeys(["sim", "runtime", "data", "embedding", "models"], 3),
    **dict.fromkeys(["schedule", "batch", "checkpoint", "comm", "kernels", "dashboard"], 2),
    **dict.fromkeys(["config", "trace", "jagged"], 1),
    **dict.fromkeys(["deprecated", "errors"], 0),
}
WITHOUT_TORCH = {"schedule", "sim", "config", "trace", "dashboard", "deprecated", "errors"}
LATE_TORCH = {"cli"}
"""May import torch, but only inside a function: `nestpipe --help` must not wait for it."""


@dataclass(frozen=True, slots=True)
class Import:
    """A module named by an import statement, and whether it is imported only when called."""

    module: str
    line: int
    late: bool


def complaints(root: Path) -> list[str]:
    """One sentence for each import below `root`, the package folder, that should not be."""
    return [text for path in sorted(root.rglob("*.py")) for text in _complaints_of(path, root)]


def _complaints_of(path: Path, root: Path) -> Iterator[str]:
    inside = path.relative_to(root)
    importer = inside.parts[0].removesuffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for found in imports(tree, package=(root.name, *inside.parent.parts)):
        place = f"{root.name}/{inside.as_posix()}:{found.line}"
        if reason := _reason(importer, found, root.name):
            yield f"{place} imports {found.module}, but {reason}"
    if importer not in LAYER and importer not in ("__init__", "__main__"):
        yield f"{root.name}/{inside.as_posix()} is in no layer; add {importer} to the table"


def _reason(importer: str, found: Import, project: str) -> str | None:
    """Why the import is wrong, or None."""
    top, *below = found.module.split(".")
    if top == "torch" and importer in WITHOUT_TORCH:
        return f"{importer} does without torch"
    if top == "torch" and importer in LATE_TORCH and not found.late:
        return f"{importer} may import torch only inside a function"
    if top != project:
        return None
    if importer == "__init__":
        # Names for type checkers are not imported when the program runs.
        return None if found.late else "the top of the project imports nothing of it"
    imported = below[0] if below else "__init__"
    if imported in ("__init__", importer) or importer not in LAYER or imported not in LAYER:
        return None  # a package that is in no layer gets its own sentence
    if LAYER[imported] > LAYER[importer]:
        return f"{imported} (layer {LAYER[imported]}) is above {importer} ({LAYER[importer]})"
    if LAYER[imported] == LAYER[importer]:
        return f"{imported} is beside {importer} (layer {LAYER[importer]})"
    return None


def imports(tree: ast.AST, package: tuple[str, ...], late: bool = False) -> Iterator[Import]:
    """Every import below `tree`, also those in functions and branches."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, late)
        elif isinstance(node, ast.ImportFrom):
            for module in _modules(node, package):
                yield Import(module, node.lineno, late)
        else:
            called = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, package, late or called or _for_types_only(node))


def _for_types_only(node: ast.AST) -> bool:
    test = node.test if isinstance(node, ast.If) else None
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _modules(node: ast.ImportFrom, package: tuple[str, ...]) -> list[str]:
    """What `from x import y` names: `x`, or `nestpipe.y` where `x` is the project itself."""
    above = package[: len(package) - node.level + 1] if node.level else ()
    module = ".".join([*above, *([node.module] if node.module else [])])
    if module != package[0]:
        return [module]
    return [f"{module}.{alias.name}" if alias.name in LAYER else module for alias in node.names]


def test_imports_point_downwards():
    root = Path(nestpipe.__file__).parent
    found = complaints(root)
    assert not found, "\n" + "\n".join(found)


def plant(folder: Path, file: str, source: str) -> Path:
    """A project folder that holds one file."""
    path = folder / "nestpipe" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return folder / "nestpipe"


@pytest.mark.parametrize(
    ("file", "source", "sentence"),
    [
        (
            "schedule/schedule.py",
            "x = 1\nfrom nestpipe.sim.clock import Clock",
            "nestpipe/schedule/schedule.py:2 imports nestpipe.sim.clock, "
            "but sim (layer 3) is above schedule (2)",
        ),
        (
            "trace/span.py",
            "import nestpipe.config",
            "nestpipe/trace/span.py:1 imports nestpipe.config, "
            "but config is beside trace (layer 1)",
        ),
        (
            "schedule/schedule.py",
            "from nestpipe import sim",
            "nestpipe/schedule/schedule.py:1 imports nestpipe.sim, "
            "but sim (layer 3) is above schedule (2)",
        ),
        (
            "schedule/plans/nested.py",
            "from ...sim import clock",
            "nestpipe/schedule/plans/nested.py:1 imports nestpipe.sim, "
            "but sim (layer 3) is above schedule (2)",
        ),
        (
            "errors.py",
            "def f():\n    from nestpipe.trace import Span",
            "nestpipe/errors.py:2 imports nestpipe.trace, but trace (layer 1) is above errors (0)",
        ),
        (
            "sim/clock.py",
            "def f():\n    import torch.nn",
            "nestpipe/sim/clock.py:2 imports torch.nn, but sim does without torch",
        ),
        (
            "cli/app.py",
            "try:\n    from torch import nn\nexcept ImportError:\n    pass",
            "nestpipe/cli/app.py:2 imports torch, but cli may import torch only inside a function",
        ),
        (
            "helpers/text.py",
            "import re",
            "nestpipe/helpers/text.py is in no layer; add helpers to the table",
        ),
        (
            "__init__.py",
            "from nestpipe.errors import ConfigError",
            "nestpipe/__init__.py:1 imports nestpipe.errors, "
            "but the top of the project imports nothing of it",
        ),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, file: str, source: str, sentence: str):
    root = plant(tmp_path, file, source)
    assert complaints(root) == [sentence]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cli/app.py", "def train():\n    import torch"),
        ("cli/app.py", "import torchlight"),
        ("runtime/lanes.py", "import torch\nfrom nestpipe.schedule import Op"),
        ("schedule/plans.py", "from nestpipe import __version__, errors"),
        (
            "schedule/plans.py",
            "from . import op\nfrom .op import Op\nimport nestpipe.schedule.schedule",
        ),
    ],
)
def test_what_is_allowed_is_let_through(tmp_path: Path, file: str, source: str):
    assert complaints(plant(tmp_path, file, source)) == []
