"""tune: the fastest exact form of a network on a target, searched on the target itself."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repaconv import registry, runs
from repaconv.artefacts import Candidate, FoldArtefact, Ratio, TuneArtefact
from repaconv.errors import Refused, UsageProblem
from repaconv.files import (
    cache_folder,
    canonical_json,
    read_artefact,
    sha256_of,
    sha256_of_bytes,
    write_artefact,
    write_bytes,
    write_text,
)
from repaconv.forms.choice import chosen
from repaconv.pipeline.folding import fold
from repaconv.pipeline.lowering import enough_images, lowered
from repaconv.proof.policy import POLICY, bounded
from repaconv.replacing import put, require_ours
from repaconv.steps.common import (
    DEPLOY,
    Progress,
    at_least_one,
    image_model,
    load_target,
    made_by,
    silent,
    stored_weights,
    with_files,
)
from repaconv.steps.forms import TUNED, remembered, shapes_sha256
from repaconv.steps.graphs import proved_graph
from repaconv.steps.inputs import choose_inputs

if TYPE_CHECKING:
    import onnx

    from repaconv.forms.search import Form
    from repaconv.graphs.contract import Rewrite
    from repaconv.targets import Target

Measurer = Callable[..., Mapping[str, Ratio]]
"""(reference, graphs by name, rounds, image_size=) to the graphs' ratios: what is above 1 is faster than it."""

HELD_BYTES = 4 * 1024**3
PREPARED = 3
"""Times its file that a session takes: the file, and the weights packed."""


def tune(
    source: str | Path | None = None,
    *,
    target: str = "x86-64",
    settings: Mapping[str, str] | None = None,
    batch: int | None = None,
    threads: int | None = None,
    rounds: int | None = None,
    budget_s: float = 600,
    max_disagreement: float | None = None,
    inputs: str | Path | None = None,
    images: str | Path | None = None,
    seed: int = 0,
    rewrites: Sequence[str] | None = None,
    exhaustive: bool = False,
    again: bool = False,
    measurer: Measurer | None = None,
    where: str = "",
    unverified: bool = False,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> TuneArtefact:
    """Search the fastest exact form, and say what was measured on the way.

    What is known of these shapes on this machine is taken from before, where nothing has changed that it depends on;
    with lower precision that includes the weights and the images. A search that was broken off, or had less time than
    now, goes on where it was.

    Args:
        source: A checkpoint, which is folded if it was not yet, or a run's folder; the newest run when None.
        target: Whose runtime and default form are taken.
        settings: For folding, as ``name: value``.
        batch: Images a call; the target's when None.
        threads: Of one inference; the target's when None.
        rounds: Of the last measurement; the target's when None.
        budget_s: Seconds after which no further measurement begins but the last.
        max_disagreement: Also try lower precision, and take the fastest in which no more than this share of images gets
            another first class. That is lossy.
        inputs: An .npz of images for that.
        images: A folder of them instead.
        seed: Of images, order and bootstrap.
        rewrites: Consider no others; all that are registered when None.
        exhaustive: Measure every composition in full, however long it takes.
        again: Search even if the answer is known.
        measurer: Measures elsewhere, as `repaconv.farm.tuning` does; here when None.
        where: What tells that place from others, such as the cluster's address. Without it nothing is known of a
            measurer's machines from before.
        unverified: Go on behind a failed verdict, and record it.
        out: Where the result goes; ``tuned/<target>.json`` of the run when None.
        progress: See `Progress`.

    Raises:
        UsageProblem: If lower precision is wanted and there are no images to judge it by, or too few.
        Refused: If the network is too large, its export is not sound, or the checkpoint's run is of another fold.
        EnvironmentProblem: If the target's runtime is not here.
    """
    from repaconv.measure.fingerprint import fingerprint

    if max_disagreement is not None and not (inputs or images):
        raise UsageProblem(
            "lower precision is judged on images that the network is meant for, and none were given.",
            hint="Give --inputs FILE.npz or --images DIR.",
            code="tune.images",
        )
    run = _run_of(source, settings, progress)
    folded = read_artefact(run.fold_json, FoldArtefact)
    if max_disagreement is not None and folded.output != "logits":
        raise UsageProblem(
            "lower precision is judged by first classes, and this network gives features.",
            hint="Leave --max-disagreement out; `repaconv export --precision` judges features by cosine.",
            code="tune.features",
        )
    if max_disagreement is not None:
        enough_images(folded, inputs, images, allowed=bounded("max_disagreement", max_disagreement, 1))
    overridden = runs.require_sound(run, folded, unverified=unverified)
    device = load_target(target)
    threads = at_least_one("threads", threads, device.bench.threads)
    batch = at_least_one("batch", batch, device.bench.batch)
    rounds = at_least_one("rounds", rounds, device.bench.rounds)
    shapes = shapes_sha256(folded.backbone, folded.config, folded.image_size)
    path = Path(out) if out else run.folder / TUNED / f"{device.name}.json"
    require_ours(path, "tune")
    names = sorted(registry.registered(registry.REWRITES) if rewrites is None else rewrites)
    asked = {
        "method": folded.method,
        "batch": batch,
        "threads": threads,
        "rounds": rounds,
        "seed": seed,
        "elsewhere": None if measurer is None else where,
        "rewrites": _brought_by(names),
        "exhaustive": exhaustive,
    }
    again = again or (measurer is not None and not where)
    known = _cached(shapes, device, asked)
    lossy = None
    if max_disagreement is not None:
        lossy = _cached(shapes, device, {**asked, **_loss(folded, inputs, images), "loss": max_disagreement})
    answer = None if again else _answer(lossy or known, budget_s)
    if answer is not None:
        found = answer.model_copy(update={"note": "known from an earlier search", "unverified": overridden})
        put(path, found)
        return with_files(found, [lossy or known], [path])
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".tune-", dir=run.folder) as scratch:
        graphs = _Graphs.of(run, folded, device, names, Path(scratch), progress)
        engine = registry.load(registry.ENGINES, device.runtime)
        dims = {"batch": batch, "height": folded.image_size[0], "width": folded.image_size[1]}
        shape = (batch, graphs.channels, *folded.image_size)
        here = partial(_measured_here, engine=engine, threads=threads, dims=dims, shape=shape, seed=seed)
        measuring = here if measurer is None else partial(measurer, image_size=folded.image_size)
        journal = _Journal(known.with_suffix(".journal"), begin + budget_s, rounds, measuring, graphs, progress)
        if again:
            journal.forget()
        before = None if again else _answer(known, budget_s)
        rows = _searched(graphs, journal, exhaustive=exhaustive) if before is None else list(before.candidates)
        best, wanted = rows[0], device.precisions
        low = lowered(
            folded,
            lambda precision, newest: graphs.model(graphs.fitting(device.kept(best.rewrites, precision), newest)),
            [name for name in wanted if name != "fp32"] if max_disagreement is not None else [],
            device,
            allowed=max_disagreement or 0.0,
            inputs=inputs,
            images=images,
            measure=lambda reference, others: measuring(reference, others, rounds),
            scratch=Path(scratch),
            progress=progress,
        )
    exact = TuneArtefact(
        made_by=made_by("torch", "onnx", "onnxruntime"),
        verdict="passed",
        target=device.name,
        runtime=_runtime(device, here=measurer is None),
        method=folded.method,
        shapes_sha256=shapes,
        image_size=folded.image_size,
        batch=batch,
        threads=threads,
        seed=seed,
        default=graphs.default,
        rewrites=best.rewrites,
        ratio=best.ratio,
        candidates=tuple(rows),
        seconds=round(time.monotonic() - begin, 1),
        budget_s=budget_s,
        complete=not journal.cut,
        machine=fingerprint(()) if measurer is None else {"cpu": f"a worker of {device.name}"},
    )
    if before is None:
        write_artefact(known, exact)
    else:
        exact = before
    found = exact
    if lossy is not None:
        changed = {"precision": low.precision, "allowed_disagreement": max_disagreement}
        found = exact.model_copy(update={**changed, "lowered": low.rows, "images": low.images})
        write_artefact(lossy, found)
    found = found.model_copy(update={"unverified": overridden})
    put(path, found)
    if exact.complete:
        journal.forget()
    return with_files(found, [run.model], [path])


def _run_of(source: str | Path | None, settings: Mapping[str, str] | None, progress: Progress) -> runs.Run:
    """The run of a checkpoint, folded now unless it was; or the run that was named.

    Raises:
        Refused: If there is one of another file or other settings: its exports are not this stage's to remove.
    """
    if source is not None and not Path(source).exists():
        raise UsageProblem(
            f"there is no file and no folder {source}.", hint="Give a checkpoint or a run's folder.", code="tune.none"
        )
    if source is None or Path(source).is_dir():
        return runs.find_run(Path(source) if source else None)
    run = runs.Run(runs.OUT / Path(source).stem)
    if not run.fold_json.is_file():
        fold(source, settings=settings, progress=progress)
        return run
    known = read_artefact(run.fold_json, FoldArtefact)
    asked = {"checkpoint": sha256_of(Path(source)), **(settings or {})}
    has = {"checkpoint": known.origin.sha256, **known.settings}
    if asked == has:
        return run
    other = ", ".join(sorted(key for key in {*asked, *has} if asked.get(key) != has.get(key)))
    raise Refused(
        f"{run.folder} holds another fold than that was asked for: not of the same {other}.",
        hint=f"repaconv tune {run.folder} tunes that one. Else fold what is meant with -o, and tune its folder.",
        code="tune.other-fold",
    )


def _cached(shapes: str, device: Target, asked: Mapping[str, Any]) -> Path:
    """Where the answer is kept: by shapes, machine, target, all that measures and writes graphs, and what was asked.

    What was asked says of which cluster, too. The budget is in the answer: see `_answer`.
    """
    from repaconv.measure.fingerprint import fingerprint, machine_key

    question = {
        "machine": machine_key(fingerprint(())),
        "target": device.model_dump(mode="json"),
        "runtime": _runtime(device, here=asked["elsewhere"] is None),
        "made_by": made_by("torch", "onnx", "onnxscript", "onnxruntime"),
        **asked,
    }
    digest = sha256_of_bytes(canonical_json(question).encode())
    return cache_folder(TUNED) / f"{shapes[:16]}-{digest[:16]}.json"


def _answer(path: Path, budget_s: float) -> TuneArtefact | None:
    """What is known, unless it is of a search that was cut short and had less time than there is now."""
    found = remembered(path)
    return found if found is not None and (found.complete or budget_s <= found.budget_s) else None


def _brought_by(names: Sequence[str]) -> dict[str, str]:
    """Rewrites, with the package that each is from, and its version."""
    points = registry.registered(registry.REWRITES)
    packages = {name: points[name].dist for name in names if name in points}
    return {name: f"{dist.name} {dist.version}" if (dist := packages.get(name)) else "" for name in names}


def _loss(folded: FoldArtefact, inputs: str | Path | None, images: str | Path | None) -> dict[str, Any]:
    """What an answer with lower precision depends on besides: weights and images, by their hashes."""
    from repaconv.proof.images import image_files

    choose_inputs(folded, _config(folded), inputs=inputs, images=images)  # refuses what is none, before any work
    files = [Path(inputs)] if inputs else image_files(Path(images or ""), None)
    return {
        "weights": folded.payload.sha256,
        "images": {str(file.relative_to(images) if images else file.name): sha256_of(file) for file in files},
        "preprocessing": folded.preprocessing.model_dump(mode="json"),
        "policy": POLICY,
    }


def _config(folded: FoldArtefact) -> Any:
    return registry.load(registry.BACKBONES, folded.backbone).from_json(folded.config)


def _runtime(device: Target, *, here: bool) -> str:
    """Name and version of what measures: this machine's, or the target's own."""
    engine = registry.load(registry.ENGINES, device.runtime)
    return f"{engine.name} {engine.version() if here else device.runtime_version}".strip()


@dataclass
class _Graphs:
    """The forms of one network as files, each made once."""

    raw: onnx.ModelProto
    rewrites: dict[str, Rewrite]
    default: Form
    channels: int
    folder: Path
    made: dict[Form, Path] = field(default_factory=dict)
    counted: dict[Form, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        run: runs.Run,
        folded: FoldArtefact,
        device: Target,
        names: Sequence[str],
        scratch: Path,
        progress: Progress,
    ) -> _Graphs:
        """Export, and find out which of these rewrites change this graph.

        Raises:
            Refused: If the export is not sound or its weights take more than 2 GiB.
        """
        from repaconv.graphs.graph import rewritten

        known = chosen(names, device.newest_opset or device.opset).rewrites
        backbone = registry.load(registry.BACKBONES, folded.backbone)
        config = backbone.from_json(folded.config)
        graph = proved_graph(
            DEPLOY,
            backbone.deploy(config),
            stored_weights(run, folded),
            (config.in_channels, *folded.image_size),
            output=folded.output,
            opset=device.opset,
            lacks=device.lacks,
            batch=None,
            free_size=folded.any_image_size,
            tolerances=folded.tolerances,
            simplifiers=(),
            scratch=scratch,
            progress=progress,
        )
        if graph.data is not None or not graph.sound:
            raise Refused(
                "the weights take more than 2 GiB." if graph.data else "the exported graph does not compute the fold.",
                hint="tune works on graphs of one file." if graph.data else "See `repaconv export --onnx`.",
                code="tune.graph",
            )
        fitting = sorted(known, key=lambda rewrite: (rewrite.order, rewrite.name))
        progress("what applies", 0, 0)
        rewrites = {rewrite.name: rewrite for rewrite in fitting if rewritten(graph.model, [rewrite])[1]}
        default = tuple(name for name in rewrites if name in device.form(folded.method))
        return cls(graph.model, rewrites, default, config.in_channels, scratch)

    def model(self, form: Form) -> onnx.ModelProto:
        """The graph in a form."""
        from repaconv.graphs.graph import rewritten

        return rewritten(self.raw, [self.rewrites[name] for name in form])[0]

    def macs(self, form: Form) -> int:
        """What it multiplies and adds for one image."""
        import onnx

        from repaconv.graphs.costs import macs_of

        if form not in self.counted:
            self.counted[form] = macs_of(onnx.load(self.path(form)))
        return self.counted[form]

    def fitting(self, form: Form, newest: int) -> Form:
        """As much of a form as that opset can say, and as changes this graph: the form may be another checkpoint's."""
        return tuple(name for name in form if name in self.rewrites and self.rewrites[name].opset <= newest)

    def path(self, form: Form) -> Path:
        """The same as a file; equal graphs are one file."""
        if form not in self.made:
            content = self.model(form).SerializeToString(deterministic=True)
            self.made[form] = self.folder / f"{sha256_of_bytes(content)}.onnx"
            if not self.made[form].is_file():
                write_bytes(self.made[form], content)
        return self.made[form]


@dataclass
class _Journal:
    """What was measured, kept as it comes, so that a search that is broken off can go on."""

    path: Path
    deadline: float
    rounds: int
    measurer: Measurer
    graphs: _Graphs
    progress: Progress
    rows: dict[str, Ratio] = field(default_factory=dict)
    expected: Any = None
    judged: dict[Path, bool] = field(default_factory=dict)
    cut: bool = False
    """Whether something was left because the time was over."""

    def __post_init__(self) -> None:
        import json

        with suppress(OSError, ValueError):  # none, or of another version
            self.rows = {key: Ratio.model_validate(row) for key, row in json.loads(self.path.read_text()).items()}

    def forget(self) -> None:
        """Begin anew."""
        self.rows = {}
        self.path.unlink(missing_ok=True)

    def measure(self, forms: Sequence[Form], rounds: int) -> dict[Form, Ratio]:
        """Ratios against the default form; forms that the budget does not allow, or that are wrong, are left out."""
        reference = self.graphs.path(self.graphs.default)
        wanted = {form: self.graphs.path(form) for form in forms}
        missing = {path.stem: path for path in wanted.values() if self._key(path, rounds) not in self.rows}
        missing.pop(reference.stem, None)
        missing = {stem: path for stem, path in missing.items() if self._same(path, reference)}
        for group in _groups(missing):
            if time.monotonic() > self.deadline and rounds < self.rounds:
                self.cut = True
                break
            self.progress(f"tune: {rounds} rounds of {len(group)} forms", 0, 0)
            for stem, ratio in self.measurer(reference, group, rounds).items():
                self.rows[self._key(group[stem], rounds)] = ratio
            write_text(self.path, canonical_json({key: row.model_dump(mode="json") for key, row in self.rows.items()}))
        return {form: self.rows[key] for form, path in wanted.items() if (key := self._key(path, rounds)) in self.rows}

    def _same(self, path: Path, reference: Path) -> bool:
        """Whether a form computes what the default one does, on three images; a wrong one is not worth measuring."""
        from repaconv.proof.parity import judge
        from repaconv.proof.policy import tolerance

        if path not in self.judged:
            session = image_model(path)
            images = _images((3, *(size if isinstance(size, int) else 64 for size in session.input_shape[1:])), 0)
            if self.expected is None:
                self.expected = image_model(reference).run(images)
            ends = ("default form", self.expected), ("form", session.run(images))
            self.judged[path] = judge("form", *ends, logits=True, tolerance=tolerance("form")).verdict == "passed"
        return self.judged[path]

    def _key(self, path: Path, rounds: int) -> str:
        return f"{path.stem[:16]} {rounds}"


def _searched(graphs: _Graphs, journal: _Journal, *, exhaustive: bool) -> list[Candidate]:
    from repaconv.forms.search import every, search

    if exhaustive:
        return every(graphs.default, list(graphs.rewrites), journal.measure, journal.rounds)
    return search(
        graphs.default,
        list(graphs.rewrites),
        work=graphs.macs,
        measure=journal.measure,
        rounds=journal.rounds,
    )


def _groups(paths: Mapping[str, Path]) -> list[dict[str, Path]]:
    """As many at a time as memory holds."""
    groups: list[dict[str, Path]] = []
    held = HELD_BYTES
    for stem, path in paths.items():
        size = PREPARED * path.stat().st_size
        if held + size > HELD_BYTES:
            groups.append({})
            held = size  # the reference's
        groups[-1][stem] = path
        held += size
    return groups


def _measured_here(
    reference: Path,
    others: Mapping[str, Path],
    rounds: int,
    *,
    engine: Any,
    threads: int,
    dims: Mapping[str, int],
    shape: tuple[int, ...],
    seed: int,
) -> dict[str, Ratio]:
    """Everything beside the reference, interleaved, on cores of their own."""
    from repaconv.engines.contract import SessionSpec
    from repaconv.measure.protocol import measure, pinned
    from repaconv.measure.statistics import ratio
    from repaconv.proof.runners import Images

    images = _images(shape, seed)
    with pinned(threads) as cores:
        paths = {"": reference, **others}
        spec = SessionSpec(threads=threads, sizes=dims)
        sessions = {name: Images(engine.open(path, spec)) for name, path in paths.items()}
        calls = {name: partial(session.run, images) for name, session in sessions.items()}
        samples = measure(calls, rounds=rounds, warmup_rounds=2, seed=seed, cores=cores).samples_ms
    return {name: ratio("form", samples[name], "default form", samples[""], seed) for name in others}


def _images(shape: tuple[int, ...], seed: int) -> Any:
    from repaconv.proof.data import random_inputs

    return random_inputs(shape[1:], count=shape[0], seed=seed).images  # type: ignore[arg-type]
