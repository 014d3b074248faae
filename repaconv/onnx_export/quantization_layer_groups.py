"""Layers by the module that they are of: how much each group loses in int8, and which stay in float32.

Groups are known by names, for a rewrite of the graph changes its nodes, and leaves the modules that they are named by.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from repaconv.core.errors import UsageProblem
from repaconv.onnx_export.fp16_and_int8 import QUANTIZED

if TYPE_CHECKING:
    import onnx

GROUPS = 24
"""At most as many are looked at: neighbours go together in a deeper network."""
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Of the groups, how many stay in float32: a few steps, each with all of the one before."""
_IN_A_BLOCK = re.compile(r".*[./]\d+[./][^./]+")


def module_of(name: str) -> str:
    """By a node's name, the module of a block that it is of: blocks.0.attn of blocks.0.attn.qkv/MatMul_7."""
    module = name.rpartition("/")[0] or name
    inside = _IN_A_BLOCK.match(module)
    return inside[0] if inside else module


def groups_of(model: onnx.ModelProto) -> list[tuple[str, ...]]:
    """The modules that multiply by weights, in order, `GROUPS` groups of neighbours at most."""
    weights = {weight.name for weight in model.graph.initializer}
    layers = [n for n in model.graph.node if n.op_type in QUANTIZED and not weights.isdisjoint(n.input)]
    modules = list(dict.fromkeys(module_of(node.name) for node in layers))
    together = -(-len(modules) // GROUPS)
    return [tuple(modules[start : start + together]) for start in range(0, len(modules), together or 1)]


def nodes_of(model: onnx.ModelProto, modules: Collection[str]) -> list[str]:
    """Names of their nodes that int8 would compute."""
    return [n.name for n in model.graph.node if n.op_type in QUANTIZED and module_of(n.name) in modules]


def kept_by(
    model: onnx.ModelProto,
    patterns: Sequence[str],
    precision: str,
    plain: Callable[[], onnx.ModelProto | None] | None = None,
) -> list[str]:
    """Names of the nodes that these patterns keep in float32, among those that a precision changes.

    A pattern is the name of a node of the graph as it is rewritten for that precision, or of a module that the node is
    in, or a glob of such names: ``blocks.0.attn``, ``head``, ``*/Gemm_*``.

    Args:
        model: The float32 graph.
        patterns: As they are given.
        precision: int8 changes products with weights, the others every node.
        plain: Reads the FP32 export that the user may have the names from, if there is one.

    Raises:
        UsageProblem: If a pattern matches nothing, with the names that it may mean; or if they leave nothing in that
            precision.
    """
    named = {n.name: _names_of(n.name) for n in model.graph.node if precision != "int8" or n.op_type in QUANTIZED}
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
    if patterns and len(kept) == len(named):
        raise UsageProblem(
            f"--keep-fp32 {' '.join(patterns)} keeps every layer in FP32 and leaves none in {precision}.",
            hint="Name fewer layers, or export --precision fp32.",
            code="export.keep-fp32",
        )
    return kept


def _require_not_of_plain(
    pattern: str, plain: onnx.ModelProto | None, model: onnx.ModelProto, known: Sequence[str], precision: str
) -> None:
    """Refuse a name that a node has in the FP32 export only, with the names of the same layer in this graph.

    It is not taken for these: a rewrite may have made several layers of it, or one of several.

    Raises:
        UsageProblem: With these names.
    """
    nodes = plain.graph.node if plain else ()
    changed = (node for node in nodes if precision != "int8" or node.op_type in QUANTIZED)
    theirs = [node for node in changed if _matches([node.name], pattern)]
    if not theirs:
        return
    values = {value for node in theirs for value in node.output}
    modules = [module for node in theirs if (module := node.name.rpartition("/")[0])]
    same = [node.name for node in model.graph.node if values.intersection(node.output)]
    beside = [name for name in known if name.rpartition("/")[0] in modules]
    found = [name for name in dict.fromkeys((*same, *beside)) if name in known]
    around = next((module for module in modules if any(module in _names_of(name) for name in known)), "")
    names = [*found[:3], *([f"the module {around}"] if around else [])]
    raise UsageProblem(
        f"--keep-fp32 {pattern} is a node of the FP32 export; the graph for {precision} has other rewrites, and no "
        "node of that name.",
        hint=f"Give {' or '.join(names) or 'the module that it is in'}.",
        code="export.keep-fp32",
    )


def matching(nodes: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Names of those nodes that a pattern of ``--keep-fp32`` names, in order."""
    return [node for node in nodes if any(_matches(_names_of(node), pattern) for pattern in patterns)]


def _names_of(node: str) -> list[str]:
    """Of a node: its own name, and those of all modules that it is in, from the innermost on."""
    ends = [place for place, letter in enumerate(node) if letter in "./"]
    return [node, *(node[:end] for end in reversed(ends) if end)]


def _matches(names: Sequence[str], pattern: str) -> bool:
    """A leading slash, which some exporters write, need not be typed."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name.lstrip("/"), pattern) for name in names)


def nested(groups: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Modules that stay in float32, ever more.

    Args:
        groups: The most sensitive first.
    """
    counts = dict.fromkeys(-(-len(groups) * share // 1) for share in SHARES)
    steps = [groups[: int(count)] for count in counts if count < len(groups)]
    return [tuple(name for group in step for name in group) for step in steps]


def only_in_int8(model: onnx.ModelProto, low: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """The float32 graph, but for these nodes, which take what they multiply as the int8 graph rounds it.

    Args:
        model: In float32; it is left as it is.
        low: The same in int8, of `repaconv.onnx_export.fp16_and_int8.to_int8`.
        names: Of nodes.
    """
    import onnx

    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    made_by = {name: node for node in low.graph.node for name in node.output}
    rounded = {node.name: node for node in low.graph.node if node.name in names}
    nodes: dict[int, onnx.NodeProto] = {}

    def bring(name: str) -> None:
        """What rounds that value, and before it what that takes."""
        node = made_by.get(name)
        if node is not None and node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            bring(node.input[0])
            nodes[id(node)] = node

    for node in copied.graph.node:
        if node.name in rounded:
            node.input[:2] = rounded[node.name].input[:2]  # a bias in int32 loses nothing
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
