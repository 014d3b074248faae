"""Modules that were pickled whole, ``torch.save(module)``: read as data, built by other code, equal to the original.

The classes are importable while a file is written, and not while it is read. The package `ultralytics` is a small one
of the same layout: the names, attributes and YAML of a file are where the real package has them. The real one is
compared in ``benchmarks/ultralytics_files.py``.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import repaconv as rc
from repaconv.checkpoints import read_checkpoint
from repaconv.core.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.core.run_folder import Run
from repaconv.sources.source_of_run import source_model_of

NET = """
import os
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        self.gain, self.none = 1.0, None
        self.register_buffer("scale", torch.full((1, width, 1, 1), 1.5))
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.register_parameter("absent", None)

    def forward(self, x):
        return x + self.gain * self.act(self.norm(self.conv(x))) * self.scale


class Net(nn.Module):
    def __init__(self, width=8, pool=2):
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, width, 3, 2, 1), nn.MaxPool2d(pool)
        shared = Block(width)
        self.blocks = nn.Sequential(Block(width), shared, shared)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        return self.head(self.blocks(self.pool(self.stem(x))).mean((2, 3)))

    def __setstate__(self, state):
        open("it-ran", "w").close()
        super().__setstate__(state)


class Sealed(nn.Linear):
    def __reduce__(self):
        return Sealed, (2, 2)


def build():
    return Net()
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write a file in a Python that can import the code; in this one it cannot be imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "whole_net.py").write_text(NET)
    (tmp_path / "net.py").write_text(NET)

    def write(lines: str, path: str = "whole.pt", **how) -> Path:
        """The file, of the ``module`` that these lines make; ``right.pth`` has its state dict and an output."""
        (tmp_path / "code" / "write.py").write_text(WRITE.format(lines=textwrap.dedent(lines), path=path, how=how))
        done = subprocess.run([sys.executable, "code/write.py"], capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        Path("it-ran").unlink(missing_ok=True)
        return Path(path)

    return write


WRITE = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
{lines}
for part in module.modules():
    if isinstance(part, nn.BatchNorm2d):
        part.momentum = None
        nn.init.uniform_(part.weight, 0.5, 1.5)
        nn.init.uniform_(part.bias, -0.5, 0.5)
module.train()
with torch.no_grad():
    for _ in range(3):
        module(torch.randn(4, 3, 32, 32))
module.eval()
if "finish" in globals():
    kept = finish(module.half().float())
globals().setdefault("kept", module)
torch.save(kept, {path!r}, **{how!r})
right = {{"weights": {{name: value.clone() for name, value in module.state_dict().items()}}}}
images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
right["images"] = images
with torch.no_grad():
    right["output"] = module.double()(images)
torch.save(right, "right.pth")
"""


def right():
    return torch.load("right.pth")


def reference_output(run):
    """What the reference of a run's verification gives for the images of `right`."""
    source = source_model_of(Run(Path(run)))
    (name,) = source.reference.inputs
    return source.reference.run({name: right()["images"].numpy()})


def as_in_file(found):
    return {found.names[short]: tensor for short, tensor in found.tensors.items()}


@pytest.mark.parametrize("zip_file", [True, False])
def test_a_pickled_module_has_the_names_of_its_state_dict(written, zip_file):
    path = written("from whole_net import Net\nmodule = Net()", _use_new_zipfile_serialization=zip_file)
    found = read_checkpoint(path)
    weights = as_in_file(found)
    assert list(weights) == list(right()["weights"])
    assert all(torch.equal(weights[name], value) for name, value in right()["weights"].items())
    assert found.modules["blocks.0.norm"].attributes["eps"] == 1e-5
    assert found.origin.weights_reason == "the file is one module; a pickled whole_net.Net"
    assert "whole_net" not in sys.modules
    assert not Path("it-ran").exists()  # __setstate__ is in the file's class, and is not run


def test_a_wrapped_module_loses_the_wrapper(written):
    found = read_checkpoint(written("from whole_net import Net\nmodule = nn.DataParallel(Net())"))
    assert set(found.names.values()) == set(right()["weights"])
    assert "stem.weight" in found.tensors


def test_what_only_its_own_code_can_read_is_refused(written):
    path = written("from whole_net import Net, Sealed\nmodule = Net()\nkept = nn.Sequential(Net(), Sealed(2, 2))")
    with pytest.raises(Refused) as refused:
        read_checkpoint(path)
    assert refused.value.code == "checkpoint.global-in-weights"
    assert "1 is not a plain tensor; reading it requires whole_net.Sealed, which is not run." in refused.value.message
    path = written("from whole_net import Net, Sealed\nmodule = Net()\nkept = Sealed(2, 2)")
    with pytest.raises(Refused, match=r"holds no weights; it holds whole_net.Sealed, which need their code"):
        read_checkpoint(path)


def test_a_state_dict_next_to_a_module_is_taken(written):
    path = written("from whole_net import Net\nmodule = Net()\nkept = {'weights': module.state_dict(), 'net': module}")
    found = read_checkpoint(path)
    assert found.origin.weights == "weights"
    assert not found.modules
    assert read_checkpoint(path, "net").modules


SET = """
from whole_net import Net
module = Net()
for part in module.modules():
    if hasattr(part, "eps"):
        part.eps = 0.5
    if hasattr(part, "gain"):
        part.gain = 0.5
"""


def test_a_pickled_module_folds_with_the_code_of_arch(written):
    """With numbers that no tensor shows and that its code sets otherwise."""
    path = written(SET)
    done = rc.fold(path, arch="net.py:build", settings={"image_size": "32"}, out="run")
    assert done.verdict == "passed"
    taken = next(fact for fact in done.facts if fact.name == "attributes")
    assert taken.value == "blocks.0.gain=0.5, blocks.0.norm.eps=0.5, blocks.1.gain=0.5, blocks.1.norm.eps=0.5"
    (output,) = reference_output("run").values()
    np.testing.assert_allclose(output, right()["output"], rtol=1e-12, atol=1e-12)
    assert rc.verify("run").verdict == "passed"
    assert "whole_net" not in sys.modules


def test_a_pickled_module_of_an_unknown_network_is_to_be_exported_or_built(written):
    with pytest.raises(Refused, match="no tensors named as those of any known method") as refused:
        rc.fold(written(SET))
    assert all(way in refused.value.hint for way in ("whole module", "torch.onnx.export", "repaconv fold ", "--arch"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("module.pool.kernel_size = 3", "pool.kernel_size is 2, in the file 3"),
        ("module.blocks[0].act = nn.SiLU()", "blocks.0.act is ReLU, in the file SiLU"),
        ("module.stem.stride = (1, 1)", "stem.stride is (2, 2), in the file (1, 1)"),
    ],
)
def test_code_that_builds_another_network_than_was_saved_is_refused(written, change, message):
    """Its weights fit, and its outputs would be others."""
    path = written(f"from whole_net import Net\nmodule = Net()\n{change}")
    with pytest.raises(Refused) as refused:
        rc.fold(path, arch="net.py:build", settings={"image_size": "32"})
    assert refused.value.code == "arch.attributes"
    assert message in refused.value.message
    assert not Path("repaconv-out").exists()


# --- Ultralytics

TASKS = """
import ast
import os
from copy import deepcopy
import torch
from torch import nn
from ultralytics.nn.modules.layers import Conv, Detect


class RTDETRDecoder(nn.Module):
    pass


class DetectionModel(nn.Module):
    def __init__(self, cfg="yolo3n.yaml", ch=3, nc=None, verbose=True):
        super().__init__()
        self.yaml, self.names, self.task = cfg, {i: str(i) for i in range(cfg["nc"])}, "detect"
        self.model, self.save = parse_model(deepcopy(cfg), ch), []
        head = self.model[-1]
        head.training = True
        sizes = self.forward(torch.zeros(1, ch, 64, 64))
        head.training, head.stride = False, torch.tensor([64 / each.shape[-1] for each in sizes])
        self.stride = head.stride
        for part in self.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eps = 1e-3

    def forward(self, x):
        return self.model(x)

    def _apply(self, fn):
        super()._apply(fn)
        self.model[-1].stride = fn(self.model[-1].stride)
        return self


def parse_model(d, ch):
    act = d.get("activation")
    Conv.default_act = eval(act) if act else nn.SiLU()
    layers = []
    for f, n, m, args in d["backbone"] + d["head"]:
        m = getattr(nn, m[3:]) if m.startswith("nn.") else globals()[m]
        args = [d["nc"] if a == "nc" else a for a in args]
        layers.append(m(ch, *args) if m is Conv else m(*args, ch) if m is Detect else m(*args))
        ch = args[0] if m is Conv else ch
    return nn.Sequential(*layers)


def yaml_model_load(path):
    if path != "yolo3n.yaml":
        raise FileNotFoundError(f"'{path}' does not exist")
    return {"nc": 80, "backbone": [[-1, 1, "Conv", [8, 3, 2]]], "head": [[-1, 1, "Detect", ["nc"]]], "yaml_file": path}
"""
LAYERS = """
import torch
from torch import nn


class Conv(nn.Module):
    default_act = nn.SiLU()

    def __init__(self, c1, c2, k=1, s=1):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(c1, c2, k, s, k // 2, bias=False), nn.BatchNorm2d(c2)
        self.act = self.default_act

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class Detect(nn.Module):
    export, format, shape = False, None, None

    def __init__(self, nc, ch):
        super().__init__()
        self.nc, self.stride = nc, torch.zeros(1)
        self.cv3 = nn.ModuleList([nn.Sequential(Conv(ch, ch, 3), Conv(ch, ch, 3), nn.Conv2d(ch, nc + 4, 1))])

    def forward(self, x):
        found = self.cv3[0](x)
        if self.training:
            return [found]
        boxes, scores = found.flatten(2).split((4, self.nc), 1)
        y = torch.cat((boxes * self.stride, scores.sigmoid()), 1)
        return y if self.export else (y, {"boxes": boxes})
"""
YAML = {
    "nc": 3,
    "scales": {"n": [0.5, 0.25, 1024]},
    "scale": "n",
    "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 3, 2]]],
    "head": [[-1, 1, "nn.Upsample", [None, 2, "nearest"]], [-1, 1, "Detect", ["nc"]]],
    "yaml_file": "yolo3n.yaml",
    "channels": 3,
}
YOLO = """
from copy import deepcopy
from ultralytics.nn.tasks import DetectionModel

module = DetectionModel({yaml!r})


def finish(module):
    module.yaml = {inside!r}
    raw, ema = deepcopy(module), deepcopy(module).half()
    for part in raw.parameters():
        part.data = 0.5 * part.data
    module.model[-1].export = True
    return {{"model": raw.half(), "ema": ema, "train_args": {{"imgsz": 32, "task": "detect"}}, "version": "8.4.0"}}
"""


@pytest.fixture
def yolo(written, tmp_path):
    """Write a file of Ultralytics, whose weights in use are the moving average."""
    for place, text in (("nn/tasks", TASKS), ("nn/modules/layers", LAYERS), ("utils", UTILS)):
        path = tmp_path / "code" / "ultralytics" / f"{place}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "code" / "ultralytics-8.4.0.dist-info").mkdir()
    (tmp_path / "code" / "ultralytics-8.4.0.dist-info" / "METADATA").write_text("Name: ultralytics\nVersion: 8.4.0\n")
    return lambda **inside: written(YOLO.format(yaml=YAML, inside={**YAML, **inside}), "yolo3n.pt")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Let the package be importable from here on."""

    def install():
        monkeypatch.syspath_prepend(str(tmp_path / "code"))

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] == "ultralytics"]:
        del sys.modules[name]


UTILS = "DEFAULT_CFG_DICT = {'nms': None}"


def test_a_file_of_ultralytics_is_inspected_without_the_package(yolo):
    seen = rc.inspect(yolo())
    facts = {fact.name: fact.value for fact in seen.facts}
    assert facts == {
        "pickled module": "ultralytics.nn.tasks.DetectionModel",
        "architecture": "ultralytics:yolo3n.yaml",
        "task": "detect",
        "classes": 3,
        "image_size": 32,
        "written by": "ultralytics 8.4.0",
    }
    assert "ultralytics.nn.modules.layers.Detect" in seen.placeholders
    assert seen.origin.weights == "ema"
    assert not seen.problems
    assert "ultralytics" not in sys.modules


def test_without_the_package_the_fold_says_what_to_install(yolo):
    with pytest.raises(EnvironmentProblem) as missing:
        rc.fold(yolo())
    assert (missing.value.message, missing.value.hint) == ("ultralytics is not installed.", "pip install ultralytics")
    assert not Path("repaconv-out").exists()


def test_a_file_of_ultralytics_folds_and_computes_what_the_package_does(yolo, installed):
    path = yolo()
    found = read_checkpoint(path)
    assert list(as_in_file(found)) == list(right()["weights"])
    assert all(
        torch.equal(as_in_file(found)[name].double(), right()["weights"][name].double())
        for name in found.names.values()
    )
    installed()
    done = rc.fold(path, out="run", measure=False)
    assert (done.verdict, done.arch, done.image_size) == ("passed", "ultralytics:yolo3n.yaml", (32, 32))
    assert done.made_by["ultralytics"] == "8.4.0"
    (output,) = reference_output("run").values()
    np.testing.assert_allclose(output, right()["output"], rtol=1e-7, atol=1e-9)  # ONNX has eps in float32
    message = next(fact for fact in done.facts if fact.name == "preprocessing")
    assert message.against == "letterbox to 32 x 32 (the whole image with a gray border), RGB, 0 to 1"
    assert rc.verify("run").verdict == "passed"
    rc.export("run", onnx="yolo.onnx")
    session = onnxruntime.InferenceSession("yolo.onnx")
    assert [each.name for each in (*session.get_inputs(), *session.get_outputs())] == ["images", "output0"]
    images = right()["images"].float().numpy()
    (exported,) = session.run(None, {"images": images})
    np.testing.assert_allclose(exported, right()["output"], rtol=1e-4, atol=1e-5)


def test_the_commands_of_the_ultralytics_page_run(yolo, installed, repaconv):
    """On the small file; the page's block for ONNX files is run in test_docs.py."""
    yolo().rename("yolo11n.pt")
    installed()
    page = Path(__file__).parents[1] / "docs" / "how-to" / "yolo.md"
    block = page.read_text().split("```console\n")[1].split("```")[0]
    commands = [line.removeprefix("$ repaconv ").split() for line in block.splitlines() if "$ repaconv " in line]
    assert [command[0] for command in commands] == ["inspect", "fold", "export", "verify"]
    for command in commands:
        code, _, err = repaconv(*command)
        assert code == 0, (command, err)
        if command[0] == "inspect":
            assert " next repaconv fold yolo11n.pt\n" in err


def test_plain_weights_are_built_by_the_name_of_a_yaml(yolo, installed):
    yolo()
    torch.save(right()["weights"], "weights.pth")
    installed()
    with pytest.raises(UsageProblem, match=r"ultralytics has no architecture 'yolo4n.yaml'"):
        rc.fold("weights.pth", arch="ultralytics:yolo4n.yaml")
    with pytest.raises(Refused, match=r"these are not the weights of ultralytics:yolo3n.yaml"):
        rc.fold("weights.pth", arch="ultralytics:yolo3n.yaml")  # whose backbone has one layer
    with pytest.raises(UsageProblem, match=r"is not what yolo3n.pt was built from, which is ultralytics:yolo3n.yaml"):
        rc.fold("yolo3n.pt", arch="ultralytics:yolo4n.yaml")


RUN = "__import__('os').system('touch it-ran')"


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ({"activation": RUN}, "is no layer of torch.nn with plain arguments"),
        ({"activation": f"nn.SiLU({RUN})"}, "is no layer of torch.nn with plain arguments"),
        ({"activation": "nn.init.zeros_(1)"}, "is no layer of torch.nn with plain arguments"),
        ({"backbone": [[-1, 1, "os", []]]}, "'os' is no layer of ultralytics or torch"),
        ({"backbone": [[-1, 1, "DetectionModel", ["nc"]]]}, "'DetectionModel' is no layer of ultralytics or torch"),
        ({"backbone": [[-1, 1, "nn.init.zeros_", []]]}, "is no layer of ultralytics or torch"),
        ({"backbone": [[-1, 1, "Conv", [{"activation": RUN}]]]}, "Conv has the argument"),
        ({"backbone": [[-1, 1, "Conv", [RUN]]]}, "Conv has the argument"),
        ({"backbone": [[-1, 1, "Conv", [1 << 40]]]}, "Conv has the argument 1099511627776"),
        ({"backbone": [[-1, 1 << 40, "Conv", [8]]]}, "it repeats a layer more than 1000 times"),
        ({"backbone": [[-1, 1, "Conv", [60000, 3]], [-1, 1, "Conv", [60000, 3]]]}, "its layers are far larger"),
        ({"backbone": [[-1, 1]]}, "a layer is not [from, repetitions, name, arguments]"),
        ({"backbone": []}, "it has no backbone"),
        (
            {"head": [[-1, 1, "WorldDetect", ["nc"]]]},
            "A DetectionModel of ultralytics whose last layer is 'WorldDetect'",
        ),
        (
            {"backbone": [[-1, 1, "Conv", [4, 3, 2]], [-1, 1, "Conv", [16, 3, 2]]]},
            "another shape: model.0.conv.weight",
        ),
    ],
)
def test_the_yaml_in_a_file_runs_nothing(yolo, installed, inside, message):
    """The package evaluates the activation, and looks layers up among everything that it imported."""
    path = yolo(**inside)
    installed()
    with pytest.raises(Refused) as refused:
        rc.fold(path)
    assert message in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.hint
    assert not Path("it-ran").exists()
    assert not Path("repaconv-out").exists()


def test_a_yaml_that_builds_other_layers_than_were_saved_is_refused(yolo, installed):
    """Its weights fit: an activation has none."""
    path = yolo(activation="nn.ReLU()")
    installed()
    with pytest.raises(Refused, match="is ReLU, in the file SiLU"):
        rc.fold(path)
