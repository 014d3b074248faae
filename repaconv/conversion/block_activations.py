"""A block of a network that is being converted: what flows into it, and what of it a conversion keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.conversion.plain_vit import Plain, attended, batches, behind_attention, mapped, projected
from repaconv.methods.dwconv.mixer_kinds import Mixer
from repaconv.methods.dwconv.paper import ConvBlock
from repaconv.verification.model_runners import weighted


@dataclass(frozen=True)
class Piece:
    """A block in its new form: as trained, its weights by the names within it, its module, the fits' conditioning."""

    block: ConvBlock
    tensors: dict[str, Tensor]
    module: nn.Module
    conditions: tuple[float, ...]


@dataclass(frozen=True)
class Values:
    """V of a mixer: weight [c, d] and bias [c] on normalised tokens."""

    weight: Tensor
    bias: Tensor | None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """As the block has them."""
        bias = {} if self.bias is None else {"attn.v.bias": self.bias}
        return {"attn.v.weight": self.weight, **bias}


@dataclass(frozen=True)
class Place:
    """A block of the network, and what flows into it: of the original and of what was converted so far, [N, T, d].

    ``mixed`` is what the original's heads give there, [N, T, d], before W^O.
    """

    plain: Plain
    index: int
    teacher: Tensor
    mixed: Tensor
    student: Tensor

    @property
    def block(self) -> Any:
        """The module as it was."""
        return self.plain.blocks[self.index]

    @property
    def mixer(self) -> Mixer:
        """Its attention as read."""
        return self.plain.reading.blocks[self.index].mixer

    @property
    def prefix(self) -> int:
        """Tokens before the patches."""
        return self.plain.config.prefix

    @property
    def qkv(self) -> dict[str, Tensor]:
        """Weight, and bias if there is one."""
        return {name: value.detach().clone() for name, value in self.block.attn.qkv.state_dict().items()}

    @property
    def values(self) -> Values:
        """V of all heads."""
        qkv, width = self.qkv, self.plain.config.width
        return Values(qkv["weight"][2 * width :], qkv["bias"][2 * width :] if "bias" in qkv else None)

    @property
    def proj(self) -> Tensor:
        """W^O with LayerScale in it, [d + 1, d]; the last row is its bias."""
        proj, one = self.block.attn.proj, torch.ones(self.plain.config.width)
        scale = getattr(self.block.ls1, "gamma", one).detach()
        return scale * torch.cat([proj.weight.detach().T, proj.bias.detach()[None]])

    def heads(self, x: Tensor) -> Tensor:
        """What the original attention gives for tokens [B, T, d]."""
        return attended(self.block, x, self.plain.heads)

    @cached_property
    def middle(self) -> Tensor:
        """The original's stream behind it, [N, T, d]."""
        return mapped(lambda x, mixed: behind_attention(self.block, x, mixed), self.teacher, self.mixed)

    @cached_property
    def wanted(self) -> Tensor:
        """What the mixer should add to the converted network's stream, [N, T, d]."""
        return self.middle - self.student

    def patches(self, student: Tensor, values: Values) -> Tensor:
        """V [B, n, c] of the patches among tokens [B, T, d]."""
        normal = self.block.norm1(student[:, self.prefix :])
        return nn.functional.linear(normal, values.weight, values.bias)

    def mean_attention(self) -> Tensor:
        """The original's attention matrices among the patches, [h, n, n], their mean over the images."""
        total = torch.zeros((), dtype=torch.float64)
        for (teacher,) in batches(self.teacher):
            q, k, _ = projected(self.block, teacher, self.plain.heads)
            scores = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
            total = total + scores[:, :, self.prefix :, self.prefix :].double().sum(0)
        return (total / len(self.teacher)).float()

    def piece(self, mixer: Mixer, tensors: dict[str, Tensor], output: Tensor, *conditions: float) -> Piece:
        """The whole block: what stands around the mixer stays, but for LayerScale, which is in W^O.

        Args:
            mixer: The new one.
            tensors: Its weights but for W^O.
            output: W^O [c + 1, d], its bias the last row.
            conditions: Of what was solved.
        """
        stays = {name: tensor for name, tensor in self.block.state_dict().items() if name[:4] not in ("attn", "ls1.")}
        whole = {**stays, **tensors, **linear("attn.proj", output)}
        if mixer.conv[0] and self.prefix:  # these tokens attend on as before
            mixer = replace(mixer, prefix=self.prefix)
            whole |= {f"attn.prefix.qkv.{name}": value for name, value in self.qkv.items()}
            whole |= linear("attn.prefix.proj", self.proj)
        was = self.plain.reading.blocks[self.index]
        block = replace(
            was, mixer=replace(mixer, qkv_bias=was.mixer.qkv_bias), traits=replace(was.traits, scale1=False)
        )
        module = weighted(block.build(self.plain.config).eval(), whole, torch.float32)
        return Piece(block, {name: value.detach() for name, value in whole.items()}, module, conditions)


def linear(name: str, output: Tensor) -> dict[str, Tensor]:
    """Weight and bias of a layer by what was solved for, [c + 1, d], the bias its last row."""
    return {f"{name}.weight": output[:-1].T.float().contiguous(), f"{name}.bias": output[-1].float()}
