"""Slurm's log files: pages of whole lines, each once, by a real shell in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.errors import CloudtrainError
from cloudtrain.providers.slurm import Provider, logs


def test_each_line_of_each_file_comes_once_as_the_files_grow(tmp_path: Path) -> None:
    provider, native = Provider(), f"7:{tmp_path}"
    (tmp_path / "batch.log").write_text("slurm: started\n")
    (tmp_path / "node-0.log").write_text("one\ntwo\nhal")
    (tmp_path / "node-1.log").write_bytes(b"\xff from node 1\r\n")
    first = provider.logs(native)
    assert [(line.node, line.text) for line in first.lines] == [
        ("0", "one"), ("0", "two"), ("1", "\ufffd from node 1"), ("", "slurm: started"),
    ]  # fmt: skip
    assert not first.more
    with (tmp_path / "node-0.log").open("a") as file:
        file.write("f\n")
    second = provider.logs(native, first.cursor)
    assert [(line.node, line.text, line.id) for line in second.lines] == [("0", "half", "node-0.log:8")]
    assert provider.logs(native, second.cursor).lines == ()


def test_a_long_file_has_more_pages_and_a_long_line_comes_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "PAGE_BYTES", 8)
    (tmp_path / "node-0.log").write_text("ab\ncdefghijklmn\n")
    cursor, texts, pages = None, [], 0
    while True:
        page = Provider().logs(f"7:{tmp_path}", cursor)
        cursor, pages = page.cursor, pages + 1
        texts += [line.text for line in page.lines]
        if not page.more:
            break
    assert (texts, pages) == (["ab", "cdefghij", "klmn"], 3)


def test_a_folder_that_is_gone_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(CloudtrainError):
        Provider().logs(f"7:{tmp_path}/gone")
