"""What `repaconv fold model.onnx` does to every kind of network: exactness, sizes, CPU time, and speed.

    python benchmarks/zoo.py [--seconds N] [--pairs | --speed | --cost] [NAME ...]

Every network is exported, folded and simplified in a process of its own, by the commands that a user types. Rows go to
`benchmarks/results/zoo.jsonl`; networks that have one are skipped, so that an interrupted run resumes. ``--speed``
measures instead (`benchmarks/results/zoo_speed.jsonl`): the folded graph in its target's default preset against the
same graph simplified by onnxsim, interleaved, one thread, one row per CPU ISA level; run it on a quiet machine.
``--cost`` measures the CPU time of `fold` and of onnxsim (`benchmarks/results/zoo_cost.jsonl`), in turn, because it
depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FOLDED, MEASURED, COSTS = (RESULTS / f"{name}.jsonl" for name in ("zoo", "zoo_speed", "zoo_cost"))
LIMIT_S = 1200
"""A network that takes longer is reported as one that did."""
COST_ROUNDS = 3
ROUNDS, FEWER, HEAVY = 80, 32, 2e9
"""Rounds; fewer of a graph that is known to multiply more than that."""
SLOWER, AGAIN = 0.98, 3
"""Times as fast, below which it is measured again in so many times the rounds, and the fold's own measurement asked."""
SAME: dict[str, Any] = {"ratio": 1.0, "low": 1.0, "high": 1.0, "openings": 0}
"""The row of two graphs that are the same."""
MIB = 2**20


def main() -> None:
    named = "e.g. timm:mobileone_s1; all, the smallest first, if left out"
    given = arguments(__doc__, named, Path("build/zoo"), speed, paired, cost)
    given.into.mkdir(parents=True, exist_ok=True)
    if given.one:
        sys.stdout.write(json.dumps((given.what or folded)(given.names[0], given.into)) + "\n")
        return
    sweep(given)


def arguments(
    about: str | None,
    named: str,
    into: Path,
    speed: Callable[..., Any],
    pairs: Callable[..., Any],
    cost: Callable[..., Any] | None = None,
) -> argparse.Namespace:
    """The command line of a sweep: names, and whether ``speed``, ``pairs`` or ``cost`` takes the place of folding."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", help=named)
    options.add_argument("--seconds", type=float, default=float("inf"), help="start no network after so many")
    what = options.add_mutually_exclusive_group()
    what.add_argument("--speed", dest="what", action="store_const", const=speed, help="measure, instead of folding")
    what.add_argument("--pairs", dest="what", action="store_const", const=pairs, help="make what --speed measures")
    if cost is not None:
        what.add_argument(
            "--cost", dest="what", action="store_const", const=cost, help="measure what both commands take"
        )
    options.add_argument("--into", type=Path, default=into, help="where the exported graphs are kept")
    options.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return options.parse_args()


def sweep(given: argparse.Namespace) -> None:
    """One network after the other, each in a process of its own; a row each."""
    from zoo_networks import names

    path = {speed: MEASURED, cost: COSTS, paired: given.into / "pairs.jsonl"}.get(given.what, FOLDED)
    command = [sys.executable, __file__, "--one", "--into", str(given.into)]
    command += {speed: ["--speed"], cost: ["--cost"], paired: ["--pairs"]}.get(given.what, [])
    here = processor() if given.what in (speed, cost) else {}
    written(path, given.names or names(), lambda name: in_its_own([*command, name]), given.seconds, here)


def written(
    path: Path, names: list[str], row_of: Callable[[str], dict[str, Any]], seconds: float, here: dict[str, str]
) -> None:
    """Append a row for every network that has none in the file; one that starts in time is finished.

    Args:
        path: The file, one row per line.
        names: The networks, in this order.
        row_of: Makes the row of one.
        seconds: Start no network after so many.
        here: What the rows are of besides, such as this processor; rows of others do not count.
    """
    end = time.monotonic() + seconds
    done = {row["name"] for row in rows(path) if here.items() <= row.items()}
    for name in names:
        if time.monotonic() > end:
            break
        if name in done:
            continue
        row = row_of(name)
        with path.open("a") as file:
            file.write(json.dumps({"name": name, **row, **here}) + "\n")
        sys.stdout.write(f"{name}: {row.get('problem') or row}\n")
        sys.stdout.flush()


def rows(path: Path) -> list[dict[str, Any]]:
    """What is known so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def in_its_own(command: list[str], limit_s: float = LIMIT_S, cwd: str | None = None) -> dict[str, Any]:
    """The row that a process of its own prints last; of one that dies, how it did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, cwd=cwd)
    except subprocess.TimeoutExpired:
        return {"problem": f"took longer than {limit_s} s"}
    if done.returncode:
        return {"problem": f"exit {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"[:300]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


# --- one network ------------------------------------------------------------------------------------


def folded(name: str, into: Path) -> dict[str, Any]:
    """The row of one network that is folded and simplified."""
    exported, about = graph_of(name, into)
    run = into / "run"
    ours, theirs = both_timed(exported, into)
    row = {**about, "fold": ours.pop("row"), "onnxsim": theirs.pop("row")}
    said = json.loads(ours["stdout"])
    if said["status"] != "ok" and said["errors"]:
        return {**row, "problem": f"{said['errors'][0]['code']}: {said['errors'][0]['message']}"[:300]}
    fold = json.loads((run / "fold.json").read_text())
    kept = ("verdict", "parameters", "macs", "nodes", "applied")
    return {**row, **{key: fold[key] for key in kept}, "float64": _float64(exported)}


def both_timed(exported: Path, into: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """See `timed`: `repaconv fold`, and onnxsim."""
    run, simple = into / "run", into / "simple.onnx"
    shutil.rmtree(run, ignore_errors=True)
    for left in (simple, simple.with_name("simple.onnx.data")):  # to which onnxsim would append
        left.unlink(missing_ok=True)
    ours = timed(["repaconv", "fold", str(exported), "-o", str(run), "--no-measure", "--format", "json"])
    return ours, timed(["onnxsim", str(exported), str(simple)])


def cost(name: str, into: Path) -> dict[str, Any]:
    """What both commands take: the least CPU time, and the most memory, of several runs in turn."""
    exported, _ = graph_of(name, into)
    rounds = [[one["row"] for one in both_timed(exported, into)] for _ in range(COST_ROUNDS)]
    fold, onnxsim = (
        {"cpu_s": min(row["cpu_s"] for row in rows), "memory_mib": max(row["memory_mib"] for row in rows)}
        for rows in zip(*rounds, strict=True)
    )
    return {"fold": fold, "onnxsim": onnxsim, "file_mib": round(exported.stat().st_size / MIB)}


def graph_of(name: str, into: Path) -> tuple[Path, dict[str, Any]]:
    """Its graph in float32, exported once, and what is known of the module."""
    path = into / f"{name.replace(':', '_')}.onnx"
    about = path.with_suffix(".json")
    if not about.is_file():
        found = _exported(name, path)
        about.write_text(json.dumps(found))
    known: dict[str, Any] = json.loads(about.read_text())
    return path, known


def _exported(name: str, path: Path) -> dict[str, Any]:
    import torch
    from torch.utils._pytree import tree_leaves
    from zoo_networks import network

    from repaconv.graph.element_type_conversion import retyped
    from repaconv.onnx_export.float64_exporter import network_to_onnx

    module, shape = network(name)
    with torch.inference_mode():
        leaves = [leaf for leaf in tree_leaves(module(torch.zeros(1, *shape))) if isinstance(leaf, torch.Tensor)]
    outputs = [f"output_{n}" for n in range(len(leaves))]
    double, by = network_to_onnx(module.double(), shape, input_name="input", outputs=outputs)
    path.write_bytes(retyped(double, {11: 1}).SerializeToString())
    count = sum(weight.numel() for weight in module.parameters())
    return {"size": shape[-1], "exporter": by, "module": count, "reparameterized": _reparameterized(name, module)}


def _reparameterized(name: str, module: Any) -> int | None:
    """Parameters that timm's own leaves, where it changes something."""
    if not name.startswith("timm:"):
        return None
    from timm.utils.model import reparameterize_model

    before, after = (sum(p.numel() for p in one.parameters()) for one in (module, reparameterize_model(module)))
    return after if after != before else None


def _float64(path: Path) -> float | None:
    """How far the fold made in float64 is from the graph as given in it, of the largest number; None if unknown."""
    import numpy as np
    import onnx

    from repaconv.sources.graph_fold import folded as folded_graph
    from repaconv.verification.float64_graphs import Float64, widened

    given = widened(onnx.load(path))
    shape = [dim.dim_value or 1 for dim in given.graph.input[0].type.tensor_type.shape.dim]
    feeds = {given.graph.input[0].name: np.random.default_rng(0).standard_normal(shape)}
    right, found = (Float64(model).run(feeds) for model in (given, folded_graph(path, given).model))
    apart = [abs(found[key] - right[key]).max() / max(abs(right[key]).max(), 1e-300) for key in right]
    return float(max(apart)) if np.isfinite(apart).all() else None


_TIMED = """
import json, os, resource, subprocess, sys
with open(sys.argv[1], "w") as out:
    code = subprocess.run(sys.argv[2:], stdout=out, stderr=subprocess.DEVNULL).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss, code]))
"""
"""A small process starts the command: the memory of one that was started by a large process is at least that one's."""


def timed(command: list[str]) -> dict[str, Any]:
    """Run one of the commands in this environment, on one thread: its CPU seconds, and its memory at most.

    Python keeps what it compiled, as of an installed package, and OpenBLAS takes the kernels of this CPU.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    environment = {**kept, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        program = str(Path(sys.executable).parent / command[0])
        done = subprocess.run(
            [sys.executable, "-c", _TIMED, str(out), program, *command[1:]],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            check=True,
        )
        spent, memory, code = json.loads(done.stdout)
        row = {"cpu_s": round(spent, 2), "memory_mib": round(memory * 1024 / MIB), "exit_code": code}
        return {"row": row, "stdout": out.read_text()}


def pair_of(name: str, into: Path, *, measure: bool = False) -> tuple[Path, Path]:
    """Its target's form, and the same graph through onnxsim; made once, but anew where the fold measures."""
    exported = into / f"{name.replace(':', '_')}.onnx"
    best, simple = exported.with_suffix(".best.onnx"), exported.with_suffix(".simple.onnx")
    if simple.is_file() and not measure:
        return best, simple
    graph_of(name, into)
    return pair(exported, measure=measure)


def pair(exported: Path, *, measure: bool = False) -> tuple[Path, Path]:
    """The same of a graph that is there."""
    import repaconv

    run, best = exported.with_suffix(".run"), exported.with_suffix(".best.onnx")
    shutil.rmtree(run, ignore_errors=True)
    best.unlink(missing_ok=True)
    repaconv.fold(exported, out=run, force=True, measure=measure)
    repaconv.export(run, onnx=best)
    return best, simplified(exported)


def simplified(exported: Path) -> Path:
    """The graph through onnxsim, made once."""
    import onnx
    import onnxsim

    simple = exported.with_suffix(".simple.onnx")
    if not simple.is_file():
        part = simple.with_suffix(".part")
        onnx.save(onnxsim.simplify(onnx.load(exported))[0], part)
        part.replace(simple)  # last, and whole: it says that all are there
    return simple


def speed(name: str, into: Path) -> dict[str, Any]:
    """The row of one network that is measured."""
    heavy = {row["name"] for row in rows(FOLDED) if (row.get("macs") or [0])[-1] > HEAVY}
    rounds = FEWER if name in heavy else ROUNDS
    return compared(partial(pair_of, name, into), rounds)


def compared(pair: Callable[..., tuple[Path, Path]], rounds: int, **how: Any) -> dict[str, Any]:
    """The row of a pair; of one that is slower, that of more rounds, and then of a fold that measures.

    Args:
        pair: Makes both graphs; ``measure`` says whether the fold measures.
        rounds: Rounds of the first measurement.
        how: Options of `repaconv.bench`.
    """
    ours, other = pair()
    if _alike(ours, other):
        return SAME
    for more in (1, AGAIN):
        row = _beside(ours, other, more * rounds, **how)
        if row["ratio"] >= SLOWER:
            return row
    ours, other = pair(measure=True)
    again = SAME if _alike(ours, other) else _beside(ours, other, AGAIN * rounds, **how)
    return {**again, "without_its_measurement": row["ratio"]}


def _alike(one: Path, other: Path) -> bool:
    """Whether they are the same nodes and weights, so that there is nothing to measure."""
    import onnx

    def contents(path: Path) -> list[Any]:
        graph = onnx.load(path).graph
        return [*graph.node, *sorted(graph.initializer, key=lambda weight: weight.name)]

    return contents(one) == contents(other)


def _beside(best: Path, simple: Path, rounds: int, **how: Any) -> dict[str, Any]:
    """Their ratio, and its interval over openings."""
    import repaconv

    found = repaconv.bench(best, against=simple, rounds=rounds, threads=1, **{"batch": 1, **how})
    assert found.ratio is not None
    row = {"ratio": found.ratio.median, "low": found.ratio.low, "high": found.ratio.high}
    return {**{name: round(value, 4) for name, value in row.items()}, "openings": found.session_loads}


def processor() -> dict[str, str]:
    """What the rows of a measurement are of."""
    from repaconv.benchmark.cpu_isa_level import isa_level
    from repaconv.benchmark.machine_fingerprint import cpu_model

    return {"cpu": cpu_model(), "family": isa_level("x86_64")}


def paired(name: str, into: Path) -> dict[str, Any]:
    """Both are made."""
    return {"bytes": [path.stat().st_size for path in pair_of(name, into)]}


if __name__ == "__main__":
    main()
