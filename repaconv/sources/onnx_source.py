"""The source model of an arbitrary ONNX model; the original graph in float64 is the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repaconv.core import run_folder
from repaconv.core.errors import Refused, UsageProblem, first_line
from repaconv.core.progress import Progress
from repaconv.engines.contract import Feeds, Network, Port
from repaconv.graph.onnx_files import opset_of
from repaconv.graph.opset_upgrade import upgraded
from repaconv.onnx_export.opset_lowering import lower
from repaconv.results import ClassScores, GraphFold, ImageSize, Link, Location
from repaconv.sources.fold_size_reverts import Reverts, fold_no_larger
from repaconv.sources.graph_fold import folded
from repaconv.sources.method_detection import source_of
from repaconv.sources.onnx_graph_runner import GraphForm
from repaconv.sources.source_model import DEPLOY, GraphSpec, form_names
from repaconv.sources.verified_onnx_export import EXPORTED, ExpectedOutputs, Graph, Outputs, Proving, finished
from repaconv.verification.folded_graph_verification import GIVEN, verification_links
from repaconv.verification.graph_with_cached_outputs import Evaluated
from repaconv.verification.input_batches import Batch, Inputs
from repaconv.verification.onnx_model_loading import in_single, inputs_of, loaded
from repaconv.verification.tolerances import FLOAT32

if TYPE_CHECKING:
    import onnx

    from repaconv.sources.source_model import GraphSpec
    from repaconv.verification.input_batches import Inputs


# --- Convert an ONNX graph of an old opset to the oldest opset that folds support, and verify the conversion.

UPGRADED_LABEL = "ONNX at opset {}"


class UpgradedGraph(NamedTuple):
    """The graph to fold after the opset upgrade.

    Attributes:
        graph: The upgraded graph, or the original one.
        links: The comparisons of the original graph with the upgraded one.
        left: Why the graph was not upgraded, if it should have been.
    """

    graph: Evaluated
    links: tuple[Link, ...] = ()
    left: tuple[str, ...] = ()

    def verified(self, source: Path, given: Evaluated, *, unverified: bool = False) -> UpgradedGraph:
        """Verify the upgraded graph; return the original graph instead if the two compute different things.

        Args:
            source: The graph's file, for messages.
            given: The original graph.
            unverified: Return the upgraded graph also if nothing can be compared.

        Raises:
            Refused: The original graph does not run, or nothing could be compared.
        """
        if self.graph is given:
            return self
        labels = GIVEN, UPGRADED_LABEL.format(opset_of(self.graph.model))
        links = verification_links(source, given, self.graph, labels, unverified=unverified)
        if any(link.verdict == "failed" for link in links):
            why = f"{_opset_message(given.model)}, and what ONNX's converter makes of it computes something else"
            return UpgradedGraph(given, (), (why,))
        return self._replace(links=links)


def with_supported_opset(given: Evaluated) -> UpgradedGraph:
    """Convert a graph to the oldest opset that folds support; newer graphs and failed conversions stay as they are."""
    try:
        newer = upgraded(given.model)
    except Exception as error:  # the converter raises many classes
        why = first_line(error)
        return UpgradedGraph(
            given, (), (f"{_opset_message(given.model)}, and ONNX's converter fails on it ({why}); export it anew",)
        )
    return UpgradedGraph(given if newer is given.model else Evaluated(newer))


def _opset_message(given: onnx.ModelProto) -> str:
    return f"the graph is of opset {opset_of(given)}, where Softmax and Squeeze meant something else"


# --- The source model of an arbitrary ONNX model; the original graph in float64 is the reference.

# Opset, batch and image size of an export


def fitted(model: onnx.ModelProto, folded: GraphFold, spec: GraphSpec) -> tuple[onnx.ModelProto, str]:
    """Convert a graph to the opset, batch size and image size of an export; also return a note on what was impossible.

    Dynamic dimensions of images are named ``batch``, ``height`` and ``width``, as in every export of repaconv; those of
    other inputs keep their names.

    Args:
        model: The graph, which is not modified.
        folded: The result of the fold stage.
        spec: Options of the export.

    Raises:
        Refused: An operator cannot be expressed in the older opset.
    """
    raised, note = _with_opset(model, spec)
    return _with_dimensions(raised, _new_dimensions(folded, spec)), note


def _with_opset(model: onnx.ModelProto, spec: GraphSpec) -> tuple[onnx.ModelProto, str]:
    """Raise the opset with onnx's converter, unless that fails, or lower it to what the target reads."""
    import onnx

    has = opset_of(model)
    if has < spec.opset:
        try:
            model = onnx.version_converter.convert_version(model, spec.opset)
        except Exception as error:  # the converter's native code may raise anything
            return model, f"stays in opset {has}: {str(error).strip().splitlines()[0]}"
    if has > (spec.newest or spec.opset) or {node.op_type for node in model.graph.node} & set(spec.unsupported_ops):
        model = lower(model, min(opset_of(model), spec.newest or spec.opset), spec.unsupported_ops)
    return model, ""


def _new_dimensions(folded: GraphFold, spec: GraphSpec) -> dict[str, int | str]:
    """Map the names of dynamic dimensions to their new names or fixed sizes."""
    found: dict[str, int | str] = {}
    if folded.sizes.batch:
        found[folded.sizes.batch] = spec.batch or ("batch" if folded.image_size else folded.sizes.batch)
    for name, side, number in zip(folded.sizes.sides, ("height", "width"), spec.size or (0, 0), strict=False):
        found[name] = side if spec.dynamic_size or not number else number
    return found


def _with_dimensions(model: onnx.ModelProto, wanted: Mapping[str, int | str]) -> onnx.ModelProto:
    """Return a copy of the graph with these dimensions renamed or fixed; shapes of other values are inferred again."""
    import onnx

    if not wanted:
        return model
    other = onnx.ModelProto()
    other.CopyFrom(model)
    del other.graph.value_info[:]
    names, fixed = {port.name for port in inputs_of(model)}, any(isinstance(size, int) for size in wanted.values())
    own: dict[tuple[str, int], str] = {}
    for value in (*other.graph.input, *other.graph.output):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            known = dim.dim_param or (f"{value.name}[{axis}]" if value.name in names and not dim.dim_value else "")
            new = wanted.get(known)
            if isinstance(new, int):
                dim.dim_value = new
            elif new is not None:
                dim.dim_param = new
            elif value.name not in names and dim.dim_param and fixed:
                own[value.name, axis] = dim.dim_param
                dim.Clear()  # inferred from the inputs
    inferred = onnx.shape_inference.infer_shapes(other)
    for value in inferred.graph.output:  # dimensions that are still dynamic get their old names back
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if (value.name, axis) in own and not dim.HasField("dim_value"):
                dim.dim_param = own[value.name, axis]
    return inferred


def _with_known_sizes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace what the graph computes from known sizes by constants."""
    from repaconv.graph.models_in_onnx_ir import read, write_like
    from repaconv.graph.shape_folding import fold_shapes

    graph = read(model)
    fold_shapes(graph)
    return write_like(model, graph)


# The source model


@dataclass(frozen=True)
class OnnxSource:
    """The source model of an arbitrary ONNX model; see `repaconv.sources.source_model.SourceModel`.

    Members that need the original or the folded graph raise `Refused` if it is missing or has changed.
    """

    run: run_folder.Run
    folded: GraphFold
    checkpoint: str | Path | None = None

    @property
    def scores(self) -> ClassScores | None:
        """The output of class scores, found by --set classes, by its name or by its shape."""
        return self.folded.scores

    @property
    def official(self) -> tuple[str, ...]:
        """Empty: the graph is deployed as it is."""
        return ()

    @property
    def by_module(self) -> bool:
        """False: the values of a graph are named by value."""
        return False

    @cached_property
    def source(self) -> Path:
        """The file of the original graph."""
        return source_of(self.folded, self.checkpoint)

    @cached_property
    def inputs(self) -> tuple[Port, ...]:
        """The inputs of the graph."""
        return inputs_of(self.deploy)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The names of the graph's outputs."""
        return tuple(value.name for value in self.deploy.graph.output)

    @cached_property
    def decides(self) -> bool:
        """Whether the graph has operators that make discrete decisions."""
        from repaconv.graph.discrete_outputs import has_discrete_decision

        return has_discrete_decision(self.deploy)

    @cached_property
    def reference(self) -> GraphForm:
        """The original graph, in float64 where all of its operators can be evaluated so."""
        return self._form(self.given, double=bool(self.folded.float64))

    @cached_property
    def exact(self) -> GraphForm:
        """The graph folded again, with constants in float64; in float32 where it cannot be evaluated in float64."""
        from repaconv.graph.element_type_conversion import unsupported
        from repaconv.graph.float64_rewriting import WIDER
        from repaconv.verification.float64_graphs import widened

        double = bool(self.folded.float64)
        known = with_supported_opset(Evaluated(self.given)).graph.model if self.folded.changes else self.given
        given = widened(known) if double else known  # after the opset upgrade, whose converter inserts float32
        if not self.folded.changes:
            return self._form(given, double=double)
        typed = not (double and unsupported(known, WIDER))
        return self._form(folded(self.source, given, self.folded.reverted, typed=typed).model, double=double)

    @property
    def as_exported(self) -> GraphForm | None:
        """None: the original graph is the reference."""
        return None

    @cached_property
    def stored(self) -> GraphForm:
        """The folded graph under ONNX Runtime."""
        return self._form(self.deploy)

    @cached_property
    def given(self) -> onnx.ModelProto:
        """The original graph with its weights; converted to float32 if it has half precision."""
        return in_single(loaded(self.source))

    @cached_property
    def deploy(self) -> onnx.ModelProto:
        """The folded graph with its weights; converted to float32 if it has half precision."""
        return in_single(loaded(self.run.payload(self.folded.payload)))

    def single(self) -> GraphForm:
        """Build the original graph as it runs under ONNX Runtime, in float32."""
        return self._form(self.given)

    def network(self, form: str) -> Network:
        """Refuse: an ONNX model has no torch module.

        Raises:
            UsageProblem: Always.
        """
        raise UsageProblem(
            f"{self.run.folder} is of an ONNX graph, and this target's runtime runs torch modules.",
            hint="Give a target that runs ONNX models, e.g. --target x86-64.",
            code="run.no-module",
        )

    def graph(self, form: str, spec: GraphSpec, *, scratch: Path, progress: Progress) -> Graph:
        """Convert the graph to the options of the export, rewrite and simplify it, and verify the result.

        Raises:
            UsageProblem: The graph has another fixed batch size.
            Refused: An operator cannot be expressed in the older opset.
        """
        from repaconv.onnx_export.torch_exporter import check

        has = self.folded
        if spec.batch is not None and has.batch not in ("dynamic", spec.batch):
            raise UsageProblem(
                f"this graph has a fixed batch size of {has.batch}; {spec.batch} was requested.",
                hint="Remove --batch: the model file has a fixed batch size.",
                code="export.batch",
            )
        name = form_names(has)[form != DEPLOY]
        ways = Proving(name, spec, has.tolerances, scratch, progress, self.decides, reasons=has.tolerance_reasons)
        base = self.stored if form == DEPLOY else self._form(self.given)
        progress(f"{name}: ONNX Runtime", 0, 0)
        exact = self._form(base.model, double=True) if self.folded.float64 else None
        expected = ExpectedOutputs.of(base, self._comparison_inputs(spec), ways, whole=self.folded.whole, exact=exact)
        called = f"{name} as {'stored' if form == DEPLOY else 'given'}"

        def exported(plain: onnx.ModelProto, folds: str = "") -> tuple[onnx.ModelProto, Link, Outputs]:
            model, note = fitted(plain, self.folded, spec)
            check(model)
            outputs = expected.run(model)
            link = expected.link("exported", (called, EXPORTED), outputs)
            return model, link.noted(note).noted(folds), outputs

        made, failed = None, False
        try:
            again = self._folded_again(base.model, spec) if form == DEPLOY else None
            made = exported(*again) if again else None
            failed = made is not None and made[1].verdict == "failed"
        except Exception:  # of many classes, and the graph can be exported as it was folded
            failed = True
        if made is None or failed:
            made = exported(base.model, "not folded again at this size, since that failed" if failed else "")
        model, link, before = made
        link = expected.located(link, base.trace(), model, by_module=False)
        return finished(Graph(model, (link,), "none", False, None), expected._replace(expected=before))

    def _folded_again(self, model: onnx.ModelProto, spec: GraphSpec) -> tuple[onnx.ModelProto, str] | None:
        """The graph folded once more, where the export fixes a dynamic image size, and what was folded.

        Sizes that the graph computes are constants then, so that more can be folded. None if nothing can.
        """
        if not self.folded.sizes.sides or not spec.size or spec.dynamic_size:
            return None
        fixed = Evaluated(_with_known_sizes(_with_dimensions(model, _new_dimensions(self.folded, spec))))
        refold = partial(folded, self.run.payload(self.folded.payload), fixed.model)
        again = fold_no_larger(fixed, fixed, refold, Reverts(self.folded.reverted))
        rewrites = ", ".join(dict.fromkeys(change.rewrite for change in again.changes))
        at = f"folded again at {spec.size[0]}x{spec.size[1]} pixels"
        return (again.graph.model, f"{at}: {rewrites}") if again.changes else None

    def free_sizes(self, batch: int) -> dict[str, int]:
        """Return the usual values of the dynamic dimensions, with this batch size."""
        sizes = self.folded.sizes
        return {**sizes.usual, **({sizes.batch: batch} if sizes.batch else {})}

    def random_inputs(
        self, count: int, seed: int, size: ImageSize | None = None, *, batch: int | None = None
    ) -> Inputs:
        """Make random inputs as the graph's first operators expect them: pixels, indices, masks or normal numbers."""

        return random_graph_inputs(self._sampling_graph, self.folded, count, seed, size, batch)

    def require_size(self, height: int, width: int) -> None:
        """Refuse another image size than the graph's, if that is fixed.

        Raises:
            UsageProblem: The graph does not take images of this size.
        """
        if self.folded.image_size == (height, width):
            return
        if self.folded.any_image_size:
            self._require_runs(height, width)
            return
        size = self.folded.image_size
        text = f"takes images of {size[0]}x{size[1]} pixels only" if size else "does not take one input of images"
        raise UsageProblem(f"this graph {text}.", hint="Leave --image-size out.", code="image-size")

    def _require_runs(self, height: int, width: int) -> None:
        count = self.folded.batch if isinstance(self.folded.batch, int) else 1
        images = self.random_inputs(count, 0, (height, width)).piece(0, count)
        try:
            self.stored.run(images.feeds(self.inputs))
        except Exception as error:  # ONNX Runtime raises errors of many classes
            raise UsageProblem(
                f"this graph does not run on images of {height}x{width} pixels: {first_line(error)}.",
                hint="Give another image size.",
                code="image-size",
            ) from error

    def parting(self, feeds: Feeds, allowed: float) -> Location:
        """Find the first difference between the original and the folded graph, in float32, by more than rounding."""
        from repaconv.verification.divergence_location import locate

        return locate(self._form(self.given).trace(), self.exact.trace(), [feeds], allowed=max(allowed, FLOAT32))

    def users_names(self, module: str) -> str:
        """Return the names unchanged: folding keeps the names of the user's graph."""
        return module

    @cached_property
    def _sampling_graph(self) -> onnx.ModelProto:
        """The graph from which random inputs are derived: the original, or the folded one if that is missing."""
        try:
            return self.given
        except Refused:
            return self.deploy

    def _comparison_inputs(self, spec: GraphSpec) -> list[Feeds]:
        """Make the inputs on which graphs are compared; see `batches_of`."""

        has, sizes = self.folded.sizes, [spec.size, spec.size]
        if spec.dynamic_size and spec.size:
            height, width = (has.other.get(side, size) for side, size in zip(has.sides, spec.size, strict=True))
            sizes[1] = height, width
        return batches_of(self._sampling_graph, self.folded, spec.batch, sizes)

    def _form(self, model: onnx.ModelProto, *, double: bool = False) -> GraphForm:
        has = self.folded
        batch = has.batch if isinstance(has.batch, int) and not has.whole else None
        return GraphForm(model, self.inputs, batch, double, self.decides, has.whole)


# Seeded random inputs


def random_graph_inputs(
    model: onnx.ModelProto,
    folded: GraphFold,
    count: int,
    seed: int,
    size: ImageSize | None = None,
    batch: int | None = None,
) -> Inputs:
    """Make seeded random inputs: ``count`` images, or ``count`` inferences if the graph takes no images.

    Args:
        model: The graph.
        folded: The result of the fold stage.
        count: Number of images or inferences.
        seed: Seed of the random generator.
        size: (height, width) of the images, the usual size when None.
        batch: Batch size of inferences without images, where it is dynamic.
    """
    if folded.image_size is None:
        name = f"{count} random inputs, seed {seed}"
        free = {folded.sizes.batch: batch} if batch and folded.sizes.batch else {}
        return Inputs(
            name, (count,), lambda at, _: Batch(_call_feeds(model, folded, seed, at, free), whole=True), whole=True
        )
    first = _image_at(model, folded, seed, 0, size)

    def piece(start: int, stop: int) -> Batch:
        every = [_image_at(model, folded, seed, number, size) for number in range(start, stop)]
        return Batch({_input_name(model): np.concatenate(every)}, whole=folded.whole)

    shape = (count, *first.shape[1:])
    return Inputs(f"{count} random images, seed {seed}", shape, piece, whole=folded.whole)


def batches_of(
    model: onnx.ModelProto, folded: GraphFold, batch: int | None, sizes: Sequence[ImageSize | None]
) -> list[Feeds]:
    """Make two calls on which graphs are compared, the second with more images if the batch is dynamic.

    Args:
        model: The graph.
        folded: The result of the fold stage.
        batch: Fixed batch size of the export, if there is one.
        sizes: (height, width) of the images of each call.
    """
    fixed = batch or (folded.batch if isinstance(folded.batch, int) else None)
    if folded.image_size is None:
        free = {folded.sizes.batch: fixed} if fixed and folded.sizes.batch else {}
        return [
            _call_feeds(model, folded, 0, 0, free),
            _call_feeds(model, folded, 0, 1, {**folded.sizes.other, **free}),
        ]
    counts = [fixed or 1, fixed or (1 if folded.whole else folded.sizes.other.get(folded.sizes.batch, 1))]
    return [
        {_input_name(model): np.concatenate([_image_at(model, folded, seed, n, size) for n in range(count)])}
        for seed, (count, size) in enumerate(zip(counts, sizes, strict=True))
    ]


def _input_name(model: onnx.ModelProto) -> str:
    from repaconv.verification.onnx_model_loading import inputs_of

    return inputs_of(model)[0].name


def _call_feeds(
    model: onnx.ModelProto, folded: GraphFold, seed: int, at: int, free: dict[str, int] | None = None
) -> Feeds:
    from repaconv.verification.probe_inputs import random_call

    sizes, own = {**folded.sizes.usual, **(free or {})}, folded.sizes
    return random_call(model, sizes, [seed, at], gain=own.gain, below=own.below, held=own.held, unit=own.unit)


def _image_at(model: onnx.ModelProto, folded: GraphFold, seed: int, at: int, size: ImageSize | None) -> np.ndarray:
    """One image [1, C, H, W]."""
    free = dict(zip(folded.sizes.sides, size or folded.image_size or (), strict=False))
    array: np.ndarray = next(iter(_call_feeds(model, folded, seed, at, free).values()))[:1]
    return array
