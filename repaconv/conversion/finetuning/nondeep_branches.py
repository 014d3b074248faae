"""nondeep: consecutive blocks become parallel branches of one layer, joined during training (lambda from 0 to 1)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.blockwise_vit import BlockwiseReading
from repaconv.backbones.tensor_names import in_float64
from repaconv.backbones.vit_block_folding import linear_of, named_tensors
from repaconv.backbones.vit_training_blocks import BlockTraits, scale_affine
from repaconv.backbones.vit_training_norms import NormTraits
from repaconv.checkpoints import Checkpoint
from repaconv.checkpoints.checkpoint_reader import under_prefix
from repaconv.conversion.finetuning.training_plan import TrainingPlan, UntrainedNetwork, metadata_of
from repaconv.conversion.plain_vit import PlainViT
from repaconv.core.errors import Refused, UsageProblem
from repaconv.methods.dwconv.paper_equations import ConvBlock
from repaconv.methods.nondeep.checkpoint_reading import FORMAT, read_at_any_lambda
from repaconv.methods.nondeep.paper_equations import AttentionBranch, BranchAttention, BranchBlock, BranchMlp, Join
from repaconv.verification.model_runners import with_weights

LEARNING_RATE, JOINED_FROM = 1e-3, 0.6
"""Maximum learning rate, and the fraction of the training after which lambda is 1; the rest trains the foldable
network."""
SEPARATE = Join("value-sum", "sqrt", 0.0)


def initialize(plain: PlainViT, branches: int, record: Mapping[str, Any]) -> UntrainedNetwork:
    """Make blocks n l to n l + n - 1 the branches of layer l. Norm affines and LayerScales are multiplied into the
    weights.

    Raises:
        UsageProblem: If the number of blocks is not a multiple of ``branches``.
        Refused: If an FFN is gated, which branches do not support.
    """
    depth, config, blocks = len(plain.blocks), plain.config, plain.reading.blocks
    if branches < 2 or depth % branches:
        raise UsageProblem(
            f"{depth} blocks cannot be grouped into layers of {branches} branches.",
            hint=f"Give --branches a divisor of {depth} above 1.",
            code="convert.branches",
        )
    require_plain_mlp(blocks)
    tensors = {name: tensor.float() for name, tensor in plain.reading.tensors.items() if not name.startswith("blocks.")}
    for index, block in enumerate(blocks):
        weights = in_float64(under_prefix(plain.reading.tensors, f"blocks.{index}."))
        layer, branch = divmod(index, branches)
        for name, tensor in _branch(weights, block, config.width).items():
            part, _, rest = name.partition(".")
            tensors[f"blocks.{layer}.{part}.branches.{branch}.{rest}"] = tensor.float()
    for layer in range(depth // branches):
        for norm in ("norm1", "norm2"):
            tensors[f"blocks.{layer}.{norm}.weight"] = torch.ones(config.width)
            tensors[f"blocks.{layer}.{norm}.bias"] = torch.zeros(config.width)
    meta = {"format": FORMAT, "method": "nondeep", "arch": _arch(plain, branches), "join": _join_metadata()}
    net = with_weights(_joined(plain, branches).module(), tensors, torch.float32)
    return UntrainedNetwork(
        net=net,
        tensors={**tensors, "join_lambda": torch.zeros(())},
        metadata={
            "meta": json.dumps(meta, sort_keys=True),
            **({"args": json.dumps(record["args"], default=str)} if "args" in record else {}),
        },
        settings={},
        description=f"{depth} blocks -> {depth // branches} layers of {branches} branches, apart (lambda 0)",
    )


def require_plain_mlp(blocks: tuple[ConvBlock, ...]) -> None:
    """Refuse networks with gated FFNs.

    Raises:
        Refused: If an FFN is gated; names the first.
    """
    if gated := [index for index, block in enumerate(blocks) if block.swiglu]:
        raise Refused(
            f"blocks.{gated[0]} has a gated FFN (SwiGLU), which this method does not support.",
            hint="--method dwconv supports it.",
            code="convert.gated",
        )


def _branch(weights: Mapping[str, Tensor], block: ConvBlock, width: int) -> dict[str, Tensor]:
    """Return the linear layers of one block with its norm affines and LayerScales, because branches share one norm."""
    norm1, norm2 = (getattr(block.traits, name).affine(weights, name, width) for name in ("norm1", "norm2"))
    parts: dict[str, Affine] = {
        "attn.qkv": linear_of(weights, "attn.qkv") @ norm1,
        "attn.proj": scale_affine(weights, "ls1", width) @ linear_of(weights, "attn.proj"),
        "mlp.fc1": linear_of(weights, "mlp.fc1") @ norm2,
        "mlp.fc2": scale_affine(weights, "ls2", width) @ linear_of(weights, "mlp.fc2"),
    }
    return named_tensors(parts)


def _joined(plain: PlainViT, branches: int) -> BlockwiseReading[BranchBlock]:
    """Return the reading of the network with these branches, joined."""
    first, config = plain.reading.blocks[0], plain.config
    norm = NormTraits("layer", first.traits.norm1.eps)
    traits = BlockTraits(norm, norm, scale1=False, scale2=False)
    heads, join = plain.heads, replace(SEPARATE, factor=1.0)
    block = BranchBlock(branches, branches, heads, first.hidden, join, traits, qkv_bias=True, act=first.act)
    blocks = (block,) * (len(plain.blocks) // branches)
    unmeasured = tuple(each.spec(config.width, None, None) for each in blocks)
    return BlockwiseReading(config=replace(config, blocks=unmeasured), blocks=blocks)


def _arch(plain: PlainViT, branches: int) -> dict[str, Any]:
    config, block = plain.config, plain.reading.blocks[0]
    return {
        "img_size": list(config.image_size),
        "num_heads": plain.heads,
        "num_branches": branches,
        "norm_eps": block.traits.norm1.eps,
        "act": block.act,
        **({"global_pool": config.pool} if config.pool != "distilled" else {}),
    }


def _join_metadata() -> dict[str, Any]:
    """How the branches are joined, with the keys of nondeep-branches-v1."""
    return {
        "lambda": SEPARATE.factor,
        "attn_value": SEPARATE.value,
        "score_scale": SEPARATE.scale,
        "ffn": "pre-activation",
        "branch_reduce": "sum",
    }


def join_to(net: nn.Module, share: float) -> None:
    """Set lambda at that fraction of the training: linear up to 1 (eq. 10)."""
    for part in net.modules():
        if isinstance(part, (BranchAttention, BranchMlp)):
            part.join = replace(part.join, factor=min(1.0, share / JOINED_FROM))
        if isinstance(part, BranchAttention):
            first = part.branches[0]
            assert isinstance(first, AttentionBranch)
            part.divisor = part.join.divisor(len(part.branches), first.proj.out_features // part.heads)


def training_plan(checkpoint: Checkpoint, settings: Mapping[str, str]) -> TrainingPlan:
    """Return the training plan: progressive joining. Each layer imitates the last of its blocks."""
    reading = read_at_any_lambda(checkpoint, settings)
    branches = reading.blocks[0].attn
    metadata = metadata_of(checkpoint)
    meta = json.loads(metadata["meta"])
    metadata["meta"] = json.dumps({**meta, "join": {**meta["join"], "lambda": 1.0}}, sort_keys=True)
    return TrainingPlan(
        net=with_weights(reading.module(), reading.tensors, torch.float32),
        rate=LEARNING_RATE,
        at=join_to,
        imitated=tuple((f"blocks.{n}", f"blocks.{branches * n + branches - 1}") for n in range(len(reading.blocks))),
        besides={"join_lambda": torch.ones(())},
        metadata=metadata,
        reading=reading,
    )
