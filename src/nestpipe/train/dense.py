"""The dense half in training: the forms that it takes, and its optimizer.

As a CUDA graph: a step of a few milliseconds is decided by how fast the host launches kernels, and
a DLRM has two hundred of them. A graph replays all with one call, and the same kernels give the
same bits. A model says that it can be captured (`capturable = True`): its `dense` launches the same
kernels for equal shapes, never waits for the device, and the weight of its loss depends on shapes
alone.

Sharded (`parallel.dense = "sharded"`): torch's FSDP keeps a part of every parameter, of its
gradient and of its optimizer state on each rank. Parameters are gathered where they are used, and
gradients are summed where they are kept. All of this happens inside `dense`, in a process group of
its own: one thread issues these collectives, in the order that the schedule has for `dense`, which
is the same on every rank.

Compiled (`model.compile`): compiled code depends on the shapes it first meets, and torch keeps it
by function for the whole process. So each trainer has code of its own, made from its own batches in
their order, which no plan changes. Nothing is chosen by timing: two runs would get other kernels,
and other bits.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch, PackedColumns
from nestpipe.comm.communicator import Communicator
from nestpipe.comm.process_group import DistributedCommunicator
from nestpipe.config.sections import first_match, rates_of, refuse_idle
from nestpipe.errors import ConfigError, ModelError
from nestpipe.models.protocol import Loss, NamesShardUnits, RecModel, in_precision
from nestpipe.schedule import Plan
from nestpipe.train.config import DenseSettings
from nestpipe.train.gradients import GradBuckets

EAGER_FIRST = 3
"""Batches of a shape before it is captured: libraries choose their kernels meanwhile."""
MOST_GRAPHS = 4
"""Each keeps the memory of a step; batches of further shapes are launched kernel by kernel."""
MOST_FORMS = 16
"""Times that one function is compiled: sizes of 0 and 1 are forms of their own, and so are
training and evaluation."""

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay leaves behind, until the next one."""

    total: Tensor
    weight: float
    seen_gradients: list[Tensor]
    faults: Tensor | None
    """Whether a gradient of a parameter was not finite; None: not checked."""
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


# Sharded over ranks.


def shard_dense(model: nn.Module, comm: Communicator) -> ShardedDense | None:
    """The model with its parameters sharded over all ranks; None where there is nothing to cut."""
    if comm.size == 1 or not any(p.requires_grad for p in model.parameters()):
        return None
    if not isinstance(comm, DistributedCommunicator):
        raise ConfigError(
            "parallel.dense is 'sharded', which needs ranks that are processes; start them with "
            "--ranks or torchrun"
        )
    return ShardedDense(model, comm)


def refuse_overlap(plan: Plan, device: torch.device) -> None:
    """On GPUs collectives of the dense half and of the plan must have one order on all ranks."""
    if device.type == "cuda" and plan.shape.overlaps:
        raise ConfigError(
            f"parallel.dense is 'sharded' and pipeline.plan {plan.name!r}, whose collectives could "
            "meet those of the dense half on a GPU in another order on each rank; use plan "
            "'serial', or dense = 'replicated'"
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
        total = getattr(result, "total", None)  # the caller says what is wrong with it
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
    """A whole tensor, cut as another one of its shape is; ranks exchange nothing."""
    if not is_sharded(other) or tensor.shape != other.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    there = tensor.to(other.device)
    return distribute_tensor(there, other.device_mesh, other.placements, src_data_rank=None)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f}"


# Compiled.


class CompiledDense:
    """The method `dense` of a model; call it as that. The model itself stays as it is.

    The parameters, their names and `state_dict` are the model's own.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Refuses a machine that has no compiler for the device."""
        _refuse_without_compiler(device)
        self._name = type(model).__name__
        graphs = ", instead of CUDA graphs" if device.type == "cuda" else ""
        self.reason = f"dense half: compiled by torch.compile{graphs}, while the first batches wait"
        """What a run says of it."""
        # Sizes are symbols from the first batch on: jagged features differ from batch to batch.
        compile_: Any = torch.compile  # its declared forms leave out the last two parameters
        self._dense = compile_(
            getattr(model, "dense"),  # noqa: B009 - a method that `nn.Module` does not declare
            dynamic=True,
            # torch hashes headers by openssl, and fails where there is none.
            options={
                "deterministic": True,
                "cpp_cache_precompile_headers": shutil.which("openssl") is not None,
            },
            recompile_limit=MOST_FORMS,
            isolate_recompiles=True,
        )

    def __call__(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        # Not imported before they are needed: torch's compiler is large.
        from torch._dynamo import config, exc
        from torch.fx.experimental import _config

        shapes: Any = _config
        # Equal sizes of a first batch must not become one symbol: the next batch would need other
        # code, and which code a batch gets would depend on the batches before.
        with (
            shapes.patch(use_duck_shape=False),
            config.patch(fail_on_recompile_limit_hit=True),
        ):
            try:
                return self._dense(rows, batch)
            except exc.FailOnRecompileLimitHit as error:
                raise ModelError(
                    f"`dense` of {self._name} was compiled {MOST_FORMS} times and needs yet "
                    "another form; set model.compile = false, or let it branch on fewer sizes"
                ) from error
            except exc.TorchDynamoException as error:
                text = " ".join(str(error).split())[:200]
                raise ModelError(
                    f"`dense` of {self._name} cannot be compiled ({type(error).__name__}: {text}); "
                    "set model.compile = false"
                ) from error


def _refuse_without_compiler(device: torch.device) -> None:
    """Say what is missing before training begins, rather than in its first batch."""
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        raise ConfigError(
            f"model.compile is true, and torch {torch.__version__} cannot keep the code of two "
            "trainers apart; use torch 2.13 or newer, or set model.compile = false"
        )
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ConfigError(
                "model.compile is true but there is no Triton for this GPU; install triton, or set "
                "model.compile = false"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "model.compile is true but there is no C++ compiler; install g++, name one in CXX, or "
            "set model.compile = false"
        ) from None


# All of it together.


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseTraining:
    """The dense half as training runs it: its form, its optimizer, how its gradients travel."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Callable[[int], float]
    """What the rate of a step, counted from 1, is over its first one."""
    precision: str
    """Of products."""
    form: ShardedDense | CompiledDense | None = None
    """Another form of the model's `dense`; None: itself."""
    shards: ShardedDense | None = None
    """The same form, where parameters are sharded."""
    graphs: DenseGraphs | None = None
    """Replays of both passes, where the model can be captured."""
    buckets: GradBuckets | None = None
    """Hands gradients over where they have a network of their own."""


# The parameters, and what moves them.


def share_first_weights(model: nn.Module, comm: Communicator) -> None:
    """Every rank starts with the dense weights of rank 0, whatever its own random state was."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if comm.rank != 0:
                tensor.zero_()
            dense = tensor.contiguous()
            comm.all_reduce(dense)
            if dense is not tensor:
                tensor.copy_(dense)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that training moves."""
    return [p for p in model.parameters() if p.requires_grad]


def dense_optimizer(model: nn.Module, settings: DenseSettings) -> torch.optim.Optimizer:
    """The optimizer of the parameters that training moves; each group keeps its first rate."""
    groups = _parameter_groups(model, settings)
    parameters = [parameter for group in groups for parameter in group["params"]]
    # An optimizer without parameters is refused by torch; a model may well have none.
    if not parameters:
        groups = [{"params": [nn.Parameter(torch.zeros(0))], "lr": settings.lr}]
    options = _optimizer_options(settings, parameters)
    optimizer = _OPTIMIZERS[settings.optimizer](groups, **options)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


_OPTIMIZERS: Mapping[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def _optimizer_options(
    settings: DenseSettings, parameters: Sequence[nn.Parameter]
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if settings.optimizer in ("adam", "adamw"):
        options["betas"] = settings.betas
    if settings.eps and settings.optimizer != "sgd":
        options["eps"] = settings.eps
    # One launch for all parameters, where torch has it for the device.
    on_gpu = bool(parameters) and all(p.is_cuda and p.is_floating_point() for p in parameters)
    if on_gpu and settings.optimizer != "adagrad":
        options["fused"] = True
    return options


def _parameter_groups(model: nn.Module, settings: DenseSettings) -> list[dict[str, Any]]:
    """Parameters that share a rate and a decay, in the order of their first one."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    names, rates = [name for name, _ in named], rates_of(settings.rates)
    refuse_idle("dense.rates", rates, names, "parameter")
    refuse_idle("dense.no_decay", settings.no_decay, names, "parameter")
    kept = dict.fromkeys(settings.no_decay, 1.0)
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        lr = first_match(rates, name) or settings.lr
        decay = settings.weight_decay if first_match(kept, name) is None else 0.0
        found.setdefault((lr, decay), []).append(parameter)
    return [
        {"params": parameters, "lr": lr, "weight_decay": decay}
        for (lr, decay), parameters in found.items()
    ]


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Give every group of parameters its own rate times a number."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
