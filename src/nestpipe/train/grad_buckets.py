"""Dense gradients summed over all GPUs while the last backward pass of a batch still runs.

A backward pass ends with the first layers; the gradients of the last ones are ready long before. So
they are sent bucket by bucket, on a stream and in a network of their own, beside rows and row
gradients. Every rank sends the buckets in the same order, whatever order its own pass has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nestpipe.comm.communicator import Communicator
from nestpipe.errors import RunError
from nestpipe.runtime.cuda import HIGH_PRIORITY

BUCKET_BYTES = 4 << 20
"""Parameters are added to a bucket until it has so many: small enough that the last one, which
nothing hides, is short; large enough that a message's fixed cost does not matter."""


class EarlySums:
    """The buckets of a model's parameters, and the batch whose gradients are on their way."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        comm: Communicator,
        device: torch.device,
    ) -> None:
        self._comm = comm
        self._buckets = buckets_of(parameters)
        self._bucket_of = {p: number for number, b in enumerate(self._buckets) for p in b}
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self._totals_summed = torch.cuda.Event()
        self._in_backward = False
        self._missing: list[int] = []
        """How many parameters of each bucket have no gradient yet."""
        self._sums: list[Tensor] = []
        """The buckets that were sent."""
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in parameters]

    def close(self) -> None:
        """Leave the parameters alone."""
        for hook in self._hooks:
            hook.remove()

    def sum_totals(self, totals: Tensor) -> None:
        """Sum a few numbers, for `wait_for_totals`; the tensor must live until then."""
        self._sum(totals)
        self._totals_summed.record(self._stream)

    def wait_for_totals(self) -> None:
        torch.cuda.current_stream().wait_event(self._totals_summed)

    @contextmanager
    def during_backward(self, *, early: bool) -> Iterator[None]:
        """Inside runs the backward pass after which gradients are complete.

        Without `early`, all buckets go in `finish`: the same sums, and nothing overlaps.
        """
        self._sums = []
        self._missing = [len(bucket) for bucket in self._buckets]
        self._in_backward = early
        try:
            yield
        finally:
            self._in_backward = False
        if early:  # parameters that this pass did not reach
            self._send_all()

    def _ready(self, parameter: Tensor) -> None:
        """Called by autograd, in its thread, when a parameter has its gradient."""
        if not self._in_backward:
            return
        assert isinstance(parameter, nn.Parameter)
        number = self._bucket_of[parameter]
        if number < len(self._sums):
            raise RunError(
                f"a parameter of shape {list(parameter.shape)} got a second gradient in a backward "
                "pass, after its sum had left; let the model's checkpointing have "
                "use_reentrant=False, or train with plan 'serial'"
            )
        self._missing[number] -= 1
        while len(self._sums) < len(self._buckets) and not self._missing[len(self._sums)]:
            self._send_next()

    def _send_all(self) -> None:
        while len(self._sums) < len(self._buckets):
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._sums)]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._sum(flat)
        self._sums.append(flat)

    def _sum(self, tensor: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._comm.all_reduce_dense(tensor)

    def finish(self) -> None:
        """Send what is left; then every parameter has its summed gradient, for this stream."""
        self._send_all()
        torch.cuda.current_stream().wait_stream(self._stream)
        for bucket, flat in zip(self._buckets, self._sums, strict=True):
            parts = torch.split(flat, [p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter)


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
