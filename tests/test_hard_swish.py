"""hard-swish: what other converters write as Add, Clip, Mul and Div is one operator; what is not quite that stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from folded_operators import operators_after_folding
from onnx import TensorProto, helper
from test_fold_onnx import graph

import repaconv as rc
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS

RANDOM = np.random.default_rng(0)
NUMBERS = {f"{name}": np.array(number) for name, number in (("3", 3.0), ("0", 0.0), ("6", 6.0), ("2", 2.0))}
SIXTH = {"sixth": np.array(np.float32(1 / 6), np.float64)}
SHIFTED = [("Conv", "x k", "c"), ("Add", "c 3", "a"), ("Clip", "a 0 6", "s")]
CONV = {"k": RANDOM.standard_normal((4, 3, 3, 3))}
SHAPE = (2, 3, 6, 5)


def network(rows, shifted=SHIFTED, **more):
    return graph([*shifted, *rows], {**NUMBERS, **CONV, **SIXTH, **more}, {"x": SHAPE})


def kinds(model):
    """The operators after folding; in float64, where the slope of HardSwish is 1/6, they compute the same."""
    return sorted(operators_after_folding(model, 4 * RANDOM.standard_normal(SHAPE)))


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([("Mul", "c s", "p"), ("Div", "p 6", "y")], ["Conv", "HardSwish"]),
        ([("Div", "s 6", "g"), ("Mul", "g c", "y")], ["Conv", "HardSwish"]),
        ([("Div", "s 6", "y")], ["Conv", "HardSigmoid"]),
        ([("Div", "s 6", "g"), ("GlobalAveragePool", "x", "m"), ("Conv", "m h", "n"), ("Mul", "g n", "y")], None),
    ],
    ids=["product first", "quotient first", "gate", "gate of another value"],
)
def test_four_operators_are_one(rows, wanted):
    wanted = wanted or ["Conv", "Conv", "GlobalAveragePool", "HardSigmoid", "Mul"]
    assert kinds(network(rows, h=RANDOM.standard_normal((4, 3, 1, 1)))) == wanted
    swapped = [SHIFTED[0], ("Add", "3 c", "a"), SHIFTED[2]]
    assert kinds(network(rows, swapped, h=RANDOM.standard_normal((4, 3, 1, 1)))) == wanted


@pytest.mark.parametrize(
    ("shifted", "rows"),
    [
        (SHIFTED, [("Mul", "c s", "p"), ("Div", "6 p", "y")]),
        (SHIFTED, [("Mul", "a s", "p"), ("Div", "p 6", "y")]),
        (SHIFTED, [("Mul", "s s", "p"), ("Div", "p 6", "y")]),
        ([SHIFTED[0], ("Add", "c 3", "a"), ("Clip", "a 2 6", "s")], [("Mul", "c s", "p"), ("Div", "p 6", "y")]),
        ([SHIFTED[0], ("Add", "c 2", "a"), ("Clip", "a 0 6", "s")], [("Mul", "c s", "p"), ("Div", "p 6", "y")]),
        ([*SHIFTED, ("Sin", "s", "z")], [("Mul", "c s", "p"), ("Mul", "p z", "q"), ("Div", "q 6", "y")]),
    ],
    ids=["reciprocal", "shifted factor", "square", "lower limit", "shift", "several readers"],
)
def test_what_is_another_function_stays(shifted, rows):
    model = network([*rows[:-1], (rows[-1][0], rows[-1][1], "w"), ("Tanh", "w", "y")], shifted)
    onnx.save(single(model), "net.onnx")
    done = rc.fold("net.onnx", measure=False)
    assert "hard-swish" not in done.applied
    assert done.verdict == "passed"


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([("Mul", "c s", "p"), ("Mul", "p sixth", "y")], ["Conv", "HardSwish", "Mul"]),
        ([("Mul", "sixth s", "g"), ("Mul", "g c", "y")], ["Conv", "HardSwish", "Mul"]),
        ([("Mul", "s sixth", "y")], ["Conv", "HardSigmoid", "Mul"]),
        ([("Mul", "s sixth", "g"), ("Mul", "g c", "m"), ("Conv", "m l", "y")], ["Conv", "Conv", "HardSwish"]),
        ([("Mul", "c s", "p"), ("Div", "p 2", "m"), ("Conv", "m l", "y")], ["Conv", "Conv", "HardSwish"]),
    ],
    ids=["product first", "factor first", "gate", "before a convolution", "thirds"],
)
def test_a_factor_that_is_no_sixth_goes_into_the_next_layer(rows, wanted):
    """Such as 1/6 in float32, by which Keras multiplies."""
    assert kinds(network(rows, l=RANDOM.standard_normal((5, 4, 3, 3)))) == wanted


def single(model):
    from repaconv.graph.element_type_conversion import retyped

    return retyped(model, {TensorProto.DOUBLE: TensorProto.FLOAT})


@pytest.mark.parametrize(("kind", "opset", "folds"), [("DOUBLE", 20, 0), ("BFLOAT16", 20, 0), ("BFLOAT16", 22, 1)])
def test_a_type_that_the_operator_lacks_is_left_as_it_is(kind, opset, folds):
    from repaconv.sources.graph_fold import folded

    rows = [("Add", "x 3", "a"), ("Clip", "a 0 6", "s"), ("Mul", "x s", "p"), ("Div", "p 6", "y")]
    model = graph(rows, NUMBERS, {"x": SHAPE}, opset=opset)
    if kind != "DOUBLE":
        from repaconv.graph.element_type_conversion import retyped

        model = retyped(model, {TensorProto.DOUBLE: getattr(TensorProto, kind)})
    found = folded(Path("net.onnx"), model)
    assert [change.rewrite for change in found.changes] == ["hard-swish"] * folds


def test_integers_stay():
    rows = [("Cast", "x", "i", {"to": 7}), ("Add", "i 3", "a"), ("Clip", "a 0 6", "s"), ("Mul", "i s", "p")]
    rows += [("Div", "p 6", "q"), ("Cast", "q", "y", {"to": 11})]
    model = graph(rows, {name: number.astype(np.int64) for name, number in NUMBERS.items()}, {"x": SHAPE})
    assert kinds(model) == sorted(operator for operator, *_ in rows)


def test_what_continues_in_a_branch_stays():
    end = [helper.make_tensor_value_info("b", TensorProto.DOUBLE, SHAPE)]
    divide, keep = (
        helper.make_graph([helper.make_node(op, inputs, ["b"])], "branch", [], end)
        for op, inputs in (("Div", ["s", "6"]), ("Sin", ["x"]))
    )
    rows = [("Add", "x 3", "a"), ("Clip", "a 0 6", "s"), ("ReduceMax", "x", "m", {"keepdims": 0})]
    rows += [("Greater", "m 0", "c"), ("If", "c", "y", {"then_branch": divide, "else_branch": keep})]
    after, changes = rewritten(graph(rows, NUMBERS, {"x": SHAPE}), FOLDS)
    assert not changes
    assert sum(node.op_type == "Clip" for node in after.graph.node) == 1


@pytest.mark.parametrize("opset", [9, 13])
def test_a_folded_file_is_verified_and_exported_for_opset_13(opset):
    model = single(network([("Mul", "c s", "p"), ("Div", "p 6", "y")]))
    if opset < 11:  # where the limits of Clip are attributes
        (clip,) = (node for node in model.graph.node if node.op_type == "Clip")
        del clip.input[1:]
        clip.attribute.extend([helper.make_attribute("min", 0.0), helper.make_attribute("max", 6.0)])
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", opset))
    onnx.save(model, "net.onnx")
    done = rc.fold("net.onnx", out="run", measure=False)
    assert done.applied == ("hard-swish",)
    assert done.verdict == "passed"
    assert done.operators == {"Conv": 1, "HardSwish": 1}
    exported = rc.export("run", opset=13)
    assert exported.verdict == "passed"
    assert exported.operators == {"Conv": 1, "HardSigmoid": 1, "Mul": 1}
