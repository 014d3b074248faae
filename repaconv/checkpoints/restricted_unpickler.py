"""Read pickles as data: tensors and plain containers are built, other globals become inert placeholders.

A pickle is a program. Here its opcodes can only call what ``find_class`` returns, which is never the original object:
tensors are rebuilt by our own code over a memory map, and a class or function of any other name becomes a `Placeholder`
subclass that stores its arguments and does nothing. A name that is only useful to run code refuses the file
immediately, wherever it occurs.
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

from repaconv.core.errors import Refused, describe_exception

# Opcodes may only fill and modify inert objects.
#
# The base is the standard library's Python unpickler, whose steps can be overridden. The C one allocates as much memory
# as a pickle claims to need, and modifies any object on its stack.

MOST_NESTED_TUPLES = 10_000
"""Maximum number of nested tuples in a tuple. Hashing a tuple visits them all, and recurses into them."""

_Unpickler: Any = pickle._Unpickler


class Placeholder:
    """Inert replacement for a global outside the allow-list; it keeps arguments and state as data."""

    qualified_name = ""
    args: tuple[object, ...] = ()
    state: object = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Store the arguments of a constructor or function."""
        self.args = args
        self.state = kwargs or None

    def __call__(self, *args: object, **_: object) -> Placeholder:
        """Return another placeholder, as for a class within a class, which pickle gets by a call."""
        return Placeholder(*args)

    def __setitem__(self, key: object, value: object) -> None:
        """Ignore an item that is set, as on a dict-like object."""

    def append(self, value: object) -> None:
        """Ignore an item that is appended, as to a list-like object."""

    def extend(self, values: object) -> None:
        """Ignore items that are appended, as to a list-like object."""

    def add(self, value: object) -> None:
        """Ignore an item that is added, as to a set-like object."""


class OpcodeMachine(_Unpickler):  # type: ignore[misc]
    """Runs the opcodes of a pickle; subclasses define ``find_class`` and ``persistent_load``."""

    def __init__(self, stream: IO[bytes]) -> None:
        """Create it; nothing is read yet."""
        super().__init__(stream, encoding="utf-8")
        self._nested: dict[int, tuple[tuple[object, ...], int]] = {}

    def get_extension(self, code: int) -> NoReturn:
        """Refuse extension codes, which refer to the registry of another process."""
        raise pickle.UnpicklingError(f"extension {code} is of another process")

    def load_build(self) -> None:
        """Set the state of a placeholder; ignore that of an OrderedDict (torch stores module versions there)."""
        state = self.stack.pop()
        altered = self.stack[-1]
        if isinstance(altered, Placeholder):
            altered.state = state
        elif not isinstance(altered, OrderedDict):
            raise pickle.UnpicklingError(f"the pickle tries to alter a {type(altered).__name__}")

    def load_newobj(self) -> None:
        """Build an object of a class, which may be the placeholder that a call returned."""
        args, kind = self.stack.pop(), self.stack.pop()
        self.append(kind(*args) if isinstance(kind, Placeholder) else kind.__new__(kind, *args))

    def load_setitem(self) -> None:
        """Set one item."""
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([(key, value)])

    def load_setitems(self) -> None:
        """Set all items above the mark."""
        items = self.pop_mark()
        self._fill(zip(items[::2], items[1::2], strict=True))

    def _fill(self, entries: Any) -> None:
        filled = self.stack[-1]
        if not isinstance(filled, (dict, Placeholder)):
            raise pickle.UnpicklingError(f"the pickle tries to fill a {type(filled).__name__}")
        for key, value in entries:
            filled[key] = value

    def load_tuple(self) -> None:
        """Build a tuple of all objects above the mark."""
        items = tuple(self.pop_mark())
        self.append(self._with_limited_nesting(items))

    def load_some(self, count: int) -> None:
        """Build a tuple of the last one, two or three objects."""
        self.stack[-count:] = [self._with_limited_nesting(tuple(self.stack[-count:]))]

    def _with_limited_nesting(self, items: tuple[object, ...]) -> tuple[object, ...]:
        """Return the tuple, or refuse it if it nests too many. Counted tuples are kept, so that ids stay unique."""
        inner = [self._nested.get(id(item), (item, 1))[1] for item in items if isinstance(item, tuple)]
        if inner:
            self._nested[id(items)] = items, 1 + sum(inner)
            if sum(inner) >= MOST_NESTED_TUPLES:
                raise pickle.UnpicklingError(f"a tuple of more than {MOST_NESTED_TUPLES:,} tuples")
        return items

    dispatch = {  # noqa: RUF012 - as in the standard library
        **_Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.TUPLE[0]: load_tuple,
        pickle.TUPLE1[0]: lambda self: self.load_some(1),
        pickle.TUPLE2[0]: lambda self: self.load_some(2),
        pickle.TUPLE3[0]: lambda self: self.load_some(3),
        pickle.BYTEARRAY8[0]: _Unpickler.load_binbytes8,  # bytearray8 would allocate its claimed length
    }


# Globals and tensors.

MOST_REPEATED_ELEMENTS = 1 << 24
"""Maximum elements of a view beyond four times its storage; a stride of 0 can repeat elements without limit."""

# Names whose only use in a checkpoint is to run code. They would not run here in any case; such a file is refused so
# that it is not passed on.
RUNS_CODE_MODULES = frozenset(
    # system and processes; code loading; concurrency and network
    """os nt posix ntpath posixpath subprocess sys shutil signal popen2 commands pty
    importlib imp runpy pkgutil zipimport code codeop pdb bdb trace profile cProfile timeit pydoc ctypes _ctypes
    site atexit gc venv ensurepip pip setuptools distutils marshal dill cloudpickle joblib
    multiprocessing asyncio threading _thread socket ssl urllib http requests httpx aiohttp ftplib telnetlib
    smtplib webbrowser tempfile""".split()  # noqa: SIM905 - a list of words reads best as words
)
# Of these, plausible names of a user's own package. Python's modules of these names have no submodules, so a class of
# trace.models is the user's.
WITHOUT_SUBMODULES = frozenset(("code", "commands", "imp", "profile", "signal", "site", "trace"))
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
    # integers of quantized tensors; their scales are in a global that becomes a placeholder
    "QInt8Storage": torch.int8,
    "QUInt8Storage": torch.uint8,
    "QInt32Storage": torch.int32,
    "QUInt4x2Storage": torch.uint8,
    "QUInt2x4Storage": torch.uint8,
}

StorageBytes = Callable[[str, torch.dtype, int], Tensor]
"""Returns the elements of a storage: (key, dtype, count) -> [count]."""

PersistentLoad = Callable[[Any], object]
"""Returns the object for a persistent id."""


@dataclass(frozen=True)
class StorageKind:
    """A storage class of torch, reduced to its dtype."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Unpickled:
    """The object of a pickle as data, and the globals that became placeholders."""

    value: Any
    placeholders: tuple[str, ...]


class StorageIds:
    """Resolves the persistent ids of torch.save.

    They are ``('storage', type, key, location, elements)`` and, in the sequential format, ``('module', class, file,
    source)`` for the class of a module, whose source text is ignored.

    Attributes:
        described: dtype and number of elements of every requested storage, by key.
    """

    def __init__(self, storage_bytes: StorageBytes) -> None:
        """``storage_bytes`` is called once per storage."""
        self._storage_bytes = storage_bytes
        self._flat: dict[str, Tensor] = {}
        self.described: dict[str, tuple[torch.dtype, int]] = {}

    def __call__(self, pid: Any) -> object:
        """Return the storage as a flat tensor, or the placeholder of a module's class."""
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], type):
            return pid[1]
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
    """Refuse persistent ids, in pickles that do not use them."""
    raise pickle.UnpicklingError(f"unexpected persistent id {pid!r}")


def unpickle(stream: IO[bytes], persistent_load: PersistentLoad = no_ids) -> Unpickled:
    """Read one pickle as data, and leave the stream at its end.

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
            f"the pickle in the file is corrupt ({describe_exception(error)}).",
            hint="Download or save the checkpoint again.",
            code="checkpoint.corrupt",
        ) from error
    return Unpickled(value, tuple(reader.types))


class _DataUnpickler(OpcodeMachine):
    def __init__(self, stream: IO[bytes], persistent_load: PersistentLoad) -> None:
        super().__init__(stream)
        self.persistent_load = persistent_load
        self.types: dict[str, type[Placeholder]] = {}

    def find_class(self, module: str, name: str) -> object:
        module = "builtins" if module == "__builtin__" else module  # its name in Python 2 and protocol 2
        full = f"{module}.{name}"
        package, _, inner = module.partition(".")
        runs_code = package in RUNS_CODE_MODULES and not (inner and package in WITHOUT_SUBMODULES)
        if runs_code or full in RUNS_CODE_NAMES:
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
    """Return a view of a flat storage; refuse one that reaches beyond it or repeats its elements without limit."""
    shape, stride = tuple(map(int, shape)), tuple(map(int, stride))
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    empty = 0 in shape
    if offset < 0 or min((*shape, *stride), default=0) < 0 or (not empty and last >= flat.numel()):
        raise pickle.UnpicklingError(f"a tensor of shape {list(shape)} reaches beyond its storage")
    if prod(max(size, 1) for size in shape) > 4 * flat.numel() + MOST_REPEATED_ELEMENTS:
        raise pickle.UnpicklingError(f"a tensor of shape {list(shape)} of a storage of {flat.numel()}")
    # as_strided counts from the start of the storage, which is the whole mapped file
    return flat.new_empty(shape) if empty else flat.as_strided(shape, stride, flat.storage_offset() + offset)


def _flat(storage: object) -> Tensor:
    if not isinstance(storage, Tensor) or storage.ndim != 1:
        raise pickle.UnpicklingError("a tensor without a storage")
    return storage


def _rebuild_tensor(storage: object, offset: int, shape: Sequence[int], stride: Sequence[int], *rest: Any) -> Tensor:
    _requires_grad, _hooks, metadata = (*rest, None, None, None)[:3]
    return _with_bits(strided(_flat(storage), offset, shape, stride), metadata)


def _rebuild_tensor_v3(storage: object, offset: int, shape: Sequence[int], stride: Sequence[int], *rest: Any) -> Tensor:
    _requires_grad, _hooks, dtype, metadata = (*rest, None)[:4]
    return _with_bits(strided(_flat(storage).view(dtype), offset, shape, stride), metadata)


def _with_bits(view: Tensor, metadata: object) -> Tensor:
    """Set the conjugate and negative bits, e.g. of ``x.conj().imag``: its storage holds the opposite numbers."""
    bits = metadata if isinstance(metadata, dict) else {}
    view = view.conj() if bits.get("conj") else view
    return view._neg_view() if bits.get("neg") else view


def _rebuild_from_type(function: Callable[..., object], kind: Any, args: tuple[object, ...], *_state: object) -> object:
    """Rebuild a tensor with attributes of its own, such as an nn.Buffer; a subclass may hold other numbers."""
    return function(*args) if getattr(kind, "qualified_name", "") == "torch.Tensor" else kind(*args)


def _rebuild_parameter(data: object, *_: object) -> object:
    return data


def _size(values: Sequence[int] = ()) -> tuple[int, ...]:
    return tuple(map(int, values))


def _bytearray(content: object = b"", *_encoding: object) -> bytearray:
    """Build a bytearray from bytes, or from text as protocol 2 writes it; an integer would be a length to allocate."""
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
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
}
