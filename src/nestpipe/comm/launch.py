"""Start the ranks of a run on this machine, as `torchrun` would: the same launcher, the same
environment in every rank, only the settings chosen for one machine.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nestpipe.deprecated import warn
from nestpipe.errors import ConfigError, NestpipeError

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


Command = Sequence[str] | Callable[[], object]


def launch(command: Command | int, ranks: int | Command = 1) -> int:
    """Run `command` once per rank on this machine, and return the exit status of the run.

    The command is a program with its arguments, or a function that a new process can import: one
    of a module, not of another function, and called only under `if __name__ == "__main__"`. It
    finds RANK, WORLD_SIZE, MASTER_ADDR and so on in its environment. Standard output is shown for
    rank 0, standard error for all. When a rank fails the others are told to stop, and the status is
    that of the first to fail (128 and the signal's number, where a signal ended it). A signal to
    this process goes to the ranks; where all of them have saved and ended well, the status is 0.
    """
    if isinstance(command, int):
        warn("launch(ranks, command)", "launch(command, ranks)")
        command, ranks = ranks, command
    assert isinstance(ranks, int), "ranks are counted"
    assert not isinstance(command, int), "a command is a program or a function"
    _check(command, ranks)
    # Late: the launcher alone takes a second to import.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    entry, arguments = (_main, [command]) if callable(command) else (command[0], list(command[1:]))
    with (
        tempfile.TemporaryDirectory(prefix="nestpipe-") as folder,
        _environment({**_for_ranks(ranks), "NESTPIPE_STOPPED": folder}),
        _quiet_launcher(),
    ):
        try:
            elastic_launch(_config(ranks, folder), entry)(*arguments)
        except ChildFailedError as failed:
            _, first = failed.get_first_failure()
            return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
        except SignalException as stopped:
            saved = list(Path(folder).glob("stopped-*"))
            return 0 if len(saved) == ranks else 128 + stopped.sigval
    return 0


def _check(command: Command, ranks: int) -> None:
    """Refuse what no process could be started with."""
    if ranks < 1:
        raise ConfigError(f"ranks is {ranks}; start at least 1")
    named = getattr(command, "func", command)  # of a functools.partial
    if callable(named) and "<" in getattr(named, "__qualname__", ""):
        raise ConfigError(
            f"{named.__qualname__} is inside another function, so a new process cannot import it; "
            "define it at the top of a module"
        )


def _config(ranks: int, folder: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(
            log_dir=folder, redirects=dict.fromkeys(range(1, ranks), Std.OUT)
        ),
    )


def _for_ranks(ranks: int) -> dict[str, str]:
    """What every rank finds in its environment, unless the user has set it."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": LOOPBACK}


def _main(function: Callable[[], object]) -> None:
    """A rank that is a function: its failure is shown once, here, and becomes an exit status."""
    try:
        function()
    except NestpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except Exception:  # noqa: BLE001  it ends the process
        traceback.print_exc()
        sys.exit(1)


@contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set what is not set; the ranks inherit it."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """The ranks say themselves why they failed; the launcher's own summary would hide it."""
    loud = ("torch.distributed", "torch.multiprocessing")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(loud)]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
