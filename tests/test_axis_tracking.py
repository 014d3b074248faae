"""The table of operators against ONNX's reference implementation: which output elements an input element can change."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from repaconv.graph.axis_tracking import FULL, axis_after, axis_before
from repaconv.graph.channel_axes import IMAGE, LAST, scale_and_shift
from repaconv.graph.models_in_onnx_ir import read
from repaconv.graph.operator_facts import ARITHMETIC, POINTWISE, UNARY
from repaconv.graph.symbolic_shapes import SymbolicSize, floor_divided, parse_size, product, reshape_groups, size_plus

OPSET = 20
X = (2, 3, 4, 6)
I, F = np.array, np.random.default_rng(0).random  # noqa: E741
NODES = [
    *((op, {}, []) for op in sorted(UNARY) if onnx.defs.has(op, OPSET)),
    *((op, {}, [F(shape) + 0.5]) for op in (*ARITHMETIC, "Pow") for shape in ((6,), (3, 1, 1), X, (2, 3, 1, 6))),
    ("MatMul", {}, [F((6, 5))]),
    ("MatMul", {}, [F((3, 6, 5))]),
    ("MatMul", {}, [F((2, 1, 6, 5))]),
    ("LayerNormalization", {"axis": 2}, [F((4, 6)), F((4, 6))]),
    ("LayerNormalization", {}, [F(6)]),
    *(("Softmax", {"axis": axis}, []) for axis in (1, -1)),
    ("BatchNormalization", {}, [F(3), F(3), F(3), F(3)]),
    ("Transpose", {"perm": [0, 2, 3, 1]}, []),
    ("Transpose", {}, []),
    *(("Reshape", {}, [I(shape)]) for shape in ([2, 12, 6], [6, 4, 6], [2, 3, 2, 12], [1, 2, 3, 24], [2, 0, -1])),
    *(("Flatten", {"axis": axis}, []) for axis in (1, 2, 3)),
    ("Unsqueeze", {}, [I([1, 3])]),
    ("Expand", {}, [I([5, 2, 3, 4, 6])]),
    *(("Slice", {}, [I([0]), I([2]), I([axis])]) for axis in (1, -1)),
    ("Slice", {}, [I([1, 0]), I([2, 2])]),
    *(("Gather", {"axis": axis}, [I(places)]) for axis in (0, 2, -1) for places in (1, [1, 0], [[1, 0, 1], [0, 0, 1]])),
    *(("Split", {"axis": axis, "num_outputs": 2}, []) for axis in (2, -1)),
    *(
        (f"Reduce{what}", {"keepdims": keeps}, [I([1, -1])])
        for what in ("Mean", "Sum", "Max", "Min")
        for keeps in (0, 1)
    ),
]


def model_of(operator, attributes, constants) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(array, f"w{place}") for place, array in enumerate(constants)]
    outputs = [f"y{place}" for place in range(attributes.get("num_outputs", 1))]
    node = helper.make_node(operator, ["x", *(weight.name for weight in weights)], outputs, **attributes)
    ends = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in outputs]
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", TensorProto.DOUBLE, X)], ends, weights)
    return onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)]))


@pytest.mark.parametrize("node", NODES, ids=lambda node: f"{node[0]} {node[1]} {[np.shape(one) for one in node[2]]}")
def test_a_place_of_an_input_reaches_its_place_of_the_output_alone(node):
    model = model_of(*node)
    run, seen = ReferenceEvaluator(model), next(iter(read(model).graph))
    x, found = F(X) + 0.5, 0
    before = run.run(None, {"x": x})
    for axis in range(before[0].ndim):
        mine = axis_before(seen, 0, axis)
        if mine is None or mine == FULL:
            continue
        found += 1
        assert axis_after(seen, 0, mine) == axis
        for place in range(before[0].shape[axis]):
            other = x.copy()
            other[(slice(None),) * mine + (place,)] += 0.25
            for y, changed in zip(before, run.run(None, {"x": other}), strict=True):
                kept = np.delete(np.arange(y.shape[axis]), place)
                assert np.array_equal(np.take(y, kept, axis), np.take(changed, kept, axis))
    assert found or node[0] in ("Flatten", "Transpose", "Reshape")


def test_what_is_unary_is_pointwise():
    assert UNARY < POINTWISE
    assert all(len(onnx.defs.get_schema(operator).inputs) == 1 for operator in UNARY)


def test_sizes_are_products_of_names_and_a_number():
    batch, n = parse_size("batch"), parse_size("n")
    assert parse_size("n*4*batch") == product([batch, 4, n]) == SymbolicSize(("batch", "n"), 4)
    assert str(parse_size("(n*2+1)*batch*3")) == "(n*2+1)*batch*3"
    assert parse_size("2*6") == 12
    assert reshape_groups((batch, n, 6), (product([batch, n]), 2, 3)) == [([0, 1], [0]), ([2], [1, 2])]
    assert reshape_groups((batch, n, 6), (product([batch, batch]), 6)) is None


def test_windows_of_windows_are_windows_however_they_are_counted():
    width = parse_size("width")
    quarter = floor_divided(size_plus(width, 1), 4)
    assert size_plus(floor_divided(size_plus(width, -3), 4), 1) == quarter  # (w - 3) // 4 + 1
    assert size_plus(floor_divided(quarter, 2), -1) == floor_divided(size_plus(width, -7), 8)
    assert size_plus(product([64, floor_divided(size_plus(width, -3), 4)]), 64) == product([64, quarter])
    assert size_plus(size_plus(product([width, parse_size("height")]), 5), -5) == product([width, parse_size("height")])
    assert (floor_divided(9, 4), size_plus(9, 4), floor_divided(width, 1), size_plus(width, 0)) == (2, 13, width, width)
    assert floor_divided(size_plus(width, 1), 4) != floor_divided(width, 4)
    random = np.random.default_rng(0)
    for _ in range(300):
        width, exact = parse_size("width"), (sizes := random.integers(60, 300, 9))
        for step in random.integers(-5, 5, random.integers(1, 6)):
            width, exact = (
                (floor_divided(width, -step), exact // -step)
                if step < 0
                else (size_plus(width, step - 2), exact + step - 2)
            )
        assert [eval(str(width), {"width": size}) for size in sizes] == list(exact)


SCALES = [
    (operator, first, shape, axis)
    for operator in ARITHMETIC
    for first in (False, True)
    for shape, axis in (((3, 1, 1), IMAGE), ((1, 3, 1, 1), IMAGE), ((6,), LAST), ((1,), IMAGE), ((1,), LAST))
]


@pytest.mark.parametrize(("operator", "first", "shape", "axis"), SCALES, ids=str)
def test_a_scale_and_a_shift_of_channels_is_read_from_every_operator_that_is_one(operator, first, shape, axis):
    model = model_of(operator, {}, [F(shape) + 0.5])
    node = model.graph.node[0]
    if first:
        node.input[:] = node.input[::-1]
    found = scale_and_shift(next(iter(read(model).graph)), axis)
    if operator == "Div" and first:
        assert found is None
        return
    column = (-1, 1, 1) if axis == IMAGE else (-1,)
    shift = 0.0 if found.shift is None else found.shift.reshape(column)
    x = F(X) + 0.5
    expected = ReferenceEvaluator(model).run(None, {"x": x})[0]
    np.testing.assert_allclose(x * found.scale.reshape(column) + shift, expected, rtol=1e-15)


def test_what_is_no_scale_and_shift_of_channels_is_none():
    every = [
        model_of("Mul", {}, [F((4, 1))]),  # by row
        model_of("Add", {}, [F((5, 1, 1, 1, 6))]),  # more axes
        model_of("Div", {}, [I([0.0, 1.0, 1.0]).reshape(3, 1, 1)]),
        model_of("Pow", {}, [F((3, 1, 1))]),
    ]
    assert [scale_and_shift(next(iter(read(model).graph)), IMAGE) for model in every] == [None] * 4
    found = scale_and_shift(next(iter(read(model_of("BatchNormalization", {}, [I([1.0, 2, 3])] * 4)).graph)), IMAGE)
    np.testing.assert_allclose(found.scale, [1 / np.sqrt(1 + 1e-5), 2 / np.sqrt(2 + 1e-5), 3 / np.sqrt(3 + 1e-5)])
    np.testing.assert_allclose(found.shift, I([1.0, 2, 3]) - I([1.0, 2, 3]) * found.scale)
