"""Engine files: what is known of one, whose it is, and opening it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from repaconv.core import plugins, run_folder
from repaconv.core.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.core.files import read_artefact, stage_of
from repaconv.results import BuildArtefact

if TYPE_CHECKING:
    from repaconv.engines.contract import Engine, Session
    from repaconv.engines.targets import Target

USUAL = "tensorrt"
"""Whose an engine is that nobody else opens: a serialised one may be called anything."""


def takes_networks(device: Target) -> bool:
    """Whether a target's runtime opens a run's modules, where others open graphs."""
    return "networks" in plugins.load(plugins.ENGINES, device.runtime).can


def lowers(device: Target, precision: str) -> bool:
    """Whether the runtime is to compute a float32 model in that precision, and not a graph that is typed so."""
    by_runtime = takes_networks(device) or precision == "tf32"
    by_runtime = by_runtime or (precision == "bf16" and device.typed_by == "runtime")
    return precision != "fp32" and by_runtime


def require_own_precision(path: str | Path, precision: str) -> None:
    """Refuse a precision for one file.

    Raises:
        UsageProblem: If another than the usual one is asked for.
    """
    if precision != "fp32":
        raise UsageProblem(
            f"{path} is a file, whose precision is fixed.",
            hint="--precision selects among the ONNX models of a run folder.",
            code="usage.idle",
        )


def built_as(engine: Path) -> BuildArtefact | None:
    """What the file beside an engine says of it, if there is one.

    Raises:
        Refused: If there is no engine, or it is not the file that was built.
    """
    if not engine.is_file():
        raise Refused(
            f"there is no file {engine}.", hint="Give an engine that `repaconv build` wrote.", code="engine.missing"
        )
    beside = engine.with_suffix(".json")
    if not beside.is_file() or stage_of(beside) != "build":
        return None
    built = read_artefact(beside, BuildArtefact)
    if (beside.parent / built.payload.path).resolve() != engine.resolve():  # of another file of that stem
        return None
    run_folder.Run(engine.parent).payload(built.payload)
    return built


def engine_of(path: Path, built: BuildArtefact | None) -> Engine:
    """The runtime that an engine file is for, by what the file beside it says, else by its name."""
    name = built.runtime.split(" ")[0] if built else _opener(path)
    engine: Engine = plugins.load(plugins.ENGINES, name)
    return engine


def _opener(path: Path) -> str:
    """The engine whose own such files are."""
    for name in plugins.registered(plugins.ENGINES):
        with suppress(EnvironmentProblem):  # a broken plug-in is not this file's fault
            if path.suffix in plugins.load(plugins.ENGINES, name).opens:
                return name
    return USUAL


def open_engine(
    path: Path,
    built: BuildArtefact | None,
    *,
    threads: int,
    sizes: Mapping[str, int] = MappingProxyType({}),
    streams: int = 1,
) -> Session:
    """An engine file ready to run, by the runtime that it is for, in the precision that it was built in.

    Raises:
        EnvironmentProblem: If that runtime, or the device it needs, is not here.
        Refused: If it does not load.
    """
    from repaconv.engines.contract import SessionSpec
    from repaconv.engines.session_loading import load_session

    spec = SessionSpec(
        threads=threads,
        precision=built.precision if built else "fp32",
        sizes=dict(sizes),  # it goes to another process, which a read-only view of a dict cannot
        streams=streams,
        settings=built.settings if built else (),
    )
    return load_session(engine_of(path, built), path, spec)


def version_for(device: Target, engine: Engine) -> str:
    """The runtime's version here, if it is the one that the target has.

    Raises:
        EnvironmentProblem: If it is not here, or another.
    """
    try:
        version = str(engine.version())
    except EnvironmentProblem as problem:
        if device.runtime != "tensorrt":
            raise
        raise EnvironmentProblem(
            f"engines for {device.name} must be built on the device, by its {device.runtime} {device.runtime_version}.",
            hint=f"Make a bundle for the device: repaconv bundle --target {device.name}.",
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
