"""What the papers leave alone in a vision transformer, and what it may carry besides any of their methods.

That is: patches, tokens, positions, norms (LayerNorm, or BatchNorm before a linear layer), attention, MLP and
LayerScale. Here these are read from keys and shapes, built in training form and folded, once for all methods.
Names follow timm, DeiT and DINOv2; other spellings are brought to them by `official_names`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from repaconv.affine import Affine
from repaconv.artefacts import Fact, FoldStep, ImageSize, parse_image_size
from repaconv.backbones.parts import ActivationKind, activation
from repaconv.backbones.tokens import LayerNormSpec, LayerScale, NoNorm, NormSpec, TokenBatchNorm
from repaconv.backbones.vit import ViT, ViTConfig
from repaconv.checkpoint import Checkpoint
from repaconv.errors import Refused
from repaconv.trained.certificate import relative_difference
from repaconv.trained.contract import FoldedPart
from repaconv.trained.knobs import Knobs, one_of, positive, small
from repaconv.trained.positions import WAYS, resample

NormKind = Literal["layer", "plain", "batch"]
"""LayerNorm with its affine or without, which has no keys; BatchNorm."""

LAYER_EPS = 1e-6
BATCH_EPS = 1e-5
"""torch's own, and that of every published net with BatchNorm on tokens."""

# --- names ----------------------------------------------------------------------------------------

_SPELLINGS = (
    (re.compile(r"^blocks\.\d+\.(\d+)\."), r"blocks.\1."),  # DINOv2's chunks: the second index is absolute
    (re.compile(r"\.gamma_([12])$"), r".ls\1.gamma"),  # BEiT's and DeiT-III's LayerScale
    (re.compile(r"\.ls([12])$"), r".ls\1.gamma"),
)
_UNUSED = ("mask_token",)


def official_names(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, str], tuple[Fact, ...]]:
    """Tensors by the skeleton's names, those names to the names in the file, and what no forward uses.

    Raises:
        Refused: If two keys are one name.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    unused = []
    for key, tensor in checkpoint.tensors.items():
        name = key
        for pattern, replacement in _SPELLINGS:
            name = pattern.sub(replacement, name)
        if name in _UNUSED or name.endswith("num_batches_tracked"):
            unused += [key] if name in _UNUSED else []  # a BatchNorm's counter is nobody's surprise
            continue
        if name in tensors:
            raise Refused(
                f"{names[name]} and {checkpoint.names[key]} are both {name}.",
                hint="The file mixes two nets; save one of them.",
                code="checkpoint.ambiguous",
            )
        tensors[name], names[name] = tensor, checkpoint.names[key]
    facts = [Fact(name="unused", value=unused, source="keys: training alone reads them")] if unused else []
    return tensors, names, tuple(facts)


def weight_of(tensors: Mapping[str, Tensor], name: str, dims: int) -> Tensor:
    """A weight that must be there, with that many dimensions.

    Raises:
        Refused: ``checkpoint.missing-keys`` or ``checkpoint.shape``.
    """
    if name not in tensors:
        raise Refused(
            f"the checkpoint lacks {name}.", hint="The file is only part of a net.", code="checkpoint.missing-keys"
        )
    if tensors[name].ndim != dims or not all(tensors[name].shape):
        raise Refused(
            f"{name} has shape {list(tensors[name].shape)} where {dims} dimensions, none empty, are needed.",
            hint="The file is of another net, or it was changed after training.",
            code="checkpoint.shape",
        )
    return tensors[name]


def block_tensors(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """What lies under ``prefix``, by the names within it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def in_float64(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floating point tensors in float64, converted once; others (an index) as they are."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def depth_of(tensors: Mapping[str, Tensor]) -> int:
    """Number of blocks.

    Raises:
        Refused: If the numbering has gaps.
    """
    found = {int(match[1]) for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))}
    if found != set(range(len(found))) or not found:
        raise Refused(
            f"the blocks are numbered {', '.join(map(str, sorted(found))) or 'not at all'}.",
            hint="A whole net has blocks.0, blocks.1 and so on.",
            code="checkpoint.missing-keys",
        )
    return len(found)


# --- the skeleton ---------------------------------------------------------------------------------


def read_skeleton(
    tensors: dict[str, Tensor],
    knobs: Knobs,
    said: Mapping[str, Any],
    where: str,
    *,
    resize: str | None = "antialias",
) -> dict[str, Any]:
    """All of a `ViTConfig` but its blocks, from keys and shapes; takes the knobs ``pool`` and ``norm_eps``.

    Also ``image_size``: where another than the trained one is asked for, ``pos_embed`` is resampled in ``tensors``,
    in the way that the knob ``pos_resize`` names.

    Args:
        tensors: By official names.
        knobs: Leave facts here.
        said: What the file says of its architecture: ``img_size``, ``global_pool``, ``norm_eps``, if anything.
        where: Where it says so.
        resize: The default way to resample positions (`repaconv.trained.positions`); None where no other size will do.

    Raises:
        Refused: If the shapes are not those of a vision transformer.
    """
    kernel = weight_of(tensors, "patch_embed.proj.weight", 4)
    width, channels, patch = kernel.shape[0], kernel.shape[1], kernel.shape[2]
    tokens = tuple(name for name in ("cls_token", "dist_token") if name in tensors)
    registers = tensors["register_tokens"].shape[1] if "register_tokens" in tensors else 0
    trained = knobs.asked("trained_size", parse_image_size, _said_size(said), where)
    size, place = (_said_size(said), where) if trained is None else (trained, "--set trained_size")
    image_size, prefix_positions = _grid(tensors, patch, len(tokens), size, place)
    if resize is not None:
        kept = len(tokens) if prefix_positions else 0
        image_size = _resized(tensors, knobs, image_size, patch, kept, resize)
    final = "fc_norm" if "fc_norm.weight" in tensors else "norm"
    classes = weight_of(tensors, "head.weight", 2).shape[0] if "head.weight" in tensors else 0
    if "head_dist.weight" in tensors and len(tokens) == 2:
        default_pool, reason = "distilled", "keys: head_dist"
    elif final == "fc_norm" or not tokens:
        default_pool, reason = "avg", f"keys: {'fc_norm' if tokens else 'no cls_token'}"
    else:
        default_pool, reason = "token", "keys: cls_token, and no fc_norm"
    representation = 0
    if "pre_logits.fc.weight" in tensors and default_pool != "distilled":
        representation = weight_of(tensors, "pre_logits.fc.weight", 2).shape[0]
    if not classes and not tokens:
        default_pool, reason = "none", "keys: neither cls_token nor head"
    pools = {"cls": "token", "token": "token", "avg": "avg", "none": "none", "": "none"}
    asked = pools.get(str(said.get("global_pool"))) if "global_pool" in said else None
    found, source = (asked, where) if asked and default_pool != "distilled" else (default_pool, reason)
    sizes = {
        "image_size": image_size,
        "patch": patch,
        "width": width,
        "classes": classes,
        "in_channels": channels,
        "tokens": tokens,
        "registers": registers,
        "prefix_positions": prefix_positions,
        **({"representation": representation} if representation else {}),
    }
    knobs.facts += [Fact(name=name, value=value, source="keys and shapes") for name, value in sizes.items()]
    proved = source == where or default_pool == "distilled"
    pool = knobs.take("pool", one_of("token", "distilled", "avg", "none"), found, found, source, free=not proved)
    return {
        **sizes,
        "pool": pool,
        "pool_first": final == "fc_norm",
        "norm": norm_kind(tensors, f"{final}."),
        "norm_eps": knobs.take("norm_eps", small, LAYER_EPS, said.get("norm_eps"), where),
        "batch_eps": read_batch_eps(tensors, knobs),
        "pre_norm": "norm_pre.weight" in tensors,
        "patch_bias": "patch_embed.proj.bias" in tensors,
    }


def _said_size(said: Mapping[str, Any]) -> ImageSize | None:
    """``img_size`` as (height, width); None if it is not said, or is no size."""
    size = said.get("img_size")
    size = (size, size) if isinstance(size, int) else size
    if isinstance(size, (list, tuple)) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return int(size[0]), int(size[1])
    return None


def _grid(
    tensors: Mapping[str, Tensor], patch: int, prefix: int, size: ImageSize | None, where: str
) -> tuple[ImageSize, bool]:
    """(height, width) in pixels, and whether the tokens before the patches have positions."""
    rows = weight_of(tensors, "pos_embed", 3).shape[1]
    if size is not None:
        count = (size[0] // patch) * (size[1] // patch)
        if rows - count in (0, prefix):
            return size, prefix > 0 and rows - count == prefix
        raise Refused(
            f"{where} says images of {size[0]} x {size[1]} pixels, that is {count} patches; pos_embed has {rows} rows.",
            hint="One of the two was changed after training.",
            code="checkpoint.shape",
        )
    for taken in (prefix, 0):
        side = math.isqrt(max(rows - taken, 0))
        if side and side * side == rows - taken:
            return (side * patch, side * patch), taken > 0
    raise Refused(
        f"pos_embed has {rows} rows, which with {prefix} tokens before the patches is no square grid.",
        hint="Give the size that it was trained at with --set trained_size=HEIGHTxWIDTH.",
        code="vit.image-size",
    )


def _resized(
    tensors: dict[str, Tensor], knobs: Knobs, trained: ImageSize, patch: int, kept: int, default_way: str
) -> ImageSize:
    """The asked size, for which ``pos_embed`` is resampled where it is another than the trained one.

    Raises:
        Refused: If the patches do not divide it.
    """
    asked = knobs.asked("image_size", parse_image_size)
    if asked is None or asked == trained:
        return trained
    if asked[0] % patch or asked[1] % patch:
        raise Refused(
            f"images of {asked[0]} x {asked[1]} pixels are no whole number of patches of {patch}.",
            hint="Give a size whose sides are multiples of the patch.",
            code="vit.image-size",
        )
    usual = "the way of the model's own code"
    way = knobs.take("pos_resize", one_of(*WAYS), default_way, default_way, usual, free=True)
    grids = [(size[0] // patch, size[1] // patch) for size in (trained, asked)]
    knobs.facts.append(
        Fact(name="pos_embed", value=f"{grids[0]} to {grids[1]} patches", source="resampled for --set image_size")
    )
    tensors["pos_embed"] = resample(tensors["pos_embed"], kept, grids[0], grids[1], way)
    return asked


# What every method of the papers was published with; Huge is the one whose heads are 80 wide.
OFFICIAL_HEADS = {(192, 12): 3, (384, 12): 6, (768, 12): 12, (1024, 24): 16, (1280, 32): 16}


def read_heads(width: int, depth: int, knobs: Knobs, said: Any = None, where: str = "") -> int:
    """The number of heads, which no tensor tells; takes the knob ``num_heads``.

    Raises:
        Refused: If it is neither given nor said, and the sizes are not those of a published ViT.
    """
    default = OFFICIAL_HEADS.get((width, depth))
    if isinstance(said, int) and not isinstance(said, bool) and said > 0:
        heads = knobs.take("num_heads", positive, said, said, where)
    elif default:
        source = f"width {width} and depth {depth}, as in the published models"
        heads = knobs.take("num_heads", positive, default, default, source, free=True)
    else:
        heads = knobs.need("num_heads", positive, "3", f"no tensor tells how {width} channels are split into heads")
    if width % heads:
        raise Refused(
            f"{width} channels do not split into {heads} heads.",
            hint="Give the number that it was trained with: --set num_heads=N.",
            code="vit.heads",
        )
    return heads


# --- blocks in training form ----------------------------------------------------------------------


def norm_kind(tensors: Mapping[str, Tensor], prefix: str) -> Literal["layer", "batch"]:
    """A norm with running statistics is a BatchNorm."""
    return "batch" if f"{prefix}running_mean" in tensors else "layer"


@dataclass(frozen=True)
class Norms:
    """What no key tells of the norms of blocks.

    Attributes:
        eps: Of LayerNorms.
        batch_eps: Of BatchNorms.
        bare: What stands where a block has no key of the norm of that name, by name; None for nothing.
    """

    eps: float
    batch_eps: float = BATCH_EPS
    bare: Mapping[str, NormKind | None] = field(default_factory=dict)


def read_norms(tensors: Mapping[str, Tensor], knobs: Knobs, *, without: tuple[str, ...] = ()) -> Norms:
    """Of all blocks; takes ``norm1`` and ``norm2`` where one has no such key, and the eps that there are.

    Args:
        tensors: By official names.
        knobs: The user's, from which `read_skeleton` took what the file says.
        without: Norms that the method itself leaves out.

    Raises:
        Refused: If a norm has no keys and nobody says what it is.
    """
    bare: dict[str, NormKind | None] = dict.fromkeys(without)
    for name in ("norm1", "norm2"):
        lacking = [
            index
            for index in range(depth_of(tensors))
            if not any(key.startswith(f"blocks.{index}.{name}.") for key in tensors)
            and not (name == "norm1" and f"blocks.{index}.attn.norm.weight" in tensors)
        ]
        if lacking and name not in without:
            why = f"blocks.{lacking[0]} has no key of {name}: it has no norm, or a LayerNorm without weight and bias"
            bare[name] = "plain" if knobs.need(name, one_of("plain", "none"), "plain", why) == "plain" else None
    return Norms(knobs.take("norm_eps", small, LAYER_EPS), read_batch_eps(tensors, knobs), bare)


_BATCHNORM = re.compile(r"^(?:fc_norm|norm|blocks\.\d+\.(?:attn\.norm|norm1|norm2))\.running_mean$")


def read_batch_eps(tensors: Mapping[str, Tensor], knobs: Knobs) -> float:
    """The knob ``bn_eps``, where a norm of the skeleton or around its parts is a BatchNorm."""
    return knobs.take("bn_eps", small, BATCH_EPS) if any(map(_BATCHNORM.match, tensors)) else BATCH_EPS


@dataclass(frozen=True)
class NormTraits:
    """One norm as trained; ``kind`` None where there is none."""

    kind: NormKind | None
    eps: float

    @classmethod
    def read(cls, block: Mapping[str, Tensor], name: str, norms: Norms) -> NormTraits:
        """From the keys of a block; where it has none of that norm, as was told."""
        if not any(key.startswith(f"{name}.") for key in block):
            return cls(norms.bare.get(name), norms.eps)
        kind = norm_kind(block, f"{name}.")
        return cls(kind, norms.batch_eps if kind == "batch" else norms.eps)

    def build(self, width: int) -> nn.Module:
        """LayerNorm, BatchNorm over tokens, or nothing."""
        if self.kind is None:
            return nn.Identity()
        if self.kind == "batch":
            return TokenBatchNorm(width, self.eps)
        return nn.LayerNorm(width, self.eps, elementwise_affine=self.kind == "layer")

    @property
    def spec(self) -> NormSpec:
        """What of it stays in the deploy form."""
        return NoNorm() if self.kind in (None, "batch") else LayerNormSpec(self.eps)

    def affine(self, block: Mapping[str, Tensor], name: str, width: int) -> Affine:
        """What goes into the linear layer behind it: LayerNorm's affine, or all of a BatchNorm."""
        if self.kind in (None, "plain"):
            return Affine.eye(width)
        weight, bias = block[f"{name}.weight"], block[f"{name}.bias"]
        if self.kind == "layer":
            return Affine.diagonal(weight, bias)
        mean, variance = block[f"{name}.running_mean"], block[f"{name}.running_var"]
        return Affine.batchnorm(weight, bias, mean, variance, self.eps)


def scale_affine(block: Mapping[str, Tensor], name: str, width: int) -> Affine:
    """LayerScale ``ls1`` or ``ls2`` where the block has it."""
    gamma = block.get(f"{name}.gamma")
    return Affine.eye(width) if gamma is None else Affine.diagonal(gamma)


class PlainAttention(nn.Module):
    """proj(softmax(q k^T / sqrt(dh)) v) under ``qkv`` and ``proj``; some codes keep the norm inside it."""

    def __init__(self, width: int, heads: int, *, qkv_bias: bool = True, norm: NormTraits | None = None) -> None:
        super().__init__()
        self.heads = heads
        if norm is not None:
            self.norm = norm.build(width)
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        x = self.norm(x) if hasattr(self, "norm") else x
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class PlainMlp(nn.Module):
    """fc2(act(fc1(x)))."""

    def __init__(self, width: int, hidden: int, act: ActivationKind = "GELU") -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, hidden), activation(act), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class PlainBlock(nn.Module):
    """x += ls1(attn(norm1(x))), x += ls2(mlp(norm2(x))), with what a method puts in for attn and mlp."""

    def __init__(self, config: ViTConfig, attn: nn.Module, mlp: nn.Module, traits: BlockTraits) -> None:
        super().__init__()
        self.norm1 = traits.norm1.build(config.width)
        self.attn = attn
        self.ls1 = LayerScale(config.width) if traits.scale1 else nn.Identity()
        self.norm2 = traits.norm2.build(config.width)
        self.mlp = mlp
        self.ls2 = LayerScale(config.width) if traits.scale2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        out: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return out


@dataclass(frozen=True)
class BlockTraits:
    """How one training block is built around its attn and mlp, from its keys."""

    norm1: NormTraits
    norm2: NormTraits
    scale1: bool
    scale2: bool

    @classmethod
    def read(cls, block: Mapping[str, Tensor], norms: Norms) -> BlockTraits:
        """From the names within a block."""
        return cls(
            NormTraits.read(block, "norm1", norms),
            NormTraits.read(block, "norm2", norms),
            "ls1.gamma" in block,
            "ls2.gamma" in block,
        )

    def told(self) -> tuple[str, ...]:
        """Rows of the certificate for what is folded here."""
        rows = []
        for name, norm, into in (("norm1", self.norm1, "attn"), ("norm2", self.norm2, "mlp")):
            if norm.kind in ("layer", "batch"):
                what = "affine" if norm.kind == "layer" else "BatchNorm, whole,"
                rows.append(f"{name}'s {what} -> {into}'s first linear layer")
        rows += ["ls1 -> attn.proj"] * self.scale1 + ["ls2 -> mlp's last linear layer"] * self.scale2
        return tuple(rows)

    def left(self) -> tuple[str, ...]:
        """What stays, and why."""
        both = (("norm1", self.norm1), ("norm2", self.norm2))
        layers = [name for name, norm in both if norm.kind in ("layer", "plain")]
        return (f"the statistics of {' and '.join(layers)}: they depend on the input",) if layers else ()


# --- folding --------------------------------------------------------------------------------------


def linear_of(block: Mapping[str, Tensor], name: str) -> Affine:
    """The linear layer of that name; a bias that is not there is zero."""
    return Affine.linear(block[f"{name}.weight"], block.get(f"{name}.bias"))


def score_scale(width: int, heads: int) -> Affine:
    """1 / sqrt(dh) on the q rows of [q | k | v]."""
    ones = torch.ones(3 * width, dtype=torch.float64)
    ones[:width] = (width // heads) ** -0.5
    return Affine.diagonal(ones)


def fold_attention(block: Mapping[str, Tensor], heads: int, norm: Affine, scale: Affine) -> dict[str, Affine]:
    """norm's affine and the scores' divisor into qkv, LayerScale into proj."""
    qkv = linear_of(block, "attn.qkv")
    return {
        "attn.qkv": score_scale(norm.out_width, heads) @ qkv @ norm,
        "attn.proj": scale @ linear_of(block, "attn.proj"),
    }


def fold_mlp(block: Mapping[str, Tensor], norm: Affine, scale: Affine) -> dict[str, Affine]:
    """norm's affine into fc1, LayerScale into fc2."""
    return {"mlp.fc1": linear_of(block, "mlp.fc1") @ norm, "mlp.fc2": scale @ linear_of(block, "mlp.fc2")}


def named(parts: Mapping[str, Affine], *, without_bias: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Affine maps as ``<name>.weight`` and ``<name>.bias``."""
    tensors = {}
    for name, affine in parts.items():
        tensors[f"{name}.weight"] = affine.dense().weight
        if name not in without_bias:
            tensors[f"{name}.bias"] = affine.bias
    return tensors


TAIL = ("norm.", "fc_norm.", "pre_logits.", "head")


def fold_stem(tensors: Mapping[str, Tensor]) -> FoldedPart:
    """What stands before the blocks stays as it is."""
    return FoldedPart({n: w.double() for n, w in tensors.items() if not n.startswith(("blocks.", *TAIL))})


def fold_tail(config: ViTConfig, tensors: Mapping[str, Tensor]) -> FoldedPart:
    """The final norm's affine into the linear layer behind it, two averaged heads into one; features keep their norm.

    That layer is the head, or ``pre_logits.fc`` where there is one; tanh then keeps the head apart.
    """
    final = "fc_norm" if config.pool_first else "norm"
    tail = {n: w for n, w in tensors.items() if n.startswith(TAIL)}
    if not config.classes and not config.representation:
        return FoldedPart(in_float64(tail))
    behind = "pre_logits.fc" if config.representation else "head"
    eps = config.batch_eps if config.norm == "batch" else config.norm_eps
    norm = NormTraits(config.norm, eps).affine(tail, final, config.width)
    first = linear_of(tail, behind) @ norm
    told = [f"{final}'s {'affine' if config.norm == 'layer' else 'BatchNorm, whole,'} -> {behind}"]
    if config.pool == "distilled":
        other = linear_of(tail, "head_dist") @ norm
        first = Affine(torch.cat([first.weight, other.weight], 1) / 2, (first.bias + other.bias) / 2)
        told.append("head and head_dist, averaged -> one head over both tokens")
    folded = named({behind: first})
    if config.representation and config.classes:
        folded |= named({"head": linear_of(tail, "head")})
    return FoldedPart(
        folded, FoldStep(module=behind, folded=tuple(told), max_rel_error=_tail_error(config, tail, folded))
    )


def _tail_error(config: ViTConfig, trained: Mapping[str, Tensor], folded: Mapping[str, Tensor]) -> float:
    """Both read-outs on the same random tokens."""

    class Tail(ViT):
        def __init__(self, *, deployed: bool) -> None:
            nn.Module.__init__(self)
            self.config, self.deployed = config, deployed
            self._build_tail(config)

        def forward(self, x: Tensor) -> Tensor:
            return self._read_out(x)

    with torch.device("meta"):
        training, deploy = Tail(deployed=False), Tail(deployed=True)
    return relative_difference((training, trained), (deploy, folded), (2, config.prefix + 3, config.width))


def folded_block(
    prefix: str,
    training: Callable[[], nn.Module],
    trained: Mapping[str, Tensor],
    deploy: Callable[[], nn.Module],
    folded: Mapping[str, Tensor],
    shape: tuple[int, ...],
    *,
    told: tuple[str, ...],
    left: tuple[str, ...],
    equation: str = "",
) -> FoldedPart:
    """A block's part of the fold, with the difference that it makes on random tokens of this shape."""
    with torch.device("meta"):
        pair = (training(), trained), (deploy(), folded)
    return FoldedPart(
        {f"{prefix}{name}": tensor for name, tensor in folded.items()},
        FoldStep(
            module=prefix.rstrip("."),
            folded=told,
            left=left,
            equation=equation,
            max_rel_error=relative_difference(*pair, shape),
        ),
    )
