"""`finetune`: train a converted network, or an untrained training-time network, on the outputs of the original one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import run_folder
from repaconv.core.errors import Refused, UsageProblem, did_you_mean
from repaconv.core.file_replacement import replace_artifact, require_replaceable, write_payload
from repaconv.core.files import is_unchanged, lock_folder, payload_of, read_artefact, stage_of
from repaconv.core.progress import Progress, silent
from repaconv.core.sharded_checkpoint import checkpoint_at
from repaconv.results import ConvertArtefact, FinetuneArtefact
from repaconv.stages.convert.image_and_option_checks import read_images
from repaconv.stages.convert.options import FinetuneOptions
from repaconv.stages.fold.checkpoint_fold import fold_file_by
from repaconv.stages.fold.options import FoldOptions
from repaconv.stages.shared.option_dataclasses import by_name
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.stages.shared.safetensors_weights import write_checkpoint

if TYPE_CHECKING:
    from torch import nn

    from repaconv.checkpoints import Checkpoint
    from repaconv.conversion.conversion_evaluation import Evaluation
    from repaconv.conversion.finetuning.original_networks import Original
    from repaconv.conversion.finetuning.training_loop import Training, TrainingSettings
    from repaconv.conversion.finetuning.training_plan import TrainingPlan
    from repaconv.conversion.image_splits import ImageSplits, Split
    from repaconv.verification.accuracy_budget import Budget
    from repaconv.verification.input_batches import Inputs

BFLOAT16_WIDTH = 256
"""Smallest width in channels for bfloat16 products: steps are then 1.6 to 2 times as fast (EPYC with AVX-512 BF16, one
thread). From 96 channels on the gain is 1.5, below there is none; such networks train in minutes anyway."""


def finetune_by(
    options: FinetuneOptions, run: str | Path | None = None, *, progress: Progress = silent
) -> FinetuneArtefact:
    """Train a converted network, or an untrained training-time network, and fold the result.

    The network learns from the outputs of the network before conversion, without labels. It trains on the calibration
    split. The validation split selects the epoch, the start included. The test split measures the loss of that epoch. A
    checkpoint is kept after every epoch: an interrupted training resumes with the same command, with bit-identical
    results.

    Args:
        run: The folder that `convert` wrote; the newest run when None.
        options: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        Refused: If the folder has no conversion, its original checkpoint is missing, or the images cannot be used.
        UsageProblem: If the options do not fit this network.
    """
    plan = _plan(options, Path(run) if run is not None else None)
    finetuned, settings = plan.run.folder / run_folder.FINETUNED, plan.done.settings
    with lock_folder(plan.run.folder):
        trained = plan.before if plan.before and plan.before.complete else None  # only the fold was interrupted
        artefact = trained or _write_best(plan, _train(plan, progress))
        folded = FoldOptions(method=plan.done.method, settings=settings, out=str(plan.run.folder), force=True)
        done = fold_file_by(folded, finetuned, overrule=False, progress=progress)
    wrote = [plan.run.folder / run_folder.FINETUNE_JSON, finetuned, *map(Path, done.output_files)]
    return with_files(artefact, [plan.source], wrote)


finetune = by_name(finetune_by, FinetuneOptions)


class _Plan(NamedTuple):
    """The resolved options."""

    options: FinetuneOptions
    done: ConvertArtefact
    source: Path
    found: Checkpoint
    course: TrainingPlan
    parent: Checkpoint
    original: Original
    teacher: Checkpoint
    taught_by: nn.Module
    given: Inputs
    splits: ImageSplits
    digest: str
    pace: TrainingSettings
    run: run_folder.Run
    before: FinetuneArtefact | None

    @property
    def budget(self) -> Budget:
        """The loss budget of the conversion."""
        from repaconv.verification.accuracy_budget import Budget

        return Budget.of(self.done)

    def evaluation_on(self, part: Split) -> Evaluation:
        """Evaluates against the original network on these images."""
        from repaconv.conversion.conversion_evaluation import Evaluation

        return Evaluation(self.original.net, part, logits=self.original.reading.config.classes > 0)


def _plan(options: FinetuneOptions, given: Path | None) -> _Plan:
    """Check everything that may be refused before training."""
    from repaconv.checkpoints import read_checkpoint
    from repaconv.conversion.conversion_option_parsing import require_neighbors
    from repaconv.conversion.finetuning.original_networks import read_original
    from repaconv.conversion.finetuning.training_architectures import training_plan_of
    from repaconv.conversion.finetuning.training_loop import images_hash
    from repaconv.conversion.image_splits import role_in_training, split_images
    from repaconv.verification.accuracy_budget import Budget

    source = _conversion_run(given)
    done = read_artefact(source.convert_json, ConvertArtefact)
    parent, started = _parent(done), source.payload(done.payload) if done.payload else Path(done.parent.path)
    # token merging keeps the weights of the original network
    found = read_checkpoint(started, None, done.payload.sha256) if done.payload else parent
    original = read_original(parent, dict(done.parent_settings))
    course = training_plan_of(done.method, found, done.settings)
    inputs = read_images(options, original.reading)
    teacher, taught_by = _teacher(options, parent, original)
    splits = split_images(inputs, options.samples, role_in_training)
    if Budget.of(done).is_limited and not original.reading.config.classes:
        require_neighbors(splits)
    run = run_folder.Run(
        Path(options.out) if options.out else source.folder.with_name(f"{source.folder.name}-finetuned")
    )
    plan = _Plan(
        options, done, started, found, course, parent, original, teacher, taught_by, inputs,
        splits, images_hash(splits), _hyperparameters(options, course), run, None,
    )  # fmt: skip
    return plan._replace(before=_interrupted_training(plan))


def _conversion_run(given: Path | None) -> run_folder.Run:
    """The folder of a conversion; the newest run by default."""
    if given is None and run_folder.LATEST.is_file():
        given = run_folder.OUT / run_folder.LATEST.read_text("utf-8").strip()
    if given is None or stage_of(run_folder.Run(given).convert_json) != "convert":
        raise UsageProblem(
            f"{'there is no run yet' if given is None else f'{given} is not a conversion: it has no convert.json'}.",
            hint=(
                "Convert a network first: repaconv convert CKPT ..., with --to training-form for methods that need "
                "training."
            ),
            code="finetune.no-conversion",
        )
    return run_folder.Run(given)


def _parent(done: ConvertArtefact) -> Checkpoint:
    """The checkpoint before conversion.

    Raises:
        Refused: If the file is missing or has changed.
    """
    from repaconv.checkpoints import read_checkpoint

    if not Path(done.parent.path).is_file():
        raise Refused(
            f"the network before conversion, {done.parent.path}, is missing; the result is evaluated against it.",
            hint="Put the file back, or convert again from where it is now.",
            code="finetune.parent",
        )
    return read_checkpoint(done.parent.path, done.parent.weights, done.parent.sha256)


def _teacher(options: FinetuneOptions, parent: Checkpoint, original: Original) -> tuple[Checkpoint, nn.Module]:
    """The checkpoint and the module whose outputs are learned.

    Raises:
        Refused: If its number of classes, its image channels or its image size differ from those of the network.
    """
    from repaconv.checkpoints import read_checkpoint
    from repaconv.conversion.finetuning.original_networks import read_original

    if options.teacher is None:
        return parent, original.net
    found = read_checkpoint(checkpoint_at(Path(options.teacher)))
    teacher = read_original(found, dict(options.teacher_settings or {}))
    own, other = original.reading.config, teacher.reading.config
    sizes = [getattr(config, "image_size", None) for config in (own, other)]
    if own.classes != other.classes or own.in_channels != other.in_channels or (all(sizes) and sizes[0] != sizes[1]):
        raise Refused(
            f"{options.teacher} cannot teach this network: it has {other.classes} classes and {other.in_channels} "
            f"image channels, not {own.classes} and {own.in_channels}, or takes another image size.",
            hint="Leave --teacher out to learn from the network before conversion.",
            code="finetune.teacher",
        )
    return found, teacher.net


def _hyperparameters(options: FinetuneOptions, course: TrainingPlan) -> TrainingSettings:
    from repaconv.conversion.finetuning.training_loop import TrainingSettings, has_bfloat16

    if options.precision not in ("auto", "fp32", "bf16"):
        raise UsageProblem(
            f"--precision {options.precision} is unknown.",
            hint=f"{did_you_mean(options.precision, ('auto', 'fp32', 'bf16'))}Known: auto, fp32, bf16.",
            code="finetune.precision",
        )
    if options.lr is not None and not 0 < options.lr < 1:
        raise UsageProblem(f"--lr {options.lr:g} is not between 0 and 1.", hint="E.g. 5e-4.", code="finetune.rate")
    config = course.reading.config
    wide = max(getattr(config, "widths", None) or (config.width,)) >= BFLOAT16_WIDTH
    lower = options.precision == "bf16" or (options.precision == "auto" and wide and has_bfloat16())
    return TrainingSettings(
        options.epochs, options.batch, options.grad_accum_steps, options.lr or course.rate, options.seed, lower
    )


def _interrupted_training(plan: _Plan) -> FinetuneArtefact | None:
    """Return the interrupted training to resume, or the finished one that is not folded yet. Nothing is written yet.

    None if its file is missing: then training starts again.

    Raises:
        Refused: If the folder belongs to something else, or contains another interrupted training.
        UsageProblem: If the trained network was changed.
    """
    slot = plan.run.folder / run_folder.FINETUNE_JSON
    if stage_of(slot) != "finetune":
        if plan.run.folder.exists():
            run_folder.prepare_run(plan.run.folder / run_folder.FINETUNED, "", plan.run.folder, force=False)
        require_replaceable(
            slot, "finetune", plan.run.folder / run_folder.FINETUNED, plan.run.folder / run_folder.TRAINING_STATE
        )
        return None
    require_replaceable(
        slot, "finetune", plan.run.folder / run_folder.FINETUNED, plan.run.folder / run_folder.TRAINING_STATE
    )
    before = read_artefact(slot, FinetuneArtefact)
    kept = before.payload or before.other_files[0]
    if (
        plan.options.restart
        or _is_folded(plan.run, before)
        or not is_unchanged(plan.run.folder / kept.path, kept.sha256)
    ):
        return None
    known = (plan.options.words(), plan.found.origin.sha256, plan.digest, made_by("torch"))
    same = (before.options, before.start.sha256, before.images_sha256, before.made_by) == known
    if before.payload is not None:
        return before if same else None
    if not same:
        raise Refused(
            f"{plan.run.folder} contains an interrupted training with other options or images, after "
            f"{len(before.epochs) - 1} of {before.planned_epochs} epochs.",
            hint=(
                "Repeat its command to resume it, start from the beginning with --restart, or give another folder with "
                "-o."
            ),
            code="finetune.other",
        )
    return before


def _is_folded(run: run_folder.Run, trained: FinetuneArtefact) -> bool:
    """Whether the run's fold is of the trained network."""
    if trained.payload is None or stage_of(run.fold_json) != "fold":
        return False
    return run_folder.fold_of(run).origin.sha256 == trained.payload.sha256


def _train(plan: _Plan, progress: Progress) -> Training:
    """Train all epochs, and save the state after each."""
    from repaconv.conversion.finetuning import training_loop
    from repaconv.conversion.finetuning.training_loop import Training, TrainingData

    progress("evaluate the start", 0, 0)
    taught = TrainingData(
        plan.taught_by,
        plan.splits.calibration.images,
        plan.evaluation_on(plan.splits.validation),
        plan.options.teacher is None,
    )
    training = Training(plan.course, taught, plan.pace)
    state = plan.run.folder / run_folder.TRAINING_STATE
    if plan.before:
        training.load(training_loop.load(plan.run.payload(plan.before.other_files[0])), list(plan.before.epochs))

    def keep() -> None:
        write_payload(state, lambda path: training_loop.save(training.state(), path))
        kept = _artefact(plan, training, other_files=(payload_of(state, plan.run.folder),))
        replace_artifact(plan.run.folder / run_folder.FINETUNE_JSON, kept)

    training.train(progress, keep)
    return training


def _artefact(plan: _Plan, training: Training, **more: Any) -> FinetuneArtefact:
    return FinetuneArtefact(
        made_by=made_by("torch"),
        **{"verdict": "not verified", **more},
        options=plan.options.words(),
        start=plan.found.origin,
        parent=plan.parent.origin,
        parent_settings=plan.done.parent_settings,
        settings=plan.done.settings,
        method=plan.done.method,
        teacher=plan.teacher.origin,
        inputs=plan.given.name,
        images=plan.splits.share,
        labels=plan.given.labels,
        images_sha256=plan.digest,
        precision="bf16" if plan.pace.lower else "fp32",
        lr=plan.pace.rate,
        planned_epochs=plan.pace.epochs,
        epochs=tuple(training.epochs),
        best_epoch=training.best_epoch,
        **plan.budget._asdict(),
    )


def _write_best(plan: _Plan, training: Training) -> FinetuneArtefact:
    """Write the best epoch as a checkpoint, and evaluate it on the test split."""
    evaluation, net = plan.evaluation_on(plan.splits.test), training.finished()
    after, start = evaluation.link(net, plan.budget), evaluation.link(training.started(), plan.budget)
    finetuned = plan.run.folder / run_folder.FINETUNED
    described = {**plan.course.metadata, "converted_from": plan.parent.origin.sha256}
    write_checkpoint(finetuned, {**net.state_dict(), **plan.course.besides}, described)
    done = {"evaluation": after, "start_evaluation": start, "verdict": after.verdict}
    artefact = _artefact(plan, training, **done, payload=payload_of(finetuned, plan.run.folder))
    return replace_artifact(plan.run.folder / run_folder.FINETUNE_JSON, artefact)
