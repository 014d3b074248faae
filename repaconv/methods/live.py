"""Folding inside a live module of the user's own: whatever in it has the shape of a known fold, and proves to be one.

What a module's class computes cannot be seen from its submodules' names. So every edit here is a guess that is run:
the part and its folded copy get the same random input in float64, and only an edit that changes nothing is kept.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from repaconv.affine import Affine
from repaconv.artefact import FoldStep
from repaconv.backbones.parts import IdleConvMlp
from repaconv.backbones.tokens import IdleMlp, IdleMlpSpec
from repaconv.methods.certificate import max_rel_error
from repaconv.methods.plain import named
from repaconv.methods.repavit import fold_ffn
from repaconv.methods.repavit_activity import ResidualTest

EXACT = 1e-12

Edit = Callable[[nn.Module], nn.Module]
"""Makes the folded part of a float64 copy of the part, which it may change."""


@dataclass(frozen=True)
class Guess:
    """One edit that might be exact: of which method, what it does, and to what inputs it is put.

    ``replaces`` says that the part is another module afterwards, so that no other guess is for it.
    """

    method: str
    told: str
    edit: Edit
    shapes: tuple[tuple[int, ...], ...]
    replaces: bool = False


Rule = Callable[[nn.Module], Iterator[Guess]]


def fold_parts(
    module: nn.Module, method: str, idle_ratio: float | None = None
) -> tuple[nn.Module, tuple[FoldStep, ...]]:
    """A folded copy in eval mode, and a row of the certificate for every part.

    Args:
        module: Not changed.
        method: One method's edits alone, or ``auto``.
        idle_ratio: Of channel-idle FFNs, where neither an attribute nor their statistics tell.
    """
    folded = copy.deepcopy(module).eval()
    steps: list[FoldStep] = []
    rules: tuple[Rule, ...] = (partial(idle_ffn, idle_ratio=idle_ratio), *RULES)
    for name in [name for name, _ in folded.named_modules()]:
        done: list[str] = []
        for rule in rules:
            part = _at(folded, name)
            if part is None:  # went with a part that was folded before
                break
            for guess in rule(part):
                if method not in ("auto", guess.method) or guess.told in done:
                    continue
                proved = _proved(part, guess)
                if proved is None:
                    continue
                error, part = proved
                folded = _put(folded, name, part)
                steps.append(FoldStep(module=name or ".", folded=(guess.told,), max_rel_error=error))
                done.append(guess.told)
                if guess.replaces:
                    break
    return folded, tuple(steps)


def _at(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _put(root: nn.Module, name: str, part: nn.Module) -> nn.Module:
    if not name:
        return part
    parent, _, last = name.rpartition(".")
    setattr(root.get_submodule(parent), last, part)
    return root


@torch.no_grad()
def _proved(part: nn.Module, guess: Guess) -> tuple[float, nn.Module] | None:
    """The error in float64 and the folded part in the part's own dtype, if the edit is exact."""
    first = next(part.parameters(), None)
    dtype, device = (first.dtype, first.device) if first is not None else (torch.float32, torch.device("cpu"))
    before = copy.deepcopy(part).double().cpu().eval()
    try:
        after = guess.edit(copy.deepcopy(before)).eval()
    except (AttributeError, KeyError, ValueError, RuntimeError, TypeError):  # not the shape that it looked like
        return None
    for shape in guess.shapes:
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        try:
            expected, found = before(x), after(x)
        except Exception:  # an input of another shape is wanted: the user's code may raise anything
            continue
        if isinstance(expected, Tensor) and isinstance(found, Tensor) and expected.shape == found.shape:
            error = max_rel_error(found, expected)
            return (error, after.to(device=device, dtype=dtype)) if error <= EXACT else None
    return None


# --- the rules --------------------------------------------------------------------------------------------


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
    shapes = ((2, width, 4, 5),) if conv else ((2, 5, width),)
    asked = () if idle_ratio is None else (math.ceil(hidden * (1 - idle_ratio)), int(hidden * (1 - idle_ratio)))
    for active in dict.fromkeys(a for a in (*asked, said, test.active) if isinstance(a, int) and 0 <= a < hidden):
        for shortcut in (True, False):
            told = f"{hidden - active} idle channels of {hidden}, both BatchNorms" + ", the shortcut" * shortcut

            def edit(part: nn.Module, active: int = active, shortcut: bool = shortcut) -> nn.Module:
                parts = fold_ffn(part.state_dict(), active, eps, Affine.eye(width))
                if not shortcut:
                    parts["idle"] = parts["idle"] - Affine.eye(width)
                tensors = {n: w for n, w in named(parts, without_bias=("fc2",)).items() if w.numel()}
                kind = IdleConvMlp(width, active, "GELU") if conv else IdleMlp(width, IdleMlpSpec(active))
                return _loaded(
                    kind, {n: w[:, :, None, None] if conv and w.ndim == 2 else w for n, w in tensors.items()}
                )

            yield Guess("repavit", told, edit, shapes, replaces=True)


def affine_mixer(part: nn.Module) -> Iterator[Guess]:
    """RIFormer: norm1, then token_mixer.affine minus the identity; the norm takes both."""
    affine = getattr(getattr(part, "token_mixer", None), "affine", None)
    norm = getattr(part, "norm1", None)
    if not isinstance(affine, nn.Conv2d) or getattr(norm, "weight", None) is None:
        return

    def edit(part: nn.Module) -> nn.Module:
        mixer = Affine.depthwise1x1(part.token_mixer.affine.weight, part.token_mixer.affine.bias)  # type: ignore[union-attr,arg-type]
        before = Affine.diagonal(part.norm1.weight, part.norm1.bias)  # type: ignore[union-attr,arg-type]
        folded = (mixer - Affine.eye(mixer.out_width)) @ before
        _set(part.norm1, folded)  # type: ignore[arg-type]
        part.token_mixer = nn.Identity()
        return part

    yield Guess("riformer", "token_mixer.affine - identity -> norm1", edit, ((2, affine.out_channels, 7, 5),))


def adapter(part: nn.Module) -> Iterator[Guess]:
    """LoRA as PEFT's layers hold it (base_layer, lora_A, lora_B, scaling)."""
    base = getattr(part, "base_layer", None)
    a, b, scaling = (getattr(part, name, None) for name in ("lora_A", "lora_B", "scaling"))
    if not isinstance(base, nn.Linear) or not isinstance(a, nn.ModuleDict) or not isinstance(b, nn.ModuleDict):
        return
    if not isinstance(scaling, dict) or set(a) != set(b) or not set(a) <= set(scaling):
        return

    def edit(part: nn.Module) -> nn.Module:
        layer = copy.deepcopy(part.base_layer)
        for name in part.lora_A:  # type: ignore[union-attr]
            product = part.lora_B[name].weight @ part.lora_A[name].weight  # type: ignore[index,union-attr]
            layer.weight.data += part.scaling[name] * product  # type: ignore[index,union-attr]
        assert isinstance(layer, nn.Linear)
        return layer

    yield Guess("lora", f"lora ({', '.join(a)}) -> weight", edit, ((5, base.in_features),), replaces=True)


def layer_scales(part: nn.Module) -> Iterator[Guess]:
    """LayerScale ls1 and ls2 of a block, into attn.proj and mlp.fc2."""
    for scale, at in (("ls1", "attn.proj"), ("ls2", "mlp.fc2")):
        gamma, linear = getattr(getattr(part, scale, None), "gamma", None), _at(part, at)
        if not isinstance(gamma, Tensor) or not isinstance(linear, nn.Linear):
            continue

        def edit(part: nn.Module, scale: str = scale, at: str = at) -> nn.Module:
            layer = part.get_submodule(at)
            gamma = getattr(part, scale).gamma
            _set(layer, Affine.diagonal(gamma) @ Affine.linear(layer.weight, layer.bias))  # type: ignore[arg-type]
            setattr(part, scale, nn.Identity())
            return part

        yield Guess("layer scale", f"{scale} -> {at}", edit, ((2, 5, linear.out_features),))


def batchnorms(part: nn.Module) -> Iterator[Guess]:
    """A BatchNorm right before a linear layer, in a Sequential or as norm1, norm2 of a block."""
    pairs = [("norm1", "attn.qkv"), ("norm2", "mlp.fc1"), ("norm", "fc1"), ("norm", "qkv")]
    if isinstance(part, nn.Sequential):
        names = [name for name, _ in part.named_children()]
        pairs = list(pairwise(names))
    for norm_at, linear_at in pairs:
        norm, linear = _at(part, norm_at), _at(part, linear_at)
        if not isinstance(norm, nn.BatchNorm1d) or not isinstance(linear, nn.Linear) or norm.running_var is None:
            continue

        def edit(part: nn.Module, norm_at: str = norm_at, linear_at: str = linear_at) -> nn.Module:
            norm, linear = part.get_submodule(norm_at), part.get_submodule(linear_at)
            assert isinstance(norm, nn.BatchNorm1d)
            assert norm.running_mean is not None
            assert norm.running_var is not None
            ones, zeros = torch.ones_like(norm.running_var), torch.zeros_like(norm.running_var)
            weight, bias = (ones, zeros) if norm.weight is None else (norm.weight, norm.bias)
            before = Affine.batchnorm(weight, bias, norm.running_mean, norm.running_var, norm.eps)
            folded = Affine.linear(linear.weight, linear.bias) @ before  # type: ignore[arg-type]
            new = _loaded(nn.Linear(folded.in_width, folded.out_width), {"weight": folded.weight, "bias": folded.bias})
            return _put(_put(part, norm_at, nn.Identity()), linear_at, new)

        width = linear.in_features
        yield Guess("batchnorm", f"{norm_at} -> {linear_at}", edit, ((2, 5, width), (5, width), (2, width, width)))


RULES: tuple[Rule, ...] = (affine_mixer, adapter, layer_scales, batchnorms)


def _loaded(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    module = module.double()
    module.load_state_dict(tensors, strict=True)
    return module


def _set(layer: nn.Module, affine: Affine) -> None:
    """Weight and bias of a layer or norm, in the shape that the layer has."""
    assert isinstance(layer.weight, Tensor)
    layer.weight.data = affine.weight.view_as(layer.weight)
    layer.bias = nn.Parameter(affine.bias)
