"""Inputs on which a graph of any origin is proved: free sizes of several values, and draws that excite it.

A free size of 1 hides what a softmax, a mean or a transpose over it does, and equal sizes hide which is which: names
get values of their own, above 1 and prime where the graph takes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.errors import first_line
from repaconv.proof.draws import NUMBERS, dims_of, draws
from repaconv.proof.searching import FEW, PRIMES, USUAL, WANTED, Array, Input, Search, Sizes, drawn_for

if TYPE_CHECKING:
    import onnx


class Unrunnable(Exception):
    """No inputs were found with which the graph runs; says why.

    Attributes:
        inputs: Names of the graph's inputs.
        suspects: Those that most likely are not what the graph takes, as people read them.
        on: On what it was run.
        drawable: Whether it is a matter of their numbers, and a sample of them would do.
    """

    def __init__(
        self,
        why: str,
        inputs: Sequence[str] = (),
        suspects: Sequence[str] = (),
        *,
        on: str = "random inputs",
        drawable: bool = True,
    ) -> None:
        super().__init__(why)
        self.inputs, self.suspects, self.on, self.drawable = tuple(inputs), tuple(suspects), on, drawable


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
        held: Inputs that always have these values, as nested lists.
    """

    plain: tuple[dict[str, Array], ...]
    more: Callable[[], tuple[dict[str, Array], ...]] = field(repr=False)
    told: str
    usual: Sizes
    other: Sizes
    gain: float
    below: int
    held: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def feeds(self) -> tuple[dict[str, Array], ...]:
        """All of them."""
        return (*self.plain, *self.more())

    def call(self, model: onnx.ModelProto, seed: int, gain: float = 1.0) -> dict[str, Array]:
        """Inputs of the usual sizes of the same graph, that are no probe; ``gain`` is on that at which it is finite."""
        return drawn(model, self.usual, seed, gain=self.gain * gain, below=self.below, held=self.held)


def probes(
    model: onnx.ModelProto,
    run: Callable[[dict[str, Array]], dict[str, Any]],
    *,
    dear: bool = False,
    sample: Mapping[str, Array] | None = None,
) -> Probes:
    """Inputs that the graph takes.

    Args:
        model: The graph, whose first operators say what they expect.
        run: It, loaded; its exceptions say that it refuses.
        dear: Whether it takes so long that batches are few.
        sample: Inputs that it takes, which are then the first probe; the others are of the same sizes, and what is no
            real number in them, or one of a few, is what it is there.

    Raises:
        Unrunnable: If it runs with none of them, or takes what is no tensor of numbers or text.
    """
    if sample is not None:
        return _by_sample(model, run, sample)
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
    raise Unrunnable(search.problem, [one.name for one in inputs], _suspects(model, inputs, search.problem))


SAMPLE = "the sample inputs"
FEW_NUMBERS = 16
"""So many real numbers of a sample are a parameter, as thresholds and scales are, and no data."""


def _by_sample(
    model: onnx.ModelProto, run: Callable[[dict[str, Array]], dict[str, Any]], sample: Mapping[str, Array]
) -> Probes:
    """The sample, and others of its sizes."""
    held = {
        name: array.tolist() for name, array in sample.items() if array.dtype.kind != "f" or array.size <= FEW_NUMBERS
    }
    inputs = _inputs(model, held)
    sizes: Sizes = {}
    for one in inputs:
        shape = sample[one.name].shape
        fits = len(shape) == len(one.dims) and all(
            sizes.setdefault(dim, size) == size if isinstance(dim, str) else dim == size
            for dim, size in zip(one.dims, shape, strict=True)
        )
        if not fits:
            raise Unrunnable(f"{one.name} is of shape {list(shape)}, and not {list(one.dims)}", [*sample], on=SAMPLE)
    search = Search(inputs, run, dict.fromkeys(sizes, "batch"), {"batch": ()}, NUMBERS[-1])
    first = {one.name: np.asarray(sample[one.name], one.dtype) for one in inputs}
    try:
        run(first)
        run(search.drawn(sizes, 1, 1.0))
    except Exception as error:  # the runtime's own, of many classes
        raise Unrunnable(first_line(error), [*first], _suspects(model, inputs, str(error)), on=SAMPLE) from error
    gain, still = search.gain(sizes), _integral(model) - unmoved(model)
    plain = (first, *(search.drawn(sizes, seed, gain) for seed in (1, 2)))
    more = partial(search.more, plain, [sizes], gain, still)
    told = "ONNX Runtime, the sample that was given, and random inputs of its sizes"
    return Probes(plain, more, told, sizes, sizes, gain, NUMBERS[-1], held)


def _suspects(model: onnx.ModelProto, inputs: list[Input], problem: str) -> list[str]:
    """Inputs by which a runtime fails, most likely: those of the operator that failed, and not what is data."""
    failed = re.search(r"while running (\w+) node|for input: (\S+)", problem)
    read = {name for node in model.graph.node if failed and node.op_type == failed[1] for name in node.input}
    read |= {failed[2]} if failed and failed[2] else set()
    special = [one for one in inputs if one.dtype.kind != "f" or one.draw.value is not None]
    found = [one for one in special if one.name in read] or [one for one in inputs if one.name in read] or special
    return [f"{one.name} ({one.dtype if one.dtype.kind != 'O' else 'string'} {list(one.dims)})" for one in found]


def drawn(
    model: onnx.ModelProto,
    sizes: Sizes,
    seed: int | list[int],
    *,
    gain: float,
    below: int,
    held: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Array]:
    """A call's inputs, as `probes` found them to run.

    Args:
        model: The graph.
        sizes: Its free sizes by name; one that is not said is 1.
        seed: Of the draw.
        gain: See `Probes`.
        below: See `Probes`.
        held: See `Probes`.
    """
    return drawn_for(_inputs(model, held), sizes, seed, gain, below)


def _inputs(model: onnx.ModelProto, held: Mapping[str, Any] = MappingProxyType({})) -> list[Input]:
    import onnx

    wishes = draws(model, held)
    found = []
    for value in model.graph.input:
        if value.name not in wishes:
            continue
        kind = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type) if kind.elem_type else None
        if dtype is None or dtype.kind not in "fiubO":
            what = str(value.type.WhichOneof("value") or "value").removesuffix("_type") if dtype is None else dtype.name
            why = f"its input {value.name} is of type {what}, and no tensor of numbers or text"
            raise Unrunnable(why, drawable=False)
        found.append(Input(value.name, dims_of(value), dtype, wishes[value.name]))
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
