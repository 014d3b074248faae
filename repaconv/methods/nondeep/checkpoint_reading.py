"""Read checkpoints of networks with parallel branches: keys, shapes and the metadata of nondeep-branches-v1."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from repaconv.backbones.activation_setting import read_activation
from repaconv.backbones.blockwise_vit import BlockwiseReading, OpenCheckpoint
from repaconv.backbones.shared_layers import ActivationKind
from repaconv.backbones.tensor_names import depth_of, weight_of
from repaconv.backbones.vit import ViTConfig
from repaconv.backbones.vit_checkpoint_reader import read_vit_sizes
from repaconv.backbones.vit_training_blocks import BlockTraits
from repaconv.backbones.vit_training_norms import NormSettings, read_norms
from repaconv.checkpoints import Checkpoint
from repaconv.checkpoints.checkpoint_reader import under_prefix
from repaconv.core.errors import Refused
from repaconv.method_api.contract import Detection
from repaconv.method_api.fold_error import loaded, max_rel_error
from repaconv.method_api.settings import SettingsReader, mapping_at, one_of, positive, small
from repaconv.methods.nondeep.paper_equations import BranchBlock, Join
from repaconv.results import Fact

FORMAT = "nondeep-branches-v1"
JOIN_SETTINGS = {"attn_value": ("output-sum", "value-sum"), "score_scale": ("sqrt", "sum")}
"""The settings of joining branches that no tensor shows, with their values."""

T = TypeVar("T")

_BRANCH = re.compile(r"^(?:blocks\.(?:\d+\.)?(\d+))\.(?:attn|mlp)\.branches\.\d+\.")


def detect(checkpoint: Checkpoint) -> Detection | None:
    """Recognize the method by its branches, which no other method has, or by the name of its layout."""
    found = {match[1] for name in checkpoint.tensors if (match := _BRANCH.match(name))}
    called = mapping_at(checkpoint.record, "meta").get("format") == FORMAT
    if found:
        return Detection("training", f"branches in {len(found)} blocks" + (f", {FORMAT}" if called else ""))
    folded = called and any(name.startswith("blocks.") for name in checkpoint.tensors)
    return Detection("deploy", f"{FORMAT} without branches") if folded else None


def read(checkpoint: Checkpoint, settings: Mapping[str, str]) -> BlockwiseReading[BranchBlock]:
    """Read a checkpoint, with heads as wide as the rank of the joined weights requires.

    Raises:
        Refused: If the keys are not those of one complete network with branches, the metadata is missing or contradicts
            the tensors, or the branches are not joined yet (lambda is not 1).
        UsageProblem: If a setting is unknown or malformed.
    """
    net = read_at_any_lambda(checkpoint, settings)
    factor = net.blocks[0].join.factor
    if factor != 1:
        raise Refused(
            f"the branches have not joined: lambda is {factor:g}. Folding them would change the output by "
            f"{_error_of_joining(net):.0%} of its size.",
            hint="Finish the training at lambda = 1; below 1 the fold is not exact.",
            code="nondeep.lambda",
        )
    specs = tuple(block.spec_for(net.config, net.weights(index)) for index, block in enumerate(net.blocks))
    return replace(net, config=replace(net.config, blocks=specs), sized_by_values=True)


def read_at_any_lambda(checkpoint: Checkpoint, settings: Mapping[str, str]) -> BlockwiseReading[BranchBlock]:
    """Read a checkpoint at any lambda, without determining the rank of the heads.

    Raises:
        Refused: As `read`, except for lambda.
        UsageProblem: As `read`.
    """
    detection = detect(checkpoint)
    if detection is None or detection.form == "deploy":
        raise Refused(
            f"{checkpoint.path} has no branches (blocks.i.attn.branches.b)"
            + (f", though it calls itself {FORMAT}: it is folded already." if detection else "."),
            hint="Fold the checkpoint as trained. Without --method the method is detected.",
            code="method.deployed" if detection else "method.mismatch",
        )
    net, arch = OpenCheckpoint.open(checkpoint, settings), mapping_at(checkpoint.record, "meta", "arch")
    tensors, reader = net.tensors, net.reader
    sizes = read_vit_sizes(tensors, reader, arch, "meta.arch")
    heads = _need(reader, "num_heads", positive, arch, "meta.arch", "12")
    if sizes["width"] % heads:
        raise Refused(
            f"{sizes['width']} channels are not divisible by {heads} heads.",
            hint="Give the number of heads that it was trained with: --set num_heads=N.",
            code="vit.heads",
        )
    if "norm_eps" not in arch and "norm_eps" not in settings:
        _need(reader, "norm_eps", small, arch, "meta.arch", "1e-6")
    join = _read_join(tensors, mapping_at(checkpoint.record, "meta", "join"), reader)
    act, norms = read_activation(net.record, reader), read_norms(tensors, reader)
    blocks = tuple(_read_block(tensors, index, arch, heads, join, norms, act) for index in range(depth_of(tensors)))
    unmeasured = tuple(block.spec(sizes["width"], None, None) for block in blocks)
    config = ViTConfig(**sizes, blocks=unmeasured)
    return net.reading(config, blocks, facts=_block_facts(blocks), excluded="join_lambda")


def _error_of_joining(net: BlockwiseReading[BranchBlock]) -> float:
    """The relative error of the output on one random image if lambda is taken for 1."""
    size = (1, net.config.in_channels, *net.config.image_size)
    image = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    joined = tuple(replace(block, join=replace(block.join, factor=1.0)) for block in net.blocks)
    with torch.no_grad():
        outputs = [loaded(one.module(), net.tensors)(image) for one in (replace(net, blocks=joined), net)]
    return max_rel_error(*outputs)


def _need(
    reader: SettingsReader, name: str, parse: Callable[[str], T], metadata: Mapping[str, Any], where: str, example: str
) -> T:
    """Read a value from the metadata, which the user must give if the metadata lacks it."""
    why = f"the metadata lacks {name}, and no tensor does"
    found: T | None = metadata.get(name)
    return reader.need(name, parse, example, why, found, where)


def _read_join(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], reader: SettingsReader) -> Join:
    """Read how the branches join: attn_value, score_scale and lambda.

    Raises:
        Refused: If buffer and metadata disagree on lambda, or the metadata names an unknown way of joining.
    """
    for name, known in (("ffn", "pre-activation"), ("branch_reduce", "sum")):
        if metadata.get(name, known) != known:
            raise Refused(
                f"meta.join.{name} is {metadata[name]!r}; only {known!r} is supported.",
                hint="The method's documentation page describes the ways of joining.",
                code="nondeep.join",
            )
    value, scale = (
        _need(reader, name, one_of(*JOIN_SETTINGS[name]), metadata, "meta.join", example)
        for name, example in (("attn_value", "value-sum"), ("score_scale", "sqrt"))
    )
    for (name, choices), chosen in zip(JOIN_SETTINGS.items(), (value, scale), strict=True):
        if chosen not in choices:
            raise Refused(
                f"meta.join.{name} is {chosen!r}; supported are {' and '.join(choices)}.",
                hint=f"Give the right one with --set {name}=...",
                code="nondeep.join",
            )
    return Join(value, scale, _read_lambda(tensors, metadata, reader))


def _read_lambda(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], reader: SettingsReader) -> float:
    """Read lambda from the buffer and the metadata, which must agree."""
    stated = metadata.get("lambda")
    found, source = (float(stated), "meta.join") if isinstance(stated, (int, float)) else (None, "")
    if (buffer := tensors.get("join_lambda")) is not None and buffer.numel():
        stored = [float(entry) for entry in buffer.flatten()]
        found, source = (stored[0], "join_lambda") if found is None else (found, source)
        if any(abs(entry - found) > 1e-6 for entry in stored):
            listed = ", ".join(f"{entry:g}" for entry in dict.fromkeys(stored))
            elsewhere = "" if source == "join_lambda" else f" and {found:g} in the metadata"
            raise Refused(
                f"join_lambda is {listed} in the weights{elsewhere}.",
                hint=(
                    "A network has one lambda. Finish the training at 1 in every block, and save the checkpoint again."
                ),
                code="nondeep.lambda",
            )
    why = "neither metadata nor weights tell lambda"
    return reader.need("lambda", float, "1.0", why, found, source)


def _read_block(
    tensors: Mapping[str, Tensor],
    index: int,
    arch: Mapping[str, Any],
    heads: int,
    join: Join,
    norms: NormSettings,
    act: ActivationKind,
) -> BranchBlock:
    """Read one block.

    Raises:
        Refused: If metadata and tensors disagree on the number of branches, or the branches' numbering has gaps.
    """
    block, expected, counts = under_prefix(tensors, f"blocks.{index}."), arch.get("num_branches"), []
    for part in ("attn", "mlp"):
        found = {int(m[1]) for name in block if (m := re.match(rf"{part}\.branches\.(\d+)\.", name))}
        if not found or found != set(range(len(found))) or (expected is not None and expected != len(found)):
            listed = ", ".join(map(str, sorted(found))) or "none"
            raise Refused(
                f"blocks.{index}.{part} has the branches {listed}"
                + (f" where the metadata says {expected}." if expected is not None else "."),
                hint="A branch is missing or there is one too many; the sum needs all of them.",
                code="nondeep.branches",
            )
        counts.append(len(found))
    hidden = weight_of(tensors, f"blocks.{index}.mlp.branches.0.fc1.weight", 2).shape[0]
    biased = "attn.branches.0.qkv.bias" in block
    return BranchBlock(counts[0], counts[1], heads, hidden, join, BlockTraits.read(block, norms), biased, act)


def _block_facts(blocks: tuple[BranchBlock, ...]) -> list[Fact]:
    return [
        Fact(name="branches", value=sorted({count for b in blocks for count in (b.attn, b.mlp)}), source="keys"),
        Fact(name="depth", value=len(blocks), source="keys"),
        Fact(name="mlp_hidden", value=sorted({block.hidden for block in blocks}), source="shapes"),
    ]
