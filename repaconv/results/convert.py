"""Results of ``convert``: which blocks were replaced, how they were chosen, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from repaconv.deprecation import former_attribute, former_names
from repaconv.results.bench import Ratio
from repaconv.results.records import Artefact, Fact, ImageSize, Link, Origin, Payload, Record

# --- Results of ``score``: how similar the attention of each head is to a convolution.


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


# --- Results of ``convert``: which blocks were replaced, how they were chosen, and what it costs.


class Share(Record):
    """The number of images in each split; the content of an image decides its split, so no image is in two.

    Attributes:
        calibration: The number of images to which weights were fitted or trained: in ``convert`` about half of all, in
            ``finetune`` three quarters.
        validation: The number of images by which candidates or epochs were compared: about a quarter, in ``finetune``
            an eighth.
        test: The number of images used for the evaluation alone: about a quarter, in ``finetune`` an eighth.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"fitting": "calibration", "choosing": "validation", "judging": "test"}

    calibration: int
    validation: int
    test: int


class Tried(Record):
    """What one candidate conversion costs against the original network, on the validation split.

    It is measured before the candidate that is taken is fitted to the validation split as well.

    Attributes:
        blocks: The indices of the blocks that it replaces; empty if it merges tokens instead.
        error: The relative error of its outputs: ||a - b|| / ||b|| over all outputs of all images.
        agreement: The share (0 to 1) of images with the same top-1 prediction as the original; null if the network
            outputs features.
        accuracy: The top-1 accuracy minus that of the original, as a share; null without labels.
        divergence: The mean KL divergence from the original's class probabilities, in nats; null if the network outputs
            features.
        within: Whether the budget allows it; null without a budget.
    """

    blocks: tuple[int, ...]
    error: float
    agreement: float | None = None
    accuracy: float | None = None
    divergence: float | None = None
    within: bool | None = None


class SpeedTrial(Record):
    """A conversion whose speedup over the original network was measured.

    Attributes:
        kind: The kind of conversion: ``depthwise``, ``ensembled``, ``static`` or ``merged``; empty in ``speed_trials``,
            all of one kind.
        blocks: The indices of the blocks that it replaces; empty if it replaces none.
        schedule: The number of tokens that it merges in each block; empty if it merges none.
        tried: What it costs on the validation split; null in ``speed_trials``.
        speed: Its speedup over the original network, both folded and exported for the target.
    """

    kind: str = ""
    blocks: tuple[int, ...] = ()
    schedule: tuple[int, ...] = ()
    tried: Tried | None = None
    speed: Ratio


class SpeedTarget(Record):
    """The result of ``--speedup``: the speedup that was asked for, and the conversions measured to reach it.

    Attributes:
        target: The target on which the speedup was measured, by name.
        wanted: The speedup that was asked for.
        reached: The speedup of the conversion that was taken.
        speed_trials: Every conversion that was measured, in the order of measurement, with the one that was taken.
        machine: The name of the CPU on which the speedups were measured.
    """

    FORMER: ClassVar[Mapping[str, str]] = {"raced": "speed_trials"}

    target: str
    wanted: float
    reached: Ratio
    speed_trials: tuple[SpeedTrial, ...]
    machine: str

    @property
    def text(self) -> str:
        """Description of the speedup that was reached."""
        reached = self.reached.text("converted", "before")
        return f"{reached}, on {self.target}; a speedup of {self.wanted:g} was asked for: {self.machine}"

    told = former_attribute("told", "text", removed_in="0.3.0")


if not TYPE_CHECKING:
    __getattr__ = former_names(__name__, {"Pace": SpeedTarget, "Raced": SpeedTrial}, removed_in="0.3.0")


class Trade(Record):
    """The result of ``--curve``: speedup and loss of the conversion that was taken, and of every other kind.

    Attributes:
        target: The target on which the speedups were measured, by name.
        taken: The conversion that was taken.
        others: The other conversions: every kind with a quarter, half, three quarters and all of the blocks, and token
            merging.
        machine: The name of the CPU on which the speedups were measured.
    """

    target: str
    taken: SpeedTrial
    others: tuple[SpeedTrial, ...]
    machine: str


class ConvertArtefact(Artefact):
    """A network converted without training; lossy, and evaluated against the original on the test split.

    The verdict is whether the budget is kept, and *not verified* without a budget. With ``--to training-form`` nothing
    is folded, and the verdict is *not verified*, as the network is still to be trained.

    Attributes:
        parent: The checkpoint of the original network, and which weights of it were read.
        parent_settings: The settings given with ``--set`` to read the original, by name, as text.
        settings: The settings with which the fold reads the converted network, by name, as text.
        method: The registered name of the method whose network it became: ``dwconv``, ``pyra``, or with ``--to
            training-form`` another.
        kind: What replaces attention: ``depthwise``, ``ensembled`` or ``static``; ``merged`` for token merging,
            ``training-form`` for ``--to``.
        kernel: The side length of the convolution kernels, in patches; null for ``static``, for token merging and for
            the training-time architectures of methods other than ``dwconv``.
        fit: How the kernels were determined: ``squares`` (least squares), ``gaussian`` or ``mean``; empty for token
            merging and ``training-form``.
        criterion: What the blocks or heads were ranked by: ``error`` or ``sigma``; empty if they were named, for token
            merging and for ``training-form``.
        inputs: The images, in words, e.g. the name of the folder or file.
        images: How many images are in each split.
        labels: Where the labels of the images are from, or why there are none; empty if an .npz file has none.
        scores: The scores of all blocks of the original network; empty for token merging and ``training-form``.
        ranking: The indices of the blocks in the order in which they would be replaced; empty if blocks were named or
            single heads replaced, for token merging and for ``training-form``.
        blocks: The indices of the blocks that were replaced, in whole or in single heads; empty for token merging and
            ``training-form``.
        heads: The heads that were replaced, as ``BLOCK.HEAD``; empty if whole blocks were.
        tried: The candidates that were compared on the validation split; the last one was taken. Empty for token
            merging and ``training-form``.
        refitted: The indices of the blocks that keep their attention, but whose output projection was fitted anew.
        condition: The largest condition number (1-norm) of a linear system that was solved; null if none was.
        ridge: The ridge regularization of the least squares, relative to the mean square of the features; null unless
            ``fit`` is ``squares``.
        schedule: The number of tokens that are merged in each block; empty if none are.
        max_disagreement: The budget: the largest share (0 to 1) of changed top-1 predictions, or without classes of
            images that find another nearest image; null if none was given.
        max_accuracy_drop: The budget: the largest loss of top-1 accuracy, as a share (0 to 1); null if none was given.
        description: Which weights were taken over and which were fitted, in words, for ``training-form``; empty
            otherwise.
        speed_target: The speedup that was asked for, and what was measured for it; null without ``--speedup``.
        trade: The speedup and the loss of all kinds of conversion; null without ``--curve``.
        evaluation: The comparison with the original network on the test split: what the conversion loses. For
            ``training-form``, what the network loses before it is trained.
        payload: The converted network as a checkpoint of its method; null for token merging, which keeps the original
            weights.
    """

    FORMER: ClassVar[Mapping[str, str]] = {
        "told": "description",
        "judged": "evaluation",
        "pace": "speed_target",
        "order": "ranking",
    }

    stage: str = "convert"
    parent: Origin
    parent_settings: dict[str, str]
    settings: dict[str, str]
    method: str
    kind: str
    kernel: int | None
    fit: str
    criterion: str
    inputs: str
    images: Share
    labels: str = ""
    scores: tuple[BlockScore, ...] = ()
    ranking: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    heads: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()
    refitted: tuple[int, ...] = ()
    condition: float | None = None
    ridge: float | None = None
    schedule: tuple[int, ...] = ()
    max_disagreement: float | None = None
    max_accuracy_drop: float | None = None
    description: str = ""
    speed_target: SpeedTarget | None = None
    trade: Trade | None = None
    evaluation: Link
    payload: Payload | None


# --- Results of ``finetune``: every epoch, which was taken, and what the network loses against the original.


class Epoch(Record):
    """The network after one epoch, evaluated against the original network on the validation split.

    Attributes:
        cost: What decides which epoch is taken, the smaller the better: the mean KL divergence from the original's
            class probabilities in nats, or for features the relative error ||a - b|| / ||b||.
        agreement: The share (0 to 1) of images with the same top-1 prediction as the original; null if the network
            outputs features.
        accuracy: The top-1 accuracy minus that of the original, as a share; null without labels.
        loss: The mean training loss of the epoch; null for the start.
    """

    cost: float
    agreement: float | None = None
    accuracy: float | None = None
    loss: float | None = None


class FinetuneArtefact(Artefact):
    """A network trained from the result of ``convert``, with the original network as teacher.

    The verdict is whether the budget of the conversion is kept, and *not verified* without a budget. While training is
    interrupted it is *not verified*, ``payload`` is null, and ``other_files`` has the state from which it resumes.

    Attributes:
        start: The checkpoint from which training started: the converted network, or the original one if that has the
            same weights.
        parent: The checkpoint of the original network, before conversion, and which weights of it were read.
        parent_settings: The settings with which the original is read, by name, as text.
        settings: The settings with which the fold reads the trained network, by name, as text.
        method: The registered name of the method whose network it is.
        teacher: The checkpoint whose outputs it learned: that of ``--teacher``, or ``parent``.
        inputs: The images, in words, e.g. the name of the folder or file.
        images: How many images are in each split.
        labels: Where the labels of the images are from, or why there are none; empty if an .npz file has none.
        images_sha256: The SHA-256 of all images and labels in their order; an interrupted training resumes with the
            same ones only.
        precision: What matrix products were computed in during training: ``fp32`` or ``bf16``.
        lr: The largest learning rate; it rises linearly to it and then falls along a cosine.
        planned_epochs: The number of epochs that were asked for.
        epochs: The start, then each epoch that is done, on the validation split.
        best_epoch: The index in ``epochs`` of the one with the least ``cost``, which is taken; 0 is the start.
        max_disagreement: The budget of the conversion: the largest share (0 to 1) of changed top-1 predictions; null if
            none was given.
        max_accuracy_drop: The budget of the conversion: the largest loss of top-1 accuracy, as a share (0 to 1); null
            if none was given.
        evaluation: The comparison of the network that was taken with the original, on the test split; null while
            training is interrupted.
        start_evaluation: The same comparison of the network at the start; null while training is interrupted.
        payload: The trained network as a checkpoint of its method; null while training is interrupted.
    """

    FORMER: ClassVar[Mapping[str, str]] = {
        "rate": "lr",
        "judged": "evaluation",
        "judged_start": "start_evaluation",
        "started": "start",
        "kept": "best_epoch",
        "planned": "planned_epochs",
    }

    stage: str = "finetune"
    start: Origin
    parent: Origin
    parent_settings: dict[str, str]
    settings: dict[str, str]
    method: str
    teacher: Origin
    inputs: str
    images: Share
    labels: str = ""
    images_sha256: str
    precision: str
    lr: float
    planned_epochs: int
    epochs: tuple[Epoch, ...]
    best_epoch: int
    max_disagreement: float | None = None
    max_accuracy_drop: float | None = None
    evaluation: Link | None = None
    start_evaluation: Link | None = None
    payload: Payload | None = None

    @property
    def complete(self) -> bool:
        """Whether no epoch is left."""
        return self.payload is not None
