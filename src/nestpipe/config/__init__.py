"""TOML files become frozen dataclasses here; what does not fit is one sentence for the user."""

from nestpipe.config.load import build, fraction, load, not_negative, override, positive, read
from nestpipe.config.sections import RateOptions, RowPolicy, Table

__all__ = [
    "RateOptions",
    "RowPolicy",
    "Table",
    "build",
    "fraction",
    "load",
    "not_negative",
    "override",
    "positive",
    "read",
]
