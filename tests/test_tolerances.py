"""The limits of links, and the verdict of metrics at, below and above each of them."""

from __future__ import annotations

from math import comb, inf, nan, sqrt

import pytest

import repaconv as rc
from repaconv.results import Accuracy, Link, Metrics, Tolerance
from repaconv.verification import tolerances
from repaconv.verification.tolerances import by_chance, coarser, depth_reason, exact_rtols, lossy_words, tolerance

EXACT = ["recorded", "fold", "stored", "exported", "form", "simplified", "onnx", "preprocessing", "engine", "agreement"]
ABOVE = 1 + 1e-9


def metrics(**values):
    return Metrics(**{"images": 1000, "max_abs_error": 0.0, "max_rel_error": 0.0, "mean_abs_error": 0.0, "cosine": 1.0}
                   | {"top1_agreement": 1.0} | values)  # fmt: skip


def verdict(allowed, accuracy=None, **values):
    return tolerances.verdict_by(metrics(**values), allowed, accuracy)


@pytest.mark.parametrize("link", EXACT)
def test_exact_links(link):
    found = tolerance(link)
    limit = 1e-12 if link == "fold" else 1e-5
    assert (found.kind, found.rtol, found.rtol_reason, found.atol, found.noise) == ("exact", limit, "", None, 2 * limit)
    assert {found.cosine, found.norm_error, found.flips, found.flips_within_noise, found.accuracy_loss} == {None}
    assert verdict(found, max_rel_error=limit, max_abs_error=inf) == "passed"
    assert verdict(found, max_rel_error=limit * ABOVE) == "failed"
    assert verdict(found, max_rel_error=nan) == "failed"


def test_the_limits_grow_with_the_square_root_of_the_depth():
    assert exact_rtols() == exact_rtols(12) == exact_rtols(0) == {link: tolerance(link).rtol for link in EXACT}
    assert exact_rtols(48) == {link: pytest.approx(2 * limit) for link, limit in exact_rtols().items()}
    assert exact_rtols(13)["fold"] == pytest.approx(1e-12 * sqrt(13 / 12))
    assert (depth_reason(12), depth_reason(13)[-9:]) == ("", "13 blocks")


def test_tolerances_of_the_user_come_before_those_of_the_source():
    usual, reasons = {"fold": 3e-9}, {"fold": "deep"}
    found = tolerance("fold", usual=usual, reasons=reasons)
    assert (found.rtol, found.rtol_reason, found.noise) == (3e-9, "deep", 6e-9)
    assert tolerance("onnx", usual=usual, reasons=reasons).rtol == 1e-5
    found = tolerance("fold", usual=usual, reasons=reasons, rtol={"fold": 0.0, "onnx": 1e-3})
    assert (found.rtol, found.rtol_reason, found.atol) == (0.0, "given by --rtol", None)
    found = tolerance("fold", usual=usual, atol={"fold": 0.5})
    assert (found.rtol, found.rtol_reason, found.atol, found.noise) == (None, "", 0.5, 0.0)
    assert verdict(found, max_abs_error=0.5, max_rel_error=inf) == "passed"
    assert verdict(found, max_abs_error=0.5 * ABOVE) == "failed"
    both = tolerance("fold", rtol={"fold": 1e-3}, atol={"fold": 0.5})
    assert [verdict(both, max_abs_error=a, max_rel_error=r) for a, r in ((1, 1e-3), (0.5, 1), (1, 1))] == [
        *("passed", "passed", "failed"),
    ]
    assert tolerance("fold", rtol={"fold": 0.1}, atol={"fold": 1e300}).rtol == 0.1


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"link": "flod"}, "tolerance.unknown"),
        ({"rtol": {"flod": 0.1}}, "tolerance.unknown"),
        ({"atol": {"flod": 0.1}}, "tolerance.unknown"),
        ({"rtol": {"fold": 0.1 * ABOVE}}, "tolerance.unbounded"),
        ({"rtol": {"fold": -1e-9}}, "tolerance.unbounded"),
        ({"rtol": {"onnx": nan}}, "tolerance.unbounded"),
        ({"atol": {"fold": inf}}, "tolerance.unbounded"),
        ({"atol": {"fold": -1.0}}, "tolerance.unbounded"),
        ({"link": "onnx", "precision": "fp16", "rtol": {"onnx": 0.1}}, "tolerance.lossy"),
        ({"link": "int8", "precision": "int8", "atol": {"int8": 0.1}}, "tolerance.lossy"),
    ],
)
def test_what_is_no_tolerance_is_refused(options, code):
    with pytest.raises(rc.UsageProblem) as refused:
        tolerance(**{"link": "fold", **options})
    assert refused.value.code == code


LOSSY = {"tf32": (0.999, 0.01), "fp16": (0.999, 0.01), "bf16": (0.99, 0.05), "int8": (0.95, 0.1)}


@pytest.mark.parametrize("precision", LOSSY)
def test_lossy_links(precision):
    found, (cosine, noise) = tolerance("engine", precision=precision), LOSSY[precision]
    assert found == Tolerance(
        kind="lossy", cosine=cosine, norm_error=found.norm_error, flips=0.01, flips_within_noise=0.25,
        accuracy_loss=0.01, noise=noise,
    )  # fmt: skip
    assert found.norm_error == pytest.approx(sqrt(1 - cosine**2))
    assert tolerance(precision, precision=precision) == found
    features = tolerance(precision, precision=precision, logits=False)
    assert (features.flips, features.flips_within_noise, features.accuracy_loss) == (None, None, None)
    assert (features.cosine, features.norm_error) == (found.cosine, found.norm_error)
    merging = tolerance(precision, precision=precision, decides=True)
    assert (merging.cosine, merging.norm_error) == (0.9, pytest.approx(sqrt(1 - 0.81)))
    assert verdict(found, cosine=cosine, norm_error=found.norm_error) == "passed"
    assert verdict(found, cosine=cosine / ABOVE) == "failed"
    assert verdict(found, norm_error=found.norm_error * ABOVE) == "failed"
    assert verdict(found, max_abs_error=inf) == "failed"
    assert verdict(found, max_abs_error=nan) == "failed"
    assert verdict(found, cosine=None) == "passed"


def accuracy(high):
    none = {"only_reference": 0, "only_candidate": 0, "difference": 0.0, "p_value": 1.0}
    return Accuracy(images=10, reference=0.5, candidate=0.5, low=-1.0, high=high, **none)


def test_changed_predictions_and_lost_accuracy_fail():
    allowed = tolerance("int8", precision="int8")
    assert verdict(allowed, top1_flips_that_matter=10) == "passed"  # of 1000
    assert verdict(allowed, top1_flips_that_matter=11) == "failed"
    assert verdict(allowed, accuracy(-0.01)) == "passed"
    assert verdict(allowed, accuracy(-0.01 * ABOVE)) == "failed"
    features = tolerance("int8", precision="int8", logits=False)
    assert verdict(features, accuracy(-1.0), top1_flips_that_matter=1000) == "passed"
    assert verdict(allowed, top1_flips_within_noise=2, top1_close=2) == "passed"
    assert verdict(allowed, top1_flips_within_noise=4, top1_close=4) == "failed"
    assert verdict(allowed, top1_flips_within_noise=25, top1_close=100) == "passed"
    assert verdict(allowed, top1_flips_within_noise=45, top1_close=100) == "failed"


@pytest.mark.parametrize(("n", "share"), [(0, 0.25), (1, 0.25), (2, 0.25), (7, 0.5), (40, 0.01), (30, 0.9)])
def test_the_probability_of_so_many(n, share):
    for count in range(n + 1):
        exact = sum(comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(count, n + 1))
        assert by_chance(count, n, share) == pytest.approx(exact, rel=1e-9)


def test_the_probability_of_none_and_of_all():
    assert [by_chance(0, 3, share) for share in (0, 1, 0.5)] == [1, 1, pytest.approx(1)]
    assert [by_chance(2, 3, share) for share in (0, 1, -1, 2)] == [0, 1, 0, 1]


def test_the_coarsest_precision():
    assert coarser(["fp32", "fp16", "int8", "bf16"]) == "int8"
    assert coarser(["bf16", "tf32"]) == "bf16"
    assert coarser(["fp32"]) == coarser([]) == "fp32"


def test_what_is_said_of_the_predictions_of_a_lossy_link():
    allowed = tolerance("int8", precision="int8")
    assert lossy_words(metrics(), allowed, None, task="detect").endswith(
        "the results of detect have a row of their own"
    )
    none = "no top-1 predictions to compare: evaluated by cosine and error alone"
    assert lossy_words(metrics(top1_agreement=None), allowed, None) == none
    assert lossy_words(metrics(), tolerance("int8", precision="int8", logits=False), None) == none
    assert lossy_words(metrics(top1_agreement=0.998), allowed, None) == (
        "99.8% of 1000 top-1 predictions agree; accuracy was not measured: no labels"
    )
    many = metrics(top1_flips_that_matter=11, top1_flips_within_noise=45, top1_close=100)
    assert lossy_words(many, allowed, accuracy(0.0)) == (
        "100.0% of 1000 top-1 predictions agree; 11 predictions with a lead above 10% of the largest logit changed, "
        "1% of all is allowed; 45 of 100 with a smaller lead changed, 25% is allowed and chance explains no more"
    )
    few = metrics(top1_flips_that_matter=1, top1_flips_within_noise=1, top1_close=2)
    assert lossy_words(few, allowed, accuracy(0.0)) == "100.0% of 1000 top-1 predictions agree"


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        ((), "not verified"),
        (("not verified",), "not verified"),
        (("passed", "not verified"), "passed"),
        (("passed", "failed", "not verified"), "failed"),
    ],
)
def test_the_verdict_of_all_links(verdicts, whole):
    links = [Link.model_construct(verdict=each) for each in verdicts]
    assert tolerances.verdict_of(links) == whole


def test_the_limits_that_other_modules_use():
    assert tolerances.EXPORTED_RTOL == 1e-6
    assert (tolerances.UNDECIDED_SHARE, tolerances.LEAST_OUTPUT_CHANGE, tolerances.LEAST_LOSSY_CHANGE) == (
        0.5,
        10,
        1e-5,
    )
    assert ("converted", *EXACT, *LOSSY) == tolerances.LINKS
