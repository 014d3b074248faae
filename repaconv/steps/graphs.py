"""A form of the network as a proved ONNX graph: exported, checked, simplified, compared."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
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
    from repaconv.proof.runners import TorchRunner

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
    """
    from repaconv.exporters.simplify import not_done
    from repaconv.exporters.to_onnx import DATA, check, to_onnx
    from repaconv.proof.runners import TorchRunner

    progress(f"{what}: torch", 0, 0)
    runner = TorchRunner(module, tensors, double=False)
    judge, expected = _Judge.of(runner, _probes(shape, batch, free_size), tolerances, logits=output == "logits")
    _load_float32(module, tensors)
    progress(f"{what}: to ONNX", 0, 0)
    exported = to_onnx(
        module, shape, output=output, opset=opset, lacks=lacks, batch=batch, free_size=free_size, scratch=scratch
    )
    data = scratch / DATA if (scratch / DATA).is_file() else None
    judge = judge._replace(folder=scratch if data else None)
    check(exported, judge.folder)
    progress(f"{what}: ONNX Runtime", 0, 0)
    before = judge.run(exported)
    link = judge.link("exported", (f"{what} in torch, float32", EXPORTED), before, expected)
    if data is not None:
        return Graph(exported, (link, not_done("not tried on a net above 2 GiB")), "none", False, data)
    plain = Graph(exported, (judge.located(link, runner, exported),), "none", False, None)
    if rewrites:
        progress(f"{what}: its form", 0, 0)
        plain = _in_form(plain, rewrites, judge, before)
    if not simplifiers:
        return plain._replace(links=(*plain.links, not_done("not asked for")))
    progress(f"{what}: simplify", 0, 0)
    return _simplified(plain, simplifiers, judge, before)


class _Judge(NamedTuple):
    """The images on which graphs are compared, and what is allowed; ``folder`` has weights that are files."""

    probes: list[NDArray[np.float32]]
    undecided: list[NDArray[np.bool_] | None]
    tolerances: Mapping[str, float]
    logits: bool
    folder: Path | None = None

    @classmethod
    def of(
        cls, runner: TorchRunner, probes: list[NDArray[np.float32]], tolerances: Mapping[str, float], *, logits: bool
    ) -> tuple[_Judge, list[NDArray[np.floating]]]:
        """By what torch computes, which comes with it."""
        expected, undecided = [], []
        for probe in probes:
            expected.append(runner.run({"input": probe})["output"])
            undecided.append(runner.undecided)
        return cls(probes, undecided, tolerances, logits), expected

    def run(self, model: onnx.ModelProto) -> list[NDArray[np.floating]]:
        """A graph's outputs, probe by probe."""
        session = image_model(model.SerializeToString(), self.folder)
        return [session.run(probe) for probe in self.probes]

    def link(
        self,
        name: str,
        ends: tuple[str, str],
        outputs: Sequence[NDArray[np.floating]],
        against: Sequence[NDArray[np.floating]],
    ) -> Link:
        """Judge outputs, which are of ends (reference, candidate)."""
        from repaconv.proof.parity import Meter
        from repaconv.proof.policy import tolerance

        meter = Meter(tolerance(name, logits=self.logits, usual=self.tolerances), logits=self.logits)
        for got, right, unsure in zip(outputs, against, self.undecided, strict=True):
            meter.add(got, right, undecided=unsure)
        return meter.link(name, *ends)

    def located(self, link: Link, right: TorchRunner | onnx.ModelProto, wrong: onnx.ModelProto) -> Link:
        """A link that failed, with where its ends part."""
        from repaconv.proof.locate import locate
        from repaconv.proof.runners import TorchRunner
        from repaconv.proof.traces import OnnxTrace, TorchTrace

        if link.verdict != "failed":
            return link
        assert link.tolerance is not None
        torch = isinstance(right, TorchRunner)
        reference = TorchTrace(right) if torch else OnnxTrace(right, load_onnx, by_module=False)
        candidate = OnnxTrace(wrong, load_onnx, by_module=torch)
        where = locate(reference, candidate, {"input": self.probes[0]}, allowed=link.tolerance.rtol)
        return link.model_copy(update={"location": where})


def _probes(shape: tuple[int, int, int], batch: int | None, free_size: bool) -> list[NDArray[np.float32]]:
    """Two batches: of 1 and 3 images where the batch is free; where the size is free, the second of another size."""
    from repaconv.proof.data import random_inputs

    channels, height, width = shape
    sizes = [(height, width), (height + 1, width + 6) if free_size else (height, width)]
    counts = [1, 3] if batch is None else [batch, batch]  # not the exporter's 2: a graph may be right at that alone
    return [
        random_inputs((channels, *size), count=count, seed=seed).images
        for seed, (size, count) in enumerate(zip(sizes, counts, strict=True))
    ]


def _load_float32(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    import torch

    weights = {n: value.to(torch.float32) if value.is_floating_point() else value for n, value in tensors.items()}
    module.load_state_dict(weights, assign=True)


def _simplified(graph: Graph, tools: tuple[str, ...], judge: _Judge, before: list[NDArray[np.floating]]) -> Graph:
    """What a simplifier makes of a graph, if it computes the same; else the graph."""
    from repaconv.exporters.simplify import simplify
    from repaconv.exporters.to_onnx import check

    ends = (FORM if graph.changes else EXPORTED, SIMPLIFIED)

    def compare(smaller: onnx.ModelProto) -> Link:
        return judge.located(judge.link("simplified", ends, judge.run(smaller), before), graph.model, smaller)

    result = simplify(graph.model, compare, tools)
    check(result.model)
    links = (*graph.links, result.link)
    return Graph(result.model, links, result.simplifier, result.accepted, None, graph.changes)


def _in_form(exported: Graph, rewrites: Sequence[Rewrite], judge: _Judge, before: list[NDArray[np.floating]]) -> Graph:
    """The graph in its form, with what was changed and the proof, if something was; else as it was."""
    from repaconv.exporters.to_onnx import check
    from repaconv.graphs.graph import rewritten
    from repaconv.proof.parity import not_verified

    thrown_away = "its graph was thrown away, the exported one is what was written"
    try:
        model, changes = rewritten(exported.model, rewrites)
        if not changes:
            return exported
        check(model)
        link = judge.link("form", (EXPORTED, FORM), judge.run(model), before)
    except Exception as error:  # a plug-in over a graph that it does not know: whatever it raises, the graph stays
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        link = not_verified("form", EXPORTED, FORM, f"a rewrite failed ({why}); {thrown_away}")
        return exported._replace(links=(*exported.links, link))
    if link.verdict == "passed":
        return exported._replace(model=model, links=(*exported.links, link), changes=tuple(changes))
    link = link.model_copy(update={"note": "; ".join(filter(None, [link.note, thrown_away]))})
    return exported._replace(links=(*exported.links, link))


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
