"""Add the checkpoint's input normalization to a graph as its first nodes, or remove it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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

    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    graph = whole.graph
    network = graph.input[0]
    pixels = INPUT if network.name != INPUT else "pixels"
    batch, channels, height, width = (d.dim_param or d.dim_value for d in network.type.tensor_type.shape.dim)
    swapped = wanted.channel_order == "BGR" and channels == 3
    constants = {
        "mean": np.asarray(wanted.mean, dtype=np.float32),
        "std": np.asarray(wanted.std, dtype=np.float32),
        **({"bgr": np.asarray([2, 1, 0])} if swapped else {}),
    }
    graph.initializer.extend(numpy_helper.from_array(value, f"{SCOPE}.{name}") for name, value in constants.items())
    steps = [
        *([("Gather", [f"{SCOPE}.bgr"], {"axis": 3})] if swapped else []),
        ("Cast", [], {"to": TensorProto.FLOAT}),
        ("Sub", [f"{SCOPE}.mean"], {}),
        ("Div", [f"{SCOPE}.std"], {}),
        ("Transpose", [], {"perm": [0, 3, 1, 2]}),
    ]
    value, nodes = pixels, []
    for number, (operator, more, attributes) in enumerate(steps):
        output = network.name if number == len(steps) - 1 else f"{SCOPE}.{number}"
        nodes.append(helper.make_node(operator, [value, *more], [output], f"{SCOPE}/{operator}_{number}", **attributes))
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
    last = next(node for node in reversed(graph.node) if node.name.startswith(f"{SCOPE}/"))
    batch, height, width, channels = (d.dim_param or d.dim_value for d in graph.input[0].type.tensor_type.shape.dim)
    kept = [node for node in graph.node if not node.name.startswith(f"{SCOPE}/")]
    del graph.node[:]
    graph.node.extend(kept)
    shape = [batch, channels, height, width]
    graph.input[0].CopyFrom(helper.make_tensor_value_info(last.output[0], TensorProto.FLOAT, shape))
    return bare
