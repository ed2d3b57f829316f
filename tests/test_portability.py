"""What macOS and Windows need: workers that are spawned, replaced files, processes without fork."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import numpy as np
import pytest
from scripts import ROOT

from coda_prompt.data.folders import folder_source
from coda_prompt.data.pocket import pocket_source
from coda_prompt.data.sources import Split
from coda_prompt.storage import files

POSIX_ONLY = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}


def test_modules_that_windows_lacks_are_imported_inside_functions_only() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not POSIX_ONLY & set(names), path


@pytest.mark.parametrize("kind", ["arrays", "folder"])
def test_splits_can_be_sent_to_spawned_workers(kind: str, drawing_folders: Path) -> None:
    arrays = kind == "arrays"
    source = pocket_source() if arrays else folder_source(drawing_folders / "task-1")
    split: Split = source.train
    copy = pickle.loads(pickle.dumps(split))
    assert np.array_equal(np.asarray(copy.image(3)), np.asarray(split.image(3)))


def test_a_file_that_is_being_read_is_replaced_when_the_reader_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace, refused = tmp_path / "model", Path.replace, []

    def replace_while_read(self: Path, target: Path) -> Path:
        if len(refused) < 2:
            refused.append(target)
            raise PermissionError(13, "in use")
        return replace(self, target)

    path.write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", replace_while_read)
    monkeypatch.setattr(files, "REPLACE_RETRIES", 5)
    files.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert len(refused) == 2
    assert list(tmp_path.iterdir()) == [path]
