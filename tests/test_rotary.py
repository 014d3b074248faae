"""Rotary position embeddings, in every way that exporters write them, as one operator, in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from mutants import Mutant, difference, results
from test_forms import EXACT, REWRITES, Graph

from repaconv.graph.element_type_conversion import retyped
from repaconv.graph.model_rewriting import rewritten
from repaconv.rewrites.fold.fold_pipeline import FOLDS

TOKENS, HEADS, WIDTH = 5, 3, 8


def angles(*, tokens=TOKENS, pairs=WIDTH // 2, repeat=np.tile, heads=None):
    """Cosines and sines [N, d], or [H, N, d]; ``repeat`` says where the second channel of a pair is."""
    shape = (tokens, pairs) if heads is None else (heads, tokens, pairs)
    theta = np.random.default_rng(3).standard_normal(shape)
    turned = np.cos(theta), np.sin(theta)
    return [np.concatenate([t, t], -1) if repeat is np.tile else np.repeat(t, 2, -1) for t in turned]


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
    cos, sin = angles(repeat=np.tile)
    return graph("Add", graph("Mul", x, cos), graph("Mul", half(graph, x), sin))


def interleaved(graph, x):
    cos, sin = angles(repeat=np.repeat)
    return graph("Add", graph("Mul", pairs(graph, x), sin), graph("Mul", cos, x))


def by_halves(graph, x):
    """The halves by themselves: x_a cos - x_b sin and x_b cos + x_a sin, joined."""
    (a, b), (cos, sin) = graph("Split", x, np.array([4, 4]), outputs=2, axis=3), (t[:, :4] for t in angles())
    first = graph("Sub", graph("Mul", a, cos), graph("Mul", b, sin))
    return graph("Concat", first, graph("Add", graph("Mul", b, cos), graph("Mul", a, sin)), axis=-1)


def as_complex(graph, x):
    """Real and imaginary parts of products of complex numbers, stacked and flattened."""
    real, imaginary = (every_other(graph, x, start) for start in (0, 1))
    cos, sin = (t[:, ::2] for t in angles(repeat=np.repeat))
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


def behind_prefix(graph, x):
    """Of all tokens but the first two."""
    prefix, tokens = graph("Split", x, np.array([2, TOKENS - 2]), outputs=2, axis=2)
    cos, sin = angles(tokens=TOKENS - 2)
    turned = graph("Add", graph("Mul", tokens, cos), graph("Mul", half(graph, tokens), sin))
    return graph("Concat", prefix, turned, axis=2)


def by_moved_constants(graph, x):
    """Cosines and sines are parts of one constant."""
    cos, sin = graph("Split", np.concatenate(angles(), -1), np.array([WIDTH] * 2), outputs=2, axis=-1)
    return graph("Add", graph("Mul", x, cos), graph("Mul", half(graph, x), sin))


FORMS = (in_halves, interleaved, by_halves, as_complex, partly, behind_prefix, by_moved_constants)


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
    if batch is not None:
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = batch
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    return model


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


def test_the_positions_of_a_dynamic_batch_are_written_once():
    after, _ = rewritten(attending(in_halves), [REWRITES["rotary-op"]])
    assert operators(after).count("Expand") == 1
    constants = [entry for entry in after.graph.initializer if list(entry.dims) == [TOKENS, WIDTH // 2]]
    assert len(constants) == 2


def test_heads_with_angles_of_their_own():
    def embed(graph, x):
        cos, sin = angles(heads=HEADS)
        return graph("Add", graph("Mul", x, cos), graph("Mul", half(graph, x), sin))

    for settings in ({}, {"fused": False, "normed": True}, {"scaled": True}):
        assert changed(attending(embed, **settings), "rotary-op") == ["rotary-op"] * 2


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
    graph, random = Graph(x=[TOKENS, WIDTH]), np.random.default_rng(0)
    cos, sin = (t[None, None] for t in angles())
    a, b = graph("Split", "x", np.array([4, 4]), outputs=2, axis=-1)
    turned = graph("Add", graph("Mul", "x", cos), graph("Mul", graph("Concat", graph("Neg", b), a, axis=-1), sin))
    model = graph.model(graph("MatMul", turned, random.standard_normal((1, 1, WIDTH, TOKENS))))
    changed(model, "rotary-op")
    product = graph("MatMul", turned, graph("Transpose", turned, perm=[0, 1, 3, 2]))
    changed(graph.model(product), "rotary-op")


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
def test_what_turns_no_pairs_of_channels_stays(what):
    assert changed(attending(unlike(**{what: True})), "rotary-op") == []


def test_an_embedding_that_mixes_two_images_stays():
    def embed(graph, x):
        swapped = graph("Reshape", graph("Transpose", x, perm=[1, 0, 2, 3]), np.array([-1, HEADS, TOKENS, WIDTH]))
        return in_halves(graph, swapped)

    for model in (attending(embed), attending(embed, batch=2)):
        changed(model, "rotary-op")  # the embedding itself is one; what comes before it must stay


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

    assert rewritten(attending(embed), [REWRITES["rotary-op"]])[1] == []


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
