"""Exact folds with larger rounding: the step that rounds is reverted, the rest is kept, and wrong folds still fail."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from planted_graph_faults import F, Net, weight
from test_folded_graph_verification import planted

import repaconv as rc
from repaconv.core.errors import GateFailed, Refused
from repaconv.core.progress import silent
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.results import Change, Figures, Link
from repaconv.rewrites.fold.fold_pipeline import FOLDS, without
from repaconv.sources.fold_size_reverts import Kept
from repaconv.sources.graph_fold import Folded, folded
from repaconv.stages.fold.rounding_reverts import compared_with_reverts
from repaconv.stages.fold.speed_reverts import fold_with_reverts
from repaconv.verification import folded_graph_verification
from repaconv.verification.cut_at_discrete_operators import cut_at_choices
from repaconv.verification.folded_graph_verification import verification_links
from repaconv.verification.graph_with_cached_outputs import Evaluated
from repaconv.verification.numerical_cancellation import small_values


def of_norm(random: np.random.Generator, width: int) -> dict[str, np.ndarray]:
    return {
        "nw": 1 + 0.3 * random.standard_normal(width), "nb": random.standard_normal(width),
        "nm": random.standard_normal(width), "nv": 0.5 + random.random(width),
    }  # fmt: skip


def cancelling(high: float = 300.0) -> onnx.ModelProto:
    """A large constant that is added and subtracted again, with an activation in between, before a mean and a head."""
    rows = [
        ("Conv", "x w", "a", {"pads": [1] * 4}), ("BatchNormalization", "a nw nb nm nv", "b"), ("LeakyRelu", "b", "c"),
        ("Add", "c high", "up"), ("Relu", "up", "kept"), ("Sub", "kept high", "down"),
        ("GlobalAveragePool", "down", "d"), ("Flatten", "d", "e"), ("Gemm", "e head hb", "y"),
    ]  # fmt: skip
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((16, 4, 3, 3)), "head": random.standard_normal((16, 10))}
    weights |= {"hb": random.standard_normal(10), "high": np.array(high), **of_norm(random, 16)}
    return Net(rows, weights, {"x": (F, (1, 4, 8, 8))}, {"y": F}).model()


def absorbing() -> onnx.ModelProto:
    """A small constant and then a large one: as one constant they have the rounding of the large one, in all tokens."""
    rows = [
        ("MatMul", "x w", "a0"), ("Mul", "a0 gain", "a"), ("Add", "a small", "b"), ("Add", "b high", "up"),
        ("Relu", "up", "kept"), ("Sub", "kept high", "down"), ("ReduceMean", "down one", "d", {"keepdims": 0}),
        ("MatMul", "d head", "y"),
    ]  # fmt: skip
    random = np.random.default_rng(3)
    weights = {"w": random.standard_normal((8, 8)), "head": random.standard_normal((8, 20))}
    weights |= {
        "gain": 1 + random.random(8),
        "small": random.standard_normal(8),
        "high": np.array(12345.678),
        "one": np.array([1]),
    }
    return Net(rows, weights, {"x": (F, (1, 256, 8))}, {"y": F}).model()


def huge(*rows: tuple[str, str, str]) -> onnx.ModelProto:
    """Small numbers, which layers with large weights read, and then a convolution and its norm."""
    nodes = [("Relu", "x", "positive"), ("Mul", "positive tiny", "low"), ("Abs", "low", "small"), *rows]
    random = np.random.default_rng(0)
    layers = {name: 3e25 * random.standard_normal((4, 4, 1, 1)) for name in ("one", "two")}
    weights = {"w": 1e-5 * random.standard_normal((4, 4, 3, 3)), "tiny": np.array(1e-20), "less": np.array(1e-30)}
    weights |= {"high": np.full((1, 4, 1, 1), 1e25), **layers, **of_norm(random, 4)}
    rest = [("Conv", "up w", "a", {"pads": [1] * 4}), ("BatchNormalization", "a nw nb nm nv", "y")]
    return Net([*nodes, *rest], weights, {"x": (F, (1, 4, 8, 8))}, {"y": F}).model()


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        ([("Mul", "small high", "p"), ("Mul", "p high", "up")], {"Mul": 2, "Conv": 1}),
        ([("Conv", "small one", "p"), ("Conv", "p two", "q"), ("Abs", "q", "r"), ("Mul", "r less", "up")],
         {"Mul": 1, "Conv": 3}),
    ],
)  # fmt: skip
def test_constants_whose_product_float32_cannot_hold_stay_apart_and_the_rest_is_folded(rows, left):
    onnx.save(huge(*rows), "net.onnx")
    done = rc.fold("net.onnx", measure=False)
    assert {link.verdict for link in done.links} == {"passed"}
    assert done.reverted == ("value:p",)
    assert any("too large or small for FP32" in sentence for sentence in done.not_folded)
    assert "BatchNormalization" not in done.operators
    assert {name: done.operators[name] for name in left} == left


@pytest.mark.parametrize("high", [300.0, 3e4])
def test_nothing_is_folded_across_a_difference_of_large_numbers_that_rounds_worse_elsewhere(high):
    onnx.save(cancelling(high), "net.onnx")
    done = rc.fold("net.onnx", measure=False)
    assert {link.verdict for link in done.links} == {"passed"}
    assert done.reverted == ("value:down",)
    assert any("down: nothing is folded across it" in sentence for sentence in done.not_folded)
    assert [change.rewrite for change in done.changes] == ["convolution"]  # the norm is folded all the same
    assert (done.operators["Sub"], "BatchNormalization" in done.operators) == (1, False)
    assert {link.verdict for link in rc.verify().links} == {"passed"}  # which folds once more, in float64


@pytest.mark.parametrize("by", [1e-3, 1e-6])
def test_a_wrong_fold_of_such_a_network_fails_and_reverts_nothing(monkeypatch, by):
    onnx.save(cancelling(), "net.onnx")
    planted(monkeypatch, weight("nb", lambda b: b * np.float32(1 + by)), FOLDS)
    with pytest.raises(GateFailed, match="computed in float64"):
        rc.fold("net.onnx", out="wrong.onnx", measure=False)
    assert not Path("wrong.onnx").exists()


def test_a_small_constant_is_not_merged_with_a_large_one_where_that_rounds_worse():
    onnx.save(absorbing(), "net.onnx")
    done = rc.fold("net.onnx", measure=False)
    assert {link.verdict for link in done.links} == {"passed"}
    assert set(done.reverted) == {"value:b", "value:down"}
    assert "Mul" not in done.operators


def test_values_are_found_that_are_small_next_to_the_others_of_a_sum():
    found = small_values(cancelling(), Evaluated(cancelling()).probes.feeds)
    assert {"down", "c"} <= set(found)
    assert not {"up", "kept", "high"} & set(found)


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ((1, -2.5, 0, 1), ["a"]),
        ((1, 0, 2.5, 1), ["a"]),
        ((1, -1.5, 1, 1), ["a"]),
        ((1, -1.5, -1, 1), []),
        ((4, -2.5, 0, 1), ["y"]),
        ((4, -2.5, 0, 16), ["a"]),
        ((1, -2.5, 0, 16), ["a"]),
        ((1, -0.4, 0, 0.75), []),
    ],
)
def test_terms_of_a_norm(numbers, wanted):
    """The input is 1, times the scale / deviation, and the shift - mean * scale / deviation is added."""
    names = ("nw", "nb", "nm", "nv")
    weights = {name: np.full(4, number, np.float64) for name, number in zip(names, numbers, strict=True)}
    rows = [("Relu", "x", "a"), ("BatchNormalization", "a nw nb nm nv", "y", {"epsilon": 1e-12})]
    model = Net(rows, weights, {"x": (F, (1, 4, 2, 2))}, {"y": F}).model()
    assert small_values(model, [{"x": np.ones((1, 4, 2, 2), np.float32)}]) == wanted


def test_terms_of_a_norm_whose_scale_is_also_its_shift():
    rows = [("Relu", "x", "a"), ("BatchNormalization", "a n3 n3 n0 n1", "y")]
    weights = {"n3": np.full(4, 3.0), "n0": np.zeros(4), "n1": np.full(4, 100.0)}
    model = Net(rows, weights, {"x": (F, (1, 4, 2, 2))}, {"y": F}).model()
    assert small_values(model, [{"x": np.ones((1, 4, 2, 2), np.float32)}]) == ["a"]


def test_rewrites_are_reverted_where_no_value_helps(monkeypatch):
    monkeypatch.setattr("repaconv.stages.fold.rounding_reverts.small_values", lambda *_: [])
    onnx.save(cancelling(), "net.onnx")
    done = rc.fold("net.onnx", measure=False)
    assert done.reverted == ("affine",)
    assert "rounds by more than 8 times" in done.not_folded[0]
    assert {change.rewrite for change in done.changes} == {"convolution"}
    assert {link.verdict for link in done.links} == {"passed"}


def test_a_refold_of_which_nothing_can_be_compared_is_reverted_as_well(monkeypatch):
    """A fold that fails by its rounding, and one that rounds so that nothing shows: the original graph remains."""
    given, failing, unknown = (Evaluated(cancelling()) for _ in range(3))
    names = {"name": "onnx", "reference": "given", "candidate": "folded"}
    worse = Link.concluded("exceeds_tolerance", figures=Figures(error=1.0, error_in_float64=0.0), **names)

    def compared(source, before, after, *, unverified, **_):
        if after.model is failing.model:
            return (worse,)
        if unverified:
            return (worse.because("rounding_too_large"),)
        raise Refused("no output could be compared.", code="fold.not-verified")

    monkeypatch.setattr("repaconv.stages.fold.rounding_reverts.verification_links", compared)
    monkeypatch.setattr("repaconv.stages.fold.rounding_reverts.small_values", lambda *_: [])
    changes = [Change(rewrite=name, place="", description="") for name in ("affine", "convolution")]

    def refold(names):
        return Folded(unknown.model, [change for change in changes if change.rewrite not in names])

    again = partial(fold_with_reverts, given, given, refold, measured=False, progress=silent)
    for unverified in (False, True):
        kept, links_of_rest = compared_with_reverts(
            Path("net.onnx"), Kept(failing, changes), given, given, refold, again, unverified=unverified
        )
        assert (kept.graph, [*kept.changes], links_of_rest) == (given, [], ())
        assert kept.reverts.names == ("affine", "convolution")


def test_a_kept_value_is_no_output_afterwards_and_an_unknown_one_is_none():
    model = cancelling()
    fold, changes = rewritten(model, without(["value:down", "value:nowhere"]))
    assert changes
    assert [output.name for output in fold.graph.output] == ["y"]
    assert any("down" in node.output for node in fold.graph.node)
    assert not any("down" in node.output for node in rewritten(model, FOLDS)[0].graph.node)


ROUNDS = 1.5 * 2**23


@pytest.mark.parametrize(
    "rows",
    [
        [("Add", "a high", "up"), ("Sub", "up high", "r")],
        [("Sub", "a high", "up"), ("Add", "up high", "r")],
        [("Sub", "high a", "up"), ("Sub", "high up", "r")],
        [("Add", "low a", "up"), ("Add", "up high", "r")],
        [("Unsqueeze", "high zero", "made"), ("Add", "a made", "up"), ("Sub", "up made", "r")],
        [("Add", "a high", "up"), ("Sub", "up high", "r0"), ("Sub", "up more", "r1"), ("Mul", "r0 r1", "r")],
    ],
    ids=["add-sub", "sub-add", "sub-sub", "add-add", "constant of a node", "two differences"],
)
def test_a_sum_that_rounds_on_purpose_stays(rows):
    """In float64 it is no rounding, so that no comparison would find what is missing."""
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((4, 3, 3, 3)), "v": random.standard_normal((5, 4, 1, 1))}
    weights |= {"high": np.array(ROUNDS), "low": np.array(-ROUNDS)}
    weights |= {"zero": np.array([0]), "more": np.array(ROUNDS + 5)}
    rows = [("Conv", "x w", "a0", {"pads": [1] * 4}), ("Relu", "a0", "a"), *rows, ("Conv", "r v", "y")]
    onnx.save(Net(rows, weights, {"x": (F, (1, 3, 8, 8))}, {"y": F}).model(), "net.onnx")
    done = rc.fold("net.onnx", measure=False)
    constant = {"shapes"} if any(row[0] == "Unsqueeze" for row in rows) else set()  # one that a node computes
    assert {change.rewrite for change in done.changes} == constant
    assert "Identity" not in done.operators
    assert any("a sum rounds on purpose there" in sentence for sentence in done.not_folded)


def test_a_product_does_not_take_a_constant_that_rounds_as_its_bias():
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((16, 4)), "v": random.standard_normal((4, 3)), "high": np.full(4, ROUNDS)}
    rows = [("MatMul", "x w", "a"), ("Add", "a high", "up"), ("Sub", "up high", "r"), ("MatMul", "r v", "y")]
    onnx.save(Net(rows, weights, {"x": (F, (2, 16))}, {"y": F}).model(), "net.onnx")
    assert rc.fold("net.onnx", measure=False).operators == {"MatMul": 2, "Add": 1, "Sub": 1}


def test_a_graph_with_a_kept_value_has_no_unread_nodes():
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((16, 4)), "b": random.standard_normal(4), "s": random.standard_normal(4)}
    weights["v"] = random.standard_normal((4, 4))
    rows = [
        ("MatMul", "x w", "m"),
        ("Add", "m b", "m1"),
        ("Relu", "m1", "n"),
        ("MatMul", "n v", "o"),
        ("Mul", "o s", "y"),
    ]
    model = Net(rows, weights, {"x": (F, (2, 16))}, {"y": F}).model()
    fold, _ = rewritten(model, without(["value:m1"]))
    read = {name for node in fold.graph.node for name in node.input} | {output.name for output in fold.graph.output}
    assert all(read.intersection(node.output) for node in fold.graph.node)
    assert sorted(node.op_type for node in fold.graph.node) == ["Gemm", "MatMul", "Relu"]


@pytest.mark.parametrize("high", [300.0, 17300.7])
def test_any_other_constant_that_is_subtracted_again_is_folded(high):
    random = np.random.default_rng(0)
    weights = {
        "w": random.standard_normal((4, 3, 3, 3)),
        "v": random.standard_normal((5, 4, 1, 1)),
        "high": np.array(high),
    }
    rows = [
        ("Conv", "x w", "a", {"pads": [1] * 4}),
        ("Add", "a high", "up"),
        ("Sub", "up high", "r"),
        ("Conv", "r v", "y"),
    ]
    onnx.save(Net(rows, weights, {"x": (F, (1, 3, 8, 8))}, {"y": F}).model(), "net.onnx")
    assert rc.fold("net.onnx", measure=False).operators == {"Conv": 2}


def test_constants_are_rounded_once_when_the_graph_is_written():
    """Two rewrites, of which the second takes away again what the first added, to a bias that is 1e4 times smaller."""
    rows = [("Conv", "x w bias", "a"), ("Add", "a high", "b"), ("Sub", "b high", "c"), ("Identity", "c", "y")]
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((4, 4, 1, 1)), "bias": random.standard_normal(4), "high": np.array(17300.7)}
    written = folded(Path("net.onnx"), Net(rows, weights, {"x": (F, (1, 4, 8, 8))}, {"y": F}).model()).model
    (conv,) = (node for node in written.graph.node if node.op_type == "Conv")
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in written.graph.initializer}
    np.testing.assert_allclose(held[conv.input[2]], weights["bias"], rtol=1e-6)


# --- choices that FP32 rounding decides

CHOICES = (15, 23)
"""Two networks in which it chooses so that no few draws of the original's rounding show it: 5 of the first 24 are."""

FAULTS = (("Conv", 1, 1e-3), ("Gather", 0, 1e-4))
"""Operator, input and share. A wrong bias of the convolution would be none: it shifts the scores of all tokens."""


def choosing(seed: int) -> onnx.ModelProto:
    """Scores of tokens that are differences of large numbers; TopK of them takes rows of a table."""
    random = np.random.default_rng(1000 + seed)
    width, side = int(random.choice([4, 8, 16])), int(random.choice([8, 12]))
    tokens = side * side
    most = int(random.integers(tokens // 2, tokens - 2))
    rows = [
        ("Conv", "x w", "a", {"pads": [1] * 4}), ("BatchNormalization", "a nw nb nm nv", "b"),
        ("Add", "b high", "c"), ("Relu", "c", "d"), ("Sub", "d high", "e"),
        ("Reshape", "e shape", "f"), ("Transpose", "f", "t", {"perm": [0, 2, 1]}),
        ("MatMul", "t score", "s0"), ("Add", "s0 bias", "s1"), ("Squeeze", "s1 last", "s"),
        ("TopK", "s most", "values indices", {"axis": 1}), ("Gather", "table indices", "g", {"axis": 0}),
        ("MatMul", "g head", "h0"), ("Add", "h0 hb", "h"), ("Relu", "h", "y"),
    ]  # fmt: skip
    weights = {"w": random.standard_normal((width, 4, 3, 3)), **of_norm(random, width)}
    weights["high"] = np.array(10 ** random.uniform(3, 6))
    weights |= {"shape": np.array([0, width, -1]), "last": np.array([-1]), "most": np.array([most])}
    weights["score"] = random.standard_normal((width, 1))
    weights["bias"] = random.standard_normal(1) * 10 ** random.uniform(0, 4)
    table = random.standard_normal((tokens, 3))
    weights["table"] = np.where(random.random((tokens, 3)) < 0.1, table, 0.0) if seed % 2 else table
    weights |= {"head": random.standard_normal((3, 5)), "hb": random.standard_normal(5)}
    return Net(rows, weights, {"x": (F, (1, 4, side, side))}, {"y": F}).model()


def verdict(before: onnx.ModelProto, after: onnx.ModelProto) -> tuple[str, str]:
    (link,) = verification_links(Path("net.onnx"), Evaluated(before), Evaluated(after))
    return link.verdict, link.note


def changed(model: onnx.ModelProto, node: str, place: int, by: float) -> onnx.ModelProto:
    """The same graph with another first half of the constants of one node."""
    (other := onnx.ModelProto()).CopyFrom(model)
    name = next(one for one in other.graph.node if one.op_type == node).input[place]
    held = next(tensor for tensor in other.graph.initializer if tensor.name == name)
    numbers = numpy_helper.to_array(held).copy()
    numbers[: len(numbers) // 2] *= np.float32(1 + by)
    held.CopyFrom(numpy_helper.from_array(numbers, name))
    return other


@pytest.mark.parametrize("seed", CHOICES)
def test_another_choice_by_rounding_is_no_fault_if_scores_and_what_follows_are_equal(monkeypatch, seed):
    before = choosing(seed)
    after = rewritten(before, FOLDS)[0]
    message, why = verdict(before, after)
    assert (message, "FP32 rounding decides what TopK chooses" in why) == ("passed", True)
    for node, place, by in FAULTS:
        assert verdict(before, changed(after, node, place, by))[0] == "failed"
    # also if float64 had told nothing, neither other scores nor other rows pass as another choice
    monkeypatch.setattr(folded_graph_verification, "rounds_worse", lambda links: links[0].verdict == "failed")
    for node, place, by in FAULTS:
        assert verdict(before, changed(after, node, place, by))[0] == "failed"


def test_graphs_are_cut_at_what_both_choose_alike():
    before = choosing(CHOICES[0])
    first, second, operators = cut_at_choices(Evaluated(before), Evaluated(rewritten(before, FOLDS)[0]))
    assert operators == "TopK"
    for end in (first, second):
        assert {port.name for port in end.inputs} == {"x", "values", "indices"}
        assert [output.name for output in end.model.graph.output] == ["y", "TopK values, input 0"]
        assert not any(node.op_type == "TopK" for node in end.model.graph.node)
    assert cut_at_choices(Evaluated(cancelling()), Evaluated(cancelling())) is None
