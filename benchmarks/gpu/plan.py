"""Every step of the kit: the papers' models in the papers' own protocols; `step_selection` chooses from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

VANILLA, TRAINING, OFFICIAL, OURS = "vanilla", "training form", "official", "repaconv"


class Claim(NamedTuple):
    """A paper's speed: the deploy form's over the vanilla network's, where that stands, and on which GPU."""

    factor: float
    source: str


class Case(NamedTuple):
    """A network at a paper's protocol.

    Attributes:
        method: Its method.
        size: Of `manual_baseline_models`.
        batch: Images a call; halved where the GPU's memory does not hold them.
        claim: What the paper says.
        note: Which of that size.
    """

    method: str
    size: str
    batch: int
    claim: Claim | None
    note: str = ""

    @property
    def model(self) -> str:
        """Its folder's name."""
        return "-".join(filter(None, (self.method, self.size.replace("/", "-"), self.note)))


A6000, A100, RTX3090 = "an A6000", "an A100", "a GeForce RTX 3090"
CASES = (
    Case("repavit", "deit-base/0.75", 128, Claim(660.3 / 418.5, f"Table 2, {A6000}")),
    Case("riformer", "s12", 2048, Claim(4899.8 / 4160.18, f"Table 6, {A100}, against PoolFormer-S12")),
    Case("nondeep", "6x2", 1, None, "value-sum"),
    Case("nondeep", "6x2", 32, Claim(2840 / 1723, "Table 1, a GPU that it does not name"), "value-sum"),
    Case("pyra", "vit-base/low", 128, Claim(745 / 425, f"Table 2, {RTX3090}")),
    Case("dwconv", "vit-large/12", 1, Claim(161.4 / 133.6, "Table 2, a Jetson Orin Nano with TensorRT")),
    Case("repavit", "deit-tiny/0.75", 128, Claim(4470.8 / 3435.1, f"Table 4, {A6000}")),
    Case("pyra", "vit-base/high", 128, Claim(1365 / 425, f"Table 3, {RTX3090}")),
)
ANY = "graph"
"""In place of a method: networks of timm, folded by their graphs; the vanilla one is what torch and onnxsim write."""
NETWORKS = (
    Case(ANY, "deit_small_patch16_224", 32, None),
    Case(ANY, "resnet50", 32, None),
    Case(ANY, "convnext_tiny", 32, None),
    Case(ANY, "swin_tiny_patch4_window7_224", 32, None),
    Case(ANY, "efficientnet_b0", 32, None),
    Case(ANY, "fastvit_t8", 32, None),
)
WAYS_OF_GRAPHS = (("cuda-ort", "fp32"), ("cuda-ort", "fp16"))
# Runtimes by target, with the precisions, in the order of the table's rows.
WAYS = (
    ("cuda", "fp32"),
    ("cuda-ort", "fp32"),
    ("cuda", "fp16"),
    ("cuda@graphs", "fp16"),
    ("cuda@compiled", "fp16"),
    ("cuda-ort", "fp16"),
    ("cuda@compiled", "fp32"),
    ("cuda@graphs", "fp32"),
    ("cuda", "bf16"),
    ("cuda", "tf32"),
    ("cuda-ort", "bf16"),
    ("cuda-ort@tensorrt", "fp16"),
)
ENGINES = tuple(
    (target, precision)
    for precision in ("fp32", "fp16")
    for target in ("rtx-30", "rtx-40", "rtx-50", "t4", "a100", "h100")
)
"""Targets of TensorRT-RTX and of TensorRT, with precisions: TensorRT-RTX builds float32 ahead of time anywhere, all
others are built on their GPU alone."""
BATCHES = (1, 8, 64)
"""Images a call, of an engine that is opened."""
TUNED = ("cuda-ort", *dict.fromkeys(target for target, _ in ENGINES))
"""Targets whose presets are measured, one network per method."""
TUNE_S = 60
"""Seconds of each search for a preset."""
SMALL = {"dwconv": "vit-base/6", "pyra": "vit-base/low"}
"""Where the largest network would be no better an example of an engine, or of a preset."""
MADE = ("prepare", "graphs")
"""Kinds of steps that make what others measure."""


class Step(NamedTuple):
    """One process: a network made, or a row.

    Attributes:
        name: Unlike all others.
        kind: ``prepare``, ``graphs``, ``row``, ``engine`` or ``tune``.
        model: Folder of its network.
        given: What the kind takes.
        limit_s: After which it is ended.
    """

    name: str
    kind: str
    model: str
    given: dict[str, Any]
    limit_s: int


def steps(rehearsal: bool = False) -> list[Step]:
    """All of them, each after what it needs; a rehearsal has small networks on the CPU, and each kind of step once."""
    cases = REHEARSED if rehearsal else CASES
    ways = (("cpu-torch", "fp32"), ("x86-64", "fp32"), ("cpu-torch", "bf16")) if rehearsal else WAYS
    engines = (("rtx-40", "fp32"), ("x86-64", "fp32"), ("rtx-40", "fp16")) if rehearsal else ENGINES
    tuned = ("x86-64",) if rehearsal else TUNED
    made: dict[str, Step] = {}
    listed = [*_rows(cases, ways), *_tuned(_examples(cases), tuned, 15 if rehearsal else TUNE_S)]
    listed += _engines(cases, engines)
    if not rehearsal:
        of_one = [case._replace(batch=1) for case in NETWORKS]
        listed += [*_rows((*NETWORKS, *of_one), WAYS_OF_GRAPHS), *_tuned(NETWORKS, ("cuda-ort",), TUNE_S)]
    for step in listed:
        for needed in needs(step):
            made.setdefault(needed.name, needed)
        made[step.name] = step
    return list(made.values())


REHEARSED = (
    Case("repavit", "tiny", 4, Claim(4470.8 / 3435.1, f"Table 4, {A6000}")),
    Case("nondeep", "tiny", 1, None),
)


def _rows(cases: tuple[Case, ...], ways: tuple[tuple[str, str], ...]) -> Iterator[Step]:
    for target, precision in ways:
        for case in cases:
            given = {
                "target": target,
                "precision": precision,
                "batch": case.batch,
                "method": case.method,
                "size": case.size,
                "claim": case.claim and case.claim._asdict(),
            }
            name = f"{case.model}.b{case.batch}.{target}.{precision}"
            yield Step(name, "row", case.model, given, 300 if "compiled" in target else 150)


def _examples(cases: tuple[Case, ...]) -> list[Case]:
    """One network per method."""
    chosen = {each.method: each for each in cases}
    return [each._replace(size=SMALL.get(each.method, each.size)) for each in chosen.values()]


def _engines(cases: tuple[Case, ...], engines: tuple[tuple[str, str], ...]) -> Iterator[Step]:
    for target, precision in engines:
        for case in _examples(cases):
            given = {"target": target, "precision": precision, "method": case.method, "size": case.size, "claim": None}
            yield Step(f"{case.model}.{target}.{precision}", "engine", case.model, given, 600)


def _tuned(cases: Iterable[Case], targets: tuple[str, ...], budget_s: int) -> Iterator[Step]:
    for target in targets:
        for case in cases:
            given = {"target": target, "batch": min(case.batch, 64), "method": case.method, "budget_s": budget_s}
            yield Step(f"{case.model}.{target}.tune", "tune", case.model, given, 2 * budget_s + 60)


def needs(step: Step) -> Iterator[Step]:
    """What must be made before: the network, and its graphs where a runtime takes those."""
    yield Step(f"{step.model}.prepare", "prepare", step.model, {}, 300)
    target = step.given.get("target", "")
    if step.kind == "row" and not target.startswith(("cuda@", "cpu-torch")) and target != "cuda":
        plain, precision = target.partition("@")[0], step.given["precision"]
        typed = "fp32" if precision == "tf32" else precision
        yield Step(f"{step.model}.graphs.{typed}", "graphs", step.model, {"target": plain, "precision": typed}, 300)
