"""Files that survive a crash: written with their hash, synced, renamed once.

Every call that changes the file system goes through this module. `before_call` hears of each of
them first, so that a test can end the process, or fill the disk, at any one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import io
import json
import mmap
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from nestpipe.errors import CheckpointError, RunError, UnjudgedError

try:
    import xxhash
except ImportError:  # a machine where nothing can be installed
    xxhash = None

HASH = "sha256"
"""Of manifests, and of files where xxhash is not installed: 2 GB/s on one core."""
FAST_HASH = "xxh3-128"
"""Of files: 30 GB/s, so that a checkpoint in the background takes little from training. It tells
damage from what was written; nobody could trust a hash beside the file for more."""
LOCK = ".lock"
PIECE_BYTES = 1 << 24
"""What is hashed at a time."""
STAGED_BYTES = 1 << 22
"""What is written at a time."""
BLOCK_BYTES, LEAST_DIRECT = 4096, 1 << 18
"""Past the system's cache go multiples of a block, where there are at least so many bytes."""


def before_call(call: str, path: Path) -> None:
    """Told the name and path of each call that changes the file system, before it is made."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What a file must be to be taken for the one that was written."""

    num_bytes: int
    hash: str
    """Hexadecimal digits: SHA-256; or XXH3, with its name and a colon before them."""

    def has(self, contents: bytes | bytearray, path: Path) -> bool:
        """Whether these bytes are the ones that were written."""
        if len(contents) != self.num_bytes:
            return False
        digest = new_digest(self.kind, path)
        digest.update(contents)
        return _written_out(self.kind, digest) == self.hash

    @property
    def kind(self) -> str:
        name, colon, _ = self.hash.partition(":")
        return name if colon else HASH


class Digest(Protocol):
    """What `hashlib` and `xxhash` have in common."""

    def update(self, piece: bytes | bytearray | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def kind_of_new_files() -> str:
    """The hash that files get on this machine."""
    return HASH if xxhash is None else FAST_HASH


def new_digest(kind: str, path: Path) -> Digest:
    """A digest of this kind, for the file at `path`."""
    if kind == HASH:
        return hashlib.new(HASH)
    if kind != FAST_HASH:
        raise UnjudgedError(
            f"the hash of {str(path)!r} is of an unknown kind, {kind!r}; use the program that "
            "wrote it"
        )
    if xxhash is None:
        raise UnjudgedError(
            f"{str(path)!r} was written with hashes of {FAST_HASH}, which this environment cannot "
            "compare; pip install xxhash"
        )
    return xxhash.xxh3_128()


def _written_out(kind: str, digest: Digest) -> str:
    return digest.hexdigest() if kind == HASH else f"{kind}:{digest.hexdigest()}"


def write_bytes(path: Path, pieces: Iterator[bytes | memoryview]) -> WrittenFile:
    """A new file of these pieces, on the disk when this returns."""
    kind, size = kind_of_new_files(), 0
    digest = new_digest(kind, path)
    before_call("create", path)
    with path.open("xb", buffering=0) as file:
        for staged in _staged(pieces, digest.update):
            _write(file, staged, path)
            size += len(staged)
        before_call("sync", path)
        os.fsync(file.fileno())
    return WrittenFile(size, _written_out(kind, digest))


_staging = threading.local()


def _staged(
    pieces: Iterator[bytes | memoryview], hear: Callable[[bytes | memoryview], None]
) -> Iterator[memoryview]:
    """The same bytes in aligned memory, each time as many as fit there; the last time what is left.

    `hear` is told of each piece as it is. Who hashes long pieces and copies by numpy seldom needs
    Python's lock, so a thread that does this hardly disturbs training.
    """
    if not hasattr(_staging, "memory"):
        # Its own in a forked child, too.
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        _staging.memory = mmap.mmap(-1, STAGED_BYTES, flags=kind)
    room = np.frombuffer(_staging.memory, np.uint8)
    used = 0
    for piece in pieces:
        hear(piece)
        left = np.asarray(memoryview(piece).cast("B"))
        while len(left):
            count = min(len(left), STAGED_BYTES - used)
            room[used : used + count] = left[:count]
            left, used = left[count:], used + count
            if used == STAGED_BYTES:
                yield memoryview(_staging.memory)
                used = 0
    if used:
        yield memoryview(_staging.memory)[:used]


def _write(file: io.FileIO, staged: memoryview, path: Path) -> None:
    """Whole blocks of what is long past the system's cache of files, which costs a copy more."""
    blocks = len(staged) // BLOCK_BYTES * BLOCK_BYTES if len(staged) >= LEAST_DIRECT else 0
    if blocks and _go_direct(file, on=True):
        try:
            while blocks:
                before_call("write", path)
                done = file.write(staged[:blocks])
                staged, blocks = staged[done:], (blocks - done) // BLOCK_BYTES * BLOCK_BYTES
        except OSError as error:
            if error.errno != errno.EINVAL:  # its blocks are larger
                raise
        _go_direct(file, on=False)
    while len(staged):
        before_call("write", path)
        staged = staged[file.write(staged) :]


def _go_direct(file: io.FileIO, *, on: bool) -> bool:
    """Whether the file system can."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
    except OSError:
        return False
    return bool(flag)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, finite: bool = True) -> WrittenFile:
    """A new safetensors file; numbers that are not finite are refused, unless told."""
    for name, tensor in tensors.items() if finite else ():
        refuse_non_finite(tensor, f"{name} of {path.name}")
    # Sorted: equal tensors make equal files.
    return write_bytes(path, _safetensors(dict(sorted(tensors.items()))))


def refuse_non_finite(tensor: Tensor, what: str) -> None:
    """Nothing that is NaN or inf is ever saved."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    if not _all_finite(tensor.detach()):
        raise RunError(
            f"{what} holds NaN or inf, so the checkpoint is not written; go on from the one before "
            "with lower learning rates"
        )


def _all_finite(tensor: Tensor) -> bool:
    """Without a copy; a NaN is both the least and the most."""
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.float64):
        return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
    # By one thread: torch would keep others of this process busy beside training.
    flat = tensor.reshape(-1).numpy()
    parts = (flat[at : at + LEAST_DIRECT] for at in range(0, len(flat), LEAST_DIRECT))
    return all(np.isfinite(part.min()) and np.isfinite(part.max()) for part in parts)


_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The pieces of a safetensors file, without a second copy of the tensors."""
    header: dict[str, object] = {}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        kind = _DTYPES[tensor.dtype]
        header[name] = {
            "dtype": kind,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            yield memoryview(flat.numpy())  # type: ignore[arg-type]


def read_bytes(path: Path, expected: WrittenFile | None) -> bytearray:
    """A file's contents, hashed while they are read; what differs from `expected` is refused."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if expected is not None and size != expected.num_bytes:
                raise damaged(path, f"it has {size} bytes instead of {expected.num_bytes}")
            contents = bytearray(size)
            _read_into(file.readinto, memoryview(contents), path)
    except OSError as error:
        raise unreadable(path, error) from None
    except MemoryError:
        raise UnjudgedError(
            f"{str(path)!r} does not fit the memory that is left; free some, or use more ranks"
        ) from None
    if expected is not None and not expected.has(contents, path):
        raise damaged(path, "its contents are not those that were written")
    return contents


def _read_into(read: Callable[[memoryview], int | None], room: memoryview, path: Path) -> None:
    while len(room):
        count = read(room)
        if not count:
            raise damaged(path, "it became shorter while it was read")
        room = room[count:]


def read_tensors(path: Path, expected: WrittenFile | None) -> dict[str, Tensor]:
    """The tensors of a safetensors file that is what it was when it was written."""
    contents = read_bytes(path, expected)
    try:
        return load(bytes(contents))
    except (SafetensorError, KeyError, ValueError) as error:
        raise damaged(path, f"no safetensors file ({error})") from None


def hash_of(path: Path, kind: str) -> WrittenFile:
    """The size and the hash of this kind of a file, read in pieces."""
    digest, size = new_digest(kind, path), 0
    room = memoryview(bytearray(PIECE_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(room):
                digest.update(room[:count])
                size += count
    except OSError as error:
        raise unreadable(path, error) from None
    return WrittenFile(size, _written_out(kind, digest))


def damaged(path: Path, why: str) -> CheckpointError:
    """The error for a file that is not what it was."""
    return CheckpointError(f"{str(path)!r} is damaged: {why}; use another checkpoint")


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for what the system does not let us read."""
    if isinstance(error, FileNotFoundError):
        return damaged(path, "it is missing")
    told = f"{str(path)!r} cannot be read: {error.strerror}"
    if error.errno in (errno.EIO, errno.EISDIR, errno.ENOTDIR):
        return CheckpointError(f"{told}; use another checkpoint")
    if isinstance(error, PermissionError):
        return UnjudgedError(f"{told}; change its mode, or use another checkpoint")
    return UnjudgedError(f"{told}; try again, or use another checkpoint")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn a failing file-system call inside into one sentence about `what`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        where = f" ({error.filename})" if error.filename else ""
        raise CheckpointError(f"cannot write {what}: {reason}{where}; {_remedy(error)}") from None


def _remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free space, keep fewer checkpoints (run.keep_last), or choose another folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make the folder writable, or choose another folder"
    return "check the disk, or choose another folder"


# Folders: what is in one has its name only once it is whole.


def make_folder(path: Path) -> None:
    """A folder, with those above it."""
    before_call("mkdir", path)
    path.mkdir(parents=True, exist_ok=True)


def sync_folder(path: Path) -> None:
    """Let the names in a folder survive a power cut."""
    before_call("sync", path)
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def publish(partial: Path, target: Path) -> None:
    """Give a whole folder its name in one step; one that had the name goes away afterwards."""
    sync_folder(partial)
    if target.exists():
        _exchange(partial, target)
        sync_folder(target.parent)
        remove_folder(partial)
    else:
        before_call("rename", target)
        partial.rename(target)
        sync_folder(target.parent)


_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


def _exchange(one: Path, other: Path) -> None:
    """Swap two names in one step, where the system can; else in two."""
    before_call("exchange", other)
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    paths = os.fsencode(one), os.fsencode(other)
    if renameat2 is not None:
        if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number), str(other))
    # Under the name of the same step with one more zero: to be found wherever this ends.
    aside = other.with_name(re.sub(r"(?=\d+$)", "0", other.name, count=1))
    other.rename(aside)
    before_call("rename", other)
    one.rename(other)
    aside.rename(one)


def remove_folder(path: Path) -> None:
    """Take the name away first, then the contents: what is half removed has no name."""
    trash = path.with_name(f".trash-{path.name.lstrip('.')}-{os.getpid()}")
    before_call("rename", trash)
    path.rename(trash)
    before_call("remove", trash)
    _remove(trash)


def _remove(path: Path) -> None:
    """A folder with all that is in it; of a link the link alone."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def remove_leftovers(folder: Path) -> None:
    """What a run that was ended has left half written or half removed; needs the folder's lock."""
    for left in [*folder.glob(".partial-*"), *folder.glob(".trash-*")]:
        before_call("remove", left)
        _remove(left)


# One writer per folder.

_held: dict[Path, int] = {}
"""Folders that this process has locked, with how often."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for writing; another process that does so is named and this one refused.

    The system gives the lock back when the process ends, however it ends.
    """
    with explained(f"to {str(folder)!r}"):
        make_folder(folder)
        key = folder.resolve()
        file = None if key in _held else _open_lock(folder)
    _held[key] = _held.get(key, 0) + 1
    try:
        yield
    finally:
        _held[key] -= 1
        if not _held[key]:
            del _held[key]
        if file is not None:
            os.close(file)


def _open_lock(folder: Path) -> int:
    path = folder / LOCK
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BlockingIOError:
        holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(file)
        raise CheckpointError(
            f"{holder} writes checkpoints to {str(folder)!r}; end it, or choose another folder"
        ) from None
    except OSError:  # a lock that nobody gives back would refuse the next try
        os.close(file)
        raise
    return file


def check_writable(folder: Path, what: str = "checkpoints") -> None:
    """Notice before training that a file could not be written later."""
    probe = folder / f".partial-probe-{os.getpid()}"
    with explained(f"{what} to {str(folder)!r}"):
        make_folder(folder)
        probe.mkdir()
        write_bytes(probe / "probe", iter([b"probe"]))
        shutil.rmtree(probe)
