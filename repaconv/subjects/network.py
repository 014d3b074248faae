"""A network of no known method as what a run is of: its module in float64 is the reference, the rest is its graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from repaconv.artefacts import NetworkFold
from repaconv.engines.contract import Network, Port
from repaconv.errors import UsageProblem
from repaconv.graphs.retyping import retyped
from repaconv.subjects.architectures import Architecture, Built, built
from repaconv.subjects.attributes import NetworkRunner
from repaconv.subjects.given import folded
from repaconv.subjects.graph import GraphSubject
from repaconv.subjects.graph_forms import GraphForm
from repaconv.subjects.subject import TRAINING

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class NetworkSubject(GraphSubject):
    """See `repaconv.subjects.subject.Subject`; built and loaded again when it is needed, exactly as `fold` did."""

    folded: NetworkFold

    @cached_property
    def reference(self) -> NetworkRunner:  # type: ignore[override]
        """The module in float64."""
        return self._runner(double=True)

    @cached_property
    def exact(self) -> GraphForm:
        """Its graph folded again, in float64."""
        has = self.folded
        smaller = folded(self.source, self.exported, has.reverted)[0] if has.changes else self.exported
        return self._form(smaller, double=bool(has.float64))

    @cached_property
    def as_exported(self) -> GraphForm | None:
        """Its graph in float64, where `fold` saw it further off than a fold may be."""
        link, usual = self.folded.links[0], self.folded.tolerances["fold"]
        off = link.metrics.max_rel_error if link.metrics and link.name == "fold" else 0.0
        return self._form(self.exported, double=True) if off > usual and self.folded.float64 else None

    @cached_property
    def exported(self) -> onnx.ModelProto:
        """Its graph in float64, as it was exported."""
        import onnx

        return onnx.load(self.run.payload(self.folded.data))

    @cached_property
    def given(self) -> onnx.ModelProto:
        """The same in float32."""
        return retyped(self.exported, {11: 1})

    def single(self) -> NetworkRunner:  # type: ignore[override]
        """The module in float32."""
        return self._runner(double=False)

    def network(self, form: str) -> Network:
        """The module as it was given; its deploy form is a graph.

        Raises:
            UsageProblem: If that is asked for.
        """
        if form != TRAINING:
            raise UsageProblem(
                f"the deploy form of {self.run.folder} is a graph, and this target's runtime runs torch modules.",
                hint="Give a target that runs graphs, as --target x86-64.",
                code="run.no-module",
            )
        return Network(self._built.module, self.inputs, tuple(Port(name, (), "float32") for name in self.outputs))

    def _runner(self, *, double: bool) -> NetworkRunner:
        import copy

        module = copy.deepcopy(self._built.module)
        names = tuple(port.name for port in self.inputs)
        return NetworkRunner(module, module.state_dict(), double=double, inputs=names, outputs=self.outputs)

    @cached_property
    def _built(self) -> Built:
        from repaconv.checkpoint import read_checkpoint

        found = read_checkpoint(self.source, self.folded.origin.weights, self.folded.origin.sha256, again=True)
        return built(Architecture(self.folded.arch, self.folded.config), found.tensors, found.names)
