"""Speed rewrites of graphs, each alone and in random combinations, against the ONNX reference implementation in
float64.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest
import torch
from conftest import one_net_a_method
from graph_mutants import Mutant, difference, results
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from repaconv.backbones.convolution_mixers import DepthwiseSpec, EnsembledSpec, ScatteredSpec
from repaconv.backbones.metaformer import MetaFormer, MetaFormerConfig
from repaconv.backbones.repvgg_mobileone import RepBlock, RepConv, RepConvConfig
from repaconv.backbones.token_merging_block import MergeSpec
from repaconv.backbones.vit import ViT, ViTConfig
from repaconv.backbones.vit_inference_block import BlockSpec
from repaconv.backbones.vit_layers import AttentionSpec, IdleMlpSpec, LayerNormSpec, MlpSpec, NoNorm
from repaconv.graph import models_in_onnx_ir
from repaconv.graph.element_type_conversion import to_float64
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.graph.view_chains import chain_up_from, view_of_chain
from repaconv.onnx_export.torch_exporter import to_onnx
from repaconv.rewrites.speed import (
    attention_operator,
    channel_padding,
    channels_first_outputs,
    channels_last_as_tokens,
    combined_query_key_weights,
    concat_of_split_parts,
    cubic_resize,
    gate_broadcast,
    global_pooling,
    layernorm_to_rmsnorm,
    linear_layer_splits_and_merges,
    patch_embedding,
    rotary_embedding_operator,
    silu_as_quotient,
    slow_onnxruntime_kernels,
    split_convolutions,
    split_transposes,
    token_gather,
    whole_sample_norms,
    winograd_convolutions,
)
from repaconv.rewrites.speed import bias_moves as biases
from repaconv.rewrites.speed import token_matrix_gemm as rows
from repaconv.rewrites.speed import transposed_product_factors as moves
from repaconv.verification.float64_graphs import Float64

MODULES = (
    *(
        attention_operator,
        rotary_embedding_operator,
        biases,
        layernorm_to_rmsnorm,
        split_convolutions,
        concat_of_split_parts,
        silu_as_quotient,
        slow_onnxruntime_kernels,
        cubic_resize,
        gate_broadcast,
        linear_layer_splits_and_merges,
        combined_query_key_weights,
        token_gather,
    ),
    *(moves, whole_sample_norms, channel_padding, patch_embedding, global_pooling, rows, winograd_convolutions),
    split_transposes,
    channels_last_as_tokens,
    channels_first_outputs,
)
REWRITES = {entry.name: entry for module in MODULES for entry in vars(module).values() if isinstance(entry, Rewrite)}
EXACT = 1e-11
# Tokens, width, heads, width of a head's scores and of its values; the degenerate ones first.
SHAPES = [(1, 1, 1, 1, 1), (1, 4, 2, 2, 3), (5, 1, 1, 1, 2), (4, 6, 1, 2, 3), (2, 3, 3, 7, 1)] + [
    tuple(int(n) for n in np.random.default_rng(seed).integers(2, 9, 5)) for seed in range(6)
]


class Graph:
    """A graph by hand: operators on names, constants as arrays, float64, a free batch; other free sizes by name."""

    def __init__(self, **inputs):
        self.nodes, self.weights, self.outputs = [], [], []
        self.inputs = [helper.make_tensor_value_info(name, 11, ["batch", *shape]) for name, shape in inputs.items()]

    def __call__(self, operator, *inputs, outputs=1, **attributes):
        names = [f"v{len(self.nodes)}.{number}" for number in range(outputs)]
        inputs = [entry if isinstance(entry, str) else self._constant(entry) for entry in inputs]
        self.nodes.append(helper.make_node(operator, inputs, names, name=f"n{len(self.nodes)}", **attributes))
        return names[0] if outputs == 1 else names

    def _constant(self, array):
        self.weights.append(numpy_helper.from_array(np.asarray(array), f"w{len(self.weights)}"))
        return self.weights[-1].name

    def model(self, *outputs):
        values = [helper.make_tensor_value_info(name, 11, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "g", self.inputs, values, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model, data_prop=True)


def linear(graph, x, weight, bias=None):
    product = graph("MatMul", x, weight)
    return product if bias is None else graph("Add", product, bias)


def changed(model, *names):
    """What the rewrites changed; the proof that it is the same and that ONNX's checker takes it."""
    after, changes = rewritten(model, [REWRITES[name] for name in names])
    if not changes:
        assert after is model
        return []
    onnx.checker.check_model(after, full_check=True)
    before = results(model)
    assert all(found is not None for found in before)
    assert difference(before, results(after)) <= EXACT, (names, changes)
    return [change.rewrite for change in changes]


# --- graphs by hand ------------------------------------------------------------------------------------------------


def attending(shape, *, seed=0, joined=True, scale="scores", masked=False, read=None):
    """x + proj(attention(x)); ``read`` names what is an output of the graph besides."""
    tokens, width, heads, qk, v = shape
    random = np.random.default_rng(seed)
    graph, sizes = Graph(x=[tokens, width]), [heads * qk, heads * qk, heads * v]
    weights = [random.standard_normal((width, size)) / np.sqrt(width) for size in sizes]
    biases = [random.standard_normal(size) for size in sizes]
    if joined:
        whole = linear(graph, "x", np.concatenate(weights, 1), np.concatenate(biases))
        parts = graph("Split", whole, np.array(sizes), outputs=3, axis=2)
    else:
        parts = [linear(graph, "x", weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    shapes = [np.array([-1, tokens, heads, size]) for size in (qk, qk, v)]
    q, k, v_ = (graph("Reshape", part, shape) for part, shape in zip(parts, shapes, strict=True))
    q, k, v_ = (graph("Transpose", part, perm=perm) for part, perm in zip((q, k, v_), PERMS, strict=True))
    factor = np.array(qk**-0.5)
    if scale in ("q", "both"):
        q = graph("Mul", q, np.sqrt(factor) if scale == "both" else factor)
    if scale == "both":
        k = graph("Mul", k, np.sqrt(factor))
    product = graph("MatMul", q, k)
    scores = graph("Div", product, 1 / factor) if scale == "scores" else product
    if masked:
        scores = graph("Add", scores, random.standard_normal((1, 1, tokens, tokens)))
    weights_ = graph("Softmax", scores, axis=-1)
    mixed = graph("MatMul", weights_, v_)
    out = graph("Reshape", graph("Transpose", mixed, perm=[0, 2, 1, 3]), np.array([-1, tokens, heads * v]))
    proj = linear(graph, out, random.standard_normal((heads * v, width)), random.standard_normal(width))
    places = {"product": product, "k": parts[1], "v": parts[2], "q": parts[0], "out": out, "scores": scores}
    return graph.model(graph("Add", "x", proj), *([places[read]] if read else []))


PERMS = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("joined", [True, False], ids=["one layer", "three layers"])
def test_scores_by_one_matrix_per_head(shape, joined):
    for options in ({}, {"masked": True}, {"scale": "q"}, {"scale": "both"}):
        model = attending(shape, joined=joined, **options)
        assert changed(model, "scores-as-matrix") == ["scores-as-matrix"]
        assert changed(model, "scores-as-matrix", "no-key-bias") == ["scores-as-matrix"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("joined", [True, False], ids=["one layer", "three layers"])
def test_keys_and_values_need_no_bias(shape, joined):
    for options in ({}, {"masked": True}, {"scale": "both"}):
        model = attending(shape, joined=joined, **options)
        names = ("no-key-bias", "value-bias-forward")
        assert tuple(changed(model, *names)) == names
        assert tuple(changed(model, *names, "linear-each", *names)) == names + ("linear-each",) * joined
    assert changed(attending(shape, joined=joined, read="k"), "no-key-bias") == []
    assert changed(attending(shape, joined=joined, read="product"), "no-key-bias") == []
    assert changed(attending(shape, joined=joined, read="v"), "value-bias-forward") == []


def test_attention_that_is_read_in_between_stays():
    shape = SHAPES[-1]
    for read in ("product", "scores", "k", "q"):
        assert changed(attending(shape, read=read), "scores-as-matrix") == []
    for read in ("v", "out"):
        assert changed(attending(shape, read=read), "value-bias-forward") == []


def attending_twice(shape, *, split):
    """Two attentions whose queries, keys and values are all parts of one layer: by Split, or as timm picks them."""
    tokens, width, heads, qk, _ = shape
    random = np.random.default_rng(0)
    graph, size = Graph(x=[tokens, width]), heads * qk
    whole = linear(graph, "x", random.standard_normal((width, 6 * size)), random.standard_normal(6 * size))
    if split:
        parts = graph("Split", whole, outputs=6, axis=2, num_outputs=6)
        apart = [graph("Reshape", part, np.array([-1, tokens, heads, qk])) for part in parts]
    else:
        stacked = graph("Reshape", whole, np.array([-1, tokens, 6, heads, qk]))
        apart = [graph("Gather", stacked, np.array(number), axis=2) for number in range(6)]
    outs = []
    for first in (0, 3):
        q, k, v = (graph("Transpose", part, perm=perm) for part, perm in zip(apart[first:], PERMS, strict=False))
        weights = graph("Softmax", graph("Mul", graph("MatMul", q, k), np.array(0.3)), axis=-1)
        out = graph("Transpose", graph("MatMul", weights, v), perm=[0, 2, 1, 3])
        out = graph("Reshape", out, np.array([-1, tokens, size]))
        outs.append(linear(graph, out, random.standard_normal((size, width))))
    return graph.model(graph("Add", *outs))


@pytest.mark.parametrize("split", [True, False])
def test_two_attentions_of_one_layer(split):
    model = attending_twice(SHAPES[-1], split=split)
    assert changed(model, *["no-key-bias"] * 2, *["value-bias-forward"] * 2).count("no-key-bias") == 2
    assert changed(model, "scores-as-matrix") == ["scores-as-matrix"] * 2


def stream(tokens, width, *, spoil=None, seed=0):
    """Two pre-norm layers on tokens with a position; ``spoil`` is what makes the norms' mean count."""
    random = np.random.default_rng(seed)
    graph, normal = Graph(x=[tokens, 3]), random.standard_normal
    x = linear(graph, "x", normal((3, width)), normal(width))
    x = graph("Add", x, normal((1, tokens, width)))
    if spoil == "relu":
        x = graph("Relu", x)
    if spoil in ("norm", "plain norm"):
        scale = normal(width) if spoil == "norm" else np.ones(width)
        x = graph("LayerNormalization", graph("Relu", x), scale, axis=-1)
    if spoil == "scalar":
        x = graph("Add", x, np.array(0.5))
    for layer in range(2):
        n = graph("LayerNormalization", x, normal(width), normal(width), epsilon=1e-3, axis=-1)
        y = linear(graph, graph("Relu", n), normal((width, width)), normal(width) if layer else None)
        x = graph("Add", x, y)
    if spoil == "layer":
        return graph.model(linear(graph, x, normal((width, 2))))
    out = graph("LayerNormalization", graph("Slice", x, *(np.array([n]) for n in (0, 1, 1))), normal(width))
    return graph.model(out, *([x] if spoil == "output" else []))


@pytest.mark.parametrize("size", [(1, 2), (4, 3), (5, 8)], ids=str)
def test_norms_without_a_mean(size):
    for start in (None, "plain norm"):  # what such a norm writes has no mean
        assert changed(stream(*size, spoil=start), "rms-norm") == ["rms-norm"]


@pytest.mark.parametrize("spoil", ["relu", "scalar", "layer", "norm", "output"])
def test_a_norm_whose_mean_counts_stays(spoil):
    assert changed(stream(4, 6, spoil=spoil), "rms-norm") == []
    assert changed(stream(4, 1), "rms-norm") == []


def normed(width):
    """Two layers behind a norm with a scale and a shift."""
    random, graph = np.random.default_rng(0), Graph(x=[3, width])
    n = graph("LayerNormalization", "x", *random.standard_normal((2, width)), axis=-1)
    first = linear(graph, n, random.standard_normal((width, 4)), random.standard_normal(4))
    return graph.model(first, linear(graph, n, random.standard_normal((width, 2))))


def grouped(shape, groups=1):
    channels, height, width = shape
    random = np.random.default_rng(0)
    graph = Graph(x=shape)
    flat = graph("Reshape", "x", np.array([0, groups, -1]))
    n = graph("InstanceNormalization", flat, random.standard_normal(groups), random.standard_normal(groups))
    return graph.model(graph("Reshape", n, np.array([-1, channels, height, width])))


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 3), (4, 3, 2)], ids=str)
def test_a_norm_over_all_of_a_sample_leaves_the_image_as_it_lies(shape):
    assert changed(grouped(shape), "norm-in-place") == ["norm-in-place"]
    assert changed(grouped(shape, groups=2) if shape[0] > 1 else grouped_by_height(shape), "norm-in-place") == []


def grouped_by_height(shape):
    """Read back with height and width swapped, which is another image."""
    channels, height, width = shape
    graph = Graph(x=shape)
    flat = graph("Reshape", "x", np.array([0, 1, -1]))
    n = graph("InstanceNormalization", flat, np.ones(1), np.zeros(1))
    return graph.model(graph("Reshape", n, np.array([-1, channels, width, height])))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_group_normalization_of_one_group_is_written_out(groups):
    graph, random = Graph(x=[4, 3, 2]), np.random.default_rng(0)
    n = graph("GroupNormalization", "x", *random.standard_normal((2, 4)), num_groups=groups, stash_type=11)
    model = graph.model(n)
    model.opset_import[0].version = 21
    assert changed(model, "norm-in-place") == (["norm-in-place"] if groups == 1 else [])


def test_a_norm_between_strided_convolutions_of_any_size_leaves_the_image_as_it_lies():
    model, _ = exported("riformer", 0)
    assert not [node.name for node in model.graph.node if node.op_type == "Unsqueeze"]  # one Reshape makes the row
    _, changes = rewritten(model, [REWRITES["norm-in-place"]])
    assert len(changes) == sum(node.op_type == "InstanceNormalization" for node in model.graph.node) > 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys_are_turned_by_the_product_that_reads_them(shape):
    model = attending(shape)
    assert changed(model, "turn-in-product") == ["turn-in-product"]
    assert changed(model, "turn-in-product", "turn-in-product") == ["turn-in-product"]


@pytest.mark.parametrize("perm", [[0, 2, 1, 3], [0, 1, 3, 2], [2, 0, 1, 3]], ids=str)
def test_what_one_transpose_does_for_a_product_stays(perm):
    graph = Graph(x=[2, 3, 4], y=[2, 3, 3])
    factor = graph("Transpose", "x", perm=[0, *[1 + i for i in np.argsort(perm[1:])]])
    assert changed(graph.model(graph("Add", factor, factor)), "turn-in-product") == []
    graph = Graph(x=[4, 4, 4], y=[4, 4, 4])
    if perm[0] == 0:
        assert changed(graph.model(graph("MatMul", "y", graph("Transpose", "x", perm=perm))), "turn-in-product") == []


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((3, 4, 5), [0, 2, 3, 1]),
        ((1, 4, 1), [0, 2, 3, 1]),
        ((3, 2, 4, 5), [0, 2, 3, 4, 1]),
        ((3, "n", 5), [0, 2, 3, 1]),
    ],
)
def test_channels_are_moved_last_as_those_of_tokens(shape, order):
    graph = Graph(x=shape)
    after = changed(graph.model(graph("Transpose", "x", perm=order)), "channels-last-as-tokens")
    assert after == ["channels-last-as-tokens"]


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((3, 4, 5), [0, 3, 1, 2]),
        ((4, 5), [0, 2, 1]),
        ((3, "n", "m"), [0, 2, 3, 1]),
        ((0, 4, 5), [0, 2, 3, 1]),  # a Reshape to a size of 0 copies that of the input at the same axis
        ((3, 4, 0), [0, 2, 3, 1]),
    ],
)
def test_other_moves_of_images_stay(shape, order):
    graph = Graph(x=shape)
    assert changed(graph.model(graph("Transpose", "x", perm=order)), "channels-last-as-tokens") == []


def test_scaled_keys_by_heads_are_no_image():
    graph = Graph(x=[3, 8], q=[2, 3, 4])
    keys = graph("Transpose", graph("Reshape", "x", np.array([0, 3, 2, 4])), perm=[0, 2, 3, 1])
    model = graph.model(graph("MatMul", "q", graph("Mul", keys, np.array(0.5))))
    assert changed(model, "channels-last-as-tokens") == []


def image_output(layer="Conv", *, channels=21, side=80, behind=(), read=False):
    """A graph whose output is an image; operators ``behind`` are applied to it."""
    graph = Graph(x=[2, side, side])
    image = graph("Conv", "x", np.random.default_rng(0).standard_normal((channels, 2, 1, 1)))
    if layer == "Resize":
        image = graph("Resize", image, "", np.array([1, 1, 2, 2], np.float32), mode="linear")
    if layer == "Add":
        image = graph("Add", image, np.array(1.0))
    for operator in behind:
        image = graph(operator, image)
    return graph.model(image, graph("Add", image, np.array(1.0))) if read else graph.model(image)


@pytest.mark.parametrize(
    ("layer", "behind", "rewrite"),
    [
        ("Conv", (), "output-by-transpose"),
        ("Conv", ("Relu", "Sigmoid"), "output-by-transpose"),
        ("Resize", (), "resized-output-by-transpose"),
        ("Resize", ("Sigmoid",), "resized-output-by-transpose"),
    ],
)
def test_a_large_output_image_is_brought_into_its_order_by_a_transpose(layer, behind, rewrite):
    model = image_output(layer, behind=behind)
    assert changed(model, "output-by-transpose", "resized-output-by-transpose", "channels-last-as-tokens") == [rewrite]


@pytest.mark.parametrize(
    "model",
    [
        image_output(channels=15),
        image_output(channels=65),
        image_output(side=70),
        image_output("Add"),
        image_output(read=True),
        image_output(behind=("Transpose",)),
    ],
    ids=["few channels", "many channels", "small", "sum", "read", "transposed"],
)
def test_other_outputs_stay(model):
    assert changed(model, "output-by-transpose", "resized-output-by-transpose") == []


def patched(*, size=(4, 6), side=2, width=5, stride=None, pads=(0, 0, 0, 0), bias=True, read=None, prefix=2):
    """Patches and constant tokens before them, plus positions."""
    random = np.random.default_rng(0)
    graph = Graph(x=[3, *size])
    weights = [random.standard_normal((width, 3, side, side))] + [random.standard_normal(width)] * bias
    steps = stride or side
    conv = graph("Conv", "x", *weights, strides=[steps, steps], pads=list(pads), kernel_shape=[side, side])
    rows, columns = ((s + 2 * pads[0] - side) // steps + 1 for s in size)
    tokens = graph("Reshape", conv, np.array([-1, width, rows * columns]))
    tokens = graph("Transpose", tokens, perm=[0, 2, 1])
    shape = graph("Concat", graph("Shape", "x", end=1), np.array([1, 1]), axis=0)
    first = [graph("Expand", random.standard_normal((1, 1, width)), shape) for _ in range(prefix)]
    tokens = graph("Concat", *first, tokens, axis=1) if prefix else tokens
    out = graph("Add", tokens, random.standard_normal((1, rows * columns + prefix, width)))
    return graph.model(out, *([conv] if read == "grid" else []))


def test_patches_as_one_product_and_constant_tokens_once():
    for options in ({"size": (2, 2)}, {"width": 1}, {}, {"bias": False}, {"prefix": 0}, {"prefix": 0, "bias": False}):
        model, movable = patched(**options), options != {"prefix": 0, "bias": False}
        assert changed(model, "patch-gemm") == ["patch-gemm"]
        assert changed(model, "constant-tokens") == ["constant-tokens"] * movable
        assert changed(model, "patch-gemm", "constant-tokens") == ["patch-gemm"] + ["constant-tokens"] * movable


def test_patches_that_overlap_or_are_read_otherwise_stay():
    for options in ({"pads": (1, 1, 1, 1)}, {"stride": 1}, {"size": (5, 6)}, {"read": "grid"}):
        assert changed(patched(**options), "patch-gemm") == []
    graph = Graph(x=[3, 2], y=[3, 2])
    assert changed(graph.model(graph("Add", "x", "y")), "constant-tokens") == []


def convolved(width, hidden, grid):
    """Tokens, a layer, a depthwise convolution, a layer, tokens; then two 1 x 1 convolutions on the grid."""
    random, (height, columns) = np.random.default_rng(0), grid
    graph, count = Graph(x=[height * columns, width]), height * columns
    v = linear(graph, "x", random.standard_normal((width, hidden)), random.standard_normal(hidden))
    image = graph("Reshape", graph("Transpose", v, perm=[0, 2, 1]), np.array([-1, hidden, height, columns]))
    kernel = random.standard_normal((hidden, 1, 3, 3))
    image = graph("Conv", image, kernel, group=hidden, pads=[1, 1, 1, 1], kernel_shape=[3, 3])
    tokens = graph("Transpose", graph("Reshape", image, np.array([-1, hidden, count])), perm=[0, 2, 1])
    out = linear(graph, tokens, random.standard_normal((hidden, width)), random.standard_normal(width))
    fc1, fc2 = random.standard_normal((5, hidden, 1, 1)), random.standard_normal((2, 5, 1, 1))
    h = graph("Relu", graph("Conv", image, fc1, random.standard_normal(5)))
    return graph.model(out, graph("Conv", h, fc2))


def picked(tokens, rows, width, *, by="rank", batch=None):
    graph = Graph(x=[tokens, width], s=[tokens])
    if by == "rank":
        _, index = graph("TopK", "s", np.array([rows]), axis=1, outputs=2)
    else:
        index = graph("Cast", graph("Slice", "s", *(np.array([n]) for n in (0, rows, 1))), to=7)
    index = graph("Unsqueeze", index, np.array([2]))
    if by == "channel":
        index = graph("Cast", graph("Mul", "x", np.array(0.0)), to=7)
    else:
        index = graph("Expand", index, np.array([1, 1, width]))
    return graph.model(graph("GatherElements", "x", index, axis=1))


@pytest.mark.parametrize("size", [(1, 1, 1), (4, 1, 3), (5, 3, 1), (6, 6, 4)], ids=str)
def test_rows_by_gathernd(size):
    assert changed(picked(*size), "rows-by-gathernd") == ["rows-by-gathernd"]


def scored(rows, columns, width, *, read=("ArgMax", "ReduceMax"), keepdims=0, turned=True, axis=-1):
    graph = Graph(a=[rows, width], b=[columns, width] if turned else [width, columns])
    b = graph("Transpose", "b", perm=[0, 2, 1]) if turned else "b"
    scores = graph("MatMul", "a", b)
    found = []
    for operator in read:
        if operator.startswith("Arg"):
            best = graph(operator, scores, axis=axis, keepdims=keepdims)
            found.append(graph("Cast", best, to=11))
        else:
            found.append(graph(operator, scores, np.array([axis]), keepdims=keepdims))
    return graph.model(*found)


@pytest.mark.parametrize("size", [(1, 1, 1), (4, 1, 3), (1, 3, 1), (6, 5, 4)], ids=str)
@pytest.mark.parametrize("turned", [True, False])
def test_the_best_of_rows_is_looked_for_down_columns(size, turned):
    for read in (("ArgMax",), ("ArgMax", "ReduceMax"), ("ArgMin", "ReduceMin")):
        assert changed(scored(*size, read=read, turned=turned), "best-down-columns") == ["best-down-columns"]


def test_scores_that_are_read_otherwise_stay_rows():
    for other in ({"read": ("ArgMax", "Relu")}, {"keepdims": 1}, {"axis": 1}):
        if "read" in other:
            graph = Graph(a=[3, 2], b=[2, 4])
            scores = graph("MatMul", "a", "b")
            model = graph.model(graph("Relu", scores), graph("ReduceMax", scores, np.array([-1]), keepdims=0))
        else:
            model = scored(3, 4, 2, **other)
        assert changed(model, "best-down-columns") == []


@pytest.mark.parametrize("bias", [None, 0.0, 1.5])
@pytest.mark.parametrize("size", [(1, 1), (4, 3)], ids=str)
def test_a_layer_of_one_output_is_a_sum(size, bias):
    graph, random = Graph(x=size), np.random.default_rng(0)
    y = linear(graph, "x", random.standard_normal((size[1], 1)), None if bias is None else np.array([bias]))
    z = linear(graph, "x", random.standard_normal((size[1], 2)))
    assert changed(graph.model(y, z), "column-as-sum") == ["column-as-sum"]


def test_rows_by_an_index_that_may_be_negative_or_differs_by_channel():
    assert changed(picked(5, 3, 2, by="number"), "rows-by-gathernd") == ["rows-by-gathernd"]
    assert changed(picked(5, 3, 2, by="channel"), "rows-by-gathernd") == []


def summed(tokens, width, hidden, *, biases=(True, False), read=None, other="layer"):
    random = np.random.default_rng(0)
    graph = Graph(x=[tokens, width], y=[tokens, hidden], r=[1, width])
    bias = [random.standard_normal(width) if biased else None for biased in biases]
    first = linear(graph, "x", random.standard_normal((width, width)), bias[0]) if other == "layer" else other
    second = linear(graph, "y", random.standard_normal((hidden, width)), bias[1])
    out = graph("Add", first, second)
    return graph.model(out, *({"layer": [second], "other": [first]}.get(read, [])))


def test_sums_inside_the_product():
    for size in ((1, 1, 1), (1, 3, 2), (5, 2, 4)):
        for which in ((True, False), (False, True), (True, True)):
            assert changed(summed(*size, biases=which), "accumulate") == ["accumulate"]
            assert changed(summed(*size, biases=which), "concat-linear") == ["concat-linear"]
        assert changed(summed(*size, biases=(False, False), other="x"), "accumulate") == ["accumulate"]
    assert changed(summed(5, 2, 4, biases=(False, True), other="x"), "accumulate") == []
    assert changed(summed(5, 2, 4, biases=(True, True), read="other"), "accumulate") == []
    assert changed(summed(5, 2, 4, biases=(False, False), other="r"), "accumulate") == []
    assert changed(summed(5, 2, 4, biases=(False, False), other="x", read="layer"), "accumulate") == []


def summed_then(*, twice=False, norm=False, bias=True, width=3):
    """Layers that read a sum with a layer in it."""
    random = np.random.default_rng(0)
    graph = Graph(x=[4, 2], r=[4, width])
    y = linear(graph, "x", random.standard_normal((2, width)), random.standard_normal(width))
    total = graph("Add", graph("Add", "r", y), y if twice else "r")
    outs = [
        linear(graph, total, random.standard_normal((width, 2)), random.standard_normal(2) if bias else None)
        for _ in range(2)
    ]
    return graph.model(*outs, *([graph("Relu", total)] if norm else []))


def test_a_bias_goes_through_a_sum_into_layers():
    for width in (1, 5):
        assert changed(summed_then(width=width), "bias-forward") == ["bias-forward"]
    for options in ({"twice": True}, {"norm": True}, {"bias": False}):
        assert changed(summed_then(**options), "bias-forward") == []


def split_layer(sizes):
    random = np.random.default_rng(0)
    graph = Graph(x=[3, 4])
    whole = linear(graph, "x", random.standard_normal((4, sum(sizes))), random.standard_normal(sum(sizes)))
    parts = graph("Split", whole, np.array(sizes), outputs=len(sizes), axis=-1)
    return graph.model(*(graph("Relu", part) for part in parts))


def test_a_layer_for_each_part():
    assert changed(split_layer([1, 2, 3]), "linear-each") == ["linear-each"]


def mlp(tokens, width, *, act="Gelu", biases=True, read=None, seed=0):
    """x + fc2(act(fc1(norm(x)))) on tokens, with a token axis sum behind."""
    random = np.random.default_rng(seed)
    graph = Graph(x=[tokens, width])
    biases = [random.standard_normal(size) if biases else None for size in (5, width)]
    n = graph("LayerNormalization", "x", np.ones(width), axis=-1)
    h = linear(graph, n, random.standard_normal((width, 5)), biases[0])
    h = graph(act, h, **({"axis": 1} if act == "Softmax" else {}))
    y = graph("Add", "x", linear(graph, h, random.standard_normal((5, width)), biases[1]))
    y = graph("LayerNormalization", graph("Mul", y, random.standard_normal(width)), np.ones(width), axis=-1)
    return graph.model(linear(graph, y, random.standard_normal((width, 3)), np.ones(3)), *([h] if read else []))


@pytest.mark.parametrize("keeps", [0, 1])
def test_the_mean_over_an_image_is_a_pool_and_no_other_is(keeps):
    def mean(axes, *shape):
        graph = Graph(x=shape)
        return graph.model(graph("ReduceMean", "x", np.array(axes), keepdims=keeps))

    assert changed(mean([-1, 2], 3, 4, 5), "mean-as-pool") == ["mean-as-pool"]
    for axes, shape in (([2], (3, 4, 5)), ([1, 2], (3, 4, 5)), ([1, 2, 3], (3, 4, 5)), ([2, 3], (3, 4, 5, 2))):
        assert changed(mean(axes, *shape), "mean-as-pool") == []


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (5, 1), (4, 6)], ids=str)
def test_layers_on_rows(size):
    for model in (mlp(*size), mlp(*size, read="hidden"), mlp(*size, act="Softmax")):
        assert changed(model, "linear-as-gemm") == ["linear-as-gemm"] * 3
        names = changed(model, "linear-as-gemm", "rows-throughout")
        assert names == ["linear-as-gemm"] * 3 + ["rows-throughout"]
    bare = mlp(*size, biases=False)
    assert changed(bare, "accumulate", "linear-as-gemm", "rows-throughout") != []
    assert changed(bare, "rows-throughout") == []


def test_between_gemms_no_reshape_is_left():
    after, _ = rewritten(mlp(4, 6), [REWRITES["linear-as-gemm"], REWRITES["rows-throughout"]])
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in after.graph.value_info}
    assert all(
        ranks[node.output[0]] == 2 for node in after.graph.node if node.op_type in ("Gelu", "Add", "Mul", "Gemm")
    )
    assert sum(node.op_type == "Reshape" for node in after.graph.node) == 3  # into rows twice, out of them at the end


def test_no_two_names_are_alike_however_often_a_graph_is_rewritten():
    model = mlp(4, 6)
    for node, number in zip(model.graph.node, range(1, 99), strict=False):
        node.name = f"MatMul_{number}"  # as an exporter names its own
    for name in ("linear-as-gemm", "accumulate", "column-as-sum", "rows-throughout", "linear-as-gemm"):
        model, _ = rewritten(model, [REWRITES[name]])
        for names in ([node.name for node in model.graph.node], [weight.name for weight in model.graph.initializer]):
            assert len(set(names)) == len(names)


def moved(*moves, shape=(2, 3, 4)):
    graph = Graph(x=shape)
    x = graph("Relu", "x")
    for operator, value in moves:
        x = graph(operator, x, np.array(value)) if operator != "Transpose" else graph(operator, x, perm=value)
    return graph.model(graph("Sigmoid", x))


def in_order(model):
    """Whether the Sigmoid of a graph reads the numbers of its Relu as they are in memory, whatever the shape."""
    last = next(node for node in models_in_onnx_ir.read(model).graph if node.op_type == "Sigmoid")
    view = view_of_chain(chain_up_from(last.inputs[0]))
    assert view is None or view.source.producer().op_type == "Relu"
    return view is not None and view.in_order


def test_moves_that_undo_each_other():
    turn = ("Transpose", [0, 2, 1, 3])
    for chain in ([turn, turn], [("Reshape", [0, 6, 4]), ("Unsqueeze", [1])], [turn] * 4):
        assert in_order(moved(*chain))
    for chain in ([turn], [turn] * 3, [turn, ("Reshape", [0, 6, 4])], [turn, ("Transpose", [0, 1, 3, 2])]):
        assert not in_order(moved(*chain))


# --- graphs of the methods ------------------------------------------------------------------------------------


def vit(random, width, *blocks, **settings):
    grid = random.integers(1, 4, 2) if blocks[0].merge is None else (2, 3)
    size = tuple(int(4 * side) for side in grid)
    return ViT(ViTConfig(size, 4, width, classes=3, blocks=blocks, **settings))


def small_net(name, random):
    """A small deploy form of each method, of random sizes."""
    plain, ffn = LayerNormSpec(1e-6), MlpSpec(int(random.integers(1, 12)))
    heads, head = (int(n) for n in random.integers(1, 5, 2))
    width = heads * head * 2
    if name == "repavit":
        block = BlockSpec(AttentionSpec(heads, 2 * head, 2 * head), IdleMlpSpec(4), LayerNormSpec(1e-5), NoNorm())
        return vit(random, width, block, block, pre_norm=True, patch_bias=False)
    if name == "nondeep":
        block = BlockSpec(AttentionSpec(heads, 3 * head, head), ffn, plain, plain)
        tokens = BlockSpec(AttentionSpec(heads, width, width, key="input", value="input"), ffn, plain, plain)
        return vit(random, width, block, tokens)
    if name == "pyra":
        merges = [MergeSpec(1, sized, prefix=1, modulated=True) for sized in (False, True)]
        mixer = AttentionSpec(heads, 2 * head, 2 * head)
        return vit(random, width, *(BlockSpec(mixer, ffn, plain, plain, merge) for merge in merges))
    if name == "dwconv":
        mixers = DepthwiseSpec(3), EnsembledSpec(head + 1, 3), ScatteredSpec(heads, heads, head, 3)
        return vit(random, width, *(BlockSpec(mixer, ffn, plain, plain) for mixer in mixers), tokens=(), pool="avg")
    if name == "repconv":
        stage = (RepBlock(width, width, 3, 2, width), RepBlock(width, 4 * head, 1, 1, 1, heads))
        return RepConv(RepConvConfig("mobileone", ((RepBlock(3, width, 3, 2),), stage), 5))
    config = MetaFormerConfig(layers=(1, 1), widths=(head, width), hidden=(8, ffn.hidden), classes=5)
    return MetaFormer(config, final_affine=False)


METHODS = ("repavit", "nondeep", "riformer", "dwconv", "pyra", "repconv")


@cache
def exported(name, seed):
    torch.manual_seed(seed)
    module = small_net(name, np.random.default_rng([seed, len(name)])).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.ndim != 2 else parameter.shape[1] ** -0.5))
    size = (16, 16) if name in ("riformer", "repconv") else module.config.image_size
    model = to_float64(to_onnx(module, (3, *size), output="logits", opset=20, batch=None, dynamic_size=False))
    return model, results(model)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", one_net_a_method(METHODS, later=("pyra", "dwconv")))
def test_random_compositions_compute_the_same(name, seed):
    model, expected = exported(name, seed)
    random = np.random.default_rng([seed, METHODS.index(name)])
    for number in range(20 if seed else 8):
        chosen = random.permutation(sorted(REWRITES))[: random.integers(1, 9)]
        after, changes = rewritten(model, [REWRITES[entry] for entry in chosen])
        if changes:
            onnx.checker.check_model(after, full_check=True)
            calls = slice(number % 3, number % 3 + 1)
            assert difference(expected[calls], results(after, calls)) <= EXACT, list(chosen)


def split_and_joined(*, axis=1, among=1, whole=True):
    """A value that is split along ``axis``, and joined along ``among`` with a part of it, twice or not at all."""
    graph = Graph(x=[6, 6])
    value = graph("Relu", "x")
    head, tail = graph("Split", value, np.array([2, 4]), outputs=2, axis=axis)
    other = graph("Neg", tail)
    given = [value, other, value] if whole else [head, other]
    return graph.model(graph("Concat", *given, axis=among), head)


def silu(*, factor=None, gate=None, after="Conv", shown=False, read=False, of=None):
    """x sigmoid(x) of a convolution's output x, or with another factor, gate, or operator before it."""
    graph = Graph(x=[4, 6, 6])
    kernel = np.random.default_rng(0).standard_normal((8, 4, 3, 3))
    x = graph("Conv", "x", kernel) if after == "Conv" else graph(after, "x")
    scaled = x if factor is None else graph("Mul", np.array(factor), graph(of, x) if of else x)
    sigmoid = graph("Sigmoid", graph(gate, x) if gate else scaled)
    others = [graph("Tan", sigmoid)] if read else [sigmoid] if shown else []
    return graph.model(graph("Mul", sigmoid, x), *others)


def require_equal_at_sizes(model, after, sizes, *, atol):
    """Both graphs give the same outputs for images of small and of large numbers, of which exp overflows."""
    image = np.random.default_rng(1).standard_normal((1, 4, 6, 6))
    for size in sizes:
        with np.errstate(all="ignore"):
            (before,), (now,) = (ReferenceEvaluator(each).run(None, {"x": size * image}) for each in (model, after))
        np.testing.assert_allclose(now, before, rtol=1e-11, atol=atol)


@pytest.mark.parametrize("factor", [None, 1.702, -0.5])
def test_silu_after_a_convolution_is_a_quotient(factor):
    model = silu(factor=factor)
    after, changes = rewritten(model, [REWRITES["silu-as-quotient"]])
    assert [change.rewrite for change in changes] == ["silu-as-quotient"]
    assert not {"Sigmoid"} & {node.op_type for node in after.graph.node}
    assert changed(after, "silu-as-quotient") == []
    assert changed(model, "silu-as-quotient") == ["silu-as-quotient"]
    require_equal_at_sizes(model, after, (1.0, 10.0, 1e3, 1e5), atol=1e-300)


def test_silu_is_a_quotient_only_where_all_sizes_are_fixed():
    """With a dynamic size, OpenVINO is faster with the SiLU that it computes inside the convolution."""
    assert changed(silu(), "static-silu-as-quotient") == []
    fixed = silu()
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    del fixed.graph.value_info[:]
    fixed = onnx.shape_inference.infer_shapes(fixed, data_prop=True)
    assert changed(fixed, "static-silu-as-quotient") == ["static-silu-as-quotient"]


def test_a_gate_that_is_not_silu_of_a_convolution_stays():
    gates = [silu(gate="Tanh"), silu(after="Relu"), silu(shown=True), silu(read=True), silu(factor=[0.5] * 6)]
    gates += [silu(factor=1.5, of="Abs"), silu(factor=np.full((1, 1, 1, 1, 1), 1.5))]
    for model in gates:
        assert changed(model, "silu-as-quotient") == []


MISHES = {
    "Mish": lambda graph: graph("Mish", "x"),
    "x first": lambda graph: graph("Mul", "x", graph("Tanh", graph("Softplus", "x"))),
    "x second": lambda graph: graph("Mul", graph("Tanh", graph("Softplus", "x")), "x"),
    "with PyTorch's threshold": lambda graph: graph("Mul", "x", graph("Tanh", thresholded(graph, 20.0))),
}


def thresholded(graph, limit):
    """Softplus as PyTorch's exporter writes it: x itself above a limit."""
    return graph("Where", graph("Greater", "x", np.array(limit)), "x", graph("Softplus", "x"))


@pytest.mark.parametrize("written", MISHES)
def test_mish_is_a_quotient(written):
    graph = Graph(x=[4, 6, 6])
    model = graph.model(MISHES[written](graph))
    after, changes = rewritten(model, [REWRITES["mish-as-quotient"]])
    assert [change.rewrite for change in changes] == ["mish-as-quotient"]
    assert sorted(node.op_type for node in after.graph.node) == ["Add", "Add", "Div", "Exp", "Min", "Mul", "Mul"]
    assert changed(model, "mish-as-quotient") == ["mish-as-quotient"]
    require_equal_at_sizes(model, after, (1.0, 10.0, 100.0, 1e5), atol=1e-15)


@pytest.mark.parametrize("other", ["shown", "another x", "a limit of 5", "float16"])
def test_what_is_no_mish_stays(other):
    graph = Graph(x=[4, 6, 6], z=[4, 6, 6])
    tanh = graph("Tanh", thresholded(graph, 5.0) if other == "a limit of 5" else graph("Softplus", "x"))
    product = graph("Mul", "z" if other == "another x" else "x", tanh)
    model = graph.model(product, *([tanh] if other == "shown" else []))
    if other == "float16":
        for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    assert rewritten(model, [REWRITES["mish-as-quotient"]])[1] == []


SLOPES = np.array([0.25, -0.5, 0.0, 1.0])
PRELUS = {
    "one slope": ([4, 6, 6], np.array([[[0.25]]]), ["LeakyRelu"]),
    "equal slopes": ([4, 6, 6], np.full((4, 1, 1), 0.25), ["LeakyRelu"]),
    "one per channel": ([4, 6, 6], SLOPES[:, None, None], ["Add", "Conv", "Conv", "Relu"]),
    "one per channel, above 1": ([4, 6, 6], 3 * SLOPES[:, None, None], ["Add", "Conv", "Conv", "Relu"]),
    "one per feature": ([5, 4], SLOPES, ["Max", "Mul"]),
    "one per channel of a volume": ([4, 3, 3, 3], SLOPES[:, None, None, None], ["Max", "Mul"]),
    "one per pixel": ([2, 2, 4], SLOPES, ["Max", "Mul"]),
    "one per feature, above 1": ([5, 4], 3 * SLOPES, None),
}


@pytest.mark.parametrize("name", PRELUS)
def test_a_prelu_is_a_leaky_relu_a_sum_or_the_larger_of_two(name):
    shape, slopes, operators = PRELUS[name]
    graph = Graph(x=shape)
    model = graph.model(graph("PRelu", "x", slopes))
    assert changed(model, "prelu-as-sum") == (["prelu-as-sum"] if operators else [])
    after, _ = rewritten(model, [REWRITES["prelu-as-sum"]])
    assert sorted(node.op_type for node in after.graph.node) == (operators or ["PRelu"])


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(("axis", "shape"), [(1, [16, 4, 40]), (-2, [4, 32, 9]), (0, [300, 4]), (1, [64, 28])])
def test_a_softmax_over_another_axis_than_the_last_is_a_quotient(axis, shape, operator):
    graph = Graph(x=shape)
    model = graph.model(graph(operator, graph("Mul", np.array(30.0), "x"), axis=axis))
    assert changed(model, "softmax-as-quotient") == ["softmax-as-quotient"]
    after, _ = rewritten(model, [REWRITES["softmax-as-quotient"]])
    image = np.random.default_rng(1).standard_normal((2, *shape)) * 1e3  # of which exp overflows
    (before,), (now,) = (Float64(to_float64(each)).run({"x": image}).values() for each in (model, after))
    np.testing.assert_allclose(now, before, rtol=1e-11, atol=1e-300)


@pytest.mark.parametrize(("axis", "shape"), [(-1, [16, 40, 9]), (1, [64, 1, 1]), (2, [64, 9])])
def test_a_softmax_over_the_last_axis_stays(axis, shape):
    graph = Graph(x=shape)
    assert changed(graph.model(graph("Softmax", "x", axis=axis)), "softmax-as-quotient") == []


def test_a_softmax_of_few_numbers_stays():
    graph = Graph(x=[4, 8])
    model = graph.model(graph("Softmax", "x", axis=1))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    assert changed(model, "softmax-as-quotient") == []


@pytest.mark.parametrize("how", [{}, {"beta": 0.5, "bias": 2.0}, {"beta": 1.0, "alpha": 3.0}, {"beta": 0.625}])
@pytest.mark.parametrize("size", [1, 4, 5, 9])
def test_a_local_response_normalization_is_a_convolution_of_squares(how, size):
    graph = Graph(x=[7, 3, 4])
    model = to_float64(graph.model(graph("LRN", graph("Mul", np.array(30.0), "x"), size=size, **how)))
    after, changes = rewritten(model, [REWRITES["lrn-as-conv"]])
    assert [change.rewrite for change in changes] == ["lrn-as-conv"]
    image = {"x": np.random.default_rng(1).standard_normal((2, 7, 3, 4))}
    (before,), (now,) = (Float64(each).run(image).values() for each in (model, after))  # onnx's own LRN is wrong
    np.testing.assert_allclose(now, before, rtol=1e-12)
    powers = [node for node in after.graph.node if node.op_type == "Pow"]
    assert len(powers) == (how.get("beta") == 0.625)


@pytest.mark.parametrize(("how", "shape"), [({"bias": 0.0}, [7, 3, 4]), ({"alpha": -1.0}, [7, 3, 4]), ({}, [7, 4])])
def test_a_local_response_normalization_without_a_sum_above_zero_or_of_no_image_stays(how, shape):
    graph = Graph(x=shape)
    assert changed(graph.model(graph("LRN", "x", size=3, **how)), "lrn-as-conv") == []


@pytest.mark.parametrize("name", [name for name, (_, _, operators) in PRELUS.items() if operators])
@pytest.mark.parametrize("last", ["Add", "Sub"])
def test_a_prelu_as_keras_writes_it_becomes_the_same(name, last):
    shape, slopes, operators = PRELUS[name]
    slopes = np.asarray(slopes)
    graph = Graph(x=shape)
    below = graph("Relu", graph("Neg", "x"))
    product = graph("Mul", below, slopes) if last == "Sub" else graph("Mul", -slopes, below)
    model = graph.model(graph(last, graph("Relu", "x"), product))
    assert changed(model, "prelu-as-sum") == ["prelu-as-sum"]
    after, _ = rewritten(model, [REWRITES["prelu-as-sum"]])
    assert sorted(node.op_type for node in after.graph.node) == operators


@pytest.mark.parametrize("how", ["order", "another", "sign", "read"])
def test_what_is_no_prelu_stays(how):
    graph = Graph(x=(4, 5, 5), z=(4, 5, 5))
    slopes = np.linspace(0.1, 0.4, 4).reshape(4, 1, 1)
    negative = "x" if how == "sign" else graph("Neg", "z" if how == "another" else "x")
    product = graph("Mul", graph("Relu", negative), slopes)
    above = graph("Relu", "x")
    y = graph("Sub", product, above) if how == "order" else graph("Sub", above, product)
    assert changed(graph.model(y, *([product] if how == "read" else [])), "prelu-as-sum") == []


def test_a_prelu_with_computed_slopes_stays():
    graph = Graph(x=[4, 6, 6], z=[4, 1, 1])
    assert changed(graph.model(graph("PRelu", "x", graph("Sigmoid", "z"))), "prelu-as-sum") == []


def test_a_concat_reads_the_parts_that_a_split_makes():
    for axis, among in ((1, 1), (-2, 1), (2, -1)):
        model = split_and_joined(axis=axis, among=among)
        assert changed(model, "concat-parts") == ["concat-parts"]
        after = rewritten(model, [REWRITES["concat-parts"]])[0]
        (joined,) = (node for node in after.graph.node if node.op_type == "Concat")
        assert len(joined.input) == 5
        assert changed(after, "concat-parts") == []
    assert changed(split_and_joined(whole=False), "concat-parts") == []
    graph = Graph(x=[6, 4])
    value = graph("Relu", "x")
    first, second = graph("Split", value, np.array([2, 2]), outputs=2, axis=2)
    joined = graph("Concat", value, graph("Neg", value), axis=1)  # along another axis
    assert changed(graph.model(joined, first, second), "concat-parts") == []


@pytest.mark.parametrize(
    ("name", "rewrite"),
    [
        ("repavit", "accumulate"),
        ("repavit", "concat-linear"),
        ("repavit", "bias-forward"),
        ("repavit", "no-key-bias"),
        ("repavit", "value-bias-forward"),
        ("nondeep", "scores-as-matrix"),
        ("nondeep", "rms-norm"),
        ("riformer", "norm-in-place"),
        ("repavit", "turn-in-product"),
        *(
            pytest.param("pyra", rewrite, marks=pytest.mark.slow)  # its graph takes as long as all others together
            for rewrite in (
                "rows-by-gathernd",
                "constant-tokens",
                "patch-gemm",
                "best-down-columns",
                "column-as-sum",
            )
        ),
    ],
)
def test_a_rewrite_finds_what_it_was_written_for(name, rewrite):
    model, expected = exported(name, 0)
    after, changes = rewritten(model, [REWRITES[rewrite]])
    assert changes
    assert difference(expected, results(after)) <= EXACT


# --- graphs that nearly have the form ------------------------------------------------------------------------------


def test_a_reshape_that_moves_the_batch_is_no_transpose():
    for first, last in (([1, 0, 2, 3], [-1, 2, 3, 4]), ([0, 2, 1, 3], [3, 2, -1, 4]), ([2, 1, 0, 3], [-1, 2, 3, 4])):
        assert not in_order(moved(("Transpose", first), ("Reshape", last)))
    heads = moved(("Reshape", [2, 2, -1, 2]), ("Transpose", [2, 0, 1, 3]), ("Reshape", [-1, 2, 4]), shape=(2, 4))
    assert not in_order(heads)


def sliced(*inputs):
    graph = Graph(x=[3, 2])
    return graph.model(graph("Sigmoid", graph("Slice", graph("Relu", "x"), *inputs)))


def test_a_slice_is_read_as_it_is():
    ends = [np.array([99, 1, 99]), np.array([2**63 - 1, 1, 2**31 - 1])]
    for end in ends:  # no axes, but steps: they are no axes
        assert not in_order(sliced(np.zeros(3, int), end, "", np.ones(3, int)))
    for start, end, step in ((-1, -(2**31), -1), (-9, 0, -1), (2, -4, -1), (0, 99, 2), (-1, 2**63 - 1, -1)):
        assert not in_order(sliced(*(np.array([n]) for n in (start, end, 1, step))))
    for end in (3, 7, 2**31 - 1, 2**63 - 1):
        assert in_order(sliced(*(np.array([n]) for n in (-3, end, -2, 1))))
    everything = [np.array([0, 0]), np.array([2**63 - 1, 3]), np.array([0, 1])]
    assert in_order(sliced(*everything))


@pytest.mark.parametrize(("width", "count"), [(10, 3), (7, 4), (5, 3), (6, 3)])
def test_an_uneven_split_leaves_the_last_part_the_rest(width, count):
    random, graph = np.random.default_rng(0), Graph(x=[3, 4])
    whole = linear(graph, "x", random.standard_normal((4, width)), random.standard_normal(width))
    parts = graph("Split", whole, outputs=count, axis=-1, num_outputs=count)
    assert changed(graph.model(*(graph("Relu", part) for part in parts)), "linear-each") == ["linear-each"]


def two_sums(first, second):
    """Two layers of tokens whose sizes are free, added, and a third one of the sum."""
    random, graph = np.random.default_rng(0), Graph(x=[2, 3], y=[2, 3])
    for entry, shape in zip(graph.inputs, (first, second), strict=True):
        entry.CopyFrom(helper.make_tensor_value_info(entry.name, 11, shape))
    parts = [linear(graph, name, random.standard_normal((3, 2)), np.ones(2)) for name in "xy"]
    total = graph("Add", *parts)
    return graph.model(linear(graph, graph("Add", total, parts[0]), np.ones((2, 2)), np.ones(2)), total)


def test_a_dynamic_dimension_equals_no_other():
    names = ("concat-linear", "accumulate", "bias-forward", "rows-throughout")
    for shapes in ((["n", 2, 3], ["m", 2, 3]), ([None, 2, 3], ["m", 2, 3]), (["n", 2, 3], [None, 2, 3])):
        model = two_sums(*shapes)
        for name in names:
            assert changed(model, name) == []
        changed(model, "linear-as-gemm", *names)
    for size in (None, 4, "n"):  # the same bytes every time, the inputs as they were
        model = mlp(2, 3)
        shape = model.graph.input[0].type.tensor_type.shape
        shape.dim[0].CopyFrom(helper.make_tensor_value_info("x", 11, [size]).type.tensor_type.shape.dim[0])
        made = [rewritten(model, [REWRITES["linear-as-gemm"]])[0] for _ in range(2)]
        assert made[0].SerializeToString() == made[1].SerializeToString()
        assert made[0].graph.input == model.graph.input


def test_dimension_names_that_tools_number_are_not_relied_on():
    """Two graphs, each with its own unk__0, put together."""
    random, graph = np.random.default_rng(0), Graph(x=[3])
    chosen = [graph("Compress", "x", graph("Greater", "s", np.array(n)), axis=0) for n in (-9.0, 0.0)]
    graph.inputs.append(helper.make_tensor_value_info("s", 11, ["batch"]))
    parts = [linear(graph, value, random.standard_normal((3, 2)), np.ones(2)) for value in chosen]
    model = graph.model(graph("Add", *parts))
    del model.graph.value_info[:]
    model.graph.value_info.extend(helper.make_tensor_value_info(name, 11, ["unk__0", 3]) for name in chosen)
    for name in ("concat-linear", "accumulate"):
        assert rewritten(model, [REWRITES[name]])[1] == []


def attending_itself(*, keys="queries", batch=True):
    """Queries that are the keys as well, or those of one image for all; a scale that is no float32."""
    random, graph = np.random.default_rng(0), Graph(x=[2, 4])
    weights = [random.standard_normal((4, 4)) for _ in range(3)]
    biases = [random.standard_normal(4) for _ in range(3)]
    source = "x" if batch else graph("Relu", random.standard_normal((1, 2, 4)))
    parts = [linear(graph, name, *layer) for name, *layer in zip((source, "x", "x"), weights, biases, strict=True)]
    heads = [
        graph("Reshape", parts[0 if keys == "queries" and n == 1 else n], np.array([-1, 2, 2, 2])) for n in (0, 1, 2)
    ]
    q, k, v = (graph("Transpose", value, perm=perm) for value, perm in zip(heads, PERMS, strict=True))
    if keys == "queries":
        k = graph("Transpose", q, perm=[0, 1, 3, 2])
    scores = graph("Softmax", graph("Mul", graph("MatMul", q, k), np.array(0.3)), axis=-1)
    out = graph("Transpose", graph("MatMul", scores, v), perm=[0, 2, 1, 3])
    return graph.model(linear(graph, graph("Reshape", out, np.array([-1, 2, 4])), weights[0], biases[0]))


def test_queries_that_are_the_keys_and_queries_of_one_image():
    for name in ("no-key-bias", "scores-as-matrix"):
        assert changed(attending_itself(), name) == []
    for name in ("attention-op", "value-bias-forward"):
        assert changed(attending_itself(), name) == [name]
    one = attending_itself(keys="own", batch=False)
    assert changed(one, "attention-op") == []
    assert changed(one, "scores-as-matrix") == ["scores-as-matrix"]


NEARLY = {
    "attending": lambda seed: attending((2, 4, 2, 2, 2), seed=seed),
    "attending by three layers": lambda seed: attending((2, 4, 2, 2, 2), joined=False, scale="both", masked=True),
    "attending by one head": lambda seed: attending((2, 2, 1, 2, 2), seed=seed, joined=False, scale="q"),
    "attending itself": lambda seed: attending_itself(keys="own" if seed % 2 else "queries"),
    "attending twice": lambda seed: attending_twice((2, 4, 2, 2, 2), split=bool(seed % 2)),
    "stream": lambda seed: stream(2, 2, seed=seed),
    "normed": lambda seed: normed(2),
    "grouped": lambda seed: grouped((2, 2, 2)),
    "patched": lambda seed: patched(size=(4, 4), side=2, width=2, prefix=seed % 3),
    "convolved": lambda seed: convolved(width=4, hidden=4, grid=(2, 2)),
    "convolved in a row": lambda seed: convolved(width=2, hidden=2, grid=(1, 2)),
    "picked": lambda seed: picked(2, 2, 2),
    "summed": lambda seed: summed(2, 2, 2, biases=(bool(seed & 1), bool(seed & 2))),
    "summed then": lambda seed: summed_then(width=2),
    "split": lambda seed: split_layer([2, 2, 2]),
    "mlp": lambda seed: mlp(2, 2, seed=seed),
    "moved": lambda seed: moved(("Reshape", [-1, 4, 2]), ("Transpose", [0, 2, 1]), ("Unsqueeze", [1]), shape=(2, 2, 2)),
}


@pytest.mark.parametrize("seed", range(4))
def test_what_nearly_has_the_form_is_left_or_rewritten_rightly(seed):
    fired = 0
    for number, (name, near) in enumerate(NEARLY.items()):
        random = np.random.default_rng([seed, number])
        model = Mutant(near(seed), random).mutate()
        before = results(model) if model is not None else []
        if not any(before):
            continue
        shuffled = random.permutation(sorted(REWRITES))
        for chosen in (*([rewrite] for rewrite in shuffled[:12]), shuffled[12:18]):
            after, changes = rewritten(model, [REWRITES[rewrite] for rewrite in chosen])
            fired += len(changes)
            if changes:
                assert difference(before, results(after)) <= 100 * EXACT, (name, list(chosen))
    assert fired > 10
