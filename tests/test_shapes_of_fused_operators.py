"""The shapes of what ONNX Runtime's optimizer writes are inferred, so that the rest of a graph that it saved folds."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import repaconv as rc
from repaconv.graph.models_in_onnx_ir import as_stored, with_shapes
from repaconv.graph.symbolic_shapes import is_dynamic, sizes

RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "w": (8, 8), "other": (8, 8), "b": (8,), "g": (8,), "kernel": (4, 3, 3, 3), "bias": (4,), "tall": (8, 6),
    "wide": (6, 8), "lists": (3, 5), "table": (5, 8), "c": (6,),
}  # fmt: skip
TOKENS, IMAGE, ROWS = ("N", 5, 8), ("N", 3, 9, 7), ("N", 8)
LAYER = {"strides": [2, 1], "pads": [1, 0, 1, 0], "activation": "Relu"}
CASES = {
    "FusedConv": (IMAGE, "x kernel bias", LAYER),
    "FusedConv, dynamic": (("N", 3, "H", "W"), "x kernel bias", {**LAYER, "activation": "Tanh"}),
    "FusedGemm": (ROWS, "x tall c", {"activation": "Relu"}),
    "FusedGemm, turned": (ROWS, "x wide c", {"activation": "Relu", "transB": 1}),
    "FusedMatMul": (TOKENS, "x w", {"alpha": 0.5}),
    "FusedMatMul, turned": (TOKENS, "x wide", {"transB": 1}),
    "FusedMatMul, both turned": (TOKENS, "x lists", {"transA": 1, "transB": 1}),
    "FusedMatMul, of itself": (TOKENS, "x x", {"transB": 1}),
    "Gelu": (TOKENS, "x", {}),
    "QuickGelu": (TOKENS, "x", {"alpha": 1.7}),
    "BiasGelu": (TOKENS, "x b", {}),
    "FastGelu": (TOKENS, "x b", {}),
    "SkipLayerNormalization": (TOKENS, "x x g b", {"epsilon": 1e-5}),
    "SkipLayerNormalization, table": (TOKENS, "x table g b", {}),
    "SkipSimplifiedLayerNormalization": (TOKENS, "x x g", {}),
    "SimplifiedLayerNormalization": (TOKENS, "x g", {"axis": -1}),
}


def model_of(rows, shape, opset=17) -> onnx.ModelProto:
    """A graph of rows (domain, operator, inputs, outputs, attributes), without any shape but that of the input."""
    nodes = [helper.make_node(kind, i.split(), o.split(), domain=domain, **more) for domain, kind, i, o, more in rows]
    held = [numpy_helper.from_array(RANDOM.standard_normal(w).astype(np.float32), n) for n, w in WEIGHTS.items()]
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    outs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", ends, outs, held), opset_imports=imports, ir_version=9)


@pytest.mark.parametrize("case", CASES)
def test_a_shape_is_the_one_that_onnx_runtime_computes(case):
    shape, inputs, attributes = CASES[case]
    kind = case.split(",")[0]
    domain = "" if kind == "SimplifiedLayerNormalization" else "com.microsoft"
    model = model_of([(domain, kind, inputs, "a", attributes), ("", "Sigmoid", "a", "y", {})], shape)
    found = sizes(with_shapes(as_stored(model)).graph.outputs[0])
    assert found is not None
    known = {"N": 2, "H": 11, "W": 6}
    image = RANDOM.standard_normal([known.get(size, size) for size in shape]).astype(np.float32)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (given,) = session.run(None, {"x": image})
    assert len(found) == given.ndim
    assert all(is_dynamic(size) or size == length for size, length in zip(found, given.shape, strict=True))
    assert str(found[0]) == "N"
    assert "dynamic" in case or not any(map(is_dynamic, found[1:]))


def test_a_product_that_transposes_the_batch_has_an_unknown_shape():
    rows = [("com.microsoft", "FusedMatMul", "x w", "a", {"transBatchA": 1}), ("", "Sigmoid", "a", "y", {})]
    assert sizes(with_shapes(as_stored(model_of(rows, ("N", 5, 8, 8)))).graph.outputs[0]) is None


def test_the_sum_that_a_norm_returns_has_the_same_shape():
    rows = [("com.microsoft", "SkipLayerNormalization", "x x g b", "a m v s", {}), ("", "Sigmoid", "s", "y", {})]
    assert sizes(with_shapes(as_stored(model_of(rows, TOKENS))).graph.outputs[0])[1:] == (5, 8)


@pytest.mark.parametrize(
    ("kind", "shape", "inputs"),
    [("FusedConv", IMAGE, "a kernel bias"), ("FusedGemm", ROWS, "a tall c"), ("FusedMatMul", TOKENS, "a w")],
)
def test_the_node_alone_reads_its_inputs_after_its_shape_is_inferred(kind, shape, inputs):
    rows = [("", "Sigmoid", "x", "a", {}), ("com.microsoft", kind, inputs, "y", {})]
    sigmoid, fused = with_shapes(as_stored(model_of(rows, shape))).graph
    assert sigmoid.outputs[0].consumers() == (fused,)


def test_the_rest_of_a_graph_that_onnx_runtime_saved_folds():
    rows = [
        ("", "MatMul", "x w", "a", {}), ("com.microsoft", "BiasGelu", "a b", "h", {}),
        ("", "MatMul", "h other", "p", {}), ("", "Mul", "p g", "q", {}), ("", "Add", "q b", "y", {}),
    ]  # fmt: skip
    onnx.save(model_of(rows, TOKENS), "net.onnx")
    done = rc.fold("net.onnx", measure=False)
    assert {link.verdict for link in done.links} == {"passed"}
    assert done.operators == {"MatMul": 2, "BiasGelu": 1, "Add": 1}
