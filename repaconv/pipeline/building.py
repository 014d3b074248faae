"""build: an engine for a target, from the run's ONNX model, with a proof of what precision it computes in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv import registry, runs
from repaconv.artefact import BuildArtefact, ExportArtefact
from repaconv.errors import EnvironmentProblem, UsageProblem
from repaconv.files import payload_of, read_artefact, write_artefact, write_bytes, write_text
from repaconv.pipeline.common import Progress, load_target, made_by, silent, with_files

if TYPE_CHECKING:
    import onnx

    from repaconv.targets import Target

# What the parsed network calls the types, by precision asked for.
TYPES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16", "int8": "INT8"}
LARGEST_BATCH = 32


def build(
    run: str | Path | None = None,
    *,
    target: str,
    precision: str = "fp32",
    unverified: bool = False,
    progress: Progress = silent,
) -> BuildArtefact:
    """Build an engine from the run's ONNX model of that precision.

    Args:
        run: The run's folder; the newest when None.
        target: What it is for; its runtime must be able to build here.
        precision: Which of the run's ONNX models; engines are typed as their graph.
        unverified: Go on behind a failed export, and record it.
        progress: See `Progress`.

    Returns:
        The artefact; its verdict is failed if the engine does not compute in what was asked for.

    Raises:
        EnvironmentProblem: If the target's runtime is not here.
        Refused: If it does not take the graph.
        UsageProblem: If there is no ONNX model of that precision, or the runtime builds no engines here.
    """
    import onnx

    device = load_target(target)
    engine = registry.load(registry.ENGINES, device.runtime)
    if not hasattr(engine, "build"):
        raise EnvironmentProblem(
            f"engines for {device.name} are built there, by its {device.runtime} {device.runtime_version}, not here.",
            hint="Build with the board's own trtexec from the run's ONNX model, then repaconv verify --engine there.",
            code="build.elsewhere",
        )
    version = engine.version()
    taken = runs.find_run(Path(run) if run else None)
    path = taken.export_json(precision)
    if not path.is_file():
        raise UsageProblem(
            f"{taken.folder} has no {precision} ONNX model yet.",
            hint=f"repaconv export --onnx --target {device.name} --precision {precision}",
            code="build.no-model",
        )
    exported = read_artefact(path, ExportArtefact)
    overridden = runs.require_passed(exported, path, unverified=unverified)
    source = runs.graph_of(taken, exported)
    model = onnx.load(source, load_external_data=False)
    progress(f"build for {device.name}", 0, 0)
    built = engine.build(source.read_bytes(), (device.compute_capability,), _shapes(model, exported, device))
    asked = TYPES[precision]
    other = sum(count for name, count in built.types.items() if not name.endswith(f".{asked}"))
    sound = other <= len(exported.in_float) and any(name.endswith(f".{asked}") for name in built.types)
    file = taken.engine(device.name, precision, engine.suffix)
    write_bytes(file, built.engine)
    log = file.with_suffix(".log")
    write_text(log, f"{built.log}\n")
    artefact = BuildArtefact(
        made_by={**made_by(), device.runtime: version},
        verdict="passed" if sound else "failed",
        unverified=overridden,
        target=device.name,
        runtime=f"{engine.name} {version}",
        compute_capability=device.compute_capability,
        precision=precision,
        layer_types=dict(built.types),
        note="the types are those of the parsed network; the engine itself can be opened on its device alone, and was "
        "not verified here",
        onnx_sha256=exported.payload.sha256,
        payload=payload_of(file, file.parent),
    )
    beside = file.with_suffix(".json")
    write_artefact(beside, artefact)
    return with_files(artefact, [source], [file, log, beside])


def what_works(target: str) -> list[registry.PluginRow]:
    """Of a target, what of it can be done on this machine, and what would mend the rest."""
    device = load_target(target)
    engine = registry.load(registry.ENGINES, device.runtime)
    try:
        here, problem = f"{device.runtime} {engine.version()}", ""
    except EnvironmentProblem as error:
        here, problem = "", f"{error.message} {error.hint}"
    wanted = f"{device.runtime} {device.runtime_version}".strip()
    export = f"opset {device.opset}, {', '.join(device.precisions)}"
    rows = [registry.PluginRow(device.name, "export", wanted, "", f"works: {export}")]
    if hasattr(engine, "build"):
        rows.append(registry.PluginRow(device.name, "build", wanted, problem, f"works: {here}"))
        return [*rows, registry.PluginRow(device.name, "bench", wanted, "", "on the device alone, by its own tools")]
    return [*rows, registry.PluginRow(device.name, "verify and bench", wanted, problem, f"works: {here}")]


def _shapes(model: onnx.ModelProto, exported: ExportArtefact, device: Target) -> dict[str, tuple[Any, Any, Any]]:
    """Least, usual and largest shape of an input with free dimensions."""
    found = {}
    for entry in model.graph.input:
        dims = [(d.dim_param, d.dim_value) for d in entry.type.tensor_type.shape.dim]
        if not any(name for name, _ in dims):
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
