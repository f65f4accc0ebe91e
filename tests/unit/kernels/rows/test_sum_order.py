"""One order for all sums of rows: torch, native code and GPU kernels have the bits of a loop."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.embedding.optimizers import OPTIMIZERS, row_optimizer
from nestpipe.kernels.index.segments import (
    Pooling,
    TermGradients,
    plain_look_up,
    plain_segment_sums,
)
from nestpipe.kernels.rows.native import Gradients
from nestpipe.kernels.rows.segments import (
    PIECE,
    Segments,
    add_segments,
    add_segments_at,
    ends_of,
    plain_sums,
    pointers_into,
    segments_of_targets,
    sum_segments,
)
from support.emulated_kernels import rows_on_emulated_gpu
from support.examples import examples

F32, BF16 = torch.float32, torch.bfloat16
EDGES = (0, 1, 31, 32, 33, 1024, 1025)
LENGTHS = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 100)), min_size=1, max_size=6)
FORMS = ("torch", "native", "emulated GPU")


def loop(terms_TD: NDArray[np.float32]) -> NDArray[np.float32]:
    total_D = np.zeros(terms_TD.shape[1], np.float32)
    for term_D in terms_TD:
        total_D = total_D + term_D
    return total_D


def in_order(terms_TD: NDArray[np.float32]) -> NDArray[np.float32]:
    """The definition: sums of 32 terms, of 32 such sums, and of all that is left."""
    for _ in range(2):
        pieces = [loop(terms_TD[i : i + 32]) for i in range(0, len(terms_TD), 32)]
        terms_TD = np.stack(pieces) if pieces else terms_TD
    return loop(terms_TD)


def looped_sums(segments: Segments, rows_ND: Tensor) -> Tensor:
    assert segments.ends_S1 is not None
    terms_TD = rows_ND[segments.rows_T.long()].numpy()
    ends = segments.ends_S1.tolist()
    sums = [in_order(terms_TD[a:b]) for a, b in pairwise(ends)]
    return torch.from_numpy(np.stack(sums))


def draw_rows(count: int, dim: int, seed: int) -> Tensor:
    """Numbers of very different sizes, so that another order of sums shows; some are -0."""
    rng = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-4, 4, (count, dim), generator=rng)
    numbers = torch.randn(count, dim, generator=rng) * sizes
    return torch.where(torch.rand(count, dim, generator=rng) < 0.05, -0.0, numbers)


def draw_segments(lengths: list[int], rows: int, seed: int) -> Segments:
    rng = torch.Generator().manual_seed(seed)
    rows_T = torch.randint(0, rows, (sum(lengths),), generator=rng, dtype=torch.int32)
    return Segments(rows_T, ends_of(torch.tensor(lengths, dtype=torch.int32)))


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    number = torch.int32 if found.dtype == F32 else torch.int16
    assert torch.equal(found.contiguous().view(number), wanted.contiguous().view(number))


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Which code sums."""
    if request.param == "emulated GPU":
        with rows_on_emulated_gpu() as called:
            yield request.param
            assert set(called) <= {"nestpipe_segment_sum"}
            assert called
        return
    monkeypatch.setenv("NESTPIPE_NATIVE", str(int(request.param == "native")))
    yield request.param


def check_sums(lengths: list[int], dim: int, seed: int, comm_dtype: torch.dtype) -> None:
    """Sums of rows in two parts, written to two, with terms and sums rounded; and added ones."""
    rows_ND, segments = draw_rows(40, dim, seed), draw_segments(lengths, 40, seed)
    wanted_SD = looped_sums(segments, rows_ND.to(comm_dtype).float())
    first = len(lengths) // 2
    out = [torch.full((first, dim), 9.0), torch.full((len(lengths) - first, dim), 9.0)]
    parts = [rows_ND[:17], rows_ND[17:]]
    sum_segments(segments, parts, out, came=comm_dtype, leaving=comm_dtype)
    assert_same_bits(torch.cat(out), wanted_SD.to(comm_dtype).float())
    narrow = [torch.empty_like(part, dtype=comm_dtype) for part in out]
    sum_segments(segments, parts, narrow, came=comm_dtype, leaving=comm_dtype)
    assert_same_bits(torch.cat(narrow), wanted_SD.to(comm_dtype))
    before_SD = draw_rows(len(lengths), dim, seed + 1) + 0.0
    added_SD = before_SD.clone()
    add_segments(segments, parts, added_SD, came=comm_dtype)
    assert_same_bits(added_SD, before_SD + wanted_SD)


@pytest.mark.parametrize("comm_dtype", [F32, BF16])
@pytest.mark.parametrize("dim", [1, 4, 66, 128])
def test_sums_of_every_length_have_the_bits_of_the_loop(
    form: str, dim: int, comm_dtype: torch.dtype
):
    check_sums([*EDGES, 2, 0, 33], dim, dim, comm_dtype)


def test_a_segment_of_more_than_32_groups_has_the_bits_of_the_loop(form: str):
    check_sums([3, 33_000, 1], 2, 7, F32)


@pytest.mark.parametrize("native", [False, True])
@examples("some")
@given(LENGTHS, st.integers(1, 20), st.integers(0, 99), st.sampled_from([F32, BF16]))
def test_any_segments_have_the_bits_of_the_loop(native, lengths, dim, seed, comm_dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NESTPIPE_NATIVE", str(int(native)))
        check_sums(lengths, dim, seed, comm_dtype)


@examples("some")
@given(LENGTHS, st.integers(1, 20), st.integers(0, 99), st.sampled_from([F32, BF16]))
def test_any_segments_have_the_bits_of_the_loop_on_an_emulated_gpu(lengths, dim, seed, comm_dtype):
    with rows_on_emulated_gpu():
        check_sums(lengths, dim, seed, comm_dtype)


def test_sums_are_added_to_the_rows_at_their_positions(form: str):
    rows_ND, segments = draw_rows(40, 12, 0), draw_segments(list(EDGES), 40, 0)
    positions_S = torch.randperm(20, generator=torch.Generator().manual_seed(1))[: len(EDGES)].int()
    out_ND = draw_rows(20, 12, 2) + 0.0
    wanted_ND = out_ND.clone()
    wanted_ND[positions_S.long()] += looped_sums(segments, rows_ND)
    add_segments_at(segments, [rows_ND], out_ND, positions_S)
    assert_same_bits(out_ND, wanted_ND)


def test_one_row_each_is_copied_as_it_is(form: str):
    rows_ND = draw_rows(40, 6, 3)
    picked_S = torch.randint(0, 40, (25,), dtype=torch.int32)
    out_SD = torch.empty(25, 6)
    sum_segments(Segments(picked_S), [rows_ND], [out_SD])
    assert_same_bits(out_SD, rows_ND[picked_S.long()])


@pytest.mark.parametrize("dim", [5, 72])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_native_updates_sum_gradients_in_the_same_order(name: str, dim: int):
    optimizer = row_optimizer(name, lr=0.07, eps=1e-5, scale=4.0)
    rows_KW = draw_rows(len(EDGES), dim + optimizer.state_dim(dim), 4).abs()
    wanted_KW = rows_KW.clone()
    micros = [(draw_rows(30, dim, m), draw_segments(list(EDGES), 30, m)) for m in (5, 6)]
    first_KD, second_KD = (looped_sums(segments, rows) for rows, segments in micros)
    optimizer.update(wanted_KW, (first_KD + second_KD) * 0.25, 1)
    parts = [Gradients([rows], segments.rows_T, segments.ends_S1) for rows, segments in micros]
    optimizer.update_native(rows_KW, dim, parts, 0.25, 1)
    assert_same_bits(rows_KW, wanted_KW)


def test_the_twins_of_the_index_sum_in_the_same_order():
    targets_T = torch.tensor([2] * 40 + [0] * 1100 + [2] * 3 + [1])
    rows_OD = draw_rows(50, 3, 8)
    outputs_T = torch.randint(0, 50, (len(targets_T),), dtype=torch.int32)
    wanted_SD = looped_sums(segments_of_targets(targets_T, 3, outputs_T.long()), rows_OD)
    ids_S, sums_SD = plain_segment_sums(targets_T.int(), TermGradients(rows_OD, outputs_T))
    assert ids_S.tolist() == [0, 1, 2]
    assert_same_bits(sums_SD, wanted_SD)
    segments = draw_segments(list(EDGES), 50, 9)
    assert segments.ends_S1 is not None
    found_OD = plain_look_up(rows_OD, segments.rows_T, 3, Pooling(segments.ends_S1))
    assert_same_bits(found_OD, looped_sums(segments, rows_OD))


def test_another_length_of_pieces_shows():
    """The numbers are such that the order of sums is visible: else no test here could fail."""
    rows_ND, segments = draw_rows(40, 4, 0), draw_segments([64, 1025], 40, 0)
    assert PIECE == 32
    one_by_one = torch.stack(
        [
            torch.from_numpy(loop(rows_ND[part.long()].numpy()))
            for part in torch.split(segments.rows_T, [64, 1025])
        ]
    )
    differ_S = (plain_sums(segments, rows_ND) != one_by_one).any(1)
    assert differ_S.all()


DECAYING: Any = {"weight_decay": 0.7, "betas": (0.8, 0.99), "schedule": lambda step: 0.9**step}


@pytest.mark.parametrize("where", ["torch", "emulated GPU", "native"])
@pytest.mark.parametrize("dim", [1, 16, 33, 64, 100])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_of_a_pool_are_updated_by_slot(name: str, dim: int, where: str):
    optimizer = row_optimizer(name, lr=0.07, eps=1e-5, scale=4.0, **DECAYING)
    width = dim + optimizer.state_dim(dim)
    pool_NW = draw_rows(30, width + 3, 1).abs()[:, :width]
    wanted_NW, slots_K = pool_NW.clone(), torch.randperm(30)[:19].int()
    for step in (1, 2):
        gradients_KD, times = draw_rows(19, dim, step), torch.tensor(0.3)
        rows_KW = wanted_NW[slots_K.long()]
        optimizer.update(rows_KW, gradients_KD * times, step)
        wanted_NW[slots_K.long()] = rows_KW
        if where == "torch":
            optimizer.update_times(pool_NW, gradients_KD, times, step, slots_K)
        elif where == "native":
            pointers = pointers_into(pool_NW, slots_K)
            parts = [Gradients([gradients_KD], None, None)]
            optimizer.update_native(pointers, dim, parts, float(times), step)
        else:
            with rows_on_emulated_gpu() as called:
                optimizer.update_times(pool_NW, gradients_KD, times, step, slots_K)
            assert called == ["nestpipe_update_rows"]
        assert_same_bits(pool_NW, wanted_NW)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_without_slots_are_updated_in_order(name: str):
    optimizer = row_optimizer(name, lr=0.07, eps=1e-5, scale=4.0, **DECAYING)
    rows_KW = draw_rows(19, 20 + optimizer.state_dim(20), 1).abs()
    wanted_KW, gradients_KD = rows_KW.clone(), draw_rows(19, 20, 2)
    optimizer.update(wanted_KW, gradients_KD * 0.5, 1)
    with rows_on_emulated_gpu() as called:
        optimizer.update_times(rows_KW, gradients_KD, torch.tensor(0.5), 1)
    assert called == ["nestpipe_update_rows"]
    assert_same_bits(rows_KW, wanted_KW)
