"""What a job would do on machines not bought yet: its profile, carried over to a hardware file.

Costs of compute follow the samples of a worker, those of rows the distinct keys of a batch, those
of messages the bytes on the target's links. Where an assumption decides, the answer is a range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, log
from typing import Any

import numpy as np

from nestpipe.config import not_negative, positive
from nestpipe.errors import ConfigError
from nestpipe.planner.choice import Candidate
from nestpipe.schedule import Kind, Op
from nestpipe.sim import Figures, figures
from nestpipe.sim.job_costs import JobCosts, JobProfile, Split
from nestpipe.sim.replay import CostOf, Sharing, replay_shared

K = Kind
SAMPLE_KINDS = frozenset({K.PREFETCH, K.COPY, K.DEDUP})
"""Their cost follows the samples of a worker's batch, as that of `dense` does on a curve."""
OWNED_KINDS = frozenset({K.UNION, K.RETRIEVE, K.SYNC, K.SWAP, K.UPDATE, K.WRITEBACK})
"""Their cost follows the distinct rows that a worker owns."""
HOST_KINDS = frozenset({K.PREFETCH, K.COPY, K.DEDUP, K.UNION, K.RETRIEVE, K.WRITEBACK})
SENT_KINDS = (K.ROWS, K.GRADS, K.KEYS, K.REDUCE)
REPLAYED = 2
"""Workers that are replayed: all are alike, but for the slowest of them."""
BATCHES = 16
HOURS = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledOn:
    """`[profile]`: the network that the profile was measured on."""

    gb_per_s: float = 1.25
    """Of a rank's link, each way."""

    def __post_init__(self) -> None:
        positive("gb_per_s", self.gb_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """`[[machines]]`: one kind of machine, beside the one of the profile."""

    name: str
    workers: int = 1
    """Workers in one machine, each with as much of it as a rank of the profile had."""
    compute: float = 1.0
    """Speed of dense compute and updates over that of the profile."""
    host: float = 1.0
    """Speed of reading, routing and of host memory over that of the profile."""
    price_per_hour: float = 0.0
    """Of one machine, in any currency."""

    def __post_init__(self) -> None:
        for name in ("workers", "compute", "host"):
            positive(name, getattr(self, name))
        not_negative("price_per_hour", self.price_per_hour)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """`[[networks]]`: one kind of network between machines."""

    name: str
    gb_per_s: float
    """Of one machine's link, each way; its workers share it."""
    node_gb_per_s: float = 20.0
    """Between the workers of one machine, for each."""
    message_us: float = 30.0
    """Fixed cost of one message to a peer."""
    contention: float = 0.0
    """Slowdown for each machine more; the range has a network without it too."""
    price_per_hour: float = 0.0
    """For one machine's link."""

    def __post_init__(self) -> None:
        for name in ("gb_per_s", "node_gb_per_s"):
            positive(name, getattr(self, name))
        for name in ("message_us", "contention", "price_per_hour"):
            not_negative(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A hardware file of `simulate --job`: what could be bought."""

    profile: ProfiledOn = field(default_factory=ProfiledOn)
    machines: tuple[Machine, ...] = ()
    networks: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if not self.machines or not self.networks:
            lacks = "machines" if not self.machines else "networks"
            raise ConfigError(f"the hardware file has no {lacks}; add one as [[{lacks}]]")


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What no profile tells; each is taken both ways."""

    full_rate: bool = False
    """Whether messages use all of a link, or as much of it as they did in the profile."""
    slowest: bool = True
    """Whether a collective waits for the slowest of all workers, or for those of the replay."""
    contention: bool = True
    """Whether the network slows down as the file says."""


EVERY_ASSUMPTION = tuple(Assumptions(*values) for values in product((False, True), repeat=3))


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One thing that could be bought, and how it would be used."""

    machine: Machine
    link: Link
    workers: int
    groups: int = 1
    pools: tuple[int, ...] = ()
    """Where workers share cores with each other, and not each its own: which ones."""

    @property
    def machines(self) -> int:
        return ceil(self.workers / self.machine.workers)

    @property
    def price_per_hour(self) -> float:
        return self.machines * (self.machine.price_per_hour + self.link.price_per_hour)


class FleetPredictor:
    """Steps of a job on any site, from the profile of two or more ranks."""

    def __init__(
        self, profile: JobProfile, measured_on: ProfiledOn, *, global_batch: int, per_worker: bool
    ) -> None:
        """`per_worker`: batches grow with the workers; else the global batch stays."""
        if profile.ranks < 2 or profile.plain.sent_by(K.ROWS) <= 0:
            raise ConfigError(
                "the profile is of one rank, which sends nothing; profile 2 ranks or more "
                "(plan --ranks 2 --save-profile FILE)"
            )
        self.profile, self._on = profile, measured_on
        self._batch, self._per_worker = global_batch, per_worker
        self._costs = JobCosts(profile)
        empty = float(np.mean(self._costs.typical(K.COUNTS)))
        busy = profile.plain.collective_draw
        self._empty = empty, profile.plain.cpu_by(K.COUNTS) or busy * empty
        """What a message of nearly no bytes takes, and how much of that a core."""

    def samples(self, workers: int) -> float:
        """Of one worker's batch."""
        return self.profile.samples if self._per_worker else self._batch / workers

    def figures(self, site: Site, one: Candidate, assumed: Assumptions) -> Figures:
        """Replay a candidate on a site."""
        replayed = site.workers if site.pools else min(site.workers, REPLAYED)
        made = replace(one, groups=site.groups).make_plan(self.profile.device, site.workers)
        # Up to the batch of the profile, sizes are on its curves; larger ones go on in a line.
        size = min(1.0, self.samples(site.workers) / self.profile.samples)
        split = Split(tuple(size * share for share in one.split.shares))
        form, sharing = replace(one.form, groups=1), self._sharing(site, replayed)
        base, cpu = self._costs.of(form, split, made.shape), self._costs.cpu_of(form, split)
        cost_of, cpu_of = self._carried_over(base, cpu or self._usual_cpu(base), site, assumed)
        needs = cpu_of if self.profile.shares_cores else None
        trace = replay_shared(made, cost_of, sharing, batches=BATCHES, buckets=4, cpu_of=needs)
        run = figures(trace, samples=self.samples(site.workers))
        speed = 1000 * self.samples(site.workers) * site.workers / run.step_ms
        return replace(run, workers=site.workers, groups=site.groups, samples_per_s=speed)

    def _sharing(self, site: Site, replayed: int) -> Sharing:
        """Each worker has as many cores as a rank of the profile had for itself."""
        known = self.profile.sharing()
        if site.pools:
            return replace(known, pools=site.pools)
        on_each = self.profile.ranks / len(set(self.profile.pools))
        return replace(known, pools=tuple(range(replayed)), capacity=known.capacity / on_each)

    def _usual_cpu(self, base: CostOf) -> CostOf:
        """The same part of every message, where the profile does not tell them apart."""
        busy = self.profile.plain.collective_draw
        return lambda op, rank: busy * base(op, rank)

    def _carried_over(
        self, base: CostOf, cpu: CostOf, site: Site, assumed: Assumptions
    ) -> tuple[CostOf, CostOf]:
        """What ops take on a site, and for how much of that collectives need a core."""
        profile, workers = self.profile, site.workers
        growth = self._costs.growth
        by_samples = self.samples(workers) / profile.samples
        whole = self.samples(workers) * workers / (profile.samples * profile.ranks)
        shards, measured_shards = workers // site.groups, profile.ranks
        merged = site.groups > 1
        owned = whole**growth * measured_shards / shards
        waits = self._slowest(workers) if assumed.slowest and not site.pools else 1.0
        speed = {k: site.machine.host if k in HOST_KINDS else site.machine.compute for k in Kind}
        far = self._far(site, assumed)
        beyond = max(1.0, by_samples)
        grown = {K.KEYS: by_samples**growth, K.REDUCE: 1.0}
        wire = {
            kind: self._wire(kind, site, far, grown.get(kind, beyond**growth), assumed)
            for kind in SENT_KINDS
        }
        ranks = profile.ranks

        def cost_of(op: Op, rank: int) -> float:
            kind = op.kind
            if merged and kind in (K.REPLICA_KEYS, K.REPLICA_SYNC):
                return self._merge_ms(site, owned) if kind is K.REPLICA_SYNC else 0.0
            ms = base(op, rank % ranks)
            if kind in wire:
                return sum(wire[kind](ms, cpu(op, rank % ranks)))
            if kind is K.DENSE:
                return waits * ms * beyond / speed[kind]
            if kind in SAMPLE_KINDS:
                return ms * by_samples / speed[kind]
            if kind in OWNED_KINDS:
                return ms * owned / speed[kind]
            return max(ms, site.link.message_us * (shards - 1) / 1000) if op.collective else ms

        def cpu_of(op: Op, rank: int) -> float:
            ms = cpu(op, rank % ranks)
            return wire[op.kind](ms, ms)[0] if op.kind in wire else ms / site.machine.host

        return cost_of, cpu_of

    def _far(self, site: Site, assumed: Assumptions) -> float:
        """Milliseconds of a byte that a worker sends, over links between and inside machines."""
        shards = site.workers // site.groups
        inside = min(site.machine.workers, shards)
        outside = (shards - inside) / max(1, shards - 1)
        contention = 1 + site.link.contention * (site.machines - 1) * assumed.contention
        far = contention * min(site.machine.workers, site.workers) / site.link.gb_per_s
        return (outside * far + (1 - outside) / site.link.node_gb_per_s) / 1e6

    def _wire(
        self, kind: Kind, site: Site, byte_ms: float, grown: float, assumed: Assumptions
    ) -> Callable[[float, float], tuple[float, float]]:
        """From what a message took in the profile, and how much of that was a core's, to what a
        core and the link take on the site."""
        ranks = self.profile.ranks
        shards = site.workers if kind is K.REDUCE else site.workers // site.groups
        if shards == 1:
            return lambda ms, cpu: (0.0, 0.0)
        sent = self.profile.plain.sent_by(kind)
        whole = float(np.mean(self._costs.typical(kind)))
        to_others = ((shards - 1) / shards) / ((ranks - 1) / ranks)
        ratio = to_others * grown
        message = site.link.message_us * (shards - 1) / 1000
        empty, empty_cpu = self._empty
        slower = byte_ms * self._on.gb_per_s * 1e6

        def carried(ms: float, cpu: float) -> tuple[float, float]:
            # An empty message takes as long on any link, and so does what a core does for bytes.
            copies, waits = max(0.0, min(cpu, ms) - empty_cpu), min(ms, empty)
            wire = max(0.0, ms - waits - copies) * ratio * slower
            if assumed.full_rate and sent:
                part = ms / whole if whole > 0 else 1.0
                wire = min(wire, part * sent * ratio * byte_ms)
            core = (min(cpu, empty_cpu) + copies * ratio) / site.machine.host
            return core, max(message, waits - empty_cpu) + wire

        return carried

    def _merge_ms(self, site: Site, owned: float) -> float:
        """Exact groups: gradients of the rows that a worker owns, summed over all replicas."""
        ranks = self.profile.ranks
        asked = self.profile.plain.sent_by(K.GRADS) * ranks / max(1, ranks - 1)
        num_bytes = asked * owned
        members = site.groups
        outside = site.machines > 1
        gb_per_s = site.link.gb_per_s if outside else site.link.node_gb_per_s
        shared = min(site.machine.workers, site.workers) if outside else 1
        wire = 2 * num_bytes * (members - 1) / members * shared / gb_per_s / 1e6
        return wire + site.link.message_us * (members - 1) / 1000

    def _slowest(self, workers: int) -> float:
        """How much longer than the usual worker the slowest of so many takes for its compute."""
        if workers <= REPLAYED:
            return 1.0
        spread = self._costs.spread_of(K.DENSE)
        return 1 + spread * (2 * log(workers)) ** 0.5

    def candidates(self, workers: int) -> list[Candidate]:
        """Plans that are worth a look on any site."""
        counts = [n for n in (2, 4, 8) if 4 * n <= self.samples(workers)] if workers > 1 else []
        window = "window" if "window" in self._costs.known("exchange") else "micro"
        return [
            Candidate(retrieval="new"),
            Candidate(plan="dual_buffer", retrieval="new"),
            *(Candidate(plan="nested", retrieval="new", micro_batches=n) for n in counts),
            *(
                Candidate(plan="nested", retrieval="new", micro_batches=n, exchange=window)
                for n in counts
                if window == "window"
            ),
        ]


@dataclass(frozen=True, slots=True)
class SiteAnswer:
    """One site with its best plan."""

    site: Site
    candidate: Candidate
    figures: Figures
    low_ms: float
    high_ms: float
    """The step over all assumptions."""
    decides: str
    """The assumption that moves the step most; empty where none moves it by 2 %."""

    def cost(self, step_ms: float) -> float:
        """Of a billion samples."""
        samples_per_s = self.figures.samples_per_s * self.figures.step_ms / step_ms
        return self.site.price_per_hour * 1e9 / samples_per_s / HOURS

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "machine": self.site.machine.name,
            "network": self.site.link.name,
            "workers": self.site.workers,
            "machines": self.site.machines,
            "groups": self.site.groups,
            "settings": self.candidate.sections()["pipeline"],
            "step_ms": self.figures.step_ms,
            "step_ms_range": [self.low_ms, self.high_ms],
            "decides": self.decides,
            "samples_per_s": self.figures.samples_per_s,
            "busiest_lane": self.figures.busiest_lane,
            "cost_per_billion": self.cost(self.figures.step_ms),
            "cost_range": [self.cost(self.low_ms), self.cost(self.high_ms)],
        }


def answer(predictor: FleetPredictor, site: Site) -> SiteAnswer:
    """The best plan of a site, and what its step depends on."""
    nominal = Assumptions()
    found = {c: predictor.figures(site, c, nominal) for c in predictor.candidates(site.workers)}
    best = min(found, key=lambda c: found[c].step_ms)
    steps = {a: predictor.figures(site, best, a).step_ms for a in EVERY_ASSUMPTION}
    step = found[best].step_ms
    moves = {
        name: abs(steps[replace(nominal, **{name: not getattr(nominal, name)})] - step) / step
        for name in Assumptions.__slots__
    }
    most = max(moves, key=lambda name: moves[name])
    return SiteAnswer(
        site,
        best,
        found[best],
        min(steps.values()),
        max(steps.values()),
        ASSUMED[most] if moves[most] >= 0.02 else "",
    )


ASSUMED = {
    "full_rate": "use of links",
    "slowest": "slowest worker",
    "contention": "contention",
}


def sites(offer: Offer, workers: Sequence[int], groups: Sequence[int]) -> list[Site]:
    """Everything that the file offers, with each number of workers and of groups that divides."""
    return [
        Site(machine=machine, link=link, workers=count, groups=m)
        for machine in offer.machines
        for link in offer.networks
        for count in workers
        for m in groups
        if count % m == 0 and (m == 1 or count // m > 1)
    ]
