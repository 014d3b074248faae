"""Benchmark subjects: the models that a benchmark measures, e.g. a run's graph and its training-time network."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import run_folder
from repaconv.core.errors import Refused
from repaconv.core.export_variants import Variant
from repaconv.core.file_replacement import replace_artifact, require_replaceable
from repaconv.core.files import CHECKPOINT_SUFFIXES, payload_of, read_artefact, require_file, sha256_of, stage_of
from repaconv.core.progress import Progress
from repaconv.core.sharded_checkpoint import is_index
from repaconv.core.temporary_folders import scratch_folder
from repaconv.graph.onnx_files import metadata_of, read_graph
from repaconv.results import ExportArtefact, FoldArtefact, ImageSize, TrainingArtefact, parse_image_size
from repaconv.sources.source_model import DEPLOY, FOLDED, ORIGINAL, TRAINING, GraphSpec, SourceModel, form_names
from repaconv.sources.source_of_run import source_model_of
from repaconv.sources.verified_onnx_export import write_graph
from repaconv.stages.shared.engine_files import build_of, takes_networks
from repaconv.stages.shared.exports_of_run import Export, export_for
from repaconv.stages.shared.input_selection import fixed_batch
from repaconv.stages.shared.result_provenance import made_by
from repaconv.stages.shared.target_lookup import load_target
from repaconv.verification.onnx_model_loading import inputs_of

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Network
    from repaconv.engines.targets import Target


class BenchmarkSubject(NamedTuple):
    """One model to measure.

    Attributes:
        name: A name that is unique within the benchmark.
        path: Its file.
        network: Its PyTorch module, if the runtime takes modules.
        is_original: Whether it is the run's original network, without which the other is measured alone.
    """

    name: str
    path: Path
    network: Network | None = None
    is_original: bool = False


class BenchmarkSubjects(NamedTuple):
    """All subjects of a benchmark.

    Attributes:
        subjects: The model under test, then its reference.
        overridden: Failed checks that the user chose to ignore.
        size: Image size of the run, or the usual one that a bare graph's metadata gives.
        note: Why something is missing or chosen so, in words.
        source_model: The source model; None for a bare file.
        variant: What distinguishes this export of the run from others; None for a bare file.
        export: The run's export; None for a bare file.
    """

    subjects: list[BenchmarkSubject]
    overridden: tuple[str, ...]
    size: ImageSize | None
    note: str
    source_model: SourceModel | None
    variant: Variant | None = None
    export: Export | None = None

    @property
    def fixed_batch(self) -> int | None:
        """The batch size of the network, or of the model under test, if it takes no other; else None."""
        path = self.subjects[0].path
        return self.batch_of_network or (fixed_batch_of(read_graph(path)) if path.suffix == ".onnx" else None)

    @property
    def batch_of_network(self) -> int | None:
        """The batch size of the network, if it takes no other; else None."""
        return fixed_batch(self.source_model) if self.source_model else None


def fixed_batch_of(graph: onnx.ModelProto) -> int | None:
    """The batch size of a graph of images that takes no other; else None."""
    ports = inputs_of(graph)
    shape = ports[0].shape if len(ports) == 1 else ()
    return shape[0] if len(shape) == 4 and isinstance(shape[0], int) else None


def choose_subjects(
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
    form_size: ImageSize | None = None,
) -> BenchmarkSubjects:
    """Choose the subjects, and collect the failed checks that were overridden for them.

    Of a run it is the export for this target (`repaconv.stages.shared.exports_of_run.export_for`).
    """
    path = None if run else _existing(Path(model or ""))
    other = [_named_reference(_existing(Path(against)), path)] if against else []
    if run is None:
        assert path is not None
        files = [path, *(subject.path for subject in other)]
        overridden = tuple(
            dict.fromkeys(word for file in files for word in _overridden_checks(file, unverified=unverified))
        )
        size = None if image_size else _usual_size(path)
        alone = "" if other else "measured alone: give the model to compare it with, --against FILE, for a speedup"
        usual = f"on images of {size[0]} x {size[1]}, which the graph says are usual" if size else ""
        note = "; ".join(filter(None, [usual, alone]))
        return BenchmarkSubjects([BenchmarkSubject(path.name, path), *other], overridden, size, note, None)
    if takes_networks(device := load_target(target)):
        return _torch_subjects(source_model_of(run), other, device, unverified=unverified)
    source_model = source_model_of(run)
    folded = source_model.folded
    export = export_for(
        run, folded, target, precision, batch=batch, image_size=image_size, form=form, form_size=form_size
    )
    exported = export.artefact
    overridden = run_folder.require_passed_checks(run, folded, (exported, export.path), unverified=unverified)
    after, before = form_names(folded)
    subjects = [BenchmarkSubject(after, run_folder.onnx_model_of(run, exported))]
    size = folded.image_size if exported.image_size == "dynamic" else exported.image_size
    other, note = _references(
        other,
        lambda: BenchmarkSubject(before, training_onnx(source_model, export, progress), is_original=True),
        before,
    )
    note = "; ".join(filter(None, [note, run_folder.failed_of_others(run, folded, exported)]))
    return BenchmarkSubjects([*subjects, *other], overridden, size, note, source_model, export.variant, export)


def _torch_subjects(
    source_model: SourceModel, other: list[BenchmarkSubject], device: Target, *, unverified: bool
) -> BenchmarkSubjects:
    """The run's PyTorch modules, for a runtime that takes modules."""
    run, folded = source_model.run, source_model.folded
    overridden = run_folder.require_passed_checks(run, folded, unverified=unverified)
    first = BenchmarkSubject(DEPLOY, run.payload_of_fold(folded), source_model.network(DEPLOY))
    other, note = _references(
        other,
        lambda: BenchmarkSubject(TRAINING, source_model.source, source_model.network(TRAINING), is_original=True),
        TRAINING,
    )
    variant = Variant(target=device.name)
    return BenchmarkSubjects([first, *other], overridden, folded.image_size, note, source_model, variant)


def _references(
    other: list[BenchmarkSubject], training: Callable[[], BenchmarkSubject], name: str
) -> tuple[list[BenchmarkSubject], str]:
    """Return the requested reference, else the training-time network; or a note why there is none."""
    if other:
        return other, ""
    try:
        return [training()], ""
    except Refused as error:
        return [], without_original(name, error.message)


def without_original(name: str, why: str) -> str:
    """The note of a benchmark that measures the folded network alone."""
    return f"measured without the {name}: {why}"


def training_onnx(source_model: SourceModel, export: Export, progress: Progress) -> Path:
    """The training-time network as an ONNX file, exported with the settings of the run's export.

    Raises:
        Refused: If the checkpoint is gone or changed, or the export is not sound.
        UsageProblem: If a file of that name exists that repaconv did not write.
    """
    run, folded = source_model.run, source_model.folded
    exported, variant = export.artefact, export.variant.training.name
    path = run.training_onnx(variant)
    plain = exported.model_dump(mode="json")
    like = {key: plain[key] for key in ("exporter_opset", "unsupported_ops", "batch", "image_size", "made_by")}
    if _is_up_to_date(path, folded, like):
        return path
    slot = path.with_suffix(".json")
    require_replaceable(slot, "training", path, path.with_name(f"{path.name}.data"))
    data = _write_training(source_model, exported, path, progress)
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
    replace_artifact(slot, made)
    return path


def _is_up_to_date(path: Path, folded: FoldArtefact, like: dict[str, Any]) -> bool:
    """Whether the file exists already, from the same checkpoint and with the same export settings."""
    slot = path.with_suffix(".json")
    if stage_of(slot) != "training" or not path.is_file():
        return False
    known = read_artefact(slot, TrainingArtefact)
    same = (known.source_sha256, known.settings, known.like) == (folded.origin.sha256, folded.settings, like)
    return same and known.verdict == "passed" and sha256_of(path) == known.payload.sha256


def _write_training(source_model: SourceModel, exported: ExportArtefact, path: Path, progress: Progress) -> Path | None:
    """Write the graph; returns the file of its external weights, if it has one."""
    spec = GraphSpec(
        size=source_model.folded.image_size if exported.image_size == "dynamic" else exported.image_size,
        opset=exported.exporter_opset or exported.opset,
        newest=exported.opset,
        unsupported_ops=exported.unsupported_ops,
        batch=None if exported.batch in ("dynamic", source_model.folded.batch) else int(exported.batch),
        dynamic_size=exported.image_size == "dynamic",
    )
    with scratch_folder(source_model.run.folder) as scratch:
        graph = source_model.graph(TRAINING, spec, scratch=scratch, progress=progress)
        if not graph.sound:
            raise Refused(
                "its exported graph gives other outputs than the network itself.",
                hint="Give another model with --against.",
                code="bench.training",
            )
        return write_graph(graph.model, path, graph.data)


def _overridden_checks(path: Path, *, unverified: bool) -> tuple[str, ...]:
    """Failed checks of an engine's build, if they are overridden."""
    built = build_of(path)
    return run_folder.require_passed(built, path.with_suffix(".json"), unverified=unverified) if built else ()


def _named_reference(path: Path, first: Path | None) -> BenchmarkSubject:
    """The reference, under a name that the first model does not have: results are kept by name."""
    taken = {DEPLOY, TRAINING, FOLDED, ORIGINAL, first.name if first else ""}
    names = (path.name, str(path), f"{path} (reference)")
    return BenchmarkSubject(next(name for name in names if name not in taken), path)


def _existing(path: Path) -> Path:
    require_file(path, hint="Give an .onnx file or a run folder.", code="bench.no-model")
    if path.suffix in CHECKPOINT_SUFFIXES or is_index(path):
        raise Refused(
            f"{path} is a checkpoint, and bench measures ONNX models and engines.",
            hint=f"Fold and export it, and give its run: repaconv fold {shlex.quote(str(path))}; repaconv export",
            code="bench.no-model",
        )
    return path


def _usual_size(path: Path) -> ImageSize | None:
    """The usual image size from the metadata of a graph with dynamic height and width; else None."""
    if path.suffix != ".onnx":
        return None
    free = {dim.dim_param for each in read_graph(path).graph.input for dim in each.type.tensor_type.shape.dim}
    with suppress(KeyError, ValueError):
        return parse_image_size(metadata_of(path)["repaconv.image_size"]) if {"height", "width"} <= free else None
    return None
