"""Results of `table` as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.core.terminal import plain, stdout, table
from repaconv.stages.shared.result_tables import count_text

if TYPE_CHECKING:
    from repaconv.results import PaperTable


def show_paper_table(found: PaperTable) -> None:
    """Print our figures next to the paper's, and mark those that differ by more than the printed precision."""
    notes = list(dict.fromkeys(row.remark for row in found.rows if row.remark))
    rows = table("table", "model", "form", "parameters", "paper", found.rows[0].unit, "paper", "")
    for row in found.rows:
        ours = (row.cost.layer_macs if row.counted == "layers" else row.cost.macs) * (2 if row.unit == "FLOPs" else 1)
        mark = "" if row.agrees else f"[yellow]differs[/] ({notes.index(row.remark) + 1})"
        counts = (f"{row.cost.parameters:,}", row.parameters, f"{ours:,}", row.macs)
        rows.add_row(row.table, plain(row.model), row.form, *counts, mark)
    stdout().print(rows)
    for number, note in enumerate(notes, 1):
        stdout().print(f"({number}) {plain(note)}")
    differing = sum(not row.agrees for row in found.rows)
    stdout().print(
        f"{count_text(len(found.rows), 'model')} of {plain(found.paper)}: {len(found.rows) - differing} agree to "
        f"the printed precision, {differing} differ"
    )
