"""Which files a path means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.config import DataConfig, Split
from nestpipe.errors import ConfigError, DataError


def find_files(path: str | Path, patterns: Sequence[str], what: str) -> list[Path]:
    """The file itself, or those below the folder that fit a pattern, sorted by name.

    Names and folders that begin with `.` or `_` are not data: other programs keep markers and
    half-written files there.
    """
    top = Path(path)
    if top.is_file():
        return [top]
    if not top.exists():
        raise DataError(f"there is no file or folder {str(path)!r}; check data.path")
    found = {
        file
        for pattern in patterns
        for file in top.rglob(pattern)
        if file.is_file()
        and not any(part.startswith((".", "_")) for part in file.relative_to(top).parts)
    }
    if not found:
        raise DataError(f"there are no {what} in {str(path)!r}; check data.path and data.kind")
    return sorted(found)


# Splits of data sets that come without one: other paths, or every N-th row.


_PLACE: dict[Split, int] = {"test": 1, "validation": 2}
"""Of every `test_every` rows of a file the last is for test, the one before for validation."""


def split_path(config: DataConfig, split: Split) -> tuple[str, int]:
    """The path of a split, and `test_every` where rows are to be picked from it (0: all)."""
    paths: dict[Split, str] = {"test": config.test_path, "validation": config.validation_path}
    if config.test_every:
        return config.path, config.test_every
    if split == "train":
        return config.path, 0
    if not paths[split]:
        raise ConfigError(f"there is no {split} split; set data.{split}_path or data.test_every")
    return paths[split], 0


def keeps(rows: NDArray[np.int64], split: Split, every: int) -> NDArray[np.bool_]:
    """Which rows of a file, numbered from 0, belong to a split."""
    if not every:
        return np.ones(len(rows), dtype=bool)
    place = every - rows % every
    return place > 2 if split == "train" else place == _PLACE[split]


def num_kept(begin: int, end: int, split: Split, every: int) -> int:
    """How many of the rows [begin, end) `keeps` keeps."""
    if not every:
        return end - begin

    def below(row: int) -> int:
        whole, rest = divmod(row, every)
        if split == "train":
            return whole * (every - 2) + min(rest, every - 2)
        return whole + (rest > every - _PLACE[split])

    return below(end) - below(begin)
