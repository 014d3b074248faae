"""The float64 copy of a graph: operators that take only float32 are known by their schema, and `verify` completes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from itertools import count, product
from threading import Barrier, Event, get_ident

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn
from torch.nn import functional

import repaconv as rc
from repaconv.core.errors import EnvironmentProblem, Refused
from repaconv.graph.float64_rewriting import rewritten_in_float64
from repaconv.graph.graph_without_weights import check, refer_to_file, write_model
from repaconv.graph.nodes_and_constants import Writer
from repaconv.results import VerifyArtefact
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.verification import float64_graphs, model_runners
from repaconv.verification.float64_graphs import RUNTIME, Float64, ReferenceEvaluation, widened
from repaconv.verification.float64_operators import _not_suppressed, _overlaps, own_operators
from repaconv.verification.model_runners import load_onnx

F, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
RANDOM = np.random.default_rng(0)


def node(kind: str, read: str, write: str, **named) -> onnx.NodeProto:
    return helper.make_node(kind, ["" if name == "-" else name for name in read.split()], write.split(), **named)


def graph(nodes, weights, outputs, inputs=None, name="net") -> onnx.GraphProto:
    tensors = [
        numpy_helper.from_array(w if isinstance(w, np.ndarray) else RANDOM.standard_normal(w).astype(np.float32), n)
        for n, w in weights.items()
    ]
    ends = [[helper.make_tensor_value_info(n, *kind) for n, kind in side.items()] for side in (inputs or {}, outputs)]
    return helper.make_graph(nodes, name, *ends, tensors)


def written(net: onnx.GraphProto, opset: int = 18, path: str = "net.onnx") -> onnx.ModelProto:
    model = helper.make_model(net, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return model


CONV_BN = [
    node("Conv", "x w", "c", pads=[1, 1, 1, 1]),
    node("BatchNormalization", "c s b m v", "n"),
]
WEIGHTS = {"w": (4, 3, 3, 3), "s": (4,), "b": (4,), "m": (4,), "v": np.ones(4, np.float32)}
IMAGES = {"x": (F, ["N", 3, "H", "W"])}


def require_verified() -> VerifyArtefact:
    """Folded and verified in float64; the graph must be one that folds."""
    found = rc.fold("net.onnx", measure=False)
    assert found.applied
    assert found.float64
    verified = rc.verify()
    assert verified.verdict == "passed", [(link.name, link.verdict, link.note) for link in verified.links]
    return verified


def test_scales_that_an_old_exporter_computes_stay_float32():
    """Upsample's scales by the old exporter, constants not folded: a Concat of two Constant nodes."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Upsample(scale_factor=2))
    net.append(nn.Conv2d(8, 4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net.eval(),
            torch.randn(1, 3, 16, 16),
            "net.onnx",
            dynamo=False,
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "n", 2: "h", 3: "w"}},
        )
    assert any(one.op_type == "BatchNormalization" for one in onnx.load("net.onnx").graph.node)
    require_verified()


def detector() -> onnx.GraphProto:
    """Boxes and scores of a convolution; NonMaxSuppression, which takes float32 alone, runs where there are several."""
    chosen = graph(
        [node("NonMaxSuppression", "boxes scores most overlap least", "kept")],
        {"most": np.array(5), "least": np.array(-9, np.float32)},
        {"kept": (INT, ["K", 3])},
        name="chosen",
    )
    none = graph([node("Identity", "nothing", "none")], {}, {"none": (INT, [0, 3])}, name="none")
    nodes = [
        *CONV_BN,
        node("Reshape", "n flat", "f"),
        node("Transpose", "f", "boxes", perm=[0, 2, 1]),
        node("ReduceSum", "f channel", "scores", keepdims=1),
        node("Size", "boxes", "size"),
        node("Greater", "size few", "several"),
        node("If", "several", "kept_boxes", then_branch=chosen, else_branch=none),
    ]
    weights = {**WEIGHTS, "flat": np.array([0, 4, -1]), "channel": np.array([1]), "few": np.array(4)}
    weights |= {"overlap": np.array(0.5, np.float32), "nothing": np.zeros((0, 3), np.int64)}
    outputs = {"boxes": (F, ["N", "A", 4]), "kept_boxes": (INT, ["K", 3])}
    return graph(nodes, weights, outputs, IMAGES)


def test_what_takes_float32_alone_inside_a_branch_is_cast_there():
    model = written(detector())
    check(widened(model), full=True)
    require_verified()


def test_a_constant_around_a_branch_that_is_read_there_as_scales_alone_stays_float32():
    resized = graph([node("Resize", "n - scales", "r")], {}, {"r": (F, ["N", 4, "P", "Q"])}, name="resized")
    shrunk = graph([node("Resize", "n - computed", "r2")], {}, {"r2": (F, ["N", 4, "P", "Q"])}, name="shrunk")
    nodes = [
        *CONV_BN,
        node("ReduceSum", "n", "sum", keepdims=0),
        node("Greater", "sum zero", "yes"),
        node("Mul", "scales_2 two", "computed"),
        node("If", "yes", "y", then_branch=resized, else_branch=shrunk),
    ]
    doubled, halved = np.array([1, 1, 2, 2], np.float32), np.array([0.5, 0.5, 1, 1], np.float32)
    weights = {**WEIGHTS, "zero": np.zeros((), np.float32), "scales": doubled, "scales_2": halved}
    written(graph(nodes, {**weights, "two": np.array(2, np.float32)}, {"y": (F, ["N", 4, "P", "Q"])}, IMAGES))
    copy = widened(onnx.load("net.onnx"))
    check(copy, full=True)
    kinds = {weight.name: weight.data_type for weight in copy.graph.initializer}
    assert kinds["scales"] == F
    assert kinds["scales_2"] == kinds["w"] == TensorProto.DOUBLE
    require_verified()


def test_an_operator_that_gives_float32_alone_is_evaluated_in_float64():
    """Celu: a cast around it would round the very numbers that are compared."""
    nodes = [*CONV_BN, node("Celu", "n", "y", alpha=0.7)]
    model = written(graph(nodes, WEIGHTS, {"y": (F, ["N", 4, "H", "W"])}, IMAGES))
    image = RANDOM.standard_normal((2, 3, 5, 6)).astype(np.float32)
    found = Float64(model).run({"x": image})["y"]
    plain = written(graph(CONV_BN, WEIGHTS, {"n": (F, ["N", 4, "H", "W"])}, IMAGES), path="plain.onnx")
    plain.graph.initializer.clear()
    plain.graph.initializer.extend(model.graph.initializer)
    before = Float64(plain).run({"x": image})["n"]
    right = np.where(before > 0, before, np.float32(0.7) * np.expm1(before / np.float64(np.float32(0.7))))
    np.testing.assert_allclose(found, right, rtol=1e-13, atol=1e-15)
    fold = next(link for link in require_verified().links if link.name == "fold")
    assert fold.metrics.max_rel_error < 1e-12


@pytest.mark.parametrize(
    ("kind", "named"), [("Constant", {"value_float": 0.1}), ("ConstantOfShape", {})], ids=["a number", "zeros"]
)
def test_constants_that_are_float32_by_default_are_widened(kind, named):
    read = "" if kind == "Constant" else "shape"
    nodes = [*CONV_BN, node(kind, read, "k", **named), node("Add", "n k", "y")]
    model = written(graph(nodes, {**WEIGHTS, "shape": np.array([1])}, {"y": (F, ["N", 4, "H", "W"])}, IMAGES))
    check(widened(model), full=True)
    require_verified()


@pytest.mark.parametrize("center", [0, 1])
def test_boxes_are_suppressed_as_onnx_runtime_does(center):
    """Two images, three classes, boxes that overlap, tied scores, a limit, and thresholds that are scalars."""
    net = graph(
        [node("NonMaxSuppression", "boxes scores most overlap least", "kept", center_point_box=center)],
        {"most": np.array(7), "overlap": np.array(0.4, np.float32), "least": np.array(0.2, np.float32)},
        {"kept": (INT, ["K", 3])},
        {"boxes": (F, [2, 40, 4]), "scores": (F, [2, 3, 40])},
    )
    model = written(net)
    corners = RANDOM.uniform(0, 1, (2, 40, 2))
    boxes = np.concatenate([corners, corners + RANDOM.uniform(-0.2, 0.6, (2, 40, 2))], -1).astype(np.float32)
    feeds = {"boxes": np.abs(boxes) if center else boxes}
    feeds["scores"] = RANDOM.integers(0, 20, (2, 3, 40)).astype(np.float32) / 20
    reference = ReferenceEvaluator(model, new_ops=own_operators()).run(None, feeds)[0]
    found = load_onnx(model).run(feeds)["kept"]
    assert len(found) > 12
    np.testing.assert_array_equal(reference, found)


@pytest.mark.parametrize("opset", [10, 16, 21])
@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.parametrize("mode", ["half_pixel", "output_half_pixel"])
def test_boxes_are_pooled_as_onnx_runtime_does(opset, samples, mode):
    """Two images; boxes inside, at the edge, outside, without area, and with their corners exchanged."""
    how = {"output_height": 3, "output_width": 2, "sampling_ratio": samples, "spatial_scale": 0.5}
    how |= {"coordinate_transformation_mode": mode} if opset >= 16 else {}
    shapes = {"x": (F, [2, 3, 9, 7]), "boxes": (F, [16, 4]), "images": (INT, [16])}
    net = graph([node("RoiAlign", "x boxes images", "y", **how)], {}, {"y": (F, [16, 3, 3, 2])}, shapes)
    model = written(net, opset=opset)
    corners = RANDOM.uniform(-6, 18, (16, 2))
    boxes = np.concatenate([corners, corners + RANDOM.uniform(-1, 12, (16, 2))], 1).astype(np.float32)
    boxes[0], boxes[1], boxes[2, 2:] = [0, 0, 14, 18], [13, 17, 14, 18], boxes[2, :2]
    feeds = {"x": RANDOM.standard_normal((2, 3, 9, 7)).astype(np.float32), "boxes": boxes}
    feeds["images"] = RANDOM.integers(0, 2, 16)
    right = load_onnx(model).run(feeds)["y"]
    found = ReferenceEvaluator(model, new_ops=own_operators()).run(None, feeds)[0]
    assert np.abs(right).max() > 0.5
    np.testing.assert_allclose(found, right, atol=2e-6)


@pytest.mark.parametrize("overlap", [-0.1, 0.0, 0.3])
@np.errstate(invalid="ignore")
def test_boxes_far_apart_are_left_out_of_the_comparison_alone(overlap):
    """Boxes of several classes set apart, some without area, one that is infinite, one that is no number."""
    corners = RANDOM.uniform(0, 1, (90, 2)) + RANDOM.integers(0, 3, (90, 1)) * 2
    boxes = np.concatenate([corners, corners + RANDOM.integers(0, 3, (90, 2)) / 4], 1)
    boxes[3], boxes[5, 2], boxes[7] = np.nan, np.inf, boxes[8]
    order = RANDOM.permutation(90)[:80]
    kept: list[int] = []
    for one in order:
        if all(_overlaps(boxes[other], boxes[[one]].T)[0] <= overlap for other in kept):
            kept.append(one)
    assert _not_suppressed(boxes, order, overlap, 90) == kept
    assert _not_suppressed(boxes, order, overlap, 4) == kept[:4]
    assert (len(kept) == 1) == (overlap < 0)


CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)
MOST = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
MEAN = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


def in_float64(kind: str, *given: np.ndarray, **named) -> np.ndarray:
    """What our own operator gives."""
    names = [f"x{place}" for place in range(len(given))]
    inputs = {name: (TensorProto.DOUBLE, list(each.shape)) for name, each in zip(names, given, strict=True)}
    net = graph([node(kind, " ".join(names), "y", **named)], {}, {"y": (TensorProto.DOUBLE, None)}, inputs)
    model = helper.make_model(net, opset_imports=[helper.make_opsetid("", 20)])
    feeds = dict(zip(names, given, strict=True))
    found: np.ndarray = ReferenceEvaluator(model, new_ops=own_operators()).run(None, feeds)[0]
    return found


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolutions_in_float64_are_those_of_torch(rank):
    random = np.random.default_rng(rank)
    for k, step, apart, groups, pad in product((1, 3), (1, 2), (1, 2), (1, 2, 8), (0, 2)):
        x = random.standard_normal((2, 8, *[9] * rank))
        weight, bias = random.standard_normal((16, 8 // groups, *[k] * rank)), random.standard_normal(16)
        shape = {"strides": [step] * rank, "dilations": [apart] * rank, "pads": [pad] * 2 * rank, "group": groups}
        right = CONVOLUTIONS[rank - 1](*map(torch.from_numpy, (x, weight, bias)), step, pad, apart, groups).numpy()
        np.testing.assert_allclose(in_float64("Conv", x, weight, bias, **shape), right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_pools_in_float64_are_those_of_torch(rank):
    x = np.random.default_rng(rank).standard_normal((2, 3, *[11] * rank))
    for k, step, pad, ceil in product((2, 3), (1, 2, 3), (0, 1), (False, True)):
        shape = {"kernel_shape": [k] * rank, "strides": [step] * rank, "pads": [pad] * 2 * rank, "ceil_mode": int(ceil)}
        most = MOST[rank - 1](torch.from_numpy(x), k, step, pad, 1, ceil).numpy()
        np.testing.assert_array_equal(in_float64("MaxPool", x, **shape), most)
        for counted in (False, True) if not ceil else (False,):
            mean = MEAN[rank - 1](torch.from_numpy(x), k, step, pad, ceil, counted).numpy()
            found = in_float64("AveragePool", x, **shape, count_include_pad=int(counted))
            np.testing.assert_allclose(found, mean, rtol=0, atol=1e-14)


def test_a_network_of_convolutions_is_folded_and_evaluated_in_float64_without_importing_torch():
    written(graph(CONV_BN, WEIGHTS, {"n": (F, ["N", 4, "H", "W"])}, IMAGES))
    code = (
        "import sys; import repaconv; done = repaconv.fold('net.onnx', measure=False); "
        "assert done.applied and 'torch' not in sys.modules, done.applied; print(done.float64)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "reference implementation in float64" in done.stdout


# --- weights that are apart from their graph ----------------------------------------------------------

ROWS = {"x": (F, ["N", 40])}


def two_layers(*more: str, **unread) -> onnx.ModelProto:
    """Two linear layers that fold into one of 1600 numbers."""
    layers = [
        node("MatMul", "x v", "a"),
        node("Add", "a b", "c"),
        node("MatMul", "c w", "d"),
        *more,
        node("Relu", "d", "y"),
    ]
    weights = {"v": (40, 40), "b": (40,), "w": (40, 40), **unread}
    return written(graph(layers, weights, {"y": (F, ["N", 40])}, ROWS))


def test_a_fold_whose_weights_are_apart_runs_where_its_original_does():
    model = two_layers()
    found, weights, _ = rewritten_in_float64(model, FOLDS)[0]
    assert [weight.size for weight in weights.values()] == [1600]
    exact = Float64(found, weights)
    assert exact.evaluator == Float64(model).evaluator == RUNTIME
    feeds = {"x": RANDOM.standard_normal((3, 40)).astype(np.float32)}
    np.testing.assert_allclose(exact.run(feeds)["y"], Float64(model).run(feeds)["y"], rtol=1e-12, atol=1e-12)
    assert require_verified().verdict == "passed"


@pytest.mark.parametrize("kept", [0, 2**28])
def test_several_inputs_at_once_give_what_each_gives(monkeypatch, kept):
    monkeypatch.setattr(float64_graphs, "CACHED_WEIGHT_BYTES", kept)
    nodes = [*CONV_BN, node("Relu", "n", "y")]
    model = written(graph(nodes, {**WEIGHTS, "w": (4, 3, 12, 12)}, {"y": (F, ["N", 4, "I", "J"])}, IMAGES))
    calls = [{"x": RANDOM.standard_normal((n, 3, 16, 16)).astype(np.float32)} for n in (1, 3, 2, 1)]
    for evaluator in (Float64(model), Float64(*rewritten_in_float64(model, FOLDS)[0][:2])):
        assert evaluator.reference is not None
        for feeds, found in zip(calls, evaluator.run_all(calls), strict=True):
            assert (found["y"] == evaluator.run(feeds)["y"]).all()
    assert evaluator.reference._apart  # a graph whose weights are read when they are needed


def test_several_threads_change_no_filter_of_warnings(monkeypatch):
    """onnx's operators set filters for a while. Who began first and ends first leaves those of the other."""

    def overlapping(self, node, held):
        if next(numbers) == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                begun.set()
                assert both.wait(timeout=60)
            ended.set()
        else:
            assert begun.wait(timeout=60)
            with warnings.catch_warnings():
                both.set()
                assert ended.wait(timeout=60)
        return run_node(self, node, held)

    run_node, numbers = ReferenceEvaluation.run_node, count()
    begun, both, ended = Event(), Event(), Event()
    monkeypatch.setattr(ReferenceEvaluation, "run_node", overlapping)
    evaluator = Float64(written(graph(CONV_BN[:1], WEIGHTS, {"c": (F, ["N", 4, "I", "J"])}, IMAGES)))
    calls = [{"x": RANDOM.standard_normal((1, 3, 16, 16)).astype(np.float32)} for _ in range(2)]
    before = list(warnings.filters)
    with threadpool_limits(2, "blas"):
        if not any(library["num_threads"] == 2 for library in threadpool_info() if library["user_api"] == "blas"):
            pytest.skip("NumPy's BLAS has no two threads here")
        evaluator.run_all(calls)
    assert list(warnings.filters) == before


def test_several_inputs_are_evaluated_in_as_many_threads_as_blas_has(monkeypatch):
    def recorded(self, node, held):
        threads.add(get_ident())
        together.wait(timeout=60)  # no run continues without the other
        blas.extend(library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas")
        return run_node(self, node, held)

    run_node, together, threads, blas = ReferenceEvaluation.run_node, Barrier(2), set(), []
    monkeypatch.setattr(ReferenceEvaluation, "run_node", recorded)
    evaluator = Float64(written(graph(CONV_BN, WEIGHTS, {"n": (F, ["N", 4, "I", "J"])}, IMAGES)))
    calls = [{"x": RANDOM.standard_normal((n, 3, 16, 16)).astype(np.float32)} for n in (3, 1)]
    with threadpool_limits(2, "blas"):
        if not any(library["num_threads"] == 2 for library in threadpool_info() if library["user_api"] == "blas"):
            pytest.skip("NumPy's BLAS has no two threads here")
        found = evaluator.run_all(calls)
        assert len(threads) == 2
        assert set(blas) == {1}
        assert {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"} == {2}
    monkeypatch.undo()
    for feeds, outputs in zip(calls, found, strict=True):
        np.testing.assert_allclose(outputs["n"], evaluator.run(feeds)["n"], rtol=1e-12, atol=1e-12)


def test_a_large_weight_that_nothing_reads_is_no_obstacle():
    two_layers(unread=(50, 50))
    assert require_verified().verdict == "passed"


def test_a_constant_without_a_tensor_is_no_obstacle():
    nodes = [node("Relu", "x", "a"), node("Constant", "", "p", value_floats=[0.5]), node("Pow", "a p", "y")]
    written(graph(nodes, {}, {"y": (F, ["N", 40])}, ROWS))
    assert rc.fold("net.onnx", measure=False).verdict == "passed"


def test_a_graph_is_written_as_protobuf_serializes_it(tmp_path):
    """Weight by weight: a long one, an empty one, and one inside a branch."""
    value = helper.make_tensor_value_info("z", F, [40, 3])
    inner = helper.make_graph(
        [node("Identity", "w", "y")],
        "branch",
        [],
        [helper.make_tensor_value_info("y", F, [40, 3])],
        [numpy_helper.from_array(np.ones((40, 3), np.float32), "w")],
    )
    weights = [numpy_helper.from_array(np.zeros(size, np.float32), f"w{size}") for size in (0, 1, 40, 5000)]
    nodes = [node("Identity", "w40", "s", doc_string="ä"), node("If", "c", "z", then_branch=inner, else_branch=inner)]
    given = [helper.make_tensor_value_info("c", BOOL, [])]
    for kept in (weights, []):
        whole = helper.make_graph(nodes, "g", given, [value], kept, doc_string="text")
        model = helper.make_model(whole, producer_name="one")
        model.metadata_props.add(key="a", value="b")
        write_model(model, tmp_path / "m.onnx")
        assert (tmp_path / "m.onnx").read_bytes() == model.SerializeToString(deterministic=True)


def test_a_graph_above_what_one_file_can_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("repaconv.graph.graph_without_weights.ONE_FILE_BYTES", 4096)
    weights = {"w": np.zeros(2000, np.float32)}
    model = helper.make_model(graph([node("Add", "x w", "y")], weights, {"y": (F, [2000])}, {"x": (F, [2000])}))
    with pytest.raises(Refused, match="more than 2 GiB"):
        write_model(model, tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_a_graph_with_large_weights_runs_from_a_file_that_goes_again(tmp_path, monkeypatch):
    weights = {name: RANDOM.standard_normal((64, 64)).astype(np.float32) for name in ("a", "b", "unread")}
    nodes = [node("MatMul", "x a", "y"), node("MatMul", "y b", "z")]
    model = written(graph(nodes, weights, {"z": (F, [2, 64])}, {"x": (F, [2, 64])}))
    feeds = {"x": RANDOM.standard_normal((2, 64)).astype(np.float32)}
    plain = load_onnx(model).run(feeds)
    written_to = []
    monkeypatch.setattr(
        model_runners, "refer_to_file", lambda *given: written_to.append(given[-1]) or refer_to_file(*given)
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(model_runners, "FILE_BYTES", 2 * 64 * 64 * 4)
    np.testing.assert_array_equal(load_onnx(model).run(feeds)["z"], plain["z"])
    monkeypatch.setattr(model_runners, "LARGE_BYTES", 1)
    session = load_onnx(model)
    assert (len(written_to), [file.name for file in tmp_path.iterdir()]) == (2, ["net.onnx"])
    np.testing.assert_allclose(session.run(feeds)["z"], plain["z"], rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(model_runners, "scratch_folder", full_disk)
    np.testing.assert_array_equal(load_onnx(model).run(feeds)["z"], plain["z"])


def full_disk():
    raise EnvironmentProblem("no space.", hint="Make room.", code="disk")


def test_new_names_are_those_of_no_value():
    """An input, and an output inside a branch, called as a new node's output would be."""
    inner = helper.make_graph(
        [node("Identity", "x", "Add_4.out")], "b", [], [helper.make_tensor_value_info("Add_4.out", F, [2])]
    )
    nodes = [node("Relu", "Add_2.out", "x"), node("If", "c", "y", then_branch=inner, else_branch=inner)]
    model = ir.from_proto(
        helper.make_model(graph(nodes, {}, {"y": (F, [2])}, {"Add_2.out": (F, [2]), "c": (BOOL, [])}))
    )
    write = Writer(model, model.graph[0])
    assert [write("Add", *[model.graph.inputs[0]] * 2).name for _ in range(3)] == [
        "Add_1.out",
        "Add_3.out",
        "Add_5.out",
    ]
