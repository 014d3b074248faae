"""Sets of ONNX operators by property: elementwise, views, selections, products, norms, reductions.

`repaconv.graph.axis_tracking` maps axes, and `repaconv.graph.index_selections` reads selected positions.
"""

from __future__ import annotations

DEFAULT_DOMAIN = ("", "ai.onnx")
"""The two names of the domain of ONNX's own operators."""
NCHWC = "com.microsoft.nchwc"
"""The domain of ONNX Runtime's convolutions on channels in blocks, which only a file has that an optimizing session
saved."""
OLDEST_OPSET = 13
"""The oldest opset that is folded and exported. Before, axes of Squeeze are attributes, and Softmax differs."""

UNARY = frozenset(
    (
        *("Abs", "Ceil", "Celu", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish"),
        *("LeakyRelu", "Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin"),
        *("Softplus", "Softsign", "Sqrt", "Swish", "Tanh"),
    )
)
"""Elementwise functions of one input, with the same type."""

ARITHMETIC = ("Add", "Sub", "Mul", "Div")
BROADCASTING = frozenset(
    (
        *(*ARITHMETIC, "Pow", "Max", "Min", "Sum", "Where", "And", "Or"),
        *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
    )
)
"""Elementwise operators that broadcast every input to one shape."""
POINTWISE = UNARY | BROADCASTING | frozenset(("Clip", "Cast", "Identity", "Not"))
"""Operators whose output entries depend only on the input entries at the same position, with broadcasting."""

VIEWS = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Flatten")
"""Operators that keep all numbers of the first input, in another order or shape."""
SELECTIONS = ("Slice", "Gather", "Split")
"""Operators that keep some numbers of the first input."""
MOVES = (*VIEWS, *SELECTIONS)

PRODUCTS = ("MatMul", "Gemm", "Conv", "Attention")
"""Matrix products and convolutions, which dominate the run time."""
RECURRENT_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
"""Recurrent layers, and how many matrices each multiplies its input and its state by."""
COUNTED_PRODUCTS = (*PRODUCTS, "ConvTranspose", *RECURRENT_GATES, "Einsum")
"""Operators whose multiplications are counted."""
INTEGER_PRODUCTS = ("MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv")
"""Products of integers."""

REDUCTIONS_OF_OPSET_18 = tuple(
    f"Reduce{name}" for name in ("Mean", "Max", "Min", "L1", "L2", "Prod", "SumSquare", "LogSum", "LogSumExp")
)
"""Reductions whose axes are an attribute before opset 18; those of ReduceSum are an input from opset 13 on."""

ROW_NORMS = ("LayerNormalization", "RMSNormalization")
"""Normalization over the last axes; inputs are data, scale and shift."""
IMAGE_NORMS = ("InstanceNormalization", "GroupNormalization")
"""Normalization over the positions of an image, per channel or group; scale and shift are per channel."""

POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")
REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin")

EPSILON = 9.999999747378752e-06
"""The epsilon of a norm that has none as an attribute: 1e-5 in float32, as all attributes are."""

RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli")
QUANTIZING = ("DequantizeLinear", "QuantizeLinear")
BFLOAT16 = 16
HALVES = (10, BFLOAT16)
"""ONNX's half precisions, float16 and bfloat16."""
FLOATS = (1, 11, *HALVES)
"""Those, float32 and float64."""


def operators_of(domain: str) -> str:
    """Name the operators of a domain, and where they are from if ONNX Runtime's optimizer writes them."""
    saved = (
        ", written by ONNX Runtime when it saved a graph that it had optimized for one CPU" if domain == NCHWC else ""
    )
    return f"operators of {domain}{saved}"
