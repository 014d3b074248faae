"""Random changes of one step of a graph that a rewrite matches.

Sizes coincide, so that most mutants are valid graphs. Whatever a rewrite makes of one must compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

FREE = ({"batch": 1, "n": 2, "m": 1}, {"batch": 2, "n": 1, "m": 3}, {"batch": 3, "n": 2, "m": 2})
"""Free sizes by name, in three calls: alone, alike, and no two alike."""


def attribute(node, name, default=None):
    return next((helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name), default)


def set_attribute(node, name, value):
    kept = [entry for entry in node.attribute if entry.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


class Mutant:
    """A copy of a graph in which one thing, or a few, are otherwise."""

    def __init__(self, model: onnx.ModelProto, random: np.random.Generator) -> None:
        self.model, self.random = onnx.ModelProto(), random
        self.model.CopyFrom(model)
        self.graph = self.model.graph
        del self.graph.value_info[:]
        self.weights = {weight.name: weight for weight in self.graph.initializer}

    def pick(self, *operators):
        found = [node for node in self.graph.node if node.op_type in (operators or {node.op_type}) and node.input]
        return found[self.random.integers(len(found))] if found else None

    def array(self, name):
        return numpy_helper.to_array(self.weights[name]) if name in self.weights else None

    def constant(self, array):
        name = f"mutant{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        self.weights[name] = self.graph.initializer[-1]
        return name

    def insert(self, operator, place, *inputs, **attributes):
        """A node in front of an input of a node: (node, which input)."""
        node, index = place
        new = helper.make_node(operator, inputs, [f"mutant{len(self.graph.node)}.out"], **attributes)
        at = list(self.graph.node).index(node)
        node.input[index] = new.output[0]
        self.graph.node.insert(at, new)

    # --- what is done otherwise ----------------------------------------------------------------------

    def perm(self):
        node = self.pick("Transpose")
        if node is not None:
            perm = attribute(node, "perm")
            i, j = self.random.choice(len(perm), 2, replace=False)
            perm[i], perm[j] = perm[j], perm[i]
            set_attribute(node, "perm", perm)

    def target(self):
        """The sizes of a Reshape in another order: with it the batch may move."""
        node = self.pick("Reshape")
        array = self.array(node.input[1]) if node is not None else None
        if array is not None and len(array) > 1:
            node.input[1] = self.constant(self.random.permutation(array))

    def axis(self):
        node = self.pick("Softmax", "Split", "Concat", "Gather", "LayerNormalization", "GatherElements", "TopK")
        if node is not None and attribute(node, "axis") is not None:
            set_attribute(node, "axis", attribute(node, "axis") + int(self.random.choice([-1, 1])))

    def places(self):
        """Other integers: starts, ends, axes, indices, parts."""
        node = self.pick("Slice", "Gather", "Split", "ReduceMean", "ReduceSum", "Unsqueeze", "Squeeze", "Reshape")
        index = int(self.random.integers(1, len(node.input))) if node is not None and len(node.input) > 1 else 0
        array = self.array(node.input[index]) if index else None
        if array is not None and array.dtype.kind == "i":
            moved = array + self.random.integers(-1, 2, array.shape)
            node.input[index] = self.constant(self.random.permutation(array) if array.ndim else moved)
            if self.random.random() < 0.5:
                node.input[index] = self.constant(moved)

    def swapped(self):
        node = self.pick("MatMul", "Add", "Mul", "Concat", "Sub", "Div")
        if node is not None and len(node.input) > 1:
            node.input[0], node.input[1] = node.input[1], node.input[0]

    def rewired(self):
        """An input that is another value, computed before."""
        node = self.pick()
        before = [entry.name for entry in self.graph.input]
        for other in self.graph.node:
            if other is node:
                break
            before += other.output
        index = int(self.random.integers(len(node.input)))
        if node.input[index] not in self.weights:
            node.input[index] = self.random.choice(before)

    def broadcast(self):
        """A constant turned: for each token in place of each channel, or over one axis more."""
        node = self.pick("Add", "Mul", "Div", "Sub")
        if node is None:
            return
        for index, name in enumerate(node.input):
            array = self.array(name)
            if array is not None and array.size:
                shape = [self.random.choice([*array.shape, 1]) for _ in range(self.random.integers(0, 5))]
                grown = np.resize(array, shape) if shape else array.reshape(-1)[0]
                node.input[index] = self.constant(np.asarray(grown, array.dtype))

    def scaled(self):
        """A factor between two nodes: a number, or one for each place of an axis."""
        node = self.pick()
        index = int(self.random.integers(len(node.input)))
        if node.input[index] in self.weights:
            return
        shape = [(), (1,), (1, 1), (2,), (2, 1), (2, 1, 1), (1, 1, 1, 1)][self.random.integers(7)]
        factor = self.constant(self.random.standard_normal(shape))
        self.insert(self.random.choice(["Mul", "Div", "Add"]), (node, index), node.input[index], factor)

    def turned(self):
        """Two axes swapped between two nodes, or everything reversed along one."""
        node = self.pick()
        index = int(self.random.integers(len(node.input)))
        if node.input[index] in self.weights:
            return
        if self.random.random() < 0.5:
            rank = int(self.random.integers(2, 5))
            perm = np.arange(rank)
            i, j = self.random.choice(rank, 2, replace=False)
            perm[[i, j]] = perm[[j, i]]
            self.insert("Transpose", (node, index), node.input[index], perm=[int(axis) for axis in perm])
        else:
            axis = int(self.random.integers(-3, 3))
            parts = (self.constant(np.array([n])) for n in (-1, -(2**31), axis, -1))
            self.insert("Slice", (node, index), node.input[index], *parts)

    def freed(self):
        """A size of an input that is free, under its own name, another's or none."""
        dims = self.graph.input[self.random.integers(len(self.graph.input))].type.tensor_type.shape.dim
        dim, name = dims[self.random.integers(len(dims))], self.random.choice(["batch", "n", "m", ""])
        dim.Clear()
        if name:
            dim.dim_param = name

    def read(self):
        """A value on the way is an output as well."""
        node = self.pick()
        value = node.output[self.random.integers(len(node.output))]
        if value not in [entry.name for entry in self.graph.output]:
            self.graph.output.append(helper.make_empty_tensor_value_info(value))

    def mutate(self) -> onnx.ModelProto | None:
        """One or two steps otherwise; None if that is no graph."""
        kinds = [self.perm, self.target, self.axis, self.places, self.swapped, self.rewired, self.broadcast]
        kinds += [self.scaled, self.turned, self.freed, self.read]
        for _ in range(int(self.random.integers(1, 3))):
            kinds[self.random.integers(len(kinds))]()
        try:
            done = onnx.shape_inference.infer_shapes(self.model, data_prop=True, strict_mode=True, check_type=True)
            onnx.checker.check_model(done, full_check=True)
        except Exception:
            return None
        return done


def calls(model: onnx.ModelProto, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Inputs for a graph, at each of `FREE`."""
    random = np.random.default_rng(seed)
    for sizes in FREE:
        yield {
            entry.name: random.standard_normal(
                [dim.dim_value or sizes[dim.dim_param or "m"] for dim in entry.type.tensor_type.shape.dim]
            )
            for entry in model.graph.input
        }


def results(model: onnx.ModelProto, which: slice = slice(None)) -> list[list[np.ndarray] | None]:
    """What a graph computes in each of the calls, or some; None where it does not run."""
    evaluator, found = ReferenceEvaluator(model), []
    for inputs in list(calls(model))[which]:
        try:
            with np.errstate(all="ignore"):
                found.append(evaluator.run(None, inputs))
        except Exception:
            found.append(None)
    return found


def difference(before: list[list[np.ndarray] | None], after: list[list[np.ndarray] | None], floor=1e-3) -> float:
    """The largest relative one, where the first graph runs to finite numbers; inf for another shape, type or none.

    Errors are relative to each output's largest number, or to ``floor``.
    """
    worst = 0.0
    for old, new in zip(before, after, strict=True):
        if old is None or not all(np.isfinite(value).all() for value in old):
            continue
        if new is None or [(v.shape, v.dtype) for v in old] != [(v.shape, v.dtype) for v in new]:
            return float("inf")
        for a, b in zip(old, new, strict=True):
            if a.size:
                worst = max(worst, float(np.abs(a - b).max() / max(np.abs(a).max(), floor)))
    return worst
