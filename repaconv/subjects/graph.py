"""An ONNX graph of any origin as what a run is of: the graph as given is its reference, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from repaconv import runs
from repaconv.artefacts import ClassScores, GraphFold, ImageSize, Location
from repaconv.engines.contract import Feeds, Network, Port
from repaconv.errors import Refused, UsageProblem
from repaconv.progress import Progress
from repaconv.proof.policy import FLOAT32
from repaconv.subjects.evaluated import Evaluated
from repaconv.subjects.fitting import fitted
from repaconv.subjects.given import folded, in_single, inputs_of, loaded
from repaconv.subjects.graph_forms import GraphForm
from repaconv.subjects.opsets import to_oldest
from repaconv.subjects.origin import source_of
from repaconv.subjects.proved import EXPORTED, Graph, Judge, Proving, finished
from repaconv.subjects.subject import DEPLOY, GraphSpec

if TYPE_CHECKING:
    import onnx

    from repaconv.proof.data import Inputs


@dataclass(frozen=True)
class GraphSubject:
    """See `repaconv.subjects.subject.Subject`.

    Whatever asks for the graph as given raises `Refused` if it, or the folded graph, is gone or changed.
    """

    run: runs.Run
    folded: GraphFold
    checkpoint: str | Path | None = None

    @property
    def scores(self) -> ClassScores | None:
        """By --set, its name or its shape: a graph does not tell what its outputs mean."""
        return self.folded.scores

    @property
    def official(self) -> tuple[str, ...]:
        """As it was given."""
        return ()

    @property
    def by_module(self) -> bool:
        """Values have names in it, modules none."""
        return False

    @cached_property
    def source(self) -> Path:
        """The graph as given."""
        return source_of(self.folded, self.checkpoint)

    @cached_property
    def inputs(self) -> tuple[Port, ...]:
        """The graph's own."""
        return inputs_of(self.deploy)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The graph's own."""
        return tuple(value.name for value in self.deploy.graph.output)

    @cached_property
    def decides(self) -> bool:
        """By its operators."""
        from repaconv.graphs.deciding import decides

        return decides(self.deploy)

    @cached_property
    def reference(self) -> GraphForm:
        """The graph as given, in float64 where something evaluates that."""
        return self._form(self.given, double=bool(self.folded.float64))

    @cached_property
    def exact(self) -> GraphForm:
        """Folded again, with its constants in float64; the reference's like where nothing evaluates that."""
        from repaconv.graphs.retyping import unsupported
        from repaconv.proof.float64 import WIDER, widened

        double = bool(self.folded.float64)
        known = to_oldest(Evaluated(self.given)).graph.model if self.folded.changes else self.given
        given = widened(known) if double else known  # ONNX's converter writes float32 into a float64 graph
        if not self.folded.changes:
            return self._form(given, double=double)
        typed = not (double and unsupported(known, WIDER))
        return self._form(folded(self.source, given, self.folded.reverted, typed=typed)[0], double=double)

    @property
    def as_exported(self) -> GraphForm | None:
        """None: the graph as given is the reference."""
        return None

    @cached_property
    def stored(self) -> GraphForm:
        """The folded graph under ONNX Runtime."""
        return self._form(self.deploy)

    @cached_property
    def given(self) -> onnx.ModelProto:
        """The graph as given, with its weights; in float32 where it is of half precision."""
        return in_single(loaded(self.source))

    @cached_property
    def deploy(self) -> onnx.ModelProto:
        """The folded graph, likewise."""
        return in_single(loaded(self.run.payload(self.folded.payload)))

    def single(self) -> GraphForm:
        """The graph as given under ONNX Runtime."""
        return self._form(self.given)

    def network(self, form: str) -> Network:
        """There is none.

        Raises:
            UsageProblem: Always.
        """
        raise UsageProblem(
            f"{self.run.folder} is of an ONNX graph, and this target's runtime runs torch modules.",
            hint="Give a target that runs graphs, as --target x86-64.",
            code="run.no-module",
        )

    def graph(self, form: str, spec: GraphSpec, *, scratch: Path, progress: Progress) -> Graph:
        """The graph in the opset, batch and size that are wanted, and in its form."""
        from repaconv.exporters.to_onnx import check

        ways = Proving(form, spec, self.folded.tolerances, scratch, progress, self.decides)
        base = self.stored if form == DEPLOY else self._form(self.given)
        progress(f"{form}: ONNX Runtime", 0, 0)
        model, note = fitted(base.model, self.folded, spec)
        check(model)
        exact = self._form(base.model, double=True) if self.folded.float64 else None
        judge = Judge.of(base, self._calls(spec), ways, whole=self.folded.whole, exact=exact)
        before = judge.run(model)
        called = f"{form} as {'stored' if form == DEPLOY else 'given'}"
        link = judge.link("exported", (called, EXPORTED), before)
        link = judge.located(link, base.trace(), model, by_module=False)
        link = link.model_copy(update={"note": "; ".join(filter(None, [link.note, note]))})
        return finished(Graph(model, (link,), "none", False, None), judge._replace(expected=before))

    def free_sizes(self, batch: int) -> dict[str, int]:
        """The usual ones, and that batch."""
        sizes = self.folded.sizes
        return {**sizes.usual, **({sizes.batch: batch} if sizes.batch else {})}

    def drawn(self, count: int, seed: int, size: ImageSize | None = None, *, batch: int | None = None) -> Inputs:
        """What its first operators expect: pixels, indices, masks, or standard normal numbers."""
        from repaconv.subjects.drawing import drawn_inputs

        return drawn_inputs(self._drawn_by, self.folded, count, seed, size, batch)

    def require_size(self, height: int, width: int) -> None:
        """Refuse images of another size where that is fixed.

        Raises:
            UsageProblem: Naming the size.
        """
        if self.folded.any_image_size or self.folded.image_size == (height, width):
            return
        size = self.folded.image_size
        told = f"takes images of {size[0]}x{size[1]} pixels only" if size else "does not take one input of images"
        raise UsageProblem(f"this graph {told}.", hint="Leave --image-size out.", code="image-size")

    def parting(self, feeds: Feeds, allowed: float) -> Location:
        """Followed in float32: what a fold does wrong is more than rounding."""
        from repaconv.proof.locate import locate

        return locate(self._form(self.given).trace(), self.exact.trace(), feeds, allowed=max(allowed, FLOAT32))

    def users_names(self, module: str) -> str:
        """The graph's names are the user's."""
        return module

    @cached_property
    def _drawn_by(self) -> onnx.ModelProto:
        """The graph whose first operators say what its inputs are; the folded one where the other is gone."""
        try:
            return self.given
        except Refused:
            return self.deploy

    def _calls(self, spec: GraphSpec) -> list[Feeds]:
        """Those on which graphs are compared: of one image and of three where the batch is free."""
        from repaconv.subjects.drawing import batches_of

        has, sizes = self.folded.sizes, [spec.size, spec.size]
        if spec.free_size and spec.size:
            height, width = (has.other.get(side, size) for side, size in zip(has.sides, spec.size, strict=True))
            sizes[1] = height, width
        return batches_of(self._drawn_by, self.folded, spec.batch, sizes)

    def _form(self, model: onnx.ModelProto, *, double: bool = False) -> GraphForm:
        has = self.folded
        batch = has.batch if isinstance(has.batch, int) and not has.whole else None
        return GraphForm(model, self.inputs, batch, double, self.decides, has.whole)
