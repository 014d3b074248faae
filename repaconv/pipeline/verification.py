"""verify: every link of the chain whose two ends exist, each by its own tolerance, all of them reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv import registry, runs
from repaconv.artefacts import BuildArtefact, FoldArtefact, Link, VerifyArtefact
from repaconv.errors import Refused, UsageProblem
from repaconv.files import payload_of, read_artefact, write_text
from repaconv.replacing import put, require_ours
from repaconv.steps.asked import as_typed
from repaconv.steps.chain import REFERENCE, Net, Step, net_of, steps_of, users_names
from repaconv.steps.common import (
    Progress,
    made_by,
    require_size,
    silent,
    with_files,
)
from repaconv.steps.engines import built_as
from repaconv.steps.exports import exports_of
from repaconv.steps.inputs import choose_inputs
from repaconv.variants import dotted

if TYPE_CHECKING:
    from repaconv.proof.data import Inputs
    from repaconv.proof.parity import Meter


def verify(
    run: str | Path | None = None,
    *,
    inputs: str | Path | None = None,
    images: str | Path | None = None,
    classes: str | Path | None = None,
    checkpoint: str | Path | None = None,
    count: int | None = None,
    seed: int = 0,
    rtol: Mapping[str, float] | None = None,
    atol: Mapping[str, float] | None = None,
    require: Sequence[str] = (),
    engine: str | Path | None = None,
    drift: bool = False,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> VerifyArtefact:
    """Prove the folded model, its ONNX models and its engine against the float64 training form.

    All links run side by side over the images, batch by batch: memory does not grow with their number.

    Args:
        run: The run's folder; the newest when None.
        inputs: .npz with ``input`` [N, C, H, W] and, where recorded, the official output and ``labels`` [N].
        images: A folder of images, or of folders of them named by class.
        classes: A file with one class name a line, where the folders' alphabetical order is not the classes'.
        checkpoint: Where the checkpoint is now, if it has moved.
        count: How many random images, or images of the folder.
        seed: Of the random images.
        rtol: Relative tolerances by link, in place of the policy's.
        atol: Absolute ones; where both are given, either suffices.
        require: Links that must have been run: one that is not verified is then a failure.
        engine: An engine that was built from this run's ONNX model, to be loaded by its runtime and run; the ``.json``
            beside it says in which precision.
        drift: Follow the drift through the network for links that pass, too.
        out: Where the result goes; ``verify.json`` in the run's folder when None.
        progress: See `Progress`.

    Returns:
        The artefact; its verdict is failed if any link's is, and not verified where none passed.
    """
    from repaconv.proof import parity, policy, verdicts
    from repaconv.proof.curve import drift_svg
    from repaconv.proof.runners import decides

    taken = runs.find_run(Path(run) if run else None)
    target = Path(out) if out else taken.verify_json
    require_ours(target, "verify")
    folded = read_artefact(taken.fold_json, FoldArtefact)
    policy.require_links([*(rtol or {}), *(atol or {}), *require])
    net = net_of(taken, folded, checkpoint)
    config = net.form.config
    exports = exports_of(taken, folded)
    pixels = any(each.artefact.preprocessing for each in exports)
    given = choose_inputs(
        folded, config, inputs=inputs, images=images, classes=classes, count=count, seed=seed, pixels=pixels
    )
    backbone = registry.load(registry.BACKBONES, folded.backbone)
    require_size(backbone, config, *given.shape[2:])
    logits, choosing = folded.output == "logits", decides(net.fold.module)

    built = built_as(Path(engine)) if engine else None

    def meter(name: str, precision: str = "fp32") -> Meter:
        own = not (name == "preprocessing" and precision != "fp32")
        allowed = policy.tolerance(
            name,
            precision=precision,
            logits=logits,
            decides=choosing,
            usual=folded.tolerances,
            rtol=rtol if own else None,
            atol=atol if own else None,
        )
        return parity.Meter(allowed, logits=logits)

    steps, idle, took = steps_of(net, exports, given, meter, Path(engine) if engine else None, built)
    _require_used({*(rtol or {}), *(atol or {})}, steps, idle)
    scale = _over(given, net, steps, logits, progress)
    links = [*(_judged(step, given, net, follow=drift) for step in steps), *idle]
    links += [
        parity.not_verified(name, REFERENCE, name, "there is nothing to run")
        for name in require
        if name not in {link.name for link in links}
    ]
    links = [_required(link) if link.name in require else link for link in links]
    links = [_as_built(link, built) if link.name == "engine" else link for link in links]
    links.sort(key=lambda link: policy.LINKS.index(link.name))
    curves = {_curve(target, taken, link): link for link in links if link.location and link.location.drift}
    require_ours(target, "verify", *curves)
    for path, link in curves.items():
        write_text(path, drift_svg(link))
    artefact = VerifyArtefact(
        made_by=made_by("torch", "onnxruntime"),
        verdict=verdicts.verdict_of(links),
        unverified=folded.unverified,
        asked=as_typed(
            verify,
            inputs=inputs,
            images=images,
            classes=classes,
            checkpoint=checkpoint,
            count=count,
            seed=seed,
            rtol=rtol,
            atol=atol,
            require=require,
            engine=engine,
            drift=drift,
        ),
        beside=tuple(payload_of(path, target.parent) for path in curves),
        policy=policy.POLICY,
        inputs=given.name,
        input_shape=given.shape,
        model_sha256=folded.payload.sha256,
        required=tuple(require),
        labels=given.labels,
        preprocessing=given.preprocessing,
        claims=folded.claims,
        links=tuple(links),
        for_scale=scale,
    )
    put(target, artefact)
    took = [net.source, taken.model, *took, *([Path(inputs)] if inputs else [])]
    return with_files(artefact, took, [target, *curves])


def _over(given: Inputs, net: Net, steps: Sequence[Step], logits: bool, progress: Progress) -> dict[str, Any]:
    """Run all ends batch by batch; what is measured for scale is so on the first batch alone."""
    from repaconv.proof.parity import measure
    from repaconv.proof.runners import TorchRunner

    scale: dict[str, Any] = {}
    done = 0
    for batch in given.batches():
        progress("verify", done, given.shape[0])
        reference = net.training.run(batch.images)
        for step in steps:
            output = step.run(batch)
            if output.shape != reference.shape:
                raise Refused(
                    f"the {step.candidate} has shape {list(output.shape)}, the network gives {list(reference.shape)}.",
                    hint="Take the input, the output and the engine of this very checkpoint.",
                    code="inputs.shape",
                )
            undecided = net.fold.undecided if step.meter.tolerance.kind == "exact" else None
            if step.name == "fold":  # both in float64, where rounding decides nothing
                undecided = None
            step.meter.add(output, reference, labels=batch.labels, undecided=undecided)
        if not done:
            single = TorchRunner(net.form.module(), net.form.tensors, double=False)
            name = "training form in float32 against float64"
            scale[name] = measure(single.run(batch.images), reference, logits=logits)
        done += len(batch.images)
    progress("verify", done, given.shape[0])
    return scale


def _judged(step: Step, given: Inputs, net: Net, *, follow: bool) -> Link:
    from repaconv.proof.locate import broken

    link = step.meter.link(step.name, REFERENCE, step.candidate, step.note)
    link = link.model_copy(update={"variant": step.variant, "sha256": step.sha256})
    lossy = step.meter.tolerance.kind == "lossy"
    if link.verdict == "failed" or lossy or (follow and step.name != "recorded"):
        worst = step.meter.worst
        where = step.locate(given.piece(worst, worst + 1).images)
        where = where.model_copy(update={"module": users_names(net, where.module)})
        if link.verdict == "passed" and not lossy:  # some value on the way has a small scale; that is no fault
            where = where.model_copy(update={"module": "", "reason": "the link passes"})
        link = broken(link, where) if lossy else link.model_copy(update={"location": where})
    return link


def _require_used(given: set[str], steps: Sequence[Step], idle: Sequence[Link]) -> None:
    """Refuse a tolerance of a link that is not there.

    Raises:
        UsageProblem: Naming it.
    """
    exact = {step.name for step in steps if step.meter.tolerance.kind == "exact"}
    if unused := sorted(given - exact - {link.name for link in idle}):
        raise UsageProblem(
            f"a tolerance of {', '.join(unused)} would do nothing: there is no such link here that is exact.",
            hint=f"Links here: {', '.join(sorted(exact))}.",
            code="tolerance.idle",
        )


def _as_built(link: Link, built: BuildArtefact | None) -> Link:
    """What its build failed does not pass."""
    if built is None or built.verdict != "failed":
        return link
    note = "; ".join(filter(None, ["its build says failed", link.note]))
    return link.model_copy(update={"verdict": "failed", "note": note})


def _required(link: Link) -> Link:
    if link.verdict != "not verified":
        return link
    return link.model_copy(update={"verdict": "failed", "note": f"required, and not run: {link.note}"})


def _curve(target: Path, taken: runs.Run, link: Link) -> Path:
    """The file of a link's drift, beside the result; under its name where that is not the run's own."""
    own = "" if target == taken.verify_json else f"{target.stem}."
    return target.with_name(f"{own}drift-{link.name}{dotted(link.variant)}.svg")
