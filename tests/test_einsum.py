"""einsum: an Einsum becomes MatMul, Conv, Mul, ReduceSum or Transpose; what is not quite one of them stays."""

from __future__ import annotations

from random import Random

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from test_fold_onnx import graph

import repaconv as rc
from repaconv.graph.compute_costs import macs
from repaconv.graph.element_type_conversion import retyped
from repaconv.graph.models_in_onnx_ir import read, rewritten
from repaconv.rewrites.fold.einsum_products import EINSUM
from repaconv.rewrites.fold.fold_pipeline import FOLDS
from repaconv.verification.float64_graphs import ReferenceEvaluation

RANDOM = np.random.default_rng(0)
SIZES = {each: size for size, each in enumerate("bhijnmdcgkowxylAB", start=2)} | {"u": 1}


def network(equation, constants="", dynamic="", shapes=None):
    """A graph of one Einsum, and random inputs.

    Args:
        equation: Its equation.
        constants: Its operands that are constants, of x and y.
        dynamic: The letters of dynamic size.
        shapes: The shapes of its operands, if they are not those of the letters.
    """
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    names = "xyz"[: len(terms)]
    shapes = shapes or [[SIZES[each] for each in term] for term in terms]
    arrays = {name: RANDOM.standard_normal(shape) for name, shape in zip(names, shapes, strict=True)}
    known = {
        name: [letter if letter in dynamic else size for letter, size in zip(term, shape, strict=False)]
        if dynamic
        else shape
        for name, term, shape in zip(names, terms, shapes, strict=True)
    }
    model = graph(
        [("Einsum", " ".join(names), "y0", {"equation": equation})],
        {name: arrays[name] for name in constants},
        {name: known[name] for name in names if name not in constants},
        ["y0"],
    )
    return model, {name: arrays[name] for name in names if name not in constants}


def folded(model, feeds, rewrites=(EINSUM,)):
    """The graph after folding; in float64 it must compute the same, in the same shape."""
    after, _ = rewritten(model, rewrites)
    onnx.checker.check_model(after, full_check=True)
    before, behind = (ReferenceEvaluation(each).run(feeds)["y0"] for each in (model, after))
    assert behind.shape == before.shape
    np.testing.assert_allclose(behind, before, rtol=0, atol=1e-12 * np.abs(before).max(initial=1))
    return after


def kinds(model):
    return " ".join(node.op_type for node in model.graph.node)


MATRIX = [
    ("b i d, b j d -> b i j", "", "", "Transpose MatMul"),  # attention
    ("b h i d, b h j d -> b h i j", "", "b", "Transpose MatMul"),
    ("b h i j, b h j d -> b h i d", "", "bij", "MatMul"),
    ("bid,bjd->bji", "", "", "Transpose MatMul"),  # of swapped operands
    ("bij,bjd->bdi", "", "", "Transpose Transpose MatMul"),
    ("bnhd,bmhd->bhnm", "", "", "Transpose Transpose MatMul"),
    ("bhnm,bmhd->bnhd", "", "bnm", "Transpose MatMul Transpose"),
    ("AB,Bi->Ai", "", "", "MatMul"),
    ("ij,jk", "", "", "MatMul"),
    ("ij,jk->ki", "", "", "Transpose Transpose MatMul"),
    ("bnd,do->bno", "y", "bn", "MatMul"),  # tokens
    ("bnd,od->bno", "y", "b", "MatMul"),
    ("od,bnd->bno", "x", "b", "MatMul"),
    ("bhwxd,od->bhwxo", "y", "bhw", "MatMul"),
    ("bcl,oc->bol", "y", "b", "MatMul"),
    ("bchw,oc->bohw", "y", "bhw", "Conv"),  # pixels
    ("BA,bAhw->bBhw", "x", "b", "Conv"),
    ("bhij,hg->bgij", "y", "b", "Reshape MatMul Reshape"),  # talking heads
    ("bhwc,hkc->bhwk", "y", "b", "MatMul"),  # relative positions
    ("bhwc,wkc->bhwk", "y", "b", "Transpose Reshape MatMul Reshape Transpose"),
    ("bhwc,wkc->bhwk", "y", "bh", "Transpose MatMul Transpose"),
    ("bhnd,hmn->bhmd", "y", "b", "MatMul"),
    ("bnhc,hcd->bhnd", "y", "bn", "Transpose MatMul"),
    ("bkc,bchw->bkhw", "", "b", "Reshape MatMul Reshape"),  # masks of queries
    ("bhwcd,cdo->bhwo", "y", "bh", "Reshape MatMul"),  # several contracted axes
    ("bcij,bijk->bck", "", "b", "Reshape Reshape MatMul"),
    ("bhcij,bhck->bhkij", "", "b", "Transpose Reshape MatMul Reshape"),
    ("bn,bnd->bd", "", "b", "Reshape MatMul Reshape"),
    ("bhnu,bhun->bhn", "", "b", "Transpose Mul ReduceSum"),
]
OTHERS = [
    ("ij,ij->", "", "", "Mul ReduceSum"),
    ("bij,bij->b", "", "b", "Mul ReduceSum"),
    ("bij,bji->b", "", "", "Transpose Mul ReduceSum"),
    ("i,j->ij", "", "", "Reshape Mul"),
    ("bi,bj->bji", "", "b", "Reshape Reshape Mul"),
    ("bij,b->bij", "y", "", "Mul"),
    ("bij,bij->bji", "", "", "Mul Transpose"),
    ("ij,->ij", "", "i", "Mul"),
    ("ij,k->ki", "", "", "ReduceSum Reshape Mul"),
    ("bijm,bjd->bid", "", "b", "ReduceSum MatMul"),
    ("bij->bji", "", "b", "Transpose"),
    ("bij->jb", "", "b", "ReduceSum Transpose"),
    ("bij->bij", "", "b", "Identity"),
    ("bi->", "", "b", "ReduceSum"),
]


@pytest.mark.parametrize(("equation", "constants", "dynamic", "wanted"), MATRIX + OTHERS)
def test_an_einsum_is_written_as_other_operators(equation, constants, dynamic, wanted):
    assert kinds(folded(*network(equation, constants, dynamic))) == wanted


def test_an_einsum_that_returns_its_operand_is_written_as_nothing():
    rows = [("Relu", "x", "a"), ("Einsum", "a", "b", {"equation": "ij->ij"}), ("Sin", "b", "y")]
    after, changes = rewritten(graph(rows, {}, {"x": (2, 3)}), [EINSUM])
    assert (kinds(after), [change.description for change in changes]) == ("Relu Sin", ["ij->ij: its operand"])
    after, _ = rewritten(graph(rows[:2], {}, {"x": (2, 3)}, ["b"]), [EINSUM])
    assert (kinds(after), after.graph.node[0].output) == ("Relu", ["b"])


@pytest.mark.parametrize(
    ("equation", "shapes", "wanted"),
    [
        ("...ij,...jk->...ik", [(2, 3, 4, 5), (2, 3, 5, 6)], "MatMul"),
        ("...id,...jd->...ij", [(2, 4, 5), (2, 3, 5)], "Transpose MatMul"),
        ("...ij,jk->...ik", [(2, 3, 4, 5), (5, 6)], "MatMul"),
        ("...ij,...jk", [(2, 4, 5), (2, 5, 6)], "MatMul"),
        ("b...c,...cd->b...d", [(2, 3, 4, 5), (4, 5, 6)], "Transpose Reshape MatMul Reshape Transpose"),
        ("...ij,...jk->...ik", [(4, 5), (5, 6)], "MatMul"),
        ("...ij,...jk->...ik", [(3, 4, 5), (2, 3, 5, 6)], "MatMul"),
        ("i...->...i", [(2, 3, 4)], "Transpose"),
        ("...ij,...jk->...ik", [(2, 4, 5), (1, 5, 6)], "Einsum"),  # repeated along the axis of size 1
    ],
)
def test_an_ellipsis_is_batch_axes(equation, shapes, wanted):
    assert kinds(folded(*network(equation, shapes=shapes))) == wanted


@pytest.mark.parametrize(
    ("equation", "dynamic", "shapes"),
    [
        ("ii->i", "", None),
        ("ii,ij->ij", "", None),
        ("ij,jk,kl->il", "", None),
        ("bxyc,bijc->bxyij", "bxyij", None),  # several dynamic axes of one matrix
        ("aB,Bc", "", [(2, 3), (3, 4)]),  # sorted otherwise by NumPy than by ONNX Runtime
        ("ij,jk->ik", "", [(3, 1), (4, 5)]),
    ],
)
def test_another_equation_stays(equation, dynamic, shapes):
    assert kinds(folded(*network(equation, dynamic=dynamic, shapes=shapes))) == "Einsum"


def test_sizes_that_may_differ_stay():
    model = graph([("Einsum", "x y", "y0", {"equation": "ij,jk->ik"})], {}, {"x": ("a", "b"), "y": ("c", 5)}, ["y0"])
    feeds = {"x": RANDOM.standard_normal((3, 4)), "y": RANDOM.standard_normal((4, 5))}
    assert kinds(folded(model, feeds)) == "Einsum"


def test_an_einsum_of_integers_or_of_constants_stays():
    rows = [("Einsum", "x y", "y0", {"equation": "ij,jk->ik"})]
    model = graph(rows, {}, {"x": (2, 3), "y": (3, 4)}, ["y0"], kind=TensorProto.INT64)
    assert kinds(rewritten(model, [EINSUM])[0]) == "Einsum"
    model, feeds = network("ij,jk->ik", "xy")
    assert kinds(folded(model, feeds)) == "Einsum"


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE])
@pytest.mark.parametrize(("equation", "wanted"), [("bnd,od->bno", "MatMul"), ("bAhw,BA->bBhw", "Conv")])
def test_types_stay(kind, equation, wanted):
    model, _ = network(equation, "y")
    model = retyped(model, {TensorProto.DOUBLE: kind})
    after, _ = rewritten(model, [EINSUM])
    onnx.checker.check_model(after, full_check=True)
    assert {weight.data_type for weight in after.graph.initializer} - {TensorProto.INT64} == {kind}
    assert after.graph.output[0].type.tensor_type.elem_type == kind
    takes_it = wanted == "MatMul" or kind != TensorProto.BFLOAT16  # which Conv lacks in this opset
    assert kinds(after) == (wanted if takes_it else "Reshape MatMul Reshape")


def random_equation(random):
    """Two operands and an output whose letters have random kinds, in random order."""
    letters = random.sample("bhijnmdcgkAB", random.randint(1, 6))
    operands = [], []
    output = []
    for letter in letters:
        kind = random.choice(["batch", "left", "right", "contracted", "summed"])
        for place in {"left": (0,), "right": (1,), "summed": (random.randint(0, 1),)}.get(kind, (0, 1)):
            operands[place].append(letter)
        output += [letter] if kind in ("batch", "left", "right") else []
    for each in (*operands, output):
        random.shuffle(each)
    return f"{''.join(operands[0])},{''.join(operands[1])}->{''.join(output)}", operands


@pytest.mark.parametrize("seed", range(200))
def test_a_random_equation_is_computed_the_same(seed):
    random = Random(seed)
    equation, operands = random_equation(random)
    constants = random.choice(["", "x", "y"])
    fixed = {letter for name, letters in zip("xy", operands, strict=True) if name in constants for letter in letters}
    dynamic = {letter for letter in "".join(map("".join, operands)) if random.random() < 0.25} - fixed
    after = folded(*network(equation, constants, dynamic))
    assert "Einsum" not in kinds(after) or len(dynamic) > 1


def test_what_a_weight_is_turned_into_is_shared():
    rows = [("Einsum", f"x{each} w", f"e{each}", {"equation": "bnd,od->bno"}) for each in "01"]
    rows += [("Add", "e0 e1", "y0")]
    inputs = {"x0": (2, 3, 4), "x1": (2, 3, 4)}
    model = graph(rows, {"w": RANDOM.standard_normal((5, 4))}, inputs, ["y0"])
    after = folded(model, {name: RANDOM.standard_normal(shape) for name, shape in inputs.items()})
    assert [tuple(weight.dims) for weight in after.graph.initializer] == [(4, 5)]
    rows = [rows[0], ("MatMul", "e0 w", "y0")]
    model = graph(rows, {"w": RANDOM.standard_normal((4, 4))}, {"x0": (2, 3, 4)}, ["y0"])
    after = folded(model, {"x0": RANDOM.standard_normal((2, 3, 4))})
    assert len(after.graph.initializer) == 1  # read in its own order as well
    assert kinds(after) == "Transpose MatMul MatMul"


NORM = {name: RANDOM.random(6) + 0.5 for name in ("scale", "shift", "mean", "variance")}


@pytest.mark.parametrize(
    ("equation", "shape", "weight", "last", "wanted"),
    [
        ("bchw,oc->bohw", (2, 3, 4, 5), (6, 3), "BatchNormalization", "Conv"),
        ("bcl,oc->bol", (2, 3, 4), (6, 3), "BatchNormalization", "Conv"),
        ("bnd,do->bno", (2, 3, 4), (4, 6), "Mul", "MatMul"),
        ("bnd,od->bno", (2, 3, 4), (6, 4), "Mul", "MatMul"),
        ("bnd,mn->bmd", (2, 3, 4), (6, 3), "column", "Conv"),
    ],
)
def test_what_follows_a_weight_folds_into_it(equation, shape, weight, last, wanted):
    rows = [("Einsum", "x w", "e", {"equation": equation})]
    if last == "BatchNormalization":
        rows += [("BatchNormalization", "e scale shift mean variance", "y0")]
    else:
        rows += [("Mul", "e column" if last == "column" else "e scale", "y0")]
    weights = {"w": RANDOM.standard_normal(weight), "column": RANDOM.random((6, 1)), **NORM}
    model = graph(rows, weights, {"x": shape}, ["y0"])
    assert kinds(folded(model, {"x": RANDOM.standard_normal(shape)}, FOLDS)) == wanted


def attention():
    rows = [("MatMul", f"x w{each}", each) for each in "qkv"]
    rows += [("Einsum", "q k", "s", {"equation": "b i d, b j d -> b i j"}), ("Mul", "s half", "t")]
    rows += [("Softmax", "t", "p", {"axis": -1}), ("Einsum", "p v", "o", {"equation": "b i j, b j d -> b i d"})]
    rows += [("MatMul", "o wo", "y0")]
    weights = {f"w{each}": RANDOM.standard_normal((16, 16)) for each in "qkvo"}
    return graph(rows, {**weights, "half": np.array(0.5)}, {"x": ("b", 7, 16)}, ["y0"])


def test_a_file_of_attention_folds_and_is_verified():
    onnx.save(retyped(attention(), {TensorProto.DOUBLE: TensorProto.FLOAT}), "net.onnx")
    done = rc.fold("net.onnx", measure=False)
    assert done.verdict == "passed"
    assert "einsum" in done.applied
    assert not done.reverted
    assert "Einsum" not in done.operators
    assert done.macs[0] >= done.macs[1]


def test_multiplications_of_an_einsum_count():
    model, _ = network("bid,bjd->bij", "y", "i")
    b, j, d = (SIZES[each] for each in "bjd")
    assert macs(read(model)) == macs(read(folded(*network("bid,bjd->bij", "y", "i")))) == b * j * d
    assert macs(read(network("ij,ij->ij")[0])) == 0
