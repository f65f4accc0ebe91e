"""Checks for `__post_init__` of a config; each passes or raises one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, Literal, TypeGuard, cast, get_args, get_origin, get_type_hints

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


def known_words(config: object) -> None:
    """Refuse a field that is none of the words of its `Literal`; for configs made in Python."""
    for name, wanted in get_type_hints(type(config)).items():
        if get_origin(wanted) is Literal:
            fit_leaf(wanted, getattr(config, name), name)


_MEMORY_UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}


def memory_size(name: str, text: str, *, auto: float, free: Callable[[], float]) -> float:
    """Bytes of a size such as `40GB`, a share of what is free, or `auto`: the share `auto`."""
    word = text.strip().lower()
    unit = word[-2:] if word[-2:] in _MEMORY_UNITS else ""
    try:
        number = auto if word == "auto" else float(word.removesuffix(unit))
    except ValueError:
        number = 0.0
    if unit and 0 < number < math.inf:
        return number * _MEMORY_UNITS[unit]
    if 0 < number < 1:
        return number * free()
    raise ConfigError(
        f"{name} is {text!r}; use 'auto', a size such as '40GB', or a share of the free memory "
        "such as '0.4'"
    )


def show_memory(num_bytes: float) -> str:
    """A size in the words of `memory_size`."""
    unit = next((u for u in ("tb", "gb", "mb") if num_bytes >= _MEMORY_UNITS[u]), "kb")
    return f"{num_bytes / _MEMORY_UNITS[unit]:.3g} {unit.upper()}"


# One value against the type of its field, and the words for a value that does not fit.


_GIVE = {
    int: "a whole number such as 4",
    float: "a number such as 0.5",
    bool: "true or false",
    str: 'a string such as "text"',
}
_GIVE_LIST = {
    int: "a list of whole numbers such as [1, 2]",
    float: "a list of numbers such as [0.5, 2.0]",
}


def fit_leaf(wanted: Any, given: object, where: str) -> object:
    """`given` as an int, float, bool, str or one of the allowed words, or an error with its key."""
    if not _fits(wanted, given):
        raise ConfigError(f"{where} is {show(given)}; {advice(wanted, given)}")
    if wanted is float:
        return float(cast("float", given))
    return wanted(given) if _is_enum(wanted) else given


def advice(wanted: Any, given: object = None) -> str:
    """What to write for a key of type `wanted`, where `given` was written."""
    if choices := _choices(wanted):
        return _advise_choice(choices, given)
    if get_origin(wanted) is tuple:
        return f"give {_GIVE_LIST.get(get_args(wanted)[0], 'a list')}"
    return f"give {_GIVE[wanted]}"


def show(value: object) -> str:
    """A value as its TOML file would have it, cut to fit into a sentence."""
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(value) if type(value) in (str, list, tuple) else str(value)
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        return "too long to print"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fits(wanted: Any, given: object) -> bool:
    """Compare types exactly: a bool is no int here. Only a float field takes an int too."""
    if get_origin(wanted) is Literal:
        return any(type(given) is type(choice) and given == choice for choice in get_args(wanted))
    if _is_enum(wanted):
        return isinstance(given, str) and given in list(wanted)
    if wanted is float:
        return type(given) in (int, float) and _is_number(cast("float", given))
    if wanted not in _GIVE and get_origin(wanted) is not tuple:
        raise ConfigError(
            f"a field of a config is {wanted}; it can be int, float, bool, str, a Literal, a "
            "dataclass, or tuple[X, ...] of these"
        )
    return type(given) is wanted


def _is_enum(wanted: Any) -> TypeGuard[type[StrEnum]]:
    return isinstance(wanted, type) and issubclass(wanted, StrEnum)


def _choices(wanted: Any) -> tuple[object, ...]:
    """The values that a Literal or an enum allows; none for other types."""
    if get_origin(wanted) is Literal:
        return get_args(wanted)
    return tuple(member.value for member in wanted) if _is_enum(wanted) else ()


def _is_number(value: float) -> bool:
    """Whether a float can hold it: not nan, and not a whole number of more than 308 digits."""
    try:
        return float(value) == float(value)
    except OverflowError:
        return False


def _advise_choice(choices: tuple[object, ...], given: object) -> str:
    nearest = get_close_matches(str(given).lower(), [str(choice) for choice in choices], n=1)
    if nearest:
        return f"did you mean {nearest[0]!r}?"
    return f"give one of {', '.join(show(choice) for choice in choices)}"
