"""A file is read and hashed once per command, and again if it has changed."""

from __future__ import annotations

import os

from repaconv.core import files
from repaconv.core.files import once_per_content, sha256_of, sha256_of_bytes


def test_an_unchanged_file_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "TIME_STEP_NS", -1)
    path, read = tmp_path / "weights", []
    text_of = once_per_content(lambda path: read.append(path) or path.read_text())
    path.write_text("a")
    assert [text_of(path), text_of(path), len(read)] == ["a", "a", 1]
    path.write_text("bb")
    assert [text_of(path), text_of(path), len(read)] == ["bb", "bb", 2]
    other = tmp_path / "other"
    other.write_text("cc")
    other.replace(path)  # of the same length, in its place
    assert text_of(path) == "cc"


def test_a_file_that_changes_within_a_step_of_its_times_is_read_again(tmp_path):
    path = tmp_path / "weights"
    for content in (b"a", b"b", b"c"):
        path.write_bytes(content)
        os.utime(path, ns=(0, 0))
        assert sha256_of(path) == sha256_of_bytes(content)
