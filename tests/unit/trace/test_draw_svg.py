import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import ConfigError
from nestpipe.trace import Span, Trace, svg
from nestpipe.trace.export import LABEL, SMALL_LABEL, label_width

NAMESPACE = "{http://www.w3.org/2000/svg}"

times = st.floats(0, 1e6) | st.floats(0, 1) | st.integers(0, 20).map(float)
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
        st.tuples(times, times),
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
