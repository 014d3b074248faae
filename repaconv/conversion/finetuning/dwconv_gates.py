"""dwconv with gates: each block has attention and a convolution, and training learns which of the two it keeps (eq.
18)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.backbones.convolution_mixers import to_grid, to_tokens
from repaconv.backbones.vit import ViT, ViTConfig
from repaconv.backbones.vit_training_blocks import PlainBlock
from repaconv.checkpoints import Checkpoint
from repaconv.conversion.block_conversion import BlockContext
from repaconv.conversion.finetuning.training_plan import TrainingPlan, UntrainedNetwork, metadata_of
from repaconv.conversion.kernel_fitting import ConversionSettings, fit_kernels
from repaconv.conversion.original_activations import OriginalActivations
from repaconv.conversion.plain_vit import PlainViT, Reading, batches
from repaconv.core.errors import Refused
from repaconv.methods.dwconv.checkpoint_reading import read_or_plain_vit
from repaconv.methods.dwconv.token_mixer_reading import FORMAT
from repaconv.verification.model_runners import with_weights

LEARNING_RATE, GATE_RATE_FACTOR = 2e-4, 100.0
"""Maximum learning rate, and its factor for the gates, which have few steps to change."""
HARD_FROM, LAST_TEMPERATURE = 0.5, 1e-3
"""Fraction of the training after which gates are hard, and the temperature that is reached there."""
INITIAL_RANGE = 0.2
"""Range of the initial gate weights, in the order of the blocks that the criterion found."""


class GatedMixer(nn.Module):
    """proj((1 - g) attention + g convolution of the values)."""

    gate: Tensor | float = 0.0

    def __init__(self, width: int, kernel: int, grid: tuple[int, int], heads: int) -> None:
        super().__init__()
        self.grid, self.heads = grid, heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dw = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        q, k, v = self.qkv(x).chunk(3, -1)
        by_head = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        attended = nn.functional.scaled_dot_product_attention(*by_head).transpose(1, 2).flatten(2)
        convolved = to_tokens(self.dw(to_grid(v, self.grid)))
        mixed: Tensor = self.proj((1 - self.gate) * attended + self.gate * convolved)
        return mixed


class GatedViT(ViT):
    """A ViT with gated blocks. ``gate.weight`` is trained; the p blocks with the largest weights use the convolution.

    Args:
        config: The configuration of the network.
        reading: The description of its blocks.
        convolving: p, the number of blocks that use the convolution.
        kernel: Kernel size of the convolutions.
    """

    def __init__(self, config: ViTConfig, reading: Reading, convolving: int, kernel: int) -> None:
        def block(config: ViTConfig, index: int) -> nn.Module:
            plain = reading.blocks[index].build(config)
            assert isinstance(plain, PlainBlock)
            plain.attn = GatedMixer(config.width, kernel, config.grid, reading.blocks[index].mixer.heads)
            return plain

        super().__init__(config, block)
        self.convolving = convolving
        self.gate = nn.ParameterDict({"weight": torch.zeros(len(reading.blocks))})
        self.temperature: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Set the gates, then [B, C, H, W] -> the outputs of the network."""
        for part, value in zip(self.blocks, self._gates(), strict=True):
            part.get_submodule("attn").gate = value
        return super().forward(x)

    def _gates(self) -> Tensor:
        """eq. 17; while a temperature is set, its relaxation with Gumbel noise (Kool et al. 2019)."""
        weight = self.gate["weight"]
        if self.temperature is None:
            return torch.zeros_like(weight).index_fill(0, weight.topk(self.convolving).indices, 1.0)
        noise = -torch.empty_like(weight).exponential_().log()
        keys, taken = weight + noise * self.training, torch.zeros_like(weight)
        for _ in range(self.convolving):  # choose one after the other, without those chosen already
            share = (keys / self.temperature).softmax(0)
            keys, taken = keys + (1 - share).clamp_min(1e-6).log(), taken + share
        return taken


@torch.no_grad()
def initialize(
    plain: PlainViT, order: Sequence[int], convolving: int, kernel: int, images: Tensor, record: Mapping[str, Any]
) -> UntrainedNetwork:
    """Add a convolution to each block, fitted to its attention by least squares.

    Args:
        plain: The network.
        order: Its block indices, the best to replace first; determines the initial gates.
        convolving: Number of blocks to replace.
        kernel: Kernel size of the convolutions.
        images: [N, C, H, W] to fit to.
        record: The other contents of its checkpoint.

    Raises:
        Refused: If there are tokens other than the patches, or q, k and v have no bias.
    """
    if plain.config.prefix or not plain.reading.blocks[0].mixer.qkv_bias:
        raise Refused(
            "gates need a network whose tokens are all patches and whose q, k and v have a bias: this one "
            f"{'has other tokens' if plain.config.prefix else 'has no such bias'}.",
            hint="Convert it without --to training-form and fine-tune that: repaconv convert, then repaconv finetune.",
            code="convert.gates",
        )
    tensors = {name: tensor.float().clone() for name, tensor in plain.reading.tensors.items()}
    activations = OriginalActivations(plain, images)
    for index in range(len(plain.blocks)):
        into, mixed = activations.at(index)
        context, targets = BlockContext(plain, index, into, mixed, into), (some for (some,) in batches(mixed))
        found = fit_kernels(context, context.values, ConversionSettings(kernel=kernel), targets, mean=False)
        tensors |= {f"blocks.{index}.attn.dw.weight": found.kernels, f"blocks.{index}.attn.dw.bias": found.bias}
    begin = torch.linspace(INITIAL_RANGE, -INITIAL_RANGE, len(order))
    tensors["gate.weight"] = torch.zeros(len(order)).index_copy(0, torch.tensor(order), begin)
    net = GatedViT(plain.config, plain.reading, convolving, kernel)
    meta = {"format": FORMAT, "arch": _arch(plain), "gate": {"unit": "block", "p": convolving, "mode": "soft"}}
    return UntrainedNetwork(
        net=with_weights(net.eval(), tensors, torch.float32),
        tensors=tensors,
        metadata={
            "meta": json.dumps(meta, sort_keys=True),
            **({"args": json.dumps(record["args"], default=str)} if "args" in record else {}),
        },
        settings={},
        description=f"a convolution next to every attention; gates are to choose {convolving} of {len(order)} blocks",
    )


def _arch(plain: PlainViT) -> dict[str, Any]:
    config = plain.config
    return {
        "img_size": list(config.image_size),
        "num_heads": plain.heads,
        "norm_eps": config.norm_eps,
        "global_pool": config.pool,
        "act": plain.reading.blocks[0].act,
    }


def cool_to(net: nn.Module, share: float) -> None:
    """Set the temperature at that fraction of training: it falls to `LAST_TEMPERATURE`, then gates are hard."""
    assert isinstance(net, GatedViT)
    net.temperature = None if share >= HARD_FROM else LAST_TEMPERATURE ** (share / HARD_FROM)


def training_plan(checkpoint: Checkpoint, settings: Mapping[str, str]) -> TrainingPlan:
    """Return the training plan: gates with falling temperature, hard at the end."""
    reading = read_or_plain_vit(checkpoint, {**settings, "gate_mode": "hard-topk"})
    metadata = metadata_of(checkpoint)
    meta = json.loads(metadata["meta"])
    metadata["meta"] = json.dumps({**meta, "gate": {**meta["gate"], "mode": "hard-topk"}}, sort_keys=True)
    kernel = reading.blocks[0].mixer.kernel
    net = GatedViT(reading.config, reading, meta["gate"]["p"], kernel)
    tensors = {**reading.tensors, "gate.weight": checkpoint.tensors["gate.weight"]}
    return TrainingPlan(
        net=with_weights(net, tensors, torch.float32),
        rate=LEARNING_RATE,
        at=cool_to,
        imitated=tuple((f"blocks.{n}", f"blocks.{n}") for n in range(len(reading.blocks))),
        faster={"gate.weight": GATE_RATE_FACTOR},
        metadata=metadata,
        reading=reading,
    )
