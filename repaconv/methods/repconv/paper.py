"""RepVGG (CVPR 2021, arXiv 2101.03697) and MobileOne (CVPR 2023, arXiv 2206.04040): branches that are one convolution.

A training block sums branches over one input M, each with a BatchNorm of its own:

    RepVGG       bn(M * W3) + bn(M * W1) + bn(M)                 eq. 1; the last where width and size stay
    MobileOne    sum_k bn(M * W_k) + bn(M * W1) + bn(M)          k by k or pointwise; W1 beside k > 1 alone

and puts squeeze-and-excitation, where it has that, and ReLU behind the sum. The deploy block has one convolution: each
BatchNorm goes into the convolution before it,

    W' = gamma / sigma W,   b' = beta - mu gamma / sigma         eqs. 3-4

bn(M) being that of an identity, a 1x1 convolution with as many groups as channels; then all are brought to one kernel,
the smaller in the centre of the larger, and added. A 1x1 convolution has no padding and a k x k one k // 2, so both
reach the same border.

What no tensor tells: strides (the official code halves the size where a stage begins; a block of one width without an
identity branch proves it, one with it the opposite), eps, ReLU. Groups are the input's width over the weight's.
RepVGGplus is another net: auxiliary heads, and squeeze-and-excitation behind the ReLU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor, nn

from repaconv.affine import Affine
from repaconv.artefacts import Fact, FoldStep
from repaconv.backbones.repconv import NAMES, Activated, Layout, RepBlock, RepConv, RepConvConfig
from repaconv.checkpoint import Checkpoint, require_sound
from repaconv.convolution import Conv
from repaconv.errors import Refused
from repaconv.methods.repconv.published import ARCHS, Arch
from repaconv.skeletons.plain import block_tensors, in_float64, weight_of
from repaconv.trained.certificate import loaded, max_rel_error
from repaconv.trained.contract import Detection, FoldedPart, Published, Reading
from repaconv.trained.knobs import Knobs, positive, small
from repaconv.trained.preprocessing import preprocessing_of


class ConvNorm(nn.Module):
    """A convolution without bias and its BatchNorm."""

    def __init__(self, block: RepBlock, kernel: int, eps: float) -> None:
        super().__init__()
        self.conv = block.conv(kernel, bias=False)
        self.bn = nn.BatchNorm2d(block.width, eps)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H', W']."""
        out: Tensor = self.bn(self.conv(x))
        return out


class TrainingBlock(Activated):
    """The block as trained: its branches, summed."""

    def __init__(self, layout: Layout, block: RepBlock, convs: int, eps: float) -> None:
        super().__init__(layout, block)
        names, parts = NAMES[layout], [ConvNorm(block, block.kernel, eps) for _ in range(convs)]
        self.add_module(names.conv, parts[0] if layout == "repvgg" else nn.ModuleList(parts))
        self.branches = [names.conv] if layout == "repvgg" else [f"{names.conv}.{k}" for k in range(convs)]
        if block.kernel > 1:
            self.add_module(names.scale, ConvNorm(block, 1, eps))
            self.branches.append(names.scale)
        if has_identity(block):
            self.add_module(names.identity, nn.BatchNorm2d(block.width, eps))
            self.branches.append(names.identity)

    def convolved(self, x: Tensor) -> Tensor:
        """eq. 1: [B, C, H, W] -> [B, C', H', W']."""
        out: Tensor = reduce(add, (self.get_submodule(name)(x) for name in self.branches))
        return out


def has_identity(block: RepBlock) -> bool:
    """Whether a training block has the branch bn(M): where it keeps width and size."""
    return block.in_width == block.width and block.stride == 1


def fold_branch(tensors: Mapping[str, Tensor], norm: str, block: RepBlock, eps: float) -> Conv:
    """eqs. 3-4 for the branch of that BatchNorm, by the names within the block."""
    gamma, beta, mu, variance = (tensors[f"{norm}.{of}"] for of in ("weight", "bias", "running_mean", "running_var"))
    bn = Affine.batchnorm(gamma, beta, mu, variance, eps)
    weight = tensors.get(f"{norm.removesuffix('.bn')}.conv.weight")
    if weight is None:
        return Conv.eye(block.width).then(bn)
    padding = weight.shape[-1] // 2
    zeros = torch.zeros(block.width)
    return Conv(weight, zeros, block.groups, (block.stride,) * 2, (padding,) * 2).then(bn)


def fold_block(tensors: Mapping[str, Tensor], block: RepBlock, eps: float) -> Conv:
    """All branches of a block, by the names within it, as one convolution."""
    norms = [name.removesuffix(".running_var") for name in tensors if name.endswith(".running_var")]
    return reduce(add, (fold_branch(tensors, norm, block, eps) for norm in sorted(norms)))


# --- the method -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RepConvReading(Reading):
    """A net as trained; ``convs`` are the branches of the full kernel in the first block and in all others."""

    config: RepConvConfig
    convs: tuple[int, int]
    eps: float

    def block(self, name: str, part: RepBlock) -> TrainingBlock:
        """The training block of that name."""
        return TrainingBlock(self.config.layout, part, self.convs[name != "stage0"], self.eps)

    def module(self) -> nn.Module:
        """See `Reading`."""
        return RepConv(self.config, None if self.deployed else self.block).eval()

    def parts(self) -> Iterator[FoldedPart]:
        """See `Reading`."""
        for name, block in self.config.blocks.items():
            yield _folded_block(self, name, block)
        yield FoldedPart({name: w.double() for name, w in self.tensors.items() if name.startswith("linear.")})


def detect(checkpoint: Checkpoint) -> Detection | None:
    """Blocks of either official code or of timm's ByobNet, in their places."""
    keys = _block_keys(checkpoint)
    if not keys:
        return None
    trained = [key for key in keys if not key.deployed] or keys
    parts = ", ".join(sorted({key.part for key in trained}))
    reason = f"{parts} in {len({key.block for key in trained})} blocks"
    return Detection("deploy" if trained[0].deployed else "training", reason)


def read(checkpoint: Checkpoint, settings: Mapping[str, str]) -> RepConvReading:
    """See `repaconv.trained.contract.Method`.

    Raises:
        Refused: If the keys are not one whole RepVGG or MobileOne, or its weights are not sound.
        UsageProblem: If a setting is unknown or malformed.
    """
    key = _one_net(checkpoint)
    tensors, names = _official_names(checkpoint, key)
    require_sound(tensors, names)
    knobs = Knobs(settings)
    config, convs, facts = _read_config(tensors, key, knobs)
    eps = knobs.take("bn_eps", small, 1e-5)
    preprocessing = preprocessing_of(checkpoint.record, {}, knobs)
    knobs.done()
    form = RepConvReading(
        backbone="repconv",
        config=config,
        tensors=tensors,
        names=names,
        facts=(*facts, *knobs.facts),
        preprocessing=preprocessing,
        deployed=key.deployed,
        convs=convs,
        eps=eps,
    )
    form.require_whole()
    return form


def published(arch: str) -> Published:
    """See `repaconv.trained.contract.Method`."""
    known = ARCHS[arch]
    form = _form_of(known)
    side = 320 if arch == "repvgg-d2se" else 224  # what its accuracy is stated for
    return Published(form.module, lambda: RepConv(known.config), (3, side, side))


def example(arch: str | Arch, seed: int) -> dict[str, Tensor]:
    """Official names; no norm is near the identity, and no branch much smaller than the others."""
    known, random = ARCHS[arch] if isinstance(arch, str) else arch, torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = _form_of(known).module().state_dict()
    return {name: _example_tensor(name, tuple(meta.shape), known.convs, random) for name, meta in shapes.items()}


# --- names ------------------------------------------------------------------------------------------------

_BLOCK_KEY = re.compile(
    r"^(?P<prefix>(?:.+?\.)??)(?P<block>stage\d+(?:\.\d+)?|stem|stages\.\d+\.\d+)\."
    r"(?P<part>rbr_dense|rbr_conv|rbr_reparam|conv_kxk|reparam_conv)\.(?P<index>\d+\.)?(?:conv\.)?weight$"
)
_PLUS = re.compile(r"(?:^|\.)stage\d+(?:_first|_second)?(?:\.blocks\.|_aux\.)|\.post_se\.")


class BlockKey(NamedTuple):
    """What the key of a block's largest convolution says."""

    prefix: str
    layout: Layout
    timm: bool
    deployed: bool
    block: str = ""
    part: str = ""


def _block_keys(checkpoint: Checkpoint) -> list[BlockKey]:
    keys = []
    for name in checkpoint.tensors:
        if not (match := _BLOCK_KEY.match(name)):
            continue
        part, timm = match["part"], match["block"].startswith(("stem", "stages"))
        repvgg = part in ("rbr_dense", "rbr_reparam") or (part == "conv_kxk" and not match["index"])
        deployed = part in ("rbr_reparam", "reparam_conv")
        if timm == (part == "conv_kxk") or part == "reparam_conv":
            layout: Layout = "repvgg" if repvgg else "mobileone"
            keys.append(BlockKey(match["prefix"], layout, timm, deployed, match["block"], part))
    return keys


def _one_net(checkpoint: Checkpoint) -> BlockKey:
    """What all block keys say alike, without a block's name.

    Raises:
        Refused: If they differ, if there are none, or if the net is a RepVGGplus.
    """
    found = {key._replace(block="", part="") for key in _block_keys(checkpoint)}
    if found and (plus := next((name for name in checkpoint.tensors if _PLUS.search(name)), None)):
        raise Refused(
            f"{plus} is RepVGGplus's: it has auxiliary heads in training, and squeeze-and-excitation behind the ReLU.",
            hint="RepVGGplus is not among the known networks; RepVGG is, D2se included.",
            code="repconv.plus",
        )
    if len(found) == 1:
        return found.pop()
    if not found:
        raise Refused(
            f"{checkpoint.path} has no block of RepVGG or MobileOne (rbr_dense, rbr_conv, conv_kxk).",
            hint="Without --method the method is detected.",
            code="method.mismatch",
        )
    mixed = len({key.deployed for key in found}) == 2
    raise Refused(
        "some blocks are in training form and others in deploy form."
        if mixed
        else "there are blocks of several nets: "
        + ", ".join(sorted({f"{key.prefix}({'timm, ' if key.timm else ''}{key.layout})" for key in found})),
        hint="Take the checkpoint as trained." if mixed else "Save one of them.",
        code="repconv.mixed-forms" if mixed else "checkpoint.ambiguous",
    )


def _official_names(checkpoint: Checkpoint, key: BlockKey) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by the names of the layout's official code, and those names to the names in the file."""
    theirs = NAMES[key.layout]
    spellings = (
        (r"^stem\.", "stage0."),
        (r"^stages\.(\d+)\.", lambda match: f"stage{int(match[1]) + 1}."),
        (r"^head\.fc\.", "linear."),
        (r"\.conv_kxk\.", f".{theirs.conv}."),
        (r"\.conv_(?:1x1|scale)\.", f".{theirs.scale}."),
        (r"\.identity\.", f".{theirs.identity}."),
        (r"\.attn\.fc1\.", f".se.{theirs.squeeze}."),
        (r"\.attn\.fc2\.", f".se.{theirs.expand}."),
    )
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for full, tensor in _without_counters(checkpoint.tensors).items():
        name = full.removeprefix(key.prefix)
        for pattern, replacement in spellings if key.timm else ():
            name = re.sub(pattern, replacement, name)
        if name in tensors:
            raise Refused(
                f"{names[name]} and {checkpoint.names[full]} are both {name}.",
                hint="The file mixes two nets; save one of them.",
                code="checkpoint.ambiguous",
            )
        tensors[name], names[name] = tensor, checkpoint.names[full]
    return tensors, names


def _without_counters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the BatchNorms' counters, which evaluation does not read."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")}


# --- reading ----------------------------------------------------------------------------------------------


def _read_config(
    tensors: Mapping[str, Tensor], key: BlockKey, knobs: Knobs
) -> tuple[RepConvConfig, tuple[int, int], tuple[Fact, ...]]:
    """What shapes and branches say; the exact comparison afterwards finds what does not fit."""
    depths = _depths(tensors)
    named = ["stage0"], *([f"stage{s}.{i}" for i in range(depth)] for s, depth in enumerate(depths, 1))
    blocks, before = [], 0
    for stage in named:
        read = []
        for name in stage:
            read.append(_read_block(tensors, name, key, before))
            before = read[-1].width
        blocks.append(read)
    strides = _strides(tensors, key, [(stage[0], read[0]) for stage, read in zip(named, blocks, strict=True)], knobs)
    stages = tuple(
        (replace(first, stride=stride), *others) for stride, (first, *others) in zip(strides, blocks, strict=True)
    )
    counts = {name: _convs(tensors, name, key.layout) for stage in named for name in stage}
    convs = counts.pop("stage0"), max(counts.values(), default=1)
    classes = weight_of(tensors, "linear.weight", 2).shape[0] if any(n.startswith("linear.") for n in tensors) else 0
    config = RepConvConfig(key.layout, stages, classes)
    return config, convs, _facts(config, convs, key)


def _depths(tensors: Mapping[str, Tensor]) -> list[int]:
    """Blocks of each stage behind the first.

    Raises:
        Refused: If a stage is missing; a missing block is found by its weights.
    """
    found: dict[int, int] = {}
    for name in tensors:
        if match := re.match(r"stage(\d+)\.(\d+)\.", name):
            found[int(match[1])] = max(int(match[2]) + 1, found.get(int(match[1]), 0))
    if sorted(found) != list(range(1, len(found) + 1)):
        raise Refused(
            f"the stages are {', '.join(f'stage{s}' for s in sorted(found))}, which leaves one out.",
            hint="The file is only part of a net.",
            code="checkpoint.missing-keys",
        )
    return [found[stage] for stage in sorted(found)]


def _read_block(tensors: Mapping[str, Tensor], name: str, key: BlockKey, before: int) -> RepBlock:
    """One block whose input has so many channels, 0 for an image; of stride 1 for now."""
    names = NAMES[key.layout]
    conv = f"{names.conv}{'' if key.layout == 'repvgg' else '.0'}.conv"
    place = f"{name}.{names.folded if key.deployed else conv}.weight"
    width, shared, height, side = weight_of(tensors, place, 4).shape
    before = before or shared
    groups = before // shared
    if height != side or side % 2 == 0 or before % shared or width % groups:
        raise Refused(
            f"{place} has shape {[width, shared, height, side]}, which is no convolution of {before} channels with an "
            "odd, square kernel.",
            hint="The file is of another net, or it was changed after training.",
            code="checkpoint.shape",
        )
    squeeze = f"{name}.se.{names.squeeze}.weight"
    squeezed = weight_of(tensors, squeeze, 4).shape[0] if squeeze in tensors else 0
    return RepBlock(before, width, side, 1, groups, squeezed)


def _convs(tensors: Mapping[str, Tensor], name: str, layout: Layout) -> int:
    """Branches of the full kernel; a gap in their numbers is found by the missing weights."""
    pattern = re.compile(rf"{re.escape(name)}\.{NAMES[layout].conv}\.(\d+)\.")
    return max((int(match[1]) + 1 for key in tensors if (match := pattern.match(key))), default=1)


def _strides(
    tensors: Mapping[str, Tensor], key: BlockKey, firsts: list[tuple[str, RepBlock]], knobs: Knobs
) -> list[int]:
    """Of the first block of every stage; all others have 1."""

    def parse(text: str) -> str:
        if len(words := text.split(",")) != len(firsts):
            raise ValueError(f"not {len(firsts)} numbers, one a stage")
        return ",".join(str(positive(word.strip())) for word in words)

    seen, proved = [], 0
    for name, block in firsts:
        same = block.in_width == block.width and not key.deployed
        kept = f"{name}.{NAMES[key.layout].identity}.weight" in tensors
        seen.append("1" if same and kept else "2")
        proved += same
    source = (
        f"official code: stages begin with 2; in {proved} of {len(firsts)} an identity branch there or not proves it"
    )
    official = ",".join("2" for _ in firsts)
    text = knobs.take("strides", parse, official, ",".join(seen) if proved else None, source if proved else "")
    return [int(word) for word in text.split(",")]


def _facts(config: RepConvConfig, convs: tuple[int, int], key: BlockKey) -> tuple[Fact, ...]:
    blocks = config.blocks.values()
    known = {
        "layout": (f"{config.layout}{', in names of timm' if key.timm else ''}", "keys"),
        "depths": ([len(stage) for stage in config.stages], "keys"),
        "widths": ([stage[-1].width for stage in config.stages], "shapes"),
        "kernels": (sorted({block.kernel for block in blocks}), "shapes"),
        "groups": (sorted({block.groups for block in blocks}), "shapes: the input's width over the weight's"),
        "squeeze_excite": (f"in {sum(block.squeezed > 0 for block in blocks)} of {len(blocks)} blocks", "keys"),
        "activation": ("ReLU", "the official code; no tensor tells"),
        "classes": (config.classes, "shapes"),
    }
    if not key.deployed:
        known["convolutions"] = (f"{convs[0]} in the first block, {convs[1]} in the others", "keys")
    archs = [arch for arch, published in ARCHS.items() if published.config.stages == config.stages]
    found = [Fact(name="arch", value=arch, source="shapes, as in the paper") for arch in archs]
    return (*found, *(Fact(name=name, value=value, source=source) for name, (value, source) in known.items()))


# --- folding, with its certificate ------------------------------------------------------------------------


def _folded_block(form: RepConvReading, name: str, block: RepBlock) -> FoldedPart:
    tensors, told = in_float64(block_tensors(form.tensors, f"{name}.")), NAMES[form.config.layout].folded
    left = ("squeeze-and-excitation",) * (block.squeezed > 0) + ("ReLU",)
    if form.deployed:
        kept = {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        return FoldedPart(kept, FoldStep(module=name, folded=(), left=(f"{told}, as it is", *left), max_rel_error=0.0))
    trained = form.block(name, block)
    conv = fold_block(tensors, block, form.eps)
    folded = {f"{told}.weight": conv.weight, f"{told}.bias": conv.bias}
    kept = {key: tensor for key, tensor in tensors.items() if key.startswith("se.")}
    return FoldedPart(
        {f"{name}.{key}": tensor for key, tensor in (folded | kept).items()},
        FoldStep(
            module=name,
            folded=(f"{', '.join(trained.branches)} and their BatchNorms -> {told}",),
            left=left,
            equation="eqs. 3-4",
            max_rel_error=_difference(trained, tensors, conv),
        ),
    )


@torch.no_grad()
def _difference(trained: TrainingBlock, tensors: Mapping[str, Tensor], conv: Conv) -> float:
    """Of the sums before the ReLU, which would hide what is negative."""
    shape = (2, conv.in_width, 7, 5)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loaded(trained, tensors)
    return max_rel_error(conv(x), trained.convolved(x))


# --- an example -------------------------------------------------------------------------------------------


def _form_of(arch: Arch) -> RepConvReading:
    return RepConvReading(
        backbone="repconv",
        config=arch.config,
        convs=(1, arch.convs),
        eps=1e-5,
    )


def _example_tensor(name: str, shape: tuple[int, ...], convs: int, random: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=random)
    if name.endswith("num_batches_tracked"):
        return torch.zeros((), dtype=torch.int64)
    if name.endswith("running_var"):
        return 0.3 + 0.5 * noise.abs()
    if name.endswith(("bias", "running_mean")):
        return 0.1 * noise
    if len(shape) > 1:
        return noise * math.sqrt(2 / math.prod(shape[1:]))
    return (1 + 0.3 * noise) / math.sqrt(1.3 * (convs + 1))  # the sum of the branches keeps its size, about
