"""hard-swish: write x clip(x + 3, 0, 6) / 6, and the gate without x, as one operator.

paddle2onnx, tf2onnx, and PyTorch's exporter for old opsets write both as four operators. ONNX Runtime fuses none of
them into the convolution before, and converts the image to another layout for the Add. Keras multiplies by 1/6 in
float32, which is 1.00000003 sixths. This factor is written after the operator, and the next linear layer absorbs it.

Source: Howard et al. 2019, "Searching for MobileNetV3", section 5.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, attribute, made_by, nodes_of, only_reader, scalar
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import shaped_like, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Write HardSwish, or HardSigmoid, wherever Add, Clip, Mul and Div compute it or a multiple; in place."""
    for clip in nodes_of(model, "Clip"):
        x = _shifted(clip)
        found = _computed(clip.outputs[0], x) if x is not None else None
        if found is None or x is None or x.dtype is None or not x.dtype.is_floating_point():
            continue
        operator, last, factor, nodes = found
        if not sizes(last.outputs[0]) == sizes(x) is not None:
            continue  # a constant may have more axes than x
        write = Writer(model, last)
        new = shaped_like(write(operator, x, **ATTRIBUTES[operator]), x)
        if factor != 1:
            new = shaped_like(write("Mul", new, write.constant(factor, x)), new)
        write.replace(last.outputs[0], new)
        yield Change(rewrite=HARD_SWISH.name, place=clip.name or "", description=f"{nodes} -> {operator}")
    clean(model)


ATTRIBUTES: dict[str, dict[str, float]] = {"HardSwish": {}, "HardSigmoid": {"alpha": 1 / 6, "beta": 0.5}}


def _computed(clipped: ir.Value, x: ir.Value) -> tuple[str, ir.Node, float, str] | None:
    """Match the nodes after clip(x + 3, 0, 6); None if they are neither a HardSwish nor a HardSigmoid.

    Returns:
        The name of the operator, the last node that it replaces, the factor to multiply by after it, and the types of
        all nodes that it replaces, for the report.
    """
    product = _product(clipped, x)
    sixth, factor = _sixth(clipped if product is None else product.outputs[0])
    if sixth is None:
        return None
    if product is not None:
        return "HardSwish", sixth, factor, f"Add, Clip, Mul, {sixth.op_type}"
    product = _product(sixth.outputs[0], x)
    if product is not None:
        return "HardSwish", product, factor, f"Add, Clip, {sixth.op_type}, Mul"
    return "HardSigmoid", sixth, factor, f"Add, Clip, {sixth.op_type}"


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


def _sixth(value: ir.Value) -> tuple[ir.Node | None, float]:
    """The only reader of a value and its factor in sixths, if it multiplies or divides by a constant; else None, 0."""
    node = only_reader(value, "Div", "Mul")
    if node is None or (node.op_type == "Div" and node.inputs[0] is not value):
        return None, 0.0
    by = scalar(node.inputs[1] if node.inputs[0] is value else node.inputs[0])
    if by is None or by == 0:
        return None, 0.0
    return node, 6 / by if node.op_type == "Div" else 6 * by


HARD_SWISH = Rewrite("hard-swish", "x clip(x + 3, 0, 6) / 6, or clip(x + 3, 0, 6) / 6", apply, opset=14)
