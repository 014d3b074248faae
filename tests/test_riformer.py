"""RIFormer: against the paper in NumPy, against the official outputs, and what must be refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy_reference_networks
import pytest
import torch
from conftest import OFFICIAL, TINY, one_quick
from packaging.version import Version

import repaconv as rc
from repaconv.core.errors import Refused, UsageProblem
from repaconv.methods.riformer import METHOD
from repaconv.methods.riformer.paper_equations import fold_block
from repaconv.methods.riformer.published_models import ARCHS

IMAGES = np.random.default_rng(1).standard_normal((3, 3, 39, 50), dtype=np.float32)


def save(weights, path="c.pth", **beside):
    torch.save({"state_dict": weights, **beside}, path)
    return path


def record(weights, path="r.npz", **reader):
    np.savez(path, input=IMAGES, output_fp64=numpy_reference_networks.riformer(weights, IMAGES, **reader))
    return path


def links(verified):
    return {link.name: link.metrics.max_rel_error for link in verified.links}


def test_equation_4():
    g, b, s, t, l1 = torch.randn(5, 4, dtype=torch.float64)
    one, zero = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    fc = {"mlp.fc1.weight": torch.eye(4)[:, :, None, None], "mlp.fc2.weight": torch.eye(4)[:, :, None, None]}
    block = {
        **fc,
        "mlp.fc1.bias": zero,
        "mlp.fc2.bias": zero,
        "norm1.weight": g,
        "norm1.bias": b,
        "norm2.weight": one,
        "norm2.bias": zero,
        "token_mixer.affine.weight": s[:, None, None, None],
        "token_mixer.affine.bias": t,
    }
    norm1 = fold_block(block)["norm1"]
    assert torch.allclose(norm1.weight, g * (s - 1), rtol=1e-14, atol=0)
    assert torch.allclose(norm1.bias, b * (s - 1) + t, rtol=1e-14, atol=1e-15)
    scaled = fold_block({**block, "layer_scale_1": l1, "layer_scale_2": one})["norm1"]
    assert torch.allclose(scaled.weight, l1 * g * (s - 1), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("config", "wrap"),
    [
        (TINY, "mm"),
        (replace(TINY, layers=(1, 1, 2, 1), widths=(8, 16, 20, 24), hidden=(8, 40, 60, 24)), "listing"),
        (replace(TINY, layers=(2,), widths=(6,), hidden=(18,)), "mm"),
        (replace(TINY, stem=(5, 4, 2), in_channels=3, classes=1), "ddp"),
    ],
)
def test_every_layout_folds_exactly(config, wrap):
    weights = METHOD.example(config, seed=5)
    last = 2 * len(config.layers) - 2
    names = {
        "mm": lambda name: name,
        "ddp": lambda name: f"module.{name}",
        "listing": lambda name: (
            name.replace("backbone.", "").replace(f"norm{last}.", "norm.").replace("head.fc", "head")
        ),
    }[wrap]
    folded = rc.fold(save({names(name): value for name, value in weights.items()}))
    assert all(step.max_rel_error <= 1e-12 for step in folded.certificate)
    found = links(rc.verify(inputs=record(weights)))
    assert found["recorded"] <= 1e-12
    assert found["fold"] <= 1e-12
    assert found["stored"] <= 1e-5
    assert folded.deploy.parameters == sum(np.prod(tensor.shape, dtype=int) for tensor in folded.tensors)


def test_without_layer_scale_and_in_half_precision():
    weights = {k: v.half() for k, v in METHOD.example(TINY, seed=6).items() if "layer_scale" not in k}
    rc.fold(save(weights))
    found = links(rc.verify(inputs=record({k: v.double() for k, v in weights.items()})))
    assert max(found["recorded"], found["fold"]) <= 1e-12


@pytest.mark.parametrize("way", ["meta.cfg", "--set"])
def test_per_pixel_norms_show_in_the_configuration_alone(way):
    weights = METHOD.example(TINY, seed=7)
    text = "model = dict(backbone=dict(type='RIFormer', norm_cfg=dict(type='LN2d', eps=1e-3)))"
    if way == "meta.cfg":
        folded = rc.fold(save(weights, meta={"cfg": text}))
    else:
        folded = rc.fold(save(weights), settings={"norm": "LN2d", "eps": "1e-3"})
    assert {fact.name: fact.source for fact in folded.facts}["norm"] == way
    found = links(rc.verify(inputs=record(weights, per_pixel=True, eps=1e-3)))
    assert max(found["recorded"], found["fold"]) <= 1e-12


def test_the_wrong_norm_fails_against_the_recorded_output():
    weights = METHOD.example(TINY, seed=7)
    rc.fold(save(weights))
    verified = rc.verify(inputs=record(weights, per_pixel=True))
    assert verified.verdict == "failed"
    assert [link.name for link in verified.links if link.verdict == "failed"] == ["recorded"]


def test_a_setting_against_the_file_is_reported():
    weights = METHOD.example(TINY, seed=7)
    text = "model = dict(backbone=dict(type='RIFormer', norm_cfg=dict(type='GN', num_groups=1, eps=1e-6)))"
    folded = rc.fold(save(weights, meta={"cfg": text}), settings={"eps": "1e-4"}, force=True)
    assert next(fact for fact in folded.facts if fact.name == "eps").against == "meta.cfg says 1e-06"
    for settings in ({"esp": "1e-4"}, {"eps": "big"}, {"eps": "2"}, {"norm": "BN"}, {"image_size": "0"}):
        with pytest.raises(UsageProblem):
            rc.fold("c.pth", settings=settings)


def test_a_backbone_alone_gives_features():
    weights = METHOD.example(TINY, seed=8)
    folded = rc.fold(save({k: v for k, v in weights.items() if not k.startswith("head.")}))
    assert folded.output == "features"
    assert max(links(rc.verify()).values()) <= 1e-5


def test_norms_that_no_head_reads_are_dropped_and_named():
    weights = METHOD.example(TINY, seed=8)
    extra = {"backbone.norm0.weight": torch.ones(8), "backbone.norm0.bias": torch.zeros(8)}
    folded = rc.fold(save({**weights, **extra}))
    assert next(f for f in folded.facts if f.name == "unused").value == ["norm0.bias", "norm0.weight"]


def deployed(weights):
    """What the official switch_to_deploy leaves."""
    new = {k: v for k, v in weights.items() if ".norm1." not in k and "token_mixer" not in k}
    for key, s in weights.items():
        if key.endswith("token_mixer.affine.weight"):
            block = key.removesuffix("token_mixer.affine.weight")
            s, t = s.flatten(), weights[f"{block}token_mixer.affine.bias"]
            new[f"{block}norm_reparam.weight"] = weights[f"{block}norm1.weight"] * (s - 1)
            new[f"{block}norm_reparam.bias"] = weights[f"{block}norm1.bias"] * (s - 1) + t
    return new


def test_a_deployed_checkpoint_is_recognised():
    weights = METHOD.example(TINY, seed=9)
    save(deployed(weights))
    with pytest.raises(Refused, match="already has the inference-time architecture") as caught:
        rc.fold("c.pth")
    assert caught.value.code == "method.deployed"
    assert rc.inspect("c.pth").form == "deploy"
    rc.fold("c.pth", allow_deployed=True)
    found = links(rc.verify(inputs=record(weights)))
    assert found["fold"] <= 1e-12
    assert found["recorded"] <= 1e-6  # its float32 product was stored


def test_images_that_are_too_small_are_refused():
    save(METHOD.example(TINY, seed=9))
    with pytest.raises(UsageProblem, match="too small"):
        rc.fold("c.pth", settings={"image_size": "1"})
    rc.fold("c.pth", settings={"image_size": "3"})
    if Version(torch.__version__) < Version("2.8"):  # its graph does not run at a second size this small
        with pytest.raises(Refused, match="does not run under ONNX Runtime"):
            rc.export()
    else:
        rc.export()
        assert max(links(rc.verify()).values()) <= 1e-5
    np.savez("small.npz", input=np.zeros((1, 3, 1, 9)))
    with pytest.raises(UsageProblem, match="too small"):
        rc.verify(inputs="small.npz")
    with pytest.raises(UsageProblem, match="too small"):
        rc.export(image_size=2)


def test_a_configuration_of_another_shape_is_refused():
    for said in ("norm_cfg=['GN']", "in_stride=(4, 4)", "norm_cfg=dict(type='BN')", "act_cfg=dict(type='Odd')",
                 "act_cfg=dict(type='GELU', approximate='odd')", "act_cfg=dict(type='ReLU', at=1)", "act_cfg=acts",
                 "norm_cfg=dict(type='GN', affine=False)", "norm_cfg=dict(type='GN', momentum=1)"):  # fmt: skip
        save(METHOD.example(TINY, seed=9), meta={"cfg": f"model = dict(backbone=dict(type='RIFormer', {said}))"})
        with pytest.raises(Refused):
            rc.fold("c.pth")


def test_a_gelu_by_tanh_is_one():
    cfg = "model = dict(backbone=dict(type='RIFormer', act_cfg=dict(type='GELU', approximate='tanh')))"
    save(METHOD.example(TINY, seed=9), meta={"cfg": cfg})
    folded = rc.fold("c.pth")
    assert [(fact.value, fact.source) for fact in folded.facts if fact.name == "act"] == [("GELU-tanh", "meta.cfg")]
    assert folded.config["act"] == "GELU-tanh"


def test_what_must_be_refused():
    weights = METHOD.example(TINY, seed=9)
    other = deployed(weights)
    mixed = {k: (other if ".network.0." in k else weights).get(k) for k in {**weights, **other}}
    save({k: v for k, v in mixed.items() if v is not None})
    with pytest.raises(Refused, match=r"training-time architecture and .* inference-time one"):
        rc.fold("c.pth")
    save({k: v for k, v in weights.items() if "token_mixer" not in k})  # these are PoolFormer's keys
    with pytest.raises(Refused) as caught:
        rc.fold("c.pth", method="riformer")
    assert caught.value.code == "method.mismatch"
    assert rc.inspect("c.pth").method is None
    save({k.replace("network.2.", "network.1."): v for k, v in weights.items() if "network.1." not in k})
    with pytest.raises(Refused) as caught:
        rc.fold("c.pth")
    assert caught.value.code == "riformer.stages"
    assert rc.inspect("c.pth").problems


def test_the_papers_sizes():
    # Table 6 of the paper: parameters in millions and MACs in billions at 224 pixels.
    printed = {"s12": (12, 1.8), "s24": (21, 3.4), "s36": (31, 5.0), "m36": (56, 8.8), "m48": (73, 11.6)}
    from repaconv.backbones.metaformer import BACKBONE
    from repaconv.backbones.parameter_and_mac_counts import cost_of

    for arch, (millions, billions) in printed.items():
        cost = cost_of(lambda arch=arch: BACKBONE.deploy(ARCHS[arch]), (3, 224, 224))
        assert round(cost.parameters / 1e6) == millions
        # the paper counts the norms too, which are a hundredth here
        assert billions - 0.1 <= cost.macs / 1e9 <= billions + 0.05


@pytest.mark.parametrize("path", one_quick(OFFICIAL))
def test_official_checkpoints(path):
    folded = rc.fold(path)
    with np.load(path.with_suffix(".npz")) as recorded:
        official, images = recorded["output_train_fp64"], recorded["input"]
    exported = rc.export(batch=len(images), image_size=images.shape[2:])  # a free one takes four times as long to trace
    verified = rc.verify(inputs=path.with_suffix(".npz"))
    assert (folded.verdict, exported.verdict, verified.verdict) == ("passed",) * 3
    found = links(verified)
    assert found["fold"] <= 1e-12
    assert found["recorded"] <= 1e-12
    assert max(found["stored"], found["onnx"]) <= 1e-5
    import onnxruntime

    output = onnxruntime.InferenceSession(exported.output_files[0]).run(["logits"], {"input": images})[0]
    assert np.abs(output - official).max() / np.abs(official).max() <= 1e-5
