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
    found = [node for node in nodes_of(model, "If") if _branch(node) is not None]
    for node in found:
        _inline(model, node)
    return bool(found)


def _branch(node: ir.Node) -> ir.Graph | None:
    """The branch that runs, if that is known; None also for a branch that hands on a value without computing it."""
    import onnx_ir as ir

    decision = constant(node.inputs[0])
    if decision is None or decision.size != 1:
        return None
    branch: ir.Graph = node.attributes["then_branch" if decision.reshape(-1)[0] else "else_branch"].as_graph()
    words = any(value.dtype == ir.DataType.STRING for value in branch.initializers.values())
    held = not words and all(
        value.producer() is not None and value.producer() in set(branch) for value in branch.outputs
    )
    return branch if held and len(set(branch.outputs)) == len(branch.outputs) else None


def _inline(model: ir.Model, node: ir.Node) -> None:
    """Move the nodes and constants of the branch that runs before its If, under new names."""
    import onnx_ir as ir

    branch = _branch(node)
    assert branch is not None
    outputs, inner = list(branch.outputs), list(branch)
    branch.outputs.clear()
    write = Writer(model, node)
    for value in list(branch.initializers.values()):
        ir.convenience.replace_all_uses_with(value, _copied(write, value))  # renaming it would rename the file's
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


def _copied(write: Writer, value: ir.Value) -> ir.Value:
    """A constant of a branch as one of the graph."""
    import onnx_ir as ir

    assert value.const_value is not None
    name, numbers = write.name(value.name), value.const_value
    tensor = ir.Tensor(numbers.numpy(), dtype=numbers.dtype, shape=numbers.shape, name=name)
    new = ir.Value(name=name, const_value=tensor, type=ir.TensorType(numbers.dtype), shape=numbers.shape)
    write.graph.register_initializer(new)
    return new
