"""A form of the network as a proved ONNX graph: exported, checked, simplified, compared."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv.artefacts import Change, Link
from repaconv.exporters.simplify import TOOLS
from repaconv.files import write_bytes, write_with
from repaconv.steps.common import Progress, image_model, load_onnx

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from repaconv.graphs.contract import Rewrite

EXPORTED, FORM, SIMPLIFIED = "ONNX as exported", "ONNX in its form", "ONNX simplified"
BF16_NOTE = "run in float32, every value rounded to bfloat16: ONNX Runtime has no such kernels here"


class Graph(NamedTuple):
    """An ONNX model, the links from torch to it, who simplified it, and the file of its weights if they have one.

    ``changes`` are what the rewrites of its form did.
    """

    model: onnx.ModelProto
    links: tuple[Link, ...]
    simplifier: str
    simplified: bool
    data: Path | None
    changes: tuple[Change, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether the graph computes what the module does; one that was thrown away does not count."""
        return self.links[0].verdict != "failed"


def proved_graph(
    what: str,
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int, int],
    *,
    output: str,
    opset: int,
    lacks: Collection[str] = (),
    batch: int | None,
    free_size: bool,
    tolerances: Mapping[str, float],
    rewrites: Sequence[Rewrite] = (),
    simplifiers: tuple[str, ...] = TOOLS,
    scratch: Path,
    progress: Progress,
) -> Graph:
    """Export a module with these weights, write it in its form, and follow it, graph by graph, under ONNX Runtime.

    A rewritten graph that computes something else is thrown away, as a simplified one is.

    The links are measured on two batches: of 1 and 3 images where the batch is free, and where the size is free, the
    second of another size.
    """
    import torch

    from repaconv.exporters.simplify import not_done, simplify
    from repaconv.exporters.to_onnx import DATA, check, to_onnx
    from repaconv.proof.data import random_inputs
    from repaconv.proof.locate import locate
    from repaconv.proof.parity import Meter
    from repaconv.proof.policy import tolerance
    from repaconv.proof.runners import TorchRunner
    from repaconv.proof.traces import OnnxTrace, TorchTrace

    channels, height, width = shape
    sizes = [(height, width), (height + 1, width + 6) if free_size else (height, width)]
    counts = [1, 3] if batch is None else [batch, batch]  # not the exporter's 2: a graph may be right at that alone
    probes = [
        random_inputs((channels, *size), count=count, seed=seed).images
        for seed, (size, count) in enumerate(zip(sizes, counts, strict=True))
    ]
    logits = output == "logits"

    progress(f"{what}: torch", 0, 0)
    runner = TorchRunner(module, tensors, double=False)
    expected, undecided = [], []
    for probe in probes:
        expected.append(runner.run(probe))
        undecided.append(runner.undecided)
    weights = {n: value.to(torch.float32) if value.is_floating_point() else value for n, value in tensors.items()}
    module.load_state_dict(weights, assign=True)
    progress(f"{what}: to ONNX", 0, 0)
    exported = to_onnx(
        module, shape, output=output, opset=opset, lacks=lacks, batch=batch, free_size=free_size, scratch=scratch
    )
    data = scratch / DATA if (scratch / DATA).is_file() else None
    folder = scratch if data else None
    check(exported, folder)

    def judged(name: str, ends: tuple[str, str], model: onnx.ModelProto, against: list[NDArray[np.floating]]) -> Link:
        meter = Meter(tolerance(name, logits=logits, usual=tolerances), logits=logits)
        for got, right, unsure in zip(_run(model, probes, folder), against, undecided, strict=True):
            meter.add(got, right, undecided=unsure)
        return meter.link(name, *ends)

    progress(f"{what}: ONNX Runtime", 0, 0)
    before = _run(exported, probes, folder)
    link = judged("exported", (f"{what} in torch, float32", EXPORTED), exported, expected)
    if data is not None:
        return Graph(exported, (link, not_done("not tried on a net above 2 GiB")), "none", False, data)
    if link.verdict == "failed":
        assert link.tolerance is not None
        wrong = OnnxTrace(exported, load_onnx, by_module=True)
        where = locate(TorchTrace(runner), wrong, probes[0], allowed=link.tolerance.rtol)
        link = link.model_copy(update={"location": where})
    links, source = [link], (EXPORTED, exported)
    changes: tuple[Change, ...] = ()
    if rewrites:
        progress(f"{what}: its form", 0, 0)
        graph, changes, formed = _in_form(exported, rewrites, lambda g: judged("form", (EXPORTED, FORM), g, before))
        links += formed
        source = (FORM, graph) if changes else source
    if not simplifiers:
        return Graph(source[1], (*links, not_done("not asked for")), "none", False, None, changes)

    def compare(smaller: onnx.ModelProto) -> Link:
        found = judged("simplified", (source[0], SIMPLIFIED), smaller, before)
        if found.verdict != "failed":
            return found
        right, wrong = (OnnxTrace(model, load_onnx, by_module=False) for model in (source[1], smaller))
        assert found.tolerance is not None
        where = locate(right, wrong, probes[0], allowed=found.tolerance.rtol)
        return found.model_copy(update={"location": where})

    progress(f"{what}: simplify", 0, 0)
    result = simplify(source[1], compare, simplifiers)
    check(result.model)
    return Graph(result.model, (*links, result.link), result.simplifier, result.accepted, None, changes)


def _in_form(
    exported: onnx.ModelProto, rewrites: Sequence[Rewrite], judge: Callable[[onnx.ModelProto], Link]
) -> tuple[onnx.ModelProto, tuple[Change, ...], list[Link]]:
    """The graph in its form, what was changed, and the proof if something was."""
    from repaconv.exporters.to_onnx import check
    from repaconv.graphs.graph import rewritten
    from repaconv.proof.parity import not_verified

    thrown_away = "its graph was thrown away, the exported one is what was written"
    try:
        graph, changes = rewritten(exported, rewrites)
        if not changes:
            return exported, (), []
        check(graph)
        link = judge(graph)
    except Exception as error:  # a plug-in over a graph that it does not know: whatever it raises, the graph stays
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return exported, (), [not_verified("form", EXPORTED, FORM, f"a rewrite failed ({why}); {thrown_away}")]
    if link.verdict == "passed":
        return graph, tuple(changes), [link]
    return exported, (), [link.model_copy(update={"note": "; ".join(filter(None, [link.note, thrown_away]))})]


def write_graph(model: onnx.ModelProto, path: Path, data: Path | None) -> Path | None:
    """Write the file; equal graphs are equal bytes.

    Weights of their own go to ``<path>.data``. They move there before the graph comes, and after an older one went: a
    graph never stands beside the weights of another.

    Returns:
        Where the weights went, if they have a file of their own.
    """
    from repaconv.exporters.to_onnx import refer_to

    beside = path.with_name(f"{path.name}.data")
    if data is not None or beside.exists():
        path.unlink(missing_ok=True)
        beside.unlink(missing_ok=True)
    if data is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        refer_to(model, beside.name)
        write_with(beside, partial(_move, data))
    write_bytes(path, model.SerializeToString(deterministic=True))
    return beside if data is not None else None


def _move(source: Path, target: Path) -> None:
    shutil.move(source, target)


def runnable(model: onnx.ModelProto, precision: str) -> onnx.ModelProto:
    """What ONNX Runtime runs in place of the graph: itself, but for bfloat16."""
    from repaconv.exporters.bfloat16 import rounded_in_float32

    return rounded_in_float32(model) if precision == "bf16" else model


def _run(model: onnx.ModelProto, probes: list[NDArray[np.float32]], folder: Path | None) -> list[NDArray[np.floating]]:
    session = image_model(model.SerializeToString(), folder)
    return [session.run(probe) for probe in probes]
