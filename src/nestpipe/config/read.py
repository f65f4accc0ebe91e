"""A TOML file, and the `--set` options on top of it, as one plain mapping."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from nestpipe.errors import ConfigError

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


def override(mapping: Mapping[str, Any], assignments: Iterable[str]) -> Table:
    """A copy of `mapping` with each `section.key=value` applied, a later one over an earlier."""
    result = dict(mapping)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        keys = [key.strip() for key in name.split(".")]
        if not equals or not all(keys):
            raise ConfigError(f"cannot set {assignment!r}; write it as section.key=value")
        _put(result, keys, _parse(".".join(keys), text.strip()))
    return result


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
