"""Verification of `fold model.onnx`: wrong folds fail, correct ones pass, and what was not compared does not pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import quick_where
from onnx import TensorProto, numpy_helper
from planted_graph_faults import FAULTS, NETS, F, Net, norm, normal, weight

import repaconv as rc
from repaconv.core.errors import GateFailed, Refused
from repaconv.core.files import read_artefact
from repaconv.graph import float64_rewriting
from repaconv.graph import models_in_onnx_ir as graphs
from repaconv.graph.element_type_conversion import retyped
from repaconv.results import GraphFold, Tolerance
from repaconv.rewrites.fold.linear_layer_composition import AFFINE
from repaconv.verification import graph_with_cached_outputs, rounding
from repaconv.verification.comparison import Comparison, PerNeighborhood, run_both
from repaconv.verification.graph_with_cached_outputs import Evaluated
from repaconv.verification.model_runners import load_onnx
from repaconv.verification.probe_inputs import probes
from repaconv.verification.random_graph_inputs import input_distributions
from repaconv.verification.rounding import jitter_rounding


def planted(monkeypatch, plant, fewer=(AFFINE,)) -> None:
    """Let the fold, also that in float64, start from another graph than the proof; by default by one rewrite alone,
    which is enough to change each."""
    right, right_in_float64 = graphs.rewritten, float64_rewriting.rewritten_in_float64

    def faulty(model):
        other = onnx.ModelProto()
        other.CopyFrom(model)
        del other.graph.value_info[:]
        for value in other.graph.output:
            value.type.tensor_type.ClearField("shape")
        plant(other)
        return onnx.shape_inference.infer_shapes(other)

    monkeypatch.setattr(graphs, "rewritten", lambda model, _, *layers: right(faulty(model), fewer, *layers))
    monkeypatch.setattr(
        float64_rewriting,
        "rewritten_in_float64",
        lambda model, _, *layers: right_in_float64(faulty(model), fewer, *layers),
    )


LARGE = ("encoder", "pixels", "rows")  # more faults than in all others


@pytest.mark.parametrize("net", quick_where(lambda net: net not in LARGE, NETS))
def test_every_wrong_fold_of_an_onnx_graph_fails(net, monkeypatch):
    onnx.save(NETS[net].model(), "net.onnx")
    sound = rc.fold("net.onnx", out="sound.onnx")
    assert sound.changes
    assert {link.verdict for link in sound.links} == {"passed"}, [link.note for link in sound.links]
    missed = []
    for fault in (fault for fault in FAULTS if fault.net == net):
        with monkeypatch.context() as patch:
            planted(patch, fault.plant)
            try:
                rc.fold("net.onnx", out="wrong.onnx")
            except GateFailed as error:
                missed += [fault.what] if error.code != "fold.not-equal" or Path("wrong.onnx").exists() else []
            else:
                missed.append(fault.what)
    assert not missed


# --- what is compared, and what is not --------------------------------------------------------------------------------


class End:
    """A function of one input as an end of a link."""

    def __init__(self, function) -> None:
        self.function = function

    def run(self, feeds):
        return self.function(feeds["x"])


def held(reference, candidate, *, x=None, rounded=(), **more):
    """The links of two functions over two probes."""
    random = np.random.default_rng(0)
    probes = [{"x": one} for one in (x if x is not None else random.standard_normal((2, 3, 4)).astype(np.float32))]
    allowed = Tolerance(kind="exact", rtol=1e-5)
    ends = [End(one) for one in (reference, candidate, *rounded)]
    found = Comparison("candidate", allowed, None, scale=PerNeighborhood, **more)
    how = (lambda feeds, right: jitter_rounding(ends[2:], feeds, right)) if rounded else (lambda feeds, right: None)
    return run_both(ends[0], ends[1], probes, found, how).links("onnx", "reference")


def nan_at(*places):
    return lambda x: {"y": np.where(np.isin(np.arange(x.size), places), np.nan, x.reshape(-1)).reshape(x.shape)}


def breaks(x):
    raise RuntimeError("no such size")


@pytest.mark.parametrize(
    ("reference", "candidate", "verdict", "reason"),
    [
        (lambda x: {"y": x}, lambda x: {"y": x * np.float32(1 + 1e-6)}, "passed", "within_tolerance"),
        (lambda x: {"y": x}, lambda x: {"y": x * np.float32(1 + 1e-4)}, "failed", "exceeds_tolerance"),
        (
            lambda x: {"y": x.mean()[None]},
            lambda x: {"y": x.mean()},
            "failed",
            "shape_or_type_differs",
        ),
        (lambda x: {"y": x.sum(1)}, lambda x: {"y": x.sum(1, keepdims=True)}, "failed", "shape_or_type_differs"),
        (lambda x: {"y": x}, lambda x: {"y": x.astype(np.float64)}, "failed", "shape_or_type_differs"),
        (lambda x: {"y": x > 0}, lambda x: {"y": (x > 0).astype(np.int64)}, "failed", "shape_or_type_differs"),
        (lambda x: {"y": x.argmax(1)}, lambda x: {"y": x.argmax(1)}, "passed", "within_tolerance"),
        (lambda x: {"y": x.argmax(1)}, lambda x: {"y": x.argmin(1)}, "failed", "discrete_values_differ"),
        (lambda x: {"y": x > 0}, lambda x: {"y": x > 0.2}, "failed", "discrete_values_differ"),
        (nan_at(1), nan_at(1), "passed", "within_tolerance"),
        (nan_at(1), nan_at(2), "failed", "exceeds_tolerance"),
        (lambda x: {"y": x}, nan_at(0), "failed", "exceeds_tolerance"),
        (lambda x: {"y": x / 0}, lambda x: {"y": -x / 0}, "failed", "exceeds_tolerance"),
        (lambda x: {"y": x}, lambda x: {}, "failed", "shape_or_type_differs"),
        (lambda x: {}, lambda x: {"y": x}, "failed", "shape_or_type_differs"),
        (lambda x: {"y": x}, breaks, "failed", "does_not_run"),
        (lambda x: {"y": x.astype(str)}, lambda x: {"y": x.astype(str)}, "not verified", "not_comparable"),
        (lambda x: {"y": [x]}, lambda x: {"y": [x]}, "not verified", "not_comparable"),
        (lambda x: {"y": {"a": x}}, lambda x: {"y": {"a": x}}, "not verified", "not_comparable"),
        (lambda x: {"y": x[:0]}, lambda x: {"y": x[:0]}, "not verified", "not_comparable"),
        (lambda x: {"y": 0 * x}, lambda x: {"y": 0 * x}, "not verified", "constant_output"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_every_output_in_number_shape_type_and_value(reference, candidate, verdict, reason):
    (link,) = held(reference, candidate)
    assert (link.verdict, link.reason) == (verdict, reason), link.note


def test_what_hangs_on_no_input_need_not_move():
    same = (lambda x: {"y": np.ones(3, np.float32)}, lambda x: {"y": np.ones(3, np.float32)})
    assert held(*same, fixed={"y"})[0].verdict == "passed"
    assert held(same[0], lambda x: {"y": np.zeros(3, np.float32)}, fixed={"y"})[0].verdict == "failed"


def test_small_channels_next_to_large_ones_are_compared_at_their_own_size():
    size = np.array([1e4, 1, 1, 1e-3], np.float32)
    off = size * np.array([0, 0, 0, 1e-3], np.float32)  # 1e-10 of the largest
    (link,) = held(lambda x: {"y": x * size}, lambda x: {"y": x * (size + off)})
    assert link.verdict == "failed"


def test_a_class_that_hangs_on_a_rounding_is_counted_and_another_fails():
    x = np.random.default_rng(0).standard_normal((2, 9, 4)).astype(np.float32)
    x[:, 3, :2] = 7  # a tie

    def chosen(*flips, by=0.0):
        def run(x):
            found = (x + by * np.arange(4, dtype=np.float32)).argmax(1)
            found[list(flips)] = (found[list(flips)] + 1) % 4
            return {"y": found}

        return run

    rounded = (chosen(by=1e-6), chosen(by=-1e-6))
    (link,) = held(chosen(), chosen(3), x=x, rounded=rounded)
    assert (link.verdict, link.metrics.undecided) == ("passed", 2)
    assert (link.figures.left_out, link.figures.compared) == (2, 18)
    assert "2 of 18 numbers (11%) depend on rounding and were left out" in link.note
    assert held(chosen(), chosen(3), x=x)[0].verdict == "failed"  # where nothing says that it is rounding
    assert held(chosen(), chosen(3, 5), x=x, rounded=rounded)[0].verdict == "failed"


@pytest.mark.parametrize(("ties", "verdict"), [(6, "passed"), (7, "not verified"), (10, "not verified")])
def test_an_output_of_which_most_was_left_out_is_not_verified(ties, verdict):
    """Also where on another input nothing hangs on a rounding: most of what the output gives was not compared."""
    many, few = (np.eye(4, dtype=np.float32)[np.arange(count) % 4] for count in (10, 2))
    many[:ties] = 0.5

    def chosen(by=0.0):
        return lambda x: {"y": (x + by * np.arange(4, dtype=np.float32)).argmax(1)}

    (link,) = held(chosen(), chosen(1e-6), x=[many, few], rounded=(chosen(1e-6), chosen(-1e-6)))
    assert link.verdict == verdict
    assert (link.figures.left_out, link.figures.compared) == (ties, 12)
    (link,) = held(chosen(), chosen(1e-6), x=[few], rounded=(chosen(1e-6),))
    assert link.figures.left_out is None


def test_an_ill_conditioned_output_is_held_to_what_rounding_does_to_it():
    far = np.float32(3e3)
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    rounded = [lambda x, by=by: {"y": ((x + far) * np.float32(1 + by)) - far} for by in (4e-7, -4e-7)]
    (link,) = held(lambda x: {"y": (x + far) - far}, lambda x: {"y": x}, x=x, rounded=rounded)
    assert link.verdict == "passed"
    assert link.tolerance.rtol == link.metrics.max_rel_error  # what it was allowed is told
    assert link.reason == "explained_by_rounding"
    assert link.tolerance.rtol > 1e-5
    assert held(lambda x: {"y": (x + far) - far}, lambda x: {"y": x}, x=x)[0].verdict == "failed"
    assert (
        held(lambda x: {"y": (x + far) - far}, lambda x: {"y": x * 1.01}, x=x, rounded=rounded)[0].verdict == "failed"
    )
    wild = [lambda x, by=by: {"y": x * np.float32(1 + by)} for by in (0.5, -0.5)]
    (link,) = held(lambda x: {"y": x}, lambda x: {"y": np.float32(1.1) * x}, x=x, rounded=wild)
    assert (link.verdict, link.reason) == ("not verified", "rounding_too_large")


# --- what it is run on ------------------------------------------------------------------------------------------------


def net_of(rows, weights, inputs, outputs) -> onnx.ModelProto:
    return Net(rows, weights, inputs, outputs).model()


def test_dynamic_dimensions_are_above_one_unequal_and_reported():
    onnx.save(NETS["cross"].model(), "net.onnx")
    note = rc.fold("net.onnx").links[0].note
    assert "dynamic sizes: n 1, 2, 3; targets 5, 7, 12; sources 5, 12, 16" in note


def test_similarities_of_all_images_of_a_batch_are_compared_at_all_batch_sizes():
    rows = [
        ("Conv", "x w", "a", {}), ("Mul", "a s", "b", {}), ("Flatten", "b", "c", {}),
        ("Transpose", "c", "d", {"perm": [1, 0]}), ("MatMul", "c d", "y", {}),
    ]  # fmt: skip
    net = net_of(rows, {"w": normal(4, 3, 3, 3), "s": normal(4, 1, 1)}, {"x": (F, ("N", 3, 8, 8))}, {"y": F})
    onnx.save(net, "net.onnx")
    done = rc.fold("net.onnx", measure=False)
    assert done.applied
    assert done.scores is None
    assert all(link.verdict == "passed" for link in done.links)


def test_a_graph_that_runs_at_one_size_alone_is_reported():
    weights = {"w": normal(4, 4), "v": normal(4, 4), "positions": normal(1, 16, 4)}
    rows = [("MatMul", "x w", "1"), ("MatMul", "1 v", "2"), ("Add", "2 positions", "y")]
    onnx.save(net_of(rows, weights, {"x": (F, ("n", "length", 4))}, {"y": F}), "net.onnx")
    (link,) = rc.fold("net.onnx").links
    assert link.verdict == "passed"
    assert "dynamic sizes: n " in link.note
    assert "runs at one size alone: length 16" in link.note


def test_sizes_of_the_metadata_are_tried():
    weights = {"w": normal(4, 4), "v": normal(4, 4), "positions": normal(1, 333, 4)}
    rows = [("MatMul", "x w", "1"), ("MatMul", "1 v", "2"), ("Add", "2 positions", "y")]
    model = net_of(rows, weights, {"x": (F, ("n", "length", 4))}, {"y": F})
    onnx.helper.set_model_props(model, {"max_length": "333"})
    onnx.save(model, "net.onnx")
    assert "runs at one size alone: length 333" in rc.fold("net.onnx").links[0].note


def test_a_recurrent_layers_state_has_the_batch_of_what_it_reads():
    rows = [
        ("Mul", "x rate", "0"),
        ("MatMul", "0 w", "1"),
        ("Transpose", "1", "2", {"perm": [1, 0, 2]}),
        ("Concat", "state 2", "y", {"axis": 0}),
    ]
    weights = {"w": normal(4, 3)}
    inputs = {"x": (F, (None, None, 4)), "state": (F, (1, None, 3)), "rate": (F, ())}
    onnx.save(net_of(rows, weights, inputs, {"y": F}), "net.onnx")
    sizes = rc.fold("net.onnx").sizes.other
    assert sizes["x[0]"] == sizes["state[1]"] > 1
    assert rc.export("repaconv-out/net", onnx="out.onnx").verdict == "passed"


def random_inputs_of(net: str) -> dict[str, np.ndarray]:
    model = NETS[net].model()
    session, names = (
        onnxruntime.InferenceSession(model.SerializeToString()),
        [value.name for value in model.graph.output],
    )
    feeds = probes(model, lambda feeds: dict(zip(names, session.run(None, feeds), strict=True))).feeds
    return {name: np.concatenate([one[name].reshape(-1) for one in feeds]) for name in feeds[0]}


def test_inputs_are_what_the_first_operators_expect():
    encoder = random_inputs_of("encoder")
    assert set(encoder["ids"]) == set(range(23))  # the whole table
    assert set(encoder["attention_mask"]) == {0, 1}
    assert (random_inputs_of("pixels")["image"].min(), random_inputs_of("pixels")["image"].max()) == (0, 255)
    far = random_inputs_of("far")["x"]
    assert abs(far.mean() - 1000) < 100


@pytest.mark.parametrize(
    ("rows", "low", "high"),
    [
        ([("Div", "x c", "1"), ("Sub", "1 half", "2"), ("Div", "2 quarter", "y")], -200.0, 450.0),
        ([("Div", "x c", "y")], 0.0, 255.0),
        ([("Log", "x", "y")], 0.0, 4.0),
        ([("Clip", "x half c", "y")], 0.5, 255.0),
        ([("Transpose", "x", "1", {"perm": [0, 1]}), ("Sqrt", "1", "y")], 0.0, 4.0),
    ],
)
def test_the_range_of_an_input_is_read(rows, low, high):
    weights = {"c": np.array(255.0), "half": np.array(0.5), "quarter": np.array(0.25)}
    distribution = input_distributions(net_of(rows, weights, {"x": (F, ("n", 4))}, {"y": F}))["x"]
    found = distribution((500, 4), np.dtype(np.float32), np.random.default_rng(0), gain=1.0, below=2)
    assert low <= found.min() < low + 0.4 * (high - low)
    assert high >= found.max() > high - 0.4 * (high - low)


# --- the verdict of a fold --------------------------------------------------------------------------------------------

TWO = [("MatMul", "x w", "1"), ("MatMul", "1 v", "z")]
WEIGHTS = {"w": normal(4, 4), "v": normal(4, 4)}
GIVEN = {"x": (F, ("n", 4))}


def test_a_graph_of_which_nothing_could_be_compared_is_refused(repaconv):
    rows = [*TWO, ("Add", "z low", "2"), ("Relu", "2", "y")]
    onnx.save(net_of(rows, WEIGHTS | {"low": np.array(-1e9)}, GIVEN, {"y": F}), "dead.onnx")
    code, _, err = repaconv("fold", "dead.onnx")
    assert code == 4
    assert "fold.not-verified" in err
    assert "changes too little between the inputs" in err
    assert "--inputs FILE.npz" in err
    assert not Path("repaconv-out").exists()


def test_a_fold_of_which_nothing_could_be_compared_is_written_with_force_as_not_verified(repaconv):
    """Numbers of an empty batch, of a norm over one channel, and beside an infinite constant; also of an old opset."""
    wide = [*TWO, ("Mul", "z g", "y")]
    infinite = [*TWO, ("Add", "z g", "y")]
    norm = [*TWO, ("ReduceMean", "z", "m", {"axes": [1]}), ("Sub", "z m", "c"), ("Add", "c g", "y")]
    one = {"w": normal(4, 4), "v": normal(4, 1)}
    for number, (rows, weights, opset) in enumerate(
        [
            (wide, WEIGHTS | {"g": normal(4)}, 17),
            (infinite, WEIGHTS | {"g": np.full(4, -np.inf)}, 17),
            (norm, one | {"g": normal(1)}, 17),
            (norm, one | {"g": normal(1)}, 12),
        ]
    ):
        given = {"x": (F, (0 if rows is wide else 3, 4))}
        model = net_of(rows, weights, given, {"y": F})
        model.opset_import[0].version = opset
        onnx.save(model, "open.onnx")
        out = f"run{number}"
        code, _, err = repaconv("fold", "open.onnx", "-o", out)
        assert (code, "fold.not-verified" in err, "--force" in err, Path(out).exists()) == (4, True, True, False)
        code, said, _ = repaconv("fold", "open.onnx", "-o", out, "--force")
        assert code == 5
        assert "overridden: fold not verified" in said
        found = read_artefact(Path(out, "fold.json"), GraphFold)
        assert found.changes
        assert (found.verdict, found.unverified) == ("not verified", ("fold not verified",))
        assert found.options[-1] == "--force"
        assert rc.verify(out).unverified == rc.export(out).unverified == found.unverified
    with pytest.raises(Refused, match="no output"):  # a run's own folder is no permission
        rc.fold("open.onnx", out="run3", force=True, overrule=False)


def test_a_graph_that_is_dead_for_random_numbers_is_folded_on_inputs_that_are_given(repaconv):
    """As HVI-CIDNet is, which computes logarithms of pixels from 0 to 1."""
    rows = [*TWO, ("Add", "z low", "2"), ("Relu", "2", "y")]
    onnx.save(net_of(rows, WEIGHTS | {"low": np.array(-1e9)}, GIVEN, {"y": F}), "dead.onnx")
    np.savez("alive.npz", x=1e10 * np.float32(normal(3, 4)))
    code, out, _ = repaconv("fold", "dead.onnx", "--inputs", "alive.npz")
    assert code == 0
    assert "passed" in out


@pytest.mark.parametrize("hidden", [-np.inf, np.finfo(np.float32).min])
@pytest.mark.parametrize("plant", [None, weight("w", lambda w: 1.01 * w)])
def test_numbers_next_to_those_that_a_mask_hides_are_compared_on_several_probes(plant, hidden, monkeypatch):
    rows = [*TWO, ("Where", "mask z hidden", "y")]
    mask = {"mask": np.array([True, True, False, True]), "hidden": np.array(hidden)}
    onnx.save(net_of(rows, WEIGHTS | mask, {"x": (F, (1, 4))}, {"y": F}), "net.onnx")
    if plant is None:
        assert [link.verdict for link in rc.fold("net.onnx").links] == ["passed"]
        assert rc.verify("repaconv-out/net").verdict == "passed"
        assert rc.export("repaconv-out/net", onnx="out.onnx").verdict == "passed"
    else:
        planted(monkeypatch, plant)
        assert refused("net.onnx")


def test_what_overflows_at_usual_numbers_is_still_proved_on_smaller_ones():
    rows = [*TWO, ("Mul", "z far", "2"), ("Mul", "2 2", "y")]
    onnx.save(net_of(rows, WEIGHTS | {"far": np.array(2e19)}, {"x": (F, (1, 4))}, {"y": F}), "net.onnx")
    assert rc.fold("net.onnx").links[0].verdict == "passed"


def test_a_class_that_seldom_changes_is_proved_on_inputs_that_change_it(monkeypatch):
    rows = [*BIASED, ("ArgMax", "y", "class", {"axis": 1, "keepdims": 0})]
    high = {"b": np.array([300.0, 0, 0, 0]), "v": np.eye(4)}
    onnx.save(net_of(rows, WEIGHTS | high, GIVEN, {"class": TensorProto.INT64}), "net.onnx")
    assert rc.fold("net.onnx").links[0].verdict == "passed"
    with monkeypatch.context() as patch:
        planted(patch, weight("w", lambda w: -w))
        assert refused("net.onnx")
    never = high | {"b": np.array([1e30, 0, 0, 0])}
    onnx.save(net_of(rows, WEIGHTS | never, GIVEN, {"class": TensorProto.INT64}), "net.onnx")
    with pytest.raises(Refused, match="changes too little between the inputs"):
        rc.fold("net.onnx", force=True, overrule=False)


def test_strings_and_sequences_are_not_verified_by_name():
    rows = [*TWO, ("Cast", "z", "words", {"to": TensorProto.STRING}), ("SequenceConstruct", "z x", "list")]
    model = net_of(rows, WEIGHTS, GIVEN, {"z": F, "words": TensorProto.STRING})
    item = onnx.helper.make_tensor_type_proto(F, None)
    model.graph.output.append(onnx.helper.make_value_info("list", onnx.helper.make_sequence_type_proto(item)))
    onnx.save(model, "net.onnx")
    done = rc.fold("net.onnx")
    assert done.verdict == "passed"
    assert [link.verdict for link in done.links] == ["passed", "not verified", "not verified"]
    assert [link.candidate.split()[-1] for link in done.links] == ["z", "words", "list"]


def test_a_sequence_between_operators_is_no_reason_to_refuse():
    rows = [*TWO, ("SequenceConstruct", "z x", "list"), ("ConcatFromSequence", "list", "y", {"axis": 0})]
    onnx.save(net_of(rows, WEIGHTS, GIVEN, {"y": F}), "net.onnx")
    done = rc.fold("net.onnx")
    assert (done.verdict, [link.verdict for link in done.links]) == ("passed", ["passed"])
    assert done.changes


BIASED = [("MatMul", "x w", "1"), ("Add", "1 b", "2"), ("MatMul", "2 v", "y")]


def refused(path: str) -> bool:
    try:
        rc.fold(path, force=True)
    except GateFailed as error:
        return error.code == "fold.not-equal"
    return False


@pytest.mark.parametrize(("kind", "off"), [("float16", 2e-3), ("bfloat16", 0.03)])
def test_half_precision_is_allowed_what_its_own_rounding_explains(kind, off, monkeypatch):
    half = TensorProto.FLOAT16 if kind == "float16" else TensorProto.BFLOAT16
    random = np.random.default_rng(0)  # numbers of its own: whether rounding exceeds the tolerance depends on them
    weights = {"w": random.standard_normal((4, 4)) / 2, "v": random.standard_normal((4, 4)) / 2}
    model = net_of(BIASED, weights | {"b": 0.2 * random.standard_normal(4)}, GIVEN, {"y": F})
    onnx.save(retyped(model, {F: half}), "half.onnx")
    exact, *as_stored = rc.fold("half.onnx").links
    assert (exact.name, exact.verdict) == ("onnx", "passed")
    assert exact.reason == "explained_by_rounding"
    assert [link.name for link in as_stored] == (["fp16"] if kind == "float16" else [])  # ONNX Runtime lacks the other
    assert {w.data_type for w in onnx.load("repaconv-out/half/half.folded.onnx").graph.initializer} == {half}
    planted(monkeypatch, weight("b", lambda b: b + np.asarray(off, b.dtype)))
    assert refused("half.onnx")


def test_a_float16_constant_in_a_float32_graph_raises_no_tolerance(monkeypatch):
    model = net_of(BIASED, WEIGHTS | {"b": 0.2 * normal(4)}, GIVEN, {"y": F})
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float16), "z"))
    onnx.save(model, "net.onnx")
    assert rc.fold("net.onnx").links[0].reason == "within_tolerance"
    planted(monkeypatch, weight("b", lambda b: b * np.float32(1 + 1e-4)))
    assert refused("net.onnx")


# --- what is left -----------------------------------------------------------------------------------------------------


def image_net(rows, **weights) -> str:
    onnx.save(net_of(rows, weights, {"x": (F, ("n", 4, 8, 8))}, {"y": F}), "net.onnx")
    return " | ".join(rc.fold("net.onnx").not_folded)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (
            [("AveragePool", "x", "a", {"kernel_shape": [5, 5], "pads": [2] * 4}),
             ("BatchNormalization", "x nw nb nm nv", "c"),
             ("Conv", "x five", "b", {"group": 4, "pads": [2] * 4}), ("Add", "a b", "d"), ("Add", "d c", "y")],
            "with the same input, since an average that does not count its padding is no convolution at the border: "
            "Conv_3 next to a",
        ),
        (
            [("BatchNormalization", "x nw nb nm nv", "a"), ("Conv", "a wide", "y", {"pads": [1] * 4})],
            "in a row, since the convolution pads with zeros, to which the shift before it is not added: "
            "Conv_4 after Add_2",
        ),
        (
            [("Conv", "x depth", "a", {"group": 4}), ("Conv", "a square", "b"), ("Relu", "b", "y")],
            "in a row, since one for both would cost more: b after a",
        ),
        (
            [("Conv", "x thin", "a"), ("Conv", "a back", "b"), ("Relu", "b", "y")],
            "in a row, since one for both would cost more: b after a",
        ),
        (
            [("Conv", "x square", "a"), ("Relu", "a", "r"), ("Conv", "a square", "b"), ("Add", "r b", "y")],
            "in a row, since the value between them is also read by Relu: b after a",
        ),
        (
            [("Conv", "x square", "a"), ("Sin", "x", "s"), ("Add", "a s", "d"), ("Conv", "d wide", "b"),
             ("Relu", "b", "y")],
            "in a row, since between them is Add: b after a",
        ),
        ([("Conv", "x wide", "a"), ("Relu", "a", "b"), ("Conv", "b wide", "y")], ""),
    ],
)  # fmt: skip
def test_layers_that_remain_after_or_next_to_another_are_reported(rows, why):
    shapes = {"depth": (4, 1, 3, 3), "five": (4, 1, 5, 5), "wide": (4, 4, 3, 3), "thin": (1, 4, 1, 1),
              "back": (4, 1, 1, 1), "square": (4, 4, 1, 1)}  # fmt: skip
    message = image_net(rows, **{name: normal(*shape) for name, shape in shapes.items()}, **norm(4))
    assert message.replace("linear operators ", "", 1) == why


def test_a_layer_whose_bias_differs_by_row_is_reported_as_not_foldable():
    rows = [("Gemm", "x k c", "a"), ("Gemm", "a l", "b"), ("Relu", "b", "y")]
    weights = {"k": normal(6, 6), "c": normal(4, 1), "l": normal(6, 3)}
    onnx.save(net_of(rows, weights, {"x": (F, (4, 6))}, {"y": F}), "net.onnx")
    message = "linear operators in a row, since no rule of the fold reaches them: b after a"
    assert rc.fold("net.onnx").not_folded == (message,)


def test_nodes_without_names_get_names_of_their_own():
    rows = [("MatMul", "x w", "1"), ("Relu", "1", "2"), ("Gather", "2 some", "3", {"axis": -1}),
            ("MatMul", "3 v", "4"), ("Gelu", "4", "5"), ("Gather", "5 some", "6", {"axis": -1}),
            ("MatMul", "6 u", "y")]  # fmt: skip
    weights = {"w": normal(4, 6), "v": normal(2, 6), "u": normal(2, 3), "some": np.array([0, 2])}
    model = net_of(rows, weights, GIVEN, {"y": F})
    for one in model.graph.node:
        one.name = ""
    onnx.save(model, "net.onnx")
    assert rc.fold("net.onnx").verdict == "passed"


def test_weights_of_a_model_in_memory_are_handed_over_and_not_kept():
    random = np.random.default_rng(0)
    held = {
        "single": random.standard_normal((40, 40)).astype(np.float32),
        "half": random.standard_normal((40, 40)).astype(np.float16),
        "rows": random.integers(0, 40, 2000),
    }
    rows = [
        ("MatMul", "x single", "a"),
        ("Cast", "half", "b", {"to": F}),
        ("MatMul", "a b", "c"),
        ("Gather", "c rows", "y"),
    ]
    model = net_of(rows, held, {"x": (F, (40, 40))}, {"y": F})
    x = {"x": random.standard_normal((40, 40)).astype(np.float32)}
    whole = load_onnx(model.SerializeToString()).run(x)["y"]
    for session in (load_onnx(model), load_onnx(model, timed=True)):
        np.testing.assert_array_equal(session.run(x)["y"], whole)
        assert session._spec.weights is None
    np.testing.assert_allclose(Evaluated(model).truth(x)["y"], whole, rtol=0, atol=1e-4)


def test_a_graph_rounded_otherwise_runs_on_all_probes_and_is_let_go(monkeypatch):
    model = NETS["pixels"].model()
    feeds = probes(model, load_onnx(model.SerializeToString()).run).feeds
    opened = []
    monkeypatch.setattr(rounding, "load_onnx", lambda *content: opened.append(content) or load_onnx(*content))
    right = Evaluated(model)
    right.run(feeds[0])
    other = rounding.Jittered(right, 1e-6, 0, feeds)
    found = [other.run(each) for each in feeds]
    assert "session" not in vars(right), "both ends let theirs go"
    assert (len(opened), len(found)) == (1, len(feeds))
    for each, given in zip(feeds, found, strict=True):
        for name, array in right.run(each).items():
            np.testing.assert_allclose(given[name], array, rtol=0, atol=1e-3 * abs(array).max())
    right.close()
    assert "session" not in vars(right)
    with monkeypatch.context() as patch:
        patch.setattr(graph_with_cached_outputs, "load_onnx", None)  # what it told stays known
        assert right.run(feeds[0])
    assert right.run({name: array * 2 for name, array in feeds[0].items()}), "it opens again"
