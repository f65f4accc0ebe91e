"""The dense half in training: as a CUDA graph, or sharded over ranks, and its gradients.

A step of a few milliseconds is decided by how fast the host launches kernels: a DLRM has two
hundred of them. A graph replays all with one call, and the same kernels give the same bits. A model
says that it can be captured (`capturable = True`): its `dense` launches the same kernels for equal
shapes, never waits for the device, and the weight of its loss depends on shapes alone.

With `parallel.dense = "sharded"`, torch's FSDP keeps a part of every parameter, of its gradient and
of its optimizer state on each rank. Parameters are gathered where they are used, and gradients are
summed where they are kept. All of this happens inside `dense`, in a process group of its own: one
thread issues these collectives, in the order that the schedule has for `dense`, which is the same
on every rank.

Gradients are clipped by their global norm. Which row lies where depends on the plan, on the pool,
and on how tables are sharded. So a norm has the same bits in every order of rows and ranks. The
squares are summed exactly: each is a whole number of units of its binary exponent, and whole
numbers are added up exponent by exponent. Such sums have no rounding, and hence no order.

A backward pass ends with the first layers; the gradients of the last ones are ready long before.
The pass puts each complete bucket into a queue. The ops `totals` and `reduce` run alongside it, on
a thread and a stream of their own. They take from the queue and sum over all ranks, so every rank
starts these collectives in the same order, whatever order its own pass has.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch, PackedColumns
from nestpipe.comm.communicator import Communicator
from nestpipe.comm.process_group import DistributedCommunicator
from nestpipe.embedding.optimizers import sum_of_squares
from nestpipe.errors import ConfigError, RunError
from nestpipe.models.protocol import Loss, NamesShardUnits, RecModel, in_precision

EAGER_FIRST = 3
"""Batches of a shape before it is captured: libraries choose their kernels meanwhile."""
MOST_GRAPHS = 4
"""Each keeps the memory of a step; batches of further shapes are launched kernel by kernel."""

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay leaves behind, until the next one."""

    total: Tensor
    weight: float
    seen_gradients: list[Tensor]
    faults: Tensor | None
    """Whether a gradient of a parameter was not finite; None: nobody looked."""
    measured: Mapping[str, tuple[Tensor, Tensor]]
    """Predictions and labels by task."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    seen: list[Tensor]
    columns: Mapping[torch.dtype, Tensor]
    gradients: list[Tensor | None]
    result: Replayed


class DenseGraphs:
    """The graphs of one model, by the shapes of their inputs."""

    def __init__(
        self,
        model: nn.Module,
        drop_faults: Callable[[Sequence[Tensor]], list[Tensor]] | None,
        precision: str = "fp32",
    ) -> None:
        """`drop_faults`: looks at the gradients of parameters, as a part of the graph."""
        self._model = model
        self._precision = precision
        self._drop_faults = drop_faults
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._met: dict[Key, int] = {}
        self._captured: dict[Key, _Captured] = {}

    def replay(
        self, seen: Sequence[Tensor], sizes: Sequence[Mapping[str, int]], batch: Batch
    ) -> Replayed | None:
        """Run both passes; None: not yet, launch it kernel by kernel.

        `seen` and `sizes`: for each group of tables, what the model sees of it and how many rows
        each feature has. Gradients of parameters are set, those of rows are returned.
        """
        if batch.packed is None:
            return None
        key = _key(seen, sizes, batch.packed)
        met = self._met[key] = self._met.get(key, 0) + 1
        if met <= EAGER_FIRST:
            return None
        if key not in self._captured:
            if len(self._captured) == MOST_GRAPHS:
                return None
            self._captured[key] = self._capture(seen, sizes, batch)
        captured = self._captured[key]
        inputs = [*captured.seen, *captured.columns.values()]
        given = [*seen, *(batch.packed.parts[dtype] for dtype in captured.columns)]
        for static, now in zip(inputs, given, strict=True):
            static.detach().copy_(now)
        captured.graph.replay()
        for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
            parameter.grad = gradient
        return captured.result

    def _capture(
        self, seen: Sequence[Tensor], sizes: Sequence[Mapping[str, int]], batch: Batch
    ) -> _Captured:
        assert batch.packed is not None
        assert isinstance(self._model, RecModel)
        inputs = [part.clone().requires_grad_() for part in seen]
        columns = {dtype: part.clone() for dtype, part in batch.packed.parts.items()}
        there = PackedColumns(columns, batch.packed.layout).unpack(batch)
        for parameter in self._parameters:
            parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        # Other lanes' threads go on meanwhile, so only this one's calls are looked at.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            rows: dict[str, Tensor] = {}
            for part, of in zip(inputs, sizes, strict=True):
                rows.update(zip(of, torch.split(part, list(of.values())), strict=True))
            with in_precision(inputs[0].device, self._precision):
                loss = self._model.dense(rows, there)
            loss.total.backward()
            gradients = [parameter.grad for parameter in self._parameters]
            made = [gradient for gradient in gradients if gradient is not None]
            found = self._drop_faults(made) if self._drop_faults is not None else []
        of_rows = [torch.zeros_like(p) if p.grad is None else p.grad for p in inputs]
        faults = found[0] if found else None
        result = Replayed(loss.total.detach(), loss.weight, of_rows, faults, loss.measured())
        return _Captured(graph, inputs, columns, gradients, result)


def _key(seen: Sequence[Tensor], sizes: Sequence[Mapping[str, int]], packed: PackedColumns) -> Key:
    """Everything that decides which kernels run, and on how much."""
    layout = packed.layout
    return (
        *(layout.size, layout.dense, layout.sparse),
        torch.is_grad_enabled(),
        tuple(tuple(part.shape) for part in seen),
        tuple(tuple(of.items()) for of in sizes),
    )


class ShardedDense:
    """The method `dense` of a model whose parameters are sharded; call it as that.

    Names of parameters and of `state_dict` stay; what they hold is a rank's part. All ranks call it
    equally often.
    """

    def __init__(self, model: nn.Module, comm: DistributedCommunicator) -> None:
        """Shards the model's parameters in place; all ranks have the same ones until now."""
        # Not imported before it is needed: it is large.
        from torch.distributed.fsdp import FSDPModule, fully_shard

        _refuse_parameters(model)
        whole = sum(p.nbytes for p in model.parameters())
        mesh = comm.dense_mesh()
        for unit in model.shard_units() if isinstance(model, NamesShardUnits) else ():
            names = _trained_names(unit)
            # Registered before torch's own hook, which lets the gathered parameters go.
            unit.register_forward_hook(_use_all(names))
            fully_shard(unit, mesh=mesh)
        # torch has no type for what is a module of one class and FSDP's as well.
        root: Any = fully_shard(_DenseModule(model, _trained_names(model)), mesh=mesh)
        self._root = root
        self._modules: list[Any] = [of for of in root.modules() if isinstance(of, FSDPModule)]
        for module in self._modules:
            # A sum, not torch's mean: losses are divided by the weight of the global batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(_Collective(comm.all_gather_dense))
            module.set_custom_reduce_scatter(_Collective(comm.reduce_scatter_dense))
        held = sum(local(p).nbytes for p in model.parameters())
        self.reason = (
            f"dense half: sharded over {comm.size} ranks, {_megabytes(held)} of "
            f"{_megabytes(whole)} MB on the first"
        )
        """What a run says of it."""

    def __call__(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        return self.call("dense", rows, batch)

    def call(self, method: str, rows: Mapping[str, Tensor], batch: Batch) -> Any:
        """What another method of the model returns that needs its parameters."""
        return self._root(method, rows, batch)[1]

    def sum_gradients(self, *, complete: bool) -> None:
        """Whether the next backward pass ends a batch, so that its gradients are summed.

        Before that a rank keeps the gradients of its own micro-batches.
        """
        self._root.set_requires_gradient_sync(complete)

    @contextmanager
    def resharded(self) -> Generator[None]:
        """Afterwards the model has its shards again: without a backward pass torch keeps some."""
        try:
            yield
        finally:
            for module in self._modules:
                module.reshard()


class _DenseModule(nn.Module):
    """Methods of a model as the forward pass of a module: torch's hooks surround that."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self._names = names

    def forward(self, method: str, rows: Mapping[str, Tensor], batch: Batch) -> tuple[Any, Any]:
        """The total by itself, too: torch finds tensors in a tuple, and not in a `Loss`."""
        result = getattr(self.model, method)(rows, batch)
        total = getattr(result, "total", None)  # whoever called says what is wrong with it
        if not isinstance(total, Tensor) or not total.requires_grad:
            return None, result
        total = _UseAll.apply(total, *(self.model.get_parameter(name) for name in self._names))
        return total, replace(result, total=total)


class _UseAll(torch.autograd.Function):
    """A copy of a tensor whose backward pass gives some parameters a gradient of 0.

    Torch sums the gradients that there are. Where a rank lacks one that another has, their messages
    would not fit each other.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.zeros = [(p.shape, p.new_zeros(())) for p in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, *(zero.expand(shape) for shape, zero in ctx.zeros)


def _use_all(names: Sequence[str]) -> Callable[[nn.Module, Any, Any], Any]:
    """A hook after the forward pass of a unit: all its parameters count as used."""

    def hook(unit: nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        first, *others = output if isinstance(output, tuple) else (output,)
        parameters = [unit.get_parameter(name) for name in names]
        if isinstance(first, tuple):  # rows, and what is yet to be added to them
            first = type(first)(_UseAll.apply(first[0], *parameters), *first[1:])
        else:
            first = _UseAll.apply(first, *parameters)
        # Who changes a view in place loses torch's hook on it, so torch warns of each.
        others = [of.clone() if isinstance(of, Tensor) and of._is_view() else of for of in others]
        return (first, *others) if isinstance(output, tuple) else first

    return hook


class _Collective:
    """What torch calls to gather, or to sum: a method of the communicator."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **given: Any) -> Any:
        return self._call(output_tensor, input_tensor, given.get("async_op", False))


def _trained_names(module: nn.Module) -> list[str]:
    """Trained parameters that no unit inside has taken already."""
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not is_sharded(parameter)
    ]


def _refuse_parameters(model: nn.Module) -> None:
    """What torch's FSDP cannot shard, said before anything is."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, parameter in named:
        if parameter.ndim == 0:
            raise ConfigError(
                f"parallel.dense is 'sharded' but the parameter {name!r} is a single number, which "
                "cannot be cut; give it the shape (1,), or set dense = 'replicated'"
            )
    types = sorted({str(parameter.dtype).removeprefix("torch.") for _, parameter in named})
    if len(types) > 1:
        raise ConfigError(
            f"parallel.dense is 'sharded' but the model has parameters of {' and '.join(types)}; "
            "make them one type, or set dense = 'replicated'"
        )


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is torch's `DTensor`."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Any) -> Tensor:
    """This rank's part of a sharded tensor; any other is all here."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Any) -> Tensor:
    """All of a sharded tensor; every rank asks for it, in the same order."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def sharded_as(tensor: Tensor, other: Any) -> Tensor:
    """A whole tensor, cut as another one of its shape is; without a word to other ranks."""
    if not is_sharded(other) or tensor.shape != other.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    there = tensor.to(other.device)
    return distribute_tensor(there, other.device_mesh, other.placements, src_data_rank=None)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f}"


# Shapes: K rows, D weights of a row, N numbers, B bins

MANTISSA_BITS = 24
LOWEST = -149
"""The exponent below which no float32 is but 0; `frexp` gives 0 the exponent 0."""
BINS = 279
EPSILON = 1e-6
"""Added to the norm, as `torch.nn.utils.clip_grad_norm_` does."""


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


BUCKET_BYTES = 4 << 20
"""Parameters are added to a bucket until it has so many: small enough that the last one, which
nothing hides, is short; large enough that a message's fixed cost does not matter."""


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

        However it ends, the queue is closed: nobody waits for what a failed pass never makes.
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
