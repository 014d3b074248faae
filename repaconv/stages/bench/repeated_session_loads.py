"""Repeated session loads of several models, which receive the same inputs each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import RepaconvError, UsageProblem, first_line
from repaconv.engines.contract import OnCard, shapes_told
from repaconv.stages.bench.benchmark_inputs import BenchmarkInputs
from repaconv.stages.shared.model_opening import OpenedModel

if TYPE_CHECKING:
    from repaconv.benchmark.interleaved_protocol import SessionLoad
    from repaconv.engines.contract import Feeds, Session
    from repaconv.verification.input_batches import Batch

Call = Callable[[], Any]


def one_inference(_name: str, call: Call, _stack: ExitStack) -> Call:
    """The default for `SessionLoads.wrap`: a round is one inference."""
    return call


@dataclass
class SessionLoads:
    """An endless iterator of session loads.

    Each step closes the models that are open and opens them again, in the reverse order of the step before.

    Attributes:
        load: A function per model that opens it; the first is the model under test.
        make_inputs: Makes the inputs from the open models; see `repaconv.stages.bench.benchmark_inputs`.
        wrap: Wraps a model's inference into what one round does; it registers what must be closed on the stack.
        models: The open models.
        calls: Their inputs.
        outputs: Their outputs by batch, model and output name, from the first load.
    """

    load: Mapping[str, Callable[[], OpenedModel]]
    make_inputs: Callable[[Mapping[str, OpenedModel]], BenchmarkInputs]
    wrap: Callable[[str, Call, ExitStack], Call] = one_inference
    models: dict[str, OpenedModel] = field(default_factory=dict)
    calls: BenchmarkInputs = field(default_factory=lambda: BenchmarkInputs([], None))
    outputs: list[dict[str, Mapping[str, Any]]] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)
    _backwards: bool = False

    def __iter__(self) -> Iterator[SessionLoad]:
        """The iterator itself."""
        return self

    def __next__(self) -> SessionLoad:
        """Close the models, and open them again in the other order."""
        from repaconv.benchmark.interleaved_protocol import SessionLoad

        self.close()
        self.models.clear()
        names = list(self.load)
        for name in reversed(names) if self._backwards else names:
            self.models[name] = self.load[name]()
        self._backwards = not self._backwards
        if not self.calls.batches:
            self.calls = self.make_inputs(self.models)
            self.outputs = [{name: self._run(name, call) for name in self.load} for call in self.calls.batches]
        return SessionLoad({name: self._ready(name) for name in self.load}, self.clocked)

    def close(self) -> None:
        """Close what `wrap` opened; the models stay open."""
        self._stack.close()

    @property
    def clocked(self) -> set[str]:
        """Names of the models whose time the GPU measures."""
        return {name for name, each in self.models.items() if isinstance(each.session, OnCard)}

    def feeds(self, name: str, call: Batch | None = None) -> Feeds:
        """A batch as feeds of one model; the first batch by default."""
        return (call or self.calls.batches[0]).feeds(self.models[name].session.inputs)

    def _run(self, name: str, call: Batch) -> Mapping[str, Any]:
        return _first_run(self.models[name].session, self.feeds(name, call))

    def _ready(self, name: str) -> Call:
        from repaconv.verification.model_runners import call_of

        return self.wrap(name, call_of(self.models[name].session, self.feeds(name)), self._stack)


def _first_run(session: Session, feeds: Feeds) -> Mapping[str, Any]:
    try:
        return session.run(feeds)
    except RepaconvError:
        raise
    except Exception as error:
        raise UsageProblem(
            f"the model does not run on {shapes_told(feeds)}: {first_line(error)}.",
            hint="Both models must take the same inputs.",
            code="bench.shape",
        ) from error
