"""fold, for an ONNX graph of whatever origin: what can be folded without knowing its method, and both are run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from repaconv.artefact import Change, Link, OnnxFoldArtefact
from repaconv.errors import GateFailed, Refused, RepaconvError, UsageProblem
from repaconv.exporters.to_onnx import ONE_FILE_BYTES, operators_of
from repaconv.files import payload_of, read_artefact, sha256_of, write_artefact, write_bytes
from repaconv.onnxfile import external_files, opset_of, read_graph, require_inside
from repaconv.pipeline.common import Progress, made_by, silent, with_files

if TYPE_CHECKING:
    import onnx

GIVEN, FOLDED = "ONNX as given", "ONNX folded"
OLDEST = 13
"""Opset that the rewrites read and write."""

CONTROL = ("If", "Loop", "Scan")
QUANTISED = ("QuantizeLinear", "DequantizeLinear", "QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger")
PROBED = (1, 16, 32, 64, 224)
"""Free sizes that are no batch, tried in this order until the graph as given runs."""


def fold_onnx(
    path: str | Path, *, out: str | Path | None = None, force: bool = False, progress: Progress = silent
) -> OnnxFoldArtefact:
    """Fold an ONNX graph, and write ``<stem>.folded.onnx`` and ``<stem>.folded.json``.

    Args:
        path: The graph; weights of their own lie in its folder.
        out: The file to write, or a folder for it; beside the graph when None.
        force: Replace a file that was not folded from this graph.
        progress: See `Progress`.

    Returns:
        What was done. Without a payload there was nothing to fold, and nothing was written.

    Raises:
        Refused: If it is no sound ONNX file, wants files from outside its folder, or holds more than 2 GiB.
        GateFailed: If the folded graph computes something else; nothing is written then.
        UsageProblem: If there is a file of that name from elsewhere.
    """
    source = Path(path)
    model = _loaded(source)
    target = _target(source, Path(out) if out else None)
    digest = sha256_of(source)
    _require_free(target, digest, force=force)
    progress("fold", 0, 0)
    folded, changes = _folded(source, model)
    links: tuple[Link, ...] = ()
    if changes:
        progress("ONNX Runtime", 0, 0)
        links = _compared(source, model, folded)
        if any(link.verdict == "failed" for link in links):
            raise _not_equal(source, links)
    before, after = _costs(model), _costs(folded)
    report = target.with_suffix(".json")
    artefact = OnnxFoldArtefact(
        made_by=made_by("onnx", "onnx-ir", "onnxruntime"),
        verdict="passed",
        source=str(source),
        sha256=digest,
        bytes=source.stat().st_size,
        opset=opset_of(folded),
        parameters=(before.parameters, after.parameters),
        macs=None if before.macs is None or after.macs is None else (before.macs, after.macs),
        nodes=(len(model.graph.node), len(folded.graph.node)),
        operators=operators_of(folded),
        changes=tuple(changes),
        left=tuple(_left_alone(model)),
        links=links,
    )
    if not changes:
        return with_files(artefact, [source], [])
    write_bytes(target, folded.SerializeToString(deterministic=True))
    artefact = artefact.model_copy(update={"payload": payload_of(target, target.parent)})
    write_artefact(report, artefact)
    return with_files(artefact, [source], [target, report])


def _loaded(path: Path) -> onnx.ModelProto:
    """The graph with its weights.

    Raises:
        Refused: See `fold_onnx`.
    """
    import onnx

    if not path.is_file():
        raise Refused(f"there is no file {path}.", hint="Check the path to the graph.", code="onnx.missing")
    require_inside(path)
    weights = [path.parent / name for name in external_files(read_graph(path))]
    gone = [file.name for file in weights if not file.is_file()]
    if gone:
        raise Refused(
            f"{path} wants its weights from {gone[0]}, which is not there.",
            hint="Put it back beside the graph.",
            code="onnx.external",
        )
    if sum(file.stat().st_size for file in (path, *weights)) >= ONE_FILE_BYTES:
        raise Refused(
            f"{path} holds more than 2 GiB, which is more than one ONNX file can.",
            hint="Fold its checkpoint, if there is one: repaconv fold ckpt.pth, then export --onnx.",
            code="onnx.too-large",
        )
    try:
        model = onnx.shape_inference.infer_shapes(onnx.load(path))  # outputs need not have said theirs
        onnx.checker.check_model(model)
    except Exception as error:
        raise Refused(
            f"{path} is not valid ONNX: {str(error).splitlines()[0]}.",
            hint="Export it again; `repaconv inspect` shows what it holds.",
            code="onnx.invalid",
        ) from error
    return model


def _target(source: Path, out: Path | None) -> Path:
    name = f"{source.stem}.folded.onnx"
    if out is None:
        return source.with_name(name)
    return out if out.suffix == ".onnx" else out / name


def _require_free(target: Path, digest: str, *, force: bool) -> None:
    """Refuse to write over what is not an earlier fold of the same graph."""
    if force or not target.exists():
        return
    report = target.with_suffix(".json")
    try:
        same = report.is_file() and read_artefact(report, OnnxFoldArtefact).sha256 == digest
    except RepaconvError:
        same = False
    if not same:
        raise UsageProblem(
            f"{target} is there already, and was not folded from this graph.",
            hint="Give another name with -o, or --force to replace it.",
            code="usage.exists",
        )


def _folded(source: Path, model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Change]]:
    """The rewritten graph, valid ONNX with the same inputs and outputs, and what was changed."""
    import onnx

    from repaconv.forms.folds.fold import FOLDS
    from repaconv.forms.graph import rewritten

    if any(node.op_type in QUANTISED for node in model.graph.node) or opset_of(model) < OLDEST:
        return model, []
    try:
        folded, changes = rewritten(model, FOLDS)
        onnx.checker.check_model(folded, full_check=True)
    except Exception as error:  # a graph of any origin: whatever goes wrong in it, nothing is written
        told = str(error).strip().splitlines()
        raise Refused(
            f"{source} cannot be rewritten: {told[0] if told else type(error).__name__}.",
            hint="This is a defect of repaconv; please report it with `repaconv inspect` of the file.",
            code="onnx.rewrite",
        ) from error
    return folded, changes


class _Costs(NamedTuple):
    parameters: int
    macs: int | None


def _costs(model: onnx.ModelProto) -> _Costs:
    from repaconv.forms.folds.costs import macs, parameters
    from repaconv.forms.graph import read
    from repaconv.forms.shapes import settle

    graph = read(model)
    settle(graph)
    return _Costs(parameters(graph), macs(graph))


def _left_alone(model: onnx.ModelProto) -> Iterator[str]:
    """What is not looked into, and why."""
    kinds = {node.op_type for node in model.graph.node}
    if found := sorted(kinds & set(CONTROL)):
        yield f"{', '.join(found)}: which branch runs is not known before it does"
    if opset_of(model) < OLDEST:
        yield f"the graph is of opset {opset_of(model)}, where Softmax and Squeeze meant something else; export it anew"
    if found := sorted(kinds & set(QUANTISED)):
        yield f"the graph is quantised ({found[0]}): its integers do not fold exactly; fold it before quantising"
    foreign = sorted({node.domain for node in model.graph.node} - {"", "ai.onnx"})
    if foreign:
        yield f"operators of {', '.join(foreign)}: what they compute is not known here"


# --- before against after ---------------------------------------------------------------------------


def _compared(source: Path, before: onnx.ModelProto, after: onnx.ModelProto) -> tuple[Link, ...]:
    """Every floating output before against after under ONNX Runtime, on seeded random inputs."""
    from repaconv.proof.parity import Meter
    from repaconv.proof.policy import exact_rtols, tolerance

    runs = [_session(source, model) for model in (before, after)]
    depth = sum(node.op_type in ("MatMul", "Gemm", "Conv") for node in before.graph.node) // 6
    half = any(weight.data_type == 10 for weight in before.graph.initializer)
    meters: dict[str, Meter] = {}
    for feeds in _probes(source, runs[0]):
        expected, got = (run.run(None, feeds) for run in runs)
        for output, right, found in zip(runs[0].get_outputs(), expected, got, strict=True):
            if not isinstance(right, np.ndarray) or right.dtype.kind not in "fiub" or not right.ndim:
                continue
            logits = right.ndim == 2 and right.shape[1] > 1 and right.dtype.kind == "f"
            allowed = tolerance("fp16" if half else "onnx", logits=logits, usual=exact_rtols(max(depth, 12)))
            meter = meters.setdefault(output.name, Meter(allowed, logits=logits))
            rows = (-1, 1) if right.ndim < 2 else right.shape
            meter.add(found.astype(np.float64).reshape(rows), right.astype(np.float64).reshape(rows))
    several = len(meters) > 1
    return tuple(
        meter.link(
            "fp16" if half else "onnx",
            f"{GIVEN}{f', output {name}' if several else ''}",
            FOLDED,
            "ONNX Runtime, two batches of seeded random inputs",
        )
        for name, meter in meters.items()
    )


def _session(source: Path, model: onnx.ModelProto) -> Any:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise Refused(
            f"ONNX Runtime does not load {source}: {str(error).splitlines()[0]}",
            hint="Without running it, nothing could be proved; give a graph of standard operators.",
            code="onnx.unloadable",
        ) from error


def _probes(source: Path, session: Any) -> list[dict[str, Any]]:
    """Two sets of inputs that the graph as given takes; its first free size is taken for the batch."""
    problem = ""
    for size in PROBED:
        probes = [_feeds(session, count, size, seed) for seed, count in enumerate((2, 3))]
        try:
            for feeds in probes:
                session.run(None, feeds)
        except Exception as error:  # the runtime's own, of many classes
            problem = str(error).splitlines()[0]
            continue
        return probes
    raise Refused(
        f"{source} does not run under ONNX Runtime on random inputs: {problem}",
        hint="Without running it, nothing could be proved. Fix its free sizes when exporting it.",
        code="onnx.unrunnable",
    )


def _feeds(session: Any, count: int, size: int, seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    feeds: dict[str, Any] = {}
    for given in session.get_inputs():
        shape = [n if isinstance(n, int) else count if not axis else size for axis, n in enumerate(given.shape)]
        kind = given.type.removeprefix("tensor(").removesuffix(")")
        dtype = {"float": "float32", "double": "float64"}.get(kind, kind)
        if dtype.startswith("float"):
            feeds[given.name] = generator.standard_normal(shape).astype(dtype)
        else:
            feeds[given.name] = generator.integers(0, 256 if dtype == "uint8" else 2, shape).astype(dtype)
    return feeds


def _not_equal(source: Path, links: tuple[Link, ...]) -> GateFailed:
    worst = max((link.metrics.max_rel_error for link in links if link.metrics), default=float("nan"))
    return GateFailed(
        f"the folded graph does not compute what {source} does: they differ by {worst:.1e}; nothing was written.",
        hint="This is a defect of repaconv; please report it with `repaconv inspect` of the file.",
        code="fold.not-equal",
    )
