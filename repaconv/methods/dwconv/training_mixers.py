"""The token mixer of a block as trained, in eval mode, by the equations of `paper_equations`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from repaconv.backbones.convolution_mixers import to_grid, to_tokens
from repaconv.methods.dwconv.token_mixer_reading import Mixer, index_for


class DropIn(nn.Module):
    """The token mixer as trained, in eval mode. Weights of the side that a gate did not select are unused."""

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
        if mixer.mean:
            self.mean = nn.Parameter(torch.zeros(head if mixer.kind == "ensembled" else width))
        if mixer.kind == "static":
            count = grid[0] * grid[1]
            self.static = nn.Parameter(torch.zeros(mixer.heads, count, count))
        if mixer.prefix:
            self.prefix = PrefixAttention(width, mixer)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        if count := self.mixer.prefix:
            return torch.cat([self.prefix(x), self._patches(x[:, count:])], 1)
        return self._patches(x)

    def _patches(self, x: Tensor) -> Tensor:
        mixer = self.mixer
        if mixer.kind == "ensembled":
            return self._ensembled(x)
        if mixer.kind == "full":
            mixed = to_tokens(self.conv(to_grid(x, self.grid)))
        elif mixer.kind == "static":
            v = self.v(x).unflatten(-1, (mixer.heads, -1)).transpose(1, 2)
            mixed = (self.static @ v).transpose(1, 2).flatten(2)
        else:
            mixed = self._by_head(x)
        out: Tensor = self.proj(mixed)
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        """The concatenated output of all heads, whether attention or convolution."""
        mixer, width = self.mixer, self.width
        channels = [mixer.channels(width, conv=conv) for conv in (False, True)]
        ascending = index_for(x, sorted(range(width), key=[*channels[0], *channels[1]].__getitem__))
        attending, convolving = (index_for(x, each) for each in channels)
        if mixer.qkv:
            some = mixer.queries(width)
            q, k, v = self.qkv(x).split([some, some, width], -1)
            if some == width:
                q, k = q[..., attending], k[..., attending]
        else:
            v = self.v(x)
        outputs = []
        if channels[0]:
            heads = mixer.heads - sum(mixer.conv)
            parts = (part.view(*part.shape[:2], heads, -1).transpose(1, 2) for part in (q, k, v[..., attending]))
            mixed = nn.functional.scaled_dot_product_attention(*parts)
            outputs.append(mixed.transpose(1, 2).flatten(2))
        if channels[1]:
            kernels = mixer.kernels(self.dw.weight, width)
            bias = None if self.dw.bias is None else mixer.kernels(self.dw.bias, width)
            outputs.append(self._convolved(v[..., convolving], kernels, bias, convolving))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)[..., ascending]

    def _convolved(
        self, v: Tensor, kernels: Tensor, bias: Tensor | None, channels: list[int] | Tensor | None = None
    ) -> Tensor:
        padding, grid = self.mixer.kernel // 2, to_grid(v, self.grid)
        out = to_tokens(nn.functional.conv2d(grid, kernels, bias, padding=padding, groups=len(kernels)))
        if not self.mixer.mean:
            return out
        return out + (self.mean if channels is None else self.mean[channels]) * v.mean(1, keepdim=True)

    def _ensembled(self, x: Tensor) -> Tensor:
        shares = self.gamma.softmax(0)
        v = (self.v(x).view(*x.shape[:2], self.mixer.heads, -1) * shares[:, None]).sum(-2)
        weight = (self.proj.weight.view(self.width, self.mixer.heads, -1) * shares[:, None]).sum(1)
        return nn.functional.linear(self._convolved(v, self.dw.weight, self.dw.bias), weight, self.proj.bias)


class PrefixAttention(nn.Module):
    """The attention of the tokens before the patches over all tokens, which conversion keeps."""

    def __init__(self, width: int, mixer: Mixer) -> None:
        super().__init__()
        self.count, self.heads = mixer.prefix, mixer.heads
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=mixer.qkv_bias), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, p, d]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q[:, :, : self.count], k, v)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out
