"""The two halves of a model: the keys that it looks up, and the loss from their rows.

A third method, `score`, is for serving. What a model returns is checked at every call.

A model of the user's own has a name, `package.module:factory`. The factory is a function or a
class. It gets `[model.config]` as a dict, or as the dataclass that annotates its first parameter,
and the columns of the data if it has a second one. It returns a model with a method `tables()`, or
the model and its tables.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, is_dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, get_type_hints, runtime_checkable

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.config import Table, build
from nestpipe.errors import ConfigError, ModelError, NestpipeError
from nestpipe.jagged import Jagged


def _no_tasks() -> dict[str, TaskLoss]:
    # Not `dict[str, TaskLoss]` itself: torch.compile cannot trace a call of it.
    return {}


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a (micro-)batch."""

    total: Tensor
    """Sum (not mean) of the samples' losses; the trainer divides by the global batch's weight."""
    weight: float
    """Weight of the sum: the number of samples, or of predicted positions."""
    predictions: Tensor | None = None
    """(P,) probabilities, for metrics; detached."""
    labels: Tensor | None = None
    """(P,) what the predictions should have been."""
    tasks: Mapping[str, TaskLoss] = field(default_factory=_no_tasks)
    """The parts of a loss for several tasks, by name, each with metrics of its own."""

    @classmethod
    def of_tasks(
        cls, tasks: Mapping[str, TaskLoss], weight: float, shares: Mapping[str, float] | None = None
    ) -> Loss:
        """The sum of the losses of several tasks, each times its share, 1 unless given."""
        if strange := [name for name in shares or () if name not in tasks]:
            raise ModelError(
                f"shares has {strange[0]!r}, which is no task; there are {', '.join(tasks)}"
            )
        parts = [of.total * (shares or {}).get(name, 1.0) for name, of in tasks.items()]
        total = torch.stack([part.reshape(()) for part in parts]).sum()
        return cls(total, weight, tasks=tasks)

    def measured(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Predictions and labels by task, as far as there are any; the name of the whole is ""."""
        every = {"": (self.predictions, self.labels)}
        every |= {name: (of.predictions, of.labels) for name, of in self.tasks.items()}
        return {
            name: (predictions, labels)
            for name, (predictions, labels) in every.items()
            if predictions is not None and labels is not None
        }


@dataclass(frozen=True, slots=True)
class TaskLoss:
    """The loss of one task."""

    total: Tensor
    """Sum of the samples' losses in this task."""
    weight: float
    """Weight of the sum when its mean is reported."""
    predictions: Tensor | None = None
    """(P,) probabilities, for metrics."""
    labels: Tensor | None = None
    """(P,) what the predictions should have been."""


@runtime_checkable
class RecModel(Protocol):
    """An ordinary `nn.Module` with two methods; nothing is traced or patched."""

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        """The keys of each feature."""
        ...

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        """The loss, given each feature's rows.

        `rows[feature]` is (T, D), a row per key in the order of the feature's values; or (B, D)
        where its table pools, the sum of each sample's rows.
        """
        ...


@runtime_checkable
class ScoringModel(Protocol):
    """A model that is served without a prefix: it scores candidates, a sample for each."""

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        """The keys of each feature; the batch has no labels."""
        ...

    def score(self, rows: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """(B,) a number for each sample, larger where it is better; rows are as for `dense`."""
        ...


def keys_of(model: Any, batch: Batch) -> Mapping[str, Jagged]:
    """The result of `sparse_keys`, checked for its types."""
    name = type(model).__name__
    with explained(f"`sparse_keys` of {name}", batch):
        keys = model.sparse_keys(batch)
    if not isinstance(keys, Mapping):
        raise ModelError(
            f"`sparse_keys` of {name} returned {kind_of(keys)}; return a dict of Jagged by feature"
        )
    # Columns of a packed batch were looked at when it was packed, off the issuing thread.
    if batch.packed is not None and batch.packed.has_lists(batch, keys):
        return keys
    agreeing = frozenset() if batch.packed is None else batch.packed.agreeing
    for feature, of in keys.items():
        if not isinstance(of, Jagged):
            raise ModelError(
                f"`sparse_keys` of {name} gives {kind_of(of)} for {feature!r}; give a Jagged, for "
                "one key a sample Jagged.one_each(keys)"
            )
        if of.values.dtype != torch.int64:
            raise ModelError(
                f"the keys of {feature!r} are {_short(of.values.dtype)}; keys are int64, so "
                "convert them"
            )
        own = feature in agreeing and of is batch.sparse[feature]
        if not own and int(of.lengths.sum()) != len(of.values):
            raise ModelError(
                f"the lengths of {feature!r} add up to {int(of.lengths.sum())} and there are "
                f"{len(of.values)} keys; make them agree"
            )
        if of.num_samples != batch.size:
            raise ModelError(
                f"`sparse_keys` of {name} gives {of.num_samples} lists of {feature!r} for "
                f"{batch.size} samples; give one for each"
            )
    return keys


DenseHalf = Callable[[Mapping[str, Tensor], Batch], Loss]
"""The signature of a model's `dense`."""


def loss_of(
    model: Any, rows: Mapping[str, Tensor], batch: Batch, dense: DenseHalf | None = None
) -> Loss:
    """The result of `dense`, or of another form of it, checked to be a loss to train on."""
    name = type(model).__name__
    with explained(f"`dense` of {name}", batch):
        loss = (dense or model.dense)(rows, batch)
    if not isinstance(loss, Loss):
        raise ModelError(
            f"`dense` of {name} returned {kind_of(loss)}; return Loss(total, weight) with the sum "
            "of the samples' losses"
        )
    if not isinstance(loss.total, Tensor) or loss.total.numel() != 1:
        shape = tuple(loss.total.shape) if isinstance(loss.total, Tensor) else type(loss.total)
        raise ModelError(
            f"`dense` of {name} returned a total of shape {shape}; return the sum over all samples"
        )
    if torch.is_grad_enabled() and batch.size and not loss.total.requires_grad:
        raise ModelError(
            f"the total of `dense` of {name} has no gradient; compute it from the rows or the "
            "model's weights"
        )
    if not isinstance(loss.weight, int | float):
        raise ModelError(
            f"`dense` of {name} returned {kind_of(loss.weight)} as weight; return a plain number, "
            "the samples that the total sums"
        )
    return loss


@torch.no_grad()
def refuse_means(
    model: Any,
    rows: Mapping[str, Tensor],
    batch: Batch,
    pooled: Collection[str],
    shards: DenseHalf | None = None,
) -> None:
    """Refuse a loss that is a mean: the losses of two halves must add up to that of both.

    The model is asked three times in evaluation mode, and nothing of it changes. `pooled` are the
    features with a row per sample. Losses that depend on the whole batch by design may pass. Of
    `shards` all ranks ask, also those with too few samples to learn from it.
    """
    half = batch.size // 2
    if half == 0 and shards is None:
        return
    parts = [batch.slice(0, 2 * half), batch.slice(0, half), batch.slice(half, 2 * half)]
    counts = [{f: len(k.values) for f, k in keys_of(model, part).items()} for part in parts]
    ends = [(2 * half, counts[0]), (half, counts[1]), (2 * half, counts[0])]
    losses: list[Loss] = []
    with _asked_only(model):
        for part, (size, count), first in zip(parts, ends, (False, False, True), strict=True):
            begin = {f: (half if f in pooled else counts[1][f]) if first else 0 for f in rows}
            end = {f: size if f in pooled else count[f] for f in rows}
            cut = {feature: of[begin[feature] : end[feature]] for feature, of in rows.items()}
            losses.append(loss_of(model, cut, part, shards))
    name = type(model).__name__
    _compare_halves(name, *losses)
    for task, measured in losses[0].measured().items():
        check_measured(name, task, *measured)


@torch.no_grad()
def unread_weights(
    model: Any,
    rows: Mapping[str, Tensor],
    batch: Batch,
    columns: Sequence[str],
    shards: DenseHalf | None = None,
) -> list[str]:
    """Those columns of weights, of samples or of keys, whose numbers change nothing of the loss.

    The model is asked with other ones, in evaluation mode, and nothing of it changes. Of `shards`
    all ranks ask equally often.
    """
    # Rows of a table that begins with zeros would hide their weights.
    rows = {feature: of.detach() + 1 for feature, of in rows.items()}
    found: list[str] = []
    with _asked_only(model):
        before = loss_of(model, rows, batch, shards) if columns else None
        for column in columns:
            dense, sparse = dict(batch.dense), dict(batch.sparse)
            if column in dense:
                dense[column] = values = _other_weights(dense[column])
            else:
                lists = sparse[column]
                values = _other_weights(lists.values)
                sparse[column] = Jagged(values, lists.lengths)
            after = loss_of(model, rows, Batch(batch.size, dense, sparse), shards)
            if before is not None and len(values) and torch.equal(before.total, after.total):
                found.append(column)
    return found


def _other_weights(weights: Tensor) -> Tensor:
    """Weights that differ from these also where a model divides by their mean."""
    return weights * 2 + torch.arange(1, len(weights) + 1, device=weights.device)


@contextmanager
def _asked_only(model: nn.Module) -> Generator[None]:
    """Inside, a model is in evaluation mode; what it draws and counts there is as if it had not."""
    was_training = model.training
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng():
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)
            for buffer, before in buffers:
                buffer.copy_(before)


def check_measured(name: str, task: str, predictions: Tensor, labels: Tensor) -> None:
    """Refuse predictions that no metric of clicks can be made of."""
    what = f"predictions of `dense` of {name}" + (f" for task {task!r}" if task else "")
    if predictions.ndim != 1 or predictions.shape != labels.shape:
        raise ModelError(
            f"{what} have shape {tuple(predictions.shape)} and their labels "
            f"{tuple(labels.shape)}; give both flat, one for each sample"
        )
    outside = predictions[(predictions < 0) | (predictions > 1)]
    if outside.numel():
        raise ModelError(
            f"{what} have {float(outside[0]):g}, which is no probability; give torch.sigmoid of "
            "the logits, or leave predictions out"
        )
    strange = labels[(labels < 0) | (labels > 1)]
    if strange.numel():
        raise ModelError(
            f"{what} have the label {float(strange[0]):g}, and metrics of clicks need 0 to 1; "
            "leave predictions out, or give labels of 0 and 1"
        )


def _compare_halves(name: str, both: Loss, one: Loss, other: Loss) -> None:
    if both.weight <= 0 and float(both.total) != 0:
        raise ModelError(
            f"`dense` of {name} gives weight {both.weight:g} for a loss of {float(both.total):g}; "
            "return the number of samples that the total sums"
        )
    weight = one.weight + other.weight
    if abs(weight - both.weight) > 1e-6 * max(abs(weight), 1.0):
        raise ModelError(
            f"`dense` of {name} gives weight {both.weight:g} for a batch, and {one.weight:g} and "
            f"{other.weight:g} for its halves; return the number of samples that the total sums"
        )
    total, first, second = (float(loss.total) for loss in (both, one, other))
    mean = (first * one.weight + second * other.weight) / (weight or 1.0)
    close = abs(total - mean) <= 1e-3 * abs(mean)
    if close and weight > 1 and abs(total - first - second) > 0.2 * abs(first + second):
        raise ModelError(
            f"`dense` of {name} returns a mean: {total:.6g} for a batch, and {first:.6g} and "
            f"{second:.6g} for its halves; return the sum, e.g. with reduction='sum'"
        )


@contextmanager
def explained(what: str, batch: Batch) -> Generator[None]:
    """Turn an exception of the user's code into one sentence with its place."""
    try:
        yield
    except Exception as error:
        full = isinstance(error, torch.OutOfMemoryError | MemoryError)
        full = full or "allocate memory" in str(error)
        if full or isinstance(error, NestpipeError):
            raise
        columns = f"; the batch has {_columns(batch)}" if isinstance(error, KeyError) else ""
        raise ModelError(
            f"{what} failed ({described_fault(error)}){columns or '; mend it'}"
        ) from error


def described_fault(error: BaseException) -> str:
    """An exception of the user's code on one line, with the innermost place in that code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_OWN)] or frames
    place = f", {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{place}"


_NOT_OWN = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep)
"""Prefixes of files that no user has written."""


def _columns(batch: Batch) -> str:
    return (
        f"sparse {', '.join(batch.sparse) or 'none'} and dense {', '.join(batch.dense) or 'none'}"
    )


def kind_of(value: object) -> str:
    """The type of a value, for a sentence."""
    return "None" if value is None else f"a {type(value).__name__}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@runtime_checkable
class KnowsWork(Protocol):
    """A model whose work follows from the lengths of its samples."""

    def step_flops(self, batch: Batch) -> Tensor:
        """(B,) float64, of a training step on each sample: the model's products, as docs say."""
        ...


@runtime_checkable
class NamesShardUnits(Protocol):
    """A model that names the units to gather at a time where the dense half is sharded."""

    def shard_units(self) -> Sequence[nn.Module]:
        """Modules that `dense` calls once each, whatever the batch; the rest is gathered as one."""
        ...


def in_precision(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The arithmetic of a dense half: products in bfloat16 by torch's autocast, or all float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def full_precision(x: Tensor) -> Tensor:
    """Precision of a loss: at least float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


SECTION = "model.config"
Factory = Callable[..., object]


def is_own(kind: str) -> bool:
    """Whether a kind names a factory rather than a shipped model."""
    return ":" in kind


def make_own(
    kind: str, config: Mapping[str, Any], columns: Sequence[object]
) -> tuple[nn.Module, list[Table]]:
    """The model that a factory makes, and its tables; every fault of it is a sentence."""
    factory = find_factory(kind, "model.kind")
    parameters = _positional(kind, factory)
    given: list[object] = [_config(kind, factory, parameters, config), columns]
    if not parameters and config:
        raise ConfigError(
            f"{SECTION} has {', '.join(config)}, but {kind} takes no parameter; give it one"
        )
    try:
        made = factory(*given[: len(parameters)])
    except NestpipeError:
        raise
    except Exception as error:
        raise ModelError(f"{kind} failed ({described_fault(error)}); mend it") from error
    return _checked(kind, made)


def find_factory(kind: str, key: str) -> Factory:
    """What a key of the config names; modules are looked for in the working directory, too."""
    module_name, _, name = kind.partition(":")
    parts = [*module_name.split("."), name]
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{key} is {kind!r}; write it as 'package.module:factory'")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{key} is {kind!r}, and {module_name} imports {error.name}, which is not "
                "installed; install it"
            ) from error
        raise ConfigError(
            f"{key} is {kind!r}, but there is no module {error.name!r} in the working "
            f"directory {here!r} or installed; check its name"
        ) from None
    except Exception as error:
        raise ModelError(
            f"{module_name} cannot be imported ({described_fault(error)}); mend it"
        ) from error
    factory = getattr(module, name, None)
    if callable(factory):
        return factory
    raise ConfigError(f"{key} is {kind!r}, but {_no_factory(module, module_name, name)}")


def _no_factory(module: object, module_name: str, name: str) -> str:
    if hasattr(module, name):
        return f"{name} is a {type(getattr(module, name)).__name__}; name a function or a class"
    near = get_close_matches(name, [known for known in vars(module) if known[0] != "_"], n=1)
    hint = f"did you mean {near[0]}?" if near else "check its name"
    return f"{module_name} has no {name}; {hint}"


def _positional(kind: str, factory: Factory) -> list[inspect.Parameter]:
    """The parameters that are given: the config, then the columns."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(factory).parameters.values())
    found = [one for one in parameters if one.kind in kinds]
    needed = [one for one in parameters if one.default is one.empty and one.kind in (*kinds, 3)]
    if len(needed) > 2 or any(one.kind == 3 for one in needed):
        raise ConfigError(
            f"{kind} needs {len(needed)} parameters; take the config, then the columns of the data"
        )
    return found[:2]


def _config(
    kind: str, factory: Factory, parameters: list[inspect.Parameter], config: Mapping[str, Any]
) -> object:
    """The section as the factory wants it."""
    if not parameters:
        return None
    where = factory.__init__ if inspect.isclass(factory) else factory
    try:
        wanted = get_type_hints(where).get(parameters[0].name)
    except Exception as error:
        raise ModelError(
            f"the annotations of {kind} cannot be read ({described_fault(error)})"
        ) from error
    if inspect.isclass(wanted) and is_dataclass(wanted):
        return build(wanted, config, SECTION)
    return dict(config)


def _checked(kind: str, made: object) -> tuple[nn.Module, list[Table]]:
    """The two parts of what a factory returned."""
    model, tables = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{kind} returned {kind_of(model)}; return an nn.Module, or one and its tables"
        )
    if not isinstance(model, RecModel):
        raise ModelError(
            f"{kind} returned a {type(model).__name__} without the methods `sparse_keys(batch)` "
            "and `dense(rows, batch)`; give it both"
        )
    if tables is None:
        declared: Any = getattr(model, "tables", None)
        if not callable(declared):
            raise ModelError(
                f"{kind} returned a {type(model).__name__} and no tables; return both, or give it "
                "a method `tables()`"
            )
        tables = declared()
    return model, _tables(kind, tables)


def _tables(kind: str, tables: object) -> list[Table]:
    listed: list[Table] = []
    for table in tables if isinstance(tables, Iterable) else [tables]:
        if isinstance(table, Table):
            listed.append(table)
        else:
            raise ModelError(
                f"the tables of {kind} hold {kind_of(table)}; list nestpipe.Table(name=..., "
                "dim=...)"
            )
    return listed
