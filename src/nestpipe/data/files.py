"""Which files a path means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nestpipe.errors import DataError


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
