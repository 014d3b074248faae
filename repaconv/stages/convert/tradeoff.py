"""The trade-off of `convert --curve`: speedup on the target and error, for every kind of conversion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

from repaconv.core.errors import Refused
from repaconv.core.progress import Progress
from repaconv.core.temporary_folders import scratch_folder
from repaconv.results import SpeedTrial, Trade, Tried
from repaconv.stages.convert.speed_target import MethodNetwork, SpeedMeasurement

if TYPE_CHECKING:
    from repaconv.checkpoints import Checkpoint
    from repaconv.conversion.block_selection import SelectionData
    from repaconv.conversion.kernel_fitting import ConversionSettings
    from repaconv.conversion.plain_vit import PlainViT
    from repaconv.engines.targets import Target

REPLACED_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the blocks that are replaced."""


class MeasuredConversion(NamedTuple):
    """A conversion to measure.

    Attributes:
        kind: Its kind.
        network: The converted network.
        tried: Its error on the validation split.
        schedule: Tokens merged per block, if it merges.
    """

    kind: str
    network: MethodNetwork
    tried: Tried
    schedule: tuple[int, ...] = ()


class ConversionSource(NamedTuple):
    """The network that conversions start from, and what evaluates them."""

    checkpoint: Checkpoint
    settings: dict[str, str]
    selection: SelectionData

    @property
    def plain(self) -> PlainViT:
        """The original network."""
        return self.selection.activations.plain


def measure_tradeoff(
    ground: ConversionSource,
    device: Target,
    order: Sequence[int],
    how: ConversionSettings,
    taken: MeasuredConversion,
    folder: Path,
    progress: Progress,
) -> Trade:
    """Measure the chosen conversion and every other kind, each kind in rounds with the original network.

    Args:
        ground: The original network, and what evaluates conversions.
        device: The target, which is this machine.
        order: Indices of the blocks, the best to replace first; measured here if empty.
        how: Kernel size and ridge of the conversions.
        taken: The conversion of the run.
        folder: The run folder.
        progress: See `Progress`.

    Raises:
        GateFailed: If a graph's outputs differ from those of its network.
    """
    from repaconv.benchmark.machine_fingerprint import cpu_model

    choices = [taken, *_block_replacements(ground, order, how, progress), *_token_merges(ground)]
    measured: list[SpeedTrial] = []
    with scratch_folder(folder) as scratch:
        measurement = SpeedMeasurement(device, (ground.plain.reading, "dwconv"), scratch, progress)
        for _, alike in groupby(
            choices, key=lambda each: each.kind
        ):  # one kind at a time, so that few sessions are open
            named = {f"{len(measured) + n}": each for n, each in enumerate(alike)}
            speeds = measurement.speeds({name: each.network for name, each in named.items()})
            measured += [
                SpeedTrial(
                    kind=each.kind,
                    blocks=each.tried.blocks,
                    schedule=each.schedule,
                    tried=each.tried,
                    speed=speeds[name],
                )
                for name, each in named.items()
            ]
    return Trade(target=device.name, taken=measured[0], others=tuple(measured[1:]), machine=str(cpu_model()))


def _block_replacements(
    ground: ConversionSource, order: Sequence[int], how: ConversionSettings, progress: Progress
) -> Iterator[MeasuredConversion]:
    """Conversions of some and of all blocks, by every kind."""
    from repaconv.conversion.block_selection import single_block_errors
    from repaconv.conversion.kernel_fitting import Kind
    from repaconv.conversion.sequential_conversion import convert
    from repaconv.verification.accuracy_budget import Budget

    selection = ground.selection
    if not order:
        errors = single_block_errors(selection, how, progress)
        order = sorted(range(len(errors)), key=lambda block: errors[block])
    counts = dict.fromkeys(max(1, round(share * len(order))) for share in REPLACED_SHARES)
    for kind in get_args(Kind):
        for count in counts:
            blocks = tuple(sorted(order[:count]))
            made = convert(selection.fitting, blocks, replace(how, kind=kind, fit="squares", schedule=()))
            yield MeasuredConversion(kind, (made.reading, "dwconv"), selection.tried(made, blocks, Budget()))


def _token_merges(ground: ConversionSource) -> Iterator[MeasuredConversion]:
    """Merging schedules; none if the network outputs one vector per patch."""
    from repaconv.conversion.speed_target_search import TokenCounts
    from repaconv.conversion.token_merging import schedule_text, with_merging
    from repaconv.methods.pyra import METHOD
    from repaconv.verification.accuracy_budget import Budget

    for schedule in TokenCounts.of(ground.plain.config).probes():
        settings = {**ground.settings, "schedule": schedule_text(schedule)}
        try:
            net, _ = with_merging(ground.checkpoint, settings)
        except Refused:
            return
        reading = METHOD.read(ground.checkpoint, settings)
        yield MeasuredConversion(
            "merged", (reading, METHOD.name), ground.selection.evaluation.tried(net, (), Budget()), schedule
        )
