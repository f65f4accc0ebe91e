"""The toy world of the interpreter: a few ranks, a table of integers, and what each op does to it.

Nothing here checks anything. Memory is what it is on a device: places are used in turn, reading a
place that nobody filled gives garbage, and sums depend on the order of their terms, as floats do.
So an op that runs too early or too late leaves another table behind. A pool of rows has few places
and gives one away as soon as it may, so that rows leave and come back all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nestpipe.schedule import Exchange, Merge, Retrieval, Shape
from nestpipe.schedule.effects import CARRIES, STATE
from nestpipe.schedule.schedule import Kind, Op

K = Kind
PRIME = 2_147_483_647
GARBAGE = 999_983
Row = tuple[int, int]
"""Weight and optimizer state."""
GARBAGE_ROW: Row = (GARBAGE, GARBAGE)
EARLIER = -9
"""A batch of an earlier run."""
MicroKeys = tuple[tuple[int, ...], ...]
"""The keys of each micro-batch of one batch on one rank."""


def first_value(key: int) -> Row:
    """A row's value before any update: a function of its key alone."""
    return (key * 7919 + 17) % PRIME, 1


@dataclass(slots=True)
class Rank:
    """Everything that one rank holds."""

    number: int
    group: tuple[int, ...]
    """The ranks that a table is sharded over, this one included."""
    replicas: tuple[int, ...]
    """The ranks that hold the same shard, this one included."""
    data: tuple[MicroKeys, ...]
    queue: list[MicroKeys]
    batch: list[MicroKeys]
    wanted: list[dict[int, MicroKeys]]
    """By owner: the keys that each micro-batch asks for, then those whose gradients it sends."""
    sizes: list[dict[int, int]]
    asked: list[dict[int, MicroKeys]]
    marks: list[frozenset[int]]
    """Of the first micro-batch: the keys whose rows come a second time."""
    own: list[frozenset[int]]
    """The keys that a batch itself asked for ..."""
    owned: list[frozenset[int]]
    """... and those of its working set: with replicas more."""
    touched: list[frozenset[int]]
    """Of the last batches, the keys that each asked for."""
    merged: list[frozenset[int]]
    """Of a batch that merges replicas, the keys that any of them touched."""
    shared: list[frozenset[int]]
    taken: list[frozenset[int]]
    """Of a batch's keys, those that only the batch before the last has too."""
    buffers: list[dict[int, Row]]
    seats: list[dict[int, int]]
    """Of a batch's working set, the place of each key in the pool ..."""
    absent: list[dict[int, int]]
    """... of those that were not there, too ..."""
    victims: list[dict[int, int]]
    """... and of those that made room for them, or with three buffers for the next batch ..."""
    urgent: list[dict[int, int]]
    """... and with three buffers of those that `retrieve` itself stores."""
    received: list[dict[int, int]]
    sent: list[dict[int, int]]
    active: int = 0
    row_sum: dict[int, int] = field(default_factory=dict[int, int])
    losses: list[int] = field(default_factory=list[int])
    totals: list[int] = field(default_factory=list[int])
    norms: list[int] = field(default_factory=list[int])
    """Of all gradients, where they are clipped by it."""
    dense_sum: int = 0
    dense_total: int = GARBAGE
    weights: int = 5
    updates: int = 0
    stored: dict[int, Row] = field(default_factory=dict[int, Row])
    """Host memory."""
    pool: dict[int, Row] = field(default_factory=dict[int, Row])
    """Rows by their place."""
    index: dict[int, int] = field(default_factory=dict[int, int])
    """The place of every key that has one ..."""
    last_use: dict[int, int] = field(default_factory=dict[int, int])
    """... and the last batch that uses it."""
    places: int = 0
    """Places in the pool: as many as two batches ever needed, or three."""
    room: dict[int, int] = field(default_factory=dict[int, int])
    """With three buffers: places that were given up, and by which batch."""
    reports: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Batches with their totals, as they end."""

    def owner(self, key: int) -> int:
        return self.group[key * 2_654_435_761 % len(self.group)]


@dataclass(slots=True)
class World:
    """All ranks, and what they agree on."""

    shape: Shape
    batches: int
    ranks: list[Rank]
    carries: Mapping[Kind, frozenset[str]] = field(default_factory=lambda: CARRIES)

    def moved(self, kind: Kind, row: Row) -> Row:
        """A row as it arrives after being moved by an op of that kind."""
        return row if STATE in self.carries[kind] else (row[0], 1)


def new_world(
    shape: Shape,
    data: Sequence[Sequence[MicroKeys]],
    groups: int,
    carries: Mapping[Kind, frozenset[str]],
) -> World:
    """Ranks with empty memory; `data[rank][batch][micro]` are keys."""
    shards = len(data) // groups
    anything = frozenset(
        k for batches in data for micro_batches in batches for ks in micro_batches for k in ks
    )
    anything_odd = frozenset(key for key in anything if key % 2)  # too few, and too many
    ranks = [
        Rank(
            number=r,
            group=tuple(range(r // shards * shards, (r // shards + 1) * shards)),
            replicas=tuple(range(r % shards, len(data), shards)),
            data=tuple(data[r]),
            queue=[()] * shape.lookahead,
            batch=[()] * shape.slots,
            wanted=[{} for _ in range(shape.slots)],
            sizes=[{} for _ in range(shape.slots)],
            asked=[{} for _ in range(shape.slots)],
            own=[anything_odd] * shape.slots,
            owned=[anything_odd] * shape.slots,
            touched=[anything] * (shape.merge_every + shape.lookahead),
            merged=[anything] * shape.slots,
            shared=[anything] * shape.slots,
            taken=[anything] * shape.slots,
            buffers=[{} for _ in range(shape.buffers)],
            seats=[{} for _ in range(shape.slots)],
            absent=[{} for _ in range(shape.slots)],
            victims=[dict.fromkeys(anything_odd, 0) for _ in range(shape.slots)],
            urgent=[{} for _ in range(shape.slots)],
            marks=[anything] * shape.slots,
            received=[{} for _ in range(shape.places)],
            sent=[{} for _ in range(shape.receive)],
            active=shape.buffers - 1,  # not that of the first batch
            losses=[GARBAGE] * shape.slots,
            totals=[GARBAGE] * shape.slots,
            norms=[GARBAGE] * shape.slots,
        )
        for r in range(len(data))
    ]
    for rank in ranks:
        if shape.stores_while_reading:
            _keep_from_an_earlier_run(rank, ranks)
    return World(shape, len(data[0]), ranks, carries)


def _keep_from_an_earlier_run(rank: Rank, ranks: Sequence[Rank]) -> None:
    """Some rows are in the pool alone: what host memory has of them is older."""
    asked = {k for r in rank.group for micros in ranks[r].data for ks in micros for k in ks}
    for key in sorted(key for key in asked if rank.owner(key) == rank.number and key % 4):
        rank.stored[key] = GARBAGE_ROW
        rank.pool[rank.places], rank.index[key] = first_value(key), rank.places
        rank.last_use[key] = EARLIER
        rank.places += 1


def _prefetch(world: World, rank: Rank, t: int) -> None:
    rank.queue[t % world.shape.lookahead] = rank.data[t]


def _copy(world: World, rank: Rank, t: int) -> None:
    rank.batch[t % world.shape.slots] = rank.queue[t % world.shape.lookahead]


def _dedup(world: World, rank: Rank, t: int) -> None:
    slot = t % world.shape.slots
    micro_batches = [frozenset(keys) for keys in rank.batch[slot]]
    asked, sent = micro_batches, micro_batches
    if world.shape.exchange is Exchange.WINDOW:
        nothing = frozenset[int]()
        asked = [keys - nothing.union(*micro_batches[:m]) for m, keys in enumerate(micro_batches)]
        sent = [
            keys - nothing.union(*micro_batches[m + 1 :]) for m, keys in enumerate(micro_batches)
        ]
    parts = (*asked, *sent)
    wanted: dict[int, list[list[int]]] = {owner: [[] for _ in parts] for owner in rank.group}
    for number, keys in enumerate(parts):
        for key in sorted(keys):
            wanted[rank.owner(key)][number].append(key)
    rank.wanted[slot] = {owner: tuple(map(tuple, of_owner)) for owner, of_owner in wanted.items()}


def _union(world: World, rank: Rank, t: int) -> None:
    slots = world.shape.slots
    keys = frozenset(
        k for micro_batches in rank.asked[t % slots].values() for ks in micro_batches for k in ks
    )
    rank.own[t % slots] = keys
    if not world.shape.merges_replicas(t):  # else the working set is not known yet
        rank.owned[t % slots] = keys
    rank.shared[t % slots] = rank.taken[t % slots] = frozenset()
    rank.seats[t % slots], rank.absent[t % slots], rank.victims[t % slots] = {}, {}, {}
    rank.urgent[t % slots] = {}
    _compare(world, rank, t, keys, last=not world.shape.merges_replicas(t))
    if world.shape.merge_every:
        rank.touched[t % len(rank.touched)] = keys


def _compare(world: World, rank: Rank, t: int, keys: frozenset[int], *, last: bool) -> None:
    """Find which of these keys the batches before have too, or seat them in the pool.

    `last`: the batch has no others.
    """
    slots = world.shape.slots
    if world.shape.stores_while_reading:
        _seat_ahead(rank, t, t % slots, keys)
        if last:
            _give_up(rank, t, t % slots)
    elif world.shape.pooled:
        _seat(rank, t, t % slots, keys)
    if world.shape.handover is K.SYNC:
        before = rank.owned[(t - 1) % slots] if t > 0 else frozenset[int]()
        rank.shared[t % slots] |= keys & before
        older = rank.owned[(t - 2) % slots] if t > 1 else frozenset[int]()
        rank.taken[t % slots] |= (keys & older) - before


def _seat(rank: Rank, t: int, slot: int, keys: frozenset[int]) -> None:
    """A place for each key; a row that batch t-1 and t do not use gives up its own."""
    rank.last_use |= dict.fromkeys(keys, t)
    free = _unused_since(rank, t - 1, t)
    for key in sorted(keys):
        if key not in rank.index:
            if free:
                victim = free.pop()
                rank.victims[slot][victim] = rank.index[key] = rank.index.pop(victim)
            else:
                rank.index[key] = rank.places
                rank.places += 1
            rank.absent[slot][key] = rank.index[key]
        rank.seats[slot][key] = rank.index[key]


def _seat_ahead(rank: Rank, t: int, slot: int, keys: frozenset[int]) -> None:
    """The same where places are given up for the next batch.

    Where they are too few, a row that batches t-2 to t do not use gives up its own at once.
    """
    rank.last_use |= dict.fromkeys(keys, t)
    unused = _unused_since(rank, t - 2, t)
    for key in sorted(keys):
        if key not in rank.index:
            room = [place for place, since in rank.room.items() if since < t]
            if room:
                del rank.room[room[0]]
                rank.index[key] = room[0]
            elif unused:
                victim = unused.pop()
                rank.urgent[slot][victim] = rank.index[key] = rank.index.pop(victim)
            else:
                rank.index[key] = rank.places
                rank.places += 1
            rank.absent[slot][key] = rank.index[key]
        rank.seats[slot][key] = rank.index[key]


def _give_up(rank: Rank, t: int, slot: int) -> None:
    """Places for the next batch, when all keys of this one have theirs."""
    leaving = _unused_since(rank, t - 1, t)
    for victim in leaving[: (len(leaving) + 2) // 4]:  # few, so that some are urgent
        rank.victims[slot][victim] = place = rank.index.pop(victim)
        rank.room[place] = t


def _unused_since(rank: Rank, batch: int, t: int) -> list[int]:
    """Keys in the pool that no batch from that one on uses, in an order of batch t's own."""
    free = [key for key in rank.index if rank.last_use[key] < batch]
    return sorted(free, key=lambda key: (key * 2_654_435_761 + t * 40_503) % PRIME)


def _replica_union(world: World, rank: Rank, t: int) -> None:
    slot = t % world.shape.slots
    rank.owned[slot] = rank.own[slot] | rank.merged[slot]
    _compare(world, rank, t, rank.merged[slot] - rank.own[slot], last=True)


def _retrieve(world: World, rank: Rank, t: int) -> None:
    slot = t % world.shape.slots
    if world.shape.pooled:
        # No op of this run stores what the first two batches let go.
        first = rank.victims[slot] if t < 2 and world.shape.stores_while_reading else {}
        for key, place in (rank.urgent[slot] | first).items():
            rank.stored[key] = world.moved(K.WRITEBACK, rank.pool.get(place, GARBAGE_ROW))
        for key, place in rank.absent[slot].items():
            rank.pool[place] = world.moved(K.RETRIEVE, _stored(rank, key))
        return
    keys = rank.owned[slot]
    if world.shape.retrieval is Retrieval.NEW:
        keys = keys - rank.shared[slot]
    taken = rank.taken[slot] if world.shape.takes_over else frozenset[int]()
    older = rank.buffers[(t - 2) % world.shape.buffers]
    rank.buffers[t % world.shape.buffers] = {
        key: world.moved(
            K.RETRIEVE,
            older.get(key, GARBAGE_ROW) if key in taken else _stored(rank, key),
        )
        for key in keys
    }


def _stored(rank: Rank, key: int) -> Row:
    return rank.stored.get(key, first_value(key))


def _row(world: World, rank: Rank, t: int, key: int) -> Row:
    """A row of the working set of an open window."""
    if world.shape.pooled:
        place = rank.seats[t % world.shape.slots].get(key, -1)
        return rank.pool.get(place, GARBAGE_ROW)
    return rank.buffers[rank.active].get(key, GARBAGE_ROW)


def _put(world: World, rank: Rank, t: int, key: int, row: Row) -> None:
    """Change a row of the working set of an open window."""
    if world.shape.pooled:
        rank.pool[rank.seats[t % world.shape.slots].get(key, -1)] = row
    else:
        rank.buffers[rank.active][key] = row


def rows_at_the_end(world: World, rank: Rank) -> dict[int, Row]:
    """What host memory holds once everything that stayed in the pool is written."""
    kept = rank.index.items() if world.shape.pooled else ()
    return {**rank.stored, **{key: rank.pool.get(place, GARBAGE_ROW) for key, place in kept}}


def reports_at_the_end(world: World, rank: Rank) -> list[tuple[int, int]]:
    """Batches with their totals; where it is promised, in the order in which they came."""
    return rank.reports if world.shape.pooled else sorted(rank.reports)


def _sync(world: World, rank: Rank, t: int) -> None:
    buffers = world.shape.buffers
    idle, active = rank.buffers[t % buffers], rank.buffers[(t - 1) % buffers]
    for key in rank.shared[t % world.shape.slots]:
        idle[key] = world.moved(K.SYNC, active.get(key, GARBAGE_ROW))
    rank.active = t % buffers


def _swap(world: World, rank: Rank, t: int) -> None:
    rank.active = t % world.shape.buffers


def _inputs(world: World, rank: Rank, t: int, m: int) -> tuple[tuple[int, ...], dict[int, int]]:
    """The keys of a micro-batch, in the order of its samples, and the rows that came for it."""
    shape = world.shape
    micro_batches = rank.batch[t % shape.slots]
    keys = micro_batches[m] if m < len(micro_batches) else ()
    if shape.exchange is not Exchange.WINDOW:
        return keys, rank.received[shape.place(t, m)]
    parts = [rank.received[shape.place(t, micro)] for micro in range(m + 1)]
    return keys, {key: row for part in parts for key, row in part.items()}


def _forward(world: World, rank: Rank, t: int, m: int) -> None:
    """The first part of `dense`: the loss."""
    slot = t % world.shape.slots
    keys, came = _inputs(world, rank, t, m)
    loss = rank.losses[slot] * 7 + m + 1 if m > 0 else 1
    for key in keys:
        loss = (loss * 5 + came.get(key, GARBAGE) * 3 + rank.weights) % PRIME
    rank.losses[slot] = loss % PRIME


def _backward(world: World, rank: Rank, t: int, m: int) -> None:
    """The rest of it: gradients. It reads again what the first part has read."""
    shape = world.shape
    micro_batches = rank.batch[t % world.shape.slots]
    keys, came = _inputs(world, rank, t, m)
    gradients: dict[int, int] = {}
    for sample, key in enumerate(keys):
        row = came.get(key, GARBAGE)
        gradient = (row * 31 + rank.weights * 7 + sample + 1) % PRIME
        gradients[key] = (gradients.get(key, 0) * 13 + gradient) % PRIME
        rank.dense_sum = (rank.dense_sum * 11 + gradient * row + 1) % PRIME
    rank.dense_sum = (rank.dense_sum * 3 + m + 1) % PRIME
    if world.shape.exchange is Exchange.WINDOW:
        _add_to_window(rank, micro_batches, m, gradients)
    else:
        rank.sent[m % shape.receive] = gradients


def _add_to_window(rank: Rank, micro_batches: MicroKeys, m: int, gradients: dict[int, int]) -> None:
    """Add to the sums that leave with the last micro-batch that uses their key."""
    if m == 0:
        rank.sent = [{} for _ in rank.sent]
    for key, gradient in gradients.items():
        last = max(n for n, keys in enumerate(micro_batches) if key in keys)
        rank.sent[last][key] = (rank.sent[last].get(key, 0) * 23 + gradient) % PRIME


def _update(world: World, rank: Rank, t: int) -> None:
    slot = t % world.shape.slots
    averaged = world.shape.merge is Merge.AVERAGED
    for key in (rank.own if averaged else rank.owned)[slot]:
        weight, state = _row(world, rank, t, key)
        gradient = rank.row_sum.get(key, GARBAGE) * _scale(world, rank, t) % PRIME
        state = (state + gradient * gradient + 1) % PRIME
        _put(world, rank, t, key, ((weight * 3 - gradient * state) % PRIME, state))
    rank.row_sum = {}
    rank.updates += 1
    if not world.shape.separate_dense_group:
        _apply(world, rank, t)


def _apply(world: World, rank: Rank, t: int) -> None:
    rank.weights = (rank.weights * 5 - rank.dense_total * _scale(world, rank, t)) % PRIME
    rank.dense_sum = 0


def _scale(world: World, rank: Rank, t: int) -> int:
    """What gradients are multiplied by before they are applied."""
    slot = t % world.shape.slots
    return rank.totals[slot] + 1 + (rank.norms[slot] if world.shape.gradient_norm else 0)


def _writeback(world: World, rank: Rank, t: int) -> None:
    slots = world.shape.slots
    rank.reports.append((t, rank.totals[t % slots]))
    if world.shape.pooled:
        leaving = rank.victims[(t + 2) % slots] if t + 2 < world.batches else {}
        for key, place in leaving.items():
            rank.stored[key] = world.moved(K.WRITEBACK, rank.pool.get(place, GARBAGE_ROW))
        return
    keys = rank.owned[t % slots]
    if world.shape.retrieval is Retrieval.NEW and t + 1 < world.batches:
        keys = keys - rank.owned[(t + 1) % slots]
    rows = rank.buffers[t % world.shape.buffers]
    for key in keys:
        rank.stored[key] = world.moved(K.WRITEBACK, rows.get(key, GARBAGE_ROW))


def _counts(world: World, members: list[Rank], t: int) -> None:
    slot = t % world.shape.slots
    for rank in members:
        rank.sizes[slot] = {
            peer.number: sum(map(len, peer.wanted[slot].get(rank.number, ()))) for peer in members
        }


def _keys(world: World, members: list[Rank], t: int) -> None:
    slot = t % world.shape.slots
    for rank in members:
        rank.asked[slot] = {
            peer.number: _cut(peer.wanted[slot].get(rank.number, ()), rank.sizes[slot], peer.number)
            for peer in members
        }


def _cut(micro_batches: MicroKeys, sizes: dict[int, int], peer: int) -> MicroKeys:
    """What fits into the room that the counts asked for."""
    room = sizes.get(peer, 0)
    kept: list[tuple[int, ...]] = []
    for keys in micro_batches:
        kept.append(keys[: max(room, 0)])
        room -= len(keys)
    return tuple(kept)


def _stale_mask(world: World, members: list[Rank], t: int) -> None:
    slot = t % world.shape.slots
    for rank in members:
        rank.marks[slot] = frozenset(
            key
            for owner in members
            for key in _asked_of(owner, slot, rank.number, 0)
            if key in owner.shared[slot]
        )


def _asked_of(rank: Rank, slot: int, peer: int, part: int) -> tuple[int, ...]:
    parts = rank.asked[slot].get(peer, ())
    return parts[part] if part < len(parts) else ()


def _rows(world: World, members: list[Rank], t: int, m: int) -> None:
    slot, place = t % world.shape.slots, world.shape.place(t, m)
    arriving: dict[int, dict[int, int]] = {rank.number: {} for rank in members}
    early = world.shape.speculative_rows and m == 0
    for owner in members:
        for peer in members:
            for key in _asked_of(owner, slot, peer.number, m):
                if early:
                    row = owner.buffers[t % world.shape.buffers].get(key, GARBAGE_ROW)
                else:
                    row = _row(world, owner, t, key)
                arriving[peer.number][key] = row[0]
    for rank in members:
        rank.received[place] = arriving[rank.number]


def _patch(world: World, members: list[Rank], t: int) -> None:
    slot, place = t % world.shape.slots, world.shape.place(t, 0)
    for rank in members:
        for owner in members:
            rows = owner.buffers[owner.active]
            for key in _asked_of(owner, slot, rank.number, 0):
                if key in rank.marks[slot]:
                    row = rows.get(key, GARBAGE_ROW) if key in owner.shared[slot] else GARBAGE_ROW
                    rank.received[place][key] = row[0]


def _grads(world: World, members: list[Rank], t: int, m: int) -> None:
    slot, place = t % world.shape.slots, m % world.shape.receive
    for owner in members:
        for peer in members:
            for key in _asked_of(owner, slot, peer.number, world.shape.micro_batches + m):
                gradient = peer.sent[place].get(key, GARBAGE)
                owner.row_sum[key] = (owner.row_sum.get(key, 0) * 17 + gradient) % PRIME


def _reduce(world: World, members: list[Rank], t: int) -> None:
    total = 0
    for rank in members:
        total = (total * 19 + rank.dense_sum) % PRIME
    for rank in members:
        rank.dense_total = total
    if not world.shape.separate_dense_group:
        _totals(world, members, t)


def _totals(world: World, members: list[Rank], t: int) -> None:
    slot, total = t % world.shape.slots, 0
    for rank in members:
        total = (total * 37 + rank.losses[slot]) % PRIME
    for rank in members:
        rank.totals[slot] = total


def _norm(world: World, members: list[Rank], t: int) -> None:
    """The order of rows does not matter, as that of numbers does not in an exact sum."""
    total = 0
    for rank in members:
        total = (total * 41 + rank.dense_total) % PRIME
        total += sum(value * value % PRIME * (key + 1) for key, value in rank.row_sum.items())
    for rank in members:
        rank.norms[t % world.shape.slots] = total % PRIME


def _is_merged(key: int) -> bool:
    """Not every row is averaged here: else none could leave the device before a merge."""
    return key % 4 != 1


def _replica_keys(world: World, members: list[Rank], t: int) -> None:
    batches = world.shape.merged_batches(t)
    keys = frozenset[int]().union(
        *(rank.touched[batch % len(rank.touched)] for rank in members for batch in batches)
    )
    if world.shape.merge is Merge.AVERAGED:
        keys = frozenset(filter(_is_merged, keys))
    for rank in members:
        rank.merged[t % world.shape.slots] = keys


def _replica_sync(world: World, members: list[Rank], t: int) -> None:
    if world.shape.merge is Merge.EXACT:
        _sum_over_replicas(world, members, t)
        return
    slot = t % world.shape.slots
    for key in filter(_is_merged, frozenset[int]().union(*(rank.owned[slot] for rank in members))):
        rows = [_row(world, rank, t, key) for rank in members]
        merged = (sum(w for w, _ in rows) % PRIME, sum(s for _, s in rows) % PRIME)
        for rank in members:
            _put(world, rank, t, key, merged)


def _sum_over_replicas(world: World, members: list[Rank], t: int) -> None:
    slot = t % world.shape.slots
    before = [dict(rank.row_sum) for rank in members]
    for rank in members:
        for key in rank.owned[slot]:
            total = 0
            for sums in before:
                total = (total * 29 + sums.get(key, 0)) % PRIME
            rank.row_sum[key] = total


LOCAL_WORK: dict[Kind, Callable[[World, Rank, int], None]] = {
    K.PREFETCH: _prefetch,
    K.COPY: _copy,
    K.DEDUP: _dedup,
    K.UNION: _union,
    K.REPLICA_UNION: _replica_union,
    K.RETRIEVE: _retrieve,
    K.SYNC: _sync,
    K.SWAP: _swap,
    K.APPLY: _apply,
    K.UPDATE: _update,
    K.WRITEBACK: _writeback,
}
COLLECTIVE_WORK: dict[Kind, Callable[[World, list[Rank], int], None]] = {
    K.COUNTS: _counts,
    K.KEYS: _keys,
    K.REPLICA_KEYS: _replica_keys,
    K.STALE_MASK: _stale_mask,
    K.PATCH: _patch,
    K.TOTALS: _totals,
    K.REDUCE: _reduce,
    K.NORM: _norm,
    K.REPLICA_SYNC: _replica_sync,
}
MICRO_COLLECTIVE_WORK: dict[Kind, Callable[[World, list[Rank], int, int], None]] = {
    K.ROWS: _rows,
    K.GRADS: _grads,
}


def do_local(world: World, rank: Rank, op: Op) -> None:
    """Let one rank do an op that concerns only itself."""
    if op.kind is K.DENSE:
        start_local(world, rank, op)
        end_local(world, rank, op)
    else:
        LOCAL_WORK[op.kind](world, rank, op.batch)


def start_local(world: World, rank: Rank, op: Op) -> None:
    """The first part of an op that others run alongside."""
    assert op.kind is K.DENSE, f"nothing runs alongside `{op}`"
    _forward(world, rank, op.batch, op.micro or 0)


def end_local(world: World, rank: Rank, op: Op) -> None:
    """The rest of it."""
    _backward(world, rank, op.batch, op.micro or 0)


def do_collective(world: World, members: list[Rank], op: Op) -> None:
    """Let ranks that have all arrived do a collective together."""
    if op.micro is not None:
        MICRO_COLLECTIVE_WORK[op.kind](world, members, op.batch, op.micro)
    else:
        COLLECTIVE_WORK[op.kind](world, members, op.batch)


def members_of(world: World, rank: Rank, op: Op) -> tuple[int, ...]:
    """The ranks that must meet in a collective that this rank has reached."""
    if op.kind in (K.TOTALS, K.REDUCE):
        return tuple(range(len(world.ranks)))
    return rank.replicas if op.kind in (K.REPLICA_KEYS, K.REPLICA_SYNC) else rank.group
