"""hard-swish: write x clip(x + 3, 0, 6) / 6, and the gate without x, as one operator.

Converters from other libraries (paddle2onnx), and PyTorch's for old opsets, write both as four operators. ONNX Runtime
fuses none of them into the convolution before, and leaves its own layout of images for an Add of one number.

Source: Howard et al. 2019, "Searching for MobileNetV3", section 5.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.model_rewriting import clean
from repaconv.graph.nodes_and_constants import Writer, attribute, made_by, nodes_of, only_reader, scalar
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import set_shape, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Write HardSwish, or HardSigmoid, wherever Add, Clip, Mul and Div compute it; in place."""
    for clip in nodes_of(model, "Clip"):
        x, clipped = _shifted(clip), clip.outputs[0]
        if x is None or x.dtype is None or not x.dtype.is_floating_point():
            continue
        gate = _sixth(clipped)
        product = _product(clipped if gate is None else gate.outputs[0], x)
        last = product if gate is not None else None if product is None else _sixth(product.outputs[0])
        last = last or gate
        if last is None or sizes(last.outputs[0]) != sizes(x):
            continue
        write = Writer(model, last)
        new = write("HardSigmoid", x, alpha=1 / 6, beta=0.5) if product is None else write("HardSwish", x)
        set_shape(new, sizes(x), x)
        write.replace(last.outputs[0], new)
        what = "Add, Clip, Div -> HardSigmoid" if product is None else "Add, Clip, Mul, Div -> HardSwish"
        yield Change(rewrite=HARD_SWISH.name, place=clip.name or "", description=what)
    clean(model)


def _shifted(clip: ir.Node) -> ir.Value | None:
    """The x of clip(x + 3, 0, 6); None if the node is another Clip, or if x + 3 is read elsewhere."""
    limits = [scalar(value) for value in clip.inputs[1:]] or [attribute(clip, name, None) for name in ("min", "max")]
    add = made_by(clip.inputs[0], "Add")
    if add is None or limits != [0, 6] or only_reader(add.outputs[0]) is None:
        return None
    first, second = add.inputs
    return first if scalar(second) == 3 else second if scalar(first) == 3 else None


def _product(value: ir.Value, x: ir.Value) -> ir.Node | None:
    """The only reader of a value, if it multiplies it by x."""
    node = only_reader(value, "Mul")
    return node if node is not None and {*node.inputs} == {value, x} else None


def _sixth(value: ir.Value) -> ir.Node | None:
    """The only reader of a value, if it divides it by 6; a product with 1/6 in float32 is another number."""
    node = only_reader(value, "Div")
    return node if node is not None and node.inputs[0] is value and scalar(node.inputs[1]) == 6 else None


HARD_SWISH = Rewrite("hard-swish", "x clip(x + 3, 0, 6) / 6, or clip(x + 3, 0, 6) / 6", apply, opset=14)
