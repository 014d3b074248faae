"""Build networks of torchvision, with arguments that the checkpoint's tensors show, or that the user gives."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

from repaconv.method_api.settings import SettingsReader, yes_or_no

if TYPE_CHECKING:
    from torch import nn

    from repaconv.checkpoints import Checkpoint

SHIFTED_INPUT = ("googlenet", "inception_v3")
"""Networks that may convert images from ImageNet's mean and std to 0.5 and 0.5 (``transform_input``): only a network
that torchvision builds for published weights does, and no tensor shows it."""


def build(name: str, **given: Any) -> nn.Module:
    """Build a network of this name, which may end in that of its weights, without weights: nothing is downloaded."""
    builder = _builder(name)
    if "weights_backbone" in signature(builder).parameters:  # published ones by default
        given["weights_backbone"] = None
    net: nn.Module = builder(weights=None, **given)
    return net


def own_arguments(name: str, found: Checkpoint, reader: SettingsReader) -> Mapping[str, Any]:
    """Return the arguments that differ from torchvision's defaults: heads for training, the image size of a ViT.

    Args:
        name: Name of the architecture, e.g. ``googlenet`` or ``resnet50.IMAGENET1K_V2``.
        found: The checkpoint.
        reader: The user's settings, of which it takes ``transform_input``.

    Raises:
        SettingNeeded: `SHIFTED_INPUT` has the architecture, and the weights are not published ones.
    """
    architecture, _, tag = name.partition(".")
    tensors = {each: tuple(tensor.shape) for each, tensor in found.tensors.items()}
    parts = {part for each in tensors for part in each.split(".")}
    more: dict[str, Any] = {}
    if architecture in SHIFTED_INPUT:
        which = tag or _published(architecture, found.origin.sha256)
        more["transform_input"] = reader.need(
            "transform_input",
            yes_or_no,
            "yes",
            f"no tensor of {architecture} shows whether it converts images from ImageNet's mean and std to 0.5: yes, "
            "if torchvision built it with published weights, also before fine-tuning; no, if it built it without",
            True if which else None,
            f"torchvision's {which}",
        )
        if not parts & {"aux1", "AuxLogits"}:
            more["aux_logits"] = False
        more["init_weights"] = False  # torchvision warns otherwise
    elif "aux_classifier" in parts:
        more["aux_loss"] = True
    elif architecture.startswith("vit_") and (size := _vit_image_size(tensors)):
        more["image_size"] = size
    return more


def _builder(name: str) -> Callable[..., nn.Module]:
    found: Callable[..., nn.Module] = importlib.import_module("torchvision.models").get_model_builder(
        name.partition(".")[0]
    )
    return found


def _published(architecture: str, sha256: str) -> str:
    """The name of the published weights with this hash, whose first digits end the name of torchvision's file."""
    every = importlib.import_module("torchvision.models").get_model_weights(architecture)
    digits = {each.name: re.search(r"-([0-9a-f]{8,})\.pth$", each.url) for each in every}
    return next((name for name, found in digits.items() if found and sha256.startswith(found[1])), "")


def _vit_image_size(tensors: Mapping[str, tuple[int, ...]]) -> int | None:
    """The side of a square image in pixels by the position embedding, which has a class token."""
    place = next((shape for name, shape in tensors.items() if name.endswith("encoder.pos_embedding")), ())
    patch = next((shape for name, shape in tensors.items() if name.endswith("conv_proj.weight")), ())
    if len(place) != 3 or len(patch) != 4 or place[1] < 2:
        return None
    return math.isqrt(place[1] - 1) * patch[-1]
