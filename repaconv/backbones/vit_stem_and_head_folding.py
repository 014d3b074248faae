"""Fold the parts of a vision transformer outside its blocks: the stem is unchanged, the norm goes into the head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.tensor_names import in_float64
from repaconv.backbones.training_norms import NormTraits
from repaconv.backbones.vit import ViT, ViTConfig
from repaconv.backbones.vit_block_folding import linear_of, named_tensors
from repaconv.method_api.contract import FoldedPart
from repaconv.method_api.fold_error import relative_difference
from repaconv.results import FoldStep

TAIL = ("norm.", "fc_norm.", "pre_logits.", "head")


def fold_stem(tensors: Mapping[str, Tensor]) -> FoldedPart:
    """The tensors before the blocks in float64, unchanged."""
    return FoldedPart({n: w.double() for n, w in tensors.items() if not n.startswith(("blocks.", *TAIL))})


def fold_tail(config: ViTConfig, tensors: Mapping[str, Tensor]) -> FoldedPart:
    """Fold the final norm's affine into the next linear layer, and two averaged heads into one.

    That layer is ``pre_logits.fc`` if there is one, and the head is then unchanged; else it is the head. A network
    without either keeps its final norm.
    """
    final = "fc_norm" if config.pool_first else "norm"
    tail = {n: w for n, w in tensors.items() if n.startswith(TAIL)}
    if not config.classes and not config.representation:
        return FoldedPart(in_float64(tail))
    next_layer = "pre_logits.fc" if config.representation else "head"
    eps = config.batch_eps if config.norm == "batch" else config.norm_eps
    norm = NormTraits(config.norm, eps).affine(tail, final, config.width)
    first = linear_of(tail, next_layer) @ norm
    descriptions = [f"{final}'s {'affine' if config.norm == 'layer' else 'BatchNorm, whole,'} -> {next_layer}"]
    if config.pool == "distilled":
        other = linear_of(tail, "head_dist") @ norm
        first = Affine(torch.cat([first.weight, other.weight], 1) / 2, (first.bias + other.bias) / 2)
        descriptions.append("head and head_dist, averaged -> one head over both tokens")
    folded = named_tensors({next_layer: first})
    if config.representation and config.classes:
        folded |= named_tensors({"head": linear_of(tail, "head")})
    return FoldedPart(
        folded, FoldStep(module=next_layer, folded=tuple(descriptions), max_rel_error=_tail_error(config, tail, folded))
    )


def _tail_error(config: ViTConfig, trained: Mapping[str, Tensor], folded: Mapping[str, Tensor]) -> float:
    """The relative difference between both forms of the norm and head, on the same random tokens."""

    class Tail(ViT):
        def __init__(self, *, deployed: bool) -> None:
            nn.Module.__init__(self)
            self.config, self.deployed = config, deployed
            self._build_tail(config)

        def forward(self, x: Tensor) -> Tensor:
            return self.read_out(x)

    with torch.device("meta"):
        training, deploy = Tail(deployed=False), Tail(deployed=True)
    return relative_difference((training, trained), (deploy, folded), (2, config.prefix + 3, config.width))
