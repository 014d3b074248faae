"""A live module run whole, in float64: on what inputs, and whether another one computes the same there.

What a parent's forward does with its children cannot be seen from outside: it may read a child's weight, call one child
twice or one that stands elsewhere. So whatever is changed in a module, the module as a whole is run before and after.
Nothing of it reaches the user: copies are run, in eval mode, and the generators of random numbers are put back.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from repaconv.errors import Refused
from repaconv.trained.certificate import max_rel_error, tensors_in

# Sides of images that vision models are made for; the first ones are cheap.
SIDES = (64, 224, 32, 96, 128, 160, 192, 256, 288, 384, 448, 512, 28, 16)
SIZE_NAMES = ("img_size", "image_size", "input_size")
CONFIG_NAMES = ("config", "default_cfg", "pretrained_cfg")
# Scales and offsets of the random numbers on which a guess is tried besides: what a clamp hides
# shows where it is reached.
SPREAD = ((1.0, 0.0), (1e-2, 0.0), (30.0, 0.0), (1e3, 0.0), (1.0, 10.0), (1.0, -10.0))
# So many first layers are asked for what the module takes.
FIRST = 4


class Call(NamedTuple):
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


Outputs = dict[str, Tensor]
"""Every tensor of an output, by its place in it."""


def in_float64(module: nn.Module) -> nn.Module:
    """A copy on the CPU in eval mode, all its floating tensors in float64, those that are plain attributes too.

    Raises:
        Refused: If it cannot be copied.
    """
    try:
        own = copy.deepcopy(module).double().cpu().eval()
    except Exception as error:  # the user's code may raise anything
        raise Refused(
            f"this {type(module).__name__} cannot be copied: {_first_line(error)}.",
            hint="Fold it before anything is attached to it.",
            code="live.copy",
        ) from error
    for part in own.modules():
        vars(part).update({name: _double(value) for name, value in vars(part).items() if isinstance(value, Tensor)})
    return own


@dataclass(frozen=True)
class Whole:
    """A module, the calls that it takes, and what it answers.

    Attributes:
        calls: One or two.
        expected: Its outputs of each.
        inside: What the parts that were asked for are called with on the way, where they are, once for every call.
    """

    calls: tuple[Call, ...]
    expected: tuple[Outputs, ...]
    inside: Mapping[str, tuple[Call, ...]]

    @classmethod
    def of(cls, module: nn.Module, example: Any, names: Iterable[str]) -> Whole:
        """Run a module.

        Args:
            module: Of `in_float64`.
            example: The user's input: a tensor, a tuple of arguments, or a dict of named ones. If None, sizes are tried
                that the module says or its first layers suggest.
            names: The parts whose calls are wanted.

        Raises:
            Refused: If it does not run on the example, or on nothing that was tried.
        """
        calls = _own_calls(module, example) if example is not None else _found_calls(module)
        names, inside = list(names), defaultdict(list)
        expected = []
        for call in calls:
            met: dict[str, Call] = {}
            expected.append(outputs(module, call, _recorder(names, met)))
            for name, own in met.items():
                inside[name].append(own)
        return cls(calls, tuple(expected), {name: tuple(own) for name, own in inside.items()})

    def error(self, other: nn.Module) -> float:
        """The largest relative difference of another module's outputs, over all calls; infinite if it does not run."""
        try:
            answers = [outputs(other, call) for call in self.calls]
        except Exception:  # the user's code may raise anything, as where it reads what is gone
            return float("inf")
        return max(map(difference, answers, self.expected))


def outputs(module: nn.Module, call: Call, prepare: Callable[[nn.Module], None] = lambda own: None) -> Outputs:
    """What a copy of the module answers; ``prepare`` may attach to that copy."""
    own, (args, kwargs) = copy.deepcopy(module), copy.deepcopy(call)
    prepare(own)
    with _sealed():
        return dict(tensors_in(own(*args, **kwargs)))


def difference(found: Outputs, expected: Outputs) -> float:
    """The largest of `max_rel_error` over all outputs; infinite where they differ in kind, or whole numbers do."""
    if set(found) != set(expected):
        return float("inf")
    return max((_apart(found[place], expected[place]) for place in expected), default=float("inf"))


def shaken(call: Call, seed: int = 0, scale: float = 1.0, offset: float = 0.0) -> Call:
    """The same call with normal numbers of that scale and mean in place of its floating ones."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: Tensor) -> Tensor:
        if not _real(tensor):
            return tensor
        return offset + scale * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)

    return Call(_mapped(call.args, drawn), _mapped(dict(call.kwargs), drawn))


def rounding(module: nn.Module, call: Call, answer: Outputs) -> float:
    """What a module makes of the last bits of its floating inputs: how far its outputs move when those do."""
    generator = torch.Generator().manual_seed(0)

    def nudged(tensor: Tensor) -> Tensor:
        if not _real(tensor):
            return tensor
        return tensor * (1 + 2.0**-52 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))

    return difference(outputs(module, Call(_mapped(call.args, nudged), _mapped(dict(call.kwargs), nudged))), answer)


def usable(found: Outputs) -> bool:
    """Whether outputs can prove anything: some are floating numbers, and those are finite."""
    real = [tensor for tensor in found.values() if _real(tensor) and tensor.numel()]
    return bool(real) and all(bool(torch.isfinite(tensor).all()) for tensor in real)


def _apart(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    if _real(expected):
        error = max_rel_error(found, expected)
        return error if error == error else float("inf")
    return 0.0 if torch.equal(found, expected) else float("inf")


def _recorder(names: Iterable[str], inside: dict[str, Call]) -> Callable[[nn.Module], None]:
    """Keeps the first call of each part."""

    def prepare(own: nn.Module) -> None:
        for name in names:

            def note(_part: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                if name not in inside:
                    inside[name] = copy.deepcopy(Call(args, kwargs))

            own.get_submodule(name).register_forward_pre_hook(note, prepend=True, with_kwargs=True)

    return prepare


@contextmanager
def undisturbed() -> Iterator[None]:
    """Random numbers drawn inside are not missed outside."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def _sealed() -> Iterator[None]:
    """No gradients, float64 for what is made inside, and the same random numbers every time."""
    usual = torch.get_default_dtype()
    with torch.no_grad(), undisturbed():
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(usual)


# --- what a module takes ------------------------------------------------------------------------------------


def _own_calls(module: nn.Module, example: Any) -> tuple[Call, ...]:
    """The user's example, and random numbers of its shape where those run too: an example may be all zeros."""
    if isinstance(example, Mapping):
        given = Call((), dict(example))
    else:
        given = Call(tuple(example) if isinstance(example, (tuple, list)) else (example,), {})
    given = Call(_mapped(given.args, _double), _mapped(given.kwargs, _double))
    try:
        answer = outputs(module, given)
    except Exception as error:
        raise Refused(
            f"this {type(module).__name__} does not run on the example in float64: {_first_line(error)}.",
            hint="Give example=tensor, a tuple of its arguments, or a dict of named ones.",
            code="live.example",
        ) from error
    if not usable(answer):
        raise Refused(
            f"the outputs of this {type(module).__name__} on the example are no finite numbers, which prove nothing.",
            hint="Give another example.",
            code="live.example",
        )
    return (given, *_runs(module, shaken(given)))


def _found_calls(module: nn.Module) -> tuple[Call, ...]:
    """Two batches of random inputs of the first shape that the module takes."""
    problem = "it has no layer that tells what it takes"
    for shape in dict.fromkeys(_shapes(module)):
        empty = [Call((torch.empty(count, *shape, dtype=torch.float64),), {}) for count in (2, 3)]
        first, second = (shaken(call, seed) for seed, call in enumerate(empty))
        try:
            if usable(outputs(module, first)):
                return (first, *_runs(module, second))
            problem = "its outputs are no finite numbers"
        except Exception as error:
            problem = _first_line(error)
    raise Refused(
        f"it is not known what this {type(module).__name__} takes, so nothing could be proved of it: {problem}.",
        hint="Give an input: repaconv.fold(module, example=tensor), a tuple of its arguments, or a dict of named ones.",
        code="live.input",
    )


def _runs(module: nn.Module, call: Call) -> tuple[Call, ...]:
    """The call, if the module takes it."""
    try:
        return (call,) if usable(outputs(module, call)) else ()
    except Exception:
        return ()


def _shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """Shapes of one input, without the batch, that the module's first layers suggest; the likeliest first."""
    sides = dict.fromkeys([*_said_sizes(module), *((side, side) for side in SIDES), (7, 5)])
    firsts = dict.fromkeys(found for part in module.modules() if (found := _width(part)))
    for images, width in list(firsts)[:FIRST]:
        if images:
            yield from ((width, *side) for side in sides)
        else:
            yield from ((5, width), (width,), (width, 5), (7, 5, width))


def _width(part: nn.Module) -> tuple[bool, int] | None:
    """Whether a layer takes images, and of how many channels."""
    match part:
        case nn.Conv2d():
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


def _said_sizes(module: nn.Module) -> Iterator[tuple[int, int]]:
    """(height, width) wherever the module or one of its parts says what images it is for."""
    for part in module.modules():
        for holder in (part, *(getattr(part, name, None) for name in CONFIG_NAMES)):
            for name in SIZE_NAMES:
                said = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
                sides = said[-2:] if isinstance(said, (tuple, list)) else (said, said)
                if len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides):
                    yield int(sides[0]), int(sides[1])


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same containers with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(entry, change) for entry in value)
    if isinstance(value, dict):
        return {name: _mapped(entry, change) for name, entry in value.items()}
    return value


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double() if _real(tensor) else tensor.detach().cpu()


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _first_line(error: Exception) -> str:
    told = str(error).strip().splitlines()
    return told[0].rstrip(".") if told else type(error).__name__
