"""The command that classifies images: predict."""

import csv
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from coda_prompt import console
from coda_prompt.cli import options
from coda_prompt.errors import BadImage, BadImages, BadOption, MissingData

if TYPE_CHECKING:
    from coda_prompt.learner.model import LearnedModel
    from coda_prompt.learner.predict import Prediction

app = typer.Typer()

Row = tuple[str, "Prediction"]

MAX_SAMPLES, CHECKED_SIDE = 40, 128
"""Images that are examined for their kind, and the pixels that suffice."""


@app.command(
    epilog="Examples: `coda predict my-model image.png`; `coda predict my-model photos/ --json`; "
    "`find . -name '*.jpg' | coda predict my-model - --csv`; "
    "`coda predict my-model *.png --top 3 --unknown auto`"
)
@options.with_options(output=options.output_options)
def predict(
    model: options.Model,
    images: options.Images,
    top: options.Top = 5,
    unknown: options.Unknown = None,
    unknown_rate: options.UnknownRate = 0.05,
    unknown_below: options.UnknownBelow = 0.0,
    backbone: options.BackboneFile = None,
    skip_bad: options.SkipBad = False,
    as_json: options.AsJson = False,
    as_csv: options.AsCsv = False,
    *,
    output: console.Output,
) -> None:
    """Predict the class of images."""
    from coda_prompt.learner import predict as predicting
    from coda_prompt.learner.backbones import open_encoder
    from coda_prompt.learner.feedback import LearnerProgress
    from coda_prompt.learner.folder import ModelFolder
    from coda_prompt.learner.model import LearnedModel
    from coda_prompt.statistics.unknown import UnknownRule

    rule = UnknownRule.parse(unknown, unknown_rate, unknown_below)
    if as_json and as_csv:
        raise BadOption("coda predict", "csv", "ask for JSON or CSV, not for both")
    options.check_order(model, *images)
    description, arrays = ModelFolder(model).read()
    encoder = open_encoder(description.backbone, backbone, model)
    learned = LearnedModel.of_file(description, arrays, encoder, model)
    paths = _find_images(images, skip_bad, output)
    for finding in _kind_findings(learned, paths):
        console.print_message(f"hint: {finding}", style="yellow")
    with LearnerProgress(output.quiet) as progress:
        predictions = predicting.predict(
            learned,
            paths,
            top=top,
            rule=rule,
            on_bad=_left_out if skip_bad else None,
            on_progress=progress.on_progress,
        )
        rows = ((console.decode_file_name(paths[index]), each) for index, each in predictions)
        if as_csv:
            _print_csv(rows)
        elif as_json:
            console.print_json([{"path": path, **each.as_dict()} for path, each in rows])
        else:
            console.stdout_console().print(_prediction_table(rows, next_best=top > 1))


def _find_images(names: list[str], skip_bad: bool, output: console.Output) -> list[str]:
    """Return the paths of the images to predict."""
    from coda_prompt.images.inputs import image_paths

    if names == ["-"]:
        names = [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
    paths = image_paths(names, lambda hint: output.message(f"note: {hint}"))
    missing = [] if skip_bad else [path for path in paths if not Path(path).is_file()]
    if missing:
        raise BadImages(
            [BadImage(path, "there is no such file", "Check the path.") for path in missing]
        )
    if not paths:
        raise MissingData("coda predict", "there is no image to predict", "Name files or folders.")
    return paths


def _kind_findings(model: "LearnedModel", paths: list[str]) -> list[str]:
    """Say whether some of the images are of another kind than those that were taught."""
    from coda_prompt.images.inputs import as_image
    from coda_prompt.images.kinds import is_drawing
    from coda_prompt.learner.findings import kind_finding

    drawings = []
    for path in paths[:: -(-len(paths) // MAX_SAMPLES)]:
        with suppress(BadImage):  # the prediction reports it
            drawings.append(is_drawing(as_image(path, CHECKED_SIDE)))
    return kind_finding(model.tasks, drawings)


def _left_out(problem: BadImage) -> None:
    console.print_message(f"left out: {problem}")


def _print_csv(rows: Iterable[Row]) -> None:
    """Print one line per image; `label` is empty if the class is unknown, and `typicality` without
    `--unknown auto`."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["path", "label", "unknown", "best", "probability", "typicality"])
    for path, each in rows:
        unknown, probability = str(each.unknown).lower(), f"{each.probability:.6f}"
        typicality = "" if each.typicality is None else f"{each.typicality:.6f}"
        writer.writerow([path, each.label or "", unknown, each.best, probability, typicality])


def _prediction_table(rows: Iterable[Row], *, next_best: bool) -> Table:
    heads = ["image", "class", "probability", *(["next best"] if next_best else [])]
    cells = [_cells(path, each)[: len(heads)] for path, each in rows]
    return console.table(heads, cells)


def _cells(path: str, each: "Prediction") -> list[str]:
    """Return the name of an image, its class, the probability and the next best classes."""
    label = f"unknown (best guess: {each.best})" if each.unknown else each.best
    others = [f"{other.label} {100 * other.probability:.0f} %" for other in each.top[1:]]
    return [path, label, f"{100 * each.probability:.1f} %", ", ".join(others)]
