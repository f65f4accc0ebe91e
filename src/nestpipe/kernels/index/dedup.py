"""The requester's unique keys by owner, and which of them each term is; and its plain twin."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.errors import ConfigError
from nestpipe.kernels.index.device_index import KeyCells
from nestpipe.kernels.index.library import (
    DedupedStruct,
    WantedStruct,
    ask,
    call,
    check_list,
    pointer,
)

# Shapes: T terms (keys, repeats included), A unique keys, C tables, R ranks

MOST_RANKS = 512
MOST_TERMS = 2**30


@dataclass(frozen=True, slots=True)
class Owners:
    """Who owns keys, seen from one rank."""

    ranks: int
    rank: int
    table_owners_C: Tensor | None = None
    """int32: the one owner of each table; -1, or None for all: each key has its own."""


@dataclass(frozen=True, slots=True)
class DedupedKeys:
    """Unique keys by owner, then table, then first appearance.

    Owners come peers first, in order of rank, then the rank itself.
    """

    keys_T: Tensor
    """int64: room for all terms; the first `num_unique` count."""
    inverse_T: Tensor
    """int32: the position of each term's key in `keys_T`."""
    counts: Tensor
    """int32: R x C counts by rank and table, then their sum. Copy it to the host as a whole."""
    num_tables: int

    @property
    def key_counts(self) -> Tensor:
        """(R, C) unique keys by rank and table."""
        return self.counts[:-1].view(-1, self.num_tables)

    @property
    def num_unique(self) -> Tensor:
        """(1,) unique keys of all owners."""
        return self.counts[-1:]


def dedup(keys_T: Tensor, table_ends_C: Tensor, owners: Owners) -> DedupedKeys:
    """Unique keys of terms that lie table by table; launches kernels and waits for nothing."""
    terms, tables, device = len(keys_T), len(table_ends_C), keys_T.device
    if terms >= MOST_TERMS or owners.ranks > MOST_RANKS:
        raise ConfigError(
            f"{terms} keys for {owners.ranks} ranks are too many for the GPU's dedup; "
            f"use fewer than {MOST_TERMS} keys and at most {MOST_RANKS} ranks"
        )
    check_list(keys_T, torch.int64, terms, "keys")
    check_list(owners.table_owners_C, torch.int32, tables, "table owners")
    places = torch.empty(_power_of_two(2 * terms), dtype=torch.int32, device=device)
    lists = torch.empty(2, terms, dtype=torch.int32, device=device)
    room = max(1, ask(device, "nestpipe_dedup_starts", terms, owners.ranks))
    starts = torch.empty(room, dtype=torch.int32, device=device)
    counts = torch.empty(owners.ranks * tables + 1, dtype=torch.int32, device=device)
    made = DedupedKeys(torch.empty_like(keys_T), lists[0], counts, tables)
    wanted = WantedStruct(
        *(keys_T.data_ptr(), terms, KeyCells(table_ends_C).struct()),
        *(pointer(owners.table_owners_C), owners.ranks, owners.rank),
    )
    to = DedupedStruct(
        *(places.data_ptr(), len(places), lists[1].data_ptr(), starts.data_ptr()),
        *(made.keys_T.data_ptr(), made.inverse_T.data_ptr(), counts.data_ptr()),
    )
    call(device, "nestpipe_dedup", ctypes.byref(wanted), ctypes.byref(to))
    return made


def plain_dedup(keys_T: Tensor, table_ends_C: Tensor, owners: Owners) -> DedupedKeys:
    """The twin, in numpy on the host: the same lists."""
    ranks, tables = owners.ranks, len(table_ends_C)
    peers_then_self = [*(r for r in range(ranks) if r != owners.rank), owners.rank]
    counts = np.zeros((ranks, tables), np.int32)
    given_C = owners.table_owners_C
    table_owners = [-1] * tables if given_C is None else given_C.tolist()
    all_keys = keys_T.cpu().numpy()
    unique: list[NDArray[np.int64]] = []
    owner_of: list[NDArray[np.int64]] = []
    inverse: list[NDArray[np.int64]] = []
    begin = known = 0
    for table, end in enumerate(table_ends_C.tolist()):
        keys, number = _by_first_appearance(all_keys[begin:end])
        one = table_owners[table]
        owner = np.full(len(keys), one) if one >= 0 else _mixed(keys, table) % ranks
        counts[:, table] = np.bincount(owner, minlength=ranks)
        unique.append(keys)
        owner_of.append(owner)
        inverse.append(number + known)
        begin, known = end, known + len(keys)
    order_of_owner = np.argsort(peers_then_self)[np.concatenate(owner_of)]
    order = np.argsort(order_of_owner, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    keys_out = np.zeros(len(all_keys), np.int64)
    keys_out[: len(order)] = np.concatenate(unique)[order]
    flat = np.append(counts.reshape(-1), len(order)).astype(np.int32)
    inverse_T = place[np.concatenate(inverse)].astype(np.int32)
    return DedupedKeys(
        torch.from_numpy(keys_out), torch.from_numpy(inverse_T), torch.from_numpy(flat), tables
    )


def _by_first_appearance(
    keys: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Unique keys in the order in which they come, and which of them each key is."""
    values, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return values[order], number[inverse.reshape(-1)]


def _mixed(keys: NDArray[np.int64], table: int) -> NDArray[np.int64]:
    """A hash of (table, key), 63 bits: the one that chooses owners on the host too."""
    x = keys.view(np.uint64) + np.uint64((table + 1) * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) & np.uint64(2**63 - 1)).astype(np.int64)


def _power_of_two(least: int) -> int:
    return 1 << max(0, (least - 1).bit_length())
