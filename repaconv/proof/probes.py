"""Inputs on which a graph of any origin is proved: free sizes of several values, and draws that excite it.

A free size of 1 hides what a softmax, a mean or a transpose over it does, and equal sizes hide which is which: names
get values of their own, above 1 and prime where the graph takes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.proof.draws import NUMBERS, draws
from repaconv.proof.searching import FEW, PRIMES, USUAL, WANTED, Array, Input, Search, Sizes, drawn_for

if TYPE_CHECKING:
    import onnx


class Unrunnable(Exception):
    """No inputs were found with which the graph runs; says why."""


@dataclass(frozen=True)
class Probes:
    """Inputs by name, some times; and what they were, for people.

    Attributes:
        plain: Inputs by name, of every assignment of the free sizes.
        more: Draws what shows more: they are run on the way, which is dear.
        told: What they were.
        usual: Free sizes of a call that is no probe.
        other: Those of the first probe.
        gain: On what is drawn normally, at which nothing overflows.
        below: Of `NUMBERS`.
    """

    plain: tuple[dict[str, Array], ...]
    more: Callable[[], tuple[dict[str, Array], ...]] = field(repr=False)
    told: str
    usual: Sizes
    other: Sizes
    gain: float
    below: int

    @cached_property
    def feeds(self) -> tuple[dict[str, Array], ...]:
        """All of them."""
        return (*self.plain, *self.more())


def probes(model: onnx.ModelProto, run: Callable[[dict[str, Array]], dict[str, Any]], *, dear: bool = False) -> Probes:
    """Inputs that the graph takes.

    Args:
        model: The graph, whose first operators say what they expect.
        run: It, loaded; its exceptions say that it refuses.
        dear: Whether it takes so long that batches are few.

    Raises:
        Unrunnable: If it runs with none of them, or takes what is no tensor of numbers.
    """
    inputs = _inputs(model)
    primes = {**PRIMES, "batch": FEW} if dear else PRIMES
    usual = {kind: (*primes[kind], *_of_metadata(model, kind), *USUAL[kind]) for kind in PRIMES}
    numbers = NUMBERS if any(one.dtype.kind in "iu" for one in inputs) else NUMBERS[:1]
    for below, kinds in product(numbers, _free(inputs)):
        search = Search(inputs, run, kinds, usual, below, len(FEW) if dear else WANTED)
        if found := search.assignments():
            gain = search.gain(found[0])
            still, usually = _integral(model) - unmoved(model), search.usual_sizes(found)
            plain = tuple(search.drawn(sizes, seed, gain) for seed, sizes in enumerate(found))
            more = partial(search.more, plain, found, gain, still)
            return Probes(plain, more, search.told(found), usually, found[0], gain, below)
    raise Unrunnable(search.problem)


def drawn(model: onnx.ModelProto, sizes: Sizes, seed: int | list[int], *, gain: float, below: int) -> dict[str, Array]:
    """A call's inputs, as `probes` found them to run.

    Args:
        model: The graph.
        sizes: Its free sizes by name; one that is not said is 1.
        seed: Of the draw.
        gain: See `Probes`.
        below: See `Probes`.
    """
    return drawn_for(_inputs(model), sizes, seed, gain, below)


def _inputs(model: onnx.ModelProto) -> list[Input]:
    import onnx

    wishes = draws(model)
    found = []
    for value in model.graph.input:
        if value.name not in wishes:
            continue
        kind = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type) if kind.elem_type else np.dtype(object)
        if dtype.kind not in "fiub":
            raise Unrunnable(f"its input {value.name} is no tensor of numbers that can be drawn")
        dims = tuple(
            dim.dim_value or dim.dim_param or f"{value.name}[{axis}]" for axis, dim in enumerate(kind.shape.dim)
        )
        found.append(Input(value.name, dims, dtype, wishes[value.name]))
    return found


def _integral(model: onnx.ModelProto) -> set[str]:
    """Outputs that are classes, places, truth values: what is no real number may well stay where inputs move."""
    import onnx

    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
    return {name for name, kind in kinds.items() if kind and onnx.helper.tensor_dtype_to_np_dtype(kind).kind in "iub"}


def _free(inputs: list[Input]) -> list[dict[str, str]]:
    """Every free size, and of what kind it is: the first axis is a batch, those of images have sides.

    Then, where there are such, with states as recurrent layers have them: [layers, batch, width].
    """
    states = [one.dims for one in inputs if [type(dim) for dim in one.dims] == [int, str, int]]
    kinds: dict[str, str] = {}
    for one in inputs:
        for axis, dim in enumerate(one.dims):
            if isinstance(dim, str):
                kinds.setdefault(dim, "batch" if not axis else "side" if len(one.dims) == 4 else "length")
    return [kinds, {**kinds, **{str(dims[1]): "batch" for dims in states}}] if states else [kinds]


def _of_metadata(model: onnx.ModelProto, kind: str) -> tuple[int, ...]:
    """Sizes that the graph's maker wrote down."""
    words = {"batch": "batch", "length": "length|seq|tokens", "side": "size|shape|imgsz|width|height|resolution"}[kind]
    entries = [entry.value for entry in model.metadata_props if re.search(words, entry.key, re.IGNORECASE)]
    return tuple(dict.fromkeys(n for text in entries for n in map(int, re.findall(r"\d{1,4}", text)) if 1 < n <= 2048))


def unmoved(model: onnx.ModelProto) -> set[str]:
    """Outputs that hang on no input's values: on none, or on shapes alone."""
    moved = {value.name for value in model.graph.input} - {weight.name for weight in model.graph.initializer}
    for node in model.graph.node:
        inner = any(entry.HasField("g") for entry in node.attribute)  # reads what is around it
        if node.op_type not in ("Shape", "Size") and (inner or moved & set(node.input)):
            moved |= set(node.output)
    return {value.name for value in model.graph.output} - moved
