"""Inputs on which a graph of any origin is proved: free sizes of several values, and draws that excite it.

A free size of 1 hides what a softmax, a mean or a transpose over it does, and equal sizes hide which is which: names
get values of their own, above 1 and prime where the graph takes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from repaconv.core.errors import first_line
from repaconv.verification.random_inputs import NUMBERS, Draw, dims_of, draws

if TYPE_CHECKING:
    import onnx


# --- The search for probes: values of free sizes with which a graph runs, and gains on what is drawn for them.

Array = NDArray[Any]
Sizes = dict[str, int]

BATCHES = (2, 3, 1)
FEW = (2, 1)
"""Of a graph that is dear to run."""
PRIMES = {"batch": BATCHES, "length": (7, 13, 5), "side": (61, 97, 67)}
USUAL = {
    "batch": (*BATCHES, *BATCHES, 4, 8, 16),
    "length": (16, 32, 64, 128, 77, 197, 256, 512),
    "side": (64, 96, 128, 224, 256, 384, 512, 640, 32, 28, 16, 8),
}
"""Tried after the primes and what the graph's metadata say."""

IN_USE = (224, 256, 320, 384, 512, 640, 128, 96, 64, 48, 32, 28, 16, 8)
"""Sides that a network of images of any size is likely to be used at."""

WANTED = 3
"""Assignments of the free sizes."""
SMALLER = (1.0, 0.1, 0.01, 0.001)
"""The first of these gains on normal inputs at which nothing overflows is the usual one."""

GAINS = (4.0, 32.0, 0.1)
"""On that, of further probes: what saturates or is dead at 1 need not be so there."""


FURTHER = (1.0, 4.0, 32.0, 256.0, 0.1, 2048.0) * 6
"""Of draws that are tried where a class or a truth value was the same on all before, to find some that move it."""


@dataclass(frozen=True)
class Input:
    """An input of a graph, and how it is drawn."""

    name: str
    dims: tuple[int | str, ...]  # a name where free
    dtype: np.dtype[Any]
    draw: Draw


def drawn_for(inputs: list[Input], sizes: Sizes, seed: int | list[int], gain: float, below: int) -> dict[str, Array]:
    """A call of these sizes; one that is not said is 1."""
    generator = np.random.default_rng(seed)
    shapes = {one.name: tuple(sizes.get(d, 1) if isinstance(d, str) else d for d in one.dims) for one in inputs}
    return {
        one.name: one.draw(shapes[one.name], one.dtype, generator, gain=gain, below=below, sizes=sizes)
        for one in inputs
    }


@dataclass
class Search:
    """Assignments of the free sizes with which the graph runs."""

    inputs: list[Input]
    run: Callable[[dict[str, Array]], dict[str, Any]]
    kinds: dict[str, str]
    usual: dict[str, tuple[int, ...]]
    below: int
    wanted: int = WANTED
    problem: str = ""
    lengths: dict[Any, tuple[int, ...]] = field(default_factory=dict)

    def assignments(self) -> list[Sizes]:
        """Some that differ in as many sizes as the graph lets; none if it never runs."""
        if not self.kinds:
            return [{}] if self._runs({}, 0) else []
        for alike in ((), ("batch",), ("batch", "length", "side")):
            tried = {tuple(sizes.items()): sizes for sizes in self._tries(alike)}
            found: list[Sizes] = []
            for sizes in tried.values():
                if len(found) < self.wanted and self._runs(sizes, len(found)):
                    found.append(sizes)
            if found:
                return found + list(self._varied(found))
        return []

    def _tries(self, alike: tuple[str, ...]) -> Iterator[Sizes]:
        """Values for all names, those of the kinds in ``alike`` with one for all of the kind."""
        for start in range(max(len(values) for values in self.usual.values())):
            place = dict.fromkeys(PRIMES, start)
            sizes = {}
            for name, kind in self.kinds.items():
                sizes[name] = self.usual[kind][place[kind] % len(self.usual[kind])]
                place[kind] += kind not in alike
            yield sizes

    def _varied(self, found: list[Sizes]) -> Iterator[Sizes]:
        """Further ones in which a name has another value that had but one so far."""
        seed = len(found)
        for name, kind in self.kinds.items():
            only = {sizes[name] for sizes in found}
            others = (value for value in self.usual[kind] if value not in only)
            tries = ({**found[0], name: value} for value in others) if len(only) == 1 else iter(())
            if (one := next((sizes for sizes in tries if self._runs(sizes, seed)), None)) is not None:
                seed += 1
                yield one

    def _runs(self, sizes: Sizes, seed: int) -> bool:
        """Whether it does on what is also the probe of these sizes, where nothing overflows."""
        try:
            self.run(self.drawn(sizes, seed, 1.0))
        except Exception as error:  # the runtime's own, of many classes
            self.problem = first_line(error)
            return False
        return True

    def drawn(self, sizes: Sizes, seed: int, gain: float) -> dict[str, Array]:
        """A call of these sizes."""
        return drawn_for(self.inputs, sizes, seed, gain, self.below)

    def usual_sizes(self, found: list[Sizes]) -> Sizes:
        """Free sizes as networks have them in use: one of a batch, a side that the graph's maker wrote down."""
        own = {kind: values[len(PRIMES[kind]) :] for kind, values in self.usual.items()}
        own = {**own, "batch": (1,), "side": tuple(dict.fromkeys((*own["side"][: -len(USUAL["side"])], *IN_USE)))}
        for place in range(max(map(len, own.values()))):
            sizes = {name: own[kind][place % len(own[kind])] for name, kind in self.kinds.items()}
            if sizes in found or self._runs(sizes, 0):
                return sizes
        return found[0]

    def gain(self, sizes: Sizes) -> float:
        """The first at which all outputs are finite."""
        return next((gain for gain in SMALLER if self._finite(self.drawn(sizes, 0, gain))), 1.0)

    def more(
        self, plain: tuple[dict[str, Array], ...], found: list[Sizes], usual: float, still: set[str]
    ) -> tuple[dict[str, Array], ...]:
        """Beside every assignment the one that costs least with other gains, and what moves outputs that are still."""
        gained = tuple(self._gained(found, usual))
        return (*gained, *self._stirring(found[0], (*plain, *gained), still))

    def _gained(self, found: list[Sizes], usual: float) -> Iterator[dict[str, Array]]:
        """Where it stays finite; or once again, where nothing is drawn normally."""
        least = min(found, key=lambda sizes: sum(array.size for array in self.drawn(sizes, 0, usual).values()))
        gains = GAINS if any(one.dtype.kind == "f" for one in self.inputs) else (1.0,)
        for seed, gain in enumerate(gains, len(found)):
            feeds = self.drawn(least, seed, usual * gain)
            if self._finite(feeds):
                yield feeds

    def _stirring(
        self, sizes: Sizes, feeds: tuple[dict[str, Array], ...], still: set[str]
    ) -> Iterator[dict[str, Array]]:
        """Further draws, as long as some of these outputs have not moved: those on which one does."""
        first: dict[str, dict[tuple[int, ...], Array]] = {name: {} for name in still}
        for feed in feeds if still else ():
            still = still - self._moving(feed, still, first)
        for seed, gain in enumerate(FURTHER, len(feeds)):
            feed = self.drawn(sizes, seed, gain) if still else {}
            if feed and self._finite(feed) and (moving := self._moving(feed, still, first)):
                still = still - moving
                yield feed

    def _moving(
        self, feed: dict[str, Array], still: set[str], first: dict[str, dict[tuple[int, ...], Array]]
    ) -> set[str]:
        """Which of these outputs are others than on the first draw of their shape, or from row to row."""
        outputs = self.run(feed)
        found = {name: np.asarray(outputs[name]) for name in still}
        before = {name: first[name].setdefault(out.shape, out) for name, out in found.items()}
        given = tuple(np.shape(array) for array in feed.values())
        longer = {n for n, out in found.items() if out.shape != self.lengths.setdefault((n, given), out.shape)}
        changed = {n for n, out in found.items() if (out != before[n]).any() or (out.ndim and (out != out[:1]).any())}
        return longer | changed

    def _finite(self, feeds: dict[str, Array]) -> bool:
        try:
            outputs = self.run(feeds)
        except Exception:  # not every graph takes every number
            return False
        floats = (out for out in outputs.values() if isinstance(out, np.ndarray) and out.dtype.kind == "f")
        return all(bool(np.isfinite(out).all()) for out in floats)

    def told(self, found: list[Sizes]) -> str:
        """What was varied, and what not."""
        values = {name: sorted({sizes[name] for sizes in found}) for name in self.kinds}
        varied = [f"{name} {', '.join(map(str, some))}" for name, some in values.items() if len(some) > 1]
        fixed = [f"{name} {some[0]}" for name, some in values.items() if len(some) == 1]
        parts = [f"dynamic sizes: {'; '.join(varied)}"] if varied else []
        parts += [f"runs at one size alone: {'; '.join(fixed)}"] if fixed else []
        return "; ".join(["ONNX Runtime, seeded inputs", *parts])


# --- Inputs on which a graph of any origin is proved: free sizes of several values, and draws that excite it.


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
