"""`save`: write a folded network as a folder that timm or transformers loads, with its model card."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from repaconv.core import run_folder
from repaconv.core.errors import GateFailed, Refused, describe_exception
from repaconv.core.file_replacement import move_from, replace_artifact, require_replaceable, write_payload
from repaconv.core.files import lock_folder, payload_of
from repaconv.core.progress import Progress, silent
from repaconv.core.temporary_folders import scratch_folder
from repaconv.results import Link, NetworkFold, SaveArtefact
from repaconv.sources.named_architectures import Architecture
from repaconv.sources.optional_packages import package
from repaconv.sources.source_model import TRAINING
from repaconv.sources.source_of_run import source_model_of
from repaconv.stages.report.page_rendering import card
from repaconv.stages.report.stage import gather
from repaconv.stages.save.options import SaveOptions
from repaconv.stages.shared.option_dataclasses import by_name
from repaconv.stages.shared.result_provenance import made_by, with_files
from repaconv.verification.tolerances import verdict_of

if TYPE_CHECKING:
    from torch import nn

    from repaconv.sources.source_model import SourceModel

LIBRARIES = ("timm", "transformers")
FILES = ("model.safetensors", "config.json", "preprocessor_config.json", "README.md")
"""Files of such a folder; the third is written only if the run's source folder has it."""
RESULT_FILE = "save.json"
LABELS = ("label_names", "label_descriptions")
"""Keys of timm's config.json that describe the classes."""


class _Plan(NamedTuple):
    """The options resolved for one run: the network, its architecture, and the folder to write."""

    source_model: SourceModel
    arch: Architecture
    run: run_folder.Run
    folder: Path
    options_given: tuple[str, ...]
    overridden: tuple[str, ...]


def save_by(options: SaveOptions, run: str | Path | None = None, *, progress: Progress = silent) -> SaveArtefact:
    """Write a folded network as a folder that timm or transformers loads: weights, config.json, a model card.

    The network is folded again as a module, in float64, and the weights are written in its own architecture. The folder
    is loaded by its library and compared before it is put in place.

    Args:
        options: The options.
        run: The run folder; the newest run when None.
        progress: A function that is called with each step's name, the units done and their total.

    Raises:
        Refused: If the folded network has no standard architecture.
        EnvironmentProblem: If the library is not installed.
        GateFailed: If an earlier check failed, or the outputs of the folder differ; nothing is written then.
    """
    plan = _plan(options, run)
    progress("fold", 0, 0)
    given = plan.source_model.network(TRAINING).module
    module, exact = _folded_module(plan, given)
    progress("save", 0, 0)
    with lock_folder(plan.run.folder), scratch_folder(plan.run.folder) as work:
        _write(plan, module.float(), work)
        links = (exact, _loaded_link(plan, type(given), work))
        if verdict_of(links) == "failed":
            raise GateFailed(
                f"the folder, loaded by {plan.arch.library}, gives other outputs than the folded network; nothing "
                "was written.",
                hint=f"Try another version of {plan.arch.library}, or write ONNX: repaconv export.",
                code="save.not-equal",
            )
        report = gather(plan.run, None).model_copy(update={"library": plan.arch.library})
        (work / "README.md").write_text(card(report, {}), encoding="utf-8")
        files = [plan.folder / name for name in FILES if (work / name).is_file()]
        for file in files:
            write_payload(file, move_from(work / file.name))
        weights, *others = (payload_of(file, plan.folder) for file in files)
        done = SaveArtefact(
            made_by=made_by(plan.arch.library, "torch"),
            verdict=verdict_of(links),
            unverified=plan.overridden,
            options=plan.options_given,
            arch=plan.arch.name,
            payload=weights,
            other_files=tuple(others),
            links=links,
        )
        done = replace_artifact(plan.folder / RESULT_FILE, done)
    return with_files(done, [plan.run.fold_json], [*files, plan.folder / RESULT_FILE])


save = by_name(save_by, SaveOptions)


def _plan(options: SaveOptions, run: str | Path | None) -> _Plan:
    """Make every check that comes before anything is run."""
    taken = run_folder.find_run(Path(run) if run else None)
    source_model = source_model_of(taken)
    folded = source_model.folded
    arch = Architecture(folded.arch, folded.config) if isinstance(folded, NetworkFold) else Architecture("", {})
    if arch.library not in LIBRARIES:
        raise Refused(
            f"{taken.folder} cannot be saved in an architecture of timm or transformers: it is {folded.description}.",
            hint=(
                "Runs of --arch timm:NAME and of Hugging Face folders can be saved; `repaconv export` writes any run "
                "as ONNX."
            ),
            code="save.unheld",
        )
    package(arch.library)
    overridden = run_folder.require_passed_checks(taken, folded, unverified=options.allow_unverified)
    folder = Path(options.out) if options.out else taken.folder / arch.library
    require_replaceable(folder / RESULT_FILE, "save", *(folder / name for name in FILES))
    return _Plan(source_model, arch, taken, folder, options.words(), overridden)


def _folded_module(plan: _Plan, given: nn.Module) -> tuple[nn.Module, Link]:
    """The network's own architecture with the folded weights, in float64, and its comparison with the original.

    Raises:
        Refused: If that architecture cannot hold the folded weights.
    """
    from repaconv.torch_fold.known_submodule_folds import fold_parts
    from repaconv.torch_fold.weights_for_original_architecture import no_place_error, standard_state_dict

    before = copy.deepcopy(given).double()
    folded, steps = fold_parts(before, "auto", _example(plan))
    if len(steps) == 1 and plan.source_model.folded.applied:
        raise no_place_error("nothing of what its graph folds can be folded in the module")
    module = copy.deepcopy(before)
    module.load_state_dict(standard_state_dict(folded, module), strict=True)
    link = _link(plan, module, "fold", f"{plan.arch.name}, its numbers in float64")
    if link.verdict == "failed":
        raise no_place_error(f"{plan.arch.name} computes something else with it")
    return module, link


def _example(plan: _Plan) -> Any:
    """Two random images, as the module's arguments."""
    import torch

    feeds = next(plan.source_model.random_inputs(2, 0).batches()).given
    return tuple(torch.from_numpy(array).double() for array in feeds.values())


def _link(plan: _Plan, module: nn.Module, kind: str, called: str) -> Link:
    """Compare a module with the training form, in float64."""
    from repaconv.verification.comparison import Comparison, overall_link
    from repaconv.verification.model_runners import TorchRunner
    from repaconv.verification.tolerances import tolerance

    names = tuple(port.name for port in plan.source_model.inputs)
    runner = TorchRunner(module, module.state_dict(), double=True, inputs=names, outputs=plan.source_model.outputs)
    found = Comparison(called, tolerance(kind, usual=plan.source_model.folded.tolerances))
    for batch in plan.source_model.random_inputs(4, 1).batches():
        found.add(runner.run(batch.given), plan.source_model.reference.run(batch.given))
    return overall_link(found.links(kind, f"{TRAINING}, float64"))


def _write(plan: _Plan, module: nn.Module, folder: Path) -> None:
    """Write the folder as the library itself writes it, with its preprocessing."""
    import shutil

    if plan.arch.library == "transformers":
        saver: Any = module
        saver.save_pretrained(str(folder))
        source = plan.source_model.source.parent / FILES[2]
        if source.is_file() and plan.arch.config:
            shutil.copyfile(source, folder / source.name)
        return
    given = plan.arch.config
    config = {name: given[name] for name in LABELS if name in given}
    config["pretrained_cfg"] = {**(given.get("pretrained_cfg") or {}), **_images(plan)}
    package("timm").models.save_for_hf(
        module, str(folder), model_config=config, model_args=given.get("model_args"), safe_serialization=True
    )


def _images(plan: _Plan) -> dict[str, Any]:
    """Mean and standard deviation under timm's names, if the run knows them."""
    images = plan.source_model.folded.preprocessing
    if images is None:
        return {}
    return {name: [round(value / 255, 9) for value in getattr(images, name)] for name in ("mean", "std")}


def _loaded_link(plan: _Plan, kind: type[nn.Module], folder: Path) -> Link:
    """Load the folder with its library, and compare it with the training form."""
    loader: Any = kind
    try:
        if plan.arch.library == "timm":
            module = package("timm").create_model(f"local-dir:{folder}", pretrained=True)
        else:
            module = loader.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the class of the error depends on the library's version
        raise GateFailed(
            f"{plan.arch.library} cannot load what it wrote: {describe_exception(error)}; nothing was written.",
            hint=f"Try another version of {plan.arch.library}, or write ONNX: repaconv export.",
            code="save.not-loaded",
        ) from error
    return _link(plan, module.eval(), "stored", f"the folder, loaded by {plan.arch.library}")
