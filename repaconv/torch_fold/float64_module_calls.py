"""Run a module in float64: calls, their outputs, and random or slightly moved inputs for them.

The user's module is not affected: copies are run in eval mode, and the states of random generators are restored.
"""

from __future__ import annotations

import copy
import random
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from repaconv.core.errors import Refused, first_line
from repaconv.method_api.fold_error import tensors_in
from repaconv.verification.rounding import LAST_PLACE, jittered_feeds


class Call(NamedTuple):
    """The arguments of a module call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


Outputs = dict[str, Tensor]
"""Every tensor in an output, by its path in it."""


def in_float64(module: nn.Module) -> nn.Module:
    """A copy on the CPU in eval mode, with all floating-point tensors in float64, also those in plain attributes.

    Raises:
        Refused: If the module cannot be copied.
    """
    try:
        own = copy.deepcopy(module).double().cpu().eval()
    except Exception as error:  # the user's code may raise anything
        raise Refused(
            f"this {type(module).__name__} cannot be copied: {first_line(error)}.",
            hint=_how_to_copy(module),
            code="live.copy",
        ) from error
    for part in own.modules():
        vars(part).update({name: double(value) for name, value in vars(part).items() if isinstance(value, Tensor)})
    return own


def _how_to_copy(module: nn.Module) -> str:
    """What to do with a module that cannot be copied: a weight that is computed in each call may be the cause."""
    for name, part in module.named_modules():
        for kind, value in vars(part).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                return (
                    f"{f'{name}.' * bool(name)}{kind} is computed from other tensors: make it a parameter again, with "
                    "torch.nn.utils.remove_weight_norm or torch.nn.utils.prune.remove."
                )
    return "Fold it before anything is attached to it."


def outputs(module: nn.Module, call: Call, prepare: Callable[[nn.Module], None] = lambda own: None) -> Outputs:
    """Run a copy of the module and return its output tensors; ``prepare`` may attach hooks to that copy."""
    own = copy.deepcopy(module)
    prepare(own)
    return _run(own, call)


KEEPS_STATE = "the module gives other outputs when it is called again"
"""Why something is not folded in a module that `keeps_state`."""


def keeps_state(module: nn.Module, call: Call) -> bool:
    """Whether a copy of the module gives other outputs, or an error, when it is called a second time."""
    own = copy.deepcopy(module)
    first = {name: tensor.clone() for name, tensor in _run(own, call).items()}  # the second call may write into them
    try:
        second = _run(own, call)
    except Exception:  # the user's code may raise anything, and did not in the first call
        return True
    return first.keys() != second.keys() or not all(_same(first[name], second[name]) for name in first)


def _same(first: Tensor, second: Tensor) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return torch.allclose(first, second, rtol=1e-9, atol=0.0, equal_nan=True)


def _run(module: nn.Module, call: Call) -> Outputs:
    args, kwargs = copy.deepcopy(call)
    with _reproducible():
        return dict(tensors_in(module(*args, **kwargs)))


def with_random_inputs(call: Call, seed: int = 0, scale: float = 1.0, offset: float = 0.0) -> Call:
    """The same call with normally distributed random numbers of that scale and mean as floating-point inputs."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: Tensor) -> Tensor:
        if not _real(tensor):
            return tensor
        return offset + scale * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)

    return Call(mapped(call.args, drawn), mapped(dict(call.kwargs), drawn))


def with_moved_inputs(call: Call, seed: int) -> Call:
    """The same call with every floating-point input moved by one unit in the last place, up or down."""

    def moved(tensor: Tensor) -> Tensor:
        numbers = jittered_feeds({"": tensor.numpy()}, LAST_PLACE, seed)[""] if _real(tensor) else None
        return tensor if numbers is None else torch.from_numpy(numbers)

    return Call(mapped(call.args, moved), mapped(dict(call.kwargs), moved))


def usable(found: Outputs) -> bool:
    """Whether outputs can be compared: some numbers are finite, and none is NaN; what a mask hides is infinite."""
    real = [tensor for tensor in found.values() if _real(tensor) and tensor.numel()]
    finite = any(bool(torch.isfinite(tensor).any()) for tensor in real)
    return finite and not any(bool(tensor.isnan().any()) for tensor in real)


@contextmanager
def keeping_random_states() -> Iterator[None]:
    """A context that restores the states of the random generators at its end."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


class _Float64Casts(TorchFunctionMode):
    """Casts to float32, and new tensors of it, are of float64: a module may name the type of its own weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.view and isinstance(kind := [*args, *kwargs.values()][-1], torch.dtype):
            return _bits_as(args[0], kind)
        func = Tensor.double if func is Tensor.float else func
        return func(*map(_wider, args), **{name: _wider(value) for name, value in kwargs.items()})


def _bits_as(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """The bits of a tensor read as another type, by a module that takes its float64 numbers for float32."""
    if tensor.dtype == torch.float64:
        kind = _wider(kind)
        tensor = tensor if kind.itemsize == tensor.dtype.itemsize else tensor.float()
    read = tensor.view(kind)
    return read.double() if read.dtype == torch.float32 else read


def _wider(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value == torch.float32 else value


@contextmanager
def _reproducible() -> Iterator[None]:
    """A context without gradients, with float64 in place of float32, and with the same random numbers every time."""
    usual = torch.get_default_dtype()
    with torch.no_grad(), keeping_random_states(), _Float64Casts():
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(usual)


def mapped(value: Any, change: Callable[[Tensor], Tensor], around: tuple[int, ...] = ()) -> Any:
    """The same nested containers (tuples, lists, mappings, dataclasses) with a function applied to every tensor.

    Args:
        value: A tensor, a container, or any other object, which is returned.
        change: The function.
        around: The identities of the containers around it. One that holds itself is not searched again.
    """
    if isinstance(value, Tensor):
        return change(value)
    if id(value) in around:
        return value

    def changed(entries: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        new = ((name, entry, mapped(entry, change, (*around, id(value)))) for name, entry in entries)
        return {name: other for name, entry, other in new if other is not entry}

    if isinstance(value, (tuple, list)):
        new = changed(enumerate(value))
        entries = [new.get(at, entry) for at, entry in enumerate(value)]
        if not new:
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)  # a NamedTuple has fields
    if isinstance(value, Mapping):
        return _with_entries(value, changed(value.items()))
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        new = changed((name, getattr(value, name)) for name in names)
        other = copy.copy(value) if new else value
        for name, entry in new.items():
            object.__setattr__(other, name, entry)  # it may be frozen
        return other
    return value


def _with_entries(value: Mapping[Any, Any], new: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The mapping, or a mapping of its kind if some entries are new."""
    if type(value) is dict or not isinstance(value, MutableMapping):
        return {**value, **new}
    own = getattr(value, "__dict__", None) is value  # deepcopy would lose its attributes, and keeps those of a copy
    if not new and not own:
        return value
    alike = copy.copy(value) if isinstance(value, (dict, UserDict)) else copy.deepcopy(value)
    attributes = getattr(alike, "__dict__", {})
    for name, entry in new.items():  # one by one: some mappings have no update, or hold entries as attributes
        if attributes.get(name) is value[name]:
            attributes[name] = entry
        alike[name] = entry
    return alike


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor that `mapped` changes, in the same order."""
    found: list[Tensor] = []

    def collected(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, collected)
    return found


def double(tensor: Tensor) -> Tensor:
    """The tensor detached on the CPU, in float64 if it is floating-point."""
    return tensor.detach().cpu().double() if _real(tensor) else tensor.detach().cpu()


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point()
