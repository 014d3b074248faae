"""What is deprecated says what to use and until when, and goes in that version."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from packaging.version import Version

import repaconv as rc
from repaconv.cli import main  # noqa: F401  # which imports the options of every command
from repaconv.deprecation import Deprecation, deprecated
from repaconv.stages.recipe.recipe_file import read_recipe
from repaconv.stages.shared.option_dataclasses import Option, Options, deprecations, options_of

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]


def removals(source: str) -> list[tuple[int, str]]:
    """Line and version of every ``removed_in="..."`` in Python source."""
    named = [word for call in ast.walk(ast.parse(source)) if isinstance(call, ast.Call) for word in call.keywords]
    return [(word.value.lineno, ast.literal_eval(word.value)) for word in named if word.arg == "removed_in"]


def due(source: str, version: str) -> list[int]:
    return [line for line, removed_in in removals(source) if Version(removed_in) <= Version(version)]


def test_no_deprecation_outlives_its_version():
    """Fails at 0.3.0: remove what these lines deprecate, its tests and its docs."""
    found = {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / "repaconv").rglob("*.py"))}
    deprecating = {path: text for path, text in found.items() if "removed_in=" in text}
    assert len([line for text in deprecating.values() for line in removals(text)]) >= 10
    late = [f"{path}:{line}" for path, text in deprecating.items() for line in due(text, VERSION)]
    assert not late, f"repaconv is {VERSION}, and this should be gone: {late}"


def test_the_search_finds_what_is_due_in_its_version_and_later():
    source = (
        'former = Deprecation("a", "b", removed_in="0.3.0")\n@deprecated("c", removed_in="0.10.0")\ndef d(): pass\n'
    )
    assert due(source, "0.2.9") == []
    assert due(source, "0.3.0") == due(source, "0.9.0") == [1]
    assert due(source, "1.0.0") == [1, 2]
    with pytest.raises(ValueError, match="malformed"):
        due("Deprecation('a', 'b', removed_in=NEXT)", "0.2.0")  # must be a literal, or it would never expire


def test_a_deprecated_function_and_class_warn_at_the_callers_line_and_still_work():
    @deprecated("twice_of", removed_in="9.0.0")
    def twice(value, *, times=2):
        """Documented."""
        return value * times

    @deprecated("Box", removed_in="9.0.0")
    class Case:
        def __init__(self, content):
            self.content = content

    message = r"twice is deprecated: use twice_of. It is removed in repaconv 9\.0\.0\."
    with pytest.warns(DeprecationWarning, match=message) as seen:
        assert twice(3, times=3) == 9
    assert seen[0].filename == __file__
    assert twice.__doc__ == "Documented."
    with pytest.warns(DeprecationWarning, match=r"Case is deprecated: use Box") as seen:
        case = Case(content=4)
    assert (seen[0].filename, case.content, isinstance(case, Case)) == (__file__, 4, True)


def every_options_class(of=Options):
    for each in of.__subclasses__():
        if each.__module__.startswith("repaconv."):
            yield each
        yield from every_options_class(each)


def test_a_former_option_names_the_field_that_replaces_it():
    known = {(each, old.what): old for each in every_options_class() for old in deprecations(each).values()}
    assert len(known) >= 10
    for (options, former), old in known.items():
        (field,) = [field for field in options_of(options) if field.definition.former == old]
        assert field.name == old.use, (options, former)


def test_no_benchmark_offers_an_option_by_its_former_name():
    former = {
        f"--{old.what.replace('_', '-')}" for each in every_options_class() for old in deprecations(each).values()
    }
    former |= {"--again", "--openings"}
    calls = [
        (path.name, call)
        for path in (ROOT / "benchmarks").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
    ]
    assert len(calls) > 100
    offered = {(name, getattr(word, "value", None)) for name, call in calls for word in call.args}
    assert not {(name, option) for name, option in offered if option in former}


def test_an_option_by_its_former_name_warns_in_python_and_on_the_command_line(tiny, repaconv):
    rc.fold(tiny)
    with pytest.warns(DeprecationWarning, match=r"unverified is deprecated: use allow_unverified") as seen:
        rc.export(unverified=True, simplify=False)
    assert seen[0].filename == __file__
    code, _, err = repaconv("export", "--unverified", "--no-simplify")
    assert code == 0
    assert "--unverified is deprecated: use --allow-unverified. It is removed in repaconv 0.3.0." in " ".join(
        err.split()
    )


def test_a_recipe_key_by_its_former_name_warns(tmp_path):
    Path("r.toml").write_text('checkpoint = "c.pth"\nform = "official"\n[export]\nquantiser = "nncf"\n')
    with pytest.warns(DeprecationWarning, match="the recipe key") as seen:
        recipe, _ = read_recipe(Path("r.toml"))
    assert (recipe.preset, recipe.export.quantizer) == ("official", "nncf")
    assert sorted(str(each.message).partition(".")[0] for each in seen) == [
        "the recipe key export",
        "the recipe key form is deprecated: use preset",
    ]


def test_a_field_may_be_renamed_in_any_later_version():
    @dataclass(frozen=True, kw_only=True)
    class Renamed(Options):
        lr: Annotated[float, Option("Rate.", former=Deprecation("rate", "lr", removed_in="9.0.0"))] = 0.1

    assert deprecations(Renamed) == {"rate": Deprecation("rate", "lr", "9.0.0")}
