"""Rotary position embeddings as every exporter writes them become one operator, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import pytest
from graph_mutants import Mutant, difference, results
from test_speed_rewrites import EXACT, Graph
from test_speed_rewrites import REWRITES as ALL_REWRITES

from repaconv.graph.element_type_conversion import retyped
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.rewrites.speed.rotary_embedding_operator import TYPES, write_operators

TOKENS, HEADS, WIDTH = 5, 3, 8
IN_FLOAT64 = replace(ALL_REWRITES["rotary-op"], apply=partial(write_operators, types=(*TYPES, "DOUBLE")))
"""ONNX's operator has no float64, but its reference implementation computes it."""
REWRITES = {**ALL_REWRITES, "rotary-op": IN_FLOAT64}


def angles(*, tokens=TOKENS, pairs=WIDTH // 2, interleaved=False, heads=()):
    """Cosines and sines [N, d] or [H, N, d], of pairs in halves or interleaved."""
    theta = np.random.default_rng(3).standard_normal((*heads, tokens, pairs))
    wide = np.repeat(theta, 2, -1) if interleaved else np.concatenate([theta, theta], -1)
    return [np.cos(wide), np.sin(wide)]


def half(graph, x):
    """(-x_b, x_a) for the halves a and b of the last axis."""
    a, b = graph("Split", x, np.array([WIDTH // 2] * 2), outputs=2, axis=-1)
    return graph("Concat", graph("Neg", b), a, axis=-1)


def pairs(graph, x):
    """(-x_1, x_0, -x_3, x_2, ..): the odd and even channels, stacked and flattened."""
    odd, even = (every_other(graph, x, start) for start in (1, 0))
    parts = [graph("Unsqueeze", part, np.array([-1])) for part in (graph("Neg", odd), even)]
    return graph("Reshape", graph("Concat", *parts, axis=-1), np.array([0, 0, 0, WIDTH]))


def every_other(graph, x, start):
    return graph("Slice", x, np.array([start]), np.array([2**31 - 1]), np.array([-1]), np.array([2]))


def in_halves(graph, x):
    cos, sin = angles()
    return graph("Add", graph("Mul", x, cos), graph("Mul", half(graph, x), sin))


def interleaved(graph, x):
    cos, sin = angles(interleaved=True)
    return graph("Add", graph("Mul", pairs(graph, x), sin), graph("Mul", cos, x))


def by_halves(graph, x):
    """The halves by themselves: x_a cos - x_b sin and x_b cos + x_a sin, joined."""
    (a, b), (cos, sin) = graph("Split", x, np.array([4, 4]), outputs=2, axis=3), (t[:, :4] for t in angles())
    first = graph("Sub", graph("Mul", a, cos), graph("Mul", b, sin))
    return graph("Concat", first, graph("Add", graph("Mul", b, cos), graph("Mul", a, sin)), axis=-1)


def as_complex(graph, x):
    """Real and imaginary parts of products of complex numbers, stacked and flattened."""
    real, imaginary = (every_other(graph, x, start) for start in (0, 1))
    cos, sin = (t[:, ::2] for t in angles(interleaved=True))
    parts = (
        graph("Sub", graph("Mul", real, cos), graph("Mul", imaginary, sin)),
        graph("Add", graph("Mul", real, sin), graph("Mul", imaginary, cos)),
    )
    both = [graph("Unsqueeze", part, np.array([4])) for part in parts]
    return graph("Reshape", graph("Concat", *both, axis=4), np.array([0, 0, 0, -1]))


def partly(graph, x):
    """Of every head only the first six channels."""
    turned, rest = graph("Split", x, np.array([6, 2]), outputs=2, axis=-1)
    a, b = graph("Split", turned, np.array([3, 3]), outputs=2, axis=-1)
    cos, sin = angles(pairs=3)
    swapped = graph("Concat", graph("Neg", b), a, axis=-1)
    return graph("Concat", graph("Add", graph("Mul", turned, cos), graph("Mul", swapped, sin)), rest, axis=-1)


def after_prefix(graph, x):
    """Of all tokens but the first two."""
    prefix, tokens = graph("Split", x, np.array([2, TOKENS - 2]), outputs=2, axis=2)
    cos, sin = angles(tokens=TOKENS - 2)
    turned = graph("Add", graph("Mul", tokens, cos), graph("Mul", half(graph, tokens), sin))
    return graph("Concat", prefix, turned, axis=2)


def by_moved_constants(graph, x):
    """Cosines and sines are parts of one constant."""
    cos, sin = graph("Split", np.concatenate(angles(), -1), np.array([WIDTH] * 2), outputs=2, axis=-1)
    return graph("Add", graph("Mul", x, cos), graph("Mul", half(graph, x), sin))


def in_blocks(graph, x, *, reflected=False, mixed=False):
    """Each half of a head by itself, by the angles of one axis of a position: the halves of a half are the pairs.

    Args:
        reflected: With the wrong sign in the second block.
        mixed: With neighbors as the pairs of the second block.
    """
    parts, turned = graph("Split", x, np.array([4, 4]), outputs=2, axis=-1), []
    for second, (part, cos, sin) in enumerate(zip(parts, *(np.split(t, 2, -1) for t in angles()), strict=True)):
        near = mixed and second
        cos, sin = (np.repeat(t[:, :2], 2, -1) if near else np.concatenate([t[:, :2]] * 2, -1) for t in (cos, sin))
        a, b = (
            [graph("Gather", part, np.array(chosen), axis=-1) for chosen in ([0, 2], [1, 3])]
            if near
            else graph("Split", part, np.array([2, 2]), outputs=2, axis=-1)
        )
        moved = graph("Concat", b if reflected and second else graph("Neg", b), a, axis=-1)
        moved = graph("Gather", moved, np.array([0, 2, 1, 3]), axis=-1) if near else moved
        turned.append(graph("Add", graph("Mul", part, cos), graph("Mul", moved, sin)))
    return graph("Concat", *turned, axis=-1)


def by_matrices(graph, x, *, table=None, axis=5):
    """Each pair by its 2x2 matrix: products that are broadcast, and their sum along one axis."""
    cos, sin = (t[:, ::2] for t in angles(interleaved=True))
    table = (cos, -sin, sin, cos) if table is None else table(cos, sin)
    rows = graph("Reshape", x, np.array([0, HEADS, TOKENS, WIDTH // 2, 1, 2]))
    products = graph("Mul", rows, np.stack(table, -1).reshape(TOKENS, WIDTH // 2, 2, 2))
    turned = graph("ReduceSum", products, np.array([axis]), keepdims=0)
    return graph("Reshape", turned, np.array([0, HEADS, TOKENS, WIDTH]))


FORMS = (
    in_halves,
    interleaved,
    by_halves,
    as_complex,
    partly,
    after_prefix,
    by_moved_constants,
    in_blocks,
    by_matrices,
)


def attending(embed, *, seed=0, scaled=False, fused=True, batch=None, normed=False, tokens_first=False):
    """Attention of one layer, with the embedding of its queries and keys."""
    random, channels = np.random.default_rng(seed), HEADS * WIDTH
    graph = Graph(x=[TOKENS, 6])
    layer = random.standard_normal((6, 3 * channels)) / 3
    x = graph("Mul", "x", random.standard_normal(6))
    if fused:
        whole = graph("Add", graph("MatMul", x, layer), random.standard_normal(3 * channels))
        split = graph("Reshape", whole, np.array([-1, TOKENS, 3, HEADS, WIDTH]))
        turned = graph("Transpose", split, perm=[2, 0, 3, 1, 4])
        heads = [graph("Gather", turned, np.array(number), axis=0) for number in range(3)]
    else:
        parts = [graph("MatMul", x, part) for part in np.split(layer, 3, 1)]
        apart = [graph("Reshape", part, np.array([-1, TOKENS, HEADS, WIDTH])) for part in parts]
        if normed:
            apart[:2] = [
                graph("LayerNormalization", part, random.standard_normal(WIDTH), axis=-1) for part in apart[:2]
            ]
        if tokens_first:
            apart[:2] = [embed(graph, part) for part in apart[:2]]
        heads = [graph("Transpose", part, perm=[0, 2, 1, 3]) for part in apart]
    q, k = heads[:2] if tokens_first else [embed(graph, part) for part in heads[:2]]
    if scaled:
        q, k = (graph("Mul", part, np.array(WIDTH**-0.25)) for part in (q, k))
    scores = graph("Softmax", graph("MatMul", q, graph("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
    mixed = graph("Transpose", graph("MatMul", scores, heads[2]), perm=[0, 2, 1, 3])
    model = graph.model(graph("Reshape", mixed, np.array([0, 0, -1])))
    return model if batch is None else with_batch(model, batch)


def with_batch(model, size):
    """The model for this batch size only."""
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = size
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def changed(model, *names):
    """What the rewrites changed, after the results were compared in float64, and ONNX's checker took it in float32."""
    after, changes = rewritten(model, [REWRITES[name] for name in names])
    if changes:
        onnx.checker.check_model(retyped(after, {onnx.TensorProto.DOUBLE: onnx.TensorProto.FLOAT}), full_check=True)
        before = results(model)
        assert all(found is not None for found in before)
        assert difference(before, results(after)) <= EXACT, (names, changes)
    return [change.rewrite for change in changes]


def operators(model):
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize(
    "settings", [{}, {"scaled": True}, {"fused": False}, {"fused": False, "normed": True}, {"batch": 2}]
)
@pytest.mark.parametrize("embed", FORMS)
def test_an_embedding_is_one_operator_however_it_is_written(embed, settings):
    model = attending(embed, **settings)
    assert changed(model, "rotary-op") == ["rotary-op"] * 2
    after, _ = rewritten(model, [REWRITES["rotary-op"]])
    assert operators(after).count("RotaryEmbedding") == 2
    assert not {"Neg", "Sub", "Split"} & set(operators(after))
    assert changed(after, "rotary-op") == []


@pytest.mark.parametrize("embed", FORMS)
def test_a_fold_leaves_an_embedding_whole(embed):
    model = attending(embed)
    folded, changes = rewritten(model, FOLDS)
    assert changes
    assert difference(results(model), results(folded)) <= EXACT
    assert "Gather" not in operators(folded)
    assert changed(folded, "rotary-op") == ["rotary-op"] * 2
    assert rewritten(folded, FOLDS)[1] == []


@pytest.mark.parametrize("embed", FORMS)
def test_attention_reads_embedded_tokens(embed):
    for settings in ({}, {"fused": False, "normed": True}, {"scaled": True}):
        model = attending(embed, **settings)
        assert changed(model, "rotary-op", "attention-op") == ["rotary-op"] * 2 + ["attention-op"]
        after, _ = rewritten(model, [REWRITES["rotary-op"], REWRITES["attention-op"]])
        assert "Transpose" not in operators(after)


def test_tokens_before_heads():
    def embed(graph, x):
        cos, sin = (t[:, None] for t in angles())
        return graph("Add", graph("Mul", x, cos), graph("Mul", half(graph, x), sin))

    model = attending(embed, fused=False, tokens_first=True)
    assert changed(model, "rotary-op") == ["rotary-op"] * 2


@pytest.mark.parametrize("normed", [False, True])
def test_scaled_heads_whose_pairs_are_stacked_last(normed):
    """A fold moves the scale and the transpose to before the Reshape; keys are transposed in the same step."""

    def embed(graph, x):
        halves = graph("Reshape", x, np.array([0, TOKENS, HEADS, WIDTH // 2, 2]))
        real, imaginary = graph("Split", halves, np.array([1, 1]), outputs=2, axis=-1)
        cos, sin = (t[:, None, ::2, None] for t in angles(interleaved=True))
        parts = (
            graph("Sub", graph("Mul", real, cos), graph("Mul", imaginary, sin)),
            graph("Add", graph("Mul", real, sin), graph("Mul", imaginary, cos)),
        )
        return graph("Reshape", graph("Concat", *parts, axis=-1), np.array([0, TOKENS, HEADS, WIDTH]))

    model = attending(embed, fused=False, tokens_first=True, scaled=True, normed=normed)
    assert changed(model, "rotary-op") == ["rotary-op"] * 2
    folded, _ = rewritten(model, FOLDS)
    assert difference(results(model), results(folded)) <= EXACT
    assert changed(folded, "rotary-op") == ["rotary-op"] * 2


def of_one_image(embed, *, fused=True, heads_first=False, axis=0):
    """Attention of tokens [N, C], as in encoders that pack images into one sequence: a batch axis of 1 comes last."""
    graph, random, channels = Graph(x=[TOKENS, 6]), np.random.default_rng(0), HEADS * WIDTH
    layer = random.standard_normal((6, 3 * channels)) / 3
    x = graph("Reshape", "x", np.array([TOKENS, 6]))
    if fused:
        split = graph("Reshape", graph("MatMul", x, layer), np.array([TOKENS, 3, HEADS, WIDTH]))
        turned = graph("Transpose", split, perm=[1, 0, 2, 3])
        heads = [graph("Gather", turned, np.array(number), axis=0) for number in range(3)]
    else:
        parts = [graph("MatMul", x, part) for part in np.split(layer, 3, 1)]
        heads = [graph("Reshape", part, np.array([TOKENS, HEADS, WIDTH])) for part in parts]
    if heads_first:
        heads = [graph("Transpose", part, perm=[1, 0, 2]) for part in heads]
    heads[:2] = [embed(graph, part) for part in heads[:2]]
    if not heads_first:
        heads = [graph("Transpose", part, perm=[1, 0, 2]) for part in heads]
    q, k, v = (graph("Unsqueeze", part, np.array([axis])) for part in heads)
    scores = graph("Softmax", graph("MatMul", q, graph("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
    return with_batch(graph.model(graph("MatMul", scores, v)), 1)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_tokens_without_an_axis_for_the_batch(fused, heads_first):
    def embed(graph, x):
        cos, sin = (t if heads_first else t[:, None] for t in angles())
        return graph("Add", graph("Mul", x, cos), graph("Mul", half(graph, x), sin))

    model = of_one_image(embed, fused=fused, heads_first=heads_first)
    assert changed(model, "rotary-op") == ["rotary-op"] * 2
    folded, _ = rewritten(model, FOLDS)
    assert changed(folded, "rotary-op") == ["rotary-op"] * 2


def test_the_first_axis_of_three_is_no_batch_where_four_have_another():
    """Heads [H, N, d] that become [H, 1, N, d] are a batch of H; tokens that are mixed are none of a head."""

    def embed(graph, x):
        cos, sin = angles()
        return graph("Add", graph("Mul", x, cos), graph("Mul", half(graph, x), sin))

    def mixed(graph, x):
        cos, sin = (t[:, None] for t in angles())
        moved = graph("Gather", half(graph, x), np.array([1, 0, 2, 3, 4]), axis=0)
        return graph("Add", graph("Mul", x, cos), graph("Mul", moved, sin))

    before = of_one_image(embed, heads_first=True, axis=1)
    after, _ = rewritten(before, [REWRITES["rotary-op"]])
    assert difference(results(before), results(after)) <= EXACT
    assert changed(of_one_image(mixed), "rotary-op") == []


def test_the_positions_of_a_dynamic_batch_are_written_once():
    after, _ = rewritten(attending(in_halves), [REWRITES["rotary-op"]])
    assert operators(after).count("Expand") == 1
    constants = [entry for entry in after.graph.initializer if list(entry.dims) == [TOKENS, WIDTH // 2]]
    assert len(constants) == 2


def test_heads_with_angles_of_their_own():
    def embed(graph, x):
        cos, sin = angles(heads=[HEADS])
        return graph("Add", graph("Mul", x, cos), graph("Mul", half(graph, x), sin))

    for settings in ({}, {"fused": False, "normed": True}, {"scaled": True}):
        model = attending(embed, **settings)
        assert changed(model, "rotary-op", "attention-op") == ["rotary-op"] * 2 + ["attention-op"]


def test_a_factor_of_heads_whose_rest_stays():
    def embed(graph, x):
        return partly(graph, graph("Mul", x, np.array(0.25)))

    assert changed(attending(embed, fused=False), "rotary-op") == ["rotary-op"] * 2


def test_keys_that_several_heads_of_queries_share():
    graph, random = Graph(x=[TOKENS, 6]), np.random.default_rng(0)
    heads = []
    for count in (4, 2, 2):
        part = graph(
            "Reshape", graph("MatMul", "x", random.standard_normal((6, count * WIDTH))), np.array([0, 0, count, -1])
        )
        heads.append(graph("Transpose", part, perm=[0, 2, 1, 3]))
    q, k = (in_halves(graph, part) for part in heads[:2])
    k, v = (
        graph(
            "Reshape",
            graph("Expand", graph("Unsqueeze", part, np.array([2])), np.array([1, 1, 2, 1, 1])),
            np.array([0, 4, TOKENS, WIDTH]),
        )
        for part in (k, heads[2])
    )
    scores = graph("Softmax", graph("MatMul", q, graph("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
    model = graph.model(graph("MatMul", scores, v))
    assert changed(model, "rotary-op") == ["rotary-op"] * 2


def test_angles_that_are_joined_and_repeated_by_the_graph():
    def embed(graph, x):
        parts = graph("Split", np.concatenate(angles(), -1)[:, ::4], np.array([2, 2]), outputs=2, axis=1)
        cos, sin = (
            graph(
                "Reshape",
                graph("Expand", graph("Unsqueeze", part, np.array([2])), np.array([1, 1, 2])),
                np.array([0, -1]),
            )
            for part in parts
        )
        cos, sin = (graph("Concat", part, part, axis=-1) for part in (cos, sin))
        return graph("Add", graph("Mul", x, cos), graph("Mul", half(graph, x), sin))

    assert changed(attending(embed), "rotary-op") == ["rotary-op"] * 2


def test_a_constant_with_more_axes_than_the_tokens_stays():
    graph = Graph(x=[TOKENS, WIDTH])
    cos, sin = (t[None, None] for t in angles())
    a, b = graph("Split", "x", np.array([4, 4]), outputs=2, axis=-1)
    rotated = graph("Add", graph("Mul", "x", cos), graph("Mul", graph("Concat", graph("Neg", b), a, axis=-1), sin))
    model = graph.model(graph("MatMul", rotated, np.random.default_rng(0).standard_normal((1, 1, WIDTH, TOKENS))))
    assert rewritten(model, [REWRITES["rotary-op"]])[1] == []
    assert difference(results(model), results(rewritten(model, FOLDS)[0])) <= EXACT


@pytest.mark.parametrize("fault", ["reflected", "mixed"])
def test_blocks_that_are_not_rotated_alike_stay(fault):
    assert changed(attending(partial(in_blocks, **{fault: True})), "rotary-op") == []


@pytest.mark.parametrize(
    "table",
    [
        lambda cos, sin: (cos, sin, sin, cos),
        lambda cos, sin: (cos, -sin, sin, 2 * cos),
        lambda cos, sin: (sin, -cos, sin, cos),
    ],
)
def test_matrices_of_pairs_that_rotate_nothing_stay(table):
    assert changed(attending(partial(by_matrices, table=table)), "rotary-op") == []


def test_the_sum_of_matrices_along_their_rows_is_the_rotation_by_minus_t():
    """Where a pair is a column, its sum is that of the transposed matrix; a sum of a pair's products is none."""

    def columns(graph, x):
        cos, sin = (t[:, ::2] for t in angles(interleaved=True))
        pair = graph("Reshape", x, np.array([0, HEADS, TOKENS, WIDTH // 2, 2, 1]))
        products = graph("Mul", pair, np.stack((cos, -sin, sin, cos), -1).reshape(TOKENS, WIDTH // 2, 2, 2))
        turned = graph("ReduceSum", products, np.array([-2]), keepdims=1)
        return graph("Reshape", turned, np.array([0, HEADS, TOKENS, WIDTH]))

    assert changed(attending(columns), "rotary-op") == ["rotary-op"] * 2
    assert changed(attending(partial(by_matrices, axis=4)), "rotary-op") == []


def test_pairs_with_two_angles_stay():
    """V-JEPA 2 repeats the angles of its pairs in halves, but mixes neighbors: no pair is rotated by one angle."""

    def embed(graph, x):
        cos, sin = angles()
        return graph("Add", graph("Mul", x, cos), graph("Mul", pairs(graph, x), sin))

    assert changed(attending(embed), "rotary-op") == []


def test_tables_of_blocks_have_a_row_for_each_place():
    """ONNX Runtime refuses a table with fewer rows than the input has places."""
    after, _ = rewritten(attending(in_blocks), [REWRITES["rotary-op"]])
    rows = HEADS * 2 * TOKENS
    tables = [entry for entry in after.graph.initializer if list(entry.dims) == [rows, WIDTH // 4]]
    assert len(tables) == 2
    assert [1, rows] in [list(entry.dims) for entry in after.graph.initializer]


def test_blocks_of_heads_with_angles_of_their_own():
    def embed(graph, x):
        tables = (np.repeat(t[..., : WIDTH // 2].reshape(HEADS, TOKENS, 2, 1, 2), 2, 3) for t in angles(heads=[HEADS]))
        cos, sin = (t.reshape(HEADS, TOKENS, WIDTH) for t in tables)
        parts = [
            graph("Split", part, np.array([2, 2]), outputs=2, axis=-1)
            for part in graph("Split", x, np.array([4, 4]), outputs=2, axis=-1)
        ]
        moved = graph("Concat", *(one for a, b in parts for one in (graph("Neg", b), a)), axis=-1)
        return graph("Add", graph("Mul", x, cos), graph("Mul", moved, sin))

    for settings in ({}, {"fused": False, "normed": True}, {"scaled": True}):
        assert changed(attending(embed, **settings), "rotary-op") == ["rotary-op"] * 2


def unlike(*, halves=False, sign=False, swapped=False):
    """An embedding with another angle for each half, with the wrong sign, or of swapped tokens."""

    def embed(graph, x):
        cos, sin = angles()
        if halves:
            cos, sin = (np.random.default_rng(1).standard_normal(t.shape) for t in (cos, sin))
        moved = half(graph, x)
        if sign:
            moved = graph("Concat", *graph("Split", x, np.array([4, 4]), outputs=2, axis=-1)[::-1], axis=-1)
        if swapped:
            moved = graph("Gather", moved, np.array([1, 0, 2, 3, 4]), axis=2)
        return graph("Add", graph("Mul", x, cos), graph("Mul", moved, sin))

    return embed


@pytest.mark.parametrize("what", ["halves", "sign", "swapped"])
def test_what_rotates_no_pairs_of_channels_stays(what):
    assert changed(attending(unlike(**{what: True})), "rotary-op") == []


def test_images_that_are_mixed_at_other_batch_sizes_only():
    """Twice transposed and reshaped, heads and images are exchanged, except at batch sizes 1 and 2."""

    def embed(graph, x):
        cos, sin = angles()
        moved = half(graph, x)
        for _ in range(2):
            moved = graph("Reshape", graph("Transpose", moved, perm=[1, 0, 2, 3]), np.array([-1, 2, TOKENS, WIDTH]))
        return graph("Add", graph("Mul", x, cos), graph("Mul", moved, sin))

    graph, random = Graph(x=[TOKENS, 6]), np.random.default_rng(0)
    product = graph("MatMul", "x", random.standard_normal((6, 2 * WIDTH)))
    heads = graph("Transpose", graph("Reshape", product, np.array([-1, TOKENS, 2, WIDTH])), perm=[0, 2, 1, 3])
    model = graph.model(graph("MatMul", embed(graph, heads), random.standard_normal((WIDTH, 3))))
    assert changed(model, "rotary-op") == []


def test_two_computations_that_differ_in_an_input_left_out():
    """1 and 2 are the axes of a Slice, or, with axes left out, its steps: all tokens, or every second one."""
    (cos, sin), random = angles(), np.random.default_rng(0)
    for order in ((True, False), (False, True)):
        graph, outputs = Graph(x=[2, TOKENS, WIDTH]), []
        for by_axes in order:
            ends = np.array([0, 0]), np.array([2**31 - 1] * 2)
            last = (np.array([1, 2]),) if by_axes else ("", np.array([1, 2]))
            part = graph("Slice", half(graph, "x"), *ends, *last)
            moved = graph("Slice", graph("Concat", part, part, axis=1), np.array([0]), np.array([2]), np.array([1]))
            embedded = graph("Add", graph("Mul", "x", cos), graph("Mul", moved, sin))
            outputs.append(graph("MatMul", embedded, random.standard_normal((WIDTH, 3))))
        model = with_batch(graph.model(*outputs), 2)
        assert changed(model, "rotary-op") == ["rotary-op"]


def test_two_computations_that_differ_in_the_number_of_parts():
    def halves(parts):
        def embed(graph, x):
            a, b = graph("Split", x, outputs=parts, axis=-1)[:2]
            a, b = (graph("Slice", part, np.array([0]), np.array([2]), np.array([3])) for part in (a, b))
            cos, sin = (t[:, :2] for t in angles(pairs=2))
            first = graph("Sub", graph("Mul", a, cos), graph("Mul", b, sin))
            second = graph("Add", graph("Mul", b, cos), graph("Mul", a, sin))
            rest = [graph("Slice", x, np.array([n]), np.array([n + 2]), np.array([3])) for n in (2, 6)]
            return graph("Concat", first, rest[0], second, rest[1], axis=3)

        return embed

    for order in ((2, 4), (4, 2)):
        graph, random = Graph(x=[TOKENS, 6]), np.random.default_rng(0)
        outputs = []
        for parts in order:
            product = graph("MatMul", "x", random.standard_normal((6, HEADS * WIDTH)))
            heads = graph(
                "Transpose", graph("Reshape", product, np.array([-1, TOKENS, HEADS, WIDTH])), perm=[0, 2, 1, 3]
            )
            outputs.append(graph("MatMul", halves(parts)(graph, heads), random.standard_normal((WIDTH, 3))))
        model = graph.model(*outputs)
        model.opset_import[0].version = 13
        before = results(model)
        assert all(entry is not None for entry in before)
        assert difference(before, results(rewritten(model, [REWRITES["rotary-op"]])[0])) <= EXACT


def test_channels_of_the_next_token_are_none_of_a_head():
    graph, (cos, sin) = Graph(x=[TOKENS, WIDTH]), angles()
    cos[-1], sin[-1] = 0, 0

    def rolled():
        flat = graph("Reshape", "x", np.array([0, -1]))
        ends = ((2, 2**31 - 1), (0, 2))
        parts = [graph("Slice", flat, np.array([a]), np.array([b]), np.array([1])) for a, b in ends]
        tokens = graph("Reshape", graph("Concat", *parts, axis=1), np.array([-1, TOKENS, 1, WIDTH]))
        return graph("Transpose", tokens, perm=[0, 2, 1, 3])

    embedded = graph("Add", graph("Mul", rolled(), cos), graph("Mul", half(graph, rolled()), sin))
    model = graph.model(graph("MatMul", embedded, np.random.default_rng(0).standard_normal((WIDTH, 3))))
    assert changed(model, "rotary-op") == []


def test_no_tokens_and_double_precision():
    def embed(graph, x):
        cos, sin = (t[:0] for t in angles())
        none = graph("Slice", x, np.array([0]), np.array([0]), np.array([2]))
        turned = graph("Add", graph("Mul", none, cos), graph("Mul", half(graph, none), sin))
        return graph("Concat", turned, x, axis=2)

    for rewrites in ([REWRITES["rotary-op"]], FOLDS):
        model = attending(embed)
        assert difference(results(model), results(rewritten(model, rewrites)[0])) <= EXACT
    assert rewritten(attending(in_halves), [ALL_REWRITES["rotary-op"]])[1] == []


@pytest.mark.parametrize(
    ("operator", "given"),
    [
        ("Slice", ([-1], [-(2**31)], [0], [-1])),  # the images backwards
        ("Reshape", ([1, HEADS, TOKENS, WIDTH],)),  # which fits a single image only
    ],
)
def test_what_moves_images_stays(operator, given):
    def embed(graph, x):
        cos, sin = angles()
        moved = graph(operator, half(graph, x), *map(np.array, given))
        return graph("Add", graph("Mul", x, cos), graph("Mul", moved, sin))

    for batch in (None, 2):
        if batch != 2 or operator == "Slice":
            assert rewritten(attending(embed, batch=batch), [REWRITES["rotary-op"]])[1] == []


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
@pytest.mark.parametrize("embed", FORMS)
def test_what_is_nearly_an_embedding_computes_the_same(embed, seed):
    random = np.random.default_rng([seed, FORMS.index(embed)])
    model, tried = attending(embed, seed=seed), 0
    for _ in range(40):
        mutant = Mutant(model, random).mutate()
        expected = None if mutant is None else results(mutant)
        if expected is None or any(entry is None for entry in expected):
            continue
        tried += 1
        after, changes = rewritten(mutant, [REWRITES["rotary-op"]])
        if changes:
            assert difference(expected, results(after)) <= EXACT
    assert tried > 5
