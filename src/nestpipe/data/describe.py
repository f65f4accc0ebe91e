"""Describe a path: its format, facts about each column of each table, and how fast it is read.

The speed stands beside a plain Arrow scan of the same columns in the same run. Both are counted in
processor time, so that a busy machine slows the two alike: samples per second of one core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from nestpipe.config import positive
from nestpipe.data import (
    DataConfig,
    Source,
    SyntheticConfig,
    inputs,
    open_source,
    parquet,
    public_sets,
)
from nestpipe.data.config import Kind
from nestpipe.data.inputs import find_files
from nestpipe.data.order import draw
from nestpipe.data.public_sets import column_type
from nestpipe.data.synthetic import write
from nestpipe.data.text import Broken, TextFormat, rows, table, with_header
from nestpipe.errors import DataError

# What can be said of a column after one pass over it.


_SECONDS = {"timestamp": 1.0, "time_ms": 1e-3}
"""Columns that hold a time, by name, and their unit."""


class Distinct:
    """How many different values there are: exact up to `KEPT`, after that within about 1 %.

    Values are hashed and only the smallest hashes kept; how close they lie tells how many there
    are in all.
    """

    KEPT = 16_384

    def __init__(self) -> None:
        self._smallest = np.empty(0, dtype=np.uint64)

    def add(self, hashes: NDArray[np.uint64]) -> None:
        if len(self._smallest) >= self.KEPT:
            hashes = hashes[hashes < self._smallest[-1]]
        self._smallest = np.union1d(self._smallest, hashes)[: self.KEPT]

    @property
    def exact(self) -> bool:
        return len(self._smallest) < self.KEPT

    @property
    def count(self) -> int:
        if self.exact:
            return len(self._smallest)
        return round((self.KEPT - 1) / (float(self._smallest[-1]) / 2.0**64))


class Facts:
    """One column: its type, range, and how many values are missing or different."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.type = ""
        self.empty = 0
        self.least: Any = None
        self.most: Any = None
        self.distinct = Distinct()
        self.longest: int | None = None

    def add(self, column: Any) -> None:
        """Take one more piece of the column into account."""
        array = inputs.flat(column)
        self.type = _type_name(array.type)
        self.empty += array.null_count
        if inputs.is_list(array.type):
            longest = int(inputs.list_lengths(array).max(initial=0))
            self.longest = max(self.longest or 0, longest)
            array = inputs.flat(array.flatten())
        array = _comparable(array)
        if array is None:
            return
        array = array.drop_null()
        if pa.types.is_floating(array.type):
            array = array.filter(inputs.compute.is_finite(array))
        if not len(array):
            return
        self._stretch(array)
        self.distinct.add(_hashes(array))

    def _stretch(self, array: Any) -> None:
        least, most = _ends(array)
        self.least = least if self.least is None else min(self.least, least)
        self.most = most if self.most is None else max(self.most, most)

    @property
    def times(self) -> tuple[str, str] | None:
        """First and last time, where the column is known to hold times."""
        if isinstance(self.least, datetime):
            return self.least.isoformat(), self.most.isoformat()
        if self.name not in _SECONDS or self.least is None or isinstance(self.least, str):
            return None
        first, last = (value * _SECONDS[self.name] for value in (self.least, self.most))
        try:
            return _instant(first), _instant(last)
        except (OverflowError, ValueError, OSError):
            return None  # the name promised more than the numbers hold

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "type": self.type,
            "empty": self.empty,
            "min": _plain(self.least),
            "max": _plain(self.most),
            "distinct": self.distinct.count,
            "distinct_exact": self.distinct.exact,
            "longest_list": self.longest,
        }


def _comparable(array: Any) -> Any | None:
    """The same in a type that Arrow can compare; None for bytes, structs and the like."""
    kind = array.type
    if pa.types.is_float16(kind):
        return array.cast(pa.float32())
    if pa.types.is_duration(kind):
        return array.cast(pa.int64())
    is_time = pa.types.is_temporal(kind) and not pa.types.is_interval(kind)
    known = inputs.is_key(kind) or inputs.is_number(kind) or pa.types.is_decimal(kind) or is_time
    return array if known else None


def _ends(array: Any) -> tuple[Any, Any]:
    """The least and the greatest value; strings need not be UTF-8."""
    known = array.cast(pa.large_binary()) if inputs.is_text(array.type) else array
    ends = inputs.compute.min_max(known).as_py()
    found = (ends["min"], ends["max"])
    if known is array:
        return found
    least, most = (end.decode("utf-8", errors="replace") for end in found)
    return least, most


def _type_name(kind: pa.DataType) -> str:
    if inputs.is_list(kind):
        return f"lists of {_type_name(kind.value_type)}"
    return "string" if inputs.is_text(kind) else str(kind)


def _hashes(array: Any) -> NDArray[np.uint64]:
    if pa.types.is_floating(array.type):
        return draw(0, array.cast(pa.float64()).to_numpy(zero_copy_only=False).view(np.int64))
    if not inputs.is_key(array.type):
        array = array.cast(pa.string())
    return draw(0, inputs.keys(array))


def _instant(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _plain(value: Any) -> object:
    return value if value is None or isinstance(value, int | float | str) else str(value)


Progress = Callable[[int], object]
"""Takes how many more bytes have been read."""


@dataclass(slots=True)
class DescribedTable:
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
    tables: list[DescribedTable]
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
    path: Path, kind: Kind, tables: list[DescribedTable], max_broken: int, progress: Progress
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
    if path.name.startswith("log_standard_") or _has(path, public_sets.LOGS):
        return "kuairand"
    if path.name in public_sets.RATINGS_PATTERNS or _has(path, public_sets.RATINGS_PATTERNS):
        return "movielens"
    if path.suffix in (".parquet", ".pq") or _has(path, parquet.PATTERNS):
        return "parquet"
    if _is_criteo(path):
        return "criteo"
    raise DataError(f"cannot tell what {str(path)!r} holds; name its format with --kind")


def find_tables(path: Path, kind: Kind) -> list[DescribedTable]:
    """The files of each table. KuaiRand's statistics are left out, as in training."""
    if kind == "kuairand":
        return _kuairand_tables(path)
    if kind == "movielens":
        return [
            DescribedTable(
                "ratings", find_files(path, public_sets.RATINGS_PATTERNS, "ratings files")[:1]
            )
        ]
    if kind == "criteo":
        return [
            DescribedTable("clicks", find_files(path, public_sets.CRITEO_PATTERNS, "Criteo files"))
        ]
    if kind == "parquet":
        return _parquet_tables(find_files(path, parquet.PATTERNS, "Parquet files"))
    raise DataError("synthetic data has no files; see nestpipe data synth")


def _form_of_values(kind: pa.DataType) -> str:
    """Types whose values can be compared have the same."""
    if inputs.is_list(kind):
        return f"lists of {_form_of_values(kind.value_type)}"
    if pa.types.is_dictionary(kind):
        return _form_of_values(kind.value_type)
    number = inputs.is_number(kind) or pa.types.is_decimal(kind)
    return "number" if number else _type_name(kind)


def _kuairand_tables(path: Path) -> list[DescribedTable]:
    tables = [
        DescribedTable("log", find_files(path, public_sets.LOGS, "KuaiRand logs (log_standard_*)"))
    ]
    for name in ("user_features", "video_features_basic", "user_history"):
        patterns = [f"{name}*{end}" for end in (".parquet", ".csv", ".csv.gz")]
        if path.is_dir() and _has(path, patterns):
            tables.append(DescribedTable(name, find_files(path, patterns, name)[:1]))
    return tables


def _parquet_tables(files: Sequence[Path]) -> list[DescribedTable]:
    """One table for each set of columns, named after its first file where there are several."""
    by_columns: dict[tuple[tuple[str, str], ...], DescribedTable] = {}
    for file in files:
        schema = parquet.open_file(file).schema_arrow
        columns = tuple((column.name, _form_of_values(column.type)) for column in schema)
        by_columns.setdefault(columns, DescribedTable(file.stem, [])).files.append(file)
    if len(by_columns) == 1:
        return [DescribedTable("rows", list(files))]
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
            public_sets.criteo_batch(found)  # only to refuse what training would refuse
        return found

    yield from rows(file, form, parse, broken, advance)


def _parquet_pieces(file: Path, progress: Progress) -> Iterator[Any]:
    opened = parquet.open_file(file)
    for group in range(opened.metadata.num_row_groups):
        yield from parquet.row_group(file, group, opened.schema_arrow.names)
        progress(file.stat().st_size // opened.metadata.num_row_groups)


def _form(file: Path, kind: Kind) -> TextFormat:
    if kind == "criteo":
        return public_sets.CRITEO_FORMAT
    if kind == "movielens":
        return public_sets.ratings_format(file)
    form = with_header(file, TextFormat(names=(), types={}, quoted=True))
    is_log = file.name.startswith("log_")
    types = {name: pa.int64() if is_log else column_type(name) for name in form.names}
    return with_header(file, TextFormat(names=(), types=types, quoted=True))


def _has(path: Path, patterns: Sequence[str]) -> bool:
    return path.is_dir() and any(True for pattern in patterns for _ in path.rglob(pattern))


def _is_criteo(path: Path) -> bool:
    try:
        file = find_files(path, public_sets.CRITEO_PATTERNS, "Criteo files")[0]
        one_line = TextFormat(names=("line",), types={}, delimiter=b"\t")
        return len(with_header(file, one_line).names) == len(public_sets.CRITEO_FORMAT.names)
    except DataError:
        return False


Form = Literal["clicks", "sequences"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCase:
    """What is read."""

    form: Form
    samples: int = 1_000_000
    ranks: int = 1
    batch: int = 4096
    """Samples of a batch and rank."""
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("samples", "ranks", "batch", "rounds"):
            positive(name, getattr(self, name))

    @property
    def world(self) -> SyntheticConfig:
        """Clicks have 26 lists of 1 to 3 keys and 13 floats, sequences 10 to 50 items."""
        if self.form == "sequences":
            return SyntheticConfig(flavour="sequence", samples=self.samples)
        return SyntheticConfig(samples=self.samples, keys_per_sample=(1, 3))


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReading:
    """What was found, in samples per second of processor time."""

    form: Form
    samples: int
    ranks: int
    shards: int
    scan: float
    """A scan of all row groups by Arrow, on one thread, that looks at nothing."""
    batches: float
    """Shuffled batches, the first rank's."""

    @property
    def ratio(self) -> float:
        """Of the scan."""
        return self.batches / self.scan


def measure_data(
    case: DataCase, folder: Path, progress: Callable[[], object] = lambda: None
) -> DataReading:
    """Write the data once, then scan it and read it in turns; the median of the rounds."""
    files = write(folder / case.form, case.world, files=1, force=True)
    progress()
    path = str(folder / case.form)
    source = open_source(DataConfig(kind="parquet", path=path, test_path=path, threads=1))
    scans: list[float] = []
    batches: list[float] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for turn in range(case.rounds + 1):
            scan, mine = _per_second(lambda: _scan(files)), _per_second(lambda: _read(source, case))
            if turn:  # the first round warms up
                scans.append(scan)
                batches.append(mine)
            progress()
    finally:
        torch.set_num_threads(threads)
    return DataReading(
        form=case.form,
        samples=case.samples,
        ranks=case.ranks,
        shards=getattr(source, "shards", 1),
        scan=statistics.median(scans),
        batches=statistics.median(batches),
    )


def _per_second(work: Callable[[], int]) -> float:
    work()  # the other side has freed memory, and the first to run pays for page faults
    start = time.process_time()
    samples = work()
    return samples / (time.process_time() - start)


def _scan(files: list[Path]) -> int:
    rows = 0
    for path in files:
        file = pq.ParquetFile(path)
        for piece in file.iter_batches(batch_size=65_536, use_threads=False):
            rows += piece.num_rows
    return rows


def _read(source: Source, case: DataCase) -> int:
    batches = source.batches(global_batch=case.batch * case.ranks, rank=0, ranks=case.ranks, seed=1)
    return sum(batch.size for batch in batches)
