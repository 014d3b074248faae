"""inspect --svg: the fold of a checkpoint or of an ONNX graph as a picture, before any of it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from repaconv.core import plugins
from repaconv.core.errors import Refused
from repaconv.results import Change, FoldStep
from repaconv.sources.method_detection import choose_method, understood
from repaconv.stages.fold.layer_matching import with_layers
from repaconv.stages.shared.fetched_files import weights_here
from repaconv.stages.shared.pinned_files import read_hashed, require_pinned


def draw_fold(
    source: str | Path,
    *,
    weights: str | None = None,
    settings: Mapping[str, str] | None = None,
    sha256: str | None = None,
) -> str:
    """The picture, as SVG: each kind of block of a method's checkpoint, or the places of a graph that fold.

    Raises:
        Refused: If it is no checkpoint of a method and no ONNX graph, or nothing in it folds.
    """
    from repaconv.stages.report.fold_picture import fold_svg, places_of

    path = Path(weights_here(source))
    graph = path.suffix == ".onnx"
    places = places_of(_changes(path, sha256) if graph else _certificate(path, weights, settings or {}, sha256))
    picture = fold_svg(places, path.name)
    if not picture:
        raise Refused(
            f"{path}: nothing to draw: no layer of it is folded into another.",
            hint="Leave out --svg.",
            code="inspect.nothing-to-draw",
        )
    return picture


def _certificate(
    path: Path, weights: str | None, settings: Mapping[str, str], sha256: str | None
) -> Sequence[FoldStep]:
    """The rows of its fold, which is made and not written."""
    found = read_hashed(path, weights, sha256)
    method, _ = choose_method(found, "auto")
    trained = understood(method, found, settings)
    backbone = plugins.load(plugins.BACKBONES, trained.backbone)
    size = backbone.image_size(trained.config, trained.preprocessing.image_size)
    steps = [part.step for part in trained.parts() if part.step]
    return with_layers(found, method, settings, trained, size, steps)


def _changes(path: Path, sha256: str | None) -> Sequence[Change]:
    """Of the graph's fold, which is neither proved nor measured here."""
    from repaconv.sources.verified_opset_upgrade import to_oldest
    from repaconv.verification.evaluated_graph import Evaluated
    from repaconv.verification.onnx_model_loading import folded, loaded

    require_pinned(path, sha256)
    raised = to_oldest(Evaluated(loaded(path)))
    return folded(path, raised.graph.model)[1]
