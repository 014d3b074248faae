"""common-factor: a value plus its product with smaller factors becomes one product, x + x g = x (1 + g).

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

    from repaconv.graph.symbolic_shapes import Sizes


def apply(model: ir.Model) -> Iterator[Change]:
    """Write sums of a value and its product with smaller factors as one product; in place."""
    for node in nodes_of(model, "Add"):
        for x, product in (node.inputs, node.inputs[::-1]):
            factors = _other_factors(product, x)
            shapes = _smaller_shapes(factors, x, node.outputs[0])
            if x is None or not shapes or all(map(is_constant, factors)):
                continue
            write = Writer(model, node)
            factor = factors[0]
            for other, shape in zip(factors[1:], shapes[1:], strict=True):
                factor = write("Mul", factor, other)
                set_shape(factor, shape, node.outputs[0])
            factor = write("Add", factor, write.constant(1.0, like=x))
            set_shape(factor, shapes[-1], node.outputs[0])
            write.replace(node.outputs[0], shaped_like(write("Mul", x, factor), node.outputs[0]))
            yield Change(rewrite="common-factor", place=node.name or "", description=f"{len(factors)} factors")
            break


def _other_factors(product: ir.Value | None, x: ir.Value | None) -> list[ir.Value]:
    """The factors of a product next to a value, if that is one of them and nothing else reads the product; else none.

    A factor may be a product itself, in which the value is.
    """
    waiting: list[tuple[ir.Value | None, tuple[ir.Value | None, ...]]] = [(product, ())]  # and the factors next to it
    while waiting:
        value, others = waiting.pop()
        node = made_by(value, "Mul")
        if node is None or value is None or not is_read_once(value):
            continue
        for inner, other in (node.inputs, node.inputs[::-1]):
            if other is not x and inner is x:
                return [factor for factor in (other, *others) if factor is not None]
            if other is not x:
                waiting.append((inner, (other, *others)))
    return []


def _smaller_shapes(factors: list[ir.Value], x: ir.Value | None, total: ir.Value) -> list[Sizes]:
    """The shapes of the products of the first factors, of the first two, and so on.

    Empty if one is unknown, or if the last has no axis of length 1 where x is longer.
    """
    shape = sizes(x)
    if shape is None or shape != sizes(total):
        return []
    found: list[Sizes] = []
    joint: Sizes = ()
    for factor in factors:
        given = sizes(factor)
        if given is None or len(given) > len(shape):
            return []
        rank = max(len(joint), len(given))
        own, joint = ((1,) * (rank - len(each)) + each for each in (given, joint))
        if any(size not in (1, full) for size, full in zip(own, shape[len(shape) - rank :], strict=True)):
            return []
        joint = tuple(known if size == 1 else size for known, size in zip(joint, own, strict=True))
        found.append(joint)
    full = (1,) * (len(shape) - len(joint)) + joint
    return found if any(own == 1 != size for own, size in zip(full, shape, strict=True)) else []


COMMON_FACTOR = Rewrite(
    "common-factor",
    "a value that is added to its own product with factors of fewer numbers, where nothing else reads that product",
    apply,
    keeps=True,
)
