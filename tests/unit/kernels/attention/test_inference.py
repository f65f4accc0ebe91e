"""Attention without gradients, on the host and by the kernel, against the plain form."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nestpipe.kernels.attention import inference as attention_forward
from nestpipe.kernels.attention.inference import Rule, attend, attend_with_past
from nestpipe.kernels.attention.reference import Mask, RelativeBias, hstu_attention
from support.examples import examples


def make_times(total: int, buckets: int, generator: torch.Generator) -> Tensor:
    """At and beside powers of two, many of them 0: differences at the edges of all buckets."""
    power = torch.randint(0, buckets + 2, (total,), generator=generator)
    beside = torch.randint(-1, 2, (total,), generator=generator)
    return torch.where(torch.rand(total, generator=generator) < 0.4, 0, 2**power + beside)


@dataclass(frozen=True, slots=True)
class Case:
    """Samples of some lengths, the oldest rows of which may lie elsewhere."""

    lengths: list[int]
    targets: list[int] | None = None
    past: list[int] | None = None
    positions: int = 3
    """Columns of the bias by position; 0: there is none."""
    time_buckets: int = 4
    heads: int = 2
    width: int = 3
    value_width: int = 5
    dtype: torch.dtype = torch.float64

    def ends(self, lengths: list[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)])

    def rows(self) -> list[Tensor]:
        """Queries, keys and values."""
        generator = torch.Generator().manual_seed(len(self.lengths))
        widths = [self.width, self.width, self.value_width]
        total = sum(self.lengths)
        return [
            torch.randn(total, self.heads, w, generator=generator, dtype=torch.float64)
            .to(self.dtype)
            for w in widths
        ]  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(9)

        def table(columns: int) -> Tensor | None:
            values = torch.randn(self.heads, columns, generator=generator, dtype=torch.float64)
            return values.to(self.dtype) if columns else None

        position_HP, time_HQ = table(self.positions), table(self.time_buckets)
        times_T = make_times(sum(self.lengths), self.time_buckets, generator)
        targets = None
        if self.targets is not None:
            targets = torch.tensor(self.targets, dtype=torch.int64)
        bias = RelativeBias(position_HP, time_HQ, times_T if self.time_buckets else None)
        return {"norm": 16.0, "scale": 0.5, "mask": Mask(targets), "bias": bias}

    def split(self) -> tuple[Tensor, Tensor, list[slice]]:
        """Which rows are new, where each sample's start among those, and the older ones."""
        past = self.past or [0] * len(self.lengths)
        new = [length - old for length, old in zip(self.lengths, past, strict=True)]
        starts = self.ends(self.lengths).tolist()[:-1]
        older = [slice(start, start + old) for start, old in zip(starts, past, strict=True)]
        places = [
            place
            for start, old, count in zip(starts, past, new, strict=True)
            for place in range(start + old, start + old + count)
        ]
        return torch.tensor(places, dtype=torch.int64), self.ends(new), older

    def expected(self) -> Tensor:
        """By the plain form, in float64."""
        exact = replace(self, dtype=torch.float64)
        q, k, v = (x.to(self.dtype).double() for x in exact.rows())
        arguments = exact.arguments()
        bias = self.arguments()["bias"]
        position_HP, time_HQ = (
            None if table is None else table.double() for table in (bias.position_HP, bias.time_HQ)
        )
        arguments["bias"] = RelativeBias(position_HP, time_HQ, bias.times_T)
        return hstu_attention(q, k, v, self.ends(self.lengths), **arguments)


CASES = [
    Case([70, 0, 33, 1, 130], [3, 0, 33, 1, 40], [20, 0, 0, 0, 90], positions=5, time_buckets=32),
    Case([70, 0, 33, 1, 130], None, [70, 0, 10, 0, 129], time_buckets=0),
    Case([131, 5], [66, 2], [65, 3], positions=0, time_buckets=40, width=8, value_width=40),
    Case([90, 90], [0, 20], [10, 64], positions=0, time_buckets=0, heads=1, width=17),
    Case([200], [0], [150], positions=64, time_buckets=1, width=20, value_width=8),
]


def in_one_piece(case: Case) -> Tensor:
    q, k, v = case.rows()
    return attend(q, k, v, case.ends(case.lengths), **case.arguments())


def new_rows_only(case: Case) -> Tensor:
    (q, k, v), (new, offsets, _) = case.rows(), case.split()
    ends = case.ends(case.lengths)
    return attend(q[new], k, v, ends, query_offsets_B=offsets, **case.arguments())


def after_a_past(case: Case) -> Tensor:
    (q, k, v), (new, offsets, older) = case.rows(), case.split()
    past = [k[rows] for rows in older], [v[rows] for rows in older]
    return attend_with_past(q[new], k[new], v[new], *past, offsets, **case.arguments())


def assert_all_forms_agree(case: Case, bound: float = 1e-12) -> None:
    expected, (new, _, _) = case.expected(), case.split()
    allowed = bound * expected.abs().amax().item() if len(expected) else 0.0
    for found, wanted in (
        (in_one_piece(case), expected),
        (new_rows_only(case), expected[new]),
        (after_a_past(case), expected[new]),
    ):
        assert found.dtype == case.dtype
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=allowed)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 3e-2)],
)
def test_it_is_the_plain_form(case: Case, dtype, bound: float):
    assert_all_forms_agree(replace(case, dtype=dtype), bound)


@st.composite
def make_cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(0, 40), max_size=5))
    targets = [draw(st.integers(0, length)) for length in lengths]
    past = [draw(st.integers(0, n - t)) for n, t in zip(lengths, targets, strict=True)]
    with_targets = targets if draw(st.booleans()) else None
    buckets = draw(st.integers(0, 8)), draw(st.integers(0, 8))
    return Case(lengths, with_targets, past, *buckets, heads=draw(st.integers(1, 3)))


@given(make_cases(), st.integers(1, 400), st.integers(1, 9), st.sampled_from([0, 200, 10_000]))
@examples("many")
def test_blocks_and_runs_of_any_size_give_the_same(case: Case, scores: int, rows: int, run: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_forward, "_SCORES", scores)
        patch.setattr(attention_forward, "_ROWS", (rows, 2 * rows))
        patch.setattr(attention_forward, "_SCORES_OF_A_RUN", run)
        assert_all_forms_agree(case)


def test_other_samples_may_hold_anything():
    case = Case([60, 200, 1])
    q, k, v = case.rows()
    ends, arguments = case.ends(case.lengths), case.arguments()
    clean = attend(q, k, v, ends, **arguments)
    for x in (q, k, v):
        x[60:260] = float("nan")
    found = attend(q, k, v, ends, **arguments)
    assert torch.equal(found[:60], clean[:60])
    assert torch.equal(found[260:], clean[260:])
    assert found[60:260].isnan().all()


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest new tensor had."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not out._is_view():
            self.numbers = max(self.numbers, out.numel())
        return out


@pytest.mark.parametrize("length", [1000, 4000])
def test_memory_is_that_of_a_block(length: int):
    case = Case([length, 50], [10, 50], [length - 100, 0], dtype=torch.float32)
    for form in (in_one_piece, new_rows_only, after_a_past):
        with Largest() as largest:
            form(case)
        assert largest.numbers <= max(1 << 20, 32 * case.heads * length)
        assert largest.numbers < case.heads * length * length


def test_a_past_of_another_kind_is_refused():
    case = Case([5], None, [3])
    (q, k, v), (new, offsets, _) = case.rows(), case.split()
    with pytest.raises(AssertionError, match="rows of a past are"):
        attend_with_past(
            q[new], k[new], v[new], [k[:3].float()], [v[:3]], offsets, **case.arguments()
        )


def test_a_bias_by_time_needs_times():
    case = Case([5])
    (q, k, v), arguments = case.rows(), case.arguments()
    arguments["bias"] = replace(arguments["bias"], times_T=None)
    with pytest.raises(AssertionError, match="needs the rows' times"):
        attend(q, k, v, case.ends([5]), **arguments)


def by_kernel(case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """Found and wanted, by form."""
    from nestpipe.kernels.attention.inference import _pointers
    from nestpipe.kernels.attention.triton_forward import Keys, attend_by_kernel

    (q, k, v), (new, offsets, older) = case.rows(), case.split()
    arguments, ends, expected = case.arguments(), case.ends(case.lengths), case.expected()
    rule = Rule(16.0, 0.5, arguments["mask"].num_targets_B, arguments["bias"])
    past_k, past_v = [k[rows].clone() for rows in older], [v[rows].clone() for rows in older]
    apart = Keys(k[new], v[new], offsets, ends, _pointers([past_k], [past_v])[0])
    together = Keys(k, v, ends, ends)
    longest = int(offsets.diff().max())
    # A view whose rows and heads are not side by side, as those of the encoder are
    wide_q = torch.cat([q, q.new_full((len(q), 1, q.shape[2]), float("nan"))], 1)[:, :-1]
    return {
        "whole": (attend_by_kernel(wide_q, ends, together, rule, None), expected),
        "new rows": (attend_by_kernel(q[new], offsets, together, rule, longest), expected[new]),
        "after a past": (attend_by_kernel(q[new], offsets, apart, rule, longest), expected[new]),
    }


def compare_the_kernel_on_the_host() -> None:
    """For a process of its own, with TRITON_INTERPRET=1."""
    # Not bfloat16: the interpreter takes its bits for whole numbers.
    halves = [replace(case, dtype=torch.float16) for case in CASES[:2]]
    for case in [*(replace(case, dtype=torch.float32) for case in CASES), *halves]:
        bound = 1e-6 if case.dtype == torch.float32 else 2e-3
        for form, (found, wanted) in by_kernel(case).items():
            error = (found.double() - wanted).abs().max() / wanted.abs().max()
            print(case, form, float(error))
            assert error <= bound
            assert found.dtype == case.dtype


def test_the_kernel_is_the_plain_form_where_triton_interprets_it():
    pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs alone")
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("triton's interpreter fails with numpy 2.4; install numpy<2.4 to run this")
    command = [sys.executable, __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


if __name__ == "__main__":
    compare_the_kernel_on_the_host()
