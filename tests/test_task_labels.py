"""Tasks that are unknown, labels that do not fit, budgets without an accuracy: none of these may pass silently."""

from __future__ import annotations

import numpy as np
import pytest

from repaconv.tasks.contract import About
from repaconv.tasks.evaluation import Evaluation
from repaconv.tasks.recognition import Choice, by_outputs
from repaconv.verification.comparison import Comparison
from repaconv.verification.tolerances import tolerance

SIZE = (64, 64)
ABOUT = About(size=SIZE)


def links_of(task, found, right, *, precision="fp16", labels=None, asked=True, channels=3, about=ABOUT):
    """All links of one batch in a lossy precision."""
    evaluation = Evaluation(Choice(task, "--task" if asked else "the outputs", asked, about), precision, channels)
    compared = Comparison(precision, tolerance(precision, logits=False), "", evaluation=evaluation)
    compared.add(found, right, truths=labels)
    return compared.links(precision, "float32")


# --- Which task it is


@pytest.mark.parametrize(("taken", "given"), [(4, 3), (6, 2), (1, 2), (3, 17)])
def test_numbers_per_pixel_alone_show_no_task(taken, given):
    """A denoiser, optical flow, colors of a gray image, heatmaps: sound FP16 passes, and --task is offered."""
    rng = np.random.default_rng(0)
    right = rng.random((4, 1, 64, 64)).repeat(given, 1) + 0.004 * rng.normal(size=(4, given, 64, 64))
    found = right + 5e-4 * rng.normal(size=right.shape)
    (link,) = links_of(None, {"y": found}, {"y": right}, asked=False, channels=taken)
    assert (link.verdict, link.task) == ("passed", None)
    assert f"{given} numbers per pixel (--task segment if they are scores of classes)" in link.note
    (_, segment) = links_of("segment", {"y": right}, {"y": right}, channels=taken)
    assert segment.task.task == "segment"


def test_larger_images_and_sequences_show_no_task():
    assert by_outputs({"y": np.zeros((1, 3, 128, 128))}, ABOUT, 3)[0] == "other"
    assert "--task restore" in by_outputs({"y": np.zeros((1, 3, 128, 128))}, ABOUT, 3)[1]
    assert by_outputs({"y": [np.zeros(2), np.zeros(3)]}, ABOUT, 3)[0] == "other"
