"""RePaViT's published models, and synthetic checkpoints of the same sizes with consistent BatchNorm statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from repaconv.core import plugins
from repaconv.method_api.contract import Published
from repaconv.method_api.settings import SettingsReader
from repaconv.methods.repavit.checkpoint_reading import RePaViTReading, read_ffns


@dataclass(frozen=True)
class Example:
    """The sizes of one model, by stage (a plain ViT and a Mixer have one stage), and its idle ratio.

    Attributes:
        family: ``plain``, ``swin``, ``poolformer`` or ``mixer``.
        extra: The attention window of a Swin, or the pooling window of a PoolFormer.
        width_ratio: H / C.
    """

    family: str
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    heads: tuple[int, ...] = ()
    idle_ratio: float = 0.75
    image_size: int = 224
    patch: int = 16
    classes: int = 1000
    extra: int = 7
    width_ratio: int = 4

    def hidden(self, stage: int) -> int:
        """H, the channels inside the FFNs of a stage."""
        return self.width_ratio * self.widths[stage]

    def active(self, stage: int) -> int:
        """A, the activated channels of a stage, by the official rounding."""
        if self.family == "mixer":
            return self.widths[stage]
        exact = self.hidden(stage) * (1 - self.idle_ratio)
        return int(exact) if self.family == "poolformer" else math.ceil(exact)


_PLAIN = {
    "deit-tiny": Example("plain", (12,), (192,), (3,)),
    "deit-small": Example("plain", (12,), (384,), (6,)),
    "deit-base": Example("plain", (12,), (768,), (12,)),
    "vit-large": Example("plain", (24,), (1024,), (16,)),
    "vit-huge": Example("plain", (32,), (1280,), (16,)),
    "dino-small": Example("plain", (12,), (384,), (6,), classes=0),
    "dino-base": Example("plain", (12,), (768,), (12,), classes=0),
    # CLIP's image encoder ends in a projection to 512
    "clip-b32": Example("plain", (12,), (768,), (12,), patch=32, classes=512),
    "clip-b16": Example("plain", (12,), (768,), (12,), classes=512),
    # LV-ViT with plain patches in place of its convolutional stem
    "lv-vit-s": Example("plain", (16,), (384,), (6,), width_ratio=3),
    "lv-vit-m": Example("plain", (20,), (512,), (8,), width_ratio=3),
    "swin-tiny": Example("swin", (2, 2, 6, 2), (96, 192, 384, 768), (3, 6, 12, 24), patch=4),
    "swin-small": Example("swin", (2, 2, 18, 2), (96, 192, 384, 768), (3, 6, 12, 24), patch=4),
    "swin-base": Example("swin", (2, 2, 18, 2), (128, 256, 512, 1024), (4, 8, 16, 32), patch=4),
    "poolformer-s12": Example("poolformer", (2, 2, 6, 2), (64, 128, 320, 512)),
    "poolformer-s24": Example("poolformer", (4, 4, 12, 4), (64, 128, 320, 512)),
    "mixer-small": Example("mixer", (8,), (512,)),
    "mixer-base": Example("mixer", (12,), (768,)),
}
_TINY = {
    "tiny": Example("plain", (3,), (24,), (3,), image_size=32, patch=8, classes=5),
    "tiny-swin": Example("swin", (2, 2), (16, 32), (2, 4), image_size=64, patch=4, classes=5, extra=4),
    "tiny-poolformer": Example("poolformer", (2, 1), (16, 24), image_size=32, classes=5, extra=3),
    "tiny-mixer": Example("mixer", (2,), (16,), image_size=32, patch=8, classes=5),
}
ARCHS = {
    **{
        f"{name}/{ratio:.2f}": replace(example, idle_ratio=ratio)
        for name, example in _PLAIN.items()
        for ratio in (0.25, 0.5, 0.75, 1.0)
    },
    **_TINY,
}


def training_shapes(example: Example) -> dict[str, tuple[int, ...]]:
    """The shapes of the training form's state dict, by official key names."""
    tail: dict[str, tuple[int, ...]] = {"norm.weight": (example.widths[-1],), "norm.bias": (example.widths[-1],)}
    if example.classes:
        tail |= _linear("head", example.classes, example.widths[-1])
    return {
        **{"plain": _plain, "swin": _swin, "poolformer": _poolformer, "mixer": _mixer}[example.family](example),
        **tail,
    }


def _affine(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, out: int, width: int, *, conv: bool = False) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, width, 1, 1) if conv else (out, width), f"{name}.bias": (out,)}


def _ffn(prefix: str, width: int, hidden: int, *, conv: bool = False) -> dict[str, tuple[int, ...]]:
    found = {**_linear(f"{prefix}fc1", hidden, width, conv=conv), **_linear(f"{prefix}fc2", width, hidden, conv=conv)}
    for norm, channels in (("norm1", width), ("norm2", hidden)):
        found |= _affine(f"{prefix}{norm}", channels)
        found |= {f"{prefix}{norm}.running_mean": (channels,), f"{prefix}{norm}.running_var": (channels,)}
        found[f"{prefix}{norm}.num_batches_tracked"] = ()
    return found | ({f"{prefix}ls": (width,)} if conv else {})


def _plain(example: Example) -> dict[str, tuple[int, ...]]:
    width, tokens = example.widths[0], (example.image_size // example.patch) ** 2 + 1
    found: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, width), "pos_embed": (1, tokens, width)}
    found["patch_embed.proj.weight"] = (width, 3, example.patch, example.patch)
    found |= _affine("norm_pre", width)
    for index in range(example.depths[0]):
        block = f"blocks.{index}."
        found |= {**_linear(f"{block}attn.qkv", 3 * width, width), **_linear(f"{block}attn.proj", width, width)}
        found |= {**_affine(f"{block}attn.norm", width), **_ffn(f"{block}mlp.", width, example.hidden(0))}
    return found


def _swin(example: Example) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (example.widths[0], 3, example.patch, example.patch)
    }
    found |= {"patch_embed.proj.bias": (example.widths[0],), **_affine("patch_embed.norm", example.widths[0])}
    for stage, (depth, width, heads) in enumerate(zip(example.depths, example.widths, example.heads, strict=True)):
        side = example.image_size // example.patch // 2**stage
        window = min(example.extra, side)
        for index in range(depth):
            block = f"layers.{stage}.blocks.{index}."
            found |= _affine(f"{block}norm1", width)
            found |= {**_linear(f"{block}attn.qkv", 3 * width, width), **_linear(f"{block}attn.proj", width, width)}
            found[f"{block}attn.relative_position_bias_table"] = ((2 * window - 1) ** 2, heads)
            found[f"{block}attn.relative_position_index"] = (window**2, window**2)
            if index % 2 and side > window:
                found[f"{block}attn_mask"] = ((side // window) ** 2, window**2, window**2)
            found |= _ffn(f"{block}mlp.", width, example.hidden(stage))
        if stage < len(example.depths) - 1:
            found |= {f"layers.{stage}.downsample.reduction.weight": (2 * width, 4 * width)}
            found |= _affine(f"layers.{stage}.downsample.norm", 4 * width)
    return found


def _poolformer(example: Example) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (example.widths[0], 3, 7, 7)}
    found["patch_embed.proj.bias"] = (example.widths[0],)
    for stage, (depth, width) in enumerate(zip(example.depths, example.widths, strict=True)):
        for index in range(depth):
            block = f"network.{2 * stage}.{index}."
            found |= {**_affine(f"{block}norm1", width), f"{block}layer_scale_1": (width,)}
            found |= _ffn(f"{block}mlp.", width, example.hidden(stage), conv=True)
        if stage:
            before = f"network.{2 * stage - 1}.proj"
            found |= {f"{before}.weight": (width, example.widths[stage - 1], 3, 3), f"{before}.bias": (width,)}
    return found


def _mixer(example: Example) -> dict[str, tuple[int, ...]]:
    width, tokens = example.widths[0], (example.image_size // example.patch) ** 2
    found: dict[str, tuple[int, ...]] = {"stem.proj.weight": (width, 3, example.patch, example.patch)}
    found["stem.proj.bias"] = (width,)
    for index in range(example.depths[0]):
        block = f"blocks.{index}."
        found |= _affine(f"{block}mlp_tokens.norm", tokens)
        found |= _linear(f"{block}mlp_tokens.fc1", width // 2, tokens)
        found |= _linear(f"{block}mlp_tokens.fc2", tokens, width // 2)
        found |= _ffn(f"{block}mlp_channels.", width, example.hidden(0))
    return found


def published(arch: str) -> Published:
    """Build the model of that name in `ARCHS`."""
    sizes = ARCHS[arch]
    weights = dict(meta_tensors(sizes))
    tensors = {name: tensor for name, tensor in weights.items() if not name.endswith("num_batches_tracked")}
    family, ffns = read_ffns(tensors)
    given = {"num_heads": str(sizes.heads[0])} if sizes.family == "plain" else {}
    given |= {"pool_size": str(sizes.extra)} if sizes.family == "poolformer" else {}
    ffn_replacement = family.read(tensors, ffns, SettingsReader(given), {"input_size": sizes.image_size})
    active = tuple(sizes.active(sizes.widths.index(ffn.width)) if sizes.idle_ratio < 1 else 0 for ffn in ffns)
    reading = RePaViTReading(
        backbone=family.backbone,
        config=ffn_replacement.config(active),
        tensors=tensors,
        family=family,
        ffn_replacement=ffn_replacement,
        ffns=ffns,
        active=active,
        eps=1e-5,
    )
    return Published(
        training=reading.module,
        deploy=lambda: plugins.load(plugins.BACKBONES, family.backbone).deploy(reading.config),
        input_shape=(3, sizes.image_size, sizes.image_size),
    )


def example(arch: str | Example, seed: int) -> dict[str, Tensor]:
    """Make a synthetic checkpoint with seeded, non-trivial float32 weights; norm2's statistics fit the channels."""
    sizes = ARCHS[arch] if isinstance(arch, str) else arch
    random = torch.Generator().manual_seed(seed)
    weights = {name: _tensor(name, shape, random) for name, shape in training_shapes(sizes).items()}
    for name in weights:
        if name.endswith("attn_mask"):
            stage = int(name.split(".")[1])
            weights[name] = shift_mask(sizes.image_size // sizes.patch // 2**stage, sizes.extra)
        elif name.endswith("relative_position_index"):
            weights[name] = position_index(math.isqrt(weights[name].shape[0]))
        elif name.endswith("norm2.running_mean"):
            _set_running_mean(weights, name.removesuffix("norm2.running_mean"), sizes, random)
    return weights


def _set_running_mean(weights: dict[str, Tensor], prefix: str, sizes: Example, random: torch.Generator) -> None:
    """Set norm2's running mean: fc1(norm1.bias) for idle channels, E[gelu(-h)] more for activated ones."""
    fc1, bias = weights[f"{prefix}fc1.weight"].flatten(1), weights[f"{prefix}fc1.bias"]
    mean = fc1 @ weights[f"{prefix}norm1.bias"] + bias
    stage = sizes.widths.index(fc1.shape[1])
    active = sizes.active(stage)
    spread = weights[f"{prefix}norm2.running_var"].sqrt()
    lifted = mean[:active] + spread[:active] * (0.3 + 0.4 * torch.rand(active, generator=random))
    mean[:active] = lifted.clamp(min=-0.1)  # a mean of GELU is not below its minimum
    weights[f"{prefix}norm2.running_mean"] = mean


def position_index(window: int) -> Tensor:
    """Swin's relative_position_index, [window^2, window^2]: the row of the bias table for each pair of tokens."""
    rows, columns = (axis.flatten() for axis in torch.meshgrid(*[torch.arange(window)] * 2, indexing="ij"))
    row, column = rows[:, None] - rows, columns[:, None] - columns
    return (row + window - 1) * (2 * window - 1) + column + window - 1


def shift_mask(side: int, window: int) -> Tensor:
    """Swin's attn_mask, [windows, window^2, window^2]: -100 between tokens that are in one window only by the shift."""
    shift, region = window // 2, torch.zeros(side, dtype=torch.int64)
    region[side - window : side - shift], region[side - shift :] = 1, 2
    regions = region[:, None] * 3 + region
    count = side // window
    tiles = regions.view(count, window, count, window).transpose(1, 2).reshape(-1, window * window)
    return -100.0 * (tiles[:, :, None] != tiles[:, None]).float()


def _tensor(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    if name.endswith("num_batches_tracked"):
        return torch.tensor(1000)
    noise = torch.randn(shape, generator=random)
    if name.endswith("running_var"):
        return 0.5 + noise.abs()
    if name.endswith(("bias", "running_mean", "_token", "pos_embed", "bias_table")):
        return 0.3 * noise
    if len(shape) > 1:
        return noise / math.sqrt(math.prod(shape[1:]))
    return (0.5 if name.endswith(("ls", "layer_scale_1")) else 1) + 0.2 * noise


def meta_tensors(sizes: Example) -> Mapping[str, Tensor]:
    """The training form's state dict without values, on the meta device."""
    index = (".num_batches_tracked", ".relative_position_index")
    return {
        name: torch.empty(shape, device="meta", dtype=torch.int64 if name.endswith(index) else torch.float32)
        for name, shape in training_shapes(sizes).items()
    }
