"""Training-time architectures of all methods: creating one from an ordinary network, and its training plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from repaconv.checkpoints import Checkpoint
from repaconv.conversion.block_selection import Rig, single_errors
from repaconv.conversion.conversion_requests import read_blocks
from repaconv.conversion.finetuning import (
    dwconv_dropins,
    dwconv_gates,
    nondeep_branches,
    pyra_merging,
    repavit_idle_channels,
    riformer_affines,
)
from repaconv.conversion.finetuning.original_networks import Original, PoolFormer
from repaconv.conversion.finetuning.training_plan import Course, Formed
from repaconv.conversion.head_scores import score
from repaconv.conversion.image_splits import Parted
from repaconv.conversion.kernel_fitting import How
from repaconv.conversion.plain_vit import AT_ONCE, Plain
from repaconv.core.errors import Refused, UsageProblem
from repaconv.core.progress import Progress
from repaconv.method_api.settings import said_in

if TYPE_CHECKING:
    from repaconv.stages.convert.options import ConvertOptions

METHODS = ("dwconv", "nondeep", "repavit", "riformer")


def form(options: ConvertOptions, original: Original, found: Checkpoint, parted: Parted, progress: Progress) -> Formed:
    """Return the requested training-time architecture, initialized from the network and fitted to the calibration
    images.

    Raises:
        Refused: If the method does not start from this kind of network.
        UsageProblem: If the options are invalid for the method.
    """
    progress("take the weights over", 0, 0)
    images, record = parted.calibration.images, found.record
    if isinstance(original, PoolFormer):
        if options.method == "riformer":
            return riformer_affines.formed(original, images, record, dict(options.settings or {}))
        raise _not_from(options.method, "a PoolFormer", "a plain vision transformer")
    if options.method == "riformer":
        raise _not_from("riformer", "a plain vision transformer", "a PoolFormer")
    if options.method == "nondeep":
        return nondeep_branches.formed(original, options.branches, record)
    if options.method == "repavit":
        return repavit_idle_channels.formed(original, options.idle_ratio, images, record)
    return _gated(options, original, found, parted, progress)


def _gated(options: ConvertOptions, plain: Plain, found: Checkpoint, parted: Parted, progress: Progress) -> Formed:
    """Return dwconv's network with gates. The training chooses the blocks, so only their number can be given."""
    asked = read_blocks(options.blocks, len(plain.blocks))
    if asked.number is None:
        raise UsageProblem(
            f"--blocks {options.blocks}: with gates, the training learns which blocks are replaced.",
            hint=f"Give the number of blocks: --blocks {max(1, len(plain.blocks) // 2)}.",
            code="convert.blocks",
        )
    images = parted.calibration.images
    if options.criterion == "sigma":
        best = score(plain, torch.split(images, AT_ONCE), options.kernel).by_sigma
    else:
        errors = single_errors(Rig.of(plain, parted), How(kernel=options.kernel), progress)
        best = tuple(sorted(range(len(errors)), key=errors.__getitem__))
    return dwconv_gates.formed(plain, best, asked.number, options.kernel, images, found.record)


def _not_from(method: str, given: str, wanted: str) -> Refused:
    return Refused(
        f"{method} starts from {wanted}, but this is {given}.",
        hint="`repaconv convert --help` says which method starts from which network.",
        code="convert.original",
    )


def course_of(method: str, checkpoint: Checkpoint, settings: Mapping[str, str]) -> Course:
    """Return the training plan of a checkpoint: a training-time architecture or a conversion.

    Raises:
        Refused: If the checkpoint is neither.
    """
    gated = said_in(checkpoint.record, "meta", "gate")
    courses = {
        "dwconv": dwconv_gates.course if gated else dwconv_dropins.course,
        "nondeep": nondeep_branches.course,
        "pyra": pyra_merging.course,
        "repavit": repavit_idle_channels.course,
        "riformer": riformer_affines.course,
    }
    return courses[method](checkpoint, settings)
