"""The demo: run all stages on the trained networks in the package, or on a checkpoint with random weights."""

from __future__ import annotations

from pathlib import Path

from repaconv.cli import text_and_json_output
from repaconv.core import terminal
from repaconv.core.errors import UsageProblem
from repaconv.core.progress import Progress
from repaconv.stages.report.text import show_report

SEED = 0


def run_trained_networks(out: Path, rounds: int | None, *, quiet: bool) -> int:
    """Run all stages on the trained networks of five methods, and compare them in one report.

    Returns:
        The exit code: 1 if any verdict is failed.
    """
    import repaconv
    from repaconv import models

    with text_and_json_output.progress(quiet=quiet) as progress:
        for method in models.METHODS:
            _run_all_stages(models.checkpoint(method), out / method, rounds, _progress_for(method, progress))
        runs = [out / method for method in models.METHODS]
        done = repaconv.compare_runs(runs, out=out / "index.html", progress=progress)
    text_and_json_output.print_files((), done.output_files, quiet=quiet)
    show_report(done)
    return 1 if done.verdict == "failed" else 0


def _run_all_stages(checkpoint: Path, run: Path, rounds: int | None, progress: Progress) -> None:
    """Fold, export in FP32 and INT8, verify on labeled images, benchmark and report one checkpoint."""
    import repaconv
    from repaconv import models

    repaconv.fold(checkpoint, out=run, force=True, progress=progress)
    repaconv.export(run, progress=progress)
    repaconv.export(run, precision="int8", inputs=models.CALIBRATION, progress=progress)
    repaconv.verify(run, inputs=models.HELD_OUT, progress=progress)
    repaconv.bench(run, rounds=rounds, profile=True, progress=progress)
    repaconv.report(run, paper=False, progress=progress)


def _progress_for(method: str, progress: Progress) -> Progress:
    """Prefix the progress messages with the network's name."""
    return lambda what, done, total: progress(f"{method}: {what}", done, total)


def run_demo(arch: str, out: Path, rounds: int | None, *, quiet: bool) -> int:
    """Write a RIFormer checkpoint with random weights, run all stages on it, and print the results.

    Returns:
        The exit code: 1 if any verdict is failed.
    """
    import repaconv
    from repaconv.testing import write_example

    checkpoint = out / f"riformer_{arch}.pth"
    with text_and_json_output.progress(quiet=quiet) as progress:
        progress("make a checkpoint", 0, 0)
        if not checkpoint.exists():
            write_example("riformer", arch, checkpoint, SEED)
        seen = repaconv.inspect(checkpoint)
        folded = repaconv.fold(checkpoint, out=out / arch, force=True, progress=progress)
        exported = repaconv.export(out / arch, progress=progress)
        verified = repaconv.verify(out / arch, progress=progress)
        measured = repaconv.bench(out / arch, rounds=rounds, profile=True, progress=progress)
        page = repaconv.report(out / arch, progress=progress)
    if seen.training is None or seen.deploy is None or measured.ratio is None:
        raise UsageProblem(
            "the demo's checkpoint was not recognized.",
            hint="This is a defect of repaconv; please report it.",
            code="demo.broken",
        )
    text_and_json_output.print_files(
        (),
        (
            *folded.output_files,
            *exported.output_files,
            *verified.output_files,
            *measured.output_files,
            *page.output_files,
        ),
        quiet=quiet,
    )
    lines = [
        ("method", f"{seen.method}: {seen.reason}", "inspect"),
        ("parameters", f"{seen.training.parameters:,} -> {seen.deploy.parameters:,}", "inspect"),
        ("MACs per image", f"{seen.training.macs:,} -> {seen.deploy.macs:,}", "inspect"),
        *(
            (
                link.name,
                f"{link.metrics.max_rel_error:.1e} of {link.tolerance.rtol or 0:.0e} allowed: {link.verdict}",
                "verify",
            )
            for link in verified.links
            if link.metrics is not None and link.tolerance is not None
        ),
        ("ONNX graph", f"opset {exported.opset}, {exported.nodes} nodes", "export"),
        *((f"{row.name}, p50 / p95", f"{row.p50_ms:.2f} / {row.p95_ms:.2f} ms", "bench") for row in measured.latencies),
        ("speedup over the training form", measured.ratio.cell, "bench"),
        *((("share of the peak", f"{measured.profile.share_of_peak:.0%}", "bench"),) if measured.profile else ()),
        ("measurement", "; ".join((measured.quality.verdict, *measured.quality.reasons)), "bench"),
        ("the whole on one page", page.output_files[0], "report"),
    ]
    terminal.print_table(("what", "verified and measured", "by"), lines)
    return 1 if "failed" in (folded.verdict, exported.verdict, verified.verdict, measured.verdict) else 0
