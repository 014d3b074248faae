"""Every planted fault fails the gate, at the right link and module. Without the fault the same recipe passes."""

from __future__ import annotations

import pytest
from planted_faults import DOCS, FAULTS, page, write_recipe

import repaconv as rc
from repaconv.verification.tolerances import LINKS


def first_failure(report):
    failed = [check for check in report.recipes[0].checks if check.verdict in ("failed", "error")]
    return min(failed, key=lambda check: LINKS.index(check.name) if check.name in LINKS else -1)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.what for fault in FAULTS])
def test_a_planted_fault_fails_the_gate_where_it_is(fault, tmp_path, monkeypatch):
    recipe = write_recipe(fault, tmp_path)
    with fault.plant():
        report = rc.gate([recipe])
    assert report.exit_code == 1, report
    found = first_failure(report)
    assert (found.name, found.verdict) == (fault.link, "failed"), found
    assert fault.module in found.module.split(", "), found
    monkeypatch.setattr("repaconv.sources.verified_onnx_export._LAST_EXPORT", {})  # of code that was another
    sound = rc.gate([recipe], rerun=True)  # a fault in memory is in no file that a step is made of
    assert sound.exit_code == 0, [check for check in sound.recipes[0].checks if check.verdict != "passed"]


def test_the_page_of_the_docs_is_this_table():
    assert DOCS.read_text() == page([(fault.what, fault.link, fault.module) for fault in FAULTS])
