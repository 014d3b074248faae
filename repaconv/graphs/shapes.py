"""Shapes of a whole graph, free sizes by name, and what a graph computes of shapes: exporters leave much of it behind.

A name stands for one size: those of the graph's inputs are believed; on any other value a size has the name that it is
computed to have, or one that nobody else's has.

One pass from the inputs on. A size is a number or a name ("batch"); a small integer tensor is a list of sizes. Where
all but one size of a Reshape is known, its shape becomes a constant, so that nothing reads the shapes of others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.graphs.graph import attribute, constant

if TYPE_CHECKING:
    import onnx_ir as ir

Size = int | str
Sizes = tuple[Size, ...]
SMALL = 64
"""Integer tensors of more numbers than this are no shapes."""


def settle(model: ir.Model) -> None:
    """Write down every shape that can be known, and Reshapes' as constants; what nothing reads any more goes.

    The graph's function stays the same.
    """
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    known = _Known()
    for node in tuple(model.graph):
        known.follow(node, model.graph.opset_imports.get("", 18))
        _settle_constant(model, node, known)
    for node in tuple(model.graph):
        _settle_reshape(model, node, known)
    RemoveUnusedNodesPass()(model)


def name_sizes(model: ir.Model) -> None:
    """Give every free size a name: an input's own, or one that is nobody else's; in place.

    What a file calls the sizes of other values is believed as far as it is made of the inputs' names: tools number
    what they do not know (``unk__0``), each from 0 on, and graphs are put together.
    """
    import onnx_ir as ir

    for value in model.graph.inputs:
        if value.shape is not None:
            value.shape = ir.Shape([_told(value, axis) for axis in range(len(value.shape))])
    known = {name for value in model.graph.inputs for size in sizes(value) or () for name in _WORD.findall(str(size))}
    for node in model.graph:
        for value in node.outputs:
            told = sizes(value) or ()
            own = [isinstance(size, str) and not known.issuperset(_WORD.findall(size)) for size in told]
            if any(own):
                value.shape = ir.Shape([None if new else size for new, size in zip(own, told, strict=True)])


_WORD = re.compile(r"[^\W\d][\w.]*|\?")


def _told(value: ir.Value, axis: int) -> Size:
    """A size as a value's shape has it; one without a name gets one that is nobody else's."""
    dim = value.shape[axis] if value.shape is not None and axis < len(value.shape) else None
    if isinstance(dim, int):
        return dim if dim >= 0 else f"{value.name}.{axis}"
    return dim.value if dim is not None and dim.value else f"{value.name}.{axis}"


def infer(model: ir.Model, *, only_new: bool = False) -> None:
    """Write down every shape that can be known; in place.

    Args:
        model: Its free sizes have names.
        only_new: Values that have a shape keep it.
    """
    known = _Known()
    for node in model.graph:
        told = all(value.shape is not None and value.dtype is not None for value in node.outputs)
        known.follow(node, model.graph.opset_imports.get("", 18), anew=not (only_new and told))


def sizes(value: ir.Value | None) -> Sizes | None:
    """The shape with free sizes by name; None where the rank is unknown, and an unnamed size is nobody else's."""
    if value is None or value.shape is None:
        return None
    return tuple(
        dim if isinstance(dim, int) else (str(dim.value) if dim.value is not None else f"?{id(value)}.{axis}")
        for axis, dim in enumerate(value.shape)
    )


def groups(before: Sizes, after: Sizes) -> list[tuple[list[int], list[int]]] | None:
    """Which axes of a Reshape's input become which of its output: the smallest groups of equal product.

    Returns:
        Pairs of neighbouring axes, in order, or None if that cannot be told.
    """
    named = _as_numbers(before, after)
    if named is None:
        return None
    left, right = named
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(left) or j < len(right):
        ours, theirs = [i] if i < len(left) else [], [j] if j < len(right) else []
        a, b = (left[i] if ours else 1), (right[j] if theirs else 1)
        i, j = i + len(ours), j + len(theirs)
        while a != b:
            if a < b and i < len(left):
                a, ours, i = a * left[i], [*ours, i], i + 1
            elif b < a and j < len(right):
                b, theirs, j = b * right[j], [*theirs, j], j + 1
            else:
                return None
        found.append((ours, theirs))
    return found


def _as_numbers(before: Sizes, after: Sizes) -> tuple[list[int], list[int]] | None:
    """Names as primes; where one is left on each side and all else is equal, they are one."""
    names = sorted({size for size in (*before, *after) if isinstance(size, str)})
    ours, theirs = ([size for size in side if isinstance(size, str)] for side in (before, after))
    only = [[n for n in side if n not in other] for side, other in ((ours, theirs), (theirs, ours))]
    if sorted(ours) != sorted(theirs):
        if len(only[0]) != 1 or len(only[1]) != 1 or len(ours) != len(theirs):
            return None
        names.remove(only[1][0])
    primes = dict(zip(names, _PRIMES, strict=False))
    if len(names) > len(primes) or 0 in (*before, *after):
        return None
    if only[1] and only[0]:
        primes[only[1][0]] = primes[only[0][0]]
    left, right = ([primes[s] if isinstance(s, str) else s for s in side] for side in (before, after))
    return (left, right) if math.prod(left) == math.prod(right) else None


_PRIMES = (1_000_003, 1_000_033, 1_000_037, 1_000_039, 1_000_081, 1_000_099)


def _settle_reshape(model: ir.Model, node: ir.Node, known: _Known) -> None:
    import onnx_ir as ir

    if node.op_type == "Expand" and not node.domain and sizes(node.inputs[0]) == sizes(node.outputs[0]) is not None:
        if node.inputs[0] is not None and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(node.inputs[0])
        return
    if node.op_type == "Gather" and not node.domain:
        _settle_gather(model, node)
        return
    said = constant(node.inputs[-1]) if node.op_type == "Reshape" else None
    if node.op_type not in ("Reshape", "Flatten") or node.domain or (said is not None and said.all()):
        return
    shape = sizes(node.outputs[0])
    if shape is None or sum(isinstance(size, str) for size in shape) > 1 or 0 in shape:
        return
    from repaconv.graphs.graph import Writer

    write = Writer(model, node)
    target = write.constant([-1 if isinstance(size, str) else size for size in shape])
    if node.op_type == "Flatten":
        new = write("Reshape", node.inputs[0], target)
        new.shape = node.outputs[0].shape
        write.replace(node.outputs[0], new)
        return
    node.replace_input_with(1, target)
    node.attributes.pop("allowzero", None)
    node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)


def _settle_constant(model: ir.Model, node: ir.Node, known: _Known) -> None:
    """Put a constant in place of what has but one value: made of known sizes, or of constants."""
    import onnx_ir as ir

    from repaconv.graphs.graph import Writer

    value = node.outputs[0]
    if value.is_graph_output() or len(node.outputs) > 1:
        return
    found = known.ints.get(value)
    entries = found if isinstance(found, list) else [found]
    if found is not None and all(isinstance(entry, int) for entry in entries):
        numbers = np.asarray(found, np.int64)
        if node.op_type in ("Equal", "Cast", "Where", "ConstantOfShape") and value.dtype != ir.DataType.INT64:
            return
    elif (numbers := _evaluated(node, model.graph.opset_imports.get("", 18))) is None:  # type: ignore[assignment]
        return
    new = Writer(model, node).exactly(numbers)
    value.replace_all_uses_with(new)


def _evaluated(node: ir.Node, opset: int) -> np.ndarray | None:
    """A node of constants alone, by ONNX's reference implementation, unless it makes much of little."""
    import onnx
    import onnx_ir as ir
    from onnx.reference import ReferenceEvaluator

    values = [value for value in node.inputs if value is not None]
    raw = [value.const_value for value in values if not value.is_graph_input()]
    if node.domain or not values or any(v is None for v in raw) or len(raw) < len(values) or node.op_type in _UNSTEADY:
        return None
    if any(entry.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for entry in node.attributes.values()):
        return None
    arrays = {value.name: tensor.numpy() for value, tensor in zip(values, raw, strict=True) if tensor is not None}
    proto = ir.to_proto(node)
    inputs = [
        onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in arrays.items()
    ]
    graph = onnx.helper.make_graph([proto], "constant", inputs, [onnx.ValueInfoProto(name=proto.output[0])])
    whole = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    try:
        found = ReferenceEvaluator(whole).run(None, arrays)[0]
    except Exception:  # types that numpy does not have, operators that the reference lacks: it stays as it is
        return None
    large = max((array.size for array in arrays.values()), default=0)
    return found if isinstance(found, np.ndarray) and found.size <= max(large, 4096) else None


_UNSTEADY = (
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
    "DequantizeLinear",
    "QuantizeLinear",
)


def _settle_gather(model: ir.Model, node: ir.Node) -> None:
    """A Gather of everything in order is a Reshape."""
    from repaconv.graphs.graph import Writer

    indices, shape = constant(node.inputs[1]), sizes(node.inputs[0])
    whole = indices is not None and indices.ndim > 1 and shape == (indices.size,)
    if whole and indices is not None and (indices.reshape(-1) == np.arange(indices.size)).all():
        write = Writer(model, node)
        new = write("Reshape", node.inputs[0], write.constant(list(indices.shape)))
        new.shape = node.outputs[0].shape
        write.replace(node.outputs[0], new)


class _Known:
    """What is known so far: small integer tensors as lists of sizes; shapes stand on the values themselves."""

    def __init__(self) -> None:
        self.ints: dict[ir.Value, list[Size] | Size] = {}

    def set_shape(self, value: ir.Value, shape: Sequence[Size] | None) -> None:
        """Write a shape down; names stay names."""
        import onnx_ir as ir

        if shape is not None:
            value.shape = ir.Shape([size if isinstance(size, int) else ir.SymbolicDim(size) for size in shape])

    def int_of(self, value: ir.Value | None) -> list[Size] | Size | None:
        """A small integer tensor's entries (a single size for a scalar), if they are known."""
        if value is None:
            return None
        if value in self.ints:
            return self.ints[value]
        found = constant(value)
        if found is None or found.dtype.kind not in "iub" or found.size > SMALL or found.ndim > 1:
            return None
        return [int(entry) for entry in found] if found.ndim else int(found)

    def follow(self, node: ir.Node, opset: int, *, anew: bool = True) -> None:
        """Shapes of a node's outputs, unless they stay, and its value where that is made of shapes."""
        rule = _INTS.get(node.op_type) if node.domain == "" else None
        if rule and (found := rule(self, node)) is not None:
            self.ints[node.outputs[0]] = found
            self.set_shape(node.outputs[0], (len(found),) if isinstance(found, list) else ())
            return
        if not anew:
            return
        shaped = _SHAPES.get(node.op_type) if node.domain == "" else None
        if shaped and (shape := shaped(self, node)) is not None:
            self.set_shape(node.outputs[0], shape)
            if node.op_type == "Range":
                node.outputs[0].dtype = node.inputs[1].dtype if node.inputs[1] is not None else None
            elif node.op_type != "ConstantOfShape" and node.outputs[0].dtype is None and node.inputs[0] is not None:
                node.outputs[0].dtype = node.inputs[0].dtype
            return
        self._infer(node, opset)

    def _infer(self, node: ir.Node, opset: int) -> None:
        """By ONNX's own rules, of this node alone; what they cannot tell stays as the file said it."""
        import onnx
        import onnx_ir as ir

        if node.domain or any(
            entry.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for entry in node.attributes.values()
        ):
            return
        types, data = {}, {}
        for value in node.inputs:
            if value is None or value.shape is None or value.dtype is None:
                if value is not None:
                    return
                continue
            names = list(sizes(value) or ())
            types[value.name] = onnx.helper.make_tensor_type_proto(int(value.dtype), names)
            numbers = self.int_of(value)
            if value.dtype == ir.DataType.INT64 and numbers is not None:
                entries = numbers if isinstance(numbers, list) else [numbers]
                if all(isinstance(entry, int) for entry in entries):
                    dims = [len(entries)] if isinstance(numbers, list) else []
                    data[value.name] = onnx.helper.make_tensor(value.name, onnx.TensorProto.INT64, dims, entries)
        try:
            schema = onnx.defs.get_schema(node.op_type, opset, "")
            found = onnx.shape_inference.infer_node_outputs(
                schema, ir.serde.serialize_node(node), types, data, opset_imports=[onnx.helper.make_opsetid("", opset)]
            )
        except Exception:  # an operator that this onnx does not know, or types that do not fit: nothing is learnt
            return
        for value in node.outputs:
            told = found.get(value.name)
            if told is None or not told.HasField("tensor_type") or not told.tensor_type.HasField("shape"):
                continue
            dims = told.tensor_type.shape.dim
            if value.shape is not None and len(value.shape) != len(dims):
                value.shape = None
            shape = [
                dim.dim_value if dim.HasField("dim_value") else dim.dim_param or _told(value, axis)
                for axis, dim in enumerate(dims)
            ]
            self.set_shape(value, shape)
            value.dtype = ir.DataType(told.tensor_type.elem_type)


IntRule = Callable[[_Known, "ir.Node"], "list[Size] | Size | None"]


def _shape_of(known: _Known, node: ir.Node) -> list[Size] | None:
    found = sizes(node.inputs[0])
    if found is None:
        return None
    return list(found[slice(attribute(node, "start", 0), attribute(node, "end", None))])


def _gathered(known: _Known, node: ir.Node) -> list[Size] | Size | None:
    data, indices = known.int_of(node.inputs[0]), known.int_of(node.inputs[1])
    if not isinstance(data, list) or attribute(node, "axis", 0) not in (0, -1):
        return None
    if isinstance(indices, int):
        return data[indices]
    return [data[i] for i in indices if isinstance(i, int)] if isinstance(indices, list) else None


def _sliced(known: _Known, node: ir.Node) -> list[Size] | None:
    from repaconv.graphs.selections import slices, stepped

    data = known.int_of(node.inputs[0])
    parts: list[list[int] | None] = []
    for value in node.inputs[1:]:
        found = known.int_of(value)
        numbers = [n for n in found if isinstance(n, int)] if isinstance(found, list) else []
        if value is not None and (not isinstance(found, list) or len(numbers) != len(found)):
            return None
        parts.append(None if value is None else numbers)
    if not isinstance(data, list) or len(parts) < 2:
        return None
    ((_, part),) = slices(parts, 1)
    places = stepped(part, len(data))
    return None if places is None else [data[i] for i in places]


def _joined(known: _Known, node: ir.Node) -> list[Size] | None:
    parts = [known.int_of(value) for value in node.inputs]
    if any(not isinstance(part, list) for part in parts):
        return None
    return [size for part in parts if isinstance(part, list) for size in part]


def _as_list(known: _Known, node: ir.Node) -> list[Size] | None:
    found = known.int_of(node.inputs[0])
    return None if found is None or isinstance(found, list) else [found]


def _as_scalar(known: _Known, node: ir.Node) -> Size | None:
    found = known.int_of(node.inputs[0])
    return found[0] if isinstance(found, list) and len(found) == 1 else None


def _same(known: _Known, node: ir.Node) -> list[Size] | Size | None:
    integral = node.op_type == "Identity" or attribute(node, "to", 0) in (6, 7)
    return known.int_of(node.inputs[0]) if integral else None


def _entrywise(operation: Callable[[Any, Any], Size | None]) -> IntRule:
    def rule(known: _Known, node: ir.Node) -> list[Size] | Size | None:
        a, b = known.int_of(node.inputs[0]), known.int_of(node.inputs[1])
        if a is None or b is None:
            return None
        if not isinstance(a, list) and not isinstance(b, list):
            return operation(a, b)
        length = max(len(side) for side in (a, b) if isinstance(side, list))
        left, right = ((side if isinstance(side, list) else [side]) for side in (a, b))
        left, right = (side * (length if len(side) == 1 else 1) for side in (left, right))
        found = [operation(x, y) for x, y in zip(left, right, strict=True)]
        return None if any(entry is None for entry in found) else [entry for entry in found if entry is not None]

    return rule


def _calculated(symbol: str, exact: Callable[[int, int], int | None]) -> IntRule:
    def operation(a: Size, b: Size) -> Size | None:
        if isinstance(a, int) and isinstance(b, int):
            return exact(a, b)
        if b == 1 and symbol in "*/":
            return a
        return b if a == 1 and symbol == "*" else f"({a}{symbol}{b})"

    return _entrywise(operation)


def _equal(a: Size, b: Size) -> int | None:
    if isinstance(a, int) and isinstance(b, int):
        return int(a == b)
    if a == b:
        return 1
    return 0 if min(x for x in (a, b, 1) if isinstance(x, int)) < 0 else None  # a size is never negative


def _chosen(known: _Known, node: ir.Node) -> list[Size] | Size | None:
    test, a, b = (known.int_of(value) for value in node.inputs)
    if isinstance(test, list) and isinstance(a, list) and isinstance(b, list) and len(test) == len(a) == len(b):
        return [x if t else y for t, x, y in zip(test, a, b, strict=True)]
    return None


def _filled(known: _Known, node: ir.Node) -> list[Size] | None:
    shape = known.int_of(node.inputs[0])
    value = attribute(node, "value", None)
    number = np.asarray(value.numpy()).reshape(-1)[0] if value is not None else np.float32(0)
    if not isinstance(shape, list) or len(shape) != 1 or not isinstance(shape[0], int) or number.dtype.kind not in "iu":
        return None
    return [int(number)] * shape[0] if shape[0] <= SMALL else None


def _reshaped_ints(known: _Known, node: ir.Node) -> list[Size] | None:
    data, shape = known.int_of(node.inputs[0]), known.int_of(node.inputs[1])
    return data if isinstance(data, list) and isinstance(shape, list) and len(shape) == 1 else None


_INTS: dict[str, IntRule] = {
    "Shape": _shape_of,
    "Gather": _gathered,
    "Slice": _sliced,
    "Concat": _joined,
    "Unsqueeze": _as_list,
    "Squeeze": _as_scalar,
    "Cast": _same,
    "Identity": _same,
    "Mul": _calculated("*", lambda a, b: a * b),
    "Add": _calculated("+", lambda a, b: a + b),
    "Sub": _calculated("-", lambda a, b: a - b),
    "Div": _calculated("/", lambda a, b: int(a / b) if b else None),
    "Mod": _calculated("%", lambda a, b: a % b if b else None),
    "Equal": _entrywise(_equal),
    "Where": _chosen,
    "ConstantOfShape": _filled,
    "Reshape": _reshaped_ints,
}


def _reshape(known: _Known, node: ir.Node) -> list[Size] | None:
    before, target = sizes(node.inputs[0]), known.int_of(node.inputs[1])
    if before is None or not isinstance(target, list):
        return None
    copies = not attribute(node, "allowzero", 0)
    wanted = [before[i] if size == 0 and copies else size for i, size in enumerate(target)]
    have, had = _factors(before)
    want, taken = _factors(tuple(size for size in wanted if size != -1))
    strange = [name for name in want if name not in have]
    if len(strange) == 1 and len(have) == len(want) == 1 and had == taken and -1 not in wanted:
        return [have[0] if size == strange[0] else size for size in wanted]  # what else could it be
    for name in want:
        if name in have:
            have.remove(name)
        elif -1 not in wanted:
            return wanted
        else:
            return [f"{node.outputs[0].name}.{i}" if size == -1 else size for i, size in enumerate(wanted)]
    if -1 not in wanted:
        return wanted
    if not taken or had % taken:
        return None
    share = had // taken
    inferred: Size = "*".join([*have, *([str(share)] if share > 1 else [])]) if have else share
    return [inferred if size == -1 else size for size in wanted]


def _factors(shape: Sizes) -> tuple[list[str], int]:
    """The names in a product of sizes, and its number; a name may be a product itself."""
    parts = [part for size in shape for part in (size.split("*") if isinstance(size, str) else [str(size)])]
    return [p for p in parts if not p.isdigit()], math.prod(int(p) for p in parts if p.isdigit())


def _expand(known: _Known, node: ir.Node) -> list[Size] | None:
    before, target = sizes(node.inputs[0]), known.int_of(node.inputs[1])
    if before is None or not isinstance(target, list):
        return None
    length = max(len(before), len(target))
    ours = (1,) * (length - len(before)) + before
    theirs = [1] * (length - len(target)) + target
    return [_met(a, b, f"{node.outputs[0].name}.{i}") for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]


def _met(a: Size, b: Size, name: str) -> Size:
    """What two sizes are when broadcast: of two that are free either may be 1, so it is neither."""
    if a == b or b == 1:
        return a
    if a == 1 or isinstance(b, int):
        return b
    return a if isinstance(a, int) else name


def _range(known: _Known, node: ir.Node) -> list[Size] | None:
    start, limit, step = (known.int_of(value) for value in node.inputs)
    return [limit] if start == 0 and step == 1 and isinstance(limit, (int, str)) else None


def _of_shape(known: _Known, node: ir.Node) -> list[Size] | None:
    found = known.int_of(node.inputs[0])
    return found if isinstance(found, list) else None


_SHAPES: dict[str, Callable[[_Known, ir.Node], list[Size] | None]] = {
    "Reshape": _reshape,
    "Expand": _expand,
    "Range": _range,
    "ConstantOfShape": _of_shape,
}
