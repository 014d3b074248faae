"""gelu: what TensorFlow, Keras and JAX write is PyTorch's form, which ONNX Runtime fuses; Erfc is read as 1 - Erf."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_fold_onnx import graph
from test_hard_swish import single

import repaconv as rc
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.graph.onnx_files import spell_out_erfc
from repaconv.onnx_export.opset_lowering import lower
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.verification.float64_graphs import ReferenceEvaluation

RANDOM = np.random.default_rng(0)
C = float(np.float32(math.sqrt(0.5)))
NUMBERS = {"c": C, "1": 1.0, "half": 0.5, "2": 2.0, "d": 1 / C, "near": 0.7, "most": 0.4}
SHAPE = (2, 3, 6, 5)
CONV = ("Conv", "x conv", "z")
NEXT = ("Conv", "g l", "y")
KERAS = [("Mul", "half z", "h"), ("Neg", "z", "n"), ("Mul", "n c", "u"), ("Erf", "u", "e"), ("Sub", "1 e", "a"),
         ("Mul", "h a", "g")]  # fmt: skip
GATE = [("Mul", "c z", "u"), ("Erf", "u", "e"), ("Add", "1 e", "a")]
FORMS = {
    "Keras": KERAS,
    "negative factor": [KERAS[0], ("Mul", "z minus", "u"), *KERAS[3:]],
    "TensorFlow 2.8": [KERAS[0], *GATE, ("Mul", "a h", "g")],
    "half last": [*GATE, ("Mul", "z a", "p"), ("Div", "p 2", "g")],
    "half last, swapped": [*GATE, ("Mul", "a z", "p"), ("Mul", "half p", "g")],
    "PyTorch": [("Div", "z d", "u"), GATE[1], ("Add", "e 1", "a"), ("Mul", "z a", "p"), ("Mul", "p half", "g")],
    "half of the gate": [("Div", "z d", "u"), *GATE[1:], ("Mul", "half a", "p"), ("Mul", "z p", "g")],
}


K, A = (float(np.float32(number)) for number in (math.sqrt(2 / math.pi), 0.044715))
NUMBERS |= {"3": 3.0, "by": K, "small": A, "fourfold": np.ones((1, 1, 1, 1))}
CUBE = [("Pow", "z 3", "p"), ("Mul", "p small", "q"), ("Add", "z q", "r"), ("Mul", "r by", "u"), ("Tanh", "u", "e")]
ENDS = [("Add", "e 1", "s"), ("Mul", "z half", "h"), ("Mul", "h s", "g")]
PRODUCTS = [("Mul", "z z", "o"), ("Mul", "o z", "p"), *CUBE[1:]]
TANH = {
    "transformers": [*CUBE, *ENDS],
    "product": [*PRODUCTS, *ENDS],
    "square": [PRODUCTS[0], ("Mul", "o small", "p"), ("Add", "p 1", "q"), ("Mul", "z q", "r"), *CUBE[3:], *ENDS],
    "gelu_fast": [("Mul", "z by", "o"), ("Mul", "z small", "p"), ("Mul", "p z", "q"), ("Add", "q 1", "r"),
                  ("Mul", "o r", "u"), CUBE[4], *ENDS],
    "JAX": [*PRODUCTS, ENDS[0], ("Mul", "half s", "h"), ("Mul", "z h", "g")],
    "half last": [*CUBE, ENDS[0], ("Mul", "z s", "h"), ("Div", "h 2", "g")],
    "Keras": [*CUBE[:5], ("Add", "fourfold e", "s"), ("Mul", "half z", "h"), ENDS[2]],
    "tf2onnx": [("Transpose", "z", "t", {"perm": [0, 2, 3, 1]}), ("Pow", "t 3", "n"), ("Mul", "small n", "p"),
                ("Transpose", "p", "q", {"perm": [0, 3, 1, 2]}), *CUBE[2:], *ENDS],
}  # fmt: skip


def network(rows, **more):
    weights = {"conv": RANDOM.standard_normal((4, 3, 3, 3)), "l": RANDOM.standard_normal((2, 4, 3, 3)), "minus": -C}
    return graph([CONV, *rows, NEXT], {**NUMBERS, **weights, **more}, {"x": SHAPE})


def folded(model):
    """The graph after folding, which computes the same in float64."""
    after, _ = rewritten(model, FOLDS)
    onnx.checker.check_model(after, full_check=True)
    image = {"x": RANDOM.standard_normal(SHAPE)}
    before, behind = (ReferenceEvaluation(each).run(image)["y"] for each in (model, after))
    np.testing.assert_allclose(behind, before, rtol=0, atol=1e-12 * np.abs(before).max())
    return after


def fused(model):
    """The operators that ONNX Runtime makes of a graph in float32."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = "optimized.onnx"
    options.log_severity_level = 4
    ort.InferenceSession(single(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return sorted(node.op_type for node in onnx.load("optimized.onnx").graph.node)


@pytest.mark.parametrize("rows", FORMS.values(), ids=FORMS)
def test_onnx_runtime_fuses_every_form_between_convolutions(rows):
    """The second convolution takes no half of the activation, which would leave the rest as it is."""
    assert fused(folded(network(rows))) == ["Conv", "Conv", "Gelu"]


@pytest.mark.parametrize("form", TANH)
def test_onnx_runtime_fuses_every_form_by_tanh_between_convolutions(form):
    """In transformers' form, too, the second convolution takes no half."""
    assert fused(folded(network(TANH[form]))) == ["Conv", "Conv", "FastGelu"]
    assert ("gelu" in applied(network(TANH[form]))) == (form != "transformers")


def test_onnx_runtime_fuses_what_an_older_opset_has_for_the_operator():
    model = single(network([("Gelu", "z", "g", {"approximate": "tanh"})]))
    assert fused(lower(model, 17)) == ["Conv", "Conv", "FastGelu"]


def applied(model):
    return {change.rewrite for change in rewritten(model, FOLDS)[1]}


@pytest.mark.parametrize("form", ["Keras", "TensorFlow 2.8", "PyTorch", "half of the gate", "half first"])
def test_a_number_that_multiplies_gelu_goes_into_the_next_convolution(form):
    """NFNet multiplies its activation by 1.7; that is no half, and GELU stays one operator."""
    first = [FORMS["PyTorch"][0], *GATE[1:], KERAS[0], ("Mul", "h a", "g")]
    *rows, (operator, read, _) = {**FORMS, "half first": first}[form]
    after = folded(network([*rows, (operator, read, "q"), ("Mul", "q gain", "g")], gain=1.7))
    assert fused(after) == ["Conv", "Conv", "Gelu"]


TURN, BACK = {"perm": [0, 2, 3, 1]}, {"perm": [0, 3, 1, 2]}


def turned(order):
    """What tf2onnx writes where Erfc is in the way of its own optimizer; ``order`` is that of the other factor."""
    last = [("Erf", "v", "e"), ("Sub", "1 e", "a"), ("Mul", "t a", "w"), ("Transpose", "w", "g", BACK)]
    return [*KERAS[:3], ("Transpose", "h", "t", order), ("Transpose", "u", "v", TURN), *last]


def test_transposes_before_every_operator_go():
    assert fused(folded(network(turned(TURN)))) == ["Conv", "Conv", "Gelu"]


def test_factors_in_another_order_are_no_gelu():
    model = network(turned({"perm": [0, 3, 2, 1]}), conv=RANDOM.standard_normal((4, 3, 3, 2)))  # as wide as it is high
    assert "Gelu" not in fused(folded(model))


@pytest.mark.parametrize(
    "rows",
    [
        [*KERAS[:2], ("Mul", "n near", "u"), *KERAS[3:]],
        [("Mul", "most z", "h"), *KERAS[1:]],
        [*KERAS[:4], ("Sub", "e 1", "a"), KERAS[5]],
        [*KERAS[:4], ("Sub", "2 e", "a"), KERAS[5]],
        [*KERAS[:4], ("Add", "1 e", "a"), KERAS[5]],
        [("Abs", "z", "h"), *KERAS[1:]],
        [*KERAS[:5], ("Mul", "h a", "p"), ("Add", "p e", "g")],
    ],
    ids=["another c", "another factor", "erf - 1", "2 - erf", "x / 2 (1 + erf(-c x))", "another x", "erf is read"],
)
def test_what_is_no_gelu_stays(rows):
    assert "gelu" not in applied(network(rows))
    folded(network(rows))


@pytest.mark.parametrize(
    "rows",
    [
        [("Pow", "z 2", "p"), *PRODUCTS[2:], *ENDS],
        [*PRODUCTS[:2], ("Mul", "p near", "q"), *CUBE[2:], *ENDS],
        [*PRODUCTS[:2], ("Mul", "p small", "q"), ("Sub", "z q", "r"), *CUBE[3:], *ENDS],
        [*PRODUCTS[:4], ("Add", "r half", "n"), ("Mul", "n by", "u"), CUBE[4], *ENDS],
        [*PRODUCTS, ENDS[0], ("Mul", "z s", "n"), ("Mul", "n most", "g")],
        [*PRODUCTS, ENDS[0], ("Abs", "z", "n"), ("Mul", "n half", "h"), ENDS[2]],
        [*PRODUCTS, ENDS[0], ENDS[1], ("Mul", "h s", "n"), ("Add", "n s", "g")],
        [("Transpose", "z", "t", {"perm": [0, 1, 3, 2]}), ("Pow", "t 3", "p"), *CUBE[1:], *ENDS],
        [("Sub", "z z", "o"), ("Mul", "o z", "p"), *CUBE[1:], *ENDS],
        [("Mul", "fivefold z", "t"), ("Transpose", "t", "u", {"perm": [0, 1, 2, 4, 3]}), CUBE[4], *ENDS[:2],
         ("Mul", "h s", "n"), ("Reshape", "n shape", "g")],
    ],
    ids=["square", "another a", "less", "shifted", "another factor", "another x", "tanh is read", "turned", "nothing",
         "more axes"],
)  # fmt: skip
def test_what_is_no_gelu_by_tanh_stays(rows):
    more = {"fivefold": np.ones((1,) * 5), "shape": np.array([2, 4, 4, 4])}
    model = network(rows, conv=RANDOM.standard_normal((4, 3, 3, 2)), **more)  # an image as wide as it is high
    assert "gelu" not in applied(model)
    folded(model)


def with_erfc(model):
    """The same with Erfc for 1 - Erf, which ONNX does not have, as tf2onnx writes it."""
    nodes = list(model.graph.node)
    erf, less = (next(node for node in nodes if node.op_type == kind) for kind in ("Erf", "Sub"))
    erf.op_type, erf.output[0] = "Erfc", less.output[0]
    nodes.remove(less)
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(nodes)
    return model


def test_a_file_with_erfc_folds_to_what_runs():
    onnx.save(with_erfc(single(network(KERAS))), "net.onnx")
    done = rc.fold("net.onnx", out="run", measure=False)
    assert (done.verdict, done.applied) == ("passed", ("gelu",))
    assert fused(onnx.load(next(Path("run").glob("*.folded.onnx")))) == ["Conv", "Conv", "Gelu"]


def test_erfc_in_a_branch_is_one_minus_erf_under_new_names():
    def branch(operator):
        out = helper.make_tensor_value_info("y/one", TensorProto.DOUBLE, None)
        return helper.make_graph([helper.make_node(operator, ["x"], ["y/one"])], operator, [], [out])

    choice = helper.make_node("If", ["whether"], ["y"], then_branch=branch("Erfc"), else_branch=branch("Abs"))
    plain = helper.make_node("Erfc", ["x"], ["y"])
    x = RANDOM.standard_normal(5)
    ends = [helper.make_tensor_value_info("x", TensorProto.DOUBLE, [5])]
    outs = [helper.make_tensor_value_info("y", TensorProto.DOUBLE, [5])]
    weights = [numpy_helper.from_array(np.array(True), "whether")]
    for node in (choice, plain):
        whole = helper.make_graph([node], "g", ends, outs, weights)
        model = helper.make_model(whole, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)
        spell_out_erfc(model)
        onnx.checker.check_model(model)
        np.testing.assert_allclose(
            ReferenceEvaluation(model).run({"x": x})["y"], [math.erfc(each) for each in x], rtol=0, atol=1e-14
        )
