"""False alarms of the verification of graph folds on sound folds, and the planted faults that it misses, by size.

    python benchmarks/verification_rates.py [--networks 1000] [-o result.json]

Seeded random networks of four kinds alternate: well conditioned; a difference of large numbers; probabilities near
zero; a normalization of almost equal values. Each is folded and verified as `fold model.onnx` does. Then one bias is
changed by a share of itself: in the graph from which the fold starts (so that the fold is another function), or in the
folded graph alone (so that it is written wrongly). For every sound network, the ratios that the constants of
`repaconv.verification.rounding` bound are measured, too.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from repaconv.core.errors import Refused
from repaconv.core.files import canonical_json
from repaconv.graph import float64_rewriting, models_in_onnx_ir
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.sources.graph_fold import Folded, folded
from repaconv.verification.comparison import largest_along_least_axis
from repaconv.verification.float64_graphs import Float64, widened
from repaconv.verification.folded_graph_verification import verification_links
from repaconv.verification.graph_with_cached_outputs import Evaluated
from repaconv.verification.output_metrics import magnitudes
from repaconv.verification.rounding import JITTER, ROUNDING_SAMPLES, Jittered, apart

KINDS = ("well conditioned", "difference of large numbers", "probabilities near zero", "almost equal values")
SIZES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Of a fault, as a share of the bias that is changed."""
UNEXPLAINED = 1e30
"""Stands for an infinite ratio in the result."""
Rows = list[tuple[Any, ...]]
Array = NDArray[Any]
Counts = Mapping[str, Counter[str]]


def network(seed: int) -> onnx.ModelProto:
    """Two to five convolutions with BatchNorm, shortcuts, branches, and an end of the seed's kind."""
    random = np.random.default_rng(seed)
    kind, width = KINDS[seed % len(KINDS)], int(random.integers(4, 17))
    rows: Rows = []
    weights: dict[str, Any] = {}

    def norm(value: str, at: str) -> str:
        names = [f"{at}.{part}" for part in "gbmv"]
        parts = random.uniform(0.5, 2, width), *random.standard_normal((2, width)), random.uniform(0.5, 2, width)
        weights.update(zip(names, parts, strict=True))
        rows.append(("BatchNormalization", [value, *names], f"{at}.n", {}))
        return f"{at}.n"

    value = "x"
    for block in range(int(random.integers(2, 6))):
        size = int(random.choice([1, 3]))
        weights[f"{block}.w"] = random.standard_normal((width, width, size, size)) / (size * width**0.5)
        rows.append(("Conv", [value, f"{block}.w"], f"{block}.c", {"pads": [size // 2] * 4}))
        after = norm(f"{block}.c", str(block))
        if random.random() < 0.4:
            rows.append(("Add", [after, value], f"{block}.s", {}))
            after = f"{block}.s"
        if random.random() < 0.3:
            rows.append(("Add", [after, norm(value, f"{block}.branch")], f"{block}.t", {}))
            after = f"{block}.t"
        rows.append((str(random.choice(["Relu", "Sigmoid", "Tanh"])), [after], f"{block}.a", {}))
        value = f"{block}.a"
    value = norm(value, "last")
    if kind == "difference of large numbers":
        weights["large"] = np.full((width, 1, 1), 10.0 ** random.uniform(2, 4.5))
        rows += [("Add", [value, "large"], "up", {}), ("Relu", ["up"], "kept", {}), ("Sub", ["kept", "large"], "y", {})]
    elif kind == "probabilities near zero":
        weights["low"] = np.full((1, 1, 1), random.uniform(8, 16))
        rows += [("Sub", [value, "low"], "far", {}), ("Sigmoid", ["far"], "y", {})]
    elif kind == "almost equal values":
        weights["little"], weights["one"] = (
            np.full((width, 1, 1), 10.0 ** random.uniform(-5, -2)),
            np.ones((width, 1, 1)),
        )
        weights["scale"], weights["shift"] = np.ones(8), np.zeros(8)
        rows += [
            ("Mul", [value, "little"], "close", {}), ("Add", ["close", "one"], "equal", {}),
            ("LayerNormalization", ["equal", "scale", "shift"], "y", {"axis": -1, "epsilon": 1e-12}),
        ]  # fmt: skip
    else:
        rows.append(("Relu", [value], "y", {}))
    nodes = [helper.make_node(op, given, [out], out, **more) for op, given, out, more in rows]
    tensors = [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in weights.items()]
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, width, 8, 8))]
    outs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "net", ends, outs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def faulty(model: onnx.ModelProto, size: float, name: str = "") -> onnx.ModelProto:
    """A copy with another bias: that of a norm by name, or of the first convolution; a norm behind hides the last."""
    (other := onnx.ModelProto()).CopyFrom(model)
    weights = {weight.name: weight for weight in other.graph.initializer}
    chosen = name if name in weights else next(
        node.input[2] for node in other.graph.node if node.op_type == "Conv" and len(node.input) > 2
    )  # fmt: skip
    numbers = numpy_helper.to_array(weights[chosen])
    changed = numbers * np.asarray(1 + size * np.sign(numbers), numbers.dtype)
    weights[chosen].CopyFrom(numpy_helper.from_array(changed.astype(numbers.dtype), chosen))
    return other


@contextmanager
def starts_wrong(size: float) -> Iterator[None]:
    """Every fold, that in float64 included, starts from another graph than the comparison."""
    with ExitStack() as patches:
        for module, name in ((models_in_onnx_ir, "rewritten"), (float64_rewriting, "rewritten_in_float64")):
            patches.enter_context(patch.object(module, name, partial(_from_faulty, getattr(module, name), size)))
        yield


def _from_faulty(right: Callable[..., Any], size: float, model: onnx.ModelProto, *more: Any) -> Any:
    return right(faulty(model, size, "0.b"), *more)


def fold(before: onnx.ModelProto) -> Folded:
    """As `repaconv fold` makes it: in float64, and rounded once."""
    return folded(Path("net.onnx"), before)


def ended(before: onnx.ModelProto, after: Folded) -> tuple[str, str]:
    """Verdict and reason."""
    try:
        (link,) = verification_links(
            Path("net.onnx"), Evaluated(before), Evaluated(after.model, in_float64=after.in_float64)
        )
    except Refused as error:
        return "not verified", error.code
    return link.verdict, link.reason


def ratios(before: onnx.ModelProto, after: onnx.ModelProto) -> dict[str, float]:
    """What the constants stand for: the largest of all neighborhoods, over three inputs."""
    given, folded = Evaluated(before), Evaluated(after)
    feeds = given.probes.feeds[:3]
    exact = Float64(models_in_onnx_ir.rewritten(widened(before), FOLDS)[0])
    others = [Jittered(given, JITTER, seed, feeds) for seed in range(ROUNDING_SAMPLES)]
    found: dict[str, float] = defaultdict(float)
    for each in feeds:
        (truth,), (own,), (its,), (anew,) = (
            list(one.values()) for one in (given.truth(each), given.run(each), folded.run(each), exact.run(each))
        )
        size = magnitudes(truth)
        near = np.maximum(largest_along_least_axis(size, size)[0], 1e-300)
        moved = np.max([apart(next(iter(other.run(each).values())).astype(float), own) for other in others], axis=0)
        rounding, jitter = (largest_along_least_axis(size, error)[1] for error in (apart(own, truth), moved))
        beyond = apart(its, truth) > 1e-5 * near  # where the tolerance suffices, nothing is asked
        for name, error, of in (
            ("error / own error", np.where(beyond, apart(its, truth), 0.0), rounding),
            ("difference / jitter", np.where(beyond, apart(its, own), 0.0), jitter),
            ("algebra / own error", apart(anew, truth), rounding),
            ("algebra", apart(anew, truth), near),
        ):
            there = np.broadcast_to(of > 0, error.shape)
            share = np.divide(error, of, out=np.where(error > 0, UNEXPLAINED, 0.0), where=there)
            found[name] = max(found[name], float(share.max()))
    return dict(found)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--networks", type=int, default=1000)
    options.add_argument("--kind", choices=KINDS)
    options.add_argument("-o", "--out", type=Path)
    given = options.parse_args()
    sound: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    planted: dict[str, Counter[str]] = defaultdict(Counter)
    most: dict[str, dict[str, float]] = {kind: defaultdict(float) for kind in KINDS}
    for seed in range(given.networks):
        if given.kind not in (None, kind := KINDS[seed % len(KINDS)]):
            continue
        before = network(seed)
        after = fold(before)
        sound[kind][" ".join(ended(before, after))] += 1
        for name, value in ratios(before, after.model).items():
            most[kind][name] = max(most[kind][name], value)
        size = SIZES[seed // len(KINDS) % len(SIZES)]
        with starts_wrong(size):
            planted[f"{kind}, another function, {size:.0e}"][ended(before, fold(before))[0]] += 1
        written = after._replace(model=faulty(after.model, size))
        planted[f"{kind}, written down wrong, {size:.0e}"][ended(before, written)[0]] += 1
        if given.out and (seed % 100 == 99 or seed == given.networks - 1):
            given.out.write_text(f"{canonical_json(_result(seed + 1, sound, planted, most))}\n")
    print(canonical_json(_result(given.networks, sound, planted, most)))


def _result(networks: int, sound: Counts, planted: Counts, most: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    return {
        "networks": networks,
        "sound": {kind: dict(counts) for kind, counts in sound.items()},
        "planted": {name: dict(counts) for name, counts in sorted(planted.items())},
        "largest ratios of sound folds": {kind: dict(found) for kind, found in most.items()},
    }


if __name__ == "__main__":
    main()
