"""The rewrites that fold a graph of any origin, in their order."""

from __future__ import annotations

from repaconv.forms.affine_maps import AFFINE
from repaconv.forms.branches import UNSTACK
from repaconv.forms.contract import Rewrite
from repaconv.forms.convolutions import CONVOLUTION
from repaconv.forms.joins import CHOOSE, JOIN
from repaconv.forms.tokens import READ_TOKENS

FOLDS: tuple[Rewrite, ...] = (CONVOLUTION, UNSTACK, AFFINE, JOIN, AFFINE, CHOOSE, AFFINE, READ_TOKENS)
