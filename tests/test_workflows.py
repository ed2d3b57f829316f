"""The workflows of .github call targets, scripts, tests and extras that exist."""

from __future__ import annotations

import re
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
    assert len(files) >= 8
    assert all(yaml.safe_load(path.read_text("utf-8")) for path in files)
