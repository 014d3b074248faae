"""`table`: count parameters and MACs of the models in a paper's tables, and compare them with the printed figures."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from repaconv.core import plugins
from repaconv.core.errors import Refused
from repaconv.core.progress import Progress, silent
from repaconv.results import Cost, PaperTable, TableRow

if TYPE_CHECKING:
    from repaconv.method_api.contract import Method

_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}


def table(method: str, *, progress: Progress = silent) -> PaperTable:
    """Count parameters and MACs of every model in the paper's tables, built on the meta device.

    Args:
        method: Registered name of the method.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        UsageProblem: If there is no such method.
        Refused: If the method has no figures of its paper.
    """
    known: Method = plugins.load(plugins.METHODS, method)
    figures = _figures(known)
    rows = []
    for number, entry in enumerate(figures["row"]):
        progress("models of the paper", number, len(figures["row"]))
        rows.append(_row(known, {"counted": "all", "unit": "MACs", "form": "deploy", **figures, **entry}))
    return PaperTable(method=method, paper=known.paper, rows=tuple(rows))


def _figures(method: Method) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    if not method.figures.is_file():
        raise Refused(
            f"the method {method.name} has no table of its paper's figures.",
            hint="The figures belong in a .toml next to the method's file.",
            code="table.none",
        )
    with method.figures.open("rb") as file:
        figures: dict[str, Any] = tomllib.load(file)
        return figures


def _row(method: Method, entry: dict[str, Any]) -> TableRow:
    from repaconv.backbones.parameter_and_mac_counts import cost_of

    published = method.published(entry["arch"])
    build = published.training if entry["form"] == "training" else published.deploy
    cost = cost_of(build, published.input_shape)
    parameters, macs = entry.get("parameters", ""), entry.get("macs", "")
    agrees = _agrees(parameters, cost.parameters) and _agrees(macs, counted(cost, entry["counted"], entry["unit"]))
    return TableRow(
        table=entry["table"],
        model=entry["model"],
        form=entry["form"],
        cost=cost,
        parameters=parameters,
        macs=macs,
        counted=entry["counted"],
        unit=entry["unit"],
        agrees=agrees,
        remark="" if agrees else entry.get("remark", "not known why"),
    )


def counted(cost: Cost, what: str, unit: str) -> int:
    """Count as the paper does: ``all`` products or those of ``layers`` with weights only, in MACs or FLOPs."""
    return (cost.layer_macs if what == "layers" else cost.macs) * (2 if unit == "FLOPs" else 1)


def _agrees(printed: str, ours: int) -> bool:
    """Whether our count rounds to the printed figure, e.g. ``4.4M``; a figure that is not printed cannot disagree."""
    if not printed:
        return True
    digits, unit = printed[:-1], _UNITS[printed[-1]]
    decimals = len(digits.partition(".")[2])
    half = 0.5 * 10.0**-decimals
    return abs(ours / unit - float(digits)) <= half * (1 + 1e-9)
