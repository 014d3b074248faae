"""What a method is: the page of one paper, in six functions. Third parties implement `Method` alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from repaconv.artefacts import Fact, FoldStep, Preprocessing
from repaconv.checkpoint import Checkpoint


@dataclass(frozen=True)
class Detection:
    """That a checkpoint is of a method, in which form, and the keys that prove it.

    ``certain``: only this method has such keys. ``possible``: another method with keys of its own comes first.
    ``asked``: only where the user names the method.
    """

    form: Literal["training", "deploy"]
    reason: str
    confidence: Literal["certain", "possible", "asked"] = "certain"


@dataclass(frozen=True)
class TrainingForm:
    """A checkpoint understood: the network as trained.

    Attributes:
        backbone: The registered name of the network family.
        config: Of the backbone's deploy form; it has at least ``in_channels`` and ``classes``.
        tensors: The weights by the backbone's official key names, as stored and memory-mapped.
        names: Those names to the names in the file.
        facts: Every value that was used, with its source.
        deployed: Whether the file is in the paper's deploy form already.
        applied: What is folded besides the method's own, e.g. ``layer scale``.
        tolerances: Of the links that this net cannot hold at the policy's, e.g. weights stored as a product.
    """

    backbone: str
    config: Any
    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]
    facts: tuple[Fact, ...]
    preprocessing: Preprocessing
    deployed: bool
    applied: tuple[str, ...] = field(default=(), kw_only=True)
    tolerances: Mapping[str, float] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class FoldedPart:
    """Some modules of the deploy form: float64 tensors by name, and a row of the certificate if folded.

    What lies in no module that the row proves must be the training form's own, name and numbers.
    """

    tensors: Mapping[str, Tensor]
    step: FoldStep | None = None


@dataclass(frozen=True)
class Published:
    """A model of the paper, to be built on the meta device, where size costs no memory.

    Attributes:
        training, deploy: Build its two forms.
        input_shape: Of one input, without the batch.
    """

    training: Callable[[], nn.Module]
    deploy: Callable[[], nn.Module]
    input_shape: tuple[int, ...]


class Method(Protocol):
    """One paper's way from the training form to the deploy form.

    ``official_rewrites``, where a method has it, names what turns our graph into the paper's own form.
    """

    name: str
    paper: str
    figures: Path
    archs: tuple[str, ...]

    def detect(self, checkpoint: Checkpoint) -> Detection | None:
        """Say whether the keys are of this method, without judging the rest; None when not."""

    def read(self, checkpoint: Checkpoint, settings: Mapping[str, str]) -> TrainingForm:
        """Understand it whole or refuse it; ``settings`` are the user's ``--set`` values."""

    def training(self, form: TrainingForm) -> nn.Module:
        """The network as trained, in eval mode, whose state dict is ``form.tensors``; weights not yet set."""

    def fold(self, form: TrainingForm) -> Iterator[FoldedPart]:
        """The deploy form's tensors, part by part, so that the whole is never held in float64."""

    def published(self, arch: str) -> Published:
        """The architecture of that name. The paper's own figures stand beside the method's file, in a .toml."""

    def example(self, arch: str, seed: int) -> dict[str, Tensor]:
        """A training-form state dict with seeded, non-trivial weights under official key names."""


@runtime_checkable
class Identifies(Protocol):
    """A method whose nets can hide how they were built, and that settles it by a recorded output."""

    def identify(
        self, checkpoint: Checkpoint, settings: Mapping[str, str], images: Tensor, recorded: Tensor
    ) -> dict[str, str]:
        """The settings to add to the user's.

        Raises:
            Refused: If the output settles nothing: no variant reproduces it, or several do.
        """
