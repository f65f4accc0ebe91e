"""Checks for `__post_init__` of a config; each passes or raises one sentence."""

from nestpipe.errors import ConfigError


def positive(name: str, value: float) -> None:
    """Refuse zero, negatives and nan."""
    if not value > 0:
        raise ConfigError(f"{name} is {value}; give a number above 0")


def not_negative(name: str, value: float) -> None:
    """Refuse negatives and nan."""
    if not value >= 0:
        raise ConfigError(f"{name} is {value}; give 0 or a number above it")


def fraction(name: str, value: float) -> None:
    """Refuse what is not between 0 and 1, both included."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value}; give a number from 0 to 1")
