"""What a recipe's stages left, as checks: each with its verdict, in one sentence, at the recipe's line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from repaconv.artefacts import (
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
from repaconv.errors import GateFailed, RepaconvError
from repaconv.orders.stages import GateOrder
from repaconv.proof.policy import LOSSY
from repaconv.recipe import BenchSection, RecipeProblem, Wrong
from repaconv.steps.baselines import by_baseline, name_in
from repaconv.steps.named import in_recipe, key_of
from repaconv.steps.sentences import measured, told_of
from repaconv.toml import At, Lines, place_of

WORST = (1, 4, 3, 2, 5, 0)
"""The worst first: what failed, was refused, is missing here, was asked wrongly, is not known."""
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
        order: Whether baselines are written.
    """

    def __init__(self, path: Path, order: GateOrder) -> None:
        self.path, self.order = path, order
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
        self.note("convert", "judged", done.judged.verdict, told_of(done.judged), ("convert",))

    def export(self, done: ExportArtefact) -> None:
        """Links of the graph, and what the target does not take of it."""
        for link in done.links:
            if done.precision == "fp32" or link.name == done.precision or link.verdict == "failed":
                self.link("export", link)
        for told in done.violations:
            message = f"{done.target} does not take the graph: {told}"
            self.note("export", "rules", "failed", message, ("export", "target"))

    def verify(self, done: VerifyArtefact) -> None:
        """All links of the chain, and accuracy that somebody claims."""
        for link in done.links:
            self.link("verify", link)
        if done.verdict == "not verified":
            self.note("verify", "chain", "inconclusive", "no link shows anything of this network", ("verify",))
        for claim in done.claims if any(link.accuracy for link in done.links) else ():
            told = f"accuracy {claim.value:.2%} is claimed by {claim.source}; it is shown and not judged"
            self.note("verify", "claim", "not verified", told, ("verify",))

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
            update=self.order.update_baseline,
            accept_inconclusive=self.order.accept_inconclusive,
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
