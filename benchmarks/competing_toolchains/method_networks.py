"""The networks of the five methods: the trained ones that are installed, and published sizes with seeded weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from manual_baseline_models import MODELS, Model
from manual_baselines import dwconv, nondeep, pyra, repavit, riformer
from torch import nn

from repaconv import models

HEADS = 4
"""Of the trained ones."""
LEFT = ("4x3 value-sum", "3x4 value-sum", "4x3 output-sum", "3x4 output-sum")
"""Published sizes that only `manual_baseline_speed.py` measures: what they show, 6x2 does."""
BY_HAND: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    "repavit": partial(repavit.deployed, heads=HEADS),
    "nondeep": nondeep.deployed,
    "riformer": partial(riformer.deployed, stride=2),
    "dwconv": partial(dwconv.deployed, heads=HEADS),
    "pyra": partial(pyra.deployed, heads=HEADS),
}


class Net(NamedTuple):
    """One network.

    Attributes:
        method: Its method.
        size: As the method names it, or ``digits`` of a trained one.
        checkpoint: Makes its training checkpoint.
        manual_baseline: Makes the hand-made deploy form of that.
        trained: Whether images say what is lost.
        large: Whether so few fit in memory that only float32 is measured.
    """

    method: str
    size: str
    checkpoint: Callable[[], dict[str, Any]]
    manual_baseline: Callable[[dict[str, Any]], nn.Module]
    trained: bool = False
    large: bool = False

    @property
    def name(self) -> str:
        """As it is asked for."""
        return f"{self.method}-{self.size}".replace("/", "-").replace(" ", "-")


def _trained(method: str) -> dict[str, Any]:
    """A checkpoint that comes along, in float32."""
    saved = torch.load(models.checkpoint(method), weights_only=False)
    weights = saved.pop("state_dict", None) or saved.pop("model")
    return {**saved, "model": {name: w.float() if w.is_floating_point() else w for name, w in weights.items()}}


def _published(model: Model) -> Net:
    return Net(model.method, model.name, model.checkpoint, model.deployed, large=model.large)


NETS = (
    *(Net(method, "digits", partial(_trained, method), BY_HAND[method], trained=True) for method in models.METHODS),
    *(_published(model) for model in MODELS if model.name not in LEFT),
)
