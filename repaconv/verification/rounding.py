"""Measure how far rounding alone moves a network's outputs, and state how much of that a comparison allows.

Two graphs that compute the same function round differently. If an output is near zero, or is a difference of large
numbers, the two graphs differ by more than any fixed tolerance. The comparison then measures how far rounding moves the
*original* network on the same inputs, and allows a stated multiple of it. There are three ways to measure it, the best
one first:

1. FP32 against float64 (`network_rounding`, `rounding_between`, `float64_evaluator_check.graph_rounding`): run the
   original network in both. The difference is the rounding error of every number on these inputs, unless the network
   computes something else in float64 (`float64_evaluator_check`).
2. Moved inputs (`float64_rounding`): two networks in float64 have no better arithmetic to compare with. The original
   runs on inputs that are moved by one unit in the last place.
3. Moved weights and inputs (`jitter_rounding`): if a graph cannot be evaluated in float64, its weights and inputs are
   moved by some units in the last place of float32, and the graph runs again. This is Monte Carlo arithmetic (Parker,
   UCLA CSD-970002, 1997), which moves every operation. Only this way shows which discrete values depend on rounding.

docs/design/verification.md has the argument, and the experiments that the figures below come from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from repaconv.graph.float64_rewriting import Weights, converted
from repaconv.graph.operator_facts import ARITHMETIC
from repaconv.verification.float64_graphs import Float64, wide, widened
from repaconv.verification.float64_operators import in_parts
from repaconv.verification.graph_with_cached_outputs import Evaluated, key_of
from repaconv.verification.model_runners import load_onnx
from repaconv.verification.tolerances import EXPORTED_RTOL, FLOAT32

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Feeds, Session
    from repaconv.sources.source_model import NetworkForm, SourceModel
    from repaconv.verification.model_runners import Runner

Array = NDArray[Any]

# --- Figures, each with its derivation or its experiment (benchmarks/verification_rates.py).

MEASURED_TIMES = 8
"""How many times the measured rounding error of the original (1, 2) is allowed. The original's error is one sample of a
sum of many small errors; the candidate's error is another sample, from about as many operations. One of two independent
normal samples is more than 8 times the other with a probability of 2/pi * atan(1/8) = 8%. For the maxima of 4 numbers
each it is 0.09%, and 6e-6 for 8; most images and neighborhoods have more. For a graph, `ROUNDING_SAMPLES` further
samples are taken by moving its weights (3): of 1,000 sound folds, the largest error was 14 times one sample of the
original's error (the experiment, "error / own error")."""
JITTERED_TIMES = 4
"""How many times the movement under jitter (3) is allowed. For one number, the largest of `ROUNDING_SAMPLES` normal
samples is below a quarter of their standard deviation with a probability of 2e-6. Jitter is larger than rounding
itself, so a sound fold differs by less than the jitter moves it (the experiment, "difference / jitter")."""
ROUNDING_SAMPLES = 8
"""Most samples of a graph's rounding by normally distributed jitter. They are taken one after the other, until every
difference is explained. One sample is not enough: a neighborhood may be a single number (a class, for one image), and
one sample in ten moves it by less than an eighth of what another does. (Jitter by a constant amount with random signs
would not move a sum of two equal terms that cancel, in half of the samples.)"""
JITTERS = 3
"""Number of runs with moved inputs in float64 (2), for a network or a loop in it, where the largest movement of each
image counts; and number of runs with moved weights and inputs to find the images that depend on rounding."""
JITTER_SHARE = 0.1
"""Relative size of the jitter of weights and inputs, as a share of the link's tolerance."""
JITTER = JITTER_SHARE * FLOAT32
"""Relative size of the jitter in float32: 1e-6, which is 17 times the largest error of one rounding (2**-24). The
jitter also stands for the rounding of the operations in between: a sum of 300 products has a typical error of 17
roundings (a random walk)."""
TO_FLOAT64 = 2.0**-29
"""How much finer float64 rounds than float32."""
LAST_PLACE = 2.0**-52
"""The unit in the last place of a float64 number in [1, 2)."""
MOST_EXPLAINED = 0.01
"""A number is left out if rounding explains more than this, relative to the scale, since agreement then shows little.
If more than `UNDECIDED_SHARE` of all numbers are left out, nothing is verified. The value is the noise of FP16
(`tolerances.LOSSY`): a number that rounding moves further would not pass as FP16 either."""
SATURATED = float(np.finfo(np.float32).eps)
"""Spacing of float32 numbers near 1. A saturated sigmoid or softmax p has steps of this size, and so has 1 - p, however
small it is. An error below this is therefore ignored in a comparison relative to neighbors. Comparisons in float64 use
the spacing of float64."""
ALGEBRA_RTOL = 1e-9
"""Allowed difference of a fold computed in float64, relative to neighboring numbers. Of 1,000 sound folds, well
conditioned networks differed by at most 3e-11, and networks in which large numbers cancel by 2e-10; differences of
almost equal values differed by more (`ALGEBRA_DIVISOR`). A constant rounded to float32 by mistake differs by 6e-8."""
ALGEBRA_DIVISOR = 1024
"""If the original has a large float32 error, the fold in float64 may differ by this fraction of the error. float64
rounds 2**29 times finer: of 1,000 sound folds, differences of almost equal values differed by at most 8e-4 of that
error, and all others by 2e-5. The limit leaves room for graphs that keep constants in float32 (the scale of a Resize).
If it is exceeded, the comparison measures how far moved weights and inputs move the original in float64."""
WRITTEN_MOVED = 2.0**-24
"""Relative movement of the folded graph's weights that shows the effect of rounding them to float32: the largest
relative error of one rounding. In float64, the written graph may differ from the original by `MEASURED_TIMES` that
effect. Sound folds differed by at most 2.3 times the effect; a bias with an error of 0.1% differed by 1e4 times."""
MOVED_SHARE = 1e-3
"""For an output that is the same for all inputs in float32: allowed difference of the fold in float64, relative to how
far the inputs move the output in float64. A wrong factor or a missing term changes it by much more."""
HALF_ROUNDINGS = 16
"""Allowed error of an output, in roundings to half precision, if folded weights are stored in half precision: the root
mean square sum over 256 products is 16 times one rounding."""
HALVES = {10: ("fp16", 2.0**-12), 16: ("bf16", 2.0**-9)}
"""ONNX's half precisions: the link of graphs in this precision, and a typical relative rounding error. It is half of
the largest one, which is half a unit in the last place (2**-11, 2**-8)."""

# --- The model.


class Kind(NamedTuple):
    """How rounding was measured, and what is allowed: fields of `repaconv.results.Figures`."""

    times: float
    arithmetic: Literal["FP32", "float64"]
    source: Literal["float32 against float64", "moved inputs", "moved weights and inputs"]


MEASURED = Kind(MEASURED_TIMES, "FP32", "float32 against float64")
MOVED_INPUTS = Kind(MEASURED_TIMES, "float64", "moved inputs")
JITTERED = Kind(JITTERED_TIMES, "FP32", "moved weights and inputs")
WRITTEN = Kind(MEASURED_TIMES, "float64", "moved weights and inputs")
ALGEBRAIC = Kind(1 / ALGEBRA_DIVISOR, "float64", "float32 against float64")

Movement = Mapping[str, Array]
"""How far one other rounding moves each output: |other - original| for every number, infinite for a discrete value that
changes. If rounding changes the shape, the movement has the other's shape."""


class Rounding:
    """How far rounding alone moves the outputs of one inference; it is measured once, when it is first needed."""

    def __init__(
        self, kind: Kind, movements: Callable[[], Iterable[Movement]], doubt: Callable[[], str] = lambda: ""
    ) -> None:
        """``movements`` yields movements, each of which takes one inference; ``doubt`` computes the property."""
        self.kind, self._more, self._doubt = kind, movements, doubt
        self._known: list[Movement] = []
        self._running: Iterator[Movement] | None = None

    def of(self, output: str) -> Iterator[Array]:
        """Yield the movements of an output, one after the other; none if the output has no movement."""
        place = 0
        while place < len(self._known) or self._run():
            if output in self._known[place]:
                yield self._known[place][output]
            place += 1

    def _run(self) -> bool:
        if self._running is None:
            self._running = iter(self._more())
        found = next(self._running, None)
        if found is not None:
            self._known.append(found)
        return found is not None

    @cached_property
    def doubt(self) -> str:
        """Why the measured movement is not rounding; empty if it is, or if nothing was measured.

        It is computed only when it is needed, because it takes longer than measuring a movement.
        """
        return self._doubt() if self._known else ""

    def reshapes(self, output: str, shape: tuple[int, ...]) -> bool:
        """Whether rounding alone gives an output another shape than this."""
        return any(moved.shape != shape for moved in self.of(output))


def movement(found: Mapping[str, Any], right: Mapping[str, Any], *, discrete: bool = False) -> Movement:
    """Return how far one set of outputs is from another; discrete outputs are included only with ``discrete``."""
    moved: dict[str, Array] = {}
    for name, out in right.items():
        if not isinstance(out, np.ndarray) or out.dtype.kind not in "fiub":
            continue
        if np.shape(found[name]) != out.shape:
            moved[name] = np.full(np.shape(found[name]), np.inf)
        elif out.dtype.kind == "f":
            moved[name] = apart(np.asarray(found[name], np.float64), out.astype(np.float64))
        elif discrete:
            moved[name] = np.where(found[name] != out, np.inf, 0.0)
    return moved


def apart(a: Array, b: Array) -> Array:
    """Return |a - b|: 0 where both are NaN or the same infinity, infinite where only one is."""
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))


# --- 1: FP32 against float64.


def network_rounding(source_model: SourceModel, feeds: Feeds, right: Mapping[str, Any] | None = None) -> Rounding:
    """Measure the rounding of a run's original network: FP32 against float64.

    A network that amplifies rounding may compute an image exactly by chance. If one inference does not suffice, up to
    `ROUNDING_SAMPLES` more run on moved inputs.

    Args:
        source_model: The source model of the run.
        feeds: The inputs of the inference.
        right: The outputs in float64, if they are known.
    """

    def measured() -> Iterator[Movement]:
        exact = source_model.reference.run(feeds) if right is None else right
        single = source_model.single()
        yield movement(single.run(feeds), exact)
        for seed in range(ROUNDING_SAMPLES):
            moved = movement(single.run(jittered_feeds(feeds, JITTER, seed)), exact)
            yield {name: JITTERED_TIMES / MEASURED.times * one for name, one in moved.items()}

    return Rounding(MEASURED, measured, lambda: source_model.reference.float64_doubt(feeds))


def rounding_between(form: NetworkForm, exact: NetworkForm, feeds: Feeds) -> Rounding:
    """Measure the rounding of one form of a network; ``exact`` is the same form in float64."""
    return Rounding(MEASURED, lambda: [movement(form.run(feeds), exact.run(feeds))], lambda: exact.float64_doubt(feeds))


# --- 2: in float64, moved inputs.


def float64_rounding(source_model: SourceModel, feeds: Feeds, right: Mapping[str, Any]) -> Rounding:
    """Measure the rounding of a run's original network in float64, by inputs moved by one unit in the last place.

    If torch's exporter wrote numbers in float32, the exported graph may be off, and its fold by up to twice as much as
    the exported graph is on this inference. A movement of a row by more than `EXPORTED_RTOL` is another discrete
    decision, or a fault. It explains nothing.

    Args:
        source_model: The source model of the run.
        feeds: The inputs of the inference.
        right: The outputs in float64.
    """

    def measured() -> Iterator[Movement]:
        double = {name: wide(array) for name, array in feeds.items()}
        for seed in range(JITTERS):
            yield _only_rounded_rows(
                movement(source_model.reference.run(jittered_feeds(double, LAST_PLACE, seed)), right), right
            )
        if source_model.as_exported is not None:
            off = movement(source_model.as_exported.run(feeds), right)
            yield _only_rounded_rows({name: 2 / MEASURED_TIMES * one for name, one in off.items()}, right)

    return Rounding(MOVED_INPUTS, measured)


def _only_rounded_rows(moved: Movement, right: Mapping[str, Any]) -> Movement:
    """Return the movement, with 0 in rows that move further than rounding moves them, and where shapes change."""
    return {name: _rounded_rows_of(one, right[name]) for name, one in moved.items()}


def _rounded_rows_of(moved: Array, right: Array) -> Array:
    if moved.shape != right.shape or not right.size:
        return np.zeros(right.shape)
    rows = (len(right), -1) if right.ndim > 1 else (1, -1)
    rounds = moved.reshape(rows).max(1, initial=0.0) <= EXPORTED_RTOL * np.abs(right).reshape(rows).max(1, initial=0.0)
    return np.where(np.repeat(rounds, right.size // len(rounds)).reshape(right.shape), moved, 0.0)


# --- 3: moved weights and inputs.

# Operators whose constants are weights; those of others may be sizes, limits, places.
_WEIGHTED = ("Conv", "ConvTranspose", "MatMul", "Gemm", "BatchNormalization", "LayerNormalization", "Gather")


class Jittered:
    """A graph whose weights and inputs are slightly moved, to show how far rounding moves its outputs.

    It is as large as the graph, and several of them are needed. To save memory, its first run closes the sessions of
    the other graphs. A large graph also runs on all probes then, keeps their outputs, and closes its own session. In
    float64, the first run is on the probe that is needed, and the second one on all others.
    """

    def __init__(
        self,
        graph: Evaluated,
        by: float,
        seed: int,
        probes: Sequence[Feeds],
        coarse: Mapping[str, float] = MappingProxyType({}),
        others: Iterable[Evaluated | Jittered] = (),
        *,
        anew: Collection[str] = (),
        double: bool = False,
    ) -> None:
        """Prepare the graph; nothing runs yet.

        Args:
            graph: The graph.
            by: The relative size of the movement.
            seed: Seed of the random generator.
            probes: The inputs on which it will run.
            coarse: The names of weights that are moved further, and by how much.
            others: Other graphs whose sessions are closed first.
            anew: Constants that are moved even if they are a single number.
            double: Whether it runs in float64.
        """
        self.graph, self.by, self.seed, self.probes, self.coarse, self.anew = graph, by, seed, probes, coarse, anew
        self.others, self.double = [*others], double
        self._known: dict[bytes, Mapping[str, Any]] = {}
        self._exact: dict[bytes, Mapping[str, Any]] = {}
        self._session: Session | None = None

    def run(self, feeds: Feeds) -> Mapping[str, Any]:
        """See `repaconv.verification.model_runners.Runner`."""
        return self._of(feeds, self._known, in_float64=self.double)

    def truth(self, feeds: Feeds) -> Mapping[str, Any]:
        """Return the outputs of the moved graph on the moved inputs in float64."""
        return self._of(feeds, self._exact, in_float64=True)

    def close(self) -> None:
        """Release the session. If several probes needed it, others are likely to: it runs on these before."""
        if self._session is not None and len(self._known) > 1:
            self._run_on(self._session, self.probes, self._known)
        self._session = None

    def _of(self, feeds: Feeds, known: dict[bytes, Mapping[str, Any]], *, in_float64: bool) -> Mapping[str, Any]:
        key = key_of(feeds)
        if key not in known:
            for graph in (self.graph, *self.others):
                graph.close()
            how = self.by, self.seed, self.coarse, self.anew
            if in_float64:
                # An inference takes as long as moving the weights does. Most comparisons need a single one; where a
                # second is needed, the weights are moved again for all the others at once.
                probes = [feeds] if not known else [probe for probe in self.probes if key_of(probe) not in known]
                exact = Float64(*_moved_apart(self.graph.model, *how, double=self.double))
                with suppress(Exception):  # evaluation raises many classes; then each probe runs by itself
                    found = exact.run_all([*map(self._moved, probes)])
                    known |= zip(map(key_of, probes), found, strict=True)
                self._run_on(exact, probes, known)
                runner: Runner = exact
            else:
                if self._session is None:
                    model, weights = _moved_apart(self.graph.model, *how)
                    self._session = load_onnx(model, {name: weight.numpy for name, weight in weights.items()})
                runner = self._session
                if not self.graph.may_stay_open:
                    self._run_on(runner, self.probes, known)
                    self._session = None
            if key not in known:
                known[key] = runner.run(self._moved(feeds))
        return known[key]

    def _run_on(self, runner: Runner, probes: Iterable[Feeds], known: dict[bytes, Mapping[str, Any]]) -> None:
        """Keep the outputs on probes of which they are not known yet."""
        for probe in probes:
            with suppress(Exception):  # any exception of the runtime; it is raised again when this probe is needed
                if key_of(probe) not in known:
                    known[key_of(probe)] = runner.run(self._moved(probe))

    def _moved(self, probe: Feeds) -> Feeds:
        inputs = {name: wide(array) for name, array in probe.items()} if self.double else probe
        return jittered_feeds(inputs, self.by, self.seed)


def jitter_rounding(
    runners: Sequence[Runner],
    feeds: Feeds,
    right: Mapping[str, Any],
    kind: Kind = JITTERED,
    known: Iterable[Movement] = (),
) -> Rounding:
    """Measure the rounding of a graph by copies of it with moved weights and inputs.

    Each copy runs only if the copies before it do not suffice.

    Args:
        runners: The copies.
        feeds: The inputs of the inference.
        right: The outputs of the graph itself.
        kind: How rounding was measured, and what is allowed.
        known: Movements that are known without running a copy; they come first.
    """
    moved = (movement(one.run(feeds), right, discrete=True) for one in runners)
    return Rounding(kind, lambda: chain(known, moved))


def moved_weights(
    model: onnx.ModelProto,
    by: float,
    seed: int,
    coarse: Mapping[str, float] = MappingProxyType({}),
    anew: Collection[str] = (),
) -> onnx.ModelProto:
    """Return the graph with every number of its weights multiplied by 1 + z ``by``, where z is normally distributed.

    Weights are the constants that `_WEIGHTED` operators read. Constants that are added or multiplied are weights, too,
    if they are several numbers or in ``anew``. Weights in ``coarse`` move by the amount given there.
    """
    from onnx import numpy_helper

    from repaconv.graph.graph_without_weights import with_initializers

    is_weight = _weights_of(model, anew)

    def other(name: str, weight: onnx.TensorProto) -> onnx.TensorProto:
        if weight.data_location != weight.EXTERNAL and is_weight(name, weight):
            numbers = numpy_helper.to_array(weight)
            if numbers.dtype.kind == "f":
                return numpy_helper.from_array(_jitter(numbers, coarse.get(name, by), _generator_of(name, seed)), name)
        return weight

    found = with_initializers(model, (other(weight.name, weight) for weight in model.graph.initializer))
    for node in found.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            node.attribute[0].t.CopyFrom(other(node.output[0], node.attribute[0].t))
    return found


def _weights_of(model: onnx.ModelProto, anew: Collection[str]) -> Callable[[str, onnx.TensorProto], bool]:
    """Whether a constant is a weight; see `moved_weights`."""
    read = {name: node.op_type for node in model.graph.node for name in node.input}

    def is_weight(name: str, constant: onnx.TensorProto) -> bool:
        several = name in anew or int(np.prod(constant.dims)) > 1
        return read.get(name) in _WEIGHTED or (several and read.get(name) in ARITHMETIC)

    return is_weight


def _moved_apart(
    model: onnx.ModelProto,
    by: float,
    seed: int,
    coarse: Mapping[str, float],
    anew: Collection[str],
    *,
    double: bool = False,
) -> tuple[onnx.ModelProto, Weights]:
    """The graph of `moved_weights`: large weights are apart, and moved when they are read.

    ``double``: weights are widened first, so that float64 numbers are moved.
    """
    import onnx_ir as ir

    from repaconv.graph.graph_without_weights import mark_as_external

    bare, large = mark_as_external(model)
    typed = widened(bare) if double else bare
    kinds = {weight.name: ir.DataType(weight.data_type) for weight in typed.graph.initializer}
    is_weight = _weights_of(model, anew)

    def read(weight: onnx.TensorProto) -> ir.TensorProtocol:
        numbers = converted(weight, kinds[weight.name])
        if is_weight(weight.name, weight):
            numbers = _jitter(numbers, coarse.get(weight.name, by), _generator_of(weight.name, seed))
        return ir.tensor(numbers)

    def lazy(weight: onnx.TensorProto) -> ir.LazyTensor:
        return ir.LazyTensor(partial(read, weight), kinds[weight.name], ir.Shape(weight.dims), name=weight.name)

    weights = {name: lazy(weight) for name, weight in large.items()}
    return moved_weights(typed, by, seed, coarse, anew), weights


def _generator_of(name: str, seed: int) -> np.random.Generator:
    """Return the random generator of one weight, so that its numbers do not depend on the order of weights."""
    return np.random.default_rng([seed, crc32(name.encode())])


def jittered_feeds(feeds: Mapping[str, Array], by: float, seed: int) -> dict[str, Array]:
    """Return inputs with every number multiplied by 1 + z ``by``, where z is normally distributed."""
    generator = np.random.default_rng(seed)
    return {name: _jitter(numbers, by, generator) for name, numbers in feeds.items()}


def _jitter(numbers: Array, by: float, generator: np.random.Generator) -> Array:
    if numbers.dtype.kind != "f":
        return numbers
    single = numbers.dtype.itemsize < np.dtype(np.float64).itemsize

    def moved(here: Array) -> Array:
        factors = generator.standard_normal(here.shape, np.float32 if single else np.float64)
        factors *= by
        factors += 1
        return np.asarray(here * factors)

    return in_parts(moved, numbers)  # random numbers of a whole weight would be written to memory three times
