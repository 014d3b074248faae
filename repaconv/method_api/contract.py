"""The interface of a method, which is one paper's structural reparameterization.

A `Method` recognizes checkpoints and reads them. The resulting `Reading` builds the network as trained and folds it.
Methods of this package and of plug-ins implement the same classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from repaconv.checkpoints import Checkpoint, require_exact
from repaconv.method_api.preprocessing import USUAL
from repaconv.results import Fact, FoldStep, Preprocessing


@dataclass(frozen=True)
class Detection:
    """A method's claim on a checkpoint: its form, and the keys or metadata that are the reason.

    ``form`` is the training-time (``training``) or the inference-time (``deploy``) architecture. ``confidence`` ranks
    the claims of several methods. ``certain``: only this method has such keys. ``possible``: a method that is certain
    takes precedence. ``asked``: the method applies only if the user names it.
    """

    form: Literal["training", "deploy"]
    reason: str
    confidence: Literal["certain", "possible", "asked"] = "certain"


@dataclass(frozen=True)
class FoldedPart:
    """The folded tensors of one or more modules, and the fold certificate's row for them.

    ``tensors`` are float64, by their names in the deploy form. ``step`` is None if nothing was folded. A tensor outside
    the module that ``step`` names must have the same name and values as in the training form.
    """

    tensors: Mapping[str, Tensor]
    step: FoldStep | None = None


@dataclass(frozen=True, kw_only=True)
class Reading(ABC):
    """A checkpoint that a method has read: the network as trained, and how it is folded.

    The defaults describe a network without a file, such as the paper's own models (`Published`).

    Attributes:
        backbone: The registered name of the network family.
        config: Configuration of the backbone's deploy form. It has at least ``in_channels`` and ``classes``.
        tensors: The weights by the backbone's official key names, as stored and memory-mapped.
        names: Maps those names to the names in the file.
        facts: Every setting that was used, with its source.
        preprocessing: How images are prepared for the network.
        deployed: Whether the file already has the paper's deploy form.
        applied: What is folded in addition to the method's own reparameterization, e.g. ``layer scale``.
        tolerances: Looser tolerances by link of the verification chain, where this network cannot meet the policy's,
            e.g. because a product was stored in FP32.
        tolerance_reasons: The reason for each of them, by link.
        reads_tensors_alone: Whether ``parts`` reads ``tensors`` and otherwise nothing that depends on their values.
    """

    reads_tensors_alone: ClassVar[bool] = False

    backbone: str
    config: Any
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    facts: tuple[Fact, ...] = ()
    preprocessing: Preprocessing = USUAL
    deployed: bool = False
    applied: tuple[str, ...] = ()
    tolerances: Mapping[str, float] = field(default_factory=dict)
    tolerance_reasons: Mapping[str, str] = field(default_factory=dict)

    @abstractmethod
    def module(self) -> nn.Module:
        """Build the network as trained, in eval mode. Its weights are not set; ``tensors`` is its state dict."""

    @abstractmethod
    def parts(self) -> Iterator[FoldedPart]:
        """Fold the network and yield the deploy form's tensors in parts, so that only one part at a time is float64."""

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Reading | None:
        """The same network with other weights of the same names and shapes; None if it must be read from a checkpoint.

        The picture of a fold folds the first blocks once for each of their layers, with other values in that layer.
        With ``reads_tensors_alone`` not the whole checkpoint is read each time.
        """
        return replace(self, tensors=tensors) if self.reads_tensors_alone else None

    def require_whole(self) -> None:
        """Require that ``tensors`` match the state dict of the network as trained.

        A BatchNorm's ``num_batches_tracked`` may be missing.

        Raises:
            Refused: If a tensor is missing, unexpected, of a wrong shape or not floating point.
        """
        with torch.device("meta"):
            state = self.module().state_dict()
        counters = {name for name in state if name.endswith("num_batches_tracked")} - self.tensors.keys()
        require_exact({name: meta for name, meta in state.items() if name not in counters}, self.tensors, self.names)


@dataclass(frozen=True)
class Published:
    """A model of the paper, without weights. It can be built on the meta device, where it takes no memory.

    Attributes:
        training, deploy: Build its training-time and its inference-time architecture.
        input_shape: Shape of one input, without the batch dimension.
    """

    training: Callable[[], nn.Module]
    deploy: Callable[[], nn.Module]
    input_shape: tuple[int, ...]


Identify = Callable[[Checkpoint, Mapping[str, str], Tensor, Tensor], dict[str, str]]
"""Finds settings missing from the checkpoint, from images [N, C, H, W] and the output that was recorded for them.

Called with (checkpoint, the user's settings, images, recorded output); returns the settings to add.
"""


@dataclass(frozen=True)
class Method:
    """One paper's structural reparameterization: how its checkpoints are recognized, read and folded.

    Attributes:
        name: The registered name.
        paper: Title and venue, or arXiv number.
        figures: Path of a .toml file with the figures that the paper reports.
        archs: The model names that ``published`` and ``example`` accept.
        detect: Recognizes a checkpoint by its keys, without validating the rest; None if it is not this method's.
        read: Reads a whole checkpoint or refuses it. The mapping has the user's ``--set`` values.
        published: Builds the paper's model of that name.
        example: Makes a training-form state dict of that model, with seeded, non-trivial weights and official names.
        identify: Finds settings that no tensor shows, from a recorded output. Refuses an output that no variant or
            several variants reproduce. None if the method has no such settings.
        official_rewrites: Names of the graph rewrites that turn the exported graph into the paper's own form.
    """

    name: str
    paper: str
    figures: Path
    archs: tuple[str, ...]
    detect: Callable[[Checkpoint], Detection | None]
    read: Callable[[Checkpoint, Mapping[str, str]], Reading]
    published: Callable[[str], Published]
    example: Callable[[str, int], dict[str, Tensor]]
    identify: Identify | None = None
    official_rewrites: tuple[str, ...] = ()
