"""The models of `manual_baseline_speed.py`: published sizes with seeded weights, and their required speedups."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from manual_baselines import dwconv, nondeep, pyra, repavit, riformer
from torch import nn

from repaconv.core import plugins
from repaconv.methods.nondeep.published_models import example_meta

SEED = 1
REPAVIT = Namespace(idle_ratio=0.75, heuristic="static", feature_norm="BatchNorm", channel_idle=True, input_size=224)


class Model(NamedTuple):
    """One network.

    Attributes:
        method: Its method.
        size: The method's name of its size.
        bar: Required speedup of repaconv at batch size 1 on one thread; None if it is reported only.
        deployed: Makes the manual baseline of the checkpoint.
        metadata: What a trainer writes next to the weights.
        note: Distinguishes it from another network of its size.
        lora: Rank of the adapters that it was trained with.
        merges: Whether it chooses tokens to merge.
        large: Whether one inference takes seconds.
    """

    method: str
    size: str
    bar: float | None
    deployed: Callable[[dict[str, Any]], nn.Module]
    metadata: dict[str, Any]
    note: str = ""
    lora: int = 0
    merges: bool = False
    large: bool = False

    @property
    def name(self) -> str:
        """Size and note."""
        return f"{self.size} {self.note}".strip()

    def checkpoint(self) -> dict[str, Any]:
        """The training-time checkpoint."""
        weights = plugins.load(plugins.METHODS, self.method).example(self.size, seed=SEED)
        if self.lora:
            weights |= pyra.example_lora(weights, self.lora, SEED)
        return {"model": weights, **self.metadata}


def _branches(size: str, bar: float | None, value: str) -> Model:
    """A network of the paper: 224 pixels, 12 heads."""
    meta = example_meta(img_size=224, num_heads=12, num_branches=int(size.partition("x")[2]), attn_value=value)
    return Model("nondeep", size, bar, nondeep.deployed, {"meta": meta}, note=value)


MODELS = (
    Model("repavit", "deit-tiny/0.75", 1.08, partial(repavit.deployed, heads=3), {"args": REPAVIT}),
    Model("repavit", "deit-base/0.75", 1.08, partial(repavit.deployed, heads=12), {"args": REPAVIT}),
    _branches("6x2", 1.75, "value-sum"),
    _branches("4x3", 1.5, "value-sum"),
    _branches("3x4", 1.35, "value-sum"),
    _branches("6x2", None, "output-sum"),
    _branches("4x3", None, "output-sum"),
    _branches("3x4", None, "output-sum"),
    Model("riformer", "s12", 1.01, riformer.deployed, {}),
    Model("pyra", "vit-base/low", 1.01, partial(pyra.deployed, heads=12), {}, lora=8, merges=True),
    Model("pyra", "vit-base/high", 1.01, partial(pyra.deployed, heads=12), {}, lora=8, merges=True),
    Model("dwconv", "vit-large/12", 1.01, partial(dwconv.deployed, heads=16), {}, large=True),
)
