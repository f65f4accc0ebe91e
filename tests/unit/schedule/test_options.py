"""Every option of a plan is defined once: config keys, flags and text follow from that."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from nestpipe.cli.app import command_tree
from nestpipe.errors import PlanError
from nestpipe.schedule import (
    Exchange,
    Merge,
    PlanOptions,
    Retrieval,
    Shape,
    from_text,
    plan,
    to_text,
)
from nestpipe.train.config import ParallelSettings, PipelineSettings

DEFINED = {known.name: known for known in fields(PlanOptions)}
UNUSUAL: dict[str, Any] = {
    "micro_batches": 3,
    "retrieval": Retrieval.NEW,
    "exchange": Exchange.WINDOW,
    "stages": 2,
    "speculative_rows": True,
    "buffers": 3,
    "merge": Merge.EXACT,
    "merge_every": 1,
}


def test_config_sections_hold_every_option_and_define_none_anew():
    keys = {k.name: k for cls in (PipelineSettings, ParallelSettings) for k in fields(cls)}
    assert keys.keys() >= DEFINED.keys()
    for name, known in DEFINED.items():
        assert keys[name].metadata == known.metadata
        assert type(keys[name].default) is type(known.default)


@pytest.mark.parametrize("command", ["draw", "check", "simulate"])
def test_commands_have_a_flag_for_every_option_with_its_help(command: str):
    flags = {flag.name: flag for flag in command_tree().commands[command].params}
    assert flags.keys() >= DEFINED.keys()
    for name, known in DEFINED.items():
        assert flags[name].opts == [f"--{name.replace('_', '-')}"]
        assert flags[name].help == known.metadata["help"]


def test_a_shape_has_every_option_and_its_text_names_each_that_is_not_as_usual():
    assert UNUSUAL.keys() == DEFINED.keys()
    shape = replace(plan("nested").shape, **UNUSUAL)
    schedule = replace(plan("nested").schedule(3), shape=shape)
    words = [line.partition(" ")[0] for line in to_text(schedule).split("\n\n")[0].splitlines()]
    assert set(words) >= UNUSUAL.keys()
    assert from_text(to_text(schedule)).shape == shape


def test_a_plan_takes_its_options_into_its_shape():
    options = replace(PlanOptions(**UNUSUAL), speculative_rows=False)
    shape = plan("nested", options).shape
    assert {name: getattr(shape, name) for name in DEFINED} == {
        name: getattr(options, name) for name in DEFINED
    }


def test_every_option_has_help_and_only_numbers_have_bounds():
    for known in DEFINED.values():
        assert known.metadata["help"].endswith(".")
        counted = isinstance(known.default, int) and not isinstance(known.default, bool)
        assert (known.metadata["least"] is not None) == counted


def test_words_stand_for_enums_and_unknown_ones_are_refused():
    words: dict[str, Any] = {"retrieval": "new", "exchange": "window"}
    made = PlanOptions(**words)
    assert made.retrieval is Retrieval.NEW
    assert made.exchange is Exchange.WINDOW
    with pytest.raises(PlanError, match="retrieval is 'old'; use one of whole, new, pooled"):
        PlanOptions(retrieval="old")  # pyright: ignore[reportArgumentType]


def test_a_shape_may_have_one_buffer_where_an_option_may_not():
    assert isinstance(plan("serial").shape, Shape)
    assert plan("serial").shape.buffers == 1
    with pytest.raises(PlanError, match="buffers is 1; use 2 or 3"):
        PlanOptions(buffers=1)
