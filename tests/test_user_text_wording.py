"""Help, messages and pages use the words of the field: a short list of former private phrases is rejected."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from repaconv.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *sorted((ROOT / "examples").glob("*/README.md"))]
ERRORS = ("GateFailed", "UsageProblem", "EnvironmentProblem", "Refused", "Inconclusive", "RepaconvError")

PRIVATE = {
    r"images a (call|second)|ms a call|MACs a(n image| call)": "images per inference, images/s, MACs per image",
    r"times as fast": "speedup, 1.2x",
    r"(other )?first class(es)?": "top-1 prediction",
    r"about zero": "symmetric",
    r"(all )?taken back": "reverted",
    r"left alone": "not folded",
    r"what pays": "what is faster",
    r"of any origin": "an arbitrary ONNX model",
    r"sway(s|ed)?": "rounding error",
    r"free (size|batch)s?": "dynamic",
    r"yardsticks?|contenders?": "reference model, subject",
    r"broken off|goes on where": "interrupted, resumes",
    r"still stands?|what stands": "up to date",
    r"everybody( else)?|somebody( else)?|nobody": "the passive voice, or a name",
    r"judged?|judges|judging": "evaluate",
    r"proofs?|proved|proves": "verification (a proof is of algebra)",
    r"not verified here": "untested",
    r"quantisers?": "quantizer",
    r"beside": "next to",
    r"broken ends?|both ends": "reference and candidate",
    r"do(es)? not tell": "is missing from",
    r"in its form|default form": "rewritten; default preset",
    r"nothing speaks against|speaks against": "a reason for doubt, a disturbance",
    r"taken all the same|all together": "continued with --allow-unverified; overall",
    r"as given": "original",
    r"parts at": "first different at",
    r"openings?": "session loads",
    r"images that (choose|fit|judge|calibrate)": "validation, calibration, test split",
    r"nothing beats|no other run beats": "Pareto-optimal",
    r"us a node|a (suite|case|table|notice) a \w+": "per",
    r"goes on": "resumes, still applies",
}
"""Regular expressions of whole words, and what to write."""

ALLOWED = {
    "docs/mathematics.md": r"proofs?|proved|proves",  # of algebra
    "docs/design/verification.md": r"proofs?|proved|proves",  # of algebra, and what is none
}


def private(text: str, but: str = "") -> list[str]:
    """The private phrases of a text, code and options aside."""
    plain = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|--[\w-]+", " ", text, flags=re.S)
    found = [each[0] for phrase in PRIVATE for each in re.finditer(rf"\b(?:{phrase})\b", plain, re.I)]
    return [each for each in found if not (but and re.fullmatch(but, each, re.I))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_no_private_phrase(page):
    assert not private(page.read_text(), ALLOWED.get(page.relative_to(ROOT).as_posix(), ""))


TEMPLATES = sorted((ROOT / "repaconv" / "stages" / "report" / "templates").glob("*.j2"))


def template_text(path: Path) -> str:
    """What a template writes: its text, and the strings in its expressions; code in backticks is checked too."""
    strings = re.compile(r"""\"([^\"]*)\"|'([^']*)'""")

    def written(code: re.Match[str]) -> str:
        return " ".join("".join(each) for each in strings.findall(code[0]))

    return re.sub(r"\{\{.*?\}\}|\{%.*?%\}", written, path.read_text()).replace("`", "")


def test_no_template_has_a_private_phrase():
    assert TEMPLATES
    assert not [(path.name, found) for path in TEMPLATES if (found := private(template_text(path)))]


def commands() -> dict:
    return get_command(app).commands


@pytest.mark.parametrize("name", commands())
def test_help_has_no_private_phrase_and_every_option_a_sentence(name):
    command = commands()[name]
    texts = [command.help or "", command.epilog or "", *(each.help or "" for each in command.params)]
    assert not [found for text in texts for found in private(text)]
    for each in command.params:
        if not each.hidden if each.param_type_name == "option" else True:
            assert len(re.findall(r"\w+", each.help or "")) >= 3, f"{name} {each.name}: {each.help!r}"
            assert (each.help or "").rstrip().endswith((".", ")")), f"{name} {each.name}: {each.help!r}"


def messages() -> Iterator[tuple[str, str]]:
    """The sentences of every error that is raised, with its place: message and hint."""
    for path in sorted((ROOT / "repaconv").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
                texts = [*node.args[:1], *(each.value for each in node.keywords if each.arg in ("message", "hint"))]
                for each in texts:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", " ".join(constants(each))


def constants(node: ast.AST) -> Iterator[str]:
    """The text of an expression, whatever it is put together of."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def texts() -> Iterator[tuple[str, str]]:
    """Every text of more than one word in the code that is no docstring, with its place: tables, verdicts, notes."""
    for path in sorted((ROOT / "repaconv").rglob("*.py")):
        tree = ast.parse(path.read_text())
        bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
        said = {id(each.value) for body in bodies for each in body if isinstance(each, ast.Expr)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
            if is_text and " " in node.value:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


STORED = ("<!-- repaconv; sha256 of what stands above: {} -->", ", beside")
"""Texts in files that earlier versions wrote: a page's hash, the key of a baseline."""


def test_no_text_in_the_code_has_a_private_phrase():
    found = {place: words for place, text in texts() if (words := private(text)) and text.strip(" \n") not in STORED}
    assert not found


def test_no_message_has_a_private_phrase():
    found = {place: words for place, text in messages() if (words := private(text))}
    assert not found
