"""A folder of checkpoints: what is in it, the newest that is whole, what to keep.

A checkpoint is a folder `step-00000123`. Its manifest names every file with its size and hash. It
is written last, and its own text carries a hash. A checkpoint without a manifest that reads back,
or with a file more, less or other than it says, is not used.

An increment holds the rows written since its parent, and the keys of those erased; to restore it
means to read the parent, then the increment. Tables with a row policy have the uses of their keys
beside the rows, and the keys that wait for a row.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from nestpipe.checkpoint.disk import (
    HASH,
    WrittenFile,
    damaged,
    explained,
    hash_of,
    locked,
    make_folder,
    publish,
    read_bytes,
    read_tensors,
    remove_folder,
    remove_leftovers,
    unreadable,
    write_bytes,
    write_tensors,
)
from nestpipe.errors import CheckpointError, MisfitError, UnjudgedError

FORMAT = 2
"""A later one has to hash in another way, with `format`: this program takes a manifest whose hash
agrees for its own, with a damaged number."""
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
    data: str = ""
    """Tells the data apart that was trained on; empty where it has no files."""
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
    """The manifest of a checkpoint, of this format or the one before; refuses all others."""
    path = checkpoint / MANIFEST
    if not path.exists():
        return _read_old(checkpoint)
    if path.stat().st_size > MOST_BYTES:
        raise damaged(path, "it is too long")
    text = bytes(read_bytes(path, None))
    whole = _parsed(path, text)
    form, said = whole.pop("format", None), whole.pop("hash", None)
    if isinstance(form, int) and form > FORMAT and said != hash_of_body(whole):
        raise UnjudgedError(
            f"{str(checkpoint)!r} is of format {form}, and this program reads up to {FORMAT}; use "
            "the program that wrote it"
        )
    # The text itself must be the one that was written: a flipped bit in a space is damage, too.
    if said != hash_of_body(whole) or text != _render(whole):
        raise damaged(path, "its contents are not those that were written")
    try:
        return _built({**whole, "hash": said})
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise UnjudgedError(
            f"{str(path)!r} is what was written and does not read as a manifest here ({error}); "
            "use the program that wrote it"
        ) from None


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
    for name, entry in files.items():
        if not isinstance(entry.hash, str):
            raise ValueError(f"the hash of {name} is {entry.hash!r}")
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
        if _NAME.fullmatch(checkpoint.name):
            raise damaged(checkpoint, f"it has no {MANIFEST}")
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


log = logging.getLogger("nestpipe.checkpoint")

_NAME = re.compile(r"step-(\d{8,})", re.ASCII)
MOST_PARENTS = 10_000
"""Increments in a row; a run writes a full checkpoint then, whatever it was told."""
T = TypeVar("T")


def name_of(step: int) -> str:
    """The name of the checkpoint after so many batches."""
    return f"step-{step:08d}"


@dataclass(frozen=True, slots=True)
class RowChange:
    """Rows of one table that a checkpoint stores, or that it erases."""

    keys: Tensor
    rows: Tensor | None
    """None: erased."""
    uses: Tensor | None
    """(K, 2) last step and count of each key, where its table has a policy."""
    step: int
    """Of the checkpoint that says so."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifests read back and whose files have their sizes."""

    path: Path
    manifest: Manifest
    parents: tuple[Checkpoint, ...] = ()
    """What it goes on from, the full one first."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def chain(self) -> tuple[Checkpoint, ...]:
        """All that a restore reads, in that order."""
        return (*self.parents, self)

    def dense(self) -> dict[str, Tensor]:
        """Dense weights and optimizer state, verified."""
        return self._tensors(DENSE)

    def rows(self, table: str, shard: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and rows that were stored, as `changes` has them; erased ones may be among them."""
        for change in self.changes(table, shard):
            if change.rows is not None:
                yield change.keys, change.rows

    def changes(
        self, table: str, shard: int | None = None, only: str | None = None
    ) -> Iterator[RowChange]:
        """What happened to a table, verified, in the order to apply it; of one shard or of all.

        `only`: `gone` or `rows`, what was erased or what was stored.
        """
        for checkpoint in self.chain:
            for kind, optional in (("gone", ()), ("rows", ("uses",))):
                if only not in (None, kind):
                    continue
                wanted = ("keys", "rows") if kind == "rows" else ("keys",)
                for name, entry in checkpoint._files(kind, table, shard):
                    found = checkpoint._by_key(name, entry, wanted, optional)
                    rows, uses = found.get("rows"), found.get("uses")
                    yield RowChange(found["keys"], rows, uses, checkpoint.manifest.step)

    def waiting(self, table: str, shard: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys of a table that wait for a row, and their uses; verified."""
        for name, entry in self._files("waiting", table, shard):
            found = self._by_key(name, entry, ("keys", "uses"))
            yield found["keys"], found["uses"]

    def _files(self, kind: str, table: str, shard: int | None) -> list[tuple[str, FileEntry]]:
        return [
            (name, entry)
            for name, entry in self.manifest.files.items()
            if kind_of(name) == kind and entry.table == table and shard in (None, entry.shard)
        ]

    def _by_key(
        self, name: str, entry: FileEntry, wanted: Sequence[str], optional: Sequence[str] = ()
    ) -> dict[str, Tensor]:
        """Tensors of a file, all of them as long as its keys."""
        tensors = self._tensors(name)
        if set(tensors) - set(optional) != set(wanted):
            raise damaged(self.path / name, f"it holds {', '.join(sorted(tensors))}")
        if any(len(tensor) != len(tensors["keys"]) for tensor in tensors.values()):
            raise damaged(self.path / name, "it does not hold a row for each key")
        if entry.hash and len(tensors["keys"]) != entry.rows:
            raise damaged(self.path / name, f"it does not hold {entry.rows} rows")
        return tensors

    def _tensors(self, name: str) -> dict[str, Tensor]:
        entry = self.manifest.files.get(name)
        if entry is None:
            raise damaged(self.path, f"it has no {name}")
        return read_tensors(self.path / name, entry.written)

    def verify(self) -> None:
        """Read every file of the checkpoint and its parents; raises what is wrong with one."""
        for checkpoint in self.chain:
            for name, entry in checkpoint.manifest.files.items():
                path, written = checkpoint.path / name, entry.written
                if written is not None and hash_of(path, written.kind) != written:
                    raise damaged(path, "its contents are not those that were written")


class KnownManifests:
    """Manifests read before, taken again while their files are the same by inode, time and size."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], Manifest]] = {}

    def read(self, checkpoint: Path) -> Manifest:
        """The manifest, parsed now if it is not the one that was."""
        stamp = _stamp_of(checkpoint / MANIFEST)
        if stamp is None:
            return read_manifest(checkpoint)
        known = self._known.get(checkpoint)
        if known is None or known[0] != stamp:
            known = self._known[checkpoint] = (stamp, read_manifest(checkpoint))
        return known[1]

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint of that path; of others nothing is kept, or manifests would pile up."""
        opened = open_checkpoint(path, self.read)
        chain = {of.path for of in opened.chain}
        self._known = {known: of for known, of in self._known.items() if known in chain}
        return opened

    def knows(self, checkpoint: Checkpoint) -> bool:
        """Whether the manifests of a checkpoint and its parents are still those that it has."""
        found = ((of, _stamp_of(of.path / MANIFEST)) for of in checkpoint.chain)
        return all(self._known.get(of.path) == (stamp, of.manifest) for of, stamp in found)


def _stamp_of(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def open_checkpoint(path: Path, read: Callable[[Path], Manifest] = read_manifest) -> Checkpoint:
    """The checkpoint of that path; its files are compared by name and size, not read yet."""
    parents: list[Checkpoint] = []
    newest = _open_one(path, read)
    of = newest.manifest.parent
    while of is not None:
        if len(parents) == MOST_PARENTS:
            raise damaged(path, f"it has more than {MOST_PARENTS:,} parents")
        if not (path.parent / of.name).is_dir():
            raise damaged(path, f"{of.name}, from which it goes on, is missing")
        parent = _open_one(path.parent / of.name, read)
        if parent.manifest.hash != of.hash:
            raise damaged(path, f"{of.name} is not the checkpoint that it goes on from")
        parents.insert(0, parent)
        of = parent.manifest.parent
    return Checkpoint(path, newest.manifest, tuple(parents))


def _open_one(path: Path, read: Callable[[Path], Manifest]) -> Checkpoint:
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {str(path)!r}; check its name")
    try:
        return _opened(path, read(path))
    except OSError as error:  # without permission, or removed meanwhile
        raise unreadable(path, error) from None


def _opened(path: Path, manifest: Manifest) -> Checkpoint:
    named = _NAME.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise damaged(path, f"it holds step {manifest.step}")
    found = {file.name: file.stat().st_size for file in path.iterdir()}
    known = {MANIFEST} if not is_old(manifest) else {OLD_MANIFEST}
    for name, entry in manifest.files.items():
        if name not in found:
            raise damaged(path / name, "it is missing")
        if found[name] != entry.num_bytes:
            raise damaged(path / name, f"it has {found[name]} bytes, not {entry.num_bytes}")
    if extra := sorted(set(found) - set(manifest.files) - known):
        raise damaged(path / extra[0], "the manifest does not name it")
    if DENSE not in manifest.files:
        raise damaged(path, f"it has no {DENSE}")
    return Checkpoint(path, manifest)


def write_checkpoint(
    folder: Path,
    about: Manifest,
    dense: Mapping[str, Tensor],
    rows: Mapping[str, tuple[Tensor, Tensor]],
) -> Path:
    """A whole checkpoint of one shard: dense tensors, and keys and rows of each table.

    Its files and the number of rows are entered into `about` here.
    """
    target = folder / name_of(about.step)
    partial = folder / f".partial-{target.name}"
    with locked(folder), explained(f"the checkpoint {str(target)!r}"):
        remove_leftovers(folder)
        make_folder(partial)
        files = {DENSE: FileEntry.of(write_tensors(partial / DENSE, dense))}
        for table, (keys, values) in rows.items():
            name = rows_file(table, 0, 0)
            written = write_tensors(partial / name, {"keys": keys, "rows": values})
            files[name] = FileEntry.of(written, table=table, rows=len(keys))
        write_manifest(partial, replace(about, files=files, tables=counted(about.tables, files)))
        publish(partial, target)
    return target


def rows_file(table: str, shard: int, part: int, kind: str = "rows") -> str:
    """The name of a file of rows; or of keys that are `gone`, or `waiting` for a row."""
    return f"{kind}-{table}-{shard:05d}-{part:05d}.safetensors"


def kind_of(name: str) -> str:
    """What a file holds: `dense`, `rows`, `gone` or `waiting`."""
    return name.split("-")[0].removesuffix(".safetensors")


def counted(tables: Sequence[Json], files: Mapping[str, FileEntry]) -> tuple[Json, ...]:
    """What is known of each table, with the rows that these files have of it."""
    of_rows = [entry for name, entry in files.items() if kind_of(name) == "rows"]
    return tuple(
        {**table, "rows": sum(e.rows for e in of_rows if e.table == table["name"])}
        for table in tables
    )


def paths_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder by name, oldest first; none is opened."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (step_of(path), path.name))


def step_of(path: Path) -> int:
    """The step that the name of a checkpoint says."""
    named = _NAME.fullmatch(path.name)
    assert named is not None, f"{path} is not named as a checkpoint"
    return int(named[1])


def candidates(path: Path) -> list[Path]:
    """A checkpoint alone, or those of a folder, newest first."""
    if not is_checkpoint(path):
        return paths_in(path)[::-1]
    return [path.resolve() if path.name in ("", "..") else path]  # its parents lie beside it


def appearing(path: Path) -> Iterator[Path]:
    """The same as `candidates`, looked for again before each next one.

    A run may publish, compact and remove checkpoints while others read them. So one that has come
    meanwhile, or was written anew, is next.
    """
    seen = set[tuple[Path, tuple[int, ...] | None]]()
    while True:
        known = ((one, _stamp_of(one / MANIFEST)) for one in candidates(path))
        if (found := next((one for one in known if one not in seen), None)) is None:
            return
        seen.add(found)
        yield found[0]


def first_good(paths: Iterable[Path], use: Callable[[Path], T], *, tell: bool = True) -> T | None:
    """What `use` makes of the first checkpoint that it does not refuse; says which it skipped.

    `use` verifies what it reads. None where there is no checkpoint at all; where all are refused,
    the first one's reason is raised.
    """
    refused: list[tuple[Path, CheckpointError]] = []

    def skip() -> None:
        if tell and refused:
            log.warning("skipped %s: %s", refused[-1][0].name, refused[-1][1])

    for path in paths:
        skip()
        try:
            return use(path)
        except MisfitError:
            raise
        except CheckpointError as error:
            refused.append((path, error))
    if len(refused) > 1:
        skip()
        where, first = str(refused[0][0].parent), refused[0][1]
        raise CheckpointError(f"no checkpoint of {where!r} can be used; of the newest: {first}")
    if refused:
        raise refused[0][1]
    return None


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint itself, not a folder of them."""
    return any((path / name).exists() for name in (MANIFEST, OLD_MANIFEST))


def open_noted(path: Path, *, tell: bool = True) -> Checkpoint:
    """Open a checkpoint, and say so where it cannot be verified."""
    opened = open_checkpoint(path)
    if tell and any(is_old(one.manifest) for one in opened.chain):
        log.warning("%s is of format 1, which has no checksums: damage is not noticed", path)
    return opened


def newest(folder: Path, *, tell: bool = True) -> Checkpoint | None:
    """The newest checkpoint that verifies in full."""
    return first_good(appearing(folder), lambda path: verified(path, tell=tell), tell=tell)


def verified(path: Path, *, tell: bool = False) -> Checkpoint:
    """A checkpoint of which every file is what it was."""
    checkpoint = open_noted(path, tell=tell)
    checkpoint.verify()
    return checkpoint


def readable(folder: Path) -> list[Checkpoint]:
    """Checkpoints of a folder that open, oldest first."""
    found: list[Checkpoint] = []
    for path in paths_in(folder):
        try:
            found.append(open_checkpoint(path))
        except CheckpointError as error:
            log.debug("%s does not open: %s", path, error)
    return found


# Retention: which checkpoints stay.

LOWER_IS_BETTER = ("loss", "log_loss", "normalised_entropy")


def sign_of(metric: str) -> float:
    """1 where more of a metric is better, else -1; `task/metric` is as its metric."""
    return -1.0 if metric.rpartition("/")[2] in LOWER_IS_BETTER else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which checkpoints to keep besides the newest; with nothing said, all of them."""

    last: int = 0
    """The newest so many; 0: no rule."""
    hours: float = 0.0
    """Those not older than this; 0: no rule."""
    best: str = ""
    """The one with the best value of this metric; empty: no rule."""

    def kept(
        self, checkpoints: Sequence[Checkpoint], now: float, protect: Sequence[str] = ()
    ) -> set[str]:
        """Names to keep, those to `protect` too; an increment keeps its parents."""
        chosen = set(protect)
        if not (self.last or self.hours):
            chosen |= {one.name for one in checkpoints}
        if self.last:
            chosen |= {one.name for one in checkpoints[-self.last :]}
        if self.hours:
            first = now - 3600 * self.hours
            chosen |= {one.name for one in checkpoints if one.manifest.created >= first}
        if checkpoints:
            chosen.add(checkpoints[-1].name)
        if best := best_of(checkpoints, self.best):
            chosen.add(best.name)
        return {link.name for one in checkpoints if one.name in chosen for link in one.chain}


def best_of(checkpoints: Sequence[Checkpoint], metric: str) -> Checkpoint | None:
    """The checkpoint with the best value of a metric, the newest of equals."""
    measured = [one for one in checkpoints if metric in one.manifest.metrics]
    sign = sign_of(metric)
    by_value = sorted(measured, key=lambda one: sign * one.manifest.metrics[metric])
    return by_value[-1] if by_value else None


def prune(
    folder: Path, retention: Retention, now: float, *, last: int, protect: Sequence[str] = ()
) -> list[Path]:
    """Remove what the retention does not keep, and return it; needs the folder's lock.

    `last` is the step of the newest that is good. What is newer is damaged: it neither counts nor
    goes. Only checkpoints that open are removed, newest first: no increment outlives its parent.
    """
    gone = outdated(folder, retention, now, last=last, protect=protect)
    with explained(f"to {str(folder)!r}"):
        for path in gone:
            remove_folder(path)
    return gone


def outdated(
    folder: Path, retention: Retention, now: float, *, last: int, protect: Sequence[str] = ()
) -> list[Path]:
    """What `prune` would remove, newest first."""
    found = [one for one in readable(folder) if one.manifest.step <= last]
    kept = retention.kept(found, now, protect)
    return [one.path for one in reversed(found) if one.name not in kept]


def flat(values: Mapping[str, Any], where: str = "") -> Json:
    """A config as one level of `section.key`."""
    found: Json = {}
    for key, value in values.items():
        name = f"{where}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found
