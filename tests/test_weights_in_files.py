"""Float64 weights of a fold, and weights of sessions that are measured, are in temporary files and not in memory."""

from __future__ import annotations

import resource
import tempfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from planted_graph_faults import F, Net
from test_fold_onnx import graph

from repaconv.graph import weights_in_files
from repaconv.graph.float64_rewriting import is_only_rounded, rewritten_in_float64, rounded_to_float32
from repaconv.graph.weights_in_files import in_file
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.verification.model_runners import load_onnx, weights_in_file

RANDOM = np.random.default_rng(7)


def large() -> Net:
    """Two convolutions of 1.2 million numbers, each with a norm that folds into it."""
    rows, weights = [], {}
    for place, (read, written) in enumerate(("xc", "cy")):
        rows += [("Conv", f"{read} w{place}", f"n{place}"), ("BatchNormalization", f"n{place} s b m v", written)]
        weights[f"w{place}"] = RANDOM.standard_normal((512, 512, 3, 3)) / 68
    weights |= {"s": RANDOM.random(512) + 0.5, "b": RANDOM.random(512), "m": RANDOM.random(512)}
    weights["v"] = RANDOM.random(512) + 0.5
    return Net(rows, weights, {"x": (F, (1, 512, 6, 6))}, {"y": F})


def tensors(*shapes: tuple[int, ...], kind=np.float64) -> list[ir.TensorProtocol]:
    return [ir.tensor(RANDOM.standard_normal(shape).astype(kind), name=f"w{shape}") for shape in shapes]


def test_weights_are_read_from_the_file_as_they_were_by_several_threads():
    given = [*tensors((1000, 700), (), (0, 3)), *tensors((1000, 1000), kind=np.float32)]
    found = in_file(given)
    with ThreadPoolExecutor(4) as pool:
        read = [*pool.map(lambda weight: found[weight].numpy(), given * 5)]
    for weight in given:
        known = found[weight].name, found[weight].dtype, found[weight].shape
        assert known == (weight.name, weight.dtype, weight.shape)
    for weight, numbers in zip(given * 5, read, strict=True):
        assert numbers.dtype == weight.numpy().dtype
        np.testing.assert_array_equal(numbers, weight.numpy())


def test_few_weights_and_those_that_do_not_fit_onto_the_disk_stay_in_memory(monkeypatch):
    assert in_file(tensors((100, 100))) == {}

    def full(**_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights_in_files.tempfile, "TemporaryFile", full)
    assert in_file(tensors((1024, 1024))) == {}


def test_weights_that_were_written_before_the_disk_was_full_are_read_from_the_file():
    given = tensors((700, 1000), (1000, 1000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**7, limits[1]))  # Python ignores the signal: a write fails instead
    try:
        found = in_file(given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*found] == given[:1]
    np.testing.assert_array_equal(found[given[0]].numpy(), given[0].numpy())


def test_a_fold_does_not_hold_its_weights_in_float64():
    model = large().model()
    tracemalloc.start()
    exact, changes = rewritten_in_float64(model, FOLDS)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert changes
    assert held < sum(weight.nbytes for weight in exact.weights.values()) / 4
    assert is_only_rounded(rounded_to_float32(exact), exact)


@pytest.mark.parametrize("timed", [True, False])
def test_several_sessions_map_one_file_that_is_removed_afterwards(timed, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = large().model()
    with weights_in_file(model) as (bare, folder):
        assert isinstance(folder, Path)
        sessions = [load_onnx(bare, folder, timed=timed) for _ in range(2)]
        assert len(list(tmp_path.glob("repaconv-*"))) == 1
    assert not list(tmp_path.glob("repaconv-*"))
    feeds = {"x": RANDOM.standard_normal((1, 512, 6, 6)).astype(np.float32)}
    whole = load_onnx(model.SerializeToString()).run(feeds)["y"]
    for session in sessions:
        np.testing.assert_array_equal(session.run(feeds)["y"], whole)


def test_the_shape_of_a_weight_that_is_in_a_file_is_in_the_graph(monkeypatch):
    """By which ONNX Runtime infers that of an Expand, and which it does not read from a file."""
    monkeypatch.setattr("repaconv.verification.model_runners.FILE_BYTES", 1)
    rows = [("Shape", "w", "s", {"end": 1}), ("ReduceMean", "x", "m", {"keepdims": 0}), ("Expand", "m s", "b")]
    weights = {"w": np.ones((64, 32, 1, 1), np.float32)}
    model = graph([*rows, ("Conv", "x w b", "y")], weights, {"x": (1, 32, 2, 2)}, kind=onnx.TensorProto.FLOAT)
    y = load_onnx(model).run({"x": np.ones((1, 32, 2, 2), np.float32)})["y"]
    np.testing.assert_array_equal(y, np.full((1, 64, 2, 2), 33))
