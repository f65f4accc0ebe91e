"""Answers that leave in one piece, so that a process which dies has sent all of one or nothing."""

from __future__ import annotations

import asyncio
from typing import Any


class WholeAnswers:
    """A transport that hands on together what is written in one turn of the event loop.

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
