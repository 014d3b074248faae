"""Checks of the options of `score`, `convert` and `finetune`: their images, kernel size and method."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from repaconv.core.errors import UsageProblem, did_you_mean

if TYPE_CHECKING:
    from repaconv.method_api.contract import Reading
    from repaconv.stages.convert.options import ConvertOptions, FinetuneOptions, ScoreOptions
    from repaconv.verification.input_batches import Inputs

KERNELS = (1, 3, 5, 7)
METHODS = ("dwconv", "pyra")
"""Methods that need no training; the others start as an untrained training-time network."""
TRAINING_FORM = "training-form"


def read_images(options: ScoreOptions | ConvertOptions | FinetuneOptions, reading: Reading) -> Inputs:
    """Read the user's images, preprocessed for the network; a network of any image size takes an .npz as it is.

    Raises:
        UsageProblem: If --inputs and --images are both given or both missing, or the images have another size.
        Refused: If the images cannot be read.
    """
    from repaconv.verification.input_batches import image_inputs, npz_inputs

    if bool(options.inputs) == bool(options.images):
        raise UsageProblem(
            "both --inputs and --images were given." if options.inputs else "no images were given.",
            hint="Give images of the kind that the network is meant for: --images DIR, or --inputs x.npz.",
            code="usage.inputs",
        )
    config = reading.config
    fixed = getattr(config, "image_size", None)
    height, width = fixed or reading.preprocessing.image_size
    if options.inputs:
        given = npz_inputs(Path(options.inputs), config.in_channels, config.classes)
    else:
        given = image_inputs(
            Path(str(options.images)),
            reading.preprocessing,
            size=(height, width),
            channels=config.in_channels,
            classes=config.classes,
            class_names=Path(options.classes) if options.classes else None,
        )
    if fixed and given.size != fixed:
        raise UsageProblem(
            f"{given.name}: the images have {' x '.join(map(str, given.size or ()))} pixels, but the network takes "
            f"{height} x {width}.",
            hint="Give images of that size, or --set image_size=HEIGHTxWIDTH.",
            code="inputs.shape",
        )
    return given


def require_kernel(side: int) -> None:
    """Refuse unknown kernel sizes.

    Raises:
        UsageProblem: If the kernel size is unknown.
    """
    if side not in KERNELS:
        raise UsageProblem(
            f"--kernel {side} is not supported.",
            hint="Supported are 3, 5 and 7, and 1 as a control experiment.",
            code="usage.kernel",
        )


def require_method(options: ConvertOptions) -> None:
    """Refuse conversions that do not exist.

    Raises:
        UsageProblem: If ``--to`` or the method is unknown, or needs the other of training and no training.
    """
    from repaconv.conversion.finetuning.training_architectures import METHODS as TRAINED

    if options.to not in (None, TRAINING_FORM):
        raise UsageProblem(
            f"--to {options.to} is unknown.",
            hint="The only value is training-form; without --to the result needs no training.",
            code="convert.unknown",
        )
    known = TRAINED if options.to else METHODS
    if options.method not in known:
        trained = options.method in TRAINED
        raise UsageProblem(
            f"no conversion to {options.method!r} {'without training ' if trained else ''}exists.",
            hint=f"Make its training-time network and train that: --to {TRAINING_FORM}, then repaconv finetune. "
            f"A trained {options.method} checkpoint needs no conversion: repaconv fold."
            if trained
            else f"{did_you_mean(options.method, known)}Known methods: {', '.join(known)}.",
            code="convert.unknown",
        )
