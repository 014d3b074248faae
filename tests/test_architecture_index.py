"""The published network to which a bare state dict belongs, by the names and shapes of its tensors."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch
from optional_libraries import library

from repaconv import checkpoints, fold
from repaconv.checkpoints.architecture_index import _index, _shapes, matches, parameter_counts
from repaconv.core.errors import Refused
from repaconv.stages.fold import architecture_fold

PUBLISHED = {
    name: dict(zip(network.names, _shapes(network.shapes), strict=True))
    for _, networks in _index(1, 1 << 12)
    for network in networks
    for name in network.architectures
}
SMALL = "timm:mobilenetv3_small_050"


def with_classes(shapes, classes):
    """Another number of classes in the last layer."""
    *_, weight, bias = shapes
    return {**shapes, weight: (classes, *shapes[weight][1:]), bias: (classes,)}


def test_every_published_network_is_found_by_its_own_tensors():
    names = sorted(PUBLISHED)
    assert len(names) > 1400
    assert {name.partition(":")[0] for name in names} == {"timm", "torchvision", "transformers"}
    for name in names[::23]:
        found = matches(PUBLISHED[name])
        assert all(match.exact for match in found)
        assert name in {known for match in found for known in (match.name, *match.also) if not match.differences}


def test_parameters_of_every_published_network_are_counted():
    assert parameter_counts() == {name: sum(map(prod, shapes.values())) for name, shapes in PUBLISHED.items()}


def test_equal_tensors_that_are_computed_with_otherwise_are_two_networks():
    found = matches(PUBLISHED["timm:vit_base_patch16_clip_224"])
    apart = [{match.name, *match.also} for match in found]
    assert len([one for one in apart if "timm:vit_base_patch16_clip_224" in one]) == 1
    assert {"timm:vit_base_patch16_clip_quickgelu_224"} in [
        one & {"timm:vit_base_patch16_clip_224", "timm:vit_base_patch16_clip_quickgelu_224"} for one in apart
    ]


def test_another_head_a_missing_tensor_and_another_shape_are_reported():
    shapes = with_classes(PUBLISHED[SMALL], 10)
    (match,) = matches(shapes)
    assert (match.name, match.exact) == (SMALL, True)
    assert match.differences == "another number of classes in classifier.weight, classifier.bias"
    counted = {**shapes, "bn1.num_batches_tracked": ()}
    assert matches(counted)[0].exact
    first, *_ = shapes
    without = {name: shape for name, shape in shapes.items() if name != first}
    assert f"without {first}" in matches(without)[0].differences
    assert "with mine" in matches({**shapes, "mine": (1,)})[0].differences
    other = matches({**shapes, first: (9, 9, 9, 9)})[0]
    assert (other.name, other.exact) == (SMALL, False)
    assert f"{first} is [9, 9, 9, 9], not" in other.differences
    assert matches({}) == ()
    assert matches({f"layer{n}.weight": (3, 3) for n in range(9)}) == ()


def test_inspect_names_the_network(repaconv):
    shapes = with_classes(PUBLISHED[SMALL], 10)
    assert sum(map(prod, shapes.values())) < 1e6
    torch.save({"state_dict": {f"module.{name}": torch.zeros(shape) for name, shape in shapes.items()}}, "net.pth")
    code, out, _ = repaconv("inspect", "net.pth", "--format", "json")
    (known,) = json.loads(out)["data"]["networks"]
    assert (code, known["name"], known["exact"]) == (0, SMALL, True)
    assert "classifier.weight" in known["differs"]
    _, out, err = repaconv("inspect", "net.pth")
    assert SMALL in out
    assert "--arch" not in err


@pytest.mark.slow
def test_the_index_is_of_the_libraries_that_are_installed():
    timm = library("timm")
    for name in timm.list_models("*_tiny*")[:20]:
        with torch.device("meta"):
            shapes = {key: tuple(value.shape) for key, value in timm.create_model(name).state_dict().items()}
        assert any(f"timm:{name}" in (match.name, *match.also) for match in matches(shapes)), name


def test_what_is_of_several_networks_or_of_none_is_refused_with_what_to_do(repaconv):
    for shapes, message in (
        (PUBLISHED["timm:vit_base_patch16_clip_224"], "which compute different things: say which with --arch"),
        ({**PUBLISHED[SMALL], "mine": (1,)}, f"near to {SMALL}, but for with mine"),
        ({f"layer{n}.weight": (3, 3) for n in range(9)}, "--arch timm:NAME"),
    ):
        torch.save({name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}, "net.pth")
        wanted = "--arch NAME" if "say which" in message else "--arch ./net.py:build"
        assert f"next repaconv fold net.pth {wanted}" in " ".join(repaconv("inspect", "net.pth")[2].split())
        code, _, err = repaconv("fold", "net.pth")
        assert code == 4
        assert message in " ".join(err.split())


def test_a_file_that_no_method_knows_is_read_once(repaconv, monkeypatch):
    read, once = [], checkpoints.read_checkpoint
    monkeypatch.setattr(checkpoints, "read_checkpoint", lambda path, *more: read.append(path) or once(path, *more))
    torch.save({f"layer{n}.weight": torch.zeros(3, 3) for n in range(9)}, "net.pth")
    assert repaconv("fold", "net.pth")[0] == 4
    assert len(read) == 1


def test_more_than_one_graph_holds_in_float64_is_refused(monkeypatch):
    monkeypatch.setattr(architecture_fold, "LARGEST_GRAPH", 800)
    Path("net.py").write_text("def build():\n    raise AssertionError('not reached')\n")
    torch.save({"w": torch.zeros(101, 1)}, "net.pth")
    with pytest.raises(Refused, match="101 numbers, and in float64 one ONNX file holds 100"):
        fold("net.pth", arch="net.py:build")


@pytest.mark.slow
def test_fold_takes_the_network_that_it_is(repaconv):
    library("timm")
    shapes = with_classes(PUBLISHED[SMALL], 10)
    weights = {name: torch.rand(shape) + 0.5 for name, shape in shapes.items()}
    torch.save(weights, "net.pth")
    code, out, _ = repaconv("fold", "net.pth")
    assert code == 0
    assert f"taken for {SMALL}" in out
