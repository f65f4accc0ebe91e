"""One process of the service: an instance, or the built-in router, and its uvicorn server.

`launch` starts it. What it is to do is the one argument, as JSON; the token is in the environment.
It stops when its standard input ends: then its launcher is gone. The server shuts down
gracefully, has timeouts for headers, and writes a response whole or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from nestpipe.config import build
from nestpipe.config.sections import read_token, require_token
from nestpipe.errors import CheckpointError, ConfigError, NestpipeError, RunError
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.engine.score_model import open_model
from nestpipe.serve.http.apps import ServedApp, answer_error
from nestpipe.serve.http.bodies import shed
from nestpipe.serve.types import HttpSettings, ServeSettings, has_prefix

log = logging.getLogger("nestpipe.serve")

LONGEST_HEADERS = 65536


class Server(uvicorn.Server):
    """SIGTERM and SIGINT drain, SIGHUP reads the checkpoint again; a drained end is status 0."""

    def __init__(self, config: uvicorn.Config, served: ServedApp, drain_s: float) -> None:
        super().__init__(config)
        self._served = served
        self._drain_s = drain_s
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's; `stop` and `reload` can be called all the same
            return
        loop = asyncio.get_running_loop()
        acts = {signal.SIGTERM: self.stop, signal.SIGINT: self.stop, signal.SIGHUP: self.reload}
        for number, act in acts.items():
            loop.add_signal_handler(number, act)
        try:
            yield
        finally:
            for number in acts:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Drain; the second time, exit at once."""
        if self._served.limits.draining:
            self.force_exit = self.should_exit = True
            return
        self._served.limits.draining = True
        self._run(self._drain())

    def reload(self) -> None:
        """Read the checkpoint's folder again."""
        self._run(self._reload())

    def _run(self, work) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self) -> None:
        try:
            if not await self._served.drain(self._drain_s):
                log.warning("gave up on requests that took longer than %g s", self._drain_s)
        finally:
            self.should_exit = True

    async def _reload(self) -> None:
        log.warning("%s", await self._served.reload())


class AtomicWrites:
    """Atomic writes: a transport that sends what is written in one turn of the event loop at once.

    uvicorn writes the head of an answer, then its body. Killed between the two, an instance would
    leave a router with a head that it has passed on, and a ranking that it cannot ask for again.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        held, self._held = self._held, []
        if held:
            self._transport.write(b"".join(held))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class PatientProtocol(H11Protocol):
    """Closes connections whose headers take too long, and refuses those above the limit."""

    header_timeout_s = 10.0
    most_connections = 2048
    _impatience: asyncio.TimerHandle | None = None

    def connection_made(self, transport) -> None:
        whole: Any = AtomicWrites(transport, self.loop)
        super().connection_made(whole)
        if len(self.connections) > self.most_connections:
            self.app = too_many
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Count from the first moment in which headers are due, not from the latest byte."""
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._impatience is None:
            self._impatience = self.loop.call_later(self.header_timeout_s, self._give_up)

    def _give_up(self) -> None:
        self._impatience = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()

    def _forget(self) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None


async def too_many(scope: Scope, receive: Receive, send: Send) -> None:
    """The response on a connection above the limit."""
    error = shed("there are too many connections; ask again in a second")
    await answer_error(error, {"connection": "close"})(scope, receive, send)


def new_server(served: ServedApp, http: HttpSettings) -> Server:
    """A server that has not begun; `serve` or `run` it with the socket of `bind_port`."""
    limits = {"header_timeout_s": http.header_timeout_s, "most_connections": http.connections}
    protocol = type("Protocol", (PatientProtocol,), limits)
    config = uvicorn.Config(
        served.app,
        http=protocol,
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        log_level="error",
        log_config=None,
        timeout_keep_alive=max(1, round(http.idle_timeout_s)),
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=LONGEST_HEADERS,
    )
    return Server(config, served, http.drain_s)


def run(served: ServedApp, listener: socket.socket, http: HttpSettings) -> None:
    """Serve until a signal or the launcher stops it."""
    new_server(served, http).run(sockets=[listener])


def bind_port(host: str, port: int) -> socket.socket:
    """A socket that is bound and can listen, or a sentence that names the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, or asyncio leaves TCP_NODELAY off and every answer waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else "there is no such port"
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; choose another --port or --host"
        ) from None
    listener.set_inheritable(False)
    return listener


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
    """Serve until stopped; the exit status."""
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
    from nestpipe.serve.http.apps import router_app

    listener = bind_port(role.host, role.port)
    urls = {f"instance-{number}": url for number, url in enumerate(role.instances)}
    has_histories = role.histories is not None
    served = router_app(urls, role.settings, role.http, token, has_histories)
    freeze_gc()
    run(served, listener, role.http)


def _serve_instance(role: Role, token: str | None) -> None:
    from nestpipe.serve.http.apps import instance_app
    from nestpipe.serve.http.requests import read_histories

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
        healthy=engine.is_healthy,
        reload=engine.reload,
        token=token,
        histories=histories,
        needs_history=engine.has_prefix,
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
        feature = role.settings.candidate_feature
        self._load = lambda path: open_model(path, role.device, role.dtype, feature)
        self._model = self._load(role.checkpoint)
        settings = role.settings
        if isinstance(self._model, HstuRankModel):
            warm_up(self._model)
        else:  # without a prefix there is nothing to prepare or to keep
            settings = replace(settings, relay=False, host_mb=0.0)
        admission, again = None, None
        if settings.relay:  # else signals do nothing
            measured = Calibration(self._model, settings, lambda n: self._model.kv_bytes(n))
            admission, again = measured.admission, measured.again
        self.instance = Instance(self._model, settings, admission, recalibrate=again)

    @property
    def has_prefix(self) -> bool:
        """Whether requests need a history."""
        return has_prefix(self._model)

    def reload(self, checkpoint: str | None) -> str:
        """Load beside the old model, then swap; a fault leaves the old one.

        Where the newest that verifies is older than what is served, nothing is swapped.
        """
        model = self._load(checkpoint or self._role.checkpoint)
        if has_prefix(model) != self.has_prefix:
            raise CheckpointError(
                f"{model.version} is a model of another kind; start a service of its own for it"
            )
        served = self._model.version
        if checkpoint is None and _step_of(model.version) < _step_of(served):
            log.warning("%s is kept: the newest that verifies is %s", served, model.version)
            return served
        self.instance.swap_model(model)
        self._model = model
        return model.version

    def is_healthy(self) -> bool:
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
    return [sys.executable, "-m", "nestpipe.serve.http.worker", json.dumps(role.as_mapping())]


def environment_of(token: str | None, processes: int) -> Mapping[str, str]:
    """The environment of such a process: its share of the cores, and the token."""
    from nestpipe.config.sections import TOKEN_VARIABLE

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
