"""layer-norm: write a LayerNorm that an exporter wrote as means, differences, products and a root as one operator.

PyTorch writes (x - m) / sqrt(v + eps) before opset 17, Keras and tf2onnx x (r g) + (b - m (r g)). In the second one g
is in the way of the linear layer after it, and every operator acts on all tokens. ONNX Runtime fuses only the first.

The operator acts on the last axis. For the channels of an image (ConvNeXt of Keras by tf2onnx), a Transpose before and
one after it take less time than the formula, and fold with others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Array, Writer, nodes_of
from repaconv.graph.norm_formulas import ROOTS, NormFormulas, spread_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import shaped_like, sizes
from repaconv.graph.tensor_views import transposed
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Write LayerNormalization wherever other operators compute it; in place."""
    for node in nodes_of(model, *ROOTS):
        spread = spread_of(node)
        width = (sizes(spread.x) or ())[spread.axes[0]] if spread is not None else None
        if spread is None or len(spread.axes) > 1 or not isinstance(width, int) or not width:
            continue  # ONNX Runtime refuses a LayerNormalization of no numbers
        (axis,), order = spread.axes, [*spread.kept, *spread.axes]

        def along_axis(numbers: Array, axis: int = axis) -> bool:
            return numbers.size == len(np.moveaxis(numbers, axis, 0))

        for value, scale, shift in NormFormulas(spread, along_axis).found():
            last = value.producer()
            assert last is not None
            write = Writer(model, last)
            parts = [np.broadcast_to(part.reshape(-1), width) for part in (scale, shift) if part is not None]
            x = transposed(write, spread.x, order)
            new = write("LayerNormalization", x, *map(write.constant, parts), axis=-1, epsilon=spread.epsilon)
            new = transposed(write, shaped_like(new, x), [int(place) for place in np.argsort(order)])
            write.replace(value, new)
            yield Change(
                rewrite=LAYER_NORM.name, place=last.name or "", description="means, a root -> LayerNormalization"
            )
    clean(model)


LAYER_NORM = Rewrite(
    "layer-norm",
    "a LayerNorm over one axis, if nothing else reads its root",
    apply,
    opset=17,
)
