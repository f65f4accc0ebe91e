"""The pages that `tools/trial.py` runs hold what it needs: files, and commands that exist."""

import shlex
from importlib import import_module
from pathlib import Path

import pytest

from nestpipe.cli.app import command_tree
from nestpipe.train.job import JobConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("first_hour.md", "first_run.md", "insteval.md")


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return import_module("trial")


@pytest.mark.parametrize("name", PAGES)
def test_commands_of_a_page_exist_and_name_its_files(trial, name: str):
    page = (ROOT / "docs" / name).read_text()
    files, commands = trial.files(page), list(trial.commands(page))
    known = command_tree().commands
    assert len(commands) > 5
    for command in commands:
        program, *words = shlex.split(command.rstrip("&"))
        if program == "nestpipe":
            assert words[0] in known, command
        for word in words:
            if word.endswith((".toml", ".py")):
                assert word in files, f"{name} runs {word} and does not show it"


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_shows_parses(trial, name: str):
    import tomllib

    from nestpipe.config import build

    for file, text in trial.files((ROOT / "docs" / name).read_text()).items():
        if file.endswith(".toml"):
            build(JobConfig, tomllib.loads(text))
        else:
            compile(text, file, "exec")
