"""How attention of the tokens before the patches folds beside a mixer of the patches (converted nets alone)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from repaconv.affine import Affine
from repaconv.methods.dwconv.mixers import Mixer
from repaconv.skeletons.folding import linear_of, named, score_scale


class FoldedMixer(NamedTuple):
    """A mixer's weights in the deploy form, what was folded in words, and whether norm1 keeps its affine."""

    tensors: dict[str, Tensor]
    told: tuple[str, ...]
    keeps_norm: bool = False


def fold_prefix(
    block: Mapping[str, Tensor], mixer: Mixer, patches: FoldedMixer, norm: Affine, scale: Affine
) -> FoldedMixer:
    """Few queries over many tokens: keys' and values' matrices on their side, the keys' bias gone, the values' in proj.

    Args:
        block: Weights in float64 by the names within the block.
        mixer: How it was trained.
        patches: The other tokens' mixer, folded.
        norm: norm1's affine.
        scale: ls1.
    """
    width, heads = norm.out_width, mixer.heads
    qkv = score_scale(width, heads) @ linear_of(block, "attn.prefix.qkv") @ norm
    q, k, v = (qkv.rows(slice(part * width, (part + 1) * width)) for part in range(3))
    proj = scale @ linear_of(block, "attn.prefix.proj")
    proj = Affine(proj.weight, proj.bias + proj.weight @ v.bias)
    tensors = {name.replace("attn.", "attn.patches.", 1): tensor for name, tensor in patches.tensors.items()}
    tensors |= named({"attn.prefix.q": q, "attn.prefix.proj": proj})
    tensors["attn.prefix.k"] = k.weight.view(heads, -1, width)
    tensors["attn.prefix.v"] = v.weight.view(heads, -1, width).transpose(1, 2).contiguous()
    told = f"attention of {mixer.prefix} tokens before the patches: keys and values -> their queries"
    return FoldedMixer(tensors, (*patches.told, told))
