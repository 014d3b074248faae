"""Results of ``convert``: which blocks were replaced, how they were chosen, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from repaconv.results.bench import Ratio
from repaconv.results.records import Artefact, Link, Origin, Payload, Record
from repaconv.results.score import BlockScore


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


class Raced(Record):
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


class Pace(Record):
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
    speed_trials: tuple[Raced, ...]
    machine: str

    @property
    def told(self) -> str:
        """What was reached, in words."""
        reached = self.reached.told("converted", "before")
        return f"{reached}, on {self.target}; a speedup of {self.wanted:g} was asked for: {self.machine}"


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
    taken: Raced
    others: tuple[Raced, ...]
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
        max_disagreement: The budget: the largest share (0 to 1) of changed top-1 predictions; null if none was given.
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
    speed_target: Pace | None = None
    trade: Trade | None = None
    evaluation: Link
    payload: Payload | None
