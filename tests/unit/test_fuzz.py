"""The fuzzer finds what it should; readers take some of its examples, and those once found."""

from __future__ import annotations

import faulthandler
import os
import random
from pathlib import Path

import pytest

from nestpipe.errors import DataError
from support.examples import num_examples
from support.tools import load_tool

fuzz = load_tool("fuzz")
FOUND = [
    ("parquet", 21),  # a column's name that is no text
    ("parquet", 29),  # two columns of one name
    ("movielens", 6647),  # a carriage return in the header
    ("movielens", 7299),  # a line break in the name of a column
    ("parquet", 5415),  # damaged statistics, at which Arrow aborts
    ("parquet", 2536),  # fewer rows of a column than of its row group, with rows held out
    ("parquet", 6630),  # the same, in a column of lists
    ("parquet", 42552),  # a damaged description of a column, at which Arrow aborts
    ("manifest", 5035),  # a model's config that is no section
    ("histories", 5563),  # lists of lists
    ("histories", 6055),  # a zip file of another time
    ("histories", 6447),  # an empty file
    ("histories", 7465),  # a column's name that is no text
    ("manifest", 35),  # first rows of a table that is not there
    ("histories", 36),  # users that are no list
]


@pytest.mark.parametrize("name", fuzz.READERS)
def test_a_reader_takes_what_is_almost_right(name: str):
    assert fuzz.fuzz(name, 600.0, 100, num_examples("fuzz")) == []


@pytest.mark.parametrize(("name", "seed"), FOUND)
def test_what_was_found_once_is_mended(name: str, seed: int):
    assert fuzz.fuzz(name, 600.0, seed, 1) == []


def test_an_exception_that_is_not_for_people_is_found(monkeypatch: pytest.MonkeyPatch):
    def reader(rng: random.Random, folder: Path) -> None:
        if rng.random() < 0.5:
            raise DataError("a sentence; do something")
        raise KeyError(rng.random())

    monkeypatch.setitem(fuzz.READERS, "broken", reader)
    (found,) = fuzz.fuzz("broken", 600.0, 0, 20)
    assert "KeyError" in found


def test_a_crash_is_found_and_the_others_are_still_tried(monkeypatch: pytest.MonkeyPatch):
    def reader(rng: random.Random, folder: Path) -> None:
        if rng.random() < 0.2:
            faulthandler.disable()  # it is meant, so nobody needs the stack
            os.abort()

    monkeypatch.setitem(fuzz.READERS, "broken", reader)
    (found,) = fuzz.fuzz("broken", 600.0, 0, 20)
    assert "ended with -6" in found
