#!/usr/bin/env python3
"""NestPipe beside TorchRec on a GPU machine that reaches no package registry.

TorchRec's packages come as pieces of one archive (`make-torchrec-pack`), with the script that times
it, `torchrec_lab.py`. They are kept outside the checkout, in ~/.cache/nestpipe-lab or where
NESTPIPE_LAB says. Needs only Python with torch, and NestPipe's sources beside this file.

    tools/lab.py put .lab/torchrec/torchrec_lab.py .lab/torchrec/piece.0
    tools/lab.py put .lab/torchrec/piece.1      (and so on: each may come by itself)
    tools/lab.py unpack
    tools/lab.py compare A D --json out/lab.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
HOME = Path(os.environ.get("NESTPIPE_LAB") or Path.home() / ".cache" / "nestpipe-lab")
SITE, SCRIPT = HOME / "site", HOME / "torchrec_lab.py"
UNPACK = "cat piece.* | xz -d -T8 | tar x"

# NestPipe needs no installation: its ranks find it here too.
sys.path.insert(0, str(ROOT / "src"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (str(ROOT / "src"), os.environ.get("PYTHONPATH")) if part
)

from nestpipe.errors import ConfigError, NestpipeError, RunError  # noqa: E402

if TYPE_CHECKING:
    from nestpipe.bench.lab import Comparison, Peer, Reading
    from nestpipe.bench.pipeline.cases import PipelineCase


def say(line: str) -> None:
    """Tell people how far it is; standard output is for results."""
    sys.stderr.write(line + "\n")


def put(files: Sequence[Path]) -> None:
    """Copy files to where they stay while the machine does."""
    HOME.mkdir(parents=True, exist_ok=True)
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"there is no file {str(file)!r}; make-torchrec-pack makes the pieces"
            )
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
    """TorchRec, unless it is not wanted; that it is missing is said before anything runs."""
    from nestpipe.bench.lab import Peer

    if options.no_peer:
        return None
    for path, how in ((SITE, "run `unpack`"), (SCRIPT, "bring it with `put`")):
        if not path.exists():
            raise ConfigError(f"there is no {str(path)!r}; {how} first, or give --no-peer")
    return Peer(SITE, SCRIPT, options.peer_kernels, options.peer_queues)


def compare(options: argparse.Namespace) -> None:
    """Both systems on each configuration, one after the other."""
    from nestpipe.bench.lab import lab_case

    cases = {c: replace(lab_case(c, options.steps), rounds=options.rounds) for c in options.configs}
    peer = find_peer(options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    results: list[Comparison] = []
    for config, case in cases.items():
        results.append(_compare_one(config, case, peer, options))
        print(_table(results[-1]), flush=True)
        if options.json:  # after each: a run that is cut short leaves what it had
            document = {"results": [result.as_json() for result in results]}
            options.json.write_text(json.dumps(document, indent=2) + "\n")
    failed = [result.config for result in results if not _complete(result, peer)]
    if failed:
        raise RunError(f"no figures of one side for {', '.join(failed)}; see above")


def _complete(result: Comparison, peer: Peer | None) -> bool:
    systems = {reading.system for reading in result.readings}
    return systems >= ({"NestPipe", "TorchRec"} if peer else {"NestPipe"})


def _compare_one(
    config: str, case: PipelineCase, peer: Peer | None, options: argparse.Namespace
) -> Comparison:
    from nestpipe.bench.lab import Comparison, gathered, lab_variants, time_nestpipe, time_torchrec

    micros = options.micros or [case.micros]
    variants = lab_variants(case, options.plans, options.forms, micros)
    theirs: list[tuple[str, float]] = []
    for repeat in range(options.repeats if peer else 0):
        assert peer is not None
        say(f"{config}: TorchRec, reading {repeat + 1} of {options.repeats}")
        theirs += time_torchrec(peer, config, options.steps)
    say(f"{config}: NestPipe, {len(variants)} variants in {case.rounds} rounds and one to warm up")
    ours: list[Reading] = []
    try:
        ours = time_nestpipe(case, variants)
    except RunError as error:  # what TorchRec took the time for, and what follows, still counts
        say(f"{config}: {error}")
    return Comparison(config, case, (*gathered(theirs), *ours))


def _table(result: Comparison) -> str:
    """Medians over rounds, with the fastest and the slowest round."""
    from nestpipe.bench.pipeline.cases import SerialLoop

    case = result.case
    lines = [
        f"{result.config}: {case.ranks} ranks x {case.batch} samples, {case.rows:,} rows, "
        f"{case.blocks} blocks of {case.width}"
    ]
    for seen in result.readings:
        low, high = seen.range_ms
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms in seen.parts_ms.items())
        lines.append(
            f"  {seen.system:8}  {seen.pipeline:52} {seen.step_ms:7.1f} ms "
            f"({low:.1f}..{high:.1f}) {seen.samples_per_s(result.samples):9,.0f} samples/s"
            + (f"  {parts}" if parts else "")
        )
    for loop in SerialLoop:
        if (ratio := result.over_serial(loop)) is not None:
            lines.append(f"  NestPipe over {loop} serial: {ratio:.2f}x")
    if result.ratio is not None:
        lines.append(f"  NestPipe over TorchRec, the fastest plan of each: {result.ratio:.2f}x")
    return "\n".join(lines)


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """What can be asked for."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    putting = commands.add_parser("put", help="copy pieces, or the script, out of the checkout")
    putting.add_argument("files", nargs="+", type=Path)
    commands.add_parser("unpack", help="make TorchRec's packages of the pieces")
    comparing = commands.add_parser(
        "compare",
        help="time TorchRec, then NestPipe, on the same work",
        epilog="Example: tools/lab.py compare A --micros 4,8 --json out/lab.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = comparing.add_argument
    add("configs", nargs="+", metavar="A|B|C|D", help="lab configurations")
    add("--json", type=Path, metavar="FILE", help="write all figures, after each configuration")
    add("--plans", type=_words, default="nested", help="our plans; serial never counts as best")
    add("--forms", type=_words, default="new,whole", help="our forms of retrieval")
    add("--micros", type=_numbers, help="our micro-batches; default: those of the case")
    add("--rounds", type=int, default=3, help="our timed rounds of each variant")
    add("--steps", type=int, default=12, help="steps on the clock, of both")
    add("--repeats", type=int, default=1, help="readings of TorchRec")
    add("--peer-kernels", default="fused_uvm_caching", help="where TorchRec's table is")
    add("--peer-queues", default="16", help="TorchRec's hardware queues; '' for CUDA's own number")
    add("--no-peer", action="store_true", help="time NestPipe alone")
    return top


def main() -> None:
    """Do what the command line says."""
    options = parser().parse_args()
    try:
        if options.command == "put":
            put(options.files)
        elif options.command == "unpack":
            unpack()
        else:
            compare(options)
    except NestpipeError as error:
        say(f"error: {error}")
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
