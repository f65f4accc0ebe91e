"""The list of mutants is about the code as it is; `make mutants` runs them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.tools import ROOT, load_tool

mutants = load_tool("mutants")
EVERY = mutants.read_mutants()


@pytest.mark.parametrize("mutant", EVERY, ids=lambda one: one.name)
def test_a_mutant_changes_a_text_that_is_there_once(mutant):
    assert mutant.old != mutant.new
    code = mutant.file(ROOT).read_text().replace(mutant.old, mutant.new)
    compile(code, mutant.name, "exec")


@pytest.mark.parametrize("mutant", EVERY, ids=lambda one: one.name)
def test_a_mutant_has_tests_that_must_notice_or_a_reason_why_none_can(mutant):
    assert bool(mutant.tests) != bool(mutant.equivalent)
    assert mutant.why
    for test in mutant.tests:
        assert (ROOT / test.split("::")[0]).exists()


def test_a_test_that_notices_kills_and_one_that_does_not_is_survived(tmp_path: Path):
    source = tmp_path / "src/nestpipe/sums.py"
    source.parent.mkdir(parents=True)
    source.write_text("TOTAL = 1 + 2\n")
    read = "from pathlib import Path\ndef test_total():\n    text = Path('{}').read_text()\n"
    (tmp_path / "test_close.py").write_text(read.format(source) + "    assert '+' in text\n")
    (tmp_path / "test_blind.py").write_text(read.format(source) + "    assert 'TOTAL' in text\n")
    mutant = mutants.Mutant(name="minus", old="1 + 2", new="1 - 2", why="", tests=())
    told = [
        mutants.verdict(replace(mutant, tests=(test,)), tmp_path)
        for test in ("test_close.py", "test_blind.py", "test_missing.py")
    ]
    assert told == ["killed", "survived", "not run"]
    assert source.read_text() == "TOTAL = 1 + 2\n"
