"""affine: a number that multiplies a product of two values goes into the layer that computes one of them."""

from __future__ import annotations

import numpy as np
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto
from test_fold_onnx import graph

RANDOM = np.random.default_rng(0)
SHAPE = (2, 5, 6)
NUMBERS = {
    **{name: RANDOM.standard_normal((6, 6)) for name in ("wq", "wk", "wv")},
    **{name: RANDOM.standard_normal(6) for name in ("bq", "g", "h")},
    **{"qkv": RANDOM.standard_normal((6, 18)), "parts": np.array([6, 6, 6]), "heads": np.array([0, 0, 2, 3])},
    **{**{str(at): np.array([at]) for at in (0, 6, 12, 18)}, "last": np.array([2])},
    **{"s": np.array(0.3), "s3": np.array([[[0.3]]]), "two": np.array([2.0, 3.0]).reshape(2, 1, 1)},
}
START = ("Tanh", "x", "z")
LAYERS = [("MatMul", "z wq", "q0"), ("Add", "q0 bq", "q1"), ("MatMul", "z wk", "k1"), ("MatMul", "z wv", "v1")]
FUSED = [("MatMul", "z qkv", "all"), ("Split", "all parts", "q1 k1 v1", {"axis": 2})]
SLICED = [
    FUSED[0],
    *[("Slice", f"all {at} {at + 6} last", f"{part}1") for part, at in zip("qkv", (0, 6, 12), strict=True)],
]
HEADS = [
    row
    for part, perm in {"q": [0, 2, 1, 3], "k": [0, 2, 3, 1], "v": [0, 2, 1, 3]}.items()
    for row in [("Reshape", f"{part}1 heads", f"{part}2"), ("Transpose", f"{part}2", part, {"perm": perm})]
]
SCORES, END = ("MatMul", "q k", "scores"), [("Softmax", "scaled", "p"), ("MatMul", "p v", "y")]
SCALED = ("Mul", "scores s", "scaled")


def kinds(*rows, outputs=("y",), **more):
    """The operators after folding, which compute the same in float64."""
    return operators_after_folding(graph(rows, NUMBERS | more, {"x": SHAPE}, outputs), RANDOM.standard_normal(SHAPE))


@pytest.mark.parametrize("layers", [LAYERS, FUSED, SLICED], ids=["three layers", "one layer", "one layer, sliced"])
@pytest.mark.parametrize("scaled", [SCALED, ("Mul", "s3 scores", "scaled"), ("Div", "scores s", "scaled")])
def test_scaled_scores_of_attention(layers, scaled):
    found = kinds(START, *layers, *HEADS, SCORES, scaled, *END)
    assert not {"Mul", "Div"} & {*found}
    assert found.count("MatMul") == sum(row[0] == "MatMul" for row in (*layers, SCORES, *END))


def test_a_norm_of_the_queries():
    norm = ("LayerNormalization", "q1 g h", "qn")
    heads = [row if row[1] != "q1 heads" else ("Reshape", "qn heads", "q2") for row in HEADS]
    assert "Mul" not in kinds(START, *LAYERS, norm, *heads, SCORES, SCALED, *END)


LAYERS_BEFORE = {
    "a bias that comes first": [LAYERS[0], ("Add", "bq q0", "q1")],
    "a bias that is subtracted": [LAYERS[0], ("Sub", "q0 bq", "q1")],
    "a scale of channels": [("Mul", "z g", "q1")],
    "a scale of channels that comes first": [("Mul", "g z", "q1")],
    "a convolution": [("Conv", "z kernel", "q1")],
}


@pytest.mark.parametrize("layer", LAYERS_BEFORE)
def test_other_layers_of_the_queries(layer):
    numbers = {"kernel": RANDOM.standard_normal((5, 5, 1))}
    read = " ".join(row[1] for row in LAYERS_BEFORE[layer]).split()
    keys = [LAYERS[2], ("Sin", "k1", "k0"), LAYERS[3]]  # no layer of the keys takes the number
    heads = [row if row[1] != "k1 heads" else ("Reshape", "k0 heads", "k2") for row in HEADS]
    rows = [START, *LAYERS_BEFORE[layer], *keys, *heads, SCORES, SCALED, *END]
    weights = {name: numbers[name] for name in numbers if name in read}
    without = kinds(*rows[: rows.index(SCALED)], ("Softmax", "scores", "p"), END[1], **weights)
    assert sorted(kinds(*rows, **weights)) == sorted("Add" if operator == "Sub" else operator for operator in without)


NORMS = [("InstanceNormalization", "i five own", "n"), ("BatchNormalization", "i five own own squares", "n")]


@pytest.mark.parametrize("norm", NORMS, ids=lambda row: row[0])
def test_a_norm_of_an_image(norm):
    five = RANDOM.standard_normal(5)
    numbers = {"five": five, "own": five + 2, "image": np.array([2, 5, 3, 2])}
    numbers |= {"squares": five**2} if "squares" in norm[1] else {}
    rows = [("Reshape", "x image", "i0"), ("Tanh", "i0", "i"), ("Cos", "i0", "c"), norm, ("Mul", "c n", "r")]
    found = kinds(*rows, ("Mul", "r s", "t"), ("Sin", "t", "y"), **numbers)
    assert found == ["Reshape", "Tanh", "Cos", norm[0], "Mul", "Sin"]


def test_the_layer_of_the_keys_if_that_of_the_queries_does_not():
    other = ("Sin", "q1", "qn")
    heads = [row if row[1] != "q1 heads" else ("Reshape", "qn heads", "q2") for row in HEADS]
    assert "Mul" not in kinds(START, *LAYERS, other, *heads, SCORES, SCALED, *END)


@pytest.mark.parametrize("product", [("Mul", "q1 c", "r"), ("Mul", "c q1", "r"), ("Div", "q1 c", "r")])
def test_a_product_of_numbers_at_the_same_place(product):
    rows = [START, *LAYERS[:2], ("Cos", "x", "c"), product, ("Mul", "r s", "t"), ("Sin", "t", "y")]
    assert kinds(*rows).count("Mul") == (product[0] == "Mul")


@pytest.mark.parametrize("scaled", [("Mul", "q s", "qs"), ("Div", "q s", "qs")])
@pytest.mark.parametrize("layers", [LAYERS, FUSED, SLICED], ids=["three layers", "one layer", "one layer, sliced"])
def test_scaled_queries_that_are_read_without_the_scale(layers, scaled):
    """As in the decomposed relative positions of SAM."""
    rows = [START, *layers, *HEADS, scaled, ("MatMul", "qs k", "scaled"), *END, ("Sin", "q", "y2")]
    assert not {"Mul", "Div"} & {*kinds(*rows, outputs=("y", "y2"))}


@pytest.mark.parametrize("scaled", [("Mul", "t s", "u"), ("Mul", "s t", "u"), ("Div", "t s", "u")])
@pytest.mark.parametrize("added", [("Add", "q2 c", "t"), ("Sub", "c q2", "t"), ("Sub", "q2 c", "t")])
def test_positions_around_which_deformable_attention_samples(added, scaled):
    rows = [START, *LAYERS[:2], ("Reshape", "q1 heads", "q2"), added, scaled, ("Sub", "u one", "r"), ("Sin", "r", "y")]
    found = kinds(*rows, c=RANDOM.standard_normal((5, 1, 3)), one=np.array(1.0))
    assert found[:4] == ["Tanh", "MatMul", "Add", "Reshape"]
    assert found[4:] in (["Add", "Sin"], ["Sub", "Sin"])


def test_positions_that_are_read_elsewhere_stay():
    rows = [START, *LAYERS[:2], ("Reshape", "q1 heads", "q2"), ("Add", "q2 c", "t"), ("Mul", "t s", "u")]
    rows += [("Sin", "u", "y"), ("Reshape", "x heads", "x2"), ("Mul", "x2 c", "y2")]
    assert "Mul" in kinds(*rows, outputs=("y", "y2"), c=RANDOM.standard_normal((5, 1, 3)))[-3:]


SIN3 = [("Sin", "q3", "y2"), ("Sin", "k3", "y3")]
STAYS = {
    "a factor for each head": {"scaled": ("Mul", "scores two", "scaled")},
    "a number divided by scores": {"scaled": ("Div", "s scores", "scaled")},
    "scores that are an output": {"outputs": ("y", "scores")},
    "scores that are read elsewhere": {"more": [("Sin", "scores", "y2")], "outputs": ("y", "y2")},
    "queries and keys that are read elsewhere": {
        "more": [("Sin", "q1", "y2"), ("Sin", "k1", "y3")],
        "outputs": ("y", "y2", "y3"),
    },
    "queries and keys that are viewed twice": {
        "more": [*[("Reshape", f"{part}1 row", f"{part}3") for part in "qk"], *SIN3],
        "outputs": ("y", "y2", "y3"),
        "numbers": {"row": np.array([-1])},
    },
    "queries and keys that are outputs": {"outputs": ("y", "q1", "k1")},
    "inputs": {"layers": [("Identity", "x", "q1"), ("Identity", "x", "k1"), LAYERS[3]]},
    "sums with other values": {
        "layers": [LAYERS[0], ("Add", "q0 x", "q1"), ("MatMul", "z wk", "k0"), ("Add", "k0 x", "k1"), LAYERS[3]]
    },
    "a layer of both that is read as well": {
        "layers": FUSED,
        "more": [("Sin", "all", "y2")],
        "outputs": ("y", "y2"),
    },
    "layers that share a weight": {
        "layers": [("Cos", "x", "u"), ("MatMul", "z wq", "q1"), ("MatMul", "u wq", "k1"), LAYERS[3]]
    },
}


@pytest.mark.parametrize("case", STAYS)
def test_a_number_stays_after_the_product_of(case):
    given = {"scaled": SCALED, "layers": LAYERS, "more": [], "outputs": ("y",), "numbers": {}} | STAYS[case]
    rows = [START, *given["layers"], *HEADS, SCORES, *given["more"], given["scaled"], *END]
    found = kinds(*rows, outputs=given["outputs"], **given["numbers"])
    assert found[found.index("Softmax") - 1] == given["scaled"][0]


UNIT = [
    row
    for part, turned in {"q": [0, 1, 2, 3], "k": [0, 1, 3, 2]}.items()
    for row in [
        ("Reshape", f"{part}1 heads", f"{part}2"),
        ("Transpose", f"{part}2", f"{part}3", {"perm": [0, 2, 1, 3]}),
        ("ReduceL2", f"{part}3 last", f"{part}n", {"keepdims": 1}),
        ("Div", f"{part}3 {part}n", f"{part}4"),
        ("Transpose", f"{part}4", part, {"perm": turned}),
    ]
]
COSINES = [START, *LAYERS, *UNIT, *HEADS[4:], SCORES]
LAST_AXIS = {"last": np.array([-1])}


@pytest.mark.parametrize("scaled", [("Mul", "two scores", "scaled"), ("Div", "scores two", "scaled")])
@pytest.mark.parametrize("read", ["q4", "k4", None])
def test_a_factor_for_each_head_goes_into_the_norms_of_queries_or_keys(scaled, read):
    """As in Swin V2."""
    others, outputs = ([("Sin", read, "y2")], ("y", "y2")) if read else ([], ("y",))
    found = kinds(*COSINES, scaled, *END, *others, outputs=outputs, **LAST_AXIS)
    assert found[found.index("Softmax") - 1] == "MatMul"
    assert found.count("Mul") == 1


@pytest.mark.parametrize(
    ("scaled", "others"),
    [
        (("Mul", "scores two", "scaled"), [("Sin", "q4", "y2"), ("Sin", "k4", "y3")]),
        (("Mul", "scores two", "scaled"), [("Sin", "scores", "y2")]),
        (("Div", "two scores", "scaled"), []),
        (("Mul", "scores s3", "scaled"), []),
        (("Mul", "scores rows", "scaled"), []),
        (("Mul", "scores none", "scaled"), []),
    ],
)
def test_it_stays_after_the_scores(scaled, others):
    """If something else reads what it would go into, or for one number, which a runtime multiplies in the product."""
    outputs = ("y", *(row[2] for row in others))
    more = {"rows": np.arange(1.0, 6).reshape(5, 1), "none": np.array([2.0, 0.0]).reshape(2, 1, 1)}
    found = kinds(*COSINES, *others, scaled, *END, outputs=outputs, **LAST_AXIS, **more)
    assert found[found.index("Softmax") - 1] == scaled[0]


INTEGERS = ("Cast", "x", "whole", {"to": TensorProto.INT64})


@pytest.mark.parametrize(
    "rows",
    [
        [
            ("ReduceMax", "whole last", "most", {"keepdims": 1}),
            ("Div", "whole most", "quotients"),
            ("MatMul", "quotients whole", "scores"),
            ("Mul", "scores threes", "scaled"),
        ],
        [
            ("MatMul", "whole weights", "a"),
            ("MatMul", "whole others", "b"),
            ("MatMul", "a b", "scores"),
            ("Div", "scores three", "scaled"),
        ],
    ],
    ids=["a factor for each head", "one factor"],
)
def test_factors_of_integers_stay(rows):
    """A quotient of integers is rounded."""
    numbers = {"threes": np.array([3, 5]).reshape(2, 1, 1), "three": np.array(3), **LAST_AXIS}
    numbers |= {name: RANDOM.integers(-9, 9, (6, 6)) for name in ("weights", "others")}
    rows = [INTEGERS, *rows, ("Cast", "scaled", "y", {"to": TensorProto.DOUBLE})]
    found = operators_after_folding(
        graph(rows, numbers, {"x": (1, 2, 6, 6)}), RANDOM.integers(1, 9, (1, 2, 6, 6)).astype(float)
    )
    assert found == [operator for operator, *_ in rows]
