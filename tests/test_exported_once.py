"""The suite's own memory of exports: it answers as the exporter does, and only what was really asked before."""

from __future__ import annotations

import copy
from unittest.mock import patch

import exported_once
import pytest
import torch
from conftest import TINY
from exported_once import Program, question_of
from torch import nn

from repaconv.backbones.metaformer import BACKBONE, MetaFormer
from repaconv.exporters import to_onnx
from repaconv.exporters.to_onnx import to_onnx as export


@pytest.fixture
def net():
    torch.manual_seed(0)
    return BACKBONE.deploy(TINY).eval()


def written(net, **more):
    given = {"output": "logits", "opset": 18, "batch": 1, "free_size": False, **more}
    return export(net, (3, 32, 32), **given).SerializeToString()


def test_what_is_remembered_is_what_a_fresh_export_gives(net, tmp_path, monkeypatch):
    monkeypatch.setenv(exported_once.FOLDER, str(tmp_path))
    first = written(net)
    assert len(list(tmp_path.glob("*.onnx"))) == 1
    with patch.object(exported_once, "Program", wraps=Program) as remembered:
        assert written(copy.deepcopy(net)) == first
        assert remembered.call_count == 1
        monkeypatch.delenv(exported_once.FOLDER)
        assert written(net) == first
        assert remembered.call_count == 1
    with patch.object(to_onnx, "ONE_FILE_BYTES", 1), patch.object(to_onnx, "INLINE_BYTES", 500):
        found = []
        for name in ("fresh", "kept"):
            (tmp_path / name).mkdir()
            found.append((written(net, scratch=tmp_path / name), (tmp_path / name / to_onnx.DATA).read_bytes()))
            monkeypatch.setenv(exported_once.FOLDER, str(tmp_path))
    assert found[0] == found[1]


def bits(net):
    net.head.bias.data.view(torch.int32)[0] ^= 1


def equal(net):
    net.network[1].proj.bias = nn.Parameter(net.network[2][0].norm1.bias.detach().clone())


def shared(net):
    net.network[1].proj.bias = net.network[2][0].norm1.bias


def attribute(net):
    net.network[0][0].mlp.act.approximate = "tanh"


def test_another_question_is_asked_of_the_exporter(net):
    x = torch.zeros(2, 3, 32, 32)
    asked = [question_of(net, (x,), opset_version=18), question_of(net, (x,), opset_version=20)]
    asked.append(question_of(net, (x[:1],), opset_version=18))
    for change in (bits, equal, shared, attribute, nn.Module.train):
        change(other := copy.deepcopy(net))
        asked.append(question_of(other, (x,), opset_version=18))
    assert None not in asked
    assert len(set(asked)) == len(asked)
    assert question_of(copy.deepcopy(net), (x.clone(),), opset_version=18) == asked[0]


def test_what_cannot_be_written_down_or_is_patched_is_no_question(net):
    x = torch.zeros(1, 3, 32, 32)
    right = MetaFormer.forward
    with patch.object(MetaFormer, "forward", lambda self, images: right(self, images) + 1):
        assert question_of(net, (x,)) is None
    assert question_of(net, (x,))
    net.head.forward = lambda features: features
    assert question_of(net, (x,)) is None
