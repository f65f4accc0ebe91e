"""Gradients of a batch between backward and update: summed in buckets, checked, scaled, clipped.

A backward pass ends with the first layers; the gradients of the last ones are ready long before.
The pass puts each complete bucket into a queue. The ops `totals` and `reduce` run alongside it, on
a thread and a stream of their own. They take from the queue and sum over all ranks, so every rank
starts these collectives in the same order, whatever order its own pass has.

Gradients are clipped by their global norm. Which row lies where depends on the plan, on the pool,
and on how tables are sharded. So a norm has the same bits in every order of rows and ranks. The
squares are summed exactly: each is a whole number of units of its binary exponent, and whole
numbers are added up exponent by exponent. Such sums have no rounding, and hence no order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.comm.communicator import Communicator
from nestpipe.embedding.optimizers import sum_of_squares
from nestpipe.errors import RunError
from nestpipe.kernels.index.segments import LARGEST
from nestpipe.kernels.library import native_wanted
from nestpipe.kernels.rows.native import Gradients, all_within
from nestpipe.kernels.rows.segments import Segments, empty_rows, sum_segments

# Shapes: K rows, D weights of a row, N numbers, B bins

BUCKET_BYTES = 4 << 20
"""A bucket takes parameters until it is this large: small enough that the last one, which nothing
hides, is short; large enough that a message's fixed cost does not matter."""
MANTISSA_BITS = 24
LOWEST = -149
"""The exponent below which no float32 is but 0; `frexp` gives 0 the exponent 0."""
BINS = 279
EPSILON = 1e-6
"""Added to the norm, as `torch.nn.utils.clip_grad_norm_` does."""


# Dense gradients, summed over ranks bucket by bucket.


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor, and the moment at which the stream that makes it has done so."""

    tensor: Tensor
    event: torch.cuda.Event | None

    @classmethod
    def now(cls, tensor: Tensor) -> _Made:
        event = None
        if tensor.is_cuda:
            event = torch.cuda.Event()
            event.record()
        return cls(tensor, event)

    def here(self) -> Tensor:
        """The tensor, ready for the current stream."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        return self.tensor


class GradBuckets:
    """The buckets of a model's parameters, and the batch whose gradients are on their way."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._buckets = buckets_of(parameters)
        self._bucket_of = {p: number for number, b in enumerate(self._buckets) for p in b}
        self._queue: SimpleQueue[_Made | None] = SimpleQueue()
        """What `dense` has made of a batch: its totals, then its buckets, then None."""
        self._in_backward = False
        self._missing: list[int] = []
        """How many parameters of each bucket have no gradient yet."""
        self._sent: list[Tensor] = []
        """The buckets that were handed over."""
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in parameters]

    def close(self) -> None:
        """Leave the parameters alone."""
        for hook in self._hooks:
            hook.remove()

    def begin_run(self) -> None:
        """Forget what a run that failed has left."""
        self._queue = SimpleQueue()

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Inside, `dense` hands over what it makes.

        However it ends, the queue is closed: `reduce` does not wait for what a failed pass lacks.
        """
        self._sent = []
        self._missing = [len(bucket) for bucket in self._buckets]
        queue = self._queue
        try:
            yield
        finally:
            queue.put(None)

    def hand_over_totals(self, totals: Tensor) -> None:
        """Let `totals` sum a few numbers in place; the tensor must live until then."""
        self._queue.put(_Made.now(totals))

    @contextmanager
    def during_backward(self, *, as_they_come: bool) -> Iterator[None]:
        """Inside runs the backward pass after which gradients are complete.

        Without `as_they_come`, all buckets are handed over at its end.
        """
        self._in_backward = as_they_come
        try:
            yield
        finally:
            self._in_backward = False
        # Also parameters that this pass did not reach.
        while len(self._sent) < len(self._buckets):
            self._send_next()

    def take_totals(self) -> Tensor | None:
        """Wait for the totals; None where the pass has failed."""
        made = self._queue.get()
        if made is None:
            self._queue.put(None)  # `take_buckets` comes to it, too
            return None
        return made.here()

    def take_buckets(self) -> Iterator[Tensor]:
        """Wait for each bucket in turn, to be summed in place."""
        while (made := self._queue.get()) is not None:
            yield made.here()

    def summed(self) -> dict[nn.Parameter, Tensor]:
        """The summed gradient of each parameter, once `reduce` has ended for this stream."""
        found: dict[nn.Parameter, Tensor] = {}
        for bucket, flat in zip(self._buckets, self._sent, strict=True):
            parts = torch.split(flat, [p.numel() for p in bucket])
            found |= {p: part.view_as(p) for p, part in zip(bucket, parts, strict=True)}
        return found

    def set_gradients(self) -> None:
        """Give every parameter its summed gradient."""
        for parameter, gradient in self.summed().items():
            parameter.grad = gradient
        self._sent = []

    def _ready(self, parameter: Tensor) -> None:
        """Called by autograd, in its thread, when a parameter has its gradient."""
        if not self._in_backward:
            return
        assert isinstance(parameter, nn.Parameter)
        number = self._bucket_of[parameter]
        if number < len(self._sent):
            raise RunError(
                f"a parameter of shape {list(parameter.shape)} got a second gradient in a backward "
                "pass, after its sum had left; let the model's checkpointing have "
                "use_reentrant=False, or train with plan 'serial'"
            )
        self._missing[number] -= 1
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._sent)]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._sent.append(flat)
        self._queue.put(_Made.now(flat))


def buckets_of(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The last parameters first, as a backward pass has them; each kind of number by itself."""
    buckets: list[list[nn.Parameter]] = []
    size = BUCKET_BYTES
    for parameter in reversed(parameters):
        if size >= BUCKET_BYTES or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets


# Gradients that are NaN or inf.


def drop_dense_faults(
    gradients: Sequence[Tensor], *, clip: bool, known: Tensor | None = None
) -> list[Tensor]:
    """Zero all gradients where one is not finite, or only its numbers; whether, as a count.

    On the host nothing is returned, or touched, where all are finite. `known`: what all ranks
    together found, where each has shards of its own.
    """
    some = [gradient for gradient in gradients if gradient.numel()]
    if known is None and not some:
        return []
    bad = not_finite(some, some[0].device) if known is None else known > 0
    if bad.device.type == "cpu" and not bool(bad):
        return []
    for gradient in some:
        if clip:
            gradient.masked_fill_(~(gradient.abs() <= LARGEST), 0.0)
        else:
            gradient.masked_fill_(bad, 0.0)
    return [bad]


def not_finite(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether one of these has a number that is NaN or inf, on the device."""
    some = [gradient for gradient in gradients if gradient.numel()]
    if not some:
        return torch.zeros((), dtype=torch.bool, device=device)
    norms = torch._foreach_norm(some, math.inf)  # pyright: ignore[reportPrivateImportUsage]
    largest = torch.stack([norm.float() for norm in norms])
    return ~(largest <= LARGEST).all()


def drop_row_faults(sums: dict[int, Gradients], number: int, *, clip: bool) -> list[Tensor]:
    """Zero the gradient of each row where it is not finite, or only its numbers; how many rows.

    Works on the gradients of one group of tables; on the host only where one is not finite.
    """
    rows = [part for part in sums[number].rows if part.numel()]
    if not rows or (rows[0].device.type == "cpu" and all(map(_is_finite, rows))):
        return []
    sums_KD = summed_rows(sums[number])
    sums[number] = Gradients([sums_KD], None, None)
    bad_K = ~(torch.linalg.vector_norm(sums_KD, math.inf, dim=1) <= LARGEST)
    bad = ~(sums_KD.abs() <= LARGEST) if clip else bad_K[:, None]
    sums_KD.masked_fill_(bad, 0.0)
    return [bad_K.sum()]


def _is_finite(tensor: Tensor) -> bool:
    if native_wanted():
        return all_within(tensor, LARGEST)
    return bool(torch.linalg.vector_norm(tensor, math.inf) <= LARGEST)


def summed_rows(gradients: Gradients) -> Tensor:
    """The gradient of each row; the update would sum those of a single micro-batch by itself."""
    if gradients.terms_T is None:
        return gradients.rows[0]
    segments = Segments(gradients.terms_T, gradients.ends_K1)
    dim = gradients.rows[0].shape[1]
    sums_KD = empty_rows(len(segments), dim, gradients.rows[0].device)
    sum_segments(segments, gradients.rows, [sums_KD])
    return sums_KD


# What gradients are divided by, and the norm that they are clipped by.


def grad_scales(totals: Tensor) -> Tensor:
    """One over each of a batch's totals; samples may weigh nothing, and then nothing moves.

    Made by the op that uses it, on its stream: memory of another stream's could be taken again
    before this one has read it.
    """
    return torch.where(totals == 0, 1.0, totals).reciprocal_()


def grad_scale(weight: float) -> float:
    """The scale of a weight that the host knows, rounded as `grad_scales` rounds it."""
    return float(np.float32(1.0) / np.float32(weight or 1.0))


def fill_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Give parameters that the pass did not reach a gradient of 0."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def split_gradients(parameters: list[nn.Parameter], flat: Tensor) -> None:
    """Make the parts of one flat tensor the gradients of the parameters."""
    start = 0
    for parameter in parameters:
        part = flat[start : start + parameter.numel()]
        parameter.grad = part.view_as(parameter)
        start += parameter.numel()


def global_norm(
    dense: Sequence[Tensor],
    rows: Sequence[Tensor],
    comm: Communicator | None,
    device: torch.device,
    of_shards: Communicator | None = None,
) -> Tensor:
    """(1,) float32: the norm of dense gradients, which all ranks have, and of rows that each owns.

    `rows`: (K, D) gradients of the rows that this rank owns, over `comm`. Waits for no device. Over
    `of_shards` each rank has other parts of the dense gradients, all together once.
    """
    counts_B = torch.zeros(BINS, dtype=torch.int64, device=device)
    for gradients_KD in rows:
        if gradients_KD.numel():
            count_exactly(counts_B, sum_of_squares(gradients_KD).view(-1))
    if comm is not None:
        comm.all_reduce(counts_B)
    dense_B = torch.zeros_like(counts_B)
    for gradient in dense:
        if gradient.numel():
            # A tree of halves: its order depends on the size alone, not on threads.
            count_exactly(dense_B, sum_of_squares(gradient.float().reshape(1, -1)).view(-1))
    if of_shards is not None:
        of_shards.all_reduce(dense_B)
    counts_B += dense_B
    return exact_total(counts_B).sqrt().float()


def count_exactly(counts_B: Tensor, numbers_N: Tensor) -> None:
    """Add float32 numbers, none negative, to counts of units by exponent."""
    most = torch.finfo(torch.float32).max
    mantissa_N, exponent_N = torch.frexp(numbers_N.clamp(max=most))
    units_N = mantissa_N.double().mul_(2**MANTISSA_BITS).long()
    counts_B.index_add_(0, (exponent_N - LOWEST).long(), units_N)


def exact_total(counts_B: Tensor) -> Tensor:
    """(1,) float64: the sum of all numbers that were counted."""
    parts_B = counts_B.double() * _units(counts_B.device)
    while len(parts_B) > 1:
        half = (len(parts_B) + 1) // 2
        parts_B = torch.cat(
            [parts_B[: len(parts_B) - half] + parts_B[half:], parts_B[len(parts_B) - half : half]]
        )
    return parts_B


@cache
def _units(device: torch.device) -> Tensor:
    """(B,) what one unit of each bin is worth."""
    worth = [2.0 ** (LOWEST + b - MANTISSA_BITS) for b in range(BINS)]
    return torch.tensor(worth, dtype=torch.float64, device=device)


def clip_factor(norm: Tensor, most: float) -> Tensor:
    """What gradients of that norm are multiplied by, so that it is at most so much."""
    return (most / (norm + EPSILON)).clamp(max=1.0)
