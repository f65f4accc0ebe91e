"""Users belong to instances: alike everywhere, evenly, and few move when the members change."""

import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import RunError
from nestpipe.serve.http.router import Membership, Ring, place

USERS = [f"user {number}" for number in range(4000)]
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
    assert [THREE.index(Ring(THREE).owner(user)) for user in USERS[:8]] == [0, 0, 2, 1, 2, 1, 1, 0]


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
    assert said.strip() == str([Ring(THREE).order(user) for user in USERS[:50]])


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
    assert [one.order(user) for user in USERS] == [other.order(user) for user in USERS]


def test_users_spread_evenly():
    shares = Counter(map(Ring([f"host-{n}:9001" for n in range(10)]).owner, USERS))
    assert len(shares) == 10
    assert max(shares.values()) < 1.35 * len(USERS) / 10
    assert min(shares.values()) > 0.65 * len(USERS) / 10


@pytest.mark.parametrize("count", [2, 5, 20])
def test_a_new_member_takes_its_share_and_moves_nobody_else(count: int):
    members = [f"host-{n}:9001" for n in range(count)]
    before, after = Ring(members), Ring([*members, "new:9001"])
    moved = [user for user in USERS if before.owner(user) != after.owner(user)]
    assert all(after.owner(user) == "new:9001" for user in moved)
    assert 0.5 < len(moved) / len(USERS) * (count + 1) < 1.5


def test_a_lost_member_s_users_go_to_the_next_in_their_order():
    before, after = Ring(THREE), Ring(THREE[1:])
    for user in USERS:
        first, second, _ = before.order(user)
        assert after.owner(user) == (second if first == THREE[0] else first)


def test_a_ring_of_none_says_so():
    assert Ring([]).order("u") == ()
    with pytest.raises(RunError, match="no instance"):
        Ring([]).owner("u")


def test_the_former_owner_counts_for_a_life_after_a_change():
    membership = Membership(THREE, life_s=0.5)
    user = next(user for user in USERS if Ring(THREE).owner(user) == THREE[0])
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
