"""First values of rows in numpy: bit for bit those of `kernels/native/store/init.h`.

A row's first value is a function of its table's seed and its key alone. Neither the order of
arrival, nor the number of ranks, nor a restart changes it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nestpipe.embedding.store.protocol import MASK

# Shapes: K keys, D weights of a row

STEP = np.uint64(0x9E3779B97F4A7C15)


def first_weights(
    seed: int, keys_K: NDArray[np.int64], dim: int, spread: float
) -> NDArray[np.float32]:
    """Weights that rows of these keys begin with: normal, of standard deviation `spread`."""
    salt = _mix(np.array([seed & MASK], np.uint64) + STEP)
    start_K = _mix(salt ^ keys_K.view(np.uint64))
    steps_D = np.arange(1, dim + 1, dtype=np.uint64) * STEP
    bits_KD = _mix(start_K[:, None] + steps_D)
    return (_normal(bits_KD) * spread).astype(np.float32)


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest bfloat16 numbers, ties to even, as float32; nan stays nan."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    nan = (bits & np.uint32(0x7FFFFFFF)) > 0x7F800000
    kept = np.where(nan, bits | np.uint32(0x400000), rounded) & np.uint32(0xFFFF0000)
    return kept.view(np.float32)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _normal(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Four 16-bit numbers added up, bent into a normal variate by an odd polynomial."""
    parts = [(bits >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48)]
    total = sum(parts[1:], start=parts[0]).astype(np.int64)
    x = (total - 131070).astype(np.float64) * (1.0 / 65536.0)
    s = x * x
    p = 0.005411906108740816 * s + -0.017329680146971713
    p = p * s + 0.02863321968706253
    p = p * s + 0.04776074440493899
    p = p * s + 1.6668930519836869
    return p * x
