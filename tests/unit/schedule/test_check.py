from collections.abc import Iterable
from dataclasses import replace

import pytest

from nestpipe.errors import ScheduleError
from nestpipe.schedule import (
    PLANS,
    Exchange,
    How,
    Kind,
    Op,
    PlanOptions,
    Retrieval,
    Schedule,
    Step,
    Tie,
    Violation,
    check,
    from_text,
    plan,
    redundant_edges,
    to_text,
    violations,
    with_separate_dense_group,
    with_separate_key_group,
)
from nestpipe.schedule.effects import CARRIES, WEIGHT
from support.toy_schedule import Interpreter, ToyData

Edge = tuple[Op, Op]
every_plan = pytest.mark.parametrize(
    ("name", "retrieval"),
    [
        pytest.param(name, retrieval, id=f"{name}-{retrieval}")
        for name in PLANS
        for retrieval in Retrieval
        if name != "stale_prefetch" or retrieval is Retrieval.WHOLE
    ],
)


def nested(
    batches: int = 3, micro_batches: int = 2, retrieval: Retrieval = Retrieval.WHOLE
) -> Schedule:
    return plan("nested", PlanOptions(micro_batches=micro_batches, retrieval=retrieval)).schedule(
        batches
    )


def edge(before: str, after: str) -> Edge:
    return Op.parse(before), Op.parse(after)


def with_edges(schedule: Schedule, edges: Iterable[Edge]) -> Schedule:
    more: dict[Op, tuple[Op, ...]] = {}
    for before, after in edges:
        more[after] = (*more.get(after, ()), before)
    steps = tuple(Step(s.op, (*s.after, *more.get(s.op, ()))) for s in schedule)
    return Schedule(schedule.shape, schedule.batches, steps)


def waiting_for_nothing(schedule: Schedule, op: str) -> Schedule:
    steps = tuple(Step(s.op) if str(s.op) == op else s for s in schedule)
    return Schedule(schedule.shape, schedule.batches, steps)


def with_steps(schedule: Schedule, steps: Iterable[Step]) -> Schedule:
    return Schedule(schedule.shape, schedule.batches, tuple(steps))


def found(schedule: Schedule, rule: str, sentence: str) -> Violation:
    """The one violation of that rule with that sentence."""
    everything = list(violations(schedule, stale=schedule.shape.plan))
    said = [f"{v.rule}: {v.sentence}" for v in everything]
    assert f"{rule}: {sentence}" in said, "\n".join(["the checker says instead", *said])
    return everything[said.index(f"{rule}: {sentence}")]


def sentences(schedule: Schedule) -> list[str]:
    return [violation.sentence for violation in violations(schedule)]


# What passes


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8])
@every_plan
def test_every_plan_passes(name: str, retrieval: Retrieval, micro_batches: int) -> None:
    for stages in (1, 2, 3, 4):
        for merge_every in (0, 1, 2, 3):
            options = PlanOptions(
                micro_batches=micro_batches,
                retrieval=retrieval,
                stages=stages,
                merge_every=merge_every,
            )
            check(plan(name, options).schedule(7), stale="stale_prefetch")


@pytest.mark.parametrize("batches", [1, 2, 3, 4, 5, 6, 12])
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_passes_with_few_batches_and_with_many(name: str, batches: int) -> None:
    check(plan(name).schedule(batches), stale="stale_prefetch")


# Staleness


STALE = (
    "plan stale_prefetch is stale: `rows 1.0` can read rows that `update 0` has not written; "
    "make `retrieve 1` wait for `writeback 0`, or ask for the stale plan by its name"
)


@pytest.mark.parametrize("named", [None, "", "nested", "stale"])
def test_a_stale_plan_is_refused_unless_it_is_named(named: str | None) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(plan("stale_prefetch").schedule(3), stale=named)
    assert str(caught.value).splitlines()[0] == STALE


def test_a_stale_plan_passes_when_it_is_named() -> None:
    check(plan("stale_prefetch").schedule(7), stale="stale_prefetch")


def test_naming_the_stale_plan_excuses_no_other_plan() -> None:
    broken = nested().without_edge(*edge("update 0", "sync 1"))
    with pytest.raises(ScheduleError):
        check(broken, stale="stale_prefetch")
    with pytest.raises(ScheduleError):
        check(broken, stale="nested")


def test_a_stale_plan_must_be_stale_on_every_run() -> None:
    gone = edge("retrieve 1", "writeback 0")
    violation = found(
        plan("stale_prefetch").schedule(3).without_edge(*gone),
        "freshness",
        "whether `retrieve 1` sees what `writeback 0` stores is left to chance; "
        "make `writeback 0` wait for `retrieve 1`",
    )
    assert violation.missing == gone


# One test per rule


def test_rows_must_be_refreshed_before_use() -> None:
    gone = edge("update 0", "sync 1")
    violation = found(
        nested().without_edge(*gone),
        "freshness",
        "`rows 1.0` can read rows that `update 0` has not written; "
        "make `sync 1` wait for `update 0`",
    )
    assert violation.missing == gone


def test_a_row_must_be_stored_before_it_is_retrieved_again() -> None:
    gone = edge("writeback 0", "retrieve 2")
    violation = found(
        nested().without_edge(*gone),
        "freshness",
        "`rows 2.0` can read rows that `update 0` has not written, because `writeback 0` may store "
        "them too late; make `retrieve 2` wait for `writeback 0`",
    )
    assert violation.missing == gone


def test_with_one_buffer_the_batch_before_must_be_stored_too() -> None:
    gone = edge("writeback 0", "retrieve 1")
    violation = found(
        plan("sparse_dist").schedule(3).without_edge(*gone),
        "freshness",
        "`rows 1.0` can read rows that `update 0` has not written, because `writeback 0` may store "
        "them too late; make `retrieve 1` wait for `writeback 0`",
    )
    assert violation.missing == gone


def test_a_later_value_of_a_row_must_be_stored_last() -> None:
    gone = edge("writeback 0", "writeback 1")
    violation = found(
        nested().without_edge(*gone),
        "freshness",
        "`writeback 0` can overwrite in host memory what `writeback 1` has stored; "
        "make `writeback 1` wait for `writeback 0`",
    )
    assert violation.missing == gone


# One test per edge that only a pool has


POOL_EDGES = [
    (
        edge("update 0", "rows 1.0"),
        "freshness",
        "`rows 1.0` can read rows that `update 0` has not written; "
        "make `rows 1.0` wait for `update 0`",
    ),
    (
        edge("union 1", "union 2"),
        "data before use",
        "`union 2` can read the index of the pool before `union 1` has run; "
        "make `union 2` wait for `union 1`",
    ),
    (
        edge("union 3", "writeback 1"),
        "data before use",
        "`writeback 1` can read the keys of the working set before `union 3` has run; "
        "make `writeback 1` wait for `union 3`",
    ),
    (
        edge("writeback 1", "retrieve 3"),
        "safe buffer reuse",
        "`retrieve 3` can overwrite the rows in the device buffer before `writeback 1` is done "
        "with them; make `retrieve 3` wait for `writeback 1`",
    ),
    (
        edge("writeback 0", "writeback 1"),
        "freshness",
        "`writeback 0` can overwrite in host memory what `writeback 1` has stored; "
        "make `writeback 1` wait for `writeback 0`",
    ),
    (
        edge("update 5", "writeback 5"),
        "data before use",
        "`writeback 5` can read the rows in the device buffer before `update 5` has run; "
        "make `writeback 5` wait for `update 5`",
    ),
]


@pytest.mark.parametrize(
    ("gone", "rule", "sentence"), POOL_EDGES, ids=[f"{b}, {a}" for (b, a), *_ in POOL_EDGES]
)
def test_an_edge_of_a_pool_is_missed(gone: Edge, rule: str, sentence: str) -> None:
    pooled = nested(batches=6, retrieval=Retrieval.POOLED)
    for chained in redundant_edges(pooled):
        pooled = pooled.without_edge(*chained)
    assert found(pooled.without_edge(*gone), rule, sentence).missing == gone


@pytest.mark.parametrize("kind", [Kind.RETRIEVE, Kind.WRITEBACK])
def test_optimizer_state_must_travel_in_and_out_of_a_pool(kind: Kind) -> None:
    forgetful = {**CARRIES, kind: frozenset({WEIGHT})}
    (violation,) = violations(nested(retrieval=Retrieval.POOLED), carries=forgetful)
    assert violation.sentence.endswith(f"let `{kind}` carry the state with the row")


@pytest.mark.parametrize("kind", [Kind.RETRIEVE, Kind.SYNC, Kind.WRITEBACK])
def test_optimizer_state_must_travel_with_the_row(kind: Kind) -> None:
    forgetful = {**CARRIES, kind: frozenset({WEIGHT})}
    (violation,) = violations(nested(), carries=forgetful)
    assert violation.rule == "freshness"
    assert violation.sentence == (
        f"`update 1` can use optimizer state that `update 0` has not written, because `{kind} 1` "
        f"moves rows without it; let `{kind}` carry the state with the row"
    )
    assert violation.missing is None
    with pytest.raises(ScheduleError):
        check(nested(), carries=forgetful)


@pytest.mark.parametrize("kind", [Kind.RETRIEVE, Kind.SYNC, Kind.WRITEBACK])
def test_a_row_that_loses_its_optimizer_state_ends_elsewhere(kind: Kind) -> None:
    forgetful = {**CARRIES, kind: frozenset({WEIGHT})}
    schedule = nested(batches=6)
    reference = Interpreter(plan("serial", PlanOptions(micro_batches=2)).schedule(6))
    differ = 0
    for seed in range(20):
        data = ToyData.random(seed, ranks=2, batches=6, micro_batches=2)
        expected = reference.run_in_issue_order(data)
        assert Interpreter(schedule).run_in_issue_order(data) == expected
        differ += Interpreter(schedule, forgetful).run_in_issue_order(data) != expected
    assert differ > 0


def test_rows_stay_frozen_until_the_window_is_over() -> None:
    violation = found(
        waiting_for_nothing(nested(), "update 1"),
        "frozen window",
        "`update 1` can change the rows in the device buffer while `rows 1.0` of the same window "
        "still reads them; make `update 1` wait for `rows 1.0`",
    )
    assert violation.missing == edge("rows 1.0", "update 1")


def test_dense_weights_stay_frozen_until_the_window_is_over() -> None:
    violation = found(
        waiting_for_nothing(nested(), "update 1"),
        "frozen window",
        "`update 1` can change the dense weights while `dense 1.1` of the same window "
        "still reads them; make `update 1` wait for `dense 1.1`",
    )
    assert violation.missing == edge("dense 1.1", "update 1")


def test_only_an_op_of_the_same_window_is_said_to_be_in_it() -> None:
    broken = nested().without_edge(*edge("update 0", "sync 1"))
    for violation in violations(broken):
        if "of the same window" in violation.sentence:
            assert len({op.batch for op in violation.ops}) == 1, violation.sentence


def test_a_buffer_is_reused_only_after_its_last_reader() -> None:
    gone = edge("sync 1", "retrieve 2")
    violation = found(
        nested().without_edge(*gone),
        "safe buffer reuse",
        "`retrieve 2` can overwrite the rows in the device buffer before `sync 1` is done "
        "with them; make `retrieve 2` wait for `sync 1`",
    )
    assert violation.missing == gone


def test_a_place_for_received_rows_is_reused_only_after_its_dense_op() -> None:
    schedule = nested(micro_batches=3)
    broken = schedule.without_edge(*edge("dense 0.0", "rows 0.2"))
    assert list(violations(broken)) == [], "the network order implies this edge"
    for before in ("dense 0.0", "grads 0.0", "counts 2"):
        broken = broken.without_edge(*edge(before, "rows 0.2"))
    violation = found(
        broken,
        "safe buffer reuse",
        "`rows 0.2` can overwrite the received rows before `dense 0.0` is done with them; "
        "make `rows 0.2` wait for `dense 0.0`",
    )
    assert violation.missing == edge("dense 0.0", "rows 0.2")


def test_data_is_written_before_it_is_read() -> None:
    gone = edge("keys 1", "union 1")
    violation = found(
        nested().without_edge(*gone),
        "data before use",
        "`union 1` can read the requested keys before `keys 1` has run; "
        "make `union 1` wait for `keys 1`",
    )
    assert violation.missing == gone


def test_dense_gradients_are_summed_in_the_order_of_the_micro_batches() -> None:
    gone = edge("dense 1.0", "dense 1.1")
    violation = found(
        nested().without_edge(*gone),
        "fixed summation order",
        "`dense 1.1` can change the summed dense gradients before `dense 1.0` has had its turn; "
        "make `dense 1.1` wait for `dense 1.0`",
    )
    assert violation.missing == gone


def test_row_gradients_are_summed_in_the_order_of_the_micro_batches() -> None:
    gone = edge("grads 1.0", "grads 1.1")
    violation = found(
        nested().without_edge(*gone),
        "fixed summation order",
        "`grads 1.1` can change the summed row gradients before `grads 1.0` has had its turn; "
        "make `grads 1.1` wait for `grads 1.0`",
    )
    assert violation.missing == gone


def test_collectives_have_one_order_on_the_network() -> None:
    gone = edge("keys 1", "rows 0.0")
    violation = found(
        nested().without_edge(*gone),
        "one network order",
        "`keys 1` and `rows 0.0` have no fixed order on the network, so ranks can start them in "
        "different orders and hang; make `rows 0.0` wait for `keys 1`",
    )
    assert violation.missing == gone


def test_no_more_batches_are_in_flight_than_the_look_ahead() -> None:
    gone = edge("writeback 0", "prefetch 5")
    violation = found(
        nested(batches=7).without_edge(*gone),
        "bounded look-ahead",
        "`prefetch 5` can start while the look-ahead of 5 is used up; "
        "make `prefetch 5` wait for `writeback 0`",
    )
    assert violation.missing == gone


def test_ops_that_wait_for_each_other_in_a_ring_are_a_deadlock() -> None:
    broken = with_edges(nested(), [edge("update 0", "retrieve 1")])
    broken = with_edges(broken, [edge("sync 1", "update 0")])
    (violation,) = violations(broken)
    assert violation.rule == "order"
    start = violation.ops[0]
    ring = " waits for ".join(f"`{op}`" for op in (*violation.ops, start))
    assert violation.sentence == f"deadlock: {ring}; remove one of these edges"
    assert {"update 0", "sync 1"} <= {str(op) for op in violation.ops}
    waits_for = {step.op: step.after for step in broken}
    for op, following in zip(violation.ops, (*violation.ops[1:], start), strict=True):
        assert following in waits_for[op]


def test_an_op_that_waits_for_itself_is_a_deadlock() -> None:
    broken = with_edges(nested(), [edge("update 1", "update 1")])
    assert sentences(broken) == [
        "deadlock: `update 1` waits for `update 1`; remove one of these edges"
    ]


def test_an_op_must_not_wait_for_one_that_is_issued_later() -> None:
    steps = list(nested())
    places = {str(step.op): i for i, step in enumerate(steps)}
    first, second = places["prefetch 2"], places["copy 2"]
    steps[first], steps[second] = steps[second], steps[first]
    assert sentences(with_steps(nested(), steps)) == [
        "`copy 2` waits for `prefetch 2`, which is issued after it, so a lane can block itself; "
        "issue `prefetch 2` first"
    ]


def test_a_missing_op_is_named() -> None:
    steps = [s for s in nested() if str(s.op) != "update 2"]
    steps = [Step(s.op, tuple(b for b in s.after if str(b) != "update 2")) for s in steps]
    assert sentences(with_steps(nested(), steps)) == [
        "`update 2` is missing from a schedule of 3 batches; add it"
    ]


def test_a_doubled_op_is_named() -> None:
    twice = Op.parse("update 1")
    steps = [s for step in nested() for s in ([step, step] if step.op == twice else [step])]
    assert sentences(with_steps(nested(), steps)) == [
        "`update 1` is there twice; remove one of them"
    ]


@pytest.mark.parametrize("op", ["update 3", "rows 0.2", "swap 0", "replica_sync 1"])
def test_an_op_without_a_place_is_named(op: str) -> None:
    steps = [*nested(), Step(Op.parse(op))]
    assert sentences(with_steps(nested(), steps)) == [
        f"`{op}` has no place in this schedule (see its facts); remove it"
    ]


def test_an_op_must_not_wait_for_one_that_never_runs() -> None:
    assert sentences(with_edges(nested(), [edge("update 9", "sync 2")])) == [
        "`sync 2` waits for `update 9`, which never runs; remove the edge"
    ]


def test_a_schedule_without_any_edge_is_refused_under_every_rule() -> None:
    bare = with_steps(nested(batches=7), [Step(step.op) for step in nested(batches=7)])
    assert {violation.rule for violation in violations(bare)} == {
        "one network order",
        "one issue order",
        "bounded look-ahead",
        "data before use",
        "freshness",
        "frozen window",
        "safe buffer reuse",
        "fixed summation order",
    }


def on_gpus(batches: int = 3) -> Schedule:
    made = plan("nested", PlanOptions(micro_batches=2))
    return with_separate_dense_group(with_separate_key_group(made)).schedule(batches)


def test_collectives_of_all_networks_of_the_devices_are_issued_in_one_order() -> None:
    tie = Tie(How.BEHIND, Op.parse("reduce 0"), Op.parse("grads 0.1"))
    (violation,) = violations(on_gpus().without(tie))
    assert violation.rule == "one issue order"
    assert violation.sentence == (
        "`reduce 0` and `grads 0.1` have no fixed order of issue on the device, so ranks can start "
        "them in different orders and hang; issue `grads 0.1` behind `reduce 0`"
    )
    assert (violation.how, violation.missing) == (How.BEHIND, (tie.before, tie.op))


def test_dense_gradients_are_summed_alongside_the_op_that_makes_them() -> None:
    tie = Tie(How.ALONGSIDE, Op.parse("dense 1.1"), Op.parse("reduce 1"))
    found = next(violations(on_gpus().without(tie)))
    assert found.sentence == (
        "`reduce 1` can read the summed dense gradients before `dense 1.1` has run; "
        "make `reduce 1` wait for `dense 1.1`"
    )


def test_an_op_runs_alongside_no_other_than_the_one_whose_output_comes_bit_by_bit() -> None:
    made = on_gpus()
    steps = [
        replace(step, alongside=Op.parse("sync 1")) if str(step.op) == "rows 1.0" else step
        for step in made
    ]
    found = next(violations(Schedule(made.shape, made.batches, tuple(steps))))
    assert found.sentence == "`rows 1.0` cannot run alongside `sync 1`; remove that"


# What a person sees


def test_the_error_begins_with_the_sentence_and_draws_the_bad_op() -> None:
    broken = nested().without_edge(*edge("update 0", "sync 1"))
    with pytest.raises(ScheduleError) as caught:
        check(broken)
    sentence, blank, *picture = str(caught.value).splitlines()
    assert sentence == (
        "`rows 1.0` can read rows that `update 0` has not written; "
        "make `sync 1` wait for `update 0`"
    )
    assert blank == ""
    (compute,) = [i for i, line in enumerate(picture) if "!s1" in line]
    assert picture[compute].startswith("compute")
    pointer = picture[compute + 1]
    assert pointer[picture[compute].index("!s1")] == "^"
    assert set(pointer) == {" ", "^"}
    assert "marked:  sync 1  update 0" in picture


def test_a_deadlock_is_drawn_too() -> None:
    with pytest.raises(ScheduleError) as caught:
        check(with_edges(nested(), [edge("update 1", "update 1")]))
    sentence, _, *picture = str(caught.value).splitlines()
    assert sentence.startswith("deadlock: ")
    assert any("!u1" in line for line in picture)


def test_a_missing_op_leaves_the_rest_to_be_drawn() -> None:
    steps = [s for s in nested() if str(s.op) != "writeback 2"]
    with pytest.raises(ScheduleError, match=r"^`writeback 2` is missing") as caught:
        check(with_steps(nested(), steps))
    assert "writeback 1" in str(caught.value) or "w1" in str(caught.value)


# The remedy helps


NAMED_OTHERWISE = {("stale_prefetch", Kind.RETRIEVE, Kind.SWAP)}
"""`swap` touches no rows, so for the checker it is the first `rows` that must wait."""


@every_plan
def test_the_deleted_edge_is_named_as_a_remedy(name: str, retrieval: Retrieval) -> None:
    schedule = plan(name, PlanOptions(micro_batches=2, retrieval=retrieval)).schedule(7)
    implied = redundant_edges(schedule)
    for gone in schedule.edges:
        if gone in implied or (name, gone[0].kind, gone[1].kind) in NAMED_OTHERWISE:
            continue
        remedies = {v.missing for v in violations(schedule.without_edge(*gone), stale=name)}
        assert gone in remedies, f"`{gone[1]}` no longer waits for `{gone[0]}`"


@every_plan
def test_adding_every_missing_edge_mends_the_schedule(name: str, retrieval: Retrieval) -> None:
    schedule = plan(name, PlanOptions(micro_batches=2, retrieval=retrieval)).schedule(7)
    implied = redundant_edges(schedule)
    for gone in schedule.edges:
        if gone in implied:
            continue
        broken = schedule.without_edge(*gone)
        missing = [v.missing for v in violations(broken, stale=name)]
        mended = with_edges(broken, [m for m in missing if m is not None])
        assert missing
        assert None not in missing
        assert [v.sentence for v in violations(mended, stale=name)] == [], gone


def test_a_shared_window_needs_a_place_for_each_micro_batch() -> None:
    shared = PlanOptions(micro_batches=2, exchange=Exchange.WINDOW)
    text = to_text(plan("serial", shared).schedule(3))
    assert "\nreceive 2\n" in text
    too_small = from_text(text.replace("\nreceive 2\n", "\nreceive 1\n"))
    with pytest.raises(ScheduleError, match=r"`dense 0\.1` reads the received rows, which no"):
        check(too_small)


def test_uses_of_a_shared_row_are_added_in_turn_and_before_its_gradient_leaves() -> None:
    schedule = plan("nested", PlanOptions(micro_batches=3, exchange=Exchange.WINDOW)).schedule(3)
    use, next_use = edge("dense 1.1", "dense 1.2")
    after_use = [after for before, after in schedule.edges if before == use]
    assert {"dense 1.2", "grads 1.1", "grads 1.2"} == set(map(str, after_use))
    hasty = schedule
    for after in after_use:
        hasty = hasty.without_edge(use, after)
    found = {v.sentence for v in violations(hasty)}
    assert (
        f"`{next_use}` can change the row gradients of the window before `{use}` has had its turn; "
        f"make `{next_use}` wait for `{use}`"
    ) in found
    assert (
        f"`grads 1.1` can read the row gradients of the window before `{use}` has run; "
        f"make `grads 1.1` wait for `{use}`"
    ) in found
