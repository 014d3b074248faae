"""Cut two graphs at the operators that choose (TopK, ArgMax), so that both continue with the choices of the first.

If scores are almost equal, FP32 rounding decides which rows TopK takes, and every number after it differs. To tell this
from a wrong fold, both graphs are compared before and after the choice: they return the scores as further outputs, and
take the choice as further inputs. If both parts compute the same, so do the graphs. Two things are left to the
comparison in float64: constants that a choice reads, and choices among the results of another choice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repaconv.graph.discrete_outputs import DECIDING
from repaconv.graph.onnx_files import constants_of
from repaconv.verification.graph_with_cached_outputs import Evaluated
from repaconv.verification.model_runners import load_onnx, with_outputs

if TYPE_CHECKING:
    import onnx


SCORES = "{} {}, input {}"
"""Name of the output for an input of a choosing operator: the operator, its first output, and which input it is."""


def cut_at_choices(before: Evaluated, after: Evaluated) -> tuple[Evaluated, Evaluated, str] | None:
    """Cut both graphs, and return them with the operators at which they are cut; None if they share none."""
    nodes = _choices(before.model)
    others = _choices(after.model)
    shared = [name for name, node in nodes.items() if name in others and _kind_of(node) == _kind_of(others[name])]
    if not shared:
        return None
    chosen = [output for name in shared for output in nodes[name].output if output]
    runner, feeds = load_onnx(with_outputs(before.model, chosen)), []
    for each in before.probes.feeds:
        found = runner.run(each)
        feeds.append(dict(each) | {name: found[name] for name in chosen})
    types = {name: feeds[0][name].dtype for name in chosen}
    graphs = [Evaluated(_cut(graph.model, shared, types)) for graph in (before, after)]
    for graph in graphs:
        graph.probes = replace(before.probes, plain=tuple(feeds), more=tuple)
    return graphs[0], graphs[1], ", ".join(dict.fromkeys(nodes[name].op_type for name in shared))


def _choices(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """Return the nodes that choose by a computed number, by the names of their first outputs."""
    constants = constants_of(model.graph)
    return {
        node.output[0]: node
        for node in model.graph.node
        if node.op_type in DECIDING and not node.domain and any(name not in constants for name in node.input)
    }


def _kind_of(node: onnx.NodeProto) -> tuple[Any, ...]:
    attributes = sorted(entry.SerializeToString(deterministic=True) for entry in node.attribute)
    return node.op_type, tuple(node.output), tuple(attributes)


def _cut(model: onnx.ModelProto, names: Collection[str], types: dict[str, np.dtype[Any]]) -> onnx.ModelProto:
    """The graph without the nodes with these first outputs: their outputs become inputs, and their inputs outputs."""
    import onnx
    from onnx import helper

    cut, constants = onnx.ModelProto(), constants_of(model.graph)
    cut.CopyFrom(model)
    nodes = [node for node in cut.graph.node if node.output[0] not in names]
    outputs = [output for output in cut.graph.output if output.name not in types]
    for node in (node for node in model.graph.node if node.output[0] in names):
        for place, name in enumerate(node.input):
            if name and name not in constants and name not in types:
                scores = SCORES.format(node.op_type, node.output[0], place)
                nodes.append(helper.make_node("Identity", [name], [scores]))
                outputs.append(onnx.ValueInfoProto(name=scores))
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(kind), None) for name, kind in types.items()
    ]
    for field, values in (("node", nodes), ("output", outputs), ("input", [*cut.graph.input, *inputs])):
        kept = [type(value).FromString(value.SerializeToString()) for value in values]
        cut.graph.ClearField(field)
        getattr(cut.graph, field).extend(kept)
    return onnx.shape_inference.infer_shapes(cut)
