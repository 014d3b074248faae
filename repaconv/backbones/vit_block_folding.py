"""What is folded around any method's part, in the algebra of `repaconv.algebra.affine_maps`, and its rows of the
certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.method_api.contract import FoldedPart
from repaconv.method_api.fold_error import max_rel_error, relative_difference
from repaconv.results import FoldStep


def linear_of(block: Mapping[str, Tensor], name: str) -> Affine:
    """The linear layer of that name; a bias that is not there is zero."""
    return Affine.linear(block[f"{name}.weight"], block.get(f"{name}.bias"))


def score_scale(width: int, heads: int) -> Affine:
    """1 / sqrt(dh) on the q rows of [q | k | v]."""
    ones = torch.ones(3 * width, dtype=torch.float64)
    ones[:width] = (width // heads) ** -0.5
    return Affine.diagonal(ones)


def fold_attention(block: Mapping[str, Tensor], heads: int, norm: Affine, scale: Affine) -> dict[str, Affine]:
    """norm's affine and the scores' divisor into qkv, LayerScale into proj."""
    qkv = linear_of(block, "attn.qkv")
    return {
        "attn.qkv": score_scale(norm.out_width, heads) @ qkv @ norm,
        "attn.proj": scale @ linear_of(block, "attn.proj"),
    }


def fold_mlp(block: Mapping[str, Tensor], norm: Affine, scale: Affine) -> dict[str, Affine]:
    """norm's affine into fc1, LayerScale into fc2."""
    return {"mlp.fc1": linear_of(block, "mlp.fc1") @ norm, "mlp.fc2": scale @ linear_of(block, "mlp.fc2")}


def named(parts: Mapping[str, Affine], *, without_bias: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Affine maps as ``<name>.weight`` and ``<name>.bias``."""
    tensors = {}
    for name, affine in parts.items():
        tensors[f"{name}.weight"] = affine.dense().weight
        if name not in without_bias:
            tensors[f"{name}.bias"] = affine.bias
    return tensors


def affine_into_linear(norm: Affine, linear: Affine, module: str, name: str, told: str) -> FoldedPart:
    """A norm's affine into the linear layer behind it, both read on the same normalised tokens."""
    folded = linear @ norm
    n = torch.randn(5, norm.in_width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    error = max_rel_error(folded(n), linear(norm(n)))
    return FoldedPart(named({name: folded}), FoldStep(module=module, folded=(told,), max_rel_error=error))


def norm_and_head(tensors: Mapping[str, Tensor], classes: int) -> Iterator[FoldedPart]:
    """The final norm's affine through the pooling, which is linear, into the head; features keep the norm."""
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
    told: tuple[str, ...],
    left: tuple[str, ...],
    equation: str = "",
) -> FoldedPart:
    """A block's part of the fold, with the difference that it makes on random tokens of this shape."""
    with torch.device("meta"):
        pair = (training(), trained), (deploy(), folded)
    return FoldedPart(
        {f"{prefix}{name}": tensor for name, tensor in folded.items()},
        FoldStep(
            module=prefix.rstrip("."),
            folded=told,
            not_folded=left,
            equation=equation,
            max_rel_error=relative_difference(*pair, shape),
        ),
    )
