"""A uvicorn server with graceful shutdown, header timeouts and atomic writes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Generator
from typing import Any

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from nestpipe.errors import ConfigError
from nestpipe.serve.http.app import ServedApp, answer_error
from nestpipe.serve.http.bodies import shed
from nestpipe.serve.settings import HttpSettings

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
    """Serve until told to stop."""
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
