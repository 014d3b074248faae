"""Separate a full convolution into a pointwise and a depthwise one (eqs. 9-10), and measure the error of doing so."""

from __future__ import annotations

import torch
from torch import Tensor

from repaconv.method_api.contract import FoldedPart
from repaconv.method_api.fold_error import max_rel_error
from repaconv.results import FoldStep

MAX_SEPARATION_ERROR = {"auto": 1e-12, "refactor": 1e-7, "keep": -1.0}
"""Maximum error of a separation, by the setting ``full_conv``: FP64 rounding, FP32 rounding (6e-8), or never."""


def separable_factors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Factor a kernel [c, d, k, k] into pointwise [c, d] and depthwise [c, 1, k, k], by each channel's rank-1 SVD."""
    u, s, v = torch.linalg.svd(weight.flatten(2), full_matrices=False)
    root = s[:, :1].sqrt()
    return u[:, :, 0] * root, (v[:, 0] * root).view(len(weight), 1, *weight.shape[2:])


def nearest_separable(weight: Tensor) -> tuple[Tensor, float]:
    """The separable kernel [c, d, k, k] nearest to a full convolution's kernel, in float64, and its error.

    The error is max|kernel - product| / max|kernel| of the output channel where it is largest.
    """
    weight = weight.double()
    pointwise, kernels = separable_factors(weight)
    product = pointwise[:, :, None, None] * kernels
    return product, max(map(max_rel_error, product, weight))


def is_rounded_product(error: float) -> bool:
    """Whether a kernel is separable only up to the rounding of its storage in FP32."""
    return error > MAX_SEPARATION_ERROR["auto"]


def separation_part(module: str, error: float) -> FoldedPart:
    """The certificate's row for a full convolution that becomes a pointwise and a depthwise one."""
    description = ("full convolution -> pointwise and depthwise: every channel's kernel is a product",)
    step = FoldStep(module=module, folded=description, equation="eqs. 9-10", max_rel_error=error)
    if is_rounded_product(error):
        why = "full_conv=refactor: a product stored in float32, to its rounding"
        step = step.model_copy(update={"allowed": MAX_SEPARATION_ERROR["refactor"], "reason": why})
    return FoldedPart({}, step)
