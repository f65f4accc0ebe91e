"""Where a device's time goes, kernel by kernel, as torch's profiler sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# The first group that has a part of the name takes the kernel.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attend", "bias_grad", "time_span"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "::mm", "::addmm", "bmm"),
    "block steps": ("add_norm", "norm_gate", "silu_forward", "silu_backward", "by_position"),
}
REST = "rest"


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All launches of one kernel in one call of the work."""

    name: str
    group: str
    ms: float
    calls: float


def kernel_times(
    work: Callable[[], None], device: torch.device, rounds: int = 3
) -> list[KernelTime]:
    """The kernels of `work`, the longest first; on the host, torch's operations."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    for _ in range(3):
        work()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(rounds):
            work()
        if on_gpu:
            torch.cuda.synchronize(device)
    found: list[KernelTime] = []
    for event in profiler.key_averages():
        if (us := _own_us(event, on_gpu)) > 0:
            name = str(event.key)
            found.append(KernelTime(name, group_of(name), us / 1e3 / rounds, event.count / rounds))
    return sorted(found, key=lambda kernel: -kernel.ms)


def _own_us(event: Any, on_gpu: bool) -> float:
    """What an event took itself; of a GPU, kernels and copies alone."""
    if not on_gpu:
        return float(event.self_cpu_time_total)
    return float(event.self_device_time_total) if event.device_type.name == "CUDA" else 0.0


def group_of(name: str) -> str:
    """What a kernel is for, by its name."""
    lower = name.lower()
    named = (group for group, parts in GROUPS.items() if any(part in lower for part in parts))
    return next(named, REST)


def group_ms(kernels: Sequence[KernelTime]) -> dict[str, float]:
    """Milliseconds of each group."""
    return {
        group: sum(kernel.ms for kernel in kernels if kernel.group == group)
        for group in (*GROUPS, REST)
    }
