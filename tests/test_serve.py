"""The HTTP service: predictions during lessons, refused requests, crashes, limits."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from drawings import NAMES, SOURCE, drawings, taught
from forked import PATIENCE
from PIL import Image
from serving import children_of, files, png, served, teach, wait_for_job
from small import coda

from coda_prompt import ContinualClassifier
from coda_prompt.errors import BadImage
from coda_prompt.learner.explanation import explain
from coda_prompt.learner.folder import ModelFolder
from coda_prompt.serve import uploads
from coda_prompt.serve.learning import ExampleDataset
from coda_prompt.serve.uploads import Example, RequestError, read_zip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "model"
    taught(range(4), range(4, 6)).save(folder)
    return folder


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[httpx.Client]:
    with served(str(model)) as client:
        yield client


@pytest.fixture(scope="module")
def teaching_service(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("teachable") / "model"
    shutil.copytree(model, folder)
    with served(str(folder)) as client:
        yield client


@pytest.fixture
def teachable(teaching_service: httpx.Client, model: Path) -> httpx.Client:
    """A service that a test may teach; its learning process is warm after the first test."""
    number = ModelFolder(model).description().number
    versions = teaching_service.get("/v1/history").json()["versions"]
    if number != next(each["number"] for each in versions if each["current"]):
        restored = teaching_service.post(f"/v1/undo?to={number}")
        assert restored.status_code == 200, restored.text
    return teaching_service


@pytest.fixture
def model_copy(model: Path, tmp_path: Path) -> Path:
    """A copy of the model for one test."""
    shutil.copytree(model, tmp_path / "model")
    return tmp_path / "model"


def teach_slowly(client: httpx.Client) -> dict[str, Any]:
    """Start a lesson of seconds: each image is large, and they are one new class."""
    image = drawings([8], 1)[0][0]
    large = ("images", ("a.png", png(np.kron(image, np.ones((100, 100), np.uint8)))))
    started = client.post("/v1/learn", files=[large] * 100, data={"labels": [NAMES[8]] * 100})
    assert started.status_code == 202, started.text
    job: dict[str, Any] = started.json()
    return job


def problem_detail(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["status"] == status
    assert "Traceback" not in document["detail"]
    return str(document["detail"])


# -- predictions


def test_predictions_equal_those_of_the_classifier(client: httpx.Client, model: Path) -> None:
    images, _ = drawings(range(6), 3, test=True)
    expected = ContinualClassifier.load(model).predict_proba(images)
    as_form = client.post("/v1/predict?top=6", files=files(images)).json()
    encoded = [{"data": base64.b64encode(png(image)).decode()} for image in images]
    encoded[0]["data"] = f"data:image/png;base64,{encoded[0]['data']}"
    as_json = client.post("/v1/predict?top=6", json={"images": encoded}).json()
    for answer in (as_form, as_json):
        assert answer["version"] == f"2-{ModelFolder(model).sha256[:8]}"  # type: ignore[index]
        for prediction, probabilities in zip(answer["predictions"], expected, strict=True):
            given = {each["label"]: each["probability"] for each in prediction["top"]}
            values = [given[name] for name in NAMES[:6]]
            np.testing.assert_allclose(values, probabilities, atol=1e-5)
            assert (
                prediction["label"]
                == prediction["top"][0]["label"]
                == NAMES[int(probabilities.argmax())]
            )
            assert not prediction["unknown"]


def test_prediction_below_threshold_is_unknown(client: httpx.Client) -> None:
    images, _ = drawings([0], 1)
    answer = client.post("/v1/predict?unknown_below=1&top=1", files=files(images)).json()
    (prediction,) = answer["predictions"]
    assert prediction["unknown"]
    assert prediction["label"] is None
    assert len(prediction["top"]) == 1
    assert prediction["best"] == prediction["top"][0]["label"]


def test_unknown_auto_answers_as_the_classifier(client: httpx.Client, model: Path) -> None:
    assert client.get("/v1/model").json()["can_reject"]
    images = np.concatenate([drawings([0], 2, test=True)[0], drawings(range(50, 60), 1)[0]])
    query = "/v1/predict?unknown=auto&unknown_rate=0.3"
    answer = client.post(query, files=files(images)).json()
    expected = ContinualClassifier.load(model).predictions(images, unknown="auto", unknown_rate=0.3)
    for mine, other in zip(answer["predictions"], expected, strict=True):
        assert mine["typicality"] == pytest.approx(other.typicality, abs=1e-3)
        assert (mine["label"], mine["unknown"], mine["best"]) == (
            other.label,
            other.unknown,
            other.best,
        )
    assert any(each["unknown"] for each in answer["predictions"])
    plain = client.post("/v1/predict", files=files(images[:1])).json()["predictions"][0]
    assert plain["typicality"] is None
    assert client.post("/v1/predict?unknown=never", files=files(images[:1])).status_code == 422


def test_health_classes_model_and_metrics(client: httpx.Client) -> None:
    assert client.get("/healthz").text == "ok\n"
    assert client.get("/v1/classes").json()["classes"] == list(NAMES[:6])
    answer = client.get("/v1/model").json()
    assert (answer["method"], answer["backbone"], len(answer["tasks"])) == ("slda", "pocket", 2)
    assert answer["input"] == "drawing"
    client.post("/v1/predict", files=files(drawings([0], 2)[0]))
    metrics = client.get("/metrics").text
    assert 'coda_requests_total{path="/v1/predict",status="200"}' in metrics
    assert "coda_classes 6.0" in metrics


def test_docs_and_page_load_nothing_from_other_hosts(client: httpx.Client) -> None:
    page = resources.files("coda_prompt") / "serve" / "page"
    assets = [f"/page/{file.name}" for file in page.iterdir()]
    assert "/page/app.js" in assets
    for path in ("/", "/docs", *assets):
        response = client.get(path)
        assert response.status_code == 200, path
        text = response.text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, path
        assert "https://" not in text, path
    assert client.get("/docs/assets/swagger-ui-bundle.js").status_code == 200


def test_explanation_has_nearest_classes_and_prompt_weights(client: httpx.Client) -> None:
    images, _ = drawings([0], 2, test=True)
    answer = client.post("/v1/explain", files=files(images[:1])).json()
    predicted = client.post("/v1/predict?top=6", files=files(images[:1])).json()
    distances = [each["distance"] for each in answer["nearest"]]
    assert distances == sorted(distances)
    assert 0 <= distances[0] < distances[-1] <= 2
    given = {each["label"]: each["probability"] for each in predicted["predictions"][0]["top"]}
    for each in answer["nearest"]:
        assert each["probability"] == pytest.approx(given[each["label"]], abs=1e-5)
    assert answer["prompts"] == []
    assert "one image" in problem_detail(client.post("/v1/explain", files=files(images)), 422)
    prompted = taught([0, 1], method="coda-p", epochs=1)
    prompts = explain(prompted.model, Image.fromarray(images[0])).prompts
    assert [each.block for each in prompts] == [0, 1, 2, 3, 4]
    assert {len(each.weights) for each in prompts} == {10}
    assert all(-1 <= weight <= 1 for each in prompts for weight in each.weights)


# -- downloads


def test_model_folder_and_onnx_can_be_downloaded(
    client: httpx.Client, model: Path, tmp_path: Path
) -> None:
    version = client.get("/v1/model").json()["version"]
    packed = client.get("/v1/model.zip")
    assert f'filename="model-{version}.zip"' in packed.headers["content-disposition"]
    with zipfile.ZipFile(io.BytesIO(packed.content)) as archive:
        archive.extractall(tmp_path)
    unpacked, name = tmp_path / "model", "model.safetensors"
    assert (unpacked / name).read_bytes() == (model / name).read_bytes()
    assert (unpacked / "README.md").exists()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (unpacked, model)]
    assert configs[0] == configs[1]
    onnx = pytest.importorskip("onnx")
    exported = onnx.load_from_string(client.get("/v1/model.onnx").content)
    metadata = {entry.key: json.loads(entry.value) for entry in exported.metadata_props}
    assert metadata["classes"] == list(NAMES[:6])


# -- lessons


def test_model_without_classes_refuses_predictions_until_its_first_lesson(tmp_path: Path) -> None:
    ContinualClassifier("pocket", method="ncm").save(tmp_path / "model")
    images, labels = drawings([0, 1], 5)
    with served(str(tmp_path / "model")) as client:
        assert client.get("/v1/classes").json()["classes"] == []
        for route in ("predict", "explain"):
            refused = client.post(f"/v1/{route}", files=files(images[:1]))
            assert "not learned any class" in problem_detail(refused, 409)
        assert "not learned any class" in problem_detail(client.get("/v1/model.onnx"), 409)
        assert client.get("/v1/accuracy").json()["classes"] == []
        assert client.get("/v1/history").json()["entries"] == []
        assert wait_for_job(client, teach(client, images, labels))["state"] == "done"
        answer = client.post("/v1/predict", files=files(images[:1])).json()
        assert answer["predictions"][0]["label"] == NAMES[0]


@pytest.mark.posix
def test_learning_process_is_warm_and_replaced_when_it_dies(model_copy: Path) -> None:
    with served(str(model_copy)) as client:
        pid = client.pid  # type: ignore[attr-defined]
        assert children_of(pid) == []
        client.get("/v1/model")
        (process,) = wait_for_children(pid)
        for row in (8, 9):
            assert wait_for_job(client, teach(client, *drawings([row], 5)))["state"] == "done"
            assert children_of(pid) == [process], "the same process runs all lessons"
        bad = [("images", ("a.png", b"no image"))]
        failed = client.post("/v1/learn", files=bad, data={"labels": ["x"]}).json()
        assert "not an image" in wait_for_job(client, failed)["reason"]
        assert children_of(pid) == [process], "a lesson that is refused does not end it"
        assert client.post("/v1/undo").status_code == 200
        os.kill(process, signal.SIGKILL)  # between two lessons
        assert wait_for_job(client, teach(client, *drawings([10], 5)))["state"] == "done"
        assert process not in wait_for_children(pid)
        assert client.get("/v1/classes").json()["classes"] == [*NAMES[:6], NAMES[8], NAMES[10]]


def test_what_a_lesson_costs_earlier_classes_is_measured(model_copy: Path) -> None:
    """On images that earlier lessons of the same service have held out."""
    with served(str(model_copy)) as client:
        wait_for_job(client, teach(client, *drawings([8, 9], 10)))
        job = teach(client, *drawings([10], 5))
        with client.stream("GET", f"/v1/jobs/{job['id']}/events") as events:
            last = [line for line in events.iter_lines() if line][-1]
        kept = json.loads(last.removeprefix("data: "))["learned"]["kept"]
        assert (kept["classes"], kept["images"]) == (2, 4)
        newest = client.get("/v1/history").json()["entries"][-1]
        assert (newest["older_before"], newest["older_after"]) == (kept["before"], kept["after"])


def wait_for_children(pid: int) -> list[int]:
    deadline = time.monotonic() + PATIENCE
    while not (children := children_of(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return children


def test_every_client_sees_the_states_of_a_lesson(teachable: httpx.Client) -> None:
    states, job = [], None
    with teachable.stream("GET", "/v1/events") as events:
        for line in events.iter_lines():
            if not line:
                continue
            states.append(json.loads(line.removeprefix("data: ")))
            newest = states[-1]["job"]
            if job is None:
                job = teach(teachable, *drawings([8], 5))
            elif newest is not None and newest["id"] == job["id"] and newest["stage"] == "done":
                break
    assert not states[0]["learning"]
    assert any(state["learning"] for state in states)
    last = states[-1]
    assert last["version"] == last["job"]["version"] != states[0]["version"]
    assert last["job"]["learned"]["new"] == [NAMES[8]]


def test_several_models_are_served_side_by_side() -> None:
    """As `coda serve` without a model does; here the second one is on one network only."""
    with served("--backbone", "photo-vit", CODA_TOKEN="correct horse") as client:
        for path in ("/v1/model", "/models/photographs/v1/model"):
            problem_detail(client.get(path), 401)
        assert client.get("/models/photographs/").status_code == 200  # the page
        client.headers["authorization"] = "Bearer correct horse"
        first = client.get("/v1/model").json()
        second = client.get("/models/photographs/v1/model").json()
        assert (first["input"], second["input"]) == ("drawing", "photograph")
        assert [each["name"] for each in first["models"]] == ["drawings", "photographs"]
        assert [each["current"] for each in second["models"]] == [False, True]
        images, labels = drawings([0, 1], 5)
        sent = {"files": files(images), "data": {"labels": labels}}
        job = client.post("/models/photographs/v1/learn", **sent).json()
        with client.stream("GET", f"/models/photographs/v1/jobs/{job['id']}/events") as events:
            last = [line for line in events.iter_lines() if line][-1]
        assert json.loads(last.removeprefix("data: "))["state"] == "done"
        classes = client.get("/models/photographs/v1/classes").json()["classes"]
        assert classes == [NAMES[0], NAMES[1]]
        assert len(client.get("/v1/classes").json()["classes"]) == 40


def test_a_lesson_adds_classes_and_undo_removes_them(teachable: httpx.Client, model: Path) -> None:
    client = teachable
    images, labels = drawings([8, 9], 8)
    before = client.get("/v1/classes").json()
    job = teach(client, images, labels)
    states = []
    with client.stream("GET", f"/v1/jobs/{job['id']}/events") as events:
        for line in events.iter_lines():
            if line:
                states.append(json.loads(line.removeprefix("data: ")))
    last = states[-1]
    assert last["state"] == "done", last
    assert last["learned"]["new"] == [NAMES[8], NAMES[9]]
    shown = client.get("/v1/history").json()
    assert shown["entries"][-1]["new"] == [NAMES[8], NAMES[9]]
    numbers = [each["number"] for each in shown["versions"]]
    assert [each["current"] for each in shown["versions"]] == [False, False, True]
    assert [each["version"] for each in shown["entries"]] == numbers
    held_out = client.get("/v1/accuracy").json()["classes"]
    assert [each["label"] for each in held_out] == [*NAMES[:6], NAMES[8], NAMES[9]]
    after = client.get("/v1/classes").json()
    assert after["version"] == last["version"] != before["version"]
    assert after["classes"] == [*before["classes"], NAMES[8], NAMES[9]]
    same = ContinualClassifier.load(model)
    same.learn([Image.fromarray(image) for image in images], labels)
    tests = drawings(range(10), 1, test=True)[0]
    answer = client.post("/v1/predict?top=8", files=files(tests)).json()
    for prediction, probabilities in zip(
        answer["predictions"], same.predict_proba(tests), strict=True
    ):
        assert prediction["probability"] == pytest.approx(probabilities.max(), abs=1e-5)
    assert client.post("/v1/undo").json() == before
    assert client.get("/v1/classes").json() == before
    undone = client.get("/v1/history").json()["versions"][-1]
    assert not undone["current"]
    assert undone["newest"]["new"] == [NAMES[8], NAMES[9]]
    assert client.post(f"/v1/undo?to={undone['number']}").json() == after
    assert client.post("/v1/undo").json() == before
    while (undone := client.post("/v1/undo")).status_code == 200:
        assert len(undone.json()["classes"]) < len(before["classes"])
    assert "no earlier version" in problem_detail(undone, 409)


def test_lesson_from_zip_of_class_folders(teachable: httpx.Client) -> None:
    images, labels = drawings([8, 9], 5)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            archive.writestr(f"things/{label}/{number}.png", png(image))
        archive.writestr("things/readme.txt", "no image")
        archive.writestr("__MACOSX/things/._x.png", "no image")
    sent = teachable.post("/v1/learn", files={"archive": ("a.zip", buffer.getvalue())})
    job = wait_for_job(teachable, sent.json())
    assert job["state"] == "done", job
    assert job["images"] == 10
    assert teachable.get("/v1/classes").json()["classes"] == [*NAMES[:6], NAMES[8], NAMES[9]]


def test_predictions_during_a_lesson_match_the_version_they_name(model_copy: Path) -> None:
    """Concurrent clients before, during and after a lesson; no request is lost or mixed up."""
    tests, _ = drawings(range(6), 4, test=True)
    bodies = [png(image) for image in tests]
    first = ContinualClassifier.load(model_copy)
    answers: list[tuple[int, dict[str, Any]]] = []
    refused: list[str] = []
    stop = threading.Event()
    with served(str(model_copy)) as client:

        def send_requests(start: int) -> None:
            index = start
            with httpx.Client(base_url=client.base_url, timeout=PATIENCE) as session:
                while not stop.is_set():
                    body = [("images", ("a.png", bodies[index % len(bodies)]))]
                    answer = session.post("/v1/predict?top=100", files=body)
                    if answer.status_code == 200:
                        answers.append((index % len(bodies), answer.json()))
                    else:
                        refused.append(answer.text)
                    index += 1

        def wait_for_answers(version: str, count: int) -> None:
            deadline = time.monotonic() + PATIENCE
            while sum(answer["version"][0] == version for _, answer in answers) < count:
                assert time.monotonic() < deadline
                time.sleep(0.05)

        threads = [threading.Thread(target=send_requests, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        try:
            wait_for_answers("2", 10)
            job = wait_for_job(client, teach_slowly(client))
            assert job["state"] == "done", job
            wait_for_answers("3", 40)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert refused == []
    second = ContinualClassifier.load(model_copy)
    expected = {}
    for version, classifier in (("2", first), ("3", second)):
        expected[version] = (classifier.classes_, classifier.predict_proba(tests))
    assert {answer["version"][0] for _, answer in answers} == {"2", "3"}
    for index, answer in answers:
        classes, probabilities = expected[answer["version"][0]]
        given = {each["label"]: each["probability"] for each in answer["predictions"][0]["top"]}
        assert list(sorted(given)) == sorted(classes)
        np.testing.assert_allclose(
            [given[name] for name in classes], probabilities[index], atol=1e-4
        )


# -- crashes and shutdown


def learning_process(client: httpx.Client, job: dict[str, Any]) -> int:
    """Wait until a lesson is reading images and return the pid of its process."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        answer = client.get(f"/v1/jobs/{job['id']}").json()
        assert answer["state"] == "running", answer
        if answer["stage"] == "looking" and answer["share"]:
            (child,) = children_of(client.pid)  # type: ignore[attr-defined]
            return child
        time.sleep(0.02)
    raise AssertionError("the lesson did not start")


@pytest.mark.posix
def test_killed_lesson_changes_neither_service_nor_model(model_copy: Path) -> None:
    before_bytes = (model_copy / "model.safetensors").read_bytes()
    with served(str(model_copy)) as client:
        before = client.get("/v1/classes").json()
        job = teach_slowly(client)
        busy = client.post("/v1/learn", files=files(drawings([9], 1)[0]), data={"labels": ["x"]})
        assert "lesson is running" in problem_detail(busy, 409)
        assert busy.headers["retry-after"]
        assert "lesson is running" in problem_detail(client.post("/v1/undo"), 409)
        os.kill(learning_process(client, job), signal.SIGKILL)
        answer = wait_for_job(client, job)
        assert answer["state"] == "failed"
        assert "died" in answer["reason"]
        assert client.get("/v1/classes").json() == before
        assert client.post("/v1/predict", files=files(drawings([0], 1)[0])).status_code == 200
        assert (model_copy / "model.safetensors").read_bytes() == before_bytes
        again = wait_for_job(client, teach(client, *drawings([8], 5)))
        assert again["state"] == "done", again


@pytest.mark.posix
def test_killed_service_leaves_model_intact_and_no_orphan_process(model_copy: Path) -> None:
    before_bytes = (model_copy / "model.safetensors").read_bytes()
    with served(str(model_copy)) as client:
        job = teach_slowly(client)
        child = learning_process(client, job)
        os.kill(client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        deadline = time.monotonic() + PATIENCE
        while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{child}").exists()
    assert (model_copy / "model.safetensors").read_bytes() == before_bytes
    with served(str(model_copy)) as client:
        job = wait_for_job(client, teach(client, *drawings([8], 5)))
        assert job["state"] == "done", job


@pytest.mark.posix
def test_full_disk_fails_only_the_lesson(model_copy: Path) -> None:
    before_bytes = (model_copy / "model.safetensors").read_bytes()
    limit = len(before_bytes) // 2
    before = (
        f"import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit},) * 2); "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    )
    with served(str(model_copy), before=before) as client:
        job = wait_for_job(client, teach(client, *drawings([8], 5)))
        assert job["state"] == "failed", job
        assert "too large" in job["reason"].lower()
        assert client.post("/v1/predict", files=files(drawings([0], 1)[0])).status_code == 200
    assert (model_copy / "model.safetensors").read_bytes() == before_bytes
    assert not list(model_copy.glob(".*.tmp"))


def accepted_images(client: httpx.Client) -> float:
    """Return the number of images predicted or waiting."""
    lines = client.get("/metrics").text.splitlines()
    names = ("coda_images_total ", "coda_waiting ")
    return sum(float(line.split()[1]) for line in lines if line.startswith(names))


@pytest.mark.posix
def test_pending_requests_are_answered_before_shutdown(model: Path) -> None:
    images, _ = drawings(range(6), 10, test=True)
    statuses: list[int] = []
    with served(str(model)) as client:

        def ask() -> None:
            address = client.base_url.join("/v1/predict")
            statuses.append(httpx.post(address, files=files(images), timeout=PATIENCE).status_code)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        while accepted_images(client) < len(threads) * len(images):
            time.sleep(0.01)
        os.kill(client.pid, signal.SIGTERM)  # type: ignore[attr-defined]
        for thread in threads:
            thread.join()
    assert statuses == [200] * 6


@pytest.mark.posix
def test_saved_lesson_is_done_even_if_its_process_is_killed(model_copy: Path) -> None:
    images, labels = drawings([9], 5)
    with served(str(model_copy)) as client:
        before = ModelFolder(model_copy).sha256
        job = teach(client, images, labels)
        while ModelFolder(model_copy).sha256 == before:
            time.sleep(0.001)
        for child in children_of(client.pid):  # type: ignore[attr-defined]
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        job = wait_for_job(client, job)
        assert job["state"] == "done"
        assert job["learned"]["new"] == [NAMES[9]]
        assert NAMES[9] in client.get("/v1/classes").json()["classes"]


def test_copy_of_demo_model_is_deleted_at_shutdown(tmp_path: Path) -> None:
    with served(TMPDIR=str(tmp_path)) as client:
        assert client.get("/healthz").status_code == 200
        assert list(tmp_path.glob("coda-demo-*"))
    assert not list(tmp_path.glob("coda-demo-*"))


def test_demo_model_has_statistics_of_unknown_images_and_held_out_counts() -> None:
    with served() as client:
        described = client.get("/v1/model").json()
        assert (described["temporary"], described["can_reject"]) == (True, True)
        assert described["missing_images"] == 0
        empty = client.get("/models/photographs/v1/model").json()
        assert (empty["can_reject"], empty["missing_images"]) == (False, 19)
        assert len(client.get("/v1/accuracy").json()["classes"]) == 40
        images = drawings(range(50, 55), 10, test=True)[0]
        answer = client.post("/v1/predict?unknown=auto", files=files(images)).json()
        assert sum(each["unknown"] for each in answer["predictions"]) >= 5


def test_ctrl_c_ends_the_service_normally(model: Path) -> None:
    command = [sys.executable, "-m", "coda_prompt", "serve", str(model), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stderr) == (0, b"")


def test_stalled_request_body_times_out(model: Path) -> None:
    short_timeout = (
        "import coda_prompt.serve.access as access; access.MAX_SECONDS_BETWEEN_CHUNKS = 0.5; "
    )
    with served(str(model), before=short_timeout) as client:
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address, timeout=PATIENCE) as half:
            half.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n"
                         b"Content-Type: application/json\r\n\r\n{")  # fmt: skip
            assert half.recv(12) == b"HTTP/1.1 408"


# -- malicious and malformed requests


def decompression_bomb() -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(buffer, "PNG")
    return buffer.getvalue()


def make_zip(entries: dict[str, bytes], **options: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(
        buffer, "w", **{"compression": zipfile.ZIP_DEFLATED, **options}
    ) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def heic() -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif")
    buffer = io.BytesIO()
    pillow_heif.from_pillow(Image.new("RGB", (900, 600), "red")).save(buffer)
    return buffer.getvalue()


def test_heic_is_read_and_shown_as_png(client: httpx.Client) -> None:
    photo = [("images", ("IMG_1.HEIC", heic()))]
    assert client.post("/v1/predict", files=photo).status_code == 200
    answer = client.post("/v1/preview", files=photo)
    assert answer.headers["content-type"] == "image/png"
    with Image.open(io.BytesIO(answer.content)) as preview:
        assert (preview.size, preview.mode) == ((512, 341), "RGB")
    refused = client.post("/v1/preview", files=photo * 2)
    assert refused.status_code == 422
    assert refused.json()["detail"] == "Send one image to preview, not 2."


def test_heic_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    content = heic()
    monkeypatch.setattr(uploads, "supports_heic", lambda: False)
    with pytest.raises(BadImage, match=r"pip install 'coda-prompt\[heic\]'"):
        uploads.decode_image(content, "image 1")


def test_smallest_rate_of_unknown_images_is_refused(client: httpx.Client) -> None:
    parameters = {"unknown": "auto", "unknown_rate": 5e-324}
    body = files(drawings([0], 1)[0])
    assert client.post("/v1/predict", files=body, params=parameters).status_code == 422


def test_names_of_edited_classes_have_the_limits_of_taught_ones(client: httpx.Client) -> None:
    for route, body in (
        ("rename", {"old": NAMES[0], "new": "x" * 101}),
        ("merge-classes", {"classes": list(NAMES[:2]), "into": "x" * 101}),
    ):
        refused = client.post(f"/v1/{route}", json=body)
        assert refused.status_code == 422
        assert "1 to 100 printable characters" in refused.json()["detail"]


def test_invalid_and_too_large_images_are_refused(client: httpx.Client) -> None:
    for content, message in (
        (b"no image", "not an image"),
        (b"", "not an image"),
        (decompression_bomb(), "pixels"),
        (png(SOURCE.train.image(0))[:60], "cannot be"),
    ):
        sent = client.post("/v1/predict", files=[("images", ("../../x.png", content))])
        answer = problem_detail(sent, 422)
        assert message in answer
        assert ".." not in answer, "the client's file name is not repeated"
    good = ("images", ("a.png", png(SOURCE.train.image(0))))
    many = client.post("/v1/predict", files=[good] * (uploads.MAX_IMAGES_PREDICT + 1))
    assert "too many" in problem_detail(many, 400).lower()


def test_too_large_body_is_not_read(client: httpx.Client) -> None:
    huge = uploads.MAX_UPLOAD_BYTES + 1
    host, port = client.base_url.host, client.base_url.port
    with socket.create_connection((host, port), timeout=PATIENCE) as line:
        head = f"POST /v1/predict HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {huge}\r\n\r\n"
        line.sendall(head.encode())
        assert b" 413 " in line.recv(1000).split(b"\r\n")[0]

    def parts() -> Iterator[bytes]:  # no length given
        yield b'{"images": ["'
        for _ in range(huge // 2**20 + 1):
            yield b"x" * 2**20

    try:
        sent = client.post(
            "/v1/predict", content=parts(), headers={"content-type": "application/json"}
        )
        problem_detail(sent, 413)
    except httpx.TransportError:
        pass  # the service closed the connection
    assert client.get("/healthz").status_code == 200


def test_malicious_zips_are_refused(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    image = png(SOURCE.train.image(0))
    for content, message in (
        (b"no zip", "cannot be read"),
        (make_zip({"../../etc/cat/a.png": image}), "outside"),
        (make_zip({"/etc/cat/a.png": image}), "outside"),
        (make_zip({"a.png": image}), "no image in a folder"),
        (make_zip({"cat/a.txt": b"x"}), "no image in a folder"),
        (make_zip({"cat\x1b[2J/a.png": image}), "cannot be the name"),
    ):
        sent = client.post("/v1/learn", files={"archive": ("a.zip", content)})
        assert message in problem_detail(sent, 422)
    many_entries = make_zip(
        {f"cat/{number}.png": b"" for number in range(uploads.MAX_ZIP_ENTRIES + 1)}
    )
    problem_detail(client.post("/v1/learn", files={"archive": ("a.zip", many_entries)}), 413)
    zip_bomb = make_zip({f"cat/{n}.png": bytes(30 * 2**20) for n in range(9)})
    assert len(zip_bomb) < 2**20
    problem_detail(client.post("/v1/learn", files={"archive": ("a.zip", zip_bomb)}), 413)
    monkeypatch.setattr(uploads, "MAX_IMAGES_LEARN", 3)
    with pytest.raises(RequestError):
        read_zip(make_zip({f"cat/{number}.png": image for number in range(4)}))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"images": []}, 422),
        ({"images": [{"data": "?"}]}, 422),
        ({"images": [{"data": 3}]}, 422),
        ({"images": [{"data": "", "path": "/etc/passwd"}]}, 422),
        ([1], 422),
    ],
)
def test_invalid_json_body_is_refused(body: Any, status: int, client: httpx.Client) -> None:
    problem_detail(client.post("/v1/predict", json=body), status)
    problem_detail(client.post("/v1/learn", json=body), status)


def test_invalid_requests_are_refused(client: httpx.Client) -> None:
    json_type = {"content-type": "application/json"}
    problem_detail(client.post("/v1/predict", content=b"{", headers=json_type), 400)
    problem_detail(client.post("/v1/predict", content=b"x"), 415)
    problem_detail(client.post("/v1/predict?top=0", files=files(drawings([0], 1)[0])), 422)
    problem_detail(client.get("/v1/jobs/../../etc/passwd"), 404)
    problem_detail(client.get("/v1/jobs/99"), 404)
    problem_detail(client.get("/page/../app.py"), 404)
    problem_detail(client.get("/v1/predict"), 405)
    image = files(drawings([0], 1)[0])
    problem_detail(client.post("/v1/learn", files=image), 422)
    problem_detail(client.post("/v1/learn", files=image, data={"labels": ["a", "b"]}), 422)
    problem_detail(client.post("/v1/learn", files=image, data={"labels": ["a\nb"]}), 422)
    problem_detail(client.post("/v1/learn", files=image, data={"labels": ["x" * 101]}), 422)


def test_lesson_with_bad_image_fails_with_a_message(teachable: httpx.Client) -> None:
    good, bad = png(SOURCE.train.image(0)), b"no image"
    sent = [("images", ("a.png", good)), ("images", ("b.png", bad))]
    started = teachable.post("/v1/learn", files=sent, data={"labels": ["a"]})
    job = wait_for_job(teachable, started.json())
    assert job["state"] == "failed"
    assert "image 2 (a): it is not an image" in job["reason"]


def test_requests_from_other_origins_and_hosts_are_refused(client: httpx.Client) -> None:
    image = files(drawings([0], 1)[0])
    answer = client.post("/v1/predict", files=image, headers={"origin": "http://evil.example"})
    assert "other sites" in problem_detail(answer, 403)
    origin = str(client.base_url).rstrip("/")
    assert client.post("/v1/predict", files=image, headers={"origin": origin}).status_code == 200
    problem_detail(
        client.get("/v1/classes", headers={"host": "evil.example"}), 403
    )  # DNS rebinding


def test_malformed_host_and_origin_are_refused(client: httpx.Client) -> None:
    for host in ("[", "a]b"):
        problem_detail(client.get("/healthz", headers={"host": host}), 403)
    problem_detail(client.post("/v1/undo", headers={"origin": "http://["}), 403)


def test_too_many_pixels_unusual_zips_and_labels_as_files_are_refused(client: httpx.Client) -> None:
    buffer = io.BytesIO()
    Image.new("1", (5000, 4900)).save(buffer, "PNG")
    many = [("images", ("a.png", buffer.getvalue()))] * 9
    assert "pixels together" in problem_detail(client.post("/v1/predict", files=many), 413)
    packed = make_zip({"a/0.png": png(SOURCE.train.image(0))}, compression=zipfile.ZIP_LZMA)
    sent = {"archive": ("a.zip", packed)}
    assert "deflate" in problem_detail(client.post("/v1/learn", files=sent), 422)
    label = [("images", ("a.png", buffer.getvalue())), ("labels", ("b.txt", b"cat"))]
    assert "text fields" in problem_detail(client.post("/v1/learn", files=label), 422)


def test_lesson_decodes_images_one_at_a_time() -> None:
    dataset = ExampleDataset([Example("a", png(SOURCE.train.image(0)))] * 3)
    first, again = dataset[0][0], dataset[0][0]
    assert first is not again
    assert first.tobytes() == again.tobytes()
    assert dataset.targets == ["a"] * 3


def test_token_is_required_if_set(model: Path) -> None:
    with served(str(model), CODA_TOKEN="correct horse") as client:
        problem_detail(client.get("/v1/classes"), 401)
        wrong = {"authorization": "Bearer wrong horse"}
        problem_detail(client.get("/v1/classes", headers=wrong), 401)
        problem_detail(client.post("/v1/undo", headers=wrong), 401)
        right = {"authorization": "Bearer correct horse"}
        assert client.get("/v1/classes", headers=right).status_code == 200
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("file", ["Dockerfile", "coda-serve.service"])
def test_deployment_files_start_the_service_with_a_token(file: str, model: Path) -> None:
    """Run the command of the file on another model and port; without token it does not start."""
    text = (Path(__file__).parents[1] / "deploy" / file).read_text("utf-8")
    if file == "Dockerfile":
        parts = re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", text, re.MULTILINE)
        command = [word for part in parts for word in json.loads(part)]
    else:
        command = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)[0].split()
    assert Path(command[0]).name == "coda"
    assert command[1] == "serve"
    arguments = [str(model) if word.endswith("/model") else word for word in command[2:]]
    assert str(model) in arguments
    with served(*arguments, CODA_TOKEN="correct horse") as client:
        problem_detail(client.get("/v1/classes"), 401)
        right = {"authorization": "Bearer correct horse"}
        assert client.get("/v1/classes", headers=right).status_code == 200
    refused = coda("serve", *arguments)
    assert refused.returncode == 2
    assert "CODA_TOKEN" in refused.stderr


def test_invalid_options_end_in_one_message(model: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((str(model), "--host", "0.0.0.0"), "CODA_TOKEN"),
        ((str(model), "--token", "short"), "at least 8"),
        ((str(tmp_path / "nowhere"),), "coda learn"),
        ((str(model), "--host", "no.such.host.invalid"), "CODA_TOKEN"),
        ((str(model), "--host", "203.0.113.1", "--token", "long enough"), "cannot listen on"),
    ):
        finished = coda("serve", *arguments)
        assert finished.returncode == 2, finished.stderr
        assert message in finished.stderr
        assert "Traceback" not in finished.stderr


# -- documentation


@pytest.mark.posix
def test_curl_examples_of_the_docs(model_copy: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "guide" / "serving.md").read_text()
    (script,) = (part.split("```")[0] for part in page.split("```sh\n")[1:] if "curl" in part)
    for name, index in (("drawing.png", 0), ("other.png", 1)):
        SOURCE.test.image(index).save(tmp_path / name)
    image = png(SOURCE.train.image(0))
    (tmp_path / "classes.zip").write_bytes(make_zip({f"cat/{n}.png": image for n in range(3)}))
    lines = script.replace("\\\n", "").strip().splitlines()
    assert len(lines) == 15
    with served(str(model_copy)) as client:
        for line in lines:
            done = subprocess.run(
                ["bash", "-c", line.replace("curl -s", "curl -sf")],
                cwd=tmp_path,
                env={**os.environ, "CODA": str(client.base_url).rstrip("/")},
                capture_output=True,
                timeout=PATIENCE,
            )
            assert done.returncode == 0, line
            assert done.stdout, line
            if "/v1/learn" in line:
                wait_for_job(client, json.loads(done.stdout))


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(model_copy: Path) -> None:
    with served(str(model_copy)) as client:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("schemathesis")), "run",
             f"{client.base_url}openapi.json", "--checks", "not_a_server_error",
             "--request-timeout", "60", "--max-examples", "60",
             "--exclude-path", "/v1/jobs/{number}/events"],
            capture_output=True, text=True, timeout=550,
        )  # fmt: skip
        assert client.get("/healthz").status_code == 200
    assert done.returncode == 0, done.stdout[-3000:]
