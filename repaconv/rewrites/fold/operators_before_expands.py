"""Move operators before an Expand: what acts on every position alike acts on fewer numbers before they are repeated.

    expand(x) W = expand(x W)

A network may repeat a token, concatenate it with all others and apply a linear layer (the readout of DPT): the token is
then multiplied once. Where the reader of the Expand broadcasts anyway, the Expand is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.graph.activation_patterns import is_activation
from repaconv.graph.nodes_and_constants import Writer, constant, made_by, only_reader, shape_of_constant
from repaconv.graph.operator_facts import ARITHMETIC, PRODUCTS
from repaconv.graph.shape_folding import read_past_expand
from repaconv.graph.symbolic_shapes import rank_of, set_shape, sizes
from repaconv.rewrites.fold.kernels_from_onnx import kernel_of

if TYPE_CHECKING:
    import onnx_ir as ir


def move_before_expands(model: ir.Model) -> list[str]:
    """Move linear layers, activations, and scales and shifts by constants to before an Expand; in place.

    Returns:
        The names of the moved layers.
    """
    moved: list[str] = []
    for node in tuple(model.graph):  # in the order of the graph, so that one moves after another
        place = next((place for place, value in enumerate(node.inputs) if made_by(value, "Expand")), None)
        if place is not None and node.graph is model.graph and _move(model, node, place):
            moved += [node.name or node.op_type] if node.op_type in PRODUCTS else []
    return moved


def _move(model: ir.Model, node: ir.Node, place: int) -> bool:
    """Move a node before the Expand that computes its input at a place; False if it does not act on that alike."""
    expand, out = made_by(node.inputs[place], "Expand"), node.outputs[0]
    if expand is None or only_reader(expand.outputs[0]) is None:
        return False  # several layers that read it are merged
    x, wide, done = expand.inputs[0], sizes(expand.outputs[0]), sizes(out)
    shape, channels = sizes(x), _channels(node, place, expand)
    if x is None or shape is None or wide is None or done is None or channels is None or len(done) != len(wide):
        return False
    whole = (1,) * (len(wide) - len(shape)) + shape
    repeated = {axis for axis, size in enumerate(whole) if size != wide[axis]}
    if not repeated or repeated & channels or any(whole[axis] != 1 for axis in repeated):
        return False
    if done != wide and node.op_type not in PRODUCTS:
        return False
    write = Writer(model, node)
    target = expand.inputs[1] if done == wide else _with_one(write, expand.inputs[1], channels.pop(), len(wide))
    if target is None:
        return False
    new = write.copy(node, *(x if at == place else value for at, value in enumerate(node.inputs)))
    set_shape(new, [1 if axis in repeated else size for axis, size in enumerate(done)][-len(shape) :], out)
    larger = write("Expand", new, target)
    set_shape(larger, done, out)
    write.replace(out, larger)
    repetition = larger.producer()
    if repetition is not None:
        read_past_expand(repetition)
    return True


def _channels(node: ir.Node, place: int, expand: ir.Node) -> set[int] | None:
    """The axes along which a node does not act alike, at most the one of channels; None if it is another node."""
    rank, own = rank_of(expand.outputs[0]), rank_of(expand.inputs[0])
    if is_activation(node):
        return set()
    if node.domain:
        return None
    if node.op_type == "MatMul":
        weight = shape_of_constant(node.inputs[1])
        return {rank - 1} if place == 0 and weight is not None and len(weight) == 2 and own > 1 else None
    if node.op_type == "Conv":
        kernel = kernel_of(node) if place == 0 and own == rank else None
        return {1} if kernel is not None and kernel.acts_by_place else None
    other = shape_of_constant(node.inputs[1 - place]) if node.op_type in ARITHMETIC else None
    if other is None or len(other) > own:
        return None
    return {rank - len(other) + axis for axis, size in enumerate(other) if size != 1}


def _with_one(write: Writer, target: ir.Value | None, axis: int, rank: int) -> ir.Value | None:
    """The target of an Expand with 1 for an axis, which then keeps its size; None if its length is unknown."""
    numbers, length = constant(target), (sizes(target) or ("",))[0]
    if not isinstance(length, int):
        return None
    place = axis - (rank - length)
    if place < 0:
        return target  # it does not name that axis
    if numbers is not None:
        return write.constant([1 if at == place else int(number) for at, number in enumerate(numbers)])
    parts = [write.constant([1])]
    if place > 0:
        parts.insert(0, write("Slice", target, write.constant([0]), write.constant([place])))
    if place < length - 1:
        parts.append(write("Slice", target, write.constant([place + 1]), write.constant([length])))
    new = write("Concat", *parts, axis=0)
    for part in (*parts, new):
        set_shape(part, (length,) if part is new else sizes(part), target)
    return new
