"""A recipe as a plan: a step a stage, in the order in which data flows, each with all that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from repaconv.core import run_folder
from repaconv.core.files import stage_of
from repaconv.options.option_definitions import Order
from repaconv.stages.recipe.plan_steps import Journal, Step
from repaconv.stages.recipe.stage_options import Placed, asked, foreign


class Planned(NamedTuple):
    """A step of a recipe.

    Attributes:
        step: What it is made of.
        stage: Which stage does it.
        order: What that is asked for, as paths stand in the recipe; a fold's is the recipe's own.
        label: What tells it from others of its stage.
    """

    step: Step
    stage: str
    order: Any
    label: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """Where it stands in the recipe."""
        return ("checkpoint",) if self.stage == "fold" else (self.stage,)


def planned(placed: Placed, journal: Journal) -> list[Planned]:
    """What the recipe asks for."""
    recipe = placed.recipe
    found = [_converted(placed) if recipe.convert else _folded(placed)]
    found += [
        _exported(placed, precision, found[0]) for precision in (recipe.export.precisions if recipe.export else ())
    ]
    found.append(_verified(placed, journal, found))
    if recipe.build:
        found.append(_of_graphs("build", placed, placed.built(), recipe.build.precision, found))
    if recipe.bundle:
        found.append(_of_graphs("bundle", placed, placed.bundled(), recipe.bundle.precision or "fp32", found))
    if recipe.bench:
        found.append(_of_graphs("bench", placed, placed.measured(), recipe.bench.precision, found))
    if recipe.report:
        found.append(_reported(placed, recipe.report, journal, found))
    return [_with_versions(each, placed, journal) for each in found]


def _with_versions(each: Planned, placed: Placed, journal: Journal) -> Planned:
    versions = placed.versions(each.stage, journal.digests)
    return each._replace(step=each.step._replace(versions=versions))


def _folded(placed: Placed) -> Planned:
    told = placed.recipe.model_dump(include={"checkpoint", "method", "arch", "force", "weights", "sha256", "set"})
    told["where the checkpoint lies"] = str(placed.place(placed.recipe.checkpoint).resolve())  # fold.json says so
    return Planned(Step("fold", told, placed.sources), "fold", None)


def _converted(placed: Placed) -> Planned:
    order = placed.converted()
    lies = str(placed.place(placed.recipe.checkpoint).resolve())
    told = {"where the checkpoint lies": lies, "sha256": placed.recipe.sha256}
    step = Step("convert", {**told, **asked(order, "convert")}, lambda: {**placed.sources(), **placed.files(order)})
    return Planned(step, "convert", order)


def _exported(placed: Placed, precision: str, first: Planned) -> Planned:
    order, before = placed.exported(precision), (first.step.name,)
    step = Step(f"export {precision}", asked(order, "export"), lambda: placed.files(order), after=before, needs=before)
    return Planned(step, "export", order, precision)


def _verified(placed: Placed, journal: Journal, before: Sequence[Planned]) -> Planned:
    """It looks at all graphs that the run holds, those of others too."""
    order, names = placed.recipe.verify, _names(before)

    def reads() -> dict[str, Path]:
        others = foreign(run_folder.Run(placed.folder), _files(journal, names))
        return {**placed.files(order), **{name: path for name, path in others.items() if stage_of(path) == "export"}}

    return Planned(Step("verify", asked(order, "verify"), reads, after=names, needs=names[:1]), "verify", order)


def _of_graphs(stage: str, placed: Placed, order: Order, precision: str, before: Sequence[Planned]) -> Planned:
    """Of the fold, and of the graphs that a model of that precision is or is built from."""
    first, *exports = [each for each in before if each.stage in ("fold", "convert", "export")]
    taken = [each for each in exports if each.label in (precision, "fp32")] or exports
    step = Step(
        stage,
        asked(order, stage),
        lambda: placed.files(order),
        after=_names([first, *taken]),
        needs=_names([first, *exports]),
    )
    return Planned(step, stage, order)


def _reported(placed: Placed, order: Order, journal: Journal, before: Sequence[Planned]) -> Planned:
    """It tells all that the run holds."""
    names = _names(before)

    def reads() -> dict[str, Path]:
        return foreign(run_folder.Run(placed.folder), _files(journal, names))

    return Planned(Step("report", asked(order, "report"), reads, after=names, needs=names[:1]), "report", order)


def _names(stages: Sequence[Planned]) -> tuple[str, ...]:
    return tuple(each.step.name for each in stages)


def _files(journal: Journal, names: Sequence[str]) -> list[Path]:
    return [file for name in names for file in journal.files(name)]
