"""The verification chain of a run: its links, each with its candidate, its tolerance, and how it is diagnosed."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.benchmark.cpu_isa_level import int8_saturates
from repaconv.core import run_folder
from repaconv.core.errors import EnvironmentProblem, UsageProblem, first_names
from repaconv.core.files import sha256_of
from repaconv.engines.contract import GpuSession
from repaconv.results import BuildArtefact, ExportArtefact, Link, Location, Tolerance
from repaconv.sources.source_model import reference_name
from repaconv.sources.verified_onnx_export import BF16_NOTE, runnable
from repaconv.stages.shared.engine_files import open_engine
from repaconv.stages.shared.evaluation_images import NO_IMAGES, evaluation_images
from repaconv.stages.shared.exports_of_run import Export
from repaconv.stages.shared.input_selection import choose_inputs, other_batch, scores_output
from repaconv.stages.shared.lower_precision import loader_for
from repaconv.stages.shared.task_choice import evaluation_of
from repaconv.stages.verify.layer_divergence import ENGINE, RECORDED, within_engine, within_graph
from repaconv.verification.comparison import Comparison
from repaconv.verification.model_runners import channels_first

if TYPE_CHECKING:
    from repaconv.engines.contract import Feeds, Session
    from repaconv.sources.source_model import SourceModel
    from repaconv.verification.input_batches import Batch, Inputs

ONNX_LABEL = "ONNX under ONNX Runtime"
CLIPPED_NOTE = "its int8 weights have 8 bits, whose products saturate on this CPU, which has no VNNI: export it here"
MOST_NAMED_NODES = 8
"""Most CPU nodes that a link names."""
NORMALIZED = "and these images are already normalized"


@dataclass(frozen=True)
class PlannedLink:
    """One link to be run: the candidate, its inputs, and the comparison.

    Attributes:
        name: Name of the link.
        inputs: The images that it is run on.
        compared: The comparison: the candidate's name, the tolerance, and what was measured so far.
        run: Returns the candidate's outputs for a batch, by name.
        locate: Finds where the outputs for one image first differ.
        note: A note on the candidate.
        variant: Variant of the export, if it belongs to one.
        sha256: Hash of its file.
        nodes_on_cpu: Nodes that the CPU computes in place of the GPU; a required link must not have any.
        no_evidence: Why it is not verified even if it passes; empty usually.
    """

    name: str
    inputs: Inputs
    compared: Comparison
    run: Callable[[Batch], Mapping[str, Any]]
    locate: Callable[[Feeds], Location]
    note: str = ""
    variant: str = ""
    sha256: str = ""
    nodes_on_cpu: tuple[str, ...] = ()
    no_evidence: str = ""


class Source(NamedTuple):
    """The images of a link, and their file.

    ``why_unusable`` says why they cannot be used, ``no_evidence`` why a pass on them shows nothing; both are
    usually empty.
    """

    inputs: Inputs
    why_unusable: str = ""
    no_evidence: str = ""
    took: tuple[Path, ...] = ()


class Chain(NamedTuple):
    """The links that can be run, those that cannot with the reason, and the files that are used."""

    steps: tuple[PlannedLink, ...]
    idle: tuple[Link, ...] = ()
    took: tuple[Path, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Chain]) -> Chain:
        """Concatenate chains."""
        every = list(parts)
        return cls(*(tuple(one for part in every for one in part[place]) for place in range(3)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Rules:
    """The tolerances of a run's links: the policy for its network, and the user's own by link.

    With ``random_images``, of this ``seed``, lossy links are evaluated on the images of their export instead, at most
    ``count`` of them. ``read`` caches these images. ``task`` is ``--task``.
    """

    source_model: SourceModel
    rtol: Mapping[str, float] | None = None
    atol: Mapping[str, float] | None = None
    random_images: bool = False
    count: int | None = None
    seed: int = 0
    task: str | None = None
    read: dict[tuple[Any, Any], Inputs | str] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """The name of the reference of all links."""
        return reference_name(self.source_model.folded)

    def idle(self, name: str, candidate: str, why_not: str) -> Link:
        """A link that cannot be run, and why."""
        from repaconv.verification.comparison import not_verified

        return not_verified(name, self.reference, candidate, why_not)

    def compared(self, candidate: str, name: str, given: Inputs, precision: str = "fp32") -> Comparison:
        """The comparison of a link on these images, whose candidate computes in ``precision``."""
        scores, lossy = scores_output(self.source_model, given, self.task), name if precision == "fp32" else precision
        evaluation = evaluation_of(self.source_model, lossy, given.size, self.task)
        return Comparison(candidate, self.allowed(name, precision, logits=bool(scores)), scores, evaluation=evaluation)

    def allowed(self, name: str, precision: str = "fp32", *, logits: bool = True) -> Tolerance:
        """The tolerance of a link; ``logits`` says whether its output is class scores."""
        from repaconv.verification.tolerances import tolerance

        own = not (name == "preprocessing" and precision != "fp32")
        return tolerance(
            name,
            precision=precision,
            logits=logits,
            decides=self.source_model.decides,
            usual=self.source_model.folded.tolerances,
            reasons=self.source_model.folded.tolerance_reasons,
            rtol=self.rtol if own else None,
            atol=self.atol if own else None,
        )


def verification_chain(
    source_model: SourceModel,
    exports: Sequence[Export],
    given: Inputs,
    rules: Rules,
    engine: Path | None,
    built: BuildArtefact | None,
) -> Chain:
    """The verification chain of a run.

    The fold comes first: it finds the images whose top-1 prediction depends on rounding, and the other links use that.
    """
    of_exports = [_of_export(source_model, export, given, rules) for export in exports]
    of_engine = [_of_engine(source_model, exports, engine, built, given, rules)] if engine is not None else []
    return Chain.of([_of_forms(source_model, given, rules), *of_exports, *of_engine])


def _source(rules: Rules, given: Inputs, exported: ExportArtefact | None, precision: str) -> Source:
    """The images of a link; a lossy one is run on the images of its export unless others are given."""
    if not rules.random_images:
        return Source(given)
    if precision == "fp32":
        return Source(_at_size_of(rules, given, exported))
    if exported is None or exported.images is None:
        return Source(_at_size_of(rules, given, exported), no_evidence=NO_IMAGES)
    known = exported.images, exported.image_size
    if known not in rules.read:
        rules.read[known] = evaluation_images(rules.source_model, exported, most=rules.count)
    found = rules.read[known]
    if isinstance(found, str):
        return Source(given, why_unusable=found)
    path = Path(exported.images.path)
    return Source(found, took=(path,) if path.is_file() else ())


def _at_size_of(rules: Rules, given: Inputs, exported: ExportArtefact | None) -> Inputs:
    """Random images of the size that an ONNX model takes; the given ones if it takes them."""
    size = exported.image_size if exported else None
    if not isinstance(size, tuple) or given.size in (None, size):
        return given
    return choose_inputs(rules.source_model, count=rules.count, seed=rules.seed, size=size, pixels=_has_pixels(given))


def _in_batches(source: Source, rules: Rules, batch: int | None) -> Source:
    """The same, in inferences of a fixed batch size, where outputs are compared as a whole."""
    source_model, given = rules.source_model, source.inputs
    if not source_model.folded.whole or batch is None:
        return source
    if given.size is None and rules.random_images and other_batch(given, source_model, batch):
        return source._replace(inputs=choose_inputs(source_model, count=rules.count, seed=rules.seed, batch=batch))
    return source._replace(inputs=given.together(batch))


def _of_forms(source_model: SourceModel, given: Inputs, rules: Rules) -> Chain:
    """The links of the network's own forms, and of its recorded output."""
    from repaconv.verification.divergence_location import locate

    tight, stored = rules.allowed("fold"), rules.allowed("stored")

    def stored_apart(feeds: Feeds) -> Location:
        return locate(source_model.exact.trace(), source_model.stored.trace(), [feeds], allowed=stored.rtol or 0.0)

    steps = [
        PlannedLink(
            "fold",
            given,
            rules.compared("folded, float64", "fold", given),
            lambda batch: source_model.exact.run(batch.feeds(source_model.inputs)),
            lambda feeds: source_model.parting(feeds, tight.rtol or 0.0),
        ),
        PlannedLink(
            "stored",
            given,
            rules.compared("folded as stored, float32", "stored", given),
            lambda batch: source_model.stored.run(batch.feeds(source_model.inputs)),
            stored_apart,
        ),
    ]
    if given.recorded:
        official = f"official output ({given.recorded})"
        recorded = rules.compared(official, "recorded", given)
        steps.append(PlannedLink("recorded", given, recorded, lambda batch: batch.recorded or {}, lambda _: RECORDED))
    return Chain(tuple(steps))


def _of_export(source_model: SourceModel, export: Export, given: Inputs, rules: Rules) -> Chain:
    """The links of an ONNX model, or the reason why it cannot be run on these images."""
    exported, _, variant = export
    path = run_folder.onnx_model_of(source_model.run, exported)
    name = "onnx" if exported.precision == "fp32" else exported.precision
    label = f"{ONNX_LABEL}, {variant.name}" if variant.name else ONNX_LABEL

    def idle(link: str, why_not: str) -> Link:
        of = {"variant": variant.name, "sha256": exported.payload.sha256}
        return rules.idle(link, label, why_not).model_copy(update=of)

    source = _in_batches(_source(rules, given, exported, exported.precision), rules, _fixed(exported.batch))
    if why_not := source.why_unusable or _cannot_take(exported, source.inputs, source_model):
        return Chain((), (idle(name, why_not),), (path,))
    ways = _graph_steps(source_model, exported, path, name, label, rules, source.inputs)
    left: tuple[Link, ...] = ()
    if len(ways) > 1 and not _has_pixels(source.inputs):
        left = (idle(ways.pop().name, f"the graph takes pixels, {NORMALIZED}"),)
    sha256 = exported.payload.sha256
    steps = tuple(replace(step, variant=variant.name, sha256=sha256, no_evidence=source.no_evidence) for step in ways)
    return Chain(steps, left, (path, *source.took))


def _graph_steps(
    source_model: SourceModel, exported: ExportArtefact, path: Path, name: str, label: str, rules: Rules, given: Inputs
) -> list[PlannedLink]:
    """The links of an ONNX model, without its preprocessing and, if it has one, with it."""
    import onnx

    from repaconv.onnx_export.preprocessing_nodes import SCOPE, without_preprocessing

    typed, load = exported.precision == "bf16", loader_for(exported.architecture, exported.precision)
    whole = load(runnable(onnx.load(path), "bf16").SerializeToString() if typed else path)
    core = whole
    if exported.preprocessing:
        bare = runnable(without_preprocessing(onnx.load(path, load_external_data=False)), exported.precision)
        core = load(bare.SerializeToString(), path.parent)
    batch = None if source_model.folded.whole else _fixed(exported.batch)
    note, compared = BF16_NOTE if typed else _clipped(exported, path), rules.compared(label, name, given)

    def followed(feeds: Feeds) -> Location:
        return within_graph(source_model, exported, path, feeds, compared.allowed)

    steps = [PlannedLink(name, given, compared, _running(core, batch), followed, note)]
    if exported.preprocessing:
        # a lossy link that names a module counts as broken there
        scope = SCOPE if name == "onnx" else ""
        where = Location(module=scope, reason=f"the graph after it is compared by the link {name}")
        seen = rules.compared(f"{label}, from pixels", "preprocessing", given, exported.precision)
        steps.append(PlannedLink("preprocessing", given, seen, _running(whole, batch), lambda _: where, note))
    return steps


def _clipped(exported: ExportArtefact, path: Path) -> str:
    """A note on an INT8 model whose products saturate on this CPU; empty if they do not."""
    import onnx

    from repaconv.onnx_export.fp16_and_int8 import has_8_bit_weights

    here = exported.precision == "int8" and exported.architecture == platform.machine()
    wide = here and int8_saturates(exported.architecture) and has_8_bit_weights(onnx.load(path))
    return CLIPPED_NOTE if wide else ""


def _of_engine(
    source_model: SourceModel,
    exports: Sequence[Export],
    engine: Path,
    built: BuildArtefact | None,
    given: Inputs,
    rules: Rules,
) -> Chain:
    """The link of an engine, run with its own batch size, and on pixels if it takes them.

    Raises:
        UsageProblem: If it takes images of another size or kind.
    """
    try:
        model = open_engine(engine, built, threads=1)
    except EnvironmentProblem as problem:
        return Chain((), (rules.idle("engine", engine.name, f"{problem.message} {problem.hint}".strip()),), (engine,))
    precision = built.precision if built else "fp32"
    source = next((each for each in exports if built and each.artefact.payload.sha256 == built.onnx_sha256), None)
    given, why_unusable, no_evidence, took = _source(rules, given, source.artefact if source else None, precision)
    if why_unusable:
        return Chain((), (rules.idle("engine", engine.name, why_unusable),), (engine,))
    first = model.inputs[0]
    shape, pixels = channels_first(first), first.dtype == "uint8" and given.size is not None
    fixed = _fixed(shape[0] if shape else None)
    given = _in_batches(Source(given), rules, fixed).inputs
    if given.whole and (why_unusable := other_batch(given, source_model, fixed)):
        return Chain((), (rules.idle("engine", engine.name, why_unusable),), (engine,))
    if any(isinstance(has, int) and has != is_ for has, is_ in zip(shape[1:], given.shape[1:], strict=False)):
        raise UsageProblem(
            f"{engine} takes images of {list(shape[1:])}, these are of {list(given.shape[1:])}.",
            hint="Give --inputs or --images of that size.",
            code="inputs.shape",
        )
    if pixels and not _has_pixels(given):
        raise UsageProblem(
            f"{engine} takes pixels, {NORMALIZED}.",
            hint="Give --images, or neither --images nor --inputs.",
            code="inputs.pixels",
        )
    compared = rules.compared(engine.name, "engine", given, precision)
    run = _running(model, None if given.whole else fixed)
    first_call = given.piece(0, fixed or 1).feeds(model.inputs)
    on_cpu = model.nodes_on_cpu(first_call) if isinstance(model, GpuSession) else ()
    note = f"on the CPU: {first_names(on_cpu, MOST_NAMED_NODES)}" if on_cpu else ""

    def followed(feeds: Feeds) -> Location:
        right = all(link.verdict == "passed" for link in compared.links("engine", rules.reference))
        if right or built is None or source is None:
            return ENGINE
        return within_engine(source_model, source, built.target, built.precision, feeds, compared.allowed)

    sha256 = sha256_of(engine)
    step = PlannedLink(
        "engine", given, compared, run, followed, note, sha256=sha256, nodes_on_cpu=on_cpu, no_evidence=no_evidence
    )
    return Chain((step,), (), (engine, *took))


def _running(session: Session, batch: int | None) -> Callable[[Batch], Mapping[str, Any]]:
    """A function that runs a session on a batch of images."""
    from repaconv.verification.model_runners import FixedBatch

    runner = FixedBatch(session, batch)
    return lambda piece: runner.run(piece.feeds(session.inputs))


def _fixed(batch: int | str | None) -> int | None:
    """The fixed batch size; None if it is dynamic."""
    return batch if isinstance(batch, int) else None


def _cannot_take(exported: ExportArtefact, given: Inputs, source_model: SourceModel) -> str:
    """Why a graph cannot take these inputs; empty if it can."""
    if source_model.folded.whole and (why_not := other_batch(given, source_model, _fixed(exported.batch))):
        return why_not
    if exported.image_size in (None, "dynamic", given.size) or not exported.image_size:
        return ""
    only, these = ("x".join(map(str, size)) for size in (exported.image_size, given.size or ()))
    return f"the graph takes images of {only} pixels only, these are of {these}"


def _has_pixels(given: Inputs) -> bool:
    return given.piece(0, 1).pixels is not None
