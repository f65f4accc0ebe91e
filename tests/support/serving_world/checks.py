"""What must hold in a world after every event."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from nestpipe.errors import RunError, ShedError
from nestpipe.serve.types import Answer, RankPath
from support.serving_world.member import Member
from support.serving_world.model import plain_scores


@dataclass(eq=False)
class Asked:
    """A ranking, and all that its answer is judged by."""

    number: int
    user: str
    events: list[int]
    candidates: list[int]
    cut_length: int
    versions: set[str]
    """Of models that it may be answered by."""
    faithful: set[Member]
    """Members that have been there and well since it was asked."""
    answer: Future[Answer] | None = None
    tried: list[str] = field(default_factory=list)
    shed_by: list[Member] = field(default_factory=list)

    def __str__(self) -> str:
        return f"ranking {self.number} of {self.user}"


def check_answer(asked: Asked) -> str:
    """Whether a ranking got what a plain model gives, and how it was come by."""
    assert asked.answer is not None
    error = asked.answer.exception()
    if error is not None:
        _check_refusal(asked, error)
        return type(error).__name__
    got, events = asked.answer.result(), asked.events
    length = asked.cut_length if got.path is RankPath.MISS_CUT else len(events)
    assert got.length_used == length, f"{asked} used {got.length_used} events, not {length}"
    assert got.version in asked.versions, f"{asked}: nobody served model {got.version}"
    right = plain_scores(events[len(events) - length :], int(got.version), asked.candidates)
    assert got.scores_C.tolist() == right, f"{asked} has wrong scores, not {right}: {got}"
    return str(got.path)


def _check_refusal(asked: Asked, error: BaseException) -> None:
    """Only where two had too much to do, or nobody was left to answer."""
    assert isinstance(error, ShedError | RunError), f"{asked} failed: {error!r}"
    if isinstance(error, ShedError) and len(asked.shed_by) > 1:
        return
    left = asked.faithful.difference(asked.shed_by)
    assert not left, f"{left} could have answered {asked}: {error}"


def check_member(member: Member, now: float) -> None:
    state, device_pool, host = (
        member.state,
        member.state.cache.device_pool,
        member.state.cache.host_tier,
    )
    assert state.broken is None, f"a thread of {member} died: {state.broken!r}"
    assert not state.predictions.faults, f"predictions of {member} failed"
    entries = list(device_pool)
    assert device_pool.num_bytes == sum(entry.num_bytes for entry in entries), (
        f"{member} counts wrongly"
    )
    assert device_pool.num_bytes <= device_pool.bound, f"{member} exceeds its device memory"
    for entry in entries:
        held = 0 if entry.kv is None else entry.kv.num_bytes
        assert held <= entry.num_bytes, f"{entry.key} takes more than was set aside"
        whole = entry.kv is not None and entry.kv.layer_events is None
        if entry.listed and entry.complete and not entry.arriving:
            assert whole, f"{member} keeps {entry.key}, which came only in part"
    listed = [entry.key for entry in entries if entry.listed]
    keys = set(listed)
    assert len(keys) == len(listed), f"{member} makes a prefix twice: {listed}"
    for key in member.promises.due(now):
        assert key in keys, f"{member} has freed {key}, which was promised"
    if host is not None:
        kept = host._kept.values()
        assert host.num_bytes == sum(one.num_bytes for one in kept), f"{member} counts wrongly"
        assert host.num_bytes <= host.bound, f"{member} exceeds its host memory"


def check_rest(member: Member) -> None:
    """Its threads wait, nobody will call them, no time is to come: then nothing is to be done."""
    waiting, cache = member.state.rank_queue, member.state.cache
    assert not len(waiting), f"{member} sleeps, and rankings stand in line"
    assert not len(cache.fills), f"{member} sleeps, and a prefix is not computed"
    assert not len(cache.loads), f"{member} sleeps, and a prefix is not reloaded"
    assert not cache.loading, f"{member} has lost a reload"
    assert not cache.device_pool.num_idle, f"{member} sleeps, and a prefix is not copied"
    kept = [] if cache.host_tier is None else list(cache.host_tier._kept)
    versions = {key.version for key in [*kept, *(entry.key for entry in cache.device_pool)]}
    assert versions <= {member.instance.version}, f"{member} keeps prefixes of {versions}"


def check_empty(member: Member) -> None:
    """All windows are over."""
    device_pool = member.state.cache.device_pool
    assert not list(device_pool), f"{member} keeps device memory for nobody"
    assert device_pool.num_bytes == 0, f"{member} has lost device memory"


def check_host_empty(member: Member) -> None:
    """Nobody has come for a long time."""
    host = member.state.cache.host_tier
    assert not host, f"{member} keeps host memory for ever"
    assert host is None or host.num_bytes == 0, f"{member} has lost host memory"
