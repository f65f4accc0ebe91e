"""The peers' pack keeps the machine code of one generation of GPUs, and moves nothing."""

from __future__ import annotations

from pathlib import Path

from support.tools import load_tool

peer_pack = load_tool("peer_pack")
PTX = 1


def fat_binary(*codes: tuple[int, int, bytes]) -> bytes:
    """What nvcc puts into a library: code by kind and GPU."""
    made = [
        peer_pack.FAT_ENTRY.pack(kind, 1, peer_pack.FAT_ENTRY.size, len(code), gpu) + code
        for kind, gpu, code in codes
    ]
    body = b"".join(made)
    return (
        peer_pack.FAT_BINARY.pack(peer_pack.MAGIC, 1, peer_pack.FAT_BINARY.size, len(body)) + body
    )


def test_code_for_other_gpus_becomes_zeros_and_all_else_stays_where_it_is(tmp_path: Path):
    codes = [
        (peer_pack.MACHINE_CODE, 80, b"older!"),
        (peer_pack.MACHINE_CODE, 90, b"wanted"),
        (PTX, 90, b"portable"),
    ]
    left = [(kind, gpu, c if c == b"wanted" else bytes(len(c))) for kind, gpu, c in codes]
    look_alike = peer_pack.MAGIC.to_bytes(4, "little") + b"not a header, only the same four bytes"
    library = tmp_path / "some.so"
    library.write_bytes(b"\x7fELF" + look_alike + fat_binary(*codes) + b"tail")

    dropped = peer_pack.keep_code_for(library, 90)

    assert dropped == len(b"older!") + len(b"portable")
    assert library.read_bytes() == b"\x7fELF" + look_alike + fat_binary(*left) + b"tail"
