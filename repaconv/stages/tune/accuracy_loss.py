"""Accuracy loss of lower-precision configurations: on the validation split in the search, then on the test split."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core.errors import RepaconvError, UsageProblem, first_line
from repaconv.core.progress import Progress
from repaconv.core.thread_pool import usable_cpus
from repaconv.results import Candidate, Deployment, Link
from repaconv.stages.shared.input_selection import Split, choose_inputs, fixed_batch, require_same_size, taken_as_scores
from repaconv.stages.shared.lower_precision import loader_for
from repaconv.stages.shared.option_dataclasses import as_image_size
from repaconv.stages.shared.preset_choice import open_deployment
from repaconv.stages.shared.task_choice import settled, task_of, with_labels
from repaconv.stages.tune.candidate_graphs import Candidates
from repaconv.stages.tune.options import TuneOptions
from repaconv.verification.accuracy_budget import Budget
from repaconv.verification.model_runners import FixedBatch, load_onnx

if TYPE_CHECKING:
    from repaconv.engines.contract import Session
    from repaconv.sources.source_model import SourceModel
    from repaconv.tasks.evaluation import Evaluation
    from repaconv.tasks.task_of_network import Choice
    from repaconv.verification.input_batches import Batch, Inputs

SMALLEST_SHARE = 0.001
"""Smallest allowed share for which more images are demanded: 1000 test images are always enough."""
FEW_OTHERS = 0.05
"""FP32 counts as always predicting the same class if at most this share of images has another top-1 prediction."""


class Loss(NamedTuple):
    """The loss of one configuration.

    Attributes:
        disagreement: Share of images with a changed top-1 prediction; None if the configuration does not run.
        link: The comparison with FP32; None if the configuration does not run.
        rejection: Why the configuration is rejected; empty if it is not.
    """

    disagreement: float | None
    link: Link | None
    rejection: str


@dataclass
class LossEvaluation:
    """Compares lower-precision configurations with the allowed loss.

    Attributes:
        graphs: The configurations' graphs, and the images.
        baseline: The configuration whose FP32 graph is the reference.
        allowed: The largest loss against FP32.
        here: Whether the target's own runtime runs here; otherwise ONNX Runtime evaluates the graphs.
        progress: See `Progress`.
        losses: Results so far.
        took: Seconds that each evaluation on the validation split took, including the baseline's.
    """

    graphs: Candidates
    baseline: Deployment
    allowed: Budget
    here: bool
    progress: Progress
    losses: dict[Deployment, Loss] = field(default_factory=dict)
    took: list[tuple[Deployment, float]] = field(default_factory=list)
    _expected: list[Mapping[str, Any]] = field(default_factory=list)

    def allows(self, deployment: Deployment) -> bool:
        """Whether the configuration is FP32, or its loss is within the budget."""
        return deployment.precision == "fp32" or not self.loss(deployment).rejection

    def loss(self, deployment: Deployment) -> Loss:
        """The loss on the validation split; configurations that differ only in threads and streams share one result."""
        key = _without_concurrency(deployment)
        if key not in self.losses:
            self.progress(f"tune: what {deployment.precision} on {deployment.runtime} loses", 0, 0)
            expected = self._fp32_on_validation()
            try:
                with self._timed(deployment):
                    self.losses[key] = self._evaluate(deployment, self._validation, expected)
            except RepaconvError as problem:
                if problem.code.startswith("labels."):  # the labels are wrong, not the configuration
                    raise
                self.losses[key] = Loss(None, None, f"skipped: {problem.message}")
            except Exception as error:  # each runtime has its own exception classes
                self.losses[key] = Loss(None, None, f"skipped: it does not run: {first_line(error)}")
        return self.losses[key]

    def too_slow(self, left_s: float) -> str:
        """Why there is no time to evaluate lower precision, estimated from one FP32 batch; empty if there is time."""
        assert self.graphs.given is not None
        images = len(self.graphs.given.validation) + len(self.graphs.given.test)
        first = next(self.graphs.given.validation_batches())
        right = self._fp32()
        begun = time.monotonic()
        right.run(first.given)
        expected_s = (time.monotonic() - begun) * images / first.count
        if expected_s < left_s:
            return ""
        return (
            f"FP32 alone takes about {expected_s:.0f} s on the {images} images that evaluate it, and there are "
            f"{max(left_s, 0):.0f} s. Give a larger --budget, or fewer images."
        )

    def same_predictions(self) -> str:
        """Describe why these images cannot show a loss; empty if they can, or if any loss is allowed.

        They cannot if FP32 predicts the same class for (nearly) all images of the validation split: a model that
        ignores its input and always predicts this class would be within the budget as well. Other tasks have no top-1
        predictions.
        """
        limits = Budget(*(share if share is not None and share < 1 else None for share in self.allowed))
        if not limits.is_limited or self.graphs.choice is not None:
            return ""
        self.progress("tune: what FP32 predicts", 0, 0)
        predicted, labeled = self._fp32_predictions()
        ((most, count),) = Counter(predicted).most_common(1)
        others = (len(predicted) - count) / len(predicted)
        gain = sum((label == most) - (label == top1) for top1, label in labeled) / max(len(labeled), 1)
        nearly_all = others <= max(FEW_OTHERS, limits.max_disagreement or 0.0)
        if not nearly_all or not Budget(None, limits.max_accuracy_drop).allows(None, gain):
            return ""
        some = f"all {count}" if count == len(predicted) else f"{count} of {len(predicted)}"
        return (
            f"FP32 gives {some} validation images the same top-1 prediction. A model that ignores its input would be "
            "within the budget as well, so that agreement shows nothing. Give images with several predictions, or "
            "--max-disagreement 100% to choose by speed alone."
        )

    def few_results(self) -> str:
        """Why FP32 shows too few results for the allowed share of them, in words; empty if it shows enough.

        A share of objects takes as many objects as a share of top-1 predictions takes images: below 1 / share, one that
        changed is more than allowed, and none that changed shows nothing.
        """
        allowed, evaluation = self.allowed.max_disagreement, self.graphs.evaluation("int8")
        if evaluation is None or allowed is None or allowed >= 1:
            return ""
        self.progress("tune: what FP32 shows", 0, 0)
        for outputs in self._fp32_on_validation():
            evaluation.add(outputs, outputs)
        task, wanted = evaluation.task, _wanted(allowed)
        if task is None or not task.counted or (count := task.count(evaluation.rows)) >= wanted:
            return ""
        return (
            f"FP32 shows {count} {task.counted} in the validation images, and it takes {wanted} to tell whether no "
            f"more than {allowed:.2%} of them change. Give more images, or allow more."
        )

    def _fp32_predictions(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Top-1 predictions of FP32 on the validation split; and those of labeled images, each with its label."""
        predicted: list[int] = []
        labeled: list[tuple[int, int]] = []
        for call, outputs in zip(self._validation, self._fp32_on_validation(), strict=True):
            scores = list(outputs.values())[self.graphs.place_of_scores]
            top1 = scores.reshape(len(scores), -1).argmax(1).tolist()
            predicted += top1
            if call.labels is not None:
                labels = call.labels.tolist()
                labeled += [(mine, label) for mine, label in zip(top1, labels, strict=True) if label >= 0]
        return predicted, labeled

    @property
    def _validation(self) -> list[Batch]:
        assert self.graphs.given is not None
        return list(self.graphs.given.validation_batches())

    def _fp32_on_validation(self) -> list[Mapping[str, Any]]:
        """FP32 outputs on the validation split."""
        if not self._expected:
            with self._timed(self.baseline):
                self._expected = self._fp32_outputs(self._validation)
        return self._expected

    @contextmanager
    def _timed(self, deployment: Deployment) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.took.append((deployment, time.monotonic() - begun))

    def final_loss(self, deployment: Deployment) -> Loss:
        """The loss on the test split, for the configuration that was chosen."""
        assert self.graphs.given is not None
        batches = list(self.graphs.given.test_batches())
        return self._evaluate(deployment, batches, self._fp32_outputs(batches))

    def _fp32_outputs(self, calls: Sequence[Batch]) -> list[Mapping[str, Any]]:
        """FP32 outputs of the baseline's graph."""
        right = self._fp32()
        return [right.run(call.given) for call in calls]

    def _fp32(self) -> FixedBatch:
        """The baseline's graph; the last call of a fixed batch size has fewer images."""
        assert self.graphs.given is not None
        batch = None if self.graphs.given.whole else self.graphs.given.batch
        return FixedBatch(load_onnx(self.graphs.path(self.baseline)), batch)

    def completed_row(self, row: Candidate, left: Mapping[Deployment, str]) -> Candidate:
        """A row of the search, completed with its loss or with the reason why it was skipped."""
        if row.deployment in left:
            return row.model_copy(update={"description": left[row.deployment]})
        loss = self.losses.get(_without_concurrency(row.deployment))
        changed = loss._asdict() | {"description": loss.rejection or row.description} if loss else {}
        return row.model_copy(update=changed)

    def _open(self, deployment: Deployment) -> Session:
        import onnx

        from repaconv.sources.verified_onnx_export import runnable

        if not self.here:
            typed = onnx.load(self.graphs.path(deployment))
            load = loader_for(self.graphs.device_of(deployment).architecture, deployment.precision)
            return load(runnable(typed, deployment.precision).SerializeToString())
        sizes = self.graphs.sizes(deployment.batch)
        device = self.graphs.device_of(deployment)
        return open_deployment(deployment, self.graphs.deployable(deployment), sizes, device, threads=usable_cpus())

    def _evaluate(self, deployment: Deployment, calls: Sequence[Batch], expected: Sequence[Mapping[str, Any]]) -> Loss:
        """Compare the outputs with FP32; a configuration that fails the tolerance of its precision is rejected, too."""
        from repaconv.verification.comparison import Comparison
        from repaconv.verification.tolerances import tolerance

        session, precision = self._open(deployment), deployment.precision
        whole = self.graphs.given is not None and self.graphs.given.whole
        runner = FixedBatch(session, None if whole else deployment.batch)
        allowed = tolerance(precision, decides=self.graphs.source_model.decides)
        if (evaluation := self.graphs.evaluation(precision)) is not None:
            return self._evaluate_in_task(deployment, runner, calls, expected, evaluation)
        compared = Comparison(f"{deployment.runtime}, {precision}", allowed)
        for call, right_outputs in zip(calls, expected, strict=True):
            got = runner.run(call.given)
            place = self.graphs.place_of_scores
            found, right = ({"logits": list(each.values())[place]} for each in (got, right_outputs))
            compared.add(found, right, labels=call.labels)
        (link,), metrics = compared.links(precision, "ONNX, float32"), compared.metrics("logits")
        other = metrics.top1_flips / metrics.images
        text = "" if link.verdict == "passed" else f"{link.verdict} as a link"
        return Loss(other, link, self._too_much(other, link) or text)

    def _evaluate_in_task(
        self,
        deployment: Deployment,
        runner: FixedBatch,
        calls: Sequence[Batch],
        expected: Sequence[Mapping[str, Any]],
        evaluation: Evaluation,
    ) -> Loss:
        """The same by the results of all outputs together, e.g. the objects of a detector."""
        from repaconv.verification.comparison import Comparison
        from repaconv.verification.tolerances import tolerance

        precision, whole = deployment.precision, self.graphs.given is not None and self.graphs.given.whole
        allowed = tolerance(precision, logits=False, decides=self.graphs.source_model.decides)
        compared = Comparison(f"{deployment.runtime}, {precision}", allowed, "", evaluation=evaluation)
        for call, right in zip(calls, expected, strict=True):
            compared.add(runner.run(call.given), right, whole=whole, truths=call.truths)
        links = compared.links(precision, "ONNX, float32")
        link = links[-1]
        if link.task is None:
            return Loss(None, None, f"skipped: {link.note}")
        text = next((f"{each.verdict} as a link" for each in links if each.verdict != "passed"), "")
        return Loss(link.task.disagreement, link, self._too_much(link.task.disagreement, link) or text)

    def _too_much(self, other: float, link: Link) -> str:
        """Which part of the budget is exceeded, in words; empty if none."""
        more = link.accuracy.difference if link.accuracy else None
        if link.task and link.task.accuracy:
            more = -link.task.accuracy.drop
        if self.allowed.allows(other, more):
            return ""
        if self.allowed.max_disagreement is not None and other > self.allowed.max_disagreement:
            return "disagrees with float32 more than allowed"
        if more is None:
            return "no accuracy could be evaluated with these labels"
        metric = link.task.accuracy.metric if link.task and link.task.accuracy else "accuracy"
        return f"loses {-more:.2%} of {metric}, more than allowed"


def final_rows(
    rows: list[Candidate], evaluation: LossEvaluation, baseline: Deployment
) -> tuple[list[Candidate], Loss | None]:
    """The final rows, and the loss of the winner on the test split; None if the winner is FP32.

    A winner that exceeds the budget on the test split is replaced by the fastest FP32 configuration.
    """
    if rows[0].deployment.precision == "fp32":
        return rows, None
    loss = evaluation.final_loss(rows[0].deployment)
    if not loss.rejection:
        return rows, loss
    measured = [row for row in rows[1:] if not row.description.startswith("skipped")]
    exact = [row for row in measured if row.deployment.precision == "fp32"]
    shown = {row.deployment: row.ratio.median for row in exact if row.ratio is not None and row.ratio.low > 1}
    exact = sorted((row for row in exact if row.deployment in shown), key=lambda row: -shown[row.deployment])
    exact += [row for row in rows if row.deployment == baseline]
    given_up = rows[0].model_copy(update={"description": f"{loss.rejection}, on images that chose nothing"})
    others = [row for row in rows[1:] if row is not exact[0]]
    return [exact[0].model_copy(update={"description": "the best exact one"}), given_up, *others], loss


def _without_concurrency(deployment: Deployment) -> Deployment:
    """The configuration without threads and streams, which do not change outputs."""
    return deployment.model_copy(update={"threads": 1, "streams": 1})


def require_evaluation_images(options: TuneOptions, source_model: SourceModel) -> Split | None:
    """The images for lower precision; None if no loss is allowed.

    Raises:
        UsageProblem: If the network has no class scores and no task with an evaluation, an accuracy drop is allowed but
            the images have no labels, or the test split is so small that one image is more than the allowed share.
    """
    budget = Budget.of(options)
    if not budget.is_limited:
        return None
    if (choice := task_of_losses(options, source_model)) is not None:
        return _images_of_task(options, source_model, choice, budget)
    scores = source_model.scores
    if scores is None:
        raise UsageProblem(
            f"a loss is measured by top-1 predictions, and this network outputs {', '.join(source_model.outputs)}: "
            "features, or not one output of shape [images, classes] alone.",
            hint="If one output is class scores: fold --set classes=N. Otherwise leave the budget out; `repaconv "
            "export --precision` evaluates features by cosine similarity.",
            code="tune.features",
        )
    images = chosen_images(options, source_model)
    if scores.assumed and not images.labeled:
        by = taken_as_scores(scores, "its shape, and since top-1 predictions were asked for")
        images = replace(images, labels="; ".join(filter(None, [images.labels, by])))
    given = Split.of(images, batch=fixed_batch(source_model)).halved()
    for name, share in budget._asdict().items():
        if share is not None:
            _require_enough(given, name, share)
    return given


def chosen_images(options: TuneOptions, source_model: SourceModel) -> Inputs:
    """Return the images or inputs of the options, in the requested image size.

    Raises:
        UsageProblem: If they are of another size; or see `choose_inputs`.
    """
    size = as_image_size(options.image_size)
    given = choose_inputs(
        source_model, inputs=options.inputs, images=options.images, classes=options.classes, size=size
    )
    if size:
        require_same_size(given, size)
    return given


def task_of_losses(options: TuneOptions, source_model: SourceModel) -> Choice | None:
    """The task in which losses are evaluated; None if they are evaluated by class scores, or the task is unknown."""
    from repaconv.tasks.evaluation import TASKS

    choice = task_of(source_model, options.task)
    if choice.task == "classify" or (choice.task is None and source_model.scores is not None):
        return None
    choice = settled(choice, source_model)
    if size := as_image_size(options.image_size):
        choice = choice._replace(about=replace(choice.about, size=size))
    return choice if choice.task in TASKS else None


def _images_of_task(options: TuneOptions, source_model: SourceModel, choice: Choice, budget: Budget) -> Split:
    """The images, with labels of the task if the user gave some."""
    given = chosen_images(options, source_model)
    if options.labels:
        given = with_labels(
            source_model, given, Path(options.labels), choice, images=Path(options.images) if options.images else None
        )
    elif budget.max_accuracy_drop is not None:
        raise UsageProblem(
            f"{given.name} have no labels, and the accuracy of {choice.task} is against labels.",
            hint="Give --labels. --max-disagreement needs none.",
            code="tune.no-labels",
        )
    split = Split.of(given, batch=fixed_batch(source_model)).halved()
    for name, share in budget._asdict().items():
        if share is not None:
            _require_enough_of_task(split, name, share)
    return split


def _require_enough_of_task(given: Split, name: str, allowed: float) -> None:
    """Refuse too few images for an interval, or too few labeled images to resolve the allowed share.

    If any loss is allowed, one image in each split is enough.
    """
    from repaconv.tasks.evaluation import LEAST_LABELED

    parts, wanted, of = (given.validation, given.test), LEAST_LABELED, "images"
    counts = [len(places) for places in parts]
    if name == "max_accuracy_drop":
        counts, of = [given.labeled_count(places) for places in parts], "labeled images"
        wanted = max(wanted, _wanted(allowed))
        _require_labels(given, min(counts))
    wanted = wanted if allowed < 1 else 1
    if min(counts) < wanted:
        raise UsageProblem(
            f"{given.description}: {min(counts)} {of} cannot tell whether no more than {allowed:.2%} is lost.",
            hint=f"Give {wanted} {of} or more for validation and as many for evaluation "
            f"({2 * wanted + len(given.calibration)} in all), or allow more.",
            code="tune.too-few",
        )


def _require_labels(given: Split, count: int) -> None:
    """Refuse images without labels; ``count`` is the number of labeled images in the split with the fewest."""
    if given.test and not count:
        raise UsageProblem(
            f"{given.given.name} have no labels, and accuracy is of labeled images.",
            hint="Give a folder with one subfolder per class, 'labels' in the .npz, or --labels of the network's task. "
            "--max-disagreement needs none.",
            code="tune.no-labels",
        )


def _wanted(allowed: float) -> int:
    """Number of images of which a single one is at most the allowed share."""
    return ceil(1 / max(allowed, SMALLEST_SHARE))


def _require_enough(given: Split, name: str, allowed: float) -> None:
    """Refuse a test split too small to resolve the allowed loss; ``name`` is the option that allows it."""
    wanted, count = _wanted(allowed), len(given.test)
    if name == "max_accuracy_drop":
        count = min(given.labeled_count(places) for places in (given.test, given.validation))
        _require_labels(given, count)
    if count < wanted:
        what = "change their top-1 prediction" if name == "max_disagreement" else "fewer are right"
        raise UsageProblem(
            f"{given.description}: they cannot tell whether no more than {allowed:.2%} {what}.",
            hint=f"Give {2 * wanted + len(given.calibration)} images or more, or allow more.",
            code="tune.too-few",
        )
