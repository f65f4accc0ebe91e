"""All stores agree bit for bit with the plain one, and refuse what they must."""

import math
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.config import Table
from nestpipe.embedding.store import RowStore, SsdOptions, open_store
from nestpipe.embedding.store.host import NativeStore, PlainStore
from nestpipe.embedding.store.protocol import (
    ROW_TYPES,
    StoreLayout,
    default_threads,
    first_weights,
    round_to_bfloat16,
    round_to_float16,
    round_weights,
)
from nestpipe.embedding.store.ssd import FRAME_BYTES, row_bytes
from nestpipe.errors import CapacityError, ConfigError
from support.examples import examples

# Shapes: K keys, W width of a row as it travels

EDGES = [0, -1, 1, 2**63 - 1, -(2**63), -(2**63) + 1, 2**32, -(2**32)]
ALL = pytest.mark.parametrize("kind", ["native", "plain", "ssd"])
ROWS_IN_MEMORY = 5
"""Of a store with a file: so few that rows leave memory all the time."""


def layout(dim: int = 4, state_dim: int = 1, tables: int = 1, **more) -> StoreLayout:
    return StoreLayout(
        table_seeds=tuple(range(7, 7 + tables)),
        init_stds=(0.01,) * tables,
        dim=dim,
        state_dim=state_dim,
        state_init=0.25,
        **more,
    )


def opened(kind: str, of: StoreLayout) -> RowStore:
    """A store of that kind; one with a file has room for few rows, and small segments."""
    if kind != "ssd":
        return open_store(of, native=kind == "native", threads=2)
    cache_bytes = ROWS_IN_MEMORY * (row_bytes(of) + FRAME_BYTES)
    options = SsdOptions(folder=Path(gettempdir()), cache_bytes=cache_bytes, depth=3)
    return open_store(of, native=True, threads=2, ssd=replace(options, segment_bytes=4096))


def twins(of: StoreLayout) -> tuple[NativeStore, PlainStore]:
    return NativeStore(of, threads=2), PlainStore(of)


def gather(store, keys: Tensor, counts: list[int]) -> tuple[Tensor, int]:
    out_KW = torch.full((len(keys), store.layout.width), float("nan"))
    num_new = store.gather(keys, counts, out_KW)
    return out_KW, num_new


def stored(store: RowStore, keys: Tensor, counts: list[int]) -> Tensor:
    assert store.abilities.keys is not None
    return store.abilities.keys.stored(keys, counts)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def contents(store, chunk: int = 65536) -> list[tuple[int, Tensor, Tensor]]:
    return list(store.export(chunk))


def assert_same_contents(a, b, chunk: int = 65536) -> None:
    for (s, keys, rows), (t, other_keys, other_rows) in zip(
        a.export(chunk), b.export(chunk), strict=True
    ):
        assert s == t
        assert torch.equal(keys, other_keys)
        assert same_bits(rows, other_rows)


def batch_of(lists: list[list[int]]) -> tuple[Tensor, list[int]]:
    flat = [key for keys in lists for key in keys]
    return torch.tensor(flat, dtype=torch.int64), [len(keys) for keys in lists]


def bits_as_rows(keys: int, width: int, seed: int) -> Tensor:
    """Any bits at all: nan, infinities and denormals too."""
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 2**32, (keys, width), dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


some_keys = st.lists(
    st.one_of(st.sampled_from(EDGES), st.integers(-40, 40), st.integers(-(2**63), 2**63 - 1)),
    max_size=40,
)
steps = st.lists(
    st.tuples(
        st.sampled_from(["gather", "scatter", "move"]),
        st.lists(some_keys, min_size=3, max_size=3),
        st.integers(0, 2**32),
    ),
    max_size=8,
)


@given(
    steps=steps,
    dim=st.integers(1, 20),
    state_dim=st.integers(0, 5),
    dtype=st.sampled_from(sorted(ROW_TYPES)),
    chunk=st.integers(1, 50),
)
@examples("more")
@pytest.mark.parametrize("kind", ["native", "ssd"])
def test_any_sequence_of_calls_leaves_the_twins_equal(steps, dim, state_dim, dtype, chunk, kind):
    of = layout(dim, state_dim, tables=3, dtype=dtype)
    store, plain = opened(kind, of), PlainStore(of)
    for call, lists, seed in steps:
        keys, counts = batch_of(lists)
        if call == "gather":
            (rows, fresh), (other, other_fresh) = (gather(s, keys, counts) for s in (store, plain))
            assert fresh == other_fresh
            assert same_bits(rows, other)
            known, other_known = (stored(s, keys, counts) for s in (store, plain))
            assert torch.equal(known, other_known)
            assert int((~known).sum()) == fresh
        elif call == "scatter":
            keys, counts = batch_of([list(dict.fromkeys(part)) for part in lists])
            rows = bits_as_rows(len(keys), store.layout.width, seed)
            store.scatter(keys, counts, rows)
            plain.scatter(keys, counts, rows)
        else:
            store = moved(store, opened(kind, of), chunk)
        assert store.num_rows() == plain.num_rows()
    assert_same_contents(store, plain, chunk)
    store.close()


def moved(store: RowStore, fresh: RowStore, chunk: int) -> RowStore:
    """The same rows in a new store."""
    for table, keys, rows in store.export(chunk):
        counts = [0] * store.layout.num_tables
        counts[table] = len(keys)
        fresh.scatter(keys, counts, rows)
    store.close()
    return fresh


@pytest.mark.parametrize(
    ("dim", "state_dim", "dtype"),
    [(16, 0, "float32"), (6, 1, "float32"), (5, 2, "bfloat16"), (19, 1, "float16")],
)
def test_tables_grow_to_many_rows_and_stay_equal(dim, state_dim, dtype):
    native, plain = twins(layout(dim, state_dim, tables=2, dtype=dtype))
    generator = torch.Generator().manual_seed(3)
    for step in range(4):
        many = torch.randint(-(2**62), 2**62, (40_000,), generator=generator)
        dense = torch.arange(-step * 3000, 6000)
        keys, counts = torch.cat([many, dense]), [len(many), len(dense)]
        rows = torch.randn(len(keys), native.layout.width, generator=generator)
        native.scatter(keys, counts, rows)
        plain.scatter(keys, counts, rows)
    assert native.num_rows() == plain.num_rows() == [160_000, 15_000]
    assert_same_contents(native, plain)


def test_a_table_of_three_hundred_thousand_rows_returns_each_of_them():
    store = NativeStore(layout(dim=3, state_dim=0), threads=2)
    keys = torch.randperm(300_000, generator=torch.Generator().manual_seed(0)) * 2**20 - 2**37
    rows = torch.stack([keys.float(), keys.float() + 1, keys.float() * 2], dim=1)
    for part, part_rows in zip(keys.split(7001), rows.split(7001), strict=True):
        store.scatter(part, [len(part)], part_rows)
    read, num_new = gather(store, keys, [len(keys)])
    assert num_new == 0
    assert torch.equal(read, rows)
    assert store.num_rows() == [300_000]
    assert gather(store, keys + 1, [len(keys)])[1] == 300_000


@ALL
def test_reading_inserts_nothing_and_counts_repeats(kind):
    store = opened(kind, layout(tables=2))
    keys = torch.tensor([5, 5, 9, 5])
    rows, num_new = gather(store, keys, [3, 1])
    assert num_new == 4
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[3]), "tables with different seeds start differently"
    assert store.num_rows() == [0, 0]
    assert rows[:, 4].tolist() == [0.25] * 4


@pytest.mark.parametrize("dtype", ROW_TYPES)
def test_first_rows_depend_on_seed_and_key_alone(dtype):
    of = layout(dim=9, dtype=dtype)
    keys = torch.tensor([*EDGES, *range(100, 3000)])
    whole, _ = gather(NativeStore(of, threads=1), keys, [len(keys)])
    other = NativeStore(of, threads=3)
    full = torch.arange(50_000) + 10_000
    other.scatter(full, [len(full)], torch.zeros(len(full), of.width))
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(1))
    parts = [gather(other, part, [len(part)])[0] for part in keys[order].split(97)]
    assert same_bits(torch.cat(parts), whole[order])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_first_row_that_is_stored_reads_the_same(dtype):
    store = NativeStore(layout(dim=9, dtype=dtype))
    keys = torch.arange(1000)
    first, _ = gather(store, keys, [1000])
    store.scatter(keys, [1000], first)
    again, num_new = gather(store, keys, [1000])
    assert num_new == 0
    assert same_bits(again, first)


def test_first_rows_are_pinned_for_ever():
    """A changed value would change every run and no longer fit old checkpoints."""
    weights = first_weights(7, np.array([0, -1, 2**62]), 3, 1.0)
    assert weights.tobytes().hex(" ", 4) == (
        "9f7e9c3f 8760603f 191527bf 64c1c6be a72026c0 8603653f 3edd313f b31117bf 6c69143e"
    )


def test_first_weights_are_normal():
    weights = first_weights(11, np.arange(40_000) - 20_000, 50, 1.0).astype(np.float64)
    count = weights.size
    assert abs(weights.mean()) < 4 / count**0.5
    assert abs(weights.var() - 1) < 4 * (2 / count) ** 0.5
    assert abs((weights**4).mean() - 3) < 4 * (96 / count) ** 0.5
    for bound, share in [(1.0, 0.158655), (2.0, 0.022750), (3.0, 0.0013499)]:
        assert abs((weights > bound).mean() / share - 1) < 0.06
        assert abs((weights < -bound).mean() / share - 1) < 0.06
    # Neighbours in a row, and rows of neighbouring keys, have nothing to do with each other.
    assert abs((weights[:, 1:] * weights[:, :-1]).mean()) < 4 / count**0.5
    assert abs((weights[1:] * weights[:-1]).mean()) < 4 / count**0.5


def test_bfloat16_is_rounded_like_torch_does():
    values = bits_as_rows(4096, 8, seed=5).nan_to_num()
    ours = torch.from_numpy(round_to_bfloat16(values.numpy()))
    assert same_bits(ours, values.bfloat16().float())


EVERY_HALF = np.arange(2**16, dtype=np.uint16).view(np.float16)
NUMBERS = EVERY_HALF[np.isfinite(EVERY_HALF)]
"""All that float16 has."""


def stored_as_float16(values: Tensor, dim: int) -> Tensor:
    """What native code makes of them: seven at once are never vectors, eight always are one."""
    store = NativeStore(layout(dim=dim, state_dim=0, dtype="float16"), threads=2)
    rows = torch.zeros(-(-len(values) // dim) * dim)
    rows[: len(values)] = values
    keys = torch.arange(len(rows) // dim)
    store.scatter(keys, [len(keys)], rows.view(-1, dim))
    return gather(store, keys, [len(keys)])[0].view(-1)[: len(values)]


@pytest.mark.parametrize("dim", [7, 8, 16, 29])
def test_every_number_of_float16_stays_what_it_is(dim):
    with np.errstate(invalid="ignore"):
        values = torch.from_numpy(EVERY_HALF.astype(np.float32))
    plain = torch.from_numpy(round_to_float16(values.numpy()))
    numbers = ~values.isnan()
    for made in (plain, stored_as_float16(values, dim)):
        assert same_bits(made[numbers], values[numbers])
        assert bool(made[~numbers].isnan().all())


@pytest.mark.parametrize("dim", [7, 8, 16, 29])
def test_what_lies_between_two_numbers_of_float16_goes_to_the_nearer_or_even(dim):
    low, high = (np.sort(NUMBERS)[part].astype(np.float64) for part in (slice(-1), slice(1, None)))
    middle = ((low + high) / 2).astype(np.float32)
    ways = [np.nextafter(middle, np.float32(to)) for to in (-np.inf, np.inf)]
    edges = np.array([65519.996, 65520, -65520, 1e30, np.inf, 1e-45, -1e-45, 2**-25], np.float32)
    values = np.concatenate([middle, *ways, edges])
    with np.errstate(over="ignore"):
        wanted = torch.from_numpy(values.astype(np.float16).astype(np.float32))
    given = torch.from_numpy(values)
    assert same_bits(given.half().float(), wanted)
    assert same_bits(torch.from_numpy(round_to_float16(values)), wanted)
    assert same_bits(stored_as_float16(given, dim), wanted)


@given(seed=st.integers(0, 2**32), dim=st.sampled_from([1, 7, 8, 33]))
@examples("more")
def test_any_float_is_rounded_to_float16_as_numpy_and_torch_do(seed, dim):
    given = bits_as_rows(999, 1, seed).view(-1)
    given[::3] = torch.randn(333, generator=torch.Generator().manual_seed(seed))
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = torch.from_numpy(given.numpy().astype(np.float16).astype(np.float32))
    numbers, stored = ~given.isnan(), stored_as_float16(given, dim)
    assert same_bits(stored[numbers], wanted[numbers])
    assert same_bits(given.half().float()[numbers], wanted[numbers])
    assert same_bits(torch.from_numpy(round_to_float16(given.numpy())), stored), "nan as well"


def test_rows_on_a_device_are_rounded_to_what_a_store_keeps():
    for dtype in ROW_TYPES:
        rows = torch.randn(300, 9, generator=torch.Generator().manual_seed(4)) * 1e-5
        store = NativeStore(layout(dim=8, dtype=dtype))
        store.scatter(torch.arange(300), [300], rows)
        beyond = round_weights(rows[:, :8], dtype)
        assert same_bits(rows, gather(store, torch.arange(300), [300])[0])
        assert beyond is None if dtype != "float16" else not bool(beyond)


def test_what_float16_cannot_hold_is_told_and_never_becomes_inf():
    rows = torch.tensor([[65503.0, 65519.9], [65520.0, -1e9], [-math.inf, 1.0], [2.0, 3.0]])
    assert bool(round_weights(rows, "float16"))
    assert rows.tolist() == [[65504, 65504], [65504, -65504], [-65504, 1], [2, 3]]
    broken = torch.tensor([[math.nan, 1.0]])
    assert not bool(round_weights(broken, "float16"))
    assert bool(broken[0, 0].isnan()), "nan is told by the loss"


def test_the_first_values_of_float16_rows_are_finite_for_every_spread_that_is_allowed():
    most = abs(first_weights(11, np.arange(40_000), 50, 1.0)).max()
    assert most < 65504 / 10_000 < 7
    Table(name="t", dim=1, dtype="float16", init_std=10_000)
    with pytest.raises(ConfigError, match="init_std of table 't' is 10001, but float16 ends at"):
        Table(name="t", dim=1, dtype="float16", init_std=10_001)


@ALL
def test_a_full_table_refuses_and_nothing_changes(kind):
    store = opened(kind, layout(tables=2, max_rows=(0, 10)))
    first = torch.arange(18)
    store.scatter(first, [10, 8], torch.ones(18, 5))
    before, size = contents(store), store.num_bytes()
    keys = torch.tensor([100, 101, 10, 20, 21, 22])
    with pytest.raises(CapacityError) as refused:
        store.scatter(keys, [2, 4], torch.zeros(6, 5))
    assert str(refused.value) == (
        "table 1 would have 11 rows here and may have 10; "
        "raise its max_rows, or spread it over more workers"
    )
    assert store.num_rows() == [10, 8]
    for (_, keys_before, rows_before), (_, keys_now, rows_now) in zip(
        before, contents(store), strict=True
    ):
        assert torch.equal(keys_before, keys_now)
        assert torch.equal(rows_before, rows_now)
    assert store.num_bytes() == size or kind == "ssd"
    store.scatter(torch.tensor([10, 20, 21]), [0, 3], torch.zeros(3, 5))
    assert store.num_rows() == [10, 10]
    store.scatter(torch.tensor([10, 20]), [0, 2], torch.ones(2, 5))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc for its own size")
def test_memory_that_runs_out_is_an_error_and_rows_stay_whole():
    result = run_python(OUT_OF_MEMORY)
    assert result.returncode == 0, result.stderr
    assert "host memory is full" in result.stdout


OUT_OF_MEMORY = """
import resource, torch
from nestpipe.embedding.store.host import NativeStore
from nestpipe.embedding.store.protocol import StoreLayout
from nestpipe.errors import CapacityError

layout = StoreLayout(table_seeds=(1,), init_stds=(0.0,), dim=64, state_dim=0)
store = NativeStore(layout, threads=2)
rows, out = torch.ones(20_000, 64), torch.empty(20_000, 64)
store.scatter(torch.arange(20_000), [20_000], rows)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (100 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for step in range(1, 100):
    keys = torch.arange(20_000) + step * 20_000
    try:
        store.scatter(keys, [20_000], rows)
    except CapacityError as error:
        print(error)
        break
else:
    raise AssertionError("the limit was never met")
stored = step * 20_000
assert step > 3
assert store.num_rows() == [stored]
for done in range(step):
    assert store.gather(torch.arange(20_000) + done * 20_000, [20_000], out) == 0
    assert torch.equal(out, rows)
assert store.gather(keys, [20_000], out) == 20_000
"""


def run_python(code: str):
    # One heap: the C library would reserve 64 MiB of addresses for a thread's first allocation.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )


@ALL
@pytest.mark.parametrize("keys", [[4, 4], [*range(500), 3], [-(2**63), 1, -(2**63)]])
def test_a_repeated_key_is_refused_before_anything_is_stored(kind, keys):
    store = opened(kind, layout(tables=2))
    batch = torch.tensor([1, *keys])
    with pytest.raises(ValueError, match="table 1 comes twice"):
        store.scatter(batch, [1, len(keys)], torch.zeros(len(batch), 5))
    assert store.num_rows() == [0, 0]


@ALL
def test_the_same_key_in_two_tables_is_two_rows(kind):
    store = opened(kind, layout(tables=2))
    store.scatter(torch.tensor([3, 3]), [1, 1], torch.tensor([[1.0] * 5, [2.0] * 5]))
    assert gather(store, torch.tensor([3, 3]), [1, 1])[0][:, 0].tolist() == [1.0, 2.0]


@ALL
@pytest.mark.parametrize(
    ("keys", "counts", "rows"),
    [
        (torch.zeros(2, dtype=torch.int32), [1, 1], torch.zeros(2, 5)),
        (torch.zeros(2, dtype=torch.int64), [1, 1], torch.zeros(2, 4)),
        (torch.zeros(2, dtype=torch.int64), [1, 1], torch.zeros(5, 2).t()),
        (torch.zeros(2, dtype=torch.int64), [1, 1], torch.zeros(2, 5, dtype=torch.float64)),
        (torch.zeros(4, dtype=torch.int64)[::2], [1, 1], torch.zeros(2, 5)),
        (torch.zeros(2, dtype=torch.int64), [1, 2], torch.zeros(2, 5)),
        (torch.zeros(2, dtype=torch.int64), [2], torch.zeros(2, 5)),
        (torch.zeros(2, dtype=torch.int64), [3, -1], torch.zeros(2, 5)),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kind, keys, counts, rows):
    store = opened(kind, layout(tables=2))
    with pytest.raises(ValueError, match=r"must be|counts"):
        store.scatter(keys, counts, rows)
    with pytest.raises(ValueError, match=r"must be|counts"):
        store.gather(keys, counts, rows)


@pytest.mark.parametrize(
    "wrong", [{"dtype": "float8"}, {"dim": 0}, {"max_rows": (1,)}, {"max_rows": (1, -1)}]
)
def test_a_layout_that_contradicts_itself_is_refused(wrong):
    with pytest.raises(ValueError, match=r"dtype|layout|limits"):
        NativeStore(layout(**{"tables": 2, **wrong}))


@ALL
def test_nothing_to_do_is_fine(kind):
    store = opened(kind, layout())
    empty = torch.empty(0, dtype=torch.int64)
    store.scatter(empty, [0], torch.empty(0, 5))
    assert gather(store, empty, [0])[1] == 0
    assert contents(store) == []


def test_a_closed_store_says_so():
    store = NativeStore(layout())
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.num_rows()


def test_readers_and_writers_on_different_threads_see_whole_rows():
    """Each writer has keys of its own; readers read all of them. Rows hold one number only."""
    store = NativeStore(layout(dim=127, state_dim=1), threads=2)
    writers, rounds, keys_each = 2, 12, 6000
    failures: list[str] = []
    stop = threading.Event()

    def write(writer: int) -> None:
        keys = torch.arange(keys_each) * writers + writer
        for value in range(1, rounds + 1):
            store.scatter(keys, [keys_each], torch.full((keys_each, 128), float(value)))

    def read() -> None:
        keys = torch.randperm(keys_each * writers)
        while not stop.is_set():
            rows, _ = gather(store, keys, [len(keys)])
            stored = rows[rows[:, -1] != 0.25]
            if not torch.equal(stored, stored[:, :1].expand_as(stored)):
                failures.append("a torn row")

    readers = [threading.Thread(target=read) for _ in range(2)]
    writing = [threading.Thread(target=write, args=(w,)) for w in range(writers)]
    for thread in [*readers, *writing]:
        thread.start()
    for thread in writing:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert not failures
    assert store.num_rows() == [keys_each * writers]


def test_a_result_does_not_depend_on_the_number_of_threads():
    stores = [NativeStore(layout(dim=64, state_dim=0), threads=threads) for threads in (1, 2, 5)]
    keys = torch.randperm(60_000, generator=torch.Generator().manual_seed(2))
    rows = torch.randn(60_000, 64, generator=torch.Generator().manual_seed(3))
    read = []
    for store in stores:
        store.scatter(keys[:40_000], [40_000], rows[:40_000])
        read.append(gather(store, keys, [60_000]))
    for other, num_new in read:
        assert num_new == 20_000
        assert same_bits(other, read[0][0])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc for its own size")
def test_every_byte_is_counted():
    """What the process maps while a table fills is what the store says it took.

    Allowed apart from it: 1 MiB, for what the C library maps for itself.
    """
    result = run_python(COUNT_BYTES)
    assert result.returncode == 0, result.stderr
    told, mapped, rows = map(int, result.stdout.split())
    assert abs(told - mapped) <= 1 << 20
    # Rows of 64 bytes and about 16 / 0.53 bytes of index each; the last chunk and region have
    # 32 MiB at most.
    assert rows * 64 <= told <= rows * (64 + 64) + (64 << 20)


COUNT_BYTES = """
import ctypes, resource, torch
from nestpipe.embedding.store.host import NativeStore
from nestpipe.embedding.store.protocol import StoreLayout

if hasattr(ctypes.CDLL(None), "mallopt"):
    # A thread that first allocates maps 64 MiB, which it may never use; M_ARENA_MAX is -8.
    ctypes.CDLL(None).mallopt(-8, 1)

def mapped():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

store = NativeStore(
    StoreLayout(table_seeds=(1,), init_stds=(0.0,), dim=16, state_dim=0), threads=2
)
rows, steps = torch.ones(50_000, 16), 30
batches = [torch.arange(50_000) + step * 50_000 for step in range(steps)]
store.scatter(batches[0], [50_000], rows)
store.gather(batches[0], [50_000], rows)
told, had = store.num_bytes(), mapped()
for keys in batches[1:]:
    store.scatter(keys, [50_000], rows)
print(store.num_bytes() - told, mapped() - had, 50_000 * (steps - 1))
"""


def test_memory_comes_back_when_a_store_is_closed():
    result = run_python(CLOSE)
    assert result.returncode == 0, result.stderr


CLOSE = (
    COUNT_BYTES.replace("print(", "size = store.num_bytes()\nfull = mapped()\nprint(")
    + """
store.close()
assert full - mapped() >= size * 0.95, (full, mapped(), size)
"""
)


def test_the_environment_chooses_the_twin(monkeypatch):
    monkeypatch.setenv("NESTPIPE_NATIVE", "0")
    assert isinstance(open_store(layout()), PlainStore)
    assert isinstance(open_store(layout(), native=True), NativeStore)
    monkeypatch.setenv("NESTPIPE_NATIVE", "1")
    assert isinstance(open_store(layout()), NativeStore)
    monkeypatch.setenv("NESTPIPE_NATIVE", "yes")
    with pytest.raises(ConfigError, match="NESTPIPE_NATIVE is 'yes'"):
        open_store(layout())


def test_ranks_on_one_machine_share_its_cores(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert default_threads() == min(cores, 64)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cores))
    assert default_threads() == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_forked_child_can_read():
    result = run_python(FORK)
    assert result.returncode == 0, result.stderr


FORK = """
import os, torch
from nestpipe.embedding.store.host import NativeStore
from nestpipe.embedding.store.protocol import StoreLayout

torch.set_num_threads(1)  # torch's own threads do not survive a fork
layout = StoreLayout(table_seeds=(1,), init_stds=(0.0,), dim=16, state_dim=0)
store = NativeStore(layout, threads=3)
keys, rows = torch.arange(20_000), torch.ones(20_000, 16)
store.scatter(keys, [20_000], rows)
child = os.fork()
out = torch.empty_like(rows)
fresh = store.gather(keys, [20_000], out)
store.close()
same = fresh == 0 and bool((out == 1).all())
if child == 0:
    os._exit(0 if same else 1)
_, status = os.waitpid(child, 0)
assert same
assert status == 0, status
"""


def test_every_row_lies_in_a_known_piece_of_memory_and_pieces_are_only_added():
    store = NativeStore(layout(tables=2, dim=16), threads=2)
    width = store.layout.width * 4
    seen: list[list[tuple[int, int]]] = [[], []]
    for last in (1, 5_000, 400_000):
        keys_K, counts = torch.arange(last), [last - last // 3, last // 3]
        addresses = store.locate(keys_K, counts).addresses_K
        for table, of_table in enumerate(torch.split(addresses, counts)):
            pieces = store._chunks(table, 0)
            assert pieces[: len(seen[table])] == seen[table]
            assert store._chunks(table, len(pieces)) == []
            seen[table] = pieces
            starts = torch.tensor([start for start, _ in sorted(pieces)] or [0])
            ends = torch.tensor([start + size for start, size in sorted(pieces)] or [0])
            piece = torch.searchsorted(starts, of_table, right=True) - 1
            assert bool((of_table + width <= ends[piece]).all())
    assert len(seen[0]) > 1
    store.close()


@given(
    before=st.lists(some_keys, min_size=2, max_size=2),
    asked=st.lists(some_keys, min_size=2, max_size=2),
    seed=st.integers(0, 2**32),
)
def test_keys_in_any_order_are_where_those_of_their_table_are(before, asked, seed):
    store = NativeStore(layout(2, 1, tables=2), threads=2)
    twin = NativeStore(layout(2, 1, tables=2), threads=2)
    for one in (store, twin):
        keys_K, counts = batch_of([list(dict.fromkeys(keys)) for keys in before])
        one.scatter(keys_K, counts, torch.full((len(keys_K), one.layout.width), 3.0))
    keys_K, counts = batch_of([list(dict.fromkeys(keys)) for keys in asked])
    tables_K = torch.arange(2, dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    order_K = torch.randperm(len(keys_K), generator=torch.Generator().manual_seed(seed))
    addresses_K = torch.full_like(keys_K, -1)
    store.locate_each(keys_K[order_K], tables_K[order_K], addresses_K)
    assert torch.equal(addresses_K, store.locate(keys_K, counts).addresses_K[order_K])
    twin.locate(keys_K, counts)
    assert store.num_rows() == twin.num_rows()
    found_KW, expected_KW = gather(store, keys_K, counts)[0], gather(twin, keys_K, counts)[0]
    assert same_bits(found_KW, expected_KW), "rows that were made are those of the twin"


def test_a_table_that_is_none_is_found_out_and_nobody_waits_for_its_reader():
    store = NativeStore(layout(2, 1, tables=2), threads=1)
    keys_n, addresses_n = torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int64)
    for table in (2, -1):
        tables_n = torch.tensor([0, table], dtype=torch.int32)
        with pytest.raises(AssertionError, match="the native store answered"):
            store.locate_each(keys_n, tables_n, addresses_n)
    store.scatter(torch.tensor([1]), [1, 0], torch.ones(1, store.layout.width))


def test_many_keys_in_any_order_are_found_by_several_threads():
    store = NativeStore(layout(4, 3, tables=3), threads=2)
    counts = [30_000, 0, 20_000]
    keys_K = torch.cat([torch.arange(30_000) * 7, torch.arange(20_000) * 7])
    store.scatter(keys_K, counts, torch.ones(50_000, store.layout.width))
    tables_K = torch.tensor([0] * 30_000 + [2] * 20_000, dtype=torch.int32)
    order_K = torch.randperm(50_000)
    addresses_K = torch.empty_like(keys_K)
    store.locate_each(keys_K[order_K], tables_K[order_K], addresses_K)
    assert torch.equal(addresses_K, store.locate(keys_K, counts).addresses_K[order_K])


# Erasing


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["scatter", "erase"]),
            st.lists(some_keys, min_size=2, max_size=2),
            st.integers(0, 2**32),
        ),
        max_size=12,
    ),
    crowded=st.booleans(),
)
@examples("more")
def test_after_any_scatters_and_erases_all_stores_hold_what_a_dict_holds(steps, crowded):
    of = layout(3, 1, tables=2)
    stores = [*twins(of), opened("ssd", of)]
    model: dict[tuple[int, int], Tensor] = {}
    for call, lists, seed in steps:
        # Few different keys meet again, so that erased ones come back and places are used again.
        lists = [[key % 50 if crowded else key for key in part] for part in lists]
        keys, counts = batch_of([list(dict.fromkeys(part)) for part in lists])
        named = [(n, key) for n, part in enumerate(lists) for key in dict.fromkeys(part)]
        rows = bits_as_rows(len(keys), 4, seed)
        for store in stores:
            if call == "scatter":
                store.scatter(keys, counts, rows)
            else:
                assert store.erase(keys, counts) == sum(key in model for key in named)
        for key, row in zip(named, rows, strict=True):
            if call == "scatter":
                model[key] = row
            else:
                model.pop(key, None)
        for store in stores:
            assert store.num_rows() == [sum(t == n for t, _ in model) for n in range(2)]
    for store in stores:
        held = {
            (table, int(key)): row
            for table, keys, rows in contents(store)
            for key, row in zip(keys, rows, strict=True)
        }
        assert held.keys() == model.keys()
        assert all(same_bits(held[key], model[key]) for key in model)


@ALL
def test_an_erased_key_begins_again_with_its_first_value(kind):
    store = opened(kind, layout())
    keys, counts = batch_of([[1, 2, 3]])
    first, _ = gather(store, keys, counts)
    store.scatter(keys, counts, torch.ones(3, 5))
    assert store.erase(keys[1:2], [1]) == 1
    rows, num_new = gather(store, keys, counts)
    assert num_new == 1
    assert same_bits(rows[1], first[1])
    assert rows[[0, 2]].eq(1).all()
    assert store.erase(keys[1:2], [1]) == 0


def test_many_erased_rows_leave_all_others_where_they_are_and_their_room_is_used_again():
    store = NativeStore(layout(6, 2, max_rows=(60_000,)), threads=2)
    keys = torch.randperm(60_000, generator=torch.Generator().manual_seed(1)) * 7919
    rows = bits_as_rows(len(keys), 8, 5)
    store.scatter(keys, [len(keys)], rows)
    where, memory = store.locate(keys, [len(keys)]).addresses_K, store._chunks(0, 0)
    for turn in range(5):  # more rows in all than the table may have at once
        gone = keys[turn::3].contiguous()
        assert store.erase(gone, [len(gone)]) == len(gone)
        kept = torch.ones(len(keys), dtype=torch.bool)
        kept[turn::3] = False
        out, num_new = gather(store, keys, [len(keys)])
        assert num_new == len(gone)
        assert same_bits(out[kept], rows[kept])
        new = gone + (turn + 1) * 10**9
        store.scatter(new, [len(new)], rows[~kept])
        found = store.locate(keys[kept], [int(kept.sum())]).addresses_K
        assert torch.equal(found, where[kept])
        keys = torch.where(kept, keys, keys + (turn + 1) * 10**9)
        where = store.locate(keys, [len(keys)]).addresses_K
        assert len(where.unique()) == len(keys)
    assert store.num_rows() == [60_000]
    assert store._chunks(0, 0) == memory


@ALL
def test_a_key_to_erase_that_comes_twice_is_refused_and_nothing_goes(kind):
    store = opened(kind, layout())
    keys, counts = batch_of([[4, 5, 4]])
    store.scatter(keys[:2], [2], torch.ones(2, 5))
    with pytest.raises(ValueError, match="key 4 of table 0 comes twice"):
        store.erase(keys, counts)
    assert store.num_rows() == [2]


def test_readers_never_see_half_a_row_while_others_are_erased():
    store = NativeStore(layout(30, 2), threads=2)
    keys = torch.arange(4000)
    even, odd = keys[::2].contiguous(), keys[1::2].contiguous()
    store.scatter(keys, [len(keys)], torch.ones(len(keys), 32))
    done = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not done.is_set():
            out, _ = gather(store, odd, [len(odd)])
            if not bool(out.eq(1).all()):
                wrong.append("a row that nobody touched has changed")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(60):
        assert store.erase(even, [len(even)]) == len(even)
        store.scatter(even, [len(even)], torch.full((len(even), 32), 2.0))
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong
