"""Whether the float64 evaluation of a graph computes what ONNX Runtime computes, operator by operator.

The difference between FP32 and float64 counts as rounding, and a candidate may differ as much. If the float64
evaluation of an operator computes another function than ONNX Runtime, the difference is not rounding. The network's
outputs cannot distinguish the two cases, since later operators can amplify the rounding of an earlier one. Every
operator is therefore evaluated on the values that it has in ONNX Runtime, so that only its own rounding remains. Among
operators with equal attributes, shapes and ranges of values, one is compared for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.core.errors import first_line, first_names
from repaconv.engines.contract import Feeds, Session
from repaconv.graph.onnx_files import names_read
from repaconv.results import Tolerance
from repaconv.verification.comparison import Comparison, PerNeighborhood, surely_within
from repaconv.verification.float64_graphs import PARAMETER_ENTRIES, Float64, ReferenceEvaluation, wide
from repaconv.verification.graph_with_cached_outputs import Evaluated, key_of
from repaconv.verification.model_runners import load_onnx
from repaconv.verification.onnx_model_loading import loaded
from repaconv.verification.rounding import (
    HALF_ROUNDINGS,
    JITTER,
    JITTERED,
    JITTERS,
    MEASURED,
    ROUNDING_SAMPLES,
    SATURATED,
    Movement,
    Rounding,
    jittered_feeds,
    movement,
)
from repaconv.verification.tolerances import FLOAT32

if TYPE_CHECKING:
    import onnx

NODES_AT_ONCE, WEIGHT_BYTES_AT_ONCE = 64, 2**24
"""Nodes whose values are held at a time, and bytes of the weights that they read, if they are several nodes."""
COORDINATES = ("Resize", "Upsample")
"""Operators that compute coordinates in float32, whatever the type of their values is. The error of the coordinate of
pixel n is about n * 2**-24, and neighboring pixels of random images differ by more than their own size."""
COORDINATE_ERROR = 4 * 2.0**-24
"""Allowed error of such an operator per pixel along the axis. Measured: at most 1.6 * 2**-24."""
ACTIVATIONS = ("Celu", "Elu", "Erf", "Gelu", "Mish", "Selu", "Sigmoid", "Softplus", "Swish", "Tanh")
"""Functions whose kernels round numbers near 1 on the way, so that small values have errors of that size."""
NEAR_ONE = 4 * SATURATED
"""Allowed size of that error. ONNX Runtime's Sigmoid has an error of 1.3e-7."""
MOVES = (
    *("Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "SpaceToDepth"),
    *("Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
)
"""Operators that move numbers and compute none: they are compared in float32, in a fraction of the time."""
MOST_NAMED_OPERATORS = 3
"""Differing operators that are named."""


def graph_rounding(path: Path) -> Callable[[Feeds], Rounding]:
    """Rounding of a graph that no run knows, call by call; nothing where it is not evaluated in float64."""
    given = cache(lambda: Evaluated(loaded(path)))

    def rounding(feeds: Feeds) -> Rounding:
        def measured() -> Iterator[Movement]:
            with suppress(Exception):  # whatever cannot be evaluated in float64, of many classes
                yield movement(given().run(feeds), given().truth(feeds))

        return Rounding(MEASURED, measured, lambda: differing_operators(given().model, given().float64, feeds))

    return rounding


def differing_operators(model: onnx.ModelProto, float64: Float64, *calls: Feeds) -> str:
    """Describe the operators that compute something else in float64 than ONNX Runtime does; empty if there are none.

    A graph that ONNX Runtime itself evaluates in float64 has none.

    Args:
        model: The graph in float32.
        float64: Its evaluator.
        calls: The inferences. The first one with such operators is described.
    """
    calls = tuple(feeds for feeds in calls if key_of(feeds) not in float64.agreed)
    if float64.reference is None or not calls:
        return ""
    runtime = _RuntimeValues(model, float64.reference)
    inferences = [_Inference(runtime, feeds) for feeds in calls]
    for place in range(len(runtime.pieces)):
        with float64.weights_kept(inf):
            for number, inference in enumerate(inferences):
                if not inference.compare(place):  # later inferences are no longer needed: the first one is described
                    inferences = inferences[: number + 1]
                    break
        runtime.pieces[place].close()
    differing = next(filter(None, (inference.description() for inference in inferences)), "")
    if not differing:
        float64.agreed.update(map(key_of, calls))
    return differing


def not_compared(error: Exception) -> str:
    """Return the description for the case that either runtime raised an exception."""
    return f"its float64 evaluation could not be compared with ONNX Runtime ({first_line(error)})"


class _Inference:
    """The comparison of all operators on the values of one inference, piece by piece."""

    def __init__(self, runtime: _RuntimeValues, feeds: Feeds) -> None:
        self._runtime, self._feeds = runtime, feeds
        self._values = dict[str, Any]()
        self._between = dict[str, Any]()  # values of conversion nodes, which only the evaluator's graph has
        self._differing: list[Any] = []
        self._error = ""

    def compare(self, place: int) -> bool:
        """Run the next piece under ONNX Runtime and compare its operators; whether all of them agreed so far."""
        if not self._error:
            try:
                self._compare(place)
            except Exception as error:  # of either runtime, of many classes
                self._error, self._values, self._between = not_compared(error), {}, {}
        return not (self._error or self._differing)

    def description(self) -> str:
        """Description of the differing operators; empty if all operators agree."""
        if self._error:
            return self._error
        found = [f"{node.op_type} {node.onnx_node.name or node.output[0]}" for node in self._differing]
        named = first_names(found, MOST_NAMED_OPERATORS)
        return f"the float64 evaluation of {named} is not what ONNX Runtime computes" if found else ""

    def _compare(self, place: int) -> None:
        runtime, reference, between = self._runtime, self._runtime.reference, self._between
        values = self._values = self._values | runtime.pieces[place].run(self._feeds, self._values)
        known = {**self._feeds, **values}
        for node, names in runtime.compared[place]:
            found = {name: values[name] for name in node.output if name in values}
            read = {name: known[name] for name in names if name in known}
            if node.op_type in MOVES and found and runtime.moves_alike(node, read | between, found):
                continue
            made = runtime.made.issuperset(name for name in node.output if name)
            kind = reference.kind_of(node, read | between) if made and found and _are_reals(found) else None
            if kind in runtime.agreed:
                continue
            held = {name: _wide(value) for name, value in read.items()} | between
            if not made:
                between.update(reference.run_node(node, held))
            elif found and not _agrees(node, reference, held, found):
                self._differing.append(node)
            elif kind is not None:
                runtime.agreed.add(kind)
        self._values = {name: value for name, value in values.items() if name in runtime.later[place]}


class _RuntimeValues:
    """The values of a graph in ONNX Runtime without fusions, for `NODES_AT_ONCE` nodes at a time.

    The graph is cut into pieces (`_cut`). Each piece runs in a session of its own, on values of earlier pieces. Every
    node is therefore computed once, and `_Inference` frees a value after its last use.

    Attributes:
        reference: The graph's evaluator in float64.
        made: Names of the values that the graph's nodes compute.
        pieces: The pieces in order.
        compared: For each piece, the evaluator's nodes whose inputs and outputs are all known after it, each with the
            names of what it reads.
        later: For each piece, the values that are read after it.
        agreed: Kinds of nodes that were found to agree.
    """

    def __init__(self, model: onnx.ModelProto, reference: ReferenceEvaluation) -> None:
        self.reference, self.agreed = reference, set[Any]()
        nodes = model.graph.node
        self.made = {name for node in nodes for name in node.output if name}
        cut = _cut(model.graph)
        at = {name: place for place, piece in enumerate(cut) for node in piece for name in node.output}
        self.compared: list[list[tuple[Any, tuple[str, ...]]]] = [[] for _ in cut]
        place, shown = 0, set(reference.outputs)
        for node in reference.nodes:  # with the first piece after which all its inputs and outputs are known
            read, written = tuple(names_read(node.onnx_node)), node.output
            place = max([place, *(at.get(name, 0) for name in (*read, *written))])
            self.compared[place].append((node, read))
            shown.update(read)
        later: set[str] = set()
        self.later, self.pieces = list[set[str]](), list[_Piece]()
        for nodes, compared in zip(cut[::-1], self.compared[::-1], strict=True):
            self.later.append(later)
            gives = {name for node in nodes for name in node.output} & (shown | later) & self.made
            self.pieces.append(_Piece(model, nodes, gives))
            later = later.union(*(names_read(node) for node in nodes))
            later = later.union(*((*read, *node.output) for node, read in compared))
        self.later.reverse()
        self.pieces.reverse()

    def moves_alike(self, node: Any, held: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
        """Whether the evaluator moves numbers exactly as ONNX Runtime does; one node is compared for all of its kind.

        Where numbers go to does not depend on them.
        """
        kind = _move(node, self.reference.inputs_of(node, held), found)
        if kind is not None and kind in self.agreed:
            return True
        agrees = _gives(node, self.reference, held, found)
        if agrees and kind is not None:
            self.agreed.add(kind)
        return agrees


def _cut(graph: onnx.GraphProto) -> list[list[onnx.NodeProto]]:
    """The nodes of a graph in pieces, of `NODES_AT_ONCE` nodes and `WEIGHT_BYTES_AT_ONCE` of weights at most."""
    size = {weight.name: weight.ByteSize() for weight in graph.initializer}
    found: list[list[onnx.NodeProto]] = []
    held = inf
    for node in graph.node:
        reads = sum(size.get(name, 0) for name in names_read(node))
        held += reads
        if held > WEIGHT_BYTES_AT_ONCE or len(found[-1]) == NODES_AT_ONCE:
            found.append([])
            held = reads
        found[-1].append(node)
    return found


class _Piece:
    """Some nodes of a graph under ONNX Runtime.

    If they do not run alone, or read something other than tensors, the whole graph computes their values.
    """

    def __init__(self, model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], gives: Iterable[str]) -> None:
        self._model, self._nodes, self._gives = model, nodes, sorted(gives)
        self._session: Session | None = None
        self._alone = True

    def run(self, feeds: Feeds, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of the nodes by name, for the graph's inputs and the values of earlier pieces."""
        if not self._gives:
            return {}
        if self._alone:
            with suppress(Exception):  # of many classes: then the whole graph is run
                known = {**feeds, **values}
                self._session = self._session or load_onnx(self._cut_out(known), as_written=True)
                return dict(self._session.run({port.name: known[port.name] for port in self._session.inputs}))
            self._alone, self._session = False, None
        self._session = self._session or load_onnx(self._whole(), as_written=True)
        return dict(self._session.run(feeds))

    def close(self) -> None:
        """Release the session, which is as large as the weights that the nodes read."""
        self._session = None

    def _cut_out(self, known: Mapping[str, Any]) -> onnx.ModelProto:
        """The nodes as a graph; constants that they read are computed in it, since some operators want constants."""
        import onnx

        graph = self._model.graph
        given = {name for node in self._nodes for name in node.output}
        read = {name for node in self._nodes for name in names_read(node)} - given
        constants = [node for node in graph.node if node.op_type == "Constant" and node.output[0] in read]
        weights = [weight for weight in graph.initializer if weight.name in read]
        fixed = {weight.name for weight in weights}.union(node.output[0] for node in constants)
        found = onnx.ModelProto(
            ir_version=self._model.ir_version,
            opset_import=self._model.opset_import,
            functions=self._model.functions,
            graph=onnx.GraphProto(name=graph.name, node=[*constants, *self._nodes], initializer=weights),
        )
        for name in sorted(read & known.keys() - fixed):
            kind = onnx.helper.np_dtype_to_tensor_dtype(known[name].dtype)
            found.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, None))
        found.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._gives)
        return found

    def _whole(self) -> onnx.ModelProto:
        """The whole graph, which gives the nodes' values."""
        import onnx

        from repaconv.graph.graph_without_weights import with_initializers

        found = with_initializers(self._model, self._model.graph.initializer)
        del found.graph.output[:]
        found.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._gives)
        return found


def _wide(value: Any) -> Any:
    if isinstance(value, list):
        return [_wide(each) for each in value]
    return wide(value) if isinstance(value, np.ndarray) else value


def _array(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, np.generic) else value


def _move(node: Any, given: Mapping[str, Any], found: Mapping[str, Any]) -> Any:
    """Return a key that is equal for nodes that move numbers alike; None if values that say where to are many.

    Args:
        node: One of the operators in `MOVES`.
        given: Its inputs by name.
        found: Its outputs by name.
    """
    inputs = [given.get(name) for name in node.input]
    places = [] if node.op_type == "Concat" else [each for each in inputs[1:] if isinstance(each, np.ndarray)]
    if not all(isinstance(each, np.ndarray) for each in (*given.values(), *found.values())):
        return None
    if any(each.size > PARAMETER_ENTRIES for each in places):
        return None
    attributes = sorted(entry.SerializeToString() for entry in node.onnx_node.attribute)
    shapes = tuple(None if each is None else (each.dtype, each.shape) for each in (*inputs, *found.values()))
    numbers = tuple(each.tobytes() for each in places)
    return node.onnx_node.domain, node.op_type, tuple(attributes), shapes, numbers


def _are_reals(found: Mapping[str, Any]) -> bool:
    """Whether all values are arrays of floating-point numbers, without any discrete choice."""
    return all(isinstance(value, np.ndarray) and value.dtype.kind == "f" for value in found.values())


def _gives(node: Any, reference: ReferenceEvaluation, held: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether the evaluator computes exactly the numbers of ONNX Runtime for a node, on values of the same types."""
    with suppress(Exception):  # of many classes: then float64 decides
        given = reference.run_node(node, held)
        return all(isinstance(one, np.ndarray) and np.array_equal(one, given[name]) for name, one in found.items())
    return False


@np.errstate(all="ignore")
def _agrees(node: Any, reference: ReferenceEvaluation, held: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether a node's outputs in ONNX Runtime differ from float64 only by rounding."""
    given = {name: _array(value) for name, value in reference.run_node(node, held).items()}

    def movements() -> Iterator[Movement]:
        inputs = {name: one for name, one in reference.inputs_of(node, held).items() if isinstance(one, np.ndarray)}
        for seed in range(JITTERS if node.need_context() else ROUNDING_SAMPLES):  # a loop takes as long as a network
            other = reference.run_node(node, {**held, **jittered_feeds(inputs, JITTER, seed)})
            moved = movement({name: _array(value) for name, value in other.items()}, given, discrete=True)
            yield {name: one for name, one in moved.items() if one.shape == given[name].shape}  # sizes are no numbers

    rounding = Rounding(JITTERED, movements)
    for name, single in found.items():
        right = given[name]
        rtol = FLOAT32
        if isinstance(single, np.ndarray) and single.dtype.kind == "f":
            rtol = max(rtol, HALF_ROUNDINGS * float(np.finfo(single.dtype).eps))
            if node.op_type in COORDINATES:
                rtol = max(rtol, COORDINATE_ERROR * max(single.shape, default=0))
        if isinstance(single, np.ndarray) and isinstance(right, np.ndarray):
            if surely_within(single, right, rtol, NEAR_ONE if node.op_type in ACTIVATIONS else 0.0):
                continue
            right = right.astype(single.dtype)  # so that what overflows in float32 is infinite
        allowed = Tolerance(kind="exact", rtol=rtol, atol=NEAR_ONE if node.op_type in ACTIVATIONS else 0.0)
        compared = Comparison("float32", allowed, None, scale=PerNeighborhood, vague=inf)
        compared.add({name: _wide(single)}, {name: _wide(right)}, rounding=rounding)
        if any(link.verdict == "failed" for link in compared.links("onnx", "float64")):
            return False
    return True
