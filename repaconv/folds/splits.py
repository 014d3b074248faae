"""What is done alike to every piece of a value is done once, before it is taken apart; `moves` is the way back.

Pieces of tokens that are each shown as an image are pieces of one image. Heads stay as products take them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.graphs.nodes import Writer, attribute, nodes_of, only_reader
from repaconv.graphs.operators import VIEWS
from repaconv.graphs.selections import perm_of
from repaconv.graphs.shapes import Sizes, as_numbers, set_shape, sizes
from repaconv.graphs.views import reshaped

if TYPE_CHECKING:
    import onnx_ir as ir


def after_views(model: ir.Model) -> None:
    """Let views of all pieces of a Split, alike but for the pieces' sizes, be one before it; in place."""
    while any(_after_view(model, node) for node in nodes_of(model, "Split")):
        pass


def _after_view(model: ir.Model, node: ir.Node) -> bool:
    views = [view for value in node.outputs if (view := only_reader(value, "Transpose", "Reshape")) is not None]
    shape, ends = sizes(node.inputs[0]), [sizes(view.outputs[0]) for view in views]
    if len(views) < len(node.outputs) or shape is None or any(map(_is_multiplied, views)):
        return False
    axis, write = int(attribute(node, "axis", 0)) % len(shape), Writer(model, node)
    seen = _turned(write, node, views, axis) or _regrouped(write, node, ends, axis, {view.op_type for view in views})
    if seen is None:
        return False
    whole, axis = seen
    widths = as_numbers(end[axis] for end in ends if end is not None)
    assert widths is not None
    for view, piece, end in zip(views, write.split(whole, widths, axis), ends, strict=True):
        set_shape(piece, end, whole)
        Writer(model, view).replace(view.outputs[0], piece)
    model.graph.remove([*views, node], safe=True)
    return True


def _is_multiplied(view: ir.Node) -> bool:
    """Whether a product takes what it shows, by other views perhaps."""
    users = [user for user, _ in view.outputs[0].uses()]
    return any(user.op_type == "MatMul" or (user.op_type in VIEWS and _is_multiplied(user)) for user in users)


def _turned(write: Writer, node: ir.Node, views: list[ir.Node], axis: int) -> tuple[ir.Value, int] | None:
    """The whole, if all are turned the same way, and the axis of the pieces then."""
    x, shape = node.inputs[0], sizes(node.inputs[0]) or ()
    perms = [perm_of(view, len(shape)) for view in views if view.op_type == "Transpose"]
    if x is None or len(perms) < len(views) or any(perm != perms[0] for perm in perms):
        return None
    new = write("Transpose", x, perm=perms[0])
    set_shape(new, tuple(shape[place] for place in perms[0]), x)
    return new, perms[0].index(axis)


def _regrouped(
    write: Writer, node: ir.Node, ends: list[Sizes | None], axis: int, operators: set[str]
) -> tuple[ir.Value, int] | None:
    """The whole, if as much lies before the pieces' axis as did, and all else is the same for all pieces."""
    x, shape = node.inputs[0], sizes(node.inputs[0]) or ()
    known = [end for end in ends if end is not None and len(end) == len(ends[0] or ())]
    if x is None or operators != {"Reshape"} or len(known) < len(ends):
        return None
    given = [(sizes(value) or ())[axis] for value in node.outputs]
    for place in range(len(known[0])):
        before, behind = known[0][:place], known[0][place + 1 :]
        outer = before == shape[:axis] or (behind == shape[axis + 1 :] and [end[place] for end in known] == given)
        widths = as_numbers(end[place] for end in known)
        if outer and widths is not None and all((end[:place], end[place + 1 :]) == (before, behind) for end in known):
            new = reshaped(write, x, (*before, sum(widths), *behind))
            return None if new is None else (new, place)
    return None
