"""A store with a file: rows that leave memory and come back, a file that stays small, faults."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nestpipe.embedding.store import SsdOptions, open_store, ssd, ssd_options
from nestpipe.embedding.store.host import NativeStore
from nestpipe.embedding.store.protocol import StoreLayout
from nestpipe.embedding.store.ssd import FRAME_BYTES, SsdStore, open_scratch, row_bytes
from nestpipe.errors import CapacityError, ConfigError, RunError

WIDTH = 6
LAYOUT = StoreLayout(table_seeds=(1, 2), init_stds=(0.1, 0.1), dim=5, state_dim=1)


def opened(folder: Path, rows_in_memory: int, of: StoreLayout = LAYOUT, **more: int) -> SsdStore:
    """A store with small segments, so that a test fills many of them."""
    given = {"depth": 3, "segment_bytes": 4096, **more}
    cache_bytes = rows_in_memory * (row_bytes(of) + FRAME_BYTES)
    return SsdStore(of, SsdOptions(folder=folder, cache_bytes=cache_bytes, **given), threads=2)


def rows_of(store, keys: Tensor, counts: list[int]) -> Tensor:
    rows = torch.empty(len(keys), WIDTH)
    store.gather(keys, counts, rows)
    return rows


@pytest.mark.parametrize("rows_in_memory", [0, 1, 90, 700, 5000])
def test_whatever_fits_into_memory_rows_are_those_of_the_host_store(tmp_path, rows_in_memory):
    ssd, host = opened(tmp_path, rows_in_memory), NativeStore(LAYOUT, threads=1)
    chance = torch.Generator().manual_seed(rows_in_memory)
    for step in range(120):
        keys = torch.randperm(1500, generator=chance)[: 1 + (step * 37) % 400]
        counts = [len(keys) // 3, len(keys) - len(keys) // 3]
        if step % 3 == 2:
            assert torch.equal(rows_of(ssd, keys, counts), rows_of(host, keys, counts))
        elif step % 7 == 6:
            assert ssd.erase(keys, counts) == host.erase(keys, counts)
        else:
            rows = torch.randn(len(keys), WIDTH, generator=chance)
            ssd.scatter(keys, counts, rows)
            host.scatter(keys, counts, rows)
    for mine, its in zip(ssd.export(97), host.export(97), strict=True):
        assert mine[0] == its[0]
        assert torch.equal(mine[1], its[1])
        assert torch.equal(mine[2], its[2])
    traffic = ssd.traffic()
    assert traffic.cached_rows <= traffic.cache_rows == rows_in_memory
    assert (traffic.rows_read == 0) == (rows_in_memory == 5000)


def test_the_file_stays_small_however_often_rows_are_written(tmp_path):
    store = opened(tmp_path, 50)
    keys, last = torch.arange(2000), torch.zeros(2000)
    chance = torch.Generator().manual_seed(1)
    for step in range(60):
        part = keys if step == 0 else torch.randperm(2000, generator=chance)[:400]
        store.scatter(part, [len(part), 0], torch.full((len(part), WIDTH), float(step)))
        last[part] = float(step)
    traffic = store.traffic()
    of_rows = 2000 * (row_bytes(LAYOUT) + 16)
    assert traffic.rows_written > 10 * 2000
    assert traffic.rows_moved > 0
    assert traffic.file_bytes < 3 * of_rows
    assert torch.equal(rows_of(store, keys, [2000, 0])[:, 0], last)


def test_rows_that_are_used_again_stay_in_memory(tmp_path):
    store = opened(tmp_path, 300)
    hot, cold = torch.arange(100), torch.arange(100, 2000)
    store.scatter(torch.arange(2000), [2000, 0], torch.ones(2000, WIDTH))
    for part in cold.split(100):
        for keys in (hot, part):
            rows_of(store, keys, [len(keys), 0])
    before = store.traffic()
    rows_of(store, hot, [100, 0])
    assert store.traffic().rows_hit - before.rows_hit == 100


def test_saving_all_rows_does_not_drive_hot_ones_out(tmp_path):
    store = opened(tmp_path, 100)
    store.scatter(torch.arange(1000), [1000, 0], torch.ones(1000, WIDTH))
    hot = torch.arange(80)
    rows_of(store, hot, [80, 0])
    assert sum(len(keys) for _, keys, _ in store.export(64)) == 1000
    before = store.traffic()
    rows_of(store, hot, [80, 0])
    assert store.traffic().rows_read == before.rows_read


def test_readers_and_writers_on_different_threads_see_whole_rows(tmp_path):
    store = opened(tmp_path, 200)
    writers, rounds, keys_each = 2, 20, 600
    failures: list[str] = []
    stop = threading.Event()

    def write(writer: int) -> None:
        keys = torch.arange(keys_each) * writers + writer
        for value in range(1, rounds + 1):
            store.scatter(keys, [keys_each, 0], torch.full((keys_each, WIDTH), float(value)))

    def read() -> None:
        keys = torch.randperm(keys_each * writers)
        while not stop.is_set():
            rows = rows_of(store, keys, [len(keys), 0])
            stored = rows[rows[:, -1] != 0]
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
    assert store.num_rows() == [keys_each * writers, 0]


def test_a_row_of_the_index_takes_few_bytes(tmp_path):
    store = opened(tmp_path, 0)
    empty = store.num_bytes()
    for keys in torch.arange(300_000).split(50_000):
        store.scatter(keys, [len(keys), 0], torch.ones(len(keys), WIDTH))
    # 23 to 46 bytes of places in the index and 16 of what is there; the last chunk may be empty.
    assert 39 <= (store.num_bytes() - empty) / 300_000 <= 150
    assert store.traffic().file_bytes >= 300_000 * row_bytes(LAYOUT)


# The file


def test_the_file_has_no_name_and_its_space_comes_back(tmp_path):
    store = opened(tmp_path / "new" / "folder", 0)
    store.scatter(torch.arange(1000), [1000, 0], torch.ones(1000, WIDTH))
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    assert os.fstat(store._file).st_nlink == 0
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        store.num_rows()


@pytest.mark.parametrize("missing", ["O_TMPFILE", "O_DIRECT", "both"])
def test_file_systems_without_unnamed_files_or_direct_access_will_do(
    tmp_path, monkeypatch, missing
):
    real = os.open
    lacking = [os.O_TMPFILE, os.O_DIRECT] if missing == "both" else [getattr(os, missing)]

    def refuse(path, flags, *rest, **more):
        for flag in lacking:
            if flags & flag == flag:
                number = errno.EINVAL if flag == os.O_DIRECT else errno.EOPNOTSUPP
                raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    store = opened(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []
    assert store.direct == (missing == "O_TMPFILE")
    keys = torch.arange(500)
    store.scatter(keys, [500, 0], torch.full((500, WIDTH), 2.0))
    assert bool(rows_of(store, keys, [500, 0]).eq(2).all())


def test_a_full_disk_at_the_start_leaves_no_file_open(tmp_path, monkeypatch):
    def full(file, align):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(ssd, "_writes", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        open_scratch(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot keep rows in '.*file': .*run\.store_path"):
        opened(tmp_path / "file", 0)


def test_a_disk_that_is_too_small_is_noticed_before_training(tmp_path):
    of = StoreLayout(table_seeds=(1,), init_stds=(0.0,), dim=128, state_dim=0, max_rows=(10**13,))
    with pytest.raises(ConfigError, match=r"free, and [\d,]+ rows beyond memory take .* TB"):
        opened(tmp_path, 10, of)


@pytest.mark.parametrize("how", ["overwritten", "shorter"])
def test_a_file_that_was_changed_is_noticed(tmp_path, how):
    store = opened(tmp_path, 0)
    keys = torch.arange(400)
    store.scatter(keys, [400, 0], torch.ones(400, WIDTH))
    if how == "shorter":
        os.truncate(store._file, 0)
    else:
        plain = os.open(f"/proc/self/fd/{store._file}", os.O_RDWR)
        os.pwrite(plain, b"\1", 5 * 48 + 20)
        os.close(plain)
    with pytest.raises(RunError, match=r"is not the one that was written; check the disk"):
        rows_of(store, keys, [400, 0])


def test_a_full_disk_is_a_sentence_and_rows_stay_whole(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "cannot keep more rows in" in result.stdout
    assert "run.store_path" in result.stdout


FULL = """
import resource, signal, sys, torch
from pathlib import Path
from nestpipe.embedding.store import SsdOptions, StoreLayout, open_store
from nestpipe.errors import CapacityError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
layout = StoreLayout(table_seeds=(1,), init_stds=(0.0,), dim=16, state_dim=0)
options = SsdOptions(folder=Path(sys.argv[1]), cache_bytes=100 * 88, segment_bytes=4096, depth=2)
store = open_store(layout, native=True, threads=1, ssd=options)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
for step in range(100):
    keys = torch.arange(500) + step * 500
    try:
        store.scatter(keys, [500], torch.full((500, 16), float(step)))
    except CapacityError as error:
        print(error)
        break
else:
    raise AssertionError("the limit was never met")
assert step > 3
assert store.num_rows() == [step * 500]
out = torch.empty(500, 16)
for done in range(step):
    assert store.gather(torch.arange(500) + done * 500, [500], out) == 0
    assert bool((out == done).all())
assert store.gather(keys, [500], out) == 500
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_forked_child_is_refused(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


FORK = """
import os, sys, torch
from pathlib import Path
from nestpipe.embedding.store import SsdOptions, StoreLayout, open_store

layout = StoreLayout(table_seeds=(1,), init_stds=(0.0,), dim=16, state_dim=0)
options = SsdOptions(folder=Path(sys.argv[1]), cache_bytes=0)
store = open_store(layout, native=True, threads=2, ssd=options)
child = os.fork()
if child == 0:
    try:
        store.num_rows()
    except ValueError as error:
        store.close()
        os._exit(0 if "belongs to the process" in str(error) else 1)
    os._exit(1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert store.num_rows() == [0]
"""


# Sizes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_memory_is_shared_so_that_every_table_has_as_many_rows_in_it(tmp_path, dtype):
    wide = StoreLayout(table_seeds=(1, 2), init_stds=(0.1, 0.1), dim=128, state_dim=128)
    narrow = StoreLayout(table_seeds=(1,), init_stds=(0.1,), dim=3, state_dim=0, dtype=dtype)
    of_wide, of_narrow = ssd_options(str(tmp_path), "1MB", [wide, narrow])
    rows = of_wide.cache_bytes / 2 / (1024 + FRAME_BYTES)
    assert rows == pytest.approx(of_narrow.cache_bytes / (16 + FRAME_BYTES), abs=1)
    assert of_wide.cache_bytes + of_narrow.cache_bytes == pytest.approx(1e6, abs=2)
    (share,) = ssd_options(str(tmp_path), "0.25", [wide])
    (of_two,) = ssd_options(str(tmp_path), "auto", [wide], sharing=2)
    assert of_two.cache_bytes == pytest.approx(share.cache_bytes, rel=0.5)


def test_rows_in_a_file_need_native_code(tmp_path):
    with pytest.raises(ConfigError, match="need native code"):
        open_store(LAYOUT, native=False, ssd=SsdOptions(folder=tmp_path, cache_bytes=0))


def test_direct_access_is_aligned_to_blocks(tmp_path):
    file, align = open_scratch(tmp_path)
    assert align in (0, 512, 4096)
    assert os.fstat(file).st_size == 0
    os.close(file)


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"depth": 65}])
def test_a_depth_without_threads_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="depth is"):
        opened(tmp_path, 0, **wrong)


def test_a_table_that_is_full_gives_back_what_it_took(tmp_path):
    of = StoreLayout(table_seeds=(1,), init_stds=(0.0,), dim=5, state_dim=1, max_rows=(600,))
    store = opened(tmp_path, 20, of)
    store.scatter(torch.arange(500), [500], torch.ones(500, WIDTH))
    for _ in range(50):
        with pytest.raises(CapacityError, match="may have 600"):
            store.scatter(torch.arange(300, 900), [600], torch.zeros(600, WIDTH))
    assert bool(rows_of(store, torch.arange(500), [500]).eq(1).all())
    assert store.traffic().file_bytes < 500 * 48 * 4
