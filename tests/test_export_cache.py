"""The cache of torch exports for the test suite: a cached export equals a fresh one, and a changed module is exported
again.
"""

from __future__ import annotations

import copy
from unittest.mock import patch

import export_cache
import pytest
import torch
from conftest import TINY
from export_cache import cache_key
from torch import nn

from repaconv.algebra import convolution_kernels
from repaconv.backbones.metaformer import BACKBONE, MetaFormer
from repaconv.methods.riformer import METHOD
from repaconv.methods.riformer.paper_equations import RIFormerBlock
from repaconv.onnx_export import torch_exporter
from repaconv.onnx_export.torch_exporter import to_onnx as export


@pytest.fixture
def net():
    torch.manual_seed(0)
    return BACKBONE.deploy(TINY).eval()


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What torch's exporter is asked; nothing is remembered yet."""
    exporter, calls = torch.onnx.export.__wrapped__, []

    def export(*given, **named):
        calls.append(named)
        return exporter(*given, **named)

    monkeypatch.setenv(export_cache.FOLDER, str(tmp_path))
    monkeypatch.setattr(torch.onnx, "export", export_cache.cached(export))
    return calls


def written(net, **more):
    given = {"output": "logits", "opset": 18, "batch": 1, "dynamic_size": False, **more}
    return export(net, (3, 32, 32), **given).SerializeToString()


def written_with_external_data(net, folder):
    """The graph and, as of a very large network, its weights in a file of their own."""
    folder.mkdir()
    return written(net, scratch=folder), (folder / torch_exporter.DATA).read_bytes()


def weighed(net, seed):
    """The same with other weights, some of them equal and some zero."""
    other, draw = copy.deepcopy(net), torch.Generator().manual_seed(seed)
    for weight in (*other.parameters(), *other.buffers()):
        weight.data.copy_(torch.randint(0, 3, weight.shape, generator=draw))
    return other


def test_what_is_remembered_is_what_a_fresh_export_gives(net, asked, tmp_path, monkeypatch):
    first, other = written(net), weighed(net, 1)
    assert written(copy.deepcopy(net)) == first
    found = written(other)
    assert found != first
    assert len(asked) == 1
    with patch.object(torch_exporter, "ONE_FILE_BYTES", 1), patch.object(torch_exporter, "INLINE_BYTES", 500):
        kept = written_with_external_data(other, tmp_path / "kept")
        monkeypatch.delenv(export_cache.FOLDER)
        assert written_with_external_data(other, tmp_path / "fresh") == kept
    assert written(other) == found
    assert len(asked) == 3


def bits(net):
    net.head.bias.data.view(torch.int32)[0] ^= 1


def equal(net):
    net.network[1].proj.bias = nn.Parameter(net.network[2][0].norm1.bias.detach().clone())


def shared(net):
    net.network[1].proj.bias = net.network[2][0].norm1.bias


def attribute(net):
    net.network[0][0].mlp.act.approximate = "tanh"


def ones(net):
    net.head.shift = torch.ones(2)  # no weight, but a constant of the graph


def zeros(net):
    net.head.shift = torch.zeros(2)


def test_another_question_is_asked_of_the_exporter(net):
    x = torch.zeros(2, 3, 32, 32)
    asked = [cache_key(net, (x,), opset_version=18), cache_key(net, (x,), opset_version=20)]
    asked.append(cache_key(net, (x[:1],), opset_version=18))
    traced = [cache_key(net, (x,), with_values=False)]
    for change in (bits, equal, shared, attribute, ones, zeros, nn.Module.train):
        change(other := copy.deepcopy(net))
        asked.append(cache_key(other, (x,), opset_version=18))
        traced.append(cache_key(other, (x,), with_values=False))
    assert None not in asked
    assert len(set(asked)) == len(asked)
    assert cache_key(copy.deepcopy(net), (x.clone(),), opset_version=18) == asked[0]
    assert traced[:3] == traced[:1] * 3  # the values of weights are all that it does not depend on
    assert len(set(traced)) == len(traced) - 2


def test_what_cannot_be_written_down_or_is_patched_is_no_question(net):
    x = torch.zeros(1, 3, 32, 32)
    right = MetaFormer.forward
    with patch.object(MetaFormer, "forward", lambda self, images: right(self, images) + 1):
        assert cache_key(net, (x,)) is None
    with patch.object(convolution_kernels, "eye", lambda width, rank: None):
        assert cache_key(net, (x,)) is None
    with patch.object(RIFormerBlock, "forward", lambda self, images: images):
        assert cache_key(net, (x,))
        assert cache_key(METHOD.published("s12").training(), (x,)) is None
    net.head.forward = lambda features: features
    assert cache_key(net, (x,)) is None
