"""bundle: an ONNX model for a board that has nothing but its own trtexec, with all that proves what comes out there."""

from __future__ import annotations

import gzip
import io
import tarfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv import runs
from repaconv.artefacts import BundleArtefact, ExportArtefact, FoldArtefact, Tolerance
from repaconv.errors import UsageProblem
from repaconv.files import (
    canonical_json,
    payload_of,
    read_artefact,
    sha256_of,
    sha256_of_bytes,
    write_with,
)
from repaconv.replacing import put, require_ours
from repaconv.steps.asked import as_typed
from repaconv.steps.chain import net_of
from repaconv.steps.common import Progress, at_least_one, load_target, made_by, silent, with_files
from repaconv.steps.exports import export_for
from repaconv.steps.inputs import choose_inputs, filled

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from repaconv.targets import Target

WARMUP_MS, DURATION_S = 1000, 10


def bundle(
    run: str | Path | None = None,
    *,
    target: str,
    precision: str = "fp32",
    inputs: str | Path | None = None,
    images: str | Path | None = None,
    count: int | None = None,
    seed: int = 0,
    batch: int | None = None,
    workspace_mib: int | None = None,
    checkpoint: str | Path | None = None,
    unverified: bool = False,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> BundleArtefact:
    """Pack the run's ONNX model with images, the float64 outputs for them, and a script for the board's trtexec.

    Args:
        run: The run's folder, or one of its ONNX models where it has several for this target; the newest when None.
        target: A board with TensorRT, whose ONNX model the run must have.
        precision: Of that model.
        inputs: An .npz of images.
        images: A folder of them instead; without either random ones.
        count: How many.
        seed: Of the random ones.
        batch: Images a call; the model's, or the target's where it leaves that free.
        workspace_mib: Scratch memory for kernels, in MiB; TensorRT's own limit when None.
        checkpoint: Where the checkpoint is now, if it has moved.
        unverified: Go on behind a failed verdict, and record it.
        out: The .tar.gz; ``build/<target>.tar.gz`` of the run when None.
        progress: See `Progress`.

    Raises:
        Refused: If the checkpoint, the model or an image is gone or changed.
        UsageProblem: If the target is no board with TensorRT, there is no model for it, or a file is there already that
            is somebody else's.
    """
    device = load_target(target)
    if device.runtime != "tensorrt":
        raise UsageProblem(
            f"{device.name} runs {device.runtime}, a bundle is for boards with TensorRT.",
            hint=f"repaconv build --target {device.name}",
            code="bundle.target",
        )
    taken, model = runs.run_and_model(Path(run) if run else None)
    words = as_typed(
        bundle,
        target=target,
        precision=precision,
        inputs=inputs,
        images=images,
        count=count,
        seed=seed,
        batch=batch,
        workspace_mib=workspace_mib,
        checkpoint=checkpoint,
        unverified=unverified,
    )
    words = (*([str(model)] if model else []), *words)
    folded = read_artefact(taken.fold_json, FoldArtefact)
    exported, path, variant = export_for(taken, folded, target, precision, model=model, batch=batch)
    overridden = runs.require_sound(taken, folded, (exported, path), unverified=unverified)
    source = runs.graph_of(taken, exported)
    slot = taken.bundle_json(variant.full)
    target_path = Path(out) if out else taken.engine(variant.full, ".tar.gz")
    require_ours(slot, "bundle", target_path)
    batch = at_least_one("batch", batch, device.bench.batch if exported.batch == "dynamic" else int(exported.batch))
    if exported.batch not in ("dynamic", batch):
        raise UsageProblem(
            f"the model takes {exported.batch} images a call, asked for was {batch}.",
            hint="Leave --batch out, or export with another.",
            code="bench.shape",
        )
    net = net_of(taken, folded, checkpoint)
    size = folded.image_size if exported.image_size == "dynamic" else exported.image_size
    given = choose_inputs(
        folded,
        net.form.config,
        inputs=inputs,
        images=images,
        count=count,
        seed=seed,
        size=size,
        pixels=exported.preprocessing,
    )
    recorded = _record(net, given, batch, exported, progress)
    content = {
        **{f"input_{n}.bin": piece.images for n, piece in enumerate(recorded)},
        **{f"expected_{n}.bin": piece.expected.astype("<f4").tobytes() for n, piece in enumerate(recorded)},
        "run.py": files("repaconv.targets").joinpath("board_run.py").read_bytes(),
        "README.txt": _readme(device, precision).encode(),
    }
    dynamic = exported.batch == "dynamic" or exported.image_size == "dynamic"
    allowed = _tolerance(folded, net, precision)
    described = {
        "target": device.name,
        "runtime_version": device.runtime_version,
        "precision": precision,
        "islands": list(exported.islands),
        "input": "image" if exported.preprocessing else "input",
        "output": folded.output,
        "shape": list(recorded[0].shape),
        "dynamic": dynamic,
        "batches": len(recorded),
        "exact": allowed.kind == "exact",
        "rtol": allowed.rtol or 0.0,
        "workspace_mib": workspace_mib,
        "warmup_ms": WARMUP_MS,
        "duration_s": DURATION_S,
        "files": _hashes(content, [source, *([source.with_name(f"{source.name}.data")] if exported.data else [])]),
    }
    content["bundle.json"] = canonical_json(described).encode()
    write_with(target_path, lambda temporary: _pack(temporary, content, source, exported))
    artefact = BundleArtefact(
        made_by=made_by("torch"),
        verdict="passed",
        unverified=overridden,
        asked=words,
        variant=variant.full,
        target=device.name,
        runtime_version=device.runtime_version,
        precision=precision,
        inputs=given.name,
        images=sum(piece.used for piece in recorded),
        batch=batch,
        tolerance=allowed,
        bundle_sha256=sha256_of_bytes(content["bundle.json"]),
        onnx_sha256=exported.payload.sha256,
        payload=payload_of(target_path, slot.parent),
    )
    put(slot, artefact)
    return with_files(artefact, [source, net.source], [target_path, slot])


class _Recorded(NamedTuple):
    """One call: its images as the board reads them, its float64 outputs, how many of the images count."""

    images: bytes
    expected: NDArray[np.float64]
    shape: tuple[int, ...]
    used: int


def _record(net: Any, given: Any, batch: int, exported: ExportArtefact, progress: Progress) -> list[_Recorded]:
    """The float64 training form on the images, call by call; the last call is filled up with images of its own."""
    found = []
    for number, piece in enumerate(given.batches(batch)):
        progress("expected outputs", number, -(-given.shape[0] // batch))
        images = filled(piece.images, batch)
        seen = filled(piece.pixels, batch) if exported.preprocessing else images
        raw = seen.astype(seen.dtype.newbyteorder("<")).tobytes()
        found.append(_Recorded(raw, net.training.run(images), seen.shape, len(piece.images)))
    return found


def _tolerance(folded: FoldArtefact, net: Any, precision: str) -> Tolerance:
    from repaconv.proof.policy import tolerance
    from repaconv.proof.runners import decides

    return tolerance(
        "engine",
        precision=precision,
        logits=folded.output == "logits",
        decides=decides(net.fold.module),
        usual=folded.tolerances,
    )


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
