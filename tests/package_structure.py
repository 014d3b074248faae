"""The imports between packages. ``python tests/package_structure.py`` writes their table in CONTRIBUTING.md."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "repaconv"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- packages: written by tests/package_structure.py -->\n", "<!-- end of packages -->\n"


@cache
def modules() -> dict[str, Path]:
    """Every module of repaconv by its dotted name."""
    found = {}
    for path in sorted(HOME.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """Modules that a module imports when it runs, at the top or in a function; those for type checkers do not count."""
    tree = ast.parse(modules()[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "repaconv":
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules() else str(node.module) for name in named}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules()}
    return frozenset(found - {module})


def package_of(module: str) -> str:
    """The folder directly under ``repaconv/`` that a module is in; empty for ``repaconv`` itself."""
    return module.partition(".")[2].partition(".")[0]


def packages() -> dict[str, frozenset[str]]:
    """Each package with the other packages that its modules import."""
    names = {path.parent.name for path in HOME.glob("*/__init__.py")}
    found: dict[str, set[str]] = {name: set() for name in names}
    for module in modules():
        if package_of(module) in names:
            found[package_of(module)] |= {package_of(other) for other in imports(module)} & names
    return {name: frozenset(others - {name}) for name, others in found.items()}


def cycles(graph: dict[str, frozenset[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components of more than one node)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def levels() -> dict[str, int]:
    """The level of each package: 0 if it imports no other, else one more than the highest that it imports."""
    graph = packages()

    @cache
    def level(name: str) -> int:
        return 1 + max(map(level, graph[name]), default=-1)

    return {name: level(name) for name in sorted(graph)}


def summary(package: str) -> str:
    """The first sentence of a package's docstring, with what it wraps on one line."""
    said = ast.get_docstring(ast.parse((HOME / package / "__init__.py").read_text())) or ""
    return " ".join(said.partition("\n\n")[0].split())


def table() -> str:
    """The packages by level, as CONTRIBUTING.md shows them."""
    found = levels()
    ordered = sorted(found, key=lambda name: (found[name], name))
    rows = [f"| {found[name]} | `{name}/` | {summary(name)} |" for name in ordered]
    return "\n".join(["| Level | Package | Contents |", "|---|---|---|", *rows]) + "\n"


def written(text: str) -> str:
    """The page with the table of today."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
