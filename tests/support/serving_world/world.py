"""Instances behind a router, and everything that can happen to them, in an order that a seed picks.

The real router, instances, caches and admission control run here, with their own threads. The world
says only who goes next, what time it is, and what fails. After every event it checks that all is as
it must be.

    PYTHONPATH=tests python -m support.serving_world.world 17

tells the story of one seed.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np

from nestpipe.serve.http.router import Router, RouterSettings
from nestpipe.serve.types import AdmissionOutcome, Answer, RankRequest, ServeSettings, Signal
from support.serving_world.checks import (
    Asked,
    check_answer,
    check_empty,
    check_host_empty,
    check_member,
    check_rest,
)
from support.serving_world.member import BreakdownError, Member, taking_turns
from support.serving_world.model import BYTES, CHUNK, FaultError, User, some_users
from support.serving_world.turns import Turns

STEPS = 130
LIFE_S = 0.5
TTL_S = 3.0
MIB = 2**20
DEVICE_BYTES = 40 * BYTES
HOST_BYTES = 32 * BYTES
SETTINGS = ServeSettings(
    target_ms=20.0,
    window_ms=60.0,
    life_s=LIFE_S,
    device_mb=DEVICE_BYTES / MIB,
    host_mb=HOST_BYTES / MIB,
    host_ttl_s=TTL_S,
    chunk=3 * CHUNK,
    batch=3,
    cut_length=8,
    queue=4,
)


class World:
    """A router, its members, and what must hold whatever happens."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = Random(seed)
        self.turns = Turns(self.chance, interrupt=self.chance.choice([0.0, 0.2, 0.5]))
        self.ms_per_event: float | None = self.chance.choice([None, None, None, 1.5, 3.0])
        """That predictions say; None: there are none, and no admission."""
        self.unrest = self.chance.choice([0.2, 1.0, 2.0])
        """How often members come and go."""
        self.settings = replace(
            SETTINGS,
            host_mb=self.chance.choice([SETTINGS.host_mb] * 5 + [0.0]),
            relay=self.chance.random() < 0.8,
            reload_by_layer=self.chance.random() < 0.7,
        )
        self.story: list[str] = []
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()
        self.users = some_users(self.chance, self.chance.choice([2, 3, 4]))
        self.signalled: deque[User] = deque(maxlen=3)
        self.version = self.newest = 1
        self.num_born = 0
        self.members: list[Member] = []
        """Those that run, whether or not the router knows them."""
        self.leaving: dict[Member, float] = {}
        """Out of the ring, and until when legs may still come."""
        self.mail: list[tuple[Member, Future[Answer], Future[Answer]]] = []
        self.asked: list[Asked] = []
        self.open: list[Asked] = []

    # From its beginning to its end

    def play(self, steps: int = STEPS) -> World:
        with taking_turns(self), _silent():
            try:
                self._begin()
                for _ in range(steps):
                    self._step()
                    self._check()
                self._finish()
            except BaseException as error:
                replay = f"PYTHONPATH=tests python -m support.serving_world.world {self.seed}"
                error.add_note(f"{self}\n\nThis was seed {self.seed}; replay it with: {replay}")
                raise
            finally:
                self.turns.abandon()
        return self

    def _begin(self) -> None:
        members = [self._born(name) for name in self.chance.choice(["ab", "abc"])]
        settings = RouterSettings(life_s=LIFE_S, faults=2, probe_s=0.25)
        self.router = Router({one.name: one for one in members}, settings, self.turns)

    def _step(self) -> None:
        """One thing that can happen now."""
        often: dict[Callable[[], bool], float] = {
            self.turn: 6.0 + 2 * len(self.turns.actors),
            self.deliver: 3.0 * len(self.mail),
            self.signal: 6,
            self.rank: 6,
            self.grow: 0.3,
            self.slide: 0.3,
            self.wait: 2,
            self.look: 0.5,
            self.kill: 0.3 * self.unrest,
            self.restart: 1,
            self.join: 0.15 * self.unrest,
            self.leave: 0.2 * self.unrest,
            self.close: 1,
            self.release: 0.3,
            self.swap: 2,
            self.squeeze: 1,
            self.calm: 2,
        }
        while not self.chance.choices(list(often), list(often.values()))[0]():
            pass

    def _check(self) -> None:
        for member in self._well():
            check_member(member, self.turns.time)
        for asked in [one for one in self.open if one.answer is not None and one.answer.done()]:
            self.open.remove(asked)
            how = check_answer(asked)
            self.tell(f"{asked} is answered: {how}")
            self.seen[f"answer {how}"] += 1
        assert not self.wrong, "; ".join(self.wrong)

    def _finish(self) -> None:
        """Nothing new comes: in the end all is answered, and all memory is free."""
        self.tell("nothing new comes")
        self.calm()
        while self.open:
            until = self.turns.next_time()
            assert until is not None, f"never answered: {', '.join(map(str, self.open))}"
            self.turns.time = max(until, self.turns.time)
            self.calm()
        assert self.router.stats()["router_in_flight"] == 0, "the router waits for an answer"
        self.turns.time += 3 * LIFE_S
        self.calm()
        for member in self._well():
            check_empty(member)
        self.turns.time += 2 * TTL_S
        for member in self._well():
            self._act(f"{member} looks at the clock", member.instance.wake)
        self.calm()
        for member in self._well():
            check_host_empty(member)
        for member in self.members:
            self._act(f"{member} closes", partial(self._close, member))
        self.calm()
        assert not self.turns.actors, f"{[one.name for one in self.turns.actors]} never end"

    # Its story

    def __str__(self) -> str:
        return "\n".join(self.story)

    def tell(self, what: str) -> None:
        self.story.append(f"{self.turns.time:8.3f}  {what}")

    def blame(self, what: str) -> None:
        """Something is wrong; said where an exception would be swallowed."""
        self.wrong.append(what)

    def _act(self, what: str, job: Callable[[], object]) -> bool:
        """Something that takes several turns, beside all else."""
        self.tell(what)
        self.turns.add(f"'{what}'", job)
        return True

    # What can happen: work goes on

    def turn(self) -> bool:
        ready = self.turns.ready()
        if ready:
            actor = self.chance.choice(ready)
            self.tell(f"{actor.name} goes on")
            self.turns.go(actor)
        return bool(ready)

    def deliver(self) -> bool:
        if not self.mail:
            return False
        member, to, answer = self.mail.pop(self.chance.randrange(len(self.mail)))
        return self._act(f"an answer of {member} arrives", partial(member.deliver, to, answer))

    def wait(self) -> bool:
        often_s = [0.001, 0.001, 0.004, 0.016, 0.064, 0.3]
        self.turns.time += self.chance.choice([*often_s, *often_s, 1.5 * TTL_S])
        self.tell("time passes")
        return True

    def calm(self) -> bool:
        """Whatever can be done without waiting is done; then nobody may be left with work."""
        self.tell("all do what they can")
        for _ in range(10_000):
            if not self.deliver() and not self.turn():
                break
            self._check()
        else:
            raise AssertionError("it never comes to rest")
        for member in self._well():
            check_rest(member)
        return True

    # Requests

    def signal(self) -> bool:
        user = self.chance.choice(self.users)
        self.signalled.append(user)
        signal = Signal(user.name, user.long)

        def send() -> None:
            self.seen[f"signal {self.router.prefetch(signal)}"] += 1

        return self._act(f"{user.name} signals {len(user.long)} events", send)

    def rank(self) -> bool:
        user = self.chance.choice([*self.users, *self.signalled])
        candidates = self.chance.choices(range(100), k=self.chance.randint(1, 3))
        number, cut = len(self.asked), self.settings.cut_length
        asked = Asked(number, user.name, list(user.events), candidates, cut, set(), set())
        asked.versions |= self._versions()
        asked.faithful |= self._faithful()
        candidates_C = np.array(candidates, dtype=np.int64)
        deadline_s = self.chance.choice([None, None, None, 0.004])
        request = RankRequest(user.name, user.long, user.short, candidates_C, number, deadline_s)
        self.asked.append(asked)
        self.open.append(asked)

        def ask() -> None:
            asked.answer = self.router.rank(request)

        return self._act(f"{asked} with {len(user.events)} events", ask)

    def grow(self) -> bool:
        user = self.chance.choice(self.users)
        user.grow(self.chance.randint(1, 5))
        self.tell(f"{user.name} has {len(user.events)} events now")
        return True

    def slide(self) -> bool:
        user = self.chance.choice(self.users)
        user.slide()
        self.tell(f"{user.name} has a new event, and its oldest is gone")
        return True

    # Members

    def _born(self, name: str) -> Member:
        member = Member(name, self, self.version)
        self.members.append(member)
        self._may_answer(self.version)
        return member

    def _well(self) -> list[Member]:
        return [one for one in self.members if one.well]

    def _faithful(self) -> set[Member]:
        """Those that can be relied on for a ranking that comes now."""
        there = self.router.members
        return {one for one in self._well() if one.name in there}

    def _unfaithful(self, member: Member) -> None:
        for asked in self.open:
            asked.faithful.discard(member)

    def kill(self) -> bool:
        if not self.members:
            return False
        member = self.chance.choice(self.members)
        if self._faithful() <= {member} and self.chance.random() < 0.97:
            return False
        return self._lose(member, "dies")

    def _lose(self, member: Member, how: str) -> bool:
        self._unfaithful(member)
        self._remember(member)
        self.members.remove(member)
        self.leaving.pop(member, None)
        self.seen[how] += 1
        return self._act(f"{member} {how}", member.die())

    def restart(self) -> bool:
        """A member that is dead, or of no use, begins anew and knows nothing."""
        running = {one.name for one in self._well()}
        gone = [name for name in self.router.members if name not in running]
        if not gone:
            return False
        name = self.chance.choice(gone)
        for broken in [one for one in self.members if one.name == name]:
            self._lose(broken, "is killed")
        self.tell(f"{name} starts again")
        self.seen["restart"] += 1
        self.router.add(name, self._born(name))
        return True

    def join(self) -> bool:
        self.num_born += 1
        member = self._born(f"new{self.num_born}")
        self.tell(f"{member} joins")
        self.seen["join"] += 1
        self.router.add(member.name, member)
        return True

    def leave(self) -> bool:
        """Out of the ring at once, and closed later."""
        candidates = sorted(self._faithful(), key=lambda one: one.name)
        if len(candidates) < 2:
            return False
        member = self.chance.choice(candidates)
        self.tell(f"{member} leaves")
        self.seen["leave"] += 1
        self.router.remove(member.name)
        self.leaving[member] = self.turns.time + LIFE_S
        self._unfaithful(member)
        return True

    def close(self) -> bool:
        """Mostly when no leg can be on its way to it, else those that are find it closing."""
        hurry, now = self.chance.random() < 0.2, self.turns.time
        over = [one for one, until in self.leaving.items() if hurry or until < now]
        for member in over:
            del self.leaving[member]
            self._act(f"{member} closes", partial(self._close, member))
        return bool(over)

    def _close(self, member: Member) -> None:
        done = member.instance.drain(self.chance.choice([0.0, 1.0, 1.0]))
        if done and member.well and member.state.rank_queue.open:
            self.blame(f"{member} says that it is drained, and is not")
        member.instance.close()
        if member in self.members:
            self._lose(member, "has closed")

    def look(self) -> bool:
        """The router asks its members how they are."""
        well = {one.name for one in self._well()}
        self.tell(f"well are {', '.join(sorted(well))}")
        self.router.check(well.__contains__)
        return True

    # Models, memory

    def release(self) -> bool:
        """A new model, or one from before; members get it one by one."""
        self.newest += 1
        self.version = self.chance.choice([self.newest, self.newest, max(1, self.version - 1)])
        self.tell(f"model {self.version} is released")
        return True

    def swap(self) -> bool:
        others = [one for one in self._well() if one.instance.version != str(self.version)]
        behind = [one for one in others if one.swapping is None]
        if not behind:
            return False
        member, version = self.chance.choice(behind), self.version
        member.swapping = version
        self._may_answer(version)

        def give() -> None:
            member.instance.swap_model(member.model(version))
            member.swapping = None
            self.seen["swap"] += 1

        return self._act(f"{member} gets model {version}", give)

    def _versions(self) -> set[str]:
        """Of models that a ranking which comes now may be answered by."""
        now = {one.instance.version for one in self.members}
        return now | {str(one.swapping) for one in self.members if one.swapping is not None}

    def _may_answer(self, version: int) -> None:
        for asked in self.open:
            asked.versions.add(str(version))

    def squeeze(self) -> bool:
        """Memory for prefixes shrinks to what is used or somewhat more, or is as it was."""
        if not self.members:
            return False
        member, share = self.chance.choice(self.members), self.chance.choice([0.0, 0.5, 1.0])
        device_pool, host = member.state.cache.device_pool, member.state.cache.host_tier
        device_pool.bound = max(device_pool.num_bytes, int(share * DEVICE_BYTES))
        if host is not None:
            host.bound = max(host.num_bytes, int(share * HOST_BYTES))
        self.tell(f"{member} has {share} of its memory")
        return True

    # What members tell

    def trouble(self, member: Member, call: str, may_fail: bool) -> None:
        """A call of the model fails now and then, and once in a while so that a thread ends."""
        dice = self.chance.random()
        if dice < 0.005 and member.well:
            member.broken = True
            self._unfaithful(member)
            self.tell(f"{member}.{call} breaks down")
            raise BreakdownError
        if may_fail and dice < (0.2 if call == "to_device" else 0.05):
            self.tell(f"{member}.{call} fails")
            raise FaultError(call)

    def post(self, member: Member, to: Future[Answer], answer: Future[Answer]) -> None:
        self.mail.append((member, to, answer))

    def asked_of(self, member: Member, number: int) -> None:
        asked = self.asked[number]
        self.tell(f"{asked} is asked of {member}")
        if member.name in asked.tried:
            self.blame(f"{asked} is asked of {member} again")
        asked.tried.append(member.name)

    def shed_by(self, member: Member, number: int) -> None:
        asked = self.asked[number]
        self.tell(f"{asked} is shed by {member}")
        asked.shed_by.append(member)

    def _remember(self, member: Member) -> None:
        """What it has done goes into the numbers of this world."""
        self.seen.update({name: int(value) for name, value in member.stats().items()})
        if member.admission is not None and member.admission.counts()[AdmissionOutcome.FAILED]:
            self.blame(f"the admission of {member} failed")


@contextmanager
def _silent() -> Iterator[None]:
    """Faults are part of the story; they need no log."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


if __name__ == "__main__":
    print(World(int(sys.argv[1])).play())
