"""From TOML to a frozen dataclass: a section is a dataclass, a key is one of its fields.

A field may be an int, a float, a bool, a str, a Literal, a StrEnum, a dataclass, `tuple[X, ...]` of
these, or one of these or None. A key that is left out takes the field's default. A field that is a
`Mapping[str, Any]` is a section whose keys are checked elsewhere. The checks for `__post_init__` of
a config come first; each passes or raises one sentence.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from enum import StrEnum
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypeGuard,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from nestpipe.deprecated import renamed_in, warn
from nestpipe.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def positive(name: str, value: float) -> None:
    """Refuse zero, negatives and nan."""
    if not value > 0:
        raise ConfigError(f"{name} is {value}; give a number above 0")


def not_negative(name: str, value: float) -> None:
    """Refuse negatives and nan."""
    if not value >= 0:
        raise ConfigError(f"{name} is {value}; give 0 or a number above it")


def finite(name: str, value: float) -> None:
    """Refuse inf, which is right for the speed of a simulated network and not for a rate."""
    if math.isinf(value):
        raise ConfigError(f"{name} is {value}; give a finite number")


def fraction(name: str, value: float) -> None:
    """Refuse what is not between 0 and 1, both included."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value}; give a number from 0 to 1")


def known_types(config: object, of: str = "") -> None:
    """Refuse a field of another type, or none of its words; for configs made in Python.

    Python may give what a file has no form for: numbers of numpy, paths, any sequence. `of` follows
    the name of the field in what is said.
    """
    for name, wanted in get_type_hints(type(config)).items():
        given = getattr(config, name)
        if get_origin(wanted) is Literal:
            fit_leaf(wanted, given, name + of)
        elif not _is_like(wanted, given):
            raise ConfigError(f"{name}{of} is {show(given)}; {advice(wanted, given)}")


def _is_like(wanted: Any, given: object) -> bool:
    if get_origin(wanted) is tuple:
        # A string is a sequence too, of its letters.
        if not isinstance(given, Sequence) or isinstance(given, str):
            return False
        entries = cast("Sequence[object]", given)
        return all(_is_like(get_args(wanted)[0], entry) for entry in entries)
    if wanted not in _LIKE:
        return True  # words, and sections, look at themselves
    return isinstance(given, _LIKE[wanted]) and (wanted is bool or not isinstance(given, bool))


_LIKE: Mapping[object, tuple[type, ...]] = {
    int: (Integral,),
    float: (Real,),
    bool: (bool,),
    str: (str, PathLike),
}


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
    str: 'a list such as ["a", "b"]',
}


def fit_leaf(wanted: Any, given: object, where: str) -> object:
    """`given` as an int, float, bool, str or one of the allowed words, or an error with its key."""
    if not _fits(wanted, given):
        raise ConfigError(f"{where} is {show(given)}; {advice(wanted, given)}")
    if wanted is float:
        return float(cast("float", given))
    return wanted(given) if _is_enum(wanted) else given


def advice(wanted: Any, given: object = None) -> str:
    """What to write for a key of type `wanted` instead of `given`."""
    if choices := _choices(wanted):
        return _advise_choice(choices, given)
    if get_origin(wanted) is tuple:
        return f"give {_GIVE_LIST.get(get_args(wanted)[0], 'a list')}"
    if wanted is str and type(given) in (int, float):
        return f'write it in quotes: "{show(given)}"'
    return f"give {_GIVE[wanted]}"


def show(value: object) -> str:
    """A value in TOML, cut to fit into a sentence."""
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


T = TypeVar("T", bound="DataclassInstance")


def load(cls: type[T], path: Path | str, overrides: Iterable[str] = ()) -> T:
    """Read a TOML file, apply `section.key=value` overrides, and build `cls` from the result."""
    return build(cls, read(path), overrides=overrides)


def build(
    cls: type[T], mapping: Mapping[str, Any], where: str = "", *, overrides: Iterable[str] = ()
) -> T:
    """Build `cls` from `mapping`, which is the section `where` of a file, or all of it.

    Each of `overrides` is a `section.key=value` that replaces a value of the mapping.
    """
    if overrides := list(overrides):
        mapping = override(_with_new_names(cls, mapping, where), overrides, cls)
    known = {field.name: field for field in fields(cls) if field.init}
    mapping = _with_new_names(cls, mapping, where)
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


def _with_new_names(cls: type[DataclassInstance], mapping: Mapping[str, Any], where: str) -> Table:
    """The same section, and those in it, where every key that was renamed has its new name."""
    current: Table = {}
    for key, value in mapping.items():
        other = renamed_in(cls).get(key)
        if other in mapping:
            old_key, new_key = _join(where, key), _join(where, str(other))
            raise ConfigError(f"{old_key} is the old name of {new_key}; remove {old_key}")
        name = _new_name(cls, key, where)
        section = _section_of(cls, name)
        if section is not None and isinstance(value, Mapping):
            value = _with_new_names(section, cast("Table", value), _join(where, name))
        current[name] = value
    return current


def _new_name(cls: type[DataclassInstance], key: str, where: str) -> str:
    name = renamed_in(cls).get(key, key)
    if name != key:
        warn(_join(where, key), _join(where, name))
    return name


def _section_of(cls: type[DataclassInstance], name: str) -> type[DataclassInstance] | None:
    """The dataclass of a section, or None where `name` is a plain key or no key at all."""
    wanted = get_type_hints(cls).get(name)
    if get_origin(wanted) in (Union, UnionType):
        wanted = _without_none(wanted)
    return wanted if _is_section(wanted) else None


def _fit(wanted: Any, given: Any, where: str) -> object:
    """`given` as the type `wanted`, or an error that names the key `where`."""
    if get_origin(wanted) in (Union, UnionType):
        return None if given is None else _fit(_without_none(wanted), given, where)
    if _is_section(wanted):
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where} is {show(given)}; make it a section, [{where}]")
        return build(wanted, cast("Mapping[str, Any]", given), where)
    if get_origin(wanted) in _OPEN_SECTIONS:
        return _plain_section(given, where)
    if get_origin(wanted) is tuple and isinstance(given, list | tuple):
        item, items = get_args(wanted)[0], cast("list[Any]", given)
        return tuple(_fit(item, one, f"{where}[{i}]") for i, one in enumerate(items))
    return fit_leaf(wanted, given, where)


_OPEN_SECTIONS = (Mapping, dict)


def _plain_section(given: Any, where: str) -> dict[str, Any]:
    """A section with any keys; its values are those that a checkpoint can keep."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {show(given)}; make it a section, [{where}]")
    section = cast("Mapping[str, Any]", given)
    for key, value in section.items():
        _refuse_others(value, _join(where, key))
    return dict(section)


def _refuse_others(value: Any, where: str) -> None:
    """Refuse dates and times, which JSON does not have."""
    if isinstance(value, Mapping):
        _plain_section(value, where)
    elif isinstance(value, list | tuple):
        for one in cast("list[Any]", value):
            _refuse_others(one, where)
    elif value is not None and type(value) not in (str, int, float, bool):
        raise ConfigError(f"{where} is {show(value)}; give a number, a string or a list of these")


def _fill(wanted: Any, where: str) -> object:
    """The value of a missing key without a default: a section of defaults, or an error."""
    if _is_section(wanted):
        return build(wanted, {}, where)
    if get_origin(wanted) in (Union, UnionType):
        return _fill(_without_none(wanted), where)
    raise ConfigError(f"missing key {where}; {advice(wanted)}")


def _construct(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Call `cls`; an error of its `__post_init__` gets the section's name."""
    try:
        return cls(**values)
    except ConfigError as error:
        if not where:
            raise
        message = str(error)
        first = message.split(" ")[0].split("[")[0]  # also an entry of a list
        begins_with_key = first in {field.name for field in fields(cls)}
        sentence = _join(where, message) if begins_with_key else f"in {where}: {message}"
        raise ConfigError(sentence) from error


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
    if len(inner) != 1:
        raise ConfigError(f"a field of a config is {wanted}; it can be X or X | None")
    return inner[0]


# A TOML file, and the `--set` options on top of it, as one plain mapping.


Table = dict[str, Any]
"""What TOML calls a table: keys to values, some of which are tables themselves."""

_OPENERS = ('"', "'", "[", "{")
"""A value that begins with one of these is meant as TOML; any other may be a bare word."""


def read(path: Path | str) -> Table:
    """The contents of a TOML file, not yet checked against any dataclass."""
    text = _text(Path(path))
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_not_toml(path, text, str(error))) from None
    except (ValueError, RecursionError):  # Python's own limits on digits and on depth
        raise ConfigError(
            f"{path} holds a number or a nesting too long to read; make it shorter"
        ) from None


def override(
    mapping: Mapping[str, Any],
    assignments: Iterable[str],
    cls: type[DataclassInstance] | None = None,
) -> Table:
    """A copy of `mapping` with each `section.key=value` applied, a later one over an earlier.

    Old keys of `cls`, which the mapping is for, are set under their new names.
    """
    result = dict(mapping)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        keys = [key.strip() for key in name.split(".")]
        if not equals or not all(keys):
            raise ConfigError(f"cannot set {assignment!r}; write it as section.key=value")
        path, wanted = _new_path(cls, keys)
        value = _parse(".".join(keys), text.strip())
        # A shell takes quotes away: where text is wanted, a number is meant as it is written.
        _put(result, path, text.strip() if wanted is str and type(value) in (int, float) else value)
    return result


def _new_path(cls: type[DataclassInstance] | None, keys: list[str]) -> tuple[list[str], object]:
    """Keys under their new names, and the type that the last one wants; None: not known."""
    path: list[str] = []
    wanted: object = None
    for key in keys:
        name = _new_name(cls, key, ".".join(path)) if cls is not None else key
        wanted = get_type_hints(cls).get(name) if cls is not None else None
        cls = _section_of(cls, name) if cls is not None else None
        path.append(name)
    return path, wanted


def _put(table: Table, keys: list[str], value: object) -> None:
    """Set `value` deep in `table`, copying each section on the way: it may be the caller's."""
    for depth, key in enumerate(keys[:-1], start=1):
        section = table.get(key, {})
        if not isinstance(section, Mapping):
            name, value_name = ".".join(keys), ".".join(keys[:depth])
            raise ConfigError(f"cannot set {name}: {value_name} is no section; set it as a whole")
        table[key] = dict(cast("Table", section))
        table = table[key]
    table[keys[-1]] = value


def _parse(name: str, text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        parsed = {}
    if parsed.keys() == {"value"}:
        return parsed["value"]
    if text.startswith(_OPENERS):
        raise ConfigError(f"cannot set {name} to {text}, which is not TOML; close what it opens")
    return text


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; check its name") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; name a TOML file") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name a readable file") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"line {line} of {path} is not UTF-8; save the file as UTF-8") from None


def _not_toml(path: Path | str, text: str, complaint: str) -> str:
    reason, _, place = complaint.partition(" (at ")
    found = re.match(r"line (\d+)", place)
    line = int(found[1]) if found else len(text.splitlines())
    return f"line {line} of {path} is not TOML: {reason[:1].lower()}{reason[1:]}; correct that line"
