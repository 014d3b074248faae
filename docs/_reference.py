"""``python docs/_reference.py`` writes docs/reference, which follows from the code: its help, types and docstrings.

tests/test_docs.py compares the files with what this makes of the code.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "repaconv"
EXITS = {"GateFailed": 1, "UsageProblem": 2, "EnvironmentProblem": 3, "Refused": 4, "Inconclusive": 5}


def pages() -> dict[str, str]:
    """All of them, by their path within docs/."""
    return {
        "reference/cli.md": commands(),
        "reference/python.md": python(),
        "reference/recipe.md": recipe(),
        "reference/results.md": results(),
        "reference/codes.md": codes(),
        "reference/versions.md": versions(),
        "reference/recipe.schema.json": schema(),
        "reference/results.schema.json": results_schema(),
    }


# --- commands -------------------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its arguments and options, as Typer has them."""
    from typer.main import get_command

    from repaconv.cli.main import app

    group: Any = get_command(app)
    head = f"# Commands\n\n{group.help}\n\n{group.epilog}\n\nResults go to stdout, everything else to stderr.\n"
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
    return " ".join((text or "").split()).replace("|", "\\|")


# --- Python, recipes ------------------------------------------------------------------------------------


def python() -> str:
    """The public functions: signature, arguments, result, exceptions."""
    import repaconv
    from repaconv import testing

    own = [getattr(repaconv, name) for name in repaconv.__all__]
    tests = [testing.assert_parity, testing.check_method, testing.write_example]
    head = (
        "# Python\n\nEach command is a function of the same name. It takes the same options as arguments and returns "
        "the [result](results.md) that the command writes.\n\n```python\nimport repaconv\n\n"
        'folded = repaconv.fold("ckpt.pth")\nrepaconv.export(batch=1)\n'
        'assert repaconv.verify().verdict == "passed"\n```\n'
    )
    from repaconv.core import errors

    rows = [(name, getattr(errors, name)) for name in EXITS]
    head += (
        "\nOther names: `new_recipe` is `new-recipe`, `inspect_file` is `inspect` of an ONNX model or engine, "
        "`estimate` is `bench --estimate`, `throughput` is `bench --objective throughput`, `compare_runs` is `report` "
        "of several runs. `demo`, `doctor`, `targets`, `sweep` and `worker` are commands only.\n"
        "\n| Option | Argument |\n|---|---|\n"
        '| `--set NAME=VALUE` | `settings={"NAME": VALUE}`; `fold` also takes each one by its name, e.g. '
        "`image_size=32` |\n"
        "| `--out` of `export` | `onnx` |\n| `--budget` of `tune` | `budget_s` |\n"
        "| `--workspace` of `build` and `bundle` | `workspace_mib` |\n"
        "| `--set-teacher` of `finetune` | `teacher_settings` |\n"
        "| `--host`, `--scheduler`, `--wait`, `--tls-...`; `--svg` and `--out` of `inspect`; `--report` of `gate` | "
        "of the command line only |\n"
        "\nPaths are `str` or `pathlib.Path`. Results are frozen. An argument that is None has the default of the "
        "command. `print(result)` prints what the command prints. `progress=print` prints each step, with the units "
        "that are done and their total (0 if it is unknown). Every exception is a "
        "`repaconv.RepaconvError` with a `message`, a `hint` (what to do), a "
        "`code` ([all codes](codes.md)) and the `exit_code` of the command. Each function lists what is special to it; "
        "all of them also raise `Refused` if the run folder does not exist, `UsageProblem` if an argument has a wrong "
        "type or there is no run, and `EnvironmentProblem` if another command writes to the run or the disk is full."
        "\n\n"
        "| Exception | Meaning |\n|---|---|\n"
    )
    head += "".join(f"| `{name}` | {_cell((each.__doc__ or '').splitlines()[0])} |\n" for name, each in rows)
    return head + "".join(map(_function, own)) + "\n## For tests\n" + "".join(_function(each, 3) for each in tests)


def _function(function: Any, level: int = 2) -> str:
    name = f"{'repaconv.testing.' if level == 3 else 'repaconv.'}{function.__name__}"
    given = [*inspect.signature(function).parameters.values()]
    rows = [_parameter(each) for each in given]
    if places := [place for place, each in enumerate(given) if each.kind is each.KEYWORD_ONLY]:
        rows.insert(places[0], "*")
    returned = str(inspect.signature(function).return_annotation).strip("'")
    call = f"{name}({', '.join(rows)})"
    if len(call) > 100:
        call = f"{name}(\n    " + ",\n    ".join(rows) + ",\n)"
    return f"\n{'#' * level} {name}\n\n```text\n{call} -> {returned}\n```\n\n{_docstring(function)}"


def _parameter(parameter: inspect.Parameter) -> str:
    mark = {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
    value = parameter.default
    shown = "silent" if callable(value) else repr(value)
    return mark + parameter.name + ("" if value is parameter.empty else f"={shown}")


def _docstring(of: Any) -> str:
    """A docstring of Google's style as Markdown: text, a table of arguments, what is returned and raised."""
    text, *parts = re.split(r"^(Args|Returns|Yields|Raises|Attributes):\n", inspect.getdoc(of) or "", flags=re.M)
    found = f"{_plain(text.strip())}\n"
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        if title == "Returns":
            found += f"\n**Returns.** {_plain(' '.join(body.split()))}\n"
            continue
        first = {"Raises": "Exception", "Attributes": "Key"}.get(title, "Argument")
        rows = "".join(f"| `{name}` | {_cell(_plain(said))} |\n" for name, said in _entries(body))
        found += f"\n| {first} | Meaning |\n|---|---|\n{rows}"
    return found


def _entries(body: str) -> Iterator[tuple[str, str]]:
    """The entries of one part: a name, a colon, and text that goes on where it is indented deeper."""
    for entry in re.split(r"\n(?=\S)", inspect.cleandoc(body)):
        name, _, said = entry.partition(": ")
        yield name, " ".join(said.split())


def _plain(text: str) -> str:
    """Markdown of what docstrings mark up by reStructuredText."""
    return re.sub(r"``([^`]*)``", r"`\1`", text)


def schema() -> str:
    """JSON Schema of a recipe, for an editor's completion."""
    from repaconv.stages.recipe.recipe_file import schema

    return json.dumps(schema(), indent=1, sort_keys=True) + "\n"


def recipe() -> str:
    """Every key of a recipe, section by section."""
    from repaconv.stages.recipe import recipe_file

    found = json.loads(schema())
    return (
        f"# Recipes\n\n{_summary(recipe_file.__doc__)}\n\n[The JSON Schema](recipe.schema.json) is for editors that "
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
    title = f"[{name}]" if name else "Top level"
    return f"\n## {title}\n\n| Key | Type | Meaning | Default |\n|---|---|---|---|\n{rows}"


def _shown(value: Any) -> str:
    return "" if value in (None, {}, [], "") or isinstance(value, dict) else f"`{json.dumps(value)}`"


# --- codes ----------------------------------------------------------------------------------------------


COMPOSED = {
    "collect.problem": "the board reports a problem: a step of the bundle failed there.",
    "compare.inputs": "nothing says which inputs a model takes, or it is in lower precision and needs real inputs.",
    "convert.blocks": "--blocks is neither auto nor a number of blocks nor a list of blocks, or the network has fewer.",
    "convert.heads": "--heads is neither a number of heads nor a list of BLOCK.HEAD, or the network has fewer.",
    "finetune.no-conversion": "there is no run yet, or the folder is not a conversion: it has no convert.json.",
    "live.other": "a weight of the folded network is too large for the data type of the module.",
    "preprocessing.none": "the preprocessing of the network is unknown, or has a step that is not done here.",
    "run.no-model": "the run has no ONNX model for this target, precision or preset.",
    "setting.contradicts": "a setting that was given contradicts what the checkpoint shows.",
    "setting.needed": "a setting that the network needs is missing from the checkpoint.",
    "sweep.invalid": "the matrix of the sweep is not valid: a key or a value in it is wrong or missing.",
    "target.invalid": "the target file is not valid: a field in it is wrong or missing.",
    "ultralytics.network": "the network has layers or arguments that are not built here.",
    "usage.arguments": "an option or argument is unknown, missing, or has a value that it does not take.",
}
"""What happened, by code, where the code composes the sentence out of parts."""


def codes() -> str:
    """Every stable code, the exit code that goes with it, the message and what to do.

    Raises:
        KeyError: If the code does not show a sentence and `COMPOSED` does not have it either.
        ValueError: If `COMPOSED` has a code that needs no sentence.
    """
    found = {row for path in PACKAGE.rglob("*.py") for row in _raised(path) if any(row[2:])}
    if unused := COMPOSED.keys() - {code for code, _, message, _ in found if not message}:
        raise ValueError(f"COMPOSED in {__file__} has codes that need no sentence: {', '.join(sorted(unused))}.")
    rows = sorted((code, exits, message or COMPOSED[code], hint) for code, exits, message, hint in found)
    head = "# Exit codes and error codes\n\n| Exit code | Meaning |\n|---|---|\n| 0 | done and verified |\n"
    head += "| 1 | a check failed |\n| 2 | wrong options or recipe |\n| 3 | something is missing on this machine |\n"
    head += "| 4 | the input was refused |\n| 5 | inconclusive measurement, or nothing could be compared |\n"
    head += "| 130, 143, 129 | interrupted by Ctrl-C, by SIGTERM, by SIGHUP |\n\n"
    head += "Scripts may rely on the error code (`--format json`, `errors[].code`). The sentences may change.\n\n"
    head += "`...` is a value that the message fills in, such as a name or a path.\n"
    table = "\n| Error code | Exit code | What happened | What to do |\n|---|---|---|---|\n"
    return (
        head
        + table
        + "".join(f"| `{code}` | {exits} | {_cell(message)} | {_cell(hint)} |\n" for code, exits, message, hint in rows)
    )


def _raised(path: Path) -> Iterator[tuple[str, int, str, str]]:
    tree = ast.parse(path.read_text())
    within = {
        id(each): function
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for each in ast.walk(function)
    }
    for name, node in _constructed(tree):
        given = {each.arg: each.value for each in node.keywords}
        named = _named(within[id(node)]) if id(node) in within else {}
        for code in _alternatives(given.get("code"), named):
            for hint in _alternatives(given.get("hint"), named):
                for message in _messages(node, given, named):
                    if isinstance(code, ast.Constant):
                        yield str(code.value), EXITS[name], message, _text(hint)


def _named(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """What the names in a function may be: defaults of its arguments, and what is assigned to them."""
    found: dict[str, list[ast.expr]] = {}
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        found[argument.arg] = [default] if default is not None else []
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    found.setdefault(name.id, []).append(value)
    return found


def _alternatives(node: ast.expr | None, named: dict[str, list[ast.expr]]) -> Iterator[ast.expr | None]:
    """The texts of a conditional expression or of a name, or the one text of any other."""
    if isinstance(node, ast.IfExp):
        yield from (*_alternatives(node.body, named), *_alternatives(node.orelse, named))
    elif isinstance(node, ast.Name) and named.get(node.id):
        rest = {name: values for name, values in named.items() if name != node.id}
        for value in named[node.id]:
            yield from _alternatives(value, rest)
    else:
        yield node


def _constructed(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """The calls of `require_file`, `read_artefact` and exceptions.

    Those of an exception may be by ``super().__init__`` in a class derived from it.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = "Refused" if node.func.id in ("require_file", "read_artefact") else node.func.id
            if name in EXITS:
                yield name, node
        if isinstance(node, ast.ClassDef):
            bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in EXITS]
            inside = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
            yield from ((bases[0], each) for each in inside if bases and ast.unparse(each.func) == "super().__init__")


def _messages(node: ast.Call, given: dict[str | None, ast.expr], named: dict[str, list[ast.expr]]) -> Iterator[str]:
    """The sentences that an error may have; an empty one if the code does not show it."""
    if isinstance(node.func, ast.Name) and node.func.id in ("require_file", "read_artefact"):
        yield "there is no such file, or it cannot be read."
        return
    for each in _alternatives(given.get("message", node.args[0] if node.args else None), named):
        text = _text(each)
        yield text if text.strip(". ") else ""


def _text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(each.value) if isinstance(each, ast.Constant) else "..." for each in node.values)
        return re.sub(r"\.{4,}", "...", re.sub(r"^\.\.\.(?=[A-Z])", "", text))
    if isinstance(node, ast.BinOp):
        return re.sub(r"\.{4,}", "...", (_text(node.left) or "...") + (_text(node.right) or "..."))
    return ""


# --- results --------------------------------------------------------------------------------------------

FILES = {
    "MethodFold": "`fold.json` of a checkpoint of a method",
    "NetworkFold": "`fold.json` of a network by its architecture",
    "GraphFold": "`fold.json` of an ONNX file",
    "VerifyArtefact": "`verify.json`",
    "ExportArtefact": "`export.json`, `export.<variant>.json`",
    "TrainingArtefact": "`bench/training.json`: the original network as ONNX",
    "BuildArtefact": "`build/<target>.json`",
    "BenchArtefact": "`bench/<target>.json`",
    "ThroughputArtefact": "`bench/<target>.throughput.json`",
    "EstimateArtefact": "`bench/<target>.estimate.json`",
    "TuneArtefact": "`tuned/<target>.json`",
    "BundleArtefact": "`build/<target>.bundle.json`",
    "CollectArtefact": "`build/<target>.collected.json`",
    "ConvertArtefact": "`convert.json`",
    "FinetuneArtefact": "`finetune.json`",
    "ScoreArtefact": "`<stem>.score.json`",
    "SaveArtefact": "`save.json`",
    "SweepArtefact": "`sweep.json`",
    "Fetched": "`repaconv-out/fetched/<address>.json`",
    "CompareArtefact": "the file of `compare -o`",
    "Baselines": "the file of `bench --baseline`",
    "HistoryEntry": "a line of `history-<target>.jsonl`",
    "Inspection": "`inspect` of a checkpoint",
    "FileInspection": "`inspect` of an ONNX model or an engine",
    "GateReport": "`gate`",
    "RecipeRun": "`run` and `deploy`",
    "Report": "`report --format json`",
    "RunsReport": "`report --format json` of several runs",
    "NewRecipe": "`new-recipe`",
    "PaperTable": "`table`",
    "Target": "`targets`: a list of them",
}
"""Where each result is found; all other records are parts of these."""

ENVELOPE = """```json
{"schema_version": %d, "command": "verify", "status": "ok", "exit_code": 0, "data": {}, "errors": []}
```

`--format json` prints this envelope on stdout, also if the command fails. `data` is the result. `errors` has one entry
`{code, message, hint}` for each error: see [error codes](codes.md). Its `schema_version` is that of the envelope; the
result in `data` has its own."""


def _records() -> dict[str, Any]:
    """The results' models by name."""
    from repaconv import results as artefacts
    from repaconv.engines.targets import schema as targets

    of_targets = {each.__name__: each for each in (targets.Target, targets.BenchDefaults, targets.Variant)}
    found = {name: getattr(artefacts, name) for name in dir(artefacts)} | of_targets
    return {
        name: each
        for name, each in found.items()
        if isinstance(each, type) and issubclass(each, artefacts.Record) and name != "Record"
    }


def results() -> str:
    """Every key of every result."""
    from repaconv.cli.text_and_json_output import SCHEMA_VERSION as ENVELOPE_VERSION
    from repaconv.results import SCHEMA_VERSION, Artefact

    records = _records()
    head = (
        f"# Results (JSON)\n\n{ENVELOPE % ENVELOPE_VERSION}\n\n"
        f"The schema version of results is {SCHEMA_VERSION}; files of version {SCHEMA_VERSION - 1} are still read. "
        "[The JSON Schema](results.schema.json) describes all\nresults.\n\n"
        "| Result | Where |\n|---|---|\n"
    )
    rows = "".join(f"| [{name}](#{name.lower()}) | {where} |\n" for name, where in FILES.items())
    rows += "| [PluginRow](#pluginrow) | `doctor`: a list of them |\n"
    own = "".join(_record(name, records[name]) for name in FILES)
    parts = "".join(_record(name, each) for name, each in records.items() if name not in FILES and each is not Artefact)
    shared = _record("Artefact", Artefact, "Keys of every result that is a file of a run")
    return head + rows + shared + own + _plugin_row() + parts


def _plugin_row() -> str:
    """The keys of a row of `doctor`, which is no record: `repaconv.core.plugins` imports no pydantic."""
    from repaconv.core.plugins import PluginRow

    text, _, listed = inspect.cleandoc(PluginRow.__doc__ or "").partition("Attributes:\n")
    rows = "".join(f"| `{key}` | text | {_cell(_plain(meaning))} |\n" for key, meaning in _entries(listed))
    return f"\n## PluginRow\n\n{_plain(text.strip())}\n\n| Key | Type | Meaning |\n|---|---|---|\n{rows.rstrip()}\n"


def _record(name: str, model: Any, title: str = "") -> str:
    from repaconv.results import Artefact

    text = (inspect.getdoc(model) or "").partition("Attributes:\n")[0]
    said = meanings(model)
    shared = set() if model is Artefact or not issubclass(model, Artefact) else set(Artefact.model_fields)
    rows = "".join(
        f"| `{key}` | {_kind(field.annotation)} | {_cell(_plain(field.description or said.get(key, '')))} |\n"
        for key, field in model.model_fields.items()
        if not field.exclude and (key not in shared or key == "stage")
    )
    more = "\nAnd the keys of [every result](#artefact).\n" if shared else ""
    return f"\n## {name}\n\n{title or _plain(text.strip())}\n\n| Key | Type | Meaning |\n|---|---|---|\n{rows}{more}"


def meanings(model: Any) -> dict[str, str]:
    """What the keys of a record mean: the ``Attributes`` of its class, and of those that it extends."""
    from repaconv.results import Record

    found: dict[str, str] = {}
    for each in (base for base in reversed(model.__mro__) if issubclass(base, Record)):  # pydantic describes its own
        listed = inspect.cleandoc(each.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
        found |= dict(_entries(listed)) if listed else {}
    return found


def _kind(annotation: Any) -> str:
    """A type as a reader of JSON sees it, with a link where it is another record."""
    arguments = [_kind(each) for each in get_args(annotation) if each is not Ellipsis]
    origin = get_origin(annotation)
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and annotation.__name__ in _records() and origin is None:
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    if origin in (tuple, list):
        kinds = " or ".join(dict.fromkeys(arguments))
        return f"list of {kinds}"
    if origin is dict:
        return f"object of {arguments[1]} by {arguments[0]}"
    if origin is UnionType or str(origin) == "typing.Union":
        return " or ".join(arguments)
    if str(origin) == "typing.Literal":
        return " or ".join(f"`{each}`" for each in get_args(annotation))
    if arguments:  # annotated: the type, and what pydantic asks of it
        return arguments[0]
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}
    return names.get(getattr(annotation, "__name__", ""), "any")


def results_schema() -> str:
    """JSON Schema of all results, a line each."""
    from pydantic.json_schema import models_json_schema

    records = _records()
    _, found = models_json_schema([(records[name], "serialization") for name in FILES])
    rows = [
        f"  {json.dumps(name)}: {json.dumps(each, sort_keys=True)}" for name, each in sorted(found["$defs"].items())
    ]
    return '{\n "title": "repaconv results",\n "$defs": {\n' + ",\n".join(rows) + "\n }\n}\n"


# --- versions -------------------------------------------------------------------------------------------


def versions() -> str:
    """Versions of Python, packages, runtimes and opsets that are supported, by ``_versions.toml`` and the targets."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    found = tomllib.loads((ROOT / "docs" / "_versions.toml").read_text())
    python = found["python"] | {"tested": "these and all between", "use": ""}
    rows = [_version("Python", python), *(_version(*each) for each in found["packages"].items())]
    head = (
        "# Supported versions\n\n```sh\nrepaconv doctor\n```\n\n`doctor` lists what is installed, what is missing, and "
        "the command that installs it.\n\nOperating system: Linux (x86-64, arm64).\n\n## Packages\n\nLowest: older "
        "versions are not installed with repaconv. Newest: the newest version that was tried; newer ones may be "
        "installed. Tests run with the newest versions (`make test`) and, in part, with the lowest ones on the lowest "
        "Python (`make test-lowest`).\n\n| Package | Lowest | Newest | Tested | Needed for |\n|---|---|---|---|---|\n"
    )
    return head + "".join(rows) + _runtimes() + _opsets(**found["opsets"])


def _version(name: str, row: dict[str, str]) -> str:
    use = row.get("use", "repaconv itself")
    return f"| {name} | {row['lowest']} | {row.get('newest', '-')} | {row['tested']} | {use} |\n"


def _opsets(read: list[int], written: list[int]) -> str:
    """Opsets that are read and written, each as [lowest, newest]."""
    return (
        "\n## Opsets\n\n| Opset | Read (`fold model.onnx`) | Written (`export`) |\n|---|---|---|\n"
        f"| {read[0]} to {written[0] - 1} | yes, converted to opset {written[0]} first | no |\n"
        f"| {written[0]} to {written[1]} | yes | yes, as the target asks |\n\n"
        "Operators of other domains are kept as they are.\n"
    )


def _runtimes() -> str:
    """The targets as their files have them."""
    from repaconv.core import plugins

    found = "\n## Targets\n\n| Target | Device | Runtime | Opset | Precisions |\n|---|---|---|---|---|\n"
    plain = [plugins.load(plugins.TARGETS, name) for name in plugins.registered(plugins.TARGETS)]
    every = [each for one in plain for each in (one, *map(one.variant, one.variants))]
    for each in every:
        name, opset = each.name, f"{each.opset}" + (f" to {each.newest}" if each.newest > each.opset else "")
        runtime = f"{each.runtime} {each.runtime_version}".strip()
        device = f"the same as `{name.partition('@')[0]}`" if "@" in name else _cell(each.about)
        found += f"| `{name}` | {device} | {runtime} | {opset} | {', '.join(each.precisions)} |\n"
    return f"{found}\nWhat is untested for lack of hardware: [Limitations](../limitations.md).\n"


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / "docs" / path).parent.mkdir(exist_ok=True)
        (ROOT / "docs" / path).write_text(text)
