"""An ONNX graph of whatever origin: loaded, folded as far as that needs no knowledge of its method, and drawn for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from repaconv.core.change_guard import require_unchanged, stamp_of
from repaconv.core.errors import Refused, first_line
from repaconv.core.memory_release import release_freed_memory
from repaconv.graph.onnx_files import external_files, free_sizes, opset_of, read_graph, require_inside
from repaconv.graph.opset_upgrade import OLDEST
from repaconv.onnx_export.torch_exporter import ONE_FILE_BYTES
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx

    from repaconv.engines.contract import Port

TURNS = 1_000_000
"""Of a loop, beyond which a graph is not run."""
CONTROL = ("If", "Loop", "Scan")
QUANTISED = ("QuantizeLinear", "DequantizeLinear", "QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger")


def loaded(path: Path) -> onnx.ModelProto:
    """The graph with its weights.

    Raises:
        Refused: If it is no sound ONNX file, wants files from outside its folder, or holds more than 2 GiB.
    """
    import onnx

    from repaconv.graph.graph_without_weights import check, shapes_inferred

    if not path.is_file():
        raise Refused(f"there is no file {path}.", hint="Check the path to the graph.", code="onnx.missing")
    require_inside(path)
    weights = [path.parent / name for name in external_files(read_graph(path))]
    gone = [file.name for file in weights if not file.is_file()]
    if gone:
        raise Refused(
            f"{path} refers to weights in {gone[0]}, which is not there.",
            hint="Put it back next to the graph.",
            code="onnx.external",
        )
    if sum(file.stat().st_size for file in (path, *weights)) >= ONE_FILE_BYTES:
        raise Refused(
            f"{path} holds more than 2 GiB, which is more than one ONNX file can.",
            hint="Fold its checkpoint, if there is one: repaconv fold ckpt.pth, then export.",
            code="onnx.too-large",
        )
    before = {file: stamp_of(file) for file in (path, *weights)}
    try:
        model = onnx.load(path)
        free_sizes(model)
        shapes_inferred(model)  # outputs need not have said theirs
        check(model)
    except Exception as error:
        raise Refused(
            f"{path} is not valid ONNX: {first_line(error)}.",
            hint="Export it again; `repaconv inspect` shows what it holds.",
            code="onnx.invalid",
        ) from error
    for file, stamp in before.items():
        require_unchanged(file, stamp)
    _require_runnable(path, model)
    return model


def _require_runnable(path: Path, model: onnx.ModelProto) -> None:
    """Refuse what is valid and cannot be run to be compared.

    Raises:
        Refused: If it takes or gives nothing, or takes what is of no known type, or has a loop without an end.
    """
    if not inputs_of(model) or not model.graph.output:
        raise Refused(
            f"{path} takes nothing, or gives nothing: there is nothing to compare by.",
            hint="Export it again, with its inputs and outputs.",
            code="onnx.invalid",
        )
    if strange := [value.name for value in model.graph.input if not _of_a_known_type(value)]:
        raise Refused(
            f"{path} takes {strange[0]}, which is of a type that ONNX does not know.",
            hint="Export it again; `repaconv inspect` shows what it holds.",
            code="onnx.invalid",
        )
    _require_an_end(path, model)


def _require_an_end(path: Path, model: onnx.ModelProto) -> None:
    """Refuse loops that count to what nobody waits for; one that ends by a condition is run."""
    from onnx import numpy_helper

    counts = {weight.name: weight for weight in model.graph.initializer}
    for node in model.graph.node:
        count = counts.get(node.input[0]) if node.op_type == "Loop" and node.input else None
        if count is not None and (turns := int(numpy_helper.to_array(count).reshape(-1)[0])) > TURNS:
            raise Refused(
                f"{path} has a loop of {turns:,} turns, and what it computes is found by running it.",
                hint="Give its loops an end that is reached.",
                code="onnx.endless",
            )


def stored(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """A graph's constants by name, as they lie in it."""
    found = {weight.name: weight for weight in model.graph.initializer}
    constants = (node for node in model.graph.node if node.op_type == "Constant" and node.attribute)
    return found | {node.output[0]: node.attribute[0].t for node in constants}


def in_single(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph in float32 where it is of half precision, which not every runtime computes in; else itself."""
    from repaconv.graph.float64_graph import TYPED, retyped

    halves = {10, 16}
    values = (*model.graph.input, *model.graph.output)
    kinds = {weight.data_type for weight in stored(model).values()}
    kinds |= {value.type.tensor_type.elem_type for value in values}
    kinds |= {entry.i for node in model.graph.node for entry in node.attribute if entry.name in TYPED}
    return retyped(model, dict.fromkeys(halves, 1)) if kinds & halves else model


def folded(
    source: Path, model: onnx.ModelProto, taken_back: Collection[str] = (), *, typed: bool = True
) -> tuple[onnx.ModelProto, list[Change]]:
    """The rewritten graph, valid ONNX with the same inputs and outputs, and what was changed.

    Args:
        source: Its file.
        model: The graph.
        taken_back: Names of rewrites that are left out.
        typed: Whether all operators take what they are given; of a float64 copy, ONNX's schemas may say otherwise.

    Raises:
        Refused: If something goes wrong in it.
    """
    from repaconv.graph.graph_without_weights import check
    from repaconv.graph.model_rewriting import rewritten
    from repaconv.rewrites.fold.fold_pipeline import without
    from repaconv.rewrites.fold.layer_changes import changed_layers

    if not looked_into(model):
        return model, []
    try:
        smaller, changes = rewritten(model, without(taken_back), changed_layers)
        release_freed_memory()
        check(smaller)
        if typed:
            _check_types(smaller, model)
    except Exception as error:  # a graph of any origin: whatever goes wrong in it, nothing is written
        if why := _unsound(model):
            raise Refused(
                f"{source} is not valid ONNX: {why}; ONNX Runtime does not load it either.",
                hint="Export it again; `repaconv inspect` shows what it holds.",
                code="onnx.invalid",
            ) from error
        raise Refused(
            f"{source} cannot be rewritten: {first_line(error)}.",
            hint="This is a defect of repaconv; please report it with `repaconv inspect` of the file.",
            code="onnx.rewrite",
        ) from error
    return smaller, changes


def _check_types(smaller: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """ONNX's strict check of all types and shapes, unless the graph as given does not pass it.

    Raises:
        onnx.shape_inference.InferenceError: If what was made of it is at fault.
    """
    from repaconv.graph.graph_without_weights import check

    try:
        check(smaller, full=True)
    except Exception:
        if not checker_says(model):
            raise


def checker_says(model: onnx.ModelProto) -> str:
    """What is wrong with a graph by ONNX's strict check; empty if nothing is."""
    from repaconv.graph.graph_without_weights import check

    try:
        check(model, full=True)
    except Exception as error:  # onnx's own, of several classes
        return first_line(error)
    return ""


def _unsound(model: onnx.ModelProto) -> str:
    """What is wrong with a graph that neither ONNX's checker takes nor ONNX Runtime; empty if one of them does."""
    from repaconv.verification.model_runners import load_onnx

    if why := checker_says(model):
        try:
            load_onnx(model)
        except Refused:
            return why
    return ""


def looked_into(model: onnx.ModelProto) -> bool:
    """Whether its operators are those that folds know."""
    return opset_of(model) >= OLDEST and not any(node.op_type in QUANTISED for node in model.graph.node)


def left_alone(model: onnx.ModelProto) -> Iterator[str]:
    """What is not looked into, and why."""
    kinds = {node.op_type for node in model.graph.node}
    if found := sorted(kinds & set(CONTROL)):
        yield f"{', '.join(found)}: which branch runs is not known before it does"
    if found := sorted(kinds & set(QUANTISED)):
        yield f"the graph is quantised ({found[0]}): its integers do not fold exactly; fold it before quantising"
    foreign = sorted({node.domain for node in model.graph.node} - {"", "ai.onnx"})
    if foreign:
        yield f"operators of {', '.join(foreign)}: what they compute is not known here"


def inputs_of(model: onnx.ModelProto) -> tuple[Port, ...]:
    """What the graph takes, weights that are also inputs left out; a size that is free has its name, or None."""
    stored = {weight.name for weight in model.graph.initializer}
    return tuple(_port(value) for value in model.graph.input if value.name not in stored)


def _of_a_known_type(value: onnx.ValueInfoProto) -> bool:
    import onnx

    return value.type.tensor_type.elem_type in onnx.TensorProto.DataType.values()


def _port(value: onnx.ValueInfoProto) -> Port:
    import onnx

    from repaconv.engines.contract import Port

    kind = value.type.tensor_type
    known = kind.elem_type and _of_a_known_type(value)
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)) if known else ""
    dims = ((dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None) for dim in kind.shape.dim)
    return Port(value.name, tuple(dims), dtype)
