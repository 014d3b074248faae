"""common-factor: where a value is added to its product with numbers per channel or per image, add 1 to these instead.

    x + x n g = x (n g + 1)

The global response norm of ConvNeXt V2 computes n from the channels of each image, and learns g. In this order all
pixels are multiplied once, and not multiplied twice and added.

Source: Woo et al. 2023, "ConvNeXt V2: Co-designing and Scaling ConvNets with Masked Autoencoders".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.nodes_and_constants import Writer, is_constant, is_read_once, made_by, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import set_shape, shaped_like, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir

    from repaconv.graph.symbolic_shapes import Size, Sizes


def apply(model: ir.Model) -> Iterator[Change]:
    """Write sums of a value and its product with smaller factors as one product; in place."""
    for node in nodes_of(model, "Add"):
        for x, product in (node.inputs, node.inputs[::-1]):
            factors = _other_factors(product, x)
            shape = _smaller_shape(factors, x, node.outputs[0])
            if x is None or shape is None or all(map(is_constant, factors)):
                continue
            write = Writer(model, node)
            factor = factors[0]
            for other in factors[1:]:
                factor = write("Mul", factor, other)
                set_shape(factor, shape, node.outputs[0])
            factor = write("Add", factor, write.constant(1.0, like=x))
            set_shape(factor, shape, node.outputs[0])
            write.replace(node.outputs[0], shaped_like(write("Mul", x, factor), node.outputs[0]))
            yield Change(rewrite="common-factor", place=node.name or "", description=f"{len(factors)} factors")
            break


def _other_factors(product: ir.Value | None, x: ir.Value | None) -> list[ir.Value]:
    """The factors of a product next to a value, if that is one of them and nothing else reads the product; else none.

    A factor may be a product itself, in which the value is.
    """
    node = made_by(product, "Mul")
    if node is None or product is None or not is_read_once(product):
        return []
    for at, other in enumerate(reversed(node.inputs)):
        found = [] if node.inputs[at] is x else _other_factors(node.inputs[at], x)
        if other is not None and other is not x and (found or node.inputs[at] is x):
            return [*found, other]
    return []


def _smaller_shape(factors: list[ir.Value], x: ir.Value | None, total: ir.Value) -> Sizes | None:
    """The shape of the product of factors, if it has 1 along an axis where x has more; None if unknown, or if not."""
    shape = sizes(x)
    if not factors or shape is None or shape != sizes(total):
        return None
    joint: list[Size] = [1] * len(shape)
    for factor in factors:
        given = sizes(factor)
        if given is None or len(given) > len(shape):
            return None
        given = (1,) * (len(shape) - len(given)) + given
        if any(size not in (1, full) for size, full in zip(given, shape, strict=True)):
            return None
        joint = [known if size == 1 else size for known, size in zip(joint, given, strict=True)]
    return tuple(joint) if any(own == 1 != full for own, full in zip(joint, shape, strict=True)) else None


COMMON_FACTOR = Rewrite(
    "common-factor",
    "a value that is added to its own product with factors of fewer numbers, where nothing else reads that product",
    apply,
    keeps=True,
)
