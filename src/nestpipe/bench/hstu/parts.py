"""How fast HSTU is: attention alone beside torch's, the encoder, and a whole training step.

TFLOP/s count visible pairs once: two products forward, five backward, whatever is computed again.
On a GPU attention's are of a CUDA graph of several calls: what the device needs. An ordinary call
with a wait for its end stands beside, so that the host's share is seen.
The encoder and the step count three times the forward products (docs/training.md).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from nestpipe.comm import LocalCommunicator
from nestpipe.config import build, positive
from nestpipe.errors import ConfigError
from nestpipe.kernels.attention.fused import AttentionForm, train_attention
from nestpipe.kernels.attention.reference import NO_BIAS, RelativeBias
from nestpipe.kernels.block.fused import PointwiseForm
from nestpipe.models import Hstu, HstuConfig, Tokens
from nestpipe.models.protocol import in_precision
from nestpipe.train.job import JobConfig, make_job
from nestpipe.train.loggers import Summary, peak_tflops, summarise
from nestpipe.train.trainer import choose_device

# Shapes: B samples, T rows of all samples together, L rows of the longest, H heads, A width of a
# head, D model width

POSITIONS, TIME_BUCKETS = 64, 32
ZIPF_EXPONENT = 1.05
"""Of the lengths of a step's histories."""
GRAPH_CALLS = 10
"""Calls of attention in one CUDA graph."""
PEER_BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
"""Of torch's attention on a GPU; the fastest of them in this run is the yardstick."""
BACKWARD = 2.5
"""Products of the backward pass over those of the forward pass."""

PUBLISHED: Mapping[tuple[int, int], tuple[float, float]] = {
    (256, 64): (55, 67),
    (1024, 64): (207, 223),
    (4096, 64): (416, 383),
    (16384, 64): (477, 423),
    (256, 128): (102, 85),
    (1024, 128): (329, 276),
    (4096, 128): (528, 440),
    (16384, 128): (561, 486),
    (256, 256): (111, 86),
    (1024, 256): (409, 256),
    (4096, 256): (622, 360),
    (16384, 256): (637, 385),
}
"""By length and width of a head: TFLOP/s forward and backward that NVIDIA's recsys-examples state
for their CUTLASS kernel on one H100, 32 full sequences, 4 heads, no bias, not deterministic."""
PUBLISHED_STEP = "NVIDIA's recsys-examples state 31 % MFU for a step on 16 H100 with Zipf lengths"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class HstuCase:
    """One size of everything."""

    batch: int = 4
    """Sequences."""
    length: int = 4096
    """Rows of the longest."""
    lengths: Literal["full", "uniform", "zipf"] = "full"
    """All as long, from a sixteenth of it on, or mostly short with a few long ones."""
    heads: int = 4
    head_dim: int = 128
    blocks: int = 8
    dim: int = 1024
    bias: Literal["none", "both"] = "none"
    """Attention alone: without bias, or by position and by time."""
    kind: Literal["hstu", "fuxi"] = "hstu"
    attention: AttentionForm = "auto"
    pointwise: PointwiseForm = "auto"
    position_buckets: int = POSITIONS
    """Encoder and step: columns of the bias by position; 0: no bias."""
    precision: Literal["bf16", "fp32"] = "bf16"
    checkpoint_activations: bool = False
    num_items: int = 1_000_000
    """The step: different items."""
    rounds: int = 10
    """Timed rounds, after three that are not."""
    device: str = "auto"
    peak_tflops: float = 0.0

    def __post_init__(self) -> None:
        sizes = ("batch", "length", "heads", "head_dim", "blocks", "dim", "num_items", "rounds")
        for name in sizes:
            positive(name, getattr(self, name))
        if self.length < 16:
            raise ConfigError(f"length is {self.length}; give 16 or more rows")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def sample_lengths(self) -> Tensor:
        """How long each sequence is; the same every time, and one is as long as any."""
        if self.lengths == "full":
            return torch.full((self.batch,), self.length)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand(self.batch, generator=generator)
        shortest = self.length // 16
        if self.lengths == "zipf":  # as many of twice the length as a half of them
            drawn = (1 / (1 - drawn * (1 - 1 / 16)) - 1) / 15
        lengths_B = (shortest + drawn * (self.length - shortest)).long()
        lengths_B[0] = self.length
        return lengths_B


@dataclass(frozen=True, slots=True)
class CallSeconds:
    """Of one call: forward, both directions, and both as an ordinary call that the host awaits."""

    forward: float
    both: float
    awaited_forward: float
    awaited_both: float


@dataclass(frozen=True, slots=True)
class AttentionReading:
    """Attention alone, in TFLOP/s."""

    forward: float
    backward: float
    both: float
    form: str
    """What ran: `fused` or `plain`."""
    forward_ms: float
    both_ms: float
    call_forward_ms: float
    """Of an ordinary call, which the host starts and waits for."""
    call_both_ms: float
    peer: str | None
    """The fastest backend of torch's attention, forward and in both directions."""
    peer_forward: float | None
    """torch's scaled_dot_product_attention, causal, where all sequences are as long."""
    peer_both: float | None
    published: tuple[float, float] | None
    """Forward and backward that a peer states for this length and width."""


@dataclass(frozen=True, slots=True)
class EncoderReading:
    """Forward and backward of the encoder."""

    ms: float
    tflops: float
    mfu: float | None
    memory_gb: float | None
    """Most device memory at a time; None on the host."""
    kernels: tuple[KernelTime, ...] = ()
    """Where the device's time goes, where that was asked for."""


def measure_attention(case: HstuCase) -> AttentionReading:
    """Forward, and both directions through autograd."""
    device = choose_device(case.device)
    lengths_B = case.sample_lengths()
    total = int(lengths_B.sum())
    offsets_B = torch.tensor([0, *accumulate(lengths_B.tolist())], device=device)
    shape = (total, case.heads, case.head_dim)
    leaves = [_drawn(shape, device, case.dtype, seed) for seed in range(3)]
    bias = NO_BIAS
    if case.bias == "both":
        tables = [_drawn((case.heads, n), device) for n in (POSITIONS, TIME_BUCKETS)]
        times_T = torch.arange(total, device=device) * 600
        bias = RelativeBias(tables[0], tables[1], times_T)
        leaves += tables
    rule: dict[str, Any] = {"norm": case.length, "scale": case.head_dim**-0.5, "bias": bias}
    rule |= {"longest": case.length, "form": case.attention}

    def attend() -> Tensor:
        return train_attention(leaves[0], leaves[1], leaves[2], offsets_B, **rule)

    pairs = float((lengths_B.double() * (lengths_B + 1) / 2).sum())
    flops = 4.0 * pairs * case.heads * case.head_dim
    form = _form(attend, case.attention)
    # The plain form may wait for the device.
    graph = device.type == "cuda" and form != "plain"
    seconds = _both_directions(attend, leaves, device, case.rounds, graph=graph)
    peers = _torch_attention(case, device) if case.lengths == "full" else {}
    fastest = [
        min(peers, key=lambda name: getattr(peers[name], direction), default=None)
        for direction in ("forward", "both")
    ]
    rates = [
        None if name is None else products * flops / getattr(peers[name], direction) / 1e12
        for name, direction, products in zip(
            fastest, ("forward", "both"), (1, 1 + BACKWARD), strict=True
        )
    ]
    return AttentionReading(
        forward=flops / seconds.forward / 1e12,
        backward=BACKWARD * flops / max(seconds.both - seconds.forward, 1e-9) / 1e12,
        both=(1 + BACKWARD) * flops / seconds.both / 1e12,
        form=form,
        forward_ms=1e3 * seconds.forward,
        both_ms=1e3 * seconds.both,
        call_forward_ms=1e3 * seconds.awaited_forward,
        call_both_ms=1e3 * seconds.awaited_both,
        peer=" ".join(dict.fromkeys(name for name in fastest if name is not None)) or None,
        peer_forward=rates[0],
        peer_both=rates[1],
        published=PUBLISHED.get((case.length, case.head_dim)),
    )


def _form(attend: Callable[[], Tensor], asked: AttentionForm) -> str:
    """Which form ran, by what autograd says of its result."""
    node = attend().grad_fn
    while node is not None and type(node).__name__ in ("SliceBackward0", "AliasBackward0"):
        node = node.next_functions[0][0]
    if not type(node).__name__.startswith("_FusedAttention"):
        return "plain"
    return "hopper" if asked == "hopper" else "fused"


def _torch_attention(case: HstuCase, device: torch.device) -> dict[str, CallSeconds]:
    """The yardstick on the same sizes, by backend; on the host torch's choice."""
    shape = (case.batch, case.heads, case.length, case.head_dim)
    leaves = [_drawn(shape, device, case.dtype, seed) for seed in range(3)]

    def attend() -> Tensor:
        query, key, value = leaves
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    if device.type != "cuda":
        return {"torch": _both_directions(attend, leaves, device, case.rounds, graph=False)}
    found: dict[str, CallSeconds] = {}
    for backend in PEER_BACKENDS:
        try:
            with sdpa_kernel(backend):
                seconds = _both_directions(attend, leaves, device, case.rounds, graph=True)
        except RuntimeError:  # this backend has no such width or type
            continue
        found[backend.name.removesuffix("_ATTENTION").lower()] = seconds
    return found


def _both_directions(
    attend: Callable[[], Tensor],
    leaves: list[Tensor],
    device: torch.device,
    rounds: int,
    *,
    graph: bool,
) -> CallSeconds:
    grad = torch.ones_like(attend())

    def forward() -> None:
        with torch.no_grad():
            attend()

    def both() -> None:
        torch.autograd.grad(attend(), leaves, grad)

    awaited = [seconds_of(work, device, rounds) for work in (forward, both)]
    if not graph:
        return CallSeconds(*awaited, *awaited)
    return CallSeconds(*(graph_seconds_of(work, rounds) for work in (forward, both)), *awaited)


def graph_seconds_of(work: Callable[[], None], rounds: int) -> float:
    """Of one call on the device alone: the median of replays of a graph of several calls."""
    graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(aside)
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            work()
    taken: list[float] = []
    for number in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= 3:
            taken.append(start.elapsed_time(end) / 1e3 / GRAPH_CALLS)
    return statistics.median(taken)


def measure_encoder(case: HstuCase, *, profile: bool = False) -> EncoderReading:
    """Both directions of all blocks on random rows, as a training step has them."""
    device = choose_device(case.device)
    torch.manual_seed(0)
    encoder = Hstu(_encoder_config(case)).to(device)
    lengths_B = case.sample_lengths()
    tokens = Tokens(lengths_B.to(device), longest=int(lengths_B.max()))
    rows_TD = _drawn((int(lengths_B.sum()), case.dim), device)
    inputs = [rows_TD, *encoder.parameters()]

    def both() -> None:
        with in_precision(device, case.precision):
            encoded_TD = encoder(rows_TD, tokens)
        torch.autograd.grad(encoded_TD, inputs, torch.ones_like(encoded_TD))

    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = seconds_of(both, device, case.rounds)
    tflops = float(encoder.flops(lengths_B, torch.zeros_like(lengths_B)).sum()) / seconds / 1e12
    peak = _peak(case, device)
    memory_gb = torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else None
    kernels = kernel_times(both, device) if profile else []
    mfu = tflops / peak if peak else None
    return EncoderReading(1e3 * seconds, tflops, mfu, memory_gb, tuple(kernels))


def _encoder_config(case: HstuCase) -> HstuConfig:
    return HstuConfig(
        blocks=case.blocks,
        heads=case.heads,
        dim=case.dim,
        attention_dim=case.head_dim,
        value_dim=case.head_dim,
        max_len=case.length,
        kind=case.kind,
        attention=case.attention,
        pointwise=case.pointwise,
        position_buckets=case.position_buckets,
        checkpoint_activations=case.checkpoint_activations,
    )


def measure_step(case: HstuCase) -> Summary:
    """A whole step of a ranker: rows, both directions, updates; made-up histories, one rank."""
    shortest = case.length if case.lengths == "full" else case.length // 16
    world = {
        "flavour": "sequence",
        "samples": case.batch * (case.rounds + 3),
        "test_samples": 1,
        "num_items": case.num_items,
        "min_len": max(2, shortest),
        "max_len": case.length,
        "length_exponent": ZIPF_EXPONENT if case.lengths == "zipf" else 0.0,
    }
    encoder = {
        "kind": case.kind,
        "attention": case.attention,
        "pointwise": case.pointwise,
        "position_buckets": case.position_buckets,
        "checkpoint_activations": case.checkpoint_activations,
    }
    model = {"kind": "ranker", "dim": case.dim, "blocks": case.blocks, "heads": case.heads}
    model |= {"attention_dim": case.head_dim, "max_len": case.length, "encoder": encoder}
    run = {"batch": case.batch, "precision": case.precision, "device": case.device}
    config = build(JobConfig, {"data": {"synthetic": world}, "model": model, "run": run})
    job = make_job(config, LocalCommunicator())
    try:
        job.trainer.fit(job.train)
        peak = _peak(case, job.trainer.device)
        return summarise(job.trainer.trace, job.trainer.traffic, peak)
    finally:
        job.trainer.close()


def seconds_of(work: Callable[[], None], device: torch.device, rounds: int) -> float:
    """The median of some rounds, after three that warm up."""
    taken: list[float] = []
    for number in range(rounds + 3):
        _wait_for(device)
        start = time.perf_counter()
        work()
        _wait_for(device)
        if number >= 3:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(case: HstuCase, device: torch.device) -> float | None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return peak_tflops(name, case.precision, case.peak_tflops)


def _drawn(
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()


# Where a device's time goes, kernel by kernel, as torch's profiler sees it.


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
