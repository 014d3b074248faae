"""A cache of torch exports for one test session: an export takes seconds, and many tests need the same one.

The key is the module with all its attributes and weights, and every argument. What cannot be pickled (a local class, a
hook, a stream) and what a test has patched is exported afresh. torch traces a network without looking at the values of
its weights. A module that differs from an earlier one in its weights alone therefore takes the earlier graph before
torch's own simplification and has that simplified with its own weights: the same graph except for the numbers in the
names of values. The exports are in a folder of the session, shared by all workers of pytest-xdist.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path

import onnx
import onnx_ir
import torch
from filelock import FileLock
from torch.onnx import ONNXProgram
from torch.onnx._internal.exporter._registration import ONNXRegistry

FOLDER = "REPACONV_TESTS_EXPORTED"
"""The environment variable that names the folder; without it every export is fresh."""
TESTS = str(Path(__file__).parent) + os.sep
LARGEST = 64 * 2**20
DEPLOY = ("repaconv.algebra", "repaconv.backbones")
NETS = (*DEPLOY, "repaconv.methods")

ONNXRegistry.from_torchlib = staticmethod(cache(ONNXRegistry.from_torchlib))  # else read from its sources every time


def program_of(content: bytes) -> ONNXProgram:
    """A graph that was written before, as the exporter would give it."""
    return ONNXProgram(onnx_ir.from_proto(onnx.load_from_string(content)), None)


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, under each of their names."""
    parts = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return {name: tensor for part in parts for name, tensor in part}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class _Question(pickle.Pickler):
    """Tensors are their values, and whose memory they share; a module's sets are sorted; all else as pickle has it.

    Of the tensors in ``untold`` (by identity) the values are left out.
    """

    def __init__(self, stream: io.BytesIO, untold: frozenset[int]) -> None:
        super().__init__(stream)
        self.memories: dict[int, int] = {}
        self.untold = untold

    def reducer_override(self, value):
        if isinstance(value, torch.nn.Module):
            told = {name: sorted(part) if isinstance(part, set) else part for name, part in vars(value).items()}
            return tuple, ((type(value), told),)
        if isinstance(value, torch._ops.OpOverload):  # of a translation table
            return str, (str(value),)
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        shared = self.memories.setdefault(value.untyped_storage().data_ptr(), len(self.memories))
        told = (type(value), str(value.dtype), value.stride(), value.requires_grad, shared)
        values = None if id(value) in self.untold else bytes_of(value)
        return tuple, ((*told, tuple(value.shape), values),)


def question_of(module: torch.nn.Module, *given: object, weighed: bool = True, **named: object) -> str | None:
    """A hash of all that the exporter is asked, the weights' values included if ``weighed``; None if it has none."""
    weights = weights_of(module).values()
    if patched(module) or sum(tensor.numel() * tensor.element_size() for tensor in weights) > LARGEST:
        return None
    stream, around = io.BytesIO(), (torch.get_default_dtype(), torch.is_grad_enabled())
    try:
        untold = frozenset() if weighed else frozenset(map(id, weights))
        _Question(stream, untold).dump((module, given, named, around))
    except Exception:  # pickle and torch raise many
        return None
    return hashlib.sha256(stream.getvalue()).hexdigest()


def patched(network: torch.nn.Module) -> bool:
    """Whether code of this network is in part a test's own at the moment; a deploy form has none of a method."""
    of_a_method = any(type(part).__module__.startswith(NETS[len(DEPLOY) :]) for part in network.modules())
    rooms = [room for name, room in sys.modules.items() if name.startswith(NETS if of_a_method else DEPLOY)]
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


def remembered(path: Path, ask: Callable[[], ONNXProgram]) -> bytes:
    """What the file holds; if there is none yet, it is written with the answer."""
    with FileLock(f"{path}.asked"):  # a worker that asks the same waits for the answer
        if not path.is_file():
            writing = path.with_suffix(".writing")
            writing.write_bytes(ask().model_proto.SerializeToString())
            writing.replace(path)
    return path.read_bytes()


def weighed(content: bytes, module: torch.nn.Module) -> ONNXProgram:
    """The graph of a network like this one, with the weights of this one, simplified as torch does it."""
    graph, weights = onnx.load_from_string(content), weights_of(module)
    for initializer in graph.graph.initializer:
        if initializer.name in weights:
            initializer.raw_data = bytes_of(weights[initializer.name])
    program = ONNXProgram(onnx_ir.from_proto(graph), None)
    program.optimize()
    return program


def once(export):
    """torch.onnx.export that looks into the session's folder first."""

    @wraps(export)
    def found(module, given=(), *more, **named):
        folder, question = os.environ.get(FOLDER), None
        if folder and named.get("dynamo") and named.get("optimize", True) and not more:
            question = question_of(module, given, **named)
        if question is None:
            return export(module, given, *more, **named)

        def simplified() -> ONNXProgram:
            untold = question_of(module, given, weighed=False, **named)
            like = Path(folder, f"{untold}.traced")
            return weighed(remembered(like, lambda: export(module, given, **{**named, "optimize": False})), module)

        return program_of(remembered(Path(folder, f"{question}.onnx"), simplified))

    return found
