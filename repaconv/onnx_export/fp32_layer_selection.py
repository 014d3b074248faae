"""Group quantized layers by module, to measure the int8 error of each group and to keep some in float32.

Groups are identified by module names: rewrites change the nodes of a graph, but keep the module names in theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from repaconv.core.errors import UsageProblem
from repaconv.graph.operator_facts import UNARY
from repaconv.onnx_export.fp16_and_int8 import QUANTIZED

if TYPE_CHECKING:
    import onnx

MOST_GROUPS = 24
"""Maximum number of groups; a deeper network has several adjacent modules in one group."""
FP32_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Shares of the groups that stay in float32; each set contains the previous one."""
_IN_A_BLOCK = re.compile(r".*[./]\d+[./][^./]+")


def module_of(name: str) -> str:
    """Return the module of a block from a node name: blocks.0.attn from blocks.0.attn.qkv/MatMul_7."""
    module = name.rpartition("/")[0] or name
    inside = _IN_A_BLOCK.match(module)
    return inside[0] if inside else module


def groups_of(model: onnx.ModelProto) -> list[tuple[str, ...]]:
    """Return the modules that multiply by weights, in order, in at most `MOST_GROUPS` groups of adjacent ones."""
    weights = {weight.name for weight in model.graph.initializer}
    layers = [n for n in model.graph.node if n.op_type in QUANTIZED and not weights.isdisjoint(n.input)]
    modules = list(dict.fromkeys(module_of(node.name) for node in layers))
    together = -(-len(modules) // MOST_GROUPS)
    return [tuple(modules[start : start + together]) for start in range(0, len(modules), together or 1)]


def nodes_of(model: onnx.ModelProto, modules: Collection[str]) -> list[str]:
    """Return the names of the nodes of these modules that int8 quantizes."""
    return [n.name for n in model.graph.node if n.op_type in QUANTIZED and module_of(n.name) in modules]


def nodes_kept_in_fp32(
    model: onnx.ModelProto,
    patterns: Sequence[str],
    precision: str,
    plain: Callable[[], onnx.ModelProto | None] | None = None,
    *,
    activations: bool = False,
) -> list[str]:
    """Return the names of nodes that ``--keep-fp32`` patterns keep in float32.

    A pattern is the name of a node in the graph rewritten for this precision, the name of a module that contains
    the node, or a glob of such names: ``blocks.0.attn``, ``head``, ``*/Gemm_*``.

    Args:
        model: The float32 graph.
        patterns: The patterns as given.
        precision: int8 converts products and convolutions, other precisions every node.
        plain: Reads the FP32 export, if there is one: the user may have taken node names from it.
        activations: Whether int8 converts activations, too.

    Raises:
        UsageProblem: If a pattern matches nothing, with similar names, or if no node is left in the precision.
    """
    converted = [n for n in model.graph.node if precision != "int8" or n.op_type in QUANTIZED]
    also = [n for n in model.graph.node if n.op_type in (*UNARY, "Clip")] if activations else []
    named = {n.name: _names_of(n.name) for n in (*converted, *also)}
    for pattern in patterns:
        if not any(_matches(names, pattern) for names in named.values()):
            _require_not_of_plain(pattern, plain() if plain else None, model, list(named), precision)
            known = list(dict.fromkeys(name for names in named.values() for name in names))
            near = get_close_matches(pattern, known, 3) or known[:3]
            raise UsageProblem(
                f"--keep-fp32 {pattern} matches no layer that {precision} changes.",
                hint=f"Names that are near: {', '.join(near)}. Give a module's name: rewrites rename the nodes of "
                "model.onnx.",
                code="export.keep-fp32",
            )
    kept = matching(named, patterns)
    if patterns and {n.name for n in converted} <= set(kept):
        raise UsageProblem(
            f"--keep-fp32 {' '.join(patterns)} keeps every layer in FP32 and leaves none in {precision}.",
            hint="Name fewer layers, or export --precision fp32.",
            code="export.keep-fp32",
        )
    return kept


def _require_not_of_plain(
    pattern: str, plain: onnx.ModelProto | None, model: onnx.ModelProto, known: Sequence[str], precision: str
) -> None:
    """Refuse the name of a node that exists in the FP32 export only, and suggest this graph's names.

    It is not mapped automatically, since a rewrite may have split the layer or merged it with others.

    Raises:
        UsageProblem: If the name is such a node.
    """
    nodes = plain.graph.node if plain else ()
    changed = (node for node in nodes if precision != "int8" or node.op_type in QUANTIZED)
    theirs = [node for node in changed if _matches([node.name], pattern)]
    if not theirs:
        return
    values = {value for node in theirs for value in node.output}
    modules = [module for node in theirs if (module := node.name.rpartition("/")[0])]
    same = [node.name for node in model.graph.node if values.intersection(node.output)]
    of_modules = [name for name in known if name.rpartition("/")[0] in modules]
    found = [name for name in dict.fromkeys((*same, *of_modules)) if name in known]
    around = next((module for module in modules if any(module in _names_of(name) for name in known)), "")
    names = [*found[:3], *([f"the module {around}"] if around else [])]
    raise UsageProblem(
        f"--keep-fp32 {pattern} is a node of the FP32 export; the graph for {precision} has other rewrites, and no "
        "node of that name.",
        hint=f"Give {' or '.join(names) or 'the module that it is in'}.",
        code="export.keep-fp32",
    )


def matching(nodes: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the names of nodes that match a ``--keep-fp32`` pattern, in order."""
    return [node for node in nodes if any(_matches(_names_of(node), pattern) for pattern in patterns)]


def _names_of(node: str) -> list[str]:
    """Return the name of a node and of all modules that contain it, innermost first."""
    ends = [place for place, letter in enumerate(node) if letter in "./"]
    return [node, *(node[:end] for end in reversed(ends) if end)]


def _matches(names: Sequence[str], pattern: str) -> bool:
    """Return whether one of the names matches a pattern; a leading slash in a name may be omitted."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name.lstrip("/"), pattern) for name in names)


def growing_sets(groups: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return growing sets of modules that stay in float32.

    Args:
        groups: Groups of modules, the most sensitive first.
    """
    counts = dict.fromkeys(-(-len(groups) * share // 1) for share in FP32_SHARES)
    steps = [groups[: int(count)] for count in counts if count < len(groups)]
    return [tuple(name for group in step for name in group) for step in steps]


def with_int8_rounding(model: onnx.ModelProto, low: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """Return the float32 graph with the inputs of these nodes rounded as in the int8 graph.

    Args:
        model: The float32 graph; it is not modified.
        low: The int8 graph from `repaconv.onnx_export.fp16_and_int8.to_int8`.
        names: Names of the nodes.
    """
    import onnx

    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    made_by = {name: node for node in low.graph.node for name in node.output}
    rounded = {node.name: node for node in low.graph.node if node.name in names}
    nodes: dict[int, onnx.NodeProto] = {}

    def bring(name: str) -> None:
        """Add the nodes that quantize a value, in order."""
        node = made_by.get(name)
        if node is not None and node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            bring(node.input[0])
            nodes[id(node)] = node

    for node in copied.graph.node:
        if node.name in rounded:
            node.input[:2] = rounded[node.name].input[:2]  # the bias has no rounding error in int32
            for name in node.input[:2]:
                bring(name)
        nodes[id(node)] = node
    kept = list(nodes.values())
    used = {name for node in kept for name in node.input}
    stored = {weight.name: weight for weight in (*low.graph.initializer, *copied.graph.initializer)}
    weights = [weight for name, weight in stored.items() if name in used]
    del copied.graph.value_info[:]
    for field, entries in ((copied.graph.node, kept), (copied.graph.initializer, weights)):
        fresh = [type(entry).FromString(entry.SerializeToString()) for entry in entries]
        del field[:]
        field.extend(fresh)
    return copied
