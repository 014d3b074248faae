"""Run a module in float64 and test whether a changed module gives the same outputs.

The test is the comparison of all commands (`repaconv.verification.comparison`). Where its tolerance is exceeded, the
last bits of the inputs are moved to see how far rounding moves the original. A parent's forward can do anything with
its children: read a child's weight, or call a child twice or from elsewhere. So for every change in a module, the whole
module is run before and after. Its code may also depend on the size of its inputs, or on how large their numbers are.
So it is run on inputs of other sizes and scales as well, if the original runs on them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from repaconv.core.errors import Refused, first_line
from repaconv.results import Tolerance, Verdict
from repaconv.torch_fold.float64_module_calls import (
    Call,
    Outputs,
    double,
    keeps_state,
    mapped,
    outputs,
    tensors_of,
    usable,
    with_moved_inputs,
    with_random_inputs,
)
from repaconv.verification.comparison import Comparison
from repaconv.verification.output_metrics import magnitudes, without_equal_infinities
from repaconv.verification.rounding import ALGEBRA_RTOL, JITTERS, MOVED_INPUTS, Movement, Rounding, movement
from repaconv.verification.tolerances import FLOAT64, LEAST_OUTPUT_CHANGE, exact_rtols

# --- Inputs for the module: the user's example, or shapes from its attributes or first layers.

# Common image sizes of vision models; the first ones are cheap.
SIDES = (64, 224, 32, 96, 128, 160, 192, 256, 288, 384, 448, 512, 28, 16)
SIZE_NAMES = ("img_size", "image_size", "input_size")
CONFIG_NAMES = ("config", "default_cfg", "pretrained_cfg")
NOT_FINITE = "its outputs are not finite"
# Where torch keeps layers of quantized and simulated quantized numbers.
QUANTIZED_LAYERS = (
    "torch.ao.nn.quantized",
    "torch.ao.nn.intrinsic.quantized",
    "torch.ao.nn.qat",
    "torch.ao.nn.intrinsic.qat",
    "torch.ao.quantization.fake_quantize",
)
# How many of the first layers are used to guess the input shape.
FIRST_LAYERS = 4


def own_calls(module: nn.Module, example: Any) -> tuple[Call, ...]:
    """The user's example, and random inputs of its shape if the module runs on them: an example may be all zeros.

    Raises:
        Refused: If the module does not run on the example, or its outputs are not finite.
    """
    if isinstance(example, Mapping):
        given = Call((), dict(example))
    else:
        given = Call(tuple(example) if isinstance(example, (tuple, list)) else (example,), {})
    try:
        given = Call(mapped(given.args, double), mapped(given.kwargs, double))
        answer = outputs(module, given)
    except Exception as error:
        _require_exact_layers(module)
        raise Refused(
            f"this {type(module).__name__} does not run on the example in float64: {first_line(error)}.",
            hint="Give example=tensor, a tuple of its arguments, or a dict of named ones, that copy.deepcopy can copy. "
            "Tensors become float64 also inside of tuples, lists, mappings and dataclasses.",
            code="live.example",
        ) from error
    if not usable(answer):
        _require_finite(module)
        raise Refused(
            f"the outputs of this {type(module).__name__} on the example are not finite (NaN or infinity).",
            hint="Give another example.",
            code="live.example",
        )
    return (given, *_if_it_runs(module, with_random_inputs(given)))


def found_calls(module: nn.Module) -> tuple[Call, ...]:
    """Two batches of random inputs in the first shape that the module accepts.

    Raises:
        Refused: If the module accepts none of the shapes that were tried, or cannot give numbers on any input.
    """
    problems = []
    for shape in dict.fromkeys(_shapes(module)):
        empty = [Call((torch.empty(count, *shape, dtype=torch.float64),), {}) for count in (2, 3)]
        first, second = (with_random_inputs(call, seed) for seed, call in enumerate(empty))
        try:
            if usable(outputs(module, first)):
                return (first, *_if_it_runs(module, second))
            problems.append(NOT_FINITE)
        except Exception as error:
            problems.append(first_line(error))
    _require_exact_layers(module)
    if NOT_FINITE in problems:  # a mask may be infinite
        _require_finite(module)
    problem = next(iter(problems), "it has no layer that tells what it takes")  # of the most likely shape
    raise Refused(
        f"the inputs of this {type(module).__name__} are not known, so it cannot be verified: {problem}.",
        hint="Give an input: repaconv.fold(module, example=tensor), a tuple of its arguments, or a dict of named ones.",
        code="live.input",
    )


def _require_exact_layers(module: nn.Module) -> None:
    """Refuse a module with quantized layers, which do not compute in float64.

    Raises:
        Refused: ``live.quantized``.
    """
    for name, part in module.named_modules():
        if type(part).__module__.startswith(QUANTIZED_LAYERS):
            raise Refused(
                f"{name or 'it'} of this {type(module).__name__} is quantized, so it cannot be verified in float64.",
                hint="Fold the network before it is prepared for quantization, then quantize the folded one.",
                code="live.quantized",
            )


def _require_finite(module: nn.Module) -> None:
    """Refuse a module with weights or statistics of which no numbers can come.

    Raises:
        Refused: ``live.not-finite``.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        last, wrong = name.rpartition(".")[2], ""
        if isinstance(tensor, nn.Parameter) or last in ("running_mean", "running_var"):
            wrong = "holds NaN or infinity" if not bool(torch.isfinite(tensor).all()) else ""
        if last == "running_var" and bool((tensor < 0).any()):
            wrong = "holds a negative variance"
        if wrong:
            raise Refused(
                f"{name} of this {type(module).__name__} {wrong}.",
                hint="Its training failed, or its weights were not loaded: load those of a checkpoint that is sound.",
                code="live.not-finite",
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
    for images, width in list(firsts)[:FIRST_LAYERS]:
        if images:
            yield from ((width, *side) for side in sides)
        else:
            yield from ((5, width), (width,), (width, 5), (7, 5, width))


def _width(part: nn.Module) -> tuple[bool, int] | None:
    """Return whether a layer reads images, and its number of input channels; None if the layer shows neither."""
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


# --- Inputs of other sizes and scales.

# An effect of a clamp, or of a branch that depends on numbers, shows only for inputs that reach it.
INPUT_SCALES = (1e-2, 30.0)
# Other sizes of an axis, cheap ones first: multiples of usual strides, or of half of a patch size.
Rules = tuple[Callable[[int], int], ...]
LARGER: Rules = (lambda size: size + 32, lambda size: size + size // 2, lambda size: 2 * size)
SMALLER: Rules = (lambda size: size // 2, lambda size: size - 32)


def calls_of_other_sizes(module: nn.Module, calls: Sequence[Call]) -> tuple[Call, ...]:
    """The first larger and the first smaller inputs that the module runs on, of another batch size if it runs on that.

    Inputs of another batch size alone if it runs on no other size.
    """
    first = calls[0]
    shape = max((tuple(tensor.shape) for tensor in _tensors(first)), key=len, default=())
    if not shape or 0 in shape:
        return ()

    def runs(sizes: Mapping[int, int]) -> tuple[Call, ...]:
        call = _resized(first, shape, sizes)
        return _if_it_runs(module, with_random_inputs(call, seed=len(calls)) if len(calls) > 1 else call)

    other = runs(batch := {0: 1 if shape[0] > 1 else 2})
    last = len(shape) - 1  # channels come first, or last, or are no axis of their own
    groups = [range(min(2, last), last + 1), range(1, last), range(last - 1, last + 1)]
    groups = [axes for axes in dict.fromkeys(groups) if axes and axes[0] > 0]
    found: list[Call] = []
    for rules in (LARGER, SMALLER):
        sizes = ({axis: rule(shape[axis]) for axis in axes} for axes in groups for rule in rules)
        tried = (runs({**(batch if other else {}), **each}) for each in sizes if min(each.values()) > 0)
        found += next(filter(None, tried), ())
    return tuple(found) or other


def _resized(call: Call, shape: tuple[int, ...], sizes: Mapping[int, int]) -> Call:
    """The call with tensors of other sizes, of repeated numbers.

    Args:
        call: The call.
        shape: The shape of its main tensor.
        sizes: New sizes of that tensor's axes. Axes of other tensors that are as long get the same new size.
    """
    by_size = {shape[axis]: size for axis, size in sizes.items() if axis}

    def changed(tensor: Tensor) -> Tensor:
        new = {axis: by_size[size] for axis, size in enumerate(tensor.shape) if axis and size in by_size}
        if tensor.ndim and 0 in sizes and len(tensor) == shape[0]:
            new[0] = sizes[0]
        for axis, size in (sizes if tuple(tensor.shape) == shape else new).items():
            tensor = tensor.index_select(axis, torch.arange(size) % tensor.shape[axis])
        return tensor

    return Call(mapped(call.args, changed), mapped(dict(call.kwargs), changed))


def calls_of_other_scales(module: nn.Module, call: Call) -> tuple[Call, ...]:
    """The call with smaller and with larger numbers, if it has floating-point inputs and the module runs on them."""
    if not any(tensor.is_floating_point() for tensor in _tensors(call)):
        return ()

    def scaled(scale: float) -> Call:
        change = partial(_times, scale=scale)
        return Call(mapped(call.args, change), mapped(dict(call.kwargs), change))

    return tuple(each for scale in INPUT_SCALES for each in _if_it_runs(module, scaled(scale)))


def _times(tensor: Tensor, scale: float) -> Tensor:
    return tensor * scale if tensor.is_floating_point() else tensor


# --- The comparison.


class Equality(NamedTuple):
    """The result of a comparison of two modules.

    Attributes:
        verdict: ``not verified`` if rounding moves the original so far that the comparison shows nothing.
        error: The largest error relative to the largest number of an output; infinite if outputs cannot be compared.
        only: Inputs of another size or scale, in words, if the modules are equal on all inputs but those.
        inputs: The shapes of the inputs on which they are equal, in words.
    """

    verdict: Verdict
    error: float
    only: str = ""
    inputs: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the modules are equal."""
        return self.verdict == "passed"


def compare(found: Outputs, expected: Outputs, rtol: float, rounding: Rounding) -> Equality:
    """Compare the outputs of two modules for one call.

    Args:
        found: Of the changed module.
        expected: Of the original.
        rtol: The largest error that needs no explanation.
        rounding: See `module_rounding`.
    """
    if {name: tensor.dtype for name, tensor in found.items()} != {name: t.dtype for name, t in expected.items()}:
        return Equality("failed", float("inf"))
    allowed = Tolerance(kind="exact", rtol=rtol)
    comparison = Comparison("changed module", allowed, "", vague=ALGEBRA_RTOL)
    comparison.add(_arrays(found), _arrays(expected), whole=True, rounding=rounding)
    links = [link for link in comparison.links("fold", "module") if link.reason != "not_comparable"]
    verdicts = {link.verdict for link in links}
    error = max((link.metrics.max_rel_error if link.metrics else 0.0 for link in links), default=0.0)
    if "failed" in verdicts:
        discrete = any(link.verdict == "failed" and link.reason != "exceeds_tolerance" for link in links)
        return Equality("failed", float("inf") if discrete or error != error else error)
    return Equality("passed" if verdicts == {"passed"} else "not verified", error)


def module_rounding(original: Callable[[], nn.Module], call: Call, expected: Outputs) -> Rounding:
    """How far the module's outputs move if the last bits of the floating-point inputs change.

    Args:
        original: Returns the module; it is called only if a comparison needs the rounding.
        call: The inputs.
        expected: The module's outputs for them.
    """

    def movements() -> Iterator[Movement]:
        module, right = original(), _arrays(expected)
        for seed in range(JITTERS):
            yield movement(_arrays(outputs(module, with_moved_inputs(call, seed))), right)

    return Rounding(MOVED_INPUTS, movements)


def _arrays(found: Outputs) -> dict[str, NDArray[Any]]:
    """The outputs as arrays; complex numbers as pairs."""
    return {name: (torch.view_as_real(each) if each.is_complex() else each).numpy() for name, each in found.items()}


# --- Recorded outputs of the whole module, and the comparison with a changed module.


class Recorded(NamedTuple):
    """The inputs and outputs of a call of the whole module, and how far rounding moves the outputs."""

    call: Call
    expected: Outputs
    rounding: Rounding

    @property
    def shapes(self) -> str:
        """The shapes of its tensors, in words."""
        return " and ".join("x".join(map(str, tensor.shape)) or "1" for tensor in _tensors(self.call))

    def against(self, other: nn.Module, rtol: float) -> Equality:
        """Compare a changed module on this call."""
        try:
            return compare(outputs(other, self.call), self.expected, rtol, self.rounding)
        except Exception:  # the user's code may raise anything, for example if it reads what was removed
            return Equality("failed", float("inf"))


@dataclass(frozen=True)
class Whole:
    """The recorded inputs and outputs of a whole module.

    Attributes:
        calls: One or two sets of inputs.
        recorded: The calls with their outputs.
        sized: Calls with inputs of other sizes.
        scaled: Calls with smaller and larger numbers.
        inside: The inputs of the requested submodules, one per call of the whole module in which they are called.
        keeps_state: Whether the module gives other outputs when it is called again; a fold of it holds for one call.
    """

    calls: tuple[Call, ...]
    recorded: tuple[Recorded, ...]
    sized: tuple[Recorded, ...]
    scaled: tuple[Recorded, ...]
    inside: Mapping[str, tuple[Call, ...]]
    keeps_state: Callable[[], bool]

    @classmethod
    def of(cls, original: Callable[[], nn.Module], example: Any, names: Iterable[str]) -> Whole:
        """Run a module and record its outputs and the inputs of some submodules.

        Args:
            original: Returns a module as `in_float64` does.
            example: The user's input: a tensor, a tuple of arguments, or a dict of named ones. If None, sizes are tried
                that the module's attributes or first layers suggest.
            names: The submodules whose inputs to record.

        Raises:
            Refused: If it does not run on the example, or on any input that was tried, or if its outputs are the same
                for all inputs.
        """
        module = original()
        calls = own_calls(module, example) if example is not None else found_calls(module)
        names, inside = list(names), defaultdict(list)
        expected = []
        for call in calls:
            met: dict[str, Call] = {}
            expected.append(outputs(module, call, _recorder(names, met)))
            for name, own in met.items():
                inside[name].append(own)
        _require_outputs_that_move(module, calls, expected)

        def record(call: Call, right: Outputs | None = None) -> Recorded:
            right = outputs(module, call) if right is None else right
            return Recorded(call, right, module_rounding(original, call, right))

        sized = calls_of_other_sizes(module, calls)
        scaled = calls_of_other_scales(module, min((*sized, *calls[::-1]), key=_numbers))
        return cls(
            calls,
            recorded=tuple(map(record, calls, expected)),
            sized=tuple(map(record, sized)),
            scaled=tuple(map(record, scaled)),
            inside={name: tuple(own) for name, own in inside.items()},
            keeps_state=cache(lambda: keeps_state(original(), calls[0])),
        )

    def compare(self, other: nn.Module, folds: int = 1, rtol: float | None = None) -> Equality:
        """Compare a changed module on all calls.

        It must be equal on `calls`. Those of other sizes and scales must show no difference; rounding
        may be too large to show anything. What moved inputs do not show of rounding, such as that of a sum with a large
        bias, is at most `ALGEBRA_RTOL`; a size or number that a fold keeps changes much more.

        Args:
            other: The module.
            folds: The number of folds in it; rounding errors add up like a random walk.
            rtol: The largest error that needs no explanation; by ``folds`` if None.
        """
        rtol = exact_rtols(folds)["fold"] if rtol is None else rtol
        found = [each.against(other, rtol) for each in self.recorded]
        worst = max(found, key=lambda each: (each.verdict == "failed", each.verdict == "not verified"))
        error = max(each.error for each in found)
        equal = [each.shapes for each in self.recorded]
        kinds = "of the size {}", "with smaller or larger numbers"
        if not worst.passed:
            resized = found[0].passed and equal[0] != equal[-1]
            return Equality(worst.verdict, error, kinds[0].format(equal[-1]) if resized else "")
        for kind, calls in zip(kinds, (self.sized, self.scaled), strict=True):
            for each in calls:
                more = each.against(other, max(rtol, ALGEBRA_RTOL))
                if more.verdict == "failed":
                    return Equality("failed", more.error, kind.format(each.shapes))
                if more.passed:
                    error = max(error, more.error)
                    equal.append(each.shapes)
        return Equality("passed", error, inputs=tuple(equal))


def _require_outputs_that_move(module: nn.Module, calls: Sequence[Call], expected: Sequence[Outputs]) -> None:
    """Refuse a module whose outputs are the same for other inputs: a fault would not show.

    Raises:
        Refused: If no output moves between the two calls.
    """
    if len(calls) < 2 or not _inputs_differ(*calls[:2]):
        return
    if any(_moves(first, expected[1].get(name)) for name, first in expected[0].items()):
        return
    raise Refused(
        f"the outputs of this {type(module).__name__} are the same for all inputs that were tried, so an error of a "
        "fold could not be seen.",
        hint="Load its trained weights, or give an example=... on which its outputs depend.",
        code="live.constant",
    )


def _moves(first: Tensor, second: Tensor | None) -> bool:
    """Whether an output of two calls differs by so much that a fault of a tenth of that would show."""
    if second is None or first.shape[1:] != second.shape[1:]:
        return True
    if not first.is_floating_point():
        return not torch.equal(first, second)
    rows = min(len(first), len(second)) if first.ndim else None
    numbers = ((each if rows is None else each[:rows]).numpy() for each in (first, second))
    a, b = without_equal_infinities(*numbers)
    return bool(a.size) and float(abs(a - b).max()) > LEAST_OUTPUT_CHANGE * FLOAT64 * float(magnitudes(b).max())


def _inputs_differ(first: Call, second: Call) -> bool:
    """Whether two calls have different floating-point inputs."""
    return any(
        a.is_floating_point() and (a.shape != b.shape or not torch.equal(a, b))
        for a, b in zip(_tensors(first), _tensors(second), strict=True)
    )


def _numbers(call: Call) -> int:
    return sum(tensor.numel() for tensor in _tensors(call))


def _tensors(call: Call) -> list[Tensor]:
    return tensors_of((call.args, dict(call.kwargs)))


def _recorder(names: Iterable[str], inside: dict[str, Call]) -> Callable[[nn.Module], None]:
    """A function that hooks submodules to record the inputs of their first call."""

    def prepare(own: nn.Module) -> None:
        for name in names:

            def note(_part: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                if name not in inside:
                    inside[name] = copy.deepcopy(Call(args, kwargs))

            own.get_submodule(name).register_forward_pre_hook(note, prepend=True, with_kwargs=True)

    return prepare
