"""A dense half that is sharded over all ranks by torch's FSDP: `parallel.dense = "sharded"`.

Each rank keeps its part of every parameter, of its gradient and of its optimizer state. Parameters
are gathered where they are used, and gradients are summed where they are kept. All of this happens
inside `dense`, in a process group of its own: one thread issues these collectives, in the order
that the schedule has for `dense`, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.comm.process_group import DistributedCommunicator
from nestpipe.errors import ConfigError
from nestpipe.models.protocol import Loss, NamesShardUnits


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
        first = _UseAll.apply(first, *(unit.get_parameter(name) for name in names))
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
