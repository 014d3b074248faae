"""Every operator that is evaluated in float64 outside ONNX Runtime computes the same as ONNX Runtime, or is refused."""

from __future__ import annotations

import math
import re
from itertools import product
from math import prod

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from repaconv.verification.float64_graphs import ReferenceEvaluation
from repaconv.verification.float64_operators import ERF_END, ERF_GRID, _read_pixels, error_function

RANDOM = np.random.default_rng(0)
IMAGE = (2, 4, 13, 11)
WINDOW = {"kernel_shape": [3, 3], "strides": [2, 2]}
PADS = {"pads": [1, 0, 1, 2]}
SCALES = ((2, 2), (0.5, 0.5), (0.6, 0.6), (1.7, 1.3), (1 / 3, 3), (0.1, 0.1))
SIZES = ((26, 7), (20, 22), (5, 30), (1, 1))
MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric")


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


CASES: dict[str, tuple] = {}
"""By name: operator, further inputs, attributes, opset."""


def case(kind: str, *weights: np.ndarray | None, opset: int = 20, **how) -> None:
    shown = [f"{name}={value}" for name, value in how.items()]
    shown += [str(w.tolist()) for w in weights if w is not None and w.size < 9]
    CASES[" ".join([kind, *shown, *([f"opset {opset}"] if opset != 20 else [])])] = kind, weights, how, opset


def resize(by: tuple, **how) -> None:
    case("Resize", None, np.array((1, 1, *by), np.float32), **how)


def resize_to(by: tuple, **how) -> None:
    case("Resize", None, None, ints(2, 4, *by), **how)


for mode, by in product(("nearest", "linear", "cubic"), MODES):
    for nearest in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil") if mode == "nearest" else (None,):
        named = {"mode": mode, "coordinate_transformation_mode": by, **({"nearest_mode": nearest} if nearest else {})}
        for scale in SCALES:
            resize(scale, **named)
        for size in SIZES:
            resize_to(size, **named)
    if mode != "nearest":
        for scale in SCALES:
            resize(scale, mode=mode, coordinate_transformation_mode=by, antialias=1)
        for size in SIZES:
            resize_to(size, mode=mode, coordinate_transformation_mode=by, antialias=1)
    if mode == "cubic":
        for scale in SCALES:
            resize(scale, mode=mode, coordinate_transformation_mode=by, exclude_outside=1)
        resize((1.7, 0.6), mode=mode, coordinate_transformation_mode=by, cubic_coeff_a=-0.5)
        pillow = {"antialias": 1, "exclude_outside": 1, "cubic_coeff_a": -0.5}
        resize((1.7, 0.6), mode=mode, coordinate_transformation_mode=by, **pillow)
        resize((1.01, 0.6), mode=mode, coordinate_transformation_mode=by, antialias=1)
for mode in ("nearest", "linear", "cubic"):
    case("Resize", None, np.array((1.7, 0.6), np.float32), mode=mode, axes=[2, 3])
    for policy in ("not_larger", "not_smaller"):
        case("Resize", None, None, ints(20, 7), mode=mode, axes=[2, 3], keep_aspect_ratio_policy=policy)
for mode, scale in product(("nearest", "linear"), SCALES):
    case("Resize", np.array((1, 1, *scale), np.float32), mode=mode, opset=10)
    if min(scale) >= 1:
        case("Upsample", np.array((1, 1, *scale), np.float32), mode=mode, opset=9)

for pads in (PADS, {"pads": [1] * 4}, {"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"}, {"auto_pad": "VALID"}):
    case("Conv", normal(6, 2, 3, 3), normal(6), group=2, strides=[2, 1], **pads)
    case("ConvTranspose", normal(4, 3, 3, 3), normal(6), group=2, strides=[2, 2], **pads)
    for ceil in (0, 1):
        case("MaxPool", **WINDOW, **pads, ceil_mode=ceil)
        for counted in (0, 1):
            case("AveragePool", **WINDOW, **pads, ceil_mode=ceil, count_include_pad=counted)
    case("LpPool", **WINDOW, **pads)
case("Conv", normal(6, 4, 3, 3), dilations=[2, 1], **PADS)
case("Conv", normal(8, 1, 5, 3), normal(8), group=4, strides=[1, 2], dilations=[1, 3], **PADS)
case("Conv", normal(4, 1, 3, 1), group=4, strides=[2, 1], **PADS)
case("ConvTranspose", normal(4, 3, 3, 3), strides=[2, 2], dilations=[2, 2], output_padding=[1, 1])
case("ConvTranspose", normal(4, 3, 3, 3), strides=[2, 2], output_shape=[27, 22])
case("MaxPool", **WINDOW, dilations=[2, 2], ceil_mode=1)
case("MaxPool", kernel_shape=[2, 4], pads=[0, 1, 1, 2], ceil_mode=1)
case("AveragePool", kernel_shape=[2, 4], pads=[0, 1, 1, 2], ceil_mode=1, strides=[1, 1])
case("AveragePool", **WINDOW, dilations=[2, 2])
case("AveragePool", **WINDOW, dilations=[1, 2], **PADS, count_include_pad=1)
for kind in ("MaxPool", "AveragePool"):
    case(kind, kernel_shape=[20000, 20000], strides=[20000, 20000], ceil_mode=1)
for size, more in product((1, 3, 5, 7), ({}, {"alpha": 0.9, "beta": 0.6, "bias": 2.0})):
    case("LRN", size=size, **more)
for mode, border, corners in product(("linear", "nearest", "cubic"), ("zeros", "border", "reflection"), (0, 1)):
    grid = np.random.default_rng(1).uniform(-1.3, 1.3, (2, 5, 6, 2)).astype(np.float32)
    case("GridSample", grid, mode=mode, padding_mode=border, align_corners=corners)
for mode in ("constant", "edge", "reflect", "wrap"):
    case("Pad", ints(0, 0, 1, 2, 0, 0, 2, 1), mode=mode)
case("Pad", ints(0, 0, -1, 2, 0, 0, 2, -3))
for kind in ("Erf", "HardSigmoid", "HardSwish", "Mish", "Elu", "Selu", "Celu", "Softplus", "Softsign"):
    case(kind)
for how in ("none", "tanh"):
    case("Gelu", approximate=how)
case("HardSigmoid", alpha=0.3, beta=0.4)
case("HardSigmoid", alpha=1 / 6)
for opset in (9, 13, 15, 20):
    positive = np.abs(normal(4)) + 0.5
    case("BatchNormalization", normal(4), normal(4), normal(4), positive, epsilon=1e-3, opset=opset)
case("InstanceNormalization", normal(4), normal(4))
case("MeanVarianceNormalization")
case("MeanVarianceNormalization", axes=[1, 3], opset=9)
case("LayerNormalization", normal(11), normal(11))
case("LpNormalization", axis=1)
case("GatherElements", RANDOM.integers(-13, 13, (2, 3, 70, 5)), axis=2)
case("Scatter", RANDOM.integers(0, 13, (2, 4, 3, 5)), normal(2, 4, 3, 5), opset=10, axis=2)
# apart from the others' random numbers, of which some cases fit their tolerances
SCATTERED = np.random.default_rng(1)
for reduction, axis in product(("none", "add", "mul", "max", "min"), (0, -2, 3)):
    places = np.stack([SCATTERED.permutation(IMAGE[axis])[:2] for _ in range(24)]).reshape(2, 3, 4, 2)
    places = np.moveaxis(places[: IMAGE[0] if axis else None], -1, axis)
    case("ScatterElements", places - IMAGE[axis] * (reduction == "add"),
         SCATTERED.standard_normal(places.shape).astype(np.float32), axis=axis, reduction=reduction)  # fmt: skip
for reduction in ("none", "add", "mul", "max", "min"):
    rows = np.stack([SCATTERED.permutation(2 * 4)[:5] for _ in range(3)])
    rows = np.stack([rows // 4, np.arange(3)[:, None].repeat(5, 1), rows % 4], -1)
    case("ScatterND", rows, SCATTERED.standard_normal((3, 5, *IMAGE[3:])).astype(np.float32),
         reduction=reduction)  # fmt: skip
case("GatherND", RANDOM.integers(0, 4, (2, 3, 1)), batch_dims=1)
case("DepthToSpace", blocksize=2, mode="CRD")
for kind, opset, axis in product(("Softmax", "LogSoftmax", "Hardmax"), (11, 13), (1, 2, -1)):
    case(kind, opset=opset, axis=axis)
    case(kind, opset=opset)
case("CumSum", np.array(2), exclusive=1, reverse=1)


MAY_REFUSE = re.compile(
    "|".join(
        (
            r"mode=nearest .*half_pixel_symmetric .*\[1.0, 1.0, [01]",
            r"mode=nearest axes=.* keep_aspect_ratio_policy",
            r"ConvTranspose .* (auto_pad|output_shape)",
        )
    )
)
"""What is not evaluated in float64, since onnx defines it in another way than ONNX Runtime, or does not run it."""


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_transposed_convolutions_of_all_axes_are_onnx_runtimes(axes, monkeypatch):
    """onnx's own loop over single numbers; of three axes it takes minutes."""
    from onnx.reference.ops.op_conv_transpose import ConvTranspose

    monkeypatch.setattr(ConvTranspose, "_run", onnx_own)
    how = {"strides": [2, 1, 2][:axes], "output_padding": [1, 0, 1][:axes], "dilations": [1, 2, 1][:axes]}
    require_equal("ConvTranspose", (2, 4, *(5, 4, 3)[:axes]), [normal(4, 3, *(3, 2, 3)[:axes])], how)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_elements_are_scattered_as_in_onnx_runtime_many_to_one_place(reduction, monkeypatch):
    """onnx's own loop over single numbers: of the masks of Keypoint R-CNN it takes seconds."""
    from onnx.reference.ops.op_scatter_elements import ScatterElements

    monkeypatch.setattr(ScatterElements, "_run", onnx_own)
    places = RANDOM.integers(-5, 5, (3, 7)) if reduction != "none" else np.array([[4, -5, 1], [0, 3, -3]])
    require_equal("ScatterElements", (4, 5), [places[:, :5], normal(*places[:, :5].shape)], {
        "axis": 1, "reduction": reduction,
    })  # fmt: skip


def test_of_an_image_only_the_pixels_that_have_a_weight_are_read():
    weights = np.zeros((2, 9))
    assert _read_pixels(weights)[1].shape == (2, 0)
    weights[0, 3], weights[1, 5] = 1, 2
    read, found = _read_pixels(weights)
    assert (read, found.tolist()) == (slice(3, 6), [[1, 0, 0], [0, 0, 2]])


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
def test_pools_of_kernels_of_any_size_are_onnx_runtimes(kind, axes, monkeypatch):
    from onnx.reference.ops.op_average_pool import AveragePool_19
    from onnx.reference.ops.op_max_pool import MaxPool

    monkeypatch.setattr(MaxPool, "_run", onnx_own)
    monkeypatch.setattr(AveragePool_19, "_run", onnx_own)
    random = np.random.default_rng(axes)
    for _ in range(60):
        size, kernel, strides = (random.integers(1, most, axes) for most in (9, 25, 20))
        pads = random.integers(0, 2) * np.minimum(kernel // 2, 3)
        apart = np.ones(axes, int) if pads.any() else random.integers(1, 3, axes)
        if (size + 2 * pads - apart * (kernel - 1) <= 1 - strides).any():
            continue  # no window, which ONNX Runtime refuses
        how = {"kernel_shape": kernel, "strides": strides, "dilations": apart, "pads": [*pads, *pads]}
        how |= {"ceil_mode": random.integers(2)}
        how |= {"count_include_pad": random.integers(2)} if kind == "AveragePool" else {}
        require_equal(kind, (2, 3, *size.tolist()), [], {name: np.array(value).tolist() for name, value in how.items()})


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("pads", [[0] * 3, [1, 2, 0]])
def test_images_of_columns_are_onnx_runtimes(axes, pads, monkeypatch):
    """Of other than two axes ONNX Runtime ignores dilations, against the operator's definition."""
    from onnx.reference.ops.op_col2im import Col2Im

    monkeypatch.setattr(Col2Im, "_run", onnx_own)
    size, block, strides, dilations = (
        each[:axes] for each in ([7, 6, 5], [2, 3, 2], [1, 2, 1], [1 + (axes == 2), 1, 1])
    )
    ends = pads[:axes], pads[::-1][:axes]
    axes_of = zip(size, *ends, block, strides, dilations, strict=True)
    places = [(s + a + b - far * (k - 1) - 1) // step + 1 for s, a, b, k, step, far in axes_of]
    how = {"pads": [*ends[0], *ends[1]], "strides": strides, "dilations": dilations}
    require_equal("Col2Im", (2, 3 * prod(block), prod(places)), [ints(*size), ints(*block)], how)


def onnx_own(*_given, **_how):
    raise AssertionError("onnx's own")


def one_node(kind: str, shape: tuple[int, ...], weights, how: dict, opset: int = 20) -> onnx.ModelProto:
    given = {f"w{at}": w for at, w in enumerate(weights) if w is not None}
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", *("" if w is None else f"w{at}" for at, w in enumerate(weights))], ["y"], **how)],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(w, at) for at, w in given.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def require_equal(kind: str, shape: tuple[int, ...], weights: list[np.ndarray], how: dict) -> None:
    model = one_node(kind, shape, weights, how)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    right = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    found = ReferenceEvaluation(model).run({"x": x.astype(np.float64)})["y"]
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES, ids=lambda name: name.replace("coordinate_transformation_mode=", ""))
def test_the_float64_evaluator_is_onnx_runtime_but_for_rounding(name):
    kind, weights, how, opset = CASES[name]
    model = one_node(kind, IMAGE, weights, how, opset)
    x = np.random.default_rng(0).standard_normal(IMAGE).astype(np.float32)
    right = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    try:
        found = ReferenceEvaluation(model).run({"x": x.astype(np.float64)})["y"]
    except (NotImplementedError, ValueError, AssertionError):
        assert MAY_REFUSE.search(name)
        return
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def require_onnx_runtimes(text: str, x: np.ndarray) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> g {text}')
    right = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    found = ReferenceEvaluation(model).run({"x": x.astype(np.float64)})
    for value, wanted in zip(found.values(), right, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-5, strict=False)
        assert value.shape == wanted.shape


@pytest.mark.parametrize("depth", ["int64 d = {5}", "int64[1] d = {5}"])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_numbers_as_rows_of_zeros_and_a_one(depth, axis):
    nodes = f"i = Cast <to = 7> (x) y = OneHot <axis = {axis}> (i, d, v)"
    require_onnx_runtimes(
        f"(float[2,4] x) => (float y) <{depth}, float[2] v = {{-1, 3}}> {{ {nodes} }}", 4 * normal(2, 4)
    )


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("condition", ["", "t", "less"])
def test_loops_stack_what_each_step_returns(shape, condition):
    axes = f"float{list(shape)}" if shape else "float"
    body = f"""(int64 i, bool c, {axes} s) => (bool c2, {axes} s2, {axes} y)
        {{ s2 = Add(s, one) p = ReduceMax <keepdims = 0> (s2) c2 = {"Less(p, four)" if condition else "Identity(c)"}
           square = Mul(x, x) k = Cast <to = 1> (i) step = Mul(square, k) y = Add(s2, step) }}"""
    constants = "int64 n = {3}, float one = {1}, float four = {4}, bool t = {1}"
    nodes = f"""{"less = Less(one, four)" if condition == "less" else ""}
        last, all = Loop <body = b {body}> (n, {condition or '""'}, x)"""
    require_onnx_runtimes(
        f"({axes} x) => (float last, float all) <{constants}> {{ {nodes} }}",
        np.asarray(np.abs(normal(*shape)), np.float32),
    )


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_a_global_maximum_of_any_rank(shape):
    require_equal("GlobalMaxPool", shape, [], {})


def test_an_infinite_pixel_changes_those_outputs_of_a_depthwise_convolution_that_read_it():
    evaluation = ReferenceEvaluation(one_node("Conv", IMAGE, [normal(4, 1, 3, 3)], {"group": 4, "pads": [1] * 4}))
    x = np.random.default_rng(0).standard_normal(IMAGE)
    finite = evaluation.run({"x": x})["y"]
    x[0, 2, 6, 5] = np.inf
    found = evaluation.run({"x": x})["y"]
    changed = np.zeros(IMAGE, bool)
    changed[0, 2, 5:8, 4:7] = True
    assert np.isinf(found[changed]).all()
    np.testing.assert_allclose(found[~changed], finite[~changed], rtol=1e-12, atol=1e-12)


def test_the_error_function_is_that_of_math_and_of_torch():
    grid = np.arange(ERF_END * ERF_GRID + 3) / ERF_GRID  # where values are kept, next to it, and half-way between
    places = [grid, np.nextafter(grid, -1), np.nextafter(grid, 9), grid + 0.5 / ERF_GRID]
    places += [np.geomspace(1e-300, 30, 5000), *(RANDOM.standard_normal(20_000) * width for width in (0.01, 0.5, 3))]
    x = np.concatenate([sign * each for each in places for sign in (1, -1)])
    found = error_function(x.reshape(2, -1)).reshape(-1)
    for right in (np.array([math.erf(one) for one in x]), torch.erf(torch.from_numpy(x)).numpy()):
        assert (np.abs(found - right) <= 2 * np.spacing(np.abs(right))).all()


def test_the_error_function_of_what_is_no_finite_number():
    given = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 5e-324], np.float64)
    found = error_function(given)
    np.testing.assert_array_equal(found, [1, -1, np.nan, 0, 0, 5e-324])
    assert np.signbit(found[4])
    assert error_function(np.zeros((0, 3))).shape == (0, 3)
    assert error_function(np.float64(1.0)).shape == ()
