"""Both legs of a user meet, and every ranking is answered while one instance lives."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import ConfigError, DataError, RunError, ShedError
from nestpipe.serve.http.router import Membership, Ring, Router, RouterSettings, place
from nestpipe.serve.types import AdmissionOutcome, Answer, History, RankPath, RankRequest, Signal

NAMES = ["a:1", "b:1", "c:1"]
USERS = [f"user {number}" for number in range(60)]


@dataclass
class HandClock:
    time: float = 100.0

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


class Mood(Enum):
    WELL = auto()
    RAISES = auto()
    FAILS = auto()
    """Its futures do."""
    SHEDS = auto()
    REFUSES = auto()
    DROPS = auto()
    """Its futures are cancelled."""
    HOLDS = auto()
    """Its futures wait for the test."""


@dataclass
class FakeInstance:
    """Says who it is: the version of its answers is its name."""

    name: str
    mood: Mood = Mood.WELL
    signals: list[str] = field(default_factory=list)
    requests: list[RankRequest] = field(default_factory=list)
    held: list[Future[Answer]] = field(default_factory=list)
    drained: float | None = None
    drain_takes: Callable[[], None] = lambda: None

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        if self.mood in (Mood.RAISES, Mood.FAILS):
            raise ConnectionError(f"{self.name} is dead")
        self.signals.append(signal.user)
        return AdmissionOutcome.ADMITTED

    def rank(self, request: RankRequest) -> Future[Answer]:
        self.requests.append(request)
        if self.mood is Mood.RAISES:
            raise ConnectionError(f"{self.name} is dead")
        future: Future[Answer] = Future()
        if self.mood is Mood.FAILS:
            future.set_exception(ConnectionError(f"{self.name} died"))
        elif self.mood is Mood.SHEDS:
            future.set_exception(ShedError(f"{self.name} has too much to do; ask again later"))
        elif self.mood is Mood.REFUSES:
            future.set_exception(DataError("candidates are empty; give at least one"))
        elif self.mood is Mood.DROPS:
            future.cancel()
        elif self.mood is Mood.HOLDS:
            self.held.append(future)
        else:
            future.set_result(self.answer())
        return future

    def answer(self) -> Answer:
        return Answer(np.zeros(1, dtype=np.float32), RankPath.MISS_FULL, 1, version=self.name)

    def stats(self) -> dict[str, float]:
        return {}

    def drain(self, timeout_s: float) -> bool:
        self.drained = timeout_s
        self.drain_takes()
        return self.mood is Mood.WELL


EMPTY = History(np.zeros(0, dtype=np.int64))


def signal(user: str) -> Signal:
    return Signal(user, EMPTY)


def request(user: str, deadline_s: float | None = None) -> RankRequest:
    return RankRequest(user, EMPTY, EMPTY, np.zeros(1, dtype=np.int64), deadline_s=deadline_s)


class World:
    """Three instances behind a router, on a clock that a test moves."""

    def __init__(self, names: list[str] = NAMES, **settings):
        self.clock = HandClock()
        self.instances = {name: FakeInstance(name) for name in names}
        self.router = Router(self.instances, RouterSettings(**settings), self.clock)

    def rank(self, user: str) -> str:
        """Who answered."""
        return self.router.rank(request(user)).result(timeout=0).version

    def user_of(self, name: str, names: list[str] = NAMES) -> str:
        ring = Ring(names)
        return next(user for user in USERS if ring.owner(user) == name)

    def order(self, user: str) -> list[FakeInstance]:
        return [self.instances[name] for name in Ring(self.instances).order(user)]


def test_both_legs_of_every_user_go_to_the_owner():
    world = World()
    for user in USERS:
        assert world.router.prefetch(signal(user)) is AdmissionOutcome.ADMITTED
        assert world.instances[world.rank(user)].signals[-1] == user
        assert world.rank(user) == Ring(NAMES).owner(user)


def test_two_routers_agree_without_knowing_of_each_other():
    one, other = World(), World(NAMES[::-1])
    assert [one.rank(user) for user in USERS] == [other.rank(user) for user in USERS]


@pytest.mark.parametrize("mood", [Mood.RAISES, Mood.FAILS, Mood.DROPS])
def test_a_ranking_goes_on_to_the_next_until_one_answers(mood: Mood):
    world = World()
    first, second, third = world.order("u")
    first.mood = second.mood = mood
    assert world.rank("u") == third.name
    assert world.router.stats()["router_retries"] == 2


def test_when_all_fail_the_caller_hears_why():
    world = World()
    for instance in world.instances.values():
        instance.mood = Mood.FAILS
    with pytest.raises(RunError, match=r"none of 3 instances answered \(.* died\)"):
        world.rank("u")


def test_without_members_the_caller_hears_that():
    world = World([])
    assert world.router.prefetch(signal("u")) is AdmissionOutcome.FAILED
    with pytest.raises(RunError, match="no instance to send a ranking to"):
        world.rank("u")


def test_bad_input_is_not_sent_around():
    world = World()
    first, second, _ = world.order("u")
    first.mood = Mood.REFUSES
    for _ in range(5):
        with pytest.raises(DataError, match="candidates are empty"):
            world.rank("u")
    assert not second.requests
    first.mood = Mood.WELL
    assert world.rank("u") == first.name  # refusing is a sign of life


def test_shedding_is_tried_once_elsewhere_and_then_passed_on():
    world = World()
    first, second, third = world.order("u")
    first.mood = Mood.SHEDS
    assert world.rank("u") == second.name
    second.mood = Mood.SHEDS
    with pytest.raises(ShedError, match=second.name):
        world.rank("u")
    assert not third.requests
    assert world.router.stats()["router_members_alive"] == 3


def test_after_shedding_a_dead_instance_does_not_end_the_search():
    world = World()
    first, second, third = world.order("u")
    first.mood, second.mood = Mood.SHEDS, Mood.FAILS
    assert world.rank("u") == third.name


def test_when_the_rest_is_dead_shedding_is_the_answer():
    world = World()
    first, second, third = world.order("u")
    first.mood, second.mood, third.mood = Mood.FAILS, Mood.SHEDS, Mood.RAISES
    with pytest.raises(ShedError, match=second.name):
        world.rank("u")


def test_a_signal_to_an_instance_that_fails_is_lost():
    world = World()
    first, second, _ = world.order("u")
    first.mood = Mood.RAISES
    assert world.router.prefetch(signal("u")) is AdmissionOutcome.FAILED
    assert not second.signals
    assert world.router.stats()["router_lost_signals"] == 1


def test_once_it_is_known_to_be_dead_both_legs_meet_at_the_next():
    world = World(faults=2)
    first, second, _ = world.order("u")
    first.mood = Mood.RAISES
    for _ in range(2):
        world.rank("u")
    asked = len(first.requests)
    assert world.router.prefetch(signal("u")) is AdmissionOutcome.ADMITTED
    assert second.signals == ["u"]
    assert world.rank("u") == second.name
    assert len(first.requests) == asked


def test_a_dead_instance_is_probed_by_one_request_at_a_time_and_comes_back():
    world = World(faults=1, probe_s=1.0)
    first, second, _ = world.order("u")
    first.mood = Mood.FAILS
    world.rank("u")
    world.clock.time += 1.0
    assert [world.rank("u"), world.rank("u")] == [second.name, second.name]
    assert len(first.requests) == 2, "the first fault, and one probe"
    first.mood = Mood.WELL
    world.clock.time += 1.0
    assert [world.rank("u"), world.rank("u")] == [first.name, first.name]


def test_while_a_probe_is_under_way_nobody_else_is_sent_there():
    world = World(faults=1, probe_s=1.0)
    first, second, _ = world.order("u")
    first.mood = Mood.FAILS
    world.rank("u")
    world.clock.time += 1.0
    first.mood = Mood.HOLDS
    probe = world.router.rank(request("u"))
    assert [world.rank("u"), world.rank("u")] == [second.name, second.name]
    first.held[0].set_result(first.answer())
    assert probe.result(timeout=0).version == first.name
    first.mood = Mood.WELL
    assert world.rank("u") == first.name


def test_all_being_taken_for_dead_is_no_reason_not_to_ask():
    world = World(faults=1, probe_s=1e9)
    for instance in world.instances.values():
        instance.mood = Mood.FAILS
    with pytest.raises(RunError):
        world.rank("u")
    assert world.router.stats()["router_members_alive"] == 0
    first, _, third = world.order("u")
    third.mood = Mood.WELL
    assert world.rank("u") == third.name
    first.mood = Mood.WELL
    assert world.rank("u") == third.name, "the one that answered is known to live"


def test_a_health_check_marks_dead_and_alive():
    world = World(probe_s=1e9)
    first, second, third = world.order("u")

    def healthy(name: str) -> bool:
        if name == second.name:
            raise TimeoutError
        return name != first.name

    world.router.check(healthy)
    assert world.rank("u") == third.name
    world.router.check(lambda name: True)
    assert world.rank("u") == first.name
    assert not second.requests


def test_a_new_member_takes_its_users_after_a_life_and_hears_their_signals_before():
    world = World(NAMES[:2], life_s=0.5)
    user = world.user_of("c:1")
    former = Ring(NAMES[:2]).owner(user)
    world.router.prefetch(signal(user))
    late = FakeInstance("c:1")
    world.router.add("c:1", late)
    assert world.rank(user) == former, "its signal went there"
    world.clock.time += 0.25
    world.router.prefetch(signal(user))
    assert late.signals == [user]
    assert world.instances[former].signals == [user, user]
    assert world.rank(user) == former
    world.clock.time += 0.26
    assert world.rank(user) == "c:1", "it had the last signal"
    world.router.prefetch(signal(user))
    assert world.instances[former].signals == [user, user]


def test_a_member_that_leaves_serves_legs_in_flight_and_then_nothing():
    world = World(life_s=0.5)
    user = world.user_of("b:1")
    leaving = world.instances["b:1"]
    world.router.prefetch(signal(user))
    world.router.remove("b:1")
    assert world.router.members == ("a:1", "c:1")
    assert world.rank(user) == "b:1"
    world.clock.time += 0.51
    heir = Ring(["a:1", "c:1"]).owner(user)
    assert world.rank(user) == heir
    world.router.prefetch(signal(user))
    assert leaving.signals == [user]
    world.instances["a:1"].mood = world.instances["c:1"].mood = Mood.FAILS
    asked = len(leaving.requests)
    with pytest.raises(RunError, match="none of 2 instances"):
        world.rank(user)
    assert len(leaving.requests) == asked


def test_a_member_that_left_is_let_go_after_its_life():
    world = World(life_s=0.5)
    world.router.remove("b:1")
    asked: list[str] = []
    world.router.check(lambda name: asked.append(name) is None)
    world.clock.time += 0.51
    world.router.check(lambda name: asked.append(name) is None)
    assert asked == ["a:1", "b:1", "c:1", "a:1", "c:1"]


def test_a_member_that_dies_and_is_removed_hands_its_users_on_at_once():
    world = World()
    user = world.user_of("b:1")
    world.instances["b:1"].mood = Mood.RAISES
    world.router.remove("b:1")
    assert world.rank(user) == Ring(["a:1", "c:1"]).owner(user)


def test_removing_a_stranger_changes_nothing():
    world = World()
    world.router.remove("z:1")
    assert world.router.members == tuple(NAMES)


def test_a_member_that_comes_back_within_its_life_stays():
    world = World(life_s=0.5)
    world.router.remove("b:1")
    again = FakeInstance("b:1")
    world.router.add("b:1", again)
    world.clock.time += 10
    user = world.user_of("b:1")
    assert world.rank(user) == "b:1"
    assert len(again.requests) == 1


def test_random_affinity_sends_legs_anywhere():
    world = World(affinity="random", seed=3)
    met = 0
    for _ in range(20):
        for user in USERS:
            world.router.prefetch(signal(user))
            met += world.instances[world.rank(user)].signals[-1:] == [user]
    assert met / (20 * len(USERS)) == pytest.approx(1 / 3, abs=0.06)
    dead = world.instances["a:1"]
    dead.mood = Mood.RAISES
    assert {world.rank(user) for user in USERS} == {"b:1", "c:1"}


def test_a_ranking_that_is_tried_again_has_what_is_left_of_its_deadline():
    world = World()
    first, second, third = world.order("u")
    first.mood = second.mood = Mood.HOLDS
    answer = world.router.rank(request("u", deadline_s=0.5))
    world.clock.time += 0.125
    first.held[0].set_exception(ConnectionError("died"))
    world.clock.time += 9.0
    second.held[0].set_exception(ConnectionError("died"))
    assert answer.result(timeout=0).version == third.name
    asked = [instance.requests[0].deadline_s for instance in (first, second, third)]
    assert asked == [0.5, 0.375, 0.001]


def test_a_caller_who_cancels_does_not_disturb_the_answer():
    world = World()
    (first, *_) = world.order("u")
    first.mood = Mood.HOLDS
    answer = world.router.rank(request("u"))
    assert not answer.cancel()
    first.held[0].set_result(first.answer())
    assert answer.result(timeout=0).version == first.name


def test_draining_waits_for_rankings_under_way_and_sheds_new_ones():
    world = World()
    (first, *_) = world.order("u")
    first.mood = Mood.HOLDS
    answer = world.router.rank(request("u"))
    assert world.router.stats()["router_in_flight"] == 1
    assert not world.router.drain(0.0)
    with pytest.raises(ShedError, match="closing"):
        world.rank("v")
    assert world.router.prefetch(signal("v")) is AdmissionOutcome.FAILED
    first.mood = Mood.WELL
    ending = threading.Timer(0.01, lambda: first.held[0].set_result(first.answer()))
    ending.start()
    assert world.router.drain(60.0)
    assert answer.result(timeout=0).version == first.name
    assert all(instance.drained == 60.0 for instance in world.instances.values())
    ending.join()


def test_draining_gives_each_instance_what_is_left_of_the_time():
    """A service that is told to stop in 60 s stops in 60 s, however many instances are slow."""
    world = World()
    for instance in world.instances.values():
        instance.drain_takes = partial(world.clock.advance, 45.0)
    assert world.router.drain(60.0)
    assert [instance.drained for instance in world.instances.values()] == [60.0, 15.0, 0.0]


def test_stats_tell_what_the_router_did():
    world = World()
    for user in USERS:
        world.router.prefetch(signal(user))
        world.rank(user)
    stats = world.router.stats()
    assert stats["router_signals"] == stats["router_rankings"] == len(USERS)
    assert stats["router_members"] == stats["router_members_alive"] == 3
    busiest = max(len(instance.requests) for instance in world.instances.values())
    assert stats["router_imbalance"] == pytest.approx(busiest * 3 / len(USERS))


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"affinity": "sticky"}, "affinity is 'sticky'; give user or random"),
        ({"faults": 0}, "faults is 0; give a number above 0"),
        ({"life_s": float("nan")}, "life_s is nan; give a number above 0"),
    ],
)
def test_bad_settings_are_one_sentence(setting, sentence: str):
    with pytest.raises(ConfigError) as error:
        RouterSettings(**setting)
    assert str(error.value) == sentence


MEMBERSHIP_USERS = [f"user {number}" for number in range(4000)]
THREE = ["10.0.0.1:9001", "10.0.0.2:9001", "10.0.0.3:9001"]


def slow_order(members: list[str], user: str) -> list[str]:
    """The members by the distance of their nearest point after the user."""
    distance = {
        member: min((place(f"{member}#{point}") - place(user)) % 2**64 for point in range(160))
        for member in members
    }
    return sorted(members, key=distance.__getitem__)


def test_places_are_these_in_every_process_and_release():
    assert place("u1") == 12288554172221123879
    assert place("") == 7384586927274498555
    assert [THREE.index(Ring(THREE).owner(user)) for user in MEMBERSHIP_USERS[:8]] == [
        0,
        0,
        2,
        1,
        2,
        1,
        1,
        0,
    ]


def test_another_process_with_another_hash_seed_agrees():
    program = (
        "from nestpipe.serve.http.router import Ring\n"
        f"print([Ring({THREE}).order(f'user {{n}}') for n in range(50)])"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.strip() == str([Ring(THREE).order(user) for user in MEMBERSHIP_USERS[:50]])


@given(
    members=st.lists(st.text(max_size=8), min_size=1, max_size=5, unique=True),
    user=st.text(max_size=20),
)
def test_the_order_is_by_distance_on_the_circle(members: list[str], user: str):
    ring = Ring(members)
    assert list(ring.order(user)) == slow_order(sorted(members), user)
    assert ring.owner(user) == ring.order(user)[0]


def test_the_order_of_naming_members_does_not_matter():
    one, other = Ring(THREE), Ring([*THREE[::-1], THREE[0]])
    assert [one.order(user) for user in MEMBERSHIP_USERS] == [
        other.order(user) for user in MEMBERSHIP_USERS
    ]


def test_users_spread_evenly():
    shares = Counter(map(Ring([f"host-{n}:9001" for n in range(10)]).owner, MEMBERSHIP_USERS))
    assert len(shares) == 10
    assert max(shares.values()) < 1.35 * len(MEMBERSHIP_USERS) / 10
    assert min(shares.values()) > 0.65 * len(MEMBERSHIP_USERS) / 10


@pytest.mark.parametrize("count", [2, 5, 20])
def test_a_new_member_takes_its_share_and_moves_nobody_else(count: int):
    members = [f"host-{n}:9001" for n in range(count)]
    before, after = Ring(members), Ring([*members, "new:9001"])
    moved = [user for user in MEMBERSHIP_USERS if before.owner(user) != after.owner(user)]
    assert all(after.owner(user) == "new:9001" for user in moved)
    assert 0.5 < len(moved) / len(MEMBERSHIP_USERS) * (count + 1) < 1.5


def test_a_lost_member_s_users_go_to_the_next_in_their_order():
    before, after = Ring(THREE), Ring(THREE[1:])
    for user in MEMBERSHIP_USERS:
        first, second, _ = before.order(user)
        assert after.owner(user) == (second if first == THREE[0] else first)


def test_a_ring_of_none_says_so():
    assert Ring([]).order("u") == ()
    with pytest.raises(RunError, match="no instance"):
        Ring([]).owner("u")


def test_the_former_owner_counts_for_a_life_after_a_change():
    membership = Membership(THREE, life_s=0.5)
    user = next(user for user in MEMBERSHIP_USERS if Ring(THREE).owner(user) == THREE[0])
    heir = Ring(THREE[1:]).owner(user)
    assert membership.owners(user, now=9.9) == (THREE[0],)
    membership.change(THREE[1:], now=10.0)
    assert membership.owners(user, now=10.0) == (heir, THREE[0])
    assert membership.owners(user, now=10.5) == (heir, THREE[0])
    assert membership.owners(user, now=10.51) == (heir,)
    assert membership.members(now=10.5) == set(THREE)
    assert membership.members(now=10.51) == set(THREE[1:])


def test_a_change_to_the_same_members_is_none():
    membership = Membership(THREE, life_s=0.5)
    membership.change(THREE[::-1], now=1.0)
    assert len(membership.rings(now=1.0)) == 1


@given(
    changes=st.lists(
        st.tuples(st.floats(0.0, 1.0), st.sets(st.sampled_from("abcde"), min_size=1)), max_size=8
    ),
    signal_after=st.floats(0.0, 4.0),
    between=st.floats(0.0, 0.49),
)
def test_legs_meet_whatever_changed_between_them(
    changes: list[tuple[float, set[str]]], signal_after: float, between: float
):
    """The ranking goes to the oldest owner that counts, which had the signal."""
    membership = Membership("abc", life_s=0.5)
    due: list[tuple[float, set[str] | None]]
    due = [(signal_after, None), (signal_after + between, None)]
    time = 0.0
    for gap, members in changes:
        time += gap
        due.append((time, members))
    had: tuple[str, ...] = ()
    for now, members in sorted(due, key=lambda one: one[0]):
        if members is not None:
            membership.change(members, now)
        elif not had:
            had = membership.owners("u", now)
        else:
            assert membership.owners("u", now)[-1] in had
