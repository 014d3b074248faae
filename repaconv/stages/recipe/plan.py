"""A recipe as a plan: its steps, what each depends on (by digest), and executing those that are not up to date."""

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
    cache_folder,
    canonical_json,
    read_artefact,
    sha256_of,
    sha256_of_bytes,
    stage_of,
    write_artefact,
)
from repaconv.core.run_folder import PLAN
from repaconv.core.toml_positions import Lines
from repaconv.graph.onnx_files import external_files, is_graph, read_graph
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
from repaconv.stages.shared.common_checks import load_target
from repaconv.stages.shared.option_definitions import AnyOptions, Options, options_of
from repaconv.stages.shared.preset_choice import TUNED

# --- What files and folders hold, by digest. What has not been touched since it was hashed is not read again.

GONE = "gone"
SETTLED_NS = 2_000_000_000
"""What was written less long ago is read again: within the tick of a clock, a second writing leaves the same stamp."""


class Seen(Record):
    """A digest, and the stamp of what it is of: inodes, sizes and times, the last of which no program sets."""

    stamp: str
    sha256: str


class Digests:
    """Digests of files and folders.

    Args:
        seen: Those of before, by path.
    """

    def __init__(self, seen: dict[str, Seen]) -> None:
        self.before, self.seen = seen, dict[str, Seen]()

    def of(self, path: Path) -> str:
        """SHA-256 of a file; of a folder that of the names and digests in it; `GONE` where there is neither."""
        files = {name: file.stat() for name, file in _files(path)}
        if not files and not path.is_dir():
            return GONE
        stamps = [f"{n} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}" for n, s in files.items()]
        stamp = sha256_of_bytes("\n".join(stamps).encode(errors="surrogateescape"))
        name = str(path.resolve())
        known = self.seen.get(name) or self.before.get(name)
        if known is None or known.stamp != stamp:
            known = Seen(stamp=stamp, sha256=_content(path))
        if max((s.st_ctime_ns for s in files.values()), default=0) < time.time_ns() - SETTLED_NS:
            self.seen[name] = known
        return known.sha256


def _content(path: Path) -> str:
    if path.is_file():
        return sha256_of(path)
    lines = [f"{sha256_of(file)} {name}" for name, file in _files(path)]
    return sha256_of_bytes("\n".join(lines).encode(errors="surrogateescape"))


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """The file, or all in the folder by name, links followed; what Python compiled is nobody's input."""
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


# --- A recipe where it lies: its orders as the stages take them, and what each of its steps is made of.

PACKAGES = {
    "fold": ("torch", "numpy", "safetensors", "onnx", "onnx-ir", "onnxruntime"),
    "convert": ("torch", "numpy", "safetensors", "pillow"),
    "export": ("torch", "numpy", "pillow", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "onnxsim", "onnxslim"),
    "verify": ("torch", "numpy", "pillow", "onnx", "onnxruntime", "onnxruntime-gpu"),
    "bundle": ("torch", "numpy", "pillow", "onnx"),
    "report": (),
}
"""Whose versions bear on what a stage leaves, besides our own."""
ENGINES = (".onnx", ".ort", ".blob", ".engine", ".plan")
"""Suffixes of what `build` leaves, with a file beside it that says what it is."""
LIBRARIES = ("timm", "torchvision", "transformers")
RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt", "tensorrt-rtx", "torch", "numpy")


class Placed(NamedTuple):
    """A recipe, where it lies, and the line of each of its keys."""

    recipe: Recipe
    path: Path
    lines: Lines

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.place(self.recipe.out or str(run_folder.OUT / self.path.stem))

    @property
    def target(self) -> str:
        """Of what is exported, as it stands in the recipe."""
        return (self.recipe.export or ExportSection()).target

    @property
    def tuned(self) -> str | None:
        """Tune's file, which says how a graph is run; none of the forms that have a name."""
        return None if self.recipe.preset in NAMED else self.recipe.preset

    def place(self, name: str) -> Path:
        """A path of the recipe's as it is seen from here."""
        return self.path.parent / name

    def placed(self, options: AnyOptions) -> AnyOptions:
        """An order whose paths, and whose target's and form's if they are some, are seen from here."""
        given = {each.name: getattr(options, each.name) for each in options_of(type(options))}
        paths = {each.name for each in options_of(type(options)) if each.is_path and given[each.name] is not None} - {
            "preset"
        }
        paths |= {"target"} if str(given.get("target", "")).endswith(".toml") else set()
        paths |= {"preset"} if given.get("preset") not in (None, *NAMED) else set()
        return replace(options, **{name: str(self.place(given[name])) for name in paths})

    # --- its orders, as paths stand in it ---------------------------------------------------------------

    def converted(self) -> ConvertOptions:
        """What convert is asked for."""
        recipe = self.recipe
        return replace(recipe.convert or ConvertOptions(), settings=recipe.settings or None, weights=recipe.weights)

    def exported(self, precision: str) -> ExportOptions:
        """What export is asked for; ranges of a lower precision are those of what is verified, unless given."""
        section, verified = self.recipe.export or ExportSection(), self.recipe.verify
        ranges = section if section.inputs or section.images else verified
        form = None if self.recipe.preset == DEFAULT else self.recipe.preset
        kept = None if precision == "fp32" else section.keep_fp32
        changed = {"precision": precision, "preset": form, "keep_fp32": kept}
        return ExportOptions.of(section, **changed, inputs=ranges.inputs, images=ranges.images)

    def built(self) -> BuildOptions:
        """What build is asked for."""
        section = self.recipe.build or BuildSection()
        return BuildOptions.of(section, target=section.target or self.target, preset=self.tuned)

    def bundled(self) -> BundleOptions:
        """What bundle is asked for; its images are those that are verified, unless given."""
        section, verified = self.recipe.bundle or BundleSection(), self.recipe.verify
        given = section if section.inputs or section.images else verified
        images = {"inputs": given.inputs, "images": given.images, "count": section.count or verified.count}
        return BundleOptions.of(section, target=section.target or self.target, preset=self.tuned, **images)

    def measured(self) -> BenchOptions:
        """What bench is asked for: without a baseline, which judges what was measured and is none of it."""
        section = self.recipe.bench or BenchSection()
        return BenchOptions.of(section, baseline=None, target=section.target or self.target, preset=self.tuned)

    # --- what steps are made of -------------------------------------------------------------------------

    def sources(self) -> dict[str, Path]:
        """What is folded, and the user's own code that builds it."""
        recipe, own = self.recipe, own_file(self.recipe.arch or "")
        found = _with_companions(recipe.checkpoint, self.place(recipe.checkpoint))
        return {**found, **({each.name: each for each in _code_beside(self.place(own))} if own else {})}

    def files(self, options: Options) -> dict[str, Path]:
        """The files and folders that an order names."""
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

    def versions(self, stage: str, digests: Digests) -> dict[str, str]:
        """Of what bears on the result of a stage, and the machine where it is measured."""
        libraries = LIBRARIES if self.recipe.method == "auto" and not self.recipe.convert else ()
        names = PACKAGES.get(stage, RUNTIMES)
        found = {name: version for name in (*names, *(libraries if names else ())) if (version := version_of(name))}
        measured = stage in ("build", "bench") or (stage == "fold" and self._is_network())
        return found | own_versions(digests) | ({"machine": _machine(self.target)} if measured else {})

    def _is_network(self) -> bool:
        """Whether a fold is measured, and what is slower taken back."""
        source = self.place(self.recipe.checkpoint)
        return bool(self.recipe.arch) or source.is_dir() or is_graph(source)


def own_versions(digests: Digests) -> dict[str, str]:
    """Our own code, and that of whoever registered something with us."""
    points = [point for group in plugins.GROUPS for point in plugins.registered(group).values()]
    found = {}
    for room in sorted({point.module.partition(".")[0] for point in points} | {"repaconv"}):
        spec = find_spec(room)
        origin = Path(spec.origin) if spec and spec.origin else None
        place = origin.parent if origin and origin.name == "__init__.py" else origin
        found[room] = digests.of(place)[:16] if place else ""
    return found


def _machine(target: str) -> str:
    """What must be the same for a measurement to be the same."""
    try:
        card = plugins.load(plugins.ENGINES, load_target(target).runtime).device != "cpu"
    except RepaconvError:  # the stage says so itself
        card = False
    return machine_key(fingerprint((), card=card))


def _with_companions(name: str, path: Path) -> dict[str, Path]:
    """A file with those that are read with it: a graph's weights, what says of an engine or an adapter what it is."""
    beside = [path.parent / "adapter_config.json", *([path.with_suffix(".json")] if path.suffix in ENGINES else [])]
    found = [each for each in beside if path.is_file() and each.is_file()]
    if path.is_file() and is_graph(path):
        with suppress(Refused):  # the stage says so itself
            found += [path.parent / each for each in external_files(read_graph(path))]
    return {name: path, **{f"{each.name} next to {name}": each for each in found}}


def _code_beside(file: Path) -> Iterator[Path]:
    """A file of Python and what it may import from where it lies: files beside it, packages beside it."""
    yield file
    for each in sorted(file.parent.iterdir()) if file.parent.is_dir() else ():
        if (each.suffix == ".py" and each != file) or (each / "__init__.py").is_file():
            yield each


def asked(options: Options, section: str) -> dict[str, Any]:
    """An order as a step is asked for it; what says where a result goes, or what it is held against, is none of it."""
    return {
        f"{section}.{each.name}": getattr(options, each.name)
        for each in options_of(type(options))
        if each.knob.recorded
    }


def foreign(run: run_folder.Run, mine: Iterable[Path]) -> dict[str, Path]:
    """Artefacts of a run that no step of a plan left."""
    ours = {file.resolve() for file in mine}
    return {path.name: path for path in run.later_stages() if path.resolve() not in ours}


# --- Execute a plan: skip steps that are up to date, run the others, remove the files of steps no longer in the plan.

# --- A step of a plan, and what it is made of.


def reads_nothing() -> dict[str, Path]:
    """Of a step that has its orders and the results before it alone."""
    return {}


class Step(NamedTuple):
    """One thing to do, by all that bears on its result.

    Attributes:
        name: Its own within the plan.
        asked: What it is asked for; anything that JSON takes, and paths.
        reads: Files and folders that it reads, by the words that tell them, as they are at that moment.
        versions: Of the programs that bear on its result, and the machine where something is measured.
        after: Steps whose results it reads.
        needs: Steps without which it is left out.
    """

    name: str
    asked: Mapping[str, Any] = {}
    reads: Callable[[], Mapping[str, Path]] = reads_nothing
    versions: Mapping[str, str] = {}
    after: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def told(self) -> dict[str, str]:
        """What it is asked for and by whom, in words; what says nothing is left out."""
        asked = {f"{key}": value for key, value in self.asked.items() if value not in (None, (), [], {})}
        return {name: json.dumps(value, sort_keys=True, default=str) for name, value in asked.items()} | {
            f"{name}'s version": value for name, value in self.versions.items()
        }


# --- ``plan.json`` of a folder: which steps made what is in it, and of what.


class Kept(Record):
    """A step that ran: of what, what it wrote by hash, whether that is sound, and how long it took."""

    FORMER: ClassVar[Mapping[str, str]] = {"wrote": "outputs", "made_of": "inputs", "sound": "passed"}

    inputs: dict[str, str]
    outputs: dict[str, str]
    passed: bool
    seconds: float

    @property
    def key(self) -> str:
        """The same for the same step of the same things."""
        return key_of(self.inputs)


class _Page(Record):
    schema_version: int = SCHEMA_VERSION
    stage: str = "plan"
    owner: str
    steps: dict[str, Kept] = Field(default={})
    seen: dict[str, Seen] = Field(default={})


def key_of(made_of: Mapping[str, str]) -> str:
    """Of what a step is made."""
    return sha256_of_bytes(canonical_json(dict(made_of)).encode())[:16]


class Journal:
    """What earlier walks left in a folder; nothing where they were another's, or cannot be read.

    Args:
        folder: Whose.
        owner: Whose plan it is.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self.folder, self.owner = folder, owner
        try:
            page = read_artefact(folder / PLAN, _Page)
        except Refused:
            page = _Page(owner=owner)
        mine = page.owner == owner
        self.steps = dict(page.steps) if mine else {}
        self.digests = Digests(dict(page.seen) if mine else {})

    def made_of(self, step: Step) -> dict[str, str]:
        """All that bears on its result, as it is now."""
        files = {f"{name}": self.digests.of(path) for name, path in step.reads().items()}
        results = {f"the result of {name}": self._result(name) for name in step.after}
        return {**step.told(), **files, **results}

    def why(self, step: Step) -> str:
        """Why it must run; empty if it is up to date."""
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
        """Whether a step is of this plan, and what it wrote is as it was."""
        kept = self.steps.get(name)
        return kept is not None and all(self.digests.of(self.folder / at) == sha for at, sha in kept.outputs.items())

    def files(self, name: str) -> list[Path]:
        """What a step wrote."""
        return [self.folder / each for each in self.steps[name].outputs] if name in self.steps else []

    def keep(self, name: str, kept: Kept | None) -> None:
        """Note a step that ran, or forget one; the page is written at once, so that an interrupted run resumes here."""
        self.steps.pop(name, None)
        if kept is not None:
            self.steps[name] = kept
        write_artefact(self.folder / PLAN, _Page(owner=self.owner, steps=self.steps, seen=self.digests.seen))

    def _result(self, name: str) -> str:
        """What a step left, as it lies there now."""
        kept = self.steps.get(name)
        return key_of({at: self.digests.of(self.folder / at) for at in kept.outputs}) if kept else GONE


# --- Execute a plan: skip steps that are up to date, run the others, remove the files of steps no longer in the plan.

Did = Literal["ran", "up to date", "stopped", "skipped", "would run", "removed", "would be removed"]


class Turn(NamedTuple):
    """A step when it is its turn; ``why`` is empty where it is up to date. ``left_s`` is how long the remaining steps
    may take, by how long they took before; None where one of them has not run here."""

    step: Step
    why: str
    number: int
    in_all: int
    left_s: float | None


class Made(NamedTuple):
    """What a step wrote, the first by which it is known, and whether that is sound: else it runs again next time."""

    wrote: Sequence[Path]
    sound: bool


class Done(NamedTuple):
    """What became of a step."""

    name: str
    did: Did
    why: str


def walk(
    steps: Sequence[Step],
    journal: Journal,
    do: Callable[[Turn], Made | None],
    *,
    again: bool = False,
    others: Iterable[str] = (),
) -> list[Done]:
    """Take the steps in their order.

    Args:
        steps: Each after those that it names.
        journal: Of the folder where they write.
        do: Does a step, or reads the result of one that is up to date; None where it was stopped.
        again: Run all of them.
        others: Steps that are asked for, and not now; what they wrote stays.
    """
    found = [_let_go(journal, name) for name in _idle(steps, journal, others)]
    pace, undone = _Pace(steps, foretold(steps, journal, again=again), journal), set[str]()
    for number, step in enumerate(steps, 1):
        if lacking := [name for name in step.needs if name in undone]:
            undone.add(step.name)
            found.append(Done(step.name, "skipped", f"it needs {lacking[0]}"))
            continue
        why = journal.why(step) or ("rerun requested" if again else "")
        made_of, begun = journal.made_of(step), time.monotonic()
        made = do(Turn(step, why, number, len(steps), pace.left(step)))
        if why and made is not None:
            _keep(journal, step, made_of, made, time.monotonic() - begun)
        undone |= {step.name} if made is None else set()
        pace.passed(step, time.monotonic() - begun)
        found.append(Done(step.name, "stopped" if made is None else "ran" if why else "up to date", why))
    return found


def foretold(steps: Sequence[Step], journal: Journal, *, again: bool = False) -> dict[str, str]:
    """Which steps would run and why, as far as that is known before any of them has."""
    found: dict[str, str] = {}
    for step in steps:
        before = [name for name in (*step.needs, *step.after) if name in found]
        why = journal.why(step) or (f"{before[0]} runs before it" if before else "rerun requested" if again else "")
        found |= {step.name: why} if why else {}
    return found


def dry(steps: Sequence[Step], journal: Journal, *, again: bool = False, others: Iterable[str] = ()) -> list[Done]:
    """What `walk` would do."""
    would = foretold(steps, journal, again=again)
    found = [Done(name, "would be removed", "it is no longer in the plan") for name in _idle(steps, journal, others)]
    return found + [
        Done(each.name, "would run" if each.name in would else "up to date", would.get(each.name, "")) for each in steps
    ]


def _idle(steps: Sequence[Step], journal: Journal, others: Iterable[str]) -> list[str]:
    planned = {*(step.name for step in steps), *others}
    return [name for name in journal.steps if name not in planned]


def _let_go(journal: Journal, name: str) -> Done:
    """Remove what a step wrote that the plan has no more."""
    remove_written({journal.folder / at: sha256 for at, sha256 in journal.steps[name].outputs.items()})
    journal.keep(name, None)
    return Done(name, "removed", "it is no longer in the plan")


def _keep(journal: Journal, step: Step, made_of: Mapping[str, str], made: Made, seconds: float) -> None:
    """Note what was made; what it wrote before under other names goes."""
    wrote = {os.path.relpath(path, journal.folder): journal.digests.of(path) for path in made.wrote}
    before = journal.steps[step.name].outputs if step.name in journal.steps else {}
    remove_written({journal.folder / at: sha256 for at, sha256 in before.items() if at not in wrote})
    journal.keep(step.name, Kept(inputs=dict(made_of), outputs=wrote, passed=made.sound, seconds=round(seconds, 3)))


class _Pace:
    """How long what is left may take: by the last time, and by how fast it went up to here."""

    def __init__(self, steps: Sequence[Step], running: Mapping[str, str], journal: Journal) -> None:
        known = {name: kept.seconds for name, kept in journal.steps.items()}
        self.expected = {step.name: known.get(step.name) for step in steps if step.name in running}
        self.took = self.meant = 0.0

    def left(self, step: Step) -> float | None:
        """Seconds from the beginning of a step on; a step that never ran here may take any time."""
        names = list(self.expected)
        ahead = names[names.index(step.name) :] if step.name in names else names[len(names) :]
        seconds = [self.expected[name] for name in ahead]
        if not seconds or None in seconds:
            return None
        return sum(filter(None, seconds)) * (self.took / self.meant if self.meant else 1.0)

    def passed(self, step: Step, seconds: float) -> None:
        """Note a step that is over."""
        if expected := self.expected.get(step.name):
            self.took, self.meant = self.took + seconds, self.meant + expected


# --- A recipe as a plan: a step a stage, in the order in which data flows, each with all that it is made of.


class Planned(NamedTuple):
    """A step of a recipe.

    Attributes:
        step: What it is made of.
        stage: Which stage does it.
        options: What that is asked for, as paths stand in the recipe; a fold's is the recipe's own.
        label: What tells it from others of its stage.
    """

    step: Step
    stage: str
    options: Any
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
    options = placed.converted()
    lies = str(placed.place(placed.recipe.checkpoint).resolve())
    told = {"where the checkpoint lies": lies, "sha256": placed.recipe.sha256}
    step = Step("convert", {**told, **asked(options, "convert")}, lambda: {**placed.sources(), **placed.files(options)})
    return Planned(step, "convert", options)


def _exported(placed: Placed, precision: str, first: Planned) -> Planned:
    options, before = placed.exported(precision), (first.step.name,)
    step = Step(
        f"export {precision}", asked(options, "export"), lambda: placed.files(options), after=before, needs=before
    )
    return Planned(step, "export", options, precision)


def _verified(placed: Placed, journal: Journal, before: Sequence[Planned]) -> Planned:
    """It looks at all graphs that the run holds, those of others too."""
    options, names = placed.recipe.verify, _names(before)

    def reads() -> dict[str, Path]:
        others = foreign(run_folder.Run(placed.folder), _files_of_step(journal, names))
        return {**placed.files(options), **{name: path for name, path in others.items() if stage_of(path) == "export"}}

    return Planned(Step("verify", asked(options, "verify"), reads, after=names, needs=names[:1]), "verify", options)


def _of_graphs(stage: str, placed: Placed, options: Options, precision: str, before: Sequence[Planned]) -> Planned:
    """Of the fold, and of the graphs that a model of that precision is or is built from."""
    first, *exports = [each for each in before if each.stage in ("fold", "convert", "export")]
    taken = [each for each in exports if each.label in (precision, "fp32")] or exports
    step = Step(
        stage,
        asked(options, stage),
        lambda: placed.files(options),
        after=_names([first, *taken]),
        needs=_names([first, *exports]),
    )
    return Planned(step, stage, options)


def _reported(placed: Placed, options: Options, journal: Journal, before: Sequence[Planned]) -> Planned:
    """It tells all that the run holds."""
    names = _names(before)

    def reads() -> dict[str, Path]:
        return foreign(run_folder.Run(placed.folder), _files_of_step(journal, names))

    return Planned(Step("report", asked(options, "report"), reads, after=names, needs=names[:1]), "report", options)


def _names(stages: Sequence[Planned]) -> tuple[str, ...]:
    return tuple(each.step.name for each in stages)


def _files_of_step(journal: Journal, names: Sequence[str]) -> list[Path]:
    return [file for name in names for file in journal.files(name)]
