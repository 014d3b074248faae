"""Simplify graphs with onnxsim or onnxslim; a result is used only if its outputs match in ONNX Runtime."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from repaconv.core.errors import first_line
from repaconv.graph.onnx_files import opset_of, restore_names
from repaconv.graph.operator_facts import DEFAULT_DOMAIN
from repaconv.onnx_export.opset_lowering import lower
from repaconv.onnx_export.target_operator_rules import operator_domains
from repaconv.onnx_export.torch_exporter import check
from repaconv.results import Link

if TYPE_CHECKING:
    import onnx

TOOLS = ("onnxsim", "onnxslim")
"""Simplifiers in the order tried; the second is used if the first is missing or fails."""
SKIPPED_PASSES = [
    *("fuse_qkv", "fuse_attention", "fuse_gqa", "fuse_rope", "fuse_reshape_family"),
    "fuse_consecutive_transposes",
]
"""onnxsim passes that undo rewrites, or write operators that only ONNX Runtime has: the rewrite preset decides whether
layers of one input are merged, which operators are fused, and into which steps a Transpose is divided."""


@dataclass(frozen=True)
class Simplified:
    """The resulting graph, whether it is a simplified one, the simplifier, and the comparison."""

    model: onnx.ModelProto
    accepted: bool
    simplifier: str
    link: Link


def simplify(
    model: onnx.ModelProto,
    compare: Callable[[onnx.ModelProto], Link],
    tools: tuple[str, ...] = TOOLS,
    unsupported_ops: Collection[str] = (),
) -> Simplified:
    """Simplify a graph and compare it with the original; discard it, with a failed link, if its outputs differ.

    Args:
        model: The exported graph.
        compare: Compares a simplified graph with the exported one on the same inputs.
        tools: Some of `TOOLS`, tried in order until one completes. If its result is wrong, no other is tried, and the
            failure is reported.
        unsupported_ops: Operators that the target does not support; if a tool fuses nodes to one of them, it is
            expanded again.
    """
    problems: list[str] = []
    for tool in tools:
        try:
            smaller, name = _run(tool, model)
            if {node.op_type for node in smaller.graph.node} & set(unsupported_ops):
                smaller = lower(smaller, opset_of(smaller), unsupported_ops)
            given, written = (set(operator_domains(each.graph.node)) for each in (model, smaller))
            if strange := written - given - {*DEFAULT_DOMAIN}:
                raise ValueError(f"it wrote operators of {', '.join(sorted(strange))}")
            restore_names(smaller, model)
            _drop_empty_last_inputs(smaller)
            _keep_metadata(smaller, model)
            check(smaller)
            link = compare(smaller)
        except ImportError:
            problems.append(f"{tool} is not installed")
            continue
        except Exception as error:  # any error of native code: the graph stays as it is
            problems.append(f"{tool} failed: {first_line(error)}")
            continue
        if link.verdict == "passed":
            return Simplified(smaller, True, name, link.model_copy(update={"note": "; ".join(problems)}))
        thrown_away = "the simplified graph was discarded; the unsimplified one was written"
        return Simplified(model, False, name, link.noted(thrown_away))
    return Simplified(model, False, "none", not_run_link("; ".join(problems)))


def _run(tool: str, model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """Run a simplifier; return the new graph, and the tool's name and version."""
    if tool == "onnxslim":
        import onnx
        import onnxslim

        level = logging.getLogger().level
        copied = onnx.ModelProto()
        copied.CopyFrom(model)
        try:
            smaller = onnxslim.slim(copied)
        finally:
            logging.getLogger().setLevel(level)
        return smaller, f"onnxslim {onnxslim.__version__}"
    onnxsim = _onnxsim()
    with without_onnxsim_warnings():
        smaller, _ = onnxsim.simplify(model, skipped_optimizers=SKIPPED_PASSES)
    return smaller, f"onnxsim {onnxsim.__version__}"


@contextmanager
def without_onnxsim_warnings() -> Iterator[None]:
    """Keep back onnxsim's lines about constants that it does not compute; all else reaches stderr when it is done.

    Its native code writes one to file descriptor 2 for every node that it leaves as it is, e.g. 16 for a YOLOv8.
    """
    try:
        before = os.dup(2)
    except OSError:  # closed: nothing can be written there
        yield
        return
    with tempfile.TemporaryFile() as written:
        _flush_stderr()
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            _flush_stderr()
            os.dup2(before, 2)
            os.close(before)
            written.seek(0)
            for line in written:
                if not line.startswith(b"WARNING: failed to run "):
                    with suppress(OSError):
                        os.write(2, line)


def _flush_stderr() -> None:
    with suppress(OSError, ValueError, AttributeError):  # full, closed, or None
        sys.stderr.flush()


def _onnxsim() -> Any:
    """Import onnxsim without torch, which takes twice as long as exporting a small network.

    It imports torch, which it does not require, for its bridge to PPQ alone; that one then says that it is unavailable.
    """
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment] # importing it raises ImportError
    try:
        import onnxsim
    finally:
        if hidden:
            del sys.modules["torch"]
    return onnxsim


def _drop_empty_last_inputs(model: onnx.ModelProto) -> None:
    """Remove trailing empty input names, which onnxsim writes when it drops an optional input."""
    for node in model.graph.node:
        while node.input and not node.input[-1]:
            node.input.pop()


def _keep_metadata(smaller: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Give the simplified graph the metadata of the original one: onnxsim adds lists of all nodes that it changed."""
    del smaller.metadata_props[:]
    smaller.metadata_props.extend(model.metadata_props)


def not_run_link(note: str) -> Link:
    """Return the link of a graph that was not simplified."""
    return Link.concluded(
        "not_run", note=note, name="simplified", reference="ONNX as exported", candidate="ONNX simplified"
    )
