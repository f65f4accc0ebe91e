"""The name of the work that a collective serves, so that a failure can say it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Doing:
    """What a rank is doing on the network: `with doing("rows 3.1"): ...`.

    Each thread that issues collectives has a name of its own.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @property
    def what(self) -> str:
        return getattr(self._of_thread, "what", "")

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Name the collectives inside; the name before comes back afterwards."""
        before, self._of_thread.what = self.what, what
        try:
            yield
        finally:
            self._of_thread.what = before

    def name(self, collective: str) -> str:
        """A collective as messages call it: `rows 3.1` (all_to_all)."""
        return f"`{self.what}` ({collective})" if self.what else f"`{collective}`"
