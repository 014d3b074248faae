"""Any live module is folded by its structure, whatever the names of its classes and the way they are written."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from optional_libraries import library
from reimplemented_training_networks import exported
from test_known_submodule_folds import same, trained
from torch import nn
from torch.nn import functional as F

import repaconv as rc
from repaconv.core.errors import Refused
from repaconv.core.files import parse_json
from repaconv.results import NOTHING_TO_FOLD
from repaconv.rewrites.fold.unfolded_linear_operators import PADDED, READ_BESIDE


def reported_folds(folded):
    return [f"{step.module}: {step.folded[0]}" for step in folded.fold_certificate[:-1]]


def left(folded):
    return " ".join(folded.fold_certificate[-1].not_folded)


def unfolded(model, example=None):
    """Nothing folds: an unchanged copy, which says so; its sentences on why."""
    folded = rc.fold(model, example=example)
    assert [(step.module, step.folded) for step in folded.fold_certificate] == [(".", (NOTHING_TO_FOLD,))]
    assert folded is not model
    assert type(folded) is type(model)
    assert not folded.training
    assert folded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in folded.state_dict().items())
    return folded.fold_certificate[-1].not_folded


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def norms(module):
    return [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


def normed(width, out, size, **more):
    return nn.Sequential(nn.Conv2d(width, out, size, padding=size // 2, bias=False, **more), nn.BatchNorm2d(out))


class RepBlock(nn.Module):
    """Three branches, and what follows by a function."""

    def __init__(self, width=4, act=F.relu):
        super().__init__()
        self.wide, self.narrow, self.bn = normed(width, width, 3), normed(width, width, 1), nn.BatchNorm2d(width)
        self.act = act

    def forward(self, x):
        out = 0
        for branch in (self.wide, self.narrow, self.bn):
            out += branch(x)
        return self.act(out)


class Mixer(nn.Module):
    """x + gamma (mixed(x) - norm(x)): one depthwise convolution."""

    def __init__(self, width=4):
        super().__init__()
        self.mixed, self.norm = normed(width, width, 5, groups=width), nn.BatchNorm2d(width)
        self.gamma = nn.Parameter(torch.rand(width, 1, 1))

    def forward(self, x):
        return x + self.gamma * (self.mixed(x) - self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 4, 1), nn.Sequential(RepBlock(), Mixer(), RepBlock(act=nn.SiLU()))
        self.head = nn.Linear(4, 5)

    def forward(self, x, scale=1.0):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)) * scale)


def test_branches_are_one_convolution_and_the_classes_around_them_stay():
    model = trained(Net())
    folded = rc.fold(model)
    assert type(folded) is Net
    assert count(folded) == 16 + (144 + 4) + (100 + 4) + (144 + 4) + 25
    assert [type(part).__name__ for part in folded.blocks] == ["Sequential", "Conv2d", "Sequential"]
    same(model.double(), rc.fold(model), torch.randn(3, 3, 9, 7))
    with io.BytesIO() as file:  # it is a module as any other
        torch.save(folded, file)
        torch.save(folded.state_dict(), file)
    assert folded.half()(torch.randn(1, 3, 8, 8).half(), scale=2.0).dtype == torch.float16


class OneAct(RepBlock):
    """An activation that is the class's own, as Ultralytics' ``default_act`` is."""

    default_act = nn.SiLU()

    def __init__(self):
        super().__init__(act=self.default_act)


class TwiceAct(RepBlock):
    """One activation called behind the sum and behind another layer."""

    def __init__(self, act):
        super().__init__(act=act)
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.act(self.last(super().forward(x)))


def blocks_with(how):
    """Two blocks, and whether their activations are one."""
    act = {"prelu": nn.PReLU, "hooked": nn.ReLU}.get(how, nn.SiLU)()
    if how == "hooked":
        act.register_forward_hook(lambda _part, _given, out: out * 2)
    if how == "class":
        return OneAct(), OneAct()
    if how == "twice":
        return TwiceAct(nn.ReLU()), TwiceAct(nn.ReLU())
    if how == "twice and shared":
        return TwiceAct(act), TwiceAct(act)
    return RepBlock(act=act), RepBlock(act=act if how != "own" else nn.SiLU())


@pytest.mark.parametrize("how", ["own", "shared", "class", "twice", "twice and shared", "prelu", "hooked"])
def test_an_activation_of_several_blocks_keeps_no_branches_apart(how):
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 1), *blocks_with(how))).double()
    folded = rc.fold(model)
    assert norms(folded) == []
    more = (20 if "twice" in how else 0) * 2 + (how == "prelu")
    assert count(folded) == 16 + 2 * 148 + more
    same(model, folded, torch.randn(2, 3, 9, 7))
    kept = {id(part) for part in folded.modules() if isinstance(part, (nn.SiLU, nn.ReLU, nn.PReLU))}
    assert len(kept) == (2 if how in ("own", "twice") else 1)  # what was one object is one still


class Levels(nn.Module):
    """One block for several levels, as heads of detectors have it; ``other`` is what a second name of it makes."""

    def __init__(self, names=1):
        super().__init__()
        self.block = RepBlock()
        self.blocks = nn.ModuleList([self.block] * names)

    def forward(self, x):
        y = self.block(x)
        for block in self.blocks:
            y = block(F.avg_pool2d(y, 2))
        return y


def test_a_block_that_is_called_several_times_is_one_layer_once_and_under_two_names_says_why_not():
    class Head(Levels):
        def __init__(self):
            super().__init__(0)

        def forward(self, x):
            return self.block(x).mean((2, 3)) + self.block(F.avg_pool2d(x, 2)).mean((2, 3))

    model = trained(Head()).double()
    folded = rc.fold(model)
    assert count(folded) == 148
    same(model, folded, torch.randn(2, 4, 8, 8))
    model = trained(Levels()).double()
    assert "layers in parallel not folded, block is shared" in " ".join(unfolded(model))


class Forked(nn.Module):
    """Branches that are summed, next to something else."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return torch.cat([self.a(x) + self.b(x), x.sigmoid()], 1)


def test_branches_in_a_part_that_does_more_say_why_they_stay():
    assert "0: layers in parallel not folded, its forward does more" in " ".join(unfolded(nn.Sequential(Forked())))


class Scaled(nn.Module):
    """NAFNet's: a learned scale behind a convolution, by which the forward multiplies in any case."""

    def __init__(self, how="always"):
        super().__init__()
        self.conv, self.act, self.how = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), how
        self.beta = nn.Parameter(torch.rand(4) if how == "viewed" else torch.rand(1, 4, 1, 1))

    def forward(self, x):
        beta = self.beta
        if self.how == "viewed":
            beta = beta.view(1, -1, 1, 1)
        elif self.how == "its size":
            assert beta.shape[1] == x.shape[1]
        elif self.how == "before":
            return x + self.conv(x.sigmoid() * beta.sigmoid()) * 2.0
        return x + self.conv(self.act(x).relu()) * beta


@pytest.mark.parametrize("how", ["always", "viewed"])
def test_a_scale_after_a_layer_folds_where_the_forward_multiplies_in_any_case(how):
    model = nn.Sequential(Scaled(how), Scaled(how)).double()
    folded = rc.fold(model)
    assert [row.split(",")[0] for row in reported_folds(folded)] == ["0: 0.beta -> 0.conv", "1: 1.beta -> 1.conv"]
    assert left(folded) == ""
    assert count(folded) <= count(model) - 2 * 3
    assert count(folded) == count(model) - (2 * 4 if how == "always" else 2 * 3)
    same(model, folded, torch.randn(2, 4, 6, 6))
    single = rc.fold(copy.deepcopy(model).float())
    assert single.half()(torch.randn(1, 4, 6, 6).half()).dtype == torch.float16


def test_scales_that_stay_say_why():
    needs = " ".join(unfolded(nn.Sequential(Scaled("its size")).double()))
    assert "0.beta -> 0.conv" in needs
    assert "does not run without it" in needs
    before = " ".join(unfolded(nn.Sequential(Scaled("before")).double()))
    assert "0: a constant factor after a layer not folded, its forward holds the number itself" in before
    assert "0.beta: a learned scale not folded, no layer" in before


class Normalized(torch.autograd.Function):
    """A norm with its own derivative, as NAFNet has one: its weights are other objects inside."""

    @staticmethod
    def forward(_ctx, x, weight):
        y = x - x.mean(1, keepdim=True)
        return weight.view(1, x.shape[1], 1, 1) * (y / (y.pow(2).mean(1, keepdim=True) + 1e-6).sqrt())


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x):
        return Normalized.apply(x, self.weight)


def test_a_scale_in_a_function_with_its_own_derivative_says_why_it_stays():
    sentences = " ".join(unfolded(nn.Sequential(OwnNorm(), nn.Conv2d(4, 4, 1), nn.ReLU())))
    assert "0.weight: a learned scale not folded" in sentences


def plain_net():
    """MTCNN's PNet and Compact: convolutions with an activation between any two."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Dropout(0.1), nn.Conv2d(4, 2, 1)).eval()


def test_where_nothing_folds_every_kind_of_source_reports_it_in_the_same_words(repaconv):
    torch.manual_seed(0)
    model = plain_net()
    assert unfolded(model) == ()
    graph = exported(model, (1, 3, 16, 16), dynamo=False, opset=17, free=False)
    Path("net.onnx").write_bytes(graph.SerializeToString())
    torch.save(model.state_dict(), "net.pth")
    Path("net.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), "
        "nn.Dropout(0.1), nn.Conv2d(4, 2, 1))\n"
    )
    for name, given in (
        ("graph", ("net.onnx",)),
        ("arch", ("net.pth", "--arch", "net.py:build", "--set", "image_size=16")),
    ):
        code, out, _ = repaconv("fold", *given, "-o", name)
        assert code == 0
        assert f"passed: {NOTHING_TO_FOLD}; compared by" in out
        assert parse_json(Path(name, "fold.json").read_text())["changes"] == []


def test_a_norm_that_stays_has_the_same_reason_for_every_kind_of_source(repaconv):
    """A BatchNorm between an activation and a padded convolution, of more channels than pixels have."""
    torch.manual_seed(0)
    model = trained(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1), nn.ReLU()))
    assert unfolded(model) == (f"1: a BatchNorm not folded, {PADDED}",)
    graph = exported(model, (1, 8, 16, 16), dynamo=False, opset=17, free=False)
    Path("net.onnx").write_bytes(graph.SerializeToString())
    torch.save(model.state_dict(), "net.pth")
    Path("net.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.ReLU(), nn.BatchNorm2d(8), "
        "nn.Conv2d(8, 4, 3, padding=1), nn.ReLU())\n"
    )
    for given in (("net.onnx",), ("net.pth", "--arch", "net.py:build", "--set", "image_size=16")):
        code, out, _ = repaconv("fold", *given)
        assert code == 0
        assert NOTHING_TO_FOLD in out
        assert PADDED in " ".join(out.split())


def test_a_layer_norm_that_stays_is_listed_with_its_reason(repaconv):
    """The first gives its scale and shift to the layer that reads it; an activation reads the second."""
    source = """
from torch import nn


def build():
    layers = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), Turn(), *layers)


class Turn(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)
"""
    Path("net.py").write_text(source)
    space: dict[str, object] = {}
    exec(source, space)
    torch.manual_seed(0)
    model = trained(space["build"]())
    for norm in (model[3], model[5]):
        torch.nn.init.normal_(norm.weight, 1, 0.2)
        torch.nn.init.normal_(norm.bias, 0, 0.2)
    Path("net.onnx").write_bytes(
        exported(model, (1, 3, 16, 16), dynamo=False, opset=17, free=False).SerializeToString()
    )
    torch.save(model.state_dict(), "net.pth")
    for given in (("net.onnx",), ("net.pth", "--arch", "./net.py:build", "--set", "image_size=16")):
        code, _, err = repaconv("fold", *given)
        assert code == 0, err
        left = parse_json(Path("repaconv-out/net/fold.json").read_text())["not_folded"]
        (stay,) = [
            each for each in left if each.startswith("norms remain, since their statistics depend on the input:")
        ]
        (keep,) = [each for each in left if each.startswith("norms keep their scale and shift")]
        assert stay.count("LayerNormalization") == 2
        assert keep.count("LayerNormalization") == 1
        assert "5/LayerNormalization" in keep.replace("/5/", "5/")


def test_norms_that_the_exporter_folded_are_counted(repaconv):
    """``--arch`` folds the exporter's graph, in which nothing may be left to fold."""
    torch.manual_seed(0)
    model = trained(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)))
    torch.save(model.state_dict(), "net.pth")
    Path("net.py").write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), "
        "nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))\n"
    )
    code, out, _ = repaconv("fold", "net.pth", "--arch", "net.py:build", "--set", "image_size=16")
    assert code == 0
    numbers = "268 parameters in the module, 260 in its graph"
    assert f"nothing more to fold: torch's exporter folded 1 of 1 BatchNorms ({numbers})" in " ".join(out.split())
    assert parse_json(Path("repaconv-out/net/fold.json").read_text())["exporting"] == {
        "parameters": [268, 260],
        "batchnorms": [1, 0],
    }


class Bottleneck(nn.Module):
    """As torchvision writes them: one activation called thrice, in place."""

    def __init__(self, width=4):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8)
        self.conv3, self.bn3 = nn.Conv2d(8, width, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x
        return self.relu(y)


def test_a_residual_network_keeps_everything_but_its_norms():
    model = trained(nn.Sequential(Bottleneck(), nn.Dropout(0.5), Bottleneck())).double()
    folded = rc.fold(model)
    assert norms(folded) == [] != norms(model)
    assert type(folded[0]) is Bottleneck
    assert isinstance(folded[0].bn1, nn.Identity)
    assert reported_folds(folded)[0] == "0.bn1: 0.bn1 -> 0.conv1"
    same(model, folded, torch.randn(2, 4, 8, 8))


class ByFunction(nn.Module):
    """A BatchNorm of which nothing but its tensors is a module's."""

    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2)
        for name in ("scale", "shift", "mean", "var"):
            self.register_buffer(name, torch.rand(6) + 0.5)

    def forward(self, x):
        y = self.conv(x)
        factor = self.scale / torch.sqrt(self.var + 1e-5)
        return Frozen.apply(y, factor, self.shift - self.mean * factor)


class Frozen:
    @staticmethod
    def apply(x, factor, shift):
        return x * factor[:, None, None] + shift[:, None, None]


class FrozenNorm(ByFunction):
    """The same as a part of its own."""

    def forward(self, x):
        factor = self.scale / torch.sqrt(self.var + 1e-5)
        return Frozen.apply(x, factor, self.shift - self.mean * factor)


def test_a_norm_written_by_functions_is_one_as_a_part_and_no_part_if_it_is_none():
    net = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), FrozenNorm(), nn.ReLU()).double()
    net[1].conv = None
    folded = rc.fold(net)
    assert reported_folds(folded) == ["1: 1 -> 0"]
    same(net, folded, torch.randn(2, 4, 5, 5))
    unfolded(ByFunction().double(), torch.randn(2, 4, 5, 5))


class Attention(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gamma = nn.Parameter(torch.rand(width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        y = self.proj(F.scaled_dot_product_attention(q, k, v))
        return x + (y if self.gamma is None else y * self.gamma)


def test_the_affine_of_a_norm_and_a_scale_that_a_block_holds_itself():
    model = nn.Sequential(Attention(), nn.Flatten(1, 1), Attention()).double()
    nn.init.normal_(model[0].norm.weight)
    nn.init.normal_(model[0].norm.bias)
    folded = rc.fold(model, example=torch.randn(2, 5, 8))
    assert set(reported_folds(folded)) == {
        *("0: 0.gamma -> 0.proj", "0.norm: the affine of 0.norm -> 0.qkv"),
        *("2: 2.gamma -> 2.proj", "2.norm: the affine of 2.norm -> 2.qkv"),
    }
    assert count(folded) == count(model) - 6 * 8
    same(model, folded, torch.randn(2, 5, 8))


def test_a_norm_whose_affine_would_be_more_numbers_elsewhere_keeps_it():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 40, bias=False), nn.ReLU())
    nn.init.normal_(model[0].bias)
    unfolded(model)


class Low(nn.Module):
    """An adapter of the user's own."""

    def __init__(self, width=8, rank=2):
        super().__init__()
        self.base, self.scale = nn.Linear(width, width), 0.5
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.scale * self.b(self.a(F.dropout(x, 0.1, self.training)))


def test_an_adapter_of_any_name_goes_into_its_layer():
    model = nn.Sequential(Low(), nn.GELU(), Low()).double()
    folded = rc.fold(model)
    assert [type(part) for part in folded] == [nn.Linear, nn.GELU, nn.Linear]
    same(model, folded, torch.randn(3, 5, 8))


def test_a_norm_before_a_padded_convolution_stays_and_is_reported():
    model = trained(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)))
    folded = rc.fold(model)
    assert reported_folds(folded) == ["3: 3 -> 2"]
    assert f"1: a BatchNorm not folded, {PADDED}" in left(folded)
    unpadded = trained(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2, stride=2))).double()
    folded = rc.fold(unpadded)
    assert reported_folds(folded) == ["1: 1 -> 2"]
    same(unpadded, folded, torch.randn(2, 4, 9, 9))


TAILS = {
    "rolled": lambda y: torch.roll(y, y.shape[-1] // 2, -1),
    "divided": lambda y: y / y.shape[-1] ** 0.5,
    "clamped": lambda y: y.clamp(-y.shape[-1] / 8, y.shape[-1] / 8),
    "branch": lambda y: F.gelu(y) if y.shape[-1] > 32 else F.relu(y),
    "branch below": lambda y: F.gelu(y) if y.shape[-1] < 32 else F.relu(y),
    "batch": lambda y: y * (1 / len(y)),
    "resized": lambda y: F.interpolate(y, size=y.shape[-2:]),
    "reshaped": lambda y: y.reshape(*y.shape),
}


@pytest.mark.parametrize("how", TAILS)
@pytest.mark.parametrize("given", [False, True])
def test_branches_before_a_function_with_the_size_of_the_input_stay(how, given):
    model = trained(nn.Sequential(RepBlock(act=TAILS[how]), RepBlock())).double()
    model[0].img_size = 32
    folded = rc.fold(model, example=torch.randn(2, 4, 32, 32) if given else None)
    assert [type(part) for part in folded] == [RepBlock, nn.Sequential]
    assert "layers in parallel -> Conv2d" in left(folded)
    assert "depends on the size of its inputs" in left(folded)
    for shape in ((2, 4, 32, 32), (1, 4, 64, 64), (3, 4, 16, 24)):
        same(model, folded, torch.randn(shape) * 5)


SOUND = {
    "gelu": F.gelu,
    "clamped": lambda y: y.clamp(-3, 3),
    "rolled": lambda y: torch.roll(y, 1, -1),
    "softmax": lambda y: y.softmax(1),
}


@pytest.mark.parametrize("how", SOUND)
def test_branches_before_a_function_of_no_size_are_folded_and_the_certificate_lists_the_sizes(how):
    model = trained(nn.Sequential(RepBlock(act=SOUND[how]))).double()
    folded = rc.fold(model, example=torch.randn(2, 4, 32, 32))
    assert type(folded[0]) is nn.Sequential
    (words,) = folded.fold_certificate[-1].folded
    assert words == (
        "the whole module before and after, on 6 inputs of the sizes 2x4x32x32, 1x4x64x64, 1x4x16x16"  # of two scales
    )
    same(model, folded, torch.randn(3, 4, 48, 40))


@pytest.mark.parametrize(("shape", "sizes"), [((2, 4, 8, 8), "2x4x8x8, 1x4x8x8"), ((1, 4, 8, 8), "1x4x8x8, 2x4x8x8")])
def test_a_module_of_one_size_is_run_on_another_batch_size(shape, sizes):
    model = trained(nn.Sequential(RepBlock(), nn.Flatten(), nn.Linear(256, 3))).double()
    folded = rc.fold(model, example=torch.randn(shape))
    assert type(folded[0]) is nn.Sequential
    assert folded.fold_certificate[-1].folded[0].endswith(f"on 5 inputs of the sizes {sizes}")


class Masked(RepBlock):
    """Images and their masks, and a function with the size of both."""

    def __init__(self, sized):
        super().__init__()
        self.sized = sized
        self.block = RepBlock(act=TAILS["divided"] if sized else F.relu)

    def forward(self, x, mask):
        return self.block(x) * mask[:, None]


@pytest.mark.parametrize("sized", [True, False])
def test_several_inputs_get_another_size_together(sized):
    model = trained(Masked(sized)).double()
    folded = rc.fold(model, example=(torch.randn(2, 4, 32, 32), torch.rand(2, 32, 32) > 0.2))
    assert isinstance(folded.block, RepBlock) == sized
    assert "1x4x64x64 and 1x64x64" in (left(folded) if sized else folded.fold_certificate[-1].folded[0])


class Branch(nn.Module):
    """Large numbers take another way than through all layers."""

    def __init__(self, limit, how="own"):
        super().__init__()
        self.a, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.gamma = nn.Parameter(torch.rand(4, 1, 1) + 1)
        self.b, self.block = nn.Conv2d(4, 4, 1), normed(4, 4, 3)
        self.limit, self.how = limit, how

    def forward(self, x):
        x = self.block(x)
        if float(x.abs().max()) > self.limit:
            return self.block[0](x) if self.how == "inside" else self.a(x) + self.b(x)
        return self.bn(self.a(x)) if self.how == "own" else self.b(x) * self.gamma


@pytest.mark.parametrize("limit", [20, 1e4])
@pytest.mark.parametrize("how", ["own", "scale"])
def test_what_a_forward_may_call_otherwise_for_other_numbers_is_not_folded_and_what_it_calls_as_one_is(limit, how):
    model = trained(nn.Sequential(Branch(limit, how))).double()
    folded = rc.fold(model, example=torch.randn(2, 4, 8, 8))
    assert reported_folds(folded) == ["0.block.1: 0.block.1 -> 0.block.0"]
    assert "not folded, the forward of Branch reads numbers that depend on the input" in left(folded)
    for scale in (1e-2, 1, 30, 1e5):
        same(model, folded, torch.randn(2, 4, 8, 8) * scale)


def test_what_a_forward_reads_from_inside_a_part_for_larger_numbers_only_is_not_folded():
    model = trained(nn.Sequential(Branch(20, "inside"))).double()
    folded = rc.fold(model, example=torch.randn(2, 4, 8, 8))
    assert reported_folds(folded) == []
    assert "0.block.1 -> 0.block.0 not folded, the code of the module depends on the numbers in its inputs" in left(
        folded
    )
    same(model, folded, torch.randn(2, 4, 8, 8) * 30)


def test_numbers_of_its_own_weights_decide_nothing():
    class Constant(Branch):
        def forward(self, x):
            return self.bn(self.a(x.double())) if float(self.gamma.max()) > 0 else self.b(x)

    model = trained(nn.Sequential(Constant(0))).double()
    assert reported_folds(rc.fold(model, example=torch.randn(2, 4, 8, 8))) == ["0.bn: 0.bn -> 0.a"]


class Odd(nn.Module):
    """What keeps a BatchNorm behind a convolution."""

    def __init__(self, how):
        super().__init__()
        self.conv, self.bn, self.how = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), how
        self.other = self.conv if how == "shared" else nn.Conv2d(4, 4, 1)
        if how == "tied":
            self.other.weight = self.conv.weight
        if how == "hooked":
            self.conv.register_forward_hook(lambda *_: None)

    def forward(self, x):
        y = self.conv(x)
        z = F.relu(self.bn(y))
        if self.how == "read":
            return z * y
        if self.how == "twice":
            return F.relu(self.bn(F.tanh(self.conv(z))))
        if self.how == "its weight":
            return z * self.conv.weight.mean()
        if self.how == "decided":
            return z if y.abs().max() > 1e-6 else y
        return F.relu(self.other(z))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("shared", "0.conv, which is right before it, is shared"),
        ("tied", "0.conv, which is right before it, is shared"),
        ("hooked", "0.conv, which is right before it, is shared, hooked"),
        ("read", READ_BESIDE.format("mul")),
        ("twice", "it is called 2 times"),
        ("its weight", "read from outside"),
        ("decided", READ_BESIDE.format("abs")),
    ],
)
def test_what_something_else_reads_shares_or_watches_stays(how, why):
    net = nn.Sequential(Odd(how), trained(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))).double()
    trained(net)
    folded = rc.fold(net)
    assert reported_folds(folded) == ["1.1: 1.1 -> 1.0"]
    (sentence,) = [
        each for each in folded.fold_certificate[-1].not_folded if each.startswith("0.bn: a BatchNorm not folded")
    ]
    assert why in sentence
    same(net, folded, torch.randn(2, 4, 6, 6))


class Deciding(nn.Module):
    """Branches that are summed as long as the numbers are small."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.a(x) + self.b(x) if float(x.abs().max()) < 1e9 else x


def test_a_part_that_decides_by_numbers_is_no_chain():
    unfolded(Deciding())


def test_a_network_in_training_comes_back_folded_in_eval_mode_and_is_left_as_it_was():
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())).train()
    before = copy.deepcopy(model.state_dict())
    folded = rc.fold(model)
    assert model.training
    assert not folded.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    half = rc.fold(copy.deepcopy(model).half())
    assert half[0].weight.dtype == torch.float16
    assert half[0].bias.dtype == torch.float16


def test_a_module_without_numbers_is_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with pytest.raises(Refused) as caught:
        rc.fold(model)
    assert caught.value.hint


NAMES = ("mobileone_s0", "repvgg_a0", "fastvit_t8", "repvit_m0_9", "levit_128s", "repghostnet_050", "efficientvit_m0")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_at_most_what_timm_leaves(name):
    timm = library("timm")
    from timm.utils.model import reparameterize_model

    from repaconv.torch_fold.known_submodule_folds import fold_parts

    model = trained(timm.create_model(name)).eval()
    folded, _ = fold_parts(model, "auto")  # by structure, also where a method knows the whole
    assert norms(folded) == []
    assert count(folded) <= count(reparameterize_model(copy.deepcopy(model)))


class Averaged(nn.Module):
    """A norm, what is done with all its positions, and a layer; or the norm comes last."""

    def __init__(self, average, last):
        super().__init__()
        self.layer, self.norm, self.head = nn.Conv2d(3, 6, 3), trained(nn.BatchNorm2d(6)), nn.Linear(6, 4)
        self.average, self.last = average, last

    def forward(self, x):
        y = self.layer(x)
        y = self.norm(self.average(y)) if self.last else self.average(self.norm(y.relu()))
        return self.head(y.flatten(1).relu() if self.last else y.flatten(1))


AVERAGES = {
    "mean": lambda y: y.mean((2, 3), keepdim=True),
    "flat": lambda y: y.flatten(2).mean(-1)[..., None, None],
    "global": lambda y: F.adaptive_avg_pool2d(y, 1),
    "window": lambda y: F.avg_pool2d(y, 7),
    "resized": lambda y: F.interpolate(y, size=(1, 1), mode="bilinear", antialias=True),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("how", AVERAGES)
def test_a_norm_is_folded_through_an_average(how, last):
    torch.manual_seed(0)
    model, x = Averaged(AVERAGES[how], last).double(), torch.randn(2, 3, 9, 9)
    folded = rc.fold(model, example=x)
    assert not norms(folded)
    same(model, folded, x)


def test_a_norm_stays_before_an_average_with_a_border_of_zeros():
    torch.manual_seed(0)
    model = Averaged(lambda y: F.avg_pool2d(y, 9, padding=1), last=False).double()
    assert len(norms(rc.fold(model, example=torch.randn(2, 3, 9, 9)))) == 1


def test_a_batchnorm_of_rows_goes_into_the_linear_layer_before_it():
    """Whose channels are the last axis and the BatchNorm's the first after the batch: one and the same of [N, C]."""
    model = trained(nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))).double()
    folded = rc.fold(model)
    assert reported_folds(folded) == ["1: 1 -> 0"]
    assert norms(folded) == []
    same(model, folded, torch.randn(5, 8))
    assert norms(rc.fold(model, example=torch.randn(5, 6, 8))), "here it normalizes the axis in between"


class Refined(nn.Module):
    """A scale that many residual steps compute from one parameter: there are 2 ** 60 ways from it to the scale."""

    def __init__(self):
        super().__init__()
        self.fc, self.seed = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x):
        scale = self.seed
        for _ in range(60):
            scale = scale + 0.1 * scale.tanh()
        return self.fc(x) * scale


def test_what_a_constant_is_computed_from_is_found_however_many_ways_lead_there():
    assert "a scale after a layer not folded" in unfolded(Refined(), torch.randn(3, 8))[0]


class Counting(nn.Module):
    """Reads the weight of its convolution, but not in the first call."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.calls = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), 0

    def forward(self, x):
        self.calls += 1
        y = self.bn(self.conv(x))
        return y + F.conv2d(x, self.conv.weight) if self.calls > 1 else y


def test_what_computes_something_else_in_its_next_call_is_not_folded():
    assert "bn -> conv not folded, the module gives other outputs when it is called again" in " ".join(
        unfolded(trained(Counting()))
    )


class Summed(nn.Module):
    """Parallel layers in the forward of the module itself, which has a method of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1)

    def forward(self, image):
        return F.relu(self.a(image) + self.b(image))

    def encode(self, image):
        return self.a(image)


def test_a_module_keeps_its_own_class_and_methods():
    x = torch.randn(2, 3, 8, 8)
    assert "the module itself: layers in parallel not folded, its own class would be lost" in unfolded(Summed(), x)[0]
    assert rc.fold(Summed(), example=x)(image=x).shape == (2, 4, 8, 8)
    assert reported_folds(rc.fold(nn.Sequential(Summed()), example=x))[0].startswith("0: layers in parallel -> Conv2d")


def test_a_fold_that_float16_cannot_hold_is_skipped():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    trained(model)
    model[1].running_mean.fill_(3000.0)
    model[1].running_var.fill_(1e-3)  # the bias would be about -95000
    x = torch.randn(2, 3, 8, 8)
    folded = rc.fold(copy.deepcopy(model).half(), example=x.half())
    assert reported_folds(folded) == ["3: 3 -> 2"]
    assert "1 -> 0 not folded, its new numbers would exceed 65504" in left(folded)
    assert all(bool(weight.isfinite().all()) for weight in folded.parameters())
    assert reported_folds(rc.fold(model, example=x)) == ["1: 1 -> 0", "3: 3 -> 2"]

    class Mixed(nn.Module):
        """The same in float32, next to one number in float16."""

        def __init__(self):
            super().__init__()
            self.body, self.scale = model, nn.Parameter(torch.tensor(0.5, dtype=torch.float16))

        def forward(self, x):
            return self.body(x) * self.scale.to(x.dtype)

    assert reported_folds(rc.fold(Mixed(), example=x)) == ["body.1: body.1 -> body.0", "body.3: body.3 -> body.2"]
    model[:2].half()
    assert "body.1 -> body.0 not folded, its new numbers would exceed 65504" in left(rc.fold(Mixed(), example=x))
