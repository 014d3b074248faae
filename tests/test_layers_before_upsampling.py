"""1x1 convolutions of upsampled images move before the upsampling, where they act on fewer pixels."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from test_fold_onnx import graph

import repaconv as rc
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import without
from repaconv.rewrites.fold.layers_before_upsampling import BEFORE_UPSAMPLING
from repaconv.verification.float64_graphs import ReferenceEvaluation

RANDOM = np.random.default_rng(0)
LINEAR = {"mode": "linear"}
CHANNELS, WIDTH = 96, 128


def normal(*shape):
    return RANDOM.standard_normal(shape) / np.sqrt(shape[-1])


def of_one(how, channels=CHANNELS, scales=(1, 1, 2, 2), **conv):
    """A convolution of one upsampled image."""
    weights = {"s": np.float32(scales), "w": normal(WIDTH, channels, 1, 1), "b": normal(WIDTH)}
    rows = [("Resize", "x r s", "u", how), ("Conv", "u w b", "y", conv)]
    return graph(rows, {**weights, "r": np.zeros(0)}, {"x": ("n", channels, 5, 6)})


def of_several(widths=(CHANNELS, CHANNELS, CHANNELS), out=WIDTH, sizes=((12, 16), (6, 8), (3, 4)), readers=1, batch=2):
    """A convolution of concatenated images, which are upsampled to the size of the first."""
    names = [f"x{place}" for place in range(len(widths))]
    rows, joined = [], []
    weights = {"w": normal(out, sum(widths), 1, 1), "b": normal(out), "r": np.zeros(0), "none": np.zeros(0, np.float32)}
    for name, width, size in zip(names, widths, sizes, strict=True):
        if size != sizes[0]:
            weights[f"to_{name}"] = np.array([batch, width, *sizes[0]])
            rows.append(("Resize", f"{name} r none to_{name}", f"u_{name}", LINEAR))
        joined.append(name if size == sizes[0] else f"u_{name}")
    rows += [("Concat", " ".join(joined), "c", {"axis": 1}), ("Conv", "c w b", "v"), ("Relu", "v", "y")]
    outputs = ("y", "c") if readers > 1 else ("y",)
    inputs = {name: (batch, width, *size) for name, width, size in zip(names, widths, sizes, strict=True)}
    return graph(rows, weights, inputs, outputs)


def moved(model):
    """How many convolutions were moved; what is computed must be the same."""
    after, changes = rewritten(model, [BEFORE_UPSAMPLING])
    onnx.checker.check_model(after, full_check=True)
    shapes = {
        value.name: [dim.dim_value or 6 for dim in value.type.tensor_type.shape.dim] for value in model.graph.input
    }
    feeds = {name: RANDOM.standard_normal(shape) for name, shape in shapes.items()}
    before, behind = (ReferenceEvaluation(each).run(feeds) for each in (model, after))
    for name, right in before.items():
        assert float(np.abs(behind[name] - right).max()) < 1e-12 * float(np.abs(right).max())
    return len(changes), after


@pytest.mark.parametrize(
    "how",
    [
        {"mode": "nearest"},
        LINEAR,
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        {"mode": "cubic"},
        {"mode": "cubic", "exclude_outside": 1},
    ],
    ids=str,
)
def test_a_map_of_an_upsampled_image_is_that_of_the_image(how):
    count, after = moved(of_one(how))
    assert (count, [node.op_type for node in after.graph.node]) == (1, ["Conv", "Resize"])


@pytest.mark.parametrize(
    "model",
    [
        of_one(LINEAR, scales=(1, 1, 0.5, 0.5)),  # to fewer pixels
        of_one({"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}),
        of_one(LINEAR, pads=[1, 1, 1, 1]),  # of which the border is no mean of pixels
        of_one(LINEAR, channels=32),  # the numbers that are interpolated instead take longer than the products
        of_several(readers=2),
        of_several(sizes=((12, 16),) * 3),
    ],
    ids=["smaller", "crops", "padded", "wider", "read twice", "one size"],
)
def test_it_stays_where_it_is_not_the_same_or_not_cheaper(model):
    if any(node.op_type == "Resize" and "tf_crop" in str(node.attribute) for node in model.graph.node):
        after, changes = rewritten(model, [BEFORE_UPSAMPLING])
        assert (list(changes), len(after.graph.node)) == ([], len(model.graph.node))
    else:
        assert moved(model)[0] == 0


@pytest.mark.parametrize("widths", [(128, 128, 128), (96, 120, 112), (200, 160, 150)])
def test_concatenated_images_are_mapped_each_at_its_own_resolution(widths):
    model = of_several(widths)
    count, after = moved(model)
    kinds = [node.op_type for node in after.graph.node]
    assert (count, kinds.count("Conv"), kinds.count("Resize"), kinds.count("Add")) == (1, 3, 2, 2)
    assert "Concat" not in kinds


@pytest.mark.parametrize(("axes", "to", "count"), [([2, 3], [10, 12], 1), ([1, 2, 3], [CHANNELS, 10, 12], 0)])
def test_sizes_of_named_axes_are_kept_if_channels_are_not_among_them(axes, to, count):
    rows = [("Resize", "x r none to", "u", {**LINEAR, "axes": axes}), ("Conv", "u w", "y")]
    weights = {
        "to": np.array(to),
        "w": normal(WIDTH, CHANNELS, 1, 1),
        "r": np.zeros(0),
        "none": np.zeros(0, np.float32),
    }
    assert moved(graph(rows, weights, {"x": (2, CHANNELS, 5, 6)}))[0] == count


@pytest.mark.parametrize("out", [CHANNELS, WIDTH])
@pytest.mark.parametrize(("stride", "count"), [(2, 1), (1, 0)])
def test_sizes_may_be_those_of_another_image(out, stride, count):
    """As F.interpolate of an image to the size of another one writes it, where heights and widths are dynamic."""
    sizes = {"zero": np.array([0]), "two": np.array([2]), "four": np.array([4]), "none": np.zeros(0, np.float32)}
    rows = [("MaxPool", "x", "p", {"kernel_shape": [2, 2], "strides": [stride] * 2, "pads": [0, 0, 1, 1]})]
    rows += [("Shape", "p", "ps"), ("Shape", "x", "xs"), ("Slice", "ps zero two zero", "front")]
    rows += [("Slice", "xs two four zero", "pixels"), ("Concat", "front pixels", "to", {"axis": 0})]
    rows += [("Resize", "p r none to", "u", LINEAR), ("Conv", "u w b", "y")]
    weights = sizes | {"w": normal(out, CHANNELS, 1, 1), "b": normal(out), "r": np.zeros(0)}
    given = graph(rows, weights, {"x": ("n", CHANNELS, "h", "w")})
    found, after = moved(given)
    assert found == count
    slices = [node.op_type for node in after.graph.node].count("Slice")
    assert slices == 2 + 2 * (found and out != CHANNELS)  # the other image has other channels
    for shape in ((2, CHANNELS, 5, 9), (1, CHANNELS, 16, 4)):
        feeds = {"x": RANDOM.standard_normal(shape)}
        right, other = (ReferenceEvaluation(each).run(feeds)["y"] for each in (given, after))
        assert float(np.abs(other - right).max()) < 1e-12 * float(np.abs(right).max())


@pytest.mark.parametrize(("out", "operator"), [(CHANNELS, "MatMul"), (WIDTH, "Conv")])
def test_a_map_of_upsampled_tokens_is_one_of_tokens_if_it_keeps_their_channels(out, operator):
    weights = {"to": np.array([2, CHANNELS, 5, 6]), "w": normal(out, CHANNELS, 1, 1), "b": normal(out)}
    weights |= {"r": np.zeros(0), "s": np.float32([1, 1, 2, 2])}
    rows = [("Transpose", "x", "t", {"perm": [0, 2, 1]}), ("Reshape", "t to", "i")]
    rows += [("Resize", "i r s", "u", LINEAR), ("Conv", "u w b", "y")]
    count, after = moved(graph(rows, weights, {"x": (2, 30, CHANNELS)}))
    found = [node.op_type for node in after.graph.node]
    assert (count, [name for name in found if name in ("MatMul", "Conv")]) == (1, [operator])


def test_images_of_the_largest_resolution_stay_together():
    model = of_several((32, CHANNELS, 32, CHANNELS), sizes=((12, 16), (6, 8), (12, 16), (3, 4)))
    kinds = [node.op_type for node in moved(model)[1].graph.node]
    assert (kinds.count("Conv"), kinds.count("Concat")) == (3, 1)


def test_an_image_that_is_concatenated_twice_is_mapped_twice():
    rows = [("Resize", "x r s", "u", LINEAR), ("Concat", "u u", "c", {"axis": 1}), ("Conv", "c w", "y")]
    weights = {"s": np.float32([1, 1, 2, 2]), "w": normal(WIDTH, 2 * CHANNELS, 1, 1), "r": np.zeros(0)}
    count, after = moved(graph(rows, weights, {"x": (2, CHANNELS, 5, 6)}))
    assert (count, [node.op_type for node in after.graph.node].count("Conv")) == (1, 2)


def test_the_neck_of_a_detector_stays():
    """Half of the products would be saved, for an addition more: in all of a YOLO network 2%."""
    assert moved(of_several((64, 128), sizes=((12, 16), (6, 8))))[0] == 0


def test_a_fold_without_affine_is_one_without_what_affine_follows():
    assert "before-upsampling" not in {fold.name for fold in without(["affine"])}
    assert "before-upsampling" in {fold.name for fold in without(["join"])}


def test_a_segmentation_head_is_one_layer_for_each_resolution(tmp_path):
    """As SegFormer's: a linear layer of the tokens of each stage, upsampled, concatenated, mapped, normalized."""
    rows, weights, inputs, joined = [], {"r": np.zeros(0, np.float32), "none": np.zeros(0, np.float32)}, {}, []
    for place, (width, side) in enumerate(((16, 16), (32, 8), (48, 4), (64, 2))):
        x = f"x{place}"
        inputs[x] = (1, side * side, width)
        weights |= {f"w{place}": normal(width, WIDTH), f"b{place}": normal(WIDTH)}
        weights |= {f"to{place}": np.array([1, WIDTH, side, side]), f"up{place}": np.array([1, WIDTH, 16, 16])}
        rows += [("MatMul", f"{x} w{place}", f"m{place}"), ("Add", f"m{place} b{place}", f"a{place}")]
        rows += [("Transpose", f"a{place}", f"t{place}", {"perm": [0, 2, 1]})]
        rows += [("Reshape", f"t{place} to{place}", f"v{place}")]
        rows += [("Resize", f"v{place} r none up{place}", f"u{place}", LINEAR)]
        joined.insert(0, f"u{place}")
    weights |= {"w": normal(WIDTH, 4 * WIDTH, 1, 1), "g": 1 + 0.1 * normal(WIDTH), "s": normal(WIDTH)}
    weights |= {"mean": normal(WIDTH), "variance": 1 + normal(WIDTH) ** 2}
    rows += [("Concat", " ".join(joined), "c", {"axis": 1}), ("Conv", "c w", "d")]
    rows += [("BatchNormalization", "d g s mean variance", "n"), ("Relu", "n", "y")]
    held = {name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in weights.items()}
    onnx.save(graph(rows, held, inputs, kind=TensorProto.FLOAT), tmp_path / "head.onnx")
    done = rc.fold(tmp_path / "head.onnx", out=tmp_path / "run")
    after = onnx.load(done.output_files[0])
    kinds = [node.op_type for node in after.graph.node]
    assert (done.verdict, kinds.count("MatMul"), kinds.count("Conv"), kinds.count("Resize")) == ("passed", 4, 0, 3)
    assert done.macs[1] < 0.4 * done.macs[0]
    assert [change.rewrite for change in done.changes].count("before-upsampling") == 1


def test_a_map_that_moves_before_the_upsampling_joins_the_convolution_there(tmp_path):
    """As the spatial attention of RFDN has it, whose result is added to another map of the image."""
    weights = {"k": normal(16, 16, 3, 3), "a": normal(16), "w": normal(16, 16, 1, 1), "b": normal(16)}
    weights |= {"g": normal(16, 16, 1, 1), "r": np.zeros(0, np.float32), "s": np.float32([1, 1, 4, 4])}
    rows = [("MaxPool", "x", "p", {"kernel_shape": [4, 4], "strides": [4, 4]})]
    rows += [("Conv", "p k a", "c", {"pads": [1, 1, 1, 1]}), ("Resize", "c r s", "u", LINEAR), ("Conv", "x g", "d")]
    rows += [("Add", "u d", "e"), ("Conv", "e w b", "f"), ("Sigmoid", "f", "y")]
    held = {name: array.astype(np.float32) for name, array in weights.items()}
    onnx.save(graph(rows, held, {"x": (1, 16, 24, 24)}, kind=TensorProto.FLOAT), tmp_path / "esa.onnx")
    done = rc.fold(tmp_path / "esa.onnx", out=tmp_path / "run", measure=False)
    kinds = [node.op_type for node in onnx.load(done.output_files[0]).graph.node]
    assert (done.verdict, kinds.count("Conv"), kinds.count("Add"), len(kinds)) == ("passed", 2, 1, 6)


def test_what_is_saved_counts_where_height_and_width_are_dynamic(tmp_path):
    """Counted with a height and a width of 1, nothing is saved, and the further nodes would be too many."""
    weights = {"zero": [0], "two": [2], "four": [4], "w": normal(WIDTH, 3 * CHANNELS, 1, 1), "b": normal(WIDTH)}
    weights |= {"k": normal(CHANNELS, 3, 4, 4), "r": np.zeros(0, np.float32), "none": np.zeros(0, np.float32)}
    rows = [("Conv", "x k", "c", {"strides": [2, 2]}), ("Relu", "c", "u0"), ("Shape", "u0", "s")]
    rows += [("Slice", "s two four zero", "pixels")]
    for place, by in ((1, 2), (2, 4)):
        small = f"p{place}"
        rows += [
            ("MaxPool", "u0", small, {"kernel_shape": [by] * 2, "strides": [by] * 2}),
            ("Shape", small, f"s{place}"),
        ]
        rows += [
            ("Slice", f"s{place} zero two zero", f"f{place}"),
            ("Concat", f"f{place} pixels", f"t{place}", {"axis": 0}),
        ]
        rows += [("Resize", f"{small} r none t{place}", f"u{place}", LINEAR)]
    rows += [("Concat", "u2 u1 u0", "all", {"axis": 1}), ("Conv", "all w b", "v"), ("Relu", "v", "y")]
    arrays = {name: np.asarray(numbers) for name, numbers in weights.items()}
    held = {name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in arrays.items()}
    inputs = {"x": ("n", 3, "height", "width")}
    onnx.save(graph(rows, held, inputs, kind=TensorProto.FLOAT), tmp_path / "head.onnx")
    done = rc.fold(tmp_path / "head.onnx", out=tmp_path / "run", measure=False)
    assert done.verdict == "passed"
    assert done.applied == ("before-upsampling", "selections")
    assert done.macs[1] < 0.7 * done.macs[0]
