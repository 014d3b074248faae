"""Fold an arbitrary ONNX graph: apply the fold rewrites in float64, check the result, and list what is not folded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from repaconv.core.errors import Refused, first_line
from repaconv.core.memory_release import release_freed_memory
from repaconv.graph.invalid_graphs import misfit
from repaconv.graph.onnx_files import opset_of
from repaconv.graph.operator_facts import BFLOAT16, DEFAULT_DOMAIN, NCHWC, OLDEST_OPSET, operators_of
from repaconv.results import Change
from repaconv.verification.onnx_model_loading import checker_error, checker_error_if_unloadable

if TYPE_CHECKING:
    import onnx

    from repaconv.graph.float64_rewriting import Float64Graph

CONTROL_FLOW = ("If", "Loop", "Scan")
QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger")


class Folded(NamedTuple):
    """A folded graph, the changes, and the same fold before its weights were rounded to float32.

    ``in_float64`` is None where nothing changed, and where the graph cannot be folded in float64 and rounded.
    """

    model: onnx.ModelProto
    changes: list[Change]
    in_float64: Float64Graph | None = None


def folded(source: Path, model: onnx.ModelProto, reverted: Collection[str] = (), *, typed: bool = True) -> Folded:
    """Apply the fold rewrites to a graph.

    The folded graph is valid ONNX with the same inputs and outputs.

    Args:
        source: The graph's file, for messages.
        model: The graph.
        reverted: Names of the rewrites to leave out.
        typed: Whether to check all types; not possible for a float64 copy with operators that ONNX has no float64 for.

    Raises:
        Refused: ``onnx.invalid`` if the graph is not valid ONNX, ``onnx.rewrite`` if a rewrite fails.
    """
    from repaconv.graph.graph_without_weights import check

    if not is_foldable(model):
        return Folded(model, [])
    try:
        found = _folded(model, reverted)
        release_freed_memory()
        check(found.model)
        if typed:
            _check_types(found.model, model)
    except Exception as error:  # an arbitrary graph may raise anything; nothing is written then
        rejected = checker_error_if_unloadable(model)
        if why := f"{rejected}; ONNX Runtime does not load it either" if rejected else misfit(model):
            raise Refused(
                f"{source} is not valid ONNX: {why}.",
                hint="Export it again; `repaconv inspect` shows what it holds.",
                code="onnx.invalid",
            ) from error
        raise Refused(
            f"{source} cannot be rewritten: {first_line(error)}.",
            hint="This is a defect of repaconv; please report it with `repaconv inspect` of the file.",
            code="onnx.rewrite",
        ) from error
    return found


def _folded(model: onnx.ModelProto, reverted: Collection[str]) -> Folded:
    """Fold a graph in float64 and round it once; in its own types if float64 and back is another graph."""
    from repaconv.graph.float64_rewriting import is_float64_convertible, rewritten_in_float64, rounded_to_float32
    from repaconv.graph.models_in_onnx_ir import rewritten
    from repaconv.rewrites.fold.fold_pipeline import without
    from repaconv.rewrites.fold.hard_swish_operator import HARD_SWISH
    from repaconv.rewrites.fold.instance_norm_operator import INSTANCE_NORM
    from repaconv.rewrites.fold.prelu_operator import PRELU
    from repaconv.rewrites.fold.removed_and_added_layers import changed_layers

    if _has_other_types(model):
        reverted = {*reverted, HARD_SWISH.name, INSTANCE_NORM.name, PRELU.name}
    if not is_float64_convertible(model) or _may_write_borders(model):
        return Folded(*rewritten(model, without(reverted), changed_layers))
    exact, changes = rewritten_in_float64(model, without(reverted), changed_layers)
    return Folded(rounded_to_float32(exact), changes, exact) if changes else Folded(model, [])


def _has_other_types(model: onnx.ModelProto) -> bool:
    """Whether the graph may compute in a type that HardSwish, InstanceNormalization and PRelu lack.

    ONNX Runtime lacks float64, PRelu and LeakyRelu in most opsets, and the opset of the others bfloat16.
    """
    from repaconv.graph.element_type_conversion import element_types
    from repaconv.graph.float64_rewriting import DOUBLE

    kinds = set(element_types(model.graph))
    return DOUBLE in kinds or (BFLOAT16 in kinds and opset_of(model) < 22)


def _may_write_borders(model: onnx.ModelProto) -> bool:
    """Whether the graph may write borders into images.

    A border equals the bias that it stands for up to rounding in float32, and a fold in float64 would not take it.
    """
    return {"Pad", "ScatterND"} <= {node.op_type for node in model.graph.node}


def _check_types(smaller: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Run ONNX's strict check of all types and shapes; a failure is ignored if the original graph fails it too.

    Raises:
        onnx.shape_inference.InferenceError: The folded graph fails the check, the original does not.
    """
    from repaconv.graph.graph_without_weights import check

    try:
        check(smaller, full=True)
    except Exception:
        if not checker_error(model):
            raise


def is_foldable(model: onnx.ModelProto) -> bool:
    """Whether the graph can be folded: its opset is recent enough, and it is not quantized."""
    return opset_of(model) >= OLDEST_OPSET and not any(node.op_type in QUANTIZED for node in model.graph.node)


def parts_not_folded(model: onnx.ModelProto) -> Iterator[str]:
    """Describe what is not folded and why: control flow, quantized graphs, custom operators."""
    kinds = {node.op_type for node in model.graph.node}
    if found := sorted(kinds & set(CONTROL_FLOW)):
        yield f"{', '.join(found)}: which branch runs is not known before it does"
    if found := sorted(kinds & set(QUANTIZED)):
        yield f"the graph is quantized ({found[0]}): its integers do not fold exactly; fold it before quantizing"
    foreign = {node.domain for node in model.graph.node} - {*DEFAULT_DOMAIN}
    if NCHWC in foreign:
        yield f"{operators_of(NCHWC)}; fold the file from before that"
    if others := sorted(foreign - {NCHWC}):
        yield f"operators of {', '.join(others)}: what they compute is not known here"
