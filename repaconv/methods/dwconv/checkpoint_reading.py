"""Read checkpoints of vision transformers with convolutions as heads: keys, shapes and the metadata of dwconv-v1."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from repaconv.backbones.activation_setting import read_activation
from repaconv.backbones.blockwise_vit import BlockwiseReading, OpenCheckpoint, deploy_config
from repaconv.backbones.shared_layers import ActivationKind
from repaconv.backbones.tensor_names import depth_of, weight_of
from repaconv.backbones.vit_checkpoint_reader import read_heads, read_vit_sizes
from repaconv.backbones.vit_training_blocks import BlockTraits
from repaconv.backbones.vit_training_norms import NormSettings, read_norms
from repaconv.checkpoints import Checkpoint
from repaconv.checkpoints.checkpoint_reader import under_prefix
from repaconv.core.errors import Refused
from repaconv.method_api.contract import Detection
from repaconv.method_api.settings import SettingsReader, mapping_at, natural, one_of
from repaconv.methods.dwconv.paper_equations import (
    MAX_SEPARATION_ERROR,
    ConvBlock,
    is_rounded_product,
    nearest_separable,
    with_token_merging,
)
from repaconv.methods.dwconv.token_mixer_reading import FORMAT, read_mixer
from repaconv.methods.pyra.merging_schedules import parse_schedule
from repaconv.methods.pyra.paper_equations import MERGED_REASONS, MERGED_TOLERANCE
from repaconv.results import Fact

# Gates that select attention or convolution: the p largest select the convolution (eq. 18).


def read_gates(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any], reader: SettingsReader, depth: int, heads: int
) -> list[tuple[bool, ...] | None]:
    """Read which heads of each block the gates turn into convolutions; None for each block if there are no gates.

    Raises:
        Refused: If the gates are soft, if the p-th and the next gate are equal, if p is invalid, or if the metadata
            mentions gates that the file lacks.
        SettingNeeded: If there are gates but no p or mode.
    """
    gate_metadata, gate = mapping_at(meta, "gate"), tensors.get("gate.weight")
    if gate is None:
        if gate_metadata:
            raise Refused(
                "the metadata mentions gates, but there is no gate.weight.",
                hint="The file contains only a part of the network.",
                code="checkpoint.missing-keys",
            )
        return [None] * depth
    if tuple(gate.shape) not in ((depth,), (depth, heads)):
        raise Refused(
            f"gate.weight has shape {list(gate.shape)}; expected one gate per block, [{depth}], or per head, "
            f"[{depth}, {heads}].",
            hint="The file mixes two networks, or the number of heads differs (--set num_heads=N).",
            code="checkpoint.shape",
        )
    why = "the metadata lacks {}, and the gates do not show it"
    modes, how = one_of("hard-topk", "soft"), why.format("how the gates choose")
    mode = reader.need("gate_mode", modes, "hard-topk", how, gate_metadata.get("mode"), "meta.gate")
    if mode != "hard-topk":
        raise Refused(
            f"the gates are {mode}: attention and convolution both contribute, so neither can be removed.",
            hint="Finish the training with hard gates (hard-topk).",
            code="dwconv.soft-gates",
        )
    p = reader.need(
        "gate_p", natural, "12", why.format("how many take the convolution"), gate_metadata.get("p"), "meta.gate"
    )
    if not isinstance(p, int) or isinstance(p, bool) or not 0 <= p <= gate.numel():
        raise Refused(
            f"meta.gate.p is {p!r}, but there are {gate.numel()} gates.",
            hint="It is the number of gates that select the convolution. Save the checkpoint with the one that it was "
            "trained with.",
            code="dwconv.gates",
        )
    unit = "block" if gate.ndim == 1 else "head"
    chosen = _largest(gate, p)
    reader.facts.append(Fact(name="gates", value=f"the {p} largest of {gate.numel()}, by {unit}", source="gate.weight"))
    return [tuple(row) for row in chosen.view(depth, -1).expand(depth, heads).tolist()]


def _largest(gate: Tensor, p: int) -> Tensor:
    """Whether each gate is among the p largest, as a flat boolean tensor."""
    ranked = gate.double().flatten().sort(descending=True)
    if 0 < p < gate.numel() and ranked.values[p - 1] == ranked.values[p]:
        raise Refused(
            f"gate {p} and the next one in rank have equal weights ({float(ranked.values[p]):g}), so the choice "
            "between them is undefined.",
            hint="Continue the training until they differ.",
            code="dwconv.tie",
        )
    chosen = torch.zeros(gate.numel(), dtype=torch.bool)
    chosen[ranked.indices[:p]] = True
    return chosen


# The whole network.

_KERNEL = re.compile(r"^(?P<block>blocks\.(?:\d+\.)?\d+)\.attn\.(?P<what>dw|conv|conv_heads|gamma|static)(?:\.|$)")


def detect(checkpoint: Checkpoint) -> Detection | None:
    """Recognize the method by kernels among the attention weights, or by the name of its layout."""
    found: dict[str, set[str]] = {}
    for name in checkpoint.tensors:
        if match := _KERNEL.match(name):
            found.setdefault(match["what"], set()).add(match["block"])
    called = mapping_at(checkpoint.record, "meta").get("format") == FORMAT
    if found:
        listed = ", ".join(f"attn.{what} in {len(blocks)} blocks" for what, blocks in sorted(found.items()))
        return Detection("training", f"{listed}{f'; {FORMAT}' if called else ''}")
    return Detection("training", f"meta.format is {FORMAT}") if called else None


def read(checkpoint: Checkpoint, settings: Mapping[str, str]) -> BlockwiseReading[ConvBlock]:
    """Read a checkpoint of the layout dwconv-v1.

    Raises:
        Refused: If the keys are not those of one complete network of the layout, or gates are soft.
        UsageProblem: If a setting is unknown or malformed.
    """
    _require_layout(checkpoint)
    return read_or_plain_vit(checkpoint, settings)


def read_or_plain_vit(checkpoint: Checkpoint, settings: Mapping[str, str]) -> BlockwiseReading[ConvBlock]:
    """Read a checkpoint of the layout dwconv-v1 or of a plain vision transformer, which `read` refuses.

    Raises:
        Refused: If the keys are not those of one complete network, or gates are soft.
        UsageProblem: If a setting is unknown or malformed.
    """
    net, meta = OpenCheckpoint.open(checkpoint, settings), mapping_at(checkpoint.record, "meta")
    tensors, reader, arch = net.tensors, net.reader, mapping_at(meta, "arch")
    resampling = "antialias" if "register_tokens" in tensors else "offset"
    sizes = read_vit_sizes(tensors, reader, arch, "meta.arch", resize=resampling)
    width, depth = sizes["width"], depth_of(tensors)
    tokens = len(sizes["tokens"]) + sizes["registers"]
    heads = read_heads(width, depth, reader, arch.get("num_heads"), "meta.arch")
    gates = read_gates(tensors, meta, reader, depth, heads)
    refactor = reader.take("full_conv", one_of("auto", "refactor", "keep"), "auto")
    norms, act = read_norms(tensors, reader), _read_act(tensors, net.record, reader)
    blocks = tuple(
        _read_block(tensors, f"blocks.{index}.", width, heads, gates[index], refactor, norms, act, tokens)
        for index in range(depth)
    )
    _require_grid(sizes, blocks)
    schedule = _read_schedule(sizes, depth, reader, arch)
    if any(schedule):
        blocks = with_token_merging(blocks, schedule, sizes)
    rounded = sum(block.separate and is_rounded_product(block.error) for block in blocks)
    return net.reading(
        deploy_config(sizes, blocks),
        blocks,
        facts=_block_facts(blocks),
        # for the whole network, end to end; the certificate has a row for each changed kernel
        tolerances={
            **({"fold": MAX_SEPARATION_ERROR["refactor"] * math.sqrt(rounded)} if rounded else {}),
            **(MERGED_TOLERANCE if any(schedule) else {}),
        },
        tolerance_reasons={
            **({"fold": f"{rounded} kernels are products only up to their FP32 rounding"} if rounded else {}),
            **(MERGED_REASONS if any(schedule) else {}),
        },
        excluded="gate.weight",
    )


def _require_layout(checkpoint: Checkpoint) -> None:
    spvit = [name for name in checkpoint.tensors if "head_probs" in name or ".bconv." in name]
    if spvit:
        raise Refused(
            f"{spvit[0]} belongs to SPViT, which has a BatchNorm and a ReLU between its convolution and the output "
            "projection.",
            hint="SPViT is not a supported method.",
            code="method.mismatch",
        )
    if detect(checkpoint) is None:
        raise Refused(
            f"{checkpoint.path} has no head that is a convolution (attn.dw, attn.conv), so there is nothing to fold.",
            hint="`repaconv convert` makes such a network from a plain vision transformer and images; that is lossy.",
            code="method.mismatch",
        )


def _read_block(
    tensors: Mapping[str, Tensor],
    prefix: str,
    width: int,
    heads: int,
    gated: tuple[bool, ...] | None,
    refactor: str,
    norms: NormSettings,
    act: ActivationKind,
    tokens: int,
) -> ConvBlock:
    block = under_prefix(tensors, prefix)
    mixer = read_mixer(block, prefix, width, heads, gated, tokens)
    swiglu = "mlp.w12.weight" in block
    hidden = (
        weight_of(tensors, f"{prefix}mlp.w3.weight", 2).shape[1]
        if swiglu
        else weight_of(tensors, f"{prefix}mlp.fc1.weight", 2).shape[0]
    )
    traits, separate, error = BlockTraits.read(block, norms), False, 0.0
    if mixer.kind == "full":
        _, error = nearest_separable(block["attn.conv.weight"])
        separate = error <= MAX_SEPARATION_ERROR[refactor]
        if refactor == "refactor" and not separate:
            raise Refused(
                f"{prefix}attn.conv is not the product of a pointwise and a depthwise convolution: its kernel "
                f"differs from the nearest product by {error:.1e}.",
                hint="Leave --set full_conv=refactor out to keep the full convolution.",
                code="dwconv.not-separable",
            )
        if not separate and traits.norm1.kind == "batch":
            raise Refused(
                f"{prefix}norm1 is a BatchNorm before a full convolution with padding; its shift cannot be folded "
                "into the convolution.",
                hint="How such a block folds is unknown.",
                code="dwconv.batchnorm",
            )
    return ConvBlock(mixer, traits, hidden, swiglu, separate, act, error)


def _read_act(tensors: Mapping[str, Tensor], record: Mapping[str, Any], reader: SettingsReader) -> ActivationKind:
    """Read the activation of ungated FFNs. A gated FFN's keys show that its activation is SiLU."""
    if any(name.endswith("mlp.w12.weight") for name in tensors):
        reader.facts.append(Fact(name="gate_act", value="SiLU", source="keys: w12 and w3 are DINOv2's SwiGLU"))
    if any(name.endswith("mlp.fc1.weight") for name in tensors):
        return read_activation(record, reader)
    return "GELU"


def _read_schedule(
    sizes: Mapping[str, Any], depth: int, reader: SettingsReader, arch: Mapping[str, Any]
) -> tuple[int, ...]:
    """Read the number of tokens that merge in each block, from --set or a converted network's metadata; else none."""
    stored, parse = arch.get("schedule"), partial(parse_schedule, depth=depth, sizes=sizes)

    try:
        found = None if stored is None else parse(str(stored))
    except ValueError as problem:
        raise Refused(
            f"meta.arch.schedule is {stored!r}: {problem}.",
            hint="It is the number of tokens merged in each block, e.g. [0, 0, 16, 0].",
            code="dwconv.schedule",
        ) from None
    return reader.maybe("schedule", parse, found, "meta.arch") or (0,) * depth


def _require_grid(sizes: Mapping[str, Any], blocks: tuple[ConvBlock, ...]) -> None:
    """Require that blocks with convolutions have only tokens on the patch grid, or attention for the others.

    Raises:
        Refused: If they have other tokens, or if the network has a head without pooling.
    """
    if (sizes["tokens"] or sizes["registers"]) and any(
        any(block.mixer.conv) and not block.mixer.prefix for block in blocks
    ):
        raise Refused(
            "there are tokens other than patches (cls_token, register_tokens), which a convolution cannot process.",
            hint=f"Networks of {FORMAT} are trained without them; `repaconv convert` keeps attention for them.",
            code="dwconv.tokens",
        )
    if sizes["classes"] and sizes["pool"] == "none":
        raise Refused(
            "a head without pooling before it is not supported.",
            hint="How such a network folds is unknown.",
            code="dwconv.arch",
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
            if not block.separate and block.error <= MAX_SEPARATION_ERROR["refactor"]:
                source += ", as one stored in float32 is: --set full_conv=refactor takes it for one"
            facts.append(Fact(name=f"blocks.{index}.attn.conv", value=what, source=source))
    return facts
