"""Damaged or forged files of every kind raise a CodaError and nothing else.

A few examples of each kind here; hundreds of each in the slow suite.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from drawings import drawings, taught
from forging import forge_folder, forged, join_file, split_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from serving import cpu_seconds, peak_memory, served
from small import AUGMENTED_VIEWS
from test_checkpointing import kept_run, stopped, whole_run

from coda_prompt import ContinualClassifier
from coda_prompt.encoder.encoder import load_encoder
from coda_prompt.errors import CodaError
from coda_prompt.images.preprocessing import eval_view
from coda_prompt.images.reading import open_image
from coda_prompt.learner.folder import ModelFolder
from coda_prompt.research.bench import report, tables
from coda_prompt.research.bench.config import load_benchmark
from coda_prompt.research.bench.runs import runs_of
from coda_prompt.research.bench.sweep import load_sweep, sweep_runs
from coda_prompt.research.streams import pocket
from coda_prompt.research.streams.paper.domainnet import DOMAINS, domainnet_source
from coda_prompt.research.streams.paper.imagenet_r import LISTS, imagenet_r_source
from coda_prompt.research.vit.catalog import load_backbone

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Change = Callable[[bytes], bytes]
FEW = pytest.mark.parametrize("examples", [6, pytest.param(250, marks=pytest.mark.slow)])
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["../../etc/passwd", "\0", "\x1b[2J", "0", "nan", "a" * 300]),
    st.lists(st.integers(-3, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(-3, 3), max_size=2),
)


def fuzz(examples: int, check: Callable[..., None], *inputs: st.SearchStrategy[Any]) -> None:
    quiet = list(HealthCheck)
    configured = settings(max_examples=examples, deadline=None, suppress_health_check=quiet,
                      database=None, derandomize=True)  # fmt: skip
    configured(given(*inputs)(check))()


@st.composite
def damage(draw: st.DrawFn) -> Change:
    """Some flips, then perhaps a cut, an insertion, a part twice or a part less."""
    flips = draw(st.lists(st.tuples(st.floats(0, 0.999), st.integers(1, 255)), max_size=4))
    how = draw(st.sampled_from(["no more", "cut", "insert", "twice", "less"]))
    first, second = sorted(draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))
    noise = draw(st.binary(min_size=1, max_size=16))

    def apply(content: bytes) -> bytes:
        changed_bytes = bytearray(content)
        for place, bits in flips:
            if changed_bytes:
                changed_bytes[int(place * len(changed_bytes))] ^= bits
        start, end = (int(share * len(changed_bytes)) for share in (first, second))
        before, part, after = changed_bytes[:start], changed_bytes[start:end], changed_bytes[end:]
        parts = {
            "no more": (before, part, after),
            "cut": (before,),
            "insert": (before, noise, part, after),
            "twice": (before, part, part, after),
            "less": (before, after),
        }
        return b"".join(bytes(piece) for piece in parts[how])

    return apply


@st.composite
def forgery(draw: st.DrawFn) -> Callable[[Any], Any]:
    """One value anywhere in a structure becomes another, or is gone, or has company."""
    steps = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    how = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
    odd = draw(ODD)

    def apply(value: Any) -> Any:
        root = [json.loads(json.dumps(value))]
        parent: Any = root
        key: Any = 0
        for step in steps:
            inner = parent[key]
            if not isinstance(inner, dict | list) or not inner:
                break
            keys = list(inner) if isinstance(inner, dict) else range(len(inner))
            parent, key = inner, keys[step % len(keys)]
        if how == "remove" and parent is not root:
            del parent[key]
        elif how == "add" and isinstance(parent[key], dict):
            parent[key]["strange"] = odd
        else:
            parent[key] = odd
        return root[0]

    return apply


# -- structures


@FEW
def test_damaged_run_folders_are_refused_or_read(
    examples: int, tiny_runs: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(tiny_runs[0] / "tiny", tmp_path / "tiny")
    trial = tmp_path / "tiny" / "coda-p" / "trial-1"
    names = ("config.json", "result.json", "environment.json")
    whole = {name: (trial / name).read_bytes() for name in names}

    def read() -> None:
        runs = report.read_runs(tmp_path)
        found = report.rows(runs)
        for table in tables.full(found, runs):
            table.markdown()

    def check(name: str, change: Change, forge: Callable[[Any], Any], forged: bool) -> None:
        content = whole[name]
        damaged = json.dumps(forge(json.loads(content))).encode() if forged else change(content)
        (trial / name).write_bytes(damaged)
        refused_or_fine(read)
        (trial / name).write_bytes(content)

    fuzz(examples, check, st.sampled_from(names), damage(), forgery(), st.booleans())


@FEW
def test_changed_presets_and_sweeps_are_refused_or_load(
    examples: int, tiny: Path, tmp_path: Path
) -> None:
    benchmark = yaml.safe_load(tiny.read_text())
    lines = [{"methods": ["coda-p"], "field": "options.length", "values": [4, 8]}]
    sweep = {"name": "s", "benchmark": str(tiny), "settings": {"trials": 1}, "lines": lines}

    def read_benchmark(path: Path) -> None:
        loaded = load_benchmark(str(path))
        for run in runs_of(loaded, list(loaded.methods)[:3], tmp_path):
            run.config  # noqa: B018 (resolving it is the point)

    def read_sweep(path: Path) -> None:
        sweep_runs(load_sweep(str(path), None, [], ""), [], tmp_path)

    def check(of_sweep: bool, change: Change, forge: Callable[[Any], Any], forged: bool) -> None:
        path = tmp_path / "fuzzed.yaml"
        fields = sweep if of_sweep else benchmark
        text = yaml.safe_dump(forge(fields) if forged else fields).encode()
        path.write_bytes(text if forged else change(text))
        refused_or_fine(lambda: (read_sweep if of_sweep else read_benchmark)(path))

    fuzz(examples, check, st.booleans(), damage(), forgery(), st.booleans())


@FEW
def test_accepted_lists_name_existing_files(examples: int, tmp_path: Path) -> None:
    """What is accepted names files that are there."""
    for name in ("n1", "n2"):
        (tmp_path / "imagenet-r" / name).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "imagenet-r" / name / f"art_{number}.jpg").touch()
    for part, numbers in zip(LISTS, ([0, 1], [2]), strict=True):
        files = [f"data/imagenet-r/{c}/art_{n}.jpg" for c in ("n1", "n2") for n in numbers]
        listed = {"data": files, "targets": [int("n2" in file) for file in files]}
        (tmp_path / part).write_text(yaml.safe_dump(listed))
    for domain in DOMAINS:
        (tmp_path / "domainnet" / domain / "cat").mkdir(parents=True)
        for number in range(2):
            (tmp_path / "domainnet" / domain / "cat" / f"{number}.jpg").touch()
        for number, part in enumerate(("train", "test")):
            line = f"{domain}/cat/{number}.jpg 0\n"
            (tmp_path / "domainnet" / f"{domain}_{part}.txt").write_text(line)
    readers: dict[Path, Callable[[], Any]] = {
        tmp_path / LISTS[0]: lambda: imagenet_r_source(tmp_path / "imagenet-r"),
        tmp_path / LISTS[1]: lambda: imagenet_r_source(tmp_path / "imagenet-r"),
        tmp_path / "domainnet" / "real_train.txt": lambda: domainnet_source(tmp_path / "domainnet"),
    }

    def check(path: Path, change: Change) -> None:
        whole = path.read_bytes()
        path.write_bytes(change(whole))
        found = refused_or_fine(readers[path])
        path.write_bytes(whole)
        for split in () if found is None else (found.train, found.test):
            assert all(Path(path).is_file() for path in split.paths)
            assert set(split.labels) <= set(range(len(found.class_names)))

    fuzz(examples, check, st.sampled_from(list(readers)), damage())


@FEW
def test_damaged_drawings_are_refused_or_complete(examples: int) -> None:
    file = io.BytesIO()
    np.savez(file, drawings=np.zeros((6, 4, 4), np.uint8), classes=np.array(["a", "b"]))

    def check(change: Change) -> None:
        found = refused_or_fine(lambda: pocket._read(io.BytesIO(change(file.getvalue()))))
        if found is not None:
            assert len(found[0]) % len(found[1]) == 0

    fuzz(examples, check, damage())


# -- tensors


@FEW
def test_damaged_models_are_refused(examples: int, tmp_path: Path) -> None:
    """Any other byte is refused by the hash; what is accepted is the same model."""
    taught(range(2), [2], method="ncm").save(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    expected, arrays = ModelFolder(tmp_path).read()

    def check(change: Change) -> None:
        file.write_bytes(change(whole))
        found = refused_or_fine(lambda: ModelFolder(tmp_path).read())
        if found is not None:
            assert found[0] == expected
            assert all(np.array_equal(found[1][name], array) for name, array in arrays.items())

    fuzz(examples, check, damage())


@FEW
def test_forged_models_are_refused_or_load(examples: int, tmp_path: Path) -> None:
    """A description with a valid hash can have any content."""
    taught(range(2), [2], method="ncm").save(tmp_path / "whole")
    images, _ = drawings(range(2), 2, test=True)

    def check(forge: Callable[[Any], Any]) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path) as place:
            folder = Path(place) / "model"
            shutil.copytree(tmp_path / "whole", folder)
            forge_folder(folder, forge)
            refused_or_fine(lambda: ContinualClassifier.load(folder).predict_proba(images))

    fuzz(examples, check, forgery())


@FEW
def test_damaged_backbones_are_refused_or_load(examples: int, tiny: Path, tmp_path: Path) -> None:
    whole = (tiny.parent / "tiny.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")

    def check(change: Change, of_header: bool) -> None:
        path = tmp_path / "fuzzed.safetensors"
        path.write_bytes(change(whole[:header]) + whole[header:] if of_header else change(whole))
        refused_or_fine(lambda: load_backbone(str(path)))

    fuzz(examples, check, damage(), st.booleans())


@FEW
def test_damaged_checkpoints_are_skipped(examples: int, tmp_path: Path) -> None:
    """A damaged checkpoint is skipped, and the result is the same."""
    stopped(tmp_path / "whole", "coda-p", 5)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    expected = whole_run("coda-p")[0].learned_state()

    def check(name: str, change: Change) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path) as place:
            folder = Path(place) / "kept"
            shutil.copytree(tmp_path / "whole", folder)
            content = (folder / name).read_bytes()
            (folder / name).write_bytes(change(content))
            found = kept_run(folder, "coda-p")[0].learned_state()
            assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())

    fuzz(examples, check, st.sampled_from(names), damage())


@FEW
def test_forged_checkpoints_are_refused_or_resume(examples: int, tmp_path: Path) -> None:
    stopped(tmp_path / "whole", "coda-p", 5)
    names = sorted(path.name for path in (tmp_path / "whole").glob("checkpoint-*"))

    def check(forge: Callable[[Any], Any]) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path) as place:
            folder = Path(place) / "kept"
            shutil.copytree(tmp_path / "whole", folder)
            for name in names:
                content = json.loads(json.loads((folder / name).read_text())["content"])
                forged = forge(content)
                if isinstance(forged, dict) and "notes" in forged:
                    forged["notes"] = content["notes"]  # the caller's own
                text = json.dumps(forged)
                digest = hashlib.sha256(text.encode()).hexdigest()
                (folder / name).write_text(json.dumps({"sha256": digest, "content": text}))
            refused_or_fine(lambda: kept_run(folder, "coda-p"))

    fuzz(examples, check, forgery())


# -- what strangers send


MANY = pytest.mark.parametrize("examples", [25, pytest.param(10_000, marks=pytest.mark.slow)])


def wait_until_idle(pid: int) -> None:
    """Wait until a process uses no processor time for half a second."""
    before = -1.0
    while (now := cpu_seconds(pid)) - before > 0.05:
        before = now
        time.sleep(0.5)


@contextlib.contextmanager
def within_limits(pid: int, size: int) -> Iterator[None]:
    """No more memory than twice the input and 16 MB, and less than a second of processor time."""
    process = Path(f"/proc/{pid}")
    (process / "clear_refs").write_text("5")  # the peak starts again
    memory, seconds = peak_memory(pid), cpu_seconds(pid)
    yield
    assert peak_memory(pid) - memory <= 2 * size + 16 * 2**20
    assert cpu_seconds(pid) - seconds < 1


@MANY
@pytest.mark.posix
def test_readers_of_models_take_little_memory_and_time(examples: int, tmp_path: Path) -> None:
    """Damaged files, and descriptions and shapes of any content with the right hash."""
    taught(range(2), [2], method="ncm").save(tmp_path)
    file, pid = tmp_path / "model.safetensors", os.getpid()
    whole, encoder = file.read_bytes(), load_encoder("pocket")
    images, _ = drawings(range(2), 1, test=True)
    start = 8 + int.from_bytes(whole[:8], "little")
    tensors = sorted(set(json.loads(whole[8:start])) - {"__metadata__"})

    def read() -> None:
        ContinualClassifier.load(tmp_path, backbone=encoder).predict_proba(images)

    def check(how: int, change: Change, forge: Callable[[Any], Any], name: str, shape: Any) -> None:
        content = [
            lambda: change(whole),
            lambda: change(whole[:start]) + whole[start:],
            lambda: forged(whole, forge),
            lambda: forged(whole, shapes={name: shape}),
            lambda: join_file(forge(split_file(whole)[0]), split_file(whole)[1]),
        ][how]()
        file.write_bytes(content)
        with within_limits(pid, len(content)):
            refused_or_fine(read)

    read()
    refused_or_fine(lambda: check(0, lambda _: b"", lambda _: _, "", []))  # imports what it needs
    sizes = st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**40, 2**63, 2**70]), max_size=4)
    fuzz(examples, check, st.integers(0, 4), damage(), forgery(), st.sampled_from(tensors), sizes)


BODIES: dict[str, Any] = {
    "predict": {"images": [{"data": "AAAA"}]},
    "explain": {"images": [{"data": "AAAA"}]},
    "preview": {"images": [{"data": "AAAA"}]},
    "learn": {"images": [{"data": "", "label": "a"}, {"data": "=", "label": "b"}]},
    "relabel?taught_as=a": {"images": [{"data": "AAAA", "label": "b"}]},
    "rename": {"old": "a", "new": "b"},
    "merge-classes": {"classes": ["a", "b"], "into": "c"},
    "forget": {"name": "a", "confirm": True},
}


@MANY
@pytest.mark.posix
def test_json_routes_take_little_memory_and_time(examples: int, tmp_path: Path) -> None:
    taught(range(2), method="ncm").save(tmp_path / "model")
    with served(str(tmp_path / "model")) as client:
        pid: int = client.pid  # type: ignore[attr-defined]

        def check(route: str, change: Change, forge: Callable[[Any], Any], repeat: int) -> None:
            body = json.dumps(forge(BODIES[route])).encode()
            content = change(body) if repeat < 5 else body + b" " * repeat + body * (repeat - 5)
            with within_limits(pid, len(content)):
                answer = client.post(
                    f"/v1/{route}", content=content, headers={"content-type": "application/json"}
                )
                assert answer.status_code < 500, answer.text
                assert answer.headers["content-type"].endswith("json")

        for route in BODIES:  # imports what it needs
            client.post(f"/v1/{route}", json=BODIES[route])
        wait_until_idle(pid)  # the service still prepares its first lesson
        routes = st.sampled_from(list(BODIES))
        fuzz(examples, check, routes, damage(), forgery(), st.integers(0, 9))
        assert "Traceback" not in client.log()  # type: ignore[attr-defined]


# -- images


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (24, 20, 3), np.uint8)
    image = Image.fromarray(pixels)
    if kind == "GIF":
        image.save(buffer, kind, save_all=True, append_images=[image.rotate(90)])
    else:
        image.save(buffer, kind)
    return buffer.getvalue()


@FEW
def test_damaged_images_are_refused_or_decoded(examples: int, tmp_path: Path) -> None:
    kinds = {name: encoded(name) for name in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")}

    def check(kind: str, change: Change) -> None:
        path = tmp_path / "image"
        path.write_bytes(change(kinds[kind]))
        image = refused_or_fine(lambda: open_image(path))
        if image is not None:
            view = eval_view(image, AUGMENTED_VIEWS.preprocessing, "squash")
            assert np.isfinite(view).all()

    fuzz(examples, check, st.sampled_from(list(kinds)), damage())


def refused_or_fine(read: Callable[[], Any]) -> Any:
    """Return what was read, or None after a CodaError; other exceptions propagate."""
    try:
        return read()
    except CodaError:
        return None
