"""Where a search begins: which runtimes of a machine, in which precisions, how called, and what of them is tried."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import plugins
from repaconv.core.errors import RepaconvError, UsageProblem
from repaconv.engines.session_settings import Tunable
from repaconv.options.stage_options import LATENCY, TuneOrder
from repaconv.results import Deployment
from repaconv.stages.shared.common_checks import load_target
from repaconv.stages.shared.engine_files import takes_networks

if TYPE_CHECKING:
    from repaconv.engines.contract import Engine
    from repaconv.engines.targets import Target

AUTO = "auto"
BATCHES = (4, 16)
"""Images a call that throughput tries besides its own: weights are read once for all of them."""


class Machine(NamedTuple):
    """The runtimes of a device, its target's own first, with their versions; and which were left out, and why."""

    devices: tuple[Target, ...]
    versions: dict[str, str]
    left_out: tuple[str, ...]


class Called(NamedTuple):
    """How a network is called: for what, on how many threads in all, with how many images, and whether those are
    free."""

    objective: str
    threads: int
    batch: int
    free: bool


def machine_of(order: TuneOrder, device: Target, *, here: bool) -> Machine:
    """The runtimes that are asked for and can run here; elsewhere a target's own alone.

    Raises:
        EnvironmentProblem: If the target's own runtime is not here, where it should be.
        UsageProblem: If there is none of a name, or another than its target's is wanted elsewhere.
    """
    own: Engine = plugins.load(plugins.ENGINES, device.runtime)
    beside = {other.runtime: other for other in map(load_target, device.beside)}
    asked = _asked(order, beside) - {device.runtime}
    if unknown := sorted(asked - set(beside)):
        raise UsageProblem(
            f"{device.name} cannot use the runtime {', '.join(unknown)}.",
            hint=f"It can use {', '.join([device.runtime, *beside])}.",
            code="tune.runtimes",
        )
    if not here:
        if order.runtimes and asked and AUTO not in order.runtimes:
            raise UsageProblem(
                f"on a cluster only the target's own runtime, {device.runtime}, can be measured.",
                hint="Leave --runtimes out.",
                code="tune.runtimes",
            )
        return Machine((device,), {own.name: device.runtime_version}, ())
    devices, versions, left = [device], {own.name: own.version()}, []
    for name, other in beside.items():
        try:
            if name in asked:
                versions[name] = plugins.load(plugins.ENGINES, name).version()
                devices.append(other)
        except RepaconvError as problem:
            left.append(f"{name}: {problem.message} {problem.hint}")
    return Machine(tuple(devices), versions, tuple(left))


def _asked(order: TuneOrder, beside: Mapping[str, Target]) -> set[str]:
    """By name; without a name all that run graphs, for what compiles networks takes minutes and was never the
    fastest."""
    named = set(order.runtimes or (AUTO,))
    graphs = {name for name, other in beside.items() if not takes_networks(other)}
    return (named - {AUTO}) | (graphs if AUTO in named else set())


def threads_of(order: TuneOrder, device: Target) -> int:
    """Of one inference; of throughput all that this process may use."""
    if order.threads is not None or order.objective == LATENCY:
        return order.threads or device.bench.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def starts(machine: Machine, called: Called, *, lossy: bool, here: bool) -> Iterator[tuple[Deployment, list[Any]]]:
    """Every runtime in every precision, with what is tried of each; the baseline first."""
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
            tries = [{"settings": each} for each in settings] + _ways(called, "streams" in engine.can)
            yield start, tries
            for quantizer in device.quantizers if precision == "int8" else ():
                yield start.model_copy(update={"quantizer": quantizer}), tries


def _ways(called: Called, streams: bool) -> list[dict[str, int]]:
    """Other ways to keep a machine busy: a stream for every core, more images a call."""
    if called.objective == LATENCY:
        return []
    each = [{"streams": called.threads, "threads": 1}] if streams and called.threads > 1 else []
    batches = [size * called.batch for size in BATCHES] if called.free else []
    return [*each, *({"batch": size} for size in batches)]
