"""Part of what `make torture` runs, and a test for each fault that it found."""

from __future__ import annotations

import gc
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torture import (
    checkpoints,
    code_mutants,
    containers,
    crafted_arrays_and_messages,
    damaged_artefacts,
    fold_mutants,
    graphs,
    mutation_operators,
    mutation_test_networks,
    pickles,
    result_page,
    terminal_escape_records,
)  # fmt: skip
from torture.child_process import in_a_child
from torture.containers import in_legacy, in_zip
from torture.sandbox import Case, outcomes
from torture.small_checkpoints import net

import repaconv as rc
from repaconv.checkpoints import read_checkpoint
from repaconv.cli import text_and_json_output
from repaconv.core import plugins, terminal
from repaconv.core.errors import Refused, RepaconvError
from repaconv.core.files import sha256_of, sha256_of_bytes
from repaconv.core.run_folder import Run, fold_of
from repaconv.distributed.benchmark_jobs import Job, Model, run_job, target_definition
from repaconv.engines import crash_guard
from repaconv.graph.element_type_conversion import to_float64
from repaconv.graph.models_in_onnx_ir import rewritten
from repaconv.sources.named_architectures import of_folder
from repaconv.stages.bench.options import BenchOptions
from repaconv.stages.bundle.collect import evaluated_result
from repaconv.stages.inspect.stage import inspect_file
from repaconv.stages.shared.target_lookup import load_target
from repaconv.verification.float64_graphs import Float64
from repaconv.verification.input_batches import npz_inputs


def faults(cases, folder):
    """What did not end as it may, of cases that are read as `make torture` reads them."""
    ended = list(outcomes(list(cases), folder))
    assert ended
    return [outcome for outcome in ended if outcome.fault]


def test_hostile_pickles_run_nothing_and_end_in_a_sentence(tmp_path):
    dear = ("200,000", "hundred thousand", "million", "in each other")
    cases = [case for case in checkpoints.hostile() if not any(word in case.name for word in dear)]
    assert not faults(cases[::12], tmp_path)


def test_modules_that_were_saved_whole_run_nothing_and_end_in_a_sentence(tmp_path):
    cases = [case for case in checkpoints.hostile() if case.name.startswith("zip: a module")]
    assert len(cases) > 50
    assert not faults(cases[::3], tmp_path)


def test_strange_containers_end_in_a_sentence_or_in_the_same_weights(tmp_path):
    assert not faults(list(checkpoints.strange())[::20], tmp_path)


def test_damaged_checkpoints_and_weights_of_no_network_end_in_a_sentence(tmp_path):
    assert not faults([*checkpoints.damaged(15, 3), *checkpoints.other_weights(10, 3)], tmp_path)


def test_hostile_and_damaged_graphs_end_in_a_sentence(tmp_path):
    dear = ("giant", "thousand", "calls")
    cases = [case for case in graphs.hostile() if not any(word in case.name for word in dear)]
    assert not faults([*cases[::9], *graphs.damaged(8, 3)], tmp_path)


def test_damaged_texts_arrays_and_images_end_in_a_sentence(tmp_path):
    assert not faults([case for case in damaged_artefacts.texts(60, 3) if case.kind != "boards' results"], tmp_path)


def test_the_page_is_of_its_result():
    found = json.loads(result_page.RESULT.read_text())
    assert result_page.PAGE.read_text() == result_page.written(found)
    assert not found["faults"]


def test_a_child_leaves_alone_what_its_parent_dropped(tmp_path):
    """Collected in a child, a session would wait for ever for the threads of its parent."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    dropped: list[object] = [onnxruntime.InferenceSession(graphs.tokens().SerializeToString(), options)]
    dropped.append(dropped)
    time.sleep(0.2)  # its thread sleeps by now, and is waited for
    gc.disable()
    try:
        del dropped
        collecting = Case("", "", lambda place: place, lambda _: ("sound", gc.collect())[0])
        assert not faults([collecting], tmp_path)
    finally:
        gc.enable()


def test_a_child_has_its_time_of_the_cpu_however_busy_the_cpu_is():
    def busy() -> None:
        while True:
            pass

    def waits() -> str:
        time.sleep(1.5)
        return "done"

    assert in_a_child(waits, 1) == "done"
    assert in_a_child(busy, 0.2) == "!signal 27"
    assert in_a_child(partial(time.sleep, 600), 0.02) == "!signal 14"


# --- faults that were found --------------------------------------------------------------------------------


def with_(folder, value: bytes, put=in_zip):
    """A checkpoint of one weight, and beside it the pickle of something else."""
    model = pickles.text("model") + b"}" + pickles.text("a.weight") + pickles.SOUND + b"s"
    return put(folder / "c.pth", pickles.P + b"}(" + model + pickles.text("x") + value + b"u.")


@pytest.mark.parametrize("put", [in_zip, in_legacy])
@pytest.mark.parametrize(
    ("family", "message"),
    [
        (pickles.alterations, "BUILD on a tensor"),
        (pickles.bombs, "a bytearray by its length"),
        (pickles.tensors, "ten billion by a stride of 0"),
    ],
)
def test_a_pickle_alters_no_tensor_and_takes_no_more_than_its_file(tmp_path, put, family, message):
    with pytest.raises(Refused, match="the pickle in the file is corrupt"):
        read_checkpoint(with_(tmp_path, dict(family())[message], put))


def test_a_pickle_does_not_alter_what_a_dict_does(tmp_path):
    value = dict(pickles.alterations())["BUILD on a dict's methods, odd"]
    assert read_checkpoint(with_(tmp_path, value)).record == {"x": {}}


@pytest.mark.parametrize("message", ["deep tuples", "a billion laughs"])
def test_a_key_that_is_hashed_without_end_or_too_deep_is_refused(tmp_path, message):
    path = in_zip(tmp_path / "c.pth", pickles.under(dict(pickles.keys())[message]))
    with pytest.raises(Refused, match="a tuple of more than"):
        read_checkpoint(path)


def test_what_holds_itself_many_times_over_is_read_once(tmp_path):
    bombs = dict(pickles.bombs())
    for label in ("lists of two thousand in each other", "dicts of 300 in each other"):
        assert read_checkpoint(with_(tmp_path, bombs[label])).tensors.keys() == {"a.weight"}


def test_an_object_without_state_is_an_empty_record(tmp_path):
    """Python pickles an empty argparse.Namespace so."""
    namespace = pickles.name("argparse", "Namespace") + b")\x81"
    assert read_checkpoint(with_(tmp_path, namespace)).record == {"x": None}


def test_names_of_a_file_cannot_break_a_sentence(tmp_path):
    torch.save({**net("riformer").weights, "a\nb\x1b[2J" + "x" * 100_000: torch.ones(1)}, tmp_path / "c.pth")
    with pytest.raises(Refused) as caught:
        rc.fold(tmp_path / "c.pth", out=tmp_path / "run")
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("kind", list(terminal_escape_records.shown()), ids=lambda kind: kind.__name__)
def test_names_of_a_file_are_letters_on_a_terminal(capsys, kind):
    """``[/x]`` ended in a traceback, and escapes reached the terminal."""
    text_and_json_output.print_result(terminal_escape_records.hostile(kind))
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "[/x]" in said
    assert ":bug:" in said


def test_progress_text_is_printed_without_control_characters(capsys):
    terminal.print_message(terminal_escape_records.HOSTILE)
    with text_and_json_output.progress(quiet=False) as raised:
        raised(terminal_escape_records.HOSTILE, 0, 0)
    assert capsys.readouterr().err.count("[/x]\\x1b[2J :bug:") == 2


@pytest.mark.parametrize(
    ("family", "message", "code"),
    [
        (graphs.external, "weights in '/etc/passwd'", "onnx.external"),
        (graphs.knots, "one output twice", "onnx.invalid"),
    ],
)
def test_a_graph_of_which_times_are_estimated_is_sound(tmp_path, family, message, code):
    (tmp_path / "c.onnx").write_bytes(dict(family())[message].SerializeToString())
    with pytest.raises(Refused) as caught:
        rc.estimate(tmp_path / "c.onnx", target="orin-nano", image_size=8)
    assert caught.value.code == code


def _far(key: str) -> str:
    before, _, behind = key.rpartition(".0.") if "network" in key else key.partition(".0.")
    return f"{before}.1000000000000.{behind}"


@pytest.mark.parametrize("name", ["riformer", "repvgg", "mobileone"])
def test_a_block_whose_number_is_immense_is_no_count(tmp_path, name):
    network = net(name)
    key = next(key for key in network.weights if "network.0.0." in key or "stage1.0." in key)
    weights = {**network.weights, _far(key): network.weights[key]}
    torch.save({**network.whole, "state_dict": weights}, tmp_path / "c.pth")
    with pytest.raises(Refused, match="are numbered 0") as caught:
        rc.fold(tmp_path / "c.pth", out=tmp_path / "run", settings=network.settings)
    assert caught.value.code == "checkpoint.missing-keys"


def test_a_graphs_functions_reach_outside_its_folder_no_more_than_the_graph(tmp_path):
    hidden = dict(graphs.external())["weights outside, in a function"]
    (tmp_path / "c.onnx").write_bytes(hidden.SerializeToString())
    with pytest.raises(Refused, match="outside its folder"):
        rc.fold(tmp_path / "c.onnx", out=tmp_path / "run")


@pytest.mark.parametrize(
    ("family", "message", "code"),
    [
        (graphs.knots, f"a loop of {1 << 62:,} turns", "onnx.endless"),
        (graphs.knots, "no input", "onnx.invalid"),
        (graphs.oddities, "an input of type 99", "onnx.invalid"),
        (graphs.external, "weights in 'a\\x00b'", "onnx.external"),
    ],
)
def test_a_graph_that_cannot_be_run_is_refused_before_it_is(tmp_path, family, message, code):
    (tmp_path / "c.onnx").write_bytes(dict(family())[message].SerializeToString())
    with pytest.raises(Refused) as caught:
        rc.fold(tmp_path / "c.onnx", out=tmp_path / "run")
    assert caught.value.code == code


def test_json_that_is_nested_too_deep_or_no_table_is_refused(tmp_path):
    for content in ("[" * 100_000, "7"):
        (tmp_path / "fold.json").write_text(content)
        with pytest.raises(Refused):
            fold_of(Run(tmp_path))
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(Refused, match=r"no readable config\.json"):
            of_folder(tmp_path)


def test_arrays_of_another_version_of_zip_are_refused(tmp_path):
    content = bytearray(damaged_artefacts._npz())
    content[content.rindex(b"PK\1\2") + 6] = 255
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(Refused, match="not a readable"):
        npz_inputs(tmp_path / "a.npz", 3, 5)


def test_tensors_that_no_net_has_under_a_methods_names_are_refused(tmp_path):
    network = net("riformer")
    torch.save(
        {**network.whole, "state_dict": {**network.weights, "network.1.proj.weight": torch.ones(3)}}, tmp_path / "c.pth"
    )
    with pytest.raises(Refused):
        rc.fold(tmp_path / "c.pth", out=tmp_path / "run", settings=network.settings)


@pytest.mark.parametrize(
    "message", ["memory itself", "a pipe, .pth", "a file without an end", "a name too long", "a name with a zero"]
)
def test_what_cannot_be_read_or_never_ends_is_refused_before_it_is_hashed(tmp_path, message):
    path = dict(containers.places(b""))[message](tmp_path)
    with pytest.raises(Refused):
        rc.fold(path, out=tmp_path / "run")
    with pytest.raises(Refused):
        rc.inspect(path)


def test_a_file_that_is_pinned_is_read_only_with_that_hash(tmp_path):
    network = net("riformer")
    torch.save(network.whole, tmp_path / "c.pth")
    (tmp_path / "c.onnx").write_bytes(graphs.convolution().SerializeToString())
    for path in (tmp_path / "c.pth", tmp_path / "c.onnx"):
        own = sha256_of(path)
        for wanted, code in (("0" * 64, "file.sha256"), ("abc", "usage.sha256")):
            for refused in (inspect_file if path.suffix == ".onnx" else rc.inspect, rc.fold):
                with pytest.raises(RepaconvError) as caught:
                    refused(path, sha256=wanted)
                assert caught.value.code == code
        folded = rc.fold(
            path, out=tmp_path / path.suffix, settings=network.settings if "pth" in path.name else None, sha256=own
        )
        assert folded.origin.sha256 == own
        assert f"--sha256 {own}" in " ".join(folded.options)


def test_a_picture_is_no_program_whatever_it_is_called(tmp_path):
    """Pillow hands PostScript to Ghostscript."""
    content = dict(crafted_arrays_and_messages.images())["PostScript"]
    read = partial(damaged_artefacts.outcome_of_read, read=damaged_artefacts.images)
    assert not faults(
        [Case("images", "PostScript", partial(crafted_arrays_and_messages.put, "i.png", content), read)], tmp_path
    )


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("a zip of texts", "inputs.unreadable"),
        ("images of NaN", "inputs.not-finite"),
        ("an output of infinity", "inputs.not-finite"),
    ],
)
def test_arrays_that_say_nothing_are_refused(tmp_path, message, code):
    (tmp_path / "a.npz").write_bytes(
        next(content for name, content in crafted_arrays_and_messages.arrays() if name == message)
    )
    with pytest.raises(Refused) as caught:
        npz_inputs(tmp_path / "a.npz", 3, 5)
    assert caught.value.code == code


def test_what_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("repaconv.stages.bundle.collect.MOST_UNPACKED_BYTES", 1 << 20)
    (tmp_path / "r.tar.gz").write_bytes(gzip.compress(bytes(1 << 21)))
    with pytest.raises(Refused, match="unpacks to more than 1 MiB"):
        evaluated_result(tmp_path / "r.tar.gz", None, None)
    monkeypatch.setattr("repaconv.verification.input_batches.MOST_UNPACKED_BYTES", 1 << 20)
    np.savez_compressed(tmp_path / "a.npz", input=np.zeros((1, 3, 512, 512), np.float32))
    with pytest.raises(Refused, match="claims to unpack to"):
        npz_inputs(tmp_path / "a.npz", 3, 5)


@pytest.mark.parametrize("change", ["bool", "negative", "float64", "beyond"])
def test_pairs_of_tokens_without_a_row_are_refused(tmp_path, change):
    network = net("repavit-swin")
    key = next(key for key in network.weights if key.endswith("relative_position_index"))
    index = network.weights[key]
    changed = {"bool": index.bool(), "float64": index.double(), "negative": -index, "beyond": index + 9}
    weights = {**network.weights, key: changed[change]}
    torch.save({**network.whole, "state_dict": weights}, tmp_path / "c.pth")
    with pytest.raises(Refused) as caught:
        rc.fold(tmp_path / "c.pth", out=tmp_path / "run", settings=network.settings)
    assert caught.value.code in ("checkpoint.dtype", "checkpoint.index")


def test_a_job_says_what_is_measured_and_nothing_of_this_machine(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "repaconv.distributed.benchmark_jobs.bench_by", lambda order, *_, **__: asked.append(order) or 1 / 0
    )
    content = graphs.tokens().SerializeToString()
    sha256 = sha256_of_bytes(content)
    job = Job.of(target_definition("x86-64"), (Model(name="m", sha256=sha256),), BenchOptions(batch=1)).model_dump(
        mode="json"
    )
    elsewhere = [{"name": "m", "sha256": "../x"}]
    for wrong in ({**job, "models": []}, {**job, "target": {}}, {**job, "models": elsewhere}, {}):
        with pytest.raises(Refused) as caught:
            run_job(wrong, {sha256: content})
        assert caught.value.code == "remote.job"
    with pytest.raises(Refused, match="changed in transit"):
        run_job(job, {})
    with pytest.raises(ZeroDivisionError):
        run_job({**job, "options": {**job["options"], "out": "/etc/x", "baseline": "/etc/y"}}, {sha256: content})
    assert (asked[0].out, asked[0].baseline) == (None, None)


def test_only_the_guard_of_native_code_starts_a_process_unheard(tmp_path):
    """A graph that reaches a runtime is first tried by it in a process of its own; no other may be started."""

    def made(place):
        return shutil.copy(__file__, place)

    def guarded(_):
        crash_guard.attempt(os.getcwd)
        return "sound"

    def other(_):
        subprocess.run(["true"], check=True)
        return "sound"

    ended = [outcome.ended for outcome in outcomes([Case("", "", made, guarded), Case("", "", made, other)], tmp_path)]
    assert ended == ["sound", "executed"]


def test_mistakes_are_planted_into_every_folder_that_folds():
    files = {path.relative_to(fold_mutants.PACKAGE).parts[0] for path in fold_mutants.sources()}
    assert files == {"algebra", "graph", "methods", "onnx_export", "rewrites"}
    assert all(any(folder in rooms for rooms in result_page.MODULE_GROUPS.values()) for folder in files)


OPERATORS = {
    "f(a, b)": {(mutation_operators.SWAPPED, "f(b, a)")},
    "a if b else c": {(mutation_operators.NEGATED, "a if not b else c")},
    "[x for x in y if not x]": {
        (mutation_operators.NEGATED, " for x in y if x"),
        (mutation_operators.DROPPED, " for x in y"),
    },
    "a and b": {
        (mutation_operators.NEGATED, "a or b"),
        *((mutation_operators.DROPPED, left) for left in "ab"),
    },
    "x[i:]": {(mutation_operators.OFF_BY_ONE, "i + 1:")},
    "range(n)": {(mutation_operators.OFF_BY_ONE, "range(n + 1)")},
    "a - b": {(mutation_operators.DROPPED, "a"), (mutation_operators.DROPPED, "-b")},
    "f(x, key=y)": {(mutation_operators.DROPPED, "f(x)")},
    "(a, b)": {(mutation_operators.DROPPED, "(a,)"), (mutation_operators.DROPPED, "(b,)")},
}


@pytest.mark.parametrize("code", OPERATORS)
def test_operators_of_mutants_change_what_they_say(code, tmp_path):
    (path := tmp_path / "a.py").write_text(
        f"def g(default=3):\n    y = {code}\n    if y:\n        return y\n    y.x = 1\n"
    )
    found = mutation_operators.changes_of(path)
    changed = {(change.operator, change.becomes) for change in found}
    assert changed >= OPERATORS[code] | {(mutation_operators.OFF_BY_ONE, "4"), (mutation_operators.OFF_BY_ONE, "2")}
    assert [change.becomes for change in found].count("pass") == 2  # the early exit and the assignment
    own = compile(path.read_text(), str(path), "exec")
    made = [mutation_operators.changed(path, change.number) for change in found]
    assert all(code.co_filename == str(path) and code.co_consts != own.co_consts for code in made)


@pytest.mark.parametrize("group", code_mutants.MODULE_GROUPS)
def test_every_change_of_a_folder_is_code(group):
    path = max(code_mutants.sources(group), key=lambda path: path.stat().st_size)
    found = mutation_operators.changes_of(path)
    assert {change.operator for change in found} == set(mutation_operators.OPERATORS)
    for change in found[:: max(len(found) // 8, 1)]:
        mutation_operators.changed(path, change.number)


def square() -> onnx.ModelProto:
    """Two layers of one size: a wrong product of them is a graph that runs."""
    nodes = [onnx.helper.make_node("MatMul", ["input", "w"], ["a"]), onnx.helper.make_node("MatMul", ["a", "v"], ["y"])]
    weights = [graphs.weight("w", 4, 4), graphs.weight("v", 4, 4, seed=1)]
    return graphs.model(nodes, weights, [graphs.value("input", "batch", 4)], [graphs.value("y", "batch", 4)])


def test_a_network_that_runs_on_too_few_inputs_is_named_on_the_page(tmp_path, monkeypatch):
    def fixed() -> onnx.ModelProto:
        node = onnx.helper.make_node("Reshape", ["input", "shape"], ["y"])
        shape = onnx.numpy_helper.from_array(np.array([2, 4]), "shape")
        return graphs.model([node], [shape], [graphs.value("input", "batch", 4)], [graphs.value("y", 2, 4)])

    monkeypatch.setattr(mutation_test_networks, "_graphs", lambda: iter([("fixed", fixed)]))
    monkeypatch.setattr(mutation_test_networks, "_modules", lambda: iter(()))
    monkeypatch.setattr(mutation_test_networks, "METHODS", ())
    for _ in range(2):  # also where it was tried before
        known, left_out = code_mutants.prepared(tmp_path)
        assert (known, left_out) == ({}, {"fixed": "runs on few random inputs"})
    found = json.loads(result_page.CODE_MUTANTS.read_text())
    assert "left out: fixed (runs on few random inputs)." in result_page.code_mutants({**found, "left_out": left_out})


TRIED = """
from torture import code_mutants, mutation_operators
path = code_mutants.PACKAGE / "algebra/channel_maps.py"
changes = [c for c in mutation_operators.changes_of(path) if c.was == "second.matrix @ first.matrix"]
mutation_operators.plant(path, next(c.number for c in changes if c.becomes == "second.matrix"))
import repaconv
repaconv.fold("net.onnx", out="run", measure=False)
"""


def test_a_mutant_is_found_by_the_verification_of_every_user(tmp_path):
    onnx.save(square(), tmp_path / "net.onnx")
    paths = os.pathsep.join(map(str, (code_mutants.PACKAGE.parent, Path(__file__).parent)))
    ran = subprocess.run(
        [sys.executable, "-c", TRIED],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        text=True,
        capture_output=True,
    )
    assert "GateFailed: the folded graph does not compute what net.onnx does" in ran.stderr
    assert not (tmp_path / "run" / "fold.json").exists()


def test_mutants_are_tried_with_every_rewrite(tmp_path):
    (path := tmp_path / "all.toml").write_text(mutation_test_networks.target())
    names = load_target(str(path)).forms["default"]
    assert {name for name in plugins.registered(plugins.REWRITES) if not name.endswith("-16")} == set(names)
    rewrites = [plugins.load(plugins.REWRITES, name) for name in names]
    large = rewritten(mutation_test_networks.convolutions(*mutation_test_networks.KERNELS["winograd"]), rewrites)[1]
    assert "winograd" in {change.rewrite for change in large}
    model = to_float64(mutation_test_networks.convolutions(*mutation_test_networks.KERNELS["slow kernels"]))
    after, changes = rewritten(model, rewrites)
    assert {change.rewrite for change in changes} >= {
        "lrn-as-conv", "resize-as-matmul", "softmax-as-quotient", "mish-as-quotient", "prelu-as-sum",
        "silu-as-quotient", "concat-parts",
    }  # fmt: skip
    image = {"x": np.random.default_rng(0).standard_normal((2, 3, 16, 16))}
    for right, found in zip(Float64(model).run(image).values(), Float64(after).run(image).values(), strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-11 * np.abs(right).max())


def test_a_network_that_an_interrupted_run_left_half_made_is_made_again(tmp_path):
    (at := tmp_path / "square").mkdir()
    (at / "net.onnx").write_bytes(b"half")
    make = partial(mutation_test_networks._made_graph, make=square)
    assert mutation_test_networks._tried(at, make) == {}
    assert (at / "known.pt").is_file()
    made = (at / "net.onnx").stat().st_mtime_ns
    assert mutation_test_networks._tried(at, make) == {}
    assert (at / "net.onnx").stat().st_mtime_ns == made


def test_what_a_mutant_wrote_is_held_against_the_network(tmp_path):
    """A graph that is off by more than rounding is told from one that is not, whatever its fold said."""
    model = square()
    (at := tmp_path / "written" / "run").mkdir(parents=True)
    onnx.save(model, tmp_path / "net.onnx")
    torch.save(list(mutation_test_networks.runnable(model, "square")), tmp_path / "known.pt")
    weights = onnx.numpy_helper.to_array(model.graph.initializer[1]).copy()
    shares = []
    for by in (1, 1 + 1e-3):
        model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array((weights * by).astype("float32"), "v"))
        onnx.save(model, at / "net.folded.onnx")
        shares.append(mutation_test_networks.wrong(tmp_path, at.parent)[1])
    assert shares[0] < 0.25 < 1 < shares[1]
