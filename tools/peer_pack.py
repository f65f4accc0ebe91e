#!/usr/bin/env python3
"""TorchRec and FBGEMM with CUDA kernels, packed for a GPU machine that reaches no registry.

    tools/peer_pack.py .lab/piece.0         where a registry is reached; needs xz and 6 GB of disk
    tools/lab.py put .lab/piece.0           on the GPU machine, then
    tools/lab.py unpack

TorchRec 1.6.1 and FBGEMM 1.6.0 are for Python 3.12 and torch 2.11. FBGEMM's libraries have code for
several generations of GPUs, some already compressed. Code of the others is set to zero here, which
xz makes next to nothing of: 50 MB are left of 450. The libraries keep their layout, so nothing in
them moves.
"""

from __future__ import annotations

import argparse
import mmap
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

FBGEMM = "fbgemm-gpu==1.6.0"
TORCHREC = (
    *("torchrec==1.6.1", "torchmetrics==1.0.3", "tensordict", "iopath", "pyre-extensions"),
    *("typing-inspect", "mypy-extensions", "pyvers", "portalocker", "lightning-utilities"),
    *("importlib-metadata", "zipp", "orjson", "cloudpickle"),
)
"""Without what these ask for themselves: that would be a build of torch."""
FOR_PYTHON = ("--no-deps", "--python-version", "3.12", "--only-binary=:all:")
UNUSED = ("inference", "training_backward_dense", "training_backward_gwd", "training_backward_vbe")
"""Libraries of FBGEMM that training does not call."""
# A name without a kernel makes `impl_abstract` raise where its library was left out.
SKIP = (
    "        try:\n"
    "            torch._C._dispatch_has_kernel_for_dispatch_key(op_name, 'Meta')\n"
    "        except RuntimeError:\n"
    "            return\n"
)
HEADS = (
    "    def impl_abstract(op_name, fn) -> None:\n",
    "    def impl_autograd(op_name, fn, setup_context: Optional[Callable] = None) -> None:\n",
)
FAT_BINARY = struct.Struct("<IHHQ")
"""Magic, version, size of this header, size of the entries that follow."""
FAT_ENTRY = struct.Struct("<HHIQ12xI")
"""Kind, version, size of this header, size of the code that follows; the GPU it is for."""
MAGIC, MACHINE_CODE = 0xBA55ED50, 2


def make_pack(target: Path, gpu: int) -> None:
    """Download, prune, compress."""
    with tempfile.TemporaryDirectory(prefix="peer-pack-", dir=target.parent) as folder:
        site = Path(folder) / "site"
        _pip("download", "-q", *FOR_PYTHON, "-d", folder, FBGEMM)
        _pip("install", "-q", *FOR_PYTHON, "--target", str(site), *TORCHREC)
        (wheel,) = Path(folder).glob("fbgemm_gpu-*.whl")
        shutil.unpack_archive(wheel, site, "zip")
        leave_out(site / "fbgemm_gpu")
        for library in sorted(site.rglob("*.so")):
            if dropped := keep_code_for(library, gpu):
                say(f"{library.name}: {dropped / 1e6:,.0f} MB for other GPUs")
        say("compressing; this takes some minutes")
        command = 'tar c --exclude=__pycache__ -C "$1" site | xz -T0 -9 > "$2"'
        made = Path(folder) / "pack"
        bash = ["bash", "-o", "pipefail", "-c", command, "bash", folder, str(made)]
        subprocess.run(bash, check=True)
        made.replace(target)
    say(f"{target}: {target.stat().st_size / 1e6:,.0f} MB")


def leave_out(package: Path) -> None:
    """Remove libraries that training does not call, and what would look for them."""
    init, ops = package / "__init__.py", package / "sparse_ops.py"
    text = init.read_text()
    for name in UNUSED:
        (package / f"fbgemm_gpu_tbe_{name}.so").unlink()
        text = text.replace(f'"fbgemm_gpu_tbe_{name}",', "")
    init.write_text(text)
    text = ops.read_text()
    for head in HEADS:
        if text.count(head) != 1:
            raise SystemExit(f"error: {ops.name} of another {FBGEMM}? it has no {head.strip()!r}")
        text = text.replace(head, head + SKIP)
    ops.write_text(text)


def keep_code_for(library: Path, gpu: int) -> int:
    """Set code for all other GPUs to zero; returns how many bytes that were."""
    dropped = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for start, size, kind, made_for in entries(data):
            if (kind, made_for) != (MACHINE_CODE, gpu):
                data[start : start + size] = bytes(size)
                dropped += size
    return dropped


def entries(data: mmap.mmap | bytes) -> Iterator[tuple[int, int, int, int]]:
    """Where each piece of GPU code starts, its size, its kind and the GPU it is for."""
    magic = struct.pack("<I", MAGIC)
    at = data.find(magic)
    while at >= 0:
        _, version, head, size = FAT_BINARY.unpack_from(data, at)
        end = at + head + size
        if version != 1 or head != FAT_BINARY.size or end > len(data):
            at = data.find(magic, at + 1)  # four bytes that look alike
            continue
        entry = at + head
        while entry < end:
            kind, _, entry_head, code, made_for = FAT_ENTRY.unpack_from(data, entry)
            yield entry + entry_head, code, kind, made_for
            entry += entry_head + code
        at = data.find(magic, end)


def say(line: str) -> None:
    """Report progress."""
    sys.stderr.write(line + "\n")


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, help="the file to write, such as .lab/piece.0")
    parser.add_argument("--gpu", type=int, default=90, help="compute capability times ten")
    options = parser.parse_args()
    options.target.parent.mkdir(parents=True, exist_ok=True)
    make_pack(options.target.resolve(), options.gpu)


if __name__ == "__main__":
    main()
