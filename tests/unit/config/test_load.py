"""A config file becomes a dataclass, and every way it can be wrong is one sentence."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.config import Table, build, fraction, load, not_negative, override, positive, read
from nestpipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    micro_batches: int = 4
    plan: Literal["serial", "nested"] = "nested"

    def __post_init__(self) -> None:
        positive("micro_batches", self.micro_batches)
        if self.plan == "serial" and self.micro_batches > 64:
            raise ConfigError("a serial plan has at most 64 micro-batches; lower micro_batches")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    gbps: float
    latency_us: float = 2.0
    shares: tuple[float, ...] = ()
    limit: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    name: str = "run"
    exact: bool = True
    pipeline: Pipeline = Pipeline()
    link: Link = Link(gbps=50.0)
    spare: Link | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bare:
    pipeline: Pipeline
    steps: int
    seed: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Racks:
    links: tuple[Link, ...] = ()
    level: Literal[1, 2] = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    spare: Link | None


def refusal(cls: Any, mapping: dict[str, Any], where: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        build(cls, mapping, where)
    return str(caught.value)


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "run.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# What fits


def test_a_file_becomes_the_dataclass(tmp_path: Path):
    text = """
    name = "night"
    exact = false
    [pipeline]
    micro_batches = 8
    plan = "serial"
    [link]
    gbps = 25
    shares = [0.5, 1]
    limit = 3
    """
    assert load(Run, write(tmp_path, text)) == Run(
        name="night",
        exact=False,
        pipeline=Pipeline(micro_batches=8, plan="serial"),
        link=Link(gbps=25.0, shares=(0.5, 1.0), limit=3),
    )


def test_an_empty_file_is_all_defaults(tmp_path: Path):
    assert load(Run, str(write(tmp_path, ""))) == Run()


def test_overrides_come_after_the_file(tmp_path: Path):
    path = write(tmp_path, "pipeline.micro_batches = 8")
    run = load(Run, path, ["pipeline.micro_batches=2", "pipeline.plan=serial"])
    assert run.pipeline == Pipeline(micro_batches=2, plan="serial")


def test_a_whole_number_is_a_fine_float():
    gbps = build(Link, {"gbps": 3}).gbps
    assert (gbps, type(gbps)) == (3.0, float)


def test_infinity_is_a_fine_float(tmp_path: Path):
    assert load(Link, write(tmp_path, "gbps = inf")).gbps == float("inf")


def test_a_section_without_a_default_is_built_from_its_own():
    assert build(Bare, {"steps": 3, "seed": None}) == Bare(pipeline=Pipeline(), steps=3, seed=None)


def test_a_section_that_may_be_none_can_be_given():
    assert build(Run, {"spare": {"gbps": 1}}).spare == Link(gbps=1.0)


def test_a_list_of_sections_is_a_tuple_of_dataclasses():
    racks = build(Racks, {"links": [{"gbps": 1}, {"gbps": 2}]})
    assert racks.links == (Link(gbps=1.0), Link(gbps=2.0))


def test_a_byte_order_mark_is_no_error(tmp_path: Path):
    assert load(Run, write(tmp_path, b'\xef\xbb\xbfname = "night"')).name == "night"


links = st.builds(
    Link,
    gbps=st.floats(allow_nan=False),
    latency_us=st.floats(allow_nan=False),
    shares=st.lists(st.floats(allow_nan=False)).map(tuple),
    limit=st.none() | st.integers(),
)
runs = st.builds(
    Run,
    name=st.text(),
    exact=st.booleans(),
    pipeline=st.builds(
        Pipeline,
        micro_batches=st.integers(1, 64),
        plan=st.sampled_from(["serial", "nested"]),
    ),
    link=links,
    spare=st.none() | links,
)


@given(runs)
def test_what_was_taken_apart_builds_the_same(run: Run):
    assert build(Run, asdict(run)) == run


@given(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans())
def test_numbers_survive_the_text_form(limit: int, gbps: float, exact: bool):
    given = [f"link.limit={limit}", f"link.gbps={gbps!r}", f"exact={str(exact).lower()}"]
    run = build(Run, override({}, given))
    assert (run.link.limit, run.link.gbps, run.exact) == (limit, gbps, exact)


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Z"])))
def test_any_text_is_an_override_or_a_config_error(text: str):
    with suppress(ConfigError):
        build(Run, override({}, [text]))


# What does not fit


def test_an_unknown_key_names_the_nearest():
    message = refusal(Run, {"pipeline": {"micro_batch": 2}})
    assert message == "unknown key pipeline.'micro_batch'; did you mean micro_batches?"


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"nme": "x"}, "unknown key 'nme'; did you mean name?"),
        ({"Exact": True}, "unknown key 'Exact'; did you mean exact?"),
        ({"zzz": 1}, "unknown key 'zzz'; the keys are name, exact, pipeline, link, spare"),
        (
            {"link": {"gbps": 1, "é.ü": 1}},
            "unknown key link.'é.ü'; the keys are gbps, latency_us, shares, limit",
        ),
    ],
)
def test_an_unknown_key_is_refused(mapping: dict[str, Any], message: str):
    assert refusal(Run, mapping) == message


@pytest.mark.parametrize(
    ("cls", "mapping", "message"),
    [
        (Run, {"name": 3}, 'name is 3; write it in quotes: "3"'),
        (Run, {"exact": 1}, "exact is 1; give true or false"),
        (Run, {"exact": "yes"}, "exact is 'yes'; give true or false"),
        (Run, {"pipeline": 4}, "pipeline is 4; make it a section, [pipeline]"),
        (Run, {"name": {"a": 1}}, 'name is a section; give a string such as "text"'),
        (Run, {"name": None}, 'name is None; give a string such as "text"'),
        (
            Run,
            {"pipeline": {"micro_batches": 2.5}},
            "pipeline.micro_batches is 2.5; give a whole number such as 4",
        ),
        (
            Run,
            {"pipeline": {"micro_batches": True}},
            "pipeline.micro_batches is true; give a whole number such as 4",
        ),
        (Run, {"pipeline": {"plan": "nestd"}}, "pipeline.plan is 'nestd'; did you mean 'nested'?"),
        (
            Run,
            {"pipeline": {"plan": "best"}},
            "pipeline.plan is 'best'; did you mean 'nested'?",
        ),
        (
            Run,
            {"pipeline": {"plan": 7}},
            "pipeline.plan is 7; give one of 'serial', 'nested'",
        ),
        (Racks, {"level": True}, "level is true; give one of 1, 2"),
        (Link, {"gbps": "fast"}, "gbps is 'fast'; give a number such as 0.5"),
        (Link, {"gbps": False}, "gbps is false; give a number such as 0.5"),
        (Link, {"gbps": float("nan")}, "gbps is nan; give a number such as 0.5"),
        (Link, {"gbps": 10**400}, f"gbps is 1{'0' * 56}...; give a number such as 0.5"),
        (Link, {"gbps": 10**5000}, "gbps is too long to print; give a number such as 0.5"),
        (
            Link,
            {"gbps": 1, "limit": "4"},
            "limit is '4'; give a whole number such as 4",
        ),
        (
            Link,
            {"gbps": 1, "shares": 0.5},
            "shares is 0.5; give a list of numbers such as [0.5, 2.0]",
        ),
        (
            Link,
            {"gbps": 1, "shares": [0.5, "x"]},
            "shares[1] is 'x'; give a number such as 0.5",
        ),
        (Racks, {"links": 3}, "links is 3; give a list"),
        (Racks, {"links": [{"gbps": "x"}]}, "links[0].gbps is 'x'; give a number such as 0.5"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(cls: Any, mapping: dict[str, Any], message: str):
    assert refusal(cls, mapping) == message


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"seed": 1}, "missing key steps; give a whole number such as 4"),
        ({"steps": 1}, "missing key seed; give a whole number such as 4"),
    ],
)
def test_a_key_without_a_default_must_be_there(mapping: dict[str, Any], message: str):
    assert refusal(Bare, mapping) == message


def test_a_missing_key_is_named_with_its_section():
    message = "missing key link.gbps; give a number such as 0.5"
    assert refusal(Run, {"link": {}}) == message
    assert refusal(Link, {}, where="link") == message


def test_a_section_that_may_be_none_but_has_no_default_must_be_there():
    assert refusal(Pair, {}) == "missing key spare.gbps; give a number such as 0.5"


def test_a_typo_is_blamed_before_the_key_it_leaves_missing():
    assert refusal(Link, {"gbs": 1}) == "unknown key 'gbs'; did you mean gbps?"


def test_a_check_of_the_dataclass_is_told_with_its_section():
    message = "micro_batches is 0; give a number above 0"
    assert refusal(Pipeline, {"micro_batches": 0}) == message
    assert refusal(Run, {"pipeline": {"micro_batches": 0}}) == f"pipeline.{message}"


def test_a_check_that_names_no_key_is_told_with_its_section_too():
    mapping = {"plan": "serial", "micro_batches": 65}
    message = "a serial plan has at most 64 micro-batches; lower micro_batches"
    assert refusal(Pipeline, mapping) == message
    assert refusal(Run, {"pipeline": mapping}) == f"in pipeline: {message}"


def test_a_field_of_a_type_that_toml_cannot_hold_is_refused():
    odd = dataclasses.make_dataclass("Odd", [("rows", set[int])])
    with pytest.raises(ConfigError, match=r"a field of a config is set\[int\]; it can be int"):
        build(odd, {"rows": []})


def test_a_field_of_two_types_is_refused():
    odd = dataclasses.make_dataclass("Odd", [("rows", int | str)])
    with pytest.raises(ConfigError, match=r"int \| str; it can be X or X \| None"):
        build(odd, {"rows": 1})


def test_an_open_section_takes_any_keys_with_values_that_a_checkpoint_can_keep():
    opened = dataclasses.make_dataclass("Opened", [("config", Mapping[str, Any])])
    section = {"a": 1, "b": {"c": [0.5, "x"]}, "d": True}
    assert build(opened, {"config": section}).config == section
    assert build(opened, {"config": {}}, overrides=["config.b.c=2"]).config == {"b": {"c": 2}}
    with pytest.raises(ConfigError, match=r"config.b.day is 2026-11-18; give a number"):
        build(opened, {"config": {"b": {"day": date(2026, 11, 18)}}})
    with pytest.raises(ConfigError, match=r"config is 3; make it a section, \[config\]"):
        build(opened, {"config": 3})


# Files


def unreadable(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Run, path)
    return str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path):
    path = tmp_path / "none.toml"
    assert unreadable(path) == f"there is no file {path}; check its name"


def test_a_directory_is_refused(tmp_path: Path):
    assert unreadable(tmp_path) == f"{tmp_path} is a directory; name a TOML file"


def test_a_file_used_as_a_directory_is_refused(tmp_path: Path):
    path = write(tmp_path, "") / "run.toml"
    assert unreadable(path) == f"cannot read {path}: Not a directory; name a readable file"


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("exact = true\nname 3\n", 2, "expected '=' after a key in a key/value pair"),
        ("exact = true\nname = [1,", 2, "invalid value"),
        ("a = 1\n\na = 2\n", 3, "cannot overwrite a value"),
    ],
)
def test_a_file_that_is_not_toml_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, reason: str
):
    path = write(tmp_path, text)
    assert unreadable(path) == f"line {line} of {path} is not TOML: {reason}; correct that line"


def test_a_file_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path):
    path = write(tmp_path, b'exact = true\nname = "\xff"\n')
    assert unreadable(path) == f"line 2 of {path} is not UTF-8; save the file as UTF-8"


@pytest.mark.parametrize("text", ["a = " + "[" * 9999, "a = " + "9" * 9999])
def test_a_file_beyond_the_limits_of_python_is_refused(tmp_path: Path, text: str):
    path = write(tmp_path, text)
    message = f"{path} holds a number or a nesting too long to read; make it shorter"
    assert unreadable(path) == message


# Overrides


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("0.5", 0.5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('"8"', "8"),
        ("{a = 1}", {"a": 1}),
        ("nested", "nested"),
        ("run#1", "run#1"),
        ("a=b", "a=b"),
        ("two words", "two words"),
        ("1\nother = 2", "1\nother = 2"),
        ("", ""),
    ],
)
def test_an_override_is_toml_or_a_bare_word(text: str, value: object):
    assert override({}, [f"link.gbps={text}"]) == {"link": {"gbps": value}}


@pytest.mark.parametrize("text", ["0.3", "40", "1e3", "'0.3'"])
def test_an_override_of_text_may_look_like_a_number(text: str):
    """A share of memory such as 0.4 is text."""
    assert build(Run, {}, overrides=[f"name={text}"]).name == text.strip("'")


def test_a_later_override_wins():
    assert override({"a": 1}, ["a=2", "a=3"]) == {"a": 3}


def test_an_override_may_have_spaces_around_its_parts():
    assert override({}, [" link . gbps = 3 "]) == {"link": {"gbps": 3}}


def test_overriding_leaves_the_given_mapping_alone():
    mapping = {"link": {"deep": {"a": 1}}, "name": "x"}
    assert override(mapping, ["link.deep.a=2"]) == {"link": {"deep": {"a": 2}}, "name": "x"}
    assert mapping == {"link": {"deep": {"a": 1}}, "name": "x"}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("name", "cannot set 'name'; write it as section.key=value"),
        ("=3", "cannot set '=3'; write it as section.key=value"),
        ("a..b=3", "cannot set 'a..b=3'; write it as section.key=value"),
        ("name.x=3", "cannot set name.x: name is no section; set it as a whole"),
        ("a.b=[1, 2", "cannot set a.b to [1, 2, which is not TOML; close what it opens"),
        ("a.b='x", "cannot set a.b to 'x, which is not TOML; close what it opens"),
    ],
)
def test_an_override_that_cannot_be_read_is_refused(assignment: str, message: str):
    with pytest.raises(ConfigError) as caught:
        override({"name": "run"}, [assignment])
    assert str(caught.value) == message


def test_reading_alone_checks_no_key(tmp_path: Path):
    assert read(write(tmp_path, "[anything]\ngoes = 1")) == {"anything": {"goes": 1}}


# Checks


@pytest.mark.parametrize(
    ("check", "good", "bad", "advice"),
    [
        (positive, [1, 0.1], [0, -1, float("nan")], "give a number above 0"),
        (not_negative, [0, 2.5], [-1, float("nan")], "give 0 or a number above it"),
        (fraction, [0, 0.5, 1], [-0.1, 1.1, float("nan")], "give a number from 0 to 1"),
    ],
)
def test_a_check_passes_or_says_what_to_give(check: Any, good: Any, bad: Any, advice: str):
    for value in good:
        check("x", value)
    for value in bad:
        with pytest.raises(ConfigError, match=re.escape(f"x is {value}; {advice}")):
            check("x", value)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("pooling", "max", "pooling of table 'items' is 'max'; give one of 'none', 'sum', 'mean'"),
        ("placement", "row", "placement of table 'items' is 'row'; did you mean 'rows'?"),
        ("dtype", "float61", "dtype of table 'items' is 'float61'; did you mean 'float16'?"),
    ],
)
def test_a_table_refuses_words_that_it_does_not_know(field: str, value: str, sentence: str):
    given: dict[str, Any] = {"name": "items", "dim": 4, field: value}
    with pytest.raises(ConfigError) as refused:
        Table(**given)
    assert str(refused.value) == sentence
