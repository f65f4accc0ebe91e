import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import ParseError
from nestpipe.schedule import (
    MICRO_KINDS,
    PLANS,
    Exchange,
    Kind,
    Lane,
    Op,
    PlanOptions,
    Retrieval,
    Schedule,
    check,
    from_text,
    plan,
    to_text,
    with_separate_dense_group,
    with_separate_key_group,
)
from support.examples import examples


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


TINY = to_text(plan("nested", PlanOptions()).schedule(1))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(list(PLANS)))
    whole_only = name == "stale_prefetch"
    options = PlanOptions(
        micro_batches=draw(st.integers(1, 8)),
        retrieval=Retrieval.WHOLE if whole_only else draw(st.sampled_from(Retrieval)),
        stages=draw(st.integers(1, 4)),
        exchange=draw(st.sampled_from(Exchange)),
        merge_every=draw(st.integers(0, 3)),
    )
    return plan(name, options).schedule(draw(st.integers(1, 9)))


def parse_error_of(text: str) -> str:
    with pytest.raises(ParseError) as caught:
        from_text(text)
    sentence = str(caught.value)
    assert len(sentence.splitlines()) == 1
    return sentence


def line_of(text: str, start: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if line.startswith(start))


def replaced(old: str, new: str) -> str:
    text, count = re.subn(rf"^{re.escape(old)}", new, TINY, flags=re.MULTILINE)
    assert count == 1, f"{old!r} is not exactly once in the text"
    return text


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_reads_back_as_it_was_written(name: str) -> None:
    schedule = plan(name).schedule(3)
    assert from_text(to_text(schedule)) == schedule


@given(schedules())
def test_every_schedule_reads_back_as_it_was_written(schedule: Schedule) -> None:
    text = to_text(schedule)
    again = from_text(text)
    assert again == schedule
    assert to_text(again) == text


@given(schedules())
@examples("some")
def test_a_schedule_that_was_read_back_passes_the_checker(schedule: Schedule) -> None:
    check(from_text(to_text(schedule)), stale="stale_prefetch")


def test_comments_blank_lines_and_indentation_are_ignored() -> None:
    lines = [f"   {line}   # says so" for line in TINY.splitlines()]
    assert from_text("# a comment\n\n" + "\n\n".join(lines)) == from_text(TINY)


def test_an_unknown_kind_is_named_with_its_line_and_the_known_kinds() -> None:
    number = line_of(TINY, "union 0")
    assert parse_error_of(replaced("union 0 after", "onion 0 after")) == (
        f"line {number}: unknown kind of op 'onion' in 'onion 0'; the kinds are {', '.join(Kind)}"
    )


def test_a_missing_micro_batch_is_named_with_its_line() -> None:
    number = line_of(TINY, "rows 0.0")
    assert parse_error_of(replaced("rows 0.0 after", "rows 0 after")) == (
        f"line {number}: 'rows 0' does not fit its kind; write it like `rows 3.0`"
    )


def test_a_micro_batch_on_a_batch_op_is_named_with_its_line() -> None:
    number = line_of(TINY, "update 0")
    assert parse_error_of(replaced("update 0 after", "update 0.0 after")) == (
        f"line {number}: 'update 0.0' does not fit its kind; write it like `update 3`"
    )


@pytest.mark.parametrize("edge", ["after", "after prefetch 0,", "after prefetch", "before copy 0"])
def test_a_broken_edge_is_named_with_its_line(edge: str) -> None:
    number = line_of(TINY, "copy 0")
    sentence = parse_error_of(replaced("copy 0 after prefetch 0\n", f"copy 0 {edge}\n"))
    assert re.fullmatch(
        rf"line {number}: '.*' is not an op; write it like `update 3` or `rows 3.0`", sentence
    )


def test_a_fact_given_twice_is_refused() -> None:
    assert parse_error_of("micro_batches 1\n" + TINY) == (
        f"line {line_of(TINY, 'micro_batches') + 1}: "
        "'micro_batches' is given twice; keep one of them"
    )


def test_a_fact_after_the_first_op_is_refused() -> None:
    number = len(TINY.splitlines()) + 1
    assert parse_error_of(TINY + "micro_batches 1\n") == (
        f"line {number}: 'micro_batches 1' is a fact; put it above the first op"
    )


@pytest.mark.parametrize(
    ("fact", "example"),
    [
        ("schedule", "schedule nested"),
        ("batches", "batches 3"),
        ("micro_batches", "micro_batches 2"),
        ("retrieval", "retrieval whole"),
        ("lookahead", "lookahead 5"),
        ("slots", "slots 5"),
        ("buffers", "buffers 2"),
        ("receive", "receive 2"),
        ("merge_every", "merge_every 0"),
        ("stale", "stale no"),
    ],
)
def test_a_missing_fact_is_named_with_a_line_to_add(fact: str, example: str) -> None:
    rest = [line for line in TINY.splitlines() if line.split(" ")[0] != fact]
    assert parse_error_of("\n".join(rest)) == (
        f"the schedule does not say its {fact!r}; add a line like `{example}`"
    )


@pytest.mark.parametrize(
    ("line", "broken", "sentence"),
    [
        (
            "micro_batches 1",
            "micro_batches 0",
            "'micro_batches' cannot be '0'; write it like `micro_batches 2`",
        ),
        (
            "micro_batches 1",
            "micro_batches 1\nexchange own",
            "'exchange' cannot be 'own'; write it like `exchange window`",
        ),
        (
            "micro_batches 1",
            "micro_batches one",
            "'micro_batches' cannot be 'one'; write it like `micro_batches 2`",
        ),
        (
            "micro_batches 1",
            "micro_batches",
            "'micro_batches' cannot be ''; write it like `micro_batches 2`",
        ),
        ("batches 1", "batches -3", "'batches' cannot be '-3'; write it like `batches 3`"),
        ("slots 5", "slots 2.5", "'slots' cannot be '2.5'; write it like `slots 5`"),
        ("buffers 2", "buffers 0", "'buffers' cannot be '0'; write it like `buffers 2`"),
        ("merge_every 0", "merge_every -1", "'merge_every' cannot be '-1'"),
        ("retrieval whole", "retrieval half", "'retrieval' cannot be 'half'"),
        ("stale no", "stale maybe", "'stale' cannot be 'maybe'; write it like `stale no`"),
        ("schedule nested", "schedule my plan", "'schedule' cannot be 'my plan'"),
    ],
)
def test_a_fact_with_a_bad_value_is_named_with_a_good_one(
    line: str, broken: str, sentence: str
) -> None:
    found = parse_error_of(replaced(line, broken))
    assert found.startswith(sentence)
    assert "; write it like `" in found


def test_a_billion_batches_in_a_few_lines_are_refused_at_once() -> None:
    count = len(from_text(TINY))
    assert parse_error_of(replaced("batches 1", f"batches {10**9}")) == (
        f"1000000000 batches cannot fit into {count} ops; correct that line"
    )
    assert parse_error_of(replaced("micro_batches 1", f"micro_batches {10**9}")) == (
        f"1000000000 micro_batches cannot fit into {count} ops; correct that line"
    )


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "micro_batches 2\n"])
def test_a_text_without_ops_is_refused(text: str) -> None:
    assert parse_error_of(text) == "the schedule has no op; add lines like `prefetch 0`"


@given(st.text())
def test_garbage_is_never_more_than_a_parse_error(text: str) -> None:
    parse_error_of(text)


def test_a_number_too_long_to_read_is_named_with_its_line() -> None:
    long = "1" * 5000
    number = line_of(TINY, "prefetch 0")
    sentence = parse_error_of(replaced("prefetch 0\ncopy", f"prefetch {long}\ncopy"))
    assert sentence.startswith(f"line {number}: ")
    assert parse_error_of(replaced("micro_batches 1", f"micro_batches {long}")).startswith(
        "'micro_batches' cannot be"
    )


@given(st.binary())
def test_bytes_read_as_text_are_never_more_than_a_parse_error(data: bytes) -> None:
    parse_error_of(data.decode("latin-1"))


@given(st.data())
def test_a_damaged_schedule_is_a_schedule_or_a_parse_error(data: st.DataObject) -> None:
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(TINY))] * 2)))
    damaged = TINY[:first] + data.draw(st.text(max_size=12)) + TINY[last:]
    said = ""
    try:
        schedule = from_text(damaged)
    except ParseError as error:
        said = str(error)
    else:
        assert from_text(to_text(schedule)) == schedule
    assert len(said.splitlines()) <= 1


@pytest.mark.parametrize(
    ("old", "new"),
    [("keys_apart", "separate_key_group"), ("sums_apart", "separate_dense_group")],
)
def test_a_fact_of_an_earlier_release_is_read_with_a_warning(old: str, new: str) -> None:
    made = with_separate_dense_group(with_separate_key_group(plan("nested"))).schedule(2)
    text = to_text(made)
    with pytest.warns(FutureWarning, match=f"'{old}' is now called '{new}'"):
        assert from_text(text.replace(f"{new} yes", f"{old} yes")) == made
