"""convert: a plain vision transformer to a faster one without training. It is lossy; fold is not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv import runs
from repaconv.artefacts import ConvertArtefact
from repaconv.errors import Refused
from repaconv.files import alone_in, payload_of, read_artefact, stage_of
from repaconv.orders.converting import ConvertOrder
from repaconv.orders.knobs import by_name
from repaconv.orders.stages import FoldOrder
from repaconv.pipeline.checkpoint_folding import fold_file_by
from repaconv.progress import Progress, silent
from repaconv.replacing import put, require_ours, write_payload
from repaconv.steps.addresses import weights_here
from repaconv.steps.calibrating import TRAINING_FORM, calibration, require_kernel, require_method
from repaconv.steps.common import made_by, with_files
from repaconv.steps.pace import require_pace
from repaconv.steps.racing import enough_blocks, race_of, schedule_at
from repaconv.steps.trading import Choice, Ground, traded
from repaconv.steps.weights import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from repaconv.artefacts import Link, Trade
    from repaconv.checkpoint import Checkpoint
    from repaconv.converting.convolving import Found
    from repaconv.converting.fitting import How
    from repaconv.converting.parting import Parted
    from repaconv.converting.plain import Plain
    from repaconv.proof.budget import Budget
    from repaconv.proof.data import Inputs
    from repaconv.targets import Target
    from repaconv.training.originals import Original


def convert_by(order: ConvertOrder, checkpoint: str | Path, *, progress: Progress = silent) -> ConvertArtefact:
    """Convert a plain vision transformer by calibration alone, and fold the result.

    The run's exact links compare with the converted network. The loss compares with the original network, on the test
    split. Activations of the calibration images are held in memory.

    Args:
        checkpoint: A plain vision transformer, or its address, see `repaconv.fetch`.
        order: The options.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        Refused: If the network is no plain vision transformer, or there are too few or unreadable images.
        UsageProblem: If the options do not fit this network.
        GateFailed: If no conversion meets the budget.
    """
    checkpoint = weights_here(checkpoint)
    plan = _plan(order, checkpoint)
    with alone_in(plan.run.folder):
        if order.to:
            wrote = [plan.run.convert_json, plan.run.folder / runs.CONVERTED]
            return with_files(_formed(plan, progress), [Path(checkpoint)], wrote)
        artefact = (_merged if order.method == "pyra" else _convolved)(plan, progress)
        source = plan.run.folder / runs.CONVERTED if artefact.payload else Path(checkpoint)
        folded = FoldOrder(method=order.method, settings=artefact.settings, out=str(plan.run.folder), force=order.force)
        weights = {} if artefact.payload else {"weights": order.weights}
        done = fold_file_by(FoldOrder(**{**vars(folded), **weights}), source, progress=progress)
    made = [plan.run.folder / payload.path for payload in (artefact.payload, *artefact.other_files) if payload]
    return with_files(artefact, [Path(checkpoint)], [plan.run.convert_json, *made, *map(Path, done.output_files)])


convert = by_name(convert_by, ConvertOrder)


class _Plan(NamedTuple):
    """What an order comes to."""

    order: ConvertOrder
    found: Checkpoint
    original: Original
    given: Inputs
    parted: Parted
    run: runs.Run
    device: Target | None

    @property
    def plain(self) -> Plain:
        """The original, which is a plain vision transformer wherever nothing is to be trained."""
        from repaconv.converting.plain import Plain

        assert isinstance(self.original, Plain)
        return self.original

    @property
    def common(self) -> dict[str, Any]:
        """What an artefact has of either method."""
        return {
            "made_by": made_by("torch"),
            "options": self.order.words(),
            "parent": self.found.origin,
            "parent_settings": dict(self.order.settings or {}),
            "method": self.order.method,
            "inputs": self.given.name,
            "images": self.parted.share,
            "labels": self.given.labels,
        }


def _plan(order: ConvertOrder, checkpoint: Path) -> _Plan:
    """What may be refused before anything is fitted."""
    require_method(order)
    require_kernel(order.kernel)
    device = require_pace(order)
    from repaconv.checkpoint import read_checkpoint
    from repaconv.converting.parting import part
    from repaconv.converting.plain import Plain, read_plain
    from repaconv.training.originals import read_original

    found = read_checkpoint(checkpoint, order.weights)
    settings = dict(order.settings or {})
    original = read_original(found, settings) if order.to else Plain.of(read_plain(found, settings))
    given = calibration(order, original.reading)
    run = _prepared(order, checkpoint, found.origin.sha256)
    return _Plan(order, found, original, given, part(given, order.samples), run, device)


def _prepared(order: ConvertOrder, checkpoint: Path, sha256: str) -> runs.Run:
    """The folder, if nothing of somebody else's is in it; nothing is written yet."""
    run = runs.Run(Path(order.out) if order.out else runs.OUT / f"{checkpoint.stem}-{order.method}")
    if stage_of(run.convert_json) == "convert":
        before = read_artefact(run.convert_json, ConvertArtefact).parent
        if not order.force and sha256 != before.sha256 and str(checkpoint.resolve()) != before.path:
            raise Refused(
                f"{run.folder} contains the conversion of another file, {before.path}.",
                hint="Give another folder with -o, or replace it with --force.",
                code="run.other-checkpoint",
            )
    elif run.folder.exists():  # as the fold will look at it
        own = order.method == "dwconv"
        source, known = (run.folder / runs.CONVERTED, "") if own else (checkpoint, sha256)
        runs.prepare_run(source, known, run.folder, force=order.force)
    require_ours(run.convert_json, "convert", *(run.folder / name for name in (*runs.OF_CONVERT[1:], runs.UNCONVERTED)))
    return run


def _convolved(plan: _Plan, progress: Progress) -> ConvertArtefact:
    """Attention to convolution."""
    from repaconv.converting import asked
    from repaconv.converting.convolving import convolved, settings_for
    from repaconv.converting.judging import Judge

    order, plain, config = plan.order, plan.plain, plan.plain.config
    how, blocks = asked.read_how(order, config), asked.read_which(order, plain)
    asked.require_before(blocks, how, plain.heads)
    asked.require_enough(plan.parted, config.grid[0] * config.grid[1], config.width)
    choosing = blocks.by_budget and order.speedup is None
    budget = asked.read_budget(order, plan.parted, classes=config.classes, choosing=choosing)
    with race_of(order.speedup, plan.device, plan.plain.reading, plan.run.folder, progress) as race:
        if race:
            blocks = asked.Blocks(enough=partial(enough_blocks, race, plain, how, plan.parted))
        found = convolved(plain, how, blocks, order.criterion, plan.parted, budget, progress)
        raced = race.told(found.tried[-1].blocks, "blocks", plan.run.folder) if race else {}
    judged = Judge(plain.net, plan.parted.test, logits=config.classes > 0).link(found.net, budget)
    taken = Choice(how.kind, (found.reading, "dwconv"), found.tried[-1], how.schedule)
    trade = _traded(plan, taken, how, found.order, progress)
    _write(plan, found)
    return put(
        plan.run.convert_json,
        ConvertArtefact(
            **plan.common,
            **_judged(judged, budget),
            settings=settings_for(order.settings or {}),
            kind=how.kind,
            kernel=None if how.kind == "static" else how.kernel,
            fit=how.fit,
            criterion="" if blocks.named else order.criterion,
            scores=found.scores.blocks,
            ranking=found.order,
            blocks=found.tried[-1].blocks,
            heads=found.heads,
            tried=found.tried,
            refitted=found.refitted,
            condition=found.condition,
            ridge=found.ridge,
            schedule=how.schedule,
            payload=payload_of(plan.run.folder / runs.CONVERTED, plan.run.folder),
            speed_target=raced.get("speed_target"),
            trade=trade,
            other_files=(payload_of(plan.run.folder / runs.SCORES, plan.run.folder), *raced.get("other_files", ())),
        ),
    )


def _write(plan: _Plan, found: Found) -> None:
    """The converted checkpoint, and the scores as a picture."""
    from repaconv.converting.convolving import metadata
    from repaconv.converting.drawing import scores_svg

    told = metadata(found.reading, plan.found.origin, plan.found.record)
    write_checkpoint(plan.run.folder / runs.CONVERTED, found.reading.tensors, told)
    title = f"{Path(plan.found.origin.path).name}: mean attention around the query, by block and head"
    write_payload(plan.run.folder / runs.SCORES, scores_svg(found.scores, title))


def _merged(plan: _Plan, progress: Progress) -> ConvertArtefact:
    """Token merging, of the same weights."""
    from repaconv.converting import asked
    from repaconv.converting.fitting import How
    from repaconv.converting.judging import Judge
    from repaconv.converting.merging import merged, schedule_of, words
    from repaconv.methods.pyra import METHOD

    order, config = plan.order, plan.plain.config
    budget = asked.read_budget(order, plan.parted, classes=config.classes, choosing=False)
    given = dict(order.settings or {})
    judge = Judge(plan.plain.net, plan.parted.validation, logits=config.classes > 0)
    with race_of(order.speedup, plan.device, plan.plain.reading, plan.run.folder, progress) as race:
        if race:
            text = words(schedule_at(race, plan.plain, plan.found, given, judge))
        else:
            text = schedule_of(order.schedule, order.keep, config)
        settings = {**given, "schedule": text}
        net, schedule = merged(plan.found, settings)
        raced = race.told(schedule, "schedule", plan.run.folder) if race else {}
    judged = Judge(plan.plain.net, plan.parted.test, logits=config.classes > 0).link(net, budget)
    taken = Choice("merged", (METHOD.read(plan.found, settings), METHOD.name), judge.tried(net, (), budget), schedule)
    return put(
        plan.run.convert_json,
        ConvertArtefact(
            **plan.common,
            **_judged(judged, budget),
            settings=settings,
            kind="merged",
            kernel=None,
            fit="",
            criterion="",
            schedule=schedule,
            payload=None,
            trade=_traded(plan, taken, How(), (), progress),
            **raced,
        ),
    )


def _traded(plan: _Plan, taken: Choice, how: How, order: Sequence[int], progress: Progress) -> Trade | None:
    """What else there was, where that is asked for."""
    from repaconv.converting.choosing import Rig

    if not plan.order.curve or plan.device is None:
        return None
    ground = Ground(plan.found, dict(plan.order.settings or {}), Rig.of(plan.plain, plan.parted))
    return traded(ground, plan.device, order, how, taken, plan.run.folder, progress)


def _formed(plan: _Plan, progress: Progress) -> ConvertArtefact:
    """The untrained training form of a method: what it is worth before any training is measured, and nothing folded."""
    from repaconv.converting import asked
    from repaconv.converting.judging import Judge
    from repaconv.training.forms import form

    order, original, classes = plan.order, plan.original, plan.original.reading.config.classes
    budget = asked.read_budget(order, plan.parted, classes=classes, choosing=False)
    formed = form(order, original, plan.found, plan.parted, progress)
    judged = Judge(original.net, plan.parted.test, logits=classes > 0).link(formed.net, budget)
    told = {**formed.metadata, "converted_from": plan.found.origin.sha256}
    write_checkpoint(plan.run.folder / runs.CONVERTED, formed.tensors, told)
    artefact = put(
        plan.run.convert_json,
        ConvertArtefact(
            **plan.common,
            **{**_judged(judged, budget), "verdict": "not verified"},  # nothing is judged before it is trained
            settings=dict(formed.settings),
            kind=TRAINING_FORM,
            kernel=order.kernel if order.method == "dwconv" else None,
            fit="",
            criterion="",
            description=formed.told,
            payload=payload_of(plan.run.folder / runs.CONVERTED, plan.run.folder),
        ),
    )
    runs.remember(plan.run)
    return artefact


def _judged(judged: Link, budget: Budget) -> dict[str, Any]:
    """What the images that judge say, and of which budget."""
    return {"evaluation": judged, "verdict": judged.verdict, **budget._asdict()}
