"""Trace one run of a module: every torch function call, its input and output values, and the submodule it ran in.

The trace intercepts calls of torch functions. So it shows functional code, shared values and weights that are read from
outside a submodule. It does not show compiled code: every conclusion from a trace is verified by running the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn, strided
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from repaconv.torch_fold.float64_module_calls import Call, outputs

LOOKS = ("item", "tolist", "numpy", "bool", "int", "float", "index", "equal", "allclose", "is_nonzero")
"""Functions that read a tensor's numbers and return no tensor. Others without a tensor result only read its shape."""
DRAWN = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "uniform", "multinomial")
SAME_NUMBERS = (
    "contiguous",
    "to",
    "type_as",
    "float",
    "double",
    "detach",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
)
"""Functions that return the same numbers unless they change the dtype; dropout does so in eval mode."""


COPIES = (*SAME_NUMBERS, "get", "clone")
"""Functions that return the same numbers in a new tensor; ``get`` is reading an attribute such as ``data``."""


SHAPED = ("view_as", "reshape_as", "expand_as", "type_as")
"""Functions that read the numbers of their first tensor only; of the others they read shape or dtype. Those in `LIKE`
read no numbers at all."""
LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full")


@dataclass(eq=False)
class Value:
    """A tensor in the trace; an in-place operation makes a new value.

    Attributes:
        tensor: The tensor; its numbers are valid until a later step writes into it.
        step: The step that computed it; None if it existed before the run.
        constant: Whether it depends on no input of the run.
        name: The name of the parameter or buffer; empty for other tensors.
        reads: The steps that read it.
        result: Whether it is an output of the run.
        written: Whether the run assigned other numbers to this parameter or buffer.
    """

    tensor: Tensor
    step: FunctionCall | None = None
    constant: bool = False
    name: str = ""
    reads: list[FunctionCall] = field(default_factory=list)
    result: bool = False
    written: bool = False

    @property
    def computed(self) -> bool:
        """Whether the run computed these numbers from others."""
        own = self
        while own.step is not None and own.step.name in COPIES and own.step.inputs[0].shape == own.shape:
            own = own.step.inputs[0]
        return own.step is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.tensor.shape)

    @property
    def only_read(self) -> FunctionCall | None:
        """The only step that reads it; None if there are several or it is an output."""
        return self.reads[0] if len(self.reads) == 1 and not self.result else None


@dataclass(eq=False)
class FunctionCall:
    """One call of a torch function in the trace.

    Attributes:
        name: The function's name, without the marks of in-place and reflected operators.
        swapped: Whether it is a reflected operator, such as the subtraction in 1 - x.
        function: The torch function.
        args: Its positional arguments, with a `Value` for every tensor.
        kwargs: Its named arguments, likewise.
        module: The name of the innermost submodule that called it.
        place: Its index in the trace.
        output: The value that it returned; None if it returned several or none.
    """

    name: str
    swapped: bool
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    module: str
    place: int
    output: Value | None = None

    @property
    def inputs(self) -> list[Value]:
        """All values among the arguments."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Value)]

    @property
    def read(self) -> list[Value]:
        """The values among the arguments whose numbers it reads."""
        return [] if self.name in LIKE else self.inputs[:1] if self.name in SHAPED else self.inputs

    @property
    def same(self) -> Value | None:
        """The input that it returns unchanged; None if it changes it."""
        if self.name not in SAME_NUMBERS or self.output is None or not self.args or not isinstance(self.args[0], Value):
            return None
        if self.name.startswith("dropout") and self.given(2, "training", True):
            return None
        return self.args[0] if self.args[0].tensor.dtype == self.output.tensor.dtype else None

    @property
    def looks(self) -> bool:
        """Whether it reads numbers that depend on an input of the run, as Python numbers."""
        return self.name in LOOKS and self.output is None and not all(value.constant for value in self.inputs)

    def given(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by its position or name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


@dataclass(eq=False)
class SubmoduleCall:
    """One call of a submodule.

    Attributes:
        name: The name of the submodule.
        parent: The call that it was made in.
        first: The index of its first step.
        last: The index after its last step.
        input: Its input, if that is a single tensor.
        output: Its output, if that is a single tensor.
    """

    name: str
    parent: SubmoduleCall | None
    first: int
    last: int = 0
    input: Value | None = None
    output: Value | None = None

    def has(self, step: FunctionCall) -> bool:
        """Whether a step ran in this call."""
        return self.first <= step.place < self.last


class FunctionTrace(TorchFunctionMode):
    """The steps of one run, and the calls of submodules in the order in which they ended."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[FunctionCall] = []
        self.calls: list[SubmoduleCall] = []
        self._open: list[SubmoduleCall] = []
        self._held: dict[tuple[Any, ...], Value] = {}  # parameters and buffers by memory address
        self._names: dict[int, list[str]] = {}  # all names of each submodule
        self._values: dict[int, Value] = {}
        self._states: dict[Value, tuple[int, int]] = {}  # of parameters and buffers, before the run
        self._kept: list[Any] = []  # keeps tensors alive, so that no id is used twice

    @classmethod
    def of(cls, module: nn.Module, call: Call) -> FunctionTrace:
        """Trace one call of a module.

        Args:
            module: A module returned by `in_float64`.
            call: Arguments that the module accepts.
        """
        trace = cls()
        with trace:
            outputs(module, call, trace._attach)
        trace._open.clear()
        for value, before in trace._states.items():
            value.written = _state(value.tensor) != before
        return trace

    def called(self, name: str) -> list[SubmoduleCall]:
        """All calls of a submodule."""
        return [call for call in self.calls if call.name == name]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every torch function; records the call."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if self._open:
            self._note(func, args, kwargs, made)
        return made

    # Recording

    def _attach(self, own: nn.Module) -> None:
        for name, tensor in (*own.named_parameters(), *own.named_buffers()):
            value = self._values[id(tensor)] = Value(tensor, constant=True, name=name)
            self._states[value] = _state(tensor)
            if tensor.numel():
                self._held.setdefault(_memory(tensor), value)
        for name, part in own.named_modules(remove_duplicate=False):
            self._names.setdefault(id(part), []).append(name)
        for part in own.modules():
            for tensor in vars(part).values():
                if isinstance(tensor, Tensor):
                    self._values.setdefault(id(tensor), Value(tensor, constant=True))
            part.register_forward_pre_hook(self._enter, with_kwargs=True)
            part.register_forward_hook(self._leave)

    def _enter(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        parent = self._open[-1] if self._open else None
        call = SubmoduleCall(self._name(part, parent), parent, len(self.steps))
        call.input = self._one((args, kwargs))
        self._open.append(call)

    def _name(self, part: nn.Module, parent: SubmoduleCall | None) -> str:
        """The name of a submodule, inside its caller if it has several names."""
        names = self._names[id(part)]
        inside = (name for name in names if parent is not None and inner_name(name, parent.name))
        return next(inside, names[0])

    def _leave(self, _part: nn.Module, _args: Any, given: Any) -> None:
        call = self._open.pop()
        call.last, call.output = len(self.steps), self._one(given)
        self.calls.append(call)
        if not self._open:
            for leaf in tree_leaves(given):
                if isinstance(leaf, Tensor):
                    self._value(leaf).result = True

    def _one(self, held: Any) -> Value | None:
        leaves = [leaf for leaf in tree_leaves(held) if leaf is not None]
        return self._value(leaves[0]) if len(leaves) == 1 and isinstance(leaves[0], Tensor) else None

    def _value(self, tensor: Tensor) -> Value:
        if id(tensor) not in self._values:  # an autograd.Function gets other objects for the same weights
            held = self._held.get(_memory(tensor)) if tensor.layout == strided and tensor.numel() else None
            self._values[id(tensor)] = held or Value(tensor)
            self._kept.append(tensor)
        return self._values[id(tensor)]

    def _note(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        name = str(getattr(func, "__name__", func))
        plain = name.strip("_")
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        if plain == "set":  # tensor.data = other
            if len(args) == 2 and all(isinstance(each, Tensor) for each in args) and not self._value(args[1]).constant:
                self._vary(args[0])
            return
        if not tensors and plain not in (*LOOKS, "setitem"):
            return
        swapped = name.startswith("__r") and plain[1:] in ("add", "sub", "mul", "truediv", "matmul", "div")
        inside = name.startswith("__i") and plain[1:] in ("add", "sub", "mul", "truediv", "matmul", "div")
        plain = plain[1:] if swapped or inside else plain
        own_args, own_kwargs = _held(tuple(args), self._value), _held(dict(kwargs), self._value)
        step = FunctionCall(plain, swapped, func, own_args, own_kwargs, self._open[-1].name, len(self.steps))
        self.steps.append(step)
        for value in dict.fromkeys(step.read):
            value.reads.append(step)
        if plain == "setitem":
            tensors = [args[0]]
        self._made(step, tensors)
        if plain == "setitem" or inside or "out" in kwargs or (name.endswith("_") and not name.startswith("_")):
            for tensor in tensors:
                if not self._value(tensor).constant:
                    self._vary(tensor)
        self._kept.append((args, kwargs, made))

    def _made(self, step: FunctionCall, tensors: list[Tensor]) -> None:
        read = step.read if step.name in SHAPED else step.inputs
        known = all(value.constant for value in read) and not any(word in step.name for word in DRAWN)
        for tensor in tensors:
            value = Value(tensor, step, constant=known)
            if len(tensors) == 1:
                step.output = value
            self._values[id(tensor)] = value

    def _vary(self, written: Tensor) -> None:
        """Take no tensor for a constant whose numbers lie where a number was written that depends on an input."""
        self._value(written).constant = False
        place = _storage(written)
        for value in self._values.values():
            if value.constant and place is not None and _storage(value.tensor) == place:
                value.constant = False


def _storage(tensor: Tensor) -> int | None:
    """The memory that a tensor shares with its views; None if it has none of its own, e.g. a sparse one."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == strided and tensor.numel() else None


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _state(tensor: Tensor) -> tuple[int, int]:
    """Changes when a tensor's numbers are assigned or written into."""
    return tensor.data_ptr(), tensor._version


def inner_name(name: str, part: str) -> str:
    """A dotted name relative to a submodule; empty if it is not inside that submodule."""
    if not part:
        return name
    return name.removeprefix(f"{part}.") if name.startswith(f"{part}.") else ""


def _held(value: Any, of: Callable[[Tensor], Value]) -> Any:
    return tree_map(lambda leaf: of(leaf) if isinstance(leaf, Tensor) else leaf, value)


def parameters_of(value: Value) -> set[str]:
    """Names of the parameters and buffers that a constant is computed from."""
    seen, waiting = {value}, [value]
    while waiting:
        one = waiting.pop()
        others = dict.fromkeys(one.step.inputs if one.step is not None else ())
        waiting += [other for other in others if other not in seen]
        seen.update(others)
    return {one.name for one in seen if one.step is None and one.name}
