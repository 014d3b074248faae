"""Arbitrary networks through all stages: an ONNX model of several inputs and outputs, and the user's own modules."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import small_graphs
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from small_graphs import F, saved
from torch import nn

import repaconv as rc
from repaconv.core.errors import Refused, UsageProblem
from repaconv.core.run_folder import Run
from repaconv.distributed.sweep import Cell, Entry, _model
from repaconv.engines.contract import Port
from repaconv.graph.element_type_conversion import retyped
from repaconv.graph.models_in_onnx_ir import read
from repaconv.graph.shape_folding import fold_shapes
from repaconv.onnx_export.float64_exporter import NEW_EXPORTER, OLD_EXPORTER, network_to_onnx
from repaconv.sources.graph_fold import Folded, folded
from repaconv.sources.named_architecture_source import NetworkRunner
from repaconv.sources.source_of_run import source_model_of
from repaconv.verification.comparison import Comparison
from repaconv.verification.float64_graphs import REFERENCE, RUNTIME, Float64, ReferenceEvaluation
from repaconv.verification.input_batches import npz_calls
from repaconv.verification.model_runners import load_onnx
from repaconv.verification.rounding import float64_rounding
from repaconv.verification.tolerances import EXPLAINED, exact_rtols, tolerance


@pytest.fixture
def tokens() -> Path:
    """Token ids and a mask to tokens, scores and a class."""
    return small_graphs.tokens()


@pytest.fixture
def detector() -> Path:
    """Images of one size, one at a time, to classes and boxes, as an exporter of old wrote it."""
    nodes = [
        ("Conv", "image w", "1", {"pads": [1] * 4, "strides": [2, 2]}),
        ("BatchNormalization", "1 g b m v", "2", {}),
        ("Relu", "2", "3", {}),
        ("MaxPool", "3", "4", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("GlobalAveragePool", "4", "5", {}),
        ("Flatten", "5", "6", {}),
        ("Gemm", "6 h hb", "logits", {}),
        ("Conv", "4 k", "boxes", {}),
    ]
    weights = {"w": (8, 3, 3, 3), "g": (8,), "b": (8,), "m": (8,), "h": (8, 10), "hb": (10,), "k": (4, 8, 1, 1)}
    weights["v"] = np.linspace(0.5, 2, 8, dtype=np.float32)
    outputs = {"logits": (F, [1, 10]), "boxes": (F, [1, 4, 4, 4])}
    return saved("detector.onnx", nodes, weights, {"image": (F, [1, 3, 16, 16])}, outputs, opset=13)


def verdicts(links) -> dict[str, set[str]]:
    return {name: {link.verdict for link in links if link.name == name} for name in {link.name for link in links}}


def test_a_graph_of_several_inputs_and_outputs_goes_the_whole_way(tokens, repaconv):
    done = rc.fold(tokens)
    assert (done.image_size, done.whole, done.sizes.batch, done.float64) == (None, True, "B", RUNTIME)
    exported = rc.export()
    assert (exported.verdict, exported.batch, exported.image_size) == ("passed", "dynamic", None)
    ran = rc.verify(count=12)
    assert verdicts(ran.links) == {name: {"passed"} for name in ("fold", "stored", "onnx")}
    assert {link.candidate.partition("output ")[2] for link in ran.links} == {"tokens", "scores", "class"}
    after = onnx.load("repaconv-out/tokens/model.onnx").graph
    assert [[value.name for value in side] for side in (after.input, after.output)] == [
        ["ids", "mask"], ["tokens", "scores", "class"]
    ]  # fmt: skip
    built = rc.build(target="x86-64")
    assert {link.verdict for link in built.links} == {"passed"}
    measured = rc.bench(rounds=2, batch=3)
    assert (measured.batch, measured.image_size, measured.agreement.verdict) == (3, None, "passed")
    assert repaconv("report")[0] == 0
    assert "an ONNX graph" in Path("repaconv-out/tokens/report.html").read_text()


def test_what_is_planted_in_a_stored_graph_fails_at_its_output(tokens):
    done = rc.fold(tokens)
    stored = source_model_of(Run(Path("repaconv-out/tokens")))
    head = next(weight for weight in stored.deploy.graph.initializer if weight.name == "hb")
    head.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(head) + 0.01, "hb"))
    call = stored.random_inputs(2, 0).piece(0, 1)
    found = Comparison("stored", tolerance("stored", usual=done.tolerances))
    found.add(stored.stored.run(call.given), stored.reference.run(call.given), whole=True)
    assert [link.verdict for link in found.links("stored", "float64")] == ["passed", "failed", "passed"]


def test_images_of_an_onnx_model_are_normalized_as_the_user_says(detector, repaconv):
    done = rc.fold(detector)
    assert (done.image_size, done.batch, done.whole, done.float64) == ((16, 16), 1, False, REFERENCE)
    code, _, err = repaconv("export", "--onnx", "--with-preprocessing")
    assert code == 2
    assert "--set mean=" in err
    rc.fold(detector, settings={"mean": "127.5", "std": "64"})
    assert rc.export(with_preprocessing=True).verdict == "passed"
    ran = rc.verify()
    assert verdicts(ran.links) == {name: {"passed"} for name in ("fold", "stored", "onnx", "preprocessing")}
    low = rc.export(precision="int8")
    assert (low.verdict, low.batch, low.image_size) == ("passed", 1, (16, 16))
    code, _, err = repaconv("export", "--onnx", "--batch", "4")
    assert (code, "fixed batch size of 1" in err) == (2, True)


def test_a_recipe_of_a_graph_is_gated(detector, repaconv):
    Path("gate.toml").write_text(f'checkpoint = "{detector}"\n')
    code, out, _ = repaconv("gate", "gate.toml", "--format", "json")
    assert code == 0, out


def test_a_run_of_a_graph_has_no_module_and_an_unknown_one_is_refused(detector, repaconv):
    rc.fold(detector)
    with pytest.raises(UsageProblem, match="runs torch modules"):
        rc.bench(target="cpu-torch", rounds=2)
    slot = Path("repaconv-out/detector/fold.json")
    slot.write_text(json.dumps({**json.loads(slot.read_text()), "kind": "dream"}))
    with pytest.raises(Refused, match="fold of a 'dream'"):
        rc.verify()


def test_inputs_are_given_by_name(tokens):
    rc.fold(tokens)
    ids, mask = np.zeros((1, 4), np.int64), np.ones((1, 4), np.int64)
    np.savez("call.npz", ids=ids, mask=mask, more=mask)
    assert rc.verify(inputs="call.npz").inputs == "call.npz (one inference; not used: more)"
    np.savez("half.npz", ids=ids)
    with pytest.raises(Refused, match="not the input mask"):
        rc.verify(inputs="half.npz")
    with pytest.raises(UsageProblem, match="takes no images"):
        rc.verify(images=".")
    given = npz_calls(Path("call.npz"), (Port("ids", (None, None), "int64"),), ("more",))
    assert given.recorded == "more"


def test_what_is_decided_is_the_same_or_another():
    right = np.array([[3], [5], [7]])
    other = np.array([[3], [6], [7]])
    for found, undecided, verdict in (
        (right, None, "passed"),
        (other, None, "failed"),
        (other, np.array([False, True, False]), "passed"),
        (right + 1, np.ones(3, bool), "not verified"),
    ):
        one = Comparison("b", tolerance("onnx"))
        one.add({"class": found}, {"class": right}, undecided=undecided)
        assert [link.verdict for link in one.links("onnx", "a")] == [verdict]
    still = Comparison("b", tolerance("onnx"))
    still.add({"class": np.ones((3, 1), int)}, {"class": np.ones((3, 1), int)})
    assert [link.reason for link in still.links("onnx", "a")] == ["constant_output"]


RESIZED = [
    {"mode": mode, "coordinate_transformation_mode": places}
    for mode in ("nearest", "linear", "cubic")
    for places in ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")
]
AUTO = ("SAME_UPPER", "SAME_LOWER", "VALID")
NEAREST = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
OPERATORS = [
    ("Conv", ((6, 4, 3, 3), (6,)), {"pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2]}),
    ("Conv", ((8, 1, 3, 3),), {"group": 4, "auto_pad": "SAME_UPPER"}),
    ("ConvTranspose", ((4, 3, 3, 3), (3,)), {"strides": [2, 2], "pads": [1] * 4, "output_padding": [1, 1]}),
    ("MaxPool", (), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
    ("AveragePool", (), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}),
    ("AveragePool", (), {"kernel_shape": [3, 2], "ceil_mode": 1, "strides": [2, 2]}),
    *[("Conv", ((6, 4, 3, 2),), {"auto_pad": pad, "strides": [2, 3]}) for pad in ("SAME_LOWER", "VALID")],
    *[
        ("MaxPool", (), {"kernel_shape": [2, 3], "auto_pad": pad, "strides": [2, 2]})
        for pad in AUTO
        if "LOW" not in pad
    ],
    *[("AveragePool", (), {"kernel_shape": [2, 3], "auto_pad": pad, "strides": [2, 2]}) for pad in AUTO],
    *[("Resize", (), {**how, "scales": [1.0, 1.0, 2.0, 3.0]}) for how in RESIZED],
    *[("Resize", (), {**how, "scales": [1.0, 1.0, 0.6, 1.5]}) for how in RESIZED if "align" not in str(how)],
    *[("Resize", (), {**RESIZED[2], "nearest_mode": by, "scales": [1.0, 1.0, 2.5, 0.3]}) for by in NEAREST],
]


@pytest.mark.parametrize(("kind", "weights", "how"), OPERATORS)
def test_float64_is_what_onnx_says_it_is(kind, weights, how):
    random, scales = np.random.default_rng(0), how.get("scales")
    given = {
        "x": random.standard_normal((2, 4, 5, 7)),
        **{f"w{n}": random.standard_normal(s) for n, s in enumerate(weights)},
    }
    held = [numpy_helper.from_array(np.array(scales, np.float32), "scales")] if scales else []
    node = helper.make_node(
        kind, [*given, *(["", "scales"] if scales else [])], ["y"], **{k: v for k, v in how.items() if k != "scales"}
    )
    ports = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, array.shape) for name, array in given.items()]
    graph = helper.make_graph([node], "one", ports, [helper.make_empty_tensor_value_info("y")], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    ours, right = ReferenceEvaluation(model).run(given)["y"], ReferenceEvaluator(model).run(None, given)[0]
    assert ours.dtype == np.float64
    rounds = 1e-6 if how.get("mode") == "cubic" else 1e-14  # onnx's own has a cubic's weights in float32
    np.testing.assert_allclose(ours, right, rtol=0, atol=rounds * np.abs(right).max())


def test_what_was_taken_apart_into_patches_is_put_together_in_float64():
    x = np.random.default_rng(0).standard_normal((2, 3 * 9, 12))
    held = [numpy_helper.from_array(np.array(n), name) for name, n in (("size", [5, 7]), ("block", [3, 3]))]
    node = helper.make_node("Col2Im", ["x", "size", "block"], ["y"], pads=[1] * 4, strides=[2, 2])
    ports = [helper.make_tensor_value_info("x", TensorProto.DOUBLE, x.shape)]
    graph = helper.make_graph([node], "one", ports, [helper.make_empty_tensor_value_info("y")], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    ours, right = ReferenceEvaluation(model).run({"x": x})["y"], ReferenceEvaluator(model).run(None, {"x": x})[0]
    np.testing.assert_allclose(ours, right, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("batch", "shape"), [(0, (2, 2)), (0, (2, 6, 3)), (0, (5, 1)), (1, (3, 7, 1)), (1, (3, 2)), (2, (3, 4, 1))], ids=str
)
def test_numbers_are_gathered_in_float64(batch, shape):
    random, size = np.random.default_rng(0), (3, 4, 5)
    places = [random.integers(-size[batch + axis], size[batch + axis], shape[:-1]) for axis in range(shape[-1])]
    given = {"x": random.standard_normal(size), "places": np.stack(places, -1)}
    ports = [
        helper.make_tensor_value_info(name, kind, given[name].shape)
        for name, kind in (("x", TensorProto.DOUBLE), ("places", TensorProto.INT64))
    ]
    node = helper.make_node("GatherND", ["x", "places"], ["y"], batch_dims=batch)
    graph = helper.make_graph([node], "one", ports, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    np.testing.assert_array_equal(
        ReferenceEvaluation(model).run(given)["y"], ReferenceEvaluator(model).run(None, given)[0]
    )


@pytest.mark.parametrize(("shape", "count"), [((4, 5, 6), 2), ((4, 5, 6), 3), ((9,), 1), ((4, 0), 1)], ids=str)
def test_constants_are_scattered_as_the_reference_implementation_does(monkeypatch, shape, count):
    """It loops over single indices, of which a mask has as many as it has numbers."""
    random, numbers = np.random.default_rng(0), {"x": np.zeros(shape)}
    numbers["places"] = np.stack([random.integers(-size, size, (3, 7)) for size in shape[:count]], -1)
    numbers["new"] = random.standard_normal((3, 7, *shape[count:]))
    node = helper.make_node("ScatterND", ["x", "places", "new"], ["y"])
    last = helper.make_node("Identity", ["y"], ["z"])
    weights = [numpy_helper.from_array(array, name) for name, array in numbers.items()]
    port = helper.make_tensor_value_info("z", TensorProto.DOUBLE, shape)
    model = helper.make_model(
        helper.make_graph([node, last], "one", [], [port], weights), opset_imports=[helper.make_opsetid("", 20)]
    )
    (right,) = ReferenceEvaluator(model).run(None, {})
    monkeypatch.setattr("onnx.reference.ReferenceEvaluator", None)
    graph = read(model)
    fold_shapes(graph)
    kept = next(iter(graph.graph)).inputs[0].const_value
    np.testing.assert_array_equal(kept.numpy(), right)


@pytest.mark.parametrize(("place", "new"), [(2, (1, 3)), (4, (2, 3)), (2, (2, 1))], ids=["rows", "places", "columns"])
def test_constants_that_a_runtime_refuses_to_scatter_stay(place, new):
    weights = [np.zeros((4, 3)), np.array([[0], [place]]), np.ones(new)]
    node = helper.make_node("ScatterND", ["x", "places", "new"], ["y"])
    last = helper.make_node("Identity", ["y"], ["z"])
    named = [numpy_helper.from_array(each, name) for each, name in zip(weights, node.input, strict=True)]
    port = helper.make_tensor_value_info("z", TensorProto.DOUBLE, (4, 3))
    graph = read(helper.make_model(helper.make_graph([node, last], "one", [], [port], named)))
    fold_shapes(graph)
    assert "ScatterND" in [each.op_type for each in graph.graph]


@pytest.mark.parametrize("pads", [[0] * 4, [1] * 4])
@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
def test_pools_that_round_up_begin_no_window_after_their_input(kind, pads):
    """Of which onnx's reference makes another shape (googlenet's)."""
    x = np.random.default_rng(0).standard_normal((1, 2, 7, 8)).astype(np.float32)
    how = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": pads, "ceil_mode": 1}
    ports = [helper.make_tensor_value_info("x", F, x.shape)]
    graph = helper.make_graph([helper.make_node(kind, ["x"], ["y"], **how)], "one", ports,
                              [helper.make_tensor_value_info("y", F, None)])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    right = load_onnx(model.SerializeToString()).run({"x": x})["y"]
    ours = ReferenceEvaluation(model).run({"x": x.astype(np.float64)})["y"]
    assert ours.shape == right.shape
    np.testing.assert_allclose(ours, right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("opset", [10, 13, 20])
@pytest.mark.parametrize(
    ("mode", "pads"), [("constant", [-1, 2, 1, -2]), ("reflect", [1, -1, 2, 0]), ("edge", [2] * 4)]
)
def test_padding_below_zero_crops(mode, pads, opset):
    """Of which onnx's reference makes an error (pnasnet's)."""
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    held = [numpy_helper.from_array(np.array(pads), "pads")] if opset > 10 else []
    node = helper.make_node(
        "Pad", ["x", *(["pads"] if held else [])], ["y"], mode=mode, **({} if held else {"pads": pads})
    )
    ports = [helper.make_tensor_value_info("x", F, x.shape)], [helper.make_tensor_value_info("y", F, None)]
    graph = helper.make_graph([node], "one", *ports, held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    right = load_onnx(model.SerializeToString()).run({"x": x})["y"]
    np.testing.assert_array_equal(ReferenceEvaluation(model).run({"x": x})["y"], right)


def test_erf_is_float64_though_onnx_rounds_it():
    from math import erf

    x = np.linspace(-3, 3, 50, dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("Erf", ["x"], ["y"])],
        "one",
        [helper.make_tensor_value_info("x", F, [50])],
        [helper.make_tensor_value_info("y", F, [50])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    exact = Float64(model)
    assert exact.evaluator == REFERENCE
    np.testing.assert_allclose(exact.run({"x": x})["y"], [erf(float(value)) for value in x], rtol=1e-15)


def _of_two(kind, second, how):
    """A node of ``x`` and a second input, and what ours makes of it."""
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 70))
    types = {"f": TensorProto.DOUBLE, "i": TensorProto.INT64}
    given = {"x": x, "at": second}
    ports = [helper.make_tensor_value_info(n, types[array.dtype.kind], array.shape) for n, array in given.items()]
    node = helper.make_node(kind, ["x", "at"], ["y"], **how)
    graph = helper.make_graph([node], "one", ports, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return model, given, ReferenceEvaluation(model).run(given)["y"]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_elements_are_gathered_along_long_axes(axis):
    at = np.random.default_rng(1).integers(-2, 2, (2, 2, 4, 66))
    _, given, found = _of_two("GatherElements", at, {"axis": axis})
    size = given["x"].shape[axis]
    right = torch.gather(torch.from_numpy(given["x"]), axis, torch.from_numpy(at % size))
    np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("border", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_a_grid_is_sampled_in_float64(mode, border, corners):
    at = np.random.default_rng(1).uniform(-1.3, 1.3, (2, 3, 4, 2))
    how = {"mode": mode, "padding_mode": border, "align_corners": corners}
    model, given, found = _of_two("GridSample", at, how)
    right = load_onnx(model, as_written=True).run(given)["y"]
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-12)
    assert found.dtype == np.float64


def test_what_overflows_on_the_way_is_nothing_to_warn_of():
    x = np.array([-800.0, 0, 800])
    nodes = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Erf", ["s"], ["y"])]  # no runtime's Erf
    values = [[helper.make_tensor_value_info(name, F, [3])] for name in "xy"]
    model = helper.make_model(helper.make_graph(nodes, "two", *values), opset_imports=[helper.make_opsetid("", 20)])
    exact = Float64(model)
    assert exact.evaluator == REFERENCE
    np.testing.assert_allclose(exact.run({"x": x})["y"], [0, 0.5204998778130465, 0.8427007929497149], atol=1e-15)


class Attention(nn.Module):
    """Of three axes, as timm's SAM has it; torch's exporters take its kernel in four alone."""

    def __init__(self, masks: bool):
        super().__init__()
        mask = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)).double()
        self.register_buffer("mask", (mask > 0.3) | torch.eye(4, dtype=torch.bool) if masks else mask)

    def forward(self, x):
        x = x.flatten(2)
        return torch.nn.functional.scaled_dot_product_attention(x, 2 * x, x + 1, self.mask)


@pytest.mark.parametrize(("masks", "writer"), [(True, OLD_EXPORTER), (False, NEW_EXPORTER)])
def test_attention_that_torch_exports_in_four_axes_alone_is_written_out(masks, writer):
    module, own = Attention(masks).eval(), torch.nn.functional.scaled_dot_product_attention
    graph, by = network_to_onnx(module, (4, 2, 3), input_name="x", outputs=["y"])
    x = torch.randn(2, 4, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    np.testing.assert_allclose(Float64(graph).run({"x": x.numpy()})["y"], module(x), rtol=1e-12, atol=1e-14)
    assert by == writer
    assert torch.nn.functional.scaled_dot_product_attention is own


class FoldsItself(torch.nn.Module):
    """Two convolutions that its forward folds into a third, in the memory of that one's weights, as SPAN does."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = torch.nn.Conv2d(3, 6, 3, padding=1), torch.nn.Conv2d(6, 4, 1)
        self.one = torch.nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        narrow = self.narrow.weight.data.clone().detach().flatten(1)
        self.one.weight.data = torch.tensordot(narrow, self.wide.weight.data, 1).contiguous()
        self.one.bias.data = narrow @ self.wide.bias.data + self.narrow.bias.data
        return self.one(x)


def test_a_network_that_assigns_its_weights_is_exported_without_a_crash():
    """It ended the process: torch's new exporter put tensors without memory into the place of real weights."""
    module = FoldsItself().double().eval().requires_grad_(False)
    graph, by = network_to_onnx(module, (3, 8, 8), input_name="x", outputs=["y"])
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    np.testing.assert_allclose(Float64(graph).run({"x": x.numpy()})["y"], module(x), rtol=1e-12, atol=1e-14)
    assert by == OLD_EXPORTER


class Clamped(torch.nn.Module):
    """Twice, as timm's gemma4_vit: of two Clips the exporter's optimizer makes one whose bounds it leaves out."""

    def forward(self, x):
        return x.clamp(-2, 2).clamp(-0.5, 1.5)


def test_a_graph_without_all_that_it_takes_is_written_again():
    graph, by = network_to_onnx(Clamped().eval(), (4, 2, 3), input_name="x", outputs=["y"])
    onnx.checker.check_model(graph)
    x = 2 * np.random.default_rng(0).standard_normal((2, 4, 2, 3))
    np.testing.assert_array_equal(Float64(graph).run({"x": x})["y"], x.clip(-0.5, 1.5))
    assert by == NEW_EXPORTER


NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide)
        self.skip = nn.BatchNorm2d(wide)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)) + self.skip(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 8, 3, 2, 1), nn.Sequential(Block(8), Block(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.blocks(self.stem(x))
        return {"logits": self.head(x.mean((2, 3))), "map": x}

def build():
    return Net()
"""


@pytest.fixture
def own() -> dict:
    """The user's own code, and weights that it trained, in a wrapper."""
    Path("net.py").write_text(NET)
    space: dict = {}
    exec(NET, space)
    torch.manual_seed(0)
    net = space["build"]()
    for name, value in net.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) + 0.5 if "var" in name else torch.randn_like(value) / 3)
    weights = {f"module.{name}": value for name, value in net.state_dict().items()}
    torch.save({"model": weights, "epoch": 3}, "own.pth")
    return weights


def test_a_users_own_network_goes_the_whole_way(own, repaconv):
    settings = {"image_size": "16", "mean": "127.5,127.5,127.5", "std": "64,64,64"}
    done = rc.fold("own.pth", arch="./net.py:build", settings=settings)
    assert (done.verdict, done.classes, done.image_size) == ("passed", 5, (16, 16))
    assert "BatchNormalization" not in done.operators
    assert done.operators["Conv"] == 3  # each block's branches are one
    rc.export()
    ran = rc.verify()
    assert verdicts(ran.links) == {name: {"passed"} for name in ("fold", "stored", "onnx")}
    assert rc.bench(rounds=2).agreement.verdict == "passed"
    nodes = [node.name for node in onnx.load("repaconv-out/own/model.onnx").graph.node]
    assert any(name.startswith("blocks.1") for name in nodes)


def test_a_recipe_of_a_users_own_network_is_gated(own):
    text = 'checkpoint = "own.pth"\narch = "net.py:build"\n[set]\nimage_size = 16\n[export]\nsimplify = false\n'
    Path("ci").mkdir()
    for name in ("own.pth", "net.py"):
        Path(name).rename(Path("ci") / name)
    path = Path("ci/own.toml")
    path.write_text(text)
    report = rc.gate([path])
    assert report.exit_code == 0, report
    assert {"fold", "stored", "onnx"} <= {check.name for check in report.recipes[0].checks}
    path.write_text(text.replace("net.py:build", "net.py:other"))
    (check,) = rc.gate([path]).recipes[0].checks
    assert (check.stage, check.code, check.line) == ("fold", "arch.function", 2)


def test_a_sweep_takes_a_users_own_network_and_sees_when_its_code_changes(own):
    entry = Entry(checkpoint="own.pth", arch="net.py:build", set={"image_size": 16})
    cell = Cell(model="own", target="x86-64", precision="fp32", batch=1)
    first, size = _model(entry, cell, "x86-64", Path(), Path("sweep"))
    assert (first.is_file(), size) == (True, (16, 16))
    assert _model(entry, cell, "x86-64", Path(), Path("sweep"))[0] == first
    Path("net.py").write_text(Path("net.py").read_text() + "\n# changed\n")
    assert _model(entry, cell, "x86-64", Path(), Path("sweep"))[0] != first


def test_a_masks_lowest_number_stays_finite_in_float32():
    held = numpy_helper.from_array(np.array([np.finfo(np.float64).min, -np.inf, 1.0]), "mask")
    found = retyped(helper.make_model(helper.make_graph([], "g", [], [], [held])), {TensorProto.DOUBLE: F})
    expected = np.array([np.finfo(np.float32).min, -np.inf, 1], np.float32)
    np.testing.assert_array_equal(numpy_helper.to_array(found.graph.initializer[0]), expected)


def test_weights_of_another_network_are_refused_by_their_names(own, repaconv):
    changed = {**own, "module.more": torch.ones(2), "module.head.bias": torch.ones(7)}
    del changed["module.stem.bias"]
    torch.save(changed, "other.pth")
    code, _, err = repaconv("fold", "other.pth", "--arch", "net.py:build")
    assert code == 4
    assert "missing: stem.bias" in err
    assert "not in it: more" in err
    assert "head.bias [7] for [5]" in err
    assert not Path("repaconv-out").exists()
    for arch in ("net.py:other", "gone.py:build", "nobody:net"):
        assert repaconv("fold", "own.pth", "--arch", arch)[0] == 2


def test_a_file_without_counts_of_batches_is_as_good_and_so_is_a_hard_sigmoid(own):
    """Whose 1/6 is a float32 in ONNX."""
    Path("net.py").write_text(NET.replace("torch.relu(", "nn.functional.hardsigmoid("))
    torch.save({name: value for name, value in own.items() if "num_batches" not in name}, "old.pth")
    assert rc.fold("old.pth", arch="net.py:build", settings={"image_size": "16"}).verdict == "passed"


ATTENTION = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 24, 4, 4), nn.BatchNorm2d(24)
        self.qkv, self.head = nn.Linear(24, 72), nn.Linear(24, 6)

    def forward(self, x):
        x = nn.functional.leaky_relu(self.norm(self.stem(x)), 0.1).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) * 24**-0.5
        return self.head((scores.softmax(-1) @ v / 0.3).clamp(-3.3, 3.3))

def build():
    return Net()
"""
"""Numbers of its code: one over the root of 24, 0.1, 0.3, 3.3; none is a float32."""
GATES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.gate = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 1)
        self.norm, self.head = nn.BatchNorm2d(16), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = nn.functional.hardswish(self.stem(x))
        return self.head(self.norm(nn.functional.hardsigmoid(self.gate(x))))

def build():
    return Net()
"""
"""A gate that hardly moves, and statistics that say so: 1/6 in float32 is more than 1e-6 of what comes out."""


def users(code: str, name: str, change) -> Path:
    """Code of the user's own, and weights of it."""
    Path(f"{name}.py").write_text(code)
    space: dict = {}
    exec(code, space)
    torch.manual_seed(0)
    net = space["build"]().requires_grad_(False)
    change(net)
    torch.save(net.state_dict(), f"{name}.pth")
    return Path(f"{name}.pth")


def test_what_fold_passed_verify_passes_on_other_images():
    """Numbers of its code are exported as they are, so that nothing is allowed but float64's own rounding."""

    def loud(net):
        net.qkv.weight.mul_(12)

    done = rc.fold(users(ATTENTION, "attention", loud), arch="attention.py:build", settings={"image_size": "16"})
    assert done.tolerances["fold"] == exact_rtols()["fold"]
    for seed in range(5):
        ran = rc.verify(seed=seed)
        assert verdicts(ran.links) == {name: {"passed"} for name in ("fold", "stored")}, seed


def test_a_gate_of_one_sixth_is_exported_however_little_it_moves():
    def calibrated(net):
        net.gate.weight.mul_(0.003)
        net.gate.bias.fill_(2.0)
        net.norm.running_mean.fill_(5 / 6)
        net.norm.running_var.fill_(1e-8)

    done = rc.fold(users(GATES, "gates", calibrated), arch="gates.py:build", settings={"image_size": "16"})
    assert done.links[0].candidate == "ONNX as exported, float64"
    assert done.links[0].metrics.max_rel_error < 1e-12
    assert verdicts(rc.verify(seed=3).links)["fold"] == {"passed"}


def test_an_export_that_computes_something_else_is_refused_with_its_limit(own, repaconv, monkeypatch):
    def wrong(*given, **how):
        model, by = network_to_onnx(*given, **how)
        bias = next(weight for weight in model.graph.initializer if weight.name == "head.bias")
        bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) * (1 + 1e-4), "head.bias"))
        return model, by

    monkeypatch.setattr("repaconv.stages.fold.architecture_fold.network_to_onnx", wrong)
    code, _, err = repaconv("fold", "own.pth", "--arch", "net.py:build", "--set", "image_size=16")
    message = " ".join(err.split())
    assert (code, "export.not-equal" in message, Path("repaconv-out").exists()) == (1, True, False)
    assert "output logits: off by" in message
    assert "allowed: 1e-06" in message


EDGES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, 2, 1), nn.Linear(16, 5)
        self.scale = nn.Parameter(torch.ones(16, 1, 1))

    def forward(self, x):
        return self.head(torch.relu(self.stem(x) * self.scale)[:, :, 1:, 1:].mean((2, 3)))

def build():
    return Net()
"""


def edges(door: str):
    """A fold of a network whose kernels sum to zero: of a bright image it computes differences of large numbers."""

    def zero_sums(net):
        whole = (net.stem.weight * 256).round()
        whole.view(16, -1)[:, 0] -= whole.view(16, -1).sum(1)
        net.stem.weight.copy_(whole / 256)
        net.scale.uniform_(0.3, 0.9)

    path = users(EDGES, "edges", zero_sums)
    if door == "arch":
        return rc.fold(path, arch="edges.py:build", settings={"image_size": "16"})
    space: dict = {}
    exec(EDGES, space)
    net = space["build"]().eval()
    net.load_state_dict(torch.load(path))
    model, _ = network_to_onnx(net.double(), (3, 16, 16), input_name="input", outputs=("output",))
    onnx.save(retyped(model, {TensorProto.DOUBLE: F}), "edges.onnx")
    return rc.fold("edges.onnx")


def off_by(fault: float, monkeypatch) -> None:
    """Plant it in one weight of the head of whatever is folded in float64 from now on."""

    def wrong(*given, **how):
        model, changes, _ = folded(*given, **how)
        head = next(weight for weight in model.graph.initializer if sorted(weight.dims) == [5, 16])
        numbers = numpy_helper.to_array(head).copy()
        numbers.flat[np.abs(numbers).argmax()] *= 1 + fault
        head.CopyFrom(numpy_helper.from_array(numbers, head.name))
        return Folded(model, changes)

    monkeypatch.setattr("repaconv.sources.named_architecture_source.folded", wrong)
    monkeypatch.setattr("repaconv.sources.onnx_source.folded", wrong)


@pytest.mark.parametrize("door", ["arch", "graph"])
def test_a_fold_may_differ_by_what_float64_moves_these_images_and_by_no_more(door, monkeypatch):
    assert edges(door).tolerances["fold"] == exact_rtols()["fold"]
    images = np.random.default_rng(0).standard_normal((4, 3, 16, 16)).astype(np.float32)
    np.savez("bright.npz", input=images + 500_000)

    def link(**how):
        return next(link for link in rc.verify(**how).links if link.name == "fold")

    bright = link(inputs="bright.npz")
    assert bright.metrics.max_rel_error > exact_rtols()["fold"]
    assert (bright.verdict, bright.reason) == ("passed", "explained_by_rounding")
    assert bright.figures.arithmetic == "float64"
    assert bright.tolerance.rtol_reason == EXPLAINED
    assert link().verdict == "passed"
    off_by(1e-9, monkeypatch)
    assert link().verdict == "failed"
    off_by(1e-6, monkeypatch)
    assert link(inputs="bright.npz").verdict == "failed"


def test_fold_and_verify_allow_the_same_where_no_exporter_rounds():
    done = edges("arch")
    fold = next(link for link in rc.verify().links if link.name == "fold")
    for link in (done.links[0], fold):
        assert (link.name, link.tolerance.rtol, link.tolerance.rtol_reason) == ("fold", 1e-12, ""), link.candidate


def test_where_an_exporter_rounds_the_limit_of_the_fold_follows_what_it_did(monkeypatch):
    """Not a flat one: a fault below what is allowed to an exporter is one of the fold."""

    def rounds(*given, **how):
        model, by = network_to_onnx(*given, **how)
        bias = next(weight for weight in model.graph.initializer if weight.name == "head.bias")
        bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) * (1 + 1e-9), "head.bias"))
        return model, by

    monkeypatch.setattr("repaconv.stages.fold.architecture_fold.network_to_onnx", rounds)
    done = edges("arch")
    assert done.links[0].metrics.max_rel_error > done.tolerances["fold"] == exact_rtols()["fold"]
    assert (done.links[0].tolerance.rtol, done.links[0].verdict) == (1e-6, "passed")
    assert "exporter" in done.links[0].tolerance.rtol_reason
    for seed in range(3):
        assert verdicts(rc.verify(seed=seed).links)["fold"] == {"passed"}
    off_by(1e-7, monkeypatch)
    assert verdicts(rc.verify().links)["fold"] == {"failed"}


@pytest.mark.parametrize("off", [0.0, 1e-9])
def test_what_jumps_within_one_unit_in_the_last_place_explains_nothing(off):
    """Another decision is no rounding; in its rows, nothing is allowed but the tolerance."""

    class Jumps(nn.Module):
        def forward(self, x):
            return x + (x[:, :1] > 1) * x.flip(-1)

    runner = NetworkRunner(Jumps(), {}, double=True)
    feeds = {"input": np.random.default_rng(0).uniform(1.5, 2, (2, 8))}
    feeds["input"][0, 0] = 1.0
    right = runner.run(feeds)
    moved = float64_rounding(SimpleNamespace(reference=runner, as_exported=None), feeds, right)
    assert 0 < max(each.max() for each in moved.of("output")) < 1e-14
    found = Comparison("folded", tolerance("fold"))
    found.add({"output": right["output"] * (1 + off)}, right, rounding=moved)
    assert [link.verdict for link in found.links("fold", "float64")] == ["failed" if off else "passed"]


THIRD = 1 / 3
BARE = {
    "product": lambda x: x * THIRD,
    "sum": lambda x: 0.7 - x + THIRD,
    "quotient": lambda x: THIRD / (x.abs() + 1) + x / 0.3,
    "power": lambda x: x.abs() ** THIRD + THIRD**x,
    "scaled sum": lambda x: torch.add(x, x.flip(-1), alpha=THIRD),
    "limits": lambda x: x.clamp(-THIRD, 0.7),
    "choice": lambda x: torch.where(x > 0, x, THIRD).masked_fill(x > 0.7, 0.1),
    "filled": lambda x: x * torch.full_like(x, THIRD) + x.new_full((8,), 0.1),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x, scale=THIRD),
    "norm": lambda x: nn.functional.rms_norm(x, (8,), eps=THIRD),
    "leaky_relu": lambda x: nn.functional.leaky_relu(x, THIRD),
    "elu": lambda x: nn.functional.elu(x, THIRD),
    "selu": lambda x: nn.functional.selu(x),
    "softplus": lambda x: nn.functional.softplus(x, THIRD, 3),
    "hardtanh": lambda x: nn.functional.hardtanh(x, -THIRD, 0.7),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=THIRD),
    "layer_norm": lambda x: nn.functional.layer_norm(x, (8,), eps=THIRD),
    "group_norm": lambda x: nn.functional.group_norm(x, 2, eps=THIRD),
    "hardsigmoid": nn.functional.hardsigmoid,
    "hardswish": nn.functional.hardswish,
    "bicubic": lambda x: nn.functional.interpolate(x, size=(11, 13), mode="bicubic"),
}
"""Numbers in a module's code, as constants of its graph, as attributes, and within its operators."""


@pytest.mark.parametrize("case", BARE)
def test_numbers_of_a_modules_code_are_the_graphs(case):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            return BARE[case](self.conv(x))

    torch.manual_seed(0)
    net = Net().eval().requires_grad_(False).double()
    model, by = network_to_onnx(net, (3, 8, 8), input_name="input", outputs=["out"])
    feeds = {"input": np.random.default_rng(0).standard_normal((2, 3, 8, 8))}
    right = NetworkRunner(net, net.state_dict(), double=True, outputs=("out",)).run(feeds)["out"]
    found = Float64(model).run(feeds)["out"]
    assert (by, right.dtype, found.dtype) == (NEW_EXPORTER, np.float64, np.float64)
    assert np.abs(found - right).max() <= 1e-14 * np.abs(right).max()


def test_a_users_own_code_is_run_as_python_would_and_its_failure_is_his(own, repaconv):
    Path("parts.py").write_text(NET)
    Path("beside.py").write_text("from parts import build\n")
    assert rc.fold("own.pth", arch="beside.py:build", settings={"image_size": "16"}).verdict == "passed"
    for text, message in (
        ("def build():\n    raise KeyError('width')\n", "broken.py:build fails with KeyError: 'width'"),
        ("def build(:\n", "fails with SyntaxError"),
        ("def build():\n    raise SystemExit(0)\n", "broken.py:build fails with SystemExit: 0"),
        ("def build():\n    return 1\n", "no function build that returns a torch.nn.Module"),
    ):
        Path("broken.py").write_text(text)
        code, _, err = repaconv("fold", "own.pth", "--arch", "broken.py:build")
        assert code == 2
        assert message in " ".join(err.split())
