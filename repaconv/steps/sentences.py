"""What the gate says of a link and of a measurement, in one sentence each."""

from __future__ import annotations

from repaconv.artefacts import BenchArtefact, Link


def measured(done: BenchArtefact) -> str:
    """A measurement in one sentence."""
    told = f"{done.latencies[0].p50_ms:.3f} ms at the median"
    if done.ratio:
        told += f"; {done.compared}"
    if done.quality.verdict != "trusted":
        told += f"; measurement {done.quality.verdict}: {'; '.join(done.quality.reasons)}"
    return told


def told_of(link: Link) -> str:
    """A link in one sentence."""
    on = f" on {link.inputs}" if link.inputs else ""
    words = [f"{link.candidate} against {link.reference}{on}"]
    if link.metrics and link.tolerance:
        words.append(f"max rel {link.metrics.max_rel_error:.1e} on {link.metrics.images} images")
        exact = link.tolerance.kind == "exact"
        words.append(f"{link.tolerance.description} is allowed" if exact else f"lossy: {link.lossy_told}")
        if exact and link.metrics.top1_agreement is not None:
            words.append(f"top-1 agreement {link.metrics.top1_agreement:.1%}")
    if link.accuracy:
        words.append(f"accuracy {link.accuracy.reference:.2%} -> {link.accuracy.candidate:.2%}")
    if link.note:
        words.append(link.note)
    return "; ".join(words)
