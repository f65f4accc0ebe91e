"""The documentation site builds without a warning, and its pages say what the sources say."""

import re
import warnings
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path

import pytest

from nestpipe.train.job import JobConfig

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("furo", reason="the extra `docs` is not installed")
    pytest.importorskip("myst_parser", reason="the extra `docs` is not installed")
    main = pytest.importorskip("sphinx.cmd.build").build_main
    out = tmp_path_factory.mktemp("site")
    problems = out / "problems.txt"
    with warnings.catch_warnings():  # what libraries of the build warn of is theirs
        warnings.simplefilter("ignore")
        status = main(["-q", "-b", "html", "-w", str(problems), str(DOCS), str(out)])
    assert status == 0
    assert problems.read_text() == "", "`make site` would fail: see the warnings"
    return out


def test_every_page_is_on_the_site(site: Path):
    pages = {page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")}
    built = {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")}
    assert pages <= built


def test_pages_load_nothing_from_elsewhere(site: Path):
    for page in site.glob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="([^"]*)"', page.read_text())
        assert loaded
        assert not [word for word in loaded if word.startswith(("http", "//"))], page.name


def test_a_line_that_begins_with_a_percent_sign_is_text(site: Path):
    """A dialect of Markdown takes it for a comment, and half a sentence was gone."""
    for page in DOCS.rglob("*.md"):
        built = (site / page.relative_to(DOCS).with_suffix(".html")).read_text()
        text = " ".join(re.sub(r"<[^>]*>", "", built).split())
        for line in re.findall(r"^ *(% \w+ \w+ \w+ \w+)", page.read_text(), re.MULTILINE):
            assert line in text, f"{page.name}: {line!r} is not on the page"


@pytest.mark.parametrize("name", ["first_hour", "first_run", "insteval"])
def test_commands_read_from_the_site_are_those_of_the_source(
    site: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.syspath_prepend(ROOT / "tools")
    trial = import_module("trial")
    source, page = trial.text_of(DOCS / f"{name}.md"), trial.text_of(site / f"{name}.html")
    assert list(trial.commands(page)) == list(trial.commands(source))
    assert trial.files(page) == trial.files(source)
    assert list(trial.commands(page))


def test_the_config_page_has_every_key():
    page = (DOCS / "config.md").read_text()

    def check(value: object, path: str) -> int:
        count = 0
        for known in fields(value):  # type: ignore[arg-type]
            below = getattr(value, known.name)
            if is_dataclass(below):
                count += check(below, f"{path}{known.name}.")
            else:
                assert f"- `{path}{known.name}` (" in page
                count += 1
        return count

    assert check(JobConfig(), "") > 100
