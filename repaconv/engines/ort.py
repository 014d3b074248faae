"""ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from repaconv.errors import EnvironmentProblem, Refused


class OrtSession:
    """A loaded model. ``options`` says what was set, everything else is ONNX Runtime's default."""

    def __init__(self, model: Path | bytes, threads: int, dims: Mapping[str, int], folder: Path | None) -> None:
        """See `OnnxRuntime.session`."""
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads
        settings.inter_op_num_threads = 1
        settings.log_severity_level = 3
        if folder is not None:
            settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        for name, size in dims.items():
            settings.add_free_dimension_override_by_name(name, size)
        source = model if isinstance(model, bytes) else str(model)
        self._session = onnxruntime.InferenceSession(source, settings, providers=["CPUExecutionProvider"])
        self.input = self._session.get_inputs()[0]
        self.options = {
            "intra_op_num_threads": str(threads),
            "inter_op_num_threads": "1",
            "execution_provider": "CPUExecutionProvider",
            **{f"free_dimension_override.{name}": str(size) for name, size in dims.items()},
        }

    def run(self, images: NDArray[np.float32]) -> NDArray[np.floating]:
        """Images [N, C, H, W] to the first output [N, K]."""
        output: NDArray[np.floating] = self._session.run(None, {self.input.name: images})[0]
        return output

    def values(self, images: NDArray[np.float32]) -> dict[str, NDArray[np.floating]]:
        """Images [N, C, H, W] to all outputs by name."""
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, {self.input.name: images}), strict=True))

    @property
    def input_shape(self) -> tuple[int | str | None, ...]:
        """Of the first input, [B, C, H, W]; names stand for dimensions that are free."""
        shape = tuple(self.input.shape)
        return (shape[0], shape[3], *shape[1:3]) if self.takes_pixels and len(shape) == 4 else shape

    @property
    def takes_pixels(self) -> bool:
        """Whether the input is pixels, [B, H, W, C] in uint8."""
        return bool(self.input.type == "tensor(uint8)")


class OnnxRuntime:
    """The runtime as the registry knows it."""

    name = "onnxruntime"

    def version(self) -> str:
        """Of the installed package.

        Raises:
            EnvironmentProblem: If it cannot be imported.
        """
        try:
            import onnxruntime
        except ImportError as error:
            raise EnvironmentProblem(
                f"ONNX Runtime cannot be imported: {error}.",
                hint="pip install onnxruntime",
                code="runtime.missing",
            ) from error
        return str(onnxruntime.__version__)

    def session(
        self,
        model: Path | bytes,
        *,
        threads: int,
        dims: Mapping[str, int] | None = None,
        folder: Path | None = None,
    ) -> OrtSession:
        """Load a model.

        Args:
            model: An .onnx file or its bytes.
            threads: Of one inference, the calling thread included.
            dims: Sizes for free dimensions by name, so that shapes are known when the graph is optimised.
            folder: Where the external weights of a graph in bytes lie.

        Raises:
            Refused: If ONNX Runtime does not take the model.
        """
        self.version()
        try:
            return OrtSession(model, threads, dims or {}, folder)
        except Exception as error:
            where = "the model" if isinstance(model, bytes) else str(model)
            raise Refused(
                f"ONNX Runtime does not load {where}: {str(error).splitlines()[0]}.",
                hint="Check that it is an ONNX file, and that its opset is not newer than this runtime.",
                code="onnx.unloadable",
            ) from error


ENGINE = OnnxRuntime()
