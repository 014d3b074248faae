"""The papers' tables: our counts against the printed figures, and against counting by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import repaconv as rc
from repaconv.backbones.parameter_and_mac_counts import cost_of
from repaconv.core import plugins
from repaconv.core.errors import Refused, UsageProblem
from repaconv.methods.repavit import METHOD as REPAVIT
from repaconv.stages.paper_table.stage import _agrees


def test_printed_precision_decides():
    assert _agrees("4.4M", 4_376_296)
    assert not _agrees("4.4M", 4_450_001)
    assert _agrees("12M", 11_900_808)
    assert _agrees("595M", 594_600_000)
    assert _agrees("", 7)


@pytest.mark.slow
def test_repavit():
    rows = rc.table("repavit").rows
    assert {row.table for row in rows} == {"1", "4", "8", "9"}
    for row in rows:
        printed = float(row.parameters[:-1]) * 1e6
        if "LV-ViT" not in row.model:
            assert abs(row.cost.parameters - printed) <= 0.06e6 + 1e-3 * printed, row
        assert row.agrees or row.remark


@pytest.mark.parametrize("arch", ["tiny-swin", "tiny-poolformer", "tiny-mixer"])
def test_a_published_net_of_each_family_is_read(arch):
    """On the meta device, where no tensor has values: the table and every report count it there."""
    published = REPAVIT.published(arch)
    assert cost_of(published.deploy, published.input_shape).macs


def test_a_count_by_hand():
    """C = 192, 12 blocks, 197 tokens: qkv, proj, idle, and fc1 and fc2 on A = 2C; 196 patches; the head."""
    tiny = REPAVIT.published("deit-tiny/0.50")
    cost = cost_of(tiny.deploy, tiny.input_shape)
    block = 197 * 192 * 192 * (3 + 1 + 1 + 2 + 2)
    assert cost.layer_macs == 12 * block + 196 * 192 * 768 + 192 * 1000
    assert cost.macs == cost.layer_macs + 12 * 2 * 197 * 197 * 192


def test_riformer():
    rows = rc.table("riformer").rows
    assert len(rows) == 10
    assert rows[0].model == "RIFormer-S12"
    assert all(abs(row.cost.parameters / 1e6 - float(row.parameters[:-1])) <= 0.5 for row in rows)


def test_on_the_command_line(repaconv, monkeypatch):
    code, out, _ = repaconv("table", "riformer")
    assert code == 0
    assert "differs (1)" in out
    assert repaconv("table", "nothing")[0] == 2
    with pytest.raises(UsageProblem):
        rc.table("nothing")
    from repaconv.methods.riformer import METHOD

    without = replace(METHOD, figures=Path("none.toml"))
    monkeypatch.setattr(plugins, "load", lambda group, name: without)
    with pytest.raises(Refused):
        rc.table("riformer")
