"""Upload and download of models through the hub's protocol, on a loopback server."""

from __future__ import annotations

import base64
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawings import assert_same, drawings, taught
from PIL import Image

from coda_prompt import ContinualClassifier
from coda_prompt.errors import HubError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LoopbackHub:
    """The parts of the hub's API that a push and a fetch use; files live in memory."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.private: bool | None = None
        self.token: str | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def answer(self, content: bytes, heads: dict[str, str] | None = None) -> None:
                self.send_response(200)
                for name, value in (heads or {"Content-Type": "application/json"}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.token = self.headers.get("Authorization")
                self.answer(json.dumps(outer.posted(self.path, body)).encode())

            def do_GET(self) -> None:
                if "/resolve/" in self.path:
                    name = self.path.rpartition("/")[2]
                    if name not in outer.files:
                        self.send_error(404)
                        return
                    tag = f'"{len(outer.files[name])}-{name}"'
                    heads = {"ETag": tag, "X-Repo-Commit": COMMIT, "Content-Type": "text/plain"}
                    self.answer(outer.files[name], heads)
                elif outer.files:
                    names = [{"rfilename": name} for name in outer.files]
                    message = {"id": "me/sketches", "sha": COMMIT, "siblings": names}
                    self.answer(json.dumps(message).encode())
                else:
                    self.send_error(404)

            do_HEAD = do_GET  # noqa: N815

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def posted(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/repos/create"):
            message = json.loads(body)  # older clients say private, newer ones visibility
            self.private = message.get("private", message.get("visibility") == "private")
            return {"url": f"{self.address}/me/sketches", "id": "1"}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            plain = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return {"files": [{"path": name, **plain} for name in names]}
        if "/commit/" in path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    self.files[entry["value"]["path"]] = content
            url = f"{self.address}/me/sketches/commit/{COMMIT}"
            return {"success": True, "commitUrl": url, "commitOid": COMMIT}
        return {"warnings": [], "errors": []}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    made = LoopbackHub()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_an_uploaded_model_downloads_unchanged(hub: LoopbackHub) -> None:
    classifier = taught(range(3), method="ncm")
    address = classifier.push_to_hub("me/sketches", token="secret", endpoint=hub.address)
    assert address.endswith(COMMIT)
    assert hub.private is True, "nobody's model is published by accident"
    assert hub.token == "Bearer secret"
    assert set(hub.files) == {"model.safetensors", "config.json", "README.md"}
    assert json.loads(hub.files["config.json"])["classes"] == classifier.classes_
    assert hub.files["README.md"].startswith(b"---\nlibrary_name: coda-prompt")
    fetched = ContinualClassifier.from_pretrained("me/sketches", endpoint=hub.address)
    images, _ = drawings(range(3), test=True)
    assert np.array_equal(fetched.predict(images), classifier.predict(images))
    assert_same(fetched, classifier)


def test_the_guide_runs_as_written(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught(range(3), method="ncm").save(tmp_path / "my-model")
    images, names = drawings([3, 4], 6)
    for number, (image, name) in enumerate(zip(images, names, strict=True)):
        (tmp_path / "more-birds" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "more-birds" / name / f"{number}.png")
    Image.fromarray(images[0]).save(tmp_path / "image.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "secret")
    page = (Path(__file__).parents[1] / "docs" / "guide" / "share.md").read_text("utf-8")
    programs = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(programs) == 2
    program = "".join(programs).replace('birds")', f'birds", endpoint="{hub.address}")', 2)
    exec(program, {})
    assert hub.token == "Bearer secret"
    assert len(ContinualClassifier.load(tmp_path / "my-birds").classes_) == 5


def test_upload_leaves_out_the_local_path_of_a_backbone_file(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    file = tmp_path / "secret-folder" / "pocket-vit.safetensors"
    file.parent.mkdir()
    with resources.as_file(resources.files("coda_prompt") / "assets" / file.name) as weights:
        shutil.copy(weights, file)
    classifier = taught(range(2), method="ncm", backbone=str(file))
    assert classifier.model.backbone.path == str(file)
    classifier.push_to_hub("me/sketches", endpoint=hub.address)
    assert json.loads(hub.files["config.json"])["backbone"]["name"] == file.name
    assert not [name for name, content in hub.files.items() if b"secret-folder" in content]


def test_a_folder_is_loaded_without_the_hub(tmp_path: Path) -> None:
    classifier = taught(range(3), method="ncm")
    classifier.save_pretrained(tmp_path / "model")
    loaded = ContinualClassifier.from_pretrained(tmp_path / "model", endpoint="http://127.0.0.1:9")
    assert loaded.classes_ == classifier.classes_


@pytest.mark.parametrize("name", ["me/nothing", "not a name"])
def test_a_missing_model_raises_one_clear_error(name: str, hub: LoopbackHub) -> None:
    with pytest.raises(HubError, match=re.escape(f"'{name}' could not be downloaded")):
        ContinualClassifier.from_pretrained(name, endpoint=hub.address)
