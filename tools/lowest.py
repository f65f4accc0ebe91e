"""Tests with the lowest release of every dependency that pyproject.toml allows.

python tools/lowest.py [--environment .venv/lowest] [TESTS...]

`make test` has the newest releases, this the oldest: together the two ends of each range. uv finds
the versions, pip installs them (torch from PyPI brings CUDA's libraries, some 5 GB).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("train", "serve", "remote", "kafka")
RUNNERS = ("hypothesis", "pytest", "pytest-xdist")
"""They run the tests and are not what is tested: any release will do."""
TESTS = (
    *("tests/unit/checkpoint", "tests/unit/config", "tests/unit/dashboard", "tests/unit/data"),
    "tests/unit/serve",
    *("tests/unit/train", "tests/unit/cli/test_train.py", "tests/serve/test_service.py"),
)
"""Where numpy, pyarrow, safetensors, tensorboard, torch, typer, rich and the web stack are used."""


def main(environment: Path, tests: list[str]) -> int:
    """Set the environment up where it is not, then run the tests in it."""
    python = environment / "bin/python"
    if not (environment / "ready").exists():
        _set_up(environment, python)
    shown = subprocess.run(
        [python, "-m", "pip", "list", "--format", "freeze"], capture_output=True, check=True
    )
    direct = {line.partition("==")[0] for line in lowest(environment).read_text().splitlines()}
    listed = shown.stdout.decode().splitlines()
    print(*(line for line in listed if line.partition("==")[0].lower() in direct), sep="\n")
    command = [python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *tests]
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=ROOT, check=False, env=without).returncode


def lowest(environment: Path) -> Path:
    """The file of versions: the lowest of what we name, any of what that needs."""
    return environment / "lowest.txt"


def _set_up(environment: Path, python: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
    pip = [python, "-m", "pip", "-qq", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "uv"], check=True)
    resolve = [environment / "bin/uv", "pip", "compile", "-q", "--resolution", "lowest-direct"]
    resolve += ["--no-header", "--no-annotate", "-o", lowest(environment)]
    resolve += [word for extra in EXTRAS for word in ("--extra", extra)]
    subprocess.run([*resolve, ROOT / "pyproject.toml"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*pip, "-r", lowest(environment)], check=True)
    subprocess.run([*pip, "-c", lowest(environment), *RUNNERS], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", ROOT], check=True)
    (environment / "ready").touch()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Test with the lowest versions.")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv/lowest")
    parser.add_argument("tests", nargs="*", default=list(TESTS))
    arguments = parser.parse_args()
    sys.exit(main(arguments.environment.resolve(), arguments.tests))
