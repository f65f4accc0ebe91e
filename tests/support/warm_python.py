"""Python processes of tests begin warm: as forks of one that has imported torch already.

A new interpreter takes two or three seconds to import torch, and the tests start hundreds of them.
`in_place_of_python` lets `sys.executable` name a small program (`warm_client.py`) that asks a warm
process for a fork, hands it its arguments, environment, folder and open files, passes signals on,
and ends as the fork ends. One warm process, of `warm_process`, serves all workers of a run.

Forks share the seed of hashes, and cannot show what a start itself does: tests of that use `REAL`.
The long profile, and a machine with a GPU, use it everywhere.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import marshal
import multiprocessing.process
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

REAL = sys.executable
"""The interpreter of the tests."""
CLIENT = Path(__file__).with_name("warm_client.py")
CLIENT_PATH = "NESTPIPE_WARM_PYTHON"
"""The variable that tells workers where the client is."""
LONGEST_PATH = 90
"""In the first line of a script, and of a socket; longer ones use `REAL`."""
LIBRARIES = (
    *("torch", "torch._dynamo", "torch.distributed.launcher.api", "torch.multiprocessing.spawn"),
    *("torch.distributed.elastic.multiprocessing", "torch.distributed.elastic.agent.server"),
    *("numpy", "safetensors.torch", "rich.console", "typer", "tensorboard"),
    *("fastapi", "httpx", "prometheus_client", "uvicorn"),
    *("nestpipe.train.job", "nestpipe.train.verify", "nestpipe.train.loop"),
    *("nestpipe.serve.engine.instance", "nestpipe.serve.http.apps"),
)
"""What processes of tests import; of NestPipe, nothing that is a program (`-m`) itself."""
INHERITED = ("PYTHON", "TRITON", "LD_")
"""Variables that begin so are read when Python starts or a library is imported."""
GONE_S = 2.0
"""How often the warm process looks whether the tests still run."""
HIGH = 512
"""Above any number of a file that a fork inherits."""


@contextmanager
def warm_process() -> Iterator[None]:
    """A warm process for this process and all below it; it starts with the first fork."""
    folder = Path(tempfile.mkdtemp(prefix="nestpipe-python-"))
    # A GPU must not be touched before a fork, and some kernels cannot tell when one ends.
    usable = hasattr(os, "pidfd_open") and not Path("/dev/nvidiactl").exists()
    before = os.environ.pop(CLIENT_PATH, None)
    try:
        if usable and max(len(REAL), len(str(folder))) < LONGEST_PATH:
            os.environ[CLIENT_PATH] = str(_client_in(folder))
        yield
    finally:
        os.environ.pop(CLIENT_PATH, None)
        if before is not None:
            os.environ[CLIENT_PATH] = before
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        shutil.rmtree(folder)


@contextmanager
def in_place_of_python() -> Iterator[None]:
    """`sys.executable` starts forks of the warm process, where there is one."""
    sys.executable = os.environ.get(CLIENT_PATH, REAL)
    try:
        yield
    finally:
        sys.executable = REAL


def _client_in(folder: Path) -> Path:
    same = {name: value for name, value in os.environ.items() if name.startswith(INHERITED)}
    settings = (REAL, __file__, os.getpid(), INHERITED, same)
    (folder / "settings").write_bytes(marshal.dumps(settings))
    client = folder / "python"
    client.write_text(f"#!{REAL} -IS\n{CLIENT.read_text()}")
    client.chmod(0o755)
    return client


# The warm process


def serve(folder: Path, tests: int) -> dict[str, Any] | None:
    """Fork for everybody who asks, until the tests are gone; in a fork, what was asked for."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "starting"))
    listener.listen(64)
    (folder / "starting").rename(folder / "socket")  # there once it can be asked
    clients: dict[socket.socket, tuple[int, int]] = {}
    while _runs(tests):
        ended = {watch: client for client, (_, watch) in clients.items()}
        ready: socket.socket | int
        for ready in select.select([listener, *clients, *ended], [], [], GONE_S)[0]:
            if ready is listener:
                client = listener.accept()[0]
                asked, files = _received(client)
                if asked is None:  # it was killed before it had asked
                    client.close()
                    continue
                process = os.fork()
                if process == 0:
                    for one in (listener, client, *clients):
                        one.close()
                    _enter_network(files.pop())
                    _inherit(files, asked["files"])
                    return asked
                for file in files:
                    os.close(file)
                clients[client] = process, os.pidfd_open(process)
                _tell(client, process)
            elif isinstance(ready, int):
                _tell_end(ended[ready], *clients.pop(ended[ready]))
            elif ready in clients:  # it was killed, and its group with it
                with suppress(ProcessLookupError):
                    os.killpg(clients[ready][0], signal.SIGKILL)
    return None


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _received(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    size, files, _, _ = socket.recv_fds(client, 8, 253)
    text, whole = b"", int.from_bytes(size, "big")
    while more := client.recv(whole - len(text)):
        text += more
    return marshal.loads(text) if size and len(text) == whole else None, list(files)


def _tell(client: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError):
        client.sendall(number.to_bytes(8, "big", signed=True))


def _tell_end(client: socket.socket, process: int, watch: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.close(watch)
    _tell(client, status)
    client.close()


# A fork


def _enter_network(file: int) -> None:
    """Be in the network namespace of the one who asks."""
    if os.fstat(file).st_ino != Path("/proc/self/ns/net").stat().st_ino:
        assert ctypes.CDLL(None).setns(file, 0) == 0, "no way into a network namespace"


def _inherit(files: list[int], numbers: list[int]) -> None:
    """Give the files the numbers which they have in the one who asks, and close all others."""
    os.setsid()
    kept = [HIGH + place for place in range(len(files))]
    for file, high in zip(files, kept, strict=True):
        os.dup2(file, high)
    os.closerange(0, HIGH)
    for high, number in zip(kept, numbers, strict=True):
        os.dup2(high, number)
        os.close(high)


def _become(asked: dict[str, Any]) -> list[str]:
    """Take over environment, folder and signals; the arguments without options."""
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    os.sched_setaffinity(0, asked["cores"])
    # As a new interpreter would find it; whoever started the warm process may ignore more.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in asked["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    multiprocessing.process.ORIGINAL_DIR = asked["folder"]  # pyright: ignore
    torch = sys.modules["torch"]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    if filters := os.environ.get("PYTHONWARNINGS"):
        sys.warnoptions[:] = filters.split(",")
        warnings._processoptions(sys.warnoptions)  # pyright: ignore[reportAttributeAccessIssue]
    arguments = list(asked["arguments"])
    while arguments[0][:2] in ("-u", "-B", "-W"):
        if arguments.pop(0) == "-u":
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)  # pyright: ignore[reportAttributeAccessIssue]
    return arguments


def _run(arguments: list[str]) -> None:
    """What `python ARGUMENTS` does."""
    option, *rest = arguments
    del sys.path[0]  # the folder of this file
    if option == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif option == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, str(Path(option).resolve().parent))
        runpy.run_path(option, run_name="__main__")


def _end(status: object) -> None:
    """As an interpreter ends, but for the half second in which it would clear a million objects."""
    if status is not None and not isinstance(status, int):
        sys.stderr.write(f"{status}\n")
        status = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit((status or 0) & 0xFF)


def main(folder: str, tests: str) -> None:
    (Path(folder) / "pid").write_text(str(os.getpid()))
    sys.executable = f"{folder}/python"  # before anybody notes it
    for name in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # what all share is not touched, so not copied
    asked = serve(Path(folder), int(tests))
    if asked is None:
        return
    status: object = 0
    try:
        _run(_become(asked))
    except SystemExit as stop:
        status = stop.code
    except BaseException as error:  # noqa: BLE001 - what an interpreter does
        traceback.print_exception(error)
        status = 1
    _end(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
