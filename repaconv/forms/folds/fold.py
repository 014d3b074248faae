"""The rewrites that fold a graph of any origin, in their order."""

from __future__ import annotations

from repaconv.forms.contract import Rewrite
from repaconv.forms.folds.affine_maps import AFFINE
from repaconv.forms.folds.branches import UNSTACK
from repaconv.forms.folds.convolutions import CONVOLUTION
from repaconv.forms.folds.joins import CHOOSE, JOIN
from repaconv.forms.tokens import READ_TOKENS

FOLDS: tuple[Rewrite, ...] = (CONVOLUTION, UNSTACK, AFFINE, JOIN, AFFINE, CHOOSE, AFFINE, READ_TOKENS)
