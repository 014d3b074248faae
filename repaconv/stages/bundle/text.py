"""Results of `bundle` and `collect` as text."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from repaconv.core.terminal import colored, plain, stdout, table
from repaconv.stages.shared.result_tables import links

if TYPE_CHECKING:
    from repaconv.results import BundleArtefact, CollectArtefact


def show_bundle_and_collect(done: BundleArtefact | CollectArtefact) -> None:
    """Print a bundle and what to do with it, or the result of a board."""
    from repaconv.results import BundleArtefact

    _bundle(done) if isinstance(done, BundleArtefact) else _result(done)


def board_commands(done: BundleArtefact) -> str:
    """Return the commands for a bundle, on the board and here."""
    tarball, program = shlex.quote(done.payload.path), shlex.quote(f"{done.inside}/run.py")
    return f"on the board: tar xzf {tarball} && python3 {program}; then here: repaconv collect result.tar.gz"


def _bundle(done: BundleArtefact) -> None:
    """Print a bundle, and the commands to run it."""
    stdout().print(
        f"{plain(done.payload.path)}: {done.payload.bytes:,} bytes for {done.target}, "
        f"TensorRT {done.runtime_version}, {done.precision}, with {plain(done.inputs)}"
    )
    stdout().print(plain(board_commands(done)))


def _result(done: CollectArtefact) -> None:
    """Print a board's result: its outputs, latency, precision and slowest layers."""
    stdout().print(links(done.links))
    times = done.latency
    stdout().print(
        f"{plain(done.target)}, {plain(done.runtime)}, batch {done.batch}: GPU p50 {times.p50_ms:.3f} ms, "
        f"p95 {times.p95_ms:.3f}, p99 {times.p99_ms:.3f}, {len(times.samples_ms)} runs"
    )
    stdout().print(f"precision {colored(done.precision_proof)}: {plain(done.note)}")
    if done.fused_attentions:
        stdout().print(f"{done.fused_attentions} kernels compute a whole attention")
    slowest = sorted(done.profile, key=lambda row: -row.mean_ms)[:5]
    if slowest and slowest[0].mean_ms:
        rows = table("slowest layers", "mean ms")
        for row in slowest:
            rows.add_row(plain(row.name), f"{row.mean_ms:.4f}")
        stdout().print(rows)
    stdout().print(f"{colored(done.verdict)}, measured on the board by its own trtexec")
