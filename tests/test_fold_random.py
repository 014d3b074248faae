"""Folding random graphs of affine maps, masks, norms and activations over channels is exact in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from repaconv.forms.folds.fold import FOLDS
from repaconv.forms.graph import rewritten

TOKENS = ("linear", "add", "scale", "sum", "difference", "act", "split", "concat", "pick", "norm", "batchnorm", "mask")


class Maker:
    """A random graph on tokens [2, 3, c], or on images [2, c, 4, 2]; every value has its own number of channels."""

    def __init__(self, seed: int, *, image: bool) -> None:
        self.random, self.image, self.axis = np.random.default_rng(seed), image, 1 if image else 2
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.widths = {"x": int(self.random.integers(1, 6))}

    def constant(self, *shape: int, array: np.ndarray | None = None) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = self.random.standard_normal(shape) if array is None else array
        return name

    def node(self, operator: str, inputs: list[str], width: int, **attributes) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        self.widths[name] = width
        return name

    def vector(self, width: int) -> str:
        return self.constant(width, *([1, 1] if self.image else []))

    def add(self, kind: str) -> None:
        value = list(self.widths)[-1] if self.random.random() < 0.6 else self.random.choice(list(self.widths))
        width, out = self.widths[value], int(self.random.integers(1, 7))
        alike = self.random.choice([name for name, other in self.widths.items() if other == width])
        if kind == "linear":
            weight = self.constant(out, width, 1, 1) if self.image else self.constant(width, out)
            self.node("Conv" if self.image else "MatMul", [value, weight], out)
        elif kind in ("add", "scale"):
            self.node("Add" if kind == "add" else "Mul", [self.vector(width), value], width)
        elif kind in ("sum", "difference"):
            self.node("Add" if kind == "sum" else "Sub", [value, alike], width)
        elif kind == "act":
            self.node(self.random.choice(["Relu", "Gelu"]), [value], width)
        elif kind == "split" and width > 1:
            ends = (np.array([n]) for n in (0, width - 1, self.axis))
            self.node("Slice", [value, *(self.constant(array=end) for end in ends)], width - 1)
        elif kind == "concat":
            other = self.random.choice(list(self.widths))
            self.node("Concat", [value, other], width + self.widths[other], axis=self.axis)
        elif kind == "pick":
            self.node("Gather", [value, self.constant(array=self.random.integers(0, width, out))], out, axis=self.axis)
        elif kind == "norm" and not self.image:
            self.node("LayerNormalization", [value, self.constant(width), self.constant(width)], width)
        elif kind == "batchnorm":
            parts = [*(self.constant(width) for _ in range(3)), self.constant(array=self.random.random(width) + 0.3)]
            turned = value if self.image else self.node("Transpose", [value], 0, perm=[0, 2, 1])
            found = self.node("BatchNormalization", [turned, *parts], width if self.image else 0)
            if not self.image:
                self.node("Transpose", [found], width, perm=[0, 2, 1])
                del self.widths[turned], self.widths[found]
        elif kind == "mask":
            mask = (self.random.random(width) < 0.5).reshape(-1, *([1, 1] if self.image else []))
            self.node("Where", [self.constant(array=mask), value, alike], width)

    def model(self) -> onnx.ModelProto:
        for kind in self.random.choice(TOKENS, int(self.random.integers(3, 16))):
            self.add(kind)
        last = self.node("Identity", [list(self.widths)[-1]], 1)
        shape = [2, self.widths["x"], 4, 2] if self.image else [2, 3, self.widths["x"]]
        ends = ([helper.make_tensor_value_info(n, TensorProto.DOUBLE, s)] for n, s in (("x", shape), (last, None)))
        tensors = [numpy_helper.from_array(array, name) for name, array in self.weights.items()]
        graph = helper.make_graph(self.nodes, "g", *ends, tensors)
        whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        return onnx.shape_inference.infer_shapes(whole)


@pytest.mark.parametrize("image", [False, True])
def test_random_graphs(image):
    folds = 0
    for seed in range(60):
        model = Maker(seed, image=image).model()
        after, changes = rewritten(model, FOLDS)
        onnx.checker.check_model(after, full_check=True)
        folds += len(changes)
        shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
        x = np.random.default_rng(seed).standard_normal(shape)
        a, b = (ReferenceEvaluator(one).run(None, {"x": x})[0] for one in (model, after))
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= 1e-11 * max(np.abs(a).max(), 1.0), seed
    assert folds > 60
