"""The token mixer of a block as trained, its deploy form, and how it is read from keys and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from repaconv.backbones.constant_and_prefix_token_mixers import PatchMixerSpec, PrefixedSpec, StaticSpec
from repaconv.backbones.convolution_mixers import DepthwiseSpec, EnsembledSpec, FullConvSpec, ScatteredSpec
from repaconv.backbones.tensor_names import weight_of
from repaconv.backbones.vit_inference_block import MixerSpec
from repaconv.backbones.vit_layers import AttentionSpec
from repaconv.core.errors import Refused

FORMAT = "dwconv-v1"

Kind = Literal["attention", "depthwise", "ensembled", "full", "static"]


@dataclass(frozen=True)
class Mixer:
    """The token mixer of one block as trained.

    Attributes:
        kind: ``depthwise`` if any head is a depthwise convolution.
        conv: For each head, whether it is a convolution in eval mode.
        qkv: Rows of ``qkv``, 0 if there is ``v`` instead.
        qkv_bias: Whether ``qkv`` or ``v`` has a bias.
        kernel: Side of the convolution's kernel, 0 without one.
        rows: Number of kernels in ``dw``.
        dw_bias: Whether the convolution has a bias.
        flagged: Whether the weights include ``conv_heads``.
        mean: Whether a multiple of the values' mean over the grid is added, by channel.
        prefix: Number of tokens before the patches, which keep their attention.
    """

    kind: Kind
    conv: tuple[bool, ...]
    qkv: int
    qkv_bias: bool
    kernel: int = 0
    rows: int = 0
    dw_bias: bool = False
    flagged: bool = False
    mean: bool = False
    prefix: int = 0

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.conv)

    def channels(self, width: int, *, conv: bool) -> list[int]:
        """The channels of the heads that are convolutions, or of the others, in ascending order."""
        head = width // self.heads
        return [h * head + c for h, is_conv in enumerate(self.conv) if is_conv == conv for c in range(head)]

    def spec(self, width: int, *, separate: bool = False) -> MixerSpec:
        """The deploy form. ``separate``: a full convolution becomes a pointwise and a depthwise one."""
        head, convs = width // self.heads, sum(self.conv)
        if self.kind == "full" and not separate:
            return FullConvSpec(self.kernel)
        if 0 < convs < self.heads:
            return ScatteredSpec(self.heads - convs, convs, head, self.kernel, self.mean)
        if not convs:
            return AttentionSpec(self.heads, head, head)
        patches = self._for_patches(head)
        return PrefixedSpec(patches, self.prefix, self.heads, head) if self.prefix else patches

    def _for_patches(self, head: int) -> PatchMixerSpec:
        if self.kind == "static":
            return StaticSpec(self.heads)
        return (
            EnsembledSpec(head, self.kernel, self.mean)
            if self.kind == "ensembled"
            else DepthwiseSpec(self.kernel, self.mean)
        )

    def queries(self, width: int) -> int:
        """The number of rows of q in ``qkv``, which is also that of k; 0 without ``qkv``."""
        return (self.qkv - width) // 2 if self.qkv else 0

    def kernels(self, weight: Tensor, width: int) -> Tensor:
        """Expand dw.weight or dw.bias [rows, ...] to the channels of the convolving heads, [c, ...]."""
        head, conv = width // self.heads, [h for h, is_conv in enumerate(self.conv) if is_conv]
        if self.rows == width:
            return weight[index_for(weight, self.channels(width, conv=True))]
        if self.rows == len(conv) * head:
            return weight
        if self.rows == self.heads:
            weight = weight[index_for(weight, conv)]
        return weight.repeat_interleave(head, 0)


def index_for(x: Tensor, places: list[int]) -> list[int] | Tensor:
    """The places as an index of a tensor: on a GPU one that is there already, since a CUDA graph captures no copy."""
    return places if not x.is_cuda or torch.compiler.is_compiling() else _on_gpu(tuple(places), x.device)


@lru_cache(maxsize=256)
def _on_gpu(places: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.tensor(places, dtype=torch.int64, device=device)


def read_mixer(
    block: Mapping[str, Tensor], prefix: str, width: int, heads: int, gated: tuple[bool, ...] | None, tokens: int = 0
) -> Mixer:
    """Read a block's token mixer from keys and shapes.

    Args:
        block: The block's tensors, by their names within the block.
        prefix: The prefix of these names in the network.
        width: Channels.
        heads: Number of heads.
        gated: For each head, whether a gate selected the convolution; None without gates.
        tokens: Number of tokens before the patches.

    Raises:
        Refused: If keys and shapes fit no mixer of the layout.
    """
    keys = {name.split(".")[1] for name in block if name.startswith("attn.")}
    if gated is not None and not all(gated) and "qkv" not in keys:
        raise _wrong(prefix, "the gates select attention, but there are no q and k")
    if "conv" in keys:
        return _full(block, prefix, width, heads, keys)
    if ("qkv" in keys) == ("v" in keys):
        raise _wrong(prefix, "it needs either qkv or v")
    source = "qkv" if "qkv" in keys else "v"
    rows = weight_of(block, f"attn.{source}.weight", 2).shape[0]
    dw = weight_of(block, "attn.dw.weight", 4) if "dw" in keys else None
    mixer = Mixer(
        kind="ensembled" if "gamma" in keys else "depthwise",
        conv=(source == "v",) * heads,
        qkv=rows if source == "qkv" else 0,
        qkv_bias=f"attn.{source}.bias" in block,
        kernel=0 if dw is None else _side(dw, prefix),
        rows=0 if dw is None else dw.shape[0],
        dw_bias="attn.dw.bias" in block,
        flagged="attn.conv_heads" in block,
        mean="mean" in keys,
        prefix=tokens if "prefix" in keys else 0,
    )
    if source == "qkv" and (keys & {"prefix", "static"} or (mixer.mean and not mixer.flagged)):
        raise _wrong(prefix, "prefix and static are of blocks whose heads are all replaced, with v; mean, too, without "
                     "conv_heads")  # fmt: skip
    if "static" in keys:
        return _static(mixer, prefix, keys)
    if "gamma" in keys:
        return _ensembled(mixer, block["attn.gamma"], prefix, width, gated)
    conv = _convolving(mixer, block.get("attn.conv_heads"), prefix, gated)
    mixer = replace(mixer, kind="depthwise" if any(conv) else "attention", conv=conv)
    _require_sides(mixer, prefix, width, settled=mixer.flagged or gated is not None)
    _require_kernels(mixer, prefix, width)
    return mixer


def _wrong(prefix: str, what: str) -> Refused:
    return Refused(
        f"{prefix}attn: {what}.",
        hint=f"The layout {FORMAT} is described on the method's documentation page.",
        code="dwconv.mixer",
    )


def _full(block: Mapping[str, Tensor], prefix: str, width: int, heads: int, keys: set[str]) -> Mixer:
    """Read a full convolution."""
    weight = weight_of(block, "attn.conv.weight", 4)
    if tuple(weight.shape[:2]) != (width, width) or keys - {"conv", "proj"}:
        raise _wrong(prefix, f"a full convolution is [{width}, {width}, k, k] and has only proj next to it")
    return Mixer("full", (True,) * heads, 0, False, _side(weight, prefix), 0, "attn.conv.bias" in block)


def _static(mixer: Mixer, prefix: str, keys: set[str]) -> Mixer:
    """Read a mixer with a constant matrix per head."""
    if keys - {"static", "v", "proj", "prefix"}:
        raise _wrong(prefix, "a constant matrix has only v, proj and prefix next to it")
    return replace(mixer, kind="static")


def _side(kernels: Tensor, prefix: str) -> int:
    side = int(kernels.shape[2])
    if kernels.shape[3] != side or side % 2 == 0:
        raise _wrong(prefix, f"kernels are square with an odd side, not {side} x {kernels.shape[3]}")
    return side


def _ensembled(mixer: Mixer, gamma: Tensor, prefix: str, width: int, gated: tuple[bool, ...] | None) -> Mixer:
    """Read ensembled heads, which share the kernels of one head."""
    heads, head = mixer.heads, width // mixer.heads
    if mixer.qkv or mixer.rows != head or gated or tuple(gamma.shape) != (heads,):
        raise _wrong(prefix, f"ensembled heads have v, gamma [{heads}] and kernels [{head}, 1, k, k]")
    return replace(mixer, flagged=False)


def _convolving(mixer: Mixer, flags: Tensor | None, prefix: str, gated: tuple[bool, ...] | None) -> tuple[bool, ...]:
    """For each head, whether it is a convolution: by the flags, else the gates, else all with v and none with qkv."""
    if flags is None:
        return gated if gated is not None and mixer.qkv else mixer.conv
    if tuple(flags.shape) != (mixer.heads,) or gated:
        raise _wrong(prefix, f"conv_heads is [{mixer.heads}], one flag a head, and there are no gates next to it")
    if not bool(((flags == 0) | (flags == 1)).all()):
        raise Refused(
            f"{prefix}attn.conv_heads contains {', '.join(f'{flag:g}' for flag in flags.tolist())}; every flag "
            "must be 0 or 1, because with a value between them attention and convolution both contribute.",
            hint="Finish the training with hard gates.",
            code="dwconv.soft-gates",
        )
    return tuple(bool(flag) for flag in flags.tolist())


def _require_sides(mixer: Mixer, prefix: str, width: int, *, settled: bool) -> None:
    """Require kernels for convolving heads, queries and keys for attending ones, and no unused weights of either."""
    if any(mixer.conv) and not mixer.rows:
        raise _wrong(prefix, "heads are convolutions, but there is no dw")
    if not mixer.qkv and not all(mixer.conv):
        raise _wrong(prefix, "heads attend, but there are no q and k")
    if mixer.rows and mixer.qkv and not settled:
        raise _wrong(prefix, "dw is next to qkv, and neither gates nor conv_heads say which heads it is for")
    full, compact = 3 * width, 2 * mixer.conv.count(False) * (width // mixer.heads) + width
    known = (full, compact) if mixer.flagged else (full,)
    if mixer.qkv and mixer.qkv not in known:
        raise _wrong(prefix, f"qkv has {mixer.qkv} rows where {' or '.join(map(str, known))} are known")


def _require_kernels(mixer: Mixer, prefix: str, width: int) -> None:
    """Require one kernel per channel or per head, of all or of the convolving heads, without ambiguity."""
    convs, head = sum(mixer.conv), width // mixer.heads
    by_channel = {width, convs * head} if convs else {width}
    by_head = {mixer.heads, convs} if convs else {mixer.heads}
    if mixer.rows and mixer.rows not in by_channel | by_head:
        raise _wrong(prefix, f"dw has {mixer.rows} kernels, which are neither one a channel nor one a head")
    if head > 1 and mixer.rows in by_channel & by_head:
        raise _wrong(prefix, f"{mixer.rows} kernels can be one a channel or one a head")
