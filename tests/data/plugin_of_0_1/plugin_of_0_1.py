"""A plug-in package written against release 0.1: a method, a backbone, a rewrite, an engine and a target.

tests/test_former_module_names.py installs it. It stays as it is: its imports are the names of that release.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from repaconv.affine import Affine
from repaconv.engines.ort import OnnxRuntime
from repaconv.errors import Refused
from repaconv.graphs.contract import Rewrite
from repaconv.graphs.graph import Writer, nodes_of
from repaconv.graphs.shapes import rank_of
from repaconv.trained.certificate import relative_difference
from repaconv.trained.contract import Detection, FoldedPart, Method, Published, Reading
from torch import nn

from repaconv.artefacts import Change, FoldStep, Preprocessing
from repaconv.checkpoint import require_sound
from repaconv.engines.contract import SessionSpec
from repaconv.targets import from_file


@dataclass(frozen=True)
class OlderConfig:
    classes: int
    in_channels: int = 3


class Older(nn.Module):
    def __init__(self, config, hidden=None):
        super().__init__()
        if hidden:
            self.first, self.second = nn.Conv2d(3, hidden, 1), nn.Conv2d(hidden, config.classes, 1)
        else:
            self.one = nn.Conv2d(3, config.classes, 1)

    def forward(self, x):
        y = self.one(x) if hasattr(self, "one") else self.second(self.first(x))
        return torch.sin(y).mean((2, 3))


class OlderBackbone:
    name, any_image_size = "older", True

    def to_json(self, config):
        return asdict(config)

    def from_json(self, plain):
        return OlderConfig(**plain)

    def image_size(self, config, preferred):
        return preferred

    def takes(self, config, height, width):
        return True

    def deploy(self, config):
        return Older(config).eval()


@dataclass(frozen=True, kw_only=True)
class OlderReading(Reading):
    def module(self):
        return Older(self.config, self.tensors["first.weight"].shape[0]).eval()

    def parts(self):
        w = self.tensors
        first = Affine.conv1x1(w["first.weight"], w["first.bias"])
        one = Affine.conv1x1(w["second.weight"], w["second.bias"]) @ first
        folded = {"one.weight": one.weight[:, :, None, None], "one.bias": one.bias}
        error = relative_difference((self.module(), w), (Older(self.config), folded), (2, 3, 4, 4))
        yield FoldedPart(folded, FoldStep(module="one", folded=("first -> second",), max_rel_error=error))


def detect(checkpoint):
    return Detection("training", "first") if "first.weight" in checkpoint.tensors else None


def read(checkpoint, settings):
    tensors = dict(checkpoint.tensors)
    require_sound(tensors, checkpoint.names)
    reading = OlderReading(
        backbone="older",
        config=OlderConfig(tensors["second.weight"].shape[0] if "second.weight" in tensors else 2),
        tensors=tensors,
        names=dict(checkpoint.names),
        preprocessing=Preprocessing(mean=(0.0,) * 3, std=(1.0,) * 3, image_size=(8, 8), source="older"),
    )
    reading.require_whole()
    return reading


def published(arch):
    return Published(lambda: Older(OlderConfig(5), 7), lambda: Older(OlderConfig(5)), (3, 8, 8))


def example(arch, seed):
    torch.manual_seed(seed)
    return Older(OlderConfig(5), 7).state_dict()


def negated(model):
    """x W + b as x (-W) - b, negated: no gain, but a rewrite."""
    for node in nodes_of(model, "Sin"):
        value = node.inputs[0]
        if value is None or rank_of(value) != 4:
            continue
        write = Writer(model, node)
        write.replace(node.outputs[0], write("Neg", write("Sin", write("Mul", value, write.constant(np.array(-1.0))))))
        yield Change(rewrite="older-negation", place=node.name or "", description="Sin -> Neg of Sin of Neg")


class OlderRuntime(OnnxRuntime):
    name = "older-runtime"

    def open(self, deployable: Any, spec: SessionSpec) -> Any:
        if spec.precision not in (None, "fp32"):
            raise Refused("older-runtime computes fp32 alone.", hint="Export in fp32.", code="older.precision")
        return super().open(deployable, spec)


FIGURES = Path(__file__).with_suffix(".toml")
METHOD = Method("older", "a plug-in of 0.1", FIGURES, ("small",), detect, read, published, example)
BACKBONE = OlderBackbone()
NEGATION = Rewrite("older-negation", "always: sin is odd", negated)
ENGINE = OlderRuntime()


def __getattr__(name: str) -> Any:
    if name == "TARGET":  # read when it is asked for, as repaconv's own are
        return from_file(Path(__file__).with_name("board.toml"))
    raise AttributeError(name)
