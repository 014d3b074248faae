"""ONNX graphs that no exporter writes: external files, endless loops, absurd sizes, and valid graphs with damaged
bytes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import file_damage
import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

import repaconv
from repaconv.stages.inspect.stage import inspect_file
from torture.sandbox import Case

F = TensorProto.FLOAT
SECRET = "root:x:0:0"


def both(path: Path) -> str:
    """What `inspect` and `fold` do with it."""
    inspect_file(path)
    repaconv.fold(path, out=path.parent / "run")
    return "sound"


def value(name: str, *shape: Any, kind: int = F) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def weight(name: str, *shape: int, seed: int = 0) -> TensorProto:
    drawn = np.random.default_rng(seed).standard_normal(shape) / max(np.sqrt(np.prod(shape[1:])), 1)
    return numpy_helper.from_array(drawn.astype(np.float32), name)


def whole(number: Sequence[int] | int, name: str) -> TensorProto:
    return numpy_helper.from_array(np.asarray(number, np.int64), name)


def model(
    nodes: Sequence[NodeProto],
    weights: Sequence[TensorProto] = (),
    inputs: Sequence[onnx.ValueInfoProto] | None = None,
    outputs: Sequence[onnx.ValueInfoProto] | None = None,
    *,
    opset: int = 17,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Sequence[str] = (),
) -> ModelProto:
    inputs = [value("input", "batch", 3, 8, 8)] if inputs is None else inputs
    outputs = [value("y", *[None] * 4)] if outputs is None else outputs
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(weights))
    opsets = [helper.make_opsetid("", opset), *[helper.make_opsetid(domain, 1) for domain in domains]]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(functions))


def convolution() -> ModelProto:
    """Convolution, BatchNorm, ReLU, a shortcut, an average, a linear layer."""
    norm = [weight(name, 4, seed=n) for n, name in enumerate(("s", "b", "m"))]
    variance = numpy_helper.from_array(np.full(4, 1.5, np.float32), "v")
    nodes = [
        helper.make_node("Conv", ["input", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["a", "s", "b", "m", "v"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "w2"], ["e"]),
        helper.make_node("Add", ["e", "d"], ["f"]),
        helper.make_node("GlobalAveragePool", ["f"], ["g"]),
        helper.make_node("Flatten", ["g"], ["h"]),
        helper.make_node("Gemm", ["h", "w3", "b3"], ["y"], transB=1),
    ]
    weights = [weight("w", 4, 3, 3, 3), *norm, variance, weight("w2", 4, 4, 1, 1), weight("w3", 5, 4), weight("b3", 5)]
    return model(nodes, weights, outputs=[value("y", "batch", 5)])


def tokens() -> ModelProto:
    """Two linear layers in a row on tokens."""
    nodes = [
        helper.make_node("MatMul", ["input", "w"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("MatMul", ["c", "w2"], ["y"]),
    ]
    weights = [weight("w", 6, 4), weight("b", 4), weight("w2", 4, 5)]
    return model(nodes, weights, [value("input", "batch", 7, 6)], [value("y", "batch", 7, 5)])


def branching() -> ModelProto:
    """Which branch runs is known when it does."""
    then = helper.make_graph([helper.make_node("Relu", ["a"], ["t"])], "then", [], [value("t", None, 4, 8, 8)])
    other = helper.make_graph([helper.make_node("Neg", ["a"], ["o"])], "else", [], [value("o", None, 4, 8, 8)])
    nodes = [
        helper.make_node("Conv", ["input", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("ReduceSum", ["a"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["if"]),
        helper.make_node("If", ["if"], ["y"], then_branch=then, else_branch=other),
    ]
    zero = numpy_helper.from_array(np.zeros((), np.float32), "zero")
    return model(nodes, [weight("w", 4, 3, 3, 3), zero])


SOUND = {"convolution": convolution, "tokens": tokens, "branching": branching}


# --- hostile ------------------------------------------------------------------------------------------------


def _outside(location: str, **more: str) -> TensorProto:
    tensor = TensorProto(name="w", data_type=F, dims=[4, 3, 3, 3], data_location=TensorProto.EXTERNAL)
    for key, label in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=label)
    return tensor


def external() -> Iterator[tuple[str, ModelProto]]:
    """Weights that lie elsewhere."""
    conv = [helper.make_node("Conv", ["input", "w"], ["y"])]
    for location in (
        "../secret", "/etc/passwd", "link", "folder", "pipe", "gone", "", ".", "..", "a/../../secret", "c.onnx",
        "\\\\host\\share", "file:///etc/passwd", "a\0b", "x" * 5000, "linked/secret",
    ):  # fmt: skip
        yield f"weights in {location[:20]!r}", model(conv, [_outside(location)])
    for offset, length in (
        ("-1", "432"),
        ("0", "-1"),
        ("0", "x"),
        ("9" * 30, "432"),
        ("0", str(1 << 60)),
        ("1e3", "1"),
    ):
        yield f"weights at {offset[:5]}, {length}", model(conv, [_outside("data", offset=offset, length=length)])
    yield "no place at all", model(conv, [TensorProto(name="w", data_type=F, dims=[4], data_location=1)])
    constant = helper.make_node("Constant", [], ["w"], value=_outside("../secret"))
    yield "weights outside, in a constant", model([constant, *conv])
    then = helper.make_graph([constant], "t", [], [value("w", 4, 3, 3, 3)])
    branch = helper.make_node("If", ["c"], ["z"], then_branch=then, else_branch=then)
    yield "weights outside, in a branch", model([branch, *conv], [numpy_helper.from_array(np.array(True), "c")])
    opsets = [helper.make_opsetid("", 17)]
    hidden = helper.make_function(
        "own", "f", ["x"], ["y"], [constant, helper.make_node("Conv", ["x", "w"], ["y"])], opsets
    )
    called = helper.make_node("f", ["input"], ["y"], domain="own")
    yield "weights outside, in a function", model([called], functions=[hidden], domains=["own"])
    sparse = model([helper.make_node("Relu", ["input"], ["y"])])
    sparse.graph.sparse_initializer.add(values=_outside("../secret"), indices=whole([0], "i"), dims=[4])
    yield "weights outside, sparse", sparse


def knots() -> Iterator[tuple[str, ModelProto]]:
    """Nodes that wait for each other, and calls without an end."""
    relu = partial(helper.make_node, "Relu")
    yield "a cycle", model([relu(["b"], ["a"]), relu(["a"], ["b"]), relu(["b"], ["y"])])
    yield "a node that feeds itself", model([relu(["y"], ["y"])])
    yield "out of order", model([relu(["a"], ["y"]), relu(["input"], ["a"])])
    yield "one output twice", model([relu(["input"], ["y"]), helper.make_node("Neg", ["input"], ["y"])])
    yield "an output of nobody", model([relu(["input"], ["a"])])
    yield "an input of nobody", model([relu(["nobody"], ["y"])])
    yield "no node", model([], outputs=[value("input", "batch", 3, 8, 8)])
    yield "no output", model([relu(["input"], ["y"])], outputs=[])
    yield "no input", model([helper.make_node("Constant", [], ["y"], value=weight("w", 1, 3, 8, 8))], inputs=[])
    yield "two inputs of one name", model([relu(["input"], ["y"])], inputs=[value("input", 1, 3), value("input", 2)])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]

    def function(name: str, *nodes: NodeProto) -> onnx.FunctionProto:
        return helper.make_function("own", name, ["x"], ["y"], list(nodes), opsets)

    def call(name: str, taken: str, given: str) -> NodeProto:
        return helper.make_node(name, [taken], [given], domain="own")

    of = partial(model, domains=["own"])
    yield "a function that calls itself", of([call("f", "input", "y")], functions=[function("f", call("f", "x", "y"))])
    pair = [function("f", call("g", "x", "y")), function("g", call("f", "x", "y"))]
    yield "two functions that call each other", of([call("f", "input", "y")], functions=pair)
    for depth in (20, 200):
        laughs = [function(f"f{n}", call(f"f{n - 1}", "x", "a"), call(f"f{n - 1}", "a", "y")) for n in range(1, depth)]
        laughs = [function("f0", helper.make_node("Relu", ["x"], ["y"])), *laughs]
        yield f"two to the {depth} calls", of([call(f"f{depth - 1}", "input", "y")], functions=laughs)
    yield "a function that is not there", of([call("nobody", "input", "y")])
    plain = helper.make_graph([relu(["input"], ["t"])], "g", [], [value("t", None, 3, 8, 8)])
    for depth in (5, 20):
        inner = plain
        for level in range(depth):
            node = helper.make_node("If", ["c"], [f"n{level}"], then_branch=inner, else_branch=plain)
            inner = helper.make_graph([node], "g", [], [value(f"n{level}", None, 3, 8, 8)])
        node = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=plain)
        yield f"branches in branches, {depth}", model([node], [numpy_helper.from_array(np.array(True), "c")])
    body = (
        [value("i", kind=7), value("c", kind=9), value("x", *[None] * 4)],
        [value("c2", kind=9), value("x2", *[None] * 4)],
    )
    turns = [helper.make_node("Identity", ["c"], ["c2"]), relu(["x"], ["x2"])]
    loop = helper.make_graph(turns, "body", *body)
    for count in (3, 1 << 62):
        node = helper.make_node("Loop", ["n", "yes", "input"], ["y"], body=loop)
        yield (
            f"a loop of {count:,} turns",
            model([node], [whole(count, "n"), numpy_helper.from_array(np.array(True), "yes")]),
        )
    chain = [relu([f"a{n}" if n else "input"], [f"a{n + 1}" if n < 4_000 else "y"]) for n in range(4_001)]
    yield "four thousand nodes in a row", model(chain)


def giants() -> Iterator[tuple[str, ModelProto]]:
    """Sizes that nothing has."""
    big = 1 << 40
    for dims in ([1 << 62], [big, big, big], [-1], [-4, 3, 3, 3], [0, 3, 3, 3], [4, 3, 3], [4, 3, 3, 4], [1] * 300):
        tensor = weight("w", 4, 3, 3, 3)
        del tensor.dims[:]
        tensor.dims.extend(dims)
        yield f"weights of {str(dims)[:40]}", model([helper.make_node("Conv", ["input", "w"], ["y"])], [tensor])
    for shape in (
        (1, 3, big, big),
        (1 << 62, 3, 8, 8),
        (-1, 3, 8, 8),
        (0, 3, 8, 8),
        (1, 3, 0, 8),
        (1, 3, 30_000, 30_000),
    ):
        yield (
            f"an input of {shape}",
            model([helper.make_node("Relu", ["input"], ["y"])], inputs=[value("input", *shape)]),
        )
    shaped = [
        ("ConstantOfShape", ["s"], {}), ("Expand", ["input", "s"], {}), ("Tile", ["input", "s"], {}),
        ("Reshape", ["input", "s"], {}), ("RandomNormalLike", ["input"], {}),
    ]  # fmt: skip
    for kind, taken, more in shaped:
        for sizes in ([1, 3, 1 << 16, 1 << 16], [big, big, 1, 1], [1 << 62] * 4, [-5, 3, 8, 8]):
            nodes = [helper.make_node(kind, taken, ["x"], **more), helper.make_node("Relu", ["x"], ["y"])]
            yield f"{kind} of {sizes}", model(nodes, [whole(sizes, "s")])
    ends = [whole(0, "a"), whole(1 << 50, "b"), whole(1, "c")]
    yield (
        "a range of 2 to 50",
        model([helper.make_node("Range", ["a", "b", "c"], ["y"])], ends, outputs=[value("y", None, kind=7)]),
    )
    pads = [0, 0, 1 << 40, 0, 0, 0, 0, 0]
    yield "a pad of 2 to 40", model([helper.make_node("Pad", ["input", "p"], ["y"])], [whole(pads, "p")])
    for label, more in (
        ("pads", [1 << 40] * 4),
        ("strides", [0, 0]),
        ("dilations", [1 << 40] * 2),
        ("strides", [-1, -1]),
        ("kernel_shape", [1 << 40] * 2),
    ):
        node = helper.make_node("Conv", ["input", "w"], ["y"], **{label: more})
        yield f"a convolution of {label} {more[0]}", model([node], [weight("w", 4, 3, 3, 3)])
    for groups in (0, -1, 2, 1 << 40):
        node = helper.make_node("Conv", ["input", "w"], ["y"], group=groups)
        yield f"a convolution of {groups} groups", model([node], [weight("w", 4, 3, 3, 3)])
    scales = numpy_helper.from_array(np.array([1, 1, 1e6, 1e6], np.float32), "s")
    yield "a resize by a million", model([helper.make_node("Resize", ["input", "", "s"], ["y"])], [scales])


def oddities() -> Iterator[tuple[str, ModelProto]]:
    """Unknown operators, versions, types and names; values that are no numbers."""
    conv = convolution()

    def changed(change: Callable[[ModelProto], Any]) -> ModelProto:
        copy = ModelProto()
        copy.CopyFrom(conv)
        change(copy)
        return copy

    for label in ("Nobody", "", "relu", "Relu\0", "x" * 10_000):
        yield f"an operator {label[:20]!r}", model([helper.make_node(label, ["input"], ["y"])])
    yield (
        "an operator of a domain",
        model([helper.make_node("F", ["input"], ["y"], domain="com.nobody")], domains=["com.nobody"]),
    )
    for version in (0, -1, 1, 6, 7, 12, 13, 21, 22, 99, 1 << 40):
        yield f"opset {version}", changed(lambda m, v=version: setattr(m.opset_import[0], "version", v))
    for version in (0, 1, 2, 3, 99, 1 << 40):
        yield f"format {version}", changed(lambda m, v=version: setattr(m, "ir_version", v))
    yield "no opset", changed(lambda m: m.ClearField("opset_import"))
    yield "two opsets", changed(lambda m: m.opset_import.add(domain="", version=9))
    for kind in (0, 8, 16, 17, 23, 99, -1):
        yield (
            f"an input of type {kind}",
            changed(lambda m, k=kind: setattr(m.graph.input[0].type.tensor_type, "elem_type", k)),
        )
        yield f"weights of type {kind}", changed(lambda m, k=kind: setattr(m.graph.initializer[0], "data_type", k))
    for kind in range(1, 24):
        yield (
            f"a cast to type {kind}",
            model([helper.make_node("Cast", ["input"], ["y"], to=kind)], outputs=[value("y", *[None] * 4, kind=kind)]),
        )
    yield "an input without a type", changed(lambda m: m.graph.input[0].ClearField("type"))
    sequence = helper.make_tensor_sequence_value_info("input", F, None)
    yield "a sequence", model([helper.make_node("SequenceAt", ["input", "i"], ["y"])], [whole(0, "i")], [sequence])
    for label, number in (("NaN", np.nan), ("infinite", np.inf), ("immense", 3e38)):
        for place in range(len(conv.graph.initializer)):

            def put(m: ModelProto, place: int = place, number: float = number) -> None:
                array = numpy_helper.to_array(m.graph.initializer[place]).copy()
                array.flat[0] = number
                m.graph.initializer[place].CopyFrom(numpy_helper.from_array(array, m.graph.initializer[place].name))

            yield f"{label} in {conv.graph.initializer[place].name}", changed(put)

    def variance(m: ModelProto) -> None:
        m.graph.initializer[4].CopyFrom(numpy_helper.from_array(np.full(4, -1, np.float32), "v"))

    yield "a negative variance", changed(variance)
    for label in ("", "a\nb", "\x1b[2J", "\u202eabc", "[bold]", "../../x", "x" * 100_000):

        def rename(m: ModelProto, label: str = label) -> None:
            m.graph.input[0].name = m.graph.node[0].input[0] = label
            m.graph.name = m.producer_name = m.doc_string = label
            m.metadata_props.add(key=label, value=label)

        yield f"names {label[:10]!a}", changed(rename)
    yield "data twice", changed(lambda m: m.graph.initializer[0].float_data.extend([1.0] * 108))
    yield "short data", changed(lambda m: setattr(m.graph.initializer[0], "raw_data", b"abc"))
    yield "no data", changed(lambda m: m.graph.initializer[0].ClearField("raw_data"))
    yield "a weight twice", changed(lambda m: m.graph.initializer.append(m.graph.initializer[0]))
    yield (
        "an attribute of another type",
        changed(lambda m: setattr(m.graph.node[0].attribute[0], "type", AttributeProto.STRING)),
    )
    yield "an attribute without a type", changed(lambda m: m.graph.node[0].attribute[0].ClearField("type"))
    yield "an attribute twice", changed(lambda m: m.graph.node[0].attribute.append(m.graph.node[0].attribute[0]))
    yield (
        "a reference outside a function",
        changed(lambda m: setattr(m.graph.node[0].attribute[0], "ref_attr_name", "x")),
    )
    yield "training", changed(lambda m: m.training_info.add().algorithm.CopyFrom(m.graph))
    yield "no graph", changed(lambda m: m.ClearField("graph"))


FAMILIES = {"outside": external, "a knot": knots, "a giant": giants, "odd": oddities}


def hostile() -> Iterator[Case]:
    for family, each in FAMILIES.items():
        for label, built in each():
            yield Case("ONNX, hostile", f"{family}: {label}", partial(_saved, built), both)


def _saved(built: ModelProto, folder: Path) -> Path:
    """In a folder of its own, with what it may try to reach around it."""
    (folder / "secret").write_text(SECRET * 100)
    inside = folder / "model"
    (inside / "folder").mkdir(parents=True)
    (inside / "link").symlink_to(folder / "secret")
    (inside / "linked").symlink_to(folder)
    (inside / "data").write_bytes(bytes(432))
    os.mkfifo(inside / "pipe")
    (inside / "c.onnx").write_bytes(built.SerializeToString())
    return inside / "c.onnx"


def damaged(count: int, seed: int) -> Iterator[Case]:
    """Bytes of sound graphs, changed."""
    rng = random.Random(seed)
    files = {name: made().SerializeToString() for name, made in SOUND.items()}
    for number in range(count):
        name, change = rng.choice(sorted(files)), rng.choice(file_damage.DAMAGES)
        make = partial(_damaged, files[name], change, rng.choice([1, 1, 2, 5]), rng.randrange(1 << 60))
        yield Case("ONNX, damaged", f"{seed}.{number} {name}: {change.__name__}", make, both)


def _damaged(content: bytes, change: file_damage.Damage, times: int, seed: int, folder: Path) -> Path:
    (folder / "c.onnx").write_bytes(file_damage.changed(content, times, random.Random(seed), change))
    return folder / "c.onnx"
