"""Predict speedups of configurations from measurements of this network and of others on the same CPU ISA level.

The logarithm of a speedup is nearly a sum of effects: of the precision, the runtime, the quantizer, each rewrite, each
setting. Some are the same for all networks, some are alike for networks of one size, the rest is the network's own. A
Gaussian process whose covariance is the sum of these parts predicts every configuration with its uncertainty
(Rasmussen and Williams 2006, algorithm 2.1); a new measurement of any network is one more observation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.benchmark.machine_fingerprint import machine_key
from repaconv.results import Deployment, Ratio, TuneArtefact

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]
    Matrix = NDArray[np.float64]

RECORDS = Path(__file__).with_name("recorded_speedups.json")
"""Measured speedups of the published sizes and of the small trained networks; the file names its source."""

# Standard deviations of the parts of an effect, in the logarithm of the speedup. Two configurations share a part if
# they have its first-named property in common. The values for runtimes, precisions and quantizers make the records most
# likely when each network in turn is predicted from the others (benchmarks/tuning_records.py). TRIAL_OWN is larger than
# its most likely value, 0.04, with which records of many transformers make the search too sure about convolutional
# networks. Replayed on all recorded grids, the search ends at 0.9992 of the best with 0.08, and at 0.9976 with 0.04.
PRECISION, PRECISION_BY_SIZE, PRECISION_OWN = 0.3, 0.3, 0.1
RUNTIME_BY_SIZE, RUNTIME_OWN = 0.1, 0.05
TRIAL, TRIAL_BY_SIZE, TRIAL_OWN = 0.05, 0.25, 0.08
"""Of a trial: a runtime in a precision by a quantizer."""
SETTING, SETTING_OWN = 0.15, 0.05
CONCURRENCY_OWN = 0.4
"""Streams and batch sizes change the throughput manyfold, and differently for each network."""
REWRITE, REWRITE_OWN, REWRITE_OF_TRIAL = 0.01, 0.015, 0.01
FP32_LAYERS = 0.1
UNEXPLAINED = 0.01
"""The part of a configuration's speedup that no effect explains."""
SIMILAR_SIZE_DECADES = 0.5
"""Networks count as similar in size if their MACs differ by less than this many powers of ten."""
MOST_OF_ONE = 20
"""Most configurations of one earlier search that are used."""
ROUND_NOISE = 0.03
"""Least relative error of one round; a measurement's error shrinks with the square root of its rounds."""


class Observation(NamedTuple):
    """A measured configuration.

    Attributes:
        network: The network on its machine; "" is the one that is tuned now.
        macs: Multiply-accumulates of its baseline.
        deployment: The configuration.
        gain: Natural logarithm of its speedup over the network's baseline.
        error: Standard deviation of ``gain``.
    """

    network: str
    macs: float
    deployment: Deployment
    gain: float
    error: float


def observed(network: str, macs: float, deployment: Deployment, ratio: Ratio, rounds: int) -> Observation:
    """Return a measurement as an observation; few rounds are less certain than their interval claims."""
    spread = math.log(ratio.high / ratio.low) / 3.92 if ratio.low > 0 else 1.0  # 1.96 standard deviations to each side
    return Observation(network, macs, deployment, math.log(ratio.median), max(spread, ROUND_NOISE / math.sqrt(rounds)))


@cache
def shipped_records(isa_level: str) -> tuple[Observation, ...]:
    """The recorded speedups of this ISA level; none for a level on which nothing was measured."""
    return tuple(_read(json.loads(RECORDS.read_text("utf-8"))["networks"].get(isa_level, [])))


def _read(networks: Sequence[Mapping[str, Any]]) -> Iterator[Observation]:
    for net in networks:
        for row in net["measured"]:
            deployment = Deployment.model_validate({"target": "", **row["deployment"]})
            yield Observation(net["network"], float(net["macs"]), deployment, math.log(row["speedup"]), row["error"])


def own_history(results: Iterable[TuneArtefact], machine: Mapping[str, Any], objective: str) -> list[Observation]:
    """Return the measurements of earlier searches on this machine: of each, the configurations with most rounds."""
    found: list[Observation] = []
    for place, tuned in enumerate(results):
        if not tuned.macs or tuned.objective != objective or machine_key(tuned.machine) != machine_key(machine):
            continue
        rows = sorted((row for row in tuned.candidates if row.ratio), key=lambda row: -row.rounds)[:MOST_OF_ONE]
        name = f"search {place}"
        found.append(Observation(name, tuned.macs, tuned.baseline, 0.0, 0.0))
        found += [observed(name, tuned.macs, row.deployment, row.ratio, row.rounds) for row in rows if row.ratio]
    return found


PREDICTION_DIGITS = 9
"""Of a prediction: the last digits depend on the CPU on which it is computed, and would decide between equal ones."""


class Prediction(NamedTuple):
    """Predicted logarithms of speedups, and their standard deviations."""

    means: Vector
    deviations: Vector


@dataclass(frozen=True)
class Predictor:
    """Predicts speedups over the baseline.

    Attributes:
        observations: Measurements of this and of other networks, each network's baseline among them with gain 0.
        macs: Multiply-accumulates of this network's baseline.
    """

    observations: Sequence[Observation]
    macs: float

    def of(self, wanted: Sequence[Deployment]) -> Prediction:
        """The prediction for these configurations of this network."""
        import numpy as np

        new = [Observation("", self.macs, each, 0.0, 0.0) for each in wanted]
        seen = list(self.observations)
        features = _Features.of([*seen, *new])
        old, fresh = slice(0, len(seen)), slice(len(seen), None)
        known = features.covariance(old, old) + np.diag([max(each.error, 1e-4) ** 2 for each in seen])
        across = features.covariance(old, fresh)
        solved = np.linalg.solve(known, np.column_stack([np.array([each.gain for each in seen]), across]))
        means = across.T @ solved[:, 0]
        variances = np.diag(features.covariance(fresh, fresh)) - np.einsum("ij,ij->j", across, solved[:, 1:])
        return Prediction(
            means.round(PREDICTION_DIGITS), np.sqrt(np.maximum(variances, 1e-12)).round(PREDICTION_DIGITS)
        )


class _Features(NamedTuple):
    """The features that configurations may share, one row each: counts, and 0 or 1 for each rewrite and setting."""

    network: Vector
    size: Vector
    precision: Vector
    runtime: Vector
    trial: Vector
    layers: Vector
    concurrency: Vector
    rewrites: Matrix
    settings: Matrix
    whole: Vector

    @classmethod
    def of(cls, rows: Sequence[Observation]) -> _Features:
        import numpy as np

        deployments = [each.deployment for each in rows]

        def numbered(things: Sequence[object]) -> Vector:
            place = {thing: float(number) for number, thing in enumerate(dict.fromkeys(things))}
            return np.array([place[thing] for thing in things])

        def present(sets: Sequence[tuple[str, ...]]) -> Matrix:
            names = sorted({name for each in sets for name in each})
            return np.array([[float(name in each) for name in names] for each in sets]).reshape(len(sets), len(names))

        return cls(
            network=numbered([each.network for each in rows]),
            size=np.log10([max(each.macs, 1.0) for each in rows]),
            precision=numbered([each.precision for each in deployments]),
            runtime=numbered([each.runtime for each in deployments]),
            trial=numbered([(each.runtime, each.precision, each.quantizer) for each in deployments]),
            layers=numbered([each.fp32_modules for each in deployments]),
            concurrency=numbered([(each.threads, each.streams, each.batch) for each in deployments]),
            rewrites=present([each.rewrites for each in deployments]),
            settings=present([each.settings for each in deployments]),
            whole=numbered([each.model_copy(update={"target": ""}) for each in deployments]),
        )

    def covariance(self, left: slice, right: slice) -> Matrix:
        """Covariance of the gains of two groups of rows."""
        import numpy as np

        def same(values: Vector) -> Matrix:
            return np.asarray(values[left, None] == values[None, right], float)

        size = np.exp(-0.5 * ((self.size[left, None] - self.size[None, right]) / SIMILAR_SIZE_DECADES) ** 2)
        own, trial, runtime = same(self.network), same(self.trial), same(self.runtime)
        rewrites = self.rewrites[left] @ self.rewrites[right].T
        settings = self.settings[left] @ self.settings[right].T
        return np.asarray(
            same(self.precision) * (PRECISION**2 + PRECISION_BY_SIZE**2 * size + PRECISION_OWN**2 * own)
            + runtime * (RUNTIME_BY_SIZE**2 * size + RUNTIME_OWN**2 * own)
            + trial * (TRIAL**2 + TRIAL_BY_SIZE**2 * size + TRIAL_OWN**2 * own)
            + rewrites * runtime * (REWRITE**2 + REWRITE_OWN**2 * own + REWRITE_OF_TRIAL**2 * own * trial)
            + settings * runtime * same(self.precision) * (SETTING**2 + SETTING_OWN**2 * own)
            + same(self.concurrency) * own * CONCURRENCY_OWN**2
            + trial * own * same(self.layers) * FP32_LAYERS**2
            + own * same(self.whole) * UNEXPLAINED**2
        )
