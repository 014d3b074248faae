"""Seeded inputs of a graph of any origin, as its first operators expect them: images one by one, or whole calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from repaconv.artefacts import GraphFold, ImageSize
from repaconv.engines.contract import Feeds
from repaconv.proof.data import Batch, Inputs

if TYPE_CHECKING:
    import onnx


def drawn_inputs(
    model: onnx.ModelProto,
    folded: GraphFold,
    count: int,
    seed: int,
    size: ImageSize | None = None,
    batch: int | None = None,
) -> Inputs:
    """So many images, or so many calls where the graph takes no images or its outputs are none of them.

    Args:
        model: The graph.
        folded: What was found of it.
        count: Of images or calls.
        seed: Of the draw.
        size: (height, width) of images, the usual where None.
        batch: Of calls, where that is free.
    """
    if folded.image_size is None:
        name = f"{count} drawn calls, seed {seed}"
        free = {folded.sizes.batch: batch} if batch and folded.sizes.batch else {}
        return Inputs(name, (count,), lambda at, _: Batch(_call(model, folded, seed, at, free), whole=True), whole=True)
    first = _images(model, folded, seed, 0, size)

    def piece(start: int, stop: int) -> Batch:
        every = [_images(model, folded, seed, number, size) for number in range(start, stop)]
        return Batch({_name(model): np.concatenate(every)}, whole=folded.whole)

    shape = (count, *first.shape[1:])
    return Inputs(f"{count} drawn images, seed {seed}", shape, piece, whole=folded.whole)


def batches_of(
    model: onnx.ModelProto, folded: GraphFold, batch: int | None, sizes: Sequence[ImageSize | None]
) -> list[Feeds]:
    """Two calls on which graphs are compared: of one image and of several where the batch is free, one of each size."""
    fixed = batch or (folded.batch if isinstance(folded.batch, int) else None)
    if folded.image_size is None:
        free = {folded.sizes.batch: fixed} if fixed and folded.sizes.batch else {}
        return [_call(model, folded, 0, 0, free), _call(model, folded, 0, 1, {**folded.sizes.other, **free})]
    counts = [fixed or 1, fixed or (1 if folded.whole else folded.sizes.other.get(folded.sizes.batch, 1))]
    return [
        {_name(model): np.concatenate([_images(model, folded, seed, n, size) for n in range(count)])}
        for seed, (count, size) in enumerate(zip(counts, sizes, strict=True))
    ]


def _name(model: onnx.ModelProto) -> str:
    from repaconv.subjects.given import inputs_of

    return inputs_of(model)[0].name


def _call(model: onnx.ModelProto, folded: GraphFold, seed: int, at: int, free: dict[str, int] | None = None) -> Feeds:
    from repaconv.proof.probes import drawn

    sizes = {**folded.sizes.usual, **(free or {})}
    return drawn(model, sizes, [seed, at], gain=folded.sizes.gain, below=folded.sizes.below, held=folded.sizes.held)


def _images(model: onnx.ModelProto, folded: GraphFold, seed: int, at: int, size: ImageSize | None) -> np.ndarray:
    """One image [1, C, H, W]."""
    free = dict(zip(folded.sizes.sides, size or folded.image_size or (), strict=False))
    array: np.ndarray = next(iter(_call(model, folded, seed, at, free).values()))[:1]
    return array
