"""A network of no known method as what a run is of: its module in float64 is the reference, the rest is its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.core.errors import UsageProblem
from repaconv.engines.contract import Network, Port
from repaconv.graph.float64_graph import retyped
from repaconv.results import NetworkFold
from repaconv.sources.named_architectures import Architecture, Built, built
from repaconv.sources.onnx_model_variants import GraphForm
from repaconv.sources.onnx_source import GraphSubject
from repaconv.sources.source_model import TRAINING
from repaconv.verification.model_runners import TorchRunner
from repaconv.verification.onnx_model_loading import folded

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import onnx

    from repaconv.engines.contract import Array, Feeds


# --- A module in float64 with the numbers that ONNX's operators hold as attributes: those are float32 in any graph.
#
# So are they in torch's float32 kernels. All other numbers of a module's code are constants of its graph, and exact.

ATTRIBUTES = {
    "leaky_relu": ("negative_slope",),
    "elu": ("alpha", "scale"),
    "hardtanh": ("min_val", "max_val"),
    "softplus": ("beta", "threshold"),
    "addcmul": ("value",),
    "addcdiv": ("value",),
    "addmm": ("beta", "alpha"),
    "native_layer_norm": ("eps",),
    "native_group_norm": ("eps",),
}
"""Arguments of torch's operators that its exporter writes as attributes. A BatchNorm's eps is none: it is folded, in
float64, into what stands before."""


class NetworkRunner(TorchRunner):
    """See `TorchRunner`."""

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Inputs to outputs, floating ones in the precision asked for."""
        with _as_attributes():
            return super().run(feeds)


def _as_attributes() -> AbstractContextManager[Any]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Single(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            with self:  # what is made of several has their numbers
                parts = operator.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            held = ATTRIBUTES.get(operator._schema.name.partition("::")[2].rstrip("_"), ())
            names = [argument.name for argument in operator._schema.arguments]

            def single(name: str, value: Any) -> Any:
                return float(np.float32(value)) if name in held and isinstance(value, float) else value

            given = [single(name, value) for name, value in zip(names, args, strict=False)]
            return operator(*given, **{name: single(name, value) for name, value in kwargs.items()})

    return Single()  # type: ignore[no-untyped-call]


# --- A network of no known method as what a run is of: its module in float64 is the reference, the rest is its graph.


@dataclass(frozen=True)
class NetworkSubject(GraphSubject):
    """See `repaconv.sources.source_model.Subject`; built and loaded again when it is needed, exactly as `fold` did."""

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
        from repaconv.checkpoints import read_checkpoint

        found = read_checkpoint(self.source, self.folded.origin.weights, self.folded.origin.sha256, again=True)
        return built(Architecture(self.folded.arch, self.folded.config), found.tensors, found.names)
