"""Part of the golden records, all of which `make golden` compares, and the names of differences in the comparison."""

from __future__ import annotations

import copy
import re
import subprocess
import sys

import golden
import numpy as np
import pytest
from golden import GOLDEN, SECTIONS, differences, fingerprint, merged, recorded, shape_of


def test_a_slice_of_the_records_is_unchanged():
    """In a process of its own, which forks: this one has threads."""
    command = [sys.executable, golden.__file__, "--check", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(re.findall(r"(\w+): (\d+) differences", done.stdout))
    assert {*counts} == {*golden.FAST}, done.stdout


def test_the_records_are_complete_and_small():
    written = {path.stem for path in GOLDEN.glob("*.json")}
    assert written == {*SECTIONS, "about"}
    assert sum(path.stat().st_size for path in GOLDEN.glob("*.json")) < 400_000
    assert all(recorded(section) for section in SECTIONS)
    text = "".join(path.read_text() for path in GOLDEN.glob("*.json"))
    assert "broken" not in {key for section in SECTIONS for row in recorded(section).values() for key in row}
    assert "/tmp/" not in text


def test_a_tensor_changed_by_1e_4_is_named_and_rounding_is_not():
    tensor = np.random.default_rng(0).standard_normal((48, 192)).astype(np.float32)
    old = {"tensors": {"head.weight": fingerprint(tensor)}}
    rounded = np.nextafter(tensor, np.float32(np.inf), where=tensor > 0, out=tensor.copy())
    assert not list(differences(old, {"tensors": {"head.weight": fingerprint(rounded)}}, "net"))
    on_the_edge = [f"float32 64x64 0.0520276{digit} -10.0102{digit} 4.63" for digit in (4, 5)]
    assert golden.alike(*on_the_edge)
    scaled, one, moved = tensor * np.float32(1 + 1e-4), tensor.copy(), tensor[::-1]
    one.flat[7] += 1e-2
    for changed in (scaled, one, moved, tensor.T, tensor.astype(np.float64), -tensor):
        (row,) = differences(old, {"tensors": {"head.weight": fingerprint(changed)}}, "net")
        assert row.startswith("net > tensors > head.weight: ")


@pytest.mark.parametrize("section", ["shipped", "commands", "interface"])
def test_each_value_of_a_record_is_compared(section):
    """Every leaf in turn is another: each is named, once."""
    for name, record in list(recorded(section).items())[:2]:
        for path in leaves(record):
            changed = copy.deepcopy(record)
            at = changed
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = "another"
            assert len(list(differences(record, changed, name))) == 1, path


def leaves(value, path=()):
    if isinstance(value, (dict, list)) and value:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, (*path, key))
    elif path:
        yield path


def test_a_key_that_came_or_went_is_named():
    old = {"shape": shape_of({"links": [{"verdict": "passed", "note": None}, {"verdict": "failed", "note": "x"}]})}
    assert old["shape"] == {"links": [{"verdict": "text", "note": "null|text"}]}
    gone = {"shape": {"links": [{"note": "null|text"}]}}
    assert list(differences(old, gone)) == ['shape > links[0] > verdict: missing; recorded is "text"']
    assert list(differences(gone, old)) == ['shape > links[0] > verdict: not recorded; now "text"']
    loose = {"loose shape": {"links": [{"note": "null", "verdict": "text"}], "ratio": "null"}}
    assert not list(differences(loose, {"loose shape": {"links": [], "ratio": {"median": "number"}}}))
    assert list(differences(loose, {"loose shape": {"links": []}})) == [
        'loose shape > ratio: missing; recorded is "null"'
    ]
    assert merged([{"a": "null"}, {"b": "text"}]) == {"a": "null", "b": "text"}
