"""Input that cannot be used ends in one sentence before any work, with the exit code of its kind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from shutil import copyfile
from threading import Thread

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn.utils import prune

import repaconv as rc
from repaconv.core.errors import EnvironmentProblem, Refused, UsageProblem
from repaconv.core.run_folder import default_folder
from repaconv.graph.compute_costs import known_macs_of_file
from repaconv.results import FoldArtefact
from repaconv.sources.method_detection import load_method
from repaconv.verification.image_files import image_files


def convolution(name: str = "g", **attributes) -> onnx.ModelProto:
    """Conv and BatchNormalization, of images [N, 3, 16, 16]."""
    drawn = np.random.default_rng(0)
    weights = {"w": drawn.standard_normal((8, 3, 3, 3)), "b": np.zeros(8)}
    weights |= {each: drawn.uniform(1, 2, 8) for each in ("scale", "shift", "mean", "var")}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1], **attributes),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["y"], name="norm"),
    ]
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 8, 16, 16])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_graph_without_a_name_is_folded():
    onnx.save(convolution(""), "plain.onnx")
    assert rc.fold("plain.onnx", measure=False).verdict == "passed"
    assert [
        node.op_type for node in onnx.load(default_folder(Path("plain.onnx")) / "plain.folded.onnx").graph.node
    ] == ["Conv"]


@pytest.mark.parametrize("kernel", [[5, 5], [3], [3, 3, 3]])
def test_a_kernel_shape_that_is_not_the_weights_is_named(kernel):
    onnx.save(convolution(kernel_shape=kernel), "odd.onnx")
    with pytest.raises(Refused) as refused:
        rc.fold("odd.onnx")
    assert refused.value.code == "onnx.invalid"
    assert "kernel" in refused.value.message
    assert "inputs" not in refused.value.hint


def test_weights_in_a_file_without_a_name_are_refused_with_the_reason():
    model = convolution()
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="")
    Path("nowhere.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(Refused, match="their location does not say in which") as refused:
        rc.fold("nowhere.onnx")
    assert refused.value.code == "onnx.external"


@pytest.mark.parametrize(("layout", "shape"), [(0, [7, 2, 4]), (1, [2, 7, 4])])
def test_a_recurrent_layer_costs_the_same_in_both_layouts(layout, shape):
    weights = [
        numpy_helper.from_array(np.ones((1, 20, width), np.float32), name) for name, width in (("w", 4), ("r", 5))
    ]
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=5, layout=layout)
    inputs, outputs = ([helper.make_tensor_value_info(name, 1, size)] for name, size in (("x", shape), ("y", None)))
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, outputs, weights), opset_imports=[helper.make_opsetid("", 17)]
    )
    assert known_macs_of_file(onnx.shape_inference.infer_shapes(model)) == 7 * 2 * 4 * 5 * (4 + 5)


def test_the_message_for_a_misspelled_package_of_an_architecture_has_the_nearest(tiny):
    with pytest.raises(UsageProblem, match="timn is neither a package") as refused:
        rc.fold(tiny, arch="timn:resnet50")
    assert "Did you mean timm:resnet50?" in refused.value.hint
    with pytest.raises(UsageProblem, match=r"there is no Python file .*net\.py"):
        rc.fold(tiny, arch="net.py:build")
    for name in ("timm", "timm:", ":build"):
        with pytest.raises(UsageProblem, match=f"--arch {name} names no architecture"):
            rc.fold(tiny, arch=name)
    with pytest.raises(UsageProblem, match="--arch resnet50 names no package") as refused:
        rc.fold(tiny, arch="resnet50")
    assert "timm:resnet50" in refused.value.hint
    with pytest.raises(UsageProblem, match="is neither a package that it takes networks from nor a Python file"):
        rc.fold(tiny, arch=f"{tiny}:build")


def test_a_head_without_its_weight_is_said_to_be_incomplete(tmp_path):
    weights = load_method("repavit").example("tiny", 1)
    torch.save({name: one for name, one in weights.items() if name != "head.weight"}, tmp_path / "part.pth")
    with pytest.raises(Refused, match=r"no part of this net takes: head\.bias") as refused:
        rc.fold(tmp_path / "part.pth", num_heads=3)
    assert "The file lacks head.weight" in refused.value.hint


def test_a_path_within_a_file_and_a_folder_of_checkpoints_are_refused_with_what_to_give(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    copyfile(tiny, "folder/net.pth")
    with pytest.raises(Refused, match=r"there is no file folder/net\.pth/x"):
        rc.fold("folder/net.pth/x")
    with pytest.raises(Refused, match=r"no readable config\.json") as refused:
        rc.fold("folder")
    assert refused.value.hint.startswith("Give the file, e.g. folder/net.pth.")


def test_progress_is_a_function(tiny):
    for act in (
        lambda: rc.fold(tiny, progress=3),
        lambda: rc.export(progress=3),
        lambda: rc.new_recipe(tiny, progress=3),
    ):
        with pytest.raises(UsageProblem, match="progress=3: input should be a function") as refused:
            act()
        assert refused.value.code == "usage.arguments"


@pytest.mark.parametrize("command", ["inspect", "fold", "bench", "compare"])
def test_a_pipe_is_called_a_pipe(command, repaconv):
    os.mkfifo("p.onnx")
    onnx.save(convolution(), "x.onnx")
    code, _, message = repaconv(command, "p.onnx", *(["x.onnx"] if command == "compare" else []))
    assert code == 4
    assert "p.onnx is a pipe or a device, not a regular file" in message


@pytest.fixture
def folded() -> FoldArtefact:
    onnx.save(convolution(), "net.onnx")
    found = rc.fold("net.onnx", out="run", measure=False)
    rc.export("run")
    return found


def test_a_result_that_cannot_be_written_is_refused_before_any_work(folded, tiny, repaconv, monkeypatch):
    def works(step: str, *_: object) -> None:
        assert "open" in step, "it began to work"

    Path("file").write_text("mine")
    acts = (
        lambda: rc.export("run", onnx="file/x.onnx", progress=works),
        lambda: rc.verify("run", out="file/v.json", progress=works),
        lambda: rc.bench("run", out="file/b.json", progress=works),
        lambda: rc.bench("run", baseline="file/b.json", update_baseline=True, progress=works),
        lambda: rc.tune("run", out="file/t.json", progress=works),
    )
    for act in acts:
        with pytest.raises(EnvironmentProblem, match=r"cannot write file/.*: file: Not a directory") as refused:
            act()
        assert refused.value.code == "write.failed"
    for words in (("gate", "r.toml", "--report", "junit:file/x"), ("inspect", tiny, "--svg", "file/x.svg")):
        code, _, message = repaconv(*words)
        assert code == 3
        assert "file: Not a directory" in message
    assert repaconv("gate", "r.toml", "--report", "junit:run")[0] == 3

    Path("locked").mkdir()
    allowed = os.access
    monkeypatch.setattr(  # root may write anywhere
        os, "access", lambda path, mode: Path(path) != Path("locked").resolve() and allowed(path, mode)
    )
    with pytest.raises(EnvironmentProblem, match="locked: Permission denied"):
        rc.fold("net.onnx", out=Path("locked/new").resolve(), progress=works)
    assert not list(Path("locked").iterdir())
    held = os.statvfs("locked")
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*held[:8], os.ST_RDONLY, held[9])))
    with pytest.raises(EnvironmentProblem, match="locked: Read-only file system"):
        rc.fold("net.onnx", out=Path("locked/new").resolve(), progress=works)


def test_a_tilde_that_no_shell_replaced_is_refused(tiny, repaconv, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    for words in (("fold", tiny, "--out=~/run"), ("fold", "~/net.pth"), ("fold", tiny, "-o", "~")):
        code, _, message = repaconv(*words)
        assert (code, "begins with ~" in message, "hint: Give /home/somebody" in message) == (4, True, True), message
    assert not Path("~").exists()
    with pytest.raises(Refused, match="begins with ~"):
        rc.fold(tiny, out="~/run")
    rc.fold(tiny)
    for words in (
        ("fold", tiny, "--arch", "~/net.py:build"),
        ("export", "--target", "~/board.toml"),
        ("export", "--target", "~/board.toml@old"),
        ("export", "--preset", "~/tuned.json"),
    ):
        code, _, message = repaconv(*words)
        assert (code, "begins with ~" in message, "hint: Give /home/somebody" in message) == (4, True, True), message
    recipe = """
        checkpoint = '~/net.pth'
        arch = '~/net.py:build'
        preset = '~/tuned.json'
        out = '~/run'
        verify.images = '~/images'
        export.target = '~/board.toml'
        bench.baseline = '~/baseline.json'
    """
    Path("sub").mkdir()
    for name, text in (("own.toml", recipe), ("sub/base.toml", recipe), ("other.toml", "extends = 'sub/base.toml'")):
        Path(name).write_text(text.replace("        ", ""))
    for name in ("own.toml", "other.toml"):
        code, message, _ = repaconv("run", name)
        message = " ".join(message.split())
        assert (code, "(Give /home/somebody" in message, "there is no" in message) == (2, True, False), message
        keys = ("checkpoint", "arch", "preset", "out", "verify.images", "export.target", "bench.baseline")
        assert all(f"{key}: ~/" in message for key in keys), message
        assert message.count("begins") == len(keys)
    Path("own.toml").write_text("extends = '~/base.toml'")
    code, message, _ = repaconv("run", "own.toml")
    assert (code, "extends: ~/base.toml begins with ~" in message) == (2, True), message
    matrix = "models = [{{checkpoint = '{}', arch = '{}'}}]\ntargets = ['{}']\nprecisions = ['fp32']\nbatches = [1]"
    for named in (("~/net.pth", "", "x86-64"), ("net.pth", "~/net.py:build", "x86-64"), ("net.pth", "", "~/a.toml@b")):
        Path("matrix.toml").write_text(matrix.format(*named))
        code, _, message = repaconv("sweep", "matrix.toml")
        assert (code, "begins with ~" in message, "hint: Give /home/somebody" in message) == (4, True, True), message
    Path("matrix.toml").write_text(matrix.format("net.pth", "", "x86-64").replace("arch = ''", "inputs = '~/x.npz'"))
    code, _, message = repaconv("sweep", "matrix.toml")
    assert (code, "~/x.npz begins with ~" in message) == (4, True), message
    Path("~").mkdir()  # then it is meant
    assert rc.fold(tiny, out="~/run").output_files
    assert rc.fold(tiny, out="~net").output_files


def test_a_file_that_the_fold_would_remove_is_refused(repaconv):
    onnx.save(convolution("net"), "net.onnx")
    rc.fold("net.onnx", out="run", measure=False)
    before = {path: path.read_bytes() for path in Path("run").iterdir()}
    for words in ((), ("--force",)):
        code, _, message = repaconv("fold", "run/net.folded.onnx", "-o", "run", *words)
        assert (code, "run.other-checkpoint" in message) == (4, True)
        assert "--force" not in message  # it would be refused again
    assert {path: path.read_bytes() for path in Path("run").iterdir()} == before
    rc.fold("run/net.folded.onnx", out="again", measure=False)
    with pytest.raises(Refused, match="which this fold would replace"):  # of the same bytes
        rc.fold("again/net.folded.folded.onnx", out="again", force=True, measure=False)


def test_an_export_does_not_replace_the_folded_network_that_it_is_made_from(repaconv):
    onnx.save(convolution("net"), "net.onnx")
    rc.fold("net.onnx", out="run", measure=False)
    Path("alias.onnx").symlink_to("run/net.folded.onnx")
    before = {path: path.read_bytes() for path in Path("run").iterdir()}
    for out, message in (
        ("run/net.folded.onnx", "run/net.folded.onnx is the folded network that is exported."),
        ("alias.onnx", "alias.onnx is the folded network that is exported."),
        (".", ". is a folder, and a file is written here."),
        ("/", "/ is a folder, and a file is written here."),
    ):
        code, _, err = repaconv("export", "run", "--onnx", "-o", out)
        assert (code, message in err) == (2, True)
    assert {path: path.read_bytes() for path in Path("run").iterdir()} == before


def test_of_two_exports_into_one_file_at_once_the_later_is_refused():
    onnx.save(convolution("net"), "net.onnx")
    for out in ("run", "other"):
        rc.fold("net.onnx", out=out, measure=False)
    made = []

    def meanwhile(*_: object) -> None:
        if not made:
            made.append(None)
            made[0] = rc.export("other", onnx="same.onnx", opset=17)

    with pytest.raises(rc.UsageProblem, match=r"same\.onnx already exists"):
        rc.export("run", onnx="same.onnx", opset=18, progress=meanwhile)
    assert onnx.load("same.onnx").opset_import[0].version == 17
    assert rc.verify("other").verdict == "passed"
    assert not list(Path("run").glob("export*"))


def test_a_symbolic_link_to_itself_is_refused(tiny, folded, repaconv):
    Path("loop").symlink_to("loop")
    for words in (
        ("fold", tiny, "-o", "loop"),
        ("fold", tiny, "-o", "loop/run"),
        ("fold", "loop"),
        ("export", "run", "--onnx", "-o", "loop/net.onnx"),
        ("verify", "loop"),
    ):
        code, out, message = repaconv(*words)
        assert (code, out) == (4, "")
        assert "a symbolic link that leads back to itself. (file.name)" in message


@pytest.mark.parametrize("command", ["run", "gate", "sweep"])
def test_a_folder_in_place_of_a_toml_file(command, repaconv):
    Path("folder").mkdir()
    code, out, err = repaconv(command, "folder")
    what = "matrix" if command == "sweep" else "recipe"
    assert code == 2
    assert f"the {what} folder cannot be read: it is a folder." in out + err
    assert f"A {what} is a TOML file." in out + err


@pytest.mark.parametrize("text", ["{", "[]", "", '{"machines": {"x": 3}}', '{"other": 1}'])
def test_a_damaged_baseline_is_refused_before_anything_is_measured(folded, text):
    def measures(step: str, *_: object) -> None:
        assert "bench" not in step

    Path("b.json").write_text(text)
    with pytest.raises(Refused, match=r"^b\.json is not a readable file of baselines: [^:]") as refused:
        rc.bench("run", rounds=2, baseline="b.json", progress=measures)
    assert refused.value.code == "baseline.unreadable"
    assert "--update-baseline" in refused.value.hint
    with pytest.raises(Refused, match="run is a folder"):
        rc.bench("run", rounds=2, baseline="run", progress=measures)


def test_the_report_says_which_command_made_a_link_and_repeats_no_option_that_is_refused(folded, repaconv):
    assert repaconv("export", "run", "--precision", "fp16")[0] == 0
    assert repaconv("verify", "run")[0] == 0
    rc.report("run", paper=False)
    page = Path("run/report.html").read_text()
    assert all(f"<td>fp16</td><td>{command}</td>" in page for command in ("verify", "export"))
    assert "--quantizer" not in page


class Small(torch.nn.Sequential):
    """Images [N, 3, H, W] to [N, 5]."""

    def __init__(self) -> None:
        super().__init__(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        )
        self.append(torch.nn.Linear(8, 5))


def weight_normed(net: Small) -> torch.nn.Module:
    torch.nn.utils.weight_norm(net[0])
    return net


def pruned(net: Small) -> torch.nn.Module:
    prune.l1_unstructured(net[0], "weight", 0.3)
    return net


def quantized(net: Small) -> torch.nn.Module:
    return torch.ao.quantization.quantize_dynamic(net, {torch.nn.Linear})


def without_numbers(net: Small) -> torch.nn.Module:
    net[0].weight.data[0] = torch.nan
    return net


def negative(net: Small) -> torch.nn.Module:
    net[1].running_var -= 2
    return net


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", [None, torch.ones(2, 3, 16, 16)])
@pytest.mark.parametrize(
    ("change", "code", "message", "hint"),
    [
        (weight_normed, "live.copy", "cannot be copied", "0.weight is computed from other tensors"),
        (pruned, "live.copy", "cannot be copied", "prune.remove"),
        (quantized, "live.quantized", "4 of this Small is quantized", "before it is prepared"),
        (without_numbers, "live.not-finite", "0.weight of this Small holds NaN", "load those"),
        (negative, "live.not-finite", "1.running_var of this Small holds a negative variance", "load those"),
        (lambda net: torch.nn.ModuleList([net]), "live.forward", "has no forward", "each of its parts"),
    ],
)
def test_a_module_that_gives_no_numbers_is_refused_with_the_reason(change, code, message, hint, example):
    with pytest.raises(Refused) as refused:
        rc.fold(change(Small()), example=example)
    assert refused.value.code == code
    assert message in refused.value.message
    assert hint in refused.value.hint


def test_a_module_whose_inputs_are_not_found_says_what_failed_with_the_likeliest():
    class Named(Small):
        def forward(self, images):
            return {"scores": super().forward(images), "kind": "classes"}

    with pytest.raises(Refused, match="kind is a str, which cannot be compared"):
        rc.fold(Named())


@pytest.mark.parametrize("command", ["bench", "tune", "deploy", "compare"])
def test_more_rounds_than_memory_can_hold_are_refused(command, tiny, repaconv):
    given = {"deploy": [tiny], "compare": ["a.onnx", "b.onnx", "--speed"]}.get(command, [])
    code, _, message = repaconv(command, *given, "--rounds", 10**21)
    assert code == 2
    assert "less than or equal to 1000000" in message


@pytest.mark.parametrize("command", ["verify", "bundle", "deploy", "compare"])
def test_more_images_than_any_data_set_has_are_refused(command, tiny, repaconv):
    given = {"deploy": [tiny], "compare": ["a.onnx", "b.onnx"]}.get(command, [])
    code, _, message = repaconv(command, *given, "--count", 10**20)
    assert code == 2
    assert "less than or equal to 10000000" in message


def test_nan_is_called_nan(repaconv):
    code, _, message = repaconv("tune", "run", "--budget", "nan")
    assert code == 2
    assert "'--budget': must be a number, not NaN" in message
    with pytest.raises(UsageProblem, match="budget_s=nan: must be a number, not NaN"):
        rc.tune("run", budget_s=float("nan"))


def test_a_file_of_images_is_called_a_file():
    Path("cat.png").write_bytes(b"")
    with pytest.raises(Refused, match=r"cat\.png is a file, not a folder"):
        image_files(Path("cat.png"))
    with pytest.raises(Refused, match="there is no folder cats"):
        image_files(Path("cats"))


def test_a_pipe_is_not_replaced_by_a_report(repaconv):
    os.mkfifo("pipe")
    code, _, message = repaconv("gate", "r.toml", "--report", "junit:pipe")
    assert code == 3
    assert "cannot write pipe: it is a pipe or a device" in message
    assert Path("pipe").is_fifo()


def test_a_history_that_cannot_be_written_is_refused_before_anything_is_measured(folded):
    rc.bench("run", rounds=2)
    (history,) = Path("run").glob("history-*")
    history.unlink()
    history.mkdir()

    def measures(step: str, *_: object) -> None:
        assert "bench" not in step

    with pytest.raises(EnvironmentProblem, match=r"cannot write run/history-.*: Is a directory"):
        rc.bench("run", rounds=2, out="b.json", progress=measures)


@pytest.mark.parametrize("size", ["65537", "4294967296x8", "9" * 30])
def test_an_image_that_is_larger_than_any_file_of_one_is_refused(size, tiny, repaconv):
    for given in (["fold", tiny, "--set", f"image_size={size}"], ["bench", tiny, "--image-size", size]):
        code, _, message = repaconv(*map(str, given))
        assert code == 2
        assert "larger than an image can be, 65,536 pixels a side" in message


@pytest.mark.parametrize("endless", ["/dev/zero", "/dev/full"])
def test_a_device_without_an_end_is_no_page_of_ours(endless, tiny, repaconv):
    code, _, message = repaconv("inspect", str(tiny), "--svg", endless)
    assert code == 2
    assert "is not an unchanged output of this run" in message


def test_a_folder_in_which_no_file_can_be_created_is_refused_before_any_work(folded):
    """/proc says of its folders that they can be written, and takes no files."""
    with pytest.raises(EnvironmentProblem, match="/proc: no file can be created there") as raised:
        rc.bench(rounds=1_000_000, out="/proc/measured.json")  # which would take hours
    assert raised.value.code == "write.failed"


def test_a_recipe_of_a_file_whose_name_has_control_characters_is_toml(tiny):
    from repaconv.stages.recipe.recipe_file import read_recipe

    odd = tiny.rename(tiny.with_name("we\nird\x7f \x1b[1m.pth"))
    made = rc.new_recipe(odd, out="recipe.toml")
    assert read_recipe(Path(made.recipe))[0].checkpoint == odd.name


@pytest.mark.parametrize("command", ["run", "gate", "sweep"])
def test_a_recipe_or_a_matrix_that_never_ends_is_not_read(command, repaconv):
    message = "".join(map(str, repaconv(command, "/dev/zero")))
    assert "cannot be read: it is a device, not a regular file" in " ".join(message.split())


def test_a_recipe_may_come_from_a_pipe(repaconv):
    os.mkfifo("pipe.toml")
    writer = Thread(target=lambda: Path("pipe.toml").write_text('checkpoint = "none.pth"'))
    writer.start()
    message = "".join(map(str, repaconv("run", "pipe.toml")))
    writer.join()
    assert "none.pth" in message
    assert "cannot be read: it is" not in message


@pytest.mark.parametrize("text", ["models: " + "[" * 5000, "when: 2020-13-45"])
def test_yaml_of_which_nothing_can_be_made_is_refused(text, repaconv):
    Path("matrix.yaml").write_text(text)
    code, _, message = repaconv("sweep", "matrix.yaml")
    assert code == 2
    assert "matrix.yaml is not YAML" in message


def test_a_recipe_may_begin_with_a_byte_order_mark(tiny):
    from repaconv.stages.recipe.recipe_file import read_recipe

    Path("recipe.toml").write_bytes(b"\xef\xbb\xbf" + f'checkpoint = "{tiny.name}"\n'.encode())
    assert read_recipe(Path("recipe.toml"))[0].checkpoint == tiny.name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnt18", "and the index of repaconv has no 'resnt18' of it."),
        ("resnet18.a1_in1k", "torchvision is not installed."),
    ],
)
def test_the_message_for_a_misspelled_architecture_of_a_missing_package_has_the_nearest(
    name, message, tiny, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torchvision", None)  # an import of it now fails
    with pytest.raises(EnvironmentProblem) as missing:
        rc.fold(tiny, arch=f"torchvision:{name}")
    assert missing.value.code == "torchvision.missing"
    assert message in missing.value.message or "torchvision does not load" in missing.value.message
    assert ("Did you mean resnet18?" in missing.value.hint) is (name == "resnt18")


def test_an_image_size_is_a_list_too_as_the_hint_of_a_wrong_one_says(tiny):
    assert rc.fold(tiny, settings={"image_size": [32, 16]}, out="a").image_size == (32, 16)
    assert rc.fold(tiny, settings={"image_size": "32,16"}, out="b").image_size == (32, 16)


@pytest.mark.parametrize(
    ("words", "hint"),
    [(("--rtol", "fold:nan"), "E.g. --rtol fold:1e-6."), (("--rtol", "fold"), "E.g. --rtol onnx:1e-6.")],
)
def test_the_example_of_a_tolerance_can_be_typed(tiny, repaconv, words, hint):
    rc.fold(tiny)
    code, _, err = repaconv("verify", *words)
    assert (code, hint in err) == (2, True), err


OWN_CODE = "from torch import nn\n\nprint('hello')\n\n\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 4, 3))\n"


def test_what_the_code_of_arch_prints_is_no_part_of_the_result(repaconv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(OWN_CODE)
    torch.save(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)).state_dict(), "net.pth")
    how = ("--arch", "./net.py:build", "--set", "image_size=8", "--no-measure")
    code, out, err = repaconv("fold", "net.pth", *how, "--format", "json")
    assert (code, json.loads(out)["status"], "hello" in err) == (0, "ok", True)


def test_a_function_of_arch_that_is_misspelled_or_left_out_is_reported(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(OWN_CODE)
    with pytest.raises(UsageProblem, match="has no function build2") as refused:
        rc.fold(tiny, arch="./net.py:build2")
    assert refused.value.hint.startswith("Did you mean build?")
    with pytest.raises(UsageProblem, match="names no function in that file") as refused:
        rc.fold(tiny, arch="./net.py")
    assert "net.py:build" in refused.value.hint


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("export --precision INT8", "int8"),
        ("export --precision int8 --quantizer NNCF", "nncf"),
        ("export --simplifier ONNXSIM", "onnxsim"),
        ("export --target ARM64", "arm64"),
        ("export --preset OFFICIAL", "official"),
        ("export --format JSON", "json"),
        ("build --precision BF16", "bf16"),
        ("bench --precision INT8", "int8"),
        ("bundle --target orin-nano --precision FP16", "fp16"),
        ("verify --require ONNX", "onnx"),
        ("tune --runtimes OPENVINO", "openvino"),
        ("fold net.pth --method PYRA", "pyra"),
        ("fold net.pth --task DETECT", "detect"),
        ("convert net.pth --method PYRA", "pyra"),
        ("deploy net.pth --precision INT8", "int8"),
    ],
)
def test_a_name_in_capitals_is_told_the_one_that_exists(tiny, repaconv, words, name):
    rc.fold(tiny)
    tiny.rename("net.pth")
    code, _, message = repaconv(*words.split())
    assert (code, f"hint: Did you mean {name}? " in message) == (2, True), message
