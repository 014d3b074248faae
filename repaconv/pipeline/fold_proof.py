"""The proof of a folded graph: it and the graph as given under ONNX Runtime, on inputs that excite both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv.artefact import Link, Tolerance
from repaconv.errors import GateFailed, Refused
from repaconv.proof.policy import DEPTH, LOSSY, exact_rtols, tolerance

if TYPE_CHECKING:
    import onnx

GIVEN, FOLDED = "ONNX as given", "ONNX folded"
HALF = (10, 16)
"""ONNX's numbers of float16 and bfloat16."""
ROUNDINGS = 3
"""Other roundings of the graph as given that are run where a difference is more than its tolerance."""


def proved(source: Path, before: onnx.ModelProto, after: onnx.ModelProto) -> tuple[Link, ...]:
    """Every output before against after under ONNX Runtime.

    Raises:
        Refused: If the graph as given does not run, or if nothing could be compared.
    """
    from repaconv.proof.compare import compare
    from repaconv.proof.probes import Unrunnable, probes, unmoved

    given, folded = _Session(source, before), _Session(source, after, folded=True)
    name, allowed = _allowed(before)
    try:
        found = probes(before, given.run)
    except Unrunnable as error:
        raise Refused(
            f"{source} does not run under ONNX Runtime on seeded inputs: {error}",
            hint="Without running it, nothing could be proved. Fix its free sizes when exporting it.",
            code="onnx.unrunnable",
        ) from error
    links = compare(
        given,
        folded,
        found.feeds,
        allowed,
        name=name,
        ends=(GIVEN, FOLDED),
        note=found.told,
        rounded=[_Rounded(source, before, (allowed.rtol or 0.0) / 10, seed) for seed in range(ROUNDINGS)],
        fixed=unmoved(before),
    )
    if not any(link.verdict in ("passed", "failed") for link in links):
        raise Refused(
            f"no output of {source} could be compared: {links[0].note if links else 'it has none'}.",
            hint="Without that nothing is proved, and nothing was written. Give a graph whose outputs are tensors of "
            "numbers that move with its inputs.",
            code="fold.not-proved",
        )
    return links


def _allowed(model: onnx.ModelProto) -> tuple[str, Tolerance]:
    """The link's name and tolerance, by depth and by precision: of half precision what its rounding needs."""
    depth = sum(node.op_type in ("MatMul", "Gemm", "Conv") for node in model.graph.node) // 6
    if any(weight.data_type in HALF for weight in model.graph.initializer):
        return "fp16", Tolerance(kind="exact", rtol=LOSSY["fp16"][1])
    return "onnx", tolerance("onnx", usual=exact_rtols(max(depth, DEPTH)))


class _Session:
    """A graph under ONNX Runtime: inputs by name to outputs by name."""

    def __init__(self, source: Path, model: onnx.ModelProto, *, folded: bool = False) -> None:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 4  # sizes that it refuses are tried, and no news
        kinds = ["CPUExecutionProvider"]
        try:
            self.session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=kinds)
        except Exception as error:
            defect = "This is a defect of repaconv; please report it with `repaconv inspect` of the file."
            raise Refused(
                f"ONNX Runtime does not load {'the fold of ' * folded}{source}: {str(error).splitlines()[0]}",
                hint=defect if folded else "Nothing could be proved; give a graph of standard operators.",
                code="onnx.rewrite" if folded else "onnx.unloadable",
            ) from error
        self.outputs = [output.name for output in self.session.get_outputs()]

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """See `repaconv.proof.compare.Side`."""
        return dict(zip(self.outputs, self.session.run(None, dict(feeds)), strict=True))


class _Rounded:
    """The same with numbers that are rounded otherwise; loaded when it is first run."""

    def __init__(self, source: Path, model: onnx.ModelProto, by: float, seed: int) -> None:
        self.source, self.model, self.by, self.seed = source, model, by, seed
        self.session: _Session | None = None

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """See `repaconv.proof.compare.Side`."""
        from repaconv.proof.rounding import jittered_feeds, moved

        self.session = self.session or _Session(self.source, moved(self.model, self.by, self.seed))
        return self.session.run(jittered_feeds(feeds, self.by, self.seed))


def not_equal(source: Path, links: tuple[Link, ...]) -> GateFailed:
    """What is raised where a link failed."""
    worst = next(link for link in links if link.verdict == "failed")
    return GateFailed(
        f"the folded graph does not compute what {source} does ({worst.reference.removeprefix(GIVEN + ', ')}: "
        f"{worst.note}); nothing was written.",
        hint="This is a defect of repaconv; please report it with `repaconv inspect` of the file.",
        code="fold.not-equal",
    )
