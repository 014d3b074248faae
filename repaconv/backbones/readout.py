"""The last block of a net that reads only its class token: the other tokens are keys and values there, no more."""

from __future__ import annotations

from torch import Tensor, nn

from repaconv.backbones.merging import Sized
from repaconv.backbones.parts import attention
from repaconv.backbones.tokens import AttentionSpec, MlpSpec


class ReadOutAttention(nn.Module):
    """Attention for the first ``reads`` tokens over all; the scores' divisor is in ``q``. ``kv`` rows: [k | v]."""

    def __init__(self, width: int, spec: AttentionSpec, reads: int) -> None:
        super().__init__()
        self.heads, self.reads = spec.heads, reads
        self.q, self.kv, self.proj = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, size: Tensor | None) -> Tensor:
        """x [B, N, d], size [B, N, 1] or None -> [B, reads, d]."""
        k, v = self.kv(x).chunk(2, -1)
        q, k, v = (p.view(*p.shape[:2], self.heads, -1).transpose(1, 2) for p in (self.q(x[:, : self.reads]), k, v))
        if size is None:
            mixed = attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-2, -1) + size.log().transpose(1, 2).unsqueeze(1)).softmax(-1) @ v
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class ReadOutBlock(nn.Module):
    """x += attn(norm1(x)), x += mlp(norm2(x)) for the first ``reads`` tokens alone."""

    def __init__(
        self, width: int, norm1: nn.Module, mixer: AttentionSpec, norm2: nn.Module, mlp: MlpSpec, reads: int
    ) -> None:
        super().__init__()
        self.norm1, self.attn = norm1, ReadOutAttention(width, mixer, reads)
        self.norm2, self.mlp, self.reads = norm2, mlp.build(width), reads

    def forward(self, state: Tensor | Sized) -> Tensor:
        """Tokens [B, N, d], or these and sizes [B, N, 1], to [B, reads, d]."""
        x, size = state if isinstance(state, tuple) else (state, None)
        x = x[:, : self.reads] + self.attn(self.norm1(x), size)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out
