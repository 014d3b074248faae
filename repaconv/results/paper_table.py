"""What ``table`` leaves: the paper's figures beside ours."""

from __future__ import annotations

from typing import ClassVar, Literal

from repaconv.results.records import SCHEMA_VERSION, Cost, Record, Result


class TableRow(Record):
    """One model of a table in the paper: the figures as printed, and those that repaconv counts.

    Attributes:
        table: The table of the paper, as the method's file of figures names it.
        model: The model, as the method's file of figures names it.
        form: The form whose figures are compared: the training form or the deploy form.
        cost: The parameters and MACs that repaconv counts.
        parameters: The number of parameters as printed, e.g. ``4.4M``; empty if the paper does not print it.
        macs: The number of operations as printed, in ``unit``; empty if the paper does not print it.
        counted: Which operations ``macs`` has: ``all``, or only those of ``layers`` with weights.
        unit: The unit of ``macs``; one MAC is two FLOPs.
        agrees: Whether each printed figure equals the counted one, rounded to the printed digits.
        remark: Why a figure differs; empty if ``agrees`` is true.
    """

    table: str
    model: str
    form: Literal["training", "deploy"]
    cost: Cost
    parameters: str
    macs: str
    counted: Literal["all", "layers"]
    unit: Literal["MACs", "FLOPs"]
    agrees: bool
    remark: str


class PaperTable(Result):
    """The result of ``table``: the figures of a method's paper next to those that repaconv counts.

    Attributes:
        schema_version: The version of the schema of results.
        method: The registered name of the method.
        paper: The paper that the figures are from.
        rows: One row for each model of the paper's tables.
    """

    SHOWN: ClassVar[tuple[str, ...]] = ("method",)

    schema_version: int = SCHEMA_VERSION
    method: str
    paper: str
    rows: tuple[TableRow, ...]
