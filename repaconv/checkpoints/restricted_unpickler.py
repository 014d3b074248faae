"""Pickles read as data: tensors and plain containers are built, every other global stays an inert stand-in.

A pickle is a program. Here its opcodes may call only what ``find_class`` hands out, and that is never the
real thing: rebuilding a tensor is our own code over a memory map, and a class or function of any other
name becomes a `Placeholder` subclass that stores what it is given and does nothing. A name that can only
be there to run code refuses the file at once, wherever it stands.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import IO, Any, NoReturn

import torch
from torch import Tensor

from repaconv.core.errors import Refused, said_by

# --- What a pickle's opcodes may do: fill and alter what is inert, and nothing else.
#
# The machine is the standard library's own in Python: its steps can be looked at there, while the one in C takes as
# much memory as a pickle claims to need, and alters whatever is on its stack.

NESTED = 10_000
"""Tuples in one tuple, counted wherever they stand: hashing one walks them all, and as deep as they lie."""

_Unpickler: Any = pickle._Unpickler


class Placeholder:
    """Inert stand-in for a global outside the allow-list; keeps arguments and state as data."""

    qualified_name = ""
    args: tuple[object, ...] = ()
    state: object = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Store what a constructor or function would have been called with."""
        self.args = args
        self.state = kwargs or None

    def __setitem__(self, key: object, value: object) -> None:
        """Let a dict-like object be filled, into nothing."""

    def append(self, value: object) -> None:
        """Let a list-like object be filled, into nothing."""

    def extend(self, values: object) -> None:
        """Let a list-like object be filled, into nothing."""

    def add(self, value: object) -> None:
        """Let a set-like object be filled, into nothing."""


class Machine(_Unpickler):  # type: ignore[misc]
    """Reads a pickle; ``find_class`` and ``persistent_load`` say what there is in its world."""

    def __init__(self, stream: IO[bytes]) -> None:
        """Nothing is read yet."""
        super().__init__(stream, encoding="utf-8")
        self._nested: dict[int, tuple[tuple[object, ...], int]] = {}

    def get_extension(self, code: int) -> NoReturn:
        """Numbers for classes are another process's."""
        raise pickle.UnpicklingError(f"extension {code} is of another process")

    def load_build(self) -> None:
        """State goes into stand-ins; a dict's (torch keeps the versions of modules there) is left out."""
        state = self.stack.pop()
        altered = self.stack[-1]
        if isinstance(altered, Placeholder):
            altered.state = state
        elif not isinstance(altered, OrderedDict):
            raise pickle.UnpicklingError(f"the pickle tries to alter a {type(altered).__name__}")

    def load_setitem(self) -> None:
        """One entry."""
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([(key, value)])

    def load_setitems(self) -> None:
        """All entries above the mark."""
        items = self.pop_mark()
        self._fill(zip(items[::2], items[1::2], strict=True))

    def _fill(self, entries: Any) -> None:
        filled = self.stack[-1]
        if not isinstance(filled, (dict, Placeholder)):
            raise pickle.UnpicklingError(f"the pickle tries to fill a {type(filled).__name__}")
        for key, value in entries:
            filled[key] = value

    def load_tuple(self) -> None:
        """Of all above the mark."""
        items = tuple(self.pop_mark())
        self.append(self._weighed(items))

    def load_some(self, count: int) -> None:
        """A tuple of the last one, two or three."""
        self.stack[-count:] = [self._weighed(tuple(self.stack[-count:]))]

    def _weighed(self, items: tuple[object, ...]) -> tuple[object, ...]:
        """The tuple, unless there are too many in it; those that hold others are kept, so that no id comes twice."""
        inner = [self._nested.get(id(item), (item, 1))[1] for item in items if isinstance(item, tuple)]
        if inner:
            self._nested[id(items)] = items, 1 + sum(inner)
            if sum(inner) >= NESTED:
                raise pickle.UnpicklingError(f"a tuple of more than {NESTED:,} tuples")
        return items

    dispatch = {  # noqa: RUF012 - as the library has it
        **_Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.TUPLE[0]: load_tuple,
        pickle.TUPLE1[0]: lambda self: self.load_some(1),
        pickle.TUPLE2[0]: lambda self: self.load_some(2),
        pickle.TUPLE3[0]: lambda self: self.load_some(3),
        pickle.BYTEARRAY8[0]: _Unpickler.load_binbytes8,  # it would be made as long as it claims to be
    }


# --- Pickles read as data: tensors and plain containers are built, every other global stays an inert stand-in.

SPREAD = 1 << 24
"""Elements that a view may have beyond four times its storage's; a stride of 0 has them without end."""

# Names whose only use in a checkpoint is to run something. Nothing would run here in any case; such a file
# is refused because it must not travel further either.
RUNS_CODE_MODULES = frozenset(
    # the system and other processes; other code; tasks and the network
    """os nt posix ntpath posixpath subprocess sys shutil signal popen2 commands pty
    importlib imp runpy pkgutil zipimport code codeop pdb bdb trace profile cProfile timeit pydoc ctypes _ctypes
    site atexit gc venv ensurepip pip setuptools distutils marshal dill cloudpickle joblib
    multiprocessing asyncio threading _thread socket ssl urllib http requests httpx aiohttp ftplib telnetlib
    smtplib webbrowser tempfile""".split()  # noqa: SIM905 - a list of words reads best as words
)
RUNS_CODE_NAMES = frozenset(
    [
        "builtins.eval",
        "builtins.exec",
        "builtins.execfile",
        "builtins.compile",
        "builtins.open",
        "builtins.input",
        "builtins.apply",
        "builtins.breakpoint",
        "builtins.__import__",
        "builtins.globals",
        "builtins.vars",
        "io.open",
        "_io.open",
        "io.FileIO",
        "_io.FileIO",
        "codecs.open",
        "pickle.load",
        "pickle.loads",
        "_pickle.load",
        "_pickle.loads",
        "pickle.Unpickler",
        "torch.load",
        "torch.hub.load",
        "torch.jit.load",
        "torch.package.PackageImporter",
        "torch.storage._load_from_bytes",
        "torch._dynamo.guards.GuardBuilder.get",
        "torch.utils.cpp_extension.load",
        "torch.utils.cpp_extension.load_inline",
        "torch.utils.collect_env.run",
        "torch.fx._symbolic_trace.Tracer",
        "torch.fx.graph_module._deserialize_graph_module",
        "torch.fx.graph_module.reduce_graph_module",
        "torch.fx.graph_module._forward_from_src",
        "numpy.load",
        "numpy.testing._private.utils.runstring",
        "operator.attrgetter",
        "operator.methodcaller",
        "types.FunctionType",
        "types.CodeType",
    ]
)

_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
    # the integers of quantised tensors, whose scales stand in a global that stays inert
    "QInt8Storage": torch.int8,
    "QUInt8Storage": torch.uint8,
    "QInt32Storage": torch.int32,
    "QUInt4x2Storage": torch.uint8,
    "QUInt2x4Storage": torch.uint8,
}

StorageBytes = Callable[[str, torch.dtype, int], Tensor]
"""Gives a storage's elements: (key, dtype, number) -> [number]."""

PersistentLoad = Callable[[Any], object]
"""Gives the object that a pickle only names."""


@dataclass(frozen=True)
class StorageKind:
    """A storage class of torch, of which only the dtype matters."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Unpickled:
    """A pickle's object as data, and the globals in it that became placeholders."""

    value: Any
    placeholders: tuple[str, ...]


class StorageIds:
    """Resolves the persistent ids ``('storage', type, key, location, elements)`` of torch.save.

    Attributes:
        described: dtype and number of elements of every storage that was asked for, by key.
    """

    def __init__(self, storage_bytes: StorageBytes) -> None:
        """Take the elements from ``storage_bytes``, once a storage."""
        self._storage_bytes = storage_bytes
        self._flat: dict[str, Tensor] = {}
        self.described: dict[str, tuple[torch.dtype, int]] = {}

    def __call__(self, pid: Any) -> object:
        """The storage as a flat tensor."""
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise pickle.UnpicklingError(f"unknown persistent id {pid!r}")
        _, kind, key, _location, elements = pid[:5]
        if not isinstance(kind, StorageKind) or not isinstance(elements, int) or elements < 0:
            raise pickle.UnpicklingError("a storage of an unknown type or size")
        key = str(key)
        if key not in self._flat:
            self._flat[key] = self._storage_bytes(key, kind.dtype, elements)
            self.described[key] = (kind.dtype, elements)
        if self.described[key] != (kind.dtype, elements):
            raise pickle.UnpicklingError(f"storage {key} is of two types or sizes")
        return self._flat[key]


def no_ids(pid: Any) -> object:
    """For pickles that name nothing outside themselves."""
    raise pickle.UnpicklingError(f"unexpected persistent id {pid!r}")


def unpickle(stream: IO[bytes], persistent_load: PersistentLoad = no_ids) -> Unpickled:
    """Read one pickle as data, leaving the stream behind its end.

    Raises:
        Refused: ``checkpoint.unsafe-global`` for a name that can run code; ``checkpoint.corrupt`` for a
            stream that is not a pickle, ends early, or describes tensors beyond their storage.
    """
    reader = _DataUnpickler(stream, persistent_load)
    try:
        value = reader.load()
    except Refused:
        raise
    except Exception as error:  # a hostile or broken pickle can raise anything
        raise Refused(
            f"the pickle in the file is corrupt ({said_by(error)}).",
            hint="Download or save the checkpoint again.",
            code="checkpoint.corrupt",
        ) from error
    return Unpickled(value, tuple(reader.types))


class _DataUnpickler(Machine):
    def __init__(self, stream: IO[bytes], persistent_load: PersistentLoad) -> None:
        super().__init__(stream)
        self.persistent_load = persistent_load
        self.types: dict[str, type[Placeholder]] = {}

    def find_class(self, module: str, name: str) -> object:
        module = "builtins" if module == "__builtin__" else module  # as Python 2 and protocol 2 call it
        full = f"{module}.{name}"
        if module.partition(".")[0] in RUNS_CODE_MODULES or full in RUNS_CODE_NAMES:
            raise Refused(
                f"the file refers to {full}, which can run code; none of it was run.",
                hint=(
                    "Do not load this file with any other tool. Ask its author for a state dict, preferably as "
                    ".safetensors."
                ),
                code="checkpoint.unsafe-global",
            )
        if full in _ALLOWED:
            return _ALLOWED[full]
        if module in ("torch", "torch.cuda", "torch.storage") and name in _DTYPES:
            return StorageKind(_DTYPES[name])
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full not in self.types:
            self.types[full] = type("Placeholder", (Placeholder,), {"qualified_name": full})
        return self.types[full]


def strided(flat: Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A view of a flat storage, refused where it would reach beyond it, or have elements without end."""
    shape, stride = tuple(map(int, shape)), tuple(map(int, stride))
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    empty = 0 in shape
    if offset < 0 or min((*shape, *stride), default=0) < 0 or (not empty and last >= flat.numel()):
        raise pickle.UnpicklingError(f"a tensor of shape {list(shape)} reaches beyond its storage")
    if prod(max(size, 1) for size in shape) > 4 * flat.numel() + SPREAD:
        raise pickle.UnpicklingError(f"a tensor of shape {list(shape)} of a storage of {flat.numel()}")
    # as_strided counts from the storage's begin, and a mapped storage is the whole file
    return flat.new_empty(shape) if empty else flat.as_strided(shape, stride, flat.storage_offset() + offset)


def _flat(storage: object) -> Tensor:
    if not isinstance(storage, Tensor) or storage.ndim != 1:
        raise pickle.UnpicklingError("a tensor without a storage")
    return storage


def _rebuild_tensor(storage: object, offset: int, shape: Sequence[int], stride: Sequence[int], *_: object) -> Tensor:
    return strided(_flat(storage), offset, shape, stride)


def _rebuild_tensor_v3(storage: object, offset: int, shape: Sequence[int], stride: Sequence[int], *rest: Any) -> Tensor:
    _requires_grad, _hooks, dtype = rest[:3]
    return strided(_flat(storage).view(dtype), offset, shape, stride)


def _rebuild_parameter(data: object, *_: object) -> object:
    return data


def _size(values: Sequence[int] = ()) -> tuple[int, ...]:
    return tuple(map(int, values))


def _bytearray(content: object = b"", *_encoding: object) -> bytearray:
    """Of bytes, or of a text as protocol 2 writes them; a number would be a length."""
    return bytearray(content.encode("latin-1") if isinstance(content, str) else bytes(memoryview(content)))  # type: ignore[arg-type]


_ALLOWED: dict[str, object] = {
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "builtins.bytearray": _bytearray,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
}
