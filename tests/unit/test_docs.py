"""The documents say what the program does: their code runs, their generated parts are current."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from nestpipe.cli.app import command_tree, main
from nestpipe.config import build
from nestpipe.train.job import JobConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
EXPERIMENTS = sorted((ROOT / "docs/experiments").glob("20*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def blocks(language: str):
    return [
        pytest.param(match[2], id=f"{page.name}:{page.read_text()[: match.start()].count(chr(10))}")
        for page in PAGES
        for match in BLOCK.finditer(page.read_text())
        if match[1] == language
    ]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_in_the_docs_runs(code, capsys):
    exec(compile(code, "docs", "exec"), {})
    printed = capsys.readouterr().out
    for promised in re.findall(r"^# (`.*)$", code, re.MULTILINE):
        assert promised in printed


@pytest.mark.parametrize("code", blocks("bash"))
def test_commands_in_the_docs_run(code, capsys):
    for line in code.strip().splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "nestpipe"
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0, line
        assert capsys.readouterr().out


FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands_shown(text: str) -> Iterator[str]:
    """Every command line of `nestpipe` on a page, in blocks and in sentences."""
    for block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            before, found, command = line.partition("nestpipe ")
            if found and re.fullmatch(r"\s*|(\$|node\$) |.*-m ", before):
                yield found + command
    told = FENCE.sub("", text).replace("\n", " ")
    yield from re.findall(r"`(nestpipe [^`]+)`", told)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_shown_have_the_options_they_name(page):
    for line in commands_shown(page.read_text()):
        named = command_tree()
        words = shlex.split(line, comments=True)[1:]
        while words and words[0] in getattr(named, "commands", {}):
            named = named.commands[words.pop(0)]
        known = {flag for option in named.params for flag in (*option.opts, "--help")}
        known |= {flag for option in named.params for flag in option.secondary_opts}
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= known, f"{line}: {sorted(flags - known)}"
        assert not hasattr(named, "commands") or not words or words[0].startswith("-"), line


def test_commands_that_are_shown_set_keys_that_exist():
    known = set(
        re.findall(r"^- `([\w.]+)` \(", (ROOT / "docs/config.md").read_text(), re.MULTILINE)
    )
    jobs = ("train", "plan", "verify", "eval")
    lines = [line for page in PAGES for line in commands_shown(page.read_text())]
    found = [
        (line, key)
        for line in lines
        if line.split()[1] in jobs
        for key in re.findall(r"--set ([\w.]+)=", line)
        if not key.startswith("model.config.")  # of a model of one's own
    ]
    assert len(lines) > 200
    assert len(found) > 20
    wrong = [(line, key) for line, key in found if key not in known]
    mistake = "pipeline.micro_batch"  # which docs/first_hour.md makes, to show the sentence
    assert {key for _, key in wrong} == {mistake}, wrong


@pytest.mark.parametrize("text", blocks("toml"))
def test_configs_that_are_shown_are_taken(text):
    sections = tomllib.loads(text)
    known = {known.name for known in fields(JobConfig)}
    if sections.keys() <= known:
        build(JobConfig, sections)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked to as."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", EXPERIMENTS, ids=lambda page: page.stem)
def test_an_experiment_asks_decides_and_says_how_to_repeat_it(page):
    lines = page.read_text().splitlines()
    assert re.fullmatch(r"# .*\?", lines[0]), "the title is a question"
    for fact in ("Decision", "Command", "Machine", "Commit"):
        assert any(line.startswith(f"- **{fact}**: ") for line in lines), f"no {fact.lower()}"


def test_generated_pages_are_current(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    for name, text in import_module("make_docs").generated().items():
        current = (ROOT / "docs" / name).read_text()
        assert current == text, f"docs/{name} is out of date; run `make docs`"


def test_the_readme_table_is_what_the_simulator_says():
    from nestpipe.sim import paper_rows

    readme = (ROOT / "README.md").read_text()
    for row in paper_rows((1536,)):
        step, speedup = f"{row.step_ms:,.0f}", f"{row.speedup:.2f}x"
        assert re.search(
            rf"\| {step} \|.*\| {speedup} \|.*\| {row.scaling_efficiency:.1f} % \|", readme
        )


def test_the_page_that_teaches_knows_every_op():
    from nestpipe.schedule import Kind

    page = (ROOT / "docs/nestpipe.md").read_text()
    table = page.partition("| op | lane |")[2].partition("\n\n")[0]
    assert {kind.value for kind in Kind} <= set(re.findall(r"`(\w+) t(?:\.m)?`", table))


def test_source_files_that_pages_name_exist():
    places = (ROOT, ROOT / "src/nestpipe", ROOT / "src/nestpipe/kernels")
    for page in set(PAGES) - set(EXPERIMENTS):  # those tell of the past
        for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|cpp|cu|h))`", page.read_text()):
            assert any((place / name).exists() for place in places), f"{page.name} names {name}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_lines_of_pages_fit_120_columns(page):
    long = [n for n, line in enumerate(page.read_text().splitlines(), 1) if len(line) > 120]
    assert not long, f"{page.name} has long lines: {long}"
