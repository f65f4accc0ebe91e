"""Scripts of the folder `tools`, as modules that tests can call."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load_tool(name: str) -> ModuleType:
    """The script of that name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.modules[name] = tool  # where its dataclasses look for their types
    spec.loader.exec_module(tool)
    return tool
