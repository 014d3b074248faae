"""Convert a network block by block: each fit uses the residual stream of the network converted so far."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.backbones.blockwise_vit import deploy_config
from repaconv.backbones.vit import ViT, ViTConfig
from repaconv.conversion.block_conversion import BlockContext, ConvertedBlock, linear_tensors
from repaconv.conversion.kernel_fitting import ConversionSettings, convert_block, refit_output_projection
from repaconv.conversion.least_squares import RIDGE, NormalEquations
from repaconv.conversion.original_activations import OriginalActivations
from repaconv.conversion.plain_vit import PlainViT, Reading, after_ffn, batches, map_batches
from repaconv.methods.dwconv.paper_equations import with_token_merging
from repaconv.methods.pyra.paper_equations import MERGED_REASONS, MERGED_TOLERANCE
from repaconv.verification.model_runners import with_weights

# The FFN after a replaced mixer. Its last layer is refitted in closed form to the original's residual stream after the
# block. It has more unknowns than W^O, so it can correct errors that W^O could not.

FITTED_TOKENS = 12_000
"""Number of tokens to fit to, sampled from all images; at least four per unknown. More improve little."""


def refit_ffn(config: ViTConfig, piece: ConvertedBlock, student: Tensor, wanted: Tensor) -> ConvertedBlock:
    """Return the block with the last layer of its FFN refitted; LayerScale is multiplied into it.

    Args:
        config: The network's configuration.
        piece: The block, with its mixer converted already.
        student: The input of the block, [N, T, d].
        wanted: The original's residual stream after the block, [N, T, d].
    """
    block, name = piece.module, "w3" if piece.block.swiglu else "fc2"
    last, normal, heard = block.get_submodule(f"mlp.{name}"), NormalEquations(), dict[str, Tensor]()
    assert isinstance(last, nn.Linear)
    hooks = [
        module.register_forward_pre_hook(lambda _module, given, key=key: heard.update({key: given[0]}))
        for key, module in (("middle", block.get_submodule("norm2")), ("hidden", last))
    ]
    random, rows = torch.Generator().manual_seed(0), student.shape[0] * student.shape[1]
    share = min(1.0, max(FITTED_TOKENS, 4 * last.in_features) / rows)
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
    tensors |= linear_tensors(f"mlp.{name}", solved.weights)
    block_without_scale = replace(piece.block, traits=replace(piece.block.traits, scale2=False))
    module = with_weights(block_without_scale.build(config).eval(), tensors, torch.float32)
    return ConvertedBlock(block_without_scale, tensors, module, (*piece.conditions, solved.condition))


# The conversion of a whole network


@dataclass(frozen=True)
class Converted:
    """A converted network.

    Attributes:
        net: The network in float32 and eval mode.
        reading: Its blocks, and all its weights by their official names.
        conditions: The condition numbers of the fits, by the index of the block.
        refitted: Indices of kept blocks whose W^O was refitted.
    """

    net: ViT
    reading: Reading
    conditions: dict[int, tuple[float, ...]]
    refitted: tuple[int, ...]


def convert(
    activations: OriginalActivations, chosen: Collection[int], how: ConversionSettings, *, refit: bool = False
) -> Converted:
    """Return the network with the chosen blocks replaced.

    Args:
        streams: Activations of the original on the images to fit to.
        chosen: Indices of the blocks.
        how: How they are converted.
        refit: Whether W^O of kept blocks after the first replaced one is refitted.
    """
    with torch.inference_mode():
        pieces = _convert_blocks(activations, chosen, how, refit)
    kept = tuple(index for index in pieces if index not in chosen)
    return _assemble(activations.plain, pieces, how.schedule, kept)


def _convert_blocks(
    activations: OriginalActivations, chosen: Collection[int], how: ConversionSettings, refit: bool
) -> dict[int, ConvertedBlock]:
    pieces: dict[int, ConvertedBlock] = {}
    plain, first, last = activations.plain, min(chosen), len(activations.plain.blocks) - 1 if refit else max(chosen)
    student = activations.at(first).into
    for index in range(first, last + 1):
        block, context = plain.blocks[index], BlockContext(plain, index, *activations.at(index), student)
        if index in chosen:
            pieces[index] = convert_block(context, how)
        elif refit:
            pieces[index] = refit_output_projection(context, how)
        if how.ffn and index in chosen:
            right = map_batches(partial(after_ffn, block), context.middle)
            pieces[index] = refit_ffn(plain.config, pieces[index], student, right)
        if index < last:
            student = map_batches(pieces[index].module if index in pieces else block, student)
    return pieces


def _assemble(
    plain: PlainViT, pieces: dict[int, ConvertedBlock], schedule: tuple[int, ...], kept: tuple[int, ...]
) -> Converted:
    blocks = list(plain.reading.blocks)
    tensors = {name: tensor.float() for name, tensor in plain.reading.tensors.items()}
    for index, piece in pieces.items():
        prefix = f"blocks.{index}."
        blocks[index] = piece.block
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
        tensors |= {f"{prefix}{name}": tensor.clone() for name, tensor in piece.tensors.items()}
    sizes = {each.name: getattr(plain.config, each.name) for each in fields(plain.config) if each.name != "blocks"}
    several = with_token_merging(tuple(blocks), schedule, sizes) if any(schedule) else tuple(blocks)
    config = deploy_config(sizes, several)
    tolerances = {**plain.reading.tolerances, **(MERGED_TOLERANCE if any(schedule) else {})}
    reasons = {**plain.reading.tolerance_reasons, **(MERGED_REASONS if any(schedule) else {})}
    limits: dict[str, Any] = {"tolerances": tolerances, "tolerance_reasons": reasons}
    reading = replace(plain.reading, config=config, blocks=several, tensors=tensors, names={}, facts=(), **limits)
    return Converted(
        PlainViT.of(reading).net, reading, {index: piece.conditions for index, piece in pieces.items()}, kept
    )
