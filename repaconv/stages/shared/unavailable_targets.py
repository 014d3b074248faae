"""Targets that are not this machine: why, and the commands that measure or estimate a run there."""

from __future__ import annotations

import platform
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from repaconv.core import plugins, run_folder
from repaconv.core.errors import EnvironmentProblem, RepaconvError
from repaconv.core.export_variants import Variant
from repaconv.engines.nvidia_gpu import require_gpu
from repaconv.stages.bench.options import BenchOptions, EstimateOptions
from repaconv.stages.shared.engine_files import runtime_lowers, takes_networks, version_for
from repaconv.stages.shared.exports_of_run import exports_of
from repaconv.stages.shared.target_lookup import load_target

if TYPE_CHECKING:
    from repaconv.engines.contract import Engine
    from repaconv.engines.targets import Target
    from repaconv.results import BuildArtefact, ExportArtefact


def why_not_here(device: Target) -> str:
    """Why a target is not this machine; empty if it is, or if only a package is missing."""
    engine: Engine = plugins.load(plugins.ENGINES, device.runtime)
    if device.architecture not in ("", platform.machine()):
        return f"its CPU is an {device.architecture}, and that of this machine an {platform.machine()}"
    try:
        if "elsewhere" in engine.can:  # it may be installed without a GPU, to build engines
            require_gpu(engine.name)
        engine.version()
    except EnvironmentProblem as problem:
        away = device.compute_capability or problem.code == "gpu.missing"
        return problem.message.rstrip(".") if away else ""
    return ""


def builds_on_target(device: Target) -> bool:
    """Whether the engine is built on the target, from a bundle."""
    try:
        version_for(device, plugins.load(plugins.ENGINES, device.runtime))
    except RepaconvError:
        return device.runtime == "tensorrt"
    return False


def target_of(done: ExportArtefact | BuildArtefact) -> tuple[str, Target]:
    """The target of a result: as the user gave it, which may be the path of a file, and as an object."""
    words = done.options
    given = words[words.index("--target") + 1] if "--target" in words[:-1] else done.target
    return given, load_target(given)


def measuring_command(exported: ExportArtefact, run: Path | None) -> str:
    """Arguments of the `repaconv` command that measures an export, or of the first of several commands.

    Args:
        exported: The export.
        run: Its run folder; None if it is the newest, which is the default.
    """
    given, device = target_of(exported)
    words = [*([str(run)] if run else []), "--target", given]
    words += [] if exported.precision == "fp32" else ["--precision", exported.precision]
    if not why_not_here(device):
        return shlex.join(["bench", *words])
    if device.runtime == "tensorrt":
        return shlex.join(["bundle", *words])
    if "elsewhere" in plugins.load(plugins.ENGINES, device.runtime).can:
        return shlex.join(["build", *words])
    return shlex.join(["bench", *words, "--estimate"])


def require_here(device: Target, options: BenchOptions, model: str | Path | None, run: run_folder.Run | None) -> None:
    """Refuse to measure a target that is not this machine.

    Args:
        device: The target.
        options: The options; the commands repeat target and precision.
        model: The model as the user gave it.
        run: Its run; None for a bare graph.

    Raises:
        EnvironmentProblem: If the target is another machine; the hint lists the commands to use.
    """
    if not (why := why_not_here(device)):
        return
    exported = _exported(device, options, run) if run else None
    lines = remote_commands(device, options, model, exported=exported, home=run.folder if run else Path())
    raise EnvironmentProblem(
        f"{device.name} is not this machine ({why}), so its latency must be measured there or estimated.",
        hint="\n  ".join(["Use one of these:", *lines]),
        code="bench.elsewhere",
    )


def remote_commands(
    device: Target,
    options: BenchOptions,
    model: str | Path | None = None,
    *,
    exported: bool | None = True,
    home: Path = Path("RUN"),
) -> list[str]:
    """Commands that measure or estimate a run on its target, each with its purpose.

    Args:
        device: The target.
        options: The options; the commands repeat target and precision.
        model: The run as the user gave it; None for the newest.
        exported: Whether the run has an export for the target; None for a bare graph, which belongs to no run.
        home: The run folder, for the paths of engines.
    """
    of = f" {shlex.quote(str(model))}" if model else ""
    asked = EstimateOptions(target=options.target, precision=options.precision).words()
    words = f"{of} {shlex.join(asked)}"
    bench = f"repaconv bench{words}"
    networks, of_run = takes_networks(device), exported is not None
    text = "what is estimated" if networks else "first of all"
    graph = EstimateOptions(target=options.target, precision=_graph_precision(device, options)).words()
    export = [] if exported is not False else [(f"repaconv export{of} {shlex.join(graph)}", text)]
    if of_run and device.runtime == "tensorrt":
        there = [
            (f"repaconv bundle{words}", "copy it to the device,"),
            (f"repaconv collect result.tar.gz{of}", "and compare what comes back"),
            (f"{bench} --host user@board", "by ssh"),
        ]
    elif of_run and "elsewhere" in plugins.load(plugins.ENGINES, device.runtime).can:
        name = Variant(target=device.name, precision=options.precision).full
        engine = shlex.quote(str(home / run_folder.BUILD / f"{name}.engine"))
        there = [(f"repaconv build{words}", "here,"), (f"repaconv bench {engine}", "and on that machine")]
    else:
        there = [(bench, "on that machine itself")]
    if of_run and not networks and there[-1][0].startswith(bench):
        there.append((f"{bench} --scheduler tcp://HOST:8786", "by a cluster"))
    measured = [*there, *export] if networks else [*export, *there]  # modules are measured without an export
    found = [*measured, (f"{bench} --estimate", "estimated, not measured")]
    width = max(len(line) for line, _ in found)
    return [f"{line:{width}}  # {text}" for line, text in found]


def _exported(device: Target, options: BenchOptions, run: run_folder.Run) -> bool:
    """Whether the run has an export for that target in that precision."""
    every = [each.artefact for each in exports_of(run, run_folder.fold_of(run))]
    return (device.name, _graph_precision(device, options)) in {(each.target, each.precision) for each in every}


def _graph_precision(device: Target, options: BenchOptions) -> str:
    return "fp32" if runtime_lowers(device, options.precision) else options.precision
