"""`--set` compared with the settings of the checkpoint: a contradiction is refused, or recorded if the user insists."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import small_graphs
import torch
from conftest import TINY
from onnx import TensorProto

import repaconv as rc
from repaconv.backbones.vit_checkpoint_reader import read_heads
from repaconv.checkpoints import claimed_accuracy, read_checkpoint
from repaconv.core import plugins
from repaconv.core.errors import UsageProblem
from repaconv.method_api.preprocessing import preprocessing_of
from repaconv.method_api.settings import SettingsReader, contradictions, natural
from repaconv.methods.nondeep.published_models import example_meta
from repaconv.methods.riformer import METHOD as RIFORMER

RUN = Path("run")
ARGS = {"idle_ratio": 0.75, "num_heads": 3, "mean": [0.305] * 3, "std": [0.33] * 3}


def save(method, arch="tiny", **beside):
    weights = RIFORMER.example(TINY, 3) if method == "riformer" else plugins.load(plugins.METHODS, method).example
    torch.save({"model": weights if method == "riformer" else weights(arch, seed=1), **beside}, "c.pth")
    return "c.pth"


def test_a_value_that_does_not_parse_has_no_example_where_nothing_is_the_default():
    with pytest.raises(UsageProblem, match="not a non-negative integer") as refused:
        SettingsReader({"classes": "abc"}).user_value("classes", natural)
    assert refused.value.hint == "Correct it, or leave it out."


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"mean": "nan"}, "--set mean=nan: not finite"),
        ({"std": "0,0,0"}, "--set std=0,0,0: not above zero"),
        ({"std": "inf"}, "--set std=inf: not finite"),
        ({"mean": "1,2"}, "mean has 2 numbers and std has 3"),
    ],
)
def test_a_mean_and_a_std_are_numbers_that_pixels_can_be_normalized_with(given, problem):
    with pytest.raises(UsageProblem, match=problem) as refused:
        preprocessing_of({}, {}, SettingsReader(given))
    assert refused.value.code == "setting.value"
    with pytest.raises(UsageProblem) as refused:
        SettingsReader({"mean": "x"}).user_value("mean", float, (77.5, 3.0))
    assert refused.value.hint == "E.g. --set mean=77.5,3."


TOLD = "--set num_heads=2 contradicts the checkpoint: args says 3"
LINES = 'checkpoint = "c.pth"\nout = "run"\n[set]\nnum_heads = 2\n[export]\nbatch = 1\n'


def test_a_setting_against_the_file_is_refused_or_stated_to_the_end(repaconv):
    save("repavit", args=ARGS, max_accuracy=torch.tensor(99.4))
    code, out, err = repaconv("fold", "c.pth", "--set", "num_heads=2", "-o", "run")
    assert (code, out) == (4, "")
    assert TOLD in err
    assert TOLD in rc.inspect("c.pth", settings={"num_heads": "2"}).problems
    random = np.random.default_rng(0)
    images = random.standard_normal((8, 3, 32, 32), dtype=np.float32)
    np.savez("labelled.npz", input=images, labels=random.integers(0, 5, 8))
    lines = f'{LINES}[verify]\ninputs = "labelled.npz"\n'
    Path("r.toml").write_text(lines)
    refused = rc.gate(["r.toml"])
    assert (refused.exit_code, refused.recipes[0].checks[0].code) == (4, "setting.contradicts")
    assert not RUN.exists()

    Path("r.toml").write_text(f"force = true\n{lines}")
    forced = rc.gate(["r.toml"])
    assert forced.exit_code == 0
    stated = {check.name: check for check in forced.recipes[0].checks}
    assert (stated["settings"].verdict, stated["settings"].message) == ("not verified", TOLD)
    assert "accuracy 99.40% is claimed" in stated["claim"].message
    for stage in ("fold", "export*", "verify"):
        (path,) = RUN.glob(f"{stage}.json")
        assert json.loads(path.read_text())["unverified"] == [TOLD]
    assert rc.bench(RUN, rounds=2).unverified == (TOLD,)
    code, out, _ = repaconv("verify", "run", "--inputs", "labelled.npz")
    assert code == 0
    assert TOLD in " ".join(out.split())
    assert "claimed: accuracy 99.40% by the checkpoint's max_accuracy (99.4)" in " ".join(out.split())
    assert json.loads((RUN / "verify.json").read_text())["claims"][0]["value"] == pytest.approx(0.994)
    rc.report(RUN, format="markdown", paper=False)
    page = (RUN / "report.md").read_text()
    assert TOLD in page
    assert "max_accuracy (99.4) states 99.4%" in page
    assert "--set num_heads=2 --force" in page


META = example_meta()
CFG = {"cfg": "model = dict(backbone=dict(type='RIFormer', norm_cfg=dict(type='GN', num_groups=1, eps=1e-6)))"}
GATED = {"format": "dwconv-v1", "arch": {"num_heads": 3, "norm_eps": 1e-6, "img_size": [16, 16]}}


@pytest.mark.parametrize(
    ("method", "beside", "setting", "contradicts"),
    [
        ("repavit", {"args": ARGS}, "num_heads=2", True),
        ("repavit", {"args": ARGS}, "num_heads=3", False),
        ("repavit", {"args": {**ARGS, "channel_idle": False}}, "idle_ratio=0.75", True),
        ("repavit", {"args": ARGS}, "mean=10,20,30", True),
        ("repavit", {"args": ARGS}, "mean=77.775,77.775,77.775", False),  # 255 * 0.305, but for the last bit
        ("repavit", {"args": ARGS}, "resize_edge=40", False),
        ("repavit", {"args": ARGS}, "image_size=64", False),
        ("repavit", {"args": ARGS}, "pool=avg", False),  # keys are a guess, no proof
        ("riformer", {"meta": CFG}, "eps=1e-4", True),
        ("riformer", {"meta": CFG}, "image_size=48", False),
        ("nondeep", {"meta": META}, "score_scale=sum", True),
        ("nondeep", {"meta": META}, "num_heads=2", True),
        ("nondeep", {"meta": META}, "lambda=1", False),
        ("nondeep", {"meta": META}, "pool=avg", True),
        ("dwconv", {"meta": GATED}, "norm_eps=1e-3", True),
        ("dwconv", {"meta": GATED}, "trained_size=32x8", True),
        ("dwconv", {"meta": GATED}, "full_conv=keep", False),
        ("pyra", {"args": {"num_heads": 3}}, "num_heads=2", True),
    ],
)
def test_what_contradicts_and_what_is_a_choice(method, beside, setting, contradicts):
    name, _, value = setting.partition("=")
    form = plugins.load(plugins.METHODS, method).read(read_checkpoint(save(method, **beside)), {name: value})
    assert bool(contradictions(form.facts)) == contradicts


def test_what_published_sizes_have_is_a_guess():
    reader = SettingsReader({"num_heads": "6"})
    assert read_heads(192, 12, reader) == 6
    assert not reader.facts[0].overrules
    assert reader.facts[0].against


def test_claims_are_read_where_trainers_write_them():
    record = {
        "metric": 76.9,
        "max_accuracy": 81.2,
        "meta": {"hook_msgs": {"best_score": 70.5}, "epoch": 3},
        "results": {"accuracy/top1": 0.5, "acc5": 93.0, "train_acc1": 99.0, "val_loss": 0.3},
        "lr_scheduler": {"metric": 1.0},
        "args": {"metric": 5},
        "epoch_acc": 12,
        "accumulate": 4,
        "best_acc": 1e9,
        "acc_name": 1,
    }
    assert [(fact.value, fact.source.split()[2]) for fact in claimed_accuracy(record)] == [
        (pytest.approx(0.769), "metric"),
        (pytest.approx(0.812), "max_accuracy"),
        (pytest.approx(0.705), "meta.hook_msgs.best_score"),
        (0.5, "results.accuracy/top1"),
    ]


def test_a_mean_and_a_std_are_one_number_or_one_for_each_channel_of_the_images(repaconv):
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten()).eval()
    torch.save(module.state_dict(), "net.pth")
    Path("net.py").write_text(
        "from torch import nn\n\n\ndef build():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())\n"
    )
    graph = small_graphs.saved(
        "net.onnx",
        [("Conv", "x w", "y", {})],
        {"w": (4, 3, 3, 3)},
        {"x": (TensorProto.FLOAT, ["n", 3, 8, 8])},
        {"y": (TensorProto.FLOAT, ["n", 4, 6, 6])},
    )
    for given in ((save("riformer"),), (graph,), ("net.pth", "--arch", "./net.py:build")):
        words = ("--set", "mean=1,2", "--set", "std=1,2", "--set", "image_size=8")
        code, _, err = repaconv("fold", *given, *(words if given[0] != "c.pth" else words[:4]), "-o", "run")
        assert (code, "mean has 2 numbers, and the images of this network have 3 channels" in err) == (2, True), err
        assert not RUN.exists()


def test_a_mean_is_not_compared_with_the_height_of_images_with_channels_last(repaconv):
    graph = small_graphs.saved(
        "net.onnx",
        [("Transpose", "x", "t", {"perm": [0, 3, 1, 2]}), ("Conv", "t w", "y", {})],
        {"w": (4, 3, 3, 3)},
        {"x": (TensorProto.FLOAT, ["n", 8, 8, 3])},
        {"y": (TensorProto.FLOAT, ["n", 4, 6, 6])},
    )
    code, _, err = repaconv("fold", graph, "--set", "mean=1,2,3", "--set", "std=1,2,3", "-o", "run")
    assert code == 0, err
