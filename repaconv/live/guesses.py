"""What in a live module has the shape of a known fold: guesses from submodules' names and kinds, not yet proved."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.affine import Affine
from repaconv.backbones.parts import IdleConvMlp
from repaconv.backbones.tokens import IdleMlp, IdleMlpSpec
from repaconv.live.parts import New, child_at
from repaconv.methods.repavit.activity import ResidualTest
from repaconv.methods.repavit.paper import ffn_weights, fold_ffn


@dataclass(frozen=True)
class Guess:
    """One edit that might be exact: of which method, what it does, and what makes its new modules."""

    method: str
    told: str
    edit: Callable[[], New]


Rule = Callable[[nn.Module], Iterator[Guess]]


def idle_ffn(part: nn.Module, idle_ratio: float | None = None) -> Iterator[Guess]:
    """RePaViT: norm1, fc1, norm2, fc2 with both norms BatchNorm; with its shortcut inside or outside."""
    names = ("norm1", "fc1", "norm2", "fc2")
    children = [getattr(part, name, None) for name in names]
    norms = (nn.BatchNorm1d, nn.BatchNorm2d)
    if not (isinstance(children[0], norms) and isinstance(children[2], norms)):
        return
    if not all(isinstance(child, nn.Linear | nn.Conv2d) for child in (children[1], children[3])):
        return
    weights = part.state_dict()
    hidden, width = weights["fc1.weight"].shape[:2]
    conv, eps = weights["fc1.weight"].ndim == 4, children[0].eps
    said = getattr(part, "act_channels", None)
    trained = int(weights.get("norm2.num_batches_tracked", torch.tensor(1))) > 0
    test = ResidualTest.of({name: w.double().cpu() for name, w in weights.items()}, eps, trained=trained)
    asked = () if idle_ratio is None else (math.ceil(hidden * (1 - idle_ratio)), int(hidden * (1 - idle_ratio)))
    for active in dict.fromkeys(a for a in (*asked, said, test.active) if isinstance(a, int) and 0 <= a < hidden):
        for shortcut in (True, False):
            told = f"{hidden - active} idle channels of {hidden}, both BatchNorms" + ", the shortcut" * shortcut

            def edit(active: int = active, shortcut: bool = shortcut) -> New:
                parts = fold_ffn(weights, active, eps, Affine.eye(width))
                if not shortcut:
                    parts["idle"] = parts["idle"] - Affine.eye(width)
                kind = IdleConvMlp(width, active, "GELU") if conv else IdleMlp(width, IdleMlpSpec(active))
                return {"": _loaded(kind, ffn_weights(parts, conv=conv))}

            yield Guess("repavit", told, edit)


def affine_mixer(part: nn.Module) -> Iterator[Guess]:
    """RIFormer: norm1, then token_mixer.affine minus the identity; the norm takes both."""
    affine = getattr(getattr(part, "token_mixer", None), "affine", None)
    norm: Any = getattr(part, "norm1", None)
    if not isinstance(affine, nn.Conv2d) or getattr(norm, "weight", None) is None:
        return

    def edit() -> New:
        mixer = Affine.depthwise1x1(affine.weight, affine.bias)
        before = Affine.diagonal(norm.weight, norm.bias)
        folded = (mixer - Affine.eye(mixer.out_width)) @ before
        return {"norm1": _with(norm, folded), "token_mixer": nn.Identity()}

    yield Guess("riformer", "token_mixer.affine - identity -> norm1", edit)


def adapter(part: nn.Module) -> Iterator[Guess]:
    """LoRA as PEFT's layers hold it (base_layer, lora_A, lora_B, scaling)."""
    base = getattr(part, "base_layer", None)
    a, b, scaling = (getattr(part, name, None) for name in ("lora_A", "lora_B", "scaling"))
    if not isinstance(base, nn.Linear) or not isinstance(a, nn.ModuleDict) or not isinstance(b, nn.ModuleDict):
        return
    if not isinstance(scaling, dict) or set(a) != set(b) or not set(a) <= set(scaling):
        return

    def edit() -> New:
        layer = copy.deepcopy(base)
        for name in a:
            layer.weight.data += scaling[name] * (b[name].weight @ a[name].weight)  # type: ignore[operator]
        return {"": layer}

    yield Guess("lora", f"lora ({', '.join(a)}) -> weight", edit)


def layer_scales(part: nn.Module) -> Iterator[Guess]:
    """LayerScale ls1 and ls2 of a block, into attn.proj and mlp.fc2."""
    for scale, at in (("ls1", "attn.proj"), ("ls2", "mlp.fc2")):
        gamma, linear = getattr(getattr(part, scale, None), "gamma", None), child_at(part, at)
        if not isinstance(gamma, Tensor) or not isinstance(linear, nn.Linear):
            continue

        def edit(scale: str = scale, at: str = at, gamma: Tensor = gamma, linear: nn.Linear = linear) -> New:
            folded = Affine.diagonal(gamma) @ Affine.linear(linear.weight, linear.bias)
            return {scale: nn.Identity(), at: _with(linear, folded)}

        yield Guess("layer scale", f"{scale} -> {at}", edit)


def batchnorms(part: nn.Module) -> Iterator[Guess]:
    """A BatchNorm right before a linear layer, in a Sequential or as norm1, norm2 of a block."""
    pairs = [("norm1", "attn.qkv"), ("norm2", "mlp.fc1"), ("norm", "fc1"), ("norm", "qkv")]
    if isinstance(part, nn.Sequential):
        names = [name for name, _ in part.named_children()]
        pairs = list(pairwise(names))
    for norm_at, linear_at in pairs:
        norm, linear = child_at(part, norm_at), child_at(part, linear_at)
        if not isinstance(norm, nn.BatchNorm1d) or not isinstance(linear, nn.Linear) or norm.running_var is None:
            continue

        def edit(
            norm_at: str = norm_at, linear_at: str = linear_at, norm: Any = norm, linear: nn.Linear = linear
        ) -> New:
            ones, zeros = torch.ones_like(norm.running_var), torch.zeros_like(norm.running_var)
            weight, bias = (ones, zeros) if norm.weight is None else (norm.weight, norm.bias)
            before = Affine.batchnorm(weight, bias, norm.running_mean, norm.running_var, norm.eps)
            folded = Affine.linear(linear.weight, linear.bias) @ before
            return {norm_at: nn.Identity(), linear_at: _with(linear, folded)}

        yield Guess("batchnorm", f"{norm_at} -> {linear_at}", edit)


RULES: tuple[Rule, ...] = (affine_mixer, adapter, layer_scales, batchnorms)


def _loaded(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    module = module.double()
    module.load_state_dict(tensors, strict=True)
    return module


def _with(layer: nn.Module, affine: Affine) -> nn.Module:
    """A copy of a layer or norm with another weight and bias, in the shape that the layer has."""
    new = copy.deepcopy(layer)
    assert isinstance(new.weight, Tensor)
    new.weight = nn.Parameter(affine.weight.detach().reshape(new.weight.shape))
    new.bias = nn.Parameter(affine.bias.detach())
    return new
