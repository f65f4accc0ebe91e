"""Where rows live when no batch uses them: the store protocol, its stores and their factory.

A new tier is one more module here, as the SSD is. Nobody outside this folder names a store
class: `open_store` chooses one, and its abilities say how rows move.
"""

from __future__ import annotations

from collections.abc import Sequence

from nestpipe.embedding.store.protocol import RowStore, SsdOptions, StoreLayout
from nestpipe.errors import ConfigError
from nestpipe.kernels.library import native_wanted

__all__ = ["RowStore", "SsdOptions", "StoreLayout", "open_store", "ssd_options"]


def open_store(
    layout: StoreLayout,
    *,
    native: bool | None = None,
    threads: int | None = None,
    ssd: SsdOptions | None = None,
) -> RowStore:
    """A store without rows; `native=None` leaves the choice to NESTPIPE_NATIVE.

    With `ssd` it keeps most rows in a file. Stores are imported when they are opened: the reference
    needs no compiler.
    """
    native = native_wanted() if native is None else native
    if ssd is not None:
        if not native:
            raise ConfigError(
                "rows on an SSD need native code; set run.native = true and NESTPIPE_NATIVE=1, or "
                "run.store = 'host'"
            )
        from nestpipe.embedding.store.ssd import SsdStore

        return SsdStore(layout, ssd, threads=threads)
    if native:
        from nestpipe.embedding.store.host import NativeStore

        return NativeStore(layout, threads=threads)
    from nestpipe.embedding.store.host import PlainStore

    return PlainStore(layout)


def ssd_options(
    folder: str, host_memory: str, layouts: Sequence[StoreLayout], sharing: int = 1
) -> list[SsdOptions]:
    """Options for each store of a rank: as many rows a table in memory as `host_memory` holds.

    `sharing`: ranks of this machine; a size is what each of them gets.
    """
    from nestpipe.embedding.store.ssd import share_memory

    return share_memory(folder, host_memory, layouts, sharing)
