"""Training-time networks of RePaViT, NonDeep and RIFormer, reimplemented as other code writes them.

They have masks, index assignment and loops over branches, and are exported with torch alone.
"""

from __future__ import annotations

import io
import math
import warnings

import onnx
import torch
import torch.nn.functional as F
from torch import nn

RULES = ("where", "float mask", "index put", "bool put", "run-time mask", "written mask", "cat", "index list", "two")


class IdleFfn(nn.Module):
    """RePaViT's FFN, its idle channels left out of the activation in one of `RULES`."""

    def __init__(self, width: int, hidden: int, active: int, rule: str) -> None:
        super().__init__()
        self.active, self.hidden, self.rule = active, hidden, rule
        self.norm1, self.norm2 = nn.BatchNorm1d(width), nn.BatchNorm1d(hidden)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.register_buffer("mask", torch.arange(hidden) < active)

    def norm(self, norm, x):
        if self.rule in ("where", "index list"):  # over flattened tokens
            return norm(x.reshape(-1, x.shape[-1])).reshape(x.shape)
        return norm(x.transpose(1, 2)).transpose(1, 2)

    def act(self, h, y):
        a = self.active
        if self.rule == "where":
            return torch.where(self.mask, F.gelu(h), h)
        if self.rule == "float mask":
            return F.gelu(h) * self.mask.to(h.dtype) + h * (1 - self.mask.to(h.dtype))
        if self.rule == "index put":
            h = h.clone()
            h[..., :a] = F.gelu(h[..., :a])
            return h
        if self.rule == "bool put":
            h = h.clone()
            h[:, :, self.mask] = F.gelu(h[:, :, self.mask])
            return h
        if self.rule == "run-time mask":
            return torch.where(torch.arange(self.hidden) < a, F.gelu(h), h)
        if self.rule == "written mask":
            mask = torch.zeros_like(h, dtype=torch.bool)
            mask[:, :, :a] = True
            return torch.where(mask, F.gelu(h), h)
        if self.rule == "index list":
            first, rest = torch.arange(a), torch.arange(a, self.hidden)
            return torch.cat([F.gelu(h.index_select(-1, first)), h.index_select(-1, rest)], -1)
        if self.rule == "two":
            w, b = self.fc1.weight, self.fc1.bias
            return torch.cat([F.gelu(F.linear(y, w[:a], b[:a])), F.linear(y, w[a:], b[a:])], -1)
        return torch.cat([F.gelu(h[..., :a]), h[..., a:]], -1)

    def forward(self, x):
        y = self.norm(self.norm1, x)
        return x + self.fc2(self.norm(self.norm2, self.act(self.fc1(y), y)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1)
        return x + self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))


class Tokens(nn.Module):
    """Patches, a class token, positions, blocks, and a head on the class token."""

    def __init__(self, width: int, blocks: list[nn.Module], classes: int = 5) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 17, width))
        self.pre = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.blocks(self.pre(x)))[:, 0])

    @property
    def outside(self) -> int:
        """Parameters of all but the blocks when the final norm went into the head."""
        parts = (self.patch, self.pre, self.head)
        return sum(p.numel() for part in parts for p in part.parameters()) + self.cls.numel() + self.pos.numel()


def repavit(rule: str, width: int = 24, heads: int = 3, idle: float = 0.75) -> tuple[Tokens, int]:
    """A net and its folded size: of every FFN C x C with a bias, fc1 of A channels with one, fc2 of A without."""
    hidden = 4 * width
    active = math.ceil(hidden * (1 - idle))
    blocks = [nn.Sequential(Attention(width, heads), IdleFfn(width, hidden, active, rule)) for _ in range(2)]
    each = 4 * width * (width + 1) + width * (width + 1) + active * (2 * width + 1)
    net = scrambled(Tokens(width, blocks))
    return net, net.outside + 2 * each


class Branches(nn.Module):
    """A nondeep block at lambda = 1, branch after branch in loops, queries, keys and values apart."""

    def __init__(self, width: int, heads: int, count: int, value: str, *, bias: bool) -> None:
        super().__init__()
        self.heads, self.value, self.count = heads, value, count
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        for name in ("q", "k", "v"):
            self.add_module(name, nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(count)))
        self.o = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.fc1 = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(count))
        self.fc2 = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(count))

    def attention(self, x):
        b, n, c = x.shape
        head = c // self.heads

        def split(t):
            return t.view(b, n, self.heads, head).transpose(1, 2)

        scores = [split(q(x)) @ split(k(x)).transpose(-1, -2) for q, k in zip(self.q, self.k, strict=True)]
        values = [split(v(x)) for v in self.v]
        out = 0
        for i in range(self.count):
            a, v = scores[i], values[i]
            for j in range(self.count):
                if j != i:
                    a = a + 1.0 * scores[j]
                    v = v + 1.0 * values[j] if self.value == "sum" else v
            weights = (a / math.sqrt(self.count * head)).softmax(-1)
            out = out + self.o[i]((weights @ v).transpose(1, 2).reshape(b, n, c))
        return out

    def mlp(self, x):
        h = [fc1(x) for fc1 in self.fc1]
        out = 0
        for i in range(self.count):
            out = out + self.fc2[i](F.gelu(h[i] + sum(h[j] for j in range(self.count) if j != i)))
        return out

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def nondeep(value: str, count: int, heads: int, *, bias: bool, width: int = 24) -> tuple[Tokens, int]:
    """A net and its folded size, by the method's own rule: 2 N d r + N^2 r against N d^2 + N^2 d."""
    net = scrambled(Tokens(width, [Branches(width, heads, count, value, bias=bias) for _ in range(2)]))

    def cheaper(rank: int) -> bool:
        return rank * (2 * width + 17) < width * (width + 17)

    rank = min(count * width // heads, width)
    q = heads * (rank if cheaper(rank) else width)
    k = q if cheaper(rank) else 0
    head = width // heads if value == "sum" else rank
    v = heads * head if cheaper(head) else 0
    o = heads * (head if cheaper(head) else width)
    each = (q + k + v) * (width + 1) + o * width + width + 4 * width * width + 3 * width
    return net, net.outside + 2 * each


class Affine(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.affine = nn.Conv2d(width, width, 1, groups=width)

    def forward(self, x):
        return self.affine(x) - x


class PixelNorm(nn.LayerNorm):
    """mmcv's LN2d."""

    def forward(self, x):
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class RIFormerBlock(nn.Module):
    def __init__(self, width: int, norm) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mixer = norm(width), norm(width), Affine(width)
        self.fc1, self.fc2 = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.scale1, self.scale2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x + self.scale1[:, None, None] * self.mixer(self.norm1(x))
        return x + self.scale2[:, None, None] * self.fc2(F.gelu(self.fc1(self.norm2(x))))


class RIFormer(nn.Module):
    def __init__(self, norm) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 7, 4, 2), nn.Conv2d(8, 12, 3, 2, 1)
        self.first = nn.Sequential(RIFormerBlock(8, norm), RIFormerBlock(8, norm))
        self.second, self.norm, self.head = RIFormerBlock(12, norm), norm(12), nn.Linear(12, 5)

    def forward(self, x):
        x = self.second(self.down(self.first(self.stem(x))))
        return self.head(self.norm(x).mean((2, 3)))


def riformer(norm: str) -> tuple[RIFormer, int]:
    """A net and its folded size: of 8 vectors a block (two norms, the affine, two scales) 2 are left."""
    net = scrambled(RIFormer(PixelNorm if norm == "LN2d" else lambda width: nn.GroupNorm(1, width)))
    whole = sum(p.numel() for p in net.parameters())
    return net, whole - sum(6 * width for width in (8, 8, 12)) - 2 * 12


def scrambled(net):
    """Weights far from the identity; nothing is 0 or 1."""
    random = torch.Generator().manual_seed(0)
    for name, tensor in net.state_dict().items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=random)
        if name.endswith("running_var"):
            tensor.copy_(0.5 + noise.abs())
        elif (name.endswith("weight") and tensor.ndim == 1) or "scale" in name:
            tensor.copy_(1 + 0.3 * noise)
        else:
            tensor.copy_(0.3 * noise if tensor.ndim < 2 else noise / math.sqrt(max(tensor[0].numel(), 1)))
    return net.eval()


def exported(net: nn.Module, shape: tuple[int, ...], *, dynamo: bool, opset: int, free: bool) -> onnx.ModelProto:
    """By torch's exporter, plainly."""
    x, axes = torch.randn(shape), ({0: "batch"},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            dims = axes if free else None
            program = torch.onnx.export(net, (x,), dynamo=True, opset_version=opset, dynamic_shapes=dims, verbose=False)
            return program.model_proto
        stream = io.BytesIO()
        named = {"x": axes[0]} if free else None
        torch.onnx.export(net, (x,), stream, dynamo=False, opset_version=opset, input_names=["x"], dynamic_axes=named)
    return onnx.load_from_string(stream.getvalue())
