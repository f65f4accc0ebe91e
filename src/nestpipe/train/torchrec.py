"""Between TorchRec and here: tables, rows by index, optimizer state, and keyed jagged tensors.

TorchRec itself is imported only to make one of its own types. A row of theirs is found by its
index, a row of ours by its key: index i is key i, unless told which keys the indices stand for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nestpipe.checkpoint.export import part_slices
from nestpipe.config import Table
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Jagged
from nestpipe.train.trainer import Trainer

log = logging.getLogger("nestpipe.train")

# Shapes: N rows of a table, D their width, S numbers of state per row, B samples, F features

BAGS, ROWS = "embedding_bags", "embeddings"
"""Names of TorchRec's pooled and plain collections in a state dict."""
STATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "sgd": (),
    "rowwise_adagrad": ("momentum1",),
    "adagrad": ("momentum1",),
    "adam": ("momentum1", "momentum2"),
}
"""Fused optimizers of TorchRec by our name: what they call a row's state, in our order."""


ALIASES = {
    "momentum_1": "momentum1",
    "exp_avg": "momentum1",
    "sum": "momentum1",
    "momentum_2": "momentum2",
    "exp_avg_sq": "momentum2",
}
"""Other names of the same, by where the optimizer comes from."""


def tables_from_torchrec(collection: Any) -> list[Table]:
    """Our tables for an `EmbeddingBagCollection` or an `EmbeddingCollection`.

    New keys begin at zero: TorchRec's own first values are in the state dict to import.
    """
    bags = hasattr(collection, "embedding_bag_configs")
    if not bags and not hasattr(collection, "embedding_configs"):
        raise ConfigError(
            f"{type(collection).__name__} is no collection of TorchRec; give an "
            "EmbeddingBagCollection or an EmbeddingCollection"
        )
    configs = collection.embedding_bag_configs() if bags else collection.embedding_configs()
    return [
        Table(
            name=config.name,
            dim=config.embedding_dim,
            features=tuple(config.feature_names),
            pooling=_pooling(config) if bags else "none",
            init_std=0.0,
        )
        for config in configs
    ]


def _pooling(config: Any) -> Any:
    return "mean" if config.pooling.name == "MEAN" else "sum"


def import_torchrec(
    trainer: Trainer,
    state_dict: Mapping[str, Any],
    *,
    optimizer_state: Mapping[str, Any] | None = None,
    keys: Mapping[str, Tensor] | None = None,
) -> dict[str, int]:
    """Put the rows of a TorchRec state dict into a trainer's tables; how many, by table.

    `optimizer_state` is the `state_dict()` of a fused optimizer of the same kind as the trainer's.
    `keys` gives, by table, the key of each index. All ranks call it with the same.
    """
    found = _weights_in(state_dict)
    missing = sorted(set(trainer.table_names) - set(found))
    if missing:
        raise ConfigError(
            f"the state dict has no rows of {missing[0]!r}; it has {', '.join(found) or 'none'}"
        )
    counts: dict[str, int] = {}
    for table in trainer.table_names:
        weights_ND = _whole(table, found[table])
        state_NS = None
        if optimizer_state is not None:
            state_NS = _row_state(table, optimizer_state, trainer.row_optimizer.name)
        keys_N = _keys_of(table, len(weights_ND), keys)
        for part in part_slices(len(weights_ND), weights_ND.shape[1]):
            state = None if state_NS is None else state_NS[part]
            trainer.put_rows(table, keys_N[part], weights_ND[part].float(), state)
        counts[table] = len(weights_ND)
    return counts


def export_torchrec(
    trainer: Trainer,
    num_embeddings: Mapping[str, int],
    *,
    prefix: str = "",
    keys: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """A state dict that TorchRec's collections load: the rows of indices 0 to `num_embeddings`.

    Keys that were never trained have their first values. All ranks call it and get the same.
    """
    state: dict[str, Tensor] = {}
    of_ranks = cast(
        "list[dict[str, int]]", trainer.mesh.shards.all_gather_values(trainer.row_counts())
    )
    held = Counter[str]()
    for of_rank in of_ranks:
        held.update(of_rank)
    for group in trainer.groups:
        for table in group.tables:
            if table.name not in num_embeddings:
                raise ConfigError(f"num_embeddings has no {table.name!r}; say how many rows it has")
            count = num_embeddings[table.name]
            keys_N = _keys_of(table.name, count, keys)
            weights_ND = torch.empty(count, table.dim)
            for part in part_slices(count, table.dim):
                weights_ND[part] = trainer.rows_of(table.name, keys_N[part])
            _tell_left_out(table.name, held[table.name], count)
            kind = ROWS if table.pooling == "none" else BAGS
            state[f"{prefix}{kind}.{table.name}.weight"] = weights_ND
    return state


def _tell_left_out(table: str, held: int, count: int) -> None:
    """Rows that no index has would be lost without a word."""
    if held > count:
        log.warning(
            "table %r has %d rows and num_embeddings is %d, so some are left out; give more, or "
            "keys",
            table,
            held,
            count,
        )


def _weights_in(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Weights by table, whatever they are inside of."""
    found: dict[str, Any] = {}
    for name, value in state_dict.items():
        parts = name.split(".")
        if len(parts) >= 3 and parts[-1] == "weight" and parts[-3] in (BAGS, ROWS):
            if parts[-2] in found:
                raise ConfigError(f"the state dict has two tables {parts[-2]!r}; rename one")
            found[parts[-2]] = value
    return found


def _row_state(table: str, state_dict: Mapping[str, Any], optimizer: str) -> Tensor | None:
    """(N, S) what a fused optimizer keeps for each row of a table, in our order."""
    if optimizer not in STATE_NAMES:
        raise ConfigError(
            f"the state of {optimizer!r} has no form in TorchRec; use one of "
            f"{', '.join(STATE_NAMES)}, or import weights alone"
        )
    entries: dict[str, Any] = {}
    for name, state in state_dict.get("state", state_dict).items():
        if name.split(".")[-2:] == [table, "weight"]:
            entries = {key.rpartition(".")[2]: value for key, value in state.items()}
            entries = {ALIASES.get(key, key): value for key, value in entries.items()}
    columns: list[Tensor] = []
    for wanted in STATE_NAMES[optimizer]:
        if wanted not in entries:
            raise ConfigError(
                f"the optimizer state of {table!r} has no {wanted}, which {optimizer!r} keeps; "
                f"it has {', '.join(entries) or 'nothing'}"
            )
        value = _whole(table, entries[wanted]).float()
        columns.append(value.reshape(len(value), -1))
    return torch.cat(columns, 1) if columns else None


def _whole(table: str, value: Any) -> Tensor:
    """A plain tensor on the host; what is sharded must be gathered by those who have the shards."""
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"the weights of {table!r} are a {type(value).__name__}; gather them into one tensor, "
            "for example with torch.distributed.checkpoint"
        )
    return value.detach().cpu()


def _keys_of(table: str, count: int, keys: Mapping[str, Tensor] | None) -> Tensor:
    if keys is None or table not in keys:
        return torch.arange(count)
    if keys[table].shape != (count,) or keys[table].dtype != torch.int64:
        form = f"shape {tuple(keys[table].shape)} and type {keys[table].dtype}"
        raise ConfigError(
            f"keys of {table!r} have {form}; give a torch.int64 for each of its {count} rows"
        )
    return keys[table]


# Keyed jagged tensors: all features in one, feature after feature.


def jagged_from_kjt(kjt: Any) -> dict[str, Jagged]:
    """The features of a `KeyedJaggedTensor`, as `Batch.sparse` has them."""
    if kjt.weights_or_none() is not None:
        raise DataError(
            "the KeyedJaggedTensor has weights; pass them on as a column of their own, as a Jagged "
            "of floats, and pool with pool_rows"
        )
    lengths_FB = kjt.lengths().view(len(kjt.keys()), -1).to(torch.int64)
    values = torch.split(kjt.values().to(torch.int64), lengths_FB.sum(1).tolist())
    return {
        feature: Jagged(of, lengths_B)
        for feature, of, lengths_B in zip(kjt.keys(), values, lengths_FB, strict=True)
    }


def kjt_from_jagged(sparse: Mapping[str, Jagged], features: Sequence[str] = ()) -> Any:
    """A `KeyedJaggedTensor` of some features, or of all, in that order."""
    try:
        from torchrec import KeyedJaggedTensor  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            "this needs torchrec, which is not installed; pip install torchrec fbgemm-gpu"
        ) from None
    names = list(features or sparse)
    return KeyedJaggedTensor.from_lengths_sync(
        keys=names,
        values=torch.cat([sparse[name].values for name in names]),
        lengths=torch.cat([sparse[name].lengths for name in names]),
    )
