"""Fold the submodules of a user's own module that match a known method, and verify each fold in float64.

The rules here are for folds that a trace does not show to be linear: channel-idle FFNs (RePaViT), LoRA adapters of
PEFT, and RIFormer's token mixer, which goes into its norm. `repaconv.torch_fold.structural_fold` has all other folds.
The names of its submodules do not show what a class computes. So every edit is a guess that is tested in float64: first
on the submodule, with the inputs that it gets in the whole module and with random inputs of several scales, then on
the whole module, since its forward may read what was edited. Only an edit that changes no output is kept.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.shared_layers import IdleConvMlp
from repaconv.backbones.vit_layers import IdleMlp, IdleMlpSpec
from repaconv.core.errors import Refused
from repaconv.methods.repavit.active_channels import ResidualTest
from repaconv.methods.repavit.paper_equations import ffn_weights, fold_ffn
from repaconv.results import NOTHING_TO_FOLD, FoldStep
from repaconv.torch_fold.float64_module_calls import (
    KEEPS_STATE,
    Call,
    in_float64,
    outputs,
    usable,
    with_random_inputs,
)
from repaconv.torch_fold.module_changes import with_change
from repaconv.torch_fold.structural_fold import fold_structure
from repaconv.torch_fold.submodules import (
    New,
    child_at,
    dotted_name,
    dtype_at,
    is_hooked,
    like,
    put,
    replaced,
    shared,
    too_large,
)
from repaconv.torch_fold.whole_module_check import Equality, Whole, compare, module_rounding
from repaconv.verification.tolerances import FLOAT64

# --- Rules: which submodules look like a known fold, by the names and types of their children.


@dataclass(frozen=True)
class Guess:
    """An edit of a submodule that may be exact.

    Attributes:
        method: The method that it belongs to.
        description: A description of the edit.
        edit: A function that makes the new submodules.
    """

    method: str
    description: str
    edit: Callable[[], New]


Rule = Callable[[nn.Module], Iterator[Guess]]


def idle_ffn(part: nn.Module, idle_ratio: float | None = None) -> Iterator[Guess]:
    """Guess the fold of a RePaViT FFN: norm1, fc1, norm2, fc2 with BatchNorms; its shortcut is inside or outside."""
    names = ("norm1", "fc1", "norm2", "fc2")
    children = [getattr(part, name, None) for name in names]
    norms = (nn.BatchNorm1d, nn.BatchNorm2d)
    if not (isinstance(children[0], norms) and isinstance(children[2], norms)):
        return
    if not all(isinstance(child, nn.Linear | nn.Conv2d) for child in (children[1], children[3])):
        return
    weights = part.state_dict()
    hidden, width = weights["fc1.weight"].shape[:2]
    if (len(weights["norm1.running_mean"]), len(weights["norm2.running_mean"])) != (width, hidden):
        return  # norms after the layers, as in EfficientFormer
    conv, eps = weights["fc1.weight"].ndim == 4, children[0].eps
    said = getattr(part, "act_channels", None)
    trained = int(weights.get("norm2.num_batches_tracked", torch.tensor(1))) > 0
    test = ResidualTest.of({name: w.double().cpu() for name, w in weights.items()}, eps, trained=trained)
    asked = () if idle_ratio is None else (math.ceil(hidden * (1 - idle_ratio)), int(hidden * (1 - idle_ratio)))
    for active in dict.fromkeys(a for a in (*asked, said, test.active) if isinstance(a, int) and 0 <= a < hidden):
        for shortcut in (True, False):
            description = f"{hidden - active} idle channels of {hidden}, both BatchNorms" + ", the shortcut" * shortcut

            def edit(active: int = active, shortcut: bool = shortcut) -> New:
                parts = fold_ffn(weights, active, eps, Affine.eye(width))
                if not shortcut:
                    parts["idle"] = parts["idle"] - Affine.eye(width)
                kind = IdleConvMlp(width, active, "GELU") if conv else IdleMlp(width, IdleMlpSpec(active))
                return {"": _loaded(kind, ffn_weights(parts, conv=conv))}

            yield Guess("repavit", description, edit)


def affine_mixer(part: nn.Module) -> Iterator[Guess]:
    """Guess the fold of a RIFormer token mixer: norm1 absorbs ``token_mixer.affine`` minus the identity."""
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
    """Guess the merge of a LoRA adapter in a PEFT layer (base_layer, lora_A, lora_B, scaling)."""
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


RULES: tuple[Rule, ...] = (affine_mixer, adapter)


def _loaded(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    module = module.double()
    module.load_state_dict(tensors, strict=True)
    return module


def _with(layer: nn.Module, affine: Affine) -> nn.Module:
    """A copy of a layer or norm with a new weight and bias, in the shape that the layer has."""
    new = copy.deepcopy(layer)
    assert isinstance(new.weight, Tensor)
    new.weight = nn.Parameter(affine.weight.detach().reshape(new.weight.shape))
    new.bias = nn.Parameter(affine.bias.detach())
    return new


# --- Testing the guesses, and folding the module.

# Scales and offsets of the random inputs on which a guess is tested as well: an effect that a clamp hides shows only
# for inputs that reach it.
SPREAD = ((1.0, 0.0), (1e-2, 0.0), (30.0, 0.0), (1e3, 0.0), (1.0, 10.0), (1.0, -10.0))


@dataclass(frozen=True)
class Edit:
    """A guess that was verified on its submodule.

    Attributes:
        name: The name of the submodule.
        description: A description of the edit.
        new: The new submodules, in float64.
        error: The largest relative error on the submodule.
    """

    name: str
    description: str
    new: New
    error: float


def fold_parts(
    module: nn.Module, method: str, example: Any = None, idle_ratio: float | None = None
) -> tuple[nn.Module, tuple[FoldStep, ...]]:
    """Fold the submodules of a module that match a known method, and its linear structure.

    Submodules that are shared, hooked or read from outside are not folded; ``not_folded`` of the last step lists them.
    If nothing folds, the copy is unchanged, and there is one step for the whole module.

    Args:
        module: The module; it is not changed.
        method: The method whose folds to apply, or ``auto`` for all.
        example: An input of the module; see `Whole.of`.
        idle_ratio: The share of idle channels in FFNs, for modules whose attributes and statistics do not show it.

    Returns:
        A folded copy in eval mode, and the fold steps: one per folded submodule, and one for the whole module.

    Raises:
        Refused: If the module cannot be run.
    """
    own = in_float64(module)
    folding = _Folding(module, method, (partial(idle_ffn, idle_ratio=idle_ratio), *RULES))
    names = [name for name, part in own.named_modules() if any(folding.guesses(part))]
    whole = Whole.of(partial(in_float64, module), example, names)
    after, edits = folding.edited(own, whole, names)
    if edits and not whole.compare(after, len(edits)).passed:
        _require_the_same_twice(module, whole)
        after, edits = folding.edited(in_float64(module), whole, names, each=True)
    if edits and whole.keeps_state():
        folding.not_folded += [f"{each.name or 'it'}, {each.description}: {KEEPS_STATE}" for each in edits]
        after, edits = in_float64(module), []
    structured = (
        fold_structure(after, whole, len(edits), module) if method == "auto" and (edits or idle_ratio is None) else None
    )
    changes = structured.changes if structured else ()
    not_folded = (*folding.not_folded, *(structured.not_folded if structured else ()))
    if not edits and not changes:
        step = FoldStep(module=".", folded=(NOTHING_TO_FOLD,), not_folded=not_folded, max_rel_error=0.0)
        return copy.deepcopy(module).eval(), (step,)
    found = (structured and structured.found) or whole.compare(after, len(edits))
    folded = _copied(module, edits)
    for change in changes:
        folded = with_change(folded, change)
    steps = [FoldStep(module=each.name or ".", folded=(each.description,), max_rel_error=each.error) for each in edits]
    error, sizes = found.error, ", ".join(dict.fromkeys(found.inputs))
    steps += [FoldStep(module=each.at or ".", folded=(each.description,), max_rel_error=error) for each in changes]
    description = (f"the whole module before and after, on {len(found.inputs)} inputs of the sizes {sizes}",)
    return folded, (*steps, FoldStep(module=".", folded=description, not_folded=not_folded, max_rel_error=error))


class _Folding:
    """Applies the guesses of some rules to a module."""

    def __init__(self, module: nn.Module, method: str, rules: tuple[Rule, ...]) -> None:
        self._module, self._method, self._rules, self._shared = module, method, rules, shared(module)
        self.not_folded: list[str] = []

    def guesses(self, part: nn.Module) -> Iterator[Guess]:
        for rule in self._rules:
            yield from (guess for guess in rule(part) if self._method in ("auto", guess.method))

    def edited(
        self, root: nn.Module, whole: Whole, names: list[str], *, each: bool = False
    ) -> tuple[nn.Module, list[Edit]]:
        """Apply all edits that are exact, in place; with ``each``, the whole module is tested after every edit."""
        edits: list[Edit] = []
        self.not_folded = []
        for name in names:
            if (part := child_at(root, name)) is None:  # removed with a submodule that was folded before
                continue
            if (calls := whole.inside.get(name)) is None:
                self.not_folded.append(f"{name} is not called when the whole is run")
                continue
            for guess in self.guesses(part):
                if (edit := _verified(part, name, guess, calls)) is None:
                    continue
                before = {at: part.get_submodule(at) for at in edit.new}
                typed = (
                    (new.parameters(), dtype_at(self._module, dotted_name(name, at))) for at, new in edit.new.items()
                )
                why = self._untouchable(name, before) or next(filter(None, (too_large(*each) for each in typed)), "")
                if not why:
                    root = replaced(root, name, edit.new)
                    if each and not (found := whole.compare(root, len(edits) + 1)).passed:
                        root = replaced(root, name, before)
                        where = f" on inputs {found.only}" if found.only else ""
                        why = f"something outside reads it, the whole is off by {found.error:.1e}{where}"
                if why:
                    self.not_folded.append(f"{name or 'it'}, {guess.description}: {why}")
                    continue
                edits.append(edit)
                if "" in edit.new:
                    break
        return root, edits

    def _untouchable(self, name: str, old: New) -> str:
        """Why these children may not be replaced; empty if they may be."""
        for at, child in old.items():
            place = dotted_name(name, at)
            if any(other == place or other.startswith(f"{place}.") or not place for other in self._shared):
                return f"{place or 'it'} or what it holds is shared"
            if any(is_hooked(part) for part in child.modules()):
                return f"{place or 'it'} has a hook, a parametrization or a forward of its own"
        return ""


def _verified(part: nn.Module, name: str, guess: Guess, calls: tuple[Call, ...]) -> Edit | None:
    """The edit, if the submodule computes the same with it, on its inputs in the whole module and on random inputs."""
    try:
        new = guess.edit()
        after = replaced(copy.deepcopy(part), "", new)
        found = [_compared(part, after, call) for call in calls]
        if not all(each.passed for each in found):
            return None
        found += [_compared_if_it_runs(part, after, with_random_inputs(calls[0], 0, *spread)) for spread in SPREAD]
    except Exception:  # the submodule is another one than it looked like; the user's code may raise anything
        return None
    if any(each.verdict == "failed" for each in found):
        return None
    return Edit(name, guess.description, new, max(each.error for each in found if each.passed))


def _compared(part: nn.Module, after: nn.Module, call: Call) -> Equality:
    right = outputs(part, call)
    return compare(outputs(after, call), right, FLOAT64, module_rounding(lambda: part, call, right))


def _compared_if_it_runs(part: nn.Module, after: nn.Module, call: Call) -> Equality:
    """Compare two modules on a call; nothing is verified if the first module cannot run it."""
    try:
        right = outputs(part, call)
    except Exception:
        return Equality("not verified", 0.0)
    return _compared(part, after, call) if usable(right) else Equality("not verified", 0.0)


def _require_the_same_twice(module: nn.Module, whole: Whole) -> None:
    if not whole.compare(in_float64(module)).passed:
        raise Refused(
            f"this {type(module).__name__} gives another output when it is run again, so it cannot be verified.",
            hint="Fold a module whose output depends on its input only.",
            code="live.changing",
        )


def _copied(module: nn.Module, edits: list[Edit]) -> nn.Module:
    """A copy of the user's module with the edits, in eval mode; new submodules have the old ones' dtype and device."""
    folded = copy.deepcopy(module).eval()
    for edit in edits:
        for at, new in edit.new.items():
            place = dotted_name(edit.name, at)
            folded = put(folded, place, like(new, module, place))
    return folded
