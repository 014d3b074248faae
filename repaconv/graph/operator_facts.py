"""What ONNX's own operators do, each fact once: which act on every number by itself, which only move, sum or norm.

Names alone: `repaconv.graph.axis_tracking` says which axis goes where, `repaconv.graph.index_selections` which places
are taken.
"""

from __future__ import annotations

UNARY = frozenset(
    (
        *("Abs", "Ceil", "Celu", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish"),
        *("LeakyRelu", "Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin"),
        *("Softplus", "Softsign", "Sqrt", "Swish", "Tanh"),
    )
)
"""A function of every number of the one input by itself, in its type."""

ARITHMETIC = ("Add", "Sub", "Mul", "Div")
POINTWISE = UNARY | frozenset(
    (
        *(*ARITHMETIC, "Pow", "Max", "Min", "Sum", "Clip", "Where", "Cast", "Identity"),
        *("And", "Or", "Not", "Equal", "Greater", "Less"),
    )
)
"""Operators whose every entry depends on the entries at its place alone, inputs broadcast."""

VIEWS = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Flatten")
"""All numbers of the first input, in another order or shape."""
SELECTIONS = ("Slice", "Gather", "Split")
"""Some numbers of the first input."""
MOVES = (*VIEWS, *SELECTIONS)

PRODUCTS = ("MatMul", "Gemm", "Conv", "Attention")
"""What multiplies, next to which all else is free."""
INTEGER_PRODUCTS = ("MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv")
"""The same of integers."""

ROW_NORMS = ("LayerNormalization", "RMSNormalization")
"""Over the last axes; the first input is the data, the others are scale and shift of the last axes."""
IMAGE_NORMS = ("InstanceNormalization", "GroupNormalization")
"""Over the places of an image, by channel or group of channels; scale and shift are one number a channel."""

REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin")

RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli")
QUANTISING = ("DequantizeLinear", "QuantizeLinear")
