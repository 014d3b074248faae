"""The FFN behind a mixer that was replaced: its last layer in closed form, as W^O before it.

It has more unknowns than W^O, and what W^O could not mend of the residual stream it can: the original's stream behind
the block is what it is fitted to.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from repaconv.backbones.vit import ViTConfig
from repaconv.converting.normal import RIDGE, Normal
from repaconv.converting.places import Piece, linear
from repaconv.converting.plain import batches
from repaconv.proof.runners import weighted

ROWS = 12_000
"""Tokens that are fitted to, drawn from all images, and at least four an unknown: more take time and tell little."""


def with_ffn(config: ViTConfig, piece: Piece, student: Tensor, wanted: Tensor) -> Piece:
    """The block with its FFN's last layer fitted anew; LayerScale goes into it.

    Args:
        config: Of the network.
        piece: The block, its mixer fitted already.
        student: What flows into it, [N, T, d].
        wanted: The original's stream behind it, [N, T, d].
    """
    block, name = piece.module, "w3" if piece.block.swiglu else "fc2"
    last, normal, heard = block.get_submodule(f"mlp.{name}"), Normal(), dict[str, Tensor]()
    assert isinstance(last, nn.Linear)
    hooks = [
        module.register_forward_pre_hook(lambda _module, given, key=key: heard.update({key: given[0]}))
        for key, module in (("middle", block.get_submodule("norm2")), ("hidden", last))
    ]
    random, rows = torch.Generator().manual_seed(0), student.shape[0] * student.shape[1]
    share = min(1.0, max(ROWS, 4 * last.in_features) / rows)
    for tokens, right in batches(student, wanted):
        block(tokens)
        hidden, added = heard["hidden"].flatten(0, 1), (right - heard["middle"]).flatten(0, 1)
        some = torch.randperm(len(added), generator=random)[: math.ceil(share * len(added))]
        normal.add(hidden[some], added[some])
    for hook in hooks:
        hook.remove()
    scale = getattr(block.ls2, "gamma", torch.ones(last.out_features))
    solved = normal.solve((scale * torch.cat([last.weight.T, last.bias[None]])).detach(), RIDGE)
    tensors = {key: value for key, value in piece.tensors.items() if not key.startswith("ls2.")}
    tensors |= linear(f"mlp.{name}", solved.weights)
    told = replace(piece.block, traits=replace(piece.block.traits, scale2=False))
    module = weighted(told.build(config).eval(), tensors, torch.float32)
    return Piece(told, tensors, module, (*piece.conditions, solved.condition))
