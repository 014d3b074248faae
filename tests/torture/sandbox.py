"""The sandbox in which a hostile file is read: a forked child with little memory, a time limit and an audit hook.

A child reads one case after the other and reports each before it starts. A case that ends the process is therefore
known by its name, and the next child continues after it.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import NamedTuple

from repaconv.core import changed_input_files
from repaconv.core.errors import RepaconvError

SECONDS = 20
"""Of the processor: a machine under load is no hang."""
WAITING = 12 * SECONDS
"""Seconds of any kind."""
MEMORY = 1 << 30
"""What a case may add to the address space, beside four times its file."""
LONGEST = 1000
"""Characters of a sentence that one reads."""
FORBIDDEN = frozenset(
    """os.system os.exec os.posix_spawn os.spawn os.fork os.forkpty os.kill os.remove os.rename
    subprocess.Popen pty.spawn socket.connect socket.bind socket.getaddrinfo socket.gethostbyname webbrowser.open
    ctypes.dlopen shutil.rmtree shutil.move pickle.find_class urllib.Request""".split()  # noqa: SIM905
)
"""Audit events that no reading of a file raises: what they tell of is that something in it was run."""


@dataclass(frozen=True)
class Case:
    """One file, or folder, and what is done with it.

    Attributes:
        kind: What the tally counts it under.
        name: Which of them it is.
        make: Writes it into an empty folder, and says where it is.
        read: What repaconv does with it; gives ``the same``, ``other`` or ``sound``, or raises.
        alone: Whether it makes processes of its own, and what they do is not listened to.
    """

    kind: str
    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], str]
    alone: bool = False


class Outcome(NamedTuple):
    """How a case ended: refused, the same, other, sound, or what is wrong with it."""

    kind: str
    name: str
    ended: str
    detail: str = ""

    @property
    def fault(self) -> bool:
        return self.ended not in ("refused", "the same", "other", "sound")


def outcomes(cases: Sequence[Case], folder: Path, *, limits: bool = True) -> Iterator[Outcome]:
    """Each case in turn, whatever becomes of the process that reads it."""
    done = 0
    while done < len(cases):
        for outcome in _by_a_child(cases[done:], folder, limits):
            done += 1
            yield outcome


def _by_a_child(cases: Sequence[Case], folder: Path, limits: bool) -> Iterator[Outcome]:
    """Until the end, or until the child is gone; then the case that it was at is the last one."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _child(cases, folder, writing, limits)
    os.close(writing)
    message = 0
    with os.fdopen(reading, "rb") as lines:
        while message < len(cases):
            ready, _, _ = select([lines], [], [], 2 * WAITING)
            line = lines.readline() if ready else b""
            if not line:
                break
            message += 1
            yield Outcome(cases[message - 1].kind, cases[message - 1].name, *json.loads(line))
    if message < len(cases):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if message < len(cases):
        at = cases[message]
        gone = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        how = ("hung", "in code that hears no alarm") if gone == signal.SIGKILL else ("crashed", f"signal {gone}")
        yield Outcome(at.kind, at.name, *how)


def _child(cases: Sequence[Case], folder: Path, writing: int, limits: bool) -> None:
    heard: list[str] = []
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    if not os.environ.get("TORTURE_ALOUD"):
        os.dup2(0, 1)
        os.dup2(0, 2)
    listening = [False]

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if listening[0] and event in FORBIDDEN and not _of_ours(event, arguments, folder):
            heard.append(f"{event} {str(arguments)[:100]}")

    changed_input_files.install_sigbus_handler()  # it asks for the C library, once
    sys.addaudithook(hear)
    try:
        for number, case in enumerate(cases):
            place = folder / f"case-{os.getpid()}-{number}"
            ended = _one(case, place, heard, listening, limits)
            os.write(writing, (json.dumps(ended) + "\n").encode())
            shutil.rmtree(place, ignore_errors=True)
    except BaseException:
        sys.__stderr__.write(traceback.format_exc())
    os._exit(0)


def _of_ours(event: str, arguments: tuple[object, ...], folder: Path) -> bool:
    """Temporary files that go again, names that change within the case's own folder, and the guard of native code.

    Libraries that are loaded already may be asked how many threads they use. Whether a graph gets as far as a runtime,
    which is first tried in a process of its own, depends on the CPU.
    """
    if event == "subprocess.Popen":
        executable, command, *_ = arguments
        return executable == sys.executable and "import crash_guard as guard; guard.serve(" in str(command)
    if event == "ctypes.dlopen":
        return str(arguments[0]) in Path("/proc/self/maps").read_text()
    return event in ("os.remove", "os.rename", "shutil.rmtree") and all(
        str(Path(os.fsdecode(path)).absolute()).startswith((str(folder), "/tmp/", "/dev/shm/"))
        for path in arguments
        if isinstance(path, (str, bytes, os.PathLike))
    )


def _one(case: Case, place: Path, heard: list[str], listening: list[bool], limits: bool) -> tuple[str, str]:
    place.mkdir(parents=True)
    os.chdir(place)
    try:
        path = case.make(place)
    except Exception:
        return "not made", traceback.format_exc()[-1500:]
    before = _inside(place)
    size = sum(each.stat().st_size for each in before if each.is_file() and not each.is_symlink())
    size = min(size, 1 << 30)
    heard.clear()
    _within(SECONDS, WAITING)
    free = resource.getrlimit(resource.RLIMIT_AS)
    if limits and not case.alone:
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY + 4 * size, free[1]))
    listening[0] = not case.alone
    began = time.monotonic()
    try:
        ended, detail = case.read(path), ""
    except RepaconvError as error:
        ended, detail = "refused", _unclear(error) or f"{error.code}: {error.message}"
        ended = "unclear" if _unclear(error) else ended
    except TimeoutError:
        ended, detail = "hung", f"{time.monotonic() - began:.0f} s"
    except BaseException:
        ended, detail = "crashed", traceback.format_exc()[-1500:]
    finally:
        listening[0] = False
        _within(0, 0)
        resource.setrlimit(resource.RLIMIT_AS, free)
    if heard or _marker(place).exists():
        return "executed", "; ".join(heard) or "its command ran"
    if ended == "refused" and (new := _inside(place) - before):
        return "wrote", ", ".join(sorted(map(str, new))[:3])
    return ended, detail


def _marker(place: Path) -> Path:
    return place / MARKER


MARKER = "it-ran"
"""What every hostile command would touch, in the folder in which it runs."""


def _within(own: float, waiting: float) -> None:
    """Interrupt what takes longer than so many seconds of the processor, or of any kind."""
    for number, timer, seconds in (
        (signal.SIGPROF, signal.ITIMER_PROF, own),
        (signal.SIGALRM, signal.ITIMER_REAL, waiting),
    ):
        signal.signal(number, _late)
        signal.setitimer(timer, seconds)


def _late(_number: int, _frame: object) -> None:
    raise TimeoutError


def _inside(place: Path) -> set[Path]:
    return {path for path in place.rglob("*") if path.name != ".cache"}


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _unclear(error: RepaconvError) -> str:
    """What is wrong with the words of a refusal; empty if they are one clear sentence and a hint."""
    said = error.message
    if "\n" in said or len(said) > LONGEST or not said.isprintable():
        return f"not one sentence: {said[:200]!r}"
    if not error.code or not error.hint or not said.rstrip().endswith((".", "?", "!")):
        return f"no code, no hint or no end: {error.code} {said[:200]!r} {error.hint[:50]!r}"
    return ""
