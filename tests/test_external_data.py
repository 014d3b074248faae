"""Graphs above 2 GiB have their weights in a file of external data. The limit is lowered here;
benchmarks/export_huge.py has the full size.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

import repaconv as rc
from repaconv.core import plugins
from repaconv.core.errors import Refused
from repaconv.onnx_export import torch_exporter

RUN = Path("repaconv-out/tiny")


@pytest.fixture
def large(tiny, monkeypatch):
    monkeypatch.setattr(torch_exporter, "ONE_FILE_BYTES", 1)
    monkeypatch.setattr(torch_exporter, "INLINE_BYTES", 500)
    rc.fold(tiny)


@pytest.mark.parametrize("target", ["x86-64", "jetson-nano"])
def test_the_whole_way_with_weights_of_their_own(large, target):
    done = rc.export(target=target, with_preprocessing=target == "x86-64")
    assert done.verdict == "passed"
    assert done.data is not None
    path = RUN / done.payload.path
    assert path.with_name(f"{path.name}.data").stat().st_size == done.data.bytes
    model = onnx.load(path, load_external_data=False)
    places = {entry.value for w in model.graph.initializer for entry in w.external_data if entry.key == "location"}
    assert places == {f"{path.name}.data"}
    onnx.checker.check_model(str(path), full_check=True)
    found = rc.verify()
    assert found.verdict == "passed"
    assert next(link for link in found.links if link.name == "onnx").verdict == "passed"
    if target == "x86-64":  # the other is measured on its board
        assert rc.bench(rounds=2).agreement.verdict == "passed"
    assert not [path for path in RUN.iterdir() if path.name.startswith(".repaconv-work-")]


def test_the_same_bytes_twice_and_gone_when_they_fit_again(large, monkeypatch):
    first = rc.export()
    assert rc.export().data == first.data
    monkeypatch.setattr(torch_exporter, "ONE_FILE_BYTES", 2**31)
    assert rc.export().data is None
    assert not (RUN / "model.onnx.data").exists()


def test_changed_weights_are_found(large):
    rc.export()
    path = RUN / "model.onnx.data"
    path.write_bytes(bytes(8) + path.read_bytes()[8:])
    with pytest.raises(Refused, match=r"model\.onnx\.data was changed"):
        rc.verify()
    path.unlink()
    with pytest.raises(Refused, match="is missing"):
        rc.bench()


def test_lower_precision_of_such_a_net_is_refused(large):
    with pytest.raises(Refused, match="more than 2 GiB"):
        rc.export(precision="fp16")
    assert not (RUN / "model.fp16.onnx").exists()
    assert not [path for path in RUN.iterdir() if path.name.startswith(".repaconv-work-")]


@pytest.mark.slow
def test_bench_measures_pyras_training_form():
    method = plugins.load(plugins.METHODS, "pyra")
    torch.save({"state_dict": method.example("tiny", seed=1)}, "pyra.pth")
    rc.fold("pyra.pth", settings={"num_heads": "3"})
    rc.export()
    done = rc.bench(rounds=2)
    assert [each.name for each in done.latencies] == ["deploy form", "training form"]
    assert not done.note
    assert done.agreement.verdict == "passed"
