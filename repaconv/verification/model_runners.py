"""What can be run, by name: a torch module, an engine's session, and either as what takes images alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from repaconv.core import plugins
from repaconv.core.errors import Refused
from repaconv.engines.contract import Array, Engine, Feeds, OnCard, Port, Session, SessionSpec
from repaconv.engines.session_loading import load_session
from repaconv.graph.graph_without_weights import parted

if TYPE_CHECKING:
    import onnx
    import torch
    from torch import Tensor, nn

    from repaconv.engines.torch_cpu import TorchSession


# Similarities of tokens are cosines; float32 shifts them by up to some 1e-6 after a dozen blocks.
UNDECIDED = 1e-5


class Runner(Protocol):
    """What can be run: every input by its name to every output by its name. A `Session` is one."""

    def run(self, feeds: Feeds) -> Mapping[str, Any]:
        """All outputs for these inputs."""


class Ported(Protocol):
    """A runner that says what it takes, as a `Session` does."""

    inputs: tuple[Port, ...]

    def run(self, feeds: Feeds) -> Mapping[str, Any]:
        """All outputs for these inputs."""


def weighted(module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """The module with these weights, strictly, in that type; it may have been built on any device, meta included."""
    weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    module.load_state_dict(weights, strict=True, assign=True)
    return module.to(dtype)


class TorchRunner:
    """A torch module in eval mode, in float64, in float32 or as it is.

    A module in it that decides something discrete, as which tokens merge, may have a method ``decision_margin``: of
    its inputs, the smallest lead [n] by which it decided.
    """

    def __init__(
        self,
        module: nn.Module,
        tensors: Mapping[str, Tensor],
        *,
        double: bool | None,
        inputs: Sequence[str] = ("input",),
        outputs: Sequence[str] = ("output",),
    ) -> None:
        """Load the weights strictly.

        Args:
            module: Built on any device, meta included; its own weights are replaced.
            tensors: Its whole state dict.
            double: In float64, else in float32; None leaves the module as it is, and ``dtype`` is that of its first
                floating tensor.
            inputs: Names of its arguments, in their order.
            outputs: Names of what it returns, in their order.
        """
        import torch

        if double is None:
            floats = (value.dtype for value in tensors.values() if value.is_floating_point())
            self.dtype, self.module = next(floats, torch.float32), module
        else:
            self.dtype = torch.float64 if double else torch.float32
            self.module = weighted(module, tensors, self.dtype)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._decided: list[Tensor] = []
        for part in module.modules():
            if hasattr(part, "decision_margin"):
                part.register_forward_pre_hook(self._watch)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Inputs to outputs, floating ones in the precision asked for."""
        import torch
        from torch.utils._pytree import tree_leaves

        self._decided.clear()
        given = [torch.from_numpy(np.ascontiguousarray(array)) for array in named(self.inputs, feeds).values()]
        cast = [tensor.to(self.dtype) if tensor.is_floating_point() else tensor for tensor in given]
        with torch.inference_mode():
            found = self.module(*cast)
        several = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        return {name: array_of(tensor) for name, tensor in zip(self.outputs, several, strict=True)}

    @property
    def undecided(self) -> NDArray[np.bool_] | None:
        """In which images [n] of the last run float32 may decide otherwise; None if the net decides nothing."""
        if not self._decided:
            return None
        margins = np.min([margin.double().numpy() for margin in self._decided], axis=0)
        return np.asarray(margins < UNDECIDED)

    def trace(self) -> Trace:
        """The inputs and outputs of its parts."""

        return TorchTrace(self)

    def _watch(self, part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._decided.append(part.decision_margin(*inputs))  # type: ignore[operator]


def array_of(tensor: Tensor) -> Array:
    """A tensor's values, as they are; bfloat16, which NumPy has not, in float32."""
    import torch

    array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def decides(module: nn.Module) -> bool:
    """Whether something in the net decides what is discrete, as which tokens merge; see `TorchRunner`."""
    return any(hasattr(part, "decision_margin") for part in module.modules())


def named(names: Sequence[str], feeds: Feeds) -> dict[str, Array]:
    """The same inputs under an end's own names, in its order: by name, or in theirs where the names are others.

    Raises:
        ValueError: If they are not as many.
    """
    own = [feeds[name] for name in names] if set(names) == set(feeds) else feeds.values()
    return dict(zip(names, own, strict=True))


class FixedBatch:
    """A session whose graph takes so many images at once, no more, no fewer: the last batch is filled up with zeros."""

    def __init__(self, session: Ported, batch: int | None) -> None:
        """``batch`` None lets all through."""
        self._session, self._batch = session, batch
        self.inputs = session.inputs

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Inputs [n, ...] to outputs [n, ...]; under other names, they are taken in their order."""
        feeds = named([port.name for port in self.inputs], feeds) if self.inputs else feeds
        if self._batch is None:
            return dict(self._session.run(feeds))
        count = len(next(iter(feeds.values())))
        calls = [
            self._session.run({name: self._piece(array, start) for name, array in feeds.items()})
            for start in range(0, count, self._batch)
        ]
        return {name: _rows([call[name] for call in calls], name)[:count] for name in calls[0]}

    def _piece(self, array: Array, start: int) -> Array:
        piece = array[start : start + self._batch] if self._batch else array
        missing = (self._batch or 0) - len(piece)
        return np.concatenate([piece, np.zeros_like(piece[:1]).repeat(missing, 0)]) if missing else piece


def _rows(parts: Sequence[Array], name: str) -> Array:
    """Rows of images from several calls.

    Raises:
        Refused: If they are of several lengths, as where something counts what an image shows.
    """
    lengths = sorted({part.shape[1:] for part in parts})
    if len(lengths) > 1:
        raise Refused(
            f"output {name} has another shape for each image: {list(lengths[0])} and {list(lengths[1])}.",
            hint="Fold the model again: repaconv fold model.onnx. Such outputs are then compared image by image.",
            code="inputs.shape",
        )
    return np.concatenate(parts)


def channels_first(port: Port) -> tuple[int | str | None, ...]:
    """An input's shape, of images as [B, C, H, W]: pixels are [B, H, W, C] in bytes."""
    shape = port.shape
    return (shape[0], shape[3], *shape[1:3]) if port.dtype == "uint8" and len(shape) == 4 else shape


def call_of(session: Session, feeds: Feeds) -> Callable[[], Any]:
    """One inference of a round; on a card, of inputs that lie there already, and it returns its milliseconds."""
    return session.clocked(feeds) if isinstance(session, OnCard) else partial(session.run, feeds)


class Images:
    """A session of an image model: its one input, and the first of its outputs.

    Attributes:
        options: What was set.
        takes_pixels: Whether the input is pixels, [B, H, W, C] in uint8.
        input_shape: As [B, C, H, W]; a name, or None, stands for what is free.
    """

    def __init__(self, session: Session, batch: int | None = None) -> None:
        """Look at what it takes; ``batch`` is how many images its graph takes at once, where that is fixed.

        Raises:
            Refused: If it has more inputs than one.
        """
        if len(session.inputs) != 1:
            raise Refused(
                f"the engine takes {len(session.inputs)} inputs: {', '.join(port.name for port in session.inputs)}.",
                hint="An image model takes one.",
                code="engine.inputs",
            )
        self.session, self.options = session, session.options
        self._whole = FixedBatch(session, batch)
        self._given, self._wanted = session.inputs[0].name, session.outputs[0].name
        self.takes_pixels = session.inputs[0].dtype == "uint8"
        self.input_shape = channels_first(session.inputs[0])

    @property
    def on_card(self) -> bool:
        """Whether it computes on a card, whose clock then tells the time."""
        return isinstance(self.session, OnCard)

    def call(self, images: NDArray[Any]) -> Callable[[], Any]:
        """One inference of a round; on a card, of images that lie there already, and it returns its milliseconds."""
        return call_of(self.session, {self._given: images})

    def run(self, images: NDArray[Any]) -> Array:
        """Images [n, C, H, W], or pixels where it takes those, to the first output [n, ...]."""
        return self._whole.run({self._given: images})[self._wanted]


def run_module(
    module: nn.Module, tensors: Mapping[str, Tensor], images: NDArray[np.float32], *, double: bool, at_once: int = 8
) -> Array:
    """All images through a module in eval mode, in pieces that fit in memory."""
    runner = TorchRunner(module.eval(), tensors, double=double)
    pieces = (images[start : start + at_once] for start in range(0, len(images), at_once))
    return np.concatenate([runner.run({"input": piece})["output"] for piece in pieces])


def load_onnx(
    model: Path | bytes | onnx.ModelProto, folder: Path | None = None, *, timed: bool = False, as_written: bool = False
) -> Session:
    """An ONNX Runtime session on all cores that this process may use; ``folder`` has a graph's external weights.

    One of what lies in memory, which nobody times, is lean: a proof has several of them. Weights of a model are handed
    over as arrays; serialised and parsed they would be there three times. One ``as_written`` fuses nothing.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    engine: Engine = plugins.load(plugins.ENGINES, "onnxruntime")
    weights: Path | Mapping[str, Array] | None = folder
    lean = not (isinstance(model, Path) or timed)
    if not isinstance(model, Path | bytes):
        bare, weights = (model, folder) if folder else parted(model)
        model = bare.SerializeToString()
    spec = SessionSpec(threads=cores or 1, weights=weights, lean=lean, as_written=as_written)
    return load_session(engine, model, spec)


def image_model(model: Path | bytes, folder: Path | None = None, *, batch: int | None = None) -> Images:
    """The same as what takes images; ``batch`` is how many its graph takes at once, where that is fixed."""
    return Images(load_onnx(model, folder), batch)


# --- What stands between input and output: the values of a torch module or of an ONNX graph, at places with names.
#
# A place is ``in`` or ``out`` of a module, or of the module that a node was exported from, or the name of a value.


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
            `repaconv.onnx_export.torch_exporter` writes into their names; else the names of the values.
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
