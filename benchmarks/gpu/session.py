"""The steps that gain most on this machine within a time limit: `python -m gpu.session --work DIR --seconds N -o FILE`.

After every step, `step_selection` chooses again with its result and its time. The result file is written after every
step, so that an interrupted session keeps what it measured. Called again with the same folder, it resumes.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from gpu.plan import MADE, Step, needs, steps
from gpu.step_selection import TOGETHER, Cell, Chosen, Known, Machine, Selection, known_of, listed, unable

FORMAT = "repaconv-gpu-result/1"
LARGEST = 16 * 2**20
SPARE_S = 5.0
"""Seconds that remain for writing the result."""
PACKAGES = (
    "repaconv", "torch", "numpy", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "triton", "nvidia-cudnn-cu13",
    "tensorrt", "tensorrt-rtx-cu13", "nvidia-ml-py",
)  # fmt: skip


class Session:
    """What was done so far, what is done next, and what is written of it."""

    clock: Callable[[], float] = staticmethod(time.monotonic)
    held: tuple[int, ...] = ()
    """Files that every process of a step holds, too: the folder's lock."""

    def __init__(self, given: argparse.Namespace, facts: Mapping[str, Any]) -> None:
        """``facts`` is what `facts` returns."""
        self.work, self.out, self.rehearsal = given.work.resolve(), given.out, given.rehearsal
        self.ends = self.clock() + given.seconds
        self.kit = given.kit
        self.missing = json.loads(given.missing)
        self.rows = self.work / ("rehearsed" if given.rehearsal else "rows")
        self.plan = steps(given.rehearsal)
        self.wanted = _chosen(self.plan, given.only)
        self.described, self.machine = facts["machine"], Machine(**facts["for_selection"])
        self.left_out = {step.name: why for step in self.plan if (why := unable(step, self.machine))}
        earlier = self.kit.get("earlier", {})
        self.known = [Known(Cell(*cell), gain) for cell, gain in earlier.get("known", ())]
        self.earlier_s = dict(earlier.get("seconds", {}))
        if given.resume is not None:
            self.resume(given.resume)
        self.done: dict[str, dict[str, Any]] = {}
        for step in self.plan:
            self.take(step)

    def left(self) -> float:
        """Seconds."""
        return self.ends - self.clock()

    def take(self, step: Step) -> None:
        """Take in what a step has written, if it was run to its end."""
        path = self.rows / f"{step.name}.json"
        if path.is_file() and step.name not in self.left_out:
            self.done[step.name] = json.loads(path.read_text())
            self.known += known_of(step, self.done[step.name], self.machine.device)

    def outcome(self, step: Step) -> dict[str, Any] | None:
        """What came of a step, if it was done or cannot be."""
        if step.name in self.left_out:
            return {"status": "not verified", "why": self.left_out[step.name]}
        return self.done.get(step.name)

    def resume(self, path: Path) -> None:
        """Take in an earlier result: of this kit and GPU what was measured, of any other what it predicts.

        Raises:
            SystemExit: If it is not a result.
        """
        try:
            found = json.loads(path.read_text())
            device = found["machine"]["card"].get("name", "")
            rows = [({each: row.pop(each) for each in Step._fields}, row) for row in found["steps"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            sys.stderr.write(f"{path} is not a result of the kit: {error!r}.\n")
            raise SystemExit(2) from error
        here = (self.kit["id"], self.machine.device, self.rehearsal)
        same = here == (found.get("kit"), device, found.get("rehearsal"))
        self.rows.mkdir(parents=True, exist_ok=True)
        for fields, outcome in rows:
            step, place = Step(**fields), self.rows / f"{fields['name']}.json"
            if outcome.get("status") == "done" and "seconds" in outcome:
                self.earlier_s[step.name] = outcome["seconds"]
            if not same:
                self.known += known_of(step, outcome, device)
            elif outcome.get("status") == "done" and step.kind not in MADE and not place.is_file():
                place.write_text(json.dumps(outcome))

    def chosen(self) -> list[Chosen]:
        """The steps that are run in the time that is left, the next one first."""
        for step in self.wanted:
            for needed in needs(step) if step.kind not in MADE and step.name not in self.done else ():
                if self.done.get(needed.name, {}).get("status", "done") != "done":
                    self.left_out.setdefault(step.name, f"{needed.name} did not come out; see that step.")
        selection = Selection(self.wanted, self.machine, self.done, self.left_out, self.known, self.earlier_s)
        return selection.chosen(self.left() - SPARE_S)

    def made_together(self, chosen: Sequence[Chosen]) -> list[Step]:
        """The networks, or graphs, that are made at once for the next steps; none if the very next one needs none.

        One per network, since two steps would write into the same folder, and none before what it needs itself.
        """
        kind = next((kind for kind in MADE if any(step.kind == kind for step in chosen[0].needed)), None)
        found: dict[str, Step] = {}
        for step in (step for each in chosen for step in each.needed if step.kind == kind):
            if all(needed.name == step.name or needed.name in self.done for needed in needs(step)):
                found.setdefault(step.model, step)
        return list(found.values())[:TOGETHER]

    def do(self, step: Step) -> None:
        """A process, its end, and what it left; what fails for want of time is done again another time."""
        path = self.rows / f"{step.name}.json"
        part = path.with_suffix(".part")
        limit = min(step.limit_s, self.left())
        command = [sys.executable, "-m", "gpu.steps", step.name, str(self.work), str(part)]
        with (self.rows / f"{step.name}.log").open("wb") as log:
            child = subprocess.Popen(
                [*command, *(["--rehearsal"] if self.rehearsal else [])],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=self.held,
                env={**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // TOGETHER))}
                if step.kind in MADE else None,
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
        rows = [{**step._asdict(), **(self.outcome(step) or {"status": "not run"})} for step in self.plan]
        result = {
            "format": FORMAT,
            "kit": self.kit["id"],
            "rehearsal": self.rehearsal,
            "machine": self.described,
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
    """Steps whose names have one of these words in them, and the networks and graphs of their models."""
    if only is None:
        return plan
    wanted = {step.name for step in plan if any(word in step.name for word in only.split(","))}
    models = {step.model for step in plan if step.name in wanted}
    return [step for step in plan if step.name in wanted or (step.kind in MADE and step.model in models)]


def facts(plan: list[Step]) -> dict[str, Any]:
    """The machine; asked by a process that ends, since it takes some of the GPU's memory."""
    targets = sorted({step.given["target"] for step in plan if step.kind not in MADE})
    done = subprocess.run(
        [sys.executable, "-c", f"from gpu.session import tell; tell({targets!r})"],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        print(f"not verified: repaconv does not run on this Python, which ended with {done.returncode}")
        raise SystemExit(3)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def tell(targets: list[str]) -> None:
    """Print the machine, and of the targets those that are not here, with the reason."""
    from repaconv.benchmark.gpu_monitor import describe_gpu
    from repaconv.benchmark.machine_fingerprint import version_of
    from repaconv.core import plugins
    from repaconv.core.errors import EnvironmentProblem
    from repaconv.stages.shared.target_lookup import load_target

    absent, devices = {}, {target: load_target(target) for target in targets}
    engines = {target: plugins.load(plugins.ENGINES, device.runtime) for target, device in devices.items()}
    for target, engine in engines.items():
        try:
            engine.version()
        except EnvironmentProblem as problem:
            absent[target] = problem.message
    machine = {
        "card": (gpu := describe_gpu()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {name: found for name in PACKAGES if (found := version_of(name))},
    }
    for_selection = {
        "device": gpu.get("name", ""),
        "capability": gpu.get("compute_capability", ""),
        "memory_gib": gpu.get("memory_gib", 0.0),
        "capabilities": {target: device.compute_capability for target, device in devices.items()},
        "absent": absent,
        "ahead": [target for target, engine in engines.items() if "elsewhere" in engine.can],
    }
    print(json.dumps({"machine": machine, "for_selection": for_selection}))


def assumed(found: dict[str, Any], target: str, memory_gib: float, missing: Iterable[str]) -> dict[str, Any]:
    """The facts of a machine with the GPU of a target: what is absent there is what the kit lacks.

    Raises:
        SystemExit: If the target is for no single compute capability.
    """
    known = found["for_selection"]
    if not known["capabilities"].get(target):
        names = ", ".join(name for name, capability in known["capabilities"].items() if capability)
        sys.stderr.write(f"{target} is not a target with a compute capability: {names}.\n")
        raise SystemExit(2)
    bundles = {each: bundle for each in known["capabilities"] if (bundle := _bundle(each, known["ahead"]))}
    why = {each: f"the bundle {bundle} is missing." for each, bundle in bundles.items() if bundle in missing}
    why |= {each: "TensorRT is not in the kit." for each, bundle in bundles.items() if bundle == TENSORRT}
    changed = {"device": target, "capability": known["capabilities"][target], "memory_gib": memory_gib, "absent": why}
    return {**found, "for_selection": {**known, **changed}}


TENSORRT = "tensorrt"


def _bundle(target: str, ahead: Iterable[str]) -> str:
    """The bundle that brings a target's runtime; empty if PyTorch is all that it needs."""
    if target in ahead:
        return "tensorrt-rtx"
    if target.startswith("cuda"):
        return {"cuda-ort": "onnxruntime", "cuda-ort@tensorrt": TENSORRT}.get(target, "")
    return "" if target.startswith(("x86-64", "cpu")) else TENSORRT


def run(session: Session) -> dict[str, Any]:
    """Each time what gains most in the time that is left, alone, after what is made for it and for the next ones."""
    session.rows.mkdir(parents=True, exist_ok=True)
    for why in sorted({session.left_out[step.name] for step in session.wanted if step.name in session.left_out}):
        print(f"left out: {why}", flush=True)
    while chosen := session.chosen():
        if made := session.made_together(chosen):
            with ThreadPoolExecutor(TOGETHER) as pool:
                list(pool.map(session.do, made))
            for step in made:
                session.take(step)
        else:
            step, begun = chosen[0].step, session.clock()
            session.do(step)
            session.take(step)
            found = session.outcome(step) or {"status": "not run", "why": "the time is over"}
            print(f"{step.name}: {found['status']} {found.get('why') or found.get('not_verified', '')}".rstrip(),
                  f"({session.clock() - begun:.0f} s, {chosen[0].seconds:.0f} expected)", flush=True)  # fmt: skip
        session.write()
    return session.write()


def make(session: Session) -> dict[str, Any]:
    """Only what is made for the wanted steps, for several networks at once: what a GPU need not wait for."""
    session.rows.mkdir(parents=True, exist_ok=True)
    needed = {each.name: each for step in session.wanted if step.kind not in MADE for each in needs(step)}

    def make_all(model: str) -> None:
        for step in (step for step in needed.values() if step.model == model and step.name not in session.done):
            before = [each.name for each in needs(step) if each.name != step.name]
            if all(session.done.get(name, {}).get("status") == "done" for name in before) and session.left() > SPARE_S:
                session.do(step)
                session.take(step)

    with ThreadPoolExecutor(TOGETHER) as pool:
        list(pool.map(make_all, dict.fromkeys(step.model for step in needed.values())))
    return session.write()


def alone(work: Path) -> IO[str]:
    """Wait until no other session runs in this folder, nor a step that one left; the lock is the open file's."""
    work.mkdir(parents=True, exist_ok=True)
    lock = (work / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waits for the session that runs in {work}", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def exit_code(result: dict[str, Any]) -> int:
    """1 where something failed, 3 where nothing was verified on a GPU since there is none, else 0."""
    evaluated = [step["status"] for step in result["steps"] if step["kind"] in ("row", "engine", "tune")]
    if "failed" in evaluated:
        return 1
    return 0 if "done" in evaluated else 3


def main() -> None:
    """See the module's description."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--only", help="steps whose names have one of these words in them: A,B")
    parser.add_argument("--plan", action="store_true", help="say which steps would be run, in order, and why; run none")
    parser.add_argument("--make", action="store_true", help="make the networks and graphs, measure nothing")
    parser.add_argument(
        "--gpu", metavar="TARGET", help="plan for the GPU of a target, e.g. h100, in place of this machine's"
    )
    parser.add_argument("--memory", type=float, default=0.0, metavar="GIB", help="memory of that GPU")
    parser.add_argument(
        "--resume", type=Path, metavar="RESULT", help="an earlier result, of this GPU or of another one"
    )
    parser.add_argument("--rehearsal", action="store_true", help="small networks on the CPU: no result of a GPU")
    parser.add_argument("--kit", type=Path, help="kit.json, where it is not in the folder")
    parser.add_argument("--missing", default="{}", help="what did not arrive, and why (JSON)")
    parser.add_argument("-o", "--out", type=Path, default=Path("result.json"))
    given = parser.parse_args()
    if given.gpu and not given.plan:
        parser.error("--gpu is for --plan: a session measures the GPU of this machine")
    if given.memory and not given.gpu:
        parser.error("--memory is for --gpu")
    try:
        given.kit = json.loads((given.kit or given.work / "kit.json").read_text())
    except (OSError, ValueError) as error:
        parser.error(f"no kit.json can be read: {error}")
    found = facts(steps(given.rehearsal))
    if given.gpu:
        found = assumed(found, given.gpu, given.memory, json.loads(given.missing))
    if given.plan:
        session = Session(given, found)
        print("\n".join(listed(session.chosen(), session.left_out)))
        return
    with alone(given.work) as lock:
        session = Session(given, found)
        session.held = (lock.fileno(),)
        result = make(session) if given.make else run(session)
    counts: dict[str, int] = {}
    for step in result["steps"]:
        counts[step["status"]] = counts.get(step["status"], 0) + 1
    print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())))
    raise SystemExit(int("failed" in counts) if given.make else exit_code(result))


if __name__ == "__main__":
    main()
