"""Find the first module at which the reference and the candidate of a link differ.

Both run on the same inputs. Their intermediate values are compared in the order of computation, and the first
difference that is larger than rounding is reported. A few values are held at a time and each is reduced to two
numbers, so that large networks fit in memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from repaconv.engines.contract import Feeds
from repaconv.results import Drift, Link, Location
from repaconv.verification.model_runners import IntermediateValues, TorchValues, ValueLocation

if TYPE_CHECKING:
    from torch import nn

    from repaconv.verification.model_runners import TorchRunner

Array = NDArray[np.floating]
Values = dict[ValueLocation, Array]

# A piece of a trace loads the whole graph once more, so a piece is as large as the values before it allow.
FIRST_PIECE, LARGEST_PIECE, PIECE_BYTES = 16, 128, 2**28
# Factor on the tolerance for intermediate values: some have small scales, e.g. those after a norm.
INTERMEDIATE_FACTOR = 3.0
# A lossy link differs everywhere. A layer is broken if its relative RMS difference is LOSSY_JUMP times the largest one
# before it (at least LOSSY_FLOOR), and above LOSSY_LARGE. Correct INT8 graphs jump by up to 2.6
# (tests/test_lower_precision.py).
LOSSY_JUMP, LOSSY_FLOOR, LOSSY_LARGE = 4.0, 0.03, 0.1


def _values_by_piece(
    places: Sequence[ValueLocation],
    reference: IntermediateValues,
    candidate: IntermediateValues,
    inferences: Sequence[Feeds],
) -> Iterator[tuple[Sequence[ValueLocation], Values, Values]]:
    """Yield some places at a time with their values in both traces, once for each inference.

    Values are freed before the next ones are computed.
    """
    start, count = 0, FIRST_PIECE
    while start < len(places):
        piece = places[start : start + count]
        start += count
        held = 1
        for before, after in zip(reference.values(piece, inferences), candidate.values(piece, inferences), strict=True):
            held = max(held, sum(value.nbytes for values in (before, after) for value in values.values()))
            yield piece, before, after
            before.clear()  # the caller's variables hold them
            after.clear()
        count = max(1, min(LARGEST_PIECE, int(PIECE_BYTES * len(piece) / held)))


def drift(
    reference: IntermediateValues,
    candidate: IntermediateValues,
    inferences: Sequence[Feeds],
    only: Container[ValueLocation] | None = None,
) -> list[tuple[ValueLocation, Drift]]:
    """Measure the difference at each place that both traces have, in the order of the reference.

    Args:
        reference: Trace of the reference.
        candidate: Trace of the candidate.
        inferences: Inputs [n, ...] by name, of one or more inferences; a difference is that over all of them.
        only: The places to compare; all when None.
    """
    there = set(candidate.places(inferences[0]))
    common = [place for place in reference.places(inferences[0]) if place in there and (only is None or place in only)]
    found: dict[ValueLocation, _Difference] = {}
    for piece, before, after in _values_by_piece(common, reference, candidate, inferences):
        for place in piece:
            if place in before and place in after and before[place].size == after[place].size > 0:
                found.setdefault(place, _Difference()).add(after[place], before[place])
    return [(place, found[place].drift(place)) for place in common if place in found]


class _Difference:
    """The difference of one value, over one or more inferences."""

    def __init__(self) -> None:
        self._largest_error = self._largest = self._squared_errors = self._squares = 0.0
        self._count = 0

    def add(self, candidate: Array, reference: Array) -> None:
        a, b = (values.ravel().astype(np.float64) for values in (candidate, reference))
        with np.errstate(invalid="ignore", over="ignore"):
            error = a - b
            self._largest_error = float(np.maximum(self._largest_error, np.abs(error).max()))  # NaN remains
            self._largest = float(np.maximum(self._largest, np.abs(b).max()))
            self._squared_errors += float((error * error).sum())
            self._squares += float((b * b).sum())
        self._count += a.size

    def drift(self, place: ValueLocation) -> Drift:
        rms_error, rms = (float(np.sqrt(each / self._count)) for each in (self._squared_errors, self._squares))
        return Drift(
            place=str(place),
            max_rel_error=self._largest_error / (self._largest or 1.0),
            rms_rel_error=rms_error / (rms or 1.0),
        )


def first_apart(curve: Sequence[Drift], allowed: float) -> int | None:
    """Index of the first place that differs by more than rounding, for a link that is exact up to ``allowed``."""
    for limit in (INTERMEDIATE_FACTOR * allowed, allowed):
        for place, row in enumerate(curve):
            if not row.max_rel_error <= limit:  # also true for NaN
                return place
    return None


def first_jump(curve: Sequence[Drift], *, decides: bool = False) -> int | None:
    """Index of the place where a lossy link breaks: the first value that is not finite, else the largest jump.

    None if no jump is large enough. If the network makes discrete decisions, jumps do not count.
    """
    errors = [row.rms_rel_error for row in curve]
    for place, error in enumerate(errors):
        if not np.isfinite(error):
            return place
    jumps = [error / max([LOSSY_FLOOR, *errors[:place]]) for place, error in enumerate(errors)]
    best = int(np.argmax(jumps)) if jumps else 0
    return best if jumps and jumps[best] > LOSSY_JUMP and errors[best] > LOSSY_LARGE and not decides else None


def locate(
    reference: IntermediateValues,
    candidate: IntermediateValues,
    inferences: Sequence[Feeds],
    *,
    allowed: float | None,
    decides: bool = False,
) -> Location:
    """Find the first module at which the candidate differs from the reference.

    Args:
        reference: Trace of the reference.
        candidate: Trace of the candidate.
        inferences: Inputs [n, ...] by name, of one or a few inferences.
        allowed: The link's tolerance if it is exact, None if it is lossy.
        decides: Whether the network makes discrete decisions; a lossy link then breaks only at values that are not
            finite.
    """
    found = drift(reference, candidate, inferences)
    curve = tuple(row for _, row in found)
    if not found:
        return Location(
            module="", reason="reference and candidate have no layer in common that could be compared", drift=curve
        )
    index = first_jump(curve, decides=decides) if allowed is None else first_apart(curve, allowed)
    if index is None:
        what = "no layer's error jumps" if allowed is None else f"all {len(found)} compared places agree"
        return Location(module="", reason=f"{what}; the last one is the {found[-1][0]}", drift=curve)
    place, row = found[index]
    off = f"off by {row.max_rel_error:.1e}"
    rest = f"places before it that {'agree' if allowed is not None else 'differ less'}: {index}"
    if place.side == "in":  # the module's input is wrong already, so the cause is before the module
        holder = place.name.rpartition(".")[0]
        since = f" and the {found[index - 1][0]}" if index else ""
        reason = f"{off} between the input of {place.name}{since}; {rest}"
        return Location(module=holder or "the network's own code", reason=reason, drift=curve)
    return Location(module=reference.module_of(place), reason=f"{off} at the {place}; {rest}", drift=curve)


def broken(link: Link, where: Location) -> Link:
    """Add the location to a lossy link; a broken layer fails the link even if the output is within its limits."""
    if not where.module or link.verdict == "not verified":
        return link.model_copy(update={"location": where})
    broken_at = f"broken at {where.module}"
    found = link.noted(broken_at) if link.verdict == "failed" else link.because("layer_broken", where.module)
    return found.model_copy(update={"location": where})


LAST_NORMS = ("norm", "fc_norm")


def seams(training: nn.Module, deploy: nn.Module) -> list[ValueLocation]:
    """List the places where only the residual stream flows, which training form and deploy form have in common.

    These are the outputs of blocks (members of module lists and sequences), the outputs of top-level modules, and,
    within a block, the input of its second norm, or of its FFN if the FFN contains the norm. The output of the last
    norm is excluded: its affine is part of the head in the deploy form.
    """
    from torch import nn

    holders = (nn.ModuleList, nn.Sequential)
    there = dict(deploy.named_modules())
    found = []
    for name, part in training.named_modules():
        holder, _, _ = name.rpartition(".")
        if name not in there or name in LAST_NORMS or isinstance(part, holders):
            continue
        if not holder or isinstance(training.get_submodule(holder), holders):
            found.append(ValueLocation("out", name))
            halves = [f"{name}.{half}" for half in ("norm2", "mlp")]
            found += [ValueLocation("in", half) for half in halves if half in there and _has_module(training, half)][:1]
    return found


def _has_module(module: nn.Module, name: str) -> bool:
    return any(name == known for known, _ in module.named_modules())


def locate_between_seams(training: TorchRunner, deploy: TorchRunner, feeds: Feeds, *, allowed: float) -> Location:
    """Find the modules between the last place at which training and deploy form agree and the first where they differ.

    Within a block the two forms compute different things, so they are compared at their `seams` only.

    Args:
        training: The training form in float64.
        deploy: The deploy form in float64.
        feeds: Inputs [n, ...] by name.
        allowed: The link's tolerance.
    """
    places = seams(training.module, deploy.module)
    names = dict.fromkeys(place.name for place in places)
    found = drift(TorchValues(training, names), TorchValues(deploy, names), [feeds], set(places))
    curve = tuple(row for _, row in found)
    index = first_apart(curve, allowed)
    if index is None:
        return Location(module="", reason="the two forms agree wherever they can be compared", drift=curve)
    before, after = (found[index - 1][0] if index else None), found[index][0]
    order = [place.name for place in TorchValues(training).places(feeds) if place.side == "out"]
    suspects = _modules_between(before, after, order)
    since = f"the {before} agrees" if before else "the input is the same"
    reason = f"off by {curve[index].max_rel_error:.1e} at the {after}, while {since}"
    return Location(module=", ".join(suspects), reason=reason, drift=curve)


def _modules_between(before: ValueLocation | None, after: ValueLocation, order: list[str]) -> list[str]:
    """The modules computed between two places; a parent is named instead of all of its children."""
    start = 0
    if before is not None:
        inside = [i for i, name in enumerate(order) if name == before.name or name.startswith(f"{before.name}.")]
        start = (inside[0] if before.side == "in" else inside[-1] + 1) if inside else 0
    inside = [i for i, name in enumerate(order) if name == after.name or name.startswith(f"{after.name}.")]
    stop = (inside[0] if after.side == "in" else inside[-1] + 1) if inside else len(order)
    names = order[start:stop]
    return list(dict.fromkeys(_topmost_module(name, set(names), order) for name in names)) or [after.name]


def _topmost_module(name: str, chosen: set[str], order: list[str]) -> str:
    """The topmost parent of a module whose children are all in ``chosen``."""
    while holder := name.rpartition(".")[0]:
        inside = {part for part in order if part.startswith(f"{holder}.")}
        if len(inside) == 1 or not inside <= chosen:
            break
        name = holder
    return name
