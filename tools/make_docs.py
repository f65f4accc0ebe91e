"""Writes what the docs generate: the command-line reference and the pictures.

Run by `make docs`; a test fails when a generated file is out of date.
"""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from pathlib import Path

from nestpipe.cli.app import app
from nestpipe.schedule import PlanOptions, nominal_trace, plan
from nestpipe.sim import Scale, chart, paper_cluster, scaling_curve
from nestpipe.trace import svg

DOCS = Path(__file__).resolve().parent.parent / "docs"
COMMANDS = (
    (),
    ("draw",),
    ("check",),
    ("simulate",),
    ("simulate", "paper"),
)


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
    for command in COMMANDS:
        title = " ".join(("nestpipe", *command))
        parts += ["", f"## `{title}`", "", "```text", help_text(command), "```"]
    return "\n".join([*parts, ""])


def timeline() -> str:
    """The nested plan, as the README shows it."""
    schedule = plan("nested", PlanOptions(micros=4)).schedule(4)
    return svg(nominal_trace(schedule), title="nested: four batches of four micro-batches")


def scaling() -> str:
    """The simulated scaling of the nested plan on the paper's cluster."""
    nested = plan("nested", PlanOptions(micros=8))
    scales = [Scale(workers) for workers in (128, 256, 512, 1024, 1536)]
    points = scaling_curve(nested, paper_cluster(), scales)
    return chart(points, "nested, 8 micro-batches, on the paper's cluster (simulated)")


def generated() -> dict[str, str]:
    """Every generated file, by its path under docs/."""
    return {"reference.md": reference(), "nested.svg": timeline(), "scaling.svg": scaling()}


if __name__ == "__main__":
    for name, text in generated().items():
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/{name}")
