"""Replace values that depend only on shapes and constants by constants.

A constant is written if it is not larger than the constants that it is computed from. On the way to it, values may be
larger: a kernel that a forward computes from parameters (OREPA) is a sum of outer products, each larger than its
factors. A larger constant that no product reads is written if its share of all numbers is at most the share of the
graph's nodes that it saves: the position biases that Swin gathers from a table.

An Expand is removed if its readers broadcast anyway. A reduction keeps the axes that its reader adds again, and so does
a Gather of one position.

If at most one dimension of a Reshape is dynamic, or all others are those of its input at the same axes, its target
becomes a constant, so that it no longer reads other shapes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.graph.constant_if_inlining import inline_constant_ifs
from repaconv.graph.index_selections import axes_of, selection_of, split_sizes
from repaconv.graph.models_in_onnx_ir import clean, remove_unused
from repaconv.graph.no_op_nodes import remove_no_ops
from repaconv.graph.nodes_and_constants import (
    Writer,
    attribute,
    constant,
    has_subgraphs,
    is_read,
    is_read_once,
    made_by,
    nodes_of,
    only_reader,
)
from repaconv.graph.operator_facts import BROADCASTING, HALVES, PRODUCTS, QUANTIZING, RANDOM
from repaconv.graph.shape_arithmetic import Integers, entries_of
from repaconv.graph.shape_inference import infer, infer_node
from repaconv.graph.sizes_from_input_shapes import read_sizes_after_norms, read_sizes_from_inputs
from repaconv.graph.symbolic_shapes import (
    SymbolicSize,
    as_numbers,
    known_product,
    rank_of,
    reshape_target,
    set_shape,
    sizes,
)

if TYPE_CHECKING:
    import onnx_ir as ir


def fold_shapes(model: ir.Model) -> None:
    """Record every shape that can be inferred, turn Reshape targets into constants, and remove unused nodes.

    Where that decides an If, its branch takes its place. Nodes whose output is their input are removed. What follows is
    folded again: it may have a known shape now. The graph's function stays the same.
    """
    _fold_shapes(model)
    while inline_constant_ifs(model) | remove_no_ops(model):
        infer(model)
        _fold_shapes(model)


def _fold_shapes(model: ir.Model) -> None:
    known = Integers()
    computed: dict[ir.Value, _Computed] = {}
    written: dict[ir.Value, ir.Node] = {}
    for node in tuple(model.graph):
        infer_node(known, node, model.graph.opset_imports.get("", 18), anew=not all(map(_is_known, node.outputs)))
        _write_type(node)
        _fold_constant(model, node, known, computed, written)
    _write_larger(model, computed)
    for node in tuple(model.graph):
        if not node.domain and node.op_type in _RULES:
            _RULES[node.op_type](model, node, known)
    remove_unused(model)
    read_sizes_from_inputs(model, known)
    read_sizes_after_norms(model)
    clean(model)
    for node in nodes_of(model, "Unsqueeze", "Reshape"):  # of a variance, PyTorch's exporter writes a Reshape
        _keep_reduced_axes(node)
    remove_unused(model)


def _write_type(node: ir.Node) -> None:
    """Write a CastLike as a Cast, if the type that it casts to is known; in place.

    PyTorch's exporter writes them with ``optimize=False``, also for the zeros of a convolution without a bias.
    """
    import onnx_ir as ir

    if node.op_type != "CastLike" or node.domain or (like := node.inputs[1]) is None or like.dtype is None:
        return
    node.op_type = "Cast"
    node.resize_inputs(1)
    node.attributes.add(ir.AttrInt64("to", int(like.dtype)))


def _is_known(value: ir.Value) -> bool:
    """Return whether type and shape of a value are fully known."""
    return value.dtype is not None and as_numbers(sizes(value) or (SymbolicSize(()),)) is not None


ALWAYS_WRITTEN, LARGEST_COMPUTED = 1 << 12, 1 << 22
"""A constant of up to the first number of entries is written whatever it is computed from. A value of up to the second,
or 16 times what it is computed from, is computed because constants computed from it may be smaller."""


class _Computed(NamedTuple):
    """A value that is known but not written, since it is larger than the constants that it is computed from.

    Attributes:
        numbers: Its numbers.
        sources: The number of entries of every constant that it is computed from.
    """

    numbers: np.ndarray
    sources: dict[ir.Value, int]


def _fold_constant(
    model: ir.Model,
    node: ir.Node,
    known: Integers,
    computed: dict[ir.Value, _Computed],
    written: dict[ir.Value, ir.Node],
) -> None:
    """Replace a node by a constant if it depends only on known sizes or on constants.

    ``written`` are large constants that were written before, and the nodes that they replace.
    """
    import onnx_ir as ir

    value = node.outputs[0]
    if value.is_graph_output() or any(map(is_read, node.outputs[1:])):
        return
    found = known.get(value)
    whole = found is not None and as_numbers(entries_of(found)) is not None
    if whole and value.dtype == ir.DataType.INT64:
        numbers = np.asarray(found, np.int64)
    elif whole and value.dtype == ir.DataType.BOOL and node.op_type in ("Equal", "Cast"):
        numbers = np.asarray(found, bool)
    else:
        result = _evaluated(node, model.graph.opset_imports.get("", 18), computed)
        if result is None:
            return
        numbers = result.numbers
        if numbers.size > max(sum(result.sources.values()), ALWAYS_WRITTEN):
            computed[value] = result
            return
    new = Writer(model, node).exactly(numbers)
    value.replace_all_uses_with(new)
    if numbers.size > ALWAYS_WRITTEN and all(read is None or read.const_value is not None for read in node.inputs):
        written[new] = node
    _release_intermediates(node, model.graph.opset_imports.get("", 18), written)


def _write_larger(model: ir.Model, computed: dict[ir.Value, _Computed]) -> None:
    """Write values that are larger than what they are computed from, where that saves enough nodes; in place."""
    if not computed:
        return
    nodes, held = len(model.graph), sum(known_product(sizes(v) or ()) for v in model.graph.initializers.values())
    for value, one in computed.items():
        readers = [node for node in value.consumers() if any(map(is_read, node.outputs))]
        last = [node for node in readers if not computed.keys() >= {*node.outputs}]
        if not last or any(node.op_type in PRODUCTS for node in last):
            continue
        if one.numbers.size * nodes > held * len(_only_for(value)):
            continue
        node = value.producer()
        assert node is not None
        value.replace_all_uses_with(Writer(model, node).exactly(one.numbers))


def _only_for(value: ir.Value) -> set[ir.Node]:
    """The nodes that compute a value, and nothing else."""
    found: set[ir.Node] = set()
    todo = [value.producer()]
    while todo:
        node = todo.pop()
        if node is None or (found and not all(found.issuperset(output.consumers()) for output in node.outputs)):
            continue
        found.add(node)
        todo += [given.producer() for given in node.inputs if given is not None]
    return found


def _release_intermediates(node: ir.Node, opset: int, written: dict[ir.Value, ir.Node]) -> None:
    """Release the numbers of constants that a replaced node was the last to read; they are computed again if needed.

    A computed weight may have many values on the way to it, each as large as itself.
    """
    import onnx_ir as ir

    for value in node.inputs:
        if value is None or value not in written or (known := value.const_value) is None:
            continue
        if not any(is_read(output) for user in value.consumers() for output in user.outputs):
            again = partial(_computed_again, written.pop(value), opset)
            value.const_value = ir.LazyTensor(again, known.dtype, ir.Shape(known.shape), name=value.name)


def _computed_again(node: ir.Node, opset: int) -> ir.TensorProtocol:
    import onnx_ir as ir

    found = _evaluated(node, opset, {})
    assert found is not None  # it was computed before
    return ir.tensor(found.numbers)


def _evaluated(node: ir.Node, opset: int, computed: dict[ir.Value, _Computed]) -> _Computed | None:
    """Evaluate a node with constant inputs; None if that fails or the output is much larger than the inputs."""

    values = [value for value in node.inputs if value is not None]
    if not all(value in computed or (value.const_value is not None) for value in values):
        return None
    inputs = [computed.get(value) or _stored(value) for value in values]
    if node.domain or not values or node.op_type in (*RANDOM, *QUANTIZING) or is_computed_otherwise(node, opset):
        return None
    if has_subgraphs(node):
        return None
    known = [one for one in inputs if one is not None]
    sources = {source: size for one in known for source, size in one.sources.items()}
    largest = max(16 * sum(sources.values()), LARGEST_COMPUTED)
    if len(known) < len(values) or _entries(node.outputs[0]) > largest:
        return None
    arrays = {value.name: one.numbers for value, one in zip(values, known, strict=True)}
    if node.op_type == "Identity":  # whose reference implementation copies
        found: np.ndarray | None = known[0].numbers
    else:
        found = reference_output(node, arrays, opset)
    return _Computed(found, sources) if isinstance(found, np.ndarray) and found.size <= largest else None


_COMPUTED_OTHERWISE = ("AveragePool", "ConvTranspose", "GlobalMaxPool", "LRN", "MaxPool")
"""Operators that ONNX's reference implementation computes wrongly for some pads, groups or numbers of axes."""


def is_computed_otherwise(node: ir.Node, opset: int) -> bool:
    """Whether ONNX's reference implementation, or float64, gives other numbers than a runtime does."""
    if node.op_type == "Cast":  # float64 keeps what rounding to half precision takes away
        kind = node.inputs[0].dtype if node.inputs[0] is not None else None
        return attribute(node, "to", 0) in HALVES and kind is not None and kind.is_floating_point()
    if node.op_type == "Resize":
        return bool(attribute(node, "coordinate_transformation_mode", "half_pixel") == "align_corners")
    if node.op_type == "Dropout":  # with training_mode it draws numbers
        return len(node.inputs) > 2
    if node.op_type in ("Softmax", "LogSoftmax", "Hardmax"):  # over all axes from one on
        return opset < 13
    if node.op_type == "BatchNormalization":  # by the statistics of the batch
        return opset < 14
    return node.op_type in _COMPUTED_OTHERWISE


def _stored(value: ir.Value) -> _Computed | None:
    """A constant of the graph; None for any other value."""
    if value.const_value is None or value.is_graph_input():
        return None
    return _Computed(value.const_value.numpy(), {value: value.const_value.size})


def _entries(value: ir.Value) -> int:
    """How many entries a value has, as far as its sizes are known."""
    return known_product(sizes(value) or ())


def _gathered(node: ir.Node, data: np.ndarray, indices: np.ndarray) -> np.ndarray | None:
    """Evaluate a GatherND; the reference implementation loops over single indices."""
    if attribute(node, "batch_dims", 0):
        return None
    try:
        picked: np.ndarray = data[tuple(np.moveaxis(indices, -1, 0))]
    except IndexError:  # it would also fail in a runtime
        return None
    return picked


def _scattered(data: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray | None:
    """Evaluate a ScatterND; the reference implementation loops over single indices."""
    changed: np.ndarray = data.copy()
    places = tuple(np.moveaxis(indices, -1, 0))
    try:
        fits = changed[places].shape == updates.shape  # numpy would repeat updates, which a runtime refuses
    except IndexError:  # it would also fail in a runtime
        return None
    if fits:
        changed[places] = updates
    return changed if fits else None


def reference_output(node: ir.Node, arrays: dict[str | None, np.ndarray], opset: int) -> np.ndarray | None:
    """Evaluate a node with ONNX's reference implementation, or as it does where that loops over single indices."""
    import onnx
    import onnx_ir as ir
    from onnx.reference import ReferenceEvaluator

    if node.op_type in ("GatherND", "ScatterND") and attribute(node, "reduction", "none") == "none":
        given = [arrays[value.name] for value in node.inputs if value is not None]
        return _gathered(node, *given) if node.op_type == "GatherND" else _scattered(*given)
    proto = ir.to_proto(node)
    inputs = [
        onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in arrays.items()
    ]
    graph = onnx.helper.make_graph([proto], "constant", inputs, [onnx.ValueInfoProto(name=proto.output[0])])
    whole = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    try:
        found: np.ndarray = ReferenceEvaluator(whole).run(None, arrays)[0]
    except Exception:  # a type or operator that the reference lacks
        return None
    return found


def _split(model: ir.Model, node: ir.Node, _known: Integers) -> None:
    """Write the parts of a constant as constants."""
    numbers, axis = constant(node.inputs[0]), int(attribute(node, "axis", 0))
    lengths = split_sizes(node, numbers.shape[axis]) if numbers is not None else None
    if numbers is None or lengths is None or any(part.is_graph_output() for part in node.outputs):
        return
    write = Writer(model, node)
    for part, own in zip(node.outputs, np.split(numbers, np.cumsum(lengths)[:-1], axis), strict=True):
        part.replace_all_uses_with(write.constant(own, like=node.inputs[0]))


def _expand(_model: ir.Model, node: ir.Node, _known: Integers) -> None:
    read_past_expand(node)


def _tile(_model: ir.Model, node: ir.Node, _known: Integers) -> None:
    """Treat a Tile that repeats axes of length 1 as the Expand that computes the same."""
    before, after = sizes(node.inputs[0]), sizes(node.outputs[0])
    if before is None or after is None or len(before) != len(after):
        return
    if all(size in (1, repeated) for size, repeated in zip(before, after, strict=True)):
        read_past_expand(node)


def read_past_expand(node: ir.Node) -> None:
    """Let all that reads an Expand read its input, if that has the same shape, or if they broadcast it anyway."""
    x, out = node.inputs[0], node.outputs[0]
    if x is None or sizes(x) is None or sizes(out) is None:
        return
    if sizes(x) == sizes(out) and not out.is_graph_output():
        out.replace_all_uses_with(x)
        return
    for reader, place in tuple(out.uses()):
        if not reader.domain and reader.op_type in BROADCASTING and _is_broadcast_anyway(x, reader, place):
            reader.replace_input_with(place, x)


def _is_broadcast_anyway(x: ir.Value, reader: ir.Node, place: int) -> bool:
    """Whether a reader's output has the same shape if it reads x itself, not the Expand of it."""
    others = [sizes(value) for at, value in enumerate(reader.inputs) if at != place]
    wanted, own = sizes(reader.outputs[0]), sizes(x) or ()
    if wanted is None or any(shape is None for shape in others):
        return False
    shapes = [shape for shape in (own, *others) if shape is not None]
    aligned = [(1,) * (len(wanted) - len(shape)) + shape for shape in shapes]
    same = all(size in column for size, column in zip(wanted, zip(*aligned, strict=True), strict=True))
    return same and max(map(len, shapes)) == len(wanted)


def _gather_nd(model: ir.Model, node: ir.Node, _known: Integers) -> None:
    """Write a GatherND along the first axis, as torch exports an index such as ``x[[2, 1, 0]]``, as a Gather."""
    indices = constant(node.inputs[1])
    if indices is None or indices.shape[-1] != 1 or attribute(node, "batch_dims", 0):
        return
    write = Writer(model, node)
    new = write("Gather", node.inputs[0], write.constant(indices.squeeze(-1)), axis=0)
    new.shape = node.outputs[0].shape
    write.replace(node.outputs[0], new)


def _unsqueeze(model: ir.Model, node: ir.Node, _known: Integers) -> None:
    """Let a Gather of one position before an Unsqueeze keep the axis that is added."""
    gather, out = made_by(node.inputs[0], "Gather"), node.outputs[0]
    if gather is None or only_reader(gather.outputs[0]) is not node or sizes(out) is None:
        return
    if not _is_number(out):
        return
    position, rank = constant(gather.inputs[1]), rank_of(out)
    if position is None or position.ndim or axes_of(node, rank) != [int(attribute(gather, "axis", 0)) % rank]:
        return
    write = Writer(model, node)
    new = write("Gather", gather.inputs[0], write.constant(position.reshape(1)), axis=attribute(gather, "axis", 0))
    set_shape(new, sizes(out), out)
    write.replace(out, new)


def _keep_reduced_axes(node: ir.Node) -> None:
    """Let a reduction keep the axes that its only reader adds again as axes of length 1."""
    import onnx_ir as ir

    reduction = node.inputs[0].producer() if node.inputs[0] is not None else None
    if reduction is None or reduction.domain or not reduction.op_type.startswith("Reduce"):
        return
    between, out, before = reduction.outputs[0], node.outputs[0], sizes(reduction.inputs[0])
    axes = axes_of(reduction, len(before)) if before is not None else None
    if before is None or axes is None or not is_read_once(between) or out.is_graph_output():
        return
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(before))
    if not attribute(reduction, "keepdims", 1) and sizes(out) == kept:
        reduction.attributes.add(ir.AttrInt64("keepdims", 1))
        set_shape(between, kept, between)
        out.replace_all_uses_with(between)


def _reshape(model: ir.Model, node: ir.Node, known: Integers) -> None:
    """Make the target of a Reshape a constant; write a Flatten as such a Reshape.

    Zeros, which copy sizes, are written only where the target is computed.
    """
    said = constant(node.inputs[1]) if node.op_type == "Reshape" else None
    before, shape = sizes(node.inputs[0]), sizes(node.outputs[0])
    if shape is None or 0 in shape:
        return
    target = reshape_target((), shape)
    if target is None and said is None and before is not None and 0 not in before:
        copying = reshape_target(before, shape)
        target = copying if copying is not None and _is_inferred(model, node, known, copying) else None
    if target is None or (said is not None and said.all()):
        return
    write = Writer(model, node)
    if node.op_type == "Flatten":
        new = write("Reshape", node.inputs[0], write.constant(target))
        new.shape = node.outputs[0].shape
        write.replace(node.outputs[0], new)
        return
    node.replace_input_with(1, write.constant(target))
    node.attributes.pop("allowzero", None)  # the default is 0, and opsets before 14 lack it


def _is_inferred(model: ir.Model, node: ir.Node, known: Integers, target: list[int]) -> bool:
    """Whether a runtime infers the -1 of a target, if it has one. Next to a copied size of 0 it does not.

    That may be if a copied size depends on numbers, but not if the computed target has a -1, too.
    """
    wanted = known.int_of(node.inputs[1]) if node.op_type == "Reshape" else None
    if -1 not in target or (isinstance(wanted, list) and -1 in wanted):
        return True
    copied = {size for size, entry in zip(sizes(node.inputs[0]) or (), target, strict=False) if entry == 0}
    return copied <= {size for value in model.graph.inputs for size in sizes(value) or ()}


def _gather(model: ir.Model, node: ir.Node, _known: Integers) -> None:
    """Write a Gather of a Gather as one Gather, one of all entries in order as a Reshape, and one of the only position
    of an axis as a Squeeze, which is a view."""
    x, given, axis = node.inputs[0], constant(node.inputs[1]), int(attribute(node, "axis", 0))
    once = x is not None and made_by(x, "Gather") and is_read_once(x)
    inner = selection_of(x) if once else None
    if inner is not None and inner.keeps and given is not None and axis % rank_of(x) == inner.axis:
        node.replace_input_with(1, Writer(model, node).constant(inner.places[given % len(inner.places)]))
        node.replace_input_with(0, inner.value)
    indices, shape = constant(node.inputs[1]), sizes(node.inputs[0])
    whole = indices is not None and indices.ndim > 1 and shape == (indices.size,)
    if whole and indices is not None and (indices.reshape(-1) == np.arange(indices.size)).all():
        write = Writer(model, node)
        new = write("Reshape", node.inputs[0], write.constant(list(indices.shape)))
        new.shape = node.outputs[0].shape
        write.replace(node.outputs[0], new)
    only = indices is not None and not indices.ndim and int(indices) in (0, -1)
    if only and shape and shape[axis] == 1 and _is_number(node.outputs[0]):
        write = Writer(model, node)
        new = write("Squeeze", node.inputs[0], write.constant([axis % len(shape)]))
        set_shape(new, sizes(node.outputs[0]), node.outputs[0])
        write.replace(node.outputs[0], new)


def _is_number(value: ir.Value) -> bool:
    """Whether a value has a floating-point type: what computes shapes has its own rules."""
    return value.dtype is not None and value.dtype.is_floating_point()


_RULES = {
    "Expand": _expand,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Split": _split,
    "Tile": _tile,
    "Unsqueeze": _unsqueeze,
}
