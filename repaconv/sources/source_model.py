"""The protocols of a run's source model and of its forms (original, folded in float64, folded in float32).

The origins have one module each: `repaconv.sources.checkpoint_source` for a checkpoint of a method,
`repaconv.sources.onnx_source` for an arbitrary ONNX model, and `repaconv.sources.named_architecture_source` for a
network that is built by the name of its architecture. `repaconv.sources.source_of_run` chooses between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from repaconv.core import run_folder
from repaconv.onnx_export.onnx_simplifiers import TOOLS
from repaconv.results import ClassScores, FoldArtefact, ImageSize, Location

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from repaconv.core.progress import Progress
    from repaconv.engines.contract import Feeds, Network, Port
    from repaconv.graph.rewrite_contract import Rewrite
    from repaconv.sources.verified_onnx_export import Graph
    from repaconv.verification.input_batches import Inputs
    from repaconv.verification.model_runners import IntermediateValues

DEPLOY, TRAINING = "deploy form", "training form"
FOLDED, ORIGINAL = "folded", "original"
"""What both forms are called if the source is an ONNX graph, which may have been trained in any form."""


@dataclass(frozen=True)
class GraphSpec:
    """The options of an ONNX export.

    Attributes:
        size: (height, width) of the images, or an example where the size is dynamic; None if the network takes no
            images.
        opset: Opset in which the exporter writes.
        newest: Newest opset that the target reads; ``opset`` when None.
        unsupported_ops: Operators that the target does not support.
        batch: Fixed batch size; None makes it dynamic.
        dynamic_size: Whether height and width are dynamic.
        rewrites: Rewrites of the chosen rewrite preset, applied to the exported graph.
        simplifiers: Simplifiers, tried in this order; an empty tuple skips the simplification.
    """

    size: ImageSize | None
    opset: int
    newest: int | None = None
    unsupported_ops: tuple[str, ...] = ()
    batch: int | None = None
    dynamic_size: bool = False
    rewrites: tuple[Rewrite, ...] = ()
    simplifiers: tuple[str, ...] = TOOLS


class NetworkForm(Protocol):
    """A form of the network, e.g. the original in float64: it can be run, and its intermediate values can be read."""

    @property
    def undecided(self) -> NDArray[np.bool_] | None:
        """The images [n] of the last run for which float32 rounding may change a discrete decision.

        None if the network makes no discrete decisions.
        """

    def run(self, feeds: Feeds) -> dict[str, Any]:
        """Run the network and return all outputs by name."""

    def float64_doubt(self, feeds: Feeds) -> str:
        """Why this form in float64 is not the same network as in float32; empty if it is."""

    def trace(self) -> IntermediateValues:
        """Give access to the intermediate values."""


class SourceModel(Protocol):
    """The source model of a run. Each form of it is built on first use and then kept."""

    @property
    def run(self) -> run_folder.Run:
        """The run that the model belongs to."""

    @property
    def folded(self) -> FoldArtefact:
        """The result of the fold stage, as it was written."""

    @property
    def scores(self) -> ClassScores | None:
        """The output that holds class scores; None if the network has none."""

    @property
    def official(self) -> tuple[str, ...]:
        """Names of the rewrites with which the network's authors deploy it."""

    @property
    def by_module(self) -> bool:
        """Whether intermediate values are named by torch module; if not, by the value's name in the ONNX graph."""

    @property
    def source(self) -> Path:
        """The file that the model was read from."""

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The inputs, which all forms share."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs, which all forms share."""

    @property
    def decides(self) -> bool:
        """Whether the network makes discrete decisions, e.g. which tokens to merge."""

    @property
    def reference(self) -> NetworkForm:
        """The original network in float64: the reference of every comparison."""

    @property
    def exact(self) -> NetworkForm:
        """The network, folded again, in float64."""

    @property
    def as_exported(self) -> NetworkForm | None:
        """The graph that torch's exporter wrote, in float64; only where the exporter rounded numbers to float32."""

    @property
    def stored(self) -> NetworkForm:
        """The folded network in float32, with the weights that the run stores."""

    def single(self) -> NetworkForm:
        """Build the original network in float32, which shows the effect of rounding alone."""

    def network(self, form: str) -> Network:
        """Build the torch module in float32, for a target whose runtime is torch.

        Args:
            form: `DEPLOY`, the folded network that the run stores, or `TRAINING`, the original.
        """

    def graph(self, form: str, spec: GraphSpec, *, scratch: Path, progress: Progress) -> Graph:
        """Export the network as a verified ONNX graph.

        Args:
            form: `DEPLOY`, the folded network that the run stores, or `TRAINING`, the original.
            spec: Options of the export.
            scratch: A folder for large weights.
            progress: See `Progress`.
        """

    def free_sizes(self, batch: int) -> dict[str, int]:
        """Return values for the dynamic dimensions of the exported graph by name; empty if all inputs are images."""

    def random_inputs(
        self, count: int, seed: int, size: ImageSize | None = None, *, batch: int | None = None
    ) -> Inputs:
        """Make seeded random inputs: ``count`` images, or ``count`` inferences if the network takes no images.

        Args:
            count: Number of images or inferences.
            seed: Seed of the random generator.
            size: (height, width) of the images; the network's usual size when None.
            batch: Batch size of an inference without images, where it is dynamic; the usual one when None.
        """

    def require_size(self, height: int, width: int) -> None:
        """Refuse an image size that the network does not take.

        Raises:
            UsageProblem: The network does not take images of this size.
        """

    def parting(self, feeds: Feeds, allowed: float) -> Location:
        """Find the first layer at which ``reference`` and ``exact`` differ by more than ``allowed``."""

    def users_names(self, module: str) -> str:
        """Translate module names of the folded network (comma-separated) to the names in the user's file."""


def form_names(folded: FoldArtefact) -> tuple[str, str]:
    """What the folded network and the original are called in results of a run."""
    return (FOLDED, ORIGINAL) if folded.origin_kind == "graph" else (DEPLOY, TRAINING)


def reference_name(folded: FoldArtefact) -> str:
    """What the reference of every comparison of a run, the original network in float64, is called in its links."""
    return f"{form_names(folded)[1]}, float64"
