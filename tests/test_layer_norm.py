"""layer-norm: a LayerNorm that an exporter wrote as several operators is one; what is not quite that stays."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto, helper
from test_fold_onnx import graph
from test_hard_swish import single

import repaconv as rc
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.rewrites.fold.layer_norm_operator import LAYER_NORM

RANDOM = np.random.default_rng(0)
C = 6
SHAPE = (2, 5, C)
LAST = {"axes": [-1]}
NUMBERS = {
    "eps": np.array(np.float32(1e-6), np.float64),
    "2": np.array(2.0),
    "0": np.array(0.0),
    "1": np.array(1.0),
    "g": RANDOM.standard_normal(C),
    "b": RANDOM.standard_normal((1, 1, C)),
}
MEAN = ("ReduceMean", "x", "m", LAST)
VARIANCE = [MEAN, ("Sub", "x m", "c"), ("Mul", "c c", "q"), ("ReduceMean", "q", "v", LAST), ("Add", "v eps", "e")]
POOLED = [("GlobalAveragePool", "x", "m"), *VARIANCE[1:3], ("GlobalAveragePool", "q", "v"), ("Add", "eps v", "e")]
MOMENTS = [
    *(MEAN, ("Sub", "x m", "c"), ("Mul", "x x", "q"), ("ReduceMean", "q", "p", LAST), ("Mul", "m m", "n")),
    *(("Sub", "p n", "u"), ("Max", "u 0", "v"), ("Add", "v eps", "e")),
]
ROOT = ("Sqrt", "e", "s")
INVERSE = [ROOT, ("Reciprocal", "s", "r"), ("Mul", "r g", "h")]
PRODUCTS = [*INVERSE, ("Mul", "x h", "k"), ("Mul", "m h", "l")]
TORCH = [
    *(MEAN, ("Sub", "x m", "c"), ("Pow", "c 2", "q"), ("ReduceMean", "q", "v", LAST), ("Add", "v eps", "e"), ROOT),
    *(("Div", "c s", "d"), ("Mul", "d g", "f"), ("Add", "f b", "y")),
]
KERAS = [*VARIANCE, *PRODUCTS, ("Sub", "b l", "t"), ("Add", "k t", "y")]
FORMS = {
    "PyTorch": TORCH,
    "Keras 2": KERAS,
    "Keras 3": [
        *POOLED,
        *INVERSE,
        ("Neg", "m", "w"),
        *(("Mul", "x h", "k"), ("Mul", "w h", "l"), ("Add", "l b", "t"), ("Add", "k t", "y")),
    ],
    "flax": [*MOMENTS, *INVERSE, ("Mul", "c h", "f"), ("Add", "f b", "y")],
    "reciprocal of 1": [
        *VARIANCE,
        ROOT,
        ("Div", "1 s", "r"),
        ("Mul", "r c", "d"),
        ("Mul", "d g", "f"),
        ("Add", "f b", "y"),
    ],
    "no affine": [*VARIANCE, ROOT, ("Div", "c s", "y")],
    "another difference for the variance": [
        *(MEAN, ("Sub", "m x", "a"), ("Mul", "a a", "q"), *VARIANCE[3:], ROOT, ("Sub", "x m", "c")),
        *TORCH[-3:],
    ],
}


def network(rows, opset=17, shape=SHAPE, **more):
    return graph(rows, {**NUMBERS, **more}, {"x": shape}, opset=opset)


def kinds(model, shape=SHAPE):
    """The operators after folding, which compute the same in float64."""
    return sorted(operators_after_folding(model, 3 + RANDOM.standard_normal(shape)))


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_formula_is_one_operator(form, opset):
    assert kinds(network(form, opset)) == ["LayerNormalization"]


@pytest.mark.parametrize("batch", [SHAPE[0], "n"])
def test_the_axis_that_a_variance_drops_is_added_by_a_reshape(batch):
    """As PyTorch's newer exporter writes ``x.var(-1, keepdim=True)``, by the size of the dropped batch if dynamic."""
    rows = [
        *(*VARIANCE[:3], ("ReduceMean", "q", "d", {"axes": [-1], "keepdims": 0}), ("Shape", "d", "n", {"end": 1})),
        *(("Concat", "n rest", "to", {"axis": 0}), ("Reshape", "d to", "v"), VARIANCE[-1], ROOT, *TORCH[-3:]),
    ]
    rows[-3] = ("Div", "c s", "d2")
    rows[-2] = ("Mul", "d2 g", "f")
    model = network(rows, shape=(batch, *SHAPE[1:]), rest=np.array([SHAPE[1], 1]))
    assert kinds(model) == ["LayerNormalization"]


IMAGE = (2, C, 4, C)  # as wide as it has channels
CHANNELS = {"g": RANDOM.standard_normal((C, 1, 1)), "b": RANDOM.standard_normal((1, C, 1, 1))}


def of_channels(rows):
    """The same over axis 1."""
    return [(*row[:3], {"axes": [1]}) if row[0] == "ReduceMean" else row for row in rows]


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("form", [name for name in FORMS if name != "Keras 3"])
def test_a_formula_over_the_channels_of_an_image_is_one_operator_between_transposes(form, opset):
    found = kinds(network(of_channels(FORMS[form]), opset, IMAGE, **CHANNELS), IMAGE)
    assert found == ["LayerNormalization", "Transpose", "Transpose"]


def test_what_tf2onnx_writes_in_convnext_has_one_transpose_before_the_linear_layer():
    """It turns the mean by a Reshape, and the image before the linear layer, which takes scale and shift."""
    rows = [MEAN, ("Neg", "m", "w"), ("Reshape", "m s", "i"), ("Sub", "x i", "c"), *VARIANCE[2:]]
    rows = [*rows, ("Sqrt", "e", "o"), ("Reciprocal", "o", "r"), INVERSE[2], ("Mul", "x h", "k"), ("Mul", "w h", "l")]
    rows = [*rows, ("Add", "l b", "t"), ("Add", "k t", "z"), ("Transpose", "z", "u", {"perm": [0, 2, 3, 1]})]
    more = {"s": np.array([-1, 1, 4, C]), "p": RANDOM.standard_normal((C, 4)), "a": RANDOM.standard_normal(4)}
    rows = of_channels([*rows, ("MatMul", "u p", "n"), ("Add", "n a", "y")])
    found = kinds(network(rows, 17, ("batch", *IMAGE[1:]), **CHANNELS, **more), IMAGE)
    assert found == ["Add", "LayerNormalization", "MatMul", "Transpose"]


@pytest.mark.parametrize("name", ["g", "b"])
def test_an_affine_along_another_axis_than_the_norm_stays_after_it(name):
    """As many numbers along rows as there are channels."""
    more = {**CHANNELS, name: RANDOM.standard_normal(C)}
    found = kinds(network(of_channels(TORCH), 17, IMAGE, **more), IMAGE)
    assert ("Mul" in found, "Add" in found) == (name == "g", name in "gb")
    assert "LayerNormalization" in found


def test_scale_and_shift_go_into_the_linear_layer_after_it():
    rows = [*KERAS[:-1], ("Add", "k t", "z"), ("MatMul", "z w", "o"), ("Add", "o a", "y")]
    model = network(rows, w=RANDOM.standard_normal((C, 4)), a=RANDOM.standard_normal(4))
    assert kinds(model) == ["Add", "LayerNormalization", "MatMul"]
    after, _ = rewritten(model, FOLDS)
    (norm,) = (node for node in after.graph.node if node.op_type == "LayerNormalization")
    (scale,) = (onnx.numpy_helper.to_array(each) for each in after.graph.initializer if each.name == norm.input[1])
    assert len(norm.input) == 2
    assert (scale == 1).all()


def test_two_affines_of_one_norm_stay():
    rows = [
        *FORMS["no affine"][:-1],
        ("Div", "c s", "d"),
        ("Mul", "d g", "i"),
        ("Add", "d b", "j"),
        ("Max", "i j", "y"),
    ]
    assert kinds(network(rows)) == ["Add", "LayerNormalization", "Max", "Mul"]


OTHERS = {
    "the batch": [(*row[:3], {"axes": [0]}) if row[0] == "ReduceMean" else row for row in FORMS["no affine"]],
    "a mean along each of two axes": [
        (*row[:3], {"axes": [1]}) if row[1] == "q" else row for row in FORMS["no affine"]
    ],
    "two axes": [(*row[:3], {"axes": [1, 2]}) if row[0] == "ReduceMean" else row for row in FORMS["no affine"]],
    "another mean": [
        ("ReduceMean", "x", "o", {"axes": [1]}),
        *VARIANCE,
        ROOT,
        ("Sub", "x o", "a"),
        ("Div", "a s", "y"),
    ],
    "not centered": [*VARIANCE, ROOT, ("Div", "x s", "y")],
    "not centered for the variance": [
        *(MEAN, ("Sub", "x m", "c"), ("Mul", "x x", "q")),
        *VARIANCE[3:],
        ROOT,
        ("Div", "c s", "y"),
    ],
    "another power": [*(MEAN, ("Sub", "x m", "c"), ("Pow", "c 4", "q")), *VARIANCE[3:], ROOT, ("Div", "c s", "y")],
    "other factors": [*VARIANCE, *PRODUCTS, ("Mul", "l 2", "n"), ("Sub", "b n", "t"), ("Add", "k t", "y")],
    "divided twice": [*VARIANCE, ROOT, ("Div", "c s", "d"), ("Div", "d s", "y")],
    "root read": [*VARIANCE, ROOT, ("Div", "c s", "d"), ("Sin", "s", "o"), ("Add", "d o", "y")],
    "root added": [*VARIANCE, ROOT, ("Div", "c s", "d"), ("Add", "d s", "y")],
    "a factor per token": [*VARIANCE, ROOT, ("Mul", "c f", "d"), ("Div", "d s", "y")],
    "reciprocal": [*VARIANCE, ROOT, ("Div", "s c", "y")],
    "two values": [
        *VARIANCE,
        ROOT,
        ("Sin", "x", "z"),
        ("ReduceMean", "z", "o", LAST),
        ("Sub", "z o", "a"),
        ("Div", "a s", "y"),
    ],
    "epsilon of many digits": [*VARIANCE[:4], ("Add", "v long", "e"), ROOT, ("Div", "c s", "y")],
    "larger than 1": [*MOMENTS[:6], ("Max", "u 1", "v"), MOMENTS[7], ROOT, ("Div", "c s", "y")],
}


@pytest.mark.parametrize("rows", OTHERS.values(), ids=OTHERS)
def test_what_is_another_function_stays(rows):
    more = {"4": np.array(4.0), "f": RANDOM.standard_normal((5, 1)), "long": np.array(1e-6)}
    _, changes = rewritten(network(rows, **more), [LAYER_NORM])
    assert not changes


def test_a_norm_of_no_numbers_stays():
    """ONNX Runtime refuses a LayerNormalization over an axis of length 0."""
    model = network(FORMS["no affine"], shape=(2, 5, 0))
    assert not rewritten(model, [LAYER_NORM])[1]
    assert rewritten(network(FORMS["no affine"], shape=(2, 5, 1)), [LAYER_NORM])[1]


def test_a_root_that_is_an_output_or_read_in_a_branch_stays():
    model = network(FORMS["no affine"])
    model.graph.output.append(helper.make_tensor_value_info("s", TensorProto.DOUBLE, None))
    assert not rewritten(model, [LAYER_NORM])[1]
    end = [helper.make_tensor_value_info("o", TensorProto.DOUBLE, None)]
    branches = [helper.make_graph([helper.make_node("Sin", [name], ["o"])], "branch", [], end) for name in ("s", "m")]
    rows = [*FORMS["no affine"], ("ReduceMax", "x", "t", {"keepdims": 0}), ("Greater", "t 0", "if")]
    rows += [("If", "if", "z", {"then_branch": branches[0], "else_branch": branches[1]})]
    model = graph(rows, NUMBERS, {"x": SHAPE}, ("y", "z"), opset=17)
    assert not rewritten(model, [LAYER_NORM])[1]


def test_a_row_that_is_broadcast_to_more_stays():
    rows = [*FORMS["no affine"][:-1], ("Div", "c s", "d"), ("Mul", "d f", "y")]
    assert kinds(network(rows, f=RANDOM.standard_normal((3, 1, 1, 1)))) == ["LayerNormalization", "Mul"]


def test_an_operator_that_a_newer_opset_changed_keeps_the_formula():
    rows = [*FORMS["no affine"][:-1], ("Div", "c s", "d"), ("Unsqueeze", "d o", "u"), ("RoiAlign", "u f i", "y")]
    model = network(rows, opset=15, o=np.array([0]), f=np.array([[0.0, 0, 4, 4]]), i=np.array([0]))
    after, changes = rewritten(model, [LAYER_NORM])
    assert not changes
    assert after.opset_import[0].version == 15


@pytest.mark.parametrize(("opset", "target"), [(9, 13), (11, 17), (13, 13), (17, 20), (21, 21)])
@pytest.mark.parametrize("form", ["PyTorch", "Keras 2"])
def test_a_folded_file_is_verified_and_exported(form, opset, target):
    rows = [*FORMS[form][:-1], (*FORMS[form][-1][:2], "z"), ("MatMul", "z w", "y")]
    rows = [("ReduceMean", "x last", "m") if opset >= 18 and row == MEAN else row for row in rows]
    rows = [("ReduceMean", "q last", "v") if opset >= 18 and row[:2] == ("ReduceMean", "q") else row for row in rows]
    model = single(network(rows, opset, w=RANDOM.standard_normal((C, 4)), last=np.array([-1])))
    onnx.save(model, "net.onnx")
    done = rc.fold("net.onnx", out="run", measure=False)
    assert done.verdict == "passed"
    assert done.operators == {"LayerNormalization": 1, "MatMul": 1}
    exported = rc.export("run", opset=target)
    assert exported.verdict == "passed"
    assert ("LayerNormalization" in exported.operators) == (target >= 17)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
def test_other_types_are_folded_as_well(kind):
    from pathlib import Path

    from repaconv.graph.element_type_conversion import retyped
    from repaconv.sources.graph_fold import folded

    model = retyped(network(TORCH), {TensorProto.DOUBLE: kind})
    found = folded(Path("net.onnx"), model)
    assert [change.rewrite for change in found.changes] == ["layer-norm"]
