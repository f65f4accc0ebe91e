"""Routing in native code, on the host: linear in the keys, one call for all tables."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from nestpipe.embedding.routing.lists import (
    KeyUnion,
    KnownKeys,
    Neighbours,
    OwnerRequests,
    RoutedKeys,
    WantedKeys,
    WindowSlice,
)
from nestpipe.errors import ConfigError
from nestpipe.kernels.host_memory import empty
from nestpipe.kernels.library import Status, library
from nestpipe.kernels.rows.segments import Segments, concat

# Shapes: T keys, O rows that the model sees, A keys that travel, K unique keys of an owner,
# R ranks, M micro-batches, C tables

_CPU = torch.device("cpu")


class _WantedKeysStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("tables", "ranks", "rank", "row_bytes")),
        *(
            (name, c_void_p)
            for name in ("term_ends", "output_ends", "keys", "lengths", "pooled", "table_owners")
        ),
    )


class _RoutedKeysStruct(ctypes.Structure):
    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                *("keys", "lengths", "key_counts", "row_counts"),
                *("seen_rows", "seen_ends", "back_outputs", "back_ends"),
                "straight",
            )
        ),
        *((name, c_int64) for name in ("num_lengths", "num_rows", "num_seen")),
    )
    num_lengths: int
    num_rows: int
    num_seen: int


class _WholeStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("tables", "ranks", "rank", "micros")),
        *(
            (name, c_void_p)
            for name in (
                *("output_ends", "keys", "lengths", "key_counts", "row_counts"),
                *("seen_rows", "seen_ends"),
            )
        ),
    )


class _WindowStruct(ctypes.Structure):
    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("keys", "lengths", "lasts", "key_counts", "row_counts", "seen_rows", "seen_ends"),
            *("back_outputs", "back_ends", "reused_rows", "leaving", "leaving_counts"),
            *("num_lengths", "num_lasts", "num_seen", "num_reused"),
        )
    )


class _OwnerRequestsStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("tables", "ranks", "rank", "micros")),
        *((name, c_void_p) for name in ("key_counts", "row_counts", "keys", "lengths", "lasts")),
    )


class _KeyUnionStruct(ctypes.Structure):
    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            *("keys", "table_counts", "serve_rows", "serve_ends", "back_served", "back_ends"),
        )
    )


class _KnownKeysStruct(ctypes.Structure):
    _fields_ = (("keys", c_void_p), ("counts", c_void_p), ("index", c_void_p))


class _NeighboursStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("shared", "shared_before", "carried", "carried_older")),
        *((name, c_int64) for name in ("num_shared", "num_carried")),
    )


def request(wanted: WantedKeys) -> RoutedKeys:
    """What to send, and what to do with the rows that come."""
    terms, outputs = sum(map(len, wanted.keys)), sum(map(len, wanted.lengths))
    _check_positions(
        max(terms, outputs),
        "a micro-batch of one rank",
        "use more micro-batches or a smaller batch",
    )
    keys_T = concat(wanted.keys).contiguous()
    lengths_O = concat(wanted.lengths).contiguous()
    term_ends = torch.tensor([len(k) for k in wanted.keys]).cumsum(0)
    output_ends = torch.tensor([len(n) for n in wanted.lengths]).cumsum(0)
    pooled = torch.tensor(wanted.pooled, dtype=torch.uint8)
    table_owners = torch.tensor(
        [owner % wanted.ranks if owner >= 0 else -1 for owner in wanted.table_owners]
    )
    alone = terms == outputs and bool((lengths_O == 1).all())
    tables = len(wanted.keys)
    key_counts_RC = torch.empty(wanted.ranks, tables, dtype=torch.int64)
    row_counts_RC = torch.empty_like(key_counts_RC)
    straight = torch.empty(tables, dtype=torch.int64)
    keys_A, sums_L = _int64s(terms), _int64s(terms)
    seen_S, back_S = _int32s(terms), _int32s(terms)
    seen_ends, back_ends = _int32s(outputs + 1), _int32s(terms + 1)
    given = _WantedKeysStruct(
        *(tables, wanted.ranks, wanted.rank, wanted.row_bytes),
        *(term_ends.data_ptr(), output_ends.data_ptr(), keys_T.data_ptr()),
        *(None if alone else lengths_O.data_ptr(), pooled.data_ptr()),
        table_owners.data_ptr(),
    )
    made = _RoutedKeysStruct(
        *(keys_A.data_ptr(), sums_L.data_ptr()),
        *(key_counts_RC.data_ptr(), row_counts_RC.data_ptr()),
        *(seen_S.data_ptr(), seen_ends.data_ptr(), back_S.data_ptr(), back_ends.data_ptr()),
        straight.data_ptr(),
    )
    _check(library().nestpipe_request(ctypes.byref(given), ctypes.byref(made)))
    sent = int(key_counts_RC.sum())
    return RoutedKeys(
        keys_A=keys_A[:sent],
        lengths_L=sums_L[: made.num_lengths],
        key_counts_RC=key_counts_RC,
        row_counts_RC=row_counts_RC,
        seen=Segments(seen_S[: made.num_seen], None if alone else seen_ends),
        back=Segments(back_S[: made.num_seen], back_ends[: made.num_rows + 1]),
        straight=straight.tolist(),
    )


def split_window(whole: RoutedKeys, outputs_CM: Tensor, rank: int) -> list[WindowSlice]:
    """The micro-batches of a routed batch, of which each asks only for what no earlier one has."""
    tables, micros = outputs_CM.shape
    ranks = len(whole.key_counts_RC)
    terms, rows = len(whole.seen.rows_T), int(whole.row_counts_RC.sum())
    output_ends = outputs_CM.reshape(-1).cumsum(0)
    seen_ends = whole.seen.ends_S1
    keys_A, lengths_L, lasts_Q = _int64s(len(whole.keys_A)), _int64s(rows), _int64s(rows)
    key_counts = torch.empty(micros, ranks, tables, dtype=torch.int64)
    row_counts = torch.empty_like(key_counts)
    leaving_counts = torch.empty(micros, ranks, dtype=torch.int64)
    nums = torch.empty(4, micros, dtype=torch.int64)
    seen_S, back_S, reused_n, leaving_P = (_int32s(n) for n in (terms, terms, terms, rows))
    seen_O = _int32s(int(output_ends[-1]) + micros)
    back_ends = _int32s(rows + terms + micros)
    given = _WholeStruct(
        *(tables, ranks, rank, micros),
        *(output_ends.data_ptr(), whole.keys_A.data_ptr(), whole.lengths_L.data_ptr()),
        *(whole.key_counts_RC.data_ptr(), whole.row_counts_RC.data_ptr()),
        *(whole.seen.rows_T.data_ptr(), None if seen_ends is None else seen_ends.data_ptr()),
    )
    made = _WindowStruct(
        *(keys_A.data_ptr(), lengths_L.data_ptr(), lasts_Q.data_ptr()),
        *(key_counts.data_ptr(), row_counts.data_ptr(), seen_S.data_ptr(), seen_O.data_ptr()),
        *(back_S.data_ptr(), back_ends.data_ptr(), reused_n.data_ptr(), leaving_P.data_ptr()),
        leaving_counts.data_ptr(),
        *(num.data_ptr() for num in nums),
    )
    _check(library().nestpipe_window(ctypes.byref(given), ctypes.byref(made)))
    num_lengths, num_lasts, num_seen, num_reused = nums.tolist()
    new = row_counts.sum((1, 2)).tolist()
    keys = _parts(keys_A, key_counts.sum((1, 2)).tolist())
    lengths, lasts = _parts(lengths_L, num_lengths), _parts(lasts_Q, num_lasts)
    seen, backs = _parts(seen_S, num_seen), _parts(back_S, num_seen)
    seen_ends_M = _parts(seen_O, (outputs_CM.sum(0) + 1).tolist())
    ends_M = _parts(back_ends, [1 + a + b for a, b in zip(new, num_reused, strict=True)])
    reused = _parts(reused_n, num_reused)
    leaving = _parts(leaving_P, leaving_counts.sum(1).tolist())
    slices: list[WindowSlice] = []
    for m in range(micros):
        ends = ends_M[m]
        split = int(ends[new[m]])
        slices.append(
            WindowSlice(
                keys_A=keys[m],
                lengths_L=lengths[m],
                lasts_Q=lasts[m],
                key_counts_RC=key_counts[m],
                row_counts_RC=row_counts[m],
                seen=Segments(seen[m], None if seen_ends is None else seen_ends_M[m]),
                back=Segments(backs[m][:split], ends[: new[m] + 1]),
                reused=Segments(backs[m][split:], ends[new[m] :] - split),
                reused_n=reused[m],
                leaving_n=leaving[m],
                leaving_counts=leaving_counts[m].tolist(),
            )
        )
    return slices


def _parts(tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Parts of so many elements; more may follow."""
    return torch.split(tensor[: sum(sizes)], list(sizes))


def union_of(asked: OwnerRequests) -> KeyUnion:
    """The owner's unique keys, and which of them go where."""
    ranks, micros, tables = asked.key_counts_RMC.shape
    total = len(asked.keys_A)
    _check_positions(total, "one batch of one owner", "use a smaller batch or more ranks")
    rows_M = asked.row_counts_RMC.sum((0, 2)).tolist()
    keys_M = asked.key_counts_RMC.sum((0, 2)).tolist()
    keys_K, serve_T, back_T = _int64s(total), _int32s(total), _int32s(total)
    serve_ends = _int32s(sum(rows_M) + micros)
    back_ends = _int32s(micros * (total + 1))
    table_counts = torch.empty(tables, dtype=torch.int64)
    key_counts, row_counts = asked.key_counts_RMC.contiguous(), asked.row_counts_RMC.contiguous()
    keys_A, lengths_L = asked.keys_A.contiguous(), asked.lengths_L.contiguous()
    lasts_Q = None if asked.lasts_Q is None else _at_some_place(asked.lasts_Q)
    given = _OwnerRequestsStruct(
        *(tables, ranks, asked.rank, micros),
        *(key_counts.data_ptr(), row_counts.data_ptr(), keys_A.data_ptr(), lengths_L.data_ptr()),
        None if lasts_Q is None else lasts_Q.data_ptr(),
    )
    made = _KeyUnionStruct(
        *(keys_K.data_ptr(), table_counts.data_ptr(), serve_T.data_ptr(), serve_ends.data_ptr()),
        *(back_T.data_ptr(), back_ends.data_ptr()),
    )
    _check(library().nestpipe_union(ctypes.byref(given), ctypes.byref(made)))
    counts: list[int] = table_counts.tolist()
    unique = sum(counts)
    ends = torch.split(serve_ends, [rows + 1 for rows in rows_M])
    backs = torch.split(back_ends[: micros * (unique + 1)], unique + 1)
    serve = [
        Segments(terms, None if rows == keys else end)
        for terms, rows, keys, end in zip(
            torch.split(serve_T, keys_M), rows_M, keys_M, ends, strict=True
        )
    ]
    if lasts_Q is not None:
        keys_M = [int(end[-1]) for end in backs]
    gather_back = [
        Segments(terms, end) for terms, end in zip(torch.split(back_T, keys_M), backs, strict=True)
    ]
    return KeyUnion(keys_K[:unique], counts, serve, gather_back)


def index_of(keys_K: Tensor, counts: Sequence[int]) -> Tensor:
    """What `neighbours` finds unique keys by: a small hash for each table."""
    counts_C = torch.tensor(list(counts))
    size = library().nestpipe_index_size(len(counts_C), counts_C.data_ptr())
    index = _int32s(size)
    library().nestpipe_index(
        len(counts_C), keys_K.data_ptr(), counts_C.data_ptr(), index.data_ptr()
    )
    return index


def neighbours(
    now_K: Tensor, counts: Sequence[int], before: KnownKeys, older: KnownKeys | None
) -> Neighbours:
    """What a batch shares with the one before, and of the rest with the one before that."""
    now_C = torch.tensor(list(counts))
    lists = [_int64s(len(now_K)) for _ in range(4 if older is not None else 2)]
    places = [found.data_ptr() for found in lists]
    made = _NeighboursStruct(*places, *[None] * (4 - len(places)))
    known = [one for one in (before, older) if one is not None]
    all_counts = [torch.tensor(one.table_counts) for one in known]
    given = [
        _KnownKeysStruct(one.keys_K.data_ptr(), of_one.data_ptr(), one.index.data_ptr())
        for one, of_one in zip(known, all_counts, strict=True)
    ]
    _check(
        library().nestpipe_neighbours(
            *(len(now_C), now_K.data_ptr(), now_C.data_ptr()),
            ctypes.byref(given[0]),
            ctypes.byref(given[1]) if older is not None else None,
            ctypes.byref(made),
        )
    )
    shared_K, shared_before = (found[: made.num_shared] for found in lists[:2])
    nothing = now_K[:0]
    carried_K, carried_older = (
        (found[: made.num_carried] for found in lists[2:])
        if older is not None
        else (nothing, nothing)
    )
    return Neighbours(shared_K, shared_before, carried_K, carried_older)


def _at_some_place(numbers: Tensor) -> Tensor:
    """The same numbers in one piece, at an address even where there are none."""
    return numbers.contiguous() if len(numbers) else numbers.new_zeros(1)


def others(positions: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
    """All positions of some tables but the given ones, and how many of each table."""
    found_n, counts_C = _int64s(sum(counts)), torch.tensor(list(counts))
    of_table = torch.empty_like(counts_C)
    found = library().nestpipe_others(
        len(counts_C),
        *(counts_C.data_ptr(), positions.data_ptr(), len(positions)),
        *(found_n.data_ptr(), of_table.data_ptr()),
    )
    if found < 0:
        raise MemoryError("no memory left to tell rows that leave from those that stay")
    return found_n[:found], of_table.tolist()


def _int64s(count: int) -> Tensor:
    return empty((count,), torch.int64, _CPU)


def _int32s(count: int) -> Tensor:
    """For positions in a batch: they are many, and few enough."""
    return empty((count,), torch.int32, _CPU)


def _check_positions(count: int, where: str, remedy: str) -> None:
    """Positions are 32-bit numbers."""
    if count >= 2**31:
        raise ConfigError(f"{count:,} keys in {where} are too many to number; {remedy}")


def _check(status: int) -> None:
    if status == Status.NO_MEMORY:
        raise MemoryError("no memory left for routing keys")
    assert status == Status.OK, f"the native code answered {status}"
