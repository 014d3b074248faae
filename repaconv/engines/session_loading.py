"""Load a model with its runtime, after a trial in a separate process if it was never loaded on this machine."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from repaconv.core import plugins
from repaconv.core.errors import EnvironmentProblem
from repaconv.core.files import cache_folder, sha256_of, sha256_of_bytes
from repaconv.deprecation import Deprecation
from repaconv.engines import crash_guard
from repaconv.engines.contract import Deployable, Engine, Network, Session, SessionSpec

CPU = ("vendor_id", "model name", "flags", "CPU part", "Features")
"""Prefixes of the /proc/cpuinfo lines that identify the CPU for which a runtime compiles."""


def load_session(engine: Engine, deployable: Deployable | Network, spec: SessionSpec) -> Session:
    """Load a model as `Engine.open` does; a crash of the runtime does not end this process.

    A model that was loaded once on this CPU with the same runtime version and settings is not tried again; its key
    is in the user's cache. Lean sessions are not tried either: a verification loads dozens of graphs that differ
    only in their weights or types.

    Raises:
        EnvironmentProblem: If the runtime crashes, or if it, the device or the precision is not available.
        Refused: If the runtime rejects the model.
    """
    if isinstance(deployable, Path | bytes) and not spec.lean:
        require_survived(engine, deployable, spec)
    session: Session = engine.open(deployable, spec)  # type: ignore[arg-type]  # only some engines load networks
    for former, today in {"clocked": "gpu_timed_call", "fallen": "nodes_on_cpu"}.items():
        if hasattr(session, former) and not hasattr(session, today):  # of a plug-in
            Deprecation(f"{former} of the sessions of {engine.name}", today, removed_in="0.3.0").warn()
            setattr(session, today, getattr(session, former))
    return session


def require_survived(engine: Engine, deployable: Deployable, spec: SessionSpec) -> None:
    """Load a model in a separate process, unless it is known to load here.

    Raises:
        EnvironmentProblem: If that process crashes.
    """
    if engine.name not in plugins.registered(plugins.ENGINES):
        return  # the other process could not find the engine
    if isinstance(deployable, Path) and not deployable.is_file():
        return  # the engine refuses it
    version = str(engine.version())
    key, records = _key(engine.name, version, deployable, spec), _records(engine.name, version)
    if key in _loaded(records):
        return
    try:
        crash_guard.attempt(_open, engine.name, deployable, spec)
    except crash_guard.NativeCrash as crash:
        raise _crashed(f"{engine.name} {version}", deployable, crash) from crash
    _loaded(records).add(key)
    with suppress(OSError):  # then it is tried again next time
        records.parent.mkdir(parents=True, exist_ok=True)
        with records.open("a", encoding="utf-8") as file:
            file.write(f"{key}\n")


def _open(name: str, deployable: Deployable, spec: SessionSpec) -> None:
    """Load a model; runs in the separate process."""
    plugins.load(plugins.ENGINES, name).open(deployable, spec)


def _key(name: str, version: str, deployable: Deployable, spec: SessionSpec) -> str:
    """Hash everything that decides whether a model loads. External weights do not: the structure is in the graph."""
    content = sha256_of_bytes(deployable) if isinstance(deployable, bytes) else sha256_of(deployable)
    parts = [name, version, _cpu(), content, str(replace(spec, weights=None)), _own_version()]
    parts += [f"{variable}={value}" for variable, value in sorted(os.environ.items()) if variable.startswith("ONEDNN_")]
    return sha256_of_bytes("\n".join(parts).encode())


def _records(name: str, version: str) -> Path:
    return cache_folder("loaded") / f"{name}-{version}"


@cache
def _loaded(records: Path) -> set[str]:
    with suppress(OSError, ValueError):
        return set(records.read_text("utf-8").split())
    return set()


@cache
def _cpu() -> str:
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text("utf-8").partition("\n\n")[0].splitlines()
        return hashlib.sha256("\n".join(line for line in first if line.startswith(CPU)).encode()).hexdigest()
    return ""


@cache
def _own_version() -> str:
    with suppress(Exception):  # not installed
        return version_of("repaconv")
    return ""


def _crashed(runtime: str, deployable: Any, crash: crash_guard.NativeCrash) -> EnvironmentProblem:
    where = str(deployable) if isinstance(deployable, Path) else "the model"
    if crash.out_of_memory:
        return EnvironmentProblem(
            f"the system killed {runtime} while it loaded {where} ({crash.ending}): "
            "there is probably not enough memory.",
            hint="Free memory, or run it on a machine with more.",
            code="environment.memory",
        )
    return EnvironmentProblem(
        f"{runtime} crashes when it loads {where} ({crash.ending}).",
        hint="It was tried in a separate process. Choose another --target, export the run in another --preset, e.g. "
        "official, or install another version of the runtime.",
        code="runtime.crash",
    )
