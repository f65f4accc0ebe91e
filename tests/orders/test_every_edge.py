"""Every tie of every plan is either implied by the others, or training breaks without it.

A tie is implied when happens-before and the order of issue are the same without it; the checker
must then still accept the schedule. Every other tie is necessary: without it the checker must
refuse, and a run of the interpreter must show why (another table, a deadlock, or an overrun of the
look-ahead).
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import pytest

from nestpipe.schedule import (
    PLANS,
    Exchange,
    HappensBefore,
    Kind,
    Merge,
    Op,
    PlanOptions,
    Retrieval,
    Schedule,
    Step,
    Tie,
    happens_before,
    issued_before,
    plan,
    redundant_ties,
    to_text,
    violations,
    with_early_rows,
    with_gradient_norm,
    with_separate_dense_group,
    with_separate_key_group,
)
from support.examples import every, is_long, num_examples
from support.toy_schedule import Interpreter, Outcome, ToyData

BATCHES = 8
"""Enough for every place that is used in turn to be used twice."""
MOST_RUNS = 200
"""A necessary tie is shown by the first run in most cases; some deadlocks need a ring of ranks."""
SETS = num_examples("sets of edges")
"""Sets of ties that are removed together."""
ALIKE = num_examples("edges alike")
"""Ties between the same kinds of op that are removed; the long profile removes all."""
Refuses = Callable[[Schedule], bool]
Golden = Callable[[str, str], None]


def refuses(schedule: Schedule) -> bool:
    return next(violations(schedule, stale="stale_prefetch"), None) is not None


@dataclass(frozen=True)
class Case:
    """A plan whose ties are removed one by one."""

    name: str
    options: PlanOptions
    early: bool = False
    separate: bool = False
    """Keys and dense gradients have networks of their own, as on a GPU."""
    clips: bool = False
    """Gradients are clipped by their norm."""
    separate_keys: bool = False
    """Keys alone have a network of their own, as on a GPU with one rank."""

    def __str__(self) -> str:
        o = self.options
        facts = [self.name, str(o.retrieval), f"micros {o.micro_batches}", f"stages {o.stages}"]
        facts += ["window exchange"] if o.exchange is Exchange.WINDOW else []
        facts += ["early rows"] if self.early else []
        facts += ["three buffers"] if o.buffers == 3 else []
        facts += ["exact groups"] if o.merge is Merge.EXACT else []
        facts += ["separate networks"] if self.separate else []
        facts += ["separate keys"] if self.separate_keys else []
        facts += ["clipped"] if self.clips else []
        return ", ".join([*facts, f"mirror every {o.merge_every}"] if o.merge_every else facts)

    @cached_property
    def schedule(self) -> Schedule:
        made = plan(self.name, self.options)
        made = with_early_rows(made) if self.early else made
        made = with_gradient_norm(made) if self.clips else made
        if self.separate:
            made = with_separate_dense_group(with_separate_key_group(made))
        made = with_separate_key_group(made) if self.separate_keys else made
        return made.schedule(BATCHES)

    @cached_property
    def interpreter(self) -> Interpreter:
        return Interpreter(self.schedule)


@cache
def data_of(case: Case, seed: int) -> ToyData:
    """About a third of all keys are in each batch, so neighbours share some and not all."""
    groups = 2 if case.options.merge_every else 1
    micro_batches = case.options.micro_batches
    # Places for three batches must not be places for all keys, or none is short of one.
    more = 1 + (case.options.buffers == 3 and case.options.retrieval is Retrieval.POOLED)
    return ToyData.random(
        seed,
        ranks=2 * groups,
        batches=BATCHES,
        micro_batches=micro_batches,
        groups=groups,
        # A batch that merges has the keys of all groups since the last one.
        vocabulary=8 * more * micro_batches * groups * max(1, case.options.merge_every),
    )


@cache
def expected_of(case: Case, seed: int) -> Outcome:
    """Where the plan ends with all its ties."""
    return case.interpreter.run_in_issue_order(data_of(case, seed))


def cases() -> Iterator[Case]:
    for name in PLANS:
        for retrieval in Retrieval:
            if name == "stale_prefetch" and retrieval is not Retrieval.WHOLE:
                continue
            for micro_batches in (8, 4, 2, 1):
                yield Case(name, PlanOptions(micro_batches=micro_batches, retrieval=retrieval))
            yield Case(name, PlanOptions(micro_batches=2, retrieval=retrieval, merge_every=2))
            exact = PlanOptions(
                micro_batches=2, retrieval=retrieval, merge_every=1, merge=Merge.EXACT
            )
            yield Case(name, exact)
            if name not in ("serial", "frozen_window"):  # their lookup has one stage in any case
                for stages in (1, 2, 3):
                    yield Case(
                        name, PlanOptions(micro_batches=2, retrieval=retrieval, stages=stages)
                    )


CASES = list(cases())
WINDOW_CASES = [
    Case(
        name,
        PlanOptions(micro_batches=micro_batches, retrieval=retrieval, exchange=Exchange.WINDOW),
    )
    for name in ("serial", "frozen_window", "nested")
    for retrieval in Retrieval
    for micro_batches in (2, 4)
]
"""Micro-batches that share rows."""


EARLY_CASES = [
    Case(
        "nested",
        PlanOptions(micro_batches=micro_batches, retrieval=retrieval, stages=stages),
        early=True,
    )
    for retrieval in (Retrieval.WHOLE, Retrieval.NEW)
    for micro_batches, stages in ((1, 4), (2, 4), (3, 4), (2, 1))
]
"""Rows of the first micro-batch are sent before they are refreshed."""
THIRD_CASES = [
    Case(
        name,
        PlanOptions(
            micro_batches=micro_batches,
            retrieval=retrieval,
            stages=stages,
            merge_every=every,
            buffers=3,
        ),
        early=early,
    )
    for name, retrieval, micro_batches, stages, every, early in (
        ("nested", Retrieval.NEW, 1, 4, 0, False),
        ("nested", Retrieval.NEW, 2, 4, 0, False),
        ("nested", Retrieval.NEW, 2, 4, 0, True),
        ("nested", Retrieval.NEW, 3, 2, 0, True),
        ("nested", Retrieval.NEW, 2, 1, 2, False),
        ("dual_buffer", Retrieval.NEW, 2, 4, 1, False),
        ("dual_buffer", Retrieval.NEW, 2, 1, 0, True),
        ("nested", Retrieval.POOLED, 1, 4, 0, False),
        ("nested", Retrieval.POOLED, 2, 2, 0, False),
        ("nested", Retrieval.POOLED, 2, 1, 2, False),
        ("dual_buffer", Retrieval.POOLED, 2, 4, 1, False),
        ("dual_buffer", Retrieval.POOLED, 1, 1, 0, False),
    )
]
"""Rows are written back while the next are read."""
SEPARATE_CASES = [
    Case(name, PlanOptions(micro_batches=micro_batches, retrieval=retrieval), early, separate=True)
    for name, micro_batches, retrieval, early in (
        ("serial", 2, Retrieval.WHOLE, False),
        ("sparse_dist", 2, Retrieval.NEW, False),
        ("stale_prefetch", 2, Retrieval.WHOLE, False),
        ("dual_buffer", 2, Retrieval.NEW, False),
        ("frozen_window", 2, Retrieval.WHOLE, False),
        ("nested", 1, Retrieval.WHOLE, False),
        ("nested", 2, Retrieval.WHOLE, True),
        ("nested", 2, Retrieval.NEW, False),
        ("nested", 4, Retrieval.NEW, True),
        ("serial", 2, Retrieval.POOLED, False),
        ("sparse_dist", 2, Retrieval.POOLED, False),
        ("dual_buffer", 2, Retrieval.POOLED, False),
        ("frozen_window", 2, Retrieval.POOLED, False),
        ("nested", 1, Retrieval.POOLED, False),
        ("nested", 4, Retrieval.POOLED, False),
    )
]
"""Dense gradients are summed alongside the last `dense`, behind what else the device exchanges."""
REPLICA_CASES = [
    Case(
        "nested",
        PlanOptions(micro_batches=2, retrieval=retrieval, merge_every=every, merge=merge),
        separate=True,
    )
    for retrieval in Retrieval
    for every, merge in ((1, Merge.EXACT), (3, Merge.AVERAGED))
]
"""Replicas are merged on GPUs."""
POOL_CASES = [
    Case(
        name,
        PlanOptions(
            micro_batches=2,
            retrieval=Retrieval.POOLED,
            exchange=Exchange.WINDOW,
            merge_every=every,
            merge=merge,
        ),
    )
    for name in PLANS
    if name != "stale_prefetch"
    for every, merge in ((1, Merge.EXACT), (2, Merge.AVERAGED), (0, Merge.AVERAGED))
    if every or name in ("sparse_dist", "dual_buffer")  # the others are above
]
"""Rows stay in a pool, and micro-batches share those that came."""
KEY_CASES = [
    Case(
        name,
        PlanOptions(retrieval=Retrieval.POOLED, stages=stages, buffers=buffers),
        separate_keys=True,
    )
    for name, stages, buffers in (
        ("nested", 4, 3),
        ("nested", 2, 3),
        ("dual_buffer", 4, 2),
        ("nested", 4, 2),
    )
]
"""One rank, whose keys wait for no rows."""
NORM_CASES = [
    Case(
        name,
        PlanOptions(
            micro_batches=micro_batches, retrieval=retrieval, merge_every=every, merge=Merge.EXACT
        ),
        early,
        separate,
        clips=True,
    )
    for name, micro_batches, retrieval, every, early, separate in (
        ("serial", 2, Retrieval.WHOLE, 0, False, False),
        ("sparse_dist", 2, Retrieval.NEW, 0, False, False),
        ("dual_buffer", 2, Retrieval.NEW, 0, False, True),
        ("dual_buffer", 2, Retrieval.POOLED, 1, False, False),
        ("frozen_window", 2, Retrieval.WHOLE, 0, False, True),
        ("nested", 1, Retrieval.POOLED, 0, False, False),
        ("nested", 2, Retrieval.WHOLE, 0, True, True),
        ("nested", 2, Retrieval.NEW, 1, False, False),
        ("nested", 2, Retrieval.POOLED, 1, False, True),
        ("nested", 4, Retrieval.POOLED, 0, False, True),
    )
]
"""The norm of all gradients is known before any of them is applied."""
MORE_CASES = [
    *KEY_CASES,
    *NORM_CASES,
    *WINDOW_CASES,
    *EARLY_CASES,
    *THIRD_CASES,
    *SEPARATE_CASES,
    *REPLICA_CASES,
    *POOL_CASES,
]


def in_pairs(cases: list[Case]) -> Iterator[Case]:
    """Without every other case of 4 and 8 micro-batches: a plan and a retrieval meet both still."""
    for case in cases:
        odd = (list(PLANS).index(case.name) + list(Retrieval).index(case.options.retrieval)) % 2
        if case.name == "stale_prefetch" or case.options.micro_batches != (4 if odd else 8):
            yield case


class Mutations:
    """Removes each tie of a case in turn and collects what is wrong with the verdicts."""

    def __init__(self, case: Case, refuses: Refuses, most_runs: int = MOST_RUNS) -> None:
        self.case = case
        self.refuses = refuses
        self.most_runs = most_runs
        self.schedule = case.schedule
        self.order = orders_of(self.schedule)
        self.implied: set[Tie] = set()
        self.troubles: Counter[str] = Counter()
        self.runs = 0
        self.faults: list[str] = []
        if refuses(self.schedule):
            self.faults.append(f"{case}: the checker refuses the plan itself")
        self.removed = removed_of(self.schedule, seed=str(case))
        for tie in self.removed:
            self._remove(tie)

    def _remove(self, tie: Tie) -> None:
        mutant = self.schedule.without(tie)
        refused = self.refuses(mutant)
        gone = f"{self.case}: no longer {tie}"
        if orders_of(mutant) == self.order:
            self.implied.add(tie)
            if refused:
                self.faults.append(f"{gone}, which changes nothing, and the checker refuses it")
            return
        trouble = self._first_trouble(mutant, tie.before, tie.op)
        if trouble:
            self.troubles[trouble] += 1
        else:
            self.faults.append(f"{gone}, and {self.most_runs} runs end as before")
        if not refused:
            self.faults.append(f"{gone}, and the checker accepts it")

    def _first_trouble(self, mutant: Schedule, before: Op, after: Op) -> str:
        """What goes wrong in runs that hold `before` back; empty when nothing does."""
        interpreter = Interpreter(mutant)
        for seed in range(self.most_runs):
            self.runs += 1
            found = interpreter.run_against(data_of(self.case, seed), before, after, seed)
            if found != expected_of(self.case, seed):
                return found.trouble.split(":")[0] or "another table"
        return ""


def removed_of(schedule: Schedule, seed: str) -> list[Tie]:
    """Of ties that are alike but for batch and micro-batch, some; other cases choose others."""
    alike: dict[object, list[Tie]] = {}
    for tie in schedule.ties:
        away = tie.op.batch - tie.before.batch
        alike.setdefault((tie.op.kind, tie.how, tie.before.kind, away), []).append(tie)
    chance = random.Random(seed)
    chosen = {tie for of in alike.values() for tie in chance.sample(of, min(ALIKE, len(of)))}
    return [tie for tie in schedule.ties if tie in chosen]


def orders_of(schedule: Schedule) -> tuple[HappensBefore, HappensBefore]:
    """All that the ties promise."""
    return happens_before(schedule), issued_before(schedule)


@pytest.mark.parametrize("case", every(2, [*in_pairs(CASES), *MORE_CASES]), ids=str)
def test_every_edge_is_implied_or_necessary(case: Case) -> None:
    mutations = Mutations(case, refuses)
    assert not mutations.faults, "\n".join(["", *mutations.faults])
    # Not vacuous: both sorts of tie are there, and each sort of trouble was seen.
    assert mutations.implied
    troubles = {"another table", "deadlock", "overrun"}
    assert set(mutations.troubles) == troubles if is_long() else mutations.troubles.total() > 5
    assert mutations.troubles.total() + len(mutations.implied) == len(mutations.removed)
    assert mutations.implied == redundant_ties(mutations.schedule) & set(mutations.removed)


def test_every_implied_edge_is_in_the_golden_list(golden: Golden) -> None:
    golden("redundant_edges.txt", report_of_implied_edges())


def report_of_implied_edges() -> str:
    lines = [
        "# Ties that other ties imply. They stay in the schedules: each says what an op needs,",
        "# and it must hold where the ties that imply it (mostly the network order) are changed.",
        "# `3 of 8`: implied in three of eight batches; at both ends of a run it can be otherwise.",
    ]
    for case in sorted([*CASES, *SEPARATE_CASES], key=by_plan_then_options):
        ties, implied = case.schedule.ties, redundant_ties(case.schedule)
        counts = f"{len(ties)} ties, {len(ties) - len(implied)} necessary"
        lines += ["", f"{case}: {counts}, {len(implied)} implied"]
        if case.options.micro_batches == 2:  # more micro-batches repeat the ties of two
            total = Counter(map(template, ties))
            found = Counter(template(tie) for tie in ties if tie in implied)
            lines += [f"  {text}: {n} of {total[text]}" for text, n in found.items()]
    return "\n".join([*lines, ""])


def by_plan_then_options(case: Case) -> tuple[int, ...]:
    options = case.options
    places = list(PLANS).index(case.name), list(Retrieval).index(options.retrieval)
    return *places, case.separate, options.merge_every, -options.stages, options.micro_batches


def template(tie: Tie) -> str:
    """The tie of any batch t, e.g. `retrieve t after writeback t-2`."""
    before, op = tie.before, tie.op
    away = before.batch - op.batch
    micro = "" if before.micro is None else f".{before.micro}"
    own = "" if op.micro is None else f".{op.micro}"
    return f"{op.kind} t{own} {tie.how} {before.kind} t{f'{away:+d}' if away else ''}{micro}"


@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=str)
def test_a_schedule_without_edges_is_refused(case: Case) -> None:
    steps = tuple(Step(step.op) for step in case.schedule)
    assert refuses(Schedule(case.schedule.shape, BATCHES, steps))


@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=str)
def test_dropping_every_implied_edge_changes_nothing(case: Case) -> None:
    """Not only one by one: all together they add nothing to the order."""
    schedule = reduced = case.schedule
    for tie in redundant_ties(schedule):
        reduced = reduced.without(tie)
    assert orders_of(reduced) == orders_of(schedule)
    assert not refuses(reduced)


@pytest.mark.parametrize(
    "case", [c for c in (*CASES, *MORE_CASES) if c.options.micro_batches == 2], ids=str
)
def test_what_the_checker_accepts_runs_as_before_and_what_it_refuses_does_not(case: Case) -> None:
    """Removes several ties at once: an implied tie can be the one that saves the day."""
    rng = random.Random(0)
    schedule = case.schedule
    ties = schedule.ties
    implied = sorted(redundant_ties(schedule), key=str)
    accepted = 0
    faults: list[str] = []
    for seed in range(SETS):
        gone = rng.sample(implied, rng.randrange(1, 5)) + rng.sample(ties, seed % 2)
        mutant = schedule
        for tie in gone:
            mutant = mutant.without(tie)
        remedy = next((v.missing for v in violations(mutant, stale=case.name)), None)
        run = Interpreter(mutant)
        if remedy is None:
            accepted += 1
            data, expected = data_of(case, seed), expected_of(case, seed)
            if any(run.run_at_random(data, n) != expected for n in range(4)):
                faults.append(f"accepted, but runs differ: {described(gone)}")
        elif not any(differs(run, case, remedy, n) for n in range(MOST_RUNS)):
            faults.append(f"refused, but no run differs: {described(gone)}")
    assert not faults, "\n".join(["", *faults])
    assert 0 < accepted < SETS


def differs(run: Interpreter, case: Case, remedy: tuple[Op, Op], seed: int) -> bool:
    return run.run_against(data_of(case, seed), *remedy, seed) != expected_of(case, seed)


def described(ties: list[Tie]) -> str:
    return "; ".join(f"no longer {tie}" for tie in ties)


SMALL = Case("nested", PlanOptions(micro_batches=1))


def test_a_checker_that_refuses_nothing_would_be_found_out() -> None:
    mutations = Mutations(SMALL, lambda schedule: False, most_runs=20)
    necessary = len(mutations.removed) - len(mutations.implied)
    assert len(mutations.faults) == necessary > 0
    assert all(fault.endswith("the checker accepts it") for fault in mutations.faults)


def test_a_checker_that_refuses_everything_would_be_found_out() -> None:
    mutations = Mutations(SMALL, lambda schedule: True, most_runs=20)
    own, *others = mutations.faults
    assert own.endswith("the checker refuses the plan itself")
    assert len(others) == len(mutations.implied) > 0
    assert all(fault.endswith("the checker refuses it") for fault in others)


def test_a_checker_with_one_blind_spot_would_be_found_out() -> None:
    """As if it did not know that rows must be refreshed in one batch."""
    kinds = (Kind.UPDATE, Kind.SYNC)
    removed = removed_of(SMALL.schedule, str(SMALL))
    unseen = next(tie for tie in removed if (tie.before.kind, tie.op.kind) == kinds)
    blind = SMALL.schedule.without(unseen)

    def refuses_all_but_one(schedule: Schedule) -> bool:
        return to_text(schedule) != to_text(blind) and refuses(schedule)

    assert Mutations(SMALL, refuses_all_but_one, most_runs=20).faults == [
        f"{SMALL}: no longer {unseen}, and the checker accepts it"
    ]


def test_an_interpreter_that_notices_nothing_would_be_found_out() -> None:
    mutations = Mutations(SMALL, refuses, most_runs=0)
    necessary = len(mutations.removed) - len(mutations.implied)
    assert len(mutations.faults) == necessary > 0
    assert all(fault.endswith("0 runs end as before") for fault in mutations.faults)
