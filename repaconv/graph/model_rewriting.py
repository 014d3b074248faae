"""An ONNX graph as onnx-ir has it: constants in float64, nodes put in place of others, what is left over removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from repaconv.core.progress import only_errors
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

    from repaconv.graph.rewrite_contract import Rewrite


def read(proto: onnx.ModelProto) -> ir.Model:
    """The model to rewrite: functions inlined, constants as initializers, shapes inferred where they were not said."""
    from repaconv.graph.shape_inference import infer, name_sizes

    model = as_stored(proto)
    name_sizes(model)
    infer(model)
    return model


def as_stored(proto: onnx.ModelProto) -> ir.Model:
    """The model with functions inlined and constants as initializers: one for each that the file holds."""
    import onnx_ir as ir
    from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass

    model = ir.from_proto(proto)
    if model.functions:
        InlinePass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return model


def write(model: ir.Model) -> onnx.ModelProto:
    """The model as a file has it."""
    import onnx_ir as ir

    return ir.to_proto(model)


def rewritten(
    proto: onnx.ModelProto,
    rewrites: Iterable[Rewrite],
    observe: Callable[[ir.Model], Callable[[list[Change]], list[Change]]] | None = None,
) -> tuple[onnx.ModelProto, list[Change]]:
    """The same function with every rewrite applied in this order, each wherever it is valid; and what changed.

    Args:
        proto: Left as it is. Its weights lie inside it.
        rewrites: What to apply. The graph's opset is raised to what they write.
        observe: Makes of the model what completes the changes of each rewrite when they are made.
    """
    model = read(proto)
    changes: list[Change] = []
    completed = observe(model) if observe else None
    for rewrite in rewrites:
        made = list(rewrite.apply(model))
        if made:
            made = completed(made) if completed else made
            tidy(model)
            model.graph.opset_imports[""] = max(model.graph.opset_imports[""], rewrite.opset)
        changes += made
    if not changes:
        let_go(model)
        return proto, []
    tidy(model)
    written = write(model)
    let_go(model)
    ends = zip(written.graph.output, proto.graph.output, strict=True)
    for now, before in (*zip(written.graph.input, proto.graph.input, strict=True), *ends):
        if before.type.tensor_type.HasField("shape"):
            now.CopyFrom(before)  # names that only we gave to free sizes go
    return written, changes


def let_go(model: ir.Model) -> None:
    """Forget the weights: what is left of a graph names itself, and would keep them until somebody collects."""
    for value in model.graph.initializers.values():
        value.const_value = None


def tidy(model: ir.Model) -> None:
    """Remove what nothing reads, put nodes in order, infer the shapes of what is new."""
    from repaconv.graph.shape_inference import infer

    clean(model)
    infer(model, only_new=True)


def clean(model: ir.Model) -> None:
    """Remove what nothing reads, put nodes in order; shapes stay as they were said."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

    RemoveUnusedNodesPass()(model)
    TopologicalSortPass()(model)


def without_copies(model: ir.Model) -> None:
    """Constants that are equal are one; those that are inputs as well stay, of which onnx_ir warns one by one."""
    from onnx_ir.passes.common import DeduplicateInitializersPass

    with only_errors("onnx_ir.passes.common.initializer_deduplication"):
        DeduplicateInitializersPass()(model)
