"""mean-as-pool: write the mean over an image as GlobalAveragePool, which needs no reorder of blocked channel layouts.

mean over (h, w) of [B, c, h, w] = GlobalAveragePool
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.index_selections import axes_of
from repaconv.graph.nodes_and_constants import Writer, attribute, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

IMAGES = 4
"""The number of axes of images [B, c, h, w]."""
TYPES = ("FLOAT", "FLOAT16", "DOUBLE")
"""Types of images; ONNX Runtime has no GlobalAveragePool of integers and bfloat16; float64 is rounded later."""


def _mean_as_pool(model: ir.Model) -> Iterator[Change]:
    for mean in nodes_of(model, "ReduceMean"):
        images, out = mean.inputs[0], mean.outputs[0]
        if images is None or rank_of(images) != IMAGES or sorted(axes_of(mean, IMAGES) or ()) != [2, 3]:
            continue
        if images.dtype is None or images.dtype.name not in TYPES:
            continue
        write = Writer(model, mean)
        pooled = write("GlobalAveragePool", images)
        if attribute(mean, "keepdims", 1):
            pooled.shape = out.shape
        else:
            pooled = write("Flatten", pooled, axis=1)
        write.replace(out, pooled)
        yield Change(rewrite="mean-as-pool", place=mean.name or "", description="the mean over an image")


MEAN_AS_POOL = Rewrite(
    "mean-as-pool", "a mean over the pixels of images [B, c, h, w]", _mean_as_pool, order=97, keeps=True
)
