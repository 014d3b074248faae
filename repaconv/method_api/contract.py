"""What a method is: the page of one paper. Third parties bring a `Method` and its `Reading` alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from repaconv.checkpoints import Checkpoint, require_exact
from repaconv.method_api.preprocessing import USUAL
from repaconv.results import Fact, FoldStep, Preprocessing


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
class FoldedPart:
    """Some modules of the deploy form: float64 tensors by name, and a row of the certificate if folded.

    What lies in no module that the row proves must be the training form's own, name and numbers.
    """

    tensors: Mapping[str, Tensor]
    step: FoldStep | None = None


@dataclass(frozen=True, kw_only=True)
class Reading(ABC):
    """A checkpoint understood: the network as trained, and how it folds.

    What has a default is that of a network without a file, as the paper's own models are.

    Attributes:
        backbone: The registered name of the network family.
        config: Of the backbone's deploy form; it has at least ``in_channels`` and ``classes``.
        tensors: The weights by the backbone's official key names, as stored and memory-mapped.
        names: Those names to the names in the file.
        facts: Every value that was used, with its source.
        deployed: Whether the file is in the paper's deploy form already.
        applied: What is folded besides the method's own, e.g. ``layer scale``.
        tolerances: Of the links that this net cannot hold at the policy's, e.g. weights stored as a product.
        tolerance_reasons: Why, by link.
    """

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
        """The network as trained, in eval mode, whose state dict is ``tensors``; weights not yet set."""

    @abstractmethod
    def parts(self) -> Iterator[FoldedPart]:
        """The deploy form's tensors, part by part, so that the whole is never held in float64."""

    def require_whole(self) -> None:
        """Hold the tensors against the network as trained; a BatchNorm's counter may be left out.

        Raises:
            Refused: If one is missing, too many, misshaped or not of floating point.
        """
        with torch.device("meta"):
            state = self.module().state_dict()
        counters = {name for name in state if name.endswith("num_batches_tracked")} - self.tensors.keys()
        require_exact({name: meta for name, meta in state.items() if name not in counters}, self.tensors, self.names)


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


Identify = Callable[[Checkpoint, Mapping[str, str], Tensor, Tensor], dict[str, str]]
"""Settings to add to the user's, from images [N, C, H, W] and the output that was recorded on them."""


@dataclass(frozen=True)
class Method:
    """One paper's way from the network as trained to its deploy form.

    Attributes:
        name: As registered.
        paper: Title and place.
        figures: A .toml with the paper's own figures.
        archs: Names that ``published`` and ``example`` take.
        detect: Says whether the keys are of this method, without judging the rest; None when not.
        read: Understands a checkpoint whole or refuses it; the mapping has the user's ``--set`` values.
        published: The paper's model of that name.
        example: A training-form state dict of that name with seeded, non-trivial weights under official key names.
        identify: Where nets can hide how they were built; refuses an output that no variant reproduces, or several do.
        official_rewrites: What turns our graph into the paper's own form.
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
