"""Run torch modules on the CPU, eager or compiled. All five papers measured with torch.

It runs the module of a run folder without an ONNX graph. Convolutions run channels-last. There is no build.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import EnvironmentProblem, Refused, require_module
from repaconv.core.progress import only_errors
from repaconv.engines.contract import (
    Ability,
    Array,
    BuildSpec,
    Built,
    Deployable,
    Feeds,
    Network,
    Profiled,
    SessionSpec,
    cannot,
    nothing_to_build,
    require_device,
)
from repaconv.engines.tunable_session_settings import require_one_stream

if TYPE_CHECKING:
    from torch import Tensor, nn

COMPILERS = ("c++", "g++", "clang++")
PRECISIONS = ("fp32", "bf16", "fp16")


class TorchSession:
    """A copy of a module on the CPU. ``options`` lists the settings in effect."""

    def __init__(self, network: Network, spec: SessionSpec, device: str, *, compiled: bool) -> None:
        """See `Torch.open`."""
        import torch

        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        self._dtype, self._spec, self._device = dtypes.get(spec.precision, torch.float32), spec, device
        module = deepcopy(network.module).eval().to(device=device, dtype=self._dtype)
        self._spatial = any(
            isinstance(part, torch.nn.Conv2d) and part.kernel_size != (1, 1) for part in module.modules()
        )
        if self._spatial:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module, self.inputs, self.outputs = module, network.inputs, network.outputs
        self._call: Callable[..., Any] = _compiled(module) if compiled else module
        self.options = {
            "threads": str(spec.threads),
            "mode": "compiled" if compiled else "eager",
            "memory_format": "channels_last" if self._spatial else "contiguous",
        }

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """See `repaconv.engines.contract.Session`; outputs below float32 are returned in float32."""
        import torch

        if torch.get_num_threads() != self._spec.threads:  # a setting of the whole process
            torch.set_num_threads(self._spec.threads)
        with torch.inference_mode():
            found = self._call(*self._tensors(feeds))
        outputs = (found,) if isinstance(found, torch.Tensor) else tuple(found)
        return {port.name: _array(value) for port, value in zip(self.outputs, outputs, strict=True)}

    def _tensors(self, feeds: Feeds) -> list[Tensor]:
        return [self._tensor(feeds[port.name]) for port in self.inputs]

    def _tensor(self, array: Array) -> Tensor:
        import torch

        tensor = torch.from_numpy(array).to(self._device)
        tensor = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        return tensor.to(memory_format=torch.channels_last) if self._spatial and tensor.ndim == 4 else tensor

    def placement(self, feeds: Feeds) -> dict[str, str]:
        """Return the device for every module without children."""
        return {name: self._device for name, part in self.module.named_modules() if not list(part.children())}

    def profile(self, feeds: Feeds, *, runs: int, warmup_runs: int) -> Profiled:
        """Raise: profiling is not supported.

        Raises:
            EnvironmentProblem: Always.
        """
        raise cannot("torch", "profile")


class Torch:
    """torch on the CPU, eager or compiled."""

    suffix = ""
    opens: tuple[str, ...] = ()
    can: frozenset[Ability] = frozenset({"run", "networks", "placement"})
    takes: tuple[str, ...] = ()
    precisions: tuple[str, ...] = PRECISIONS
    device = "cpu"

    def __init__(self, name: str, *, compiled: bool) -> None:
        """``compiled`` selects `torch.compile`."""
        self.name, self.compiled = name, compiled

    def version(self) -> str:
        """See `repaconv.engines.contract.Engine`."""
        return str(require_module("torch", "torch", "pip install torch").__version__)

    def open(self, deployable: Deployable | Network, spec: SessionSpec) -> TorchSession:
        """Prepare a network in memory for inference.

        Raises:
            EnvironmentProblem: If torch does not support the precision, or `torch.compile` lacks a C++ compiler.
            Refused: If a file is given.
        """
        device = require_device("torch", spec, self.device)
        require_one_stream("torch", spec)
        if spec.precision not in self.precisions:
            raise EnvironmentProblem(
                f"torch does not compute in {spec.precision} here.",
                hint=f"Supported: {', '.join(self.precisions[:-1])} and {self.precisions[-1]}.",
                code="precision",
            )
        if self.compiled and not any(map(shutil.which, COMPILERS)):
            raise EnvironmentProblem(
                "torch.compile needs a C++ compiler, and none was found.",
                hint="Install g++ or clang, or measure eager mode: --target cpu-torch.",
                code="runtime.missing",
            )
        if not isinstance(deployable, Network):
            raise Refused(
                f"{deployable if isinstance(deployable, Path) else 'this'} is a file, but torch runs the module of "
                "a run folder.",
                hint="Give the run folder: repaconv bench RUN --target cpu-torch.",
                code="torch.file",
            )
        return self._session(deployable, spec, device)

    def build(self, spec: BuildSpec) -> Built:
        """Raise: torch runs modules directly.

        Raises:
            EnvironmentProblem: Always.
        """
        raise nothing_to_build(self.name)

    def _session(self, network: Network, spec: SessionSpec, device: str) -> TorchSession:
        return TorchSession(network, spec, device, compiled=self.compiled)


def _compiled(module: nn.Module) -> Callable[..., Any]:
    """Compile with `torch.compile`, which does its work at the first inference."""
    import torch

    with only_errors("torch.utils.cpp_extension"), suppress(ImportError):
        import torch.utils.cpp_extension  # imported here since CUDA builds warn of a missing GPU
    compiled: Callable[..., Any] = torch.compile(module, dynamic=False)
    return compiled


def _array(value: Tensor) -> Array:
    array: Array = (value.float() if value.is_floating_point() else value).cpu().numpy()
    return array


EAGER = Torch("torch", compiled=False)
COMPILED = Torch("torch-compiled", compiled=True)
