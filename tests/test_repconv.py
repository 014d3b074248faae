"""RepVGG and MobileOne: against the papers in NumPy, against the official outputs, and what must be refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy_reference_networks
import pytest
import torch
import torch.nn.functional as F
from conftest import SHARED
from safetensors.torch import load_file

import repaconv as rc
from repaconv.algebra.convolution_kernels import Kernel, eye
from repaconv.backbones.repvgg_mobileone import RepBlock, RepConvConfig
from repaconv.checkpoints import read_checkpoint
from repaconv.core.errors import Refused, UsageProblem
from repaconv.methods.repconv import METHOD
from repaconv.methods.repconv.published_models import ARCHS, Arch, mobileone, repvgg, training_net
from repaconv.sources.method_detection import choose_method

IMAGES = np.random.default_rng(1).standard_normal((2, 3, 39, 50), dtype=np.float32)
EIGHTH = (0.125,) * 4
VGG, ONE = METHOD.example("tiny-repvgg", seed=2), METHOD.example("tiny-mobileone", seed=2)


def save(weights, path="c.pth", **beside):
    torch.save({"state_dict": weights, **beside}, path)
    return path


def record(weights, path="r.npz", **reader):
    np.savez(path, input=IMAGES, output_fp64=numpy_reference_networks.repconv(weights, IMAGES, **reader))
    return path


def links(verified):
    return {link.name: link.metrics.max_rel_error for link in verified.links}


def without(weights, *parts):
    return {name: value for name, value in weights.items() if not any(part in name for part in parts)}


def renamed(weights, spellings):
    """Weights under other names: each (pattern, replacement) is applied in turn."""
    found = {}
    for name, value in weights.items():
        for pattern, replacement in spellings:
            name = re.sub(pattern, replacement, name)
        found[name] = value
    return found


def in_timms_names(weights):
    """What timm's ByobNet calls the same."""
    spellings = (
        (r"^stage0\.", "stem."),
        (r"^stage(\d+)\.", lambda match: f"stages.{int(match[1]) - 1}."),
        (r"^linear\.", "head.fc."),
        (r"rbr_dense|rbr_conv", "conv_kxk"),
        (r"rbr_1x1", "conv_1x1"),
        (r"rbr_scale", "conv_scale"),
        (r"rbr_identity|rbr_skip", "identity"),
        (r"se\.(down|reduce)", "attn.fc1"),
        (r"se\.(up|expand)", "attn.fc2"),
    )
    return renamed(weights, spellings)


def in_mmpretrains_names(weights):
    """What mmpretrain calls the same: RepVGG's stages have another name than MobileOne's."""
    vgg = any(".rbr_dense." in name or ".rbr_reparam." in name for name in weights)
    spellings = (
        (r"\.bn\.", ".norm."),
        (r"rbr_dense", "branch_3x3"),
        (r"rbr_conv", "branch_conv_list"),
        (r"rbr_1x1", "branch_1x1"),
        (r"rbr_scale", "branch_scale"),
        (r"rbr_identity|rbr_skip", "branch_norm"),
        (r"rbr_reparam|reparam_conv", "branch_reparam"),
        (r"\.se\.(down|reduce)", f".{'se_layer' if vgg else 'se'}.conv1.conv"),
        (r"\.se\.(up|expand)", f".{'se_layer' if vgg else 'se'}.conv2.conv"),
        *(((r"^stage0\.", "stem."), (r"^stage(\d)\.", r"stage_\1.")) if vgg else ()),
        (r"^(?!linear)", "backbone."),
        (r"^linear\.", "head.fc."),
    )
    return renamed(weights, spellings)


# --- the algebra ------------------------------------------------------------------------------------------


def run(kernel, x):
    """A kernel of an image by torch, whose Conv2d pads both sides alike."""
    height, width, *after = kernel.pads
    assert after == [height, width]
    bias = None if kernel.bias is None else torch.from_numpy(kernel.bias)
    return F.conv2d(x, torch.from_numpy(kernel.weight), bias, kernel.strides, (height, width), groups=kernel.groups)


def test_parallel_convolutions_are_one():
    draw = np.random.default_rng(0).standard_normal
    random = np.random.default_rng(1)
    for _ in range(40):
        width, strides = 12, tuple(int(s) for s in random.integers(1, 3, 2))
        reach = random.integers(0, 2, 2)  # beyond the image on every side, for a 1x1 kernel
        both = []
        for _ in range(2):
            half, groups = random.integers(0, 3, 2), int(random.choice([1, 2, 3, 4, 6, 12]))
            weight = draw((24, width // groups, *(2 * half + 1)))
            pads = tuple(int(p) for p in (*half + reach, *half + reach))
            both.append(Kernel.convolution(weight, draw(24), groups=groups, strides=strides, pads=pads))
        f, g = both
        x = torch.from_numpy(draw((2, width, 7, 6)))
        assert torch.allclose(run(f + g, x), run(f, x) + run(g, x), rtol=1e-12, atol=1e-12)
        scale, shift = draw(24), draw(24)
        expected = run(f, x) * torch.from_numpy(scale)[:, None, None] + torch.from_numpy(shift)[:, None, None]
        assert torch.allclose(run(f.then(scale, shift), x), expected, rtol=1e-12, atol=1e-12)
        before, inside = f.of_scaled(np.resize(scale, width), None), torch.from_numpy(np.resize(scale, width))
        assert torch.allclose(run(before, x), run(f, x * inside[:, None, None]), rtol=1e-12, atol=1e-12)
    x = torch.from_numpy(draw((2, 4, 5, 5)))
    assert torch.equal(run(eye(4, 4), x), x)


def test_what_reads_other_places_is_not_added():
    def ones(*shape, **placed):
        return Kernel.convolution(np.ones(shape), **placed)

    padded = ones(4, 4, 3, 3, pads=(1,) * 4)
    for other in (
        ones(4, 4, 1, 1, pads=(1,) * 4),  # reaches one pixel further
        ones(4, 4, 1, 1, strides=(2, 2)),
        ones(4, 4, 2, 2),
        ones(4, 3, 1, 1),
        ones(2, 4, 1, 1),
    ):
        with pytest.raises(ValueError, match="cannot add"):
            padded + other
    with pytest.raises(ValueError, match="cannot add"):  # without padding the smaller one sees the border
        ones(4, 4, 3, 3) + ones(4, 4, 1, 1)
    with pytest.raises(ValueError, match="no convolution"):
        ones(4, 4, 3, 3, groups=3)


# --- checkpoints ------------------------------------------------------------------------------------------


def five_wide():
    """A kernel of 5 and stages of another number; no official net, and nothing says that it is not one."""
    blocks = (RepBlock(8, 8, 5, 2, 8), RepBlock(8, 12, 1, 1), RepBlock(12, 12, 5, 1, 12, 3))
    return Arch(RepConvConfig("mobileone", ((RepBlock(4, 8, 3, 2),), blocks), 1), 3)


NETS = {
    "g4": repvgg((3, 2, 3, 1), EIGHTH, 4, classes=7),
    "se": repvgg((1, 2, 1, 1), (0.25, 0.125, 0.25, 0.125), squeeze=True, classes=1),
    "one branch": mobileone(EIGHTH, 1, depths=(1, 1, 2, 1), classes=3),
    "four branches": mobileone((0.125, 0.25, 0.125, 0.125), 4, depths=(2, 1, 2, 1), squeeze=True, classes=3),
}
WRAPPED = {
    "g4": lambda weights: {"model": {f"module.{name}": value for name, value in weights.items()}, "epoch": 3},
    "se": lambda weights: {"state_dict": {f"_orig_mod.{name}": value for name, value in weights.items()}},
    "one branch": lambda weights: {"state_dict_ema": weights},
    "four branches": lambda weights: {f"backbone.{name}": value for name, value in weights.items()},
}


@pytest.mark.parametrize("name", NETS)
def test_every_kind_folds_exactly(name):
    arch = NETS[name]
    weights = METHOD.example(arch, seed=5)
    torch.save(WRAPPED[name](weights), "c.pth")
    folded = rc.fold("c.pth")
    found = links(rc.verify(inputs=record(weights)))
    assert max(found["recorded"], found["fold"]) <= 1e-12
    assert found["stored"] <= 1e-5
    assert [step.module for step in folded.certificate] == list(arch.config.blocks)
    assert all(step.max_rel_error <= 1e-12 and "ReLU" in step.not_folded for step in folded.certificate)
    blocks = arch.config.blocks.values()
    convs = sum(b.width * (b.in_width // b.groups * b.kernel**2 + 1) for b in blocks)
    squeezes = sum(2 * b.width * b.squeezed + b.width + b.squeezed for b in blocks if b.squeezed)
    head = arch.config.classes * (arch.config.stages[-1][-1].width + 1)
    assert folded.deploy.parameters == convs + squeezes + head


def test_features_in_half_precision_with_another_eps():
    weights = {k: v.half() if v.is_floating_point() else v for k, v in without(ONE, "linear.").items()}
    folded = rc.fold(save(weights), settings={"bn_eps": "1e-3"})
    assert folded.output == "features"
    found = links(rc.verify(inputs=record(weights, eps=1e-3)))
    assert max(found["recorded"], found["fold"]) <= 1e-12


def test_other_kernels_channels_and_stages():
    arch = five_wide()
    rc.fold(save(METHOD.example(arch, seed=3)))
    assert max(links(rc.verify())[link] for link in ("fold", "stored")) <= 1e-5
    facts = {fact.name: fact.value for fact in rc.inspect("c.pth").facts}
    assert (facts["kernels"], facts["depths"]) == ([1, 3, 5], [1, 3])


@pytest.mark.parametrize("weights", [VGG, ONE], ids=["repvgg", "mobileone"])
def test_timms_names_are_the_same_net(weights):
    ours = rc.fold(save(weights))
    theirs = rc.fold(save({f"module.{name}": value for name, value in in_timms_names(weights).items()}, "t.pth"))
    assert theirs.payload.sha256 == ours.payload.sha256
    assert theirs.config == ours.config


@pytest.mark.parametrize("weights", [VGG, ONE], ids=["repvgg", "mobileone"])
def test_mmpretrains_names_are_the_same_net(weights):
    ours = rc.fold(save(weights))
    stored = load_file(ours.output_files[0])
    theirs = rc.fold(save(in_mmpretrains_names(weights), "m.pth"))
    assert (theirs.payload.sha256, theirs.config) == (ours.payload.sha256, ours.config)
    again = rc.fold(save(in_mmpretrains_names(stored), "deployed.pth"), allow_deployed=True)
    assert again.config == ours.config


def test_the_configuration_of_mmpretrain_is_heeded():
    def config(**of):
        return {"cfg": f"model = dict(backbone=dict(type='RepVGG', {', '.join(f'{k}={v}' for k, v in of.items())}))"}

    weights = in_mmpretrains_names(VGG)
    folded = rc.fold(save(weights, meta=config(norm_cfg="dict(type='BN', eps=1e-3)", act_cfg="dict(type='ReLU')")))
    assert next(fact.value for fact in folded.facts if fact.name == "bn_eps") == 1e-3
    for wrong in ({"act_cfg": "dict(type='SiLU')"}, {"strides": "(1, 2, 2, 2)"}, {"dilations": "(1, 1, 1, 2)"}):
        with pytest.raises(Refused) as caught:
            rc.fold(save(weights, "other.pth", meta=config(**wrong)))
        assert caught.value.code == "repconv.config"


@pytest.mark.parametrize("weights", [VGG, ONE], ids=["repvgg", "mobileone"])
def test_the_deploy_form_is_the_official_one_and_is_recognised(weights):
    rc.fold(save(weights))
    stored = load_file("repaconv-out/c/model.safetensors")
    torch.save(stored, "deployed.pth")
    with pytest.raises(Refused) as caught:
        rc.fold("deployed.pth")
    assert caught.value.code == "method.deployed"
    assert rc.inspect("deployed.pth").form == "deploy"
    again = rc.fold("deployed.pth", allow_deployed=True)
    assert all(torch.equal(value, stored[name]) for name, value in load_file(again.output_files[0]).items())
    assert links(rc.verify(inputs=record(weights)))["recorded"] <= 1e-6  # it was stored in float32
    theirs = {re.sub("rbr_reparam", "reparam_conv", name): value for name, value in in_timms_names(stored).items()}
    assert rc.fold(save(theirs, "timm.pth"), allow_deployed=True).deploy.parameters == again.deploy.parameters


def test_strides_follow_from_identities_and_are_else_the_official_codes():
    arch = repvgg((1, 1, 1, 1), (0.125, 0.0625, 0.0625, 0.0625), classes=2)  # widths 8 8 8 16 32
    still = RepConvConfig("repvgg", tuple((RepBlock(*_sizes(s), 3, 1 if i == 2 else 2),) for i, s in
                          enumerate(arch.config.stages)), 2)  # fmt: skip
    weights = METHOD.example(Arch(still), seed=4)
    folded = rc.fold(save(weights))
    strides = next(fact for fact in folded.facts if fact.name == "strides")
    assert strides.value == "2,2,1,2,2"
    assert "in 2 of 5 an identity branch" in strides.source
    # of the others nothing in the file says anything, so that a setting contradicts nothing
    assert rc.fold("c.pth", settings={"strides": "2,2,1,1,2"}).training.macs > folded.training.macs
    with pytest.raises(Refused, match="rbr_identity"):
        rc.fold("c.pth", settings={"strides": "2,2,2,2,2"})
    for wrong in ({"strides": "2,2"}, {"strides": "2,2,1,2,0"}, {"stride": "2"}, {"bn_eps": "0"}):
        with pytest.raises(UsageProblem):
            rc.fold("c.pth", settings=wrong)


@pytest.mark.parametrize(
    ("change", "message", "settings"),
    [
        (lambda net: setattr(net.stage0.rbr_dense.conv, "stride", (1, 1)), "conv.stride is (1, 1)", "strides"),
        (lambda net: setattr(net.stage1[0].rbr_1x1.bn, "eps", 1e-3), "bn.eps is 0.001", "bn_eps=0.001"),
        (lambda net: [setattr(net.stage2[0], "relu", torch.nn.SiLU())], "the activation is ReLU, SiLU", "no setting"),
    ],
)
def test_a_pickled_module_that_computes_something_else_than_was_read_is_refused(change, message, settings):
    arch = ARCHS["tiny-repvgg"]
    net = training_net(arch)
    net.load_state_dict(METHOD.example("tiny-repvgg", seed=0))
    save(net, "same.pth")
    assert rc.fold("same.pth").verdict == "passed"
    change(net)
    save(net, "other.pth")
    with pytest.raises(Refused, match=re.escape(message)) as caught:
        rc.fold("other.pth")
    assert caught.value.code == "checkpoint.attributes"
    assert settings in caught.value.hint


def test_a_pickled_module_folds_with_its_own_settings():
    net = training_net(ARCHS["tiny-repvgg"])
    net.load_state_dict(METHOD.example("tiny-repvgg", seed=0))
    net.stage0.rbr_dense.conv.stride = net.stage0.rbr_1x1.conv.stride = (1, 1)
    net.stage0.rbr_dense.conv.padding = "same"  # as pixels, 1
    for part in net.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.eps = 1e-3
    save(net, "own.pth")
    rc.fold("own.pth", settings={"strides": "1,2,2,2,2", "bn_eps": "0.001"})
    images = np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype(np.float32)
    with torch.no_grad():
        output = net.double()(torch.from_numpy(images).double())
    np.savez("pair.npz", input=images, output=output.numpy())
    assert links(rc.verify(inputs="pair.npz"))["recorded"] <= 1e-12


def as_qarepvgg(weights):
    """The same kernels in QARepVGG's blocks: one BatchNorm of the dense branch and one of the sum."""
    made = {}
    for name, value in without(weights, "rbr_1x1.bn", "rbr_identity").items():
        made[name.replace("rbr_1x1.conv.weight", "rbr_1x1.weight")] = value
        if ".rbr_dense.bn." in name:
            made[name.replace("rbr_dense.", "")] = value.flip(0) if value.ndim else value
    return made


def test_a_qarepvgg_has_one_norm_of_the_sum():
    weights = as_qarepvgg(METHOD.example(repvgg((2, 3, 2, 1), EIGHTH, 2, classes=5), seed=6))
    folded = rc.fold(save(weights))
    assert max(step.max_rel_error for step in folded.certificate) <= 1e-12
    found = links(rc.verify(inputs=record(weights)))
    assert max(found["recorded"], found["fold"]) <= 1e-12
    assert {name.split(".")[-2] for name in load_file(folded.output_files[0])} == {"rbr_reparam", "linear"}


def test_a_repvggplus_folds_without_its_auxiliary_heads():
    wide = repvgg((2, 2, 2, 1), EIGHTH, squeeze=True, classes=5).config.stages
    stages = (*wide[:4], wide[3][1:], wide[4])  # stage 3 in two parts, of which the second begins without a stride
    stages = (*stages[:3], wide[3][:1], *stages[4:])
    weights = METHOD.example(Arch(RepConvConfig("repvgg", stages, 5)), seed=7)
    spellings = (
        (r"^stage5\.", "stage4.blocks."),
        (r"^stage4\.(?=\d)", "stage3_second.blocks."),
        (r"^stage3\.", "stage3_first.blocks."),
        (r"^stage([12])\.", r"stage\1.blocks."),
        (r"\.se\.", ".post_se."),
    )
    official = {}
    for name, value in weights.items():
        for pattern, replacement in spellings:
            name = re.sub(pattern, replacement, name)
        official[name] = value
    official |= {"stage1_aux.0.conv.weight": torch.ones(8, 8, 3, 3), "stage3_first_aux.3.bias": torch.ones(5)}
    folded = rc.fold(save({f"module.{name}": value for name, value in official.items()}))
    facts = {fact.name: fact.value for fact in folded.facts}
    assert facts["unused"] == ["stage1_aux", "stage3_first_aux"]
    assert facts["strides"] == "2,2,2,2,1,2"
    found = links(rc.verify(inputs=record(weights, squeezed_last=True)))
    assert max(found["recorded"], found["fold"]) <= 1e-12
    # deployed, no branch shows the stride with which the second part of stage 3 begins
    official = {}
    for name, value in load_file(folded.output_files[0]).items():
        for pattern, replacement in spellings:
            name = re.sub(pattern, replacement, name)
        official[name] = value
    again = rc.fold(save(official, "deployed.pth"), allow_deployed=True)
    assert next(fact.value for fact in again.facts if fact.name == "strides") == "2,2,2,2,1,2"


def test_of_two_networks_in_a_file_the_hint_selects_one():
    both = {f"module.{which}.{name}": value for which in ("encoder_q", "encoder_k") for name, value in VGG.items()}
    with pytest.raises(Refused) as caught:
        rc.fold(save(both, "both.pth"))
    assert caught.value.hint == "Select one with --weights, e.g. --weights module.encoder_k."
    assert rc.fold("both.pth", weights="module.encoder_k").verdict == "passed"


def _sizes(stage):
    return stage[0].in_width, stage[0].width


def test_a_live_module_folds_whole():
    net = training_net(ARCHS["tiny-mobileone"])
    net.load_state_dict(ONE)
    folded = rc.fold(net)
    x = torch.from_numpy(IMAGES)
    assert sum(p.numel() for p in folded.parameters()) < sum(p.numel() for p in net.parameters())
    assert torch.allclose(folded(x), net(x), rtol=1e-4, atol=1e-5)
    for part in net.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.eps = 1e-3
    assert torch.allclose(rc.fold(net)(x), net(x), rtol=1e-4, atol=1e-5)


def test_what_must_be_refused():
    deployed = {"stage1.0.reparam_conv.weight": torch.ones(8, 1, 3, 3), "stage1.0.reparam_conv.bias": torch.ones(8)}
    even = torch.ones(8, 3, 2, 2)
    for weights, code in (
        (without(ONE, "stage3.2.rbr_conv.1."), "checkpoint.missing-keys"),  # a branch of its own, whole
        (without(VGG, "stage2.1.rbr_identity"), "checkpoint.missing-keys"),
        (without(VGG, "stage2.0."), "checkpoint.missing-keys"),
        (without(VGG, "stage2."), "checkpoint.missing-keys"),
        (without(VGG, "stage0."), "checkpoint.missing-keys"),
        (without(VGG, "stage1.0.rbr_dense.conv"), "checkpoint.missing-keys"),
        ({**VGG, "stage1.0.bn.weight": torch.ones(8)}, "checkpoint.unexpected-keys"),  # QARepVGG's
        ({**VGG, "stage0.rbr_dense.conv.weight": even}, "checkpoint.shape"),
        ({**VGG, "stage0.rbr_1x1.bn.running_var": -torch.ones(8)}, "checkpoint.negative-variance"),
        (without(ONE, "stage1.0.rbr_") | deployed, "repconv.mixed-forms"),
        (VGG | {f"teacher.{name}": value for name, value in ONE.items()}, "checkpoint.ambiguous"),
        (as_qarepvgg(VGG), "repconv.squeeze"),
    ):
        with pytest.raises(Refused) as caught:
            rc.fold(save(weights))
        assert caught.value.code == code, caught.value.message
    assert not Path("repaconv-out").exists()


def test_no_other_net_is_taken_for_one():
    for key in (
        "patch_embed.0.rbr_conv.0.conv.weight",  # FastViT
        "network.0.0.token_mixer.mixer.rbr_scale.conv.weight",
        "stem.0.conv_kxk.0.conv.weight",  # timm's FastViT
        "stages.0.blocks.0.token_mixer.mixer.conv_kxk.0.conv.weight",
        "backbone.stem.rbr_dense.conv.weight",  # YOLOv6
        "network.0.0.norm_reparam.weight",
        "stages.0.0.conv2_kxk.conv.weight",  # other blocks of ByobNet
    ):
        torch.save({key: torch.ones(8, 1, 3, 3), "head.weight": torch.ones(2, 8)}, "c.pth")
        assert METHOD.detect(read_checkpoint("c.pth")) is None, key
    for weights in (VGG, ONE, in_timms_names(VGG), in_timms_names(ONE)):
        chosen, detection = choose_method(read_checkpoint(save(weights)), "auto")
        assert (chosen.name, detection.confidence) == ("repconv", "certain")


# --- the papers' nets -------------------------------------------------------------------------------------


def test_the_papers_sizes():
    rows = {row.model: row for row in rc.table("repconv").rows}
    for row in rows.values():
        digits = row.parameters[:-1]  # RepVGG's are cut off, MobileOne's rounded
        assert abs(row.cost.parameters / 1e6 - float(digits)) < 10.0 ** -len(digits.partition(".")[2]), row.model
        printed = float(row.macs[:-1]) * {"G": 1e9, "M": 1e6}[row.macs[-1]]
        assert row.cost.layer_macs == pytest.approx(printed, rel=0.03 if row.macs.endswith("G") else 5e-4), row.model
    assert len(rows) == 16


@pytest.mark.skipif(not (SHARED / "repconv").is_dir(), reason="official checkpoints are absent")
@pytest.mark.parametrize(
    ("name", "training", "deploy", "export"),
    [
        ("repvgg_small", 50_346, 44_730, {}),
        pytest.param("mobileone_small", 62_570, 15_642, {"image_size": 64, "batch": 1}, marks=pytest.mark.slow),
    ],
)
def test_official_checkpoints(name, training, deploy, export):
    path = SHARED / "repconv" / f"{name}.pth"
    blocks, folded = rc.inspect(path).blocks, rc.fold(path)
    assert (folded.training.parameters, folded.deploy.parameters) == (training, deploy)
    assert training - deploy == sum(block.training.parameters - block.deploy.parameters for block in blocks)
    exported = rc.export(**export)
    verified = rc.verify(inputs=path.with_suffix(".npz"))
    assert (folded.verdict, exported.verdict, verified.verdict) == ("passed",) * 3
    found = links(verified)
    assert max(found["fold"], found["recorded"]) <= 1e-12
    assert max(found["stored"], found["onnx"]) <= 1e-5
    if export:
        assert rc.bench(rounds=2).agreement.verdict == "passed"


def test_a_block_of_one_branch_has_one_batchnorm_in_its_row():
    """MobileOne-S1 has such blocks: a 1x1 convolution between two widths, without a scale and a shortcut."""
    found = read_checkpoint(save(METHOD.example("mobileone-s1", seed=0)))
    steps = [part.step.folded[0] for part in METHOD.read(found, {}).parts() if part.step]
    assert any(re.fullmatch(r"rbr_conv\.0 and its BatchNorm -> reparam_conv", row) for row in steps), steps
    assert any("rbr_conv.0, rbr_skip and their BatchNorms" in row for row in steps)
