"""RIFormer: a MetaFormer without token mixers, distilled from a PoolFormer, from whose weights it starts."""

from __future__ import annotations

from functools import partial
from typing import Any

import digits
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_loop import fit, initialise, smoothed

from repaconv.backbones.metaformer import MetaFormer, MetaFormerConfig, pooling
from repaconv.methods.riformer.paper_equations import AffineMixer, RIFormerBlock

LAYERS, WIDTHS, RATIO = (1, 1, 2, 1), (16, 32, 48, 80), 4
STEM_STRIDE, LAYER_SCALE, POOL = 2, 0.1, 3
EPOCHS_BEFORE, EPOCHS = 40, 40
"""Of the teacher, then of the net."""
TEMPERATURE, SHARE = 2.0, 0.5
"""Of the teacher's word in the loss."""

CFG = f"""
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='RIFormer',
        arch=dict(layers={list(LAYERS)}, embed_dims={list(WIDTHS)}, mlp_ratios={[RATIO] * len(LAYERS)},
                  layer_scale_init_value={LAYER_SCALE}),
        in_stride={STEM_STRIDE},
        deploy=False),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes={digits.CLASSES}, in_channels={WIDTHS[-1]}))
data_preprocessor = dict(num_classes={digits.CLASSES}, mean=[{255 * digits.MEAN}], std=[{255 * digits.STD}])
test_pipeline = [
    dict(type='LoadImageFromFile', color_type='grayscale'),
    dict(type='ResizeEdge', scale={digits.SIDE}, edge='short', backend='pillow', interpolation='bilinear'),
    dict(type='CenterCrop', crop_size={digits.SIDE}),
    dict(type='PackInputs')]
"""
"""The run's configuration as mmengine's Runner writes it into a checkpoint."""


class Pooling(nn.Module):
    """PoolFormer's token mixer: pool(z) - z."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pooling(POOL)

    def forward(self, z: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return self.pool(z) - z


def build() -> MetaFormer:
    """The student; its affines start as the identity, so that no block mixes anything yet."""
    sizes = MetaFormerConfig(
        layers=LAYERS,
        widths=WIDTHS,
        hidden=tuple(RATIO * width for width in WIDTHS),
        classes=digits.CLASSES,
        in_channels=1,
        stem=(7, STEM_STRIDE, 2),
    )
    net = MetaFormer(sizes, partial(RIFormerBlock, layer_scale=True, deployed=False), final_affine=True)
    initialise(net)
    for name, parameter in net.named_parameters():
        if name.endswith("token_mixer.affine.weight"):
            nn.init.ones_(parameter)
        elif "layer_scale" in name:
            nn.init.constant_(parameter, LAYER_SCALE)
    return net


def teacher_of(student: MetaFormer) -> nn.Module:
    """The same net with pooling in place of every affine."""
    net = build()
    net.load_state_dict(student.state_dict())
    for part in list(net.modules()):
        if isinstance(part, RIFormerBlock):
            assert isinstance(part.token_mixer, AffineMixer)
            part.token_mixer = Pooling()
    return net


def train(data: digits.Digits, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """The net, and its checkpoint as mmengine's Runner writes one."""
    torch.manual_seed(seed)
    net = build()
    teacher = teacher_of(net)
    fit(teacher, data, epochs=EPOCHS_BEFORE, seed=seed)
    net.load_state_dict(teacher.state_dict(), strict=False)  # all but the affines

    def taught(images: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = (teacher(images) / TEMPERATURE).softmax(1)
        said = functional.cross_entropy(logits / TEMPERATURE, wanted)
        return SHARE * TEMPERATURE**2 * said + (1 - SHARE) * smoothed(images, labels, logits)

    fit(net, data, epochs=EPOCHS, seed=seed + 1, loss=taught)
    last = 2 * len(LAYERS) - 2
    weights = {}
    for name, tensor in net.state_dict().items():
        inside = name.replace("norm.", f"norm{last}.") if name.startswith("norm.") else name
        weights[name.replace("head.", "head.fc.") if name.startswith("head.") else f"backbone.{inside}"] = tensor
    return net, {"state_dict": weights, "meta": {"epoch": EPOCHS, "seed": seed, "cfg": CFG}}
