"""Arrays in a body, for requests whose ids would take longer to write as JSON than to rank.

A body of type `application/x-nestpipe` is: the length of the header (4 bytes, little-endian,
unsigned), the header (JSON in UTF-8, spaces at its end allowed), then the arrays without anything
between them. In the header each array is replaced by its number of values. Arrays of a request are
little-endian int64, in the order `long.items`, `long.times`, `short.items`, `short.times`,
`candidates` (of a signal: `history.items`, `history.times`); those that the header leaves out are
left out. The one array of an answer is `scores`, little-endian float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEDIA_TYPE = "application/x-nestpipe"
ALIGNMENT = 8
LONGEST_HEADER = 65536
LENGTH_BYTES = 4


class BinaryError(Exception):
    """A body that is not what it should be; one sentence says why."""


def pack(header: Mapping[str, Any], arrays: Sequence[NDArray[Any]]) -> bytes:
    """A body of these; arrays begin where a reader can use them without a copy."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    parts = [np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for array in arrays]
    length = len(text).to_bytes(LENGTH_BYTES, "little")
    return b"".join([length, text, *(part.tobytes() for part in parts)])


def split(body: bytes | bytearray) -> tuple[bytes, memoryview]:
    """The header, not yet parsed, and what follows it."""
    if len(body) < LENGTH_BYTES:
        raise BinaryError(f"the body has {len(body)} bytes; begin with 4 for the header's length")
    length = int.from_bytes(body[:LENGTH_BYTES], "little")
    if length > min(LONGEST_HEADER, len(body) - LENGTH_BYTES):
        raise BinaryError(
            f"the header has {length} bytes by its length; the body is {len(body)} and a header "
            f"{LONGEST_HEADER} at most"
        )
    end = LENGTH_BYTES + length
    return bytes(body[LENGTH_BYTES:end]), memoryview(body)[end:]


def cut(
    data: memoryview, counts: Sequence[int], dtype: type[np.generic] = np.int64
) -> list[NDArray[Any]]:
    """Arrays of so many values each; together they must be all of the data."""
    stored = np.dtype(dtype).newbyteorder("<")
    needed = sum(counts) * stored.itemsize
    if needed != len(data):
        raise BinaryError(
            f"the header announces {needed} bytes of arrays and {len(data)} follow; make them agree"
        )
    values = np.frombuffer(data, stored).astype(dtype, copy=False)
    values = np.require(values, requirements=["ALIGNED", "WRITEABLE"])
    return np.split(values, np.cumsum(counts)[:-1]) if counts else []
