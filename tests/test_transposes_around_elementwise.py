"""transposes: what tf2onnx writes with channels last is computed with channels first, if that saves Transposes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto, helper
from test_fold_onnx import graph

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.rewrites.fold.transposes_around_elementwise import TRANSPOSES
from repaconv.verification.float64_graphs import ReferenceEvaluation

RANDOM = np.random.default_rng(0)
LAST, FIRST = {"perm": [0, 2, 3, 1]}, {"perm": [0, 3, 1, 2]}
SHAPE = (2, 4, 6, 5)
WEIGHTS = {
    **{name: RANDOM.standard_normal((4, 4, 3, 3)) for name in ("k", "l", "m")},
    **{"b": RANDOM.standard_normal(4), "row": RANDOM.standard_normal((5, 4)), "half": np.array(0.5)},
    **{"around": np.array([0, 1, 2, 0, 0, 3, 0, 0]), "wide": RANDOM.standard_normal((4, 8, 1, 1))},
}


def convolution(read, write, kernel="k"):
    """A convolution of an image with channels last."""
    rows = [("Transpose", read, f"{write}_f", FIRST), ("Conv", f"{write}_f {kernel}", f"{write}_c", {"pads": [1] * 4})]
    return [*rows, ("Transpose", f"{write}_c", write, LAST)]


def kinds(rows, outputs=("y",), shape=SHAPE, folds=(TRANSPOSES,)):
    model = graph(rows, WEIGHTS, {"x": shape}, outputs, opset=17)
    return operators_after_folding(model, RANDOM.standard_normal(SHAPE), folds)


BEGIN, END = [("Transpose", "x", "s", LAST)], [("Transpose", "e", "y", FIRST)]


@pytest.mark.parametrize("shape", [SHAPE, ("n", 4, "h", "w"), ("n", 4, 6, 5)])
@pytest.mark.parametrize(
    "inside",
    [
        [("Relu", "s", "e")],
        [("Clip", "s half", "e")],
        [("Mul", "s b", "a"), ("Add", "row a", "c"), ("Sigmoid", "c", "g"), ("Mul", "c g", "e")],
        [("Concat", "s s", "a", {"axis": 2}), ("Neg", "a", "e")],
        [("Pad", "s around half", "a"), ("Mul", "half a", "e")],
        [("Pad", "s around", "e", {"mode": "edge"})],
        [("Abs", "s", "a"), ("Sum", "a s b", "c"), ("Max", "c half s", "e")],
    ],
)
def test_operators_with_channels_last(inside, shape):
    if inside[0][1] == "s around half" and "h" in shape:
        shape = ("n", 4, 6, 5)
    assert kinds([*BEGIN, *inside, *END], shape=shape) == [operator for operator, *_ in inside]


def test_residual_blocks():
    rows = [*convolution("s", "a"), ("Add", "a b", "c"), ("Relu", "c", "d"), *convolution("d", "f", "l")]
    rows += [
        ("Add", "f d", "g"),
        ("Relu", "g", "h"),
        *convolution("h", "i", "m"),
        ("Add", "i h", "j"),
        ("Relu", "j", "e"),
    ]
    found = kinds([*BEGIN, *rows, *END], folds=FOLDS)
    assert "Transpose" not in found
    assert found.count("Conv") == 3


def test_a_value_that_is_turned_for_another_reader_as_well_is_turned_once():
    rows = [*BEGIN, ("Softmax", "s", "v"), ("Add", "s v", "e"), *END, ("Transpose", "v", "w", FIRST)]
    assert kinds([*rows, ("Sin", "w", "y2")], ("y", "y2")).count("Transpose") == 2


def test_a_concat_of_channels_before_a_convolution():
    rows = [
        *convolution("s", "a"),
        *convolution("s", "c", "l"),
        ("Concat", "a c", "d", {"axis": -1}),
        ("Relu", "d", "r"),
    ]
    rows += [("Transpose", "r", "q", FIRST), ("Conv", "q wide", "y")]
    assert "Transpose" not in kinds([*BEGIN, *rows], folds=FOLDS)


def test_between_transposes_after_a_norm_of_tokens_that_folds():
    weights = {"w": RANDOM.standard_normal((6, 4)), **{name: 1 + RANDOM.random(4) for name in ("s", "t", "m", "v")}}
    turned = {"perm": [0, 2, 1]}
    rows = [("MatMul", "x w", "a"), ("Transpose", "a", "b", turned), ("BatchNormalization", "b s t m v", "c")]
    rows += [("Relu", "c", "d"), ("Transpose", "d", "e", turned), ("Softmax", "e", "y", {"axis": 1})]
    model = graph(rows, weights, {"x": ("n", "t", 6)}, ("y",), opset=17)
    found = operators_after_folding(model, RANDOM.standard_normal((2, 5, 6)), FOLDS)
    assert found == ["MatMul", "Add", "Relu", "Softmax"]


def test_what_else_reads_it_reads_a_transpose():
    rows = [
        *convolution("s", "a"),
        ("Relu", "a", "d"),
        *convolution("d", "f", "l"),
        ("ReduceMax", "d", "largest", {"axes": [3]}),
    ]
    found = kinds([*BEGIN, *rows, ("Add", "f b", "e"), *END], ("y", "largest"), folds=FOLDS)
    assert sorted(found) == ["Conv", "Conv", "ReduceMax", "Relu", "Transpose"]


def test_each_elementwise_reader_of_a_transpose():
    out = [("Transpose", "e", "y", FIRST), ("ReduceMax", "g", "largest", {"axes": [3]})]
    rows = [*BEGIN, ("Sin", "s", "g"), ("Tanh", "s", "e"), *out]
    assert sorted(kinds(rows, ("y", "largest"))) == ["ReduceMax", "Sin", "Tanh", "Transpose"]


def test_readers_of_a_transpose_of_which_only_all_save_one():
    rows = [*BEGIN]
    for name, operator in (("p", "Sin"), ("q", "Tanh")):
        rows += [(operator, "s", name), ("Transpose", name, f"{name}y", FIRST)]
        rows += [("ReduceMax", name, f"{name}m", {"axes": [3], "keepdims": 0})]
    assert kinds(rows, ("py", "pm", "qy", "qm")).count("Transpose") == 2


@pytest.mark.parametrize(
    ("rows", "outputs"),
    [
        ([*BEGIN, ("Relu", "s", "y")], ("y",)),
        ([*BEGIN, ("Relu", "s", "e"), ("Transpose", "e", "y", LAST)], ("y",)),
        ([*BEGIN, ("Relu", "s", "e"), *END], ("y", "e")),
        ([*BEGIN, ("Softmax", "s", "e"), *END], ("y",)),
        ([*BEGIN, ("ReduceMean", "s", "r", {"axes": [3], "keepdims": 0}), ("Add", "s r", "e"), *END], ("y",)),
    ],
    ids=["no second", "not undone", "an output", "along an axis", "fewer axes"],
)
def test_what_stays(rows, outputs):
    shape = (5, 5, 5, 5) if "r" in [names[2] for names in rows] else SHAPE
    model = graph(rows, WEIGHTS, {"x": shape}, outputs, opset=17)
    assert operators_after_folding(model, RANDOM.standard_normal(shape), (TRANSPOSES,)) == [one for one, *_ in rows]


@pytest.mark.parametrize("perm", [[0, 2, 1], [1, 2, 0]])
def test_a_value_and_its_transpose_in_one_sum(perm):
    undone = np.argsort(perm).tolist()
    rows = [("Transpose", "x", "s", {"perm": perm}), ("Relu", "s", "r"), ("Transpose", "r", "t", {"perm": undone})]
    rows += [("Add", "t r", "a"), ("Transpose", "a", "y", {"perm": undone}), ("Transpose", "a", "z", {"perm": undone})]
    model = graph(rows, {}, {"x": (4, 4, 4)}, ("y", "z"), opset=17)
    operators_after_folding(model, RANDOM.standard_normal((4, 4, 4)), (TRANSPOSES,))


def test_a_transpose_in_a_subgraph_remains():
    def branch(name, *then):
        nodes = [helper.make_node("Transpose", ["v"], ["t" if then else name], **FIRST)]
        nodes += [helper.make_node(operator, ["t"], [name]) for operator in then]
        out = helper.make_tensor_value_info(name, TensorProto.DOUBLE, (6, 6, 6, 6))
        return helper.make_graph(nodes, name, [], [out])

    rows = [("Softmax", "x", "v"), *BEGIN, ("Add", "s v", "a"), ("Relu", "a", "e"), *END]
    model = graph(rows, {"yes": np.array(True)}, {"x": (6, 6, 6, 6)}, ("y", "z"), opset=17)
    both = {"then_branch": branch("first"), "else_branch": branch("second", "Neg")}
    model.graph.node.append(helper.make_node("If", ["yes"], ["z"], **both))
    model = onnx.shape_inference.infer_shapes(model)
    after, _ = rewritten(model, (TRANSPOSES,))
    onnx.checker.check_model(after, full_check=True)
    x = {"x": RANDOM.standard_normal((6, 6, 6, 6))}
    before, behind = (ReferenceEvaluation(each).run(x) for each in (model, after))
    assert np.array_equal(before["y"], behind["y"])
    assert np.array_equal(before["z"], behind["z"])


def random_graph(random, shape):
    """Elementwise operators of turned and other images, of which some are turned again, and read so if all axes are."""
    perm = random.permutation(4).tolist()
    undone = np.argsort(perm).tolist()
    turned = [shape[axis] for axis in perm]
    rows, values = [("Transpose", "x", "v0", {"perm": perm}), ("Reshape", "x turned", "v1")], ["v0", "v1"]
    weights = {"turned": np.array(turned), "c0": random.standard_normal(turned[-2:]), "c1": np.array([[2.0]])}
    weights |= {"c2": random.standard_normal((turned[1], 1, turned[3])), "c3": random.standard_normal(turned[-1])}
    outputs = []
    for number in range(2, 9):
        kind = random.choice(["Add", "Mul", "Sub", "Max", "Relu", "Tanh", "PRelu", "out", "in"])
        first, second = random.choice(values, 2)
        new = f"v{number}"
        if kind in ("Add", "Mul", "Sub", "Max"):
            pair = [first, random.choice([second, f"c{random.integers(4)}"])]
            rows.append((kind, " ".join(random.permutation(pair)), new))
        elif kind == "PRelu":
            rows.append((kind, f"{first} c{random.integers(4)}", new))
        elif kind == "in":
            rows += [("Tanh", "x", f"t{number}"), ("Transpose", f"t{number}", new, {"perm": perm})]
        elif kind == "out":
            rows += [("Transpose", first, f"o{number}", {"perm": undone})]
            outputs.append(f"o{number}")
            if len(set(shape)) == 1:
                values.append(f"o{number}")
            continue
        else:
            rows.append((kind, first, new))
        values.append(new)
    rows.append(("Transpose", values[-1], "y", {"perm": undone}))
    return graph(rows, weights, {"x": shape}, (*outputs, "y"), opset=17)


@pytest.mark.parametrize("shape", [SHAPE, (3, 3, 3, 3)])
@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed, shape):
    random = np.random.default_rng(seed)
    model = random_graph(random, shape)
    found = operators_after_folding(model, random.standard_normal(shape), (TRANSPOSES,))
    before = [node.op_type for node in model.graph.node]
    _, changes = rewritten(model, (TRANSPOSES,))
    fewer = before.count("Transpose") - found.count("Transpose")
    assert fewer >= len(changes)


def test_an_image_that_is_also_read_through_two_transposes():
    rows = [
        *[("Transpose", "x", "last", LAST), ("Transpose", "last", "first", FIRST), ("Mul", "first x", "a")],
        *[("Transpose", "a", "s", LAST), ("Sub", "s b", "c"), ("Concat", "c s", "y", {"axis": 3})],
    ]
    assert kinds(rows).count("Mul") == 1
