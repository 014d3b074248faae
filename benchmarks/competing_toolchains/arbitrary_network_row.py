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
from competing_toolchains.competitors import Contender, Hand, Run
from competing_toolchains.docs_page import KIND
from competing_toolchains.method_row import EXACT, LOWER, Check, Place, Prepared, interleaved
from competing_toolchains.repaconv_configurations import Ours, Written
from repaconv.engines.contract import Feeds, Port
from repaconv.results import Deployment
from repaconv.verification.input_batches import random_inputs

IMAGES = 24
"""Half of them calibrate; a quarter says whether all compute the same."""
WITHIN = {"fp32": 1.2, "int8": 1.3}
"""Times as long as the fastest, from which one takes no further part."""
Row = dict[str, Any]


def prepared(network: Original, place: Place, work: Path, *, compiled: bool = False) -> Prepared:
    """Graph, fold and images, in a folder where what is there already is taken; the module if it is to be compiled."""
    work.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work / "inductor")
    graph, run, given = work / "original.onnx", work / "run", work / "images.npz"
    module = module_of(network, work / "weights.pth") if compiled or not graph.is_file() else None
    if not graph.is_file():
        part = work / "part.onnx"
        write_graph(network, module, part, place.batch)
        part.replace(graph)
    if not (run / "fold.json").is_file():
        repaconv.fold(graph, out=run, force=True)
    images = random_inputs(network.shape, count=IMAGES, seed=0).images
    if not given.is_file():
        np.savez(given, **{_input_of(graph): images})
    taken = Ours(run, given, place.batch, place.threads)
    fitting, judging = repaconv_configurations.fitting(taken)
    calls = np.resize(images[fitting], (-(-len(fitting) // place.batch), place.batch, *network.shape))
    typed = {graph.with_suffix(suffix) for suffix in (".static.onnx", ".dynamic.onnx", ".nncf.xml")}
    made = {each for each in typed if each.is_file()}
    hand = Hand(module if compiled else None, graph, calls, place.threads, made, KIND)
    return Prepared(hand, taken, images, None, judging)


def _input_of(graph: Path) -> str:
    import onnx

    return str(onnx.load(graph, load_external_data=False).graph.input[0].name)


def _check(ready: Prepared, place: Place, scratch: Path) -> Check:
    """The check of outputs of `tune`, for everybody."""
    check = repaconv_configurations.output_check(ready.ours, scratch)
    inputs = check.graphs.source_model.inputs

    def verdict(run: Run) -> str:
        called = Called(inputs, lambda feeds: {"output": run(next(iter(feeds.values())))})
        return check.verdict(called, place.batch)

    return verdict


class Called(NamedTuple):
    """Who takes part, as a session of one output."""

    inputs: tuple[Port, ...]
    run: Callable[[Feeds], dict[str, Any]]


def prepare_exact(network: Original, place: Place, work: Path, *, compiled: bool) -> None:
    """All of FP32 that is not timed."""
    ready = prepared(network, place, work, compiled=compiled)
    _open_once(competitors.exact(ready.hand) if compiled else iter(()))


def prepare_lower(network: Original, place: Place, work: Path, exact: Row) -> None:
    """All of lower precision that is not timed."""
    ready = prepared(network, place, work)
    _open_once(competitors.lower(ready.hand))
    scratch = work / "int8"
    scratch.mkdir(exist_ok=True)
    chosen = {EXACT: Deployment.model_validate(exact["ways"][EXACT])}
    plain = repaconv_configurations.plain(ready.ours, scratch)
    chosen |= {f"{LOWER}, {way}": each for way, each in plain.items() if each.precision in ("int8", "bf16")}
    made = repaconv_configurations.written(ready.ours, scratch, chosen)
    told = {name: [one.way.model_dump(mode="json"), str(one.graph), one.sizes] for name, one in made.items()}
    (scratch / "written.json").write_text(json.dumps(told))


def _open_once(everybody: Iterator[Contender]) -> None:
    for each in everybody:
        with contextlib.suppress(Exception):  # told when it is measured
            each.open()


def measured_exact(network: Original, place: Place, work: Path, *, compiled: bool) -> Row:
    """The row in FP32."""
    ready = prepared(network, place, work, compiled=compiled)
    found = repaconv_configurations.tuned(ready.ours, None, place.budget_s)
    chosen = {EXACT: found.deployment}
    scratch = work / "graphs"
    scratch.mkdir(exist_ok=True)
    everybody = [*competitors.exact(ready.hand), *repaconv_configurations.contenders(ready.ours, scratch, chosen)]
    row = _about(network, place, "fp32", chosen)
    row["tune"] = {"seconds": found.seconds, "budget_s": place.budget_s, "complete": found.complete}
    row["tune"]["ratio"] = found.ratio.median if found.ratio else None
    row["tune"]["runtimes"] = repaconv_configurations.by_runtime(found)
    return row | interleaved(ready, place, everybody, within=WITHIN["fp32"], check=_check(ready, place, scratch))


def measured_lower(network: Original, place: Place, work: Path) -> Row:
    """The row in lower precision, of what was prepared."""
    ready = prepared(network, place, work)
    told = json.loads((work / "int8" / "written.json").read_text())
    made = {
        name: Written(Deployment.model_validate(way), Path(graph), sizes) for name, (way, graph, sizes) in told.items()
    }
    theirs = [each for each in competitors.exact(ready.hand) if "torch" not in each.name] + [
        *competitors.lower(ready.hand)
    ]
    mine = [Contender(name, one.opened, one.way.precision != "fp32") for name, one in made.items()]
    row = _about(network, place, "int8", {name: one.way for name, one in made.items()})
    return row | interleaved(ready, place, [*theirs, *mine], within=WITHIN["int8"])


def _about(network: Original, place: Place, kind: str, chosen: dict[str, Deployment]) -> Row:
    row: Row = {"net": network.name, "kind": kind, "trained": network.file is not None, "size": network.shape[1:]}
    row |= {"batch": place.batch, "threads": place.threads, "rounds": place.rounds}
    row["date"] = datetime.date.today().isoformat()
    row["ways"] = {name: way.model_dump(mode="json") for name, way in chosen.items()}
    return row
