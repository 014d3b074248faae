"""Treat tokens as rows of one matrix, so that a layer and what is added to it become one Gemm.

    x W + b = Gemm(rows(x), W, b)                                    linear-as-gemm
    (x W + b) + (r + c) = Gemm(rows(x), W, rows(r + (b + c)))        accumulate

    f(tokens(x)) = tokens(f(x)) for an f that acts on each row separately     rows-throughout

Reshaping tokens [B, N, c] to rows [B N, c] needs no copy, but each Reshape is a node that a runtime has to launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.linear_layers import Linear, linear_of, linears, write_linear
from repaconv.graph.nodes_and_constants import Writer, attribute, constant, nodes_of, only_reader
from repaconv.graph.operator_facts import ROW_NORMS, UNARY
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import as_numbers, rank_of, sizes
from repaconv.graph.token_grids import static_tokens
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def _layers_as_gemm(model: ir.Model) -> Iterator[Change]:
    for linear in linears(model):
        shape = _shape_of(linear)
        if linear.node.op_type == "Gemm" or linear.bias is None or shape is None:
            continue
        write = Writer(model, linear.node)
        product = write(
            "Gemm",
            _rows(write, linear.x, len(linear.weight)),
            write.constant(linear.weight),
            write.constant(linear.bias),
        )
        write.replace(linear.out, _tokens(write, product, shape))
        yield Change(
            rewrite="linear-as-gemm",
            place=linear.node.name or "",
            description=f"{linear.weight.shape[0]} x {linear.weight.shape[1]} with its bias as one Gemm",
        )


def _shape_of(linear: Linear) -> tuple[int, int] | None:
    """(N, d) of a layer from tokens [B, N, c] to tokens [B, N, d]; None for another layer."""
    return static_tokens(linear.out) if rank_of(linear.x) == 3 else None


def _rows(write: Writer, tokens: ir.Value, channels: int) -> ir.Value:
    return write("Reshape", tokens, write.constant([-1, channels]))


def _tokens(write: Writer, rows: ir.Value, shape: tuple[int, int]) -> ir.Value:
    return write("Reshape", rows, write.constant([-1, *shape]))


def _sums_in_the_product(model: ir.Model) -> Iterator[Change]:
    for node in nodes_of(model, "Add"):
        for first, second in (node.inputs, node.inputs[::-1]):
            linear = linear_of(first) if sizes(first) == sizes(node.outputs[0]) else None
            shape = _shape_of(linear) if linear is not None and only_reader(linear.out) is not None else None
            start = _with_bias(model, second, linear) if linear is not None and shape is not None else None
            if linear is None or shape is None or start is None:
                continue
            write = Writer(model, node)
            rows = [_rows(write, x, width) for x, width in zip((linear.x, start), linear.weight.shape, strict=True)]
            product = write("Gemm", rows[0], write.constant(linear.weight), rows[1])
            write.replace(node.outputs[0], _tokens(write, product, shape))
            yield Change(
                rewrite="accumulate",
                place=node.name or "",
                description=f"{linear.weight.shape[0]} x {linear.weight.shape[1]} and what is added to it, as one Gemm",
            )
            break


def _with_bias(model: ir.Model, start: ir.Value | None, linear: Linear) -> ir.Value | None:
    """The value that a layer is added to, with the layer's bias moved into it.

    Returns:
        None if the bias cannot be moved: the value would have to be another linear layer that nothing else reads.
    """
    if start is None or sizes(start) != sizes(linear.out) or start is linear.out:
        return None
    if linear.bias is None or not linear.bias.any():
        return start
    other = linear_of(start)
    if other is None or only_reader(start) is None:
        return None
    write = Writer(model, other.node)
    layer = write_linear(write, other.x, other.weight, other.shift() + linear.bias)
    layer.shape = start.shape
    return layer


def _rows_throughout(model: ir.Model) -> Iterator[Change]:
    rows: dict[ir.Value, ir.Value] = {}
    moved = 0
    for node in list(model.graph):
        x = node.inputs[0] if node.inputs else None
        if node.domain != "" or x is None or not node.outputs:
            continue
        before, after, shape = sizes(x) or (), sizes(node.outputs[0]) or (), static_tokens(node.outputs[0])
        if node.op_type == "Reshape" and before[-1:] == after[-1:] and as_numbers(after[-1:]):
            if len(before) == 2 and shape is not None:
                rows[node.outputs[0]] = x
            elif len(after) == 2 and x in rows:
                Writer(model, node).replace(node.outputs[0], rows[x])
        elif shape is not None and (inputs := _as_rows(Writer(model, node), node, rows, shape[1])) is not None:
            write = Writer(model, node)
            settings = {name: entry.value for name, entry in node.attributes.items()} | _last_axis(node)
            out = write(node.op_type, *inputs, **settings)
            tokens = _tokens(write, out, shape)
            write.replace(node.outputs[0], tokens)
            rows[tokens] = out
            moved += 1
    if moved:
        yield Change(
            rewrite="rows-throughout",
            place="",
            description=f"{moved} nodes on the rows of one matrix, without Reshapes around them",
        )


def _last_axis(node: ir.Node) -> dict[str, int]:
    return {"axis": -1} if node.op_type in ROW_NORMS else {}


def _as_rows(
    write: Writer, node: ir.Node, rows: dict[ir.Value, ir.Value], channels: int
) -> list[ir.Value | None] | None:
    """The inputs of a node that acts on each row separately, as rows; None for another node."""
    if len(node.outputs) != 1:
        return None
    if node.op_type in UNARY or (node.op_type in ROW_NORMS and attribute(node, "axis", -1) in (-1, 2)):
        first = node.inputs[0]
        alike = all(numbers is not None and numbers.ndim < 2 for numbers in map(constant, node.inputs[1:]))
        return [rows[first], *node.inputs[1:]] if first in rows and alike else None
    if node.op_type not in ("Add", "Mul") or not any(entry in rows for entry in node.inputs):
        return None
    inputs: list[ir.Value | None] = []
    for entry in node.inputs:
        assert entry is not None
        numbers = constant(entry)
        if numbers is not None and numbers.ndim < 2:
            inputs.append(entry)
        elif numbers is None and sizes(entry) == sizes(node.outputs[0]):
            inputs.append(rows[entry] if entry in rows else _rows(write, entry, channels))
        else:
            return None
    return inputs


LINEAR_AS_GEMM = Rewrite(
    "linear-as-gemm", "a linear layer with a bias on tokens [B, N, c]", _layers_as_gemm, order=92, keeps=True
)
ACCUMULATE = Rewrite(
    "accumulate",
    "a linear layer on tokens that is added to a value of its shape; without a bias, or if another layer can take it",
    _sums_in_the_product,
    order=91,
)
ROWS_THROUGHOUT = Rewrite(
    "rows-throughout",
    "elementwise functions, norms over channels and sums after a Gemm on tokens",
    _rows_throughout,
    order=95,
    keeps=True,
)
