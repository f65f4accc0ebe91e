#!/usr/bin/env python3
"""Quality of averaged groups: a config trained with several groups, row optimizers and seeds.

    tools/groups_quality.py configs/kuairand.toml --groups 1,2,4 --seeds 0,1,2 --json quality.json

Every run is `nestpipe train CONFIG --ranks R`; all have the same batches. Prints a table of the
metric, the mean over seeds first, then each seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import mean

OPTIMIZERS = (
    "rowwise_adagrad",
    "momentum_scaled_rowwise_adagrad",
    "touch_scaled_rowwise_adagrad",
)


def train(options: argparse.Namespace, groups: int, optimizer: str, every: int, seed: int) -> float:
    """The metric of one run."""
    settings = {
        "run.seed": seed,
        "rows.optimizer": optimizer,
        "parallel.groups": groups,
        "parallel.merge": "averaged",
        "parallel.merge_every": every,
    }
    command = [sys.executable, "-m", "nestpipe", "train", str(options.config), "--json", "-"]
    command += ["--ranks", str(options.ranks)]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    for given in options.set:
        command += ["--set", given]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return float(json.loads(done.stdout)["metrics"][options.metric])


def main() -> None:
    """Train everything that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("config", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--groups", type=numbers, default=[1, 2, 4])
    parser.add_argument("--every", type=numbers, default=[1], help="intervals of merging")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--metric", default="auc")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: list[dict[str, object]] = []
    for groups, every, optimizer in product(options.groups, options.every, OPTIMIZERS):
        if groups == 1 and (every != options.every[0] or optimizer != OPTIMIZERS[0]):
            continue  # one group has nothing to merge, and scales by one
        values = [train(options, groups, optimizer, every, seed) for seed in options.seeds]
        found.append(
            {"groups": groups, "every": every, "optimizer": optimizer, options.metric: values}
        )
        each = ", ".join(f"{value:.4f}" for value in values)
        print(f"M = {groups}, every {every}, {optimizer}: {mean(values):.4f} ({each})", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
