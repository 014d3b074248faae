"""fold of an ONNX graph: to the checkpoint route's size, to the same outputs, exact in float64; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import reimplemented_training_networks as nets
import torch
from conftest import SHARED, TINY, quick_where
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import repaconv as rc
from repaconv.algebra.channel_maps import identity
from repaconv.checkpoints import read_checkpoint
from repaconv.core import plugins
from repaconv.core.errors import Refused, UsageProblem
from repaconv.graph.compute_costs import parameters
from repaconv.graph.element_type_conversion import to_float64
from repaconv.graph.models_in_onnx_ir import read, rewritten
from repaconv.methods.nondeep.published_models import example_meta
from repaconv.methods.repavit.published_models import Example
from repaconv.rewrites.fold import fold_pipeline
from repaconv.rewrites.fold.linear_graph import LinearGraph, Vertex
from repaconv.rewrites.fold.linear_layer_composition import AFFINE
from repaconv.verification import folded_graph_verification
from repaconv.verification.model_runners import load_onnx

WAYS = {  # the exporters, opsets, and whether the batch is free
    "new, 20": {"dynamo": True, "opset": 20, "free": False},
    "new, 18, free": {"dynamo": True, "opset": 18, "free": True},
    "old, 17, free": {"dynamo": False, "opset": 17, "free": True},
    "old, 20": {"dynamo": False, "opset": 20, "free": False},
}


def learnt(model: onnx.ModelProto) -> int:
    return parameters(read(model))


def outputs(model: onnx.ModelProto, *inputs: np.ndarray) -> list[np.ndarray]:
    names = [value.name for value in model.graph.input]
    return ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))


def difference(before: onnx.ModelProto, after: onnx.ModelProto, *inputs: np.ndarray) -> float:
    """The largest, relative to the largest number of that output."""
    pairs = zip(outputs(before, *inputs), outputs(after, *inputs), strict=True)
    return max(float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-300)) for a, b in pairs)


def require_exact(model: onnx.ModelProto, *shape: int, rewrites=fold_pipeline.FOLDS) -> onnx.ModelProto:
    """Folded in float64: the same function to 1e-11, the same inputs and outputs, and nothing left on a second pass."""
    double = to_float64(model)
    after, changes = rewritten(double, rewrites)
    onnx.checker.check_model(after, full_check=True)
    assert changes
    for side in ("input", "output"):
        ends = [[(v.name, v.type) for v in getattr(m.graph, side)] for m in (double, after)]
        assert [name for name, _ in ends[0]] == [name for name, _ in ends[1]]
    image = np.random.default_rng(1).standard_normal(shape)
    assert difference(double, after, image) < 1e-11
    return after


# --- by the graph as by the checkpoint ------------------------------------------------------------------


def trained(path: Path, method: str, settings: dict[str, str]) -> tuple[torch.nn.Module, tuple[int, ...], int]:
    """The training form, the shape of two images, and the parameters that the checkpoint route leaves."""
    by_checkpoint = rc.fold(path, out="run", force=True, **settings)
    found = plugins.load(plugins.METHODS, method)
    form = found.read(read_checkpoint(path), settings)
    module = form.module()
    weights = {name: w.float() if w.is_floating_point() else w for name, w in form.tensors.items()}
    module.load_state_dict(weights, assign=True)
    return module, (2, form.config.in_channels, *by_checkpoint.image_size), by_checkpoint.deploy.parameters


def own(name: str) -> tuple[Path, str, dict[str, str]]:
    method = name.split()[0]
    found = plugins.load(plugins.METHODS, method)
    path, settings = Path("own.pth"), {}
    if method == "nondeep":
        meta = example_meta(attn_value="output-sum" if name.endswith("output-sum") else "value-sum")
        torch.save({"state_dict": found.example("tiny", 5), "meta": meta}, path)
    elif method == "riformer":
        torch.save({"state_dict": found.example(TINY, 5), "args": {"img_size": 32}}, path)
    else:
        sizes = Example("plain", (2,), (24,), (3,), image_size=16, patch=4, classes=5)
        settings = {"num_heads": "3", "idle_ratio": "0.75"}
        torch.save({"model": found.example(sizes, 5)}, path)
    return path, method, settings


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("repavit", "new, 20"),
        ("repavit", "old, 17, free"),
        ("riformer", "new, 18, free"),
        ("riformer", "old, 20"),
        pytest.param("nondeep value-sum", "new, 18, free", marks=pytest.mark.slow),
        ("nondeep output-sum", "old, 20"),
        ("nondeep value-sum", "old, 17, free"),
    ],
)
def test_a_training_form_folds_as_its_checkpoint_does(name, way):
    module, shape, wanted = trained(*own(name))
    model = nets.exported(module, shape, **WAYS[way])
    onnx.save(model, "plain.onnx")
    done = rc.fold("plain.onnx")
    assert done.verdict == "passed"
    assert done.parameters[1] == wanted
    assert done.macs[1] < done.macs[0]
    assert learnt(require_exact(model, 3 if WAYS[way]["free"] else 2, *shape[1:])) == wanted


OFFICIAL = {
    "repavit/repavit_plain_idle075.pth": {"num_heads": "3"},
    "repavit/repapoolformer_idle075.pth": {"pool_size": "7", "image_size": "64"},
    "riformer/riformer_mmengine.pth": {"image_size": "64"},
    "nondeep/nondeep_n2_outsum_bias_cls.pth": {},
    "nondeep/nondeep_n3_valsum_nobias_avg.pth": {},
}


@pytest.mark.skipif(not SHARED.is_dir(), reason="official checkpoints are absent")
@pytest.mark.parametrize("path", quick_where(lambda path: "n3" not in path, OFFICIAL))
def test_official_checkpoints(path):
    module, shape, wanted = trained(SHARED / path, path.split("/")[0], OFFICIAL[path])
    model = nets.exported(module, shape, **WAYS["new, 20" if "n3" in path else "old, 17, free"])
    after, _ = rewritten(model, fold_pipeline.FOLDS)
    # nondeep-n3: norms before attention keep scale and shift, and the layer that reads one has no bias, in both blocks
    assert learnt(after) == wanted - (2 * (240 - 2 * 48) if "n3" in path else 0)
    x = np.random.default_rng(2).standard_normal(shape, dtype=np.float32)
    assert difference(model, after, x) < 1e-5


# --- the same nets as other code writes them ------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "way"),
    [
        ("where", "new, 20"),
        pytest.param("index put", "new, 18, free", marks=pytest.mark.slow),
        ("bool put", "old, 17, free"),  # the new exporter does not write it
        *((rule, "old, 20") for rule in ("float mask", "cat", "two", "written mask")),
        *((rule, "old, 17, free") for rule in ("run-time mask", "index list", "index put", "written mask")),
        pytest.param("written mask", "new, 18, free", marks=pytest.mark.slow),
    ],
)
def test_idle_channels_however_they_are_written(rule, way):
    net, wanted = nets.repavit(rule)
    model = nets.exported(net, (2, 3, 16, 16), **WAYS[way])
    assert learnt(require_exact(model, 3 if WAYS[way]["free"] else 2, 3, 16, 16)) == wanted


@pytest.mark.parametrize(
    ("value", "count", "heads", "bias", "way"),
    [
        ("sum", 2, 3, True, "old, 20"),
        ("sum", 3, 6, False, "old, 17, free"),
        ("out", 2, 6, True, "old, 20"),
        pytest.param("out", 3, 2, False, "new, 18, free", marks=pytest.mark.slow),
    ],
)
def test_branches_in_loops(value, count, heads, bias, way):
    net, wanted = nets.nondeep(value, count, heads, bias=bias)
    model = nets.exported(net, (2, 3, 16, 16), **WAYS[way])
    found = learnt(require_exact(model, 3 if WAYS[way]["free"] else 2, 3, 16, 16))
    assert found == wanted if bias else found <= wanted  # where nothing is added, a norm keeps its shift


@pytest.mark.parametrize(("norm", "way"), [("GN", "old, 20"), ("LN2d", "old, 17, free")])
def test_an_affine_as_a_depthwise_convolution(norm, way):
    net, wanted = nets.riformer(norm)
    model = nets.exported(net, (2, 3, 32, 32), **WAYS[way])
    assert learnt(require_exact(model, 3 if WAYS[way]["free"] else 2, 3, 32, 32)) == wanted


# --- single rewrites: laws, and where they must not fire -------------------------------------------------

RANDOM = np.random.default_rng(4)


def graph(nodes, weights, inputs, outputs=("y",), opset=20, kind=TensorProto.DOUBLE) -> onnx.ModelProto:
    """From rows (operator, inputs, outputs, attributes)."""
    made = [helper.make_node(op, i.split(), o.split(), **(rest[0] if rest else {})) for op, i, o, *rest in nodes]
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    ends = [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()]
    outs = [helper.make_tensor_value_info(name, kind, None) for name in outputs]
    whole = helper.make_graph(made, "g", ends, outs, tensors)
    model = helper.make_model(whole, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape)


def folded(model: onnx.ModelProto, *inputs: np.ndarray) -> list[str]:
    """The operators after folding, which must compute the same."""
    after, _ = rewritten(model, [AFFINE])
    onnx.checker.check_model(after, full_check=True)
    assert difference(model, after, *inputs) < 1e-12
    return [node.op_type for node in after.graph.node]


@pytest.mark.parametrize(("tokens", "c", "h", "d"), [(1, 1, 1, 1), (1, 2, 1, 3), (3, 4, 9, 2), (2, 5, 5, 5)])
def test_serial_and_parallel_linear_layers_and_a_shortcut_are_one(tokens, c, h, d):
    weights = {"w": normal(c, h), "b": normal(h), "s": normal(h), "v": normal(h, c), "u": normal(c, c), "t": normal(c)}
    rows = [
        ("MatMul", "x w", "1"),
        ("Add", "1 b", "2"),
        ("Mul", "2 s", "3"),
        ("MatMul", "3 v", "4"),
        ("MatMul", "x u", "5"),
        ("Sub", "4 5", "6"),
        ("Add", "6 x", "7"),
        ("Add", "t 7", "y"),
    ]
    kinds = folded(graph(rows, weights, {"x": (d, tokens, c)}), normal(d, tokens, c))
    if h * 2 * c >= c * c:
        assert kinds == ["MatMul", "Add"]


@pytest.mark.parametrize("read_alone", [True, False])
def test_a_concatenation_stays_whole_where_another_layer_reads_a_part_of_it(read_alone):
    """As in YOLO's C3k2 and ELAN: half of a value goes through a convolution, and all of it is concatenated."""
    weights = {"k": normal(8, 8, 3, 3), "w": normal(16, 24, 1, 1), "b": normal(16), "n": np.array([8, 8])}
    rows = [
        ("Relu", "x", "0"),
        ("Split", "0 n", "1 2", {"axis": 1}),
        ("Conv", "2 k", "3", {"pads": [1, 1, 1, 1]}),
        ("Relu", "3", "4"),
        ("Concat", "1 2 4", "5", {"axis": 1}),
        ("Conv", "5 w b", "6"),
        ("Relu", "6", "y"),
    ]
    if not read_alone:  # and of one more convolution that could be composed with it
        weights["v"] = normal(8, 8, 1, 1)
        rows += [("Conv", "1 v", "7"), ("Relu", "7", "z")]
    outputs = ("y",) if read_alone else ("y", "z")
    kinds = folded(graph(rows, weights, {"x": (1, 16, 5, 5)}, outputs), normal(1, 16, 5, 5))
    assert sorted(kinds) == sorted(row[0] for row in rows)


def test_a_concatenation_stays_whole_where_one_part_of_it_is_a_slice():
    """As in CSPNet: half of a value goes through a convolution, and the other half is concatenated to what it gives."""
    weights = {"k": normal(8, 8, 3, 3), "w": normal(16, 16, 1, 1), "b": normal(16), "n": np.array([8, 8])}
    rows = [
        ("Relu", "x", "0"),
        ("Split", "0 n", "1 2", {"axis": 1}),
        ("Conv", "2 k", "3", {"pads": [1, 1, 1, 1]}),
        ("Relu", "3", "4"),
        ("Concat", "4 1", "5", {"axis": 1}),
        ("Conv", "5 w b", "6"),
        ("Relu", "6", "y"),
    ]
    kinds = folded(graph(rows, weights, {"x": (1, 16, 5, 5)}), normal(1, 16, 5, 5))
    assert kinds == [row[0] for row in rows]


def test_a_concatenation_stays_whole_where_the_product_of_it_is_added_to_its_bias():
    """As the sines and cosines of four coordinates in DAB-DETR and RF-DETR: more is joined than the product gives."""
    weights = {"w": normal(64, 32), "b": normal(32)}
    rows = [
        ("Sin", "x", "0"),
        ("Cos", "x", "1"),
        ("Tanh", "x", "2"),
        ("Exp", "x", "3"),
        ("Concat", "0 1 2 3", "4", {"axis": -1}),
        ("MatMul", "4 w", "5"),
        ("Add", "5 b", "6"),
        ("Relu", "6", "y"),
    ]
    kinds = folded(graph(rows, weights, {"x": (1, 10, 16)}), normal(1, 10, 16))
    assert kinds == [row[0] for row in rows]


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        (("Slice", "0 one end one", "1"), ["LayerNormalization", "Slice", "Softmax"]),
        (("Gather", "0 first", "1", {"axis": 1}), ["LayerNormalization", "Gather", "Softmax"]),
        (("ReduceMean", "0 one", "1", {"keepdims": 0}), ["LayerNormalization", "ReduceMean", "Softmax"]),
        (("Slice", "0 one end last", "1"), ["LayerNormalization", "Slice", "Softmax"]),  # of channels
        (("ReduceMean", "0 last", "1"), ["LayerNormalization", "ReduceMean", "Softmax"]),
    ],
)
def test_a_scale_and_shift_that_no_layer_after_a_selection_absorbs_stay_in_the_norm(chosen, kept):
    """As in RF-DETR, which takes the class token of every window off after a norm."""
    numbers = {"one": np.array([1]), "end": np.array([2**63 - 1]), "first": np.array(0), "last": np.array([2])}
    rows = [("LayerNormalization", "x g b", "0"), chosen, ("Softmax", "1", "y")]
    kinds = folded(graph(rows, {**numbers, "g": normal(8), "b": normal(8)}, {"x": (2, 5, 8)}), normal(2, 5, 8))
    assert kinds == kept


def test_products_of_different_channels_one_of_which_is_added_to_a_shortcut_get_no_rows_of_zeros():
    """As in DPN: some channels have a shortcut, others are concatenated."""
    weights = {"v": normal(8, 16, 1, 1), "w": normal(4, 16, 1, 1), "n": np.array([8, 8])}
    rows = [
        ("Relu", "x", "0"),
        ("Split", "0 n", "1 2", {"axis": 1}),
        ("Sigmoid", "x", "3"),
        ("Conv", "3 v", "4"),
        ("Conv", "3 w", "5"),
        ("Add", "1 4", "6"),
        ("Concat", "6 2 5", "7", {"axis": 1}),
        ("Relu", "7", "y"),
    ]
    kinds = folded(graph(rows, weights, {"x": (1, 16, 5, 5)}), normal(1, 16, 5, 5))
    assert kinds == [row[0] for row in rows]


def test_slices_of_a_slice_become_splits_of_a_split():
    weights = {"w": normal(6, 8), "v": normal(8, 8), **{f"{n}": np.array([n]) for n in (0, 1, 2, 3, 4, 5, 8)}}
    rows = [
        ("MatMul", "x w", "a"),
        ("MatMul", "a v", "b"),
        ("Slice", "b 0 4 2", "head"),
        ("Slice", "b 4 8 2", "tail"),
        ("Slice", "head 0 1 1", "first"),
        ("Slice", "head 1 5 1", "rest"),
        *((kind, name, f"{name}.out") for kind, name in (("Tanh", "first"), ("Relu", "rest"), ("Exp", "tail"))),
    ]
    outputs = ("first.out", "rest.out", "tail.out")
    after = require_exact(graph(rows, weights, {"x": (1, 5, 6)}, outputs), 1, 5, 6)
    assert sorted(node.op_type for node in after.graph.node) == ["Exp", "MatMul", "Relu", "Split", "Split", "Tanh"]


@pytest.mark.parametrize("groups", [1, 4])
def test_heads_stay_a_split_where_a_convolution_of_groups_is_part_of_what_they_come_from(groups):
    """Queries, keys and values of EfficientViT, each in turn within a head: two heads from each convolution."""
    weights = {"w": normal(12, 8, 1, 1), "g": normal(12, 12 // groups, 1, 1), **{n: normal(8) for n in "sbm"}}
    weights |= {"v": np.abs(normal(8)) + 0.5, "k": normal(8, 3, 1, 1), "heads": np.array([1, 4, 6, 9])}
    rows = [
        ("Conv", "x k", "0"),
        ("BatchNormalization", "0 s b m v", "1"),
        ("Conv", "1 w", "2"),
        ("Conv", "2 g", "3", {"group": groups}),
        ("Concat", "2 3", "4", {"axis": 1}),
        ("Reshape", "4 heads", "5"),
        ("Transpose", "5", "6", {"perm": [0, 1, 3, 2]}),
        ("Split", "6", "q k' v'", {"axis": 3, "num_outputs": 3}),
        *((kind, name, f"{name}.out") for kind, name in (("Relu", "q"), ("Exp", "k'"), ("Tanh", "v'"))),
    ]
    outputs = ("q.out", "k'.out", "v'.out")
    kinds = folded(graph(rows, weights, {"x": (1, 3, 3, 3)}, outputs), normal(1, 3, 3, 3))
    if groups > 1:
        assert sorted(kinds) == ["Concat", *["Conv"] * 2, "Exp", "Relu", "Reshape", "Split", "Tanh", "Transpose"]
    else:
        assert "Gather" not in kinds


@pytest.mark.parametrize(
    ("width", "kept"), [(12, True), (5, False)], ids=["long slices stay", "short ones become a Gather"]
)
def test_slices_of_a_line_are_not_copied_number_by_number(width, kept):
    """Circular padding: ONNX Runtime takes 5 times as long for a Gather of the last axis as for slices of it."""
    weights = {"k": normal(5, 2, 3, 3), **{f"{n}": np.array([n]) for n in (0, 1, 3, width - 1, width)}}
    rows = [
        ("Relu", "x", "0.out"),
        ("Slice", f"0.out {width - 1} {width} 3", "last"),
        ("Slice", "0.out 0 1 3", "first"),
        ("Concat", "last 0.out first", "1.out", {"axis": 3}),
        ("Conv", "1.out k", "y"),
    ]
    kinds = folded(graph(rows, weights, {"x": (1, 2, 4, width)}), normal(1, 2, 4, width))
    assert sorted(kinds) == (["Concat", "Conv", "Relu", "Slice", "Slice"] if kept else ["Conv", "Gather", "Relu"])


def test_a_batchnorm_of_viewed_tokens_goes_into_the_convolution_after_it_where_nothing_before_it_can_absorb_it():
    weights = {"w": normal(3, 8, 1, 1), "image": np.array([1, 8, 4, 4]), **{n: normal(8) for n in "sbm"}}
    weights |= {"v": np.abs(normal(8)) + 0.5, "head": normal(8, 2), "g": normal(8), "h": normal(8)}
    rows = [
        ("Transpose", "0", "1", {"perm": [0, 2, 1]}),
        ("Reshape", "1 image", "2"),
        ("BatchNormalization", "2 s b m v", "3"),
        ("Conv", "3 w", "y"),
    ]
    kinds = ["Transpose", "Reshape", "Conv"]
    assert folded(graph([("Relu", "x", "0"), *rows], weights, {"x": (1, 16, 8)}), normal(1, 16, 8)) == ["Relu", *kinds]
    rows = [
        ("LayerNormalization", "x g h", "0"),
        *rows,
        ("MatMul", "0 head", "z"),
    ]  # which is shared with another reader
    after = folded(graph(rows, weights, {"x": (1, 16, 8)}, ("y", "z")), normal(1, 16, 8))
    assert sorted(after) == sorted(["LayerNormalization", *kinds, "MatMul"])


def test_scale_and_shift_of_a_norm_of_images_that_nothing_absorbs_stay_in_it():
    weights = {"w": normal(6, 4, 1, 1), "k": normal(5, 6, 3, 3), "s": normal(4), "b": normal(4), "t": normal(6)}
    rows = [
        ("InstanceNormalization", "x s b", "0"),
        ("Conv", "0 w", "1"),
        ("InstanceNormalization", "1 t t", "2"),
        ("Conv", "2 k", "y", {"pads": [1, 1, 1, 1]}),
    ]
    kinds = folded(graph(rows, weights, {"x": (1, 4, 5, 5)}), normal(1, 4, 5, 5))
    assert kinds == ["InstanceNormalization", "Conv", "InstanceNormalization", "Conv"]


def test_selections_of_selections_of_a_line_are_slices_of_it_and_keep_nothing_that_is_not_read():
    places = {f"{n}": np.array([n]) for n in (0, 2, 4, 8, 12, 16, 24, 32)}
    swapped = [
        ("Slice", "r 0 8 2", "a"),
        ("Slice", "r 8 16 2", "b"),
        ("Concat", "b a", "m", {"axis": 2}),
        ("Slice", "m 0 4 2", "c"),
        ("Slice", "m 4 16 2", "d"),
        ("Concat", "d c", "y", {"axis": 2}),
    ]
    model = graph([("Relu", "x", "r"), *swapped], places, {"x": (1, 3, 16)})
    assert sorted(folded(model, normal(1, 3, 16))) == ["Concat", "Relu", "Slice", "Slice"]
    rows = [
        ("Relu", "x", "r"),
        ("MatMul", "r w", "unread"),
        ("Concat", "unread r", "m", {"axis": 2}),
        ("Slice", "m 24 32 2", "a"),
        ("Slice", "m 16 24 2", "b"),
        ("Concat", "a b", "y", {"axis": 2}),
    ]
    model = graph(rows, {"w": normal(16, 16), **places}, {"x": (1, 3, 16)})
    assert sorted(folded(model, normal(1, 3, 16))) == ["Concat", "Relu", "Slice", "Slice"]


def test_a_thin_product_stays_in_two():
    rows = [("MatMul", "x w", "1"), ("MatMul", "1 v", "y")]
    weights = {"w": normal(16, 2), "v": normal(2, 16)}
    assert folded(graph(rows, weights, {"x": (1, 3, 16)}), normal(1, 3, 16)) == ["MatMul", "MatMul"]


def test_readers_of_a_product_stand_in_order_so_that_equal_graphs_fold_to_equal_bytes():
    graph = LinearGraph()
    product = graph.add(Vertex(4, None))
    readers = [graph.add(Vertex(4, None, inputs={product: identity(4)})) for _ in range(100)]
    assert list(product.outputs) == readers


def test_a_value_that_is_an_output_stays():
    weights = {"w": normal(4, 4), "s": normal(4)}
    rows = [("MatMul", "x w", "1"), ("Mul", "1 s", "y")]
    assert folded(graph(rows, weights, {"x": (1, 3, 4)}, ("1", "y")), normal(1, 3, 4)) == ["MatMul", "Mul"]


def test_a_shift_that_cancels_with_the_bias_of_the_layer_after_it():
    rows = [
        ("Relu", "x", "r"),
        ("ReduceL2", "r tokens", "norm", {"keepdims": 1}),
        ("Mul", "r norm", "p"),
        ("Add", "p shift", "s"),
        ("Add", "s r", "t"),
        ("MatMul", "t w", "m"),
        ("Add", "m bias", "y"),
    ]
    shift, w = np.arange(1.0, 9.0), np.arange(32.0).reshape(8, 4)
    weights = {"tokens": np.array([1]), "shift": shift, "w": w, "bias": -(shift @ w)}
    assert folded(graph(rows, weights, {"x": (1, 3, 8)}), normal(1, 3, 8)).count("Add") == 1


@pytest.mark.parametrize("bias", [True, False])
def test_the_shift_of_a_global_response_norm_goes_into_the_bias_of_the_layer_after_it(bias):
    """As in ConvNeXt V2: what two products would have to read is written out, but its constant is not."""
    rows = [
        ("Relu", "x", "r"),
        ("ReduceL2", "r tokens", "norm", {"keepdims": 1}),
        ("Mul", "r norm", "p"),
        ("Mul", "gain p", "q"),
        ("Add", "q shift", "s"),
        ("Add", "s r", "t"),
        *([("MatMul", "t w", "m"), ("Add", "m bias", "y")] if bias else [("MatMul", "t w", "y")]),
    ]
    weights = {"tokens": np.array([1]), "gain": normal(8), "shift": normal(8), "w": normal(8, 4), "bias": normal(4)}
    assert folded(graph(rows, weights, {"x": (1, 3, 8)}), normal(1, 3, 8)).count("Add") == 2


def test_a_shift_does_not_cross_a_padded_convolution():
    weights = {"s": normal(4, 1, 1), "k": normal(5, 4, 3, 3)}
    rows = [("Add", "x s", "1"), ("Conv", "1 k", "y", {"pads": [1, 1, 1, 1]})]
    assert folded(graph(rows, weights, {"x": (1, 4, 5, 5)}), normal(1, 4, 5, 5)) == ["Add", "Conv"]


@pytest.mark.parametrize(("groups", "pads", "bias"), [(1, 1, True), (4, 2, False), (2, 0, True)])
def test_scales_and_shifts_after_a_convolution_go_into_it(groups, pads, bias):
    conv = torch.nn.Conv2d(4, 8, 3, padding=pads, groups=groups, bias=bias)
    net = nets.scrambled(torch.nn.Sequential(conv, torch.nn.BatchNorm2d(8), torch.nn.ReLU()))
    model = to_float64(nets.exported(net, (2, 4, 5, 5), **WAYS["old, 20"]))
    after, _ = rewritten(model, fold_pipeline.FOLDS)
    assert [node.op_type for node in after.graph.node] == ["Conv", "Relu"]
    assert difference(model, after, normal(2, 4, 5, 5)) < 1e-12


@pytest.mark.parametrize(("operator", "order"), [("Sub", "1 v"), ("Sub", "v 1"), ("Div", "1 v"), ("Mul", "v 1")])
def test_constants_after_a_convolution(operator, order):
    weights = {"k": normal(3, 2, 3, 3), "v": normal(3, 1, 1)}
    model = graph([("Conv", "x k", "1"), (operator, order, "y")], weights, {"x": (1, 2, 5, 5)})
    after, _ = rewritten(model, fold_pipeline.FOLDS)
    assert [node.op_type for node in after.graph.node] == ["Conv"]
    assert difference(model, after, normal(1, 2, 5, 5)) < 1e-12


def test_a_mask_over_tokens_is_none_over_channels():
    weights = {"m": np.array([[True], [False], [True]]), "w": normal(4, 4)}
    rows = [("Relu", "x", "1"), ("Where", "m 1 x", "2"), ("MatMul", "2 w", "y")]
    assert "Where" in folded(graph(rows, weights, {"x": (1, 3, 4)}), normal(1, 3, 4))


def test_a_mask_that_is_computed_stays():
    rows = [("Greater", "x z", "m"), ("Relu", "x", "1"), ("Where", "m 1 x", "y")]
    assert "Where" in folded(graph(rows, {"z": np.zeros(1)}, {"x": (1, 3, 4)}), normal(1, 3, 4))


def test_keys_that_something_else_reads_keep_their_bias():
    net, _ = nets.nondeep("sum", 2, 3, bias=True)

    class Reading(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.block = net, net.blocks[0]

        def forward(self, x):
            return self.block.attention(x), self.block.k[0](x), self.block.k[1](x)

    model = to_float64(nets.exported(Reading(), (2, 5, 24), **WAYS["old, 20"]))
    after, _ = rewritten(model, fold_pipeline.FOLDS)
    assert difference(model, after, normal(2, 5, 24)) < 1e-12


@pytest.mark.parametrize("kind", ["tanh", "none"])
@pytest.mark.parametrize("opset", [17, 20])
def test_activations_of_several_nodes_come_out_as_they_went_in(kind, opset):
    net = torch.nn.Sequential(
        torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 8), torch.nn.GELU(kind), torch.nn.Linear(8, 3)
    )
    net = nets.scrambled(torch.nn.Sequential(*net, torch.nn.SiLU(), torch.nn.BatchNorm1d(3)))
    model = nets.exported(net, (4, 6), dynamo=False, opset=opset, free=False)
    after = require_exact(model, 4, 6)
    wanted = {node.op_type for node in model.graph.node} - {"Constant"}
    assert {node.op_type for node in after.graph.node} - {"MatMul"} <= wanted | {"Add", "Mul", "Pow"}  # GELU has a cube


def test_means_and_norms_that_only_a_head_reads():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3), torch.nn.GroupNorm(2, 6), torch.nn.AdaptiveAvgPool2d(1))
    net = nets.scrambled(torch.nn.Sequential(*net, torch.nn.Flatten(), torch.nn.Linear(6, 4)))
    after = require_exact(nets.exported(net, (2, 3, 7, 7), **WAYS["old, 20"]), 2, 3, 7, 7)
    assert learnt(after) == 3 * 6 * 9 + 6 + 6 * 4 + 4


def test_a_group_norm_whose_shape_is_not_in_the_file():
    """ONNX's inference leaves the output of a GroupNormalization open, and all that is computed of it."""
    weights = {"k": normal(8, 3, 3, 3), "s": normal(8), "t": normal(8), "v": normal(4, 8, 1, 1)}
    rows = [("Conv", "x k", "1"), ("GroupNormalization", "1 s t", "2", {"num_groups": 4}), ("Conv", "2 v", "y")]
    model = graph(rows, weights, {"x": (1, 3, 6, 6)}, opset=21)
    assert folded(model, normal(1, 3, 6, 6)) == ["Conv", "GroupNormalization", "Conv"]
    assert learnt(rewritten(model, [AFFINE])[0]) == 8 * 27 + 8 * 4 + 4


WHOLE = {
    "Cast": ((), {"to": TensorProto.DOUBLE}),
    "Dropout": ((), {}),
    "Slice": ((np.array([0]), np.array([2**31 - 1]), np.array([2])), {}),
    "Tile": ((np.array([1, 1, 1, 1]),), {}),
    "Pad": ((np.zeros(8, np.int64),), {"mode": "reflect"}),
    "Sum": ((), {}),
    "Max": ((), {}),
    "Concat": ((), {"axis": 1}),
    "Resize": ((np.zeros(0), np.ones(4, np.float32)), {"mode": "linear"}),
    "Clip": ((), {}),
    "MaxPool": ((), {"kernel_shape": [1, 1], "auto_pad": "SAME_UPPER"}),
    "AveragePool": ((), {"kernel_shape": [1, 1], "strides": [1, 1], "count_include_pad": 1}),
}
"""Operators that return their first input as it is, by the other inputs and attributes with which they do."""


@pytest.mark.parametrize("batch", [2, "b"])
@pytest.mark.parametrize("operator", WHOLE)
def test_what_returns_its_input_keeps_nothing_apart(operator, batch):
    others, attributes = WHOLE[operator]
    weights = {"k": normal(4, 3, 1, 1), "s": normal(4, 1, 1)}
    weights |= {f"o{place}": other for place, other in enumerate(others)}
    rows = [("Conv", "x k", "1"), (operator, " ".join(["1", *list(weights)[2:]]), "2", attributes), ("Mul", "2 s", "3")]
    model = graph([*rows, ("Relu", "3", "y")], weights, {"x": (batch, 3, 4, 4)})
    assert folded(model, normal(2, 3, 4, 4)) == ["Conv", "Relu"]


@pytest.mark.parametrize("operator", ["GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceSum", "ReduceMax"])
def test_what_reduces_single_pixels_keeps_nothing_apart(operator):
    """As a second squeeze does, and adaptive pooling of an image that is one pixel already."""
    weights = {"k": normal(4, 3, 1, 1), "s": normal(4, 1, 1), "axes": np.array([2, -1])}
    read = "1 axes" if operator.startswith("Reduce") else "1"
    rows = [("Conv", "x k", "1"), (operator, read, "2"), ("Mul", "2 s", "3"), ("Relu", "3", "y")]
    for side in (1, 2):
        found = folded(graph(rows, weights, {"x": ("b", 3, side, side)}), normal(2, 3, side, side))
        assert operator in found if side > 1 else found == ["Conv", "Relu"]


@pytest.mark.parametrize("attributes", [{"kernel_shape": [1, 1], "strides": [2, 2]}, {"kernel_shape": [1, 2]}])
def test_a_pool_of_some_pixels_stays(attributes):
    weights = {"k": normal(4, 3, 3, 3), "s": normal(4, 1, 1)}
    rows = [("Conv", "x k", "1"), ("Tanh", "1", "2"), ("MaxPool", "2", "3", attributes), ("Mul", "3 s", "y")]
    assert "MaxPool" in folded(graph(rows, weights, {"x": (2, 3, 6, 6)}), normal(2, 3, 6, 6))


@pytest.mark.parametrize("last", ["BatchNormalization", "Conv"])
def test_a_norm_keeps_its_scale_if_only_some_of_the_parts_into_which_it_is_split_can_take_it(last):
    """Inside the norm it costs nothing; a padded convolution cannot take the shift."""
    weights = {"g": normal(8), "b": normal(8), "k": normal(4, 1, 3, 3), "s": normal(4), "half": np.array([4, 4])}
    weights |= {"v": RANDOM.random(4) + 0.5, "w": normal(4, 4, 1, 1)}
    rows = [("LayerNormalization", "x g b", "1"), ("Transpose", "1", "2", {"perm": [0, 3, 1, 2]})]
    rows += [("Split", "2 half", "3 4", {"axis": 1}), ("Conv", "3 k", "y", {"pads": [1] * 4, "group": 4})]
    rows += [("BatchNormalization", "4 s s s v", "z") if last == "BatchNormalization" else ("Conv", "4 w", "z")]
    found = folded(graph(rows, weights, {"x": (2, 6, 6, 8)}, ("y", "z")), normal(2, 6, 6, 8))
    assert {"Mul", "Add"}.isdisjoint(found)


@pytest.mark.parametrize("joined", ["x l s m", "s m x l"])
def test_a_sum_that_is_concatenated_with_one_of_its_terms_stays_a_sum(joined):
    """As in ESRGAN+: without the sum, the Concat would be one of Pads."""
    weights = {"k": normal(3, 3, 1, 1), "v": normal(2, 12, 3, 3), "t": normal(2, 1, 1)}
    rows = [("Tanh", "x", "l"), ("Conv", "x k", "c"), ("Add", "l c", "s"), ("Sin", "s", "n"), ("Add", "n s", "m")]
    rows += [("Concat", joined, "j", {"axis": 1}), ("Conv", "j v", "p", {"pads": [1] * 4}), ("Mul", "p t", "y")]
    model = graph(rows, weights, {"x": (2, 3, 5, 5)})
    after, _ = rewritten(model, fold_pipeline.FOLDS)
    assert [node.op_type for node in after.graph.node] == [kind for kind, *_ in rows[:-1]]
    assert difference(model, after, normal(2, 3, 5, 5)) < 1e-12


def test_a_norm_keeps_its_scale_before_an_average_if_another_reader_cannot_take_it():
    """As pyramid pooling of a norm does, which concatenates the norm and its averages."""
    weights = {"g": normal(4), "b": normal(4), "k": normal(2, 4, 1, 1), "l": normal(2, 8, 3, 3)}
    rows = [("LayerNormalization", "x g b", "1"), ("Transpose", "1", "2", {"perm": [0, 3, 1, 2]})]
    rows += [("AveragePool", "2", "3", {"kernel_shape": [3, 3], "pads": [1] * 4}), ("Conv", "3 k", "z")]
    rows += [("Tanh", "2", "5"), ("Concat", "2 5", "6", {"axis": 1}), ("Conv", "6 l", "y")]
    found = folded(graph(rows, weights, {"x": (2, 6, 6, 4)}, ("y", "z")), normal(2, 6, 6, 4))
    assert sorted(found) == sorted(row[0] for row in rows)


@pytest.mark.parametrize(
    ("operator", "number"),
    [("Add x o", 0), ("Add o x", 0), ("Sub x o", 0), ("Mul x o", 1), ("Mul o x", 1), ("Div x o", 1)],
)
def test_neutral_constants_between_what_is_not_linear(operator, number):
    """As the factor of 1 in Real-CUGAN, which an option of the network may change."""
    kind, *read = operator.split()
    start = [("Conv", "x k", "1"), ("Mul", "1 s", "2"), ("Sigmoid", "2", "3")]
    weights, shape = {"k": normal(4, 3, 1, 1), "s": normal(4, 1, 1)}, {"x": (2, 3, 4, 4)}
    for order, ones in ((read, ()), (read, (4, 1)), (read, (5, 1, 1, 1, 1)), (read[::-1], ())):
        rows = [*start, (kind, " ".join(order).replace("x", "3"), "4"), ("Tanh", "4", "y")]
        found = folded(graph(rows, weights | {"o": np.full(ones, float(number))}, shape), normal(2, 3, 4, 4))
        other = order != read and kind in ("Sub", "Div")
        assert found == ["Conv", "Sigmoid", *([kind] if other or len(ones) > 4 else []), "Tanh"]  # 5 axes: it repeats


@pytest.mark.parametrize("batch", [2, 1])
@pytest.mark.parametrize("hidden", [True, False])
def test_a_constant_mask_that_hides_nothing(hidden, batch):
    """As that of padding in Mask2Former, if the images have none."""
    rows = [("Conv", "x k", "1"), ("Mul", "1 s", "2"), ("Sigmoid", "2", "3")]
    rows += [("Where", "m 3 o" if hidden else "m o 3", "4"), ("Tanh", "4", "y")]
    weights = {"k": normal(4, 3, 1, 1), "s": normal(4, 1, 1), "m": np.full((batch, 1, 4, 1), hidden)}
    model = graph(rows, weights | {"o": np.zeros(())}, {"x": (1, 3, 4, 4)})
    assert folded(model, normal(1, 3, 4, 4)) == ["Conv", "Sigmoid", *(["Where"] if batch > 1 else []), "Tanh"]


def test_views_in_series_that_would_take_too_many_axes_together_are_shortened_in_parts():
    """As Hiera sorts tokens: by halves of height and width, three times. In one Transpose that takes ten axes."""
    weights, rows, value = {"s": normal(4)}, [("Mul", "x s", "m"), ("Mul", "m s", "n"), ("Relu", "n", "v0")], "v0"
    for count, side in ((1, 16), (4, 8), (16, 4)):
        weights |= {f"a{side}": np.array([count, side, side, 4]), f"d{side}": np.array([4 * count, -1, side // 2, 4])}
        weights |= {f"b{side}": np.array([count, side // 2, 2, side // 2, 2, 4])}
        rows += [("Reshape", f"{value} a{side}", f"r{side}"), ("Reshape", f"r{side} b{side}", f"s{side}")]
        rows += [("Transpose", f"s{side}", f"t{side}", {"perm": [0, 2, 4, 1, 3, 5]})]
        rows += [("Reshape", f"t{side} d{side}", value := f"v{side}")]
    model = graph([*rows, ("Tanh", value, "y")], weights, {"x": (1, 256, 4)})
    kinds = folded(model, normal(1, 256, 4))
    assert kinds == ["Mul", "Relu", "Reshape", "Transpose", "Reshape", "Transpose", "Reshape", "Tanh"]


TOKENS = [("Mul", "x s", "m"), ("Mul", "m s", "n"), ("Relu", "n", "v0")]
APART = ("Reshape", "v0 a", "v1")
NAMES = ("first", "one", "two")
COUNT = [("Shape", "x", "all"), ("Gather", "all first", "count"), ("Concat", "count any", "t", {"axis": 0})]
TARGETS = {"a": np.array([-1, 4, 24]), "b": np.array([-1, 2, 2, 24]), "first": np.array([0]), "any": np.array([-1])}


@pytest.mark.parametrize("rows", [[("Reshape", "v1 b", "v2")], [*COUNT, ("Reshape", "v1 t", "v2")]])
def test_reshapes_in_series_are_one_at_dynamic_sizes_too(rows):
    model = graph([*TOKENS, APART, *rows, ("Tanh", "v2", "y")], {"s": normal(24), **TARGETS}, {"x": ("N", "T", 24)})
    assert folded(model, normal(2, 8, 24)).count("Reshape") == 1


@pytest.mark.parametrize(
    ("rows", "outputs"),
    [
        ([("Unsqueeze", "v0 first", "v1"), ("Reshape", "v1 c", "v2")], ("y",)),
        ([APART, *COUNT[:2], ("Concat", "zero count any", "t", {"axis": 0}), ("Reshape", "v1 t", "v2")], ("y",)),
        ([APART, ("Reshape", "v1 b", "v2")], ("y", "v1")),
    ],
    ids=["a size is copied", "a size is copied, others are computed", "the first is an output"],
)
def test_reshapes_in_series_stay_two(rows, outputs):
    weights = {"s": normal(24), **TARGETS, "c": np.array([0, 0, -1, 12]), "zero": np.array([0])}
    model = graph([*TOKENS, *rows, ("Tanh", "v2", "y")], weights, {"x": ("N", "T", 24)}, outputs)
    kinds = folded(model, normal(2, 8, 24))
    assert kinds.count("Reshape") + kinds.count("Unsqueeze") == 2


@pytest.mark.parametrize("count", [3, 0])
@pytest.mark.parametrize(
    ("shape", "before", "parts"),
    [
        ((1, "N", 4), ("Squeeze", "v0 first", "v1"), "count two two"),
        (("N", 4), ("Unsqueeze", "v0 first", "v1"), "one count two two"),
        (("N", 4), ("Reshape", "v0 whole", "v1"), "one count two two"),
    ],
)
def test_reshapes_in_series_reshape_no_detections(shape, before, parts, count):
    """A Reshape copies a size of its input where its target is 0."""
    weights = {"s": normal(4), "whole": np.array([1, -1, 4]), **{name: np.array([at]) for at, name in enumerate(NAMES)}}
    rows = [*TOKENS, before, ("Concat", parts, "t", {"axis": 0}), ("Reshape", "v1 t", "v2"), ("Tanh", "v2", "y")]
    model = graph(rows, weights, {"x": shape})
    model.graph.input.append(helper.make_tensor_value_info("count", TensorProto.INT64, [1]))
    after, changes = rewritten(model, [AFFINE])
    image = normal(*(count if size == "N" else size for size in shape))
    assert changes
    assert [y.shape for y in outputs(after, image, np.array([count]))] == [
        y.shape for y in outputs(model, image, np.array([count]))
    ]


def test_reshapes_to_the_same_computed_size_are_one():
    weights = {"s": normal(24), **TARGETS, "four": np.array([4, 24]), "more": np.array([2, 2, 24])}
    rows = [*TOKENS, ("Concat", "count four", "t", {"axis": 0}), ("Reshape", "v0 t", "v1")]
    rows += [("Concat", "count more", "u", {"axis": 0}), ("Reshape", "v1 u", "v2"), ("Tanh", "v2", "y")]
    model = graph(rows, weights, {"x": ("N", "T", 24)})
    model.graph.input.append(helper.make_tensor_value_info("count", TensorProto.INT64, [1]))
    after, _ = rewritten(model, [AFFINE])
    assert [node.op_type for node in after.graph.node].count("Reshape") == 1


@pytest.mark.parametrize(("side", "count"), [(4, 1), (16, 2)])
def test_transposes_that_are_slower_as_one_stay_two(side, count):
    """As im2col and heads after it: ONNX Runtime moves rows fast, and matrices, but not single numbers (0.87 in KBNet).

    For few numbers one node is faster than two.
    """
    weights = {"s": normal(1), "a": np.array([2, 36, side * side])}
    rows = [("Mul", "x s", "m"), ("Mul", "m s", "n"), ("Relu", "n", "v")]
    rows += [("Transpose", "v", "t", {"perm": [0, 1, 3, 2, 4]}), ("Reshape", "t a", "r")]
    rows += [("Transpose", "r", "u", {"perm": [2, 0, 1]}), ("Tanh", "u", "y")]
    kinds = folded(graph(rows, weights, {"x": (8, 3, side, 3, side)}), normal(8, 3, side, 3, side))
    assert (kinds.count("Transpose"), kinds.count("Mul")) == (count, 1)


@pytest.mark.parametrize(("apart", "count"), [(False, 1), (True, 2)])
def test_transposes_next_to_each_other_are_one(apart, count):
    """However slow it is: ONNX Runtime joins them itself, but not across a Reshape."""
    rows = [("Mul", "x s", "m"), ("Mul", "m s", "n"), ("Relu", "n", "v"), ("Reshape", "v a", "r")]
    rows += [("Transpose", "r", "t", {"perm": [0, 1, 3, 2]}), ("Reshape", "t b", "q"), ("Reshape", "q c", "p")]
    rows += [("Transpose", "p", "u", {"perm": [0, 2, 3, 1]} if not apart else {"perm": [0, 2, 1]}), ("Tanh", "u", "y")]
    weights = {"s": normal(1), "a": [2, 8, 16, 24], "b": [2, 8, 384], "c": [2, 8, 384] if apart else [2, 8, 24, 16]}
    kinds = folded(graph(rows, weights, {"x": (2, 8 * 16, 24)}), normal(2, 8 * 16, 24))
    assert (kinds.count("Transpose"), kinds.count("Mul")) == (count, 1)


def test_what_only_looks_like_its_input_stays():
    """Every other row, a Resize by 2, and a Cast that rounds."""
    weights = {"k": normal(4, 3, 1, 1), "s": normal(4, 1, 1)}
    weights |= {"from": np.array([0]), "to": np.array([9]), "axis": np.array([2]), "step": np.array([-1])}
    weights |= {"roi": np.zeros(0), "scales": np.array([1, 1, 2, 2], np.float32)}
    rows = [("Conv", "x k", "1"), ("Slice", "1 to from axis step", "2"), ("Resize", "2 roi scales", "3")]
    rows += [("Cast", "3", "4", {"to": TensorProto.FLOAT}), ("Cast", "4", "5", {"to": TensorProto.DOUBLE})]
    model = graph([*rows, ("Mul", "5 s", "y")], weights, {"x": (1, 3, 4, 4)})
    after, _ = rewritten(model, [AFFINE])
    assert [node.op_type for node in after.graph.node] == ["Conv", "Slice", "Resize", "Cast", "Cast", "Mul"]


@pytest.mark.parametrize("batch", [2, "b"])
def test_sizes_after_a_resize_by_constant_factors_are_known(batch):
    """Of a graph without recorded shapes, whose Resize is by numbers that are no integers of type."""
    weights = {"r": np.zeros(0), "f": np.array([1, 1, 2, 1.5], np.float32)}
    model = graph([("Resize", "x r f", "1"), ("Relu", "1", "y")], weights, {"x": (batch, 3, 4, 5)})
    del model.graph.value_info[:]
    (found,) = (node.outputs[0].shape for node in read(model).graph if node.op_type == "Relu")
    assert [str(size) for size in found] == [str(batch), "3", "8", "7"]


@pytest.mark.parametrize("decision", ["size", "factor"])
def test_a_fold_that_makes_sizes_known_is_not_taken_for_one_that_multiplies_more(decision):
    """Behind an If, or a Tile of a free size, the sizes are known once it is gone, in the graph as given as well."""
    weights = {"k": normal(4, 3, 1, 1), "s": normal(4, 1, 1), "v": normal(4, 4, 3, 3), "ones": np.ones(4, np.int64)}
    weights = {name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in weights.items()}
    rows = [("Conv", "x k", "1"), ("Tile", "1 ones", "2"), ("Conv", "2 v", "3"), ("Mul", "3 s", "y")]
    model = graph(rows, weights, {"x": ("b", 3, 9, 9)}, kind=TensorProto.FLOAT)
    if decision == "size":
        branch = helper.make_graph(
            [helper.make_node("Relu", ["1"], ["r"])], "b", [], [helper.make_tensor_value_info("r", 1, [None] * 4)]
        )
        model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
        model.graph.node[1].CopyFrom(helper.make_node("If", ["yes"], ["2"], then_branch=branch, else_branch=branch))
    del model.graph.value_info[:]
    onnx.save(model, "sizes.onnx")
    done = rc.fold("sizes.onnx", measure=False)
    assert (done.verdict, bool(done.changes), done.reverted) == ("passed", True, ())


def test_a_weight_that_a_batch_norm_standardizes_is_a_constant():
    """As BiT's are exported: a BatchNormalization in training mode, whose statistics nothing reads."""
    weights = {"k": normal(1, 4, 27), "g": np.ones(4), "z": np.zeros(4), "shape": np.array([4, 3, 3, 3])}
    rows = [("BatchNormalization", "k g z z g", "1 mean var", {"training_mode": 1}), ("Reshape", "1 shape", "2")]
    model = graph([*rows, ("Conv", "x 2", "3"), ("Relu", "3", "y")], weights, {"x": (1, 3, 5, 5)})
    after, _ = rewritten(model, fold_pipeline.FOLDS)
    assert [node.op_type for node in after.graph.node] == ["Conv", "Relu"]
    image = normal(1, 3, 5, 5)
    kernel = ((k := weights["k"]) - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-5)
    plain = [("Conv", "x 2", "3"), ("Relu", "3", "y")]
    (found,) = outputs(after, image)
    (right,) = outputs(graph(plain, {"2": kernel.reshape(4, 3, 3, 3)}, {"x": (1, 3, 5, 5)}), image)
    assert np.abs(found - right).max() < 1e-9 * np.abs(right).max()


def branching(decided: bool) -> onnx.ModelProto:
    """A choice by the width of the image, which may be known, between two layers; both branches use the same names."""
    rows = [("Shape", "x", "0"), ("Gather", "0 axis", "1"), ("Equal", "1 wide", "2")]
    weights = {"axis": np.array(3), "wide": np.array(5), "k": normal(4, 3, 1, 1), "s": normal(4, 1, 1)}
    head = graph([*rows, ("Conv", "x k", "3")], weights, {"x": (1, 3, 5, 5 if decided else "w")}, ("3",))
    branches = []
    for kernel in (normal(4, 4, 1, 1), normal(4, 4, 1, 1)):
        nodes = [helper.make_node("Conv", ["3", "kk"], ["c"]), helper.make_node("Relu", ["c"], ["r"])]
        out = [helper.make_tensor_value_info("r", TensorProto.DOUBLE, [None] * 4)]
        branches.append(helper.make_graph(nodes, "branch", [], out, [numpy_helper.from_array(kernel, "kk")]))
    for number in ("4", "5"):
        head.graph.node.append(
            helper.make_node("If", ["2"], [number], then_branch=branches[0], else_branch=branches[1])
        )
    head.graph.node.extend([helper.make_node("Add", ["4", "5"], ["6"]), helper.make_node("Mul", ["6", "s"], ["y"])])
    head.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.DOUBLE, [None] * 4))
    onnx.checker.check_model(head)
    return head


def test_a_branch_that_the_sizes_decide_is_folded_into():
    model = branching(decided=True)
    after, _ = rewritten(model, fold_pipeline.FOLDS)
    onnx.checker.check_model(after, full_check=True)
    assert "If" not in {node.op_type for node in after.graph.node}
    assert [node.op_type for node in after.graph.node].count("Conv") < 3
    assert difference(model, after, normal(1, 3, 5, 5)) < 1e-12


def test_a_branch_that_an_image_decides_stays():
    model = branching(decided=False)
    after, _ = rewritten(model, fold_pipeline.FOLDS)
    assert [node.op_type for node in after.graph.node].count("If") in (0, 2)
    for width in (5, 6):
        image = normal(1, 3, 5, width)
        assert difference(model, after, image) < 1e-12


# --- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def small() -> Path:
    """A graph with something to fold, in float32."""
    weights = {n: a.astype(np.float32) for n, a in {"w": normal(4, 6), "b": normal(6), "s": normal(6)}.items()}
    rows = [("MatMul", "x w", "1"), ("Add", "1 b", "2"), ("Mul", "2 s", "y")]
    onnx.save(graph(rows, weights, {"x": ("n", 3, 4)}, kind=TensorProto.FLOAT), "small.onnx")
    return Path("small.onnx")


def test_the_command_writes_a_graph_and_what_it_did(small, repaconv):
    code, out, err = repaconv("fold", small)
    assert code == 0
    assert "affine" in out
    assert "passed" in out
    assert "small.folded.onnx" in err
    said = json.loads(Path("repaconv-out/small/fold.json").read_text())
    assert [change["rewrite"] for change in said["changes"]] == ["affine"]
    assert said["parameters"] == [4 * 6 + 12, 4 * 6 + 6]
    first = Path("repaconv-out/small/small.folded.onnx").read_bytes()
    code, out, _ = repaconv("fold", small, "--format", "json", "-o", "elsewhere")
    assert code == 0
    assert json.loads(out)["data"]["payload"]["path"] == "small.folded.onnx"
    assert Path("elsewhere/small.folded.onnx").read_bytes() == first


def test_where_nothing_folds_the_original_graph_is_used(small, repaconv):
    rc.fold(small, out="to.onnx")
    code, out, _ = repaconv("fold", "to.onnx")
    assert code == 0
    assert "passed: nothing to fold" in out
    once = onnx.load("repaconv-out/to/to.folded.onnx")
    assert [node.op_type for node in once.graph.node] == [node.op_type for node in onnx.load("to.onnx").graph.node]
    assert rc.verify().verdict == "passed"


def test_where_nothing_folds_float64_is_not_asked_before_all_inputs_were_tried_in_fp32(monkeypatch):
    """An output that is saturated on the first inputs says more on larger ones, in a fraction of the time."""
    asked = []
    monkeypatch.setattr(folded_graph_verification, "differing_operators", lambda *_: asked.append(1) or "")
    weights = {"w": np.full((4, 3, 1, 1), 0.3, np.float32), "b": np.full(4, 40, np.float32)}
    rows = [("Conv", "x w b", "1"), ("Sigmoid", "1", "y")]
    onnx.save(graph(rows, weights, {"x": (1, 3, 8, 8)}, kind=TensorProto.FLOAT), "graph.onnx")
    assert rc.fold("graph.onnx").verdict == "passed"
    assert not asked


def test_where_nothing_folds_and_nothing_can_be_compared_the_exit_code_is_5(repaconv):
    """It was 0, and the result did not say why it was not verified."""
    onnx.save(graph([("Sqrt", "x", "1"), ("Neg", "1", "2"), ("Sqrt", "2", "y")], {}, {"x": (1, 4)}), "graph.onnx")
    code, out, _ = repaconv("fold", "graph.onnx")
    assert code == 5
    assert "NaN on both sides" in out
    assert "not verified: nothing to fold: the network stays as it is; nothing could be compared" in out
    assert "NaN" in json.loads(Path("repaconv-out/graph/fold.json").read_text())["links"][0]["note"]


def test_weights_and_a_graph_in_which_nothing_folds_both_pass(repaconv):
    """As weights and as a graph: the graph was not compared, and "not verified"."""
    layers = "nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()"
    Path("code.py").write_text(f"from torch import nn\n\ndef build():\n    return nn.Sequential({layers})\n")
    nn = torch.nn
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten())
    torch.save(net.state_dict(), "weights.pth")
    weights = {name: numbers.detach().numpy() for name, numbers in zip("wbvc", net.parameters(), strict=True)}
    rows = [
        ("Conv", "x w b", "1"),
        ("Relu", "1", "2"),
        ("Conv", "2 v c", "3"),
        ("Relu", "3", "4"),
        ("Flatten", "4", "y"),
    ]
    onnx.save(graph(rows, weights, {"x": (1, 3, 8, 8)}, kind=TensorProto.FLOAT), "graph.onnx")
    for given in (["weights.pth", "--arch", "code.py:build", "--set", "image_size=8"], ["graph.onnx"]):
        code, out, _ = repaconv("fold", *given)
        assert (code, "passed: nothing to fold" in out) == (0, True)
        said = json.loads(Path(f"repaconv-out/{Path(given[0]).stem}/fold.json").read_text())
        assert (said["changes"], said["verdict"], [link["verdict"] for link in said["links"]]) == (
            [],
            "passed",
            ["passed"],
        )


@pytest.mark.parametrize("option", [("--method", "repavit"), ("--weights", "model_ema")])
def test_options_of_checkpoints_are_none_of_graphs(small, repaconv, option):
    code, _, err = repaconv("fold", small, *option)
    assert code == 2
    assert option[0] in err
    assert not Path("repaconv-out").exists()


def test_a_file_of_that_name_is_kept(small):
    Path("net.onnx").write_bytes(b"mine")
    for force in (False, True):
        with pytest.raises(UsageProblem, match=r"net\.onnx already exists"):
            rc.fold(small, out="net.onnx", force=force)
    assert Path("net.onnx").read_bytes() == b"mine"
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    with pytest.raises(Refused, match="is not a run folder"):
        rc.fold(small, out="mine", force=True)
    assert [path.name for path in Path("mine").iterdir()] == ["notes.txt"]
    rc.fold(small)
    Path("other").mkdir()
    model = onnx.load(small)
    model.producer_name = "another"
    onnx.save(model, "other/small.onnx")
    with pytest.raises(Refused, match="the run of another file"):
        rc.fold("other/small.onnx")
    assert rc.fold("other/small.onnx", force=True).verdict == "passed"


def test_what_is_no_graph_is_refused(repaconv):
    Path("a.onnx").write_bytes(b"not a graph")
    for name in ("a.onnx", "gone.onnx"):
        code, _, err = repaconv("fold", name)
        assert code == 4
        assert name in err


def test_weights_next_to_the_graph_are_read_and_others_refused(small):
    model = onnx.load(small)
    onnx.save(model, "split.onnx", save_as_external_data=True, location="split.data", size_threshold=0)
    assert rc.fold("split.onnx").verdict == "passed"
    Path("split.data").unlink()
    with pytest.raises(Refused, match="not there"):
        rc.fold("split.onnx", force=True)
    outside = onnx.load("split.onnx", load_external_data=False)
    for weight in outside.graph.initializer:
        weight.external_data[0].value = "../split.data"
    Path("outside.onnx").write_bytes(outside.SerializeToString())
    with pytest.raises(Refused, match="outside"):
        rc.fold("outside.onnx")


def test_a_fold_that_is_wrong_is_not_written(small, repaconv, monkeypatch):
    from repaconv.rewrites.fold import linear_graph_to_onnx

    right = linear_graph_to_onnx._Emitter._product
    monkeypatch.setattr(
        linear_graph_to_onnx._Emitter, "_product", lambda self, value, edge, shift: right(self, value, edge, 2 * shift)
    )
    code, _, err = repaconv("fold", small)
    assert code == 1
    assert "fold.not-equal" in err
    assert not Path("repaconv-out").exists()


def _with_last(model: onnx.ModelProto, *nodes: onnx.NodeProto) -> onnx.ModelProto:
    """The graph with nodes between its last one and its output."""
    model.graph.node[-1].output[0] = "before"
    model.graph.node.extend(nodes)
    return model


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("dropout", "Dropout drop in training mode"),
        ("noise", "RandomNormalLike noise"),
        ("in a branch", "Bernoulli coin"),
    ],
)
def test_a_graph_that_computes_something_else_every_time_is_refused(small, repaconv, kind, says):
    model = onnx.load(small)
    output = model.graph.output[0].name
    if kind == "dropout":
        model.graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "share"))
        model.graph.initializer.append(numpy_helper.from_array(np.array(True), "mode"))
        _with_last(model, helper.make_node("Dropout", ["before", "share", "mode"], [output], name="drop"))
    elif kind == "noise":
        noise = helper.make_node("RandomNormalLike", ["before"], ["n"], name="noise")
        _with_last(model, noise, helper.make_node("Add", ["before", "n"], [output]))
    else:
        coin = helper.make_node("Bernoulli", ["before"], ["t"], name="coin")
        then = helper.make_graph([coin], "t", [], [helper.make_tensor_value_info("t", 1, None)])
        other = helper.make_node("Identity", ["before"], ["e"])
        otherwise = helper.make_graph([other], "e", [], [helper.make_tensor_value_info("e", 1, None)])
        model.graph.initializer.append(numpy_helper.from_array(np.array(True), "which"))
        _with_last(model, helper.make_node("If", ["which"], [output], then_branch=then, else_branch=otherwise))
    onnx.save(model, "random.onnx")
    code, _, err = repaconv("fold", "random.onnx")
    assert code == 4
    assert "onnx.random" in err
    assert says in " ".join(err.split())
    assert not Path("repaconv-out").exists()


@pytest.mark.parametrize(
    ("weight", "value", "refused"),
    [
        ("w", np.nan, True),
        ("b", np.inf, True),
        ("b", -np.inf, False),  # a mask that was added to it
        ("w", -np.inf, True),
        ("s", np.nan, True),
        ("s", -np.inf, False),  # a mask
        ("one", np.nan, False),  # one number that is no weight
    ],
)
def test_a_weight_that_is_not_finite_is_refused_by_name(repaconv, weight, value, refused):
    """NaN is equal to NaN: the fold of such a network would pass."""
    weights = {"w": normal(4, 3, 1, 1), "b": normal(4), "s": normal(4, 1, 1), "one": np.array(1.0)}
    weights[weight].reshape(-1)[0] = value
    rows = [("Conv", "x w b", "1"), ("Relu", "1", "2"), ("Add", "2 s", "3"), ("Max", "3 one", "y")]
    typed = {name: array.astype(np.float32) for name, array in weights.items()}
    onnx.save(graph(rows, typed, {"x": (1, 3, 5, 5)}, kind=TensorProto.FLOAT), "sick.onnx")
    code, _, err = repaconv("fold", "sick.onnx", "--out", "run")
    if refused:
        assert code == 4
        assert f"{weight}, a weight of sick.onnx, has NaN or infinite values: 1 of " in " ".join(err.split())
        assert not Path("run").exists()
    else:
        assert "not-finite" not in err


@pytest.mark.parametrize(("value", "left"), [(np.inf, ["Conv", "Add"]), (-np.inf, ["Conv"])])
def test_later_stages_take_what_is_folded_next_to_an_infinite_constant(value, left):
    weights = {"k": normal(6, 3, 1, 1), "w": normal(4, 6, 1, 1), "s": normal(4, 1, 1)}
    weights["s"].reshape(-1)[0] = value
    rows = [("Conv", "x k", "1"), ("Conv", "1 w", "2"), ("Add", "2 s", "y")]
    typed = {name: array.astype(np.float32) for name, array in weights.items()}
    onnx.save(graph(rows, typed, {"x": (1, 3, 5, 5)}, kind=TensorProto.FLOAT), "net.onnx")
    assert rc.fold("net.onnx", out="run", measure=False).verdict == "passed"
    assert [node.op_type for node in onnx.load("run/net.folded.onnx").graph.node] == left
    assert rc.verify("run").verdict == rc.export("run").verdict == "passed"


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(
    ("rows", "left"),
    [
        ([("Conv", "x k", "1"), ("Conv", "1 w b", "y")], ["Conv"]),
        (
            [("Conv", "x k", "1"), ("Relu", "1", "2"), ("Mul", "2 s", "3"), ("Conv", "3 w b", "y")],
            ["Conv", "Relu", "Conv"],
        ),
    ],
)
def test_pointwise_convolutions_are_merged_along_one_axis_too(rows, left, axes):
    """As in networks on sound and on points."""
    one = [1] * axes
    weights = {"k": normal(6, 8, *one), "w": normal(4, 6, *one), "b": normal(4), "s": normal(6, *one)}
    typed = {name: array.astype(np.float32) for name, array in weights.items()}
    onnx.save(graph(rows, typed, {"x": ("N", 8, *[5] * axes)}, kind=TensorProto.FLOAT), "net.onnx")
    assert rc.fold("net.onnx", out="run", measure=False).verdict == "passed"
    assert [node.op_type for node in onnx.load("run/net.folded.onnx").graph.node] == left


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        ([("MatMul", "x v", "1"), ("Add", "1 row", "2"), ("Mul", "2 t", "y")], (1, 3)),
        ([("Conv", "x w b", "1"), ("Mul", "1 s", "2"), ("Add", "2 mask", "y")], (1, 3, 5, 5)),
        ([("MatMul", "x v", "1"), ("MatMul", "1 u", "2"), ("Where", "shown 2 never", "y")], (1, 3)),
    ],
)
def test_a_mask_that_became_a_bias_is_verified_and_folded_again(rows, shape):
    row = np.array([0, 0, -np.inf, 0])
    weights = {
        "w": normal(4, 3, 1, 1), "b": normal(4), "s": np.ones((4, 1, 1)) * 3, "mask": row.reshape(4, 1, 1),
        "v": normal(3, 4), "u": normal(4, 4), "t": np.array([1.0, 2, 3, 4]), "row": row, "shown": row == 0,
        "never": np.array(-np.inf),
    }  # fmt: skip
    typed = {name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in weights.items()}
    onnx.save(graph(rows, typed, {"x": shape}, kind=TensorProto.FLOAT), "masked.onnx")
    run = rc.fold("masked.onnx", out="run")
    assert run.verdict == rc.verify("run").verdict == rc.export("run", onnx="out.onnx").verdict == "passed"
    (layer,) = onnx.load("out.onnx").graph.node
    assert layer.op_type in ("Gemm", "Conv")
    assert rc.fold("out.onnx", out="again").verdict == "passed"


def test_random_numbers_that_nothing_reads_and_a_dropout_in_inference_are_none(small):
    model = onnx.load(small)
    output = model.graph.output[0].name
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "share"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(False), "mode"))
    _with_last(
        model,
        helper.make_node("RandomNormalLike", ["before"], ["unread"]),
        helper.make_node("Dropout", ["before", "share", "mode"], [output]),
    )
    onnx.save(model, "still.onnx")
    assert rc.fold("still.onnx").verdict == "passed"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ("float64", "net.float()"),
        ("float64 within", "became float64 within the network, which torch's older exporter does: export it by"),
        ("operator", "standard ones"),
        ("names", "a name of its own"),
        ("opset", "The graph is of opset 6, of which it lacks some operators: export it for opset 13 or newer, or"),
    ],
)
def test_a_graph_that_onnx_runtime_does_not_load_is_refused_with_what_to_do(repaconv, changed, says):
    kind = TensorProto.DOUBLE if changed == "float64" else TensorProto.FLOAT
    weight = numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float64 if "float64" in changed else np.float32), "w")
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], name="same"), helper.make_node("Relu", ["c"], ["y"])]
    if changed == "operator":
        nodes[1].op_type, nodes[1].domain = "Swoosh", "com.acme"
    if changed == "names":
        nodes[1].name = "same"
    if changed == "opset":
        nodes[1] = helper.make_node("Add", ["c", "c"], ["y"])
    if changed == "float64 within":
        nodes[0].input[0] = "d"
        nodes = [helper.make_node("Cast", ["x"], ["d"], to=TensorProto.DOUBLE), nodes[0]]
        nodes.append(helper.make_node("Cast", ["c"], ["y"], to=TensorProto.FLOAT))
    ends = [[helper.make_tensor_value_info(name, kind, [1, size, 8, 8])] for name, size in (("x", 3), ("y", 4))]
    for dim in ends[1][0].type.tensor_type.shape.dim:
        dim.Clear()
    imports = [helper.make_opsetid("", 6 if changed == "opset" else 20), helper.make_opsetid("com.acme", 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", *ends, [weight]), opset_imports=imports, ir_version=9)
    onnx.save(model, "net.onnx")
    code, _, err = repaconv("fold", "net.onnx")
    assert code == 4
    assert "onnx.unloadable" in err
    assert says in " ".join(err.split())


def _convolution(changed: str = "") -> onnx.ModelProto:
    """Two convolutions with a norm, [N, 3, 8, 8] to [N, 2, 8, 8], with the shapes of all values."""
    random = np.random.default_rng(0)
    held = {"k": (4, 3, 3, 3), "s": (4,), "b": (4,), "m": (4,), "l": (2, 4, 1, 1)}
    held = {name: random.standard_normal(shape).astype(np.float32) for name, shape in held.items()}
    held["v"] = np.zeros(4, np.float32) if changed == "variance" else np.ones(4, np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", [*"csbmv"], ["n"]),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("Conv", ["r", "l"], ["y"]),
    ]
    ends = [[helper.make_tensor_value_info(name, 1, [1, size, 8, 8])] for name, size in (("x", 3), ("y", 2))]
    weights = [numpy_helper.from_array(array, name) for name, array in held.items()]
    imports = [helper.make_opsetid("", 20)]
    graph = helper.make_graph(nodes, "g", *ends, weights)
    return onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=imports, ir_version=9))


def test_the_default_epsilon_of_a_norm_is_that_of_onnx():
    """1e-5 in float32, which shows where a variance is 0."""
    onnx.save(_convolution("variance"), "still.onnx")
    assert rc.fold("still.onnx").verdict == "passed"
    assert {link.name: link.verdict for link in rc.verify().links}["fold"] == "passed"


@pytest.mark.parametrize("changed", ["batch", "size", "output"])
def test_shapes_that_are_declared_wrong_are_set_right(changed):
    """As after the shape of an input was changed by hand; runtimes only warn."""
    model = _convolution()
    if changed == "output":
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 7
    elif changed == "batch":
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    else:
        for dim in model.graph.input[0].type.tensor_type.shape.dim[2:]:
            dim.dim_value = 10
    onnx.save(model, "edited.onnx")
    done = rc.fold("edited.onnx")
    assert (done.verdict, len(done.changes)) == ("passed", 1)
    rc.export("repaconv-out/edited")
    found = onnx.load("repaconv-out/edited/model.onnx").graph.output[0].type.tensor_type.shape.dim
    sizes = {"output": [1, 2, 8, 8], "batch": ["batch", 2, 8, 8], "size": [1, 2, 10, 10]}[changed]
    assert [dim.dim_param or dim.dim_value for dim in found] == sizes


def test_an_output_whose_rank_is_known_at_run_time_only_is_compared(repaconv):
    model = _convolution()
    shape = numpy_helper.from_array(np.array([1, 2, 64]), "three")
    then = helper.make_node("Reshape", ["z", "three"], ["t"])
    other = helper.make_node("Identity", ["z"], ["o"])
    values = [helper.make_tensor_value_info(name, 1, None) for name in ("t", "o")]
    graphs = [helper.make_graph([node], "g", [], [value]) for node, value in zip((then, other), values, strict=True)]
    model.graph.node[-1].output[0] = "z"
    model.graph.node.extend(
        [
            helper.make_node("ReduceMean", ["z"], ["mean"], keepdims=0),
            helper.make_node("Greater", ["mean", "zero"], ["which"]),
            helper.make_node("If", ["which"], ["y"], then_branch=graphs[0], else_branch=graphs[1]),
        ]
    )
    model.graph.initializer.extend([shape, numpy_helper.from_array(np.zeros((), np.float32), "zero")])
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, "ranks.onnx")
    assert rc.fold("ranks.onnx").verdict == "passed"
    assert repaconv("export", "repaconv-out/ranks")[0] == 0


def test_a_function_of_the_graph_counts_as_its_nodes():
    """As one node, it was fewer than what its fold leaves, which was undone."""
    model = _convolution()
    imports = [helper.make_opsetid("", 20)]
    body = [helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1])]
    body.append(helper.make_node("BatchNormalization", [*"csbmv"], ["n"]))
    block = helper.make_function("own", "Block", [*"xksbmv"], ["n"], body, imports)
    del model.graph.node[:2], model.graph.value_info[:]
    model.graph.node.insert(0, helper.make_node("Block", [*"xksbmv"], ["n"], domain="own"))
    model.functions.append(block)
    model.opset_import.append(helper.make_opsetid("own", 1))
    onnx.save(model, "functions.onnx")
    done = rc.fold("functions.onnx")
    assert (done.verdict, done.nodes, len(done.changes)) == ("passed", (4, 3), 1)
    assert rc.verify().verdict == "passed"


def test_sparse_weights_are_weights(repaconv):
    model = _convolution()
    dense = next(weight for weight in model.graph.initializer if weight.name == "l")
    array = numpy_helper.to_array(dense).copy()
    array[0, 1:] = 0
    places = np.flatnonzero(array)
    values = numpy_helper.from_array(array.reshape(-1)[places], "l")
    indices = numpy_helper.from_array(places, "l_places")
    model.graph.initializer.remove(dense)
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, list(array.shape)))
    onnx.save(model, "sparse.onnx")
    assert rc.fold("sparse.onnx").verdict == "passed"
    assert repaconv("export", "repaconv-out/sparse")[0] == 0


def test_an_output_that_is_a_map_is_refused_with_what_to_do(repaconv):
    """As skl2onnx writes the probabilities of a classifier."""
    names = {"classlabels_int64s": [0, 1, 2]}
    nodes = [
        helper.make_node("Scaler", ["x"], ["s"], domain="ai.onnx.ml", offset=[0.5], scale=[2.0]),
        helper.make_node("ZipMap", ["s"], ["z"], domain="ai.onnx.ml", **names),
    ]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, ["N", 3])], [])
    output = graph.output.add(name="z")
    of_one = output.type.sequence_type.elem_type.map_type
    of_one.key_type, of_one.value_type.tensor_type.elem_type = TensorProto.INT64, TensorProto.FLOAT
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), "classes.onnx")
    code, _, err = repaconv("fold", "classes.onnx")
    assert code == 4
    assert "onnx.map" in err
    assert "zipmap" in err


def test_half_precision_stays_half(small):
    model = onnx.load(small)
    for weight in model.graph.initializer:
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).astype(np.float16), weight.name))
    del model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(model, "half.onnx")
    done = rc.fold("half.onnx")
    assert [link.name for link in done.links] == ["onnx", "fp16"]
    assert {w.data_type for w in onnx.load("repaconv-out/half/half.folded.onnx").graph.initializer} == {
        TensorProto.FLOAT16
    }


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("cast", [False, True])
def test_half_precision_that_meets_float32_without_a_cast_is_refused(kind, cast, repaconv):
    """Converted to float32, it would be a valid graph: nothing would show that it is not one."""
    model = _convolution()
    model.opset_import[0].version = 22  # Conv takes bfloat16 from there on
    model.graph.input[0].type.tensor_type.elem_type = kind
    if cast:
        model.graph.node[0].input[0] = "f"
        model.graph.node.insert(0, helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT))
    onnx.save(model, "net.onnx")
    code, _, err = repaconv("fold", "net.onnx", "--no-measure")
    assert code == (0 if cast else 4), err
    assert ("onnx.invalid" in err) == (not cast)
    assert ("has inconsistent type tensor(float); ONNX Runtime does not load it either" in " ".join(err.split())) == (
        not cast
    )


def test_branches_of_control_flow_are_left_alone(small):
    then = helper.make_graph(
        [helper.make_node("Add", ["1", "b"], ["t"])], "t", [], [helper.make_tensor_value_info("t", 1, None)]
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["1"], ["e"])], "e", [], [helper.make_tensor_value_info("e", 1, None)]
    )
    model = onnx.load(small)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    test = [helper.make_node("ReduceMax", ["x"], ["max"], keepdims=0)]
    test.append(helper.make_node("Greater", ["max", "max"], ["c"]))
    branch = helper.make_node("If", ["c"], ["2"], then_branch=then, else_branch=other)
    model.graph.node.extend([nodes[0], *test, branch, nodes[2]])
    onnx.save(model, "if.onnx")
    done = rc.fold("if.onnx")
    assert (done.verdict, [link.verdict for link in done.links]) == ("passed", ["passed"])  # the same graph, compared
    assert "If" in done.not_folded[0]


def old_net(*last: tuple[str, str, str]) -> onnx.ModelProto:
    """Convolution, BatchNormalization and Softmax over two axes, as opset 9 and version 3 of the format have them."""
    weights = {"w": normal(4, 4, 3, 3), "g": normal(4), "b": normal(4), "m": normal(4), "v": normal(4) ** 2 + 1}
    first = [("Conv", "x w", "1", {"pads": [1] * 4}), ("BatchNormalization", "1 g b m v", "2")]
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    model = graph(
        [*first, *(last or [("Softmax", "2", "y")])], weights, {"x": (2, 4, 5, 5)}, opset=9, kind=TensorProto.FLOAT
    )
    model.graph.input.extend(helper.make_tensor_value_info(name, 1, array.shape) for name, array in weights.items())
    model.ir_version = 3
    return model


def test_a_graph_of_an_old_opset_is_raised_and_that_step_proved():
    onnx.save(old_net(), "old.onnx")
    done = rc.fold("old.onnx")
    assert [(link.candidate, link.verdict) for link in done.links] == [
        ("ONNX at opset 13", "passed"),
        ("ONNX folded", "passed"),
    ]
    assert (done.opset, done.not_folded) == (9, ())
    after = onnx.load("repaconv-out/old/old.folded.onnx")
    assert [node.op_type for node in after.graph.node][:1] == ["Conv"]
    assert "BatchNormalization" not in done.operators
    assert [value.name for value in after.graph.input] == ["x"]


def test_sizes_that_are_copied_or_written_as_no_number_are_free(repaconv):
    model = old_net(("Reshape", "2 s", "3"), ("MatMul", "3 p", "y"))
    shape = numpy_helper.from_array(np.array([0, 0, -1]), "s")  # Paddle's way to flatten, of opset 9 to 13
    model.graph.initializer.extend([shape, numpy_helper.from_array(normal(25, 3).astype(np.float32), "p")])
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    model.ir_version = 4
    onnx.save(model, "old.onnx")
    done = rc.fold("old.onnx")
    assert (done.verdict, done.batch) == ("passed", "dynamic")
    assert "dynamic sizes: x[0] 1, 2, 3" in done.links[0].note
    assert "x [?, 4, 5, 5]" in repaconv("inspect", "old.onnx")[1]


def test_weights_are_inputs_no_more_but_what_a_caller_may_leave_out_is(small):
    model = old_net(("Mul", "2 s", "3"), ("Softmax", "3", "y"))
    model.graph.initializer.append(numpy_helper.from_array(np.full((1, 4, 1, 1), 2, np.float32), "s"))
    model.graph.input.append(helper.make_tensor_value_info("s", 1, (1, 4, 1, 1)))
    model.ir_version = 4
    onnx.save(model, "old.onnx")
    assert rc.fold("old.onnx").operators["Mul"] == 1
    assert [value.name for value in onnx.load("repaconv-out/old/old.folded.onnx").graph.input] == ["x", "s"]


def test_an_old_graph_that_the_converter_gets_wrong_or_does_not_take_is_left_alone(monkeypatch):
    onnx.save(old_net(), "old.onnx")
    right = onnx.version_converter.convert_version

    def wrong(model, opset):
        found = right(model, opset)
        found.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.ones(4, np.float32), "g"))
        return found

    def fails(model, opset):
        raise RuntimeError("No Adapter for Softmax\nfurther down")

    for converter, why in ((wrong, "computes something else"), (fails, "(No Adapter for Softmax); export it anew")):
        monkeypatch.setattr(onnx.version_converter, "convert_version", converter)
        done = rc.fold("old.onnx")
        assert done.changes == ()
        assert "opset 9" in done.not_folded[0]
        assert why in done.not_folded[0]


def test_nodes_around_a_custom_operator_fold():
    onnx.save(foreign(), "foreign.onnx")
    done = rc.fold("foreign.onnx")
    assert done.operators == {"Conv": 2, "Gelu": 1}
    assert "com.microsoft" in done.not_folded[0]
    assert done.float64 == ""
    links = {link.name: link.verdict for link in rc.verify("repaconv-out/foreign").links}
    assert (links["fold"], links["stored"]) == ("passed", "passed")  # as far as float32 tells


def test_scales_of_a_resize_are_float32_in_float64_too():
    rows = [("Conv", "x w", "1"), ("BatchNormalization", "1 g b m v", "2"),
            ("Resize", "2 roi s", "3", {"mode": "nearest"}), ("Relu", "3", "y")]  # fmt: skip
    weights = {"w": normal(4, 4, 3, 3), **{name: normal(4) ** 2 + 1 for name in "gbmv"}}
    weights |= {"roi": np.zeros(0), "s": np.array([1, 1, 2, 2.0])}
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    onnx.save(graph(rows, weights, {"x": (2, 4, 8, 8)}, kind=TensorProto.FLOAT), "net.onnx")
    assert rc.fold("net.onnx").changes
    link = rc.verify("repaconv-out/net").links[0]
    assert (link.name, link.verdict) == ("fold", "passed")
    assert link.metrics.max_rel_error < 1e-12


def foreign() -> onnx.ModelProto:
    """Convolution and norm before and behind an operator of a runtime's own, of whose output no type is known."""
    norms = {f"{name}{i}": normal(4) ** 2 + 1 for name in "gbmv" for i in (1, 2)}
    weights = {"w1": normal(4, 4, 3, 3), "w2": normal(4, 4, 3, 3), **norms}
    rows = [("Conv", "x w1", "1"), ("BatchNormalization", "1 g1 b1 m1 v1", "2"), ("Gelu", "2", "3"),
            ("Conv", "3 w2", "4"), ("BatchNormalization", "4 g2 b2 m2 v2", "y")]  # fmt: skip
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    model = graph(rows, weights, {"x": (2, 4, 8, 8)}, opset=17, kind=TensorProto.FLOAT)
    model.graph.node[2].domain = "com.microsoft"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, (2, 4, 8, 8)))
    del model.graph.value_info[:]
    return model


def test_several_inputs_and_outputs_keep_their_names():
    weights = {n: normal(4, 4).astype(np.float32) for n in "wvu"}
    rows = [
        ("MatMul", "a w", "1"),
        ("MatMul", "1 v", "y"),
        ("Add", "b c", "2"),
        ("MatMul", "2 u", "3"),
        ("Add", "3 2", "z"),
    ]
    inputs = dict.fromkeys("abc", ("n", 3, 4))
    onnx.save(graph(rows, weights, inputs, ("y", "z"), kind=TensorProto.FLOAT), "many.onnx")
    done = rc.fold("many.onnx", out="to/there.onnx")
    assert [link.verdict for link in done.links] == ["passed", "passed"]
    assert done.parameters == (48, 32)
    after = onnx.load("to/there.onnx").graph
    assert [[v.name for v in side] for side in (after.input, after.output)] == [["a", "b", "c"], ["y", "z"]]


@pytest.mark.parametrize("how", [{}, {"precision": "fp16"}, {"simplify": False}], ids=str)
def test_dynamic_dimensions_of_outputs_keep_their_names_where_the_batch_is_fixed(how):
    """Shape inference would call them after itself; what follows from fixed sizes alone is a number."""
    weights = {"w": normal(4, 3, 3, 3), "v": normal(4, 4, 3, 3)}
    weights = {**{name: one.astype(np.float32) for name, one in weights.items()}, "s": np.array([0, 4, -1])}
    halves = {"strides": [2, 2], "pads": [1] * 4}
    rows = [("Conv", "x w", "1", halves), ("Conv", "1 v", "2", halves), ("Reshape", "1 s", "3")]
    rows += [("Reshape", "2 s", "4"), ("Concat", "3 4", "y", {"axis": 2})]
    onnx.save(graph(rows, weights, {"x": ("n", 3, "h", "w")}, kind=TensorProto.FLOAT), "anchors.onnx")
    model = onnx.load("anchors.onnx")
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, ("n", 4, "anchors")))
    onnx.save(model, "anchors.onnx")
    rc.fold("anchors.onnx")

    def outputs_of(**options):
        made = rc.export(**options, **how)
        return [port.shape for port in load_onnx(Path("repaconv-out/anchors") / made.payload.path).outputs]

    assert outputs_of() == [("batch", 4, "anchors")]
    assert outputs_of(batch=2) == [(2, 4, "anchors")]
    assert outputs_of(batch=2, image_size=32) == [(2, 4, 320)]


def test_a_quantised_graph_has_nothing_to_fold(repaconv):
    weights = {"s": np.float32(0.1), "z": np.uint8(3), "w": normal(4, 4).astype(np.float32)}
    rows = [("QuantizeLinear", "x s z", "1"), ("DequantizeLinear", "1 s z", "2"), ("MatMul", "2 w", "3")]
    onnx.save(graph([*rows, ("MatMul", "3 w", "y")], weights, {"x": (2, 4)}, kind=TensorProto.FLOAT), "int8.onnx")
    code, out, _ = repaconv("fold", "int8.onnx")
    assert code == 0
    assert "quantized" in out
    assert "nothing to fold" in out


@pytest.mark.parametrize("axis", [1, -1])
def test_a_split_into_one_part_is_removed(axis):
    rows = [("Sin", "x", "s"), ("Split", "s", "part", {"axis": axis, "num_outputs": 1}), ("Cos", "part", "y")]
    folded, _ = rewritten(graph(rows, {}, {"x": ("n", 4)}), fold_pipeline.FOLDS)
    assert [node.op_type for node in folded.graph.node] == ["Sin", "Cos"]
