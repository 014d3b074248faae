"""Results whose every text contains terminal escape sequences, one of each type that a command shows."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from repaconv import results
from repaconv.cli.text_and_json_output import TEXTS
from repaconv.results import Record

HOSTILE = "[/x]\x1b[2J :bug: "
PLAIN = {str: HOSTILE, bool: True, int: 1, float: 1.5, Any: 1.5}


def shown() -> Iterator[type[Record]]:
    """All kinds that `repaconv.cli.text_and_json_output` shows as text."""
    for function in dict.fromkeys(TEXTS.values()):
        module, _, name = function.rpartition(".")
        show = getattr(import_module(f"repaconv.{module}"), name)
        taken = next(iter(signature(show).parameters.values())).annotation
        yield from (getattr(results, name.strip()) for name in taken.split("|") if name)


def hostile(kind: type[Record]) -> Record:
    """One of that kind, whose tuples and tables have one entry each."""
    hints = get_type_hints(kind, include_extras=True)
    return kind.model_construct(**{name: _value(hints[name]) for name in kind.model_fields})


def _value(kind: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _value(inner[0])
    if origin is Literal:
        return inner[0]
    if origin in (Union, UnionType):
        return _value(next(each for each in inner if each is not type(None)))
    if origin is tuple:
        return tuple(_value(each) for each in inner if each is not Ellipsis)
    if origin is not None:  # a mapping
        return {_value(inner[0]): _value(inner[1])}
    return PLAIN[kind] if kind in PLAIN else hostile(kind)
