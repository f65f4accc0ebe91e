"""The manifest of a checkpoint: every file with its size and hash, and what the run stands at.

It is written last, and its own text carries a hash. A checkpoint without a manifest that reads
back, or with a file more, less or other than it says, is not used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nestpipe.checkpoint.disk import HASH, WrittenFile, damaged, read_bytes, write_bytes
from nestpipe.errors import CheckpointError

FORMAT = 2
MANIFEST = "manifest.json"
OLD_MANIFEST = "run.json"
"""That of format 1, which has no hashes."""
DENSE = "dense.safetensors"
MOST_BYTES = 1 << 28
"""Of a manifest; a longer one is none."""
_FILE_NAME = re.compile(r"(dense|(rows|gone|waiting)-\w+-\d+-\d+)\.safetensors", re.ASCII)

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    num_bytes: int
    hash: str
    """Empty in format 1."""
    table: str = ""
    """For a file of keys, with rows or without: their table ..."""
    shard: int = 0
    """... the shard that wrote them ..."""
    rows: int = 0
    """... and how many they are."""

    @classmethod
    def of(
        cls, written: WrittenFile, *, table: str = "", shard: int = 0, rows: int = 0
    ) -> FileEntry:
        """The entry of a file that was just written."""
        return cls(
            num_bytes=written.num_bytes, hash=written.hash, table=table, shard=shard, rows=rows
        )

    @property
    def written(self) -> WrittenFile | None:
        return WrittenFile(self.num_bytes, self.hash) if self.hash else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Parent:
    """The checkpoint that an increment goes on from."""

    name: str
    hash: str
    """Of its manifest, so that no other of that name is taken for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    """Batches trained."""
    epoch: int = 0
    position: int = 0
    """Batches of the epoch trained ..."""
    samples: int = 0
    """... and its samples: here the data goes on, whatever the batch size."""
    cursor: dict[str, int] = field(default_factory=dict[str, int])
    """Of a stream: the offset of each partition after the last trained sample."""
    optimizer: str = ""
    """The row optimizer, whose state the rows carry."""
    dense_optimizer: str = ""
    ranks: int = 1
    shards: int = 1
    """Ranks that each table was spread over; replicas have no files of their own."""
    tables: tuple[Json, ...] = ()
    """Name, dim and dtype of each table, and its rows over all shards."""
    model: Json = field(default_factory=dict[str, Any])
    """What serving needs to make the model; empty where it cannot be served."""
    first_rows: Json = field(default_factory=dict[str, Any])
    """What first values of a table's rows follow from."""
    config: Json = field(default_factory=dict[str, Any])
    """The config of the job; empty where it was made in Python."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Of the latest evaluation."""
    lifecycle: Json = field(default_factory=dict[str, Any])
    """What row policies go on with; empty where no table has one."""
    choices: tuple[Json, ...] = ()
    """Of an adaptive run: its settings so far, each from a step on."""
    created: float = 0.0
    """Seconds since 1970."""
    parent: Parent | None = None
    """None: all rows are here; else only those written since the parent."""
    files: dict[str, FileEntry] = field(default_factory=dict[str, FileEntry])
    hash: str = ""
    """Of the text; empty in format 1."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.files.values())

    @property
    def num_rows(self) -> int:
        """Rows of all tables after a restore."""
        return sum(int(table.get("rows", 0)) for table in self.tables)


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest of a folder whose files are all there; returns it with its hash."""
    body = asdict(manifest)
    del body["hash"]
    text = _render(body)
    write_bytes(folder / MANIFEST, iter([text]))
    return _built({**body, "hash": hash_of_body(body)})


def _render(body: Json) -> bytes:
    whole = {"format": FORMAT, "hash": hash_of_body(body), **body}
    return json.dumps(whole, indent=1, allow_nan=False).encode() + b"\n"


def hash_of_body(body: Json) -> str:
    """The hash that a manifest carries of its own text."""
    return hashlib.new(HASH, json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint, of this format or the one before; refuses a damaged one."""
    path = checkpoint / MANIFEST
    if not path.exists():
        return _read_old(checkpoint)
    if path.stat().st_size > MOST_BYTES:
        raise damaged(path, "it is too long")
    text = bytes(read_bytes(path, None))
    whole = _parsed(path, text)
    if whole.pop("format", None) != FORMAT:
        raise CheckpointError(
            f"{str(checkpoint)!r} is not a checkpoint of format {FORMAT}; use the program that "
            "wrote it"
        )
    said = whole.pop("hash", None)
    # The text itself must be the one that was written: a flipped bit in a space is damage, too.
    if said != hash_of_body(whole) or text != _render(whole):
        raise damaged(path, "its contents are not those that were written")
    try:
        return _built({**whole, "hash": said})
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise damaged(path, f"it does not read as a manifest ({error})") from None


def _parsed(path: Path, text: bytes) -> Json:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is no JSON ({error})") from None
    if not isinstance(whole, dict):
        raise damaged(path, "it is no JSON object")
    return whole


_NUMBERS = ("step", "epoch", "position", "samples", "ranks", "shards")
_SECTIONS = ("model", "first_rows", "config", "metrics", "files")


def _built(body: Json) -> Manifest:
    for name in _NUMBERS:
        if type(body[name]) is not int:
            raise ValueError(f"{name} is {body[name]!r}")
    for name in _SECTIONS:
        if not isinstance(body[name], dict):
            raise ValueError(f"{name} is {body[name]!r}")
    files = {_checked_name(name): FileEntry(**entry) for name, entry in body["files"].items()}
    parent = Parent(**body["parent"]) if body["parent"] else None
    if parent is not None and Path(parent.name).name != parent.name:
        raise ValueError(f"its parent is called {parent.name!r}")
    lists = {name: tuple(body.get(name, ())) for name in ("tables", "choices")}
    return Manifest(**{**body, "files": files, "parent": parent, **lists})


def _checked_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"it names a file {name!r}")
    return name


def _read_old(checkpoint: Path) -> Manifest:
    """A checkpoint of format 1: what its files are is known from their names alone."""
    path = checkpoint / OLD_MANIFEST
    if not path.exists():
        raise CheckpointError(
            f"{str(checkpoint)!r} is not a checkpoint: it has no {MANIFEST}; name a folder "
            "`step-...`"
        )
    about = _parsed(path, bytes(read_bytes(path, None)))
    if about.get("format") != 1:
        raise CheckpointError(
            f"{str(checkpoint)!r} is not a checkpoint of format 1 or {FORMAT}; use the program "
            "that wrote it"
        )
    try:
        return Manifest(
            step=int(about["step"]),
            epoch=int(about.get("epoch", 0)),
            position=int(about.get("position", 0)),
            samples=-1,
            optimizer=str(about.get("optimizer", "")),
            tables=tuple(about["tables"]),
            model=about.get("model") or {},
            first_rows=about.get("first_rows") or {},
            files=_old_files(checkpoint),
            shards=0,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"it does not read as a manifest ({error})") from None


def _old_files(checkpoint: Path) -> dict[str, FileEntry]:
    entries: dict[str, FileEntry] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        kind, *parts = _checked_name(file.name).removesuffix(".safetensors").split("-")
        table, shard = (parts[0], int(parts[1])) if kind == "rows" else ("", 0)
        entries[file.name] = FileEntry(
            num_bytes=file.stat().st_size, hash="", table=table, shard=shard
        )
    return entries


def is_old(manifest: Manifest) -> bool:
    """Whether it is of format 1, whose files cannot be verified."""
    return not manifest.hash


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics without those that are no number, which JSON does not have."""
    return {name: float(v) for name, v in metrics.items() if abs(v) < float("inf")}
