"""flattened-tokens: a linear layer on tokens that are flattened for it acts on the tokens themselves.

    Reshape, Gemm, Reshape  ->  MatMul, Add

ONNX Runtime's optimizer, onnxsim and onnxslim write MatMul and Add as a Gemm, which takes matrices alone, with a
Reshape before and after it. In that form the layers that follow are not next to it, and splits of its output are no
longer one view. ONNX Runtime makes a Gemm of it again when it loads the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from repaconv.graph.linear_layers import linear_of, write_linear
from repaconv.graph.models_in_onnx_ir import clean
from repaconv.graph.nodes_and_constants import Writer, made_by, nodes_of, only_reader
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.symbolic_shapes import set_shape, sizes
from repaconv.results import Change

if TYPE_CHECKING:
    import onnx_ir as ir


def apply(model: ir.Model) -> Iterator[Change]:
    """Write every Gemm between two such Reshapes as MatMul and Add; in place."""
    for node in nodes_of(model, "Gemm"):
        flattened, restored = made_by(node.inputs[0], "Reshape"), only_reader(node.outputs[0], "Reshape")
        layer = linear_of(node.outputs[0])
        tokens = flattened.inputs[0] if flattened is not None else None
        if tokens is None or restored is None or layer is None:
            continue
        before, flat, after = (sizes(value) for value in (tokens, layer.x, restored.outputs[0]))
        if not before or not flat or not after or before[-1] != flat[-1] or before[:-1] != after[:-1]:
            continue
        if after[-1] != layer.weight.shape[1]:
            continue
        write = Writer(model, node)
        new = write_linear(write, tokens, layer.weight, layer.bias)
        set_shape(new, after, tokens)
        product = made_by(new, "Add")
        if product is not None:
            set_shape(product.inputs[0], after, tokens)
        write.replace(restored.outputs[0], new)
        description = "Reshape, Gemm, Reshape -> a linear layer on tokens"
        yield Change(rewrite=FLATTENED.name, place=node.name or "", description=description)
    clean(model)


FLATTENED = Rewrite("flattened-tokens", "a Gemm between Reshapes that flatten tokens and restore them", apply)
