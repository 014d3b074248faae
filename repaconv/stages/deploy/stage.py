"""`deploy`: run every stage that a target needs, from the checkpoint to the report, in one run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from repaconv.core import plugins, run_folder
from repaconv.core.errors import Refused, UsageProblem, did_you_mean
from repaconv.core.progress import Progress, silent
from repaconv.results import Check, RecipeRun
from repaconv.stages.deploy.options import DeployOptions
from repaconv.stages.recipe.missing_recipe_files import missing
from repaconv.stages.recipe.options import GateOptions
from repaconv.stages.recipe.plan import LocatedRecipe
from repaconv.stages.recipe.recipe_file import Recipe, RecipeProblem
from repaconv.stages.recipe.run import RecipeExecution
from repaconv.stages.shared.fetched_files import local_path
from repaconv.stages.shared.option_dataclasses import by_name
from repaconv.stages.shared.target_lookup import load_target
from repaconv.stages.shared.unavailable_targets import builds_on_target, why_not_here

if TYPE_CHECKING:
    from repaconv.engines.contract import Engine
    from repaconv.engines.targets import Target


def deploy_by(options: DeployOptions, checkpoint: str | Path, *, progress: Progress = silent) -> RecipeRun:
    """Fold, export for the target, verify, build or bundle, measure if the target is this machine, and report.

    It is `repaconv.run` of a recipe made from these options, so steps that are up to date are not run again. A lower
    precision is calibrated on the calibration split of the images and evaluated on the test split.

    Args:
        checkpoint: A checkpoint, an ONNX file, a Hugging Face folder, or an address that was fetched.
        options: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        UsageProblem: If there is no such target, or it does not compute in that precision.
        Refused: If there is no such checkpoint.
    """
    device, source = load_target(options.target), local_path(checkpoint)
    if not source.exists():
        raise Refused(f"there is no file or folder {source}.", hint="Check its path.", code="checkpoint.missing")
    known = [each for each in run_folder.PRECISIONS if each in device.precisions]
    if options.precision not in known:
        near = "" if options.precision in run_folder.PRECISIONS else did_you_mean(options.precision, known)
        raise UsageProblem(
            f"deploy does not support {options.precision!r} on {device.name}.",
            hint=f"{near}Supported: {', '.join(known)}.",
            code="deploy.precision",
        )
    stem = run_folder.utf8_stem(source)
    folder = Path(options.out) if options.out else run_folder.OUT / f"{stem}.{device.name}"
    recipe = _recipe(options, device, source, folder)
    path = Path(f"{stem}.deploy")
    if wrong := missing(recipe, path, {}):
        raise RecipeProblem(wrong)
    execution = RecipeExecution(path, GateOptions(rerun=options.rerun), progress, {})
    done = execution.execute(lambda: LocatedRecipe(recipe, path, {}), dry_run=options.dry_run)
    away = [_no_latency_check(device)] if recipe.bench is None and not options.dry_run else []
    return done.model_copy(update={"recipe": str(checkpoint), "checks": (*done.checks, *away)})


deploy = by_name(deploy_by, DeployOptions)


def _recipe(options: DeployOptions, device: Target, source: Path, folder: Path) -> Recipe:
    """A recipe of the stages that run here, and of a bundle if only the target can build its engine."""
    typed = device.typed_by == "runtime" and options.precision == "bf16"  # the runtime converts an FP32 graph
    precisions = ("fp32",) if options.precision == "fp32" or typed else ("fp32", options.precision)
    runs_here, there = not why_not_here(device), builds_on_target(device)
    engine: Engine = plugins.load(plugins.ENGINES, device.runtime)
    built = not there and "networks" not in engine.can
    common = {"target": options.target, "precision": options.precision}
    images = {"inputs": options.inputs, "images": options.images, "classes": options.classes, "count": options.count}
    return Recipe.model_validate(
        {
            "checkpoint": str(source),
            "method": options.method,
            "arch": options.arch,
            "weights": options.weights,
            "out": str(folder),
            "set": dict(options.settings or {}),
            "verify": {**images, "require": ["onnx"]},
            "export": {"target": options.target, "precisions": precisions},
            "build": common if built else None,
            "bundle": {**common, "precision": precisions[-1]} if there else None,
            "bench": {**common, "rounds": options.rounds} if runs_here and not there else None,
        }
    )


def _no_latency_check(device: Target) -> Check:
    """A check that says why no latency was measured."""
    why = why_not_here(device) or "its engine is built there"
    hint = f"repaconv bench --target {device.name} --estimate calculates what it would take."
    text = f"{device.name} is not this machine: {why}"
    return Check(stage="bench", name="latency", verdict="not verified", message=text, line=1, hint=hint)
