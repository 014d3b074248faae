"""`convert --speedup`: the token merging and the number of replaced blocks that reach a speed, from recorded costs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from test_score_and_convert_commands import HEADS, images, opened, plain_weights

import repaconv as rc
from repaconv.conversion.kernel_fitting import ConversionSettings
from repaconv.conversion.original_activations import OriginalActivations
from repaconv.conversion.sequential_conversion import convert
from repaconv.conversion.speed_target_search import (
    SHAPES,
    SPEEDUP_TOLERANCE,
    CostModel,
    TokenCounts,
    fewest_blocks,
    schedule_for_speedup,
)
from repaconv.core.errors import EnvironmentProblem, GateFailed, Inconclusive, UsageProblem
from repaconv.core.files import canonical_json
from repaconv.core.progress import silent
from repaconv.results import Ratio, SpeedTarget, SpeedTrial, Trade, Tried
from repaconv.stages.convert.speed_target import SpeedMeasurement, speed_search
from repaconv.stages.shared.target_lookup import load_target

VIT_B = TokenCounts(12, 1, 196)


def test_a_total_is_shared_in_every_shape_and_nothing_merges_that_is_not_there():
    assert TokenCounts(4, 1, 16).schedule(7, "even") == (3, 2, 2, 0)
    assert TokenCounts(4, 1, 16).schedule(6, "falling") == (3, 2, 1, 0)
    assert TokenCounts(4, 1, 16).schedule(6, "early") == (3, 3, 0, 0)
    for shape in SHAPES:
        for schedule in VIT_B.schedules(shape):
            left = VIT_B.patches
            for gone in schedule:
                assert 0 <= gone <= left // 2
                left -= gone
        totals = [sum(each) for each in VIT_B.schedules(shape)]
        assert totals == sorted(totals)
        assert totals[0] == 1
    assert TokenCounts(2, 1, 4).schedules("even") == [(1, 0), (2, 0)]


TOKENS = (49, 74, 98, 123, 147, 172, 197)
ATTENTION = (4.97, 6.39, 7.75, 9.91, 12.1, 13.97, 17.08)
FFN = (7.88, 11.88, 14.32, 17.25, 20.49, 23.25, 26.0)
MERGING = (0.27, 0.47, 0.28, 0.33, 0.42, 0.48, 0.55)
"""Milliseconds of the modules of a block of width 768 by tokens, as torch took them on one thread of an EPYC."""


def recorded(schedule):
    """Milliseconds of a ViT-B: its blocks', and what no schedule changes."""
    left, total = VIT_B.prefix + VIT_B.patches, 15.0
    for gone in schedule:
        total += np.interp(left, TOKENS, ATTENTION) + np.interp(left - gone, TOKENS, FFN)
        total += np.interp(left, TOKENS, MERGING) if gone else 0
        left -= gone
    return float(total)


def speeds(schedules):
    return {each: recorded(VIT_B.none) / recorded(each) for each in schedules}


@pytest.mark.parametrize("wanted", [1.2, 1.5, 1.8])
def test_the_schedule_reaches_the_speed_and_is_corrected_by_measuring(wanted):
    asked = []

    def measured(schedules):
        asked.append(list(schedules))
        return speeds(schedules)

    found = schedule_for_speedup(VIT_B, wanted, measured, lambda schedule: float(sum(schedule[:6])))
    assert abs(speeds([found.schedule])[found.schedule] / wanted - 1) <= SPEEDUP_TOLERANCE
    assert set(VIT_B.probes()) <= set(found.speeds)
    assert len(asked) <= 5
    assert all(len(each) == 1 for each in asked[1:])


def test_among_shapes_what_costs_least_is_taken():
    for shape in SHAPES:
        found = schedule_for_speedup(
            VIT_B, 1.4, speeds, lambda each, shape=shape: 0 if each in VIT_B.schedules(shape) else 1
        )
        assert found.schedule in VIT_B.schedules(shape)


def test_what_no_schedule_reaches_is_none():
    assert schedule_for_speedup(VIT_B, 9.0, speeds, sum) is None
    assert schedule_for_speedup(TokenCounts(2, 1, 4), 1.3, lambda all_: dict.fromkeys(all_, 0.9), sum) is None


def test_costs_are_right_where_they_were_measured_and_never_negative():
    known = {each: 1 / speed for each, speed in speeds(VIT_B.probes()).items()}
    costs = CostModel(VIT_B, known)
    assert all(costs.of(each) == pytest.approx(share) for each, share in known.items())
    assert min(costs.weights) >= 0
    for shape in SHAPES:
        for schedule in VIT_B.schedules(shape)[::23]:
            assert costs.of(schedule) == pytest.approx(recorded(schedule) / recorded(VIT_B.none), rel=0.1)


@pytest.mark.parametrize(("wanted", "count"), [(1.05, 2), (1.2, 6), (1.3, 7), (1.8, None)])
def test_no_more_blocks_are_replaced_than_it_takes(wanted, count):
    asked = []

    def speed(blocks):
        asked.append(blocks)
        return 1 / (1 - 0.033 * blocks - 0.02 * (blocks > 6))

    assert fewest_blocks(12, wanted, speed) == count
    assert len(asked) <= 6


def test_what_cannot_be_measured_is_refused(tmp_path):
    torch.save({name: t for name, t in plain_weights().items() if "register" not in name}, "vit.pth")
    np.savez("x.npz", input=images())
    asked = {"inputs": "x.npz", "settings": {"num_heads": str(HEADS)}, "method": "pyra"}
    for kind, more in (
        (UsageProblem, {"speedup": 0.9}),
        (UsageProblem, {"speedup": 1.5, "keep": 0.5}),
        (EnvironmentProblem, {"speedup": 1.5, "target": "jetson-nano"}),
    ):
        with pytest.raises(kind) as refused:
            rc.convert("vit.pth", **asked, **more)
        assert refused.value.hint
    assert not Path("repaconv-out").exists()


RATIO = {
    "subject": "a", "other": "unconverted", "median": 1.25, "low": 1.2, "high": 1.3, "confidence": 0.95, "p10": 1.1,
    "p90": 1.4, "verdict": "faster",
}  # fmt: skip


def test_the_report_has_what_was_measured_for_a_speed_and_what_else_could_be_taken():
    torch.save(plain_weights(), "vit.pth")
    np.savez("x.npz", input=images())
    done = rc.convert("vit.pth", inputs="x.npz", settings={"num_heads": str(HEADS)}, blocks="1")
    taken = SpeedTrial(kind=done.kind, blocks=done.blocks, tried=done.tried[-1], speed=Ratio(**RATIO))
    merged = SpeedTrial(
        kind="merged", schedule=(3, 3, 0), speed=Ratio(**{**RATIO, "median": 1.75}),
        tried=Tried(blocks=(), error=0.25, agreement=0.625),
    )  # fmt: skip
    pace = SpeedTarget(
        target="x86-64", wanted=1.2, reached=taken.speed, speed_trials=(taken, merged), machine="a processor"
    )
    trade = Trade(target="x86-64", taken=taken, others=(merged,), machine="a processor")
    there = Path("repaconv-out/vit-dwconv/convert.json")
    there.write_text(
        canonical_json(done.model_copy(update={"speed_target": pace, "trade": trade}).model_dump(mode="json"))
    )
    page = Path(rc.report().output_files[0]).read_text()
    assert "converted: speedup 1.250 over before (95% interval 1.200 to 1.300): faster, on x86-64; " in page
    assert "a speedup of 1.2 was asked for" in page
    assert "<tr><td>3, 3, 0</td><td" in page
    assert '<td>merged</td><td>3, 3, 0</td><td class="n">1.750 (1.200 to 1.300)</td>' in page
    assert "<td>depthwise, chosen</td>" in page
    assert page.count('class="taken"') == 1
    assert "merged 3, 3, 0: 62.5%, speedup 1.75" in page


def test_a_conversion_by_merging_records_the_speed_that_was_asked_for(monkeypatch):
    torch.save({name: t for name, t in plain_weights().items() if "register" not in name}, "vit.pth")
    np.savez("x.npz", input=images())
    monkeypatch.setattr(SpeedMeasurement, "speeds", lambda self, readings: {name: Ratio(**RATIO) for name in readings})
    done = rc.convert(
        "vit.pth", inputs="x.npz", settings={"num_heads": str(HEADS)}, method="pyra", speedup=RATIO["median"]
    )
    pace = done.speed_target
    assert (pace.wanted, pace.reached.median) == (1.25, 1.25)
    assert done.schedule in [each.schedule for each in pace.speed_trials]
    assert [each.path for each in done.other_files] == ["unconverted.onnx"]
    assert Path("repaconv-out/vit-pyra/unconverted.onnx").is_file()


@pytest.mark.slow
def test_a_curve_has_every_kind_and_merging_and_what_was_taken(repaconv):
    torch.save({name: t for name, t in plain_weights().items() if "register" not in name}, "vit.pth")
    np.savez("x.npz", input=images())
    code, out, _ = repaconv(
        "convert", "vit.pth", "--inputs", "x.npz", "--set", f"num_heads={HEADS}", "--blocks", "2,", "--curve"
    )
    assert code == 0
    assert "depthwise, chosen" in out
    done = rc.report(format="json").converted
    assert done.trade.taken.blocks == done.blocks == (2,)
    kinds = Counter(each.kind for each in done.trade.others)
    assert kinds.keys() == {"depthwise", "ensembled", "static", "merged"}
    assert kinds["depthwise"] == kinds["static"] == 3
    assert all(each.speed.median > 0 and each.tried.error > 0 for each in done.trade.others)
    assert Path(rc.report().output_files[0]).read_text().count('class="taken"') == 1
    assert not list(Path("repaconv-out/vit-dwconv").glob(".repaconv-work-*"))


@pytest.mark.slow
def test_a_race_is_run_and_recorded_and_what_is_not_reached_leaves_nothing(tmp_path):
    torch.save({name: t for name, t in plain_weights().items() if "register" not in name}, "vit.pth")
    np.savez("x.npz", input=images())
    settings = {"num_heads": str(HEADS)}
    with pytest.raises((GateFailed, Inconclusive), match="a speedup of 20x") as refused:  # the machine may be busy
        rc.convert("vit.pth", inputs="x.npz", settings=settings, method="pyra", speedup=20)
    assert refused.value.code in ("convert.speedup", "convert.inconclusive")
    assert not Path("repaconv-out").exists()
    plain = opened("vit.pth")
    made = convert(OriginalActivations(plain, torch.from_numpy(images(8))), (1,), ConversionSettings())
    with speed_search(1.5, load_target("x86-64"), plain.reading, Path(), silent) as search:
        found = search.speeds({(1,): (made.reading, "dwconv"), (2,): (plain.reading, "dwconv")})
        message = search.artefact_fields((1,), "blocks", Path())
    assert found.keys() == {(1,), (2,)}
    assert message["speed_target"].reached.median == found[1,] > 0
    assert [each.blocks for each in message["speed_target"].speed_trials] == [(1,), (2,)]
    assert Path(message["other_files"][0].path).stat().st_size > 0
    assert not list(Path().glob(".repaconv-work-*"))
