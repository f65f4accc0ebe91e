"""From TOML to a frozen dataclass: a section is a dataclass, a key is one of its fields.

A field may be an int, a float, a bool, a str, a Literal, a dataclass, `tuple[X, ...]` of
these, or one of these or None. A key that is left out takes the field's default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    TypeGuard,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from nestpipe.config.leaf import advice, fit_leaf, show
from nestpipe.config.read import override, read
from nestpipe.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def load(cls: type[T], path: Path | str, overrides: Iterable[str] = ()) -> T:
    """Read a TOML file, apply `section.key=value` overrides, and build `cls` from the result."""
    return build(cls, override(read(path), overrides))


def build(cls: type[T], mapping: Mapping[str, Any], where: str = "") -> T:
    """Build `cls` from `mapping`, which is the section `where` of a file, or all of it."""
    known = {field.name: field for field in fields(cls) if field.init}
    for key in mapping:
        if key not in known:
            raise ConfigError(_unknown(key, list(known), where))
    wanted = get_type_hints(cls)
    values: dict[str, object] = {}
    for name, field in known.items():
        if name in mapping:
            values[name] = _fit(wanted[name], mapping[name], _join(where, name))
        elif not _has_default(field):
            values[name] = _fill(wanted[name], _join(where, name))
    return _construct(cls, values, where)


def _fit(wanted: Any, given: Any, where: str) -> object:
    """`given` as the type `wanted`, or an error that names the key `where`."""
    if get_origin(wanted) in (Union, UnionType):
        return None if given is None else _fit(_without_none(wanted), given, where)
    if _is_section(wanted):
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where} is {show(given)}; make it a section, [{where}]")
        return build(wanted, cast("Mapping[str, Any]", given), where)
    if get_origin(wanted) is tuple and isinstance(given, list | tuple):
        item, items = get_args(wanted)[0], cast("list[Any]", given)
        return tuple(_fit(item, one, f"{where}[{i}]") for i, one in enumerate(items))
    return fit_leaf(wanted, given, where)


def _fill(wanted: Any, where: str) -> object:
    """What a key without a default is when left out: a section of defaults, or an error."""
    if _is_section(wanted):
        return build(wanted, {}, where)
    if get_origin(wanted) in (Union, UnionType):
        return _fill(_without_none(wanted), where)
    raise ConfigError(f"missing key {where}; {advice(wanted)}")


def _construct(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Call `cls`; what its own `__post_init__` refuses is told with the section's name."""
    try:
        return cls(**values)
    except ConfigError as error:
        if not where:
            raise
        message = str(error)
        begins_with_key = message.split(" ")[0] in {field.name for field in fields(cls)}
        told = _join(where, message) if begins_with_key else f"in {where}: {message}"
        raise ConfigError(told) from error


def _unknown(key: str, known: list[str], where: str) -> str:
    nearest = get_close_matches(key.lower(), known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"the keys are {', '.join(known)}"
    return f"unknown key {_join(where, repr(key))}; {hint}"


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _is_section(wanted: Any) -> TypeGuard[type[DataclassInstance]]:
    return is_dataclass(wanted)


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _without_none(wanted: Any) -> Any:
    inner = [kind for kind in get_args(wanted) if kind is not NoneType]
    assert len(inner) == 1, f"a config field can be X | None but not {wanted}"
    return inner[0]
