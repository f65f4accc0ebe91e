import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import ConfigError
from nestpipe.trace import Span, Trace, grid
from nestpipe.trace.draw import CODES, codes_for, lay_out, short_label, sublines

KINDS = (*CODES, "zebra", "zoom", "3d", "")


def span(kind: str, lane: str, start: float, end: float, batch: int = 0, micro: int | None = None):
    return Span(kind, lane, batch, micro, 0, start, end)


@st.composite
def nominal_spans(draw: st.DrawFn) -> tuple[Span, ...]:
    """Every lane busy or idle for a few units at a time, as in a drawn schedule."""
    spans: list[Span] = []
    for lane in draw(st.sets(st.sampled_from(["loader", "net", "compute", "zoo"]), min_size=1)):
        now = draw(st.integers(0, 3))
        for number in range(draw(st.integers(1, 12))):
            kind = draw(st.sampled_from(KINDS))
            end = now + draw(st.integers(1, 4))
            spans.append(span(kind, lane, now, end, number, draw(st.none() | st.integers(0, 11))))
            now = end + draw(st.integers(0, 2))
    return tuple(spans)


@st.composite
def any_spans(draw: st.DrawFn) -> tuple[Span, ...]:
    times = st.floats(0, 1e6) | st.floats(0, 1) | st.integers(0, 20).map(float)
    pairs = draw(st.lists(st.tuples(times, times), max_size=30))
    return tuple(
        span(
            draw(st.sampled_from(KINDS) | st.text(max_size=50)),
            draw(st.sampled_from(["net", "compute"]) | st.text(max_size=50)),
            min(pair),
            max(pair),
            draw(st.integers(-1, 10**6)),
            draw(st.none() | st.integers(0, 99)),
        )
        for pair in pairs
    )


def without_color(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_every_op_is_a_block_on_its_lane():
    trace = Trace(
        (
            span("rows", "net", 0, 1, 1, 0),
            span("rows", "net", 1, 2, 1, 1),
            span("dense", "compute", 1, 4, 1, 0),
        )
    )
    assert grid(trace, width=40).splitlines() == [
        "time    0       1       2       3",
        "net     |r1.0   |r1.1   ................",
        "compute ........|dense 1.0",
        "",
        "r rows  d dense",
    ]


def test_a_marked_op_is_pointed_at_without_colour():
    trace = Trace((span("rows", "net", 0, 2, 1, 0), span("grads", "net", 2, 4, 1, 0)))
    drawn = grid(trace, width=40, marks=["grads 1.0", "update 7"]).splitlines()
    assert drawn[1] == "net  |rows 1.0       !grads 1.0"
    assert drawn[2] == " " * 21 + "^" * 16
    assert "marked:  grads 1.0" in drawn
    assert "to be marked but not drawn:  update 7" in drawn


def test_ops_that_overlap_get_lines_of_their_own():
    trace = Trace((span("rows", "net", 0, 4), span("keys", "net", 2, 6)))
    first, second = grid(trace, width=40).splitlines()[1:3]
    assert re.fullmatch(r"net  \|rows 0 +\.+", first)
    assert re.fullmatch(r"     \.+\|keys 0", second)


def test_an_overlap_by_jitter_stays_on_the_line():
    trace = Trace((span("rows", "net", 0, 40.01), span("keys", "net", 40, 80)))
    drawn = grid(trace, width=40).splitlines()
    assert [line.split()[0] for line in drawn[:3] if line] == ["ms", "net"]


def test_ops_too_short_to_label_are_counted():
    trace = Trace(
        (
            span("dense", "compute", 0, 500),
            *(span("sync", "compute", 600, 600.1, b) for b in (1, 2)),
        )
    )
    assert "2 ops too short to label:  2 sync" in grid(trace).splitlines()
    assert grid(trace, marks=["sync 2"]).count("^") == 1


def test_no_more_bands_than_asked_for():
    spans = tuple(span("rows", "net", t, t + 1, t) for t in range(100))
    assert grid(Trace(spans)).count("time") > 2
    assert grid(Trace(spans), max_bands=2).count("time") <= 2


def test_a_long_op_carries_its_name_into_the_next_band():
    spans = (
        *(span("rows", "net", t, t + 1, t) for t in range(20)),
        span("dense", "compute", 0, 20),
    )
    bands = grid(Trace(spans), width=60).split("\n\n")
    assert "|dense 0" in bands[0]
    assert ">dense 0" in bands[1]


def test_colour_changes_with_the_batch_and_nothing_else_does():
    trace = Trace((span("rows", "net", 0, 1, 0), span("rows", "net", 1, 2, 1)))
    colored = grid(trace, color=True)
    assert len(set(re.findall(r"48;5;(\d+)m", colored))) == 2
    assert [line.rstrip() for line in without_color(colored).splitlines()] == (
        grid(trace).splitlines()
    )


def test_an_empty_trace_and_an_absent_rank_say_so():
    assert grid(Trace(())) == "(no ops)"
    assert "rank 3" in grid(Trace((span("rows", "net", 0, 1),)), rank=3)


@pytest.mark.parametrize("end", [0.0, 5e-324, 1e-12])
def test_a_trace_without_length_is_one_moment(end: float):
    assert "ops too short to label:  1 rows" in grid(Trace((span("rows", "net", 0, end),)))


def test_moments_far_apart_still_fit_one_band():
    spans = (span("rows", "net", 0, 0), span("keys", "net", 1e6, 1e6))
    assert grid(Trace(spans)).splitlines()[1].count("|") == 2


def test_other_ranks_are_mentioned():
    other = Span("rows", "net", 0, None, 1, 0, 1)
    assert grid(Trace((span("rows", "net", 0, 1), other))).endswith("rank 0, one of 2 ranks")


@pytest.mark.parametrize("asked", [{"width": 10}, {"max_bands": 0}])
def test_an_impossible_size_is_refused(asked: dict[str, int]):
    with pytest.raises(ConfigError, match="use at least"):
        grid(Trace(()), **asked)  # pyright: ignore[reportArgumentType]


@given(any_spans(), st.integers(32, 140), st.none() | st.integers(1, 5), st.booleans())
def test_no_line_is_wider_than_the_width(
    spans: tuple[Span, ...], width: int, max_bands: int | None, color: bool
):
    marks = {s.name for s in spans[::3]}
    drawn = grid(Trace(spans), width=width, max_bands=max_bands, color=color, marks=marks)
    assert all(len(line) <= width for line in without_color(drawn).split("\n"))


@given(any_spans(), st.integers(32, 140))
def test_every_marked_op_is_pointed_at(spans: tuple[Span, ...], width: int):
    drawn = grid(Trace(spans), width=width, marks={s.name for s in spans[:1]})
    assert bool(spans) == any(set(line) == {" ", "^"} for line in drawn.splitlines())


@given(nominal_spans(), st.integers(48, 140))
def test_every_op_of_a_nominal_trace_is_labelled(spans: tuple[Span, ...], width: int):
    drawn = grid(Trace(spans), width=width)
    codes = codes_for({s.kind for s in spans})
    assert "too short" not in drawn
    for s in spans:
        assert re.search(rf"[|>]({re.escape(s.name)}|{short_label(s, codes)})(?![0-9])", drawn)


@given(nominal_spans())
def test_blocks_are_as_wide_as_their_ops_are_long(spans: tuple[Span, ...]):
    cells = lay_out(spans, codes_for({s.kind for s in spans}), columns=90, max_bands=None)
    for block in cells.blocks:
        assert block.last - block.first == block.span.duration * cells.scale


@given(st.sets(st.sampled_from(KINDS) | st.text(max_size=5)))
def test_codes_are_distinct_letters(kinds: set[str]):
    codes = codes_for(kinds)
    assert set(codes) == kinds
    assert len(set(codes.values())) == len(kinds)
    assert all(code.isalpha() for code in codes.values())


@given(any_spans())
def test_ops_on_one_line_never_overlap(spans: tuple[Span, ...]):
    placed: dict[tuple[str, int], float] = {}
    lines = sublines(spans)
    for s, line in sorted(zip(spans, lines, strict=True), key=lambda p: (p[0].start, p[0].end)):
        assert s.start >= placed.get((s.lane, line), 0)
        placed[s.lane, line] = s.end
