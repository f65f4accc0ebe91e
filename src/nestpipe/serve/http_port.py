"""A port to listen on."""

from __future__ import annotations

import socket

from nestpipe.errors import ConfigError


def open_port(host: str, port: int) -> socket.socket:
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
