"""build: an engine for a target, from the run's ONNX model, with a proof of what precision it computes in."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv import registry, runs
from repaconv.artefacts import BuildArtefact, ExportArtefact, FoldArtefact, Link
from repaconv.engines.contract import label
from repaconv.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.files import cache_folder, payload_of, read_artefact, sha256_of, write_bytes, write_text
from repaconv.replacing import put, require_ours
from repaconv.steps.asked import as_typed
from repaconv.steps.common import Progress, image_model, load_target, made_by, silent, with_files
from repaconv.steps.exports import export_for

if TYPE_CHECKING:
    import onnx

    from repaconv.targets import Target

LARGEST_BATCH = 32
PROBES, AT_ONCE = 4, 3  # in calls of 3 images and of 1, where the batch is free


def build(
    run: str | Path | None = None,
    *,
    target: str,
    precision: str = "fp32",
    workspace_mib: int | None = None,
    timing_cache: str | Path | None = None,
    replay: bool = False,
    unverified: bool = False,
    progress: Progress = silent,
) -> BuildArtefact:
    """Build an engine from the run's ONNX model, prove what it computes in, and compare it where it runs here.

    Args:
        run: The run's folder, or one of its ONNX models where it has several for this target; the newest when None.
        target: What it is for; its runtime must be able to build here.
        precision: Which of the run's ONNX models; where the runtime itself lowers precision, that of the engine.
        workspace_mib: Scratch memory for TensorRT's kernels, in MiB; its own limit when None.
        timing_cache: TensorRT's measurements of kernels, read and written; the user's cache of this target when None.
        replay: Fail where the timing cache has no answer: the same engine again.
        unverified: Go on behind a failed verdict, and record it.
        progress: See `Progress`.

    Returns:
        The artefact; its verdict is failed if the engine does not compute in what was asked for, or something else.

    Raises:
        EnvironmentProblem: If the target's runtime is not here, or another version than the target's.
        Refused: If it does not take the graph.
        UsageProblem: If there is no such ONNX model, the runtime takes no such option, or a file is there already that
            is somebody else's.
    """
    import onnx

    from repaconv.engines.contract import Order
    from repaconv.proof.verdicts import verdict_of

    device = load_target(target)
    engine = registry.load(registry.ENGINES, device.runtime)
    _require_taken(engine, workspace=workspace_mib, timing_cache=timing_cache, replay=replay)
    version = _version_for(device, engine)
    taken, model = runs.run_and_model(Path(run) if run else None)
    folded = read_artefact(taken.fold_json, FoldArtefact)
    typed = "fp32" if device.typed_by == "runtime" and precision == "bf16" else precision
    exported, path, variant = export_for(taken, folded, target, typed, model=model)
    overridden = runs.require_sound(taken, folded, (exported, path), unverified=unverified)
    source = runs.graph_of(taken, exported)
    name = variant.model_copy(update={"precision": precision}).full
    file = taken.engine(name, engine.suffix)
    log, slot = taken.engine(name, ".log"), taken.engine(name, ".json")
    require_ours(slot, "build", file, log)
    timings = _Timings.of(Path(timing_cache) if timing_cache else None, device, version)
    progress(f"build for {device.name}", 0, 0)
    order = Order(
        model=source,
        precision=precision,
        capabilities=(device.compute_capability,),
        shapes=_shapes(onnx.load(source, load_external_data=False), exported, device),
        islands=exported.islands,
        here=device.architecture == platform.machine(),
        threads=device.bench.threads,
        workspace=None if workspace_mib is None else workspace_mib * 2**20,
        timing_cache=timings.content,
        replay=replay,
        tick=progress,
    )
    built = engine.build(order)
    write_bytes(file, built.engine)
    if built.log:
        write_text(log, f"{built.log}\n")
    logs = [log] if built.log else []
    links = (_compared(folded, file, source, engine, exported, precision, device, progress),) if built.runs_here else ()
    asked = label(precision)
    wrong = {name: count for name, count in built.types.items() if not name.endswith(f".{asked}")}
    staying = {name: count for name, count in wrong.items() if precision == "int8" and name in built.may_stay}
    other = sum(wrong.values()) - sum(staying.values())
    typed_right = other <= len(exported.in_float) and any(name.endswith(f".{asked}") for name in built.types)
    kept = f"; {', '.join(staying)} multiplies activations, which this runtime does not quantise" if staying else ""
    proved = verdict_of(links) if links else "passed"
    artefact = BuildArtefact(
        made_by={**made_by(), device.runtime: version},
        verdict=proved if typed_right else "failed",
        unverified=overridden,
        asked=(
            *([str(model)] if model else []),
            *as_typed(
                build,
                target=target,
                precision=precision,
                workspace_mib=workspace_mib,
                timing_cache=timing_cache,
                replay=replay,
                unverified=unverified,
            ),
        ),
        beside=tuple(payload_of(each, slot.parent) for each in logs),
        variant=name,
        target=device.name,
        runtime=f"{engine.name} {version}",
        compute_capability=device.compute_capability,
        precision=precision,
        layer_types=dict(built.types),
        options=dict(built.options),
        timing_cache=timings.keep(built.timing_cache) if built.timing_cache else "",
        note=built.proved + kept + ("" if built.runs_here else ", and was not verified here"),
        links=links,
        onnx_sha256=exported.payload.sha256,
        payload=payload_of(file, file.parent),
    )
    put(slot, artefact)
    return with_files(artefact, [source], [file, *logs, slot])


def _require_taken(engine: Any, **options: Any) -> None:
    """Refuse what this runtime's builder does not take.

    Raises:
        UsageProblem: Naming it.
    """
    idle = [f"--{name.replace('_', '-')}" for name, given in options.items() if given and name not in engine.takes]
    if idle:
        raise UsageProblem(
            f"{', '.join(idle)} would do nothing: {engine.name} builds without.",
            hint="Leave it out; it is for TensorRT.",
            code="usage.idle",
        )


def _version_for(device: Target, engine: Any) -> str:
    """The runtime's version here, if it is the one that the target has.

    Raises:
        EnvironmentProblem: If it is not here, or another.
    """
    try:
        version = str(engine.version())
    except EnvironmentProblem as problem:
        if device.runtime != "tensorrt":
            raise
        raise EnvironmentProblem(
            f"engines for {device.name} are built there, by its {device.runtime} {device.runtime_version}, not here.",
            hint=f"Take the model there with all that it needs: repaconv bundle --target {device.name}.",
            code="build.elsewhere",
        ) from problem
    wanted = device.runtime_version.split(".")[:2]
    if wanted != [""] and version.split(".")[: len(wanted)] != wanted:
        raise EnvironmentProblem(
            f"{device.name} has {device.runtime} {device.runtime_version}, here is {version}: its engines do not load.",
            hint="Build on the device, or for another target: `repaconv targets` lists them.",
            code="build.version",
        )
    return version


def _compared(
    folded: FoldArtefact,
    file: Path,
    source: Path,
    engine: Any,
    exported: ExportArtefact,
    precision: str,
    device: Target,
    progress: Progress,
) -> Link:
    """The engine against the ONNX model that it was built from, on random images."""
    from repaconv.engines.contract import SessionSpec
    from repaconv.proof.data import random_pixels
    from repaconv.proof.parity import Meter
    from repaconv.proof.policy import tolerance
    from repaconv.proof.runners import FixedBatch, Images, decides

    progress("engine against its model", 0, 0)
    backbone = registry.load(registry.BACKBONES, folded.backbone)
    config = backbone.from_json(folded.config)
    logits, choosing = folded.output == "logits", decides(backbone.deploy(config))
    allowed = tolerance("engine", precision=precision, logits=logits, decides=choosing, usual=folded.tolerances)
    size = folded.image_size if exported.image_size == "dynamic" else exported.image_size
    batch = None if exported.batch == "dynamic" else int(exported.batch)
    given = random_pixels((config.in_channels, *size), folded.preprocessing, count=PROBES, seed=0)
    spec = SessionSpec(threads=device.bench.threads, precision=precision)
    after = FixedBatch(Images(engine.open(file, spec)), batch)
    before = FixedBatch(image_model(source), batch)
    meter = Meter(allowed, logits=logits)
    for piece in given.batches(AT_ONCE):
        images: Any = piece.pixels if exported.preprocessing else piece.images
        meter.add(after.run(images), before.run(images))
    name = "ONNX" if exported.precision == "fp32" else f"ONNX, {exported.precision}"
    return meter.link("engine", f"{name} under ONNX Runtime", file.name)


class _Timings(NamedTuple):
    """TensorRT's measurements of kernels for one target and version, and where they are kept."""

    path: Path
    content: bytes | None

    @classmethod
    def of(cls, given: Path | None, device: Target, version: str) -> _Timings:
        """Read them, if they are still those that were written.

        Raises:
            Refused: If their hash is another.
        """
        path = given or cache_folder("timings") / f"{device.name}-{device.runtime}-{version}.cache"
        if not path.is_file():
            return cls(path, None)
        pin = path.with_name(f"{path.name}.sha256")
        if pin.is_file() and pin.read_text().strip() != sha256_of(path):
            raise Refused(
                f"the timing cache {path} is not the file that was written: its hash is another.",
                hint=f"Delete it and {pin.name}, and let the builder measure again.",
                code="build.timing-cache",
            )
        return cls(path, path.read_bytes())

    def keep(self, content: bytes) -> str:
        """Write them back with their hash, which the artefact records, too."""
        write_bytes(self.path, content)
        digest = sha256_of(self.path)
        write_text(self.path.with_name(f"{self.path.name}.sha256"), f"{digest}\n")
        return digest


def what_works(target: str) -> list[registry.PluginRow]:
    """Of a target, what of it can be done on this machine, and what would mend the rest."""
    device = load_target(target)
    engine = registry.load(registry.ENGINES, device.runtime)
    wanted = f"{device.runtime} {device.runtime_version}".strip()
    export = f"works: opset {device.opset}, {', '.join(device.precisions)}"
    rows = [registry.PluginRow(device.name, "export", wanted, "", export)]
    try:
        here, problem = f"works: {device.runtime} {_version_for(device, engine)}", ""
    except EnvironmentProblem as error:
        here, problem = "", f"{error.message} {error.hint}"
    rows.append(registry.PluginRow(device.name, "build", wanted, problem, here))
    if "run" not in engine.can:
        return [*rows, registry.PluginRow(device.name, "verify and bench", wanted, "", "on the device alone")]
    if device.architecture not in ("", platform.machine()):
        here = f"{here}, as on a {platform.machine()}: for times of its own, run this there"
    return [*rows, registry.PluginRow(device.name, "verify and bench", wanted, problem, here)]


def _shapes(model: onnx.ModelProto, exported: ExportArtefact, device: Target) -> dict[str, tuple[Any, Any, Any]]:
    """Least, usual and largest shape of an input with free dimensions."""
    found = {}
    for entry in model.graph.input:
        dims = [(d.dim_param, d.dim_value) for d in entry.type.tensor_type.shape.dim]
        if not any(name for name, _ in dims) or not device.compute_capability:
            continue
        if exported.image_size == "dynamic":
            raise UsageProblem(
                "the graph takes images of any size, an engine is built for one.",
                hint="repaconv export --onnx --image-size N, then build.",
                code="build.shape",
            )
        usual = device.bench.batch
        least, largest = 1, max(usual, LARGEST_BATCH)
        shapes = [[batch if name else value for name, value in dims] for batch in (least, usual, largest)]
        found[entry.name] = (shapes[0], shapes[1], shapes[2])
    return found
