"""A graph and what it computes: opened once and called once with the same inputs, however many proofs ask."""

from __future__ import annotations

from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from repaconv.core.memory_release import release_freed_memory
from repaconv.engines.contract import Feeds, Port, Session
from repaconv.verification.float64_graphs import Float64
from repaconv.verification.model_runners import load_onnx
from repaconv.verification.onnx_model_loading import in_single
from repaconv.verification.probe_inputs import Probes, probes

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

DEAR = 10**9
"""A graph that multiplies more often on one image is proved on batches of one and two: to run it is what takes time."""


class Evaluated:
    """See `repaconv.verification.model_runners.Runner`; outputs belong to all who ask, and stay as they are.

    Attributes:
        model: The graph, with its weights.
        sample: Inputs that it takes, where somebody gave some.
    """

    def __init__(self, model: onnx.ModelProto, sample: Feeds | None = None) -> None:
        self.model, self.sample = model, sample
        self._known: dict[bytes, dict[str, Any]] = {}
        self._true: dict[bytes, dict[str, Any]] = {}

    @cached_property
    def session(self) -> Session:
        """Under ONNX Runtime.

        Raises:
            Refused: If it does not load the graph.
        """
        return load_onnx(self.model)

    def close(self) -> None:
        """Let its session go, which is as large as its weights; what it told stays known, and it opens again."""
        if self.__dict__.pop("session", None) is not None:
            release_freed_memory()

    @property
    def inputs(self) -> tuple[Port, ...]:
        """What it takes."""
        return self.session.inputs

    def run(self, feeds: Feeds) -> dict[str, Any]:
        """All outputs; whatever the runtime raises is raised again by the next call."""
        key = key_of(feeds)
        if key not in self._known:
            self._known[key] = dict(self.session.run(feeds))
        return dict(self._known[key])

    def as_written(self, feeds: Feeds) -> dict[str, Any]:
        """All outputs where nothing of the graph is fused."""
        return dict(load_onnx(self.model, as_written=True).run(feeds))

    @cached_property
    def float64(self) -> Float64:
        """It in float64; raises whatever says that nothing evaluates it so."""
        return Float64(self.model)

    def truth(self, feeds: Feeds) -> dict[str, Any]:
        """All outputs in float64."""
        key = key_of(feeds)
        if key not in self._true:
            self._true[key] = self.float64.run(feeds)
        return dict(self._true[key])

    @cached_property
    def probes(self) -> Probes:
        """Inputs that it takes.

        Raises:
            Unrunnable: If it runs with none.
        """
        from repaconv.graph.compute_costs import macs

        return probes(self.model, self.run, dear=(macs(self.settled) or 0) > DEAR, sample=self.sample)

    @cached_property
    def stored(self) -> ir.Model:
        """It as its file holds it, to be counted."""
        from repaconv.graph.model_rewriting import as_stored

        return as_stored(self.model)

    @cached_property
    def settled(self) -> ir.Model:
        """It with every shape that can be known, to be looked at."""
        from repaconv.graph.model_rewriting import read
        from repaconv.graph.shape_constants import settle

        graph = read(self.model)
        settle(graph)
        return graph

    @cached_property
    def single(self) -> Evaluated:
        """It in float32 where it is of half precision, which not every runtime computes in; else itself."""
        model = in_single(self.model)
        return self if model is self.model else Evaluated(model, self.sample)


def key_of(feeds: Feeds) -> bytes:
    """Equal for equal inputs."""
    found = sha256()
    for name, array in feeds.items():
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(array.tobytes() if array.dtype.kind != "O" else repr(array.tolist()).encode())
    return found.digest()
