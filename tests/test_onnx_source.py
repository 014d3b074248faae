"""ONNX models as other exporters write them: images with channels last, weights that are inputs, old opsets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import repaconv as rc
from repaconv.core.errors import UsageProblem
from repaconv.sources.fold_size_reverts import Kept
from repaconv.stages.fold.text import show_fold
from repaconv.verification.graph_with_cached_outputs import Evaluated


def written(nodes, shapes, held, opset, inputs=(), ir_version=4):
    """A file of x to y; ``inputs`` are weights that are listed as inputs as well."""
    weights = [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in held.items()]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]) for name in "xy"]
    more = [helper.make_tensor_value_info(name, TensorProto.FLOAT, np.shape(held[name])) for name in inputs]
    graph = helper.make_graph(nodes, "given", [ports[0], *more], ports[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    onnx.save(model, "net.onnx")
    return "net.onnx"


def test_images_with_channels_last_are_inputs_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["t", "w"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    held = {"w": np.random.default_rng(0).standard_normal((5, 3, 3, 3))}
    done = rc.fold(written(nodes, {"x": [1, 8, 9, 3], "y": [1, 5]}, held, 13, ir_version=8), out="run")
    assert done.image_size is None
    (tmp_path / "images").mkdir()
    with pytest.raises(UsageProblem, match="takes no images"):
        rc.verify("run", images="images")
    assert rc.verify("run").verdict == "passed"


def test_an_old_graph_is_verified_and_its_nodes_are_those_of_the_file(tmp_path, monkeypatch, capfd):
    """Of Clip and Upsample the converter makes more; statistics that are inputs are nothing to warn of."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0).standard_normal
    held = {"w": draw((4, 3, 3, 3)), "s": 1 + 0.1 * draw(4), "b": draw(4), "m": draw(4), "v": 1 + draw(4) ** 2}
    held |= {"u": [1, 1, 2, 2], "count": [0.0, 0.0]}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"]),
        helper.make_node("Clip", ["n"], ["k"], min=0.0, max=6.0),
        helper.make_node("Upsample", ["k", "u"], ["y"], mode="linear"),
    ]
    file = written(nodes, {"x": [1, 3, 8, 8], "y": [1, 4, 12, 12]}, held, 9, inputs=("w", "s", "b", "m", "v", "count"))
    done = rc.fold(file, out="run", measure=False)
    assert "Skipped" not in capfd.readouterr().err
    assert done.changes
    assert done.nodes[0] == 4
    assert done.float64
    assert rc.verify("run").verdict == "passed"
    assert rc.export("run", onnx="out.onnx").verdict == "passed"
    places = "; ".join(f"Conv_{number} behind c" for number in range(14))
    show_fold(done.model_copy(update={"not_folded": (f"they stand so: {places}",)}))
    shown = " ".join(capfd.readouterr().out.split())
    assert "Conv_9 behind c; and 4 more, with -v" in shown
    assert "Conv_10" not in shown


def images_of_any_size(nodes, held, *, channels="num_channels", name="net.onnx"):
    """A file of x [batch_size, channels, height, width] to y, as Optimum declares the images of all networks."""
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()]
    shape = ["batch_size", channels, "height", "width"]
    ports = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    ports += [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    made = [helper.make_node(op, read.split(), [out], **how) for op, read, out, how in nodes]
    graph = helper.make_graph(made, "given", ports[:1], ports[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), name)
    return name


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def dims_of_input(path):
    return [dim.dim_value or dim.dim_param for dim in onnx.load(path).graph.input[0].type.tensor_type.shape.dim]


@pytest.mark.parametrize(("read", "reads", "channels"), [
    ([], "x", 3),
    ([("Relu", "x", "r", {})], "r", 3),
    ([("Sub", "x one", "r", {})], "r", 3),
    ([("Sub", "x mean", "r", {})], "r", "num_channels"),  # which takes images of one channel, too
])  # fmt: skip
def test_channels_of_which_a_convolution_takes_one_number_are_fixed(tmp_path, monkeypatch, read, reads, channels):
    monkeypatch.chdir(tmp_path)
    nodes = [*read, ("Conv", f"{reads} w", "c", {}), ("Mul", "c s", "y", {})]
    held = {"w": normal(4, 3, 3, 3), "s": normal(4, 1, 1), "mean": normal(1, 3, 1, 1), "one": normal(1, 1, 1)}
    done = rc.fold(images_of_any_size(nodes, held), out="run", measure=False)
    assert done.verdict == "passed"
    assert dims_of_input("run/net.folded.onnx") == ["batch_size", channels, "height", "width"]
    assert (done.image_size, done.any_image_size) == ((224, 224), True) if channels == 3 else (None, False)


def test_a_name_that_two_dimensions_have_is_not_fixed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nodes = [("Conv", "x w", "c", {}), ("Mul", "c s", "y", {})]
    file = images_of_any_size(nodes, {"w": normal(4, 3, 3, 3), "s": normal(4, 1, 1)}, channels="height")
    done = rc.fold(file, out="run", measure=False)
    assert done.verdict == "passed"
    assert dims_of_input("run/net.folded.onnx") == ["batch_size", "height", "height", "width"]


RESHAPED = [
    *(("Conv", "x w", "c", {"strides": [2, 2]}), ("Relu", "c", "r", {}), ("Mul", "r scale", "m", {})),
    *(("Shape", "m", "s", {}), ("Gather", "s zero", "n", {}), ("Gather", "s two", "h", {})),
    *(("Gather", "s three", "v", {}), ("Mod", "h one", "rest", {}), ("Sub", "h rest", "same", {})),
    *(("Concat", "n four same v", "shape", {"axis": 0}), ("Reshape", "m shape", "image", {})),
    ("Conv", "image u", "y", {}),
]
"""A scaled image that is reshaped to its own shape, which nothing says before its size is known."""


def reshaped_image(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    held = {"w": normal(4, 3, 3, 3), "scale": normal(4, 1, 1), "u": normal(5, 4, 1, 1)}
    held |= {name: np.array([n]) for name, n in (("zero", 0), ("one", 1), ("two", 2), ("three", 3), ("four", 4))}
    done = rc.fold(images_of_any_size(RESHAPED, held), out="run", measure=False)
    assert done.verdict == "passed"
    assert {"Mul", "Reshape"} <= done.operators.keys()


def test_a_graph_is_folded_again_where_the_export_fixes_the_size_of_its_images(tmp_path, monkeypatch):
    reshaped_image(tmp_path, monkeypatch)
    done = rc.export("run", image_size=(17, 25), preset="official")
    assert "folded again at 17x25 pixels: affine" in done.links[0].note
    assert "Mul" not in done.operators
    assert rc.verify("run").verdict == "passed"
    assert "folded again" not in rc.export("run", preset="official").links[0].note


def test_a_graph_is_folded_again_without_the_file_that_was_folded(tmp_path, monkeypatch):
    reshaped_image(tmp_path, monkeypatch)
    Path("net.onnx").unlink()
    assert "folded again at 17x25 pixels: affine" in rc.export("run", image_size=(17, 25)).links[0].note


def test_a_graph_that_is_wrong_when_it_is_folded_again_is_exported_as_it_is(tmp_path, monkeypatch):
    from repaconv.sources import onnx_source

    reshaped_image(tmp_path, monkeypatch)

    def wrong(given, before, refold, reverts):
        found = onnx_source.folded(Path("net.onnx"), before.model)
        for weight in found.model.graph.initializer:
            if weight.name == "w":
                weight.CopyFrom(numpy_helper.from_array(1.01 * numpy_helper.to_array(weight), "w"))
        return Kept(Evaluated(found.model), found.changes)

    monkeypatch.setattr(onnx_source, "fold_no_larger", wrong)
    done = rc.export("run", image_size=(17, 25), preset="official")
    assert done.verdict == "passed"
    assert "not folded again at this size" in done.links[0].note
    assert rc.verify("run").verdict == "passed"
