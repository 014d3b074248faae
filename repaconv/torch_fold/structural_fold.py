"""Fold a module by its traced structure: linear layers in series or in parallel become one layer.

- A submodule that is a chain with a sum of parallel layers becomes the same chain with one layer instead of the sum; so
  does one that computes a layer's weight from parameters in every forward.
- A per-channel scale and shift, such as a BatchNorm or LayerScale, goes into the layer before it or into all layers
  after it.
- The affine of a norm goes into all layers after it.

Nothing else changes: neither the user's classes nor the names of their submodules. A trace shows one run only, so every
fold is verified by running the whole module.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from repaconv.algebra.channel_maps import Vector
from repaconv.algebra.convolution_kernels import Kernel, per_output_channel
from repaconv.rewrites.fold.unfolded_linear_operators import PADDED, READ_BESIDE
from repaconv.torch_fold.float64_module_calls import KEEPS_STATE
from repaconv.torch_fold.module_changes import ModuleChange, Places, Unfolded, Weights, with_change, within
from repaconv.torch_fold.module_trace import (
    LOOKS,
    SAME_NUMBERS,
    FunctionCall,
    FunctionTrace,
    SubmoduleCall,
    Value,
    inner_name,
    parameters_of,
)
from repaconv.torch_fold.submodules import dotted_name, holds_nothing, shared
from repaconv.torch_fold.traced_linear_maps import (
    ADDS,
    COMPUTED,
    CONVOLUTIONS,
    IMAGE,
    LAST,
    PARALLEL,
    KernelSum,
    KernelSums,
    as_module,
    convolution,
    linear,
    numbers,
    per_channel,
)
from repaconv.torch_fold.whole_module_check import Equality, Whole

# --- Submodules as chains of layers, calls of children, and functions of one value.
#
# RepVGG's block:   conv3(x) + conv1(x) + bn(x), then relu    ->    one convolution, relu


class Layer(NamedTuple):
    """An item of a chain that is a convolution kernel of the value before it.

    Attributes:
        kernel: The kernel.
        axis: The axis of channels: `IMAGE` or `LAST`.
        merges: What it merges, as in `KernelSum`.
    """

    kernel: Kernel
    axis: int
    merges: str


ChainItem = Layer | str | nn.Module
"""An item of a chain: a layer, the name of a child, or a function of one value."""


class Applied(nn.Module):
    """A module that applies a function to one tensor, with fixed other arguments."""

    def __init__(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.function, self.args, self.kwargs = function, tuple(args), dict(kwargs)

    def forward(self, x: Tensor) -> Any:
        """Call the function with the arguments of the traced call."""
        return self.function(x, *self.args, **self.kwargs)

    def extra_repr(self) -> str:
        """The function's name."""
        return str(getattr(self.function, "__name__", self.function))


def chain_of(trace: FunctionTrace, call: SubmoduleCall) -> list[ChainItem] | None:
    """The chain of items that a submodule call computes from its input to its output; None if it is no chain."""
    decides = any(step.name in LOOKS for step in trace.steps[call.first : call.last])
    if call.input is None or call.output is None or decides:  # a forward that reads numbers may branch on them
        return None
    value, items = call.output, list[ChainItem]()
    children = _children(trace, call)
    while value is not call.input:
        found = _last_item(call, value, children)
        if found is None:
            return None
        item, value = found
        items += [] if item is None else [item]
    return items[::-1]


def _children(trace: FunctionTrace, call: SubmoduleCall) -> dict[Value, SubmoduleCall]:
    """The calls of its children, by their output."""
    own = [one for one in trace.calls if one.parent is call and one.input is not None and one.output is not None]
    return {one.output: one for one in own if one.output is not None and one.output is not one.input}


def _last_item(
    call: SubmoduleCall, value: Value, children: Mapping[Value, SubmoduleCall]
) -> tuple[ChainItem | None, Value] | None:
    """The last item before a value, and the value before that item; None if there is no such item."""
    sums = list(zip((IMAGE, LAST), kernel_sums_of(call, value), strict=True))
    layers = [(Layer(k, axis, f.merges), s) for axis, f in sums if f is not None for s, k in f.terms.items()]
    layers = [(layer, source) for layer, source in layers if source is not value]
    merged = next((one for one in layers if one[0].merges), None)
    if merged is not None:
        return merged
    child = children.get(value)
    if child is not None and child.input is not None and (name := inner_name(child.name, call.name)):
        return name, child.input
    scale = next((one for one in layers if one[0].kernel.is_diagonal), None)
    if scale is not None:
        return scale
    step = value.step
    if step is None or not call.has(step):
        return None
    if step.same is not None:
        return None, step.same
    return _applied(step)


def kernel_sums_of(call: SubmoduleCall, value: Value) -> tuple[KernelSum | None, KernelSum | None]:
    """A value as one kernel of one other value, for either axis of channels (`IMAGE`, `LAST`)."""
    return _kernel_sum(call, value, IMAGE), _kernel_sum(call, value, LAST)


def alike(a: Sequence[ChainItem], b: Sequence[ChainItem]) -> bool:
    """Whether two calls of a submodule have the same chain."""
    return len(a) == len(b) and all(map(_alike, a, b))


def _alike(a: ChainItem, b: ChainItem) -> bool:
    if isinstance(a, Layer) and isinstance(b, Layer):
        return a.axis == b.axis and _same_kernel(a.kernel, b.kernel)
    if isinstance(a, Applied) and isinstance(b, Applied):
        return (a.function, repr(a.args), repr(a.kwargs)) == (b.function, repr(b.args), repr(b.kwargs))
    return isinstance(a, str) and a == b


def _same_kernel(a: Kernel, b: Kernel) -> bool:
    biases = [np.zeros(len(each.weight)) if each.bias is None else each.bias for each in (a, b)]
    if (a.groups, a.strides, a.taps, a.reach) != (b.groups, b.strides, b.taps, b.reach):
        return False
    return np.array_equal(a.weight, b.weight) and np.array_equal(biases[0], biases[1])


def _kernel_sum(call: SubmoduleCall, value: Value, axis: int) -> KernelSum | None:
    """A value as one kernel of one other value, if the kernel is not larger than the layers that it replaces."""
    for grow, share in ((True, True), (False, True), (False, False)):
        kernel_sum = KernelSums(call, axis, grow=grow, share=share).of(value, top=True)
        kernel = next(iter(kernel_sum.terms.values()), None)
        if (
            kernel is not None
            and len(kernel_sum.terms) == 1
            and (not kernel_sum.merges or kernel.weight.size <= kernel.learnt)
        ):
            return kernel_sum
    return None


def _applied(step: FunctionCall) -> tuple[ChainItem, Value] | None:
    """A function of one value that keeps its shape."""
    inputs = step.inputs
    if len(inputs) != 1 or not step.args or step.args[0] is not inputs[0] or step.output is None:
        return None
    if step.output.shape != inputs[0].shape or step.swapped:
        return None
    try:
        pickle.dumps(step.function)
    except Exception:  # a local function cannot be pickled, so the folded module could not be saved
        return None
    return Applied(step.function, step.args[1:], step.kwargs), inputs[0]


# --- Where a per-channel scale and shift can go: into the layer that computes a value, or into all that read it.

MOVES = (
    *(
        "reshape",
        "view",
        "reshape_as",
        "view_as",
        "flatten",
        "unflatten",
        "permute",
        "transpose",
        "swapaxes",
        "movedim",
    ),
    *("squeeze", "unsqueeze", "roll", "getitem", "expand", "clone", *SAME_NUMBERS),
)
"""Functions that only move or select numbers."""
AVERAGES = ("mean", "interpolate", *(f"{kind}avg_pool{axes}d" for kind in ("", "adaptive_") for axes in (1, 2, 3)))
"""Functions that give every channel an average of its numbers, which has the scale and the shift of these."""
TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
LAYERS = (*CONVOLUTIONS, *TRANSPOSED, "linear")
"""Functions of layers that can absorb a scale and a shift."""
NORMS = {"layer_norm": (2, 3), "rms_norm": (2, None), "group_norm": (2, 3), "instance_norm": (3, 4)}
"""The positions of weight and bias among the arguments of norm functions."""


class Scale(NamedTuple):
    """A factor, and possibly a shift, per channel along an axis."""

    axis: int
    factor: Vector
    shift: Vector | None


class LayerParameters(NamedTuple):
    """The parameters of a layer that may be changed.

    Attributes:
        name: The name of the layer.
        weight: Its weight, in float64.
        bias: Its bias; None if it has none.
        axis: The axis of channels of its output.
    """

    name: str
    weight: np.ndarray
    bias: np.ndarray | None
    axis: int


def into_producer(places: Places, value: Value, scale: Scale) -> tuple[str, Weights] | None:
    """Fold a scale into the layer that computes the scaled value.

    Returns:
        The layer's name and its new parameters; None if there is no such layer, or something else reads its output.
    """
    path, rank = list[FunctionCall](), len(value.shape)
    passed = (*MOVES, *AVERAGES)
    while (step := value.step) is not None and step.name in passed and value.only_read and step.output is value:
        path.append(step)
        value = step.inputs[0]
    held = layer_of(places, step) if step is not None and value.only_read and step.output is value else None
    if step is None or held is None or not _reaches(path, held.axis, scale.axis, rank):
        return None
    if scale.shift is not None and step.name == "rms_norm":
        return None
    groups = int(step.given(6, "groups", 1)) if step.name in TRANSPOSED else 0
    new: Weights = {f"{held.name}.weight": held.weight * per_output_channel(held.weight, scale.factor, groups)}
    if held.bias is not None or scale.shift is not None:
        bias = np.zeros(len(scale.factor)) if held.bias is None else held.bias * scale.factor
        new[f"{held.name}.bias"] = bias if scale.shift is None else bias + scale.shift
    return held.name, new


def layer_of(places: Places, step: FunctionCall) -> LayerParameters | None:
    """The parameters of the layer or norm in a step, if only this step reads them and they may be changed."""
    at = NORMS.get(step.name, (1, 2))
    weight, bias = step.given(at[0], "weight"), step.given(at[1], "bias") if at[1] is not None else None
    if not isinstance(weight, Value) or step.name not in (*LAYERS, *NORMS):
        return None
    name, arrays = places.owner(step, weight, bias), (numbers(weight), numbers(bias))
    if name is None or arrays[0] is None or arrays[1] is None or {weight.name, bias and bias.name} - _own_names(name):
        return None
    if step.name in ("layer_norm", "rms_norm") and arrays[0].ndim != 1:
        return None
    axis = LAST if step.name in ("linear", "layer_norm", "rms_norm") else IMAGE
    return LayerParameters(name, arrays[0], arrays[1] if arrays[1].size else None, axis)


def _own_names(name: str) -> set[str | None]:
    return {f"{name}.weight", f"{name}.bias", None}


def _reaches(path: list[FunctionCall], axis: int, wanted: int, rank: int) -> bool:
    """Whether an axis of channels becomes the wanted axis, of a value of this rank, along a path of moving steps.

    The path is listed last step first.
    """
    found: int | None = axis
    for step in reversed(path):
        found = moved(step, found) if found is not None else None
    return found is not None and (found - wanted) % rank == 0


def moved(step: FunctionCall, axis: int) -> int | None:
    """The axis of a step's output along which the channels of its input's axis are, moved or averaged; None if mixed.

    Numbers that are the same all over a channel show it: an average of them with zeros of a padding is another number.
    """
    x = step.inputs[0]
    width = x.shape[axis]
    index = torch.arange(1, width + 1, dtype=torch.float64)

    def along(shape: tuple[int, ...], place: int) -> torch.Tensor:
        column = [1] * len(shape)
        column[place] = width
        return index.reshape(column).expand(shape)

    whole = along(x.shape, axis).to(x.tensor.dtype).contiguous()
    args, kwargs = tree_map(
        lambda leaf: (whole if leaf is x else leaf.tensor) if isinstance(leaf, Value) else leaf,
        (step.args, dict(step.kwargs)),
    )
    out = step.function(*args, **kwargs).double()
    places = [place for place in range(out.ndim) if out.shape[place] == width]
    return next((place for place in places if torch.allclose(out, along(tuple(out.shape), place), rtol=1e-9)), None)


def into_readers(places: Places, value: Value, scale: Scale) -> tuple[str, Weights] | None:
    """Fold a scale into all layers that read the scaled value.

    Returns:
        The layers' names and their new parameters; None if a reader cannot absorb it.
    """
    found = list(_readers(value, scale.axis))
    new: Weights = {}
    names = []
    for step in found:
        taken = _layer_with_scale(places, step, scale) if step is not None else None
        if taken is None or taken[0] in names:
            return None
        names.append(taken[0])
        new |= taken[1]
    return (", ".join(names), new) if names else None


def _readers(value: Value, axis: int) -> Iterator[FunctionCall | None]:
    """The layers that read a value, through moving steps, with the same channels; None for any other reader."""
    if value.result or not value.reads:
        yield None
    for step in value.reads:
        passes = step.name in (*MOVES, *AVERAGES) and step.inputs[0] is value and step.output
        moved_axis = moved(step, axis) if passes else None
        if moved_axis is not None and step.output is not None:
            yield from _readers(step.output, moved_axis)
        elif step.name in (*CONVOLUTIONS, "linear") and step.given(0, "input") is value:
            own = LAST if step.name == "linear" else IMAGE
            yield step if (axis - own) % len(value.shape) == 0 else None
        else:
            yield None


def _layer_with_scale(places: Places, step: FunctionCall, scale: Scale) -> tuple[str, Weights] | None:
    """A layer's name and its parameters with a scale before it; None if it cannot absorb the scale."""
    held, kernel = layer_of(places, step), linear(step) or convolution(step)
    if held is None or kernel is None or (kernel.is_padded and scale.shift is not None and scale.shift.any()):
        return None
    shift = scale.shift if scale.shift is not None and scale.shift.any() else None
    one = kernel.of_scaled(scale.factor, shift)
    new: Weights = {f"{held.name}.weight": one.weight}
    if shift is not None:
        new[f"{held.name}.bias"] = one.bias
    return held.name, new


# --- The fold: rules, their verification on the whole module, and reasons for what is not folded.


class Structured(NamedTuple):
    """The result of a structural fold.

    Attributes:
        module: The folded module.
        changes: The folds.
        found: The comparison of the whole module with the folded one; None if nothing was folded.
        not_folded: What was not folded, and why.
    """

    module: nn.Module
    changes: tuple[ModuleChange, ...]
    found: Equality | None
    not_folded: tuple[str, ...]


def fold_structure(module: nn.Module, whole: Whole, edits: int, given: nn.Module) -> Structured:
    """Apply all structural folds to a copy of a module.

    Args:
        module: A module returned by `in_float64`; it is not changed.
        whole: The recorded outputs of the module.
        edits: How many folds it has already.
        given: The user's module. A copy may share less of its modules and tensors, and holds larger numbers.
    """
    shared_names = shared(given)
    trial = _Trial(module, whole, edits)
    made: list[ModuleChange] = []
    wrong: dict[tuple[str, str], tuple[ModuleChange, Equality]] = {}
    while True:
        trace = FunctionTrace.of(trial.module, whole.calls[0])
        places = Places(trial.module, trace, shared(trial.module) | shared_names, whole.keeps_state, given)
        every = list(_possible_folds(places, set(wrong)))
        found = sorted((c for c in every if isinstance(c, ModuleChange)), key=lambda c: _class_name(trial.module, c))
        if not found:
            break
        trial.wrong.clear()
        made += trial.take(found)
        wrong |= {change.key: (change, found) for change, found in trial.wrong}
    not_folded = [Unfolded(c.at, c.description, _why_wrong(found)) for c, found in wrong.values() if c.instead is None]
    not_folded += [place for place in every if isinstance(place, Unfolded)]
    not_folded += [place for place in _unfolded_scales(places) if place.at not in {each.at for each in not_folded}]
    not_folded += [place for place in _unfolded_norms(places) if place.at not in {each.at for each in not_folded}]
    return Structured(trial.module, tuple(made), trial.found, tuple(_sentences(not_folded)))


def _why_wrong(found: Equality) -> str:
    """Why a fold was rejected that changes the outputs."""
    if found.only:
        what = "the size of its inputs" if "size" in found.only else "the numbers in its inputs"
        way = "could not be compared" if found.error == float("inf") else f"would differ by {found.error:.1e}"
        return f"the code of the module depends on {what}: the outputs of the whole on inputs {found.only} {way}"
    if found.error == float("inf"):
        return "the code of the module needs what would be gone, and does not run without it"
    if found.verdict == "not verified":
        return "the outputs of the whole could not be verified: rounding moves them too far, or they are not finite"
    return f"the outputs of the whole would differ by {found.error:.1e}"


def _sentences(places: list[Unfolded]) -> Iterator[str]:
    """One sentence for every reason, with the names of all submodules that it concerns."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in places:
        found.setdefault((each.what, each.why), []).append(each.at or "the module itself")
    for (what, why), names in found.items():
        yield f"{', '.join(dict.fromkeys(names))}: {what} not folded, {why}"


def _class_name(module: nn.Module, change: ModuleChange) -> str:
    """The class of the submodule, for sorting: folds of one class usually all succeed or all fail."""
    return type(module.get_submodule(change.at)).__name__


class _Trial:
    """A module with the folds so far, and the error of the whole module."""

    def __init__(self, module: nn.Module, whole: Whole, edits: int) -> None:
        self.module, self._whole, self._edits = module, whole, edits
        self.found: Equality | None = None
        self.wrong: list[tuple[ModuleChange, Equality]] = []

    def take(self, changes: list[ModuleChange]) -> list[ModuleChange]:
        """Apply the folds that keep the outputs of the whole module, found by bisection; returns these folds."""
        after = copy.deepcopy(self.module)
        for change in changes:
            after = with_change(after, change)
        found = self._whole.compare(after, self._edits)
        if found.passed:
            self.module, self.found = after, found
            return changes
        half = len(changes) // 2
        if half:
            return self.take(changes[:half]) + self.take(changes[half:])
        self.wrong.append((changes[0], found))
        return []


def _possible_folds(places: Places, refused: set[tuple[str, str]]) -> Iterator[ModuleChange | Unfolded]:
    """Folds that touch no submodule twice, and places that look like a fold but cannot be folded."""
    touched: set[str] = set()
    for rules in ((_parallel,), (_scale, _scale_parameter, _norm)):  # a part that becomes one layer needs no other fold
        for found in (change for call in places.trace.calls for rule in rules for change in rule(places, call)):
            if isinstance(found, Unfolded):
                yield found
                continue
            change: ModuleChange | None = found
            while change is not None and change.key in refused:
                change = change.instead
            if change is None or any(within(a, b) or within(b, a) for a in change.touches for b in touched):
                continue
            if places.grows(change):
                yield Unfolded(change.at, change.description, "it would leave more numbers than there were")
                continue
            if decides := places.decides(change):
                why = f"the forward of {decides} reads numbers that depend on the input, and may branch on them"
                yield Unfolded(change.at, change.description, why)
                continue
            if places.keeps_state():  # another call may compute something else than the traced one
                yield Unfolded(change.at, change.description, KEEPS_STATE)
                continue
            if overflow := places.overflows(change):
                yield Unfolded(change.at, change.description, overflow)
                continue
            touched |= change.touches
            yield change


def _parallel(places: Places, call: SubmoduleCall) -> Iterator[ModuleChange | Unfolded]:
    """Fold a submodule that is a chain with parallel layers, if every call of it is the same chain."""
    items = chain_of(places.trace, call) or []
    merged = [item.merges for item in items if isinstance(item, Layer) and item.merges]
    if not merged:
        yield from _sums(places, call)
        return
    kept = [dotted_name(call.name, item) for item in items if isinstance(item, str)]
    what, why = PARALLEL if PARALLEL in merged else COMPUTED, places.bound(call.name, kept=kept, repeats=True)
    calls = places.trace.called(call.name)
    if not why and not all(alike(items, chain_of(places.trace, one) or []) for one in calls if one is not call):
        why = "it computes something else in another call"
    if not why and not call.name:
        why = "its own class would be lost; to fold it all the same, give nn.Sequential(module)"
    if why:
        yield Unfolded(call.name, what, why)
    elif call is calls[0]:
        made = [as_module(item.kernel) if isinstance(item, Layer) else item for item in items]
        layers = [str(new) for new, item in zip(made, items, strict=True) if isinstance(item, Layer)]
        parts = tuple(new for new in made if new is not None)
        if len(parts) == len(made):
            yield ModuleChange(call.name, f"{what} -> {', '.join(layers)}", rebuilt={call.name: parts})
        else:
            yield Unfolded(call.name, what, "torch has no layer that pads as the merged one would have to")


def _sums(places: Places, call: SubmoduleCall) -> Iterator[Unfolded]:
    """Report sums of layers in a submodule that is no chain."""
    sums = (
        step.output
        for step in places.trace.steps[call.first : call.last]
        if step.module == call.name and step.name in ADDS and step.output is not None
    )
    if any(
        kernel_sum is not None and kernel_sum.merges == PARALLEL
        for value in sums
        for kernel_sum in kernel_sums_of(call, value)
    ):
        why = "its forward does more with them than one layer after the other"
        yield Unfolded(call.name, PARALLEL, why)


def _scale(places: Places, call: SubmoduleCall) -> Iterator[ModuleChange | Unfolded]:
    """Fold a submodule that starts with a scale and shift of its input, followed by its own children."""
    first, *rest = chain_of(places.trace, call) or [""]
    others = tuple(item for item in rest if not isinstance(item, Layer))
    if not isinstance(first, Layer) or first.merges or len(others) < len(rest):
        return
    if places.bound(call.name, kept=[dotted_name(call.name, item) for item in others if isinstance(item, str)]):
        return
    if first.kernel.learnt == 0 and holds_nothing(places.root.get_submodule(call.name)):
        return  # no scale, but a module that returns its input, such as dropout
    assert call.input is not None
    assert call.output is not None
    scale = Scale(first.axis, first.kernel.weight.reshape(-1), first.kernel.bias)
    into = into_producer(places, call.input, scale) or (None if rest else into_readers(places, call.output, scale))
    if into is not None:
        yield ModuleChange(call.name, f"{call.name} -> {into[0]}", into[1], {call.name: others})


def _scale_parameter(places: Places, call: SubmoduleCall) -> Iterator[ModuleChange]:
    """Fold a scale parameter that a submodule holds next to other things, if its forward works without it."""
    for step in places.trace.steps[call.first : call.last]:
        if step.module != call.name or step.name not in ("mul", "multiply") or len(step.args) != 2 or not step.output:
            continue
        for x, other in (step.args, step.args[::-1]):
            name = _parameter_name(places, step, x, other)
            for axis in (IMAGE, LAST) if name else ():
                factor = per_channel(other, x, axis)
                into = into_producer(places, x, Scale(axis, factor, None)) if factor is not None else None
                if into is not None and name is not None:
                    yield _without_parameter(call.name, name, into, other.tensor.ndim)


def _without_parameter(at: str, name: str, into: tuple[str, Weights], axes: int) -> ModuleChange:
    """The fold of a scale parameter, in three variants that are tried in turn.

    First the parameter becomes None, which a forward may test for. Then it becomes the number 1, for a forward that
    always multiplies by it. Then it becomes a tensor with one 1, for a forward that uses it as a tensor.
    """
    description = f"{name} -> {into[0]}"
    last = ModuleChange(at, f"{description}, a tensor of one 1 in its place", {**into[1], name: np.ones((1,) * axes)})
    number = ModuleChange(at, f"{description}, 1 in its place", {**into[1], name: 1.0}, instead=last)
    return ModuleChange(at, description, {**into[1], name: None}, instead=number)


def _parameter_name(places: Places, step: FunctionCall, x: object, other: object) -> str | None:
    """The name of the parameter that a value is multiplied by, if the calling submodule holds it and nothing else reads
    it."""
    if not isinstance(x, Value) or not isinstance(other, Value) or x.constant or not other.constant:
        return None
    names = parameters_of(other)
    name = next(iter(names), "")
    held = dict(places.root.get_submodule(step.module).named_parameters(recurse=False))
    alone = len(names) == 1 and places.users[name] == 1 and name.rpartition(".")[0] == step.module
    sizes = len(x.shape) > 1 and step.output is not None and x.shape == step.output.shape and other.tensor.numel() > 1
    return name if alone and sizes and name.rpartition(".")[2] in held else None


def _norm(places: Places, call: SubmoduleCall) -> Iterator[ModuleChange]:
    """Fold the affine of a norm into all layers after it."""
    for step in places.trace.steps[call.first : call.last]:
        if step.module != call.name or step.name not in NORMS or step.output is None:
            continue
        held = layer_of(places, step)
        into = into_readers(places, step.output, Scale(held.axis, held.weight, held.bias)) if held else None
        if held is not None and into is not None:
            gone = {f"{held.name}.weight": None, **({f"{held.name}.bias": None} if held.bias is not None else {})}
            yield ModuleChange(call.name, f"the affine of {call.name} -> {into[0]}", {**into[1], **gone})


def _unfolded_scales(places: Places) -> Iterator[Unfolded]:
    """Report per-channel scales and affines of norms that remain next to layers, and why."""
    for step in places.trace.steps:
        if step.name in ("mul", "multiply") and len(step.args) == 2 and step.output is not None:
            for x, other in (step.args, step.args[::-1]):
                if isinstance(x, Value) and not x.constant and x.shape == step.output.shape:
                    yield from _unfolded_scale(places, step, x, other)
        elif step.name in NORMS and layer_of(places, step) is not None and step.module:
            why = "not all that read it are layers that could take it, or one would need a bias at its padding"
            yield Unfolded(step.module, "the affine of a norm", why)


def _unfolded_scale(places: Places, step: FunctionCall, x: Value, other: object) -> Iterator[Unfolded]:
    factors = [(axis, per_channel(other, x, axis)) for axis in (IMAGE, LAST)]
    factors = [(axis, factor) for axis, factor in factors if factor is not None and not (factor == 1).all()]
    if not factors:
        return
    if any(into_producer(places, x, Scale(axis, factor, None)) for axis, factor in factors if factor is not None):
        if not isinstance(other, Value) or not parameters_of(other):
            why = "its forward holds the number itself; a fold of its ONNX graph takes it"
            yield Unfolded(step.module, "a constant factor after a layer", why)
        elif _parameter_name(places, step, x, other) is None:
            why = "the parameter is one number, is used elsewhere as well, or is not that part's own"
            yield Unfolded(step.module, "a scale after a layer", why)
    elif isinstance(other, Value) and len(names := sorted(parameters_of(other))) == 1 and other.tensor.numel() > 1:
        why = "no layer of which nothing else reads the output comes right before it in the forward; a fold of the "
        why += "ONNX graph may fold it into the layers after it"
        yield Unfolded(names[0], "a learned scale", why)


def _unfolded_norms(places: Places) -> Iterator[Unfolded]:
    """Report BatchNorms that remain, and why.

    Reasons that the fold of an ONNX graph has as well are worded as in
    `repaconv.rewrites.fold.unfolded_linear_operators`.
    """
    for step in places.trace.steps:
        if step.name == "batch_norm" and numbers(step.given(1, "running_mean")) is not None:
            yield Unfolded(step.module, "a BatchNorm", _why_norm(places, step))
    called = {places.root.get_submodule(call.name) for call in places.trace.calls}
    for name, part in places.root.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part not in called:
            yield Unfolded(name, "a BatchNorm", "it is not called when the whole is run")


def _why_norm(places: Places, step: FunctionCall) -> str:
    """Why a BatchNorm could not be folded into the layer before it or the layers after it."""
    own = places.bound(step.module)
    if own:
        return own
    x = step.inputs[0]
    if x.step is not None and x.step.name in LAYERS:
        others = sorted({read.name for read in x.reads if read is not step})
        if others or x.result:
            return READ_BESIDE.format(", ".join(others) or "the output of the network")
        if layer_of(places, x.step) is None:
            return f"{x.step.module}, which is right before it, is shared, hooked, or read from outside"
    if step.output is not None and any(map(_is_padded, step.output.reads)):
        return PADDED
    return "no layer that nothing else reads is directly before it or after it"


def _is_padded(step: FunctionCall) -> bool:
    """Whether a step is a convolution with padding."""
    pads = step.given(4, "padding", 0)
    return step.name in CONVOLUTIONS and (pads != "valid" if isinstance(pads, str) else bool(np.any(pads)))
