"""Read all of a vision transformer except its blocks: patches, tokens, positions, pooling, head, number of heads.

Positions are resampled if another image size is set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from repaconv.backbones.tensor_names import classes_of, weight_of
from repaconv.backbones.vit_training_norms import LAYER_EPS, norm_kind, read_batch_eps
from repaconv.core.errors import Refused
from repaconv.method_api.settings import SettingsReader, one_of, positive, small
from repaconv.results import Fact, ImageSize, parse_image_size

# Position embeddings for another image size, resampled as in the model's own code.

RESAMPLING_WAYS = ("offset", "antialias", "plain")
"""Ways of resampling position embeddings. ``offset``: bicubic by the factor (g + 0.1) / M, as DINOv2. ``antialias``:
bicubic to the size, antialiased, as DINOv2 with registers and timm. ``plain``: bicubic to the size."""


def resample(positions: Tensor, prefix: int, trained: tuple[int, int], asked: tuple[int, int], way: str) -> Tensor:
    """Resample position embeddings [1, prefix + n, d] for another grid; those of the prefix are unchanged.

    Args:
        positions: Position embeddings of any float type; the result is float64 and becomes part of the folded model.
        prefix: Number of rows before the patches.
        trained, asked: The old and the new grid, (height, width) in patches.
        way: One of `RESAMPLING_WAYS`. Their results differ by 8% to 19%, so it must be that of the model's own code.
    """
    kept, patches = positions[:, :prefix].double(), positions[:, prefix:].double()
    grid = patches.unflatten(1, trained).permute(0, 3, 1, 2)  # type: ignore[no-untyped-call]
    if way == "offset":
        factors = [(new + 0.1) / old for new, old in zip(asked, trained, strict=True)]
        grid = torch.nn.functional.interpolate(grid, scale_factor=factors, mode="bicubic", antialias=False)
    else:
        grid = torch.nn.functional.interpolate(grid, size=asked, mode="bicubic", antialias=way == "antialias")
    assert tuple(grid.shape[2:]) == asked
    return torch.cat([kept, grid.flatten(2).transpose(1, 2)], 1)


# Everything except the blocks.


def read_vit_sizes(
    tensors: dict[str, Tensor],
    reader: SettingsReader,
    metadata: Mapping[str, Any],
    where: str,
    *,
    resize: str | None = "antialias",
) -> dict[str, Any]:
    """Read the fields of `ViTConfig` except the blocks, from keys and shapes.

    Reads the settings ``pool``, ``norm_eps``, ``bn_eps``, ``trained_size`` and, with ``resize``, ``image_size`` and
    ``pos_resize``. If another image size than the trained one is set, ``pos_embed`` is resampled in ``tensors``.

    Args:
        tensors: The tensors by official names.
        reader: The user's settings; facts are added to them.
        metadata: The file's metadata of the architecture: ``img_size``, ``global_pool``, ``norm_eps``, if any.
        where: Where in the file it is.
        resize: The default of ``pos_resize``, one of `RESAMPLING_WAYS`; None if no other image size is accepted.

    Raises:
        Refused: If the shapes are not those of a vision transformer, or do not fit the image size.
    """
    kernel = weight_of(tensors, "patch_embed.proj.weight", 4)
    tokens = tuple(name for name in ("cls_token", "dist_token") if name in tensors)
    image_size, prefix_positions = _read_grid(tensors, reader, kernel.shape[2], len(tokens), metadata, where, resize)
    sizes = {
        "image_size": image_size,
        "patch": kernel.shape[2],
        "width": kernel.shape[0],
        "classes": classes_of(tensors),
        "in_channels": kernel.shape[1],
        "tokens": tokens,
        "registers": tensors["register_tokens"].shape[1] if "register_tokens" in tensors else 0,
        "prefix_positions": prefix_positions,
    }
    pool, source, certain = _pool(tensors, sizes, metadata, where)
    if "pre_logits.fc.weight" in tensors and pool != "distilled":
        sizes["representation"] = weight_of(tensors, "pre_logits.fc.weight", 2).shape[0]
    reader.facts += [Fact(name=name, value=value, source="keys and shapes") for name, value in sizes.items()]
    final = "fc_norm" if "fc_norm.weight" in tensors else "norm"
    return {
        **sizes,
        "pool": reader.take("pool", one_of("token", "distilled", "avg", "none"), pool, pool, source, free=not certain),
        "pool_first": final == "fc_norm",
        "norm": norm_kind(tensors, f"{final}."),
        "norm_eps": reader.take("norm_eps", small, LAYER_EPS, metadata.get("norm_eps"), where),
        "batch_eps": read_batch_eps(tensors, reader),
        "pre_norm": "norm_pre.weight" in tensors,
        "patch_bias": "patch_embed.proj.bias" in tensors,
    }


_POOLS = {"cls": "token", "token": "token", "avg": "avg", "none": "none", "": "none"}
"""timm's names of poolings, and the names here."""


def _pool(
    tensors: Mapping[str, Tensor], sizes: Mapping[str, Any], metadata: Mapping[str, Any], where: str
) -> tuple[str, str, bool]:
    """The pooling, its source, and whether the source is certain (not only what is usual for such keys)."""
    tokens = sizes["tokens"]
    if "head_dist.weight" in tensors and len(tokens) == 2:
        return "distilled", "keys: head_dist", True
    if stated := _POOLS.get(str(metadata["global_pool"])) if "global_pool" in metadata else None:
        return stated, where, True
    if not sizes["classes"] and not tokens:
        return "none", "keys: neither cls_token nor head", False
    if "fc_norm.weight" in tensors or not tokens:
        return "avg", f"keys: {'fc_norm' if tokens else 'no cls_token'}", False
    return "token", "keys: cls_token, and no fc_norm", False


def _read_grid(
    tensors: dict[str, Tensor],
    reader: SettingsReader,
    patch: int,
    prefix: int,
    metadata: Mapping[str, Any],
    where: str,
    resize: str | None,
) -> tuple[ImageSize, bool]:
    """Read the image size (height, width), resample the positions for it, and tell whether the prefix has positions."""
    trained = reader.user_value("trained_size", parse_image_size, _metadata_size(metadata), where)
    size, place = (_metadata_size(metadata), where) if trained is None else (trained, "--set trained_size")
    image_size, prefix_positions = _trained_size(tensors, patch, prefix, size, place)
    if resize is not None:
        prefix_rows = prefix if prefix_positions else 0
        image_size = _resample_for_image_size(tensors, reader, image_size, patch, prefix_rows, resize)
    return image_size, prefix_positions


def _metadata_size(metadata: Mapping[str, Any]) -> ImageSize | None:
    """The metadata's ``img_size`` as (height, width); None if it is missing or not a size."""
    size = metadata.get("img_size")
    size = (size, size) if isinstance(size, int) else size
    if isinstance(size, (list, tuple)) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return int(size[0]), int(size[1])
    return None


def _trained_size(
    tensors: Mapping[str, Tensor], patch: int, prefix: int, size: ImageSize | None, where: str
) -> tuple[ImageSize, bool]:
    """The trained image size (height, width), and whether the tokens before the patches have positions."""
    rows = weight_of(tensors, "pos_embed", 3).shape[1]
    if size is not None:
        count = (size[0] // patch) * (size[1] // patch)
        if rows - count in (0, prefix):
            return size, prefix > 0 and rows - count == prefix
        raise Refused(
            f"{where} gives images of {size[0]} x {size[1]} pixels, that is {count} patches, but pos_embed has "
            f"{rows} rows.",
            hint="One of the two was changed after training.",
            code="checkpoint.shape",
        )
    for taken in (prefix, 0):
        side = math.isqrt(max(rows - taken, 0))
        if side and side * side == rows - taken:
            return (side * patch, side * patch), taken > 0
    raise Refused(
        f"pos_embed has {rows} rows; without the {prefix} tokens before the patches that is not a square grid.",
        hint="Give the image size that it was trained at: --set trained_size=HEIGHTxWIDTH.",
        code="vit.image-size",
    )


def _resample_for_image_size(
    tensors: dict[str, Tensor],
    reader: SettingsReader,
    trained: ImageSize,
    patch: int,
    prefix_rows: int,
    default_way: str,
) -> ImageSize:
    """The image size that the user sets, else the trained one; ``pos_embed`` is resampled if they differ.

    Raises:
        Refused: If the size is not a multiple of the patch size.
    """
    asked = reader.user_value("image_size", parse_image_size)
    if asked is None or asked == trained:
        return trained
    if asked[0] % patch or asked[1] % patch:
        raise Refused(
            f"images of {asked[0]} x {asked[1]} pixels are not a whole number of patches of {patch} pixels.",
            hint="Give a size whose sides are multiples of the patch size.",
            code="vit.image-size",
        )
    source = "the way of the model's own code"
    chosen = reader.take("pos_resize", one_of(*RESAMPLING_WAYS), default_way, default_way, source, free=True)
    grids = [(size[0] // patch, size[1] // patch) for size in (trained, asked)]
    reader.facts.append(
        Fact(name="pos_embed", value=f"{grids[0]} to {grids[1]} patches", source="resampled for --set image_size")
    )
    tensors["pos_embed"] = resample(tensors["pos_embed"], prefix_rows, grids[0], grids[1], chosen)
    return asked


# Heads by (width, depth) in the published models. Heads are 64 wide, except those of ViT-Huge, which are 80 wide.
OFFICIAL_HEADS = {(192, 12): 3, (384, 12): 6, (768, 12): 12, (1024, 24): 16, (1280, 32): 16}


def read_heads(width: int, depth: int, reader: SettingsReader, stored: Any = None, where: str = "") -> int:
    """Read the number of heads, which no tensor shows, from the setting ``num_heads``, the file or published models.

    Args:
        width: Channels.
        depth: Number of blocks.
        reader: The user's settings.
        stored: The number of heads in the file's metadata, if any.
        where: Where in the file it is.

    Raises:
        Refused: If the heads do not divide the channels.
        SettingNeeded: If the number is not given and the sizes are not those of a published ViT.
    """
    default = OFFICIAL_HEADS.get((width, depth))
    if isinstance(stored, int) and not isinstance(stored, bool) and stored > 0:
        heads = reader.take("num_heads", positive, stored, stored, where)
    elif default:
        source = f"width {width} and depth {depth}, as in the published models"
        heads = reader.take("num_heads", positive, default, default, source, free=True)
    else:
        example = next(str(heads) for heads in (3, 4, 2, 1) if not width % heads)
        heads = reader.need(
            "num_heads", positive, example, f"no tensor tells how {width} channels are split into heads"
        )
    if width % heads:
        raise Refused(
            f"{width} channels are not divisible by {heads} heads.",
            hint="Give the number of heads that it was trained with: --set num_heads=N.",
            code="vit.heads",
        )
    return heads
