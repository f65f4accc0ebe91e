"""Train for long with rows that come and go, kill it at random, and see that nothing is lost.

    python tools/soak.py --minutes 20
    python tools/soak.py --minutes 5 --ranks 2 --seed 3 --json soak.json

The first half of the time trains with row policies and increments. The run is killed (SIGKILL) at
random moments, all ranks at once, and goes on with `--resume auto`; SIGTERM ends it. Then a second
run does the same steps in one piece. The exit status is 1 unless both end in the same bits, with
the same files of evicted keys, and the memory of the second run stays flat after its warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
WARM_UP = 0.4
"""Of a run's samples of memory: caches and tables fill up."""
MOST_GROWTH, SLACK_BYTES = 1.03, 24 << 20
"""What the last fifth of a run may have over what it had after its warm-up."""
EARLY_SHARE = 0.2
"""Of kills: while a run starts."""
POLICIES = {
    "lifecycle.evict": '"lru"',
    "lifecycle.max_rows": 3_000,
    "lifecycle.ttl": 150,
    "lifecycle.admit_count": 2,
    "lifecycle.admit_candidates": 8_000,
    "run.lifecycle_every": 25,
}
WORLD = {
    "data.synthetic.samples": 1_000_000_000,
    "data.synthetic.test_samples": 512,
    "data.synthetic.num_tables": 4,
    "data.synthetic.num_keys": 10_000_000,
    "data.synthetic.exponent": 0.9,
    "run.batch": 512,
    "run.device": '"cpu"',
    "run.checkpoint_every": 20,
    "run.incremental": "true",
    "run.full_every": 5,
    "run.keep_last": 2,
    "pipeline.plan": '"nested"',
    "model.dim": 16,
}


@dataclass(frozen=True, kw_only=True)
class Soak:
    """One soak: where, how long, on how many ranks."""

    folder: Path
    minutes: float
    ranks: int
    seed: int

    def command(self, name: str, steps: int) -> list[str]:
        """The launch line of a run; the same for its first start and every restart."""
        settings: dict[str, object] = {**WORLD, **POLICIES}
        settings["run.checkpoint"] = f'"{self.folder / name}"'
        settings["run.evicted"] = f'"{self.folder / name}-evicted"'
        settings["run.steps"] = steps
        pairs = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        ranks = ["--ranks", str(self.ranks)]
        return [sys.executable, "-m", "nestpipe", "train", *ranks, "--resume", "auto", *pairs]

    def start(self, name: str, steps: int = 0) -> subprocess.Popen[bytes]:
        """A run, its words in a file."""
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(self.command(name, steps), stdout=log, stderr=log)


@dataclass
class Report:
    """What a soak came to."""

    seconds: float = 0.0
    kills: int = 0
    kills_before_a_checkpoint: int = 0
    steps: int = 0
    rows: int = 0
    evicted_files: int = 0
    memory_mb: list[float] = field(default_factory=list[float])
    """Of the run in one piece, all processes, second by second."""
    faults: list[str] = field(default_factory=list[str])


def family(root: int) -> list[int]:
    """A process and all that it has started: a launcher gives its ranks sessions of their own."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has just ended
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    found = [root]
    for process in found:  # grows while it is read
        found += [child for child, parent in parents.items() if parent == process]
    return found


def resident_bytes(root: int) -> int:
    """Memory of a process and all that it has started."""
    total = 0
    for process in family(root):
        try:
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE
        except OSError:
            continue
    return total


def kill(run: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a run at once, as a power cut does."""
    processes = family(run.pid)
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    run.wait()
    while any(_lives(process) for process in processes):
        time.sleep(0.05)


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # a zombie has ended, and nobody has asked how


def wait(run: subprocess.Popen[bytes], seconds: float) -> None:
    """So long, or until the run ends."""
    with suppress(subprocess.TimeoutExpired):
        run.wait(seconds)


def wait_until_training(soak: Soak, run: subprocess.Popen[bytes]) -> None:
    """Until a run says its first word, which it does when everything is loaded."""
    log = soak.folder / "killed.log"
    size = log.stat().st_size
    while log.stat().st_size == size and run.poll() is None:
        time.sleep(0.2)


def killed_run(soak: Soak, report: Report, until: float) -> None:
    """Start, kill and start again; at last ask the run to stop."""
    chance = random.Random(soak.seed)
    while time.monotonic() < until:
        run = soak.start("killed")
        if chance.random() < EARLY_SHARE:
            wait(run, chance.uniform(1.0, 8.0))
        else:
            wait_until_training(soak, run)
            wait(run, chance.uniform(0.0, 25.0))
        if run.poll() is not None:
            report.faults.append(f"a run ended by itself with status {run.returncode}")
            return
        kill(run)
        report.kills += 1
        report.kills_before_a_checkpoint += not (soak.folder / "killed").is_dir()
    run = soak.start("killed")
    wait_until_training(soak, run)
    wait(run, 10.0)
    # To the ranks themselves: they save and exit, and so does their launcher.
    for process in family(run.pid)[1 if soak.ranks > 1 else 0 : 1 + soak.ranks]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    if run.wait() != 0:
        report.faults.append(f"SIGTERM ended the run with status {run.returncode}")


def run_in_one_piece(soak: Soak, report: Report) -> None:
    """The same steps without a kill; memory is looked at all the time."""
    run = soak.start("whole", report.steps)
    while run.poll() is None:
        report.memory_mb.append(resident_bytes(run.pid) / 1e6)
        time.sleep(1.0)
    if run.returncode != 0:
        report.faults.append(f"the run in one piece ended with status {run.returncode}")


def growth(memory_mb: list[float]) -> str | None:
    """What is wrong with memory over time, if anything."""
    warm = memory_mb[int(WARM_UP * len(memory_mb)) : int(0.6 * len(memory_mb))]
    last = memory_mb[int(0.8 * len(memory_mb)) :]
    if not warm or not last:
        return "the run in one piece was too short to look at its memory"
    bound = MOST_GROWTH * max(warm) + SLACK_BYTES / 1e6
    if max(last) > bound:
        return f"memory grew from {max(warm):.0f} to {max(last):.0f} MB after its warm-up"
    return None


def compare(soak: Soak, report: Report) -> None:
    """Both runs must have the same state and have told of the same keys."""
    from nestpipe.checkpoint.folder import newest
    from nestpipe.checkpoint.merging import difference

    ours, theirs = newest(soak.folder / "killed"), newest(soak.folder / "whole")
    if ours is None or theirs is None:
        report.faults.append("a run left no checkpoint")
        return
    report.rows = ours.manifest.num_rows
    if ours.manifest.step != theirs.manifest.step:
        report.faults.append(f"steps {ours.manifest.step} and {theirs.manifest.step}")
    if not difference(ours, theirs).same_state:
        report.faults.append("the killed run and the one in one piece differ")
    told = [_files(soak.folder / f"{name}-evicted") for name in ("killed", "whole")]
    report.evicted_files = len(told[1])
    if not told[1]:
        report.faults.append("no row left in that time, so nothing is shown; soak for longer")
    if told[0] != told[1]:
        report.faults.append("the files of evicted keys differ")


def _files(folder: Path) -> dict[str, bytes]:
    found = sorted(folder.glob("evicted-*")) if folder.is_dir() else []
    return {path.name: path.read_bytes() for path in found}


def soaked(soak: Soak) -> Report:
    """The whole of it."""
    from nestpipe.checkpoint.folder import newest

    report, began = Report(), time.monotonic()
    killed_run(soak, report, began + 30.0 * soak.minutes)
    reached = newest(soak.folder / "killed")
    if reached is None or report.faults:
        report.faults.append("the killed run left no checkpoint" if reached is None else "")
        return report
    report.steps = reached.manifest.step
    print(f"{report.kills} kills, {report.steps} steps; now the same in one piece", flush=True)
    run_in_one_piece(soak, report)
    fault = growth(report.memory_mb)
    report.faults += [fault] if fault else []
    compare(soak, report)
    report.seconds = time.monotonic() - began
    return report


def main() -> None:
    """Soak, say what came of it, and exit with 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=20.0, help="about so long in all")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a run")
    parser.add_argument("--seed", type=int, default=0, help="when to kill")
    parser.add_argument("--json", type=Path, default=None, help="write figures there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nestpipe-soak-") as folder:
        soak = Soak(folder=Path(folder), minutes=given.minutes, ranks=given.ranks, seed=given.seed)
        report = soaked(soak)
        if report.faults:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}")
    if given.json is not None:
        given.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    memory = report.memory_mb or [0.0]
    print(
        f"{report.seconds:.0f} s, {report.kills} kills, {report.steps} steps, "
        f"{report.rows:,} rows, {report.evicted_files} files of evicted keys, "
        f"{max(memory):.0f} MB at most"
    )
    for fault in filter(None, report.faults):
        print(f"FAULT: {fault}")
    print("not as it should be" if report.faults else "the same bits, and memory is flat")
    sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
    main()
