"""Folding never makes elementwise operators compute more numbers than before."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx
import pytest
from test_graph_corner_cases import model_of, normal, operators

from repaconv.graph.element_type_conversion import to_float64
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.verification.float64_graphs import Float64

CLASSES, ANCHORS = 4, 3
WIDTH = CLASSES + 5


def level(name: str, size: int) -> tuple[str, dict[str, np.ndarray]]:
    """One level of YOLOv7's head: a convolution of the image ``name``, and its boxes decoded, as torch exports it."""
    text = f"""
        {name}c = Conv({name}, {name}w, {name}b)
        {name}r = Reshape({name}c, {name}apart)
        {name}t = Transpose <perm = [0, 1, 3, 4, 2]> ({name}r)
        {name}s = Sigmoid({name}t)
        {name}p, {name}q, {name}k = Split <axis = 4> ({name}s, parts)
        {name}p2 = Mul({name}p, two)
        {name}p3 = Sub({name}p2, half)
        {name}p4 = Add({name}p3, {name}grid)
        {name}xy = Mul({name}p4, {name}stride)
        {name}q2 = Mul({name}q, two)
        {name}q3 = Pow({name}q2, two)
        {name}wh = Mul({name}q3, {name}anchors)
        {name}d = Concat <axis = 4> ({name}xy, {name}wh, {name}k)
        {name}y = Reshape({name}d, flat)
    """
    places = np.arange(size, dtype=np.float32)
    weights = {
        "w": normal(ANCHORS * WIDTH, 6, 1, 1),
        "b": normal(ANCHORS * WIDTH),
        "apart": np.int64([1, ANCHORS, WIDTH, size, size]),
        "grid": np.stack(np.meshgrid(places, places), -1)[None, None],
        "stride": np.float32(64 / size),
        "anchors": np.abs(normal(1, ANCHORS, 1, 1, 2)) + 10,
    }
    return text, {f"{name}{key}": numbers for key, numbers in weights.items()}


def elementwise_numbers(model: onnx.ModelProto) -> int:
    """How many numbers all elementwise operators with two inputs compute."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*inferred.value_info, *inferred.output)}
    added = [node.output[0] for node in inferred.node if node.op_type in ("Add", "Sub", "Mul", "Div", "Pow")]
    return sum(prod(dim.dim_value for dim in shapes[name]) for name in added)


def folded(model: onnx.ModelProto, **dynamic: int) -> onnx.ModelProto:
    """The graph in float64 after all folds, which computes what it did; dynamic sizes are these."""
    model = to_float64(model)
    after, _ = rewritten(model, FOLDS)
    onnx.checker.check_model(after, full_check=True)
    shapes = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    feeds = {
        name: normal(*(dynamic.get(dim.dim_param, dim.dim_value) for dim in shape)) for name, shape in shapes.items()
    }
    before, behind = (Float64(each).run(feeds) for each in (model, after))
    for name, right in before.items():
        np.testing.assert_allclose(behind[name], right, rtol=0, atol=1e-12 * np.abs(right).max())
    return after


def test_the_stride_of_decoded_boxes_multiplies_no_more_than_the_places():
    levels = [level(name, size) for name, size in (("p", 8), ("q", 4), ("r", 2))]
    text = "(float[1, 6, 8, 8] p, float[1, 6, 4, 4] q, float[1, 6, 2, 2] r) => (float[1, N, M] y) {"
    text += "".join(rows for rows, _ in levels) + "y = Concat <axis = 1> (py, qy, ry) }"
    shared = {"parts": np.int64([2, 2, CLASSES + 1]), "flat": np.int64([1, -1, WIDTH])}
    constants = {**shared, "two": np.float32(2), "half": np.float32(0.5)}
    model = model_of(text, **constants, **{name: numbers for _, own in levels for name, numbers in own.items()})
    assert elementwise_numbers(folded(model)) <= elementwise_numbers(model)


@pytest.mark.parametrize(("factors", "products"), [((3, 1), [4]), ((1, 3), [6]), ((2, 3), [10])])
def test_factors_of_parts_of_a_concat(factors, products):
    rows = """
        sa = Sin(a) sb = Cos(b)
        ma = Mul(sa, fa) mb = Mul(sb, fb)
        c = Concat <axis = 2> (ma, mb)
        y = Sigmoid(c)
    """
    text = f"(float[1, 5, 4] a, float[1, 5, 6] b) => (float[1, 5, 10] y) {{ {rows} }}"
    model = model_of(text, fa=np.float32(factors[0]), fb=np.float32(factors[1]))
    after = onnx.shape_inference.infer_shapes(folded(model)).graph
    shapes = {value.name: value.type.tensor_type.shape.dim for value in after.value_info}
    assert [shapes[node.output[0]][2].dim_value for node in after.node if node.op_type == "Mul"] == products


def test_what_is_added_to_all_channels_is_one_number():
    rows = "s = Sigmoid(x) a, b = Split <axis = 1> (s, two) m = Mul(a, f) t = Sub(m, g) y = Mul(t, b)"
    constants = {"two": np.int64([2, 2]), "f": np.float32(2), "g": np.float32(0.5)}
    after = folded(model_of(f"(float[3, 4] x) => (float[3, 2] y) {{ {rows} }}", **constants))
    stored = {one.name: list(one.dims) for one in after.graph.initializer}
    shifts = [stored.get(name) for node in after.graph.node if node.op_type in ("Add", "Sub") for name in node.input]
    assert [prod(shape) for shape in shifts if shape is not None] == [1]


@pytest.mark.parametrize("shift", [np.full(4, 0.25, np.float32), np.float32(0.25)])
def test_a_number_after_a_norm_goes_into_the_norm(shift):
    rows = "n = LayerNormalization(x, one) m = Mul(n, f) a = Add(m, t) y = Sin(a) p = MatMul(x, w) z = Mul(p, f)"
    constants = {"one": np.ones(4, np.float32), "f": np.float32(2), "t": shift, "w": normal(4, 4)}
    model = model_of(f"(float[3, 5, 4] x) => (float[3, 5, 4] y, float[3, 5, 4] z) {{ {rows} }}", **constants)
    assert sorted(operators(folded(model))) == ["LayerNormalization", "MatMul", "Sin"]


# --- sums with zeros, and guards against NaN


ATTENTION = """
    q = MatMul(x, wq) k = MatMul(x, wk) t = Transpose <perm = [0, 2, 1]> (k) raw = MatMul(q, t)
    {}
    s = Softmax(m) n = IsNaN(s) p = Where(n, zero, s) y = MatMul(p, x)
"""


def attention(mask: str, inputs: str = "", **constants: np.ndarray) -> list[str]:
    """The operators after folding; the mask computes ``m`` from the scores ``raw``, or from something else."""
    text = f"(float[2, 5, 4] x{inputs}) => (float[2, 5, 4] y) {{ {ATTENTION.format(mask)} }}"
    given = {"wq": normal(4, 4), "wk": normal(4, 4), "zero": np.float32(0), **constants}
    return operators(folded(model_of(text, **given)))


@pytest.mark.parametrize(
    ("mask", "constants"),
    [
        ("m = Add(raw, c)", {"c": np.zeros((1, 5, 5), np.float32)}),
        ("m = Add(c, raw)", {"c": np.zeros(5, np.float32)}),
        ("m = Sub(raw, c)", {"c": np.zeros((2, 5, 5), np.float32)}),
        ("f = Mul(raw, c) m = Reshape(f, own)", {"c": np.float32(1), "own": np.int64([2, 5, 5])}),
    ],
)
def test_a_mask_of_zeros_and_the_guard_of_its_softmax_are_left_out(mask, constants):
    found = attention(mask, **constants)
    assert not {"Add", "Sub", "IsNaN", "Where"} & set(found)


def test_a_bias_of_finite_numbers_needs_no_guard():
    assert "IsNaN" not in attention("m = Add(raw, c)", c=normal(1, 5, 5))


@pytest.mark.parametrize(("mask", "stays"), [("", False), ("s = Add(raw, h)", True)])
def test_scores_that_onnx_runtime_has_multiplied_and_scaled_at_once_need_no_guard(mask, stays):
    rows = f"raw = MatMul(x, w) {mask or 's = Identity(raw)'} p = Softmax(s) n = IsNaN(p) y = Where(n, zero, p)"
    text = f"(float[2, 5, 4] x, float[5] h) => (float[2, 5, 5] y) {{ {rows} }}"
    model = model_of(text, w=normal(4, 5), zero=np.float32(0))
    fused = next(node for node in model.graph.node if node.op_type == "MatMul")
    fused.op_type, fused.domain = "FusedMatMul", "com.microsoft"
    fused.attribute.append(onnx.helper.make_attribute("alpha", 0.5))
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    after, _ = rewritten(model, FOLDS)
    assert ("IsNaN" in operators(after)) == stays


@pytest.mark.parametrize(
    ("mask", "inputs", "constants"),
    [
        ("m = Add(raw, c)", "", {"c": np.where(np.eye(5) > 0, -np.inf, 0).astype(np.float32)}),
        ("m = Add(raw, c)", "", {"c": np.float32([[0], [-3e38], [0], [0], [0]])}),
        ("m = Add(raw, h)", ", float[5] h", {}),
        ("b = Cast <to = 9> (h) m = Where(b, raw, c)", ", float[5] h", {"c": np.float32(-np.inf)}),
    ],
    ids=["infinity", "about the lowest number", "an input", "a mask of truth values"],
)
def test_the_guard_of_a_softmax_stays_where_a_mask_may_hide_all_keys(mask, inputs, constants):
    assert "IsNaN" in attention(mask, inputs, **constants)


@pytest.mark.parametrize(
    ("mask", "inputs", "constants"),
    [
        ("m = Gemm(x, w, h)", ", float[5] h", {}),
        ("m = Gemm(x, w, c)", "", {"c": np.float32([0, 0, -np.inf, 0, 0])}),
        ("m = MatMul(x, c)", "", {"c": np.where(np.arange(20).reshape(4, 5) == 7, -np.inf, 0).astype(np.float32)}),
    ],
    ids=["added by the product", "infinity added by the product", "an infinite factor"],
)
def test_the_guard_of_a_softmax_stays_where_the_product_itself_hides_keys(mask, inputs, constants):
    text = f"(float[3, 4] x{inputs}) => (float[3, 5] y) {{ {mask} s = Softmax(m) n = IsNaN(s) y = Where(n, zero, s) }}"
    model = model_of(text, w=normal(4, 5), zero=np.float32(0), **constants)
    after, _ = rewritten(model, FOLDS)
    assert "IsNaN" in operators(after)


@pytest.mark.parametrize(
    ("row", "shape", "constants"),
    [
        ("y = Add(x, c)", "[2, 3]", {"c": np.float32([0, 0, 1])}),
        ("y = Add(x, c)", "[4, 2, 3]", {"c": np.zeros((4, 2, 3), np.float32)}),
        ("y = Sub(c, x)", "[2, 3]", {"c": np.zeros(3, np.float32)}),
    ],
    ids=["not all zeros", "a larger sum", "a negation"],
)
def test_sums_that_are_not_their_input_stay(row, shape, constants):
    model = model_of(f"(float[2, 3] z) => (float{shape} y) {{ x = Sigmoid(z) {row} }}", **constants)
    assert len(operators(folded(model))) == 2


# --- operators before an Expand


READOUT = """
    c = Gather <axis = 1> (x, zero) t = Slice(x, one, end, one) u = Unsqueeze(c, one)
    {}
    k = Concat <axis = 2> (t, e) m = MatMul(k, w) a = Add(m, b) y = Relu(a)
"""
TOKENS = {"zero": np.int64(0), "one": np.int64([1]), "end": np.int64([2**62]), "w": normal(8, 6), "b": normal(6)}


@pytest.mark.parametrize(
    ("tokens", "expand", "constants"),
    [
        ("float[1, 9, 4]", "e = Expand(u, to)", {"to": np.int64([1, 8, 4])}),
        ("float[B, 9, 4]", "e = Expand(u, to)", {"to": np.int64([8, 1])}),
        ("float[B, N, 4]", "s = Shape(t) e = Expand(u, s)", {}),
    ],
)
def test_a_token_that_all_others_are_concatenated_with_is_multiplied_once(tokens, expand, constants):
    model = model_of(f"({tokens} x) => (float[B, N, 6] y) {{ {READOUT.format(expand)} }}", **TOKENS, **constants)
    after = folded(model, B=2, N=9)
    assert "Expand" not in operators(after)
    shapes = {value.name: value.type.tensor_type.shape.dim for value in after.graph.value_info}
    assert any([dim.dim_value for dim in shapes[node.output[0]]][1:] == [1, 6] for node in after.graph.node)


@pytest.mark.parametrize(
    ("ends", "rows", "found", "constants"),
    [
        (
            "float[1, 1, 4] x) => (float[1, 5, 6] y",
            "e = Expand(x, to) y = MatMul(e, w)",
            ["MatMul", "Expand"],
            {"to": np.int64([1, 5, 4]), "w": normal(4, 6)},
        ),
        (
            "float[3, 4] x) => (float[2, 3, 4] y",
            "e = Expand(x, to) y = MatMul(e, w)",
            ["MatMul", "Expand"],
            {"to": np.int64([2, 3, 4]), "w": normal(4, 4)},
        ),
        (
            "float[N, 1, 4] x, float[N, 5, 4] z) => (float[N, 5, 6] y",
            "s = Shape(z) e = Expand(x, s) m = MatMul(e, w) n = Mul(m, two) y = Sin(n)",
            ["MatMul", "Sin", "Shape", "Slice", "Concat", "Expand"],
            {"w": normal(4, 6), "two": np.float32(2)},
        ),
        (
            "float[1, 4, 1, 1] x) => (float[1, 6, 3, 3] y",
            "e = Expand(x, to) c = Conv(e, k, b) y = Sigmoid(c)",
            ["Conv", "Sigmoid", "Expand"],
            {"to": np.int64([1, 4, 3, 3]), "k": normal(6, 4, 1, 1), "b": normal(6)},
        ),
        (
            "float[2, 4, 1, 1] x, float[2, 3, H, W] z) => (float[2, 5, H, W] y",
            "s = Shape <start = 2> (z) e = Expand(x, s) c = Conv(e, k) r = Sin(c) y = Conv(r, l)",
            ["Conv", "Sin", "Conv", "Shape", "Expand"],
            {"k": normal(6, 4, 1, 1), "l": normal(5, 6, 1, 1)},
        ),
    ],
    ids=["tokens", "a new axis", "dynamic", "pixels", "a size of fewer axes"],
)
def test_operators_act_on_numbers_before_they_are_repeated(ends, rows, found, constants):
    assert sorted(operators(folded(model_of(f"({ends}) {{ {rows} }}", **constants), N=2, H=3, W=5))) == sorted(found)


def test_parallel_layers_are_merged_before_what_they_read_is_repeated():
    rows = "e = Expand(x, to) a = MatMul(e, v) b = MatMul(e, w) y = Concat <axis = 2> (a, b)"
    constants = {"to": np.int64([1, 5, 4]), "v": normal(4, 6), "w": normal(4, 6)}
    model = model_of(f"(float[1, 1, 4] x) => (float[1, 5, 12] y) {{ {rows} }}", **constants)
    assert operators(folded(model)) == ["MatMul", "Expand"]


@pytest.mark.parametrize(
    ("ends", "rows", "found", "constants"),
    [
        (
            "float[1, 5, 1] x) => (float[1, 5, 6] y",
            "e = Expand(x, to) y = MatMul(e, w)",
            ["Expand", "MatMul"],
            {"to": np.int64([1, 5, 4]), "w": normal(4, 6)},
        ),
        (
            "float[1, 1, 4] x) => (float[1, 5, 4] y",
            "e = Expand(x, to) m = Mul(e, w) y = Sin(m)",
            ["Mul", "Sin"],  # which broadcasts anyway
            {"to": np.int64([1, 5, 4]), "w": normal(5, 4)},
        ),
        (
            "float[1, 4, 1, 1] x) => (float[1, 6, 3, 3] y",
            "e = Expand(x, to) y = Conv <pads = [1, 1, 1, 1]> (e, k)",
            ["Expand", "Conv"],
            {"to": np.int64([1, 4, 3, 3]), "k": normal(6, 4, 3, 3)},
        ),
        (
            "float[1, 1, 4] x, float[5, 4] w) => (float[1, 5, 5] y",
            "e = Expand(x, to) t = Transpose(w) y = MatMul(e, t)",
            ["Expand", "Transpose", "MatMul"],
            {"to": np.int64([1, 5, 4])},
        ),
    ],
    ids=["channels are repeated", "numbers differ by position", "a border", "no constant"],
)
def test_operators_that_do_not_act_alike_stay_after_an_expand(ends, rows, found, constants):
    assert operators(folded(model_of(f"({ends}) {{ {rows} }}", **constants))) == found


# --- Gathers


@pytest.mark.parametrize(
    ("gathers", "shape", "found"),
    [
        ([(1, [0, 1, 2, 3])], "[2, 4, 5]", 0),
        ([(-2, [0, 1, 2])], "[2, 3, 5]", 1),
        ([(1, [3, 2, 1, 0]), (1, [-1, 2, 1, 0])], "[2, 4, 5]", 0),
        ([(1, [3, 1]), (-2, [1, -2, 1])], "[2, 3, 5]", 1),
        ([(1, [3, 1]), (1, 1)], "[2, 5]", 1),
        ([(1, [3, 1]), (1, [[0, 1], [1, 1]])], "[2, 2, 2, 5]", 1),
        ([(1, [3, 1]), (2, [4, 2])], "[2, 2, 2]", 2),
        ([(1, 3), (1, [4, 2])], "[2, 2]", 2),
    ],
)
def test_gathers_are_one_or_none(gathers, shape, found):
    rows, name = "", "x"
    for place, (axis, _) in enumerate(gathers):
        rows += f"g{place} = Gather <axis = {axis}> ({name}, i{place}) "
        name = f"g{place}"
    indices = {f"i{place}": np.int64(numbers) for place, (_, numbers) in enumerate(gathers)}
    model = model_of(f"(float[2, 4, 5] z) => (float{shape} y) {{ x = Sin(z) {rows} y = Cos({name}) }}", **indices)
    assert operators(folded(model)) == ["Sin", *["Gather"] * found, "Cos"]


def test_a_gather_that_something_else_reads_stays():
    rows = "x = Sin(z) f = Gather <axis = 1> (x, i) g = Gather <axis = 1> (f, i) y = Cos(g)"
    model = model_of(f"(float[2, 4, 5] z) => (float[2, 2, 5] y, float[2, 2, 5] f) {{ {rows} }}", i=np.int64([1, 0]))
    assert operators(folded(model)) == ["Sin", "Gather", "Gather", "Cos"]
