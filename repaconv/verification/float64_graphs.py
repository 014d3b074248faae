"""Evaluate an arbitrary ONNX graph in float64, as the reference for float32.

ONNX Runtime evaluates a float64 copy if it has all kernels; fusions are off, since some keep scales in float32. It has
no float64 kernels for convolutions, most pools and erf. Such graphs are evaluated by onnx's reference implementation,
with operators of our own where that is slow or wrong (`repaconv.verification.float64_operators`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from math import frexp, inf, isfinite, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.core.thread_pool import thread_pool
from repaconv.engines.contract import Array, Feeds, Session
from repaconv.graph.float64_rewriting import DOUBLE, NARROW_FLOATS, WIDER, Weights, converted
from repaconv.graph.operator_facts import REDUCTIONS
from repaconv.verification.float64_operators import own_operators
from repaconv.verification.model_runners import load_onnx

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir
    from threadpoolctl import ThreadpoolController

RUNTIME = "a float64 copy under ONNX Runtime"
REFERENCE = "onnx's reference implementation in float64, convolutions and pools by NumPy"
LACKED = ("Conv", "ConvTranspose", "GRU", "LSTM")
"""Operators without a working float64 kernel in ONNX Runtime; a graph with one is not loaded there at all."""
CACHED_WEIGHT_BYTES, THREADED_WEIGHT_BYTES = 2**26, 2**28
"""Bytes of float64 weights that are kept between inferences: on one thread, and on several."""
VALUES_SHARE = 4
"""If weights are not kept, the values of the inputs that go through a graph together take at most this fraction of the
weights' memory."""
BYTES_AT_ONCE = 2**30
"""Bytes of values up to which several inputs are evaluated at a time."""


class Float64:
    """A graph that is evaluated in float64, with at most one copy of its weights.

    Attributes:
        evaluator: A description of the evaluator.
        reference: onnx's reference implementation; None where ONNX Runtime evaluates the graph.
        agreed: Keys of the inputs on which `repaconv.verification.float64_evaluator_check.differing_operators` found
            none.
    """

    def __init__(self, model: onnx.ModelProto, weights: Weights = MappingProxyType({})) -> None:
        """Choose ONNX Runtime if it has all kernels in float64, else onnx's reference implementation.

        Args:
            model: The graph.
            weights: Those of its weights that it has marked as external, in float64.
        """
        self._open = partial(_session, model, weights)
        self._session: Session | None = None
        with suppress(Exception):  # the runtime raises many classes
            if not any(node.op_type in LACKED for node in model.graph.node):
                self._session = self._open()
        self.reference = ReferenceEvaluation(model, weights) if self._session is None else None
        self.agreed = set[bytes]()
        self.evaluator = REFERENCE if self._session is None else RUNTIME

    def run(self, feeds: Feeds) -> dict[str, Any]:
        """Run the graph and return all outputs, floating-point ones in float64."""
        given = {name: wide(array) for name, array in feeds.items()}
        if self.reference is not None:
            return self.reference.run(given)
        self._session = self._session or self._open()
        return dict(self._session.run(given))

    def close(self) -> None:
        """Release ONNX Runtime's session, which is as large as the weights in float64; it reopens on demand."""
        self._session = None

    def run_all(self, calls: Sequence[Feeds]) -> list[dict[str, Any]]:
        """Run the graph on each of several inputs; weights are converted once for as many as memory allows."""
        if self.reference is None:
            return [self.run(feeds) for feeds in calls]
        return self.reference.run_all([{name: wide(array) for name, array in feeds.items()} for feeds in calls])

    def weights_kept(self, limit: float = CACHED_WEIGHT_BYTES) -> AbstractContextManager[None]:
        """Within it, weights that were converted to float64 are kept for the next inference.

        Args:
            limit: Bytes of all weights in float64; if they take more, none is kept.
        """
        return nullcontext() if self.reference is None else self.reference.weights_kept(limit)


def _session(model: onnx.ModelProto, weights: Weights) -> Session:
    """Open a session of ONNX Runtime in float64; large weights are converted apart from the graph."""
    import onnx_ir as ir

    from repaconv.graph.graph_without_weights import mark_as_external, split_off_weights

    given, large = mark_as_external(model)
    bare, apart = split_off_weights(widened(given))  # also those in half precision, which can be apart once widened
    kinds = {weight.name: ir.DataType(weight.data_type) for weight in bare.graph.initializer}
    return load_onnx(
        bare,
        {
            **apart,
            **{name: partial(converted, weight, kinds[name]) for name, weight in large.items()},
            **{name: partial(_numbers, weight, kinds[name]) for name, weight in weights.items()},
        },
        as_written=True,
    )


def _numbers(weight: ir.TensorProtocol, kind: ir.DataType) -> Array:
    return np.ascontiguousarray(weight.numpy(), kind.numpy())


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert all floating-point values of a graph to float64, its inputs and outputs included."""
    from repaconv.graph.element_type_conversion import retyped

    return retyped(model, WIDER)


PARAMETER_ENTRIES = 16
"""Inputs of at most this many numbers are sizes, axes, scales or limits, which decide what a node computes."""


HOMOGENEOUS = frozenset(
    (
        *REDUCTIONS,
        *("Add", "AveragePool", "Conv", "ConvTranspose", "Einsum", "Gemm", "GlobalAveragePool", "LeakyRelu"),
        *("MatMul", "MaxPool", "Mul", "Neg", "Pad", "Relu", "Sub"),
    )
)
"""Operators that compute a multiple of their output from the same multiple of their inputs."""
EXPONENTS, EXPONENTS_APART = 64, 4
"""Two inputs count as different ranges of values if the exponents of their largest numbers differ by this much, for
homogeneous operators (products then neither overflow nor vanish in float32) and for all others."""


class ReferenceEvaluation:
    """A graph that onnx's reference implementation evaluates in float64, with operators of our own.

    Weights are converted when a node reads them (within `weights_kept`, once), and values are freed after their last
    use.

    Attributes:
        nodes: The nodes in order, those included that convert values for operators without float64.
        outputs: Names of the outputs.
    """

    def __init__(self, model: onnx.ModelProto, weights: Weights = MappingProxyType({})) -> None:
        """See `Float64`."""
        from onnx.reference import ReferenceEvaluator

        from repaconv.graph.element_type_conversion import kept_constants
        from repaconv.graph.graph_without_weights import with_initializers

        self._weights = {weight.name: weight for weight in model.graph.initializer}
        self._apart = weights
        kinds = (*NARROW_FLOATS, DOUBLE)
        self._bytes = 8 * sum(prod(weight.dims) for weight in model.graph.initializer if weight.data_type in kinds)
        self._kept = kept_constants(model, WIDER)
        evaluator = ReferenceEvaluator(widened(with_initializers(model, ())), new_ops=own_operators())
        self.nodes: list[Any] = evaluator.rt_nodes_
        self.outputs = [output.name for output in model.graph.output]
        self._start: dict[str, Any] = {"": None, **evaluator.rt_inits_}
        self._converted: dict[str, Any] | None = None

    @contextmanager
    def weights_kept(self, limit: float) -> Iterator[None]:
        """See `Float64.weights_kept`."""
        before = self._converted
        if before is None and self._bytes <= limit:
            self._converted = {}
        try:
            yield
        finally:
            self._converted = before

    @np.errstate(all="ignore")  # the comparison reports values that are not finite
    def run(self, feeds: Feeds) -> dict[str, Any]:
        """Run the graph on float64 inputs and return all outputs."""
        (found,), _ = self._run_together([feeds])
        return found

    @np.errstate(all="ignore")
    def run_all(self, calls: Sequence[Feeds]) -> list[dict[str, Any]]:
        """Run the graph on each of several float64 inputs.

        Several at a time, each in a thread. If its weights are too large to be kept, inputs go through it node by node
        instead: as many as have values that take little memory, compared with the weights.
        """
        from threadpoolctl import ThreadpoolController

        blas = ThreadpoolController().select(user_api="blas")
        threads = min(len(calls), max((library["num_threads"] for library in blas.info()), default=1))
        if self._bytes <= (THREADED_WEIGHT_BYTES if threads > 1 else CACHED_WEIGHT_BYTES):
            with self.weights_kept(inf):
                return self._run_in_threads(calls, blas, threads) if threads > 1 else [*map(self.run, calls)]
        found, together = list[dict[str, Any]](), 1
        while len(found) < len(calls):
            outputs, largest = self._run_together(calls[len(found) : len(found) + together])
            found += outputs
            together = max(1, int(self._bytes * together / max(VALUES_SHARE * largest, 1)))
        return found

    def _run_in_threads(self, calls: Sequence[Feeds], blas: ThreadpoolController, threads: int) -> list[dict[str, Any]]:
        """Evaluate several inputs in parallel, each on one of BLAS's threads; returns the outputs of each input.

        Most operations of a network are too small for several threads, which would wait for each other longer than they
        compute. The memory of the values, relative to an input, is estimated from the two smallest inputs.
        """
        given = [sum(array.nbytes for array in feeds.values()) for feeds in calls]
        waiting, found = sorted(range(len(calls)), key=lambda at: -given[at]), dict[int, dict[str, Any]]()
        times, started = 0.0, [waiting.pop(), waiting.pop()]  # how many times an input's bytes its values take
        with warnings.catch_warnings(), thread_pool(threads) as pool:  # which operators of onnx change
            inline = not isinstance(pool, ThreadPoolExecutor)
            with blas.limit(limits=threads if inline else 1):
                while started:
                    ended = pool.map(lambda at: self._run_together([calls[at]]), started)
                    for at, ((outputs,), most) in zip(started, ended, strict=True):
                        found[at], times = outputs, max(times, most / max(given[at], 1))
                    started, taken = [], 0.0
                    while waiting and (not started or taken + times * given[waiting[-1]] <= BYTES_AT_ONCE):
                        taken += times * given[waiting[-1]]
                        started.append(waiting.pop())
        return [found[at] for at in range(len(calls))]

    def _run_together(self, calls: Sequence[Feeds]) -> tuple[list[dict[str, Any]], int]:
        """The outputs for each of several inputs, and the most bytes that values took at a time."""
        all_held: list[dict[str, Any]] = [{**self._start, **feeds} for feeds in calls]
        largest = 0
        for node, done in zip(self.nodes, _values_to_free(self.nodes, self.outputs), strict=True):
            with self.weights_kept(inf):
                for held in all_held:
                    held.update(self.run_node(node, held))
            largest = max(largest, sum(getattr(value, "nbytes", 0) for held in all_held for value in held.values()))
            for name in done:
                for held in all_held:
                    held.pop(name, None)
        return [{name: self._value(name, held) for name in self.outputs} for held in all_held], largest

    @np.errstate(all="ignore")
    def run_node(self, node: Any, held: Mapping[str, Any]) -> dict[str, Any]:
        """Run one node on values by name, and return its outputs by name."""
        if node.need_context():  # control flow, whose inner graphs read values that are not among its inputs
            context = {name: self._value(name, held) for name in (*self._start, *self._weights)} | dict(held)
            found = node.run(*(context[name] for name in node.input), context=context)
        else:
            found = node.run(*(self._value(name, held) for name in node.input))
        return {name: value for name, value in zip(node.output, found, strict=False) if name}

    def inputs_of(self, node: Any, held: Mapping[str, Any]) -> dict[str, Any]:
        """The values that a node reads as inputs, by name."""
        return {name: self._value(name, held) for name in node.input if name}

    def kind_of(self, node: Any, held: Mapping[str, Any]) -> Any:
        """A key that is equal for nodes of one operator with equal attributes, small inputs, shapes and ranges.

        None for control flow, and for inputs that are no arrays of finite numbers.
        """
        if node.need_context():
            return None
        step = EXPONENTS if node.op_type in HOMOGENEOUS else EXPONENTS_APART
        given: list[Any] = []
        for name in node.input:
            weight = None if name in held or name in self._start else self._weights[name]
            if weight is not None and prod(weight.dims) > PARAMETER_ENTRIES:
                given.append((weight.data_type, tuple(weight.dims)))
                continue
            value = self._value(name, held)
            key = None if value is None else _kind_of_value(value, step)
            if value is not None and key is None:
                return None
            given.append(key)
        attributes = sorted(entry.SerializeToString() for entry in node.onnx_node.attribute)
        return node.onnx_node.domain, node.op_type, tuple(attributes), tuple(given)

    def _value(self, name: str, held: Mapping[str, Any]) -> Any:
        from onnx import numpy_helper

        if name in held or name in self._start:
            return held[name] if name in held else self._start[name]
        if self._converted is not None and name in self._converted:
            return self._converted[name]
        array = self._apart[name].numpy() if name in self._apart else numpy_helper.to_array(self._weights[name])
        if name not in self._kept and self._weights[name].data_type in NARROW_FLOATS:
            array = array.astype(np.float64)
        if self._converted is not None:
            self._converted[name] = array
        return array


def _kind_of_value(value: Any, step: int) -> Any:
    """A key of an array: its numbers if it is small, else the signs that occur and its largest number's power of 2.

    Powers within ``step`` have one key.
    """
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        return None
    if value.size <= PARAMETER_ENTRIES:
        return value.dtype, value.shape, value.tobytes()
    least, most = float(value.min()), float(value.max())
    if not (isfinite(least) and isfinite(most)):
        return None
    return value.dtype, value.shape, least < 0, most > 0, round(frexp(max(-least, most))[1] / step)


def _values_to_free(nodes: Sequence[Any], wanted: Sequence[str]) -> list[list[str]]:
    """For each node, the values that no later node reads; empty if there is control flow, which may read any value."""
    if any(node.need_context() for node in nodes):
        return [[] for _ in nodes]
    seen, found = {"", *wanted}, list[list[str]]()
    made = {name for node in nodes for name in node.output}
    for node in reversed(nodes):
        last = [name for name in dict.fromkeys((*node.input, *node.output)) if name in made and name not in seen]
        seen.update(last)
        found.append(last)
    return found[::-1]


def wide(array: Array) -> Array:
    """Convert a floating-point array to float64; return one that is, or any other array, itself."""
    return array.astype(np.float64, copy=False) if array.dtype.kind == "f" else array
