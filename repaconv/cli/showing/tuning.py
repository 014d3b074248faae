"""The forms that were measured, and the winner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.cli.render import out, plain, short, table
from repaconv.cli.showing.parts import form

if TYPE_CHECKING:
    from repaconv.artefacts import TuneArtefact


def show(done: TuneArtefact) -> None:
    """The forms that were measured, and the winner."""
    rows = table("form", "times as fast as the default", "rounds", "")
    for row in done.candidates:
        if row.ratio is not None or row.rewrites == done.rewrites:
            found = f"{row.ratio.median:.3f} ({row.ratio.low:.3f} to {row.ratio.high:.3f})" if row.ratio else "1"
            rows.add_row(form(row.rewrites), found, str(row.rounds), row.told)
    out().print(rows)
    for low in done.lowered:
        gain = f", {low.ratio.median:.3f} times as fast as float32" if low.ratio else ""
        other = "" if low.disagreement is None else f"{low.disagreement:.2%} of {low.images} images differ"
        words = f" ({plain(low.link.note)})" if low.link else ""
        out().print(f"[yellow]lossy[/]: {low.precision}: {other}{gain}: {low.told}{words}")
    seconds = f"{done.note}, {done.seconds:.0f} s then" if done.note else f"{done.seconds:.0f} s"
    seconds += "" if done.complete else f"; not all was measured in {done.budget_s:.0f} s, a larger --budget goes on"
    out().print(f"the fastest form on {plain(done.target)}: [bold]{form(done.rewrites)}[/] ({seconds})")
    if done.precision != "fp32":
        out().print(f"and in {done.precision}: repaconv export --onnx --precision {done.precision}")
    if done.wrote:
        out().print(f"take it: repaconv export --target {plain(done.target)} --form {plain(short(done.wrote[0]))}")
