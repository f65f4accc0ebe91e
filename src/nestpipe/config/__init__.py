"""TOML files become frozen dataclasses here; what does not fit is one sentence for the user."""

from nestpipe.config.load import build, load, override, read
from nestpipe.config.rates import RateOptions
from nestpipe.config.table import RowPolicy, Table
from nestpipe.config.values import fraction, not_negative, positive

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
