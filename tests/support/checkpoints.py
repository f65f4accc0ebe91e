"""Checkpoints changed on purpose: with a manifest that agrees, or with damage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from nestpipe.checkpoint.disk import write_tensors
from nestpipe.checkpoint.folder import MANIFEST, FileEntry, paths_in, read_manifest, write_manifest


def only_checkpoint(folder: Path) -> Path:
    """The one checkpoint of a folder."""
    (checkpoint,) = paths_in(folder)
    return checkpoint


def change_manifest(checkpoint: Path, **values: Any) -> None:
    """Let the manifest say something else, with a hash that agrees."""
    manifest = replace(read_manifest(checkpoint), **values)
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, manifest)


def replace_tensors(checkpoint: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a file anew, finite numbers only, with a manifest that agrees."""
    entry = read_manifest(checkpoint).files[name]
    (checkpoint / name).unlink()
    written = write_tensors(checkpoint / name, tensors)
    rows = len(tensors["keys"]) if entry.table else 0
    files = read_manifest(checkpoint).files
    files[name] = FileEntry.of(written, table=entry.table, shard=entry.shard, rows=rows)
    change_manifest(checkpoint, files=files)


def set_number(checkpoint: Path, name: str, tensor: str, value: float) -> None:
    """Change the first number of a tensor, with a manifest that agrees."""
    tensors = load_file(checkpoint / name)
    tensors[tensor].view(-1)[0] = value
    replace_tensors(checkpoint, name, tensors)


def flip_bit(path: Path, bit: int) -> None:
    """One bit of a file, counted from its beginning."""
    contents = bytearray(path.read_bytes())
    contents[bit // 8] ^= 1 << bit % 8
    path.write_bytes(contents)
