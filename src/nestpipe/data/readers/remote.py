"""Files of object stores and other file systems, by URI: Arrow's own, or any that fsspec knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs as arrow_fs

from nestpipe.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a file system that is not this machine's own."""

    uri: str
    path: str
    """Within its file system."""
    modified_ns: int
    filesystem: Any = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.uri

    @property
    def parent(self) -> str:
        return self.uri.rpartition("/")[0]


DataFile = Path | RemoteFile


def is_uri(path: str | Path) -> bool:
    """Whether a path names its file system, as `s3://bucket/clicks`."""
    return "://" in str(path)


def modified_ns(file: DataFile) -> int:
    """When a file was last written."""
    return file.modified_ns if isinstance(file, RemoteFile) else file.stat().st_mtime_ns


def find_remote_files(uri: str, patterns: Sequence[str], what: str) -> list[RemoteFile]:
    """The file itself, or those below the folder that fit a pattern, sorted by name.

    As on disk, names that begin with `.` or `_` are no data.
    """
    filesystem, top = open_filesystem(uri)
    try:
        (about,) = filesystem.get_file_info([top])
        if about.type == arrow_fs.FileType.File:
            return [_remote(uri, about, filesystem)]
        found = filesystem.get_file_info(arrow_fs.FileSelector(top, recursive=True))
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"cannot read {uri!r} ({reason}); check data.path") from None
    files = [
        _remote(f"{uri.rstrip('/')}/{below}", info, filesystem)
        for info in found
        for below in [info.path[len(top) :].strip("/")]
        if info.type == arrow_fs.FileType.File
        and any(fnmatch(info.base_name, pattern) for pattern in patterns)
        and not any(part.startswith((".", "_")) for part in below.split("/"))
    ]
    if not files:
        raise DataError(f"there are no {what} in {uri!r}; check data.path and data.kind")
    return sorted(files, key=lambda file: file.path)


def open_filesystem(uri: str) -> tuple[Any, str]:
    """The file system of a URI, and the path within it."""
    try:
        return arrow_fs.FileSystem.from_uri(uri)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass  # none of Arrow's own
    try:
        import fsspec
    except ImportError:
        raise ConfigError(
            f"reading {uri!r} needs fsspec; run pip install 'nestpipe[remote]'"
        ) from None
    try:
        found, path = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"cannot open {uri!r}: {error}; check data.path") from None
    return arrow_fs.PyFileSystem(arrow_fs.FSSpecHandler(found)), path


def _remote(uri: str, info: Any, filesystem: Any) -> RemoteFile:
    return RemoteFile(uri, info.path, info.mtime_ns or 0, filesystem)
