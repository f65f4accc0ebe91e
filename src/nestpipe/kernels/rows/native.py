"""Segment sums, row updates and row copies in native code, on tensors of the host."""

# pyright: strict
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.errors import ConfigError
from nestpipe.kernels.library import Status, library

# Shapes: N rows, S sums, T terms of all sums together, D width, K rows that are updated


class _RowsStruct(ctypes.Structure):
    _fields_ = (("base", c_void_p), ("stride", c_int64), ("pointers", c_void_p))


class _SegmentsStruct(ctypes.Structure):
    _fields_ = (("terms", c_void_p), ("ends", c_void_p))


class _GradientsStruct(ctypes.Structure):
    _fields_ = (("gradients", _RowsStruct), ("segments", _SegmentsStruct))


class OptimizerStruct(ctypes.Structure):
    """What a row optimizer is, for native code."""

    _fields_ = (
        ("kind", c_int64),
        *((name, c_float) for name in ("lr", "eps", "beta1", "rest1", "beta2", "rest2")),
        *((name, c_float) for name in ("adam_scale", "scale", "keep")),
    )
    kind: int


KINDS: tuple[str, ...] = (
    *("sgd", "adagrad", "rowwise_adagrad", "adam"),
    *("momentum_scaled_rowwise_adagrad", "touch_scaled_rowwise_adagrad", "adamw"),
)


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradient rows of one micro-batch, and which of them each row gets."""

    rows: Sequence[Tensor]
    terms_T: Tensor | None
    """None: row i gets gradient i ..."""
    ends_K1: Tensor | None
    """... and None here: one each."""


@dataclass(frozen=True, slots=True)
class RowPointers:
    """Rows in host memory, each at an address of its own."""

    addresses_K: Tensor
    width: int

    def __len__(self) -> int:
        return len(self.addresses_K)

    def at(self, positions_n: Tensor | None) -> RowPointers:
        """Some of the rows; None: all."""
        if positions_n is None:
            return self
        return RowPointers(self.addresses_K[positions_n], self.width)


def sum_segments(
    terms_T: Tensor,
    ends_S1: Tensor | None,
    rows: Sequence[Tensor] | RowPointers,
    out: Tensor | RowPointers,
    *,
    add: bool,
) -> None:
    """Write or add the sums of some rows."""
    count, dim = out.shape if isinstance(out, Tensor) else (len(out), out.width)
    source, alive = _rows_of(rows)
    target, _ = _rows_of([out] if isinstance(out, Tensor) else out)
    terms, ends = _int32(terms_T), _int32(ends_S1)
    segments = _SegmentsStruct(_pointer(terms), _pointer(ends))
    status = library().nestpipe_segment_sum(
        ctypes.byref(source),
        ctypes.byref(segments),
        count,
        dim,
        ctypes.byref(target),
        int(add),
        torch.get_num_threads(),
    )
    del alive
    _check(status)


def optimizer_struct(
    kind: str,
    *,
    lr: float,
    eps: float,
    betas: tuple[float, float],
    adam_scale: float,
    scale: float,
    keep: float = 1.0,
) -> OptimizerStruct:
    """An optimizer at one of its steps."""
    if kind not in KINDS:
        raise ConfigError(f"unknown row optimizer {kind!r}; use one of {', '.join(KINDS)}")
    return OptimizerStruct(
        *(KINDS.index(kind), lr, eps),
        *(betas[0], 1 - betas[0], betas[1], 1 - betas[1]),
        *(adam_scale, scale, keep),
    )


def update(
    optimizer: OptimizerStruct,
    rows: Tensor | RowPointers,
    dim: int,
    parts: Sequence[Gradients],
    times: float,
) -> None:
    """One optimizer application per row, on its summed gradients times a number."""
    count = len(rows)
    if not count:
        return
    assert parts, "there are no gradients to apply"
    target, alive = _rows_of([rows] if isinstance(rows, Tensor) else rows)
    sources = [_rows_of(part.rows) for part in parts]
    positions = [(_int32(part.terms_T), _int32(part.ends_K1)) for part in parts]
    given = (_GradientsStruct * len(parts))(
        *(
            _GradientsStruct(source, _SegmentsStruct(_pointer(terms), _pointer(ends)))
            for (source, _), (terms, ends) in zip(sources, positions, strict=True)
        )
    )
    status = library().nestpipe_update(
        ctypes.byref(optimizer),
        ctypes.byref(target),
        count,
        dim,
        ctypes.byref(given),
        len(parts),
        times,
        torch.get_num_threads(),
    )
    del alive, sources
    if status == Status.UNKNOWN_OPTIMIZER:
        raise unknown_optimizer(optimizer)
    _check(status)


def all_within(rows_ND: Tensor, bound: float) -> bool:
    """Whether no number of some rows is NaN, or further from zero than a finite bound."""
    source, _ = _rows_of([rows_ND])
    within = c_int64()
    status = library().nestpipe_within(
        ctypes.byref(source), *rows_ND.shape, bound, torch.get_num_threads(), within
    )
    _check(status)
    return bool(within.value)


def unknown_optimizer(optimizer: OptimizerStruct) -> ConfigError:
    """The error for an optimizer that compiled code does not have."""
    return ConfigError(
        f"compiled code has no row optimizer of kind {optimizer.kind}; "
        f"use one of {', '.join(KINDS)}"
    )


def copy_rows(
    pointers: RowPointers,
    rows_KW: Tensor,
    *,
    positions_n: Tensor | None = None,
    to_store: bool,
    threads: int,
) -> None:
    """Copy rows from where they live into a buffer, or from the buffer to where they live.

    `positions_n`: which row of the buffer belongs to each pointer; None: all, in order.
    """
    rows = len(rows_KW) if positions_n is None else len(positions_n)
    assert rows == len(pointers), f"{rows} rows for {len(pointers)} pointers"
    assert rows_KW.shape[1] == pointers.width, f"rows of {rows_KW.shape[1]}, not {pointers.width}"
    assert rows_KW.stride(1) == 1 or not rows, "rows must lie in one piece"
    status = library().nestpipe_copy_rows(
        *(pointers.addresses_K.data_ptr(), rows, pointers.width * 4),
        *(rows_KW.data_ptr(), rows_KW.stride(0) * 4, _pointer(positions_n)),
        *(int(to_store), threads),
    )
    _check(status)


def _int32(tensor: Tensor | None) -> Tensor | None:
    """Positions as native code wants them; its own are of that type."""
    return None if tensor is None else tensor.to(torch.int32)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rows_of(rows: Sequence[Tensor] | RowPointers) -> tuple[_RowsStruct, Tensor | None]:
    """How native code finds the rows, and what must live as long as it looks."""
    if isinstance(rows, RowPointers):
        return _RowsStruct(None, 0, rows.addresses_K.data_ptr()), rows.addresses_K
    for tensor in rows:
        assert tensor.dtype == torch.float32, f"rows are {tensor.dtype}"
        # Where there is nothing, or one column, strides may be anything.
        in_one_piece = tensor.stride(1) == 1 or tensor.shape[1] == 1 or not len(tensor)
        assert in_one_piece, f"the numbers of a row lie {tensor.stride(1)} apart"
    if len(rows) == 1:
        return _RowsStruct(rows[0].data_ptr(), rows[0].stride(0) * 4, None), None
    addresses = _addresses(rows)
    return _RowsStruct(None, 0, addresses.data_ptr()), addresses


def _addresses(rows: Sequence[Tensor]) -> Tensor:
    """Where each row of several tensors lies."""
    if len({(len(part), part.stride(0)) for part in rows}) == 1:
        bases = torch.tensor([part.data_ptr() for part in rows])
        steps = torch.arange(len(rows[0])).mul_(rows[0].stride(0) * 4)
        return (bases[:, None] + steps).view(-1)
    return torch.cat(
        [torch.arange(len(part)).mul_(part.stride(0) * 4).add_(part.data_ptr()) for part in rows]
    )


def _check(status: int) -> None:
    if status == Status.NO_MEMORY:
        raise MemoryError("no memory left for the sums of rows")
    assert status == Status.OK, f"the native code answered {status}"
