"""LoRA on any method: every layout against the merged weights, scales, composition, refusals."""

from __future__ import annotations

import json

import pytest
import torch

import repaconv as rc
from repaconv.core.errors import Refused
from repaconv.methods.pyra import METHOD as PYRA
from repaconv.methods.repavit import METHOD as REPAVIT
from repaconv.verification.tolerances import EXACT

HEADS = {"num_heads": "3"}


def save(weights, path="c.pth", **beside):
    torch.save({"model": weights, **beside}, path)
    return path


def plain(seed):
    return {name: w for name, w in PYRA.example("tiny", seed=seed).items() if "pyra" not in name}


def factors(weights, layers, rank=3):
    """A and B for these layers."""
    torch.manual_seed(0)
    shapes = {at: weights[f"{at}.weight"].shape for at in layers}
    return {at: (torch.randn(rank, width) / 5, torch.randn(out, rank)) for at, (out, width) in shapes.items()}


def merged(weights, adapters, scale):
    out = dict(weights)
    for at, (a, b) in adapters.items():
        out[f"{at}.weight"] = weights[f"{at}.weight"].double() + scale * b.double() @ a.double()
    return out


def logits(path, **arguments):
    """The folded net's float64 output on two images, and the fold."""
    from repaconv.core import plugins
    from repaconv.sources.method_detection import read_again
    from repaconv.verification.input_batches import random_inputs
    from repaconv.verification.model_runners import TorchRunner

    folded = rc.fold(path, force=True, **arguments)
    form, _ = read_again(folded, None)
    images = random_inputs((3, 32, 32), count=2, seed=0).images
    exact = {name: w for part in form.parts() for name, w in part.tensors.items()}
    backbone = plugins.load(plugins.BACKBONES, folded.backbone)
    network = backbone.deploy(backbone.from_json(folded.config))
    runners = (
        TorchRunner(*each, double=True) for each in ((network.eval(), exact), (form.module().eval(), form.tensors))
    )
    deploy, training = (runner.run({"input": images})["output"] for runner in runners)
    assert abs(deploy - training).max() <= 1e-12 * abs(training).max()
    return deploy, folded


QKV = "base_model.model.blocks.0.attn.qkv"
LAYERS = [f"blocks.{index}.{at}" for index in range(3) for at in ("attn.qkv", "mlp.fc1", "mlp.fc2")]


def peft(weights, adapters):
    out = {}
    for name, w in weights.items():
        at, _, what = name.rpartition(".")
        out[f"base_model.model.{at}.base_layer.{what}" if at in adapters else f"base_model.model.{name}"] = w
    for at, (a, b) in adapters.items():
        out |= {f"base_model.model.{at}.lora_A.default.weight": a, f"base_model.model.{at}.lora_B.default.weight": b}
    return out


def older_peft(weights, adapters):
    return {name.replace(".base_layer", ""): w for name, w in peft(weights, adapters).items()}


def loralib(weights, adapters):
    return {**weights, **{f"{at}.lora_{f}": w for at, ab in adapters.items() for f, w in zip("AB", ab, strict=True)}}


@pytest.mark.parametrize("layout", [peft, older_peft, loralib])
@pytest.mark.parametrize("base", ["plain", "repavit"])
def test_every_layout_on_plain_and_on_repavit(layout, base):
    weights = plain(4) if base == "plain" else REPAVIT.example("tiny", seed=4)
    layers = LAYERS if base == "plain" else [f"blocks.{i}.{at}" for i in range(3) for at in ("attn.qkv", "attn.proj")]
    adapters = factors(weights, layers)
    result = {"lora_merged": "no"} if layout is loralib else {}
    output, folded = logits(save(layout(weights, adapters)), settings={**HEADS, "lora_alpha": "6", **result})
    source = "--set" if result else "PEFT's names: it merges only where merge_adapter() is called, which no key tells"
    assert [(f.value, f.source) for f in folded.facts if f.name == "lora_merged"] == [("no", source)]
    assert folded.applied == (("pyra" if base == "plain" else "repavit"), "lora")
    rows = [step for step in folded.certificate if "lora (rank 3, scale 2)" in " ".join(step.folded)]
    assert [step.module for step in rows] == layers
    assert folded.tolerances["onnx"] == EXACT["onnx"]  # rows make no net deeper
    # the same as folding the merged weights; a plain net gets one adapter of zeros, to be known for what it is
    whole = merged(weights, adapters, 2.0)
    if base == "plain":
        none = {at: (torch.zeros(1, 24), torch.zeros(72, 1)) for at in ("blocks.0.attn.qkv",)}
        whole = peft(whole, none)
    expected, _ = logits(save(whole, "m.pth"), settings={**HEADS, **({"lora_alpha": "1"} if base == "plain" else {})})
    assert abs(output - expected).max() <= 1e-12 * abs(expected).max()


@pytest.mark.parametrize("layout", [peft, loralib])
def test_weights_that_hold_their_adapters_already_are_not_given_them_twice(layout):
    """loralib merges on eval(), PEFT by merge_adapter(): W + s B A, and A and B beside it."""
    weights = plain(14)
    adapters = factors(weights, LAYERS)
    saved = layout({name: w.float() for name, w in merged(weights, adapters, 2.0).items()}, adapters)
    if layout is loralib:
        with pytest.raises(Refused) as caught:
            rc.fold(save(saved), settings={**HEADS, "lora_alpha": "6"})
        assert caught.value.code == "lora.merged"
        assert "lora_merged=yes" in caught.value.hint
    output, folded = logits(save(saved), settings={**HEADS, "lora_merged": "yes"})
    expected, _ = logits(save(saved, args={"merged": True}), settings=HEADS)
    assert abs(output - expected).max() == 0
    assert "lora" not in folded.applied
    result = {**HEADS, "lora_alpha": "6", "lora_merged": "no"}
    right, _ = logits(save(layout(weights, adapters), "r.pth"), settings=result)
    assert abs(output - right).max() <= 1e-5 * abs(right).max()
    assert layout is not peft or not next(f for f in folded.facts if f.name == "lora_merged").overrules
    with pytest.raises(Refused, match=r"args\.merge_weights says no"):
        rc.fold(save(saved, args={"merge_weights": False}), settings={**HEADS, "lora_merged": "yes"}, out="other")


def test_the_official_layout_has_scale_one():
    weights = plain(5)
    adapters = factors(weights, ["blocks.0.attn.qkv", "blocks.2.attn.qkv"])
    file = dict(weights)
    for at, (a, b) in adapters.items():
        file |= {at.replace("qkv", "LoRA_a.weight"): a, at.replace("qkv", "LoRA_b.weight"): b}
    output, folded = logits(save(file), settings=HEADS)
    peft_output, _ = logits(save(peft(weights, adapters), "p.pth"), settings={**HEADS, "lora_alpha": "3"})
    assert abs(output - peft_output).max() <= 1e-13 * abs(output).max()
    assert next(fact.value for fact in folded.facts if fact.name == "lora_scale") == 1.0
    assert folded.training.parameters > folded.deploy.parameters


def test_where_alpha_is_found(tmp_path):
    weights = plain(6)
    file = peft(weights, factors(weights, ["blocks.0.attn.qkv"]))
    with pytest.raises(Refused) as caught:
        rc.fold(save(file), settings=HEADS)
    assert caught.value.code == "setting.needed"
    assert "--set lora_alpha=" in caught.value.hint
    by_set, _ = logits("c.pth", settings={**HEADS, "lora_alpha": "12"})
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 12, "r": 3}))
    beside, folded = logits("c.pth", settings=HEADS)
    assert abs(by_set - beside).max() == 0
    assert next(fact.source for fact in folded.facts if fact.name == "lora_alpha") == "adapter_config.json"
    in_file, _ = logits(save(file, peft_config={"default": {"lora_alpha": 12, "use_rslora": False}}), settings=HEADS)
    assert abs(by_set - in_file).max() == 0
    stabilised, _ = logits("c.pth", settings={**HEADS, "lora_rslora": "yes"})
    assert abs(by_set - stabilised).max() > 1e-3


def test_a_saved_head_replaces_the_original():
    weights = plain(7)
    file = peft(weights, factors(weights, ["blocks.1.attn.qkv"]))
    for what in ("weight", "bias"):
        original = file.pop(f"base_model.model.head.{what}")
        file[f"base_model.model.head.original_module.{what}"] = torch.zeros_like(original)
        file[f"base_model.model.head.modules_to_save.default.{what}"] = original
    output, _ = logits(save(file), settings={**HEADS, "lora_alpha": "3"})
    expected, _ = logits(
        save(peft(weights, factors(weights, ["blocks.1.attn.qkv"])), "b.pth"), settings={**HEADS, "lora_alpha": "3"}
    )
    assert abs(output - expected).max() == 0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda f: f.pop(f"{QKV}.lora_B.default.weight"), "lora.half"),
        (lambda f: f.pop(f"{QKV}.base_layer.weight"), "lora.half"),
        (lambda f: f.update({f"{QKV}.lora_A.default.weight": torch.ones(4, 24)}), "lora.shape"),
        (lambda f: f.update({f"{QKV}.lora_A.other.weight": torch.ones(3, 24)}), "lora.ambiguous"),
        (lambda f: f.update({f"{QKV}.lora_magnitude_vector.default.weight": torch.ones(3)}),
         "lora.kind"),
        (lambda f: f.update({f"{QKV}.lora_A.default.weight": torch.full((3, 24), torch.nan)}),
         "checkpoint.not-finite"),
        (lambda f: [f.pop(n) for n in list(f) if "lora" not in n], "lora.alone"),
    ],
)  # fmt: skip
def test_what_is_no_whole_adapter_is_refused(change, code):
    weights = plain(8)
    file = peft(weights, factors(weights, ["blocks.0.attn.qkv"]))
    change(file)
    with pytest.raises(Refused) as caught:
        rc.fold(save(file), settings={**HEADS, "lora_alpha": "3"})
    assert caught.value.code == code


def test_official_and_peft_adapters_in_one_file_keep_their_own_scales():
    weights = plain(11)
    official, others = factors(weights, ["blocks.0.attn.qkv"]), factors(weights, ["blocks.1.mlp.fc1"])
    a, b = official["blocks.0.attn.qkv"]
    file = {**peft(weights, others), "base_model.model.blocks.0.attn.LoRA_a.weight": a}
    file["base_model.model.blocks.0.attn.LoRA_b.weight"] = b
    output, _ = logits(save(file), settings={**HEADS, "lora_alpha": "6"})
    both = merged(merged(weights, official, 1.0), others, 2.0)
    zero = factors(weights, ["head"])
    file = loralib(both, {"head": (zero["head"][0], 0 * zero["head"][1])})
    expected, _ = logits(save(file), settings={**HEADS, "lora_alpha": "3"})
    assert abs(output - expected).max() <= 1e-12 * abs(expected).max()


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"lora_alpha": 8, "r": 3, "alpha_pattern": {"mlp.fc1": 32}}, "lora.kind"),
        ({"lora_alpha": 8, "r": 3, "use_dora": True}, "lora.kind"),
        ({"lora_alpha": 8, "r": 16}, "lora.config"),
    ],
)
def test_a_configuration_with_more_than_one_scale_or_of_others_is_refused(config, code, tmp_path):
    weights = plain(12)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(Refused) as caught:
        rc.fold(save(peft(weights, factors(weights, LAYERS))), settings=HEADS)
    assert caught.value.code == code


def test_two_adapters_of_one_layer_and_whole_numbers_are_refused():
    weights = plain(13)
    adapters = factors(weights, ["blocks.0.attn.qkv"])
    a, b = adapters["blocks.0.attn.qkv"]
    for changed, code in (
        ({"blocks.0.attn.LoRA_a.weight": a, "blocks.0.attn.LoRA_b.weight": b}, "lora.ambiguous"),
        ({"blocks.0.attn.qkv.lora_A": a.to(torch.int64)}, "checkpoint.dtype"),
    ):
        result = {"lora_alpha": "3", "lora_merged": "no"}
        with pytest.raises(Refused) as caught:
            rc.fold(save({**loralib(weights, adapters), **changed}), settings={**HEADS, **result})
        assert caught.value.code == code


def test_only_a_method_that_identifies_is_seen_to():
    from repaconv.sources.method_detection import load_method

    for name, does in (("nondeep", True), ("pyra", False)):
        assert (load_method(name).identify is not None) is does
