"""Describe a structural fold as data (changed parameters, and submodules that become chains), apply and check it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from repaconv.torch_fold.module_trace import FunctionCall, FunctionTrace, SubmoduleCall, Value
from repaconv.torch_fold.submodules import dotted_name, dtype_at, is_hooked, like, put, too_large

Weights = dict[str, "np.ndarray | float | None"]
"""New parameters by their full names, in float64: an array, None to remove the parameter, or a number to replace it."""


@dataclass(frozen=True)
class ModuleChange:
    """One structural fold of a module.

    Attributes:
        at: The name of the submodule that it is reported for.
        description: A description of what was folded into what.
        weights: New parameters.
        rebuilt: Submodules that become a chain of their own children, by name, and of new layers.
        instead: The fold to try if this one changes the outputs.
    """

    at: str
    description: str
    weights: Weights = field(default_factory=dict)
    rebuilt: Mapping[str, tuple[str | nn.Module, ...]] = field(default_factory=dict)
    instead: ModuleChange | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the fold among those of one module."""
        return self.at, self.description

    @property
    def touches(self) -> set[str]:
        """Names of the submodules that it changes."""
        return {name.rpartition(".")[0] for name in self.weights} | set(self.rebuilt)


@dataclass(frozen=True)
class Unfolded:
    """A place that looks like a fold but was not folded.

    Attributes:
        at: The name of the submodule.
        what: What was not folded there.
        why: The reason.
    """

    at: str
    what: str
    why: str


def with_change(root: nn.Module, change: ModuleChange) -> nn.Module:
    """Apply a fold to a module in place; new parameters get the dtype and device of the old ones."""
    for name, array in change.weights.items():
        owner, _, last = name.rpartition(".")
        part = root.get_submodule(owner)
        old = getattr(part, last)
        if isinstance(array, float):
            delattr(part, last)  # torch does not let a number replace a registered parameter
            setattr(part, last, array)
            continue
        typed = old if old is not None else next(part.parameters())
        new = None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(typed)
        setattr(part, last, None if new is None else nn.Parameter(new, requires_grad=typed.requires_grad))
    for name, links in change.rebuilt.items():
        parts = [
            root.get_submodule(dotted_name(name, link))
            if isinstance(link, str)
            else like(copy.deepcopy(link), root, name)
            for link in links
        ]
        made = parts[0] if len(parts) == 1 else nn.Sequential(*parts) if parts else nn.Identity()
        root = put(root, name, made.eval())
    return root


def within(name: str, other: str) -> bool:
    """Whether a dotted name is that of a submodule, or of something inside it."""
    return name == other or not other or name.startswith(f"{other}.")


class Places:
    """Decides which submodules and parameters of a module may be changed: not shared, hooked, or used several times.

    Args:
        root: The module.
        trace: A trace of the module.
        shared: Names of modules and tensors that have another name as well.
        keeps_state: Whether the module gives other outputs when it is called again.
        given: The user's module, whose dtypes the new parameters get.
    """

    def __init__(
        self, root: nn.Module, trace: FunctionTrace, shared: set[str], keeps_state: Callable[[], bool], given: nn.Module
    ) -> None:
        self.root, self.trace, self._shared, self.keeps_state, self._given = root, trace, shared, keeps_state, given
        self._calls = Counter(call.name for call in trace.calls)
        self.users = Counter(v.name for step in trace.steps for v in dict.fromkeys(step.inputs) if v.name)
        self._held = {name for name, _ in root.named_parameters()}
        every = (*root.named_parameters(), *root.named_buffers())
        self._sizes = {name: tensor.numel() for name, tensor in every if tensor.is_floating_point()}

    def bound(self, name: str, *, kept: Collection[str] = (), repeats: bool = False) -> str:
        """Why a submodule may not be replaced; empty if it may be.

        Args:
            name: The name of the submodule.
            kept: Names of its submodules that stay in the replacement; these may be shared or hooked.
            repeats: Whether the submodule may be called several times.
        """

        def goes(other: str) -> bool:
            return within(other, name) and not any(within(other, inner) for inner in kept)

        shared = sorted(filter(goes, self._shared))
        if shared:
            return f"{shared[0] or 'it'} is shared: the same module or tensor has another name as well"
        calls = self._calls[name]
        if calls != 1 and not (repeats and calls):
            return f"it is called {calls} times in one run"
        inner = ((dotted_name(name, at), part) for at, part in self.root.get_submodule(name).named_modules())
        hooked = next((at for at, part in inner if goes(at) and is_hooked(part)), None)
        if hooked is not None:
            return f"{hooked or 'it'} has a hook, a parametrization or a forward of its own"
        return ""

    def owner(self, step: FunctionCall, *values: Value | None) -> str | None:
        """The submodule that holds these parameters, if only this step of it reads them and they may be changed."""
        names = {value.name for value in values if value is not None}
        owners = {name.rpartition(".")[0] for name in names}
        if owners != {step.module} or not names <= self._held or any(self.users[name] != 1 for name in names):
            return None
        hidden = any(within(other, step.module) for other in self._shared)
        return None if hidden or is_hooked(self.root.get_submodule(step.module)) else step.module

    def decides(self, change: ModuleChange) -> str:
        """The class whose forward reads numbers of its input, if it calls what a fold changes; empty if none does.

        Such a forward may call one changed submodule without the other. What calls all of them as one is not affected.
        """
        paths = [self._callers(call) for name in change.touches for call in self.trace.called(name)[:1]]
        common = next(call for call in paths[0] if all(call in path for path in paths))
        inner = {call.name for path in paths for call in path[: path.index(common) + 1]}
        steps = (step for step in self.trace.steps if step.module in inner and step.looks)
        return next((type(self.root.get_submodule(step.module)).__name__ for step in steps), "")

    @staticmethod
    def _callers(call: SubmoduleCall) -> list[SubmoduleCall]:
        """A call, the call that it was made in, and so on."""
        found = [call]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found

    def overflows(self, change: ModuleChange) -> str:
        """Why the new numbers of a fold do not fit the dtype of the user's module; empty if they do."""
        arrays = {at: array for at, array in change.weights.items() if isinstance(array, np.ndarray)}
        new = [(at, [torch.from_numpy(np.ascontiguousarray(array))]) for at, array in arrays.items()]
        layers = ((at, link) for at, links in change.rebuilt.items() for link in links if isinstance(link, nn.Module))
        new += [(at, list(layer.parameters())) for at, layer in layers]
        return next(filter(None, (too_large(tensors, dtype_at(self._given, at)) for at, tensors in new)), "")

    def grows(self, change: ModuleChange) -> bool:
        """Whether a fold increases the number of parameters and statistics."""
        gone = sum(size for name, size in self._sizes.items() if any(within(name, part) for part in change.rebuilt))
        kept = [part for links in change.rebuilt.values() for part in links if isinstance(part, nn.Module)]
        inner = [
            dotted_name(at, part) for at, links in change.rebuilt.items() for part in links if isinstance(part, str)
        ]
        gone -= sum(size for name, size in self._sizes.items() if any(within(name, part) for part in inner))
        gone += sum(self._sizes.get(name, 0) for name in change.weights)
        new = sum(array.size for array in change.weights.values() if isinstance(array, np.ndarray))
        return new + sum(parameter.numel() for part in kept for parameter in part.parameters()) > gone
