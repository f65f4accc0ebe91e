"""Break the code on purpose, one known way at a time, and see that a test notices.

    python tools/mutants.py            every mutant of tests/mutants/mutants.toml
    python tools/mutants.py mesh hstu  those with one of these words in their name

Each mutant is a piece of text that occurs once below src/nestpipe, and what to put in its place;
so the list follows files that move. The nearest tests run on a copy of the tree. A mutant that
they do not notice survives, and the exit status is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests/mutants/mutants.toml"
SOURCE = Path("src/nestpipe")
PASSED, FAILED = 0, 1
"""Exit statuses of pytest; any other one says that the tests did not run."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A mistake that somebody could make."""

    name: str
    old: str
    new: str
    why: str
    """What goes wrong for a user."""
    tests: tuple[str, ...] = ()
    """What must notice: arguments for pytest."""
    equivalent: str = ""
    """Why nothing can notice, where the mutant changes no result."""

    def file(self, root: Path) -> Path:
        """The only file that has the text."""
        found = [file for file in sorted((root / SOURCE).rglob("*.py")) for _ in self._in(file)]
        if len(found) != 1:
            places = ", ".join(str(file.relative_to(root)) for file in found) or "no file"
            raise LookupError(
                f"the text of mutant {self.name!r} is in {places}; it must be there once, "
                f"so change it in {LIST.relative_to(ROOT)}"
            )
        return found[0]

    def _in(self, file: Path) -> Iterator[None]:
        yield from [None] * file.read_text().count(self.old)

    def apply(self, root: Path) -> None:
        file = self.file(root)
        file.write_text(file.read_text().replace(self.old, self.new))


def read_mutants(list_file: Path = LIST) -> list[Mutant]:
    """The list, in order."""
    given = tomllib.loads(list_file.read_text())["mutant"]
    return [Mutant(**{**one, "tests": tuple(one.get("tests", ()))}) for one in given]


def copy_tree(target: Path) -> None:
    """What git knows of, as it is now; built libraries are found by the hash of their source."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(root: Path, tests: Sequence[str]) -> int:
    """The exit status of pytest, which stops at the first failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode not in (PASSED, FAILED):
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    return done.returncode


def verdict(mutant: Mutant, root: Path) -> str:
    """`killed`, `survived` or `not run`, on a tree that is whole again afterwards."""
    file = mutant.file(root)
    before = file.read_text()
    mutant.apply(root)
    try:
        status = run_tests(root, mutant.tests)
    finally:
        file.write_text(before)
    return {PASSED: "survived", FAILED: "killed"}.get(status, "not run")


def main(words: Sequence[str]) -> int:
    """Run the mutants whose name has one of the words; all of them without any."""
    if words and words[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    chosen = [m for m in read_mutants() if not words or any(word in m.name for word in words)]
    bad = 0
    with tempfile.TemporaryDirectory(prefix="nestpipe-mutants-") as folder:
        root = Path(folder)
        copy_tree(root)
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        if run_tests(root, tests) != PASSED:
            print("the tests fail without any mutant; mend them first", file=sys.stderr)
            return 2
        for mutant in chosen:
            if mutant.equivalent:
                print(f"equivalent  {mutant.name}: {mutant.equivalent}", flush=True)
                continue
            told = verdict(mutant, root)
            bad += told != "killed"
            print(f"{told:10}  {mutant.name} ({mutant.file(root).relative_to(root)})", flush=True)
    print(f"{len(chosen)} mutants, {bad} not killed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
