"""What makes a release: workflows call targets, scripts and extras that exist; the wheel runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(path: Path) -> list[dict[str, Any]]:
    """Return the steps of all jobs of a workflow."""
    jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    for job in jobs.values():
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= set(jobs)
        if "uses" in job:
            assert (ROOT / job["uses"]).exists()
    return [step for job in jobs.values() for step in job.get("steps", [])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_calls_what_exists(path: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    extras = re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    found = steps(path)
    assert found
    for step in found:
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", step["uses"])
        command = step.get("run", "")
        for names in re.findall(r"\bmake ([a-z -]+)", command):
            assert set(names.split()) <= set(targets)
        for name in re.findall(r"\b(?:tools|tests|src)/[\w/.]+", command):
            assert (ROOT / name).exists(), name
        for names in re.findall(r"\.\[([a-z,]+)\]", command):
            assert set(names.split(",")) <= set(extras)


def test_release_publishes_the_package_that_ci_tested() -> None:
    ci, release = (
        yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf-8"))
        for name in ("ci", "release")
    )
    assert "workflow_call" in ci[True]  # YAML reads the key `on` as true
    assert release["jobs"]["ci"]["uses"].endswith("/ci.yml")
    assert set(release["jobs"]["publish"]["needs"]) == {"version", "ci"}
    upload, download = ci["jobs"]["package"]["steps"][-1], release["jobs"]["publish"]["steps"][0]
    assert upload["with"] == download["with"] == {"name": "dist", "path": "dist"}


def test_forms_and_settings_of_the_repository_are_yaml() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"]
    assert len(files) >= 7
    assert all(yaml.safe_load(path.read_text("utf-8")) for path in files)


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
    assert wheel.stat().st_size < (80e6 if photo.exists() else 12e6)
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
