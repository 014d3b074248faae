"""What ``table`` leaves: the paper's figures beside ours."""

from __future__ import annotations

from typing import ClassVar, Literal

from repaconv.artefacts.records import SCHEMA_VERSION, Cost, Record
from repaconv.artefacts.results import Result


class TableRow(Record):
    """One model of a paper's table: the paper's figures as printed, and ours.

    ``macs`` is in ``unit``: some papers print two FLOPs a MAC. ``agrees`` is false where a figure differs by more
    than the printed precision; ``remark`` says why.
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
    """The paper's models in our forms; the result of ``table``."""

    SHOWN: ClassVar[tuple[str, ...]] = ("method",)

    schema_version: int = SCHEMA_VERSION
    method: str
    paper: str
    rows: tuple[TableRow, ...]
