"""Parse mmengine's ``meta['cfg']``, the configuration of a training run as Python text, without running it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any


def read_mmconfig(text: str) -> dict[str, Any]:
    """Parse top-level assignments of literals and ``dict(...)`` calls; other values become None.

    An unreadable text gives {}, since the tensors of the file describe the rest.
    """
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        return {}
    return {
        target.id: _value(node.value)
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _value(node: ast.expr) -> Any:
    match node:
        case ast.List(elts) | ast.Tuple(elts):
            return [_value(element) for element in elts]
        case ast.Dict(keys, values):
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.Call(ast.Name("dict"), args, keywords):
            merged = _value(args[0]) if args else {}
            named = {keyword.arg: _value(keyword.value) for keyword in keywords if keyword.arg}
            return {**merged, **named} if isinstance(merged, dict) else named
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def find_typed(config: Any, kind: str) -> dict[str, Any] | None:
    """Return the first dict with ``type == kind``, depth first, e.g. ``dict(type='RIFormer', ...)``."""
    if isinstance(config, Mapping):
        if config.get("type") == kind:
            return dict(config)
        config = list(config.values())
    if isinstance(config, list):
        for entry in config:
            if (found := find_typed(entry, kind)) is not None:
                return found
    return None
