"""A whole network, block by block: every fit sees what the ones before it made of the residual stream."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from repaconv.backbones.vit import ViT
from repaconv.converting.ffn import with_ffn
from repaconv.converting.fitting import How, fitted, refitted
from repaconv.converting.places import Piece, Place
from repaconv.converting.plain import Plain, Reading, behind_mlp, mapped
from repaconv.converting.streams import Streams
from repaconv.methods.dwconv.paper import merging
from repaconv.methods.pyra.paper import MERGED_TOLERANCE
from repaconv.skeletons.blockwise import deploy_config


@dataclass(frozen=True)
class Converted:
    """A converted network.

    Attributes:
        net: In float32 and eval mode.
        reading: Its blocks, and all its weights by official names.
        conditions: Of each block that was solved for, by index.
        refitted: Kept blocks whose W^O was fitted anew.
    """

    net: ViT
    reading: Reading
    conditions: dict[int, tuple[float, ...]]
    refitted: tuple[int, ...]


def convert(streams: Streams, chosen: Collection[int], how: How, *, refit: bool = False) -> Converted:
    """The network with the chosen blocks replaced.

    Args:
        streams: Of the original, on the images to fit on.
        chosen: Blocks.
        how: What they become.
        refit: Whether blocks that stay, behind one that does not, have their W^O fitted too.
    """
    with torch.inference_mode():
        pieces = _pieces(streams, chosen, how, refit)
    kept = tuple(index for index in pieces if index not in chosen)
    return _assembled(streams.plain, pieces, how.schedule, kept)


def _pieces(streams: Streams, chosen: Collection[int], how: How, refit: bool) -> dict[int, Piece]:
    pieces: dict[int, Piece] = {}
    plain, first, last = streams.plain, min(chosen), len(streams.plain.blocks) - 1 if refit else max(chosen)
    student = streams.at(first).into
    for index in range(first, last + 1):
        block, place = plain.blocks[index], Place(plain, index, *streams.at(index), student)
        if index in chosen:
            pieces[index] = fitted(place, how)
        elif refit:
            pieces[index] = refitted(place, how)
        if how.ffn and index in chosen:
            right = mapped(partial(behind_mlp, block), place.middle)
            pieces[index] = with_ffn(plain.config, pieces[index], student, right)
        if index < last:
            student = mapped(pieces[index].module if index in pieces else block, student)
    return pieces


def _assembled(plain: Plain, pieces: dict[int, Piece], schedule: tuple[int, ...], kept: tuple[int, ...]) -> Converted:
    blocks = list(plain.reading.blocks)
    tensors = {name: tensor.float() for name, tensor in plain.reading.tensors.items()}
    for index, piece in pieces.items():
        prefix = f"blocks.{index}."
        blocks[index] = piece.block
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
        tensors |= {f"{prefix}{name}": tensor.clone() for name, tensor in piece.tensors.items()}
    sizes = {each.name: getattr(plain.config, each.name) for each in fields(plain.config) if each.name != "blocks"}
    several = merging(tuple(blocks), schedule, sizes) if any(schedule) else tuple(blocks)
    config = deploy_config(sizes, several)
    tolerances = {**plain.reading.tolerances, **(MERGED_TOLERANCE if any(schedule) else {})}
    reading = replace(
        plain.reading, config=config, blocks=several, tensors=tensors, tolerances=tolerances, names={}, facts=()
    )
    return Converted(Plain.of(reading).net, reading, {index: piece.conditions for index, piece in pieces.items()}, kept)
