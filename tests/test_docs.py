"""The documentation: what its pages tell people to type runs, in order; its links lead somewhere; the site builds."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
import torch
import yaml
from onnx import TensorProto
from PIL import Image
from test_bundle_and_collect import on_the_board
from test_score_and_convert_commands import images as calibrating
from test_score_and_convert_commands import plain_weights

from repaconv import models
from repaconv.core import plugins
from repaconv.engines.targets import from_file
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.stages.recipe.recipe_file import read_recipe, schema
from repaconv.testing import check_method, write_example

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
QUICK = ("README.md", "docs/tutorials/timm-model.md", "docs/how-to/own-method.md", "docs/how-to/training-script.md")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", page.read_text(), flags=re.S | re.M)
    return [re.sub(rf"^{indent}", "", text, flags=re.M) for indent, text in found]


def typed(page: Path) -> list[list[str]]:
    """What a page has people type: repaconv's commands, and files copied."""
    lines = [shlex.split(line, comments=True) for block in blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line and line[0] in ("repaconv", "cp")]


@pytest.fixture
def at_hand(tiny):
    """The files that pages speak of."""
    shutil.copy(tiny, "ckpt.pth")
    Path("recipe.toml").write_text('checkpoint = "ckpt.pth"')
    torch.save(plain_weights(tokens=False), "vit.pth")
    np.savez("images.npz", input=calibrating())
    shutil.copy(models.CALIBRATION, "calibration.npz")
    shutil.copy(models.HELD_OUT, "digits.npz")
    Path("calibration").mkdir()
    for n, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (48, 8, 8, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(f"calibration/{n:02}.png")
    for method in models.METHODS:
        shutil.copy(models.checkpoint(method), f"{method}.pth")


def with_page_alone(page: Path) -> None:
    """What a page's own files are: those that its blocks name in their first line, and their weights."""
    for block in blocks(page, "toml"):
        if first := re.match(r"# ([\w-]+\.toml)\b", block):
            Path(first[1]).write_text(block)
    if "b.onnx" in page.read_text():
        two_graphs(torch.nn.Conv2d(3, 2, 1).eval())
    for block in blocks(page, "python"):
        if first := re.match(r"# (\w+\.py)\n", block):
            Path(first[1]).write_text(block)
            made: dict = {}
            exec(block, made)
            torch.save(made["build"]().state_dict(), "mine.pth")
    if page.stem == "repconv":
        write_example("repconv", plugins.load(plugins.METHODS, "repconv").archs[0], Path("repvgg.pth"), 0)


def two_graphs(module: torch.nn.Module) -> None:
    """a.onnx and b.onnx, which are the module."""
    from repaconv.onnx_export.torch_exporter import to_onnx

    ways = {"output": "output", "opset": 20, "batch": None, "dynamic_size": False}
    for name in ("a.onnx", "b.onnx"):
        Path(name).write_bytes(to_onnx(module, (3, 224, 224), **ways).SerializeToString())


def alike(pages):
    return [
        pytest.param(page, id=name_of(page), marks=[] if name_of(page) in QUICK else [pytest.mark.slow])
        for page in pages
    ]


@pytest.mark.parametrize("page", alike(page for page in PAGES if typed(page)))
def test_what_a_page_tells_people_to_type_runs(repaconv, at_hand, page):
    with_page_alone(page)
    for program, *command in typed(page):
        if program == "cp":
            shutil.copy(*command)
            continue
        if command[0] == "collect":  # what happens on the board is replayed
            bundle = next(Path("repaconv-out").glob("*/build/orin-nano*.fp16.tar.gz"))
            on_the_board(bundle, "10.3")[1].rename("result.tar.gz")
        # on a machine that runs tests beside it, a measurement may be inconclusive
        measures = command[0] in ("bench", "tune", "deploy") or "--speed" in command
        measures |= command[0] in ("run", "gate") and "[bench]" in Path(command[1]).read_text()
        code, _, err = repaconv(*command)
        assert code in ((0, 5) if measures else (0,)), (command, err)


@pytest.mark.slow
def test_a_graph_of_fixed_shapes_has_the_nodes_that_the_page_of_export_says(repaconv, at_hand):
    sizes, (fewer, more) = (
        [],
        re.search(r"has (\d+) nodes instead of (\d+)", (DOCS / "how-to/export.md").read_text()).groups(),
    )
    repaconv("fold", "riformer.pth")
    for options in (["--batch", "8", "--image-size", "24"], []):
        code, out, err = repaconv("export", *options, "--format", "json")
        assert code == 0, err
        sizes.append(json.loads(out)["data"]["nodes"])
    assert sizes == [int(fewer), int(more)]


def test_the_commands_of_the_yolo_page_run_on_a_small_detector(repaconv):
    from repaconv.onnx_export.torch_exporter import to_onnx

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.SiLU(), torch.nn.Conv2d(8, 6, 1)).eval()
    ways = {"output": "output", "opset": 20, "batch": None, "dynamic_size": False}
    Path("yolov8n.onnx").write_bytes(to_onnx(net, (3, 32, 32), **ways).SerializeToString())
    np.savez("images.npz", input=np.random.default_rng(0).random((64, 3, 32, 32), np.float32))
    lines = blocks(DOCS / "how-to" / "yolo.md", "console")[1].splitlines()
    commands = [line.removeprefix("$ repaconv ").split() for line in lines if line.startswith("$ repaconv ")]
    assert [command[0] for command in commands] == ["inspect", "fold", "export", "verify", "bench"]
    for command in commands:
        code, _, err = repaconv(*command)
        assert code in ((0, 5) if command[0] == "bench" else (0,)), (command, err)


def test_commands_and_options_that_pages_templates_and_examples_name_exist():
    """Also where no test runs them: in sentences, tables, CI templates and commands for boards."""
    from typer.main import get_command

    from repaconv.cli.main import app

    known = {
        name: {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
        for name, command in get_command(app).commands.items()
    }
    templates = [path for folder in (".github", "docker", "examples") for path in (ROOT / folder).rglob("*")]
    pages = {*PAGES, ROOT / "Makefile", ROOT / ".pre-commit-hooks.yaml", *filter(Path.is_file, templates)}
    found, wrong = 0, []
    for page in sorted(page for page in pages if "__pycache__" not in page.parts):
        text = page.read_text().replace("\\\n", " ")
        named = re.findall(r"repaconv +([a-z][a-z-]+)((?: [^`\n|;&#]*)?)", text)
        named += [(name, options) for name, options in re.findall(r"`([a-z-]+)( --[^`\n]*)`", text) if name in known]
        for name, options in named:
            used = re.findall(r"(?<= )--?[a-z][a-z0-9-]*", options) if name in known else []
            found += len(used)
            wrong += [f"{name_of(page)}: {name} {option}" for option in used if option not in known[name]]
    assert found > 300
    assert not wrong, wrong


def test_a_page_that_exports_verifies_afterwards():
    for page in PAGES:
        for block in [*blocks(page, "sh"), *blocks(page, "console")]:
            names = [words[1] for line in block.splitlines() if "repaconv" in (words := line.lstrip("$ ").split())[:1]]
            if "verify" in names and "export" in names:
                assert names.index("export") < len(names) - 1 - names[::-1].index("verify"), (page, block)


def test_a_page_that_builds_for_a_target_exports_for_it_before():
    """Without it `build` has no ONNX model, and says so."""
    missing = []
    for page in PAGES:
        exported = {"x86-64"}
        for line in "".join((*blocks(page, "sh"), *blocks(page, "console"))).splitlines():
            command, target = re.search(r"repaconv (\w+)", line), re.search(r"--target (\S+)", line)
            if target and command and command[1] in ("export", "deploy"):
                exported.add(target[1])
            elif target and command and command[1] in ("build", "bundle") and target[1] not in exported:
                missing.append(f"{name_of(page)}: {line}")
    assert not missing, missing


@pytest.mark.parametrize("page", alike(page for page in PAGES if blocks(page, "python")))
def test_the_python_of_a_page_runs(at_hand, page, monkeypatch):
    monkeypatch.setitem(sys.modules, "page", ModuleType("page"))  # dataclasses look their module up
    module = torch.nn.Conv2d(3, 2, 1).eval()
    if "a.onnx" in page.read_text():
        two_graphs(module)
    known = {"__name__": "page", "module": module}
    monkeypatch.syspath_prepend(Path.cwd())
    for block in blocks(page, "python"):
        if first := re.match(r"# (\w+)\.py\n", block):  # a later block may import it
            Path(f"{first[1]}.py").write_text(block)
            monkeypatch.delitem(sys.modules, first[1], raising=False)
        exec(compile(block, name_of(page), "exec"), known)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", there.read_text(), flags=re.M)
            heads = [re.sub(r"[^\w -]", "", title.lower()).strip() for title in titles]
            assert anchor in [head.replace(" ", "-") for head in heads], target


def test_the_toml_of_pages_is_what_it_says():
    (text,) = blocks(DOCS / "how-to" / "ci.md", "toml")
    Path("page.toml").write_text(text)
    found, lines = read_recipe(Path("page.toml"))
    assert found.export.precisions == ("fp32", "int8")
    assert found.bench.max_regression == 0.05
    assert lines["verify", "inputs"] > lines["verify",] > lines["set", "num_heads"]
    board, forms = blocks(DOCS / "how-to" / "own-target.md", "toml")
    Path("my-orin.toml").write_text(board)
    assert from_file(Path("my-orin.toml")).runtime == "tensorrt"
    Path("my-x86.toml").write_text(forms)
    assert from_file(Path("my-x86.toml")).forms["default@amx"] == ("read-tokens",)


def test_the_method_of_the_page_holds_the_contract(tmp_path, monkeypatch):
    """The whole plug-in of docs/how-to/own-method.md, installed as a package is: its module and its entry points."""
    page = DOCS / "how-to" / "own-method.md"
    (module, *_), (points,) = blocks(page, "python"), blocks(page, "toml")
    as_installed("toy_plugin", module, points, tmp_path, monkeypatch)
    check_method("toy", "small", tmp_path)
    sys.modules.pop("toy_plugin")


def as_installed(name: str, module: str, points: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in of a page as pip installs it: its module and its entry points."""
    site = folder / "site"
    (site / f"{name}-1.0.dist-info").mkdir(parents=True)
    (site / f"{name}.py").write_text(module)
    groups = re.sub(r'project\.entry-points\."([\w.]+)"', r"\1", points).replace('"', "")
    (site / f"{name}-1.0.dist-info" / "entry_points.txt").write_text(groups)
    (site / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.filterwarnings("ignore")  # of torch.onnx.export
def test_the_rewrite_of_the_page_is_found_and_passes_the_test_of_the_page(tmp_path, monkeypatch, repaconv):
    page = DOCS / "how-to" / "own-rewrite.md"
    (module, test), (points, target) = blocks(page, "python"), blocks(page, "toml")
    as_installed("square_plugin", module, points, tmp_path, monkeypatch)
    known: dict = {"SQUARE_AS_MUL": plugins.load(plugins.REWRITES, "square-as-mul")}
    exec(test, known)
    known["test_a_square_is_a_product"](tmp_path)
    Path("my-x86.toml").write_text(target)
    assert repaconv("fold", tmp_path / "before.onnx", "--no-measure", "-o", "run")[0] == 0
    code, out, _ = repaconv("export", "run", "--target", "./my-x86.toml")
    assert (code, "square-as-mul" in out, "1 change" in out) == (0, True, True), out
    for exponent, inputs in ((2.0, ["x", "e"]), (3.0, ["x"]), ([[2.0]], ["x"])):  # the first may be given another one
        shapes = {"x": [3], "e": np.shape(exponent)}
        ports = [onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]) for name in inputs]
        out = [onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
        held = [onnx.numpy_helper.from_array(np.float32(exponent), "e")]
        power = onnx.helper.make_graph([onnx.helper.make_node("Pow", ["x", "e"], ["y"])], "power", ports, out, held)
        assert rewritten(onnx.helper.make_model(power), [known["SQUARE_AS_MUL"]])[1] == []
    sys.modules.pop("square_plugin")


def test_the_readme_is_one_screen_and_a_bit():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import _reference

    yield _reference
    del sys.modules["_reference"]


def test_the_reference_has_every_command_key_and_code(reference):
    from typer.main import get_command

    from repaconv.cli.main import app

    pages = reference.pages()
    for name, command in get_command(app).commands.items():
        assert f"\n## {name}\n" in pages["reference/cli.md"]
        for option in command.params:
            listed = option.param_type_name == "option" and not option.hidden
            assert not listed or f"`{', '.join(option.opts)}" in pages["reference/cli.md"]
    for code in ("checkpoint.missing", "fold.not-verified"):  # the second by the constructor of a class of its own
        assert f"| `{code}` | 4 |" in pages["reference/codes.md"]
    for code, what in (  # by the default of an argument, by an argument, and by a name that is assigned to
        ("artefact.unreadable", "Run the command that writes it again."),
        ("baseline.unreadable", "Restore it, or give another path with --baseline"),
        ("arch.weights", "Name the architecture that was trained"),
    ):
        assert re.search(rf"\| `{code}` \| 4 \| [^|\n]* \| {re.escape(what)}", pages["reference/codes.md"])
    happened = "... is not a run folder: it has no fold.json. | Fold it first: repaconv fold ... |"
    assert f"| `run.none` | 2 | {happened}" in pages["reference/codes.md"]
    assert not re.search(r"^\| `[^|]*\| \d \| *\|", pages["reference/codes.md"], re.MULTILINE)  # what happened
    assert all(f" | {sentence} | " in pages["reference/codes.md"] for sentence in reference.COMPOSED.values())
    assert "`max_regression` | number | Largest latency increase" in pages["reference/recipe.md"]
    assert json.loads(pages["reference/recipe.schema.json"]) == schema()
    assert "update_baseline" not in pages["reference/recipe.schema.json"]


def test_the_table_of_results_has_every_command_that_prints_json(reference):
    from typer.main import get_command

    from repaconv.cli.main import app

    table = reference.results().partition("| Result | Where |")[2].partition("\n## ")[0].lower()
    printing = {
        name
        for name, command in get_command(app).commands.items()
        if any("--format" in each.opts for each in command.params)
    }
    assert {"doctor", "targets", "fold"} <= printing
    assert not {name for name in printing if name not in table}


def test_the_page_of_python_names_every_option_that_is_no_argument_of_that_name(reference):
    from typer.main import get_command

    import repaconv
    from repaconv.cli.main import app

    table = reference.python().partition("| Option | Argument |")[2].partition("\n\n")[0]
    of_the_terminal = {"quiet", "verbose", "format"}
    elsewhere = {"estimate", "objective", "streams"}  # of bench: functions of their own, named above the table
    for name, command in get_command(app).commands.items():
        if (name_in_python := name.replace("-", "_")) not in repaconv.__all__:
            continue
        function = getattr(repaconv, name_in_python)
        options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
        spelled = {option[2:].replace("-", "_") for each in options for option in each.opts if option[:2] == "--"}
        lacking = spelled - inspect.signature(function).parameters.keys() - of_the_terminal - elsewhere
        assert not {
            option for option in lacking if f"--{option.replace('_', '-')}".partition("tls-")[0] not in table
        }, name


def test_no_record_describes_a_key_that_it_does_not_have(reference):
    for name, record in reference._records().items():
        described = reference.meanings(record)
        assert described.keys() <= record.model_fields.keys(), name
        assert all(re.fullmatch(r"\w+", key) and text.endswith(".") for key, text in described.items()), name


def test_every_key_of_a_result_has_a_meaning(reference):
    lacking = [
        f"{name}.{key}"
        for name, record in reference._records().items()
        for key, field in record.model_fields.items()
        if not field.exclude and not (field.description or reference.meanings(record).get(key))
    ]
    assert not lacking


def test_the_reference_in_the_checkout_follows_from_the_code(reference):
    for path, text in reference.pages().items():
        assert (DOCS / path).read_text() == text, f"{path}: python docs/_reference.py writes it"


def test_the_navigation_names_every_page_once():
    def pages(entry) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    text = (ROOT / "mkdocs.yml").read_text()
    listed = pages(yaml.safe_load(text[text.index("\nnav:") : text.index("\nexclude_docs:")])["nav"])
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_start_page_leads_to_every_page_in_two_steps():
    def linked(page: Path) -> set[Path]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        return {(page.parent / path).resolve() for path in re.findall(r"\]\(([^)#:]+\.md)", text)}

    lists = {DOCS / "index.md", DOCS / "how-to" / "index.md", DOCS / "methods" / "index.md"}
    assert lists - {DOCS / "index.md"} <= linked(DOCS / "index.md")
    assert set(DOCS.rglob("*.md")) - {DOCS / "index.md"} <= set[Path]().union(*map(linked, lists))


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("mkdocs"), reason="the documentation's builder is absent: make docs installs it")
@pytest.mark.filterwarnings("ignore")
def test_the_site_builds_without_a_warning(tmp_path):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True))
    assert (tmp_path / "site" / "reference" / "cli" / "index.html").is_file()
