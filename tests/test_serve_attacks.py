"""What clients must not be able to do to the service: fill its memory, its disk or its log, block
it, or make it open something that they name."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import socket
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from drawings import NAMES, drawings, taught
from forging import forged
from forked import PATIENCE
from PIL import Image
from serving import files, peak_memory, png, served, teach, wait_for_job

MB = 2**20
JSON = {"content-type": "application/json"}
MILLION = range(1_000_000)
pytestmark = pytest.mark.posix


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attacked") / "model"
    taught(range(4), method="ncm").save(folder)
    return folder


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[httpx.Client]:
    with served(str(model)) as client:
        yield client


def pid_of(client: httpx.Client) -> int:
    pid: int = client.pid  # type: ignore[attr-defined]
    return pid


def log_of(client: httpx.Client) -> str:
    log: str = client.log()  # type: ignore[attr-defined]
    return log


def connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port), PATIENCE)


def head(route: str, length: int, kind: str = "application/json") -> bytes:
    return (
        f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- bodies


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("merge-classes", {"classes": list(MILLION), "into": "x"}),
        ("rename", {"old": "a", "new": "b", **{f"f{number}": 0 for number in MILLION}}),
        ("forget", {"name": "x" * 2 * MB, "confirm": True}),
        ("predict", {"images": [{}] * len(MILLION)}),
        ("learn", {"images": [[]] * len(MILLION)}),
    ],
)
@pytest.mark.parametrize("length_is_stated", [True, False])
def test_huge_json_bodies_are_refused_before_they_are_parsed(
    route: str, body: object, length_is_stated: bool, client: httpx.Client
) -> None:
    content = json.dumps(body).encode()
    pieces = (content[start : start + MB // 4] for start in range(0, len(content), MB // 4))
    sent = content if length_is_stated else pieces
    before = peak_memory(pid_of(client))
    with contextlib.suppress(httpx.WriteError):  # it may close the connection before all is sent
        answer = client.post(f"/v1/{route}", content=sent, headers=JSON)
        assert answer.status_code == 413
    assert peak_memory(pid_of(client)) - before < 4 * len(content) + 16 * MB
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("merge-classes", {"classes": list(range(10_000)), "into": "x"}),
        ("merge-classes", {"classes": ["a"] * 10_000, "into": "x"}),
        ("rename", {"old": "a", "new": "b", **{f"f{number}": 0 for number in range(10_000)}}),
        ("rename", {"old": "a", "new": "b", "x" * 500_000: 0}),
        ("rename", {"old": "a" * 500_000, "new": "b"}),
        ("rename", {"old": NAMES[0], "new": "\ud800"}),
        ("forget", {"name": "a" * 500_000, "confirm": True}),
        ("learn", {"images": [{"label": "x"}] * 5_000}),
    ],
)
def test_refusals_are_short(route: str, body: object, client: httpx.Client) -> None:
    answer = client.post(f"/v1/{route}", content=json.dumps(body).encode(), headers=JSON)
    assert answer.status_code in (400, 422), answer.text[:300]
    assert len(answer.content) < 2_000


RECORD_ACCESS = """
import os, sys
def record(event, arguments):
    if event == "socket.getaddrinfo" or (event == "open" and "named-backbone" in str(arguments[0])):
        os.write(2, f"accessed: {arguments[0]}\\n".encode())
sys.addaudithook(record)
"""
OTHER = "0" * 64
"""Fingerprint of no backbone."""


def test_an_uploaded_model_names_nothing_that_is_opened(model: Path, tmp_path: Path) -> None:
    (tmp_path / "named-backbone.safetensors").write_bytes(b"not a backbone")
    paths = [str(tmp_path / f"{name}.safetensors") for name in ("named-backbone", "no-such-file")]
    names = ("photo", "photo@14000", "vit-b16-in1k", *paths)
    saved = (model / "model.safetensors").read_bytes()
    with served(str(model), before=f"exec({RECORD_ACCESS!r}); ") as client:

        def merge(**backbone: Any) -> tuple[int, str]:
            content = forged(saved, lambda fields: fields["backbone"].update(backbone))
            before = peak_memory(pid_of(client))
            answer = client.post("/v1/merge", content=content)
            assert peak_memory(pid_of(client)) - before < 2 * len(content) + 16 * MB
            return answer.status_code, answer.json()["detail"]

        assert merge()[0] == 409, "it has learned the same images"
        for name in names:
            status, detail = merge(name=name, fingerprint=OTHER)
            assert (status, "differ in their backbone" in detail) == (409, True), detail
        assert merge(path=paths[0]) == merge(path=paths[1]) == merge(name=paths[0]) == merge()
        assert "accessed:" not in log_of(client)
        assert client.get("/v1/classes").json()["classes"] == list(NAMES[:4])


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields["options"].update(removable=True),
        lambda fields: fields["options"].update(seed=2**31),
        lambda fields: fields.update(method="ranpac"),
        lambda fields: fields.update(method="ft"),
        lambda fields: fields["backbone"].update(fingerprint=OTHER),
    ],
)
def test_an_uploaded_model_of_other_options_is_refused(
    change: Callable[[dict[str, Any]], object], model: Path, client: httpx.Client
) -> None:
    answer = client.post(
        "/v1/merge", content=forged((model / "model.safetensors").read_bytes(), change)
    )
    assert answer.status_code == 409, answer.text
    assert "the models differ in" in answer.json()["detail"]


@pytest.mark.parametrize("shape", [[0, 2**40], [2**40, 0], [0, 2**63], [2**40], [-1], [0] * 100])
def test_sizes_of_an_uploaded_model_are_checked(
    shape: list[int], model: Path, client: httpx.Client
) -> None:
    saved = (model / "model.safetensors").read_bytes()
    content = forged(saved, lambda fields: None, {"unknown.sums": shape})
    before = peak_memory(pid_of(client))
    answer = client.post("/v1/merge", content=content)
    assert answer.status_code == 422, answer.text
    assert peak_memory(pid_of(client)) - before < 2 * len(content) + 16 * MB


def test_slow_body_is_refused(model: Path) -> None:
    """A client that never pauses long enough for a time-out sends a byte now and then."""
    impatient = "import coda_prompt.serve.access as access; access.MAX_SECONDS_BETWEEN_CHUNKS = 1; "
    with served(str(model), before=impatient) as client, connect(client) as slow:
        slow.sendall(head("/v1/predict", 1000))
        slow.settimeout(0.1)
        answer = b""
        deadline = time.monotonic() + PATIENCE
        while not answer:
            assert time.monotonic() < deadline
            slow.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = slow.recv(100)
    assert answer.startswith(b"HTTP/1.1 408")


def test_slow_body_is_refused_also_after_a_fast_start(model: Path) -> None:
    impatient = "import coda_prompt.serve.access as access; access.MAX_SECONDS_BETWEEN_CHUNKS = 1; "
    with served(str(model), before=impatient) as client, connect(client) as slow:
        slow.sendall(head("/v1/predict", 10 * MB) + b" " * MB)
        slow.settimeout(0.1)
        answer, deadline = b"", time.monotonic() + 30
        while not answer:
            assert time.monotonic() < deadline
            slow.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = slow.recv(100)
    assert answer.startswith(b"HTTP/1.1 408")


def test_bodies_of_all_requests_have_one_limit(client: httpx.Client) -> None:
    """What is over it is refused; small requests are answered meanwhile, all others afterwards."""
    before, part, answers = peak_memory(pid_of(client)), b" " * MB, []
    image = files([np.zeros((28, 28), np.uint8)])
    noise = np.random.default_rng(0).integers(0, 255, (1200, 1200, 3), np.uint8)
    with contextlib.ExitStack() as stack:
        for _ in range(14):
            line = stack.enter_context(connect(client))
            line.sendall(head("/v1/predict", 64 * MB))
            with contextlib.suppress(ConnectionError):  # it does not read what it has refused
                for _ in range(60):
                    line.sendall(part)
            line.settimeout(0.2)
            with contextlib.suppress(TimeoutError, ConnectionError):
                answers.append(line.recv(1000).lower())
        assert client.post("/v1/predict", files=image).status_code == 200
    assert len(answers) > 3
    assert all(b" 503 " in each and b"retry-after: 5" in each for each in answers)
    assert peak_memory(pid_of(client)) - before < 720 * MB
    photograph = files([noise])
    wait_until(lambda: client.post("/v1/predict", files=photograph).status_code == 200)


def test_unpacked_bytes_count(model: Path) -> None:
    little = "import coda_prompt.serve.access as access; access.MAX_HELD_BYTES = 80 * 2**20; "
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/a.png", bytes(20 * MB))
    with served(str(model), before=little) as client:
        sent = client.post("/v1/learn", files={"archive": packed.getvalue()})
        assert (sent.status_code, sent.headers.get("retry-after")) == (503, "5")
        body = json.dumps({"images": [{"data": "A" * 8 * MB}]})
        sent = client.post("/v1/predict", content=body.encode(), headers=JSON)
        assert sent.status_code == 503


RECORD_WRITES = """
import os, sys
def record(event, arguments):
    if event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        os.write(2, f"written: {arguments[0]}\\n".encode())
sys.addaudithook(record)
"""


def test_uploads_are_never_written_to_disk(model: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (1200, 1200, 3), np.uint8)
    photograph = png(noise)
    assert len(photograph) > 4 * MB
    with served(str(model), before=f"exec({RECORD_WRITES!r}); ") as client:
        client.get("/healthz")
        before = log_of(client).count("written:")
        sent = client.post("/v1/predict", files=[("images", ("a.png", photograph))] * 2)
        assert sent.status_code == 200, sent.text
        preview = client.post("/v1/preview", files={"images": ("a.png", photograph)})
        assert Image.open(io.BytesIO(preview.content)).size == (512, 512)
        assert log_of(client).count("written:") == before, log_of(client)
        client.post("/v1/rename", json={"old": NAMES[0], "new": "renamed"})
        client.post("/v1/undo")
        assert log_of(client).count("written:") > before, "the hook sees files that are written"


# -- connections


def test_silent_connections_block_nobody(client: httpx.Client) -> None:
    """More of them than the service accepts, while others upload slowly and ask."""
    with contextlib.ExitStack() as stack:
        upload = stack.enter_context(connect(client))
        body = json.dumps({"old": "a", "new": "b"}).encode()
        upload.sendall(head("/v1/rename", len(body)))
        silent = []
        for number in range(900):
            silent.append(stack.enter_context(connect(client)))
            if number % 3 == 1:
                silent[-1].sendall(b"POST /v1/rename HTTP/1.1\r\nHost: ")
            if number % 3 == 2:
                silent[-1].sendall(head("/v1/rename", 9))
            if number % 100 == 0:
                upload.sendall(body[:1])
                body = body[1:]
                with httpx.Client(base_url=client.base_url, timeout=PATIENCE) as other:
                    assert other.get("/v1/classes").status_code == 200
        assert client.get("/v1/classes").status_code == 200
        upload.sendall(body)
        assert upload.recv(100).startswith(b"HTTP/1.1 422")  # there is no class 'a'


def test_open_streams_and_slow_readers_block_nobody(client: httpx.Client) -> None:
    """More valid requests with endless answers than the service accepts, opened at once."""
    routes = ("/v1/events", "/docs/assets/swagger-ui-bundle.js")
    with contextlib.ExitStack() as stack:
        upload = stack.enter_context(connect(client))
        body = json.dumps({"old": "a", "new": "b"}).encode()
        upload.sendall(head("/v1/rename", len(body)))
        lines = []
        for number in range(900):
            line = stack.enter_context(socket.socket())
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect((client.base_url.host, client.base_url.port))
            line.sendall(f"GET {routes[number % 2]} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            lines.append(line)
            if number % 100 == 99:
                upload.sendall(body[:1])
                body = body[1:]
                with httpx.Client(base_url=client.base_url, timeout=PATIENCE) as other:
                    assert other.get("/v1/classes").status_code == 200
        upload.sendall(body)
        assert upload.recv(100).startswith(b"HTTP/1.1 422")  # there is no class 'a'
        assert lines[-2].recv(100).startswith(b"HTTP/1.1 200"), "the newest stream is open"


def test_connections_without_a_request_are_closed(model: Path) -> None:
    impatient = (
        "import coda_prompt.serve.connections as each; each.MAX_SILENT_SECONDS = 0.5; "
        "import coda_prompt.serve.access as access; access.MAX_SECONDS_BETWEEN_CHUNKS = 0.5; "
    )
    started = (
        b"",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /",
        head("/v1/undo/", 10),  # answered before its body arrives
    )
    with served(str(model), before=impatient) as client:
        for sent in started:
            with connect(client) as line:
                line.settimeout(0.1)
                line.sendall(sent)
                deadline = time.monotonic() + PATIENCE
                open_, trickles = True, b"x" * 1_000_000
                while open_:
                    assert time.monotonic() < deadline
                    try:
                        if sent:
                            line.sendall(trickles[:1])
                        open_ = bool(line.recv(4096))
                    except TimeoutError:
                        continue
                    except ConnectionError:
                        open_ = False
        assert log_of(client).count("Traceback") == 0


def test_answers_that_nobody_reads_are_dropped(model: Path) -> None:
    impatient = "import coda_prompt.serve.connections as each; each.MAX_SILENT_SECONDS = 0.5; "
    with served(str(model), before=impatient) as client, contextlib.ExitStack() as stack:
        tasks = Path(f"/proc/{pid_of(client)}/fd")
        client.get("/healthz")
        before = len(list(tasks.iterdir()))
        for _ in range(5):
            line = stack.enter_context(socket.socket())
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect((client.base_url.host, client.base_url.port))
            for _ in range(50):
                asset = "/docs/assets/swagger-ui-bundle.js"
                line.sendall(f"GET {asset} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        wait_until(lambda: len(list(tasks.iterdir())) <= before)
        assert client.get("/healthz").status_code == 200


def test_disconnects_leave_no_trace_in_the_log(model: Path) -> None:
    image = png(np.zeros((300, 300), np.uint8))
    form = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n'
    whole = form + image + b"\r\n--x--\r\n"
    multipart = "multipart/form-data; boundary=x"
    with served(str(model)) as client:
        for sent in (
            head("/v1/predict", 1000) + b"{",
            head("/v1/rename", 1000) + b"{",
            head("/v1/merge", 1000, "application/octet-stream") + b"{",
            head("/v1/predict", 10_000, multipart) + form,
            head("/v1/learn", 10_000, multipart) + form,
            head("/v1/predict", len(whole), multipart) + whole,
            b"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            b"GET /v1/model.zip HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        ):
            for _ in range(5):
                with connect(client) as line:
                    line.sendall(sent)
        counted = 'coda_requests_total{path="/v1/rename",status="499"} 5.0'
        wait_until(lambda: counted in client.get("/metrics").text)
        assert log_of(client).count("\n") == 1, log_of(client)  # the URL


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\n"
        b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /%ff\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/undo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n",
        b"POST /v1/undo HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000,
    ],
)
def test_invalid_requests_leave_no_trace_in_the_log(request_: bytes, client: httpx.Client) -> None:
    before = log_of(client)
    with connect(client) as line:
        line.sendall(request_)
        with contextlib.suppress(ConnectionError):
            assert line.recv(1000)[:10] in (b"HTTP/1.1 2", b"HTTP/1.1 4")
    assert client.get("/healthz").status_code == 200
    assert log_of(client) == before


# -- names and pages


def test_names_that_look_alike_are_one_class(model: Path, tmp_path: Path) -> None:
    spellings = [
        "caf\u00e9",
        "cafe\u0301",
        "ca\u200bf\u00e9",
        "caf\u00e9\u2060",
        "\ufeffcaf\u00e9",
        "caf\u00e9 ",
    ]
    shutil.copytree(model, tmp_path / "model")
    with served(str(tmp_path / "model")) as client:
        job = teach(client, drawings([0], 6)[0], spellings)
        assert job["classes"] == ["café"]
        assert wait_for_job(client, job)["state"] == "done"
        body = {"old": "cafe\u0301", "new": f"{NAMES[1]}\u200b"}
        assert client.post("/v1/rename", json=body).status_code == 409
        assert client.post("/v1/rename", json={**body, "new": "\u200b"}).status_code == 422
        renamed = client.post("/v1/rename", json={**body, "new": "co\u00adffee"}).json()
        assert renamed["classes"] == [*NAMES[:4], "coffee"]


@pytest.mark.parametrize("path", ["/", "/docs", "/page/app.js", "/v1/classes", "/nowhere"])
def test_answers_have_a_strict_security_policy(path: str, client: httpx.Client) -> None:
    headers = client.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["script-src"]) == ("'none'", "'self'")
    assert (policy["style-src"], policy["frame-ancestors"]) == ("'self'", "'none'")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
