"""Answers leave in one piece: whoever is killed has sent all of one or nothing."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import uvicorn
from starlette.responses import Response
from uvicorn.server import ServerState

from nestpipe.serve.http.worker import AtomicWrites, PatientProtocol


class Wire(asyncio.Transport):
    """Keeps what goes out, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes | str] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.sent.append("closed")

    def is_closing(self) -> bool:
        return "closed" in self.sent

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_what_is_written_in_one_turn_goes_out_together_and_before_the_end():
    async def talk(wire: Wire) -> None:
        whole = AtomicWrites(wire, asyncio.get_running_loop())
        whole.write(b"head")
        whole.write(b"body")
        assert wire.sent == []
        await turns()
        whole.write(b"next")
        await turns()
        whole.write(b"last")
        whole.close()
        await turns()

    wire = Wire()
    asyncio.run(talk(wire))
    assert wire.sent == [b"headbody", b"next", b"last", "closed"]


def test_the_server_writes_head_and_body_of_an_answer_at_once():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Response(b"scores")(scope, receive, send)

    async def ask(wire: Wire) -> None:
        config = uvicorn.Config(app, http=PatientProtocol, lifespan="off", log_config=None)
        config.load()
        protocol = PatientProtocol(config, ServerState(), {})
        protocol.connection_made(cast("asyncio.Transport", wire))
        for _ in range(2):
            protocol.data_received(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
            await turns(50)
        protocol.connection_lost(None)

    wire = Wire()
    asyncio.run(ask(wire))
    answers = [sent for sent in wire.sent if isinstance(sent, bytes)]
    assert len(answers) == 2, "one write for each answer"
    for sent in answers:
        assert sent.startswith(b"HTTP/1.1 200 OK\r\n")
        assert sent.endswith(b"\r\n\r\nscores")
