"""Why a link has its verdict: one reason of a fixed list with its figures, and the sentence that is made of them.

Programs decide by the reason; the sentence is for people.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from repaconv.results.records import Figures

Verdict = Literal["passed", "failed", "not verified"]

Reason = Literal[
    "within_tolerance",
    "explained_by_rounding",
    "equal_in_float64",
    "within_budget",
    "exceeds_tolerance",
    "discrete_values_differ",
    "shape_or_type_differs",
    "does_not_run",
    "layer_broken",
    "exceeds_budget",
    "required",
    "build_failed",
    "constant_output",
    "rounding_too_large",
    "rounding_decides",
    "not_comparable",
    "discrete_in_low_precision",
    "unsuitable_inputs",
    "loss_unknown",
    "no_budget",
    "not_run",
]
REASONS: tuple[Reason, ...] = get_args(Reason)
_LAST_PASSED, _LAST_FAILED = REASONS.index("within_budget"), REASONS.index("build_failed")

PHRASES: dict[Reason, str] = {
    "within_tolerance": "",
    "explained_by_rounding": "",
    "equal_in_float64": "verified in float64 alone",
    "within_budget": "",
    "exceeds_tolerance": "",
    "discrete_values_differ": "",
    "shape_or_type_differs": "",
    "does_not_run": "the candidate does not run",
    "layer_broken": "broken at",
    "exceeds_budget": "",
    "required": "required",
    "build_failed": "its build says failed",
    "constant_output": "the output changes too little between the inputs for an error to show",
    "rounding_too_large": "rounding alone moves it so far that a comparison shows nothing",
    "rounding_decides": "rounding decides what comes out",
    "not_comparable": "not compared",
    "discrete_in_low_precision": "lower precision decides discrete values differently, which is counted only",
    "unsuitable_inputs": "",
    "loss_unknown": "the budget limits a loss that these images do not show",
    "no_budget": "",
    "not_run": "",
}
"""What a reason is called in words; empty where the verdict says it."""


def verdict_for(reason: Reason) -> Verdict:
    """The only verdict that a link with this reason has."""
    place = REASONS.index(reason)
    return "passed" if place <= _LAST_PASSED else "failed" if place <= _LAST_FAILED else "not verified"


def limit_in_words(limit: float) -> str:
    """A relative or absolute limit: one digit if that is the number (1e-05), otherwise two (1.3e-05)."""
    short = f"{limit:.0e}"
    return short if abs(float(short) - limit) <= 0.01 * limit else f"{limit:.1e}"


def sentence(reason: Reason, figures: Figures) -> str:
    """Reason and figures in words; empty where the verdict and the metrics say all."""
    has, parts = figures, [": ".join(filter(None, [PHRASES[reason], figures.detail]))]
    if has.different:
        by = "" if has.error is None else f", by up to {has.error:.1e}{' of their neighbors' * (has.unit == 'numbers')}"
        parts.append(f"{has.different} of {has.compared} {has.unit} differ{by}")
    if has.left_out:
        part = has.left_out / (has.compared or 1)
        share = "less than 1%" if part < 0.005 else f"{part:.0%}"
        parts.append(f"{has.left_out} of {has.compared} {has.unit} ({share}) depend on rounding and were left out")
    if has.explained:
        parts.append(f"{has.explained} of {has.compared} {has.unit} explained by {has.arithmetic} rounding")
    if has.rounding is not None:
        allowed = f" (allowed: {has.factor:g} times)" if has.factor else ""
        parts.append(f"rounding moves the original network by {has.rounding:.0e}{allowed}")
    if has.error_in_float64 is not None:
        parts.append(f"computed in float64, the candidate is off by {has.error_in_float64:.0e}")
    if has.unfused:
        parts.append(f"on {has.unfused} probes without ONNX Runtime's own fusions, whose result is not finite")
    return "; ".join(filter(None, parts))


# --- Results of versions that had no reasons. Only the reader of old files looks into words.

_IN_WORDS: tuple[tuple[str, Reason], ...] = (
    ("explained by FP32 rounding", "explained_by_rounding"),
    ("explained by float64 rounding", "explained_by_rounding"),
    ("against float64, relative to neighboring numbers", "explained_by_rounding"),
    ("verified in float64 alone", "equal_in_float64"),
    ("lossy, against the network before conversion", "within_budget"),
    ("lossy, against the network before conversion", "exceeds_budget"),
    ("numbers that are decided are others", "discrete_values_differ"),
    ("numbers are others", "discrete_values_differ"),
    ("has no such output", "shape_or_type_differs"),
    ("shape [", "shape_or_type_differs"),
    ("the candidate does not run", "does_not_run"),
    ("broken at ", "layer_broken"),
    ("required", "required"),
    ("its build says failed", "build_failed"),
    ("no budget was given", "no_budget"),
    ("rounding alone moves it so far", "rounding_too_large"),
    ("rounding decides", "rounding_decides"),
    ("a fault would not show", "constant_output"),
    ("not compared", "not_comparable"),
    ("NaN on both sides", "not_comparable"),
    ("empty on every", "not_comparable"),
    ("numbers that are decided are others", "discrete_in_low_precision"),
)
"""What notes of those versions contain, by the reason that it is of; the first that has the link's verdict holds."""


def reason_in_words(verdict: str, note: str) -> Reason:
    """The reason of a link that has it in its note alone."""
    usual: dict[str, Reason] = {"passed": "within_tolerance", "failed": "exceeds_tolerance"}
    found = (reason for words, reason in _IN_WORDS if words in note and verdict_for(reason) == verdict)
    return next(found, usual.get(verdict, "not_run"))
