"""The GPU reads and writes rows in host memory by itself, as the host would."""

import pytest
import torch

from nestpipe.embedding.store.host import NativeStore
from nestpipe.embedding.store.protocol import StoreLayout
from nestpipe.kernels.rows.native import copy_rows

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs alone")

from nestpipe.kernels.rows import row_copy_triton
from nestpipe.kernels.rows.cuda import aligned_rows, can_copy_in_bulk
from nestpipe.kernels.rows.row_copy_triton import copy_rows_by_gpu


def make_store(dim: int, rows: int) -> NativeStore:
    layout = StoreLayout(dim=dim, state_dim=1, table_seeds=(3,), init_stds=(0.1,))
    store = NativeStore(layout, threads=2)
    store.locate(torch.arange(rows), [rows])  # makes them
    return store


@pytest.mark.parametrize("dim", [1, 8, 11, 128, 300, 1100])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("in_bulk", [False, True])
def test_rows_come_and_go_as_the_host_would_copy_them(
    monkeypatch: pytest.MonkeyPatch, dim: int, some: bool, in_bulk: bool
):
    if not in_bulk:
        monkeypatch.setattr(row_copy_triton, "can_copy_in_bulk", lambda _: False)
    elif not can_copy_in_bulk(torch.zeros(1, 4, device="cuda")):
        pytest.skip("no bulk copies: they need compute capability 9.0 and nvcc")
    count = 40_000
    store = make_store(dim, count)
    assert store.pin()
    keys_K = torch.randperm(count)[:5_001]
    places = store.locate(keys_K, [len(keys_K)])
    positions_n = torch.randperm(len(keys_K))[:777] if some else None
    chosen = places.at(positions_n)
    expected = torch.empty(len(chosen), dim + 1)
    copy_rows(chosen, expected, to_store=False, threads=1)

    addresses_K = places.addresses_K.cuda()
    there_n = None if positions_n is None else positions_n.cuda()
    rows_KW = aligned_rows(len(keys_K), dim + 1, torch.device("cuda")).zero_()
    assert not in_bulk or can_copy_in_bulk(rows_KW)
    copy_rows_by_gpu(addresses_K, there_n, rows_KW, to_store=False)
    found = rows_KW.cpu() if positions_n is None else rows_KW.cpu()[positions_n]
    assert torch.equal(found, expected)

    before = torch.empty(count, dim + 1)
    store.gather(torch.arange(count), [count], before)
    rows_KW.mul_(-2).sub_(1)
    copy_rows_by_gpu(addresses_K, there_n, rows_KW, to_store=True)
    torch.cuda.synchronize()
    after = torch.empty(count, dim + 1)
    store.gather(torch.arange(count), [count], after)
    written = keys_K if positions_n is None else keys_K[positions_n]
    before[written] = expected * -2 - 1
    assert torch.equal(after, before)
    store.close()


def test_rows_that_were_added_are_reached_too():
    store = make_store(64, 10)
    assert store.pin()
    keys_K = torch.arange(300_000)
    places = store.locate(keys_K, [len(keys_K)])
    assert store.pin()
    rows_KW = torch.zeros(len(keys_K), 65, device="cuda")
    copy_rows_by_gpu(places.addresses_K.cuda(), None, rows_KW, to_store=False)
    expected = torch.empty(len(keys_K), 65)
    store.gather(keys_K, [len(keys_K)], expected)
    assert torch.equal(rows_KW.cpu(), expected)
    store.close()


def test_no_rows_are_no_work():
    rows_KW = torch.zeros(0, 5, device="cuda")
    copy_rows_by_gpu(torch.zeros(0, dtype=torch.int64, device="cuda"), None, rows_KW, to_store=True)
