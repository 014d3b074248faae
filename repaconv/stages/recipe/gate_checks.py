"""What a recipe's stages left, as checks: each with its verdict, in one sentence, at the recipe's line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from repaconv.core.errors import GateFailed, RepaconvError
from repaconv.core.toml_positions import At, Lines, place_of
from repaconv.results import (
    Artefact,
    BenchArtefact,
    BuildArtefact,
    BundleArtefact,
    Check,
    ConvertArtefact,
    ExportArtefact,
    FoldArtefact,
    Link,
    VerifyArtefact,
)
from repaconv.stages.bench.latency_baselines import by_baseline, name_in
from repaconv.stages.recipe.options import GateOptions
from repaconv.stages.recipe.recipe_file import BenchSection, Recipe, RecipeProblem, Wrong
from repaconv.stages.recipe.requirements import in_recipe, key_of
from repaconv.verification.tolerances import LOSSY, LUCK, by_chance

# --- What the gate says of a link and of a measurement, in one sentence each.


def measured(done: BenchArtefact) -> str:
    """A measurement in one sentence."""
    told = f"{done.latencies[0].p50_ms:.3f} ms at the median"
    if done.ratio:
        told += f"; {done.compared}"
    if done.quality.verdict != "trusted":
        told += f"; measurement {done.quality.verdict}: {'; '.join(done.quality.reasons)}"
    return told


def told_of(link: Link) -> str:
    """A link in one sentence."""
    on = f" on {link.inputs}" if link.inputs else ""
    words = [f"{link.candidate} against {link.reference}{on}"]
    if link.metrics and link.tolerance:
        words.append(f"max rel {link.metrics.max_rel_error:.1e} on {link.metrics.images} images")
        exact = link.tolerance.kind == "exact"
        words.append(f"{link.tolerance.description} is allowed" if exact else f"lossy: {link.lossy_told}")
        if exact and link.metrics.top1_agreement is not None:
            words.append(f"top-1 agreement {link.metrics.top1_agreement:.1%}")
    if link.accuracy:
        words.append(f"accuracy {link.accuracy.reference:.2%} -> {link.accuracy.candidate:.2%}")
    words += filter(None, [link.note, link.limit_told])
    return "; ".join(words)


# --- What a recipe's stages left, as checks: each with its verdict, in one sentence, at the recipe's line.

WORST = (1, 4, 3, 2, 5, 0)
"""The worst first: what failed, was refused, is missing here, was asked wrongly, is not known."""
ROUNDED = 1e-9
"""Percent by which a share of images may be below a limit that it is meant to meet: 497 of 500 are 99.4%."""
_CODES = {"failed": 1, "inconclusive": 5}
_EXPORT_LINKS = ("exported", "form", "simplified", "onnx", "preprocessing", *LOSSY)
"""Links that a recipe asks for in its section of exports."""


def worst(codes: Any) -> int:
    """Of exit codes."""
    return min(codes, key=WORST.index, default=0)


class Judge:
    """The checks of one recipe, as they come.

    Args:
        path: The recipe, by which its baselines are named.
        options: Whether baselines are written.
    """

    def __init__(self, path: Path, options: GateOptions) -> None:
        self.path, self.options = path, options
        self.lines: Lines = {}
        self.checks: list[Check] = []
        self.codes: list[int] = []

    def failed(self, stage: str, name: str, keys: tuple[str, ...], done: Artefact, since: int) -> None:
        """A verdict that no check since then has told yet."""
        if done.verdict == "failed" and all(check.verdict != "failed" for check in self.checks[since:]):
            self.note(stage, name or stage, "failed", f"{stage} says that it failed", keys)

    def stopped(self, stage: str, keys: tuple[str, ...], name: str, problem: RepaconvError) -> None:
        """A stage that could not be finished."""
        failed = isinstance(problem, GateFailed)
        self.codes.append(problem.exit_code)
        keys = (key_of(problem, self.lines) if stage == "fold" else ()) or keys
        every = problem.wrong if isinstance(problem, RecipeProblem) else ()
        one = Wrong(place_of(self.lines, keys, str(self.path)), problem.message, in_recipe(problem.hint), problem.code)
        for each in every or (one,):
            self.checks.append(
                Check(
                    stage=stage,
                    name="fold" if problem.code.startswith("fold.") else name or stage,
                    verdict="failed" if failed else "error",
                    message=each.message if every else each.told,
                    **self._place(each.at),
                    module=problem.module if isinstance(problem, GateFailed) else "",
                    code=each.code,
                    hint=each.hint,
                )
            )

    def fold(self, done: FoldArtefact) -> None:
        """The certificate, and settings that contradict the checkpoint."""
        self.note("fold", "certificate", "passed", done.done, ("checkpoint",))
        for told in done.unverified:
            self.note("fold", "settings", "not verified", told, ("set",))

    def convert(self, done: ConvertArtefact) -> None:
        """What converting lost, on images that neither fitted nor chose."""
        self.note("convert", "judged", done.evaluation.verdict, told_of(done.evaluation), ("convert",))

    def export(self, done: ExportArtefact) -> None:
        """Links of the graph, and what the target does not take of it."""
        for link in done.links:
            if done.precision == "fp32" or link.name == done.precision or link.verdict == "failed":
                self.link("export", link)
        for told in done.violations:
            message = f"{done.target} does not take the graph: {told}"
            self.note("export", "rules", "failed", message, ("export", "target"))

    def verify(self, done: VerifyArtefact, recipe: Recipe) -> None:
        """All links of the chain, the accuracy by the recipe's limits, and accuracy that somebody claims."""
        for link in done.links:
            self.link("verify", link)
        self._accuracy(done, recipe)
        if done.verdict == "not verified":
            self.note("verify", "chain", "inconclusive", "no link shows anything of this network", ("verify",))
        for claim in done.claims if any(link.accuracy for link in done.links) else ():
            told = f"accuracy {claim.value:.2%} is claimed by {claim.source}; it is shown and not enforced"
            self.note("verify", "claim", "not verified", told, ("verify",))

    def _accuracy(self, done: VerifyArtefact, recipe: Recipe) -> None:
        """The least accurate version of the network, by ``min_top1`` and by ``[reference] top1`` less ``max_drop``.

        All links compare versions with one another, so a checkpoint that was ruined before it was folded passes them.
        A limit that the user gave is kept or not. The reference is known of other images, mostly: where these are so
        few that chance explains what lies below it, that is inconclusive.
        """
        verify, reference = recipe.verify, recipe.reference.top1 if recipe.reference else None
        given = ("verify", "max_drop") in self.lines
        measured = [link for link in done.links if link.accuracy and link.name != "recorded"]
        limits: list[tuple[tuple[str, ...], float, str, bool]] = []
        if verify.min_top1 is not None:
            limits.append((("verify", "min_top1"), verify.min_top1, "[verify] min_top1", True))
        if reference is not None and recipe.convert and not given:
            told = "[reference] top1 is of the network before its conversion: [verify] max_drop enforces it"
            self.note("verify", "accuracy", "not verified", told, ("reference", "top1"))
        elif reference is not None:
            told = f"[reference] top1 = {reference:g} less max_drop = {verify.max_drop:g}"
            place = ("verify", "max_drop") if given else ("reference", "top1")
            limits.append((place, reference - verify.max_drop, told, given))
        for keys, least, told, required in limits:
            if not measured:
                why = f"no accuracy was measured on {done.inputs}, and {told} needs images with labels"
                self.note("verify", "accuracy", "failed" if required else "not verified", why, keys)
                continue
            worst = min(measured, key=lambda link: link.accuracy.candidate if link.accuracy else 1.0)
            self._accuracy_of(worst, len(measured), least, told, keys)

    def _accuracy_of(self, worst: Link, versions: int, least: float, told: str, keys: tuple[str, ...]) -> None:
        """One limit, in percent."""
        assert worst.accuracy
        found, images = worst.accuracy.candidate, worst.accuracy.images
        verdict, hint = "passed", ""
        if 100 * found < least - ROUNDED:
            chance = by_chance(round((1 - found) * images), images, 1 - least / 100)
            verdict = "inconclusive" if keys[-1] != "min_top1" and chance >= LUCK else "failed"
            hint = "Verify on more images with labels." if verdict == "inconclusive" else ""
        which = f", the lowest of {versions} versions" if versions > 1 else ""
        message = (
            f"{worst.candidate}: top-1 accuracy {found:.2%} on {images} images{which}; {told}: {least:.2f}% at least"
        )
        self.note("verify", "accuracy", verdict, message, keys, hint=hint)

    def build(self, done: BuildArtefact) -> None:
        """What the engine computes in, and that it computes the same."""
        self.note("build", "precision", done.verdict, f"{done.runtime}: {done.note}", ("build",))
        for link in done.links:
            self.link("build", link)

    def bundle(self, done: BundleArtefact) -> None:
        """What goes to the board; what becomes of it there is told by collect."""
        told = f"{done.payload.path}: {done.images} images with what must come of them; to be run on the board"
        self.note("bundle", "bundle", "passed", told, ("bundle",))

    def bench(self, done: BenchArtefact, section: BenchSection) -> None:
        """The latency, by its baseline if there is one, and whether both compute the same."""
        if done.agreement and not section.against:  # a model that was named may be another altogether
            self.link("bench", done.agreement)
        told = measured(done)
        if not section.baseline:
            verdict = "inconclusive" if done.quality.verdict == "inconclusive" else "passed"
            self.note("bench", "latency", verdict, f"{told}; no baseline was asked for", ("bench",))
            return
        judged = by_baseline(
            Path(section.baseline),
            name_in(Path(section.baseline), self.path),
            done,
            section.max_regression,
            update=self.options.update_baseline,
            accept_inconclusive=self.options.accept_inconclusive,
            require=section.require,
        )
        key = "max_regression" if judged.regression else "baseline"
        self.note("bench", "latency", judged.verdict, f"{told}; {judged.told}", ("bench", key), hint=judged.hint)

    def link(self, stage: str, link: Link) -> None:
        """One link; where it fails, at the tolerance that the recipe gives it."""
        keys: tuple[str, ...] = (stage,) if stage in ("bench", "build") else ("verify",)
        keys = ("export",) if link.name in _EXPORT_LINKS and stage != "build" else keys
        if link.verdict == "failed":
            for table in ("rtol", "atol"):
                keys = next((key for key in [("verify", table, link.name)] if key in self.lines), keys)
        module = link.location.module if link.location and link.verdict == "failed" else ""
        hint = link.location.reason if link.location and link.verdict == "failed" else ""
        self.note(stage, link.name, link.verdict, told_of(link), keys, module=module, hint=hint)

    def note(
        self,
        stage: str,
        name: str,
        verdict: Any,
        message: str,
        keys: tuple[str, ...],
        *,
        module: str = "",
        hint: str = "",
    ) -> None:
        """One check."""
        self.codes.append(_CODES.get(verdict, 0))
        place = self._place(place_of(self.lines, keys, str(self.path)))
        self.checks.append(
            Check(stage=stage, name=name, verdict=verdict, message=message, module=module, hint=hint, **place)
        )

    def _place(self, at: At) -> dict[str, Any]:
        """Where it was asked for; the file is told where it is another, which the recipe extends."""
        return {"line": at.line, "column": at.column, "file": at.file if at.file != str(self.path) else ""}
