"""Resize before opset 11, as ONNX Runtime computes it, and a cubic Resize as two matrix products."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from repaconv.algebra.image_resizing import PLACES, resized
from repaconv.graph.element_type_conversion import to_float64
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.graph.opset_upgrade import upgraded
from repaconv.rewrites.speed.cubic_resize import MOST_PER_NEW_PIXEL, MOST_PRODUCTS, RESIZE_AS_MATMUL
from repaconv.verification.float64_graphs import REFERENCE, Float64

LARGER = ([1, 1, 2, 7], [1, 1, 1.5, 2.5], [1, 1, 1.05, 2], [1, 1, 1.05, 1.02])


def resizing(kind, opset, mode, scales):
    """Then a convolution, so that no runtime has it in float64."""
    at, held = ["x"], {"w": np.random.default_rng(1).standard_normal((3, 2, 1, 1))}
    how = {"scales": [float(scale) for scale in scales]}
    if opset > 7:
        at, held, how = ["x", "scales"], {**held, "scales": np.array(scales)}, {}
    nodes = [helper.make_node(kind, at, ["z"], mode=mode, **how), helper.make_node("Conv", ["z", "w"], ["y"])]
    weights = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in held.items()]
    values = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, s)] for n, s in (("x", [1, 2, 7, 9]), ("y", None))]
    graph = helper.make_graph(nodes, "one", *values, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(
    ("kind", "opset", "scales"),
    [
        *[("Upsample", opset, scales) for opset in (7, 9) for scales in LARGER],
        *[("Resize", 10, scales) for scales in (*LARGER, [1, 1, 0.5, 0.4])],
    ],
)
def test_an_old_resize_stays_what_it_is(kind, opset, scales, mode):
    old = resizing(kind, opset, mode, scales)
    x = np.random.default_rng(0).standard_normal((1, 2, 7, 9)).astype(np.float32)
    right, new = (
        onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0] for model in (old, upgraded(old))
    )
    np.testing.assert_array_equal(new, right)
    for model in (old, upgraded(old)):
        exact = Float64(model)
        assert exact.evaluator == REFERENCE
        np.testing.assert_allclose(exact.run({"x": x})["y"], right, rtol=1e-5, atol=1e-5)


def test_whole_places_are_whole():
    """2 pixels as 98: 49 times a 49th is a little less than 1."""
    x = np.arange(2.0)[None]
    how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    np.testing.assert_array_equal(resized(x, [1.0, 49.0], None, how), x.repeat(49, 1))


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_an_image_that_keeps_its_size_is_copied(mode):
    model = resize([1, 1, 1.05, 1.1], mode=mode)
    x = np.random.default_rng(0).standard_normal(IMAGE).astype(np.float32)
    right = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_array_equal(right, x)
    np.testing.assert_array_equal(Float64(to_float64(model)).run({"x": x.astype(np.float64)})["y"], x)


# A cubic Resize as two products

IMAGE = (2, 3, 9, 7)


def resize(scales=None, sizes=None, *, roi=None, opset=19, shape=IMAGE, dtype=TensorProto.FLOAT, **how):
    """A Resize of images, cubic if ``how`` does not say otherwise; ``scales`` or ``sizes`` may name a graph input."""
    given = {"roi": roi, "scales": scales, "sizes": sizes}
    types = {"roi": np.float32, "scales": np.float32, "sizes": np.int64}
    empty = opset < 13  # where these inputs are not optional
    held, inputs = [], [helper.make_tensor_value_info("x", dtype, shape)]
    for name, numbers in given.items():
        if isinstance(numbers, str):
            kind = helper.np_dtype_to_tensor_dtype(np.dtype(types[name]))
            inputs.append(helper.make_tensor_value_info(name, kind, [len(shape)]))
        elif numbers is not None or (empty and name != "sizes"):
            held.append(numpy_helper.from_array(np.array(numbers or [], types[name]), name))
    present = {value.name for value in (*held, *inputs)}
    names = ["x", *(name if name in present else "" for name in given)]
    node = helper.make_node("Resize", names if sizes is not None else names[:3], ["y"], **{"mode": "cubic", **how})
    outputs = [helper.make_tensor_value_info("y", dtype, None)]
    graph = helper.make_graph([node], "one", inputs, outputs, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def require_products(model, count=2):
    """The rewrite writes so many products, which compute the same in float64, and in float32 what ONNX Runtime did."""
    exact = to_float64(upgraded(model))
    after, changes = rewritten(exact, [RESIZE_AS_MATMUL])
    assert [change.rewrite for change in changes] == ["resize-as-matmul"]
    assert [node.op_type for node in after.graph.node] == ["MatMul"] * count
    shape = [entry.dim_value or 2 for entry in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(0).standard_normal(shape)
    (before,), (now,) = (Float64(each).run({"x": x}).values() for each in (exact, after))
    np.testing.assert_allclose(now, before, rtol=0, atol=1e-14 * np.abs(before).max() * max(shape))
    single = x.astype(np.float32)
    right, found = (
        onnxruntime.InferenceSession(each.SerializeToString()).run(None, {"x": single})[0]
        for each in (model, rewritten(upgraded(model), [RESIZE_AS_MATMUL])[0])
    )
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-5 * np.abs(right).max())


def require_unchanged(model):
    assert rewritten(model, [RESIZE_AS_MATMUL])[1] == []


OPTIONS = [{}, {"cubic_coeff_a": -0.5}, {"exclude_outside": 1}]


@pytest.mark.parametrize("how", OPTIONS, ids=str)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("to", [[2, 3], [0.5, 0.4], [1.7, 0.6], [0.2, 3.3]])
def test_a_cubic_resize_by_scales_is_two_products(to, places, how):
    require_products(resize([1, 1, *to], coordinate_transformation_mode=places, **how))


@pytest.mark.parametrize("how", OPTIONS, ids=str)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("to", [[18, 14], [4, 20], [1, 1]])
def test_a_cubic_resize_to_sizes_is_two_products(to, places, how):
    require_products(resize(sizes=[2, 3, *to], coordinate_transformation_mode=places, **how))


@pytest.mark.parametrize("opset", [11, 13, 18, 19])
def test_a_cubic_resize_of_any_opset_is_two_products(opset):
    require_products(resize([1, 1, 2, 2], opset=opset))
    require_products(resize(sizes=[2, 3, 18, 14], opset=opset))
    require_products(resize([1, 1, 2, 2], roi=[0, 0, 0.2, 0.2, 1, 1, 0.5, 0.5], opset=opset))  # of no effect


@pytest.mark.parametrize("how", [{"scales": [2, 3]}, {"sizes": [30, 5]}, {"scales": [2, 3], "axes": [-1, -2]}])
def test_a_cubic_resize_of_named_axes_is_two_products(how):
    require_products(resize(**{"axes": [2, 3], **how}, shape=["n", *IMAGE[1:]]))


def test_a_cubic_resize_to_sizes_with_a_dynamic_batch_is_two_products():
    """As torch exports `nn.Upsample(size=...)`: images and channels from the shape, height and width fixed."""
    model = resize(sizes="sizes", shape=("n", *IMAGE[1:]))
    held = {"begin": [0], "end": [2], "pixels": [18, 14]}
    model.graph.initializer.extend(numpy_helper.from_array(np.array(each), name) for name, each in held.items())
    del model.graph.input[1:]
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "begin", "end"], ["images"]),
        helper.make_node("Concat", ["images", "pixels"], ["sizes"], axis=0),
        *model.graph.node,
    ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    after, changes = rewritten(model, [RESIZE_AS_MATMUL])
    assert [change.description for change in changes] == ["9 x 7 to 18 x 14 pixels"]
    assert [node.op_type for node in after.graph.node] == ["MatMul"] * 2


def test_an_axis_that_keeps_its_size_has_no_product():
    require_products(resize([1, 1, 2, 1]), count=1)
    require_products(resize(sizes=[2, 3, 9, 20]), count=1)
    require_products(resize(sizes=[20], axes=[3]), count=1)
    require_unchanged(resize([1, 1, 1, 1]))


@pytest.mark.parametrize("how", OPTIONS, ids=str)
def test_an_axis_that_keeps_its_size_is_resized_by_a_part_of_a_pixel_if_the_other_axis_changes(how):
    require_products(resize([1, 1, 2, 1.05], **how))
    require_products(resize([1, 1, 1.05, 0.5], **how))
    require_unchanged(resize([1, 1, 1.05, 1.05], **how))


@pytest.mark.parametrize(
    ("shape", "to", "first"), [((1, 3, 8, 6), (16, 18), 2), ((1, 3, 6, 8), (18, 16), 3), ((1, 3, 16, 32), (2, 31), 2)]
)
def test_the_axis_comes_first_with_which_products_take_fewer_multiplications(shape, to, first):
    after, _ = rewritten(resize(sizes=[*shape[:2], *to], shape=shape), [RESIZE_AS_MATMUL])
    assert after.graph.node[0].input[0 if first == 3 else 1] == "x"


@pytest.mark.parametrize(
    "model",
    [
        resize([1, 1, 2, 2], mode="linear"),
        resize([1, 1, 2, 2], mode="nearest"),
        resize([1, 1, 2, 2], roi=[0, 0, 0, 0, 1, 1, 0.5, 0.5], coordinate_transformation_mode="tf_crop_and_resize"),
        resize(sizes=[20, 30], axes=[2, 3], keep_aspect_ratio_policy="not_larger"),
        resize("scales"),
        resize(sizes="sizes"),
        resize([1, 1, 2, 2], shape=("n", 3, "h", "w")),
        resize([1, 1.4, 2, 2]),
        resize([2, 2], shape=(9, 7)),
        resize([1, 1, 2, 2], dtype=TensorProto.FLOAT16),
        resize([1, 1, 2, 2], shape=(1, 3, MOST_PRODUCTS, MOST_PRODUCTS)),
        resize([1, 1, 0.5, 0.5], shape=(1, 3, 2 * MOST_PRODUCTS, 2 * MOST_PRODUCTS)),
        resize(sizes=[1, 3, 8, 8], shape=(1, 3, MOST_PER_NEW_PIXEL // 8, MOST_PER_NEW_PIXEL // 8)),
        resize([1, 1, 2, 2], antialias=1),
    ],
    ids=[
        *("linear", "nearest", "crops", "policy", "scales", "sizes"),
        *(
            "dynamic",
            "channels",
            "matrix",
            "float16",
            "large",
            "shrunk",
            "shrunk to few",
            "antialias",
        ),
    ],
)
def test_another_resize_stays(model):
    require_unchanged(model)
