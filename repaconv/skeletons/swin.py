"""Swin around its FFNs: windows and heads stand in the shapes, the image size in the masks of shifted windows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from repaconv.affine import Affine
from repaconv.artefacts import Fact, ImageSize, parse_image_size
from repaconv.backbones.parts import ActivationKind
from repaconv.backbones.swin import Swin, SwinBlock, SwinConfig
from repaconv.backbones.swin import deploy_block as swin_deploy_block
from repaconv.backbones.tokens import IdleMlpSpec
from repaconv.errors import Refused
from repaconv.skeletons.around import Ffn, MlpFactory, deploy_ffn, depths_of, place_of
from repaconv.skeletons.folding import affine_into_linear, fold_attention, linear_of, named, norm_and_head
from repaconv.skeletons.names import classes_of, weight_of
from repaconv.skeletons.norms import NormTraits
from repaconv.trained.contract import FoldedPart
from repaconv.trained.knobs import Knobs, small


@dataclass(frozen=True)
class SwinSkeleton:
    """A Swin transformer."""

    frame: SwinConfig  # without FFNs
    hidden: tuple[tuple[int, ...], ...]

    @property
    def image_size(self) -> ImageSize:
        return self.frame.image_size, self.frame.image_size

    def _place(self, index: int) -> tuple[int, int]:
        return place_of(index, [len(hidden) for hidden in self.hidden])

    def config(self, active: Sequence[int], act: ActivationKind = "GELU") -> SwinConfig:
        left = iter(active)
        return replace(
            self.frame, ffn=tuple(tuple(deploy_ffn(h, next(left), act) for h in stage) for stage in self.hidden)
        )

    def training(self, config: SwinConfig, mlp: MlpFactory) -> nn.Module:
        first = [sum(len(hidden) for hidden in self.hidden[:stage]) for stage in range(len(self.hidden))]
        return Swin(
            config,
            lambda config, stage, index: SwinBlock(
                config, stage, index, mlp(first[stage] + index), shortcut=True, deployed=False
            ),
        )

    def pair(self, config: SwinConfig, index: int, mlp: MlpFactory) -> tuple[nn.Module, nn.Module, tuple[int, ...]]:
        stage, place = self._place(index)
        trained = SwinBlock(config, stage, place, mlp(index), shortcut=True, deployed=False)
        return trained, swin_deploy_block(config, stage, place), (1, config.side(stage) ** 2, config.widths[stage])

    def around(self, block: Mapping[str, Tensor], index: int) -> tuple[dict[str, Tensor], tuple[str, ...], Affine]:
        stage, _ = self._place(index)
        width = self.frame.widths[stage]
        norm = NormTraits("layer", self.frame.eps).affine(block, "norm1", width)
        folded = named(fold_attention(block, self.frame.heads[stage], norm, Affine.eye(width)))
        kept = ("attn.relative_position_bias_table", "attn.relative_position_index", "attn_mask")
        folded |= {name: block[name] for name in kept if name in block}
        return folded, ("norm1's affine -> attn.qkv", "1 / sqrt(dh) -> q"), Affine.eye(width)

    def rest(self, config: SwinConfig, tensors: Mapping[str, Tensor]) -> Iterator[FoldedPart]:
        yield FoldedPart({n: w.double() for n, w in tensors.items() if n.startswith("patch_embed.")})
        for stage in range(len(config.widths) - 1):
            place = f"layers.{stage}.downsample"
            norm = Affine.diagonal(tensors[f"{place}.norm.weight"], tensors[f"{place}.norm.bias"])
            reduction = linear_of(tensors, f"{place}.reduction")
            yield affine_into_linear(norm, reduction, place, f"{place}.reduction", "norm's affine -> reduction")
        yield from norm_and_head(tensors, config.classes)


def read_swin(tensors: dict[str, Tensor], ffns: Sequence[Ffn], knobs: Knobs, args: Mapping[str, Any]) -> SwinSkeleton:
    """Window, heads and, where windows are shifted, the image size stand in the shapes."""
    kernel = weight_of(tensors, "patch_embed.proj.weight", 4)
    depths = depths_of(ffns, r"layers\.(\d+)\.blocks\.(\d+)\.")
    tables = [
        weight_of(tensors, f"layers.{s}.blocks.0.attn.relative_position_bias_table", 2) for s in range(len(depths))
    ]
    windows = [(math.isqrt(len(table)) + 1) // 2 for table in tables]
    patch, window = kernel.shape[2], max(windows)
    masked = _masked(tensors, patch, windows)
    said = args.get("input_size") if isinstance(args.get("input_size"), int) else None
    found, source = (masked, "attn_mask") if masked else (said, "args")
    if found is None:
        size = knobs.need("image_size", parse_image_size, "224", "no window is shifted, so no mask tells the size")
    else:
        size = knobs.take("image_size", parse_image_size, (found, found), (found, found), source, free=True)
    hidden, left = [], iter(ffns)
    for depth in depths:
        hidden.append(tuple(next(left).hidden for _ in range(depth)))
    frame = SwinConfig(
        image_size=size[0],
        patch=patch,
        widths=tuple(weight_of(tensors, f"layers.{s}.blocks.0.norm1.weight", 1).shape[0] for s in range(len(depths))),
        heads=tuple(table.shape[1] for table in tables),
        window=window,
        ffn=tuple((IdleMlpSpec(0),) * depth for depth in depths),
        classes=classes_of(tensors),
        in_channels=kernel.shape[1],
        eps=knobs.take("norm_eps", small, 1e-5),
    )
    _require_windows(frame, windows, size, masked)
    _require_indices(tensors, tables)
    told = {"depths": depths, "widths": frame.widths, "heads": frame.heads, "window": window, "patch": patch}
    knobs.facts += [
        Fact(name=name, value=list(v) if isinstance(v, tuple | list) else v, source="shapes")
        for name, v in told.items()
    ]
    return SwinSkeleton(frame, tuple(hidden))


def _masked(tensors: Mapping[str, Tensor], patch: int, windows: Sequence[int]) -> int | None:
    for name, mask in tensors.items():
        if match := re.match(r"layers\.(\d+)\.blocks\.\d+\.attn_mask$", name):
            stage = int(match[1])
            if mask.ndim == 3 and stage < len(windows):
                return windows[stage] * math.isqrt(len(mask)) * patch * (1 << stage)
    return None


def _require_indices(tensors: Mapping[str, Tensor], tables: Sequence[Tensor]) -> None:
    """Refuse pairs of tokens whose row of the table of biases is not there; a published net has none to read."""
    for name, index in tensors.items():
        match = re.match(r"layers\.(\d+)\.blocks\.\d+\.attn\.relative_position_index$", name)
        known = match and int(match[1]) < len(tables) and index.numel() and not index.is_meta
        rows = len(tables[int(match[1])]) if match and known else 0
        if rows and not 0 <= int(index.min()) <= int(index.max()) < rows:
            raise Refused(
                f"{name} has indices from {int(index.min())} to {int(index.max())}, but its table has {rows} rows.",
                hint="The file is damaged, or it was changed after training.",
                code="checkpoint.index",
            )


def _require_windows(frame: SwinConfig, windows: Sequence[int], size: ImageSize, masked: int | None) -> None:
    stages = range(len(windows))
    odd = any(frame.side(s) % 2 for s in stages[:-1]) or size[0] % frame.patch
    misfit = any(windows[s] != frame.clipped(s) or frame.side(s) % max(frame.clipped(s), 1) for s in stages)
    heads = any(width % heads for width, heads in zip(frame.widths, frame.heads, strict=True))
    if size[0] != size[1] or (masked and masked != size[0]) or odd or misfit or heads:
        raise Refused(
            f"images of {size[0]} x {size[1]} pixels do not fit windows of {', '.join(map(str, windows))} tokens"
            + (f"; the masks are for {masked} x {masked}." if masked else "."),
            hint="Give the size that it was trained at: --set image_size=N.",
            code="swin.image-size",
        )
