"""`verify`: compare every link of the verification chain, each by its own tolerance, and report all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import run_folder
from repaconv.core.errors import UsageProblem
from repaconv.core.export_variants import dotted
from repaconv.core.file_replacement import replace_artifact, require_replaceable, write_payload
from repaconv.core.files import lock_folder, payload_of
from repaconv.core.progress import Progress, silent
from repaconv.results import BuildArtefact, Link, Metrics, VerifyArtefact
from repaconv.sources.source_model import SourceModel, form_names
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.shared.engine_files import build_of
from repaconv.stages.shared.evaluation_images import without_evidence
from repaconv.stages.shared.exports_of_run import exports_of
from repaconv.stages.shared.input_selection import choose_inputs, scores_note
from repaconv.stages.shared.option_dataclasses import by_name
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.stages.shared.task_choice import settled, task_of, with_labels
from repaconv.stages.verify.link_to_unconverted_network import ParentLink, parent_link
from repaconv.stages.verify.options import VerifyOptions
from repaconv.stages.verify.verification_chain import Chain, PlannedLink, Rules, verification_chain
from repaconv.verification.rounding import float64_rounding, network_rounding

if TYPE_CHECKING:
    from repaconv.verification.input_batches import Batch, Inputs
    from repaconv.verification.rounding import Rounding


def verify_by(options: VerifyOptions, run: str | Path | None = None, *, progress: Progress = silent) -> VerifyArtefact:
    """Verify the folded model, its ONNX models and its engine against the training-time network in float64.

    All links run together over the images, batch by batch: memory does not grow with their number.

    Args:
        run: The run folder; the newest run when None.
        options: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Returns:
        The result. Its verdict is failed if a link failed, and not verified if none passed.

    Raises:
        EnvironmentProblem: If the runtime of ``engine`` is not installed.
        Refused: If the run, the checkpoint or an image is missing, or a file was changed since it was written.
        UsageProblem: If the run has no such link, the images are of a size that the network does not take, or repaconv
            did not write the file that would be replaced.
    """
    taken = run_folder.find_run(Path(run) if run else None)
    progress(f"verify: open {taken.folder}", 0, 0)
    with lock_folder(taken.folder):
        plan = _plan(options, taken)
        scale = _measured(plan, progress)
        links = _links(plan, progress)
        curves = _write_drift_plots(plan, links)
        artefact = _artefact(plan, links, curves, scale)
        replace_artifact(plan.path, artefact)
    took = [
        plan.source,
        plan.run.payload_of_fold(plan.source_model.folded),
        *dict.fromkeys(plan.chain.took),
        *([Path(options.inputs)] if options.inputs else []),
        *([Path(options.labels)] if options.labels else []),
    ]
    return with_files(artefact, took, [plan.path, *curves])


verify = by_name(verify_by, VerifyOptions)


class _Plan(NamedTuple):
    """The options resolved for one run: the source model, the images, and the links."""

    options: VerifyOptions
    run: run_folder.Run
    source_model: SourceModel
    source: Path
    given: Inputs
    built: BuildArtefact | None
    rules: Rules
    chain: Chain
    parent: ParentLink | None
    path: Path


def _plan(options: VerifyOptions, taken: run_folder.Run) -> _Plan:
    """Make every check that comes before anything is run."""
    from repaconv.verification.tolerances import require_links

    path = Path(options.out) if options.out else taken.verify_json
    require_replaceable(path, "verify")
    asked = {*(options.rtol or {}), *(options.atol or {})}
    require_links([*(options.rtol or {}), *(options.atol or {}), *options.require])
    source_model = source_model_of(taken, options.checkpoint)
    source = source_model.source  # a missing checkpoint is reported first
    exports = exports_of(taken, source_model.folded)
    given = choose_inputs(
        source_model,
        inputs=options.inputs,
        images=options.images,
        classes=options.classes,
        count=options.count,
        seed=options.seed,
        pixels=any(each.artefact.preprocessing for each in exports),
    )
    if given.size:
        source_model.require_size(*given.size)
    engine = Path(options.engine) if options.engine else None
    built = build_of(engine) if engine else None
    random_images = not (options.inputs or options.images)
    choice = task_of(source_model, options.task)
    if options.labels:
        folder = Path(options.images) if options.images else None
        known = settled(choice, source_model)
        given = with_labels(source_model, given, Path(options.labels), known, images=folder, count=options.count)
    rules = Rules(
        source_model,
        options.rtol,
        options.atol,
        random_images=random_images,
        count=options.count,
        seed=options.seed,
        task=options.task,
    )
    chain = verification_chain(source_model, exports, given, rules, engine, built)
    _require_used(asked, chain)
    parent = parent_link(source_model, random_images=random_images)
    return _Plan(options, taken, source_model, source, given, built, rules, chain, parent, path)


def _require_used(asked: set[str], chain: Chain) -> None:
    """Refuse a tolerance for a link that the run does not have.

    Raises:
        UsageProblem: If there is one.
    """
    exact = {step.name for step in chain.steps if step.compared.allowed.kind == "exact"}
    if unused := sorted(asked - exact - {link.name for link in chain.idle}):
        raise UsageProblem(
            f"there is no exact link {', '.join(unused)} in this run, so its tolerance has no effect.",
            hint=f"Exact links of this run: {', '.join(sorted(exact))}. onnx needs an export: repaconv export.",
            code="tolerance.idle",
        )


def _measured(plan: _Plan, progress: Progress) -> dict[str, Metrics]:
    """Run all candidates batch by batch; return the FP32 rounding error of the first batch."""
    scale: dict[str, Metrics] = {}
    source_model = plan.source_model
    for given, steps in _by_inputs(plan):
        links = "1 link" if len(steps) == 1 else f"{len(steps)} links"
        what, done = f"verify {links} on {given.name}", 0
        for batch in given.batches():
            progress(what, done, given.shape[0])
            feeds = batch.feeds(source_model.inputs)
            reference = source_model.reference.run(feeds)
            ways = network_rounding(source_model, feeds, reference), float64_rounding(source_model, feeds, reference)
            for step in steps:
                _add(plan, step, batch, reference, ways[step.name == "fold"])
            if given is plan.given and not done:
                single = source_model.single().run(feeds)
                original = form_names(source_model.folded)[1]
                scale = _for_scale(f"{original} in float32", single, reference, whole=batch.whole)
            if plan.parent and given is plan.given:
                plan.parent.add(batch)
            done += batch.count
        progress(what, done, given.shape[0])
    return scale


def _by_inputs(plan: _Plan) -> list[tuple[Inputs, list[PlannedLink]]]:
    """The links grouped by their images; those of the command come first and include the fold."""
    found: dict[int, tuple[Inputs, list[PlannedLink]]] = {id(plan.given): (plan.given, [])}
    for step in plan.chain.steps:
        found.setdefault(id(step.inputs), (step.inputs, []))[1].append(step)
    return list(found.values())


def _add(plan: _Plan, step: PlannedLink, batch: Batch, reference: Mapping[str, Any], rounding: Rounding) -> None:
    """Add one batch to one link."""
    asked = step.name in {*(plan.options.rtol or {}), *(plan.options.atol or {})}
    # reference and candidate of the fold are in float64, where rounding changes no top-1 prediction
    settled = step.name == "fold" or step.compared.allowed.kind == "lossy"
    step.compared.add(
        step.run(batch),
        reference,
        labels=batch.labels,
        undecided=None if settled else plan.source_model.exact.undecided,
        whole=batch.whole,
        rounding=None if asked else rounding,
        truths=batch.truths,
    )


def _for_scale(
    name: str, single: Mapping[str, Any], reference: Mapping[str, Any], *, whole: bool
) -> dict[str, Metrics]:
    """The FP32 rounding error of every numeric output, reported for comparison."""
    from repaconv.results import Tolerance
    from repaconv.verification.comparison import Comparison

    found = Comparison(name, Tolerance(kind="exact", rtol=0.0))
    found.add(single, reference, whole=whole)
    ends = ((link.candidate.partition(", "), link.metrics) for link in found.links("onnx", "float64"))
    return {f"{form} against float64{comma}{output}": seen for (form, comma, output), seen in ends if seen}


def _links(plan: _Plan, progress: Progress) -> list[Link]:
    """All links with their verdicts, in the order of the policy."""
    from repaconv.verification.tolerances import LINKS

    compared = (link for step in plan.chain.steps for link in _compared_outputs(step, plan, progress))
    links = [*compared, *plan.chain.idle, *([plan.parent.link()] if plan.parent else [])]
    there = {link.name for link in links}
    lacking = (name for name in plan.options.require if name not in there)
    links += [plan.rules.idle(name, name, _why_absent(name)) for name in lacking]
    links = [_required(link) if link.name in plan.options.require else link for link in links]
    links = [_as_built(link, plan.built) if link.name == "engine" else link for link in links]
    return sorted(links, key=lambda link: LINKS.index(link.name))


def _why_absent(link: str) -> str:
    """Why a required link has nothing to compare, with what would make it."""
    from repaconv.verification.tolerances import LOSSY

    precision = "fp32" if link == "onnx" else link if link in LOSSY else ""
    return f"the run has no export in {precision}" if precision else "there is nothing to run"


def _compared_outputs(step: PlannedLink, plan: _Plan, progress: Progress) -> Iterator[Link]:
    """One link for every output; if it fails, with the layer at which it first differs."""
    from repaconv.verification.divergence_location import broken

    lossy = step.compared.allowed.kind == "lossy"
    links = step.compared.links(step.name, plan.rules.reference, step.note)
    for link, worst in zip(links, step.compared.worst.values(), strict=True):
        own = "" if step.inputs is plan.given else step.inputs.name
        link = link.model_copy(update={"variant": step.variant, "sha256": step.sha256, "inputs": own})
        if link.verdict == "failed" or lossy or (plan.options.drift and step.name != "recorded"):
            progress(f"verify: follow {step.name} layer by layer", 0, 0)
            where = step.locate(step.inputs.piece(worst, worst + 1).feeds(plan.source_model.inputs))
            where = where.model_copy(update={"module": plan.source_model.users_names(where.module)})
            if link.verdict == "passed" and not lossy:  # an intermediate value of small scale
                where = where.model_copy(update={"module": "", "reason": "the link passes"})
            link = broken(link, where) if lossy else link.model_copy(update={"location": where})
        link = _not_on_gpu_alone(link) if step.nodes_on_cpu and step.name in plan.options.require else link
        yield without_evidence(link, step.no_evidence) if step.no_evidence else link


def _not_on_gpu_alone(link: Link) -> Link:
    """Fail a required link that the GPU did not compute alone."""
    return link.because("required", "of the GPU, which did not run all of it")


def _as_built(link: Link, built: BuildArtefact | None) -> Link:
    """Fail the link of an engine whose build failed."""
    if built is None or built.verdict != "failed":
        return link
    return link.because("build_failed")


def _required(link: Link) -> Link:
    if link.verdict != "not verified":
        return link
    return link.because("required", "not verified")


def _write_drift_plots(plan: _Plan, links: Sequence[Link]) -> list[Path]:
    """Draw the drift of the links, next to the result; another name of the result is part of theirs."""
    from repaconv.verification.drift_plot import drift_svg

    own = "" if plan.path == plan.run.verify_json else f"{plan.path.stem}."
    curves = {
        plan.path.with_name(f"{own}drift-{link.name}{dotted(link.variant)}.svg"): link
        for link in links
        if link.location and link.location.drift
    }
    require_replaceable(plan.path, "verify", *curves)
    for path, link in curves.items():
        write_payload(path, drift_svg(link))
    return list(curves)


def _artefact(plan: _Plan, links: Sequence[Link], curves: Sequence[Path], scale: dict[str, Metrics]) -> VerifyArtefact:
    from repaconv.verification.tolerances import POLICY_VERSION, verdict_of

    folded, given = plan.source_model.folded, plan.given
    every = [inputs for inputs, _ in _by_inputs(plan)]
    lossy = [step.inputs for step in plan.chain.steps if step.compared.allowed.kind == "lossy"]
    labels = [given.labels, *(scores_note(plan.source_model, each, plan.options.task) for each in lossy)]
    return VerifyArtefact(
        made_by=made_by("torch", "onnxruntime"),
        verdict=verdict_of(links),
        unverified=folded.unverified,
        options=plan.options.words(),
        other_files=tuple(payload_of(path, plan.path.parent) for path in curves),
        policy=POLICY_VERSION,
        inputs=given.name,
        input_shape=given.shape,
        model_sha256=folded.payload.sha256,
        required=tuple(plan.options.require),
        labels="; ".join(dict.fromkeys(filter(None, labels))),
        preprocessing="; ".join(dict.fromkeys(each.preprocessing for each in every if each.preprocessing)),
        claims=folded.claims,
        links=tuple(links),
        for_scale=scale,
    )
