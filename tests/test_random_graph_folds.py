"""Folding random graphs of affine maps, masks, norms and activations over channels is exact in float64."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest
import reimplemented_training_networks
import torch
from graph_mutants import Mutant, difference, results, set_attribute
from onnx import TensorProto, helper, numpy_helper

from repaconv.graph.element_type_conversion import to_float64
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS

TOKENS = ("linear", "add", "scale", "sum", "difference", "act", "split", "concat", "pick", "norm", "batchnorm", "mask")


class Maker:
    """A random graph on tokens [B, N, c], or on images [B, c, N, 2]; every value has its own number of channels.

    All sizes but the channels are free, or half of them. Often there is a second input, of another N or without names.
    """

    def __init__(self, seed: int, *, image: bool) -> None:
        self.random, self.image, self.axis = np.random.default_rng(seed), image, 1 if image else 2
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.inputs = ["x", *(["y"] if self.random.random() < 0.5 else [])]
        self.widths = {name: int(self.random.integers(1, 6)) for name in self.inputs}
        self.widths |= dict.fromkeys(self.inputs, self.widths["x"]) if self.random.random() < 0.7 else {}

    def constant(self, *shape: int, array: np.ndarray | None = None) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = self.random.standard_normal(shape) if array is None else array
        return name

    def node(self, operator: str, inputs: list[str], width: int, **attributes) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        self.widths[name] = width
        return name

    def vector(self, width: int) -> str:
        return self.constant(width, *([1, 1] if self.image else []))

    def add(self, kind: str) -> None:
        value = list(self.widths)[-1] if self.random.random() < 0.6 else self.random.choice(list(self.widths))
        width, out = self.widths[value], int(self.random.integers(1, 7))
        alike = self.random.choice([name for name, other in self.widths.items() if other == width])
        if kind == "linear":
            weight = self.constant(out, width, 1, 1) if self.image else self.constant(width, out)
            self.node("Conv" if self.image else "MatMul", [value, weight], out)
        elif kind in ("add", "scale"):
            self.node("Add" if kind == "add" else "Mul", [self.vector(width), value], width)
        elif kind in ("sum", "difference"):
            self.node("Add" if kind == "sum" else "Sub", [value, alike], width)
        elif kind == "act":
            self.node(self.random.choice(["Relu", "Gelu"]), [value], width)
        elif kind == "split" and width > 1:
            ends = (np.array([n]) for n in (0, width - 1, self.axis))
            self.node("Slice", [value, *(self.constant(array=end) for end in ends)], width - 1)
        elif kind == "concat":
            other = self.random.choice(list(self.widths))
            self.node("Concat", [value, other], width + self.widths[other], axis=self.axis)
        elif kind == "pick":
            self.node("Gather", [value, self.constant(array=self.random.integers(0, width, out))], out, axis=self.axis)
        elif kind == "norm" and not self.image:
            self.node("LayerNormalization", [value, self.constant(width), self.constant(width)], width)
        elif kind == "batchnorm":
            parts = [*(self.constant(width) for _ in range(3)), self.constant(array=self.random.random(width) + 0.3)]
            turned = value if self.image else self.node("Transpose", [value], 0, perm=[0, 2, 1])
            found = self.node("BatchNormalization", [turned, *parts], width if self.image else 0)
            if not self.image:
                self.node("Transpose", [found], width, perm=[0, 2, 1])
                del self.widths[turned], self.widths[found]
        elif kind == "mask":
            mask = (self.random.random(width) < 0.5).reshape(-1, *([1, 1] if self.image else []))
            self.node("Where", [self.constant(array=mask), value, alike], width)

    def shape(self, name: str) -> list[int | str | None]:
        batch, size = self.random.choice(np.array([["batch", "n"], ["batch", 2], [2, "n"], [None, "n"]], dtype=object))
        size = size if name == "x" else self.random.choice(np.array(["n", "m", size, None], dtype=object))
        return [batch, self.widths[name], size, 2] if self.image else [batch, size, self.widths[name]]

    def model(self) -> onnx.ModelProto:
        for kind in self.random.choice(TOKENS, int(self.random.integers(3, 16))):
            self.add(kind)
        last = self.node("Identity", [list(self.widths)[-1]], 1)
        inputs = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, self.shape(name)) for name in self.inputs]
        outputs = [helper.make_tensor_value_info(last, TensorProto.DOUBLE, None)]
        tensors = [numpy_helper.from_array(array, name) for name, array in self.weights.items()]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, tensors)
        whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        return onnx.shape_inference.infer_shapes(whole)


def same(model: onnx.ModelProto, allowed: float = 1e-11) -> int | None:
    """Hold the folded graph against the graph; how much was folded, None if it does not run at any size."""
    before = results(model)
    after, changes = rewritten(model, FOLDS)
    if not any(before):
        return None
    onnx.checker.check_model(after, full_check=True)
    assert difference(before, results(after), floor=1.0) <= allowed, changes
    return len(changes)


@pytest.mark.parametrize(("image", "least"), [(False, 15), (True, 30)])
def test_random_graphs(image, least):
    folds = [same(Maker(seed, image=image).model()) for seed in range(30)]
    assert folds.count(None) < 8
    assert sum(filter(None, folds)) > least


@cache
def net(name: str, seed: int) -> onnx.ModelProto:
    """A small net of a method, as other code writes it, of sizes that coincide; a free batch, float64."""
    torch.manual_seed(0)
    shape = (2, 4, 4)
    if name == "riformer":
        made, shape = (
            reimplemented_training_networks.RIFormerBlock(4, reimplemented_training_networks.PixelNorm),
            (2, 4, 4, 4),
        )
    elif name == "repavit":
        made = reimplemented_training_networks.IdleFfn(4, 8, 4, reimplemented_training_networks.RULES[seed % 3])
    else:
        made = reimplemented_training_networks.Branches(4, 2, 2, "output", bias=True)
    return to_float64(
        reimplemented_training_networks.exported(
            reimplemented_training_networks.scrambled(made), shape, dynamo=False, opset=17, free=True
        )
    )


@pytest.mark.parametrize("name", ["riformer", "repavit", "nondeep"])
def test_nets_that_are_nearly_those(name):
    folds = []
    for seed in range(6):
        model = Mutant(net(name, seed % 3), np.random.default_rng([seed, len(name)])).mutate()
        folds.append(same(model, 1e-9) if model is not None else None)
    assert sum(filter(None, folds)) > 4


def test_heads_whose_softmax_is_over_the_queries_keep_their_biases():
    model = onnx.ModelProto()
    model.CopyFrom(net("nondeep", 0))
    assert same(model)
    for node in model.graph.node:
        if node.op_type == "Softmax":
            set_attribute(node, "axis", 2)
    assert same(onnx.shape_inference.infer_shapes(model))


def test_heads_over_tokens_of_a_dynamic_size():
    model = onnx.ModelProto()
    model.CopyFrom(net("nondeep", 0))
    del model.graph.value_info[:]
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "n"
    for weight in model.graph.initializer:  # the sizes of the reshapes
        sizes = numpy_helper.to_array(weight)
        if sizes.dtype == np.int64 and sizes.size > 2 and sizes[0] == -1:
            weight.CopyFrom(numpy_helper.from_array(np.where(np.arange(sizes.size) == 1, 0, sizes), weight.name))
    assert same(onnx.shape_inference.infer_shapes(model))


W = "double[2, 2] w = {1, 2, 3, 4}, double[2, 2] v = {5, 6, 7, 9}"
BY_HAND = {
    "a mean over no axes is one over all": """(double[batch, 2, 2] x) => (double[a, b, c] y)
        <double[2] g = {2, 3}, int64[0] none = {}> { s = Mul(x, g)  y = ReduceMean(s, none) }""",
    "a slice of computed axes is of any axis": """
        (double[2, 3, 4] x, double[1] i, double[2, 2] k) => (double[p, q, r] y, double[2, 2] o)
        <W, double[4] g = {1, 2, 3, 4}, int64[1] s = {0}, int64[1] e = {1}, double zero = {0}, double two = {2}>
        { m = Mul(x, g)  z = Mul(i, zero)  t = Add(z, two)  c = Cast<to = 7>(t)  y = Slice(m, s, e, c)
        h = MatMul(k, w)  o = MatMul(h, v) }""",
    "a cast rounds": """(double[batch, n, 2] x) => (double[p, q, r] y)
        <double[2] m = {0.5, 2}> { d = Shape(x)  w = Expand(m, d)  b = Cast<to = 7>(w)  f = Cast<to = 11>(b)
        h = Mul(x, f)  y = Sub(h, x) }""",
    "a sum of two free sizes has neither": """(double[batch, n, 2] x, double[batch, m, 2] k) => (double[p, q, r] y)
        <W> { s = Add(x, k)  d = Shape(s)  e = Expand(x, d)  h = MatMul(e, w)  y = MatMul(h, v) }""",
    "a free size is expanded to a number": """(double[batch, n, 2] x) => (double[p, q, r] y)
        <W, int64[3] d = {1, 2, 1}> { e = Expand(x, d)  h = MatMul(e, w)  y = MatMul(h, v) }""",
    "a norm's scale may have more axes": """(double[batch, n, 2] x) => (double[o, p, q, r] y)
        <W, double[2] ones = {1, 1}, double[1, 1, 1, 2] g = {2, 3}>
        { a = MatMul(x, w)  h = MatMul(a, v)  l = LayerNormalization(h, ones)  y = Mul(l, g) }""",
    "a swish's number may have more axes": """(double[batch, n, 2] x) => (double[o, p, q, r] y)
        <W, double[1, 1, 1, 1] c = {2}>
        { a = MatMul(x, w)  h = MatMul(a, v)  t = Mul(h, c)  s = Sigmoid(t)  z = Mul(h, s)  y = Identity(z) }""",
    "a 0 of a Reshape is an axis of its input": """(double[1, 2, 2] x) => (double[p, q] y)
        <int64[1] first = {0}, int64[1] third = {2}, int64[4] shape = {1, 0, 2, 4}>
        { a = Relu(x)  b = Sigmoid(x)  c = Unsqueeze(a, first)  d = Unsqueeze(b, first)  s = Concat<axis = 0>(c, d)
        t = Reshape(s, shape)  h = Tanh(t)  y = ReduceSum<keepdims = 0>(h, third) }""",
}


@pytest.mark.parametrize("law", BY_HAND)
def test_a_graph_is_read_as_onnx_has_it(law):
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> g {BY_HAND[law].replace("<W", "<" + W)}')
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    assert same(onnx.shape_inference.infer_shapes(model)) is not None


def test_a_fold_is_the_same_bytes_where_a_size_has_no_name():
    model = Maker(5, image=False).model()
    for dim in model.graph.input[0].type.tensor_type.shape.dim[:2]:
        dim.Clear()
    made = [rewritten(model, FOLDS) for _ in range(2)]
    assert made[0][1]
    assert made[0][0].SerializeToString() == made[1][0].SerializeToString()
    assert made[0][0].graph.input == model.graph.input
