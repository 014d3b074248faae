"""Replace every If whose condition is a constant by the nodes of its branch.

Exporters write an If wherever a network's own code asks for a size. Once the sizes are known, so is the branch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.graph.nodes_and_constants import Writer, constant, nodes_of

if TYPE_CHECKING:
    import onnx_ir as ir


def inline_constant_ifs(model: ir.Model) -> bool:
    """Inline the branch of every If of the graph that a constant decides, in place; return whether there was one."""
    found = [(node, branch) for node in nodes_of(model, "If") if (branch := _branch(node)) is not None]
    for node, branch in found:
        _inline(model, node, branch)
    return bool(found)


def _branch(node: ir.Node) -> ir.Graph | None:
    """The branch that runs, if that is known; None also for a branch that hands on a value without computing it."""
    import onnx_ir as ir

    decision = constant(node.inputs[0])
    if decision is None or decision.size != 1:
        return None
    branch: ir.Graph = node.attributes["then_branch" if decision.reshape(-1)[0] else "else_branch"].as_graph()
    if any(value.dtype == ir.DataType.STRING for value in branch.initializers.values()):
        return None
    computed = {value for inner in branch for value in inner.outputs}
    apart = len(set(branch.outputs)) == len(branch.outputs)
    return branch if apart and computed.issuperset(branch.outputs) else None


def _inline(model: ir.Model, node: ir.Node, branch: ir.Graph) -> None:
    """Move the nodes and constants of the branch that runs before its If, under new names."""
    import onnx_ir as ir

    outputs, inner = list(branch.outputs), list(branch)
    branch.outputs.clear()
    write = Writer(model, node)
    for value in list(branch.initializers.values()):
        assert value.const_value is not None
        ir.convenience.replace_all_uses_with(value, write.exactly(value.const_value.numpy()))
    branch.initializers.clear()
    branch.remove(inner)
    for one in inner:
        one.name = write.name(one.name)
        for value in one.outputs:
            value.name = write.name(value.name)
    model.graph.insert_before(node, inner)
    for old, new in zip(node.outputs, outputs, strict=True):
        write.replace(old, new)
    _release(node)
    model.graph.remove(node)


def _release(node: ir.Node) -> None:
    """Take the inputs from the nodes of an If that goes: what only the other branch reads is read by nothing."""
    import onnx_ir as ir

    for entry in node.attributes.values():
        for one in entry.as_graph() if entry.type == ir.AttributeType.GRAPH else ():
            _release(one)
            for place in range(len(one.inputs)):
                one.replace_input_with(place, None)
