"""Write a ViT as an encoder: a plain and a prompted ONNX graph that share their weights, and JSON.

Products with weights are in 8 bits, with one scale for each output channel; the inputs of products
are quantised when a graph runs. Weights use 7 of the 8 bits: a sum of two products of 8 bits can
exceed the 16 bits that processors without VNNI have for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from coda_prompt.encoder.catalog import CATALOG
from coda_prompt.encoder.description import (
    EncoderDescription,
    NetworkDescription,
    Pixels,
    PromptedGraph,
    write_description,
)
from coda_prompt.errors import MissingExtra
from coda_prompt.images.preprocessing import Preprocessing, input_kind
from coda_prompt.research.methods.coda import component_weights
from coda_prompt.research.vit.catalog import load_backbone
from coda_prompt.research.vit.vit import ViT, ViTConfig
from coda_prompt.storage.files import write_atomically

if TYPE_CHECKING:
    from onnx import ModelProto

Precision = Literal["int8", "float32"]
OPSET = 18
BLOCKS, LENGTH = 5, 8
"""Prompted blocks, the first ones, and rows of a prompt: as in the paper."""
SHARED_BYTES = 1024
"""Constants of at least so many bytes are in the file that both graphs read."""
ALIGNMENT = 64
"""Bytes."""


class Prompted(nn.Module):
    """From an image to its features under CODA-Prompt's prompts p = sum_m alpha_m P_m (eq. 3).

    And to its features without prompts, which are the query.
    """

    def __init__(self, vit: ViT) -> None:
        super().__init__()
        self.vit = vit

    def forward(
        self, images: Tensor, components: Tensor, keys: Tensor, attention: Tensor
    ) -> tuple[Tensor, Tensor]:
        queries = self.vit(images)
        weights = component_weights(queries, keys, attention)  # blocks x B x M
        prompts = (weights @ components.flatten(2)).unflatten(2, (LENGTH, -1))
        halves = zip(*prompts.chunk(2, dim=2), strict=True)  # of each block, B x L/2 x D
        return self.vit(images, dict(enumerate(halves))), queries


def export_encoder(
    vit: ViT,
    preprocessing: Preprocessing,
    folder: Path,
    stem: str,
    *,
    name: str,
    licence: str,
    source: str,
    precision: Precision = "int8",
) -> EncoderDescription:
    """Write a ViT as an encoder: `stem`.onnx, `stem`-prompted.onnx, `stem`.weights, `stem`.json.

    Args:
        vit: A frozen ViT on the CPU.
        preprocessing: What it expects.
        folder: An existing folder.
        stem: Start of the names of the files.
        name: What the encoder is called.
        licence: Of the weights.
        source: Where the weights come from.
        precision: Of products with weights.

    Raises:
        MissingExtra: The packages for ONNX are not installed.
    """
    config, blocks = vit.config, min(BLOCKS, vit.config.depth)
    images, prompts = _example(config, blocks)
    graphs = {
        f"{stem}.onnx": _graph(vit, images, ["features"], precision),
        f"{stem}-prompted.onnx": _graph(
            Prompted(vit), images | prompts, ["features", "plain"], precision
        ),
    }
    constants: dict[bytes, int] = {}
    for graph in graphs.values():
        _share_constants(graph, constants, f"{stem}.weights")
    weights = b"".join(each + bytes(-len(each) % ALIGNMENT) for each in constants)
    write_atomically(folder / f"{stem}.weights", weights)
    for file, graph in graphs.items():
        write_atomically(folder / file, graph.SerializeToString(deterministic=True))
    pixels = Pixels(**vars(preprocessing), resize="squash" if config.channels == 1 else "crop")
    weights_fingerprint = vit.fingerprint()
    network = NetworkDescription(
        file=f"{stem}.onnx",
        weights=f"{stem}.weights",
        prompted=PromptedGraph(
            file=f"{stem}-prompted.onnx", blocks=blocks, length=LENGTH, width=config.width
        ),
        precision=precision,
        pixels=pixels,
        width=config.width,
    )
    description = EncoderDescription(
        format=1,
        name=name,
        kind=input_kind(config.channels),
        licence=licence,
        source=source,
        fingerprint=encoder_fingerprint(weights_fingerprint, pixels, precision),
        weights_fingerprint=weights_fingerprint,
        networks=(network,),
    )
    write_description(folder / f"{stem}.json", description)
    return description


def export_backbone(text: str, folder: Path, precision: Precision = "int8") -> None:
    """Write a backbone as an encoder.

    Args:
        text: As for `load_backbone`; what has to be downloaded is downloaded.
        folder: An existing folder.
        precision: Of products with weights.

    Raises:
        CodaError: As `load_backbone`.
    """
    backbone = load_backbone(text)
    name, path = backbone.name, backbone.path
    entry = CATALOG.get(name.partition("@")[0])
    if entry is None and path is not None:
        name = path.name
    file = path.name if path is not None else f"{entry and (entry.repository or entry.file)}"
    export_encoder(
        *(backbone.vit, backbone.preprocessing, folder, "encoder"),
        name=name,
        licence=entry.licence if entry is not None and path is None else "unknown",
        source=f"{file}, sha256 {backbone.sha256}",
        precision=precision,
    )


def encoder_fingerprint(weights: str, pixels: Pixels, precision: Precision) -> str:
    """Return the fingerprint of an encoder: of its weights, its preprocessing and its precision."""
    parts = json.dumps([weights, pixels.model_dump(), precision], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()


def _example(config: ViTConfig, blocks: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return an image and prompts as inputs of a graph."""
    count, size = 30, config.image_size
    prompts = {"components": torch.ones(blocks, count, LENGTH, config.width)}
    prompts |= {name: torch.ones(blocks, count, config.width) for name in ("keys", "attention")}
    return {"images": torch.zeros(1, config.channels, size, size)}, prompts


def _graph(
    module: nn.Module, inputs: dict[str, Tensor], outputs: list[str], precision: Precision
) -> ModelProto:
    """Return a module as a graph with folded constants, in the given precision.

    Only constants are quantised: weights are transposed by folding.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401 (the exporter needs it)
        from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ModuleNotFoundError as error:
        raise MissingExtra("writing an encoder", "research") from error
    count = torch.export.Dim("components")
    shapes: Sequence[Any] = [{} if name == "images" else {1: count} for name in inputs]
    with tempfile.TemporaryDirectory() as temporary, quiet_exporter(), torch.no_grad():
        exported, folded, quantised = (Path(temporary, f"{part}.onnx") for part in "efq")
        program = torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=tuple(shapes),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        onnx.save(program.model_proto, exported)
        options = SessionOptions()
        options.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(folded)
        options.log_severity_level = 4
        InferenceSession(exported, options, providers=["CPUExecutionProvider"])
        if precision == "float32":
            return onnx.load(folded)
        quantize_dynamic(
            *(folded, quantised),
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )
        return onnx.load(quantised)


def _share_constants(graph: ModelProto, constants: dict[bytes, int], file: str) -> None:
    """Let the large constants of a graph refer to a file, where equal ones are stored once.

    Args:
        graph: Is changed.
        constants: Those in the file, with their places, in order; new ones are added.
        file: Its name.
    """
    from onnx import TensorProto

    graph.graph.ClearField("value_info")
    for part in (graph, graph.graph, *graph.graph.node, *graph.graph.initializer):
        part.ClearField("metadata_props")  # lines of the source
    for tensor in graph.graph.initializer:
        content = tensor.raw_data
        if len(content) < SHARED_BYTES:
            continue
        place = constants.setdefault(content, _aligned_end(constants))
        entries = {"location": file, "offset": str(place), "length": str(len(content))}
        tensor.data_location = TensorProto.EXTERNAL
        tensor.ClearField("raw_data")
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)


def _aligned_end(constants: dict[bytes, int]) -> int:
    """Return the place of the next constant, aligned so that the file can be mapped to memory."""
    if not constants:
        return 0
    last, place = next(reversed(constants.items()))
    return place + -(-len(last) // ALIGNMENT) * ALIGNMENT


@contextlib.contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silence the exporter's log messages and warnings, which do not concern the user."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
