"""Export a form of the network to ONNX, apply rewrites and simplifiers, and verify the graph after every step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core.errors import Refused, first_line
from repaconv.core.file_replacement import write_payload
from repaconv.core.progress import Progress
from repaconv.graph.graph_without_weights import write_model
from repaconv.graph.onnx_files import with_node_names
from repaconv.onnx_export.onnx_simplifiers import not_run_link
from repaconv.results import Change, Link
from repaconv.verification.model_runners import load_onnx, named
from repaconv.verification.rounding import Rounding, rounding_between

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from repaconv.engines.contract import Feeds
    from repaconv.graph.rewrite_contract import Rewrite
    from repaconv.sources.source_model import GraphSpec, NetworkForm
    from repaconv.verification.model_runners import IntermediateValues

EXPORTED, FORM, SIMPLIFIED = "ONNX as exported", "ONNX, rewritten", "ONNX simplified"
LEFT_OUT = 3
"""How many rewrites of a preset are left out, one after the other, before all are."""
KEPT_BYTES = 512 << 20
_LAST_EXPORT: dict[tuple[object, ...], bytes] = {}
BF16_NOTE = "run in float32, every value rounded to bfloat16: ONNX Runtime has no such kernels here"


class Graph(NamedTuple):
    """A verified ONNX model.

    Attributes:
        model: The model.
        links: The comparisons of the export, rewriting and simplification.
        simplifier: Name of the simplifier, or "none".
        simplified: Whether the simplifier's result was accepted.
        data: The file of external weights, if there is one.
        changes: What the rewrites of the preset changed.
    """

    model: onnx.ModelProto
    links: tuple[Link, ...]
    simplifier: str
    simplified: bool
    data: Path | None
    changes: tuple[Change, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether the exported graph computes what the source does; discarded later steps do not count."""
        return self.links[0].verdict != "failed"


class Proving(NamedTuple):
    """The settings of a verified export.

    Attributes:
        form: The form that is exported, deploy form or training form.
        spec: Options of the export.
        tolerances: Tolerances of exact links, by link.
        scratch: A folder for large weights.
        progress: See `Progress`.
        decides: Whether the network makes discrete decisions.
        of: A key of the module and its weights, by which an equal export is reused; None turns the reuse off.
        reasons: Why some tolerances differ from the usual ones, by link.
    """

    form: str
    spec: GraphSpec
    tolerances: Mapping[str, float]
    scratch: Path
    progress: Progress
    decides: bool = False
    of: str | None = None
    reasons: Mapping[str, str] = MappingProxyType({})


def exported_graph(
    ways: Proving, module: nn.Module, tensors: Mapping[str, Tensor], shape: tuple[int, int, int], *, output: str
) -> Graph:
    """Export a torch module to ONNX, rewrite and simplify the graph, and verify each step under ONNX Runtime.

    Args:
        ways: Settings of the export.
        module: The module.
        tensors: Its weights.
        shape: [C, H, W] of its images.
        output: Name of the output.

    Raises:
        Refused: If torch cannot export it, or what it writes is not valid or does not run.
    """
    from repaconv.onnx_export.torch_exporter import DATA, check, load_exporter, to_onnx
    from repaconv.verification.model_runners import TorchRunner

    spec, scratch = ways.spec, ways.scratch
    ways.progress(f"{ways.form}: load in torch", 0, 0)
    runner = TorchRunner(module, tensors, double=False, outputs=(output,))
    expected = ExpectedOutputs.of(runner, _comparison_inputs(shape, spec.batch, spec.dynamic_size), ways)
    _load_float32(module, tensors)
    load_exporter(ways.progress, f"{ways.form}: ")
    ways.progress(f"{ways.form}: export to ONNX", 0, 0)
    written: dict[str, Any] = {
        "opset": spec.opset,
        "unsupported_ops": spec.unsupported_ops,
        "batch": spec.batch,
        "dynamic_size": spec.dynamic_size,
    }
    make = partial(to_onnx, module, shape, output=output, scratch=scratch, **written)
    key = None if ways.of is None else (ways.of, shape, output, *written.values())
    exported = _cached_export(make, key, scratch / DATA)
    data = scratch / DATA if (scratch / DATA).is_file() else None
    expected = expected._replace(folder=scratch if data else None)
    check(exported, expected.folder)
    ways.progress(f"{ways.form}: compare under ONNX Runtime", 0, 0)
    try:
        before = expected.run(exported)
    except Exception as error:  # ONNX Runtime raises anything
        raise Refused(
            f"the exported graph does not run under ONNX Runtime: {first_line(error)}.",
            hint="Export with a newer PyTorch, or at a fixed --image-size that is larger.",
            code="export.does-not-run",
        ) from error
    link = expected.link("exported", (f"{ways.form} in torch, float32", EXPORTED), before)
    if data is not None:
        return Graph(exported, (link, not_run_link("not tried on a net above 2 GiB")), "none", False, data)
    link = expected.located(link, runner.trace(), exported, by_module=True)
    return finished(Graph(exported, (link,), "none", False, None), expected._replace(expected=before))


def _cached_export(make: Callable[[], onnx.ModelProto], key: tuple[object, ...] | None, data: Path) -> onnx.ModelProto:
    """Call ``make``, or return the last export of this process if it has the same key.

    INT8 quantization, e.g., starts from the same FP32 graph as the FP32 export. A reused graph is verified like any
    other. Graphs with external weights (``data``) are not kept.
    """
    import onnx

    if key is not None and key in _LAST_EXPORT:
        return onnx.load_from_string(_LAST_EXPORT[key])
    made = make()
    _LAST_EXPORT.clear()
    if key is not None and not data.is_file() and made.ByteSize() < KEPT_BYTES:
        _LAST_EXPORT[key] = made.SerializeToString()
    return made


def finished(plain: Graph, expected: ExpectedOutputs) -> Graph:
    """Apply the rewrites and simplifiers of the export options; discard a step that changes what the graph computes.

    Args:
        plain: The exported graph, verified.
        expected: Compares with the outputs of that graph.
    """
    ways = expected.ways
    spec = ways.spec
    plain = plain._replace(model=with_node_names(plain.model))
    if spec.rewrites:
        ways.progress(f"{ways.form}: rewrite", 0, 0)
        plain = _with_rewrites(plain, spec.rewrites, expected)
    if not spec.simplifiers:
        return plain._replace(links=(*plain.links, not_run_link("not asked for")))
    ways.progress(f"{ways.form}: simplify", 0, 0)
    return _with_simplification(plain, spec.simplifiers, spec.unsupported_ops, expected)


Outputs = list[Mapping[str, Any]]


class ExpectedOutputs(NamedTuple):
    """Compares the outputs of graphs with expected outputs on a few calls.

    Attributes:
        feeds: Inputs of each call.
        expected: Expected outputs of each call.
        undecided: For each call, the images [n] for which rounding may change a discrete decision.
        ways: Settings of the export, with the tolerances.
        whole: Whether the outputs of a call are compared as a whole, not image by image.
        folder: Folder with external weights, if there are some.
        roundings: For each call, how far rounding alone moves the expected outputs.
    """

    feeds: Sequence[Feeds]
    expected: Outputs
    undecided: Sequence[NDArray[np.bool_] | None]
    ways: Proving
    whole: bool = False
    folder: Path | None = None
    roundings: Sequence[Rounding | None] = ()

    @classmethod
    def of(
        cls,
        form: NetworkForm,
        feeds: Sequence[Feeds],
        ways: Proving,
        *,
        whole: bool = False,
        exact: NetworkForm | None = None,
    ) -> ExpectedOutputs:
        """Take the outputs of a form as expected; with ``exact``, its float64 version, also measure the rounding."""
        expected: Outputs = []
        undecided = []
        for each in feeds:
            expected.append(form.run(each))
            undecided.append(form.undecided)
        roundings = [None if exact is None else rounding_between(form, exact, each) for each in feeds]
        return cls(feeds, expected, undecided, ways, whole, roundings=roundings)

    def run(self, model: onnx.ModelProto) -> Outputs:
        """Run a graph on all calls and return its outputs."""
        session = load_onnx(model, self.folder)
        names = [port.name for port in session.inputs]
        return [session.run(named(names, feeds)) for feeds in self.feeds]

    def link(self, name: str, ends: tuple[str, str], outputs: Outputs) -> Link:
        """Compare outputs with the expected ones; ``ends`` names (reference, candidate)."""
        from repaconv.verification.comparison import Comparison, overall_link
        from repaconv.verification.tolerances import tolerance

        logits = "logits" in self.expected[0]
        limits: dict[str, Any] = {"usual": self.ways.tolerances, "reasons": self.ways.reasons}
        allowed = tolerance(name, logits=logits, decides=self.ways.decides, **limits)
        found = Comparison(ends[1], allowed)
        for got, right, unsure, rounding in zip(outputs, self.expected, self.undecided, self.roundings, strict=True):
            found.add(got, right, undecided=unsure, whole=self.whole, rounding=rounding)
        return overall_link(found.links(name, ends[0]))

    def located(self, link: Link, right: IntermediateValues, wrong: onnx.ModelProto, *, by_module: bool) -> Link:
        """Add to a failed link the first layer at which reference and candidate differ."""
        from repaconv.verification.divergence_location import locate
        from repaconv.verification.model_runners import OnnxValues

        if link.verdict != "failed":
            return link
        assert link.tolerance is not None
        candidate = OnnxValues(wrong, load_onnx, by_module=by_module)
        where = locate(right, candidate, self.feeds[:1], allowed=link.tolerance.rtol)
        return link.model_copy(update={"location": where})


def _comparison_inputs(shape: tuple[int, int, int], batch: int | None, dynamic_size: bool) -> list[Feeds]:
    """Make two batches, of 1 and 3 images if the batch is dynamic, of different sizes if the size is dynamic."""
    from repaconv.verification.input_batches import random_inputs

    channels, height, width = shape
    sizes = [(height, width), (height + 1, width + 6) if dynamic_size else (height, width)]
    counts = [1, 3] if batch is None else [batch, batch]  # not 2, with which torch exports: it may work by accident
    return [
        random_inputs((channels, *size), count=count, seed=seed).piece(0, count).given
        for seed, (size, count) in enumerate(zip(sizes, counts, strict=True))
    ]


def _load_float32(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    import torch

    weights = {n: value.to(torch.float32) if value.is_floating_point() else value for n, value in tensors.items()}
    module.load_state_dict(weights, assign=True)


def _with_simplification(
    graph: Graph, tools: tuple[str, ...], unsupported_ops: Collection[str], expected: ExpectedOutputs
) -> Graph:
    """Simplify the graph; keep the original graph if the result computes something else."""
    from repaconv.onnx_export.onnx_simplifiers import simplify
    from repaconv.verification.model_runners import OnnxValues

    ends = (FORM if graph.changes else EXPORTED, SIMPLIFIED)

    def compare(smaller: onnx.ModelProto) -> Link:
        right = OnnxValues(graph.model, load_onnx, by_module=False)
        return expected.located(
            expected.link("simplified", ends, expected.run(smaller)), right, smaller, by_module=False
        )

    result = simplify(graph.model, compare, tools, unsupported_ops)
    links = (*graph.links, result.link)
    return Graph(result.model, links, result.simplifier, result.accepted, None, graph.changes)


def _with_rewrites(exported: Graph, rewrites: Sequence[Rewrite], expected: ExpectedOutputs) -> Graph:
    """Apply the rewrites of the preset and verify the result; leave out those that change what the graph computes."""
    links: list[Link] = []
    found = _rewritten(exported, rewrites, expected)
    wrong_verdicts = {"failed"}
    if all(link.verdict == "passed" for link in exported.links):  # otherwise these inputs verify no graph
        wrong_verdicts.add("not verified")
    while found.link is not None and found.link.verdict in wrong_verdicts and len(links) < LEFT_OUT:
        expected.ways.progress(f"{expected.ways.form}: which rewrite is wrong", 0, 0)
        wrong, link = _first_wrong(exported, rewrites, expected, found.link, wrong_verdicts)
        links.append(link.noted(f"{wrong.name} was left out"))
        rewrites = [rewrite for rewrite in rewrites if rewrite is not wrong]
        found = _rewritten(exported, rewrites, expected)
    if found.link is not None and found.link.verdict == "passed":
        return exported._replace(model=found.model, links=(*exported.links, *links, found.link), changes=found.changes)
    if found.link is not None:
        links.append(found.link.noted("the rewritten graph was discarded; the exported one was written"))
    return exported._replace(links=(*exported.links, *links))


class _Rewritten(NamedTuple):
    """A graph after rewrites, and how it compares with the exported one; no link if nothing changed."""

    model: onnx.ModelProto
    changes: tuple[Change, ...]
    link: Link | None


def _rewritten(exported: Graph, rewrites: Sequence[Rewrite], expected: ExpectedOutputs) -> _Rewritten:
    from repaconv.graph.models_in_onnx_ir import rewritten
    from repaconv.onnx_export.torch_exporter import check
    from repaconv.verification.comparison import not_verified

    try:
        model, changes = rewritten(exported.model, rewrites)
        if not changes:
            return _Rewritten(exported.model, (), None)
        check(model)
        return _Rewritten(model, tuple(changes), expected.link("form", (EXPORTED, FORM), expected.run(model)))
    except Exception as error:  # a plug-in may raise anything on an arbitrary graph
        link = not_verified("form", EXPORTED, FORM, f"a rewrite failed ({first_line(error)})")
        return _Rewritten(exported.model, (), link)


def _first_wrong(
    exported: Graph,
    rewrites: Sequence[Rewrite],
    expected: ExpectedOutputs,
    link: Link,
    wrong_verdicts: Collection[str],
) -> tuple[Rewrite, Link]:
    """The rewrite after which the graph is wrong, and before which it is not; ``link`` is that of all of them."""
    right, wrong = 0, len(rewrites)
    while wrong - right > 1:
        half = (right + wrong) // 2
        found = _rewritten(exported, rewrites[:half], expected).link
        if found is None or found.verdict not in wrong_verdicts:
            right = half
        else:
            wrong, link = half, found
    return rewrites[wrong - 1], link


def write_graph(model: onnx.ModelProto, path: Path, data: Path | None) -> Path | None:
    """Write the ONNX file; equal graphs give equal bytes.

    External weights are moved to ``<path>.data``. An older graph is deleted first and the new one is written last, so
    that a graph is never next to the weights of another.

    Args:
        model: The graph.
        path: The file to write.
        data: The file of external weights, if there is one.

    Returns:
        The path of the external weights, if there are some.
    """
    from repaconv.onnx_export.torch_exporter import refer_to

    weights_path = path.with_name(f"{path.name}.data")
    if data is not None or weights_path.exists():
        path.unlink(missing_ok=True)
        weights_path.unlink(missing_ok=True)
    if data is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        refer_to(model, weights_path.name)
        write_payload(weights_path, partial(_move, data))
    write_payload(path, partial(write_model, model))
    return weights_path if data is not None else None


def _move(source: Path, target: Path) -> None:
    shutil.move(source, target)


def runnable(model: onnx.ModelProto, precision: str) -> onnx.ModelProto:
    """Return a graph that ONNX Runtime can run: for bfloat16 a float32 graph that rounds every value, else itself."""
    from repaconv.onnx_export.bfloat16 import rounded_in_float32

    return rounded_in_float32(model) if precision == "bf16" else model
