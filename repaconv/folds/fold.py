"""The rewrites that fold a graph of any origin, in their order."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from repaconv.artefacts import Change
from repaconv.folds.affine_maps import AFFINE
from repaconv.folds.branches import UNSTACK
from repaconv.folds.cheapest import CHOOSE
from repaconv.folds.convolutions import CONVOLUTION
from repaconv.folds.finish import FINISH
from repaconv.folds.joins import JOIN
from repaconv.folds.pads import POOL_PADDING
from repaconv.folds.sharing import KEEP_SHARED, UNSHARE
from repaconv.folds.tokens import READ_TOKENS
from repaconv.graphs.contract import Rewrite
from repaconv.graphs.graph import tidy

if TYPE_CHECKING:
    import onnx_ir as ir


def _then(first: Rewrite, second: Rewrite) -> Rewrite:
    """The first, and where it found something the second."""

    def apply(model: ir.Model) -> Iterator[Change]:
        made = list(first.apply(model))
        yield from made
        if made:
            tidy(model)
            yield from second.apply(model)

    return replace(first, apply=apply)


def without(names: Collection[str]) -> tuple[Rewrite, ...]:
    """All but some of the rewrites; those that look for what another makes go with it, and `UNSHARE` is for none."""
    left_out = {*names, *((JOIN.name, CHOOSE.name) if AFFINE.name in names else ())}
    kept = tuple(fold for fold in FOLDS if fold.name not in left_out)
    return (KEEP_SHARED, *kept) if UNSHARE in left_out else kept


FOLDS: tuple[Rewrite, ...] = (
    CONVOLUTION,
    UNSTACK,
    AFFINE,
    _then(JOIN, AFFINE),
    _then(CHOOSE, AFFINE),
    READ_TOKENS,
    POOL_PADDING,
    FINISH,
)
