"""Which store serves a layout: the native one, or its plain twin."""

from __future__ import annotations

from nestpipe.embedding.store import RowStore, StoreLayout
from nestpipe.kernels.native import native_wanted


def open_store(
    layout: StoreLayout, *, native: bool | None = None, threads: int | None = None
) -> RowStore:
    """A store without rows; `native=None` leaves the choice to NESTPIPE_NATIVE."""
    if native_wanted() if native is None else native:
        from nestpipe.embedding.native_store import NativeStore

        return NativeStore(layout, threads=threads)
    from nestpipe.embedding.plain_store import PlainStore

    return PlainStore(layout)
