"""The wheel alone, in an empty environment, far from the repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_is_small_and_runs_pocket_by_itself(tmp_path: Path) -> None:
    environment = {**os.environ, "GITHUB_REPOSITORY": "owner/name", "GITHUB_SHA": "abc"}

    def run(*command: object) -> str:
        texts = [str(part) for part in command]
        done = subprocess.run(
            texts, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    photo = ROOT / "src" / "coda_prompt" / "assets" / "photo-vit.safetensors"
    assert wheel.stat().st_size < (57e6 if photo.exists() else 12e6)
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assets = ["pocket-drawings.npz", "pocket-vit.safetensors", "LICENSE-quickdraw.md"]
    for asset in [*assets, *([photo.name] if photo.exists() else [])]:
        assert f"coda_prompt/assets/{asset}" in names
    (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    metadata = archive.read(path).decode()
    assert "Project-URL: Source, https://github.com/owner/name\n" in metadata
    assert "(https://raw.githubusercontent.com/owner/name/abc/docs/images/page.png)" in metadata
    assert "(https://github.com/owner/name/blob/abc/docs/guide/your-own-images.md)" in metadata
    assert not re.findall(r"\]\((?!https://).*?\)", metadata), "PyPI shows no relative links"

    run(sys.executable, "-m", "venv", tmp_path / "empty")
    python = tmp_path / "empty" / "bin" / "python"
    constraints = ("--constraint", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", *constraints, "torch")
    run(python, "-m", "pip", "install", "--quiet", *constraints, wheel)
    printed = run(
        python.with_name("coda"), "bench", "pocket", "--methods", "coda-p", "--trials", "1",
        "--set", "training.epochs=1", "--json",
    )  # fmt: skip
    (row,) = json.loads(printed)["rows"]
    assert row["method"] == "coda-p"
    assert row["A_N"]["mean"] > 10
