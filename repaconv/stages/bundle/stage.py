"""`bundle`: pack an ONNX model, its inputs and its expected outputs for a board that has only trtexec."""

from __future__ import annotations

import gzip
import io
import json
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import run_folder
from repaconv.core.errors import UsageProblem
from repaconv.core.file_replacement import replace_artifact, require_replaceable, write_payload
from repaconv.core.files import canonical_json, lock_folder, payload_of, sha256_of, sha256_of_bytes
from repaconv.core.progress import Progress, silent
from repaconv.graph.onnx_files import read_graph
from repaconv.results import BundleArtefact, ExportArtefact, FoldArtefact, Tolerance
from repaconv.sources.source_model import SourceModel
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.bundle.options import BundleOptions
from repaconv.stages.shared.evaluation_images import MAX_IMAGES, evaluation_images
from repaconv.stages.shared.exports_of_run import export_for, exports_of
from repaconv.stages.shared.input_selection import choose_inputs, fill_batch, scores_output
from repaconv.stages.shared.option_dataclasses import by_name
from repaconv.stages.shared.preset_choice import resolve_preset
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.stages.shared.target_lookup import load_target
from repaconv.verification.model_runners import named
from repaconv.verification.onnx_model_loading import inputs_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from repaconv.engines.targets import Target
    from repaconv.verification.input_batches import Inputs


# The file format: a tarball of one folder, in which ``calls.npz`` holds the inputs and the expected outputs

CALLS, DESCRIBED = "calls.npz", "bundle.json"
STORED = {"f": "<f4", "i": "<i8", "u": "<i8", "b": "|b1"}
"""Dtype in which outputs are stored, by NumPy kind."""


class Call(NamedTuple):
    """One inference: inputs as the graph takes them, float64 outputs, and the number of its images that count."""

    inputs: tuple[NDArray[Any], ...]
    outputs: tuple[NDArray[Any], ...]
    used: int


def as_npz(calls: Sequence[Call]) -> bytes:
    """The calls as .npz: ``input_<call>_<number>`` and ``output_<call>_<number>``, little-endian.

    Equal calls give equal bytes.
    """
    import numpy as np

    arrays: dict[str, NDArray[Any]] = {}
    for at, call in enumerate(calls):
        for number, array in enumerate(call.inputs):
            arrays[f"input_{at}_{number}"] = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        for number, array in enumerate(call.outputs):
            arrays[f"output_{at}_{number}"] = np.ascontiguousarray(array, STORED[array.dtype.kind])
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def expected_in(bundle: Path) -> tuple[dict[str, Any], list[tuple[NDArray[np.generic], ...]]]:
    """Read a bundle's description and, for each call, the expected outputs."""
    import numpy as np

    with tarfile.open(bundle, "r:gz") as tar:
        found = {Path(member.name).name: tar.extractfile(member) for member in tar}
        described = json.loads(found[DESCRIBED].read())  # type: ignore[union-attr]
        with np.load(io.BytesIO(found[CALLS].read()), allow_pickle=False) as held:  # type: ignore[union-attr]
            numbers = range(len(described["outputs"]))
            calls = [tuple(held[f"output_{at}_{number}"] for number in numbers) for at in range(described["calls"])]
    return described, calls


def pack(path: Path, folder: str, content: Mapping[str, bytes], graph: Mapping[str, Path]) -> None:
    """Write the tarball.

    Equal content gives equal bytes: entries are sorted and have no times or owners.

    Args:
        path: The file to write.
        folder: The folder in the tarball that contains all files.
        content: Content of the small files, by name.
        graph: Paths of the model's files, by name in the bundle.
    """
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0, compresslevel=1) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for name in sorted(content):
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size, info.mode = len(content[name]), 0o755 if name == "run.py" else 0o644
            tar.addfile(info, io.BytesIO(content[name]))
        for name, place in graph.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size, info.mode = place.stat().st_size, 0o644
            with place.open("rb") as file:
                tar.addfile(info, file)


# The stage

WARMUP_MS, DURATION_S = 1000, 10


def bundle_by(options: BundleOptions, run: str | Path | None = None, *, progress: Progress = silent) -> BundleArtefact:
    """Pack the run's ONNX model with inputs, the float64 outputs for them, and a script for the board's trtexec.

    ``calls.npz`` in the bundle has the inputs and outputs by their names.

    Args:
        run: The run folder, or one of its ONNX models if it has several for this target; the newest run when None.
        options: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        GateFailed: If an earlier check failed and ``allow_unverified`` is false.
        Refused: If the checkpoint, the model or an image is missing or was changed.
        UsageProblem: If the target is no board with TensorRT, there is no model for it, or repaconv did not write the
            file that would be replaced.
    """
    taken, model = run_folder.run_and_model(Path(run) if run else None)
    with lock_folder(taken.folder):
        plan = _plan(options, taken, model)
        calls = _recorded_calls(plan, progress)
        content = _content(plan, calls)
        write_payload(plan.path, lambda temporary: pack(temporary, plan.inside, content, _graph_files(plan)))
        artefact = _artefact(plan, calls, sha256_of_bytes(content[DESCRIBED]))
        replace_artifact(plan.slot, artefact)
    return with_files(artefact, [plan.source, plan.checkpoint], [plan.path, plan.slot])


bundle = by_name(bundle_by, BundleOptions)


class _Plan(NamedTuple):
    """The options resolved for one run: the model, the inputs, and the files to write."""

    options: BundleOptions
    options_given: tuple[str, ...]
    device: Target
    folded: FoldArtefact
    exported: ExportArtefact
    overridden: tuple[str, ...]
    source: Path
    source_model: SourceModel
    checkpoint: Path
    given: Inputs
    batch: int
    allowed: Tolerance
    name: str
    inside: str
    path: Path
    slot: Path


def _plan(options: BundleOptions, taken: run_folder.Run, model: Path | None) -> _Plan:
    """Make every check that comes before the network is run."""
    device = _board(options.target)
    source_model = source_model_of(taken, options.checkpoint)
    folded = source_model.folded
    tuned = resolve_preset(options, folded)
    precision = tuned.options.precision or _only_precision(taken, folded, device)
    exported, path, variant = export_for(
        taken,
        folded,
        options.target,
        precision,
        model=model,
        batch=options.batch,
        form=tuned.preset,
        form_size=tuned.image_size,
    )
    overridden = run_folder.require_passed_checks(taken, folded, (exported, path), unverified=options.allow_unverified)
    source = run_folder.onnx_model_of(taken, exported)
    slot = taken.bundle_json(variant.full)
    out = Path(options.out) if options.out else taken.engine(variant.full, ".tar.gz")
    require_replaceable(slot, "bundle", out)
    batch = _batch(options, exported, device)
    checkpoint = source_model.source  # a missing checkpoint is reported before missing images
    own = _export_images(options, source_model, exported)
    given = own or choose_inputs(
        source_model,
        inputs=options.inputs,
        images=options.images,
        count=options.count,
        seed=options.seed,
        size=folded.image_size if exported.image_size == "dynamic" else exported.image_size,
        pixels=exported.preprocessing,
        batch=batch,
    )
    return _Plan(
        options=options,
        options_given=(*([str(model)] if model else []), *options.words()),
        device=device,
        folded=folded,
        exported=exported,
        overridden=overridden,
        source=source,
        source_model=source_model,
        checkpoint=checkpoint,
        given=given,
        batch=batch,
        allowed=_tolerance(source_model, precision, logits=bool(scores_output(source_model, given))),
        name=variant.full,
        inside=f"{taken.folder.resolve().name}-{variant.full}",
        path=out,
        slot=slot,
    )


def _export_images(options: BundleOptions, source_model: SourceModel, exported: ExportArtefact) -> Inputs | None:
    """The images on which a lossy model was evaluated, if it accepts them; None if it has none or others are given.

    Raises:
        UsageProblem: If they are missing or changed: a lossy model's value ranges do not hold for random images.
    """
    if exported.images is None or options.inputs or options.images:
        return None
    found = evaluation_images(source_model, exported, most=options.count or MAX_IMAGES)
    if isinstance(found, str):
        raise UsageProblem(
            f"{exported.payload.path} cannot be compared on the board: {found}.",
            hint="Give bundle --inputs or --images.",
            code="inputs.gone",
        )
    return None if exported.preprocessing and found.piece(0, 1).pixels is None else found


def _board(target: str) -> Target:
    """The target, if it is a board with TensorRT."""
    device = load_target(target)
    if device.runtime != "tensorrt":
        raise UsageProblem(
            f"{device.name} runs {device.runtime}, but bundles are for boards with TensorRT.",
            hint=f"Build an engine here instead: repaconv build --target {device.name}",
            code="bundle.target",
        )
    return device


def _only_precision(taken: run_folder.Run, folded: FoldArtefact, device: Target) -> str:
    """The precision of the run's only export for the board; FP32 if there are several or none."""
    found = {each.artefact.precision for each in exports_of(taken, folded) if each.artefact.target == device.name}
    return found.pop() if len(found) == 1 else "fp32"


def _batch(options: BundleOptions, exported: ExportArtefact, device: Target) -> int:
    """The batch size: the model's, or the target's if the model's is dynamic."""
    usual = device.bench.batch if exported.batch == "dynamic" else int(exported.batch)
    batch = options.batch or usual
    if exported.batch not in ("dynamic", batch):
        raise UsageProblem(
            f"the model has the fixed batch size {exported.batch}, but {batch} was requested.",
            hint="Leave --batch out, or export with that batch size.",
            code="bench.shape",
        )
    return batch


def _tolerance(source_model: SourceModel, precision: str, *, logits: bool) -> Tolerance:
    from repaconv.verification.tolerances import tolerance

    return tolerance(
        "engine",
        precision=precision,
        logits=logits,
        decides=source_model.decides,
        usual=source_model.folded.tolerances,
        reasons=source_model.folded.tolerance_reasons,
    )


def _recorded_calls(plan: _Plan, progress: Progress) -> list[Call]:
    """Run the float64 training form on the inputs, batch by batch; a last, incomplete batch is filled with its images.

    Raises:
        UsageProblem: If an output is not a tensor of numbers.
    """
    found = []
    ports = inputs_of(read_graph(plan.source))
    whole = plan.given.whole and plan.given.size is None
    for number, piece in enumerate(plan.given.batches(plan.batch)):
        progress("expected outputs", number, -(-plan.given.shape[0] // plan.batch))
        if not whole:
            piece = replace(
                piece,
                given={name: fill_batch(array, plan.batch) for name, array in piece.given.items()},
                pixels=None if piece.pixels is None else fill_batch(piece.pixels, plan.batch),
            )
        feeds = piece.feeds(ports)
        right = plan.source_model.reference.run(named([port.name for port in plan.source_model.inputs], piece.given))
        outputs = tuple(_as_array(name, right[name]) for name in plan.source_model.outputs)
        used = 1 if plan.given.whole else min(plan.batch, plan.given.shape[0] - number * plan.batch)
        found.append(Call(tuple(feeds[port.name] for port in ports), outputs, used))
    return found


def _as_array(name: str, value: Any) -> NDArray[Any]:
    import numpy as np

    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in STORED:
        return np.asarray(value)
    raise UsageProblem(
        f"the output {name} is not a tensor of numbers, so a board cannot return it.",
        hint="Export a graph without this output, and fold that.",
        code="bundle.outputs",
    )


def _content(plan: _Plan, calls: list[Call]) -> dict[str, bytes]:
    """The bundle's small files by name; ``bundle.json`` describes the whole bundle."""
    content = {
        CALLS: as_npz(calls),
        "run.py": files("repaconv.engines.targets").joinpath("board_run.py").read_bytes(),
        "README.txt": _readme(plan).encode(),
    }
    allowed, first = plan.allowed, calls[0]
    ports = inputs_of(read_graph(plan.source))
    described = {
        "target": plan.device.name,
        "runtime_version": plan.device.runtime_version,
        "precision": plan.exported.precision,
        "fp32_nodes": list(plan.exported.fp32_nodes),
        "inputs": [
            {"name": port.name, "shape": list(array.shape), "dynamic": not all(isinstance(n, int) for n in port.shape)}
            for port, array in zip(ports, first.inputs, strict=True)
        ],
        "outputs": [
            {"name": name, "real": array.dtype.kind == "f"}
            for name, array in zip(plan.source_model.outputs, first.outputs, strict=True)
        ],
        "calls": len(calls),
        "whole": plan.given.whole,
        "exact": allowed.kind == "exact",
        "rtol": allowed.rtol or 0.0,
        "workspace_mib": plan.options.workspace_mib,
        "warmup_ms": WARMUP_MS,
        "duration_s": DURATION_S,
        "files": {
            **{name: sha256_of_bytes(value) for name, value in content.items()},
            **{name: sha256_of(path) for name, path in _graph_files(plan).items()},
        },
    }
    return {**content, DESCRIBED: canonical_json(described).encode()}


def _graph_files(plan: _Plan) -> dict[str, Path]:
    """The graph's files, by their names in the bundle."""
    data = f"{plan.source.name}.data"
    return {"model.onnx": plan.source, **({data: plan.source.with_name(data)} if plan.exported.data else {})}


def _readme(plan: _Plan) -> str:
    device = plan.device
    return (
        f"For {device.name} ({device.about}), TensorRT {device.runtime_version}, {plan.exported.precision}.\n\n"
        f"On the board:   tar xzf THIS.tar.gz && python3 {shlex.quote(f'{plan.inside}/run.py')} -o result.tar.gz\n"
        "On the desk:    repaconv collect result.tar.gz\n\n"
        "run.py builds the engine with the board's own trtexec, runs the recorded calls through it, and measures it.\n"
    )


def _artefact(plan: _Plan, calls: list[Call], bundle_sha256: str) -> BundleArtefact:
    return BundleArtefact(
        made_by=made_by("torch"),
        verdict="passed",
        unverified=plan.overridden,
        options=plan.options_given,
        variant=plan.name,
        target=plan.device.name,
        runtime_version=plan.device.runtime_version,
        precision=plan.exported.precision,
        inputs=plan.given.name,
        images=sum(piece.used for piece in calls),
        batch=plan.batch,
        tolerance=plan.allowed,
        inside=plan.inside,
        bundle_sha256=bundle_sha256,
        onnx_sha256=plan.exported.payload.sha256,
        payload=payload_of(plan.path, plan.slot.parent),
    )
