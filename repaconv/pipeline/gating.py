"""gate: recipes, one after the other, everything that must hold, and one exit code for CI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from repaconv.artefacts import Artefact, Check, GatedRecipe, GateReport, Link
from repaconv.errors import GateFailed, Refused, RepaconvError, UsageProblem
from repaconv.forms.choice import DEFAULT, NAMED
from repaconv.orders.knobs import AnyOrder, by_name, knobs
from repaconv.orders.stages import BenchOrder, ExportOrder, GateOrder
from repaconv.pipeline.exporting import export_by
from repaconv.pipeline.folding import fold
from repaconv.pipeline.measuring import bench_by
from repaconv.pipeline.verification import verify_by
from repaconv.progress import Progress, silent
from repaconv.proof.policy import LOSSY
from repaconv.recipe import BenchSection, ExportSection, Recipe, RecipeProblem, Wrong, read_recipe
from repaconv.runs import OUT
from repaconv.steps.baselines import by_baseline, name_in
from repaconv.steps.named import in_recipe, key_of, missing, own_file
from repaconv.steps.sentences import measured, told_of
from repaconv.toml import Lines, line_of

# The worst first: what failed, what was refused, what is missing here, what was asked wrongly, what is not known.
WORST = (1, 4, 3, 2, 5, 0)
_CODES = {"failed": 1, "inconclusive": 5}
# Where in a recipe a link is asked for.
_EXPORT_LINKS = ("exported", "form", "simplified", "onnx", "preprocessing", *LOSSY)


def gate_by(order: GateOrder, recipes: Sequence[str | Path], *, progress: Progress = silent) -> GateReport:
    """Fold, export, verify and, where asked, bench what the recipes name, and judge all of it.

    A recipe that cannot be finished is an error of its own; the others are still run. Each has a run's folder of its
    own, ``repaconv-out/<stem>`` beside it unless it names another, and takes nobody else's.

    Args:
        recipes: Paths of TOML files.
        order: What is asked for.
        progress: See `Progress`.
    """
    if not recipes:
        raise UsageProblem("no recipe was given.", hint="repaconv gate recipe.toml", code="usage.gate")
    if order.update_baseline and not any(map(_keeps_baseline, recipes)):
        raise UsageProblem(
            "--update-baseline would do nothing here: no recipe names a file of baselines.",
            hint='Give one in the recipe: [bench] baseline = "baselines.json".',
            code="usage.idle",
        )
    taken: dict[Path, Path] = {}
    gates = [_Gate(Path(path), order, progress, taken) for path in recipes]
    done = tuple(each.run() for each in gates)
    return GateReport(exit_code=worst(recipe.exit_code for recipe in done), recipes=done)


gate = by_name(gate_by, GateOrder)


def _keeps_baseline(path: str | Path) -> bool:
    """Whether a recipe names a file of baselines; one that cannot be read says so itself, later."""
    try:
        section = read_recipe(Path(path))[0].bench
    except UsageProblem:
        return True
    return section is not None and section.baseline is not None


def worst(codes: Any) -> int:
    """Of exit codes."""
    return min(codes, key=WORST.index, default=0)


class _Gate:
    """One recipe's way through the stages; what fails is noted, and what does not need it goes on."""

    def __init__(self, path: Path, order: GateOrder, progress: Progress, taken: dict[Path, Path]) -> None:
        self.path, self.order, self.progress, self.taken = path, order, progress, taken
        self.checks: list[Check] = []
        self.codes: list[int] = []
        self.lines: Lines = {}
        self.folder = ""

    def run(self) -> GatedRecipe:
        self._try("recipe", (), self._stages)
        return GatedRecipe(
            recipe=str(self.path),
            run=self.folder,
            exit_code=worst(self.codes),
            checks=tuple(self.checks),
        )

    def _stages(self) -> None:
        recipe, self.lines = read_recipe(self.path)
        if wrong := missing(recipe, self.path, self.lines):
            raise RecipeProblem(wrong)
        self.folder = str(self._place(recipe.out or str(OUT / self.path.stem)))
        self._take_folder()
        if not self._try("fold", ("checkpoint",), lambda: self._fold(recipe)):
            return
        precisions = recipe.export.precisions if recipe.export else ()
        exported = [self._try("export", ("export",), partial(self._export, recipe, kind), kind) for kind in precisions]
        self._try("verify", ("verify",), lambda: self._verify(recipe))
        if recipe.bench and all(exported):
            section, target = recipe.bench, recipe.bench.target or (recipe.export or ExportSection()).target
            self._try("bench", ("bench",), lambda: self._bench(section, target, self._form(recipe)))

    def _take_folder(self) -> None:
        """Two recipes that share a folder would judge, and leave, each other's work."""
        before = self.taken.setdefault(Path(self.folder).resolve(), self.path)
        if before.resolve() != self.path.resolve():
            raise UsageProblem(
                f"{self.folder} is the run's folder of {before}, too.",
                hint='Give one of them another: out = "FOLDER".',
                code="gate.same-run",
            )

    def _try(self, stage: str, keys: tuple[str, ...], work: Callable[[], Artefact | None], name: str = "") -> bool:
        """Run a stage; whatever stops it becomes a check, and so does a verdict that no check of its has told yet."""
        begin = len(self.checks)
        try:
            done = work()
        except RepaconvError as problem:
            self._stopped(stage, keys, name, problem)
            return False
        except Exception as error:  # a fault of one recipe's, or of ours in it, leaves no other recipe unjudged
            why = str(error).splitlines()[0] if str(error) else "it does not say why"
            hint = "Nobody foresaw this. The stage's own command shows where it is."
            told = f"{type(error).__name__}: {why.rstrip('.')}."
            self._stopped(stage, keys, name, RepaconvError(told, hint=hint, code="gate.unforeseen"))
            return False
        if done and done.verdict == "failed" and all(check.verdict != "failed" for check in self.checks[begin:]):
            self._note(stage, name or stage, "failed", f"{stage} says that it failed", keys)
        return True

    def _stopped(self, stage: str, keys: tuple[str, ...], name: str, problem: RepaconvError) -> None:
        failed = isinstance(problem, GateFailed)
        self.codes.append(problem.exit_code)
        line = line_of(self.lines, (key_of(problem, self.lines) if stage == "fold" else ()) or keys)
        every = problem.wrong if isinstance(problem, RecipeProblem) else ()
        for each in every or (Wrong(line, problem.message, in_recipe(problem.hint), problem.code),):
            self.checks.append(
                Check(
                    stage=stage,
                    name="fold" if problem.code.startswith("fold.") else name or stage,
                    verdict="failed" if failed else "error",
                    message=each.message,
                    line=each.line,
                    module=problem.module if isinstance(problem, GateFailed) else "",
                    code=each.code,
                    hint=each.hint,
                )
            )

    def _fold(self, recipe: Recipe) -> Artefact:
        own = own_file(recipe.arch or "")
        try:
            done = fold(
                self._place(recipe.checkpoint),
                method=recipe.method,
                arch=str(self._place(recipe.arch)) if recipe.arch and own else recipe.arch,
                settings=recipe.settings,
                weights=recipe.weights,
                sha256=recipe.sha256,
                out=self.folder,
                overrule=recipe.force,
                progress=self.progress,
            )
        except Refused as problem:
            if problem.code.startswith("run."):
                problem.hint = 'Give the recipe another folder, out = "FOLDER", or move that one away.'
            raise
        self._note("fold", "certificate", "passed", done.done, ("checkpoint",))
        for told in done.unverified:
            self._note("fold", "settings", "not verified", told, ("set",))
        return done

    def _export(self, recipe: Recipe, precision: str) -> Artefact:
        assert recipe.export is not None
        section = self._placed(recipe.export)
        # ranges of fp16 and int8 are those of what is verified, unless given
        ranges = section if section.inputs or section.images else self._placed(recipe.verify)
        form = self._form(recipe)
        order = ExportOrder.of(
            section,
            precision=precision,
            inputs=ranges.inputs,
            images=ranges.images,
            form=None if form == DEFAULT else form,
        )
        done = export_by(order, self.folder, progress=self.progress)
        for link in done.links:
            if precision == "fp32" or link.name == precision or link.verdict == "failed":
                self._link("export", link)
        for told in done.violations:
            self._note(
                "export", "rules", "failed", f"{done.target} does not take the graph: {told}", ("export", "target")
            )
        return done

    def _verify(self, recipe: Recipe) -> Artefact:
        done = verify_by(self._placed(recipe.verify), self.folder, progress=self.progress)
        for link in done.links:
            self._link("verify", link)
        if done.verdict == "not verified":
            self._note("verify", "chain", "inconclusive", "no link shows anything of this network", ("verify",))
        for claim in done.claims if any(link.accuracy for link in done.links) else ():
            told = f"accuracy {claim.value:.2%} is claimed by {claim.source}; it is shown and not judged"
            self._note("verify", "claim", "not verified", told, ("verify",))
        return done

    def _form(self, recipe: Recipe) -> str:
        return recipe.form if recipe.form in NAMED else str(self._place(recipe.form))

    def _bench(self, section: BenchSection, target: str, form: str) -> Artefact:
        section = replace(self._placed(replace(section, target=target)), form=None if form in NAMED else form)
        done = bench_by(BenchOrder.of(section, baseline=None), self.folder, progress=self.progress)
        if done.agreement and not section.against:  # a model that was named may be another altogether
            self._link("bench", done.agreement)
        told = measured(done)
        if not section.baseline:
            verdict = "inconclusive" if done.quality.verdict == "inconclusive" else "passed"
            self._note("bench", "latency", verdict, f"{told}; no baseline was asked for", ("bench",))
            return done
        baseline = Path(section.baseline)
        judged = by_baseline(
            baseline,
            name_in(baseline, self.path),
            done,
            section.max_regression,
            update=self.order.update_baseline,
            accept_inconclusive=self.order.accept_inconclusive,
            require=section.require,
        )
        key = "max_regression" if judged.regression else "baseline"
        self._note("bench", "latency", judged.verdict, f"{told}; {judged.told}", ("bench", key), hint=judged.hint)
        return done

    def _link(self, stage: str, link: Link) -> None:
        keys: tuple[str, ...] = ("bench",) if stage == "bench" else ("verify",)
        keys = ("export",) if link.name in _EXPORT_LINKS else keys
        if link.verdict == "failed":
            for table in ("rtol", "atol"):
                keys = next((key for key in [("verify", table, link.name)] if key in self.lines), keys)
        module = link.location.module if link.location and link.verdict == "failed" else ""
        hint = link.location.reason if link.location and link.verdict == "failed" else ""
        self._note(stage, link.name, link.verdict, told_of(link), keys, module=module, hint=hint)

    def _note(
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
        self.codes.append(_CODES.get(verdict, 0))
        line = line_of(self.lines, keys)
        self.checks.append(
            Check(stage=stage, name=name, verdict=verdict, message=message, line=line, module=module, hint=hint)
        )

    def _place(self, name: str) -> Path:
        return self.path.parent / name

    def _placed(self, order: AnyOrder) -> AnyOrder:
        """An order whose paths, and whose target's if it is one, are seen from here and not from the recipe."""
        given = {each.name: getattr(order, each.name) for each in knobs(type(order))}
        paths = {each.name for each in knobs(type(order)) if each.is_path and given[each.name] is not None}
        paths |= {"target"} if str(given.get("target", "")).endswith(".toml") else set()
        return replace(order, **{name: str(self._place(given[name])) for name in paths})
