"""Nodes whose output is their input are removed; what is not quite that stays."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from folded_operators import operators_after_folding, require_same_outputs
from onnx import TensorProto, helper, numpy_helper
from test_fold_onnx import graph

from repaconv.graph.models_in_onnx_ir import read, tidy, write
from repaconv.graph.no_op_nodes import remove_no_ops

RANDOM = np.random.default_rng(0)
SHAPE = (2, 3, 4, 4)
NUMBERS = {
    **{"zero": np.array(0.0), "one": np.array(1.0), "two": np.array(2.0), "zeros": np.zeros((3, 1, 1))},
    **{"ones": np.ones((1, 3, 1, 1)), "more": np.zeros((1, 1, 1, 1, 1)), "wide": np.zeros((2, 1, 1, 1))},
    **{"some": np.array([0.0, 0, 1, 0]), "mixed": np.array([1.0, 1, 1, 2]), "no": np.array(False)},
    **{"yes": np.array(True), "all": np.ones((4, 4), bool), "none": np.zeros((4, 4), bool)},
    **{"most": np.arange(16).reshape(4, 4) > 0, "high": np.ones((5, 1, 1, 1, 1), bool)},
    **{"tile": np.array([1, 1, 1, 1]), "twice": np.array([1, 1, 1, 2]), "pad0": np.zeros(8, np.int64)},
    **{"pad1": np.array([0, 0, 1, 0, 0, 0, 0, 0]), "crop": np.array([0, 0, -1, 0, 0, 0, 1, 0]), "0": np.array([0])},
    **{"1": np.array([1]), "2": np.array([2]), "3": np.array([3]), "4": np.array([4]), "-1": np.array([-1])},
    **{"last": np.array([-5]), "end": np.array([2**63 - 1])},
    **{"square": np.ones((4, 4)), "first": np.array(0)},
    **{"00": np.array([0, 0]), "ends": np.array([2**63 - 1, 2**63 - 1])},
    **{"near": np.array([2**63 - 1, 3]), "01": np.array([0, 1]), "12": np.array([1, 2]), "23": np.array([2, 3])},
    **{"order": np.arange(4), "negative": np.arange(4) - 4, "swap": np.array([0, 2, 1, 3]), "fewer": np.arange(3)},
    **{"repeated": np.array([0, 1, 2, 3, 3]), "table": np.arange(4)[None], "by1": np.ones(4, np.float32)},
    **{"by2": np.array([1, 1, 2, 2], np.float32), "same": np.array([2, 3, 4, 4]), "other": np.array([2, 3, 4, 8])},
    **{"roi": np.array([0, 0, 0.5, 0, 1, 1, 1, 1], np.float32), "rows": np.array([[0], [1]])},
    **{"ratio": np.array(0.5, np.float32), "backwards": np.array([[1], [0]]), "from": RANDOM.random(SHAPE)},
}  # fmt: skip
ONE = {"kernel_shape": [1, 1]}
MOVED = {"coordinate_transformation_mode": "tf_crop_and_resize"}
REMOVED = {
    "plus 0": ("Add", "a zero"),
    "0 plus": ("Add", "zeros a"),
    "minus 0": ("Sub", "a zeros"),
    "times 1": ("Mul", "a ones"),
    "1 times": ("Mul", "one a"),
    "by 1": ("Div", "a one"),
    "power 1": ("Pow", "a one"),
    "true": ("Where", "yes a two"),
    "false": ("Where", "no two a"),
    "all true": ("Where", "all a zero"),
    "all false": ("Where", "none zero a"),
    "Cast": ("Cast", "a", {"to": TensorProto.DOUBLE}),
    "Dropout": ("Dropout", "a"),
    "Dropout, inference": ("Dropout", "a ratio no"),
    "Tile": ("Tile", "a tile"),
    "Pad": ("Pad", "a pad0"),
    "Slice": ("Slice", "a 0 end 1"),
    "Slice of the size": ("Slice", "a last 4 3 1"),
    "Slice of two axes": ("Slice", "a 00 ends 23"),
    "Split": ("Split", "a 3", {"axis": 1}),
    "Split in 1": ("Split", "a", {"axis": -1, "num_outputs": 1}),
    "Gather": ("Gather", "a order", {"axis": 2}),
    "Gather, from the end": ("Gather", "a negative", {"axis": -1}),
    "Resize": ("Resize", "a  by1", {"mode": "cubic"}),
    "Resize to sizes": ("Resize", "a   same"),
    "Clip": ("Clip", "a"),
    "AveragePool": ("AveragePool", "a", ONE),
    "MaxPool": ("MaxPool", "a", {**ONE, "strides": [1, 1], "pads": [0] * 4}),
    "Concat": ("Concat", "a", {"axis": 1}),
    **{kind: (kind, "a") for kind in ("Max", "Mean", "Min", "Sum")},
    "assigned": ("ScatterND", "from rows a"),
}
STAY = {
    "plus 1": ("Add", "a one"),
    "plus some": ("Add", "some a"),
    "minus some": ("Sub", "a some"),
    "0 minus": ("Sub", "zero a"),
    "times some": ("Mul", "a mixed"),
    "times 0": ("Mul", "zero a"),
    "1 by": ("Div", "one a"),
    "by mixed": ("Div", "a mixed"),
    "1 to the power": ("Pow", "one a"),
    "power 2": ("Pow", "a two"),
    "another rank": ("Add", "a more"),
    "some true": ("Where", "most a two"),
    "some false": ("Where", "most two a"),
    "the other": ("Where", "no a two"),
    "the first": ("Where", "yes two a"),
    "more true": ("Where", "high a zero"),
    "another type": ("Cast", "a", {"to": TensorProto.FLOAT}),
    "Tile": ("Tile", "a twice"),
    "Pad": ("Pad", "a pad1"),
    "Pad of one row for another": ("Pad", "a crop"),
    "Slice of fewer": ("Slice", "a 0 3 3"),
    "Slice without the first": ("Slice", "a 1 end 3"),
    "Slice of one axis": ("Slice", "a 00 near 23"),
    "Slice without the second": ("Slice", "a 01 ends 23"),
    "backwards": ("Slice", "a -1 last 3 -1"),
    "Gather in order": ("Gather", "a swap", {"axis": 2}),
    "Gather of fewer": ("Gather", "a fewer", {"axis": 2}),
    "Gather of more": ("Gather", "a repeated", {"axis": 2}),
    "Gather of rows": ("Gather", "a table", {"axis": 2}),
    "Resize by 2": ("Resize", "a  by2"),
    "Resize to other sizes": ("Resize", "a   other"),
    "Resize of a part": ("Resize", "a roi by1", {**MOVED, "mode": "linear"}),
    "Resize of a part to sizes": ("Resize", "a roi  same", {**MOVED, "mode": "linear"}),
    "Clip": ("Clip", "a zero"),
    "Clip above": ("Clip", "a  zero"),
    "AveragePool": ("AveragePool", "a", {"kernel_shape": [2, 1]}),
    "MaxPool": ("MaxPool", "a", {**ONE, "strides": [2, 1]}),
    "MaxPool, padded": ("MaxPool", "a", {**ONE, "pads": [0, 1, 0, 0]}),
    "Concat": ("Concat", "a a", {"axis": 1}),
    **{kind: (kind, "a two") for kind in ("Max", "Mean", "Min", "Sum")},
    "a mean": ("ReduceMean", "a -1"),
    "largest": ("GlobalMaxPool", "a"),
    "a product": ("MatMul", "square a"),
    "the larger": ("Max", "two a"),
    "assigned in another order": ("ScatterND", "from backwards a"),
    "added": ("ScatterND", "from rows a", {"reduction": "add"}),
    "L1": ("ReduceL1", "a zero_axes", {"noop_with_empty_axes": 1}),
}
PIXELS = {
    "ReduceMean": ("ReduceMean", "a -1"),
    "ReduceSum": ("ReduceSum", "a 23"),
    "ReduceMax": ("ReduceMax", "a 3"),
    "ReduceMin": ("ReduceMin", "a 23"),
    "GlobalAveragePool": ("GlobalAveragePool", "a"),
    "GlobalMaxPool": ("GlobalMaxPool", "a"),
}


def network(row, shape=SHAPE, opset=18):
    kind, read_, *named = row
    rows = [("Sin", "x", "a"), ("Tan", "o", "z")]
    weights = {**NUMBERS, "zero_axes": np.zeros(0, np.int64)}
    model = graph(rows, weights, {"x": shape}, ("z",), opset=opset)
    node = helper.make_node(kind, read_.split(" "), ["o"], **(named[0] if named else {}))
    model.graph.node.insert(1, node)
    if kind == "Cast" and named[0]["to"] != TensorProto.DOUBLE:
        model.graph.node[2].op_type = "Cast"
        model.graph.node[2].attribute.append(helper.make_attribute("to", TensorProto.DOUBLE))
    del model.graph.value_info[:]
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("z", TensorProto.DOUBLE, None))
    return onnx.shape_inference.infer_shapes(model)


def operators(model, shape=SHAPE):
    """The operators that are left; the outputs are the same."""
    made = read(model)
    remove_no_ops(made)
    tidy(made)
    after = write(made)
    x = RANDOM.standard_normal([2 if isinstance(size, str) else size for size in shape])
    require_same_outputs(model, after, x, rtol=0)
    return [node.op_type for node in after.graph.node]


@pytest.mark.parametrize("row", REMOVED.values(), ids=REMOVED)
def test_what_returns_its_input_is_removed(row):
    assert operators(network(row)) == ["Sin", "Tan"]


@pytest.mark.parametrize("row", PIXELS.values(), ids=PIXELS)
def test_a_reduction_of_single_numbers_is_removed(row):
    shape = (2, 3, 1, 1)
    assert operators(network(row, shape), shape) == ["Sin", "Tan"]
    shape = (2, 3, 4, 2)
    assert operators(network(row, shape), shape) == ["Sin", row[0], "Tan"]


def test_a_selection_that_removes_an_axis_stays():
    assert operators(network(("Gather", "a first", {"axis": 3}), (2, 3, 4, 1)), (2, 3, 4, 1)) == [
        "Sin",
        "Gather",
        "Tan",
    ]


@pytest.mark.parametrize("row", [("Slice", "v 1 end 1"), ("ReduceMean", "v 1"), ("Add", "v zeros"), ("Gather", "v 0")])
def test_values_of_unknown_rank_stay(row):
    rows = [("Cast", "w", "s", {"to": TensorProto.INT64}), ("Reshape", "x s", "v"), (*row, "o"), ("Tan", "o", "y")]
    assert not remove_no_ops(read(graph(rows, NUMBERS, {"x": SHAPE, "w": ("k",)}, opset=18)))


def test_a_value_of_unknown_type_stays():
    rows = [("Sin", "x", "a"), ("Cast", "a", "b", {"to": TensorProto.DOUBLE}), ("Cast", "b", "y", {"to": 11})]
    model = graph(rows, {}, {"x": SHAPE})
    model.graph.node[0].domain = "other"
    model.opset_import.append(helper.make_opsetid("other", 1))
    del model.graph.value_info[:]
    assert not remove_no_ops(read(model))


@pytest.mark.parametrize("row", STAY.values(), ids=STAY)
def test_what_is_not_quite_that_stays(row):
    model = network(row)
    onnx.checker.check_model(model, full_check=True)
    assert operators(model)[1] == row[0]


@pytest.mark.parametrize(
    ("row", "removed"),
    [
        (("Slice", "a 0 end 1"), True),
        (("Slice", "a 00 ends 23"), True),
        (("Slice", "a 0 4 2"), False),
        (("Gather", "a order", {"axis": 2}), False),
        (("Add", "a zeros"), True),
        (("Add", "a wide"), False),
        (("Tile", "a tile"), True),
        (("ReduceMean", "a 3"), False),
    ],
    ids=lambda value: " ".join(map(str, value[:2])) if isinstance(value, tuple) else None,
)
def test_dynamic_sizes(row, removed):
    """A batch of one is broadcast to two, and a row may be longer than what is taken of it."""
    assert (operators(network(row, ("n", 3, "h", 4)), (2, 3, 4, 4)) == ["Sin", "Tan"]) == removed


HELD = [("BOOL", "INT32"), ("BOOL", "INT64"), ("BOOL", "FLOAT16"), ("BOOL", "FLOAT"), ("BOOL", "DOUBLE")]
HELD += [("INT32", "INT64"), ("INT32", "DOUBLE"), ("FLOAT16", "FLOAT"), ("FLOAT16", "DOUBLE")]
HELD += [("BFLOAT16", "FLOAT"), ("BFLOAT16", "DOUBLE"), ("FLOAT", "DOUBLE")]
LOST = [("FLOAT", "FLOAT16"), ("DOUBLE", "FLOAT"), ("INT64", "DOUBLE"), ("INT32", "FLOAT"), ("INT64", "INT32")]
LOST += [("FLOAT16", "BFLOAT16"), ("BFLOAT16", "FLOAT16"), ("FLOAT", "INT64"), ("INT32", "BOOL"), ("FLOAT", "BFLOAT16")]


@pytest.mark.parametrize(("given", "between"), HELD + LOST, ids="-".join)
def test_casts_there_and_back(given, between):
    casts = [helper.make_node("Cast", ["x"], ["a"], to=getattr(TensorProto, given))]
    casts += [helper.make_node("Cast", ["a"], ["b"], to=getattr(TensorProto, between))]
    casts += [helper.make_node("Cast", ["b"], ["c"], to=getattr(TensorProto, given))]
    casts += [helper.make_node("Cast", ["c"], ["y"], to=TensorProto.STRING)]
    ends = [helper.make_tensor_value_info("x", TensorProto.STRING, [3])]
    ends += [helper.make_tensor_value_info("y", TensorProto.STRING, [3])]
    opset = [helper.make_opsetid("", 18)]
    model = read(helper.make_model(helper.make_graph(casts, "casts", ends[:1], ends[1:]), opset_imports=opset))
    assert remove_no_ops(model) == ((given, between) in HELD)
    tidy(model)
    assert len(model.graph) == (2 if (given, between) in HELD else 4)


def test_a_cast_to_a_third_type_stays():
    rows = [("Cast", "x", "b", {"to": TensorProto.FLOAT}), ("Cast", "b", "c", {"to": TensorProto.FLOAT16})]
    model = graph([*rows, ("Cast", "c", "y", {"to": TensorProto.DOUBLE})], {}, {"x": SHAPE})
    assert not remove_no_ops(read(model))


@pytest.mark.parametrize(
    ("rows", "outputs", "left"),
    [
        ([("Identity", "x", "a"), ("Add", "a zero", "y")], ("y",), ["Identity", "Add"]),
        ([("Add", "x zero", "y")], ("y",), ["Add"]),
        ([("Sin", "x", "a"), ("Add", "a zero", "y")], ("y", "a"), ["Sin", "Add"]),
        ([("Sin", "x", "a"), ("Add", "a zero", "y")], ("y",), ["Sin"]),
        ([("Sin", "x", "a"), ("Add", "a zero", "y"), ("Tan", "a", "z")], ("y", "z"), ["Sin", "Tan"]),
    ],
    ids=["input", "to output", "two outputs", "output", "read twice"],
)
def test_inputs_and_outputs_keep_their_names(rows, outputs, left):
    model = graph(rows, NUMBERS, {"x": SHAPE}, outputs)
    made = read(model)
    removed = remove_no_ops(made)
    tidy(made)
    after = write(made)
    onnx.checker.check_model(after, full_check=True)
    assert [value.name for value in after.graph.output] == [*outputs]
    assert removed == (len(after.graph.node) < len(rows)) or left == ["Identity", "Add"]
    if left != ["Identity", "Add"]:
        assert [node.op_type for node in after.graph.node] == left


@pytest.mark.parametrize("read_", ["mask", "places"])
def test_a_second_output_that_is_read_stays(read_):
    second = ("Dropout", "a", "b mask") if read_ == "mask" else ("MaxPool", "a", "b places", ONE)
    rows = [("Sin", "x", "a"), second, ("Cast", read_, "z", {"to": TensorProto.DOUBLE})]
    model = graph([*rows, ("Tan", "b", "y")], {}, {"x": SHAPE}, ("y", "z"), opset=18)
    assert second[0] in operators(model)


def test_nodes_without_inputs_and_moved_positions_stay():
    """Empty scales are allowed next to sizes, and tf_half_pixel_for_nn takes the position half a pixel further."""
    rows = [("RandomNormal", "", "r", {"shape": [2, 3, 4, 4]}), ("Add", "x r", "a")]
    half = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "mode": "nearest"}
    rows += [("Resize", "a none by1", "b", half), ("Resize", "b none none other", "c"), ("Tan", "c", "y")]
    model = graph(rows, {**NUMBERS, "none": np.zeros(0, np.float32)}, {"x": SHAPE}, opset=11)
    assert not remove_no_ops(read(model))


def test_operators_of_other_domains_stay():
    model = graph([("Sin", "x", "a"), ("Tile", "a tile", "b"), ("Tan", "b", "y")], NUMBERS, {"x": SHAPE})
    model.graph.node[1].domain = "other"
    model.opset_import.append(helper.make_opsetid("other", 1))
    assert not remove_no_ops(read(model))


def test_training_dropout_and_computed_numbers_stay():
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])]
    ends += [helper.make_tensor_value_info("train", TensorProto.BOOL, [])]
    ends += [helper.make_tensor_value_info("times", TensorProto.INT64, [2])]
    nodes = [helper.make_node("Sin", ["x"], ["a"]), helper.make_node("Dropout", ["a", "half", "train"], ["b"])]
    nodes += [helper.make_node("Tile", ["b", "times"], ["c"]), helper.make_node("Dropout", ["c", "half", "on"], ["d"])]
    nodes += [
        helper.make_node("Slice", ["d", "times", "far"], ["e"]),
        helper.make_node("Slice", ["e", "0", "times"], ["f"]),
    ]
    nodes += [helper.make_node("Tan", ["f"], ["y"])]
    weights = {
        "0": np.array([0, 0]),
        "half": np.array(0.5, np.float32),
        "on": np.array(True),
        "far": np.array([2**63 - 1] * 2),
    }
    held = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    made = helper.make_graph(nodes, "computed", ends, out, held)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    assert not remove_no_ops(read(model))


# --- the guard of attention against rows that a mask hides


Q, K = RANDOM.standard_normal((2, 3, 4)), RANDOM.standard_normal((4, 5))
GUARD = [("IsNaN", "p", "n"), ("Where", "n zero p", "o")]
MASKS = {
    "scale": ([("Mul", "s half", "t")], {"half": np.array(0.5)}, True),
    "bias": ([("Add", "s bias", "t")], {"bias": np.full((3, 5), 256.0)}, True),
    "views": ([("Reshape", "s flat", "u"), ("Sub", "u bias", "t")],
              {"flat": np.array([2, 3, 5]), "bias": RANDOM.random((3, 5))}, True),
    "mask": ([("Add", "s bias", "t")], {"bias": np.where(np.eye(3, 5), 0, -np.inf)}, False),
    "large": ([("Add", "s bias", "t")], {"bias": np.where(np.eye(3, 5), 0, -257.0)}, False),
    "input": ([("Add", "s x2", "t")], {}, False),
    "quotient": ([("Div", "s half", "t")], {"half": np.array(0.5)}, False),
    "none": ([("Add", "x3 bias", "t")], {"bias": np.ones((3, 5))}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_the_guard_of_a_softmax(name):
    rows, weights, removed = MASKS[name]
    rows = [("MatMul", "x w", "s"), *rows, ("Softmax", "t", "p"), *GUARD, ("Tan", "o", "y")]
    inputs = {"x": (2, 3, 4), **{other: (2, 3, 5) for other in ("x2", "x3") if other in rows[1][1]}}
    model = graph(rows, {"w": K, "zero": np.array(0.0), **weights}, inputs)
    made = read(model)
    assert remove_no_ops(made) == removed
    tidy(made)
    assert ("Where" in [node.op_type for node in made.graph]) != removed


@pytest.mark.parametrize(
    "rows",
    [
        [("Softmax", "s", "p"), ("IsNaN", "s", "n"), ("Where", "n zero p", "o")],
        [("Softmax", "s", "p"), ("IsInf", "p", "n"), ("Where", "n zero p", "o")],
        [("Softmax", "s", "p"), ("IsNaN", "p", "n"), ("Where", "n p zero", "o")],
        [("Softplus", "s", "p"), ("IsNaN", "p", "n"), ("Where", "n zero p", "o")],
        [("Softmax", "s", "p"), ("IsNaN", "p", "n"), ("Where", "n more p", "o")],
    ],
    ids=["of the scores", "another test", "the other way", "no softmax", "another rank"],
)
def test_guards_of_something_else_stay(rows):
    rows = [("MatMul", "x w", "s"), *rows, ("Tan", "o", "y")]
    model = graph(rows, {"w": K, "zero": np.array(0.0), "more": np.zeros((1, 1, 1, 1))}, {"x": (2, 3, 4)})
    assert not remove_no_ops(read(model))


def test_the_guard_of_scores_of_another_domain_stays():
    rows = [("MatMul", "x w", "s"), ("Softmax", "s", "p"), *GUARD, ("Tan", "o", "y")]
    model = graph(rows, {"w": K, "zero": np.array(0.0)}, {"x": (2, 3, 4)})
    assert remove_no_ops(read(model))
    model.graph.node[0].domain = "other"
    model.opset_import.append(helper.make_opsetid("other", 1))
    assert not remove_no_ops(read(model))


@pytest.mark.parametrize("place", [0, 1])
def test_the_guard_of_a_product_with_an_infinite_constant_stays(place):
    weights = {"w": np.where(np.arange(20).reshape(4, 5) == 3, np.inf, K), "c": np.array([0.0, 0, np.inf, 0, 0])}
    first = ("MatMul", "x w", "s") if place == 0 else ("Gemm", "x k c", "s")
    rows = [first, ("Softmax", "s", "p"), *GUARD, ("Tan", "o", "y")]
    model = graph(rows, {**weights, "k": K, "zero": np.array(0.0)}, {"x": (3, 4)})
    assert not remove_no_ops(read(model))
    rows[0] = ("MatMul", "x k", "s") if place == 0 else ("Gemm", "x k b", "s")
    model = graph(rows, {"k": K, "b": np.ones(5), "zero": np.array(0.0)}, {"x": (3, 4)})
    assert remove_no_ops(read(model))


@pytest.mark.parametrize(("number", "left"), [(0, ["Sin", "Tan"]), (1, ["Sin", "ConstantOfShape", "Add", "Tan"])])
def test_a_sum_that_begins_with_zeros_of_a_dynamic_batch_is_its_first_term(number, left):
    """As ``torch.zeros_like(x)`` is exported, to which ZoeDepth adds one term after another."""
    filler = {"value": helper.make_tensor("n", TensorProto.DOUBLE, [1], [number])}
    rows = [("Sin", "x", "a"), ("Shape", "x", "s"), ("ConstantOfShape", "s", "b", filler), ("Add", "b a", "c")]
    model = graph([*rows, ("Tan", "c", "y")], {}, {"x": ("N", *SHAPE[1:])})
    found = operators_after_folding(model, RANDOM.standard_normal(SHAPE))
    assert [kind for kind in found if kind != "Shape"] == left
