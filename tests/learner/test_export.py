"""The exported graph and its program answer as the classifier does, without coda-prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small import coda

from coda_prompt.encoder.encoder import Encoder, load_encoder
from coda_prompt.errors import BadOption, NotLearned
from coda_prompt.images.labelled import labelled
from coda_prompt.learner.export import export_onnx
from coda_prompt.learner.lesson import LessonOptions, teach
from coda_prompt.learner.model import CLASSIFIERS, LearnedModel, LinearHead
from coda_prompt.learner.predict import answers
from coda_prompt.learner.records import Options

pytest.importorskip("onnx")
ALONE = "import sys; sys.modules['coda_prompt'] = sys.modules['torch'] = None; import predict; "
ORIENTATION = 0x0112


def scene(seed: int, width: int = 160, height: int = 120) -> Image.Image:
    """Stripes and coloured blobs; scenes of one seed modulo 4 resemble each other."""
    random = np.random.default_rng(seed)
    tones = random.integers(0, 256, (6, 6, 3)).astype(np.uint8)
    tones[:: 1 + seed % 4] = (60 * (seed % 4), 40, 200)
    return Image.fromarray(tones).resize((width, height), Image.Resampling.BICUBIC)


def mixed_files(folder: Path) -> list[Path]:
    """Write images of many sizes, modes and formats."""
    grey = np.asarray(scene(4).convert("L"))
    transparent = scene(6)
    transparent.putalpha(Image.fromarray(np.tile(np.arange(160, dtype=np.uint8), (120, 1))))
    noise = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    files: dict[str, Image.Image] = {
        "portrait.jpg": scene(0, 90, 400),
        "landscape.jpg": scene(1, 700, 200),
        "tiny.png": scene(2, 5, 9),
        "large.jpg": scene(3, 2400, 1800),
        "sixteen-bit.png": Image.fromarray(grey.astype(np.uint16) * 257),
        "float.tif": Image.fromarray(grey.astype(np.float32) / 255),
        "transparent.png": transparent,
        "palette.gif": scene(7).quantize(16),
        "cmyk.jpg": scene(8).convert("CMYK"),
        "grey.jpg": scene(9).convert("L"),
        "noise.png": Image.fromarray(noise),
    }
    for name, image in files.items():
        image.save(folder / name, transparency=3) if image.mode == "P" else image.save(
            folder / name
        )
    for value in range(2, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = value
        scene(10 + value, 200, 150).save(folder / f"turned-{value}.jpg", exif=exif)
    return sorted(folder.iterdir())


def two_networks(folder: Path) -> Encoder:
    """Two networks of different sizes, of which one counts less for small images."""
    networks = []
    for name in ("photo-vit", "pocket"):
        encoder = load_encoder(name)
        encoder.save(folder / name)
        described = json.loads((folder / name / "encoder.json").read_text())
        networks += described["networks"]
        for path in (folder / name).iterdir():
            if path.name != "encoder.json":
                path.rename(folder / path.name)
    for network in networks:
        network.pop("prompted", None)
    networks[1]["small"] = {"below": 100, "weight": 0.3}
    described |= {"name": "two", "fingerprint": None, "networks": networks}
    (folder / "encoder.json").write_text(json.dumps(described))
    return load_encoder(str(folder))


def taught(encoder: Encoder, method: str) -> LearnedModel:
    """Return a model of four classes; prompts and the head of `coda-p` are random."""
    options = Options(removable=False, seed=0)
    model = LearnedModel.empty(encoder, method, options)
    random = np.random.default_rng(0)
    if method.startswith("coda-p"):
        assert encoder.prompt_shape is not None
        blocks, length, width = encoder.prompt_shape
        shapes = {"components": (6, length, width), "keys": (6, width), "attention": (6, width)}
        trained = {
            f"{name}.frozen": random.normal(0, 0.3, (blocks, *shape)).astype(np.float32)
            for name, shape in shapes.items()
        }
        similar = LearnedModel.empty(encoder, CLASSIFIERS[method] or "slda", options)
        model = replace(model, trained=trained, classifier=similar.classifier)
    seeds = range(100, 132)
    data = labelled([scene(seed) for seed in seeds], [f"class {seed % 4}" for seed in seeds])
    model, _ = teach(model, data, LessonOptions())
    if method == "coda-p":
        weight = random.normal(0, 8, (4, encoder.width)).astype(np.float32)
        head = LinearHead(weight, np.ones(4, np.float32))
        model = replace(model, classifier=head, temperature=1.3)
    return model


def run_program(model: Path, images: list[Path]) -> list[dict[str, Any]]:
    """Run the program beside a graph in a process that has neither coda-prompt nor torch."""
    code = f"{ALONE} sys.argv = sys.argv[1:]; predict.main()"
    command = [sys.executable, "-c", code, "predict.py", str(model), *map(str, images)]
    done = subprocess.run(command, cwd=model.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


METHODS = ("ranpac", "slda", "ncm", "coda-p", "coda-p-ranpac")
CASES = [
    *(("pocket", method) for method in METHODS),
    *(("photo-vit", method) for method in ("slda", "coda-p-ranpac")),
    *(("two", method) for method in ("ranpac", "ncm")),
]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_program_agrees_with_the_classifier(name: str, method: str, tmp_path: Path) -> None:
    for folder in ("encoder", "images", "out"):
        (tmp_path / folder).mkdir()
    images = mixed_files(tmp_path / "images")
    encoder = two_networks(tmp_path / "encoder") if name == "two" else load_encoder(name)
    model = taught(encoder, method)
    export_onnx(model, tmp_path / "out" / "model.onnx")
    rows = run_program(tmp_path / "out" / "model.onnx", images)
    expected = [each for _, each in answers(model, images, typicality=True)]
    assert len(rows) == len(expected) == 18
    for row, own in zip(rows, expected, strict=True):
        probabilities = [row["top"][label] for label in model.classes]
        assert probabilities == pytest.approx(own.probabilities.tolist(), abs=5e-3), row["path"]
        assert row["typicality"] == pytest.approx(own.typicality, abs=2e-3), row["path"]
    assert np.ptp([each.probabilities for each in expected], axis=0).max() > 0.05
    assert len({each.typicality for each in expected}) > 3


def test_command_writes_the_graph_and_its_program(tmp_path: Path) -> None:
    for number in range(24):
        folder = tmp_path / "data" / f"class {number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        scene(number).save(folder / f"{number}.png")
    image = tmp_path / "data" / "class 1" / "1.png"
    for arguments in (
        ("learn", "model", "data", "--backbone", "pocket", "--method", "slda"),
        ("export", "model", "out.onnx"),
    ):
        assert coda(*arguments, cwd=tmp_path).returncode == 0
    shown = coda("predict", "model", str(image), "--json", "--unknown", "auto", cwd=tmp_path)
    (own,) = json.loads(shown.stdout)
    (row,) = run_program(tmp_path / "out.onnx", [image])
    assert next(iter(row["top"])) == own["best"]
    assert row["top"][own["best"]] == pytest.approx(own["probability"], abs=1e-3)
    assert row["typicality"] == pytest.approx(own["typicality"], abs=2e-3)


def test_export_replaces_its_program_and_no_other(tmp_path: Path) -> None:
    model = taught(load_encoder("pocket"), "ncm")
    for _ in range(2):
        export_onnx(model, tmp_path / "model.onnx")
    (tmp_path / "predict.py").write_text("# mine\n")
    with pytest.raises(BadOption, match=r"another predict\.py"):
        export_onnx(model, tmp_path / "second.onnx")
    assert not (tmp_path / "second.onnx").exists()
    assert (tmp_path / "predict.py").read_text() == "# mine\n"


def test_a_model_without_classes_is_not_exported(tmp_path: Path) -> None:
    empty = LearnedModel.empty(load_encoder("pocket"), "ncm", Options(removable=False, seed=0))
    with pytest.raises(NotLearned):
        export_onnx(empty, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_an_export_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import numpy as np, pathlib; "
        "from coda_prompt import ContinualClassifier; "
        "images = np.random.default_rng(0).integers(0, 256, (8, 28, 28), dtype=np.uint8); "
        "classifier = ContinualClassifier('pocket', verbose=False); "
        "classifier.learn(images, ['a', 'b'] * 4); classifier.export_onnx('model.onnx')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "predict.py"}
