"""TOML files become frozen dataclasses here; what does not fit is one sentence for the user."""

from nestpipe.config.check import fraction, not_negative, positive
from nestpipe.config.load import build, load
from nestpipe.config.read import override, read
from nestpipe.config.table import Table

__all__ = ["Table", "build", "fraction", "load", "not_negative", "override", "positive", "read"]
