"""Turn a recipe into a plan of steps, find by digests which are up to date, and execute the others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from repaconv.benchmark.machine_fingerprint import fingerprint, machine_key, version_of
from repaconv.core import plugins, run_folder
from repaconv.core.errors import Refused, RepaconvError
from repaconv.core.file_replacement import remove_written
from repaconv.core.files import (
    TIME_STEP_NS,
    cache_folder,
    canonical_json,
    read_artefact,
    sha256_of,
    sha256_of_bytes,
    stage_of,
    write_artefact,
)
from repaconv.core.run_folder import PLAN
from repaconv.core.sharded_checkpoint import files_of
from repaconv.core.toml_positions import Positions
from repaconv.engines.contract import ENGINE_SUFFIXES
from repaconv.graph.onnx_files import external_files_of, is_graph
from repaconv.results import SCHEMA_VERSION, Record
from repaconv.rewrites.presets import DEFAULT, FASTEST, NAMED
from repaconv.stages.bench.options import BenchOptions
from repaconv.stages.build.options import BuildOptions
from repaconv.stages.bundle.options import BundleOptions
from repaconv.stages.convert.options import ConvertOptions
from repaconv.stages.export.options import ExportOptions
from repaconv.stages.recipe.recipe_file import (
    BenchSection,
    BuildSection,
    BundleSection,
    ExportSection,
    Recipe,
    own_file,
)
from repaconv.stages.shared.option_dataclasses import AnyOptions, Options, options_of
from repaconv.stages.shared.preset_choice import TUNED
from repaconv.stages.shared.target_lookup import load_target

# Digests of files and folders. A file that was not touched since it was hashed is not read again.

GONE = "gone"


class Seen(Record):
    """A digest of a file or folder, and the stamp of inodes, sizes and times at which it was computed."""

    stamp: str
    sha256: str


class Digests:
    """Digests of files and folders.

    Args:
        seen: The digests of earlier runs, by path.
    """

    def __init__(self, seen: dict[str, Seen]) -> None:
        self.before, self.seen = seen, dict[str, Seen]()

    def of(self, path: Path) -> str:
        """SHA-256 of a file; for a folder, of the names and digests in it; `GONE` if the path does not exist."""
        files = {name: file.stat() for name, file in _files(path)}
        if not files and not path.is_dir():
            return GONE
        stamps = [f"{n} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}" for n, s in files.items()]
        stamp = sha256_of_bytes("\n".join(stamps).encode(errors="surrogateescape"))
        name = str(path.resolve())
        known = self.seen.get(name) or self.before.get(name)
        if known is None or known.stamp != stamp:
            known = Seen(stamp=stamp, sha256=_content(path))
        if max((s.st_ctime_ns for s in files.values()), default=0) < time.time_ns() - TIME_STEP_NS:
            self.seen[name] = known
        return known.sha256


def _content(path: Path) -> str:
    if path.is_file():
        return sha256_of(path)
    lines = [f"{sha256_of(file)} {name}" for name, file in _files(path)]
    return sha256_of_bytes("\n".join(lines).encode(errors="surrogateescape"))


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """The file, or all files in the folder with their names; links are followed, ``__pycache__`` is left out."""
    if path.is_file():
        yield "", path
    been: set[str] = set()
    for folder, inside, files in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        inside[:] = sorted(name for name in inside if name != "__pycache__") if real not in been else []
        for name in sorted(files) if real not in been else ():
            if (file := Path(folder, name)).is_file():
                yield file.relative_to(path).as_posix(), file
        been.add(real)


# The options that a recipe gives each stage, and the inputs of each step

PACKAGES = {
    "fold": ("torch", "numpy", "safetensors", "onnx", "onnx-ir", "onnxruntime"),
    "convert": ("torch", "numpy", "safetensors", "pillow"),
    "export": ("torch", "numpy", "pillow", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "onnxsim", "onnxslim"),
    "verify": ("torch", "numpy", "pillow", "onnx", "onnxruntime", "onnxruntime-gpu"),
    "bundle": ("torch", "numpy", "pillow", "onnx"),
    "report": (),
}
"""Packages whose versions affect the result of a stage, besides our own."""
LIBRARIES = ("timm", "torchvision", "transformers")
RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt", "tensorrt-rtx", "torch", "numpy")


class LocatedRecipe(NamedTuple):
    """A recipe, its path, and the line of each of its keys."""

    recipe: Recipe
    path: Path
    lines: Positions

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.place(self.recipe.out or str(run_folder.OUT / run_folder.utf8_stem(self.path)))

    @property
    def target(self) -> str:
        """The export target, as written in the recipe."""
        return (self.recipe.export or ExportSection()).target

    @property
    def tuned(self) -> str | None:
        """The result file of `tune`, if the recipe's preset is one."""
        return None if self.recipe.preset in NAMED else self.recipe.preset

    def place(self, name: str) -> Path:
        """A path in the recipe, relative to the current folder."""
        return self.path.parent / name

    def with_paths(self, options: AnyOptions) -> AnyOptions:
        """The options with their paths, and target and preset files, relative to the current folder."""
        given = {each.name: getattr(options, each.name) for each in options_of(type(options))}
        paths = {each.name for each in options_of(type(options)) if each.is_path and given[each.name] is not None} - {
            "preset"
        }
        paths |= {"target"} if str(given.get("target", "")).endswith(".toml") else set()
        paths |= {"preset"} if given.get("preset") not in (None, *NAMED) else set()
        return replace(options, **{name: str(self.place(given[name])) for name in paths})

    # Options of each stage, with paths as written in the recipe

    def converted(self) -> ConvertOptions:
        """The options of convert."""
        recipe = self.recipe
        return replace(recipe.convert or ConvertOptions(), settings=recipe.settings or None, weights=recipe.weights)

    def exported(self, precision: str) -> ExportOptions:
        """The options of export; a lower precision is calibrated on the images of [verify] unless others are given."""
        section, verified = self.recipe.export or ExportSection(), self.recipe.verify
        ranges = section if section.inputs or section.images else verified
        form = None if self.recipe.preset == DEFAULT else self.recipe.preset
        kept = None if precision == "fp32" else section.keep_fp32
        changed = {"precision": precision, "preset": form, "keep_fp32": kept}
        images = {"inputs": ranges.inputs, "images": ranges.images, "classes": ranges.classes}
        return ExportOptions.of(section, **changed, **images)

    def built(self) -> BuildOptions:
        """The options of build."""
        section = self.recipe.build or BuildSection()
        return BuildOptions.of(section, target=section.target or self.target, preset=self.tuned)

    def bundled(self) -> BundleOptions:
        """The options of bundle; its images are those of [verify] unless others are given."""
        section, verified = self.recipe.bundle or BundleSection(), self.recipe.verify
        given = section if section.inputs or section.images else verified
        images = {"inputs": given.inputs, "images": given.images, "count": section.count or verified.count}
        return BundleOptions.of(section, target=section.target or self.target, preset=self.tuned, **images)

    def measured(self) -> BenchOptions:
        """The options of bench without the baseline, which only evaluates the measurement."""
        section = self.recipe.bench or BenchSection()
        return BenchOptions.of(section, baseline=None, target=section.target or self.target, preset=self.tuned)

    # Inputs of the steps

    def sources(self) -> dict[str, Path]:
        """The checkpoint with its companion files, and the user's own code that builds the network."""
        recipe, own = self.recipe, own_file(self.recipe.arch or "")
        found = _with_companions(recipe.checkpoint, self.place(recipe.checkpoint))
        return {**found, **({each.name: each for each in _code_next_to(self.place(own))} if own else {})}

    def files(self, options: Options) -> dict[str, Path]:
        """The files and folders that the options name."""
        names = {each.name for each in options_of(type(options)) if each.is_path} - {"preset", "out", "timing_cache"}
        named = [str(getattr(options, name)) for name in names if getattr(options, name) is not None]
        named += [name for name in (str(getattr(options, "target", "")),) if name.endswith(".toml")]
        form = getattr(options, "preset", None)
        named += [form] if form not in (None, *NAMED) else []
        found = {name: self.place(name) for name in sorted(named)}
        every = [_with_companions(name, path) for name, path in found.items()]
        return {name: path for each in every for name, path in each.items()} | (
            {"what tune found": cache_folder(TUNED)} if form == FASTEST else {}
        )

    def versions(self, stage: str, digests: Digests, target: str) -> dict[str, str]:
        """Versions of the packages that affect the result of a stage, and the machine if it measures on a target."""
        libraries = LIBRARIES if self.recipe.method == "auto" and not self.recipe.convert else ()
        names = PACKAGES.get(stage, RUNTIMES)
        found = {name: version for name in (*names, *(libraries if names else ())) if (version := version_of(name))}
        measured = stage in ("build", "bench") or (stage == "fold" and self._is_network())
        there = str(self.place(target)) if target.endswith(".toml") else target
        return found | own_versions(digests) | ({"machine": _machine(there)} if measured else {})

    def _is_network(self) -> bool:
        """Whether the fold is measured, so that its result depends on the machine."""
        source = self.place(self.recipe.checkpoint)
        return bool(self.recipe.arch) or source.is_dir() or is_graph(source)


def own_versions(digests: Digests) -> dict[str, str]:
    """Digests of repaconv's own code, and of packages that registered plug-ins."""
    points = [point for group in plugins.GROUPS for point in plugins.registered(group).values()]
    found = {}
    for room in sorted({point.module.partition(".")[0] for point in points} | {"repaconv"}):
        spec = find_spec(room)
        origin = Path(spec.origin) if spec and spec.origin else None
        place = origin.parent if origin and origin.name == "__init__.py" else origin
        found[room] = digests.of(place)[:16] if place else ""
    return found


def _machine(target: str) -> str:
    """A key of the machine: equal keys mean that measurements can be compared."""
    try:
        gpu = plugins.load(plugins.ENGINES, load_target(target).runtime).device != "cpu"
    except RepaconvError:  # the stage reports it
        gpu = False
    return machine_key(fingerprint((), gpu=gpu))


def _with_companions(name: str, path: Path) -> dict[str, Path]:
    """A file with those that are read with it: external weights, parts, the description of an engine or an adapter."""
    companions = [
        path.parent / "adapter_config.json",
        *([path.with_suffix(".json")] if path.suffix in ENGINE_SUFFIXES else []),
    ]
    found = [each for each in companions if path.is_file() and each.is_file()]
    if path.is_file() and is_graph(path):
        with suppress(Refused):  # the stage reports it
            found += [path.parent / each for each in external_files_of(path)]
    with suppress(Refused):
        found += files_of(path)[1:]
    return {name: path, **{f"{each.name} next to {name}": each for each in found}}


def _code_next_to(file: Path) -> Iterator[Path]:
    """A Python file, and the files and packages next to it that it may import."""
    yield file
    for each in sorted(file.parent.iterdir()) if file.parent.is_dir() else ():
        if (each.suffix == ".py" and each != file) or (each / "__init__.py").is_file():
            yield each


def recorded_options(options: Options, section: str) -> dict[str, Any]:
    """The recorded options, as the inputs of a step; where a result is written and its baselines are not among them."""
    return {
        f"{section}.{each.name}": getattr(options, each.name)
        for each in options_of(type(options))
        if each.definition.recorded
    }


def results_of_others(run: run_folder.Run, mine: Iterable[Path]) -> dict[str, Path]:
    """Results in a run that were not written by the steps of a plan."""
    ours = {file.resolve() for file in mine}
    return {path.name: path for path in run.later_stages() if path.resolve() not in ours}


# Steps


def reads_nothing() -> dict[str, Path]:
    """The files of a step that reads only the results of earlier steps."""
    return {}


class RecipeStep(NamedTuple):
    """One step of a plan, with all that affects its result.

    Attributes:
        name: Name, unique in the plan.
        options: Its options: JSON values and paths.
        reads: Returns the files and folders that it reads, by their names in messages.
        versions: Versions of packages that affect its result, and the machine if it measures.
        after: Steps whose results it reads.
        needs: Steps without which it is skipped.
    """

    name: str
    options: Mapping[str, Any] = {}
    reads: Callable[[], Mapping[str, Path]] = reads_nothing
    versions: Mapping[str, str] = {}
    after: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def as_text(self) -> dict[str, str]:
        """Options and versions as text, by name; empty options are left out."""
        options = {key: value for key, value in self.options.items() if value not in (None, (), [], {})}
        return {name: json.dumps(value, sort_keys=True, default=str) for name, value in options.items()} | {
            f"{name}'s version": value for name, value in self.versions.items()
        }


# ``plan.json`` of a run folder: the steps that ran, with their inputs and outputs


class StepRecord(Record):
    """A step that ran: its inputs, the hashes of its outputs, whether it passed, and how long it took."""

    FORMER: ClassVar[Mapping[str, str]] = {"wrote": "outputs", "made_of": "inputs", "sound": "passed"}

    inputs: dict[str, str]
    outputs: dict[str, str]
    passed: bool
    seconds: float

    @property
    def key(self) -> str:
        """A hash of the inputs."""
        return key_of(self.inputs)


class _PlanFile(Record):
    schema_version: int = SCHEMA_VERSION
    stage: str = "plan"
    owner: str
    steps: dict[str, StepRecord] = Field(default={})
    seen: dict[str, Seen] = Field(default={})


def key_of(made_of: Mapping[str, str]) -> str:
    """A hash of a step's inputs."""
    return sha256_of_bytes(canonical_json(dict(made_of)).encode())[:16]


class Journal:
    """The steps that earlier runs of a plan recorded in a folder; empty if another plan wrote them or it is unreadable.

    Args:
        folder: The run folder.
        owner: The recipe that the plan belongs to.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self.folder, self.owner = folder, owner
        try:
            page = read_artefact(folder / PLAN, _PlanFile)
        except Refused:
            page = _PlanFile(owner=owner)
        mine = page.owner == owner
        self.steps = dict(page.steps) if mine else {}
        self.digests = Digests(dict(page.seen) if mine else {})

    def made_of(self, step: RecipeStep) -> dict[str, str]:
        """All inputs of a step, with their current digests."""
        files = {name: self.digests.of(path) for name, path in step.reads().items()}
        results = {f"the result of {name}": self._result(name) for name in step.after}
        return {**step.as_text(), **files, **results}

    def why(self, step: RecipeStep) -> str:
        """Why a step must run; empty if it is up to date."""
        kept = self.steps.get(step.name)
        if kept is None:
            return "it has not run yet"
        if not kept.passed:
            return "it did not pass last time"
        now = self.made_of(step)
        if changed := [name for name in {**kept.inputs, **now} if kept.inputs.get(name) != now.get(name)]:
            return f"changed: {', '.join(changed)}"
        touched = [name for name, sha256 in kept.outputs.items() if self.digests.of(self.folder / name) != sha256]
        gone = [name for name in touched if self.digests.of(self.folder / name) == GONE]
        return f"{gone[0]} is missing" if gone else f"{touched[0]} was changed" if touched else ""

    def owns(self, name: str) -> bool:
        """Whether a step belongs to this plan and its outputs are unchanged."""
        kept = self.steps.get(name)
        return kept is not None and all(self.digests.of(self.folder / at) == sha for at, sha in kept.outputs.items())

    def files(self, name: str) -> list[Path]:
        """The files that a step wrote."""
        return [self.folder / each for each in self.steps[name].outputs] if name in self.steps else []

    def keep(self, name: str, kept: StepRecord | None) -> None:
        """Record a step that ran, or forget it if None.

        ``plan.json`` is written at once, so that an interrupted run resumes here.
        """
        self.steps.pop(name, None)
        if kept is not None:
            self.steps[name] = kept
        write_artefact(self.folder / PLAN, _PlanFile(owner=self.owner, steps=self.steps, seen=self.digests.seen))

    def _result(self, name: str) -> str:
        """A hash of the step's outputs as they are now."""
        kept = self.steps.get(name)
        return key_of({at: self.digests.of(self.folder / at) for at in kept.outputs}) if kept else GONE


# Execution: skip steps that are up to date, run the others, remove the files of steps no longer in the plan

Did = Literal["ran", "up to date", "stopped", "skipped", "would run", "removed", "would be removed"]


class UpcomingStep(NamedTuple):
    """A step that is about to run or to be skipped.

    ``why`` is empty if it is up to date. ``left_s`` is how long the remaining steps may take, in seconds, by their last
    run; None if one of them has not run here.
    """

    step: RecipeStep
    why: str
    number: int
    in_all: int
    left_s: float | None


class StepOutputs(NamedTuple):
    """The files that a step wrote, the main one first, and whether its result may be reused by the next run."""

    wrote: Sequence[Path]
    sound: bool


class StepOutcome(NamedTuple):
    """The outcome of a step."""

    name: str
    did: Did
    why: str


def execute_steps(
    steps: Sequence[RecipeStep],
    journal: Journal,
    do: Callable[[UpcomingStep], StepOutputs | None],
    *,
    again: bool = False,
    others: Iterable[str] = (),
) -> list[StepOutcome]:
    """Execute the steps in order.

    Args:
        steps: The steps; each comes after those that it names.
        journal: The journal of the run folder.
        do: Runs a step, or reads the result of one that is up to date; returns None if the step was stopped.
        again: Whether to run all steps.
        others: Steps of the plan that are not executed now; their files are kept.
    """
    found = [_remove_step(journal, name) for name in _obsolete_steps(steps, journal, others)]
    pace, undone = _TimeEstimate(steps, steps_to_run(steps, journal, again=again), journal), set[str]()
    for number, step in enumerate(steps, 1):
        if lacking := [name for name in step.needs if name in undone]:
            undone.add(step.name)
            found.append(StepOutcome(step.name, "skipped", f"it needs {lacking[0]}"))
            continue
        why = journal.why(step) or ("rerun requested" if again else "")
        made_of, begun = journal.made_of(step), time.monotonic()
        made = do(UpcomingStep(step, why, number, len(steps), pace.left(step)))
        if why and made is not None:
            _record_step(journal, step, made_of, made, time.monotonic() - begun)
        undone |= {step.name} if made is None else set()
        pace.passed(step, time.monotonic() - begun)
        found.append(StepOutcome(step.name, "stopped" if made is None else "ran" if why else "up to date", why))
    return found


def steps_to_run(steps: Sequence[RecipeStep], journal: Journal, *, again: bool = False) -> dict[str, str]:
    """The steps that would run and why, as far as that is known before any of them has run."""
    found: dict[str, str] = {}
    for step in steps:
        before = [name for name in (*step.needs, *step.after) if name in found]
        why = journal.why(step) or (f"{before[0]} runs before it" if before else "rerun requested" if again else "")
        found |= {step.name: why} if why else {}
    return found


def preview(
    steps: Sequence[RecipeStep], journal: Journal, *, again: bool = False, others: Iterable[str] = ()
) -> list[StepOutcome]:
    """Return what `execute_steps` would do, without doing it."""
    would = steps_to_run(steps, journal, again=again)
    found = [
        StepOutcome(name, "would be removed", "it is no longer in the plan")
        for name in _obsolete_steps(steps, journal, others)
    ]
    return found + [
        StepOutcome(each.name, "would run" if each.name in would else "up to date", would.get(each.name, ""))
        for each in steps
    ]


def _obsolete_steps(steps: Sequence[RecipeStep], journal: Journal, others: Iterable[str]) -> list[str]:
    """Recorded steps that are no longer in the plan."""
    planned = {*(step.name for step in steps), *others}
    return [name for name in journal.steps if name not in planned]


def _remove_step(journal: Journal, name: str) -> StepOutcome:
    """Remove the files of a step that is no longer in the plan."""
    remove_written({journal.folder / at: sha256 for at, sha256 in journal.steps[name].outputs.items()})
    journal.keep(name, None)
    return StepOutcome(name, "removed", "it is no longer in the plan")


def _record_step(
    journal: Journal, step: RecipeStep, made_of: Mapping[str, str], made: StepOutputs, seconds: float
) -> None:
    """Record a step that ran, and remove files that it wrote earlier under other names."""
    wrote = {os.path.relpath(path, journal.folder): journal.digests.of(path) for path in made.wrote}
    before = journal.steps[step.name].outputs if step.name in journal.steps else {}
    remove_written({journal.folder / at: sha256 for at, sha256 in before.items() if at not in wrote})
    journal.keep(
        step.name, StepRecord(inputs=dict(made_of), outputs=wrote, passed=made.sound, seconds=round(seconds, 3))
    )


class _TimeEstimate:
    """An estimate of the remaining time, from the last run and the speed so far."""

    def __init__(self, steps: Sequence[RecipeStep], running: Mapping[str, str], journal: Journal) -> None:
        known = {name: kept.seconds for name, kept in journal.steps.items()}
        self.expected = {step.name: known.get(step.name) for step in steps if step.name in running}
        self.took = self.meant = 0.0

    def left(self, step: RecipeStep) -> float | None:
        """Remaining seconds from the start of a step; None if one of the steps never ran here."""
        names = list(self.expected)
        ahead = names[names.index(step.name) :] if step.name in names else names[len(names) :]
        seconds = [self.expected[name] for name in ahead]
        if not seconds or None in seconds:
            return None
        return sum(filter(None, seconds)) * (self.took / self.meant if self.meant else 1.0)

    def passed(self, step: RecipeStep, seconds: float) -> None:
        """Record a finished step."""
        if expected := self.expected.get(step.name):
            self.took, self.meant = self.took + seconds, self.meant + expected


# The plan of a recipe: one step per stage (export: per precision), in the order of the data flow


class Planned(NamedTuple):
    """A step of a recipe, with its stage and options.

    Attributes:
        step: The step, with its inputs.
        stage: Name of the stage.
        options: The stage's options, with paths as written in the recipe; None for a fold, which reads the recipe.
        label: What distinguishes it from other steps of the stage.
    """

    step: RecipeStep
    stage: str
    options: Any
    label: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The recipe's key that it comes from."""
        return ("checkpoint",) if self.stage == "fold" else (self.stage,)


def planned(placed: LocatedRecipe, journal: Journal) -> list[Planned]:
    """The steps of a recipe."""
    recipe = placed.recipe
    found = [_convert_step(placed) if recipe.convert else _fold_step(placed)]
    found += [
        _export_step(placed, precision, found[0]) for precision in (recipe.export.precisions if recipe.export else ())
    ]
    found.append(_verify_step(placed, journal, found))
    if recipe.build:
        found.append(_graphs_step("build", placed, placed.built(), recipe.build.precision, found))
    if recipe.bundle:
        found.append(_graphs_step("bundle", placed, placed.bundled(), recipe.bundle.precision or "fp32", found))
    if recipe.bench:
        found.append(_graphs_step("bench", placed, placed.measured(), recipe.bench.precision, found))
    if recipe.report:
        found.append(_report_step(placed, recipe.report, journal, found))
    return [_with_versions(each, placed, journal) for each in found]


def _with_versions(each: Planned, placed: LocatedRecipe, journal: Journal) -> Planned:
    versions = placed.versions(each.stage, journal.digests, getattr(each.options, "target", placed.target))
    return each._replace(step=each.step._replace(versions=versions))


def _fold_step(placed: LocatedRecipe) -> Planned:
    options = placed.recipe.model_dump(include={"checkpoint", "method", "arch", "force", "weights", "sha256", "set"})
    options |= {"task": placed.recipe.task} if placed.recipe.task else {}
    lies = str(placed.place(placed.recipe.checkpoint).resolve())  # recorded in fold.json
    options["where the checkpoint lies"] = lies
    return Planned(RecipeStep("fold", options, placed.sources), "fold", None)


def _convert_step(placed: LocatedRecipe) -> Planned:
    options = placed.converted()
    lies = str(placed.place(placed.recipe.checkpoint).resolve())
    checkpoint = {"where the checkpoint lies": lies, "sha256": placed.recipe.sha256}
    step = RecipeStep(
        "convert",
        {**checkpoint, **recorded_options(options, "convert")},
        lambda: {**placed.sources(), **placed.files(options)},
    )
    return Planned(step, "convert", options)


def _export_step(placed: LocatedRecipe, precision: str, first: Planned) -> Planned:
    options, before = placed.exported(precision), (first.step.name,)
    step = RecipeStep(
        f"export {precision}",
        recorded_options(options, "export"),
        lambda: placed.files(options),
        after=before,
        needs=before,
    )
    return Planned(step, "export", options, precision)


def _verify_step(placed: LocatedRecipe, journal: Journal, before: Sequence[Planned]) -> Planned:
    """The verify step; it reads all graphs of the run, including those of other plans."""
    options, names = placed.recipe.verify, _names(before)

    def reads() -> dict[str, Path]:
        others = results_of_others(run_folder.Run(placed.folder), _files_of_step(journal, names))
        return {**placed.files(options), **{name: path for name, path in others.items() if stage_of(path) == "export"}}

    return Planned(
        RecipeStep("verify", recorded_options(options, "verify"), reads, after=names, needs=names[:1]),
        "verify",
        options,
    )


def _graphs_step(
    stage: str, placed: LocatedRecipe, options: Options, precision: str, before: Sequence[Planned]
) -> Planned:
    """A step that reads the fold, and the exports of its precision or, if they are missing, all exports."""
    first, *exports = [each for each in before if each.stage in ("fold", "convert", "export")]
    taken = [each for each in exports if each.label in (precision, "fp32")] or exports
    step = RecipeStep(
        stage,
        recorded_options(options, stage),
        lambda: placed.files(options),
        after=_names([first, *taken]),
        needs=_names([first, *exports]),
    )
    return Planned(step, stage, options)


def _report_step(placed: LocatedRecipe, options: Options, journal: Journal, before: Sequence[Planned]) -> Planned:
    """The report step; it reads all results of the run."""
    names = _names(before)

    def reads() -> dict[str, Path]:
        return results_of_others(run_folder.Run(placed.folder), _files_of_step(journal, names))

    return Planned(
        RecipeStep("report", recorded_options(options, "report"), reads, after=names, needs=names[:1]),
        "report",
        options,
    )


def _names(stages: Sequence[Planned]) -> tuple[str, ...]:
    return tuple(each.step.name for each in stages)


def _files_of_step(journal: Journal, names: Sequence[str]) -> list[Path]:
    return [file for name in names for file in journal.files(name)]
