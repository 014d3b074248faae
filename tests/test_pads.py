"""Zeros around what a maximum is taken of, which ONNX Runtime takes for the pool's own padding: minus infinity."""

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
from repaconv.sources.fold_size_reverts import FoldEvaluation, Kept, revert_harmful
from repaconv.verification.evaluated_graph import Evaluated
from repaconv.verification.float64_graphs import Float64
from repaconv.verification.onnx_model_loading import folded


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


def test_what_cures_is_taken_back_for_no_harm():
    model = padded(20)
    refold = partial(folded, Path("given.onnx"), model)
    smaller, changes, _ = refold(())
    kept = revert_harmful(
        Kept(Evaluated(smaller), changes), Evaluated(model), refold, lambda _: FoldEvaluation(0, "it is slower")
    )
    assert [change.rewrite for change in kept.changes] == ["pool-padding"]
    assert kept.graph.model is smaller
