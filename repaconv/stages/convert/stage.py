"""`convert`: make a plain vision transformer faster without training. Unlike `fold`, it is lossy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import run_folder
from repaconv.core.errors import Refused
from repaconv.core.file_replacement import replace_artifact, require_replaceable, write_payload
from repaconv.core.files import lock_folder, payload_of, read_artefact, stage_of
from repaconv.core.progress import Progress, silent
from repaconv.core.sharded_checkpoint import resolved_checkpoint
from repaconv.results import ConvertArtefact
from repaconv.stages.convert.image_and_option_checks import TRAINING_FORM, read_images, require_kernel, require_method
from repaconv.stages.convert.options import ConvertOptions
from repaconv.stages.convert.speed_target import (
    require_speed_target,
    search_block_count,
    search_schedule,
    speed_search,
)
from repaconv.stages.convert.tradeoff import ConversionSource, MeasuredConversion, measure_tradeoff
from repaconv.stages.fold.checkpoint_fold import fold_file_by
from repaconv.stages.fold.options import FoldOptions
from repaconv.stages.shared.fetched_files import local_weights
from repaconv.stages.shared.option_dataclasses import by_name
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.stages.shared.safetensors_weights import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from repaconv.checkpoints import Checkpoint
    from repaconv.conversion.attention_to_convolution import ConvertedNetwork
    from repaconv.conversion.finetuning.original_networks import Original
    from repaconv.conversion.image_splits import ImageSplits
    from repaconv.conversion.kernel_fitting import ConversionSettings
    from repaconv.conversion.plain_vit import PlainViT
    from repaconv.engines.targets import Target
    from repaconv.results import Link, Trade
    from repaconv.verification.accuracy_budget import Budget
    from repaconv.verification.input_batches import Inputs


def convert_by(options: ConvertOptions, checkpoint: str | Path, *, progress: Progress = silent) -> ConvertArtefact:
    """Convert a plain vision transformer by calibration alone, and fold the result.

    The run's exact links compare with the converted network. The loss compares with the original network, on the test
    split. Activations of the calibration images are held in memory.

    Args:
        checkpoint: A plain vision transformer, or its address, see `repaconv.fetch`.
        options: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        Refused: If the network is no plain vision transformer, or there are too few or unreadable images.
        UsageProblem: If the options do not fit this network.
        GateFailed: If no conversion meets the budget.
    """
    checkpoint = local_weights(checkpoint)
    plan = _plan(options, checkpoint)
    with lock_folder(plan.run.folder):
        if options.to:
            wrote = [plan.run.convert_json, plan.run.folder / run_folder.CONVERTED]
            return with_files(_make_training_network(plan, progress), [Path(checkpoint)], wrote)
        artefact = (_merge_tokens if options.method == "pyra" else _replace_attention)(plan, progress)
        source = plan.run.folder / run_folder.CONVERTED if artefact.payload else Path(checkpoint)
        folded = FoldOptions(
            method=options.method, settings=artefact.settings, out=str(plan.run.folder), force=options.force
        )
        weights = {} if artefact.payload else {"weights": options.weights}
        done = fold_file_by(FoldOptions(**{**vars(folded), **weights}), source, progress=progress)
    made = [plan.run.folder / payload.path for payload in (artefact.payload, *artefact.other_files) if payload]
    return with_files(artefact, [Path(checkpoint)], [plan.run.convert_json, *made, *map(Path, done.output_files)])


convert = by_name(convert_by, ConvertOptions)


class _Plan(NamedTuple):
    """The resolved options."""

    options: ConvertOptions
    found: Checkpoint
    original: Original
    given: Inputs
    splits: ImageSplits
    run: run_folder.Run
    device: Target | None

    @property
    def plain(self) -> PlainViT:
        """The original network, which is a plain vision transformer unless `--to training-form` is given."""
        from repaconv.conversion.plain_vit import PlainViT

        assert isinstance(self.original, PlainViT)
        return self.original

    @property
    def common(self) -> dict[str, Any]:
        """Artifact fields that all methods share."""
        return {
            "made_by": made_by("torch"),
            "options": self.options.words(),
            "parent": self.found.origin,
            "parent_settings": dict(self.options.settings or {}),
            "method": self.options.method,
            "inputs": self.given.name,
            "images": self.splits.share,
            "labels": self.given.labels,
        }


def _plan(options: ConvertOptions, checkpoint: Path) -> _Plan:
    """Check everything that may be refused before anything is fitted."""
    require_method(options)
    require_kernel(options.kernel)
    device = require_speed_target(options)
    from repaconv.checkpoints import read_checkpoint
    from repaconv.conversion.finetuning.original_networks import read_original
    from repaconv.conversion.image_splits import split_images
    from repaconv.conversion.plain_vit import PlainViT, read_plain

    found = read_checkpoint(checkpoint, options.weights)
    settings = dict(options.settings or {})
    original = read_original(found, settings) if options.to else PlainViT.of(read_plain(found, settings))
    given = read_images(options, original.reading)
    run = _output_run(options, checkpoint, found.origin.sha256)
    return _Plan(options, found, original, given, split_images(given, options.samples), run, device)


def _output_run(options: ConvertOptions, checkpoint: Path, sha256: str) -> run_folder.Run:
    """Return the run folder; refuse one that contains files of something else. Nothing is written yet."""
    usual = run_folder.OUT / f"{run_folder.utf8_stem(checkpoint)}-{options.method}"
    run = run_folder.Run(Path(options.out) if options.out else usual)
    if stage_of(run.convert_json) == "convert":
        before = read_artefact(run.convert_json, ConvertArtefact).parent
        same = sha256 == before.sha256 or str(resolved_checkpoint(checkpoint)) == before.path
        if not options.force and not same:
            raise Refused(
                f"{run.folder} contains the conversion of another file, {before.path}.",
                hint="Give another folder with -o, or replace it with --force.",
                code="run.other-checkpoint",
            )
    elif run.folder.exists():  # the fold that follows makes the same check
        own = options.method == "dwconv"
        source, known = (run.folder / run_folder.CONVERTED, "") if own else (checkpoint, sha256)
        run_folder.prepare_run(source, known, run.folder, force=options.force)
    require_replaceable(
        run.convert_json,
        "convert",
        *(run.folder / name for name in (*run_folder.OF_CONVERT[1:], run_folder.UNCONVERTED)),
    )
    return run


def _replace_attention(plan: _Plan, progress: Progress) -> ConvertArtefact:
    from repaconv.conversion import conversion_option_parsing
    from repaconv.conversion.attention_to_convolution import convert_attention, settings_for
    from repaconv.conversion.conversion_evaluation import Evaluation

    options, plain, config = plan.options, plan.plain, plan.plain.config
    how, blocks = (
        conversion_option_parsing.read_how(options, config),
        conversion_option_parsing.read_blocks_or_heads(options, plain),
    )
    conversion_option_parsing.require_before(blocks, how, plain.heads)
    conversion_option_parsing.require_enough(plan.splits, config.grid[0] * config.grid[1], config.width)
    choosing = blocks.by_budget and options.speedup is None
    budget = conversion_option_parsing.read_budget(options, plan.splits, classes=config.classes, choosing=choosing)
    with speed_search(options.speedup, plan.device, plan.plain.reading, plan.run.folder, progress) as search:
        if search:
            blocks = conversion_option_parsing.RequestedBlocks(
                enough=partial(search_block_count, search, plain, how, plan.splits)
            )
        found = convert_attention(plain, how, blocks, options.criterion, plan.splits, budget, progress)
        speed_fields = search.artefact_fields(found.tried[-1].blocks, "blocks", plan.run.folder) if search else {}
    evaluation = Evaluation(plain.net, plan.splits.test, logits=config.classes > 0).link(found.net, budget)
    taken = MeasuredConversion(how.kind, (found.reading, "dwconv"), found.tried[-1], how.schedule)
    trade = _measure_tradeoff(plan, taken, how, found.order, progress)
    _write(plan, found)
    return replace_artifact(
        plan.run.convert_json,
        ConvertArtefact(
            **plan.common,
            **_evaluation_fields(evaluation, budget),
            settings=settings_for(options.settings or {}),
            kind=how.kind,
            kernel=None if how.kind == "static" else how.kernel,
            fit=how.fit,
            criterion="" if blocks.named else options.criterion,
            scores=found.scores.blocks,
            ranking=found.order,
            blocks=found.tried[-1].blocks,
            heads=found.heads,
            tried=found.tried,
            refitted=found.refitted,
            condition=found.condition,
            ridge=found.ridge,
            schedule=how.schedule,
            payload=payload_of(plan.run.folder / run_folder.CONVERTED, plan.run.folder),
            speed_target=speed_fields.get("speed_target"),
            trade=trade,
            other_files=(
                payload_of(plan.run.folder / run_folder.SCORES, plan.run.folder),
                *speed_fields.get("other_files", ()),
            ),
        ),
    )


def _write(plan: _Plan, found: ConvertedNetwork) -> None:
    """Write the converted checkpoint, and a drawing of the scores."""
    from repaconv.conversion.attention_to_convolution import metadata
    from repaconv.conversion.head_scores import scores_svg

    described = metadata(found.reading, plan.found.origin, plan.found.record)
    write_checkpoint(plan.run.folder / run_folder.CONVERTED, found.reading.tensors, described)
    title = f"{run_folder.title_of(Path(plan.found.origin.path))}: mean attention around the query, by block and head"
    write_payload(plan.run.folder / run_folder.SCORES, scores_svg(found.scores, title))


def _merge_tokens(plan: _Plan, progress: Progress) -> ConvertArtefact:
    """Merge tokens; the weights do not change."""
    from repaconv.conversion import conversion_option_parsing
    from repaconv.conversion.conversion_evaluation import Evaluation
    from repaconv.conversion.kernel_fitting import ConversionSettings
    from repaconv.conversion.token_merging import schedule_of, schedule_text, with_merging
    from repaconv.methods.pyra import METHOD

    options, config = plan.options, plan.plain.config
    budget = conversion_option_parsing.read_budget(options, plan.splits, classes=config.classes, choosing=False)
    given = dict(options.settings or {})
    evaluator = Evaluation(plan.plain.net, plan.splits.validation, logits=config.classes > 0)
    with speed_search(options.speedup, plan.device, plan.plain.reading, plan.run.folder, progress) as search:
        if search:
            text = schedule_text(search_schedule(search, plan.plain, plan.found, given, evaluator))
        else:
            text = schedule_of(options.schedule, options.keep, config)
        settings = {**given, "schedule": text}
        net, schedule = with_merging(plan.found, settings)
        speed_fields = search.artefact_fields(schedule, "schedule", plan.run.folder) if search else {}
    evaluation = Evaluation(plan.plain.net, plan.splits.test, logits=config.classes > 0).link(net, budget)
    taken = MeasuredConversion(
        "merged", (METHOD.read(plan.found, settings), METHOD.name), evaluator.tried(net, (), budget), schedule
    )
    return replace_artifact(
        plan.run.convert_json,
        ConvertArtefact(
            **plan.common,
            **_evaluation_fields(evaluation, budget),
            settings=settings,
            kind="merged",
            kernel=None,
            fit="",
            criterion="",
            schedule=schedule,
            payload=None,
            trade=_measure_tradeoff(plan, taken, ConversionSettings(), (), progress),
            **speed_fields,
        ),
    )


def _measure_tradeoff(
    plan: _Plan, taken: MeasuredConversion, how: ConversionSettings, options: Sequence[int], progress: Progress
) -> Trade | None:
    """Return the trade-off with the other conversions if it was requested."""
    from repaconv.conversion.block_selection import SelectionData

    if not plan.options.curve or plan.device is None:
        return None
    ground = ConversionSource(plan.found, dict(plan.options.settings or {}), SelectionData.of(plan.plain, plan.splits))
    return measure_tradeoff(ground, plan.device, options, how, taken, plan.run.folder, progress)


def _make_training_network(plan: _Plan, progress: Progress) -> ConvertArtefact:
    """Make the untrained training-time network of a method; it is evaluated but not folded."""
    from repaconv.conversion import conversion_option_parsing
    from repaconv.conversion.conversion_evaluation import Evaluation
    from repaconv.conversion.finetuning.training_architectures import training_form

    options, original, classes = plan.options, plan.original, plan.original.reading.config.classes
    budget = conversion_option_parsing.read_budget(options, plan.splits, classes=classes, choosing=False)
    formed = training_form(options, original, plan.found, plan.splits, progress)
    evaluation = Evaluation(original.net, plan.splits.test, logits=classes > 0).link(formed.net, budget)
    described = {**formed.metadata, "converted_from": plan.found.origin.sha256}
    write_checkpoint(plan.run.folder / run_folder.CONVERTED, formed.tensors, described)
    artefact = replace_artifact(
        plan.run.convert_json,
        ConvertArtefact(
            **plan.common,
            **{
                **_evaluation_fields(evaluation, budget),
                "verdict": "not verified",
            },  # an untrained network is not held to the budget
            settings=dict(formed.settings),
            kind=TRAINING_FORM,
            kernel=options.kernel if options.method == "dwconv" else None,
            fit="",
            criterion="",
            description=formed.description,
            payload=payload_of(plan.run.folder / run_folder.CONVERTED, plan.run.folder),
        ),
    )
    run_folder.set_newest(plan.run)
    return artefact


def _evaluation_fields(evaluation: Link, budget: Budget) -> dict[str, Any]:
    """Artifact fields of the evaluation on the test split."""
    return {"evaluation": evaluation, "verdict": evaluation.verdict, **budget._asdict()}
