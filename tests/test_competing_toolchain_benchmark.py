"""A row of docs/competing-toolchains.md for an arbitrary network: any batch size and thread count, FP32 and INT8."""

from __future__ import annotations

import json
import sys

import competing_toolchains.__main__ as competing_toolchains
import numpy as np
import onnx
import pytest
import torch
from competing_toolchains import arbitrary_network_row, docs_page
from competing_toolchains.arbitrary_networks import Original, write_graph
from competing_toolchains.method_row import EXACT, LOWER, MeasurementOptions
from onnx import TensorProto, helper, numpy_helper
from torch import nn

SHAPE = (3, 16, 16)
OPTIONS = MeasurementOptions(batch=8, threads=2, rounds=8, budget_s=0.1, session_loads_s=0.1)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Two convolutions and a linear layer, as a file whose batch size is dynamic, as those of PP-OCR."""
    draw = np.random.default_rng(0)
    weights = {"a": (8, 3, 3, 3), "b": (16, 8, 3, 3), "c": (16, 10)}
    given = [numpy_helper.from_array(draw.normal(0, 0.3, shape).astype("f"), name) for name, shape in weights.items()]
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["h"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Conv", ["r", "b"], ["k"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["k"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "c"], ["logits"]),
    ]
    ports = (("x", ["batch", *SHAPE]), ("logits", ["batch", 10]))
    taken, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ports)
    graph = helper.make_graph(nodes, "small", [taken], [made], given)
    path = tmp_path_factory.mktemp("network") / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return Original("small", SHAPE, file=lambda: path)


def shapes(path):
    graph = onnx.load(path).graph
    return [[dim.dim_value for dim in port.type.tensor_type.shape.dim] for port in (graph.input[0], graph.output[0])]


def test_rows_of_eight_images_on_two_threads(network, tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):  # which a row sets
        monkeypatch.setenv(name, str(tmp_path))
    exact = arbitrary_network_row.measured_exact(network, OPTIONS, tmp_path, compiled=False)
    assert shapes(tmp_path / "original.onnx") == [[8, *SHAPE], [8, 10]]
    arbitrary_network_row.prepare_lower(network, OPTIONS, tmp_path, exact)
    lower = arbitrary_network_row.measured_lower(network, OPTIONS, tmp_path)
    for row in (exact, lower):
        assert (row["batch"], row["threads"]) == (8, 2)
        assert {(deployment["batch"], deployment["threads"]) for deployment in row["ways"].values()} == {(8, 2)}
        assert f"{docs_page.KIND}, ONNX Runtime" in row["times_hand"]
        assert all(np.isfinite(list(loss.values())).all() for loss in row["losses"].values())
        assert json.loads(json.dumps(row)) is not None  # as it is kept
    assert exact["losses"][EXACT]["max_rel_error"] < 1e-4
    assert any(name.startswith(LOWER) for name in lower["times_hand"])
    text = docs_page.written([], [exact, lower])
    assert "#### Batch 8, 2 threads" in text
    assert text.count("| small | 16x16 |") == 1  # FP32 and lower precision are one row
    single = {**exact, "batch": 1, "threads": 1}
    assert docs_page.key(single) != docs_page.key(exact)
    assert docs_page.written([], [exact, lower, single]).count("| small | 16x16 |") == 2


def test_the_graph_of_a_module_has_the_batch_size_that_was_asked_for(tmp_path):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    write_graph(Original("module", SHAPE, lambda: module), module, tmp_path / "m.onnx", 8)
    assert shapes(tmp_path / "m.onnx") == [[8, *SHAPE], [8, 4]]


def test_each_batch_size_is_a_row_of_its_own(network, tmp_path, monkeypatch, capsys):
    """Rows are kept by batch size and threads: those of one image do not stand for those of eight."""
    asked = []
    monkeypatch.setattr(competing_toolchains, "NETWORKS", (network,))
    monkeypatch.setattr(competing_toolchains, "ORIGINALS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(competing_toolchains, "WORK", tmp_path)

    def prepare(_network, place, work, *, compiled):
        asked.append((place.batch, place.threads, work.name, compiled))

    monkeypatch.setattr(arbitrary_network_row, "prepare_exact", prepare)
    monkeypatch.setattr(sys, "argv", ["", "--originals", "--prepare", "--batch", "8", "--threads", "2"])
    before = torch.get_num_threads()
    try:
        competing_toolchains.main()
    finally:
        torch.set_num_threads(before)
    assert asked == [(8, 2, "small-b8-t2", False)]
    assert "small: prepared" in capsys.readouterr().out


def test_rows_go_into_the_file_that_was_named_and_no_page_is_written(network, tmp_path, monkeypatch):
    committed, page_before = (
        competing_toolchains.ORIGINALS.read_bytes(),
        (competing_toolchains.ROOT / "docs/competing-toolchains.md").read_bytes(),
    )
    recorded = json.loads(committed.splitlines()[0])
    monkeypatch.setattr(competing_toolchains, "NETWORKS", (network,))
    monkeypatch.setattr(competing_toolchains, "WORK", tmp_path)
    monkeypatch.setattr(arbitrary_network_row, "measured_exact", lambda *_, **__: recorded)
    monkeypatch.setattr(sys, "argv", ["", "--originals", "-o", str(tmp_path / "new" / "rows.jsonl")])
    before = torch.get_num_threads()
    try:
        competing_toolchains.main()
    finally:
        torch.set_num_threads(before)
    assert competing_toolchains.read_rows(tmp_path / "new" / "rows.jsonl") == [recorded]
    assert competing_toolchains.ORIGINALS.read_bytes() == committed
    assert (competing_toolchains.ROOT / "docs/competing-toolchains.md").read_bytes() == page_before
