"""Inputs that determine how an operator works: the value follows from declared shapes, or is given with `--inputs`."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import repaconv as rc
from repaconv.verification.graph_with_cached_outputs import Evaluated
from repaconv.verification.input_batches import arrays_to_save

F, INT, TEXT = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
IMAGE = {"x": (F, ["N", 3, 8, 8])}


def write(nodes, inputs, outputs, weights=(), opset=18) -> None:
    """A convolution and a norm of `x`, [N, 4, 8, 8], and what reads their result `n`."""
    random = np.random.default_rng(0)
    layers = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"]),
    ]
    held = {name: random.standard_normal(4).astype(np.float32) for name in "sbm"}
    held |= {"w": random.standard_normal((4, 3, 3, 3)).astype(np.float32), "v": np.ones(4, np.float32), **dict(weights)}
    ends = [
        [helper.make_tensor_value_info(name, *kind) for name, kind in side.items()]
        for side in ({**IMAGE, **inputs}, outputs)
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in held.items()]
    graph = helper.make_graph([*layers, *nodes], "net", *ends, tensors)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "net.onnx")


def node(kind: str, read: str, **named) -> onnx.NodeProto:
    return helper.make_node(kind, ["" if name == "-" else name for name in read.split()], ["y"], **named)


PARAMETERS = {
    "axis of a sum": (node("CumSum", "n p"), {"p": (INT, [])}, ["N", 4, 8, 8]),
    "axes of a mean": (node("ReduceMean", "n p", keepdims=0), {"p": (INT, [2])}, ["N", "P"]),
    "no axes": (node("ReduceMean", "n p", keepdims=0, noop_with_empty_axes=1), {"p": (INT, [0])}, ["N", 4, 8, 8]),
    "new axes": (node("Unsqueeze", "n p"), {"p": (INT, [2])}, ["A", "B", "C", "D", "E", "G"]),
    "shape": (node("Reshape", "n p"), {"p": (INT, [3])}, ["N", 16, 16]),
    "slice": (
        node("Slice", "n p ends axes"),
        {"p": (INT, [2]), "ends": (INT, [2]), "axes": (INT, [2])},
        ["A", "B", 8, 8],
    ),
    "parts": (
        helper.make_node("Split", ["n", "p"], ["y", "rest"], axis=1),
        {"p": (INT, [2])},
        ["N", 1, 8, 8],
    ),
    "pads of a mirror": (node("Pad", "n p", mode="reflect"), {"p": (INT, [8])}, ["N", 4, 10, 11]),
    "scales": (node("Resize", "n - p"), {"p": (F, [4])}, ["N", 4, 16, 12]),
    "sizes": (node("Resize", "n - - p"), {"p": (INT, [4])}, ["N", 4, 16, 12]),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_is_read_off_the_declared_shapes(name):
    """Folded, and `verify` draws the same parameter again."""
    reader, inputs, shape = PARAMETERS[name]
    outputs = {"y": (F, shape), **({"rest": (F, ["N", 3, 8, 8])} if name == "parts" else {})}
    write([reader], inputs, outputs)
    folded = rc.fold("net.onnx", measure=False)
    assert (folded.verdict, folded.applied) == ("passed", ("convolution",))
    assert rc.verify().verdict == "passed"


def test_random_strings_are_those_that_the_graph_knows():
    named = {"keys_strings": ["cat", "dog"], "values_floats": [3.0, -2.0], "default_float": 0.0}
    encoder = helper.make_node("LabelEncoder", ["names"], ["codes"], domain="ai.onnx.ml", **named)
    write([encoder, node("Mul", "n codes")], {"names": (TEXT, ["N", 1, 1, 1])}, {"y": (F, ["N", 4, 8, 8])})
    folded = rc.fold("net.onnx", measure=False)
    assert (folded.verdict, folded.applied) == ("passed", ("convolution",))
    assert rc.verify().verdict == "passed"


@pytest.fixture
def coded() -> dict[str, np.ndarray]:
    """A graph that takes the codes 6998 to 7002 alone, which nothing in it says; and a call that it takes."""
    nodes = [
        helper.make_node("Sub", ["code", "least"], ["beyond"]),
        helper.make_node("Abs", ["beyond"], ["place"]),
        helper.make_node("Gather", ["table", "place"], ["scale"], axis=0),
        node("Mul", "n scale"),
    ]
    table = {"table": np.array([2.0, -3.0, 5.0], np.float32), "least": np.array(7000)}
    write(nodes, {"code": (INT, [])}, {"y": (F, ["N", 4, 8, 8])}, table)
    return {"x": np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32), "code": np.array(7001)}


def test_where_no_random_input_is_taken_the_refusal_names_it_and_what_to_give(coded, repaconv):
    code, _, said = repaconv("fold", "net.onnx")
    assert code == 4
    assert "probably code (int64 [])" in said
    assert "--inputs FILE.npz" in said
    assert not Path("repaconv-out").exists()


def test_a_sample_goes_through_every_stage(coded, repaconv):
    np.savez("call.npz", **coded)
    assert repaconv("fold", "net.onnx", "--inputs", "call.npz")[0] == 0
    folded = json.loads(Path("repaconv-out/net/fold.json").read_text())
    assert folded["applied"] == ["convolution"]
    assert folded["sizes"]["held"] == {"code": 7001}
    verified = rc.verify()
    assert verified.verdict == "passed"
    assert all(link.verdict == "passed" for link in verified.links)
    rc.export()
    assert rc.verify(inputs="call.npz").verdict == "passed"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"code": np.array(12)}, "does not run under ONNX Runtime on the sample inputs"),
        ({"x": np.zeros((2, 3, 8, 9), np.float32)}, "x is of shape [2, 3, 8, 9], and not ['N', 3, 8, 8]"),
        ({"code": None}, "not the input code"),
        ({"code": np.array(["a"])}, "code holds text"),
    ],
    ids=["not taken", "of another shape", "missing", "of another type"],
)
def test_a_sample_that_is_none_is_refused(coded, repaconv, changed, says):
    np.savez("call.npz", **{name: array for name, array in {**coded, **changed}.items() if array is not None})
    code, _, said = repaconv("fold", "net.onnx", "--inputs", "call.npz")
    assert code == 4
    assert says in " ".join(said.split())
    assert not Path("repaconv-out").exists()


def test_what_to_save_is_valid_python_whatever_inputs_are_called(coded, repaconv):
    """TensorFlow calls inputs as input:0."""
    assert arrays_to_save(["ids", "mask"]) == "ids=..., mask=..."
    assert arrays_to_save(["input:0"]) == '**{"input:0": ...}'
    names = ["ids", "class", "a b", 'one"', "0"]
    said = ast.parse(f"numpy.savez(path, {arrays_to_save(names)})", mode="eval").body
    assert [word.arg for word in said.keywords] == ["ids", None]
    assert [key.value for key in said.keywords[1].value.keys] == names[1:]
    model = onnx.load("net.onnx")
    model.graph.input[0].name = model.graph.node[0].input[0] = "x:0"
    onnx.save(model, "net.onnx")
    hint = '**{"x:0": ...})'
    assert hint in repaconv("fold", "net.onnx")[2]
    np.savez("call.npz", code=coded["code"])
    assert hint in repaconv("fold", "net.onnx", "--inputs", "call.npz")[2]
    Path("text.npz").write_text("x")
    os.mkfifo("pipe.npz")
    for name, said in (("text.npz", "not a zip archive"), ("gone.npz", "there is no file"), ("pipe.npz", "is a pipe")):
        completed = repaconv("fold", "net.onnx", "--inputs", name)[2]
        assert hint in completed
        assert said in completed
        assert "pickle" not in completed


def test_a_sample_is_of_a_graph(tiny, repaconv):
    code, _, said = repaconv("fold", tiny, "--inputs", "call.npz")
    assert code == 2
    assert "--inputs is for ONNX graphs" in said


def test_an_input_that_no_file_of_arrays_holds_is_named(repaconv):
    graph = helper.make_graph(
        [helper.make_node("ConcatFromSequence", ["parts"], ["y"], axis=0)],
        "net",
        [helper.make_tensor_sequence_value_info("parts", F, ["N", 3])],
        [helper.make_tensor_value_info("y", F, ["M", 3])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), "net.onnx")
    code, _, said = repaconv("fold", "net.onnx")
    assert code == 4
    assert "its input parts is of type sequence" in said
    assert "--inputs" not in said


def test_a_function_of_numbers_above_one_is_given_those():
    write([node("Acosh", "z")], {"z": (F, ["N", 5])}, {"n": (F, ["N", 4, 8, 8]), "y": (F, ["N", 5])})
    assert rc.fold("net.onnx", measure=False).verdict == "passed"
    assert all(link.verdict == "passed" for link in rc.verify().links)


def test_a_graph_that_is_finite_on_pixels_only_runs_on_those(repaconv):
    """As HVI-CIDNet is: the sine of the largest channel gets an exponent that is no integer."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["largest"], axes=[1]),
        helper.make_node("Sin", ["largest"], ["sine"]),
        helper.make_node("Pow", ["sine", "power"], ["scale"]),
        helper.make_node("Mul", ["n", "scale"], ["y"]),
    ]
    write(nodes, {}, {"y": (F, ["N", 4, 8, 8])}, {"power": np.array(0.3, np.float32)}, opset=17)
    found = rc.fold("net.onnx")
    assert (found.verdict, found.sizes.unit) == ("passed", True)
    assert found.changes
    assert "seeded inputs from 0 to 1, as others give NaN or infinity" in found.links[0].note
    for command in (["export"], ["verify"], ["compare", "net.onnx", "repaconv-out/net/net.folded.onnx"]):
        assert repaconv(*command)[0] == 0
    write([node("Identity", "n")], {}, {"y": (F, ["N", 4, 8, 8])})
    assert not rc.fold("net.onnx", force=True).sizes.unit


def test_a_graph_that_runs_on_pixels_only_runs_on_those(repaconv):
    """As exported detectors do, of which a Reshape fails where no object is found: here an index leaves its table."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["largest"], axes=[1, 2, 3]),
        helper.make_node("Abs", ["largest"], ["above"]),
        helper.make_node("Cast", ["above"], ["index"], to=INT),
        helper.make_node("Gather", ["table", "index"], ["looked_up"]),
        helper.make_node("Add", ["n", "looked_up"], ["y"]),
    ]
    write(nodes, {}, {"y": (F, ["N", 4, 8, 8])}, {"table": np.array([3], np.float32)}, opset=17)
    found = rc.fold("net.onnx")
    assert (found.verdict, found.sizes.unit) == ("passed", True)
    assert "seeded inputs from 0 to 1, as the graph does not run on others" in found.links[0].note
    assert repaconv("verify")[0] == 0


@pytest.mark.parametrize("reader", ["Conv", "Pad", "MatMul", "BatchNormalization", "Mul"])
def test_a_dynamic_dimension_that_a_weight_decides_has_its_size(reader):
    """The channels of an image in a graph of which all sizes are dynamic, last in what a MatMul reads."""
    before = [helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 3, 1]), helper.make_node("Relu", ["t"], ["r"])]
    nodes = {
        "Conv": [helper.make_node("Conv", ["x", "w"], ["y"], group=3)],
        "Pad": [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Concat", ["s", "s"], ["both"], axis=0),
            helper.make_node("Min", ["both", "pads"], ["few"]),
            helper.make_node("Pad", ["x", "few"], ["p"]),
            helper.make_node("Conv", ["p", "w"], ["y"], group=3),
        ],
        "MatMul": [*before, helper.make_node("MatMul", ["r", "w"], ["y"])],
        "BatchNormalization": [helper.make_node("BatchNormalization", ["x", "w", "w", "w", "w"], ["y"])],
        "Mul": [helper.make_node("Mul", ["w", "x"], ["y"])],
    }[reader]
    shape = {"Conv": (6, 1, 3, 3), "Pad": (6, 1, 3, 3), "MatMul": (3, 5), "BatchNormalization": (3,), "Mul": (3, 1, 1)}[
        reader
    ]
    weight = numpy_helper.from_array(np.random.default_rng(0).random(shape).astype(np.float32), "w")
    ends = [[helper.make_tensor_value_info(name, F, dims)] for name, dims in (("x", [*"abcd"]), ("y", None))]
    imports = [helper.make_opsetid("", 18)]
    pads = numpy_helper.from_array(np.array([0, 0, 1, 1] * 2), "pads")
    model = helper.make_model(helper.make_graph(nodes, "g", *ends, [weight, pads]), opset_imports=imports, ir_version=9)
    onnx.save(model, "net.onnx")
    done = rc.fold("net.onnx", measure=False)
    assert done.verdict == "passed"
    assert all(f"{name} " in done.links[0].note for name in "acd")  # they vary


def test_inputs_are_no_larger_than_memory_however_many_sizes_are_dynamic(monkeypatch):
    from repaconv.verification import probe_inputs

    monkeypatch.setattr(probe_inputs, "MOST_INPUT_NUMBERS", 10**6)
    ends = [helper.make_tensor_value_info(name, F, [*"abcde"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model, sizes = helper.make_model(graph), list[int]()

    def run(feeds):
        sizes.append(feeds["x"].size)
        raise RuntimeError("no size is right")

    with pytest.raises(probe_inputs.Unrunnable, match="no size is right"):
        probe_inputs.probes(model, run)
    assert 0 < max(sizes) <= 10**6


def test_a_root_of_pixels_is_also_compared_on_numbers_above_one():
    """Where a graph is finite on those: a fold that is wrong for them alone would pass otherwise."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["largest"], axes=[1]),
        helper.make_node("Pow", ["largest", "power"], ["scale"]),
        helper.make_node("Mul", ["n", "scale"], ["y"]),
    ]
    write(nodes, {}, {"y": (F, ["N", 4, 8, 8])}, {"power": np.array(0.3, np.float32)}, opset=17)
    found = Evaluated(onnx.load("net.onnx")).probes
    assert found.unit
    assert max(feed["x"].max() for feed in found.plain) <= 1
    largest = [feed["x"].max() for feed in found.more()]
    assert 1 < largest[0] <= 4 < largest[1] <= 32
