"""Read an ONNX graph into onnx-ir, apply rewrites, clean it up, and write it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from repaconv.core.progress import only_errors
from repaconv.graph.nodes_and_constants import has_subgraphs, is_read
from repaconv.graph.opset_upgrade import can_be_raised, raise_opset
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

    from repaconv.graph.rewrite_contract import Rewrite


def read(proto: onnx.ModelProto) -> ir.Model:
    """Read a model for rewriting: functions inlined, constants as initializers, missing shapes inferred."""
    return with_shapes(as_stored(proto))


def with_shapes(model: ir.Model) -> ir.Model:
    """Name the dynamic dimensions of a model and infer the shapes that are missing, in place."""
    from repaconv.graph.shape_inference import infer, name_sizes

    name_sizes(model)
    infer(model)
    return model


def as_stored(proto: onnx.ModelProto) -> ir.Model:
    """Read a model with functions inlined and constants as initializers, one for each constant in the file."""
    import onnx_ir as ir
    from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass

    model = ir.from_proto(proto)
    if model.functions:
        InlinePass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return model


def write(model: ir.Model) -> onnx.ModelProto:
    """Convert the model to ONNX's protobuf."""
    import onnx_ir as ir

    return ir.to_proto(model)


def rewritten(
    proto: onnx.ModelProto,
    rewrites: Iterable[Rewrite],
    observe: Callable[[ir.Model], Callable[[list[Change]], list[Change]]] | None = None,
) -> tuple[onnx.ModelProto, list[Change]]:
    """Apply rewrites in order, each wherever it is valid, and return the new graph and the changes.

    Args:
        proto: The graph with all weights embedded; it is not modified.
        rewrites: The rewrites. The graph's opset is raised to the one that they write; a rewrite is left out if an
            operator of the graph means something else there.
        observe: Called once with the model; returns a function that completes the changes of each rewrite.
    """
    model = read(proto)
    changes = rewrite(model, rewrites, observe(model) if observe else None)
    if not changes:
        release_weights(model)
        return proto, []
    return write_like(proto, model), changes


def rewrite(
    model: ir.Model, rewrites: Iterable[Rewrite], completed: Callable[[list[Change]], list[Change]] | None = None
) -> list[Change]:
    """Apply rewrites to a model that was read, in place; ``completed`` completes the changes of each."""
    changes: list[Change] = []
    for each in rewrites:
        if each.alone and changes:
            continue
        newer = each.opset > model.graph.opset_imports.get("", 0)
        made = list(each.apply(model)) if not newer or can_be_raised(model, each.opset) else []
        if made:
            made = completed(made) if completed else made
            if newer:
                raise_opset(model, each.opset)
            tidy(model)
        changes += made
    if changes:
        tidy(model)
    return changes


def write_like(proto: onnx.ModelProto, model: ir.Model) -> onnx.ModelProto:
    """Convert a model that was read from ``proto``, with the shapes of its inputs and outputs, and release it."""
    written = write(model)
    release_weights(model)
    ends = zip(written.graph.output, proto.graph.output, strict=True)
    for now, before in (*zip(written.graph.input, proto.graph.input, strict=True), *ends):
        if before.type.tensor_type.HasField("shape"):
            now.CopyFrom(before)  # drops names that we gave to dynamic dimensions
    return written


def release_weights(model: ir.Model) -> None:
    """Release the weights of a model.

    Reference cycles keep a graph alive until garbage collection, and its weights with it.
    """
    for value in model.graph.initializers.values():
        value.const_value = None


def tidy(model: ir.Model) -> None:
    """Remove unused nodes, sort the graph, and infer the shapes of new values."""
    from repaconv.graph.shape_inference import infer

    clean(model)
    infer(model, only_new=True)


def clean(model: ir.Model) -> None:
    """Remove unused nodes and sort the graph; recorded shapes stay."""
    from onnx_ir.passes.common import TopologicalSortPass

    remove_unused(model)
    if not _is_sorted(model.graph):
        TopologicalSortPass()(model)


def remove_unused(model: ir.Model) -> None:
    """Remove nodes, initializers and optional outputs that nothing reads."""
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    if any(map(_has_more_to_remove, model.graph)):
        RemoveUnusedNodesPass()(model)
        return
    unused = set[ir.Node]()
    for node in reversed(model.graph):
        readers = [user for value in node.outputs for user, _ in value.uses()]
        if unused.issuperset(readers) and not any(value.is_graph_output() for value in node.outputs):
            unused.add(node)
    model.graph.remove(unused, safe=True)  # one by one, it would look through all outputs of the graph for each
    for name, value in tuple(model.graph.initializers.items()):
        if not (is_read(value) or value.is_graph_input()):
            del model.graph.initializers[name]


def _has_more_to_remove(node: ir.Node) -> bool:
    """Whether a node may have optional outputs, a mode for training, no last input, or graphs inside.

    onnx-ir's pass looks for them in the schema of every node, which takes half of its time.
    """
    if (len(node.outputs) > 1 and node.op_type != "Split") or (node.inputs and node.inputs[-1] is None):
        return True
    return "training_mode" in node.attributes or has_subgraphs(node)


def _is_sorted(graph: ir.Graph) -> bool:
    """Whether every node comes after those that it reads; False if there is control flow, which is not looked into.

    The sort keeps the order of a sorted graph, and takes many times as long.
    """
    seen: set[ir.Node] = set()
    for node in graph:
        if has_subgraphs(node):
            return False
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is not None and producer not in seen:
                return False
        seen.add(node)
    return True


def merge_equal_constants(model: ir.Model) -> None:
    """Merge equal constants. Those that are graph inputs stay, without onnx-ir's warning for each."""
    from onnx_ir.passes.common import DeduplicateInitializersPass

    with only_errors("onnx_ir.passes.common.initializer_deduplication"):
        DeduplicateInitializersPass()(model)
