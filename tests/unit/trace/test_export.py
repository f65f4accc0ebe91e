import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import ConfigError, ParseError
from nestpipe.trace import Span, Trace, read_chrome, svg, to_chrome, write_chrome
from nestpipe.trace.export import LABEL, SMALL_LABEL, label_width

ROWS = Span("rows", "net", 1, 0, 0, 0.1, 0.30000000000000004)
UPDATE = Span("update", "compute", 1, None, 1, 2.0, 3.0)

times = st.floats(0, 1e9)
spans = st.builds(
    lambda kind, lane, batch, micro, rank, pair: Span(
        kind, lane, batch, micro, rank, min(pair), max(pair)
    ),
    st.text(max_size=8),
    st.sampled_from(["net", "compute"]) | st.text(max_size=8),
    st.integers(0, 10**9),
    st.none() | st.integers(0, 99),
    st.integers(0, 5),
    st.tuples(times, times),
)
facts = st.dictionaries(
    st.text(max_size=8), st.text(max_size=8) | st.integers() | st.floats(allow_nan=False)
)


def op(**changed: object) -> dict[str, object]:
    """A good event with some of its args or fields replaced."""
    args: dict[str, object] = {"kind": "rows", "lane": "net", "batch": 1, "micro": 0}
    args |= {"start_ms": 1.0, "end_ms": 2.0}
    fields: dict[str, object] = {"ph": "X", "name": "rows 1.0", "pid": 0, "tid": 1}
    args |= {name: value for name, value in changed.items() if name not in ("pid", "ts", "dur")}
    fields |= {name: value for name, value in changed.items() if name in ("pid", "ts", "dur")}
    return {**fields, "args": args}


def stored(folder: Path, content: object) -> Path:
    path = folder / "trace.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def events(trace: Trace, phase: str) -> list[dict[str, object]]:
    listed = to_chrome(trace)["traceEvents"]
    assert isinstance(listed, list)
    return [event for event in listed if event["ph"] == phase]


def test_an_op_is_a_complete_event_in_microseconds():
    (event,) = events(Trace((UPDATE,)), "X")
    assert (event["name"], event["pid"], event["ts"], event["dur"]) == ("update 1", 1, 2000, 1000)


def test_ranks_are_processes_and_lanes_are_threads_in_drawing_order():
    dense = Span("dense", "compute", 1, 0, 0, 0.0, 1.0)
    named = events(Trace((dense, ROWS, UPDATE)), "M")
    assert [e["args"] for e in named if e["name"] == "process_name"] == [
        {"name": "rank 0"},
        {"name": "rank 1"},
    ]
    assert [
        (e["tid"], e["args"]) for e in named if e["name"] == "thread_name" and e["pid"] == 0
    ] == [
        (1, {"name": "net"}),
        (2, {"name": "compute"}),
    ]


def test_ops_that_overlap_on_a_lane_are_drawn_on_threads_of_their_own():
    other = Span("keys", "net", 2, None, 0, 0.2, 0.4)
    first, second = events(Trace((ROWS, other)), "X")
    assert first["tid"] != second["tid"]


@given(st.lists(spans, min_size=1, max_size=12), facts)
def test_what_was_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    listed: list[Span],
    known: dict[str, str | int | float],
):
    path = tmp_path_factory.mktemp("chrome") / "trace.json"
    trace = Trace(tuple(listed), known)
    write_chrome(trace, path)
    assert read_chrome(path) == trace


def test_a_bare_list_of_events_is_read(tmp_path: Path):
    path = stored(tmp_path, to_chrome(Trace((ROWS, UPDATE)))["traceEvents"])
    assert read_chrome(path).spans == (ROWS, UPDATE)


def test_events_of_other_tools_are_passed_over(tmp_path: Path):
    foreign = [{"ph": "X", "name": "gemm", "ts": 1, "dur": 2}, {"ph": "i", "args": None}, {}]
    assert len(read_chrome(stored(tmp_path, [*foreign, op()])).spans) == 1


def test_microseconds_are_used_where_no_exact_times_are_given(tmp_path: Path):
    event = op(ts=1500, dur=250)
    args = event["args"]
    assert isinstance(args, dict)
    del args["start_ms"], args["end_ms"]
    (span,) = read_chrome(stored(tmp_path, [event])).spans
    assert (span.start, span.end) == (1.5, 1.75)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (3, "no list of trace events"),
        ({"traceEvents": 3}, "no list of trace events"),
        ({}, "no list of trace events"),
        ([], "none of the 0 events"),
        ([{"ph": "X", "name": "gemm"}], "none of the 1 events"),
        (["rows"], "event 0 of .* is 'rows'"),
        ([op(), op(end_ms=0.5)], "event 1 of .* ends at 0.5 ms before it starts at 1.0 ms"),
        ([op(start_ms=float("nan"))], "start_ms nan; it must be a finite number"),
        ([op(end_ms=float("inf"))], "end_ms inf"),
        ([op(end_ms=10**400)], "end_ms 1000"),
        ([op(end_ms=None)], "end_ms None"),
        ([op(start_ms="1")], "start_ms '1'"),
        ([op(batch=1.5)], "batch 1.5; it must be a whole number"),
        ([op(micro=True)], "micro True"),
        ([op(pid="zero")], "pid 'zero'"),
    ],
)
def test_a_broken_trace_is_refused_in_one_sentence(tmp_path: Path, content: object, complaint: str):
    with pytest.raises(ParseError, match=complaint) as caught:
        read_chrome(stored(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(ParseError, match="cannot read the trace"):
            read_chrome(path)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path):
    path = tmp_path / "trace.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ParseError, match="is not JSON"):
        read_chrome(path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="absent"):
        write_chrome(Trace((ROWS,)), tmp_path / "absent" / "trace.json")


NAMESPACE = "{http://www.w3.org/2000/svg}"

svg_times = st.floats(0, 1e6) | st.floats(0, 1) | st.integers(0, 20).map(float)
names = st.sampled_from(["rows", "dense", "sync", "copy", "<&'\">"]) | st.text(max_size=30)
spans_of_any_sort = st.lists(
    st.builds(
        lambda kind, lane, batch, micro, rank, pair: Span(
            kind, lane, batch, micro, rank, min(pair), max(pair)
        ),
        names,
        names,
        st.integers(0, 10_000),
        st.none() | st.integers(0, 99),
        st.integers(0, 3),
        st.tuples(svg_times, svg_times),
    ),
    max_size=20,
)


def span(kind: str, start: float, end: float, rank: int = 0) -> Span:
    return Span(kind, "net", 1, 0, rank, start, end)


def blocks(drawn: str) -> list[ElementTree.Element]:
    return [
        element
        for element in ElementTree.fromstring(drawn).iter(f"{NAMESPACE}rect")
        if "np-op" in element.get("class", "").split()
    ]


def texts(drawn: str) -> list[str]:
    return [
        element.text or "" for element in ElementTree.fromstring(drawn).iter(f"{NAMESPACE}text")
    ]


def test_a_block_tells_its_name_and_times_on_hover():
    (block,) = blocks(svg(Trace((span("rows", 1.25, 4.5),))))
    assert block.findtext(f"{NAMESPACE}title") == (
        "rows 1.0 on net, rank 0: 1.25 ms to 4.5 ms, 3.25 ms long"
    )


def test_block_widths_follow_durations():
    short, long = blocks(svg(Trace((span("rows", 0, 1), span("grads", 1, 4)))))
    assert float(long.get("width", 0)) + 1 == pytest.approx(3 * (float(short.get("width", 0)) + 1))


def test_a_marked_op_has_an_outline_and_a_pointer():
    trace = Trace((span("rows", 0, 1), span("grads", 1, 2)))
    drawn = svg(trace, marks=["rows 1.0"])
    assert [block.get("class") for block in blocks(drawn)] == ["np-op np-marked", "np-op"]
    assert drawn.count('class="np-pointer"') == 1
    assert 'class="np-pointer"' not in svg(trace)


def test_all_ranks_are_stacked_up_to_a_limit_that_is_stated():
    trace = Trace(tuple(span("rows", 0, 1, rank) for rank in range(11)))
    drawn = svg(trace, rank=None)
    assert len(blocks(drawn)) == 8
    assert any("3 of 11 ranks not drawn" in text for text in texts(drawn))
    assert [text for text in texts(drawn) if re.fullmatch(r"rank \d", text)] == [
        f"rank {rank}" for rank in range(8)
    ]


def test_the_title_is_escaped():
    assert "<b>fast</b> & exact" in texts(svg(Trace(()), title="<b>fast</b> & exact"))


def test_an_empty_trace_and_an_absent_rank_say_so():
    assert "no ops" in texts(svg(Trace(())))
    assert any("no ops" in text for text in texts(svg(Trace((span("rows", 0, 1),)), rank=5)))


@pytest.mark.parametrize("end", [0.0, 5e-324])
def test_a_trace_without_length_is_still_a_block(end: float):
    assert len(blocks(svg(Trace((span("rows", 0, end),))))) == 1


def test_a_page_too_narrow_is_refused():
    with pytest.raises(ConfigError, match="use at least"):
        svg(Trace(()), width=100)


@given(spans_of_any_sort, st.text(max_size=20), st.integers(360, 2000))
def test_every_span_has_exactly_one_block(spans: list[Span], title: str, width: int):
    drawn = svg(Trace(tuple(spans)), title=title, rank=None, width=width)
    assert len(blocks(drawn)) == len(spans)
    assert drawn == svg(Trace(tuple(spans)), title=title, rank=None, width=width)


@given(spans_of_any_sort, st.integers(360, 2000))
def test_no_block_leaves_the_page_and_no_label_its_block(spans: list[Span], width: int):
    drawn = svg(Trace(tuple(spans)), rank=None, width=width)
    room = 0.0
    for element in ElementTree.fromstring(drawn):
        style = element.get("class", "").split()
        if "np-op" in style:
            room = float(element.get("width", 0))
            assert 0 <= float(element.get("x", 0)) <= width - room
        elif "np-label" in style:
            size = SMALL_LABEL if "np-small" in style else LABEL
            assert label_width(len(element.text or ""), size) <= room
