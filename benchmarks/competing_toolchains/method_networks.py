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
"""Attention heads of the trained networks."""
NOT_COMPARED = ("4x3 value-sum", "3x4 value-sum", "4x3 output-sum", "3x4 output-sum")
"""Published sizes that only `manual_baseline_speed.py` measures: here 6x2 stands for them."""
MANUAL_BASELINES: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    "repavit": partial(repavit.deployed, heads=HEADS),
    "nondeep": nondeep.deployed,
    "riformer": partial(riformer.deployed, stride=2),
    "dwconv": partial(dwconv.deployed, heads=HEADS),
    "pyra": partial(pyra.deployed, heads=HEADS),
}


class MethodNetwork(NamedTuple):
    """One network.

    Attributes:
        method: Its method.
        size: The method's name of its size, or ``digits`` for a trained network.
        checkpoint: Makes its training-time checkpoint.
        manual_baseline: Makes the manual baseline of a checkpoint.
        trained: Whether it has labeled images, on which accuracy is evaluated.
        large: Whether its memory use allows only FP32 to be measured.
    """

    method: str
    size: str
    checkpoint: Callable[[], dict[str, Any]]
    manual_baseline: Callable[[dict[str, Any]], nn.Module]
    trained: bool = False
    large: bool = False

    @property
    def name(self) -> str:
        """Its name in `--rows`."""
        return f"{self.method}-{self.size}".replace("/", "-").replace(" ", "-")


def _trained(method: str) -> dict[str, Any]:
    """The checkpoint that is installed with repaconv, in FP32."""
    saved = torch.load(models.checkpoint(method), weights_only=False)
    weights = saved.pop("state_dict", None) or saved.pop("model")
    return {**saved, "model": {name: w.float() if w.is_floating_point() else w for name, w in weights.items()}}


def _published(model: Model) -> MethodNetwork:
    return MethodNetwork(model.method, model.name, model.checkpoint, model.deployed, large=model.large)


METHOD_NETWORKS = (
    *(
        MethodNetwork(method, "digits", partial(_trained, method), MANUAL_BASELINES[method], trained=True)
        for method in models.METHODS
    ),
    *(_published(model) for model in MODELS if model.name not in NOT_COMPARED),
)
