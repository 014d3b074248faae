"""Networks of re-parameterized families fold to the layers that their own conversion leaves, from every source."""

from __future__ import annotations

import copy
import io
import warnings

import numpy as np
import onnx
import pytest
import reparameterized_blocks as blocks
import reparameterized_networks
import torch
from test_fold_onnx import graph, normal
from test_known_submodule_folds import same, trained
from test_structural_fold import reported_folds
from torch import nn
from torch.nn import functional as F

import repaconv as rc
from repaconv.algebra.convolution_kernels import Kernel, composed
from repaconv.graph.models_in_onnx_ir import read, rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.rewrites.fold.unfolded_linear_operators import BORDER, PADDED, unfolded_operators
from repaconv.torch_fold.traced_linear_maps import COMPUTED, PARALLEL
from repaconv.verification.float64_graphs import Float64

OWN = [name for name, family in reparameterized_networks.FAMILIES.items() if family.source == "own writing"]


def exported(module, shape, *, dynamo=False):
    """A module in float64, by torch's older exporter, which is quick, or by the other."""
    x = (torch.randn(*shape, dtype=torch.float64),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            return torch.onnx.export(module.double(), x, dynamo=True, opset_version=20, verbose=False).model_proto
        stream = io.BytesIO()
        torch.onnx.export(module.double(), x, stream, dynamo=False, opset_version=17)
    return onnx.load_from_string(stream.getvalue())


def by_graph(module, shape, *, dynamo=False):
    """The folded graph of a module in float64, and the changes; it computes the same."""
    model = exported(module, shape, dynamo=dynamo)
    after, changes = rewritten(model, FOLDS)
    x = {model.graph.input[0].name: normal(*shape)}
    for before, found in zip(Float64(model).run(x).values(), Float64(after).run(x).values(), strict=True):
        assert np.abs(found - before).max() <= 1e-12 * np.abs(before).max()
    return after, changes


def kinds(model):
    return sorted(node.op_type for node in model.graph.node if node.op_type != "Constant")


@pytest.mark.parametrize("name", OWN)
def test_own_blocks_come_to_what_their_own_conversion_leaves(name):
    family, net = reparameterized_networks.FAMILIES[name], reparameterized_networks.network(name).double()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eps = 2.0**-17  # a float32, as ONNX has it
    own, shape = blocks.deployed(net), (2, 3, *family.size)
    assert reparameterized_networks.apart(net, own, family.size) < 1e-12
    wanted = kinds(exported(own, shape))
    after, _ = by_graph(net, shape, dynamo=name == "orepa")  # whose einsum the other does not write
    assert reparameterized_networks.counts(after)[0] == sum(
        kind in reparameterized_networks.PRODUCTS for kind in wanted
    )
    assert len(after.graph.node) <= len(wanted)
    folded = rc.fold(net, example=torch.randn(*shape, dtype=torch.float64))
    assert kinds(exported(folded, shape)) == wanted
    same(net, folded, torch.randn(3, 3, 40, 36))


# --- Kernels in series, at the border.


def random_kernel(random, into, out, *, bias):
    """A convolution of torch, and its kernel; of any size, padding, stride, dilation and groups."""
    groups = int(random.choice([n for n in (1, into) if out % n == 0]))
    size, stride, dilation, pad = (random.integers(*ends, 2) for ends in ((1, 4), (1, 3), (1, 3), (0, 4)))
    conv = nn.Conv2d(
        into, out, *(tuple(map(int, each)) for each in (size, stride)), 0, tuple(map(int, dilation)), groups
    )
    conv.double().padding = tuple(map(int, pad))
    weight, own = conv.weight.detach().numpy(), conv.bias.detach().numpy() if bias else None
    if not bias:
        conv.bias = None
    more = {"strides": stride.tolist(), "pads": [*pad.tolist()] * 2, "dilations": dilation.tolist()}
    return conv, Kernel.convolution(weight, own, groups=groups, **more)


def run(kernel, x):
    """A kernel by torch, with other padding before than behind."""
    top, left, bottom, right = kernel.pads
    steps, weight = tuple(taps.step for taps in kernel.taps), torch.from_numpy(kernel.weight)
    bias = None if kernel.bias is None else torch.from_numpy(kernel.bias)
    return F.conv2d(F.pad(x, (left, right, top, bottom)), weight, bias, kernel.strides, 0, steps, kernel.groups)


def test_random_kernels_in_series_are_one_where_the_border_is_the_same():
    torch.manual_seed(0)
    composes = padded = 0
    for seed in range(400):
        random = np.random.default_rng(seed)
        first = random_kernel(random, 2, 4, bias=bool(random.random() < 0.3))
        second = random_kernel(random, 4, 4, bias=True)
        one = composed(second[1], first[1])
        if one is None:
            continue
        composes += 1
        padded += second[1].is_padded and not first[1].is_diagonal
        for size in ((19, 21), (22, 20), (26, 25)):
            x = torch.randn(2, 2, *size, dtype=torch.float64)
            wanted = second[0](first[0](x))
            found = run(one, x)
            assert found.shape == wanted.shape
            assert float((found - wanted).detach().abs().max()) < 1e-12, seed
    assert composes > 100
    assert padded > 20


class InSum(nn.Module):
    """Two layers in series, next to a convolution that is large enough for both."""

    def __init__(self, first, second, whole):
        super().__init__()
        self.first, self.second, self.whole = first, second, whole

    def forward(self, x):
        return self.whole(x) + self.second(self.first(x))


def depthwise(size, pad, *, bias):
    return nn.Conv2d(4, 4, size, padding=pad, groups=4, bias=bias)


IN_SUM = {
    "a row before a column": (depthwise((1, 5), (0, 2), bias=False), depthwise((5, 1), (2, 0), bias=True), (1, 2), 1),
    "with a bias": (depthwise((1, 5), (0, 2), bias=True), depthwise((5, 1), (2, 0), bias=True), (1, 2), 3),
    "all that is not zero": (nn.Conv2d(4, 4, 3, padding=2, bias=False), nn.Conv2d(4, 4, 3, padding=1), (1, 3), 1),
    "cut off": (nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1), (1, 2), 3),
    "every other pixel": (nn.Conv2d(4, 4, 1, 2, bias=False), nn.Conv2d(4, 4, 3, padding=1), (2, 2), 1),
    "zeros": (nn.ZeroPad2d(1), nn.Conv2d(4, 4, 3, padding=1), (1, 3), 1),
    "no zeros": (nn.ConstantPad2d(1, 0.5), nn.Conv2d(4, 4, 3), (1, 2), 2),
}


@pytest.mark.parametrize("name", IN_SUM)
def test_layers_in_series_are_merged_with_what_is_added_if_the_border_stays(name):
    first, second, (stride, pad), convolutions = copy.deepcopy(IN_SUM[name])
    net = trained(nn.Sequential(InSum(first, second, nn.Conv2d(4, 4, 5, stride, pad)), nn.ReLU())).eval()
    after, _ = by_graph(net, (2, 4, 12, 12))
    assert kinds(after).count("Conv") == convolutions
    folded = rc.fold(net.double(), example=torch.randn(2, 4, 12, 12, dtype=torch.float64))
    assert sum(isinstance(part, nn.Conv2d) for part in folded.modules()) == convolutions
    same(net, folded, torch.randn(2, 4, 10, 14))


def test_convolutions_whose_border_differs_say_so():
    weights = {"v": normal(32, 4, 3, 3), "w": normal(4, 32, 3, 3), "b": normal(32)}
    for given, why in (("x v", BORDER), ("x v b", PADDED)):
        rows = [("Conv", given, "h", {"pads": [1] * 4}), ("Conv", "h w", "y", {"pads": [1] * 4})]
        model = graph(rows, weights, {"x": (2, 4, 9, 9)})
        after, changes = rewritten(model, FOLDS)
        assert not changes
        assert any(why in sentence for sentence in unfolded_operators(read(after)))
    rows = [("Conv", "x v", "h", {"pads": [2] * 4}), ("Conv", "h w", "y", {"pads": [1] * 4})]  # all of the border
    after, _ = rewritten(graph(rows, weights, {"x": (2, 4, 9, 9)}), FOLDS)
    assert [node.op_type for node in after.graph.node] == ["Conv"]


# --- Weights that every forward computes.


class Computed(nn.Module):
    """A convolution of the outer product of two vectors, and of a matrix."""

    def __init__(self, width=24):
        super().__init__()
        self.row, self.column = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))
        self.matrix, self.bias = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.randn(width))

    def weight(self):
        return (torch.outer(self.row, self.column) @ self.matrix)[:, :, None, None]

    def forward(self, x):
        return F.conv2d(x, self.weight(), self.bias.exp())


class Assigned(nn.Module):
    """A convolution to which every forward assigns its weight, as SPAN's do."""

    def __init__(self, width=24):
        super().__init__()
        self.made, self.conv = Computed(width), nn.Conv2d(width, width, 1)

    def forward(self, x):
        self.conv.weight.data = self.made.weight()
        return self.conv(x)


@pytest.mark.parametrize("kind", [Computed, Assigned])
def test_a_weight_that_every_forward_computes_is_computed_once(kind):
    net = trained(nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), kind())).eval()
    folded = rc.fold(net.double(), example=torch.randn(2, 3, 9, 9, dtype=torch.float64))
    assert isinstance(folded[2], nn.Conv2d)
    assert reported_folds(folded) == [f"2: {COMPUTED} -> {folded[2]}"]
    same(net, folded, torch.randn(3, 3, 11, 8))
    if kind is Computed:
        after, changes = by_graph(net, (2, 3, 9, 9))
        assert [change.rewrite for change in changes] == ["weights"]
        assert kinds(after) == ["Conv", "Conv", "Relu"]


def test_what_only_copies_a_weight_computes_none():
    class Copied(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight.data.clone().to(x), self.bias.detach())

    net = trained(nn.Sequential(Copied(3, 4, 1), nn.ReLU())).eval()
    folded = rc.fold(net, example=torch.randn(2, 3, 9, 9))
    assert type(folded[0]) is Copied


def test_a_weight_larger_than_what_it_is_computed_from_stays():
    weights = {"a": normal(128, 1), "b": normal(1, 128)}
    model = graph([("MatMul", "a b", "w"), ("MatMul", "x w", "y")], weights, {"x": (2, 3, 128)})
    after, changes = rewritten(model, FOLDS)
    assert (after, changes) == (model, [])
    larger = {**weights, "c": normal(128, 64)}  # behind which it is smaller
    rows = [("MatMul", "a b", "w"), ("MatMul", "w c", "v"), ("MatMul", "x v", "y")]
    model = graph(rows, larger, {"x": (2, 3, 128)})
    after, changes = rewritten(model, FOLDS)
    assert [change.rewrite for change in changes] == ["weights"]
    assert [node.op_type for node in after.graph.node] == ["MatMul"]
    x = {"x": normal(2, 3, 128)}
    assert np.allclose(Float64(after).run(x)["y"], Float64(model).run(x)["y"], rtol=1e-12)


# --- A vector that is written as large as the image.


def test_a_vector_expanded_to_the_image_is_one_number_per_channel():
    shift, uneven = normal(4, 1, 1), normal(4, 5, 6)
    for numbers, nodes in ((shift + np.zeros((1, 4, 5, 6)), ["Conv"]), (uneven[None], ["Add", "Conv"])):
        weights = {"a": numbers, "w": normal(3, 4, 1, 1)}
        model = graph([("Add", "x a", "h"), ("Conv", "h w", "y")], weights, {"x": (2, 4, 5, 6)})
        after, _ = rewritten(model, FOLDS)
        assert kinds(after) == nodes
        x = {"x": normal(2, 4, 5, 6)}
        assert np.allclose(Float64(after).run(x)["y"], Float64(model).run(x)["y"], rtol=1e-12)

    class Expanded(blocks.Implicit):
        def forward(self, x):
            h = self.conv(self.added.vector.expand_as(x) + x)
            return self.times.vector.expand_as(h) * h

    net = trained(nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Sequential(Expanded(8, 4), nn.ReLU()))).eval()
    after, _ = by_graph(net, (2, 3, 12, 12))
    assert kinds(after).count("Add") == kinds(after).count("Expand") == 0
    folded = rc.fold(net.double(), example=torch.randn(2, 3, 12, 12, dtype=torch.float64))
    assert reported_folds(folded) == [f"2: {PARALLEL} -> {folded[2][0]}"] or "Conv2d" in str(folded[2])
    same(net, folded, torch.randn(3, 3, 9, 7))


# --- Views that follow each other.


@pytest.mark.parametrize(("times", "transposes"), [(2, 1), (3, 2)])
def test_views_become_as_few_as_have_no_more_axes_than_tensorrt_takes(times, transposes):
    """Hiera unrolls windows three times; in one step that had nine axes, and TensorRT refused the fold."""
    rows, weights, size, last = [("Relu", "x", "v")], {}, 16, "v"
    for turn in range(times):
        size //= 2
        count = 4 ** (turn + 1)
        weights[f"apart{turn}"] = np.array([count // 4, size, 2, size, 2, 3])
        weights[f"flat{turn}"] = np.array([count, size, size, 3])
        rows += [
            ("Reshape", f"{last} apart{turn}", f"a{turn}"),
            ("Transpose", f"a{turn}", f"t{turn}", {"perm": [0, 2, 4, 1, 3, 5]}),
            ("Reshape", f"t{turn} flat{turn}", f"f{turn}"),
        ]
        last = f"f{turn}"
    weights["shift"] = normal(3)
    rows += [("Add", f"{last} shift", "s"), ("MatMul", "s w", "y")]
    weights["w"] = normal(3, 5)
    model = graph(rows, weights, {"x": (1, 16, 16, 3)})
    after, changes = rewritten(model, FOLDS)
    assert changes
    assert kinds(after).count("Transpose") == transposes
    most = max(len(node.attribute[0].ints) for node in after.graph.node if node.op_type == "Transpose")
    assert most <= 8
    x = {"x": normal(1, 16, 16, 3)}
    assert np.allclose(Float64(after).run(x)["y"], Float64(model).run(x)["y"], rtol=1e-12, atol=1e-13)


# --- A concatenation of parts of one value.


def test_parts_that_a_concatenation_joins_again_leave_one_convolution_after_it():
    half, whole = normal(3, 4, 1, 1), normal(5, 11, 1, 1)
    rows = [("Relu", "x", "h"), ("Split", "h", "a b", {"axis": 1, "num_outputs": 2}), ("Conv", "b v", "c")]
    rows += [("Sigmoid", "c", "d"), ("Concat", "a b d", "e", {"axis": 1}), ("Conv", "e w", "f"), ("Tanh", "f", "y")]
    bias = [("Conv", "x u", "i"), ("Add", "i s", "j")]  # which the fold changes
    rows[0] = ("Relu", "j", "h")
    weights = {"v": half, "w": whole, "u": normal(8, 2, 1, 1), "s": normal(8, 1, 1)}
    model = graph([*bias, *rows], weights, {"x": (2, 2, 5, 6)})
    after, changes = rewritten(model, FOLDS)
    assert changes
    assert kinds(after) == ["Concat", "Conv", "Conv", "Conv", "Relu", "Sigmoid", "Split", "Tanh"]
    x = {"x": normal(2, 2, 5, 6)}
    assert np.allclose(Float64(after).run(x)["y"], Float64(model).run(x)["y"], rtol=1e-12)


# --- The table.


def test_the_page_is_the_result():
    assert reparameterized_networks.page() == reparameterized_networks.PAGE.read_text()
    rows = reparameterized_networks.known()
    assert set(rows) == set(reparameterized_networks.FAMILIES)
    own = [row for row in rows.values() if "own" in row["trained"]]
    doors = ("graph", "arch", "module")
    assert all(row[door]["counts"][0] <= row["trained"]["own"][0] for row in own for door in doors)


class Dependent(nn.Module):
    """A convolution whose weight is doubled for bright images, written by one of several ways."""

    def __init__(self, write):
        super().__init__()
        self.a, self.conv = nn.Parameter(torch.randn(4, 4, 3, 3)), nn.Conv2d(4, 4, 3, padding=1)
        self.register_buffer("k", torch.ones(4, 1, 1, 1))
        self.write = write

    def forward(self, x):
        return F.conv2d(x, self.write(self, 1 + (x.mean() > 50)), padding=1)


def _by_data(net, factor):
    net.conv.weight.data = net.a * factor
    return net.conv.weight


def _by_view(net, factor):
    weight = net.a * 1
    weight.view(4, -1).mul_(factor)
    return weight


def _by_index(net, factor):
    weight = net.a * 1
    weight[:, :, 1].mul_(factor)
    return weight


def _by_buffer(net, factor):
    net.k.view(-1).fill_(1).mul_(factor)
    return net.a * net.k


@pytest.mark.parametrize("write", [_by_data, _by_view, _by_index, _by_buffer])
def test_a_weight_that_depends_on_the_input_is_no_constant_however_it_is_written(write):
    torch.manual_seed(0)
    net = Dependent(write).eval().double()
    folded = rc.fold(net, example=torch.randn(2, 4, 16, 16).double())
    bright = torch.randn(2, 4, 16, 16).double() + 60
    with torch.no_grad():
        assert torch.equal(net(bright), folded(bright))


class Counting(nn.Module):
    """Another weight from the second call on."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.n = nn.Parameter(torch.randn(4, 4, 3, 3)), nn.Parameter(torch.randn(4, 4, 3, 3)), 0

    def forward(self, x):
        self.n += 1
        return F.conv2d(x, self.a + self.b if self.n == 1 else self.a, padding=1)


class Decaying(nn.Module):
    """A weight that every call halves."""

    def __init__(self):
        super().__init__()
        self.a, self.conv = nn.Parameter(torch.randn(4, 4, 3, 3)), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        self.conv.weight.data = self.conv.weight.data * 0.5 + self.a
        return self.conv(x)


@pytest.mark.parametrize("kind", [Counting, Decaying])
def test_a_forward_that_changes_itself_is_not_folded_as_its_first_call(kind):
    torch.manual_seed(0)
    net, x = kind().eval().double(), torch.randn(2, 4, 9, 9).double()
    folded = rc.fold(net, example=x)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(net(x), folded(x))


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        ([("Cast", "p", "h", {"to": 10}), ("Cast", "h", "w", {"to": 1})], (4, 4, 3, 3)),
        (
            [("Resize", "p  scales", "w", {"coordinate_transformation_mode": "align_corners", "mode": "linear"})],
            (4, 4, 8, 7),
        ),
        ([("Dropout", "p half yes", "w", {"seed": 1})], (4, 4, 3, 3)),
    ],
)
def test_what_a_runtime_computes_otherwise_is_not_computed_in_advance(nodes, shape):
    """Rounding to half precision, corners that are no whole sizes apart, and random numbers."""
    held = {"p": normal(*shape).astype(np.float32), "scales": np.array([1, 1, 0.4, 0.5], np.float32)}
    held |= {"half": np.array(0.5, np.float32), "yes": np.array(True)}
    made = [onnx.helper.make_node(kind, read.split(" "), [out], **given) for kind, read, out, given in nodes]
    used = {name for node in made for name in node.input}
    made.append(onnx.helper.make_node("Conv", ["x", "w"], ["y"]))
    weights = [onnx.numpy_helper.from_array(array, name) for name, array in held.items() if name in used]
    ports = [onnx.helper.make_tensor_value_info(name, 1, [1, None, None, None]) for name in "xy"]
    ports[0].type.tensor_type.shape.dim[1].dim_value = 4
    whole = onnx.helper.make_graph(made, "g", ports[:1], ports[1:], weights)
    model = onnx.helper.make_model(whole, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    after, _ = rewritten(model, FOLDS)
    assert kinds(after) == sorted([*(kind for kind, *_ in nodes), "Conv"])
