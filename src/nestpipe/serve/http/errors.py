"""What a caller hears when a request cannot be answered: a status, and one sentence."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from pydantic import ValidationError

from nestpipe.errors import NestpipeError, ShedError
from nestpipe.serve.engine.state import ClosingError

log = logging.getLogger("nestpipe.serve")

LONGEST_VALUE = 40


class HttpError(Exception):
    """An answer that is no result."""

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def body(self) -> bytes:
        return json.dumps({"error": self.sentence}).encode()


def shed(sentence: str, retry_after_s: float = 1.0) -> HttpError:
    """More than can be done at the moment."""
    return HttpError(503, sentence, retry_after=str(max(1, math.ceil(retry_after_s))))


def draining() -> HttpError:
    """Whoever can, asks another instance at once."""
    return HttpError(
        503, "the service is draining; ask another", retry_after="1", x_nestpipe_draining="1"
    )


def of_fault(fault: BaseException) -> HttpError:
    """What to say of an exception that answering a request ended with."""
    if isinstance(fault, HttpError):
        return fault
    if isinstance(fault, ClosingError):
        return draining()
    if isinstance(fault, ShedError):
        return shed(str(fault), fault.retry_after_s)
    if isinstance(fault, TimeoutError):
        return HttpError(504, "the deadline passed before the answer was there; allow more time")
    if isinstance(fault, NestpipeError) and fault.exit_status == NestpipeError.exit_status:
        return HttpError(422, str(fault))
    log.error("a request failed", exc_info=fault)
    return HttpError(500, "the service failed on this request; its log has the reason")


def of_body(error: ValidationError) -> HttpError:
    """What is wrong with a body, said of the first thing that is."""
    first: Any = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it does not parse")
        return HttpError(400, f"the body is not JSON: {reason}; correct it")
    where = _place(first["loc"])
    if first["type"] == "missing":
        return HttpError(422, f"{where} is missing; give it")
    if first["type"] == "extra_forbidden":
        return HttpError(422, f"{where} is not known; leave it out")
    return HttpError(422, f"{where} is {_shown(first['input'])}; {_advice(first['msg'])}")


def _place(loc: tuple[int | str, ...]) -> str:
    """`long.items[3]`, or `the body`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.lstrip(".") or "the body"


def _shown(value: object) -> str:
    text = json.dumps(value, default=str) if not isinstance(value, bytes) else "not JSON"
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _advice(message: str) -> str:
    """`Input should be a valid integer` as the end of a sentence."""
    return message.replace("Input should be", "it should be").rstrip(".")
