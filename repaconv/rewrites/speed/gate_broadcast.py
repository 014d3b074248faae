"""gate-as-image: expand a per-channel gate to the size of the image that it multiplies.

    x g = x repeat(g),    x [B, c, h, w], g [B, c, 1, 1]

Runtimes with blocked channel layouts multiply two images of equal size in that layout, but reorder both to broadcast
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.nodes_and_constants import Writer, attribute, constant, nodes_of
from repaconv.graph.operator_facts import POOLS, UNARY
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import sizes
from repaconv.graph.token_grids import static_grid
from repaconv.results import Change
from repaconv.rewrites.speed.channel_padding import BLOCK, READ

if TYPE_CHECKING:
    import onnx_ir as ir

FAR = 8
"""How many nodes back from a value to search for its convolution."""


def _gate_as_image(model: ir.Model) -> Iterator[Change]:
    for product in nodes_of(model, "Mul"):
        pairs = [(product.inputs[place], product.inputs[1 - place]) for place in (0, 1)]
        for gate, image in pairs:
            small, large = static_grid(gate), static_grid(image)
            if small is None or large is None or small != (large[0], 1, 1) or min(large[1:]) < 2:
                continue
            if (sizes(gate) or ())[:1] != (sizes(image) or ())[:1] or not (_in_blocks(gate) and _in_blocks(image)):
                continue
            write = Writer(model, product)
            scales = write.exactly(np.array([1, 1, *large[1:]], np.float32))
            nearest = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            wide = write("Resize", gate, None, scales, **nearest)
            wide.shape = image.shape if image is not None else None
            write.replace(product.outputs[0], write("Mul", image, wide))
            description = f"{large[0]} channels of {large[1]} x {large[2]} pixels"
            yield Change(rewrite="gate-as-image", place=product.name or "", description=description)


def _in_blocks(value: ir.Value | None, far: int = FAR) -> bool:
    """Whether a value comes from convolutions that are computed in blocks, through operators that keep the layout."""
    node = value.producer() if value is not None else None
    if node is None or node.domain or not far:
        return False
    if node.op_type == "Conv":
        return _computed_in_blocks(node)
    if node.op_type == "Concat":
        widths = [(static_grid(given) or (1,))[0] for given in node.inputs]
        return not any(width % BLOCK for width in widths) and all(_in_blocks(given, far - 1) for given in node.inputs)
    if node.op_type in ("Add", "Mul", "Sum"):
        grids = {static_grid(given) for given in (value, *node.inputs)}
        return len(grids) == 1 and all(_in_blocks(given, far - 1) for given in node.inputs)
    return (node.op_type in UNARY or node.op_type in POOLS) and _in_blocks(node.inputs[0], far - 1)


def _computed_in_blocks(conv: ir.Node) -> bool:
    weight = constant(conv.inputs[1])
    if weight is None or weight.ndim != 4:
        return False
    out, read = (int(size) for size in weight.shape[:2])
    groups = int(attribute(conv, "group", 1))
    if groups == 1:
        return read < BLOCK or read % READ == 0
    return out % BLOCK == 0 and (read == 1 or (read % BLOCK == 0 and out // groups % BLOCK == 0))


GATE_AS_IMAGE = Rewrite(
    "gate-as-image",
    "a gate [B, c, 1, 1] that multiplies an image of known size, both made by convolutions",
    _gate_as_image,
    opset=13,
    order=98,
    keeps=True,
)
