"""`repaconv save`: folders for timm and transformers with the folded weights in the original architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small_graphs
import torch
from optional_libraries import library
from safetensors.torch import save_file
from torch import nn

import repaconv as rc
from repaconv.core.errors import Refused
from repaconv.torch_fold.known_submodule_folds import fold_parts
from repaconv.torch_fold.weights_for_original_architecture import standard_state_dict


class Net(nn.Module):
    """Images [B, 3, H, W] to [B, 5]: two convolutions, of which the second has no norm behind it where that is cut."""

    def __init__(self, *, cut: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, eps=1e-3)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, bias=False), nn.Identity() if cut else nn.BatchNorm2d(8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] -> [B, 5]."""
        x = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return self.head(self.norm(x.relu().mean((2, 3))))


def stirred(module: nn.Module) -> nn.Module:
    """With statistics and affines of a trained network."""
    torch.manual_seed(0)
    for name, tensor in module.state_dict().items():
        if tensor.ndim == 1:
            tensor.uniform_(0.5, 2) if name.endswith("var") else tensor.add_(0.3 * torch.randn(tensor.shape))
    return module.eval().requires_grad_(False)


def test_a_folded_network_fits_its_original_architecture():
    net, images = stirred(Net()).double(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    right = net(images)
    folded, _ = fold_parts(net, "auto", images)
    standard = Net().double().eval()
    standard.load_state_dict(standard_state_dict(folded, standard))
    assert (standard(images) - right).abs().max() <= 1e-12 * right.abs().max()
    assert not torch.equal(standard.conv1.weight, net.conv1.weight)
    assert torch.equal(standard.bn1.weight, torch.ones(8, dtype=torch.float64))
    assert torch.equal(standard.bn1.running_var, torch.full((8,), 1 - 1e-3, dtype=torch.float64))


def test_what_has_no_place_is_named():
    net, images = stirred(Net()).double(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    folded, _ = fold_parts(net, "auto", images)
    with pytest.raises(Refused, match=r"the bias of conv2 has no place"):
        standard_state_dict(folded, Net(cut=True).double())
    with pytest.raises(Refused, match=r"0 has no place in it"):
        standard_state_dict(nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.ReLU()))
    with pytest.raises(Refused, match=r"nothing in it is the layer 2"):  # of a branch that went into the first
        standard_state_dict(
            nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(3, 4, 1))
        )
    with pytest.raises(Refused, match=r"nothing in it is the layer 0"):
        standard_state_dict(nn.Sequential(nn.ReLU()), nn.Sequential(nn.Linear(2, 3)))


def test_a_graph_is_no_architecture(repaconv):
    rc.fold(small_graphs.tokens())
    code, _, err = repaconv("save")
    assert code == 4
    assert "repaconv-out/tokens cannot be saved in an architecture of timm or transformers: it is an ONNX graph" in err
    assert not Path("repaconv-out/tokens/timm").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_vit2", "test_resnet"])
def test_timm_loads_what_was_saved(name, repaconv):
    timm = library("timm")
    net = stirred(timm.create_model(name, num_classes=5))
    torch.save(net.state_dict(), "net.pth")
    assert repaconv("fold", "net.pth", "--arch", f"timm:{name}", "--no-measure")[0] == 0
    done = rc.save(out="mine")
    assert (done.verdict, done.other_files[-1].path) == ("passed", "README.md")
    assert "library_name: timm" in Path("mine/README.md").read_text()
    again = timm.create_model("local-dir:mine", pretrained=True).eval()
    images = torch.randn(2, *net.default_cfg["input_size"])
    torch.testing.assert_close(again(images), net(images), rtol=1e-4, atol=1e-4)
    assert any(not torch.equal(value, net.state_dict()[key]) for key, value in again.state_dict().items())
    assert repaconv("save", "-o", "mine")[0] == 0  # what it wrote it may write again
    folded = rc.fold("mine", out="again", measure=False)  # and it is a Hugging Face folder like any other
    assert folded.arch == f"timm:{name}"
    Path("mine/config.json").write_text("{}")
    assert repaconv("save", "repaconv-out/net", "-o", "mine")[0] == 2


@pytest.mark.slow
def test_transformers_loads_what_was_saved(repaconv):
    transformers = library("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.Dinov2Config(**sizes, image_size=32, patch_size=8, num_labels=7)
    net = stirred(transformers.Dinov2ForImageClassification(config))
    net.save_pretrained("net")
    assert repaconv("fold", "net", "--set", "image_size=32", "--no-measure")[0] == 0
    code, out, _ = repaconv("save")
    assert (code, "transformers:Dinov2ForImageClassification" in out) == (0, True)
    folder = Path("repaconv-out/net/transformers")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Dinov2ForImageClassification"]
    again = transformers.Dinov2ForImageClassification.from_pretrained(folder).eval()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(again(images).logits, net(images).logits, rtol=1e-4, atol=1e-4)
    weights = again.state_dict()
    assert all(bool((value == 1).all()) for key, value in weights.items() if key.endswith("lambda1"))


def test_the_vision_tower_of_a_model_of_images_and_text_is_offered_and_folded(repaconv):
    transformers = library("transformers")
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**size, "image_size": 16, "patch_size": 8}
    text = {**size, "vocab_size": 9, "max_position_embeddings": 5, "eos_token_id": 1}
    config = transformers.CLIPConfig(vision_config=vision, text_config=text, projection_dim=8)
    transformers.CLIPModel(config).save_pretrained("clip")
    tower = "transformers:CLIPVisionModelWithProjection"
    code, _, err = repaconv("fold", "clip")
    assert (code, f"Fold its vision tower: repaconv fold clip --arch {tower}" in " ".join(err.split())) == (4, True), (
        err
    )
    code, _, err = repaconv("fold", "clip", "--arch", tower, "--no-measure")
    assert (code, "UNEXPECTED" in err) == (0, False), err
    assert rc.verify().verdict == "passed"
    code, _, err = repaconv("fold", "clip", "--set", "image_size=24")
    assert "images and text, and this network does not take one image of 3x24x24" in " ".join(err.split()), err
    code, _, err = repaconv("fold", "clip", "--arch", tower, "--set", "image_size=24")
    assert (code, "takes images and text" in err) == (4, False), err
    code, _, err = repaconv("fold", "clip/model.safetensors", "--arch", tower)  # config.json is next to it
    assert (code, "read clip/config.json" in err) == (0, True), err
    assert rc.verify().verdict == "passed"
    Path("clip/config.json").unlink()
    code, _, err = repaconv("fold", "clip/model.safetensors", "--arch", tower)
    assert (code, "these are not the weights of" in err, "torch.Size" in err) == (4, True, False), err
    assert "put the model's config.json next to the weights" in " ".join(err.split())


@pytest.mark.slow
def test_a_network_of_transformers_without_its_configuration_is_reported_to_have_the_default_one(repaconv):
    transformers = library("transformers")
    stirred(transformers.SegformerModel(transformers.SegformerConfig())).save_pretrained("net")
    arch = ("--arch", "transformers:SegformerModel", "--set", "image_size=64", "--no-measure")
    said = "configuration: transformers' default configuration (assumed: there is no config.json next to the weights"
    code, out, err = repaconv("fold", "net/model.safetensors", *arch)
    assert (code, said in " ".join(out.split())) == (0, False), err
    Path("net/config.json").unlink()
    code, out, err = repaconv("fold", "net/model.safetensors", *arch)
    assert (code, said in " ".join(out.split())) == (0, True), err


def test_arch_says_what_builds_the_network_of_a_folder(repaconv):
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    Path("own").mkdir()
    save_file(module.state_dict(), "own/model.safetensors")
    Path("own/config.json").write_text('{"architectures": ["OwnNetwork"], "image_size": 16}')
    Path("net.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))\n"
    )
    code, _, err = repaconv("fold", "own", "--arch", "./nope.py:build")
    assert (code, "run ./nope.py" in err, "there is no Python file" in " ".join(err.split())) == (2, False, True), err
    code, _, err = repaconv("fold", "own", "--arch", "./net.py:build", "--no-measure")
    assert (code, "run ./net.py:build, as --arch asks" in err) == (0, True), err
    assert rc.verify().verdict == "passed"
