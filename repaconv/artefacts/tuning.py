"""What ``tune`` leaves: every candidate, and the one that was taken."""

from __future__ import annotations

from typing import Any

from repaconv.artefacts.benching import Ratio
from repaconv.artefacts.records import Artefact, ImageSize, Link, Record


class Candidate(Record):
    """A form that the tuner considered.

    ``expected`` is how many times as fast as the default form it should be, by the effects of its rewrites alone;
    ``rounds`` and ``ratio`` (against the default form) are of its longest measurement, None if there was none; ``told``
    says how far it came.
    """

    rewrites: tuple[str, ...]
    expected: float | None = None
    rounds: int = 0
    ratio: Ratio | None = None
    told: str


class LoweredCandidate(Record):
    """The winner in a lower precision, which is lossy.

    ``disagreement`` is the share of images whose first class is another than in float32, ``link`` how it was judged,
    ``ratio`` against float32.
    """

    precision: str
    images: int
    disagreement: float | None = None
    link: Link | None = None
    ratio: Ratio | None = None
    told: str


class TuneArtefact(Artefact):
    """The fastest exact form of a network on a machine, and the evidence.

    ``rewrites`` are the winner's; ``shapes_sha256`` is the hash of backbone, config and image size, for all checkpoints
    of which it holds. ``precision`` is another than fp32 only where a loss was allowed, ``allowed_disagreement`` what
    that was. ``default`` is the target's own form, against which every ratio is. ``complete`` says whether nothing was
    left because ``budget_s`` was spent.
    """

    stage: str = "tune"
    target: str
    runtime: str
    method: str
    shapes_sha256: str
    image_size: ImageSize | None
    batch: int
    threads: int
    seed: int
    default: tuple[str, ...]
    rewrites: tuple[str, ...]
    ratio: Ratio | None
    precision: str = "fp32"
    allowed_disagreement: float | None = None
    candidates: tuple[Candidate, ...]
    lowered: tuple[LoweredCandidate, ...] = ()
    images: str = ""
    seconds: float
    budget_s: float = 0.0
    complete: bool = True
    machine: dict[str, Any]
    note: str = ""
