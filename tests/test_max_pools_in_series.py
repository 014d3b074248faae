"""pools-in-series: maxima over growing windows of one value read each other, and not one number changes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from test_fold_onnx import graph

import repaconv as rc
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS


def pool(name, size, value="x", **attributes):
    """A row of `graph`: a MaxPool of stride 1 with a square window, which pads by half of it, as PyTorch writes it."""
    written = {"kernel_shape": [size, size], "pads": [size // 2] * 4, "strides": [1, 1], "dilations": [1, 1]}
    return "MaxPool", value, name, written | attributes


def same(name, *sizes, how="SAME_UPPER"):
    return "MaxPool", "x", name, {"kernel_shape": list(sizes), "auto_pad": how}


def network(*rows, shape=("n", 3, 7, 12), opset=17, kind=TensorProto.FLOAT):
    """The given rows; the output is x and the first output of each, beside each other."""
    names = " ".join(output for _, _, outputs, *_ in rows for output in outputs.split()[:1])
    return graph([*rows, ("Concat", f"x {names}", "y", {"axis": 1})], {}, {"x": shape}, opset=opset, kind=kind)


def windows(model):
    """Of each MaxPool: what it reads from (another pool or not), its window and its pads."""
    made = {output for node in model.graph.node if node.op_type == "MaxPool" for output in node.output}
    for node in model.graph.node:
        if node.op_type == "MaxPool":
            held = {attribute.name: list(attribute.ints) for attribute in node.attribute}
            yield node.input[0] in made, held["kernel_shape"], held.get("pads")


def run(model, x):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def both(given):
    """The graph after the fold, which is valid and computes the same bits, below zero and at the borders, too."""
    after, changes = rewritten(given, FOLDS)
    onnx.checker.check_model(after, full_check=True)
    sides = [side.dim_value or 2 for side in given.graph.input[0].type.tensor_type.shape.dim]
    kind = helper.tensor_dtype_to_np_dtype(given.graph.input[0].type.tensor_type.elem_type)
    x = -np.random.default_rng(0).random(sides).astype(kind) - 1
    np.testing.assert_array_equal(run(after, x), run(given, x))
    assert {change.rewrite for change in changes} <= {"pools-in-series"}
    return list(windows(after)), [change.description for change in changes]


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.DOUBLE])
@pytest.mark.parametrize("shape", [("n", 3, 7, 12), (1, 1, 20, 20), ("n", 2, "h", 9), (2, 1, 8, 8)])
def test_the_pools_of_a_spatial_pyramid(shape, kind):
    found, changes = both(network(pool("a", 13), pool("b", 5), pool("c", 9), shape=shape, kind=kind))
    assert found == [(False, [5, 5], [2] * 4), (True, [5, 5], [2] * 4), (True, [5, 5], [2] * 4)]
    assert changes == ["9x9 by 5x5", "13x13 by 5x5"]


def test_windows_that_reach_farther_on_one_side():
    rows = same("a", 4, 4), same("b", 7, 5, how="SAME_LOWER"), pool("c", 3), pool("d", 8, pads=[3, 4, 4, 3])
    found, changes = both(network(*rows))
    assert found == [
        (False, [3, 3], [1, 1, 1, 1]),
        (True, [2, 2], [0, 0, 1, 1]),  # 4x4 of SAME_UPPER reaches 1 before and 2 behind
        (True, [4, 2], [2, 1, 1, 0]),
        (True, [2, 4], [0, 2, 1, 1]),
    ]
    assert len(changes) == 3


def test_each_reads_the_one_that_leaves_the_smallest_window():
    rows = same("rows", 1, 9), pool("a", 3), same("columns", 9, 2), pool("b", 5), same("long", 3, 9)
    found, changes = both(network(*rows))
    assert sorted(found, key=str) == sorted(
        [
            (False, [1, 9], [0, 4, 0, 4]),
            (False, [3, 3], [1, 1, 1, 1]),
            (False, [9, 2], [4, 0, 4, 1]),
            (True, [3, 3], [1, 1, 1, 1]),  # 5x5 of 3x3
            (True, [3, 1], [1, 0, 1, 0]),  # 3x9 of 1x9, not of 3x3
        ],
        key=str,
    )
    assert changes == ["5x5 by 3x3", "3x9 by 3x1"]


@pytest.mark.parametrize("shape", [("n", 3, 11), ("n", 3, 5, 6, 7)])
def test_rows_and_volumes(shape):
    axes = len(shape) - 2
    rows = [("MaxPool", "x", f"y{k}", {"kernel_shape": [k] * axes, "pads": [k // 2] * 2 * axes}) for k in (3, 5)]
    found, _ = both(network(*rows, shape=shape))
    assert found == [(reads, [3] * axes, [1] * 2 * axes) for reads in (False, True)]


def test_a_pool_whose_places_are_read_stays():
    given = graph([pool("y", 5), pool("z places", 9)], {}, {"x": ("n", 3, 11, 12)}, outputs=("y", "z", "places"))
    after, changes = rewritten(given, FOLDS)
    assert not changes
    assert list(windows(after)) == list(windows(given))


@pytest.mark.parametrize(
    "more",
    [
        {"strides": [2, 2], "pads": [4, 4, 3, 3]},
        {"dilations": [2, 2], "pads": [8] * 4},
        {"pads": [4, 4, 4, 5]},
        {"pads": [0] * 4},
    ],
)
def test_pools_of_another_kind_stay(more):
    given = graph([pool("y", 5), pool("z", 9, **more)], {}, {"x": ("n", 3, 11, 12)}, outputs=("y", "z"))
    after, changes = rewritten(given, FOLDS)
    assert not changes
    assert [reads for reads, *_ in windows(after)] == [False, False]


@pytest.mark.parametrize(
    "rows",
    [
        [("Relu", "x", "r"), pool("a", 5), pool("b", 9, value="r")],
        [pool("a", 5), pool("b", 5, value="a")],
        [pool("a", 5)],
    ],
    ids=["of another value", "in series", "alone"],
)
def test_other_pools_stay(rows):
    given = network(*rows)
    after, changes = rewritten(given, FOLDS)
    assert not changes
    assert list(windows(after)) == list(windows(given))


def test_an_output_of_the_network_keeps_its_name():
    given = graph([pool("small", 3), pool("large", 7)], {}, {"x": ("n", 3, 9, 9)}, outputs=("large", "small"))
    after, changes = rewritten(given, FOLDS)
    assert [output.name for output in after.graph.output] == ["large", "small"]
    assert [reads for reads, *_ in windows(after)] == [False, True]
    assert len(changes) == 1


def test_a_fold_is_verified(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(network(pool("a", 5), pool("b", 9), pool("c", 13), shape=("n", 8, 20, 20)), "given.onnx")
    done = rc.fold("given.onnx")
    assert (done.verdict, bool(done.float64)) == ("passed", True)
    assert done.applied == ("pools-in-series",)
