"""Shapes that a graph computes at run time become shapes that are read from its inputs, as exporters write them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_fold_onnx import graph

import repaconv as rc
from repaconv.graph.models_in_onnx_ir import read, write_like
from repaconv.graph.shape_folding import fold_shapes
from repaconv.graph.symbolic_shapes import limit_of_ratio, parse_expression, parse_size, sizes
from repaconv.verification.float64_graphs import ReferenceEvaluation

RANDOM = np.random.default_rng(0)
ENDS = {name: np.array([number]) for name, number in (("zero", 0), ("one", 1), ("two", 2), ("four", 4))}
IMAGE = {"x": ("batch", 3, "height", "width")}
PATCHES = [("Conv", "x k", "c", {"strides": [4, 4], "pads": [1, 1, 1, 1]}), ("Relu", "c", "r")]
"""A convolution with stride 4, whose output has floor((height + 3) / 4) rows."""


def weights(**more):
    return ENDS | {"k": RANDOM.standard_normal((8, 3, 3, 3))} | more


def with_sizes_from_inputs(model):
    seen = read(model)
    fold_shapes(seen)
    return write_like(model, seen)


def shapes_read(model):
    """The values whose Shape is read, after sizes were taken from the inputs; what is computed must be the same."""
    after = with_sizes_from_inputs(model)
    onnx.checker.check_model(after, full_check=True)
    for batch, height, width in ((2, 16, 12), (1, 21, 35), (3, 4, 7)):
        feeds = {"x": RANDOM.standard_normal((batch, 3, height, width))}
        before, behind = (ReferenceEvaluation(each).run(feeds) for each in (model, after))
        for name, right in before.items():
            np.testing.assert_array_equal(behind[name], right)
    return {node.input[0] for node in after.graph.node if node.op_type == "Shape"}


def viewed_as_tokens(kind=None):
    """Tokens of patches, as ``x.flatten(2)`` and ``x.view(b, c, h, w)`` write them: by the Shape of what is viewed."""
    rows = [
        *PATCHES,
        ("Shape", "r", "s"),
        ("Slice", "s zero two zero", "front"),
        ("Slice", "s two four zero", "pixels"),
    ]
    rows += [("Concat", "front minus", "flat", {"axis": 0}), ("Reshape", "r flat", "t"), ("Sin", "t", "tokens")]
    rows += [("Shape", "tokens", "s1"), ("Slice", "s1 zero two zero", "back")]
    rows += [("Concat", "back pixels", "whole", {"axis": 0}), ("Cast", "whole", "wanted", {"to": kind or 7})]
    rows += [("Cast", "wanted", "long", {"to": 7}), ("Reshape", "tokens long", "y")]
    return graph(rows, weights(minus=np.array([-1])), IMAGE)


def test_sizes_are_read_from_the_inputs():
    assert shapes_read(viewed_as_tokens()) == {"x"}


def test_a_size_that_has_another_type_on_its_way_is_read_from_the_inputs():
    assert shapes_read(viewed_as_tokens(TensorProto.INT32)) == {"x"}


def counted(*values, place):
    """The numbers from 0 to a size of each of these values, which is read as a single number."""
    rows = [*PATCHES, ("Sin", "r", "q")]
    for value in values:
        rows += [("Shape", value, f"{value}s"), ("Gather", f"{value}s place", f"{value}n")]
        rows += [("Range", f"start {value}n step", f"{value}i"), ("Cast", f"{value}i", f"{value}y", {"to": 11})]
    more = {"place": np.array(place), "start": np.array(0), "step": np.array(1)}
    return graph(rows, weights(**more), IMAGE, (*(f"{value}y" for value in values), "q"))


def test_a_single_size_is_one_number():
    assert shapes_read(counted("r", "q", place=0)) == {"x"}


def test_a_size_that_would_take_more_nodes_is_read_where_it_is_known():
    assert shapes_read(counted("r", place=2)) == {"r"}


STATISTICS = {name: 0.5 + RANDOM.random(8) for name in ("scale", "shift", "mean", "variance")}
NORM = ("BatchNormalization", "c scale shift mean variance", "n", {"epsilon": 1e-3})


@pytest.mark.parametrize(
    ("behind", "read"),
    [
        ([NORM, ("Sin", "n", "q")], {"n"}),
        ([("Mul", "c column", "n"), ("Sin", "n", "q")], {"n"}),
        ([("Add", "column c", "n"), ("Sin", "n", "q")], {"n"}),
        ([("Mul", "c larger", "n"), ("Sin", "n", "q")], {"c"}),
        ([NORM, ("Mul", "n c", "q")], {"c"}),
        ([("Div", "c count", "n"), ("Sin", "n", "q")], {"c"}),
    ],
    ids=["norm", "scale", "shift", "larger", "several readers", "computed"],
)
def test_a_size_between_a_layer_and_its_norm_is_read_after_the_norm(behind, read):
    rows = [PATCHES[0], ("Shape", "c", "s"), ("Gather", "s place", "rows"), ("Range", "start rows step", "i")]
    rows += [("Cast", "rows", "count", {"to": 11}), *behind, ("Cast", "i", "y", {"to": 11})]
    more = {"place": np.array(2), "start": np.array(0), "step": np.array(1), "column": RANDOM.random((8, 1, 1))}
    held = weights(**more, **STATISTICS, larger=RANDOM.random((3, 1, 1, 1, 1)))
    assert shapes_read(graph(rows, held, IMAGE, ("y", "q"))) == read


@pytest.mark.parametrize("kind", ["input", "activation"])
def test_a_size_of_what_no_layer_computes_is_read_where_it_is_known(kind):
    """Read after the scale, it would be one reader more of what goes into the next layer."""
    start = {"input": "x", "activation": "r"}[kind]
    rows = [*(PATCHES if kind != "input" else []), ("Mul", f"{start} half", "n")]
    rows += [("Shape", start, "s"), ("Sin", "n", "y")]
    model = graph(rows, weights(half=np.array(0.5)), IMAGE, ("y",))
    model.graph.output.append(helper.make_tensor_value_info("s", TensorProto.INT64, [4]))
    after = read(model)
    fold_shapes(after)
    (shape,) = (node for node in after.graph if node.op_type == "Shape")
    assert shape.inputs[0].name == start


def test_a_size_that_no_input_names_is_read_where_it_is_known():
    """What a NonZero returns depends on numbers."""
    rows = [*PATCHES, ("NonZero", "r", "n"), ("Shape", "n", "s"), ("Gather", "s place", "many")]
    rows += [("Range", "start many step", "places"), ("Cast", "places", "y", {"to": 11})]
    more = {"place": np.array(1), "start": np.array(0), "step": np.array(1)}
    assert shapes_read(graph(rows, weights(**more), IMAGE)) == {"n"}


def test_a_size_that_is_an_output_stays():
    rows = [*PATCHES, ("Shape", "r", "s")]
    model = graph(rows, weights(), IMAGE)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("s", TensorProto.INT64, [4]))
    assert shapes_read(model) == {"r"}


def test_a_norm_whose_shape_is_read_is_folded(tmp_path):
    """As in Vision Transformers of dynamic size that the older exporter of PyTorch wrote."""
    held = {
        "g": 1 + RANDOM.standard_normal(8) / 4,
        "s": RANDOM.standard_normal(8),
        "w": RANDOM.standard_normal((8, 8)),
        "b": RANDOM.standard_normal(8),
    }
    rows = [*PATCHES, ("Reshape", "r flat", "t"), ("Transpose", "t", "a", {"perm": [0, 2, 1]})]
    rows += [("LayerNormalization", "a g s", "n"), ("MatMul", "n w", "p"), ("Add", "p b", "m"), ("Shape", "n", "read")]
    rows += [("Slice", "read zero two zero", "front"), ("Concat", "front heads", "wanted", {"axis": 0})]
    rows += [("Reshape", "m wanted", "v"), ("Softmax", "v", "y")]
    held |= {"flat": np.array([0, 0, -1]), "heads": np.array([2, 4])}
    single = {
        name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in weights(**held).items()
    }
    onnx.save(graph(rows, single, IMAGE, kind=TensorProto.FLOAT), tmp_path / "net.onnx")
    done = rc.fold(tmp_path / "net.onnx", out=tmp_path / "run")
    after = onnx.load(done.output_files[0])
    (norm,) = (node for node in after.graph.node if node.op_type == "LayerNormalization")
    numbers = {tensor.name: numpy_helper.to_array(tensor) for tensor in after.graph.initializer}
    assert done.verdict == "passed"
    assert (numbers[norm.input[1]] == 1).all()


def test_a_graph_in_which_nothing_else_is_folded_is_written_without_the_nodes_that_compute_sizes(tmp_path):
    def single(array):
        return array.astype(np.float32) if array.dtype.kind == "f" else array

    rows = [*PATCHES, ("Shape", "r", "s"), ("Slice", "s zero two zero", "front")]
    rows += [("Concat", "front minus", "flat", {"axis": 0}), ("Reshape", "r flat", "t"), ("Softmax", "t", "y")]
    held = {name: single(array) for name, array in weights(minus=np.array([-1])).items()}
    given = graph(rows, held, IMAGE, kind=TensorProto.FLOAT)
    onnx.save(given, tmp_path / "net.onnx")
    done = rc.fold(tmp_path / "net.onnx", out=tmp_path / "run")
    assert [change.rewrite for change in done.changes] == ["shapes"]
    assert done.changes[0].description.startswith("3 nodes removed: their results are known")
    assert done.verdict == "passed"
    after = onnx.load(done.output_files[0])
    assert [node.op_type for node in after.graph.node] == ["Conv", "Relu", "Reshape", "Softmax"]
    again = rc.fold(done.output_files[0], out=tmp_path / "again")
    assert not again.changes


def computed(rows, inputs, more=(), stated=(), outputs=("y",), kinds=TensorProto.FLOAT):
    """A graph of these nodes, of which the file says some sizes; `ENDS` and constants of one number are at hand."""
    numbers = {f"n{number}": np.array(number) for number in range(6)}
    given = graph(rows, ENDS | numbers | dict(more), inputs, outputs, kind=TensorProto.FLOAT)
    for value in given.graph.output:
        value.type.tensor_type.elem_type = kinds
    del given.graph.value_info[:]
    given.graph.value_info.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n, dims in stated)
    return given


def same_as_before(model, *shapes):
    """The graph with sizes from its inputs, which must have the same outputs on inputs of these shapes."""
    after = with_sizes_from_inputs(model)
    for of_inputs in shapes:
        feeds = {name: RANDOM.standard_normal(shape).astype(np.float32) for name, shape in of_inputs.items()}
        for right, other in zip(*(run_single(each, feeds) for each in (model, after)), strict=True):
            np.testing.assert_array_equal(other, right)
    return after


def run_single(model, feeds):
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


def test_a_division_of_a_number_below_zero_rounds_towards_zero():
    """(height - 5) / 2 + 3 is not (height + 1) / 2 where the height is below 5."""
    rows = [
        ("Relu", "x", "r"),
        ("Shape", "r", "s"),
        ("Gather", "s n0", "h"),
        ("Sub", "h n5", "a"),
        ("Div", "a n2", "b"),
    ]
    rows += [("Add", "b n3", "c"), ("Range", "n0 c n1", "y")]
    same_as_before(computed(rows, {"x": ("h",)}, kinds=TensorProto.INT64), *({"x": (size,)} for size in (2, 4, 6, 7)))


def test_a_range_may_be_empty():
    rows = [("Shape", "x", "s"), ("Gather", "s n0", "h"), ("Sub", "h n5", "a"), ("Range", "n0 a n1", "r")]
    rows += [("Cast", "r", "q0", {"to": 1}), *(("Sin", f"q{place}", f"q{place + 1}") for place in range(5))]
    rows += [("Shape", f"q{place}", f"n_{place}") for place in range(6)]
    rows += [("ConstantOfShape", f"n_{place}", f"y{place}") for place in range(6)]
    given = computed(rows, {"x": ("h",)}, outputs=[*(f"y{place}" for place in range(6)), "q5"])
    same_as_before(given, *({"x": (size,)} for size in (2, 5, 7)))


@pytest.mark.parametrize("less", [("Mul", "h", "n-2"), ("Sub", "n0", "h"), ("Sub", "h", "w")])
def test_halves_of_differences_are_not_those_of_sizes(less):
    """a / 2 + 1 is (a + 2) / 2 where a is not negative."""
    operator, left, right = less
    rows = [
        ("Relu", "x", "r"),
        ("Relu", "z", "r2"),
        ("Shape", "r", "s"),
        ("Gather", "s n0", "h"),
        ("Shape", "r2", "s2"),
    ]
    rows += [("Gather", "s2 n0", "w"), (operator, f"{left} {right}", "a0"), ("Add", "a0 n5", "a"), ("Div", "a n2", "b")]
    rows += [
        ("Add", "b n1", "c"),
        ("Add", "a n2", "d"),
        ("Div", "d n2", "e"),
        ("Equal", "c e", "f"),
        ("Cast", "f", "y", {"to": 7}),
    ]
    given = computed(rows, {"x": ("h",), "z": ("w",)}, {"n-2": np.array(-2)}, kinds=TensorProto.INT64)
    same_as_before(given, *({"x": (size,), "z": (15,)} for size in range(1, 12)))


def test_names_that_look_like_expressions_are_names():
    """Neither is "dim-2" made of "dim", nor do "n #1" and "n #2" end where a comment of Python would begin."""
    rows = [
        ("Conv", "x k", "c", {"strides": [2, 2]}),
        ("Shape", "c", "s"),
        ("Gather", "s swap", "to"),
        ("Reshape", "c to", "y"),
    ]
    more = {"k": RANDOM.standard_normal((4, 3, 2, 1)).astype(np.float32), "swap": np.array([0, 1, 3, 2])}
    for names in (
        ("dim-0", 3, "dim-2", "dim-3"),
        ("b", 3, "n #1", "n #2"),
        ("b", 3, "h+1", "h + 1"),
        ("?", 3, "m", "n"),
    ):
        same_as_before(computed(rows, {"x": names}, more), {"x": (1, 3, 8, 6)}, {"x": (2, 3, 12, 5)})


def test_a_sum_of_products_is_one_name():
    given = computed(
        [("Concat", "x x z z", "v", {"axis": 0}), ("Relu", "v", "y")],
        {"x": ("h",), "z": ("w",)},
        stated=[("v", ["2*h + 2*w"])],
    )
    (joined, _) = read(given).graph
    assert sizes(joined.outputs[0])[0].names == ("(2*h + 2*w)",)


def test_a_name_that_a_file_gives_to_several_axes_is_read_where_it_is_known():
    """Exporters call what is dynamic None, or -1."""
    rows = [*PATCHES, ("Sin", "r", "q"), ("Shape", "r", "s"), ("Shape", "q", "t")]
    for place in (0, 2, 3):
        for shape in ("s", "t"):
            rows += [("Gather", f"{shape} n{place}", f"{shape}{place}")]
            rows += [("Range", f"n0 {shape}{place} n1", f"y{shape}{place}")]
    outputs = [f"y{shape}{place}" for place in (0, 2, 3) for shape in ("s", "t")]
    more = weights()
    more["k"] = more["k"].astype(np.float32)
    given = computed(rows, {"x": ("None", 3, "None", "None")}, more, outputs=outputs, kinds=TensorProto.INT64)
    same_as_before(given, {"x": (2, 3, 9, 17)})


def test_a_multiple_of_a_size_is_that_multiple():
    rows = [("Concat", "x x", "v0", {"axis": 0}), *(("Sin", f"v{place}", f"v{place + 1}") for place in range(5))]
    rows += [("Shape", f"v{place}", f"s{place}") for place in range(6)]
    rows += [("ConstantOfShape", f"s{place}", f"y{place}") for place in range(6)]
    given = computed(
        rows,
        {"x": ("h",)},
        stated=[(f"v{place}", ["2*h"]) for place in range(6)],
        outputs=[*(f"y{place}" for place in range(6)), "v5"],
    )
    after = same_as_before(given, {"x": (3,)}, {"x": (4,)})
    assert [node.input[0] for node in after.graph.node if node.op_type == "Shape"] == ["x"]


def test_tokens_of_an_image_and_two_more():
    """The size of a sum with a product is no window over the first factor."""
    rows = [*PATCHES, ("Sin", "r", "q")]
    for name in "rq":
        rows += [
            ("Shape", name, f"{name}s"),
            ("Gather", f"{name}s n2", f"{name}h"),
            ("Gather", f"{name}s n3", f"{name}w"),
        ]
        rows += [
            ("Mul", f"{name}h {name}w", f"{name}t"),
            ("Add", f"{name}t n1", f"{name}1"),
            ("Add", f"{name}1 n1", f"{name}2"),
        ]
        rows += [("Range", f"n0 {name}2 n1", f"{name}y")]
    more = weights()
    more["k"] = more["k"].astype(np.float32)
    given = computed(rows, IMAGE, more, outputs=("ry", "qy"), kinds=TensorProto.INT64)
    same_as_before(given, {"x": (1, 3, 8, 8)}, {"x": (2, 3, 12, 17)})


def test_integers_of_another_type_keep_it():
    rows = [("Concat", "i j", "k", {"axis": 0}), ("Cast", "x", "c", {"to": 6}), ("Add", "c k", "y")]
    more = {"i": np.array([1], np.int32), "j": np.array([2], np.int32)}
    given = computed(rows, {"x": ("b", 2)}, more, kinds=TensorProto.INT32)
    same_as_before(given, {"x": (3, 2)})


def test_a_number_with_two_axes_more_is_no_list():
    rows = [("Relu", "x", "r"), ("Sin", "r", "q")]
    for name in "rq":
        rows += [("Shape", name, f"{name}s"), ("Gather", f"{name}s n0", f"{name}n")]
        rows += [("Unsqueeze", f"{name}n both", f"{name}u"), ("Cast", f"{name}u", f"{name}y", {"to": 1})]
    given = computed(rows, {"x": ("n",)}, {"both": np.array([0, 1])}, outputs=("ry", "qy"))
    same_as_before(given, {"x": (2,)})


def test_there_may_be_no_row_at_all():
    """Of as many rows as numbers are positive, a Reshape does not find a -1 if that is none."""
    rows = [("Relu", "x", "p"), ("NonZero", "p", "places"), ("Cast", "places", "numbers", {"to": 1})]
    rows += [
        ("Transpose", "numbers", "t", {"perm": [1, 0]}),
        ("Unsqueeze", "x zero", "line"),
        ("MatMul", "t line", "m"),
    ]
    rows += [("Unsqueeze", "m two", "u"), ("Unsqueeze", "z zero", "other"), ("MatMul", "u other", "r")]
    rows += [
        ("Shape", "r", "s"),
        ("Slice", "s zero one zero", "front"),
        ("Gather", "s n1", "h"),
        ("Gather", "s n2", "w"),
    ]
    rows += [("Mul", "h w", "hw"), ("Unsqueeze", "hw zero", "last"), ("Concat", "front last", "to", {"axis": 0})]
    given = computed([*rows, ("Reshape", "r to", "y")], {"x": ("h",), "z": ("w",)})
    after = same_as_before(given, {"x": (7,), "z": (5,)})
    for sign in (1, -1):
        feeds = {"x": np.full(4, sign, np.float32), "z": np.ones(3, np.float32)}
        assert run_single(after, feeds)[0].shape == run_single(given, feeds)[0].shape == (2 * sign + 2, 12)


def test_a_name_of_two_inputs_is_read_where_it_is_known():
    """One of them may be broadcast, whatever the file calls its sizes."""
    rows = [("Mul", "mask x", "r"), ("Sin", "r", "q")]
    for name in "rq":
        rows += [("Shape", name, f"{name}s"), ("ConstantOfShape", f"{name}s", f"{name}y")]
    given = computed(rows, {"x": ("b", "h"), "mask": ("b", "h")}, outputs=("ry", "qy", "q"))
    same_as_before(given, {"mask": (1, 5), "x": (3, 5)}, {"mask": (3, 5), "x": (3, 5)})


def test_nodes_that_are_unread_anyway_save_none():
    """The width of a tensor is a number; what took it from the shape is gone, and a height takes five nodes for two."""
    rows = [*PATCHES, ("Shape", "r", "s"), ("Gather", "s n2", "h"), ("Range", "n0 h n1", "y")]
    for name in "abc":
        rows += [
            ("Gather", "s one", f"{name}n"),
            ("Expand", f"line {name}n", f"{name}e"),
            ("Abs", f"{name}e", f"{name}y"),
        ]
    more = weights(line=np.ones(1, np.float32))
    more["k"] = more["k"].astype(np.float32)
    given = computed(rows, IMAGE, more, outputs=("y", "ay", "by", "cy"))
    given.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    after = same_as_before(given, {"x": (2, 3, 9, 10)})
    assert {node.input[0] for node in after.graph.node if node.op_type == "Shape"} == {"r"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("(((h - 1)//4)) + 1", "((h+3)//4)"),
        ("((((h - 1)//8)) + 1)*((((w - 1)//8)) + 1)", "((h+7)//8)*((w+7)//8)"),
        ("(h//2)//4", "((h+0)//8)"),
        ("2*h - 2", "(h-1)*2"),
        ("1 + h", "(h+1)"),
        ("((h+7)//8)", "((h+7)//8)"),
        ("12", "12"),
        ("h", "h"),
        ("n", None),
        ("Max(1, h)", None),
        ("h + w", None),
        ("h // 0", None),
        ("(h - 5)//2", "((h-5)//2)"),
        ("0*h + 1", None),
        ("True + h", None),
        ("h #1", None),
        ("(h", None),
        ("h + " * 5000 + "h", None),
        ("-" * 390 + "h+1", None),
    ],
)
def test_sizes_that_exporters_write_have_the_names_of_those_that_are_computed(text, name):
    size = parse_expression(text, {"h", "w"})
    assert (None if size is None else str(size)) == name
    assert name is None or parse_size(name) == size


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ("((h+31)//32)", "((h+3)//4)", 1 / 8),
        ("h", "h*2", 1 / 2),
        ("14", "56", 1 / 4),
        ("h*w", "h*w", 1.0),
        ("h", "w", None),
        ("7", "h", None),
        ("h*w", "h*h", None),
    ],
)
def test_how_a_size_grows_with_another(before, after, share):
    assert limit_of_ratio(parse_size(before), parse_size(after)) == share


def test_a_resize_has_the_sizes_that_are_computed_for_it():
    """Images of two resolutions, the smaller one upsampled to the size of the larger, as F.interpolate writes it."""
    rows = [*PATCHES, ("MaxPool", "r", "p", {"kernel_shape": [2, 2], "strides": [2, 2]}), ("Shape", "p", "s")]
    rows += [("Slice", "s zero two zero", "front"), ("Shape", "r", "s1"), ("Slice", "s1 two four zero", "pixels")]
    rows += [
        ("Concat", "front pixels", "wanted", {"axis": 0}),
        ("Resize", "p roi none wanted", "u"),
        ("Add", "u r", "y"),
    ]
    given = graph(rows, weights(roi=np.zeros(0), none=np.zeros(0, np.float32)), IMAGE)
    seen = read(given)
    (resize,) = (node for node in seen.graph if node.op_type == "Resize")
    assert [str(size) for size in sizes(resize.outputs[0])] == ["batch", "8", "((height+3)//4)", "((width+3)//4)"]
