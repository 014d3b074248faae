"""An evaluated result as the tables of docs/gpu.md: every row with the paper's speedup, and failed steps by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu.plan import OFFICIAL, OURS, VANILLA

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
START, END = "<!-- results: make gpu-results writes these -->", "<!-- end of results -->"


def markdown(result: dict[str, Any]) -> str:
    """What the result shows."""
    parts = (_head, _rows, _engines, _tuned, _faults)
    return "\n\n".join(filter(None, ("\n".join(part(result)) for part in parts)))


def put(result: dict[str, Any], page: Path = PAGE) -> None:
    """Write it into the page, in place of what it had of the same GPU."""
    text = page.read_text()
    before, _, rest = text.partition(START)
    kept, _, after = rest.partition(END)
    title = _title(result)
    parts = [part for part in kept.split("\n### ")[1:] if not f"### {part}".startswith(f"{title}\n")]
    whole = "".join(f"\n### {part.strip()}\n" for part in parts) + f"\n{markdown(result)}\n"
    page.write_text(f"{before}{START}\n{whole}\n{END}{after}")


def _title(result: dict[str, Any]) -> str:
    return f"### {result['machine']['card'].get('name') or 'No card'}"


def _head(result: dict[str, Any]) -> Iterator[str]:
    machine = result["machine"]
    gpu = machine["card"]
    yield _title(result)
    yield ""
    lines = [f"driver {gpu.get('driver')}, CUDA {gpu.get('cuda')}, cuDNN {gpu.get('cudnn')}"] if gpu else []
    lines += [f"{name} {version}" for name, version in sorted(machine["packages"].items())]
    yield f"{'; '.join([*lines, machine['system']])}. Kit {result['kit']}: **{result['verdict']}**."
    for why in result["partial"]:
        yield f"*Partial*: {why}."
    earlier = [step["kit"] for step in result["steps"] if step.get("kit", result["kit"]) != result["kit"]]
    if earlier:
        yield f"{len(earlier)} steps are of earlier kits ({', '.join(sorted(set(earlier)))})."


def _rows(result: dict[str, Any]) -> Iterator[str]:
    rows = [(step, row) for step in result["steps"] for row in step.get("batches", (step,)) if "p50_ms" in row]
    if not rows:
        yield "Untested: no row was measured."
        return
    forms = f"{VANILLA} | {OFFICIAL} | {OURS} | {OURS} / {OFFICIAL} | {OURS} / {VANILLA}"
    yield f"| model | batch | runtime | precision | {forms} | paper | trust |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for step, row in rows:
        given, times = step["given"], row["p50_ms"]
        cells = [f"{given['method']} {given['size']}", str(row["batch"]), given["target"], given["precision"]]
        cells += [f"{times[name]:.3f} ms" if name in times else "-" for name in (VANILLA, OFFICIAL, OURS)]
        cells += [_ratio(row["ratios"].get(name)) for name in (OFFICIAL, VANILLA)]
        claim = given["claim"]
        cells.append(f"{claim['factor']:.2f} ({claim['source']})" if claim else "-")
        trust = row["quality"]["verdict"] if step["verdict"] == "passed" else f"**{step['verdict']}**"
        yield f"| {' | '.join([*cells, trust])} |"


def _ratio(found: dict[str, Any] | None) -> str:
    return f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})" if found else "-"


def _engines(result: dict[str, Any]) -> Iterator[str]:
    engines = [step for step in result["steps"] if step["kind"] == "engine" and "built" in step]
    if engines:
        yield "| engine | for | precision | built | types | on the card |"
        yield "|---|---|---|---|---|---|"
    for step in engines:
        types = ", ".join(f"{count} {name}" for name, count in sorted(step["types"].items()))
        ran = step["verdict"] if step["status"] == "done" else f"untested: {step.get('not_verified', '')}"
        given = step["given"]
        yield f"| {step['model']} | {given['target']} | {given['precision']} | {step['built']} | {types} | {ran} |"


def _tuned(result: dict[str, Any]) -> Iterator[str]:
    """The forms that measurements on this GPU chose; targets have no default but of these."""
    tuned = [step for step in result["steps"] if "tuned" in step]
    if not tuned:
        yield "Untested: no preset was measured, so the targets of this GPU have none by default."
        return
    yield "| model | batch | runtime | fastest preset | speedup over the default | measured |"
    yield "|---|---|---|---|---|---|"
    for step in tuned:
        found, given = step["tuned"], step["given"]
        form = ", ".join(found["deployment"]["rewrites"]) or "as the paper's"
        whole = "all" if found["complete"] else f"what {found['budget_s']:.0f} s allowed"
        cells = [step["model"], str(given["batch"]), given["target"], form, _ratio(found["ratio"]), whole]
        yield f"| {' | '.join(cells)} |"


def _faults(result: dict[str, Any]) -> Iterator[str]:
    """What failed, and what could not be run, each with its cause."""
    for step in result["steps"]:
        for fault in step["faults"]:
            yield f"- **failed** {step['name']}: {fault}"
        if step["remarks"]:
            yield f"- {step['name']}:"
        yield from (f"    - {remark}" for remark in step["remarks"])
        for note in step.get("notes", ()):
            yield f"- {step['name']}: {note} It was measured on {step['batch']}."
    causes: dict[str, list[str]] = {}
    for step in result["steps"]:
        if step["verdict"] == "not verified" and "built" not in step and step["status"] != "not run":
            causes.setdefault(step.get("why") or "it does not say why", []).append(step["name"])
    for why, names in causes.items():
        several = f"{len(names)} steps ({names[0]} first)" if len(names) > 1 else names[0]
        yield f"- not verified: {several}: {why}"
