"""The result of `gate` in the formats that CI systems read: JUnit XML, GitHub workflow commands, markdown."""

from __future__ import annotations

from xml.etree import ElementTree

from repaconv.core.errors import escape_control_characters
from repaconv.results import Check, GatedRecipe, GateReport

MARKS = {"passed": "✅", "failed": "❌", "not verified": "⚪", "inconclusive": "❔", "error": "⛔"}
OUTCOMES = {
    0: "passed",
    1: "failed",
    2: "wrong recipe",
    3: "something is missing on this machine",
    4: "input refused",
    5: "inconclusive",
}
"""What the exit codes of `run` and `gate` mean."""


def outcome(exit_code: int) -> str:
    """Return the meaning of an exit code, with the code if the words do not tell it."""
    return OUTCOMES[exit_code] + (f" (exit code {exit_code})" if exit_code > 1 else "")


def sentence(check: Check) -> str:
    """The check's message, where the outputs first differ, and what to do about it."""
    where = f" The outputs first differ at {check.module}." if check.module else ""
    hint = f" ({check.hint})" if check.hint else ""
    return f"{check.message.removesuffix('.')}.{where}{hint}"


def junit(report: GateReport) -> str:
    """JUnit XML: one suite per recipe, one case per check.

    *Not verified* and *inconclusive* become skipped cases with their reason.
    """
    root = ElementTree.Element("testsuites", name="repaconv gate")
    totals = {"tests": 0, "failures": 0, "errors": 0}
    for recipe in report.recipes:
        verdicts = [check.verdict for check in recipe.checks]
        counts = {
            "tests": len(verdicts),
            "failures": verdicts.count("failed"),
            "errors": verdicts.count("error"),
            "skipped": verdicts.count("not verified") + verdicts.count("inconclusive"),
        }
        totals = {name: totals[name] + counts[name] for name in totals}
        attributes = {"name": recipe.recipe, "file": recipe.recipe}
        attributes |= {name: str(count) for name, count in counts.items()}
        suite = ElementTree.SubElement(root, "testsuite", attributes)
        for check in recipe.checks:
            case = ElementTree.SubElement(
                suite, "testcase", name=f"{check.stage}: {check.name}", classname=_dotted(recipe.recipe)
            )
            tag = {"failed": "failure", "error": "error", "passed": "system-out"}.get(check.verdict, "skipped")
            found = ElementTree.SubElement(case, tag)
            if tag != "system-out":
                found.set("message", sentence(check))
            if tag in ("failure", "error"):
                found.set("type", check.code or check.name)
            found.text = f"{check.file or recipe.recipe}:{check.line}: {sentence(check)}"
    root.attrib |= {name: str(count) for name, count in totals.items()}
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode", xml_declaration=True)
    return escape_control_characters(text) + "\n"  # XML has no way to write them


def _dotted(path: str) -> str:
    """A recipe's path as the class name that CI systems group by."""
    return path.removesuffix(".toml").replace("/", ".").strip(".")


def github(report: GateReport) -> str:
    """Workflow commands, which GitHub shows at the recipe's line; passed checks are one notice per recipe."""
    lines = []
    for recipe in report.recipes:
        if passed := [check.name for check in recipe.checks if check.verdict == "passed"]:
            text = f"{len(passed)} of {len(recipe.checks)} checks passed: {', '.join(dict.fromkeys(passed))}"
            lines.append(f"::notice file={_property(recipe.recipe)},line=1,title=repaconv gate::{_data(text)}")
        for check in (check for check in recipe.checks if check.verdict != "passed"):
            kind = {"failed": "error", "error": "error"}.get(check.verdict, "warning")
            title = f"{check.name}: {check.verdict}"
            place = f"file={_property(check.file or recipe.recipe)},line={check.line},title={_property(title)}"
            lines.append(f"::{kind} {place}::{_data(sentence(check))}")
    return "\n".join(lines) + "\n"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def markdown(report: GateReport) -> str:
    """One markdown table per recipe, for a pull request."""
    parts = [f"## repaconv gate: {outcome(report.exit_code)}"]
    for recipe in report.recipes:
        parts += ["", f"### {_cell(recipe.recipe)}", "", "| | check | verdict | result |", "|---|---|---|---|"]
        parts += [
            f"| {MARKS[check.verdict]} | {check.stage}: {check.name} | {check.verdict} | {_cell(sentence(check))} |"
            for check in recipe.checks
        ]
        parts += _unverified_line(recipe)
    return "\n".join(parts) + "\n"


def _unverified_line(recipe: GatedRecipe) -> list[str]:
    open_ones = [check.name for check in recipe.checks if check.verdict == "not verified"]
    return ["", f"Not verified: {', '.join(open_ones)}."] if open_ones else []


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


FORMATS = {"junit": junit, "github": github, "markdown": markdown}
