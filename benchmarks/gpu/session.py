"""All steps on this machine, within a time limit: `python -m gpu.session --work DIR --seconds N -o result.json`.

The result is written anew after every step, so that a session that is cut off has given what it had. Called again with
the same folder it goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu.plan import Step, steps

FORMAT = "repaconv-gpu-result/1"
LARGEST = 16 * 2**20
TOGETHER = 4
"""Networks that are made at once, before anything is timed."""
MADE = ("prepare", "graphs")
PACKAGES = (
    "repaconv", "torch", "numpy", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "triton", "nvidia-cudnn-cu13",
    "tensorrt", "tensorrt-rtx-cu13", "nvidia-ml-py",
)  # fmt: skip


class Session:
    """What was done so far, and what is written of it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.work, self.out, self.rehearsal = given.work.resolve(), given.out, given.rehearsal
        self.ends = time.monotonic() + given.seconds
        self.kit = json.loads((given.kit or given.work / "kit.json").read_text())
        self.missing = json.loads(given.missing)
        self.rows = self.work / ("rehearsed" if given.rehearsal else "rows")
        self.rows.mkdir(parents=True, exist_ok=True)
        self.plan = _chosen(steps(given.rehearsal), given.only)
        self.machine, absent = facts(self.plan)
        self.idle = _idle(self.plan, absent)

    def left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()

    def known(self, step: Step) -> dict[str, Any] | None:
        """What came of a step, if it was done or cannot be."""
        if step.name in self.idle:
            return {"status": "not verified", "why": self.idle[step.name]}
        path = self.rows / f"{step.name}.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def ready(self, step: Step) -> bool:
        """Whether its network was made; one that was cut off is made another time, one that failed is the reason."""
        made = self.known(next(each for each in self.plan if each.kind == "prepare" and each.model == step.model))
        if made is not None and made["status"] != "done":
            self.idle[step.name] = f"{step.model} was not made; see its step."
        return made is not None and made["status"] == "done"

    def do(self, step: Step) -> None:
        """A process, its end, and what it left; what fails for want of time is done again another time."""
        path = self.rows / f"{step.name}.json"
        part = path.with_suffix(".part")
        limit = min(step.limit_s, self.left())
        command = [sys.executable, "-m", "gpu.steps", step.name, str(self.work), str(part)]
        with (self.rows / f"{step.name}.log").open("wb") as log:
            child = subprocess.Popen(
                [*command, *(["--rehearsal"] if self.rehearsal else [])],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // TOGETHER))}
                if step.kind in ("prepare", "graphs") else None,
            )  # fmt: skip
            try:
                code = child.wait(timeout=max(1, limit))
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 9)
                child.wait()
                code = None
        if part.is_file() and code == 0:
            part.replace(path)
        elif code is None and limit < step.limit_s:
            return
        else:
            why = f"took longer than {step.limit_s} s" if code is None else f"its process ended with {code}"
            tail = (self.rows / f"{step.name}.log").read_text(errors="replace").splitlines()[-6:]
            path.write_text(json.dumps({"status": "failed", "why": why, "trace": tail}))

    def write(self) -> dict[str, Any]:
        """The result as it is now; traces go first where it would grow too large."""
        rows = [{**step._asdict(), **(self.known(step) or {"status": "not run"})} for step in self.plan]
        result = {
            "format": FORMAT,
            "kit": self.kit["id"],
            "rehearsal": self.rehearsal,
            "machine": self.machine,
            "missing": self.missing,
            "steps": rows,
        }
        if len(json.dumps(result)) > LARGEST - 2**16:
            rows = [{key: value for key, value in row.items() if key not in ("trace", "tuned")} for row in rows]
            result["steps"] = rows
        text = canonical(result)
        whole = {**result, "sha256": hashlib.sha256(text.encode()).hexdigest()}
        part = self.out.with_suffix(".part")
        part.write_text(canonical(whole))
        part.replace(self.out)
        return whole


def canonical(value: Any) -> str:
    """JSON of one form only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _chosen(plan: list[Step], only: str | None) -> list[Step]:
    """Steps whose names have that in them, and the networks and graphs of their models."""
    if only is None:
        return plan
    wanted = {step.name for step in plan if only in step.name}
    models = {step.model for step in plan if step.name in wanted}
    return [step for step in plan if step.name in wanted or (step.kind in MADE and step.model in models)]


def facts(plan: list[Step]) -> tuple[dict[str, Any], dict[str, str]]:
    """The machine, and why each target is not here; asked by a process that goes, since it takes part of the card."""
    targets = sorted({step.given["target"] for step in plan if step.kind not in MADE})
    done = subprocess.run(
        [sys.executable, "-c", f"from gpu.session import tell; tell({targets!r})"],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        print(f"not verified: repaconv does not run on this Python, which ended with {done.returncode}")
        raise SystemExit(3)
    told = json.loads(done.stdout.splitlines()[-1])
    return told["machine"], told["absent"]


def tell(targets: list[str]) -> None:
    """Print the machine, and of the targets those that are not here, with the reason."""
    from repaconv.benchmark.gpu_monitor import describe_gpu
    from repaconv.benchmark.machine_fingerprint import version_of
    from repaconv.core import plugins
    from repaconv.core.errors import EnvironmentProblem
    from repaconv.stages.shared.common_checks import load_target

    absent = {}
    for target in targets:
        try:
            plugins.load(plugins.ENGINES, load_target(target).runtime).version()
        except EnvironmentProblem as problem:
            absent[target] = problem.message
    machine = {
        "card": describe_gpu(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {name: found for name in PACKAGES if (found := version_of(name))},
    }
    print(json.dumps({"machine": machine, "absent": absent}))


def _idle(plan: list[Step], absent: dict[str, str]) -> dict[str, str]:
    """Steps that cannot be run here, and what is made for those alone; each with the reason."""
    idle = {step.name: absent[step.given["target"]] for step in plan if step.given.get("target") in absent}
    live = [step for step in plan if step.name not in idle and step.kind not in MADE]
    models = {step.model for step in live}
    graphs = {step.model for step in live if "ort" in step.given["target"] or step.given["target"] == "x86-64"}
    for step in plan:
        if step.kind in MADE and step.model not in (models if step.kind == "prepare" else graphs):
            idle[step.name] = "nothing that is here needs it"
    return idle


def run(session: Session) -> dict[str, Any]:
    """Networks together, all else alone, in the order of the plan; a step whose need failed is not run."""
    todo = [step for step in session.plan if session.known(step) is None]
    for why in sorted(set(session.idle.values()) - {"nothing that is here needs it"}):
        print(f"not verified: {why}", flush=True)
    made = [step for step in todo if step.kind == "prepare"]
    with ThreadPoolExecutor(TOGETHER) as pool:
        list(pool.map(session.do, made))
    session.write()
    for step in todo:
        if step.kind == "prepare" or not session.ready(step):
            continue
        if session.left() < 10:
            break
        begin = time.monotonic()
        session.do(step)
        found = session.known(step) or {"status": "not run", "why": "the time is over"}
        print(f"{step.name}: {found['status']} {found.get('why') or found.get('not_verified', '')}".rstrip(),
              f"({time.monotonic() - begin:.0f} s)", flush=True)  # fmt: skip
        session.write()
    return session.write()


def exit_code(result: dict[str, Any]) -> int:
    """1 where something failed, 3 where nothing was verified on a card for want of one, else 0."""
    judged = [step["status"] for step in result["steps"] if step["kind"] in ("row", "engine", "tune")]
    if "failed" in judged:
        return 1
    return 0 if "done" in judged else 3


def main() -> None:
    """See the module's words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--only", help="steps whose names have this in them")
    parser.add_argument("--rehearsal", action="store_true", help="small networks on the processor: no result of a card")
    parser.add_argument("--kit", type=Path, help="kit.json, where it is not in the folder")
    parser.add_argument("--missing", default="{}", help="what did not arrive, and why (JSON)")
    parser.add_argument("-o", "--out", type=Path, default=Path("result.json"))
    result = run(Session(parser.parse_args()))
    counts: dict[str, int] = {}
    for step in result["steps"]:
        counts[step["status"]] = counts.get(step["status"], 0) + 1
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())))
    raise SystemExit(exit_code(result))


if __name__ == "__main__":
    main()
