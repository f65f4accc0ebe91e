"""Host memory that is used again: never twice at a time, never more than sizes ask for."""

import gc
import threading
from itertools import pairwise
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.kernels import host_memory
from nestpipe.kernels.host_memory import SMALLEST, HostMemory, block_size
from nestpipe.kernels.library import library

BYTES = torch.uint8
SIZES = st.integers(SMALLEST, 40 * SMALLEST)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize


def test_memory_is_used_again_when_the_tensor_is_gone():
    memory = HostMemory()
    first = memory.empty((SMALLEST,), torch.float32)
    place = first.data_ptr()
    del first
    second = memory.empty((SMALLEST - 100,), torch.float32)  # a little less is as good
    assert second.data_ptr() == place
    assert second.shape == (SMALLEST - 100,)
    assert memory.mapped_bytes == block_size(4 * SMALLEST)


def test_a_view_keeps_its_memory():
    memory = HostMemory()
    whole = memory.empty((SMALLEST, 2), torch.float32)
    whole.fill_(1.0)
    views = [whole[5:, 1], whole.view(-1).view(torch.int32)[:7], whole.numpy()[3:]]
    del whole
    while views:
        other = memory.empty((SMALLEST, 2), torch.float32)
        other.fill_(2.0)
        assert float(views[0].flatten()[0]) in (1.0, float(0x3F800000))
        del other, views[0]
    assert memory.mapped_bytes == 2 * block_size(8 * SMALLEST)


def test_small_tensors_are_torchs_own():
    memory = HostMemory()
    small = memory.empty((3, 5), torch.int32)
    none = memory.empty((0, 1 << 40), torch.float32)
    assert (small.shape, small.dtype) == ((3, 5), torch.int32)
    assert none.shape == (0, 1 << 40)
    assert memory.mapped_bytes == 0


@given(st.lists(st.tuples(SIZES, st.integers(0, 5)), max_size=25))
def test_tensors_that_live_at_the_same_time_never_overlap(steps):
    memory = HostMemory()
    live: dict[int, torch.Tensor] = {}
    for size, place in steps:
        live.pop(place, None)
        live[place] = memory.empty((size,), BYTES)
        live[place][:1].fill_(place)
        live[place][-1:].fill_(place)
        spans = sorted(map(span, live.values()))
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        for number, tensor in live.items():
            assert int(tensor[0]) == int(tensor[-1]) == number
        assert memory.mapped_bytes >= sum(tensor.numel() for tensor in live.values())


@given(st.lists(SIZES, min_size=1, max_size=40))
def test_one_tensor_at_a_time_needs_no_more_than_twice_the_largest(sizes):
    memory = HostMemory()
    for size in sizes:
        memory.empty((size,), BYTES)
    assert memory.mapped_bytes <= 2 * block_size(max(sizes))


def test_batches_that_grow_leave_their_old_memory():
    memory = HostMemory()
    for step in range(60):
        size = SMALLEST * (4 + step)
        batch = [memory.empty((size,), BYTES) for _ in range(6)]
        assert memory.mapped_bytes <= 3 * 6 * block_size(size)
        del batch


def test_several_threads_share_the_memory():
    memory = HostMemory()
    failures: list[str] = []

    def work(number: int) -> None:
        rng = torch.Generator().manual_seed(number)
        for _ in range(60):
            size = int(torch.randint(SMALLEST, 4 * SMALLEST, (1,), generator=rng))
            mine = [memory.empty((size,), BYTES).fill_(number) for _ in range(2)]
            if any(int(tensor.min()) != number or int(tensor.max()) != number for tensor in mine):
                failures.append(f"thread {number} found what is not its own")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert memory.mapped_bytes <= 4 * 3 * 2 * block_size(4 * SMALLEST)


def test_what_the_collector_frees_comes_back_too():
    memory = HostMemory()
    circle: list[object] = [memory.empty((SMALLEST,), BYTES)]
    circle.append(circle)
    del circle
    gc.collect()
    memory.empty((SMALLEST,), BYTES)
    assert memory.mapped_bytes == block_size(SMALLEST)


def test_the_memory_of_the_process_gives_tensors_of_any_kind():
    for dtype in (torch.int64, torch.int32, torch.float32):
        tensor = host_memory.empty((600, 700), dtype, torch.device("cpu"))
        tensor.fill_(3)
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert int(tensor.sum()) == 3 * 600 * 700


# The guard of host memory reads the limits of its own control group and of those around it.

UNLIMITED_V1 = "9223372036854771712"


def group(
    folder: Path, limit: str, used: int, inactive: int = 0, active: int = 0, version: int = 2
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names, total = ("memory.max", "memory.current"), ""
    if version == 1:
        names, total = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon 1\n{total}inactive_file {inactive}\n{total}active_file {active}\n"
    )


def memory_left(root: Path, groups: str) -> int:
    (root / "groups").write_text(groups)
    return library().nestpipe_memory_left(str(root / "groups").encode(), str(root).encode())


def test_a_group_leaves_its_limit_less_what_is_used_and_cannot_be_dropped(tmp_path):
    group(tmp_path / "job", "1000", 700, inactive=50)
    assert memory_left(tmp_path, "0::/job\n") == 350
    group(tmp_path / "job", "1000", 900, inactive=50, active=600)  # files read in every epoch
    assert memory_left(tmp_path, "0::/job\n") == 750
    group(tmp_path / "job", "1000", 1700)
    assert memory_left(tmp_path, "0::/job\n") == 0


def test_the_tightest_of_nested_groups_counts(tmp_path):
    group(tmp_path / "slice", "500", 480)
    group(tmp_path / "slice/job", "max", 100)
    group(tmp_path / "slice/job/rank", "300", 100)
    assert memory_left(tmp_path, "0::/slice/job/rank\n") == 20
    group(tmp_path / "slice", "5000", 480)
    assert memory_left(tmp_path, "0::/slice/job/rank\n") == 200
    # A neighbour's limit is none of ours.
    group(tmp_path / "slice/job/other", "1", 1)
    assert memory_left(tmp_path, "0::/slice/job/rank\n") == 200


def test_a_container_that_sees_its_group_as_the_root_finds_the_limit_there(tmp_path):
    group(tmp_path, "900", 100)
    assert memory_left(tmp_path, "0::/\n") == 800
    assert memory_left(tmp_path, "0::/docker/1234\n") == 800


def test_groups_of_version_one_and_mixed_ones_count_too(tmp_path):
    group(tmp_path / "memory", UNLIMITED_V1, 10, version=1)
    group(tmp_path / "memory/pod", "4000", 1000, inactive=300, active=200, version=1)
    lines = "5:cpu,cpuacct:/elsewhere\n4:memory:/pod/rank\n0::/unit\n"
    assert memory_left(tmp_path, lines) == 3500
    group(tmp_path / "unified/unit", "77", 7)
    assert memory_left(tmp_path, lines) == 70


def test_without_any_limit_nothing_is_known(tmp_path):
    group(tmp_path, "max", 5)
    assert memory_left(tmp_path, "0::/\n") == -1
    assert memory_left(tmp_path, "") == -1
