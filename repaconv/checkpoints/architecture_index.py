"""Identify a published network by the names and shapes of its tensors.

``index.zip`` in this folder has the names and shapes of every architecture of timm, torchvision and the vision models
of transformers at their default sizes; ``benchmarks/network_index.py`` creates it. A name states its package:
``timm:mobileone_s1``. The members of the zip are grouped by number of tensors, so that only a few are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from math import prod
from typing import NamedTuple
from zipfile import ZipFile

from repaconv.core.errors import first_names

Shape = tuple[int, ...]
SIMILAR_SHARE = 0.9
"""Minimum share of tensors with the same name and shape for a network to be reported."""
NEAREST_COUNT = 3


@dataclass(frozen=True)
class Match:
    """A published architecture, and the differences of a file from it.

    Attributes:
        name: The architecture, e.g. ``timm:mobileone_s1``.
        also: Other names of the same architecture: the same classes with the same settings.
        head: Tensors of the classifier with another number of classes.
        other: Tensors with another shape, by name: the architecture's shape and the file's.
        missing: Tensors of the architecture that are missing from the file.
        extra: Tensors of the file that the architecture does not have.
    """

    name: str
    also: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    other: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the file has this architecture, except for the number of classes."""
        return not (self.other or self.missing or self.extra)

    @property
    def differences(self) -> str:
        """Description of the differences in one line; empty if there are none."""
        but = [f"another number of classes in {', '.join(self.head)}"] if self.head else []
        but += [
            f"{name} is {_shape_text(here)}, not {_shape_text(there)}"
            for name, (there, here) in [*self.other.items()][:2]
        ]
        but += [f"{len(self.other) - 2} more shapes"] if len(self.other) > 2 else []
        for what, names in (("without", self.missing), ("with", self.extra)):
            but += [f"{what} {first_names(names, 1)}"] if names else []
        return "; ".join(but)


class _Network(NamedTuple):
    """Architectures with the same tensor shapes that compute the same function.

    ``head`` has the indices of the classifier's tensors among the names. ``made`` is equal for equal classes and
    settings.
    """

    architectures: tuple[str, ...]
    names: tuple[str, ...]
    shapes: str
    head: tuple[int, ...]
    made: str


def matches(tensors: Mapping[str, Shape]) -> tuple[Match, ...]:
    """Return the architectures that match these tensor names and shapes, nearest first; () if none is near.

    If one matches exactly, only exact matches are returned; several exact ones compute different functions with the
    same tensors. BatchNorm's ``num_batches_tracked`` is ignored.

    Args:
        tensors: Shapes by name, without the prefixes of wrappers.
    """
    found = {name: tuple(shape) for name, shape in tensors.items() if not name.endswith("num_batches_tracked")}
    ranked: dict[str, Match] = {}
    for _, made, match in sorted(_near(found), key=lambda near: (near[0], near[2].name)):
        nearest = ranked.setdefault(made, match)
        if nearest is not match and nearest.exact:  # the same architecture with another number of classes
            ranked[made] = replace(nearest, also=(*nearest.also, match.name, *match.also))
    exact = tuple(match for match in ranked.values() if match.exact)
    return exact or tuple(ranked.values())[:NEAREST_COUNT]


def _near(found: Mapping[str, Shape]) -> Iterator[tuple[float, str, Match]]:
    """Yield architectures that share most tensors with the file: unshared share, identity of the function, match."""
    for names, networks in _index(int(SIMILAR_SHARE * len(found)), int(len(found) / SIMILAR_SHARE)):
        most = max(len(names), len(found))
        common = len(names & found.keys())
        for network in networks if common >= SIMILAR_SHARE * most else ():
            match = _compared(network, found)
            same = common - len(match.head) - len(match.other)
            if match.exact or same >= SIMILAR_SHARE * most:
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
    """Return the name of the index member for networks with this number of tensors."""
    return f"{tensors.bit_length()}.json"


def parameter_counts() -> dict[str, int]:
    """Return the number of parameters and buffers of every architecture in the index, by its name."""
    with files("repaconv.checkpoints").joinpath("index.zip").open("rb") as file, ZipFile(file) as index:
        members = index.namelist()
    every = (network for name in members for _, networks in _read(name) for network in networks)
    return {name: sum(map(prod, _shapes(one.shapes))) for one in every for name in one.architectures}


def _index(least: int, most: int) -> Iterator[tuple[frozenset[str], list[_Network]]]:
    """Yield networks by tensor names: at least all with ``least`` to ``most`` tensors."""
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


def _shape_text(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"
