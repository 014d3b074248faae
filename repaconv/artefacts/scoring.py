"""What ``score`` leaves: how near each head of a network is to a convolution."""

from __future__ import annotations

from repaconv.artefacts.records import Artefact, Fact, ImageSize, Origin, Record


class HeadScore(Record):
    """Of a head's attention among the patches.

    ``sigma`` is the paper's Sigma_h, the sum over all entries of their standard deviation over the images (input
    invariance); ``locality`` the share of the mean attention that lies within the kernel, ``invariance`` the share of
    its squares that one matrix of offsets has; ``entropy`` that of a query's attention over all tokens, the mean of
    some 64 queries or of all, relative to a uniform one.
    """

    sigma: float
    locality: float
    invariance: float
    entropy: float


class BlockScore(Record):
    """Of a block: the paper's Sigma_b, the mean of Sigma_h, and the other means.

    ``error`` is what replacing this block alone costs: the relative error of the outputs of images that it was not
    fitted on; None where it was not measured.
    """

    block: int
    sigma: float
    locality: float
    invariance: float
    entropy: float
    error: float | None = None
    heads: tuple[HeadScore, ...]


class ScoreArtefact(Artefact):
    """The scores of all blocks; measured, and nothing to be passed.

    ``kernel`` is the side that locality is for, ``uniform`` the locality of attention that is the same everywhere.
    ``by_sigma`` and ``by_error`` are the blocks in the order in which either would replace them.
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
