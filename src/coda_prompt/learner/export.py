"""A learned model as one ONNX graph: pixels in, probabilities out."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from coda_prompt.errors import MissingExtra
from coda_prompt.learner.calibration import probabilities
from coda_prompt.learner.store import Description
from coda_prompt.methods import Method
from coda_prompt.storage.files import write_atomically


class _Graph(nn.Module):
    """Query pass, prompted pass, head and temperature."""

    def __init__(self, method: Method, temperature: float) -> None:
        super().__init__()
        self.method, self.temperature = method, temperature

    def forward(self, images: Tensor) -> Tensor:
        return probabilities(self.method.logits(images), self.temperature)


def export_onnx(method: Method, description: Description, path: Path) -> None:
    """Input `images` (N x C x H x W, normalised), output `probabilities` (N x classes).

    The file's metadata has the class names and the pixels the graph expects.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401 (the exporter needs it)
    except ModuleNotFoundError as error:
        raise MissingExtra("export to ONNX", "onnx") from error
    config = method.vit_config
    example = torch.zeros(2, config.channels, config.image_size, config.image_size)
    graph = _Graph(method, description.temperature).to("cpu").eval()
    with torch.no_grad():
        graph(example)  # what is made at first use is made now
    loud = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loud]
    for logger in loud:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                graph,
                (example,),
                input_names=["images"],
                output_names=["probabilities"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                verbose=False,
            )
    finally:
        for logger, level in zip(loud, levels, strict=True):
            logger.setLevel(level)
    assert program is not None
    model = program.model_proto
    for name, value in (("classes", description.classes), ("pixels", description.pixels)):
        entry = model.metadata_props.add()
        entry.key, entry.value = name, json.dumps(value)
    onnx.checker.check_model(model)
    write_atomically(path, model.SerializeToString())
