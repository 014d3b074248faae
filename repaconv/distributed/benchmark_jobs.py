"""Benchmark jobs: their description, running one on a worker, and checking that a result belongs to its job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from repaconv.core.errors import Refused, first_line
from repaconv.core.files import cache_folder, is_unchanged, sha256_of_bytes, write_bytes
from repaconv.engines.targets import Target
from repaconv.results import BenchArtefact, Record
from repaconv.stages.bench.options import BenchOptions
from repaconv.stages.bench.stage import bench_by
from repaconv.stages.shared.target_lookup import load_target

SENT_OPTIONS = ("threads", "batch", "image_size", "rounds", "protocol", "profile", "seed")
"""The benchmark options that are sent with a job."""


class Model(Record):
    """A model by its name and the hash of its file."""

    name: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Job(Record):
    """A measurement that any machine of a target can run.

    Attributes:
        id: Hash of the other attributes: equal measurements have equal ids.
        target: The complete target definition, so that workers need no file of a user-defined target.
        models: The model to measure, and optionally the one to compare it with.
        options: How it is measured; only the options in `SENT_OPTIONS` are set.
    """

    id: str
    target: dict[str, Any]
    models: tuple[Model, ...] = Field(min_length=1, max_length=2)
    options: BenchOptions

    @classmethod
    def of(cls, target: dict[str, Any], models: tuple[Model, ...], options: BenchOptions) -> Job:
        """Create a job, with its id."""
        how = BenchOptions(target=str(target["name"]), **{name: getattr(options, name) for name in SENT_OPTIONS})
        plain = cls(id="", target=target, models=models, options=how)
        digest = sha256_of_bytes(plain.model_dump_json().encode())
        return plain.model_copy(update={"id": digest[:16]})


def run_job(job: Mapping[str, Any], contents: Mapping[str, bytes]) -> dict[str, Any]:
    """Run a job on this machine.

    Args:
        job: A `Job` as plain JSON data.
        contents: The bytes of the models by hash.

    Returns:
        The `BenchArtefact` as plain JSON data.

    Raises:
        Refused: If this version cannot read the job, or a model does not have its hash.
    """
    wanted, device = _parsed(job)
    paths = [_cached_model(model, contents) for model in wanted.models]
    how = {
        name: getattr(wanted.options, name) for name in SENT_OPTIONS
    }  # the sender must not choose where files are written
    done = bench_by(
        BenchOptions(target=device.name, against=paths[1] if len(paths) > 1 else None, **how), paths[0], device=device
    )
    return with_model_names(done, wanted.models).model_dump(mode="json")


def _parsed(job: Mapping[str, Any]) -> tuple[Job, Target]:
    try:
        wanted = Job.model_validate(job)
        return wanted, Target.model_validate(wanted.target)
    except ValidationError as error:
        raise Refused(
            f"the job is not understood by this version: {first_line(error)}.",
            hint="Install the same version of repaconv on both machines.",
            code="remote.job",
        ) from error


def checked_result(job: Job, result: Mapping[str, Any]) -> BenchArtefact:
    """Return the result that a machine sent for a job, after checking that it belongs to the job.

    Raises:
        Refused: If it is of another measurement, or of another version of repaconv.
    """
    from repaconv.benchmark.paper_protocols import protocol_named

    try:
        found = BenchArtefact.model_validate(result)
    except ValidationError as error:
        raise Refused(
            f"the answer is not a measurement that this version understands: {str(error).splitlines()[0]}.",
            hint="Install the same version of repaconv on both machines.",
            code="remote.answer",
        ) from error
    options, device = job.options, Target.model_validate(job.target)
    protocol = protocol_named(options.protocol)
    usual = max(found.rounds, device.bench.rounds)  # if no number is requested, short inferences get `more_rounds`
    expected: dict[str, Any] = {
        "target": device.name,
        "models": [model.sha256 for model in job.models],
        "threads": options.threads or protocol.threads or device.bench.threads,
        "batch": options.batch or (None if protocol.scaled_to_memory else protocol.batch or device.bench.batch),
        "image size": options.image_size,
        "rounds": options.rounds or protocol.rounds or usual,
        "seed": options.seed,
    }
    measured = {
        "target": found.target,
        "models": [row.sha256 for row in found.latencies],
        "threads": found.threads,
        "batch": found.batch,
        "image size": found.image_size,
        "rounds": found.rounds,
        "seed": found.seed,
    }
    for what, value in expected.items():
        if value is not None and value != measured[what]:
            raise Refused(
                f"the answer belongs to another request: its {what} is {measured[what]}, but {value} was requested.",
                hint="The answer was discarded. Install the same version of repaconv on all machines.",
                code="remote.answer",
            )
    return found


def with_model_names(done: BenchArtefact, models: tuple[Model, ...]) -> BenchArtefact:
    """Return the result with the names of the models in place of the names of the cached files."""
    called = {row.name: model.name for row, model in zip(done.latencies, models, strict=True)}
    latencies = tuple(row.model_copy(update={"name": called[row.name]}) for row in done.latencies)
    found = done.ratio
    if found is not None:
        found = found.model_copy(update={"subject": called[found.subject], "other": called[found.other]})
    agreement = done.agreement
    if agreement is not None:
        ends = {"reference": called[agreement.reference], "candidate": called[agreement.candidate]}
        agreement = agreement.model_copy(update=ends)
    return done.model_copy(update={"latencies": latencies, "ratio": found, "agreement": agreement})


def _cached_model(model: Model, contents: Mapping[str, bytes]) -> Path:
    path = cache_folder("models") / f"{model.sha256}.onnx"
    if not is_unchanged(path, model.sha256):
        content = contents.get(model.sha256, b"")
        if sha256_of_bytes(content) != model.sha256:
            raise Refused(
                f"the model {model.name} was changed in transit: its hash differs from that of the file that was sent.",
                hint="Send it again. If it happens again, check the connection.",
                code="remote.hash",
            )
        write_bytes(path, content)
    return path


def target_definition(target: str) -> dict[str, Any]:
    """Return the complete definition of a target as a job contains it."""
    return load_target(target).model_dump(mode="json")
