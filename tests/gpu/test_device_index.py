"""Keys and rows in device memory, on a real GPU: the bits of the plain twins, whoever is first.

`tests/unit/kernels/test_device_index.py` has the small cases, on any machine.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from nestpipe.embedding.optimizers import OPTIMIZERS, RowOptimizer, row_optimizer
from nestpipe.embedding.routing.lists import WantedKeys
from nestpipe.embedding.routing.native import request as native_request
from nestpipe.embedding.store.protocol import first_weights
from nestpipe.errors import ConfigError
from nestpipe.kernels.index import library
from nestpipe.kernels.index.dedup import Owners, dedup, plain_dedup
from nestpipe.kernels.index.device_index import COUNTERS, DeviceIndex, FirstValues, KeyCells
from nestpipe.kernels.index.segments import (
    Pooling,
    TermGradients,
    look_up,
    plain_look_up,
    plain_segment_sums,
    sort_segments,
    update_segments,
)
from nestpipe.kernels.index.steady import (
    StepNews,
    TermBuffers,
    plain_pool_outputs,
    pool_outputs,
)
from nestpipe.kernels.rows.cuda import aligned_rows
from nestpipe.kernels.rows.native import OptimizerStruct

CUDA = torch.device("cuda")
BIG = 2**63 - 1


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    try:
        library.loaded(CUDA)
    except ConfigError as error:
        pytest.skip(str(error))


def powers(count: int, rows: int, seed: int) -> Tensor:
    """Keys by a power law: some come thousands of times, many once."""
    draw = torch.Generator(CUDA).manual_seed(seed)
    share = torch.rand(count, device=CUDA, generator=draw, dtype=torch.float64)
    return (((rows**-0.05 - 1) * share + 1) ** -20).long().clamp_(1, rows) - 1


def drawn_rows(count: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(count, dim, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed))


def one_cell(keys_N: Tensor) -> KeyCells:
    return KeyCells(torch.tensor([len(keys_N)], device=CUDA))


def counters(index: DeviceIndex) -> dict[str, int]:
    return dict(zip(COUNTERS, index.counters.tolist(), strict=False))


def check_slots(index: DeviceIndex, keys_N: Tensor, slots_N: Tensor) -> int:
    """Every key has a slot of its own, which knows its key; returns how many keys there are."""
    unique_U, inverse_N = torch.unique(keys_N, return_inverse=True)
    slot_U = torch.full_like(unique_U, -1).index_copy_(0, inverse_N, slots_N.long())
    assert (slot_U >= 0).all()
    assert torch.equal(slot_U[inverse_N], slots_N.long())
    assert len(torch.unique(slot_U)) == len(unique_U)
    assert torch.equal(index.slot_keys_S[slot_U], unique_U)
    return len(unique_U)


@pytest.mark.parametrize("round_", range(3))
@pytest.mark.parametrize("kind", ["power", "equal", "distinct", "odd"])
def test_threads_that_meet_agree_on_one_slot(kind: str, round_: int):
    count = 1_000_000
    keys_N = {
        "power": powers(count, 500_000, round_),
        "equal": torch.full((count,), -1, device=CUDA),
        "distinct": torch.randperm(count, device=CUDA) - count // 2,
        "odd": torch.tensor([0, -1, BIG, -BIG - 1, 1 << 32], device=CUDA).repeat(count // 5),
    }[kind]
    index = DeviceIndex(count, CUDA)
    found = index.find_or_insert(keys_N, one_cell(keys_N), round_)
    unique = check_slots(index, keys_N, found.slots_N)
    assert counters(index)["num_new"] == counters(index)["used"] == unique
    assert counters(index)["free"] == count - unique
    assert torch.equal(found.new_slots_N[:unique].sort().values, found.slots_N.unique())
    again = index.find_or_insert(keys_N, one_cell(keys_N), round_ + 1)
    assert counters(index)["num_new"] == 0
    assert torch.equal(again.slots_N, found.slots_N)
    assert torch.equal(index.find(keys_N, one_cell(keys_N)), found.slots_N)
    assert torch.equal(index.find(keys_N ^ (1 << 40), one_cell(keys_N)) < 0, keys_N == keys_N)


def test_tables_keep_their_keys_apart():
    tables, each = 1000, 500
    keys_N = torch.arange(each, device=CUDA).repeat(tables)
    cells = KeyCells(torch.arange(1, tables + 1, device=CUDA) * each)
    index = DeviceIndex(tables * each, CUDA)
    slots_N = index.find_or_insert(keys_N, cells, 0).slots_N
    assert len(slots_N.unique()) == tables * each
    assert torch.equal(
        index.slot_tables_S[slots_N.long()].long(),
        torch.arange(tables, device=CUDA).repeat_interleave(each),
    )


def test_a_full_index_counts_what_is_missing():
    index = DeviceIndex(10_000, CUDA)
    keys_N = torch.arange(1_000_000, device=CUDA)
    slots_N = index.find_or_insert(keys_N, one_cell(keys_N), 0).slots_N
    assert counters(index)["num_missing"] == 990_000 == int((slots_N < 0).sum())
    assert counters(index)["free"] == 0
    assert len(slots_N.unique()) == 10_001


def test_rows_leave_and_come_back_for_many_batches():
    index = DeviceIndex(200_000, CUDA)
    stamps: dict[int, Tensor] = {}
    for batch in range(40):
        keys_N = torch.cat([powers(60_000, 3_000_000, batch), powers(20_000, 10**12, -batch)])
        victims_V = index.choose_victims(batch - 1, 80_000)
        gone_V = victims_V[: int(index.num_victims)].long()
        assert (index.stamps_S[gone_V] < batch - 1).all()
        gone_keys = index.slot_keys_S[gone_V]
        index.erase(victims_V, index.num_victims)
        index.rebuild()
        assert (index.find(gone_keys, one_cell(gone_keys)) < 0).all()
        assert counters(index)["free"] >= 80_000
        found = index.find_or_insert(keys_N, one_cell(keys_N), batch)
        assert counters(index)["num_missing"] == 0
        check_slots(index, keys_N, found.slots_N)
        stamps[batch] = keys_N
        if batch:  # the batch before is still in flight
            before = stamps.pop(batch - 1)
            assert (index.find(before, one_cell(before)) >= 0).all()


def test_first_values_have_the_bits_of_the_host():
    dim, tables, each = 128, 3, 5000
    keys_N = torch.randint(-BIG, BIG, (tables * each,), device=CUDA)
    index = DeviceIndex(tables * each, CUDA)
    cells = KeyCells(torch.arange(1, tables + 1, device=CUDA) * each)
    found = index.find_or_insert(keys_N, cells, 0)
    seeds, stds = np.array([1, 2**63 + 9, 77], np.uint64), [0.01, 0.3, 7.0]
    first = FirstValues(
        torch.from_numpy(seeds.view(np.int64)).to(CUDA),
        torch.tensor(stds, dtype=torch.float64, device=CUDA),
        dim,
        state_dim=1,
    )
    rows_SW = torch.full((tables * each, dim + 4), 9.0, device=CUDA)
    index.write_first_rows(first, rows_SW, found.new_slots_N, index.num_new)
    rows_NW = rows_SW[found.slots_N.long()].cpu()
    for table in range(tables):
        part = slice(table * each, (table + 1) * each)
        keys = keys_N[part].cpu().numpy()
        wanted = first_weights(int(seeds[table]), keys, dim, stds[table])
        assert np.array_equal(rows_NW[part, :dim].numpy(), wanted)
    assert (rows_NW[:, dim] == 0).all()
    assert (rows_NW[:, dim + 1 :] == 9).all()


@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
@pytest.mark.parametrize("kind", ["power", "equal", "distinct", "many tables"])
def test_dedup_gives_the_lists_of_its_twin(kind: str, ranks: int):
    count, tables = 300_000, 700 if kind == "many tables" else 10
    keys_T = {
        "equal": torch.full((count,), BIG, device=CUDA),
        "distinct": torch.randperm(count, device=CUDA) - 1,
    }.get(kind, powers(count, 100_000, ranks))
    cuts = torch.randint(0, count + 1, (tables - 1,), device=CUDA).sort().values
    ends_C = torch.cat([cuts, cuts.new_tensor([count])])
    table_owners_C = torch.full((tables,), -1, dtype=torch.int32, device=CUDA)
    table_owners_C[1] = ranks - 1
    for rank in {0, ranks - 1}:
        owners = Owners(ranks, rank, table_owners_C)
        found, wanted = dedup(keys_T, ends_C, owners), plain_dedup(keys_T, ends_C, owners)
        unique = int(wanted.num_unique)
        assert torch.equal(found.counts.cpu(), wanted.counts)
        assert torch.equal(found.keys_T[:unique].cpu(), wanted.keys_T[:unique])
        assert torch.equal(found.inverse_T.cpu(), wanted.inverse_T)


def test_dedup_gives_the_lists_of_native_routing():
    keys = [powers(size, 50_000, size).cpu() for size in (90_000, 0, 1, 40_000)]
    for rank in range(3):
        routed = native_request(
            WantedKeys(
                keys=keys,
                lengths=[torch.ones_like(table) for table in keys],
                pooled=[False] * len(keys),
                table_owners=(-1,) * len(keys),
                row_bytes=512,
                rank=rank,
                ranks=3,
            )
        )
        ends_C = torch.tensor([len(table) for table in keys]).cumsum(0).to(CUDA)
        found = dedup(torch.cat(keys).to(CUDA), ends_C, Owners(3, rank))
        assert torch.equal(found.key_counts.cpu().long(), routed.key_counts_RC)
        assert torch.equal(found.keys_T[: int(found.num_unique)].cpu(), routed.keys_A)
        assert torch.equal(found.inverse_T.cpu(), routed.seen.rows_T)


def struct_of(optimizer: RowOptimizer, step: int) -> OptimizerStruct:
    return optimizer.struct(step)


def drawn_ids(count: int, ids: int, seed: int) -> Tensor:
    """Ids with segments of one term, of some pieces and of thousands, and some that are none."""
    ids_T = powers(count, ids - 2, seed).int()
    ids_T[:: max(1, count // 50)] = -1
    ids_T[count // 3 : count // 3 + count // 5] = ids - 1
    return ids_T


@pytest.mark.parametrize("count", [1, 31, 33, 1025, 40_000])
@pytest.mark.parametrize("dim", [1, 4, 8, 30, 32, 64, 100, 128, 200, 256, 384, 512])
def test_segment_sums_have_the_bits_of_the_twin(dim: int, count: int):
    ids_T = drawn_ids(count, 20_000, dim)
    gradients = TermGradients(drawn_rows(count, dim, seed=count))
    rows_ND = torch.full((20_000, dim), 7.0, device=CUDA)
    wanted_ND = rows_ND.clone()
    ids_S, sums_SD = plain_segment_sums(ids_T, gradients)
    wanted_ND[ids_S.long()] = sums_SD
    segments = sort_segments(ids_T, 20_000)
    update_segments(segments, gradients, rows_ND, None)
    assert torch.equal(rows_ND, wanted_ND)
    wanted_ND[ids_S.long()] += sums_SD
    update_segments(segments, gradients, rows_ND, None, add=True)
    assert torch.equal(rows_ND, wanted_ND)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dim", [3, 16, 32, 64, 96, 128, 256, 300, 512])
def test_a_fused_update_has_the_bits_of_sums_and_a_plain_update(name: str, dim: int):
    optimizer = row_optimizer(
        name, lr=0.07, eps=1e-6, scale=4.0, weight_decay=0.7, schedule=lambda step: 0.9**step
    )
    rows_NW = aligned_rows(5_000, dim + optimizer.state_dim(dim), CUDA)
    rows_NW.copy_(drawn_rows(*rows_NW.shape))
    rows_NW[:, dim:].abs_()
    twin_NW = rows_NW.clone()
    times = torch.full((1,), 0.3, device=CUDA)
    for step in range(1, 4):
        ids_T = drawn_ids(20_000, 5_000, step)
        gradients = TermGradients(drawn_rows(len(ids_T), dim, seed=step))
        ids_S, sums_SD = plain_segment_sums(ids_T, gradients)
        updated_SW = twin_NW[ids_S.long()]
        optimizer.update(updated_SW, sums_SD * times, step)
        twin_NW[ids_S.long()] = updated_SW
        given = struct_of(optimizer, step)
        update_segments(sort_segments(ids_T, 5_000), gradients, rows_NW, given, times)
        assert torch.equal(rows_NW, twin_NW), f"step {step}"


def drawn_pooling(outputs: int, seed: int) -> tuple[Tensor, Pooling]:
    """Lengths, and means for every second output."""
    lengths_O = powers(outputs, 200, seed) % 90
    lengths_O[1] = 2_500  # more than 32 pieces
    divisors_O = torch.where(lengths_O % 2 == 0, lengths_O.clamp(min=1), 1).float()
    ends_O1 = torch.cat([lengths_O.new_zeros(1), lengths_O.cumsum(0)]).int()
    weights_T = drawn_rows(int(ends_O1[-1]), 1, seed).squeeze(1)
    return lengths_O, Pooling(ends_O1, divisors_O, weights_T)


def test_gradients_of_pooled_outputs_are_divided_and_weighted():
    lengths_O, pooling = drawn_pooling(5_000, 3)
    outputs_T = torch.repeat_interleave(lengths_O).int()
    ids_T = drawn_ids(len(outputs_T), 900, 4)
    gradients = TermGradients(
        drawn_rows(5_000, 64), outputs_T, pooling.divisors_O, pooling.weights_T
    )
    rows_ND = torch.zeros(900, 64, device=CUDA)
    update_segments(sort_segments(ids_T, 900), gradients, rows_ND, None)
    ids_S, sums_SD = plain_segment_sums(ids_T, gradients)
    assert torch.equal(rows_ND[ids_S.long()], sums_SD)


@pytest.mark.parametrize("dim", [1, 4, 12, 16, 32, 64, 100, 128, 192, 256, 512])
@pytest.mark.parametrize("form", ["rows", "sums", "means", "weighted"])
def test_lookups_have_the_bits_of_the_twin(form: str, dim: int):
    rows_NW = aligned_rows(10_000, dim + 3, CUDA)
    rows_NW.copy_(drawn_rows(*rows_NW.shape))
    rows_NW[7] = -0.0
    _, all_of_it = drawn_pooling(3_000, dim)
    pooling = {
        "rows": None,
        "sums": Pooling(all_of_it.ends_O1),
        "means": Pooling(all_of_it.ends_O1, all_of_it.divisors_O),
        "weighted": all_of_it,
    }[form]
    terms = 3_000 if pooling is None else int(all_of_it.ends_O1[-1])
    slots_T = powers(terms, 10_000, dim).int()
    slots_T[::17] = -1
    out_OD = torch.full((3_000, dim), 9.0, device=CUDA)
    look_up(rows_NW, slots_T, out_OD, pooling)
    wanted_OD = plain_look_up(rows_NW, slots_T, dim, pooling).contiguous()
    assert torch.equal(out_OD.view(torch.int32), wanted_OD.view(torch.int32))


def trained(slots: int, first_keys_N: Tensor) -> tuple[DeviceIndex, Tensor]:
    """A pool after some steps; which slot a key has depends on the keys that came before."""
    optimizer = row_optimizer("adam", lr=0.1)
    index, rows_SW = DeviceIndex(slots, CUDA), aligned_rows(slots, 3 * 64, CUDA)
    one = torch.ones(1, device=CUDA)
    first = FirstValues(one.long() * 5, one.double() * 0.1, 64, 128)
    made = index.find_or_insert(first_keys_N, one_cell(first_keys_N), 0)
    index.write_first_rows(first, rows_SW, made.new_slots_N, index.num_new)
    out_OD = torch.empty(50_000, 64, device=CUDA)
    for step in range(1, 5):
        keys_N = powers(50_000, 100_000, step)
        found = index.find_or_insert(keys_N, one_cell(keys_N), step)
        index.write_first_rows(first, rows_SW, found.new_slots_N, index.num_new)
        look_up(rows_SW, found.slots_N, out_OD)
        segments = sort_segments(found.slots_N, slots)
        gradients = TermGradients(out_OD * 0.5 + drawn_rows(50_000, 64, step))
        update_segments(segments, gradients, rows_SW, struct_of(optimizer, step))
    return index, rows_SW


def test_slots_change_no_bit_of_a_row():
    some_N = torch.randperm(30_000, device=CUDA)
    index, rows_SW = trained(120_000, some_N)
    other, other_rows_SW = trained(300_000, some_N.flip(0)[:20_000].contiguous())
    keys_N = torch.cat([powers(50_000, 100_000, step) for step in range(1, 5)]).unique()
    here, there = (i.find(keys_N, one_cell(keys_N)).long() for i in (index, other))
    assert not torch.equal(here, there)
    assert torch.equal(rows_SW[here], other_rows_SW[there])


def test_a_step_never_waits_for_the_device():
    keys_N = powers(10_000, 5_000, 0)
    cells, ends_C = one_cell(keys_N), torch.tensor([len(keys_N)], device=CUDA)
    index, rows_SW = DeviceIndex(5_000, CUDA), drawn_rows(5_000, 64)
    out_OD = torch.empty(10_000, 64, device=CUDA)
    struct = struct_of(row_optimizer("sgd"), 1)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    with warnings.catch_warnings():  # torch says that it does not see every kind of wait
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        dedup(keys_N, ends_C, Owners(4, 1))
        index.erase(index.choose_victims(0, 10), index.num_victims)
        index.rebuild()
        slots_N = index.find_or_insert(keys_N, cells, 0).slots_N
        look_up(rows_SW, slots_N, out_OD)
        update_segments(sort_segments(slots_N, 5_000), TermGradients(out_OD), rows_SW, struct)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    torch.cuda.synchronize()
    assert counters(index)["num_missing"] == 0


def test_outputs_of_many_terms_are_those_of_the_twin():
    draw = torch.Generator(CUDA).manual_seed(3)
    for most in (2, 12, 900):
        lengths_O = torch.randint(0, most, (300_001,), device=CUDA, generator=draw)
        lengths_O[lengths_O % 5 == 0] = 0
        terms = int(lengths_O.sum())
        pooling, outputs_T = pool_outputs(lengths_O, terms)
        wanted, wanted_T = plain_pool_outputs(lengths_O, terms)
        assert torch.equal(pooling.ends_O1, wanted.ends_O1)
        assert torch.equal(outputs_T, wanted_T)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adam", "rowwise_adagrad"])
def test_one_call_for_all_terms_has_the_bits_of_many(name: str, pooled: bool):
    """Batches of several sizes in the same buffers; slots may differ, what rows hold may not."""
    slots, dim, optimizer = 120_000, 128, row_optimizer(name, lr=0.07)
    width = dim + optimizer.state_dim(dim)
    stds_C = torch.tensor([0.1, 0.2], dtype=torch.float64, device=CUDA)
    first = FirstValues(torch.tensor([3, -4], device=CUDA), stds_C, dim, width - dim)
    index, twin = DeviceIndex(slots, CUDA), DeviceIndex(slots, CUDA)
    rows_SW, twin_SW = aligned_rows(slots, width, CUDA), aligned_rows(slots, width, CUDA)
    buffers = TermBuffers(60_000, index, rows_SW, first)
    faults = torch.full((1,), 9, dtype=torch.int32, device=CUDA)
    for stamp, terms in enumerate((60_000, 1_000, 60_000, 33)):
        keys_T = powers(terms, 50_000, stamp)
        cells = KeyCells(torch.tensor([terms // 3, terms], device=CUDA))
        lengths_O = torch.full((-(-terms // 4),), 4, device=CUDA)
        lengths_O[-1] -= 4 * len(lengths_O) - terms
        pooling, outputs_T = pool_outputs(lengths_O, terms) if pooled else (None, None)
        gradients_OD = drawn_rows(len(lengths_O) if pooled else terms, dim, seed=stamp)
        buffers.admit(keys_T, cells, stamp, outputs_T)
        found = twin.find_or_insert(keys_T, cells, stamp)
        twin.write_first_rows(first, twin_SW, found.new_slots_N, twin.num_new)
        out_OD, wanted_OD = torch.empty(2, *gradients_OD.shape, device=CUDA)
        buffers.look_up(out_OD, pooling)
        look_up(twin_SW, found.slots_N, wanted_OD, pooling)
        assert torch.equal(out_OD, wanted_OD), f"batch {stamp}"
        struct = struct_of(optimizer, stamp + 1)
        buffers.update(struct, gradients_OD, 0.25, faults.data_ptr(), clip=False)
        segments = sort_segments(found.slots_N, slots, outputs_T)
        times = torch.tensor([0.25], device=CUDA)
        update_segments(segments, TermGradients(gradients_OD), twin_SW, struct, times)
    keys_N = torch.arange(50_000, device=CUDA).repeat(2)
    cells = KeyCells(torch.tensor([50_000, 100_000], device=CUDA))
    mine, other = (i.find(keys_N, cells).long() for i in (index, twin))
    assert torch.equal(mine >= 0, other >= 0)
    assert torch.equal(rows_SW[mine[mine >= 0]], twin_SW[other[other >= 0]])
    assert int(faults) == 0


def test_the_host_learns_of_a_step_in_its_own_memory():
    news = StepNews(3, CUDA)
    news.faults_G.copy_(torch.tensor([2, 0, 5], dtype=torch.int32))
    news.tell(torch.tensor(0.625, device=CUDA), torch.tensor(True, device=CUDA))
    torch.cuda.synchronize()
    assert news.read() == (0.625, 8)
