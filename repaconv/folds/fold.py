"""The rewrites that fold a graph of any origin, in their order."""

from __future__ import annotations

from repaconv.folds.affine_maps import AFFINE
from repaconv.folds.branches import UNSTACK
from repaconv.folds.cheapest import CHOOSE
from repaconv.folds.convolutions import CONVOLUTION
from repaconv.folds.finish import FINISH
from repaconv.folds.joins import JOIN
from repaconv.folds.tokens import READ_TOKENS
from repaconv.graphs.contract import Rewrite

FOLDS: tuple[Rewrite, ...] = (CONVOLUTION, UNSTACK, AFFINE, JOIN, AFFINE, CHOOSE, AFFINE, READ_TOKENS, FINISH)
