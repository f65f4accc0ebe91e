import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import ParseError
from nestpipe.schedule import (
    MICRO_KINDS,
    Kind,
    Lane,
    Op,
    PlanOptions,
    Retrieval,
    plan,
    with_separate_key_group,
)


@st.composite
def ops(draw: st.DrawFn) -> Op:
    kind = draw(st.sampled_from(Kind))
    micro = draw(st.integers(0, 99)) if kind in MICRO_KINDS else None
    return Op(kind, draw(st.integers(0, 10**9)), micro)


@given(ops())
def test_an_op_reads_back_as_it_was_written(op: Op) -> None:
    assert Op.parse(str(op)) == op


def test_an_op_is_written_with_its_batch_and_micro_batch() -> None:
    assert str(Op(Kind.DENSE, 7, 1)) == "dense 7.1"
    assert str(Op(Kind.UPDATE, 7)) == "update 7"


def test_blanks_around_an_op_do_not_matter() -> None:
    assert Op.parse("  rows 3.0 ") == Op(Kind.ROWS, 3, 0)


def test_every_kind_has_a_lane_and_every_lane_has_work() -> None:
    shape = plan("nested").shape
    apart = {Lane.KEYS, Lane.WRITE}
    assert {shape.lane(kind) for kind in Kind} == set(Lane) - apart
    third = plan("nested", PlanOptions(retrieval=Retrieval.NEW, buffers=3))
    every = with_separate_key_group(third).shape
    assert {every.lane(kind) for kind in Kind} == set(Lane)


def test_collectives_are_exactly_the_ops_on_the_network() -> None:
    assert {kind for kind in Kind if Op(kind, 0).collective} == {
        Kind.COUNTS,
        Kind.KEYS,
        Kind.REPLICA_KEYS,
        Kind.STALE_MASK,
        Kind.PATCH,
        Kind.ROWS,
        Kind.GRADS,
        Kind.TOTALS,
        Kind.REDUCE,
        Kind.NORM,
        Kind.REPLICA_SYNC,
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("update", "'update' is not an op; write it like `update 3` or `rows 3.0`"),
        ("", "'' is not an op; write it like `update 3` or `rows 3.0`"),
        ("update -1", "'update -1' is not an op; write it like `update 3` or `rows 3.0`"),
        ("update 3 4", "'update 3 4' is not an op; write it like `update 3` or `rows 3.0`"),
        ("rows 3", "'rows 3' does not fit its kind; write it like `rows 3.0`"),
        ("update 3.0", "'update 3.0' does not fit its kind; write it like `update 3`"),
        (
            "updates 3",
            "unknown kind of op 'updates' in 'updates 3'; the kinds are " + ", ".join(Kind),
        ),
    ],
)
def test_a_broken_op_is_refused_with_what_belongs_there(text: str, sentence: str) -> None:
    with pytest.raises(ParseError, match=f"^{re.escape(sentence)}$"):
        Op.parse(text)


@given(st.text() | st.from_regex(r"[a-z]{1,9} \d{1,30}(\.\d{0,3})?", fullmatch=True))
def test_whatever_is_not_an_op_is_a_parse_error(text: str) -> None:
    said = ""
    try:
        op = Op.parse(text)
    except ParseError as error:
        said = str(error)
    else:
        assert Op.parse(str(op)) == op
    assert len(said.splitlines()) <= 1


@pytest.mark.parametrize("text", ["prefetch " + "1" * 5000, "rows 0." + "1" * 5000])
def test_a_number_too_long_to_read_is_a_parse_error(text: str) -> None:
    with pytest.raises(ParseError):
        Op.parse(text)


@pytest.mark.parametrize(
    ("old", "new"), [("mirror", "replica_sync"), ("marks", "stale_mask"), ("fresh", "patch")]
)
def test_a_word_of_an_earlier_release_is_read_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=f"'{old}' is now called '{new}'"):
        assert Op.parse(f"{old} 3") == Op(Kind(new), 3)
