"""What a part computes as a chain: layers that it is, its children that it calls, functions of one value.

RepVGG's block:   conv3(x) + conv1(x) + bn(x), then relu    ->    one convolution, relu
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from repaconv.folds.kernels import Kernel
from repaconv.live.forms import IMAGE, LAST, Form, Forms
from repaconv.live.trace import LOOKS, Called, Step, Trace, Value


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
    forms = [(axis, _form(call, value, axis)) for axis in (IMAGE, LAST)]
    layers = [(Layer(k, axis, f.several), s) for axis, f in forms if f is not None for s, k in f.terms.items()]
    layers = [(layer, source) for layer, source in layers if source is not value]
    several = next((one for one in layers if one[0].several), None)
    if several is not None:
        return several
    if (child := children.get(value)) is not None and child.input is not None:
        return child.name.removeprefix(f"{call.name}.") if call.name else child.name, child.input
    scale = next((one for one in layers if one[0].kernel.is_diagonal), None)
    if scale is not None:
        return scale
    step = value.step
    if step is None or not call.has(step):
        return None
    if step.same is not None:
        return None, step.same
    return _applied(step)


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
