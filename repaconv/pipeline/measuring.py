"""bench: the ONNX model on this machine, and the training form or another model beside it, in one run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv import runs
from repaconv.artefacts import BenchArtefact, ImageSize, Profile
from repaconv.errors import EnvironmentProblem, UsageProblem
from repaconv.files import payload_of, sha256_of, write_text
from repaconv.proof.policy import bounded
from repaconv.replacing import put, require_ours
from repaconv.steps.asked import as_typed
from repaconv.steps.baselines import Judged, by_baseline, name_in, remember_measurement
from repaconv.steps.common import (
    Progress,
    as_image_size,
    at_least_one,
    load_target,
    made_by,
    silent,
    with_files,
)
from repaconv.steps.comparing import COMPARED, Opened, agreement, opened
from repaconv.steps.subjects import Subject, any_preprocessing, image_shape, memory_an_image, subjects_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from repaconv.proof.data import Batch
    from repaconv.targets import Target


MODELS = (".onnx", ".ort", ".blob", ".engine", ".plan")
LARGEST_REGRESSION = 10.0
"""Eleven times as long is no regression that anybody allows."""


def bench(
    model: str | Path | None = None,
    *,
    target: str | Target = "x86-64",
    precision: str = "fp32",
    against: str | Path | None = None,
    threads: int | None = None,
    batch: int | None = None,
    image_size: int | ImageSize | None = None,
    rounds: int | None = None,
    protocol: str | None = None,
    profile: bool = False,
    baseline: str | Path | None = None,
    max_regression: float = 0.05,
    update_baseline: bool = False,
    accept_inconclusive: bool = False,
    seed: int = 0,
    unverified: bool = False,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> BenchArtefact:
    """Measure latency, interleaved with what it is compared to, and the interval of their ratio.

    Args:
        model: A run's folder, an .onnx file or an engine that `build` made; the newest run when None.
        target: Whose protocol is used, and whose runtime for .onnx files.
        precision: Which of a run's ONNX models; where the runtime itself lowers precision, what it is to compute in.
        against: Another .onnx file or engine. Without it a run is compared to its own training form, exported alike.
        threads: Of one inference; the target's when None.
        batch: Images a call; the target's when None.
        image_size: Of the images, a square by one number; the model's when None, or the usual that our graph names.
        rounds: Measured rounds; the target's when None.
        protocol: A paper's: ``repavit``, ``nondeep``, ``nondeep-throughput``, ``dwconv`` or ``riformer``. What is given
            besides goes before it.
        profile: Also say where the time goes, node by node: ONNX Runtime's profile of the first model.
        baseline: A file of baselines; the artefact then says how the model compares with that of this machine.
        max_regression: 0.05 lets it take 5% longer; 10 at most.
        update_baseline: Write the baseline instead of judging by it.
        accept_inconclusive: Write it even of a measurement that is inconclusive.
        seed: Of the images, the order and the bootstrap.
        unverified: Go on behind a failed verdict, and record it.
        out: Where the result goes; ``bench/<target>.json`` of the run, nowhere for a bare .onnx.
        progress: See `Progress`.

    Raises:
        UsageProblem: If there is nothing to measure or the sizes do not fit the model.
    """
    from repaconv.measure.fingerprint import fingerprint
    from repaconv.measure.profile import bars_svg
    from repaconv.measure.protocol import first_in_line, measure, pinned
    from repaconv.measure.protocols import paper
    from repaconv.measure.quality import quality
    from repaconv.measure.statistics import latency, ratio
    from repaconv.proof.data import random_pixels

    words = as_typed(
        bench,
        target=target if isinstance(target, str) else target.name,
        precision=precision,
        against=against,
        threads=threads,
        batch=batch,
        image_size=image_size,
        rounds=rounds,
        protocol=protocol,
        profile=profile,
        seed=seed,
        unverified=unverified,
    )
    bounded("max_regression", max_regression, LARGEST_REGRESSION)
    device = load_target(target)
    named = paper(protocol)
    threads = at_least_one("threads", threads, named.threads or device.bench.threads)
    rounds = at_least_one("rounds", rounds, named.rounds or device.bench.rounds)
    warmup_rounds = device.bench.warmup_rounds if named.warmup_rounds is None else named.warmup_rounds
    bare = model is not None and Path(model).suffix in MODELS
    run = None if bare else runs.find_run(Path(model) if model else None)
    if bare and precision != "fp32":
        raise UsageProblem(
            f"{model} is one file, which has its precision already.",
            hint="--precision chooses among the ONNX models of a run.",
            code="usage.idle",
        )
    lowering = precision if precision == "bf16" and device.typed_by == "runtime" else None
    typed = "fp32" if lowering else precision
    asked = as_image_size(image_size)
    known = subjects_of(
        run, model, against, unverified, progress, target=target, precision=typed, batch=batch, image_size=asked
    )
    subjects, overridden, logits, size, note, wanted, export = known
    size = asked or size
    variant = export.variant.model_copy(update={"precision": precision}).full if export else ""
    target_path = Path(out) if out else run.bench_json(variant) if run else None
    if target_path:
        require_ours(target_path, "bench", *([target_path.with_suffix(".profile.svg")] if profile else []))

    def load(subject: Subject, **settings: Any) -> Opened:
        lower = lowering if subject is subjects[0] else None  # of one file beside itself, one alone is lowered
        return opened(subject.path, device, lower, threads=threads, **settings)

    if batch is None:
        batch = named.images(device.bench.batch, lambda: memory_an_image(subjects, load, size))
    batch = at_least_one("batch", batch, 1)

    with pinned(threads) as cores:
        dims = {"batch": batch, "height": size[0], "width": size[1]} if size else {"batch": batch}
        models = {subject.name: load(subject, dims=dims) for subject in subjects}
        sessions = {name: each.session for name, each in models.items()}
        first = sessions[subjects[0].name]
        shape = image_shape(first.input_shape, batch, size, subjects[0].path)
        calls = max(1, COMPARED // batch)
        given = random_pixels(shape, wanted or any_preprocessing(shape), count=calls * batch, seed=seed)
        fed = [_feeds(piece, sessions) for piece in given.batches(batch)]
        outputs = [{name: _first_run(session, each[name]) for name, session in sessions.items()} for each in fed]
        feeds = fed[0]
        with first_in_line(named.first_in_line) as why_not:
            measured = measure(
                {name: partial(session.run, feeds[name]) for name, session in sessions.items()},
                rounds=rounds,
                warmup_rounds=warmup_rounds,
                seed=seed,
                cores=cores,
                tick=lambda done, total: progress("bench", done, total),
            )
        machine = fingerprint(tuple(cores))
        samples = measured.samples_ms
        where = _profile(subjects[0], models[subjects[0].name], feeds, samples) if profile else None

    names = [subject.name for subject in subjects]
    agreed, compared = None, None
    if len(subjects) == 2:
        compared = ratio(names[0], samples[names[0]], names[1], samples[names[1]], seed)
        comparable = wanted is not None or len({session.takes_pixels for session in sessions.values()}) == 1
        agreed = agreement(run, models, outputs, logits=logits) if comparable else None
    artefact = BenchArtefact(
        made_by=made_by(),
        verdict="failed" if agreed and agreed.verdict == "failed" and not against else "passed",
        unverified=overridden,
        asked=words,
        variant=variant,
        target=device.name,
        runtime=models[names[0]].engine,
        precision=models[names[0]].precision,
        batch=batch,
        image_size=shape[1:],
        threads=threads,
        rounds=rounds,
        warmup_rounds=measured.warmup_rounds,
        seed=seed,
        session=first.options,
        machine=machine,
        protocol=named.told(batch),
        latencies=tuple(
            latency(
                name,
                path.name,
                sha256_of(path),
                samples[name],
                engine=models[name].engine,
                precision=models[name].precision,
            )
            for name, path in subjects
        ),
        ratio=compared,
        quality=quality(samples, measured.watched, compared=compared, stable=measured.stable),
        profile=where,
        agreement=agreed,
        note="; ".join(part for part in (note, why_not and f"chrt -f 99: {why_not}") if part),
    )
    wrote = []
    if baseline:
        judged = by_baseline(
            Path(baseline),
            name_in(Path(baseline), run.folder if run else subjects[0].path),
            artefact,
            max_regression,
            update=update_baseline,
            accept_inconclusive=accept_inconclusive,
        )
        artefact = artefact.model_copy(update=_judged_by(judged, artefact))
        wrote += [Path(baseline)] if judged.written else []
    if run:
        remember_measurement(run.history(variant), artefact)
    if target_path and where is not None:
        wrote.append(target_path.with_suffix(".profile.svg"))
        write_text(wrote[-1], bars_svg(where))
        artefact = artefact.model_copy(update={"beside": (payload_of(wrote[-1], target_path.parent),)})
    if target_path:
        put(target_path, artefact)
        wrote.append(target_path)
    return with_files(artefact, [subject.path for subject in subjects], wrote)


def _feeds(piece: Batch, sessions: Mapping[str, Any]) -> dict[str, Any]:
    """The same images for each, as it takes them."""
    return {name: piece.pixels if session.takes_pixels else piece.images for name, session in sessions.items()}


def _judged_by(judged: Judged, artefact: BenchArtefact) -> dict[str, Any]:
    """What a baseline changes in the artefact: its regression, its verdict, its quality, what is noted."""
    told = judged.told if judged.regression is None else ""
    changed: dict[str, Any] = {
        "regression": judged.regression,
        "note": "; ".join(part for part in (artefact.note, told, judged.hint if told else "") if part),
    }
    if judged.verdict == "failed":
        changed["verdict"] = "failed"
    if judged.verdict == "inconclusive" and judged.regression and artefact.quality.verdict != "inconclusive":
        found = judged.regression
        reason = f"the change from the baseline is known to {found.low:.3f}..{found.high:.3f} only"
        reasons = (*artefact.quality.reasons, reason if found.same_machine else judged.hint)
        changed["quality"] = artefact.quality.model_copy(update={"verdict": "inconclusive", "reasons": reasons})
    return changed


PROFILED = 20


def _profile(
    subject: Subject, opened: Opened, feeds: Mapping[str, Any], samples: Mapping[str, NDArray[np.float64]]
) -> Profile:
    """The first model's, beside the latency that was measured of it.

    Raises:
        EnvironmentProblem: If its runtime has no profiler that we read.
    """
    import numpy as np

    from repaconv.measure.profile import events_of, profile_of

    if not opened.profiles:
        raise EnvironmentProblem(
            f"there is no profile of {subject.path.name} by {opened.engine.partition(' ')[0]}.",
            hint="Profile the ONNX model of a target that runs ONNX Runtime.",
            code="bench.profile",
        )
    session = opened.session.session
    found = session.profile({session.inputs[0].name: feeds[subject.name]}, runs=PROFILED, warmup_runs=PROFILED // 4)
    return profile_of(
        events_of(found.kernels, found.weights),
        PROFILED,
        end_to_end_ms=float(np.median(samples[subject.name])),
        peak_gflops=found.peak_gflops,
        order={node: place for place, node in enumerate(found.weights)},
    )


def _first_run(session: Any, images: NDArray[Any]) -> NDArray[np.floating]:
    try:
        found: NDArray[np.floating] = session.run(images)
    except Exception as error:
        raise UsageProblem(
            f"the model does not run on images {list(images.shape)}: {str(error).splitlines()[0]}.",
            hint="Both models must take the same images.",
            code="bench.shape",
        ) from error
    return found
