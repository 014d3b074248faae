"""How far the candidate of a link may differ from the reference: by precision, by depth, by kind of output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp, isfinite, lgamma, log, sqrt
from sys import float_info

from repaconv.core.errors import UsageProblem, did_you_mean
from repaconv.results import Accuracy, Link, Metrics, Tolerance, Verdict

POLICY_VERSION = "11"
"""Version of the figures below; it is written into every result."""

# max|a - b| / max|b| of a net of up to 12 blocks; rounding errors add up like a random walk, so with sqrt(depth).
# float64: largest seen 5e-15. float32 against its float64 self: seen 3e-7 to 2e-6.
FLOAT64, FLOAT32 = 1e-12, 1e-5
UNSCALED_DEPTH = 12

EXACT = {
    "recorded": FLOAT32,
    "fold": FLOAT64,
    "stored": FLOAT32,
    "exported": FLOAT32,
    "form": FLOAT32,
    "simplified": FLOAT32,
    "onnx": FLOAT32,
    "preprocessing": FLOAT32,
    "engine": FLOAT32,
    "agreement": FLOAT32,
}
"""Links between forms that compute the same; ``agreement`` is bench's, between the two models that it measures."""

# First, the smallest allowed cosine of an image. It also limits the error (`norm_error`), to about twice the largest
# error of sound trained networks. Second, the noise: a top-1 class may change if its lead, relative to max|b|, is
# smaller. The largest errors of sound trained networks are 0.002 in float16, 0.02 in bfloat16 and 0.15 in int8; with
# merged tokens 0.09, 0.09 and 0.18 (benchmarks/lower_precision_tolerances.py). TensorFloat-32 multiplies with
# float16's precision.
LOSSY = {"tf32": (0.999, 0.01), "fp16": (0.999, 0.01), "bf16": (0.99, 0.05), "int8": (0.95, 0.1)}
# Smallest cosine if lower precision merges other tokens: outputs then differ, and neither is wrong.
DECIDING_COSINE = 0.9
# Images are left out if rounding decides which tokens merge and they differ by no more than that. Single numbers that
# rounding decides are left out as well. If more than this share is left out, nothing is verified.
UNDECIDED_SHARE = 0.5
LEAST_OUTPUT_CHANGE = 10
"""An output must change between inputs by at least this many tolerances, relative to its largest number. If it changes
less, a fault as large as a tenth of the change would pass."""
# A lossy link verifies nothing if the outputs of all images differ by no more than this, relative to the largest one.
LEAST_LOSSY_CHANGE = 1e-5
# Largest share of images whose top-1 prediction changes in spite of a lead above the noise. Sound trained networks show
# at most one in 500.
MOST_FLIPS = 0.01
# Largest share of changed top-1 predictions among images with a smaller lead. A sound network keeps most of these as
# well, since its errors are far below the noise: trained networks change almost none; with random weights, where all
# leads are small, up to 31% change. With half the bits of the weights, or one scale wrong by a factor of 2, most
# networks change 25% to 70% (benchmarks/lower_precision_tolerances.py).
FLIPS_WITHIN_NOISE = 0.25
CHANCE_LIMIT = 0.01
"""More changes than allowed fail only if they are less probable than this by chance: of two images, both may change."""
ACCURACY_LOSS = 0.01

EXPORTED_RTOL = 1e-6
"""Allowed error of an export in float64. An exporter folds values that the network computes in float32 (the sine of a
position) and rounds them differently, and the scale of a Resize is float32. Real faults are larger."""
LARGEST_RTOL = 0.1
"""Largest relative tolerance of an exact link that a user may set."""

EXPLAINED = "the largest error that rounding alone explains"
"""Why a relative limit is the error itself."""

LINKS = ("converted", *EXACT, *LOSSY)
"""All links. The first one is evaluated only by the budget of its conversion."""


def exact_rtols(depth: int = UNSCALED_DEPTH) -> dict[str, float]:
    """Return the relative tolerance of every exact link for a network with this number of blocks."""
    return {link: value * sqrt(max(1.0, depth / UNSCALED_DEPTH)) for link, value in EXACT.items()}


def depth_reason(depth: int) -> str:
    """Return why the limits of a network with this number of blocks are larger than usual; empty if they are usual."""
    return f"limits grow with the square root of the depth, here {depth} blocks" if depth > UNSCALED_DEPTH else ""


def tolerance(
    link: str,
    *,
    precision: str = "fp32",
    logits: bool = True,
    decides: bool = False,
    usual: Mapping[str, float] | None = None,
    reasons: Mapping[str, str] | None = None,
    rtol: Mapping[str, float] | None = None,
    atol: Mapping[str, float] | None = None,
) -> Tolerance:
    """Return the tolerance of a link.

    Args:
        link: One of `LINKS`.
        precision: The precision of the candidate; a link in lower precision is lossy.
        logits: Whether the outputs are logits; features have no top-1 prediction.
        decides: Whether the network makes discrete decisions, e.g. which tokens merge.
        usual: Relative tolerances of the exact links; `exact_rtols` when None.
        reasons: Why some of the usual tolerances are not those of `EXACT`, by link.
        rtol: Relative tolerances given by the user, by link; they replace the usual ones.
        atol: Absolute tolerances given by the user, by link. An output passes by either tolerance. Given alone, the
            absolute tolerance replaces the relative one.

    Raises:
        UsageProblem: If a link does not exist, if an exact tolerance is given for a lossy link, or if a tolerance is
            out of range.
    """
    require_links([link, *(rtol or {}), *(atol or {})])
    for given, largest in ((rtol, LARGEST_RTOL), (atol, float_info.max)):
        for name, value in (given or {}).items():
            bounded(f"the tolerance of {name}", value, largest)
    given_rtol, given_atol = (rtol or {}).get(link), (atol or {}).get(link)
    rule = precision if precision in LOSSY else link
    if rule in EXACT:
        relative, reason = given_rtol, "given by --rtol" if given_rtol is not None else ""
        if given_rtol is None and given_atol is None:
            relative, reason = {**exact_rtols(), **(usual or {})}[link], (reasons or {}).get(link, "")
        noise = 2 * (relative or 0.0)
        return Tolerance(kind="exact", rtol=relative, rtol_reason=reason, atol=given_atol, noise=noise)
    if given_rtol is not None or given_atol is not None:
        raise UsageProblem(
            f"the link {link} is lossy, so --rtol and --atol do not apply to it.",
            hint="Leave --rtol and --atol out for this link.",
            code="tolerance.lossy",
        )
    return _lossy(rule, logits=logits, decides=decides)


def _lossy(precision: str, *, logits: bool, decides: bool) -> Tolerance:
    cosine, noise = LOSSY[precision]
    least = DECIDING_COSINE if decides else cosine
    return Tolerance(
        kind="lossy",
        cosine=least,
        norm_error=norm_error(least),
        flips=MOST_FLIPS if logits else None,
        flips_within_noise=FLIPS_WITHIN_NOISE if logits else None,
        accuracy_loss=ACCURACY_LOSS if logits else None,
        noise=noise,
    )


def norm_error(cosine: float) -> float:
    """Return the smallest possible ||a - b|| / ||b|| of two outputs a and b with this cosine."""
    return sqrt(1 - cosine * cosine)


def coarser(precisions: Sequence[str]) -> str:
    """Return the precision with the largest noise; ``fp32`` if none is lossy."""
    return max((name for name in precisions if name in LOSSY), key=lambda name: LOSSY[name][1], default="fp32")


def bounded(name: str, value: float, largest: float, *, is_share: bool = False) -> float:
    """Return the value if it is from 0 to ``largest``; the hint of a share says what 5% is.

    Raises:
        UsageProblem: If it is not, or if it is NaN.
    """
    if not 0 <= value <= largest:
        percent = "; 5% is 0.05" if is_share else ""
        raise UsageProblem(
            f"{name} is {value:g}.", hint=f"Give a number from 0 to {largest:g}{percent}.", code="tolerance.unbounded"
        )
    return value


def require_links(names: list[str]) -> None:
    """Refuse a name that no link has.

    Raises:
        UsageProblem: If there is no such link.
    """
    for name in names:
        if name not in LINKS:
            raise UsageProblem(
                f"there is no link {name!r}.",
                hint=f"{did_you_mean(name, LINKS)}Links: {', '.join(LINKS)}.",
                code="tolerance.unknown",
            )


# --- Decide the verdict of metrics by a tolerance, and describe the verdict of a lossy link.


def verdict_by(metrics: Metrics, allowed: Tolerance, accuracy: Accuracy | None) -> Verdict:
    """Return the verdict of metrics by a tolerance; NaN fails."""
    if allowed.kind == "exact":
        relative = allowed.rtol is not None and metrics.max_rel_error <= allowed.rtol
        absolute = allowed.atol is not None and metrics.max_abs_error <= allowed.atol
        return "passed" if relative or absolute else "failed"
    near = allowed.norm_error is None or metrics.norm_error <= allowed.norm_error
    sound = isfinite(metrics.max_abs_error) and (metrics.cosine is None or metrics.cosine >= (allowed.cosine or -1.0))
    lost = accuracy is not None and allowed.accuracy_loss is not None and accuracy.high < -allowed.accuracy_loss
    return "passed" if sound and near and not lost and not any(_too_many(metrics, allowed)) else "failed"


def _too_many(metrics: Metrics, allowed: Tolerance) -> tuple[bool, bool]:
    """Whether more top-1 predictions changed than allowed: (with a lead above the noise, with a smaller lead)."""
    if allowed.flips is None or allowed.flips_within_noise is None:
        return False, False
    beyond = metrics.top1_flips_that_matter > allowed.flips * metrics.images
    chance = by_chance(metrics.top1_flips_within_noise, metrics.top1_close, allowed.flips_within_noise)
    return beyond, chance < CHANCE_LIMIT


def by_chance(count: int, n: int, share: float) -> float:
    """Return the probability of at least ``count`` successes in ``n`` trials, each with the probability ``share``."""
    if not 0 < share < 1:
        return float(count == 0 or share >= 1)
    ways = (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) for k in range(count, n + 1))
    odds = (k * log(share) + (n - k) * log(1 - share) for k in range(count, n + 1))
    return sum(exp(way + odd) for way, odd in zip(ways, odds, strict=True))


def lossy_words(metrics: Metrics, allowed: Tolerance, accuracy: Accuracy | None, *, task: str = "") -> str:
    """Describe the top-1 predictions of a lossy link, which limit they exceed, and what was not evaluated.

    The measured values with their limits are in `Link.lossy_text`, which is printed next to it.

    ``task`` is the network's task, if its results have a link of their own.
    """
    if task:
        return f"these are the numbers; the results of {task} have a row of their own"
    if metrics.top1_agreement is None or allowed.flips is None or allowed.flips_within_noise is None:
        return "no top-1 predictions to compare: evaluated by cosine and error alone"
    beyond, within = _too_many(metrics, allowed)
    flips, lead = metrics.top1_flips_that_matter, f"{allowed.noise:.0%} of the largest logit"
    words = [f"{metrics.top1_agreement:.1%} of {metrics.images} top-1 predictions agree"]
    if beyond:
        count = f"{flips} prediction{'s' if flips > 1 else ''} with a lead above {lead} changed"
        words.append(f"{count}, {allowed.flips:.0%} of all is allowed")
    if within:
        count = f"{metrics.top1_flips_within_noise} of {metrics.top1_close} with a smaller lead changed"
        words.append(f"{count}, {allowed.flips_within_noise:.0%} is allowed and chance explains no more")
    return "; ".join([*words, *([] if accuracy else ["accuracy was not measured: no labels"])])


def verdict_of(links: Iterable[Link]) -> Verdict:
    """Return the verdict of all links: failed if one failed, passed if one passed, else not verified."""
    verdicts = {link.verdict for link in links}
    return "failed" if "failed" in verdicts else "passed" if "passed" in verdicts else "not verified"
