"""Small ONNX graphs as exporters write them, and faults of folds of these graphs.

A fault changes the graph that the fold starts from, without the knowledge of the verification. The folded graph then
computes something else, if only a little. tests/test_folded_graph_verification.py plants every fault; `python
tests/planted_faults.py` writes their table into docs/planted-faults.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

F, INT, B, U = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.UINT8
Change = Callable[[onnx.ModelProto], None]


class Net(NamedTuple):
    """A graph; ``rows`` are operator, inputs, outputs, attributes, and a node is named by its first output."""

    rows: list[tuple[Any, ...]]
    weights: dict[str, np.ndarray]
    inputs: dict[str, tuple[int, tuple[int | str, ...]]]
    outputs: dict[str, int]

    def model(self) -> onnx.ModelProto:
        nodes = [
            helper.make_node(op, i.split(), o.split(), o.split()[0], **(rest[0] if rest else {}))
            for op, i, o, *rest in self.rows
        ]
        tensors = [
            numpy_helper.from_array(np.asarray(a, np.float32 if np.asarray(a).dtype.kind == "f" else None), name)
            for name, a in self.weights.items()
        ]
        ends = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in self.inputs.items()]
        outs = [helper.make_tensor_value_info(name, kind, None) for name, kind in self.outputs.items()]
        graph = helper.make_graph(nodes, "g", ends, outs, tensors)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model)


RANDOM = np.random.default_rng(7)


def normal(*shape: int, scale: float | None = None) -> np.ndarray:
    return RANDOM.standard_normal(shape) * (scale or (shape[0] ** -0.5 if len(shape) == 2 else 1.0))


def heads(x: str, of: str) -> list[tuple[Any, ...]]:
    return [
        ("MatMul", f"{x} w{of}", f"{of}0"), ("Add", f"{of}0 b{of}", f"{of}1"),
        ("Reshape", f"{of}1 heads", f"{of}2"), ("Transpose", f"{of}2", of, {"perm": [0, 2, 1, 3]}),
    ]  # fmt: skip


def attention(queries: str, keys: str, *, mask: str = "") -> list[tuple[Any, ...]]:
    return [
        *heads(queries, "q"), *heads(keys, "k"), *heads(keys, "v"),
        ("Transpose", "k", "kt", {"perm": [0, 1, 3, 2]}), ("MatMul", "q kt", "s0"), ("Mul", "s0 root", "s1"),
        *([("Add", f"s1 {mask}", "s2")] if mask else []),
        ("Softmax", "s2" if mask else "s1", "p", {"axis": -1}), ("MatMul", "p v", "m0"),
        ("Transpose", "m0", "m1", {"perm": [0, 2, 1, 3]}), ("Reshape", "m1 flat", "m2"),
        ("MatMul", "m2 wo", "o0"), ("Add", "o0 bo", "o1"), ("Mul", "o1 gamma", "o2"),
    ]  # fmt: skip


def of_attention(width: int, count: int) -> dict[str, np.ndarray]:
    matrices = {f"w{of}": normal(width, width) for of in "qkvo"}
    vectors = {name: normal(width) for name in ("bq", "bk", "bv", "bo")} | {"gamma": 1 + 0.3 * normal(width)}
    shapes = {"heads": np.array([0, 0, count, width // count]), "flat": np.array([0, 0, width])}
    return matrices | vectors | shapes | {"root": np.array((width // count) ** -0.5)}


def norm(width: int, name: str = "n") -> dict[str, np.ndarray]:
    return {
        f"{name}w": 1 + 0.3 * normal(width), f"{name}b": normal(width),
        f"{name}m": normal(width), f"{name}v": 0.5 + RANDOM.random(width),
    }  # fmt: skip


HEAD = normal(6, 5, scale=3.0)
NETS = {
    "encoder": Net(  # token indices, a mask, free batch and length; tokens and a scalar
        [
            ("Gather", "table ids", "e0"), ("LayerNormalization", "e0 nw nb", "e", {"axis": -1}),
            ("Cast", "attention_mask", "a0", {"to": F}), ("Sub", "one a0", "a1"), ("Mul", "a1 far", "a2"),
            ("Unsqueeze", "a2 places", "a3"), *attention("e", "e", mask="a3"), ("Add", "o2 e0", "tokens"),
            ("ReduceMean", "tokens", "mean", {"keepdims": 0}),
        ],
        {"table": normal(23, 12, scale=1), "one": np.array(1.0), "far": np.array(-1e4), "places": np.array([1, 2]),
         **norm(12), **of_attention(12, 3)},
        {"ids": (INT, ("batch", "length")), "attention_mask": (INT, ("batch", "length"))},
        {"tokens": F, "mean": F},
    ),
    "cross": Net(  # two free lengths; values, where they were taken from, and whether surely
        [
            *attention("x", "y"), ("Add", "o2 x", "out"), ("ReduceMean", "p one", "p0", {"keepdims": 0}),
            ("ArgMax", "p0", "where", {"axis": -1, "keepdims": 0}), ("ReduceMax", "p0 last", "p1", {"keepdims": 0}),
            ("Greater", "p1 half", "surely"),
        ],
        {"one": np.array([1]), "last": np.array([-1]), "half": np.array(0.22), **of_attention(8, 2)},
        {"x": (F, ("n", "targets", 8)), "y": (F, ("n", "sources", 8))},
        {"out": F, "where": INT, "surely": B},
    ),
    "pixels": Net(  # bytes of any size; logits and a class
        [
            ("Cast", "image", "i0", {"to": F}), ("Div", "i0 bytes", "i1"), ("Sub", "i1 mu", "i2"),
            ("Div", "i2 sigma", "i3"), ("Transpose", "i3", "i4", {"perm": [0, 3, 1, 2]}),
            ("Conv", "i4 k0", "c0", {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
            ("BatchNormalization", "c0 nw nb nm nv", "c1"), ("Relu", "c1", "c2"),
            ("Conv", "c2 k1 kb1", "d0"), ("BatchNormalization", "c2 rw rb rm rv", "d1"), ("Add", "d0 d1", "d2"),
            ("Relu", "d2", "d3"), ("Conv", "d3 k2", "f0", {"pads": [1, 1, 0, 1], "group": 6}), ("Sigmoid", "f0", "f1"),
            ("GlobalAveragePool", "f1", "g0"), ("Flatten", "g0", "g1"), ("Gemm", "g1 wh bh", "logits"),
            ("ArgMax", "logits", "class", {"axis": 1, "keepdims": 0}),
        ],
        {"bytes": np.array(255.0), "mu": np.array([0.485, 0.456, 0.406]), "sigma": np.array([0.229, 0.224, 0.225]),
         "k0": normal(6, 3, 3, 3, scale=0.3), "k1": normal(6, 6, 1, 1, scale=0.4), "kb1": normal(6),
         "k2": normal(6, 1, 2, 3), **norm(6), **norm(6, "r"), "wh": HEAD, "bh": -0.5 * HEAD.sum(0)},
        {"image": (U, ("batch", "height", "width", 3))},
        {"logits": F, "class": INT},
    ),
    "loss": Net(  # nothing but a scalar
        [
            ("MatMul", "x w1", "h0"), ("Add", "h0 b1", "h1"), ("Relu", "h1", "h2"), ("MatMul", "h2 w2", "y0"),
            ("Add", "y0 b2", "y1"), ("Mul", "y1 s", "y2"), ("Sub", "y2 target", "d0"), ("Mul", "d0 d0", "d1"),
            ("ReduceMean", "d1", "loss", {"keepdims": 0}),
        ],
        {"w1": normal(6, 9), "b1": normal(9), "w2": normal(9, 4), "b2": normal(4), "s": 1 + 0.3 * normal(4)},
        {"x": (F, ("n", 6)), "target": (F, ("n", 4))},
        {"loss": F},
    ),
    "boxes": Net(  # large numbers beside small ones
        [
            ("Conv", "image k0 b0", "c0", {"pads": [1, 1, 1, 1]}), ("Relu", "c0", "c1"),
            ("Conv", "c1 kb", "x0"), ("Mul", "x0 stride", "x1"), ("Conv", "c1 ks bs", "y0"), ("Sigmoid", "y0", "y1"),
            ("Concat", "x1 y1", "z", {"axis": 1}), ("Reshape", "z flat", "found"),
        ],
        {"k0": normal(5, 3, 3, 3, scale=0.2), "b0": normal(5), "kb": normal(4, 5, 1, 1), "stride": np.array(300.0),
         "ks": normal(3, 5, 1, 1, scale=0.05), "bs": np.array([-9.0, -9.1, -8.9]), "flat": np.array([0, 7, -1])},
        {"image": (F, ("n", 3, "h", "w"))},
        {"found": F},
    ),
    "far": Net(  # made for numbers about 1000
        [
            ("BatchNormalization", "x nw nb nm nv", "x0"), ("MatMul", "x0 w1", "h0"), ("Add", "h0 b1", "h1"),
            ("Tanh", "h1", "h2"), ("MatMul", "h2 w2", "h3"), ("Mul", "h3 s", "y"), ("TopK", "y two", "best places"),
        ],
        {**norm(6), "nm": 1000 + 50 * normal(6), "nv": 400 * (1 + RANDOM.random(6)), "w1": normal(6, 8),
         "b1": normal(8), "w2": normal(8, 5), "s": 1 + 0.3 * normal(5), "two": np.array([2])},
        {"x": (F, ("rows", 6))},
        {"y": F, "best": F, "places": INT},
    ),
    "rows": Net(  # convolutions in a row, scales before them, a transposed one, a mean behind a layer
        [
            ("Sub", "image mu", "i0"), ("Div", "i0 sigma", "i1"), ("Conv", "i1 k0 b0", "c0", {"pads": [1, 1, 1, 1]}),
            ("Conv", "c0 k1 b1", "c1"), ("Relu", "c1", "c2"), ("Conv", "c2 k2", "d0"),
            ("Conv", "d0 k3 b3", "d1", {"pads": [1, 1, 1, 1]}), ("Relu", "d1", "d2"),
            ("BatchNormalization", "d2 nw nb nm nv", "e0"), ("Conv", "e0 k4", "e1", {"strides": [2, 2]}),
            ("Relu", "e1", "e2"), ("ConvTranspose", "e2 k5 b5", "u0", {"group": 2, "strides": [2, 2]}),
            ("BatchNormalization", "u0 rw rb rm rv", "up"), ("Conv", "e2 k6 b6", "g0"),
            ("GlobalAveragePool", "g0", "y"),
        ],
        {"mu": normal(3, 1, 1, scale=0.5), "sigma": 0.5 + RANDOM.random((3, 1, 1)), "k0": normal(9, 3, 3, 3, scale=0.2),
         "b0": normal(9), "k1": normal(3, 9, 1, 1, scale=0.3), "b1": normal(3), "k2": normal(9, 3, 1, 1, scale=0.5),
         "k3": normal(4, 9, 3, 3, scale=0.12), "b3": normal(4), **norm(4), "k4": normal(4, 4, 3, 3, scale=0.2),
         "k5": normal(4, 3, 2, 2, scale=0.4), "b5": normal(6), **norm(6, "r"), "k6": normal(5, 4, 1, 1, scale=0.5),
         "b6": normal(5)},
        {"image": (F, ("n", 3, "h", "w"))},
        {"up": F, "y": F},
    ),
    "gated": Net(  # one size of batch, a free length; a mean over it
        [
            ("LayerNormalization", "x nw nb", "n", {"axis": -1}), ("MatMul", "n w", "u"), ("Add", "u b", "g"),
            ("Split", "g sizes", "a c", {"axis": -1}), ("Sigmoid", "c", "c1"), ("Mul", "a c1", "m"),
            ("MatMul", "m wo", "o"), ("Mul", "o gamma", "o1"), ("Add", "x o1", "y0"),
            ("ReduceMean", "y0 one", "y", {"keepdims": 0}),
        ],
        {**norm(6), "w": normal(6, 16), "b": normal(16), "sizes": np.array([8, 8]), "wo": normal(8, 6),
         "gamma": 1 + 0.3 * normal(6), "one": np.array([1])},
        {"x": (F, (1, "length", 6))},
        {"y": F},
    ),
}  # fmt: skip


# --- ways to be wrong ----------------------------------------------------------------------------------------------


def weight(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    def plant(model: onnx.ModelProto) -> None:
        stored = next(one for one in model.graph.initializer if one.name == name)
        old = numpy_helper.to_array(stored)
        new = np.ascontiguousarray(change(old.copy()).astype(old.dtype))
        assert (new != old).any()
        stored.CopyFrom(numpy_helper.from_array(new, name))

    return plant


def swapped(a: str, b: str) -> Change:
    def plant(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for place, name in enumerate(node.input):
                node.input[place] = {a: b, b: a}.get(name, name)

    return plant


def node(name: str, operator: str = "", inputs: str = "", **attributes: Any) -> Change:
    """Another operator, other inputs, other attributes."""

    def plant(model: onnx.ModelProto) -> None:
        one = next(each for each in model.graph.node if each.name == name)
        kept = {entry.name: helper.get_attribute_value(entry) for entry in one.attribute}
        new = helper.make_node(
            operator or one.op_type, inputs.split() or one.input, one.output, name,
            **({} if operator == "Identity" else kept | attributes),
        )  # fmt: skip
        one.CopyFrom(new)

    return plant


def cast(name: str, to: int) -> Change:
    """An output of another type."""

    def plant(model: onnx.ModelProto) -> None:
        one = next(each for each in model.graph.node if name in each.output)
        one.output[list(one.output).index(name)] = "before"
        model.graph.node.append(helper.make_node("Cast", ["before"], [name], to=to))
        out = next(each for each in model.graph.output if each.name == name)
        out.type.tensor_type.elem_type = to

    return plant


def columns(i: int, j: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda w: w[..., [j if c == i else i if c == j else c for c in range(w.shape[-1])]]


def by_head(count: int) -> Callable[[np.ndarray], np.ndarray]:
    """Heads one place further."""
    return lambda w: np.roll(w.reshape(*w.shape[:-1], count, -1), 1, -2).reshape(w.shape)


def one_off(*place: int, by: float = 0.01) -> Callable[[np.ndarray], np.ndarray]:
    def change(w: np.ndarray) -> np.ndarray:
        w[place] += by
        return w

    return change


class Fault(NamedTuple):
    """One row of docs/planted-faults.md."""

    net: str
    what: str
    plant: Change


FAULTS = [
    Fault("encoder", "two columns of the queries swapped", weight("wq", columns(1, 2))),
    Fault("encoder", "queries and keys swapped", swapped("wq", "wk")),
    Fault("encoder", "a head of the keys permuted", weight("wk", by_head(3))),
    Fault("encoder", "heads of the values permuted", weight("wv", by_head(3))),
    Fault("encoder", "the queries' bias dropped", weight("bq", np.zeros_like)),
    Fault("encoder", "the mask forgotten", node("s2", "Identity", "s1")),
    Fault("encoder", "the mask the other way round", node("a1", "Identity", "a0")),
    Fault("encoder", "the mask over queries", weight("places", lambda p: np.array([1, 3]))),
    Fault("encoder", "softmax over queries", node("p", axis=-2)),
    Fault("encoder", "the scores' scale forgotten", weight("root", np.ones_like)),
    Fault("encoder", "the shortcut behind the norm", node("tokens", inputs="o2 e")),
    Fault("encoder", "LayerScale forgotten", node("o2", "Identity", "o1")),
    Fault("encoder", "the last rows of the table swapped", weight("table", lambda t: t[[*range(21), 22, 21]])),
    Fault("encoder", "a sum for the mean", node("mean", "ReduceSum")),
    Fault("encoder", "a mean that keeps its axes", node("mean", keepdims=1)),
    Fault("cross", "two columns of the queries swapped", weight("wq", columns(0, 3))),
    Fault("cross", "heads of the projection permuted", weight("wo", lambda w: by_head(2)(w.T).T)),
    Fault("cross", "queries of the other input", node("q0", inputs="y wq")),
    Fault("cross", "softmax over queries", node("p", axis=-2)),
    Fault("cross", "the values' bias dropped", node("v1", "Identity", "v0")),
    Fault("cross", "the last index of equals", node("where", "ArgMin")),
    Fault("cross", "an index of another type", cast("where", TensorProto.INT32)),
    Fault("cross", "another threshold", weight("half", lambda h: h + 0.05)),
    Fault("cross", "truth as a number", cast("surely", TensorProto.UINT8)),
    Fault("pixels", "red and blue swapped", weight("mu", lambda m: m[::-1])),
    Fault("pixels", "255 forgotten", node("i1", "Identity", "i0")),
    Fault("pixels", "a kernel flipped", weight("k0", lambda k: k[..., ::-1])),
    Fault("pixels", "a BatchNormalization's mean dropped", weight("nm", np.zeros_like)),
    Fault("pixels", "eps mixed up", node("d1", epsilon=1e-3)),
    Fault("pixels", "a branch left out", node("d2", "Identity", "d0")),
    Fault("pixels", "a border one off", node("f0", pads=[0, 1, 1, 1])),
    Fault("pixels", "depthwise kernels one channel on", weight("k2", lambda k: np.roll(k, 1, 0))),
    Fault("pixels", "height and width swapped", node("i4", perm=[0, 3, 2, 1])),
    Fault("pixels", "two classes swapped", weight("wh", columns(2, 4))),
    Fault("pixels", "a class kept as a column", node("class", keepdims=1)),
    Fault("loss", "one weight off by 0.01", weight("w1", one_off(2, 3))),
    Fault("loss", "two columns swapped", weight("w2", columns(0, 1))),
    Fault("loss", "a bias dropped", weight("b2", np.zeros_like)),
    Fault("loss", "one scale off by 0.01", weight("s", one_off(1))),
    Fault("loss", "the target with the other sign", node("d0", "Add")),
    Fault("boxes", "two scores' weights swapped", weight("ks", lambda k: k[[1, 0, 2]])),
    Fault("boxes", "a score's bias off by 0.01", weight("bs", one_off(2))),
    Fault("boxes", "a bias dropped", node("c0", inputs="image k0")),
    Fault("boxes", "places across instead of down", node("found", "Identity", "z")),
    Fault("far", "two inputs' statistics swapped", weight("nv", lambda v: v[[1, 0, *range(2, 6)]])),
    Fault("far", "the shift forgotten", weight("nb", np.zeros_like)),
    Fault("far", "one weight off by 0.01", weight("w2", one_off(0, 0))),
    Fault("far", "the smallest for the largest", node("best", largest=0)),
    Fault("rows", "a shift let over a border that is padded", node("c0", inputs="i1 k0 b0", pads=[0, 0, 2, 2])),
    Fault("rows", "a scale of other channels", weight("sigma", lambda s: s[[1, 0, 2]])),
    Fault("rows", "a bias between two convolutions dropped", weight("b0", np.zeros_like)),
    Fault("rows", "a shift before a kernel at one place alone", weight("nb", one_off(2))),
    Fault("rows", "a scale of the inputs of a transposed kernel", weight("rw", lambda w: w[[3, 4, 5, 0, 1, 2]])),
    Fault("rows", "a layer's bias averaged away", weight("b6", np.zeros_like)),
    Fault("gated", "the halves swapped", node("m", inputs="c a")),
    Fault("gated", "an uneven cut", weight("b", lambda b: np.roll(b, 1))),
    Fault("gated", "a shortcut left out", node("y0", "Identity", "o1")),
    Fault("gated", "the largest for the mean", node("y", "ReduceMax")),
]


def section() -> str:
    """The part of docs/planted-faults.md on graphs."""
    head = f"""
## Planted into `fold model.onnx`

{len(FAULTS)} wrong folds of {len(NETS)} graphs with dynamic batch sizes, lengths and image sizes, several outputs,
scalars and integers (`tests/test_folded_graph_verification.py`). Each folded graph differs from the original, and
nothing is written.

| Graph | Fault |
|---|---|
"""
    return head + "".join(f"| {fault.net} | {fault.what} |\n" for fault in FAULTS)
