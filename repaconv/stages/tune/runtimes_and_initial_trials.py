"""What a search starts from: the available runtimes, the workload, and a trial per runtime and precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import plugins
from repaconv.core.errors import RepaconvError, UsageProblem, did_you_mean
from repaconv.core.thread_pool import usable_cpus
from repaconv.engines.tunable_session_settings import Tunable
from repaconv.results import Deployment
from repaconv.stages.bench.options import LATENCY
from repaconv.stages.shared.engine_files import takes_networks
from repaconv.stages.shared.target_lookup import load_target
from repaconv.stages.tune.options import TuneOptions

if TYPE_CHECKING:
    from repaconv.engines.contract import Engine
    from repaconv.engines.targets import Target


AUTO = "auto"
BATCHES = (4, 16)
"""Factors of the batch size that throughput tries as well: a batch reads the weights once."""


class MachineRuntimes(NamedTuple):
    """The runtimes to try.

    Attributes:
        devices: A target per runtime, the user's own first.
        versions: Versions, by runtime.
        left_out: Runtimes that are not available, each with the reason.
    """

    devices: tuple[Target, ...]
    versions: dict[str, str]
    left_out: tuple[str, ...]


class Workload(NamedTuple):
    """How the network is run.

    Attributes:
        objective: latency or throughput.
        threads: Number of threads in total.
        batch: Batch size.
        free: Whether other batch sizes may be tried.
    """

    objective: str
    threads: int
    batch: int
    free: bool


def available_runtimes(options: TuneOptions, device: Target, *, here: bool) -> MachineRuntimes:
    """Return the requested runtimes that are available; on a cluster only the target's own runtime.

    Raises:
        EnvironmentProblem: If the target's own runtime is not installed here.
        UsageProblem: If a runtime is unknown for the target, or see `_require_on_cluster`.
    """
    own: Engine = plugins.load(plugins.ENGINES, device.runtime)
    others = {other.runtime: other for other in map(load_target, device.other_runtimes)}
    asked = _requested_runtimes(options, others) - {device.runtime}
    if unknown := sorted(asked - set(others)):
        raise UsageProblem(
            f"{device.name} cannot use the runtime {', '.join(unknown)}.",
            hint=f"{did_you_mean(unknown[0], [device.runtime, *others])}It can use "
            f"{', '.join([device.runtime, *others])}.",
            code="tune.runtimes",
        )
    if not here:
        _require_on_cluster(options, device, asked)
        return MachineRuntimes((device,), {own.name: device.runtime_version}, ())
    devices, versions, left = [device], {own.name: own.version()}, []
    for name, other in others.items():
        try:
            if name in asked:
                versions[name] = plugins.load(plugins.ENGINES, name).version()
                devices.append(other)
        except RepaconvError as problem:
            left.append(f"{name}: {problem.message} {problem.hint}")
    return MachineRuntimes(tuple(devices), versions, tuple(left))


def _require_on_cluster(options: TuneOptions, device: Target, asked: set[str]) -> None:
    """Refuse what workers do not measure: they run ONNX models, one inference at a time, by the target's own runtime.

    Raises:
        UsageProblem: If other runtimes, PyTorch modules or throughput are asked for.
    """
    if options.runtimes and asked and AUTO not in options.runtimes:
        raise UsageProblem(
            f"on a cluster only the target's own runtime, {device.runtime}, can be measured.",
            hint="Leave --runtimes out.",
            code="tune.runtimes",
        )
    if takes_networks(device):
        raise UsageProblem(
            f"{device.name} runs PyTorch modules in memory, which are not sent to workers.",
            hint="Tune on that machine itself, or give a target that runs ONNX models.",
            code="remote.no-graph",
        )
    if options.objective != LATENCY:
        raise UsageProblem(
            f"workers measure the latency of one inference at a time, and no {options.objective}.",
            hint="Leave --objective out, or tune on that machine itself.",
            code="tune.objective",
        )


def _requested_runtimes(options: TuneOptions, others: Mapping[str, Target]) -> set[str]:
    """Return the requested runtimes. By default, all that run graphs: compiling PyTorch modules takes minutes and
    was never the fastest.
    """
    named = set(options.runtimes or (AUTO,))
    graphs = {name for name, other in others.items() if not takes_networks(other)}
    return (named - {AUTO}) | (graphs if AUTO in named else set())


def threads_of(options: TuneOptions, device: Target) -> int:
    """Threads per inference; for throughput, all CPUs of this process."""
    if options.threads is not None or options.objective == LATENCY:
        return options.threads or device.bench.threads
    return usable_cpus()


def initial_trials(
    machine: MachineRuntimes, called: Workload, *, lossy: bool, here: bool
) -> Iterator[tuple[Deployment, list[Any]]]:
    """Every runtime in every precision, with the other settings to try; the baseline first."""
    for device in machine.devices:
        engine: Engine = plugins.load(plugins.ENGINES, device.runtime)
        for precision in ("fp32", *(name for name in device.precisions if lossy and name not in ("fp32", "tf32"))):
            start = Deployment(
                target=device.name,
                runtime=device.runtime,
                rewrites=(),
                precision=precision,
                threads=called.threads,
                batch=called.batch,
            )
            settings = engine.tries(precision) if here and isinstance(engine, Tunable) else ()
            tries = [{"settings": each} for each in settings] + _concurrency_settings(called, "streams" in engine.can)
            yield start, tries
            for quantizer in device.quantizers if precision == "int8" else ():
                yield start.model_copy(update={"quantizer": quantizer}), tries


def _concurrency_settings(called: Workload, streams: bool) -> list[dict[str, int]]:
    """Other ways to use all cores for throughput: one stream per core, larger batches."""
    if called.objective == LATENCY:
        return []
    each = [{"streams": called.threads, "threads": 1}] if streams and called.threads > 1 else []
    batches = [size * called.batch for size in BATCHES] if called.free else []
    return [*each, *({"batch": size} for size in batches)]
