"""All stages from fold to report, with one network of each source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from optional_libraries import library
from PIL import Image
from small_graphs import F, saved
from zoo_networks import drawn

ORIGINS = ("timm:mobileone_s0", "torchvision:shufflenet_v2_x0_5", "transformers", "net.py:build", "onnx")
NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.wide, self.narrow = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.head, self.box = nn.Linear(8, 7), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = (self.wide(x) + self.narrow(x)).relu()
        return {"logits": self.head(x.mean((2, 3))), "boxes": self.box(x)}

def build():
    return Net()
"""


def module_of(arch: str) -> torch.nn.Module:
    """The network, its statistics and affines drawn."""
    torch.manual_seed(0)
    origin, _, name = arch.partition(":")
    if origin == "net.py":
        Path("net.py").write_text(NET)
        space: dict = {}
        exec(NET, space)
        module = space["build"]()
    else:
        package = library(origin)
        make = package.create_model if origin == "timm" else package.models.get_model
        module = make(name, num_classes=7)
    drawn(module.eval().requires_grad_(False))
    return module


def given(arch: str) -> tuple[str, ...]:
    """What is folded, as `repaconv fold` takes it."""
    if arch == "onnx":
        nodes = [
            ("Conv", "image w", "1", {"pads": [1] * 4, "strides": [2, 2]}),
            ("BatchNormalization", "1 g b m v", "2", {}),
            ("Relu", "2", "3", {}),
            ("GlobalAveragePool", "3", "4", {}),
            ("Flatten", "4", "5", {}),
            ("Gemm", "5 h hb", "scores", {}),
            ("Conv", "3 k", "boxes", {}),
        ]
        weights = {"w": (8, 3, 3, 3), "g": (8,), "b": (8,), "m": (8,), "h": (8, 7), "hb": (7,), "k": (4, 8, 1, 1)}
        weights["v"] = np.linspace(0.5, 2, 8, dtype=np.float32)
        ends = {"scores": (F, ["n", 7]), "boxes": (F, ["n", 4, 16, 16])}
        return (str(saved("net.onnx", nodes, weights, {"image": (F, ["n", 3, 32, 32])}, ends, opset=11)),)
    if arch == "transformers":
        transformers = library("transformers")
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
        config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=7)
        transformers.ViTForImageClassification(config).save_pretrained("net")
        return ("net",)
    torch.save(module_of(arch).state_dict(), "net.pth")
    return ("net.pth", "--arch", arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ORIGINS)
def test_the_whole_chain(arch, repaconv):
    Path("images").mkdir()
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"images/{number}.png")
    source = given(arch)
    pixel = ("--set", "mean=127.5,127.5,127.5", "--set", "std=64,64,64", "--set", "image_size=32")

    def ran(*command: object, codes: tuple[int, ...] = (0,)) -> str:
        code, out, err = repaconv(*command)
        assert code in codes, f"{command}: {code} {out} {err}"
        return out

    ran("fold", *source, *pixel, "--no-measure")
    ran("verify")
    ran("export", "--onnx")
    ran("verify", "--images", "images", "--require", "onnx")
    ran("build", "--target", "x86-64")
    ran("bench", "--target", "x86-64", "--rounds", "3", codes=(0, 5))
    ran("tune", "--target", "x86-64", "--budget", "5", "--rounds", "3", codes=(0, 5))
    ran("export", "--onnx", "--with-preprocessing", "--target", "orin-nano")
    ran("bundle", "--target", "orin-nano")
    ran("report")
    assert Path("repaconv-out/net/report.html").is_file()
    named = f'arch = "{source[2]}"\n' if len(source) > 1 else ""
    settings = 'mean = "127.5,127.5,127.5"\nstd = "64,64,64"\nimage_size = 32\n'
    Path("net.toml").write_text(
        f'checkpoint = "{source[0]}"\n{named}[set]\n{settings}[export]\nprecisions = ["fp32"]\n'
    )
    assert "net.toml" in ran("gate", "net.toml")
