"""Turn the results of a recipe's stages into checks, each with a verdict, one sentence and the recipe's line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from repaconv.core.errors import GateFailed, RepaconvError
from repaconv.core.toml_positions import Position, Positions, position_of
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
from repaconv.stages.bench.latency_baselines import check_baseline, name_in
from repaconv.stages.bundle.text import board_commands
from repaconv.stages.recipe.missing_recipe_files import in_recipe, key_of
from repaconv.stages.recipe.options import GateOptions
from repaconv.stages.recipe.recipe_file import BenchSection, Recipe, RecipeError, RecipeProblem
from repaconv.verification.tolerances import CHANCE_LIMIT, LOSSY, by_chance

# One sentence about a link and about a measurement


def measurement_sentence(done: BenchArtefact) -> str:
    """Describe a measurement in one sentence."""
    text = f"{done.latencies[0].p50_ms:.3f} ms at the median"
    if done.ratio:
        text += f"; {done.compared}"
    if done.quality.verdict != "trusted":
        text += f"; measurement {done.quality.verdict}: {'; '.join(done.quality.reasons)}"
    return text


def link_sentence(link: Link) -> str:
    """Describe a link in one sentence."""
    on = f" on {link.inputs}" if link.inputs else ""
    words = [f"{link.candidate} against {link.reference}{on}"]
    if link.metrics and link.tolerance:
        words.append(f"max rel {link.metrics.max_rel_error:.1e} on {link.metrics.images} images")
        exact = link.tolerance.kind == "exact"
        words.append(f"{link.tolerance.description} is allowed" if exact else f"lossy: {link.lossy_text}")
        if exact and link.metrics.top1_agreement is not None:
            words.append(f"top-1 agreement {link.metrics.top1_agreement:.1%}")
    if link.task:
        words.append(f"{link.task.task} on {link.task.images} images: lossy: {link.lossy_text}")
        if found := link.task.accuracy:
            words.append(f"{found.metric} {found.reference:.2%} -> {found.candidate:.2%}")
    if link.accuracy:
        words.append(f"accuracy {link.accuracy.reference:.2%} -> {link.accuracy.candidate:.2%}")
    words += filter(None, [link.note, link.limit_text])
    return "; ".join(words)


def _changed(link: Link) -> list[tuple[float, str]]:
    """How much a lossy version changed, from 0 to 1, and what; empty if that was not evaluated."""
    if link.task:
        return [(link.task.disagreement, link.task.changed)]
    lossy = link.tolerance is not None and link.tolerance.kind == "lossy"
    if lossy and link.metrics and link.metrics.top1_agreement is not None:
        return [(1 - link.metrics.top1_agreement, "of top-1 predictions changed")]
    return []


# The checks

EXIT_CODES_WORST_FIRST = (1, 4, 3, 2, 5, 0)
"""Exit codes, the worst first: failed, refused, environment, usage, inconclusive, done."""
SHARE_ROUNDING = 1e-9
"""Percentage points that rounding may cost a share of images: 497 of 500 must meet a limit of 99.4%."""
_CODES = {"failed": 1, "inconclusive": 5}
_EXPORT_LINKS = ("exported", "form", "simplified", "onnx", "preprocessing", *LOSSY)
"""Links that are configured in the recipe's [export] section."""


def worst_exit_code(codes: Any) -> int:
    """The worst of several exit codes."""
    return min(codes, key=EXIT_CODES_WORST_FIRST.index, default=0)


class RecipeChecks:
    """The checks of one recipe, collected while it runs.

    Args:
        path: The recipe, which is part of its baselines' names.
        options: The options of `gate`, which say whether baselines are written.
    """

    def __init__(self, path: Path, options: GateOptions) -> None:
        self.path, self.options = path, options
        self.lines: Positions = {}
        self.checks: list[Check] = []
        self.codes: list[int] = []

    def failed(self, stage: str, name: str, keys: tuple[str, ...], done: Artefact, since: int) -> None:
        """Add a failed check for a failed result, unless a check since ``since`` reports it already."""
        if done.verdict == "failed" and all(check.verdict != "failed" for check in self.checks[since:]):
            self.note(stage, name or stage, "failed", f"{stage} says that it failed", keys)

    def stopped(self, stage: str, keys: tuple[str, ...], name: str, problem: RepaconvError) -> None:
        """Add the error that stopped a stage."""
        failed = isinstance(problem, GateFailed)
        self.codes.append(problem.exit_code)
        keys = (key_of(problem, self.lines) if stage == "fold" else ()) or keys
        every = problem.wrong if isinstance(problem, RecipeProblem) else ()
        one = RecipeError(
            position_of(self.lines, keys, str(self.path)), problem.message, in_recipe(problem.hint), problem.code
        )
        for each in every or (one,):
            self.checks.append(
                Check(
                    stage=stage,
                    name="fold" if problem.code.startswith("fold.") else name or stage,
                    verdict="failed" if failed else "error",
                    message=each.message if every else each.text,
                    **self._place(each.at),
                    module=problem.module if isinstance(problem, GateFailed) else "",
                    code=each.code,
                    hint=each.hint,
                )
            )

    def fold(self, done: FoldArtefact) -> None:
        """Add the certificate, and settings that contradict the checkpoint."""
        self.note("fold", "certificate", "passed", done.done, ("checkpoint",))
        for reason in done.unverified:
            self.note("fold", "settings", "not verified", reason, ("set",))

    def convert(self, done: ConvertArtefact) -> None:
        """Add the accuracy that the conversion lost on the test split."""
        self.note("convert", "evaluation", done.evaluation.verdict, link_sentence(done.evaluation), ("convert",))

    def export(self, done: ExportArtefact) -> None:
        """Add the links of the graph, and what the target does not accept in it."""
        for link in done.links:
            if done.precision == "fp32" or link.name == done.precision or link.verdict == "failed":
                self.link("export", link)
        for violation in done.violations:
            message = f"{done.target} does not take the graph: {violation}"
            self.note("export", "rules", "failed", message, ("export", "target"))

    def verify(self, done: VerifyArtefact, recipe: Recipe) -> None:
        """Add all links, the accuracy with the recipe's limits, and accuracies claimed by others."""
        for link in done.links:
            self.link("verify", link)
        self._accuracy(done, recipe)
        self._task(done, recipe)
        if done.verdict == "not verified":
            self.note("verify", "chain", "inconclusive", "no link shows anything of this network", ("verify",))
        for claim in done.claims if any(link.accuracy for link in done.links) else ():
            text = f"accuracy {claim.value:.2%} is claimed by {claim.source}; it is shown and not enforced"
            self.note("verify", "claim", "not verified", text, ("verify",))

    def _accuracy(self, done: VerifyArtefact, recipe: Recipe) -> None:
        """Compare the least accurate version of the network with the limits of the recipe.

        The limits are ``min_top1``, and ``[reference] top1`` less ``max_drop``.

        All links compare versions with one another, so a checkpoint that was damaged before it was folded passes them.
        A limit given by the user fails or passes. The reference was mostly measured on other images: if there are so
        few images that chance explains a lower accuracy, the check is inconclusive.
        """
        verify, reference = recipe.verify, recipe.reference.top1 if recipe.reference else None
        given = ("verify", "max_drop") in self.lines
        measured = [link for link in done.links if link.accuracy and link.name != "recorded"]
        limits: list[tuple[tuple[str, ...], float, str, bool]] = []
        if verify.min_top1 is not None:
            limits.append((("verify", "min_top1"), verify.min_top1, "[verify] min_top1", True))
        if verify.labels:  # of another task
            return
        if reference is not None and recipe.convert and not given:
            text = "[reference] top1 is of the network before its conversion: [verify] max_drop enforces it"
            self.note("verify", "accuracy", "not verified", text, ("reference", "top1"))
        elif reference is not None:
            text = f"[reference] top1 = {reference:g} less max_drop = {verify.max_drop:g}"
            place = ("verify", "max_drop") if given else ("reference", "top1")
            limits.append((place, reference - verify.max_drop, text, given))
        for keys, least, text, required in limits:
            if not measured:
                why = f"no accuracy was measured on {done.inputs}, and {text} needs images with labels"
                self.note("verify", "accuracy", "failed" if required else "not verified", why, keys)
                continue
            worst = min(measured, key=lambda link: link.accuracy.candidate if link.accuracy else 1.0)
            self._accuracy_of(worst, len(measured), least, text, keys)

    def _task(self, done: VerifyArtefact, recipe: Recipe) -> None:
        """Compare lossy versions with the recipe's limits in the network's task, against the original network."""
        limit, drop = recipe.verify.max_disagreement, recipe.verify.max_drop
        if limit is not None:
            found = [(share, link, what) for link in done.links for share, what in _changed(link)]
            self._limited(
                "disagreement",
                max(found, key=lambda each: each[0], default=None),
                limit,
                f"max_disagreement = {limit:g}",
                "no lossy version was evaluated by classes or in a task",
            )
        if recipe.verify.labels:
            lost = [
                (link.task.accuracy.drop, link, f"of {link.task.accuracy.metric} lost")
                for link in done.links
                if link.task and link.task.accuracy
            ]
            self._limited(
                "accuracy",
                max(lost, key=lambda each: each[0], default=None),
                drop / 100,
                f"max_drop = {drop:g}",
                "no lossy version was compared with the labels",
            )

    def _limited(
        self, name: str, worst: tuple[float, Link, str] | None, limit: float, option: str, otherwise: str
    ) -> None:
        """Add the check of one limit on the worst version; without any, it fails."""
        key = ("verify", option.partition(" ")[0])
        keys: tuple[str, ...] = key if key in self.lines else ("verify",)
        if worst is None:
            self.note("verify", name, "failed", f"{otherwise}, and {option} limits it", keys)
            return
        value, link, what = worst
        verdict = "failed" if value > limit + SHARE_ROUNDING else "passed"
        message = f"{link.candidate}: {value:.2%} {what}; [verify] {option}: {limit:.2%} at most"
        self.note("verify", name, verdict, message, keys)

    def _accuracy_of(self, worst: Link, versions: int, least: float, option: str, keys: tuple[str, ...]) -> None:
        """Add the check of one limit, ``least`` in percent."""
        assert worst.accuracy
        found, images = worst.accuracy.candidate, worst.accuracy.images
        verdict, hint = "passed", ""
        if 100 * found < least - SHARE_ROUNDING:
            chance = by_chance(round((1 - found) * images), images, 1 - least / 100)
            verdict = "inconclusive" if keys[-1] != "min_top1" and chance >= CHANCE_LIMIT else "failed"
            hint = "Verify on more images with labels." if verdict == "inconclusive" else ""
        which = f", the lowest of {versions} versions" if versions > 1 else ""
        message = (
            f"{worst.candidate}: top-1 accuracy {found:.2%} on {images} images{which}; {option}: {least:.2f}% at least"
        )
        self.note("verify", "accuracy", verdict, message, keys, hint=hint)

    def build(self, done: BuildArtefact) -> None:
        """Add the precision that the engine computes in, and the comparison of its outputs."""
        self.note("build", "precision", done.verdict, f"{done.runtime}: {done.note}", ("build",))
        for link in done.links:
            self.link("build", link)

    def bundle(self, done: BundleArtefact) -> None:
        """Add the bundle; `collect` reports what the board made of it."""
        text = f"build/{done.payload.path}: {done.images} images with what must come of them; to be run on the board"
        self.note("bundle", "bundle", "passed", text, ("bundle",), hint=board_commands(done))

    def bench(self, done: BenchArtefact, section: BenchSection) -> None:
        """Add the latency, compared with its baseline if there is one, and the comparison of the outputs."""
        if done.agreement and not section.against:  # `against` may name an unrelated model
            self.link("bench", done.agreement)
        text = measurement_sentence(done)
        if not section.baseline:
            verdict = "inconclusive" if done.quality.verdict == "inconclusive" else "passed"
            self.note("bench", "latency", verdict, f"{text}; no baseline was asked for", ("bench",))
            return
        comparison = check_baseline(
            Path(section.baseline),
            name_in(Path(section.baseline), self.path),
            done,
            section.max_regression,
            update=self.options.update_baseline,
            accept_inconclusive=self.options.accept_inconclusive,
            require=section.require,
        )
        key = "max_regression" if comparison.regression else "baseline"
        self.note(
            "bench",
            "latency",
            comparison.verdict,
            f"{text}; {comparison.description}",
            ("bench", key),
            hint=comparison.hint,
        )

    def link(self, stage: str, link: Link) -> None:
        """Add one link; if it failed, at the line of its tolerance in the recipe."""
        keys: tuple[str, ...] = (stage,) if stage in ("bench", "build") else ("verify",)
        keys = ("export",) if link.name in _EXPORT_LINKS and stage != "build" else keys
        if link.verdict == "failed":
            for table in ("rtol", "atol"):
                keys = next((key for key in [("verify", table, link.name)] if key in self.lines), keys)
        module = link.location.module if link.location and link.verdict == "failed" else ""
        hint = link.location.reason if link.location and link.verdict == "failed" else ""
        self.note(stage, link.name, link.verdict, link_sentence(link), keys, module=module, hint=hint)

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
        """Add one check."""
        self.codes.append(_CODES.get(verdict, 0))
        place = self._place(position_of(self.lines, keys, str(self.path)))
        self.checks.append(
            Check(stage=stage, name=name, verdict=verdict, message=message, module=module, hint=hint, **place)
        )

    def _place(self, at: Position) -> dict[str, Any]:
        """The place in the recipe; the file is given only if it is another one, which the recipe extends."""
        return {"line": at.line, "column": at.column, "file": at.file if at.file != str(self.path) else ""}
