"""Golden records: what the commands do today, in tests/data/golden, and a comparison that names each difference.

    python tests/golden.py --check [--only SECTION ...]
    python tests/golden.py --write [DIR] [--only SECTION ...]

Only interfaces that outlast a refactoring are used: ``python -m repaconv``, the names of ``import repaconv``, and the
tests' own files. Recorded is what is the same on every CPU: verdicts, codes, names, counts, shapes, and of each tensor
its mean magnitude and its projection on a seeded vector, which are compared with a tolerance. Times, versions, paths
and rounding errors are left out. Every command runs in a fork of this process, which has imported the large packages.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import os
import pkgutil
import platform
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SHARED = ROOT.parent / "shared" / "checkpoints"
GOLDEN = TESTS / "data" / "golden"
MODELS = ROOT / "repaconv" / "models"
RTOL = 1e-6
"""Of a tensor's mean magnitude, relative to it; of its projection, relative to the tensor's norm."""
SETTINGS = {
    "pyra_deit_decr": ("num_heads=4",),
    "pyra_vit_high_decr": ("num_heads=4",),
    "pyra_vit_low_const": ("num_heads=4",),
    "repavit_plain_idle050": ("num_heads=4",),
    "repavit_plain_idle075": ("num_heads=3",),
    "repapoolformer_idle075": ("pool_size=7",),
}
"""What the official checkpoints do not say, as the methods' own tests have it."""
QUICK = ("dwconv_blockwise_gated", "nondeep_n3_valsum_nobias_avg", "repavit_plain_idle050", "repvgg_small")
QUICK = (*QUICK, "riformer_mmengine", "pyra_vit_low_const")
"""One official checkpoint per method, for tests/test_golden.py."""
QUICK_GRAPHS = ("graph encoder", "graph pixels", "graph rows")
FORMER = ("--again", "--rate", "--accumulate", "--unverified", "--also", "--quantiser", "--form")
PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxsim", "numpy")
ZOO = (
    *(f"timm:{name}" for name in (
        "mobileone_s0", "tinynet_e", "lcnet_035", "regnetx_002", "ghostnet_050", "convnext_atto", "edgenext_xx_small",
        "mobilevit_xxs", "levit_conv_128s", "fastvit_t8",
    )),
    *(f"torchvision:{name}" for name in ("squeezenet1_1", "shufflenet_v2_x0_5", "mobilenet_v3_small")),
    *(f"transformers:{name}" for name in (
        "ViTForImageClassification", "SwinForImageClassification", "ConvNextForImageClassification",
        "SegformerForSemanticSegmentation",
    )),
    *(f"task:{name}" for name in ("yolov8n", "yolo11n_seg", "safmn", "lraspp")),
)  # fmt: skip
"""Networks of other packages: ``task`` are those of benchmarks/task_networks.py, the rest of zoo_networks.py."""


# --- running commands ---------------------------------------------------------------------------------------------


class Skipped(Exception):
    """A record cannot be made here; the message says why."""


class Broken(Exception):
    """A record could not be made although all it needs is here."""


def in_a_fork(act: Callable[[], Any], **environment: str) -> tuple[Any, str, str]:
    """What a function returns in a fork of this process, as JSON has it; and what it wrote to stdout and stderr.

    Raises:
        Broken: It raised an exception, or its process died.
    """
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        answer, out, err = (Path(folder, name) for name in ("answer", "out", "err"))
        child = os.fork()
        if not child:
            code = 1
            try:
                for stream, path in ((1, out), (2, err)):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                os.environ.update(environment)
                os.environ["XDG_CACHE_HOME"] = folder  # its own, and empty
                os.environ.pop("COLUMNS", None)
                answer.write_text(json.dumps(act()))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = [path.read_text(errors="replace") if path.is_file() else "" for path in (out, err)]
        if status:
            raise Broken(f"its process ended with {status}: {said[1][-3000:]}")
        return json.loads(answer.read_text()), said[0], said[1]


def command_line(*words: object) -> int:
    """``python -m repaconv WORDS`` in this process: its exit code."""
    sys.argv = ["repaconv", *map(str, words)]
    try:
        runpy.run_module("repaconv", run_name="__main__", alter_sys=False)
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def cli(*words: object, **environment: str) -> dict[str, Any]:
    """The envelope that a command prints as JSON, paths replaced."""
    code, out, err = in_a_fork(lambda: command_line(*words, "--format", "json"), **environment)
    if "Traceback" in err:
        raise Broken(f"{words}: {err[-3000:]}")
    for path, name in ((str(Path.cwd()), "CWD"), (str(SHARED), "SHARED"), (str(ROOT), "ROOT")):
        out = out.replace(path, name)
    done: dict[str, Any] = json.loads(out)
    if done.get("exit_code", code) != code:
        raise Broken(f"{words}: the process ended with {code}, its JSON says {done['exit_code']}")
    return {**done, "exit_code": code} if "command" in done else {"data": done, "exit_code": code, "errors": []}


def warm() -> None:
    """Import what every command needs, before the first fork; nothing is computed here, so no threads are started."""
    import torch

    for name in ("numpy", "onnx", "onnxruntime", "onnxscript", "safetensors.numpy", "torch._dynamo", "typer.main"):
        import_module(name)
    import_module("torch.onnx._internal.exporter._core")
    sys.path[:0] = [name for name in (str(TESTS), str(ROOT / "benchmarks")) if name not in sys.path]
    import export_cache

    import repaconv

    for module in pkgutil.walk_packages(repaconv.__path__, "repaconv."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):  # of an optional package
                import_module(module.name)
    if not hasattr(torch.onnx.export, "__wrapped__"):
        torch.onnx.export = export_cache.cached(torch.onnx.export)
    argv, out = sys.argv, sys.stdout
    with Path(os.devnull).open("w") as sys.stdout:
        command_line("--version")
    sys.argv, sys.stdout = argv, out


@contextmanager
def own_folder() -> Iterator[Path]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


# --- what is kept of a result -------------------------------------------------------------------------------------


def digest(value: object) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()[:12]


def fingerprint(array: Any) -> str:
    """Type, shape, mean magnitude, projection on a seeded vector, norm; of integers type, shape and a hash."""
    import numpy as np

    array = np.asarray(array)
    head = f"{array.dtype} {'x'.join(map(str, array.shape)) or 'scalar'}"
    if array.dtype.kind != "f":
        return f"{head} {digest(array.tobytes())}"
    flat = array.astype(np.float64).ravel()
    onto = np.random.default_rng(flat.size).standard_normal(flat.size)
    return f"{head} {np.abs(flat).mean() if flat.size else 0:.7g} {flat @ onto:.7g} {np.linalg.norm(flat):.3g}"


def alike(old: str, new: str) -> bool:
    """Whether two fingerprints are of the same tensor, up to rounding on another CPU."""
    if old == new:
        return True
    a, b = old.split(), new.split()
    if not (len(a) == len(b) == 5 and a[:2] == b[:2] and a[0].startswith("float")):
        return False
    mean, projection, norm = (float(word) for word in a[2:])
    close = abs(mean - float(b[2])) <= 2 * RTOL * abs(mean)  # once for the last of the 7 digits
    return close and abs(projection - float(b[3])) <= RTOL * (norm + abs(projection))


def problems(done: dict[str, Any]) -> dict[str, Any]:
    errors = [{key: each.get(key) for key in ("code", "message")} for each in done["errors"]]
    return {"exit": done["exit_code"], **({"errors": errors} if errors else {})}


def bound(tolerance: dict[str, Any] | None) -> str:
    """The limits of a link; one that was measured from FP32 rounding has no digits that stay."""
    if not tolerance:
        return "no tolerance"
    rows = {name: value for name, value in tolerance.items() if isinstance(value, (int, float))}
    return ", ".join(
        [str(tolerance["kind"])]
        + [f"{name} {value:g}" if float(f"{value:.1e}") == value else f"{name} from rounding"
           for name, value in rows.items() if name != "noise"]
    )  # fmt: skip


def link_of(link: dict[str, Any]) -> str:
    """One comparison of the verification chain: name, verdict, tolerance, whether the error is below it."""
    allowed, found = (link.get("tolerance") or {}).get("rtol"), link.get("metrics")
    below = "not measured"
    if found and allowed and found["max_rel_error"] is not None:
        below = "below" if found["max_rel_error"] <= allowed else "above"
    count = f"{found['images']} images" if found else "no images"
    name = "/".join(filter(None, (link["name"], link.get("variant"))))
    return f"{name}: {link['verdict']}, {bound(link.get('tolerance'))}, {count}, {below}"


def certificate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Per module what was folded by which equation, and whether the error is below its bound; equal rows once."""
    found: dict[str, list[str]] = {}
    for row in rows:
        error = row["max_rel_error"]
        text = {
            "equation": row["equation"],
            "verdict": "not measured" if error is None else "below" if error <= row["allowed"] else "above",
            "allowed": row["allowed"],
            "folded": row["folded"],
            "not_folded": row["not_folded"],
            "reason": row["reason"],
            "layers": [len(row["before"]), len(row["after"])],
        }
        found.setdefault(json.dumps(text), []).append(row["module"])
    return {", ".join(modules): json.loads(text) for text, modules in found.items()}


def folded_of(done: dict[str, Any]) -> dict[str, Any]:
    """What is kept of `fold` of a checkpoint."""
    data = done["data"]
    if not data:
        return problems(done)
    kept = ("verdict", "method", "backbone", "kind", "applied", "batch", "image_size", "whole", "preset", "rewrites")
    kept = (*kept, "claims", "unverified", "fp32_modules")
    return {
        **problems(done),
        **{name: data[name] for name in kept},
        **{name: [data["training"][name], data["deploy"][name]] for name in ("parameters", "macs", "layer_macs")},
        "facts": {fact["name"]: fact["value"] for fact in data["facts"]},
        "assumed": [fact["name"] for fact in data["facts"] if fact["assumed"]],
        "config": digest(data["config"]),
        "preprocessing": digest(data["preprocessing"]),
        "certificate": certificate(data["certificate"]),
    }


def tensors_of(path: Path) -> dict[str, str]:
    from safetensors.numpy import load_file

    return {name: fingerprint(array) for name, array in sorted(load_file(path).items())}


def graph_of(path: Path, stored: dict[str, str]) -> dict[str, Any]:
    """An ONNX file: opset, inputs and outputs, operators, hashes of the names and the wiring, initializers.

    Of initializers that are a stored tensor of the same name there are only a count and a hash of the names.
    """
    import onnx
    from onnx import numpy_helper

    graph = (model := onnx.load(path)).graph

    def ends(values: Any) -> list[str]:
        kinds = [value.type.tensor_type for value in values]
        sizes = [[dim.dim_param or str(dim.dim_value) for dim in kind.shape.dim] for kind in kinds]
        return [
            f"{value.name} {onnx.TensorProto.DataType.Name(kind.elem_type)} {'x'.join(size)}"
            for value, kind, size in zip(values, kinds, sizes, strict=True)
        ]

    weights = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    floats = {name: fingerprint(array) for name, array in sorted(weights.items()) if array.dtype.kind == "f"}
    others = {name: fingerprint(array) for name, array in sorted(weights.items()) if array.dtype.kind != "f"}
    same = [name for name, text in floats.items() if stored.get(name) == text]
    return {
        "opsets": {each.domain or "ai.onnx": each.version for each in model.opset_import},
        "inputs": ends(graph.input),
        "outputs": ends(graph.output),
        "operators": dict(sorted(Counter(node.op_type for node in graph.node).items())),
        "node names": digest([node.name for node in graph.node]),
        "wiring": digest([[node.op_type, [*node.input], [*node.output]] for node in graph.node]),
        "integers": f"{len(others)} {digest(others)}",
        "as folded": f"{len(same)} {digest(same)}",
        "initializers": {name: text for name, text in floats.items() if name not in same},
    }


def exported_of(done: dict[str, Any], stored: dict[str, str]) -> dict[str, Any]:
    """What is kept of `export`: the result and the graph."""
    data = done["data"]
    if not data or not data.get("output_files"):
        return problems(done)
    kept = ("opset", "nodes", "batch", "image_size", "precision", "preset", "variant", "target", "simplified")
    kept = (*kept, "rewrites", "unverified", "unsupported_ops", "fp32_nodes", "unquantized_layers")
    return {
        **problems(done),
        **{name: data[name] for name in kept},
        "changes": dict(sorted(Counter(change["rewrite"] for change in data["changes"]).items())),
        "links": [link_of(link) for link in data["links"]],
        "graph": graph_of(Path(data["output_files"][0]), stored),
    }


def verified_of(done: dict[str, Any]) -> dict[str, Any]:
    data = done["data"] or {}
    links = [link_of(link) for link in data.get("links", [])]
    return {**problems(done), "verdict": data.get("verdict"), "policy": data.get("policy"), "links": links}


# --- checkpoints --------------------------------------------------------------------------------------------------


def of_checkpoint(path: Path, *, batch: str, presets: tuple[str, ...] = ("default", "official")) -> dict[str, Any]:
    """fold, verify, both exports, verify; on the recorded outputs of the official code where there are any."""
    settings = [word for setting in SETTINGS.get(path.stem, ()) for word in ("--set", setting)]
    with own_folder() as folder:
        folded = cli("fold", path, "--out", "run", *settings)
        found = {"fold": folded_of(folded)}
        if folded["exit_code"]:
            return found
        found["tensors"] = tensors_of(Path("run/model.safetensors"))
        recorded = path.with_suffix(".npz")
        inputs = ("--inputs", recorded) if recorded.is_file() else ()
        found["verify folded"] = verified_of(cli("verify", "run", *inputs))
        once = {"REPACONV_TESTS_EXPORTED": str(folder / "exported")}  # both presets begin with the same export
        (folder / "exported").mkdir()
        for preset in presets:
            done = cli("export", "run", "--onnx", "--batch", batch, "--preset", preset, **once)
            found[f"export {preset}"] = exported_of(done, found["tensors"])
        if len(presets) == 2:
            found["verify"] = verified_of(cli("verify", "run", *inputs))
    return found


def shipped() -> dict[str, Callable[[], Any]]:
    """The trained networks of repaconv/models, with a dynamic batch size."""
    return {path.stem: partial(of_checkpoint, path, batch="dynamic") for path in sorted(MODELS.glob("*.pth"))}


def checkpoints() -> dict[str, Callable[[], Any]]:
    """The official checkpoints, with a batch of one: a dynamic one takes three times as long to trace."""
    return {name: partial(of_checkpoint, path, batch="1") for name, path in official().items()}


def official() -> dict[str, Path]:
    if not SHARED.is_dir():
        raise Skipped("the official checkpoints are absent (../shared/checkpoints)")
    return {path.stem: path for path in sorted(SHARED.glob("*/*.pth"))}


# --- planted faults -----------------------------------------------------------------------------------------------


def faults() -> dict[str, Callable[[], Any]]:
    """tests/planted_faults.py: what `gate` says of each fault."""
    import planted_faults as planted

    import repaconv

    def outcome(fault: Any) -> Any:
        with own_folder() as folder:
            recipe = planted.write_recipe(fault, folder)
            with fault.plant():
                report = repaconv.gate([recipe])
        checks = [check for check in report.recipes[0].checks if check.verdict in ("failed", "error")]
        rows = [f"{check.stage} {check.name}: {check.verdict} {check.code} at {check.module}" for check in checks]
        return {"exit": report.exit_code, "caught by": rows}

    return {fault.what: lambda fault=fault: in_a_fork(lambda: outcome(fault))[0] for fault in planted.FAULTS}


def foreign_faults() -> dict[str, Callable[[], Any]]:
    """tests/planted_graph_faults.py: the error code of `fold` for each wrong fold; all of one graph in one fork."""
    import onnx
    import planted_graph_faults as foreign
    import pytest
    from test_folded_graph_verification import planted

    import repaconv

    def outcome(fault: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            planted(patch, fault.plant)
            try:
                done = repaconv.fold("net.onnx", out="wrong.onnx", measure=False, force=True)
            except Exception as error:  # the outcome is which one
                written = ", and wrote a file" if Path("wrong.onnx").exists() else ""
                return f"{type(error).__name__} {getattr(error, 'code', '')}{written}"
            return f"not caught: {done.verdict}"

    def net(name: str) -> Any:
        with own_folder():
            onnx.save(foreign.NETS[name].model(), "net.onnx")
            return {fault.what: outcome(fault) for fault in foreign.FAULTS if fault.net == name}

    return {name: lambda name=name: in_a_fork(lambda: net(name))[0] for name in foreign.NETS}


def mutants() -> dict[str, Callable[[], Any]]:
    """tests/graph_mutants.py: how each change of a graph is made, and what `fold` says of some graphs so changed."""
    import graph_mutants as made
    import numpy as np
    import onnx
    import planted_graph_faults as foreign

    import repaconv

    def hashes() -> Any:
        """Of the code without comments and layout."""
        methods = {name: part for name, part in vars(made.Mutant).items() if inspect.isfunction(part)}
        trees = {name: ast.parse(inspect.cleandoc("\n" + inspect.getsource(part))) for name, part in methods.items()}
        return {name: digest(ast.dump(tree)) for name, tree in sorted(trees.items())}

    def outcomes(name: str) -> Any:
        found = {}
        with own_folder():
            for seed in range(6):
                model = made.Mutant(foreign.NETS[name].model(), np.random.default_rng(seed)).mutate()
                if model is None:
                    found[str(seed)] = "no graph"
                    continue
                onnx.save(model, "net.onnx")
                try:
                    done = repaconv.fold("net.onnx", out="folded.onnx", measure=False, force=True)
                    found[str(seed)] = f"{done.verdict}, parameters {done.parameters}, nodes {done.nodes}"
                except Exception as error:  # the outcome is which one
                    found[str(seed)] = f"{type(error).__name__} {getattr(error, 'code', '')}"
        return found

    rows = {f"{name}, seeds 0 to 5": lambda name=name: in_a_fork(lambda: outcomes(name))[0] for name in foreign.NETS}
    return {"how each is made": hashes, **rows}


# --- folds of ONNX graphs -----------------------------------------------------------------------------------------


def fold_graph(path: Path) -> dict[str, Any]:
    """`fold model.onnx` without measuring: what it reverts for speed depends on the machine."""
    done = cli("fold", path, "--out", "run", "--no-measure")
    data = done["data"]
    if not data:
        return problems(done)
    kept = ("verdict", "parameters", "macs", "nodes", "applied", "opset", "reverted", "rewrites")
    kept = (*kept, "operators", "unverified", "batch", "image_size")
    return {
        **problems(done),
        **{name: data[name] for name in kept},
        "not_folded": [_places(text) for text in data["not_folded"]],
        "changes": dict(sorted(Counter(change["rewrite"] for change in data["changes"]).items())),
        "links": dict(Counter(link_of(link) for link in data["links"])),
    }


def _places(text: str) -> str:
    """A reason for not folding; a long list of places as a count and a hash."""
    reason, mark, places = text.partition(": ")
    return text if len(text) <= 400 or not mark else f"{reason}: {len(places.split('; '))} places, {digest(places)}"


def own_graphs() -> dict[str, Callable[[], Any]]:
    """Networks as the tests write them, which need no other package."""
    import onnx
    import planted_graph_faults as foreign
    import reimplemented_training_networks as nets
    import small_graphs

    new, old = {"dynamo": True, "opset": 20, "free": False}, {"dynamo": False, "opset": 17, "free": True}
    built: dict[str, tuple[Callable[[], Any], tuple[int, ...], dict[str, Any]]] = {
        f"repavit, {rule}": (lambda rule=rule: nets.repavit(rule)[0], (2, 3, 16, 16), old if i % 2 else new)
        for i, rule in enumerate(nets.RULES)
        if rule not in ("bool put", "index put")  # which one of the exporters does not write
    }
    for value in ("sum", "own"):
        built[f"nondeep, {value}"] = (
            lambda value=value: nets.nondeep(value, 2, 3, bias=True)[0], (2, 3, 16, 16), new if value == "sum" else old,
        )  # fmt: skip
    for norm in ("LN2d", "GroupNorm"):
        built[f"riformer, {norm}"] = (lambda norm=norm: nets.riformer(norm)[0], (2, 3, 32, 32), old)

    def network(name: str) -> Any:
        make, shape, how = built[name]

        def export() -> None:
            import torch

            torch.manual_seed(0)
            onnx.save(nets.exported(make(), shape, **how), "net.onnx")

        with own_folder():
            in_a_fork(export)
            return fold_graph(Path("net.onnx"))

    def small(name: str) -> Any:
        with own_folder():
            if name == "tokens":
                return fold_graph(small_graphs.tokens())
            onnx.save(foreign.NETS[name].model(), "net.onnx")
            return fold_graph(Path("net.onnx"))

    return {
        **{f"graph {name}": lambda name=name: small(name) for name in ("tokens", *foreign.NETS)},
        **{name: lambda name=name: network(name) for name in built},
    }


def zoo_cache() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GOLDEN_CACHE") or Path(cache, "repaconv-golden"))


def zoo() -> dict[str, Callable[[], Any]]:
    """Networks of timm, torchvision, transformers, Ultralytics and spandrel, exported once into a cache."""
    cache = zoo_cache()
    missing = [name for name in ZOO if not zoo_file(name, cache).is_file()]
    python = os.environ.get("GOLDEN_ZOO") or (sys.executable if find_spec("timm") else "")
    if missing and not python:
        raise Skipped("timm is absent: GOLDEN_ZOO names a Python that has it and the others")
    if missing:
        cache.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
        words = [python, str(Path(__file__).resolve()), "--export", *missing]
        done = subprocess.run(words, stderr=subprocess.PIPE, text=True, env=environment, check=False)
        if done.returncode:
            say(f"zoo: not everything was exported: {done.stderr[-1000:]}")

    def network(name: str) -> Any:
        path = zoo_file(name, cache)
        if not path.is_file():
            raise Skipped(f"{name} could not be exported here")
        with own_folder():
            return {**json.loads(path.with_suffix(".json").read_text()), **fold_graph(path)}

    return {name: lambda name=name: network(name) for name in ZOO}


def zoo_file(name: str, cache: Path) -> Path:
    return cache / f"{name.replace(':', '_')}.onnx"


def export_network(name: str) -> None:
    """Write one network of `ZOO` into the cache; run by the Python that has its package.

    Of one with BatchNorms by torch's old exporter, which can keep them: the new one folds them, and without its
    optimizing it writes them in a form of its own.
    """
    import torch
    import zoo_networks

    library, _, called = name.partition(":")
    if library == "task":
        import task_networks

        module, shape = task_networks.network(called), (3, *task_networks.NETWORKS[called].size)
        library = {"yolov8n": "ultralytics", "yolo11n_seg": "ultralytics", "safmn": "spandrel"}.get(called, "")
    else:
        module, shape = zoo_networks.network(name)
    path, given = zoo_file(name, zoo_cache()), torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"opset_version": 17, "dynamo": False, "training": torch.onnx.TrainingMode.PRESERVE}
    if not any(isinstance(part, torch.nn.BatchNorm2d) for part in module.modules()):
        how = {"opset_version": 20, "dynamo": True, "verbose": False, "external_data": False}
    writing = path.with_suffix(".writing")
    torch.onnx.export(module.eval(), (given,), writing, input_names=["input"], **how)
    packages = ["torch", "onnxscript", library or "torchvision"]
    path.with_suffix(".json").write_text(json.dumps({"made with": {each: version(each) for each in packages}}))
    writing.replace(path)


# --- the JSON of every command ------------------------------------------------------------------------------------

BY_DATA = {"made_by", "operators", "for_scale", "caches", "container", "counts", "session", "layer_types"}
BY_DATA |= {"builder_options", "peak_tflops"}
"""Objects whose keys are not names of fields."""
VALUES = {
    "verdict", "name", "code", "status", "method", "backbone", "preset", "precision", "target", "kind", "opset",
    "nodes", "parameters", "macs", "layer_macs", "stage", "variant", "simplified", "rewrites", "unverified", "required",
    "container", "form", "confidence", "input_shape", "schema_version", "command", "applied", "reason", "runtime",
    "module", "equation", "not_folded", "outcome", "exit_code", "batch", "image_size", "policy", "model",
    "precisions", "quantizer", "did", "steps", "blocks", "recipe", "operators",
}  # fmt: skip
"""Fields whose values are the same on every machine, in commands that measure nothing."""
MEASURED = ("stage", "schema_version", "method")
"""Those of commands that measure, at the top."""


def shape_of(value: Any, name: str = "") -> Any:
    """Names and JSON types: an object's fields, a list's elements as one."""
    if isinstance(value, dict) and name in BY_DATA:
        return {"*": merged([shape_of(each) for each in value.values()])}
    if isinstance(value, dict):
        return {key: shape_of(each, key) for key, each in sorted(value.items())}
    if isinstance(value, list):
        return [merged([shape_of(each) for each in value])] if value else []
    return {type(None): "null", bool: "bool", int: "number", float: "number", str: "text"}[type(value)]


def merged(shapes: list[Any]) -> Any:
    """One shape for several elements of a list."""
    objects = [each for each in shapes if isinstance(each, dict)]
    lists = [each for each in shapes if isinstance(each, list)]
    words = {each for each in shapes if isinstance(each, str)}
    names = sorted({name for each in objects for name in each})
    found: list[Any] = []
    if objects:
        found.append({name: merged([each[name] for each in objects if name in each]) for name in names})
    if lists:
        inner = [each[0] for each in lists if each]
        found.append([merged(inner)] if inner else [])
    parts = {part for word in words for part in word.split("|")}
    found += ["|".join(sorted(parts))] if parts else []
    if len(found) == 1:
        return found[0]
    return {"either": found} if found else "nothing"


def values_of(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key in VALUES and not _measurement(each):
                yield f"{at}.{key}", each
            else:
                yield from values_of(each, f"{at}.{key}")
    elif isinstance(value, list):
        for each in value:
            yield from values_of(each, f"{at}[]")


def _measurement(value: Any) -> bool:
    """Whether something inside has fields of its own or digits that vary."""
    if isinstance(value, list):
        return any(map(_measurement, value))
    return isinstance(value, float) or (isinstance(value, dict) and not all(type(v) is int for v in value.values()))


def described(done: dict[str, Any], *, measured: bool = False) -> dict[str, Any]:
    """The shape of a result, and the values in it that are the same everywhere; of equal values only how many."""
    data, found = done["data"], {}
    for path, value in () if measured else values_of(data, "data"):
        found.setdefault(path, []).append(value)
    if measured and isinstance(data, dict):
        found = {name: [data[name]] for name in MEASURED if name in data}
    each = {
        path: values[0] if len(values) == 1 else dict(Counter(map(_word, values))) for path, values in found.items()
    }
    code = problems(done)
    if measured and code["exit"] in (0, 5):  # inconclusive on a busy machine
        code["exit"] = "0 or 5"
    return {**code, "loose shape" if measured else "shape": shape_of(data), "values": each}


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def commands() -> dict[str, Callable[[], Any]]:
    """Every command on the demo's first network, in order, in one folder; then refusals."""
    model = MODELS / "repavit.pth"
    held, ranges = ("--inputs", MODELS / "digits.npz"), ("--inputs", MODELS / "calibration.npz")
    run, heads = "repaconv-out/repavit", ("--set", "num_heads=3")
    vit, x = ("vit.pth", *heads), ("--inputs", "x.npz")
    rows: dict[str, tuple[tuple[object, ...], bool]] = {
        "inspect": (("inspect", model), False),
        "fold": (("fold", model), False),
        "export": (("export", "--onnx"), False),
        "export int8": (("export", "--onnx", "--precision", "int8", *ranges), False),
        "verify": (("verify", "--count", 4), False),
        "verify labeled": (("verify", *held), False),
        "verify drift": (("verify", "--drift"), False),
        "verify failed": (("verify", "--rtol", "stored:1e-12"), False),
        "verify again": (("verify",), False),
        "inspect onnx": (("inspect", f"{run}/model.onnx"), False),
        "export orin-nano": (("export", "--onnx", "--target", "orin-nano"), False),
        "build": (("build", "--target", "x86-64"), True),
        "bench": (("bench", "--rounds", 2), True),
        "bench profile": (("bench", "--rounds", 2, "--profile"), True),
        "bench estimate": (("bench", "--estimate", "--target", "orin-nano"), False),
        "bench throughput": (("bench", "--objective", "throughput", "--rounds", 2), True),
        "compare": (("compare", run, f"{run}/model.onnx"), False),
        "compare speed": (("compare", run, f"{run}/model.onnx", "--speed", "--rounds", 2), True),
        "tune": (("tune", "--budget", 3, "--rounds", 2), True),
        "report": (("report",), True),
        "save": (("save",), False),
        "bundle": (("bundle", "--target", "orin-nano"), False),
        "new-recipe": (("new-recipe", model, "--out", "recipe.toml"), False),
        "run dry": (("run", "recipe.toml", "--dry-run"), True),
        "run": (("run", "small.toml"), True),
        "gate": (("gate", "small.toml"), True),
        "deploy dry": (("deploy", model, "--target", "orin-nano", "--out", "deployed", "--dry-run"), False),
        "deploy": (("deploy", model, "--target", "orin-nano", "--out", "deployed"), False),
        "score": (("score", *vit, *x), False),
        "convert": (("convert", *vit, *x, "--blocks", "0,2"), False),
        "convert pyra": (("convert", *vit, *x, "--method", "pyra", "--schedule", "4,4,2", "--out", "merged"), False),
        "finetune": (("finetune", "repaconv-out/vit-dwconv", *x, "--epochs", 1, "--batch", 16), True),
        "table": (("table", "repavit"), False),
        "targets": (("targets",), False),
        "doctor": (("doctor",), True),
        "refused: no file": (("fold", "none.pth"), False),
        "refused: no weights": (("fold", "recipe.toml"), False),
        "refused: another method": (("fold", model, "--method", "riformer", "--out", "other"), False),
        "refused: no such target": (("export", run, "--onnx", "--target", "none"), False),
        "refused: no such preset": (("export", run, "--onnx", "--preset", "none"), False),
        "refused: no such option": (("fold", model, "--none"), False),
        "refused: no such command": (("none",), False),
        "refused: no such value": (("verify", "--rtol", "x"), False),
        "refused: not a board": (("bundle", "--target", "x86-64"), False),
        "refused: no result": (("collect", "none.tar.gz"), False),
        "refused: nothing to deploy": (("deploy", "none.onnx"), False),
        "refused: not an address": (("fetch", "none"), False),
        "refused: no matrix": (("sweep", "none.toml"), False),
        "refused: no recipe": (("gate", "none.toml"), False),
        "refused: no such setting": (("fold", model, "--set", "none=1", "--out", "other"), False),
        "refused: missing setting": (("fold", SHARED / "pyra" / "pyra_vit_low_const.pth", "--out", "o"), False),
    }  # fmt: skip
    folder = tempfile.TemporaryDirectory(prefix="golden-")  # as long as the records are asked for

    def in_place(words: tuple[object, ...], measured: bool) -> Any:
        if any(isinstance(word, Path) and not word.exists() for word in words):
            raise Skipped("the official checkpoints are absent (../shared/checkpoints)")
        before = Path.cwd()
        os.chdir(folder.name)
        try:
            if not Path("small.toml").is_file():
                in_a_fork(_inputs_of_commands)
            return described(cli(*words), measured=measured)
        finally:
            os.chdir(before)

    return {name: partial(in_place, *row) for name, row in rows.items()}


def _inputs_of_commands() -> None:
    """A plain vision transformer, images, and a recipe, in the current folder."""
    import numpy as np
    import torch
    from test_score_and_convert_commands import images, plain_weights

    torch.save(plain_weights(), "vit.pth")
    np.savez("x.npz", input=images(), labels=np.arange(80) % 5)
    model = json.dumps(str(MODELS / "repavit.pth"))
    Path("small.toml").write_text(
        f'checkpoint = {model}\nout = "small"\n[export]\nbatch = 1\n[verify]\ncount = 2\n[bench]\nrounds = 10\n'
    )


# --- options and names --------------------------------------------------------------------------------------------


def interface() -> dict[str, Callable[[], Any]]:
    """The options of every command with types and defaults, and the names and arguments of `import repaconv`."""
    return {
        "commands": lambda: in_a_fork(_options)[0],
        "former options": lambda: in_a_fork(_former_options)[0],
        "python": lambda: in_a_fork(_signatures)[0],
        "plug-ins": lambda: in_a_fork(_plugins)[0],
    }


def _commands() -> dict[str, Any]:
    """Typer's commands by name, whatever module makes them: what `python -m repaconv` calls in the end."""
    import typer

    class Found(Exception):
        pass

    def found(self: Any, *_: object, **__: object) -> None:
        raise Found(self)

    typer.Typer.__call__ = found
    try:
        command_line("--help")
    except Found as application:
        group: Any = typer.main.get_command(application.args[0])
        return {"repaconv": group, **group.commands}
    raise Broken("`python -m repaconv` called no Typer application")


def _options() -> Any:
    return {name: _of_command(each) for name, each in _commands().items()}


def _former_options() -> Any:
    """Which commands still take an option by its former name."""
    found = {}
    for name, command in _commands().items():
        for option in FORMER:
            ended = ""
            try:
                command.make_context(name, [option, "--help"])
            except BaseException as end:  # of the help, or of an argument that is missing
                ended = type(end).__name__
            if ended != "NoSuchOption":
                found.setdefault(name, []).append(option)
    return found


def _of_command(command: Any) -> dict[str, str]:
    rows = {}
    for each in command.params:
        default = getattr(each, "show_default", None)
        if not isinstance(default, str):
            default = getattr(each.default, "value", each.default)
            default = "" if default is None or callable(default) or str(default).endswith("UNSET") else str(default)
        kind = getattr(each.type_descriptor.annotation, "__name__", str(each.type_descriptor.annotation))
        if choices := getattr(each.type_descriptor.annotation, "__members__", None):
            kind = "|".join(str(choice.value) for choice in choices.values())
        limits = [f"{side} {value}" for side in ("min", "max") if (value := getattr(each, side)) is not None]
        marks = [mark for mark in ("required", "hidden", "multiple", "is_flag") if getattr(each, mark, False)]
        argument = each.param_type_name == "argument"
        names = each.metavar or each.name if argument else ", ".join(sorted((*each.opts, *each.secondary_opts)))
        metavar = "" if argument else each.metavar
        rows[names] = "; ".join(filter(None, (kind, metavar, *limits, *marks, f"default {default}" if default else "")))
    return rows


def _signatures() -> Any:
    import repaconv

    found = {}
    for name in sorted(repaconv.__all__):
        given = inspect.signature(getattr(repaconv, name)).parameters.values()
        found[name] = [
            each.name + ("" if each.default is each.empty else f"={_default(each.default)}")
            + (" by name" if each.kind is each.KEYWORD_ONLY else "") for each in given
        ]  # fmt: skip
    return found


def _default(value: object) -> str:
    return str(getattr(value, "__name__", "")) if callable(value) else repr(value)


def _plugins() -> Any:
    """Names of the entry points."""
    found, group = {}, ""
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if line.startswith("["):
            group = line.partition('entry-points."')[2].partition('"')[0]
        elif group and "=" in line and not line.startswith("#"):
            found.setdefault(group, []).append(line.partition("=")[0].strip().strip('"'))
    return {name: sorted(names) for name, names in found.items()}


# --- writing and comparing ----------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[], dict[str, Callable[[], Any]]]] = {
    "interface": interface,
    "shipped": shipped,
    "checkpoints": checkpoints,
    "commands": commands,
    "faults": faults,
    "foreign_faults": foreign_faults,
    "mutants": mutants,
    "own_graphs": own_graphs,
    "zoo": zoo,
}
FAST: dict[str, Callable[[], dict[str, Callable[[], Any]]]] = {
    "interface": interface,
    "shipped": lambda: {
        **{
            path.stem: partial(of_checkpoint, path, batch="dynamic", presets=())
            for path in sorted(MODELS.glob("*.pth"))
        },
        "nondeep": partial(of_checkpoint, MODELS / "nondeep.pth", batch="dynamic", presets=("default",)),
    },
    "checkpoints": lambda: {
        name: partial(of_checkpoint, path, batch="1", presets=()) for name, path in official().items() if name in QUICK
    },
    "own_graphs": lambda: {name: make for name, make in own_graphs().items() if name in QUICK_GRAPHS},
}
"""A slice in half a minute, for tests/test_golden.py: exports of one network only."""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def differences(old: Any, new: Any, at: str = "", *, loose: bool = False) -> Iterator[str]:
    """Each place where two records differ, by name.

    ``loose`` shapes are of commands that measure: there null or an empty list may stand for anything.
    """
    if loose and any(each in ("null", [], "nothing") for each in (old, new)):
        return
    if loose and isinstance(old, str) and isinstance(new, str) and {*old.split("|")} & {*new.split("|")}:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        if loose and "either" in {*old, *new}:
            return
        for key in dict.fromkeys((*old, *new)):
            place = f"{at} > {key}" if at else key
            if key not in new:
                yield f"{place}: missing; recorded is {brief(old[key])}"
            elif key not in old:
                yield f"{place}: not recorded; now {brief(new[key])}"
            else:
                yield from differences(old[key], new[key], place, loose=loose or key == "loose shape")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from differences(a, b, f"{at}[{number}]", loose=loose)
    elif not (alike(old, new) if isinstance(old, str) and isinstance(new, str) else old == new):
        yield f"{at}: {brief(old)} is now {brief(new)}"


def brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def dumped(record: dict[str, Any]) -> str:
    """JSON with a line for each entry of the second level, small and still readable in a diff."""

    def compact(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)

    rows = []
    for name, value in record.items():
        lines = [f"  {compact(key)}: {compact(each)}" for key, each in value.items()] if isinstance(value, dict) else []
        rows.append(f"{compact(name)}: " + ("{\n" + ",\n".join(lines) + "\n }" if lines else compact(value)))
    return "{\n " + ",\n ".join(rows) + "\n}\n"


def records(section: str, *, quick: bool = False) -> Iterator[tuple[str, Any]]:
    """Each record of a section; what cannot be made here is left out with a sentence."""
    try:
        rows = (FAST if quick else SECTIONS)[section]()
    except Skipped as reason:
        say(f"{section} was not compared: {reason}.")
        return
    for name, make in rows.items():
        started = time.monotonic()
        try:
            yield name, json.loads(json.dumps(make()))
        except Skipped as reason:
            say(f"{section} > {name} was not compared: {reason}.")
            yield name, None
        except Broken as reason:
            yield name, {"broken": str(reason)[-600:]}
        if os.environ.get("GOLDEN_TIMES"):
            say(f"  {section} > {name}: {time.monotonic() - started:.1f} s")


def recorded(section: str, folder: Path = GOLDEN) -> dict[str, Any]:
    path = folder / f"{section}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def check(section: str, folder: Path = GOLDEN, *, quick: bool = False) -> list[str]:
    """All differences of a section from its records, each with its place; of a quick one only in what it has."""
    found, known, seen = [], recorded(section, folder), set()
    for name, new in records(section, quick=quick):
        seen.add(name)
        old, place = known.get(name), f"{section} > {name}"
        if new is None:
            continue
        if old is None:
            found.append(f"{place}: not recorded")
        elif "broken" in new:
            found.append(f"{place}: {new['broken']}")
        elif old.get("made with") != new.get("made with"):
            say(f"{place} was not compared: it was exported with other packages, {brief(new['made with'])}.")
        else:
            found += differences({key: old[key] for key in old if key in new or not quick}, new, place)
    if seen and not quick:
        found += [f"{section} > {name}: missing" for name in known if name not in seen]
    return found


def about() -> dict[str, Any]:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.is_file() else []
    model = [line for line in lines if line.startswith("model name")]
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    cpu = model[0].partition(":")[2].strip() if model else platform.machine()
    return {"versions": versions, "comment": f"Written on {cpu}; nothing is compared with this."}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = options.add_mutually_exclusive_group(required=True)
    which.add_argument("--check", nargs="?", const=GOLDEN, type=Path, metavar="DIR", help="compare with the records")
    which.add_argument("--write", nargs="?", const=GOLDEN, type=Path, metavar="DIR", help="write them anew")
    options.add_argument("--quick", action="store_true", help="compare a slice in half a minute")
    which.add_argument("--export", nargs="+", metavar="NAME", help=argparse.SUPPRESS)
    options.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    given = options.parse_args()
    if given.export:
        for name in given.export:
            try:
                export_network(name)
            except Exception as error:  # one that fails is left out, with the reason
                say(f"zoo > {name} was not exported: {type(error).__name__}: {str(error)[:300]}")
        return 0
    warm()
    started, found = time.monotonic(), []
    folder = (given.write or given.check).resolve()
    known = recorded("about", folder).get("versions")
    if given.check and known != (here := about()["versions"]):
        say(f"The records were written with {known}; here is {here}: graphs and names of nodes may differ.")
    for section in given.only or (FAST if given.quick else SECTIONS):
        begun = time.monotonic()
        if given.check:
            rows = check(section, folder, quick=given.quick)
            found += rows
            for row in rows:
                say(row)
            done = f"{len(rows)} differences"
        else:
            new = {name: record for name, record in records(section) if record is not None}
            folder.mkdir(parents=True, exist_ok=True)
            if new:
                (folder / f"{section}.json").write_text(dumped(new))
            done = f"{len(new)} records"
        say(f"{section}: {done}, {time.monotonic() - begun:.0f} s")
    if given.write:
        (folder / "about.json").write_text(json.dumps(about(), indent=1) + "\n")
    say(f"{len(found)} differences in {time.monotonic() - started:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
