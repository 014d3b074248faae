"""Folding a live module by its structure: what a trace shows to be linear in a row or in parallel becomes one layer.

- Layers in parallel: a part that is a chain, in which a sum of layers of one value stands, becomes that chain with one.
- A scale and a shift a channel, as a BatchNorm's or a LayerScale's, go into the layer before, or into all behind.
- The affine of a norm goes into all layers behind it.

Everything else stays as it is: the user's classes, and the names of what they hold. A trace is of one run, so all is
proved by running the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from torch import nn

from repaconv.live.calls import rounding
from repaconv.live.chains import Layer, chain_of
from repaconv.live.changes import Change, Places, applied, within
from repaconv.live.forms import IMAGE, LAST, as_module, numbers, per_channel
from repaconv.live.parts import shared
from repaconv.live.scales import NORMS, Scale, into_producer, into_readers, layer_of
from repaconv.live.trace import Called, Step, Trace, Value, parameters_of
from repaconv.live.whole import Whole

ROUNDINGS, MOST = 16, 1e-9
"""So many times what the whole makes of its inputs' last bits, folds may move its outputs, and never more than this."""


class Structured(NamedTuple):
    """A module with its folds, what they were, how far the whole is off, and what was not folded, and why."""

    module: nn.Module
    changes: tuple[Change, ...]
    error: float
    left: tuple[str, ...]


def fold_structure(module: nn.Module, whole: Whole, exact: float, apart: set[str]) -> Structured:
    """All folds of a module.

    Args:
        module: Of `in_float64`, not changed.
        whole: What it computes.
        exact: Up to this difference of the whole a fold is one.
        apart: What is not to be touched: a copy does not share all that the user's own module does.
    """
    trial = _Trial(module, whole, exact)
    made: list[Change] = []
    wrong: list[Change] = []
    while True:
        trace = Trace.of(trial.module, whole.calls[0])
        places = Places(trial.module, trace, shared(trial.module) | apart)
        found = sorted(_found(places, {(c.at, c.told) for c in wrong}), key=lambda c: _kind(trial.module, c))
        if not found:
            break
        sound = trial.take(found)
        made += sound
        wrong += [change for change in found if change not in sound]
    left = [f"{change.at or 'it'}, {change.told}: the whole would compute something else" for change in wrong]
    return Structured(trial.module, tuple(made), trial.error, (*left, *_standing(trace)))


def _kind(module: nn.Module, change: Change) -> str:
    """Parts of one class are right or wrong alike."""
    return type(module.get_submodule(change.at)).__name__


class _Trial:
    """A module with the folds so far, and how far the whole is off."""

    def __init__(self, module: nn.Module, whole: Whole, exact: float) -> None:
        self.module, self.error, self._whole, self._exact = module, 0.0, whole, exact

    def take(self, changes: list[Change]) -> list[Change]:
        """Those of some folds with which the whole computes the same, made."""
        after = copy.deepcopy(self.module)
        for change in changes:
            after = applied(after, change)
        error = self._whole.error(after)
        if error <= self._exact or error <= self._rounded:
            self.module, self.error = after, error
            return changes
        half = len(changes) // 2
        return self.take(changes[:half]) + self.take(changes[half:]) if half else []

    @cached_property
    def _rounded(self) -> float:
        """What rounding may explain."""
        own = rounding(self.module, self._whole.calls[0], self._whole.expected[0])
        return min(ROUNDINGS * own, MOST)


def _found(places: Places, refused: set[tuple[str, str]]) -> Iterator[Change]:
    """Folds that touch no part twice."""
    touched: set[str] = set()
    for rules in ((_parallel,), (_scale, _own_scale, _norm)):  # what is one layer in the end needs no other fold
        for change in (change for call in places.trace.calls for rule in rules for change in rule(places, call)):
            apart = not any(within(a, b) or within(b, a) for a in change.touches for b in touched)
            if apart and (change.at, change.told) not in refused and not places.grows(change):
                touched |= change.touches
                yield change


def _parallel(places: Places, call: Called) -> Iterator[Change]:
    """A part that is a chain with layers in parallel."""
    links = chain_of(places.trace, call) or []
    if not any(isinstance(link, Layer) and link.several for link in links) or not places.free(call.name):
        return
    made = [as_module(link.kernel) if isinstance(link, Layer) else link for link in links]
    layers = [str(new) for new, link in zip(made, links, strict=True) if isinstance(link, Layer)]
    parts = tuple(new for new in made if new is not None)
    if len(parts) == len(made):
        yield Change(call.name, f"layers in parallel -> {', '.join(layers)}", rebuilt={call.name: parts})


def _scale(places: Places, call: Called) -> Iterator[Change]:
    """A part that begins with a scale and a shift of what it takes, and goes on with children of its own."""
    first, *rest = chain_of(places.trace, call) or [""]
    others = tuple(link for link in rest if not isinstance(link, Layer))
    if not isinstance(first, Layer) or first.several or len(others) < len(rest) or not places.free(call.name):
        return
    assert call.input is not None
    assert call.output is not None
    scale = Scale(first.axis, first.kernel.weight.reshape(-1), first.kernel.bias)
    into = into_producer(places, call.input, scale) or (None if rest else into_readers(places, call.output, scale))
    if into is not None:
        yield Change(call.name, f"{call.name} -> {into[0]}", into[1], {call.name: others})


def _own_scale(places: Places, call: Called) -> Iterator[Change]:
    """A scale that a part holds itself, among other things: afterwards it has none, if it knows how to do without."""
    for step in places.trace.steps[call.first : call.last]:
        if step.module != call.name or step.name not in ("mul", "multiply") or len(step.args) != 2 or not step.output:
            continue
        for x, other in (step.args, step.args[::-1]):
            name = _parameter(places, step, x, other)
            for axis in (IMAGE, LAST) if name else ():
                factor = per_channel(other, x, axis)
                into = into_producer(places, x, Scale(axis, factor, None)) if factor is not None else None
                if into is not None and name is not None:
                    yield Change(call.name, f"{name} -> {into[0]}", {**into[1], name: None})


def _parameter(places: Places, step: Step, x: object, other: object) -> str | None:
    """The parameter that a value is multiplied with, if the part that does it holds it and nothing else reads it."""
    if not isinstance(x, Value) or not isinstance(other, Value) or x.constant or not other.constant:
        return None
    names = parameters_of(other)
    name = next(iter(names), "")
    held = dict(places.root.get_submodule(step.module).named_parameters(recurse=False))
    alone = len(names) == 1 and places.users[name] == 1 and name.rpartition(".")[0] == step.module
    sizes = len(x.shape) > 1 and step.output is not None and x.shape == step.output.shape and other.tensor.numel() > 1
    return name if alone and sizes and name.rpartition(".")[2] in held else None


def _norm(places: Places, call: Called) -> Iterator[Change]:
    """The affine of a norm, into all layers behind it."""
    for step in places.trace.steps[call.first : call.last]:
        if step.module != call.name or step.name not in NORMS or step.output is None:
            continue
        held = layer_of(places, step)
        into = into_readers(places, step.output, Scale(held.axis, held.weight, held.bias)) if held else None
        if held is not None and into is not None:
            gone = {f"{held.name}.weight": None, **({f"{held.name}.bias": None} if held.bias is not None else {})}
            yield Change(call.name, f"the affine of {call.name} -> {into[0]}", {**into[1], **gone})


def _standing(trace: Trace) -> Iterator[str]:
    """BatchNorms that are left."""
    for step in trace.steps:
        if step.name == "batch_norm" and numbers(step.given(1, "running_mean")) is not None:
            yield f"{step.module} stands: no layer with weights of its own is alone before it or behind it"
