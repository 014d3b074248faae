"""An ONNX graph as a form of the source model: run it, read intermediate values, detect decisions on rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from repaconv.engines.contract import Feeds, Port
from repaconv.graph.element_type_conversion import retyped
from repaconv.verification.float64_evaluator_check import differing_operators
from repaconv.verification.float64_graphs import Float64
from repaconv.verification.input_batches import FLOATS
from repaconv.verification.model_runners import FixedBatch, OnnxValues, Runner, load_onnx, named
from repaconv.verification.rounding import JITTER, JITTERS, jittered_feeds, moved_weights
from repaconv.verification.tolerances import FLOAT32

if TYPE_CHECKING:
    import onnx


class WithInputs:
    """A runner together with its inputs, as `FixedBatch` needs it."""

    def __init__(self, runner: Runner, inputs: tuple[Port, ...]) -> None:
        self._runner, self.inputs = runner, inputs

    def run(self, feeds: Feeds) -> Mapping[str, Any]:
        """Run the graph and return all outputs."""
        return self._runner.run(feeds)


@dataclass
class GraphForm:
    """An ONNX graph as a form of the source model; see `repaconv.sources.source_model.NetworkForm`.

    Attributes:
        model: The graph.
        inputs: The graph's inputs.
        batch: The fixed batch size, if there is one and every output has one row per image.
        double: Whether the graph is evaluated in float64; if not, it runs unchanged under ONNX Runtime.
        decides: Whether the graph makes discrete decisions.
        whole: Whether the outputs of a call are compared as a whole, not image by image.
    """

    model: onnx.ModelProto
    inputs: tuple[Port, ...]
    batch: int | None = None
    double: bool = False
    decides: bool = False
    whole: bool = False
    _last: tuple[Feeds, dict[str, Any]] | None = field(default=None, repr=False)

    def run(self, feeds: Feeds) -> dict[str, Any]:
        """Run the graph and return all outputs; floating-point inputs are cast to the graph's own types."""
        found = self._run(self._runner, feeds)
        self._last = (feeds, found)
        return found

    @property
    def undecided(self) -> NDArray[np.bool_] | None:
        """The images [n] of the last run, or the call [1], whose outputs change when weights and inputs are perturbed.

        The perturbation is as small as rounding; see `NetworkForm`.
        """
        if not self.decides or self._last is None:
            return None
        feeds, right = self._last
        changed = np.zeros(1, bool)
        for seed, run in enumerate(self._perturbed_runners):
            changed = changed | _changed_images(
                self._run(run, jittered_feeds(feeds, JITTER, seed)), right, whole=self.whole
            )
        return changed

    def float64_doubt(self, feeds: Feeds) -> str:
        """The operators whose evaluation in float64 is not ONNX Runtime's, in words; see `NetworkForm`."""
        compared = _Compared(self.model, self._runner)
        arrays = named([port.name for port in self.inputs], feeds)
        given = {port.name: _cast(arrays[port.name], port.dtype) for port in self.inputs}
        FixedBatch(WithInputs(compared, self.inputs), self.batch).run(given)
        return next(filter(None, compared.found), "")

    def trace(self) -> OnnxValues:
        """Give access to the intermediate values by name, in float32: what is located is larger than rounding."""
        single = retyped(self.model, {11: 1}) if self.double else self.model
        return OnnxValues(single, load_onnx, by_module=False)

    def _run(self, runner: Runner, feeds: Feeds) -> dict[str, Any]:
        arrays = named([port.name for port in self.inputs], feeds)
        cast = arrays if self.double else {port.name: _cast(arrays[port.name], port.dtype) for port in self.inputs}
        return dict(FixedBatch(WithInputs(runner, self.inputs), self.batch).run(cast))

    @cached_property
    def _runner(self) -> Runner:
        return self._open(self.model)

    @cached_property
    def _perturbed_runners(self) -> list[Runner]:
        return [self._open(moved_weights(self.model, JITTER, seed)) for seed in range(JITTERS)]

    def _open(self, model: onnx.ModelProto) -> Runner:
        return Float64(model) if self.double else load_onnx(model)


class _Compared:
    """Compares the evaluation of a graph in float64 with ONNX Runtime, call by call, and has no outputs."""

    def __init__(self, model: onnx.ModelProto, runner: Runner) -> None:
        self.model, self.runner, self.found = model, runner, list[str]()

    def run(self, feeds: Feeds) -> dict[str, Any]:
        """Note what is to be said of one call."""
        if isinstance(self.runner, Float64):
            self.found.append(differing_operators(self.model, self.runner, feeds))
        return {}


def _cast(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Cast a floating-point array to the dtype of an input."""
    return array.astype(dtype) if array.dtype.kind == "f" and dtype in FLOATS else array


def _changed_images(found: Mapping[str, Any], right: Mapping[str, Any], *, whole: bool) -> NDArray[np.bool_]:
    """Mark the images [n], or the call [1], for which perturbed weights and inputs give other values or shapes."""
    rows = np.zeros(1, bool)
    for name, expected in right.items():
        got = np.asarray(found[name])
        if not isinstance(expected, np.ndarray) or expected.dtype.kind not in "fiub":
            continue
        if got.shape != expected.shape:
            return np.ones(1, bool)
        count = 1 if whole or expected.ndim < 2 else len(expected)
        a, b = (each.astype(np.float64).reshape(count, -1) for each in (got, expected))
        allowed = FLOAT32 * np.abs(b).max(1, initial=0.0) if expected.dtype.kind == "f" else 0.0
        with np.errstate(invalid="ignore"):
            rows = rows | (np.abs(a - b).max(1, initial=0.0) > allowed)
    return rows
