"""The rewrite preset of a run's graphs: by name, by what `tune` found, or the target's default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from repaconv.core import plugins
from repaconv.core.errors import Refused, RepaconvError, UsageProblem
from repaconv.core.files import cache_folder, canonical_json, read_artefact, sha256_of_bytes
from repaconv.results import Deployment, FoldArtefact, TuneArtefact
from repaconv.rewrites.presets import DEFAULT, FASTEST, NAMED, OFFICIAL
from repaconv.stages.export.options import ExportOptions
from repaconv.stages.shared.common_checks import load_target, made_by
from repaconv.stages.shared.engine_files import lowers, takes_networks
from repaconv.stages.shared.option_definitions import AnyOptions

if TYPE_CHECKING:
    from repaconv.engines.contract import Network, Session, SessionSpec
    from repaconv.engines.targets import Target
    from repaconv.sources.source_model import Subject


# --- Which form a run's graphs will be written in: by name, by what the tuner found before, or by its file.

TUNED = "tuned"
"""Folder of the tuner's results, in a run and in the cache."""


class Written(NamedTuple):
    """A form's name, its rewrites, the modules that int8 leaves in float32, and who writes int8.

    None leaves rewrites to the target of the export.
    """

    name: str
    rewrites: tuple[str, ...] | None
    keep: tuple[str, ...] = ()
    quantizer: str = ""


def shapes_sha256(shapes: Mapping[str, Any]) -> str:
    """A hash of `FoldArtefact.shapes`."""
    return sha256_of_bytes(canonical_json(dict(shapes)).encode())


def chosen_form(form: str | Path, official: tuple[str, ...], shapes: str) -> Written:
    """The form that was asked for.

    Args:
        form: One of `NAMED`, or the file that `tune` wrote.
        official: Rewrites of the official form.
        shapes: See `shapes_sha256`.

    Raises:
        UsageProblem: If there is no such form, or nothing was tuned.
        Refused: If the file is no result of `tune`, or is of another network.
    """
    if form == DEFAULT:
        return Written(DEFAULT, None)
    if form == OFFICIAL:
        return Written(OFFICIAL, official)
    if form == FASTEST:
        return Written(FASTEST, _known(shapes).deployment.rewrites)
    found = _tuned(Path(form), shapes).deployment
    return Written(Path(form).name, found.rewrites, found.fp32_modules, found.quantizer)


def deployed(form: str | Path | None, folded: FoldArtefact) -> TuneArtefact | None:
    """What `tune` found for a network, where that is the form that is asked for; None of other forms.

    Raises:
        UsageProblem: See `chosen_form`.
        Refused: See `chosen_form`; or if what it loses was judged of other weights.
    """
    if form in (None, DEFAULT, OFFICIAL):
        return None
    shapes = shapes_sha256(folded.shapes)
    tuned = _known(shapes) if form == FASTEST else _tuned(Path(str(form)), shapes)
    if tuned.model_sha256 not in ("", folded.payload.sha256):
        raise Refused(
            f"{form} is lossy, and its loss was evaluated with other weights.",
            hint="Tune this network: repaconv tune CHECKPOINT --max-disagreement SHARE --images DIR.",
            code="form.weights",
        )
    return tuned


def _tuned(path: Path, shapes: str) -> TuneArtefact:
    """What `tune` wrote, of a network of these shapes."""
    if not path.is_file():
        known = ", ".join(NAMED)
        raise UsageProblem(
            f"{path} is neither a rewrite preset nor a file.",
            hint=f"Known presets: {known}; or give a result file of `repaconv tune`.",
            code="form.unknown",
        )
    tuned = read_artefact(path, TuneArtefact)
    if tuned.shapes_sha256 != shapes:
        raise Refused(
            f"{path} belongs to a network with other shapes.",
            hint="Tune this network: repaconv tune CHECKPOINT.",
            code="form.shapes",
        )
    return tuned


def written_for(asked: str | None, subject: Subject, device: Target, quantizer: str | None) -> Written:
    """The form that is asked for here, else the one that was where the network was folded, and who writes int8: who is
    asked for, else who does in that form if that is for such a target.

    Raises:
        UsageProblem: See `chosen_form`.
        Refused: See `chosen_form`.
    """
    folded = subject.folded
    if asked is None:
        found = Written(folded.preset, folded.rewrites, folded.fp32_modules, folded.quantizer)
    else:
        found = chosen_form(asked, subject.official if asked == OFFICIAL else (), shapes_sha256(folded.shapes))
    own = found.quantizer if found.quantizer in device.quantizers else ""
    return found._replace(quantizer=quantizer or own)


def remembered(path: Path) -> TuneArtefact | None:
    """An answer of `tune` in the cache; None if there is none, or of another version that is not read any more."""
    try:
        return read_artefact(path, TuneArtefact)
    except Refused:
        return None


def _known(shapes: str) -> TuneArtefact:
    """What was tuned for these shapes on this machine, by what is installed.

    On the processor, one image, one thread, before all others; then what was searched longest and to the end, then the
    fastest.
    """
    from repaconv.benchmark.machine_fingerprint import fingerprint, machine_key

    here = machine_key(fingerprint(()))
    every = [remembered(path) for path in sorted(cache_folder(TUNED).glob(f"{shapes[:16]}-*.json"))]
    found = [tuned for tuned in every if tuned and tuned.shapes_sha256 == shapes and not tuned.model_sha256]
    found = [tuned for tuned in found if machine_key(tuned.machine) == here and _still_holds(tuned)]
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


def _still_holds(tuned: TuneArtefact) -> bool:
    """Whether it is of this repaconv, of the runtime that is here, and of rewrites that there still are."""
    name = tuned.deployment.runtime
    try:
        same = plugins.load(plugins.ENGINES, name).version() == tuned.runtimes[name]
    except RepaconvError:
        return False
    if set(tuned.deployment.rewrites) - plugins.registered(plugins.REWRITES).keys():
        return False
    return bool(same) and tuned.made_by["repaconv"] == made_by()["repaconv"]


# --- A deployment ready to run, and what an order becomes that is given what `tune` found.


@dataclass(frozen=True)
class Given(Generic[AnyOptions]):
    """An order with the target and the precision of a deployment, and that; None where it brings none.

    ``form`` is what the exports that it takes were written in; None leaves that to what else is known.
    """

    options: AnyOptions
    way: Deployment | None = None
    form: str | None = None

    @property
    def settings(self) -> tuple[str, ...]:
        """Of the runtime."""
        return self.way.settings if self.way else ()

    def threads(self, device: Target) -> int:
        """Of one inference; the target's where nothing else is known."""
        return self.way.threads if self.way else device.bench.threads

    def session(self, device: Target, precision: str) -> SessionSpec:
        """How an engine is opened that was built so."""
        from repaconv.engines.contract import SessionSpec

        return SessionSpec(threads=self.threads(device), precision=precision, settings=self.settings)


def given_form(options: AnyOptions, folded: FoldArtefact) -> Given[AnyOptions]:
    """What an order with ``form``, ``target`` and ``precision`` comes to for a network.

    Of the target that was tuned it becomes the deployment's own target and precision. Where another target or another
    lower precision is asked for, that stands, and the form alone is taken.
    """
    asked: Any = options
    tuned = deployed(asked.preset, folded)
    if tuned is None:
        return Given(options, None, None if asked.preset is None else str(asked.preset))
    form, best = asked.preset if asked.preset in NAMED else Path(asked.preset).name, tuned.deployment
    if asked.target not in (tuned.target, best.target) or asked.precision not in (None, "fp32", best.precision):
        return Given(options, None, form)
    return Given(replace(asked, target=best.target, precision=best.precision), best, form)


def export_given(options: ExportOptions, folded: FoldArtefact) -> ExportOptions:
    """An order whose form may be what `tune` found: with the target and the precision of its graph.

    Raises:
        UsageProblem: If that runs no graph, or its ranges would be of other images than those that it was judged with.
    """
    given = given_form(options, folded)
    if given.way is None:
        return options
    device = load_target(given.options.target)
    if takes_networks(device):
        raise UsageProblem(
            f"{given.way.runtime} runs the run's PyTorch module directly, so there is nothing to export.",
            hint=f"Measure it: repaconv bench --preset {options.preset}.",
            code="export.nothing",
        )
    typed = "fp32" if lowers(device, given.way.precision) else given.way.precision
    if typed in ("fp16", "int8") and not (options.inputs or options.images):
        raise UsageProblem(
            f"{options.preset} uses {typed}, and no images for its value ranges were given.",
            hint="Give the images that it was tuned with: --images DIR, or --inputs FILE.npz.",
            code="form.images",
        )
    return replace(given.options, precision=typed)


def session_of(
    deployment: Deployment, deployable: Path | Network, sizes: Mapping[str, int], *, threads: int | None = None
) -> Session:
    """It, opened by its runtime with its settings.

    Args:
        deployment: What is opened.
        deployable: Its graph, or the network where its runtime takes that.
        sizes: Of free dimensions, by name.
        threads: In place of its own, where no time is measured.

    Raises:
        EnvironmentProblem: If its runtime is not here, or does not compute in that precision.
        Refused: If the runtime does not take the graph.
    """
    from repaconv.engines.contract import SessionSpec
    from repaconv.engines.session_loading import load_session

    engine: Any = plugins.load(plugins.ENGINES, load_target(deployment.target).runtime)
    spec = SessionSpec(
        threads=threads or deployment.threads,
        precision=deployment.precision,
        sizes=sizes,
        streams=deployment.streams if threads is None else 1,
        settings=deployment.settings,
    )
    return load_session(engine, deployable, spec)
