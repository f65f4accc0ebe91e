"""Host memory that is used again: never twice at a time, never more than sizes ask for."""

import gc
import threading
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.kernels import host_memory
from nestpipe.kernels.host_memory import SMALLEST, HostMemory, block_size

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
