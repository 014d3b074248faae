"""Find inputs on which an arbitrary ONNX graph is verified: several sizes of dynamic dimensions, several value ranges.

A dynamic dimension of size 1 hides errors in a softmax, mean or transpose over it, and equal sizes hide mixed-up
dimensions. Each dimension therefore gets a size of its own, a prime above 1 where the graph runs with that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from repaconv.core.errors import RepaconvError, first_line
from repaconv.graph.compute_costs import largest_product_at
from repaconv.graph.input_sizes_from_weights import input_sizes_from_weights
from repaconv.graph.onnx_files import subgraphs_of
from repaconv.verification.random_graph_inputs import (
    INTEGER_BOUNDS,
    Distribution,
    input_distributions,
    named_dims_of,
)

if TYPE_CHECKING:
    import onnx


# The search for sizes and gains with which the graph runs

Array = NDArray[Any]
Sizes = dict[str, int]

BATCH_SIZES = (2, 3, 1)
FEW_BATCH_SIZES = (2, 1)
"""Batch sizes for a graph that takes long to run."""
FIRST_SIZES = {"batch": BATCH_SIZES, "length": (7, 12, 5), "side": (61, 96, 67)}
"""Sizes that are tried first: primes, which keep sizes apart, and an even one, at which pools and strides divide."""
USUAL_SIZES = {
    "batch": (*BATCH_SIZES, *BATCH_SIZES, 4, 8, 16),
    "length": (16, 32, 64, 128, 77, 197, 256, 512),
    "side": (64, 96, 128, 224, 256, 384, 512, 640, 32, 28, 16, 8),
}
"""Sizes that are tried after these and the sizes in the graph's metadata."""

IMAGE_SIDES = (224, 256, 128, 96, 64, 48, 32, 28, 16, 8, 320, 384, 512, 640)
"""Likely image sizes of a network with dynamic height and width, in the order in which they are tried. A graph that
runs at none of the first two rarely runs at a larger one, and takes seconds to say so."""

MOST_INPUT_NUMBERS = 2**25
"""Most numbers of all inputs of a probe, if the dynamic dimensions have a choice: 128 MiB in FP32. Several dimensions
of 512 would take more memory than there is."""

MOST_PRODUCT_NUMBERS = 2**29
"""Most numbers of a product at the usual sizes: 2 GiB in FP32. Attention over all pixels of an image of 224 has 10 GiB
of scores, for which the operating system may end the process."""

QUICK_INPUT_NUMBERS = 2**19
"""Numbers of all inputs of a probe, three images of 224 pixels, above which sizes are tried last: a graph that runs at
few sizes says so at large ones only after seconds."""

WANTED_ASSIGNMENTS = 3
"""Number of size assignments to find."""
USUAL_GAINS = (1.0, 0.1, 0.01, 0.001)
"""Gains on normal inputs; the first one without overflow is the usual gain."""

PROBE_GAINS = (4.0, 32.0, 0.1)
"""Factors on the usual gain for further probes: what is saturated or dead at 1 may be active there."""


UNMASKED_GAIN = 2.0**-10
"""Factor on floating-point inputs at which nothing overflows: what is infinite there too is hidden by a mask."""

UNIT_RANGE = " from 0 to 1, as "
"""How links describe ``unit`` inputs; what the graph does on other inputs follows."""
NOT_FINITE, NOT_RUNNING = "others give NaN or infinity", "the graph does not run on others"

FURTHER_GAINS = (1.0, 4.0, 32.0, 256.0, 0.1, 2048.0) * 6
"""Gains of further inputs, tried if an output of integers or booleans was constant on all probes, to make it change."""


@dataclass(frozen=True)
class Input:
    """An input of a graph and the distribution of its random values."""

    name: str
    dims: tuple[int | str, ...]  # a name if dynamic
    dtype: np.dtype[Any]
    distribution: Distribution


def random_values(
    inputs: list[Input], sizes: Sizes, seed: int | list[int], gain: float, below: int, *, unit: bool = False
) -> dict[str, Array]:
    """Sample all inputs of one call; dynamic dimensions that are not in ``sizes`` are 1."""
    generator = np.random.default_rng(seed)
    shapes = {one.name: tuple(sizes.get(d, 1) if isinstance(d, str) else d for d in one.dims) for one in inputs}
    return {
        one.name: one.distribution(
            shapes[one.name], one.dtype, generator, gain=gain, below=below, unit=unit, sizes=sizes
        )
        for one in inputs
    }


@dataclass
class Search:
    """The search for sizes of the dynamic dimensions, and gains, with which a graph runs.

    Attributes:
        inputs: The graph's inputs.
        run: Runs the graph.
        kinds: The kind of each dynamic dimension: "batch", "length" or "side".
        usual: The sizes to try for each kind.
        below: Upper bound of integers without known meaning; one of `INTEGER_BOUNDS`.
        wanted: Number of size assignments to find.
        problem: The last error of the runtime, as a line.
        cause: The error itself.
        unit: Why what would be normal random inputs are numbers from 0 to 1, as pixels are; empty if they are not.
        lengths: The first shape of each output that was seen, by the output's name and the input shapes.
    """

    inputs: list[Input]
    run: Callable[[dict[str, Array]], dict[str, Any]]
    kinds: dict[str, str]
    usual: dict[str, tuple[int, ...]]
    below: int
    wanted: int = WANTED_ASSIGNMENTS
    problem: str = ""
    cause: Exception | None = None
    unit: str = ""
    lengths: dict[Any, tuple[int, ...]] = field(default_factory=dict)

    def assignments(self) -> list[Sizes]:
        """Return assignments of sizes with which the graph runs, as different as possible; empty if it never runs."""
        if not self.kinds:
            return [{}] if self._runs({}, 0) else []
        kinds_alike: tuple[tuple[str, ...], ...] = ((), ("batch",), ("batch", "length", "side"))
        if self.unit:  # the graph ran with no sizes before: few are tried again
            kinds_alike = kinds_alike[-1:]
        for alike in kinds_alike:
            tried = {tuple(sizes.items()): sizes for sizes in self._candidates(alike)}
            found: list[Sizes] = []
            for sizes in sorted(tried.values(), key=lambda sizes: self._numbers(sizes) > QUICK_INPUT_NUMBERS):
                if len(found) < self.wanted and self._runs(sizes, len(found)):
                    found.append(sizes)
            if found:
                return found + list(self._variations(found))
        return []

    def _candidates(self, alike: tuple[str, ...]) -> Iterator[Sizes]:
        """Yield assignments to try; all dimensions of a kind in ``alike`` get the same size."""
        for start in range(max(len(values) for values in self.usual.values())):
            place = dict.fromkeys(FIRST_SIZES, start)
            sizes = {}
            for name, kind in self.kinds.items():
                sizes[name] = self.usual[kind][place[kind] % len(self.usual[kind])]
                place[kind] += kind not in alike
            yield sizes

    def _variations(self, found: list[Sizes]) -> Iterator[Sizes]:
        """Yield further assignments, which vary each dimension that had only one size so far."""
        seed = len(found)
        for name, kind in self.kinds.items():
            only = {sizes[name] for sizes in found}
            others = (value for value in self.usual[kind] if value not in only)
            tries = ({**found[0], name: value} for value in others) if len(only) == 1 else iter(())
            if (one := next((sizes for sizes in tries if self._runs(sizes, seed)), None)) is not None:
                seed += 1
                yield one

    @cached_property
    def _largest(self) -> int:
        """`MOST_INPUT_NUMBERS`, or what the smallest assignment takes if that is more."""
        return max(MOST_INPUT_NUMBERS, min(self._numbers(sizes) for sizes in self._candidates(())))

    def _numbers(self, sizes: Sizes) -> int:
        """How many numbers all inputs have."""
        return sum(prod(sizes.get(dim, 1) if isinstance(dim, str) else dim for dim in one.dims) for one in self.inputs)

    def _runs(self, sizes: Sizes, seed: int) -> bool:
        """Whether the graph runs with these sizes, on the inputs that become their probe (at gain 1)."""
        if sizes and self._numbers(sizes) > self._largest:
            return False
        try:
            self.run(self.random_call(sizes, seed, 1.0))
        except Exception as error:  # the runtime raises many classes
            self.problem, self.cause = first_line(error), error
            return False
        return True

    def random_call(self, sizes: Sizes, seed: int, gain: float) -> dict[str, Array]:
        """Sample the inputs of one call with these sizes."""
        return random_values(self.inputs, sizes, seed, gain, self.below, unit=bool(self.unit))

    def usual_sizes(self, found: list[Sizes], model: onnx.ModelProto) -> Sizes:
        """Return sizes as in ordinary use: batch 1, and for the others those in the graph's metadata or common ones.

        A dimension that had one size in all of ``found`` keeps it: the graph did not run with another. Sizes at which
        scores of attention take more memory than `MOST_PRODUCT_NUMBERS` are passed over.
        """
        only = {name: size for name, size in found[0].items() if all(sizes[name] == size for sizes in found)}
        own = {kind: values[len(FIRST_SIZES[kind]) :] for kind, values in self.usual.items()}
        own = {
            **own,
            "batch": (1,),
            "side": tuple(dict.fromkeys((*own["side"][: -len(USUAL_SIZES["side"])], *IMAGE_SIDES))),
        }
        for place in range(max(map(len, own.values()))):
            sizes = {name: own[kind][place % len(own[kind])] for name, kind in self.kinds.items()} | only
            if sizes in found:
                return sizes
            if largest_product_at(model, sizes) <= MOST_PRODUCT_NUMBERS and self._runs(sizes, 0):
                return sizes
        return found[0]

    def gain(self, sizes: Sizes) -> float:
        """Return the first gain at which all outputs are finite.

        Without one, the inputs become ``unit`` if all outputs are finite on those: the graph may have a logarithm of
        pixels.
        """
        found = next((gain for gain in USUAL_GAINS if self._finite(self.random_call(sizes, 0, gain))), None)
        if found is None and not self.unit:
            self.unit = NOT_FINITE
            if not self._finite(self.random_call(sizes, 0, 1.0)):
                self.unit = ""
        return found or 1.0

    def more(
        self, plain: tuple[dict[str, Array], ...], found: list[Sizes], usual_gain: float, unchanged: set[str]
    ) -> tuple[dict[str, Array], ...]:
        """Return further probes: with other gains, and inputs that change outputs that were constant.

        Args:
            plain: The probes of all size assignments.
            found: The size assignments.
            usual_gain: The gain of these probes.
            unchanged: Names of outputs that should not be the same for all probes.
        """
        gained = tuple(self._probes_with_other_gains(found, usual_gain))
        return (*gained, *self._inputs_that_change_outputs(found[0], (*plain, *gained), unchanged))

    def _probes_with_other_gains(self, found: list[Sizes], usual_gain: float) -> Iterator[dict[str, Array]]:
        """Yield probes with other gains, if the outputs stay finite, for the assignment with the fewest input values.

        Without floating-point inputs, where a gain has no effect, it is one more probe.
        """
        least = min(
            found, key=lambda sizes: sum(array.size for array in self.random_call(sizes, 0, usual_gain).values())
        )
        gains = PROBE_GAINS if any(one.dtype.kind == "f" for one in self.inputs) else (1.0,)
        for seed, gain in enumerate(gains, len(found)):
            feeds = self.random_call(least, seed, usual_gain * gain)
            if self._finite(feeds):
                yield feeds

    def _inputs_that_change_outputs(
        self, sizes: Sizes, feeds: tuple[dict[str, Array], ...], unchanged: set[str]
    ) -> Iterator[dict[str, Array]]:
        """Yield further inputs on which an output changes that was constant so far, until all have changed."""
        first: dict[str, dict[tuple[int, ...], Array]] = {name: {} for name in unchanged}
        for feed in feeds if unchanged else ():
            unchanged = unchanged - self._changed_outputs(feed, unchanged, first)
        for seed, gain in enumerate(FURTHER_GAINS, len(feeds)):
            feed = self.random_call(sizes, seed, gain) if unchanged else {}
            if feed and self._finite(feed) and (changed := self._changed_outputs(feed, unchanged, first)):
                unchanged = unchanged - changed
                yield feed

    def _changed_outputs(
        self, feed: dict[str, Array], unchanged: set[str], first: dict[str, dict[tuple[int, ...], Array]]
    ) -> set[str]:
        """The outputs whose shape or values differ from the first call of that shape, or from row to row."""
        outputs = self.run(feed)
        found = {name: np.asarray(outputs[name]) for name in unchanged}
        before = {name: first[name].setdefault(out.shape, out) for name, out in found.items()}
        given = tuple(np.shape(array) for array in feed.values())
        longer = {n for n, out in found.items() if out.shape != self.lengths.setdefault((n, given), out.shape)}
        changed = {n for n, out in found.items() if (out != before[n]).any() or (out.ndim and (out != out[:1]).any())}
        return longer | changed

    def _finite(self, feeds: dict[str, Array]) -> bool:
        """Whether no output overflows; what a mask hides is infinite, for much smaller inputs as well."""
        try:
            outputs = self._float_outputs(feeds)
            if all(np.isfinite(out).all() for out in outputs.values()):
                return True
            small = {
                name: array * array.dtype.type(UNMASKED_GAIN)
                for name, array in feeds.items()
                if array.dtype.kind == "f"
            }
            masked = self._float_outputs({**feeds, **small})
        except Exception:  # some graphs reject some values
            return False
        return all(_is_masked_alike(out, masked[name]) for name, out in outputs.items())

    def _float_outputs(self, feeds: dict[str, Array]) -> dict[str, Array]:
        outputs = self.run(feeds).items()
        return {name: out for name, out in outputs if isinstance(out, np.ndarray) and out.dtype.kind == "f"}

    @property
    def range_description(self) -> str:
        """Why real numbers are from 0 to 1; empty if they are not."""
        return f"{UNIT_RANGE}{self.unit}" if self.unit else ""

    def description(self, found: list[Sizes]) -> str:
        """Describe which dynamic dimensions were varied and which were not."""
        values = {name: sorted({sizes[name] for sizes in found}) for name in self.kinds}
        varied = [f"{name} {', '.join(map(str, some))}" for name, some in values.items() if len(some) > 1]
        fixed = [f"{name} {some[0]}" for name, some in values.items() if len(some) == 1]
        parts = [f"dynamic sizes: {'; '.join(varied)}"] if varied else []
        parts += [f"runs at one size alone: {'; '.join(fixed)}"] if fixed else []
        return "; ".join([f"ONNX Runtime, seeded inputs{self.range_description}", *parts])


def _is_masked_alike(one: Array, other: Array) -> bool:
    """Whether the same places of both are infinite, and none is NaN."""
    hidden, places = (np.where(np.isfinite(out), 0.0, out) for out in (one, other))
    return one.shape == other.shape and bool((hidden == places).all())


# The probes


class Unrunnable(Exception):
    """No inputs were found with which the graph runs.

    Attributes:
        inputs: Names of the graph's inputs.
        suspects: Descriptions of the inputs that most likely have wrong values.
        on: The kind of inputs that was tried, random or sample.
        helped_by_sample: Whether sample inputs from the user would help.
    """

    def __init__(
        self,
        why: str,
        inputs: Sequence[str] = (),
        suspects: Sequence[str] = (),
        *,
        on: str = "random inputs",
        helped_by_sample: bool = True,
    ) -> None:
        super().__init__(why)
        self.inputs, self.suspects, self.on, self.helped_by_sample = (
            tuple(inputs),
            tuple(suspects),
            on,
            helped_by_sample,
        )


@dataclass(frozen=True)
class Probes:
    """The inputs on which a graph is verified, and how to make more of them.

    Attributes:
        plain: Inputs by name, one call per assignment of sizes.
        more: Makes further probes; it runs the graph, which takes time.
        description: A description of the probes.
        usual: Sizes of the dynamic dimensions in ordinary use.
        other: Sizes of the dynamic dimensions in the first probe.
        gain: Factor on normally distributed inputs at which no output overflows.
        below: Upper bound of integers without known meaning; one of `INTEGER_BOUNDS`.
        seed: Seed of the first probe with another gain; the next ones follow it.
        held: Inputs with fixed values, as nested lists.
        unit: Whether what would be normal random inputs are numbers from 0 to 1.
    """

    plain: tuple[dict[str, Array], ...]
    more: Callable[[], tuple[dict[str, Array], ...]] = field(repr=False)
    description: str
    usual: Sizes
    other: Sizes
    gain: float
    below: int
    seed: int
    held: Mapping[str, Any] = field(default_factory=dict)
    unit: bool = False

    @cached_property
    def feeds(self) -> tuple[dict[str, Array], ...]:
        """All probes; the further ones are made on first use."""
        return (*self.plain, *self.more())

    def call(self, model: onnx.ModelProto, seed: int | list[int], gain: float = 1.0) -> dict[str, Array]:
        """Sample inputs of the usual sizes.

        Args:
            model: The graph.
            seed: Seed of the random generator.
            gain: Factor on the usual gain.
        """
        gain *= self.gain
        return random_call(model, self.usual, seed, gain=gain, below=self.below, held=self.held, unit=self.unit)

    def calls_of_other_gains(self, model: onnx.ModelProto) -> dict[float, dict[str, Array]]:
        """Sample inputs of the usual sizes for every gain of `PROBE_GAINS`, by gain."""
        return {self.gain * gain: self.call(model, seed, gain) for seed, gain in enumerate(PROBE_GAINS, self.seed)}


def probes(
    model: onnx.ModelProto,
    run: Callable[[dict[str, Array]], dict[str, Any]],
    *,
    expensive: bool = False,
    sample: Mapping[str, Array] | None = None,
) -> Probes:
    """Find inputs with which the graph runs.

    Args:
        model: The graph.
        run: Runs the graph; raises an exception for inputs that it rejects.
        expensive: Whether the graph takes so long that fewer and smaller batches are used.
        sample: Sample inputs, which become the first probe. The others have the same sizes; integers, text and small
            floating-point inputs (up to `FEW_NUMBERS` values) keep the values of the sample.

    Raises:
        Unrunnable: The graph runs with none of the inputs, or an input is not a tensor of numbers or text.
    """
    if sample is not None:
        return _probes_from_sample(model, run, sample)
    inputs = _inputs(model)
    primes = {**FIRST_SIZES, "batch": FEW_BATCH_SIZES} if expensive else FIRST_SIZES
    usual = {kind: (*primes[kind], *_metadata_sizes(model, kind), *USUAL_SIZES[kind]) for kind in FIRST_SIZES}
    numbers = INTEGER_BOUNDS if any(one.dtype.kind in "iu" for one in inputs) else INTEGER_BOUNDS[:1]
    wanted = len(FEW_BATCH_SIZES) if expensive else WANTED_ASSIGNMENTS
    reals = ("", NOT_RUNNING) if any(one.dtype.kind == "f" for one in inputs) else ("",)
    failed: Search | None = None
    for unit, below, kinds in product(reals, numbers, _dimension_kinds(inputs)):
        if unit and failed is not None and isinstance(failed.cause, (MemoryError, RepaconvError)):
            break  # it runs on no numbers
        search = Search(inputs, run, kinds, usual, below, wanted, unit=unit)
        if found := search.assignments():
            gain = search.gain(found[0])
            unchanged, usually = (
                _integer_outputs(model) - input_independent_outputs(model),
                search.usual_sizes(found, model),
            )
            plain = tuple(search.random_call(sizes, seed, gain) for seed, sizes in enumerate(found))
            more = partial(search.more, plain, found, gain, unchanged)
            text, in_unit_range = search.description(found), bool(search.unit)
            return Probes(plain, more, text, usually, found[0], gain, below, len(found), unit=in_unit_range)
        failed = failed if unit else search
    problem, cause = (failed.problem, failed.cause) if failed else ("", None)
    why = Unrunnable(problem, [one.name for one in inputs], _suspects(model, inputs, problem))
    raise why from cause


SAMPLE = "the sample inputs"
FEW_NUMBERS = 16
"""A floating-point sample input of at most this many values is taken as a parameter, e.g. a threshold, not as data."""


def _probes_from_sample(
    model: onnx.ModelProto, run: Callable[[dict[str, Array]], dict[str, Any]], sample: Mapping[str, Array]
) -> Probes:
    """Probes from a sample: the sample itself and random inputs of its sizes."""
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
    search = Search(inputs, run, dict.fromkeys(sizes, "batch"), {"batch": ()}, INTEGER_BOUNDS[-1])
    first = {one.name: np.asarray(sample[one.name], one.dtype) for one in inputs}
    try:
        run(first)
        run(search.random_call(sizes, 1, 1.0))
    except Exception as error:  # the runtime raises many classes
        raise Unrunnable(first_line(error), [*first], _suspects(model, inputs, str(error)), on=SAMPLE) from error
    gain, unchanged = search.gain(sizes), _integer_outputs(model) - input_independent_outputs(model)
    plain = (first, *(search.random_call(sizes, seed, gain) for seed in (1, 2)))
    more = partial(search.more, plain, [sizes], gain, unchanged)
    text = f"ONNX Runtime, the sample that was given, and random inputs of its sizes{search.range_description}"
    return Probes(plain, more, text, sizes, sizes, gain, INTEGER_BOUNDS[-1], 1, held, bool(search.unit))


def _suspects(model: onnx.ModelProto, inputs: list[Input], problem: str) -> list[str]:
    """Describe the inputs that most likely caused the error: inputs of the failed operator, preferably parameters."""
    failed = re.search(r"while running (\w+) node|for input: (\S+)", problem)
    read = {name for node in model.graph.node if failed and node.op_type == failed[1] for name in node.input}
    read |= {failed[2]} if failed and failed[2] else set()
    special = [one for one in inputs if one.dtype.kind != "f" or one.distribution.value is not None]
    found = [one for one in special if one.name in read] or [one for one in inputs if one.name in read] or special
    return [f"{one.name} ({one.dtype if one.dtype.kind != 'O' else 'string'} {list(one.dims)})" for one in found]


def random_call(
    model: onnx.ModelProto,
    sizes: Sizes,
    seed: int | list[int],
    *,
    gain: float,
    below: int,
    held: Mapping[str, Any] = MappingProxyType({}),
    unit: bool = False,
) -> dict[str, Array]:
    """Sample the inputs of one call.

    Args:
        model: The graph.
        sizes: Sizes of the dynamic dimensions by name; missing ones are 1.
        seed: Seed of the random generator.
        gain: See `Probes`.
        below: See `Probes`.
        held: See `Probes`.
        unit: See `Probes`.
    """
    return random_values(_inputs(model, held), sizes, seed, gain, below, unit=unit)


def _inputs(model: onnx.ModelProto, held: Mapping[str, Any] = MappingProxyType({})) -> list[Input]:
    import onnx

    distributions = input_distributions(model, held)
    sizes = input_sizes_from_weights(model, {value.name: named_dims_of(value) for value in model.graph.input})
    found = []
    for value in model.graph.input:
        if value.name not in distributions:
            continue
        kind = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type) if kind.elem_type else None
        if dtype is None or dtype.kind not in "fiubO":
            what = str(value.type.WhichOneof("value") or "value").removesuffix("_type") if dtype is None else dtype.name
            why = f"its input {value.name} is of type {what}, and no tensor of numbers or text"
            raise Unrunnable(why, helped_by_sample=False)
        dims = tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in named_dims_of(value))
        found.append(Input(value.name, dims, dtype, distributions[value.name]))
    return found


def _integer_outputs(model: onnx.ModelProto) -> set[str]:
    """Outputs of integers or booleans, e.g. classes or indices, which may stay constant when the inputs change."""
    import onnx

    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
    return {name for name, kind in kinds.items() if kind and onnx.helper.tensor_dtype_to_np_dtype(kind).kind in "iub"}


def _dimension_kinds(inputs: list[Input]) -> list[dict[str, str]]:
    """The kind of each dynamic dimension: the first axis is a batch, others of 4D inputs are sides, else lengths.

    If there are inputs like the states of recurrent layers, [layers, batch, width], a second version follows in which
    their middle axis is a batch.
    """
    states = [one.dims for one in inputs if [type(dim) for dim in one.dims] == [int, str, int]]
    kinds: dict[str, str] = {}
    for one in inputs:
        for axis, dim in enumerate(one.dims):
            if isinstance(dim, str):
                kinds.setdefault(dim, "batch" if not axis else "side" if len(one.dims) == 4 else "length")
    return [kinds, {**kinds, **{str(dims[1]): "batch" for dims in states}}] if states else [kinds]


def _metadata_sizes(model: onnx.ModelProto, kind: str) -> tuple[int, ...]:
    """Sizes of this kind in the graph's metadata."""
    words = {"batch": "batch", "length": "length|seq|tokens", "side": "size|shape|imgsz|width|height|resolution"}[kind]
    entries = [entry.value for entry in model.metadata_props if re.search(words, entry.key, re.IGNORECASE)]
    return tuple(dict.fromkeys(n for text in entries for n in map(int, re.findall(r"\d{1,4}", text)) if 1 < n <= 2048))


def input_independent_outputs(model: onnx.ModelProto) -> set[str]:
    """Return the outputs that do not depend on any input's values, at most on shapes."""
    moved = {value.name for value in model.graph.input} - {weight.name for weight in model.graph.initializer}
    for node in model.graph.node:
        inner = subgraphs_of(node)  # an inner graph may read any outer value
        if node.op_type not in ("Shape", "Size") and (inner or moved & set(node.input)):
            moved |= set(node.output)
    return {value.name for value in model.graph.output} - moved
