"""Folding inside a live module of the user's own: whatever in it has the shape of a known fold, and proves to be one.

What a module's class computes cannot be seen from its submodules' names. So every edit here is a guess that is run in
float64: first the part, on what it is called with in the whole and on random numbers of several sizes, then the whole
module, since its forward may read what was edited. Only what changes nothing is kept.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from repaconv.artefacts import NOTHING_TO_FOLD, FoldStep
from repaconv.errors import Refused
from repaconv.live.calls import Call, difference, in_float64, outputs, rounding, shaken, usable
from repaconv.live.changes import applied
from repaconv.live.guesses import RULES, Guess, Rule, idle_ffn
from repaconv.live.parts import New, child_at, joined, like, put, replaced, shared, watched
from repaconv.live.structure import fold_structure
from repaconv.live.whole import Whole

EXACT = 1e-12
ROUNDINGS = 16
"""So many times what a part makes of its inputs' last bits, a fold may be off on random numbers: it rounds elsewhere.
Where they are large, a softmax makes much of them."""
CHAOTIC = 1e-6
"""A part that makes more of them than this proves nothing there."""
# Scales and offsets of the random numbers on which a guess is tried besides: what a clamp hides
# shows where it is reached.
SPREAD = ((1.0, 0.0), (1e-2, 0.0), (30.0, 0.0), (1e3, 0.0), (1.0, 10.0), (1.0, -10.0))


@dataclass(frozen=True)
class Edit:
    """A guess that was proved at a part, and what it made, in float64."""

    name: str
    told: str
    new: New
    error: float


def fold_parts(
    module: nn.Module, method: str, example: Any = None, idle_ratio: float | None = None
) -> tuple[nn.Module, tuple[FoldStep, ...]]:
    """A folded copy in eval mode, a row of the certificate for every part, and one for the whole module.

    What is shared, hooked or read from outside is not folded; ``left`` of the last row says so. Where nothing folds,
    the copy is unchanged, and the row of the whole is the only one.

    Args:
        module: Not changed.
        method: One method's edits alone, or ``auto``.
        example: An input of the whole; see `Whole.of`.
        idle_ratio: Of channel-idle FFNs, where neither an attribute nor their statistics tell.

    Raises:
        Refused: If the module cannot be run.
    """
    own = in_float64(module)
    folding = _Folding(module, method, (partial(idle_ffn, idle_ratio=idle_ratio), *RULES))
    names = [name for name, part in own.named_modules() if any(folding.guesses(part))]
    whole = Whole.of(own, example, names)
    after, edits = folding.edited(own, whole, names)
    if edits and not whole.error(after) <= _allowed(edits):
        _require_the_same_twice(module, whole)
        after, edits = folding.edited(in_float64(module), whole, names, each=True)
    structured = (
        fold_structure(after, whole, _allowed(edits), shared(module))
        if method == "auto" and (edits or idle_ratio is None)
        else None
    )
    changes = structured.changes if structured else ()
    left = (*folding.left, *(structured.left if structured else ()))
    if not edits and not changes:
        step = FoldStep(module=".", folded=(NOTHING_TO_FOLD,), not_folded=left, max_rel_error=0.0)
        return copy.deepcopy(module).eval(), (step,)
    error = structured.error if structured else whole.error(after)
    folded = _copied(module, edits)
    for change in changes:
        folded = applied(folded, change)
    steps = [FoldStep(module=each.name or ".", folded=(each.told,), max_rel_error=each.error) for each in edits]
    steps += [FoldStep(module=each.at or ".", folded=(each.told,), max_rel_error=error) for each in changes]
    told = (f"the whole module before and after, on {len(whole.calls)} inputs",)
    return folded, (*steps, FoldStep(module=".", folded=told, not_folded=left, max_rel_error=error))


class _Folding:
    """The guesses of some rules, tried on a module."""

    def __init__(self, module: nn.Module, method: str, rules: tuple[Rule, ...]) -> None:
        self._method, self._rules, self._shared = method, rules, shared(module)
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
            if (part := child_at(root, name)) is None:  # went with a part that was folded before
                continue
            if (calls := whole.inside.get(name)) is None:
                self.left.append(f"{name} is not called when the whole is run")
                continue
            for guess in self.guesses(part):
                if (edit := _proved(part, name, guess, calls)) is None:
                    continue
                before = {at: part.get_submodule(at) for at in edit.new}
                why = self._untouchable(name, before)
                if not why:
                    root = replaced(root, name, edit.new)
                    if each and not (error := whole.error(root)) <= _allowed([*edits, edit]):
                        root = replaced(root, name, before)
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
            place = joined(name, at)
            if any(other == place or other.startswith(f"{place}.") or not place for other in self._shared):
                return f"{place or 'it'} or what it holds is shared"
            if any(watched(part) for part in child.modules()):
                return f"{place or 'it'} has a hook, a parametrization or a forward of its own"
        return ""


def _proved(part: nn.Module, name: str, guess: Guess, calls: tuple[Call, ...]) -> Edit | None:
    """The edit, if the part computes the same with it: on what it is called with, and on random numbers of any size."""
    try:
        new = guess.edit()
        after = replaced(copy.deepcopy(part), "", new)
        errors = [difference(outputs(after, call), outputs(part, call)) for call in calls]
        errors += [_error(part, after, shaken(calls[0], 0, *spread)) for spread in SPREAD]
    except Exception:  # not the shape that it looked like; the user's code may raise anything
        return None
    return Edit(name, guess.told, new, max(errors)) if max(errors) <= EXACT else None


def _error(part: nn.Module, after: nn.Module, call: Call) -> float:
    """How far two parts are from each other on a call; 0 where the first does not take it, or rounding explains it."""
    try:
        right = outputs(part, call)
    except Exception:
        return 0.0
    if not usable(right):
        return 0.0
    error = difference(outputs(after, call), right)
    if error <= EXACT:
        return error
    own = rounding(part, call, right)
    return 0.0 if own > CHAOTIC or error <= ROUNDINGS * own else error


def _require_the_same_twice(module: nn.Module, whole: Whole) -> None:
    if not whole.error(in_float64(module)) <= EXACT:
        raise Refused(
            f"this {type(module).__name__} gives another output when it is run again, so it cannot be verified.",
            hint="Fold a module whose output depends on its input only.",
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
            place = joined(edit.name, at)
            folded = put(folded, place, like(new, module, place))
    return folded
