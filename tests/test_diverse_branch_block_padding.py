"""Diverse Branch Block: a border that holds the output of a 1x1 convolution for zeros is the padding of that
convolution.
"""

from __future__ import annotations

import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from folded_operators import operators_after_folding
from reimplemented_training_networks import exported
from test_fold_onnx import graph
from test_known_submodule_folds import same, trained
from torch import nn
from torch.nn import functional as F

import repaconv as rc
from repaconv.graph.compute_costs import parameters
from repaconv.graph.models_in_onnx_ir import read, rewritten
from repaconv.rewrites.fold.convolution_composition import CONVOLUTION
from repaconv.rewrites.fold.fold_pipeline import FOLDS


class BorderedNorm(nn.Module):
    """A BatchNorm in a border of what it makes of zeros, or of something else."""

    def __init__(self, width, *, off=0.0):
        super().__init__()
        self.bn, self.off = nn.BatchNorm2d(width), off

    def forward(self, x):
        bn = self.bn
        zero = bn.bias - bn.running_mean * bn.weight / torch.sqrt(bn.running_var + bn.eps) + self.off
        out, zero = F.pad(bn(x), [1] * 4), zero.view(1, -1, 1, 1)
        out[:, :, :1, :] = zero
        out[:, :, -1:, :] = zero
        out[:, :, :, :1] = zero
        out[:, :, :, -1:] = zero
        return out


def pointwise(width, out, groups, *last):
    return nn.Sequential(nn.Conv2d(width, out, 1, groups=groups, bias=False), *last)


class DiverseBranches(nn.Module):
    """Fig. 2 of the paper: 3x3, 1x1, 1x1 and a mean, 1x1 and 3x3."""

    def __init__(self, width, out, stride=1, groups=1, *, off=0.0):
        super().__init__()
        more = {"stride": stride, "groups": groups, "bias": False}
        self.whole = nn.Sequential(nn.Conv2d(width, out, 3, padding=1, **more), nn.BatchNorm2d(out))
        self.one = nn.Sequential(nn.Conv2d(width, out, 1, **more), nn.BatchNorm2d(out))
        mean = nn.AvgPool2d(3, stride)
        self.mean = pointwise(width, out, groups, BorderedNorm(out, off=off), mean, nn.BatchNorm2d(out))
        behind = nn.Sequential(nn.Conv2d(width, out, 3, **more), nn.BatchNorm2d(out))
        self.row = pointwise(width, width, groups, BorderedNorm(width, off=off), behind)

    def forward(self, x):
        return F.relu(self.whole(x) + self.one(x) + self.mean(x) + self.row(x))


def net(**more):
    return trained(nn.Sequential(DiverseBranches(3, 8, 2, **more), DiverseBranches(8, 12, groups=4, **more))).eval()


def apart(before, after, shape):
    """How far a graph is off, relative; by ONNX Runtime, as onnx's own average of a padded image differs."""
    x, found = np.random.default_rng(0).standard_normal(shape, dtype="f4"), []
    for model in (before, after):
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        found.append(session.run(None, {session.get_inputs()[0].name: x})[0])
    return np.abs(found[1] - found[0]).max() / np.abs(found[0]).max()


WHOLE = (8 * 3 * 9 + 8) + (12 * 2 * 9 + 12)


@pytest.mark.parametrize(("dynamo", "opset", "free"), [(True, 20, True), (False, 13, False)])
def test_a_diverse_block_is_one_convolution(dynamo, opset, free):
    model = exported(net(), (2, 3, 12, 10), dynamo=dynamo, opset=opset, free=free)
    after, _ = rewritten(model, FOLDS)
    assert sorted(node.op_type for node in after.graph.node) == ["Conv", "Conv", "Relu", "Relu"]
    assert parameters(read(after)) == WHOLE
    assert apart(model, after, (2, 3, 12, 10)) < 1e-5


def of_any_size(model, optimize=True):
    """It as PyTorch exports it for images of any size."""
    named = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    more = {"opset_version": 20, "dynamic_shapes": (named,), "optimize": optimize, "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.onnx.export(model, (torch.randn(2, 3, 12, 10),), dynamo=True, **more).model_proto


@pytest.mark.parametrize("optimize", [True, False])
def test_a_diverse_block_for_images_of_any_size_is_one_convolution(optimize):
    model = of_any_size(net(), optimize)
    after, _ = rewritten(model, FOLDS)
    assert sorted(node.op_type for node in after.graph.node) == ["Conv", "Conv", "Relu", "Relu"]
    assert apart(model, after, (1, 3, 16, 12)) < 1e-5


def test_as_a_live_module():
    model = net()
    folded = rc.fold(model, example=torch.randn(1, 3, 12, 10))
    assert sum(parameter.numel() for parameter in folded.parameters()) == WHOLE
    same(model.double(), rc.fold(model), torch.randn(3, 3, 9, 7))


def test_another_border_stays():
    model = net(off=0.1)
    graph = exported(model, (2, 3, 12, 10), dynamo=True, opset=20, free=True)
    after, message = rewritten(graph, (CONVOLUTION,))
    assert not any("border" in change.description for change in message)
    assert apart(graph, after, (2, 3, 12, 10)) < 1e-5
    folded = rc.fold(model, example=torch.randn(1, 3, 12, 10))
    assert sum(parameter.numel() for parameter in folded.parameters()) > WHOLE


class Written(nn.Module):
    """A padded image, into which something is written."""

    def __init__(self, write):
        super().__init__()
        self.first, self.write, self.last = nn.Conv2d(3, 4, 1), write, nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return self.last(self.write(F.pad(self.first(x), [1] * 4), self.first.bias.view(1, -1, 1, 1)))


def inside(x, bias):
    x[:, :, :2, :] = bias
    return x


def three_sides(x, bias):
    for place in ((..., 0, slice(None)), (..., -1, slice(None)), (..., 0)):
        x[place] = bias[..., 0]
    return x


def inside_at_the_end(x, bias):
    for place in ((..., slice(1), slice(None)), (..., slice(-2, None), slice(None)), (..., slice(1))):
        x[place] = bias
    x[..., -1:] = bias
    return x


def other_than_last(x, bias):
    for place in ((..., slice(1), slice(None)), (..., slice(-1, None), slice(None)), (..., slice(1))):
        x[place] = bias
    x[..., -3:-1] = bias
    return x


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("write", [inside, three_sides, inside_at_the_end, other_than_last, lambda x, _: x])
def test_what_reaches_inside_or_leaves_a_side_stays(write, free):
    model = trained(Written(write)).eval()
    graph = of_any_size(model) if free else exported(model, (2, 3, 8, 8), dynamo=True, opset=20, free=True)
    after, message = rewritten(graph, (CONVOLUTION,))
    assert not message
    assert apart(graph, after, (3, 3, 8, 8)) < 1e-5


def test_a_side_of_other_numbers_along_a_dynamic_axis_stays():
    """The numbers have a length, and the axis that they are written along has none: it is 8 wherever this runs."""
    turn = [3, 0, 1, 2]
    rows = [("Conv", "x k b", "c"), ("Pad", "c around", "p"), ("Transpose", "p", "t", {"perm": turn})]
    rows += [("ScatterND", "t first side", "s"), ("Transpose", "s", "u", {"perm": np.argsort(turn).tolist()})]
    weights = {"k": np.ones((4, 3, 1, 1)), "b": np.ones(4), "l": np.ones((4, 4, 3, 3)), "first": np.array([[0]])}
    weights |= {"around": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "side": np.tile(np.arange(8.0), (1, 2, 4, 1))}
    model = graph([*rows, ("Conv", "u l", "y")], weights, {"x": (2, 3, "h", 6)})
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6))
    assert operators_after_folding(model, x, (CONVOLUTION,)) == [*[operator for operator, *_ in rows], "Conv"]


def test_a_border_that_no_convolution_reads_stays():
    """It would be multiplied by the 1x1 convolution, as in HaloNet, whose attention reads padded keys and values."""
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.ZeroPad2d(2), nn.Flatten(2))).eval()
    graph = exported(model, (2, 3, 8, 8), dynamo=True, opset=20, free=True)
    assert not rewritten(graph, (CONVOLUTION,))[1]
