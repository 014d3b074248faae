"""Transposes that are split into steps: every permutation gives the same numbers, and only slow ones are changed."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from repaconv.graph import models_in_onnx_ir
from repaconv.rewrites.speed import split_transposes
from repaconv.rewrites.speed.split_transposes import TRANSPOSE_IN_STEPS

FLOAT = TensorProto.FLOAT


def transposed(shape, perm, kind=FLOAT, *, behind=(), opset=17) -> onnx.ModelProto:
    """A graph of one Transpose, whose shape may have a name; operators behind it are applied to its output."""
    chain = [helper.make_node("Transpose", ["x"], ["y"], perm=perm), *behind]
    graph = helper.make_graph(
        chain,
        "net",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info(chain[-1].output[0], kind, [shape[axis] for axis in perm])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def rewritten(model) -> tuple[onnx.ModelProto, int]:
    found, changes = models_in_onnx_ir.rewritten(model, (TRANSPOSE_IN_STEPS,))
    onnx.checker.check_model(found, full_check=True)
    return found, len(changes)


def session(model) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def kernels(model, tmp_path) -> list[str]:
    """The operators that ONNX Runtime runs."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]


@pytest.mark.parametrize(
    "shape", [(5, 2, 3, 4, 7), (2, 1, 3, 1, 4), (1, 6, 2, 2, 5), (3, 4, 4, 2, 1), ("n", 2, 1, 3, 4)]
)
def test_every_order_of_axes_gives_the_same_numbers(shape, monkeypatch):
    monkeypatch.setattr(split_transposes, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(split_transposes, "MIN_ROW", 1)
    sizes = [3 if size == "n" else size for size in shape]
    x = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
    changed = 0
    for perm in permutations(range(5)):
        found, changes = rewritten(transposed(shape, perm))
        changed += changes
        np.testing.assert_array_equal(session(found).run(None, {"x": x})[0], x.transpose(perm))
    assert changed >= 24


@pytest.mark.parametrize("axis", range(4))
def test_the_dynamic_size_may_be_any(axis, monkeypatch):
    monkeypatch.setattr(split_transposes, "MIN_ELEMENTS", 1)
    shape = [4, 5, 6, 7]
    x = np.arange(840, dtype=np.float32).reshape(shape)
    shape[axis] = "n"
    for perm in permutations(range(4)):
        found, _ = rewritten(transposed(shape, perm))
        np.testing.assert_array_equal(session(found).run(None, {"x": x})[0], x.transpose(perm))


@pytest.mark.parametrize(
    ("shape", "perm"),
    [
        ((1, 64, 8, 7, 8, 7), (0, 2, 4, 3, 5, 1)),  # windows of an image
        ((1, 8, 8, 7, 7, 64), (0, 5, 3, 1, 4, 2)),  # an image of windows
        ((1, 3, 4, 4, 64, 64), (0, 1, 4, 2, 5, 3)),  # a pixel shuffle
        ((2, 197, 3, 12, 64), (2, 0, 3, 4, 1)),  # queries, keys and values
    ],
)
def test_onnx_runtime_does_not_join_the_steps_again(shape, perm, tmp_path):
    found, changes = rewritten(transposed(shape, perm))
    assert changes == 1
    assert kernels(found, tmp_path).count("Transpose") == 2
    assert kernels(transposed(shape, perm), tmp_path).count("Transpose") == 1


@pytest.mark.parametrize(
    ("shape", "perm"),
    [
        ((8, 197, 12, 64), (0, 2, 1, 3)),  # rows
        ((8, 197, 12, 64), (0, 2, 3, 1)),  # one axis
        ((8, 197, 12, 64), (0, 3, 1, 2)),  # one axis
        ((8, 12, 197, 64), (0, 1, 3, 2)),  # matrices
        ((2, 3, 4, 5), (3, 1, 2, 0)),  # few elements
        ((64, 2, 64, 2, 2), (4, 2, 0, 3, 1)),  # rows of 2 elements
        (("n", "m", 64, 64), (3, 1, 2, 0)),  # two dynamic sizes
    ],
)
def test_what_is_fast_or_unknown_stays(shape, perm):
    assert rewritten(transposed(shape, perm))[1] == 0


def test_one_step_is_enough_without_axes_of_size_1():
    """ONNX Runtime sees that neighbors stay neighbors, but not across an axis of size 1."""
    found, changes = rewritten(transposed((1, 64, 1, 14, 64), (4, 0, 2, 1, 3)))
    assert changes == 1
    assert [node.op_type for node in found.graph.node] == ["Reshape", "Transpose", "Reshape"]
    assert rewritten(transposed((64, 14, 8, 48), (2, 3, 0, 1)))[1] == 0
    assert rewritten(transposed((4, 64, 14, 8, 48), (0, 3, 4, 1, 2)))[1] == 0


def test_types_and_opsets_without_kernels_stay():
    """ONNX Runtime transposes float8, but has no Flatten for it."""
    shape, perm = (1, 32, 7, 7, 8), (0, 4, 3, 2, 1)
    assert rewritten(transposed(shape, perm, TensorProto.FLOAT8E4M3FN, opset=21))[1] == 0
    assert rewritten(transposed(shape, perm, TensorProto.INT4, opset=21))[1] == 0
    assert rewritten(transposed(shape, perm, TensorProto.INT64, opset=8))[1] == 0
    assert rewritten(transposed(shape, perm, TensorProto.INT64, opset=9))[1] == 1


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.INT64, TensorProto.UINT8])
def test_other_types(kind):
    x = np.arange(12544).reshape(1, 32, 7, 7, 8).astype(helper.tensor_dtype_to_np_dtype(kind))
    found, changes = rewritten(
        transposed(x.shape, (0, 4, 3, 2, 1), kind, behind=[helper.make_node("Identity", ["y"], ["z"])])
    )
    assert changes == 1
    np.testing.assert_array_equal(session(found).run(None, {"x": x})[0], x.transpose(0, 4, 3, 2, 1))


@pytest.mark.parametrize("mode", ["CRD", "DCR"])
@pytest.mark.parametrize(("shape", "side"), [((1, 48, 16, 20), 4), ((2, 27, 9, 12), 3), (("n", 12, 32, 16), 2)])
def test_a_depth_to_space_is_a_transpose(shape, side, mode, tmp_path):
    batch, channels, height, width = shape
    out = [batch, channels // side**2, side * height, side * width]
    graph = helper.make_graph(
        [helper.make_node("DepthToSpace", ["x"], ["y"], blocksize=side, mode=mode)],
        "net",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", FLOAT, out)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    found, changed = rewritten(model)
    assert changed == 1
    assert kernels(found, tmp_path).count("Transpose") == 2
    x = np.random.default_rng(0).standard_normal([3 if size == "n" else size for size in shape]).astype(np.float32)
    before, after = (session(each).run(None, {"x": x})[0] for each in (model, found))
    assert np.array_equal(before, after)


@pytest.mark.parametrize("shape", [(1, "c", 32, 32), (1, 12, "h", "w"), (1, 12, 8, 8)])
def test_a_depth_to_space_of_unknown_channels_of_two_unknown_sizes_or_of_few_pixels_stays(shape):
    graph = helper.make_graph(
        [helper.make_node("DepthToSpace", ["x"], ["y"], blocksize=2)],
        "net",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", FLOAT, [1, "d", "p", "q"])],
    )
    assert rewritten(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10))[1] == 0
