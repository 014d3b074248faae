"""The page and plots of accuracy over speed of conversions, from recorded rows, and the training of their network."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from convert_textures_page import MARK, NONE, RESULT, newest, points, precisions, section, title
from torch import nn

from repaconv.backbones.vit import ViTConfig
from repaconv.methods.pyra.merging_schedules import require_possible_schedule
from repaconv.results import Drift, Link, Location, Metrics, Tolerance
from repaconv.stages.report.tradeoff_plots import Point, curve_svg, pareto
from repaconv.verification.drift_plot import drift_svg

ROOT = Path(__file__).resolve().parents[1]
RECORDED = Path(__file__).parent / "data/convert_textures.jsonl"
"""Of `convert_textures.py --quick`: its form is right, and its figures say nothing."""


def test_recorded_rows_become_a_table_and_a_picture_a_precision():
    rows = newest(RECORDED)
    assert [title(row) for row in rows] == [
        "unconverted",
        "ToMe, 8,8,8,8,8,0",
        "depthwise, 3 of 6",
        "depthwise, 3 of 6; 1 epoch",
    ]
    assert precisions(rows) == ["float32", "int8", "bfloat16"]
    text = section(rows, "curve")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows)
    assert {line.count("|") for line in lines} == {1 + 1 + 2 * 3}
    merged = rows[1]["points"]["int8"]
    assert f"| {merged['accuracy']:.1%} (" in lines[3]
    assert f"| {merged['speed'][0]:.2f} (" in lines[3]
    for kind in precisions(rows):
        assert f"(curve.{kind}.svg)" in text
        picture = curve_svg(points(rows, kind), "accuracy")
        assert picture.count("<title>") == 1 + len(points(rows, kind))
    assert section([], "curve") == NONE


def test_a_row_that_was_measured_again_replaces_the_first_and_another_network_all(tmp_path):
    first, second = RECORDED.read_text().splitlines()[:2]
    again = first.replace('"held_out": 48', '"held_out": 49')
    (tmp_path / "x.jsonl").write_text("\n".join([first.replace('"network": "', '"network": "0'), first, second, again]))
    assert [(row["name"], row["held_out"]) for row in newest(tmp_path / "x.jsonl")] == [
        ("unconverted", 49),
        ("ToMe, 8,8,8,8,8,0", 48),
    ]


def test_the_page_has_what_was_measured():
    _, shown, _ = (ROOT / "docs/convert.md").read_text().split(MARK)
    assert shown == section(newest(RESULT), "convert-textures")


def test_what_no_other_beats_is_joined_and_named_and_what_was_taken_is_ringed():
    all_of_them = [
        Point("exact", "a", 1.0, 0.9),
        Point("beaten", "b", 1.4, 0.7),
        Point("fast", "b", 2.0, 0.8, solid=False),
        Point("alike", "a", 2.0, 0.8, taken=True),
    ]
    assert [each.title for each in pareto(all_of_them)] == ["exact", "fast", "alike"]
    picture = curve_svg(all_of_them, "accuracy")
    assert set(re.findall(r">(exact|fast|alike|beaten)<", picture)) == {"exact", "fast", "alike"}
    assert picture.count('class="taken"') == 1
    assert curve_svg(all_of_them[:1], "accuracy") == ""


def test_every_conversion_of_the_curve_merges_tokens_that_there_are(monkeypatch):
    """The network has 64 patches and a class token."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/train"))
    import textures
    from convert_textures import ways
    from vit_textures import PATCH

    sizes = vars(ViTConfig((textures.SIDE, textures.SIDE), PATCH, 192, textures.CLASSES, ()))
    schedules = [way.asked["schedule"] for way in ways(1) if "schedule" in way.asked]
    assert len(schedules) > 15
    for schedule in schedules:
        require_possible_schedule(tuple(map(int, schedule.split(","))), sizes)


def test_an_interrupted_training_resumes_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/train"))
    for name in ("digits", "fit"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from digits import Digits
    from training_loop import fit

    data = Digits(torch.rand(40, 1, 24, 24, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 10)

    def trained(kept, before=lambda share: None):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Flatten(), nn.Linear(576, 10))
        fit(net, data, epochs=3, seed=0, before=before, kept=kept)
        return net[1].weight.detach()

    def broken_off(share):
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "kept", broken_off)
    lines = []
    assert torch.equal(trained(tmp_path / "kept", lines.append), trained(None))
    assert lines == [2 / 3]


def test_a_module_without_any_difference_does_not_squeeze_the_picture_of_the_others():
    exact, allowed = {"kind": "exact", "rtol": 1e-4}, {"images": 1, "cosine": None, "mean_abs_error": 0.0}
    rows = tuple(Drift(place=f"m{n}", max_rel_error=e, rms_rel_error=e) for n, e in enumerate((0.0, 1e-3, 1e-2)))
    link = Link(
        name="onnx",
        reference="a",
        candidate="b",
        tolerance=Tolerance(**exact),
        metrics=Metrics(max_abs_error=0.01, max_rel_error=0.01, **allowed),
        verdict="failed",
        location=Location(module="m1", reason="", drift=rows),
    )
    picture = drift_svg(link)
    heights = [float(y) for y in re.findall(r'<circle cx="[^"]*" cy="([^"]*)"', picture)]
    assert heights[0] == 320  # the lower edge
    assert heights[1] - heights[2] > 40  # a tenth of the difference is a good part of the height
    assert "first different at m1" in picture
