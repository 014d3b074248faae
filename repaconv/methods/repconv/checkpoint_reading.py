"""Read and fold RepVGG and MobileOne checkpoints, with the names of the official codes, of timm or of mmpretrain."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from repaconv.backbones.repvgg_mobileone import NAMES, Layout, RepBlock, RepConv, RepConvConfig
from repaconv.backbones.tensor_names import blocks_by_stage, count_numbered, in_float64, renamed_tensors, weight_of
from repaconv.checkpoints import Checkpoint, find_typed, require_sound
from repaconv.checkpoints.checkpoint_reader import under_prefix
from repaconv.core.errors import Refused
from repaconv.method_api.contract import Detection, FoldedPart, Reading
from repaconv.method_api.fold_error import loaded, max_rel_error
from repaconv.method_api.preprocessing import preprocessing_of
from repaconv.method_api.settings import SettingsReader, mapping_at, positive, run_config, small
from repaconv.methods.repconv.paper_equations import TrainingBlock, fold_block
from repaconv.methods.repconv.published_models import ARCHS
from repaconv.results import Fact, FoldStep

# --- Recognize the key names of the official codes, of timm's ByobNet and of mmpretrain, and convert them.

_BLOCK_KEY = re.compile(
    r"^(?P<prefix>(?:.+?\.)??)(?P<block>stage_?\d+(?:(?:_first|_second)?\.blocks)?(?:\.\d+)?|stem|stages\.\d+\.\d+)\."
    r"(?P<part>rbr_dense|rbr_conv|rbr_reparam|conv_kxk|reparam_conv|branch_3x3|branch_conv_list|branch_reparam)\."
    r"(?P<index>\d+\.)?(?:conv\.)?weight$"
)
_AUXILIARY = re.compile(r"^stage\d+(?:_first|_second)?_aux\.")


class BlockKey(NamedTuple):
    """What the key of a block's largest convolution shows about the network.

    Attributes:
        prefix: What comes before the network's own names.
        layout: The official code whose names are used.
        library: The library whose names are used, ``timm`` or ``mmpretrain``; empty for the official code's names.
        deployed: Whether the block is in deploy form.
        block: Name of the block.
        part: Name of the convolution within the block.
    """

    prefix: str
    layout: Layout
    library: Literal["", "timm", "mmpretrain"]
    deployed: bool
    block: str = ""
    part: str = ""


def block_keys(checkpoint: Checkpoint) -> list[BlockKey]:
    """Parse the keys of all blocks' largest convolutions, in the order of the file."""
    keys = []
    for name in checkpoint.tensors:
        if not (match := _BLOCK_KEY.match(name)):
            continue
        part, timm = match["part"], match["block"].startswith(("stem", "stages"))
        if part.startswith("branch_"):
            vgg = match["block"].startswith(("stem", "stage_")) and part != "branch_conv_list"
            if vgg or not match["block"].startswith(("stem", "stage_", "stages")):
                deployed = part == "branch_reparam"
                own: Layout = "repvgg" if vgg else "mobileone"
                keys.append(BlockKey(match["prefix"], own, "mmpretrain", deployed, match["block"], part))
            continue
        repvgg = part in ("rbr_dense", "rbr_reparam") or (part == "conv_kxk" and not match["index"])
        deployed = part in ("rbr_reparam", "reparam_conv")
        if timm == (part == "conv_kxk") or part == "reparam_conv":
            layout: Layout = "repvgg" if repvgg else "mobileone"
            keys.append(BlockKey(match["prefix"], layout, "timm" if timm else "", deployed, match["block"], part))
    return keys


def common_key(checkpoint: Checkpoint) -> BlockKey:
    """The prefix, layout and form that all block keys have in common.

    Raises:
        Refused: If they differ or if there are none.
    """
    found = {key._replace(block="", part="") for key in block_keys(checkpoint)}
    if len(found) == 1:
        return found.pop()
    if not found:
        raise Refused(
            f"{checkpoint.path} has no block of RepVGG or MobileOne (rbr_dense, rbr_conv, conv_kxk, branch_3x3).",
            hint="Without --method the method is recognized automatically.",
            code="method.mismatch",
        )
    mixed = len({key.deployed for key in found}) == 2
    raise Refused(
        "some blocks are in training form and others in deploy form."
        if mixed
        else "there are blocks of several nets: "
        + ", ".join(sorted({f"{key.prefix}({key.library}{', ' if key.library else ''}{key.layout})" for key in found})),
        hint="Take the checkpoint as trained."
        if mixed
        else _selection(checkpoint, sorted(key.prefix for key in found)),
        code="repconv.mixed-forms" if mixed else "checkpoint.ambiguous",
    )


def _selection(checkpoint: Checkpoint, prefixes: list[str]) -> str:
    """How to read one of several networks, by its prefix in the file; those without one have to be saved alone."""
    if "" in prefixes or len(set(prefixes)) < 2:
        return "Save one of them."
    name = next(name for name in checkpoint.tensors if name.startswith(prefixes[0]))
    saved = checkpoint.names[name].removesuffix(name.removeprefix(prefixes[0])).removesuffix(".")
    return f"Select one with --weights, e.g. --weights {saved}."


def official_names(checkpoint: Checkpoint, key: BlockKey) -> tuple[dict[str, Tensor], dict[str, str], tuple[Fact, ...]]:
    """Tensors by the names of the layout's official code, a map from those to the names in the file, and unused ones.

    The auxiliary heads of a RepVGGplus are unused, as in its own deploy form; its stage 3 is two stages.
    """
    theirs = NAMES[key.layout]
    divided = any(name.startswith(f"{key.prefix}stage3_second.") for name in checkpoint.tensors)
    plus = (
        (r"^stage4\.blocks\.", "stage5." if divided else "stage4."),
        (r"^stage3_second\.blocks\.", "stage4."),
        (r"^stage(\d+)(?:_first)?\.blocks\.", r"stage\1."),
    )
    mmpretrain = (
        (r"^stem\.", "stage0."),
        (r"^stage_", "stage"),
        (r"^head\.fc\.", "linear."),
        (r"\.branch_(?:3x3|conv_list)\.", f".{theirs.conv}."),
        (r"\.branch_(?:1x1|scale)\.", f".{theirs.scale}."),
        (r"\.branch_norm\.", f".{theirs.identity}."),
        (r"\.branch_reparam\.", f".{theirs.folded}."),
        (r"\.norm\.", ".bn."),
        (r"\.se(?:_layer)?\.conv1\.conv\.", f".se.{theirs.squeeze}."),
        (r"\.se(?:_layer)?\.conv2\.conv\.", f".se.{theirs.expand}."),
    )
    unused: list[str] = []
    timm = (
        (r"^stem\.", "stage0."),
        (r"^stages\.(\d+)\.", lambda match: f"stage{int(match[1]) + 1}."),
        (r"^head\.fc\.", "linear."),
        (r"\.conv_kxk\.", f".{theirs.conv}."),
        (r"\.conv_(?:1x1|scale)\.", f".{theirs.scale}."),
        (r"\.identity\.", f".{theirs.identity}."),
        (r"\.attn\.fc1\.", f".se.{theirs.squeeze}."),
        (r"\.attn\.fc2\.", f".se.{theirs.expand}."),
    )

    def name_of(full: str) -> str | None:
        name = full.removeprefix(key.prefix)
        if _AUXILIARY.match(name):
            unused.append(name)
            return None
        for pattern, replacement in {"timm": timm, "mmpretrain": mmpretrain, "": plus}[key.library]:
            name = re.sub(pattern, replacement, name)
        return None if name.endswith("num_batches_tracked") else name  # not used in eval mode

    tensors, names = renamed_tensors(checkpoint, name_of)
    heads = sorted({name.partition(".")[0] for name in unused})
    facts = [Fact(name="unused", value=heads, source="keys: heads that training alone reads")] if heads else []
    return tensors, names, tuple(facts)


# --- Read and fold the checkpoints.


def detect(checkpoint: Checkpoint) -> Detection | None:
    """Recognize the blocks of either official code, of timm's ByobNet or of mmpretrain."""
    keys = block_keys(checkpoint)
    if not keys:
        return None
    trained = [key for key in keys if not key.deployed] or keys
    parts = ", ".join(sorted({key.part for key in trained}))
    reason = f"{parts} in {len({key.block for key in trained})} blocks"
    return Detection("deploy" if trained[0].deployed else "training", reason)


def read(checkpoint: Checkpoint, settings: Mapping[str, str]) -> RepConvReading:
    """Read a RepVGG or MobileOne, as trained or deployed.

    Raises:
        Refused: If the keys are not those of one complete network, or its weights are invalid (`require_sound`).
        UsageProblem: If a setting is unknown or malformed.
    """
    key = common_key(checkpoint)
    tensors, names, unused = official_names(checkpoint, key)
    require_sound(tensors, names)
    reader = SettingsReader(settings)
    run = run_config(checkpoint.record)
    model = find_typed(run.get("model"), "RepVGG") or find_typed(run.get("model"), "MobileOne") or {}
    _require_usual(model)
    divided = any("stage3_second." in name for name in names.values())
    config, convs, facts = _read_config(tensors, key, reader, divided=divided)
    own_eps = mapping_at(model, "norm_cfg").get("eps")
    eps = reader.take("bn_eps", small, 1e-5, own_eps if isinstance(own_eps, float) else None, "meta.cfg")
    preprocessing = preprocessing_of(checkpoint.record, run, reader)
    reader.done()
    reading = RepConvReading(
        backbone="repconv",
        config=config,
        tensors=tensors,
        names=names,
        facts=(*facts, *reader.facts, *unused),
        preprocessing=preprocessing,
        deployed=key.deployed,
        convs=convs,
        eps=eps,
        joint_norm="stage0.bn.weight" in tensors,
    )
    reading.require_whole()
    return reading


def _require_usual(model: Mapping[str, Any]) -> None:
    """Refuse networks of mmpretrain whose configuration differs from the papers' in what no tensor shows.

    Raises:
        Refused: If it sets another activation, dilations or strides.
    """
    usual: dict[str, Any] = {"act_cfg": {"type": "ReLU"}, "dilations": (1, 1, 1, 1), "strides": (2, 2, 2, 2)}
    for name, value in usual.items():
        given = model.get(name, value)
        given = {key: one for key, one in given.items() if key != "inplace"} if isinstance(given, dict) else given
        if (tuple(given) if isinstance(given, list) else given) != value:
            raise Refused(
                f"the configuration in the checkpoint sets {name}={model[name]}, which no network of the papers has.",
                hint="Export it to ONNX, and fold the graph: repaconv fold model.onnx.",
                code="repconv.config",
            )


@dataclass(frozen=True, kw_only=True)
class RepConvReading(Reading):
    """A RepVGG or MobileOne that was read from a checkpoint.

    ``convs`` are the numbers of full-kernel branches in the first block and in all others. With ``joint_norm`` it is a
    QARepVGG: a BatchNorm follows the sum of the branches, of which only the full-kernel one has its own.
    """

    reads_tensors_alone = True

    config: RepConvConfig
    convs: tuple[int, int]
    eps: float
    joint_norm: bool = False

    def block(self, name: str, part: RepBlock) -> TrainingBlock:
        """Build the training block of that name."""
        convs = self.convs[name != "stage0"]
        return TrainingBlock(self.config.layout, part, convs, self.eps, joint_norm=self.joint_norm)

    def module(self) -> nn.Module:
        """The network with its branches; the deploy network if the file is in deploy form."""
        return RepConv(self.config, None if self.deployed else self.block).eval()

    def parts(self) -> Iterator[FoldedPart]:
        """Yield every block as one convolution, and the head unchanged."""
        for name, block in self.config.blocks.items():
            yield _folded_block(self, name, block)
        yield FoldedPart({name: w.double() for name, w in self.tensors.items() if name.startswith("linear.")})


def _folded_block(reading: RepConvReading, name: str, block: RepBlock) -> FoldedPart:
    tensors, folded_name = in_float64(under_prefix(reading.tensors, f"{name}.")), NAMES[reading.config.layout].folded
    not_folded_parts = ("squeeze-and-excitation",) * (block.squeezed > 0) + ("ReLU",)
    if reading.deployed:
        kept = {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        return FoldedPart(
            kept,
            FoldStep(
                module=name, folded=(), not_folded=(f"{folded_name}, as it is", *not_folded_parts), max_rel_error=0.0
            ),
        )
    trained = reading.block(name, block)
    norms = "their BatchNorms" if len(trained.branches) > 1 else "its BatchNorm"
    kernel = fold_block(tensors, block, reading.eps)
    weights = {"weight": torch.from_numpy(kernel.weight), "bias": torch.from_numpy(kernel.bias)}
    folded = {f"{folded_name}.{key}": tensor for key, tensor in weights.items()}
    kept = {key: tensor for key, tensor in tensors.items() if key.startswith(("se.", "post_se."))}
    return FoldedPart(
        {f"{name}.{key}": tensor for key, tensor in (folded | kept).items()},
        FoldStep(
            module=name,
            folded=(f"{', '.join(trained.branches)} and {norms} -> {folded_name}",),
            not_folded=not_folded_parts,
            equation="eqs. 3-4",
            max_rel_error=_difference(trained, tensors, loaded(block.conv(block.kernel, bias=True), weights)),
        ),
    )


@torch.no_grad()
def _difference(trained: TrainingBlock, tensors: Mapping[str, Tensor], conv: nn.Module) -> float:
    """Relative difference of the outputs before the ReLU, which would hide differences of negative values."""
    shape = (2, trained.block.in_width, 7, 5)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loaded(trained, tensors)
    return max_rel_error(conv(x), trained.convolved(x))


def _read_config(
    tensors: Mapping[str, Tensor], key: BlockKey, reader: SettingsReader, *, divided: bool
) -> tuple[RepConvConfig, tuple[int, int], tuple[Fact, ...]]:
    """Read the configuration from shapes and branches; `Reading.require_whole` later refuses unfit tensors.

    ``divided``: whether stage 4 is the second half of a RepVGGplus's stage 3, which begins without a stride.
    """
    depths = _depths(tensors)
    named = ["stage0"], *([f"stage{s}.{i}" for i in range(depth)] for s, depth in enumerate(depths, 1))
    blocks, before = [], 0
    for stage in named:
        read = []
        for name in stage:
            read.append(_read_block(tensors, name, key, before))
            before = read[-1].width
        blocks.append(read)
    firsts = [(stage[0], read[0]) for stage, read in zip(named, blocks, strict=True)]
    official = ["1" if divided and name == "stage4.0" else "2" for name, _ in firsts]
    strides = _strides(tensors, key, firsts, official, reader)
    stages = tuple(
        (replace(first, stride=stride), *others) for stride, (first, *others) in zip(strides, blocks, strict=True)
    )
    counts = {name: _convs(tensors, name, key.layout) for stage in named for name in stage}
    convs = counts.pop("stage0"), max(counts.values(), default=1)
    classes = weight_of(tensors, "linear.weight", 2).shape[0] if any(n.startswith("linear.") for n in tensors) else 0
    config = RepConvConfig(key.layout, stages, classes)
    return config, convs, _facts(config, convs, key)


def _depths(tensors: Mapping[str, Tensor]) -> list[int]:
    """The number of blocks in each stage after ``stage0``.

    Raises:
        Refused: If a stage or a block is missing.
    """
    found = blocks_by_stage(tensors, r"stage(\d+)\.(\d+)\.")
    if sorted(found) != list(range(1, len(found) + 1)):
        raise Refused(
            f"the stages are {', '.join(f'stage{s}' for s in sorted(found))}, with one missing.",
            hint="The file contains only a part of the network.",
            code="checkpoint.missing-keys",
        )
    return [count_numbered(found[stage], f"stage{stage}") for stage in sorted(found)]


def _read_block(tensors: Mapping[str, Tensor], name: str, key: BlockKey, before: int) -> RepBlock:
    """Read one block whose input has ``before`` channels, 0 for the network's input; its stride is set later."""
    names = NAMES[key.layout]
    conv = f"{names.conv}{'' if key.layout == 'repvgg' else '.0'}.conv"
    place = f"{name}.{names.folded if key.deployed else conv}.weight"
    width, shared, height, side = weight_of(tensors, place, 4).shape
    before = before or shared
    groups = before // shared
    if height != side or side % 2 == 0 or before % shared or width % groups:
        raise Refused(
            f"{place} has shape {[width, shared, height, side]}, which is not a convolution of {before} channels "
            "with an odd, square kernel.",
            hint="The file belongs to another network, or it was changed after training.",
            code="checkpoint.shape",
        )
    last = f"{name}.post_se.{names.squeeze}.weight"
    squeeze = last if last in tensors else f"{name}.se.{names.squeeze}.weight"
    squeezed = weight_of(tensors, squeeze, 4).shape[0] if squeeze in tensors else 0
    if squeezed and f"{name}.bn.weight" in tensors and f"{name}.rbr_1x1.weight" in tensors:
        raise Refused(
            f"{name} is a block of QARepVGG with squeeze-and-excitation, which lies between the sum of the branches "
            "and its BatchNorm.",
            hint="QARepVGG is supported without it. Another network: repaconv fold FILE --arch ./net.py:build.",
            code="repconv.squeeze",
        )
    return RepBlock(before, width, side, 1, groups, squeezed, last in tensors)


def _convs(tensors: Mapping[str, Tensor], name: str, layout: Layout) -> int:
    """The number of full-kernel branches of a block."""
    conv = f"{name}.{NAMES[layout].conv}"
    pattern = re.compile(rf"{re.escape(conv)}\.(\d+)\.")
    found = {int(match[1]) for key in tensors if (match := pattern.match(key))}
    return count_numbered(found, conv) if found else 1


def _strides(
    tensors: Mapping[str, Tensor],
    key: BlockKey,
    firsts: list[tuple[str, RepBlock]],
    official: list[str],
    reader: SettingsReader,
) -> list[int]:
    """Read the strides of each stage's first block; all other blocks have stride 1."""

    def parse(text: str) -> str:
        if len(words := text.split(",")) != len(firsts):
            raise ValueError(f"not {len(firsts)} numbers, one a stage")
        return ",".join(str(positive(word.strip())) for word in words)

    seen, shown = [], []
    for (name, block), usual in zip(firsts, official, strict=True):
        joint = f"{name}.bn.weight" in tensors  # QARepVGG, whose shortcut has no tensors
        shown.append(block.in_width == block.width and not key.deployed and not joint)
        kept = f"{name}.{NAMES[key.layout].identity}.weight" in tensors
        seen.append(("1" if kept else "2") if shown[-1] else usual)
    confirmed = sum(shown)

    def agree(found: str, given: str) -> bool:
        pairs = zip(found.split(","), given.split(","), shown, strict=True)
        return all(one == other or (not certain) for one, other, certain in pairs)

    source = (
        f"official code: stages begin with 2; in {confirmed} of {len(firsts)} an identity branch there, or its "
        "absence, shows it"
    )
    found = ",".join(seen) if confirmed else None
    text = reader.take("strides", parse, ",".join(official), found, source if confirmed else "", same=agree)
    return [int(word) for word in text.split(",")]


def _facts(config: RepConvConfig, convs: tuple[int, int], key: BlockKey) -> tuple[Fact, ...]:
    blocks = config.blocks.values()
    known = {
        "layout": (f"{config.layout}{f', in names of {key.library}' if key.library else ''}", "keys"),
        "depths": ([len(stage) for stage in config.stages], "keys"),
        "widths": ([stage[-1].width for stage in config.stages], "shapes"),
        "kernels": (sorted({block.kernel for block in blocks}), "shapes"),
        "groups": (sorted({block.groups for block in blocks}), "shapes: the input's width over the weight's"),
        "squeeze_excite": (f"in {sum(block.squeezed > 0 for block in blocks)} of {len(blocks)} blocks", "keys"),
        "activation": ("ReLU", "the official code; not recorded in the checkpoint"),
        "classes": (config.classes, "shapes"),
    }
    if not key.deployed:
        known["convolutions"] = (f"{convs[0]} in the first block, {convs[1]} in the others", "keys")
    archs = [arch for arch, published in ARCHS.items() if published.config.stages == config.stages]
    found = [Fact(name="arch", value=arch, source="shapes, as in the paper") for arch in archs]
    return (*found, *(Fact(name=name, value=value, source=source) for name, (value, source) in known.items()))
