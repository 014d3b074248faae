"""Read the settings that no tensor shows: from the user's ``--set`` values and the training run's configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from repaconv.core.errors import SettingNeeded, UsageProblem, did_you_mean, nearest_name
from repaconv.deprecation import deprecated, former_attribute, former_names
from repaconv.results import Fact, whole_number

T = TypeVar("T")

CODE_DEFAULT = "default of the official code; not recorded in the checkpoint"


class SettingsReader:
    """Reads the model settings that no tensor shows: each from --set, else from the file, else it is the default.

    Every setting that is read adds a fact with its value, its source and what contradicts it.

    Attributes:
        facts: The facts about the settings that were read.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        """Start with the user's ``--set name=value`` pairs."""
        self._left = dict(settings)
        self._known: list[str] = []
        self._taken: dict[str, Any] = {}
        self.facts: list[Fact] = []

    def __contains__(self, name: str) -> bool:
        """Whether the user gives a value for this setting that was not read yet."""
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
        same: Callable[[Any, Any], bool] | None = None,
    ) -> T:
        """Read one setting: the user's value, else the file's, else the default. A second read returns the first value.

        Args:
            name: The setting's name in ``--set``.
            parse: Parses the user's text.
            default: The value if neither the user nor the file gives one.
            found: The file's value, None without one.
            source: The part of the file that gives ``found``, or that could have given it.
            free: Whether the user may differ from ``found`` without overruling the file, because ``found`` is only the
                usual value, or describes the network to be made and not the one that was trained.
            same: Whether ``found`` and the user's value agree, called with both; by default whether they are equal.

        Raises:
            UsageProblem: If the user's value does not parse.
        """
        if name not in self._taken:
            self._taken[name] = self._take(name, parse, default, found, source, free=free, same=same or _equal)
        value: T = self._taken[name]
        return value

    def _take(
        self,
        name: str,
        parse: Callable[[str], T],
        default: T,
        found: T | None,
        source: str,
        *,
        free: bool,
        same: Callable[[Any, Any], bool],
    ) -> T:
        self._known.append(name)
        if (text := self._left.pop(name, None)) is not None:
            try:
                value = parse(text)
            except ValueError as error:
                raise UsageProblem(
                    f"--set {name}={text}: {error}.",
                    hint="Correct it, or leave it out." if default is None else f"E.g. --set {name}={_typed(default)}.",
                    code="setting.value",
                ) from None
            other = found is not None and not same(found, value)
            against = f"{source} says {found}" if other else ""
            fact = Fact(name=name, value=value, source="--set", against=against, overrules=other and not free)
            self.facts.append(fact)
            return value
        value = default if found is None else found
        self.facts.append(
            Fact(name=name, value=value, source=CODE_DEFAULT if found is None else source, assumed=found is None)
        )
        return value

    def maybe(self, name: str, parse: Callable[[str], T], found: T | None = None, source: str = "") -> T | None:
        """Read a setting that may be unknown: the user's value, else the file's, else None without a fact."""
        if name in self._left or found is not None:
            return self.take(name, parse, found, found, source)
        self._known.append(name)
        return None

    def user_value(self, name: str, parse: Callable[[str], T], found: T | None = None, source: str = "") -> T | None:
        """Read only the user's value, recording the file's with it; None without a fact if the user gives none."""
        if name in self._left:
            return self.take(name, parse, found, found, source)
        self._known.append(name)
        return None

    asked = former_attribute("asked", "user_value", removed_in="0.3.0")

    def need(
        self, name: str, parse: Callable[[str], T], example: str, why: str, found: T | None = None, source: str = ""
    ) -> T:
        """Read a setting without a default: the user's value, else the file's.

        Args:
            name: The setting's name in ``--set``.
            parse: Parses the user's text.
            example: A value for the error message.
            why: Why the value cannot be known, for the error message.
            found: The file's value, None without one.
            source: The part of the file that gives ``found``, or that could have given it.

        Raises:
            SettingNeeded: If neither the user nor the file gives a value.
            UsageProblem: If the user's value does not parse.
        """
        if name not in self._left and found is None:
            raise SettingNeeded(f"{why}.", name, example, nearest_name(name, self._left))
        return self.take(name, parse, parse(example), found, source)

    def done(self) -> None:
        """Refuse settings of the user that were not read.

        Raises:
            UsageProblem: If there is one; the first is named.
        """
        for name in self._left:
            raise UsageProblem(
                f"this method has no setting {name!r}.",
                hint=f"{did_you_mean(name, self._known)}Known settings: {', '.join(dict.fromkeys(self._known))}."
                if self._known
                else "It has no settings here.",
                code="setting.unknown",
            )


if not TYPE_CHECKING:
    __getattr__ = former_names(__name__, {"Knobs": SettingsReader}, removed_in="0.3.0")


def _typed(value: Any) -> str:
    """A value as a user types it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(_typed, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _equal(found: Any, given: Any) -> bool:
    """Whether the file's and the user's value are equal, to six digits since 255 * 0.305 is not exactly 77.775."""
    if isinstance(found, (list, tuple)) and isinstance(given, (list, tuple)):
        return len(found) == len(given) and all(map(_equal, found, given))
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (found, given))
    return math.isclose(found, given, rel_tol=1e-6) if numbers else bool(found == given)


def contradictions(facts: Sequence[Fact]) -> tuple[str, ...]:
    """The user's settings that contradict the checkpoint, in words."""
    return tuple(
        f"--set {fact.name}={fact.value} contradicts the checkpoint: {fact.against}" for fact in facts if fact.overrules
    )


def one_of(*choices: str) -> Callable[[str], str]:
    """Make a parser that accepts one of these words; any other is a ValueError, as `SettingsReader` expects."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"not one of {', '.join(choices)}")
        return text

    return parse


def yes_or_no(text: str) -> bool:
    """Parse yes or no.

    Raises:
        ValueError: If it is neither.
    """
    return one_of("yes", "no")(text) == "yes"


def positive(text: str) -> int:
    """Parse a whole number above zero.

    Raises:
        ValueError: If it is none.
    """
    if not (number := whole_number(text)):
        raise ValueError("not a whole number above zero")
    return number


def natural(text: str) -> int:
    """Parse a whole number, zero included.

    Raises:
        ValueError: If it is none.
    """
    if (number := whole_number(text)) is None:
        raise ValueError("not a non-negative integer")
    return number


def small(text: str) -> float:
    """Parse an epsilon: above 0, below 1.

    Raises:
        ValueError: If it is none.
    """
    value = float(text)
    if not 0 < value < 1:
        raise ValueError("not between 0 and 1")
    return value


def mapping_at(record: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return the mapping at a path (``meta``, ``arch``) in a checkpoint's record; {} if there is none."""
    found: Any = record
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


@deprecated("mapping_at", removed_in="0.3.0")
def said_in(record: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Former name of `mapping_at`."""
    return mapping_at(record, *path)


def run_config(record: Mapping[str, Any]) -> dict[str, Any]:
    """Read mmengine's configuration of the run, from the places where its Runner stores it; {} without one."""
    from repaconv.checkpoints import read_mmconfig  # imports torch, which folding a graph may not need

    places = (record.get("meta"), (record.get("message_hub") or {}).get("runtime_info"))
    for place in places:
        if isinstance(place, Mapping) and isinstance(text := place.get("cfg") or place.get("config"), str):
            return read_mmconfig(text)
    return {}
