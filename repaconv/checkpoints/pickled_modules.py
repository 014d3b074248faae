"""Read a pickled ``nn.Module`` as data: its tensors under the names of its state dict, and its plain attributes.

``torch.save(module)`` stores the attributes of each module: parameters, buffers and submodules by name, and the numbers
that its constructor was given. The restricted unpickler makes inert placeholders of them. No class of the file is
imported, and no method of it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from repaconv.checkpoints.restricted_unpickler import Placeholder
from repaconv.core.errors import Refused

REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Attributes of every nn.Module."""
MOST_NAMES, DEEPEST_MODULE = 300_000, 100
"""Maximum number of modules and tensors in a file, and of modules in each other: a pickle may refer to one often."""


@dataclass(frozen=True)
class PickledModule:
    """A module of a pickle.

    Attributes:
        kind: Full name of its class, e.g. ``ultralytics.nn.tasks.DetectionModel``.
        attributes: Its attributes that are neither registries nor torch's own, as they are in the file.
    """

    kind: str
    attributes: Mapping[str, Any]


def is_module(value: object) -> bool:
    """Whether this is a placeholder with the attributes of an nn.Module."""
    return _state(value) is not None


def weights_of(module: Placeholder, room: Iterator[int]) -> dict[str, Any]:
    """Return the state dict of a pickled module, with the names and the order of ``module.state_dict()``.

    A submodule that its class pickles in its own way (``__reduce__``, ``__getstate__``) is in it as a placeholder under
    its name, since only its code knows its weights.

    Args:
        module: The pickled module.
        room: As many items as values may still be read; one is taken for each.

    Raises:
        Refused: If modules contain themselves, are too many, or have names that are no texts.
    """
    found: dict[str, Any] = {}
    for name, part in _walk(module, "", room):
        state = _state(part)
        if state is None:
            found[name.removesuffix(".")] = part
            continue
        transient = state.get("_non_persistent_buffers_set")
        dropped = transient if isinstance(transient, (set, frozenset)) else ()
        found.update({f"{name}{key}": value for key, value in _entries(state["_parameters"], room)})
        found.update({f"{name}{key}": value for key, value in _entries(state["_buffers"], room) if key not in dropped})
    return found


def submodules_of(module: Placeholder) -> dict[str, PickledModule]:
    """Return all modules in a pickled module by name, itself included under the empty name."""
    parts = (
        (name.removesuffix("."), part) for name, part in _walk(module, "", iter(range(MOST_NAMES))) if is_module(part)
    )
    return {name: PickledModule(part.qualified_name, attributes_of(part)) for name, part in parts}


def attributes_of(module: Placeholder) -> dict[str, Any]:
    """Return a pickled module's own attributes, without registries and those of torch; empty if it is no module."""
    return {
        name: value
        for name, value in (_state(module) or {}).items()
        if isinstance(name, str) and not name.startswith("_") and name != "training"
    }


def _walk(module: Placeholder, name: str, room: Iterator[int], depth: int = 0) -> Iterator[tuple[str, Placeholder]]:
    """Yield the module and its submodules in the order of ``state_dict``, with names that end in a dot."""
    if depth > DEEPEST_MODULE:
        raise _impossible(f"more than {DEEPEST_MODULE} modules are in each other")
    yield name, module
    if state := _state(module):
        for key, child in _entries(state["_modules"], room):
            if isinstance(child, Placeholder):
                yield from _walk(child, f"{name}{key}.", room, depth + 1)


def _entries(registry: Mapping[Any, Any], room: Iterator[int]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a registry, without those that are None."""
    for key, value in registry.items():
        if next(room, None) is None:
            raise _impossible(f"it has more than {MOST_NAMES:,} modules and tensors")
        if not isinstance(key, str):
            raise _impossible(f"the name of a part is a {type(key).__name__}")
        if value is not None:
            yield key, value


def _state(value: object) -> Mapping[str, Any] | None:
    """The attributes of a pickled module; None if it is none."""
    state = value.state if isinstance(value, Placeholder) else None
    if isinstance(state, tuple) and len(state) == 2:  # of a class with __slots__
        state = state[0]
    is_of_module = isinstance(state, Mapping) and all(isinstance(state.get(name), Mapping) for name in REGISTRIES)
    return state if is_of_module else None  # type: ignore[return-value]


def _impossible(what: str) -> Refused:
    return Refused(
        f"the pickled module in the file is none that torch could have saved: {what}.",
        hint="Save the trained module's state_dict() with torch.save or safetensors.",
        code="checkpoint.corrupt",
    )
