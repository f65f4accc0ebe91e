"""Schedules, the simulator and the command line work on a machine that has no torch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import nestpipe
from support.warm_python import REAL

ROOT = Path(nestpipe.__file__).parent
WITHOUT_TORCH = ["errors", "deprecated", "config", "trace", "dashboard", "schedule", "sim", "cli"]

REFUSE_TORCH = """
import sys

class RefuseTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch was imported")

sys.meta_path.insert(0, RefuseTorch())
"""


def modules_of(package: str) -> list[str]:
    """Every module of a package of the project, e.g. `nestpipe.sim.clock`."""
    if not (ROOT / package).is_dir():
        return [f"nestpipe.{package}"]
    files = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / package).rglob("*.py")]
    names = {".".join(["nestpipe", *file.parts]).removesuffix(".__init__") for file in files}
    return sorted(names)


def import_without_torch(modules: list[str]) -> subprocess.CompletedProcess[str]:
    lines = [REFUSE_TORCH, *(f"import {module}" for module in modules)]
    return subprocess.run(
        [REAL, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_every_module_imports_without_torch(package: str):
    result = import_without_torch(modules_of(package))
    assert result.returncode == 0, result.stderr


def test_the_modules_are_found():
    assert {"nestpipe.schedule", "nestpipe.schedule.schedule"} <= set(modules_of("schedule"))
    assert modules_of("errors") == ["nestpipe.errors"]


def test_an_import_of_torch_would_be_noticed():
    result = import_without_torch(["torch"])
    assert result.returncode == 1
    assert "torch was imported" in result.stderr
