"""Sums and updates of rows: native code and its plain twin give the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.embedding.optimizers import OPTIMIZERS, row_optimizer
from nestpipe.errors import ConfigError
from nestpipe.kernels.rows import native as native_rows
from nestpipe.kernels.rows.native import Gradients, RowPointers, copy_rows
from nestpipe.kernels.rows.segments import (
    Segments,
    add_segments,
    ends_of,
    plain_sums,
    segments_of_targets,
    sum_segments,
)
from support.examples import examples

DIMS = st.one_of(st.integers(1, 130), st.sampled_from([8, 16, 32, 64, 65, 72, 120, 128]))
SCALED = [name for name in OPTIMIZERS if name.endswith("scaled_rowwise_adagrad")]
MANY_DIMS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 48, 63, 64, 65, 72, 96, 100, 127, 128, 129)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_same_bits(first: Tensor, second: Tensor) -> None:
    """As numbers and in the signs of zeros."""
    assert first.shape == second.shape
    differ = first.contiguous().view(torch.int32) != second.contiguous().view(torch.int32)
    assert not differ.any(), f"{int(differ.sum())} of {differ.numel()} numbers differ"


def draw_rows(rng: torch.Generator, rows: int, dim: int) -> Tensor:
    """Numbers of very different sizes, so that another order of sums shows; some are -0."""
    numbers = torch.randn(rows, dim, generator=rng) * 10.0 ** torch.randint(
        -4, 4, (rows, dim), generator=rng
    )
    return torch.where(torch.rand(rows, dim, generator=rng) < 0.05, -0.0, numbers)


def draw_segments(rng: torch.Generator, sums: int, rows: int) -> Segments:
    """Sums of none to six rows each."""
    lengths = torch.randint(0, 7, (sums,), generator=rng) if rows else torch.zeros(sums).long()
    terms = torch.randint(0, max(rows, 1), (int(lengths.sum()),), generator=rng)
    return Segments(terms, ends_of(lengths))


def in_parts(rows_ND: Tensor, sizes: list[int], strided: bool) -> list[Tensor]:
    """The same rows in several tensors, each in the middle of a wider one where asked for."""

    def one(part: Tensor) -> Tensor:
        if not strided:
            return part.clone()
        wide = torch.full((len(part), part.shape[1] + 3), torch.nan)
        wide[:, 1:-2] = part
        return wide[:, 1:-2]

    return [one(part) for part in torch.split(rows_ND, sizes)]


def places_of(rows_ND: Tensor) -> RowPointers:
    steps = torch.arange(len(rows_ND)) * rows_ND.stride(0) * 4
    return RowPointers(steps + rows_ND.data_ptr(), rows_ND.stride(0))


@given(DIMS, st.lists(st.integers(0, 9), min_size=1, max_size=4), st.booleans(), st.integers(0, 99))
def test_native_sums_are_those_of_torch(dim, sizes, strided, seed):
    rng = torch.Generator().manual_seed(seed)
    rows_ND = draw_rows(rng, sum(sizes), dim)
    parts = in_parts(rows_ND, sizes, strided)
    each = torch.randint(0, max(len(rows_ND), 1), (11 if len(rows_ND) else 0,), generator=rng)
    for segments in (draw_segments(rng, 11, len(rows_ND)), Segments(each)):
        expected = plain_sums(segments, rows_ND)
        out = (
            [torch.full((n, dim), torch.nan) for n in (4, len(segments) - 4)]
            if len(segments)
            else []
        )
        for source in [parts, places_of(rows_ND)] if out else []:
            sum_segments(segments, source, out)
            assert_same_bits(torch.cat(out), expected)


@given(DIMS, st.integers(0, 12), st.booleans(), st.integers(0, 99))
def test_native_sums_are_added_to_what_is_there(dim, rows, strided, seed):
    rng = torch.Generator().manual_seed(seed)
    rows_ND = draw_rows(rng, rows, dim)
    segments = draw_segments(rng, 9, rows)
    there = draw_rows(rng, 9, dim) + 0.0
    expected = there + plain_sums(segments, rows_ND)
    (total,) = in_parts(there, [9], strided)
    add_segments(segments, in_parts(rows_ND, [rows], strided), total)
    assert_same_bits(total, expected)


def test_the_plain_form_sums_in_the_same_order(monkeypatch):
    """The slow twin must itself be a loop from the first term to the last."""
    rng = torch.Generator().manual_seed(0)
    for dim in MANY_DIMS:
        rows_ND = draw_rows(rng, 20, dim)
        segments = draw_segments(rng, 30, 20)
        assert segments.ends_S1 is not None
        expected = torch.zeros(30, dim)
        for number, out in enumerate(expected):
            for term in segments.rows_T[segments.ends_S1[number] : segments.ends_S1[number + 1]]:
                out += rows_ND[term]
        monkeypatch.setenv("NESTPIPE_NATIVE", "0")
        out = torch.empty(30, dim)
        sum_segments(segments, [rows_ND[:8], rows_ND[8:]], [out[:12], out[12:]])
        assert_same_bits(out, expected)
        add_segments(segments, [rows_ND], out)
        assert_same_bits(out, expected + expected)


def test_terms_find_their_sums_in_order():
    segments = segments_of_targets(torch.tensor([2, 0, 2, 0]), 4, torch.tensor([9, 8, 7, 6]))
    assert segments.rows_T.tolist() == [8, 6, 9, 7]
    assert segments.ends_S1 is not None
    assert segments.ends_S1.tolist() == [0, 2, 2, 4, 4]
    assert segments_of_targets(torch.tensor([1, 0, 1]), 2).rows_T.tolist() == [1, 0, 2]


def test_rows_that_do_not_lie_in_one_piece_are_refused():
    with pytest.raises(AssertionError, match="lie 3 apart"):
        sum_segments(Segments(torch.zeros(1).long()), [torch.zeros(2, 3).T], [torch.zeros(1, 2)])


def update_plainly(optimizer, rows_KW: Tensor, gradients_KD: Tensor, times: float, step: int):
    optimizer.update(rows_KW, gradients_KD * times, step)


@pytest.mark.parametrize("name", OPTIMIZERS)
@examples("some")
@given(
    dim=DIMS,
    rows=st.integers(1, 40),  # native code takes 16 at a time
    scale=st.one_of(st.sampled_from([1, 2, 4, 8]), st.floats(1, 100)),
    seed=st.integers(0, 99),
)
def test_native_updates_are_those_of_torch(name, dim, rows, scale, seed):
    rng = torch.Generator().manual_seed(seed)
    optimizer = row_optimizer(
        name, lr=0.07, eps=1e-5, scale=scale, weight_decay=seed % 3 / 3, schedule=lambda n: 1 / n
    )
    width = dim + optimizer.state_dim(dim)
    plain_KW = torch.cat([draw_rows(rng, rows, dim), torch.zeros(rows, width - dim)], 1)
    copied_KW, in_place_KW = plain_KW.clone(), plain_KW.clone()
    for step in (1, 2, 5):
        gradients_ND = draw_rows(rng, 10, dim)
        segments = draw_segments(rng, rows, 10)
        summed_KD = plain_sums(segments, gradients_ND)
        update_plainly(optimizer, plain_KW, summed_KD, 1 / 3, step)
        given_rows = in_parts(gradients_ND, [4, 6], strided=bool(seed % 2))
        whole = [Gradients(given_rows, segments.rows_T, segments.ends_S1)]
        optimizer.update_native(copied_KW, dim, whole, 1 / 3, step)
        summed = [Gradients([summed_KD], None, None)]
        optimizer.update_native(places_of(in_place_KW), dim, summed, 1 / 3, step)
        groups = torch.randint(1, 10, (rows,), generator=rng)
        for rows_KW in (plain_KW, copied_KW, in_place_KW):
            optimizer.count_groups(rows_KW, dim, groups)
        assert_same_bits(copied_KW, plain_KW)
        assert_same_bits(in_place_KW, plain_KW)


BOUND = 1e18
BEYOND = torch.tensor(BOUND).nextafter(torch.tensor(torch.inf)).item()
SOME_NUMBERS = (0.0, -0.0, 1e-45, BOUND, -BOUND, 3.4e38, -3.4e38, BEYOND, -BEYOND)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("number", [*SOME_NUMBERS, torch.inf, -torch.inf, torch.nan, -torch.nan])
@given(dim=DIMS, rows=st.integers(1, 20), place=st.integers(0, 10**6))
def test_numbers_are_within_a_bound_where_torch_says_so(number, strided, dim, rows, place):
    """One number decides, wherever it stands; what lies beside the rows, NaN here, does not."""
    rows_ND = torch.full((rows, dim), 0.5)
    rows_ND.view(-1)[place % rows_ND.numel()] = number
    (given_ND,) = in_parts(rows_ND, [rows], strided)
    expected = bool(torch.linalg.vector_norm(rows_ND, torch.inf) <= BOUND)
    assert expected == (abs(number) <= BOUND)
    assert native_rows.all_within(given_ND, BOUND) is expected


def test_every_thread_looks_for_numbers_beyond_a_bound():
    rows_ND = torch.zeros(7000, 3)  # several tasks for a thread
    for row in (0, 2047, 2048, 5000, 6999):
        with threads(3):
            assert native_rows.all_within(rows_ND, 1.0)
            rows_ND[row, 2] = 2.0
            assert not native_rows.all_within(rows_ND, 1.0)
            rows_ND[row, 2] = 0.0


@pytest.mark.parametrize("kind", [-1, len(native_rows.KINDS), 99])
def test_an_optimizer_that_native_code_does_not_have_changes_no_row(kind):
    rows_KW, gradients_KD = torch.ones(3, 3), torch.ones(3, 2)
    unknown = native_rows.OptimizerStruct(kind, 0.1)
    with pytest.raises(ConfigError, match=f"no row optimizer of kind {kind}; use one of sgd, "):
        native_rows.update(unknown, rows_KW, 2, [Gradients([gradients_KD], None, None)], 1.0)
    assert torch.equal(rows_KW, torch.ones(3, 3))


def test_every_optimizer_has_a_kind_of_its_own_in_native_code():
    assert set(native_rows.KINDS) == set(OPTIMIZERS)
    with pytest.raises(ConfigError, match="unknown row optimizer 'lion'; use one of sgd, "):
        native_rows.optimizer_struct(
            "lion", lr=0.1, eps=0.0, betas=(0.9, 0.999), adam_scale=0.1, scale=1.0
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dim", [1, 5, 16, 64, 100])
def test_gradients_in_parts_are_summed_part_by_part(name, dim):
    rng = torch.Generator().manual_seed(dim)
    optimizer = row_optimizer(name, scale=5.3)
    rows_KW = draw_rows(rng, 6, dim + optimizer.state_dim(dim)).abs()
    expected_KW = rows_KW.clone()
    micros = [(draw_rows(rng, 8, dim), draw_segments(rng, 6, 8)) for _ in range(3)]
    total_KD = torch.zeros(6, dim)
    for gradients_ND, segments in micros:
        total_KD += plain_sums(segments, gradients_ND)
    update_plainly(optimizer, expected_KW, total_KD, 0.25, 1)
    parts = [Gradients([g], segments.rows_T, segments.ends_S1) for g, segments in micros]
    optimizer.update_native(rows_KW, dim, parts, 0.25, 1)
    assert_same_bits(rows_KW, expected_KW)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_number_of_threads_gives_the_same_bits(name):
    rows, dim = 7000, 20  # several tasks for a thread
    rng = torch.Generator().manual_seed(4)
    optimizer = row_optimizer(name, scale=5.3)
    start_KW = draw_rows(rng, rows, dim + optimizer.state_dim(dim)).abs()
    gradients_ND, segments = draw_rows(rng, 3000, dim), draw_segments(rng, rows, 3000)

    def result(count: int) -> tuple[Tensor, Tensor, Tensor]:
        with threads(count):
            rows_KW, sums_KD = start_KW.clone(), torch.empty(rows, dim)
            sum_segments(segments, [gradients_ND], [sums_KD])
            added_KD = sums_KD.clone()
            add_segments(segments, [gradients_ND], added_KD)
            parts = [Gradients([gradients_ND], segments.rows_T, segments.ends_S1)]
            optimizer.update_native(rows_KW, dim, parts, 0.5, 3)
        return rows_KW, sums_KD, added_KD

    alone, together = result(1), result(3)
    for one, other in zip(alone, together, strict=True):
        assert_same_bits(one, other)
    update_plainly(optimizer, start_KW, alone[1], 0.5, 3)
    assert_same_bits(alone[0], start_KW)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("native", [False, True])
def test_a_scale_of_one_gives_the_bits_of_rowwise_adagrad(name, native):
    rng = torch.Generator().manual_seed(7)
    for dim in MANY_DIMS:
        optimizers = [row_optimizer(one, scale=1.0) for one in ("rowwise_adagrad", name)]
        weights_KD = draw_rows(rng, 50, dim)
        unscaled_KW, scaled_KW = (
            torch.cat([weights_KD, torch.zeros(50, one.state_dim(dim))], 1) for one in optimizers
        )
        for step in range(1, 6):
            gradients_KD = draw_rows(rng, 50, dim)
            for optimizer, rows_KW in zip(optimizers, (unscaled_KW, scaled_KW), strict=True):
                if native:
                    parts = [Gradients([gradients_KD], None, None)]
                    optimizer.update_native(rows_KW, dim, parts, 1.0, step)
                else:
                    optimizer.update(rows_KW, gradients_KD, step)
            assert_same_bits(scaled_KW[:, : dim + 1], unscaled_KW)


def test_an_update_of_no_rows_or_without_gradients():
    optimizer = row_optimizer("sgd")
    optimizer.update_native(torch.empty(0, 4), 4, [], 1.0, 1)
    with pytest.raises(AssertionError, match="no gradients"):
        optimizer.update_native(torch.zeros(1, 4), 4, [], 1.0, 1)


def test_every_optimizer_has_its_number_in_native_code():
    assert native_rows.KINDS == OPTIMIZERS


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_copied_to_and_from_where_they_live(threads):
    generator = torch.Generator().manual_seed(4)
    width, stored = 5, 6000
    table_owner = torch.randn(stored, width, generator=generator)
    chosen = torch.randperm(stored, generator=generator)[:5000]
    places = RowPointers(table_owner.data_ptr() + chosen * width * 4, width)
    buffer = torch.full((5000, width), float("nan"))
    copy_rows(places, buffer, to_store=False, threads=threads)
    assert torch.equal(buffer, table_owner[chosen])

    # Some rows only, by their positions in a wider buffer; all others stay as they are.
    some = torch.arange(0, 5000, 3)
    wide = torch.full((5000, width + 2), -1.0)
    copy_rows(places.at(some), wide[:, :width], positions_n=some, to_store=False, threads=threads)
    assert torch.equal(wide[some, :width], table_owner[chosen[some]])
    assert (wide[:, width:] == -1).all()
    untouched = torch.ones(5000, dtype=torch.bool)
    untouched[some] = False
    assert (wide[untouched] == -1).all()

    before = table_owner.clone()
    wide[some, :width] += 1
    copy_rows(places.at(some), wide[:, :width], positions_n=some, to_store=True, threads=threads)
    before[chosen[some]] += 1
    assert torch.equal(table_owner, before)
