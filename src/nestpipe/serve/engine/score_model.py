"""`ScoreModel`: a trained model without a prefix as serving calls it: rows, then one forward pass.

It serves DLRM, logistic regression, and a model of the user's own with a method `score`. Every
candidate is a sample: its key is that of the candidate feature, and the rest of the request is the
same for all candidates, or has an entry for each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.checkpoint.folder import Checkpoint, open_noted
from nestpipe.config import Table, build
from nestpipe.data import MISSING, Column
from nestpipe.errors import CheckpointError, ConfigError, DataError, ModelError, RunError
from nestpipe.jagged import Jagged
from nestpipe.models import Dlrm, DlrmConfig, LogisticRegression, ScoringModel
from nestpipe.models.protocol import explained, is_own, keys_of, make_own
from nestpipe.serve.engine.rank_model import (
    HstuRankModel,
    ItemRows,
    choose_device,
    first_rows,
    jagged,
    read_newest,
    read_rows,
    refuse_non_finite,
)
from nestpipe.serve.types import KV, Context, Ids, PrefixItem, RankItem, RankModel, Scores, Values

# Shapes: B samples (candidates of all rankings), C candidates of one, T keys of all, D width

CANDIDATE_FEATURES = ("item", "items", "candidate", "candidates")
"""Features that candidates are taken to be keys of, unless the config names others."""
HISTORY, TIMES = "history", "times"


def open_model(
    path: Path | str, device: str = "auto", dtype: str = "float32", candidate_feature: str = ""
) -> RankModel:
    """The model of a checkpoint, or of the newest in a folder that verifies, ready to serve."""

    def read(found: Path) -> RankModel:
        checkpoint = open_noted(found)
        if checkpoint.manifest.model.get("kind") == "ranker":
            return HstuRankModel.from_checkpoint(found, device, dtype)
        return ScoreModel.from_checkpoint(checkpoint, device, dtype, candidate_feature)

    return read_newest(Path(path), read)


@dataclass(frozen=True, slots=True)
class ServedTable:
    """The rows of a table, and whether a sample gets their sum or mean."""

    rows: ItemRows
    pooling: str

    def look_up(self, keys: Jagged, keys_T: Ids) -> Tensor:
        """(T, D) a row for each key, or (B, D) where the table pools."""
        rows_TD = self.rows.rows(keys_T)
        if self.pooling == "none":
            return rows_TD
        samples_T = torch.repeat_interleave(torch.arange(keys.num_samples), keys.lengths.cpu())
        sums_BD = rows_TD.new_zeros(keys.num_samples, rows_TD.shape[1])
        sums_BD.index_add_(0, samples_T.to(rows_TD.device), rows_TD)
        if self.pooling == "sum":
            return sums_BD
        return sums_BD / keys.lengths.clamp(min=1).to(sums_BD)[:, None]


class ScoreModel:
    """Weights on one device; a ranking's scores depend on that ranking alone."""

    has_prefix = False
    dtype = "float32"

    def __init__(
        self,
        model: nn.Module,
        tables: Mapping[str, ServedTable],
        version: str,
        candidate_feature: str,
        columns: Sequence[Column] = (),
    ) -> None:
        """`tables` are by feature, `columns` those of training; use `from_checkpoint`."""
        assert isinstance(model, ScoringModel)
        self.model = model
        self.version = version
        self.candidate_feature = candidate_feature
        self.device = next(iter(tables.values())).rows.rows_KD.device
        self._tables = tables
        self._columns = {column.name: column for column in columns}

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, device: str, dtype: str, candidate_feature: str = ""
    ) -> ScoreModel:
        """The model that the manifest describes, with its weights and rows."""
        if dtype != "float32":
            raise ConfigError(
                f"dtype is {dtype!r}, which is for rankers with a prefix; use 'float32'"
            )
        where, place = repr(str(checkpoint.path)), choose_device(device)
        model, tables = _made(where, checkpoint), _tables_of(checkpoint)
        dense = {
            name.removeprefix("model."): tensor
            for name, tensor in checkpoint.dense().items()
            if name.startswith("model.")
        }
        _load(where, model, dense)
        digest = hashlib.blake2b(repr(checkpoint.manifest.model).encode(), digest_size=8)
        served: dict[str, ServedTable] = {}
        for table in tables:
            keys_K, rows_KD = _rows_of(where, checkpoint, table)
            first = first_rows(checkpoint.manifest, table.name)
            rows = ItemRows(keys_K, rows_KD.to(place), first)
            served |= dict.fromkeys(table.feature_names, ServedTable(rows, table.pooling))
            digest.update(np.ascontiguousarray(keys_K).data)
            digest.update(rows_KD.contiguous().numpy().data)
        for name in sorted(dense):
            digest.update(dense[name].contiguous().numpy().tobytes())
        model = model.to(place).eval().requires_grad_(False)
        version = f"step-{checkpoint.manifest.step:08d}-{digest.hexdigest()}"
        asked = candidate_feature or getattr(model, "candidate_feature", "")
        columns = [_column(one) for one in checkpoint.manifest.model.get("columns", ())]
        found = _candidate_feature(asked, list(served), where)
        return cls(model, served, version, found, columns)

    @torch.inference_mode()
    def rank(self, items: Sequence[RankItem]) -> list[Scores]:
        """Scores of the candidates of each item, whatever else is in the batch."""
        if not items:
            return []
        counts = [len(item.candidates_C) for item in items]
        batch = self._batch(items)
        try:
            rows = self._look_up(keys_of(self.model, batch))
            with explained(f"`score` of {type(self.model).__name__}", batch):
                scores_B = self.model.score(rows, batch.to(self.device))
        except ModelError as error:
            if isinstance(error.__cause__, KeyError):
                raise DataError(
                    f"the model reads {error.__cause__}, which the request does not have; give it "
                    "in features, values, candidate_features or candidate_values"
                ) from error
            raise
        found = torch.as_tensor(scores_B).float().cpu().numpy()
        if found.shape != (sum(counts),):
            raise RunError(
                f"`score` gave shape {found.shape} for {sum(counts)} samples; return a number each"
            )
        return [part.copy() for part in np.split(found, np.cumsum(counts)[:-1])]

    def _look_up(self, keys: Mapping[str, Jagged]) -> dict[str, Tensor]:
        rows: dict[str, Tensor] = {}
        for feature, of in keys.items():
            if feature not in self._tables:
                raise ModelError(
                    f"feature {feature!r} has no table; the tables have {', '.join(self._tables)}"
                )
            rows[feature] = self._tables[feature].look_up(of, of.values.numpy())
        return rows

    def _batch(self, items: Sequence[RankItem]) -> Batch:
        """All candidates of all rankings, a sample each, on the host."""
        parts = [_columns_of(item, self.candidate_feature) for item in items]
        for keys, values in parts:
            self._fit(keys, values)
        first_keys, first_values = parts[0]
        for keys, values in parts:
            # The engine then asks for each ranking by itself.
            if keys.keys() != first_keys.keys() or values.keys() != first_values.keys():
                raise DataError("rankings of one batch have different columns; give all the same")
        sparse = {
            name: jagged([one for keys, _ in parts for one in keys[name]], _CPU)
            for name in first_keys
        }
        dense = {
            name: _joined(name, [values[name] for _, values in parts]) for name in first_values
        }
        return Batch(sum(len(item.candidates_C) for item in items), dense, sparse)

    def _fit(self, keys: dict[str, list[Ids]], values: Mapping[str, Values]) -> None:
        """Make keys what training had, and refuse what it did not have.

        A feature with one key a sample had `MISSING` where there was none.
        """
        for name, lists in keys.items():
            if (column := self._columns.get(name)) is None or not column.single:
                continue
            most = max(map(len, lists), default=0)
            if most > 1:
                raise DataError(
                    f"feature {name} has {most} keys for a sample, and training had one; give one, "
                    "or none"
                )
            keys[name] = [one if len(one) else _NO_KEY for one in lists]
        for name, given in values.items():
            fields = column.fields if (column := self._columns.get(name)) else ()
            width = given.shape[1] if given.ndim == 2 else 1
            if fields and (given.ndim != 2 or width != len(fields)):
                raise DataError(
                    f"values.{name} has {width} {'number' if width == 1 else 'numbers'} for a "
                    f"sample, and the model reads {len(fields)}: {', '.join(fields[:8])}"
                )

    # What an engine asks of models that have a prefix.

    def prefix(self, items: Sequence[PrefixItem]) -> list[KV]:
        raise ConfigError("this model has no prefix; ask /v1/rank alone")

    def kv_bytes(self, length: int) -> int:
        return 0

    def to_host(self, kv: KV) -> KV:
        return kv

    def to_device(self, kv: KV) -> KV:
        return kv


_CPU = torch.device("cpu")
_NO_KEY = np.array([MISSING], np.int64)


def _columns_of(
    item: RankItem, candidate_feature: str
) -> tuple[dict[str, list[Ids]], dict[str, Values]]:
    """The columns of one ranking: keys by sample, and numbers."""
    count, context = len(item.candidates_C), item.context
    keys: dict[str, list[Ids]] = {HISTORY: [item.history.items_N] * count}
    if item.history.times_N is not None:
        keys[TIMES] = [item.history.times_N] * count
    keys |= {name: [shared] * count for name, shared in context.keys.items()}
    for name, of_each in context.candidate_keys.items():
        if len(of_each) != count:
            raise DataError(
                f"candidate_features.{name} has {len(of_each)} lists for {count} candidates; give "
                "one for each"
            )
        keys[name] = list(of_each)
    keys[candidate_feature] = list(item.candidates_C.reshape(-1, 1))
    return keys, _values_of(context, count)


def _values_of(context: Context, count: int) -> dict[str, Values]:
    values = {
        name: np.broadcast_to(shared, (count, *shared.shape)).copy()
        for name, shared in context.values.items()
    }
    for name, of_each in context.candidate_values.items():
        if len(of_each) != count:
            raise DataError(
                f"candidate_values.{name} has {len(of_each)} entries for {count} candidates; give "
                "one for each"
            )
        values[name] = of_each
    return values


def _joined(name: str, parts: list[Values]) -> Tensor:
    if len({part.shape[1:] for part in parts}) > 1:
        raise DataError(f"values.{name} of rankings differ in width; give all the same")
    return torch.from_numpy(np.concatenate(parts))


def _made(where: str, checkpoint: Checkpoint) -> nn.Module:
    """The model that a manifest describes, with fresh weights."""
    about: Mapping[str, Any] = checkpoint.manifest.model
    kind = str(about.get("kind", ""))
    if about.get("config", {}).get("weights") and not is_own(kind):
        raise ConfigError(
            f"{where} has a model whose keys have weights, which requests cannot give; train one "
            "without data.parquet.weights to serve"
        )
    try:
        if kind == "dlrm":
            return Dlrm(build(DlrmConfig, about["config"]))
        if kind == "logistic":
            config = about["config"]
            return LogisticRegression(tuple(config["features"]), int(config["dense_features"]))
        if is_own(kind):
            columns = tuple(_column(one) for one in about.get("columns", ()))
            model, _ = make_own(kind, about["config"], columns)
            return _with_score(where, model)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the model of {where} does not fit this program ({error}); use the one that wrote it"
        ) from None
    raise CheckpointError(
        f"{where} holds no model that can be served; train one with model.kind = 'ranker', 'dlrm' "
        "or your own that has a method `score`"
    )


def _with_score(where: str, model: nn.Module) -> nn.Module:
    if not isinstance(model, ScoringModel):
        raise ModelError(
            f"the model of {where} has no method `score(rows, batch)`; give it one to serve it"
        )
    return model


def _column(about: Mapping[str, Any]) -> Column:
    return Column(**{**about, "fields": tuple(about["fields"])})


def _tables_of(checkpoint: Checkpoint) -> list[Table]:
    """The tables as they were declared; older checkpoints do not say which features they have."""
    return [
        Table(
            name=about["name"],
            dim=int(about["dim"]),
            features=tuple(about.get("features", ())),
            pooling=about.get("pooling", "sum"),
        )
        for about in checkpoint.manifest.tables
    ]


def _load(where: str, model: nn.Module, dense: Mapping[str, Tensor]) -> None:
    for name, tensor in dense.items():
        refuse_non_finite(tensor, name, where)
    try:
        model.load_state_dict(dict(dense))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"the model of {where} does not fit ({reason}); use another checkpoint"
        ) from None


def _rows_of(where: str, checkpoint: Checkpoint, table: Table) -> tuple[Ids, Tensor]:
    try:
        keys_K, rows_KD = read_rows(checkpoint, table.name, table.dim)
    except ValueError as error:
        raise CheckpointError(f"{where} cannot be read ({error}); use another checkpoint") from None
    refuse_non_finite(rows_KD, f"the rows of {table.name}", where)
    return keys_K, rows_KD


def _candidate_feature(asked: str, features: list[str], where: str) -> str:
    """The feature whose keys are the candidates of a request."""
    if asked and asked not in features:
        raise ConfigError(
            f"candidate_feature is {asked!r}, but the tables of {where} have "
            f"{', '.join(features)}; name one of these"
        )
    found = asked or next((name for name in CANDIDATE_FEATURES if name in features), "")
    if not found and len(features) > 1:
        raise ConfigError(
            f"the features of {where} are {', '.join(features)}; say which one candidates are keys "
            "of, with --set candidate_feature=NAME"
        )
    return found or features[0]
