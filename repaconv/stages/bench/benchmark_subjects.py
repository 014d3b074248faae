"""What bench measures beside what: a run's forms, bare graphs, engines, and the images that they take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import run_folder
from repaconv.core.errors import Refused
from repaconv.core.export_names import Variant
from repaconv.core.file_replacement import put, require_ours
from repaconv.core.files import payload_of, read_artefact, sha256_of, stage_of
from repaconv.core.progress import Progress
from repaconv.core.scratch_folders import scratch_folder
from repaconv.graph.onnx_files import read_graph, said_by
from repaconv.results import ExportArtefact, FoldArtefact, ImageSize, TrainingArtefact, parse_image_size
from repaconv.sources.source_model import DEPLOY, TRAINING, GraphSpec, Subject
from repaconv.sources.source_of_run import subject_of
from repaconv.sources.verified_onnx_export import write_graph
from repaconv.stages.shared.common_checks import load_target, made_by
from repaconv.stages.shared.engine_files import built_as, takes_networks
from repaconv.stages.shared.run_exports import Export, export_for

if TYPE_CHECKING:
    from repaconv.engines.contract import Network
    from repaconv.engines.targets import Target


class Contender(NamedTuple):
    """One thing to measure: what it is called, as nothing beside it is, its file, and its module where that runs."""

    name: str
    path: Path
    network: Network | None = None


class Contenders(NamedTuple):
    """All that is known of them; ``variant``, ``export`` and ``subject`` are those of a run.

    ``size`` is the run's, or what a bare graph of ours says is usual.
    """

    subjects: list[Contender]
    overridden: tuple[str, ...]
    size: ImageSize | None
    note: str
    subject: Subject | None
    variant: Variant | None = None
    export: Export | None = None


def contenders_of(
    run: run_folder.Run | None,
    model: str | Path | None,
    against: str | Path | None,
    unverified: bool,
    progress: Progress,
    *,
    target: str | Target,
    precision: str = "fp32",
    batch: int | None = None,
    image_size: ImageSize | None = None,
    form: str | None = None,
) -> Contenders:
    """What is measured beside what, and which failed proofs were overridden on the way there.

    Of a run it is the export for this target (`repaconv.stages.shared.run_exports.export_for`).
    """
    path = None if run else _existing(Path(model or ""))
    other = [_other(_existing(Path(against)), path)] if against else []
    if run is None:
        assert path is not None
        beside = [path, *(subject.path for subject in other)]
        overridden = tuple(dict.fromkeys(word for file in beside for word in _of_engine(file, unverified=unverified)))
        size = None if image_size else _usual_size(path)
        note = f"on images of {size[0]} x {size[1]}, which the graph says are usual" if size else ""
        return Contenders([Contender(path.name, path), *other], overridden, size, note, None)
    if takes_networks(device := load_target(target)):
        return _networks(subject_of(run), other, device, unverified=unverified)
    subject = subject_of(run)
    folded = subject.folded
    export = export_for(run, folded, target, precision, batch=batch, image_size=image_size, form=form)
    exported = export.artefact
    overridden = run_folder.require_sound(run, folded, (exported, export.path), unverified=unverified)
    subjects = [Contender(DEPLOY, run_folder.graph_of(run, exported))]
    size = folded.image_size if exported.image_size == "dynamic" else exported.image_size
    other, note = _beside(other, lambda: Contender(TRAINING, training_onnx(subject, export, progress)))
    return Contenders([*subjects, *other], overridden, size, note, subject, export.variant, export)


def _networks(subject: Subject, other: list[Contender], device: Target, *, unverified: bool) -> Contenders:
    """The run's modules themselves, for a runtime that takes them."""
    run, folded = subject.run, subject.folded
    overridden = run_folder.require_sound(run, folded, unverified=unverified)
    first = Contender(DEPLOY, run.payload_of_fold(folded), subject.network(DEPLOY))
    other, note = _beside(other, lambda: Contender(TRAINING, subject.source, subject.network(TRAINING)))
    variant = Variant(target=device.name)
    return Contenders([first, *other], overridden, folded.image_size, note, subject, variant)


def _beside(other: list[Contender], training: Callable[[], Contender]) -> tuple[list[Contender], str]:
    """What was asked for beside the deploy form, else the training form; or why there is none."""
    if other:
        return other, ""
    try:
        return [training()], ""
    except Refused as error:
        return [], without_training(error.message)


def without_training(why: str) -> str:
    """The note of a bench that has the deploy form alone."""
    return f"measured without the training form: {why}"


def training_onnx(subject: Subject, export: Export, progress: Progress) -> Path:
    """The training form, exported as the deploy form was.

    Raises:
        Refused: If the checkpoint is gone or changed, or the export is not sound.
        UsageProblem: If there is a file of that name that is somebody else's.
    """
    run, folded = subject.run, subject.folded
    exported, variant = export.artefact, export.variant.training.name
    path = run.training_onnx(variant)
    plain = exported.model_dump(mode="json")
    like = {key: plain[key] for key in ("exporter_opset", "unsupported_ops", "batch", "image_size", "made_by")}
    if _is_known(path, folded, like):
        return path
    slot = path.with_suffix(".json")
    require_ours(slot, "training", path, path.with_name(f"{path.name}.data"))
    data = _write_training(subject, exported, path, progress)
    made = TrainingArtefact(
        made_by=made_by("torch", "onnx"),
        verdict="passed",
        variant=variant,
        source_sha256=folded.origin.sha256,
        settings=folded.settings,
        like=like,
        payload=payload_of(path, path.parent),
        data=payload_of(data, path.parent) if data else None,
    )
    put(slot, made)
    return path


def _is_known(path: Path, folded: FoldArtefact, like: dict[str, Any]) -> bool:
    """Whether it is there already, of this checkpoint and alike."""
    slot = path.with_suffix(".json")
    if stage_of(slot) != "training" or not path.is_file():
        return False
    known = read_artefact(slot, TrainingArtefact)
    same = (known.source_sha256, known.settings, known.like) == (folded.origin.sha256, folded.settings, like)
    return same and known.verdict == "passed" and sha256_of(path) == known.payload.sha256


def _write_training(subject: Subject, exported: ExportArtefact, path: Path, progress: Progress) -> Path | None:
    """Write the graph; where its weights have a file of their own, that."""
    spec = GraphSpec(
        size=subject.folded.image_size if exported.image_size == "dynamic" else exported.image_size,
        opset=exported.exporter_opset or exported.opset,
        newest=exported.opset,
        lacks=exported.unsupported_ops,
        batch=None if exported.batch in ("dynamic", subject.folded.batch) else int(exported.batch),
        free_size=exported.image_size == "dynamic",
    )
    with scratch_folder(subject.run.folder) as scratch:
        graph = subject.graph(TRAINING, spec, scratch=scratch, progress=progress)
        if not graph.sound:
            raise Refused(
                "its exported graph gives other outputs than the network itself.",
                hint="Give another model with --against.",
                code="bench.training",
            )
        return write_graph(graph.model, path, graph.data)


def _of_engine(path: Path, *, unverified: bool) -> tuple[str, ...]:
    """What a failed build stops."""
    built = built_as(path)
    return run_folder.require_passed(built, path.with_suffix(".json"), unverified=unverified) if built else ()


def _other(path: Path, first: Path | None) -> Contender:
    """What runs beside the first, under a name of its own: all that is measured is kept by name."""
    taken = {DEPLOY, TRAINING, first.name if first else ""}
    names = (path.name, str(path), f"{path} (reference)")
    return Contender(next(name for name in names if name not in taken), path)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise Refused(f"there is no file {path}.", hint="Give an .onnx file or a run folder.", code="bench.no-model")
    return path


def _usual_size(path: Path) -> ImageSize | None:
    """The images that a graph of ours is meant for, where it takes any; None where it says nothing of them."""
    if path.suffix != ".onnx":
        return None
    free = {dim.dim_param for each in read_graph(path).graph.input for dim in each.type.tensor_type.shape.dim}
    with suppress(KeyError, ValueError):
        return parse_image_size(said_by(path)["repaconv.image_size"]) if {"height", "width"} <= free else None
    return None
