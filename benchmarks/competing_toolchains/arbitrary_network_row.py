"""One row of an arbitrary network: every competing tool gets the original graph, repaconv is what `tune` leaves.

FP32 comes first. In lower precision weights are random, so that only speed is measured: repaconv's default presets in
INT8 against the competing quantizers. What takes long and is not timed (graphs, folds, quantized files) is prepared
beforehand.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import repaconv
from competing_toolchains import competitors, repaconv_configurations
from competing_toolchains.arbitrary_networks import Original, module_of, write_graph
from competing_toolchains.competitors import BenchmarkSubject, CompetitorModel, Run
from competing_toolchains.docs_page import KIND
from competing_toolchains.method_row import EXACT, LOWER, MeasurementOptions, OutputCheck, Prepared, interleaved
from competing_toolchains.repaconv_configurations import RepaconvModel, WrittenDeployment
from repaconv.engines.contract import Feeds, Port
from repaconv.results import Deployment
from repaconv.verification.input_batches import random_inputs

IMAGES = 24
"""Half of them are for calibration. On a quarter of them, the outputs of all subjects are compared."""
WITHIN = {"fp32": 1.2, "int8": 1.3}
"""A subject that takes more than this many times as long as the fastest is not measured further."""
Row = dict[str, Any]


def prepare(network: Original, options: MeasurementOptions, work: Path, *, compiled: bool = False) -> Prepared:
    """Write graph, fold and images into the folder; files that exist already are reused.

    The module is built only if it is to be compiled or its graph does not exist yet.
    """
    work.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work / "inductor")
    graph, run, images_file = work / "original.onnx", work / "run", work / "images.npz"
    module = module_of(network, work / "weights.pth") if compiled or not graph.is_file() else None
    if not graph.is_file():
        part = work / "part.onnx"
        write_graph(network, module, part, options.batch)
        part.replace(graph)
    if not (run / "fold.json").is_file():
        repaconv.fold(graph, out=run, force=True)
    images = random_inputs(network.shape, count=IMAGES, seed=0).images
    if not images_file.is_file():
        np.savez(images_file, **{_input_of(graph): images})
    for_repaconv = RepaconvModel(run, images_file, options.batch, options.threads)
    calibration_indices, test_indices = repaconv_configurations.calibration_and_test_indices(for_repaconv)
    calls = np.resize(
        images[calibration_indices], (-(-len(calibration_indices) // options.batch), options.batch, *network.shape)
    )
    possible_files = {graph.with_suffix(suffix) for suffix in (".static.onnx", ".dynamic.onnx", ".nncf.xml")}
    quantized_files = {each for each in possible_files if each.is_file()}
    for_competitors = CompetitorModel(
        module if compiled else None, graph, calls, options.threads, quantized_files, KIND
    )
    return Prepared(for_competitors, for_repaconv, images, None, test_indices)


def _input_of(graph: Path) -> str:
    import onnx

    return str(onnx.load(graph, load_external_data=False).graph.input[0].name)


def _check(ready: Prepared, options: MeasurementOptions, scratch: Path) -> OutputCheck:
    """The output check of `tune`, applied to every subject in FP32."""
    check = repaconv_configurations.output_check(ready.for_repaconv, scratch)
    inputs = check.graphs.source_model.inputs

    def verdict(run: Run) -> str:
        called = SubjectSession(inputs, lambda feeds: {"output": run(next(iter(feeds.values())))})
        return check.verdict(called, options.batch)

    return verdict


class SubjectSession(NamedTuple):
    """A benchmark subject as a session with one output."""

    inputs: tuple[Port, ...]
    run: Callable[[Feeds], dict[str, Any]]


def prepare_exact(network: Original, options: MeasurementOptions, work: Path, *, compiled: bool) -> None:
    """Everything of the FP32 row that is not timed."""
    ready = prepare(network, options, work, compiled=compiled)
    _open_once(competitors.exact(ready.for_competitors) if compiled else iter(()))


def prepare_lower(network: Original, options: MeasurementOptions, work: Path, exact: Row) -> None:
    """Everything of the lower-precision row that is not timed."""
    ready = prepare(network, options, work)
    _open_once(competitors.lower(ready.for_competitors))
    scratch = work / "int8"
    scratch.mkdir(exist_ok=True)
    chosen = {EXACT: Deployment.model_validate(exact["ways"][EXACT])}
    default_presets = repaconv_configurations.default_presets(ready.for_repaconv, scratch)
    chosen |= {
        f"{LOWER}, {configuration}": each
        for configuration, each in default_presets.items()
        if each.precision in ("int8", "bf16")
    }
    written_deployments = repaconv_configurations.written(ready.for_repaconv, scratch, chosen)
    serialized = {
        name: [one.deployment.model_dump(mode="json"), str(one.graph), one.sizes]
        for name, one in written_deployments.items()
    }
    (scratch / "written.json").write_text(json.dumps(serialized))


def _open_once(subjects: Iterator[BenchmarkSubject]) -> None:
    for each in subjects:
        with contextlib.suppress(Exception):  # reported when it is measured
            each.open()


def measured_exact(network: Original, options: MeasurementOptions, work: Path, *, compiled: bool) -> Row:
    """The row in FP32."""
    ready = prepare(network, options, work, compiled=compiled)
    found = repaconv_configurations.tuned(ready.for_repaconv, None, options.budget_s)
    chosen = {EXACT: found.deployment}
    scratch = work / "graphs"
    scratch.mkdir(exist_ok=True)
    subjects = [
        *competitors.exact(ready.for_competitors),
        *repaconv_configurations.subjects(ready.for_repaconv, scratch, chosen),
    ]
    row = _about(network, options, "fp32", chosen)
    row["tune"] = {"seconds": found.seconds, "budget_s": options.budget_s, "complete": found.complete}
    row["tune"]["ratio"] = found.ratio.median if found.ratio else None
    row["tune"]["runtimes"] = repaconv_configurations.best_by_runtime(found)
    return row | interleaved(ready, options, subjects, within=WITHIN["fp32"], check=_check(ready, options, scratch))


def measured_lower(network: Original, options: MeasurementOptions, work: Path) -> Row:
    """The row in lower precision, measured on the prepared files."""
    ready = prepare(network, options, work)
    serialized = json.loads((work / "int8" / "written.json").read_text())
    written_deployments = {
        name: WrittenDeployment(Deployment.model_validate(deployment), Path(graph), sizes)
        for name, (deployment, graph, sizes) in serialized.items()
    }
    competing = [each for each in competitors.exact(ready.for_competitors) if "torch" not in each.name] + [
        *competitors.lower(ready.for_competitors)
    ]
    own = [
        BenchmarkSubject(name, one.opened, one.deployment.precision != "fp32")
        for name, one in written_deployments.items()
    ]
    row = _about(network, options, "int8", {name: one.deployment for name, one in written_deployments.items()})
    return row | interleaved(ready, options, [*competing, *own], within=WITHIN["int8"])


def _about(network: Original, options: MeasurementOptions, kind: str, chosen: dict[str, Deployment]) -> Row:
    row: Row = {"net": network.name, "kind": kind, "trained": network.file is not None, "size": network.shape[1:]}
    row |= {"batch": options.batch, "threads": options.threads, "rounds": options.rounds}
    row["date"] = datetime.date.today().isoformat()
    row["ways"] = {name: deployment.model_dump(mode="json") for name, deployment in chosen.items()}
    return row
