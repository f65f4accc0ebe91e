"""Where rows live when no batch uses them: the store protocol, its stores and their factory.

A new tier (device pool, SSD) is one more module here. Nobody outside this folder names a store
class: `open_store` chooses one, and its abilities say how rows move.
"""

from __future__ import annotations

from nestpipe.embedding.store.protocol import RowStore, StoreLayout
from nestpipe.kernels.library import native_wanted

__all__ = ["RowStore", "StoreLayout", "open_store"]


def open_store(
    layout: StoreLayout, *, native: bool | None = None, threads: int | None = None
) -> RowStore:
    """A store without rows; `native=None` leaves the choice to NESTPIPE_NATIVE.

    Stores are imported when they are opened: the reference needs no compiler.
    """
    if native_wanted() if native is None else native:
        from nestpipe.embedding.store.host import NativeStore

        return NativeStore(layout, threads=threads)
    from nestpipe.embedding.store.reference import PlainStore

    return PlainStore(layout)
