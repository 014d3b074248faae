"""Fold the parts of a network that are not specific to a method: norms, attention, MLPs, LayerScales and heads.

The folds are products of affine maps (`repaconv.algebra.affine_maps`). Each gives its row of the fold certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.tensor_names import in_float64
from repaconv.backbones.vit import ViT, ViTConfig
from repaconv.backbones.vit_training_norms import NormTraits
from repaconv.method_api.contract import FoldedPart
from repaconv.method_api.fold_error import max_rel_error, relative_difference
from repaconv.results import FoldStep


def linear_of(block: Mapping[str, Tensor], name: str) -> Affine:
    """The linear layer of that name as an affine map; a missing bias is zero."""
    return Affine.linear(block[f"{name}.weight"], block.get(f"{name}.bias"))


def score_scale(width: int, heads: int) -> Affine:
    """A diagonal map that multiplies the q rows of [q | k | v] by 1 / sqrt(dh)."""
    ones = torch.ones(3 * width, dtype=torch.float64)
    ones[:width] = (width // heads) ** -0.5
    return Affine.diagonal(ones)


def fold_attention(block: Mapping[str, Tensor], heads: int, norm: Affine, scale: Affine) -> dict[str, Affine]:
    """Fold norm's affine and the scores' divisor into qkv, and the LayerScale into proj."""
    qkv = linear_of(block, "attn.qkv")
    return {
        "attn.qkv": score_scale(norm.out_width, heads) @ qkv @ norm,
        "attn.proj": scale @ linear_of(block, "attn.proj"),
    }


def fold_mlp(block: Mapping[str, Tensor], norm: Affine, scale: Affine) -> dict[str, Affine]:
    """Fold norm's affine into fc1, and the LayerScale into fc2."""
    return {"mlp.fc1": linear_of(block, "mlp.fc1") @ norm, "mlp.fc2": scale @ linear_of(block, "mlp.fc2")}


def named_tensors(parts: Mapping[str, Affine], *, without_bias: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Convert affine maps to the tensors ``<name>.weight`` and ``<name>.bias``."""
    tensors = {}
    for name, affine in parts.items():
        tensors[f"{name}.weight"] = affine.dense().weight
        if name not in without_bias:
            tensors[f"{name}.bias"] = affine.bias
    return tensors


def affine_into_linear(norm: Affine, linear: Affine, module: str, name: str, description: str) -> FoldedPart:
    """Fold a norm's affine into the next linear layer, and compare both on the same normalized tokens.

    Args:
        norm: The norm's affine.
        linear: The linear layer.
        module: Name of the module in the certificate.
        name: Name of the linear layer.
        description: Description of the fold for the certificate.
    """
    folded = linear @ norm
    n = torch.randn(5, norm.in_width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    error = max_rel_error(folded(n), linear(norm(n)))
    return FoldedPart(
        named_tensors({name: folded}), FoldStep(module=module, folded=(description,), max_rel_error=error)
    )


def norm_and_head(tensors: Mapping[str, Tensor], classes: int) -> Iterator[FoldedPart]:
    """Fold the final norm's affine through the pooling, which is linear, into the head; without a head it is kept."""
    if not classes:
        yield FoldedPart({name: tensors[name].double() for name in ("norm.weight", "norm.bias")})
        return
    norm = Affine.diagonal(tensors["norm.weight"], tensors["norm.bias"])
    yield affine_into_linear(norm, linear_of(tensors, "head"), "head", "head", "norm's affine -> head")


def folded_block(
    prefix: str,
    training: Callable[[], nn.Module],
    trained: Mapping[str, Tensor],
    deploy: Callable[[], nn.Module],
    folded: Mapping[str, Tensor],
    shape: tuple[int, ...],
    *,
    descriptions: tuple[str, ...],
    not_folded_parts: tuple[str, ...],
    equation: str = "",
) -> FoldedPart:
    """Make the folded part of one block, with the difference between both forms on random tokens.

    Args:
        prefix: Prefix of the block's names, e.g. ``blocks.0.``.
        training: Builds the block as trained.
        trained: Its weights, by their names within the block.
        deploy: Builds the deploy block.
        folded: Its weights, by their names within the block.
        shape: Shape of the random tokens.
        descriptions: Descriptions of what is folded.
        not_folded_parts: Descriptions of what is not folded.
        equation: The paper's equations of the fold.
    """
    with torch.device("meta"):
        pair = (training(), trained), (deploy(), folded)
    return FoldedPart(
        {f"{prefix}{name}": tensor for name, tensor in folded.items()},
        FoldStep(
            module=prefix.rstrip("."),
            folded=descriptions,
            not_folded=not_folded_parts,
            equation=equation,
            max_rel_error=relative_difference(*pair, shape),
        ),
    )


# --- Fold the parts of a vision transformer outside its blocks: the stem is unchanged, the norm goes into the head.

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
