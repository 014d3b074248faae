"""One wrong element in a layer: the divergence is located there, in torch, in a graph, or between two graphs."""

from __future__ import annotations

import copy
import re
from functools import cache

import numpy as np
import onnx
import pytest
import torch
from conftest import TINY, one_net_a_method
from onnx import numpy_helper

from repaconv.core import plugins
from repaconv.core.errors import Refused, UsageProblem
from repaconv.methods.nondeep.published_models import example_meta
from repaconv.methods.riformer import METHOD as RIFORMER
from repaconv.testing import assert_parity
from repaconv.verification.divergence_location import locate
from repaconv.verification.input_batches import random_inputs
from repaconv.verification.model_runners import OnnxValues, TorchRunner, TorchValues, load_onnx

# (net, layer, weight): each kind of layer that deploy forms have
PLANTED = [
    ("repavit-tiny", "patch_embed.proj", "weight"),
    ("repavit-tiny", "norm_pre", "weight"),
    ("repavit-tiny", "blocks.0.attn.qkv", "weight"),
    ("repavit-tiny", "blocks.1.attn.proj", "bias"),
    ("repavit-tiny", "blocks.1.mlp.idle", "weight"),
    ("repavit-tiny", "blocks.2.mlp.fc1", "weight"),
    ("repavit-tiny", "blocks.2.mlp.fc2", "weight"),
    ("repavit-tiny", "head", "weight"),
    ("repavit-tiny-swin", "patch_embed.norm", "bias"),
    ("repavit-tiny-swin", "layers.0.downsample.reduction", "weight"),
    ("repavit-tiny-swin", "layers.1.blocks.1.attn.qkv", "bias"),
    ("repavit-tiny-poolformer", "network.0.0.mlp.fc1", "weight"),
    ("repavit-tiny-poolformer", "network.0.1.mlp.idle", "bias"),
    ("repavit-tiny-mixer", "blocks.1.mlp_tokens.fc1", "weight"),
    ("riformer", "network.2.1.mlp.fc2", "weight"),
    ("riformer", "network.1.proj", "weight"),
    ("riformer", "head", "bias"),
    ("dwconv-tiny", "blocks.0.attn.dw", "weight"),
    ("nondeep-tiny", "blocks.1.attn.qkv", "weight"),
    ("pyra-tiny", "blocks.0.merge.modulation.channels", "weight"),
    ("pyra-tiny", "blocks.2.attn.kv", "weight"),
    ("repconv-tiny-repvgg", "stage2.0.rbr_reparam", "weight"),
    ("repconv-tiny-mobileone", "stage3.2.reparam_conv", "bias"),
    ("repconv-tiny-mobileone", "stage4.1.se.expand", "weight"),
]
SETTINGS = {"repavit-tiny": {"num_heads": "3"}, "dwconv-tiny": {"num_heads": "3"}, "pyra-tiny": {"num_heads": "3"}}
SETTINGS["repavit-tiny-poolformer"] = {"pool_size": "3"}


@cache
def net(name):
    """The deploy form of an example, its weights in float64, and two images."""
    import tempfile
    from pathlib import Path

    from repaconv.checkpoints import read_checkpoint

    method_name, _, arch = name.partition("-")
    method = plugins.load(plugins.METHODS, method_name)
    weights = RIFORMER.example(TINY, seed=3) if name == "riformer" else method.example(arch, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.pth"
        meta = example_meta() if method_name == "nondeep" else {}
        args = {"img_size": 32} if method_name in ("riformer", "repconv") else {}
        torch.save({"state_dict": weights, "meta": meta, "args": args}, path)
        form = method.read(read_checkpoint(path), SETTINGS.get(name, {}))
        folded = {key: value.clone() for part in form.parts() for key, value in part.tensors.items()}
    backbone = plugins.load(plugins.BACKBONES, form.backbone)
    size = backbone.image_size(form.config, form.preprocessing.image_size)
    images = random_inputs((form.config.in_channels, *size), count=2, seed=0).images
    return lambda: backbone.deploy(form.config), folded, images


def one_wrong(weights, key):
    wrong = {name: value.clone() for name, value in weights.items()}
    flat = wrong[key].view(-1)
    flat[flat.numel() // 2] += 3 * flat.abs().max() + 1
    return wrong


@pytest.mark.parametrize(("name", "layer", "weight"), PLANTED, ids=[f"{n}:{layer}" for n, layer, _ in PLANTED])
def test_one_wrong_element_is_found_in_torch(name, layer, weight):
    build, weights, images = net(name)
    right = TorchRunner(build(), weights, double=True)
    wrong = TorchRunner(build(), one_wrong(weights, f"{layer}.{weight}"), double=False)
    found = locate(TorchValues(right), TorchValues(wrong), [{"input": images}], allowed=1e-5)
    assert found.module == layer, found.reason


@cache
def graph(name):
    from repaconv.onnx_export.torch_exporter import to_onnx

    build, weights, images = net(name)
    runner = TorchRunner(build(), weights, double=False)
    return to_onnx(
        runner.module, images.shape[1:], output="logits", opset=20, batch=len(images), dynamic_size=False
    ), runner


def in_graph(model, layer):
    """The graph with one wrong element in a constant of that layer; None if the exporter gave the layer none."""
    wrong = copy.deepcopy(model)
    constants = {
        weight.name: weight for weight in wrong.graph.initializer if weight.data_type == onnx.TensorProto.FLOAT
    }
    for node in wrong.graph.node:
        if node.name.rpartition("/")[0] == layer:
            for name in node.input:
                if name in constants and np.prod(constants[name].dims) > 1:
                    values = numpy_helper.to_array(constants[name]).copy()
                    values.flat[values.size // 2] += 3 * np.abs(values).max() + 1
                    constants[name].CopyFrom(numpy_helper.from_array(values, name))
                    return wrong
    return None


@pytest.mark.parametrize("name", one_net_a_method(sorted({name for name, *_ in PLANTED})))
def test_one_wrong_element_is_found_in_a_graph(name):
    import onnxsim

    from repaconv.graph.onnx_files import restore_names

    model, runner = graph(name)
    images = net(name)[2]
    simplified, _ = onnxsim.simplify(copy.deepcopy(model))
    restore_names(simplified, model)
    layers = [layer for each, layer, _ in PLANTED if each == name]
    planted = 0
    for layer in layers:
        if (wrong := in_graph(model, layer)) is None:
            continue
        planted += 1
        traced = OnnxValues(wrong, load_onnx, by_module=True)
        by_module = locate(TorchValues(runner), traced, [{"input": images}], allowed=1e-5)
        assert by_module.module == layer, by_module.reason
        sound, broken = (
            OnnxValues(each, load_onnx, by_module=False) for each in (simplified, in_graph(simplified, layer))
        )
        by_value = locate(sound, broken, [{"input": images}], allowed=1e-5)
        assert by_value.module == layer, by_value.reason
    assert planted >= len(layers) - 1


def test_sound_forms_part_nowhere():
    for name in ("repavit-tiny", "riformer"):
        model, runner = graph(name)
        traced = OnnxValues(model, load_onnx, by_module=True)
        found = locate(TorchValues(runner), traced, [{"input": net(name)[2]}], allowed=1e-5)
        assert found.module == ""
        assert len(found.drift) > 10
        assert max(row.max_rel_error for row in found.drift) < 1e-4


def test_code_between_modules_is_named_by_its_holder():
    class Net(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.a, self.b, self.factor = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), factor

        def forward(self, x):
            return self.b(self.factor * self.a(x))

    class Whole(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.part = Net(factor)

        def forward(self, x):
            return self.part(x.flatten(1))

    torch.manual_seed(0)
    right, wrong = Whole(1.0), Whole(1.5)
    wrong.load_state_dict(right.state_dict())
    with pytest.raises(
        AssertionError, match=r"first different at part: .* between the input of part\.b and the output of part\.a"
    ):
        assert_parity(wrong, right, (2, 1, 2, 2))
    assert assert_parity(right, right, (2, 1, 2, 2)).max_abs_error == 0


def test_a_module_is_run_in_its_own_float_type_and_in_eval_mode():
    class Overflowing(torch.nn.Sequential):
        def forward(self, x):
            return ((super().forward(x) * 300) ** 2).mean((2, 3)) / 90000  # beyond float16's range

    net = Overflowing(torch.nn.Conv2d(3, 8, 3)).eval()
    with pytest.raises(AssertionError, match=r"nan|inf"):
        assert_parity(copy.deepcopy(net).half(), net, (4, 3, 8, 8), lossy="fp16")
    for lossy, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        right = torch.nn.Conv2d(3, 8, 3)
        assert assert_parity(copy.deepcopy(right).to(dtype), right, (4, 3, 8, 8), lossy=lossy).max_rel_error > 1e-5
    # what is left in train() is compared as it will run: by its running statistics
    right = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
    wrong = copy.deepcopy(right)
    wrong[1].running_mean += 5
    with pytest.raises(AssertionError, match="first different at 1"):
        assert_parity(wrong, right, (4, 3, 8, 8))
    assert wrong.training


def test_assert_parity_takes_graphs(tmp_path):
    model, runner = graph("repavit-tiny")
    onnx.save(model, tmp_path / "right.onnx")
    onnx.save(in_graph(model, "blocks.1.attn.proj"), tmp_path / "wrong.onnx")
    images = net("repavit-tiny")[2]
    before = {name: value.clone() for name, value in runner.module.state_dict().items()}
    assert_parity(tmp_path / "right.onnx", runner.module, images)
    for reference in (runner.module, tmp_path / "right.onnx"):
        with pytest.raises(AssertionError, match=re.escape("first different at blocks.1.attn.proj")):
            assert_parity(tmp_path / "wrong.onnx", reference, images)
    assert all(torch.equal(value, before[name]) for name, value in runner.module.state_dict().items())
    right, wrong = (str(tmp_path / f"{name}.onnx") for name in ("right", "wrong"))  # as docs write it
    assert assert_parity(right, right, images.shape).max_abs_error == 0
    with pytest.raises(AssertionError, match=re.escape("first different at blocks.1.attn.proj")):
        assert_parity(wrong, right, images.shape)


class TwoInTwoOut(torch.nn.Module):
    """Tokens by index and a scale in; features and their norms out."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(7, 3)

    def forward(self, tokens, scale):
        found = self.table(tokens) * scale
        return {"features": found, "norm": found.norm()}


def test_assert_parity_takes_several_inputs_and_holds_every_output(tmp_path):
    torch.manual_seed(0)
    right, path = TwoInTwoOut(), tmp_path / "two.onnx"
    tokens, scale = np.arange(6).reshape(2, 3) % 7, np.full((2, 1, 1), 0.5, dtype=np.float32)
    value, node = onnx.helper.make_tensor_value_info, onnx.helper.make_node
    graph = onnx.helper.make_graph(
        [
            node("Gather", ["table", "tokens"], ["found"]),
            node("Mul", ["found", "scale"], ["features"]),
            node("ReduceL2", ["features"], ["norm"], keepdims=0),
        ],
        "two",
        [value("tokens", onnx.TensorProto.INT64, (2, 3)), value("scale", onnx.TensorProto.FLOAT, (2, 1, 1))],
        [value("features", onnx.TensorProto.FLOAT, (2, 3, 3)), value("norm", onnx.TensorProto.FLOAT, ())],
        [numpy_helper.from_array(right.table.weight.detach().numpy(), "table")],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    assert assert_parity(path, right, [tokens, scale]).max_rel_error <= 1e-6
    assert assert_parity(str(path), right, {"scale": scale, "tokens": tokens}).max_rel_error <= 1e-6
    wrong = copy.deepcopy(right)
    wrong.register_forward_hook(lambda _part, _given, out: {**out, "norm": 1.01 * out["norm"]})
    with pytest.raises(AssertionError, match=r"output norm: max rel 1\.0e-02"):
        assert_parity(wrong, path, [tokens, scale])
    wrong.register_forward_hook(lambda _part, _given, out: {**out, "norm": out["norm"] * torch.nan})
    with pytest.raises(AssertionError, match="output norm: max rel nan"):
        assert_parity(wrong, path, [tokens, scale])
    wrong.register_forward_hook(lambda _part, _given, out: {"features": out["features"]})
    (tmp_path / "text.onnx").write_text("not a graph")
    for given, inputs, kind, message in (
        (path, [tokens], UsageProblem, "has the inputs tokens, scale, but tokens were given"),
        (path, [tokens, scale.astype(np.float64)], UsageProblem, "is float32, and float64 was given"),
        (path, [tokens, scale[:, :0]], UsageProblem, r"input 1 is an array \[2, 0, 1\]"),
        (path, [tokens, "scale"], UsageProblem, "input 1 is 'scale'"),
        (path, [tokens[:, :2], scale], Refused, r"two\.onnx does not run on \[2, 2\] of int64"),
        (right, [tokens, scale[:, :, [0, 0]]], Refused, r"TwoInTwoOut does not run on .*\[2, 1, 2\] of float32"),
        (wrong, [tokens, scale], Refused, "the candidate has 1 outputs, the reference 2"),
        (tmp_path / "none.onnx", [tokens, scale], UsageProblem, r"there is no file .*none\.onnx"),
        (tmp_path / "text.onnx", [tokens, scale], Refused, r"text\.onnx is not an ONNX file"),
        (3, [tokens, scale], UsageProblem, "neither a torch module nor a path"),
    ):
        with pytest.raises(kind, match=message):
            assert_parity(given, right, inputs)
    other = torch.nn.Flatten()
    with pytest.raises(Refused, match=r"output 0 of the candidate is \[2, 4\] .* of the reference \[2, 1, 2, 2\]"):
        assert_parity(other, torch.nn.Identity(), (2, 1, 2, 2))


def test_assert_parity_refuses_outputs_that_are_sequences(tmp_path):
    value, node, float_ = onnx.helper.make_tensor_value_info, onnx.helper.make_node, onnx.TensorProto.FLOAT
    outputs = {
        "tensor": value("y", float_, (2, 3)),
        "sequence": onnx.helper.make_tensor_sequence_value_info("y", float_, None),
    }
    for name, operator in (("tensor", "Relu"), ("sequence", "SequenceConstruct")):
        graph = onnx.helper.make_graph(
            [node(operator, ["x"], ["y"])], "g", [value("x", float_, (2, 3))], [outputs[name]]
        )
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
        onnx.save(model, tmp_path / f"{name}.onnx")
    tensor, sequence = (tmp_path / f"{name}.onnx" for name in outputs)
    for candidate in (sequence, tensor):
        with pytest.raises(Refused, match="that of the reference a sequence"):
            assert_parity(candidate, sequence, (2, 3))
    with pytest.raises(Refused, match="of the candidate is a sequence"):
        assert_parity(sequence, tensor, (2, 3))
