"""Read an ordinary network before its conversion: a plain vision transformer or a PoolFormer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from repaconv.backbones.metaformer import POOLS, MetaFormer, pooling, read_pool_size
from repaconv.checkpoints import Checkpoint
from repaconv.conversion.plain_vit import PlainViT, read_plain
from repaconv.method_api.settings import SettingsReader
from repaconv.methods.riformer.checkpoint_reading import RIFormerReading
from repaconv.methods.riformer.checkpoint_reading import read as read_riformer
from repaconv.methods.riformer.paper_equations import RIFormerBlock
from repaconv.verification.model_runners import with_weights

_TIMM = (
    (r"^stem\.conv\.", "patch_embed.proj."),
    (r"^head\.norm\.", "norm."),
    (r"^head\.fc\.", "head."),
    (r"\.layer_scale([12])\.scale$", r".layer_scale_\1"),
)
"""timm's names of a PoolFormer's parts, and the names in the official code."""
_NORM1 = re.compile(r"^(?P<block>.*network\.\d+\.\d+\.)norm1\.weight$")


class Pooling(nn.Module):
    """PoolFormer's token mixer: pool(z) - z."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.pool = pooling(side)

    def forward(self, z: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        out: Tensor = self.pool(z) - z
        return out


@dataclass(frozen=True)
class PoolFormer:
    """A PoolFormer in float32 and eval mode.

    ``reading`` describes the RIFormer with the same weights, and with identity affines in place of the pooling.
    """

    reading: RIFormerReading
    net: MetaFormer


Original = PlainViT | PoolFormer


def read_original(checkpoint: Checkpoint, settings: Mapping[str, str]) -> Original:
    """Read an ordinary network. A PoolFormer has the setting ``pool_size`` in addition to those of a RIFormer.

    Raises:
        Refused: If it is neither a plain vision transformer nor a PoolFormer.
        SettingNeeded: If the size of a PoolFormer's pooling window is neither set nor known.
        UsageProblem: If a setting is unknown or malformed.
    """
    names = {name: _official(name) for name in checkpoint.tensors}
    if not any(map(_NORM1.match, names.values())):
        return PlainViT.of(read_plain(checkpoint, dict(settings)))
    tensors = {names[name]: tensor for name, tensor in checkpoint.tensors.items()}
    reading = read_riformer(
        replace(
            checkpoint,
            tensors=tensors | _identities(tensors),
            names={names[name]: stored for name, stored in checkpoint.names.items()}
            | {n: n for n in _identities(tensors)},
        ),
        {name: value for name, value in settings.items() if name != "pool_size"},
    )
    reader = SettingsReader({name: value for name, value in settings.items() if name == "pool_size"})
    return PoolFormer(reading, _pooling(reading, read_pool_size(reader, reading.config.widths, POOLS)))


def _official(name: str) -> str:
    """Return the official name of a part from timm's name."""
    for pattern, other in _TIMM:
        name = re.sub(pattern, other, name)
    name = re.sub(r"^stages\.(\d+)\.blocks\.", lambda found: f"network.{2 * int(found[1])}.", name)
    return re.sub(r"^stages\.(\d+)\.downsample\.conv\.", lambda found: f"network.{2 * int(found[1]) - 1}.proj.", name)


def _identities(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return identity affines, A(z) = z, for every block."""
    found: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        if match := _NORM1.match(name):
            place = f"{match['block']}token_mixer.affine."
            found |= {f"{place}weight": torch.ones(len(weight), 1, 1, 1), f"{place}bias": torch.zeros(len(weight))}
    return found


def _pooling(reading: RIFormerReading, side: int) -> MetaFormer:
    """Build the PoolFormer, whose pooling window has this side."""
    block = partial(RIFormerBlock, layer_scale=reading.layer_scale, deployed=False)
    net = MetaFormer(reading.config, block, final_affine=True)
    for part in list(net.modules()):
        if isinstance(part, RIFormerBlock):
            part.token_mixer = Pooling(side)  # type: ignore[assignment]
    tensors = {name: tensor for name, tensor in reading.tensors.items() if ".token_mixer." not in name}
    return with_weights(net.eval(), tensors, torch.float32)  # type: ignore[return-value]
