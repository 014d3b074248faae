"""Evaluate a result: `python -m gpu.result_evaluation RESULT [--kit kit.json]`, as `make gpu-results RESULT=...` does.

It refuses files that were changed in transfer, that are no results, that another kit made, and rehearsals. A result
that was cut off, or lacked pieces, is marked partial. Verdicts are computed again from the samples and the compared
outputs; those in the file are not used. It fills the tables of docs/gpu.md and the presets of the targets.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpu.plan import MADE, OFFICIAL, OURS, TRAINING, VANILLA
from gpu.session import FORMAT, canonical
from repaconv.benchmark.latency_statistics import ratio
from repaconv.core.errors import Refused, RepaconvError
from repaconv.engines.contract import label
from repaconv.results import Link
from repaconv.verification.tolerances import FLOAT32

RESULTS = Path(__file__).resolve().parents[1] / "results"
LOW = ("fp16", "bf16")
AS_FAR = 2
"""Times the training-time network's error in a precision, what ours may be off if neither passes."""


def read(path: Path, kit: dict[str, Any]) -> dict[str, Any]:
    """A result that is whole, of this kit and of a GPU.

    Raises:
        Refused: If it is not.
    """
    try:
        result = json.loads(path.read_text())
        claimed = result.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _refused(f"{path} is no result of the kit: {error!r}", "format") from error
    if hashlib.sha256(canonical(result).encode()).hexdigest() != claimed:
        raise _refused(f"{path} was changed or cut: its hash is another", "hash")
    if result.get("format") != FORMAT:
        raise _refused(f"{path} has the format {result.get('format')}, not {FORMAT}", "format")
    if result.get("kit") != kit["id"]:
        raise _refused(f"{path} is of the kit {result.get('kit')}, not of {kit['id']}", "foreign")
    return dict(result)


def _refused(message: str, code: str) -> Refused:
    return Refused(f"{message}.", hint="Take the file as the kit wrote it, and its own kit.json.", code=f"gpu.{code}")


def evaluated(result: dict[str, Any], kit: dict[str, Any]) -> dict[str, Any]:
    """The result with a verdict for every step, and for the whole."""
    return _whole(result, [_judged(step) for step in result["steps"]], kit)


def joined(found: dict[str, Any], kept: dict[str, Any], kit: dict[str, Any]) -> dict[str, Any]:
    """An evaluated result, and of an earlier one of the same GPU what did not run now; such a step names its kit."""
    earlier = {step["name"]: {"kit": kept["kit"], **step} for step in kept["steps"] if _stays(step)}
    ran = {step["name"] for step in found["steps"] if step["verdict"] != "not verified" or step["status"] == "done"}
    rows = [step if step["name"] in ran else earlier.get(step["name"], step) for step in found["steps"]]
    here = {step["name"] for step in rows}
    rows += [earlier[name] for name in kit["plan"] if name in earlier and name not in here]  # which it did not list
    return _whole(found, rows, kit)


def _stays(step: dict[str, Any]) -> bool:
    """Whether a step was measured; one that failed is dropped by the next session, which may have mended it."""
    return bool(step["verdict"] == "passed" or (step["verdict"] == "not verified" and step["status"] == "done"))


def _whole(result: dict[str, Any], rows: list[dict[str, Any]], kit: dict[str, Any]) -> dict[str, Any]:
    measuring, there = [row for row in rows if row["kind"] not in MADE], {row["name"] for row in rows}
    absent = [name for name in kit["plan"] if name not in there]
    open_ones = [row["name"] for row in measuring if row["status"] == "not run"] + absent
    partial = [f"{len(open_ones)} of {len(measuring) + len(absent)} steps were not run"] if open_ones else []
    partial += [f"without {bundle}: {why}" for bundle, why in result["missing"].items()]
    verdicts = [row["verdict"] for row in measuring]
    failed, passed = "failed" in verdicts, "passed" in verdicts
    verdict = "failed" if failed else "passed" if passed else "not verified"
    return {**result, "steps": rows, "partial": partial, "verdict": verdict, "not_run": open_ones}


def _judged(step: dict[str, Any]) -> dict[str, Any]:
    changed = _changed_by_precision(step)
    faults = list(_faults(step, bool(changed))) if step["status"] in ("done", "not verified") else []
    if step["status"] == "failed":
        faults = [step.get("why") or "it does not say why"]
    verdict = "failed" if faults else "passed" if step["status"] == "done" and not changed else "not verified"
    result = {**step, "verdict": verdict, "faults": faults, "remarks": list(_remarks(step, bool(changed)))}
    if verdict == "not verified" and changed:
        result["why"] = changed
    if "batches" in step:
        return {**result, "batches": [_summed(each) for each in step["batches"]]}
    return _summed(result)


def _summed(row: dict[str, Any]) -> dict[str, Any]:
    """What was timed, with medians and ratios in place of samples that are sound."""
    if not _samples_sound(row):
        return row
    bare = {key: value for key, value in row.items() if key != "samples_ms"}
    return {**bare, "p50_ms": _medians(row), "ratios": _ratios(row)}


def _changed_by_precision(step: dict[str, Any]) -> str:
    """Why ours cannot be verified: in that precision the training-time network is as far from itself in float64."""
    links, precision = step.get("links", {}), step["given"].get("precision", "fp32")
    wrong = [name for name in (OURS, TRAINING) if name in links and links[name]["verdict"] == "failed"]
    if precision == "fp32" or wrong != [OURS, TRAINING]:
        return ""
    ours, training = (_error(Link.model_validate(links[name])) for name in wrong)
    if not ours <= AS_FAR * training:
        return ""
    return f"in {precision} the training-time network is as far from itself in float64."


def _faults(step: dict[str, Any], changed: bool) -> Iterator[str]:
    """Everything that is wrong with our side of a step that ran, each by the name of what it is of.

    ``changed``: what ours computes is wrong because of the precision alone, and no fault.
    """
    if OURS in step.get("links", {}) and not changed:
        link = Link.model_validate(step["links"][OURS])
        yield from _wrong(OURS, link)
        if (precision := step["given"].get("precision")) in LOW and link.verdict == "passed" and _error(link) < FLOAT32:
            yield f"{precision} was not honoured: {OURS} is {_error(link):.0e} from float64, as float32 is"
    if nodes := step.get("fallen"):
        yield f"{len(nodes)} nodes fell back to the processor: {', '.join(nodes[:8])}"
    row = step["kind"] == "row" and step["status"] == "done"
    timed = [step] if row else [each for each in step.get("batches", ()) if "why" not in each]
    if not all(map(_samples_sound, timed)):
        yield "its samples are not as many times above zero as it counts rounds"
    if step["kind"] == "engine":
        yield from _of_engine(step)


def _of_engine(step: dict[str, Any]) -> Iterator[str]:
    """What is wrong with an engine: its build, and the types that the opened one tells of its layers."""
    if step.get("built", "passed") != "passed":
        yield f"the engine's build {step['built']}: {step.get('note', '')}"
    wanted, types = label(step["given"]["precision"]), step.get("engine_types") or {}
    kinds = {name.rpartition(".")[2] for name in types}
    if types and (wanted not in kinds or (wanted == "FLOAT" and kinds != {wanted})):
        found = ", ".join(f"{count} {name}" for name, count in sorted(types.items()))
        yield f"{step['given']['precision']} was not honoured: the opened engine computes in {found}"


def _remarks(step: dict[str, Any], changed: bool) -> Iterator[str]:
    """What is wrong with the others' side, or with all because of the precision, and what speaks against its times."""
    for name, link in step.get("links", {}).items():
        if name != OURS or changed:
            yield from _wrong(name, Link.model_validate(link))
    for row in (step, *step.get("batches", ())):
        yield from row.get("quality", {}).get("reasons", ())
    yield from (f"batch {row['batch']}: {row['why']}" for row in step.get("batches", ()) if "why" in row)
    yield from (f"{name} is not beside it: {why}" for name, why in step.get("without", {}).items())
    if step.get("batches") and not step["engine_types"]:
        yield "the opened engine tells no types of its layers"
    if "placement" in step:
        yield f"which nodes ran where was {step['placement']}"


def _wrong(name: str, link: Link) -> Iterator[str]:
    """A form that computes something else than its network, and where."""
    if link.verdict != "passed":
        where = f" at {link.location.module}" if link.location and link.location.module else ""
        message = link.note or f"{_error(link):.1e} apart"
        yield f"{name} computes something else than the training form in float64{where}: {message}"


def _error(link: Link) -> float:
    return float(link.metrics.max_rel_error) if link.metrics else 0.0


def _samples_sound(step: dict[str, Any]) -> bool:
    samples = step.get("samples_ms", {})
    return OURS in samples and all(len(each) == step["rounds"] and min(each) > 0 for each in samples.values())


def _medians(step: dict[str, Any]) -> dict[str, float]:
    return {name: round(float(np.median(values)), 5) for name, values in step["samples_ms"].items()}


def _ratios(step: dict[str, Any]) -> dict[str, Any]:
    """How many times as fast ours is as each other form."""
    samples = {name: np.asarray(values) for name, values in step["samples_ms"].items()}
    wanted = [name for name in (OFFICIAL, VANILLA) if name in samples]
    return {name: ratio(OURS, samples[OURS], name, samples[name], 0).model_dump(mode="json") for name in wanted}


def place_of(result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Where the result of a GPU is kept.

    Raises:
        Refused: If it is of no GPU.
    """
    name = result["machine"]["card"].get("name")
    if result["rehearsal"] or not name:
        raise Refused(
            "the result is of no card: a rehearsal, or of a machine without one.",
            hint="It shows what failed; nothing of it is kept.",
            code="gpu.no-card",
        )
    return folder / f"gpu_{re.sub(r'[^a-z0-9]+', '_', str(name).lower()).strip('_')}.json"


def main() -> None:
    """See the module's words."""
    from gpu.tables import markdown, put
    from gpu.target_presets import put_presets

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--kit", type=Path, default=Path("build/gpu-kit/kit.json"))
    given = parser.parse_args()
    try:
        kit = json.loads(given.kit.read_text())
        found = evaluated(read(given.result, kit), kit)
        try:
            place = place_of(found)
            if place.is_file():
                found = joined(found, json.loads(place.read_text()), kit)
        finally:
            print(markdown(found))
    except RepaconvError as error:
        raise SystemExit(_told(error)) from error
    place.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    put(found)
    for path in put_presets(found, f"benchmarks/results/{place.name}"):
        print(f"{path}: presets; `make golden` says which exports they change")
    print(f"\n{place}: {found['verdict']}{''.join(f'; partial: {why}' for why in found['partial'])}")
    raise SystemExit({"passed": 0, "failed": 1}.get(found["verdict"], 3))


def _told(error: RepaconvError) -> int:
    import sys

    sys.stderr.write(f"{error.message} {error.hint}\n")
    return error.exit_code


if __name__ == "__main__":
    main()
