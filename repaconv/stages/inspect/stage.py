"""`inspect`: describe the contents of a checkpoint, an ONNX model or an engine without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.backbones.image_size_check import require_size
from repaconv.core import plugins
from repaconv.core.errors import Refused, SettingNeeded
from repaconv.core.files import require_file, require_valid_name, sha256_of
from repaconv.method_api.settings import contradictions
from repaconv.results import BlockCost, Change, Fact, FileInspection, FoldStep, Inspection
from repaconv.sources import ultralytics_networks
from repaconv.sources.architecture_recognition import known_networks
from repaconv.sources.method_detection import choose_method, understood
from repaconv.stages.fold.layer_correspondence import with_layers
from repaconv.stages.shared.engine_files import ENGINES, build_of
from repaconv.stages.shared.fetched_files import local_weights
from repaconv.stages.shared.file_hash_check import read_hashed, require_pinned
from repaconv.stages.shared.option_dataclasses import with_checked_paths

if TYPE_CHECKING:
    from torch import nn

    from repaconv.checkpoints import Checkpoint
    from repaconv.method_api.contract import Reading


# Checkpoints


@with_checked_paths
def inspect(
    checkpoint: str | Path,
    *,
    weights: str | None = None,
    settings: Mapping[str, str] | None = None,
    sha256: str | None = None,
) -> Inspection:
    """Describe a checkpoint without running anything in it.

    Raises:
        Refused: If the file is unsafe or damaged, has no weights, or its hash is not ``sha256``.
    """
    found = read_hashed(Path(local_weights(checkpoint)), weights, sha256)
    seen = _inspected(found, settings or {})
    found.require_unchanged()
    return seen


def _inspected(found: Checkpoint, settings: Mapping[str, str]) -> Inspection:
    """The contents of a checkpoint, and what is known of its network."""
    seen = Inspection(
        origin=found.origin, sets=found.sets, placeholders=found.placeholders, method=None, form=None, reason=""
    )
    try:
        method, detection = choose_method(found, "auto")
    except Refused as error:
        facts, problems = _pickled_network(found)
        networks = () if found.modules and facts[1:] else known_networks(found)
        return seen.model_copy(
            update={"reason": error.message, "networks": networks, "facts": facts, "problems": problems}
        )
    fields = {"form": detection.form, "reason": detection.reason, "confidence": detection.confidence}
    seen = seen.model_copy(update={"method": method.name, **fields})
    try:
        reading = understood(method, found, settings)
    except Refused as error:
        lacks = {error.name: error.example} if isinstance(error, SettingNeeded) else {}
        return seen.model_copy(
            update={"problems": (f"{error.message} {error.hint}".strip(),), "missing_settings": lacks}
        )
    return seen.model_copy(update=_understood(found, method.name, reading))


def _pickled_network(found: Checkpoint) -> tuple[tuple[Fact, ...], tuple[str, ...]]:
    """Return facts about a pickled module, and why a network of Ultralytics cannot be built; none for other files."""
    if not found.modules:
        return (), ()
    module = Fact(name="pickled module", value=found.modules[""].kind, source="the pickle, read as data")
    config = ultralytics_networks.config_of(found)
    if config is None:
        return (module,), ()
    yaml = "the YAML in the file"
    stated = (
        ("architecture", ultralytics_networks.name_of(config["yaml"]), yaml),
        ("task", config["task"], f"{yaml}, its last layer"),
        ("classes", config["yaml"].get("nc"), yaml),
        ("image_size", config["imgsz"], "imgsz of its training"),
        ("written by", f"ultralytics {config['version']}" if config["version"] else None, "version"),
    )
    facts = [Fact(name=name, value=value, source=source) for name, value, source in stated if value is not None]
    return (module, *facts), ultralytics_networks.problems_of(config)


def _understood(found: Checkpoint, method: str, reading: Reading) -> dict[str, Any]:
    """The fields of an inspection that need the network: its facts, and the costs of both forms."""
    from repaconv.backbones.parameter_and_mac_counts import costs_by_block
    from repaconv.checkpoints import claimed_accuracy

    backbone = plugins.load(plugins.BACKBONES, reading.backbone)
    size = backbone.image_size(reading.config, reading.preprocessing.image_size)
    require_size(backbone, reading.config, *size)
    shape = (reading.config.in_channels, *size)

    def deploy() -> nn.Module:
        module: nn.Module = backbone.deploy(reading.config)
        return module

    before, after = costs_by_block(reading.module, shape), costs_by_block(deploy, shape)
    return {
        "backbone": reading.backbone,
        "facts": (*reading.facts, *claimed_accuracy(found.record)),
        "problems": contradictions(reading.facts),
        "applied": (method, *reading.applied),
        "training": before.pop(""),
        "deploy": after.pop(""),
        "blocks": tuple(
            BlockCost(name=name, training=cost, deploy=after[name]) for name, cost in before.items() if name in after
        ),
    }


# ONNX graphs and engines

BUILD_FIELDS = ("runtime", "target", "precision", "verdict")
NOT_CHECKPOINTS = (".onnx", ".ort", ".engine", ".plan", ".blob")


@with_checked_paths
def inspect_file(file: str | Path, sha256: str | None = None) -> FileInspection:
    """Describe an ONNX file or an engine by its bytes; nothing in it is loaded or run.

    Raises:
        Refused: If there is no such file, an .onnx file is not an ONNX model, or its hash is not ``sha256``.
    """
    path = Path(file)
    require_valid_name(path)
    require_file(path, hint="Check the path.", code="inspect.missing")
    size, digest = path.stat().st_size, sha256_of(path)
    require_pinned(path, sha256, digest)
    if path.suffix == ".onnx":
        facts, problems = _graph_facts(path)
        return FileInspection(
            path=str(path), kind="ONNX graph", sha256=digest, bytes=size, facts=facts, problems=problems
        )
    with path.open("rb") as opened:
        head = opened.read(32)
    kind = ENGINES.get(
        head[:4], {".blob": "OpenVINO compiled model", ".ort": "ONNX Runtime model"}.get(path.suffix, "")
    )
    stated = [Fact(name="first bytes", value=head[:4].hex(" "), source="file")]
    if head[:4] == b"vtrt":
        stated.append(Fact(name="built by", value=".".join(map(str, head[24:28])), source="header"))
    built = build_of(path)
    if built is not None:
        stated += [
            Fact(name=name, value=getattr(built, name), source=path.with_suffix(".json").name) for name in BUILD_FIELDS
        ]
    problems = () if kind else (f"it does not begin as an engine of {' or '.join(ENGINES.values())} does",)
    warning = "loading an engine runs code in it: give none of unknown origin to verify or bench"
    stated.append(Fact(name="caution", value=warning, source="what engines are"))
    return FileInspection(
        path=str(path), kind=kind or "unknown", sha256=digest, bytes=size, facts=tuple(stated), problems=problems
    )


def _graph_facts(path: Path) -> tuple[tuple[Fact, ...], tuple[str, ...]]:
    """The facts of an ONNX graph, and the problems with its external weights."""
    from repaconv.graph.onnx_files import external_files, files_outside, read_graph
    from repaconv.onnx_export.torch_exporter import operators_of

    model = read_graph(path)

    def shape(value: Any) -> str:
        dims = [dim.dim_param or str(dim.dim_value or "?") for dim in value.type.tensor_type.shape.dim]
        return f"{value.name} [{', '.join(dims)}]"

    weights = {weight.name for weight in model.graph.initializer}
    external = external_files(model)
    outside = files_outside(external, path.parent)
    stated = {
        "opset": ", ".join(f"{entry.domain or 'ai.onnx'} {entry.version}" for entry in model.opset_import),
        "IR version": model.ir_version,
        "made by": f"{model.producer_name} {model.producer_version}".strip() or "not said",
        "inputs": ", ".join(shape(value) for value in model.graph.input if value.name not in weights),
        "outputs": ", ".join(shape(value) for value in model.graph.output),
        "operators": ", ".join(f"{count} {name}" for name, count in operators_of(model).items()),
        **({"weights in": ", ".join(external)} if external else {}),
    }
    facts = [Fact(name=name, value=value, source="graph") for name, value in stated.items()]
    facts += [Fact(name=entry.key, value=entry.value, source="metadata") for entry in model.metadata_props]
    problems = [f"it wants weights from {name!r}, outside its folder" for name in outside]
    problems += [
        f"its weights {name!r} are not there"
        for name in external
        if name not in outside and not (path.parent / name).is_file()
    ]
    return tuple(facts), tuple(problems)


# `inspect --svg`


def draw_fold(
    source: str | Path,
    *,
    weights: str | None = None,
    settings: Mapping[str, str] | None = None,
    sha256: str | None = None,
) -> str:
    """Draw a fold as SVG: each kind of block of a method's checkpoint, or the places in a graph that are folded.

    Raises:
        Refused: If it is neither a checkpoint of a method nor an ONNX graph, or nothing in it folds.
    """
    from repaconv.stages.report.fold_picture import fold_svg, places_of

    path = Path(local_weights(source))
    graph = path.suffix == ".onnx"
    places = places_of(_changes(path, sha256) if graph else _certificate(path, weights, settings or {}, sha256))
    picture = fold_svg(places, path.name)
    if not picture:
        raise Refused(
            f"{path}: nothing to draw: no layer of it is folded into another.",
            hint="Leave out --svg.",
            code="inspect.nothing-to-draw",
        )
    return picture


def _certificate(
    path: Path, weights: str | None, settings: Mapping[str, str], sha256: str | None
) -> Sequence[FoldStep]:
    """The certificate of a checkpoint's fold, which is computed and not written."""
    found = read_hashed(path, weights, sha256)
    method, _ = choose_method(found, "auto")
    trained = understood(method, found, settings)
    backbone = plugins.load(plugins.BACKBONES, trained.backbone)
    size = backbone.image_size(trained.config, trained.preprocessing.image_size)
    steps = [part.step for part in trained.parts() if part.step]
    return with_layers(found, method, settings, trained, size, steps)


def _changes(path: Path, sha256: str | None) -> Sequence[Change]:
    """The changes of a graph's fold, which is neither verified nor measured here."""
    from repaconv.sources.graph_fold import folded
    from repaconv.sources.onnx_source import with_supported_opset
    from repaconv.verification.graph_with_cached_outputs import Evaluated
    from repaconv.verification.onnx_model_loading import loaded

    require_pinned(path, sha256)
    raised = with_supported_opset(Evaluated(loaded(path)))
    return folded(path, raised.graph.model).changes
