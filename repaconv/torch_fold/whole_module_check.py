"""Run a whole module in float64 and test whether a changed module gives the same outputs.

A parent's forward can do anything with its children: read a child's weight, or call a child twice or from elsewhere. So
for every change in a module, the whole module is run before and after.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from repaconv.core.errors import Refused
from repaconv.torch_fold.module_calls import (
    Call,
    Outputs,
    difference,
    double,
    first_line,
    mapped,
    outputs,
    usable,
    with_random_inputs,
)

# --- Inputs for the module: the user's example, or shapes from its attributes or first layers.

# Common image sizes of vision models; the first ones are cheap.
SIDES = (64, 224, 32, 96, 128, 160, 192, 256, 288, 384, 448, 512, 28, 16)
SIZE_NAMES = ("img_size", "image_size", "input_size")
CONFIG_NAMES = ("config", "default_cfg", "pretrained_cfg")
# How many of the first layers are used to guess the input shape.
FIRST = 4


def own_calls(module: nn.Module, example: Any) -> tuple[Call, ...]:
    """The user's example, and random inputs of its shape if the module runs on them: an example may be all zeros.

    Raises:
        Refused: If the module does not run on the example, or its outputs are not finite.
    """
    if isinstance(example, Mapping):
        given = Call((), dict(example))
    else:
        given = Call(tuple(example) if isinstance(example, (tuple, list)) else (example,), {})
    given = Call(mapped(given.args, double), mapped(given.kwargs, double))
    try:
        answer = outputs(module, given)
    except Exception as error:
        raise Refused(
            f"this {type(module).__name__} does not run on the example in float64: {first_line(error)}.",
            hint="Give example=tensor, a tuple of its arguments, or a dict of named ones.",
            code="live.example",
        ) from error
    if not usable(answer):
        raise Refused(
            f"the outputs of this {type(module).__name__} on the example are no finite numbers, which prove nothing.",
            hint="Give another example.",
            code="live.example",
        )
    return (given, *_if_it_runs(module, with_random_inputs(given)))


def found_calls(module: nn.Module) -> tuple[Call, ...]:
    """Two batches of random inputs in the first shape that the module accepts.

    Raises:
        Refused: If the module accepts none of the shapes that were tried.
    """
    problem = "it has no layer that tells what it takes"
    for shape in dict.fromkeys(_shapes(module)):
        empty = [Call((torch.empty(count, *shape, dtype=torch.float64),), {}) for count in (2, 3)]
        first, second = (with_random_inputs(call, seed) for seed, call in enumerate(empty))
        try:
            if usable(outputs(module, first)):
                return (first, *_if_it_runs(module, second))
            problem = "its outputs are no finite numbers"
        except Exception as error:
            problem = first_line(error)
    raise Refused(
        f"the inputs of this {type(module).__name__} are not known, so it cannot be verified: {problem}.",
        hint="Give an input: repaconv.fold(module, example=tensor), a tuple of its arguments, or a dict of named ones.",
        code="live.input",
    )


def _if_it_runs(module: nn.Module, call: Call) -> tuple[Call, ...]:
    """The call in a tuple, or an empty tuple if the module cannot run it."""
    try:
        return (call,) if usable(outputs(module, call)) else ()
    except Exception:
        return ()


def _shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """Input shapes without the batch that the module's first layers suggest, most likely first."""
    sides = dict.fromkeys([*_image_sizes(module), *((side, side) for side in SIDES), (7, 5)])
    firsts = dict.fromkeys(found for part in module.modules() if (found := _width(part)))
    for images, width in list(firsts)[:FIRST]:
        if images:
            yield from ((width, *side) for side in sides)
        else:
            yield from ((5, width), (width,), (width, 5), (7, 5, width))


def _width(part: nn.Module) -> tuple[bool, int] | None:
    """Whether a layer reads images, and its number of input channels; None for a layer that tells neither."""
    match part:
        case nn.Conv2d() | nn.ConvTranspose2d():
            return True, part.in_channels
        case nn.BatchNorm2d():
            return True, part.num_features
        case nn.GroupNorm():
            return True, part.num_channels
        case nn.Linear():
            return False, part.in_features
        case nn.BatchNorm1d():
            return False, part.num_features
        case nn.LayerNorm():
            return False, part.normalized_shape[-1]
        case nn.Conv1d():
            return False, part.in_channels
    return None


def _image_sizes(module: nn.Module) -> Iterator[tuple[int, int]]:
    """(height, width) from the size attributes and configs of the module and its submodules."""
    for part in module.modules():
        for holder in (part, *(getattr(part, name, None) for name in CONFIG_NAMES)):
            for name in SIZE_NAMES:
                said = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
                sides = said[-2:] if isinstance(said, (tuple, list)) else (said, said)
                if len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides):
                    yield int(sides[0]), int(sides[1])


# --- Recorded outputs of the whole module, and the comparison with a changed module.


@dataclass(frozen=True)
class Whole:
    """The recorded inputs and outputs of a whole module.

    Attributes:
        calls: One or two sets of inputs.
        expected: The module's outputs for each.
        inside: The inputs of the requested submodules, one per call of the whole module in which they are called.
    """

    calls: tuple[Call, ...]
    expected: tuple[Outputs, ...]
    inside: Mapping[str, tuple[Call, ...]]

    @classmethod
    def of(cls, module: nn.Module, example: Any, names: Iterable[str]) -> Whole:
        """Run a module and record its outputs and the inputs of some submodules.

        Args:
            module: A module returned by `in_float64`.
            example: The user's input: a tensor, a tuple of arguments, or a dict of named ones. If None, sizes are tried
                that the module's attributes or first layers suggest.
            names: The submodules whose inputs to record.

        Raises:
            Refused: If it does not run on the example, or on any input that was tried.
        """
        calls = own_calls(module, example) if example is not None else found_calls(module)
        names, inside = list(names), defaultdict(list)
        expected = []
        for call in calls:
            met: dict[str, Call] = {}
            expected.append(outputs(module, call, _recorder(names, met)))
            for name, own in met.items():
                inside[name].append(own)
        return cls(calls, tuple(expected), {name: tuple(own) for name, own in inside.items()})

    def error(self, other: nn.Module) -> float:
        """The largest relative difference of another module's outputs over all calls; infinite if it cannot run."""
        try:
            answers = [outputs(other, call) for call in self.calls]
        except Exception:  # the user's code may raise anything, for example if it reads what was removed
            return float("inf")
        return max(map(difference, answers, self.expected))


def _recorder(names: Iterable[str], inside: dict[str, Call]) -> Callable[[nn.Module], None]:
    """A function that hooks submodules to record the inputs of their first call."""

    def prepare(own: nn.Module) -> None:
        for name in names:

            def note(_part: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                if name not in inside:
                    inside[name] = copy.deepcopy(Call(args, kwargs))

            own.get_submodule(name).register_forward_pre_hook(note, prepend=True, with_kwargs=True)

    return prepare
