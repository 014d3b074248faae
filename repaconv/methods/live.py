"""Folding inside a live module of the user's own: whatever in it has the shape of a known fold, and proves to be one.

What a module's class computes cannot be seen from its submodules' names. So every edit here is a guess that is run in
float64: first the part, on what it is called with in the whole and on random numbers, then the whole module, since its
forward may read what was edited. Only what changes nothing is kept.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from repaconv.affine import Affine
from repaconv.artefact import FoldStep
from repaconv.backbones.parts import IdleConvMlp
from repaconv.backbones.tokens import IdleMlp, IdleMlpSpec
from repaconv.errors import Refused
from repaconv.methods.plain import named
from repaconv.methods.repavit import fold_ffn
from repaconv.methods.repavit_activity import ResidualTest
from repaconv.methods.whole import Call, Outputs, Whole, difference, in_float64, outputs, shaken, usable

EXACT = 1e-12

New = Mapping[str, nn.Module]
"""What stands in place of a part's children afterwards, by name; of the part itself where the name is empty."""


@dataclass(frozen=True)
class Guess:
    """One edit that might be exact: of which method, what it does, and what makes its new modules."""

    method: str
    told: str
    edit: Callable[[], New]


@dataclass(frozen=True)
class Edit:
    """A guess that was proved at a part, and what it made, in float64."""

    name: str
    told: str
    new: New
    error: float


Rule = Callable[[nn.Module], Iterator[Guess]]


def fold_parts(
    module: nn.Module, method: str, example: Any = None, idle_ratio: float | None = None
) -> tuple[nn.Module, tuple[FoldStep, ...]]:
    """A folded copy in eval mode, a row of the certificate for every part, and one for the whole module.

    What is shared, hooked or read from outside is not folded; ``left`` of the last row says so.

    Args:
        module: Not changed.
        method: One method's edits alone, or ``auto``.
        example: An input of the whole; see `Whole.of`.
        idle_ratio: Of channel-idle FFNs, where neither an attribute nor their statistics tell.

    Raises:
        Refused: If nothing in it folds, or the module cannot be run.
    """
    own = in_float64(module)
    folding = _Folding(module, method, (partial(idle_ffn, idle_ratio=idle_ratio), *RULES))
    names = [name for name, part in own.named_modules() if any(folding.guesses(part))]
    if not names:
        raise Refused("no part of it has the shape of a known fold.", code="live.nothing")
    whole = Whole.of(own, example, names)
    after, edits = folding.edited(own, whole, names)
    if not (error := whole.error(after)) <= _allowed(edits):
        _require_the_same_twice(module, whole)
        after, edits = folding.edited(in_float64(module), whole, names, each=True)
        error = whole.error(after)
    if not edits:
        raise Refused("; ".join(folding.left) or "no part proves to be a known fold.", code="live.nothing")
    steps = [FoldStep(module=each.name or ".", folded=(each.told,), max_rel_error=each.error) for each in edits]
    told = (f"the whole module before and after, on {len(whole.calls)} inputs",)
    return _copied(module, edits), (
        *steps,
        FoldStep(module=".", folded=told, left=tuple(folding.left), max_rel_error=error),
    )


class _Folding:
    """The guesses of some rules, tried on a module."""

    def __init__(self, module: nn.Module, method: str, rules: tuple[Rule, ...]) -> None:
        self._method, self._rules, self._shared = method, rules, _shared(module)
        self.left: list[str] = []

    def guesses(self, part: nn.Module) -> Iterator[Guess]:
        for rule in self._rules:
            yield from (guess for guess in rule(part) if self._method in ("auto", guess.method))

    def edited(
        self, root: nn.Module, whole: Whole, names: list[str], *, each: bool = False
    ) -> tuple[nn.Module, list[Edit]]:
        """All edits that are exact, made in the module; with ``each`` the whole is run behind every one of them."""
        edits: list[Edit] = []
        self.left = []
        for name in names:
            if (part := _at(root, name)) is None:  # went with a part that was folded before
                continue
            if (call := whole.inside.get(name)) is None:
                self.left.append(f"{name} is not called when the whole is run")
                continue
            for guess in self.guesses(part):
                if (edit := _proved(part, name, guess, call)) is None:
                    continue
                before = {at: part.get_submodule(at) for at in edit.new}
                why = self._untouchable(name, before)
                if not why:
                    root = _replaced(root, name, edit.new)
                    if each and not (error := whole.error(root)) <= _allowed([*edits, edit]):
                        root = _replaced(root, name, before)
                        why = f"something outside reads it, the whole is off by {error:.1e}"
                if why:
                    self.left.append(f"{name or 'it'}, {guess.told}: {why}")
                    continue
                edits.append(edit)
                if "" in edit.new:
                    break
        return root, edits

    def _untouchable(self, name: str, old: New) -> str:
        """Why these children may not be replaced; empty if they may."""
        for at, child in old.items():
            place = _joined(name, at)
            if any(other == place or other.startswith(f"{place}.") or not place for other in self._shared):
                return f"{place or 'it'} or what it holds is shared"
            if any(watched(part) for part in child.modules()):
                return f"{place or 'it'} has a hook, a parametrization or a forward of its own"
        return ""


def _shared(module: nn.Module) -> set[str]:
    """Names of modules, parameters and buffers that are reached by another name, too, or lie in the same memory."""
    places: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, part in module.named_modules(remove_duplicate=False):
        places["module", id(part)].append(name)
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        if tensor.numel():
            places["tensor", tensor.untyped_storage().data_ptr()].append(name)
    return {name for names in places.values() if len(names) > 1 for name in names}


def watched(part: nn.Module) -> bool:
    """Whether something was attached to one module, which another in its place would not have."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(part, kind, None) for kind in kinds) or "forward" in vars(part) or is_parametrized(part)


def _proved(part: nn.Module, name: str, guess: Guess, call: Call) -> Edit | None:
    """The edit, if the part computes the same with it: on what it is called with, and on random numbers like it."""
    try:
        new = guess.edit()
        after = _replaced(copy.deepcopy(part), "", new)
        error = max(difference(outputs(after, each), right) for each, right in _answers(part, call))
    except Exception:  # not the shape that it looked like; the user's code may raise anything
        return None
    return Edit(name, guess.told, new, error) if error <= EXACT else None


def _answers(part: nn.Module, call: Call) -> Iterator[tuple[Call, Outputs]]:
    """What the part answers to its own call, and to random numbers where it takes those."""
    yield call, outputs(part, call)
    other = shaken(call)
    with suppress(Exception):
        if usable(answer := outputs(part, other)):
            yield other, answer


def _require_the_same_twice(module: nn.Module, whole: Whole) -> None:
    if not whole.error(in_float64(module)) <= EXACT:
        raise Refused(
            f"this {type(module).__name__} answers otherwise when it is run again, so nothing could be proved of it.",
            hint="Fold what does not change with every call.",
            code="live.changing",
        )


def _allowed(edits: list[Edit]) -> float:
    """For the whole: rounding errors add up like a random walk."""
    return EXACT * math.sqrt(max(1.0, len(edits) / 12))


def _copied(module: nn.Module, edits: list[Edit]) -> nn.Module:
    """The user's module with the edits, in eval mode; what is new is of the dtype and on the device of the old."""
    folded = copy.deepcopy(module).eval()
    for edit in edits:
        for at, new in edit.new.items():
            place = _joined(edit.name, at)
            folded = _put(folded, place, _like(new, module, place))
    return folded


def _like(new: nn.Module, module: nn.Module, place: str) -> nn.Module:
    while True:
        old = _at(module, place)
        weights = [weight for weight in old.parameters() if weight.is_floating_point()] if old is not None else []
        if weights:
            new = new.to(device=weights[0].device, dtype=weights[0].dtype)
            return new.requires_grad_(any(weight.requires_grad for weight in weights)).eval()
        if not place:
            return new.eval()
        place = place.rpartition(".")[0]


def _at(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _joined(name: str, at: str) -> str:
    return ".".join(filter(None, (name, at)))


def _replaced(root: nn.Module, name: str, new: New) -> nn.Module:
    for at, part in new.items():
        root = _put(root, _joined(name, at), part)
    return root


def _put(root: nn.Module, name: str, part: nn.Module) -> nn.Module:
    if not name:
        return part
    parent, _, last = name.rpartition(".")
    setattr(root.get_submodule(parent), last, part)
    return root


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
    asked = () if idle_ratio is None else (math.ceil(hidden * (1 - idle_ratio)), int(hidden * (1 - idle_ratio)))
    for active in dict.fromkeys(a for a in (*asked, said, test.active) if isinstance(a, int) and 0 <= a < hidden):
        for shortcut in (True, False):
            told = f"{hidden - active} idle channels of {hidden}, both BatchNorms" + ", the shortcut" * shortcut

            def edit(active: int = active, shortcut: bool = shortcut) -> New:
                parts = fold_ffn(weights, active, eps, Affine.eye(width))
                if not shortcut:
                    parts["idle"] = parts["idle"] - Affine.eye(width)
                tensors = {n: w for n, w in named(parts, without_bias=("fc2",)).items() if w.numel()}
                kind = IdleConvMlp(width, active, "GELU") if conv else IdleMlp(width, IdleMlpSpec(active))
                shaped = {n: w[:, :, None, None] if conv and w.ndim == 2 else w for n, w in tensors.items()}
                return {"": _loaded(kind, shaped)}

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
        gamma, linear = getattr(getattr(part, scale, None), "gamma", None), _at(part, at)
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
        norm, linear = _at(part, norm_at), _at(part, linear_at)
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
