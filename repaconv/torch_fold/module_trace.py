"""One run of a live module, step by step: which function made what of which values, inside which of its parts.

What a class computes is seen where it calls torch, so functional code, shared values and weights read from outside show
like everything else. Compiled code does not: whatever is concluded from a trace is run afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn, strided
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from repaconv.torch_fold.module_calls import Call, outputs

LOOKS = ("item", "tolist", "numpy", "bool", "int", "float", "index", "equal", "allclose", "is_nonzero")
"""Functions that read a tensor's numbers and give none; others that give none read its shape."""
DRAWN = ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "uniform", "multinomial")
SAME = ("contiguous", "to", "type_as", "float", "double", "detach", "dropout", "dropout1d", "dropout2d", "dropout3d")
"""Functions that leave the numbers as they are, if they leave their type; dropout does in eval mode."""


SHAPED = ("view_as", "reshape_as", "expand_as", "type_as")
"""Functions that read the shape or type of all but the first of their tensors, and `LIKE` of all."""
LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full")


@dataclass(eq=False)
class Value:
    """A tensor between two changes of it.

    Attributes:
        tensor: Its numbers, as long as nothing wrote into it.
        step: What made it; None for what was there before.
        constant: Whether no input of the run is in it.
        name: Of the parameter or buffer that it is; empty if none.
        reads: The steps that take it.
        result: Whether it is an output of the run.
    """

    tensor: Tensor
    step: Step | None = None
    constant: bool = False
    name: str = ""
    reads: list[Step] = field(default_factory=list)
    result: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return tuple(self.tensor.shape)

    @property
    def only_read(self) -> Step | None:
        """The step that reads it, if it is one alone."""
        return self.reads[0] if len(self.reads) == 1 and not self.result else None


@dataclass(eq=False)
class Step:
    """A call of a torch function; ``args`` have values for tensors.

    Attributes:
        name: Of the function, without what says that it works in place or from the right.
        swapped: Whether it is an operator from the right, as in 1 - x.
        module: The innermost part that it ran in.
        output: None for several, or none.
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
        """All values that it takes."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Value)]

    @property
    def same(self) -> Value | None:
        """What it hands on as it is, if it is such a function."""
        if self.name not in SAME or self.output is None or not self.args or not isinstance(self.args[0], Value):
            return None
        if self.name.startswith("dropout") and self.given(2, "training", True):
            return None
        return self.args[0] if self.args[0].tensor.dtype == self.output.tensor.dtype else None

    def given(self, place: int, name: str, default: Any = None) -> Any:
        """An argument."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


@dataclass(eq=False)
class Called:
    """A call of a part: the steps from ``first`` up to ``last`` ran in it, and what it took and gave, if each is one
    value."""

    name: str
    parent: Called | None
    first: int
    last: int = 0
    input: Value | None = None
    output: Value | None = None

    def has(self, step: Step) -> bool:
        """Whether a step ran in it."""
        return self.first <= step.place < self.last


class Trace(TorchFunctionMode):
    """The steps of a run, and the calls of parts in the order in which they ended."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.calls: list[Called] = []
        self._open: list[Called] = []
        self._held: dict[tuple[Any, ...], Value] = {}  # parameters and buffers by where their numbers lie
        self._names: dict[int, list[str]] = {}  # of a part that stands in several places, all
        self._values: dict[int, Value] = {}
        self._kept: list[Any] = []  # so that no id comes twice

    @classmethod
    def of(cls, module: nn.Module, call: Call) -> Trace:
        """Of a module of `in_float64`, which takes that call."""
        trace = cls()
        with trace:
            outputs(module, call, trace._attach)
        trace._open.clear()
        return trace

    def called(self, name: str) -> list[Called]:
        """All calls of a part."""
        return [call for call in self.calls if call.name == name]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch's own: every function comes by here."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if self._open:
            self._note(func, args, kwargs, made)
        return made

    # --- noting --------------------------------------------------------------------------------------

    def _attach(self, own: nn.Module) -> None:
        for name, tensor in (*own.named_parameters(), *own.named_buffers()):
            self._values[id(tensor)] = Value(tensor, constant=True, name=name)
            if tensor.numel():
                self._held.setdefault(_memory(tensor), self._values[id(tensor)])
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
        call = Called(self._name(part, parent), parent, len(self.steps))
        call.input = self._one((args, kwargs))
        self._open.append(call)

    def _name(self, part: nn.Module, parent: Called | None) -> str:
        """Of the places where a part stands, the one inside what calls it; its first if it stands in none there."""
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
        if id(tensor) not in self._values:  # an autograd.Function is given its weights as other objects
            held = self._held.get(_memory(tensor)) if tensor.layout == strided and tensor.numel() else None
            self._values[id(tensor)] = held or Value(tensor)
            self._kept.append(tensor)
        return self._values[id(tensor)]

    def _note(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        name = str(getattr(func, "__name__", func))
        plain = name.strip("_")
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        if plain == "set" or (not tensors and plain not in (*LOOKS, "setitem")):
            return
        swapped = name.startswith("__r") and plain[1:] in ("add", "sub", "mul", "truediv", "matmul", "div")
        inside = name.startswith("__i") and plain[1:] in ("add", "sub", "mul", "truediv", "matmul", "div")
        plain = plain[1:] if swapped or inside else plain
        own_args, own_kwargs = _held(tuple(args), self._value), _held(dict(kwargs), self._value)
        step = Step(plain, swapped, func, own_args, own_kwargs, self._open[-1].name, len(self.steps))
        self.steps.append(step)
        read = [] if plain in LIKE else step.inputs[:1] if plain in SHAPED else step.inputs
        for value in dict.fromkeys(read):
            value.reads.append(step)
        if plain == "setitem":
            tensors = [args[0]]
        self._made(step, tensors)
        self._kept.append((args, kwargs, made))

    def _made(self, step: Step, tensors: list[Tensor]) -> None:
        known = all(value.constant for value in step.inputs) and not any(word in step.name for word in DRAWN)
        for tensor in tensors:
            value = Value(tensor, step, constant=known)
            if len(tensors) == 1:
                step.output = value
            self._values[id(tensor)] = value


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def inner_name(name: str, part: str) -> str:
    """The name of something inside a part, as that part has it; empty if it is not inside."""
    if not part:
        return name
    return name.removeprefix(f"{part}.") if name.startswith(f"{part}.") else ""


def _held(value: Any, of: Callable[[Tensor], Value]) -> Any:
    return tree_map(lambda leaf: of(leaf) if isinstance(leaf, Tensor) else leaf, value)


def parameters_of(value: Value) -> set[str]:
    """Names of the parameters and buffers that are in a constant."""
    if value.step is None:
        return {value.name} if value.name else set()
    found: set[str] = set()
    with suppress(RecursionError):
        for other in value.step.inputs:
            found |= parameters_of(other)
    return found
