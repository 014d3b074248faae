"""How a checkpoint is recognized, read and folded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.checkpoints import Checkpoint, require_sound
from repaconv.method_api.contract import Detection, FoldedPart, Published, Reading
from repaconv.method_api.fold_error import relative_difference
from repaconv.results import FoldStep, Preprocessing
from repaconv_dirac.network import DiracBlock, DiracConfig, DiracNet, dirac_kernel, plain_block

SHOWN_BY = "blocks.0.conv.delta"
"""A tensor that only a DiracNet has."""


def detect(checkpoint: Checkpoint) -> Detection | None:
    """Recognize the method by its tensor names."""
    return Detection("training", SHOWN_BY) if SHOWN_BY in checkpoint.tensors else None


def read(checkpoint: Checkpoint, settings: Mapping[str, str]) -> Reading:
    """Read the sizes from the tensors. A checkpoint that is not whole is refused."""
    tensors = dict(checkpoint.tensors)
    require_sound(tensors, checkpoint.names)
    stem, head = tensors.get("stem.weight"), tensors.get("head.weight")
    reading = DiracReading(
        backbone="dirac",
        config=DiracConfig(
            depth=sum(name.startswith("blocks.") and name.endswith(".conv.delta") for name in tensors),
            width=len(tensors[SHOWN_BY]),
            # A tensor that is missing is refused below, by its name.
            classes=1 if head is None else len(head),
            in_channels=3 if stem is None else stem.shape[1],
        ),
        tensors=tensors,
        names=dict(checkpoint.names),
        preprocessing=Preprocessing(mean=(0.0,), std=(1.0,), image_size=(24, 24), source="train.py"),
    )
    reading.require_whole()
    return reading


@dataclass(frozen=True, kw_only=True)
class DiracReading(Reading):
    """A checkpoint of a DiracNet."""

    config: DiracConfig

    def module(self) -> nn.Module:
        """The training-time network, without weights."""
        return DiracNet(self.config, trained=True).eval()

    def parts(self) -> Iterator[FoldedPart]:
        """All tensors of the inference-time network in float64, block by block."""
        copied = [name for name in self.tensors if not name.startswith("blocks.")]
        yield FoldedPart({name: self.tensors[name].double() for name in copied})
        for n in range(self.config.depth):
            yield self._block(f"blocks.{n}")

    def _block(self, name: str) -> FoldedPart:
        trained = {key.removeprefix(f"{name}."): w for key, w in self.tensors.items() if key.startswith(f"{name}.")}
        trained.setdefault("bn.num_batches_tracked", torch.tensor(0))  # a checkpoint may lack it
        folded = fold_block(trained)
        width = self.config.width
        error = relative_difference((DiracBlock(width), trained), (plain_block(width), folded), (2, width, 5, 5))
        step = FoldStep(
            module=name,
            folded=("alpha * delta, beta * W / |W|, bn -> convolution",),
            equation="W^ = diag(a) I + diag(b) W_norm",
            max_rel_error=error,
        )
        return FoldedPart({f"{name}.{key}": tensor for key, tensor in folded.items()}, step)


def fold_block(w: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The fold itself: a block's tensors at training time to those of one convolution, in float64."""
    kernel = dirac_kernel(*(w[f"conv.{name}"].double() for name in ("alpha", "beta", "delta", "weight")))
    bn = Affine.batchnorm(w["bn.weight"], w["bn.bias"], w["bn.running_mean"], w["bn.running_var"], 1e-5)
    return {"weight": bn.weight.view(-1, 1, 1, 1) * kernel, "bias": bn.bias}


ARCHS = {
    "digits": DiracConfig(depth=6, width=24, classes=10, in_channels=1),
    "tiny": DiracConfig(depth=2, width=8, classes=5, in_channels=3),
}
"""The networks of the paper, or your own: `train.py` trains the first, tests use the second."""


def published(arch: str) -> Published:
    """Both architectures of a network, and the shape of its input."""
    config = ARCHS[arch]
    return Published(
        lambda: DiracNet(config, trained=True), lambda: DiracNet(config, trained=False), (config.in_channels, 24, 24)
    )


def example(arch: str, seed: int) -> dict[str, Tensor]:
    """Random weights of the training-time network. No number is one that a wrong fold would get right by chance."""
    torch.manual_seed(seed)
    net = DiracNet(ARCHS[arch], trained=True)
    for name, tensor in net.state_dict().items():
        if name.endswith(("alpha", "beta", "bn.weight", "running_var")):
            tensor.uniform_(0.5, 1.5)
        elif name.endswith(("bn.bias", "running_mean")):
            tensor.normal_()
    return net.state_dict()
