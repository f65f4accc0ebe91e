"""Text files of rows, also gzipped, read in blocks by Arrow; a broken row is found by halving.

A block is parsed at once. Only where that fails is it cut in two, and again, until the row that
does not parse stands alone: good files pay nothing for exact line numbers.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.csv as pa_csv

from nestpipe.errors import DataError

BLOCK = 4 << 20
LONGEST_LINE = 16 << 20
_BLANK = b"\r\n "
"""What a blank line is made of; a tab separates columns, which may be empty."""

T = TypeVar("T")
Parse = Callable[[bytes, int], T]
"""Rows as bytes and the line that the first of them is on; raises `RowError`."""
Progress = Callable[[int], object]
"""Takes how many bytes of the file have been read so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFormat:
    """How the rows of a file are written."""

    names: tuple[str, ...]
    """The columns in the order of the file."""
    types: Mapping[str, pa.DataType]
    """The columns that are wanted; others are not decoded."""
    required: frozenset[str] = frozenset()
    """Columns that may not be empty."""
    delimiter: bytes = b","
    quoted: bool = False
    first_line: int = 1
    """Where the rows begin; 2 after a header."""


def with_header(path: Path, form: TextFormat) -> TextFormat:
    """`form` with the columns that the file's first line names, which must have those wanted."""
    with _bytes(path) as file:
        try:
            line = file.readline(LONGEST_LINE)
        except (EOFError, OSError, zlib.error) as error:
            raise _unreadable(path, 1, error) from None
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}:1 is not UTF-8; save the file as UTF-8") from None
    try:
        names = tuple(next(csv.reader([text], delimiter=form.delimiter.decode()), []))
    except csv.Error as error:
        raise DataError(f"{path}:1 is no header ({error}); write the names of columns") from None
    for name in form.types:
        if name not in names:
            shown = " ".join(", ".join(names[:8]).split()) or "nothing"
            raise DataError(f"{path}:1 has no column {name}, it has {shown}; check the header")
    return replace(form, names=names, first_line=2)


def rows(
    path: Path, form: TextFormat, parse: Parse[T], broken: Broken, progress: Progress | None = None
) -> Iterator[T]:
    """The file parsed by `parse`, block by block; rows that it refuses are reported to `broken`."""
    for first, block in _blocks(path, form.first_line, progress):
        yield from _salvage(
            block, first, parse, lambda line, why: broken.add(f"{path}:{line}", why)
        )


def table(block: bytes, form: TextFormat) -> pa.Table:
    """A block's columns, or `RowError` where any row of it does not fit the format."""
    if len(form.delimiter) > 1:
        block = block.replace(form.delimiter, b"\t")
    try:
        found = pa_csv.read_csv(
            pa.py_buffer(block),
            read_options=pa_csv.ReadOptions(
                column_names=list(form.names), use_threads=False, block_size=len(block) + 1
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=form.delimiter.decode() if len(form.delimiter) == 1 else "\t",
                quote_char='"' if form.quoted else False,
                ignore_empty_lines=False,
            ),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict(form.types),
                include_columns=list(form.types),
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise RowError(_reason(str(error), form)) from None
    if found.num_rows != _num_lines(block):
        raise RowError("a quote or line end inside the row does not match")
    for name in form.types:
        if name in form.required and found[name].null_count:
            raise RowError(f"{name} is empty")
    return found.combine_chunks()


def _salvage(
    block: bytes, first: int, parse: Parse[T], report: Callable[[int, str], None]
) -> Iterator[T]:
    try:
        parsed = parse(block, first)
    except RowError as error:
        if _num_lines(block) == 1:
            report(first, str(error) if block.strip(_BLANK) else "it is blank")
            return
    else:
        yield parsed
        return
    lines = _keep_ends(block)
    half = len(lines) // 2
    yield from _salvage(b"".join(lines[:half]), first, parse, report)
    yield from _salvage(b"".join(lines[half:]), first + half, parse, report)


def _blocks(path: Path, first: int, progress: Progress | None) -> Iterator[tuple[int, bytes]]:
    """Whole lines, many at a time, with the number of the first; blank lines at the end go."""
    line, rest = 1, b""
    with path.open("rb") as raw, _unzipped(path, raw) as file:
        while True:
            try:
                more = file.read(BLOCK)
            except (EOFError, OSError, zlib.error) as error:
                raise _unreadable(path, line + rest.count(b"\n"), error) from None
            if progress is not None:
                progress(raw.tell())
            block = rest + more
            cut = _whole_lines(block) if more else len(block.rstrip(_BLANK))
            block, rest = block[:cut], block[cut:]
            if len(rest) > LONGEST_LINE:
                raise DataError(f"{path}:{line} has no end; this is not a text file of rows")
            skip = min(max(0, first - line), _num_lines(block))
            rows_of = block if not skip else b"".join(_keep_ends(block)[skip:])
            if rows_of:
                yield line + skip, rows_of
            line += _num_lines(block)
            if not more:
                return


def _whole_lines(block: bytes) -> int:
    """Where the last line that is not blank ends; later blank ones wait for what follows them."""
    full = len(block[: block.rfind(b"\n") + 1].rstrip(_BLANK))
    return block.find(b"\n", full) + 1 if full else 0


def _bytes(path: Path) -> io.BufferedIOBase:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _unzipped(path: Path, raw: io.BufferedIOBase) -> io.BufferedIOBase:
    return gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw


def _unreadable(path: Path, line: int, error: Exception) -> DataError:
    if isinstance(error, OSError) and error.strerror:
        return DataError(f"cannot read {path}: {error.strerror}; check the file")
    return DataError(f"{path} is truncated or damaged after about line {line}; fetch it again")


def _num_lines(block: bytes) -> int:
    return block.count(b"\n") + (not block.endswith(b"\n") and bool(block))


def _keep_ends(block: bytes) -> list[bytes]:
    return io.BytesIO(block).readlines()


def _reason(message: str, form: TextFormat) -> str:
    """Arrow's complaint in words for a person."""
    if found := re.search(r"Expected (\d+) columns, got (\d+)", message):
        return f"it has {found[2]} columns, not {found[1]}"
    if found := re.search(r"column #(\d+): .*? to (\w+): invalid value '(.*)'", message, re.DOTALL):
        name = form.names[int(found[1])]
        number = "no whole number" if "int" in found[2] else "no number"
        return f"{name} is {_short(found[3])}, {number}"
    if "UTF8" in message or "codec" in message:
        return "it is not UTF-8"
    return message.splitlines()[0]


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def total_bytes(paths: Sequence[Path]) -> int:
    """Size on disk, for progress bars."""
    return sum(path.stat().st_size for path in paths)


# Rows that cannot be read: counted, named by file and line, refused beyond a limit.


KEPT = 5


class RowError(ValueError):
    """Why a row cannot be read; the caller that knows file and line reports it to `Broken`."""


class Broken:
    """The broken rows of one pass over the data."""

    def __init__(self, limit: int = 0, setting: str = "data.max_broken") -> None:
        self.limit = limit
        self.setting = setting
        self.count = 0
        self.first: list[str] = []
        """Where and why, for the first few."""

    def copy(self) -> Broken:
        """The same rows, to be counted on from here."""
        twin = Broken(self.limit, self.setting)
        twin.count, twin.first = self.count, list(self.first)
        return twin

    def add(self, where: str, reason: str) -> None:
        """Count a broken row, or refuse it: one sentence that names it."""
        self.count += 1
        if len(self.first) < KEPT:
            self.first.append(f"{where} ({reason})")
        if self.count <= self.limit:
            return
        if self.limit == 0:
            raise DataError(
                f"{where} is broken: {reason}; correct it, or let broken rows be skipped "
                f"with {self.setting}"
            )
        raise DataError(
            f"there are more broken rows than {self.setting} = {self.limit}, the first at "
            f"{', '.join(self.first)}; correct them or raise the limit"
        )

    def __str__(self) -> str:
        if not self.count:
            return "no broken rows"
        more = ", ..." if self.count > len(self.first) else ""
        return f"{self.count} broken rows skipped: {', '.join(self.first)}{more}"
