"""The networks on which mutants of the code are tried, and their outputs without the mutation.

Each is made once, by unchanged code: a file, random inputs of our own, and its outputs on these in float64. The inputs
are others than any verification takes: other sizes, seeds, means and ranges.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
Feeds = dict[str, Array]
METHODS = ("repavit", "repavit-swin", "repavit-mixer", "nondeep", "riformer", "dwconv", "pyra", "repvgg", "mobileone")
"""Of `torture.small_checkpoints`: checkpoints that are folded by their method and exported."""
DEPLOYED = ("repavit", "nondeep", "riformer", "dwconv", "pyra", "repconv")
"""Of test_speed_rewrites: small graphs for what rewrites a graph to make it faster."""
KERNELS = {"slow kernels": (16, 16), "winograd": (96, 32)}
"""Graphs of convolutions with operators between them that have slow kernels: channels, and the sides of images."""
TARGET = """name = "all"
about = "every rewrite"
runtime = "onnxruntime"
architecture = "x86_64"
opset = 20
newest_opset = 23
source = ["none"]
domains = ["ai.onnx.ml", "com.microsoft"]
precisions = ["fp32"]
[forms]
default = [{rewrites}]
[bench]
threads = 1
batch = 1
rounds = 3
warmup_rounds = 1
"""
TRIED = ({}, {"target": "all"}, {"opset": 14})
"""The exports of a graph: as it is usual, with every rewrite, in an old opset."""
LENGTHS, SIDES = (4, 1, 6, 3, 9, 2), (17, 12, 20, 9, 14, 25)
BELOW = {"ids": 20}
FAR = {"far": (1000.0, 60.0)}
"""Mean and deviation of the inputs of a network that is made for these."""
CALLS = 6
OWN, EXACT = 16, 1e-9
TOLERANCE = 1e-5
"""A number is wrong if it is off by more than this share of those next to it, and `OWN` times more than FP32 rounding
moves the original; of a module in float64, by `EXACT`. What sound folds reach of it is in the result (``sound``)."""


# --- The networks.


def _graphs() -> Iterator[tuple[str, Callable[[], onnx.ModelProto]]]:
    import planted_graph_faults
    import reimplemented_training_networks
    import small_graphs
    import test_random_graph_folds
    import test_rotary_embeddings
    import test_speed_rewrites

    from torture import graphs

    for name, net in planted_graph_faults.NETS.items():
        yield name, net.model
    yield "convolution", graphs.convolution
    yield "tokens", graphs.tokens
    yield "classes", lambda: onnx.load(small_graphs.tokens())
    plain = partial(reimplemented_training_networks.exported, shape=(2, 3, 16, 16), opset=17)
    for rule in ("where", "index put", "written mask", "two"):
        yield (
            f"repavit, {rule}",
            partial(plain, reimplemented_training_networks.repavit(rule)[0], dynamo=False, free=True),
        )
    for value, dynamo in (("sum", False), ("output", True)):
        net = reimplemented_training_networks.nondeep(value, 2, 3, bias=True)[0]
        yield f"nondeep, {value}", partial(plain, net, dynamo=dynamo, free=not dynamo)
    for norm in ("LN2d", "GN"):
        net = reimplemented_training_networks.riformer(norm)[0]
        yield f"riformer, {norm}", partial(plain, net, shape=(2, 3, 32, 32), dynamo=False, free=True)
    for seed in range(6):
        maker = test_random_graph_folds.Maker(40 + seed, image=bool(seed % 2))
        yield f"random {seed}", lambda maker=maker: _single(maker.model())
    for law in test_random_graph_folds.BY_HAND:
        yield (
            law,
            partial(_by_hand, test_random_graph_folds.BY_HAND[law].replace("<W", "<" + test_random_graph_folds.W)),
        )
    for seed in range(6):
        yield f"nearly {seed}", partial(_nearly, seed)
    for name, (width, side) in KERNELS.items():
        yield name, lambda width=width, side=side: _single(convolutions(width, side))
    yield "rotary", lambda: _single(test_rotary_embeddings.attending(test_rotary_embeddings.in_halves))
    for name in DEPLOYED:
        yield f"deployed {name}", partial(lambda name: _single(test_speed_rewrites.exported(name, 3)[0]), name)


def convolutions(width: int, side: int) -> onnx.ModelProto:
    """Convolutions, and what is rewritten between and after them."""
    from test_blocked_channel_layouts import silu
    from test_speed_rewrites import Graph

    graph, random = Graph(x=[3, side, side]), np.random.default_rng(0)

    def conv(x: str, out: int, read: int, size: int = 1) -> str:
        weight = random.standard_normal((out, read, size, size)) / np.sqrt(read * size**2)
        return graph("Conv", x, weight, random.standard_normal(out), pads=[size // 2] * 4)

    x = conv(conv("x", width, 3), width, width, 3)
    x = graph("Mul", x, graph("Tanh", graph("Softplus", x)))  # Mish, which opset 14 does not have
    x = graph("PRelu", conv(x, width, width, 3), random.uniform(-0.5, 0.9, (width, 1, 1)))
    x = silu(graph, conv(graph("LRN", x, size=5, alpha=0.3), 8, width))
    x = graph("Resize", x, "", np.array([1, 1, 2, 2], np.float32), mode="cubic")
    first, second = graph("Split", x, axis=1, num_outputs=2, outputs=2)
    whole = graph("Concat", x, conv(second, 4, 4, 3), axis=1)
    return graph.model(graph("Softmax", whole, axis=1), first)


def target() -> str:
    """A target with all rewrites for speed, as the tuner orders them; of two sizes of blocks the smaller one."""
    from repaconv.core import plugins

    loaded = [plugins.load(plugins.REWRITES, name) for name in plugins.registered(plugins.REWRITES)]
    ordered = sorted(loaded, key=lambda rewrite: (rewrite.order, rewrite.name))
    names = [rewrite.name for rewrite in ordered if not rewrite.name.endswith("-16")]
    return TARGET.format(rewrites=json.dumps(names)[1:-1])


def _by_hand(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> g {text}')
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return _single(model)


def _nearly(seed: int) -> onnx.ModelProto:
    """A network that nearly has the form that a fold looks for."""
    import test_random_graph_folds
    from graph_mutants import Mutant

    name = ("riformer", "repavit", "nondeep")[seed % 3]
    for n in range(100):
        found = Mutant(test_random_graph_folds.net(name, seed % 3), np.random.default_rng([77, seed, n])).mutate()
        if found is not None:
            return _single(found)
    raise LookupError(seed)


def _single(model: onnx.ModelProto) -> onnx.ModelProto:
    from repaconv.graph.element_type_conversion import retyped

    return onnx.shape_inference.infer_shapes(retyped(model, {onnx.TensorProto.DOUBLE: onnx.TensorProto.FLOAT}))


def _modules() -> Iterator[tuple[str, Callable[[], tuple[torch.nn.Module, tuple[int, ...], bool]]]]:
    """Live modules, the shape of an input, and whether an example is needed."""
    import reimplemented_training_networks
    import test_known_submodule_folds
    import test_structural_fold as structure
    import test_whole_module_check as whole
    from torch import nn

    image, tokens = (3, 16, 16), (5, 8)
    yield "live repavit", lambda: (reimplemented_training_networks.repavit("cat")[0], image, True)
    yield "live nondeep", lambda: (reimplemented_training_networks.nondeep("sum", 2, 3, bias=True)[0], image, True)
    yield "live riformer", lambda: (reimplemented_training_networks.riformer("LN2d")[0], (3, 32, 32), True)
    yield "live idle", lambda: (test_known_submodule_folds.trained(test_known_submodule_folds.OwnNet()), tokens, False)
    yield "live scaled", lambda: (nn.Sequential(test_known_submodule_folds.ScaledBlock()), tokens, False)
    yield "live branches", lambda: (test_known_submodule_folds.trained(structure.Net()), (3, 9, 7), False)
    residual = test_known_submodule_folds.trained(nn.Sequential(structure.Bottleneck(), structure.Bottleneck()))
    yield "live residual", lambda: (residual, (4, 8, 8), False)
    yield "live levels", lambda: (test_known_submodule_folds.trained(structure.Levels()), (4, 16, 16), False)
    yield "live by function", lambda: (structure.ByFunction(), (4, 5, 5), True)
    yield "live attention", lambda: (nn.Sequential(structure.Attention(), structure.Attention()), tokens, True)
    yield "live adapter", lambda: (structure.Low(), tokens, True)
    yield "live reader", lambda: (whole.Reader("called"), tokens, True)
    yield "live between", lambda: (nn.Sequential(nn.Linear(8, 8), whole.Between(torch.sin)), tokens, False)
    yield "live scale", lambda: (nn.Sequential(structure.Scaled("viewed"), structure.Forked()), (4, 8, 8), False)


# --- Made once.


class TooFewInputs(Exception):
    """A network does not run on two random inputs."""


def made(at: Path) -> dict[str, str]:
    """Files of all of them in a folder; the names of those that cannot be made, and why."""
    (at / "all.toml").write_text(target())
    os.chdir(at)
    said = dict[str, str]()
    for name, make in _graphs():
        said |= _tried(at / name, partial(_made_graph, make=make))
    for name in METHODS:
        said |= _tried(at / f"checkpoint {name}", partial(_made_checkpoint, name=name))
    for name, build in _modules():
        said |= _tried(at / name, partial(_made_module, build=build))
    return said


def _tried(at: Path, make: Callable[[Path], None]) -> dict[str, str]:
    """Nothing if it is there already; what an interrupted run left half made, is made again."""
    unused = at.with_name(f"unused {at.name}")
    if (at / "known.pt").is_file() or unused.is_dir():
        return {}
    shutil.rmtree(at, ignore_errors=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make(at)
    except TooFewInputs:
        at.rename(unused)
    except Exception as error:
        return {at.name: f"{type(error).__name__}: {error}"[:300]}
    return {}


def _made_graph(at: Path, make: Callable[[], onnx.ModelProto]) -> None:
    model = make()
    calls = list(runnable(model, at.name))
    at.mkdir()
    onnx.save(model, at / "net.onnx")
    _known(at, calls)


def runnable(model: onnx.ModelProto, name: str) -> Iterator[tuple[Feeds, Feeds, Feeds]]:
    """Inputs on which a graph runs to finite numbers, and its outputs in float64 and in FP32."""
    single = _session(model)
    for number in range(CALLS):
        feeds = random_inputs(model, name, number)
        try:
            own, exact = _run(single, feeds), in_float64(model, feeds)
        except Exception:
            continue
        if all(np.isfinite(value).all() for value in (*own.values(), *exact.values()) if value.dtype.kind == "f"):
            yield feeds, exact, own


def random_inputs(model: onnx.ModelProto, name: str, number: int) -> Feeds:
    """The inputs of a call: odd ones with all dynamic sizes alike, even ones with all apart."""
    random, sizes, feeds = np.random.default_rng([9, number, len(name)]), dict[str, int](), {}
    stored = {weight.name for weight in model.graph.initializer}
    for value in model.graph.input:
        if value.name in stored:
            continue
        kind, dims = value.type.tensor_type, value.type.tensor_type.shape.dim
        shape = []
        for axis, dim in enumerate(dims):
            side = len(dims) == 4 and axis and not (axis == 3 and dim.dim_value)
            place = number if number % 2 else number + len(sizes)
            usual = (SIDES if side else LENGTHS)[place % CALLS]
            shape.append(dim.dim_value or sizes.setdefault(dim.dim_param or f"{value.name} {axis}", usual))
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if dtype.kind == "f":
            mean, deviation = FAR.get(name, (0.4 * (number - 2), (1, 0.3, 3)[number % 3]))
            feeds[value.name] = (mean + deviation * random.standard_normal(shape)).astype(dtype)
        elif "mask" in value.name or dtype.kind == "b":
            bits = random.random(shape) < 0.6
            bits[..., number % max(shape[-1], 1)] = True
            feeds[value.name] = bits.astype(dtype)
        else:
            feeds[value.name] = random.integers(
                0, 256 if dtype.name == "uint8" else BELOW.get(value.name, 5), shape
            ).astype(dtype)
    return feeds


def _made_checkpoint(at: Path, name: str) -> None:
    import repaconv
    from repaconv.core.run_folder import Run
    from repaconv.sources.source_model import TRAINING
    from repaconv.sources.source_of_run import source_model_of
    from torture.small_checkpoints import net

    at.mkdir()
    own = net(name)
    torch.save(own.whole, at / "c.pth")
    (at / "settings.json").write_text(json.dumps(own.settings))
    repaconv.fold(at / "c.pth", out=at / "sound", settings=own.settings)
    source_model = source_model_of(Run(at / "sound"))
    module, (output,) = source_model.network(TRAINING).module, source_model.outputs
    (port,) = source_model.inputs
    size = port.shape[1], *source_model.folded.image_size
    calls = []
    for number, count in enumerate((1, 3, 2, 4)):
        random = np.random.default_rng([9, number])
        feeds = {port.name: (0.3 * number + random.standard_normal((count, *size))).astype(np.float32)}
        with torch.no_grad():
            x = torch.from_numpy(feeds[port.name])
            single, exact = module.float().eval()(x), module.double()(x.double())
        calls.append((feeds, {output: exact.numpy()}, {output: single.numpy()}))
    _known(at, calls)


def _made_module(at: Path, build: Callable[[], tuple[torch.nn.Module, tuple[int, ...], bool]]) -> None:
    torch.manual_seed(3)
    module, shape, needed = build()
    module = module.double().eval()
    for buffer in module.parameters():
        buffer.requires_grad_(False)
    inputs = [0.3 * n + torch.randn(count, *shape, dtype=torch.float64) for n, count in enumerate((1, 3, 4))]
    outputs = [module(x) for x in inputs]
    at.mkdir()
    example = torch.randn(2, *shape, dtype=torch.float64) if needed else None
    torch.save({"module": module, "inputs": inputs, "example": example}, at / "module.pt")
    torch.save(outputs, at / "known.pt")


def _known(at: Path, calls: list[tuple[Feeds, Feeds, Feeds]]) -> None:
    if len(calls) < 2:
        raise TooFewInputs
    torch.save(calls, at / "known.pt")


# --- What is done with them.


def run(net: Path, at: Path) -> str:
    """Fold and export a network into an empty folder, as users do; a hash of what was written."""
    import repaconv

    if (net / "module.pt").is_file():
        held = torch.load(net / "module.pt", weights_only=False)
        folded = repaconv.fold(held["module"], **({} if held["example"] is None else {"example": held["example"]}))
        with torch.no_grad():
            torch.save([folded(x) for x in held["inputs"]], at / "outputs.pt")
        weights = hashlib.sha256()
        for name, tensor in folded.state_dict().items():
            weights.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
        return weights.hexdigest()
    if (net / "net.onnx").is_file():
        repaconv.fold(net / "net.onnx", out=at / "run", measure=False)
        tried = [*TRIED]
    else:
        repaconv.fold(net / "c.pth", out=at / "run", settings=json.loads((net / "settings.json").read_text()))
        tried = [{"target": "all"}]
    for options in tried:
        if "target" in options:
            options = {"target": str(net.parent / "all.toml")}
        repaconv.export(at / "run", **options)
    lines = []
    for path in sorted((at / "run").rglob("*.json")):
        found = json.loads(path.read_text())
        if found.get("verdict") == "failed":
            raise repaconv.core.errors.GateFailed("verdict", code="verdict")
        if "payload" in found:
            lines.append(f"{path.name} {found['payload']['sha256']}")
    return " ".join(lines)


# --- What came of it, by unchanged code.


def discarded(at: Path) -> tuple[str, str] | None:
    """A step that the verification discarded, or that broke off, so that the graph before it was written."""
    links = [link for path in (at / "run").rglob("*.json") for link in json.loads(path.read_text()).get("links", ())]
    for link in links:
        if link["verdict"] == "failed":
            return "caught", f"discarded: {link['name']}"
    broken = [link for link in links if "a rewrite failed (" in link.get("note", "")]
    return ("stopped", f"left out: {broken[0]['note']}"[:300]) if broken else None


def wrong(net: Path, at: Path) -> tuple[str, float]:
    """In what and how far what was written differs from the network, as a share of what is allowed."""
    if (at / "outputs.pt").is_file():
        expected = torch.load(net / "known.pt", weights_only=False)
        found = torch.load(at / "outputs.pt", weights_only=False)
        pairs = [(a.double().numpy(), b.numpy()) for a, b in zip(found, expected, strict=True)]
        return "the module", max(share(a, b, EXACT * neighborhood(b)) for a, b in pairs)
    found = [("", 0.0)]
    calls = torch.load(net / "known.pt", weights_only=False)
    for path in sorted((at / "run").rglob("*.onnx")):
        model = onnx.load(path)
        for how in ("FP32", "float64"):
            found += [(f"{path.name}, {how}", _wrong(model, how, *call)) for call in calls]
    if not (net / "net.onnx").is_file():
        import repaconv

        verdict = repaconv.verify(at / "run", count=3, seed=123).verdict
        found.append((f"verify: {verdict}", 0.0 if verdict == "passed" else np.inf))
    return max(found, key=lambda one: one[1])


def _wrong(model: onnx.ModelProto, how: str, feeds: Feeds, exact: Feeds, own: Feeds) -> float:
    names = [value.name for value in model.graph.input]
    given = {name: feeds.get(name, next(iter(feeds.values()))) for name in names if name in feeds or len(feeds) == 1}
    try:
        found = _run(_session(model), given) if how == "FP32" else in_float64(model, given)
    except Exception:
        return np.inf
    if len(found) != len(exact):
        return np.inf
    worst = 0.0
    for name, right in exact.items():
        got = found.get(name, next(iter(found.values())))  # an export may rename the only output
        if right.dtype.kind != "f":
            worst = max(worst, _other(got, right, own[name]))
            continue
        near = neighborhood(right)
        rounding = share(own[name].astype(np.float64), right, near)
        worst = max(worst, share(got.astype(np.float64), right, (TOLERANCE + OWN * rounding) * near))
    return worst


def _other(got: Array, right: Array, own: Array) -> float:
    """Of integers and truth values: they are the same, but for a few that FP32 rounding may decide."""
    if got.shape != right.shape or got.dtype != own.dtype:
        return np.inf
    return 0.0 if (got != right).sum() <= (own != right).sum() + right.size // 100 else np.inf


def share(got: Array, right: Array, allowed: Array) -> float:
    """The largest error, as a share of what is allowed; infinite for another shape."""
    if got.shape != right.shape or not np.isfinite(got).all():
        return np.inf
    return float(np.max(np.abs(got - right) / np.maximum(allowed, 1e-300), initial=0.0))


def neighborhood(right: Array) -> Array:
    """The largest number next to each, along the axis where that is least."""
    size = np.abs(right)
    found = np.full(right.shape, size.max(initial=0.0))
    for axis in range(right.ndim if right.size else 0):
        others = tuple(other for other in range(right.ndim) if other != axis)
        found = np.minimum(found, size.max(axis=others, keepdims=True))
    return np.maximum(found, 1e-3 * size.max(initial=0.0))


def in_float64(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> Feeds:
    """The outputs of a graph with all numbers in float64."""
    from repaconv.verification.float64_graphs import Float64

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: np.asarray(value) for name, value in Float64(model).run(dict(feeds)).items()}


def _session(model: onnx.ModelProto) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _run(session: Any, feeds: Mapping[str, Array]) -> Feeds:
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, dict(feeds)), strict=True))
