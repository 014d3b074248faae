"""Mutants of all code that folds, rewrites, reads or exports a network: swapped arguments, negated conditions, numbers
off by one, dropped terms. Does any pass verification while its graph computes something else?

    PYTHONPATH=tests:benchmarks python -m torture.code_mutants FOLDER [--count 100] [--seed 42] [--operators NAME ...]

Each mutant is tried on four networks that run its line (`torture.mutation_test_networks`), by the commands as every
user runs them. Everything that was written is then compared with the original network by code without the change, in
another process, on other inputs. The mutants are sampled with the seed alone, as many of each folder and operator. An
interrupted run resumes.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torture import mutation_operators, mutation_test_networks
from torture.child_process import in_a_child

PACKAGE = Path(__file__).resolve().parents[2] / "repaconv"
RESULT = PACKAGE.parent / "benchmarks" / "results" / "code_mutants.json"
MODULE_GROUPS = {
    "the algebra and the papers": ("algebra/*.py", "methods/*.py", "methods/*/*.py"),
    "the fold": ("rewrites/fold/*.py",),
    "rewrites for speed": ("rewrites/speed/*.py",),
    "what reads a graph": ("graph/*.py",),
    "the export": ("onnx_export/*.py",),
    "the fold of live modules": ("torch_fold/*.py",),
}
NETWORKS = 4
FATES = ("survived", "caught", "stopped", "as good", "the same")
"""The worst of all networks counts, in this order."""


class Mutant(NamedTuple):
    """A change, and the networks that run its line."""

    group: str
    file: str
    change: mutation_operators.Change
    networks: tuple[str, ...]


def sources(group: str) -> list[Path]:
    """Its files."""
    found = {path for pattern in MODULE_GROUPS[group] for path in PACKAGE.glob(pattern)}
    return sorted(path for path in found if path.name != "__init__.py")


def traced(net: Path, at: Path) -> tuple[list[tuple[str, int]], str]:
    """The lines that a network runs by, and the hash of what was written."""
    known, seen = {str(path) for group in MODULE_GROUPS for path in sources(group)}, set()

    def line(frame: FrameType, _event: str, _told: Any) -> Any:
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, *_: Any) -> Any:
        return line if frame.f_code.co_filename in known else None

    threading.settrace(call)
    sys.settrace(call)
    message = mutation_test_networks.run(net, at)
    sys.settrace(None)
    return sorted((str(Path(file).relative_to(PACKAGE)), number) for file, number in seen), message


def prepared(at: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """All networks, the lines that each runs by, and what sound folds of them are and differ by.

    And the networks that are left out, and why.
    """
    networks, found, left_out = at / "networks", dict[str, Any](), dict[str, str]()
    networks.mkdir(parents=True, exist_ok=True)
    problems = in_a_child(partial(mutation_test_networks.made, networks), 900)
    if isinstance(problems, str):
        raise SystemExit(f"the networks were not all made ({problems}): run it again, it resumes")
    left_out |= problems
    left_out |= {path.name.removeprefix("unused "): "runs on few random inputs" for path in networks.glob("unused *")}
    for name, why in left_out.items():
        sys.stdout.write(f"left out: {name}: {why}\n")
    for net in sorted(path.parent for path in networks.glob("*/known.pt")):
        if not (net / "lines.json").is_file():
            with tempfile.TemporaryDirectory() as scratch:
                outcome = in_a_child(partial(traced, net, Path(scratch)), 300)
                off = (
                    in_a_child(partial(mutation_test_networks.wrong, net, Path(scratch)))
                    if isinstance(outcome, list)
                    else outcome
                )
            sound = isinstance(off, list)
            sys.stdout.write(
                f"{net.name}: {f'{len(outcome[0])} lines, off by {off[1]:.2g}, {off[0]}' if sound else off}\n"
            )
            sys.stdout.flush()
            known = {"lines": outcome[0], "written": outcome[1], "off": off[1]} if sound and off[1] < 1 else None
            (net / "lines.json").write_text(json.dumps(known))
        if known := json.loads((net / "lines.json").read_text()):
            found[net.name] = known
        else:
            left_out[net.name] = "not written, or not right, without any change"
    return found, left_out


def mutants(known: dict[str, Any], seed: int, operators: Iterable[str]) -> list[Mutant]:
    """All that any network runs by, in the order in which they are tried: rooms and operators by turns."""
    lines = {name: {tuple(line) for line in net["lines"]} for name, net in known.items()}
    cells: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for group in MODULE_GROUPS:
        for path in sources(group):
            file, events, body = str(path.relative_to(PACKAGE)), mutation_operators.lines_of(path), _bodies(path)
            for change in mutation_operators.changes_of(path):
                own, statement, first = change.lines
                runs = []
                for name, seen in lines.items():
                    by = own if own in events else statement
                    if (
                        (file, first if _at_import(change, body) else by) in seen
                        if change.function
                        else any((file, line) in seen for line in body)
                    ):
                        runs.append(name)
                if runs:
                    cells[group, change.operator].append(Mutant(group, file, change, tuple(runs)))
    for key, cell in cells.items():
        random.Random(f"{seed} {key}").shuffle(cell)
    order = [cells[group, operator] for operator in operators for group in MODULE_GROUPS]
    return [mutant for turn in zip_longest(*order) for mutant in turn if mutant is not None]


def _bodies(path: Path) -> set[int]:
    """Lines of statements in functions."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        each.lineno for node in functions for each in ast.walk(node) if isinstance(each, ast.stmt) and each is not node
    }


def _at_import(change: mutation_operators.Change, body: set[int]) -> bool:
    """Whether it is in a default."""
    return change.lines[0] not in body and change.lines[0] < change.lines[2]


def tried(mutant: Mutant, known: dict[str, Any], at: Path, seed: int) -> dict[str, Any]:
    """What came of it, by network."""
    chosen = random.Random(f"{seed} {mutant.file} {mutant.change.number}")
    found = {}
    for name in chosen.sample(mutant.networks, min(NETWORKS, len(mutant.networks))):
        with tempfile.TemporaryDirectory() as scratch:
            found[name] = _ended(mutant, at / "networks" / name, known[name]["written"], Path(scratch))
    return found


def _ended(mutant: Mutant, net: Path, sound: str, at: Path) -> tuple[str, str]:
    ended = in_a_child(partial(_mutated, mutant, net, at))
    if isinstance(ended, str):
        return "stopped", ended[1:]
    if ended[0] != "passed":
        return ended[0], ended[1]
    if ended[1] == sound:
        return "the same", ""
    off = in_a_child(partial(mutation_test_networks.wrong, net, at), 180)
    if isinstance(off, str):
        return "survived", f"the comparison ended with {off}"
    if off[1] > 1:
        return "survived", f"{off[1]:.3g} of what is allowed ({off[0]})"
    if discarded := mutation_test_networks.discarded(at):
        return discarded
    return "as good", f"{off[1]:.3g} of what is allowed ({off[0]})"


def _mutated(mutant: Mutant, net: Path, at: Path) -> list[str]:
    mutation_operators.plant(PACKAGE / mutant.file, mutant.change.number)
    from repaconv.core.errors import GateFailed, RepaconvError

    try:
        return ["passed", mutation_test_networks.run(net, at)]
    except GateFailed as error:
        return ["caught", error.code]
    except RepaconvError as error:
        return ["stopped", error.code]


def worst(found: dict[str, Any]) -> str:
    """Of all networks."""
    return min((ended for ended, _ in found.values()), key=FATES.index)


def warm() -> None:
    """Import what others made, once for all children; nothing of repaconv."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnx.reference
    import onnx_ir
    import onnxruntime
    import onnxsim
    import pydantic
    import rich.console
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.onnx.export(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), (torch.zeros(1, 3, 8, 8),), dynamo=True, verbose=False)
    assert not any(name.split(".")[0] == "repaconv" for name in sys.modules), "a mutant could not be planted"
    del onnx, onnx_ir, onnxruntime, onnxsim, pydantic, rich


def main() -> None:
    """Try so many, and write the result."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="the networks, and what was tried")
    options.add_argument("--count", type=int, default=100, help="mutants [default: 100]")
    options.add_argument("--seed", type=int, default=42)
    options.add_argument(
        "--operators", nargs="+", choices=mutation_operators.OPERATORS, default=mutation_operators.OPERATORS
    )
    options.add_argument(
        "-o", "--out", type=Path, default=RESULT, help="[default: benchmarks/results/code_mutants.json]"
    )
    given = options.parse_args()
    at, count, seed = given.folder, given.count, given.seed
    at.mkdir(parents=True, exist_ok=True)
    warm()
    known, left_out = prepared(at)
    order = mutants(known, seed, given.operators)
    sys.stdout.write(f"{len(known)} networks, {len(order)} mutants\n")
    done = at / f"done-{seed}.jsonl"
    rows = [json.loads(line) for line in done.read_text().splitlines()] if done.is_file() else []
    judged = {(row["file"], row["number"]) for row in rows}
    for mutant in order[:count]:
        change = mutant.change
        if (mutant.file, change.number) in judged:
            continue
        found = tried(mutant, known, at, seed)
        row = {"room": mutant.group, "file": mutant.file, "line": change.lines[0], "number": change.number}
        row |= {"function": change.function, "operator": change.operator, "was": change.was, "becomes": change.becomes}
        rows.append({**row, "ended": worst(found), "networks": found})
        with done.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.write(f"{len(rows)} {rows[-1]['ended']}: {mutant.file}:{change.lines[0]} {change.operator}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(Counter(row['ended'] for row in rows))}\n")
    places = {(mutant.file, mutant.change.number): place for place, mutant in enumerate(order)}
    rows.sort(key=lambda row: places[row["file"], row["number"]])
    off = max(net["off"] for net in known.values())
    found = {"seed": seed, "networks": len(known), "sound": off, "left_out": left_out, "mutants": rows}
    given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
