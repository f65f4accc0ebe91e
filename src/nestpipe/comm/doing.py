"""The name of the work that a collective serves, so that a failure can say it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Doing:
    """What a rank is doing on the network: `with doing("rows 3.1"): ...`.

    Belongs to the one thread that issues collectives.
    """

    def __init__(self) -> None:
        self.what = ""

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Name the collectives inside; the name before comes back afterwards."""
        before, self.what = self.what, what
        try:
            yield
        finally:
            self.what = before

    def name(self, collective: str) -> str:
        """A collective as messages call it: `rows 3.1` (all_to_all)."""
        return f"`{self.what}` ({collective})" if self.what else f"`{collective}`"
