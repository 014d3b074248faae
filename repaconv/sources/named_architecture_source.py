"""The source model of a network that is built by architecture name.

The torch module in float64 is the reference. All other forms come from the ONNX graph that was exported from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.core.errors import UsageProblem
from repaconv.engines.contract import Network, Port
from repaconv.graph.element_type_conversion import retyped
from repaconv.results import NetworkFold
from repaconv.sources.graph_fold import folded
from repaconv.sources.named_architectures import Architecture, BuiltNetwork, build_network
from repaconv.sources.onnx_graph_runner import GraphForm
from repaconv.sources.onnx_source import OnnxSource
from repaconv.sources.source_model import TRAINING
from repaconv.verification.model_runners import TorchRunner

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import onnx

    from repaconv.engines.contract import Array, Feeds


# Float attributes of ONNX operators are float32 in every graph, and so are these numbers in torch's float32 kernels.
# The float64 module uses them rounded to float32. All other numbers in a module's code become constants of the graph,
# which are exact.

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
"""Arguments of torch operators that the exporter writes as attributes. A BatchNorm's eps is not one of them: it is
folded, in float64, into the layer before."""


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
"""An operator of torch that reads a mask as numbers of the queries' type, whatever its own type is."""


class NetworkRunner(TorchRunner):
    """A `TorchRunner` that rounds the `ATTRIBUTES` of operators to float32, and casts masks of attention."""

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run the module and return all outputs, floating-point ones in the chosen precision."""
        with _exact_operators():
            return super().run(feeds)


def _exact_operators() -> AbstractContextManager[Any]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Single(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # to skip it means to import it, which takes a second

        def __torch_dispatch__(
            self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            with self:  # a composite operator passes its arguments on to its parts
                parts = operator.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            name = operator._schema.name.partition("::")[2].rstrip("_")
            if name == ATTENTION and (mask := kwargs.get("attn_mask")) is not None:
                kwargs = {**kwargs, "attn_mask": mask.to(args[0].dtype)}
            held = ATTRIBUTES.get(name, ())
            names = [argument.name for argument in operator._schema.arguments]

            def single(name: str, value: Any) -> Any:
                return float(np.float32(value)) if name in held and isinstance(value, float) else value

            given = [single(name, value) for name, value in zip(names, args, strict=False)]
            return operator(*given, **{name: single(name, value) for name, value in kwargs.items()})

    return Single()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class ArchitectureSource(OnnxSource):
    """The source model of a network that is built by the name of its architecture: see `SourceModel`.

    The module is built and its weights are loaded on first use, exactly as `fold` did.
    """

    folded: NetworkFold

    @cached_property
    def reference(self) -> NetworkRunner:  # type: ignore[override]
        """The torch module in float64."""
        return self._runner(double=True)

    @cached_property
    def exact(self) -> GraphForm:
        """The exported graph, folded again, in float64."""
        has = self.folded
        smaller = folded(self.source, self.exported, has.reverted).model if has.changes else self.exported
        return self._form(smaller, double=bool(has.float64))

    @cached_property
    def as_exported(self) -> GraphForm | None:
        """The exported graph in float64; None unless it differed from the module by more than the fold's tolerance."""
        link, usual = self.folded.links[0], self.folded.tolerances["fold"]
        off = link.metrics.max_rel_error if link.metrics and link.name == "fold" else 0.0
        return self._form(self.exported, double=True) if off > usual and self.folded.float64 else None

    @cached_property
    def exported(self) -> onnx.ModelProto:
        """The graph as the exporter wrote it, in float64."""
        import onnx

        return onnx.load(self.run.payload(self.folded.data))

    @cached_property
    def given(self) -> onnx.ModelProto:
        """The exported graph in float32."""
        return retyped(self.exported, {11: 1})

    def single(self) -> NetworkRunner:  # type: ignore[override]
        """Build the torch module in float32."""
        return self._runner(double=False)

    def network(self, form: str) -> Network:
        """Return the torch module of the training form; the deploy form is an ONNX graph and has none.

        Raises:
            UsageProblem: ``form`` is the deploy form.
        """
        if form != TRAINING:
            raise UsageProblem(
                f"the deploy form of {self.run.folder} is a graph, and this target's runtime runs torch modules.",
                hint="Give a target that runs ONNX models, e.g. --target x86-64.",
                code="run.no-module",
            )
        return Network(self._built.module, self.inputs, tuple(Port(name, (), "float32") for name in self.outputs))

    def _runner(self, *, double: bool) -> NetworkRunner:
        import copy

        module = copy.deepcopy(self._built.module)
        names = tuple(port.name for port in self.inputs)
        return NetworkRunner(module, module.state_dict(), double=double, inputs=names, outputs=self.outputs)

    @cached_property
    def _built(self) -> BuiltNetwork:
        from repaconv.checkpoints import read_checkpoint

        found = read_checkpoint(self.source, self.folded.origin.weights, self.folded.origin.sha256, again=True)
        return build_network(Architecture(self.folded.arch, self.folded.config), found)
