"""Export to ONNX: one graph from preprocessed pixels to probabilities."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coda_prompt.errors import MissingExtra
from coda_prompt.learner.predictor import Predictor
from coda_prompt.storage.files import write_atomically


class PredictionGraph(nn.Module):
    """From preprocessed images, B x C x H x W, to probabilities, B x classes, and typicality, B."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.method, self.predictor = predictor.method, predictor
        self.scorer = copy.deepcopy(predictor.scorer).float()

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits, features = self.predictor.outputs(images)
        return self.predictor.calibrated(logits), self.scorer(features)


def export_onnx(predictor: Predictor, preprocessing: dict[str, Any], path: Path) -> None:
    """Write the predictor's graph: input `images`, outputs `probabilities` and `typicality`.

    `images` are N x C x H x W, normalized; `probabilities` are N x classes; `typicality` is N: an
    image is unknown if it is below the share of images of known classes to reject, such as 0.05.
    The metadata of the file has the class names (`classes`) and the preprocessing (`pixels`) as
    JSON.

    Raises:
        MissingExtra: The packages for ONNX are not installed.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401 (the exporter needs it)
    except ModuleNotFoundError as error:
        raise MissingExtra("export to ONNX", "onnx") from error
    size = predictor.preprocessing.size
    example = torch.zeros(2, predictor.preprocessing.channels, size, size)
    graph = PredictionGraph(predictor).eval().to("cpu")
    with torch.no_grad(), _quiet_exporter():
        graph(example)  # compute lazily created buffers before tracing
        program = torch.onnx.export(
            graph,
            (example,),
            input_names=["images"],
            output_names=["probabilities", "typicality"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    for name, value in (("classes", predictor.classes), ("pixels", preprocessing)):
        entry = model.metadata_props.add()
        entry.key, entry.value = name, json.dumps(value)
    onnx.checker.check_model(model)
    write_atomically(path, model.SerializeToString())


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence the exporter's log messages and warnings, which do not concern the user."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
