"""MACs of a graph with dynamic dimensions are counted at its usual sizes. The first axis is not always a batch."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import repaconv as rc
from repaconv.graph.compute_costs import macs, macs_at_ones, node_works
from repaconv.graph.models_in_onnx_ir import as_stored, clean, read
from repaconv.verification.graph_with_cached_outputs import Evaluated
from repaconv.verification.probe_inputs import QUICK_INPUT_NUMBERS, probes

F = TensorProto.FLOAT


def write(shape, gives, nodes, weights) -> None:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", F, shape)],
        [helper.make_tensor_value_info("y", F, gives)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "net.onnx")


def layers() -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["y"]),
    ]
    weights = {name: random.standard_normal(4).astype(np.float32) for name in "sbm"}
    weights |= {"w": random.standard_normal((4, 3, 3, 3)).astype(np.float32), "v": np.ones(4, np.float32)}
    return nodes, weights


@pytest.mark.parametrize("named", [True, False])
def test_macs_of_a_dynamic_graph_are_counted_at_its_usual_sizes(named, repaconv):
    free = ["N", "H", "W"] if named else [None, None, None]
    write([free[0], 3, free[1], free[2]], [free[0], 4, "P", "Q"], *layers())
    folded = rc.fold("net.onnx", measure=False)
    batch, height, width = folded.sizes.usual.values()
    assert batch == 1
    assert min(height, width) > 200
    assert folded.macs == (4 * 3 * 9 * ((height + 1) // 2) * ((width + 1) // 2),) * 2
    said = repaconv("fold", "net.onnx", "--no-measure")[1]
    first = "N" if named else "x[0]"
    assert f"MACs per inference at {first}=1" in " ".join(said.split())


def test_macs_of_fixed_sizes_name_none(repaconv):
    write([1, 3, 32, 16], [1, 4, 16, 8], *layers())
    folded = rc.fold("net.onnx", measure=False)
    assert folded.macs == (4 * 27 * 16 * 8,) * 2
    assert folded.macs_counted == "MACs per inference"


def test_an_image_without_a_batch_is_one():
    """As a detector of torchvision takes it: [3, H, W], of which three are channels."""
    nodes, weights = layers()
    nodes[0].input[0] = "batch"
    nodes[1].output[0] = "n"
    nodes = [
        helper.make_node("Unsqueeze", ["x", "zero"], ["batch"]),
        *nodes,
        helper.make_node("Reshape", ["n", "flat"], ["y"]),
    ]
    write([3, 32, 32], [256, 4], nodes, {**weights, "zero": np.array([0]), "flat": np.array([-1, 4])})
    folded = rc.fold("net.onnx", measure=False)
    assert (folded.batch, folded.whole) == (1, True)
    assert rc.export().batch == 1
    assert rc.verify().verdict == "passed"


def test_a_fixed_batch_is_a_batch():
    write([3, 3, 32, 32], [3, 4, 16, 16], *layers())
    assert rc.fold("net.onnx", measure=False).batch == 3


def test_a_batch_of_one_is_counted_without_fixing_it_unless_a_size_is_computed_from_it():
    """With the batch added to or divided, the graph is read again at that size."""
    width = np.ones((8, 5), np.float32)
    write(["N", 4, 8], ["N", 4, 5], [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": width})
    assert macs_at_ones(Evaluated(onnx.load("net.onnx")).settled, ["N"]) == 4 * 8 * 5
    assert macs_at_ones(Evaluated(onnx.load("net.onnx")).settled, ["M"]) is None
    rows = [
        helper.make_node("Concat", ["x", "more"], ["longer"], axis=0),
        helper.make_node("MatMul", ["longer", "w"], ["y"]),
    ]
    write(["N", 4, 8], ["M", 4, 5], rows, {"w": width, "more": np.ones((2, 4, 8), np.float32)})
    graph = Evaluated(onnx.load("net.onnx"))
    assert macs_at_ones(graph.settled, ["N"]) is None
    assert graph.macs({"N": 1}) == 3 * 4 * 8 * 5


def test_cleaning_sorts_a_graph_that_is_not_sorted():
    rows = [helper.make_node("Relu", ["a"], ["y"]), helper.make_node("Abs", ["x"], ["a"])]
    graph = helper.make_graph(
        rows, "net", [helper.make_tensor_value_info("x", F, [2])], [helper.make_tensor_value_info("y", F, [2])]
    )
    model = as_stored(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    clean(model)
    assert [node.op_type for node in model.graph] == ["Abs", "Relu"]


def probes_where(runs, nodes=None, **weights):
    """The inputs of a graph that runs where this is true of the height, and all that were tried."""
    tried = []

    def run(feeds):
        tried.append(feeds["x"])
        if not runs(feeds["x"].shape[2]):
            raise ValueError("not at this height")
        return {"y": feeds["x"]}

    write(["N", 3, "H", "W"], ["N", 3, "H", "W"], nodes or [helper.make_node("Relu", ["x"], ["y"])], weights)
    return probes(onnx.load("net.onnx"), run), tried


def test_a_side_that_has_one_size_keeps_it_in_ordinary_use():
    found, _ = probes_where(lambda height: height == 32)
    assert found.usual == {"N": 1, "H": 32, "W": 224}
    assert "runs at one size alone: H 32" in found.description


def test_sizes_that_take_long_are_tried_last():
    found, tried = probes_where(lambda height: height <= 28)
    assert found.usual["H"] == 28
    assert max(array.size for array in tried) <= QUICK_INPUT_NUMBERS


@pytest.mark.parametrize(("window", "side"), [(1, 128), (2, 224)])
def test_sizes_at_which_attention_over_all_pixels_takes_too_much_memory_are_not_tried(window, side):
    """The scores of 224 x 224 pixels take 10 GiB, for which the operating system may end the process."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["p"], kernel_shape=[window] * 2, strides=[window] * 2),
        helper.make_node("Reshape", ["p", "rows"], ["keys"]),
        helper.make_node("Transpose", ["keys"], ["queries"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["queries", "keys"], ["scores"]),
        helper.make_node("ReduceMean", ["scores", "all"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["x", "mean"], ["y"]),
    ]
    found, tried = probes_where(lambda _: True, nodes, rows=np.array([0, 3, -1]), all=np.array([0, 1, 2]))
    assert found.usual == {"N": 1, "H": side, "W": side}
    assert max(array.shape[2] for array in tried) == side


def flops(operator, inputs, shapes, *, outputs="y", x=(5, 2, 6), **attributes):
    """What one node multiplies, by the counts of a graph, of an estimate and of a profile."""
    held = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    tensors = [numpy_helper.from_array(array, name) for name, array in held.items()]
    made = outputs.split()[-1]
    node = helper.make_node(
        operator, inputs.replace("-", "").split(" "), outputs.replace("-", "").split(" "), **attributes
    )
    ends = [helper.make_tensor_value_info("x", F, x)], [helper.make_tensor_value_info(made, F, None)]
    graph = helper.make_graph([node], "net", *ends, tensors)
    model = read(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    (work,) = node_works(model)
    assert work.multiplies
    assert work.flops == 2 * macs(model)
    return macs(model)


@pytest.mark.parametrize(("operator", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize("outputs", ["y", "- h"], ids=["every step", "the last"])
@pytest.mark.parametrize("directions", [1, 2])
def test_a_recurrent_layer_multiplies_input_and_state_by_every_gate(operator, gates, outputs, directions):
    shapes = {"w": (directions, gates * 3, 6), "r": (directions, gates * 3, 3)}
    way = "bidirectional" if directions == 2 else "forward"
    found = flops(operator, "x w r", shapes, outputs=outputs, hidden_size=3, direction=way)
    assert found == 5 * 2 * directions * gates * 3 * (6 + 3)


def test_a_transposed_convolution_multiplies_every_pixel_of_its_input():
    assert flops("ConvTranspose", "x w", {"w": (6, 4, 2, 2)}, x=(1, 6, 5, 5), strides=[2, 2]) == 25 * 6 * 4 * 4


def test_an_einsum_that_is_a_product_is_counted_as_one():
    assert flops("Einsum", "x w", {"w": (6, 7)}, equation="abc,cd->abd") == 5 * 2 * 6 * 7


def test_an_einsum_of_three_operands_is_not_known():
    node = helper.make_node("Einsum", ["x", "x", "x"], ["y"], equation="ab,bc,cd->ad")
    ends = [helper.make_tensor_value_info(name, F, (4, 4)) for name in "xy"]
    graph = helper.make_graph([node], "net", ends[:1], ends[1:])
    (work,) = node_works(read(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)))
    assert (work.flops, work.bytes) == (None, None)
