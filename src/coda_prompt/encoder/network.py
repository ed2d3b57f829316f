"""The ONNX graphs of one network, run with onnxruntime."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coda_prompt.encoder.description import NetworkDescription
from coda_prompt.encoder.graphs import check_graph
from coda_prompt.errors import CorruptFile
from coda_prompt.images.preprocessing import eval_view

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

Values = NDArray[np.float32]
NOT_FOR_GRAPHS = ("AzureExecutionProvider",)
"""Execution provider of onnxruntime for remote services."""


class Network:
    """One network of an encoder.

    Args:
        description: What its graphs read and give.
        folder: Where they are.
        checked: Whether they are known to be safe to open, as those in this package.
    """

    def __init__(
        self, description: NetworkDescription, folder: Path, *, checked: bool = False
    ) -> None:
        self.description, self.folder, self._is_safe = description, folder, checked
        self._lock = threading.Lock()
        self._sessions: dict[str, InferenceSession] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out sessions, which are created again: a classifier can be copied and pickled."""
        return {**vars(self), "_lock": None, "_sessions": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def view(self, image: Image.Image) -> Values:
        """Return the preprocessed pixels of an image, channels x size x size."""
        pixels = self.description.pixels
        return eval_view(image, pixels.preprocessing, pixels.resize)

    def run(self, view: Values) -> Values:
        """Return the features of a view.

        Raises:
            CorruptFile: The graph does not give what it should.
        """
        return self._run(
            self.description.file, [self.description.features], {"images": view[None]}
        )[0]

    def run_prompted(self, view: Values, prompts: Mapping[str, Values]) -> list[Values]:
        """Return the features of a view under prompts, and without; raises as `run`."""
        assert self.description.prompted is not None
        inputs = {"images": view[None], **prompts}
        return self._run(self.description.prompted.file, ["features", "plain"], inputs)

    def _run(self, file: str, outputs: list[str], inputs: Mapping[str, Values]) -> list[Values]:
        path, width = self.folder / file, self.description.width
        session = self._session(file)
        try:
            given = session.run(outputs, inputs)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise CorruptFile(path, f"cannot be run ({_first_line(error)})") from error
        for name, values in zip(outputs, given, strict=True):
            if values.size != width:
                problem = f"output '{name}' has {values.size} values, the JSON says {width}"
                raise CorruptFile(path, problem)
        return [np.asarray(values, np.float32).reshape(-1) for values in given]

    def _session(self, file: str) -> InferenceSession:
        """Return the session of a graph, created at its first use."""
        with self._lock:
            if file not in self._sessions:
                self._sessions[file] = _open(self.checked(file), self.description.precision)
            return self._sessions[file]

    def checked(self, file: str) -> Path:
        """Return the path of a graph, after checking that it refers to no file but the weights.

        Raises:
            CorruptFile: It does, or is no ONNX file.
        """
        if not self._is_safe:
            check_graph(self.folder / file, self.description.weights)
        return self.folder / file


def _open(path: Path, precision: str) -> InferenceSession:
    """Open a graph for one thread: images are run by as many threads as there are cores.

    Raises:
        CorruptFile: It is no ONNX graph that can be run here.
    """
    import onnxruntime  # a command that encodes nothing does not wait for it

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    # Less memory, and as fast (docs/lab/encoders-in-8-bits.md).
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 4
    providers = ["CPUExecutionProvider"]
    if precision == "float32":
        installed = onnxruntime.get_available_providers()
        providers = [name for name in installed if name not in NOT_FOR_GRAPHS]
    try:
        return onnxruntime.InferenceSession(path, options, providers=providers)
    except Exception as error:  # onnxruntime's exceptions share no base class
        problem = f"is not an ONNX graph that can be run ({_first_line(error)})"
        raise CorruptFile(path, problem) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
