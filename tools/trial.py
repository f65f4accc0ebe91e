"""Runs a page as a new user would: wheel, empty environment, every command as printed.

python tools/trial.py [--wheel FILE] [--python python3.13] [--fresh] [--no-compiler] [--keep] [PAGE]

The wheel is built first unless one is named. With `--fresh` pip installs it with all that it
depends on; otherwise the environment finds the dependencies where the interpreter has them, so that
nothing large is downloaded, and nestpipe itself is only what the wheel has. With `--no-compiler` no
command finds a compiler, and none may build anything. Exits with 1 at the first command that fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/first_run.md"
"""Unless another is named."""
FILE = re.compile(r"^\*\*`(\S+)`\*\*\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMPILER = re.compile(r"(.*-)?(c\+\+|cc|clang|clang\+\+|g\+\+|gcc|nvcc|ninja|ld)(-[\d.]+)?")
"""Programs that `--no-compiler` hides."""
TORCH = os.environ.get("TORCH", "torch==2.13.0")
"""What a fresh environment begins with: an open range may fetch another build."""
LIMIT_S = 600
"""For one command, on a machine that is busy with others."""


def text_of(page: Path) -> str:
    """A page as Markdown; of a page of the site, its files and commands alone."""
    if page.suffix != ".html":
        return page.read_text()
    found = _Blocks()
    found.feed(page.read_text())
    return "\n".join(found.lines)


class _Blocks(HTMLParser):
    """Reads blocks of code, and the names of files in bold before them, back into Markdown."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.language = self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        words = (dict(attrs).get("class") or "").split()
        named = [word.removeprefix("highlight-") for word in words if word.startswith("highlight-")]
        self.language = named[0] if named else self.language
        if tag in ("pre", "strong"):
            self.open.append(tag)
            self.text = ""

    def handle_data(self, data: str) -> None:
        self.text += data if self.open else ""

    def handle_endtag(self, tag: str) -> None:
        if not self.open or tag != self.open[-1]:
            return
        self.open.pop()
        if tag == "pre":
            self.lines += [f"```{self.language}", self.text.rstrip("\n"), "```", ""]
        else:
            self.lines += [f"**`{self.text}`**", ""]


def files(page: str) -> dict[str, str]:
    """The files that a page shows, by name."""
    return {match[1]: match[2] for match in FILE.finditer(page)}


def commands(page: str) -> Iterator[str]:
    """The commands of a page, in order; those that end with & go on in the background."""
    for block in COMMANDS.finditer(page):
        # A command goes on in the lines below it that are indented.
        yield from re.findall(r"^\$ (.*(?:\n    .*)*)", block[1], re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How a page is run."""

    page: Path = PAGE
    wheel: Path | None = None
    """None: built now from the sources."""
    python: str = sys.executable
    fresh: bool = False
    """Whether pip installs dependencies; otherwise they are those that `python` has."""
    no_compiler: bool = False


def main(trial: Trial, folder: Path) -> int:
    """Run the page in the folder; 1 where a command fails."""
    environment = _environment(trial, folder)
    page = text_of(trial.page)
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
    if trial.no_compiler and (built := list((folder / "cache").glob("*"))):
        print(f"\nthe wheel should have had {built[0].name}")
        return 1
    print("\nevery command ran")
    return 0


def _environment(trial: Trial, folder: Path) -> Mapping[str, str]:
    """What the commands find: an environment of its own with the wheel in it."""
    wheel = trial.wheel or _built(folder / "dist")
    python = folder / "env/bin/python"
    if trial.fresh:
        _install_all(trial.python, wheel, folder / "env")
    else:
        _install_alone(trial.python, wheel, folder / "env")
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = os.environ["PATH"]
    if trial.no_compiler:
        kept = {name: value for name, value in kept.items() if name not in ("CXX", "CUDA_HOME")}
        path = str(_programs(path, folder / "programs"))
    kept |= {"PATH": f"{folder / 'env/bin'}{os.pathsep}{path}"}
    kept |= {"NESTPIPE_CACHE": str(folder / "cache")} if trial.no_compiler else {}
    tell = "import sys, nestpipe; print(sys.version.split()[0], nestpipe.__file__)"
    shown = _said([python, "-c", tell], cwd=folder, env=kept)
    print(f"{wheel.name} is installed: Python {shown}", flush=True)
    return kept


def _built(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, ROOT], check=True)
    (wheel,) = folder.glob("nestpipe-*.whl")
    return wheel


def _install_all(python: str, wheel: Path, env: Path) -> None:
    """As a user does."""
    subprocess.run([python, "-m", "venv", env], check=True)
    pip = [env / "bin/python", "-m", "pip", "-qq", "install", "--disable-pip-version-check"]
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, f"{wheel}[serve,train]"], check=True)


def _install_alone(python: str, wheel: Path, env: Path) -> None:
    """The wheel alone, beside the dependencies that the interpreter has."""
    subprocess.run([python, "-m", "venv", "--without-pip", env], check=True)
    tell = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(_said([env / "bin/python", "-c", tell]))
    # A path in a .pth is searched last and its own .pth files are not read: no editable nestpipe.
    (site / "dependencies.pth").write_text(_said([python, "-c", tell]) + "\n")
    pip = [sys.executable, "-m", "pip", "-q", "--python", env / "bin/python"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], check=True)
    torchrun = Path(_said([python, "-c", "import sys; print(sys.executable)"])).parent / "torchrun"
    shutil.copy(torchrun, env / "bin/torchrun")
    _own_python(env / "bin/torchrun", env / "bin/python")


def _said(command: list[str | Path], **more: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, **more)  # type: ignore[call-overload]
    return done.stdout.strip()


def _programs(path: str, folder: Path) -> Path:
    """A folder with every program of a path but compilers and interpreters of Python."""
    folder.mkdir()
    for program in (file for part in path.split(os.pathsep) for file in Path(part).glob("*")):
        hidden = COMPILER.fullmatch(program.name) or program.name.startswith("python")
        if not hidden and not (folder / program.name).is_symlink():
            (folder / program.name).symlink_to(program)
    return folder


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
    parser = argparse.ArgumentParser(description="Run a page as a new user would.")
    parser.add_argument("page", nargs="?", type=lambda word: Path(word).resolve(), default=PAGE)
    parser.add_argument("--wheel", type=lambda word: Path(word).resolve())
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--no-compiler", action="store_true")
    parser.add_argument("--keep", action="store_true", help="leave the folder for a look at it")
    asked = vars(parser.parse_args())
    if asked.pop("keep"):
        sys.exit(main(Trial(**asked), Path(tempfile.mkdtemp(prefix="nestpipe-trial-"))))
    with tempfile.TemporaryDirectory(prefix="nestpipe-trial-") as here:
        sys.exit(main(Trial(**asked), Path(here)))
