"""The source model of a checkpoint that a method has folded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.backbones.image_size_check import require_size
from repaconv.core import plugins, run_folder
from repaconv.core.files import canonical_json
from repaconv.core.progress import Progress
from repaconv.engines.contract import Feeds, Network, Port
from repaconv.results import ClassScores, ImageSize, Location, MethodFold
from repaconv.sources.class_score_outputs import LOGITS
from repaconv.sources.method_detection import read_again
from repaconv.sources.source_model import DEPLOY, TRAINING, GraphSpec
from repaconv.sources.verified_onnx_export import Graph, Proving, exported_graph
from repaconv.verification.model_runners import TorchRunner, decides, with_weights

if TYPE_CHECKING:
    from torch import Tensor, nn

    from repaconv.method_api.contract import Reading
    from repaconv.verification.input_batches import Inputs


@dataclass(frozen=True)
class CheckpointSource:
    """The source model of a checkpoint that a method has folded; see `repaconv.sources.source_model.SourceModel`.

    The checkpoint is read on first use, exactly as `fold` did. Members that need the checkpoint or the stored weights
    raise `Refused` if these are missing or have changed.
    """

    run: run_folder.Run
    folded: MethodFold
    checkpoint: str | Path | None = None

    @property
    def scores(self) -> ClassScores | None:
        """The logits of the checkpoint's head; None if the network returns features."""
        if self.folded.output != LOGITS:
            return None
        return ClassScores(output=LOGITS, classes=int(self._config.classes), source="the checkpoint's head")

    @property
    def official(self) -> tuple[str, ...]:
        """The official rewrites of the method."""
        rewrites: tuple[str, ...] = plugins.load(plugins.METHODS, self.folded.method).official_rewrites
        return rewrites

    @property
    def by_module(self) -> bool:
        """True: the forms are torch modules."""
        return True

    @property
    def source(self) -> Path:
        """The checkpoint's file."""
        return self._reading_and_path[1]

    @property
    def inputs(self) -> tuple[Port, ...]:
        """Images [B, C, H, W]."""
        return (Port("input", ("batch", self._config.in_channels, "height", "width"), "float32"),)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The name of the only output, logits or features."""
        return (self.folded.output,)

    @cached_property
    def decides(self) -> bool:
        """Whether a module of the deploy form makes discrete decisions, e.g. which tokens to merge."""
        return decides(self._backbone.deploy(self._config))

    @cached_property
    def reference(self) -> TorchRunner:
        """The training form in float64."""
        return self._form(self.reading.module(), self.reading.tensors, double=True)

    @cached_property
    def exact(self) -> TorchRunner:
        """The deploy form, folded again, in float64."""
        tensors = {name: value for part in self.reading.parts() for name, value in part.tensors.items()}
        return self._form(self._backbone.deploy(self._config), tensors, double=True)

    @property
    def as_exported(self) -> None:
        """None: torch modules were folded, not an exported graph."""

    @cached_property
    def stored(self) -> TorchRunner:
        """The deploy form with the run's weights, in float32."""
        return self._form(self._backbone.deploy(self._config), stored_weights(self.run, self.folded), double=False)

    @property
    def reading(self) -> Reading:
        """The checkpoint as the method read it."""
        return self._reading_and_path[0]

    def single(self) -> TorchRunner:
        """Build the training form in float32."""
        return self._form(self.reading.module(), self.reading.tensors, double=False)

    def network(self, form: str) -> Network:
        """Build the torch module of a form with its weights, in float32."""
        import torch

        module = with_weights(*self._module_and_weights(form), torch.float32)
        return Network(module, self.inputs, tuple(Port(name, ("batch", None), "float32") for name in self.outputs))

    def graph(self, form: str, spec: GraphSpec, *, scratch: Path, progress: Progress) -> Graph:
        """Export the deploy form or the training form with torch, and verify the graph."""
        shape = (self._config.in_channels, *(spec.size or self.folded.image_size))
        described = canonical_json(self.folded.shapes) + self.folded.payload.sha256
        of = described if form == DEPLOY else None
        has = self.folded
        ways = Proving(form, spec, has.tolerances, scratch, progress, of=of, reasons=has.tolerance_reasons)
        return exported_graph(ways, *self._module_and_weights(form), shape, output=self.folded.output)

    def free_sizes(self, batch: int) -> dict[str, int]:
        """Return nothing: all inputs are images."""
        return {}

    def random_inputs(
        self, count: int, seed: int, size: ImageSize | None = None, *, batch: int | None = None
    ) -> Inputs:
        """Make standard normal images."""
        from repaconv.verification.input_batches import random_inputs

        shape = (self._config.in_channels, *(size or self.folded.image_size))
        return random_inputs(shape, count=count, seed=seed)

    def require_size(self, height: int, width: int) -> None:
        """Refuse an image size that the backbone does not take; see `repaconv.backbones.image_size_check`."""
        require_size(self._backbone, self._config, height, width)

    def parting(self, feeds: Feeds, allowed: float) -> Location:
        """Compare the two forms between blocks only: within a block they compute different things."""
        from repaconv.verification.divergence_location import locate_between_seams

        return locate_between_seams(self.reference, self.exact, feeds, allowed=allowed)

    def users_names(self, module: str) -> str:
        """Translate module names of the deploy form to those in the file, which may have a wrapper's prefixes."""
        return ", ".join(self._users_name(name) for name in module.split(", ")) if module else ""

    def _users_name(self, module: str) -> str:
        rest = module
        while rest:
            for official, stored in self.reading.names.items():
                if official.startswith(f"{rest}."):
                    tail = official[len(rest) :]
                    return stored.removesuffix(tail) + module[len(rest) :] if stored.endswith(tail) else module
            rest = rest.rpartition(".")[0]
        return module

    def _module_and_weights(self, form: str) -> tuple[nn.Module, Mapping[str, Tensor]]:
        """Return the module of a form, without weights, and its weights."""
        if form == TRAINING:
            return self.reading.module(), self.reading.tensors
        return self._backbone.deploy(self._config), stored_weights(self.run, self.folded)

    def _form(self, module: nn.Module, tensors: Mapping[str, Tensor], *, double: bool) -> TorchRunner:
        return TorchRunner(module, tensors, double=double, outputs=self.outputs)

    @cached_property
    def _reading_and_path(self) -> tuple[Reading, Path]:
        return read_again(self.folded, self.checkpoint)

    @cached_property
    def _config(self) -> Any:
        """The configuration of the deploy form."""
        return self._backbone.from_json(self.folded.config)

    @cached_property
    def _backbone(self) -> Any:
        return plugins.load(plugins.BACKBONES, self.folded.backbone)


def stored_weights(run: run_folder.Run, folded: MethodFold) -> dict[str, Tensor]:
    """Load the folded model's weights from the run folder; the run checks their hash."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(run.payload(folded.payload))
    return tensors
