"""A graph in which only chains of views become shorter, or equal nodes one, is written smaller."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from planted_graph_faults import F, Net

import repaconv as rc
from repaconv.rewrites.fold.fold_pipeline import without
from repaconv.rewrites.fold.shorter_views_and_equal_nodes import FEWER_NODES
from repaconv.sources.graph_fold import folded

HERE, BACK = {"perm": [0, 2, 3, 1]}, {"perm": [0, 3, 1, 2]}
SIZES = {"rows": np.array([0, -1]), "grid": np.array([0, 4, 16]), "scale": np.full((4, 1, 1), 2.0)}
SMALLER = {
    "transposes": ([("Relu", "x", "a"), ("Transpose", "a", "b", HERE), ("Transpose", "b", "c", BACK)], ["Relu"]),
    "reshapes": (
        [("Relu", "x", "a"), ("Reshape", "a rows", "b"), ("Reshape", "b grid", "c")], ["Relu", "Reshape"],
    ),
    "equal nodes": ([("Relu", "x", "a"), ("Relu", "x", "b"), ("Sin", "a", "d"), ("Mul", "d b", "c")],
                    ["Relu", "Sin", "Mul"]),
}  # fmt: skip


def net(rows: list) -> onnx.ModelProto:
    return Net([*rows, ("Exp", "c", "y")], SIZES, {"x": (F, ("n", 4, 4, 4))}, {"y": F}).model()


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("name", SMALLER)
def test_it_is_written_smaller_and_verified(name, tmp_path):
    rows, left = SMALLER[name]
    onnx.save(net(rows), tmp_path / "net.onnx")
    done = rc.fold(tmp_path / "net.onnx", out=tmp_path / "run", measure=False)
    assert operators(onnx.load(next((tmp_path / "run").glob("*.onnx")))) == [*left, "Exp"]
    assert (done.verdict, [change.rewrite for change in done.changes]) == ("passed", ["nodes"])
    assert done.nodes == (len(rows) + 1, len(left) + 1)


def test_it_is_no_change_where_another_fold_changes_the_graph():
    rows = [("Mul", "x scale", "a"), ("Mul", "a scale", "b"), ("Transpose", "b", "d", HERE), ("Relu", "d", "e"),
            ("Transpose", "e", "c", BACK)]  # fmt: skip
    found = folded(Path("net.onnx"), net(rows))
    assert {change.rewrite for change in found.changes} >= {"affine"}
    assert FEWER_NODES.name not in {change.rewrite for change in found.changes}


def test_without_it_and_where_nothing_is_smaller_the_graph_is_the_same():
    model = net(SMALLER["transposes"][0])
    assert FEWER_NODES not in without(["nodes"])
    assert folded(Path("net.onnx"), model, ["nodes", "transposes"]).model is model
    least = net([("Relu", "x", "a"), ("Reshape", "a rows", "c")])
    assert folded(Path("net.onnx"), least).model is least
