"""Live modules of the user: networks of known architecture, and known blocks within unknown networks. A module that
only looks like a known one is not folded.
"""

from __future__ import annotations

import copy
import sys
import traceback

import pytest
import torch
from conftest import TINY
from torch import nn

import repaconv as rc
from repaconv.core.errors import Refused, UsageProblem
from repaconv.methods.pyra import METHOD as PYRA
from repaconv.methods.repavit import METHOD as REPAVIT
from repaconv.methods.riformer.paper_equations import RIFormerBlock


def trained(module):
    """Statistics and affines as a training leaves them."""
    torch.manual_seed(0)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
            part.num_batches_tracked.fill_(100)
            nn.init.normal_(part.weight, 1, 0.3)
            nn.init.normal_(part.bias)
    return module


def same(model, folded, x, limit=1e-12):
    with torch.no_grad():
        before = copy.deepcopy(model).double().eval()(x.double())
        after = copy.deepcopy(folded).double().eval()(x.double())
    assert (before - after).abs().max() <= limit * before.abs().max()


class Tokens(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.bn = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.bn(x.transpose(1, 2)).transpose(1, 2)


class IdleFfn(nn.Module):
    """A user's channel-idle FFN, with or without its shortcut inside."""

    def __init__(self, width=8, hidden=32, act_channels=8, shortcut=True):
        super().__init__()
        self.norm1, self.fc1 = nn.BatchNorm1d(width), nn.Linear(width, hidden)
        self.norm2, self.fc2 = nn.BatchNorm1d(hidden), nn.Linear(hidden, width)
        self.act_channels, self.shortcut = act_channels, shortcut

    def forward(self, x):
        h = self.fc1(self.norm1(x.transpose(1, 2)).transpose(1, 2))
        h = torch.cat([nn.functional.gelu(h[..., : self.act_channels]), h[..., self.act_channels :]], -1)
        y = self.fc2(self.norm2(h.transpose(1, 2)).transpose(1, 2))
        return x + y if self.shortcut else y


class OwnNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = IdleFfn()
        self.outside = IdleFfn(shortcut=False)
        self.tail = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3), nn.ReLU())

    def forward(self, x):
        x = self.inside(torch.sin(x))
        return self.tail((x + self.outside(x)).mean(1))


def test_parts_of_an_unknown_net():
    model = trained(OwnNet()).float()
    keys = set(model.state_dict())
    folded = rc.fold(model)
    assert set(model.state_dict()) == keys  # the user's own is as it was
    assert [step.module for step in folded.fold_certificate] == ["inside", "outside", "tail.0", "."]
    assert not any(isinstance(part, nn.BatchNorm1d) for part in folded.modules())
    assert next(folded.parameters()).dtype == torch.float32
    # stored in float32 again, so float32's rounding is what is left
    same(model, folded, torch.randn(3, 5, 8), limit=1e-5)
    assert max(step.max_rel_error for step in folded.fold_certificate) <= 1e-12
    double = trained(OwnNet()).double()
    same(double, rc.fold(double), torch.randn(3, 5, 8))


class Silent(IdleFfn):
    """No attribute tells A, and the statistics are noise."""

    def forward(self, x):
        h = self.fc1(self.norm1(x.transpose(1, 2)).transpose(1, 2))
        h = torch.cat([nn.functional.gelu(h[..., :16]), h[..., 16:]], -1)
        return x + self.fc2(self.norm2(h.transpose(1, 2)).transpose(1, 2))


def test_an_idle_ratio_may_be_said_and_a_wrong_one_is_found_out():
    model = nn.Sequential(trained(Silent(act_channels=None))).double()
    folded = rc.fold(model, idle_ratio=0.5)
    assert "16 idle channels of 32" in folded.fold_certificate[0].folded[0]
    same(model, folded, torch.randn(2, 5, 8))
    with pytest.raises(Refused):
        rc.fold(model, idle_ratio=0.25)


def test_a_whole_known_net_becomes_its_deploy_form(tmp_path):
    torch.save({"model": REPAVIT.example("tiny", seed=3)}, "c.pth")
    from repaconv.checkpoints import read_checkpoint

    form = REPAVIT.read(read_checkpoint("c.pth"), {"num_heads": "3"})
    model = form.module()
    model.load_state_dict(form.tensors)
    folded = rc.fold(model, num_heads=3)
    same(model, folded, torch.randn(2, 3, 32, 32), limit=1e-5)
    assert sum(p.numel() for p in folded.parameters()) < sum(p.numel() for p in model.parameters())
    for block in model.blocks:
        block.attn.num_heads = 3  # as timm's modules have it
    same(model, rc.fold(model), torch.randn(2, 3, 32, 32), limit=1e-5)
    assert rc.fold(model.double()).fold_certificate[-1].max_rel_error <= 1e-12


class PeftLinear(nn.Module):
    """A LoRA layer as PEFT's are built."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base_layer, self.r, self.scaling = base, {"default": rank}, {"default": 4 / rank}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scaling["default"]


def plain_vit():
    """A plain vision transformer under timm's names, its weights random."""
    torch.save({n: w for n, w in PYRA.example("tiny", seed=4).items() if "pyra" not in n}, "p.pth")
    from dataclasses import replace

    from repaconv.backbones.vit import ViT
    from repaconv.backbones.vit_layers import MlpSpec
    from repaconv.backbones.vit_training_blocks import BlockTraits, PlainAttention, PlainBlock
    from repaconv.backbones.vit_training_norms import NormTraits

    config = PYRA.published("tiny").deploy().config
    norm = NormTraits("layer", 1e-6)
    traits = BlockTraits(norm, norm, scale1=False, scale2=False)
    config = replace(config, blocks=tuple(replace(block, merge=None) for block in config.blocks))
    model = ViT(config, lambda config, _: PlainBlock(config, PlainAttention(24, 3), MlpSpec(96).build(24), traits))
    model.load_state_dict(torch.load("p.pth", weights_only=True))
    for block in model.blocks:
        block.attn.num_heads = 3
    return model.eval()


def of_lora(folded):
    return [step.module for step in folded.fold_certificate if "lora" in step.folded[0]]


def test_lora_on_a_live_vit_whole_or_in_parts():
    model = plain_vit()
    for block in model.blocks:
        block.attn.qkv = PeftLinear(block.attn.qkv)
    whole = rc.fold(model)
    same(model, whole, torch.randn(2, 3, 32, 32), limit=1e-5)
    assert "lora" in " ".join(row for step in whole.fold_certificate for row in step.folded)

    class Detector(nn.Module):  # the same inside something that no method knows
        def __init__(self):
            super().__init__()
            self.backbone = model
            self.box = nn.Linear(5, 4)

        def forward(self, x):
            return self.box(self.backbone(x))

    parts = rc.fold(Detector())
    assert of_lora(parts) == [f"backbone.blocks.{i}.attn.qkv" for i in range(3)]
    assert not any("lora" in name for name in parts.state_dict())


class Switching(nn.Module):
    """Leaves its adapter out, but not in the first call."""

    def __init__(self):
        super().__init__()
        self.fc, self.calls = PeftLinear(nn.Linear(8, 8)), 0

    def forward(self, x):
        self.calls += 1
        return self.fc(x) if self.calls == 1 else self.fc.base_layer(x)


def test_a_module_that_computes_something_else_in_its_next_call_keeps_its_adapter_and_its_class():
    folded, x = rc.fold(Switching(), example=torch.randn(4, 8)), torch.randn(4, 8)
    message = " ".join(folded.fold_certificate[-1].not_folded)
    assert "fc, lora (default) -> weight: the module gives other outputs when it is called again" in message
    folded(x)
    assert torch.equal(folded(x), folded.fc.base_layer(x))


class Caching(nn.Module):
    """Its second call returns more rows, or refuses."""

    def __init__(self, grows):
        super().__init__()
        self.fc, self.grows, self.cache = PeftLinear(nn.Linear(8, 8)), grows, None

    def forward(self, x):
        if self.cache is not None and not self.grows:
            raise RuntimeError("reset it first")
        y = self.fc(x)
        self.cache = y if self.cache is None else torch.cat([self.cache, y])
        return self.cache


@pytest.mark.parametrize("grows", [True, False])
def test_a_module_whose_next_call_has_another_shape_or_fails_keeps_its_adapter(grows):
    folded = rc.fold(Caching(grows), example=torch.randn(4, 8))
    message = " ".join(folded.fold_certificate[-1].not_folded)
    assert "fc, lora (default) -> weight: the module gives other outputs when it is called again" in message
    assert isinstance(folded.fc, PeftLinear)


def test_a_network_that_computes_something_else_in_its_next_call_keeps_its_class():
    model = plain_vit()

    class Tiring(type(model)):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x) / self.calls

    model.__class__ = Tiring
    assert type(rc.fold(model)).__name__ == "Tiring"


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return x * self.gamma


class ScaledBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Sequential(), nn.Sequential()
        self.attn.add_module("proj", nn.Linear(8, 8))
        self.mlp.add_module("fc2", nn.Linear(8, 8))
        self.ls1, self.ls2 = Scale(), Scale()

    def forward(self, x):
        x = x + self.ls1(self.attn(torch.tanh(x)))
        return x + self.ls2(self.mlp(torch.relu(x)))


def test_layer_scale_in_a_block():
    model = nn.Sequential(ScaledBlock()).double()
    folded = rc.fold(model)
    assert [step.folded[0] for step in folded.fold_certificate[:2]] == ["0.ls1 -> 0.attn.proj", "0.ls2 -> 0.mlp.fc2"]
    assert not any("gamma" in name for name in folded.state_dict())
    same(model, folded, torch.randn(2, 5, 8))


def test_a_riformer_block_in_an_unknown_net():
    block = RIFormerBlock(TINY, 0, 0, layer_scale=True, deployed=False).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, 0.2)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mine = block

        def forward(self, x):
            return self.mine(x)

    folded = rc.fold(Net())
    summaries = [step.folded[0] for step in folded.fold_certificate]
    assert summaries[0] == "token_mixer.affine - identity -> norm1"
    assert all("norm2" in row or "layer_scale" in row for row in summaries[1:-1])  # by its structure, as any block's
    same(Net(), folded, torch.randn(2, 8, 7, 5))


def test_norms_of_such_names_after_the_layers_are_no_idle_ffn():
    class Behind(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.norm1 = nn.Conv2d(4, 12, 1), nn.BatchNorm2d(12)
            self.fc2, self.norm2 = nn.Conv2d(12, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x):
            return self.norm2(self.fc2(torch.relu(self.norm1(self.fc1(x)))))

    model = trained(Behind()).double()
    folded = rc.fold(model, example=torch.randn(2, 4, 5, 5).double())
    assert not any(isinstance(part, nn.BatchNorm2d) for part in folded.modules())
    same(model, folded, torch.randn(2, 4, 6, 5))


def test_what_is_not_what_it_looks_like_stays():
    class Other(IdleFfn):
        def forward(self, x):
            return super().forward(x).relu()  # the same parts, another function

    model = trained(Other()).double()
    folded = rc.fold(nn.Sequential(model))
    assert [step.folded[0] for step in folded.fold_certificate[:-1]] == ["0.norm1 -> 0.fc1", "0.norm2 -> 0.fc2"]
    assert type(folded[0]) is Other
    same(nn.Sequential(model), folded, torch.randn(3, 5, 8))
    with pytest.raises(Refused, match="nothing in this"):
        rc.fold(trained(OwnNet()), method="riformer")
    with pytest.raises(UsageProblem, match="has no effect"):
        rc.fold(trained(OwnNet()), num_heads=3)
    with pytest.raises(UsageProblem, match="exmaple has no effect") as refused:
        rc.fold(trained(OwnNet()), exmaple=torch.randn(3, 5, 8))
    assert "Did you mean example?" in refused.value.hint
    if sys.version_info >= (3, 11):
        assert f"hint: {refused.value.hint}" in "".join(traceback.format_exception(refused.value))
    with pytest.raises(UsageProblem, match="for checkpoint files"):
        rc.fold(trained(OwnNet()), out="x")


def test_a_net_with_known_keys_that_computes_something_else_is_not_replaced():
    model = plain_vit()
    for block in model.blocks:
        block.attn.qkv = PeftLinear(block.attn.qkv)
    model.blocks[1].mlp.act = nn.ReLU()
    folded = rc.fold(model)  # in parts, since the whole is another net
    assert of_lora(folded) == [f"blocks.{i}.attn.qkv" for i in range(3)]
    same(model, folded, torch.randn(2, 3, 32, 32), limit=1e-5)
