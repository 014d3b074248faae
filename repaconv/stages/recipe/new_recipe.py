"""`new-recipe`: write a commented recipe from what `inspect` finds in a checkpoint, a graph or a folder."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from repaconv.core import run_folder
from repaconv.core.errors import Refused, UsageProblem, escape_control_characters
from repaconv.core.files import is_utf8, sha256_of, text_bytes, write_with
from repaconv.core.progress import Progress, silent
from repaconv.core.sharded_checkpoint import checkpoint_at, resolved_checkpoint
from repaconv.graph.onnx_files import is_graph, read_graph
from repaconv.results import Claim, Fact, Inspection, NewRecipe
from repaconv.sources.named_architectures import CONFIG, of_folder
from repaconv.stages.inspect.stage import inspect
from repaconv.stages.shared.fetched_files import address_of, local_path
from repaconv.stages.shared.option_dataclasses import with_checked_paths
from repaconv.stages.shared.target_lookup import load_target
from repaconv.stages.shared.unavailable_targets import builds_on_target

DEFAULT_SOURCE = "default of the official code"
"""Start of the source of a fact that neither the tensors nor the file contain."""

REST = """
[verify]
count = 4                      # random images; or images = "val/" (one subfolder per class), or inputs = "recorded.npz"
require = ["onnx"]             # links that must have been run: "onnx" is of the export in fp32, "fp16" of that in fp16;
                               # "recorded" where inputs has the official output
# min_top1 = 75.0              # lowest top-1 accuracy in percent: a ruined checkpoint passes all links and fails here
# max_drop = 1.0               # points of top-1 accuracy below [reference] top1; both need images with labels
# rtol = {{ onnx = 1e-5 }}       # a tolerance other than the policy's

[export]
{target} # `repaconv targets` lists them; or the path of a .toml
precisions = ["fp32"]          # "fp16", "bf16" and "int8" are lossy; their ranges are of the images above

# [build]                      # an engine, where the target's runtime is here
# precision = "fp32"

{bundle} # what a board needs that builds its own engine, e.g. a Jetson
{off}precision = "fp32"

# [bench]                      # latency before and after the fold, where the target is this machine
# baseline = "baselines.json"  # written by repaconv gate {name} --update-baseline, and committed
# max_regression = 0.05
"""


@with_checked_paths
def new_recipe(
    checkpoint: str | Path,
    *,
    out: str | Path | None = None,
    target: str = "x86-64",
    progress: Progress = silent,
) -> NewRecipe:
    """Write a recipe for a checkpoint: what was found in it, settings that are missing from it, and all sections.

    Args:
        checkpoint: A checkpoint, an ONNX file, a Hugging Face folder, or an address that was fetched. Nothing in it is
            run.
        out: The file; ``<stem>.toml`` in the current folder when None.
        target: The target device, by name or as the path of a .toml. For a board that builds its own engine the recipe
            packs a bundle.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        Refused: If there is no such file, it is damaged, or it has no weights.
        UsageProblem: If the recipe exists already, or there is no such target.
    """
    source, address = local_path(checkpoint), address_of(checkpoint)
    path = Path(out) if out else Path(f"{run_folder.utf8_stem(source)}.toml")
    if os.path.lexists(path):
        raise _already_exists(path)
    device = load_target(target)
    if not source.exists():
        raise Refused(f"there is no file or folder {source}.", hint="Check its path.", code="checkpoint.missing")
    if not (source / CONFIG).is_file():  # otherwise it is folded by its architecture
        source = checkpoint_at(source)
    place = address or Path(os.path.relpath(resolved_checkpoint(source), path.parent.resolve())).as_posix()
    if not is_utf8(Path(place)):
        raise Refused(
            f"a recipe is UTF-8, and cannot name {place}, which is not.", hint="Rename the file.", code="file.name"
        )
    progress("inspect", 0, 0)
    if source.is_file() and is_graph(source):
        read_graph(source)  # refuses what is no ONNX
    seen = None if is_graph(source) or source.is_dir() else inspect(source)
    arch = _arch_of_folder(source) if source.is_dir() else None
    lines = [*_head(source, seen, place, arch), *(_settings(seen) if seen else ()), *_reference(seen)]
    _write_new(path, "\n".join(lines) + "\n" + _rest(path, target, bundled=builds_on_target(device)))
    problems = (*(seen.problems if seen else ()), *_architecture_problem(seen, arch))
    return NewRecipe(recipe=str(path), method=(seen.method or "") if seen else "", problems=problems)


def _write_new(path: Path, text: str) -> None:
    """Write a file that does not exist; of several commands that write it at once, one succeeds.

    Raises:
        UsageProblem: If another command has written it in the meantime.
    """

    def reserved(temporary: Path) -> None:
        temporary.write_bytes(text_bytes(text))
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            raise _already_exists(path) from None

    write_with(path, reserved)


def _already_exists(path: Path) -> UsageProblem:
    hint = "Give another path with -o, or move the file away."
    return UsageProblem(f"{path} already exists.", hint=hint, code="recipe.exists")


def _rest(path: Path, target: str, *, bundled: bool) -> str:
    """The sections after the settings, for a target; with a bundle if its engine is built there."""
    place = os.path.relpath(target, path.parent) if target.endswith(".toml") else target
    off = "" if bundled else "# "
    return REST.format(
        name=_comment(shlex.quote(path.name)),
        target=f"target = {_value(Path(place).as_posix())}".ljust(30),
        bundle=f"{off}[bundle]".ljust(30),
        off=off,
    )


def _architecture_problem(seen: Inspection | None, arch: str | None) -> Iterator[str]:
    """Why the recipe does not say yet what builds the network."""
    exact = [each.name for each in seen.networks if each.exact] if seen else []
    if seen and seen.needs_arch and exact:
        yield f"{', '.join(exact)} have these tensors and compute different functions. Name one with arch."
    elif (seen and seen.needs_arch) or arch == "":
        yield "No method recognizes it, and nothing names its network. Say with arch what builds it."


def _arch_of_folder(folder: Path) -> str:
    """The architecture that a Hugging Face folder names; empty if it names none, and --arch must say it.

    Raises:
        Refused: If it is no such folder.
    """
    try:
        return of_folder(folder)[0].name
    except Refused as refused:
        if refused.code != "folder.architecture":
            raise
        return ""


def _head(source: Path, seen: Inspection | None, place: str, arch: str | None) -> Iterator[str]:
    """The recipe's first lines: its source, hash, and method or architecture."""
    yield f"# {_comment(_description(source, seen, arch))}"
    if seen and seen.training and seen.deploy:
        yield f"# {seen.training.parameters:,} parameters as trained, {seen.deploy.parameters:,} folded."
    yield "# repaconv run does all of this, repaconv gate checks it for CI; paths are relative to this file."
    yield f"checkpoint = {_value(place)}"
    if source.is_file():
        yield "# Any other file is refused. After a new training, write the new hash here."
        pinned = seen.origin.sha256 if seen else sha256_of(source)
        yield f"sha256 = {_value(pinned)}"
    if seen and seen.method:
        yield f"method = {_value(seen.method)}"
    elif seen:
        exact = [each.name for each in seen.networks if each.exact] or ["net.py:build"] * seen.needs_arch
        yield from (f"{'# ' if seen.needs_arch else ''}arch = {_value(name)}" for name in exact)
    elif arch == "":
        yield f"# arch = {_value('net.py:build')}"


def _description(source: Path, seen: Inspection | None, arch: str | None) -> str:
    if arch is not None:
        return f"{source.name}: a folder; {f'its network is {arch}' if arch else 'say with arch what builds it'}."
    if seen is None:
        return f"{source.name}: an ONNX graph; it is folded as it is."
    if seen.method:
        return f"{source.name}: {seen.method}, by {seen.reason}."
    near = [each.name for each in seen.networks]
    if not seen.needs_arch and not near:
        return f"{source.name}: {seen.facts[0].value}, which names its architecture."
    named = f"its tensors are those of {', '.join(near)}" if near else "say with arch what builds it"
    return f"{source.name}: of no method that is known; {named}."


def _settings(seen: Inspection) -> Iterator[str]:
    """The settings with their default values, to be checked, and those missing, with an example."""
    open_ones = [fact for fact in seen.facts if fact.source.startswith(DEFAULT_SOURCE)]
    if open_ones or seen.problems:
        yield ""
        yield "[set]                          # settings missing from the checkpoint"
    for problem in seen.problems:
        what = problem.partition(" Give it with --set")[0] if seen.missing_settings else problem
        yield f"# To be mended: {_comment(what)}"
    for name, example in seen.missing_settings.items():
        yield f"# {name} = {_example(example)}".ljust(30) + " # an example"
    for fact in open_ones:
        yield f"# {fact.name} = {_fact(fact)}".ljust(30) + f" # {DEFAULT_SOURCE}"


def _reference(seen: Inspection | None) -> Iterator[str]:
    """The accuracy that the checkpoint itself claims; otherwise a commented example."""
    claim = next((fact for fact in seen.facts if isinstance(fact, Claim)), None) if seen else None
    percent = round(100 * claim.value, 4) if claim else 75.0
    off = "" if claim and percent > 1 else "# "
    yield ""
    yield f"{off}[reference]".ljust(30) + " # what it should reach; top1 is enforced where images have labels"
    yield f"{off}source = {_value(claim.source if claim else 'who measured it, and on which images')}"
    yield f"{off}top1 = {percent:g}".ljust(30) + " # percent"


def _example(text: str) -> str:
    """The text as a TOML number if it is one, otherwise as a TOML string."""
    try:
        float(text)
    except ValueError:
        return _value(text)
    return text


def _fact(fact: Fact) -> str:
    return _value(list(fact.value) if isinstance(fact.value, tuple) else fact.value)


def _value(value: object) -> str:
    """A value in TOML, which for these types is the same as JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON escapes all others


def _comment(text: str) -> str:
    """A text for a comment of TOML, which has no control characters: names in a file may have any."""
    return escape_control_characters(text, but="")
