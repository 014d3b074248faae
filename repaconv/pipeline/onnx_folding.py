"""fold, for an ONNX graph of whatever origin: what can be folded without knowing its method, and both are run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from repaconv.artefacts import Change, Link, OnnxFoldArtefact
from repaconv.errors import Refused, UsageProblem
from repaconv.exporters.to_onnx import ONE_FILE_BYTES, operators_of
from repaconv.files import payload_of, read_artefact, sha256_of, write_bytes
from repaconv.graphs.opsets import OLDEST
from repaconv.onnxfile import external_files, opset_of, read_graph, require_inside
from repaconv.replacing import put, require_ours
from repaconv.steps.common import Progress, made_by, silent, with_files
from repaconv.steps.fold_proof import not_equal, proved
from repaconv.steps.opsets import to_oldest

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

CONTROL = ("If", "Loop", "Scan")
QUANTISED = ("QuantizeLinear", "DequantizeLinear", "QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger")


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
        Refused: If it is no sound ONNX file, wants files from outside its folder, holds more than 2 GiB, or if no
            output of it could be compared: nothing is written that was not proved.
        GateFailed: If the folded graph computes something else; nothing is written then.
        UsageProblem: If there is a file of that name from elsewhere.
    """
    source = Path(path)
    model = _loaded(source)
    target = _target(source, Path(out) if out else None)
    _require_free(target, sha256_of(source), force=force)
    progress("fold", 0, 0)
    raised = to_oldest(model)
    folded, changes = _folded(source, raised.model)
    raised = raised.proved(source, model) if changes else raised
    folded, changes = (model, []) if raised.left else (folded, changes)
    links = (*raised.links, *_proved(source, model, folded, progress)) if changes else ()
    artefact = _artefact(source, raised.model, folded, changes, links)
    artefact = artefact.model_copy(update={"left": (*raised.left, *artefact.left), "opset": opset_of(model)})
    if not changes:
        return with_files(artefact, [source], [])
    report = target.with_suffix(".json")
    write_bytes(target, folded.SerializeToString(deterministic=True))
    artefact = artefact.model_copy(update={"payload": payload_of(target, target.parent)})
    put(report, artefact)
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
    """Refuse to write over what is not an earlier fold of the same graph, or with force of any graph."""
    report = target.with_suffix(".json")
    require_ours(report, "fold", target)
    known = read_artefact(report, OnnxFoldArtefact) if report.exists() else None
    if known is not None and known.sha256 != digest and not force:
        raise UsageProblem(
            f"{target} is there already, and was not folded from this graph.",
            hint="Give another name with -o, or --force to replace it.",
            code="usage.exists",
        )


def _folded(source: Path, model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Change]]:
    """The rewritten graph, valid ONNX with the same inputs and outputs, and what was changed."""
    import onnx

    from repaconv.folds.fold import FOLDS
    from repaconv.graphs.graph import rewritten

    if not _looked_into(model):
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


def _proved(source: Path, model: onnx.ModelProto, folded: onnx.ModelProto, progress: Progress) -> tuple[Link, ...]:
    """The links between the two; nothing is written where one of them fails."""
    progress("ONNX Runtime", 0, 0)
    links = proved(source, model, folded)
    if any(link.verdict == "failed" for link in links):
        raise not_equal(source, links)
    return links


def _artefact(
    source: Path, model: onnx.ModelProto, folded: onnx.ModelProto, changes: list[Change], links: tuple[Link, ...]
) -> OnnxFoldArtefact:
    """What was done, with what it costs before and after."""
    from repaconv.folds.standing import standing
    from repaconv.graphs.costs import macs, parameters

    given, smaller = _settled(model), _settled(folded)
    before, after = macs(given), macs(smaller)
    return OnnxFoldArtefact(
        made_by=made_by("onnx", "onnx-ir", "onnxruntime"),
        verdict="passed" if any(link.verdict == "passed" for link in links) else "not verified",
        source=str(source),
        sha256=sha256_of(source),
        bytes=source.stat().st_size,
        opset=opset_of(folded),
        parameters=(parameters(given), parameters(smaller)),
        macs=None if before is None or after is None else (before, after),
        nodes=(len(model.graph.node), len(folded.graph.node)),
        operators=operators_of(folded),
        changes=tuple(changes),
        left=(*_left_alone(model), *(standing(smaller) if _looked_into(folded) else ())),
        links=links,
    )


def _settled(model: onnx.ModelProto) -> ir.Model:
    from repaconv.graphs.graph import read
    from repaconv.graphs.settling import settle

    graph = read(model)
    settle(graph)
    return graph


def _looked_into(model: onnx.ModelProto) -> bool:
    return opset_of(model) >= OLDEST and not any(node.op_type in QUANTISED for node in model.graph.node)


def _left_alone(model: onnx.ModelProto) -> Iterator[str]:
    """What is not looked into, and why."""
    kinds = {node.op_type for node in model.graph.node}
    if found := sorted(kinds & set(CONTROL)):
        yield f"{', '.join(found)}: which branch runs is not known before it does"
    if found := sorted(kinds & set(QUANTISED)):
        yield f"the graph is quantised ({found[0]}): its integers do not fold exactly; fold it before quantising"
    foreign = sorted({node.domain for node in model.graph.node} - {"", "ai.onnx"})
    if foreign:
        yield f"operators of {', '.join(foreign)}: what they compute is not known here"
