"""What an instance that ends says to those who ask it."""

from __future__ import annotations

from nestpipe.errors import ShedError


class ClosingError(ShedError):
    """The instance ends: another may answer at once, and nobody has too much to do."""
