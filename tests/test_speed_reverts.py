"""Rewrites that a measurement shows to be slower are reverted and reported, one by one. An unclear loss reverts
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from planted_graph_faults import NETS

import repaconv as rc
from repaconv.core.run_folder import Run
from repaconv.results import Ratio
from repaconv.rewrites.fold.fold_pipeline import without
from repaconv.sources.fold_size_reverts import FoldEvaluation, Kept, refold_without, revert_harmful
from repaconv.sources.graph_fold import folded
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.fold import speed_reverts
from repaconv.stages.fold.speed_reverts import evaluate_speed, revert_slower
from repaconv.verification import graph_with_cached_outputs
from repaconv.verification.graph_with_cached_outputs import Evaluated


@pytest.fixture
def normed() -> onnx.ModelProto:
    """A convolution and its BatchNormalization, and a scale that goes into a linear layer."""
    random = np.random.default_rng(0)
    weights = {
        "w": random.standard_normal((4, 3, 3, 3)),
        **{name: 1 + random.random(4) for name in ("scale", "bias", "mean", "var")},
        "s": 1 + random.random(6),
        "m": random.standard_normal((6, 5)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["1"], "conv"),
        helper.make_node("BatchNormalization", ["1", "scale", "bias", "mean", "var"], ["2"], "norm"),
        helper.make_node("Relu", ["2"], ["3"], "relu"),
        helper.make_node("Mul", ["3", "s"], ["4"], "gain"),
        helper.make_node("MatMul", ["4", "m"], ["y"], "head"),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 6, 5])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    made = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    return onnx.shape_inference.infer_shapes(made)


def as_fast(times: float) -> Ratio:
    return Ratio(
        subject="folded", other="given", median=times, low=times, high=times, confidence=0.95, p10=times, p90=times,
        verdict="no difference shown",
    )  # fmt: skip


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def without_losses(model: onnx.ModelProto, speed: Callable[[onnx.ModelProto], float]) -> Kept:
    refold, given = partial(folded, Path("net.onnx"), model), Evaluated(model)

    def evaluate(one: Kept) -> FoldEvaluation:
        return evaluate_speed(as_fast(speed(one.graph.model)) if one.changes else None, "a machine")

    smaller, changes, _ = refold(())
    return revert_harmful(Kept(Evaluated(smaller), changes), given, refold, evaluate)


def test_what_makes_it_slower_is_reverted_and_the_rest_stays(normed):
    found = without_losses(normed, lambda model: 1.1 if "BatchNormalization" in operators(model) else 0.9)
    assert found.reverts.names == ("convolution",)
    assert found.reverts.messages == (
        "convolution: reverted, because with it the graph runs at 0.90x (0.90x to 0.90x) the original's speed, "
        "measured on a machine",
    )
    assert operators(found.graph.model) == ["Conv", "BatchNormalization", "Relu", "MatMul"]


@pytest.mark.parametrize("times", [0.99, 1.0, 2.0])
def test_an_unclear_loss_reverts_nothing(normed, times):
    found = without_losses(normed, lambda model: times)
    assert operators(found.graph.model) == ["Conv", "Relu", "MatMul"]
    assert not found.reverts.names


def test_where_everything_is_slower_the_original_graph_remains(normed):
    found = without_losses(normed, lambda model: 0.5)
    assert set(found.reverts.names) == {"convolution", "affine"}
    assert found.graph.model is normed


def test_a_revert_that_changes_nothing_is_tried_once(normed):
    """Where the fold stays as it is whatever is reverted of it, the graph as given is left."""
    smaller, changes, _ = folded(Path("net.onnx"), normed)
    always = folded(Path("net.onnx"), normed)
    fold, slower = Kept(Evaluated(smaller), changes), FoldEvaluation(0, "it is slower")
    found = revert_harmful(fold, Evaluated(normed), lambda _: always, lambda _: slower)
    assert found.graph.model is normed
    assert not found.changes
    assert sorted(found.reverts.names) == sorted({change.rewrite for change in changes})


def test_what_looks_for_what_another_makes_goes_with_it():
    assert {"affine", "join", "heads"}.isdisjoint(fold.name for fold in without(["affine"]))
    assert "finish" in {fold.name for fold in without(["affine"])}


def test_a_run_folds_again_as_it_was_folded(normed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(normed, "net.onnx")
    first, second = (rc.fold("net.onnx", out=out, measure=False) for out in ("one", "two"))
    assert (tmp_path / "one/net.folded.onnx").read_bytes() == (tmp_path / "two/net.folded.onnx").read_bytes()
    assert first.reverted == second.reverted == ()
    assert first.options == ("--no-measure",)
    subject = source_model_of(Run(tmp_path / "one"))
    object.__setattr__(subject, "folded", first.model_copy(update={"reverted": ("convolution",)}))
    assert "BatchNormalization" in operators(subject.exact.model)


@pytest.mark.parametrize(("faster", "calls"), [(1.0, [(8, 2)]), (1.5, [(8, 2)]), (0.9, [(8, 2), (20, None)])])
def test_a_fold_that_is_no_slower_at_first_is_not_measured_again(normed, monkeypatch, faster, calls):
    given = Evaluated(normed)
    smaller, changes, _ = folded(Path("net.onnx"), normed)
    seen = []

    def measured(_given, _folded, _call, rounds, loads=None):
        seen.append((rounds, loads))
        if loads is None:
            return None  # inconclusive
        samples = {"given": np.full(rounds, faster), "folded": np.ones(rounds)}
        return SimpleNamespace(samples_ms=samples, ratio=lambda *_: SimpleNamespace(median=faster))

    monkeypatch.setattr(speed_reverts, "_measured", measured)
    monkeypatch.setattr(speed_reverts, "_usual_inference", lambda _: SimpleNamespace(feeds={}, rounds=20))
    whole = Kept(Evaluated(smaller), changes)
    assert revert_slower(whole, given, partial(folded, Path("net.onnx"), normed)) is whole
    assert seen == calls


def test_a_graph_of_microseconds_is_not_measured(normed):
    given = Evaluated(normed)
    smaller, changes, _ = folded(Path("net.onnx"), normed)
    whole = Kept(Evaluated(smaller), changes)
    assert revert_slower(whole, given, partial(folded, Path("net.onnx"), normed)) is whole


def test_a_large_fold_is_released_while_another_is_made_and_rounded_again(monkeypatch):
    model = NETS["encoder"].model()
    made = folded(Path("net.onnx"), model)
    fold, written = (
        Kept(Evaluated(made.model, in_float64=made.in_float64), made.changes),
        made.model.SerializeToString(),
    )
    held = []

    def refold(names):
        held.append(vars(fold.graph)["_model"])
        return folded(Path("net.onnx"), model, names)

    name = made.changes[0].rewrite
    refold_without(fold, name, refold, "")
    assert held.pop() is made.model  # few weights stay
    monkeypatch.setattr(graph_with_cached_outputs, "KEPT_DURING_FOLD_BYTES", 0)
    refold_without(fold, name, refold, "")
    assert held.pop() is None
    assert fold.graph.model.SerializeToString() == written
    alone = Evaluated(made.model)
    alone.release_while_folding()
    assert alone.model is made.model  # nothing else has its weights
