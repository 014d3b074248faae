"""A live module run whole, in float64: on what inputs, and whether another one computes the same there.

What a parent's forward does with its children cannot be seen from outside: it may read a child's weight, call one child
twice or one that stands elsewhere. So whatever is changed in a module, the module as a whole is run before and after.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from repaconv.live.calls import Call, Outputs, difference, outputs
from repaconv.live.inputs import found_calls, own_calls


@dataclass(frozen=True)
class Whole:
    """A module, the calls that it takes, and what it answers.

    Attributes:
        calls: One or two.
        expected: Its outputs of each.
        inside: What the parts that were asked for are called with on the way, where they are, once for every call.
    """

    calls: tuple[Call, ...]
    expected: tuple[Outputs, ...]
    inside: Mapping[str, tuple[Call, ...]]

    @classmethod
    def of(cls, module: nn.Module, example: Any, names: Iterable[str]) -> Whole:
        """Run a module.

        Args:
            module: Of `in_float64`.
            example: The user's input: a tensor, a tuple of arguments, or a dict of named ones. If None, sizes are tried
                that the module says or its first layers suggest.
            names: The parts whose calls are wanted.

        Raises:
            Refused: If it does not run on the example, or on nothing that was tried.
        """
        calls = own_calls(module, example) if example is not None else found_calls(module)
        names, inside = list(names), defaultdict(list)
        expected = []
        for call in calls:
            met: dict[str, Call] = {}
            expected.append(outputs(module, call, _recorder(names, met)))
            for name, own in met.items():
                inside[name].append(own)
        return cls(calls, tuple(expected), {name: tuple(own) for name, own in inside.items()})

    def error(self, other: nn.Module) -> float:
        """The largest relative difference of another module's outputs, over all calls; infinite if it does not run."""
        try:
            answers = [outputs(other, call) for call in self.calls]
        except Exception:  # the user's code may raise anything, as where it reads what is gone
            return float("inf")
        return max(map(difference, answers, self.expected))


def _recorder(names: Iterable[str], inside: dict[str, Call]) -> Callable[[nn.Module], None]:
    """Keeps the first call of each part."""

    def prepare(own: nn.Module) -> None:
        for name in names:

            def note(_part: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                if name not in inside:
                    inside[name] = copy.deepcopy(Call(args, kwargs))

            own.get_submodule(name).register_forward_pre_hook(note, prepend=True, with_kwargs=True)

    return prepare
