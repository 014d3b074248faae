"""The rewrites that fold an arbitrary ONNX graph, in the order in which they run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from repaconv.graph.models_in_onnx_ir import tidy
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.results import Change
from repaconv.rewrites.fold.attention_head_joining import CHOOSE, JOIN
from repaconv.rewrites.fold.batch_norm_operator import BATCH_NORM
from repaconv.rewrites.fold.chains_of_constants import CONSTANTS
from repaconv.rewrites.fold.clip_operator import CLIP
from repaconv.rewrites.fold.common_factors_of_sums import COMMON_FACTOR
from repaconv.rewrites.fold.computed_shapes import SHAPES
from repaconv.rewrites.fold.computed_weights import WEIGHTS
from repaconv.rewrites.fold.concats_in_series import CONCATS
from repaconv.rewrites.fold.constants_of_every_image import REPEATED
from repaconv.rewrites.fold.convolution_composition import CONVOLUTION
from repaconv.rewrites.fold.convolutions_of_split_parts import GROUPED_CONVOLUTION
from repaconv.rewrites.fold.einsum_products import EINSUM
from repaconv.rewrites.fold.fold_barriers import KEEP_SUMS, RELEASE, RELEASE_SUMS, keep, kept_values
from repaconv.rewrites.fold.gelu_formula import GELU
from repaconv.rewrites.fold.hard_swish_operator import HARD_SWISH
from repaconv.rewrites.fold.instance_norm_operator import INSTANCE_NORM
from repaconv.rewrites.fold.layer_norm_operator import LAYER_NORM
from repaconv.rewrites.fold.layers_before_lstm_and_gru import RECURRENT
from repaconv.rewrites.fold.layers_before_upsampling import BEFORE_UPSAMPLING
from repaconv.rewrites.fold.layers_on_flattened_tokens import FLATTENED
from repaconv.rewrites.fold.linear_layer_composition import AFFINE
from repaconv.rewrites.fold.max_pools_in_series import POOLS_IN_SERIES
from repaconv.rewrites.fold.patch_merging import PATCH_MERGING
from repaconv.rewrites.fold.pool_padding import POOL_PADDING
from repaconv.rewrites.fold.prelu_operator import PRELU
from repaconv.rewrites.fold.recombination_after_folds import FINISH
from repaconv.rewrites.fold.reductions_in_series import IN_SERIES
from repaconv.rewrites.fold.selections_of_concats import SELECTIONS_OF_CONCATS
from repaconv.rewrites.fold.shared_weights import KEEP_SHARED, UNSHARE
from repaconv.rewrites.fold.shorter_views_and_equal_nodes import FEWER_NODES
from repaconv.rewrites.fold.slices_in_series import SLICES
from repaconv.rewrites.fold.softmax_before_argmax import ARGMAX
from repaconv.rewrites.fold.space_to_depth_convolutions import SPACE_TO_DEPTH
from repaconv.rewrites.fold.transposes_around_elementwise import TRANSPOSES
from repaconv.rewrites.fold.unread_channels import UNREAD_CHANNELS
from repaconv.rewrites.fold.unread_tokens import READ_TOKENS
from repaconv.rewrites.fold.unstacked_branches import UNSTACK

if TYPE_CHECKING:
    import onnx_ir as ir


def _followed_by_affine(first: Rewrite) -> Rewrite:
    """A rewrite after which ``affine`` runs again if it changed something."""

    def apply(model: ir.Model) -> Iterator[Change]:
        made = list(first.apply(model))
        yield from made
        if made:
            tidy(model)
            yield from AFFINE.apply(model)

    return replace(first, apply=apply)


def without(names: Collection[str]) -> tuple[Rewrite, ...]:
    """The fold rewrites without those named.

    Without ``affine``, `BEFORE_AFFINE` are left out as well. `UNSHARE` names no rewrite: leaving it out adds
    `KEEP_SHARED`, so that shared weights are not folded. Neither does ``value:NAME``: nothing is folded across that
    value (`repaconv.rewrites.fold.fold_barriers`). `KEEP_SHARED` folds constants, too, but does not report it, so that
    it follows the rewrites that do.
    """
    left_out = {*names, *((fold.name for fold in BEFORE_AFFINE) if AFFINE.name in names else ())}
    kept = tuple(fold for fold in FOLDS if fold.name not in left_out)
    if UNSHARE in left_out:
        constants = tuple(fold for fold in kept if fold in (WEIGHTS, SHAPES))
        kept = (*constants, KEEP_SHARED, *(fold for fold in kept if fold not in constants))
    values = kept_values(names)
    return (keep(values), *kept) if values else kept


BEFORE_AFFINE = (BEFORE_UPSAMPLING, JOIN, CHOOSE)
"""Rewrites after which ``affine`` runs again, since they bring linear operators next to each other."""
FOLDS: tuple[Rewrite, ...] = (  # ``convolution`` again for what ``affine`` has moved next to a convolution
    WEIGHTS,
    SHAPES,
    REPEATED,
    FLATTENED,
    EINSUM,
    GELU,
    LAYER_NORM,
    INSTANCE_NORM,
    CLIP,  # after the norms, of which flax writes max(0, variance)
    HARD_SWISH,
    PRELU,
    ARGMAX,
    TRANSPOSES,
    KEEP_SUMS,
    CONVOLUTION,
    UNREAD_CHANNELS,
    SPACE_TO_DEPTH,
    PATCH_MERGING,
    UNSTACK,
    GROUPED_CONVOLUTION,
    AFFINE,
    *(_followed_by_affine(fold) for fold in BEFORE_AFFINE),
    TRANSPOSES,  # again, around operators between which there was a norm that ``affine`` has folded
    CONVOLUTION,
    COMMON_FACTOR,  # after ``affine``, which takes the shift of such a sum to the layer after it
    RECURRENT,
    SELECTIONS_OF_CONCATS,
    CONCATS,
    CONSTANTS,
    IN_SERIES,
    READ_TOKENS,
    POOL_PADDING,
    POOLS_IN_SERIES,
    BATCH_NORM,
    RELEASE,
    FINISH,
    SLICES,  # of what has not become a Split
    RELEASE_SUMS,
    FEWER_NODES,
)
