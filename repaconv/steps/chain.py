"""The chain of proof of one run: its ends, its links, and how each is followed to the place where it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv import registry, runs
from repaconv.artefacts import BuildArtefact, ExportArtefact, FoldArtefact, Link, Location, Tolerance
from repaconv.errors import EnvironmentProblem, UsageProblem
from repaconv.files import sha256_of
from repaconv.steps.common import TRAINING, image_model, load_onnx, read_again, stored_weights
from repaconv.steps.engines import open_engine
from repaconv.steps.exports import Export, float32_beside
from repaconv.steps.graphs import BF16_NOTE, runnable

if TYPE_CHECKING:
    from repaconv.proof.data import Batch, Inputs
    from repaconv.proof.parity import Meter
    from repaconv.proof.runners import Runner, TorchRunner
    from repaconv.trained.contract import Reading

REFERENCE = f"{TRAINING}, float64"
ONNX_LABEL = "ONNX under ONNX Runtime"


@dataclass
class Step:
    """One link to be run: its candidate on a batch, its meter, and how to find where it fails."""

    name: str
    candidate: str
    run: Callable[[Batch], Any]
    meter: Meter
    locate: Callable[[Any], Location]
    note: str = ""
    variant: str = ""
    sha256: str = ""


class Net(NamedTuple):
    """The network of a run in its forms, and what is read beside it."""

    taken: runs.Run
    folded: FoldArtefact
    form: Reading
    training: TorchRunner
    fold: TorchRunner
    stored: TorchRunner
    source: Path


def net_of(taken: runs.Run, folded: FoldArtefact, checkpoint: str | Path | None) -> Net:
    """The run's checkpoint read again, folded again in float64, and what was stored, ready to run.

    Raises:
        Refused: If the checkpoint or the stored weights are gone or changed.
    """
    from repaconv.proof.runners import TorchRunner

    form, source = read_again(folded, checkpoint)
    backbone = registry.load(registry.BACKBONES, folded.backbone)
    config = backbone.from_json(folded.config)
    exact = {name: value for part in form.parts() for name, value in part.tensors.items()}
    return Net(
        taken,
        folded,
        form,
        training=TorchRunner(form.module(), form.tensors, double=True),
        fold=TorchRunner(backbone.deploy(config), exact, double=True),
        stored=TorchRunner(backbone.deploy(config), stored_weights(taken, folded), double=False),
        source=source,
    )


def steps_of(
    net: Net,
    exports: Sequence[Export],
    given: Inputs,
    meter: Callable[..., Meter],
    engine: Path | None,
    built: BuildArtefact | None,
) -> tuple[list[Step], list[Link], list[Path]]:
    """What can be run, what cannot and why, and the files that were taken.

    The fold comes first: it tells in which images rounding decides, and the other links ask.
    """
    from repaconv.proof.locate import locate_between_seams
    from repaconv.proof.parity import not_verified

    tight = meter("fold").tolerance
    steps = [
        Step(
            "fold",
            "folded, float64",
            lambda batch: net.fold.run(batch.images),
            meter("fold"),
            lambda images: locate_between_seams(net.training, net.fold, images, allowed=tight.rtol or 0.0),
        ),
        Step(
            "stored",
            "folded as stored, float32",
            lambda batch: net.stored.run(batch.images),
            meter("stored"),
            lambda images: _within(net.fold, net.stored, images, meter("stored").tolerance),
        ),
    ]
    if given.recorded:
        official = f"official output ({given.recorded})"
        steps.append(Step("recorded", official, _recorded, meter("recorded"), _only_output))
    idle: list[Link] = []
    took: list[Path] = []
    for exported, _, variant in exports:
        path = runs.graph_of(net.taken, exported)
        took.append(path)
        name = "onnx" if exported.precision == "fp32" else exported.precision
        label = f"{ONNX_LABEL}, {variant.name}" if variant.name else ONNX_LABEL
        why_not = _cannot_take(exported, given)
        if why_not:
            idle.append(_idle(name, label, why_not, variant.name, exported))
            continue
        ways = _onnx_steps(net, exported, path, name, label, meter)
        if len(ways) > 1 and not _has_pixels(given):
            why_not = "the graph takes pixels, and these images are normalised already"
            idle.append(_idle(ways.pop().name, label, why_not, variant.name, exported))
        steps += [replace(step, variant=variant.name, sha256=exported.payload.sha256) for step in ways]
    if engine is not None:
        took.append(engine)
        try:
            steps.append(_engine_step(engine, built, given, meter))
        except EnvironmentProblem as problem:
            idle.append(not_verified("engine", REFERENCE, engine.name, f"{problem.message} {problem.hint}".strip()))
    return steps, idle, took


def _engine_step(engine: Path, built: BuildArtefact | None, given: Inputs, meter: Callable[..., Meter]) -> Step:
    """An engine, on as many images at once as it takes, from pixels where it takes those.

    Raises:
        EnvironmentProblem: If it does not run here.
        UsageProblem: If it takes other images.
    """
    from repaconv.proof.runners import FixedBatch

    session = open_engine(engine, built, threads=1)
    shape, pixels = session.input_shape, session.takes_pixels
    if any(isinstance(has, int) and has != is_ for has, is_ in zip(shape[1:], given.shape[1:], strict=False)):
        raise UsageProblem(
            f"{engine} takes images of {list(shape[1:])}, these are of {list(given.shape[1:])}.",
            hint="Give --inputs or --images of that size.",
            code="inputs.shape",
        )
    if pixels and not _has_pixels(given):
        raise UsageProblem(
            f"{engine} takes pixels, and these images are normalised already.",
            hint="Give --images, or neither --images nor --inputs.",
            code="inputs.pixels",
        )
    runner = FixedBatch(session, shape[0] if shape and isinstance(shape[0], int) else None)
    low = meter("engine", built.precision if built else "fp32")
    take = _pixels if pixels else lambda batch: batch.images
    step = Step("engine", engine.name, lambda batch: runner.run(take(batch)), low, _no_values)
    return replace(step, sha256=sha256_of(engine))


def _idle(name: str, label: str, why_not: str, variant: str, exported: ExportArtefact) -> Link:
    from repaconv.proof.parity import not_verified

    of = {"variant": variant, "sha256": exported.payload.sha256}
    return not_verified(name, REFERENCE, label, why_not).model_copy(update=of)


def _onnx_steps(
    net: Net, exported: ExportArtefact, path: Path, name: str, label: str, meter: Callable[..., Meter]
) -> list[Step]:
    """The network's graph, and the same with its preprocessing where it has one."""
    import onnx

    from repaconv.exporters.preprocessing import SCOPE, without_preprocessing
    from repaconv.proof.runners import FixedBatch

    batch = None if exported.batch == "dynamic" else int(exported.batch)
    typed = exported.precision == "bf16"
    source = runnable(onnx.load(path), "bf16").SerializeToString() if typed else path
    whole = FixedBatch(image_model(source), batch)
    core: Runner = whole
    if exported.preprocessing:
        bare = runnable(without_preprocessing(onnx.load(path, load_external_data=False)), exported.precision)
        core = FixedBatch(image_model(bare.SerializeToString(), path.parent), batch)
    allowed = meter(name).tolerance
    steps = [
        Step(
            name,
            label,
            lambda piece: core.run(piece.images),
            meter(name),
            lambda images: _within_onnx(net, exported, path, images, allowed),
            BF16_NOTE if typed else "",
        )
    ]
    if exported.preprocessing:
        # a lossy link that names a module says that it is broken there
        scope = SCOPE if name == "onnx" else ""
        where = Location(module=scope, reason=f"the graph behind it is judged by the link {name}")
        steps.append(
            Step(
                "preprocessing",
                f"{label}, from pixels",
                lambda piece: whole.run(_pixels(piece)),
                meter("preprocessing", exported.precision),
                lambda _images: where,
                BF16_NOTE if typed else "",
            )
        )
    return steps


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


# --- where a link fails -------------------------------------------------------------------------------


def _within(reference: TorchRunner, candidate: TorchRunner, images: Any, allowed: Tolerance) -> Location:
    """Two torch modules of the same form."""
    from repaconv.proof.locate import locate
    from repaconv.proof.traces import TorchTrace

    return locate(TorchTrace(reference), TorchTrace(candidate), images, allowed=allowed.rtol or 0.0)


def _within_onnx(net: Net, exported: ExportArtefact, path: Path, images: Any, allowed: Tolerance) -> Location:
    """The folded model in torch against its graph; a typed graph against the float32 one where that is there."""
    import onnx

    from repaconv.exporters.preprocessing import without_preprocessing
    from repaconv.proof.locate import locate
    from repaconv.proof.runners import decides
    from repaconv.proof.traces import OnnxTrace, TorchTrace

    def graph(at: Path, kind: ExportArtefact) -> Any:
        model = onnx.load(at)
        return runnable(without_preprocessing(model) if kind.preprocessing else model, kind.precision)

    if exported.data is not None:
        return Location(module="", reason="a graph above 2 GiB is not followed")
    candidate = graph(path, exported)
    moved = [name for name in exported.rewrites if not registry.load(registry.REWRITES, name).keeps]
    if allowed.kind == "exact" and moved:
        return Location(module="", reason=f"not followed: {', '.join(moved)} changes values on the way")
    if allowed.kind == "exact":
        traced = OnnxTrace(candidate, load_onnx, by_module=True)
        return locate(TorchTrace(net.stored), traced, _filled(images, {exported.batch}), allowed=allowed.rtol)
    beside = float32_beside(net.taken, net.folded, exported)
    if beside is None:
        return Location(module="", reason="followed layer by layer only beside the float32 graph: export that, too")
    single = beside.artefact
    if set(single.rewrites) != set(exported.rewrites):
        return Location(module="", reason="followed at its export: the float32 graph here is written in another form")
    fixed = {exported.batch, single.batch} - {"dynamic"}
    if len(fixed) > 1 or single.image_size not in ("dynamic", tuple(images.shape[2:])):
        return Location(module="", reason="not followed: the float32 graph takes another batch or image size")
    images = _filled(images, fixed)
    before = OnnxTrace(graph(runs.graph_of(net.taken, single), single), load_onnx, by_module=False)
    after = OnnxTrace(candidate, load_onnx, by_module=False)
    choosing = decides(net.fold.module)
    return locate(before, after, images, allowed=None, decides=choosing)


def _filled(images: Any, batches: set[Any]) -> Any:
    """One image as often as a graph of a fixed batch wants it."""
    return images.repeat(max([1, *(int(batch) for batch in batches - {"dynamic"})]), 0)


def _only_output(_images: Any) -> Location:
    return Location(
        module="",
        reason="only the output was recorded; check what the file does not tell: "
        "--set eps, num_heads, norm and the weights that were taken",
    )


def _no_values(_images: Any) -> Location:
    return Location(module="", reason="an engine shows no values on the way; the links before it say where to look")


def users_names(net: Net, module: str) -> str:
    """Names of the deploy form to those in the user's file, which a wrapper or a trainer may have changed."""
    return ", ".join(_users_name(net, name) for name in module.split(", ")) if module else ""


def _users_name(net: Net, module: str) -> str:
    rest = module
    while rest:
        for official, stored in net.form.names.items():
            if official.startswith(f"{rest}."):
                tail = official[len(rest) :]
                return stored.removesuffix(tail) + module[len(rest) :] if stored.endswith(tail) else module
        rest = rest.rpartition(".")[0]
    return module
