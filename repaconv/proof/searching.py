"""The search for probes: values of free sizes with which a graph runs, and gains on what is drawn for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repaconv.errors import first_line
from repaconv.proof.draws import Draw

Array = NDArray[Any]
Sizes = dict[str, int]

BATCHES = (2, 3, 1)
FEW = (2, 1)
"""Of a graph that is dear to run."""
PRIMES = {"batch": BATCHES, "length": (7, 13, 5), "side": (61, 97, 67)}
USUAL = {
    "batch": (*BATCHES, *BATCHES, 4, 8, 16),
    "length": (16, 32, 64, 128, 77, 197, 256, 512),
    "side": (64, 96, 128, 224, 256, 384, 512, 640, 32, 28, 16, 8),
}
"""Tried after the primes and what the graph's metadata say."""

IN_USE = (224, 256, 320, 384, 512, 640, 128, 96, 64, 48, 32, 28, 16, 8)
"""Sides that a network of images of any size is likely to be used at."""

WANTED = 3
"""Assignments of the free sizes."""
SMALLER = (1.0, 0.1, 0.01, 0.001)
"""The first of these gains on normal inputs at which nothing overflows is the usual one."""

GAINS = (4.0, 32.0, 0.1)
"""On that, of further probes: what saturates or is dead at 1 need not be so there."""


FURTHER = (1.0, 4.0, 32.0, 256.0, 0.1, 2048.0) * 6
"""Of draws that are tried where a class or a truth value was the same on all before, to find some that move it."""


@dataclass(frozen=True)
class Input:
    """An input of a graph, and how it is drawn."""

    name: str
    dims: tuple[int | str, ...]  # a name where free
    dtype: np.dtype[Any]
    draw: Draw


def drawn_for(inputs: list[Input], sizes: Sizes, seed: int | list[int], gain: float, below: int) -> dict[str, Array]:
    """A call of these sizes; one that is not said is 1."""
    generator = np.random.default_rng(seed)
    shapes = {one.name: tuple(sizes.get(d, 1) if isinstance(d, str) else d for d in one.dims) for one in inputs}
    return {
        one.name: one.draw(shapes[one.name], one.dtype, generator, gain=gain, below=below, sizes=sizes)
        for one in inputs
    }


@dataclass
class Search:
    """Assignments of the free sizes with which the graph runs."""

    inputs: list[Input]
    run: Callable[[dict[str, Array]], dict[str, Any]]
    kinds: dict[str, str]
    usual: dict[str, tuple[int, ...]]
    below: int
    wanted: int = WANTED
    problem: str = ""
    lengths: dict[Any, tuple[int, ...]] = field(default_factory=dict)

    def assignments(self) -> list[Sizes]:
        """Some that differ in as many sizes as the graph lets; none if it never runs."""
        if not self.kinds:
            return [{}] if self._runs({}, 0) else []
        for alike in ((), ("batch",), ("batch", "length", "side")):
            tried = {tuple(sizes.items()): sizes for sizes in self._tries(alike)}
            found: list[Sizes] = []
            for sizes in tried.values():
                if len(found) < self.wanted and self._runs(sizes, len(found)):
                    found.append(sizes)
            if found:
                return found + list(self._varied(found))
        return []

    def _tries(self, alike: tuple[str, ...]) -> Iterator[Sizes]:
        """Values for all names, those of the kinds in ``alike`` with one for all of the kind."""
        for start in range(max(len(values) for values in self.usual.values())):
            place = dict.fromkeys(PRIMES, start)
            sizes = {}
            for name, kind in self.kinds.items():
                sizes[name] = self.usual[kind][place[kind] % len(self.usual[kind])]
                place[kind] += kind not in alike
            yield sizes

    def _varied(self, found: list[Sizes]) -> Iterator[Sizes]:
        """Further ones in which a name has another value that had but one so far."""
        seed = len(found)
        for name, kind in self.kinds.items():
            only = {sizes[name] for sizes in found}
            others = (value for value in self.usual[kind] if value not in only)
            tries = ({**found[0], name: value} for value in others) if len(only) == 1 else iter(())
            if (one := next((sizes for sizes in tries if self._runs(sizes, seed)), None)) is not None:
                seed += 1
                yield one

    def _runs(self, sizes: Sizes, seed: int) -> bool:
        """Whether it does on what is also the probe of these sizes, where nothing overflows."""
        try:
            self.run(self.drawn(sizes, seed, 1.0))
        except Exception as error:  # the runtime's own, of many classes
            self.problem = first_line(error)
            return False
        return True

    def drawn(self, sizes: Sizes, seed: int, gain: float) -> dict[str, Array]:
        """A call of these sizes."""
        return drawn_for(self.inputs, sizes, seed, gain, self.below)

    def usual_sizes(self, found: list[Sizes]) -> Sizes:
        """Free sizes as networks have them in use: one of a batch, a side that the graph's maker wrote down."""
        own = {kind: values[len(PRIMES[kind]) :] for kind, values in self.usual.items()}
        own = {**own, "batch": (1,), "side": tuple(dict.fromkeys((*own["side"][: -len(USUAL["side"])], *IN_USE)))}
        for place in range(max(map(len, own.values()))):
            sizes = {name: own[kind][place % len(own[kind])] for name, kind in self.kinds.items()}
            if sizes in found or self._runs(sizes, 0):
                return sizes
        return found[0]

    def gain(self, sizes: Sizes) -> float:
        """The first at which all outputs are finite."""
        return next((gain for gain in SMALLER if self._finite(self.drawn(sizes, 0, gain))), 1.0)

    def more(
        self, plain: tuple[dict[str, Array], ...], found: list[Sizes], usual: float, still: set[str]
    ) -> tuple[dict[str, Array], ...]:
        """Beside every assignment the one that costs least with other gains, and what moves outputs that are still."""
        gained = tuple(self._gained(found, usual))
        return (*gained, *self._stirring(found[0], (*plain, *gained), still))

    def _gained(self, found: list[Sizes], usual: float) -> Iterator[dict[str, Array]]:
        """Where it stays finite; or once again, where nothing is drawn normally."""
        least = min(found, key=lambda sizes: sum(array.size for array in self.drawn(sizes, 0, usual).values()))
        gains = GAINS if any(one.dtype.kind == "f" for one in self.inputs) else (1.0,)
        for seed, gain in enumerate(gains, len(found)):
            feeds = self.drawn(least, seed, usual * gain)
            if self._finite(feeds):
                yield feeds

    def _stirring(
        self, sizes: Sizes, feeds: tuple[dict[str, Array], ...], still: set[str]
    ) -> Iterator[dict[str, Array]]:
        """Further draws, as long as some of these outputs have not moved: those on which one does."""
        first: dict[str, dict[tuple[int, ...], Array]] = {name: {} for name in still}
        for feed in feeds if still else ():
            still = still - self._moving(feed, still, first)
        for seed, gain in enumerate(FURTHER, len(feeds)):
            feed = self.drawn(sizes, seed, gain) if still else {}
            if feed and self._finite(feed) and (moving := self._moving(feed, still, first)):
                still = still - moving
                yield feed

    def _moving(
        self, feed: dict[str, Array], still: set[str], first: dict[str, dict[tuple[int, ...], Array]]
    ) -> set[str]:
        """Which of these outputs are others than on the first draw of their shape, or from row to row."""
        outputs = self.run(feed)
        found = {name: np.asarray(outputs[name]) for name in still}
        before = {name: first[name].setdefault(out.shape, out) for name, out in found.items()}
        given = tuple(np.shape(array) for array in feed.values())
        longer = {n for n, out in found.items() if out.shape != self.lengths.setdefault((n, given), out.shape)}
        changed = {n for n, out in found.items() if (out != before[n]).any() or (out.ndim and (out != out[:1]).any())}
        return longer | changed

    def _finite(self, feeds: dict[str, Array]) -> bool:
        try:
            outputs = self.run(feeds)
        except Exception:  # not every graph takes every number
            return False
        floats = (out for out in outputs.values() if isinstance(out, np.ndarray) and out.dtype.kind == "f")
        return all(bool(np.isfinite(out).all()) for out in floats)

    def told(self, found: list[Sizes]) -> str:
        """What was varied, and what not."""
        values = {name: sorted({sizes[name] for sizes in found}) for name in self.kinds}
        varied = [f"{name} {', '.join(map(str, some))}" for name, some in values.items() if len(some) > 1]
        fixed = [f"{name} {some[0]}" for name, some in values.items() if len(some) == 1]
        parts = [f"dynamic sizes: {'; '.join(varied)}"] if varied else []
        parts += [f"runs at one size alone: {'; '.join(fixed)}"] if fixed else []
        return "; ".join(["ONNX Runtime, seeded inputs", *parts])
