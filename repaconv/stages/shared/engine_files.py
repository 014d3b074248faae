"""Engine files: the result of their build, the runtime that opens them, and opening them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from repaconv.core import plugins, run_folder
from repaconv.core.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.core.export_variants import DEFAULT_PRECISION
from repaconv.core.files import CHECKPOINT_SUFFIXES, read_artefact, require_file, stage_of
from repaconv.results import BuildArtefact

if TYPE_CHECKING:
    from repaconv.engines.contract import Engine, Session
    from repaconv.engines.targets import Target

DEFAULT_RUNTIME = "tensorrt"
"""Runtime of an engine file with an unknown suffix: TensorRT engines may have any name."""
# NVIDIA documents no more of a TensorRT engine; the next bytes of a TensorRT-RTX engine are read as version 1.7 writes
# them.
ENGINES = {b"ftrt": "TensorRT engine", b"vtrt": "TensorRT-RTX engine"}
"""The first bytes of serialized engines."""
HEAD_BYTES = 512
"""Bytes at the beginning of a file that show what it is."""


def takes_networks(device: Target) -> bool:
    """Whether a target's runtime opens PyTorch modules instead of graphs."""
    return "networks" in plugins.load(plugins.ENGINES, device.runtime).can


def runtime_lowers(device: Target, precision: str) -> bool:
    """Whether the runtime itself computes a float32 model in that precision, without a graph typed so."""
    by_runtime = takes_networks(device) or precision == "tf32"
    by_runtime = by_runtime or (precision == "bf16" and device.typed_by == "runtime")
    return precision != "fp32" and by_runtime


def require_own_precision(path: str | Path, precision: str) -> None:
    """Refuse `--precision` for a single file.

    Raises:
        UsageProblem: If the precision is not the default.
    """
    if precision != "fp32":
        raise UsageProblem(
            f"{path} is a file, whose precision is fixed.",
            hint="--precision selects among the ONNX models of a run folder.",
            code="usage.idle",
        )


def build_of(engine: Path) -> BuildArtefact | None:
    """The result of an engine's build, from the JSON file next to it; None if there is none.

    Raises:
        Refused: If the engine does not exist, or is not the file that was built.
    """
    require_file(engine, hint="Give an engine that `repaconv build` wrote.", code="engine.missing")
    record = engine.with_suffix(".json")
    if not record.is_file() or stage_of(record) != "build":
        return None
    built = read_artefact(record, BuildArtefact)
    if (
        record.parent / built.payload.path
    ).resolve() != engine.resolve():  # the result of another file with the same stem
        return None
    run_folder.Run(engine.parent).payload(built.payload)
    return built


def engine_of(path: Path, built: BuildArtefact | None) -> Engine:
    """The runtime of an engine file: from its build's result, else by the file's suffix.

    Raises:
        Refused: ``engine.type`` if it is text, a checkpoint or an archive.
    """
    name = built.runtime.split(" ")[0] if built else _runtime_by_suffix(path)
    engine: Engine = plugins.load(plugins.ENGINES, name)
    return engine


def _runtime_by_suffix(path: Path) -> str:
    """Name of the runtime whose engine files have this suffix."""
    for name in plugins.registered(plugins.ENGINES):
        with suppress(EnvironmentProblem):  # a broken plug-in is not this file's fault
            if path.suffix in plugins.load(plugins.ENGINES, name).opens:
                return name
    _require_binary(path)
    return DEFAULT_RUNTIME


def _require_binary(path: Path) -> None:
    """Refuse what is no engine by its first bytes: text, a pickle, or a zip archive, as .pth and .npz files are."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(tuple(ENGINES)):
        return
    if _is_text(head) or path.suffix in CHECKPOINT_SUFFIXES or head.startswith((b"PK\x03\x04", b"\x80")):
        raise Refused(
            f"{path} is no engine: it {f'begins with {head[:8]!r}' if head else 'is empty'}.",
            hint="Give an engine that `repaconv build` wrote, or an ONNX model.",
            code="engine.type",
        )


def _is_text(head: bytes) -> bool:
    """Whether the first bytes of a file are text; an engine has zeros among them. An empty file counts as text."""
    try:
        head.decode()
    except UnicodeDecodeError as problem:
        return problem.end == len(head) and b"\0" not in head  # a letter that is cut
    return b"\0" not in head


def open_engine(
    path: Path,
    built: BuildArtefact | None,
    *,
    threads: int,
    sizes: Mapping[str, int] = MappingProxyType({}),
    streams: int = 1,
) -> Session:
    """Open an engine file with its runtime, in the precision that it was built in.

    Raises:
        EnvironmentProblem: If the runtime or its device is missing here.
        Refused: If the engine does not load.
    """
    from repaconv.engines.contract import SessionSpec
    from repaconv.engines.session_loading import load_session

    spec = SessionSpec(
        threads=threads,
        precision=built.precision if built else "fp32",
        sizes=dict(sizes),  # it is sent to another process, and a mapping proxy cannot be pickled
        streams=streams,
        settings=built.settings if built else (),
    )
    return load_session(engine_of(path, built), path, spec)


def version_for(device: Target, engine: Engine, precision: str = DEFAULT_PRECISION) -> str:
    """The installed version of a runtime, checked against the target's version.

    Args:
        device: The target.
        engine: Its runtime.
        precision: The precision of the engine to build, for the command in the hint.

    Raises:
        EnvironmentProblem: If the runtime is not installed here, or in another version.
    """
    try:
        version = str(engine.version())
    except EnvironmentProblem as problem:
        if device.runtime != "tensorrt":
            raise
        lower = f" --precision {precision}" if precision != DEFAULT_PRECISION else ""
        raise EnvironmentProblem(
            f"engines for {device.name} must be built on the device, by its {device.runtime} {device.runtime_version}.",
            hint=f"Make a bundle for the device: repaconv bundle --target {device.name}{lower}.",
            code="build.elsewhere",
        ) from problem
    wanted = device.runtime_version.split(".")[:2]
    if wanted != [""] and version.split(".")[: len(wanted)] != wanted:
        raise EnvironmentProblem(
            f"{device.name} has {device.runtime} {device.runtime_version}, but {version} is installed here; "
            "engines of one version do not load in the other.",
            hint="Build on the device, or for another target listed by `repaconv targets`.",
            code="build.version",
        )
    return version
