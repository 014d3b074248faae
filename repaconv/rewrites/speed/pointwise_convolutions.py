"""1 x 1 convolutions and linear layers on tokens are the same; which one is written says how the numbers lie.

    conv_{1x1}(grid(x)) = grid(x W + b),    W = weight^T

Nothing is transposed between two neighbours of one kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.linear_layers import layer_at, linear_of, write_linear
from repaconv.graph.nodes_and_constants import Array, Writer, attribute, constant, nodes_of, only_reader
from repaconv.graph.operator_facts import UNARY
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of
from repaconv.graph.token_grids import is_plain, static_grid, to_grid, to_tokens, tokens_before, tokens_behind
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def _as_products(model: ir.Model) -> Iterator[Change]:
    written: dict[ir.Value, ir.Value] = {}
    for conv in [node for node in nodes_of(model, "Conv") if _is_pointwise(node)]:
        sizes, weight = static_grid(conv.outputs[0]), constant(conv.inputs[1])
        if sizes is None or weight is None or conv.inputs[0] is None or static_grid(conv.inputs[0]) is None:
            continue
        write = Writer(model, conv)
        bias = constant(conv.inputs[2]) if len(conv.inputs) > 2 else None
        out = write_linear(write, _tokens_of(write, conv.inputs[0], written), weight[:, :, 0, 0].T, bias)
        for value in tokens_behind(conv.outputs[0]):
            write.replace(value, out)
        grid = to_grid(write, out, sizes)
        grid.shape = conv.outputs[0].shape
        write.replace(conv.outputs[0], grid)
        written[grid] = out
        yield _told(
            "pointwise-as-matmul", conv, f"{weight.shape[1]} x {weight.shape[0]} on {sizes[1] * sizes[2]} tokens"
        )


def _tokens_of(write: Writer, grid: ir.Value, written: dict[ir.Value, ir.Value]) -> ir.Value:
    """A grid as tokens: those that it is from, behind an elementwise function as well, or else transposed."""
    if grid in written:
        return written[grid]
    node = grid.producer()
    if node is not None and node.op_type in UNARY and node.domain == "" and node.inputs[0] in written:
        settings = {name: entry.value for name, entry in node.attributes.items()}
        return write(node.op_type, written[node.inputs[0]], **settings)
    before, sizes = tokens_before(grid), static_grid(grid)
    assert sizes is not None
    return before if before is not None else to_tokens(write, grid, sizes)


def _is_pointwise(node: ir.Node) -> bool:
    if not is_plain(node):
        return False
    weight = constant(node.inputs[1])
    steps = attribute(node, "strides", ())
    return weight is not None and weight.shape[2:] == (1, 1) and all(step == 1 for step in steps)


def _as_convolutions(model: ir.Model) -> Iterator[Change]:
    for conv in [node for node in nodes_of(model, "Conv") if _is_depthwise(node)]:
        yield from _before(model, conv)
        yield from _behind(model, conv)


def _is_depthwise(node: ir.Node) -> bool:
    sizes = static_grid(node.inputs[0])
    return sizes is not None and sizes[0] > 1 and attribute(node, "group", 1) == sizes[0]


def _before(model: ir.Model, conv: ir.Node) -> Iterator[Change]:
    """The linear layer whose output is the grid that a depthwise convolution reads."""
    grid = conv.inputs[0]
    assert grid is not None
    tokens, sizes = tokens_before(grid), static_grid(grid)
    linear = linear_of(tokens)
    if tokens is None or sizes is None or linear is None or only_reader(tokens) is None:
        return
    if rank_of(linear.x) != 3 or only_reader(grid) is None:
        return
    write = Writer(model, linear.node)
    image = to_grid(write, linear.x, (linear.weight.shape[0], *sizes[1:]))
    write.replace(grid, _pointwise(write, image, linear.weight, linear.bias))
    yield _told("matmul-as-pointwise", linear.node, f"before the depthwise convolution of {sizes[0]} channels")


def _behind(model: ir.Model, conv: ir.Node) -> Iterator[Change]:
    """The linear layer that reads the tokens of a depthwise convolution."""
    grid = conv.outputs[0]
    sizes = static_grid(grid)
    for tokens in tokens_behind(grid):
        linear = layer_at(only_reader(tokens))
        if sizes is None or linear is None or linear.x is not tokens:
            continue
        write = Writer(model, linear.node)
        image = _pointwise(write, grid, linear.weight, linear.bias)
        write.replace(linear.out, to_tokens(write, image, (linear.weight.shape[1], *sizes[1:])))
        yield _told("matmul-as-pointwise", linear.node, f"behind the depthwise convolution of {sizes[0]} channels")


def _pointwise(write: Writer, grid: ir.Value, weight: Array, bias: Array | None) -> ir.Value:
    inputs = [grid, write.constant(weight.T[:, :, None, None])]
    return write("Conv", *inputs, *(() if bias is None or not bias.any() else (write.constant(bias),)))


def _told(name: str, node: ir.Node, told: str) -> Change:
    return Change(rewrite=name, place=node.name or "", description=told)


POINTWISE_AS_MATMUL = Rewrite(
    "pointwise-as-matmul",
    "a 1 x 1 convolution of stride 1, without padding, on a grid of known size",
    _as_products,
    order=40,
)
MATMUL_AS_POINTWISE = Rewrite(
    "matmul-as-pointwise",
    "a linear layer on tokens right before or behind a depthwise convolution",
    _as_convolutions,
    order=41,
)
