"""The service: answers while it learns, refuses what it should, loses nothing."""

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
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from drawings import NAMES, SOURCE, drawings, taught
from PIL import Image
from serving import children_of, ended, files, png, served, teach
from small import coda

from coda_prompt import ContinualClassifier
from coda_prompt.learner import store
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
    with served(str(model)) as found:
        yield found


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose lessons take a while."""
    folder = tmp_path_factory.mktemp("slow") / "model"
    classifier = ContinualClassifier(method="coda-p", epochs=40)
    classifier.learn(*drawings(range(4)), epochs=4)
    classifier.save(folder)
    return folder


@pytest.fixture
def own(slow_model: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    shutil.copytree(slow_model, tmp_path / "model")
    return tmp_path / "model"


def problem(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    told = response.json()
    assert told["status"] == status
    assert "Traceback" not in told["detail"]
    return str(told["detail"])


# -- asking


def test_answers_are_the_classifier_s(client: httpx.Client, model: Path) -> None:
    images, _ = drawings(range(6), 3, test=True)
    expected = ContinualClassifier.load(model).predict_proba(images)
    as_form = client.post("/v1/predict?top=6", files=files(images)).json()
    held = [{"data": base64.b64encode(png(image)).decode()} for image in images]
    held[0]["data"] = f"data:image/png;base64,{held[0]['data']}"
    as_json = client.post("/v1/predict?top=6", json={"images": held}).json()
    for told in (as_form, as_json):
        assert told["version"] == f"2-{store.model_sha256(model)[:8]}"  # type: ignore[index]
        for found, chances in zip(told["predictions"], expected, strict=True):
            given = {each["label"]: each["probability"] for each in found["top"]}
            values = [given[name] for name in NAMES[:6]]
            np.testing.assert_allclose(values, chances, atol=1e-5)
            assert found["label"] == found["top"][0]["label"] == NAMES[int(chances.argmax())]
            assert not found["unknown"]


def test_what_is_not_likely_is_unknown(client: httpx.Client) -> None:
    images, _ = drawings([0], 1)
    told = client.post("/v1/predict?unknown_below=1&top=1", files=files(images)).json()
    (found,) = told["predictions"]
    assert found["unknown"]
    assert found["label"] is None
    assert len(found["top"]) == 1
    assert found["best"] == found["top"][0]["label"]


def test_what_the_service_tells(client: httpx.Client) -> None:
    assert client.get("/healthz").text == "ok\n"
    assert client.get("/v1/classes").json()["classes"] == list(NAMES[:6])
    told = client.get("/v1/model").json()
    assert (told["method"], told["backbone"], len(told["tasks"])) == ("ranpac", "pocket", 2)
    client.post("/v1/predict", files=files(drawings([0], 2)[0]))
    metrics = client.get("/metrics").text
    assert 'coda_requests_total{path="/v1/predict",status="200"}' in metrics
    assert "coda_classes 6.0" in metrics


def test_docs_and_page_come_from_here_alone(client: httpx.Client) -> None:
    for path in ("/", "/docs", "/page/app.js", "/page/style.css", "/page/icon.svg"):
        found = client.get(path)
        assert found.status_code == 200, path
        text = found.text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, path
        assert "https://" not in text, path
    assert client.get("/docs/assets/swagger-ui-bundle.js").status_code == 200


# -- teaching


def test_a_lesson_and_its_undoing(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    images, labels = drawings([8, 9], 8)
    with served(str(tmp_path / "model")) as client:
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
        assert set(last["learned"]["kept"]) == {"classes", "before", "after"}
        after = client.get("/v1/classes").json()
        assert after["version"] == last["version"] != before["version"]
        assert after["classes"] == [*before["classes"], NAMES[8], NAMES[9]]
        same = ContinualClassifier.load(model)
        same.learn([Image.fromarray(image) for image in images], labels)
        tests = drawings(range(10), 1, test=True)[0]
        told = client.post("/v1/predict?top=8", files=files(tests)).json()
        for found, chances in zip(told["predictions"], same.predict_proba(tests), strict=True):
            assert found["probability"] == pytest.approx(chances.max(), abs=1e-5)
        assert client.post("/v1/undo").json() == before
        assert client.get("/v1/classes").json() == before
        assert "no earlier version" in problem(client.post("/v1/undo"), 409)


def test_a_zip_of_class_folders_is_a_lesson(own: Path) -> None:
    images, labels = drawings([8, 9], 5)
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            archive.writestr(f"things/{label}/{number}.png", png(image))
        archive.writestr("things/readme.txt", "no image")
        archive.writestr("__MACOSX/things/._x.png", "no image")
    with served(str(own)) as client:
        sent = client.post("/v1/learn", files={"archive": ("a.zip", held.getvalue())})
        job = ended(client, sent.json())
        assert job["state"] == "done", job
        assert job["images"] == 10
        assert client.get("/v1/classes").json()["classes"] == [*NAMES[:4], NAMES[8], NAMES[9]]


def test_answers_while_it_learns_are_those_of_the_version_they_name(own: Path) -> None:
    """Many callers, before, during and after a lesson; none is lost, none is mixed."""
    tests, _ = drawings(range(4), 5, test=True)
    bodies = [png(image) for image in tests]
    first = ContinualClassifier.load(own)
    answers: list[tuple[int, dict[str, Any]]] = []
    stop = threading.Event()
    with served(str(own)) as client:

        def asks(start: int) -> None:
            place = start
            with httpx.Client(base_url=client.base_url, timeout=60) as mine:
                while not stop.is_set():
                    body = [("images", ("a.png", bodies[place % len(bodies)]))]
                    told = mine.post("/v1/predict?top=100", files=body)
                    assert told.status_code == 200, told.text
                    answers.append((place % len(bodies), told.json()))
                    place += 1

        threads = [threading.Thread(target=asks, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        job = ended(client, teach(client, *drawings([8, 9], 8)))
        time.sleep(0.3)
        stop.set()
        for thread in threads:
            thread.join()
    assert job["state"] == "done", job
    second = ContinualClassifier.load(own)
    expected = {}
    for version, classifier in (("1", first), ("2", second)):
        expected[version] = (classifier.classes_, classifier.predict_proba(tests))
    assert {told["version"][0] for _, told in answers} == {"1", "2"}, "before and after"
    assert len(answers) > 50
    for place, told in answers:
        classes, chances = expected[told["version"][0]]
        given = {each["label"]: each["probability"] for each in told["predictions"][0]["top"]}
        assert list(sorted(given)) == sorted(classes)
        np.testing.assert_allclose([given[name] for name in classes], chances[place], atol=1e-4)


# -- what goes wrong


def learning_process(client: httpx.Client, job: dict[str, Any]) -> int:
    """The process of a lesson, once it is in the midst of it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        told = client.get(f"/v1/jobs/{job['id']}").json()
        assert told["state"] == "running", told
        if told["stage"] == "learning":
            (child,) = children_of(client.pid)  # type: ignore[attr-defined]
            return child
        time.sleep(0.02)
    raise AssertionError("it did not begin")


def test_a_killed_lesson_leaves_the_service_and_the_model_as_they_were(own: Path) -> None:
    whole = (own / "model.safetensors").read_bytes()
    with served(str(own)) as client:
        before = client.get("/v1/classes").json()
        job = teach(client, *drawings(range(8, 14), 20))
        busy = client.post("/v1/learn", files=files(drawings([9], 1)[0]), data={"labels": ["x"]})
        assert "lesson is running" in problem(busy, 409)
        assert busy.headers["retry-after"]
        assert "lesson is running" in problem(client.post("/v1/undo"), 409)
        os.kill(learning_process(client, job), signal.SIGKILL)
        told = ended(client, job)
        assert told["state"] == "failed"
        assert "died" in told["reason"]
        assert client.get("/v1/classes").json() == before
        assert client.post("/v1/predict", files=files(drawings([0], 1)[0])).status_code == 200
        assert (own / "model.safetensors").read_bytes() == whole
        again = ended(client, teach(client, *drawings([8], 5)))
        assert again["state"] == "done", again


def test_a_killed_service_leaves_the_model_whole_and_no_process_behind(own: Path) -> None:
    whole = (own / "model.safetensors").read_bytes()
    with served(str(own)) as client:
        job = teach(client, *drawings(range(8, 14), 20))
        child = learning_process(client, job)
        os.kill(client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        deadline = time.monotonic() + 20
        while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{child}").exists()
    assert (own / "model.safetensors").read_bytes() == whole
    with served(str(own)) as client:
        job = ended(client, teach(client, *drawings([8], 5)))
        assert job["state"] == "done", job


def test_a_full_disk_fails_the_lesson_and_nothing_else(own: Path) -> None:
    whole = (own / "model.safetensors").read_bytes()
    limit = len(whole) // 2
    before = (
        f"import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit},) * 2); "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    )
    with served(str(own), before=before) as client:
        job = ended(client, teach(client, *drawings([8], 5)))
        assert job["state"] == "failed", job
        assert "too large" in job["reason"].lower()
        assert client.post("/v1/predict", files=files(drawings([0], 1)[0])).status_code == 200
    assert (own / "model.safetensors").read_bytes() == whole
    assert not list(own.glob(".*.tmp"))


def accepted(client: httpx.Client) -> float:
    """Images answered or waiting to be."""
    told = client.get("/metrics").text.splitlines()
    names = ("coda_images_total ", "coda_waiting ")
    return sum(float(line.split()[1]) for line in told if line.startswith(names))


def test_what_was_asked_is_answered_before_the_end(model: Path) -> None:
    images, _ = drawings(range(6), 10, test=True)
    statuses: list[int] = []
    with served(str(model)) as client:

        def ask() -> None:
            address = client.base_url.join("/v1/predict")
            statuses.append(httpx.post(address, files=files(images), timeout=60).status_code)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        while accepted(client) < len(threads) * len(images):
            time.sleep(0.01)
        os.kill(client.pid, signal.SIGTERM)  # type: ignore[attr-defined]
        for thread in threads:
            thread.join()
    assert statuses == [200] * 6


def test_a_lesson_that_was_saved_is_done_though_its_process_died(own: Path) -> None:
    images, labels = drawings([9], 5)
    with served(str(own)) as client:
        before = store.model_sha256(own)
        job = teach(client, images, labels)
        while store.model_sha256(own) == before:
            time.sleep(0.001)
        for child in children_of(client.pid):  # type: ignore[attr-defined]
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        job = ended(client, job)
        assert job["state"] == "done"
        assert job["learned"]["new"] == [NAMES[9]]
        assert NAMES[9] in client.get("/v1/classes").json()["classes"]


def test_the_copy_of_the_demo_model_is_gone_with_the_service(tmp_path: Path) -> None:
    with served(TMPDIR=str(tmp_path)) as client:
        assert client.get("/healthz").status_code == 200
        assert list(tmp_path.glob("coda-demo-*"))
    assert not list(tmp_path.glob("coda-demo-*"))


def test_a_request_that_does_not_go_on_is_ended(model: Path) -> None:
    soon = "import coda_prompt.serve.access as access; access.MAX_SECONDS_BETWEEN_CHUNKS = 0.5; "
    with served(str(model), before=soon) as client:
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address, timeout=20) as half:
            half.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n"
                         b"Content-Type: application/json\r\n\r\n{")  # fmt: skip
            assert half.recv(12) == b"HTTP/1.1 408"


# -- attacks


def bomb() -> bytes:
    held = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(held, "PNG")
    return held.getvalue()


def zipped(entries: dict[str, bytes], **how: Any) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", **{"compression": zipfile.ZIP_DEFLATED, **how}) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return held.getvalue()


def test_images_that_are_none_or_too_large_are_refused(client: httpx.Client) -> None:
    for content, words in (
        (b"no image", "not an image"),
        (b"", "not an image"),
        (bomb(), "pixels"),
        (png(SOURCE.train.image(0))[:60], "cannot be"),
    ):
        sent = client.post("/v1/predict", files=[("images", ("../../x.png", content))])
        told = problem(sent, 422)
        assert words in told
        assert ".." not in told, "a client's path is not used, not even in words"
    good = ("images", ("a.png", png(SOURCE.train.image(0))))
    many = client.post("/v1/predict", files=[good] * (uploads.MAX_IMAGES_PREDICT + 1))
    assert "too many" in problem(many, 400).lower()


def test_a_body_that_is_too_large_is_not_read(client: httpx.Client) -> None:
    huge = uploads.MAX_REQUEST_BYTES + 1
    host, port = client.base_url.host, client.base_url.port
    with socket.create_connection((host, port), timeout=20) as line:
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
        problem(sent, 413)
    except httpx.TransportError:
        pass  # the connection was closed on the one who went on
    assert client.get("/healthz").status_code == 200


def test_zips_of_strangers_are_refused(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = png(SOURCE.train.image(0))
    for content, words in (
        (b"no zip", "cannot be read"),
        (zipped({"../../etc/cat/a.png": image}), "outside"),
        (zipped({"/etc/cat/a.png": image}), "outside"),
        (zipped({"a.png": image}), "no image in a folder"),
        (zipped({"cat/a.txt": b"x"}), "no image in a folder"),
        (zipped({"cat\x1b[2J/a.png": image}), "cannot be the name"),
    ):
        sent = client.post("/v1/learn", files={"archive": ("a.zip", content)})
        assert words in problem(sent, 422)
    million = zipped({f"cat/{number}.png": b"" for number in range(uploads.MAX_ZIP_ENTRIES + 1)})
    problem(client.post("/v1/learn", files={"archive": ("a.zip", million)}), 413)
    swollen = zipped({f"cat/{n}.png": bytes(30 * 2**20) for n in range(9)})
    assert len(swollen) < 2**20
    problem(client.post("/v1/learn", files={"archive": ("a.zip", swollen)}), 413)
    monkeypatch.setattr(uploads, "MAX_IMAGES_LEARN", 3)
    with pytest.raises(RequestError):
        read_zip(zipped({f"cat/{number}.png": image for number in range(4)}))


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
def test_a_body_that_cannot_be_used_is_refused(
    body: Any, status: int, client: httpx.Client
) -> None:
    problem(client.post("/v1/predict", json=body), status)
    problem(client.post("/v1/learn", json=body), status)


def test_requests_that_make_no_sense_are_refused(client: httpx.Client) -> None:
    problem(client.post("/v1/predict", content=b"{", headers={"content-type": "application/json"}),
            400)  # fmt: skip
    problem(client.post("/v1/predict", content=b"x"), 415)
    problem(client.post("/v1/predict?top=0", files=files(drawings([0], 1)[0])), 422)
    problem(client.get("/v1/jobs/../../etc/passwd"), 404)
    problem(client.get("/v1/jobs/99"), 404)
    problem(client.get("/page/../app.py"), 404)
    problem(client.get("/v1/predict"), 405)
    image = files(drawings([0], 1)[0])
    problem(client.post("/v1/learn", files=image), 422)
    problem(client.post("/v1/learn", files=image, data={"labels": ["a", "b"]}), 422)
    problem(client.post("/v1/learn", files=image, data={"labels": ["a\nb"]}), 422)
    problem(client.post("/v1/learn", files=image, data={"labels": ["x" * 101]}), 422)


def test_a_lesson_with_a_bad_image_fails_in_words(own: Path) -> None:
    good, bad = png(SOURCE.train.image(0)), b"no image"
    sent = [("images", ("a.png", good)), ("images", ("b.png", bad))]
    with served(str(own)) as client:
        job = ended(client, client.post("/v1/learn", files=sent, data={"labels": ["a"]}).json())
        assert job["state"] == "failed"
        assert "image 2 (a): it is not an image" in job["reason"]


def test_pages_of_other_sites_cannot_use_it(client: httpx.Client) -> None:
    image = files(drawings([0], 1)[0])
    told = client.post("/v1/predict", files=image, headers={"origin": "http://evil.example"})
    assert "other sites" in problem(told, 403)
    mine = str(client.base_url).rstrip("/")
    assert client.post("/v1/predict", files=image, headers={"origin": mine}).status_code == 200
    problem(client.get("/v1/classes", headers={"host": "evil.example"}), 403)  # rebinding


def test_addresses_that_are_none(client: httpx.Client) -> None:
    for host in ("[", "a]b"):
        problem(client.get("/healthz", headers={"host": host}), 403)
    problem(client.post("/v1/undo", headers={"origin": "http://["}), 403)


def test_much_from_little(client: httpx.Client) -> None:
    """Images that are small as files and large together; archives nobody usually makes."""
    held = io.BytesIO()
    Image.new("1", (5000, 4900)).save(held, "PNG")
    many = [("images", ("a.png", held.getvalue()))] * 9
    assert "pixels together" in problem(client.post("/v1/predict", files=many), 413)
    packed = zipped({"a/0.png": png(SOURCE.train.image(0))}, compression=zipfile.ZIP_LZMA)
    sent = {"archive": ("a.zip", packed)}
    assert "deflate" in problem(client.post("/v1/learn", files=sent), 422)
    label = [("images", ("a.png", held.getvalue())), ("labels", ("b.txt", b"cat"))]
    assert "text fields" in problem(client.post("/v1/learn", files=label), 422)


def test_a_lesson_is_decoded_image_by_image() -> None:
    dataset = ExampleDataset([Example("a", png(SOURCE.train.image(0)))] * 3)
    first, again = dataset[0][0], dataset[0][0]
    assert first is not again
    assert first.tobytes() == again.tobytes()
    assert dataset.targets == ["a"] * 3


def test_a_token_is_asked_for_where_there_is_one(model: Path) -> None:
    with served(str(model), CODA_TOKEN="correct horse") as client:
        problem(client.get("/v1/classes"), 401)
        wrong = {"authorization": "Bearer wrong horse"}
        problem(client.get("/v1/classes", headers=wrong), 401)
        problem(client.post("/v1/undo", headers=wrong), 401)
        right = {"authorization": "Bearer correct horse"}
        assert client.get("/v1/classes", headers=right).status_code == 200
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("file", ["Dockerfile", "coda-serve.service"])
def test_what_deploys_it_starts_it_with_a_token(file: str, model: Path) -> None:
    """The command in the file, on another model and port; without the token it refuses to start."""
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
        problem(client.get("/v1/classes"), 401)
        right = {"authorization": "Bearer correct horse"}
        assert client.get("/v1/classes", headers=right).status_code == 200
    refused = coda("serve", *arguments)
    assert refused.returncode == 2
    assert "CODA_TOKEN" in refused.stderr


def test_mistakes_at_the_start_end_in_one_message(model: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ((str(model), "--host", "0.0.0.0"), "CODA_TOKEN"),
        ((str(model), "--token", "short"), "at least 8"),
        ((str(tmp_path / "nowhere"),), "coda learn"),
        ((str(model), "--host", "no.such.host.invalid"), "CODA_TOKEN"),
        ((str(model), "--host", "203.0.113.1", "--token", "long enough"), "cannot listen on"),
    ):
        finished = coda("serve", *arguments)
        assert finished.returncode == 2, finished.stderr
        assert words in finished.stderr
        assert "Traceback" not in finished.stderr


# -- the documents


def test_the_curl_examples_of_the_docs(own: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "guide" / "serving.md").read_text()
    (script,) = (part.split("```")[0] for part in page.split("```sh\n")[1:] if "curl" in part)
    for name, place in (("drawing.png", 0), ("other.png", 1)):
        SOURCE.test.image(place).save(tmp_path / name)
    image = png(SOURCE.train.image(0))
    (tmp_path / "classes.zip").write_bytes(zipped({f"cat/{n}.png": image for n in range(3)}))
    lines = script.replace("\\\n", "").strip().splitlines()
    assert len(lines) == 12
    with served(str(own)) as client:
        for line in lines:
            done = subprocess.run(
                ["bash", "-c", line.replace("curl -s", "curl -sf")],
                cwd=tmp_path,
                env={**os.environ, "CODA": str(client.base_url).rstrip("/")},
                capture_output=True,
                timeout=60,
            )
            assert done.returncode == 0, line
            assert done.stdout, line
            if "/v1/learn" in line:
                ended(client, json.loads(done.stdout))


@pytest.mark.slow
def test_schemathesis_finds_no_error_of_the_service(own: Path) -> None:
    with served(str(own)) as client:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("schemathesis")), "run",
             f"{client.base_url}openapi.json", "--checks", "not_a_server_error",
             "--max-examples", "60", "--exclude-path", "/v1/jobs/{number}/events"],
            capture_output=True, text=True, timeout=550,
        )  # fmt: skip
        assert client.get("/healthz").status_code == 200
    assert done.returncode == 0, done.stdout[-3000:]
