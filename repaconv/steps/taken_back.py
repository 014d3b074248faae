"""What stays of a fold: the rewrite that does most harm is taken back, until none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.artefacts import Change
from repaconv.folds.pads import POOL_PADDING
from repaconv.subjects.evaluated import Evaluated

if TYPE_CHECKING:
    import onnx

Refold = Callable[[tuple[str, ...]], tuple["onnx.ModelProto", Sequence[Change]]]
"""The fold without the rewrites of these names, as it is run."""


CURES = frozenset({POOL_PADDING.name})
"""Rewrites without which a graph comes out wrong: they stay, whatever they cost."""


class TakenBack(NamedTuple):
    """Names of rewrites, and what is told of them."""

    names: tuple[str, ...] = ()
    told: tuple[str, ...] = ()

    def with_(self, name: str, why: str) -> TakenBack:
        """One more."""
        return TakenBack((*self.names, name), (*self.told, f"{name}: reverted, because {why}"))


class Kept(NamedTuple):
    """What stays of a fold: its graph, what it did, and what of it was taken back."""

    graph: Evaluated
    changes: Sequence[Change]
    back: TakenBack = TakenBack()


class Judged(NamedTuple):
    """Of a fold: its rank among others, the least is best, and why it may not stay; empty where it may."""

    rank: Any
    why: str


def without_harm(fold: Kept, given: Evaluated, refold: Refold, judge: Callable[[Kept], Judged]) -> Kept:
    """The fold without what may not stay; the graph as given where nothing is left of it.

    Args:
        fold: All of it, but for what is taken back already.
        given: The graph as given.
        refold: Makes it without some of its rewrites.
        judge: Says whether one may stay.
    """
    judged = judge(fold)
    while judged.why and (names := _harmful(fold)):
        tries = [without(fold, name, refold, judged.why) for name in names]
        fold, judged = min(((one, judge(one)) for one in tries), key=lambda found: found[1].rank)
    return fold if fold.changes else fold._replace(graph=given)


def _harmful(fold: Kept) -> list[str]:
    """Names of what may be taken back."""
    return list(dict.fromkeys(change.rewrite for change in fold.changes if change.rewrite not in CURES))


def without(fold: Kept, name: str, refold: Refold, why: str) -> Kept:
    """The fold without one more rewrite; ``why`` it is taken back."""
    back = fold.back.with_(name, why)
    model, changes = refold(back.names)
    return Kept(Evaluated(model), changes, back)
