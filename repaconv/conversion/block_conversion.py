"""A transformer block during conversion: its input activations, its weights, and the block that replaces it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.conversion.plain_vit import (
    PlainViT,
    after_attention,
    attention_output,
    batches,
    map_batches,
    queries_keys_values,
)
from repaconv.methods.dwconv.paper_equations import ConvBlock
from repaconv.methods.dwconv.token_mixer_reading import Mixer
from repaconv.verification.model_runners import with_weights


@dataclass(frozen=True)
class ConvertedBlock:
    """A converted block: its description, its weights by their names within the block, its module, and the condition
    numbers of its fits."""

    block: ConvBlock
    tensors: dict[str, Tensor]
    module: nn.Module
    conditions: tuple[float, ...]


@dataclass(frozen=True)
class ValueProjection:
    """The value projection (V) of attention: weight [c, d] and bias [c], applied to normalized tokens."""

    weight: Tensor
    bias: Tensor | None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their names in the block."""
        bias = {} if self.bias is None else {"attn.v.bias": self.bias}
        return {"attn.v.weight": self.weight, **bias}


@dataclass(frozen=True)
class BlockContext:
    """A block of the network with its inputs: those in the original and in the network converted so far, [N, T, d].

    ``teacher`` and ``student`` are these two inputs. ``mixed`` is the output of the original's heads, [N, T, d], before
    W^O.
    """

    plain: PlainViT
    index: int
    teacher: Tensor
    mixed: Tensor
    student: Tensor

    @property
    def block(self) -> Any:
        """The original module."""
        return self.plain.blocks[self.index]

    @property
    def mixer(self) -> Mixer:
        """The description of its attention."""
        return self.plain.reading.blocks[self.index].mixer

    @property
    def prefix(self) -> int:
        """The number of tokens before the patches."""
        return self.plain.config.prefix

    @property
    def qkv(self) -> dict[str, Tensor]:
        """The weight of the qkv layer, and its bias if it has one."""
        return {name: value.detach().clone() for name, value in self.block.attn.qkv.state_dict().items()}

    @property
    def values(self) -> ValueProjection:
        """The value projection of all heads."""
        qkv, width = self.qkv, self.plain.config.width
        return ValueProjection(qkv["weight"][2 * width :], qkv["bias"][2 * width :] if "bias" in qkv else None)

    @property
    def proj(self) -> Tensor:
        """W^O multiplied by LayerScale, [d + 1, d]; the last row is the bias."""
        proj, one = self.block.attn.proj, torch.ones(self.plain.config.width)
        scale = getattr(self.block.ls1, "gamma", one).detach()
        return scale * torch.cat([proj.weight.detach().T, proj.bias.detach()[None]])

    def heads(self, x: Tensor) -> Tensor:
        """Return the output of the original attention before W^O for tokens [B, T, d]."""
        return attention_output(self.block, x, self.plain.heads)

    @cached_property
    def middle(self) -> Tensor:
        """The original's residual stream after the attention, [N, T, d]."""
        return map_batches(lambda x, mixed: after_attention(self.block, x, mixed), self.teacher, self.mixed)

    @cached_property
    def wanted(self) -> Tensor:
        """The output of the mixer that would restore the original's residual stream, [N, T, d]."""
        return self.middle - self.student

    def patches(self, student: Tensor, values: ValueProjection) -> Tensor:
        """Return the values [B, n, c] of the patches among tokens [B, T, d]."""
        normal = self.block.norm1(student[:, self.prefix :])
        return nn.functional.linear(normal, values.weight, values.bias)

    def mean_attention(self) -> Tensor:
        """Return the original's attention matrices among the patches, averaged over the images, [h, n, n]."""
        total = torch.zeros((), dtype=torch.float64)
        for (teacher,) in batches(self.teacher):
            q, k, _ = queries_keys_values(self.block, teacher, self.plain.heads)
            scores = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
            total = total + scores[:, :, self.prefix :, self.prefix :].double().sum(0)
        return (total / len(self.teacher)).float()

    def converted_block(
        self, mixer: Mixer, tensors: dict[str, Tensor], output: Tensor, *conditions: float
    ) -> ConvertedBlock:
        """Return the converted block. Everything except the mixer is kept; LayerScale is multiplied into W^O.

        Args:
            mixer: The new mixer.
            tensors: Its weights without W^O.
            output: W^O [c + 1, d]; the last row is the bias.
            conditions: Condition numbers of the fits.
        """
        stays = {name: tensor for name, tensor in self.block.state_dict().items() if name[:4] not in ("attn", "ls1.")}
        whole = {**stays, **tensors, **linear_tensors("attn.proj", output)}
        if mixer.conv[0] and self.prefix:  # the prefix tokens keep their attention
            mixer = replace(mixer, prefix=self.prefix)
            whole |= {f"attn.prefix.qkv.{name}": value for name, value in self.qkv.items()}
            whole |= linear_tensors("attn.prefix.proj", self.proj)
        was = self.plain.reading.blocks[self.index]
        block = replace(
            was, mixer=replace(mixer, qkv_bias=was.mixer.qkv_bias), traits=replace(was.traits, scale1=False)
        )
        module = with_weights(block.build(self.plain.config).eval(), whole, torch.float32)
        return ConvertedBlock(block, {name: value.detach() for name, value in whole.items()}, module, conditions)


def linear_tensors(name: str, output: Tensor) -> dict[str, Tensor]:
    """Return the weight and bias of a linear layer from a solution [c + 1, d] whose last row is the bias."""
    return {f"{name}.weight": output[:-1].T.float().contiguous(), f"{name}.bias": output[-1].float()}
