"""The rules by which a comparison of outputs gets its verdict, and its two scales."""

from __future__ import annotations

import time

import numpy as np
import pytest

from repaconv.results import Tolerance
from repaconv.verification.accuracy_budget import Budget
from repaconv.verification.comparison import (
    ChannelSizes,
    Comparison,
    PerImage,
    PerNeighborhood,
    largest_along_least_axis,
    link_between,
    overall_link,
)
from repaconv.verification.output_metrics import mcnemar
from repaconv.verification.rounding import JITTERED, JITTERED_TIMES, MEASURED, MEASURED_TIMES, MOST_EXPLAINED, Rounding
from repaconv.verification.tolerances import LEAST_OUTPUT_CHANGE, tolerance

EXACT = Tolerance(kind="exact", rtol=1e-5)
RIGHT = np.random.default_rng(0).standard_normal((8, 6))


def compared(found, right=RIGHT, *, moved=None, kind=MEASURED, scale=PerImage, **how):
    """The link of one output; ``moved`` is how far rounding moves its numbers."""
    one = Comparison("candidate", EXACT, scale=scale)
    rounding = None if moved is None else Rounding(kind, lambda: [{"y": moved}])
    one.add({"y": found}, {"y": right}, rounding=rounding, **how)
    (link,) = one.links("onnx", "reference")
    return link


@pytest.mark.parametrize(("scale", "kind"), [(PerImage, MEASURED), (PerNeighborhood, JITTERED)])
def test_rounding_explains_so_many_times_what_it_does_and_no_more(scale, kind):
    moved = np.full(RIGHT.shape, 1e-4)
    times = MEASURED_TIMES if kind is MEASURED else JITTERED_TIMES
    explained = compared(RIGHT + 0.9 * times * moved, moved=moved, kind=kind, scale=scale)
    assert (explained.verdict, explained.reason) == ("passed", "explained_by_rounding")
    assert (explained.figures.factor, explained.figures.source) == (times, kind.source)
    assert explained.tolerance.rtol == explained.metrics.max_rel_error > 1e-5
    assert compared(RIGHT + 1.1 * times * moved, moved=moved, kind=kind, scale=scale).reason == "exceeds_tolerance"
    assert compared(RIGHT + 0.9 * times * moved, scale=scale).reason == "exceeds_tolerance"


@pytest.mark.parametrize("scale", [PerImage, PerNeighborhood])
def test_rounding_explains_one_number_next_to_others_without_a_difference(scale):
    found = RIGHT.copy()
    found[2, 3] += 1e-4
    link = compared(found, moved=np.full(RIGHT.shape, 1e-4), scale=scale)
    assert (link.reason, link.figures.explained, link.figures.different) == ("explained_by_rounding", 1, None)


def test_rounding_next_to_a_number_is_that_along_the_axis_where_numbers_are_smallest():
    size, moved = np.array([[1.0, 8.0], [2.0, 16.0]]), np.array([[1.0, 2.0], [3.0, 4.0]])
    least, there = largest_along_least_axis(size, moved)
    np.testing.assert_array_equal(least, [[2, 8], [2, 16]])
    np.testing.assert_array_equal(there, [[3, 2], [3, 4]])


@pytest.mark.parametrize("scale", [PerImage, PerNeighborhood])
def test_rounding_is_sampled_again_as_long_as_a_difference_is_not_explained(scale):
    def drawn():
        for moved in (1e-7, 1e-4, 1e-3):
            asked.append(moved)
            yield {"y": np.full(RIGHT.shape, moved)}

    for difference, needed, verdict in ((4e-4, 2, "passed"), (0.0, 0, "passed"), (1.0, 3, "failed")):
        asked: list[float] = []
        one = Comparison("candidate", EXACT, scale=scale)
        one.add({"y": RIGHT + difference}, {"y": RIGHT}, rounding=Rounding(MEASURED, drawn))
        (link,) = one.links("onnx", "reference")
        assert (len(asked), link.verdict) == (needed, verdict)


@pytest.mark.parametrize(("scale", "kind"), [(PerImage, MEASURED), (PerNeighborhood, JITTERED)])
def test_where_rounding_moves_most_by_more_than_one_percent_nothing_is_verified(scale, kind):
    size = np.abs(RIGHT).max()
    vague = np.full(RIGHT.shape, 2 * MOST_EXPLAINED * size / kind.times)
    link = compared(RIGHT + vague, moved=vague, kind=kind, scale=scale)
    assert (link.verdict, link.reason) == ("not verified", "rounding_too_large")
    assert link.figures.rounding > MOST_EXPLAINED / kind.times
    assert compared(RIGHT + 9 * vague, moved=vague, kind=kind, scale=scale).verdict == "failed"


@pytest.mark.parametrize("scale", [PerImage, PerNeighborhood])
def test_an_output_that_moves_by_less_than_ten_tolerances_hides_a_fault_of_a_tenth(scale):
    still = 1 + np.arange(4.0)[:, None] * np.ones((4, 6)) * 1e-5
    assert compared(still, still, scale=scale).reason == "constant_output"
    assert (
        compared(1 + LEAST_OUTPUT_CHANGE * (still - 1), 1 + LEAST_OUTPUT_CHANGE * (still - 1), scale=scale).verdict
        == "passed"
    )


@pytest.mark.parametrize("scale", [PerImage, PerNeighborhood])
def test_an_output_that_moves_by_less_than_the_absolute_tolerance_verifies_nothing(scale):
    for atol, reason in ((10.0, "constant_output"), (1e-3, "within_tolerance")):
        one = Comparison("candidate", Tolerance(kind="exact", rtol=1e-5, atol=atol), scale=scale)
        one.add({"y": RIGHT}, {"y": RIGHT})
        assert [link.reason for link in one.links("onnx", "reference")] == [reason]


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 3)])
def test_whole_numbers_are_counted_by_image(shape):
    right = np.arange(np.prod(shape)).reshape(shape)
    found = right.copy()
    found[5:7] += 1
    figures = compared(found, right).figures
    assert (figures.unit, figures.compared, figures.different) == ("images", 8, 2)
    assert compared(right, right).reason == "within_tolerance"


def test_whole_numbers_that_lower_precision_changes_are_counted_only():
    right = np.arange(24).reshape(8, 3)
    one = Comparison("candidate", tolerance("int8"), "")
    one.add({"y": right + (right == 7)}, {"y": right})
    (link,) = one.links("int8", "reference")
    assert (link.verdict, link.reason, link.figures.different) == ("not verified", "discrete_in_low_precision", 1)


@pytest.mark.parametrize("moved", [1e-4, 1.0])
def test_rounding_whose_measurement_is_in_doubt_explains_nothing(moved):
    one = Comparison("candidate", EXACT)
    rounding = Rounding(MEASURED, lambda: [{"y": np.full(RIGHT.shape, moved)}], lambda: "Tanh is in doubt")
    one.add({"y": RIGHT + moved}, {"y": RIGHT}, rounding=rounding)
    (link,) = one.links("onnx", "reference")
    assert (link.verdict, link.reason, link.figures.detail) == ("not verified", "not_comparable", "Tanh is in doubt")


def test_another_shape_is_a_difference_unless_rounding_changes_the_shape():
    for moved, verdict in ((np.zeros(RIGHT.shape), "failed"), (np.zeros((5, 6)), "not verified")):
        one = Comparison("candidate", EXACT, scale=PerNeighborhood)
        one.add({"y": RIGHT[:7]}, {"y": RIGHT}, rounding=Rounding(MEASURED, lambda moved=moved: [{"y": moved}]))
        assert one.links("onnx", "reference")[0].verdict == verdict
        one = Comparison("candidate", EXACT, scale=PerNeighborhood)
        rounding = Rounding(MEASURED, lambda moved=moved: [{"y": moved}], lambda: "Tanh is in doubt")
        one.add({"y": RIGHT[:7]}, {"y": RIGHT}, rounding=rounding)
        reason = "shape_or_type_differs" if verdict == "failed" else "not_comparable"
        assert one.links("onnx", "reference")[0].reason == reason


def test_of_outputs_that_are_not_verified_one_is_reported():
    link = compared(np.ones((4, 6)), np.ones((4, 6)))
    assert overall_link([link, link]).verdict == "not verified"
    assert overall_link([link, compared(RIGHT)]).verdict == "passed"
    assert overall_link([compared(RIGHT), compared(RIGHT + 1), link]).verdict == "failed"


def test_a_lossy_output_that_hardly_changes_verifies_nothing():
    for change, verdict in ((1e-6, "not verified"), (1e-3, "passed")):
        one, right = Comparison("candidate", tolerance("fp16", logits=False), ""), 1 + change * RIGHT
        one.add({"y": right}, {"y": right})
        assert one.links("fp16", "reference")[0].verdict == verdict


def test_the_worst_image_of_whole_numbers_counts_those_of_earlier_batches():
    one, right = Comparison("candidate", EXACT), np.arange(12).reshape(4, 3)
    one.add({"y": right}, {"y": right})
    one.add({"y": right + (right == 7)}, {"y": right})
    assert one.outputs["y"].worst == 6


def test_whole_numbers_of_an_image_whose_tokens_rounding_merges_are_left_out():
    right = np.arange(24).reshape(8, 3)
    undecided = np.arange(8) == 2
    figures = compared(right + (right == 7), right, undecided=undecided).figures
    assert (figures.compared, figures.left_out, figures.different) == (8, 1, None)
    figures = compared(right + (right == 10), right, undecided=undecided).figures
    assert (figures.left_out, figures.different) == (None, 1)


@pytest.mark.parametrize("scale", [PerImage, PerNeighborhood])
def test_the_largest_error_is_relative_to_the_size_of_numbers(scale):
    right = 100 * np.eye(4) + 50
    assert compared(right + 3, right, scale=scale).figures.error == pytest.approx(3 / 150)


def test_a_difference_fails_before_anything_is_called_not_verified():
    unsure = np.array([True, True, True, False])
    found = 1.1 * RIGHT[:4]
    assert compared(np.where(unsure[:, None], found, RIGHT[:4]), RIGHT[:4], undecided=unsure).verdict == "not verified"
    link = compared(found, RIGHT[:4], undecided=unsure)
    assert (link.verdict, link.reason) == ("failed", "exceeds_tolerance")


def test_a_small_channel_is_held_to_its_own_size_by_neighborhood_alone():
    size = np.array([1e4, 1, 1, 1, 1, 1e-2])
    off = RIGHT * size * (1 + np.array([0, 0, 0, 0, 0, 1e-3]))
    assert compared(off, RIGHT * size).verdict == "passed"
    assert compared(off, RIGHT * size, scale=PerNeighborhood).verdict == "failed"


def test_a_lossy_link_counts_no_exact_differences():
    one = Comparison("candidate", tolerance("fp16"), "y")
    one.add({"y": RIGHT * (1 + 1e-4)}, {"y": RIGHT})
    link = overall_link(one.links("fp16", "reference"))
    assert (link.verdict, link.reason, link.figures.different) == ("passed", "within_tolerance", None)


def test_channels_are_as_large_as_in_any_probe_relative_to_it_and_no_larger_than_in_all():
    one, other = np.array([[1.0, 4.0, 1e-9]]), np.array([[100.0, 1.0, 0.0]])
    channels = ChannelSizes([{"y": one, "mask": one > 0}, {"y": other, "mask": other > 0}])
    np.testing.assert_allclose(channels.scale("y", one), [[4, 4, 1e-9]])
    np.testing.assert_allclose(channels.scale("y", other), [[100, 4, 1e-9]])
    np.testing.assert_allclose(channels.scale("unknown", one), one)
    longer = np.array([[2.0, 4.0, 8.0, 16.0]])  # of another length: no channel of it was seen
    np.testing.assert_allclose(channels.scale("y", longer), longer)


def test_channels_never_make_an_image_larger_than_its_largest_number():
    loud, quiet = 1e4 * RIGHT, RIGHT[:1]
    channels = ChannelSizes([{"y": loud}, {"y": quiet}])
    assert (channels.scale("y", np.abs(quiet)) <= np.abs(quiet).max()).all()
    assert (channels.scale("y", np.abs(quiet)) >= np.abs(quiet)).all()


def test_a_class_near_zero_in_one_image_is_held_to_its_size_in_all():
    right = np.array([[1e-7, 1.0, 2.0, 1e-3]])
    channels = ChannelSizes([{"y": right}, {"y": np.array([[1.0, 1.0, 1.0, 1e-3]])}])

    def verdict(error, channels):
        one = Comparison("candidate", EXACT, scale=PerNeighborhood, fixed=["y"], channels=channels)
        one.add({"y": right + np.array(error)}, {"y": right})
        return one.links("onnx", "reference")[0].verdict

    assert verdict([1e-5, 0, 0, 0], channels) == "passed"
    assert verdict([1e-5, 0, 0, 0], None) == "failed"
    assert verdict([1e-4, 0, 0, 0], channels) == "failed"
    assert verdict([0, 0, 0, 1e-6], channels) == "failed"  # a small channel next to large ones


@pytest.mark.parametrize("scale", [PerImage, PerNeighborhood])
@pytest.mark.parametrize("infinite", [np.inf, -np.inf, float(np.finfo(np.float32).min)])
def test_an_infinity_on_one_side_is_different_whatever_else_is_infinite(scale, infinite):
    right = RIGHT.copy()
    right[:, 0] = infinite
    assert compared(right, right, scale=scale).verdict == "passed"
    for column, value in ((0, -infinite), (0, 5.0), (1, np.nan), (1, infinite), (2, 50.0)):
        found = right.copy()
        found[0, column] = value
        assert compared(found, right, scale=scale).reason == "exceeds_tolerance", (column, value)


@pytest.mark.parametrize("scale", [PerImage, PerNeighborhood])
def test_where_most_numbers_are_nan_on_both_sides_nothing_is_verified(scale):
    for columns, verdict in ((3, "passed"), (4, "not verified"), (6, "not verified")):
        right = RIGHT.copy()
        right[:, :columns] = np.nan
        link = compared(right, right, scale=scale)
        assert link.verdict == verdict
        assert ("NaN on both sides" in link.note) is (columns > 3 or scale is PerNeighborhood)
        assert columns == 6 or compared(2 * right, right, scale=scale).reason == "exceeds_tolerance"


@pytest.mark.parametrize("scale", [PerImage, PerNeighborhood])
def test_where_an_output_is_nan_for_most_inputs_nothing_is_verified(scale):
    for calls, verdict in ((1, "passed"), (2, "not verified")):
        one = Comparison("candidate", EXACT, scale=scale)
        for right in (RIGHT, *[np.full(RIGHT.shape, np.nan)] * calls):
            one.add({"y": right}, {"y": right})
        link = one.links("onnx", "reference")[0]
        assert link.verdict == verdict
        assert "NaN on both sides" in link.note


def test_lower_precision_is_not_compared_where_most_numbers_are_nan():
    right = np.where(np.arange(6) < 4, np.nan, RIGHT)
    one = Comparison("candidate", tolerance("fp16"), "y")
    one.add({"y": right}, {"y": right})
    assert one.links("fp16", "reference")[0].reason == "not_comparable"


def test_a_masked_class_is_never_the_top_1_prediction():
    right = np.full((40, 3), -20.0)
    right[:, 1:] -= np.random.default_rng(0).random((40, 2)) * 0.02
    found = right + np.random.default_rng(1).normal(size=right.shape) * 0.02
    labels = right[:, 1:].argmax(1)

    def link(found, right, labels):
        return link_between("fp16", ("r", right), ("c", found), logits=True, tolerance=tolerance("fp16"), labels=labels)

    for mask in (-np.inf, np.nan):
        found[:, 0] = right[:, 0] = mask
        masked, cut = link(found, right, labels + 1), link(found[:, 1:], right[:, 1:], labels)
        assert masked.metrics.top1_agreement == cut.metrics.top1_agreement < 1
        assert masked.metrics.top1_smallest_margin == cut.metrics.top1_smallest_margin
        assert masked.metrics.kl_divergence == pytest.approx(cut.metrics.kl_divergence)
        assert masked.accuracy == cut.accuracy
        assert (masked.accuracy.reference, masked.verdict) == (1.0, cut.verdict)


def test_sequences_of_tensors_of_different_shapes_are_not_compared():
    parts = [np.ones((2, 1)), np.ones((2, 3))]
    assert compared(parts, parts).reason == "not_comparable"


@pytest.mark.parametrize("share", [1, 3, 5])
def test_a_share_of_exactly_the_budget_is_within_it(share):
    assert Budget(share / 100).allows(1 - (100 - share) / 100, None)
    assert not Budget(share / 100).allows(1 - (99 - share) / 100, None)


def test_an_unknown_loss_counts_as_all_and_both_limits_hold():
    assert not Budget(0.5).allows(None, 0.0)
    assert not Budget(None, 0.5).allows(0.0, None)
    assert Budget(0.5, 0.1).allows(0.2, -0.1)
    assert not Budget(0.5, 0.1).allows(0.2, -0.2)
    assert not Budget(0.1, 0.5).allows(0.2, 0.0)


def test_the_p_value_of_many_discordant_pairs_takes_no_time():
    assert mcnemar(1, 3) == 10 / 16
    before = time.process_time()
    assert mcnemar(5000, 5001) == 1
    assert time.process_time() - before < 2
