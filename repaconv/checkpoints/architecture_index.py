"""Which published network has tensors of these names and shapes.

``index.zip`` beside this file has the names and shapes of every architecture of timm, of torchvision's models and of
the vision models of transformers at their default sizes; ``benchmarks/index_networks.py`` makes it. A name says where
an architecture is from: ``timm:mobileone_s1``. Its members are by the number of tensors: little of it is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import NamedTuple
from zipfile import ZipFile

Shape = tuple[int, ...]
LIKE = 0.9
"""Share of tensors with the same name and shape from which a network is worth naming."""
NEAREST = 3


@dataclass(frozen=True)
class Match:
    """A published architecture, and how a file differs from it.

    Attributes:
        name: E.g. ``timm:mobileone_s1``.
        also: Other names of the same: built of the same classes with the same values.
        head: Tensors of the classifier whose number of classes is another.
        other: Tensors whose shape is another, by name: theirs there and here.
        missing: Tensors that the architecture has and the file has not.
        extra: Those that the file has besides.
    """

    name: str
    also: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    other: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the file is of this architecture, but for the number of classes."""
        return not (self.other or self.missing or self.extra)

    @property
    def told(self) -> str:
        """How the file differs, in one line; empty if it does not."""
        but = [f"another number of classes in {', '.join(self.head)}"] if self.head else []
        but += [f"{name} is {_told(here)}, not {_told(there)}" for name, (there, here) in [*self.other.items()][:2]]
        but += [f"{len(self.other) - 2} more shapes"] if len(self.other) > 2 else []
        for what, names in (("without", self.missing), ("with", self.extra)):
            but += [f"{what} {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"] if names else []
        return "; ".join(but)


class _Network(NamedTuple):
    """Several architectures of the same shapes that compute the same.

    ``head`` is the classifier's, by place among the names; ``made`` is equal where classes and plain values are.
    """

    architectures: tuple[str, ...]
    names: tuple[str, ...]
    shapes: str
    head: tuple[int, ...]
    made: str


def matches(tensors: Mapping[str, Shape]) -> tuple[Match, ...]:
    """Architectures with tensors of these names and shapes, the nearest first; () if none is near.

    Where one is exact, those that are not are left out; two that are exact compute different things with the same
    tensors. BatchNorm's counters do not count.

    Args:
        tensors: Shapes by name, wrappers' prefixes stripped.
    """
    found = {name: tuple(shape) for name, shape in tensors.items() if not name.endswith("num_batches_tracked")}
    ranked: dict[str, Match] = {}
    for _, made, match in sorted(_near(found), key=lambda near: (near[0], near[2].name)):
        nearest = ranked.setdefault(made, match)
        if nearest is not match and nearest.exact:  # the same with another number of classes
            ranked[made] = replace(nearest, also=(*nearest.also, match.name, *match.also))
    exact = tuple(match for match in ranked.values() if match.exact)
    return exact or tuple(ranked.values())[:NEAREST]


def _near(found: Mapping[str, Shape]) -> Iterator[tuple[float, str, Match]]:
    """Architectures that share most tensors with the file: the share that they do not, what they are made of, they."""
    for names, networks in _index(int(LIKE * len(found)), int(len(found) / LIKE)):
        most = max(len(names), len(found))
        common = len(names & found.keys())
        for network in networks if common >= LIKE * most else ():
            match = _compared(network, found)
            same = common - len(match.head) - len(match.other)
            if match.exact or same >= LIKE * most:
                yield 1 - same / most, network.made, match


def _compared(network: _Network, found: Mapping[str, Shape]) -> Match:
    there = dict(zip(network.names, _shapes(network.shapes), strict=True))
    other = {name: (shape, found[name]) for name, shape in there.items() if found.get(name, shape) != shape}
    classifier = {network.names[place] for place in network.head}
    head = tuple(name for name, (theirs, here) in other.items() if name in classifier and theirs[1:] == here[1:])
    first, *also = network.architectures
    return Match(
        name=first,
        also=tuple(also),
        head=head,
        other={name: pair for name, pair in other.items() if name not in head},
        missing=tuple(name for name in there if name not in found),
        extra=tuple(name for name in found if name not in there),
    )


def member(tensors: int) -> str:
    """Where in the index networks of so many tensors are."""
    return f"{tensors.bit_length()}.json"


def _index(least: int, most: int) -> Iterator[tuple[frozenset[str], list[_Network]]]:
    """Networks by the names of their tensors: all that have from ``least`` to ``most``, and more."""
    for name in dict.fromkeys(map(member, range(least, most + 1))):
        yield from _read(name)


@cache
def _read(name: str) -> list[tuple[frozenset[str], list[_Network]]]:
    with files("repaconv.checkpoints").joinpath("index.zip").open("rb") as file, ZipFile(file) as index:
        written = json.loads(index.read(name)) if name in index.namelist() else []
    return [
        (
            frozenset(names),
            [_Network(tuple(same), tuple(names), shapes, tuple(head), made) for same, head, shapes, made in networks],
        )
        for names, networks in written
    ]


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(tuple(map(int, shape.split("x"))) if shape else () for shape in text.split(","))


def _told(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


# --- Networks that no method is about: which published one a bare state dict is of, by its tensors' names and shapes.
