"""Accelerating Vision Transformers with Drop-in Depthwise Convolution: attention heads that are convolutions.

Of a head whose attention is local, the same everywhere and for every input, a kernel over the values is left (eq. 8).
A net trained that way, in the layout dwconv-v1, holds for each block one of

    proj(softmax(q k^T / sqrt(dh)) v)            attention, eq. 4
    proj(dw * v),  v = X W^V                     drop-in depthwise, eq. 11; kernels by channel or shared by head
    the same over sum_h sigma(gamma)_h W^V_h and W^O_h     ensembled heads, eqs. 12-13
    proj(W^C * X)                                full convolution, eqs. 9-10
    attention in some heads, kernels in others   scattered
    (1 - g) attention + g convolution            gated, eq. 18: the p largest gates take the convolution

What folds, exactly: a hard gate to its choice, the other side's weights dropped; the ensemble to one head; shared
kernels to channels; norm1's affine into qkv or v, which stand before the padding; biases behind the convolution into
proj; LayerScale into proj; the scores' divisor into q. A full convolution becomes a pointwise and a depthwise one where
each output channel's kernel is exactly a product of the two; where not, W^O goes into it. A product that was stored in
float32 is none any more, by 6e-8: it is taken for one where that is asked for, in a row of its own of the certificate.

What does not: v's bias may not move behind the zero-padded convolution (it would count outside the image), nor norm1's
shift into a full convolution, for the same reason. SPViT is not the special case that the paper calls it: its code has
a BatchNorm and a ReLU between convolution and W^O.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from repaconv.affine import Affine
from repaconv.artefacts import Fact, FoldStep
from repaconv.backbones.convmixers import DepthwiseSpec, EnsembledSpec, FullConvSpec, ScatteredSpec, to_grid, to_tokens
from repaconv.backbones.parts import ActivationKind
from repaconv.backbones.tokens import AttentionSpec, LayerNormSpec, MlpSpec, SwiGlu, SwiGluSpec
from repaconv.backbones.vit import BlockSpec, DeployBlock, MixerSpec, ViT, ViTConfig
from repaconv.checkpoint import Checkpoint, require_sound
from repaconv.errors import Refused
from repaconv.skeletons.plain import (
    BlockTraits,
    Norms,
    NormTraits,
    PlainBlock,
    PlainMlp,
    block_tensors,
    depth_of,
    fold_attention,
    fold_stem,
    fold_tail,
    folded_block,
    in_float64,
    linear_of,
    named,
    official_names,
    read_heads,
    read_norms,
    read_skeleton,
    scale_affine,
    weight_of,
)
from repaconv.trained.activations import read_activation
from repaconv.trained.certificate import max_rel_error
from repaconv.trained.contract import Detection, FoldedPart, Published, Reading
from repaconv.trained.knobs import Knobs, natural, one_of
from repaconv.trained.preprocessing import preprocessing_of

FORMAT = "dwconv-v1"
SEPARABLE = {"auto": 1e-12, "refactor": 1e-7, "keep": -1.0}
"""How far from a product a kernel may be to be taken for one: float64's rounding, or if asked float32's (6e-8)."""

Kind = Literal["attention", "depthwise", "ensembled", "full"]


@dataclass(frozen=True)
class Mixer:
    """One block's token mixer as trained.

    Attributes:
        kind: ``depthwise`` where any head is a convolution.
        conv: Head by head, whether it is a convolution when evaluated.
        qkv: Rows of ``qkv``, 0 where there is ``v`` instead.
        qkv_bias: Whether ``qkv`` or ``v`` has a bias.
        kernel: Side of the convolution's kernel, 0 without one.
        rows: Kernels in ``dw``.
        dw_bias: Whether the convolution has a bias.
        flagged: Whether ``conv_heads`` stands among the weights.
    """

    kind: Kind
    conv: tuple[bool, ...]
    qkv: int
    qkv_bias: bool
    kernel: int = 0
    rows: int = 0
    dw_bias: bool = False
    flagged: bool = False

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.conv)

    def channels(self, width: int, *, conv: bool) -> list[int]:
        """The channels of the heads that are convolutions, or of those that are not; ascending by head."""
        head = width // self.heads
        return [h * head + c for h, is_conv in enumerate(self.conv) if is_conv == conv for c in range(head)]

    def kernels(self, weight: Tensor, width: int) -> Tensor:
        """dw.weight or .bias, [rows, ...], by channel of the convolving heads, [c, ...]."""
        head, conv = width // self.heads, [h for h, is_conv in enumerate(self.conv) if is_conv]
        if self.rows == width:
            return weight[self.channels(width, conv=True)]
        if self.rows == len(conv) * head:
            return weight
        if self.rows == self.heads:
            weight = weight[conv]
        return weight.repeat_interleave(head, 0)


class DropIn(nn.Module):
    """The mixer as trained, evaluated; weights of the side that a gate did not choose are held and not used."""

    conv_heads: Tensor

    def __init__(self, width: int, grid: tuple[int, int], mixer: Mixer) -> None:
        super().__init__()
        self.mixer, self.grid, self.width = mixer, grid, width
        head = width // mixer.heads
        if mixer.kind == "full":
            self.conv = nn.Conv2d(width, width, mixer.kernel, padding=mixer.kernel // 2, bias=mixer.dw_bias)
        elif mixer.qkv:
            self.qkv = nn.Linear(width, mixer.qkv, bias=mixer.qkv_bias)
        else:
            self.v = nn.Linear(width, width, bias=mixer.qkv_bias)
        if mixer.kind == "ensembled":
            self.gamma = nn.Parameter(torch.zeros(mixer.heads))
        if mixer.rows:
            rows = head if mixer.kind == "ensembled" else mixer.rows
            self.dw = nn.Conv2d(rows, rows, mixer.kernel, groups=rows, bias=mixer.dw_bias)
        if mixer.flagged:
            self.register_buffer("conv_heads", torch.zeros(mixer.heads, dtype=torch.bool))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        mixer, width = self.mixer, self.width
        if mixer.kind == "full":
            out: Tensor = self.proj(to_tokens(self.conv(to_grid(x, self.grid))))
            return out
        if mixer.kind == "ensembled":
            return self._ensembled(x)
        attending, convolving = (mixer.channels(width, conv=conv) for conv in (False, True))
        if mixer.qkv:
            some = (mixer.qkv - width) // 2
            q, k, v = self.qkv(x).split([some, some, width], -1)
            if some == width:
                q, k = q[..., attending], k[..., attending]
        else:
            v = self.v(x)
        outputs = []
        if attending:
            heads = mixer.heads - sum(mixer.conv)
            parts = (part.view(*part.shape[:2], heads, -1).transpose(1, 2) for part in (q, k, v[..., attending]))
            mixed = nn.functional.scaled_dot_product_attention(*parts)
            outputs.append(mixed.transpose(1, 2).flatten(2))
        if convolving:
            outputs.append(self._convolved(v[..., convolving]))
        order = attending + convolving
        ascending = sorted(range(width), key=order.__getitem__)
        mixed_heads = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)[..., ascending]
        result: Tensor = self.proj(mixed_heads)
        return result

    def _convolved(self, v: Tensor) -> Tensor:
        kernels = self.mixer.kernels(self.dw.weight, self.width)
        bias = None if self.dw.bias is None else self.mixer.kernels(self.dw.bias, self.width)
        grid = to_grid(v, self.grid)
        padding = self.mixer.kernel // 2
        return to_tokens(nn.functional.conv2d(grid, kernels, bias, padding=padding, groups=len(kernels)))

    def _ensembled(self, x: Tensor) -> Tensor:
        shares = self.gamma.softmax(0)
        v = (self.v(x).view(*x.shape[:2], self.mixer.heads, -1) * shares[:, None]).sum(-2)
        padding = self.mixer.kernel // 2
        convolved = nn.functional.conv2d(
            to_grid(v, self.grid), self.dw.weight, self.dw.bias, padding=padding, groups=v.shape[-1]
        )
        weight = (self.proj.weight.view(self.width, self.mixer.heads, -1) * shares[:, None]).sum(1)
        return nn.functional.linear(to_tokens(convolved), weight, self.proj.bias)


# --- folding one mixer --------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoldedMixer:
    """A mixer of the deploy form: what it is, its weights, in words, and whether norm1 keeps its affine."""

    spec: MixerSpec
    tensors: Mapping[str, Tensor]
    told: tuple[str, ...]
    keeps_norm: bool = False


def fold_mixer(
    block: Mapping[str, Tensor], mixer: Mixer, width: int, norm: Affine, scale: Affine, *, separate: bool
) -> FoldedMixer:
    """One block's mixer.

    Args:
        block: Its weights in float64 by the names within the block.
        mixer: How it was trained.
        width: Channels.
        norm: norm1's affine.
        scale: ls1.
        separate: Whether a full convolution separates.
    """
    proj, head = scale @ linear_of(block, "attn.proj"), width // mixer.heads
    if mixer.kind == "full":
        return _fold_full(block, mixer, norm, proj, separate=separate)
    if mixer.kind == "ensembled":
        shares = block["attn.gamma"].softmax(0)
        v = linear_of(block, "attn.v") @ norm
        summed = Affine(_ensemble(v.weight, shares), _ensemble(v.bias, shares))
        output = Affine(_ensemble(proj.weight.T.contiguous(), shares).T, proj.bias)
        tensors = _convolution(summed, block["attn.dw.weight"], block.get("attn.dw.bias"), output, pointwise=False)
        return FoldedMixer(EnsembledSpec(head, mixer.kernel), tensors, (f"{mixer.heads} heads, ensembled -> one",))
    if not any(mixer.conv):
        folded = fold_attention(block, mixer.heads, norm, scale)
        told = ("the gate -> attention; the kernels go",) if mixer.rows else ()
        return FoldedMixer(AttentionSpec(mixer.heads, head, head), named(folded), (*told, "1 / sqrt(dh) -> q"))
    kernels = mixer.kernels(block["attn.dw.weight"], width)
    bias = mixer.kernels(block["attn.dw.bias"], width) if mixer.dw_bias else None
    shared = () if len(kernels) == mixer.rows or mixer.rows == width else ("kernels shared by head -> by channel",)
    some = (mixer.qkv - width) // 2 if mixer.qkv else 0
    projected = linear_of(block, "attn.qkv" if mixer.qkv else "attn.v")
    v = projected.rows(slice(2 * some, None)) @ norm
    if all(mixer.conv):
        dead = ("the gate -> the convolution; q and k go",) if mixer.qkv else ()
        tensors = _convolution(v, kernels, bias, proj, pointwise=True)
        return FoldedMixer(DepthwiseSpec(mixer.kernel), tensors, (*dead, *shared))
    attending, convolving = (torch.tensor(mixer.channels(width, conv=conv)) for conv in (False, True))
    q, k = (projected.rows(slice(i * some, (i + 1) * some)) @ norm for i in (0, 1))
    if some == width:
        q, k = q.rows(attending), k.rows(attending)
    q = Affine(q.weight / math.sqrt(head), q.bias / math.sqrt(head))
    parts = (q, k, v.rows(attending), v.rows(convolving))
    output = proj.columns(torch.cat([attending, convolving]))
    if bias is not None:
        output = Affine(output.weight, output.bias + output.weight[:, len(attending) :] @ bias)
    joined = Affine(torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts]))
    tensors = {**named({"attn.qkv": joined, "attn.proj": output}), "attn.dw.weight": kernels}
    convs = sum(mixer.conv)
    spec = ScatteredSpec(mixer.heads - convs, convs, head, mixer.kernel)
    told = (f"{convs} heads -> convolutions, their q and k go", "heads -> [attention | convolution]", *shared)
    return FoldedMixer(spec, tensors, told)


def _fold_full(block: Mapping[str, Tensor], mixer: Mixer, norm: Affine, proj: Affine, *, separate: bool) -> FoldedMixer:
    weight, bias = block["attn.conv.weight"], block.get("attn.conv.bias")
    shift = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias
    if separate:
        pointwise, kernels = factors(weight)
        tensors = _convolution(Affine.linear(pointwise) @ norm, kernels, bias, proj, pointwise=True)
        return FoldedMixer(DepthwiseSpec(mixer.kernel), tensors, ())
    composed = torch.einsum("oc,cikl->oikl", proj.weight, weight)
    tensors = {"attn.conv.weight": composed, "attn.conv.bias": proj.weight @ shift + proj.bias}
    return FoldedMixer(FullConvSpec(mixer.kernel), tensors, ("W^O -> the full convolution",), keeps_norm=True)


def factors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[c, d, k, k] as pointwise [c, d] and depthwise [c, 1, k, k], by every channel's largest singular pair."""
    u, s, v = torch.linalg.svd(weight.flatten(2), full_matrices=False)
    root = s[:, :1].sqrt()
    return u[:, :, 0] * root, (v[:, 0] * root).view(len(weight), 1, *weight.shape[2:])


def separated(weight: Tensor) -> tuple[Tensor, float]:
    """The product [c, d, k, k] in float64 next to a full convolution's kernel, and how far the kernel is from it.

    That is max|kernel - product| / max|kernel| of the output channel where it is largest.
    """
    weight = weight.double()
    pointwise, kernels = factors(weight)
    product = pointwise[:, :, None, None] * kernels
    return product, max(map(max_rel_error, product, weight))


def _convolution(
    v: Affine, kernels: Tensor, bias: Tensor | None, proj: Affine, *, pointwise: bool
) -> dict[str, Tensor]:
    """v, dw and proj; the convolution's bias goes into proj's, v's stays before the padding."""
    if bias is not None:
        proj = Affine(proj.weight, proj.bias + proj.weight @ bias)
    tensors = named({"attn.v": v, "attn.proj": proj})
    if pointwise:
        tensors = {name: w[:, :, None, None] if w.ndim == 2 else w for name, w in tensors.items()}
    return {**tensors, "attn.dw.weight": kernels}


def _ensemble(rows: Tensor, shares: Tensor) -> Tensor:
    """sum_h share_h rows_h, for rows [h dh, ...]."""
    by_head = rows.view(len(shares), -1, *rows.shape[1:])
    return torch.einsum("h,hr...->r...", shares, by_head)


# --- the net --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvBlock:
    """One training block."""

    mixer: Mixer
    traits: BlockTraits
    hidden: int
    swiglu: bool
    separate: bool
    """Whether a full convolution becomes a pointwise and a depthwise one."""
    act: ActivationKind = "GELU"
    error: float = 0.0
    """What that changes of its kernel; see `separated`."""

    @property
    def rounded(self) -> bool:
        """Whether its kernel is a product only to the rounding of its storage."""
        return self.separate and self.error > SEPARABLE["auto"]


@dataclass(frozen=True, kw_only=True)
class DwConvReading(Reading):
    """A net with convolutions in place of heads, as trained."""

    config: ViTConfig
    blocks: tuple[ConvBlock, ...]

    def block(self, config: ViTConfig, index: int) -> nn.Module:
        """Training block i."""
        width, part = config.width, self.blocks[index]
        mlp = SwiGlu(width, SwiGluSpec(part.hidden)) if part.swiglu else PlainMlp(width, part.hidden, part.act)
        return PlainBlock(config, DropIn(width, config.grid, part.mixer), mlp, part.traits)

    def module(self) -> nn.Module:
        """See `Reading`."""
        return ViT(self.config, self.block).eval()

    def parts(self) -> Iterator[FoldedPart]:
        """See `Reading`."""
        yield fold_stem(self.tensors)
        width, patch = self.config.width, self.config.patch
        # a small grid proves the same, borders included
        height, side = (min(side, 6 * patch) for side in self.config.image_size)
        small = replace(self.config, image_size=(height, side))
        for index, part in enumerate(self.blocks):
            prefix, traits = f"blocks.{index}.", part.traits
            block = in_float64(block_tensors(self.tensors, prefix))
            if part.separate:
                block["attn.conv.weight"], _ = separated(block["attn.conv.weight"])
                yield FoldedPart({}, _separation(f"{prefix}attn.conv", part))
            norm1, norm2 = traits.norm1.affine(block, "norm1", width), traits.norm2.affine(block, "norm2", width)
            scale1, scale2 = scale_affine(block, "ls1", width), scale_affine(block, "ls2", width)
            mixer = fold_mixer(block, part.mixer, width, norm1, scale1, separate=part.separate)
            first, last = ("mlp.w12", "mlp.w3") if part.swiglu else ("mlp.fc1", "mlp.fc2")
            mlp = {first: linear_of(block, first) @ norm2, last: scale2 @ linear_of(block, last)}
            keeps = mixer.keeps_norm and traits.norm1.kind == "layer"
            kept = {f"norm1.{name}": block[f"norm1.{name}"] for name in ("weight", "bias")} if keeps else {}
            told = tuple(row for row in traits.told() if not (keeps and row.startswith("norm1")))
            left = ("norm1's affine: its shift may not pass the padding",) if keeps else ()
            yield folded_block(
                prefix,
                lambda index=index: self.block(small, index),  # type: ignore[misc]
                block,
                lambda index=index: DeployBlock(small, index),  # type: ignore[misc]
                {**mixer.tensors, **named(mlp), **kept},
                (2, small.sequence, width),
                told=(*mixer.told, *told),
                left=(*left, *traits.left()),
                equation={"ensembled": "eqs. 12-13", "full": "eqs. 9-10", "depthwise": "eq. 11"}.get(
                    part.mixer.kind, "eq. 4"
                ),
            )
        yield fold_tail(self.config, self.tensors)


def detect(checkpoint: Checkpoint) -> Detection | None:
    """Kernels beside attention's weights, or the layout's name."""
    found: dict[str, set[str]] = {}
    for name in checkpoint.tensors:
        if match := _KERNEL.match(name):
            found.setdefault(match["what"], set()).add(match["block"])
    meta = checkpoint.record.get("meta")
    called = isinstance(meta, Mapping) and meta.get("format") == FORMAT
    if found:
        listed = ", ".join(f"attn.{what} in {len(blocks)} blocks" for what, blocks in sorted(found.items()))
        return Detection("training", f"{listed}{f'; {FORMAT}' if called else ''}")
    return Detection("training", f"meta.format is {FORMAT}") if called else None


def read(checkpoint: Checkpoint, settings: Mapping[str, str]) -> DwConvReading:
    """See `repaconv.trained.contract.Method`.

    Raises:
        Refused: If the keys are not one whole net of the layout, or a gate has not chosen.
        UsageProblem: If a setting is unknown or malformed.
    """
    _require_layout(checkpoint)
    tensors, names, unused = official_names(checkpoint)
    require_sound(tensors, names)
    record = checkpoint.record.get("meta")
    meta: Mapping[str, Any] = record if isinstance(record, Mapping) else {}
    arch = meta.get("arch") if isinstance(meta.get("arch"), Mapping) else {}
    assert isinstance(arch, Mapping)
    knobs = Knobs(settings)
    way = "antialias" if "register_tokens" in tensors else "offset"
    sizes = read_skeleton(tensors, knobs, arch, "meta.arch", resize=way)
    depth = depth_of(tensors)
    heads = read_heads(sizes["width"], depth, knobs, arch.get("num_heads"), "meta.arch")
    gates = _read_gates(tensors, meta, knobs, depth, heads)
    refactor = knobs.take("full_conv", one_of("auto", "refactor", "keep"), "auto")
    norms, act = read_norms(tensors, knobs), _read_act(tensors, checkpoint.record, knobs)
    blocks = tuple(
        _read_block(tensors, f"blocks.{index}.", sizes["width"], heads, gates[index], refactor, norms, act)
        for index in range(depth)
    )
    _require_grid(sizes, blocks)
    preprocessing = preprocessing_of(checkpoint.record, {}, knobs, sizes["image_size"])
    knobs.done()
    tensors.pop("gate.weight", None)
    scaled = any(block.traits.scale1 or block.traits.scale2 for block in blocks)
    rounded = sum(block.rounded for block in blocks)
    form = DwConvReading(
        backbone="vit",
        config=ViTConfig(**sizes, blocks=tuple(_spec(block, sizes["width"]) for block in blocks)),
        tensors=tensors,
        names=names,
        facts=(*knobs.facts, *_block_facts(blocks), *unused),
        preprocessing=preprocessing,
        applied=("layer scale",) if scaled else (),
        # of the whole net, end to end; the certificate has the changed kernels in rows of their own
        tolerances={"fold": SEPARABLE["refactor"] * math.sqrt(rounded)} if rounded else {},
        blocks=blocks,
    )
    form.require_whole()
    return form


def _require_layout(checkpoint: Checkpoint) -> None:
    spvit = [name for name in checkpoint.tensors if "head_probs" in name or ".bconv." in name]
    if spvit:
        raise Refused(
            f"{spvit[0]} is SPViT's: between its convolution and W^O stand a BatchNorm and a ReLU, which this "
            "method does not have.",
            hint="SPViT is not among the known methods.",
            code="method.mismatch",
        )
    if detect(checkpoint) is None:
        raise Refused(
            f"{checkpoint.path} has no head that is a convolution (attn.dw, attn.conv): nothing is to be folded.",
            hint="A plain vision transformer has to be converted and trained first.",
            code="method.mismatch",
        )


def published(arch: str) -> Published:
    """A block by its name in Table 1 (16 heads, d 1024, 24 x 24 patches, kernel 3), or ``vit-large/12``."""
    if arch in _TABLE_1:
        mixer, deploy = _TABLE_1[arch]
        return Published(lambda: DropIn(1024, (24, 24), mixer), lambda: deploy.build(1024, (24, 24)), (24 * 24, 1024))
    form = _published_form(arch)
    return Published(form.module, lambda: ViT(form.config), (3, *form.config.image_size))


def example(arch: str, seed: int) -> dict[str, Tensor]:
    """Seeded weights far from the identity; every second block is a drop-in depthwise convolution."""
    form, random = _published_form(arch), torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = form.module().state_dict()
    return {name: _example_tensor(name, tuple(meta.shape), random) for name, meta in shapes.items()}


_KERNEL = re.compile(r"^(?P<block>blocks\.(?:\d+\.)?\d+)\.attn\.(?P<what>dw|conv|conv_heads|gamma)(?:\.|$)")


# --- reading ----------------------------------------------------------------------------------------------


def _read_gates(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any], knobs: Knobs, depth: int, heads: int
) -> list[tuple[bool, ...] | None]:
    """Which heads each block's gates turn into convolutions; None for every block without gates.

    Raises:
        Refused: If the gates are soft, tie at the p-th, or stand alone without p and mode, or these without them.
    """
    said = meta.get("gate") if isinstance(meta.get("gate"), Mapping) else {}
    assert isinstance(said, Mapping)
    gate = tensors.get("gate.weight")
    if gate is None:
        if said:
            raise Refused(
                "the metadata speaks of gates, and there is no gate.weight.",
                hint="The file is only part of a net.",
                code="checkpoint.missing-keys",
            )
        return [None] * depth
    if tuple(gate.shape) not in ((depth,), (depth, heads)):
        raise Refused(
            f"gate.weight has shape {list(gate.shape)}; gates are by block, [{depth}], or by head, [{depth}, {heads}].",
            hint="The file mixes two nets, or the number of heads is another (--set num_heads=N).",
            code="checkpoint.shape",
        )
    why = "the metadata does not tell {}, and the gates do not show it"
    modes, how = one_of("hard-topk", "soft"), why.format("how the gates choose")
    mode = knobs.need("gate_mode", modes, "hard-topk", how, said.get("mode"), "meta.gate")
    if mode != "hard-topk":
        raise Refused(
            f"the gates are {mode}: both sides still count, and neither can go.",
            hint="Finish the training with hard gates (hard-topk).",
            code="dwconv.soft-gates",
        )
    p = knobs.need("gate_p", natural, "12", why.format("how many take the convolution"), said.get("p"), "meta.gate")
    if not isinstance(p, int) or isinstance(p, bool) or not 0 <= p <= gate.numel():
        raise Refused(
            f"meta.gate.p is {p!r} where there are {gate.numel()} gates.",
            hint="p is the number of gates that take the convolution.",
            code="dwconv.gates",
        )
    ranked = gate.double().flatten().sort(descending=True)
    if 0 < p < gate.numel() and ranked.values[p - 1] == ranked.values[p]:
        raise Refused(
            f"the {p}-th and the next gate are equal ({float(ranked.values[p]):g}), so the choice is not settled.",
            hint="Train on until they part.",
            code="dwconv.tie",
        )
    chosen = torch.zeros(gate.numel(), dtype=torch.bool)
    chosen[ranked.indices[:p]] = True
    unit = "block" if gate.ndim == 1 else "head"
    knobs.facts.append(Fact(name="gates", value=f"the {p} largest of {gate.numel()}, by {unit}", source="gate.weight"))
    by_block = chosen.view(depth, -1).expand(depth, heads)
    return [tuple(row) for row in by_block.tolist()]


def _read_block(
    tensors: Mapping[str, Tensor],
    prefix: str,
    width: int,
    heads: int,
    gated: tuple[bool, ...] | None,
    refactor: str,
    norms: Norms,
    act: ActivationKind,
) -> ConvBlock:
    block = block_tensors(tensors, prefix)
    mixer = _read_mixer(block, prefix, width, heads, gated)
    swiglu = "mlp.w12.weight" in block
    hidden = (
        weight_of(tensors, f"{prefix}mlp.w3.weight", 2).shape[1]
        if swiglu
        else weight_of(tensors, f"{prefix}mlp.fc1.weight", 2).shape[0]
    )
    traits, separate, error = BlockTraits.read(block, norms), False, 0.0
    if mixer.kind == "full":
        _, error = separated(block["attn.conv.weight"])
        separate = error <= SEPARABLE[refactor]
        if refactor == "refactor" and not separate:
            raise Refused(
                f"{prefix}attn.conv does not separate into a pointwise and a depthwise convolution: its kernel is "
                f"{error:.1e} from a product of the two.",
                hint="Leave --set full_conv=refactor out to keep it as a full convolution.",
                code="dwconv.not-separable",
            )
        if not separate and traits.norm1.kind == "batch":
            raise Refused(
                f"{prefix}norm1 is a BatchNorm before a full convolution, whose shift may not pass its padding.",
                hint="Such a block is not known to fold.",
                code="dwconv.batchnorm",
            )
    return ConvBlock(mixer, traits, hidden, swiglu, separate, act, error)


def _read_act(tensors: Mapping[str, Tensor], record: Mapping[str, Any], knobs: Knobs) -> ActivationKind:
    """The activation of plain FFNs; a gated one is SiLU by its keys, whatever the file says of others."""
    if any(name.endswith("mlp.w12.weight") for name in tensors):
        knobs.facts.append(Fact(name="gate_act", value="SiLU", source="keys: w12 and w3 are DINOv2's SwiGLU"))
    if any(name.endswith("mlp.fc1.weight") for name in tensors):
        return read_activation(record, knobs)
    return "GELU"


def _read_mixer(
    block: Mapping[str, Tensor], prefix: str, width: int, heads: int, gated: tuple[bool, ...] | None
) -> Mixer:
    """What a block's keys and shapes say of its mixer.

    Raises:
        Refused: If they are of no mixer of the layout.
    """

    def wrong(what: str) -> Refused:
        return Refused(
            f"{prefix}attn: {what}.",
            hint=f"The layout {FORMAT} is described in the documentation of the method.",
            code="dwconv.mixer",
        )

    keys = {name.split(".")[1] for name in block if name.startswith("attn.")}
    if "conv" in keys:
        weight = weight_of(block, "attn.conv.weight", 4)
        if tuple(weight.shape[:2]) != (width, width) or keys - {"conv", "proj"}:
            raise wrong(f"a full convolution is [{width}, {width}, k, k] and has only proj beside it")
        return Mixer("full", (True,) * heads, 0, False, _kernel(weight, wrong), 0, "attn.conv.bias" in block)
    if ("qkv" in keys) == ("v" in keys):
        raise wrong("it needs either qkv or v")
    source = "qkv" if "qkv" in keys else "v"
    rows = weight_of(block, f"attn.{source}.weight", 2).shape[0]
    biased = f"attn.{source}.bias" in block
    dw = weight_of(block, "attn.dw.weight", 4) if "dw" in keys else None
    kernel = 0 if dw is None else _kernel(dw, wrong)
    kernels, dw_bias = (0 if dw is None else dw.shape[0]), "attn.dw.bias" in block
    if "gamma" in keys:
        if (
            source != "v"
            or dw is None
            or kernels != width // heads
            or gated
            or tuple(block["attn.gamma"].shape) != (heads,)
        ):
            raise wrong(f"ensembled heads have v, gamma [{heads}] and kernels [{width // heads}, 1, k, k]")
        return Mixer("ensembled", (True,) * heads, 0, biased, kernel, kernels, dw_bias)
    flags = block.get("attn.conv_heads")
    if flags is not None and (tuple(flags.shape) != (heads,) or gated):
        raise wrong(f"conv_heads is [{heads}], one flag a head, and there are no gates beside it")
    if flags is not None:
        if not bool(((flags == 0) | (flags == 1)).all()):
            raise Refused(
                f"{prefix}attn.conv_heads holds {', '.join(f'{flag:g}' for flag in flags.tolist())}: flags are 0 or 1, "
                "and between them both sides still count.",
                hint="Finish the training with hard gates.",
                code="dwconv.soft-gates",
            )
        conv = tuple(bool(flag) for flag in flags.tolist())
    elif gated is not None and source == "qkv":
        conv = gated
    else:
        conv = (source == "v",) * heads
    if any(conv) and dw is None:
        raise wrong("heads are convolutions, but there is no dw")
    if source == "v" and not all(conv):
        raise wrong("heads attend, but there are no q and k")
    if dw is not None and flags is None and gated is None and source == "qkv":
        raise wrong("dw stands beside qkv, and neither gates nor conv_heads say which heads it is for")
    head, convs = width // heads, sum(conv)
    full, compact = 3 * width, 2 * (heads - convs) * head + width
    if source == "qkv" and rows not in ({full} if flags is None else {full, compact}):
        raise wrong(f"qkv has {rows} rows where {full}" + ("" if flags is None else f" or {compact}") + " are known")
    if dw is not None:
        meanings = {
            "channel": {width, convs * head} if convs else {width},
            "head": {heads, convs} if convs else {heads},
        }
        if kernels not in meanings["channel"] | meanings["head"]:
            raise wrong(f"dw has {kernels} kernels, which are neither one a channel nor one a head")
        if head > 1 and kernels in meanings["channel"] and kernels in meanings["head"]:
            raise wrong(f"{kernels} kernels can be one a channel or one a head")
    kind: Kind = "depthwise" if any(conv) else "attention"
    qkv = rows if source == "qkv" else 0
    return Mixer(kind, conv, qkv, biased, kernel, kernels, dw_bias, flags is not None)


def _kernel(weight: Tensor, wrong: Any) -> int:
    side = int(weight.shape[2])
    if weight.shape[3] != side or side % 2 == 0:
        raise wrong(f"kernels are square with an odd side, not {side} x {weight.shape[3]}")
    return side


def _require_grid(sizes: Mapping[str, Any], blocks: tuple[ConvBlock, ...]) -> None:
    """Convolutions act on the grid of patches: tokens beside it have no place in such a block.

    Raises:
        Refused: If there are any, or the net says of itself what is not known.
    """
    if (sizes["tokens"] or sizes["registers"]) and any(any(block.mixer.conv) for block in blocks):
        raise Refused(
            "there are tokens beside the patches (cls_token, register_tokens), which have no place in a convolution.",
            hint=f"Nets of {FORMAT} are trained without them.",
            code="dwconv.tokens",
        )
    if sizes["classes"] and sizes["pool"] == "none":
        raise Refused(
            "a head without a pooling before it is not known.",
            hint="Such a net is not known to fold.",
            code="dwconv.arch",
        )


def _separation(module: str, part: ConvBlock) -> FoldStep:
    """The certificate's row for a full convolution that became two."""
    told = ("full convolution -> pointwise and depthwise: every channel's kernel is a product",)
    if not part.rounded:
        return FoldStep(module=module, folded=told, equation="eqs. 9-10", max_rel_error=part.error)
    why = "full_conv=refactor: a product stored in float32, to its rounding"
    return FoldStep(
        module=module,
        folded=told,
        equation="eqs. 9-10",
        max_rel_error=part.error,
        allowed=SEPARABLE["refactor"],
        reason=why,
    )


def _block_facts(blocks: tuple[ConvBlock, ...]) -> list[Fact]:
    kinds = [f"{sum(b.mixer.conv)} of {b.mixer.heads} heads convolve" if b.mixer.kind == "depthwise" else b.mixer.kind
             for b in blocks]  # fmt: skip
    facts = [
        Fact(name="depth", value=len(blocks), source="keys"),
        Fact(name="mixers", value=kinds, source="keys, gates"),
    ]
    for index, block in enumerate(blocks):
        if block.mixer.kind == "full":
            what = "pointwise and depthwise" if block.separate else "kept as a full convolution"
            source = f"its kernel is {block.error:.1e} from a product of the two"
            if not block.separate and block.error <= SEPARABLE["refactor"]:
                source += ", as one stored in float32 is: --set full_conv=refactor takes it for one"
            facts.append(Fact(name=f"blocks.{index}.attn.conv", value=what, source=source))
    return facts


def _spec(block: ConvBlock, width: int) -> BlockSpec:
    """The deploy block."""
    mixer, head = block.mixer, width // block.mixer.heads
    convs, norm1 = sum(mixer.conv), block.traits.norm1.spec
    spec: MixerSpec
    if mixer.kind == "full" and not block.separate:
        spec = FullConvSpec(mixer.kernel)
        affine = block.traits.norm1.kind == "layer"
        norm1 = replace(norm1, affine=affine) if isinstance(norm1, LayerNormSpec) else norm1
    elif mixer.kind == "ensembled":
        spec = EnsembledSpec(head, mixer.kernel)
    elif convs == mixer.heads:
        spec = DepthwiseSpec(mixer.kernel)
    elif convs:
        spec = ScatteredSpec(mixer.heads - convs, convs, head, mixer.kernel)
    else:
        spec = AttentionSpec(mixer.heads, head, head)
    ffn = SwiGluSpec(block.hidden) if block.swiglu else MlpSpec(block.hidden, block.act)
    return BlockSpec(spec, ffn, norm1, block.traits.norm2.spec)


# --- the paper's models and an example ----------------------------------------------------------------------

_HEADS_16 = (True,) * 16
_TABLE_1: dict[str, tuple[Mixer, MixerSpec]] = {
    "mhsa": (Mixer("attention", (False,) * 16, 3072, True), AttentionSpec(16, 64, 64)),
    "conv": (Mixer("full", _HEADS_16, 0, False, 3), FullConvSpec(3)),
    "dw": (Mixer("depthwise", _HEADS_16, 0, True, 3, 1024), DepthwiseSpec(3)),
    "ens+dw": (Mixer("ensembled", _HEADS_16, 0, True, 3, 64), EnsembledSpec(64, 3)),
}
_SIZES = {"vit-large": (1024, 16, 24, 14, 336), "vit-base": (768, 12, 12, 14, 336), "tiny": (24, 3, 2, 4, 16)}


def _published_form(arch: str) -> DwConvReading:
    name, _, replaced = arch.partition("/")
    width, heads, depth, patch, side = _SIZES[name]
    count = int(replaced or depth // 2)
    norm = NormTraits("layer", 1e-6)
    traits = BlockTraits(norm, norm, scale1=True, scale2=True)
    conv = Mixer("depthwise", (True,) * heads, 0, True, 3, width, True)
    attention = Mixer("attention", (False,) * heads, 3 * width, True)
    blocks = tuple(
        ConvBlock(conv if index % 2 == 0 and index // 2 < count else attention, traits, 4 * width, False, False)
        for index in range(depth)
    )
    return DwConvReading(
        backbone="vit",
        config=ViTConfig(
            image_size=(side, side),
            patch=patch,
            width=width,
            classes=5 if name == "tiny" else 1000,
            blocks=tuple(_spec(block, width) for block in blocks),
            tokens=(),
            prefix_positions=False,
            pool="avg",
        ),
        blocks=blocks,
    )


def _example_tensor(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=random)
    if name.endswith(("bias", "pos_embed")):
        return 0.3 * noise
    if name.endswith("gamma"):
        return 0.4 * noise
    return noise / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 1 + 0.3 * noise
