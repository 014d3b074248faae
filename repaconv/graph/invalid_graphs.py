"""Why a graph cannot run: a node reads a value that nothing computes, or a weight does not fit its input or node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.graph.graph_without_weights import shapes_from_inputs
from repaconv.graph.onnx_files import attributes_of

if TYPE_CHECKING:
    import onnx

    Dims = tuple[int | str | None, ...]


def uncomputed_input(model: onnx.ModelProto) -> str:
    """The first value that a node reads before it is computed, and the node by its outputs; empty without one.

    ONNX's checker names the node only, which need not have a name.
    """
    known = {value.name for value in (*model.graph.input, *model.graph.initializer)} | {""}
    known.update(sparse.values.name for sparse in model.graph.sparse_initializer)
    for node in model.graph.node:
        if missing := [name for name in node.input if name not in known]:
            return (
                f"{node.op_type}, which computes {', '.join(node.output)}, reads {missing[0]}, which is no input, no "
                "initializer and no output of a node before it"
            )
        known.update(node.output)
    return ""


def misfit(model: onnx.ModelProto) -> str:
    """The first product or convolution whose weight does not fit its input or its kernel_shape; empty without one.

    Only shapes that follow from the graph's inputs and weights count, not those that the file declares.
    """
    shapes = shapes_from_inputs(model)
    for node in model.graph.node:
        if node.domain or node.op_type not in ("Conv", "ConvTranspose", "MatMul", "Gemm"):
            continue
        image, weight = (shapes.get(name) for name in node.input[:2])
        if image and weight and (why := _why_not(node, image, weight)):
            return f"{node.op_type} {node.name or f'that computes {node.output[0]}'} {why}"
    return ""


def _why_not(node: onnx.NodeProto, image: Dims, weight: Dims) -> str:
    """Why a node cannot multiply an input of that shape by a weight of that shape; empty if it can, or if it is
    unknown.
    """
    found = attributes_of(node)
    sizes = f"cannot multiply {node.input[0]} {_as_text(image)} by {node.input[1]} {_as_text(weight)}"
    if not node.op_type.startswith("Conv"):
        flipped = node.op_type == "Gemm"
        inner = image[0 if flipped and found.get("transA") else -1]
        rows = weight[-1 if flipped and found.get("transB") else -2 if len(weight) > 1 else 0]
        return "" if _may_equal(inner, rows) else sizes
    group = found.get("group", 1)
    if group < 1:
        return f"has group={group}, and needs one or more"
    if len(image) < 3 or len(image) != len(weight):
        return sizes
    kernel = found.get("kernel_shape") or weight[2:]
    if len(kernel) != len(weight) - 2 or not all(map(_may_equal, kernel, weight[2:])):
        return f"has kernel_shape={list(kernel)}, and its weight {node.input[1]} is {_as_text(weight)}"
    taken = weight[0] if node.op_type == "ConvTranspose" else weight[1] * group if isinstance(weight[1], int) else None
    whole = not isinstance(weight[0], int) or weight[0] % group == 0
    return "" if whole and _may_equal(image[1], taken) else f"{sizes} with group={group}"


def _may_equal(one: int | str | None, other: int | str | None) -> bool:
    """Whether two sizes are equal, or one of them is unknown."""
    return not (isinstance(one, int) and isinstance(other, int)) or one == other


def _as_text(shape: Dims) -> str:
    """A shape as text; an unknown size is ``?``."""
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
