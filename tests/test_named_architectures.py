"""Networks by architecture that take anything but one image, or return anything but tensors: the message says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from optional_libraries import library
from torch import nn

import repaconv as rc
from repaconv.checkpoints.checkpoint_reader import read_checkpoint
from repaconv.core.errors import GateFailed, Refused, SettingNeeded
from repaconv.method_api.settings import SettingsReader
from repaconv.sources import torchvision_networks
from repaconv.sources.library_preprocessing import own_channels, own_size
from repaconv.sources.named_architectures import Architecture, build_network, completed

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

class Video(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv3d(3, 8, 4, 4)

    def forward(self, x):
        return self.stem(x)

class Number(Net):
    def forward(self, x):
        return {"of": self.stem(x), "wide": x.shape[-1]}

class Several(Net):
    def forward(self, x):
        x = self.stem(x)
        return {"wide": x, "states": [x + self.place, x * 2]}

class Listed(Net):
    def forward(self, x):
        return [{"map": each} for each in self.stem(x) + self.place]

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


MASKED = """
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2).unsqueeze(1).contiguous()
        mask = (x.mean(-1) > 0).unsqueeze(2).expand(-1, -1, 16, -1)
        return nn.functional.scaled_dot_product_attention(x, x, x, mask.float().masked_fill(~mask, -1e9))
"""
VIT = """
class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, 8, 4, 4)

    def forward(self, x):
        return self.patch_embed.proj(x)
"""
NORMED = """
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(self.stem(x))
"""
ATTENDED = """
from torch import nn

class Attended(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.stem = nn.Conv1d(1, 1, 3, padding=1), nn.Conv2d(3, 8, 4, 4)
        self.head = nn.Linear(8 * 2 * 2, 5)

    def forward(self, x):
        x = self.stem(x)
        weight = self.attention(x.mean((2, 3)).unsqueeze(1)).sigmoid()
        return self.head((x * weight.transpose(1, 2).unsqueeze(-1)).flatten(1))
"""


class Trained(nn.Module):
    """Of a class that the reader does not have."""


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
    ("kind", "message", "code_of"),
    [
        ("Two", "does not take one image of 3x8x8: TypeError", "network.call"),
        ("Number", "gives int, which is no tensor", "network.outputs"),
        ("Listed", "a list with the outputs of each image", "network.outputs"),
        ("Single", "computes in float32 only.*same dtype", "network.float64"),
        ("Drawing", "does not compute the same twice", "network.random"),
    ],
)
def test_networks_with_other_inputs_or_outputs_are_refused_with_the_reason(code, kind, message, code_of):
    with pytest.raises((Refused, GateFailed), match=message) as caught:
        rc.fold("c.pth", arch=f"./net.py:{kind}", **code)
    assert caught.value.code == code_of


def test_a_network_that_is_too_large_for_one_file_in_float64_is_told_the_other_ways(code, monkeypatch):
    """In float32 a file holds twice as many numbers."""
    numbers = sum(tensor.numel() for tensor in torch.load("c.pth").values())
    for most, start in (
        (8 * numbers - 8, "Export it yourself in float32"),
        (4 * numbers - 4, "Fold the module in memory"),
    ):
        monkeypatch.setattr("repaconv.stages.fold.architecture_fold.LARGEST_GRAPH", most)
        with pytest.raises(Refused, match=f"has {numbers:,} numbers") as caught:
            rc.fold("c.pth", arch="./net.py:Net", **code)
        assert (caught.value.code, caught.value.hint.startswith(start)) == ("network.too-large", True)
        assert "repaconv.fold(module, example=images)" in caught.value.hint
    monkeypatch.setattr("repaconv.stages.fold.architecture_fold.LARGEST_GRAPH", 8 * numbers)
    assert rc.fold("c.pth", arch="./net.py:Net", **code).verdict == "passed"


def test_a_network_of_videos_is_not_told_to_take_images_of_another_size(code):
    torch.save(_named(nn.Conv3d(3, 8, 4, 4)).state_dict(), "c.pth")
    with pytest.raises(Refused, match="does not take one image") as caught:
        rc.fold("c.pth", arch="./net.py:Video", **code)
    assert caught.value.hint.startswith("Its convolutions take videos or volumes, not images. Fold the module")


def test_a_network_of_images_with_convolutions_of_sequences_is_told_to_give_the_size(tmp_path, monkeypatch):
    """Such as channel attention (ECA), which a constructor may name before the first convolution of the image."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(ATTENDED)
    net: dict[str, object] = {}
    exec(ATTENDED, net)
    torch.save(net["Attended"]().state_dict(), "c.pth")
    with pytest.raises(Refused, match="does not take one image of 3x224x224") as caught:
        rc.fold("c.pth", arch="./net.py:Attended")
    assert caught.value.hint.startswith("If its images are of another size: --set image_size=")
    assert rc.fold("c.pth", arch="./net.py:Attended", settings={"image_size": "8x8"}).verdict == "passed"


class Backbone(nn.Module):
    """Of timm, such as EVA-02 and DINOv2: without a head unless a number of classes is given."""

    def __init__(self, classes):
        super().__init__()
        self.pretrained_cfg = {"classifier": "head"}
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.head = nn.Linear(8, classes) if classes else nn.Identity()


@pytest.mark.parametrize("classes", [0, 7])
def test_a_backbone_that_was_given_a_head_has_as_many_classes_as_its_checkpoint(classes, tmp_path, monkeypatch):
    monkeypatch.setattr("repaconv.sources.named_architectures._builder", lambda _arch: Backbone)
    monkeypatch.setattr("repaconv.sources.named_architectures.version", lambda _library: "1")
    torch.save(Backbone(classes).state_dict(), tmp_path / "c.pth")
    found = build_network(Architecture("timm:backbone", {}), read_checkpoint(tmp_path / "c.pth"))
    assert getattr(found.module.head, "out_features", 0) == classes


@pytest.mark.parametrize("name", ["head.weight", "stem.bias"])
def test_a_weight_that_is_one_number_names_no_number_of_classes(name, tmp_path, monkeypatch):
    monkeypatch.setattr("repaconv.sources.named_architectures._builder", lambda _arch: Backbone)
    monkeypatch.setattr("repaconv.sources.named_architectures.version", lambda _library: "1")
    torch.save({**Backbone(0).state_dict(), name: torch.zeros(())}, tmp_path / "c.pth")
    with pytest.raises(Refused):
        build_network(Architecture("timm:backbone", {}), read_checkpoint(tmp_path / "c.pth"))


def test_attention_with_a_mask_of_float32_is_compared_with_what_it_is_in_float64(code):
    """torch's own kernel reads such a mask as numbers of the queries' type. EoMT has one."""
    code["settings"] = {"image_size": "16x16"}
    Path("net.py").write_text(f"{CODE}{MASKED}")
    torch.save(_named(nn.Conv2d(3, 8, 4, 4)).state_dict(), "c.pth")
    assert rc.fold("c.pth", arch="./net.py:Masked", **code).verdict == "passed"


def test_channels_are_those_of_the_first_convolution(code):
    assert rc.fold("c.pth", arch="./net.py:Net", **code).verdict == "passed"
    assert build_network(Architecture("net.py:Net", {}), read_checkpoint("c.pth")).channels == 3


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


def _prefixed(weights, prefix):
    return {f"{prefix}{name}": tensor for name, tensor in weights.items()}


def test_weights_under_a_prefix_of_a_training_framework_are_found_next_to_others(code):
    weights = torch.load("c.pth")
    plain = rc.fold("c.pth", arch="./net.py:Net", out="plain", **code)
    framework = {"state_dict": {**_prefixed(weights, "net."), "loss.weight": torch.ones(3)}, "epoch": 3}
    torch.save(framework, "framework.pth")
    done = rc.fold("framework.pth", arch="./net.py:Net", out="prefixed", **code)
    assert (done.verdict, plain.verdict) == ("passed", "passed")
    assert [(fact.value, fact.source) for fact in done.facts if fact.name == "weights"] == [
        ("net.*", "the only prefix under which all weights of the network are")
    ]
    graphs = [onnx.load(Path(folder) / f"{name}.folded.onnx").graph for folder, name in
              (("plain", "c"), ("prefixed", "framework"))]  # fmt: skip
    assert graphs[0].initializer == graphs[1].initializer
    assert rc.verify("prefixed").verdict == "passed"  # which loads them again
    framework["state_dict"]["net.scale"] = torch.ones(2)  # of a layer that the code lacks
    torch.save(framework, "framework.pth")
    with pytest.raises(Refused, match=r"not in it: scale\."):
        rc.fold("framework.pth", arch="./net.py:Net", out="left", **code)


def test_a_backbone_that_is_known_by_its_stem_is_found_next_to_others(code):
    """The prefix of a patch embedding is stripped when a file is read, and no other tensor has it."""
    Path("net.py").write_text(CODE.replace("stem", "patch_embed") + VIT)
    net = nn.Module()
    net.patch_embed = nn.Module()
    net.patch_embed.proj = nn.Conv2d(3, 8, 4, 4)
    torch.save({**_prefixed(net.state_dict(), "model."), "loss.weight": torch.ones(3)}, "c.pth")
    assert rc.fold("c.pth", arch="./net.py:Vit", **code).verdict == "passed"


def test_the_settings_of_a_pickled_module_under_a_prefix_are_those_of_the_file(code):
    """A norm's eps is taken from it, and a layer that is set up otherwise is refused."""
    Path("net.py").write_text(CODE + NORMED)
    for eps, stride in ((0.5, 4), (1e-5, 2)):
        whole = nn.Module()
        whole.net = Trained()
        whole.net.stem, whole.net.norm = nn.Conv2d(3, 8, 4, stride), nn.BatchNorm2d(8, eps=eps)
        whole.loss = nn.Linear(2, 2)
        torch.save(whole, "m.pth")
        for weights in (None, "net"):
            if stride == 2:
                with pytest.raises(Refused, match=r"stem\.stride is") as caught:
                    rc.fold("m.pth", arch="./net.py:Normed", weights=weights, force=True, **code)
                assert caught.value.code == "arch.attributes"
                continue
            done = rc.fold("m.pth", arch="./net.py:Normed", weights=weights, force=True, **code)
            assert ("attributes", "norm.eps=0.5") in [(fact.name, fact.value) for fact in done.facts]


def test_a_moving_average_under_another_prefix_is_chosen_by_weights(code):
    weights = torch.load("c.pth")
    average = {name: tensor / 2 for name, tensor in weights.items()}
    torch.save({"state_dict": {**_prefixed(weights, "net."), **_prefixed(average, "average.module.")}}, "c.pth")
    with pytest.raises(Refused, match=r"2 times, under these prefixes: average\.module, net\.") as caught:
        rc.fold("c.pth", arch="./net.py:Net", **code)
    assert caught.value.code == "arch.ambiguous"
    assert caught.value.hint == "Select one with --weights, e.g. --weights average.module."
    for chosen, expected in (("average.module", average), ("average.*", average), ("net", weights)):
        done = rc.fold("c.pth", arch="./net.py:Net", weights=chosen, out="run", force=True, **code)
        assert (done.verdict, done.origin.weights) == ("passed", chosen)
        stored = onnx.load(Path("run/c.folded.onnx")).graph.initializer
        (kernel,) = [one for one in map(onnx.numpy_helper.to_array, stored) if one.shape == (8, 3, 4, 4)]
        assert (kernel == expected["stem.weight"].numpy()).all()
        assert rc.verify("run").verdict == "passed"
    with pytest.raises(Refused, match="no set of weights named 'other'"):
        rc.fold("c.pth", arch="./net.py:Net", weights="other", **code)
    torch.save({"state_dict": _prefixed(weights, "net."), "ema": _prefixed(average, "net.")}, "c.pth")
    with pytest.raises(Refused, match=r"several sets of weights with that prefix: state_dict\.net, ema\.net"):
        rc.fold("c.pth", arch="./net.py:Net", weights="net", **code)
    assert rc.fold("c.pth", arch="./net.py:Net", weights="ema.net", out="run", force=True, **code).verdict == "passed"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "place has NaN or infinite values: 1 of "),
        (float("inf"), "place has NaN or infinite values: 1 of "),
    ],
)
def test_weights_that_are_no_numbers_are_named(code, value, message):
    weights = torch.load("c.pth")
    weights["place"][0, 0, 0, 0] = value
    torch.save(weights, "c.pth")
    with pytest.raises(Refused, match=message) as caught:
        rc.fold("c.pth", arch="./net.py:Net", **code)
    assert caught.value.code == "checkpoint.not-finite"


def test_json_text_is_refused_with_the_reason(code):
    Path("c.json").write_text('{"lr": 1, "model": "pytorch"}')
    with pytest.raises(Refused, match="it is JSON text"):
        rc.fold("c.json", arch="./net.py:Net", **code)
    Path("c.json").write_text('{"meta":{"a":1}}')  # as in safetensors, the ninth byte is a brace
    with pytest.raises(Refused, match="it is JSON text"):
        rc.fold("c.json", arch="./net.py:Net", **code)


def test_no_torchvision_network_downloads_its_backbone(monkeypatch):
    """Segmenters and detectors of torchvision take published weights for their backbones unless told otherwise."""
    library("torchvision.models")
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *_, **__: pytest.fail("download"))
    torchvision_networks.build("lraspp_mobilenet_v3_large", num_classes=2)


@pytest.mark.parametrize(("given", "shifted"), [("yes", True), ("no", False)])
def test_googlenet_asks_whether_it_converts_its_input(given, shifted, tmp_path):
    """Published weights of torchvision need it, and no tensor shows it; training heads are told by their tensors."""
    models = library("torchvision.models")
    net = models.googlenet(weights=None, init_weights=False, aux_logits=False, num_classes=2)
    torch.save(net.state_dict(), tmp_path / "g.pth")
    found, arch = read_checkpoint(tmp_path / "g.pth"), Architecture("torchvision:googlenet", {})
    with pytest.raises(SettingNeeded, match="no tensor of googlenet shows"):
        completed(arch, found, SettingsReader({}))
    arch = completed(arch, found, SettingsReader({"transform_input": given}))
    assert build_network(arch, found).module.transform_input is shifted
    named = completed(Architecture("torchvision:googlenet.IMAGENET1K_V1", {}), found, SettingsReader({}))
    assert named.config["model_args"]["transform_input"] is True


def test_published_weights_of_torchvision_are_known_by_their_hash():
    library("torchvision.models")
    found = SimpleNamespace(tensors={"aux1.w": torch.zeros(1)}, origin=SimpleNamespace(sha256="1378be20" + 56 * "0"))
    reader = SettingsReader({})
    arguments = torchvision_networks.own_arguments("googlenet", found, reader)
    assert arguments == {"transform_input": True, "init_weights": False}
    assert [fact.source for fact in reader.facts] == ["torchvision's IMAGENET1K_V1"]


def test_tensors_show_the_training_head_of_a_segmenter_and_the_image_size_of_a_vit(tmp_path):
    models = library("torchvision.models")
    build = models.segmentation.deeplabv3_mobilenet_v3_large
    net = build(weights=None, weights_backbone=None, aux_loss=True, num_classes=2)
    torch.save(net.state_dict(), tmp_path / "d.pth")
    found = read_checkpoint(tmp_path / "d.pth")
    arch = completed(Architecture("torchvision:deeplabv3_mobilenet_v3_large", {}), found, SettingsReader({}))
    assert build_network(arch, found).module.aux_classifier is not None
    shapes = {"encoder.pos_embedding": torch.zeros(1, 37, 8), "conv_proj.weight": torch.zeros(8, 3, 16, 16)}
    vit = SimpleNamespace(tensors=shapes, origin=SimpleNamespace(sha256=""))
    assert torchvision_networks.own_arguments("vit_b_16", vit, SettingsReader({})) == {"image_size": 96}
