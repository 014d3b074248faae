"""A float32 graph is folded in float64 and rounded once; where float32 rounding decides something, it is not."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, numpy_helper
from planted_graph_faults import F, Net

import repaconv as rc
from repaconv.graph.discrete_outputs import has_constant_decision
from repaconv.graph.element_type_conversion import as_float32
from repaconv.graph.float64_rewriting import (
    is_float64_convertible,
    is_only_rounded,
    rewritten_in_float64,
    rounded_to_float32,
)
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.verification.model_runners import load_onnx

RANDOM = np.random.default_rng(5)
HEAD = [("Relu", "r", "p"), ("GlobalAveragePool", "p", "g"), ("Flatten", "g", "f"), ("MatMul", "f head", "y")]
"""Its outputs are sums of positive numbers, so that FP32 decides what is equal."""


def conv_and_norm(channels: int = 6) -> dict[str, np.ndarray]:
    weights = {"w": RANDOM.standard_normal((channels, 4, 3, 3)), "b": RANDOM.standard_normal(channels)}
    norm = {"s": 1 + 0.3 * RANDOM.random(channels), "v": 0.5 + RANDOM.random(channels)}
    norm |= {name: RANDOM.standard_normal(channels) for name in "tm"}
    return weights | norm | {"head": 0.5 + RANDOM.random((channels, 5))}


def net(rows, **constants) -> onnx.ModelProto:
    first = [("Conv", "x w b", "c"), ("BatchNormalization", "c s t m v", "n")]
    weights = conv_and_norm() | constants
    return Net([*first, *rows, *HEAD], weights, {"x": (F, (1, 4, 12, 12))}, {"y": F}).model()


def resized() -> onnx.ModelProto:
    """As F.interpolate(scale_factor=0.7) is exported: 10 x 0.7 is 7 in float32, and 6.99 in float64."""
    rows = [
        ("Shape", "n", "shape"), ("Slice", "shape two four", "sizes"), ("Slice", "shape zero two", "others"),
        ("Cast", "sizes", "real", {"to": F}), ("Mul", "real scale", "scaled"), ("Floor", "scaled", "low"),
        ("Cast", "low", "whole", {"to": TensorProto.INT64}), ("Concat", "others whole", "target", {"axis": 0}),
        ("Resize", "n none none target", "r", {"mode": "nearest"}),
    ]  # fmt: skip
    places = {name: np.array([place]) for name, place in (("zero", 0), ("two", 2), ("four", 4))}
    return net(rows, scale=np.array(0.7), none=np.zeros(0), **places)


def fake_quantized() -> onnx.ModelProto:
    """Weights that are rounded to steps of 0.05 whenever the network runs; some are halfway between two in float32."""
    rows = [("Div", "k step", "q"), ("Round", "q", "i"), ("Mul", "i step", "l"), ("Conv", "n l", "r")]
    kernel = (RANDOM.integers(-20, 20, (6, 6, 1, 1)) + 0.5) * np.float64(np.float32(0.05))
    return net(rows, k=kernel, step=np.array(0.05))


def cut() -> onnx.ModelProto:
    """0.5 / 0.05 is 10 in float32, and 9.99 in float64: the end of a Slice."""
    rows = [("Div", "half part", "q"), ("Cast", "q", "end", {"to": TensorProto.INT64})]
    rows += [("Slice", "n zero end last", "r")]
    numbers = {"half": np.array([0.5]), "part": np.array([0.05]), "zero": np.array([0]), "last": np.array([3])}
    return net(rows, **numbers)


@pytest.mark.parametrize("made", [resized, fake_quantized, cut])
def test_what_float32_decides_of_constants_stays_as_it_is(made):
    model = made()
    assert has_constant_decision(model)
    onnx.save(model, "net.onnx")
    done = rc.fold("net.onnx", out="folded.onnx", measure=False)
    assert done.verdict == "passed"
    assert done.changes
    feeds = {"x": RANDOM.standard_normal((1, 4, 12, 12)).astype(np.float32)}
    before, after = (load_onnx(each).run(feeds)["y"] for each in (model, onnx.load("folded.onnx")))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)
    assert rc.verify().verdict == "passed"


def test_integers_and_what_depends_on_the_input_are_no_decisions_of_constants():
    rows = [
        ("Shape", "n", "shape"), ("Equal", "shape whole", "same"), ("Greater", "n four", "above"),
        ("Cast", "above", "mask", {"to": F}), ("Mul", "n mask", "r"),
    ]  # fmt: skip
    assert not has_constant_decision(net(rows, four=np.array(4.0), whole=np.array(4)))
    assert has_constant_decision(net([("Floor", "half", "low"), ("Mul", "n low", "r")], half=np.array(2.5)))


def test_the_written_graph_is_the_fold_in_float64_rounded_once():
    model = net([("Relu", "n", "r")])
    assert is_float64_convertible(model)
    fold, changes = rewritten_in_float64(model, FOLDS)
    assert changes
    written = rounded_to_float32(fold)
    exact = {weight.name: numpy_helper.to_array(weight) for weight in fold.model.graph.initializer}
    for weight in written.graph.initializer:
        if weight.data_type == F:
            np.testing.assert_array_equal(numpy_helper.to_array(weight), exact[weight.name].astype(np.float32))


def test_weights_that_no_rewrite_changes_keep_their_bytes():
    model = net([("Relu", "n", "r")], head=0.5 + RANDOM.random((6, 400)))
    fold, _ = rewritten_in_float64(model, FOLDS)
    assert list(fold.unchanged) == ["head"]
    given = next(weight for weight in model.graph.initializer if weight.name == "head")
    kept = next(weight for weight in rounded_to_float32(fold).graph.initializer if weight.name == "head")
    assert numpy_helper.to_array(kept).tobytes() == numpy_helper.to_array(given).tobytes()


def test_a_graph_is_only_rounded_if_every_constant_is_the_nearest_float32():
    """A fold in float64 rounded to float32 is; with one number or one attribute changed it is not."""
    random = np.random.default_rng(0)
    rows = [("Conv", "x w", "a"), ("BatchNormalization", "a s b m v", "c"), ("Softmax", "c", "y")]
    weights = {"w": random.standard_normal((40, 40, 1, 1)), "m": random.standard_normal(40)}
    weights |= {name: 0.5 + random.random(40) for name in "sbv"}
    model = Net(rows, weights, {"x": (F, (1, 40, 2, 2))}, {"y": F}).model()
    exact, changes = rewritten_in_float64(model, FOLDS)
    assert changes
    written = rounded_to_float32(exact)
    assert is_only_rounded(written, exact)

    def changed(how) -> onnx.ModelProto:
        other = onnx.ModelProto()
        other.CopyFrom(written)
        how(other)
        return other

    def by_one_unit(place: int, towards: float):
        def how(model: onnx.ModelProto) -> None:
            bias = next(weight for weight in model.graph.initializer if list(weight.dims) == [40])
            numbers = numpy_helper.to_array(bias).copy()
            numbers[place] = np.nextafter(numbers[place], np.float32(towards))
            bias.CopyFrom(numpy_helper.from_array(numbers, bias.name))

        return how

    def of_another_axis(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "Softmax")
        del node.attribute[:]
        node.attribute.append(onnx.helper.make_attribute("axis", 2))

    def of_another_type(model: onnx.ModelProto) -> None:
        weight = model.graph.initializer[0]
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).astype(np.float64), weight.name))

    def of_another_opset(model: onnx.ModelProto) -> None:
        model.opset_import[0].version -= 1

    def with_another_output(model: onnx.ModelProto) -> None:
        model.graph.output[0].name = model.graph.node[0].output[0]

    assert is_only_rounded(changed(lambda model: None), exact)
    units = [by_one_unit(place, towards) for place in range(40) for towards in (-np.inf, np.inf)]
    for how in (*units, of_another_axis, of_another_type, of_another_opset, with_another_output):
        assert not is_only_rounded(changed(how), exact)
    large = dict(exact.weights)
    assert large  # the kernel of 1,600 numbers is held apart
    for factor in (1e-42, 1e40):  # more is lost of subnormal numbers, and all of what overflows
        weights = {name: ir.tensor(weight.numpy() * factor) for name, weight in large.items()}
        other = exact._replace(weights=weights, unchanged={})
        with np.errstate(over="ignore"):
            assert not is_only_rounded(rounded_to_float32(other), other)


def test_numbers_beyond_float32_become_its_largest_and_others_the_nearest():
    most = float(np.finfo(np.float32).max)
    given = np.array([[1e300, -1e300, most * (1 + 2**-24)], [np.inf, -np.inf, np.nan], [0.1, -0.0, 1e-46]])
    found = as_float32(given)
    np.testing.assert_array_equal(found, np.float32([[most, -most, most], [np.inf, -np.inf, np.nan], [0.1, 0, 0]]))
    assert found.dtype == np.float32
    assert as_float32(np.array(-1e300)) == np.float32(-most)
