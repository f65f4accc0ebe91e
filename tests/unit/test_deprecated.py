"""Old names work for one release: each warns with the new one and does the same."""

import re
import subprocess
import sys
from dataclasses import MISSING, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import nestpipe
from nestpipe.cli.app import main
from nestpipe.config import build
from nestpipe.deprecated import (
    FIELDS,
    FLAGS,
    METRICS,
    NAMES,
    WORDS,
    RenamedWarning,
    current_flags,
    current_word,
    old_metrics,
)
from nestpipe.errors import ConfigError
from nestpipe.schedule import PlanOptions, from_text, nominal_trace, plan, to_text
from nestpipe.trace import read_chrome, write_chrome
from nestpipe.train import PipelineSettings, TrainSettings

ROOT = Path(nestpipe.__file__).parent
OLD_FIELDS = [(name, old) for name, renamed in FIELDS.items() for old in renamed]
COMMAND_WITH = {"--micros": ("draw", "3"), "--mirror-every": ("draw", "2"), "--early": ("draw",)}
"""A command that has each renamed flag, and a value for it."""


@cache
def homes() -> dict[str, str]:
    """Every class of the project and its module."""
    found: dict[str, str] = {}
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        names = re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        found |= dict.fromkeys(names, module.removesuffix(".__init__"))
    return found


def class_named(name: str) -> type:
    """The one class of that name in the project."""
    return getattr(import_module(homes()[name]), name)


@pytest.mark.parametrize(("name", "old"), OLD_FIELDS)
def test_an_old_key_sets_the_new_field(name: str, old: str):
    cls, new = class_named(name), FIELDS[name][old]
    field = next(field for field in fields(cls) if field.name == new)
    assert field.default is not MISSING
    with pytest.warns(RenamedWarning, match=rf"section\.{old} is now called section\.{new}"):
        made = build(cls, {old: field.default}, "section")
    assert made == build(cls, {new: field.default})
    with pytest.raises(ConfigError, match=f"old name of {new}; remove {old}"):
        build(cls, {old: field.default, new: field.default})


@pytest.mark.parametrize(("name", "old"), OLD_FIELDS)
def test_an_old_argument_sets_the_new_field(name: str, old: str):
    cls, new = class_named(name), FIELDS[name][old]
    default = next(field.default for field in fields(cls) if field.name == new)
    with pytest.warns(RenamedWarning, match=f"{name}.{old} is now called {new}"):
        made = cls(**{old: default})
    assert made == cls(**{new: default})
    with pytest.warns(RenamedWarning, match=f"{name}.{old} is now called {new}"):
        assert getattr(made, old) == default


def test_an_old_key_may_be_set_over_a_file_that_has_the_new_one_and_the_other_way_round():
    settings = TrainSettings(pipeline=PipelineSettings(comm_dtype="bfloat16"))
    with pytest.warns(RenamedWarning, match=r"pipeline\.wire is now called pipeline\.comm_dtype"):
        over_new = build(
            TrainSettings,
            {"pipeline": {"comm_dtype": "float32"}},
            overrides=["pipeline.wire=bfloat16"],
        )
    with pytest.warns(RenamedWarning, match=r"pipeline\.wire is now called pipeline\.comm_dtype"):
        over_old = build(
            TrainSettings,
            {"pipeline": {"wire": "float32"}},
            overrides=["pipeline.comm_dtype=bfloat16"],
        )
    assert over_new == over_old == settings


def test_an_old_argument_of_replace_wins_over_the_copied_one():
    with pytest.warns(RenamedWarning):
        made = replace(PipelineSettings(), wire="bfloat16")  # type: ignore[call-arg]
    assert made == PipelineSettings(comm_dtype="bfloat16")


def test_a_name_that_never_was_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        getattr(PipelineSettings(), "colour")  # noqa: B009 - pyright knows no such field
    with pytest.raises(AttributeError, match=r"nestpipe\.train.*no attribute 'Colour'"):
        getattr(import_module("nestpipe.train"), "Colour")  # noqa: B009 - nor such a name


@pytest.mark.parametrize("old", FLAGS)
def test_an_old_flag_does_what_the_new_one_does(old: str, capsys: pytest.CaptureFixture[str]):
    command, *value = COMMAND_WITH[old]
    with (
        pytest.warns(RenamedWarning, match=f"{old} is now called {FLAGS[old]}"),
        pytest.raises(SystemExit, match="0"),
    ):
        main([command, "nested", old, *value])
    said = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main([command, "nested", FLAGS[old], *value])
    assert said == capsys.readouterr().out


def test_a_value_stays_with_its_old_flag_and_what_follows_two_dashes_is_left_alone():
    with pytest.warns(RenamedWarning):
        assert current_flags(["draw", "--micros=4"]) == ["draw", "--micro-batches=4"]
    assert current_flags(["draw", "--", "--micros"]) == ["draw", "--", "--micros"]


def test_the_command_line_tells_an_old_name_in_one_line():
    command = [sys.executable, "-m", "nestpipe", "check", "nested", "--micros", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wanted = "warning: --micros is now called --micro-batches; the next release drops the old name"
    assert done.stderr.strip() == wanted


@pytest.mark.parametrize("old", NAMES)
def test_an_old_python_name_is_the_new_one(old: str):
    module, _, name = old.rpartition(".")
    home, _, now = NAMES[old].rpartition(".")
    with pytest.warns(RenamedWarning, match=f"{old} is now called {NAMES[old]}"):
        found = getattr(import_module(module), name)
    assert found is getattr(import_module(home), now)


@pytest.mark.parametrize("old", METRICS)
def test_a_renamed_metric_is_found_under_both_names(old: str):
    new = METRICS[old]
    assert old in old_metrics(new)
    assert any(new in path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py"))


@pytest.mark.parametrize("old", WORDS)
def test_an_old_word_of_a_schedule_file_reads_as_the_new_one(old: str):
    with pytest.warns(RenamedWarning, match=f"'{old}' is now called '{WORDS[old]}'"):
        assert current_word(old) == WORDS[old]


def test_old_facts_of_schedule_and_trace_files_are_read(tmp_path: Path):
    schedule = plan("nested", PlanOptions(micro_batches=2, merge_every=2)).schedule(3)
    old_text = to_text(schedule).replace("micro_batches", "micros")
    with pytest.warns(RenamedWarning, match="'micros' is now called 'micro_batches'"):
        assert from_text(old_text) == schedule
    file = tmp_path / "old.json"
    write_chrome(nominal_trace(schedule), file)
    file.write_text(file.read_text().replace("micro_batches", "micros"))
    with pytest.warns(RenamedWarning, match="'micros' is now called 'micro_batches'"):
        assert read_chrome(file).facts["micro_batches"] == 2


def test_no_new_name_is_itself_an_old_one():
    for table in (FLAGS, NAMES, METRICS, WORDS, *FIELDS.values()):
        assert not table.keys() & set(table.values())
