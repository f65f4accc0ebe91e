"""Runs a page as a new user would: wheel, empty environment, every command as printed.

python tools/trial.py [--keep] [docs/first_run.md]

The environment finds torch and the other dependencies where this interpreter has them, so that
nothing large is downloaded; nestpipe itself is only what the wheel has. Exits with 1 at the first
command that fails. Needs the network to build the wheel (hatchling).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/first_run.md"
"""Unless another is named."""
FILE = re.compile(r"^\*\*`(\S+)`\*\*\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 600
"""For one command, on a machine that is busy with others."""


def files(page: str) -> dict[str, str]:
    """The files that a page shows, by name."""
    return {match[1]: match[2] for match in FILE.finditer(page)}


def commands(page: str) -> Iterator[str]:
    """The commands of a page, in order; those that end with & go on in the background."""
    for block in COMMANDS.finditer(page):
        # A command goes on in the lines below it that are indented.
        yield from re.findall(r"^\$ (.*(?:\n    .*)*)", block[1], re.MULTILINE)


def main(page_file: Path, folder: Path) -> int:
    """Run the page in the folder; 1 where a command fails."""
    environment = _installed(folder)
    page = page_file.read_text()
    for name, text in files(page).items():
        (folder / name).write_text(text)
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands(page):
            print(f"$ {command}", flush=True)
            if command.endswith("&"):
                running.append(_started(command[:-1], folder, environment))
                _wait_for_port(command)
                continue
            done = subprocess.run(
                command, shell=True, cwd=folder, env=environment, timeout=LIMIT_S, check=False
            )
            if done.returncode:
                print(f"\nfailed with status {done.returncode}", flush=True)
                return 1
    finally:
        for process in running:
            process.terminate()
            process.wait(LIMIT_S)
    print("\nevery command ran")
    return 0


def _installed(folder: Path) -> Mapping[str, str]:
    """An environment of its own with the wheel in it; what its commands find."""
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder / "dist", ROOT], check=True)
    (wheel,) = (folder / "dist").glob("nestpipe-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env/bin/python"
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    site = Path(found.stdout.strip())
    # A path in a .pth is searched last and its own .pth files are not read: no editable nestpipe.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["install", "--no-deps", "--no-index", wheel]
    subprocess.run([*pip, "--python", python, *install], check=True)
    shutil.copy(Path(sys.executable).parent / "torchrun", folder / "env/bin/torchrun")
    _own_python(folder / "env/bin/torchrun", python)
    path = f"{folder / 'env/bin'}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = [python, "-c", "import nestpipe; print(nestpipe.__file__)"]
    shown = subprocess.run(where, env=kept, capture_output=True, text=True, check=True, cwd=folder)
    print(f"{wheel.name} is installed: {shown.stdout.strip()}", flush=True)
    return {**kept, "PATH": path}


def _own_python(script: Path, python: Path) -> None:
    lines = script.read_text().splitlines(keepends=True)
    script.write_text("".join([f"#!{python}\n", *lines[1:]]))


def _started(command: str, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # `exec`: the signal at the end is for the command, not for a shell around it.
    return subprocess.Popen(f"exec {command}", shell=True, cwd=folder, env=environment)


def _wait_for_port(command: str) -> None:
    """A service is asked once it answers; other commands are left alone."""
    port = re.search(r"--port (\d+)", command)
    if port is None:
        return
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/v1/health", timeout=1):
                return
        except OSError:
            time.sleep(0.2)


if __name__ == "__main__":
    asked = next((Path(word).resolve() for word in sys.argv[1:] if word != "--keep"), PAGE)
    if "--keep" in sys.argv:
        sys.exit(main(asked, Path(tempfile.mkdtemp(prefix="nestpipe-trial-"))))
    with tempfile.TemporaryDirectory(prefix="nestpipe-trial-") as here:
        sys.exit(main(asked, Path(here)))
