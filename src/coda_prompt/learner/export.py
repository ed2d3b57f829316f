"""Export to ONNX: one graph from pixels to probabilities and typicality, and a program for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coda_prompt.encoder.description import NetworkDescription
from coda_prompt.encoder.encoder import Encoder, Prompts
from coda_prompt.errors import BadOption, MissingExtra, NotLearned
from coda_prompt.learner.model import LearnedModel
from coda_prompt.statistics.algebra import Array
from coda_prompt.statistics.classifier import ABSENT, Classifier
from coda_prompt.statistics.typicality import BINS, FAR, UnknownScorer
from coda_prompt.storage.files import write_atomically

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

PROGRAM = "predict.py"
"""Written beside the graph."""
MIN_OPSET = 13
"""First version of ONNX in which the operators below have the form they have here."""
TONES = """
    flat = Reshape (pixels, row)
    tone = ReduceMean <axes = [1]> (flat)
    untoned = Sub (flat, tone)
    untoned_squares = Mul (untoned, untoned)
    variance = ReduceMean <axes = [1]> (untoned_squares)
    contrast = Sqrt (variance)
    lower = Slice (pixels, one, end, two)
    upper = Slice (pixels, start, minus_one, two)
    down_differences = Sub (lower, upper)
    down_sizes = Abs (down_differences)
    down_rows = Reshape (down_sizes, row)
    down = ReduceMean <axes = [1]> (down_rows)
    right = Slice (pixels, one, end, three)
    left = Slice (pixels, start, minus_one, three)
    across_differences = Sub (right, left)
    across_sizes = Abs (across_differences)
    across_rows = Reshape (across_sizes, row)
    across = ReduceMean <axes = [1]> (across_rows)
    tones = Concat <axis = 1> (tone, contrast, down, across)
"""
"""`Encoder.encode` of drawings: from `pixels` to `tones`."""
ANSWERS = """
    products = MatMul (mapped, weight)
    scores = Add (products, bias)
    probabilities = Softmax <axis = 1> (scores)

    centred = Sub (known, mean)
    white = MatMul (centred, whitening)
    squares = Mul (white, white)
    lengths = MatMul (squares, halves)
    to_means = MatMul (white, white_means)
    near = Sub (to_means, half_squares)
    nearest, nearest_class = TopK (near, one)
    farther = Sub (near, nearest)
    shares = Exp (farther)
    all_shares = ReduceSum (shares, columns)
    log_shares = Log (all_shares)
    near_all = Add (nearest, log_shares)
    near_both = Concat <axis = 1> (near_all, nearest)
    distances = Add (near_both, lengths)

    from_mean = Sub (distances, scale_mean)
    standardised = Div (from_mean, scale_deviation)
    limited = Min (standardised, limits)
    score = ReduceSum (limited, columns)
    squashed = Softsign (score)
    scaled = Mul (squashed, half_bins)
    position = Sub (scaled, steps)
    passed = Clip (position, zero, unit)
    typicality = MatMul (passed, histogram)
"""
"""From `mapped` features to probabilities as in `Classifier`, and from the features that tell what
is `known` to typicality as in `UnknownScorer`. The plain distance is half of the one there."""


def export_onnx(model: LearnedModel, path: Path) -> None:
    """Write a model with its encoder as one ONNX graph, and `predict.py` beside it.

    The graph takes one image, because activations of 8 bits are scaled by what is in the batch:
    `images`, 1 x channels x size x size; of two networks `network_1_images` and `network_2_images`,
    and if one of them counts less for small images, `side`, 1: the pixels of the shorter side. It
    gives `probabilities`, 1 x classes, and `typicality`, 1: an image is unknown if it is below the
    share of images of known classes to reject, such as 0.05. Metadata are JSON: the names of the
    classes (`classes`), how an image becomes each input (`pixels`, which `predict.py` does), the
    method and the encoder.

    Raises:
        BadOption: There is another `predict.py`.
        MissingExtra: The package for ONNX files is not installed.
        NotLearned: No class has been learned yet.
    """
    program, content = path.with_name(PROGRAM), _program()
    if program.exists() and program.read_bytes().splitlines()[:1] != content.splitlines()[:1]:
        problem = f"the folder has another {PROGRAM}, which would be replaced; name another folder"
        raise BadOption("the export", "out", problem)
    write_atomically(path, onnx_graph(model))
    write_atomically(program, content)


def onnx_graph(model: LearnedModel) -> bytes:
    """Return the content of the file that `export_onnx` writes.

    Raises:
        MissingExtra: The package for ONNX files is not installed.
        NotLearned: No class has been learned yet.
    """
    try:
        from onnx import checker, compose
    except ModuleNotFoundError as error:
        raise MissingExtra("export to ONNX", "onnx") from error
    if not model.tasks:
        raise NotLearned([], [])
    *networks, head = _of_one_version([*_networks(model.encoder, model.prompts), _head(model)])
    joined, outputs = networks[0], []
    for other in networks[1:]:
        joined = compose.merge_models(joined, other, io_map=[])
    for number, network in enumerate(model.encoder.networks, 1):
        outputs.append((f"network_{number}_{network.description.features}", f"features_{number}"))
        if model.prompts is not None:
            outputs.append((f"network_{number}_plain", f"plain_{number}"))
    answers = ["probabilities", "typicality"]
    graph = compose.merge_models(joined, head, io_map=outputs, outputs=answers)
    _read_images_as_pixels(graph.graph)
    images = [each.name for each in graph.graph.input if each.name != "side"]
    pixels = [
        {"input": name, **network.description.pixels.model_dump()}
        for name, network in zip(images, model.encoder.networks, strict=True)
    ]
    metadata = {
        "classes": model.classes,
        "pixels": pixels,
        "method": model.method,
        "encoder": model.encoder.name,
        "fingerprint": model.encoder.fingerprint,
    }
    for name, value in metadata.items():
        graph.metadata_props.add(key=name, value=json.dumps(value))
    checker.check_model(graph)
    return graph.SerializeToString()


def _read_images_as_pixels(graph: GraphProto) -> None:
    """Let what reads `pixels` read the input of the network."""
    kept, images = [each for each in graph.input if each.name != "pixels"], graph.input[0].name
    if len(kept) < len(graph.input):
        del graph.input[:]
        graph.input.extend(kept)
        for node in graph.node:
            node.input[:] = [images if name == "pixels" else name for name in node.input]


def _shaped(name: str, encoder: Encoder) -> str:
    """Return the declaration of an input for the pixels of an encoder of one network."""
    pixels = encoder.pixels[0]
    return f"float[1, {pixels.channels}, {pixels.size}, {pixels.size}] {name}"


def _program() -> bytes:
    return (resources.files("coda_prompt") / "assets" / PROGRAM).read_bytes()


def _networks(encoder: Encoder, prompts: Prompts | None) -> list[ModelProto]:
    """Return the graphs of an encoder, for one image, with prompts as constants."""
    import onnx

    graphs = []
    for number, network in enumerate(encoder.networks, 1):
        file, constants = network.description.file, {}
        if prompts is not None and network.description.prompted is not None:
            file, constants = network.description.prompted.file, vars(prompts)
        model = onnx.load(network.checked(file))
        model.ClearField("metadata_props")
        images = next(each for each in model.graph.input if each.name == "images")
        pixels = network.description.pixels
        shape = (1, pixels.channels, pixels.size, pixels.size)
        del model.graph.input[:]
        model.graph.input.append(
            onnx.helper.make_tensor_value_info("images", images.type.tensor_type.elem_type, shape)
        )
        _add_constants(model.graph, constants)
        several = len(encoder.networks) > 1
        prefix = f"network_{number}_"
        graphs.append(onnx.compose.add_prefix(model, prefix, rename_inputs=several))
    return graphs


def _of_one_version(models: Sequence[ModelProto]) -> list[ModelProto]:
    """Convert graphs to the newest version of ONNX among them."""
    from onnx import version_converter

    versions = {"": MIN_OPSET}
    for model in models:
        for each in model.opset_import:
            versions[each.domain] = max(each.version, versions.get(each.domain, 1))
    ir_version = max(model.ir_version for model in models)
    converted = []
    for model in models:
        if any(not each.domain and each.version < versions[""] for each in model.opset_import):
            model = version_converter.convert_version(model, versions[""])
        del model.opset_import[:]
        for domain, version in versions.items():
            model.opset_import.add(domain=domain, version=version)
        model.ir_version = ir_version
        converted.append(model)
    return converted


def _head(model: LearnedModel) -> ModelProto:
    """Return the graph from features of the networks to probabilities and typicality."""
    from onnx import parser

    described = [network.description for network in model.encoder.networks]
    names = ["features"] if model.prompts is None else ["features", "plain"]
    inputs = [
        f"float[1, {each.width}] {name}_{number}"
        for name in names
        for number, each in enumerate(described, 1)
    ]
    inputs += ["float[1] side"] if any(each.small for each in described) else []
    outputs = f"float[1, {len(model.classes)}] probabilities, float[1] typicality"
    lines = [line for name in names for line in _joined(name, described)]
    constants = {**_classifier_constants(model), **_typicality_constants(model.scorer)}
    if "projection" in constants:
        lines += ["projected = MatMul (features, projection)", "mapped = Relu (projected)"]
    else:  # features have unit length already
        lines.append("mapped = Identity (features)")
    known = names[-1]
    if model.encoder.kind == "drawing":
        inputs.append(_shaped("pixels", model.encoder))
        lines += [TONES, f"known = Concat <axis = 1> ({known}, tones)"]
        constants["two"] = np.array([2])
        constants["three"] = np.array([3])
        constants["end"] = np.array([2**31])
        constants["minus_one"], constants["start"] = np.array([-1]), np.array([0])
    else:
        lines.append(f"known = Identity ({known})")
    lines.append(ANSWERS)
    head = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {MIN_OPSET}]>'
        f"head ({', '.join(inputs)}) => ({outputs}) {{ {' '.join(lines)} }}"
    )
    _add_constants(head.graph, constants)
    return head


def _joined(name: str, networks: Sequence[NetworkDescription]) -> list[str]:
    """Return the lines that make one vector of the features of networks, as the encoder does."""
    lines, parts = [], []
    for number, network in enumerate(networks, 1):
        row, part = f"{name}_row_{number}", f"{name}_unit_{number}"
        lines += [f"{row} = Reshape ({name}_{number}, row)", _unit(row, part)]
        if network.small is not None:
            lines += [
                f"below_{number} = Constant <value_float = {float(network.small.below)}> ()",
                f"lower_{number} = Constant <value_float = {float(network.small.weight)}> ()",
                f"is_small_{number} = Less (side, below_{number})",
                f"weight_{number} = Where (is_small_{number}, lower_{number}, unit)",
                f"weighted_{number} = Mul ({part}, weight_{number})",
            ]
            part = f"weighted_{number}"
        parts.append(part)
    lines.append(f"{name}_joined = Concat <axis = 1> ({', '.join(parts)})")
    return [*lines, _unit(f"{name}_joined", name)]


def _unit(values: str, result: str) -> str:
    return f"{result} = LpNormalization <axis = 1> ({values})"


def _classifier_constants(model: LearnedModel) -> dict[str, Array]:
    classifier, weight, bias = model.classifier, model.classifier.weight, model.classifier.bias
    constants = {}
    if isinstance(classifier, Classifier):
        options, absent = classifier.options, classifier.moments.counts == 0
        weight = np.where(absent[:, None], 0, weight)
        bias = np.where(absent, ABSENT[options.covariance], bias)
        if options.features == "random":
            constants["projection"] = classifier.mapping.projection
    temperature = model.temperature
    return {**constants, "weight": weight.T / temperature, "bias": bias / temperature}


def _typicality_constants(scorer: UnknownScorer) -> dict[str, Array]:
    gaussians, (means, deviations) = scorer.gaussians, scorer.scale.values
    within, white_means = gaussians.spread.whitening, gaussians.white_means
    outside = within[:0] if gaussians.background is None else gaussians.background.whitening
    return {
        "mean": gaussians.mean,
        # side by side: the covariance within classes and that of all images
        "whitening": np.concatenate([within, outside]).T,
        "halves": np.repeat([[-0.5, -0.5], [0.5, 0]], (len(within), len(outside)), axis=0),
        "white_means": np.pad(white_means, ((0, 0), (0, len(outside)))).T,
        "half_squares": np.square(white_means).sum(axis=1) / 2,
        # the plain distance counts beyond FAR standard deviations only
        "scale_mean": (means - [0, FAR] * deviations) / [1, 2],
        "scale_deviation": deviations / [1, 2] * scorer.scale.depth,
        "limits": np.array([np.inf, 0]),
        "histogram": scorer.shares,
        "steps": np.arange(BINS) - BINS / 2,
        "half_bins": np.array(BINS / 2),
        "row": np.array([1, -1]),
        "columns": np.array([1]),
        "one": np.array([1]),
        "zero": np.array(0.0),
        "unit": np.array(1.0),
    }


def _add_constants(graph: GraphProto, constants: Mapping[str, Array]) -> None:
    from onnx import numpy_helper

    for name, array in constants.items():
        values = array.astype(np.float32) if array.dtype.kind == "f" else array
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
