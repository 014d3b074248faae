"""The rewrite preset of a run's graphs: by name, from a result of `tune`, or the target's default."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from repaconv.core import plugins
from repaconv.core.errors import Refused, RepaconvError, UsageProblem, did_you_mean
from repaconv.core.files import cache_folder, canonical_json, read_artefact, require_no_tilde, sha256_of_bytes
from repaconv.results import Deployment, FoldArtefact, ImageSize, TuneArtefact
from repaconv.rewrites.presets import DEFAULT, FASTEST, NAMED, OFFICIAL
from repaconv.stages.export.options import ExportOptions
from repaconv.stages.shared.engine_files import runtime_lowers, takes_networks
from repaconv.stages.shared.model_opening import open_model
from repaconv.stages.shared.option_dataclasses import AnyOptions
from repaconv.stages.shared.result_provenance import made_by
from repaconv.stages.shared.target_lookup import load_target

if TYPE_CHECKING:
    from repaconv.engines.contract import Network, Session, SessionSpec
    from repaconv.engines.targets import Target
    from repaconv.sources.source_model import SourceModel


# The preset by name, by a cached result of `tune`, or by its file

TUNED = "tuned"
"""Folder of the results of `tune`, in a run and in the cache."""


class GraphPreset(NamedTuple):
    """How a graph is written.

    Attributes:
        name: Name of the rewrite preset.
        rewrites: Its rewrites; None for the default of the export's target.
        fp32_modules: Modules that INT8 keeps in FP32.
        quantizer: The INT8 quantizer; empty for the default.
    """

    name: str
    rewrites: tuple[str, ...] | None
    fp32_modules: tuple[str, ...] = ()
    quantizer: str = ""


def shapes_sha256(shapes: Mapping[str, Any]) -> str:
    """A hash of `FoldArtefact.shapes`."""
    return sha256_of_bytes(canonical_json(dict(shapes)).encode())


def choose_preset(form: str | Path, official: tuple[str, ...], shapes: str) -> GraphPreset:
    """Return the requested preset.

    Args:
        form: One of `NAMED`, or a result file of `tune`.
        official: Rewrites of the official preset.
        shapes: See `shapes_sha256`.

    Raises:
        UsageProblem: If the preset is unknown, or there is no cached result of `tune`.
        Refused: If the file is not a result of `tune`, or belongs to another network.
    """
    if form == DEFAULT:
        return GraphPreset(DEFAULT, None)
    if form == OFFICIAL:
        return GraphPreset(OFFICIAL, official)
    if form == FASTEST:
        return GraphPreset(FASTEST, _cached_for_shapes(shapes).deployment.rewrites)
    found = _read_tuned(Path(form), shapes).deployment
    return GraphPreset(Path(form).name, found.rewrites, found.fp32_modules, found.quantizer)


def tuned_result(form: str | Path | None, folded: FoldArtefact) -> TuneArtefact | None:
    """Return the result of `tune` that a preset names; None for other presets.

    Raises:
        UsageProblem: See `choose_preset`.
        Refused: See `choose_preset`; or if its loss was evaluated with other weights.
    """
    if form in (None, DEFAULT, OFFICIAL):
        return None
    shapes = shapes_sha256(folded.shapes)
    tuned = _cached_for_shapes(shapes) if form == FASTEST else _read_tuned(Path(str(form)), shapes)
    if tuned.model_sha256 not in ("", folded.payload.sha256):
        raise Refused(
            f"{form} is lossy, and its loss was evaluated with other weights.",
            hint="Tune this network: repaconv tune CHECKPOINT --max-disagreement SHARE --images DIR.",
            code="form.weights",
        )
    return tuned


def require_known_preset(form: str | Path, folder: Path = Path()) -> None:
    """Refuse what is neither one of `NAMED` nor a file, by its path relative to a folder.

    Raises:
        UsageProblem: If it is neither.
        Refused: If it begins with ``~``, which no shell replaced.
    """
    if str(form) not in NAMED and not (folder / form).is_file():
        require_no_tilde(Path(form), folder)
        one_rewrite = (
            f"It is one rewrite: repaconv tune --rewrites {form} tries it. "
            if str(form) in plugins.registered(plugins.REWRITES)
            else did_you_mean(str(form), NAMED)
        )
        raise UsageProblem(
            f"{form} is neither a rewrite preset nor a file.",
            hint=f"{one_rewrite}Known presets: {', '.join(NAMED)}; or give a result file of `repaconv tune`.",
            code="form.unknown",
        )


def _read_tuned(path: Path, shapes: str) -> TuneArtefact:
    """Read a result of `tune`, which must belong to a network of these shapes."""
    require_known_preset(path)
    tuned = read_artefact(path, TuneArtefact)
    if tuned.shapes_sha256 != shapes:
        raise Refused(
            f"{path} belongs to a network with other shapes.",
            hint="Tune this network: repaconv tune CHECKPOINT.",
            code="form.shapes",
        )
    return tuned


def preset_for(asked: str | None, source_model: SourceModel, device: Target, quantizer: str | None) -> GraphPreset:
    """Return the requested preset, else the one recorded by the fold; and the INT8 quantizer.

    The quantizer is the one that is asked for, else the preset's if the target supports it.

    Raises:
        UsageProblem: See `choose_preset`.
        Refused: See `choose_preset`.
    """
    folded = source_model.folded
    if asked is None:
        found = GraphPreset(folded.preset, folded.rewrites, folded.fp32_modules, folded.quantizer)
    else:
        found = choose_preset(asked, source_model.official if asked == OFFICIAL else (), shapes_sha256(folded.shapes))
    own = found.quantizer if found.quantizer in device.quantizers else ""
    return found._replace(quantizer=quantizer or own)


def cached_result(path: Path) -> TuneArtefact | None:
    """A cached result of `tune`; None if it is missing, or its version cannot be read any more."""
    try:
        return read_artefact(path, TuneArtefact)
    except Refused:
        return None


def _cached_for_shapes(shapes: str) -> TuneArtefact:
    """The cached result of `tune` for these shapes on this machine, valid for the installed versions.

    Results for one image size of a network that takes others do not count. CPU results with batch 1 and one thread come
    first, then the search with most measurements, then complete searches, then the fastest.
    """
    from repaconv.benchmark.machine_fingerprint import fingerprint, machine_key

    here = machine_key(fingerprint(()))
    every = [cached_result(path) for path in sorted(cache_folder(TUNED).glob(f"{shapes[:16]}-*.json"))]
    found = [tuned for tuned in every if tuned and tuned.shapes_sha256 == shapes and not tuned.model_sha256]
    found = [tuned for tuned in found if tuned.graph_size != "fixed"]
    found = [tuned for tuned in found if machine_key(tuned.machine) == here and _is_up_to_date(tuned)]
    if not found:
        raise UsageProblem(
            "no result of `tune` for this network's shapes was found on this machine.",
            hint="Run `repaconv tune CHECKPOINT` once, or give --preset default.",
            code="form.unknown",
        )
    searched = {id(tuned): sum(row.ratio is not None for row in tuned.candidates) for tuned in found}

    def rank(tuned: TuneArtefact) -> tuple[Any, ...]:
        how = tuned.baseline
        usual = (tuned.target != "x86-64", tuned.objective, how.batch, how.threads)
        return (*usual, -searched[id(tuned)], not tuned.complete, -(tuned.ratio.median if tuned.ratio else 1))

    return min(found, key=rank)


def _is_up_to_date(tuned: TuneArtefact) -> bool:
    """Whether versions of repaconv and of the runtime are the installed ones, and all its rewrites still exist."""
    name = tuned.deployment.runtime
    try:
        same = plugins.load(plugins.ENGINES, name).version() == tuned.runtimes[name]
    except RepaconvError:
        return False
    if set(tuned.deployment.rewrites) - plugins.registered(plugins.REWRITES).keys():
        return False
    return bool(same) and tuned.made_by["repaconv"] == made_by()["repaconv"]


# Options and sessions of a tuned configuration


@dataclass(frozen=True)
class ResolvedOptions(Generic[AnyOptions]):
    """Options after a preset that names a result of `tune` was resolved.

    Attributes:
        options: The options, with the target and precision of the tuned configuration.
        deployment: The tuned configuration; None if there is none.
        preset: The preset of the exports to use; None leaves the choice open.
        image_size: (height, width) for which the preset was tuned, if for one size only.
    """

    options: AnyOptions
    deployment: Deployment | None = None
    preset: str | None = None
    image_size: ImageSize | None = None

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of the runtime."""
        return self.deployment.settings if self.deployment else ()

    def threads(self, device: Target) -> int:
        """Threads per inference; the target's by default."""
        return self.deployment.threads if self.deployment else device.bench.threads

    def session(self, device: Target, precision: str) -> SessionSpec:
        """How a session of the engine is opened."""
        from repaconv.engines.contract import SessionSpec

        return SessionSpec(threads=self.threads(device), precision=precision, settings=self.settings)


def resolve_preset(options: AnyOptions, folded: FoldArtefact) -> ResolvedOptions[AnyOptions]:
    """Resolve the options ``preset``, ``target`` and ``precision`` for a network.

    For the target that was tuned, target and precision become those of the tuned configuration. If another target or
    another lower precision is asked for, they stay, and only the preset is used.
    """
    asked: Any = options
    tuned = tuned_result(asked.preset, folded)
    if tuned is None:
        return ResolvedOptions(options, None, None if asked.preset is None else str(asked.preset))
    preset, best = asked.preset if asked.preset in NAMED else Path(asked.preset).name, tuned.deployment
    size = tuned.image_size if tuned.graph_size == "fixed" else None
    named = load_target(asked.target).name
    if named not in (tuned.target, best.target) or asked.precision not in (None, "fp32", best.precision):
        return ResolvedOptions(options, None, preset, size)
    target = asked.target if named == best.target else best.target  # a file is found by its path alone
    return ResolvedOptions(replace(asked, target=target, precision=best.precision), best, preset, size)


def resolve_export_preset(options: ExportOptions, folded: FoldArtefact) -> ExportOptions:
    """The options of an export, with the target and precision of a tuned preset, and its image size if it is for one.

    Raises:
        UsageProblem: If the configuration runs no graph, or images for its value ranges are missing.
    """
    given = resolve_preset(options, folded)
    if given.image_size and options.image_size is None:
        given = replace(given, options=replace(given.options, image_size=given.image_size))
    if given.deployment is None:
        return given.options
    device = load_target(given.options.target)
    if takes_networks(device):
        raise UsageProblem(
            f"{given.deployment.runtime} runs the run's PyTorch module directly, so there is nothing to export.",
            hint=f"Measure it: repaconv bench --preset {shlex.quote(str(options.preset))}.",
            code="export.nothing",
        )
    typed = "fp32" if runtime_lowers(device, given.deployment.precision) else given.deployment.precision
    if typed in ("fp16", "int8") and not (options.inputs or options.images):
        raise UsageProblem(
            f"{options.preset} uses {typed}, and no images for its value ranges were given.",
            hint="Give the images that it was tuned with: --images DIR, or --inputs FILE.npz.",
            code="form.images",
        )
    return replace(given.options, precision=typed)


def open_deployment(
    deployment: Deployment,
    deployable: Path | Network,
    sizes: Mapping[str, int],
    device: Target | None = None,
    *,
    threads: int | None = None,
) -> Session:
    """Open a configuration with its runtime and settings.

    Args:
        deployment: The configuration.
        deployable: Its graph, or its PyTorch module if the runtime takes modules.
        sizes: Sizes of dynamic dimensions, by name.
        device: Its target, if it has no registered name.
        threads: Threads to use instead of its own, if no time is measured.

    Raises:
        EnvironmentProblem: If the runtime is not installed here, or does not support the precision.
        Refused: If the runtime does not accept the graph.
    """
    return open_model(
        deployable,
        device or load_target(deployment.target),
        deployment.precision,
        threads=threads or deployment.threads,
        dims=sizes,
        streams=deployment.streams if threads is None else 1,
        settings=deployment.settings,
    ).session
