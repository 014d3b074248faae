"""What methods read beside the tensors: the user's settings and the run's configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from repaconv.checkpoints import read_mmconfig
from repaconv.core.errors import SettingNeeded, UsageProblem, near_to, nearest
from repaconv.results import Fact

T = TypeVar("T")

CODE_DEFAULT = "default of the official code; neither tensors nor file tell"


class Knobs:
    """Values that no tensor shows, each taken from --set, else from the file, else from the default.

    Every one that was taken leaves a fact with its source and what speaks against it.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        """Start with the user's ``--set name=value`` pairs."""
        self._left = dict(settings)
        self._known: list[str] = []
        self._taken: dict[str, Any] = {}
        self.facts: list[Fact] = []

    def __contains__(self, name: str) -> bool:
        """Whether the user gives a value that nobody took yet."""
        return name in self._left

    def take(
        self,
        name: str,
        parse: Callable[[str], T],
        default: T,
        found: T | None = None,
        source: str = "",
        *,
        free: bool = False,
    ) -> T:
        """One value; ``found`` is what the file says of it, ``source`` where it would say so, if anywhere.

        A user's value that is another than ``found`` is a fact that overrules the file; not where it is ``free``: where
        ``found`` is only what is usual, or says what is to be made rather than what was trained. A value that was taken
        before stays what it is.

        Raises:
            UsageProblem: If the user's value does not parse.
        """
        if name not in self._taken:
            self._taken[name] = self._take(name, parse, default, found, source, free=free)
        value: T = self._taken[name]
        return value

    def _take(self, name: str, parse: Callable[[str], T], default: T, found: T | None, source: str, *, free: bool) -> T:
        self._known.append(name)
        if (text := self._left.pop(name, None)) is not None:
            try:
                value = parse(text)
            except ValueError as error:
                raise UsageProblem(
                    f"--set {name}={text}: {error}.", hint=f"E.g. --set {name}={default}.", code="setting.value"
                ) from None
            other = found is not None and not _same(found, value)
            against = f"{source} says {found}" if other else ""
            fact = Fact(name=name, value=value, source="--set", against=against, overrules=other and not free)
            self.facts.append(fact)
            return value
        value = default if found is None else found
        silent = f"default of the official code, which {source} leaves" if source else CODE_DEFAULT
        self.facts.append(
            Fact(name=name, value=value, source=silent if found is None else source, assumed=found is None)
        )
        return value

    def maybe(self, name: str, parse: Callable[[str], T], found: T | None = None, source: str = "") -> T | None:
        """One value that may stay unknown: the user's, else the file's, else None and no fact."""
        if name in self._left or found is not None:
            return self.take(name, parse, found, found, source)
        self._known.append(name)
        return None

    def asked(self, name: str, parse: Callable[[str], T], found: T | None = None, source: str = "") -> T | None:
        """The user's value, beside what the file says of it; None and no fact where the user gives none."""
        if name in self._left:
            return self.take(name, parse, found, found, source)
        self._known.append(name)
        return None

    def need(
        self, name: str, parse: Callable[[str], T], example: str, why: str, found: T | None = None, source: str = ""
    ) -> T:
        """One value that only the file or the user can give.

        Raises:
            SettingNeeded: If neither does; ``why`` says why it cannot be known.
        """
        if name not in self._left and found is None:
            raise SettingNeeded(f"{why}.", name, example, near_to(name, self._left))
        return self.take(name, parse, parse(example), found, source)

    def done(self) -> None:
        """Refuse settings that nobody took.

        Raises:
            UsageProblem: Naming the first of them.
        """
        for name in self._left:
            raise UsageProblem(
                f"this method has no setting {name!r}.",
                hint=f"{nearest(name, self._known)}Known settings: {', '.join(self._known)}."
                if self._known
                else "It has no settings here.",
                code="setting.unknown",
            )


def _same(found: Any, given: Any) -> bool:
    """Whether a file and a user give the same value; numbers to six digits, since 255 * 0.305 is not quite 77.775."""
    if isinstance(found, (list, tuple)) and isinstance(given, (list, tuple)):
        return len(found) == len(given) and all(map(_same, found, given))
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (found, given))
    return math.isclose(found, given, rel_tol=1e-6) if numbers else bool(found == given)


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser that takes one of these words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"not one of {', '.join(choices)}")
        return text

    return parse


def positive(text: str) -> int:
    """A parser for whole numbers above zero."""
    if not text.isdigit() or int(text) == 0:
        raise ValueError("not a whole number above zero")
    return int(text)


def natural(text: str) -> int:
    """A parser for whole numbers from zero."""
    if not text.isdigit():
        raise ValueError("not a whole number")
    return int(text)


def small(text: str) -> float:
    """A parser for an epsilon: above 0, below 1."""
    value = float(text)
    if not 0 < value < 1:
        raise ValueError("not between 0 and 1")
    return value


def said_in(record: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """What the file says at that place (``meta``, ``arch``); {} where there is nothing to be looked up."""
    found: Any = record
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def run_config(record: Mapping[str, Any]) -> dict[str, Any]:
    """mmengine's configuration text, in the places where its Runner puts it; {} without one."""
    places = (record.get("meta"), (record.get("message_hub") or {}).get("runtime_info"))
    for place in places:
        if isinstance(place, Mapping) and isinstance(text := place.get("cfg") or place.get("config"), str):
            return read_mmconfig(text)
    return {}
