"""Which micro-batch each sample of a batch goes to: native code, or its plain twin."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import numpy as np

from nestpipe.errors import CapacityError
from nestpipe.kernels.native import Status, library, native_wanted
from nestpipe.kernels.plain_clustering import I64, ClusterTask, cluster_plainly

MOST_TOKENS = (1 << 30) - 1
"""Tokens of one sample."""


class _Task(ctypes.Structure):
    """`ClusterTask` of `native/cluster.h`."""

    _fields_ = (
        ("num_samples", c_int64),
        ("num_parts", c_int64),
        ("offsets", c_void_p),
        ("keys", c_void_p),
        ("tokens", c_void_p),
        ("sizes", c_void_p),
        ("least", c_void_p),
        ("most", c_void_p),
    )


def cluster(task: ClusterTask, *, native: bool | None = None) -> I64:
    """(B,) the part of each sample, a function of the task alone; runs without the GIL.

    `native=None` leaves the choice to NESTPIPE_NATIVE.
    """
    _check(task)
    if not (native_wanted() if native is None else native):
        return cluster_plainly(task)
    columns = (task.offsets_B1, task.keys_T, task.tokens_B, task.sizes_P, task.least_P, task.most_P)
    held = [np.ascontiguousarray(column, np.int64) for column in columns]
    given = _Task(len(task.tokens_B), len(task.sizes_P), *(column.ctypes.data for column in held))
    part_B = np.empty(len(task.tokens_B), np.int64)
    status = library().nestpipe_cluster(ctypes.addressof(given), part_B.ctypes.data)
    if status == Status.NO_MEMORY:
        raise CapacityError(
            f"host memory is full: {len(task.keys_T):,} keys cannot be clustered into "
            f"{len(task.sizes_P)} micro-batches; free memory or use smaller batches"
        )
    assert status == Status.OK, f"clustering answered {status}"
    return part_B


def _check(task: ClusterTask) -> None:
    samples, parts = len(task.tokens_B), len(task.sizes_P)
    assert len(task.offsets_B1) == samples + 1, "every sample has a start, and the last an end"
    assert task.offsets_B1[0] == 0, "the first sample's keys are the first"
    assert task.offsets_B1[-1] == len(task.keys_T), "the last sample's keys are the last"
    assert (np.diff(task.offsets_B1) >= 0).all(), "samples follow one another"
    assert len(task.least_P) == len(task.most_P) == parts, "every part has bounds"
    assert (task.sizes_P >= 0).all(), "a part cannot have less than no samples"
    assert task.sizes_P.sum() == samples, "the parts have room for all samples"
    assert (task.tokens_B >= 0).all(), "tokens are a number from 0"
    assert (task.tokens_B <= MOST_TOKENS).all(), f"a sample has at most {MOST_TOKENS} tokens"
