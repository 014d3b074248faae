"""Small ONNX graphs with several inputs or outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

F, INT = TensorProto.FLOAT, TensorProto.INT64


def saved(path, nodes, weights, inputs, outputs, opset=18) -> Path:
    random = np.random.default_rng(0)
    held = {
        n: w if isinstance(w, np.ndarray) else random.standard_normal(w).astype(np.float32) for n, w in weights.items()
    }
    graph = helper.make_graph(
        [helper.make_node(kind, read.split(), [write], **named) for kind, read, write, named in nodes],
        "net",
        [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return Path(path)


def tokens(ids: str = "ids") -> Path:
    """Token ids and a mask to tokens, scores and a class."""
    nodes = [
        ("Gather", f"table {ids}", "e", {}),
        ("Cast", "mask", "m", {"to": F}),
        ("Unsqueeze", "m two", "m3", {}),
        ("Mul", "e m3", "em", {}),
        ("MatMul", "em w", "1", {}),
        ("Add", "1 b", "2", {}),
        ("Mul", "2 s", "tokens", {}),
        ("ReduceMean", "em one", "p", {"keepdims": 0}),
        ("Gemm", "p h hb", "scores", {}),
        ("ArgMax", "scores", "class", {"axis": 1, "keepdims": 0}),
    ]
    weights = {"table": (20, 8), "w": (8, 6), "b": (6,), "s": (6,), "h": (8, 5)}
    weights |= {"hb": np.full(5, 0.1, np.float32)}
    weights |= {"one": np.array([1]), "two": np.array([2])}
    inputs = {ids: (INT, ["B", "L"]), "mask": (INT, ["B", "L"])}
    outputs = {"tokens": (F, ["B", "L", 6]), "scores": (F, ["B", 5]), "class": (INT, ["B"])}
    return saved("tokens.onnx", nodes, weights, inputs, outputs)


def two_outputs(path, order: str) -> Path:
    """One input and the outputs a and b = -a, in this order: ``ab`` or ``ba``."""
    nodes = [("MatMul", "x w", "a", {}), ("Neg", "a", "b", {})]
    return saved(path, nodes, {"w": (4, 6)}, {"x": (F, ["batch", 4])}, {name: (F, ["batch", 6]) for name in order})
