"""Writes what the docs generate: references, pictures, the index of experiments.

Run by `make docs`; a test fails when a generated file is out of date.
"""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import peer_figures

import nestpipe
from nestpipe import deprecated
from nestpipe.cli.app import command_tree
from nestpipe.config import Table
from nestpipe.schedule import PlanOptions, nominal_trace, plan
from nestpipe.serve.types import HttpSettings, ServeSettings
from nestpipe.sim import Scale, chart, paper_cluster, scaling_curve
from nestpipe.trace import svg
from nestpipe.train.job import JobConfig

DOCS = Path(__file__).resolve().parent.parent / "docs"
WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def help_text(command: tuple[str, ...]) -> str:
    """What `nestpipe COMMAND --help` prints, in 80 plain columns."""
    os.environ.update(COLUMNS="80", TERM="dumb")
    out = io.StringIO()
    with redirect_stdout(out):
        command_tree()([*command, "--help"], prog_name="nestpipe", standalone_mode=False)
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def reference() -> str:
    """The page `reference.md`."""
    parts = ["# Command-line reference", "", "Written by `make docs` from the program itself."]
    for command in _commands(command_tree()):
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


def config() -> str:
    """The page `config.md`: every key of a config file and every setting of the service."""
    parts = [
        "# Config reference",
        "",
        "Every key on one page, written by `make docs` from the code.",
    ]
    parts += ["A key is set in a TOML file, or by `--set section.key=value`.", ""]
    parts += ["## Training: `train`, `eval`, `verify`", *_sections(JobConfig(), "")]
    parts += ["", "## A table of a model", "", *_keys(Table, "", None)]
    parts += [
        "",
        "## Serving: `serve --set KEY=VALUE`",
        "",
        *_keys(ServeSettings, "", ServeSettings()),
    ]
    parts += ["", "### `http`", "", *_keys(HttpSettings, "http.", HttpSettings())]
    return "\n".join([*parts, ""])


def _sections(value: Any, path: str) -> list[str]:
    """A heading with its keys for each section below, in the order of the code."""
    lines: list[str] = []
    for known in fields(value):
        below = getattr(value, known.name)
        if is_dataclass(below):
            name = f"{path}{known.name}"
            lines += ["", f"### `[{name}]`", "", inspect.getdoc(type(below)) or "", ""]
            lines += [*_keys(type(below), f"{name}.", below), *_sections(below, f"{name}.")]
    return lines


def _keys(section: type, path: str, value: Any) -> list[str]:
    """An entry for each key: its type, its default and what it means."""
    said = _field_docs(section)
    lines: list[str] = []
    for known in fields(section):
        default = getattr(value, known.name, MISSING) if value is not None else known.default
        if known.init and not is_dataclass(default):
            text = re.sub(r" ?Default: `[^`]*`\.$", "", said.get(known.name, ""))
            kind = _kind(get_type_hints(section)[known.name])
            shown = "" if default is MISSING else f", default `{_toml(default)}`"
            lines += _item(f"`{path}{known.name}` ({kind}{shown}): {text}".rstrip(": "))
    return lines


def _kind(hint: Any) -> str:
    """What a key may hold, in words of TOML."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_kind(part) for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        return " or ".join(f"`{word!s}`" for word in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list of {_kind(get_args(hint)[0])}s".replace("texts", "text")
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return " or ".join(f"`{word.value}`" for word in hint)
    plain = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    return plain.get(hint, "section")


def _toml(value: Any) -> str:
    """A default as a config file would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_toml, value))}]"
    if value is None:
        return "unset"
    return f'"{value}"' if isinstance(value, str) else f"{value}"


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
        decision = " ".join(decision.split())
        lines += _item(f"{page.name[:10]}: [{question}]({page.name}) Decision: {decision}")
    # For the site: which pages stand below this one.
    lines += ["", "```{toctree}", ":hidden:", ":glob:", ":reversed:", "", "20*", "```"]
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
        "config.md": config(),
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
