"""The image size, the preprocessing and the class scores of a network: the same for every kind of source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_graphs import F, saved
from torch import nn

import repaconv as rc
from repaconv.core.errors import Refused, UsageProblem
from repaconv.models import FOLDER
from repaconv.results import ClassScores
from repaconv.sources.class_score_outputs import class_scores

SIZE, CLASSES = 64, 10
MADE = {"mean": "127.5,127.5,127.5", "std": "64,64,64"}
WAY = f"shorter edge to {SIZE} (bicubic), center crop {SIZE} x {SIZE}, RGB, mean 127.5, 127.5, 127.5, std 64, 64, 64"
ASSUMED = "assumed, since the file does not have it: resize_edge, keep_ratio, interpolation, channel_order"
NET = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )
"""


def own() -> nn.Module:
    """A classifier of the user's own, as own.pth and net.py."""
    Path("net.py").write_text(NET)
    space: dict = {}
    exec(NET, space)
    torch.manual_seed(0)
    net = space["build"]().eval()
    torch.save(net.state_dict(), "own.pth")
    return net


def graph(size: object = SIZE, output: str = "y") -> Path:
    """The like as an ONNX graph."""
    nodes = [
        ("Conv", "image w", "1", {"pads": [1] * 4, "strides": [2, 2]}),
        ("BatchNormalization", "1 g b m v", "2", {}),
        ("Relu", "2", "3", {}),
        ("GlobalAveragePool", "3", "4", {}),
        ("Flatten", "4", "5", {}),
        ("Gemm", "5 h hb", output, {}),
    ]
    weights = {"w": (8, 3, 3, 3), "g": (8,), "b": (8,), "m": (8,), "h": (8, CLASSES), "hb": (CLASSES,)}
    weights["v"] = np.linspace(0.5, 2, 8, dtype=np.float32)
    sides = [size, size] if isinstance(size, int) else ["H", "W"]
    return saved("graph.onnx", nodes, weights, {"image": (F, ["B", 3, *sides])}, {output: (F, ["B", CLASSES])})


def pictures(folders: int = CLASSES, each: int = 2) -> Path:
    """A folder for each class."""
    random = np.random.default_rng(0)
    for number in range(folders):
        (Path("pictures") / f"class_{number:02}").mkdir(parents=True)
        for n in range(each):
            pixels = random.integers(0, 256, (80, 70, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(f"pictures/class_{number:02}/{n}.png")
    return Path("pictures")


def by_arch(**settings):
    own()
    return rc.fold("own.pth", arch="./net.py:build", settings={"image_size": str(SIZE), **settings})


def by_onnx(**settings):
    return rc.fold(graph(), settings=settings or None)


DOORS = pytest.mark.parametrize("door", [by_arch, by_onnx])


def test_a_guessed_image_size_is_said_and_so_is_one_that_is_known(repaconv, tiny):
    own()
    _, out, _ = repaconv("fold", "own.pth", "--arch", "./net.py:build")
    assert "image size: 224x224 pixels (assumed: not recorded in the checkpoint; --set image_size=N)" in out
    assert "images: preprocessing unknown; for image files give --set mean=... --set std=..." in out
    _, out, _ = repaconv("fold", "own.pth", "--arch", "./net.py:build", "--set", f"image_size={SIZE}")
    assert f"image size: {SIZE}x{SIZE} pixels (from --set image_size)" in out
    _, out, _ = repaconv("fold", graph())
    assert f"image size: {SIZE}x{SIZE} pixels (from the graph, which takes no other)" in out
    _, out, _ = repaconv("fold", graph("free"), "--force")
    assert "pixels (assumed: the graph takes any size; --set image_size=N)" in out
    _, out, _ = repaconv("fold", tiny)
    assert "image size: 32x32 pixels (from args)" in out
    assert "assumed, since the file does not have it: mean, std, resize_edge" in out


@DOORS
def test_every_kind_of_source_makes_the_same_images(door):
    done = door(**MADE)
    (size,) = (fact for fact in done.facts if fact.name == "image_size")
    assert (done.image_size, size.assumed) == ((SIZE, SIZE), False)
    assert done.preprocessing.assumed == ("resize_edge", "keep_ratio", "interpolation", "channel_order")
    found = rc.verify(images=pictures())
    assert found.preprocessing == f"{WAY}; from --set mean, std; {ASSUMED}"


@DOORS
def test_what_was_done_to_images_is_printed_wherever_files_are_read(door, repaconv):
    door(**MADE)
    folder = pictures()
    said = f"images: {WAY}; from --set mean, std"
    rc.export()
    for words in (["verify", "--images", folder], ["export", "--precision", "int8", "--images", folder], ["verify"]):
        code, out, err = repaconv(*words)
        assert code == 0, err
        assert said in out, words
    assert said in repaconv("bench", "--precision", "int8", "--rounds", "10")[1]


def test_mean_and_std_of_a_graph_are_not_assumed_and_another_size_than_its_own_is_refused(repaconv):
    assert by_onnx(interpolation="box").preprocessing is None
    with pytest.raises(UsageProblem, match="the preprocessing of this network is unknown"):
        rc.verify(images=pictures())
    for given, lacking in ((("mean", "127.5"), "std"), (("std", "127.5"), "mean")):
        with pytest.raises(UsageProblem, match=f"only one of mean and std, and {lacking}"):
            rc.fold(graph(), settings=dict([given]))
    with pytest.raises(Refused, match="takes images of 64 x 64 pixels, not 32 x 32"):
        rc.fold(graph(), settings={"image_size": "32"})


def test_another_size_at_export_is_resized_to_in_proportion():
    rc.fold(graph("free"), settings={**MADE, "image_size": "224"})
    done = rc.export(precision="int8", images=pictures(), image_size=SIZE)
    assert done.image_preprocessing.startswith(WAY)  # and not resized to 256 for a crop of 64
    rc.fold(graph("free"), settings={**MADE, "image_size": "224", "resize_edge": "256"})
    done = rc.export(precision="int8", images="pictures", image_size=112)
    assert done.image_preprocessing.startswith("shorter edge to 128 (bicubic), center crop 112 x 112")


@DOORS
def test_a_classifier_of_the_users_own_has_labels_from_folders_and_files(door, repaconv):
    done = door(**MADE)
    assert (done.scores.classes, done.scores.source, done.scores.assumed) == (CLASSES, "its shape", True)
    code, out, _ = repaconv("verify", "--images", pictures())
    message = " ".join(out.split())
    assert code == 0
    assert "on 20 images" in message.partition("onnx: accuracy ")[0].partition("fold: accuracy ")[2]
    assert "classes: folder names, in alphabetical order" in message
    name = done.scores.output
    decided = f"the output {name!r} [N, 10] is taken as the scores of 10 classes, by its shape and these labels"
    assert f"{decided} (if it is not: fold --set classes=0)" in message
    images = np.random.default_rng(0).standard_normal((8, 3, SIZE, SIZE)).astype(np.float32)
    np.savez("labels.npz", input=images, labels=np.arange(8))
    found = rc.verify(inputs="labels.npz")
    assert all(link.accuracy and link.accuracy.images == 8 for link in found.links)
    assert decided in found.labels
    np.savez("many.npz", input=images, labels=np.arange(8) + 5)
    with pytest.raises(Refused, match="labels 5 to 12 are not of 10 classes"):
        rc.verify(inputs="many.npz")


def test_export_and_tune_take_the_names_of_classes_that_their_message_asks_for(repaconv):
    by_onnx(**MADE)
    pictures(folders=2, each=34)
    Path("classes.txt").write_text("".join(f"class_{number:02}\n" for number in (1, 0, *range(2, CLASSES))))
    asked = {"precision": "int8", "images": "pictures"}
    assert "no labels: 2 folders for 10 classes; give --classes FILE" in rc.export(**asked).scores
    done = rc.export(**asked, classes="classes.txt")
    assert "folder names, in the order of classes.txt" in done.scores
    assert done.links[-1].accuracy.images == 32
    seen = next(link for link in rc.verify().links if link.name == "int8")  # on the same images
    assert seen.accuracy.images == 32
    code, out, err = repaconv("export", "--precision", "int8", "--images", "pictures", "--classes", "classes.txt")
    assert code in (0, 1), err
    assert "in the order of classes.txt" in out

    from repaconv.core.run_folder import find_run
    from repaconv.sources.source_of_run import source_model_of
    from repaconv.stages.tune.accuracy_loss import chosen_images
    from repaconv.stages.tune.options import TuneOptions
    from repaconv.stages.tune.stage import loss_dependencies

    model, options = source_model_of(find_run(None)), TuneOptions(images="pictures", classes="classes.txt")
    assert chosen_images(options, model).labeled
    before = loss_dependencies(options, model)
    Path("classes.txt").write_text("\n".join(f"class_{number:02}" for number in range(CLASSES)))
    assert loss_dependencies(options, model) != before  # a result of other labels is no answer
    Path("classes.txt").unlink()
    gone = next(link for link in rc.verify().links if link.name == "int8")
    assert (gone.verdict, "class names of its export" in gone.note) == ("not verified", True)


def test_a_classifier_of_the_users_own_may_say_how_many_classes_it_has(repaconv):
    done = by_arch(classes="10")
    assert (done.scores.output, done.scores.source, done.classes) == ("logits", "--set classes", 10)
    done = by_arch(classes="0", **MADE)
    assert (done.scores, done.classes) == (None, 0)
    assert "the network has no classes: no output is their scores" in rc.verify(images=pictures()).labels
    done = by_onnx(classes="10")
    assert (done.scores.output, done.scores.assumed) == ("y", False)
    code, _, err = repaconv("fold", graph(), "--set", "classes=7")
    assert code == 2
    assert "no output has 7 numbers per image; the outputs are y [N, 10]" in err


def test_lossy_links_look_at_classes_where_something_says_that_there_are_some():
    by_onnx(**MADE)
    np.savez("bare.npz", input=np.random.default_rng(0).standard_normal((24, 3, SIZE, SIZE)).astype(np.float32))
    done = rc.export(precision="int8", inputs="bare.npz")
    link = done.links[-1]
    assert link.tolerance.flips is None
    assert "'y' [N, 10] is compared as numbers, not as the scores of 10 classes" in done.scores
    assert "fold --set classes=10" in done.scores
    low = rc.export(precision="int8", images=pictures())
    assert low.links[-1].tolerance.flips is not None
    assert low.links[-1].accuracy.images == 10
    seen = next(link for link in rc.verify().links if link.name == "int8")  # on the same images, so decided alike
    assert (seen.tolerance.flips, seen.accuracy.images) == (low.links[-1].tolerance.flips, 10)
    by_onnx(classes="10")
    assert rc.export(precision="int8", inputs="bare.npz").links[-1].metrics.top1_agreement is not None


def test_the_tuner_takes_a_classifier_of_the_users_own_and_reports_it(monkeypatch):
    np.savez("bare.npz", input=np.random.default_rng(0).standard_normal((32, 3, SIZE, SIZE)).astype(np.float32))
    by_onnx(classes="0")
    with pytest.raises(UsageProblem, match="measured by top-1 predictions"):
        rc.tune(max_disagreement=0.5, inputs="bare.npz", budget_s=1)
    by_onnx()
    from repaconv.core.run_folder import find_run
    from repaconv.sources.source_of_run import source_model_of
    from repaconv.stages.tune.accuracy_loss import require_evaluation_images
    from repaconv.stages.tune.options import TuneOptions

    given = require_evaluation_images(
        TuneOptions(max_disagreement=0.5, inputs="bare.npz"), source_model_of(find_run(None))
    )
    assert "'y' [N, 10] is taken as the scores of 10 classes, by its shape, and since top-1" in given.given.labels


def test_which_output_is_class_scores():
    assert class_scores({}, None) is None
    assert class_scores({"y": 10}, None) == ClassScores(output="y", classes=10, source="its shape", assumed=True)
    assert class_scores({"y": 1}, None) is None  # one number is no class
    assert class_scores({"logits": 10, "y": 4}, None) == ClassScores(output="logits", classes=10, source="its name")
    assert class_scores({"a": 10, "b": 4}, None) is None  # nothing tells which
    assert class_scores({"a": 10, "b": 4}, 4) == ClassScores(output="b", classes=4, source="--set classes")
    assert class_scores({"y": 10}, None, 0) is None
    assert class_scores({"y": 10}, None, 10) == ClassScores(output="y", classes=10, source="the architecture")
    for widths in ({"a": 4, "b": 4}, {}):
        with pytest.raises(UsageProblem, match=r"several outputs have|no output has"):
            class_scores(widths, 4)


def test_images_of_one_channel_are_gray_and_have_no_order_of_channels(repaconv):
    code, out, _ = repaconv("fold", FOLDER / "repavit.pth")
    said = " ".join(out.split())
    assert (code, ", gray, mean 77.775" in said, "RGB" in said, "channel_order" in said) == (0, True, False, False)


@pytest.mark.parametrize(("channels", "word"), [(1, "gray"), (2, "2 channels"), (3, "RGB")])
def test_images_of_an_onnx_model_and_of_an_architecture_are_described_with_their_channels(
    repaconv, channels, word, tmp_path
):
    (tmp_path / "net.py").write_text(f"from torch import nn\ndef build():\n    return nn.Conv2d({channels}, 4, 3)\n")
    torch.save(nn.Conv2d(channels, 4, 3).state_dict(), "net.pth")
    settings = [part for name in ("image_size=8", "mean=0", "std=255") for part in ("--set", name)]
    for what in (("net.pth", "--arch", "./net.py:build", "-o", "run"), ("run/net.folded.onnx", "-o", "graph")):
        code, out, err = repaconv("fold", *what, *settings, "--no-measure")
        said = " ".join(out.split())
        assert (code, f", {word}, mean 0" in said) == (0, True), err
        assert ("channel_order" in said) == (channels == 3)
