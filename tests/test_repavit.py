"""RePaViT: its FFN and nets against NumPy, A by rule and by statistics, official outputs, refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHARED, one_quick
from numpy_reference_networks import gelu

import repaconv as rc
from repaconv.backbones.ffn_replacement_interface import Ffn
from repaconv.checkpoints import read_checkpoint
from repaconv.core.errors import Refused
from repaconv.methods.repavit import METHOD
from repaconv.methods.repavit.active_channels import ClaimedIdleRatio, ResidualTest
from repaconv.methods.repavit.paper_equations import fold_ffn
from repaconv.methods.repavit.published_models import ARCHS

OFFICIAL = {
    "repavit_plain_idle075": {"num_heads": "3"},
    "repavit_plain_idle050": {"num_heads": "4"},
    "repaswin_idle075": {},
    "repapoolformer_idle075": {"pool_size": "7"},
}
HEADS = {"num_heads": "3"}


def save(weights, path="c.pth", **beside):
    torch.save({"model": weights, **beside}, path)
    return path


def links(verified):
    return {link.name: link.metrics.max_rel_error for link in verified.links}


# --- the paper in NumPy: [.., C] throughout ---------------------------------------------------------


def layernorm(x, w, name, eps):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def batchnorm(x, w, name):
    x = (x - w[f"{name}.running_mean"]) / np.sqrt(w[f"{name}.running_var"] + 1e-5)
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(x, w, name):
    weight = w[f"{name}.weight"]
    return x @ weight.reshape(weight.shape[:2]).T + w.get(f"{name}.bias", 0.0)


def ffn(x, w, active):
    h = linear(batchnorm(x, w, "norm1"), w, "fc1")
    h = np.concatenate([gelu(h[..., :active]), h[..., active:]], -1)
    return x + w.get("ls", 1.0) * linear(batchnorm(h, w, "norm2"), w, "fc2")


def attention(x, w, heads):
    batch, tokens, width = x.shape
    qkv = linear(x, w, "qkv").reshape(batch, tokens, 3, heads, width // heads).transpose(2, 0, 3, 1, 4)
    scores = qkv[0] @ qkv[1].swapaxes(-1, -2) / sqrt(width // heads)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return linear((weights @ qkv[2]).transpose(0, 2, 1, 3).reshape(batch, tokens, width), w, "proj")


def under(w, prefix):
    return {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}


def patches(images, weight, bias=0.0):
    side = weight.shape[2]
    b, c, h, w = images.shape
    cut = images.reshape(b, c, h // side, side, w // side, side).transpose(0, 2, 4, 1, 3, 5)
    return cut.reshape(b, -1, c * side * side) @ weight.reshape(len(weight), -1).T + bias


def plain(weights, images, active, heads=3):
    w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    x = patches(images.astype(np.float64), w["patch_embed.proj.weight"], w.get("patch_embed.proj.bias", 0.0))
    x = np.concatenate([np.broadcast_to(w["cls_token"], (len(x), 1, x.shape[2])), x], 1) + w["pos_embed"]
    x = layernorm(x, w, "norm_pre", 1e-6)
    for index, a in enumerate(active):
        block = under(w, f"blocks.{index}.")
        attn = under(block, "attn.")
        n = batchnorm(x, attn, "norm") if "norm.running_mean" in attn else layernorm(x, attn, "norm", 1e-5)
        x = x + block.get("ls1.gamma", 1.0) * attention(n, attn, heads)
        y = ffn(x, under(block, "mlp."), a)
        x = x + block.get("ls2.gamma", 1.0) * (y - x)
    read = layernorm(x, w, "norm", 1e-6)[:, 0]
    if "pre_logits.fc.weight" in w:
        read = np.tanh(linear(read, w, "pre_logits.fc"))
    return linear(read, w, "head") if "head.weight" in w else read


def mixer(weights, images, active):
    w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    x = patches(images.astype(np.float64), w["stem.proj.weight"], w["stem.proj.bias"])
    for index, a in enumerate(active):
        tokens = under(w, f"blocks.{index}.mlp_tokens.")
        n = layernorm(x.swapaxes(1, 2), tokens, "norm", 1e-5)
        x = x + linear(gelu(linear(n, tokens, "fc1")), tokens, "fc2").swapaxes(1, 2)
        x = ffn(x, under(w, f"blocks.{index}.mlp_channels."), a)
    return linear(layernorm(x, w, "norm", 1e-6).mean(1), w, "head")


IMAGES = np.random.default_rng(2).standard_normal((2, 3, 32, 32), dtype=np.float32)


def record(output, path="r.npz"):
    np.savez(path, input=IMAGES, output_fp64=output)
    return path


def proved(weights, expected, settings=None, **beside):
    """Fold, and hold both forms against the NumPy output in float64."""
    folded = rc.fold(save(weights, **beside), settings=settings or {}, force=True)
    found = links(rc.verify(inputs=record(expected)))
    assert max(found["recorded"], found["fold"], *(step.max_rel_error for step in folded.certificate)) <= 1e-12
    assert found["stored"] <= 1e-5
    return folded


# --- the FFN -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("active", [0, 1, 24, 95, 96])
@pytest.mark.parametrize("conv", [False, True])
def test_equations_3_to_6(active, conv):
    arch = "tiny-poolformer" if conv else "tiny"
    block = under(METHOD.example(arch, seed=4), "network.2.0.mlp." if conv else "blocks.0.mlp.")
    x = torch.randn(7, 24, dtype=torch.float64)
    parts = fold_ffn(block, active, 1e-5, rc_eye(24))
    h = torch.from_numpy(gelu((parts["fc1"](x)).numpy()))
    y = x + parts["fc2"](h) if active == 96 else parts["idle"](x) + h @ parts["fc2"].weight.T
    expected = ffn(x.numpy(), {name: value.numpy().astype(np.float64) for name, value in block.items()}, active)
    assert np.abs(y.numpy() - expected).max() <= 1e-13 * np.abs(expected).max()


def rc_eye(width):
    from repaconv.algebra.affine_maps import Affine

    return Affine.eye(width)


# --- whole nets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("idle", [0.0, 0.5, 0.6, 1.0])
def test_a_plain_net_folds_at_every_ratio(idle):
    sizes = replace(ARCHS["tiny"], idle_ratio=idle)
    weights, active = METHOD.example(sizes, seed=5), [sizes.active(0)] * 3
    expected = plain(weights, IMAGES, active)
    by_args = proved(weights, expected, HEADS, args={"idle_ratio": idle, "feature_norm": "BatchNorm"})
    by_statistics = proved(weights, expected, HEADS)
    for folded in (by_args, by_statistics):
        assert next(fact.value for fact in folded.facts if fact.name == "act_channels") == active
    assert by_statistics.deploy.parameters < by_statistics.training.parameters


def test_linear_and_channel_idle_false():
    sizes = ARCHS["tiny"]
    for args, active in [
        ({"idle_ratio": 0.75, "heuristic": "linear"}, [24, 0, 96]),
        ({"idle_ratio": 0.75, "channel_idle": False}, [96, 96, 96]),
    ]:
        weights = METHOD.example(sizes, seed=6)
        for index, a in enumerate(active):
            part = METHOD.example(replace(sizes, idle_ratio=1 - a / 96), seed=60 + index)
            weights |= {name: value for name, value in part.items() if name.startswith(f"blocks.{index}.")}
        proved(weights, plain(weights, IMAGES, active), HEADS, args=args)


def test_what_a_plain_net_may_carry_besides():
    weights = METHOD.example("tiny", seed=7)
    weights["patch_embed.proj.bias"] = torch.randn(24)
    for index in range(3):
        weights |= {f"blocks.{index}.ls{i}.gamma": 0.3 * torch.randn(24) for i in (1, 2)}
        weights |= {f"blocks.{index}.attn.norm.running_mean": torch.randn(24)}
        weights |= {f"blocks.{index}.attn.norm.running_var": 1 + torch.rand(24)}
    folded = proved(weights, plain(weights, IMAGES, [24] * 3), HEADS)
    assert folded.applied == ("repavit", "layer scale")


@pytest.mark.parametrize("head", [True, False])
def test_the_representation_layer_of_larger_training_sets(head):
    weights = METHOD.example("tiny", seed=8)
    weights |= {"pre_logits.fc.weight": torch.randn(10, 24), "pre_logits.fc.bias": torch.randn(10)}
    weights |= {"head.weight": torch.randn(len(weights["head.weight"]), 10)}
    if not head:
        weights = {name: value for name, value in weights.items() if not name.startswith("head.")}
    folded = proved(weights, plain(weights, IMAGES, [24] * 3), HEADS)
    assert "norm's affine -> pre_logits.fc" in folded.certificate[-1].folded
    if head:
        assert rc.export(batch=1).verdict == "passed"


def test_the_mixer_takes_its_width_whatever_args_say():
    weights = METHOD.example("tiny-mixer", seed=8)
    folded = proved(weights, mixer(weights, IMAGES, [16, 16]), args={"idle_ratio": 0.5})
    assert next(fact.value for fact in folded.facts if fact.name == "act_channels") == [16, 16]


def test_the_poolformers_layer_scale_reaches_the_bias():
    """The official reparam forgets it there; the whole-net link would show it, and so does every block's row."""
    weights = METHOD.example("tiny-poolformer", seed=9)
    folded = rc.fold(save(weights), settings={"pool_size": "3"})
    assert max(step.max_rel_error for step in folded.certificate) <= 1e-13
    assert links(rc.verify())["fold"] <= 1e-12
    block = under(weights, "network.0.0.mlp.")
    ours = fold_ffn(block, 16, 1e-5, rc_eye(16))["idle"].bias
    unscaled = fold_ffn({k: v for k, v in block.items() if k != "ls"}, 16, 1e-5, rc_eye(16))["idle"].bias
    assert torch.allclose(ours, block["ls"].double() * unscaled, rtol=1e-12)


@pytest.mark.parametrize("weights_of", ["model", pytest.param("model_ema", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", one_quick(OFFICIAL))
def test_official_checkpoints(name, weights_of):
    path = SHARED / "repavit" / f"{name}.pth"
    if not path.is_file():
        pytest.skip("official checkpoints are absent")
    folded = rc.fold(path, settings=OFFICIAL[name], weights=weights_of)
    assert max(step.max_rel_error for step in folded.certificate) <= 1e-12
    with np.load(path.with_suffix(".npz")) as recorded:
        key = "output_train_fp64" if weights_of == "model" else "output_train_ema"
        np.savez("r.npz", input=recorded["input"], output=recorded[key])
    rc.export(batch=1)
    found = links(rc.verify(inputs="r.npz"))
    assert found["recorded"] <= (1e-14 if weights_of == "model" else 1e-5)
    assert found["fold"] <= 1e-12
    assert max(found["stored"], found["onnx"]) <= 1e-5


# --- how many channels are activated ---------------------------------------------------------------


def test_the_official_rounding():
    assert ClaimedIdleRatio(0.7).active(Ffn("", {}, 640, 160), 0, 1, truncated=False) == 193
    assert ClaimedIdleRatio(0.8).active(Ffn("", {}, 1280, 320), 0, 1, truncated=True) == 255
    assert ClaimedIdleRatio(None).active(Ffn("", {}, 640, 160), 0, 1, truncated=False) == 160
    linear = [ClaimedIdleRatio(0.4, "linear").active(Ffn("", {}, 640, 160), i, 4, truncated=False) for i in range(4)]
    assert linear[2:] == [0, 640]
    assert max(linear) <= 640


@pytest.mark.parametrize("active", [0, 1, 47, 48, 95, 96])
def test_the_residual_test_finds_a(active):
    weights = under(METHOD.example(replace(ARCHS["tiny"], idle_ratio=1 - active / 96), seed=10), "blocks.1.mlp.")
    test = ResidualTest.of(weights, 1e-5, trained=True)
    assert test.usable
    assert test.active == active


def test_a_wrong_claim_is_refused_wherever_it_is():
    weights = METHOD.example("tiny", seed=11)
    for settings, beside in (
        ({**HEADS, "idle_ratio": "0.5"}, {}),
        (HEADS, {"args": {"idle_ratio": 0.65}}),
        ({**HEADS, "heuristic": "linear", "idle_ratio": "0.75"}, {}),
    ):
        with pytest.raises(Refused) as caught:
            rc.fold(save(weights, **beside), settings=settings)
        assert caught.value.code == "repavit.idle-ratio"
    # a truth that the user gives against args is taken where that is asked for, and stated
    path, given = save(weights, args={"idle_ratio": 0.5}), {**HEADS, "idle_ratio": "0.75"}
    with pytest.raises(Refused, match=r"args says 0\.5"):
        rc.fold(path, settings=given)
    folded = rc.fold(path, settings=given, force=True)
    assert len(folded.unverified) == 1
    assert next(fact for fact in folded.facts if fact.name == "idle_ratio").against == "args says 0.5"


def test_gelus_minimum_is_a_proof_where_the_residuals_are_noise():
    weights = METHOD.example("tiny", seed=12)
    for index in range(3):
        mean = weights[f"blocks.{index}.mlp.norm2.running_mean"]
        mean[::2] = 0.3  # neither side of any A fits
    with pytest.raises(Refused, match=r"cannot have 96 .* has a mean below GELU's minimum"):
        rc.fold(save(weights), settings={**HEADS, "idle_ratio": "0"})


def test_statistics_that_no_training_made_say_nothing():
    weights = METHOD.example("tiny", seed=13)
    for name in weights:
        if name.endswith("norm2.running_mean"):
            weights[name] = torch.randn(96)
        if name.endswith("num_batches_tracked"):
            weights[name] = torch.tensor(0)
    with pytest.raises(Refused) as caught:
        rc.fold(save(weights), settings=HEADS)
    assert caught.value.code == "setting.needed"
    folded = rc.fold(save(weights), settings={**HEADS, "idle_ratio": "0.75"})
    fact = next(fact for fact in folded.facts if fact.name == "act_channels")
    assert fact.value == [24] * 3
    assert "do not decide" in fact.against


# --- refusals -----------------------------------------------------------------------------------------


def _layernorm(w):
    for name in [name for name in w if ".mlp.norm" in name]:
        del w[name]
    w |= {f"blocks.{i}.mlp.norm.{part}": torch.ones(24) for i in range(3) for part in ("weight", "bias")}


def _deployed(w):
    for name in [name for name in w if ".mlp." in name]:
        del w[name]
    for i in range(3):
        w |= {f"blocks.{i}.mlp.fc1.weight": torch.ones(24, 24), f"blocks.{i}.mlp.fc1.bias": torch.ones(24)}
        w |= {f"blocks.{i}.mlp.fc2.weight": torch.ones(24, 24), f"blocks.{i}.mlp.fc2.bias": torch.ones(24)}
        w |= {f"blocks.{i}.mlp.fc3.weight": torch.ones(24, 24)}


def _half(w):
    w["blocks.1.mlp.fc3.weight"] = torch.ones(24, 24)


def _drop(name):
    return lambda w: w.pop(name)


def _put(name, value):
    return lambda w: w.update({name: value})


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_layernorm, "repavit.layer-norm"),
        (_deployed, "method.deployed"),
        (_half, "repavit.mixed-forms"),
        (_drop("blocks.1.mlp.norm1.running_mean"), "checkpoint.missing-keys"),
        (_drop("blocks.1.attn.proj.weight"), "checkpoint.missing-keys"),
        (_drop("blocks.2.mlp.fc2.weight"), "checkpoint.missing-keys"),
        (_drop("pos_embed"), "checkpoint.missing-keys"),
        (_put("blocks.0.adapter.weight", torch.ones(3)), "checkpoint.unexpected-keys"),
        (_put("blocks.0.norm2.weight", torch.ones(24)), "checkpoint.unexpected-keys"),
        (_put("blocks.0.mlp.fc1.weight", torch.ones(96)), "checkpoint.shape"),
        (_put("blocks.0.mlp.fc2.weight", torch.ones(24, 95)), "checkpoint.shape"),
        (_put("pos_embed", torch.ones(1, 15, 24)), "vit.image-size"),
        (_put("norm.weight", torch.full((24,), torch.nan)), "checkpoint.not-finite"),
        (_put("blocks.0.mlp.norm2.running_var", -torch.ones(96)), "checkpoint.negative-variance"),
    ],
)
def test_what_does_not_fold_is_refused(change, code):
    weights = METHOD.example("tiny", seed=14)
    change(weights)
    with pytest.raises(Refused) as caught:
        rc.fold(save(weights, args={"idle_ratio": 0.75}), settings=HEADS)
    assert caught.value.code == code


def test_what_cannot_be_known_is_asked_for():
    for arch, flag in (("tiny", "num_heads"), ("tiny-poolformer", "pool_size")):
        with pytest.raises(Refused) as caught:
            rc.fold(save(METHOD.example(arch, seed=15)))
        assert f"--set {flag}=" in caught.value.hint
    with pytest.raises(Refused) as caught:
        rc.fold(save(METHOD.example("tiny", seed=15)), settings={"num_heads": "5"})
    assert caught.value.code == "vit.heads"


def test_heads_are_those_that_the_trainers_args_tell():
    weights = METHOD.example("tiny", seed=15)
    folded = rc.fold(save(weights, args={"idle_ratio": 0.75, "num_heads": 3}))
    assert next((fact.value, fact.source) for fact in folded.facts if fact.name == "num_heads") == (3, "args")
    with pytest.raises(Refused) as caught:
        rc.fold(save(weights, args={"idle_ratio": 0.75, "num_heads": 0}), force=True)
    assert caught.value.code == "setting.needed"


def test_a_method_forced_on_another_net_is_refused(tiny):
    for method in ("repavit",):
        with pytest.raises(Refused) as caught:
            rc.fold(tiny, method=method)
        assert caught.value.code == "method.mismatch"


def test_a_deploy_form_at_idle_ratio_1_is_recognized_with_its_tensors_in_any_order():
    from repaconv.methods.repavit.checkpoint_reading import _whole_matrices

    tensors = {"blocks.0.mlp.fc1.weight": torch.zeros(4, 4), "blocks.0.mlp.fc1.bias": torch.zeros(4)}
    assert _whole_matrices(tensors)
    assert _whole_matrices(dict(sorted(tensors.items())))
    assert not _whole_matrices({**tensors, "blocks.0.mlp.fc1.weight": torch.zeros(8, 4)})


@pytest.mark.parametrize(
    "removed", [(), ("patch_embed.norm.",), ("attn.qkv.bias",), ("patch_embed.norm.", "attn.qkv.bias")]
)
@pytest.mark.parametrize("positions", [False, True])
def test_a_swin_may_lack_the_norm_of_its_patches_and_biases_and_may_have_positions(removed, positions):
    weights = METHOD.example("tiny-swin", seed=4)
    biases = {name: torch.zeros_like(value) for name, value in weights.items() if name.endswith("attn.qkv.bias")}
    if "attn.qkv.bias" in removed:
        weights |= biases
    net = METHOD.read(read_checkpoint(save(weights, "with.pth")), {"idle_ratio": "0.75"})
    trained = net.module().double()
    trained.load_state_dict({name: value.double() if value.is_floating_point() else value for name, value in
                             net.tensors.items()})  # fmt: skip
    weights = {name: value for name, value in weights.items() if not any(part in name for part in removed)}
    if positions:
        weights["absolute_pos_embed"] = torch.randn(1, 256, 16, generator=torch.Generator().manual_seed(0))
    images = np.random.default_rng(0).standard_normal((2, 3, 64, 64), dtype=np.float32)
    with torch.no_grad():
        embed = trained.patch_embed
        tokens = embed.proj(torch.from_numpy(images).double()).flatten(2).transpose(1, 2)
        tokens = tokens if "patch_embed.norm." in removed else embed.norm(tokens)
        tokens = tokens + weights["absolute_pos_embed"].double() if positions else tokens
        logits = trained.head(trained.norm(trained.layers(tokens)).mean(1))
    np.savez("r.npz", input=images, output_fp64=logits.numpy())
    rc.fold(save(weights), settings={"idle_ratio": "0.75"})
    found = links(rc.verify(inputs="r.npz"))
    assert max(found["recorded"], found["fold"]) <= 1e-12


def test_the_positions_of_a_swin_show_its_image_size():
    weights = METHOD.example("tiny-swin", seed=4)
    weights["absolute_pos_embed"] = torch.zeros(1, 256, 16)
    weights = {name: value for name, value in weights.items() if not name.endswith("attn_mask")}
    with pytest.raises(Refused, match="attn_mask"):  # of the size that the positions show, not a question for the size
        rc.fold(save(weights), settings={"idle_ratio": "0.75"})


@pytest.mark.parametrize(
    ("activations", "message"),
    [
        ((torch.nn.ReLU,), "--set act=ReLU"),
        ((torch.nn.LeakyReLU,), "has no setting for this"),
        ((torch.nn.ReLU, torch.nn.GELU), "has no setting for this"),
    ],
)
def test_the_activation_of_a_pickled_module_is_given_by_a_setting_that_the_method_takes(activations, message):
    save(METHOD.example("tiny-swin", seed=0))
    net = METHOD.read(read_checkpoint(Path("c.pth")), {}).module()
    net.load_state_dict(METHOD.example("tiny-swin", seed=0), strict=False)  # which counts batches, too
    kinds = cycle(activations)
    for name, part in [*net.named_modules()]:
        if isinstance(part, torch.nn.GELU):
            net.set_submodule(name, next(kinds)())
    torch.save(net, "other.pth")
    with pytest.raises(Refused, match="the activation is") as caught:
        rc.fold("other.pth")
    assert message in caught.value.hint
    if message.startswith("--set"):
        assert rc.fold("other.pth", settings={"act": "ReLU"}).verdict == "passed"
