"""Scales, shifts and linear layers before recurrent layers become part of their weights."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto
from test_fold_onnx import graph
from test_hard_swish import single

import repaconv as rc
from repaconv.graph.element_type_conversion import retyped
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.rewrites.fold.layers_before_lstm_and_gru import RECURRENT

RANDOM = np.random.default_rng(0)
T, B, C, H = 5, 2, 6, 4
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
SHAPE = (T, B, C)


def weights(operator="LSTM", directions=1, width=C, inside=C):
    """Constants of a layer of this width, with a scale and a shift of channels and a linear layer before it."""
    gates = GATES[operator] * H
    shapes = {"w": (directions, gates, width), "r": (directions, gates, H), "b": (directions, 2 * gates)}
    shapes |= {"s": (width,), "t": (width,), "m": (inside, width), "steps": (T, 1, 1)}
    shapes |= dict.fromkeys(("g", "h", "n"), (width,))
    found = {name: RANDOM.standard_normal(shape) / 2 for name, shape in shapes.items()}
    return {**found, "v": 1 + RANDOM.random(width)}


def layer(x, operator="LSTM", bias="b", **attributes):
    return operator, f"{x} w r {bias}", "y", {"hidden_size": H, **attributes}


def kinds(rows, numbers=None, shape=SHAPE, outputs=("y",), image=SHAPE, folds=FOLDS):
    model = graph(rows, numbers or weights(), {"x": shape}, outputs, opset=14)
    return operators_after_folding(model, RANDOM.standard_normal(image), folds)


@pytest.mark.parametrize("shape", [SHAPE, ("T", "B", C)], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("operator", GATES)
@pytest.mark.parametrize("bias", ["b", ""], ids=["bias", "no bias"])
def test_a_scale_a_shift_and_a_linear_layer(operator, bias, shape):
    rows = [("Mul", "x s", "a"), ("MatMul", "a m", "c"), ("Add", "c t", "d"), layer("d", operator, bias)]
    assert kinds(rows, weights(operator), shape) == [operator]


def test_both_directions():
    rows = [("MatMul", "x m", "a"), ("Sub", "t a", "c"), layer("c", "GRU", direction="bidirectional")]
    assert kinds(rows, weights("GRU", 2), folds=[RECURRENT]) == ["GRU"]


def test_a_batch_norm_and_transposes_between():
    """BatchNorm acts on [B, C, T]."""
    back = {"perm": [2, 0, 1]}
    rows = [("BatchNormalization", "x g h n v", "a"), ("Transpose", "a", "c", back), layer("c")]
    assert kinds(rows, weights(), (B, C, T), image=(B, C, T)) == ["Transpose", "LSTM"]


def test_a_linear_layer_on_batches_of_sequences():
    rows = [("MatMul", "x m", "a"), ("Add", "a t", "c"), ("Transpose", "c", "d", {"perm": [1, 0, 2]}), layer("d")]
    assert kinds(rows, shape=(B, T, C), image=(B, T, C)) == ["Transpose", "LSTM"]


def test_states_that_the_layer_starts_from_and_all_outputs():
    numbers = {**weights(), "0": RANDOM.standard_normal((1, B, H))}
    rows = [("MatMul", "x m", "a"), ("LSTM", "a w r b - 0 0", "y z c", {"hidden_size": H})]
    for outputs in (("y", "z", "c"), ("z",)):
        model = graph(rows, numbers, {"x": SHAPE}, outputs, opset=14)
        model.graph.node[1].input[4] = ""
        assert operators_after_folding(model, RANDOM.standard_normal(SHAPE)) == ["LSTM"]


def test_a_linear_layer_that_reduces_channels_stays():
    numbers = weights(width=2, inside=C)
    assert kinds([("MatMul", "x m", "a"), ("Add", "a t", "c"), layer("c")], numbers) == ["MatMul", "LSTM"]
    assert kinds([("MatMul", "x m", "a"), layer("a")], weights(width=12, inside=C)) == ["LSTM"]


SCALE, INSIDE, SUM = ("Mul", "x s", "a"), ("LSTM", "a w r b", "z", {"hidden_size": H}), ("Add", "z k", "y")
NOT_FOLDED = {
    "per step": [("Mul", "x steps", "a"), layer("a")],
    "read elsewhere": [SCALE, INSIDE, ("ReduceMax", "a", "k", {"keepdims": 0}), ("Add", "z k", "y")],
    "two layers": [SCALE, INSIDE, ("LSTM", "a w r b", "k", {"hidden_size": H, "direction": "reverse"}), SUM],
    "a shared weight": [SCALE, INSIDE, ("ReduceMax", "w", "k", {"keepdims": 0}), SUM],
}


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_what_stays(name):
    assert "Mul" in kinds(NOT_FOLDED[name], folds=[RECURRENT])


def test_an_output_stays():
    assert kinds([("Mul", "x s", "a"), layer("a")], outputs=("y", "a")) == ["Mul", "LSTM"]


def test_a_computed_weight_stays():
    rows = [("Mul", "x s", "a"), ("ReduceMax", "x", "k", {"keepdims": 0}), ("Mul", "w k", "u")]
    assert kinds([*rows, ("LSTM", "a u r b", "y", {"hidden_size": H})])[-1] == "LSTM"


@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16"])
def test_types(kind):
    rows = [("MatMul", "x m", "a"), ("Add", "a t", "c"), layer("c")]
    model = retyped(graph(rows, weights(), {"x": SHAPE}, opset=14), {TensorProto.DOUBLE: getattr(TensorProto, kind)})
    after, changes = rewritten(model, [RECURRENT])
    onnx.checker.check_model(after, full_check=True)
    assert [change.description for change in changes] == ["Add -> LSTM", "MatMul -> LSTM"]


def test_a_folded_file_is_verified():
    rows = [("MatMul", "x m", "a"), ("Add", "a t", "c"), layer("c", direction="bidirectional")]
    onnx.save(single(graph(rows, weights(directions=2), {"x": ("T", "B", C)}, opset=14)), "net.onnx")
    done = rc.fold("net.onnx", measure=False)
    assert done.verdict == "passed"
    assert done.operators == {"LSTM": 1}
