"""Profiles of a job that nobody ran: serial runs replayed with costs that are known."""

from collections.abc import Callable
from dataclasses import replace

from nestpipe.planner.choice import Candidate
from nestpipe.schedule import Kind, Lane
from nestpipe.schedule.schedule import Op
from nestpipe.sim.job_costs import JobProfile, ProfiledRun
from nestpipe.sim.replay import replay_shared
from nestpipe.trace import Trace

PER_BATCH = {
    Kind.PREFETCH: 3.0,
    Kind.COPY: 0.2,
    Kind.DEDUP: 1.0,
    Kind.COUNTS: 0.5,
    Kind.KEYS: 1.0,
    Kind.UNION: 1.0,
    Kind.RETRIEVE: 6.0,
    Kind.SYNC: 0.5,
    Kind.REDUCE: 2.0,
    Kind.UPDATE: 2.0,
    Kind.WRITEBACK: 4.0,
}
WHOLE = {Kind.RETRIEVE: 10.0, Kind.WRITEBACK: 8.0}
"""What `whole` takes instead."""
FIXED_MS = {Kind.ROWS: 0.5, Kind.DENSE: 0.4, Kind.GRADS: 0.5}
"""Of a micro-batch, whatever its size; the rest is shared out."""


def true_cost(
    one: Candidate, net: float, dense: float, faster: float = 1.0
) -> Callable[[Op, int], float]:
    """What an op of a candidate really takes: rows and gradients `net` ms, compute `dense` ms.

    On a link so many times as fast, what is beyond an empty message takes so much less.
    """
    whole = {Kind.ROWS: net, Kind.GRADS: net, Kind.DENSE: dense}
    empty = PER_BATCH[Kind.COUNTS]

    def cost(op: Op, rank: int) -> float:
        if op.micro is None:
            changed = WHOLE if one.retrieval == "whole" else {}
            ms = {**PER_BATCH, **changed}.get(op.kind, 0.0)
            return empty + (ms - empty) / faster if op.collective and ms else ms
        fixed = FIXED_MS[op.kind]
        rest = (whole[op.kind] - fixed) * one.split.shares[op.micro]
        return fixed + (rest / faster if op.collective else rest)

    return cost


def true_cpu(one: Candidate, net: float, cpu: float) -> Callable[[Op, int], float]:
    """For how much of that a collective needs a core: all of its fixed part, `cpu` of the rest."""
    whole = {Kind.ROWS: net, Kind.GRADS: net}

    def needed(op: Op, rank: int) -> float:
        if op.micro is None:
            return cpu * PER_BATCH.get(op.kind, 0.0)
        fixed = FIXED_MS[op.kind]
        return fixed + cpu * (whole[op.kind] - fixed) * one.split.shares[op.micro]

    return needed


def true_trace(
    one: Candidate,
    ranks: int,
    *,
    net: float,
    dense: float,
    batches: int,
    cpu: float | None = None,
    faster: float = 1.0,
) -> Trace:
    """The trace of a candidate on ranks with a core each; `cpu`: messages need it too."""
    from nestpipe.sim.replay import Sharing

    sharing = Sharing(tuple(range(ranks)), frozenset(Lane) - {Lane.NET})
    made = one.make_plan("cpu", ranks)
    cpu_of = None if cpu is None else true_cpu(one, net, cpu)
    cost = true_cost(one, net, dense, faster)
    return replay_shared(made, cost, sharing, batches=batches, cpu_of=cpu_of)


def _cpu_ms(one: Candidate, net: float, cpu: float | None) -> dict[str, float]:
    """Processor time of each collective of a batch, named as in a profile."""
    if cpu is None:
        return {}
    needed = true_cpu(one, net, cpu)
    micros = range(one.micro_batches)
    ops = [Op(kind, 0) for kind in (Kind.COUNTS, Kind.KEYS, Kind.REDUCE)]
    ops += [Op(kind, 0, micro) for kind in (Kind.ROWS, Kind.GRADS) for micro in micros]
    return {
        str(op.kind) + ("" if op.micro is None else f".{op.micro}"): needed(op, 0) for op in ops
    }


def world_profile(
    *, net: float = 20.0, dense: float = 20.0, ranks: int = 2, cpu: float | None = None
) -> JobProfile:
    """Serial runs unsplit, split in 8 and with whole working sets; no row is met twice."""
    plain = Candidate(retrieval="new")
    forms = (plain, replace(plain, micro_batches=8), replace(plain, retrieval="whole"))
    runs = []
    for form in forms:
        trace = true_trace(form, ranks, net=net, dense=dense, batches=9)
        sent = {
            f"{kind}.{micro}": 1e6 / form.micro_batches
            for kind in ("rows", "grads")
            for micro in range(form.micro_batches)
        }
        runs.append(ProfiledRun(form.form, (trace,), sent, cpu_ms=_cpu_ms(form, net, cpu)))
    return JobProfile(
        runs=tuple(runs),
        device="cpu",
        pools=tuple(range(ranks)),
        cores=1,
        samples=256,
        threads=1,
    )
