"""Who may call an HTTP service of ours: this machine alone, or whoever has the token."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from nestpipe.errors import ConfigError

TOKEN_VARIABLE = "NESTPIPE_TOKEN"
SHORTEST_TOKEN = 16


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_token(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The token of a file, or else of the environment; never of the command line."""
    if file is None:
        token = environment.get(TOKEN_VARIABLE)
        return None if token is None else _checked(token.strip(), TOKEN_VARIABLE)
    try:
        return _checked(file.read_text(encoding="ascii").strip(), f"the token of '{file}'")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"cannot read a token from '{file}'; name a readable text file") from None


def _checked(token: str, where: str) -> str:
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{where} is too short or not plain text; use {SHORTEST_TOKEN} characters or more, for "
            "example of `openssl rand -hex 32`"
        )
    return token


def require_token(host: str, token: str | None, instead: str = "--host 127.0.0.1") -> None:
    """Refuse to be reachable from outside without one; `instead` is what to ask for then."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"'{host}' can be reached by other machines and there is no token; set "
            f"{TOKEN_VARIABLE} or --token-file, or use {instead}"
        )


def is_authorised(header: bytes | None, token: str | None) -> bool:
    """Whether `Authorization: Bearer ...` carries the token; as slow for every wrong one."""
    if token is None:
        return True
    scheme, _, given = (header or b"").partition(b" ")
    right = hmac.compare_digest(given.strip(), token.encode())
    return right and scheme.lower() == b"bearer"
