#!/usr/bin/env python3
"""NestPipe beside TorchRec on a GPU machine that reaches no package registry.

TorchRec's packages come as pieces of one compressed archive with a folder `site`. They are kept
outside the checkout, in ~/.cache/nestpipe-lab or where NESTPIPE_LAB says. Needs only Python with
torch, and NestPipe's sources beside this file.

    tools/lab.py put .lab/torchrec/piece.0
    tools/lab.py put .lab/torchrec/piece.1      (and so on: each may come by itself)
    tools/lab.py unpack
    tools/lab.py compare A D --json out/lab.json
    tools/lab.py table --only A,C --json out/table.json
    tools/lab.py table --only paper --add out/table.json --json out/all.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
HOME = Path(os.environ.get("NESTPIPE_LAB") or Path.home() / ".cache" / "nestpipe-lab")
SITE = HOME / "site"
UNPACK = "cat piece.* | xz -d -T8 | tar x"

# NestPipe needs no installation.
sys.path.insert(0, str(ROOT / "src"))

from nestpipe.errors import ConfigError, NestpipeError, RunError  # noqa: E402

if TYPE_CHECKING:
    from nestpipe.bench.pipeline_cases import PipelineCase, Variant
    from nestpipe.bench.torchrec_lab import Comparison, LabReading, Peer, TableRow


def say(line: str) -> None:
    """Report progress; standard output is for results."""
    sys.stderr.write(line + "\n")


def put(files: Sequence[Path]) -> None:
    """Copy files to where they stay while the machine does."""
    HOME.mkdir(parents=True, exist_ok=True)
    for file in files:
        if not file.is_file():
            raise ConfigError(f"there is no file {str(file)!r}; bring the pieces of the archive")
        shutil.copyfile(file, HOME / file.name)
    for file in sorted(HOME.iterdir()):
        if file.is_file():
            say(f"{file.name} {file.stat().st_size:,} bytes")


def unpack() -> None:
    """Make the packages of the pieces."""
    pieces = sorted(HOME.glob("piece.*"))
    if not pieces:
        raise ConfigError(f"no pieces in {str(HOME)!r}; bring them with `put` first")
    shutil.rmtree(SITE, ignore_errors=True)
    done = subprocess.run(["bash", "-o", "pipefail", "-c", UNPACK], cwd=HOME, check=False)
    if done.returncode != 0 or not (SITE / "torchrec").is_dir():
        raise RunError(f"{len(pieces)} pieces did not unpack; is one missing?")
    found = sorted(path.name.split(".dist-info")[0] for path in SITE.glob("*rec-*.dist-info"))
    say(f"unpacked {', '.join(found)} into {SITE}")


def find_peer(options: argparse.Namespace) -> Peer | None:
    """TorchRec, unless it is not wanted; a missing one is refused before anything runs."""
    from nestpipe.bench.torchrec_lab import Peer

    if options.no_peer:
        return None
    if not SITE.exists():
        raise ConfigError(f"there is no {str(SITE)!r}; run `unpack` first, or give --no-peer")
    return Peer(SITE, tuple(options.shares), options.peer_limit)


def compare(options: argparse.Namespace) -> None:
    """Both systems on each configuration, in the plans and forms that are asked for."""
    from nestpipe.bench.torchrec_lab import lab_variants

    def variants_of(case: PipelineCase) -> list[Variant]:
        micro_batches = options.micro_batches or [case.micro_batches]
        return lab_variants(case, options.plans, options.forms, micro_batches)

    _, failed = _run(options, options.configs, variants_of)
    _refuse(failed)


def table(options: argparse.Namespace) -> None:
    """Every exact plan, both baselines and TorchRec, as one table."""
    from nestpipe.bench.torchrec_lab import joined_parts, plan_table, table_variants

    def variants_of(case: PipelineCase) -> list[Variant]:
        return [] if options.peer_only else table_variants(case, options.forms)

    parts, failed = _run(options, options.only, variants_of)
    results = joined_parts(parts)
    print(_table(results, plan_table(results)))
    _refuse(failed)


def _run(
    options: argparse.Namespace,
    configs: Sequence[str],
    variants_of: Callable[[PipelineCase], list[Variant]],
) -> tuple[list[Comparison], list[str]]:
    """Time both systems on each configuration; also which of them lack the figures of one side.

    Figures are written after each.
    """
    from nestpipe.bench.torchrec_lab import Comparison, joined_parts, lab_case, plan_table

    cases = {config: _sized(lab_case(config, options.steps), options) for config in configs}
    planned = {config: variants_of(case) for config, case in cases.items()}
    peer = find_peer(options)
    results = [Comparison.from_json(given) for given in _added(options.add)]
    failed: list[str] = []
    for config, case in cases.items():
        results.append(_compare_one(config, case, planned[config], peer, options))
        print(_details(results[-1]), flush=True)
        if not _complete(results[-1], peer, planned[config]):
            failed.append(config)
        if options.json:  # after each: a run that is cut short leaves what it had
            options.json.parent.mkdir(parents=True, exist_ok=True)
            whole = joined_parts(results)
            document = {
                "results": [result.as_json() for result in whole],
                "table": [row.as_json() for row in plan_table(whole)],
            }
            options.json.write_text(json.dumps(document, indent=2) + "\n")
    return results, failed


def _refuse(failed: Sequence[str]) -> None:
    if failed:
        raise RunError(f"no figures of one side for {', '.join(failed)}; see above")


def _sized(case: PipelineCase, options: argparse.Namespace) -> PipelineCase:
    case = replace(case, rounds=options.rounds)
    return replace(case, rows=options.rows) if options.rows else case


def _added(files: Sequence[Path]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for file in files:
        if not file.is_file():
            raise ConfigError(f"there is no file {str(file)!r}; give one that --json has written")
        found += json.loads(file.read_text())["results"]
    return found


def _complete(result: Comparison, peer: Peer | None, planned: Sequence[Variant]) -> bool:
    wanted = ({"NestPipe"} if planned else set()) | ({"TorchRec"} if peer else set())
    return {reading.system for reading in result.readings} >= wanted


def _compare_one(
    config: str,
    case: PipelineCase,
    variants: Sequence[Variant],
    peer: Peer | None,
    options: argparse.Namespace,
) -> Comparison:
    from nestpipe.bench.torchrec_lab import Comparison, time_nestpipe, time_torchrec

    theirs: list[LabReading] = []
    if peer:
        say(f"{config}: TorchRec, {case.rounds} rounds with each share of its cache")
        theirs = time_torchrec(peer, case, case.rounds, options.steps)
    ours: list[LabReading] = []
    if variants:
        say(f"{config}: NestPipe, {len(variants)} variants, {case.rounds} rounds and a warm-up")
        try:
            ours = time_nestpipe(case, variants)
        except RunError as error:  # what TorchRec took the time for, and what follows, still counts
            say(f"{config}: {error}")
    return Comparison(config, case, (*theirs, *ours))


def _details(result: Comparison) -> str:
    """Medians over rounds, with the fastest and the slowest round."""
    from nestpipe.bench.pipeline_cases import SerialLoop

    case = result.case
    lines = [
        f"{result.config}: {case.ranks} ranks x {case.batch} samples, {case.rows:,} rows, "
        f"{case.blocks} blocks of {case.width}"
    ]
    for seen in result.readings:
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms in seen.parts_ms.items())
        lines.append(
            f"  {seen.system:8}  {seen.pipeline:48} {_step(seen):>24} ms "
            f"{seen.samples_per_s(result.samples):9,.0f} samples/s"
            + (f"  {parts}" if parts else "")
        )
    for loop in SerialLoop:
        if (ratio := result.over_serial(loop)) is not None:
            lines.append(f"  NestPipe over {loop} serial: {ratio:.2f}x")
    if result.ratio is not None:
        lines.append(f"  NestPipe over TorchRec, the fastest plan of each: {result.ratio:.2f}x")
    return "\n".join(lines)


def _step(seen: LabReading) -> str:
    low, high = seen.range_ms
    return f"{seen.step_ms:.1f} ({low:.1f}..{high:.1f})"


def _table(results: Sequence[Comparison], rows: Sequence[TableRow]) -> str:
    """In Markdown: the step of every plan in its fastest form, and what `nested` gains."""
    configs = [result.config for result in results]
    lines = [
        f"| ms a step, median (range) | {' | '.join(configs)} |",
        "| --- |" + " --- |" * len(configs),
    ]
    for row in rows:
        cells = [_step(row.readings[c]) if c in row.readings else "-" for c in configs]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    nested = next(row for row in rows if row.name == "nested")
    for row in rows:
        if row.name in ("strict serial", "async serial", "TorchRec"):
            cells = [
                f"{row.readings[c].step_ms / nested.readings[c].step_ms:.2f}x"
                if c in row.readings and c in nested.readings
                else "-"
                for c in configs
            ]
            lines.append(f"| nested over {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _shares(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """What can be asked for."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    putting = commands.add_parser("put", help="copy pieces of the archive out of the checkout")
    putting.add_argument("files", nargs="+", type=Path)
    commands.add_parser("unpack", help="make TorchRec's packages of the pieces")
    comparing = commands.add_parser(
        "compare",
        help="time TorchRec, then NestPipe, on the same work",
        epilog="Example: tools/lab.py compare A --micro-batches 4,8 --json out/lab.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = comparing.add_argument
    add("configs", nargs="+", metavar="A|B|C|D|paper", help="lab configurations")
    add("--plans", type=_words, default="nested", help="our plans; serial never counts as best")
    add(
        "--micro-batches",
        "--micros",
        type=_numbers,
        help="our micro-batches; default: those of the case",
    )
    _add_common(comparing)
    tabling = commands.add_parser(
        "table",
        help="every plan, both baselines and TorchRec as one table",
        epilog="Example: tools/lab.py table --only A,C --json out/table.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    tabling.add_argument("--only", type=_words, default="A,C,paper", help="configurations")
    tabling.add_argument("--peer-only", action="store_true", help="time TorchRec alone")
    _add_common(tabling)
    return top


def _add_common(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--json", type=Path, metavar="FILE", help="write all figures, after each configuration")
    add("--add", type=Path, nargs="+", default=[], metavar="FILE", help="figures of earlier parts")
    add("--forms", type=_words, default="new,whole", help="retrieval of our overlapping plans")
    add("--rounds", type=int, default=3, help="timed rounds of each variant, of both")
    add("--steps", type=int, default=12, help="steps on the clock in a round, of both")
    add("--rows", type=int, help="rows of the table; default: those of the case")
    add("--shares", type=_shares, default="0.02,0.1,0.3", help="shares of TorchRec's cache")
    add("--peer-limit", type=float, default=240.0, help="seconds for TorchRec on a configuration")
    add("--no-peer", action="store_true", help="time NestPipe alone")


def main() -> None:
    """Do what the command line says."""
    options = parser().parse_args()
    above = os.environ.get("PYTHONPATH")  # of the ranks, which find NestPipe here too
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *([above] if above else [])])
    try:
        if options.command == "put":
            put(options.files)
        elif options.command == "unpack":
            unpack()
        else:
            {"compare": compare, "table": table}[options.command](options)
    except NestpipeError as error:
        say(f"error: {error}")
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
