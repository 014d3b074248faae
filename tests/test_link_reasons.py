"""Reasons of links: each has one verdict, no code decides by the words of a note, and older results get theirs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import repaconv
from repaconv.results import PREVIOUS, Figures, Link, Tolerance, VerifyArtefact
from repaconv.results.link_reasons import PHRASES, REASONS, limit_in_words, reason_in_words, sentence, verdict_for
from repaconv.results.records import Verdict
from repaconv.verification.comparison import link_between

DATA = Path(__file__).parent / "data" / "schema2"
TOLERANCE = Tolerance(kind="exact", rtol=1e-5)


def test_a_reason_has_one_verdict_and_a_phrase():
    assert set(PHRASES) == set(REASONS)
    assert {verdict_for(reason) for reason in REASONS} == set(get_args(Verdict))
    for reason in REASONS:
        link = Link.concluded(reason, note="on noise", name="onnx", reference="a", candidate="b")
        assert link.verdict == verdict_for(reason)
        assert link.note == "; ".join(filter(None, [PHRASES[reason], "on noise"]))


def test_a_link_tells_programs_why_in_one_word_and_in_figures():
    right = np.random.default_rng(0).standard_normal((4, 5))
    link = link_between("onnx", ("a", right), ("b", right + 1e-3), logits=False, tolerance=TOLERANCE)
    assert json.loads(link.model_dump_json())["reason"] == link.reason == "exceeds_tolerance"
    still = link_between("onnx", ("a", 0 * right + 1), ("b", 0 * right + 1), logits=False, tolerance=TOLERANCE)
    assert (still.reason, still.verdict) == ("constant_output", "not verified")
    again = still.because("required", "not verified")
    assert (again.reason, again.verdict) == ("required", "failed")
    assert again.note == f"required: not verified; {still.note}"
    message = Figures(unit="numbers", compared=18, left_out=2)
    assert sentence("within_tolerance", message) == "2 of 18 numbers (11%) depend on rounding and were left out"
    few = Figures(unit="numbers", compared=9000, left_out=1)
    assert sentence("within_tolerance", few) == "1 of 9000 numbers (less than 1%) depend on rounding and were left out"


def test_a_limit_has_the_digits_that_distinguish_it_from_the_usual_one():
    said = [limit_in_words(limit) for limit in (1e-5, 1e-12, 1e-5 * (21 / 12) ** 0.5, 3.4e-4, 0.0)]
    assert said == ["1e-05", "1e-12", "1.3e-05", "3.4e-04", "0e+00"]


@pytest.mark.parametrize(
    ("verdict", "note", "reason"),
    [
        ("passed", "", "within_tolerance"),
        ("passed", "1 of 9 explained by FP32 rounding, which moves the original by 4e-05", "explained_by_rounding"),
        ("passed", "on 2 of 7 probes by 3e-05, explained by FP32 rounding; random inputs", "explained_by_rounding"),
        ("passed", "in float32 the same numbers on every probe: verified in float64 alone", "equal_in_float64"),
        ("failed", "", "exceeds_tolerance"),
        ("failed", "3 of 9 int64 numbers are others", "discrete_values_differ"),
        ("failed", "required, and not run: TensorRT cannot be imported", "required"),
        ("failed", "its build says failed; on noise", "build_failed"),
        ("failed", "the candidate does not run: no such size", "does_not_run"),
        ("not verified", "rounding alone moves it so far that a comparison shows nothing: 9", "rounding_too_large"),
        ("not verified", "the same numbers on every probe, so that a fault would not show", "constant_output"),
        ("not verified", "in 3 of 4 images rounding decides what comes out", "rounding_decides"),
        ("not verified", "strings: not compared", "not_comparable"),
        ("not verified", "TensorRT cannot be imported", "not_run"),
    ],
)  # fmt: skip
def test_a_link_of_a_version_without_reasons_has_the_one_that_its_note_gives(verdict, note, reason):
    old = {"name": "onnx", "reference": "a", "candidate": "b", "tolerance": None, "metrics": None}
    assert Link.model_validate({**old, "verdict": verdict, "note": note}).reason == reason
    assert verdict_for(reason) == verdict == verdict_for(reason_in_words(verdict, note))


def test_runs_of_the_previous_schema_have_reasons():
    for path in DATA.glob("*/verify.json"):
        links = VerifyArtefact.model_validate_json(path.read_text(), context=PREVIOUS).links
        assert links
        assert all(verdict_for(link.reason) == link.verdict for link in links)


LOOKS = ("startswith", "endswith", "partition", "rpartition", "split", "find", "index", "count", "removeprefix")


def reads_words(path: Path) -> list[str]:
    """Where a file compares, searches or cuts a ``note``."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        looked: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            looked = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOKS:
            looked = [node.func.value]
        if any(isinstance(each, ast.Attribute) and each.attr == "note" for each in looked):
            found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_code_decides_by_the_words_of_a_note(tmp_path):
    sample = tmp_path / "sample.py"
    sample.write_text("a = link.note.startswith('x')\nb = 'x' in link.note\nc = link.note\n")
    assert len(reads_words(sample)) == 2
    package = Path(repaconv.__file__).parent
    assert not [line for path in sorted(package.rglob("*.py")) for line in reads_words(path)]


def test_the_page_on_concepts_has_every_reason():
    page = (Path(__file__).parents[1] / "docs" / "concepts.md").read_text()
    assert not [reason for reason in REASONS if f"`{reason}`" not in page]
