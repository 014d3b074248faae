"""Options of clusters and workers: types, defaults and help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from repaconv.stages.shared.common_options import Scheduler, TlsCa, TlsCert, TlsKey
from repaconv.stages.shared.option_dataclasses import CLUSTER, TARGET, Option, Options


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Options):
    """The Dask cluster on which a stage measures; without a scheduler, it measures on this machine."""

    scheduler: Scheduler = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    wait_s: Annotated[
        float,
        Option(
            "Seconds to wait for a worker that serves the target.",
            option=("--wait",),
            least=0,
            recorded=False,
            panel=CLUSTER,
        ),
    ] = 30


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(Options):
    """Options of a cluster worker."""

    target: Annotated[str, Option("The target that this machine is, e.g. orin-nano.", panel=TARGET)]
    scheduler: Annotated[str, Option("Address of the Dask scheduler.", metavar="tcp://HOST:PORT", panel=CLUSTER)]
    name: Annotated[
        str | None, Option("Name of this machine in results.", default_text="chosen by Dask", panel=CLUSTER)
    ] = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
