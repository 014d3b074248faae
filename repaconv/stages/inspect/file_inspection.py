"""inspect, for what is no checkpoint: ONNX graphs and engines, read as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from repaconv.core.errors import Refused
from repaconv.core.files import sha256_of
from repaconv.results import Fact, FileInspection
from repaconv.stages.shared.engine_files import built_as
from repaconv.stages.shared.pinned_files import require_pinned

# How serialised engines begin. TensorRT's own has no more in it that its makers have said; TensorRT-RTX's next bytes
# are as its 1.7 writes them.
ENGINES = {b"ftrt": "TensorRT engine", b"vtrt": "TensorRT-RTX engine"}
BUILT = ("runtime", "target", "precision", "verdict")
NOT_CHECKPOINTS = (".onnx", ".ort", ".engine", ".plan", ".blob")


def inspect_file(file: str | Path, sha256: str | None = None) -> FileInspection:
    """Describe an ONNX file or an engine by its bytes: nothing of it is loaded or run.

    Raises:
        Refused: If there is no such file, an .onnx file is no ONNX model, or its hash is not ``sha256``.
    """
    path = Path(file)
    if not path.is_file():
        raise Refused(f"there is no file {path}.", hint="Give a file.", code="inspect.missing")
    size, digest = path.stat().st_size, sha256_of(path)
    require_pinned(path, sha256, digest)
    if path.suffix == ".onnx":
        facts, problems = _graph(path)
        return FileInspection(
            path=str(path), kind="ONNX graph", sha256=digest, bytes=size, facts=facts, problems=problems
        )
    with path.open("rb") as opened:
        head = opened.read(32)
    kind = ENGINES.get(
        head[:4], {".blob": "OpenVINO compiled model", ".ort": "ONNX Runtime model"}.get(path.suffix, "")
    )
    told = [Fact(name="first bytes", value=head[:4].hex(" "), source="file")]
    if head[:4] == b"vtrt":
        told.append(Fact(name="built by", value=".".join(map(str, head[24:28])), source="header"))
    built = built_as(path)
    if built is not None:
        told += [Fact(name=name, value=getattr(built, name), source=path.with_suffix(".json").name) for name in BUILT]
    problems = () if kind else (f"it does not begin as an engine of {' or '.join(ENGINES.values())} does",)
    warning = "loading an engine runs code in it: give none of unknown origin to verify or bench"
    told.append(Fact(name="caution", value=warning, source="what engines are"))
    return FileInspection(
        path=str(path), kind=kind or "unknown", sha256=digest, bytes=size, facts=tuple(told), problems=problems
    )


def _graph(path: Path) -> tuple[tuple[Fact, ...], tuple[str, ...]]:
    from repaconv.graph.onnx_files import external_files, read_graph, strays
    from repaconv.onnx_export.torch_exporter import operators_of

    model = read_graph(path)

    def shape(value: Any) -> str:
        dims = [dim.dim_param or str(dim.dim_value or "?") for dim in value.type.tensor_type.shape.dim]
        return f"{value.name} [{', '.join(dims)}]"

    weights = {weight.name for weight in model.graph.initializer}
    told = {
        "opset": ", ".join(f"{entry.domain or 'ai.onnx'} {entry.version}" for entry in model.opset_import),
        "IR version": model.ir_version,
        "made by": f"{model.producer_name} {model.producer_version}".strip() or "not said",
        "inputs": ", ".join(shape(value) for value in model.graph.input if value.name not in weights),
        "outputs": ", ".join(shape(value) for value in model.graph.output),
        "operators": ", ".join(f"{count} {name}" for name, count in operators_of(model).items()),
        **({"weights in": ", ".join(external_files(model))} if external_files(model) else {}),
    }
    facts = [Fact(name=name, value=value, source="graph") for name, value in told.items()]
    facts += [Fact(name=entry.key, value=entry.value, source="metadata") for entry in model.metadata_props]
    outside = tuple(f"it wants weights from {name!r}, outside its folder" for name in strays(model, path.parent))
    gone = tuple(
        f"its weights {name!r} are not there"
        for name in external_files(model)
        if name not in strays(model, path.parent) and not (path.parent / name).is_file()
    )
    return tuple(facts), outside + gone
