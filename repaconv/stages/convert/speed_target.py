"""A conversion by the speed that was asked for: what merges, or how many blocks are replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import GateFailed
from repaconv.core.file_replacement import write_payload
from repaconv.core.files import payload_of
from repaconv.core.progress import Progress
from repaconv.core.run_folder import UNCONVERTED
from repaconv.core.scratch_folders import scratch_folder
from repaconv.results import Pace, Raced, Ratio
from repaconv.stages.convert.speed_trials import Entrant, Track

if TYPE_CHECKING:
    from repaconv.checkpoints import Checkpoint
    from repaconv.conversion.conversion_evaluation import Judge
    from repaconv.conversion.image_splits import Parted
    from repaconv.conversion.kernel_fitting import How
    from repaconv.conversion.plain_vit import Plain
    from repaconv.conversion.speed_target_search import Schedule
    from repaconv.engines.targets import Target
    from repaconv.method_api.contract import Reading

FEW = 8
"""Images that a conversion is fitted to whose speed alone counts."""


@dataclass(frozen=True)
class Race:
    """What was measured on a track so far, for a speed that is wanted."""

    track: Track
    wanted: float
    raced: dict[tuple[int, ...], Ratio] = field(default_factory=dict)

    def speeds(self, entrants: dict[tuple[int, ...], Entrant]) -> dict[tuple[int, ...], float]:
        """How many times as fast, by what tells them apart; all of them side by side."""
        names = {"-".join(map(str, each)): each for each in entrants}
        found = self.track.speeds({name: entrants[each] for name, each in names.items()})
        self.raced.update({names[name]: ratio for name, ratio in found.items()})
        return {each: self.raced[each].median for each in entrants}

    def told(self, taken: tuple[int, ...], of: str, folder: Path) -> dict[str, Any]:
        """Fields of `repaconv.results.ConvertArtefact`; writes the original network's graph, to measure again.

        Args:
            taken: What was chosen.
            of: The field of `Raced` that tells them apart.
            folder: The run's.
        """
        from repaconv.benchmark.machine_fingerprint import cpu_model

        pace = Pace(
            target=self.track.device.name,
            wanted=self.wanted,
            reached=self.raced[taken],
            speed_trials=tuple(Raced.model_validate({of: each, "speed": ratio}) for each, ratio in self.raced.items()),
            machine=str(cpu_model()),
        )
        write_payload(folder / UNCONVERTED, self.track.graph.read_bytes())
        return {"speed_target": pace, "other_files": (payload_of(folder / UNCONVERTED, folder),)}

    def lost(self, what: str) -> GateFailed:
        """No conversion is so fast, or just so fast."""
        speeds = sorted(ratio.median for ratio in self.raced.values())
        nearest = min(speeds, key=lambda speed: abs(speed / self.wanted - 1))
        return GateFailed(
            f"{what} a speedup of {self.wanted:g}x on {self.track.device.name}: of {len(speeds)} measured "
            f"configurations the fastest reaches {speeds[-1]:.2f}x, the nearest {nearest:.2f}x.",
            hint="Ask for a smaller speedup, or try the other method: --method dwconv or --method pyra.",
            code="convert.speedup",
        )


@contextmanager
def race_of(
    wanted: float | None, device: Target | None, original: Reading, folder: Path, progress: Progress
) -> Iterator[Race | None]:
    """Where conversions are measured beside the network as it was, if a speed is wanted."""
    if wanted is None or device is None:
        yield None
        return
    with scratch_folder(folder) as scratch:
        yield Race(Track(device, (original, "dwconv"), scratch, progress), wanted)


def schedule_at(race: Race, plain: Plain, checkpoint: Checkpoint, settings: dict[str, str], judge: Judge) -> Schedule:
    """The schedule of merging that makes the network as fast as is wanted, within 5%.

    Raises:
        Refused: If the network gives a vector a patch.
        GateFailed: If none does.
    """
    from repaconv.conversion.speed_target_search import Tokens, paced
    from repaconv.conversion.token_merging import merged, words
    from repaconv.methods.pyra import METHOD
    from repaconv.verification.accuracy_budget import Budget

    def entrant(schedule: Schedule) -> Entrant:
        return METHOD.read(checkpoint, {**settings, "schedule": words(schedule)}), METHOD.name

    def measure(schedules: Sequence[Schedule]) -> dict[Schedule, float]:
        return race.speeds({each: entrant(each) for each in schedules})

    def loss(schedule: Schedule) -> float:
        net, _ = merged(checkpoint, {**settings, "schedule": words(schedule)})
        return judge.tried(net, (), Budget()).error

    found = paced(Tokens.of(plain.config), race.wanted, measure, loss)
    if found is None:
        raise race.lost("no merging schedule reaches")
    return found.schedule


def enough_blocks(race: Race, plain: Plain, how: How, parted: Parted, order: Sequence[int]) -> int:
    """How many blocks of an order make the network as fast as is wanted.

    Raises:
        GateFailed: If all of them do not.
    """
    from repaconv.conversion.original_activations import Streams
    from repaconv.conversion.sequential_conversion import convert
    from repaconv.conversion.speed_target_search import fewest

    streams = Streams(plain, parted.calibration.images[:FEW])

    def measure(count: int) -> float:
        blocks = tuple(sorted(order[:count]))
        if blocks not in race.raced:
            made = convert(streams, blocks, how)
            race.speeds({blocks: (made.reading, "dwconv")})
        return race.raced[blocks].median

    count = fewest(len(order), race.wanted, measure)
    if count is None:
        raise race.lost(f"replacing all blocks ({how.kind}) does not reach")
    return count
