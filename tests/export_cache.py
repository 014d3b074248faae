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
INFERENCE_PACKAGES = ("repaconv.algebra", "repaconv.backbones")
NETWORK_PACKAGES = (*INFERENCE_PACKAGES, "repaconv.methods")

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


class _KeyPickler(pickle.Pickler):
    """Pickles tensors as their values and the memory that they share, and the sets of a module sorted.

    Of the tensors in ``left_out`` (by identity) the values are not part of the key.
    """

    def __init__(self, stream: io.BytesIO, left_out: frozenset[int]) -> None:
        super().__init__(stream)
        self.memories: dict[int, int] = {}
        self.left_out = left_out

    def reducer_override(self, value):
        if isinstance(value, torch.nn.Module):
            state = {name: sorted(part) if isinstance(part, set) else part for name, part in vars(value).items()}
            return tuple, ((type(value), state),)
        if isinstance(value, torch._ops.OpOverload):  # of a translation table
            return str, (str(value),)
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        shared = self.memories.setdefault(value.untyped_storage().data_ptr(), len(self.memories))
        kind = (type(value), str(value.dtype), value.stride(), value.requires_grad, shared)
        values = None if id(value) in self.left_out else bytes_of(value)
        return tuple, ((*kind, tuple(value.shape), values),)


def cache_key(module: torch.nn.Module, *given: object, with_values: bool = True, **named: object) -> str | None:
    """A hash of all arguments of an export, including values of weights if ``with_values``; None if there is none."""
    weights = weights_of(module).values()
    if patched(module) or sum(tensor.numel() * tensor.element_size() for tensor in weights) > LARGEST:
        return None
    stream, around = io.BytesIO(), (torch.get_default_dtype(), torch.is_grad_enabled())
    try:
        left_out = frozenset() if with_values else frozenset(map(id, weights))
        _KeyPickler(stream, left_out).dump((module, given, named, around))
    except Exception:  # pickle and torch raise many
        return None
    return hashlib.sha256(stream.getvalue()).hexdigest()


def patched(network: torch.nn.Module) -> bool:
    """Whether a test has at the moment replaced code that this network uses; only a training network uses a method."""
    of_a_method = any(type(part).__module__.startswith("repaconv.methods") for part in network.modules())
    packages = NETWORK_PACKAGES if of_a_method else INFERENCE_PACKAGES
    modules = [module for name, module in sys.modules.items() if name.startswith(packages)]
    return any(_of_a_test(part) for module in modules for value in vars(module).values() for part in _parts(value))


def _parts(value: object) -> list[object]:
    inside = isinstance(value, type) and value.__module__.startswith(NETWORK_PACKAGES)
    return [value, *vars(value).values()] if inside else [value]


def _of_a_test(value: object) -> bool:
    value = getattr(value, "__func__", value) if callable(value) else None
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(TESTS)


def cached_bytes(path: Path, export_now: Callable[[], ONNXProgram]) -> bytes:
    """The content of the file. A missing file is first written with a new export."""
    with FileLock(f"{path}.asked"):  # another worker with the same export waits for it
        if not path.is_file():
            writing = path.with_suffix(".writing")
            writing.write_bytes(export_now().model_proto.SerializeToString())
            writing.replace(path)
    return path.read_bytes()


def with_weights_of(content: bytes, module: torch.nn.Module) -> ONNXProgram:
    """The graph of a network like this one, with the weights of this one, simplified as torch does it."""
    graph, weights = onnx.load_from_string(content), weights_of(module)
    for initializer in graph.graph.initializer:
        if initializer.name in weights:
            initializer.raw_data = bytes_of(weights[initializer.name])
    program = ONNXProgram(onnx_ir.from_proto(graph), None)
    program.optimize()
    return program


def cached(export):
    """torch.onnx.export that looks into the session's folder first."""

    @wraps(export)
    def found(module, given=(), *more, **named):
        folder, key = os.environ.get(FOLDER), None
        if folder and named.get("dynamo") and named.get("optimize", True) and not more:
            key = cache_key(module, given, **named)
        if key is None:
            return export(module, given, *more, **named)

        def simplified() -> ONNXProgram:
            graph_key = cache_key(module, given, with_values=False, **named)
            like = Path(folder, f"{graph_key}.traced")
            return with_weights_of(
                cached_bytes(like, lambda: export(module, given, **{**named, "optimize": False})), module
            )

        return program_of(cached_bytes(Path(folder, f"{key}.onnx"), simplified))

    return found
