"""Run torch modules and ONNX graphs on named inputs, and read their intermediate values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from repaconv.core import plugins
from repaconv.core.errors import EnvironmentProblem, Refused
from repaconv.core.memory_release import release_freed_memory
from repaconv.core.temporary_folders import scratch_folder
from repaconv.core.thread_pool import usable_cpus
from repaconv.engines.contract import Array, Engine, Feeds, GpuSession, GpuTimed, Port, Session, SessionSpec
from repaconv.engines.session_loading import load_session
from repaconv.graph.computed_weight_parts import split_off_computed_weights
from repaconv.graph.graph_without_weights import (
    MOST_KEPT_ENTRIES,
    Numbers,
    bytes_of,
    external_weight,
    refer_to_file,
    split_off_weights,
)
from repaconv.graph.weights_in_files import FILE_BYTES

if TYPE_CHECKING:
    import onnx
    import torch
    from torch import Tensor, nn

    from repaconv.engines.torch_cpu import TorchSession


# Margin below which a discrete decision counts as undecided. Token similarities are cosines, which float32 rounding
# changes by up to a few 1e-6 after a dozen blocks.
UNDECIDED_MARGIN = 1e-5


class Runner(Protocol):
    """Anything that maps inputs by name to outputs by name, e.g. a `Session`."""

    def run(self, feeds: Feeds) -> Mapping[str, Any]:
        """Run the model and return all outputs."""


class RunnerWithInputs(Protocol):
    """A runner that also declares its inputs, as a `Session` does."""

    inputs: tuple[Port, ...]

    def run(self, feeds: Feeds) -> Mapping[str, Any]:
        """Run the model and return all outputs."""


def with_weights(module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """Load weights into a module strictly and convert it to ``dtype``; the module may be on the meta device."""
    weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    module.load_state_dict(weights, strict=True, assign=True)
    return module.to(dtype)


class TorchRunner:
    """Runs a torch module in eval mode, in float64, in float32 or in its own dtype.

    A submodule that makes discrete decisions, e.g. which tokens to merge, may have a method ``decision_margin``. It
    takes the submodule's inputs and returns the smallest margin [n] by which it decided.
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
            module: The module, on any device, meta included; its weights are replaced.
            tensors: Its complete state dict.
            double: True for float64, False for float32. None leaves the module as it is; ``dtype`` is then that of
                its first floating-point tensor.
            inputs: Names of the module's arguments, in order.
            outputs: Names of the module's outputs, in order.
        """
        import torch

        if double is None:
            floats = (value.dtype for value in tensors.values() if value.is_floating_point())
            self.dtype, self.module = next(floats, torch.float32), module
        else:
            self.dtype = torch.float64 if double else torch.float32
            self.module = with_weights(module, tensors, self.dtype)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._margins: list[Tensor] = []
        for part in module.modules():
            if hasattr(part, "decision_margin"):
                part.register_forward_pre_hook(self._record_margin)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run the module and return all outputs, floating-point ones in the chosen precision."""
        import torch
        from torch.utils._pytree import tree_leaves

        self._margins.clear()
        given = [torch.from_numpy(np.asarray(array, order="C")) for array in named(self.inputs, feeds).values()]
        cast = [tensor.to(self.dtype) if tensor.is_floating_point() else tensor for tensor in given]
        with torch.inference_mode():
            found = self.module(*cast)
        several = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        return {name: array_of(tensor) for name, tensor in zip(self.outputs, several, strict=True)}

    @property
    def undecided(self) -> NDArray[np.bool_] | None:
        """The images [n] of the last run for which float32 rounding may change a discrete decision.

        None if the module makes no discrete decisions.
        """
        if not self._margins:
            return None
        margins = np.min([margin.double().numpy() for margin in self._margins], axis=0)
        return np.asarray(margins < UNDECIDED_MARGIN)

    def float64_doubt(self, feeds: Feeds) -> str:
        """Empty: torch has one implementation for both types; see `repaconv.sources.source_model.NetworkForm`."""
        return ""

    def trace(self) -> IntermediateValues:
        """Give access to the inputs and outputs of the submodules."""

        return TorchValues(self)

    def _record_margin(self, part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._margins.append(part.decision_margin(*inputs))  # type: ignore[operator]


def array_of(tensor: Tensor) -> Array:
    """Convert a tensor to a NumPy array of the same dtype; bfloat16, which NumPy lacks, becomes float32."""
    import torch

    array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def decides(module: nn.Module) -> bool:
    """Whether a submodule makes discrete decisions, e.g. which tokens to merge; see `TorchRunner`."""
    return any(hasattr(part, "decision_margin") for part in module.modules())


def named(names: Sequence[str], feeds: Feeds) -> dict[str, Array]:
    """Return the inputs under a model's own names, matched by name, or by position if the names differ.

    Args:
        names: Names of the model's inputs, in order.
        feeds: The inputs.

    Raises:
        ValueError: The number of inputs differs.
    """
    if len(names) != len(feeds):
        raise ValueError(f"it has {', '.join(names)}, and not {', '.join(feeds)}")
    own = [feeds[name] for name in names] if set(names) == set(feeds) else feeds.values()
    return dict(zip(names, own, strict=True))


class FixedBatch:
    """Runs any number of images through a graph with a fixed batch size; the last batch is padded with zeros."""

    def __init__(self, session: RunnerWithInputs, batch: int | None) -> None:
        """Wrap a session; with ``batch`` None, inputs are passed on unchanged."""
        self._session, self._batch = session, batch
        self.inputs = session.inputs

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run inputs [n, ...] and return outputs [n, ...]; see `named` for inputs under other names.

        Inputs of exactly one batch are one inference, whose outputs may have any shape.

        Raises:
            Refused: An output does not have one row per image, so that several inferences do not make one output.
        """
        feeds = named([port.name for port in self.inputs], feeds) if self.inputs else feeds
        if self._batch is None:
            return dict(self._session.run(feeds))
        count = len(next(iter(feeds.values())))
        if count == self._batch:
            return dict(self._session.run(feeds))
        calls = [
            self._session.run({name: self._piece(array, start) for name, array in feeds.items()})
            for start in range(0, count, self._batch)
        ]
        for name, output in calls[0].items():
            self._require_rows(name, output)
        return {name: _concatenated_rows([call[name] for call in calls], name)[:count] for name in calls[0]}

    def _require_rows(self, name: str, output: Any) -> None:
        shape = getattr(output, "shape", ())
        if shape[:1] != (self._batch,):
            raise Refused(
                f"output {name} is {list(shape) or 'no rows'} for a batch of {self._batch}: not one row per image.",
                hint=f"Give inputs of exactly {self._batch} images.",
                code="inputs.shape",
            )

    def _piece(self, array: Array, start: int) -> Array:
        piece = array[start : start + self._batch] if self._batch else array
        missing = (self._batch or 0) - len(piece)
        return np.concatenate([piece, np.zeros_like(piece[:1]).repeat(missing, 0)]) if missing else piece


def _concatenated_rows(parts: Sequence[Array], name: str) -> Array:
    """Concatenate the rows of an output over several calls.

    Raises:
        Refused: The rows differ in shape between calls, e.g. with the number of detections.
    """
    lengths = sorted({part.shape[1:] for part in parts})
    if len(lengths) > 1:
        raise Refused(
            f"output {name} has another shape for each image: {list(lengths[0])} and {list(lengths[1])}.",
            hint="Fold it as an ONNX model: repaconv fold model.onnx compares such outputs image by image.",
            code="inputs.shape",
        )
    return np.concatenate(parts)


def channels_first(port: Port) -> tuple[int | str | None, ...]:
    """Return an input's shape as [B, C, H, W]; inputs of uint8 pixels are [B, H, W, C]."""
    shape = port.shape
    return (shape[0], shape[3], *shape[1:3]) if port.dtype == "uint8" and len(shape) == 4 else shape


def call_of(session: Session, feeds: Feeds) -> Callable[[], Any]:
    """Return a function that runs one inference.

    On a GPU, the inputs are copied there beforehand, and the function returns the milliseconds of the GPU's clock.
    """
    return GpuTimed(session.gpu_timed_call(feeds)) if isinstance(session, GpuSession) else partial(session.run, feeds)


class ImageSession:
    """A session of an image model, from its only input to its first output.

    Attributes:
        options: Options of the session.
        takes_pixels: Whether the input is pixels, [B, H, W, C] in uint8.
        input_shape: [B, C, H, W]; a dynamic dimension is a name or None.
    """

    def __init__(self, session: Session, batch: int | None = None) -> None:
        """Wrap a session; ``batch`` is the graph's batch size if it is fixed.

        Raises:
            Refused: The model has several inputs.
        """
        if len(session.inputs) != 1:
            raise Refused(
                f"the engine takes {len(session.inputs)} inputs: {', '.join(port.name for port in session.inputs)}.",
                hint="An image model takes one input.",
                code="engine.inputs",
            )
        self.session, self.options = session, session.options
        self._fixed_batch = FixedBatch(session, batch)
        self._input_name, self._output_name = session.inputs[0].name, session.outputs[0].name
        self.takes_pixels = session.inputs[0].dtype == "uint8"
        self.input_shape = channels_first(session.inputs[0])

    @property
    def on_gpu(self) -> bool:
        """Whether the session runs on a GPU, whose own clock then measures the latency."""
        return isinstance(self.session, GpuSession)

    def call(self, images: NDArray[Any]) -> Callable[[], Any]:
        """Return a function that runs one inference; see `call_of`."""
        return call_of(self.session, {self._input_name: images})

    def run(self, images: NDArray[Any]) -> Array:
        """Run images [n, C, H, W], or pixels if the model takes those, and return the first output [n, ...]."""
        return self._fixed_batch.run({self._input_name: images})[self._output_name]


LARGE_BYTES = 2**29
"""Bytes of weights from which a session that is not timed keeps no prepacked copy."""


def load_onnx(
    model: Path | bytes | onnx.ModelProto,
    weights: Path | Numbers | None = None,
    *,
    timed: bool = False,
    as_written: bool = False,
) -> Session:
    """Open an ONNX Runtime session on all cores that this process may use.

    Weights of a model in memory are passed apart from it: serializing and parsing them would hold three copies. See
    `weights_in_file`.

    Args:
        model: A path, a serialized model or a model.
        weights: The external weights of a model, or the folder that has those of a model or of its bytes.
        timed: Whether the session will be benchmarked. If not, and the model is in memory, the session releases memory
            after every inference, since a comparison holds several sessions.
        as_written: Whether to turn off fusions.
    """
    engine: Engine = plugins.load(plugins.ENGINES, "onnxruntime")
    lean = not (isinstance(model, Path) or timed)
    spec = SessionSpec(threads=usable_cpus(), lean=lean, as_written=as_written)
    if isinstance(model, Path | bytes):
        return load_session(engine, model, replace(spec, weights=weights if isinstance(weights, Path) else None))
    if isinstance(weights, Path):
        return load_session(engine, model.SerializeToString(), replace(spec, weights=weights))
    with weights_in_file(model, weights, computed=not as_written) as (bare, apart):
        held: Path | dict[str, Array]
        if isinstance(apart, Path):
            held, spec = apart, replace(spec, no_prepacking=lean and _bytes_in(apart) >= LARGE_BYTES)
        else:
            held = {name: numbers() for name, numbers in apart.items()}
        return load_session(engine, bare.SerializeToString(), replace(spec, weights=held))


@contextmanager
def weights_in_file(
    model: onnx.ModelProto, weights: Numbers | None = None, *, computed: bool = True
) -> Iterator[tuple[onnx.ModelProto, Path | Numbers]]:
    """Write a model's weights to a file, one by one, which sessions map; of arrays, they make two more copies.

    Yields the model without them and the folder of the file, or the weights themselves if they are few or do not fit
    onto the disk; `load_onnx` takes both. A session that was loaded needs the file no longer.

    Args:
        model: The model.
        weights: Its external weights.
        computed: Whether to compute those that the model computes from its constants alone.
    """
    bare, apart = (model, weights) if weights else split_off_weights(model)
    found: Path | Numbers = apart
    with ExitStack() as stack:
        if bytes_of(bare, apart) >= FILE_BYTES:
            with suppress(EnvironmentProblem, OSError):  # a full disk
                folder = stack.enter_context(scratch_folder())
                ready = _with_computed_weights(bare, apart) if computed else (bare, apart)
                bare, found = refer_to_file(*ready, folder / "weights"), folder
                del ready
                release_freed_memory()
        yield bare, found


def _with_computed_weights(bare: onnx.ModelProto, apart: Numbers) -> tuple[onnx.ModelProto, Numbers]:
    """Compute the weights that a model computes from its large constants alone, one by one; each is read once.

    Few numbers, such as the shape of a weight, stay in the model: ONNX Runtime infers shapes by them.
    """
    from onnx import numpy_helper

    rest, parts = split_off_computed_weights(bare, apart.keys())
    found: dict[str, Array] = {}
    try:
        for part in parts:
            read = {weight.name for weight in part.graph.initializer}
            numbers = {name: each for name, each in apart.items() if name in read}
            found |= load_onnx(part, numbers, as_written=True).run({})
        few = {name for name, array in found.items() if array.size <= MOST_KEPT_ENTRIES}
        initializers = [
            numpy_helper.from_array(array, name) if name in few else external_weight(name, array)
            for name, array in found.items()
        ]
    except Exception:  # runtimes raise errors of many classes; the whole model shows what it does
        return bare, apart
    names = {weight.name for weight in rest.graph.initializer}
    rest.graph.initializer.extend(initializers)
    kept = {name: each for name, each in apart.items() if name in names}
    return rest, {**kept, **{name: partial(found.pop, name) for name in [*found] if name not in few}}


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


# Intermediate values of a torch module or an ONNX graph
#
# A place is the input or output of a torch module, which for a graph is the module from which nodes were exported, or
# a value's name.


class ValueLocation(NamedTuple):
    """The place of an intermediate value.

    Attributes:
        side: "in" or "out" for the input or output of a module, "at" for a named value of an ONNX graph.
        name: Name of the module or value.
    """

    side: str
    name: str

    def __str__(self) -> str:
        """Describe the place in a message."""
        return self.name if self.side == "at" else f"{self.side}put of {self.name or 'the network'}"


class IntermediateValues(Protocol):
    """Access to the intermediate values of a model."""

    def places(self, feeds: Feeds) -> list[ValueLocation]:
        """List all places in the order in which their values are computed."""

    def values(
        self, places: Iterable[ValueLocation], inferences: Iterable[Feeds]
    ) -> Iterator[dict[ValueLocation, Array]]:
        """Run the model on the inputs [n, ...] by name of each inference, and yield the values at these places."""

    def module_of(self, place: ValueLocation) -> str:
        """Return the name of the module to report for a place."""


class TorchValues:
    """The inputs and outputs of the submodules of a torch module.

    Args:
        runner: The module with its weights.
        names: Names of the submodules to trace; those without children when None.
    """

    def __init__(self, runner: TorchRunner | TorchSession, names: Iterable[str] | None = None) -> None:
        self._runner = runner
        parts = dict(runner.module.named_modules())
        wanted = [name for name, part in parts.items() if not list(part.children())] if names is None else list(names)
        self._parts = {name: parts[name] for name in wanted}

    def places(self, feeds: Feeds) -> list[ValueLocation]:
        """List the places; see `IntermediateValues`. A submodule that is called twice is listed at its last call."""
        seen: dict[ValueLocation, None] = {}

        def note(place: ValueLocation, _value: Any) -> None:
            seen.pop(place, None)
            seen[place] = None

        with self._hooked(self._parts, note):
            self._runner.run(feeds)
        return list(seen)

    def values(
        self, places: Iterable[ValueLocation], inferences: Iterable[Feeds]
    ) -> Iterator[dict[ValueLocation, Array]]:
        """Yield the values; see `IntermediateValues`."""
        wanted = set(places)
        for feeds in inferences:
            found: dict[ValueLocation, Array] = {}

            def keep(place: ValueLocation, value: Any, found: dict[ValueLocation, Array] = found) -> None:
                if place in wanted:
                    found[place] = value.detach().double().cpu().numpy()

            with self._hooked({place.name: self._parts[place.name] for place in wanted}, keep):
                self._runner.run(feeds)
            yield found

    def module_of(self, place: ValueLocation) -> str:
        """Return the submodule's name; see `IntermediateValues`."""
        return place.name

    @staticmethod
    @contextmanager
    def _hooked(parts: Mapping[str, nn.Module], tell: Callable[[ValueLocation, Any], None]) -> Iterator[None]:
        handles = []
        for name, part in parts.items():

            def before(_part: Any, inputs: Any, name: str = name) -> None:
                _report_tensor(tell, ValueLocation("in", name), inputs)

            def after(_part: Any, _inputs: Any, output: Any, name: str = name) -> None:
                _report_tensor(tell, ValueLocation("out", name), output)

            handles += [part.register_forward_pre_hook(before), part.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _report_tensor(tell: Callable[[ValueLocation, Any], None], place: ValueLocation, value: Any) -> None:
    while isinstance(value, tuple) and value:  # the first one, e.g. the tokens of (tokens, sizes)
        value = value[0]
    if hasattr(value, "is_floating_point") and value.is_floating_point():
        tell(place, value)


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Copy a graph with these of its values as further outputs."""
    import onnx

    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    given = {output.name for output in model.graph.output}
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in given)
    return shown


class OnnxValues:
    """The intermediate values of an ONNX graph.

    Args:
        model: The graph with its weights.
        load: Opens a session for a serialized model.
        by_module: True if places are the inputs and outputs of the torch modules from which the nodes were exported
            (`repaconv.onnx_export.torch_exporter` writes them into the node names), False if they are value names.
    """

    def __init__(self, model: onnx.ModelProto, load: Callable[[bytes], Session], *, by_module: bool) -> None:
        self._model, self._load = model, load
        self._value_names = _places_by_module(model) if by_module else _places_by_name(model)

    def places(self, feeds: Feeds) -> list[ValueLocation]:
        """List the places; see `IntermediateValues`."""
        return list(self._value_names)

    def values(
        self, places: Iterable[ValueLocation], inferences: Iterable[Feeds]
    ) -> Iterator[dict[ValueLocation, Array]]:
        """Yield the values; see `IntermediateValues`. The graph is run with these values as further outputs."""
        wanted = {place: self._value_names[place] for place in places if place in self._value_names}
        session = self._load(with_outputs(self._model, wanted.values()).SerializeToString())

        def run(feeds: Feeds) -> dict[ValueLocation, Array]:
            found = session.run(named([port.name for port in session.inputs], feeds))
            tensors = {place: found[name] for place, name in wanted.items() if not isinstance(found[name], list)}
            arrays = {place: np.asarray(tensor) for place, tensor in tensors.items()}
            return {place: array for place, array in arrays.items() if np.issubdtype(array.dtype, np.floating)}

        yield from map(run, inferences)

    def module_of(self, place: ValueLocation) -> str:
        """Return the torch module that computes the value; see `IntermediateValues`."""
        if place.side != "at":
            return place.name
        return next((_module_of_node(node) for node in self._model.graph.node if place.name in node.output), place.name)


def _module_of_node(node: onnx.NodeProto) -> str:
    module, _, own = str(node.name).rpartition("/")
    return module or own or str(node.op_type)


CANCEL = ("ReduceMean", "ReduceSum")


def _places_by_name(model: onnx.ModelProto) -> dict[ValueLocation, str]:
    """All named values, except sums and means, which may cancel to nearly zero, so that relative errors say nothing."""
    nodes = [node for node in model.graph.node if node.op_type not in CANCEL]
    return {ValueLocation("at", name): name for node in nodes for name in node.output if name}


def _places_by_module(model: onnx.ModelProto) -> dict[ValueLocation, str]:
    """The first input and the last output of each module without child modules."""
    constants = {weight.name for weight in model.graph.initializer}
    constants |= {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    modules = {node.name.rpartition("/")[0] for node in model.graph.node}
    holders = {module[:cut] for module in modules for cut in range(len(module)) if module[cut] == "."}
    found: dict[ValueLocation, str] = {}
    for node in model.graph.node:
        module = node.name.rpartition("/")[0]
        data = [name for name in node.input if name and name not in constants]
        if module and module not in holders and data and node.output:
            found.setdefault(ValueLocation("in", module), data[0])
            found.pop(ValueLocation("out", module), None)
            found[ValueLocation("out", module)] = node.output[0]
    return found
