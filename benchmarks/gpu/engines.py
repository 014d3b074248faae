"""Engines for a GPU: built ahead of time, then loaded on that GPU, compared, and timed with the other models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu.plan import BATCHES, OURS, Step
from gpu.steps import link_of, located, runtime_of, timed
from repaconv.core.errors import EnvironmentProblem, RepaconvError


def engine(step: Step, folder: Path) -> dict[str, Any]:
    """An engine built ahead of time; opened, compared and timed where there is a GPU that it is for."""
    import repaconv
    from repaconv.core import run_folder

    target, precision = step.given["target"], step.given["precision"]
    if precision != "fp32":
        _require_its_gpu(target)
    repaconv.export(folder / "run", target=target, precision=precision)
    built = repaconv.build(folder / "run", target=target, precision=precision)
    path = run_folder.find_run(folder / "run").folder / "build" / built.payload.path
    result = {
        "built": built.verdict,
        "types": dict(built.layer_types),
        "sha256": built.payload.sha256,
        "bytes": path.stat().st_size,
        "version": built.runtime,
        "note": built.note,
    }
    try:
        _require_its_gpu(target)
    except EnvironmentProblem as problem:
        return {**result, "not_verified": problem.message}
    return {**result, **_opened(step, path, folder)}


def _require_its_gpu(target: str) -> None:
    """Refuse to open an engine where there is no GPU that it is for; an engine for CPUs needs none.

    Raises:
        EnvironmentProblem: If there is none, or another.
    """
    from repaconv.engines.nvidia_gpu import require_gpu
    from repaconv.stages.shared.target_lookup import load_target

    if not (wanted := load_target(target).compute_capability):
        return
    gpu = require_gpu("TensorRT-RTX")
    if gpu.capability != wanted:
        message = f"the engine is for compute capability {wanted}, the {gpu.name} has {gpu.capability}"
        raise EnvironmentProblem(f"{message}.", code="gpu.other")


def _opened(step: Step, path: Path, folder: Path) -> dict[str, Any]:
    """The link ``engine``, the layer types that the engine lists, and its times in rounds with the other models."""
    from gpu.models import decides, truth
    from repaconv.benchmark.machine_fingerprint import fingerprint
    from repaconv.stages.shared.engine_files import build_of, open_engine
    from repaconv.verification.model_runners import ImageSession

    precision = step.given["precision"]
    ours = ImageSession(open_engine(path, build_of(path), threads=1))
    images, right, undecided = truth(folder)
    link = link_of(OURS, ours, images, right, undecided, 1, precision, decides(folder))
    link = located(link, step, folder, images[:1])
    others = dict(_other_models(step, folder, images.shape[1:]))
    sessions = {OURS: ours} | {name: each for name, each in others.items() if isinstance(each, ImageSession)}
    return {
        "links": {OURS: link.model_dump(mode="json")},
        "engine_types": json.loads(ours.options.get("types", "{}")),
        "batches": list(_batches(sessions, images)),
        "without": {name: why for name, why in others.items() if isinstance(why, str)},
        "machine": fingerprint((), gpu=ours.on_gpu),
    }


def _other_models(step: Step, folder: Path, shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """The official form and the vanilla network as engines of the same batches, or why there is none."""
    from gpu.models import manual_baseline
    from repaconv.engines.contract import BuildSpec, SessionSpec
    from repaconv.graph.onnx_files import read_graph
    from repaconv.stages.shared.target_lookup import load_target
    from repaconv.verification.model_runners import ImageSession

    runtime, precision = runtime_of(step), step.given["precision"]
    capability = load_target(step.given["target"]).compute_capability
    sizes = tuple((batch, *shape) for batch in (BATCHES[0], BATCHES[0], BATCHES[-1]))  # as `repaconv.build` has it
    for name, graph in manual_baseline(folder, precision).items():
        shapes = {read_graph(graph).graph.input[0].name: sizes}
        order = BuildSpec(graph, precision, (capability,) if capability else (), shapes if capability else {})
        try:
            yield name, ImageSession(runtime.open(runtime.build(order).engine, SessionSpec(precision=precision)))
        except RepaconvError as problem:
            yield name, problem.message


def _batches(sessions: Mapping[str, Any], images: Any) -> Iterator[dict[str, Any]]:
    """The times at every batch size that fits the GPU's memory; of the first that does not, only that it does not."""
    import numpy as np

    for batch in BATCHES:
        try:
            yield timed(sessions, images[np.arange(batch) % len(images)])
        except EnvironmentProblem as problem:
            if problem.code != "gpu.memory":
                raise
            yield {"batch": batch, "why": problem.message}
            return
