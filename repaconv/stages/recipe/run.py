"""`run`: execute the steps of a recipe in order, skip those that are up to date, and write the report."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from repaconv.core import run_folder
from repaconv.core.errors import Refused, RepaconvError, UsageProblem
from repaconv.core.file_replacement import remove_artifact
from repaconv.core.files import lock_folder, read_artefact, require_valid_name, stage_of
from repaconv.core.progress import Progress, prefixed, silent
from repaconv.results import (
    Artefact,
    BenchArtefact,
    BuildArtefact,
    BundleArtefact,
    ConvertArtefact,
    ExportArtefact,
    RecipeRun,
    StepDone,
    VerifyArtefact,
)
from repaconv.stages.bench.stage import bench_by
from repaconv.stages.build.stage import build_by
from repaconv.stages.bundle.stage import bundle_by
from repaconv.stages.convert.stage import convert_by
from repaconv.stages.export.stage import export_by
from repaconv.stages.fold.stage import fold
from repaconv.stages.recipe.gate_checks import RecipeChecks, worst_exit_code
from repaconv.stages.recipe.missing_recipe_files import missing, no_checkpoint
from repaconv.stages.recipe.options import GateOptions, RunOptions
from repaconv.stages.recipe.plan import (
    Journal,
    LocatedRecipe,
    Planned,
    StepOutcome,
    StepOutputs,
    UpcomingStep,
    execute_steps,
    planned,
    preview,
)
from repaconv.stages.recipe.recipe_file import BenchSection, RecipeProblem, check_recipe, own_file
from repaconv.stages.report.stage import report
from repaconv.stages.shared.fetched_files import address_of, local_path
from repaconv.stages.shared.file_hash_check import require_pinned
from repaconv.stages.shared.option_dataclasses import by_name
from repaconv.stages.verify.stage import verify_by

Work = Callable[[Planned, LocatedRecipe, Journal, Progress], Artefact]


def run_by(options: RunOptions, recipe: str | Path, *, progress: Progress = silent) -> RecipeRun:
    """Run all steps of a recipe: fold or convert, export, verify, build, bench, report.

    A step is up to date as long as nothing has changed of its options, the files that it reads, the results of the
    steps before it, the files that it wrote, the versions of the programs, and the machine where it measures. All other
    steps run. ``plan.json`` of the run records the inputs of each. An interrupted run resumes where it was.

    Args:
        recipe: The path of a TOML file.
        options: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Returns:
        The outcome of each step and all verdicts; an error is listed as a failed check.
    """
    execution = RecipeExecution(Path(recipe), GateOptions(rerun=options.rerun), progress, {})
    return execution.execute(lambda: read_placed(Path(recipe)), dry_run=options.dry_run)


run = by_name(run_by, RunOptions)


def read_placed(path: Path) -> LocatedRecipe:
    """Read a recipe, and check that everything it names exists.

    Raises:
        UsageProblem: If it has errors, or something is missing.
        Refused: If the path of the checkpoint or of the run folder is not a valid file name.
    """
    recipe, lines, wrong = check_recipe(path)
    if wrong := (*wrong, *missing(recipe, path, lines)):
        raise RecipeProblem((*wrong, *no_checkpoint(recipe, path, lines)))
    if address_of(recipe.checkpoint):  # the fetched files, if they are unchanged
        recipe = recipe.model_copy(update={"checkpoint": str(local_path(recipe.checkpoint).resolve())})
    placed = LocatedRecipe(recipe, path, lines)
    for named in (placed.place(recipe.checkpoint), placed.folder):
        require_valid_name(named)
    return placed


class RecipeExecution:
    """Runs one recipe: an error becomes a failed check, and steps that do not need the failed one still run.

    Args:
        path: The path of the recipe, as shown in messages.
        options: The options of `gate`.
        progress: See `Progress`.
        taken: Run folders of the other recipes of the same command.
    """

    def __init__(self, path: Path, options: GateOptions, progress: Progress, taken: dict[Path, Path]) -> None:
        self.path, self.options, self.progress, self.taken = path, options, progress, taken
        self.checker = RecipeChecks(path, options)
        self.done: list[StepOutcome] = []
        self.page = self.folder = ""
        self.reference: dict[str, str] = {}

    def execute(self, placed: Callable[[], LocatedRecipe], *, dry_run: bool = False, page: bool = True) -> RecipeRun:
        """Run all steps; ``page`` says whether the report is written, too.

        An error in the recipe or in a stage is not raised; it becomes a check of the result.
        """
        self._try("recipe", (), "", lambda: self._steps(placed(), dry_run=dry_run, page=page))
        return RecipeRun(
            recipe=str(self.path),
            run=self.folder,
            exit_code=worst_exit_code(self.checker.codes),
            steps=tuple(StepDone(name=each.name, did=each.did, why=each.why) for each in self.done),
            checks=tuple(self.checker.checks),
            page=self.page,
            reference=self.reference,
        )

    def _steps(self, placed: LocatedRecipe, *, dry_run: bool, page: bool) -> None:
        self.checker.lines, self.folder = placed.lines, str(placed.folder)
        self._take_folder()
        named = placed.recipe.reference
        self.reference = {name: str(value) for name, value in (named.model_dump() if named else {}).items() if value}
        journal = Journal(placed.folder, os.path.relpath(placed.path.resolve(), placed.folder.resolve()))
        stages = {each.step.name: each for each in planned(placed, journal)}
        steps = [each.step for each in stages.values() if page or each.stage != "report"]
        if dry_run:
            self.done = preview(steps, journal, again=self.options.rerun, others=stages)
            return
        do = partial(self._do, placed, stages, journal)
        is_file = placed.folder.exists() and not placed.folder.is_dir()
        with lock_folder(None if is_file else placed.folder):  # fold reports the file
            self.done = execute_steps(steps, journal, do, again=self.options.rerun, others=stages)
        page_files = journal.files("report") if page else []
        self.page = str(page_files[0]) if page_files else ""

    def _do(
        self, placed: LocatedRecipe, stages: dict[str, Planned], journal: Journal, turn: UpcomingStep
    ) -> StepOutputs | None:
        each, since = stages[turn.step.name], len(self.checker.checks)
        self.progress(_headline(turn), 0, 0)

        def work() -> Artefact:
            reported = prefixed(turn.step.name, self.progress)
            done = WORK[each.stage](each, placed, journal, reported) if turn.why else _stored_result(each, journal)
            self._judge(each.stage, done, placed)
            return done

        done = self._try(each.stage, each.keys, each.label, work)
        if done is None:
            return None
        if each.stage != "report":
            self.checker.failed(each.stage, each.label, each.keys, done, since)
        return StepOutputs([Path(name) for name in done.output_files], _is_reusable(each.stage, done))

    def _judge(self, stage: str, done: Any, placed: LocatedRecipe) -> None:
        """Add the checks of a result; a measurement is compared with the baseline of its section."""
        if stage == "bench":
            self.checker.bench(done, placed.with_paths(placed.recipe.bench or BenchSection()))
        elif stage == "verify":
            self.checker.verify(done, placed.recipe)
        elif stage != "report":
            getattr(self.checker, stage)(done)

    def _take_folder(self) -> None:
        """Refuse a run folder that another recipe uses: they would evaluate and remove each other's results."""
        before = self.taken.setdefault(Path(self.folder).resolve(), self.path)
        if before.resolve() != self.path.resolve():
            raise UsageProblem(
                f"{self.folder} is the run's folder of {before}, too.",
                hint='Give one of them another: out = "FOLDER".',
                code="gate.same-run",
            )

    def _try(self, stage: str, keys: tuple[str, ...], label: str, work: Callable[[], Any]) -> Any:
        """Do the work; an error becomes a check, and the result is None."""
        try:
            return work()
        except RepaconvError as problem:
            self.checker.stopped(stage, keys, label, problem)
        except Exception as error:  # one recipe's defect must not stop the others
            why = str(error).splitlines()[0] if str(error) else "it does not say why"
            hint = "This is a defect of repaconv. The command of that stage shows where it is."
            text = f"{type(error).__name__}: {why.rstrip('.')}."
            self.checker.stopped(stage, keys, label, RepaconvError(text, hint=hint, code="gate.unforeseen"))
        return None


def _headline(turn: UpcomingStep) -> str:
    """The step's number, name and reason, and the remaining time if all remaining steps ran here before."""
    left = "" if turn.left_s is None else f"; about {turn.left_s:.0f} s left, going by the last run"
    does = f"runs ({turn.why}){left}" if turn.why else "is up to date"
    return f"{turn.number} of {turn.in_all}: {turn.step.name} {does}"


def _stored_result(each: Planned, journal: Journal) -> Artefact:
    """The stored result of a step that is up to date."""
    files = journal.files(each.step.name)
    if each.stage == "fold":
        run = run_folder.Run(journal.folder)
        run_folder.set_newest(run)
        return run_folder.fold_of(run)
    if each.stage == "report":
        return Artefact(stage="report", made_by={}, verdict="passed")
    return read_artefact(next(file for file in files if stage_of(file) == each.stage), RESULT_CLASSES[each.stage])


def _is_reusable(stage: str, done: Any) -> bool:
    """Whether a result may be reused; a failed or an inconclusive one is computed again."""
    return stage == "report" or (done.verdict != "failed" and not getattr(done, "inconclusive", False))


# The stages


def _fold(each: Planned, placed: LocatedRecipe, journal: Journal, progress: Progress) -> Artefact:
    recipe, own = placed.recipe, own_file(placed.recipe.arch or "")
    _remove_failed_verification(placed, journal)
    try:
        return fold(
            placed.place(recipe.checkpoint),
            method=recipe.method,
            arch=str(placed.place(recipe.arch)) if recipe.arch and own else recipe.arch,
            task=recipe.task,
            settings=recipe.settings,
            weights=recipe.weights,
            sha256=recipe.sha256,
            out=str(placed.folder),
            force=journal.owns("fold"),
            overrule=recipe.force,
            progress=progress,
        )
    except Refused as problem:
        if problem.code.startswith("run."):
            problem.hint = 'Give the recipe another folder, out = "FOLDER", or move that one away.'
        raise


def _export(each: Planned, placed: LocatedRecipe, journal: Journal, progress: Progress) -> Artefact:
    _remove_failed_verification(placed, journal)
    return export_by(placed.with_paths(each.options), placed.folder, progress=progress)


def _remove_failed_verification(placed: LocatedRecipe, journal: Journal) -> None:
    """Remove the failed verification of an earlier run of this recipe.

    It would stop the export that corrects it. A later step of the recipe verifies again.
    """
    run = run_folder.Run(placed.folder)
    verified = (journal.owns("fold") or journal.owns("convert")) and run.verify_json.is_file()
    if verified and read_artefact(run.verify_json, VerifyArtefact).verdict == "failed":
        remove_artifact(run.verify_json, run.folder)


def _convert(each: Planned, placed: LocatedRecipe, journal: Journal, progress: Progress) -> Artefact:
    require_pinned(placed.place(placed.recipe.checkpoint), placed.recipe.sha256)
    options = replace(placed.with_paths(each.options), out=str(placed.folder), force=journal.owns("convert"))
    return convert_by(options, placed.place(placed.recipe.checkpoint), progress=progress)


WORK: dict[str, Work] = {
    "fold": _fold,
    "convert": _convert,
    "export": _export,
    "verify": lambda each, placed, _, progress: verify_by(
        placed.with_paths(each.options), placed.folder, progress=progress
    ),
    "build": lambda each, placed, _, progress: build_by(
        placed.with_paths(each.options), placed.folder, progress=progress
    ),
    "bundle": lambda each, placed, _, progress: bundle_by(
        placed.with_paths(each.options), placed.folder, progress=progress
    ),
    "bench": lambda each, placed, _, progress: bench_by(
        placed.with_paths(each.options), placed.folder, progress=progress
    ),
    "report": lambda each, placed, _, progress: report(placed.folder, **vars(each.options), progress=progress),
}
"""The function that runs a step, by stage."""
RESULT_CLASSES: dict[str, type[Artefact]] = {
    "convert": ConvertArtefact,
    "export": ExportArtefact,
    "verify": VerifyArtefact,
    "build": BuildArtefact,
    "bundle": BundleArtefact,
    "bench": BenchArtefact,
}
"""The class of each stage's result; a fold's is recorded in its file."""
