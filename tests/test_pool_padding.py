"""Zeros around the input of a max pool. ONNX Runtime treats them as the pool's own padding, which is minus infinity."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto
from test_fold_onnx import graph

import repaconv as rc
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.pool_padding import POOL_PADDING
from repaconv.sources.fold_size_reverts import FoldEvaluation, Kept, revert_harmful
from repaconv.sources.graph_fold import folded
from repaconv.verification.float64_graphs import Float64
from repaconv.verification.graph_with_cached_outputs import Evaluated


def padded(opset, widths=(0, 0, 1, 1, 0, 0, 1, 1), value=0.0, pool="MaxPool"):
    """A convolution whose numbers are negative, zeros around them, a pool."""
    weights = {"w": np.random.default_rng(0).standard_normal((4, 3, 3, 3)), "b": np.full(4, -9.0), "v": value}
    held = {name: np.float32(numbers) for name, numbers in weights.items()} | {"p": np.array(widths)}
    rows = [("Conv", "x w b", "c"), ("Pad", "c p v", "d")]
    rows += [(pool, "d", "y", {"kernel_shape": [3, 3], "strides": [2, 2]})]
    return graph(rows, held, {"x": ("n", 3, 16, 16)}, opset=opset, kind=TensorProto.FLOAT)


def error(model, of):
    """Of what ONNX Runtime makes of a graph, against another in float64."""
    x = np.random.default_rng(1).standard_normal((2, 3, 16, 16)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return float(np.abs(session.run(None, {"x": x})[0] - Float64(of).run({"x": x})["y"]).max())


@pytest.mark.parametrize("opset", [18, 20, 23])
def test_zeros_before_a_maximum_stay_zeros(opset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = padded(opset)
    onnx.save(given, "given.onnx")
    done = rc.fold("given.onnx")
    assert [change.rewrite for change in done.changes] == ["pool-padding"]
    assert (done.verdict, bool(done.float64)) == ("passed", True)
    assert done.tolerances["onnx"] <= 1e-4
    assert error(onnx.load(done.output_files[0]), given) < 1e-5
    exported = rc.export()
    assert exported.verdict == rc.verify().verdict == "passed"
    assert error(onnx.load(exported.output_files[0]), given) < 1e-5


@pytest.mark.parametrize(
    "other",
    [{"value": 1.0}, {"pool": "AveragePool"}, {"widths": [0] * 8}, {"widths": [0, 0, 1, 1, 0, 1, 1, 1]}],
)
def test_other_padding_is_right_as_it_is_or_made_so(other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = padded(20, **other)
    onnx.save(given, "given.onnx")
    assert error(onnx.load(rc.fold("given.onnx").output_files[0]), given) < 1e-5


def test_what_a_runtime_makes_otherwise_is_no_rounding(tmp_path, monkeypatch):
    """Before opset 18 a Pad names no axes: the graph stays, and what the runtime makes of it passes no proof."""
    monkeypatch.chdir(tmp_path)
    given = padded(17)
    onnx.save(given, "given.onnx")
    assert error(given, given) > 1
    done = rc.fold("given.onnx")
    assert done.tolerances["onnx"] <= 1e-4
    assert rc.verify().links[-1].verdict == "not verified"


def test_a_rewrite_that_corrects_the_runtime_is_not_reverted():
    model = padded(20)
    refold = partial(folded, Path("given.onnx"), model)
    smaller, changes, _ = refold(())
    kept = revert_harmful(
        Kept(Evaluated(smaller), changes), Evaluated(model), refold, lambda _: FoldEvaluation(0, "it is slower")
    )
    assert [change.rewrite for change in kept.changes] == ["pool-padding"]
    assert kept.graph.model is smaller


WIDTHS = {"before": (0, 0, 1, 1, 0, 0, 1, 1), "one side": (0, 0, 0, 1, 0, 0, 2, 1), "as wide": (0, 0, 3, 1, 0, 0, 1, 1)}
RELU = [("Relu", "c", "r")]


def stem(rows, value=0.0, widths=WIDTHS["before"], **pool):
    """A convolution, operators on its output, a Pad and a MaxPool."""
    weights = {"w": np.random.default_rng(0).standard_normal((4, 3, 3, 3)), "v": np.array(value), "0": np.array(0.0)}
    more = {"p": np.array(widths), "6": np.array(6.0), "-1": np.array(-1.0)}
    made = [("Conv", "x w", "c"), *rows, ("Pad", "r p v", "d")]
    pooled = ("MaxPool", "d", "y", {"kernel_shape": [3, 3], "strides": [2, 2], **pool})
    return graph([*made, pooled], {**weights, **more}, {"x": (2, 3, 16, 15)}, opset=17)


def pads(model):
    """The operators after the rewrite, which compute the same."""
    after, _ = rewritten(model, [POOL_PADDING])
    onnx.checker.check_model(after, full_check=True)
    x = {"x": np.random.default_rng(1).standard_normal((2, 3, 16, 15))}
    before, behind = (Float64(each).run(x)["y"] for each in (model, after))
    np.testing.assert_array_equal(behind, before)
    return [node.op_type for node in after.graph.node].count("Pad")


@pytest.mark.parametrize(
    "rows",
    [
        RELU,
        [("Clip", "c 0 6", "r")],
        [("Relu", "c", "a"), ("Sigmoid", "c", "b"), ("Mul", "a b", "m"), ("Concat", "m a", "r", {"axis": 1})],
        [("Relu", "c", "a"), ("AveragePool", "a", "r", {"kernel_shape": [3, 3]})],
    ],
    ids=["Relu", "Clip", "of several", "an average"],
)
@pytest.mark.parametrize("widths", [WIDTHS["before"], WIDTHS["one side"]])
def test_zeros_around_what_is_never_negative_are_padding_of_the_pool(rows, widths):
    assert pads(stem(rows, widths=widths)) == 0


def test_minus_infinity_is_padding_of_the_pool_and_is_added_to_its_own():
    assert pads(stem([("Identity", "c", "r")], value=-np.inf, pads=[0, 1, 1, 0])) == 0
    assert pads(stem(RELU, pads=[0, 1, 1, 0])) == 0


@pytest.mark.parametrize(
    ("rows", "other"),
    [
        ([("Identity", "c", "r")], {}),
        ([("LeakyRelu", "c", "r")], {}),
        ([("Clip", "c -1 6", "r")], {}),
        ([("Clip", "c", "r")], {}),
        ([("Clip", "c 0 -1", "r")], {}),
        ([("ReduceMax", "c", "m", {"keepdims": 0}), ("Clip", "c 0 m", "r")], {}),
        ([("Relu", "c", "a"), ("Concat", "a c", "r", {"axis": 1})], {}),
        (RELU, {"value": 1.0}),
        (RELU, {"widths": WIDTHS["as wide"]}),
        (RELU, {"ceil_mode": 1}),
        (RELU, {"dilations": [2, 1]}),
    ],
    ids=[
        "negative",
        "LeakyRelu",
        "Clip",
        "no limit",
        "below 0",
        "computed",
        "a part",
        "ones",
        "a window of zeros",
        "ceil",
        "dilated",
    ],
)
def test_zeros_that_may_be_the_maximum_stay(rows, other):
    assert pads(stem(rows, **other)) == 1


def test_a_pad_that_another_operator_reads_stays():
    model = stem(RELU)
    model.graph.node.append(onnx.helper.make_node("Sin", ["d"], ["z"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", TensorProto.DOUBLE, None))
    assert pads(onnx.shape_inference.infer_shapes(model)) == 1


# --- Zeros before an average


def average(value=0.0, widths=WIDTHS["before"], **more):
    """A convolution, a Pad and an AveragePool."""
    model = stem([("Identity", "c", "r")], value, widths, **more)
    model.graph.node[-1].op_type = "AveragePool"
    return model


@pytest.mark.parametrize("widths", [WIDTHS["before"], WIDTHS["one side"]])
@pytest.mark.parametrize("more", [{}, {"pads": [1, 1, 0, 0], "count_include_pad": 1}, {"strides": [1, 1]}])
def test_zeros_before_an_average_that_counts_them_are_its_padding(widths, more):
    assert pads(average(widths=widths, **more)) == 0


@pytest.mark.parametrize("widths", [WIDTHS["before"], WIDTHS["one side"]])
def test_the_runtime_counts_zeros_that_became_padding_of_an_average(widths):
    given = padded(17, widths, pool="AveragePool")
    after, _ = rewritten(given, [POOL_PADDING])
    assert [node.op_type for node in after.graph.node] == ["Conv", "AveragePool"]
    assert error(after, given) < 1e-5


@pytest.mark.parametrize(
    "more",
    [{"value": 1.0}, {"pads": [1, 1, 0, 0]}, {"widths": WIDTHS["as wide"]}, {"ceil_mode": 1}],
    ids=["ones", "padding that is not counted", "as wide as the pool", "rounded up"],
)
def test_other_numbers_before_an_average_stay(more):
    assert pads(average(**more)) == 1
