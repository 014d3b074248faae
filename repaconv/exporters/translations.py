"""Operators of torch that its exporter knows no ONNX for, and that ONNX can say exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The exporter's ``custom_translation_table``."""
    import torch

    return {torch.ops.aten.sort.stable: _sort_stable}


def _sort_stable(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """A stable sort is a TopK of everything: of equal values it gives the lower index first, either way around.

    torch's exporter writes the sort that need not be stable so, and has no entry for the stable one. Source: ONNX's
    specification, TopK: "Given two equivalent values, this operator uses the indices along the axis as a tiebreaker.
    That is, the element with the lower index will appear first."
    """
    from onnxscript import opset18 as op

    if not self.shape:
        return op.Identity(self), op.Constant(value_int=0)
    count = op.Reshape(op.Gather(op.Shape(self), dim, axis=0), op.Constant(value_ints=[1]))
    return op.TopK(self, count, axis=dim, largest=descending, sorted=True)
