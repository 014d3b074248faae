"""The networks of the zoo: every family of timm, and some of torchvision and transformers, with random weights.

From each module of timm, the smallest network of every kind of name is taken, by the index of published networks.
Networks of transformers are reduced to a few narrow layers. Weights have their own initialization. What that sets to a
constant (statistics, affines, layer scales, biases) is randomized around it, so that no fold is trivial.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from repaconv.checkpoints.architecture_index import parameter_counts

SIZES = (64, 96, 128, 160, 192, 224, 256)
"""Of images, tried one after the other where a network does not say that its own is fixed."""
STILL = 1e-3
"""What a network's output moves by at most, of the largest number, that does not see its image."""
FURTHER = ("mobileone_s0", "repvgg_b1g4", "levit_conv_128s", "coat_tiny", "twins_pcpvt_small", "repvgg_d2se")
TORCHVISION = [
    "squeezenet1_1",
    "mnasnet0_5",
    "shufflenet_v2_x0_5",
    "mobilenet_v3_small",
    "mobilenet_v2",
    "regnet_y_400mf",
    "efficientnet_b0",
    "mobilenet_v3_large",
    "googlenet",
    "densenet121",
    "resnet18",
    "efficientnet_v2_s",
    "resnext50_32x4d",
    "inception_v3",
    "swin_t",
    "swin_v2_t",
    "convnext_tiny",
    "maxvit_t",
    "alexnet",
    "vit_b_16",
    "vgg11_bn",
]
NARROW = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 256}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": NARROW,
    "DeiTForImageClassification": NARROW,
    "SwinForImageClassification": {"embed_dim": 48, "depths": [1, 2, 1, 1]},
    "BeitForImageClassification": {**NARROW, "use_relative_position_bias": True},
    "Dinov2ForImageClassification": {**NARROW, "image_size": 224},
    "CLIPVisionModel": NARROW,
    "SiglipVisionModel": {**NARROW, "image_size": 224, "patch_size": 16},
    "ConvNextForImageClassification": {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 2, 1]},
    "SegformerForSemanticSegmentation": {"decoder_hidden_size": 64, "hidden_sizes": [16, 32, 64, 96]},
    "DetrForObjectDetection": {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2},
    "MobileViTForImageClassification": {},
}


class Network(NamedTuple):
    """A network in eval mode, float32, and the shape of an image."""

    module: nn.Module
    shape: tuple[int, int, int]


SCHEMAS = {
    "nms": "(Tensor boxes, Tensor scores, float threshold) -> Tensor",
    "roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
}
"""Of torchvision's operators; the others get that of the first."""


def load_torchvision(*, boxes: bool = False) -> None:
    """Import it beside a torch of another build: operators that it does not bring are defined by name, unusable.

    Args:
        boxes: Make those of detectors usable, by a plain writing of theirs.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    while True:
        try:
            importlib.import_module("torchvision")
            break
        except RuntimeError as error:
            if (missing := re.search(r"torchvision::(\w+)", str(error))) is None:
                raise
            library.define(missing[1] + SCHEMAS.get(missing[1], SCHEMAS["nms"]))
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            _KEPT.append(library)
    if boxes:
        _write_box_operators()


def _write_box_operators() -> None:
    """torchvision's `nms` and `roi_align` on a CPU, if they are missing; their ONNX operators it names itself."""
    from torchvision import extension
    from torchvision.ops import boxes

    if extension._has_ops():
        return
    pooling: Any = importlib.import_module("torchvision.ops.roi_align")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, written in {"nms": _nms, "roi_align": pooling._roi_align}.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + SCHEMAS[name])
        library.impl(name, written, "CPU")
    _KEPT.append(library)
    boxes._assert_has_ops = pooling._assert_has_ops = _has_them
    pooling._has_ops = lambda: True


def _has_them() -> None:
    """No complaint; a function of its own, since torch's older exporter reads its source."""


def _nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Boxes that no better one overlaps by more than that, the best first."""
    from torchvision.ops import box_iou

    order = scores.argsort(descending=True, stable=True)
    left, kept = order, []
    while len(left):
        kept.append(left[0])
        overlaps = box_iou(boxes[left[:1]], boxes[left[1:]])[0]
        left = left[1:][~(overlaps > threshold)]
    return torch.stack(kept) if kept else order


_KEPT: list[torch.library.Library] = []
"""What it defines goes with it."""


def names() -> list[str]:
    """All, as ``timm:mobileone_s1``: within each library the smallest first."""
    load_torchvision()
    counts = parameter_counts()
    timm = {*_of_timm(counts), *(f"timm:{name}" for name in FURTHER)}
    others = [*(f"torchvision:{name}" for name in TORCHVISION), *(f"transformers:{name}" for name in TRANSFORMERS)]
    return sorted({*timm, *others}, key=lambda name: (0 if "transformers" in name else counts.get(name, 0), name))


def _of_timm(counts: dict[str, int]) -> Iterator[str]:
    from timm.models._registry import _model_to_module

    families: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for name, module in _model_to_module.items():
        if f"timm:{name}" in counts:
            families[module].append((counts[f"timm:{name}"], name))
    for known in families.values():
        kinds: dict[str, str] = {}
        for _, name in sorted(known):
            kind = re.match(r"[a-z]+?(?:v\d)?(?=\d|_|$)", name)
            kinds.setdefault(kind[0] if kind else name, name)
        yield from (f"timm:{name}" for name in kinds.values())


def network(name: str) -> Network:
    """One of them, seeded."""
    load_torchvision()
    library, _, called = name.partition(":")
    torch.manual_seed(0)
    module = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}[library](called)
    module = module.eval().requires_grad_(False)
    drawn(module)
    shape = _shape(module)
    if _constant(module, shape):
        measured(module, shape)
    return Network(module, shape)


def _timm(name: str) -> nn.Module:
    import timm

    module: nn.Module = timm.create_model(name)
    return module


def _torchvision(name: str) -> nn.Module:
    from torchvision import models

    more = {"init_weights": True, "transform_input": False} if name in ("googlenet", "inception_v3") else {}
    module: nn.Module = models.get_model(name, weights=None, **more)
    _move(module)
    return module


def _transformers(name: str) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    given = dict(TRANSFORMERS[name])
    if name.startswith("Detr"):
        backbone = transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], layer_type="basic",
            out_features=["stage4"],
        )  # fmt: skip
        given |= {"use_timm_backbone": False, "backbone": None, "backbone_config": backbone}
    model = kind(kind.config_class(**given))
    _move(model)
    return _Outputs(model)


def _move(module: nn.Module) -> None:
    """Draw convolutions anew, in place: some libraries' own are so small that deep networks of them give one number."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight)


class _Outputs(nn.Module):
    """What a model of transformers gives, as tensors alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in tree_leaves(self.model(pixel_values)) if isinstance(leaf, torch.Tensor))


def drawn(module: nn.Module) -> None:
    """Draw what training would have moved, in place: statistics, and all that stands at one number."""
    random = torch.Generator().manual_seed(0)
    for part in module.modules():
        if isinstance(getattr(part, "running_var", None), torch.Tensor):
            mean, variance = part.running_mean, part.running_var
            mean.add_(torch.randn(mean.shape, generator=random), alpha=0.2)
            variance.mul_(0.5 + torch.rand(variance.shape, generator=random))
            _awake(part)
    for weight in module.parameters():
        if weight.ndim < 2 or bool((weight == weight.flatten()[0]).all()):
            weight.add_(torch.randn(weight.shape, generator=random), alpha=0.1)


def _awake(norm: nn.Module) -> None:
    """What starts as nothing lets its input through, in place."""
    if isinstance(norm.weight, torch.Tensor) and norm.weight.abs().mean() < 0.1:
        norm.weight.add_(1)


def measured(module: nn.Module, shape: tuple[int, int, int]) -> None:
    """Take statistics from noise and draw around those, in place: of layers without end that are drawn without regard
    to what comes in, nothing of an image arrives at the other."""
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    for norm in norms:
        _awake(norm)
        norm.reset_running_stats()
        norm.momentum = 1.0
        norm.train()
    random = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        module(torch.randn(8, *shape, generator=random))
    for norm in norms:
        norm.eval()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.add_(0.2 * norm.running_var.sqrt() * torch.randn(norm.running_mean.shape, generator=random))
        norm.running_var.mul_(0.5 + torch.rand(norm.running_var.shape, generator=random))


def _constant(module: nn.Module, shape: tuple[int, int, int]) -> bool:
    """Whether another image gives the same, as far as float32 says."""
    with torch.inference_mode():
        images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
        found = [leaf for leaf in tree_leaves(module(images)) if isinstance(leaf, torch.Tensor)]
    return not any(float((leaf[0] - leaf[-1]).abs().max()) > STILL * float(leaf.abs().max()) for leaf in found)


def _shape(module: nn.Module) -> tuple[int, int, int]:
    """The smallest image that it takes."""
    cfg = getattr(module, "default_cfg", None) or {}
    own = int(cfg.get("input_size", (3, 224, 224))[-1])
    fixed = cfg.get("fixed_input_size") or isinstance(module, _Outputs)
    for side in (own,) if fixed else (*(size for size in SIZES if size < own), own):
        with suppress(Exception), torch.inference_mode():  # any code over an image too small for it
            found = module(torch.randn(1, 3, side, side))
            if all(bool(leaf.isfinite().all()) for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)):
                return 3, side, side
    return 3, own, own
