"""Models opened again and again for a measurement, called with the same each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import RepaconvError, UsageProblem, first_line
from repaconv.engines.contract import OnCard, shapes_told
from repaconv.stages.bench.benchmark_inputs import Calls
from repaconv.stages.shared.model_opening import Opened

if TYPE_CHECKING:
    from repaconv.benchmark.interleaved_protocol import Opening
    from repaconv.engines.contract import Feeds, Session
    from repaconv.verification.input_batches import Batch

Call = Callable[[], Any]


def once(_name: str, call: Call, _stack: ExitStack) -> Call:
    """A round is one call."""
    return call


@dataclass
class Openings:
    """An iterator that never ends: a step lets go of the models that are open, and opens them in the other order.

    Attributes:
        load: How each is opened, by name; the first is what is measured.
        draw: What they are called with, once they are open; see `repaconv.stages.bench.benchmark_inputs`.
        around: What a round does with the call of one, by its name; what it leaves open goes onto the stack.
        models: Those that are open.
        calls: What they are called with.
        outputs: Theirs, by call, model and name; of the first opening.
    """

    load: Mapping[str, Callable[[], Opened]]
    draw: Callable[[Mapping[str, Opened]], Calls]
    around: Callable[[str, Call, ExitStack], Call] = once
    models: dict[str, Opened] = field(default_factory=dict)
    calls: Calls = field(default_factory=lambda: Calls([], None))
    outputs: list[dict[str, Mapping[str, Any]]] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)
    _backwards: bool = False

    def __iter__(self) -> Iterator[Opening]:
        """Itself."""
        return self

    def __next__(self) -> Opening:
        """The next one."""
        from repaconv.benchmark.interleaved_protocol import Opening

        self.close()
        self.models.clear()
        names = list(self.load)
        for name in reversed(names) if self._backwards else names:
            self.models[name] = self.load[name]()
        self._backwards = not self._backwards
        if not self.calls.batches:
            self.calls = self.draw(self.models)
            self.outputs = [{name: self._run(name, call) for name in self.load} for call in self.calls.batches]
        return Opening({name: self._ready(name) for name in self.load}, self.clocked)

    def close(self) -> None:
        """Close what `around` left open; the models stay."""
        self._stack.close()

    @property
    def clocked(self) -> set[str]:
        """Those whose time a card tells."""
        return {name for name, each in self.models.items() if isinstance(each.session, OnCard)}

    def feeds(self, name: str, call: Batch | None = None) -> Feeds:
        """A call as one of them takes it, the first one where none is given."""
        return (call or self.calls.batches[0]).feeds(self.models[name].session.inputs)

    def _run(self, name: str, call: Batch) -> Mapping[str, Any]:
        return _first_run(self.models[name].session, self.feeds(name, call))

    def _ready(self, name: str) -> Call:
        from repaconv.verification.model_runners import call_of

        return self.around(name, call_of(self.models[name].session, self.feeds(name)), self._stack)


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
