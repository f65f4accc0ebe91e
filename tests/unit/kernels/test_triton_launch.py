"""Starts of kernels without Triton's binding: the same code, arguments and order as with it.

Every test is a process of its own, in which kernels do nothing: `support/triton_without_gpu.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support import triton_without_gpu
from support.triton_without_gpu import HAS_TRITON, Start

BLOCK = {"forward": (4, 15), "both": (9, 42)}
"""Starts of kernels and operations of torch for a block without biases: of these 6 are products, 6
casts of weights and of their gradients, 3 sums over rows, 15 new tensors, the rest views."""
BIASED = {"forward": (5, 17), "both": (11, 49)}
"""The same with biases by position and by time."""


def few_operations_for_a_block(starts: list[Start]) -> None:
    """Each costs the host more than a small kernel takes."""
    counts = triton_without_gpu.counts_of_a_block
    with triton_without_gpu.kernels_everywhere():
        assert counts(starts, position_buckets=0) == BLOCK
        assert counts(starts, position_buckets=64, time_buckets=32) == BIASED


def the_same_starts_as_triton_makes(starts: list[Start]) -> None:
    """Of every kernel of both kinds of block: code, grid and arguments."""
    from nestpipe.kernels.triton_launch import Starter

    direct, names = Starter.__call__, set()

    def both_ways(self: Starter, *given: Any) -> None:
        direct(self, *given)  # the first of its kind, or not
        starts.clear()
        direct(self, *given)
        assert self.why_ordinary is None
        self.start_ordinarily(*given)
        one, other = starts
        assert one.code is other.code
        assert one.grid == other.grid
        assert one.arguments == other.arguments
        names.add(one.code.name)

    Starter.__call__ = both_ways  # type: ignore[method-assign]
    options: list[dict[str, Any]] = [
        {"dropout": 0.1, "time_buckets": 9},
        {"position_buckets": 0, "affine_norm": False, "max_attention": 3},
        {"kind": "fuxi", "time_buckets": 9},
        {"attention_dim": 8, "value_dim": 12, "shared_bias": True},
    ]
    with triton_without_gpu.kernels_everywhere():
        for given in options:
            _, both = triton_without_gpu.encoder_pass(2, **given)
            both()
    assert len(names) >= 14, names


def triton_chooses_for_new_kinds_of_arguments(starts: list[Start]) -> None:
    """Types, alignment, numbers that are 1 or a multiple of 16, large numbers, and what is left
    out: whatever comes in whichever order, the code is what Triton would take."""
    from nestpipe.kernels.block import kernels
    from nestpipe.kernels.triton_launch import Starter, constants

    starter = Starter(kernels.silu_forward)
    memory, half = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    one, two = constants(R=8, C=16, num_warps=4), constants(R=8, C=32, num_warps=4)
    rows = [memory, half, memory[1:], half[8:], half[4:]]
    codes = set()
    for _ in range(3):
        for tile in (one, two):
            for mixed in rows:
                for bias in (None, memory):
                    for numbers in ((5, 48, 16), (5, 48, 1), (2**40, 48, 16), (7, 47, 16)):
                        given = ((3, 2), tile, (), (mixed, bias, memory), numbers)
                        starts.clear()
                        starter(*given)
                        starter.start_ordinarily(*given)
                        first, second = starts
                        assert first.code is second.code
                        assert first.arguments == second.arguments
                        codes.add(id(first.code))
    assert len(codes) > 20
    assert 16 <= len(starter.codes) < len(codes), "those that are not aligned go Triton's way"


def a_launcher_that_refuses_is_replaced_by_tritons(starts: list[Start]) -> None:
    """One warning, the kernel runs, and no further start tries it."""
    from nestpipe.kernels.block import kernels
    from nestpipe.kernels.triton_launch import Starter, constants

    starter, x = Starter(kernels.gated_silu_forward), torch.zeros(64)
    given = ((2, 1), constants(R=8, C=16, num_warps=4), (), (x, x), (4, 8))
    starter(*given)
    code = next(iter(starter.codes.values()))
    assert code is not None

    def refuse(*_: Any) -> None:
        raise TypeError("function takes 9 arguments")

    for kind in starter.codes:
        starter.codes[kind] = code._replace(launch=refuse)
    starts.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            starter(*given)
    assert len(starts) == 3
    assert len(warned) == 1
    assert "is started Triton's way from now on" in str(warned[0].message)
    assert starter.why_ordinary == "TypeError: function takes 9 arguments"


def the_switch_takes_tritons_way(starts: list[Start]) -> None:
    """For all kernels."""
    from nestpipe.kernels.block import launch

    assert launch._SILU.why_ordinary == "NESTPIPE_TRITON_LAUNCH is set"
    launch.run_silu(torch.zeros(4, 8), None, 2)
    assert len(starts) == 1
    assert not launch._SILU.codes


CHECKS = {
    check.__name__: check
    for check in (
        few_operations_for_a_block,
        the_same_starts_as_triton_makes,
        triton_chooses_for_new_kinds_of_arguments,
        a_launcher_that_refuses_is_replaced_by_tritons,
        the_switch_takes_tritons_way,
    )
}
OF_TRITON = {"triton_chooses_for_new_kinds_of_arguments"}


@pytest.mark.parametrize("name", CHECKS)
def test_starts_of_kernels(name: str):
    if name in OF_TRITON and not HAS_TRITON:
        pytest.skip("triton comes with torch's builds for GPUs alone")
    way = "ordinary" if name.startswith("the_switch") else ""
    environment = {**os.environ, "NESTPIPE_TRITON_LAUNCH": way}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ran = subprocess.run(
        [sys.executable, __file__, name],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def main(names: Sequence[str]) -> None:
    """For a process of its own."""
    starts = triton_without_gpu.install()
    torch.set_num_threads(1)
    for name in names:
        CHECKS[name](starts)


if __name__ == "__main__":
    main(sys.argv[1:])
