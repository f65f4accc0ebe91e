"""What the tree must keep to: how many files, how large, how named; prints what does not.

python tools/structure.py
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/nestpipe"
MOST_FILES, MOST_IN_FOLDER, LEAST_LINES, MOST_COLUMNS = 200, 16, 40, 120
SHORT_MODULES = {
    "__main__.py": "the door for `python -m nestpipe`",
}
"""Modules of less than `LEAST_LINES`, each with its reason; packages say what they export."""
ARCHITECTURE = ROOT / "docs/architecture.md"
FORBIDDEN_NAMES = re.compile(r"(Manager|Helper|Utils?|Base|Impl|Handler)$")


def modules() -> list[Path]:
    """Every source file."""
    return sorted(SOURCE.rglob("*.py"))


def too_many_files() -> Iterator[str]:
    """More files than a reader can find their way through."""
    count = len(modules())
    if count > MOST_FILES:
        yield f"{count} source files, more than {MOST_FILES}"


def crowded_folders() -> Iterator[str]:
    """Folders with more modules than a reader takes in at once; `__init__.py` is none."""
    in_folder = Counter(file.parent for file in modules() if file.name != "__init__.py")
    for folder, count in in_folder.items():
        if count > MOST_IN_FOLDER:
            yield f"{folder.relative_to(ROOT)}: {count} modules, more than {MOST_IN_FOLDER}"


def short_modules() -> Iterator[str]:
    """Fragments: modules under 40 lines without a reason."""
    for file in modules():
        name = str(file.relative_to(SOURCE))
        lines = len(file.read_text().splitlines())
        if lines < LEAST_LINES and file.name != "__init__.py" and name not in SHORT_MODULES:
            yield f"{file.relative_to(ROOT)}: {lines} lines, fewer than {LEAST_LINES}"
    for name in SHORT_MODULES:
        file = SOURCE / name
        if not file.exists() or len(file.read_text().splitlines()) >= LEAST_LINES:
            yield f"{name} needs no reason to be short; take it from the list"


def repeated_class_names() -> Iterator[str]:
    """Class names that a reader would have to tell apart by their module."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for file in modules():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(file.relative_to(SOURCE)))
                if FORBIDDEN_NAMES.search(node.name):
                    yield f"class {node.name} ({homes[node.name][-1]}) says nothing by its ending"
    for name, files in sorted(homes.items()):
        if len(files) > 1:
            yield f"class {name} is in {', '.join(files)}"


def wide_markdown() -> Iterator[str]:
    """Lines that do not fit a window; a table cannot be wrapped, but it can be made narrower."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    for page in sorted(pages):
        lines = enumerate(page.read_text().splitlines(), 1)
        if wide := [number for number, line in lines if len(line) > MOST_COLUMNS]:
            where = f"{page.relative_to(ROOT)}: {len(wide)} lines"
            yield f"{where} over {MOST_COLUMNS} columns, first {wide[0]}"


def missing_files() -> Iterator[str]:
    """Files that the page about the architecture names and the tree does not have."""
    if not ARCHITECTURE.exists():
        yield f"{ARCHITECTURE.relative_to(ROOT)} is missing"
        return
    named = set(re.findall(r"`((?:[\w.]+/)*\w+\.py)`", ARCHITECTURE.read_text()))
    if not named:
        yield f"{ARCHITECTURE.relative_to(ROOT)} names no file"
    for name in sorted(named):
        if not any((folder / name).exists() for folder in (ROOT, ROOT / "src", SOURCE)):
            yield f"{ARCHITECTURE.relative_to(ROOT)} names {name}, which does not exist"


RULES = (
    too_many_files,
    crowded_folders,
    short_modules,
    repeated_class_names,
    wide_markdown,
    missing_files,
)


def main() -> int:
    """Print all that is against the rules; exit status 1 if anything is."""
    faults = [fault for rule in RULES for fault in rule()]
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
