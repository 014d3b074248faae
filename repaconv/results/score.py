"""Results of ``score``: how similar the attention of each head is to a convolution."""

from __future__ import annotations

from repaconv.results.records import Artefact, Fact, ImageSize, Origin, Record


class HeadScore(Record):
    """The scores of one attention head, from its attention among the patches over all images.

    Attributes:
        sigma: The paper's Sigma_h: the sum, over all entries of the attention matrix, of their standard deviation over
            the images. The smaller, the less the attention depends on the image.
        locality: The share (0 to 1) of the mean attention that is within ``kernel`` x ``kernel`` patches around its
            query.
        invariance: The share (0 to 1) of the squares of the mean attention matrix that depends on the offset between
            two patches alone: 1 for a convolution.
        entropy: The mean entropy of a query's attention over all tokens, relative to that of uniform attention (0 to
            1), over about 64 evenly spaced queries, or all if there are fewer.
    """

    sigma: float
    locality: float
    invariance: float
    entropy: float


class BlockScore(Record):
    """The scores of one block: the means over its heads, and what replacing it alone costs.

    Attributes:
        block: The index of the block, from 0.
        sigma: The paper's Sigma_b: the mean of ``sigma`` over the heads.
        locality: The mean of ``locality`` over the heads.
        invariance: The mean of ``invariance`` over the heads.
        entropy: The mean of ``entropy`` over the heads.
        error: The relative error ||a - b|| / ||b|| of the network's outputs if this block alone is replaced by a
            convolution, on images of the validation split; null if it was not measured.
        heads: The scores of each head, in order.
    """

    block: int
    sigma: float
    locality: float
    invariance: float
    entropy: float
    error: float | None = None
    heads: tuple[HeadScore, ...]


class ScoreArtefact(Artefact):
    """The scores of all attention heads and blocks of a plain vision transformer.

    They are measurements, and there is nothing to pass: the verdict is always *not verified*.

    Attributes:
        origin: The checkpoint, and which weights of it were read.
        facts: Every setting that was used and is not a weight, with its source.
        inputs: The images, in words, e.g. the name of the folder or file.
        images: How many images were used.
        image_size: (height, width) of the images in pixels.
        grid: The number of patches as (rows, columns).
        kernel: The side length, in patches, of the convolution kernel that ``locality`` refers to.
        uniform: The ``locality`` of attention that is equal everywhere, for comparison.
        blocks: The scores of each block, in order.
        by_sigma: The indices of the blocks by ascending ``sigma``: the order in which the paper's criterion replaces
            them.
        by_error: The indices of the blocks by ascending ``error``: the order in which the measured criterion replaces
            them. Empty without ``--errors``.
    """

    stage: str = "score"
    origin: Origin
    facts: tuple[Fact, ...] = ()
    inputs: str
    images: int
    image_size: ImageSize
    grid: tuple[int, int]
    kernel: int
    uniform: float
    blocks: tuple[BlockScore, ...]
    by_sigma: tuple[int, ...]
    by_error: tuple[int, ...] = ()
