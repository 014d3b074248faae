"""Four mutation operators for Python code, and the import of a mutated module in a process.

A changed module is compiled from its changed syntax tree when it is first imported, so that everything in it can be
changed: tables of a module, defaults of arguments, and functions within functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

SWAPPED, NEGATED, OFF_BY_ONE, DROPPED = "swapped arguments", "negated condition", "off by one", "dropped term"
OPERATORS = (SWAPPED, NEGATED, OFF_BY_ONE, DROPPED)
LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)
SUMS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.MatMult, ast.BitOr, ast.BitAnd)


class Change(NamedTuple):
    """A change of a file.

    Attributes:
        function: The qualified name of the function it is in; empty for code of the module or of a class.
        lines: The line of what is changed, of its statement, and the first one that runs with its function.
        number: Which of the file's changes it is.
    """

    operator: str
    function: str
    lines: tuple[int, int, int]
    number: int
    was: str
    becomes: str


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in the place of an expression or a statement, and by which operator."""
    match node:
        case ast.Call(args=[_, _, *_]) if not any(isinstance(each, ast.Starred) for each in node.args):
            for place in range(len(node.args) - 1):
                args = [*node.args]
                args[place : place + 2] = args[place + 1], args[place]
                yield SWAPPED, ast.Call(node.func, args, node.keywords)
        case ast.BoolOp():
            yield NEGATED, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
            for values in _less_one(node.values):
                yield DROPPED, values[0] if len(values) == 1 else ast.BoolOp(node.op, values)
        case ast.IfExp():
            yield NEGATED, ast.IfExp(_not(node.test), node.body, node.orelse)
        case ast.If() | ast.While():
            yield NEGATED, type(node)(_not(node.test), node.body, node.orelse)
            if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], LEAVES):
                yield DROPPED, ast.Pass()
        case ast.comprehension():
            for place, test in enumerate(node.ifs):
                ifs = [*node.ifs[:place], _not(test), *node.ifs[place + 1 :]]
                yield NEGATED, ast.comprehension(node.target, node.iter, ifs, node.is_async)
            for less in _less_one(node.ifs):
                yield DROPPED, ast.comprehension(node.target, node.iter, less, node.is_async)
        case ast.match_case(guard=ast.expr()):
            yield NEGATED, ast.match_case(node.pattern, _not(node.guard), node.body)
        case ast.Constant() if type(node.value) is int:
            yield from ((OFF_BY_ONE, ast.Constant(node.value + by)) for by in (1, -1))
        case ast.BinOp() if isinstance(node.op, SUMS):
            yield DROPPED, node.left
            yield DROPPED, ast.UnaryOp(ast.USub(), node.right) if isinstance(node.op, ast.Sub) else node.right
        case ast.List() | ast.Tuple() | ast.Set() if not isinstance(getattr(node, "ctx", None), ast.Store):
            for values in _less_one(node.elts) if len(node.elts) > 1 else ():
                yield DROPPED, type(node)(values, *([] if isinstance(node, ast.Set) else [node.ctx]))
        case ast.Dict() if len(node.keys) > 1:
            for keys, values in zip(_less_one(node.keys), _less_one(node.values), strict=True):
                yield DROPPED, ast.Dict(keys, values)
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield DROPPED, ast.Pass()
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield DROPPED, ast.Pass()
    if isinstance(node, ast.Call):
        for keywords in _less_one(node.keywords):
            yield DROPPED, ast.Call(node.func, node.args, keywords)
        if isinstance(node.func, ast.Name) and node.func.id == "range":
            for place, each in enumerate(node.args):
                if not isinstance(each, ast.Constant):
                    args = [*node.args[:place], _plus(each, 1), *node.args[place + 1 :]]
                    yield OFF_BY_ONE, ast.Call(node.func, args, node.keywords)
    if isinstance(node, ast.Slice):
        for bound in ("lower", "upper"):
            if (each := getattr(node, bound)) is not None and not isinstance(each, ast.Constant):
                bounds = {"lower": node.lower, "upper": node.upper, "step": node.step, bound: _plus(each, 1)}
                yield OFF_BY_ONE, ast.Slice(**bounds)


def _less_one(values: list[Any]) -> Iterator[list[Any]]:
    yield from ([*values[:place], *values[place + 1 :]] for place in range(len(values)))


def _not(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _plus(value: ast.expr, by: int) -> ast.expr:
    return ast.BinOp(value, ast.Add(), ast.Constant(by))


class _Changer(ast.NodeTransformer):
    """Tries all changes of a file; makes the ``wanted`` one."""

    def __init__(self, wanted: int = -1) -> None:
        self.wanted, self.found = wanted, list[Change]()
        self._names: list[str] = []
        self._statement = self._first = 0
        self._in_function = False

    def visit(self, node: ast.AST) -> Any:
        """Words, types and decorators are left as they are."""
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)) or (not self._in_function and _of_types(node)):
            return node
        if isinstance(node, ast.AnnAssign):
            node.value = self.visit(node.value) if node.value else None
            return node
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return self._definition(node)
        if isinstance(node, ast.arguments):
            node.defaults = [self.visit(each) for each in node.defaults]
            node.kw_defaults = [each and self.visit(each) for each in node.kw_defaults]
            return node
        before = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node.lineno
        for operator, other in changes(node):
            if self._note(operator, node, other):
                return ast.copy_location(other, node) if hasattr(node, "lineno") else other
        made = self.generic_visit(node)
        self._statement = before
        return made

    def _definition(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        before = self._first, self._in_function, self._statement
        self._names.append(node.name)
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None and node.body[1:] else node.body
        if isinstance(node, ast.FunctionDef):
            self._first, self._in_function, self._statement = body[0].lineno, True, body[0].lineno
            self.visit(node.args)
        node.body = [self.visit(each) for each in node.body]
        self._names.pop()
        self._first, self._in_function, self._statement = before
        return node

    def _note(self, operator: str, node: ast.AST, other: ast.AST) -> bool:
        words = ast.unparse(node), ast.unparse(ast.fix_missing_locations(other))
        if words[0] == words[1]:
            return False
        line = getattr(node, "lineno", self._statement)
        function = ".".join(self._names) if self._in_function else ""
        self.found.append(Change(operator, function, (line, self._statement, self._first), len(self.found), *words))
        return len(self.found) - 1 == self.wanted


def _of_types(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.Assign) and isinstance(node.value, (ast.Subscript, ast.BinOp)) and any(
        ast.unparse(target)[0].isupper() and not ast.unparse(target).isupper() for target in node.targets
    )  # fmt: skip


def changes_of(path: Path) -> list[Change]:
    """All changes of a file, in its order."""
    changer = _Changer()
    changer.visit(ast.parse(path.read_text()))
    return changer.found


def changed(path: Path, number: int) -> CodeType:
    """The file with one of its changes, compiled."""
    changer = _Changer(number)
    tree = ast.fix_missing_locations(changer.visit(ast.parse(path.read_text())))
    return compile(tree, str(path), "exec", dont_inherit=True)


def plant(path: Path, number: int) -> None:
    """The file, which was not imported yet, will be imported with this change."""
    code, own = changed(path, number), SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        return code if loader.path == str(path) else own(loader, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def lines_of(path: Path) -> set[int]:
    """Lines that a tracer is told of."""
    found, codes = set[int](), [compile(path.read_text(), str(path), "exec", dont_inherit=True)]
    while codes:
        code = codes.pop()
        found.update(line for *_, line in code.co_lines() if line)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found
