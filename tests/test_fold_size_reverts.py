"""No rewrite enlarges a graph: rule by rule, and in total, where the rewrite that enlarges it is reverted."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_mutants import difference, results
from test_fold_onnx import graph, normal

from repaconv.core.progress import silent
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.graph.nodes_and_constants import Writer, nodes_of
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.results import Change
from repaconv.rewrites.fold import fold_pipeline
from repaconv.sources.fold_size_reverts import Kept, Size, size_of, why_too_large
from repaconv.sources.graph_fold import folded
from repaconv.stages.fold.speed_reverts import fold_with_reverts
from repaconv.stages.report.page_rendering import less, saved
from repaconv.verification.graph_with_cached_outputs import Evaluated


def after(model: onnx.ModelProto) -> onnx.ModelProto:
    """Folded, and the same."""
    done = rewritten(model, fold_pipeline.FOLDS)[0]
    onnx.checker.check_model(done, full_check=True)
    assert difference(results(model), results(done)) < 1e-12
    return done


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def of(size: Size) -> tuple[int, int]:
    return size.matrices, size.numbers


def test_a_slice_in_front_of_a_product_stays_where_it_is():
    """ShuffleNet: one half of the channels goes on, the other through convolutions."""
    rows = [
        ("Split", "x", "a b", {"axis": 1, "num_outputs": 2}),
        ("Conv", "b w", "1"),
        ("Relu", "1", "2"),
        ("Concat", "a 2", "3", {"axis": 1}),
        ("Reshape", "3 apart", "4"),
        ("Transpose", "4", "y", {"perm": [0, 2, 1, 3, 4]}),
    ]
    model = graph(rows, {"w": normal(4, 4, 1, 1), "apart": np.array([1, 2, 4, 5, 5])}, {"x": (1, 8, 5, 5)})
    assert operators(after(model)) == [row[0] for row in rows]


def test_a_matrix_that_is_shared_stays_shared_after_norms_of_their_own():
    """CoaT: one MLP for the tokens of three sizes."""
    rows = [
        *(("LayerNormalization", f"x{i} g{i} b{i}", f"n{i}") for i in range(2)),
        *(("MatMul", f"n{i} w", f"m{i}") for i in range(2)),
        *(("Add", f"m{i} c", f"a{i}") for i in range(2)),
        *(("Relu", f"a{i}", f"y{i}") for i in range(2)),
    ]
    weights = {f"{name}{i}": normal(6) for name in "gb" for i in range(2)} | {"w": normal(6, 9), "c": normal(9)}
    given = {"x0": (1, 4, 6), "x1": (1, 7, 6)}
    model = graph(rows, weights, given, ("y0", "y1"))
    assert of(size_of(Evaluated(after(model)))) == of(size_of(Evaluated(model)))
    alone = graph(rows[::2], weights, {"x0": (1, 4, 6)}, ("y0",))
    assert size_of(Evaluated(after(alone))).numbers == size_of(Evaluated(alone)).numbers - 2 * 6, (
        "which is one's own takes them in"
    )


def test_what_comes_out_of_folds_alike_is_one_constant():
    """CoaT: x + conv(x) with one kernel at several places."""
    rows = [
        ("Conv", "x w", "1", {"group": 128, "pads": [1] * 4}),
        ("Add", "1 x", "2"),
        ("Relu", "2", "3"),
        ("Conv", "3 w", "4", {"group": 128, "pads": [1] * 4}),
        ("Add", "4 3", "y"),
    ]
    model = graph(rows, {"w": normal(128, 1, 3, 3)}, {"x": (1, 128, 4, 4)})
    done = after(model)
    assert operators(done) == ["Conv", "Relu", "Conv"]
    assert size_of(Evaluated(done)).numbers == size_of(Evaluated(model)).numbers


def test_pieces_of_tokens_that_are_images_are_pieces_of_one_image():
    """CoaT: a third of the channels through each of three kernels, and a scale in front of all of them."""
    rows = [
        ("Mul", "x g", "0"),
        ("MatMul", "0 u", "1"),
        ("Transpose", "1", "2", {"perm": [0, 2, 1]}),
        ("Reshape", "2 image", "3"),
        ("Split", "3 widths", "a b", {"axis": 1}),
        ("Conv", "a v", "4", {"pads": [1] * 4}),
        ("Conv", "b w", "5", {"pads": [2] * 4}),
        ("Concat", "4 5", "y", {"axis": 1}),
    ]
    weights = {
        **{"g": normal(6), "u": normal(6, 6), "v": normal(2, 2, 3, 3), "w": normal(4, 4, 5, 5)},
        **{"image": np.array([1, 6, 3, 5]), "widths": np.array([2, 4])},
    }
    model = graph(rows, weights, {"x": (1, 15, 6)})
    moved = ["Reshape", "Transpose"]  # of tokens as they lie in memory
    assert operators(after(model)) == ["MatMul", *moved, "Split", "Conv", "Conv", "Concat"]


def test_values_in_a_row_stay_in_a_row_before_a_product():
    rows = [
        ("Relu", "x", "1"),
        ("Conv", "1 v", "2", {"pads": [1] * 4}),
        ("Relu", "2", "3"),
        ("Concat", "3 1", "4", {"axis": 1}),
        ("Conv", "4 w b", "5"),
        ("Relu", "5", "6"),
        ("Mul", "6 s", "7"),
        ("Conv", "7 u", "y"),
    ]
    weights = {"v": normal(4, 4, 3, 3), "s": normal(3, 1, 1), "w": normal(3, 8, 1, 1), "b": normal(3)}
    done = after(graph(rows, weights | {"u": normal(2, 3, 1, 1)}, {"x": (1, 4, 6, 6)}))
    assert operators(done) == ["Relu", "Conv", "Relu", "Concat", "Conv", "Relu", "Conv"]


def test_a_norms_shift_stays_before_products_that_add_nothing():
    def of(*more: tuple[str, str, str]) -> list[str]:
        rows = [
            ("LayerNormalization", "x g h", "1"),
            ("MatMul", "1 w", "2"),
            *more,
            ("Relu", "3" if more else "2", "y"),
        ]
        weights = {"g": normal(4), "h": normal(4), "w": normal(4, 6), "b": normal(6)}
        done = after(graph(rows, weights, {"x": (1, 5, 4)}))
        norm = next(node for node in done.graph.node if node.op_type == "LayerNormalization")
        return [*operators(done), f"{len(norm.input)} inputs"]

    assert of() == ["LayerNormalization", "MatMul", "Relu", "3 inputs"]
    assert of(("Add", "2 b", "3")) == ["LayerNormalization", "MatMul", "Add", "Relu", "2 inputs"]


def test_keys_that_are_turned_at_once_stay_so():
    rows = [
        ("Mul", "x s", "1"),
        ("MatMul", "1 w", "2"),
        ("Reshape", "2 heads", "3"),
        ("Transpose", "3", "k", {"perm": [0, 2, 3, 1]}),
        ("Transpose", "3", "q", {"perm": [0, 2, 1, 3]}),
        ("MatMul", "q k", "y"),
    ]
    weights = {"s": normal(4), "w": normal(4, 4), "heads": np.array([1, 5, 2, 2])}
    done = after(graph(rows, weights, {"x": (1, 5, 4)}))
    assert operators(done).count("Transpose") == 2


@pytest.mark.parametrize(
    ("now", "worth"),
    [
        (Size(101, 10, 10, 5), False),
        (Size(100, 11, 11, 5), False),
        (Size(90, 11, 12, 9), True),
        (Size(90, 12, 12, 5), False),
        (Size(100, 10, 10, 10), False),
        (Size(100, 10, 10, 9), True),
        (Size(100, 10, 9, 11), True),
        (Size(100, 10, 12, 9), False),
        (Size(100, 10, 11, 9), True),
    ],
)
def test_what_is_larger(now, worth):
    assert (why_too_large(Size(100, 10, 10, 10), now) == "") == worth


def _widened(model):
    """A rewrite as none should be: every product in two halves."""
    for node in nodes_of(model, "MatMul"):
        write = Writer(model, node)
        half = write("Mul", node.outputs[0], write.constant(0.5))
        twice = write("Add", half, half)
        for user, place in tuple(node.outputs[0].uses()):
            if user is not half.producer():
                user.replace_input_with(place, twice)
        yield Change(rewrite="widen", place=node.name or "", description="wider")


def _doubled(model):
    """Another: every product is computed twice."""
    for node in nodes_of(model, "MatMul"):
        write = Writer(model, node)
        again = write("MatMul", *node.inputs)
        both = write("Mul", write("Add", again, node.outputs[0]), write.constant(0.5))
        for user, place in tuple(node.outputs[0].uses()):
            if user is not both.producer().inputs[0].producer():
                user.replace_input_with(place, both)
        yield Change(rewrite="double", place=node.name or "", description="twice")


def kept_of(given, refold) -> Kept:
    return fold_with_reverts(given, given, refold, measured=False, progress=silent)


def test_what_enlarges_the_graph_is_reverted_and_the_rest_stays(monkeypatch):
    rows = [("Mul", "x s", "1"), ("MatMul", "1 w", "2"), ("Relu", "2", "y")]
    model = graph(rows, {"s": normal(4), "w": normal(4, 4)}, {"x": (1, 3, 4)}, kind=onnx.TensorProto.DOUBLE)
    rewrites = (*fold_pipeline.FOLDS, Rewrite("double", "never", _doubled))
    monkeypatch.setattr(fold_pipeline, "FOLDS", rewrites)
    refold = partial(folded, Path("net.onnx"), model)
    assert operators(refold(()).model).count("MatMul") == 2
    kept = kept_of(Evaluated(model), refold)
    assert operators(kept.graph.model) == ["MatMul", "Relu"]
    assert kept.reverts.names == ("double",)
    assert kept.reverts.messages == ("double: reverted, because with it the graph multiplies 96 times, not 48",)


def test_nodes_are_more_only_where_that_saves_more():
    before = Size(macs=1000, matrices=100, numbers=100, nodes=10)
    assert why_too_large(before, before._replace(numbers=99, nodes=11)) == "with it the graph has 11 nodes, not 10"
    assert not why_too_large(before, before._replace(macs=900, numbers=99, nodes=11))
    assert not why_too_large(before, before._replace(numbers=99, nodes=10))


def test_a_transpose_that_a_product_takes_is_no_node():
    """A fold puts keys' heads and their transposition apart, since runtimes leave the second to the product."""
    shapes = {"q": (1, 2, 5, 3), "k": (1, 5, 2, 3)}
    once = graph([("Transpose", "k", "1", {"perm": [0, 2, 3, 1]}), ("MatMul", "q 1", "y")], {}, shapes)
    heads = [("Transpose", "k", "1", {"perm": [0, 2, 1, 3]}), ("Transpose", "1", "2", {"perm": [0, 1, 3, 2]})]
    twice = graph([*heads, ("MatMul", "q 2", "y")], {}, shapes)
    assert size_of(Evaluated(once)).nodes == size_of(Evaluated(twice)).nodes == 2
    shown = graph([*heads, ("MatMul", "q 2", "y")], {}, shapes, outputs=("y", "2"))
    assert size_of(Evaluated(shown)).nodes == 3


def test_where_nothing_is_saved_the_original_graph_remains(monkeypatch):
    model = graph([("MatMul", "x w", "1"), ("Relu", "1", "y")], {"w": normal(4, 4)}, {"x": (1, 3, 4)})
    monkeypatch.setattr(fold_pipeline, "FOLDS", (*fold_pipeline.FOLDS, Rewrite("widen", "never", _widened)))
    given = Evaluated(model)
    kept = kept_of(given, partial(folded, Path("net.onnx"), model))
    assert kept.graph is given
    assert kept.changes == []
    assert kept.reverts.messages == ("widen: reverted, because it removes no multiplications, parameters or nodes",)


def shared_head(norms: int, *, transposed: bool = False) -> onnx.ModelProto:
    """RTMDet's head: a convolution or linear layer for every level, behind it a norm of each, or the same for all."""
    levels = range(3)
    if transposed:
        rows = [
            row
            for i in levels
            for row in (
                ("Transpose", "w", f"w{i}", {"perm": [1, 0]}),
                ("MatMul", f"x{i} w{i}", f"c{i}"),
                ("Mul", f"c{i} s{i % norms}", f"n{i}"),
                ("Relu", f"n{i}", f"y{i}"),
            )
        ]
        weights = {"w": normal(6, 6), **{f"s{i}": normal(6) for i in range(norms)}}
        return graph(rows, weights, {f"x{i}": (1, 3 + i, 6) for i in levels}, tuple(f"y{i}" for i in levels))
    rows = [
        *(("Conv", f"x{i} w", f"c{i}", {"pads": [1] * 4}) for i in levels),
        *(("BatchNormalization", f"c{i} {' '.join(f'{p}{i % norms}' for p in 'gbmv')}", f"n{i}") for i in levels),
        *(("Relu", f"n{i}", f"y{i}") for i in levels),
    ]
    weights = {f"{p}{i}": normal(6) for p in "gbm" for i in range(norms)}
    weights |= {f"v{i}": np.abs(normal(6)) + 0.5 for i in range(norms)} | {"w": normal(6, 6, 3, 3)}
    return graph(rows, weights, {f"x{i}": (1, 6, 4 + i, 4) for i in levels}, tuple(f"y{i}" for i in levels))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_that_levels_share_stays_one_in_front_of_norms_of_their_own(transposed):
    model = shared_head(3, transposed=transposed)
    kept = kept_of(Evaluated(model), partial(folded, Path("net.onnx"), model))
    size = size_of(kept.graph)
    assert of(size) <= of(size_of(Evaluated(model)))
    assert difference(results(model), results(kept.graph.model)) < 1e-12
    assert any(
        label.startswith("unshare: reverted, because with it layers that share") for label in kept.reverts.messages
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_that_levels_share_takes_in_a_norm_that_they_share(transposed):
    model = shared_head(1, transposed=transposed)
    kept = kept_of(Evaluated(model), partial(folded, Path("net.onnx"), model))
    size = size_of(kept.graph)
    assert "BatchNormalization" not in operators(kept.graph.model)
    assert "Mul" not in operators(kept.graph.model)
    assert size.numbers < size_of(Evaluated(model)).numbers
    assert not kept.reverts.names


def test_constants_are_folded_next_to_a_weight_that_is_shared():
    """As the weights of a sum of images in EfficientDet, which its code divides by their sum."""
    model = shared_head(3)
    kind = model.graph.initializer[0].data_type
    numbers = np.ones(1, onnx.helper.tensor_dtype_to_np_dtype(kind))
    model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, "e"))
    nodes = [("Exp", ["e"], ["f"]), ("Mul", ["y0", "f"], ["z"])]
    model.graph.node.extend(onnx.helper.make_node(*row) for row in nodes)
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", kind, None))
    kept = kept_of(Evaluated(model), partial(folded, Path("net.onnx"), model))
    assert kept.reverts.names == ("unshare",)
    assert [change.rewrite for change in kept.changes] == ["shapes"]
    assert "Exp" not in operators(kept.graph.model)
    assert difference(results(model), results(kept.graph.model)) < 1e-12


def test_other_layers_fold_next_to_a_weight_that_is_shared():
    model = shared_head(3)
    more = onnx.helper.make_node("Conv", ["y0", "u"], ["d"], pads=[1] * 4)
    norm = onnx.helper.make_node("BatchNormalization", ["d", "g0", "b0", "m0", "v0"], ["z"])
    model.graph.node.extend([more, norm])
    weight = normal(6, 6, 3, 3).astype(onnx.helper.tensor_dtype_to_np_dtype(model.graph.initializer[0].data_type))
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "u"))
    model.graph.output[0].name = "z"
    kept = kept_of(Evaluated(model), partial(folded, Path("net.onnx"), model))
    assert operators(kept.graph.model).count("BatchNormalization") == 3
    size, before = size_of(kept.graph), size_of(Evaluated(model))
    assert (size.matrices, size.nodes) == (before.matrices, before.nodes - 1)


def test_rows_of_a_table_at_computed_indices_are_counted_as_they_are_multiplied():
    """SAM: scores of relative positions; the fold makes the rows one constant, which is larger than the table."""
    rows = [
        ("Shape", "x", "sizes"),
        ("Gather", "sizes one", "side"),
        ("Range", "zero side one", "to"),
        ("Unsqueeze", "to last", "from"),
        ("Sub", "from to", "apart"),
        ("Add", "apart three", "index"),
        ("Gather", "table index", "rows"),
        ("Einsum", "x rows", "y", {"equation": "bhwc,hkc->bhwk"}),
    ]
    numbers = {"zero": np.array(0), "one": np.array(1), "three": np.array(3), "last": np.array([1])}
    model = graph(rows, {**numbers, "table": normal(7, 6)}, {"x": (1, 4, 4, 6)})
    assert size_of(Evaluated(model)).matrices == size_of(Evaluated(after(model))).matrices == 4 * 4 * 6
    kept = kept_of(Evaluated(model), partial(folded, Path("net.onnx"), model))
    assert not kept.reverts.names
    assert "Range" not in operators(kept.graph.model)


def test_what_the_file_holds_is_counted_once():
    """Each level transposes the weight for itself, which settling writes as three constants."""
    assert size_of(Evaluated(shared_head(3, transposed=True))).numbers == 6 * 6 + 3 * 6


def test_what_is_more_is_no_saving():
    assert saved(100, 88) == "12.0%"
    assert saved(100, 100) == "0.0%"
    assert saved(229897, 560905, 2) == "143.98% more"
    assert (less(100, 88), less(100, 107)) == ("12.0% less than", "7.0% more than")
