"""`model.kind = "package.module:factory"`: what a factory gets, and each way in which it fails."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from nestpipe.errors import ConfigError, NestpipeError
from nestpipe.models.protocol import make_own

MODEL = """
    from dataclasses import dataclass

    from torch import nn

    from nestpipe import Table


    class Model(nn.Module):
        def __init__(self, *given):
            super().__init__()
            self.given = given

        def sparse_keys(self, batch):
            return {}

        def dense(self, rows, batch):
            raise NotImplementedError


    class WithTables(Model):
        def tables(self):
            return [Table(name="items", dim=4)]


    @dataclass(frozen=True)
    class Config:
        width: int
        rate: float = 0.5


    TABLES = [Table(name="items", dim=4)]
"""
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module into the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    written: list[str] = []

    def go(text: str) -> str:
        name = f"own_{tmp_path.name}_{len(written)}"
        (tmp_path / f"{name}.py").write_text(dedent(MODEL) + dedent(text))
        written.append(name)
        return name

    yield go
    for name in written:
        sys.modules.pop(name, None)


def test_a_factory_gets_the_section_as_a_dict_and_the_columns(write: Write):
    name = write("def make(config, columns):\n    return Model(config, columns), TABLES\n")
    model, tables = make_own(f"{name}:make", {"a": 1}, ("column",))
    assert model.given == ({"a": 1}, ("column",))
    assert [table.name for table in tables] == ["items"]


def test_a_factory_gets_the_dataclass_that_it_declares(write: Write):
    name = write("def make(config: Config):\n    return WithTables(config)\n")
    model, _ = make_own(f"{name}:make", {"width": 3}, ())
    given: Any = model.given
    assert (given[0].width, given[0].rate) == (3, 0.5)


def test_a_class_is_a_factory_and_one_without_parameters_is_enough(write: Write):
    name = write("class Bare(WithTables):\n    def __init__(self):\n        super().__init__()\n")
    model, _ = make_own(f"{name}:Bare", {}, ())
    assert type(model).__name__ == "Bare"


MISTAKES = {
    "no name": ("", ":make", {}, "write it as 'package.module:factory'"),
    "no module": ("", "not_there:make", {}, "there is no module 'not_there' in the working"),
    "no package": ("", "not.there:make", {}, "there is no module 'not' in the working"),
    "no attribute": ("def make(): ...", "{}:maek", {}, "has no maek; did you mean make?"),
    "no function": ("make = 3", "{}:make", {}, "make is a int; name a function or a class"),
    "imports what is missing": (
        "import not_there_either",
        "{}:make",
        {},
        "imports not_there_either, which is not installed",
    ),
    "fails on import": ("1 / 0", "{}:make", {}, "cannot be imported (ZeroDivisionError"),
    "syntax": ("def make(:", "{}:make", {}, "cannot be imported (SyntaxError"),
    "fails": (
        "def make(config):\n    return config['width']",
        "{}:make",
        {},
        "failed (KeyError: 'width', own_",
    ),
    "returns nothing": ("def make(): ...", "{}:make", {}, "returned None; return an nn.Module"),
    "returns a number": ("def make(): return 3", "{}:make", {}, "returned a int; return an nn.M"),
    "no methods": (
        "def make(): return nn.Linear(1, 1)",
        "{}:make",
        {},
        "returned a Linear without the methods `sparse_keys(batch)`",
    ),
    "no tables": ("def make(): return Model()", "{}:make", {}, "a Model and no tables"),
    "wrong tables": (
        "def make(): return Model(), ['items']",
        "{}:make",
        {},
        "hold a str; list nestpipe.Table(",
    ),
    "unknown key": (
        "def make(config: Config): ...",
        "{}:make",
        {"wdith": 3},
        "unknown key model.config.'wdith'; did you mean width?",
    ),
    "missing key": (
        "def make(config: Config): ...",
        "{}:make",
        {},
        "missing key model.config.width",
    ),
    "wrong type": (
        "def make(config: Config): ...",
        "{}:make",
        {"width": "wide"},
        "model.config.width is 'wide'; give a whole number",
    ),
    "config for nobody": (
        "def make(): return WithTables()",
        "{}:make",
        {"width": 3},
        "takes no parameter; give it one",
    ),
    "too many parameters": ("def make(a, b, c): ...", "{}:make", {}, "needs 3 parameters; take"),
    "unknown annotation": (
        "def make(config: 'Cnofig'): ...",
        "{}:make",
        {},
        "annotations of own_",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_one_sentence(write: Write, mistake: str):
    text, kind, config, told = MISTAKES[mistake]
    name = write(text)
    with pytest.raises(NestpipeError) as caught:
        make_own(kind.format(name), config, ())
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


def test_a_config_without_a_model_of_ones_own_is_refused():
    from nestpipe.train.config import ModelConfig

    with pytest.raises(ConfigError, match="config has width, but kind is 'dlrm'"):
        ModelConfig(kind="dlrm", config={"width": 3})
