"""verify: every link of the chain whose two ends exist, each by its own tolerance, all of them reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv import registry, runs
from repaconv.artefact import (
    ExportArtefact,
    FoldArtefact,
    Link,
    Location,
    Tolerance,
    VerifyArtefact,
    read_artefact,
    write_artefact,
    write_text,
)
from repaconv.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.pipeline.common import (
    DEPLOY,
    TRAINING,
    Progress,
    load_onnx,
    made_by,
    require_size,
    silent,
    stored_weights,
    training_form,
    with_files,
)
from repaconv.pipeline.inputs import choose_inputs

if TYPE_CHECKING:
    from repaconv.methods.contract import Method, TrainingForm
    from repaconv.proof.data import Batch, Inputs
    from repaconv.proof.parity import Meter
    from repaconv.proof.runners import Runner, TorchRunner

REFERENCE = f"{TRAINING}, float64"
ONNX_LABEL = "ONNX under ONNX Runtime"


@dataclass
class _Step:
    """One link to be run: its candidate on a batch, its meter, and how to find where it fails."""

    name: str
    candidate: str
    run: Callable[[Batch], Any]
    meter: Meter
    locate: Callable[[Any], Location]
    note: str = ""


class _Net(NamedTuple):
    """The network of a run in its forms, and what is read beside it."""

    taken: runs.Run
    folded: FoldArtefact
    method: Method
    form: TrainingForm
    training: TorchRunner
    fold: TorchRunner
    stored: TorchRunner
    source: Path


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
        engine: An engine that was built from this run's ONNX model, to be loaded by its runtime and run.
        drift: Follow the drift through the network for links that pass, too.
        out: Where the result goes; ``verify.json`` in the run's folder when None.
        progress: See `Progress`.

    Returns:
        The artefact; its verdict is failed if any link's is.
    """
    from repaconv.proof import parity, policy
    from repaconv.proof.runners import decides

    taken = runs.find_run(Path(run) if run else None)
    folded = read_artefact(taken.fold_json, FoldArtefact)
    policy.require_links([*(rtol or {}), *(atol or {}), *require])
    net = _net(taken, folded, checkpoint)
    config = net.form.config
    exports = _exports(taken, folded)
    pixels = any(exported.preprocessing for exported in exports)
    given = choose_inputs(
        folded, config, inputs=inputs, images=images, classes=classes, count=count, seed=seed, pixels=pixels
    )
    backbone = registry.load(registry.BACKBONES, folded.backbone)
    require_size(backbone, config, *given.shape[2:])
    logits, choosing = folded.output == "logits", decides(net.fold.module)

    def meter(name: str) -> Meter:
        allowed = policy.tolerance(name, logits=logits, decides=choosing, usual=folded.tolerances, rtol=rtol, atol=atol)
        return parity.Meter(allowed, logits=logits)

    steps, idle, took = _steps(net, exports, given, meter, Path(engine) if engine else None)
    scale = _over(given, net, steps, logits, progress)
    links = [*(_judged(step, given, net, follow=drift) for step in steps), *idle]
    links += [
        parity.not_verified(name, REFERENCE, name, "was required, and there is nothing to run")
        for name in require
        if name not in {link.name for link in links}
    ]
    links = [_required(link) if link.name in require else link for link in links]
    links.sort(key=lambda link: policy.LINKS.index(link.name))
    artefact = VerifyArtefact(
        made_by=made_by("torch", "onnxruntime"),
        verdict="failed" if any(link.verdict == "failed" for link in links) else "passed",
        unverified=folded.unverified,
        policy=policy.POLICY,
        inputs=given.name,
        input_shape=given.shape,
        model_sha256=folded.payload.sha256,
        required=tuple(require),
        labels=given.labels,
        links=tuple(links),
        for_scale=scale,
    )
    target = Path(out) if out else taken.verify_json
    write_artefact(target, artefact)
    curves = _write_curves(taken, links)
    took = [net.source, taken.model, *took, *([Path(inputs)] if inputs else [])]
    return with_files(artefact, took, [target, *curves])


def _net(taken: runs.Run, folded: FoldArtefact, checkpoint: str | Path | None) -> _Net:
    from repaconv.proof.runners import TorchRunner

    method, form, source = training_form(folded, checkpoint)
    backbone = registry.load(registry.BACKBONES, folded.backbone)
    config = backbone.from_json(folded.config)
    exact = {name: value for part in method.fold(form) for name, value in part.tensors.items()}
    return _Net(
        taken,
        folded,
        method,
        form,
        training=TorchRunner(method.training(form), form.tensors, double=True),
        fold=TorchRunner(backbone.deploy(config), exact, double=True),
        stored=TorchRunner(backbone.deploy(config), stored_weights(taken, folded), double=False),
        source=source,
    )


def _exports(taken: runs.Run, folded: FoldArtefact) -> list[ExportArtefact]:
    """Those of the run that were made from these weights."""
    found = []
    for precision in runs.PRECISIONS:
        if (path := taken.export_json(precision)).is_file():
            exported = read_artefact(path, ExportArtefact)
            if exported.model_sha256 != folded.payload.sha256:
                raise Refused(
                    f"{path} was exported from other weights than {taken.model}.",
                    hint="Run `repaconv export --onnx` again.",
                    code="artefact.hash",
                )
            found.append(exported)
    return found


def _steps(
    net: _Net,
    exports: Sequence[ExportArtefact],
    given: Inputs,
    meter: Callable[[str], Meter],
    engine: Path | None,
) -> tuple[list[_Step], list[Link], list[Path]]:
    """What can be run, what cannot and why, and the files that were taken."""
    from repaconv.proof.locate import locate_between_seams
    from repaconv.proof.parity import not_verified

    tight = meter("fold").tolerance
    steps = [
        _Step(
            "fold",
            "folded, float64",
            lambda batch: net.fold.run(batch.images),
            meter("fold"),
            lambda images: locate_between_seams(net.training, net.fold, images, allowed=tight.rtol or 0.0),
        ),
        _Step(
            "stored",
            "folded as stored, float32",
            lambda batch: net.stored.run(batch.images),
            meter("stored"),
            lambda images: _within(net.fold, net.stored, images, meter("stored").tolerance),
        ),
    ]
    if given.recorded:
        official = f"official output ({given.recorded})"
        steps.insert(0, _Step("recorded", official, _recorded, meter("recorded"), _only_output))
    idle: list[Link] = []
    took: list[Path] = []
    for exported in exports:
        path = net.taken.payload(exported.payload)
        took.append(path)
        name = "onnx" if exported.precision == "fp32" else exported.precision
        label = ONNX_LABEL if name == "onnx" else f"{ONNX_LABEL}, {name}"
        why_not = _cannot_take(exported, given)
        if why_not:
            idle.append(not_verified(name, REFERENCE, label, why_not))
            continue
        steps += _onnx_steps(net, exported, path, name, label, meter)
        if exported.preprocessing and not _has_pixels(given):
            why_not = "the graph takes pixels, and these images are normalised already"
            idle.append(not_verified("preprocessing", REFERENCE, label, why_not))
            steps = [step for step in steps if step.name != "preprocessing"]
    if engine is not None:
        took.append(engine)
        try:
            runner = _engine_runner(engine)
        except EnvironmentProblem as problem:
            idle.append(not_verified("engine", REFERENCE, engine.name, f"{problem.message} {problem.hint}".strip()))
        else:
            steps.append(
                _Step("engine", engine.name, lambda batch: runner.run(batch.images), meter("engine"), _no_values)
            )
    return steps, idle, took


def _onnx_steps(
    net: _Net, exported: ExportArtefact, path: Path, name: str, label: str, meter: Callable[[str], Meter]
) -> list[_Step]:
    """The network's graph, and the same with its preprocessing where it has one."""
    import onnx

    from repaconv.exporters.preprocessing import SCOPE, without_preprocessing
    from repaconv.proof.runners import FixedBatch

    batch = None if exported.batch == "dynamic" else int(exported.batch)
    whole = FixedBatch(load_onnx(path), batch)
    core: Runner = whole
    if exported.preprocessing:
        core = FixedBatch(load_onnx(without_preprocessing(onnx.load(path)).SerializeToString()), batch)
    allowed = meter(name).tolerance
    steps = [
        _Step(
            name,
            label,
            lambda piece: core.run(piece.images),
            meter(name),
            lambda images: _within_onnx(net, exported, path, images, allowed),
        )
    ]
    if exported.preprocessing and name == "onnx":
        where = Location(module=SCOPE, reason="the graph behind it is judged by the link onnx")
        steps.append(
            _Step(
                "preprocessing",
                f"{label}, from pixels",
                lambda piece: whole.run(_pixels(piece)),
                meter("preprocessing"),
                lambda _images: where,
            )
        )
    return steps


def _over(given: Inputs, net: _Net, steps: Sequence[_Step], logits: bool, progress: Progress) -> dict[str, Any]:
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
            single = TorchRunner(net.method.training(net.form), net.form.tensors, double=False)
            name = "training form in float32 against float64"
            scale[name] = measure(single.run(batch.images), reference, logits=logits)
        done += len(batch.images)
    progress("verify", done, given.shape[0])
    return scale


def _judged(step: _Step, given: Inputs, net: _Net, *, follow: bool) -> Link:
    from repaconv.proof.locate import broken

    link = step.meter.link(step.name, REFERENCE, step.candidate, step.note)
    lossy = step.meter.tolerance.kind == "lossy"
    if link.verdict == "failed" or lossy or (follow and step.name != "recorded"):
        worst = step.meter.worst
        where = step.locate(given.piece(worst, worst + 1).images)
        where = where.model_copy(update={"module": _users_names(net, where.module)})
        link = broken(link, where) if lossy else link.model_copy(update={"location": where})
    return link


def _required(link: Link) -> Link:
    if link.verdict != "not verified":
        return link
    return link.model_copy(update={"verdict": "failed", "note": f"required, and not verified: {link.note}"})


def _recorded(batch: Batch) -> Any:
    assert batch.recorded is not None
    return batch.recorded


def _cannot_take(exported: ExportArtefact, given: Inputs) -> str:
    """Why a graph cannot take these images; empty if it can."""
    if exported.image_size == "dynamic" or tuple(given.shape[2:]) == tuple(exported.image_size):
        return ""
    return f"the graph takes images of {exported.image_size} pixels only, these are of {tuple(given.shape[2:])}"


def _pixels(batch: Batch) -> Any:
    assert batch.pixels is not None
    return batch.pixels


def _has_pixels(given: Inputs) -> bool:
    return given.piece(0, 1).pixels is not None


def _engine_runner(path: Path) -> Runner:
    """An engine file through the runtime that it is for.

    Raises:
        EnvironmentProblem: If that runtime, or the device it needs, is not here.
    """
    if not path.is_file():
        raise UsageProblem(f"there is no file {path}.", hint="Give an engine that was built.", code="engine.missing")
    runtime: Any = registry.load(registry.ENGINES, "onnxruntime" if path.suffix in (".onnx", ".ort") else "tensorrt")
    session: Runner = runtime.session(path, threads=1)
    return session


# --- where a link fails -------------------------------------------------------------------------------


def _within(reference: TorchRunner, candidate: TorchRunner, images: Any, allowed: Tolerance) -> Location:
    """Two torch modules of the same form."""
    from repaconv.proof.locate import locate
    from repaconv.proof.traces import TorchTrace

    return locate(TorchTrace(reference), TorchTrace(candidate), images, allowed=allowed.rtol or 0.0)


def _within_onnx(net: _Net, exported: ExportArtefact, path: Path, images: Any, allowed: Tolerance) -> Location:
    """The folded model in torch against its graph; a typed graph against the float32 one where that is there."""
    import onnx

    from repaconv.exporters.preprocessing import without_preprocessing
    from repaconv.proof.locate import locate
    from repaconv.proof.runners import decides
    from repaconv.proof.traces import OnnxTrace, TorchTrace

    def graph(at: Path, kind: ExportArtefact) -> Any:
        model = onnx.load(at)
        return without_preprocessing(model) if kind.preprocessing else model

    if exported.batch != "dynamic":
        images = images.repeat(int(exported.batch), 0)
    candidate = graph(path, exported)
    beside = net.taken.export_json()
    if allowed.kind == "exact" or not beside.is_file():
        traced = OnnxTrace(candidate, load_onnx, by_module=True)
        return locate(TorchTrace(net.stored), traced, images, allowed=allowed.rtol)
    single = read_artefact(beside, ExportArtefact)
    before = OnnxTrace(graph(net.taken.payload(single.payload), single), load_onnx, by_module=False)
    after = OnnxTrace(candidate, load_onnx, by_module=False)
    choosing = decides(net.fold.module)
    return locate(before, after, images, allowed=None, decides=choosing, module_of=before.module_of)


def _only_output(_images: Any) -> Location:
    return Location(
        module="",
        reason="only the output was recorded; check what the file does not tell: "
        "--set eps, num_heads, norm and the weights that were taken",
    )


def _no_values(_images: Any) -> Location:
    return Location(module="", reason="an engine shows no values on the way; the links before it say where to look")


def _users_names(net: _Net, module: str) -> str:
    """Names of the deploy form to those in the user's file, which a wrapper or a trainer may have changed."""
    return ", ".join(_users_name(net, name) for name in module.split(", ")) if module else ""


def _users_name(net: _Net, module: str) -> str:
    rest = module
    while rest:
        for official, stored in net.form.names.items():
            if official.startswith(f"{rest}."):
                tail = official[len(rest) :]
                return stored.removesuffix(tail) + module[len(rest) :] if stored.endswith(tail) else module
        rest = rest.rpartition(".")[0]
    return module


def _write_curves(taken: runs.Run, links: Sequence[Link]) -> list[Path]:
    from repaconv.proof.curve import drift_svg

    written = []
    for link in links:
        path = taken.drift_svg(link.name)
        if link.location and link.location.drift:
            write_text(path, drift_svg(link))
            written.append(path)
        else:
            path.unlink(missing_ok=True)
    return written


__all__ = ["DEPLOY", "verify"]
