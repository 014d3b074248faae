"""Results of `export` as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repaconv.core.errors import RepaconvError
from repaconv.core.terminal import colored, plain, stdout
from repaconv.stages.shared.result_tables import (
    count_text,
    links,
    locations,
    preset_text,
    print_images_and_classes,
    size_text,
)

if TYPE_CHECKING:
    from repaconv.results import ExportArtefact


def show_export(done: ExportArtefact) -> None:
    """Print the links of an export, its lossy layers, its preset and its verdict."""
    from repaconv.onnx_export.fp32_layer_selection import matching

    stdout().print(links(done.links))
    locations(done.links)
    if done.precision != "fp32":
        by = f" by {plain(done.quantizer)}" if done.quantizer not in ("", "onnxruntime") else ""
        stdout().print(f"[yellow]lossy[/]: {done.precision}{by}, measured on {plain(done.calibration)}")
        if done.images is None and done.verdict == "failed":  # the note of a link that passes says so
            stdout().print(
                "random inputs calibrated and evaluated it: give images of the kind that the network is for, with "
                "--images DIR or --inputs FILE.npz"
            )
        print_images_and_classes(done.image_preprocessing, done.scores)
        asked = matching(done.fp32_nodes, done.fp32_modules)
        lacking = [name for name in _without_kernel(done) if name not in asked]
        others = [name for name in done.fp32_nodes if name not in (*asked, *lacking)]
        for what, names in (
            ("kept in FP32 by --keep-fp32", asked),
            (f"kept in FP32, for which {done.target} has no kernel in {done.precision}", lacking),
            ("kept in FP32 for the range of their values", others),
            ("not in " + done.precision, [name for name in done.unquantized_layers if name not in done.fp32_nodes]),
        ):
            if names:
                stdout().print(
                    f"{count_text(len(names), 'node')} {what}: "
                    f"{plain(', '.join(names[:8]))}{' ...' if names[8:] else ''}"
                )
    for sentence in done.violations:
        stdout().print(f"[bold red]{plain(done.target)} does not take[/] {plain(sentence)}")
    if done.rewrites:
        stdout().print(
            f"preset: {plain(done.preset)} ({preset_text(done.rewrites)}), {count_text(len(done.changes), 'change')}"
        )
    if done.unmeasured:
        stdout().print(
            f"[yellow]no measurement[/] for CPUs of the level {plain(done.unmeasured)}: this is "
            "the safest preset; repaconv tune finds the fastest"
        )
    simplified = f"simplified by {done.simplifier}" if done.simplified else "not simplified"
    shape = f"batch {done.batch}" + (f", image size {size_text(done.image_size)}" if done.image_size else "")
    pixels = ", takes pixels" if done.preprocessing else ""
    of = "".join(f"{plain(named)}; " for named in _links_by_verdict(done))
    stdout().print(
        f"{colored(done.verdict)}: {of}opset {done.opset}, {done.nodes} nodes, {simplified}, {shape}{pixels}"
    )


def _without_kernel(done: ExportArtefact) -> list[str]:
    """The nodes kept in FP32 whose operator, which their name ends with, the target does not compute otherwise."""
    from repaconv.stages.shared.target_lookup import load_target

    try:
        operators = load_target(done.target).fp32_operators.get(done.precision, ())
    except RepaconvError:  # a target of a file
        return []
    return [name for name in done.fp32_nodes if name.rpartition("/")[2].rpartition("_")[0] in operators]


def _links_by_verdict(done: ExportArtefact) -> list[str]:
    """Names of the links that passed and of those not verified, if some are not; ``simplified`` is shown elsewhere."""
    names = {
        verdict: dict.fromkeys(
            link.name for link in done.links if link.verdict == verdict and link.name != "simplified"
        )
        for verdict in ("passed", "not verified")
    }
    if done.verdict != "passed" or not names["not verified"]:
        return []
    return [", ".join(names["passed"]), f"not verified: {', '.join(names['not verified'])}"]
