"""A batch whose keys are in the pool or new to everyone: few calls, with memory that is used again.

A step of a millisecond is decided by how many calls the host makes. Here `admit` finds slots, makes
first values and sorts terms by one call, and lookup and update are one call each. All memory and
all arguments that do not change are made once, for as many terms as the largest batch had.
`DeviceIndex` with `sort_segments`, `look_up` and `update_segments` is the slow twin: the same
kernels, launched one by one.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nestpipe.kernels.index import library
from nestpipe.kernels.index.device_index import DeviceIndex, FirstValues, KeyCells
from nestpipe.kernels.index.library import (
    AdmissionStruct,
    CellsStruct,
    CutStruct,
    KeysStruct,
    LookupStruct,
    OutputsStruct,
    RowsStruct,
    ToldStruct,
    UpdateStruct,
    ask,
    call,
    check_list,
    pointer,
    rows_struct,
)
from nestpipe.kernels.index.segments import Pooling
from nestpipe.kernels.rows.native import OptimizerStruct
from nestpipe.kernels.rows.segments import PIECE

# Shapes: T terms of a batch, O outputs that the model sees, S slots, D weights of a row, W weights
# and state, G groups of tables

ALIGNED = 256
"""Bytes; every list begins at a multiple of it."""


class TermBuffers:
    """Room for the terms of one batch in one pool."""

    def __init__(
        self, most_terms: int, index: DeviceIndex, rows_SW: Tensor, first: FirstValues
    ) -> None:
        self.most_terms, self._device, self._dim = most_terms, index.device, first.dim
        bits = index.num_slots.bit_length()  # as in `sort_segments`
        room = max(1, ask(index.device, "nestpipe_sort_bytes", most_terms, bits))
        of_row = 4 * first.dim
        places = _Places(
            **dict.fromkeys(("slots", "new", "ids", "values"), 4 * most_terms),
            pieces=16 * most_terms,
            longs=16 * (most_terms // PIECE + 1),
            counts=8,
            partials=2 * (most_terms // PIECE + 1) * of_row,
            group_partials=2 * (most_terms // PIECE**2 + 1) * of_row,
            memory=room,
        )
        self._memory = torch.empty(places.size, dtype=torch.uint8, device=index.device)
        self._numbers_T = torch.arange(most_terms, dtype=torch.int32, device=index.device)
        at = places.from_base(self._memory.data_ptr())
        self._keep = index, rows_SW, first
        self._keys, self._first = KeysStruct(None, 0, CellsStruct()), first.struct(rows_SW)
        self._cut = CutStruct(at["ids"], 0, at["pieces"], at["longs"], at["counts"])
        self._admission = AdmissionStruct(
            *map(ctypes.addressof, (index.struct, self._keys, self._first, self._cut)),
            *(at["slots"], at["new"], index.num_new.data_ptr(), None, at["ids"], at["values"]),
            *(at["memory"], room, 0, bits),
        )
        rows = rows_struct(rows_SW)
        self._lookup = LookupStruct(rows, RowsStruct(), at["slots"], None, None, None, 0, self._dim)
        self._update = UpdateStruct(
            *(RowsStruct(), at["values"], None, None, None, None),
            *(at["pieces"], at["longs"], at["counts"], at["partials"], at["group_partials"]),
            *(rows, 0, self._dim, 0, 0, None, 1.0),
        )

    def admit(self, keys_T: Tensor, cells: KeyCells, stamp: int, outputs_T: Tensor | None) -> None:
        """Give every key a slot, write first values of new rows, sort terms by slot.

        There must be free slots for all keys, none of which was ever used.
        """
        count = len(keys_T)
        assert count <= self.most_terms, f"{count} terms where {self.most_terms} have room"
        check_list(keys_T, torch.int64, count, "keys")
        check_list(outputs_T, torch.int32, count, "outputs")
        values_T = self._numbers_T if outputs_T is None else outputs_T
        self._given = keys_T, cells, values_T  # alive until other terms come
        self._keys.keys, self._keys.count, self._keys.cells = (
            *(keys_T.data_ptr(), count),
            cells.struct(),
        )
        self._cut.count = self._admission.count = self._update.num_terms = count
        self._admission.values = values_T.data_ptr()
        call(self._device, "nestpipe_admit", ctypes.byref(self._admission), stamp)

    def look_up(self, out_OD: Tensor, pooling: Pooling | None) -> None:
        """Write the rows of the terms, or pooled rows."""
        task = self._lookup
        task.out, task.outputs = rows_struct(out_OD), len(out_OD)
        task.ends, task.weights, task.divisors = (
            (None, None, None)
            if pooling is None
            else (pointer(pooling.ends_O1), pointer(pooling.weights_T), pointer(pooling.divisors_O))
        )
        call(self._device, "nestpipe_look_up", ctypes.byref(task))

    def update(
        self,
        optimizer: OptimizerStruct,
        gradients_OD: Tensor,
        times: float,
        faults: int,
        *,
        clip: bool,
    ) -> None:
        """Sum gradients by row, times a number, and apply the optimizer.

        `faults`: the address of a counter for rows whose sums are not finite, which are dropped.
        """
        task = self._update
        task.gradients, task.factor, task.clip = rows_struct(gradients_OD), times, clip
        task.faults = faults
        call(
            *(self._device, "nestpipe_update_terms"),
            *(ctypes.byref(optimizer), ctypes.byref(task), faults),
        )


class _Places:
    """Lists in one piece of memory, one after the other."""

    def __init__(self, **sizes: int) -> None:
        self.size, self._offsets = 0, dict[str, int]()
        for name, size in sizes.items():
            self._offsets[name] = self.size
            self.size += -(-size // ALIGNED) * ALIGNED
        self.size += ALIGNED

    def from_base(self, base: int) -> dict[str, int]:
        """The address of each list."""
        first = -(-base // ALIGNED) * ALIGNED
        return {name: first + offset for name, offset in self._offsets.items()}


def pool_outputs(lengths_O: Tensor, terms: int) -> tuple[Pooling, Tensor]:
    """From how many terms each output has: where they begin, and (T,) the output of each."""
    outputs, device = len(lengths_O), lengths_O.device
    check_list(lengths_O, torch.int64, outputs, "lengths")
    room = max(1, ask(device, "nestpipe_outputs_sums", outputs))
    made = torch.empty(outputs + 1 + terms + room, dtype=torch.int32, device=device)
    ends_O1, numbers_T, sums = torch.split(made, [outputs + 1, terms, room])
    task = OutputsStruct(
        *(lengths_O.data_ptr(), outputs, terms),
        *(ends_O1.data_ptr(), numbers_T.data_ptr(), sums.data_ptr()),
    )
    call(device, "nestpipe_outputs", ctypes.byref(task))
    return Pooling(ends_O1), numbers_T


def plain_pool_outputs(lengths_O: Tensor, terms: int) -> tuple[Pooling, Tensor]:
    """The twin."""
    ends_O1 = torch.zeros(len(lengths_O) + 1, dtype=torch.int32, device=lengths_O.device)
    torch.cumsum(lengths_O, 0, dtype=torch.int32, out=ends_O1[1:])
    numbers_O = torch.arange(len(lengths_O), dtype=torch.int32, device=lengths_O.device)
    return Pooling(ends_O1), numbers_O.repeat_interleave(lengths_O, output_size=terms)


class StepNews:
    """What the device tells the host of a step: a kernel writes it into pinned host memory.

    So nothing is copied, and nobody waits but whoever reads, until the stream is past it.
    """

    def __init__(self, groups: int, device: torch.device) -> None:
        by_kernels = library.has_kernels(device)
        self._news = torch.zeros(2 + 2 * groups, pin_memory=device.type == "cuda")
        self._counts = torch.zeros(2 * groups, dtype=torch.int32, device=device)
        self.faults_G = self._counts[:groups]
        """Rows of each group of tables whose gradients were not finite ..."""
        self.beyond_G = self._counts[groups:]
        """... and whether one had a weight that its type cannot hold."""
        self._struct = ToldStruct(
            *(None, None, self._counts.data_ptr(), 2 * groups, self._news.data_ptr())
        )
        self._device = device if by_kernels else None
        # A thread that waits sleeps, as those of lanes do.
        self._told = torch.cuda.Event(blocking=True) if device.type == "cuda" else None

    def tell(self, loss: Tensor, dense_fault: Tensor | None) -> None:
        """Write the summed loss, whether dense gradients were not finite, and the counts."""
        self._given = loss, dense_fault  # alive until the next step
        if self._device is None:
            self._news[0] = loss
            self._news[1] = 0.0 if dense_fault is None else dense_fault.float()
            self._news[2:] = self._counts
            return
        assert loss.dtype == torch.float32, f"a loss is {loss.dtype}"
        self._struct.loss, self._struct.dense_fault = loss.data_ptr(), pointer(dense_fault)
        call(self._device, "nestpipe_tell", ctypes.byref(self._struct))
        if self._told is not None:
            self._told.record()

    def read(self) -> tuple[float, int, int]:
        """The loss, how many gradients were not finite, and how many groups have 1 in `beyond_G`.

        Waits until `tell` is done.
        """
        if self._told is not None:
            self._told.synchronize()
        loss, *counts = self._news.tolist()
        beyond = int(sum(counts[1 + len(self.faults_G) :]))
        return loss, int(sum(counts)) - beyond, beyond
