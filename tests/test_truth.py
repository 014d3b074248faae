"""Outputs that rounding moves far are judged against float64: sound folds pass, and wrong ones are still found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from foreign_faults import F, Net, norm, normal, weight
from test_fold_proof import planted

import repaconv as rc
from repaconv.errors import GateFailed


def ill_conditioned(*last: tuple[Any, ...], kind: int = F) -> onnx.ModelProto:
    """The difference of large numbers behind a convolution and its norm: float32 keeps three digits of it."""
    rows = [
        ("Conv", "x w", "a", {"pads": [1] * 4}), ("BatchNormalization", "a nw nb nm nv", "b"),
        ("Add", "b high", "c"), ("Relu", "c", "d"), ("Sub", "d high", "e"),
        *(last or [("Identity", "e", "y")]),
    ]  # fmt: skip
    weights = {"w": normal(4, 4, 3, 3), "high": np.array(3e4), **norm(4)}
    return Net(rows, weights, {"x": (F, (1, 4, 8, 8))}, {"y": kind}).model()


def test_a_sound_fold_passes_by_float64_and_tells_how_far_rounding_goes():
    onnx.save(ill_conditioned(), "net.onnx")
    (link,) = rc.fold("net.onnx").links
    assert link.verdict == "passed"
    assert "against float64" in link.note
    assert "the graph as given is off by" in link.note


@pytest.mark.parametrize("by", [0.1, 1e-3, 3e-4])
def test_a_wrong_fold_is_found_there(monkeypatch, by):
    onnx.save(ill_conditioned(), "net.onnx")
    planted(monkeypatch, weight("nb", lambda b: b * np.float32(1 + by)))
    with pytest.raises(GateFailed, match="numbers are wrong"):
        rc.fold("net.onnx", out="wrong.onnx")
    assert not Path("wrong.onnx").exists()


def test_classes_that_hang_on_a_rounding_are_left_out_and_wrong_ones_are_not(monkeypatch):
    onnx.save(ill_conditioned(("ArgMax", "e", "y", {"axis": 1}), kind=onnx.TensorProto.INT64), "net.onnx")
    (link,) = rc.fold("net.onnx").links
    assert link.verdict == "passed"
    planted(monkeypatch, weight("nw", lambda g: -g))
    with pytest.raises(GateFailed):
        rc.fold("net.onnx", out="wrong.onnx")
