"""Writes what the docs generate: references, pictures, the index of experiments.

Run by `make docs`; a test fails when a generated file is out of date.
"""

from __future__ import annotations

import ast
import inspect
import io
import os
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import peer_figures
from typer.main import get_command

import nestpipe
from nestpipe import deprecated
from nestpipe.cli.app import app
from nestpipe.schedule import PlanOptions, nominal_trace, plan
from nestpipe.sim import Scale, chart, paper_cluster, scaling_curve
from nestpipe.trace import svg

DOCS = Path(__file__).resolve().parent.parent / "docs"
WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def help_text(command: tuple[str, ...]) -> str:
    """What `nestpipe COMMAND --help` prints, in 80 plain columns."""
    os.environ.update(COLUMNS="80", TERM="dumb")
    out = io.StringIO()
    with redirect_stdout(out):
        app([*command, "--help"], prog_name="nestpipe", standalone_mode=False)
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def reference() -> str:
    """The page `reference.md`."""
    parts = ["# Command-line reference", "", "Written by `make docs` from the program itself."]
    for command in _commands(get_command(app)):
        title = " ".join(("nestpipe", *command))
        parts += ["", f"## `{title}`", "", "```text", help_text(command), "```"]
    return "\n".join([*parts, ""])


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command of the program, a group before its members."""
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from _commands(below, (*path, name))


def api() -> str:
    """The page `api.md`: every public name with its docstring, methods and fields."""
    parts = ["# Python reference", "", "Written by `make docs` from the docstrings."]
    for name in nestpipe.__all__:
        if not name.startswith("__"):
            parts += ["", f"## `{name}`", "", *_describe(getattr(nestpipe, name))]
    return "\n".join([*parts, ""])


def _describe(thing: object) -> list[str]:
    lines = [inspect.getdoc(thing) or ""]
    if not inspect.isclass(thing):
        return [f"`{thing.__name__}{_signature(thing)}`", "", *lines]  # type: ignore[attr-defined]
    documented = _field_docs(thing)
    if documented:
        lines += ["", "Fields:", ""]
        for field, text in documented.items():
            lines += _item(f"`{field}`: {text}")
    for name, method in inspect.getmembers(thing, inspect.isfunction):
        if not name.startswith("_") and name in vars(thing) and inspect.getdoc(method):
            lines += ["", *_wrapped(f"**`{name}{_signature(method)}`** {inspect.getdoc(method)}")]
    return lines


def _item(text: str) -> list[str]:
    """An entry of a Markdown list, in lines of at most 120 columns."""
    return textwrap.wrap(text, 120, initial_indent="- ", subsequent_indent="  ", **WHOLE_WORDS)


def _wrapped(text: str) -> list[str]:
    """Paragraphs whose first lines may be too long, in lines of at most 120 columns."""
    first, _, rest = text.partition("\n")
    return [*textwrap.wrap(first, 120, **WHOLE_WORDS), *(rest.splitlines() if rest else [])]


def _signature(function: object) -> str:
    names = [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]
    return f"({', '.join(names)})"


def _field_docs(thing: type) -> dict[str, str]:
    """The strings under the fields of a class and of those it inherits, with their defaults."""
    found: dict[str, str] = {}
    for cls in reversed(thing.__mro__[:-1]):
        if cls.__module__.startswith("nestpipe"):
            found |= _own_field_docs(cls)
    if is_dataclass(thing):
        helped = {known.name: known for known in fields(thing) if "help" in known.metadata}
        for name, known in helped.items():
            found[name] = f"{known.metadata['help']} Default: `{known.default!s}`."
    return found


def _own_field_docs(thing: type) -> dict[str, str]:
    tree = ast.parse(inspect.getsource(thing)).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for entry, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        plain = entry.value is not None and not isinstance(entry.value, ast.Call)
        default = f" Default: `{ast.unparse(entry.value)}`." if plain else ""  # type: ignore[arg-type]
        found[entry.target.id] = (text + default).strip()
    return found


def experiments() -> str:
    """The index of the experiments: date, question and decision of each page, newest first."""
    lines = ["# Experiments", "", "What was tried, what came of it, and what was decided."]
    lines += ["Written by `make docs` from the pages.", ""]
    lines += ["The commit is the one that recorded the reading. Early pages come from one log:"]
    lines += ["where it named no command, the page has the nearest one of today.", ""]
    for page in sorted((DOCS / "experiments").glob("20*.md"), reverse=True):
        text = page.read_text(encoding="utf-8")
        question = text.splitlines()[0].removeprefix("# ")
        decision = text.partition("- **Decision**: ")[2].partition("\n- **")[0]
        lines += _item(f"{page.name[:10]}: [{question}]({page.name}) Decision: {decision}")
    return "\n".join([*lines, ""])


def readme() -> str:
    """The README with its table beside TorchRec."""
    table = peer_figures.table(peer_figures.read_figures())
    return _with_part(DOCS.parent / "README.md", "beside_torchrec", table)


def architecture() -> str:
    """The page `architecture.md` with the tree of source files."""
    return _with_part(DOCS / "architecture.md", "tree", f"```text\n{tree()}\n```")


def tree() -> str:
    """Folders and modules of the package."""
    root = DOCS.parent / "src/nestpipe"
    folders = {file.parent for file in root.rglob("*.py")}
    lines: list[str] = []
    for folder in sorted(folders):
        parts = folder.relative_to(root).parts
        label = f"{'  ' * len(parts)}{folder.name}/"
        modules = sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__")
        names = textwrap.wrap("  ".join(modules), 92, **WHOLE_WORDS) or [""]
        lines += [f"{label:20} {names[0]}".rstrip(), *(f"{'':20} {more}" for more in names[1:])]
    return "\n".join(lines)


def _with_part(page: Path, name: str, part: str) -> str:
    """A page with the part between its two comments of that name written anew."""
    text = page.read_text(encoding="utf-8")
    before, mark, rest = text.partition(f"<!-- {name}: ")
    comment, newline, rest = rest.partition("\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    assert end, f"{page.name} has no place for {name}"
    return f"{before}{mark}{comment}{newline}\n{part}\n\n{end}{after}"


def renamed() -> str:
    """The page `renamed.md`: every old name that works for one release."""
    parts = ["# Renamed things", "", "Written by `make docs` from `src/nestpipe/deprecated.py`."]
    parts += ["Each old name works for one release, with a warning that names the new one."]
    fields = {
        f"`{owner}.{old}`": f"`{new}`"
        for owner, names in deprecated.FIELDS.items()
        for old, new in names.items()
    }
    plain = {
        "Config keys and fields": fields,
        "Command-line flags": _quoted(deprecated.FLAGS),
        "Python names": _quoted(deprecated.NAMES),
        "Metrics": _quoted(deprecated.METRICS),
        "Words of schedule files": _quoted(deprecated.WORDS),
    }
    for title, names in plain.items():
        parts += ["", f"## {title}", "", "| old | new |", "| --- | --- |"]
        parts += [f"| {old} | {new} |" for old, new in names.items()]
    return "\n".join([*parts, ""])


def _quoted(names: Mapping[str, str]) -> dict[str, str]:
    return {f"`{old}`": f"`{new}`" for old, new in names.items()}


def timeline() -> str:
    """The nested plan, as the README shows it."""
    schedule = plan("nested", PlanOptions(micro_batches=4)).schedule(4)
    return svg(nominal_trace(schedule), title="nested: four batches of four micro-batches")


def scaling() -> str:
    """The simulated scaling of the nested plan on the paper's cluster."""
    nested = plan("nested", PlanOptions(micro_batches=8))
    scales = [Scale(workers) for workers in (128, 256, 512, 1024, 1536)]
    points = scaling_curve(nested, paper_cluster(), scales)
    return chart(points, "nested, 8 micro-batches, on the paper's cluster (simulated)")


def generated() -> dict[str, str]:
    """Every generated file, by its path under docs/."""
    return {
        "reference.md": reference(),
        "api.md": api(),
        "nested.svg": timeline(),
        "scaling.svg": scaling(),
        "experiments/README.md": experiments(),
        "renamed.md": renamed(),
        "beside_torchrec.svg": peer_figures.chart(peer_figures.read_figures()),
        "../README.md": readme(),
        "architecture.md": architecture(),
    }


if __name__ == "__main__":
    for name, text in generated().items():
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"wrote {(DOCS / name).resolve().relative_to(DOCS.parent)}")
