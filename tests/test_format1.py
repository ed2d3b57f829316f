"""Files of format 1: models, interrupted lessons and runs load, continue and resume as before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small import coda

from coda_prompt import ContinualClassifier

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "fixtures" / "format1"
BENCHMARK = "tests/fixtures/format1/tiny.yaml"
BACKBONE = "tests/fixtures/format1/backbone.safetensors"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text())
PROBABILITIES = load_file(FIXTURES / "expected.safetensors")
TENSORS = load_file(FIXTURES / "tensors.safetensors")
IMAGES: dict[str, np.ndarray] = dict(np.load(FIXTURES / "images.npz"))
MODELS, INTERRUPTED = sorted(EXPECTED["models"]), sorted(EXPECTED["interrupted"])
RUNS = ["coda-p", "dualprompt", "l2p++", "ranpac", "ncm", "ft++", "er-5000", "lwf-mc"]
INTERRUPTED_RUNS: dict[str, Any] = json.loads(
    (FIXTURES / "runs-interrupted" / "expected.json").read_text()
)
NOT_COMPARED = ("seconds", "peak_memory_bytes", "memory_mib", "learned_sha256", "multiply_adds")
"""Different on every run or machine; later versions need fewer operations."""
SAME = 5e-6
"""Tolerance of probabilities that are computed again: CPUs differ in the last bits of float32."""


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the fixtures are relative to the root of the repository."""
    monkeypatch.chdir(ROOT)


def lesson(name: str) -> tuple[np.ndarray, list[str]]:
    return IMAGES[f"{name}.images"], IMAGES[f"{name}.labels"].tolist()


def assert_as_recorded(
    classifier: ContinualClassifier, recorded: dict[str, Any], key: str, within: float
) -> None:
    assert classifier.classes_ == recorded["classes"]
    found = classifier.predict_proba(IMAGES["test.images"])
    assert [recorded["classes"][row] for row in found.argmax(axis=1)] == recorded["predicted"]
    np.testing.assert_allclose(found, PROBABILITIES[key], rtol=0, atol=within)
    assert classifier.temperature == pytest.approx(recorded["temperature"], rel=1e-4)
    newest = classifier.tasks_[-1]
    for field in ("new", "continued", "images", "held_out", "accuracy", "accuracy_own"):
        assert newest[field] == recorded["newest task"][field]


def tensors_of(key: str) -> dict[str, np.ndarray]:
    return {name: value for name, value in TENSORS.items() if name.startswith(f"{key}/")}


def assert_holds(path: Path, recorded: dict[str, np.ndarray]) -> None:
    """Each recorded tensor is in the file, under whatever name and shape."""
    assert recorded
    tensors = load_file(path).values()
    for name, tensor in recorded.items():
        alike = [other for other in tensors if other.size == tensor.size]
        scale = max(1.0, float(np.abs(tensor).max()))
        nearest = min(
            (float(np.abs(other.ravel() - tensor.ravel()).max()) for other in alike),
            default=np.inf,
        )
        assert nearest <= 2e-5 * scale, f"{name} is off by {nearest}"


# -- models


@pytest.mark.parametrize("name", MODELS)
def test_a_model_loads_and_learns_a_third_lesson(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "models" / name, tmp_path / "model")
    versions = EXPECTED["models"][name]["versions"]
    classifier = ContinualClassifier.load(folder, device="cpu")
    assert classifier.method_name == EXPECTED["models"][name]["method"]
    assert_as_recorded(classifier, versions[1], f"models/{name}/version-2", SAME)
    assert classifier.predict(IMAGES["test.images"]).tolist() == versions[1]["predicted"]

    classifier.learn(*lesson("lesson3"))
    classifier.save(folder)
    assert_holds(folder / "model.safetensors", tensors_of(f"models/{name}"))
    saved = ContinualClassifier.load(folder, device="cpu")
    assert_as_recorded(saved, versions[2], f"models/{name}/version-3", 5 * SAME)
    saved.undo()
    assert_as_recorded(saved, versions[1], f"models/{name}/version-2", SAME)


@pytest.mark.parametrize("name", MODELS)
def test_undo_restores_the_first_version(name: str) -> None:
    first = EXPECTED["models"][name]["versions"][0]
    classifier = ContinualClassifier.load(FIXTURES / "models" / name, device="cpu")
    classifier.undo()
    assert_as_recorded(classifier, first, f"models/{name}/version-1", SAME)


def test_a_model_is_read_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = FIXTURES / "models" / "coda-p"
    classifier = ContinualClassifier.load(folder, backbone=str(ROOT / BACKBONE), device="cpu")
    recorded = EXPECTED["models"]["coda-p"]["versions"][1]
    assert_as_recorded(classifier, recorded, "models/coda-p/version-2", SAME)


def test_coda_undo_takes_a_model_back(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "models" / "dualprompt", tmp_path / "model")
    done = coda("undo", str(folder), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    classifier = ContinualClassifier.load(folder, device="cpu")
    first = EXPECTED["models"]["dualprompt"]["versions"][0]
    assert_as_recorded(classifier, first, "models/dualprompt/version-1", SAME)


# -- interrupted lessons


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupted_lesson_resumes(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "interrupted" / name, tmp_path / "model")
    recorded = EXPECTED["interrupted"][name]
    if recorded["first"]:
        options, method = recorded["options"], EXPECTED["models"][recorded["model"]]["method"]
        classifier = ContinualClassifier(BACKBONE, method, device="cpu", **options)
    else:
        classifier = ContinualClassifier.load(folder, device="cpu")
    in_folder = recorded["lesson"] == "folder"
    data = (FIXTURES / "data" / "train",) if in_folder else lesson(recorded["lesson"])
    steps = []

    def on_event(event: Any) -> None:
        if event.kind == "step":
            steps.append((event.epoch, event.step))

    classifier.learn(*data, progress=folder / ".progress", on_event=on_event)
    assert len(steps) == recorded["steps left"]
    assert steps[0] == (recorded["epoch"], recorded["step"])
    assert_as_recorded(classifier, recorded, f"interrupted/{name}", 5 * SAME)
    classifier.save(folder)
    assert not (folder / ".progress").exists()
    assert_holds(folder / "model.safetensors", tensors_of(f"interrupted/{name}"))


def test_coda_learn_resumes_an_interrupted_lesson(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "interrupted" / "coda-p-folder", tmp_path / "model")
    done = coda("learn", str(folder), "tests/fixtures/format1/data/train", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "another training" not in done.stderr
    classifier = ContinualClassifier.load(folder, device="cpu")
    recorded = EXPECTED["interrupted"]["coda-p-folder"]
    assert_as_recorded(classifier, recorded, "interrupted/coda-p-folder", 5 * SAME)


# -- runs


def assert_close(found: Any, recorded: Any, where: str = "") -> None:
    """Equal, but for numbers, which may differ by 1e-5 of their value."""
    if isinstance(recorded, dict):
        assert found.keys() >= recorded.keys() - set(NOT_COMPARED), where
        for key in recorded.keys() - set(NOT_COMPARED):
            assert_close(found[key], recorded[key], f"{where}/{key}")
    elif isinstance(recorded, list):
        assert len(found) == len(recorded), where
        for number, (mine, other) in enumerate(zip(found, recorded, strict=True)):
            assert_close(mine, other, f"{where}/{number}")
    elif isinstance(recorded, float):
        assert found == pytest.approx(recorded, rel=1e-5, abs=1e-6), where
    else:
        assert found == recorded, where


def result_of(out: Path, method: str) -> Any:
    return json.loads((out / "tiny" / method / "trial-0" / "result.json").read_text())


def test_finished_runs_are_not_run_again(tmp_path: Path) -> None:
    out = shutil.copytree(FIXTURES / "runs", tmp_path / "runs")
    before = {path: path.read_bytes() for path in sorted(out.glob("*/*/trial-*/*"))}
    done = coda(
        "bench", BENCHMARK, "--methods", ",".join(RUNS), "--out", str(out), "--json", cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    recorded = json.loads((FIXTURES / "report.json").read_text())["rows"]
    found = {row["method"]: row for row in json.loads(done.stdout)["rows"]}
    assert found.keys() == set(RUNS)
    for row in recorded:
        assert_close(found[row["method"]], row)
    assert {path: path.read_bytes() for path in before} == before


def test_finished_runs_are_reported_with_the_same_numbers(tmp_path: Path) -> None:
    out = shutil.copytree(FIXTURES / "runs", tmp_path / "runs")
    done = coda("report", str(out), "-o", str(tmp_path / "report"), "--json", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    recorded = json.loads((FIXTURES / "report.json").read_text())["parts"]
    assert_close(json.loads(done.stdout)["parts"], recorded)


def test_interrupted_runs_resume(tmp_path: Path) -> None:
    out = shutil.copytree(FIXTURES / "runs-interrupted", tmp_path / "runs")
    logs = {m: out / "tiny" / m / "trial-0" / "events.jsonl" for m in INTERRUPTED_RUNS}
    before = {method: log.read_text() for method, log in logs.items()}
    chosen = ",".join(INTERRUPTED_RUNS)
    arguments = ("--methods", chosen, "--out", str(out), "--json", "--keep")
    done = coda("bench", BENCHMARK, *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for method, recorded in INTERRUPTED_RUNS.items():
        kept = f"tiny/{method}/trial-0/learned.safetensors"
        assert_holds(out / kept, load_file(FIXTURES / "runs" / kept))
        assert_close(result_of(out, method), recorded, method)
        assert not (out / "tiny" / method / "trial-0" / "checkpoints").exists()
        assert logs[method].read_text().startswith(before[method]), "it started anew"


@pytest.mark.parametrize("chosen", ["coda-p", pytest.param("all", marks=pytest.mark.slow)])
def test_new_runs_give_the_recorded_numbers(chosen: str, tmp_path: Path) -> None:
    arguments = ("--methods", chosen, "--out", str(tmp_path), "--json")
    done = coda("bench", BENCHMARK, *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    recorded = json.loads((FIXTURES / "numbers.json").read_text())["methods"]
    for method in recorded if chosen == "all" else chosen.split(","):
        found = result_of(tmp_path, method)
        for field in ("losses", "matrix", "own_classes"):
            assert_close(found[field], recorded[method][field], f"{method}/{field}")
