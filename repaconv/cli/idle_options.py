"""Rules that refuse options that would have no effect, so that users notice the mistake.

An option whose effect is there anyway, such as ``--quiet`` with ``--format json``, is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from repaconv.core.errors import UsageProblem

Values = Mapping[str, Any]
"""All parameters of a command by their Python names."""


class IdleOptions(NamedTuple):
    """Options of some commands that have no effect in a case, and the reason."""

    commands: tuple[str, ...]
    options: tuple[str, ...]
    where: Callable[[Values], Any]
    why: str


def _no_checkpoint(given: Values) -> bool:
    from repaconv.stages.inspect.stage import NOT_CHECKPOINTS

    return Path(given["checkpoint"]).suffix in NOT_CHECKPOINTS


CLUSTER = ("tls_ca", "tls_cert", "tls_key", "wait_s")
BASELINE = ("baseline", "max_regression", "update_baseline", "accept_inconclusive")
PROTOCOL = ("against", "threads", "image_size", "rounds", "protocol", "profile", "seed", "out", "scheduler", *CLUSTER)

IDLE = (
    IdleOptions(("report",), ("paper",), lambda given: len(given["run"] or ()) > 1, "several runs show none"),
    IdleOptions(("inspect",), ("weights", "settings"), _no_checkpoint, "the file is no checkpoint"),
    IdleOptions(
        ("bench",),
        ("against", "rounds", "protocol", "profile", "seed", "host", "scheduler", *CLUSTER, *BASELINE),
        lambda given: given["estimate"],
        "--estimate measures nothing",
    ),
    IdleOptions(
        ("bench",),
        (*PROTOCOL, *BASELINE),
        lambda given: given["host"],
        "the board measures what is in the bundle, by its own trtexec",
    ),
    IdleOptions(
        ("bench",),
        ("protocol", "profile", "estimate", "host", "scheduler", *CLUSTER, *BASELINE),
        lambda given: given["objective"] == "throughput",
        "throughput is measured here, and is no latency to be held against one",
    ),
    IdleOptions(
        ("bench",), ("streams",), lambda given: given["objective"] != "throughput", "it is of --objective throughput"
    ),
    IdleOptions(
        ("bench",), ("out", *BASELINE), lambda given: given["scheduler"], "a worker's figures go to the run alone"
    ),
    IdleOptions(
        ("bench", "tune", "sweep"), CLUSTER, lambda given: not given["scheduler"], "it is for a cluster (--scheduler)"
    ),
    IdleOptions(
        ("bench",),
        ("precision",),
        lambda given: given["model"] and Path(given["model"]).is_file(),
        "a file has its precision; it chooses among the models of a run",
    ),
    IdleOptions(
        ("bench",),
        ("preset",),
        lambda given: given["estimate"] or given["host"] or given["scheduler"],
        "it brings settings of runtimes that run here",
    ),
    IdleOptions(
        ("tune",),
        ("settings",),
        lambda given: given["source"] is None or Path(given["source"]).is_dir(),
        "a run is folded already",
    ),
)


def refuse_idle(command: str, given: Values, typed: Mapping[str, str]) -> None:
    """Refuse options on the command line that have no effect.

    Args:
        command: Name of the command.
        given: See `ValueProjection`.
        typed: The options given on the command line as they were spelled, by their Python names.

    Raises:
        UsageProblem: If one of them has no effect.
    """
    for rule in IDLE:
        idle = [typed[name] for name in rule.options if name in typed] if command in rule.commands else []
        if idle and rule.where(given):
            raise UsageProblem(
                f"{', '.join(idle)} has no effect here: {rule.why}.",
                hint=f"Leave it out, and see `repaconv {command} --help`.",
                code="usage.idle",
            )
