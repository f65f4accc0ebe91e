"""The launcher: router and instances as processes of this machine, restarted when they die.

The router may be nginx, by a configuration with consistent hashing of users over instances.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

from nestpipe.config import positive
from nestpipe.errors import ConfigError
from nestpipe.serve.http.worker import Role, bind_port, command_of, environment_of

HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
KEYS = {
    "header": (re.compile(r"[A-Za-z][A-Za-z0-9-]{0,63}"), "http_"),
    "query": (re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}"), "arg_"),
}
"""Where the user's name stands in a request: what such a place may be called, nginx's variable."""
MOST = 65536
"""The most that any number may be."""

TEMPLATE = """\
# Written by nestpipe. To try it: nginx -t -p FOLDER -c FILE; to start it: the same without -t.
worker_processes auto;
pid nginx.pid;
error_log stderr warn;

events {{
    worker_connections 4096;
}}

http {{
    access_log off;
    server_tokens off;
    default_type application/json;
    client_body_temp_path temp_body;
    proxy_temp_path temp_proxy;
    fastcgi_temp_path temp_fastcgi;
    uwsgi_temp_path temp_uwsgi;
    scgi_temp_path temp_scgi;

    # Both legs of a user go to the same instance.
    upstream by_user {{
        hash {variable} consistent;
{servers}
        keepalive {keepalive};
    }}

    # What is not about a user goes anywhere.
    upstream anywhere {{
{servers}
        keepalive {keepalive};
    }}

    server {{
        listen {listen};

        client_max_body_size {body_kb}k;
        client_body_buffer_size {buffer_kb}k;
        client_header_timeout {client_s}s;
        client_body_timeout {client_s}s;
        send_timeout {client_s}s;

        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header Host $host;
        proxy_connect_timeout {connect_ms}ms;
        proxy_send_timeout {answer_ms}ms;
        proxy_read_timeout {answer_ms}ms;

        location = /v1/prefetch {{
            if ({variable} = "") {{
                return 400 '{missing}';
            }}
            # A signal is retried only where no instance answered: a slow one has it already.
            proxy_next_upstream error non_idempotent;
            proxy_next_upstream_tries {num_instances};
            proxy_pass http://by_user;
        }}

        location = /v1/rank {{
            if ({variable} = "") {{
                return 400 '{missing}';
            }}
            # A ranking that fails is asked for again at the next instance.
            proxy_next_upstream error timeout http_503 non_idempotent;
            proxy_next_upstream_tries {num_instances};
            proxy_pass http://by_user;
        }}

        location = /v1/health {{
            proxy_pass http://anywhere;
        }}

        location = /metrics {{
            proxy_pass http://anywhere;
        }}

        location / {{
            return 404 '{{"error": "there is no such page; see /v1/rank"}}';
        }}
    }}
}}
"""


def nginx_config(
    instances: Sequence[str],
    listen: str = "127.0.0.1:8080",
    *,
    key: str = "header X-User",
    keepalive: int = 64,
    connect_s: float = 0.25,
    answer_s: float = 5.0,
    client_s: float = 10.0,
    max_fails: int = 2,
    fail_s: float = 1.0,
    body_mb: float = 4.0,
) -> str:
    """A complete nginx.conf that routes to instances, each given as host:port.

    `key` says where the user's name stands in a request: "header NAME" or "query NAME". An instance
    that fails `max_fails` times is left alone for `fail_s`; one that does not accept within
    `connect_s`, or says nothing for `answer_s`, has failed. Clients may be silent for `client_s`.
    """
    if not instances:
        raise ConfigError("there are no instances to route to; give at least one host:port")
    places = [_host_port("instance", instance) for instance in instances]
    for place in places:
        if places.count(place) > 1:
            raise ConfigError(f"instance {place} is named twice; name each once")
    numbers = {"connect_s": connect_s, "answer_s": answer_s, "client_s": client_s}
    numbers |= {"keepalive": keepalive, "max_fails": max_fails, "fail_s": fail_s}
    for name, value in {**numbers, "body_mb": body_mb}.items():
        positive(name, value)
        if value > MOST:
            raise ConfigError(f"{name} is {value}; give a number of at most {MOST}")
    fails = f"max_fails={_at_least_one(max_fails)} fail_timeout={_at_least_one(fail_s)}s"
    body_kb = _at_least_one(body_mb * 1024)
    kind, name = _key(key)
    return TEMPLATE.format(
        variable=f"${KEYS[kind][1]}{name.lower().replace('-', '_')}",
        missing=f'{{"error": "the request does not name its user; give the {kind} {name}"}}',
        servers="\n".join(f"        server {place} {fails};" for place in places),
        listen=_host_port("listen", listen),
        num_instances=len(places),
        keepalive=_at_least_one(keepalive),
        connect_ms=_at_least_one(connect_s * 1e3),
        answer_ms=_at_least_one(answer_s * 1e3),
        client_s=_at_least_one(client_s),
        body_kb=body_kb,
        # In memory where it is small enough, so that asking again costs no disk.
        buffer_kb=min(body_kb, 1024),
    )


def _at_least_one(value: float) -> int:
    """A whole number for nginx, where 0 would mean no limit."""
    return max(1, round(value))


def _host_port(what: str, text: str) -> str:
    """The text again if it is host:port and nothing else."""
    host, colon, port = text.rpartition(":")
    good_port = re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= 65535
    if not (colon and good_port and _is_host(host)):
        raise ConfigError(f"{what} {text!r} is not host:port; write for example 127.0.0.1:9001")
    return f"{host}:{int(port)}"


def _is_host(host: str) -> bool:
    """A name, an IPv4 address, or an IPv6 address in brackets."""
    if host.startswith("[") and host.endswith("]"):
        try:
            return ipaddress.IPv6Address(host[1:-1]).scope_id is None
        except ValueError:
            return False
    if re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return False
        return True
    return len(host) <= 253 and HOST_NAME.fullmatch(host) is not None


def _key(key: str) -> tuple[str, str]:
    """The kind of place and its name."""
    kind, _, name = key.partition(" ")
    if kind not in KEYS or not KEYS[kind][0].fullmatch(name):
        raise ConfigError(f"key {key!r} is no place of a request; write header NAME or query NAME")
    return kind, name


RouterKind = Literal["builtin", "nginx", "none"]

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
"""Backoff before a restart: doubled each time, up to this."""
STEADY_S = 60.0
"""After running for so long a process starts again with the first pause."""
POLL_S = 0.1
STOP_MORE_S = 10.0
"""Time to stop beyond the time to drain."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One process: its name, command, address and stop signal."""

    name: str
    command: Sequence[str]
    host: str
    port: int
    stop: int = signal.SIGTERM

    @property
    def url(self) -> str:
        return f"http://{_bracketed(_connectable(self.host))}:{self.port}"


@dataclass(slots=True)
class _PartProcess:
    process: subprocess.Popen[bytes]
    since: float
    ready: bool = False


class Launcher:
    """Starts processes, restarts those that die, and stops all; one thread calls it."""

    def __init__(
        self, environment: Mapping[str, str], say: Callable[[str], None], drain_s: float
    ) -> None:
        self._environment = environment
        self._log = say
        self._drain_s = drain_s
        self._running: dict[Part, _PartProcess] = {}
        self._pauses: dict[Part, float] = {}
        self._due: dict[Part, float] = {}
        self._news: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._stopping = threading.Event()

    def tell(self, what: Literal["stop", "reload"]) -> None:
        """From a signal handler or another thread."""
        self._news.put((what, None))

    def start(self, parts: Sequence[Part]) -> int | None:
        """Start them and wait until all are ready; the exit status where that fails."""
        for part in parts:
            self._start(part)
        waiting = set(parts)
        while waiting:
            what, subject = self._news.get()
            if what == "ready":
                waiting.discard(subject)
                self._log(f"{subject.name} is ready at {subject.url}, process {self._pid(subject)}")
            elif what == "died":
                part, status = subject
                self._log(f"{part.name} {_ended(status)} before it was ready")
                return status if status in (2, 3) else 3
            elif what == "stop":
                return 0
        return None

    def watch(self, reloaded: Sequence[Part]) -> None:
        """Until stopped: restart processes that die, pass a reload on."""
        while True:
            what, subject = self._next()
            if what == "stop":
                return
            if what == "reload":
                self._log("reading the checkpoint again")
                for part in reloaded:
                    self._signal(part, signal.SIGHUP)
            elif what == "ready":
                self._log(f"{subject.name} is back at {subject.url}, process {self._pid(subject)}")
            elif what == "died":
                self._plan_restart(*subject)
            self._start_due()

    def stop(self, parts: Sequence[Part]) -> bool:
        """Tell them to stop, and wait until they have; whether all finished their work."""
        self._stopping.set()
        for part in parts:
            self._signal(part, part.stop)
        end = time.monotonic() + self._drain_s + STOP_MORE_S
        running = [(part, self._running.pop(part)) for part in parts if part in self._running]
        well = [self._ended_well(part, one, end) for part, one in running]
        return all(well)

    def _ended_well(self, part: Part, running: _PartProcess, end: float) -> bool:
        try:
            status = running.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._log(f"{part.name} does not stop; it is killed")
            running.process.kill()
            running.process.wait()
            return False
        if status and running.ready:
            self._log(f"{part.name} {_ended(status)}")
        return not status or not running.ready

    def _start(self, part: Part) -> None:
        process = subprocess.Popen(
            part.command,
            stdin=subprocess.PIPE,  # its end tells the process that we are gone
            env=dict(self._environment),
            start_new_session=True,  # Ctrl-C is for us alone: we stop the parts in order
        )
        running = _PartProcess(process, time.monotonic())
        self._running[part] = running
        for act in (self._await_end, self._await_ready):
            threading.Thread(target=act, args=(part, running), daemon=True).start()

    def _await_end(self, part: Part, running: _PartProcess) -> None:
        status = running.process.wait()
        self._news.put(("died", (part, status)))

    def _await_ready(self, part: Part, running: _PartProcess) -> None:
        while not self._stopping.wait(POLL_S) and running.process.poll() is None:
            if is_ready(part):
                running.ready = True
                self._news.put(("ready", part))
                return

    def _next(self) -> tuple[str, Any]:
        """The next piece of news, or `due` when a part is to be started again."""
        if not self._due:
            return self._news.get()
        try:
            return self._news.get(timeout=max(0.0, min(self._due.values()) - time.monotonic()))
        except Empty:
            return "due", None

    def _plan_restart(self, part: Part, status: int) -> None:
        running = self._running.pop(part)
        now = time.monotonic()
        pause_s = self._pauses.get(part, FIRST_PAUSE_S)
        if now - running.since > STEADY_S:
            pause_s = FIRST_PAUSE_S
        self._pauses[part] = min(2 * pause_s, LONGEST_PAUSE_S)
        self._due[part] = now + pause_s
        self._log(f"{part.name} {_ended(status)}; it is started again in {pause_s:g} s")

    def _start_due(self) -> None:
        now = time.monotonic()
        for part in [part for part, due in self._due.items() if due <= now]:
            del self._due[part]
            self._start(part)

    def _pid(self, part: Part) -> int:
        return self._running[part].process.pid

    def _signal(self, part: Part, number: int) -> None:
        running = self._running.get(part)
        if running is not None and running.process.poll() is None:
            running.process.send_signal(number)


def _ended(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def is_ready(part: Part) -> bool:
    """Whether it says so."""
    connection = http.client.HTTPConnection(_connectable(part.host), part.port, timeout=1.0)
    try:
        connection.request("GET", "/v1/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _connectable(host: str) -> str:
    """Where a process that listens on `host` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _bracketed(host: str) -> str:
    """As a URL has it."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """What `nestpipe serve` is to start."""

    instance: Role
    """All instances, but for their ports; its host and port are those of the service."""
    instances: int
    router: RouterKind
    token: str | None


def serve(service: Service, say: Callable[[str], None]) -> int:
    """Run the service until SIGTERM or SIGINT; the exit status."""
    role = service.instance
    with tempfile.TemporaryDirectory(prefix="nestpipe-serve-") as folder:
        workers, fronts = _parts(service, Path(folder))
        environment = environment_of(service.token, service.instances)
        launcher = Launcher(environment, say, role.http.drain_s)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: launcher.tell("stop"))
        signal.signal(signal.SIGHUP, lambda *_: launcher.tell("reload"))
        count = "1 instance" if len(workers) == 1 else f"{len(workers)} instances"
        say(f"loading {role.checkpoint!r} into {count}")
        try:
            status = launcher.start(workers)
            if status is None:
                status = launcher.start(fronts)
            if status is None:
                say(f"serving at {' '.join(part.url for part in fronts or workers)}")
                launcher.watch(workers)
                say("stopping once the accepted requests are answered")
        finally:
            stopped = [launcher.stop(parts) for parts in (fronts, workers)]
    return status or (0 if all(stopped) else 3)


def _parts(service: Service, folder: Path) -> tuple[list[Part], list[Part]]:
    """The instances, and what stands before them. Ports of instances follow the service's own."""
    role, before = service.instance, service.router != "none"
    inner = "127.0.0.1" if before else role.host
    own = free_ports(role.host, role.port, 1) if before else []
    ports = free_ports(inner, role.port + len(own) if role.port else 0, service.instances, own)
    workers = [
        _part(f"instance-{number}", replace(role, host=inner, port=port))
        for number, port in enumerate(ports)
    ]
    if not before:
        return workers, []
    if service.router == "nginx":
        return workers, [_nginx(role, own[0], workers, folder)]
    urls = tuple(worker.url for worker in workers)
    return workers, [_part("router", replace(role, kind="router", port=own[0], instances=urls))]


def _part(name: str, role: Role) -> Part:
    return Part(name, command_of(role), role.host, role.port)


def _nginx(role: Role, port: int, workers: Sequence[Part], folder: Path) -> Part:

    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        raise ConfigError("there is no nginx on this machine; install it or use --router builtin")
    text = nginx_config(
        [f"{worker.host}:{worker.port}" for worker in workers],
        f"{_bracketed(role.host)}:{port}",
        answer_s=role.http.answer_s,
        client_s=role.http.header_timeout_s,
        body_mb=role.http.body_bytes / 2**20,
    )
    file = folder / "nginx.conf"
    file.write_text(text)
    folder.chmod(0o755)  # nginx may run its workers as another user
    options = ["-p", f"{folder}/", "-c", str(file), "-e", "stderr", "-g", "daemon off;"]
    return Part("nginx", [program, *options], role.host, port, signal.SIGQUIT)


def free_ports(host: str, first: int, count: int, not_these: Sequence[int] = ()) -> list[int]:
    """`count` ports from `first` on that can be listened on; 0: any that are free."""
    ports: list[int] = []
    listeners: list[socket.socket] = []
    try:
        while len(ports) < count:
            wanted = first + len(ports) if first else 0
            listeners.append(bind_port(host, wanted))
            port = listeners[-1].getsockname()[1]
            if port not in not_these:
                ports.append(port)
    finally:
        for listener in listeners:
            listener.close()
    return ports
