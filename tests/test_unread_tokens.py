"""read-tokens: tokens that nothing reads after the last attention are not computed, and the tokens that are read do not
change.
"""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import repaconv as rc
from repaconv.graph.element_type_conversion import to_float64
from repaconv.graph.models_in_onnx_ir import read, rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.rewrites.fold.unread_tokens import READ_TOKENS


class Block(nn.Module):
    """A block as many codes write it: one linear layer for q, k, v, taken apart in one of several ways."""

    def __init__(self, width: int, heads: int, way: str) -> None:
        super().__init__()
        self.heads, self.way = heads, way
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=way != "chunk"), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        batch, tokens, width = x.shape
        y = self.qkv(self.norm1(x))
        if self.way == "stack":
            q, k, v = y.view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        elif self.way == "inner":  # channels ordered head, then q, k, v
            q, k, v = y.view(batch, tokens, self.heads, 3, -1).permute(0, 2, 3, 1, 4).unbind(2)
        else:
            q, k, v = (z.view(batch, tokens, self.heads, -1).transpose(1, 2) for z in y.chunk(3, -1))
        if self.way == "sdpa":
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-2, -1) * 0.3).softmax(-1) @ v
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, way: str, read: str, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(width, heads, way), Block(width, heads, way))
        self.norm, self.head, self.read = nn.LayerNorm(width), nn.Linear(width, 5), read

    def forward(self, x):
        x = self.blocks(x)
        if self.read == "two":
            return self.head(self.norm(x)[:, 1:3]).mean(1)
        return self.head(self.norm(x)[:, 0] if self.read == "norm first" else self.norm(x[:, 0]))


def exported(net, shape, *, dynamo, opset, free) -> onnx.ModelProto:
    import io

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.randn(shape)
        if dynamo:
            dims = ({0: "batch"},) if free else None
            return torch.onnx.export(
                net.eval(), (x,), dynamo=True, opset_version=opset, dynamic_shapes=dims, verbose=False
            ).model_proto
        stream = io.BytesIO()
        axes = {"x": {0: "batch"}} if free else None
        torch.onnx.export(
            net.eval(), (x,), stream, dynamo=False, opset_version=opset, input_names=["x"], dynamic_axes=axes
        )
        return onnx.load_from_string(stream.getvalue())


def difference(before: onnx.ModelProto, after: onnx.ModelProto, *shape: int, batches=(1, 2, 3)) -> float:
    """The largest relative one, over these batches."""
    name, worst = before.graph.input[0].name, 0.0
    runs = [ReferenceEvaluator(model) for model in (before, after)]
    for batch in batches:
        x = np.random.default_rng(batch).standard_normal((batch, *shape))
        a, b = (run.run(None, {name: x})[0] for run in runs)
        assert a.shape == b.shape
        worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
    return worst


def rows_of_products(model: onnx.ModelProto, weight: tuple[int, int]) -> list[int]:
    """Tokens for which a linear layer of that shape is computed, node by node."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.graph.value_info}
    weights = {w.name for w in model.graph.initializer if tuple(w.dims) == weight}
    return [shapes[n.output[0]][1] for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in weights]


@pytest.mark.parametrize(
    ("way", "dynamo", "opset", "free"),
    [
        ("stack", True, 20, False),
        ("stack", False, 17, True),
        ("inner", True, 18, True),
        ("chunk", False, 17, True),
        ("sdpa", True, 23, True),
        ("sdpa", False, 18, False),
    ],
)
def test_one_token_after_the_last_attention(way, dynamo, opset, free):
    torch.manual_seed(1)
    model = to_float64(exported(Net(way, "norm first"), (2, 7, 12), dynamo=dynamo, opset=opset, free=free))
    after, changes = rewritten(model, [READ_TOKENS])
    assert [change.rewrite for change in changes] == ["read-tokens"]
    onnx.checker.check_model(after, full_check=True)
    assert difference(model, after, 7, 12, batches=(1, 2, 3) if free else (2,)) < 1e-13
    assert rows_of_products(after, (12, 24)) == [7, 1]
    assert rows_of_products(after, (12, 12)).count(1) == 2  # queries and projection


@pytest.mark.parametrize("read", ["two", "first"])
def test_other_ways_to_read(read):
    torch.manual_seed(2)
    model = to_float64(exported(Net("stack", read), (2, 7, 12), dynamo=True, opset=20, free=True))
    after, changes = rewritten(model, [READ_TOKENS])
    assert changes
    assert difference(model, after, 7, 12) < 1e-13
    assert rows_of_products(after, (24, 12)) == [7, 2 if read == "two" else 1]


def graph(nodes, outputs, weights, shape=(2, 6, 4)) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("x", TensorProto.DOUBLE, shape)]
    outs = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in outputs]
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    made = helper.make_graph(nodes, "g", inputs, outs, tensors)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)])


TAKE = {"s": np.array([0]), "e": np.array([1]), "a": np.array([1]), "w": np.random.default_rng(1).random((4, 4))}


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        ([("MatMul", "x w", "y"), ("Slice", "y s e a", "z")], "y z"),  # all of y is an output
        ([("MatMul", "x w", "y"), ("Slice", "y s e a", "p"), ("ReduceSum", "y", "q"), ("Add", "p q", "z")], "z"),
        ([("MatMul", "x w", "y"), ("Softmax", "y", "p", {"axis": 1}), ("Slice", "p s e a", "z")], "z"),
        ([("Transpose", "x", "t"), ("CumSum", "x a", "p"), ("Slice", "p s e a", "z")], "z"),
    ],
)
def test_nothing_happens_where_other_tokens_are_needed(nodes, outputs):
    made = [helper.make_node(op, i.split(), o.split(), **(rest[0] if rest else {})) for op, i, o, *rest in nodes]
    model = graph(made, outputs.split(), TAKE)
    after, changes = rewritten(model, [READ_TOKENS])
    assert not changes
    assert after is model


@pytest.mark.parametrize(("begin", "places"), [(4, [0, 2]), (2, [2, 0]), (2, [1, 3])])
def test_tokens_that_are_selected_of_selected_ones(begin, places):
    """Places of the second selection were taken for places of all tokens."""
    weights = {"s": np.array([begin]), "e": np.array([begin + 4]), "a": np.array([1]), "i": np.array(places)}
    weights |= {"j": np.array([0, 1]), "w": TAKE["w"]}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Slice", ["h", "s", "e", "a"], ["part"]),
        helper.make_node("Gather", ["part", "i"], ["p"], axis=1),
        helper.make_node("Gather", ["part", "j"], ["q"], axis=1),
        helper.make_node("Softmax", ["part"], ["r"], axis=1),  # reads all of them
        helper.make_node("Add", ["p", "q"], ["y"]),
    ]
    model = graph(nodes, ["y", "r"], weights, (2, 9, 4))
    after, changes = rewritten(model, [READ_TOKENS])
    assert changes
    x = {"x": np.random.default_rng(0).random((2, 9, 4))}
    for found, right in zip(*(ReferenceEvaluator(each).run(None, x) for each in (after, model)), strict=True):
        assert np.allclose(found, right, rtol=1e-13)


ONE = "int64[1] b = {3}, int64[1] e = {4}, int64[1] a = {1}"
FOUND_AT_RANDOM = {
    "a reversed selection": (
        "g (double[2,6,4] x) => (double[2,3,6] z)"
        "<int64[1] b = {-1}, int64[1] e = {-99}, int64[1] a = {1}, int64[1] s = {-2}>"
        "{ y = MatMul (x, w46)  z = Slice (y, b, e, a, s) }"
    ),
    "a part that is an output": (
        f"g (double[2,5,4] x) => (double[2,5,4] p, double[2,1,2] z) <int64[2] s = {{2, 4}}, {ONE}>"
        "{ y = MatMul (x, w46)  q, p = Split <axis = 2> (y, s)  z = Slice (q, b, e, a) }"
    ),
    "a part that nothing reads": (
        f"g (double[2,5,4] x) => (double[2,1,6] z, double[2,5,6] f) <int64[2] s = {{2, 4}}, {ONE}>"
        "{ y0 = MatMul (x, w46)  y = Relu (y0)  p, q = Split <axis = 2> (y, s)"
        " u = MatMul (q, w46)  z = Slice (u, b, e, a)  f = Relu (y) }"
    ),
    "a product of two values": (
        f"g (double[2,5,3,4] x, double[2,5,4,3] t) => (double[2,1,3,3] z) <{ONE}>"
        "{ y = MatMul (x, t)  z = Slice (y, b, e, a) }"
    ),
    "a selection behind a mean": (
        "g (double[3,1,4] x, double[3,3,5] r) => (double[3,1,12] y, double[3,1,1] z)"
        "<int64[1] b = {0}, int64[1] e = {1}, int64[1] a = {1}, int64[1] last = {2}>"
        "{ h = MatMul (w21, x)  part = Slice (h, b, e, a)  y = Concat <axis = 2> (x, part, x)"
        " m = ReduceMean <keepdims = 1> (r, last)  z = Slice (m, b, e, a) }"
    ),
    "a slice of branches that names all of a dynamic axis": (
        "g (double[B,5,4] x) => (double[B,2,4] z)"
        "<int64[1] one = {1}, int64[2] sb = {0, 2}, int64[2] se = {2147483647, 4}, int64[2] sa = {0, 2}>"
        "{ p0 = MatMul (x, w44)  q0 = MatMul (x, v44)  p = Unsqueeze (p0, one)  q = Unsqueeze (q0, one)"
        " s = Concat <axis = 1> (p, q)  t = Slice (s, sb, se, sa)  z = ReduceSum <keepdims = 0> (t, one) }"
    ),
    "a condition of branches": (
        "g (double[2,5,4] x) => (double[2,5,4] z) <int64[1] one = {1}, double o = {0.5}>"
        "{ p0 = MatMul (x, w44)  q0 = MatMul (x, v44)  p = Unsqueeze (p0, one)  q = Unsqueeze (q0, one)"
        " s = Concat <axis = 1> (p, q)  t = Where (c1154, s, o)  z = ReduceSum <keepdims = 0> (t, one) }"
    ),
    "a condition of tokens": (
        f"g (double[2,5,4] x, double[2,5,6] t) => (double[2,1,6] z) <{ONE}>"
        "{ y0 = MatMul (x, w46)  y = Where (c51, y0, t)  z = Slice (y, b, e, a) }"
    ),
    "a scale that is larger than what is normed": (
        "g (double[2,5,1] x, double[2,4] x2) => (double[2,5,5] z, double[2,4] q)"
        "<double[5,1] ones = {1, 1, 1, 1, 1}>"
        "{ l = LayerNormalization <axis = -2> (x, ones)  z = Mul (l, v5)"
        " q0 = MatMul (x2, w44)  q = MatMul (q0, v44) }"
    ),
}


@pytest.mark.parametrize("text", FOUND_AT_RANDOM.values(), ids=FOUND_AT_RANDOM)
def test_graphs_that_random_ones_had_in_common_where_a_fold_was_wrong(text):
    random = np.random.default_rng(3)
    weights = {name: random.standard_normal(tuple(map(int, name[1:]))) for name in ("w46", "w44", "w21", "v44", "v5")}
    weights |= {name: random.random(tuple(map(int, name[1:]))) > 0.5 for name in ("c1154", "c51")}
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    read_there = {name for node in model.graph.node for name in node.input}
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items() if name in read_there]
    model.graph.initializer.extend(stored)
    onnx.checker.check_model(model, full_check=True)
    after, _ = rewritten(model, FOLDS)
    onnx.checker.check_model(after, full_check=True)
    sizes = {
        value.name: [dim.dim_value or 3 for dim in value.type.tensor_type.shape.dim] for value in model.graph.input
    }
    feeds = {name: random.standard_normal(shape) for name, shape in sizes.items()}
    pairs = zip(*(ReferenceEvaluator(each).run(None, feeds) for each in (after, model)), strict=True)
    for found, right in pairs:
        assert found.shape == right.shape
        assert np.allclose(found, right, rtol=1e-12, atol=1e-13)


def test_the_export_of_a_run_reads_the_class_token(tmp_path):
    from repaconv.core import plugins
    from repaconv.methods.nondeep.published_models import example_meta

    method = plugins.load(plugins.METHODS, "nondeep")
    torch.save({"state_dict": method.example("tiny", 5), "meta": example_meta()}, tmp_path / "a.pth")
    rc.fold(tmp_path / "a.pth", preset="official")
    model = to_float64(onnx.load(f"repaconv-out/a/{rc.export().payload.path}"))
    after, changes = rewritten(model, [READ_TOKENS])
    assert len(changes) == 1
    assert difference(model, after, 3, 16, 16) < 1e-13


@pytest.mark.parametrize(("axis", "places"), [(2, [3, 0]), (2, [[1, 2], [0, 3]]), (0, [1, 1])])
def test_what_is_read_is_followed_through_a_gather_of_another_axis(axis, places):
    """Its indices are computed: from zeros times x."""
    weights = TAKE | {"p": np.array(places), "no": np.array(0.0), "all": np.array([0, 1, 2])}
    rows = [("MatMul", "x w", "y"), ("ReduceSum", "x all", "t", {"keepdims": 0}), ("Mul", "t no", "n")]
    rows += [("Cast", "n", "m", {"to": 7}), ("Add", "p m", "i"), ("Gather", "y i", "g", {"axis": axis})]
    rows += [("Slice", "g s e a", "z")]
    made = [helper.make_node(op, i.split(), o.split(), **(rest[0] if rest else {})) for op, i, o, *rest in rows]
    model = graph(made, ["z"], weights)
    after, changes = rewritten(model, [READ_TOKENS])
    assert [change.rewrite for change in changes] == ["read-tokens"]
    assert difference(model, after, 6, 4, batches=(2,)) < 1e-13


def test_where_nothing_is_read_in_part_the_graph_stays_as_it_is_written():
    """Another rewrite's change would carry the normal form into the file: a Gemm as a product and a sum."""
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    values = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", 3])] for n in "xz"]
    held = [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in (("w", (3, 3)), ("b", 3))]
    model = read(helper.make_model(helper.make_graph(nodes, "rows", *values, held), ir_version=9))
    assert not list(READ_TOKENS.apply(model))
    assert [node.op_type for node in model.graph] == ["Gemm", "Relu"]
