"""What a path holds: the format, and facts about each column of each table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from nestpipe.data import criteo, kuairand, movielens, parquet
from nestpipe.data.broken import Broken
from nestpipe.data.config import Kind
from nestpipe.data.facts import Facts
from nestpipe.data.files import find_files
from nestpipe.data.kuairand_tables import column_type
from nestpipe.data.text import Format, rows, table, with_header
from nestpipe.errors import DataError

Progress = Callable[[int], object]
"""Takes how many more bytes have been read."""


@dataclass(slots=True)
class Table:
    """Files of the same columns."""

    name: str
    files: list[Path]
    rows: int = 0
    columns: dict[str, Facts] = field(default_factory=dict[str, Facts])

    @property
    def times(self) -> tuple[str, str] | None:
        """First and last time of the first column that holds times."""
        return next((facts.times for facts in self.columns.values() if facts.times), None)

    def add(self, piece: Any) -> None:
        self.rows += piece.num_rows
        for name in piece.schema.names:
            self.columns.setdefault(name, Facts(name)).add(piece[name])


@dataclass(frozen=True, slots=True)
class Description:
    """What was found."""

    path: str
    kind: Kind
    tables: list[Table]
    broken: Broken

    def as_json(self) -> dict[str, object]:
        return {
            "path": self.path,
            "kind": self.kind,
            "tables": [
                {
                    "name": found.name,
                    "files": [str(file) for file in found.files],
                    "rows": found.rows,
                    "time_range": found.times,
                    "columns": [facts.as_json() for facts in found.columns.values()],
                }
                for found in self.tables
            ],
            "broken": {"count": self.broken.count, "first": self.broken.first},
        }


def describe(
    path: Path, kind: Kind, tables: list[Table], max_broken: int, progress: Progress
) -> Description:
    """Read all of `tables` once."""
    broken = Broken(max_broken, "--max-broken")
    for found in tables:
        for file in found.files:
            for piece in _pieces(file, kind, broken, progress):
                found.add(piece)
    return Description(str(path), kind, tables, broken)


def detect(path: Path) -> Kind:
    """What the names of the files, or else their first line, say."""
    if not path.exists():
        raise DataError(f"there is no file or folder {str(path)!r}; check the path")
    if path.name.startswith("log_standard_") or _has(path, kuairand.LOGS):
        return "kuairand"
    if path.name in movielens.PATTERNS or _has(path, movielens.PATTERNS):
        return "movielens"
    if path.suffix in (".parquet", ".pq") or _has(path, parquet.PATTERNS):
        return "parquet"
    if _is_criteo(path):
        return "criteo"
    raise DataError(f"cannot tell what {str(path)!r} holds; name its format with --kind")


def find_tables(path: Path, kind: Kind) -> list[Table]:
    """The files of each table. KuaiRand's statistics are left out, as in training."""
    if kind == "kuairand":
        return _kuairand_tables(path)
    if kind == "movielens":
        return [Table("ratings", find_files(path, movielens.PATTERNS, "ratings files")[:1])]
    if kind == "criteo":
        return [Table("clicks", find_files(path, criteo.PATTERNS, "Criteo files"))]
    if kind == "parquet":
        return _parquet_tables(find_files(path, parquet.PATTERNS, "Parquet files"))
    raise DataError("synthetic data has no files; see nestpipe data synth")


def _kuairand_tables(path: Path) -> list[Table]:
    tables = [Table("log", find_files(path, kuairand.LOGS, "KuaiRand logs (log_standard_*)"))]
    for name in ("user_features", "video_features_basic", "user_history"):
        patterns = [f"{name}*{end}" for end in (".parquet", ".csv", ".csv.gz")]
        if path.is_dir() and _has(path, patterns):
            tables.append(Table(name, find_files(path, patterns, name)[:1]))
    return tables


def _parquet_tables(files: Sequence[Path]) -> list[Table]:
    """One table for each set of columns, named after its first file where there are several."""
    by_columns: dict[tuple[str, ...], Table] = {}
    for file in files:
        columns = tuple(parquet.open_file(file).schema_arrow.names)
        by_columns.setdefault(columns, Table(file.stem, [])).files.append(file)
    if len(by_columns) == 1:
        return [Table("rows", list(files))]
    return list(by_columns.values())


def _pieces(file: Path, kind: Kind, broken: Broken, progress: Progress) -> Iterator[Any]:
    if file.suffix in (".parquet", ".pq"):
        yield from _parquet_pieces(file, progress)
        return
    form = _form(file, kind)
    seen = 0

    def advance(position: int) -> None:
        nonlocal seen
        progress(position - seen)
        seen = position

    def parse(block: bytes, _: int) -> pa.Table:
        found = table(block, form)
        if kind == "criteo":
            criteo.to_batch(found)  # only to refuse what training would refuse
        return found

    yield from rows(file, form, parse, broken, advance)


def _parquet_pieces(file: Path, progress: Progress) -> Iterator[Any]:
    opened = parquet.open_file(file)
    for group in range(opened.metadata.num_row_groups):
        yield from parquet.row_group(file, group, opened.schema_arrow.names)
        progress(file.stat().st_size // opened.metadata.num_row_groups)


def _form(file: Path, kind: Kind) -> Format:
    if kind == "criteo":
        return criteo.FORMAT
    if kind == "movielens":
        return movielens.ratings_format(file)
    form = with_header(file, Format(names=(), types={}, quoted=True))
    is_log = file.name.startswith("log_")
    types = {name: pa.int64() if is_log else column_type(name) for name in form.names}
    return with_header(file, Format(names=(), types=types, quoted=True))


def _has(path: Path, patterns: Sequence[str]) -> bool:
    return path.is_dir() and any(True for pattern in patterns for _ in path.rglob(pattern))


def _is_criteo(path: Path) -> bool:
    try:
        file = find_files(path, criteo.PATTERNS, "Criteo files")[0]
        one_line = Format(names=("line",), types={}, delimiter=b"\t")
        return len(with_header(file, one_line).names) == len(criteo.FORMAT.names)
    except DataError:
        return False
