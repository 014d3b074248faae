"""What a part computes as a chain: layers that it is, its children that it calls, functions of one value.

RepVGG's block:   conv3(x) + conv1(x) + bn(x), then relu    ->    one convolution, relu
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from repaconv.folds.kernels import Kernel
from repaconv.live.forms import IMAGE, LAST, Form, Forms
from repaconv.live.trace import LOOKS, Called, Step, Trace, Value, inner_name


class Layer(NamedTuple):
    """A link of a chain: a kernel of the value before it."""

    kernel: Kernel
    axis: int
    several: bool


Link = Layer | str | nn.Module
"""A layer, the name of a child, or a function of one value."""


class Applied(nn.Module):
    """A function of one tensor, with its other arguments."""

    def __init__(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.function, self.args, self.kwargs = function, tuple(args), dict(kwargs)

    def forward(self, x: Tensor) -> Any:
        """As the part called it."""
        return self.function(x, *self.args, **self.kwargs)

    def extra_repr(self) -> str:
        """The function's name."""
        return str(getattr(self.function, "__name__", self.function))


def chain_of(trace: Trace, call: Called) -> list[Link] | None:
    """What a call is, from its input to its output; None where it is no chain."""
    decides = any(step.name in LOOKS for step in trace.steps[call.first : call.last])
    if call.input is None or call.output is None or decides:  # on other numbers it may be another chain
        return None
    value, links = call.output, list[Link]()
    children = _children(trace, call)
    while value is not call.input:
        found = _link(call, value, children)
        if found is None:
            return None
        link, value = found
        links += [] if link is None else [link]
    return links[::-1]


def _children(trace: Trace, call: Called) -> dict[Value, Called]:
    """Calls of its children by what they give."""
    own = [one for one in trace.calls if one.parent is call and one.input is not None and one.output is not None]
    return {one.output: one for one in own if one.output is not None and one.output is not one.input}


def _link(call: Called, value: Value, children: Mapping[Value, Called]) -> tuple[Link | None, Value] | None:
    """The last link up to a value, and the value before it."""
    forms = list(zip((IMAGE, LAST), forms_of(call, value), strict=True))
    layers = [(Layer(k, axis, f.several), s) for axis, f in forms if f is not None for s, k in f.terms.items()]
    layers = [(layer, source) for layer, source in layers if source is not value]
    several = next((one for one in layers if one[0].several), None)
    if several is not None:
        return several
    child = children.get(value)
    if child is not None and child.input is not None and (name := inner_name(child.name, call.name)):
        return name, child.input
    scale = next((one for one in layers if one[0].kernel.is_diagonal), None)
    if scale is not None:
        return scale
    step = value.step
    if step is None or not call.has(step):
        return None
    if step.same is not None:
        return None, step.same
    return _applied(step)


def forms_of(call: Called, value: Value) -> tuple[Form | None, Form | None]:
    """A value as one kernel of one other, along either axis of channels (`IMAGE`, `LAST`)."""
    return _form(call, value, IMAGE), _form(call, value, LAST)


def alike(a: Sequence[Link], b: Sequence[Link]) -> bool:
    """Whether two calls of a part are the same chain."""
    return len(a) == len(b) and all(map(_alike, a, b))


def _alike(a: Link, b: Link) -> bool:
    if isinstance(a, Layer) and isinstance(b, Layer):
        return a.axis == b.axis and _same_kernel(a.kernel, b.kernel)
    if isinstance(a, Applied) and isinstance(b, Applied):
        return (a.function, repr(a.args), repr(a.kwargs)) == (b.function, repr(b.args), repr(b.kwargs))
    return isinstance(a, str) and a == b


def _same_kernel(a: Kernel, b: Kernel) -> bool:
    biases = [np.zeros(len(each.weight)) if each.bias is None else each.bias for each in (a, b)]
    if (a.groups, a.strides, a.taps, a.reach) != (b.groups, b.strides, b.taps, b.reach):
        return False
    return np.array_equal(a.weight, b.weight) and np.array_equal(biases[0], biases[1])


def _form(call: Called, value: Value, axis: int) -> Form | None:
    """A value as one kernel of one other, no larger than what went into it."""
    for grow, share in ((True, True), (False, True), (False, False)):
        form = Forms(call, axis, grow=grow, share=share).of(value, top=True)
        kernel = next(iter(form.terms.values()), None)
        if kernel is not None and len(form.terms) == 1 and (not form.several or kernel.weight.size <= kernel.learnt):
            return form
    return None


def _applied(step: Step) -> tuple[Link, Value] | None:
    """A function of one value alone, which keeps its shape."""
    inputs = step.inputs
    if len(inputs) != 1 or not step.args or step.args[0] is not inputs[0] or step.output is None:
        return None
    if step.output.shape != inputs[0].shape or step.swapped:
        return None
    try:
        pickle.dumps(step.function)
    except Exception:  # made on the spot
        return None
    return Applied(step.function, step.args[1:], step.kwargs), inputs[0]
