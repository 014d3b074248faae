"""Faults that people really make, planted into the real pipeline, and the link and module that the gate must name.

tests/test_planted_faults.py plants every fault and compares docs/planted-faults.md with the result. `python
tests/planted_faults.py` writes that page.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import onnx
import planted_graph_faults
import torch
from onnx import numpy_helper
from torch import nn

from repaconv.algebra.affine_maps import Affine
from repaconv.backbones.blockwise_vit import BlockwiseReading
from repaconv.backbones.vit_layers import LayerNormSpec
from repaconv.core import plugins
from repaconv.methods.nondeep import paper_equations as nondeep
from repaconv.methods.nondeep.published_models import example_meta
from repaconv.methods.repavit import checkpoint_reading as repavit

DOCS = Path(__file__).resolve().parents[1] / "docs" / "planted-faults.md"
SETTINGS = {"repavit": {"num_heads": "3"}, "pyra": {"num_heads": "3"}, "dwconv": {"num_heads": "3"}, "nondeep": {}}
META = {"nondeep": example_meta()}


class Fault(NamedTuple):
    """One row: what is planted how, and the first check of the gate that must fail, with the module it must name."""

    what: str
    link: str
    module: str
    plant: Callable[[], AbstractContextManager[Any]]
    method: str = "repavit"
    arch: str = "tiny"
    settings: dict[str, str] | None = None
    export: str = ""
    weights: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict


# --- ways to plant ------------------------------------------------------------------------------------


def wrong_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor], reading: Any = repavit.RePaViTReading):
    """One folded tensor is another, behind the back of the certificate."""
    right = reading.parts

    def parts(self):
        for part in right(self):
            yield replace(part, tensors={k: change(v) if k == name else v for k, v in part.tensors.items()})

    return patch.object(reading, "parts", parts)


def wrong_part(name: str, change: Callable[[nn.Module], object], *, deploy: bool):
    """One part of every net that is built in that form is another."""
    owner = type(plugins.load(plugins.BACKBONES, "vit")) if deploy else repavit.RePaViTReading
    what = "deploy" if deploy else "module"
    right = getattr(owner, what)

    def build(self, *given):
        net = right(self, *given)
        change(net.get_submodule(name))
        return net

    return patch.object(owner, what, build)


def wrong_heads(attention: nn.Module) -> None:
    spec = attention.spec
    attention.spec = replace(spec, heads=2, qk=spec.heads * spec.qk // 2, v=spec.heads * spec.v // 2)


def wrong_active():
    right = repavit.ChannelIdleMlp.__init__

    def build(self, width, hidden, active, *more, **named):
        right(self, width, hidden, active + 2, *more, **named)

    return patch.object(repavit.ChannelIdleMlp, "__init__", build)


def wrong_eps():
    right = Affine.batchnorm

    def batchnorm(weight, bias, mean, variance, eps):
        return right(weight, bias, mean, variance, 1e-6)

    return patch.object(Affine, "batchnorm", batchnorm)


def forgotten_layer_scale():
    right = repavit.fold_ffn

    def fold_ffn(block, active, eps, scale):
        return right({name: value for name, value in block.items() if name != "ls"}, active, eps, scale)

    return patch.object(repavit, "fold_ffn", fold_ffn)


def forgotten_divisor():
    right = nondeep.fold_scores
    return patch.object(nondeep, "fold_scores", lambda q, k, heads, _divisor, tokens: right(q, k, heads, 1.0, tokens))


def left_in_training_mode(norm: nn.Module) -> None:
    """It takes the mean and the variance of the images at hand."""
    norm.normalise = lambda x: nn.functional.batch_norm(
        x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps
    )


def wrong_initializer(at: str, model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with one wrong element in the last weight of a module."""
    node = next(n for n in model.graph.node if n.name.startswith(f"{at}/") and n.op_type in ("MatMul", "Gemm", "Conv"))
    weight = next(w for w in model.graph.initializer if w.name == node.input[1])
    values = numpy_helper.to_array(weight).copy()
    values.flat[1] += 5 * np.abs(values).max()
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    return model


def wrong_export(at: str):
    from repaconv.onnx_export import torch_exporter as exporter

    right = exporter.to_onnx
    return patch.object(exporter, "to_onnx", lambda *a, **k: wrong_initializer(at, right(*a, **k)))


def wrong_simplifier(at: str):
    import onnxsim

    from repaconv.graph.onnx_files import restore_names

    right = onnxsim.simplify

    def simplify(model, **asked):
        smaller, sound = right(model, **asked)
        restore_names(smaller, model)
        return wrong_initializer(at, smaller), sound

    return patch.object(onnxsim, "simplify", simplify)


def wrong_stored(name: str):
    from repaconv.sources import checkpoint_source

    right = checkpoint_source.stored_weights

    def stored(*given):
        weights = right(*given)
        weights[name].view(-1)[3] += 5 * weights[name].abs().max()
        return weights

    return patch.object(checkpoint_source, "stored_weights", stored)


def wrong_scale(at: str):
    """The scale by which the quantized input of a layer is read back is twice that by which it was written."""
    from repaconv.onnx_export import fp16_and_int8

    right = fp16_and_int8.to_int8

    def to_int8(model, batches, keep, how):
        typed = right(model, batches, keep, how)
        layer = next(
            n for n in typed.graph.node if n.name.startswith(f"{at}/") and n.op_type in fp16_and_int8.QUANTIZED
        )
        back = next(n for n in typed.graph.node if layer.input[0] in n.output)
        assert back.op_type == "DequantizeLinear"
        scale = next(w for w in typed.graph.initializer if w.name == back.input[1])
        doubled = numpy_helper.from_array(2 * numpy_helper.to_array(scale), f"{scale.name}_doubled")
        typed.graph.initializer.append(doubled)
        back.input[1] = doubled.name
        return typed

    return patch.object(fp16_and_int8, "to_int8", to_int8)


def swapped_channels():
    from repaconv.onnx_export import preprocessing_nodes

    right = preprocessing_nodes.with_preprocessing

    def swapped(model, wanted):
        return right(model, wanted.model_copy(update={"channel_order": "BGR"}))

    return patch.object(preprocessing_nodes, "with_preprocessing", swapped)


class ManualLayerNorm(nn.Module):
    """As many networks have it: an exporter sees its squares, not a LayerNormalization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / ((centred * centred).mean(-1, keepdim=True) + 1e-6).sqrt()


def manual_norms():
    return patch.object(LayerNormSpec, "build", lambda self, width: ManualLayerNorm())


@contextmanager
def overflowing_norm():
    from repaconv.onnx_export import fp16_and_int8

    with ExitStack() as both:
        both.enter_context(manual_norms())
        both.enter_context(patch.object(fp16_and_int8, "nodes_beyond_fp16", lambda model, largest: []))
        yield


def far_off(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tokens of some 1000: float16 holds them, not their squares."""
    return {**weights, "pos_embed": weights["pos_embed"] + 1000 * torch.sign(weights["pos_embed"])}


FAULTS = [
    Fault(
        "BatchNorm left in training mode", "fold", "blocks.1.mlp",
        lambda: wrong_part("blocks.1.mlp.norm2", left_in_training_mode, deploy=False),
    ),
    Fault("eps mixed up (1e-6 for BatchNorm's 1e-5)", "fold", "blocks.0.mlp", wrong_eps),
    Fault(
        "a square weight transposed", "fold", "blocks.1.attn",
        lambda: wrong_tensor("blocks.1.attn.proj.weight", lambda w: w.T),
    ),
    Fault("a bias dropped", "fold", "blocks.2.mlp", lambda: wrong_tensor("blocks.2.mlp.idle.bias", torch.zeros_like)),
    Fault(
        "a wrong number of heads", "fold", "blocks.0.attn",
        lambda: wrong_part("blocks.0.attn", wrong_heads, deploy=True),
    ),
    Fault("another idle ratio in one of the two forms", "fold", "blocks.0.mlp", wrong_active),
    Fault(
        "LayerScale forgotten", "fold", "network.0.0.mlp", forgotten_layer_scale,
        arch="tiny-poolformer", settings={"pool_size": "3"},
    ),
    Fault(
        "GELU by tanh for GELU by erf", "fold", "blocks.1.mlp",
        lambda: wrong_part("blocks.1.mlp.act", lambda act: setattr(act, "approximate", "tanh"), deploy=True),
    ),
    Fault(
        "the scores' divisor forgotten", "fold", "blocks.0.attn",
        forgotten_divisor, method="nondeep",
    ),
    Fault(
        "a depthwise kernel flipped", "fold", "blocks.0.attn",
        lambda: wrong_tensor("blocks.0.attn.dw.weight", lambda w: w.flip(-1), BlockwiseReading), method="dwconv",
    ),
    Fault(
        "a stored weight that is another", "stored", "blocks.1.mlp.fc2",
        lambda: wrong_stored("blocks.1.mlp.fc2.weight"),
    ),
    Fault("an exporter's wrong constant", "exported", "blocks.2.attn.proj", lambda: wrong_export("blocks.2.attn.proj")),
    Fault("a simplifier's wrong graph", "simplified", "blocks.1.mlp.fc2", lambda: wrong_simplifier("blocks.1.mlp.fc2")),
    Fault(
        "channels swapped in the preprocessing", "preprocessing", "preprocessing", swapped_channels,
        export="with_preprocessing = true",
    ),
    Fault(
        "float16 overflows in a LayerNorm", "fp16", "blocks.0.norm1", overflowing_norm,
        method="dwconv", export='precisions = ["fp32", "fp16"]', weights=far_off,
    ),
    Fault(
        "an int8 scale off by 2", "int8", "blocks.1.mlp.fc2", lambda: wrong_scale("blocks.1.mlp.fc2"),
        export='precisions = ["fp32", "int8"]',
    ),
]  # fmt: skip


def write_recipe(fault: Fault, folder: Path) -> Path:
    """The checkpoint and the recipe of one row."""
    method = plugins.load(plugins.METHODS, fault.method)
    weights = fault.weights(method.example(fault.arch, seed=1))
    torch.save({"state_dict": weights, "meta": META.get(fault.method, {})}, folder / "c.pth")
    settings = fault.settings if fault.settings is not None else SETTINGS[fault.method]
    lines = ['checkpoint = "c.pth"', "[set]", *(f'{name} = "{value}"' for name, value in settings.items())]
    lines += ["[verify]", "count = 4", "[export]", "batch = 1", fault.export]
    path = folder / "recipe.toml"
    path.write_text("\n".join(lines))
    return path


def page(rows: list[tuple[str, str, str]]) -> str:
    """docs/planted-faults.md."""
    head = """# Planted faults

`tests/test_planted_faults.py` plants each fault into the real pipeline and compares this page with what it finds. The
table has the first link that fails and the module that `repaconv gate` names. In the link `fold` that is one of the two
or three modules between two places where the original and the folded network can be compared. Without the fault the
same recipe passes.

| Fault | Link | Module |
|---|---|---|
"""
    return (
        head
        + "".join(f"| {what} | `{link}` | `{module}` |\n" for what, link, module in rows)
        + planted_graph_faults.section()
    )


if __name__ == "__main__":
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text(page([(fault.what, fault.link, fault.module) for fault in FAULTS]))
