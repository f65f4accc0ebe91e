"""One process of the service: an instance, or the built-in router. Started by `launch`.

What it is to do is the one argument, as JSON; the token is in the environment. It stops when its
standard input ends: then whoever started it is gone.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nestpipe.config import build
from nestpipe.errors import NestpipeError, RunError
from nestpipe.serve.http.limits import read_token, require_token
from nestpipe.serve.model.ranker import HstuRankModel
from nestpipe.serve.settings import HttpSettings, ServeSettings

log = logging.getLogger("nestpipe.serve")


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """The configuration of one process of the service."""

    kind: Literal["instance", "router"]
    host: str
    port: int
    settings: ServeSettings = field(default_factory=ServeSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    checkpoint: str = ""
    device: str = "auto"
    dtype: str = "float32"
    histories: str | None = None
    instances: tuple[str, ...] = ()
    """URLs, of a router."""

    def as_mapping(self) -> dict[str, Any]:
        return asdict(self)


def main(text: str) -> int:
    """Serve until told to stop; the exit status."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    _stop_with_parent()
    role = build(Role, json.loads(text))
    try:
        token = read_token(None, os.environ)
        require_token(role.host, token)
        if role.kind == "router":
            _serve_router(role, token)
        else:
            _serve_instance(role, token)
    except NestpipeError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_status
    return 0


def _serve_router(role: Role, token: str | None) -> None:
    from nestpipe.serve.http.router_app import router_app
    from nestpipe.serve.process.server import bind_port, run

    listener = bind_port(role.host, role.port)
    urls = {f"instance-{number}": url for number, url in enumerate(role.instances)}
    has_histories = role.histories is not None
    served = router_app(urls, role.settings, role.http, token, has_histories)
    freeze_gc()
    run(served, listener, role.http)


def _serve_instance(role: Role, token: str | None) -> None:
    from nestpipe.serve.http.instance_app import instance_app
    from nestpipe.serve.http.requests import read_histories
    from nestpipe.serve.process.server import bind_port, run

    listener = bind_port(role.host, role.port)
    histories = None
    if role.histories is not None:
        histories = read_histories(Path(role.histories), role.settings.max_events)
    engine = _Engine(role)
    served = instance_app(
        engine.instance,
        role.settings,
        role.http,
        version=lambda: engine.instance.version,
        well=engine.is_well,
        reload=engine.reload,
        token=token,
        histories=histories,
    )
    freeze_gc()
    run(served, listener, role.http)
    engine.close()


class _Engine:
    """The instance of this process, and how it gets another model."""

    def __init__(self, role: Role) -> None:
        from nestpipe.serve.engine.calibration import Calibration, warm_up
        from nestpipe.serve.engine.instance import Instance

        self._role = role
        self._load = lambda path: HstuRankModel.from_checkpoint(path, role.device, role.dtype)
        self._model = self._load(role.checkpoint)
        warm_up(self._model)
        admission, again = None, None
        if role.settings.relay:  # else signals do nothing
            measured = Calibration(self._model, role.settings, lambda n: self._model.kv_bytes(n))
            admission, again = measured.admission, measured.again
        self.instance = Instance(self._model, role.settings, admission, recalibrate=again)

    def reload(self, checkpoint: str | None) -> str:
        """Load beside the old model, then swap; a fault leaves the old one.

        Where the newest that verifies is older than what is served, nothing is swapped.
        """
        model = self._load(checkpoint or self._role.checkpoint)
        served = self._model.version
        if checkpoint is None and _step_of(model.version) < _step_of(served):
            log.warning("%s is kept: the newest that verifies is %s", served, model.version)
            return served
        self.instance.swap_model(model)
        self._model = model
        return model.version

    def is_well(self) -> bool:
        """An instance that broke ends its process: it must be started again."""
        if self._is_broken():
            os.kill(os.getpid(), signal.SIGTERM)
            return False
        return True

    def _is_broken(self) -> bool:
        return bool(self.instance.stats()["broken"])

    def close(self) -> None:
        """End its threads; an error where it broke, so that the process fails."""
        broken = self._is_broken()
        self.instance.close()
        if broken:
            raise RunError("the instance broke; its log has the reason")


def _step_of(version: str) -> str:
    """The part of a version that grows with training."""
    return version.rpartition("-")[0]


def _stop_with_parent() -> None:
    """SIGTERM to ourselves when standard input ends."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="nestpipe-parent", daemon=True).start()


def command_of(role: Role) -> list[str]:
    """The command line of such a process."""
    return [sys.executable, "-m", "nestpipe.serve.process.worker", json.dumps(role.as_mapping())]


def environment_of(token: str | None, processes: int) -> Mapping[str, str]:
    """The environment of such a process: its share of the cores, and the token."""
    from nestpipe.serve.http.limits import TOKEN_VARIABLE

    found = dict(os.environ)
    found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    if token is not None:
        found[TOKEN_VARIABLE] = token
    return found


def freeze_gc() -> None:
    """Freeze the garbage collector's view of all present objects.

    Modules are 200,000 objects; to go through them takes 100 ms, in the middle of some request.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def gc_frozen() -> Generator[None]:
    """The same inside a `with` block."""
    freeze_gc()
    try:
        yield
    finally:
        gc.unfreeze()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
