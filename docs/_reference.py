"""Pages that follow from the code, made when the documentation is built: commands, Python, recipes, codes."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "repaconv"
EXITS = {"GateFailed": 1, "UsageProblem": 2, "EnvironmentProblem": 3, "Refused": 4, "Inconclusive": 5}


def pages() -> dict[str, str]:
    """All of them, by their path within the documentation."""
    return {
        "reference/cli.md": commands(),
        "reference/python.md": python(),
        "reference/recipe.md": recipe(),
        "reference/codes.md": codes(),
        "reference/recipe.schema.json": schema(),
    }


def on_files(files: Any, config: Any) -> Any:
    """MkDocs' hook: the pages join those that lie in the folder."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


# --- commands -------------------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its arguments and options, as Typer has them."""
    from typer.main import get_command

    from repaconv.cli.main import app

    group: Any = get_command(app)
    head = f"# Commands\n\n{group.help}\n\n{group.epilog}\n\nstdout has results alone, stderr everything else.\n"
    return head + "".join(_command(name, command) for name, command in group.commands.items())


def _command(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    usage = " ".join(["repaconv", name, *map(_argument, arguments), "[OPTIONS]"])
    groups = {"": arguments}
    for each in options:
        groups.setdefault(str(each.rich_help_panel or "General"), []).append(each)
    general = groups.pop("General", [])
    tables = [_options(title, rows) for title, rows in (*groups.items(), ("General", general)) if rows]
    return f"\n## {name}\n\n{command.help}\n\n    {usage}\n{''.join(tables)}\n{command.epilog or ''}\n"


def _options(title: str, parameters: list[Any]) -> str:
    """The table of a group of options, under its title."""
    rows = [f"| `{_names(each)}` | {_cell(each.help)} | {_default(each)} |\n" for each in parameters]
    head = f"\n**{title}**\n" if title else ""
    return f"{head}\n| {'Option' if title else 'Argument'} | Description | Default |\n|---|---|---|\n" + "".join(rows)


def _argument(parameter: Any) -> str:
    word = str(parameter.name).upper() + ("..." if parameter.nargs == -1 else "")
    return word if parameter.required else f"[{word}]"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    return ", ".join((*parameter.opts, *parameter.secondary_opts))


def _default(parameter: Any) -> str:
    value = parameter.default
    if isinstance(described := getattr(parameter, "show_default", None), str):
        return described
    if value is None or value is False or value == () or callable(value) or str(value).endswith("UNSET"):
        return ""
    return f"`{getattr(value, 'value', value)}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("[", "\\[")


# --- Python, recipes ------------------------------------------------------------------------------------


def python() -> str:
    """The public names, and where each is written down."""
    import repaconv

    names = [getattr(repaconv, name) for name in repaconv.__all__]
    entries = [f"\n::: {each.__module__}.{each.__qualname__}\n" for each in names]
    testing = ["assert_parity", "check_method", "write_example"]
    ours = [f"\n::: repaconv.testing.{name}\n" for name in testing]
    return f"# Python\n\n{repaconv.__doc__}\n{''.join(entries)}\n## For tests\n{''.join(ours)}"


def schema() -> str:
    """JSON Schema of a recipe, for an editor's completion."""
    from repaconv.recipe import schema

    return json.dumps(schema(), indent=1, sort_keys=True) + "\n"


def recipe() -> str:
    """Every key of a recipe, section by section."""
    from repaconv import recipe as module

    found = json.loads(schema())
    return (
        f"# Recipes\n\n{_summary(module.__doc__)}\n\n[The JSON Schema](recipe.schema.json) is for editors that "
        "complete TOML. Paths are relative to the recipe.\n" + "".join(_section(*each) for each in _sections(found))
    )


def _summary(text: str | None) -> str:
    first, _, rest = (text or "").partition("\n\n")
    return f"{first}\n\n```toml\n{rest.strip()}\n```"


def _sections(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    defined = found.get("$defs", {})
    yield "", found["properties"], defined
    for name, value in found["properties"].items():
        for each in (value, *value.get("anyOf", ()), *value.get("allOf", ())):
            if "$ref" in each:
                yield name, defined[each["$ref"].rsplit("/", 1)[1]]["properties"], defined


def _section(name: str, keys: dict[str, Any], defined: dict[str, Any]) -> str:
    def kind(value: dict[str, Any]) -> str:
        if "$ref" in value:
            return "section"
        if "anyOf" in value:
            kinds = [kind(each) for each in value["anyOf"] if each.get("type") != "null" and "const" not in each]
            return " or ".join(dict.fromkeys(kinds))
        if "enum" in value:
            return ", ".join(map(str, value["enum"]))
        return str(value.get("type", "any"))

    rows = "".join(
        f"| `{key}` | {_cell(kind(value))} | {_cell(value.get('description'))} | {_shown(value.get('default'))} |\n"
        for key, value in keys.items()
    )
    title = f"[{name}]" if name else "At the top"
    return f"\n## {title}\n\n| key | type | what it means | default |\n|---|---|---|---|\n{rows}"


def _shown(value: Any) -> str:
    return "" if value in (None, {}, [], "") or isinstance(value, dict) else f"`{json.dumps(value)}`"


# --- codes ----------------------------------------------------------------------------------------------


def codes() -> str:
    """Every stable code, the exit code that goes with it and what to do."""
    rows = sorted({(code, exits, hint) for path in PACKAGE.rglob("*.py") for code, exits, hint in _raised(path)})
    head = "# Exit codes and error codes\n\n| exit | means |\n|---|---|\n| 0 | done and verified |\n"
    head += "| 1 | a gate failed |\n| 2 | usage or configuration |\n| 3 | environment |\n| 4 | input refused |\n"
    head += "| 5 | inconclusive |\n| 130 | interrupted |\n\n"
    head += "Scripts may match a code (`--format json`, `errors[].code`); sentences change.\n"
    table = "\n| code | exit | what to do |\n|---|---|---|\n"
    return head + table + "".join(f"| `{code}` | {exits} | {_cell(hint)} |\n" for code, exits, hint in rows)


def _raised(path: Path) -> Iterator[tuple[str, int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EXITS:
            given = {each.arg: each.value for each in node.keywords}
            code = given.get("code")
            if isinstance(code, ast.Constant):
                yield str(code.value), EXITS[node.func.id], _text(given.get("hint"))


def _text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else "..." for each in node.values)
    return ""
