"""A permutation, scale or shift of channels becomes part of the convolution that reads them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper
from test_elementwise_operator_cost import folded
from test_graph_corner_cases import model_of, normal, operators

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS

RGB = "float[1, 3, 6, 6] x"
PADDED, UNPADDED = "y = Conv <pads = [1, 1, 1, 1]> (z, w, b)", "y = Conv(z, w, b)"
NORM = "d = Div(f, full) s = Sub(d, mean) z = Div(s, std)"
CONSTANTS = {
    "order": np.int64([2, 0, 1]),
    "lists": np.int64([[2], [-3], [1]]),
    "twice": np.int64([0, 0, 1]),
    **{name: np.int64([number]) for name, number in (("last", -1), ("end", -99), ("one", 1))},
    **{name: np.int64(number) for name, number in (("i0", 0), ("i1", -2), ("i2", 2))},
    "colors": np.int64([1, 3, 1, 1]),
    "larger": np.int64([1, 2, 2, 1]),
    "full": np.float32(255),
    "mean": np.float32([0.485, 0.456, 0.406]).reshape(1, 3, 1, 1),
    "std": np.float32([0.229, 0.224, 0.225]).reshape(3, 1, 1),
    "lines": np.float32([0, 1, 2, 3, 4, 5]),
    "some": np.float32([0.5, 0, 2]).reshape(3, 1, 1),
    "lastmean": np.float32([0.485, 0.456, 0.406]),
    "laststd": np.float32([4.4, 4.5, 4.4]),
    "m8": np.linspace(0.5, 2, 8, dtype=np.float32).reshape(8, 1, 1),
    "t8": np.linspace(-1, 2, 8, dtype=np.float32).reshape(8, 1, 1),
    **{name: np.float32([0.5, 0.7, 1.5]) for name in ("g3", "b3", "m3", "v3")},
    "f0": np.float32(0.458),
    "f1": np.float32(-0.448),
    "f2": np.float32(0.45),
    "t0": np.float32(-0.03),
    "t1": np.float32(-0.088),
    "t2": np.float32(-0.188),
}
EACH = "".join(
    f"g{i} = Gather <axis = 1> (x, i{i}) u{i} = Unsqueeze(g{i}, one) m{i} = Mul(u{i}, f{i}) a{i} = Add(m{i}, t{i}) "
    for i in range(3)
)
TRANSFORM = f"{EACH} z = Concat <axis = 1> (a0, a1, a2)"
ORDERS = {
    "Gather": "{} = Gather <axis = -3> (x, order)",
    "Slice": "{} = Slice(x, last, end, one, last)",
    "GatherND": """
        t = Transpose <perm = [1, 0, 2, 3]> (x) q = GatherND(t, lists) {} = Transpose <perm = [1, 0, 2, 3]> (q)
    """,
    "Split": "c0, c1, c2 = Split <axis = 1, num_outputs = 3> (x) {} = Concat <axis = 1> (c2, c0, c1)",
    "twice": "{} = Gather <axis = 1> (x, twice)",
    "two orders": "p = Gather <axis = 1> (x, order) {} = Slice(p, last, end, one, last)",
}


def after(rows: str, given: str = RGB, width: int = 3, outputs: str = "float[1, 4, h, v] y") -> list[str]:
    """The operators after folding; in float64 they compute what those before do."""
    known = CONSTANTS | {"w": normal(4, width, 3, 3), "b": normal(4)}
    used = {name: numbers for name, numbers in known.items() if f"{name})" in rows or f"{name}," in rows}
    return operators(folded(model_of(f"({given}) => ({outputs}) {{ {rows} }}", **used)))


@pytest.mark.parametrize("conv", [PADDED, UNPADDED], ids=["padded", "unpadded"])
@pytest.mark.parametrize("order", ORDERS)
def test_an_order_goes_into_the_convolution(order, conv):
    assert after(f"{ORDERS[order].format('z')} {conv}") == ["Conv"]


@pytest.mark.parametrize("order", [name for name in ORDERS if name != "twice"])
def test_a_normalization_after_an_order_leaves_its_shift_before_a_border(order):
    assert after(f"{ORDERS[order].format('f')} {NORM} {UNPADDED}") == ["Conv"]
    assert after(f"{ORDERS[order].format('f')} {NORM} {PADDED}") == ["Add", "Conv"]


@pytest.mark.parametrize(
    "rows",
    [
        NORM.replace("f,", "x,"),
        "d = Mul(x, f0) z = Add(d, f1)",
        "z = BatchNormalization (x, g3, b3, m3, v3)",
        "d = BatchNormalization (x, g3, b3, m3, v3) z = Div(d, std)",
    ],
    ids=["each channel", "all channels", "BatchNorm", "BatchNorm and a scale"],
)
def test_a_normalization_of_pixels_is_one_add_before_a_border(rows):
    assert after(f"{rows} {PADDED}") == ["Add", "Conv"]
    assert after(f"{rows} {UNPADDED}") == ["Conv"]


def test_a_normalization_with_channels_last_is_one_add_with_channels_second():
    """ONNX Runtime repeats rows of three numbers slowly."""
    rows = "d = Div(x, full) s = Sub(d, lastmean) f = Mul(s, laststd) z = Transpose <perm = [0, 3, 1, 2]> (f)"
    assert after(f"{rows} {PADDED}", "float[1, 6, 6, 3] x") == ["Transpose", "Add", "Conv"]
    assert after(f"{rows} {UNPADDED}", "float[1, 6, 6, 3] x") == ["Transpose", "Conv"]
    rows = "f = Mul(x, laststd) z = Transpose <perm = [0, 3, 1, 2]> (f)"
    assert after(f"{rows} {PADDED}", "float[1, 6, 6, 3] x") == ["Transpose", "Conv"]


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ("z = Add(x, mean)", ["Add", "Conv"]),
        ("d = Mul(x, some) z = Add(d, mean)", ["BatchNormalization", "Conv"]),
        ("d = Mul(x, std) q = Sin(d) z = Add(d, mean)", ["Mul", "Sin", "Add", "Conv"]),
    ],
    ids=["one Add", "a factor of 0", "another reader"],
)
def test_a_normalization_that_an_add_would_not_shorten_stays(rows, kept):
    outputs = "float[1, 4, h, v] y, float[1, 3, 6, 6] q" if "q =" in rows else "float[1, 4, h, v] y"
    assert sorted(after(f"{rows} {PADDED}", outputs=outputs)) == sorted(kept)


def test_a_norm_of_many_channels_stays_a_norm():
    """Between convolutions in blocks of channels, ONNX Runtime would convert the image around an Add."""
    rows = f"d = Mul(x, m8) z = Add(d, t8) {PADDED}"
    assert after(rows, "float[1, 8, 6, 6] x", width=8) == ["BatchNormalization", "Conv"]


def test_channels_that_are_scaled_and_shifted_each_on_its_own():
    assert after(f"{TRANSFORM} {UNPADDED}") == ["Conv"]
    assert after(f"{TRANSFORM} {PADDED}") == ["Add", "Conv"]


def test_an_order_of_the_last_axis():
    rows = f"p = Gather <axis = 3> (x, order) d = Mul(p, full) z = Transpose <perm = [0, 3, 1, 2]> (d) {PADDED}"
    assert after(rows, "float[1, 6, 5, 3] x") == ["Transpose", "Conv"]


@pytest.mark.parametrize("rows", ["z = Concat <axis = 1> (x, x, x)", "z = Expand(x, colors)", "z = Tile(x, colors)"])
def test_a_gray_image_in_place_of_three_colors(rows):
    assert after(f"{rows} {PADDED}", "float[1, 1, 6, 6] x") == ["Conv"]


def test_a_gray_image_is_normalized_in_the_convolution():
    assert after(f"f = Tile(x, colors) {NORM} {UNPADDED}", "float[1, 1, 6, 6] x") == ["Conv"]
    assert "Tile" in after(f"f = Tile(x, colors) {NORM} {PADDED}", "float[1, 1, 6, 6] x")


def test_an_image_whose_rows_are_repeated_as_well_stays():
    rows = f"z = Tile(x, larger) {PADDED}"
    assert after(rows, "float[1, 2, 6, 6] x", width=4) == ["Tile", "Conv"]


TWO_VALUES = "s = Sin(x) p = Gather <axis = 1> (x, i0) u = Unsqueeze(p, one) z = Concat <axis = 1> (u, s)"


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        (f"f = Gather <axis = 1> (x, twice) {NORM} {PADDED}", "Gather"),  # the border of one channel would be two
        (f"f = Gather <axis = 1> (x, order) m = Mul(f, some) z = Add(m, mean) {PADDED}", "Gather"),
        (f"f = Gather <axis = 1> (x, order) z = Add(f, lines) {UNPADDED}", "Gather"),
        (f"{TWO_VALUES} {PADDED}", "Concat"),
        (f"f = Gather <axis = 2> (x, order) z = Mul(f, std) {PADDED}", "Gather"),
        (f"e = Cos(x) l = Concat <axis = 1> (x, e) s = Softmax(l) z = Gather <axis = 1> (s, order) {PADDED}", "Gather"),
    ],
    ids=["repeated", "a factor of 0", "a row each", "two values", "another axis", "few channels of many"],
)
def test_what_is_no_order_of_channels_stays(rows, kept):
    assert kept in after(rows, width=4 if TWO_VALUES in rows else 3)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (f"s = Slice(x, zero, three, one) {ORDERS['Gather'].format('z').replace('(x, ', '(s, ')}", ["Slice", "Conv"]),
        (f"s = Slice(x, zero, three, one) {TRANSFORM.replace('(x, ', '(s, ')}", ["Slice", "Conv"]),
    ],
    ids=["an order", "each channel"],
)
def test_channels_of_an_image_with_more_are_selected_before_the_convolution(rows, found):
    """RGB of RGBA."""
    constants = {**CONSTANTS, "zero": np.int64([0]), "three": np.int64([3])}
    used = {name: numbers for name, numbers in constants.items() if f"{name})" in rows or f"{name}," in rows}
    weights = {"w": normal(4, 3, 3, 3), "b": normal(4)}
    text = f"(float[1, 4, 6, 6] x) => (float[1, 4, h, v] y) {{ {rows} {UNPADDED} }}"
    assert operators(folded(model_of(text, **used, **weights))) == found


def test_a_shift_that_float16_cannot_hold_stays_after_the_factor():
    rows = f"f = Gather <axis = 1> (x, order) m = Mul(f, small) z = Add(m, large) {PADDED}"
    constants = {"small": np.float16(1e-5), "large": np.float16(1), "w": normal(4, 3, 3, 3), "b": normal(4)}
    constants |= {name: numbers.astype(np.float16) for name, numbers in constants.items()}
    text = f"({RGB}) => (float[1, 4, h, v] y) {{ {rows} }}".replace("float[", "float16[")
    model = model_of(text, order=CONSTANTS["order"], **constants)
    after_all, _ = rewritten(model, FOLDS)
    arrays = [numpy_helper.to_array(weight) for weight in after_all.graph.initializer]
    assert all(np.isfinite(numbers).all() for numbers in arrays)


def test_an_order_that_something_else_reads_or_of_groups_stays():
    order = f"{ORDERS['Gather'].format('z')} {PADDED}"
    assert after(order, outputs="float[1, 4, 6, 6] y, float[1, 3, 6, 6] z") == ["Gather", "Conv"]
    text = "z = Gather <axis = 1> (x, order) y = Conv <pads = [1, 1, 1, 1], group = 3> (z, w)"
    model = model_of(f"({RGB}) => (float[1, 3, 6, 6] y) {{ {text} }}", order=CONSTANTS["order"], w=normal(3, 1, 3, 3))
    assert operators(folded(model)) == ["Gather", "Conv"]
