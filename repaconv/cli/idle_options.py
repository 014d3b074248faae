"""Options that would do nothing where they stand. They are refused: who types one means something by it.

An option whose wish holds anyway, as ``--quiet`` with ``--format json``, is no such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from repaconv.core.errors import UsageProblem

Values = Mapping[str, Any]
"""All of a command's parameters, by the names that they have in Python."""


class Idle(NamedTuple):
    """Options of some commands, where they do nothing, and why."""

    commands: tuple[str, ...]
    options: tuple[str, ...]
    where: Callable[[Values], Any]
    why: str


def _no_checkpoint(given: Values) -> bool:
    from repaconv.stages.inspect.stage import NOT_CHECKPOINTS

    return Path(given["checkpoint"]).suffix in NOT_CHECKPOINTS


def _tuned(form: Any) -> bool:
    """Whether it is a file of `tune`, which may bring a precision."""
    return form is not None and Path(form).is_file()


CLUSTER = ("tls_ca", "tls_cert", "tls_key", "wait_s")
BASELINE = ("baseline", "max_regression", "update_baseline", "accept_inconclusive")
PROTOCOL = ("against", "threads", "image_size", "rounds", "protocol", "profile", "seed", "out", "scheduler", *CLUSTER)

IDLE = (
    Idle(("report",), ("paper",), lambda given: len(given["run"] or ()) > 1, "several runs show none"),
    Idle(("inspect",), ("weights", "settings"), _no_checkpoint, "the file is no checkpoint"),
    Idle(("verify", "bundle"), ("count",), lambda given: given["inputs"], "an .npz is taken whole"),
    Idle(
        ("verify", "bundle"),
        ("seed",),
        lambda given: given["inputs"] or given["images"],
        "it is of random images, and others are given",
    ),
    Idle(("verify",), ("classes",), lambda given: not given["images"], "it names the classes of --images"),
    Idle(("export",), ("simplifier",), lambda given: not given["simplify"], "--no-simplify runs none"),
    Idle(
        ("export",),
        ("inputs", "images"),
        lambda given: given["precision"] == "fp32" and not _tuned(given["preset"]),
        "float32 is not measured on images; give a lower --precision",
    ),
    Idle(
        ("export",),
        ("quantizer",),
        lambda given: given["precision"] != "int8" and not _tuned(given["preset"]),
        "nothing is quantised; give --precision int8",
    ),
    Idle(
        ("export",),
        ("keep_fp32",),
        lambda given: given["precision"] == "fp32" and not _tuned(given["form"]),
        "float32 keeps every layer; give a lower --precision",
    ),
    Idle(
        ("bench",),
        ("against", "rounds", "protocol", "profile", "seed", "host", "scheduler", *CLUSTER, *BASELINE),
        lambda given: given["estimate"],
        "--estimate measures nothing",
    ),
    Idle(
        ("bench",),
        (*PROTOCOL, *BASELINE),
        lambda given: given["host"],
        "the board measures what is in the bundle, by its own trtexec",
    ),
    Idle(
        ("bench",),
        ("protocol", "profile", "estimate", "host", "scheduler", *CLUSTER, *BASELINE),
        lambda given: given["objective"] == "throughput",
        "throughput is measured here, and is no latency to be held against one",
    ),
    Idle(("bench",), ("streams",), lambda given: given["objective"] != "throughput", "it is of --objective throughput"),
    Idle(("bench",), ("out", *BASELINE), lambda given: given["scheduler"], "a worker's figures go to the run alone"),
    Idle(
        ("bench", "tune", "sweep"), CLUSTER, lambda given: not given["scheduler"], "it is for a cluster (--scheduler)"
    ),
    Idle(("bench",), BASELINE[1:], lambda given: not given["baseline"], "there is no --baseline"),
    Idle(
        ("bench",),
        ("max_regression",),
        lambda given: given["update_baseline"],
        "the baseline is written, and nothing is compared with it",
    ),
    Idle(
        ("bench", "gate"),
        ("accept_inconclusive",),
        lambda given: not given["update_baseline"],
        "it is for writing a baseline (--update-baseline)",
    ),
    Idle(
        ("bench",),
        ("precision",),
        lambda given: given["model"] and Path(given["model"]).is_file(),
        "a file has its precision; it chooses among the models of a run",
    ),
    Idle(
        ("bench",),
        ("preset",),
        lambda given: given["estimate"] or given["host"] or given["scheduler"],
        "it brings settings of runtimes that run here",
    ),
    Idle(
        ("tune",),
        ("inputs", "images"),
        lambda given: given["max_disagreement"] is None and given["max_accuracy_drop"] is None,
        "they evaluate lower precision, which --max-disagreement or --max-accuracy-drop asks for",
    ),
    Idle(
        ("tune",),
        ("settings",),
        lambda given: given["source"] is None or Path(given["source"]).is_dir(),
        "a run is folded already",
    ),
    Idle(
        ("score", "convert", "finetune"),
        ("classes",),
        lambda given: not given["images"],
        "it names the classes of --images",
    ),
    Idle(
        ("convert",),
        ("blocks", "kernel", "kind", "fit", "criterion"),
        lambda given: given["method"] != "dwconv",
        "they are of attention that becomes convolution (--method dwconv)",
    ),
    Idle(("convert",), ("kind", "fit"), lambda given: given["to"], "gates choose between attention and convolutions"),
    Idle(("convert",), ("branches",), lambda given: given["method"] != "nondeep", "only --method nondeep has some"),
    Idle(("convert",), ("idle_ratio",), lambda given: given["method"] != "repavit", "it is of --method repavit"),
    Idle(
        ("finetune",),
        ("teacher_settings",),
        lambda given: not given["teacher"],
        "they are of a --teacher's file; the network before conversion has its own",
    ),
    Idle(
        ("convert",),
        ("schedule", "keep"),
        lambda given: given["method"] != "pyra",
        "it is of token merging (--method pyra)",
    ),
    Idle(("convert",), ("speedup", "curve"), lambda given: given["to"], "nothing is measured before it is trained"),
    Idle(
        ("convert",),
        ("target",),
        lambda given: not given["speedup"] and not given["curve"],
        "it is where --speedup and --curve are measured",
    ),
    Idle(
        ("convert",),
        ("blocks", "schedule", "keep"),
        lambda given: given["speedup"],
        "--speedup chooses what merges, or how many blocks are replaced",
    ),
    Idle(("convert",), ("kernel",), lambda given: given["kind"] == "static", "a constant matrix has no kernel"),
    Idle(
        ("convert",),
        ("criterion",),
        lambda given: "," in given["blocks"],
        "the blocks are named; it would choose them",
    ),
)


def refuse_idle(command: str, given: Values, typed: Mapping[str, str]) -> None:
    """Look at what was typed.

    Args:
        command: Its name.
        given: See `Values`.
        typed: The options that were given on the command line, by those names, as they were spelt.

    Raises:
        UsageProblem: If one of them does nothing there.
    """
    for rule in IDLE:
        idle = [typed[name] for name in rule.options if name in typed] if command in rule.commands else []
        if idle and rule.where(given):
            raise UsageProblem(
                f"{', '.join(idle)} has no effect here: {rule.why}.",
                hint=f"Leave it out, and see `repaconv {command} --help`.",
                code="usage.idle",
            )
