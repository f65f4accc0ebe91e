"""A configuration for nginx as the router: consistent hashing of users over instances."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from nestpipe.config import positive
from nestpipe.errors import ConfigError

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
            # A signal goes on only where nobody answered: an instance that is slow has it already.
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
