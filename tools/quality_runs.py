#!/usr/bin/env python3
"""What sequence models reach on MovieLens 1M: all recipes and seeds at once on one device.

    tools/quality_runs.py --data FOLDER --json out/quality.json

FOLDER holds `ratings.dat`. A run alone leaves a GPU idle for most of a step, so they share it: each
has a small pool of rows, one thread, and an evaluation every ten epochs. At the limit runs save
and end; the same command later goes on with them, as long as the folder of checkpoints is there.
The figures are those of each run's last evaluation, beside the marks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECIPES = {"honest": "movielens", "published": "movielens_published", "fuxi": "movielens_fuxi"}
"""Configs by the names of recipes."""
MARKS = {"honest": {"hr@10": 0.305}, "published": {"hr@10": 0.3294, "ndcg@10": 0.1893}, "fuxi": {}}
STEPS_OF_AN_EPOCH = 48  # 6,040 users, 128 at a time
END_S = 40
"""Seconds for runs to save and end."""


@dataclass(frozen=True)
class Run:
    """A recipe and a seed."""

    recipe: str
    seed: int
    work: Path

    @property
    def name(self) -> str:
        return f"{self.recipe}_{self.seed}"

    def start(self, options: argparse.Namespace) -> subprocess.Popen[bytes]:
        settings = [
            f"data.path={options.data}",
            f"run.seed={self.seed}",
            f"run.checkpoint={self.work / self.name}",
            "run.keep_last=1",
            "run.record=off",
            "run.threads=1",
            f"run.eval_every={10 * STEPS_OF_AN_EPOCH}",
            f"run.device_memory={options.device_memory}",
            *options.set,
        ]
        config = ROOT / "configs" / f"{RECIPES[self.recipe]}.toml"
        words = [sys.executable, "-m", "nestpipe", "train", str(config), "--resume", "auto"]
        words += ["--json", str(self.figures)]
        for setting in settings:
            words += ["--set", setting]
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        with (self.work / f"{self.name}.txt").open("ab") as log:
            return subprocess.Popen(
                words,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "OMP_NUM_THREADS": "1"},
            )

    @property
    def figures(self) -> Path:
        return self.work / f"{self.name}.json"

    def read(self, status: int | None) -> dict[str, Any]:
        """What it has reached; `status` is None where it had to be killed."""
        found: dict[str, Any] = {"recipe": self.recipe, "seed": self.seed, "status": status}
        try:
            said = json.loads(self.figures.read_text())
        except (OSError, ValueError):
            log = (self.work / f"{self.name}.txt").read_text(errors="replace").splitlines()
            return {**found, "done": False, "said": log[-1:]}
        metrics = said.get("metrics") or {}
        kept = {name: metrics[name] for name in ("hr@10", "ndcg@10", "hr@50") if name in metrics}
        met = {name: metrics.get(name, 0.0) >= mark for name, mark in MARKS[self.recipe].items()}
        done = status == 0 and not said.get("stopped")
        return {**found, "done": done, "steps": said.get("steps"), **kept, "met": met}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--data", required=True, help="folder with ratings.dat")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="separated by commas")
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--work", default=".lab/quality", help="for checkpoints and logs")
    parser.add_argument(
        "--limit", type=float, default=520.0, help="seconds; then runs save and end"
    )
    parser.add_argument("--device-memory", default="1GB", help="of each run's pool of rows")
    parser.add_argument(
        "--set", action="append", default=[], help="SECTION.KEY=VALUE, for all runs"
    )
    parser.add_argument("--json", default="", help="file for the figures")
    options = parser.parse_args(words)
    unknown = set(options.recipes.split(",")) - set(RECIPES)
    if unknown:
        parser.error(f"--recipes has {', '.join(sorted(unknown))}; give {', '.join(RECIPES)}")
    if not all(seed.isdigit() for seed in options.seeds.split(",")):
        parser.error(f"--seeds is {options.seeds}; give whole numbers, separated by commas")
    return options


def train(runs: list[Run], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All at once, until they end or the limit comes."""
    began = time.monotonic()
    started = {run: run.start(options) for run in runs}
    told = False
    while any(process.poll() is None for process in started.values()):
        passed = time.monotonic() - began
        if passed > options.limit and not told:
            told = True
            for process in started.values():
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
        if passed > options.limit + END_S:
            break
        time.sleep(0.5)
    found = []
    for run, process in started.items():
        status = process.poll()
        if status is None:
            process.kill()
            process.wait()
        found.append(run.read(status))
    return found


def shown(of: dict[str, Any]) -> str:
    """A line for people."""
    figures = "  ".join(f"{name} {of[name]:.4f}" for name in ("hr@10", "ndcg@10") if name in of)
    met = "" if not of.get("met") else "  met" if all(of["met"].values()) else "  below the mark"
    end = f"{of.get('steps')} steps" if of["done"] else f"not done, {of.get('steps', 0)} steps"
    said = " ".join(of.get("said", []))
    return f"{of['recipe']:10} seed {of['seed']}  {figures}{met}  ({end}) {said}".rstrip()


def main(words: list[str] | None = None) -> int:
    """0 where every run came to its end."""
    options = parse(words)
    if not (Path(options.data) / "ratings.dat").is_file():
        print(f"{options.data} has no ratings.dat; put MovieLens 1M there", file=sys.stderr)
        return 2
    work = Path(options.work).absolute()
    work.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    runs = [Run(recipe, seed, work) for seed in seeds for recipe in options.recipes.split(",")]
    for run in runs:
        run.figures.unlink(missing_ok=True)
    found = train(runs, options)
    for of in found:
        print(shown(of))
    if options.json:
        Path(options.json).write_text(json.dumps({"runs": found}, indent=1) + "\n")
    return 0 if all(of["done"] for of in found) else 1


if __name__ == "__main__":
    sys.exit(main())
