"""Graphs that are valid but unusual: readers in branches, integers, states with defaults, sizes of zero, old opsets."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import repaconv as rc
from repaconv.graph.graph_without_weights import check, correct_shapes
from repaconv.graph.models_in_onnx_ir import read, rewritten, write
from repaconv.graph.nodes_and_constants import Writer
from repaconv.graph.opset_upgrade import upgraded
from repaconv.rewrites.fold.attention_head_joining import JOIN
from repaconv.rewrites.fold.fold_pipeline import without
from repaconv.rewrites.fold.unfolded_linear_operators import unfolded_operators
from repaconv.rewrites.presets import chosen

RANDOM = np.random.default_rng(0)


def model_of(text: str, opset: int = 20, ir: int = 10, **weights: np.ndarray) -> onnx.ModelProto:
    """A graph in ONNX's text format, with its weights; shapes are inferred."""
    model = onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(w), name) for name, w in weights.items())
    return onnx.shape_inference.infer_shapes(model)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def numbers(**given: int) -> dict[str, np.ndarray]:
    return {name: np.array(number, np.int64) for name, number in given.items()}


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    found: list[np.ndarray] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    return found


def folded(model: onnx.ModelProto, *calls: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The graph after all folds, which is valid and computes the same on every call."""
    after, _ = rewritten(model, without(()))
    onnx.checker.check_model(after, full_check=True)
    for feeds in calls:
        for now, before in zip(run(after, **feeds), run(model, **feeds), strict=True):
            if before.dtype.kind == "f":
                np.testing.assert_allclose(now, before, rtol=1e-5, atol=1e-5)
            else:
                np.testing.assert_array_equal(now, before)
    return after


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


# --- sizes


BRANCHES = """
    y = If (c) <
        then_branch = a () => (float[n, three, h, w] t) { t = Relu(x) },
        else_branch = b () => (float[n, three, h, w] e) { e = Neg(x) }
    >
"""


@pytest.mark.parametrize(
    "test",
    [
        "l = Gather(s, two) r = Gather(s, three) d = Sub(l, r) c = Equal(d, minus)",
        "l = Gather(s, two) d = Sub(l, five) c = Equal(d, minus)",
    ],
    ids=["two sizes", "a size and a number"],
)
def test_a_difference_of_sizes_may_be_negative(test):
    text = f"(float[1, 3, H, W] x) => (float[n, three, h, w] y) {{ s = Shape(x) {test} {BRANCHES} }}"
    model = model_of(text, **numbers(two=2, three=3, five=5, minus=-1))
    folded(model, *({"x": normal(1, 3, *size)} for size in ((4, 5), (5, 4), (6, 6))))


def test_a_size_itself_is_never_negative():
    test = "l = Gather(s, two) c = Equal(l, minus)"
    text = f"(float[1, 3, H, W] x) => (float[n, three, h, w] y) {{ s = Shape(x) {test} {BRANCHES} }}"
    after = folded(model_of(text, **numbers(two=2, minus=-1)), {"x": normal(1, 3, 4, 5)})
    assert operators(after) == ["Neg"]


ARITHMETIC = {
    "a size times zero": "t = Mul(l, zero) u = Add(t, one) v = Mod(u, one)",
    "beyond int64": "t = Add(most, one) u = Mul(t, zero) v = Add(u, l)",
    "the remainder of C": "t = Mod <fmod = 1> (minus, three) v = Add(t, l)",
    "a quotient beyond 2^53": "t = Div(most, three) v = Add(t, l)",
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_of_sizes_is_that_of_the_runtime(name):
    text = f"(float[1, 3, H, W] x) => (int64 v) {{ s = Shape(x) l = Gather(s, two) {ARITHMETIC[name]} }}"
    model = model_of(text, **numbers(two=2, three=3, zero=0, one=1, minus=-7, most=2**63 - 1))
    folded(model, {"x": normal(1, 3, 4, 5)})


def test_an_empty_list_of_sizes_stays_empty():
    text = "(float[1, 3, H, W] x) => (int64[n] v) { t = Mul(none, one) s = Shape(x) v = Concat <axis = 0> (t, s) }"
    folded(model_of(text, none=np.zeros(0, np.int64), one=np.ones(1, np.int64)), {"x": normal(1, 3, 4, 5)})


# --- types

LAYER = "p = MatMul(f, w) z = Mul(p, g)"
"""A layer with a scale that folds, so that the graph is written anew."""


def test_integers_stay_of_their_type():
    integers = "t = Add(x, one) y = Slice(t, from, to, axis)"
    text = f"(int32[1, 8] x, float[2, 4] f) => (int32[1, 4] y, float[2, 3] z) {{ {integers} {LAYER} }}"
    weights = {"from": np.int64([0]), "to": np.int64([4]), "axis": np.int64([1]), "w": normal(4, 3), "g": normal(3)}
    call = {"x": np.arange(8, dtype=np.int32)[None], "f": normal(2, 4)}
    assert operators(folded(model_of(text, one=np.ones(1, np.int32), **weights), call)).count("Mul") == 0


def test_a_mean_of_integers_rounds_before_a_product():
    integers = "t = Mul(x, three) y = ReduceMean(t, axis)"
    text = f"(int32[1, 8] x, float[2, 4] f) => (int32[1, 1] y, float[2, 3] z) {{ {integers} {LAYER} }}"
    weights = {"axis": np.int64([1]), "w": normal(4, 3), "g": normal(3)}
    call = {"x": np.arange(8, dtype=np.int32)[None] ** 2, "f": normal(2, 4)}
    assert operators(folded(model_of(text, three=np.full(1, 3, np.int32), **weights), call)).count("Mul") == 1


# --- readers in branches


def test_a_bias_that_is_added_in_a_branch_stays_there():
    text = """(float[2, 4] x, float[2, 3] z, bool c) => (float[2, 3] y) {
        p = MatMul(x, w)
        y = If (c) <
            then_branch = a () => (float[2, 3] t) { t = Add(p, b) },
            else_branch = o () => (float[2, 3] e) { e = Identity(z) }
        >
    }"""
    calls = [{"x": normal(2, 4), "z": normal(2, 3), "c": np.array(way)} for way in (True, False)]
    folded(model_of(text, w=normal(4, 3), b=normal(3)), *calls)


def test_the_shift_of_a_norm_that_is_added_in_a_branch_stays_there():
    text = """(float[2, 4] x, bool c) => (float[2, 4] y) {
        p = LayerNormalization(x, w)
        y = If (c) <
            then_branch = a () => (float[2, 4] t) { t = Add(p, b) },
            else_branch = o () => (float[2, 4] e) { e = Neg(x) }
        >
    }"""
    calls = [{"x": normal(2, 4), "c": np.array(way)} for way in (True, False)]
    folded(model_of(text, w=np.ones(4, np.float32), b=normal(4)), *calls)


# --- constants


@pytest.mark.parametrize(
    ("text", "opset"),
    [
        ("LRN <size = 3, alpha = 0.5> (w)", 18),
        ("BatchNormalization (w, m, m, m, v)", 13),
        ("MaxPool <kernel_shape = [3, 3], pads = [2, 0, 2, 1], strides = [3, 2]> (w)", 18),
        ("AveragePool <kernel_shape = [3, 3], pads = [1, 0, 1, 2], ceil_mode = 1, strides = [2, 2]> (w)", 18),
        ('ConvTranspose <group = 2, kernel_shape = [2, 2], auto_pad = "VALID"> (w, k, m)', 18),
    ],
)
def test_what_an_operator_makes_of_a_constant_is_what_the_runtime_makes_of_it(text, opset):
    model = model_of(
        f"(float[1, 4, 1, 1] x) => (float[a, b, c, d] y) {{ t = {text} y = Add(t, x) }}",
        opset,
        w=normal(1, 4, 5, 6),
        k=normal(4, 2, 2, 2),
        m=normal(4),
        v=np.abs(normal(4)) + 1,
    )
    folded(model, {"x": normal(1, 4, 1, 1)})


@pytest.mark.parametrize(
    ("kind", "there", "back", "stays"),
    [
        *[("float16", 1, 10, 0), ("float", 11, 1, 0), ("int32", 7, 6, 0), ("bool", 1, 9, 0)],
        *[("float", 10, 1, 2), ("int32", 1, 6, 2), ("int64", 11, 7, 2), ("float16", 1, 11, 2)],
    ],
)
def test_casts_to_a_type_that_has_all_numbers_and_back(kind, there, back, stays):
    """Converters to FP16 leave such pairs."""
    text = f"({kind}[2, 3] x) => (y) {{ a = Cast <to = {there}> (x) b = Cast <to = {back}> (a) y = Reshape(b, s) }}"
    model = model_of(text, s=np.array([3, 2]))
    model.graph.output[0].type.tensor_type.elem_type = back
    assert operators(folded(model)) == ["Cast"] * stays + ["Reshape"]


# --- inputs and outputs


def test_an_initial_state_with_a_default_stays_an_input():
    text = """(float[5, 2, 3] x, float[1, 2, 4] h, float[1, 2, 4] c) => (float[5, 1, 2, 4] y) {
        y = LSTM <hidden_size = 4> (x, w, r, , , h, c)
    }"""
    states = {name: np.zeros((1, 2, 4), np.float32) for name in "hc"}
    model = model_of(text, ir=8, w=normal(1, 16, 3), r=normal(1, 16, 4), **states)
    assert [value.name for value in upgraded(model).graph.input] == ["x", "h", "c"]


def test_weights_that_are_listed_as_inputs_are_none():
    text = """(float[5, 2, 3] x, float[1, 16, 3] w, float[1, 16, 4] r) => (float[5, 1, 2, 4] y) {
        y = LSTM <hidden_size = 4> (x, w, r)
    }"""
    model = model_of(text, ir=8, w=normal(1, 16, 3), r=normal(1, 16, 4))
    assert [value.name for value in upgraded(model).graph.input] == ["x"]


def test_an_output_that_becomes_an_input_keeps_both_names():
    model = read(model_of("(float[6, 4] x) => (float[6, 4] y) { y = Identity(x) }"))
    (node,) = model.graph
    Writer(model, node).replace(node.outputs[0], model.graph.inputs[0])
    after = write(model)
    onnx.checker.check_model(after, full_check=True)
    assert ([value.name for value in after.graph.input], [value.name for value in after.graph.output]) == (["x"], ["y"])


# --- equal activations


def test_equal_layers_with_activations_in_a_row_become_one():
    text = """(float[1, 4, 8] x) => (float[1, 4, 8] y, float[1, 4, 4] z) {
        a = MatMul(x, w) b = MatMul(x, v) c = Relu(a) d = Relu(b) y = Sigmoid(c) e = Sigmoid(d)
        z = Slice(e, from, to, axis)
    }"""
    w = normal(8, 8)
    places = {"from": np.int64([0]), "to": np.int64([4]), "axis": np.int64([2])}
    after = folded(model_of(text, w=w, v=w, **places), {"x": normal(1, 4, 8)})
    assert operators(after).count("MatMul") == 1


# --- the opset of a graph that a rewrite raises


ATTENTION = """
    q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
    qh = Reshape(q, heads) kh = Reshape(k, heads) vh = Reshape(v, heads)
    qt = Transpose <perm = [0, 2, 1, 3]> (qh)
    kt = Transpose <perm = [0, 2, 3, 1]> (kh)
    vt = Transpose <perm = [0, 2, 1, 3]> (vh)
    qs = Mul(qt, scale) s = MatMul(qs, kt) p = Softmax <axis = -1> (s) m = MatMul(p, vt)
    mt = Transpose <perm = [0, 2, 1, 3]> (m) o = Reshape(mt, tokens)
"""


def attention(after: str, output: str, opset: int) -> onnx.ModelProto:
    weights = {name: normal(32, 32) for name in ("wq", "wk", "wv")}
    text = f"(float[2, 7, 32] x) => ({output} y) {{ {ATTENTION} {after} }}"
    shapes = {"heads": np.int64([2, 7, 4, 8]), "tokens": np.int64([2, 7, 32])}
    return model_of(text, opset, scale=np.float32(8**-0.5), **weights, **shapes)


@pytest.mark.parametrize(
    ("after", "output"),
    [
        ("y = ReduceMean <axes = [1], keepdims = 0> (o)", "float[2, 32]"),
        ("a, b = Split <axis = -1> (o) y = Mul(a, b)", "float[2, 7, 16]"),
    ],
    ids=["ReduceMean", "Split"],
)
def test_other_operators_are_raised_to_the_opset_of_a_rewrite(after, output):
    model = attention(after, output, 17)
    raised, changes = rewritten(model, chosen(("attention-op",), 23).rewrites)
    assert changes
    onnx.checker.check_model(raised, full_check=True)
    x = normal(2, 7, 32)
    np.testing.assert_allclose(run(raised, x=x)[0], run(model, x=x)[0], rtol=1e-4, atol=1e-5)


def test_a_rewrite_that_would_change_the_meaning_of_another_operator_is_left_out():
    after = 'i = Reshape(o, image) y = GridSample <mode = "bilinear"> (i, grid)'
    model = attention(after, "float[2, 7, 3, 3]", 17)
    model.graph.initializer.append(numpy_helper.from_array(np.int64([2, 7, 4, 8]), "image"))
    model.graph.initializer.append(numpy_helper.from_array(normal(2, 3, 3, 2), "grid"))
    same, changes = rewritten(model, chosen(("attention-op",), 23).rewrites)
    assert (same.SerializeToString(), changes) == (model.SerializeToString(), [])


LOWEST = np.finfo(np.float32).min


@pytest.mark.parametrize("is_constant", [True, False], ids=["constant", "computed"])
def test_a_query_without_keys_gets_the_mean_of_the_values(is_constant):
    """ONNX Runtime's Attention outputs 0 for scores that are all the lowest number."""
    masked = ATTENTION.replace("Softmax <axis = -1> (s)", "Softmax <axis = -1> (masked)").replace(
        "p =", "masked = Add(s, mask) p ="
    )
    mask = np.triu(np.full((7, 7), LOWEST), 1)
    mask[2], mask[3], mask[3, 5] = LOWEST, LOWEST, -np.inf
    given = "" if is_constant else ", float[7, 7] mask"
    weights = {name: normal(32, 32) for name in ("wq", "wk", "wv")} | ({"mask": mask} if is_constant else {})
    shapes = {"heads": np.int64([2, 7, 4, 8]), "tokens": np.int64([2, 7, 32])}
    text = f"(float[2, 7, 32] x{given}) => (float[2, 7, 32] o) {{ {masked} }}"
    model = model_of(text, 23, scale=np.float32(8**-0.5), **weights, **shapes)
    after, changes = rewritten(model, chosen(("attention-op",), 23).rewrites)
    assert changes
    onnx.checker.check_model(after, full_check=True)
    feeds = {"x": normal(2, 7, 32)} | ({} if is_constant else {"mask": mask})
    np.testing.assert_allclose(run(after, **feeds)[0], run(model, **feeds)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_attention_with_a_scale_that_is_not_positive(scale):
    model = attention("y = Identity(o)", "float[2, 7, 32]", 23)
    stored = next(weight for weight in model.graph.initializer if weight.name == "scale")
    stored.CopyFrom(numpy_helper.from_array(np.float32(scale), "scale"))
    after, changes = rewritten(model, chosen(("attention-op",), 23).rewrites)
    assert changes
    x = normal(2, 7, 32)
    np.testing.assert_allclose(run(after, x=x)[0], run(model, x=x)[0], rtol=1e-4, atol=1e-4)


# --- speed rewrites of unusual graphs


def branch(shape: str, nodes: str) -> str:
    """A branch that computes t of a value outside, or is z."""
    return f"""y = If (c) <
        then_branch = a () => ({shape} t) {{ {nodes} }}, else_branch = o () => ({shape} e) {{ e = Identity(z) }}
    >"""


FOUR_BY_SIX = {"w": np.ones((4, 6), np.int32)}
CONVOLUTIONS = "i = Conv(x, w) k = Conv(g, v) y = Mul(i, k)"
UNUSUAL = {
    "integers, column": (
        "column-as-sum",
        "(int32[2, 4] x) => (int32[2, 1] y) { y = MatMul(x, w) }",
        {"w": np.ones((4, 1), np.int32)},
    ),
    "integers, parts": (
        "linear-each",
        "(int32[2, 4] x) => (int32[2, 3] a, int32[2, 3] b) { y = MatMul(x, w) a, b = Split <axis = 1> (y) }",
        FOUR_BY_SIX,
    ),
    "integers, tokens": (
        "linear-as-gemm",
        "(int32[2, 3, 4] x) => (int32[2, 3, 6] y) { p = MatMul(x, w) y = Add(p, b) }",
        FOUR_BY_SIX | {"b": np.arange(6, dtype=np.int32)},
    ),
    "integers, mean": (
        "mean-as-pool",
        "(int32[1, 3, 4, 4] x) => (int32[1, 3, 1, 1] y) { y = ReduceMean <axes = [2, 3]> (x) }",
        {},
    ),
    "a bias with more axes": (
        "linear-each",
        "(float[2, 4] x) => (float[1, 2, 3] a, float[1, 2, 3] b) { p = MatMul(x, w) y = Add(p, c) "
        "a, b = Split <axis = 2> (y) }",
        {"w": normal(4, 6), "c": normal(1, 1, 6)},
    ),
    "a bias with more axes, forward": (
        "bias-forward",
        "(float[2, 4] x) => (float[1, 2, 5] y) { p = MatMul(x, w) h = Add(p, b) q = MatMul(h, v) y = Add(q, c) }",
        {"w": normal(4, 6), "b": normal(1, 1, 6), "v": normal(6, 5), "c": normal(5)},
    ),
    "a factor with more axes": (
        "silu-as-quotient",
        "(float[1, 3, 4, 4] x) => (float[1, 1, 3, 4, 4] y) { i = Conv(x, w) s = Mul(i, f) g = Sigmoid(s) "
        "y = Mul(i, g) }",
        {"w": normal(3, 3, 1, 1), "f": np.full((1, 1, 1, 1, 1), 1.7, np.float32)},
    ),
    "layers of one and several columns": (
        "concat-linear",
        "(float[2, 4] x, float[2, 5] z) => (float[2, 6] y) { a = MatMul(x, w) b = MatMul(z, v) y = Add(a, b) }",
        {"w": normal(4, 1), "v": normal(5, 6)},
    ),
    "a bias read in a branch": (
        "bias-forward",
        "(float[2, 4] x, float[2, 6] r, float[2, 5] z, bool c) => (float[2, 5] y) { p = MatMul(x, w) h = Add(p, b) "
        f"s = Add(h, r) {branch('float[2, 5]', 'q = MatMul(s, v) t = Add(q, d)')} }}",
        {"w": normal(4, 6), "b": normal(6), "v": normal(6, 5), "d": normal(5)},
    ),
    "scores read in a branch": (
        "best-down-columns",
        "(float[2, 5, 4] x, float[2, 4, 6] k, int64[2, 5] z, bool c) => (int64[2, 5] y, float[2, 5] b) "
        "{ s = MatMul(x, k) b = ReduceMax <keepdims = 0> (s, n) "
        f"{branch('int64[2, 5]', 't = ArgMax <axis = 2, keepdims = 0> (s)')} }}",
        {"n": np.int64([2])},
    ),
    "a norm in a branch": (
        "rms-norm",
        "(float[2, 4] x, float[2, 6] z, bool c) => (float[2, 6] y, float[2, 6] b) { p = MatMul(x, w) "
        f"b = LayerNormalization(p, g) {branch('float[2, 6]', 't = LayerNormalization(p, g)')} }}",
        {"w": normal(4, 6), "g": np.ones(6, np.float32)},
    ),
    "a gate for several images": (
        "gate-as-image",
        f"(float[2, 8, 4, 4] x, float[1, 8, 1, 1] g) => (float[2, 8, 4, 4] y) {{ {CONVOLUTIONS} }}",
        {"w": normal(8, 8, 1, 1), "v": normal(8, 8, 1, 1)},
    ),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_a_speed_rewrite_leaves_a_graph_that_it_does_not_fit(case):
    name, text, weights = UNUSUAL[case]
    opset = 17 if "axes = [2" in text or "Split" in text else 20
    model = model_of(text, opset, **weights)
    same, changes = rewritten(model, chosen((name,), 23).rewrites)
    assert (operators(same), changes) == (operators(model), [])


def test_rows_picked_by_indices_of_32_bits():
    nodes = "e = Expand(i, s) y = GatherElements <axis = 1> (x, e)"
    text = f"(float[2, 5, 4] x, int32[2, 3, 1] i) => (float[2, 3, 4] y) {{ {nodes} }}"
    model = model_of(text, s=np.int64([2, 3, 4]))
    after, changes = rewritten(model, chosen(("rows-by-gathernd",), 23).rewrites)
    assert changes
    onnx.checker.check_model(after, full_check=True)
    feeds = {"x": normal(2, 5, 4), "i": np.int32([[[0], [1], [2]], [[3], [4], [0]]])}
    np.testing.assert_array_equal(run(after, **feeds)[0], run(model, **feeds)[0])


def test_a_norm_that_is_an_output_is_a_norm_without_a_mean_and_one_of_another_domain_is_none():
    text = "(float[2, 4] x) => (float[2, 6] y) { p = MatMul(x, w) y = LayerNormalization(p, g) }"
    model = model_of(text, w=normal(4, 6), g=normal(6))
    after, changes = rewritten(model, chosen(("rms-norm",), 23).rewrites)
    assert changes
    x = normal(2, 4)
    np.testing.assert_allclose(run(after, x=x)[0], run(model, x=x)[0], rtol=1e-4, atol=1e-5)
    custom = model.graph.node.add()
    custom.CopyFrom(model.graph.node[1])
    custom.domain, custom.output[0] = "custom", "z"
    model.opset_import.append(onnx.helper.make_opsetid("custom", 1))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [2, 6]))
    assert rewritten(model, chosen(("rms-norm",), 23).rewrites)[1] == []


# --- auto_pad, which TensorFlow's converters write


BRANCHES_OF_SAME_SIZE = """{
    a = Conv<auto_pad = "AUTO", strides = [S, S]>(x, k3)
    b = Conv<auto_pad = "AUTO", strides = [S, S]>(x, k1)
    c = Add(a, b)
    y = Mul(c, s)
}"""


@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(("stride", "height", "width"), [(1, "8", "9"), (1, "H", "W"), (2, "8", "9"), (3, "9", "7")])
def test_branches_that_pad_themselves_become_one_convolution(auto, stride, height, width):
    text = BRANCHES_OF_SAME_SIZE.replace("AUTO", auto).replace("S, S", f"{stride}, {stride}")
    weights = {"k3": normal(6, 4, 3, 3), "k1": normal(6, 4, 1, 1), "s": normal(6, 1, 1)}
    model = model_of(f"(float[1, 4, {height}, {width}] x) => (float[1, 6, h, w] y) {text}", **weights)
    size = [int(one) if one.isdigit() else 8 for one in (height, width)]
    assert operators(folded(model, {"x": normal(1, 4, *size)})) == ["Conv"]


@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER"])
def test_padding_that_depends_on_the_image_size_stays(auto):
    text = f"""{{ a = Conv<auto_pad = "{auto}", strides = [2, 2]>(x, k) b = Mul(a, s)
        c = MaxPool<auto_pad = "{auto}", kernel_shape = [3, 3], strides = [2, 2]>(b) d = Relu(c) y = Mul(d, s) }}"""
    weights = {"k": normal(4, 4, 3, 3), "s": normal(4, 1, 1)}
    model = model_of(f"(float[1, 4, H, W] x) => (float[1, 4, h, w] y) {text}", **weights)
    after = folded(model, *({"x": normal(1, 4, *size)} for size in ((8, 8), (7, 9), (10, 5))))
    assert operators(after) == ["Conv", "MaxPool", "Relu", "Mul"]


@pytest.mark.parametrize(
    ("pool", "how"),
    [
        ("MaxPool", "kernel_shape = [3, 3], dilations = [2, 2]"),
        ("AveragePool", "kernel_shape = [2, 1], strides = [3, 4]"),
    ],
)
def test_pools_that_pad_themselves_otherwise_than_specified_stay(pool, how):
    """ONNX Runtime's SAME takes no account of dilations, and crops if the stride is larger than the window."""
    text = f'{{ a = Conv(x, k) b = Conv(a, k) y = {pool}<auto_pad = "SAME_UPPER", {how}>(b) }}'
    model = model_of(f"(float[1, 4, 8, 7] x) => (float[1, 4, h, w] y) {text}", k=normal(4, 4, 1, 1))
    after, changes = rewritten(model, without(()))
    assert changes
    (node,) = (node for node in after.graph.node if node.op_type == pool)
    assert {entry.name for entry in node.attribute} >= {"auto_pad"}


def test_pooling_that_pads_itself_lets_a_scale_pass():
    text = """{ a = Conv<pads = [1, 1, 1, 1]>(x, k)
        b = AveragePool<auto_pad = "SAME_UPPER", kernel_shape = [3, 3], strides = [2, 2]>(a) y = Mul(b, s) }"""
    model = model_of(f"(float[1, 4, 8, 8] x) => (float[1, 4, 4, 4] y) {text}", k=normal(4, 4, 3, 3), s=normal(4, 1, 1))
    assert operators(folded(model, {"x": normal(1, 4, 8, 8)})) == ["Conv", "AveragePool"]


# --- the domain of ONNX's own operators, which may be written out


@pytest.mark.parametrize("named", [False, True], ids=["import", "import and nodes"])
def test_the_domain_of_onnx_may_be_written_out(named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "{ a = Conv(x, k) b = Mul(a, s) r = ReduceMean<axes = [1]>(b) y = Sub(b, r) }"
    model = model_of(
        f"(float[1, 4, 8, 8] x) => (float[1, 4, 6, 6] y) {text}", 17, 8, k=normal(4, 4, 3, 3), s=normal(4, 1, 1)
    )
    for entry in (*model.opset_import, *(model.graph.node if named else ())):
        entry.domain = "ai.onnx"
    onnx.save(model, "given.onnx")
    done = rc.fold("given.onnx")
    assert done.verdict == rc.verify().verdict == "passed"
    assert operators(onnx.load(done.output_files[0])) == ["Conv", "ReduceMean", "Sub"]


# --- linear layers on [B N, C], as onnxslim and ONNX Runtime write them


def test_layers_on_flattened_tokens_of_one_image_fold_as_on_tokens():
    text = """{ n = LayerNormalization(x, g, b) a = Reshape(n, flat4) c = Gemm(a, w, wb) d = Reshape(c, four8)
        e = Relu(d) f = Reshape(e, flat8) h = Gemm(f, v, vb) i = Reshape(h, four4) j = Mul(i, s) y = Add(x, j) }"""
    shapes = {"flat4": (-1, 4), "flat8": (-1, 8), "four8": (1, 5, 6, 8), "four4": (1, 5, 6, 4)}
    weights = {"g": normal(4), "b": normal(4), "w": normal(4, 8), "wb": normal(8), "v": normal(8, 4), "vb": normal(4)}
    model = model_of(
        f"(float[1, 5, 6, 4] x) => (float[1, 5, 6, 4] y) {text}",
        **{name: np.array(shape) for name, shape in shapes.items()},
        **weights,
        s=normal(4),
    )
    after = folded(model, {"x": normal(1, 5, 6, 4)})
    assert operators(after) == ["LayerNormalization", "MatMul", "Add", "Relu", "MatMul", "Add", "Add"]


def test_shapes_of_branches_that_contradict_each_other_are_cleared():
    """As in a table recognizer of PaddlePaddle: a branch declares a number, and returns a row of one."""
    branches = [
        f"{name} = b () => (float r) {{ one = Constant <value = float[1] {{{number}}}> () r = Neg(one) }}"
        for name, number in (("then_branch", 1), ("else_branch", 2))
    ]
    text = f"""<ir_version: 9, opset_import: ["": 17]> g (bool c, float[2,3] x) => (float[2,3] y)
        {{ k = If <{", ".join(branches)}> (c) y = Add(x, k) }}"""
    model = onnx.parser.parse_model(text)
    with pytest.raises(onnx.shape_inference.InferenceError):
        check(model, full=True)
    correct_shapes(model)
    check(model, full=True)


def test_zeros_of_the_type_of_another_value_are_a_bias_of_zeros():
    """As PyTorch's exporter writes convolutions without a bias with ``optimize=False``."""
    text = """{ zero = CastLike(number, x) bias = Expand(zero, six) a = Conv<pads = [1, 1, 1, 1]>(x, k3, bias)
        b = Conv(x, k1, bias) c = Add(a, b) factors = CastLike(wide, c) y = Mul(c, factors) }"""
    weights = {"k3": normal(6, 4, 3, 3), "k1": normal(6, 4, 1, 1), "number": np.array(0, np.float32)}
    weights |= {"six": np.array([6]), "wide": RANDOM.standard_normal((6, 1, 1))}
    model = model_of(f"(float[n, 4, h, w] x) => (float[n, 6, h, w] y) {text}", **weights)
    assert operators(folded(model, {"x": normal(1, 4, 8, 8)})) == ["Conv"]


@pytest.mark.parametrize(("start", "end", "step", "nodes"), [(0, 2**63 - 1, 1, 1), (1, 2**63 - 1, 1, 8), (0, 2, 1, 8)])
def test_what_is_assigned_to_everything_is_the_result(start, end, step, nodes):
    """``y = x.clone(); y[:] = relu(x)`` of a dynamic batch, as PyTorch exports it with ``optimize=False``."""
    text = """{ u = Relu(x) s = Shape<start = 0, end = 1>(x) n = Squeeze(s) count = Range(zero, n, one)
        part = Slice(count, first, last, axis, step) places = Unsqueeze(part, behind)
        some = Slice(u, first, last, axis, step) y = ScatterND(x, places, some) }"""
    lists = {"first": start, "last": end, "axis": 0, "step": step, "behind": -1}
    weights = {name: np.array([number]) for name, number in lists.items()} | numbers(zero=0, one=1)
    model = model_of(f"(float[n, 4] x) => (float[n, 4] y) {text}", **weights)
    assert len(operators(folded(model, {"x": normal(3, 4)}))) == nodes


@pytest.mark.parametrize("steps", [0, 1, 200])
def test_scores_that_are_added_to_themselves_again_and_again_are_joined_once(steps):
    """Each step doubles the number of terms: after 200, one by one, they would never be listed."""
    scores = [
        f"""q{n} = MatMul(x, wq{n})
            hq{n} = Reshape(q{n}, shape)
            tq{n} = Transpose<perm = [0, 2, 1, 3]>(hq{n})
            k{n} = MatMul(x, wk{n})
            hk{n} = Reshape(k{n}, shape)
            tk{n} = Transpose<perm = [0, 2, 3, 1]>(hk{n})
            p{n} = MatMul(tq{n}, tk{n})"""
        for n in "ab"
    ]
    sums = [f"d{n} = Add(s{n}, s{n})\n s{n + 1} = Mul(d{n}, half)" for n in range(steps)]
    nodes = "\n".join([*scores, "s0 = Sub(pa, pb)", *sums, f"y = Softmax<axis = -1>(s{steps})"])
    weights = {f"{name}{n}": normal(8, 8) for name in ("wq", "wk") for n in "ab"}
    model = model_of(
        f"(float[1, 5, 8] x) => (float[1, 2, 5, 5] y) {{ {nodes} }}",
        shape=np.array([0, 0, 2, 4]),
        half=np.array(0.5, np.float32),
        **weights,
    )
    after, _ = rewritten(model, [JOIN])  # alone: other rewrites simplify this sum before
    feeds = {"x": normal(1, 5, 8)}
    np.testing.assert_allclose(run(after, **feeds)[0], run(model, **feeds)[0], atol=1e-6)
    assert operators(after).count("MatMul") == 5  # four layers, and the product of queries and keys


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    ("nodes", "place"),
    [
        ("p = MatMul(x, w)\n y = Mul(p, s)", "s"),
        ("p = MatMul(x, w)\n y = Mul(p, one)", "one"),
        ("p = Mul(x, s)\n y = MatMul(p, w)", "s"),
        ("p = MatMul(x, w)\n y = MatMul(p, v)", "v"),
        ("p = MatMul(x, w)\n y = MatMul(p, v)", "w"),
        ("p = MatMul(x, w)\n q = Add(p, s)\n y = Mul(q, one)", "one"),
        ("p = Mul(x, s)\n q = Mul(p, one)\n y = MatMul(q, w)", "one"),
    ],
)
def test_nothing_is_folded_across_a_product_with_infinity(nodes, place, number):
    """Infinity times the zeros of a weight is NaN; the original multiplies sums that are not zero by it."""
    weights = {"w": np.eye(4, dtype=np.float32) + 1, "v": normal(4, 4), "s": normal(4), "one": normal(1)}
    weights["w"][0, 1:] = 0
    weights[place].reshape(-1)[0] = number
    model = model_of(f"(float[N, 3, 4] x) => (float[N, 3, 4] y) {{ {nodes} }}", **weights)
    folded(model, {"x": normal(2, 3, 4)})


@pytest.mark.parametrize(("place", "number"), [("scale", np.inf), ("variance", -1e-5), ("mean", np.nan)])
def test_a_norm_whose_factor_is_infinite_is_not_folded(place, number):
    """A variance of -epsilon: its root divides by zero."""
    weights = {
        "w": normal(4, 4, 1, 1),
        "scale": normal(4),
        "bias": normal(4),
        "mean": normal(4),
        "variance": normal(4) ** 2,
    }
    weights["w"][0, 1:] = 0
    weights[place][0] = number
    nodes = "p = Conv(x, w)\n y = BatchNormalization(p, scale, bias, mean, variance)"
    model = model_of(f"(float[N, 4, 3, 3] x) => (float[N, 4, 3, 3] y) {{ {nodes} }}", **weights)
    assert operators(rewritten(model, without(()))[0]).count("BatchNormalization") == 1


def test_it_is_said_that_a_constant_is_infinite():
    weights = {"w": normal(4, 4), "s": np.array([np.inf, 1, 1, 1], np.float32)}
    model = model_of("(float[N, 3, 4] x) => (float[N, 3, 4] y) { p = MatMul(x, w)\n y = Mul(p, s) }", **weights)
    (sentence,) = unfolded_operators(read(model))
    assert "since a constant there is infinity or NaN, or divides by zero" in sentence


def test_what_is_divided_by_zero_is_divided_before_its_mean():
    weights = {"w": normal(4, 4), "d": np.array([0, 1, 2, 3], np.float32), "axes": np.array([1])}
    nodes = "p = MatMul(x, w)\n q = Div(p, d)\n y = ReduceMean<keepdims = 1>(q, axes)"
    model = model_of(f"(float[N, 3, 4] x) => (float[N, 1, 4] y) {{ {nodes} }}", **weights)
    folded(model, {"x": normal(2, 3, 4)})
