"""The interface of an inference engine: sessions that run models, and engines that are built from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from numpy.typing import NDArray

from repaconv.core.errors import EnvironmentProblem
from repaconv.deprecation import deprecated, former_attribute, former_names, renamed_argument

if TYPE_CHECKING:
    from torch import nn

Array = NDArray[Any]
Feeds = Mapping[str, Array]
"""Every input by its name."""


def shapes_text(arrays: Feeds) -> str:
    """Format names and shapes as text, e.g. ``input [1, 3, 224, 224]``."""
    return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())


@deprecated("shapes_text", removed_in="0.3.0")
def shapes_told(arrays: Feeds) -> str:
    """Former name of `shapes_text`."""
    return shapes_text(arrays)


ENGINE_SUFFIXES = (".onnx", ".ort", ".blob", ".engine", ".plan")
"""Suffixes of files that `build` writes, each with a .json file that describes it."""

Ability = Literal["run", "networks", "engines", "profile", "placement", "elsewhere", "streams"]

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Minimum, usual and maximum shape of an input."""


def _no_tick(_what: str, _done: int, _total: int) -> None:
    """Ignore progress."""


class Port(NamedTuple):
    """A model input or output.

    Attributes:
        name: The tensor's name.
        shape: A number, or a name or None for a dynamic dimension.
        dtype: NumPy's name of the type, or the runtime's if NumPy has no such type.
    """

    name: str
    shape: tuple[int | str | None, ...]
    dtype: str


class Network(NamedTuple):
    """A torch module in memory, with its inputs and outputs in the order of arguments and results."""

    module: nn.Module
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


Deployable = Path | bytes
"""What an engine loads: an ONNX graph or an engine file, as a path or as bytes."""


@dataclass(frozen=True)
class SessionSpec:
    """Options for loading a model.

    A runtime ignores options that it does not have, but refuses a device that it does not support.

    Attributes:
        device: ``cpu`` or ``cuda:0``; None for the engine's default.
        threads: CPU threads per inference, including the calling thread.
        precision: The compute precision of a runtime that lowers precision itself.
        sizes: Sizes of dynamic dimensions by name, so that the graph is optimized for known shapes.
        weights: External weights of a graph given as bytes: their folder, or the arrays by name.
        lean: Whether to release memory after every inference, and not to keep the model for profiling. Used for
            sessions that run a few untimed inferences while other sessions are loaded.
        no_prepacking: Whether to keep no copy of the weights in the kernels' layout: less memory, slower inferences.
        as_written: Whether to disable graph optimization: fused nodes may hold float64 constants in float32.
        streams: Number of concurrent inferences, each called from its own thread and using its own ``threads``.
        settings: NAME=VALUE settings of the runtime, of those that the engine lists for tuning
            (`repaconv.engines.tunable_session_settings`).
    """

    device: str | None = None
    threads: int = 1
    precision: str = "fp32"
    sizes: Mapping[str, int] = field(default_factory=dict)
    weights: Path | Mapping[str, Array] | None = None
    lean: bool = False
    no_prepacking: bool = False
    as_written: bool = False
    streams: int = 1
    settings: tuple[str, ...] = ()


class Profiled(NamedTuple):
    """Profiling data of a session.

    Attributes:
        kernels: Events of the runtime's profiler, without the warm-up runs, as ONNX Runtime writes them: ``name`` with
            ``_kernel_time`` after it, ``dur`` in microseconds, and ``args`` with ``op_name``, ``input_type_shape`` and
            ``output_type_shape``. A runtime whose shapes do not show the operations or the precision of a node adds
            ``flops`` and ``precision``. What was fused into an operator follows its name after a ``+``.
        weights: The shapes of the constants of each executed node, in execution order.
        peak_gflops: No longer read: peaks are measured by opening large products.
    """

    kernels: list[dict[str, Any]]
    weights: dict[str, tuple[tuple[int, ...], ...]]
    peak_gflops: float = 0.0


class Session(Protocol):
    """A loaded model of any engine.

    Attributes:
        inputs: Inputs in the model's order.
        outputs: Outputs in the model's order.
        options: The settings in effect, as artifacts record them; all others are the runtime's defaults.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    options: dict[str, str]

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run one inference from inputs by name to outputs by name.

        It returns when all outputs are complete. The caller may keep the arrays.
        """

    def placement(self, feeds: Feeds) -> dict[str, str]:
        """Return the device of each node, named as the runtime does."""

    def profile(self, feeds: Feeds, *, runs: int, warmup_runs: int) -> Profiled:
        """Profile this many inferences."""


@runtime_checkable
class GpuSession(Protocol):
    """Additional methods of a session that computes on a GPU."""

    def gpu_timed_call(self, feeds: Feeds) -> Callable[[], float]:
        """Return a function that runs one inference with inputs and outputs in GPU memory, and returns milliseconds."""

    def nodes_on_cpu(self, feeds: Feeds) -> tuple[str, ...]:
        """Return the nodes that run on the CPU because the GPU provider has no kernel for them."""


@dataclass(frozen=True)
class GpuTimed:
    """A function that runs one inference and returns its milliseconds by the GPU's clock."""

    run: Callable[[], float]

    def __call__(self) -> float:
        """Run one inference; return milliseconds."""
        return self.run()


class Engine(Protocol):
    """An inference runtime, as the registry lists it.

    Attributes:
        name: Name in targets and in the registry.
        suffix: Suffix of the files that it builds.
        opens: Suffixes of files that it loads if no other file states their engine.
        device: ``cpu`` or ``cuda``.
        can: Capabilities. ``networks``: it loads a `Network` instead of a graph. ``engines``: it loads only engines
            that it built. ``elsewhere``: it builds without the device, and runs only on it. ``streams``: a session runs
            several inferences at once. ``run``, ``profile``, ``placement``: its sessions have these methods.
        takes: Further options that `build` supports: ``workspace``, ``timing_cache``, ``replay``.
    """

    name: str
    suffix: str
    opens: tuple[str, ...]
    device: str
    can: frozenset[Ability]
    takes: tuple[str, ...]

    def version(self) -> str:
        """Return the version of the installed package.

        Raises:
            EnvironmentProblem: If it cannot be imported.
        """

    def open(self, deployable: Deployable, spec: SessionSpec) -> Session:
        """Load a model.

        Raises:
            EnvironmentProblem: If the runtime, the device or the precision is not available.
            Refused: If the runtime rejects the model.
        """

    def build(self, spec: BuildSpec) -> Built:
        """Build an engine.

        Raises:
            EnvironmentProblem: If the runtime is not installed, or cannot build this on this machine.
            Refused: If the runtime rejects the model.
        """


@renamed_argument("islands", "fp32_nodes", removed_in="0.3.0")
@dataclass(frozen=True)
class BuildSpec:
    """Options for building an engine.

    Attributes:
        model: The ONNX file; its weights may be in an external file next to it.
        precision: ``fp32``, ``fp16``, ``bf16`` or ``int8``: the type of the graph, or the one that the runtime uses.
        capabilities: Compute capabilities of the target GPUs, e.g. ``8.9``.
        shapes: Minimum, usual and maximum shape of each input with dynamic dimensions.
        fp32_nodes: Names of nodes that compute in float32.
        here: Whether the engine is for a machine like this one.
        threads: CPU threads per inference.
        settings: See `SessionSpec`.
        workspace: Maximum scratch memory of a kernel in bytes; None for the runtime's limit.
        timing_cache: Serialized kernel timings of earlier builds; None to time all kernels.
        replay: Fail if the timing cache lacks a kernel, so that the same engine is built again.
        tick: Called with phase, step and number of steps during a long build.
    """

    model: Path
    precision: str = "fp32"
    capabilities: tuple[str, ...] = ()
    shapes: Mapping[str, Shapes] = field(default_factory=dict)
    fp32_nodes: tuple[str, ...] = ()
    here: bool = True
    threads: int = 1
    settings: tuple[str, ...] = ()
    workspace: int | None = None
    timing_cache: bytes | None = None
    replay: bool = False
    tick: Callable[[str, int, int], None] = _no_tick

    islands = former_attribute("islands", "fp32_nodes", removed_in="0.3.0")


@renamed_argument("proved", "types_source", removed_in="0.3.0")
@dataclass(frozen=True)
class Built:
    """A built engine.

    Attributes:
        engine: The serialized engine.
        types: Number of layers by kind and type, e.g. ``MATRIX_MULTIPLY.HALF``; ``INT8`` for products of int8.
        log: The builder's log.
        options: The options in effect, to be set again when the engine is loaded.
        types_source: What the types were read from, as a sentence.
        may_stay: Types that are allowed although int8 was requested: of products that the runtime does not quantize.
        runs_here: Whether the engine can be loaded and verified on this machine.
        timing_cache: The timing cache after the build, if the runtime has one.
    """

    engine: bytes
    types: Mapping[str, int]
    log: str
    options: Mapping[str, str]
    types_source: str
    runs_here: bool
    may_stay: tuple[str, ...] = ()
    timing_cache: bytes | None = None

    proved = former_attribute("proved", "types_source", removed_in="0.3.0")


if not TYPE_CHECKING:
    __getattr__ = former_names(__name__, {"OnCard": GpuSession, "Order": BuildSpec}, removed_in="0.3.0")


def label(precision: str) -> str:
    """Return the name of a precision in `Built.types`."""
    return {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16", "int8": "INT8"}[precision]


def as_text(options: Mapping[str, Any]) -> dict[str, str]:
    """Convert options to sorted text, as artifacts record them."""
    return {name: str(value) for name, value in sorted(options.items())}


def require_device(engine: str, spec: SessionSpec, *kinds: str) -> str:
    """Return the requested device, or the engine's default, the first of these kinds.

    Raises:
        EnvironmentProblem: If the engine does not run on it.
    """
    if spec.device is None:
        return "cpu" if kinds[0] == "cpu" else f"{kinds[0]}:0"
    if spec.device.partition(":")[0] not in kinds:
        raise EnvironmentProblem(
            f"{engine} does not run on {spec.device} on this machine.",
            hint=f"It runs on {', '.join(kinds)}.",
            code="runtime.device",
        )
    return spec.device


def nothing_to_build(engine: str) -> EnvironmentProblem:
    """Return the error of an engine that runs torch modules directly and has no build."""
    return EnvironmentProblem(
        f"{engine} runs the run's PyTorch module directly: there is nothing to build.",
        hint="Measure it with repaconv bench --target cpu-torch.",
        code="build.nothing",
    )


def cannot(engine: str, ability: Ability) -> EnvironmentProblem:
    """Return the error for a method that is not in the engine's ``can``."""
    return EnvironmentProblem(
        f"{engine} does not report a {ability}.",
        hint="ONNX Runtime and OpenVINO do: choose a target that uses one of them.",
        code="runtime.cannot",
    )
