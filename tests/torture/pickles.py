"""Hostile pickles in place of a checkpoint's own. They must not run code, alter the reader, or use up memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise

from torture.sandbox import MARKER

TOUCH = f"touch {MARKER}"
P = b"\x80\x02"


def text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def name(module: str, attribute: str) -> bytes:
    """GLOBAL."""
    return f"c{module}\n{attribute}\n".encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    """REDUCE."""
    return function + b"(" + b"".join(arguments) + b"tR"


def number(value: int) -> bytes:
    """BININT, or LONG1."""
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def stored(key: str, elements: int, kind: str = "FloatStorage") -> bytes:
    """A storage by its persistent id."""
    return b"(" + text("storage") + name("torch", kind) + text(key) + text("cpu") + number(elements) + b"tQ"


def ints(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(key: str, elements: int, offset: int, shape: bytes, stride: bytes, kind: str = "FloatStorage") -> bytes:
    """A tensor as torch.save writes it."""
    hooks = call(name("collections", "OrderedDict"))
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    return call(rebuild, stored(key, elements, kind), number(offset), shape, stride, b"\x89", hooks)


SOUND = tensor("0", 12, 0, ints(4, 3), ints(3, 1))


def state_dict_with(value: bytes) -> bytes:
    """A state dict with something hostile in it, beside a sound weight."""
    return P + b"}(" + text("a.weight") + SOUND + text("x") + value + b"u."


def under(key: bytes) -> bytes:
    """A state dict with a hostile key."""
    return P + b"}(" + text("a.weight") + SOUND + key + number(1) + b"u."


BY_SHELL = """os.system posix.system nt.system os.popen subprocess.getoutput subprocess.check_output commands.getoutput
pty.spawn torch.utils.collect_env.run platform.popen distutils.spawn.spawn
pip._internal.utils.subprocess.call_subprocess numpy.distutils.exec_command.exec_command"""
BY_CODE = """builtins.eval builtins.exec __builtin__.eval __builtin__.execfile builtins.compile timeit.timeit
cProfile.run profile.run pdb.run code.interact runpy.run_path runpy._run_code doctest.debug_script
torch.fx.graph_module._exec_with_source torch.jit.CompilationUnit numpy.testing._private.utils.runstring
pydoc.pipepager ensurepip._run_pip ctypes.CDLL importlib.import_module builtins.__import__
imp.load_source zipimport.zipimporter webbrowser.open http.client.HTTPSConnection urllib.request.urlopen
socket.create_connection builtins.open io.open _io.FileIO shutil.rmtree tempfile.mktemp
logging.config.listen logging.FileHandler asyncio.run multiprocessing.util.spawnv_passfds torch.load
torch.serialization.load torch.hub.load torch.storage._load_from_bytes
torch.utils.cpp_extension.load_inline torch.ops.load_library torch.package.PackageImporter pickle.loads
_pickle.loads marshal.loads dill.loads cloudpickle.loads joblib.load shelve.open pandas.read_pickle
numpy.load yaml.unsafe_load signal.raise_signal sys.exit os._exit os.abort builtins.exit
faulthandler._sigsegv gc.get_objects"""


def commands() -> Iterator[tuple[str, bytes]]:
    """What runs a command or code by a name."""
    python = f"__import__('os').system('{TOUCH}')"
    for names, argument in ((BY_SHELL, TOUCH), (BY_CODE, python)):
        for full in names.split():
            yield full, call(name(*full.rsplit(".", 1)), text(argument))
    for full in ("bdb.Bdb.run", "trace.Trace.run", "pathlib.Path.unlink", "torch._dynamo.guards.GuardBuilder.get"):
        module, kind, method = full.rsplit(".", 2)
        yield full, call(name(module, f"{kind}.{method}"), text(python))


def chains() -> Iterator[tuple[str, bytes]]:
    """What comes to a function by a detour."""
    os_, attribute = call(name("builtins", "__import__"), text("os")), name("builtins", "getattr")
    yield "getattr of an import", call(call(attribute, os_, text("system")), text(TOUCH))
    yield "getattr alone", call(call(attribute, name("torch", "Size"), text("__subclasses__")))
    ladder = call(attribute, name("collections", "OrderedDict"), text("__init__"))
    ladder = call(attribute, ladder, text("__globals__"))
    yield "getattr to globals", ladder
    yield "operator.attrgetter", call(call(name("operator", "attrgetter"), text("system")), name("torch", "Size"))
    yield "operator.methodcaller", call(call(name("operator", "methodcaller"), text("__class__")), text("x"))
    yield "functools.partial", call(call(name("functools", "partial"), name("os", "system"), text(TOUCH)))
    yield "functools.reduce", call(name("functools", "reduce"), name("os", "system"), b"(" + text(TOUCH) + b"t")
    yield "map of os.system", call(name("builtins", "map"), name("os", "system"), b"(" + text(TOUCH) + b"t")
    yield "a dotted name", call(b"\x8c\x08builtins\x8c\x04eval\x93", text("1"))
    yield "a stack global behind dots", call(b"\x8c\x05torch\x8c\x0fserialization.os\x93")
    yield "torch.os.system", call(b"\x8c\x05torch\x8c\tos.system\x93", text(TOUCH))
    yield "codecs to eval", call(name("_codecs", "encode"), text("x"), text("rot13"))
    rebuilt = (name("os", "system"), name("builtins", "object"), b"N")
    yield "copyreg._reconstructor", call(name("copyreg", "_reconstructor"), *rebuilt)
    yield "copyreg.__newobj__", call(name("copyreg", "__newobj__"), name("subprocess", "Popen"), text(TOUCH))
    yield "copyreg.add_extension", call(name("copyreg", "add_extension"), text("os"), text("system"), number(1))
    yield "copyreg.pickle", call(name("copyreg", "pickle"), name("torch", "Size"), name("os", "system"))
    yield "an extension", b"\x82\x01"
    yield "an extension of four bytes", b"\x84\x01\0\0\0"
    yield "OBJ", b"(" + name("os", "system") + text(TOUCH) + b"o"
    yield "INST", b"(" + text(TOUCH) + b"ios\nsystem\n"
    yield "NEWOBJ", name("subprocess", "Popen") + b"(" + text(TOUCH) + b"t\x81"
    yield "NEWOBJ_EX", name("subprocess", "Popen") + b"(" + text(TOUCH) + b"t}\x92"
    kind = text("storage") + name("os", "system") + text("0") + text("cpu") + number(1)
    yield "a command in the type of a storage", b"(" + kind + b"tQ"
    yield "a persistent id in letters", b"Pstorage\n"
    code = call(name("types", "CodeType"), number(0))
    yield "a lambda by types.FunctionType", call(name("types", "FunctionType"), code)


def alterations() -> Iterator[tuple[str, bytes]]:
    """What would change the reader, or what it hands out."""
    state = b"}(" + text("_build") + name("builtins", "print") + b"u"
    slots = b"N}(" + text("_build") + name("builtins", "print") + b"u\x86"
    for label, target in (
        ("a function of the reader", name("torch._utils", "_rebuild_tensor_v2")),
        ("a storage type", name("torch", "FloatStorage")),
        ("a dtype", name("torch", "float32")),
        ("OrderedDict", name("collections", "OrderedDict")),
        ("set", name("builtins", "set")),
        ("a stand-in's class", name("argparse", "Namespace")),
        ("a tuple type", name("torch", "Size")),
        ("a number", number(3)),
        ("a text", text("x")),
    ):
        yield f"BUILD on {label}", target + state + b"b"
        yield f"BUILD of slots on {label}", target + slots + b"b"
    empty = call(name("collections", "OrderedDict"))
    for label, value in (("", name("torch", "Size")), (", odd", name("somebody", "Odd"))):
        methods = b"".join(text(method) + value for method in ("items", "keys", "values", "get"))
        yield f"BUILD on a dict's methods{label}", empty + b"}(" + methods + b"ub"
    storage, none = stored("0", 12), tensor("0", 12, 0, ints(0), ints(1))
    yield "BUILD on a tensor", SOUND + b"(" + storage + number(0) + ints(1 << 33) + ints(1) + b"tb"
    yield "BUILD on a tensor, beyond", SOUND + b"(" + storage + number(1 << 40) + ints(2, 2) + ints(2, 1) + b"tb"
    yield "BUILD on an empty tensor", none + b"(" + storage + number(0) + ints(1 << 34) + ints(1) + b"tb"
    yield "BUILD of hooks on a tensor", SOUND + b"(\x88N" + name("os", "system") + b"tb"
    yield "BUILD of an attribute on a tensor", SOUND + b"N}(" + text("shape") + ints(7) + b"u\x86b"
    yield "a stand-in that fills a tensor", SOUND + b"(" + number(0) + number(5) + b"u"
    yield "append to a tensor", SOUND + number(1) + b"a"
    yield "append to a stand-in's class", name("somebody", "Odd") + number(1) + b"a"
    yield "a subclass named __class__", call(name("somebody", "__class__"))
    yield "a subclass with a zero in its name", call(b"\x8c\x08somebody\x8c\x03a\0b\x93")
    yield "a surrogate in a name", call(b"\x8c\x08somebody\x8c\x03\xed\xa0\x80\x93")


def nested(depth: int, opener: bytes, closer: bytes, inside: bytes = b"N") -> bytes:
    return opener * depth + inside + closer * depth


def bombs() -> Iterator[tuple[str, bytes]]:
    """Deep, wide and claimed to be large."""
    for depth in (1_000, 200_000):
        yield f"tuples, {depth:,} deep", b"N" + b"\x85" * depth
        yield f"lists, {depth:,} deep", nested(depth, b"]", b"a")
        yield f"dicts, {depth:,} deep", nested(depth, b"}" + text("k"), b"s")
        yield f"stand-ins, {depth:,} deep", name("somebody", "Odd") + b"q\x01" + nested(depth, b"h\x01", b"\x85R")
        yield f"marks, {depth:,}", b"(" * depth + b"N"
        sets = name("builtins", "frozenset") + b"q\x01"
        yield f"sets, {depth:,} deep", sets + nested(depth, b"h\x01", b"\x85\x85R", b")")
    places = [b"h" + bytes([place]) for place in range(60)]
    laughs = b"".join(b"q" + place[1:] + place + b"\x86" for place in places)
    yield "a billion laughs in tuples", b"N" + laughs
    for label, width, levels in (("ten", 10, 40), ("two thousand", 2000, 6)):
        level = [b"(" + place * width + b"lq" + after[1:] for place, after in pairwise(places)]
        yield f"lists of {label} in each other", b"]q\x000" + b"0".join(level[:levels])
    for width in (30, 300):
        inner = [b"".join(text(str(key)) + place for key in range(width)) for place in places[:6]]
        dicts = [b"}q" + bytes([n + 1]) + b"(" + entries + b"u" for n, entries in enumerate(inner)]
        yield f"dicts of {width} in each other", b"}q\x000" + b"0".join(dicts)
    yield "a list that holds itself", b"]q\0h\0a"
    yield "a dict that holds itself", b"}q\0" + text("me") + b"h\0s"
    yield "a tuple that holds itself", b"]q\0h\0\x85a"
    for index in (1 << 16, 1 << 27, (1 << 32) - 1):
        yield f"memo place {index:,}", b"Nr" + struct.pack("<I", index)
    yield "memo place in letters", b"Np99999999999999999999\n"
    yield "a memo that is not there", b"h\x63"
    for label, opcode in (("bytes", b"\x8e"), ("text", b"\x8d"), ("bytearray", b"\x96"), ("a frame", b"\x95")):
        for size in (1 << 31, 1 << 36, (1 << 63) - 1, (1 << 64) - 1):
            yield f"{label} of {size:,}", opcode + struct.pack("<Q", size) + b"abc"
    yield "text of 4 GiB", b"X\xff\xff\xff\xffabc"
    yield "a long of 2 GiB", b"\x8b\xff\xff\xff\x7fabc"
    yield "a negative long", b"\x8b\xff\xff\xff\xffabc"
    yield "a number of a million digits", b"I" + b"9" * 1_000_000 + b"\n"
    yield "a long of a million digits", b"L" + b"9" * 1_000_000 + b"L\n"
    yield "a bytearray by its length", call(name("builtins", "bytearray"), number(1 << 36))
    yield "a bytearray by a small length", call(name("builtins", "bytearray"), number(1 << 31))
    yield "bytes by their length", call(name("builtins", "bytes"), number(1 << 36))
    yield "a range", call(name("builtins", "list"), call(name("builtins", "range"), number(1 << 40)))
    yield "a text of much", call(name("torch", "Size"), text("x" * 1_000_000))
    yield "complex of much", call(name("builtins", "complex"), text("1" * 1_000_000))
    yield "no end", b"N" * 100
    yield "an empty stack", b"0" * 5
    yield "a late protocol", b"\x80\xff"
    yield "a hundred thousand classes", b"".join(name("somebody", f"C{i}") + b"0" for i in range(100_000)) + b"N"


def tensors() -> Iterator[tuple[str, bytes]]:
    """Views that no storage holds."""
    for label, offset, shape, stride in (
        ("a stride beyond", 0, ints(4, 3), ints(3000, 1)),
        ("an offset beyond", 12, ints(1), ints(1)),
        ("a negative offset", -1, ints(1), ints(1)),
        ("a negative stride", 11, ints(4, 3), ints(-3, -1)),
        ("a negative size", 0, ints(-4, -3), ints(3, 1)),
        ("a size that overflows", 0, ints(1 << 40, 1 << 40), ints(0, 0)),
        ("a size of 2 to 62 by a stride of 0", 0, ints(1 << 62), ints(0)),
        ("ten billion by a stride of 0", 0, ints(100_000, 100_000), ints(0, 0)),
        ("a size of 2 to 70", 0, ints(1 << 70), ints(0)),
        ("a stride of 2 to 70", 0, ints(1), ints(1 << 70)),
        ("empty, and 2 to 62", 0, ints(0, 1 << 62), ints(1, 1)),
        ("empty, and 2 to 70", 0, ints(0, 1 << 70), ints(1, 1)),
        ("two sizes and one stride", 0, ints(2, 2), ints(1)),
        ("seventy axes", 0, ints(*[1] * 70), ints(*[1] * 70)),
        ("texts as sizes", 0, b"(" + text("4") + text("3") + b"t", ints(3, 1)),
        ("half sizes", 0, b"(G\x3f\xe0\0\0\0\0\0\0t", ints(1)),
        ("no sizes", 0, b"N", ints(1)),
        ("booleans as sizes", 0, b"(\x88\x88t", b"(\x88\x88t"),
        ("aliased rows", 0, ints(4, 3), ints(0, 1)),
        ("overlapping rows", 0, ints(4, 3), ints(1, 1)),
    ):
        yield label, tensor("0", 12, offset, shape, stride)
    yield "more elements than there are", tensor("0", 1 << 40, 0, ints(4, 3), ints(3, 1))
    yield "fewer elements than there are", tensor("0", 11, 0, ints(1), ints(1))
    yield "negative elements", tensor("0", -1, 0, ints(1), ints(1))
    yield "a storage that is not there", tensor("99", 12, 0, ints(4, 3), ints(3, 1))
    yield "a storage by a path", tensor("../../../../etc/passwd", 12, 0, ints(4, 3), ints(3, 1))
    yield "a storage of another type", tensor("0", 6, 0, ints(3), ints(1), "DoubleStorage")
    yield "a storage of bools", tensor("0", 48, 0, ints(3), ints(1), "BoolStorage")
    yield "a storage of an unknown type", tensor("0", 12, 0, ints(3), ints(1), "OddStorage")
    yield "two types of one storage", SOUND + b"0" + tensor("0", 6, 0, ints(3), ints(1), "DoubleStorage")
    second = name("torch._utils", "_rebuild_tensor_v2")
    yield "a tensor without a storage", call(second, b"N", number(0), ints(1), ints(1))
    yield "a tensor of a tensor", call(second, SOUND, number(0), ints(1), ints(1))
    yield "a tensor of too little", call(second, stored("0", 12))
    parameter = name("torch._utils", "_rebuild_parameter")
    yield "a parameter of a text", call(parameter, text("x"), b"\x89", b"N")
    yield "a parameter of nothing", call(parameter)
    third = name("torch._utils", "_rebuild_tensor_v3")
    view = (stored("0", 12), number(0), ints(1), ints(1))
    for dtype in ("float8_e4m3fn", "complex128", "uint16", "qint8", "quint4x2", "bits16", "float64"):
        yield f"a tensor of {dtype}", call(third, *view, b"\x89", b"N", name("torch", dtype))
    yield "a tensor of a dtype that is a text", call(third, *view, b"\x89", b"N", text("f"))
    for kind in ("qtensor", "sparse_tensor", "meta_tensor_no_storage", "wrapper_subclass"):
        yield f"torch's {kind}", call(name("torch._utils", f"_rebuild_{kind}"), *view)
    of_a_class = name("torch._tensor", "_rebuild_from_type_v2")
    yield "a tensor's class by its own name", call(of_a_class, name("os", "system"), b"N")


def registries(modules: bytes = b"}", parameters: bytes = b"", buffers: bytes = b"}", more: bytes = b"") -> bytes:
    """The state of a module as torch.save writes it; ``parameters`` next to a sound one."""
    own = b"}(" + text("weight") + SOUND + parameters + b"u"
    places = text("_parameters") + own + text("_buffers") + buffers + text("_modules") + modules
    return b"}(" + places + more + b"u"


def module(state: bytes, kind: bytes = name("somebody", "Net")) -> bytes:
    """NEWOBJ and BUILD."""
    return kind + b")\x81" + state + b"b"


def entry(key: str, value: bytes) -> bytes:
    """A dictionary of one entry."""
    return b"}" + text(key) + value + b"s"


def whole_modules() -> Iterator[tuple[str, bytes]]:
    """A module that was saved whole, with something hostile in it, or that no torch saves."""
    run = call(name("os", "system"), text(TOUCH))
    quiet = call(name("somebody", "run"), text(TOUCH))
    for label, value in (("a command", run), ("a function of somebody", quiet)):
        yield f"of {label}", value + registries() + b"b"
        yield f"{label} as a weight", module(registries(parameters=text("bias") + value))
        yield f"{label} as a buffer", module(registries(buffers=entry("mean", value)))
        yield f"{label} as a submodule", module(registries(modules=entry("0", value)))
        yield f"{label} as all submodules", module(registries(modules=value))
        yield f"{label} as an attribute", module(registries(more=text("slope") + value))
        yield f"{label} as a hook", module(registries(more=text("_forward_hooks") + entry("0", value)))
        yield f"{label} as the list of buffers", module(registries(more=text("_non_persistent_buffers_set") + value))
        yield f"{label} as its own code", call(name("somebody", "Net"), value) + registries() + b"b"
    yield "whose class is a command", module(registries(), name("os", "system"))
    yield "whose class is Popen", module(registries(), name("subprocess", "Popen"))
    yield "of its source", b"(" + text("module") + name("os", "system") + text("net.py") + text(TOUCH) + b"tQ"
    yield "in the state of a command", name("os", "system") + b")\x81" + registries() + b"b"
    yield "with a number as its state", name("somebody", "Net") + b")\x81" + number(7) + b"b"
    yield "with slots", name("somebody", "Net") + b")\x81" + registries() + b"}" + b"\x86b"
    yield (
        "that contains itself",
        (name("somebody", "Net") + b")\x81q\x01" + registries(modules=b"}" + text("0") + b"h\x01s") + b"b"),
    )
    for label, key in (
        ("a number", number(7)),
        ("a tensor", SOUND),
        ("tuples", b"N" + b"\x85" * 1000),
        ("a command", run),
    ):
        yield f"with {label} as a name", module(registries(modules=b"}" + key + module(registries()) + b"s"))
    places = [b"h" + bytes([place]) for place in range(2, 62)]
    for label, levels, width in (("two", 50, 2), ("a hundred", 5, 100)):
        level = module(registries()) + b"q\x02"
        for inner, outer in pairwise(places[: levels + 1]):
            twice = b"}(" + b"".join(text(str(key)) + inner for key in range(width)) + b"u"
            level += b"0" + module(registries(modules=twice)) + b"q" + outer[1:]
        yield f"of {label} in each other", level
    deep = module(registries())
    for _ in range(300):
        deep = module(registries(modules=entry("0", deep)))
    yield "300 deep", deep
    for activation in (f"__import__('os').system('{TOUCH}')", "nn.SiLU()"):
        for layer in ("Conv", "os.system", "torch_load", "DetectionModel"):
            row = b"](" + number(-1) + number(1) + text(layer) + b"](" + text(TOUCH) + b"ee"
            yaml = b"}(" + text("backbone") + b"](" + row + b"e" + text("head") + b"](" + row + b"e"
            yaml += text("activation") + text(activation) + text("nc") + number(1 << 40) + b"u"
            kind = name("ultralytics.nn.tasks", "DetectionModel")
            yield f"of ultralytics, {layer}, {activation[:8]}", module(registries(more=text("yaml") + yaml), kind)


def keys() -> Iterator[tuple[str, bytes]]:
    """What stands where a name is expected."""
    yield "a number", number(7)
    yield "nothing", b"N"
    yield "bytes", b"C\x03abc"
    yield "a tuple", ints(1, 2)
    yield "deep tuples", b"N" + b"\x85" * 200_000
    yield "a billion laughs", b"N" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))
    yield "a tensor", SOUND
    yield "a list", b"]"
    yield "a stand-in", call(name("somebody", "Odd"))
    yield "a class", name("somebody", "Odd")
    yield "NaN", b"G\x7f\xf8\0\0\0\0\0\0"
    yield "an empty text", text("")
    yield "a path", text("../../../etc/passwd")
    yield "a newline", text("a\nb")
    yield "a surrogate", b"X\x03\0\0\0\xed\xa0\x80"
    yield "letters from right to left", text("\u202egnp.weight")
    yield "a zero", text("a\0b")
    yield "a megabyte", text("x" * 1_000_000)
    yield "a million dots", text("." * 1_000_000)
    yield "one that looks equal", text("\u0430.weight")
    yield "markup", text("[bold red]x[/]")
    yield "an escape", text("\x1b[2J\x1b]0;x\x07")


FAMILIES = {
    "a command": commands,
    "a detour": chains,
    "an alteration": alterations,
    "a bomb": bombs,
    "a tensor": tensors,
    "a module": whole_modules,
}


def corpus() -> Iterator[tuple[str, bytes]]:
    """(what it is, the pickle), the same each time."""
    for family, each in FAMILIES.items():
        for label, value in each():
            yield f"{family}: {label}", state_dict_with(value)
            if family in ("a bomb", "an alteration", "a module"):
                yield f"{family}, alone: {label}", P + value + b"."
    for label, key in keys():
        yield f"a key: {label}", under(key)
    yield "nothing", b""
    yield "a text", b"hello"
    yield "a pickle behind a pickle", state_dict_with(b"N") + P + call(name("os", "system"), text(TOUCH)) + b"."
