"""A difference between FP32 and float64 is rounding only if the float64 evaluator computes ONNX Runtime's function."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference.op_run import OpRun
from planted_graph_faults import NETS, F, Net
from test_float64_verification import ill_conditioned

import repaconv as rc
from repaconv.core.run_folder import Run
from repaconv.engines.contract import SessionSpec
from repaconv.engines.onnxruntime_cpu import settings_for
from repaconv.results import Link, Tolerance
from repaconv.sources.onnx_graph_runner import GraphForm
from repaconv.sources.source_of_run import source_model_of
from repaconv.verification import float64_evaluator_check, float64_graphs, graph_with_cached_outputs
from repaconv.verification.comparison import NUMBERS_IN_CACHE, Comparison, PerNeighborhood, surely_within
from repaconv.verification.float64_evaluator_check import NODES_AT_ONCE, differing_operators, graph_rounding
from repaconv.verification.float64_graphs import ReferenceEvaluation
from repaconv.verification.folded_graph_verification import verification_links
from repaconv.verification.graph_with_cached_outputs import Evaluated
from repaconv.verification.rounding import Rounding, network_rounding
from repaconv.verification.tolerances import tolerance

WRONG = 1e-3
"""By how much the planted kernel and the planted fault are wrong."""
NET = [
    ("Conv", "x w", "a", {"pads": [1] * 4}), ("BatchNormalization", "a nw nb nm nv", "b"), ("Tanh", "b", "c"),
    ("Conv", "c w", "y"),
]  # fmt: skip
RANDOM = np.random.default_rng(5)  # of its own: that of planted_graph_faults makes the weights of other tests
KERNEL = RANDOM.standard_normal((4, 4, 3, 3))
WEIGHTS = {"w": KERNEL, **dict(zip(("nw", "nb", "nm", "nv"), 0.5 + RANDOM.random((4, 4)), strict=True))}


def net(batch: int | str = "n", rows: list | None = None) -> onnx.ModelProto:
    return Net(rows or NET, WEIGHTS, {"x": (F, (batch, 4, 8, 8))}, {"y": F}).model()


@pytest.fixture
def wrong_kernel(monkeypatch):
    """A function that makes the evaluator's Tanh wrong from then on."""
    right = float64_graphs.own_operators

    class Tanh(OpRun):
        def _run(self, x):
            return (np.tanh(x) * (1 + WRONG),)

    return lambda: monkeypatch.setattr(float64_graphs, "own_operators", lambda: [*right(), Tanh])


def images(count: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal((count, 4, 8, 8)).astype(np.float32)}


def doubt(model: onnx.ModelProto) -> str:
    graph = Evaluated(model)
    return next(filter(None, (differing_operators(model, graph.float64, feeds) for feeds in graph.probes.feeds)), "")


# --- a wrong kernel excuses nothing


def written_wrong(before: onnx.ModelProto) -> onnx.ModelProto:
    after = onnx.ModelProto()
    after.CopyFrom(before)
    for weight in after.graph.initializer:
        if weight.name == "nb":
            array = onnx.numpy_helper.to_array(weight) * np.float32(1 + 3 * WRONG)
            weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
    return after


def test_a_fold_that_is_written_wrong_does_not_pass_by_a_wrong_kernel(wrong_kernel):
    before = net()
    (sound,) = verification_links(Path("net.onnx"), Evaluated(before), Evaluated(net()))
    assert sound.verdict == "passed"
    wrong_kernel()
    (link,) = verification_links(Path("net.onnx"), Evaluated(before), Evaluated(written_wrong(before)))
    assert link.verdict == "failed"
    assert "the float64 evaluation of Tanh c is not what ONNX Runtime computes" in link.note


def test_a_wrong_kernel_raises_no_tolerance(wrong_kernel):
    onnx.save(net(), "net.onnx")
    usual = rc.fold("net.onnx", measure=False)
    assert usual.float64
    wrong_kernel()
    done = rc.fold("net.onnx", force=True, measure=False)
    assert (done.float64, done.tolerances["onnx"]) == ("", usual.tolerances["onnx"])
    assert "the float64 evaluation of Tanh c is not what ONNX Runtime computes" in done.tolerance_reasons["fold"]
    assert {link.verdict for link in rc.verify().links} == {"passed"}


def link_of(call: dict[str, np.ndarray], by: float, rounding: Rounding) -> Link:
    """An output that is wrong by that much, against what the float64 evaluator makes of the network."""
    model = Evaluated(onnx.load("net.onnx"))
    found = Comparison("stored", tolerance("stored"))
    found.add({"y": model.run(call)["y"] * np.float32(1 + by)}, model.truth(call), rounding=rounding)
    return found.links("stored", "float64")[0]


@pytest.mark.parametrize("batch", ["n", 4])
def test_outputs_that_a_wrong_kernel_explains_are_not_verified_and_others_fail(wrong_kernel, batch):
    onnx.save(net(batch), "net.onnx")
    rc.fold("net.onnx", measure=False)
    assert (
        link_of(images(), 0, network_rounding(source_model_of(Run(Path("repaconv-out/net"))), images())).verdict
        == "passed"
    )
    wrong_kernel()
    for rounding in (
        lambda: network_rounding(source_model_of(Run(Path("repaconv-out/net"))), images()),
        lambda: graph_rounding(Path("net.onnx"))(images()),
    ):
        for by in (0, -WRONG):
            link = link_of(images(), by, rounding())
            assert (link.verdict, link.reason) == ("not verified", "not_comparable"), link.note
            assert "Tanh c" in link.figures.detail
            assert link.metrics is None
        assert link_of(images(), 1.0, rounding()).reason == "exceeds_tolerance"


def test_two_models_do_not_agree_by_a_wrong_kernel(wrong_kernel):
    onnx.save(net(), "net.onnx")
    onnx.save(written_wrong(net()), "other.onnx")
    wrong_kernel()
    found = rc.compare("net.onnx", "other.onnx")
    assert [link.verdict for link in found.links] == ["not verified"]


def test_every_piece_of_a_fixed_batch_is_asked(wrong_kernel):
    inputs = Evaluated(net(2)).inputs
    assert GraphForm(net(2), inputs, batch=2, double=True).float64_doubt(images(3)) == ""
    wrong_kernel()
    assert "Tanh c" in GraphForm(net(2), inputs, batch=2, double=True).float64_doubt(images(3))
    assert GraphForm(net(2), inputs, batch=2).float64_doubt(images(3)) == ""  # runs in float32


def test_a_wrong_operator_is_found_wherever_it_is(wrong_kernel):
    """Behind as many nodes as are compared at once, with the input from before; and amplified by nothing."""
    steps = [("Abs", f"a{at}", f"a{at + 1}") for at in range(NODES_AT_ONCE + 3)]
    last = f"a{NODES_AT_ONCE + 3}"
    rows = [("Conv", "x w", "a0"), *steps, ("Tanh", last, "t"), ("Add", "t a0", "y")]
    assert doubt(net(2, rows)) == ""
    wrong_kernel()
    assert doubt(net(2, rows)) == "the float64 evaluation of Tanh t is not what ONNX Runtime computes"


# --- a right one is not doubted


@pytest.mark.parametrize("by", [1e-30, 1e-4, np.inf])
def test_a_wrong_move_of_numbers_is_found(by, monkeypatch):
    """One that gives other numbers, and one that fails on float32, which float64 decides."""
    right = float64_graphs.own_operators

    class Transpose(OpRun):
        def _run(self, x, perm=None):
            if np.isinf(by) and x.dtype == np.float32:
                raise TypeError(x.dtype)
            moved = np.transpose(x, perm)
            return (moved if np.isinf(by) else moved + by * (moved > 0),)

    rows = [("Conv", "x w", "a", {"pads": [1] * 4}), ("Transpose", "a", "b", {"perm": [0, 1, 3, 2]}),
            ("Conv", "b w", "y")]  # fmt: skip
    assert not doubt(net(rows=rows))
    monkeypatch.setattr(float64_graphs, "own_operators", lambda: [*right(), Transpose])
    assert ("Transpose b" in doubt(net(rows=rows))) == (by == 1e-4)


@pytest.mark.parametrize("name", NETS)
def test_networks_of_all_kinds_are_not_doubted(name):
    assert doubt(NETS[name].model()) == ""


SATURATED = [
    ("Conv", "x w", "a"),
    ("Mul", "a large", "b"),
    ("Exp", "b", "c"),
    ("Add", "c one", "d"),
    ("Div", "b d", "y"),
]
ALMOST_EQUAL = [
    ("Conv", "x w", "a"), ("Mul", "a little", "b"), ("Add", "b large", "c"),
    ("ReduceMean", "c", "m", {"keepdims": 1}), ("Sub", "c m", "d"), ("LayerNormalization", "d ones", "y"),
]  # fmt: skip
SIZED = [
    ("Conv", "x w", "a"), ("Shape", "a", "s"), ("Cast", "s", "f", {"to": 1}), ("Div", "f f", "o"), ("Mul", "o by", "r"),
    ("Resize", "a none r", "y", {"mode": "linear"}),
]  # fmt: skip


def branch(name: str) -> onnx.GraphProto:
    """A subgraph that reads a value of the graph around it."""
    return helper.make_graph(
        [helper.make_node(name, ["a"], ["z"])], name, [], [helper.make_tensor_value_info("z", F, None)]
    )


CONTROLLED = [
    ("Conv", "x w", "a"), ("ReduceMax", "a", "m", {"keepdims": 0}), ("Greater", "m one", "c"),
    ("If", "c", "y", {"then_branch": branch("Relu"), "else_branch": branch("Erf")}),
]  # fmt: skip
LISTED = [
    ("Conv", "x w", "a"),
    ("SplitToSequence", "a", "s", {"axis": 1}),
    ("ConcatFromSequence", "s", "y", {"axis": 1}),
]


@pytest.mark.parametrize("rows", [SATURATED, ALMOST_EQUAL, SIZED, CONTROLLED, LISTED])
def test_rounding_ranges_sizes_control_flow_and_sequences_are_no_difference(rows):
    constants = {"large": np.array(300.0), "one": np.array(1.0), "little": np.array(1e-3), "ones": np.ones(6)}
    weights = {"w": KERNEL, "none": np.zeros(0), "by": np.array([1.0, 1.0, 2.0, 1.7]), **constants}
    assert doubt(Net(rows, weights, {"x": (F, (2, 4, 8, 8))}, {"y": F}).model()) == ""


def test_large_numbers_that_cancel_are_rounding():
    assert doubt(ill_conditioned()) == ""


# --- in pieces, and quickly

CHAIN = [("Abs", f"a{at}", f"a{at + 1}") for at in range(NODES_AT_ONCE)]
ACROSS = {
    "a sequence": [("SplitToSequence", "a", "s", {"axis": 1}), *CHAIN, ("ConcatFromSequence", "s", "b", {"axis": 1})],
    "what a subgraph reads": [
        ("ReduceMax", "a", "m", {"keepdims": 0}), ("Greater", "m one", "c"), *CHAIN,
        ("If", "c", "b", {"then_branch": branch("Relu"), "else_branch": branch("Erf")}),
    ],
    "a constant": [
        ("Constant", "", "k", {"value_floats": [1.0, 1.0, 2.0, 2.0]}), *CHAIN,
        ("Resize", "a none k", "r", {"mode": "nearest"}), ("ReduceMean", "r", "b", {"keepdims": 1}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("between", ACROSS)
def test_values_that_are_read_much_later_are_those_of_the_graph(between, wrong_kernel):
    rows = [("Conv", "x w", "a"), ("Abs", "a", "a0"), *ACROSS[between], ("Tanh", "b", "t")]
    weights = {"w": KERNEL, "one": np.array(1.0), "none": np.zeros(0)}
    model = Net([*rows, ("Add", f"t a{NODES_AT_ONCE}", "y")], weights, {"x": (F, (2, 4, 8, 8))}, {"y": F}).model()
    assert doubt(model) == ""
    wrong_kernel()
    assert doubt(model) == "the float64 evaluation of Tanh t is not what ONNX Runtime computes"


def test_every_node_is_computed_once_per_inference(monkeypatch):
    computed, opened = [], float64_evaluator_check.load_onnx

    def counting(model, **options):
        session = opened(model, **options)
        run = session.run
        session.run = lambda feeds: computed.extend(node.output[0] for node in model.graph.node) or run(feeds)
        return session

    monkeypatch.setattr(float64_evaluator_check, "load_onnx", counting)
    model = net(2, [("Conv", "x w", "a0"), *CHAIN, ("Abs", f"a{NODES_AT_ONCE}", "b"), ("Add", "a0 b", "y")])
    calls = [images(2, seed) for seed in range(3)]
    assert differing_operators(model, Evaluated(model).float64, *calls) == ""
    assert sorted(computed) == sorted(3 * [node.output[0] for node in model.graph.node])


REPEATED = [
    ("Conv", "x w", "a", {"pads": [1] * 4}), ("Tanh", "a", "b"), ("Conv", "b w", "c", {"pads": [1] * 4}),
    ("Tanh", "c", "d"), ("Mul", "d large", "e"), ("Tanh", "e", "f"), ("Conv", "f w", "y"),
]  # fmt: skip


def test_of_equal_operators_on_values_of_one_range_one_represents_all(monkeypatch):
    compared = []
    right = float64_evaluator_check._agrees
    monkeypatch.setattr(
        float64_evaluator_check, "_agrees", lambda node, *given: compared.append(node.output[0]) or right(node, *given)
    )
    weights = {"w": 0.1 * KERNEL, "large": np.array(1e4)}
    assert not doubt(Net(REPEATED, weights, {"x": (F, (2, 4, 8, 8))}, {"y": F}).model())
    first = compared[: compared.index("y") + 1]  # the last convolution has another shape
    assert first == ["a", "b", "e", "f", "y"]  # c is like a, d is like b, and f reads far larger numbers than both


def test_of_equal_moves_one_is_compared_and_of_moves_to_other_places_all(monkeypatch):
    compared = []
    right = float64_evaluator_check._gives
    monkeypatch.setattr(
        float64_evaluator_check, "_gives", lambda node, *given: compared.append(node.output[0]) or right(node, *given)
    )
    turn, other = {"perm": [0, 1, 3, 2]}, {"perm": [0, 2, 3, 1]}
    rows = [
        ("Conv", "x w", "a"), ("Transpose", "a", "b", turn), ("Neg", "b", "c"), ("Transpose", "c", "d", turn),
        ("Transpose", "d", "e", other), ("Gather", "d first", "f"), ("Gather", "d second", "g"),
        ("Gather", "d all", "h"), ("Gather", "d all", "i"),
    ]  # fmt: skip
    weights = {"w": KERNEL, "first": np.array([0]), "second": np.array([1]), "all": np.zeros(20, np.int64)}
    outputs = dict.fromkeys("efghi", F)
    model = Net(rows, weights, {"x": (F, (2, 4, 8, 8))}, outputs).model()
    graph = Evaluated(model)
    assert not differing_operators(model, graph.float64, images(2), images(2, seed=1))
    assert [name for name in compared if name in "bdefg"] == [*"befg"]  # d is like b
    assert sorted(name for name in compared if name in "hi") == [*"hhii"]  # of many indices, numbers decide


@pytest.mark.parametrize("range_of", [lambda x: x.max() > 100, lambda x: x.max() < 0])
def test_an_operator_that_is_wrong_for_some_values_alone_is_found_after_a_right_one(range_of, monkeypatch):
    right = float64_graphs.own_operators

    class Tanh(OpRun):
        def _run(self, x):
            return (np.tanh(x) * (1 + WRONG * range_of(x)),)

    monkeypatch.setattr(float64_graphs, "own_operators", lambda: [*right(), Tanh])
    rows = [
        ("Conv", "x w", "in"), ("Tanh", "in", "a"), ("Mul", "a large", "b"), ("Tanh", "b", "c"), ("Sub", "a two", "d"),
        ("Tanh", "d", "y"),
    ]  # fmt: skip
    weights = {"w": KERNEL, "large": np.array(1e4), "two": np.array(2.0)}
    model = Net(rows, weights, {"x": (F, (2, 4, 8, 8))}, {"c": F, "y": F}).model()
    assert "the float64 evaluation of Tanh" in doubt(model)


@pytest.mark.parametrize("last", [("Elu", "in", "b", {"alpha": 2.0}), ("Clip", "in zero two", "b")])
def test_operators_that_differ_in_an_attribute_or_a_small_input_are_all_compared(last, monkeypatch):
    right = float64_graphs.own_operators

    class Elu(OpRun):
        def _run(self, x, alpha=None):
            return (np.where(x < 0, alpha * np.expm1(x), x) * (1 + WRONG * (alpha > 1)),)

    class Clip(OpRun):
        def _run(self, x, least, most):
            return (np.clip(x, least, most) * (1 + WRONG * (most > 1)),)

    monkeypatch.setattr(float64_graphs, "own_operators", lambda: [*right(), Elu, Clip])
    rows = [("Conv", "x w", "in"), ("Elu", "in", "a", {"alpha": 1.0}), ("Clip", "in zero one", "c"), last]
    weights = {"w": KERNEL, "zero": np.array(0.0), "one": np.array(1.0), "two": np.array(2.0)}
    model = Net([*rows, ("Sum", "a b c", "y")], weights, {"x": (F, (2, 4, 8, 8))}, {"y": F}).model()
    assert f"the float64 evaluation of {last[0]} b is not" in doubt(model)


def test_threads_of_a_verification_do_not_compute_while_they_wait():
    entry = "session.intra_op.allow_spinning"
    assert settings_for(SessionSpec(threads=2, lean=True)).get_session_config_entry(entry) == "0"
    with pytest.raises(RuntimeError):  # unset, so that what is measured is ONNX Runtime's default
        settings_for(SessionSpec(threads=2)).get_session_config_entry(entry)


def test_sessions_of_a_verification_have_no_pool_of_memory_of_their_own():
    assert not settings_for(SessionSpec(lean=True)).enable_cpu_mem_arena
    assert settings_for(SessionSpec()).enable_cpu_mem_arena


def test_what_is_quickly_within_the_tolerance_is_so_in_the_comparison():
    random = np.random.default_rng(0)
    quick = 0
    for at in range(600):
        shape = tuple(random.integers(1, 6, at % 4))
        scale = 10.0 ** random.integers(-6, 6) * 10.0 ** random.integers(-4, 1, shape)
        right = np.asarray(random.standard_normal(shape) * scale, np.float32)
        off = random.standard_normal(shape) * 10.0 ** random.integers(-7, -3) * np.abs(right).max()
        found = np.asarray(right + off * random.random(shape) ** 8, np.float32)
        if at % 7 == 0 and found.size:
            found.flat[0] = (np.nan, np.inf, right.flat[0])[at % 3]
        compared = Comparison("", Tolerance(kind="exact", rtol=1e-5), None, scale=PerNeighborhood, vague=np.inf)
        compared.add({"y": found.astype(np.float64)}, {"y": right.astype(np.float64)})
        within = compared.links("", "")[0].verdict != "failed"
        assert surely_within(found, right, 1e-5, 0.0) in (within, False)
        assert surely_within(found, right.astype(np.float64), 1e-5, 0.0) == surely_within(found, right, 1e-5, 0.0)
        quick += surely_within(found, right, 1e-5, 0.0) == within
    assert quick > 590  # and it is of use: almost always it answers


def test_one_number_beyond_the_tolerance_is_found_wherever_it_is():
    right = np.ones((3, NUMBERS_IN_CACHE))  # compared in three parts
    for at in (0, NUMBERS_IN_CACHE - 1, NUMBERS_IN_CACHE, right.size - 1):
        found = right.astype(np.float32)
        assert surely_within(found, right, 1e-5, 0.0)
        found.flat[at] += 1e-3
        assert not surely_within(found, right, 1e-5, 0.0)
    right.flat[NUMBERS_IN_CACHE], found.flat[NUMBERS_IN_CACHE] = 1e39, np.inf  # in float32 both are infinite
    assert not surely_within(found, right, 1e-5, 0.0)


def test_numbers_next_to_one_that_a_mask_hides_are_not_quickly_equal():
    low = np.finfo(np.float32).min
    masked = np.array([[low, 1], [1, low]], np.float32)
    assert not surely_within(masked + np.array([[0, 0.5], [0, 0]], np.float32), masked, 1e-5, 0.0)


def test_integers_types_and_shapes_are_not_quickly_equal_if_they_differ():
    one = np.arange(4)
    assert surely_within(one, one.copy(), 1e-5, 0.0)
    for other in (one + 1, one.astype(np.int32), one[:3]):
        assert not surely_within(other, one, 1e-5, 0.0)


def test_of_an_input_that_agreed_it_is_not_asked_again(monkeypatch):
    model = net(2)
    evaluator, (one, other) = Evaluated(model).float64, (images(2, seed) for seed in range(2))
    assert differing_operators(model, evaluator, one) == ""

    def refuses(*given):
        raise RuntimeError("asked")

    monkeypatch.setattr(float64_evaluator_check, "_RuntimeValues", refuses)
    assert differing_operators(model, evaluator, one) == ""
    with pytest.raises(RuntimeError, match="asked"):
        differing_operators(model, evaluator, one, other)


def test_an_input_that_differs_is_asked_again(wrong_kernel):
    wrong_kernel()
    model = net(2)
    evaluator = Evaluated(model).float64
    for _ in range(2):
        assert "Tanh" in differing_operators(model, evaluator, images(2))


def test_a_number_that_three_random_samples_do_not_move_is_rounding():
    """Every number of a class vector is compared alone. Three draws made the Gemm look wrong for this input, of 700."""
    random = np.random.default_rng(1)
    weights = {"w": random.standard_normal((512, 512)) / 30, "b": 0.1 * random.standard_normal(512)}
    rows = [("Flatten", "x", "f"), ("Gemm", "f w b", "y"), ("Conv", "x k", "z")]
    kernel = {"k": random.standard_normal((2, 2, 1, 1))}
    model = Net(rows, weights | kernel, {"x": (F, ("n", 2, 16, 16))}, {"y": F, "z": F}).model()
    evaluator = Evaluated(model).float64
    assert evaluator.reference is not None
    image = np.random.default_rng(279).standard_normal((1, 2, 16, 16)).astype(np.float32)
    assert differing_operators(model, evaluator, {"x": image}) == ""


def test_a_transposed_convolution_without_pads_adds_each_group_its_own_bias():
    """With auto_pad VALID, onnx's own evaluator adds the first bias to all groups."""
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((2, 1, 2)), "b": np.array([1.0, 5.0])}
    x, found = random.standard_normal((1, 2, 3)), []
    for pads in ({"auto_pad": "VALID"}, {"pads": [0, 0]}):
        how = {"kernel_shape": [2], "strides": [2], "group": 2, **pads}
        graph = onnx.helper.make_graph(
            [onnx.helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], **how)],
            "net",
            [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.DOUBLE, [1, 2, 3])],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.DOUBLE, [1, 2, 6])],
            [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
        )
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
        found.append(ReferenceEvaluation(model).run({"x": x})["y"])
    np.testing.assert_allclose(*found)


def test_outputs_without_a_right_digit_in_float32_are_verified_in_float64(tmp_path):
    """As of a text detector on images without text: 1 - sigmoid(16) is 1e-7, of which float32 has no digit."""
    random = np.random.default_rng(0)
    weights = {"k": random.standard_normal((4, 2, 3, 3)) / 3, "w": 1e-5 * random.standard_normal((1, 4, 1, 1))}
    weights |= {"far": np.full(1, 16.0), "one": np.array(1.0), "least": np.zeros(4), "most": np.ones(4)}
    rows = [("Conv", "x k", "c"), ("BatchNormalization", "c most least least most", "n"), ("Tanh", "n", "t")]
    rows += [("Conv", "t w far", "l"), ("Sigmoid", "l", "s"), ("Sub", "one s", "y")]
    onnx.save(Net(rows, weights, {"x": (F, ("n", 2, 16, 16))}, {"y": F}).model(), tmp_path / "net.onnx")
    done = rc.fold(tmp_path / "net.onnx", out=tmp_path / "out", measure=False)
    assert done.verdict == "passed"
    assert done.float64
    links = {link.name: link for link in rc.verify(tmp_path / "out").links}
    assert (links["fold"].verdict, links["fold"].metrics.max_rel_error < 1e-12) == ("passed", True)
    assert (links["stored"].verdict, links["stored"].reason) == ("not verified", "rounding_too_large")


@pytest.mark.parametrize(("kept", "opened"), [(2**27, 1), (0, 2)])
def test_a_session_without_fusions_is_opened_once_unless_the_graph_is_large(kept, opened, monkeypatch):
    monkeypatch.setattr(graph_with_cached_outputs, "KEPT_SESSION_BYTES", kept)
    sessions, right = [], graph_with_cached_outputs.load_onnx
    monkeypatch.setattr(
        graph_with_cached_outputs, "load_onnx", lambda *given, **how: sessions.append(how) or right(*given, **how)
    )
    graph = Evaluated(net())
    for seed in (0, 1):
        graph.as_written(images(seed=seed))
    assert sessions == [{"as_written": True}] * opened
    graph.close()
    graph.as_written(images())
    assert len(sessions) == opened + 1
