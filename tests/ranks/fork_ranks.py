"""Ranks as forks of one process, which imports torch once for all of them.

python fork_ranks.py PROGRAM SCENARIO RANKS FIRST FOLDER

Calls `main(SCENARIO)` of the program in every rank, waits for the FIRST ranks to end, and prints
their exit statuses; what a rank says is in FOLDER/RANK.out and FOLDER/RANK.err.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType


def load(program: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def become(rank: int, folder: Path) -> None:
    os.environ["RANK"] = str(rank)
    for stream, suffix in ((1, "out"), (2, "err")):
        with (folder / f"{rank}.{suffix}").open("w") as file:
            os.dup2(file.fileno(), stream)


def main(program: str, scenario: str, ranks: str, first: str, folder: str) -> None:
    module = load(Path(program))
    started: list[int] = []
    for rank in range(int(ranks)):
        process = os.fork()
        if process == 0:
            become(rank, Path(folder))
            module.main(scenario)
            return  # and ends as any process does
        started.append(process)
    ended = [os.waitpid(process, 0)[1] for process in started[: int(first)]]
    for process in started[int(first) :]:
        os.kill(process, signal.SIGKILL)
    print(json.dumps([os.waitstatus_to_exitcode(status) for status in ended]))


if __name__ == "__main__":
    main(*sys.argv[1:])
