"""TensorRT-RTX: engines for NVIDIA RTX cards, built ahead of time on any x86-64 machine, with no GPU in it.

What it builds is typed as the ONNX graph is. A plan cannot be opened without a GPU, so what is proved of its precision
is proved of the network that was parsed, before it was built.
"""

from __future__ import annotations

from typing import Any

from repaconv.engines.contract import Ability, Built, Deployable, Order, Session, SessionSpec
from repaconv.engines.trt import Building
from repaconv.errors import EnvironmentProblem, require_module

INSTALL = "pip install --no-deps tensorrt-rtx-cu13 tensorrt-rtx-cu13-bindings tensorrt-rtx-cu13-libs"


class TensorRtRtx:
    """The runtime as the registry knows it."""

    name = "tensorrt-rtx"
    suffix = ".engine"
    opens: tuple[str, ...] = ()
    can: frozenset[Ability] = frozenset()
    takes: tuple[str, ...] = ("workspace",)

    def version(self) -> str:
        """Of the installed package.

        Raises:
            EnvironmentProblem: If it cannot be imported.
        """
        return str(require_module("tensorrt_rtx", "TensorRT-RTX", INSTALL).__version__)

    def open(self, deployable: Deployable, spec: SessionSpec) -> Session:
        """Running one needs the card; only building is done here.

        Raises:
            EnvironmentProblem: Always.
        """
        raise EnvironmentProblem(
            "TensorRT-RTX engines run on NVIDIA RTX cards alone, and repaconv runs them nowhere yet.",
            hint="Measure on that machine, with its own tools.",
            code="runtime.missing",
        )

    def build(self, order: Order) -> Built:
        """Compile for cards of those compute capabilities.

        Raises:
            EnvironmentProblem: If TensorRT-RTX is not installed or does not know such a card.
            Refused: If it does not take the graph.
        """
        self.version()
        import tensorrt_rtx as trt

        building = Building(trt, order, hint="Export for this target: repaconv export --onnx --target rtx-40.")
        building.config.num_compute_capabilities = len(order.capabilities)
        for number, capability in enumerate(order.capabilities):
            building.config.set_compute_capability(_capability(trt, capability), number)
        types = building.types()
        plan = building.plan()
        return Built(
            engine=plan,
            types=types,
            log="\n".join(building.log.lines),
            options={"compute_capability": ", ".join(order.capabilities)},
            proved="the types are those of the parsed network; the engine itself can be opened on its device alone",
            runs_here=False,
        )


def _capability(trt: Any, text: str) -> Any:
    name = f"SM{text.replace('.', '')}"
    if not hasattr(trt.ComputeCapability, name):
        known = ", ".join(sorted(each for each in dir(trt.ComputeCapability) if each.startswith("SM")))
        raise EnvironmentProblem(
            f"this TensorRT-RTX builds nothing for compute capability {text}.",
            hint=f"It knows {known}.",
            code="build.capability",
        )
    return getattr(trt.ComputeCapability, name)


ENGINE = TensorRtRtx()
