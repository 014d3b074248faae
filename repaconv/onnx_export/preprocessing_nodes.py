"""Add the checkpoint's input normalization to a graph as its first nodes, or remove it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from repaconv.graph.onnx_files import NewNames, dims_of
from repaconv.results import Preprocessing

if TYPE_CHECKING:
    import onnx

INPUT = "image"
SCOPE = "preprocessing"


def with_preprocessing(model: onnx.ModelProto, wanted: Preprocessing) -> onnx.ModelProto:
    """Put normalization in front of a graph: its new input is ``image`` [B, H, W, C] in uint8, RGB.

    Resizing and cropping are not included: no runtime's Resize gives the same numbers as Pillow, which was used in
    training.

    Args:
        model: A graph with one float input [B, C, H, W]; it is not modified.
        wanted: Mean and std on the 0..255 scale, and the channel order of the network.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    names = NewNames(model.graph)
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    graph = whole.graph
    network = graph.input[0]
    pixels = names.value(INPUT if network.name != INPUT else "pixels")
    batch, channels, height, width = dims_of(network)
    swapped = wanted.channel_order == "BGR" and channels == 3
    constants = {
        "mean": np.asarray(wanted.mean, dtype=np.float32),
        "std": np.asarray(wanted.std, dtype=np.float32),
        **({"bgr": np.asarray([2, 1, 0])} if swapped else {}),
    }
    named = {name: names.value(f"{SCOPE}.{name}") for name in constants}
    graph.initializer.extend(numpy_helper.from_array(value, named[name]) for name, value in constants.items())
    steps = [
        *([("Gather", [named["bgr"]], {"axis": 3})] if swapped else []),
        ("Cast", [], {"to": TensorProto.FLOAT}),
        ("Sub", [named["mean"]], {}),
        ("Div", [named["std"]], {}),
        ("Transpose", [], {"perm": [0, 3, 1, 2]}),
    ]
    value, nodes = pixels, []
    for number, (operator, more, attributes) in enumerate(steps):
        output = network.name if number == len(steps) - 1 else names.value(f"{SCOPE}.{number}")
        name = names.node(f"{SCOPE}/{operator}_{number}")
        nodes.append(helper.make_node(operator, [value, *more], [output], name, **attributes))
        value = output
    old = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *old])
    shape = [batch, height, width, channels]
    network.CopyFrom(helper.make_tensor_value_info(pixels, TensorProto.UINT8, shape))
    return whole


def without_preprocessing(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove the preprocessing nodes; the input is again [B, C, H, W] in float32, with its own name."""
    import onnx
    from onnx import TensorProto, helper

    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    graph = bare.graph
    # they come first, and end with the Transpose; modules of the network may be named alike
    count = next(place for place, node in enumerate(graph.node, 1) if node.op_type == "Transpose")
    name = graph.node[count - 1].output[0]
    del graph.node[:count]
    batch, height, width, channels = dims_of(graph.input[0])
    shape = [batch, channels, height, width]
    graph.input[0].CopyFrom(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    return bare
