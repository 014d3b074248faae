"""bundle: an ONNX model for a board that has nothing but its own trtexec, with all that proves what comes out there."""

from __future__ import annotations

import gzip
import io
import tarfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv import runs
from repaconv.artefacts import BundleArtefact, ExportArtefact, FoldArtefact, Tolerance
from repaconv.errors import UsageProblem
from repaconv.files import (
    canonical_json,
    payload_of,
    sha256_of,
    sha256_of_bytes,
    write_with,
)
from repaconv.onnxfile import read_graph
from repaconv.orders.knobs import by_name
from repaconv.orders.stages import BundleOrder
from repaconv.progress import Progress, silent
from repaconv.replacing import put, require_ours
from repaconv.steps.common import at_least_one, load_target, made_by, with_files
from repaconv.steps.exports import export_for
from repaconv.steps.inputs import choose_inputs, filled
from repaconv.subjects.given import inputs_of
from repaconv.subjects.subject import Subject, subject_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from repaconv.proof.data import Inputs
    from repaconv.targets import Target

WARMUP_MS, DURATION_S = 1000, 10


def bundle_by(order: BundleOrder, run: str | Path | None = None, *, progress: Progress = silent) -> BundleArtefact:
    """Pack the run's ONNX model with images, the float64 outputs for them, and a script for the board's trtexec.

    Args:
        run: The run's folder, or one of its ONNX models where it has several for this target; the newest when None.
        order: What is asked for.
        progress: See `Progress`.

    Raises:
        Refused: If the checkpoint, the model or an image is gone or changed.
        UsageProblem: If the target is no board with TensorRT, there is no model for it, or a file is there already that
            is somebody else's.
    """
    plan = _plan(order, run)
    calls = _recorded(plan, progress)
    content = _content(plan, calls)
    write_with(plan.path, lambda temporary: _pack(temporary, content, plan.source, plan.exported))
    artefact = _artefact(plan, calls, sha256_of_bytes(content["bundle.json"]))
    put(plan.slot, artefact)
    return with_files(artefact, [plan.source, plan.checkpoint], [plan.path, plan.slot])


bundle = by_name(bundle_by, BundleOrder)


class _Plan(NamedTuple):
    """What an order comes to for a run: nothing of it is refused any more."""

    order: BundleOrder
    asked: tuple[str, ...]
    device: Target
    folded: FoldArtefact
    exported: ExportArtefact
    overridden: tuple[str, ...]
    source: Path
    subject: Subject
    checkpoint: Path
    given: Inputs
    batch: int
    allowed: Tolerance
    name: str
    path: Path
    slot: Path


def _plan(order: BundleOrder, run: str | Path | None) -> _Plan:
    """Everything that may be refused, before anything is written."""
    device = _board(order.target)
    taken, model = runs.run_and_model(Path(run) if run else None)
    subject = subject_of(taken, order.checkpoint)
    folded = subject.folded
    exported, path, variant = export_for(taken, folded, order.target, order.precision, model=model, batch=order.batch)
    overridden = runs.require_sound(taken, folded, (exported, path), unverified=order.unverified)
    source = runs.graph_of(taken, exported)
    if len(subject.inputs) != 1 or len(subject.outputs) != 1 or folded.whole:
        raise UsageProblem(
            f"{taken.folder} takes {len(subject.inputs)} inputs and gives {len(subject.outputs)} outputs; a bundle "
            "holds images and one output of them.",
            hint=f"Take the graph to the board yourself, and build it there with trtexec: {source.name}.",
            code="bundle.outputs",
        )
    slot = taken.bundle_json(variant.full)
    out = Path(order.out) if order.out else taken.engine(variant.full, ".tar.gz")
    require_ours(slot, "bundle", out)
    batch = _batch(order, exported, device)
    checkpoint = subject.source  # one that is gone is told of before its images are
    given = choose_inputs(
        subject,
        inputs=order.inputs,
        images=order.images,
        count=order.count,
        seed=order.seed,
        size=folded.image_size if exported.image_size == "dynamic" else exported.image_size,
        pixels=exported.preprocessing,
    )
    return _Plan(
        order=order,
        asked=(*([str(model)] if model else []), *order.words()),
        device=device,
        folded=folded,
        exported=exported,
        overridden=overridden,
        source=source,
        subject=subject,
        checkpoint=checkpoint,
        given=given,
        batch=batch,
        allowed=_tolerance(subject, order.precision),
        name=variant.full,
        path=out,
        slot=slot,
    )


def _board(target: str) -> Target:
    """The target, if it is a board with TensorRT."""
    device = load_target(target)
    if device.runtime != "tensorrt":
        raise UsageProblem(
            f"{device.name} runs {device.runtime}, a bundle is for boards with TensorRT.",
            hint=f"repaconv build --target {device.name}",
            code="bundle.target",
        )
    return device


def _batch(order: BundleOrder, exported: ExportArtefact, device: Target) -> int:
    """Images a call; the model's, or the target's where that leaves it free."""
    usual = device.bench.batch if exported.batch == "dynamic" else int(exported.batch)
    batch = at_least_one("batch", order.batch, usual)
    if exported.batch not in ("dynamic", batch):
        raise UsageProblem(
            f"the model takes {exported.batch} images a call, asked for was {batch}.",
            hint="Leave --batch out, or export with another.",
            code="bench.shape",
        )
    return batch


def _tolerance(subject: Subject, precision: str) -> Tolerance:
    from repaconv.proof.policy import tolerance

    return tolerance(
        "engine",
        precision=precision,
        logits="logits" in subject.outputs,
        decides=subject.decides,
        usual=subject.folded.tolerances,
    )


class _Recorded(NamedTuple):
    """One call: its images as the board reads them, its float64 outputs, how many of the images count."""

    images: bytes
    expected: NDArray[np.floating]
    shape: tuple[int, ...]
    used: int


def _recorded(plan: _Plan, progress: Progress) -> list[_Recorded]:
    """The float64 training form on the images, call by call; the last call is filled up with images of its own."""
    found = []
    for number, piece in enumerate(plan.given.batches(plan.batch)):
        progress("expected outputs", number, -(-plan.given.shape[0] // plan.batch))
        images = filled(piece.images, plan.batch)
        seen = filled(piece.pixels, plan.batch) if piece.pixels is not None and plan.exported.preprocessing else images
        right = plan.subject.reference.run({plan.subject.inputs[0].name: images})[plan.subject.outputs[0]]
        raw = seen.astype(seen.dtype.newbyteorder("<")).tobytes()
        found.append(_Recorded(raw, right, seen.shape, len(piece.images)))
    return found


def _content(plan: _Plan, calls: list[_Recorded]) -> dict[str, bytes]:
    """The bundle's small files by name; ``bundle.json`` describes all that is in it."""
    content = {
        **{f"input_{n}.bin": piece.images for n, piece in enumerate(calls)},
        **{f"expected_{n}.bin": piece.expected.astype("<f4").tobytes() for n, piece in enumerate(calls)},
        "run.py": files("repaconv.targets").joinpath("board_run.py").read_bytes(),
        "README.txt": _readme(plan.device, plan.order.precision).encode(),
    }
    exported, allowed = plan.exported, plan.allowed
    data = [plan.source.with_name(f"{plan.source.name}.data")] if exported.data else []
    described = {
        "target": plan.device.name,
        "runtime_version": plan.device.runtime_version,
        "precision": plan.order.precision,
        "islands": list(exported.islands),
        "input": inputs_of(read_graph(plan.source))[0].name,
        "output": plan.subject.outputs[0],
        "shape": list(calls[0].shape),
        "dynamic": "dynamic" in (exported.batch, exported.image_size),
        "batches": len(calls),
        "exact": allowed.kind == "exact",
        "rtol": allowed.rtol or 0.0,
        "workspace_mib": plan.order.workspace_mib,
        "warmup_ms": WARMUP_MS,
        "duration_s": DURATION_S,
        "files": _hashes(content, [plan.source, *data]),
    }
    return {**content, "bundle.json": canonical_json(described).encode()}


def _readme(device: Target, precision: str) -> str:
    return (
        f"For {device.name} ({device.about}), TensorRT {device.runtime_version}, {precision}.\n\n"
        "On the board:   tar xzf THIS.tar.gz && python3 run.py\n"
        "On the desk:    repaconv collect result.tar.gz\n\n"
        "run.py builds the engine with the board's own trtexec, runs the recorded images through it, and measures it.\n"
    )


def _hashes(content: dict[str, bytes], graph: list[Path]) -> dict[str, str]:
    found = {name: sha256_of_bytes(value) for name, value in content.items()}
    for path, name in zip(graph, ("model.onnx", f"{graph[0].name}.data"), strict=False):
        found[name] = sha256_of(path)
    return found


def _pack(path: Path, content: dict[str, bytes], source: Path, exported: ExportArtefact) -> None:
    """Equal content is equal bytes: sorted, and without times or owners."""
    graph = [("model.onnx", source)]
    if exported.data is not None:
        graph.append((f"{source.name}.data", source.with_name(f"{source.name}.data")))
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0, compresslevel=1) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for name in sorted(content):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content[name]), 0o755 if name == "run.py" else 0o644
            tar.addfile(info, io.BytesIO(content[name]))
        for name, place in graph:
            info = tarfile.TarInfo(name)
            info.size, info.mode = place.stat().st_size, 0o644
            with place.open("rb") as file:
                tar.addfile(info, file)


def _artefact(plan: _Plan, calls: list[_Recorded], bundle_sha256: str) -> BundleArtefact:
    return BundleArtefact(
        made_by=made_by("torch"),
        verdict="passed",
        unverified=plan.overridden,
        asked=plan.asked,
        variant=plan.name,
        target=plan.device.name,
        runtime_version=plan.device.runtime_version,
        precision=plan.order.precision,
        inputs=plan.given.name,
        images=sum(piece.used for piece in calls),
        batch=plan.batch,
        tolerance=plan.allowed,
        bundle_sha256=bundle_sha256,
        onnx_sha256=plan.exported.payload.sha256,
        payload=payload_of(plan.path, plan.slot.parent),
    )
