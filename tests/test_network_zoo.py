"""The page of the zoo follows from its results, and small networks are folded as the sweep folds those of timm."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn
from zoo_networks import drawn
from zoo_table import tasks, whole

import repaconv as rc
from repaconv.graph.element_type_conversion import retyped
from repaconv.onnx_export.float64_exporter import network_to_onnx


def test_the_page_of_the_docs_is_that_of_the_results():
    root = Path(__file__).parents[1]
    assert (root / "docs/zoo.md").read_text() == whole()


def test_rows_of_other_tasks_say_what_went_wrong():
    about = {"task": "depth", "title": "Deep", "package": "own", "size": [8, 8], "parameters": [9, 7], "nodes": [5, 4]}
    seeds = {"0": {"verdict": "passed"}, "1": {"verdict": "failed", "links": ["onnx: failed: off by 1"]}}
    folds = [
        {**about, "name": "graph:deep", "verify": seeds, "applied": 1},
        {**about, "name": "arch:deep", "refused": "export.unsupported: it loops"},
        {**about, "name": "module:deep", "float64": 0.5},
    ]
    ratio = {"ratio": 1.5, "low": 1.4, "high": 1.6, "openings": 5}
    same = {"ratio": 1.0, "low": 1.0, "high": 1.0, "openings": 0}
    speeds = [
        {
            **about,
            "name": "deep",
            "size": [16, 16],
            "cpu": "a CPU",
            "family": "avx2",
            "onnxsim": ratio,
            "openvino": same,
        }
    ]
    message = tasks(folds, speeds)
    assert (
        "| Deep | own | 8x8, 16x16 | 9, 7 | 5, 4 | 1 of 2 | refused | 5e-01 | 1.50 (1.40 to 1.60) | the same graph |"
        in message
    )
    assert (
        "1 networks, 3 folds of them: 0 without a wrong number, 1 refused, 0 ended otherwise. "
        "1 of the 1 networks that are not ONNX files were folded in all three ways. 0 of the folds were also exported"
        in message
    )
    assert "- Deep, graph: onnx: failed: off by 1" in message
    assert "- Deep, arch: export.unsupported: it loops" in message
    assert "- Deep, module: off by 5e-01" in message


class Branches(nn.Module):
    """RepVGG's: 3 x 3, 1 x 1 and the input itself, each with its norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.narrow = nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width))
        self.same = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.wide(x) + self.narrow(x) + self.same(x))


class Split(nn.Module):
    """A block of MambaOut's kind: one layer whose channels are split, of which a part is convolved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.permute(0, 2, 3, 1)
        gate, value, mixed = self.first(self.norm(tokens)).chunk(3, dim=-1)
        mixed = self.depthwise(mixed.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        done = self.last(torch.nn.functional.silu(gate) * (value + mixed)) + tokens
        return done.permute(0, 3, 1, 2)


@pytest.mark.parametrize("block", [Branches, Split])
def test_a_slice_of_it(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 4, 4), block(8), block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    module = module.eval().requires_grad_(False)
    drawn(module)
    graph, _ = network_to_onnx(module.double(), (3, 32, 32), input_name="input", outputs=["logits"])
    onnx.save(retyped(graph, {11: 1}), "net.onnx")
    done = rc.fold("net.onnx", measure=False)
    assert done.verdict == "passed"
    assert done.macs is not None
    assert done.macs[1] <= done.macs[0]
    assert done.parameters[1] <= done.parameters[0]
    assert done.nodes[1] <= done.nodes[0]
