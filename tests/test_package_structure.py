"""The structure of the package: allowed imports, and heavy packages that are imported only when needed."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys

import package_structure

from repaconv.cli import command_options, main  # noqa: F401  (main registers the commands)


def test_packages_form_levels():
    assert len(package_structure.packages()) > 15
    assert package_structure.cycles(package_structure.packages()) == []


def test_no_file_imports_itself_by_way_of_others():
    assert (
        package_structure.cycles({name: package_structure.imports(name) for name in package_structure.modules()}) == []
    )


def test_a_cycle_would_be_found():
    graph = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a"), "d": frozenset("a")}
    assert package_structure.cycles(graph) == [["a", "b", "c"]]


def test_every_module_says_what_it_is():
    for name, path in package_structure.modules().items():
        assert ast.get_docstring(ast.parse(path.read_text())), name


def test_the_table_of_packages_in_contributing_follows_from_the_imports():
    """`python tests/package_structure.py` writes it."""
    page = package_structure.PAGE.read_text()
    assert package_structure.BEGIN in page
    assert page == package_structure.written(page)


def test_benchmarks_and_other_scripts_import_only_names_that_exist():
    """A benchmark that runs once a month shows a renamed function only then, or leaves out what it should measure."""
    folders = ("benchmarks", "docs", "examples", "recipes", "docker")
    scripts = [path for folder in folders for path in sorted((package_structure.ROOT / folder).rglob("*.py"))]
    named = {
        (str(node.module), alias.name, str(path.relative_to(package_structure.ROOT)))
        for path in scripts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "repaconv"
        for alias in node.names
    }
    assert len(named) > 200
    missing = [
        f"{path}: from {module} import {name}"
        for module, name, path in sorted(named)
        if f"{module}.{name}" not in package_structure.modules()
        and not (module in package_structure.modules() and hasattr(importlib.import_module(module), name))
    ]
    assert not missing, missing


def test_help_of_a_script_is_its_docstring_and_does_nothing_else():
    """A script that reads no options takes `--help` for a run: it trains networks, or replaces a committed result."""
    benchmarks, tests = package_structure.ROOT / "benchmarks", package_structure.ROOT / "tests"
    by_hand = [
        tests / name for name in ("arm64_emulation.py", "docker_steps.py", "golden.py", "gpu_kit_bare_machine.py")
    ]
    scripts = {*benchmarks.rglob("*.py"), *(tests / "torture").glob("*.py"), *by_hand}
    started_by_scripts = {benchmarks / "gpu/steps.py", benchmarks / "competing_toolchains/nncf_process.py"}
    silent = [
        path.name
        for path in sorted(scripts - started_by_scripts - {benchmarks / "task_zoo.py"})  # which parses as zoo.py does
        if '\nif __name__ == "__main__":' in (text := path.read_text())
        and not re.search(
            r"ArgumentParser\([^)]*description=\w+, formatter_class=\S*RawDescriptionHelpFormatter\s*\)", text
        )
    ]
    assert len(scripts) > 80
    assert not silent, silent


def test_help_and_version_import_nothing_heavy():
    for arguments in (["--help"], ["--version"], ["fold", "--help"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "repaconv", *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0
        modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        loaded = {name.split(".")[0] for name in modules}
        assert "typer" in loaded
        assert "repaconv.results" not in modules  # pydantic builds a validator for each of a hundred records
        assert not loaded & {"torch", "onnx", "onnxruntime", "onnxsim", "numpy", "safetensors"}


def test_a_command_makes_the_parameters_of_no_other(repaconv, monkeypatch):
    """To make those of all commands takes a fifth of what `repaconv targets` does."""
    made = []
    real = command_options.with_typer_parameters
    monkeypatch.setattr(
        command_options, "with_typer_parameters", lambda written: made.append(written.__name__) or real(written)
    )
    for command in command_options.app.registered_commands:
        vars(command).pop("callback", None)  # as in a new process
    assert repaconv("targets")[0] == 0
    assert made == ["targets"]
    assert repaconv("--help")[0] == 0
    assert len(made) == len(command_options.app.registered_commands)


def test_importing_the_package_imports_nothing_heavy():
    code = "import repaconv, sys; print(sorted({'torch', 'onnx', 'typer', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_one_function_measures():
    """Session loads, ratios and verdicts are made in `benchmark.interleaved_protocol.measure` for all commands."""
    inside = {"ratio", "quality", "by_session_load", "state", "changes_between", "real_time_priority", "Burst"}
    measuring = set()
    for module, path in package_structure.modules().items():
        if package_structure.package_of(module) == "benchmark":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("repaconv.benchmark."):
                names = {alias.name for alias in node.names}
                assert not names & inside, (module, names & inside)
                if "measure" in names:
                    measuring.add(module.removeprefix("repaconv.stages."))
    assert measuring == {
        "bench.latency_measurement",
        "bench.throughput",
        "tune.speed_measurements",
        "convert.speed_target",
        "fold.speed_reverts",
    }
