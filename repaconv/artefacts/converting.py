"""What ``convert`` leaves: which blocks were replaced, how they were chosen, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from repaconv.artefacts.benching import Ratio
from repaconv.artefacts.records import Artefact, Link, Origin, Payload, Record
from repaconv.artefacts.scoring import BlockScore


class Share(Record):
    """How many images did what; a part is told by the images' content, so no image is in two of them."""

    FORMER: ClassVar[Mapping[str, str]] = {"fitting": "calibration", "choosing": "validation", "judging": "test"}

    calibration: int
    validation: int
    test: int


class Tried(Record):
    """A choice of blocks, measured on the images that choose, to which the last choice was fitted only afterwards.

    ``error`` is the relative one of the outputs, ``agreement`` the share of equal first classes, ``divergence`` the KL
    from the original's, ``accuracy`` the difference from it where there are labels. ``within`` says whether the budget
    allows it.
    """

    blocks: tuple[int, ...]
    error: float
    agreement: float | None = None
    accuracy: float | None = None
    divergence: float | None = None
    within: bool | None = None


class Raced(Record):
    """What was measured beside the network before conversion: which blocks are replaced, or what merges, and how many
    times as fast it is; ``kind`` and ``tried``, what it costs, are of a trade-off.
    """

    kind: str = ""
    blocks: tuple[int, ...] = ()
    schedule: tuple[int, ...] = ()
    tried: Tried | None = None
    speed: Ratio


class Pace(Record):
    """A speed that was asked for, on a target, in rounds with the network as it was, folded exactly and in its own form
    (a graph beside); ``speed_trials`` is all that was measured, ``reached`` what was taken.
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
    """Every kind of conversion on a target beside the one that was taken, and what each costs."""

    target: str
    taken: Raced
    others: tuple[Raced, ...]
    machine: str


class ConvertArtefact(Artefact):
    """A network converted without training. It is lossy: ``evaluation`` is the loss, on images used for nothing else.

    ``parent`` is the network that it was made from, read with ``parent_settings``; ``settings`` are those of its fold.
    ``ranking`` is by what ``criterion`` found, the best to replace first, empty where the blocks were named. ``heads``
    are BLOCK.HEAD, where single ones were replaced. ``refitted`` are blocks that stay, whose W^O was fitted anew;
    ``condition`` is the largest condition number of a system that was solved, with its ``ridge``. ``verdict`` is about
    the budget, *not verified* without one. ``payload`` is the converted network as a checkpoint of its method. Of an
    untrained training form (``kind``) ``description`` says what was taken over, and ``evaluation`` what it is worth as
    it is. ``speed_target`` is of a speed that was asked for, ``trade`` is what else there was.
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
