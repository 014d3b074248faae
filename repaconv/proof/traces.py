"""What stands between input and output: the values of a torch module or of an ONNX graph, at places with names.

A place is ``in`` or ``out`` of a module, or of the module that a node was exported from, or the name of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from repaconv.engines.contract import Feeds, Session
from repaconv.proof.runners import named

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from repaconv.engines.pytorch import TorchSession
    from repaconv.proof.runners import TorchRunner

Array = NDArray[np.floating]


class Place(NamedTuple):
    """Where a value stands: before (``in``) or behind (``out``) a module, or at a name of an ONNX graph."""

    side: str
    name: str

    def __str__(self) -> str:
        """For people."""
        return self.name if self.side == "at" else f"{self.side}put of {self.name or 'the network'}"


class Trace(Protocol):
    """Values on the way."""

    def places(self, feeds: Feeds) -> list[Place]:
        """All places, in the order in which their values are computed."""

    def values(self, places: Iterable[Place], feeds: Feeds) -> dict[Place, Array]:
        """Inputs [n, ...] by name -> the values at these places."""

    def module_of(self, place: Place) -> str:
        """The module to name for a place."""


class TorchTrace:
    """The inputs and outputs of a torch module's parts.

    Args:
        runner: With its weights.
        names: Of the parts to look at; those without parts of their own when None.
    """

    def __init__(self, runner: TorchRunner | TorchSession, names: Iterable[str] | None = None) -> None:
        self._runner = runner
        parts = dict(runner.module.named_modules())
        wanted = [name for name, part in parts.items() if not list(part.children())] if names is None else list(names)
        self._parts = {name: parts[name] for name in wanted}

    def places(self, feeds: Feeds) -> list[Place]:
        """See `Trace`; a part that is called twice counts at its last call."""
        seen: dict[Place, None] = {}

        def note(place: Place, _value: Any) -> None:
            seen.pop(place, None)
            seen[place] = None

        with self._watched(self._parts, note):
            self._runner.run(feeds)
        return list(seen)

    def values(self, places: Iterable[Place], feeds: Feeds) -> dict[Place, Array]:
        """See `Trace`."""
        wanted, found = set(places), {}

        def keep(place: Place, value: Any) -> None:
            if place in wanted:
                found[place] = value.detach().double().cpu().numpy()

        with self._watched({place.name: self._parts[place.name] for place in wanted}, keep):
            self._runner.run(feeds)
        return found

    def module_of(self, place: Place) -> str:
        """See `Trace`."""
        return place.name

    @staticmethod
    @contextmanager
    def _watched(parts: Mapping[str, nn.Module], tell: Callable[[Place, Any], None]) -> Iterator[None]:
        handles = []
        for name, part in parts.items():

            def before(_part: Any, inputs: Any, name: str = name) -> None:
                _tell(tell, Place("in", name), inputs)

            def after(_part: Any, _inputs: Any, output: Any, name: str = name) -> None:
                _tell(tell, Place("out", name), output)

            handles += [part.register_forward_pre_hook(before), part.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _tell(tell: Callable[[Place, Any], None], place: Place, value: Any) -> None:
    while isinstance(value, tuple) and value:  # tokens and their sizes: the tokens
        value = value[0]
    if hasattr(value, "is_floating_point") and value.is_floating_point():
        tell(place, value)


class OnnxTrace:
    """The values of an ONNX graph.

    Args:
        model: The graph with its weights.
        load: Serialised model to a session.
        by_module: Places are the inputs and outputs of the torch modules that the nodes were exported from, which
            `repaconv.exporters.to_onnx` writes into their names; else the names of the values.
    """

    def __init__(self, model: onnx.ModelProto, load: Callable[[bytes], Session], *, by_module: bool) -> None:
        self._model, self._load = model, load
        self._at = _by_module(model) if by_module else _by_name(model)

    def places(self, feeds: Feeds) -> list[Place]:
        """See `Trace`."""
        return list(self._at)

    def values(self, places: Iterable[Place], feeds: Feeds) -> dict[Place, Array]:
        """See `Trace`; the graph is run with these values as outputs, unless the runtime refuses one."""
        import onnx

        wanted = {place: self._at[place] for place in places if place in self._at}
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        shown = {output.name for output in model.graph.output}
        for name in dict.fromkeys(wanted.values()):
            if name not in shown:
                model.graph.output.append(onnx.ValueInfoProto(name=name))
        session = self._load(model.SerializeToString())
        found = session.run(named([port.name for port in session.inputs], feeds))
        return {
            place: np.asarray(found[name], dtype=np.float64)
            for place, name in wanted.items()
            if np.issubdtype(np.asarray(found[name]).dtype, np.floating)
        }

    def module_of(self, place: Place) -> str:
        """See `Trace`: the torch module that the value was computed in."""
        if place.side != "at":
            return place.name
        return next((_module(node) for node in self._model.graph.node if place.name in node.output), place.name)


def _module(node: onnx.NodeProto) -> str:
    module, _, own = str(node.name).rpartition("/")
    return module or own or str(node.op_type)


CANCEL = ("ReduceMean", "ReduceSum")


def _by_name(model: onnx.ModelProto) -> dict[Place, str]:
    """All but sums, which may be next to nothing where what they are of is sound: what reads them tells."""
    nodes = [node for node in model.graph.node if node.op_type not in CANCEL]
    return {Place("at", name): name for node in nodes for name in node.output if name}


def _by_module(model: onnx.ModelProto) -> dict[Place, str]:
    """First input and last output of each module that no other is within."""
    constants = {weight.name for weight in model.graph.initializer}
    constants |= {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    modules = {node.name.rpartition("/")[0] for node in model.graph.node}
    holders = {module[:cut] for module in modules for cut in range(len(module)) if module[cut] == "."}
    found: dict[Place, str] = {}
    for node in model.graph.node:
        module = node.name.rpartition("/")[0]
        data = [name for name in node.input if name and name not in constants]
        if module and module not in holders and data and node.output:
            found.setdefault(Place("in", module), data[0])
            found.pop(Place("out", module), None)
            found[Place("out", module)] = node.output[0]
    return found
