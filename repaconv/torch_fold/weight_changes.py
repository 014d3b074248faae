"""A fold of a live module by its structure, as a value: which parameters are others, and which parts become chains."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from repaconv.torch_fold.module_trace import Step, Trace, Value
from repaconv.torch_fold.submodules import joined, like, put, watched

Weights = dict[str, "np.ndarray | float | None"]
"""Parameters by their whole names, in float64; None for one that is no more, a number where a plain one replaces it."""


@dataclass(frozen=True)
class Change:
    """One fold.

    Attributes:
        at: The part that it is told of.
        told: What went where.
        weights: New parameters.
        rebuilt: Parts that become a chain of children of theirs, by name, and of new layers.
        instead: What is tried where the whole computes something else with this one.
    """

    at: str
    told: str
    weights: Weights = field(default_factory=dict)
    rebuilt: Mapping[str, tuple[str | nn.Module, ...]] = field(default_factory=dict)
    instead: Change | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from others of the same module."""
        return self.at, self.told

    @property
    def touches(self) -> set[str]:
        """The parts that it changes."""
        return {name.rpartition(".")[0] for name in self.weights} | set(self.rebuilt)


@dataclass(frozen=True)
class Unfolded:
    """A place that a fold has the shape of, and why it was not folded."""

    at: str
    what: str
    why: str


def applied(root: nn.Module, change: Change) -> nn.Module:
    """The module with a fold, changed in place; new numbers are of the type and on the device of the old."""
    for name, array in change.weights.items():
        owner, _, last = name.rpartition(".")
        part = root.get_submodule(owner)
        old = getattr(part, last)
        if isinstance(array, float):
            delattr(part, last)  # torch lets no number take the place of a parameter
            setattr(part, last, array)
            continue
        typed = old if old is not None else next(part.parameters())
        new = None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(typed)
        setattr(part, last, None if new is None else nn.Parameter(new, requires_grad=typed.requires_grad))
    for name, links in change.rebuilt.items():
        parts = [
            root.get_submodule(joined(name, link)) if isinstance(link, str) else like(copy.deepcopy(link), root, name)
            for link in links
        ]
        made = parts[0] if len(parts) == 1 else nn.Sequential(*parts) if parts else nn.Identity()
        root = put(root, name, made.eval())
    return root


def within(name: str, other: str) -> bool:
    """Whether a dotted name is that of a part, or of something in it."""
    return name == other or not other or name.startswith(f"{other}.")


class Places:
    """What may be changed in a module: what runs once, and nothing else shares, reads or watches.

    Args:
        root: The module.
        trace: Of it.
        shared: Names of modules and tensors that are reached by another name as well.
    """

    def __init__(self, root: nn.Module, trace: Trace, shared: set[str]) -> None:
        self.root, self.trace, self._shared = root, trace, shared
        self._calls = Counter(call.name for call in trace.calls)
        self.users = Counter(v.name for step in trace.steps for v in dict.fromkeys(step.inputs) if v.name)
        self._held = {name for name, _ in root.named_parameters()}
        every = (*root.named_parameters(), *root.named_buffers())
        self._sizes = {name: tensor.numel() for name, tensor in every if tensor.is_floating_point()}

    def bound(self, name: str, *, kept: Collection[str] = (), repeats: bool = False) -> str:
        """Why a part may not be replaced by another; empty if it may.

        Args:
            name: Of the part.
            kept: Names of what is in the part and will be in the other: it may be shared, and watched.
            repeats: Whether the part may be called several times.
        """

        def goes(other: str) -> bool:
            return within(other, name) and not any(within(other, inner) for inner in kept)

        shared = sorted(filter(goes, self._shared))
        if shared:
            return f"{shared[0] or 'it'} is shared: the same module or tensor has another name as well"
        calls = self._calls[name]
        if calls != 1 and not (repeats and calls):
            return f"it is called {calls} times in one run"
        inner = ((joined(name, at), part) for at, part in self.root.get_submodule(name).named_modules())
        hooked = next((at for at, part in inner if goes(at) and watched(part)), None)
        if hooked is not None:
            return f"{hooked or 'it'} has a hook, a parametrization or a forward of its own"
        return ""

    def owner(self, step: Step, *values: Value | None) -> str | None:
        """The part that holds these parameters, if this step alone reads them, in it, and it may be changed."""
        names = {value.name for value in values if value is not None}
        owners = {name.rpartition(".")[0] for name in names}
        if owners != {step.module} or not names <= self._held or any(self.users[name] != 1 for name in names):
            return None
        hidden = any(within(other, step.module) for other in self._shared)
        return None if hidden or watched(self.root.get_submodule(step.module)) else step.module

    def grows(self, change: Change) -> bool:
        """Whether a fold leaves more numbers than there were, statistics included."""
        gone = sum(size for name, size in self._sizes.items() if any(within(name, part) for part in change.rebuilt))
        kept = [part for links in change.rebuilt.values() for part in links if isinstance(part, nn.Module)]
        inner = [joined(at, part) for at, links in change.rebuilt.items() for part in links if isinstance(part, str)]
        gone -= sum(size for name, size in self._sizes.items() if any(within(name, part) for part in inner))
        gone += sum(self._sizes.get(name, 0) for name in change.weights)
        new = sum(array.size for array in change.weights.values() if isinstance(array, np.ndarray))
        return new + sum(parameter.numel() for part in kept for parameter in part.parameters()) > gone
