"""repeated: what is the same for every image of a dynamic batch is a constant; what differs between images stays."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from test_fold_onnx import graph

from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.constants_of_every_image import REPEATED
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.verification.float64_graphs import ReferenceEvaluation

RANDOM = np.random.default_rng(0)
INT = np.int64
INTEGERS = {
    "zero": INT(0), "one": INT(1), "l0": INT([0]), "l1": INT([1]), "lm1": INT([-1]), "l2": INT([2]), "l3": INT([3]),
    "two": INT(2), "l4": INT([4]), "l6": INT([6]), "end": INT([2**63 - 1]), "grid": INT([0, 4, 6, 4]),
    "tokens": INT([0, 24, 8]), "flat": INT([-1, 1]), "column": INT([-1, 1, 1]), "row": INT([-1, 1, 1, 24]),
    "heads": INT([0, 0, 2, 4]), "places": np.arange(24).reshape(1, 1, 24), "count": INT(24), "matrix": INT([-1, 24]),
}  # fmt: skip
NUMBERS = {
    "eps": 1e-6, "turn": 6.28, "steps": 10.0 ** np.arange(4), "w": RANDOM.standard_normal((8, 8)),
    "v": RANDOM.standard_normal((8, 8)), "queries": RANDOM.standard_normal((1, 5, 8)), "off": -1e9, "n0": 0.0,
    "g": RANDOM.standard_normal(8), "b": RANDOM.standard_normal(8),
}  # fmt: skip
WEIGHTS = {**INTEGERS, **NUMBERS}
BATCH = [("Shape", "x", "shape"), ("Gather", "shape l0", "batch")]
ONE = {"value": onnx.helper.make_tensor("one", TensorProto.DOUBLE, [1], [1])}
ONES = [*BATCH, ("Concat", "batch l4 l6", "s", {"axis": 0}), ("ConstantOfShape", "s", "ones", ONE)]
SINES = [
    *ONES, ("CumSum", "ones one", "rows"), ("Slice", "rows lm1 end l1", "last"), ("Add", "last eps", "whole"),
    ("Div", "rows whole", "part"), ("Mul", "part turn", "angle"), ("Unsqueeze", "angle l3", "angles"),
    ("Div", "angles steps", "waves"), ("Slice", "waves l0 end l3 l2", "even"), ("Sin", "even", "sine"),
    ("Cos", "waves", "cosine"), ("Unsqueeze", "sine lm1", "sine1"), ("Concat", "sine1 sine1", "pair", {"axis": -1}),
    ("Reshape", "pair grid", "half"), ("Concat", "half cosine", "all", {"axis": 3}),
    ("Reshape", "all tokens", "position"),
]  # fmt: skip
MASK = [
    *ONES, ("Cast", "ones", "valid", {"to": TensorProto.BOOL}), ("Reshape", "valid flat", "list"),
    ("Squeeze", "batch l0", "n"), ("Range", "zero n one", "images"), ("Reshape", "images column", "image"),
    ("Mul", "image count", "first"), ("Add", "first places", "index"), ("Gather", "list index", "picked", {"axis": 0}),
    ("Reshape", "picked row", "mask"), ("Where", "mask n0 off", "bias"),
]  # fmt: skip


def folded(rows, shape=("N", 24, 8), sizes=(1, 3), **more) -> onnx.ModelProto:
    """The graph after folding, which computes the same for batches of several sizes."""
    model = graph(rows, {**WEIGHTS, **more}, {"x": shape})
    after, _ = rewritten(model, FOLDS)
    onnx.checker.check_model(after, full_check=True)
    for size in sizes:
        image = {"x": RANDOM.standard_normal([size if isinstance(each, str) else each for each in shape])}
        given, found = (ReferenceEvaluation(each).run(image)["y"] for each in (model, after))
        assert given.shape == found.shape
        np.testing.assert_allclose(found, given, rtol=0, atol=1e-12 * np.abs(given).max())
    return after


def operators(*args, **named) -> list[str]:
    return sorted(node.op_type for node in folded(*args, **named).graph.node)


def test_a_position_embedding_is_a_constant():
    assert operators([*SINES, ("Add", "x position", "y")]) == ["Add"]


def test_a_linear_layer_of_a_position_embedding_is_a_constant():
    rows = [("MatMul", "position w", "p"), ("MatMul", "x v", "q"), ("Add", "p q", "r"), ("Relu", "r", "y")]
    assert operators([*SINES, *rows]) == ["Add", "MatMul", "Relu"]


def test_a_mask_that_is_read_by_pairs_of_indices_is_gone():
    """As PyTorch's newer exporter writes it; it also guards the softmax against NaN."""
    rows = [
        *BATCH, ("Concat", "batch l4", "s", {"axis": 0}), ("Expand", "yes s", "mask"), ("Squeeze", "batch l0", "n"),
        ("Range", "zero n one", "images"), ("Reshape", "images flat", "image"), ("Sub", "image image", "none"),
        ("Concat", "image none", "index", {"axis": 1}), ("GatherND", "mask index", "picked"),
        ("Reshape", "picked column", "each"), ("Where", "each n0 off", "bias"), ("IsNaN", "bias", "wrong"),
        ("Where", "wrong n0 bias", "right"), ("Add", "x right", "z"), ("Sigmoid", "z", "y"),
    ]  # fmt: skip
    assert operators(rows, yes=np.array([[True]])) == ["Sigmoid"]


def test_a_mask_that_hides_nothing_is_gone():
    scores = [("Reshape", "x heads", "h"), ("Transpose", "h", "q", {"perm": [0, 2, 1, 3]}),
              ("Transpose", "h", "k", {"perm": [0, 2, 3, 1]}), ("MatMul", "q k", "scores")]  # fmt: skip
    found = operators([*MASK, *scores, ("Add", "scores bias", "r"), ("Softmax", "r", "y")])
    assert found == ["MatMul", "Reshape", "Softmax", "Transpose", "Transpose"]


def test_the_attention_between_queries_is_a_constant():
    rows = [
        *BATCH, ("Concat", "batch l1 l1", "times", {"axis": 0}), ("Tile", "queries times", "q"), ("MatMul", "q w", "a"),
        ("Transpose", "a", "t", {"perm": [0, 2, 1]}), ("MatMul", "a t", "s"), ("Softmax", "s", "p"),
        ("MatMul", "p a", "o"), ("Add", "o q", "r"), ("LayerNormalization", "r g b", "n"), ("MatMul", "n v", "m"),
        ("Transpose", "x", "k", {"perm": [0, 2, 1]}), ("MatMul", "m k", "y"),
    ]  # fmt: skip
    assert operators(rows) == ["Concat", "Expand", "Gather", "MatMul", "Shape", "Transpose"]


def test_a_constant_output_is_repeated():
    assert operators([*SINES, ("Mul", "position turn", "y")]) == ["Concat", "Expand", "Gather", "Shape"]


@pytest.mark.parametrize(
    "rows",
    [
        [("CumSum", "ones zero", "a"), ("ReduceMax", "a", "m", {"keepdims": 0})],  # counts images
        [("ReduceSum", "ones l0", "m", {"keepdims": 0}), ("ReduceMax", "m", "a")],
        [("Softmax", "ones", "a", {"axis": 0})],
        [("Reshape", "ones flat", "f"), ("CumSum", "f zero", "a")],
        [("Squeeze", "batch l0", "n"), ("Range", "zero n one", "i"), ("Cast", "i", "a", {"to": TensorProto.DOUBLE})],
        [("Concat", "ones ones", "c", {"axis": 0}), ("CumSum", "c zero", "a")],
        [("Reshape", "ones matrix", "r"), ("Transpose", "r", "t"), ("MatMul", "t r", "a")],  # over images
    ],
)
def test_what_depends_on_the_batch_otherwise_stays(rows):
    """The result is the same, which `folded` compares."""
    most = [("ReduceMax", rows[-1][2], "most", {"keepdims": 0}), ("Add", "x most", "y")]
    folded([*ONES, *rows, *most])


POSITION = SINES[len(ONES) :]


@pytest.mark.parametrize(
    "rows",
    [
        [("ConstantOfShape", "batch", "o", ONE), ("Gather", "o zero", "p"), ("Expand", "p s", "a")],  # of one axis
        [("MatMul", "ones uneven", "a")],
        [*POSITION, ("Reshape", "position list", "o"), ("CumSum", "o zero", "a")],  # tokens of all images
        [*POSITION, ("Mul", "position b", "o"), ("GatherND", "o pairs", "p"), ("Expand", "p pairs_of_each", "a")],
        [*POSITION, ("LayerNormalization", "position wide wide", "a", {"axis": 1})],
    ],
    ids=["gather", "matmul", "reshape", "gathernd", "norm"],
)
def test_what_is_computed_of_repeated_numbers(rows):
    """The result is the same, which `folded` compares."""
    more = {"uneven": RANDOM.standard_normal((6, 8)), "wide": RANDOM.standard_normal((24, 8)), "list": INT([-1, 8])}
    more |= {"pairs": INT([[0, 3], [0, 5]]), "l8": INT([8])}
    each = [*BATCH, ("Concat", "batch l2 l8", "pairs_of_each", {"axis": 0})]
    folded(
        [*each, *ONES[len(BATCH) :], *rows, ("ReduceMax", "a", "most", {"keepdims": 0}), ("Add", "x most", "y")], **more
    )


def test_an_input_with_a_default_is_no_constant():
    rows = [
        *BATCH,
        ("Concat", "batch l1 l1", "times", {"axis": 0}),
        ("Tile", "queries times", "q"),
        ("Add", "q x", "y"),
    ]
    model = graph(rows, WEIGHTS, {"x": ("N", 5, 8), "queries": (1, 5, 8)})
    after, _ = rewritten(model, FOLDS)
    feed = {"x": RANDOM.standard_normal((3, 5, 8)), "queries": RANDOM.standard_normal((1, 5, 8))}
    given, found = (ReferenceEvaluation(each).run(feed)["y"] for each in (model, after))
    np.testing.assert_allclose(found, given, rtol=0, atol=1e-12)


def test_constants_that_are_larger_than_what_they_are_computed_from_stay():
    large = {"l4": INT([64]), "l6": INT([80])}
    rows = [("CumSum", "ones one", "a"), ("CumSum", "a two", "c"), ("Sin", "c", "d"), ("Add", "x d", "y")]
    assert operators([*ONES, *rows], ("N", 64, 80), **large).count("CumSum") == 1


def test_what_would_be_computed_of_too_many_entries_stays():
    """A sum of 2^23 ones for each image."""
    large = {"l4": INT([1 << 23]), "l6": INT([1])}
    rows = [("ReduceSum", "ones l1", "a"), ("Sin", "a", "d"), ("Add", "x d", "y")]
    assert "ReduceSum" in operators([*ONES, *rows], **large)


def test_a_size_that_does_not_follow_from_the_inputs_stays():
    rows = [
        ("NonZero", "x", "found"), ("Shape", "found", "s"), ("ConstantOfShape", "s", "z", ONE),
        ("CumSum", "z zero", "c"), ("Sin", "c", "i"), ("Gather", "i zero", "y", {"axis": 0}),
    ]  # fmt: skip
    assert "CumSum" in operators(rows)


def test_an_index_that_is_out_of_range_stays_for_the_runtime_to_refuse():
    rows = [*ONES, ("CumSum", "ones one", "rows"), ("Gather", "rows l6", "picked", {"axis": 1}), ("Sin", "picked", "y")]
    after, _ = rewritten(graph(rows, WEIGHTS, {"x": ("N", 24, 8)}), FOLDS)
    assert "Gather" in [node.op_type for node in after.graph.node if node.output[0] == "picked"]


def test_the_change_says_what_is_the_same():
    model = graph([*SINES, ("Add", "x position", "y")], WEIGHTS, {"x": ("N", 24, 8)})
    found = [change for change in rewritten(model, FOLDS)[1] if change.rewrite == REPEATED.name]
    assert [change.place for change in found] == ["position"]
    assert "the same for every image" in found[0].description


def test_windows_that_are_images_again_have_a_known_size():
    """64 N windows divided by 64 are N images (SAM 2, old exports of Swin)."""
    rows = [
        *BATCH, ("Mul", "batch n64", "m"), ("Div", "m n64", "again"), ("Concat", "again l1 l1", "times", {"axis": 0}),
        ("Tile", "queries times", "q"), ("Add", "q x", "y"),
    ]  # fmt: skip
    assert operators(rows, ("N", 5, 8), n64=INT([64])) == ["Add"]
