"""An exported graph and its links."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.cli.render import coloured, out, plain
from repaconv.cli.showing.parts import form, links, locations, size

if TYPE_CHECKING:
    from repaconv.artefacts import ExportArtefact


def show(done: ExportArtefact) -> None:
    """The graph and its links."""
    out().print(links(done.links))
    locations(done.links)
    if done.precision != "fp32":
        by = f" by {plain(done.quantizer)}" if done.quantizer not in ("", "onnxruntime") else ""
        out().print(f"[yellow]lossy[/]: {done.precision}{by}, measured on {plain(done.calibration)}")
        for what, told in (("images", done.image_preprocessing), ("classes", done.scores)):
            if told:
                out().print(f"[dim]{what}: {plain(told)}[/]")
        for what, names in (
            ("in float32 for their range", done.fp32_nodes),
            ("not in " + done.precision, done.unquantized_layers),
        ):
            if names:
                out().print(f"{len(names)} nodes {what}: {plain(', '.join(names[:8]))}{' ...' if names[8:] else ''}")
    for sentence in done.violations:
        out().print(f"[bold red]{plain(done.target)} does not take[/] {plain(sentence)}")
    if done.rewrites:
        out().print(f"written as {plain(done.preset)} form: {form(done.rewrites)}, {len(done.changes)} changes")
    if done.unmeasured:
        out().print(
            f"[yellow]no measurement[/] for CPUs of the level {plain(done.unmeasured)}: this is "
            "the safest preset; repaconv tune finds the fastest"
        )
    simplified = f"simplified by {done.simplifier}" if done.simplified else "not simplified"
    shape = f"batch {done.batch}" + (f", image size {size(done.image_size)}" if done.image_size else "")
    pixels = ", takes pixels" if done.preprocessing else ""
    out().print(f"{coloured(done.verdict)}: opset {done.opset}, {done.nodes} nodes, {simplified}, {shape}{pixels}")
