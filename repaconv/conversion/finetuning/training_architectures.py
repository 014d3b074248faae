"""Training-time architectures of all methods: creating one from an ordinary network, and its training plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from repaconv.checkpoints import Checkpoint
from repaconv.conversion.block_selection import SelectionData, single_block_errors
from repaconv.conversion.conversion_option_parsing import read_blocks
from repaconv.conversion.finetuning import (
    dwconv_converted_networks,
    dwconv_gates,
    nondeep_branches,
    pyra_without_modulation,
    repavit_idle_channels,
    riformer_affines,
)
from repaconv.conversion.finetuning.original_networks import Original, PoolFormer
from repaconv.conversion.finetuning.training_plan import TrainingPlan, UntrainedNetwork
from repaconv.conversion.head_scores import score
from repaconv.conversion.image_splits import ImageSplits
from repaconv.conversion.kernel_fitting import ConversionSettings
from repaconv.conversion.plain_vit import BATCH_SIZE, PlainViT
from repaconv.core.errors import Refused, UsageProblem
from repaconv.core.progress import Progress
from repaconv.method_api.settings import mapping_at

if TYPE_CHECKING:
    from repaconv.stages.convert.options import ConvertOptions

METHODS = ("dwconv", "nondeep", "repavit", "riformer")


def training_form(
    options: ConvertOptions, original: Original, found: Checkpoint, splits: ImageSplits, progress: Progress
) -> UntrainedNetwork:
    """Return the requested training-time architecture, initialized from the network and fitted to the calibration
    images.

    Raises:
        Refused: If the method does not start from this kind of network.
        UsageProblem: If the options are invalid for the method.
    """
    progress("take the weights over", 0, 0)
    images, record = splits.calibration.images, found.record
    if isinstance(original, PoolFormer):
        if options.method == "riformer":
            return riformer_affines.initialize(original, images, record, dict(options.settings or {}))
        raise _wrong_original(options.method, "a PoolFormer", "a plain vision transformer")
    if options.method == "riformer":
        raise _wrong_original("riformer", "a plain vision transformer", "a PoolFormer")
    if options.method == "nondeep":
        return nondeep_branches.initialize(original, options.branches, record)
    if options.method == "repavit":
        return repavit_idle_channels.initialize(original, options.idle_ratio, images, record)
    return _dwconv_with_gates(options, original, found, splits, progress)


def _dwconv_with_gates(
    options: ConvertOptions, plain: PlainViT, found: Checkpoint, splits: ImageSplits, progress: Progress
) -> UntrainedNetwork:
    """Return dwconv's network with gates. The training chooses the blocks, so only their number can be given."""
    asked = read_blocks(options.blocks, len(plain.blocks))
    if asked.number is None:
        raise UsageProblem(
            f"--blocks {options.blocks}: with gates, the training learns which blocks are replaced.",
            hint=f"Give the number of blocks: --blocks {max(1, len(plain.blocks) // 2)}.",
            code="convert.blocks",
        )
    images = splits.calibration.images
    if options.criterion == "sigma":
        best = score(plain, torch.split(images, BATCH_SIZE), options.kernel).by_sigma
    else:
        errors = single_block_errors(
            SelectionData.of(plain, splits), ConversionSettings(kernel=options.kernel), progress
        )
        best = tuple(sorted(range(len(errors)), key=errors.__getitem__))
    return dwconv_gates.initialize(plain, best, asked.number, options.kernel, images, found.record)


def _wrong_original(method: str, given: str, wanted: str) -> Refused:
    return Refused(
        f"{method} starts from {wanted}, but this is {given}.",
        hint="`repaconv convert --help` says which method starts from which network.",
        code="convert.original",
    )


def training_plan_of(method: str, checkpoint: Checkpoint, settings: Mapping[str, str]) -> TrainingPlan:
    """Return the training plan of a checkpoint: a training-time architecture or a conversion.

    Raises:
        Refused: If the checkpoint is neither.
    """
    gated = mapping_at(checkpoint.record, "meta", "gate")
    courses = {
        "dwconv": dwconv_gates.training_plan if gated else dwconv_converted_networks.training_plan,
        "nondeep": nondeep_branches.training_plan,
        "pyra": pyra_without_modulation.training_plan,
        "repavit": repavit_idle_channels.training_plan,
        "riformer": riformer_affines.training_plan,
    }
    return courses[method](checkpoint, settings)
