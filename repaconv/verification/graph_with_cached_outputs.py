"""An ONNX graph with a cached session and cached outputs, shared by all comparisons that need them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core.memory_release import release_freed_memory
from repaconv.engines.contract import Feeds, Port, Session
from repaconv.graph.models_in_onnx_ir import release_weights
from repaconv.graph.weights_in_files import in_file
from repaconv.verification.float64_graphs import Float64
from repaconv.verification.model_runners import load_onnx
from repaconv.verification.onnx_model_loading import in_single
from repaconv.verification.probe_inputs import Probes, probes

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

    from repaconv.graph.compute_costs import Matrices
    from repaconv.graph.float64_rewriting import Float64Graph

EXPENSIVE_MACS = 10**9
"""Multiply-accumulate operations per image above which a graph is verified on fewer batches, to save time."""

KEPT_SESSION_BYTES = 2**27
"""Bytes of weights up to which a session that is needed again stays open, instead of being loaded a second time."""

KEPT_DURING_FOLD_BYTES = 2**26
"""Bytes of weights up to which sessions and other folds stay in memory while a graph is folded, which takes most."""


class Evaluated:
    """A graph with cached outputs; a `repaconv.verification.model_runners.Runner`. Callers must not modify the outputs.

    Attributes:
        sample: Sample inputs, if the user gave some.
        in_float64: The same graph before its weights were rounded, where it was folded in float64.
    """

    def __init__(
        self, model: onnx.ModelProto, sample: Feeds | None = None, in_float64: Float64Graph | None = None
    ) -> None:
        self._model: onnx.ModelProto | None = model
        self.sample, self.in_float64 = sample, in_float64
        self._outputs: dict[bytes, dict[str, Any]] = {}
        self._float64_outputs: dict[bytes, dict[str, Any]] = {}
        self._macs: dict[tuple[tuple[str, int], ...], int | None] = {}

    @property
    def model(self) -> onnx.ModelProto:
        """The graph, with its weights; they are rounded again if they were released."""
        if self._model is None:
            from repaconv.graph.float64_rewriting import rounded_to_float32

            assert self.in_float64 is not None
            self._model = rounded_to_float32(self.in_float64)
        return self._model

    @cached_property
    def session(self) -> Session:
        """The ONNX Runtime session.

        Raises:
            Refused: ONNX Runtime does not load the graph.
        """
        return load_onnx(self.model)

    def close(self) -> None:
        """Release its sessions, each as large as the weights; cached outputs are kept, and they reopen on demand.

        So is the session in float64, if the graph is large.
        """
        opened = [name for name in ("session", "_session_without_fusions") if self.__dict__.pop(name, None) is not None]
        if "float64" in self.__dict__ and not self.may_stay_open:
            self.float64.close()
            opened.append("float64")
        if opened:
            release_freed_memory()

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of its weights."""
        size: int = sum(weight.ByteSize() for weight in self.model.graph.initializer)
        return size

    @property
    def may_stay_open(self) -> bool:
        """Whether its weights are so few that its session may stay open until it is needed again."""
        return self.weight_bytes <= KEPT_SESSION_BYTES

    def discard(self) -> None:
        """Release what the graph holds besides its weights: reference cycles keep that until garbage collection."""
        self.__dict__.pop("float64", None)
        self.close()
        if (read := self.__dict__.pop("_read", None)) is not None:
            release_weights(read.settled)

    def release_while_folding(self) -> None:
        """Release what a large graph holds, before another fold is made; it is made again if it is still needed.

        The weights are released too, if the same fold in float64 has them, which keeps them in a file.
        """
        if self.weight_bytes <= KEPT_DURING_FOLD_BYTES:
            return
        if self.in_float64 is None:
            self.close()
            return
        self.discard()
        self._model = None
        release_freed_memory()

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The inputs of the graph."""
        return self.session.inputs

    def run(self, feeds: Feeds) -> dict[str, Any]:
        """Run the graph under ONNX Runtime, or return the cached outputs for equal inputs; errors are not cached."""
        key = key_of(feeds)
        if key not in self._outputs:
            self._outputs[key] = dict(self.session.run(feeds))
        return dict(self._outputs[key])

    def as_written(self, feeds: Feeds) -> dict[str, Any]:
        """Run the graph under ONNX Runtime without fusions."""
        session = self._session_without_fusions
        if not self.may_stay_open:
            del self._session_without_fusions
        return dict(session.run(feeds))

    @cached_property
    def _session_without_fusions(self) -> Session:
        return load_onnx(self.model, as_written=True)

    @cached_property
    def float64(self) -> Float64:
        """The float64 evaluator of the graph; raises any exception if there is none for it."""
        return Float64(self.model)

    def truth(self, feeds: Feeds) -> dict[str, Any]:
        """Evaluate the graph in float64, or return the cached outputs for equal inputs."""
        key = key_of(feeds)
        if key not in self._float64_outputs:
            self._float64_outputs[key] = self.float64.run(feeds)
        return dict(self._float64_outputs[key])

    def truths(self, calls: Sequence[Feeds]) -> None:
        """Evaluate the graph in float64 on several inputs at the cost of one conversion of its weights; see `truth`."""
        missing = {key: feeds for feeds in calls if (key := key_of(feeds)) not in self._float64_outputs}
        if missing:
            self._float64_outputs |= zip(missing, self.float64.run_all([*missing.values()]), strict=True)

    @cached_property
    def probes(self) -> Probes:
        """Inputs with which the graph runs.

        Raises:
            Unrunnable: No such inputs were found.
        """
        from repaconv.graph.compute_costs import macs

        return probes(self.model, self.run, expensive=(macs(self.settled) or 0) > EXPENSIVE_MACS, sample=self.sample)

    @property
    def parameters(self) -> int:
        """See `repaconv.graph.compute_costs.parameters`."""
        return self._read.parameters

    @property
    def matrices(self) -> Matrices:
        """See `repaconv.graph.compute_costs.matrices`."""
        return self._read.matrices

    def macs(self, usual: Mapping[str, int]) -> int | None:
        """Multiply-accumulates of one inference of usual sizes, counted once; None if some shape is unknown."""
        from repaconv.graph.compute_costs import macs_at, macs_at_ones

        key = tuple(sorted(usual.items()))
        if key not in self._macs:
            found = macs_at_ones(self.settled, usual.keys()) if set(usual.values()) <= {1} else None
            self._macs[key] = macs_at(self.model, usual) if found is None and usual else found
        return self._macs[key]

    @property
    def settled(self) -> ir.Model:
        """The graph with all inferred shapes, for reading only."""
        return self._read.settled

    @cached_property
    def _read(self) -> _Read:
        """Read once: constants are counted as they are stored, before shapes that are computed become constants.

        Of a graph with an If that a constant decides they are counted afterwards: only then are all readers known.
        So are rows of a table, at indices computed from shapes, that products multiply by.
        """
        from repaconv.graph.compute_costs import constant_factors, matrices, parameters
        from repaconv.graph.models_in_onnx_ir import as_stored, with_shapes
        from repaconv.graph.nodes_and_constants import nodes_of
        from repaconv.graph.shape_folding import fold_shapes

        graph = as_stored(self.model)
        counted, undecided = parameters(graph), len(nodes_of(graph, "If"))
        stored, given = constant_factors(graph), set(graph.graph.initializers)
        fold_shapes(with_shapes(graph))
        _move_to_file(value for name, value in graph.graph.initializers.items() if name not in given)
        settled = constant_factors(graph)
        if len(nodes_of(graph, "If")) < undecided:
            counted, stored = parameters(graph), settled
        return _Read(counted, matrices({**settled, **stored}), graph)

    @cached_property
    def single(self) -> Evaluated:
        """The graph converted to float32 if it has half precision, which not every runtime supports; else itself."""
        model = in_single(self.model)
        return self if model is self.model else Evaluated(model, self.sample)


class _Read(NamedTuple):
    """The values read from a graph."""

    parameters: int
    matrices: Matrices
    settled: ir.Model


def _move_to_file(values: Iterable[ir.Value]) -> None:
    """Keep the numbers of constants in a file: they may be as many as the graph's weights, and are rarely read."""
    known = {value: value.const_value for value in values if value.const_value is not None}
    read = in_file(known.values())
    for value, weight in known.items():
        value.const_value = read.get(weight, weight)


def key_of(feeds: Feeds) -> bytes:
    """Hash the inputs, as the key of the cache."""
    found = sha256()
    for name, array in feeds.items():
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(array.tobytes() if array.dtype.kind != "O" else repr(array.tolist()).encode())
    return found.digest()
