"""torch's exporter, asked each question once in a test session: an export takes seconds, and many tests want the same.

The question is the module with all its attributes and weights, and every argument; what cannot be written down (a
local class, a hook, a stream) and what a test has patched is exported afresh. The answers lie in a folder of the
session, for all workers of pytest-xdist.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
from functools import cached_property, wraps
from pathlib import Path

import onnx
import onnx_ir
import torch
from filelock import FileLock

FOLDER = "REPACONV_TESTS_EXPORTED"
"""The environment variable that names the folder; without it every export is fresh."""
TESTS = str(Path(__file__).parent) + os.sep
LARGEST = 64 * 2**20
NETS = tuple(f"repaconv.{room}" for room in ("affine", "backbones", "convolution", "methods", "skeletons", "trained"))


class Program:
    """What is asked of torch's ONNXProgram here, of a graph that was written before."""

    def __init__(self, content: bytes) -> None:
        self.model_proto = onnx.load_from_string(content)

    @cached_property
    def model(self) -> onnx_ir.Model:
        return onnx_ir.from_proto(self.model_proto)


class _Question(pickle.Pickler):
    """Tensors are their values, and whose memory they share; a module's sets are sorted; all else as pickle has it."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.memories: dict[int, int] = {}

    def reducer_override(self, value):
        if isinstance(value, torch.nn.Module):
            told = {name: sorted(part) if isinstance(part, set) else part for name, part in vars(value).items()}
            return tuple, ((type(value), told),)
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        shared = self.memories.setdefault(value.untyped_storage().data_ptr(), len(self.memories))
        told = (type(value), str(value.dtype), value.stride(), value.requires_grad, shared)
        values = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tuple, ((*told, tuple(value.shape), values),)


def question_of(module: torch.nn.Module, *given: object, **named: object) -> str | None:
    """A hash of all that the exporter is asked; None where that cannot be told."""
    tensors = [*module.parameters(), *module.buffers()]
    if patched() or sum(tensor.numel() * tensor.element_size() for tensor in tensors) > LARGEST:
        return None
    stream, around = io.BytesIO(), (torch.get_default_dtype(), torch.is_grad_enabled())
    try:
        _Question(stream).dump((module, given, named, around))
    except Exception:  # pickle and torch raise many
        return None
    return hashlib.sha256(stream.getvalue()).hexdigest()


def patched() -> bool:
    """Whether the code of the networks is in part a test's own at the moment."""
    rooms = [module for name, module in sys.modules.items() if name.startswith(NETS)]
    return any(_of_a_test(part) for room in rooms for value in vars(room).values() for part in _parts(value))


def _parts(value: object) -> list[object]:
    inside = isinstance(value, type) and value.__module__.startswith(NETS)
    return [value, *vars(value).values()] if inside else [value]


def _of_a_test(value: object) -> bool:
    value = getattr(value, "__func__", value) if callable(value) else None
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(TESTS)


def once(export):
    """torch.onnx.export that looks into the session's folder first."""

    @wraps(export)
    def found(module, given=(), *more, **named):
        folder, question = os.environ.get(FOLDER), None
        if folder and named.get("dynamo") and not more:
            question = question_of(module, given, **named)
        if question is None:
            return export(module, given, *more, **named)
        path = Path(folder, f"{question}.onnx")
        with FileLock(path.with_suffix(".asked")):  # a worker that asks the same waits for the answer
            if path.is_file():
                return Program(path.read_bytes())
            program = export(module, given, *more, **named)
            writing = path.with_suffix(".writing")
            writing.write_bytes(program.model_proto.SerializeToString())
            writing.replace(path)
            return program

    return found
