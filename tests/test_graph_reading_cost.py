"""What reading a graph leaves out because it takes time, and that this changes no result."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from repaconv.graph import shape_folding
from repaconv.graph.channel_axes import IMAGE
from repaconv.graph.models_in_onnx_ir import read
from repaconv.graph.nodes_and_constants import OPAQUE, constant, shape_of_constant
from repaconv.rewrites.fold.linear_graph_from_onnx import linear_graph


def _graph(nodes, weights, given, gives) -> ir.Model:
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, given)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, gives)]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "net", inputs, outputs, stored)
    return read(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))


def _product() -> ir.Model:
    array = np.ones((8, 4), np.float32)
    return _graph([helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": array}, [2, 8], [2, 4])


def test_the_shape_of_a_constant_is_known_wherever_its_numbers_are():
    model = _product()
    weight, data = model.graph.initializers["w"], model.graph.inputs[0]
    assert shape_of_constant(weight) == constant(weight).shape == (8, 4)
    assert shape_of_constant(data) is constant(data) is None
    assert shape_of_constant(None) is constant(None) is None
    weight.meta[OPAQUE] = True
    assert shape_of_constant(weight) is constant(weight) is None


def test_numbers_in_float64_are_not_copied_and_cannot_be_changed():
    model, double = _product(), np.ones((8, 4))
    weight = model.graph.initializers["w"]
    weight.const_value = ir.tensor(double)
    assert np.shares_memory(constant(weight), double)
    assert double.flags.writeable
    assert not constant(weight).flags.writeable


def test_weights_are_not_read_along_an_axis_on_which_they_do_not_act():
    model = _product()
    shape = ir.Shape([8, 4])

    def unread() -> ir.TensorProtocol:
        raise AssertionError

    model.graph.initializers["w"].const_value = ir.LazyTensor(unread, ir.DataType.FLOAT, shape)
    linear_graph(model, IMAGE)


def test_an_identity_of_a_weight_is_not_evaluated(monkeypatch):
    nodes = [helper.make_node("Identity", ["w"], ["v"]), helper.make_node("MatMul", ["x", "v"], ["y"])]
    array = np.arange(32, dtype=np.float32).reshape(8, 4)
    model = _graph(nodes, {"w": array}, [2, 8], [2, 4])
    monkeypatch.setattr(shape_folding, "reference_output", None)
    shape_folding.fold_shapes(model)
    (product,) = model.graph
    assert np.array_equal(product.inputs[1].const_value.numpy(), array)
