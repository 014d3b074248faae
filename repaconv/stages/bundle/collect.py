"""`collect`: read a board's result of a bundle as data, verify it, and add it to the run."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core import run_folder
from repaconv.core.errors import Refused, first_line
from repaconv.core.file_replacement import replace_artifact, require_replaceable
from repaconv.core.files import (
    lock_folder,
    parse_json,
    read_artefact,
    require_file,
    sha256_of,
    sha256_of_bytes,
    stage_of,
)
from repaconv.core.progress import Progress, silent
from repaconv.results import BundleArtefact, CollectArtefact, LayerTime, Link, Verdict
from repaconv.sources.source_model import reference_name
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.bundle.stage import expected_in
from repaconv.stages.shared.exports_of_run import exports_of
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.stages.shared.task_choice import evaluation_of, size_in

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from repaconv.sources.source_model import SourceModel

MOST_UNPACKED_BYTES = 256 * 2**20
"""Most bytes of an unpacked result, which contains text only."""


def collect(
    result: str | Path,
    run: str | Path | None = None,
    *,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> CollectArtefact:
    """Read the result of a bundle that ran on a board, verify it, and add it to the run.

    Args:
        result: The board's result.tar.gz. It is read as data; nothing of it is unpacked to disk or run.
        run: The run folder; the newest run when None.
        out: File for the result; ``build/<target>.collected.json`` of the run when None.
        progress: A function that is called with each step's name, the units done and their total.

    Returns:
        The result. Its verdict is failed if the engine's outputs differ, or if it computed in another precision.

    Raises:
        Refused: If the board's result is damaged, belongs to another bundle, or was not written by trtexec.
    """
    progress("collect", 0, 0)
    _require_file(Path(result))
    taken = run_folder.find_run(Path(run) if run else None)
    with lock_folder(taken.folder):
        artefact, slot = evaluated_result(Path(result), taken.folder, out)
        replace_artifact(slot, artefact)
    return with_files(artefact, [*map(Path, artefact.input_files)], [slot])


def evaluated_result(result: Path, run: str | Path | None, out: str | Path | None) -> tuple[CollectArtefact, Path]:
    """Read and verify a board's result; return the result, which is not written yet, and its file. See `collect`."""
    found = _with_checked_hashes(_read_result(result))
    reported = _as_json(found, "result.json")
    taken = run_folder.find_run(Path(run) if run else None)
    made, bundle = _bundle_of(taken, str(reported.get("bundle_sha256")))
    target_path = Path(out) if out else taken.collected_json(made.variant)
    require_replaceable(target_path, "collect")
    _require_no_problem(found, reported)
    artefact = _artefact(found, reported, made, bundle, taken, sha256_of(result))
    return with_files(artefact, [result, bundle], []), target_path


def _with_checked_hashes(found: dict[str, bytes]) -> dict[str, bytes]:
    """The files, if their hashes are those that the board recorded."""
    reported = _as_json(found, "result.json")
    if not isinstance(reported, dict) or not isinstance(reported.get("files"), dict):
        raise _damaged("result.json says nothing of its files")
    if not _lists_commands(reported.get("commands")) or not isinstance(reported.get("engine", {}), dict):
        raise _damaged("result.json does not say what the board ran")
    for name, digest in reported["files"].items():
        if name not in found or sha256_of_bytes(found[name]) != digest:
            raise _damaged(f"{name} is gone or not what the board wrote")
    if extra := set(found) - set(reported["files"]) - {"result.json"}:
        raise _damaged(f"nothing vouches for {min(extra)}")
    return found


def _lists_commands(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and isinstance(each.get("step"), str) and isinstance(each.get("command"), list)
        for each in value
    )


def _require_no_problem(found: dict[str, bytes], reported: dict[str, Any]) -> None:
    """Refuse a result that reports a problem, and show the first error in its trtexec log."""
    if not reported.get("problem"):
        return
    step = next((entry["step"] for entry in reversed(reported["commands"])), "build")
    last = [line for line in _log(found, f"{step}.log").splitlines() if "[E]" in line]
    raise Refused(
        f"the board reports: {reported['problem']}. {last[0] if last else ''}".rstrip(),
        hint=f"{step}.log in the result contains the whole output of trtexec.",
        code="collect.problem",
    )


def _artefact(
    found: dict[str, bytes],
    reported: dict[str, Any],
    made: BundleArtefact,
    bundle: Path,
    taken: run_folder.Run,
    sha256: str,
) -> CollectArtefact:
    """The result, read from the files that trtexec wrote."""
    from repaconv.benchmark.latency_statistics import latency
    from repaconv.engines import trtexec_logs
    from repaconv.verification.tolerances import verdict_of

    version = trtexec_logs.version_of(_log(found, "build.log")) or str(reported.get("version"))
    links = _engine_links(found, made, bundle, f"{made.target}, TensorRT {version}", source_model_of(taken))
    samples = trtexec_logs.compute_ms(_as_json(found, "times.json"))
    layers = _as_json(found, "layers.json") if "layers.json" in found else {"Layers": []}
    rows = trtexec_logs.layer_times(_as_json(found, "profile.json")) if "profile.json" in found else []
    types = trtexec_logs.layer_types(layers)
    typed, note = _precision_check(made, types, trtexec_logs.described_layers(layers), taken)
    same = version.split(".")[:2] == made.runtime_version.split(".")[:2]
    return CollectArtefact(
        made_by=made_by(),
        verdict="failed" if typed == "failed" or not same else verdict_of(links),
        unverified=made.unverified,
        variant=made.variant,
        target=made.target,
        runtime=f"tensorrt {version}",
        precision=made.precision,
        batch=made.batch,
        links=links,
        precision_proof=typed,
        layer_types=types,
        fused_attentions=trtexec_logs.fused_attentions(layers),
        latency=latency("engine", "engine.plan", str(reported["engine"].get("sha256", "")), samples),
        printed_median_ms=trtexec_logs.median_ms(_log(found, "times.log")),
        profile=tuple(LayerTime(name=row.name, mean_ms=row.mean_ms) for row in rows),
        machine={name: reported.get(name, {}) for name in ("board", "before", "after")},
        commands=tuple(" ".join(map(str, entry["command"])) for entry in reported["commands"]),
        note=note + ("" if same else f"; the board's TensorRT is not {made.target}'s, {made.runtime_version}"),
        bundle_sha256=made.bundle_sha256,
        result_sha256=sha256,
    )


def _log(found: dict[str, bytes], name: str) -> str:
    return found.get(name, b"").decode("utf-8", "replace")


def _require_file(path: Path) -> None:
    require_file(path, hint="Give the result.tar.gz that the board wrote.", code="collect.missing")


def _read_result(path: Path) -> dict[str, bytes]:
    """Read the files of a result into memory; only regular files with plain names are accepted."""
    _require_file(path)
    found: dict[str, bytes] = {}
    try:
        with gzip.open(path) as packed:
            content = packed.read(MOST_UNPACKED_BYTES + 1)
        if len(content) > MOST_UNPACKED_BYTES:
            raise _damaged(f"it unpacks to more than {MOST_UNPACKED_BYTES >> 20} MiB")
        with tarfile.open(fileobj=BytesIO(content), mode="r:") as tar:
            for member in tar:
                plain = member.isreg() and Path(member.name).name == member.name and not member.name.startswith(".")
                if not plain or member.name in found:
                    raise _damaged(f"it holds {member.name!r}, which no result does")
                file = tar.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
        raise _damaged(first_line(error)) from error
    return found


def _as_json(found: dict[str, bytes], name: str) -> Any:
    if name not in found:
        raise _damaged(f"{name} is not in it")
    try:
        return parse_json(found[name])
    except ValueError as error:
        raise _damaged(f"{name} is not JSON ({error})") from error


def _damaged(why: str) -> Refused:
    return Refused(
        f"this is not the result of a board: {why}.",
        hint="Give result.tar.gz as run.py wrote it. If run.py was interrupted, run it again.",
        code="collect.damaged",
    )


def _bundle_of(taken: run_folder.Run, sha256: str) -> tuple[BundleArtefact, Path]:
    """The bundle of the run that a result belongs to, and its file."""
    for path in sorted((taken.folder / run_folder.BUILD).glob("*.bundle.json")):
        if stage_of(path) != "bundle":
            continue
        made = read_artefact(path, BundleArtefact)
        if made.bundle_sha256 == sha256:
            return made, run_folder.Run(path.parent).payload(made.payload)
    raise Refused(
        f"the result does not belong to any bundle of {taken.folder}.",
        hint="Give the run from which the bundle was made: repaconv collect RESULT RUN.",
        code="collect.other-bundle",
    )


def _engine_links(
    found: dict[str, bytes], made: BundleArtefact, bundle: Path, candidate: str, source_model: SourceModel
) -> tuple[Link, ...]:
    """Compare the engine's outputs with those of the original network in float64, by the tolerance of its precision.

    Of a lossy precision, also in the network's task.
    """
    from repaconv.engines import trtexec_logs
    from repaconv.verification.comparison import Comparison

    described, calls = expected_in(bundle)
    names, shape = [output["name"] for output in described["outputs"]], described["inputs"][0]["shape"]
    evaluation = evaluation_of(source_model, made.precision, size_in(shape))
    compared = Comparison(candidate, made.tolerance, evaluation=evaluation)
    for at, expected in enumerate(calls):
        tensors = trtexec_logs.outputs(_as_json(found, f"output_{at}.json"))
        if lacking := set(names) - tensors.keys():
            raise _damaged(f"output_{at}.json has no {min(lacking)}")
        used = None if described["whole"] else min(made.batch, made.images - at * made.batch)
        right = {name: array[:used] if array.ndim else array for name, array in zip(names, expected, strict=True)}
        got = {name: _shaped_like(tensors[name], array, used) for name, array in zip(names, expected, strict=True)}
        compared.add(got, right, whole=described["whole"])
    return compared.links("engine", reference_name(source_model.folded))


def _shaped_like(found: NDArray[np.float64], expected: NDArray[Any], used: int | None) -> NDArray[Any]:
    """An output that trtexec wrote, in the shape and dtype of the expected one; trtexec writes no shape of a scalar."""
    if used is None and found.size != expected.size:
        return found  # the comparison reports the shapes
    if found.size != expected.size:
        raise _damaged(f"an output is {list(found.shape)}, the network gives {list(expected.shape)}")
    shaped = found.reshape(expected.shape)
    return (shaped if expected.dtype.kind == "f" else shaped.astype(expected.dtype))[:used] if shaped.ndim else shaped


def _precision_check(
    made: BundleArtefact, types: dict[str, int], reported: tuple[int, int], taken: run_folder.Run
) -> tuple[Verdict, str]:
    """Whether the layers compute in the requested precision; if their types are unknown, it is not verified."""
    from repaconv.engines.contract import label

    layers, described = reported
    if not types:
        why = "no layer tells of what it computes" if described else "the layers tell their names alone"
        return "not verified", f"{why} ({layers} layers)"
    other = sum(count for name, count in types.items() if not name.endswith(f".{label(made.precision)}"))
    right = sum(types.values()) - other
    verdict: Verdict = "passed" if right and other <= _allowed_other_layers(made, taken) else "failed"
    return verdict, f"{right} of {right + other} layers that compute are {made.precision}, read from the engine"


def _allowed_other_layers(made: BundleArtefact, taken: run_folder.Run) -> int:
    """Number of layers that the bundled graph keeps in another precision."""
    folded = run_folder.fold_of(taken)
    for exported, _, _ in exports_of(taken, folded):
        if exported.payload.sha256 == made.onnx_sha256:
            return len(exported.unquantized_layers) + len(exported.fp32_nodes)
    raise Refused(
        f"the ONNX model of {made.payload.path} is no longer in {taken.folder}.",
        hint="Export and bundle again, and run that bundle on the board.",
        code="collect.other-bundle",
    )
