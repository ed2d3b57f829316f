"""Encoders that no one here made: small graphs with a JSON file, good ones and forged ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from coda_prompt.encoder.encoder import load_encoder
from coda_prompt.errors import CodaError, CorruptFile, MissingData
from coda_prompt.images.preprocessing import Preprocessing, eval_view

IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8))
PIXELS = {
    **{"size": 8, "channels": 3, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.3]},
    **{"interpolation": "bilinear", "resize": "squash"},
}
NETWORK = {"file": "mean.onnx", "precision": "float32", "pixels": PIXELS, "width": 3}
JSON: dict[str, Any] = {
    **{"format": 1, "name": "channel means", "kind": "photograph", "licence": "none"},
    **{"source": "a test", "networks": [NETWORK]},
}


def write_means(folder: Path) -> Path:
    """An encoder whose features are the mean of each channel, 1 x 3 x 1 x 1."""
    graph = helper.make_graph(
        [helper.make_node("GlobalAveragePool", ["images"], ["features"])],
        "means",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, None)],
    )
    onnx.save(versioned(graph), folder / "mean.onnx")
    (folder / "mean.json").write_text(json.dumps(JSON))
    return folder / "mean.onnx"


def write_projection(folder: Path, **placed: str) -> Path:
    """An encoder whose weights may be in another file."""
    folder.mkdir(exist_ok=True)
    weights = np.arange(192 * 4, dtype=np.float32).reshape(192, 4) / 1000
    tensor = numpy_helper.from_array(weights, "weights")
    if placed:
        (folder / "projection.weights").write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in placed.items():
            tensor.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["images"], ["flat"]),
            helper.make_node("MatMul", ["flat", "weights"], ["projected"]),
        ],
        "projection",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("projected", TensorProto.FLOAT, [1, 4])],
        [tensor],
    )
    onnx.save(versioned(graph), folder / "projection.onnx")
    network = NETWORK | {"file": "projection.onnx", "features": "projected", "width": 4}
    if placed:
        network["weights"] = "projection.weights"
    described = JSON | {"name": "projection", "networks": [network]}
    (folder / "encoder.json").write_text(json.dumps(described))
    return folder


def versioned(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def view() -> NDArray[np.float32]:
    preprocessing = Preprocessing(8, 3, (0.5, 0.4, 0.3), (0.2, 0.2, 0.3), "bilinear")
    return eval_view(IMAGE, preprocessing, "squash")


def test_a_graph_with_a_json_file_beside_it(tmp_path: Path) -> None:
    encoder = load_encoder(str(write_means(tmp_path)))
    encoded, means = encoder.encode(IMAGE), view().mean(axis=(1, 2))
    assert np.allclose(encoded.features, means / np.linalg.norm(means), atol=1e-5)
    assert np.array_equal(encoded.plain, encoded.features)
    assert (encoder.name, encoder.width) == ("channel means", 3)
    assert (encoder.can_prompt, encoder.prior(), encoder.min_side) == (False, None, 18)


def test_a_folder_with_weights_in_a_file_of_their_own(tmp_path: Path) -> None:
    folder = write_projection(tmp_path / "encoder", location="projection.weights")
    encoder = load_encoder(str(folder))
    encoded = encoder.encode(IMAGE)
    projected = view().reshape(-1) @ np.arange(192 * 4).reshape(192, 4) / 1000
    assert np.allclose(encoded.features, projected / np.linalg.norm(projected), atol=1e-5)
    encoder.save(tmp_path / "copy")
    again = load_encoder(str(tmp_path / "copy"))
    assert np.array_equal(again.encode(IMAGE).features, encoded.features)
    assert again.fingerprint == encoder.fingerprint


def test_the_fingerprint_of_a_foreign_encoder_depends_on_graph_weights_and_pixels(
    tmp_path: Path,
) -> None:
    folder = write_projection(tmp_path / "encoder", location="projection.weights")
    found = [load_encoder(str(folder)).fingerprint]
    weights = bytearray((folder / "projection.weights").read_bytes())
    weights[100] ^= 1
    (folder / "projection.weights").write_bytes(weights)
    found.append(load_encoder(str(folder)).fingerprint)
    text = (folder / "encoder.json").read_text().replace("bilinear", "bicubic")
    (folder / "encoder.json").write_text(text)
    found.append(load_encoder(str(folder)).fingerprint)
    assert len(set(found)) == 3


def changed(**fields: Any) -> dict[str, Any]:
    return JSON | fields


def network(**fields: Any) -> dict[str, Any]:
    return JSON | {"networks": [NETWORK | fields]}


@pytest.mark.parametrize(
    "forged",
    [
        {},
        changed(format=2),
        changed(networks=[]),
        changed(networks=[NETWORK] * 5),
        changed(kind="sculpture"),
        changed(fingerprint="../.."),
        changed(prompt="more"),
        network(file="../mean.onnx"),
        network(file="/etc/passwd"),
        network(file=".mean.onnx"),
        network(width=0),
        network(width=10**9),
        network(width=True),
        network(small={"below": 64}),
        network(small={"below": 64, "weight": 2.0}),
        network(pixels=PIXELS | {"size": 10**6}),
        network(pixels=PIXELS | {"channels": 2}),
        network(pixels=PIXELS | {"mean": [0.5]}),
        network(pixels=PIXELS | {"std": [0.2, 0.2, 0.0]}),
        network(pixels=PIXELS | {"interpolation": "magic"}),
        network(pixels=PIXELS | {"resize": "stretch"}),
    ],
)
def test_forged_descriptions_are_refused(forged: dict[str, Any], tmp_path: Path) -> None:
    path = write_means(tmp_path)
    (tmp_path / "mean.json").write_text(json.dumps(forged))
    with pytest.raises(CorruptFile, match=r"mean\.json: does not describe an encoder"):
        load_encoder(str(path))


@pytest.mark.parametrize("text", ["", "{", "[" * 10**5, '{"format": NaN}', "\0"])
def test_files_that_are_no_json_are_refused(text: str, tmp_path: Path) -> None:
    path = write_means(tmp_path)
    (tmp_path / "mean.json").write_text(text)
    with pytest.raises(CorruptFile, match="does not describe an encoder"):
        load_encoder(str(path))


def other_input(folder: Path) -> None:
    text = (folder / "mean.json").read_text()
    (folder / "mean.json").write_text(text.replace('"size": 8', '"size": 9'))


def other_output(folder: Path) -> None:
    described = network(features="logits")
    (folder / "mean.json").write_text(json.dumps(described))


def other_width(folder: Path) -> None:
    (folder / "mean.json").write_text(json.dumps(network(width=4)))


def truncated(folder: Path) -> None:
    content = (folder / "mean.onnx").read_bytes()
    (folder / "mean.onnx").write_bytes(content[:-7])


def no_graph(folder: Path) -> None:
    (folder / "mean.onnx").write_bytes(b"\x89PNG" * 100)


def empty(folder: Path) -> None:
    (folder / "mean.onnx").write_bytes(b"")


def absent(folder: Path) -> None:
    (folder / "mean.onnx").unlink()


@pytest.mark.parametrize(
    "forge", [other_input, other_output, other_width, truncated, no_graph, empty, absent]
)
def test_graphs_that_do_not_fit_are_refused(forge: Callable[[Path], None], tmp_path: Path) -> None:
    path = write_means(tmp_path)
    forge(tmp_path)
    with pytest.raises(CodaError, match=r"mean\.onnx: ") as caught:
        load_encoder(str(path)).encode(IMAGE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "place", ["../secret", "/etc/passwd", "other.weights", "sub/projection.weights", ""]
)
def test_weights_elsewhere_are_not_read(place: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(192 * 4 * 4))
    folder = write_projection(tmp_path / "encoder", location=place)
    with pytest.raises(CorruptFile, match="has weights in another file"):
        load_encoder(str(folder)).encode(IMAGE)


def test_weights_of_a_constant_node_elsewhere_are_not_read(tmp_path: Path) -> None:
    folder = write_projection(tmp_path / "encoder", location="../secret")
    model = onnx.load(folder / "projection.onnx", load_external_data=False)
    tensor = model.graph.initializer.pop()
    model.graph.node.insert(0, helper.make_node("Constant", [], ["weights"], value=tensor))
    (folder / "projection.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(CorruptFile, match="has weights in another file"):
        load_encoder(str(folder)).encode(IMAGE)


@pytest.mark.posix
@pytest.mark.parametrize("name", ["encoder.json", "projection.onnx", "projection.weights"])
def test_links_are_not_followed(name: str, tmp_path: Path) -> None:
    folder = write_projection(tmp_path / "encoder", location="projection.weights")
    os.replace(folder / name, tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(CorruptFile, match="symbolic link"):
        load_encoder(str(folder)).encode(IMAGE)


def test_a_folder_without_an_encoder_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"encoder\.json: the description of an encoder cannot"):
        load_encoder(str(tmp_path))


def test_several_networks_stand_side_by_side_with_less_weight_for_small_images(
    tmp_path: Path,
) -> None:
    write_means(tmp_path)
    folder = write_projection(tmp_path)
    described = json.loads((folder / "encoder.json").read_text())
    small = {"below": 21, "weight": 0.5}
    described["networks"] = [described["networks"][0], NETWORK | {"small": small}]
    (folder / "encoder.json").write_text(json.dumps(described))
    both = load_encoder(str(folder))
    assert both.width == 7
    assert both.prompt_shape is None
    for image, weight in ((IMAGE, 0.5), (IMAGE.resize((40, 21)), 1.0)):
        features = both.encode(image).features
        lengths = np.linalg.norm(features[:4]), np.linalg.norm(features[4:])
        assert lengths[1] / lengths[0] == pytest.approx(weight, rel=1e-5)
        assert np.linalg.norm(features) == pytest.approx(1)
        means = load_encoder(str(tmp_path / "mean.onnx")).encode(image).features
        assert np.allclose(features[4:] / lengths[1], means, atol=1e-6)
