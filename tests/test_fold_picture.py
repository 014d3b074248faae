"""The picture of a fold shows which layers became which, by the certificate. The picture in the docs is up to date."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ET
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from reimplemented_training_networks import exported
from test_lora import factors, peft, save
from torch import nn

import repaconv as rc
from repaconv import models
from repaconv.backbones.blockwise_vit import BlockwiseReading
from repaconv.methods.lora import AdaptedReading
from repaconv.methods.repavit.checkpoint_reading import RePaViTReading
from repaconv.methods.repconv.checkpoint_reading import RepConvReading
from repaconv.methods.riformer.checkpoint_reading import RIFormerReading
from repaconv.results import Change, FoldedLayer
from repaconv.sources.method_detection import load_method
from repaconv.stages.fold import layer_correspondence
from repaconv.stages.report.fold_picture import MOST_DRAWN, fold_svg, places_of

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = Path(models.__file__).parent
SVG = "{http://www.w3.org/2000/svg}"


def block(name, module):
    folded = rc.fold(SHIPPED / f"{name}.pth")
    (step,) = [step for step in folded.certificate if step.module == module]
    return folded, step, {layer.name: layer.into for layer in step.before}


def test_the_certificate_says_which_layers_became_which():
    folded, step, into = block("repavit", "blocks.0")
    assert into == {
        "attn.norm": ("attn.qkv",),
        "attn.qkv": ("attn.qkv",),
        "attn.proj": ("attn.proj",),
        "mlp.norm1": ("mlp.idle", "mlp.fc1"),
        "mlp.norm2": ("mlp.idle", "mlp.fc2"),
        "mlp.fc1": ("mlp.idle", "mlp.fc1"),
        "mlp.fc2": ("mlp.idle", "mlp.fc2"),
    }
    assert sum(layer.parameters for layer in step.before) == 28_656
    assert sum(layer.parameters for layer in step.after) == 16_416
    assert [row.module for row in folded.certificate if row.before] == ["blocks.0"]  # one for each kind of block


def test_parallel_branches_became_one_and_a_layer_without_use_is_gone():
    _, _, into = block("nondeep", "blocks.0")
    assert [into[f"mlp.branches.{n}.fc1"] for n in (0, 1)] == [("mlp.fc1",)] * 2
    _, _, into = block("dwconv", "blocks.2")
    assert into["attn.dw"] == ()


def test_a_block_is_folded_once_more_for_each_of_its_layers():
    with patch.object(layer_correspondence, "_folded", wraps=layer_correspondence._folded) as folding:
        _, step, _ = block("repavit", "blocks.0")
    assert folding.call_count == len(step.before)


READINGS = (AdaptedReading, BlockwiseReading, RePaViTReading, RepConvReading, RIFormerReading)


def certificate(path, **settings):
    """The rows of a fold that have layers, and how often the checkpoint was read for them."""
    with patch.object(layer_correspondence, "understood", wraps=layer_correspondence.understood) as reading:
        folded = rc.fold(path, out="run", force=True, settings=settings)
    return [step for step in folded.certificate if step.before], reading.call_count


@pytest.mark.parametrize("name", ["dwconv", "nondeep", "pyra", "repavit", "riformer", "repvgg", "adapters"])
def test_the_layers_are_those_of_reading_the_checkpoint_again_for_each(name, monkeypatch):
    path, settings = SHIPPED / f"{name}.pth", {}
    if name == "repvgg":
        path = save(load_method("repconv").example("tiny-repvgg", 1))
    elif name == "adapters":
        weights = load_method("repavit").example("tiny", 1)
        adapted = peft(weights, factors(weights, ["blocks.0.attn.qkv", "blocks.1.attn.proj"]))
        path = save({f"module.{key}": tensor for key, tensor in adapted.items()})
        settings = {"num_heads": "3", "lora_alpha": "6"}
    rows, readings = certificate(path, **settings)
    assert (readings == 0) == (name != "nondeep")  # its heads are as wide as the rank of the weights
    for each in READINGS:
        monkeypatch.setattr(each, "with_tensors", lambda _self, _tensors: None)
    again, readings = certificate(path, **settings)
    assert again == rows
    assert readings == max(len(step.before) for step in rows)
    assert sum(bool(layer.into) for step in rows for layer in step.before) > len(rows)


def test_a_change_of_a_graph_has_its_layers():
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return (self.wide(x) + self.narrow(x)).relu()

    graph = exported(Two(), (1, 4, 8, 8), dynamo=False, opset=17, free=False)
    Path("two.onnx").write_bytes(graph.SerializeToString())
    (change,) = rc.fold("two.onnx").changes
    (after,) = change.after
    assert [layer.parameters for layer in change.before] == [148, 20]
    assert all(layer.into == (after.name,) for layer in change.before)
    assert (after.kind, after.parameters, after.macs) == ("Conv", 148, 64 * 144)


def test_changes_that_a_rewrite_makes_at_once_have_their_own_layers():
    torch.manual_seed(0)

    def part():
        norm = nn.LayerNorm(6)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        return nn.Sequential(norm, nn.Linear(6, 6), nn.ReLU())

    graph = exported(nn.Sequential(part(), part()), (1, 5, 6), dynamo=False, opset=17, free=False)
    Path("norms.onnx").write_bytes(graph.SerializeToString())
    changes = [change for change in rc.fold("norms.onnx").changes if change.before]
    assert len(changes) == 2
    for number, change in enumerate(changes):
        assert change.after
        assert all(layer.into for layer in change.before)
        assert all(f"/{number}/" in layer.name or f"{number}." in layer.name for layer in change.before)


def test_a_picture_has_twelve_places_the_largest_savings_first_and_counts_the_rest():
    rows = [
        Change(
            rewrite="affine",
            place=f"place <{n}>",
            description="a & b",
            before=(FoldedLayer(name="a", kind="Conv", parameters=10 + n, into=("b",)),),
            after=(FoldedLayer(name="b", kind="Conv", parameters=5),),
        )
        for n in range(MOST_DRAWN + 3)
    ]
    picture = ET.fromstring(fold_svg(places_of([*rows, Change(rewrite="x", place="y", description="z")]), "a <net>"))
    titles = [text.text for text in picture.iter(f"{SVG}text") if text.get("class") == "title"]
    assert titles == [f"place <{n}>" for n in range(MOST_DRAWN + 2, 2, -1)]
    assert "and 3 more places" in "".join(picture.itertext())
    assert picture.get("role") == "img"
    known = {each.get("id"): each.tag.removeprefix(SVG) for each in picture.iter() if each.get("id")}
    assert [known[name] for name in picture.get("aria-labelledby").split()] == ["title", "desc"]
    assert not list(picture.iter(f"{SVG}script"))
    assert fold_svg((), "none") == ""


def test_inspect_draws_and_report_has_the_picture(repaconv):
    code, _, _ = repaconv("inspect", SHIPPED / "riformer.pth", "--svg", "fold.svg")
    assert code == 0
    drawn = ET.fromstring(Path("fold.svg").read_text())
    assert "token_mixer.affine went into norm1" in drawn.find(f"{SVG}desc").text
    rc.fold(SHIPPED / "riformer.pth")
    rc.report()
    page = Path("repaconv-out/riformer/report.html").read_text()
    assert 'class="fold-picture"' in page
    assert "token_mixer.affine went into norm1" in page
    torch.save(nn.Conv2d(3, 4, 1).state_dict(), "conv.pth")
    code, _, _ = repaconv("inspect", "conv.pth", "--svg", "none.svg")
    assert code == 4
    assert not Path("none.svg").exists()


@pytest.fixture
def pictures():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pictures()


def test_the_pictures_of_the_docs_are_those_of_the_shipped_models(pictures):
    for name, picture in pictures.items():
        assert (ROOT / "docs/img" / name).read_text() == picture, "python docs/_pictures.py writes them"
        method = name.removeprefix("fold-").removesuffix(".svg")
        assert f"../img/{name}" in (ROOT / f"docs/methods/{method}.md").read_text()
