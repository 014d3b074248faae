"""Layers absorb scales and shifts that are not next to them, and only where that is exact."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from test_fold_onnx import graph

from repaconv.graph.canonical_form import normalize
from repaconv.graph.models_in_onnx_ir import clean, read, rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.rewrites.fold.operators_past_views import move_before_views
from repaconv.verification.float64_graphs import ReferenceEvaluation

RANDOM = np.random.default_rng(0)
WIDTH, SIZE = 6, 8


def normal(*shape):
    return RANDOM.standard_normal(shape)


def norm(width, signs=(1,)):
    """The constants of a BatchNormalization, whose scales have these signs in turn."""
    signed = np.resize(signs, width) * RANDOM.uniform(0.5, 2, width)
    return {"g": signed, "h": normal(width), "m": normal(width), "v": RANDOM.uniform(0.5, 2, width)}


def integers(**named):
    return {name: np.array(numbers, np.int64) for name, numbers in named.items()}


def operators(rows, weights, *, shape=(2, 3, SIZE, SIZE), batch=None):
    """The operators after folding; in float64 they compute what those before compute."""
    wide = {
        **{"k": normal(WIDTH, 3, 3, 3), "k2": normal(WIDTH, 3, 3, 3), "b": normal(WIDTH)},
        **{"kg": normal(WIDTH, 2, 1, 1), "kv": normal(4, WIDTH, 3, 3), "kp": normal(4, WIDTH, 1, 1)},
        **{"kt": normal(3, WIDTH, 3, 3), "w": normal(WIDTH, 4), "w1": normal(WIDTH * SIZE * SIZE // 4, 4)},
    }
    read = " ".join(names for _, names, *_ in rows).split()
    used = {name: numbers for name, numbers in {**wide, **weights}.items() if name in read}
    model = graph(rows, used, {"x": (batch or shape[0], *shape[1:])})
    after, _ = rewritten(model, FOLDS)
    onnx.checker.check_model(after, full_check=True)
    feed = {"x": normal(*shape)}
    before, behind = (ReferenceEvaluation(each).run(feed)["y"] for each in (model, after))
    np.testing.assert_allclose(behind, before, rtol=0, atol=1e-12 * np.abs(before).max())
    return sorted(node.op_type for node in after.graph.node)


SAME = {"pads": [1, 1, 1, 1]}
CONV = ("Conv", "x k b", "c", SAME)
TWO = [CONV, ("Sin", "x", "x2"), ("Conv", "x2 k2", "d", SAME)]
THIRD = [("Cos", "x", "x3"), ("Conv", "x3 k", "e", SAME)]
NORM = ("BatchNormalization", "z g h m v", "n")
END = [NORM, ("Relu", "n", "y")]
POOL = {"kernel_shape": [2, 2], "strides": [2, 2]}
NONE = {"r": np.zeros(0), "s": np.array([1, 1, 2, 2], np.float32)}

BETWEEN = {
    "sum": ([*TWO, ("Add", "c d", "z")], WIDTH, {}),
    "difference": ([*TWO, ("Sub", "d c", "z")], WIDTH, {}),
    "sum of three": ([*TWO, *THIRD, ("Sum", "c d e", "z")], WIDTH, {}),
    "channels side by side": ([*TWO, ("Concat", "c d", "z", {"axis": 1})], 2 * WIDTH, {}),
    "rows side by side": ([*TWO, ("Concat", "c d", "z", {"axis": 2})], WIDTH, {}),
    "maxima": ([CONV, ("MaxPool", "c", "z", {**POOL, "pads": [1, 1, 1, 1]})], WIDTH, {}),
    "means": ([CONV, ("AveragePool", "c", "z", {**POOL, "pads": [1, 1, 1, 1]})], WIDTH, {}),
    "one mean": ([CONV, ("GlobalAveragePool", "c", "z")], WIDTH, {}),
    "one maximum": ([CONV, ("ReduceMax", "c a", "z", {"keepdims": 0})], WIDTH, integers(a=[2, 3])),
    "upsampling": ([CONV, ("Resize", "c r s", "z", {"mode": "linear"})], WIDTH, NONE),
    "crop": (
        [("ConvTranspose", "x kt b", "c", {"strides": [2, 2]}), ("Slice", "c lo hi ax", "z")],
        WIDTH,
        integers(lo=[1, 1], hi=[9, 9], ax=[-1, 2]),
    ),
    "border": ([CONV, ("Pad", "c p", "z", {"mode": "reflect"})], WIDTH, integers(p=[0, 0, 1, 2, 0, 0, 2, 1])),
    "tokens": ([CONV, ("Reshape", "c t", "z")], WIDTH, integers(t=[0, WIDTH, -1])),
    "shuffle": (
        [CONV, ("Reshape", "c t", "u"), ("Transpose", "u", "v1", {"perm": [0, 2, 1, 3, 4]}), ("Reshape", "v1 q", "z")],
        WIDTH,
        integers(t=[2, 2, 3, SIZE, SIZE], q=[2, WIDTH, SIZE, SIZE]),
    ),
    **{
        f"pixels, {mode}": (
            [("Conv", "x ks", "c", SAME), ("DepthToSpace", "c", "z", {"blocksize": 2, "mode": mode})],
            3,
            {"ks": normal(12, 3, 3, 3)},
        )
        for mode in ("DCR", "CRD")
    },
    "sum of crops of sums": (
        [
            *(*TWO, ("Add", "c d", "e"), ("Slice", "e lo hi ax", "f"), ("Cos", "x", "x3"), ("Conv", "x3 k", "o")),
            *[("MaxPool", "o", "o2", {"kernel_shape": [3, 3], "pads": [1] * 4}), ("Add", "f o2", "z")],
        ],
        WIDTH,
        integers(lo=[1, 1], hi=[7, 7], ax=[2, 3]),
    ),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_convolutions_absorb_a_norm_past(case):
    rows, width, weights = BETWEEN[case]
    found = operators([*rows, *END], {**norm(width), **weights})
    assert found == sorted([*(row[0] for row in rows), "Relu"])


def test_dynamic_sizes():
    rows = [*TWO, ("Add", "c d", "e"), ("MaxPool", "e", "z", POOL)]
    assert "BatchNormalization" not in operators([*rows, *END], norm(WIDTH), batch="n")


ADDED = ["Add", "Conv", "Conv", "Sin"]


def test_a_factor_of_any_shape():
    rows = [*TWO, ("Add", "c d", "e"), ("Mul", "f e", "y")]
    assert operators(rows, {"f": np.array(0.5)}) == ADDED
    assert operators(rows, {"f": normal(1, WIDTH, 1, 1)}) == ADDED
    assert operators(rows, {"f": np.broadcast_to(normal(WIDTH, 1, 1), (1, WIDTH, SIZE, SIZE))}) == ADDED
    assert "Mul" in operators(rows, {"f": normal(1, WIDTH, SIZE, SIZE)})


STAYS = {
    "maxima of what falls": ([CONV, ("MaxPool", "c", "z", POOL)], {"signs": (1, -1)}, {}),
    "means that count a border": (
        [CONV, ("AveragePool", "c", "z", {**POOL, "pads": [1, 1, 1, 1], "count_include_pad": 1})],
        {},
        {},
    ),
    "a border of zeros": ([CONV, ("Pad", "c p", "z")], {}, integers(p=[0, 0, 1, 1, 0, 0, 1, 1])),
    "a sum with what is no layer": ([*TWO, ("Sin", "c", "e"), ("Add", "d e", "z")], {}, {}),
    "a sum that is read twice": ([*TWO, ("Add", "c d", "z"), ("Sin", "z", "z2")], {}, {}),
    "a crop that is read elsewhere": (
        [CONV, ("Slice", "c lo hi ax", "z"), ("Sin", "z", "z2")],
        {},
        integers(lo=[1], hi=[7], ax=[2]),
    ),
}


def test_a_scale_for_each_row_stays_after_maxima_across_rows():
    """Each row is computed by its own convolution, so that each could be scaled by one number."""
    rows = [("Conv", "x k8", "c"), ("Sin", "x", "x2"), ("Conv", "x2 k8", "d"), ("Concat", "c d", "u", {"axis": 2})]
    rows += [("MaxPool", "u", "z", {"kernel_shape": [2, 1], "pads": [0, 0, 1, 0]}), ("Mul", "z f", "n")]
    weights = {"k8": normal(WIDTH, 3, SIZE, 1), "f": RANDOM.uniform(0.5, 2, (1, WIDTH, 2, 1))}
    assert "Mul" in operators([*rows, ("Relu", "n", "y")], weights)


@pytest.mark.parametrize("case", STAYS)
def test_a_norm_stays_past(case):
    rows, signs, weights = STAYS[case]
    end = [NORM, ("Add", "n z2", "y")] if any(row[2] == "z2" for row in rows) else END
    assert "BatchNormalization" in operators([*rows, *end], {**norm(WIDTH, **signs), **weights})


# --- The layer comes after the scale and shift.

START = [("Conv", "x k b", "c", SAME), ("Relu", "c", "z"), NORM]
AFTER = {
    "maxima, convolution": ([("MaxPool", "n", "o", POOL), ("Conv", "o kv", "y")], {}),
    "maxima, 1x1 convolution": ([("MaxPool", "n", "o", POOL), ("Conv", "o kp", "y", SAME)], None),
    "border, convolution": (
        [("Pad", "n p", "o", {"mode": "reflect"}), ("Conv", "o kv", "y")],
        integers(p=[0, 0, 1, 1, 0, 0, 1, 1]),
    ),
    "maxima, row, linear layer": (
        [("MaxPool", "n", "o", POOL), ("Reshape", "o t", "f"), ("MatMul", "f w1", "y")],
        integers(t=[1, -1]),
    ),
    "mean, row, linear layer": (
        [("GlobalAveragePool", "n", "o"), ("Flatten", "o", "f"), ("MatMul", "f w", "y")],
        {},
    ),
    "maximum, linear layer": ([("ReduceMax", "n a", "o", {"keepdims": 0}), ("MatMul", "o w", "y")], integers(a=[2, 3])),
}


@pytest.mark.parametrize("case", AFTER)
def test_layers_after_absorb_a_norm_past(case):
    rows, weights = AFTER[case]
    found = operators([*START, *rows], {**norm(WIDTH), **(weights or {})}, shape=(1, 3, SIZE, SIZE))
    assert ("BatchNormalization" in found) == (weights is None), "a padded convolution's border is zero"


def test_the_classifier_absorbs_the_norm_of_a_flattened_shortcut():
    """No layer before the sum can: one term is the shortcut, or its activation (ArcFace's iResNet)."""
    rows = [CONV, ("Relu", "c", "r"), ("Add", "c r", "z"), NORM, ("Reshape", "n t", "f"), ("MatMul", "f w2", "y")]
    weights = {**norm(WIDTH, (1, -1)), "w2": normal(WIDTH * SIZE * SIZE, 4), **integers(t=[1, -1])}
    assert "BatchNormalization" not in operators(rows, weights, shape=(1, 3, SIZE, SIZE))


GATE = [("GlobalAveragePool", "z", "p"), ("Sigmoid", "p", "gate"), ("Mul", "n gate", "o"), ("Conv", "o kv", "y", SAME)]


def test_a_scale_passes_a_gate_and_a_shift_does_not():
    weights = {**norm(WIDTH), "f": normal(WIDTH, 1, 1)}
    with_shift = operators([*START, *GATE], weights)
    assert ("BatchNormalization" in with_shift, with_shift.count("Mul")) == (True, 1)
    scale = operators([*START[:2], ("Mul", "z f", "n"), *GATE], weights)
    assert ("BatchNormalization" in scale, scale.count("Mul")) == (False, 1)


def test_a_scale_passes_a_constant_of_each_pixel():
    rows = [*START[:2], ("Mul", "z f", "n"), ("Mul", "n pixels", "o"), ("Conv", "o kv", "y", SAME)]
    found = operators(rows, {"f": normal(WIDTH, 1, 1), "pixels": normal(1, 1, SIZE, SIZE)})
    assert found == ["Conv", "Conv", "Mul", "Relu"]


def test_a_norm_that_falls_stays_before_maxima():
    rows = [("MaxPool", "n", "o", POOL), ("Reshape", "o t", "f"), ("MatMul", "f w1", "y")]
    found = operators([*START, *rows], {**norm(WIDTH, (1, -1)), **integers(t=[2, -1])})
    assert "BatchNormalization" in found


# --- What only seems to leave channels as they are.


def uniform(*rows, shape=(1, 4, 6, 6), **weights):
    """A factor of all channels, and rows after it."""
    return operators([("Relu", "x", "r"), ("Mul", "r f", "n"), *rows], {"f": np.array(0.5), **weights}, shape=shape)


def test_a_uniform_factor_before_fewer_or_more_channels():
    cut = integers(lo=[0], hi=[2], ax=[1])
    assert uniform(("Slice", "n lo hi ax", "o"), ("Conv", "o kc", "y"), kc=normal(3, 2, 3, 3), **cut)
    assert uniform(("Pad", "n p", "o"), ("Conv", "o kc", "y"), kc=normal(3, 6, 3, 3), **integers(p=[0, 2, *[0] * 6]))


@pytest.mark.parametrize("after", [True, False])
def test_a_resize_that_mixes_channels(after):
    """4 channels times 1.2 are 4, of other values."""
    how, factors = {"mode": "linear"}, {"f": normal(4, 1, 1), "r": np.zeros(0), "s": np.float32([1, 1.2, 1, 1])}
    if after:
        rows = [("Conv", "x kc", "c"), ("Resize", "c r s", "z", how), ("Mul", "z f", "n"), ("Relu", "n", "y")]
    else:
        rows = [("Relu", "x", "c"), ("Mul", "c f", "n"), ("Resize", "n r s", "z", how), ("Conv", "z kc", "y")]
    assert "Mul" in operators(rows, {**factors, "kc": normal(4, 4, 3, 3)}, shape=(1, 4, 6, 6))


def test_a_layer_after_a_resize_that_mixes_channels_stays_there():
    rows = [("Resize", "x r s", "z", {"mode": "linear"}), ("Conv", "z kc", "c"), ("Relu", "c", "y")]
    weights = {"r": np.zeros(0), "s": np.float32([1, 1.2, 4, 4]), "kc": normal(2, 4, 1, 1)}
    assert operators(rows, weights, shape=(1, 4, 6, 6))


def test_places_of_maxima_that_the_graph_outputs():
    rows = [
        *[("Relu", "x", "r"), ("Mul", "r f", "n"), ("MaxPool", "n", "o i", POOL)],
        *[("Flatten", "o", "g"), ("MatMul", "g w", "y")],
    ]
    model = graph(rows, {"f": np.array(0.5), "w": normal(4 * 9, 3)}, {"x": (1, 4, 6, 6)}, ("y", "i"))
    model.graph.output[1].CopyFrom(onnx.helper.make_tensor_value_info("i", onnx.TensorProto.INT64, (1, 4, 3, 3)))
    after, _ = rewritten(model, FOLDS)
    onnx.checker.check_model(after, full_check=True)


UNKNOWN = {
    "concat": (
        [("Conv", "x kc", "c"), ("Own", "x", "d"), ("Concat", "c d", "z", {"axis": 1})],
        (1, 8, 6, 6),
        (8, 1, 1),
    ),
    "mean": ([("Own", "x", "d"), ("ReduceMean", "d ax", "z")], (1, 4, 1, 1), (4, 1, 1)),
    "global mean": ([("Own", "x", "d"), ("GlobalAveragePool", "d", "z")], (1, 4, 1, 1), (4, 1, 1)),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_values_of_unknown_shape(case):
    rows, shape, factor = UNKNOWN[case]
    weights = {"kc": normal(4, 4, 1, 1), "f": normal(*factor), **integers(ax=[2, 3])}
    rows = [*rows, ("Mul", "z f", "n"), ("Relu", "n", "y")]
    read = " ".join(names for _, names, *_ in rows).split()
    model = graph(rows, {k: v for k, v in weights.items() if k in read}, {"x": (1, 4, 6, 6)})
    del model.graph.value_info[:]
    for node in model.graph.node:
        node.domain = "own" if node.op_type == "Own" else ""
    model.opset_import.append(onnx.helper.make_opsetid("own", 1))
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.DOUBLE, shape))
    after, _ = rewritten(model, FOLDS)
    assert "Mul" in {node.op_type for node in after.graph.node}


# --- Nodes that only prepare what their reader does anyway.


@pytest.mark.parametrize("batch", [2, "n"])
def test_an_expand_that_its_reader_repeats(batch):
    rows = [("ReduceL2", "x a", "l", {"keepdims": 1}), ("Shape", "x", "s"), ("Expand", "l s", "e"), ("Div", "x e", "y")]
    assert operators(rows, integers(a=[1]), batch=batch) == ["Div", "ReduceL2"]


def test_a_tile_that_its_reader_repeats():
    """As in SwiftFormer, which repeats one query for all tokens. What repeats several channels stays."""
    rows = [("ReduceL2", "x a", "l", {"keepdims": 1}), ("Tile", "l r", "e"), ("Div", "x e", "y")]
    assert operators(rows, integers(a=[2, 3], r=[1, 1, SIZE, SIZE])) == ["Div", "ReduceL2"]
    rows = [("Relu", "x", "l"), ("Tile", "l r", "e"), ("Conv", "x k", "c"), ("Mul", "c e", "y")]
    assert "Tile" in operators(rows, {"k": normal(WIDTH, 3, 1, 1), **integers(r=[1, 2, 1, 1])})


def test_an_expand_that_enlarges_both():
    rows = [("ReduceL2", "x a", "l"), ("Expand", "l s", "e"), ("Div", "l e", "y")]
    assert "Expand" in operators(rows, integers(a=[1], s=[2, 3, SIZE, SIZE]))


@pytest.mark.parametrize("last", [("Transpose", "m", "y", {"perm": [1, 0]}), ("MatMul", "m w", "y")])
def test_an_expand_that_adds_an_axis(last):
    rows = [("Expand", "x s", "e"), ("Cos", "x", "c"), ("Mul", "c e", "m"), last]
    assert "Expand" in operators(rows, integers(s=[1, 6]), shape=(6,))
    assert "Expand" in operators([rows[0], ("Max", "e", "m"), last], integers(s=[1, 6]), shape=(6,))


def test_an_empty_name_of_a_bias():
    model = graph([("Conv", "x k", "c"), ("Relu", "c", "y")], {"k": normal(4, 3, 1, 1)}, {"x": (1, 3, 4, 4)})
    model.graph.node[0].input.append("")
    rewritten(model, FOLDS)


def test_a_resize_of_axes_from_the_end():
    rows = [("Resize", "x r s", "z", {"axes": [-2, -1]}), ("Shape", "z", "d"), ("Reshape", "x0 d", "y")]
    rows = [("Tile", "x t", "x0"), *rows]
    weights = {"r": np.zeros(0), "s": np.float32([2, 3]), **integers(t=[1, 1, 2, 3])}
    assert operators(rows, weights, shape=(1, 2, 3, 4)) == ["Reshape", "Tile"]


@pytest.mark.parametrize("length", [{"axis": 0}, {"axis": 0, "num_outputs": 1}])
def test_a_split_into_one_part_is_nothing(length):
    """Older PyTorch exports take the images of a batch of one apart so."""
    rows = [CONV, ("Split", "c" if "num_outputs" in length else "c two", "z", length), *END]
    assert operators(rows, {**norm(WIDTH), **integers(two=[2])}) == ["Conv", "Relu"]


def test_a_reduction_keeps_axes():
    rows = [("ReduceMean", "x a", "l", {"keepdims": 0}), ("Unsqueeze", "l a", "u"), ("Mul", "x u", "y")]
    assert operators(rows, integers(a=[1])) == ["Mul", "ReduceMean"]
    rows[1] = ("Unsqueeze", "l one", "u")
    assert "Unsqueeze" in operators(rows, integers(a=[2], one=[1]), shape=(2, 3, 3, 3))


@pytest.mark.parametrize("lengths", [{"s": np.array([4, 2, 4])}, {}])
def test_parts_of_a_constant_are_constants(lengths):
    split = ("Split", "whole s", "a p q") if lengths else ("Split", "whole", "a p q", {"num_outputs": 3})
    rows = [split, ("MatMul", "x w", "l"), ("Add", "l p", "m"), ("Mul", "m f", "y")]
    weights = {"whole": normal(10), "f": np.array(0.5), "w": normal(SIZE, 2 if lengths else 4), **lengths}
    assert operators(rows, weights) == ["Add", "MatMul"]


@pytest.mark.parametrize("whole", [True, False])
def test_channels_are_gathered_from_a_layer_only_if_nothing_reads_all_of_it(whole):
    """Every second channel of two heads: the layer could compute those first, unless its order is read as well."""
    rows = [
        *[("MatMul", "x w", "l"), ("Reshape", "l h", "v"), ("Transpose", "v", "heads", {"perm": [0, 2, 1, 3]})],
        *[("Reshape", "heads p", "pairs"), ("Slice", "pairs zero one last", "even"), ("Softmax", "even", "y")],
        *([("Softmax", "heads", "z")] if whole else []),
    ]
    weights = integers(h=[0, 0, 2, 4], p=[0, 0, 0, 2, 2], zero=[0], one=[1], last=[-1])
    model = read(graph(rows, {**weights, "w": normal(5, 8)}, {"x": (2, 6, 5)}, ("y", "z") if whole else ("y",)))
    normalize(model)
    move_before_views(model)
    assert ("Gather" in {node.op_type for node in model.graph}) != whole


def test_what_is_seen_by_others_is_not_scaled_before_it_is_turned():
    """Each of them would be turned by itself (the coordinates of RAFT at every scale)."""
    rows = [("MatMul", "x w", "l"), ("Transpose", "l", "t", {"perm": [0, 2, 1]}), ("Sin", "t", "y")]
    rows += [("Mul", "t f", "half"), ("Sin", "half", "z"), ("Mul", "t g", "more"), ("Sin", "more", "u")]
    weights = {"w": normal(5, 8), "f": np.array(0.5), "g": np.array(2.0)}
    model = read(graph(rows, weights, {"x": (2, 6, 5)}, ("y", "z", "u")))
    normalize(model)
    move_before_views(model)
    assert [node.op_type for node in model.graph].count("Transpose") == 1


def test_what_is_selected_of_a_view_after_no_layer_is_selected_there():
    """The scores of each class of a detector, of which the batch has been selected before."""
    rows = [("Softmax", "x", "p"), ("Squeeze", "p zero", "s")]
    rows += [("Gather", f"s n{place}", f"y{place}", {"axis": 1}) for place in range(4)]
    weights = integers(zero=[0], **{f"n{place}": place for place in range(4)})
    model = read(graph(rows, weights, {"x": (1, 6, 4)}, tuple(f"y{place}" for place in range(4))))
    normalize(model)
    move_before_views(model)
    clean(model)
    assert sorted(node.op_type for node in model.graph) == ["Gather"] * 4 + ["Softmax", "Squeeze"]


@pytest.mark.parametrize(("other", "wanted"), [([3, 6, 2], 2), ([2, 6, 3], 1)], ids=["2 x 3 and 3 x 2", "2 x 3"])
def test_rows_of_transposed_tokens_are_assigned_before_the_transpose_if_both_have_equal_axes(other, wanted):
    turn = {"perm": [1, 0, 2]}
    rows = [("Sin", "x", "o"), ("Transpose", "o", "p", turn), ("Reshape", "p six", "data")]
    rows += [("Reshape", "x other", "q"), ("Softmax", "q", "r"), ("Transpose", "r", "s", turn)]
    rows += [("Reshape", "s six", "updates"), ("ScatterND", "data places updates", "t"), ("Cos", "t", "y")]
    weights = integers(six=[6, 6], other=other, places=[[3], [0], [5], [1], [4], [2]])
    assert operators(rows, weights, shape=(2, 6, 3)).count("Transpose") == wanted


PLACES = np.array([3, 0, 5, 1, 4, 2])


@pytest.mark.parametrize(
    ("first", "second", "places", "shape"),
    [
        ([1, 0, 2], [1, 2, 0], PLACES[:, None], (6, 6, 6)),
        ([1, 0], [1, 0], np.stack(np.broadcast_arrays(np.arange(6)[:, None], PLACES), axis=-1), (6, 6)),
        ([1, 0, 2], [1, 0, 2], PLACES[:, None], (12, 3)),
    ],
    ids=["another order of axes", "along the columns", "half of an axis"],
)
def test_an_assignment_stays_after_the_transposes(first, second, places, shape):
    rows = [("Softmax", "x", "o"), ("Sin", "x", "p")]
    if len(shape) < len(first):  # an axis of the view is a part of one of the source
        rows += [("Reshape", "o apart", "o2"), ("Reshape", "p apart", "p2")]
    values = ("o2", "p2") if len(shape) < len(first) else ("o", "p")
    rows += [
        ("Transpose", value, f"{value}t", {"perm": perm}) for value, perm in zip(values, (first, second), strict=True)
    ]
    rows += [("ScatterND", f"{values[0]}t places {values[1]}t", "t"), ("Cos", "t", "y")]
    assert operators(rows, integers(places=places, apart=[2, 6, 3]), shape=shape).count("Transpose") == 2


def test_a_sum_of_a_value_and_a_transposed_one_stays():
    rows = [
        ("MatMul", "x u", "o"),
        ("Mul", "o f", "p"),
        ("Transpose", "p", "q", {"perm": [0, 2, 1]}),
        ("Sin", "x", "r"),
    ]
    weights = {"u": normal(6, 6), "f": normal(6)}
    found = operators([*rows, ("Add", "q r", "s"), ("Cos", "s", "y")], weights, shape=(2, 6, 6))
    assert found == ["Add", "Cos", "MatMul", "Sin", "Transpose"]


TURNED = [("MatMul", "x u", "o"), ("Mul", "o f", "p"), ("Transpose", "p", "q", {"perm": [0, 2, 1]})]


def test_a_factor_of_every_number_stays_after_the_transpose():
    found = operators([*TURNED, ("Mul", "q w", "y")], {"u": normal(6, 6), "f": normal(6)}, shape=(2, 4, 6))
    assert found == ["MatMul", "Mul", "Transpose"]


def test_a_norm_of_one_channel_of_transposed_tokens():
    rows = [*TURNED, ("BatchNormalization", "q g h m v", "r"), ("Sin", "r", "y")]
    found = operators(rows, {"u": normal(6, 1), "f": normal(1), **norm(1)}, shape=(2, 4, 6))
    assert sum(name in ("MatMul", "Sin") for name in found) == 2


def test_a_factor_of_every_token_moves_before_the_transpose():
    rows = [*TURNED, ("Mul", "q e", "r"), ("Sin", "r", "y")]
    found = operators(rows, {"u": normal(6, 6), "f": normal(6), "e": normal(4)}, shape=(2, 4, 6))
    assert found == ["MatMul", "Mul", "Sin", "Transpose"]


def test_parts_that_are_transposed_otherwise_stay_apart():
    rows = [("MatMul", "x u", "o"), ("Mul", "o f", "p"), ("Split", "p", "q r", {"axis": 2, "num_outputs": 2})]
    rows += [("Transpose", "q", "q1", {"perm": [0, 2, 1]}), ("Transpose", "r", "r1", {"perm": [2, 0, 1]})]
    rows += [("Sin", "q1", "q2"), ("Cos", "r1", "r2"), ("Concat", "q2 r2", "y", {"axis": 0})]
    found = operators(rows, {"u": normal(6, 6), "f": normal(6)}, shape=(3, 3, 6))
    assert found.count("Transpose") == 2


@pytest.mark.parametrize(("names", "given"), [("l one", {}), ("l", {"num_outputs": 2})], ids=["of 1", "halves"])
def test_pieces_of_a_dynamic_axis_are_transposed_one_by_one(names, given):
    turn = {"perm": [1, 0]}
    rows = [("MatMul", "x w", "l"), ("Split", names, "o p", {"axis": 0, **given})]
    rows += [("Transpose", "o", "q", turn), ("Transpose", "p", "r", turn)]
    rows += [("Sin", "q", "s"), ("Cos", "r", "t"), ("Concat", "s t", "y", {"axis": 1})]
    found = operators(rows, integers(one=[1, 1]), shape=(2, WIDTH), batch="n")
    assert found.count("Transpose") == 2


@pytest.mark.parametrize(
    ("axis", "target", "along", "wanted"),
    [
        (1, None, 3, 1),
        (1, [2, -1, 20], 1, 1),
        (1, [2, -1, 4, 1, 5], 1, 1),
        (2, [12, -1, 5], 1, 1),
        (1, [-1, 4, 5], 0, 3),  # the parts of each image would be next to each other
        (1, [2, 5, -1, 4], 2, 3),  # and those of each row
    ],
)
def test_equal_views_of_all_parts_are_one_before_the_split(axis, target, along, wanted):
    shape = [2, 6, 4, 5] if axis == 1 else [2, 6, 6, 5]
    rows = [("Sin", "x", "o"), ("Split", "o parts", "p q r", {"axis": axis})]
    for part, function in zip("pqr", ("Cos", "Tanh", "Abs"), strict=True):
        if target is None:
            rows.append(("Transpose", part, f"{part}1", {"perm": [0, 2, 3, 1]}))
        else:
            rows.append(("Reshape", f"{part} target", f"{part}1"))
        rows.append((function, f"{part}1", f"{part}2"))
    rows.append(("Concat", "p2 q2 r2", "y", {"axis": along}))
    found = operators(rows, integers(parts=[1, 3, 2], target=target or []), shape=shape)
    assert found.count("Transpose" if target is None else "Reshape") == wanted


RIGHT = ("Conv", "t r", "e")


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([("Split", "n s", "u t", {"axis": 1}), RIGHT, ("Conv", "u r", "d"), ("Mul", "d e", "y")], ["Mul", "Split"]),
        ([("Slice", "n zero three one", "t"), (*RIGHT[:2], "y")], []),  # the others are computed no more
        ([("Gather", "n i", "t", {"axis": 1}), (*RIGHT[:2], "y")], []),
    ],
    ids=["split", "slice", "gather"],
)
def test_a_norm_passes_a_selection_of_channels_before_convolutions_of_several_pixels(rows, wanted):
    weights = integers(s=[3, 3], zero=[0], three=[3], one=[1], i=[4, 0, 1])
    weights |= {**norm(WIDTH), "r": normal(4, 3, 3, 3)}
    convolutions = ["Conv"] * (1 + sum(row[0] == "Conv" for row in rows))
    found = operators([CONV, ("Relu", "c", "z"), NORM, *rows], weights)
    assert found == sorted([*convolutions, "Relu", *wanted])


def test_a_norm_passes_a_sum_of_equal_terms():
    rows = [*TWO, ("Add", "c d", "e"), ("Add", "e e", "z"), *END]
    assert operators(rows, norm(WIDTH)) == ["Add", "Conv", "Conv", "Relu", "Sin"]


def test_a_scale_of_parts_goes_into_every_padded_convolution_of_all():
    rows = [CONV, ("Relu", "c", "z"), ("Mul", "z f", "a"), ("Sin", "x", "x2"), ("Conv", "x2 k2", "d", SAME)]
    rows = [*rows, ("Relu", "d", "e"), ("Mul", "e f", "i"), ("Concat", "a i", "u", {"axis": 1})]
    rows = [*rows, ("Conv", "u l", "p", SAME), ("Conv", "u r", "q", SAME), ("Mul", "p q", "y")]
    weights = {"f": normal(WIDTH, 1, 1), "l": normal(4, 2 * WIDTH, 3, 3), "r": normal(4, 2 * WIDTH, 3, 3)}
    assert operators(rows, weights) == ["Concat", *["Conv"] * 4, "Mul", "Relu", "Relu", "Sin"]


# --- Shifts of slices of one layer are part of its bias, and it stays one layer.

MODULATION = [
    ("Sigmoid", "x", "sx"),
    ("Mul", "x sx", "silu"),
    ("MatMul", "silu w", "p"),
    ("Add", "p b", "q"),
    ("Split", "q", "shift scale gate", {"axis": 1, "num_outputs": 3}),
    ("Add", "scale one", "scale1"),
    ("Unsqueeze", "scale1 axis", "scale2"),
    ("Mul", "tokens scale2", "scaled"),
    ("Unsqueeze", "shift axis", "shift2"),
    ("Add", "scaled shift2", "shifted"),
    ("Tanh", "shifted", "t"),
    ("Unsqueeze", "gate axis", "gate2"),
]


def modulated(rows, wanted, batch=None, **weights):
    """A layer of which parts scale, shift and gate tokens, as adaLN does."""
    given = {"w": normal(6, 3 * 5), "b": normal(3 * 5), "one": np.float64(1), "axis": np.array([1])}
    given |= {"tokens": normal(1, 4, 5)}
    found = operators([*MODULATION, *rows], {**given, **weights}, shape=(2, 6), batch=batch)
    assert [found.count(name) for name in ("MatMul", "Gemm", "Split", "Add")] == wanted


GATED = [("Mul", "t gate2", "y")]


@pytest.mark.parametrize("batch", [2, "batch"])
def test_the_one_of_a_scale_is_part_of_the_bias_of_the_layer_that_makes_it(batch):
    modulated(GATED, [0, 1, 1, 1], batch)


def test_a_shift_of_every_slice_is_part_of_the_bias():
    modulated([("Add", "gate2 own", "gate3"), ("Mul", "t gate3", "y")], [0, 1, 1, 1], own=normal(5))


def test_a_layer_without_a_bias_gets_one():
    rows = [row for row in MODULATION if row[1] != "p b"]
    rows = [(op, names.replace("q", "p"), *rest) for op, names, *rest in rows]
    given = {"w": normal(6, 3 * 5), "one": np.float64(1), "axis": np.array([1]), "tokens": normal(1, 4, 5)}
    found = operators([*rows, *GATED], given, shape=(2, 6))
    assert [found.count(name) for name in ("MatMul", "Gemm", "Split", "Add")] == [0, 1, 1, 1]


def test_a_slice_with_two_shifts_keeps_them():
    """What is read as s and as 1 + s is not moved into the layer, which is not split either, and becomes a Gemm."""
    rows = [("Unsqueeze", "scale axis", "s2"), ("Mul", "t s2", "u"), ("Add", "u gate2", "y")]
    modulated(rows, [0, 1, 1, 3])


# --- Layers on both sides of a view that keeps the channels of every token together.

REGROUPED = [
    ("MatMul", "x w1", "p"),
    ("Add", "p b1", "q"),
    ("Reshape", "q r", "t"),
    ("MatMul", "t w2", "u"),
    ("Add", "u b2", "v"),
    ("Tanh", "v", "y"),
]
AS_IMAGE = [
    ("MatMul", "x w1", "p"),
    ("Add", "p b1", "q"),
    ("Transpose", "q", "turned", {"perm": [0, 2, 1]}),
    ("Reshape", "turned image", "t"),
    ("Conv", "t w3 b2", "u"),
    ("Tanh", "u", "y"),
]


def regrouped(rows, batch=None, widths=(6, 6, 4), **more):
    """Operators after folding of two layers of tokens, [B, 8, 6], with a view between them."""
    first, between, last = widths
    given = {"w1": normal(first, between), "b1": normal(between), "w2": normal(between, last), "b2": normal(last)}
    given |= {"w3": normal(last, between, 1, 1)} | integers(r=[-1, 4, between], image=[-1, between, 2, 4])
    return operators(rows, {**given, **more}, shape=(2, 8, first), batch=batch)


@pytest.mark.parametrize("batch", [2, "batch"])
def test_a_layer_of_regrouped_tokens_is_composed_with_the_layer_before(batch):
    assert regrouped(REGROUPED, batch) == ["Add", "MatMul", "Reshape", "Tanh"]


@pytest.mark.parametrize("batch", [2, "batch"])
def test_a_layer_of_tokens_grouped_back_is_composed_with_the_layer_of_the_groups(batch):
    """As in TimeSformer, where the first layer acts on batch * 2 groups of tokens."""
    rows = [("Tanh", "x", "a"), ("Reshape", "a r", "g"), ("MatMul", "g w1", "p"), REGROUPED[1]]
    rows += [("Softmax", "q", "z"), ("MatMul", "z w1", "p2"), ("Add", "p2 b1", "q2"), ("Reshape", "q2 back", "t")]
    found = regrouped([*rows, *REGROUPED[3:]], batch, **integers(back=[-1, 8, 6]))
    assert found.count("MatMul") == 2


@pytest.mark.parametrize("batch", [2, "batch"])
def test_a_convolution_of_tokens_as_an_image_is_composed_with_the_layer_before(batch):
    assert regrouped(AS_IMAGE, batch) == ["Add", "MatMul", "Reshape", "Tanh", "Transpose"]


def test_a_convolution_of_tokens_as_an_image_absorbs_a_scale_and_shift():
    rows = [("Tanh", "x", "z"), ("Mul", "z b1", "p"), ("Add", "p b1", "q"), *AS_IMAGE[2:]]
    assert regrouped(rows) == ["Add", "MatMul", "Reshape", "Tanh", "Tanh", "Transpose"]


ACROSS_TOKENS = [*REGROUPED[:2], ("Transpose", "q", "t", {"perm": [0, 2, 1]}), *REGROUPED[3:]]
IN_GROUPS = [(*row[:3], {"group": 2}) if row[0] == "Conv" else row for row in AS_IMAGE]

STAY = {
    "more channels": (REGROUPED, (6, 4, 5), {}),
    "a view that takes tokens apart": (REGROUPED, (6, 6, 4), {"r": [-1, 16, 3], "w2": normal(3, 2), "b2": normal(2)}),
    "a layer across tokens, as many as channels": (ACROSS_TOKENS, (6, 8, 8), {}),
    "a convolution of groups": (IN_GROUPS, (6, 6, 2), {"w3": normal(2, 3, 1, 1)}),
    "another order of channels": (AS_IMAGE, (6, 6, 4), {"image": [-1, 8, 2, 3], "w3": normal(4, 8, 1, 1)}),
    "several pixels": (AS_IMAGE, (6, 6, 4), {"w3": normal(4, 6, 2, 1)}),
    "read as well": ([*REGROUPED[:-1], ("ReduceMax", "t", "m"), ("Add", "v m", "y")], (6, 6, 4), {}),
    "a norm": ([("LayerNormalization", "x b1 b1", "q"), *AS_IMAGE[2:]], (6, 6, 4), {}),
}


@pytest.mark.parametrize("case", STAY)
def test_a_layer_after_a_view_stays(case):
    rows, widths, more = STAY[case]
    wanted = sorted(row[0] for row in rows)
    assert regrouped(rows, widths=widths, **{name: np.array(numbers) for name, numbers in more.items()}) == wanted


# --- Channels that a scale turns to 0.


@pytest.mark.parametrize("shape", [(2, 6), (2, 4, 6), (2, 6, 4, 4)], ids=["rows", "tokens", "image"])
def test_a_scale_of_some_zeros_stays_one_operator(shape):
    """Zeros are not written between the channels that remain."""
    column = (-1, 1, 1) if len(shape) == 4 else (-1,)
    scale = np.array([2.0, 0, 0.5, -1, 0, 3]).reshape(column)
    rows = [("Mul", "x s", "a"), ("Mul", "a u", "o"), ("Add", "o t", "p"), ("Tanh", "p", "y")]
    found = operators(rows, {"s": scale, "u": normal(6).reshape(column), "t": normal(6).reshape(column)}, shape=shape)
    assert found in (["Add", "Mul", "Tanh"], ["BatchNormalization", "Tanh"])


def test_channels_before_an_activation_whose_scale_is_zero_are_computed():
    """The layer before could compute fewer of them, but their places would have to be filled again."""
    scale = np.array([2.0, 0, 0.5, -1, 0, 3])
    rows = [("MatMul", "x w", "a"), ("Tanh", "a", "o"), ("Mul", "o s", "p"), ("Add", "p t", "q"), ("Tanh", "q", "y")]
    found = operators(rows, {"w": normal(6, 6), "s": scale, "t": normal(6)}, shape=(2, 4, 6))
    assert found == ["Add", "MatMul", "Mul", "Tanh", "Tanh"]


def test_channels_that_only_a_layer_with_zeros_reads_are_dropped():
    weight = normal(6, 6) * np.array([1.0, 0, 1, 1, 0, 1])[:, None]
    rows = [("MatMul", "x w", "a"), ("Tanh", "a", "o"), ("MatMul", "o v", "y")]
    model = graph(rows, {"w": normal(6, 6), "v": weight}, {"x": (2, 4, 6)})
    after, _ = rewritten(model, FOLDS)
    assert sorted(tuple(weight.dims) for weight in after.graph.initializer) == [(4, 6), (6, 4)]


def test_a_scale_of_a_slice_is_no_change():
    """It was written again in every round, and every time reported as a change."""
    rows = [("Mul", "x s", "a"), ("Slice", "a 0 2 axis", "o"), ("Mul", "o u", "p"), ("Add", "p t", "q")]
    rows += [("ReduceMax", "a axis", "m", {"keepdims": 1}), ("Tanh", "q", "z"), ("Add", "z m", "y")]
    weights = {"s": normal(6), "u": normal(2), "t": normal(2), **integers(**{"0": [0], "2": [2], "axis": [1]})}
    assert not rewritten(graph(rows, weights, {"x": (2, 6)}), FOLDS)[1]
    rows[4] = ("ReduceMax", "x axis", "m", {"keepdims": 1})
    assert operators(rows, weights, shape=(2, 6)) == ["Add", "Add", "Mul", "ReduceMax", "Slice", "Tanh"]


def test_channels_of_zeros_on_both_sides_are_one_pad():
    rows = [("MatMul", "x w", "a"), ("Tanh", "a", "z"), ("Add", "z t", "o"), ("Pad", "x p", "q")]
    rows += [("Add", "o q", "s"), ("Sub", "s u", "r"), ("Tanh", "r", "y")]
    weights = {"w": normal(6, 9), "t": normal(9), "u": normal(9), **integers(p=[0, 1, 0, 2])}
    assert operators(rows, weights, shape=(2, 6)) == ["Add", "Add", "MatMul", "Pad", "Tanh", "Tanh"]


def test_a_scale_of_gathered_channels_with_zeros_stays_one_operator():
    rows = [("Gather", "x places", "a", {"axis": 1}), ("Mul", "a s", "o"), ("Mul", "o u", "p"), ("Tanh", "p", "y")]
    weights = {"s": np.array([2.0, 0, 0, -1]), "u": normal(4), **integers(places=[5, 1, 1, 0])}
    assert operators(rows, weights, shape=(2, 6)) == ["Gather", "Mul", "Tanh"]


@pytest.mark.parametrize("pads", [(0, 0, 2, 0, 0, 1), (0, 0, 0, 0, 0, 3), (0, 0, 3, 0, 0, 0)])
def test_scaled_channels_that_are_padded_need_no_gather(pads):
    rows = [
        ("Exp", "x", "z"),
        ("Slice", "z f t axis", "c"),
        ("Mul", "c s", "d"),
        ("Pad", "d p", "e"),
        ("Sin", "e", "y"),
    ]
    weights = {"s": np.array([2.0, 3.0, 5.0]), **integers(f=[1], t=[4], axis=[2], p=pads)}
    assert operators(rows, weights, shape=(2, 5, 6)) == ["Exp", "Mul", "Pad", "Sin", "Slice"]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([CONV, ("Neg", "c", "n"), ("Relu", "n", "y")], ["Conv", "Relu"]),
        ([CONV, ("Relu", "c", "r"), ("Neg", "r", "n"), ("Conv", "n kv", "y", SAME)], ["Conv", "Conv", "Relu"]),
        ([CONV, ("MaxPool", "c", "p", POOL), ("Neg", "p", "y")], ["Conv", "MaxPool", "Neg"]),
        ([CONV, ("AveragePool", "c", "p", POOL), ("Neg", "p", "y")], ["AveragePool", "Conv"]),
    ],
    ids=["before", "after", "past-maxima", "past-means"],
)
def test_a_convolution_absorbs_a_sign(rows, wanted):
    assert operators(rows, {}) == wanted


HALVES = {"h2": np.array([3, 3], np.int64), "i1": np.ones(3), "i0": np.zeros(3), **norm(3, (1, -1))}
IBN = [
    ("BatchNormalization", "z g h m v", "n"),
    ("InstanceNormalization", "p i1 i0", "i"),
    ("Concat", "n i", "t", {"axis": 1}),
    ("Relu", "t", "y"),
]
FIRST, SECOND = ("Slice", "c s0 e0 a1", "z"), ("Slice", "c s1 e1 a1", "p")


@pytest.mark.parametrize("parts", [[("Split", "c h2", "z p", {"axis": 1})], [FIRST, SECOND]])
def test_a_convolution_absorbs_the_norm_of_half_of_its_channels(parts):
    """The other half of the channels goes into an InstanceNorm (IBN-Net, MODNet)."""
    found = operators([CONV, *parts, *IBN], HALVES | integers(s0=[0], e0=[3], s1=[3], e1=[6], a1=[1]))
    assert found == ["Concat", "Conv", "InstanceNormalization", "Relu", "Split"]


@pytest.mark.parametrize("others", [[SECOND], [("Sin", "c", "u"), ("Slice", "u s1 e1 a1", "p")]])
def test_channels_that_others_read_keep_their_norm(others):
    """The parts overlap, or something else reads all channels."""
    found = operators([CONV, FIRST, *others, *IBN], HALVES | integers(s0=[0], e0=[3], s1=[2], e1=[5], a1=[1]))
    assert {"BatchNormalization", "Mul"} & {*found}


POOLED = ["Add", "Conv", "MaxPool", "MaxPool", "Relu", "Split"]
IN_HALVES, BOTH_HALVES = ("Split", "c h2", "p q", {"axis": 1}), {"h2": np.array([3, 3], np.int64)}


@pytest.mark.parametrize(
    ("rows", "width", "wanted"),
    [
        ([("Add", "p q", "z")], 3, ["Add", "Conv", "Relu", "Split"]),
        ([("Concat", "q p", "z", {"axis": 1})], WIDTH, ["Conv", "Gather", "Relu"]),
        ([("MaxPool", "p", "p2", POOL), ("MaxPool", "q", "q2", POOL), ("Add", "p2 q2", "z")], 3, POOLED),
    ],
)
def test_a_convolution_absorbs_a_norm_of_several_of_its_parts(rows, width, wanted):
    found = operators([CONV, IN_HALVES, *rows, *END], BOTH_HALVES | norm(width, (1, 1)))
    assert found == wanted


@pytest.mark.parametrize("channels", [1, 3])
def test_a_scale_for_each_image_of_a_part_of_the_channels_stays(channels):
    rows = [CONV, IN_HALVES, ("Mul", "p s", "n"), ("Sin", "q", "u"), ("Concat", "n u", "y", {"axis": 1})]
    assert "Mul" in operators(rows, BOTH_HALVES | {"s": normal(2, channels, 1, 1)})
