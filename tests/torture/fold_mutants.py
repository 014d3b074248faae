"""Mutants of the code that folds: does the verification of each fold find them?

    PYTHONPATH=tests python -m torture.fold_mutants FOLDER [--count 300] [-o result.json]

One small change in one function (a sign, an operator, a term, an index, a comparison), then folds of small networks
that run that very line, and their exports. Only the verification that every user runs checks the result, and no test.
What passes is then compared with the outputs of the original network by code without the change. An interrupted run
resumes from the folder.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import onnx
import planted_graph_faults
import torch

import repaconv
from repaconv.core.errors import GateFailed, RepaconvError
from torture import graphs, preloaded_imports, result_page
from torture.child_process import in_a_child
from torture.small_checkpoints import net

PACKAGE = Path(repaconv.__file__).parent
MODULE_GROUPS = ("algebra/*.py", "methods/*/paper_equations.py", "rewrites/*/*.py", "graph/*.py", "onnx_export/*.py")
STRATA = (("algebra", "methods"), ("rewrites",), ("graph", "onnx_export"))
"""The papers' algebra, what rewrites a graph, and what sees one (shapes, indexing, attention) or writes it."""
NETWORKS = 4
"""On so many networks that run its line a mistake is tried."""
RESULT = result_page.PLANTED
CHECKPOINTS = ("repavit-mixer", "riformer", "dwconv", "nondeep", "repvgg", "pyra")
GRAPHS = {
    "convolution": graphs.convolution,
    "tokens": graphs.tokens,
    **{name: planted_graph_faults.NETS[name].model for name in ("encoder", "cross", "pixels", "rows", "gated")},
}
Line = tuple[str, int]


class Mutant(NamedTuple):
    """A change: where, of which function, what it was and what it is."""

    file: str
    line: int
    function: str
    number: int
    was: str
    becomes: str


# --- what is run --------------------------------------------------------------------------------------------


def _of_a_checkpoint(name: str, at: Path) -> None:
    torch.save(net(name).whole, at / "c.pth")
    repaconv.fold(at / "c.pth", out=at / "run", settings=net(name).settings)


def _of_a_graph(name: str, at: Path) -> None:
    onnx.save(GRAPHS[name](), at / "c.onnx")
    repaconv.fold(at / "c.onnx", out=at / "run", measure=False)
    repaconv.export(at / "run")


RUNS: dict[str, Callable[[Path], None]] = {
    **{name: partial(_of_a_checkpoint, name) for name in CHECKPOINTS},
    **{name: partial(_of_a_graph, name) for name in GRAPHS},
}


def _result(at: Path) -> list[str]:
    """The hashes of what was written: equal for equal folds."""
    lines = [json.loads(path.read_text()) for path in (at / "run/fold.json", at / "run/export.json") if path.is_file()]
    return [str(each["payload"]["sha256"]) for each in lines]


def sources() -> list[Path]:
    return [path for group in MODULE_GROUPS for path in sorted(PACKAGE.glob(group)) if path.name != "__init__.py"]


def traced(run: str, at: Path) -> tuple[list[Line], list[str]]:
    """The lines of these rooms that a run comes by, and its result."""
    known, seen = {str(path) for path in sources()}, set()

    def line(frame: FrameType, _event: str, _told: Any) -> Any:
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    sys.settrace(lambda frame, *_: line if frame.f_code.co_filename in known else None)
    RUNS[run](at)
    sys.settrace(None)
    return sorted(seen), _result(at)


# --- what is changed ----------------------------------------------------------------------------------------

OTHER: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of an expression."""
    if isinstance(node, ast.BinOp):
        if type(node.op) in OTHER:
            yield ast.BinOp(node.left, OTHER[type(node.op)](), node.right)
        if isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
            yield node.left
        if isinstance(node.op, (ast.Sub, ast.Div, ast.MatMult)):
            yield ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield node.operand
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OTHER:
        yield ast.Compare(node.left, [OTHER[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        yield node.values[0]
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield from (ast.Constant(node.value + by) for by in (1, -1))
    elif isinstance(node, ast.Call) and len(node.args) == 2 and not any(isinstance(a, ast.Starred) for a in node.args):
        yield ast.Call(node.func, node.args[::-1], node.keywords)


class _Change(ast.NodeTransformer):
    """Tries the changes of a function's body one after the other; the ``wanted`` one is made."""

    def __init__(self, wanted: int = -1) -> None:
        self.wanted, self.count = wanted, -1
        self.found: list[tuple[int, str, str]] = []

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.arguments, ast.AnnAssign)):
            return node  # words, defaults and types
        for other in changes(node):
            self.count += 1
            self.found.append((node.lineno, ast.unparse(node), ast.unparse(ast.fix_missing_locations(other))))  # type: ignore[attr-defined]
            if self.count == self.wanted:
                return ast.copy_location(other, node)
        return self.generic_visit(node)


def functions(tree: ast.AST, at: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{at}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{at}{node.name}.")


def mutants_of(path: Path) -> Iterator[Mutant]:
    for name, node in functions(ast.parse(path.read_text())):
        look = _Change()
        for statement in node.body:
            look.visit(statement)
        message = str(path.relative_to(PACKAGE))
        for number, (line, was, becomes) in enumerate(look.found):
            yield Mutant(message, line, name, number, was, becomes)


def plant(mutant: Mutant) -> None:
    """Give the function the other code, whoever holds it."""
    path = PACKAGE / mutant.file
    tree = ast.parse(path.read_text())
    node = dict(functions(tree))[mutant.function]
    change = _Change(mutant.number)
    node.body = [change.visit(statement) for statement in node.body]
    whole = compile(ast.fix_missing_locations(tree), str(path), "exec")
    owner: Any = importlib.import_module(".".join(("repaconv", *path.relative_to(PACKAGE).with_suffix("").parts)))
    *outer, name = mutant.function.split(".")
    for each in outer:
        owner = getattr(owner, each)
    held = vars(owner)[name]
    held = getattr(held, "fget", None) or getattr(held, "__func__", held)
    while hasattr(held, "__wrapped__"):
        held = held.__wrapped__
    held.__code__ = _code(whole, mutant.function)


def _code(whole: CodeType, name: str) -> CodeType:
    for each in whole.co_consts:
        if isinstance(each, CodeType) and each.co_qualname == name:
            return each
        if isinstance(each, CodeType) and name.startswith(f"{each.co_qualname}."):
            return _code(each, name)
    raise LookupError(name)


# --- what becomes of it -------------------------------------------------------------------------------------


def outcome_of(mutant: Mutant, runs: Sequence[str], sound: dict[str, list[str]], folder: Path) -> tuple[str, str]:
    """caught, stopped, the same, as good, or survived; and in which run, or what it said."""
    ended = "the same"
    for run in runs:
        at = folder / run
        at.mkdir(parents=True)
        outcome = in_a_child(partial(_mutated, mutant, run, at))
        if isinstance(outcome, list) and outcome[0] in ("caught", "stopped"):
            return outcome[0], f"{run}: {outcome[1]}"
        if isinstance(outcome, str):
            return "stopped", f"{run}: {outcome[1:]}"
        if outcome != sound[run]:
            verdict = in_a_child(partial(_verified, at))
            if verdict != "passed":
                return "survived", f"{run}: {verdict}"
            ended = "as good"
    return ended, ""


def _mutated(mutant: Mutant, run: str, at: Path) -> list[str]:
    plant(mutant)
    try:
        RUNS[run](at)
    except GateFailed as error:
        return ["caught", error.code]
    except RepaconvError as error:
        return ["stopped", error.code]
    fold = json.loads((at / "run/fold.json").read_text())
    export = at / "run/export.json"
    failed = fold["verdict"] == "failed" or (export.is_file() and json.loads(export.read_text())["verdict"] == "failed")
    return ["caught", "verdict"] if failed else _result(at)


def _verified(at: Path) -> str:
    """By code without the change."""
    return repaconv.verify(at / "run", count=1).verdict


def _left(mutants: list[Mutant], rows: list[dict[str, Any]], count: int) -> list[Mutant]:
    """As many of each of the `STRATA`, less those that were judged."""
    random.Random(20).shuffle(mutants)
    known = {Mutant(*(row[name] for name in Mutant._fields)) for row in rows}
    found: list[Mutant] = []
    for groups in STRATA:
        have = sum(_room(mutant) in groups for mutant in known)
        stratum = [mutant for mutant in mutants if _room(mutant) in groups and mutant not in known]
        found += stratum[: max(count // len(STRATA) - have, 0)]
    return found


def _room(mutant: Mutant) -> str:
    return mutant.file.split("/")[0]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="what was traced and tried")
    options.add_argument("--count", type=int, default=300, help="mutants [default: 300]")
    options.add_argument(
        "-o", "--out", type=Path, default=RESULT, help="[default: benchmarks/results/fold_mutants.json]"
    )
    given = options.parse_args()
    at, count = given.folder, given.count
    at.mkdir(parents=True, exist_ok=True)
    preloaded_imports.up()
    for name in CHECKPOINTS:
        net(name)  # made by code without the change
    known = at / "traced.json"
    if not known.is_file():
        with tempfile.TemporaryDirectory() as scratch:
            found = {}
            for run in RUNS:
                (Path(scratch) / run).mkdir()
                found[run] = in_a_child(partial(traced, run, Path(scratch) / run))
                sys.stdout.write(f"{run}: {len(found[run][0])} lines\n")
        known.write_text(json.dumps(found))
    found = json.loads(known.read_text())
    lines = {run: {tuple(line) for line in seen} for run, (seen, _) in found.items()}
    sound = {run: result for run, (_, result) in found.items()}
    by = {mutant: [run for run in RUNS if (str(PACKAGE / mutant.file), mutant.line) in lines[run]]
          for path in sources() for mutant in mutants_of(path)}  # fmt: skip
    done = at / "done.jsonl"
    rows = [json.loads(line) for line in done.read_text().splitlines()] if done.is_file() else []
    for mutant in _left(sorted(mutant for mutant, runs in by.items() if runs), rows, count):
        scratch = Path(tempfile.mkdtemp())
        ended, message = outcome_of(mutant, by[mutant][:NETWORKS], sound, scratch)
        shutil.rmtree(scratch)
        rows.append({**mutant._asdict(), "ended": ended, "told": message})
        with done.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        if ended == "survived":
            sys.stdout.write(f"{mutant.file}:{mutant.line} {mutant.was} -> {mutant.becomes}: {message}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(Counter(row['ended'] for row in rows))}\n")
    given.out.write_text(json.dumps(rows, indent=1) + "\n")
    if given.out == RESULT:
        result_page.PAGE.write_text(result_page.written(json.loads(result_page.RESULT.read_text())))


if __name__ == "__main__":
    main()
