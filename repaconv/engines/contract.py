"""What a runtime is: what it opens and runs, and what it builds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from numpy.typing import NDArray

from repaconv.core.errors import EnvironmentProblem

if TYPE_CHECKING:
    from torch import nn

Array = NDArray[Any]
Feeds = Mapping[str, Array]


def shapes_told(arrays: Feeds) -> str:
    """Names and shapes, in words."""
    return ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())


"""Every input by its name."""
Ability = Literal["run", "networks", "engines", "profile", "placement", "elsewhere", "streams"]

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Least, usual and largest shape of an input."""


def _no_tick(_what: str, _done: int, _total: int) -> None:
    """Progress for nobody."""


class Port(NamedTuple):
    """An input or an output.

    Attributes:
        name: Its own.
        shape: A name, or None, stands for a size that is free.
        dtype: In NumPy's words, or the runtime's where NumPy has no such type.
    """

    name: str
    shape: tuple[int | str | None, ...]
    dtype: str


class Network(NamedTuple):
    """A torch module in memory, and what it takes and gives, in the order of its arguments and results."""

    module: nn.Module
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


Deployable = Path | bytes
"""What an engine opens: a graph or what the engine built of one, in a file or read already."""


@dataclass(frozen=True)
class SessionSpec:
    """How a model is to be opened. What a runtime has no use for, it leaves alone; a device it has not, it refuses.

    Attributes:
        device: What it runs on: ``cpu``, or ``cuda:0``; the engine's own when None.
        threads: Of one inference on a processor, the calling thread included.
        precision: What a runtime that lowers by itself is to compute in.
        sizes: Of free dimensions by name, so that shapes are known when the graph is optimised.
        weights: Of a graph that comes as bytes: the folder of its external weights, or these by name.
        lean: Whether memory goes back after every call, and the model is not kept to be profiled: it is called a few
            times, beside others, and not timed.
        as_written: Whether nothing of a graph is fused: what a runtime fuses may keep float64's constants in float32.
        streams: Calls that run at once, each from a thread of the caller's and on ``threads`` of its own.
        settings: NAME=VALUE of the runtime's own, of those that its engine is tuned by (`engines/settings.py`).
    """

    device: str | None = None
    threads: int = 1
    precision: str = "fp32"
    sizes: Mapping[str, int] = field(default_factory=dict)
    weights: Path | Mapping[str, Array] | None = None
    lean: bool = False
    as_written: bool = False
    streams: int = 1
    settings: tuple[str, ...] = ()


class Profiled(NamedTuple):
    """Where a session's time went.

    Attributes:
        kernels: Events of the runtime's own profiler, of all runs that count.
        weights: The nodes as they ran, in order, with the shapes of their constants.
        peak_gflops: What one large matrix product reaches on the same device and threads.
    """

    kernels: list[dict[str, Any]]
    weights: dict[str, tuple[tuple[int, ...], ...]]
    peak_gflops: float


class Session(Protocol):
    """An opened model of any engine.

    Attributes:
        inputs: In the model's order.
        outputs: In the model's order.
        options: What was set, as artefacts have it; all else is the runtime's default.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    options: dict[str, str]

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Every input by name to every output by name, done when it returns; the arrays are the caller's to keep."""

    def synchronise(self) -> None:
        """Wait until the device has nothing left to do, as before a clock is started."""

    def placement(self, feeds: Feeds) -> dict[str, str]:
        """Which device, in the runtime's words, each node computes on."""

    def profile(self, feeds: Feeds, *, runs: int, warmup_runs: int) -> Profiled:
        """Where the time of so many runs goes."""


@runtime_checkable
class OnCard(Protocol):
    """What a session besides does that computes on a GPU."""

    def clocked(self, feeds: Feeds) -> Callable[[], float]:
        """One inference of inputs that lie on the card already, outputs left there: its milliseconds."""

    def fallen(self, feeds: Feeds) -> tuple[str, ...]:
        """Nodes that the processor computes in the card's place."""


class Engine(Protocol):
    """A runtime, as the registry knows it.

    Attributes:
        name: In targets and in the registry.
        suffix: Of what it builds.
        opens: Suffixes of files that are its own to open, where nothing beside them says whose they are.
        device: ``cpu`` or ``cuda``: what its sessions compute on.
        can: What its sessions do. One with ``networks`` opens a `Network` where others open graphs, one with
            ``engines`` what it built; one with ``elsewhere`` builds where its device is not, and runs on that alone;
            of one with ``streams`` a session runs several calls at once.
        takes: What `build` may be asked for besides: ``workspace``, ``timing_cache``, ``replay``.
    """

    name: str
    suffix: str
    opens: tuple[str, ...]
    device: str
    can: frozenset[Ability]
    takes: tuple[str, ...]

    def version(self) -> str:
        """Of the installed package.

        Raises:
            EnvironmentProblem: If it cannot be imported.
        """

    def open(self, deployable: Deployable, spec: SessionSpec) -> Session:
        """Make a model ready to run.

        Raises:
            EnvironmentProblem: If the runtime is not here, or not that device or precision.
            Refused: If it does not take the model.
        """

    def build(self, order: Order) -> Built:
        """Make an engine.

        Raises:
            EnvironmentProblem: If the runtime is not here, or does not build that here.
            Refused: If it does not take the model.
        """


@dataclass(frozen=True)
class Order:
    """An engine that is wanted.

    Attributes:
        model: The ONNX file; its weights may lie in a file beside it.
        precision: ``fp32``, ``fp16``, ``bf16`` or ``int8``: what the graph is typed in, or what the runtime is to use.
        capabilities: Compute capabilities of the GPUs that it is for, e.g. ``8.9``.
        shapes: Of each input that has free dimensions.
        islands: Nodes that are to compute in float32.
        here: Whether it is for a machine of this one's kind.
        threads: Of one inference, on processors.
        settings: See `SessionSpec`.
        workspace: Bytes of scratch memory that a kernel may take; the runtime's own limit when None.
        timing_cache: What earlier builds measured of kernels, serialised; None lets the builder measure all.
        replay: Fail where the timing cache has no answer, so that the same engine comes out.
        tick: Told how far a long build is.
    """

    model: Path
    precision: str = "fp32"
    capabilities: tuple[str, ...] = ()
    shapes: Mapping[str, Shapes] = field(default_factory=dict)
    islands: tuple[str, ...] = ()
    here: bool = True
    threads: int = 1
    settings: tuple[str, ...] = ()
    workspace: int | None = None
    timing_cache: bytes | None = None
    replay: bool = False
    tick: Callable[[str, int, int], None] = _no_tick


@dataclass(frozen=True)
class Built:
    """An engine.

    Attributes:
        engine: Serialised.
        types: How many of what computes are of which type, ``MATRIX_MULTIPLY.HALF`` for one; ``INT8`` where int8 is
            multiplied.
        log: The builder's.
        options: What was set, to be set again when it is loaded.
        proved: What the types were read from.
        may_stay: Types that are no fault where int8 was asked for: of products that the runtime does not quantise.
        runs_here: Whether it can be loaded and compared on this machine.
        timing_cache: As it is after the build, if there is such a thing.
    """

    engine: bytes
    types: Mapping[str, int]
    log: str
    options: Mapping[str, str]
    proved: str
    runs_here: bool
    may_stay: tuple[str, ...] = ()
    timing_cache: bytes | None = None


def label(precision: str) -> str:
    """How a precision is called in `Built.types`."""
    return {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16", "int8": "INT8"}[precision]


def as_text(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as an artefact has them."""
    return {name: str(value) for name, value in sorted(options.items())}


def require_device(engine: str, spec: SessionSpec, *kinds: str) -> str:
    """The device that is asked for, else the engine's own, which is the first of these kinds.

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
    """What is raised by an engine that runs networks as they are."""
    return EnvironmentProblem(
        f"{engine} runs the run's PyTorch module directly: there is nothing to build.",
        hint="Measure it with repaconv bench --target cpu-torch.",
        code="build.nothing",
    )


def cannot(engine: str, ability: Ability) -> EnvironmentProblem:
    """What a session raises that is asked for what its engine's ``can`` leaves out."""
    return EnvironmentProblem(
        f"{engine} does not report a {ability}.",
        hint="ONNX Runtime does: choose a target that uses it.",
        code="runtime.cannot",
    )
