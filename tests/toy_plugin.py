"""A third party's method with its own backbone: consecutive 1x1 convolutions, which are one. Read by test_plugins."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from repaconv.algebra.affine_maps import Affine
from repaconv.checkpoints import require_sound
from repaconv.method_api.contract import Detection, FoldedPart, Method, Published, Reading
from repaconv.method_api.fold_error import relative_difference
from repaconv.results import FoldStep, Preprocessing


@dataclass(frozen=True)
class ToyConfig:
    classes: int
    in_channels: int = 3


class Toy(nn.Module):
    def __init__(self, config, hidden=None):
        super().__init__()
        if hidden:
            self.twin_in, self.twin_out = nn.Conv2d(3, hidden, 1), nn.Conv2d(hidden, config.classes, 1)
        else:
            self.one = nn.Conv2d(3, config.classes, 1)

    def forward(self, x):
        y = self.one(x) if hasattr(self, "one") else self.twin_out(self.twin_in(x))
        return torch.sin(y).mean((2, 3))


class ToyBackbone:
    name, any_image_size = "toy", True

    def to_json(self, config):
        return asdict(config)

    def from_json(self, plain):
        return ToyConfig(**plain)

    def image_size(self, config, preferred):
        return preferred

    def takes(self, config, height, width):
        return True

    def deploy(self, config):
        return Toy(config).eval()


@dataclass(frozen=True, kw_only=True)
class ToyReading(Reading):
    def module(self):
        return Toy(self.config, self.tensors["twin_in.weight"].shape[0]).eval()

    def parts(self):
        w = self.tensors
        first = Affine.conv1x1(w["twin_in.weight"], w["twin_in.bias"])
        one = Affine.conv1x1(w["twin_out.weight"], w["twin_out.bias"]) @ first
        folded = {"one.weight": one.weight[:, :, None, None], "one.bias": one.bias}
        error = relative_difference((self.module(), w), (Toy(self.config), folded), (2, 3, 4, 4))
        yield FoldedPart(folded, FoldStep(module="one", folded=("twin_in -> twin_out",), max_rel_error=error))


def detect(checkpoint):
    return Detection("training", "twin_in") if "twin_in.weight" in checkpoint.tensors else None


def read(checkpoint, settings):
    tensors = dict(checkpoint.tensors)
    require_sound(tensors, checkpoint.names)
    reading = ToyReading(
        backbone="toy",
        config=ToyConfig(tensors["twin_out.weight"].shape[0] if "twin_out.weight" in tensors else 2),
        tensors=tensors,
        names=dict(checkpoint.names),
        preprocessing=Preprocessing(mean=(0.0,) * 3, std=(1.0,) * 3, image_size=(8, 8), source="toy"),
    )
    reading.require_whole()
    return reading


def published(arch):
    return Published(lambda: Toy(ToyConfig(5), 7), lambda: Toy(ToyConfig(5)), (3, 8, 8))


def example(arch, seed):
    torch.manual_seed(seed)
    return Toy(ToyConfig(5), 7).state_dict()


FIGURES = Path(__file__).with_suffix(".toml")
METHOD = Method("toy", "a toy", FIGURES, ("small",), detect, read, published, example)
BACKBONE = ToyBackbone()
