"""Read checkpoints of vision transformers with PYRA, LoRA or token merging: keys, shapes and the trainer's args."""

from __future__ import annotations

from collections.abc import Mapping

from repaconv.backbones.activation_setting import read_activation
from repaconv.backbones.blockwise_vit import BlockwiseReading, OpenCheckpoint, deploy_config
from repaconv.backbones.tensor_names import depth_of, weight_of
from repaconv.backbones.vit import ViTConfig
from repaconv.backbones.vit_checkpoint_reader import read_heads, read_vit_sizes
from repaconv.backbones.vit_training_blocks import BlockTraits
from repaconv.backbones.vit_training_norms import read_norms
from repaconv.checkpoints import Checkpoint
from repaconv.checkpoints.checkpoint_reader import under_prefix
from repaconv.core.errors import Refused
from repaconv.method_api.contract import Detection
from repaconv.method_api.settings import mapping_at, small
from repaconv.methods.pyra.merging_schedules import read_schedule
from repaconv.methods.pyra.paper_equations import MERGED_REASONS, MERGED_TOLERANCE, MergedBlock


def detect(checkpoint: Checkpoint) -> Detection | None:
    """Recognize PYRA by pyra_a, which no other method has.

    A plain ViT may be this method's if it has LoRA adapters, or if the trainer's args have token_merging.
    """
    names = checkpoint.tensors
    merging = sum(name.endswith(".pyra_a") for name in names)
    if merging:
        return Detection("training", f"pyra_a in {merging} blocks")
    plain = {"patch_embed.proj.weight", "pos_embed"} <= set(names) and any(
        name.endswith("attn.qkv.weight") for name in names
    )
    layers = checkpoint.record.get("lora_layers")
    if plain and layers:
        return Detection("training", f"LoRA on {layers} layers of a plain ViT", "possible")
    if plain and mapping_at(checkpoint.record, "args").get("token_merging") is True:
        return Detection("training", "args.token_merging on a plain ViT", "possible")
    return Detection("training", "a plain ViT, for --set schedule", "asked") if plain else None


def read(checkpoint: Checkpoint, settings: Mapping[str, str]) -> BlockwiseReading[MergedBlock]:
    """Read a checkpoint; a network that merges no tokens has only its LoRA adapters folded.

    Raises:
        Refused: If the keys are not those of one complete vision transformer, the schedule is unknown or impossible, or
            the network has prompts or adapters other than LoRA, which cannot be folded.
        UsageProblem: If a setting is unknown or malformed.
    """
    detection = detect(checkpoint)
    if detection is None or (detection.confidence == "asked" and "schedule" not in settings):
        raise Refused(
            f"{checkpoint.path} has neither pyra_a tensors nor LoRA adapters on a plain vision transformer.",
            hint="To merge tokens in a plain network, give --set schedule=...; otherwise leave --method out.",
            code="method.mismatch",
        )
    _require_foldable(checkpoint)
    net, args = OpenCheckpoint.open(checkpoint, settings), mapping_at(checkpoint.record, "args")
    tensors, reader = net.tensors, net.reader
    depth, certain = depth_of(tensors), detection.confidence == "certain"
    merges = certain or args.get("token_merging") is True or "schedule" in settings
    sizes = read_vit_sizes(tensors, reader, {}, "", resize=None if merges else "antialias")
    heads = read_heads(sizes["width"], depth, reader, args.get("num_heads"), "args")
    eps = reader.take("pyra_eps", small, 1e-5) if certain else 1e-5
    schedule = read_schedule(tensors, sizes, depth, args, reader)
    act, norms = read_activation(net.record, reader), read_norms(tensors, reader)
    blocks, tokens = [], ViTConfig(**sizes, blocks=()).sequence
    for index, r in enumerate(schedule):
        block = under_prefix(tensors, f"blocks.{index}.")
        weight_of(tensors, f"blocks.{index}.attn.qkv.weight", 2)
        hidden = weight_of(tensors, f"blocks.{index}.mlp.fc1.weight", 2).shape[0]
        traits, modulated = BlockTraits.read(block, norms), any(name.startswith("pyra_") for name in block)
        biased = "attn.qkv.bias" in block
        blocks.append(MergedBlock(traits, heads, hidden, biased, tokens, r, modulated, act, eps))
        tokens -= r
    config = deploy_config(sizes, tuple(blocks))
    allowed, why = (MERGED_TOLERANCE, MERGED_REASONS) if any(schedule) else ({}, {})
    return net.reading(config, tuple(blocks), tolerances=allowed, tolerance_reasons=why)


def _require_foldable(checkpoint: Checkpoint) -> None:
    for name in checkpoint.tensors:
        what = next((w for w in ("adapter.", "prefix_tokens", "visual_prompt_token") if w in name), None)
        if what:
            raise Refused(
                f"{checkpoint.names[name]} belongs to an adapter or a prompt that no neighboring layer can absorb.",
                hint="Supported are networks with LoRA, with or without token merging.",
                code="pyra.not-foldable",
            )
