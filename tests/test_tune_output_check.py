"""The check of outputs in `tune`: correct configurations pass and wrong ones do not, also if outputs are tiny."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import repaconv as package
from repaconv.core import run_folder
from repaconv.core.errors import Refused, UsageProblem
from repaconv.results import Deployment
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.shared.input_selection import choose_inputs
from repaconv.stages.shared.preset_choice import open_deployment
from repaconv.stages.tune.candidate_graphs import Candidates
from repaconv.stages.tune.output_check import PLANTED_FAULT, OutputCheck
from repaconv.verification.input_batches import npz_inputs
from repaconv.verification.model_runners import load_onnx
from repaconv.verification.rounding import moved_weights

BASELINE = Deployment(target="x86-64", runtime="onnxruntime", rewrites=())
OTHER = Deployment(target="x86-64-openvino", runtime="openvino", rewrites=())
RUNNABLE = BASELINE.model_copy(update={"settings": ("another=1",)})
TAILS = {
    # of the last convolution's outputs, which are about normal: operators up to the output
    "ordinary": (),
    "tiny on noise": (("Add", -16.0), ("Sigmoid", None)),
    "tiny on all inputs": (("Tanh", None), ("Add", -14.0), ("Sigmoid", None)),
    "saturated on all inputs": (("Tanh", None), ("Add", 60.0), ("Sigmoid", None)),
}


def network(tail: str) -> onnx.ModelProto:
    """Two convolutions and a tail."""
    random = np.random.default_rng(0)
    weights = {
        "first": random.standard_normal((8, 3, 3, 3)) / 5,
        "second": random.standard_normal((2, 8, 3, 3)) / 5,
        "offset": random.standard_normal(2),
    }
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["a"], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "second", "offset"], ["value 0"], pads=[1] * 4),
    ]
    for place, (kind, number) in enumerate(TAILS[tail]):
        inputs = [f"value {place}"]
        if number is not None:
            inputs.append(f"number {place}")
            weights[inputs[1]] = np.full(1, number)
        nodes.append(helper.make_node(kind, inputs, [f"value {place + 1}"]))
    nodes[-1].output[0] = "scores"
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 16, 16])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 2, 16, 16])],
        [numpy_helper.from_array(each.astype(np.float32), name) for name, each in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def check_of(model: onnx.ModelProto, scratch: Path, images: str | None = None) -> OutputCheck:
    onnx.save(model, "network.onnx")
    package.fold("network.onnx", out="run", force=True)
    source_model = source_model_of(run_folder.Run(Path("run")))
    given = choose_inputs(source_model, inputs=images) if images else None
    return OutputCheck(Candidates(source_model, (), None, scratch, lambda *_: None), BASELINE, given)


def refusal(check: OutputCheck, model: onnx.ModelProto) -> str:
    """Why a graph may not stand for the baseline."""
    refused = check.refusal(RUNNABLE, load_onnx(model), None)
    return refused.code if refused else ""


def moved(model: onnx.ModelProto) -> onnx.ModelProto:
    return moved_weights(model, PLANTED_FAULT, seed=3)


def scaled(model: onnx.ModelProto) -> onnx.ModelProto:
    """The output times 1.01."""
    last = model.graph.node[-1]
    last.output[0] = "unscaled"
    model.graph.initializer.append(numpy_helper.from_array(np.full(1, 1.01, np.float32), "factor"))
    model.graph.node.append(helper.make_node("Mul", ["unscaled", "factor"], ["scores"]))
    return model


def shifted(model: onnx.ModelProto) -> onnx.ModelProto:
    """One bias of the last convolution off by 1%."""
    offset = next(each for each in model.graph.initializer if each.name == "offset")
    numbers = numpy_helper.to_array(offset).copy()
    numbers[1] *= 1.01
    offset.CopyFrom(numpy_helper.from_array(numbers, "offset"))
    return model


def nothing(model: onnx.ModelProto) -> onnx.ModelProto:
    """Zeros, which are near to outputs that are tiny."""
    last = model.graph.node[-1]
    last.output[0] = "unused"
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), "zero"))
    model.graph.node.append(helper.make_node("Mul", ["unused", "zero"], ["scores"]))
    return model


@pytest.mark.parametrize("fault", [moved, scaled, shifted, nothing])
@pytest.mark.parametrize("tail", TAILS)
def test_a_wrong_configuration_is_rejected_also_where_outputs_are_tiny(
    tail: str, fault: Callable[[onnx.ModelProto], onnx.ModelProto], tmp_path: Path
):
    check = check_of(network(tail), tmp_path)
    assert refusal(check, fault(network(tail))) in ("tune.wrong", "tune.undecided")
    if tail != "saturated on all inputs":  # there, nothing can be said of what is right either
        assert refusal(check, network(tail)) == ""


@pytest.mark.parametrize("tail", [name for name in TAILS if not name.startswith("saturated")])
def test_another_runtime_is_right_where_outputs_are_so_small_that_the_baselines_sigmoid_is_off(
    tail: str, tmp_path: Path
):
    pytest.importorskip("openvino", reason="OpenVINO is absent")
    check = check_of(network(tail), tmp_path)
    path, sizes = check.graphs.path(OTHER), check.graphs.sizes(1)
    assert check.refusal(OTHER, open_deployment(OTHER, path, sizes), 1) is None
    for fault in (moved, scaled, shifted, nothing):
        onnx.save(fault(network(tail)), "wrong.onnx")
        refused = check.refusal(OTHER, open_deployment(OTHER, Path("wrong.onnx"), sizes), 1)
        assert isinstance(refused, Refused), fault


def test_the_images_that_are_given_decide_and_others_only_where_those_cannot(tmp_path: Path):
    random = np.random.default_rng(1).standard_normal((5, 3, 16, 16)).astype(np.float32)
    np.savez("loud.npz", input=30 * random)
    np.savez("quiet.npz", input=random)
    model = network("tiny on noise")
    loud, quiet = (check_of(model, tmp_path, f"{name}.npz") for name in ("loud", "quiet"))
    for check in (loud, quiet):
        assert refusal(check, model) == ""
        assert refusal(check, moved(model)) == "tune.wrong"
    given = npz_inputs(Path("loud.npz")).images
    assert len(loud._batches) == 1
    assert all(any((image == one).all() for one in given) for image in loud._batches[0].call.images)
    assert len(quiet._batches) > 1


def test_tune_compares_on_given_images_without_a_budget_for_losses_and_knows_them_apart(repaconv, tmp_path: Path):
    onnx.save(network("ordinary"), "network.onnx")
    random = np.random.default_rng(1).standard_normal((5, 3, 16, 16)).astype(np.float32)
    for place, name in enumerate("ab"):
        np.savez(f"{name}.npz", input=random + place)
    np.savez("other.npz", input=random[..., :8])
    asked = {"runtimes": ["onnxruntime"], "rounds": 2}
    first = package.tune("network.onnx", inputs="a.npz", **asked)
    assert first.images.startswith("a.npz (5 images): outputs")
    assert package.tune("network.onnx", inputs="a.npz", **asked).note
    assert not package.tune("network.onnx", inputs="b.npz", **asked).note
    assert not package.tune("network.onnx", **asked).note
    with pytest.raises(UsageProblem, match="16 x 16"):
        package.tune("network.onnx", inputs="other.npz", **asked)
    code, _, err = repaconv("tune", "network.onnx", "--inputs", "gone.npz")
    assert (code, "there is no file gone.npz" in err) == (4, True)
    assert repaconv("tune", "network.onnx", "--labels", "gone.json")[0] == 2
