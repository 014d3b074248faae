"""`build`: build an engine for a target from the run's ONNX model, and verify the precision it computes in."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import plugins, run_folder
from repaconv.core.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.core.file_replacement import replace_artifact, require_replaceable, write_payload
from repaconv.core.files import cache_folder, lock_folder, payload_of, sha256_of, write_bytes, write_text
from repaconv.core.progress import Progress, silent
from repaconv.engines.contract import BuildSpec, Built, Engine, label, nothing_to_build
from repaconv.engines.session_loading import load_session, require_survived
from repaconv.results import BuildArtefact, ExportArtefact, FoldArtefact, ImageSize, Link
from repaconv.results.fold import Batch
from repaconv.sources.source_model import SourceModel
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.bench.options import BenchOptions
from repaconv.stages.build.options import BuildOptions
from repaconv.stages.shared.engine_files import version_for
from repaconv.stages.shared.evaluation_images import MAX_IMAGES, evaluation_images, why_without_images, without_evidence
from repaconv.stages.shared.exports_of_run import export_for
from repaconv.stages.shared.input_selection import choose_inputs, scores_output
from repaconv.stages.shared.option_dataclasses import by_name
from repaconv.stages.shared.preset_choice import ResolvedOptions, resolve_preset
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.stages.shared.target_lookup import load_target
from repaconv.stages.shared.task_choice import evaluation_of
from repaconv.stages.shared.unavailable_targets import remote_commands, why_not_here
from repaconv.verification.model_runners import load_onnx
from repaconv.verification.random_graph_inputs import named_dims_of
from repaconv.verification.rounding import network_rounding

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.targets import Target
    from repaconv.verification.input_batches import Inputs


# TensorRT's timing cache, which is kept between builds and pinned by its hash


class TimingCache(NamedTuple):
    """TensorRT's timing cache for one target and version, and its file."""

    path: Path
    content: bytes | None

    @classmethod
    def of(cls, given: Path | None, device: Target, version: str) -> TimingCache:
        """Read the timing cache; if no file is given, that of the target in the user's cache folder.

        Raises:
            Refused: If its hash differs from the recorded one.
        """
        path = given or cache_folder("timings") / f"{device.name}-{device.runtime}-{version}.cache"
        if not path.is_file():
            return cls(path, None)
        pin = path.with_name(f"{path.name}.sha256")
        if pin.is_file() and pin.read_text("utf-8").strip() != sha256_of(path):
            raise Refused(
                f"the timing cache {path} was changed after it was written: its hash differs.",
                hint=f"Delete it and {pin.name}; the builder then measures again.",
                code="build.timing-cache",
            )
        return cls(path, path.read_bytes())

    def keep(self, content: bytes) -> str:
        """Write the timing cache with its hash, and return the hash."""
        pin = self.path.with_name(f"{self.path.name}.sha256")
        pin.unlink(missing_ok=True)  # so that it is never next to another cache
        write_bytes(self.path, content)
        digest = sha256_of(self.path)
        write_text(pin, f"{digest}\n")
        return digest


# The build

Sizes = tuple[int, ...]
LARGEST_BATCH = 64
DEVICE_ONLY = "on the device alone"
PROBES, AT_ONCE = 4, 3  # images, run in batches of 3 and 1 if the batch is dynamic


def build_by(options: BuildOptions, run: str | Path | None = None, *, progress: Progress = silent) -> BuildArtefact:
    """Build an engine from the run's ONNX model, verify its layer types, and compare its outputs if it runs here.

    Args:
        run: The run folder, or one of its ONNX models if it has several for this target; the newest run when None.
        options: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Returns:
        The result. Its verdict is failed if the engine computes in another precision than requested, or if its outputs
        differ from those of the ONNX model. The outputs of a lossy engine whose export had no images are compared on
        random ones; that link is at best *not verified*.

    Raises:
        GateFailed: If an earlier check failed and ``allow_unverified`` is false.
        EnvironmentProblem: If the target's runtime is missing here, or has another version than the target's.
        Refused: If the runtime does not accept the graph, or the ONNX model was changed since its export.
        UsageProblem: If there is no such ONNX model, the runtime has no such option, or repaconv did not write the file
            that would be replaced.
    """
    plan = _plan(options, run)
    progress(f"build for {plan.device.name}", 0, 0)
    with lock_folder(plan.run.folder):
        if "engines" not in plan.engine.can:  # cheap here; an engine builder takes minutes
            require_survived(plan.engine, plan.source, plan.given.session(plan.device, plan.options.precision))
        built = plan.engine.build(_build_request(plan, progress))
        wrote = _write(plan, built)
        links = _engine_links(plan, progress) if built.runs_here else ()
        artefact = _artefact(plan, built, links, wrote[1:])
        replace_artifact(plan.slot, artefact)
    return with_files(artefact, [plan.source], [*wrote, plan.slot])


build = by_name(build_by, BuildOptions)


class _Plan(NamedTuple):
    """The options resolved for one run: the model, the runtime, and the files to write."""

    options: BuildOptions
    options_given: tuple[str, ...]
    run: run_folder.Run
    folded: FoldArtefact
    exported: ExportArtefact
    source: Path
    overridden: tuple[str, ...]
    device: Target
    engine: Engine
    version: str
    timings: TimingCache
    name: str
    file: Path
    log: Path
    slot: Path
    given: ResolvedOptions[BuildOptions]


def _plan(options: BuildOptions, run: str | Path | None) -> _Plan:
    """Make every check that comes before the runtime is called."""
    device, engine, version = _runtime(options)
    taken, model = run_folder.run_and_model(Path(run) if run else None)
    given = resolve_preset(options, folded := run_folder.fold_of(taken))
    if given.deployment is not None:
        options = given.options
        device, engine, version = _runtime(options)
    typed = "fp32" if device.typed_by == "runtime" and options.precision == "bf16" else options.precision
    exported, path, variant = export_for(
        taken, folded, options.target, typed, model=model, form=given.preset, form_size=given.image_size
    )
    overridden = run_folder.require_passed_checks(taken, folded, (exported, path), unverified=options.allow_unverified)
    name = variant.model_copy(update={"precision": options.precision}).full
    file, log, slot = (taken.engine(name, suffix) for suffix in (engine.suffix, ".log", ".json"))
    require_replaceable(slot, "build", file, log)
    return _Plan(
        options=options,
        options_given=(*([str(model)] if model else []), *options.words()),
        run=taken,
        folded=folded,
        exported=exported,
        source=run_folder.onnx_model_of(taken, exported),
        overridden=overridden,
        device=device,
        engine=engine,
        version=version,
        timings=TimingCache.of(Path(options.timing_cache) if options.timing_cache else None, device, version),
        name=name,
        file=file,
        log=log,
        slot=slot,
        given=given,
    )


def _runtime(options: BuildOptions) -> tuple[Target, Engine, str]:
    """The target, the runtime that builds for it, and the runtime's version here."""
    device = load_target(options.target)
    engine: Engine = plugins.load(plugins.ENGINES, device.runtime)
    if "networks" in engine.can:
        raise nothing_to_build(engine.name)
    _require_supported(
        engine, workspace=options.workspace_mib, timing_cache=options.timing_cache, replay=options.replay
    )
    return device, engine, version_for(device, engine, options.precision)


def _require_supported(engine: Engine, **options: Any) -> None:
    """Refuse options that this runtime's builder does not use.

    Raises:
        UsageProblem: If there are any.
    """
    idle = [f"--{name.replace('_', '-')}" for name, given in options.items() if given and name not in engine.takes]
    if idle:
        raise UsageProblem(
            f"{', '.join(idle)} has no effect here: {engine.name} does not use it.",
            hint="Leave it out; it is for TensorRT.",
            code="usage.idle",
        )


def _build_request(plan: _Plan, progress: Progress) -> BuildSpec:
    """The request to the runtime's builder."""
    options, device = plan.options, plan.device
    return BuildSpec(
        model=plan.source,
        precision=options.precision,
        capabilities=(device.compute_capability,),
        shapes=_profile(plan) if device.compute_capability else {},
        fp32_nodes=plan.exported.fp32_nodes,
        here=device.architecture == platform.machine(),
        threads=plan.given.threads(device),
        settings=plan.given.settings,
        workspace=None if options.workspace_mib is None else options.workspace_mib * 2**20,
        timing_cache=plan.timings.content,
        replay=options.replay,
        tick=progress,
    )


def _profile(plan: _Plan) -> dict[str, tuple[Sizes, Sizes, Sizes]]:
    """The input shapes of TensorRT's optimization profile; see `profile_shapes`."""
    import onnx

    graph = onnx.load(plan.source, load_external_data=False)
    return profile_shapes(graph, source_model_of(plan.run), plan.exported.batch, plan.device.bench.batch)


def profile_shapes(
    model: onnx.ModelProto, source_model: SourceModel, batch: Batch, usual: int
) -> dict[str, tuple[Sizes, Sizes, Sizes]]:
    """Minimum, optimal and maximum shape of each input with dynamic dimensions, for TensorRT's optimization profile.

    Only the batch has a range; other dynamic dimensions have their usual size.

    Args:
        model: The exported graph.
        source_model: The source model, which knows the usual size of each named dimension.
        batch: Batch size of the export; a fixed one has no range.
        usual: Batch size of the target.

    Raises:
        Refused: If the usual size of a dimension is not known.
    """
    size = source_model.folded.image_size
    sides = dict(zip(("height", "width"), size, strict=True)) if size else {}
    counts = (1, usual, max(usual, LARGEST_BATCH)) if batch == "dynamic" else (batch,) * 3
    named = [{"batch": count, **sides} if size else source_model.free_sizes(count) for count in counts]
    found = {}
    for entry in model.graph.input:
        dims = named_dims_of(entry)
        for name in (dim for dim in dims if isinstance(dim, str) and dim not in named[0]):
            raise Refused(
                f"the usual size of the dynamic dimension {name} of the input {entry.name} is unknown, and TensorRT "
                "needs it to build an engine.",
                hint="Export the model with fixed sizes from its framework, and fold that.",
                code="build.profile",
            )
        if any(isinstance(dim, str) for dim in dims):
            least, usually, most = (
                tuple(dim if isinstance(dim, int) else sizes[dim] for dim in dims) for sizes in named
            )
            found[entry.name] = (least, usually, most)
    return found


def _write(plan: _Plan, built: Built) -> list[Path]:
    """Write the engine, and the builder's log if there is one."""
    write_payload(plan.file, built.engine)
    if built.log:
        write_payload(plan.log, f"{built.log}\n")
    return [plan.file, *([plan.log] if built.log else [])]


def _engine_links(plan: _Plan, progress: Progress) -> tuple[Link, ...]:
    """Compare the engine with the ONNX model that it was built from."""
    from repaconv.verification.comparison import Comparison
    from repaconv.verification.model_runners import FixedBatch
    from repaconv.verification.tolerances import tolerance

    progress("engine against its model", 0, 0)
    folded, exported, precision = plan.folded, plan.exported, plan.options.precision
    source_model, whole = source_model_of(plan.run), folded.whole
    size = folded.image_size if exported.image_size == "dynamic" else exported.image_size
    batch = None if exported.batch == "dynamic" or whole else int(exported.batch)
    given, no_evidence = _comparison_inputs(plan, source_model, size)
    scores = scores_output(source_model, given)
    allowed = tolerance(
        "engine",
        precision=precision,
        logits=bool(scores),
        decides=source_model.decides,
        usual=folded.tolerances,
        reasons=folded.tolerance_reasons,
    )
    after = FixedBatch(load_session(plan.engine, plan.file, plan.given.session(plan.device, precision)), batch)
    before = FixedBatch(load_onnx(plan.source), batch)
    found = Comparison(plan.file.name, allowed, scores, evaluation=evaluation_of(source_model, precision, given.size))
    for piece in given.batches(AT_ONCE):
        feeds, rounding = piece.feeds(before.inputs), network_rounding(source_model, piece.feeds(source_model.inputs))
        found.add(after.run(feeds), before.run(feeds), whole=whole, rounding=rounding)
    name = "ONNX" if exported.precision == "fp32" else f"ONNX, {exported.precision}"
    links = (
        link.model_copy(update={"inputs": given.name}) for link in found.links("engine", f"{name} under ONNX Runtime")
    )
    return tuple(without_evidence(link, no_evidence) if no_evidence else link for link in links)


def _comparison_inputs(plan: _Plan, source_model: SourceModel, size: ImageSize | None) -> tuple[Inputs, str]:
    """The images on which a lossy model was evaluated, if they exist and fit the engine; otherwise random images.

    The second value says why a lossy engine that passes on random images is not verified; empty if it is verified.
    """
    exported, lossy = plan.exported, plan.options.precision != "fp32"
    lowered = lossy and exported.precision == "fp32"
    given = why_without_images(exported) if lowered else evaluation_images(source_model, exported, most=MAX_IMAGES)
    if not isinstance(given, str):
        if given.size != size:
            given = f"the engine does not take images of the size of {given.name}"
        elif exported.preprocessing and given.piece(0, 1).pixels is None:
            given = f"the engine takes pixels, and {given.name} are normalized"
        else:
            return given, ""
    fixed = exported.batch if isinstance(exported.batch, int) else None
    pixels = plan.folded.preprocessing is not None
    random = choose_inputs(source_model, count=PROBES, size=size, pixels=pixels, batch=fixed).together(fixed)
    return random, given if lossy else ""


def _artefact(plan: _Plan, built: Built, links: tuple[Link, ...], logs: list[Path]) -> BuildArtefact:
    from repaconv.verification.tolerances import verdict_of

    typed_right, note = _precision_check(plan, built)
    # without outputs to evaluate, as of an engine for another machine, the verdict is that of the layer types
    outputs = [link for link in links if link.reason != "unsuitable_inputs"]
    outputs_verdict = verdict_of(outputs) if outputs else "passed"
    return BuildArtefact(
        made_by={**made_by(), plan.device.runtime: plan.version},
        verdict=outputs_verdict if typed_right else "failed",
        unverified=plan.overridden,
        options=plan.options_given,
        other_files=tuple(payload_of(each, plan.slot.parent) for each in logs),
        variant=plan.name,
        target=plan.device.name,
        runtime=f"{plan.engine.name} {plan.version}",
        compute_capability=plan.device.compute_capability,
        precision=plan.options.precision,
        layer_types=dict(built.types),
        builder_options=dict(built.options),
        settings=plan.given.settings,
        timing_cache=plan.timings.keep(built.timing_cache) if built.timing_cache else "",
        note=note + ("" if built.runs_here else ", untested here") + _image_size_note(plan),
        links=links,
        onnx_sha256=plan.exported.payload.sha256,
        payload=payload_of(plan.file, plan.file.parent),
    )


def _image_size_note(plan: _Plan) -> str:
    """A note on the image size, if the graph accepts any and the engine only one."""
    if plan.exported.image_size != "dynamic" or not plan.device.compute_capability:
        return ""
    height, width = plan.folded.image_size or (0, 0)
    return f"; for images of {height} x {width}, the usual: for others, export with --image-size"


def _precision_check(plan: _Plan, built: Built) -> tuple[bool, str]:
    """Whether the engine computes in the requested precision, and how that was read."""
    precision, asked = plan.options.precision, f".{label(plan.options.precision)}"
    wrong = {name: count for name, count in built.types.items() if not name.endswith(asked)}
    staying = {name: count for name, count in wrong.items() if precision == "int8" and name in built.may_stay}
    other = sum(wrong.values()) - sum(staying.values())
    right = other <= len(plan.exported.unquantized_layers) and any(name.endswith(asked) for name in built.types)
    kept = f"; {', '.join(staying)} multiplies activations, which this runtime does not quantize" if staying else ""
    return right, built.types_source + kept


def work_possible(target: str) -> str:
    """How much can be done for a target on this machine: ``build and bench``, ``build`` or ``export``."""
    device = load_target(target)
    try:
        version_for(device, plugins.load(plugins.ENGINES, device.runtime))
    except EnvironmentProblem:
        return "export"
    return "build" if why_not_here(device) else "build and bench"


def target_support(target: str) -> list[plugins.PluginRow]:
    """Return what can be done for a target on this machine, and what is missing for the rest."""
    device = load_target(target)
    engine: Engine = plugins.load(plugins.ENGINES, device.runtime)
    wanted = f"{device.runtime} {device.runtime_version}".strip()
    export = f"works: opset {device.opset}, {', '.join(device.precisions)}"
    rows = [plugins.PluginRow(device.name, "export", wanted, "", export)]
    try:
        here, problem = f"works: {device.runtime} {version_for(device, engine)}", ""
    except EnvironmentProblem as error:
        here, problem = "", f"{error.message} {error.hint}"
    rows.append(plugins.PluginRow(device.name, "build", wanted, problem, here))
    why = why_not_here(device)
    verified = ("", DEVICE_ONLY) if why and "elsewhere" in engine.can else (problem, here)
    rows.append(plugins.PluginRow(device.name, "verify", wanted, *verified))
    if why:
        text = "\n".join([f"{why}; one of these:", *remote_commands(device, BenchOptions(target=target))])
        return [*rows, plugins.PluginRow(device.name, "bench", wanted, *((text, "") if problem else ("", text)))]
    return [*rows, plugins.PluginRow(device.name, "bench", wanted, problem, here)]
