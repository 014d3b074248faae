"""The check that runs a live module as a whole before and after its fold. A submodule that is read from outside, shared
or hooked is not folded.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import UserDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from test_known_submodule_folds import IdleFfn, OwnNet, PeftLinear, ScaledBlock, plain_vit, same, trained
from torch import nn

import repaconv as rc
from repaconv.core.errors import Refused, RepaconvError, UsageProblem
from repaconv.torch_fold.float64_module_calls import in_float64
from repaconv.torch_fold.whole_module_check import Whole


def rows(folded):
    return [(step.module, *step.folded) for step in folded.fold_certificate[:-1]]


def left(folded):
    return " ".join(folded.fold_certificate[-1].not_folded)


class Reader(nn.Module):
    """Its forward reads a child's child: the block alone would not show it."""

    def __init__(self, how):
        super().__init__()
        self.block, self.how = ScaledBlock(), how

    def forward(self, x):
        y = self.block(x)
        return y + (self.block.ls1(x) if self.how == "called" else x * self.block.ls1.gamma)


@pytest.mark.parametrize("how", ["called", "its weight"])
def test_what_a_parent_reads_is_not_folded_and_the_rest_is(how):
    torch.manual_seed(0)
    model = Reader(how).double()
    folded = rc.fold(model)
    assert rows(folded) == [("block.ls2", "block.ls2 -> block.mlp.fc2")]
    assert "block.ls1: " in left(folded)
    assert folded.fold_certificate[-1].max_rel_error <= 1e-12
    same(model, folded, torch.randn(3, 4, 8))


class Tied(nn.Module):
    """Two tails with one linear layer, or one weight, or weights in the same memory."""

    def __init__(self, how):
        super().__init__()
        one, two = nn.Linear(8, 8), nn.Linear(8, 8)
        if how == "weight":
            two.weight = one.weight
        elif how == "memory":
            two.weight.data = one.weight.data
        norms = [trained(nn.BatchNorm1d(8)) for _ in range(3)]
        self.a, self.b = nn.Sequential(norms[0], one), nn.Sequential(norms[1], one if how == "module" else two)
        self.c = nn.Sequential(norms[2], nn.Linear(8, 8))

    def forward(self, x):
        return self.c(self.a(x) + self.b(x))


@pytest.mark.parametrize("how", ["module", "weight", "memory"])
def test_what_is_shared_is_not_folded_and_stays_shared(how):
    torch.manual_seed(0)
    model = Tied(how)
    folded = rc.fold(model)
    assert rows(folded) == [("c.0", "c.0 -> c.1")]
    assert "shared" in left(folded)
    if how != "memory":  # which a copy does not keep
        assert folded.a[1].weight is folded.b[1].weight is not model.a[1].weight
    same(model, folded, torch.randn(5, 8), limit=1e-5)


def test_what_is_hooked_parametrised_or_never_called_is_not_folded():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            names = ("hooked", "parametrised", "own", "idle", "plain")
            self.tails = nn.ModuleDict({n: nn.Sequential(trained(nn.BatchNorm1d(8)), nn.Linear(8, 8)) for n in names})

        def forward(self, x):
            for name, tail in self.tails.items():
                x = tail(x) if name != "idle" else x
            return x

    model = Net().double()
    seen = []
    model.tails["hooked"][0].register_forward_hook(lambda _part, _given, out: seen.append(len(out)))
    nn.utils.parametrizations.weight_norm(model.tails["parametrised"][1])
    model.tails["own"][1].forward = lambda x: x * 2
    folded = rc.fold(model)
    assert rows(folded) == [  # the first goes back into the layer before it
        ("tails.parametrised.0", "tails.parametrised.0 -> tails.hooked.1"),
        ("tails.plain.0", "tails.plain.0 -> tails.plain.1"),
    ]
    assert "tails.hooked.0 has a hook" in left(folded)
    assert "tails.idle.0: a BatchNorm not folded, it is not called when the whole is run" in left(folded)
    x = torch.randn(4, 8)
    same(model, folded, x)
    seen.clear()
    folded(x.double())
    assert seen == [4]  # the user's hook is there still


def test_a_known_net_with_a_hook_is_not_replaced_whole():
    model = plain_vit()
    for block in model.blocks:
        block.attn.qkv = PeftLinear(block.attn.qkv)
    assert rc.fold(model).fold_certificate[-1].folded == ("the whole network -> its deploy form",)
    taken = []
    model.blocks[0].register_forward_hook(lambda _part, _given, out: taken.append(out.shape))
    folded = rc.fold(model)
    assert [row[0] for row in rows(folded)][:3] == [f"blocks.{index}.attn.qkv" for index in range(3)]
    taken.clear()
    folded(torch.randn(2, 3, 32, 32))
    assert len(taken) == 1


class Branching(nn.Module):
    """Named arguments, a mask, a dict of several outputs with whole numbers among them, and state that calls change."""

    def __init__(self):
        super().__init__()
        self.ffn, self.head = trained(IdleFfn()), nn.Sequential(trained(nn.BatchNorm1d(8)), nn.Linear(8, 3))
        self.shift, self.calls = torch.randn(8), 0  # no buffer: a plain attribute
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens, mask=None):
        self.calls += 1
        x = self.drop(self.ffn(tokens + self.shift))
        logits = self.head(x.masked_fill(~mask[..., None], 0.0).mean(1))
        return {"logits": logits, "more": (logits.argmax(-1), x.new_zeros(2) + torch.rand(2))}


def test_several_inputs_and_outputs_and_nothing_of_the_users_is_touched():
    torch.manual_seed(0)
    model = Branching().train()
    model.ffn.requires_grad_(False)
    model.head[1].to(torch.bfloat16)
    before, flags = copy.deepcopy(model.state_dict()), [part.training for part in model.modules()]
    with pytest.raises(Refused, match="the inputs of this Branching are not known") as caught:
        rc.fold(model)  # it takes a mask, too
    assert (caught.value.code, "example=tensor" in caught.value.hint) == ("live.input", True)
    example = {"tokens": torch.zeros(2, 5, 8), "mask": torch.rand(2, 5) > 0.3}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_default_dtype()
    folded = rc.fold(model, example=example)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_default_dtype())
    assert [row[0] for row in rows(folded)] == ["ffn", "head.0"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [part.training for part in model.modules()] == flags
    assert model.calls == folded.calls == 0
    assert not folded.training
    assert not any(weight.requires_grad for weight in folded.ffn.parameters())
    assert all(weight.requires_grad for weight in folded.head.parameters())
    assert (folded.ffn.fc1.weight.dtype, folded.head[1].weight.dtype) == (torch.float32, torch.bfloat16)
    assert folded.shift.dtype == torch.float32
    assert rc.fold(model, example=(example["tokens"], example["mask"])).fold_certificate == folded.fold_certificate
    for wrong in (torch.zeros(2, 5, 8), (torch.zeros(2, 5, 7), example["mask"])):
        with pytest.raises(Refused) as caught:
            rc.fold(model, example=wrong)
        assert caught.value.code == "live.example"
    with pytest.raises(UsageProblem, match="live module"):
        rc.fold("c.pth", example=torch.zeros(1))


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str = "any"


class Batch(dict):
    """A dictionary whose entries are attributes as well."""

    @property
    def image(self):
        return self["image"]


@pytest.mark.parametrize("kind", [Sample, Batch, UserDict])
def test_an_argument_may_be_a_dataclass_or_a_mapping_of_its_own_kind(kind):
    class Net(OwnNet):
        def forward(self, sample):
            assert type(sample) is kind
            return super().forward(sample["image"] if kind is UserDict else sample.image)

    image = torch.randn(3, 5, 8)
    sample = kind(image=image)
    folded = rc.fold(trained(Net()), example=sample if kind is Sample else (sample,))
    assert rows(folded) == rows(rc.fold(trained(OwnNet()), example=image)) != []
    assert image.dtype == torch.float32


@dataclasses.dataclass
class Context:
    """One field is never set, and one may be the object itself."""

    scale: float = 1.0
    image: torch.Tensor | None = None
    root: object = None
    mask: torch.Tensor = dataclasses.field(init=False)


class Attributes(dict):
    """A dictionary whose attributes are its entries."""

    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", [Context, Attributes])
def test_an_argument_may_have_unset_fields_and_hold_itself(kind, given):
    class Net(OwnNet):
        def forward(self, x, context):
            assert type(context) is kind
            return super().forward(x if context.image is None else context.image) * context.scale

    x = torch.randn(3, 5, 8)
    context = kind(scale=2.0, image=x if given else None)
    context.root = context
    folded = rc.fold(trained(Net()), example=(x, context))
    assert rows(folded) == rows(rc.fold(trained(OwnNet()), example=x)) != []
    assert context.root is context
    assert context.image is (x if given else None)


class Frozen(dict):
    def __setitem__(self, name, entry):
        raise TypeError("it is frozen")


@pytest.mark.parametrize("image", [None, torch.randn(3, 5, 8)])
def test_an_argument_that_cannot_be_copied_is_refused_in_a_sentence(image):
    class Net(OwnNet):
        def forward(self, x, _frozen):
            return super().forward(x)

    with pytest.raises(Refused, match="does not run on the example in float64: it is frozen") as caught:
        rc.fold(trained(Net()), example=(torch.randn(3, 5, 8), Frozen(image=image)))
    assert "copy.deepcopy can copy" in caught.value.hint


def test_an_example_of_zeros_hides_nothing():
    class Blind(nn.Module):
        """Scales what comes in by ls1, which no zero shows."""

        def __init__(self):
            super().__init__()
            self.block = ScaledBlock()

        def forward(self, x):
            return self.block(x) + self.block.ls1(x)

    torch.manual_seed(0)
    folded = rc.fold(Blind().double(), example=torch.zeros(2, 4, 8))
    assert rows(folded) == [("block.ls2", "block.ls2 -> block.mlp.fc2")]


def test_what_answers_otherwise_every_time_is_refused():
    counted = []  # outside: a copy counts on

    class Counting(OwnNet):
        def forward(self, x):
            counted.append(x)
            return super().forward(x) * len(counted)

    with pytest.raises(Refused) as caught:
        rc.fold(trained(Counting()))
    assert caught.value.code == "live.changing"


class Between(nn.Module):
    """An attention that is its input, and what a forward does before LayerScale."""

    def __init__(self, between):
        super().__init__()
        self.attn, self.ls1, self.between = nn.Sequential(), nn.Module(), between
        self.attn.proj, self.ls1 = nn.Linear(8, 8), Scale()
        with torch.no_grad():
            self.attn.proj.weight.copy_(torch.eye(8))
            self.attn.proj.bias.zero_()

    def forward(self, x):
        return x + self.ls1(self.between(self.attn(x)))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(8))

    def forward(self, x):
        return x * self.gamma


BETWEEN = {
    "clamp": lambda x: x.clamp(-40, 40),
    "threshold": lambda x: torch.where(x > 6, 0.0, x),
    "nothing": lambda x: x,
}


@pytest.mark.parametrize("how", BETWEEN)
def test_what_shows_on_other_values_than_standard_normal_ones_is_not_folded_through(how):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Between(BETWEEN[how]), nn.LayerNorm(8)).eval()
    if how == "nothing":
        part, message = rows(rc.fold(net))[0]
        assert (part, message.partition("(")[0]) == ("1", "layers in parallel -> Linear")
    else:
        assert rows(rc.fold(net)) == []


def test_large_values_through_a_softmax_refuse_no_exact_fold():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv = nn.BatchNorm1d(8), nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(self.norm(x.transpose(1, 2)).transpose(1, 2)).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    net = trained(nn.Sequential(nn.Linear(8, 8), Attending(), nn.LayerNorm(8)))
    assert rows(rc.fold(net, example=torch.randn(2, 5, 8))) == [("1.norm", "1.norm -> 0")]


def test_tensors_next_to_each_other_in_one_file_are_not_shared():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    flat = torch.cat([tensor.double().flatten() for tensor in net.state_dict().values()])
    pieces = flat.split([tensor.numel() for tensor in net.state_dict().values()])
    mapped = {key: piece.view(like.shape) for (key, like), piece in zip(net.state_dict().items(), pieces, strict=True)}
    net.load_state_dict(mapped, assign=True)
    assert not any(isinstance(part, nn.BatchNorm2d) for part in rc.fold(net, example=torch.randn(1, 3, 8, 8)).modules())


class Chain(nn.Sequential):
    """A layer, a norm and a head, whose outputs may not depend on the input."""

    def __init__(self, head_weight):
        super().__init__(nn.Conv2d(3, 4, 1), trained(nn.BatchNorm2d(4)), nn.Flatten(), nn.Linear(4 * 64, 5))
        if head_weight is not None:
            nn.init.constant_(self[3].weight, head_weight)


@pytest.mark.parametrize("given", [None, "example"])
def test_a_module_whose_outputs_never_change_is_refused_because_a_wrong_fold_would_look_right(given):
    example = torch.randn(2, 3, 8, 8) if given else None
    with pytest.raises(Refused, match="the same for all inputs") as caught:
        rc.fold(Chain(0.0).double(), example=torch.randn(2, 3, 8, 8))
    assert caught.value.code == "live.constant"
    folded = rc.fold(Chain(None).double(), example=torch.randn(2, 3, 8, 8) if example is None else example)
    assert len(folded.fold_certificate) > 1


class Masked(nn.Sequential):
    """Hides two of its outputs, as detectors pad their classes to a fixed number."""

    def __init__(self, hidden):
        super().__init__(nn.Conv2d(3, 4, 1), trained(nn.BatchNorm2d(4)), nn.Flatten(), nn.Linear(4 * 64, 5))
        self.hidden = hidden

    def forward(self, x):
        return super().forward(x).masked_fill(torch.arange(5) > 2, self.hidden)


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min, torch.finfo(torch.float64).min])
def test_numbers_next_to_those_that_a_mask_hides_are_compared(hidden):
    example = torch.randn(2, 3, 8, 8)
    model = Masked(hidden).double()
    folded = rc.fold(model, example=example)
    assert rows(folded) == [("1", "1 -> 0")]
    torch.testing.assert_close(folded.eval()(example.double()), model.eval()(example.double()))
    with pytest.raises(Refused, match="not finite") as caught:
        rc.fold(Masked(float("nan")).double(), example=example)
    assert (caught.value.code, caught.value.hint) == ("live.example", "Give another example.")


def test_a_nan_among_the_weights_is_named():
    broken = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    broken[1].running_var[1] = float("nan")
    with pytest.raises(Refused) as caught:
        rc.fold(broken, example=torch.randn(2, 3, 8, 8))
    assert str(caught.value).startswith("1.running_var of this Sequential holds NaN")
    with pytest.raises(Refused, match=r"1\.running_var of this Sequential holds NaN"):
        rc.fold(broken)


class MaskedByParameter(nn.Module):
    """A layer of two inputs, whose mask of minus infinity is a parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.mask = nn.Linear(4, 4), nn.Parameter(torch.tensor([0, 0, 0, -torch.inf]), requires_grad=False)

    def forward(self, x, y):
        return torch.softmax(self.first(x) + self.mask, -1) + y


def test_an_infinite_mask_is_no_reason_why_the_inputs_are_not_known():
    with pytest.raises(Refused, match=r"^the inputs of this MaskedByParameter are not known"):
        rc.fold(MaskedByParameter().eval())


class Selected(Masked):
    """Hides the outputs below 0, which are others for each input."""

    def forward(self, x):
        y = nn.Sequential.forward(self, x)
        return y.masked_fill(y < 0, self.hidden)


def test_outputs_of_which_a_mask_hides_others_for_each_input_do_move():
    torch.manual_seed(0)
    assert rows(rc.fold(Selected(float("-inf")).double(), example=torch.randn(2, 3, 8, 8))) == [("1", "1 -> 0")]


class Amplified(nn.Module):
    """The sine of large numbers, whose last bits are rounding."""

    def __init__(self, large):
        super().__init__()
        self.conv, self.norm, self.large = nn.Conv2d(3, 4, 1), trained(nn.BatchNorm2d(4)), large

    def forward(self, x):
        return torch.sin(self.large * self.norm(self.conv(x)))


def test_rounding_in_float64_is_measured_on_the_original_and_does_not_excuse_everything():
    torch.manual_seed(0)
    example, model = torch.randn(2, 3, 8, 8), Amplified(1e4)
    folded = rc.fold(model, example=example)
    assert rows(folded) == [("norm", "norm -> conv")]
    assert 1e-12 < folded.fold_certificate[-1].max_rel_error < 1e-9  # above the tolerance; rounding explains it
    whole = Whole.of(lambda: in_float64(model), example, ())
    wrong = in_float64(folded)
    wrong.conv.bias.data *= 1 + 1e-12  # ten thousand times that, 1e-8, is more than rounding does
    assert whole.compare(wrong).verdict == "failed"
    large = rc.fold(Amplified(1.5e5), example=example)
    assert rows(large) == [("norm", "norm -> conv")]
    assert "on 5 inputs" in large.fold_certificate[-1].folded[0]  # of 6: 30 times as large ones show nothing
    assert rows(rc.fold(Amplified(1e9), example=example)) == []  # rounding moves its outputs by more than 1e-9


class Pair(NamedTuple):
    image: torch.Tensor
    scale: torch.Tensor


class OfPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, pair):
        return self.bn(self.conv(pair.image)) * pair.scale

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        assert state == {"version": 1}


def test_named_tuples_as_inputs_and_objects_in_the_state_dict():
    folded = rc.fold(trained(OfPair()), example=(Pair(torch.randn(2, 3, 8, 8), torch.ones(1)),))
    assert rows(folded) == [("bn", "bn -> conv")]


def test_modules_and_calls_in_inference_mode():
    with torch.inference_mode():
        model, x = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))), torch.randn(2, 3, 8, 8)
        folded = rc.fold(model, example=x)
        torch.testing.assert_close(folded(x), model.eval()(x))
    assert rows(folded) == rows(rc.fold(model, example=x)) == [("1", "1 -> 0")]
    assert not any(weight.is_inference() for weight in folded.parameters())


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        (lambda: nn.Sequential(nn.LazyConv2d(4, 3)), "live.meta", "a lazy layer"),
        (lambda: torch.jit.trace(nn.Conv2d(3, 4, 3), torch.ones(1, 3, 8, 8)), "live.script", "is a TorchScript module"),
        (lambda: nn.Sequential(torch.jit.script(nn.Conv2d(3, 4, 3))), "live.script", "0 of this Sequential is"),
        (lambda: 3, "usage.live", "an object of the type int is neither a file nor a torch.nn.Module"),
        (lambda: {"a": torch.ones(1)}, "usage.live", "of the type dict is neither"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:Lazy modules:UserWarning")
def test_what_is_no_module_with_numbers_and_code_of_its_own_is_refused(model, code, words):
    with pytest.raises(RepaconvError) as caught:
        rc.fold(model(), example=torch.randn(2, 3, 8, 8))
    assert caught.value.code == code
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("ratio", ["abc", float("nan"), 5])
def test_an_idle_ratio_is_a_number_between_0_and_1(ratio):
    with pytest.raises(UsageProblem) as caught:
        rc.fold(trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))), idle_ratio=ratio)
    assert caught.value.code == "setting.value"
    assert f"idle_ratio={ratio}" in caught.value.message


class NamesFloat32(nn.Module):
    """Its forward makes and casts to float32 by name, as attention and grids of positions do."""

    def __init__(self, how):
        super().__init__()
        self.conv, self.norm, self.next = nn.Conv2d(3, 8, 3), trained(nn.BatchNorm2d(8)), nn.Conv2d(8, 4, 1)
        self.how = how

    def forward(self, x):
        y = self.norm(self.conv(x))
        match self.how:
            case "a cast":
                y = y.float()
            case "to":
                y = y.to(torch.float32)
            case "a grid":
                y = y + torch.arange(y.shape[-1]).float()
            case "zeros":
                y = torch.maximum(y, torch.zeros(y.shape, dtype=torch.float32))
            case "softmax":
                y = y.softmax(1, dtype=torch.float32)
            case "its bits":
                y = (y.float().view(dtype=torch.int32) & 0x7FFFFFFF).view(torch.float32)
        return self.next(y)


@pytest.mark.parametrize("how", ["a cast", "to", "a grid", "zeros", "softmax", "its bits"])
def test_a_module_that_names_float32_is_verified_in_float64(how):
    torch.manual_seed(0)
    model, x = NamesFloat32(how).eval(), torch.randn(2, 3, 8, 8)
    folded = rc.fold(model, example=x)
    assert folded.fold_certificate[-1].max_rel_error <= 1e-12
    assert isinstance(folded.norm, nn.Identity)
    assert folded(x).dtype == torch.float32
    assert (folded(x) - model(x)).abs().max() < 1e-5


def test_what_rounding_moves_too_far_is_said_to_be_unverified_and_not_to_differ_by_nothing():
    class Chaotic(nn.Sequential):
        def forward(self, x):
            return (super().forward(x) * 1e14).sin()

    folded = rc.fold(trained(Chaotic(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))), example=torch.randn(2, 3, 8, 8))
    assert "could not be verified: rounding moves them too far" in " ".join(folded.fold_certificate[-1].not_folded)
