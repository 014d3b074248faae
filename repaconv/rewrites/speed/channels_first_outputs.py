"""output-by-transpose, resized-output-by-transpose: bring a large output image into its order by a Transpose.

    x [n, c, h, w] = transpose(transpose(x, 0 2 3 1), 0 3 1 2)

OpenVINO's convolutions keep channels last in memory, and an output of 16 to 64 channels is brought into ONNX's order by
a kernel that takes five times as long as that of a Transpose. The first of the two Transposes moves nothing
(`channels_last`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING

from repaconv.graph.nodes_and_constants import Writer
from repaconv.graph.operator_facts import UNARY
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import known_product, sizes
from repaconv.graph.tensor_views import transposed
from repaconv.results import Change
from repaconv.rewrites.speed.channels_last_as_tokens import channels_last

if TYPE_CHECKING:
    import onnx_ir as ir

CHANNELS = range(16, 65)
"""Channels for which OpenVINO has the slow kernel."""
NUMBERS = 2**17
"""Numbers of an image from which the kernel is slow."""


def _outputs_by_transpose(model: ir.Model, *, name: str, layers: Collection[str]) -> Iterator[Change]:
    for image in list(model.graph.outputs):
        node, shape = image.producer(), sizes(image)
        if node is None or shape is None or len(shape) != 4 or image.uses() or _layer_of(image) not in layers:
            continue
        if shape[1] not in CHANNELS or known_product(shape[1:]) < NUMBERS:
            continue
        write = Writer(model, node)
        given = write.copy(node, *node.inputs)
        given.shape = image.shape
        last = channels_last(write, given)
        assert last is not None  # of the pixels, one size at most is dynamic: known ones are as many as `NUMBERS`
        write.replace(image, transposed(write, last, [0, 3, 1, 2]))
        yield Change(rewrite=name, place=node.name or "", description="two Transposes, of which one moves numbers")


def _layer_of(image: ir.Value) -> str:
    """The operator that makes an image, before functions of its single numbers."""
    node = image.producer()
    while node is not None and node.op_type in (*UNARY, "Clip") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return "" if node is None or node.domain else node.op_type


def _output_by_transpose(name: str, what: str, layers: Collection[str], *, fp32_only: bool) -> Rewrite:
    return Rewrite(
        name,
        f"an output of the graph that is {what} of 16 to 64 channels and at least {NUMBERS:,} numbers, read by no node",
        partial(_outputs_by_transpose, name=name, layers=layers),
        order=102,
        keeps=True,
        fp32_only=fp32_only,
    )


OUTPUT_BY_TRANSPOSE = _output_by_transpose(
    "output-by-transpose", "an image of a convolution", ("Conv", "ConvTranspose"), fp32_only=False
)
RESIZED_OUTPUT_BY_TRANSPOSE = _output_by_transpose(
    "resized-output-by-transpose", "a resized image", ("Resize",), fp32_only=True
)
