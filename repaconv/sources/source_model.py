"""What a run is of: a network in its forms, whatever it came from. `subject_of` alone knows from where.

A checkpoint of a method is `repaconv.sources.checkpoint_source`, a foreign graph `repaconv.sources.onnx_source`,
a network by name `repaconv.sources.architecture_source`; another origin is one more file beside them.
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
    from repaconv.verification.model_runners import Trace

DEPLOY, TRAINING = "deploy form", "training form"


@dataclass(frozen=True)
class GraphSpec:
    """How an ONNX graph is to be written.

    Attributes:
        size: (height, width) of its images, or the usual one where that is free; None if it takes no images.
        opset: Of the exporter.
        newest: What the target reads; ``opset`` when None.
        lacks: Operators that the target has not.
        batch: Images a call; None leaves it free.
        free_size: Whether images may have any size.
        rewrites: Of its form.
        simplifiers: Tried in this order; none leave it as it is.
    """

    size: ImageSize | None
    opset: int
    newest: int | None = None
    lacks: tuple[str, ...] = ()
    batch: int | None = None
    free_size: bool = False
    rewrites: tuple[Rewrite, ...] = ()
    simplifiers: tuple[str, ...] = TOOLS


class Form(Protocol):
    """A form of the network: it runs every input by name to every output by name, and can be followed on the way."""

    @property
    def undecided(self) -> NDArray[np.bool_] | None:
        """In which images [n] of the last run float32 may decide otherwise; None if the net decides nothing."""

    def run(self, feeds: Feeds) -> dict[str, Any]:
        """All outputs for these inputs."""

    def trace(self) -> Trace:
        """Its values on the way."""


class Subject(Protocol):
    """A run's network. Its forms are made when they are first asked for, and kept."""

    @property
    def run(self) -> run_folder.Run:
        """Its folder."""

    @property
    def folded(self) -> FoldArtefact:
        """What `fold` wrote of it."""

    @property
    def scores(self) -> ClassScores | None:
        """Its output that gives classes; None where none does."""

    @property
    def official(self) -> tuple[str, ...]:
        """Rewrites of the form in which its makers deploy it."""

    @property
    def by_module(self) -> bool:
        """Whether places on the way through its forms are modules; else they are names of a graph's values."""

    @property
    def source(self) -> Path:
        """The file that it was read from."""

    @property
    def inputs(self) -> tuple[Port, ...]:
        """What every form takes."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what every form gives."""

    @property
    def decides(self) -> bool:
        """Whether something in it decides what is discrete, as which tokens merge."""

    @property
    def reference(self) -> Form:
        """The network as it was given, in float64: what all else is held against."""

    @property
    def exact(self) -> Form:
        """Folded anew, in float64."""

    @property
    def as_exported(self) -> Form | None:
        """The graph that torch's exporter wrote of the network, in float64, where it rounded numbers to float32."""

    @property
    def stored(self) -> Form:
        """Folded, as the run has it, in float32."""

    def single(self) -> Form:
        """The reference in float32: what rounding alone does to it."""

    def network(self, form: str) -> Network:
        """`DEPLOY`, as the run has it, or `TRAINING`, as it was given: a module in float32, for torch as a runtime."""

    def graph(self, form: str, spec: GraphSpec, *, scratch: Path, progress: Progress) -> Graph:
        """The network as a proved ONNX graph.

        Args:
            form: `DEPLOY`, as the run has it, or `TRAINING`, as it was given.
            spec: How it is written.
            scratch: A folder for large weights.
            progress: See `Progress`.
        """

    def free_sizes(self, batch: int) -> dict[str, int]:
        """Free sizes of a call of its exported graph, by name, where it takes no images."""

    def drawn(self, count: int, seed: int, size: ImageSize | None = None, *, batch: int | None = None) -> Inputs:
        """Seeded random inputs: images of that size, the usual when None, or as many calls.

        Args:
            count: Of images or calls.
            seed: Of the draw.
            size: (height, width) of images.
            batch: Of a call that takes no images, where that is free; the usual when None.
        """

    def require_size(self, height: int, width: int) -> None:
        """Refuse images that it cannot take.

        Raises:
            UsageProblem: Naming the size.
        """

    def parting(self, feeds: Feeds, allowed: float) -> Location:
        """Where ``reference`` and ``exact`` part, of which the parts compute different things."""

    def users_names(self, module: str) -> str:
        """A module of the folded network, or several with commas, by the names in the user's own file."""
