"""The training forms of all methods: how each is made of an ordinary network, and how it is trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from repaconv.checkpoint import Checkpoint
from repaconv.converting.asked import read_blocks
from repaconv.converting.choosing import Rig, single_errors
from repaconv.converting.fitting import How
from repaconv.converting.parting import Parted
from repaconv.converting.plain import AT_ONCE, Plain
from repaconv.converting.scoring import score
from repaconv.errors import Refused, UsageProblem
from repaconv.orders.converting import ConvertOrder
from repaconv.progress import Progress
from repaconv.trained.knobs import said_in
from repaconv.training import affines, branches, dropins, gating, idling, merging
from repaconv.training.course import Course, Formed
from repaconv.training.originals import Original, PoolFormer

METHODS = ("dwconv", "nondeep", "repavit", "riformer")


def form(order: ConvertOrder, original: Original, found: Checkpoint, parted: Parted, progress: Progress) -> Formed:
    """The training form that was asked for, from the images that fit.

    Raises:
        Refused: If the network is of a kind that this method does not start from.
        UsageProblem: If what is asked for makes no sense for it.
    """
    progress("take the weights over", 0, 0)
    images, record = parted.calibration.images, found.record
    if isinstance(original, PoolFormer):
        if order.method == "riformer":
            return affines.formed(original, images, record, dict(order.settings or {}))
        raise _not_from(order.method, "a PoolFormer", "a plain vision transformer")
    if order.method == "riformer":
        raise _not_from("riformer", "a plain vision transformer", "a PoolFormer")
    if order.method == "nondeep":
        return branches.formed(original, order.branches, record)
    if order.method == "repavit":
        return idling.formed(original, order.idle_ratio, images, record)
    return _gated(order, original, found, parted, progress)


def _gated(order: ConvertOrder, plain: Plain, found: Checkpoint, parted: Parted, progress: Progress) -> Formed:
    """Gates choose the blocks: only their number can be given."""
    asked = read_blocks(order.blocks, len(plain.blocks))
    if asked.number is None:
        raise UsageProblem(
            f"--blocks {order.blocks}: with gates, the training learns which blocks are replaced.",
            hint=f"Give the number of blocks: --blocks {max(1, len(plain.blocks) // 2)}.",
            code="convert.blocks",
        )
    images = parted.calibration.images
    if order.criterion == "sigma":
        best = score(plain, torch.split(images, AT_ONCE), order.kernel).by_sigma
    else:
        errors = single_errors(Rig.of(plain, parted), How(kernel=order.kernel), progress)
        best = tuple(sorted(range(len(errors)), key=errors.__getitem__))
    return gating.formed(plain, best, asked.number, order.kernel, images, found.record)


def _not_from(method: str, given: str, wanted: str) -> Refused:
    return Refused(
        f"{method} starts from {wanted}, but this is {given}.",
        hint="`repaconv convert --help` says which method starts from which network.",
        code="convert.original",
    )


def course_of(method: str, checkpoint: Checkpoint, settings: Mapping[str, str]) -> Course:
    """How a training form, or a conversion, is trained.

    Raises:
        Refused: If the file is none.
    """
    gated = said_in(checkpoint.record, "meta", "gate")
    courses = {
        "dwconv": gating.course if gated else dropins.course,
        "nondeep": branches.course,
        "pyra": merging.course,
        "repavit": idling.course,
        "riformer": affines.course,
    }
    return courses[method](checkpoint, settings)
