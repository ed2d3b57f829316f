"""Hub datasets read with the real `datasets` package, from files and from a local HTTP hub."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import numpy as np
import pytest
from forked import Forked
from PIL import Image

from coda_prompt.errors import BadImage, MissingData, MissingExtra, WrongType
from coda_prompt.images.hf_datasets import HubSplit, hub_source, open_hub_split
from coda_prompt.images.inputs import image_items
from coda_prompt.images.labelled import labelled
from coda_prompt.images.sources import Source
from coda_prompt.research.bench.config import load_benchmark
from coda_prompt.research.bench.inputs import load_source

SIZES = {"train": 7, "test": 3}


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def file(shade: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8), shade, np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def write(folder: Path, **parts: dict[str, list[Any]]) -> Path:
    """As on the hub: a Parquet file for each split, with an image and two class columns."""
    import datasets

    features = datasets.Features(
        {
            "img": datasets.Image(),
            "coarse": datasets.ClassLabel(names=["x"]),
            "fine": datasets.ClassLabel(names=["a", "b"]),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    for part, columns in parts.items():
        all_columns = {"coarse": [0] * len(columns["fine"]), **columns}
        rows = datasets.Dataset.from_dict(all_columns, features=features)
        rows.to_parquet(folder / f"{part}-00000-of-00001.parquet")
    return folder


def part(count: int, first: int = 0) -> dict[str, list[Any]]:
    kinds = ["PNG", "JPEG"]
    images = [{"bytes": file(first + 10 * n, kinds[n % 2]), "path": None} for n in range(count)]
    return {"img": images, "fine": [n % 2 for n in range(count)]}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    return write(folder, **{name: part(count, 5) for name, count in SIZES.items()})


def test_column_with_the_most_classes_is_used(dataset: Path) -> None:
    source = load_source(load_benchmark("pocket", [f"source=hub:{dataset}", "classes=2"]))
    assert source.class_names == ("a", "b")
    assert source.train.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert [source.train.image(n).getpixel((0, 0)) for n in (0, 2)] == [5, 25]
    assert len(source.test) == 3
    assert len(source.fingerprint()) == 64


def test_unsuitable_dataset_raises_a_readable_error(tmp_path: Path) -> None:
    train = part(2)
    only = write(tmp_path / "only", train=train)
    with pytest.raises(MissingData, match="does not have both splits train and test"):
        hub_source(str(only))
    with pytest.raises(MissingData, match=r"no split test \(but train\)"):
        open_hub_split(str(only), "test")
    validated = write(tmp_path / "validated", train=train, validation=part(1))
    assert len(hub_source(str(validated)).test) == 1
    broken = {"img": [{"bytes": b"no image", "path": None}, train["img"][1]], "fine": [0, 1]}
    source = hub_source(str(write(tmp_path / "broken", train=train, test=broken)))
    with pytest.raises(BadImage, match=r"broken/test\[0\]"):
        source.test.image(0)
    with pytest.raises(MissingData, match=r"hub:owner/other: .*Check its name"):
        hub_source("owner/other")
    import datasets

    words = tmp_path / "words"
    words.mkdir()
    for name in SIZES:
        datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(words / f"{name}-0-of-1.parquet")
    with pytest.raises(MissingData, match="an image and a class column"):
        hub_source(str(words))


def test_without_a_network_an_uncached_dataset_fails_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)  # between retries
    with pytest.raises(MissingData, match=r"hub cannot be reached: .*Check its name"):
        hub_source("owner/other")
    assert not waits
    assert not caplog.records
    assert datasets.config.HF_HUB_OFFLINE is False


def rows_of(labels: list[Any], kind: Any, **more: Any) -> Any:
    """A dataset in memory, with the column `label`."""
    import datasets

    columns = {"img": part(len(labels), 5)["img"], "label": labels, **more}
    features = {"img": datasets.Image(), "label": kind}
    features |= {name: datasets.Value("string") for name in more}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def test_names_of_classes_as_strings_are_accepted() -> None:
    import datasets

    rows = rows_of(["pear", "apple", "pear"], datasets.Value("string"))
    images = labelled(rows)
    assert images.names == ("apple", "pear")
    assert images.split.labels.tolist() == [1, 0, 1]
    captioned = rows_of(["pear", "apple"], datasets.Value("string"), caption=["x", "y"])
    assert labelled(captioned).names == ("apple", "pear")
    ambiguous = captioned.rename_column("label", "name")
    with pytest.raises(MissingData, match=r"no class column .* img, name, caption.*class_encode"):
        labelled(ambiguous)
    with pytest.raises(MissingData, match="image 1 has no class"):
        labelled(rows_of(["pear", None], datasets.Value("string")))
    with pytest.raises(MissingData, match="image 0 has no class"):
        labelled(rows_of([-1, 0], datasets.ClassLabel(names=["a"])))


def test_iterable_dataset_is_read_and_dataset_dict_is_refused() -> None:
    import datasets

    rows = rows_of([1, 0, 1], datasets.ClassLabel(names=["a", "b"]))
    images = labelled(rows.to_iterable_dataset())
    assert images.names == ("a", "b")
    assert images.split.labels.tolist() == [1, 0, 1]
    assert images.split.image(0).getpixel((0, 0)) == 5
    assert len(image_items(rows.to_iterable_dataset())) == 3
    both = datasets.DatasetDict(train=rows, test=rows)
    for read in (labelled, image_items):
        with pytest.raises(WrongType, match=r"DatasetDict .*data\['train'\], data\['test'\]"):
            read(both)


def test_missing_package_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'coda-prompt\[datasets\]'"):
        hub_source("owner/name")


# -- data larger than a disk


def shades(source: Source) -> list[tuple[list[int], list[Any]]]:
    """The labels and the grey levels of the images of both splits."""
    return [
        (split.labels.tolist(), [split.image(n).getpixel((0, 0)) for n in range(len(split))])
        for split in (source.train, source.test)
    ]


def test_a_saved_dataset_is_mapped_into_memory(dataset: Path, tmp_path: Path) -> None:
    import datasets

    datasets.load_dataset(str(dataset)).save_to_disk(tmp_path / "saved")
    source = hub_source(str(tmp_path / "saved"))
    assert shades(source) == shades(hub_source(str(dataset)))
    assert isinstance(source.train, HubSplit)
    (mapped,) = source.train.rows.cache_files
    assert Path(mapped["filename"]).parent == tmp_path / "saved" / "train"


def test_parquet_files_are_read_from_an_object_store(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    store = fsspec.filesystem("memory")
    store.put(str(dataset), "/bucket/photos", recursive=True)
    source = hub_source("memory://bucket/photos")
    assert source.class_names == ("a", "b")
    assert shades(source) == shades(hub_source(str(dataset)))
    with pytest.raises(MissingData, match="hub:memory://bucket/none: the dataset could not be"):
        hub_source("memory://bucket/none")


def test_images_stay_in_an_object_store_if_a_table_has_their_addresses(tmp_path: Path) -> None:
    """Each image is one request, when it is needed; the table is all that is stored."""
    store = fsspec.filesystem("memory")
    for number in range(4):
        store.pipe(f"/bucket/{number}.png", file(10 * number))
    table = tmp_path / "table"
    table.mkdir()
    features = "- name: image\n    dtype: image\n  - name: label\n    dtype: string\n"
    (table / "README.md").write_text(f"---\ndataset_info:\n  features:\n  {features}---\n")
    for part, numbers in (("train", (3, 0, 2)), ("test", (1,))):
        rows = [f"memory://bucket/{n}.png,{'ab'[n % 2]}\n" for n in numbers]
        (table / f"{part}.csv").write_text("image,label\n" + "".join(rows))
    source = hub_source(str(table))
    store.rm("/bucket/1.png")
    assert source.class_names == ("a", "b")
    assert source.train.labels.tolist() == [1, 0, 0]
    assert [source.train.image(n).getpixel((0, 0)) for n in (2, 0)] == [20, 30]
    with pytest.raises(BadImage, match=r"table/test\[0\]: it cannot be read"):
        source.test.image(0)


def test_images_without_a_class_are_rejected(tmp_path: Path) -> None:
    unknown = write(tmp_path / "unknown", train=part(2), test={**part(1), "fine": [-1]})
    with pytest.raises(MissingData, match=r"unknown/test.*image 0 has no class"):
        hub_source(str(unknown))


# -- from a hub


@pytest.fixture
def endpoint(dataset: Path) -> Iterator[str]:
    """A hub with the dataset's Parquet files."""
    folders = {"owner/rows": dataset}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            name = next((name for name in folders if f"datasets/{name}" in path), None)
            if name is None:
                self.send(404, {"X-Error-Code": "RepoNotFound"}, b"")
                return
            files = {own.name: own for own in folders[name].iterdir() if own.name[0] != "."}
            if "/resolve/" in path:
                self.give(files, path.rpartition("/")[2])
            elif "/tree/" in path:
                self.tell([self.described(own) for own in files.values()])
            else:
                siblings = [{"rfilename": own} for own in files]
                self.tell({"id": name, "sha": "1" * 40, "siblings": siblings, "private": False,
                           "disabled": False, "gated": False, "downloads": 0, "likes": 0,
                           "tags": []})  # fmt: skip

        do_HEAD = do_GET  # noqa: N815

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name = next(name for name in folders if f"datasets/{name}" in self.path)
            paths = [folders[name] / path for path in asked["paths"]]
            self.tell([self.described(path) for path in paths if path.is_file()])

        @staticmethod
        def described(own: Path) -> dict[str, Any]:
            size = own.stat().st_size
            return {"type": "file", "path": own.name, "size": size, "oid": str(size)}

        def give(self, files: dict[str, Path], name: str) -> None:
            if name not in files:
                self.send(404, {"X-Error-Code": "EntryNotFound"}, b"")
                return
            content, status = files[name].read_bytes(), 200
            headers = {"ETag": f'"{name}"', "X-Repo-Commit": "1" * 40, "Accept-Ranges": "bytes"}
            if asked := self.headers.get("Range"):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                end = min(int(last or len(content)) + 1, len(content))
                headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
                content, status = content[int(first) : end], 206
            self.send(status, headers, content)

        def tell(self, answer: object) -> None:
            content = json.dumps(answer).encode()
            self.send(200, {"Content-Type": "application/json"}, content)

        def send(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


SCRIPT = """
import sys
from coda_prompt.research.bench.inputs import load_source
from coda_prompt.research.bench.config import load_benchmark
found = load_source(load_benchmark("pocket", [f"source={sys.argv[1]}", "classes=2"]))
for split in (found.train, found.test):
    print(split.labels.tolist(), *(int(split.image(n).getpixel((0, 0))) for n in range(len(split))))
"""


def test_a_dataset_is_read_from_a_local_hub(endpoint: str, dataset: Path, tmp_path: Path) -> None:
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1",
           "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
    finished = Forked(SCRIPT, "hub:owner/rows", environment={**os.environ, **own}).completed()
    assert finished.returncode == 0, finished.stderr
    expected = shades(hub_source(str(dataset)))
    lines = [f"{labels} {' '.join(map(str, grey))}" for labels, grey in expected]
    assert finished.stdout.splitlines() == lines
