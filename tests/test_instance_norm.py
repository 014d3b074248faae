"""instance-norm: a norm over the places of channels, groups or samples is one operator; another function stays."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto
from test_fold_onnx import graph
from test_hard_swish import single

import repaconv as rc
from repaconv.graph.element_type_conversion import retyped
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.instance_norm_operator import INSTANCE_NORM

RANDOM = np.random.default_rng(0)
N, C, H, W, G = 2, 6, 5, 4, 3
IMAGE = (N, C, H, W)
NUMBERS = {
    "eps": np.array(np.float32(1e-5), np.float64),
    "half": np.array(0.5),
    "minus": np.array(-0.5),
    "g": RANDOM.standard_normal((C, 1, 1)),
    "b": RANDOM.standard_normal((1, C, 1, 1)),
}
NORM, NONE = ["InstanceNormalization"], []


def mean(read, write, axes):
    return ("ReduceMean", read, write, {"axes": axes})


def moments(axes, x="x"):
    rows = [mean(x, "m", axes), ("Sub", f"{x} m", "c"), ("Mul", "c c", "q"), mean("q", "v", axes)]
    return [*rows, ("Add", "v eps", "e")]


def tensorflow(axes, x="x", y="y"):
    """tf.nn.moments and tf.nn.batch_normalization, as Keras has them."""
    rows = [("Sqrt", "e", "s"), ("Reciprocal", "s", "r"), ("Mul", "r g", "h"), ("Mul", f"{x} h", "k")]
    return [*moments(axes, x), *rows, ("Mul", "m h", "l"), ("Sub", "b l", "t"), ("Add", "k t", y)]


def network(rows, shape=IMAGE, opset=17, **more):
    return graph(rows, {**NUMBERS, **more}, {"x": shape}, opset=opset)


def kinds(model, shape=IMAGE):
    """The operators after folding, which compute the same in float64."""
    return sorted(operators_after_folding(model, 3 + RANDOM.standard_normal(shape)))


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("shape", [IMAGE, ("batch", C, "height", "width")], ids=["fixed", "dynamic"])
def test_a_formula_over_places_is_one_operator_with_its_affine(shape, opset):
    assert kinds(network(tensorflow([2, 3]), shape, opset)) == NORM
    rows = [*moments([2, 3]), ("Pow", "e half", "s"), ("Div", "c s", "d"), ("Mul", "d g", "f"), ("Add", "f b", "y")]
    assert kinds(network(rows, shape, opset)) == NORM
    assert kinds(network([*rows[:5], ("Pow", "e minus", "r"), ("Mul", "c r", "y")], shape, opset)) == NORM


@pytest.mark.parametrize("shape", [(N, C, 0, W), (N, C, H, 0), (0, C, H, W)])
def test_a_norm_of_no_numbers_stays(shape):
    """ONNX Runtime ends the process with a segmentation fault."""
    assert not rewritten(network(tensorflow([2, 3]), shape), [INSTANCE_NORM])[1]


def test_of_a_row_of_a_dynamic_length():
    """LayerNormalization needs the number of places; and its scale is along them."""
    length = (N, C, H)
    more = {"g": RANDOM.standard_normal((C, 1)), "b": RANDOM.standard_normal((1, C, 1))}
    for shape in (length, ("batch", C, "length")):
        assert kinds(network(tensorflow([2]), shape, **more), length) == NORM


def grouped(batch=-1, channels=C):
    """What tf2onnx writes of Keras' GroupNormalization between convolutions: in groups, with channels last."""
    rows = [("Conv", "x w", "1"), ("Transpose", "1", "2", {"perm": [0, 2, 3, 1]}), ("Reshape", "2 apart", "3")]
    rows = [*rows, *tensorflow([1, 2, 4], "3", "4"), ("Reshape", "4 together", "5"), ("Relu", "5", "6")]
    rows = [*rows, ("Transpose", "6", "7", {"perm": [0, 3, 1, 2]}), ("Conv", "7 u", "y")]
    affine = {name: RANDOM.standard_normal((1, 1, 1, G, channels // G)) for name in "gb"}
    shapes = {"apart": np.array([batch, H, W, G, channels // G]), "together": np.array([batch, H, W, channels])}
    more = {"w": RANDOM.standard_normal((channels, C, 1, 1)), "u": RANDOM.standard_normal((4, channels, 1, 1))}
    return rows, {**affine, **shapes, **more}


@pytest.mark.parametrize("batch", [N, "batch"])
def test_groups_of_channels_last_are_one_operator_between_convolutions(batch):
    rows, more = grouped()
    wanted = ["BatchNormalization", "Conv", "Conv", *NORM, "Relu", "Reshape", "Reshape"]
    assert kinds(network(rows, (batch, *IMAGE[1:]), **more)) == wanted


def test_groups_of_one_channel_keep_no_reshape():
    rows, more = grouped(channels=G)
    assert kinds(network(rows, **more)) == ["Conv", "Conv", *NORM, "Relu"]


def test_the_affine_of_channels_in_groups_goes_into_the_convolution_after_it():
    rows, more = grouped()
    rows = [*rows[:-3], ("Transpose", "5", "7", {"perm": [0, 3, 1, 2]}), rows[-1]]
    assert kinds(network(rows, **more)) == ["Conv", "Conv", *NORM, "Reshape", "Reshape"]


def test_all_of_a_sample_is_one_channel():
    assert kinds(network(tensorflow([1, 2, 3]))) == ["BatchNormalization", *NORM, "Reshape", "Reshape"]


def test_a_dynamic_image_in_groups_is_normalized_where_it_is():
    shape = (N, G, C // G, "height", "width")
    affine = {name: RANDOM.standard_normal((1, G, C // G, 1, 1)) for name in "gb"}
    found = kinds(network(tensorflow([2, 3, 4]), shape, **affine), (N, G, C // G, H, W))
    assert found == ["Add", *NORM, "Mul"]


OTHERS = {
    "over the batch": moments([0, 2, 3]),
    "of an unknown number of channels": moments([2, 3]),
    "of two axes": moments([3]),
    "root read": [*moments([2, 3]), ("Sqrt", "e", "o"), ("Sin", "o", "p"), ("Div", "c o", "d"), ("Add", "d p", "y")],
    "another power": [*moments([2, 3]), ("Pow", "e g", "s"), ("Div", "c s", "y")],
    "a factor for each image": [*moments([2, 3]), ("Sqrt", "e", "s"), ("Mul", "c f", "d"), ("Div", "d s", "y")],
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_another_function_stays(form):
    rows = OTHERS[form] if OTHERS[form][-1][2] == "y" else [*OTHERS[form], ("Sqrt", "e", "s"), ("Div", "c s", "y")]
    shape = (N, "channels", H, W) if "unknown" in form else IMAGE
    model = network(
        rows, shape, f=RANDOM.standard_normal((N, 1, 1, 1)), **({"g": np.array(0.3)} if "power" in form else {})
    )
    assert not rewritten(model, [INSTANCE_NORM])[1]


@pytest.mark.parametrize(
    ("kind", "folds"), [(TensorProto.FLOAT16, 1), (TensorProto.BFLOAT16, 0), (TensorProto.DOUBLE, 0)]
)
def test_types_that_the_operator_lacks_keep_the_formula(kind, folds):
    """ONNX has it without bfloat16 before opset 22, ONNX Runtime without float64."""
    from pathlib import Path

    from repaconv.sources.graph_fold import folded

    model = retyped(network(tensorflow([2, 3])), {TensorProto.DOUBLE: kind})
    found = folded(Path("net.onnx"), model)
    assert [change.rewrite for change in found.changes] == ["instance-norm"] * folds


@pytest.mark.parametrize(("opset", "target"), [(11, 13), (17, 17), (17, 13)])
def test_a_folded_file_is_verified_and_exported(opset, target):
    rows, more = grouped()
    onnx.save(single(network(rows, ("batch", *IMAGE[1:]), opset, **more)), "net.onnx")
    done = rc.fold("net.onnx", out="run", measure=False)
    assert done.verdict == "passed"
    assert done.operators["InstanceNormalization"] == 1
    exported = rc.export("run", opset=target)
    assert exported.verdict == "passed"
