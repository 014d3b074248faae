"""Benchmark jobs on a Dask cluster: connecting, sending jobs to workers of the right target, serving as a worker.

Each model is sent as a task. If the worker that holds it dies, the scheduler runs the task again; scattered data would
be lost.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from uuid import uuid4

from repaconv.core.errors import EnvironmentProblem, Refused, describe_exception, first_line, require_module
from repaconv.core.progress import Progress, silent
from repaconv.distributed.benchmark_jobs import Job, checked_result, run_job
from repaconv.distributed.options import ClusterOptions, WorkerOptions
from repaconv.results import BenchArtefact
from repaconv.stages.shared.target_lookup import load_target

ATTEMPTS = 3
"""Number of workers that may die while running a job before the job is given up."""
POLL_S = 0.5
ANSWER_TIMEOUT_S = 10
"""Timeout in seconds for the scheduler to answer."""
CONNECT_TIMEOUT_S = 2.0
"""Timeout in seconds of the plain TCP connection that is tried to find the cause after Dask has failed."""


def tls_security(options: ClusterOptions | WorkerOptions) -> Any:
    """Return Dask's TLS settings; None without certificate files.

    A cluster executes what it is sent, so TLS is recommended. All three files are needed.

    Raises:
        EnvironmentProblem: If some of the files are missing.
    """
    files = (options.tls_ca, options.tls_cert, options.tls_key)
    given = [path for path in files if path is not None]
    if not given:
        return None
    if len(given) < 3 or not all(path.is_file() for path in given):
        raise EnvironmentProblem(
            "TLS needs three files: the certificate authority, the certificate and its key.",
            hint="--tls-ca ca.pem --tls-cert cert.pem --tls-key key.pem",
            code="remote.tls",
        )
    from distributed.security import Security

    ca, cert, key = map(str, given)
    return Security(
        tls_ca_file=ca,
        tls_client_cert=cert,
        tls_client_key=key,
        tls_worker_cert=cert,
        tls_worker_key=key,
        require_encryption=True,
    )


class JobOutcome(NamedTuple):
    """The outcome of a job: its result or its problem, the worker's name, and the number of attempts."""

    job: Job
    result: BenchArtefact | None
    problem: str
    worker: str
    attempts: int


def require_dask() -> None:
    """Import Dask.

    Raises:
        EnvironmentProblem: If it is not installed.
    """
    require_module("distributed", "Dask", "pip install 'repaconv[cluster]'")


@contextmanager
def connect(cluster: ClusterOptions) -> Iterator[Any]:
    """Yield a client that is connected to the scheduler.

    Raises:
        EnvironmentProblem: If the scheduler does not answer.
    """
    require_dask()
    from distributed import Client
    from distributed.utils import silence_logging_cmgr

    scheduler, secured = str(cluster.scheduler), tls_security(cluster)
    if scheduler.startswith("tls://") and secured is None:
        raise EnvironmentProblem(
            f"the scheduler {scheduler} requires TLS, and no certificates were given.",
            hint="--tls-ca ca.pem --tls-cert cert.pem --tls-key key.pem",
            code="remote.tls",
        )
    with silence_logging_cmgr("CRITICAL"):  # errors are reported by our own messages
        try:
            client = Client(scheduler, security=secured, timeout=f"{ANSWER_TIMEOUT_S}s", set_as_default=False)
        except (OSError, TimeoutError, ValueError, RuntimeError) as error:
            raise _no_answer(scheduler, error) from error
        try:
            yield client
        finally:
            client.close()


def run_jobs(
    client: Any,
    jobs: Iterable[Job],
    contents: Mapping[str, bytes],
    *,
    wait_s: float = 30,
    progress: Progress = silent,
    landed: Callable[[JobOutcome], None] = lambda _: None,
) -> list[JobOutcome]:
    """Run all jobs on workers of their targets, one at a time on each worker.

    Args:
        client: The client from `connect`.
        jobs: The jobs.
        contents: The bytes of the models by hash.
        wait_s: Seconds to wait for a worker of each target.
        progress: See `Progress`.
        landed: Called with each outcome as it arrives.

    Raises:
        EnvironmentProblem: If there is no worker of a target.
    """
    from distributed import as_completed

    jobs = list(jobs)
    for name in sorted({str(job.target["name"]) for job in jobs}):
        _require_worker(client, name, wait_s)
    models = {
        sha256: client.submit(_hold, content, key=f"model-{sha256}", pure=True) for sha256, content in contents.items()
    }
    asked = uuid4().hex  # equal jobs of other calls have tasks and attempts of their own
    sent = {job.id: job.model_copy(update={"id": f"{job.id}-{asked}"}) for job in jobs}
    futures = {
        client.submit(
            _attempt,
            sent[job.id].model_dump(mode="json"),
            [models[model.sha256] for model in job.models],
            key=f"job-{sent[job.id].id}",
            resources={str(job.target["name"]): 1},
            pure=False,
        ): job
        for job in jobs
    }
    found: list[JobOutcome] = []
    progress("benchmark jobs", 0, len(jobs))
    for future in as_completed(list(futures), loop=client.loop):
        result = _outcome(client, futures[future], future, sent[futures[future].id].id)
        found.append(result)
        landed(result)
        progress("benchmark jobs", len(found), len(jobs))
    options = {job.id: place for place, job in enumerate(jobs)}
    return sorted(found, key=lambda each: options[each.job.id])


def _outcome(client: Any, job: Job, future: Any, sent_id: str) -> JobOutcome:
    # A result that was not fetched yet is lost if its worker dies. Dask runs the job again, and both calls wait for it.
    error = future.exception()
    result = future.result() if error is None else None
    starts = client.get_events(f"repaconv-{sent_id}") or ()
    worker = str(starts[-1][1].get("called", "")) if starts else ""
    if result is not None:
        return outcome_of(job, result, worker, len(starts))
    return JobOutcome(job, None, describe_exception(error), worker, len(starts))


def outcome_of(job: Job, result: Mapping[str, Any], worker: str, attempts: int) -> JobOutcome:
    """Return the outcome of a job from a machine's result; a result of another job is a problem."""
    try:
        return JobOutcome(job, checked_result(job, result), "", worker, attempts)
    except Refused as problem:
        return JobOutcome(job, None, problem.message.rstrip("."), worker, attempts)


def _hold(content: bytes) -> bytes:
    return content


def _attempt(job: dict[str, Any], contents: list[bytes]) -> dict[str, Any]:
    """Task that runs on the worker: log the start of the attempt, so that attempts can be counted, and measure."""
    from distributed import get_worker

    worker = get_worker()
    worker.log_event(f"repaconv-{job['id']}", {"called": str(worker.name)})
    return run_job(job, {model["sha256"]: content for model, content in zip(job["models"], contents, strict=True)})


def _require_worker(client: Any, target: str, wait_s: float) -> None:
    """Wait for a worker of that target: Dask would wait forever, silently, for a resource that no worker has."""
    deadline = time.monotonic() + wait_s
    while True:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        kinds = sorted({kind for worker in workers for kind in (worker.get("resources") or {})})
        if target in kinds:
            return
        if time.monotonic() > deadline:
            raise EnvironmentProblem(
                f"no worker for {target} connected within {wait_s:g} s; there are workers for "
                f"{', '.join(kinds) or 'no target'}.",
                hint=(
                    f"Start one on the device: repaconv worker --target {target} --scheduler {client.scheduler.address}"
                ),
                code="remote.no-worker",
            )
        time.sleep(POLL_S)


def serve_as_worker(options: WorkerOptions, *, started: Callable[[str], None]) -> None:
    """Serve as a worker for one target, one job at a time, until the scheduler or the user stops it.

    If the worker process dies, its Dask nanny starts it again.

    Raises:
        EnvironmentProblem: If the scheduler does not answer.
    """
    target = load_target(options.target).name
    require_dask()
    import dask
    from distributed import Nanny

    secured = tls_security(options)

    async def serve() -> None:
        settings: dict[str, Any] = {"name": options.name, "nthreads": 1, "resources": {target: 1}, "dashboard": False}
        async with Nanny(options.scheduler, security=secured, memory_limit=0, **settings) as nanny:
            started(f"worker for {target} at {nanny.worker_address}")
            await nanny.finished()

    with dask.config.set({"distributed.scheduler.allowed-failures": ATTEMPTS}):
        try:
            asyncio.run(serve())
        except (OSError, TimeoutError, ValueError, RuntimeError) as error:
            raise _no_answer(options.scheduler, error) from error


def _no_answer(scheduler: str, error: BaseException) -> EnvironmentProblem:
    while (inner := error.__cause__ or error.__context__) is not None:  # Dask wraps the original error
        error = inner
    if not str(error):  # Dask's last attempt timed out and hides the cause
        error = _connection_error(scheduler) or error
    return EnvironmentProblem(
        f"no answer from the scheduler {scheduler}: {first_line(error)}.",
        hint="Start one with `dask scheduler`. If it uses TLS, give --tls-ca, --tls-cert and --tls-key.",
        code="remote.unreachable",
    )


def _connection_error(scheduler: str) -> OSError | None:
    """Try one plain TCP connection and return its error; None if the address is not TCP."""
    from distributed.comm import get_address_host_port

    try:
        host, port = get_address_host_port(scheduler)
    except (TypeError, ValueError):
        return None
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error
    return ConnectionError("something listens there, but no Dask scheduler spoke in time")


def require_result(landed: JobOutcome) -> BenchArtefact:
    """Return the result of a job.

    Raises:
        Refused: If the job failed, with the worker's message.
    """
    if landed.result is None:
        raise Refused(
            f"the job for {landed.job.target['name']} failed on {landed.worker or 'its worker'}: {landed.problem}.",
            hint="See the worker's log. A job is given up after it ended several workers.",
            code="remote.failed",
        )
    return landed.result
