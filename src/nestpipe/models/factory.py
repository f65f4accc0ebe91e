"""A model of the user's own by name: `package.module:factory`, and the section of its config.

The factory is a function or a class. It gets `[model.config]` as a dict, or as the dataclass that
annotates its first parameter, and the columns of the data if it has a second one. It returns a
model with a method `tables()`, or the model and its tables.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from torch import nn

from nestpipe.config import Table, build
from nestpipe.errors import ConfigError, ModelError, NestpipeError
from nestpipe.models.protocol import RecModel, kind_of, told

SECTION = "model.config"
Factory = Callable[..., object]


def is_own(kind: str) -> bool:
    """Whether a kind names a factory rather than a shipped model."""
    return ":" in kind


def make_own(
    kind: str, config: Mapping[str, Any], columns: Sequence[object]
) -> tuple[nn.Module, list[Table]]:
    """The model that a factory makes, and its tables; every fault of it is a sentence."""
    factory = _found(kind)
    parameters = _positional(kind, factory)
    given: list[object] = [_config(kind, factory, parameters, config), columns]
    if not parameters and config:
        raise ConfigError(
            f"{SECTION} has {', '.join(config)}, but {kind} takes no parameter; give it one"
        )
    try:
        made = factory(*given[: len(parameters)])
    except NestpipeError:
        raise
    except Exception as error:
        raise ModelError(f"{kind} failed ({told(error)}); mend it") from error
    return _checked(kind, made)


def _found(kind: str) -> Factory:
    """The factory itself; modules are looked for in the working directory, too."""
    module_name, _, name = kind.partition(":")
    parts = [*module_name.split("."), name]
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"model.kind is {kind!r}; write it as 'package.module:factory'")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"model.kind is {kind!r}, and {module_name} imports {error.name}, which is not "
                "installed; install it"
            ) from error
        raise ConfigError(
            f"model.kind is {kind!r}, but there is no module {error.name!r} in the working "
            f"directory {here!r} or installed; check its name"
        ) from None
    except Exception as error:
        raise ModelError(f"{module_name} cannot be imported ({told(error)}); mend it") from error
    factory = getattr(module, name, None)
    if callable(factory):
        return factory
    raise ConfigError(f"model.kind is {kind!r}, but {_no_factory(module, module_name, name)}")


def _no_factory(module: object, module_name: str, name: str) -> str:
    if hasattr(module, name):
        return f"{name} is a {type(getattr(module, name)).__name__}; name a function or a class"
    near = get_close_matches(name, [known for known in vars(module) if known[0] != "_"], n=1)
    hint = f"did you mean {near[0]}?" if near else "check its name"
    return f"{module_name} has no {name}; {hint}"


def _positional(kind: str, factory: Factory) -> list[inspect.Parameter]:
    """The parameters that are given: the config, then the columns."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(factory).parameters.values())
    found = [one for one in parameters if one.kind in kinds]
    needed = [one for one in parameters if one.default is one.empty and one.kind in (*kinds, 3)]
    if len(needed) > 2 or any(one.kind == 3 for one in needed):
        raise ConfigError(
            f"{kind} needs {len(needed)} parameters; take the config, then the columns of the data"
        )
    return found[:2]


def _config(
    kind: str, factory: Factory, parameters: list[inspect.Parameter], config: Mapping[str, Any]
) -> object:
    """The section as the factory wants it."""
    if not parameters:
        return None
    where = factory.__init__ if inspect.isclass(factory) else factory
    try:
        wanted = get_type_hints(where).get(parameters[0].name)
    except Exception as error:
        raise ModelError(f"the annotations of {kind} cannot be read ({told(error)})") from error
    if inspect.isclass(wanted) and is_dataclass(wanted):
        return build(wanted, config, SECTION)
    return dict(config)


def _checked(kind: str, made: object) -> tuple[nn.Module, list[Table]]:
    """The two parts of what a factory returned."""
    model, tables = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{kind} returned {kind_of(model)}; return an nn.Module, or one and its tables"
        )
    if not isinstance(model, RecModel):
        raise ModelError(
            f"{kind} returned a {type(model).__name__} without the methods `sparse_keys(batch)` "
            "and `dense(rows, batch)`; give it both"
        )
    if tables is None:
        declared: Any = getattr(model, "tables", None)
        if not callable(declared):
            raise ModelError(
                f"{kind} returned a {type(model).__name__} and no tables; return both, or give it "
                "a method `tables()`"
            )
        tables = declared()
    return model, _tables(kind, tables)


def _tables(kind: str, tables: object) -> list[Table]:
    listed: list[Table] = []
    for table in tables if isinstance(tables, Iterable) else [tables]:
        if isinstance(table, Table):
            listed.append(table)
        else:
            raise ModelError(
                f"the tables of {kind} hold {kind_of(table)}; list nestpipe.Table(name=..., "
                "dim=...)"
            )
    return listed
