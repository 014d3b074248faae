"""A model to compare, opened: a run's graph or weights, an ONNX file, an engine, or a checkpoint."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv.core import run_folder
from repaconv.core.errors import Refused, UsageProblem
from repaconv.core.files import CHECKPOINT_SUFFIXES, sha256_of
from repaconv.core.sharded_checkpoint import bytes_of_checkpoint, checkpoint_at, is_index, sha256_of_checkpoint
from repaconv.engines.contract import ENGINE_SUFFIXES
from repaconv.graph.onnx_files import constants_of, external_files, read_graph
from repaconv.results import ComparedEnd
from repaconv.sources.graph_fold import QUANTIZED
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.shared.exports_of_run import exports_of
from repaconv.stages.shared.model_opening import open_model
from repaconv.verification.model_runners import FixedBatch
from repaconv.verification.rounding import HALVES
from repaconv.verification.tolerances import coarser

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Session
    from repaconv.engines.targets import Target
    from repaconv.sources.source_model import SourceModel


class ComparedModel(NamedTuple):
    """The reference or the candidate of a comparison.

    Attributes:
        path: Its graph or engine file; None if it runs in torch.
        runner: Runs it.
        source_model: The source model of the run that it belongs to; None if it belongs to none.
        record: Its description in the result.
        stated: The precision that its file states, as files of repaconv do; "fp32" if it states none. The record has
            the precision of the weights of such a file, unless the file belongs to a run.
    """

    path: Path | None
    runner: FixedBatch
    source_model: SourceModel | None
    record: ComparedEnd
    stated: str = "fp32"


def lower_precision(right: ComparedModel, other: ComparedModel) -> str:
    """The precision whose tolerance applies: the lower one of two models.

    If neither states one and both have weights of the same precision, it is "fp32": only rounding is between them, as
    between a graph in half precision and its fold. The precision of a run is the stated one.
    """
    stated, stored = {right.stated, other.stated}, {right.record.precision, other.record.precision}
    own = right.source_model or other.source_model or (stated == {"fp32"} and len(stored) == 1)
    return coarser([*(stated if own else stored)])


def open_for_comparison(given: Path, device: Target, threads: int) -> ComparedModel:
    """Open a model for a comparison.

    Args:
        given: A run folder (its FP32 graph for the target, else its plainest FP32 graph, else its folded weights), an
            ONNX file, an engine, or a checkpoint that was folded (its training-time network, in FP32).
        device: The target whose runtime opens graphs.
        threads: Threads per inference.

    Raises:
        Refused: If the path does not exist, or the model does not load.
        UsageProblem: If it is a checkpoint without a run.
    """
    if not given.exists():
        raise Refused(f"there is no file or folder {given}.", hint="Check its path.", code="compare.missing")
    if given.is_dir() and run_folder.Run(given).fold_json.is_file():
        return _open_run(given, device, threads)
    return _open_file(given, device, threads) if given.suffix in ENGINE_SUFFIXES else _open_checkpoint(given)


def _open_run(folder: Path, device: Target, threads: int) -> ComparedModel:
    """The run's FP32 graph for the target, else its plainest FP32 graph, else its folded weights in torch."""
    run = run_folder.Run(folder)
    folded = run_folder.fold_of(run)
    exact = [each.artefact for each in exports_of(run, folded) if each.artefact.precision == "fp32"]
    if exact:
        plainest = next((each for each in exact if each.target == device.name), exact[0])
        return _open_file(run_folder.onnx_model_of(run, plainest), device, threads)
    source_model = source_model_of(run)
    record = ComparedEnd(
        name=f"{folder}, as folded",
        engine="torch",
        precision="fp32",
        sha256=folded.payload.sha256,
        bytes=folded.payload.bytes,
    )
    return ComparedModel(None, FixedBatch(_TorchRunner(source_model, source_model.stored), None), source_model, record)


def _open_file(path: Path, device: Target, threads: int) -> ComparedModel:
    """An ONNX file or an engine."""
    found = open_model(path, device, threads=threads, dims={})
    batch = _batch_of(found.session)
    home = next((each for each in path.resolve().parents[:2] if run_folder.Run(each).fold_json.is_file()), None)
    source_model = source_model_of(run_folder.Run(home)) if home else None
    files, parameters, nodes, precision = [path], None, None, found.precision
    if path.suffix == ".onnx":
        graph = read_graph(path)
        precision = stored_precision(graph) if precision == "fp32" and source_model is None else precision
        files += [path.parent / name for name in external_files(graph)]
        parameters, nodes = _counted_as_by_fold(path, graph), len(graph.graph.node)
    record = ComparedEnd(
        name=str(path),
        engine=found.engine,
        precision=precision,
        sha256=sha256_of(path),
        bytes=sum(file.stat().st_size for file in files),
        parameters=parameters,
        nodes=nodes,
    )
    return ComparedModel(path, FixedBatch(found.session, batch), source_model, record, found.precision)


def _batch_of(session: Session) -> int | None:
    """The fixed batch size: the first dimension that all inputs and outputs have in common; None if there is none."""
    inputs, outputs = ([port.shape for port in ports] for ports in (session.inputs, session.outputs))
    if not inputs or not all((*inputs, *outputs)):
        return None
    size = inputs[0][0]
    first = {shape[0] for shape in inputs} | {shape[0] for shape in outputs if isinstance(shape[0], int)}
    return size if isinstance(size, int) and first == {size} else None


def stored_precision(graph: onnx.ModelProto) -> str:
    """The precision of a graph that states none: "int8" if operators quantize values, else that of most weights.

    The converters of other tools write no precision into a graph.
    """
    import math

    if any(node.op_type in QUANTIZED for node in graph.graph.node):
        return "int8"
    counts = dict.fromkeys((*HALVES, 1, 11), 0)
    for weight in constants_of(graph.graph).values():
        if weight.data_type in counts:
            counts[weight.data_type] += math.prod(weight.dims)
    most = max(counts, key=lambda kind: counts[kind])
    return HALVES[most][0] if most in HALVES and counts[most] else "fp32"


def parameters_of(model: onnx.ModelProto) -> int:
    """Number of parameters: elements of a graph's floating-point initializers."""
    import math

    held = model.graph.initializer
    return sum(math.prod(each.dims) for each in held if each.data_type in (1, 2, 3, 10, 11, 16))


def _counted_as_by_fold(path: Path, graph: onnx.ModelProto) -> int:
    """Number of parameters as `fold` counts them, and the entries of 8-bit constants, which are quantized weights."""
    import math

    from repaconv.verification.graph_with_cached_outputs import Evaluated
    from repaconv.verification.onnx_model_loading import loaded

    try:
        floating = Evaluated(loaded(path)).parameters
    except Refused:  # too large to be read whole: its constants are counted by their shapes
        return parameters_of(graph)
    eight_bit: int = sum(math.prod(each.dims) for each in graph.graph.initializer if each.data_type in (2, 3))
    return floating + eight_bit


def _open_checkpoint(path: Path) -> ComparedModel:
    """The training-time network of a checkpoint, if a run exists that was made from it."""
    path = checkpoint_at(path)
    sha256 = sha256_of_checkpoint(path) if path.is_file() else ""
    for fold in sorted(run_folder.OUT.glob("*/fold.json")):
        run = run_folder.Run(fold.parent)
        if sha256 and run_folder.fold_of(run).origin.sha256 == sha256:
            source_model = source_model_of(run, path)
            size = bytes_of_checkpoint(path)
            record = ComparedEnd(
                name=f"{path}, as trained", engine="torch", precision="fp32", sha256=sha256, bytes=size
            )
            return ComparedModel(
                None, FixedBatch(_TorchRunner(source_model, source_model.single()), None), source_model, record
            )
    raise UsageProblem(
        f"{path} is not a run folder, an ONNX model or an engine, and no run in {run_folder.OUT}/ was made from it.",
        hint=f"Fold it first: repaconv fold {shlex.quote(str(path))}"
        if path.suffix in CHECKPOINT_SUFFIXES or is_index(path) or run_folder.source_in(path)
        else "Give one of these, or a checkpoint that was folded.",
        code="compare.unknown",
    )


class _TorchRunner:
    """A network in torch with the input ports that it takes."""

    def __init__(self, source_model: SourceModel, form: object) -> None:
        self.inputs, self.form = source_model.inputs, form
        self.run = form.run  # type: ignore[attr-defined]
