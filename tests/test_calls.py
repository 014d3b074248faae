"""A network that is called otherwise than with one image, or gives something else than tensors, is told so."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import repaconv as rc
from repaconv.checkpoints.checkpoint_reader import read_checkpoint
from repaconv.core.errors import GateFailed, Refused
from repaconv.sources.library_preprocessing import own_channels, own_size
from repaconv.sources.named_architectures import Architecture, built

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(1, 8, 2, 2))  # of four axes, and no layer's
        self.stem = nn.Conv2d(3, 8, 4, 4)

    def forward(self, x):
        return self.stem(x) + self.place

class Two(Net):
    def forward(self, x, depth):
        return self.stem(x) + depth

class Number(Net):
    def forward(self, x):
        return {"of": self.stem(x), "wide": x.shape[-1]}

class Several(Net):
    def forward(self, x):
        x = self.stem(x)
        return {"wide": x, "states": [x + self.place, x * 2]}

class Single(Net):
    def forward(self, x):
        return nn.functional.linear(self.stem(x), torch.ones(3, 2))

class Unshuffled(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(4, 8, 4, 4)

    def forward(self, x):
        return self.stem(nn.functional.pixel_unshuffle(x, 2))

class Windows(Net):
    def forward(self, x):
        windows = self.stem(x).permute(0, 2, 3, 1).reshape(-1, 1, 2, 8)
        images = int(windows.shape[0] / (2 * 2 / 1 / 2))  # as SwinIR does
        return windows.view(images, 2, 1, 1, 2, -1).flatten(1, 4) + self.place.mean()

class Drawing(Net):
    def forward(self, x):
        return self.stem(x) + torch.rand_like(x[:, :1, ::4, ::4])
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(CODE)
    torch.save({"place": torch.ones(1, 8, 2, 2), **nn.Module.state_dict(_named(nn.Conv2d(3, 8, 4, 4)))}, "c.pth")
    return {"settings": {"image_size": "8x8"}}


def _named(stem):
    net = nn.Module()
    net.stem = stem
    return net


@pytest.mark.parametrize(
    ("kind", "told", "code_of"),
    [
        ("Two", "does not take one image of 3x8x8: TypeError", "network.call"),
        ("Number", "gives int, which is no tensor", "network.outputs"),
        ("Single", "computes in float32 only.*same dtype", "network.float64"),
        ("Drawing", "does not compute the same twice", "network.random"),
    ],
)
def test_what_takes_or_gives_something_else_is_told_so(code, kind, told, code_of):
    with pytest.raises((Refused, GateFailed), match=told) as caught:
        rc.fold("c.pth", arch=f"./net.py:{kind}", **code)
    assert caught.value.code == code_of


def test_channels_are_those_of_the_first_convolution(code):
    assert rc.fold("c.pth", arch="./net.py:Net", **code).verdict == "passed"
    assert built(Architecture("net.py:Net", {}), read_checkpoint("c.pth")).channels == 3


@pytest.mark.parametrize(("width", "channels"), [(12, 3), (4, 1)])
def test_blocks_of_pixels_that_become_channels_are_no_channels_of_an_image(code, width, channels):
    code["settings"] = {"image_size": "16x16"}
    Path("net.py").write_text(CODE.replace("nn.Conv2d(4, 8, 4, 4)", f"nn.Conv2d({width}, 8, 4, 4)"))
    torch.save(_named(nn.Conv2d(width, 8, 4, 4)).state_dict(), "c.pth")
    assert rc.fold("c.pth", arch="./net.py:Unshuffled", **code).verdict == "passed"
    rc.export()
    (image,) = onnx.load("repaconv-out/c/model.onnx").graph.input
    assert image.type.tensor_type.shape.dim[1].dim_value == channels
    assert rc.verify().verdict == "passed"


def test_an_exported_graph_that_holds_for_the_batch_of_its_example_alone_gets_a_fixed_batch(code):
    done = rc.fold("c.pth", arch="./net.py:Windows", **code)
    assert (done.verdict, done.batch) == ("passed", 1)
    rc.export()
    assert rc.verify().verdict == "passed"


def test_a_tower_says_how_large_its_images_are():
    assert own_size({"backbone_config": {"image_size": [64, 48], "num_channels": 1}}) == (64, 48)
    assert own_size({"image_size": 32, "vision_config": {"image_size": 64}}) == (32, 32)
    assert own_channels({"vision_config": {"num_channels": 4}}) == 4
    assert own_channels({}) is None


def test_several_tensors_under_one_name_are_numbered(code):
    done = rc.fold("c.pth", arch="./net.py:Several", **code)
    graph = onnx.load(rc.export().output_files[0]).graph
    assert [value.name for value in graph.output] == ["wide", "states_0", "states_1"]
    assert done.verdict == "passed"
