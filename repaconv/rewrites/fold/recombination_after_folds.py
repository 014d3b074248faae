"""finish: put together what the folds have split up to analyze it, in the form that runtimes expect.

- Slices that together cover a value become one Split, placed after operators that act alike on every slice.
- A linear layer on a matrix becomes a Gemm.
- If the original graph did so, keys are transposed by a final Transpose of the last two axes, which runtimes fuse into
  the product.
- Equal matrices become one initializer, so that a weight shared by several layers stays shared.
- Targets of Reshapes that ONNX Runtime's optimizer named get other names: it gives the same ones again when it loads a
  graph whose nodes are gone, and then fails ("Attempt to replace the existing tensor").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.canonical_form import LAST_AXES_KEY
from repaconv.graph.index_selections import are_consecutive, selection_of
from repaconv.graph.linear_layers import linear_of
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, is_constant, made_by, nodes_of, only_reader, stored
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import rank_of, set_shape, sizes
from repaconv.graph.tensor_views import split_last_transpose
from repaconv.results import Change
from repaconv.rewrites.fold import operators_past_views

if TYPE_CHECKING:
    import onnx_ir as ir


NAMED_BY_ONNX_RUNTIME = "_new_shape"
"""How the name of a target ends that ONNX Runtime wrote when it merged Reshapes; before that is the node's name."""
COMPARED_NUMBERS = 16
"""How many numbers of a constant are compared before the whole constant is."""


def apply(model: ir.Model) -> Iterator[Change]:
    """Put split operators together; in place. No changes are reported, since none is of interest to the user."""
    _split(model)
    for node in nodes_of(model, "MatMul"):
        for value in node.inputs if model.meta.get(LAST_AXES_KEY, True) else ():
            _transposed_last(model, value)
        _gemm(model, node)
    _rename_targets(model)
    clean(model)
    operators_past_views.move_views_before_splits(model)
    share(model)
    yield from ()


def _split(model: ir.Model) -> None:
    """Replace slices that together cover a value by one Split."""
    found: dict[tuple[ir.Value, int], dict[ir.Node, int]] = {}
    for node in nodes_of(model, "Slice"):
        chosen = selection_of(node.outputs[0])
        if chosen is not None and chosen.places.size and are_consecutive(chosen.places):
            found.setdefault((chosen.value, chosen.axis), {})[node] = int(chosen.places[0])
    order = {node: place for place, node in enumerate(model.graph)}
    part_of: dict[ir.Value, ir.Value] = {}  # what took the place of a slice that is sliced further
    for (whole, axis), starts in found.items():
        value = part_of.get(whole, whole)
        slices = sorted(starts, key=lambda node: starts[node])
        widths = [width for node in slices if isinstance(width := (sizes(node.outputs[0]) or ())[axis], int)]
        ends = [int(end) for end in np.cumsum([0, *widths])]
        if len(widths) < len(slices) or len(slices) < 2 or [starts[node] for node in slices] != ends[:-1]:
            continue
        if (sizes(value) or ())[axis] == ends[-1]:
            parts = Writer(model, min(slices, key=lambda node: order[node])).split(value, widths, axis)
            for node, part in zip(slices, parts, strict=True):
                set_shape(part, sizes(node.outputs[0]), value)
                part_of[node.outputs[0]] = part
                Writer(model, node).replace(node.outputs[0], part)


def _rename_targets(model: ir.Model) -> None:
    for node in nodes_of(model, "Reshape"):
        target = node.inputs[1]
        if target is not None and is_constant(target) and (target.name or "").endswith(NAMED_BY_ONNX_RUNTIME):
            node.replace_input_with(1, Writer(model, node).exactly(stored(target)))


def _transposed_last(model: ir.Model, value: ir.Value | None) -> None:
    """Split the Transpose of a product's factor into two, so that the second one only swaps the last two axes."""
    node = made_by(value, "Transpose")
    if node is None or value is None or only_reader(value, "MatMul") is None or value.dtype is None:
        return
    split_last_transpose(model, node)


def _gemm(model: ir.Model, node: ir.Node) -> None:
    add = only_reader(node.outputs[0], "Add") if rank_of(node.outputs[0]) == 2 else None
    layer = linear_of(add.outputs[0]) if add is not None else None
    if add is None or layer is None or layer.bias is None or rank_of(layer.x) != 2:
        return
    bias = next(value for value in add.inputs if is_constant(value))
    if rank_of(bias) == 1 and node.inputs[1] is not None:
        write = Writer(model, add)
        new = write("Gemm", layer.x, node.inputs[1], bias)
        set_shape(new, sizes(add.outputs[0]), layer.x)
        write.replace(add.outputs[0], new)


def share(model: ir.Model) -> None:
    """Merge equal matrices into one initializer; in place.

    A few numbers tell most matrices apart, so that large ones are rarely compared in full.
    """
    found: dict[object, list[ir.Value]] = {}
    for value in tuple(model.graph.initializers.values()):
        if value.const_value is None or value.is_graph_input() or value.is_graph_output():
            continue
        numbers = value.const_value.numpy()
        if numbers.ndim < 2 or numbers.dtype.hasobject:
            continue
        few = np.ravel(numbers)[:: max(1, numbers.size // COMPARED_NUMBERS)].tobytes()
        alike = found.setdefault((value.dtype, numbers.shape, few), [])
        twin = next((one for one in alike if _bytes(one) == numbers.tobytes()), None)
        if twin is None:
            alike.append(value)
        else:
            value.replace_all_uses_with(twin)
            model.graph.initializers.pop(value.name or "")


def _bytes(value: ir.Value) -> bytes:
    assert value.const_value is not None
    found: bytes = value.const_value.numpy().tobytes()
    return found


FINISH = Rewrite("finish", "everywhere: the same operators, put together", apply, keeps=True)
