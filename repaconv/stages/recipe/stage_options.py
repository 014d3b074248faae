"""A recipe where it lies: its orders as the stages take them, and what each of its steps is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from repaconv.benchmark.machine_fingerprint import fingerprint, machine_key, version_of
from repaconv.core import plugins, run_folder
from repaconv.core.errors import Refused, RepaconvError
from repaconv.core.files import cache_folder
from repaconv.core.toml_positions import Lines
from repaconv.graph.onnx_files import external_files, is_graph, read_graph
from repaconv.options import BenchSection, BuildSection, BundleSection, ExportSection, Recipe, own_file
from repaconv.options.conversion_options import ConvertOrder
from repaconv.options.option_definitions import AnyOrder, Order, knobs
from repaconv.options.stage_options import BenchOrder, BuildOrder, BundleOrder, ExportOrder
from repaconv.rewrites.presets import DEFAULT, FASTEST, NAMED
from repaconv.stages.recipe.file_digests import Digests
from repaconv.stages.shared.common_checks import load_target
from repaconv.stages.shared.preset_choice import TUNED

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

    def placed(self, order: AnyOrder) -> AnyOrder:
        """An order whose paths, and whose target's and form's if they are some, are seen from here."""
        given = {each.name: getattr(order, each.name) for each in knobs(type(order))}
        paths = {each.name for each in knobs(type(order)) if each.is_path and given[each.name] is not None} - {"preset"}
        paths |= {"target"} if str(given.get("target", "")).endswith(".toml") else set()
        paths |= {"preset"} if given.get("preset") not in (None, *NAMED) else set()
        return replace(order, **{name: str(self.place(given[name])) for name in paths})

    # --- its orders, as paths stand in it ---------------------------------------------------------------

    def converted(self) -> ConvertOrder:
        """What convert is asked for."""
        recipe = self.recipe
        return replace(recipe.convert or ConvertOrder(), settings=recipe.settings or None, weights=recipe.weights)

    def exported(self, precision: str) -> ExportOrder:
        """What export is asked for; ranges of a lower precision are those of what is verified, unless given."""
        section, verified = self.recipe.export or ExportSection(), self.recipe.verify
        ranges = section if section.inputs or section.images else verified
        form = None if self.recipe.preset == DEFAULT else self.recipe.preset
        kept = None if precision == "fp32" else section.keep_fp32
        changed = {"precision": precision, "preset": form, "keep_fp32": kept}
        return ExportOrder.of(section, **changed, inputs=ranges.inputs, images=ranges.images)

    def built(self) -> BuildOrder:
        """What build is asked for."""
        section = self.recipe.build or BuildSection()
        return BuildOrder.of(section, target=section.target or self.target, preset=self.tuned)

    def bundled(self) -> BundleOrder:
        """What bundle is asked for; its images are those that are verified, unless given."""
        section, verified = self.recipe.bundle or BundleSection(), self.recipe.verify
        given = section if section.inputs or section.images else verified
        images = {"inputs": given.inputs, "images": given.images, "count": section.count or verified.count}
        return BundleOrder.of(section, target=section.target or self.target, preset=self.tuned, **images)

    def measured(self) -> BenchOrder:
        """What bench is asked for: without a baseline, which judges what was measured and is none of it."""
        section = self.recipe.bench or BenchSection()
        return BenchOrder.of(section, baseline=None, target=section.target or self.target, preset=self.tuned)

    # --- what steps are made of -------------------------------------------------------------------------

    def sources(self) -> dict[str, Path]:
        """What is folded, and the user's own code that builds it."""
        recipe, own = self.recipe, own_file(self.recipe.arch or "")
        found = _with_companions(recipe.checkpoint, self.place(recipe.checkpoint))
        return {**found, **({each.name: each for each in _code_beside(self.place(own))} if own else {})}

    def files(self, order: Order) -> dict[str, Path]:
        """The files and folders that an order names."""
        names = {each.name for each in knobs(type(order)) if each.is_path} - {"preset", "out", "timing_cache"}
        named = [str(getattr(order, name)) for name in names if getattr(order, name) is not None]
        named += [name for name in (str(getattr(order, "target", "")),) if name.endswith(".toml")]
        form = getattr(order, "preset", None)
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


def asked(order: Order, section: str) -> dict[str, Any]:
    """An order as a step is asked for it; what says where a result goes, or what it is held against, is none of it."""
    return {f"{section}.{each.name}": getattr(order, each.name) for each in knobs(type(order)) if each.knob.recorded}


def foreign(run: run_folder.Run, mine: Iterable[Path]) -> dict[str, Path]:
    """Artefacts of a run that no step of a plan left."""
    ours = {file.resolve() for file in mine}
    return {path.name: path for path in run.later_stages() if path.resolve() not in ours}
