"""Speedup of each target's default preset on this CPU: the source of `[measured]` in the target files.

    PYTHONPATH=benchmarks python benchmarks/preset_speed.py [--int8] [--nets NAME ...] [--seconds 30] [-o result.json]

Each network is FP32, one thread, batch size 1, in one interleaved run with several session loads: the manual baseline
on ONNX Runtime, and on each x86-64 runtime the presets `safest`, `default` without an ISA level, and `default` of this
CPU. ``--int8`` adds INT8, calibrated on seeded images, which do not change the speed. Results of other CPUs stay in the
result file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from competing_toolchains.method_networks import METHOD_NETWORKS
from competing_toolchains.method_row import MeasurementOptions, prepare
from manual_baselines import export_and_session

from repaconv.benchmark.interleaved_protocol import Entrant, Protocol, measure, pinned_to_cores
from repaconv.benchmark.machine_fingerprint import fingerprint, machine_key
from repaconv.core import plugins, run_folder
from repaconv.core.files import canonical_json
from repaconv.core.progress import silent
from repaconv.engines.contract import SessionSpec
from repaconv.onnx_export.fp16_and_int8 import to_int8
from repaconv.results import Deployment
from repaconv.rewrites.presets import chosen
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.shared.lower_precision import int8_for
from repaconv.stages.shared.target_lookup import default_rewrites, load_target
from repaconv.stages.tune.candidate_graphs import Candidates

TARGETS = {"x86-64": "", "x86-64-openvino": "onnxruntime-symmetric"}
"""And who writes int8 for it."""
HAND = "by hand, onnxruntime"


def opened(path: Path, runtime: str, sizes: dict[str, int], images: Any, precision: str = "fp32") -> Callable[[], Any]:
    """A graph by its runtime, as `bench` opens it, on these images."""
    spec = SessionSpec(threads=1, sizes=sizes, precision=precision)
    session = plugins.load(plugins.ENGINES, runtime).open(path, spec)
    return partial(session.run, {session.inputs[0].name: images})


def forms_of(
    run: Path, scratch: Path, images: Any, *, int8: bool
) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """Ways to open a run, by what they are called; the default form is left out where it is the safest one."""
    subject = source_model_of(run_folder.Run(run))
    graphs = Candidates(subject, sorted(plugins.registered(plugins.REWRITES)), None, scratch, silent)
    for device in map(load_target, TARGETS):
        called = subject.folded.called
        written = {
            "safest": device.forms["safest"],
            "default": default_rewrites(device, called),  # before the other: where both are one graph, it is this
            "usual": device.form(called),
        }
        start = Deployment(target=device.name, runtime=device.runtime, rewrites=())
        paths = {name: graphs.exact(start.model_copy(update={"rewrites": form})) for name, form in written.items()}
        for path, name in {path: name for name, path in reversed(paths.items())}.items():
            yield f"{name}, {device.runtime}", partial(opened, path, device.runtime, graphs.sizes(1), images)
        how = int8_for(device, TARGETS[device.name])
        newest = how.opset(device.newest)
        for name, form in written.items() if int8 else ():
            fit = [each.name for each in chosen(device.rewrites_for(form, "int8"), newest, "int8").rewrites]
            model = onnx.load(graphs.exact(start.model_copy(update={"rewrites": tuple(fit)})))
            low = scratch / f"{name}.{device.name}.int8.onnx"
            low.write_bytes(to_int8(model, [{model.graph.input[0].name: images}], (), how).SerializeToString())
            yield (
                f"{name}, {device.runtime} int8",
                partial(opened, low, device.runtime, graphs.sizes(1), images, "int8"),
            )


def measured(name: str, seconds: float, *, int8: bool) -> dict[str, Any]:
    """The row of a network."""
    network = next(each for each in METHOD_NETWORKS if each.name == name)
    with tempfile.TemporaryDirectory() as folder, pinned_to_cores(1):
        ready = prepare(network, MeasurementOptions(1, 1, 40, 0, seconds), Path(folder))
        images = np.ascontiguousarray(ready.images[:1])
        ways = dict(forms_of(ready.for_repaconv.run, Path(folder), images, int8=int8))
        ways[HAND] = lambda: partial(export_and_session.runner(ready.for_competitors.graph, 1), images)
        entrants = {way: Entrant(load) for way, load in ways.items()}
        found = measure(entrants, Protocol(40, cores=1, seconds=seconds))
        over_manual_baseline = {way: found.ratio(way, HAND) for way in ways}
        return {
            "net": name,
            "date": datetime.date.today().isoformat(),
            "machine": found.machine,
            "p50_ms": {way: round(float(np.median(each)), 4) for way, each in found.samples_ms.items()},
            "times_hand": {
                way: [round(v, 4) for v in (of.median, of.low, of.high)] for way, of in over_manual_baseline.items()
            },
            "openings": found.session_loads,
        }


def summary_of(rows: list[dict[str, Any]]) -> str:
    """What the default form gains in the geometric mean, over those networks that it changes."""
    lines = [machine_key(rows[-1]["machine"])]
    every = [row["times_hand"] for row in rows]
    for way in dict.fromkeys(way for of in every for way in of):
        name, _, runtime = way.partition(", ")
        ours = f"default, {runtime}"
        gains = [of[ours][0] / of[way][0] for of in every if name in ("safest", "usual") and ours in of and way in of]
        if gains:
            mean, span = exp(sum(map(log, gains)) / len(gains)), f"{min(gains):.2f} to {max(gains):.2f}"
            lines.append(f"{runtime}: the default form {mean:.3f} times the {name} ({span})")
    return "\n".join(lines)


def of_others(path: Path | None, here: str) -> list[dict[str, Any]]:
    """What another processor measured."""
    rows = json.loads(path.read_text())["rows"] if path is not None and path.is_file() else []
    return [row for row in rows if machine_key(row["machine"]) != here]


def main() -> None:
    """Measure, and say what it comes to."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [network.name for network in METHOD_NETWORKS if not network.trained and not network.large]
    options.add_argument(
        "--networks", "--nets", nargs="+", choices=[network.name for network in METHOD_NETWORKS], default=usual
    )
    options.add_argument("--int8", action="store_true", help="both forms in int8, too")
    options.add_argument("--seconds", type=float, default=30, help="for the session loads of a network")
    options.add_argument("-o", "--out", type=Path)
    given = options.parse_args()
    rows, others = [], of_others(given.out, machine_key(fingerprint(())))
    for name in given.networks:
        rows.append(measured(name, given.seconds, int8=given.int8))
        print(name, {way: of[0] for way, of in rows[-1]["times_hand"].items()}, flush=True)
        if given.out:
            given.out.write_text(canonical_json({"rows": [*others, *rows]}))
    print(summary_of(rows))


if __name__ == "__main__":
    main()
