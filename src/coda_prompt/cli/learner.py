"""Commands for one model: learn, predict, evaluate, info, undo, export."""

import contextlib
import csv
import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from coda_prompt import console
from coda_prompt.cli import options
from coda_prompt.errors import BadImage, BadImages, BadOption, CorruptFile, MissingData, join_names
from coda_prompt.preprocessing import input_kind

if TYPE_CHECKING:
    from coda_prompt.data.resolve import Labelled
    from coda_prompt.learner.classifier import ContinualClassifier
    from coda_prompt.learner.predictor import Prediction
    from coda_prompt.learner.results import Learned
    from coda_prompt.training.devices import Devices
    from coda_prompt.training.settings import Event

app = typer.Typer()

ALREADY_LEARNED = (
    "coda: {}: an earlier run of this command learned these images and was interrupted while "
    "saving. The save is complete now; nothing was learned twice."
)


@app.command(
    epilog="Examples: `coda learn my-model photos/`; "
    "`coda learn my-model more-photos/ --watch validation-photos/`; "
    "`coda learn my-model photos/ --backbone vit-b16-in21k --method coda-p --epochs 10`"
)
@options.with_options(devices=options.device_options)
def learn(
    model: options.Model,
    folder: options.Folder,
    backbone: options.Backbone = None,
    method: options.Method = None,
    epochs: options.Epochs = None,
    queries: options.LearnQueries = None,
    val: options.Validation = 0.2,
    watch: options.Watch = None,
    precision: options.Precision = None,
    skip_bad: options.SkipBad = False,
    as_json: options.AsJson = False,
    *,
    devices: "Devices",
) -> None:
    """Learn classes from a folder of images; creates the model if it does not exist.

    Subfolders named like known classes continue these classes. No image is stored.
    """
    from coda_prompt.data.resolve import labelled
    from coda_prompt.learner import store
    from coda_prompt.learner.classifier import load_or_create
    from coda_prompt.shutdown import ShutdownFlag

    devices = dataclasses.replace(devices, precision=precision or "32-true")
    stop = ShutdownFlag()
    with devices.launch_processes() as fabric, contextlib.ExitStack() as stack:
        rank_zero = fabric.global_rank == 0
        if rank_zero:
            stack.enter_context(store.exclusive_writer(model))
        classifier = load_or_create(model, backbone, method, fabric)
        images = labelled(folder, skip_bad=skip_bad)
        watched = None if watch is None else labelled(watch, part="test", skip_bad=skip_bad)
        lesson = f"{images.split.fingerprint()} {images.names}"
        version = len(classifier.tasks_)
        if fabric.broadcast(rank_zero and store.begin_lesson(model, lesson, version)):
            if rank_zero:
                store.refresh_copies(model)
                store.end_lesson(model)
            shown = console.escape_control_characters(str(model))
            typer.echo(ALREADY_LEARNED.format(shown), err=True)
            return
        _print_lesson(classifier, images, watched)
        stack.enter_context(stop.handling_signals())
        with LearnerProgress() as progress:
            learned = classifier.learn(
                images,
                validation=val,
                watch=watched,
                epochs=epochs,
                queries=queries,
                progress=model / store.PROGRESS,
                stop=stop,
                on_event=progress.on_event,
            )
        if rank_zero:
            classifier.write(model)
            if as_json:
                console.print_json(dataclasses.asdict(learned))
            else:
                _print_learned(learned, classifier, model)
            sys.stdout.flush()
            store.end_lesson(model)  # from now on, the same command is a new lesson


@app.command(
    epilog="Examples: `coda predict my-model image.png`; `coda predict my-model photos/ --json`; "
    "`find . -name '*.jpg' | coda predict my-model - --csv`; "
    "`coda predict my-model *.png --top 3 --unknown auto`"
)
def predict(
    model: options.Model,
    images: options.Images,
    top: options.Top = 5,
    unknown: options.Unknown = None,
    unknown_rate: options.UnknownRate = 0.05,
    unknown_below: options.UnknownBelow = 0.0,
    backbone: options.BackboneFile = None,
    method: options.MethodFile = None,
    device: options.Device = "auto",
    skip_bad: options.SkipBad = False,
    as_json: options.AsJson = False,
    as_csv: options.AsCsv = False,
) -> None:
    """Predict the class of images."""
    from coda_prompt.data.resolve import image_paths
    from coda_prompt.learner.classifier import ContinualClassifier
    from coda_prompt.learner.unknown import UnknownRule

    if as_json and as_csv:
        raise BadOption("coda predict", "csv", "ask for JSON or CSV, not for both")
    rule = UnknownRule.parse(unknown, unknown_rate, unknown_below)
    classifier = ContinualClassifier.load(model, backbone=backbone, method=method, device=device)
    if images == ["-"]:
        images = [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
    paths = image_paths(images)
    missing = [] if skip_bad else [path for path in paths if not Path(path).is_file()]
    if missing:
        raise BadImages([BadImage(path, "there is no such file") for path in missing])
    if not paths:
        raise MissingData("coda predict", "there is no image to predict", "Name files or folders.")
    with LearnerProgress() as progress:
        predictions = classifier.predictor.predict(
            paths,
            top=top,
            rule=rule,
            on_bad=_print_left_out if skip_bad else None,
            on_event=progress.on_event,
        )
        rows = ((console.decode_file_name(paths[index]), each) for index, each in predictions)
        if as_csv:
            _print_csv(rows)
        elif as_json:
            console.print_json([{"path": path, **each.as_dict()} for path, each in rows])
        else:
            console.stdout_console().print(_prediction_table(rows, next_best=top > 1))


@app.command(
    epilog="Examples: `coda evaluate my-model test-photos/ --picture confusion.png`; "
    "`coda evaluate my-model test-photos/ --unknown-folder other-photos/`"
)
def evaluate(
    model: options.Model,
    folder: options.Folder,
    unknown_folder: options.UnknownFolder = None,
    unknown_rate: options.UnknownRate = 0.05,
    picture: options.Picture = None,
    backbone: options.BackboneFile = None,
    method: options.MethodFile = None,
    device: options.Device = "auto",
    skip_bad: options.SkipBad = False,
    as_json: options.AsJson = False,
) -> None:
    """Measure the accuracy of a model: overall, per class and per task; list its confusions."""
    from coda_prompt.learner.card import percent
    from coda_prompt.learner.classifier import ContinualClassifier
    from coda_prompt.learner.confusion import check_picture, draw_confusion

    if picture is not None:
        check_picture(picture)
    classifier = ContinualClassifier.load(model, backbone=backbone, method=method, device=device)
    with LearnerProgress() as progress:
        evaluation = classifier.evaluate(
            folder,
            unknown=unknown_folder,
            unknown_rate=unknown_rate,
            skip_bad=skip_bad,
            on_event=progress.on_event,
        )
    if picture is not None:
        draw_confusion(evaluation.confusion, picture)
    for problem in evaluation.left_out:
        _print_left_out(problem)
    if as_json:
        console.print_json(dataclasses.asdict(evaluation))
        return
    weakest = sorted(evaluation.classes.items(), key=lambda item: item[1].accuracy)
    classes = [[name, each.images, percent(each.accuracy)] for name, each in weakest]
    stdout = console.stdout_console()
    stdout.print(console.table(["class", "images", "accuracy"], classes, "Classes, weakest first"))
    tasks = []
    for task in evaluation.tasks:
        when_learned = classifier.tasks_[task.number - 1]["accuracy_own"]
        shares = map(percent, (task.accuracy, task.accuracy_own, when_learned))
        tasks.append([task.number, join_names(task.classes, 6), task.images, *shares])
    heads = ["task", "classes", "images", "accuracy", "among own classes", "when learned"]
    stdout.print(console.table(heads, tasks, "Accuracy by task"))
    if evaluation.confused:
        confused = [
            [each.true, each.predicted, each.images, percent(each.share)]
            for each in evaluation.confused
        ]
        heads = ["class", "predicted as", "images", "of the class"]
        stdout.print(console.table(heads, confused, "Most confused classes"))
    stdout.print(
        f"{evaluation.images} images: {percent(evaluation.accuracy)} correct; "
        f"expected calibration error {percent(evaluation.calibration_error)}"
    )
    if (unknown := evaluation.unknown) is not None:
        stdout.print(
            f"{unknown.images} images of unknown classes: AUROC {unknown.auroc:.3f}; "
            f"{percent(unknown.false_positive_rate)} of them accepted if 95 % of the known images "
            f"are; --unknown auto at a rate of {percent(unknown.rate)} rejects "
            f"{percent(unknown.rejected_known)} of the known and "
            f"{percent(unknown.rejected_unknown)} of the unknown images"
        )


@app.command(epilog="Example: `coda info my-model`")
def info(
    model: options.Model, backbone: options.BackboneFile = None, as_json: options.AsJson = False
) -> None:
    """Show what a model has learned, when, its size and its backbone.

    The backbone is only needed to check whether a file is it (--backbone).
    """
    from coda_prompt.learner import store
    from coda_prompt.learner.card import percent

    description = store.read_model(model).description
    if backbone is not None:
        from coda_prompt.learner.loading import check_backbone

        check_backbone(description.backbone, backbone, model)
    sizes = store.size_on_disk(model)
    if as_json:
        console.print_json({**description.model_dump(mode="json"), "bytes": sizes})
        return
    previous = sizes.get(store.PREVIOUS)
    undo = "" if previous is None else f" (and {previous / 1e6:.2f} MB to undo the newest task)"
    console.print_result(
        f"{console.decode_file_name(str(model))}: {len(description.classes)} classes in "
        f"{len(description.tasks)} tasks, {description.method} on {description.backbone.name}, "
        f"{sizes[store.MODEL] / 1e6:.2f} MB{undo}",
    )
    made_on, pixels = description.backbone, description.pixels
    origin = f", file {console.decode_file_name(made_on.path)}" if made_on.path else ""
    if made_on.path and backbone is None and not Path(made_on.path).exists():
        origin += " (not there: name it with --backbone when you use the model)"
    console.print_result(
        f"backbone {made_on.name}, for {input_kind(pixels['channels'])}s of {pixels['size']} px, "
        f"fingerprint {made_on.fingerprint[:16]}{origin}"
    )
    rows = []
    for number, task in enumerate(description.tasks, 1):
        classes = (join_names(names, 6) for names in (task.new, task.continued))
        shares = map(percent, (task.accuracy, task.accuracy_own))
        rows.append([number, task.date[:10], *classes, sum(task.images.values()), *shares])
    heads = ["task", "date", "new", "continued", "images", "accuracy", "among own classes"]
    console.stdout_console().print(console.table(heads, rows))


@app.command(epilog="Example: `coda undo my-model`")
def undo(model: options.Model) -> None:
    """Undo the newest task: restores the previous version of the model, bit for bit."""
    from coda_prompt.learner import store

    with contextlib.suppress(CorruptFile):  # a damaged model can be undone, a missing one cannot
        store.read_model(model)
    with store.exclusive_writer(model):
        store.restore_previous(model)
    restored = store.read_model(model).description
    counts = f"{len(restored.classes)} classes in {len(restored.tasks)} tasks"
    console.print_message(f"{console.decode_file_name(str(model))}: back to {counts}")


@app.command(epilog="Example: `coda export my-model model.onnx`")
def export(
    model: options.Model,
    out: Annotated[Path, typer.Argument(help="The .onnx file to write.")],
    backbone: options.BackboneFile = None,
    method: options.MethodFile = None,
) -> None:
    """Export a model and its backbone as one ONNX graph that runs without torch."""
    from coda_prompt.learner.classifier import ContinualClassifier

    if not out.absolute().parent.is_dir():
        raise MissingData(out.parent, "there is no such folder", "Create it first.")
    if out.is_dir():
        raise BadOption("coda export", "out", f"{out} is a folder; name the file to write")
    ContinualClassifier.load(model, backbone=backbone, method=method).export_onnx(out)
    size = out.stat().st_size / 1e6
    console.print_message(f"{console.decode_file_name(str(out))}: {size:.1f} MB")


class LearnerProgress(console.ProgressBar):
    """A progress bar over the steps of a training or the images of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self._line = self.add_task("reading images", total=None)

    def on_event(self, event: "Event") -> None:
        if event.kind == "pass":
            self._update("reading images", event.step, event.steps)
        elif event.kind in ("step", "epoch"):
            status = f"learning, epoch {event.epoch + 1}/{event.epochs}, loss {event.loss:.2f}"
            done = event.epoch * event.steps + event.step
            self._update(status, done, event.epochs * event.steps)

    def _update(self, status: str, done: int, total: int) -> None:
        self.update(self._line, description=status, completed=done, total=total)


def _print_lesson(
    classifier: "ContinualClassifier", images: "Labelled", watched: "Labelled | None"
) -> None:
    """Print what is about to be learned, what was left out, and warnings."""
    from coda_prompt.learner.advice import summary

    if (chosen := classifier.choose_backbone(images)) is not None:
        console.print_message(chosen)
    made_of = f"{classifier.method_name} on {classifier.backbone_name}"
    console.print_message(f"{summary(images)}; {made_of}")
    for problem in images.bad:
        _print_left_out(problem)
    for warning in classifier.warnings(images, watched):
        console.print_message(f"warning: {warning}", style="yellow")


def _print_left_out(problem: BadImage | str) -> None:
    console.print_message(f"left out: {problem}")


def _print_csv(rows: Iterable[tuple[str, "Prediction"]]) -> None:
    """Print one line per image; `label` is empty if the class is unknown."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["path", "label", "unknown", "best", "probability"])
    for path, each in rows:
        unknown = str(each.unknown).lower()
        writer.writerow([path, each.label or "", unknown, each.best, f"{each.probability:.6f}"])


def _prediction_table(rows: Iterable[tuple[str, "Prediction"]], *, next_best: bool) -> Table:
    heads = ["image", "class", "probability", *(["next best"] if next_best else [])]
    cells = []
    for path, each in rows:
        label = f"unknown (best guess: {each.best})" if each.unknown else each.best
        others = [f"{other.label} {100 * other.probability:.0f} %" for other in each.top[1:]]
        line = [path, label, f"{100 * each.probability:.1f} %", ", ".join(others)]
        cells.append(line[: len(heads)])
    return console.table(heads, cells)


def _print_learned(learned: "Learned", classifier: "ContinualClassifier", model: Path) -> None:
    from coda_prompt.learner import store
    from coda_prompt.learner.card import percent

    new, continued = (join_names(names, 6) or "none" for names in (learned.new, learned.continued))
    lines = [f"new: {new}; continued: {continued}"]
    if learned.accuracy is not None:
        lines.append(
            f"on {learned.held_out} held-out images: {percent(learned.accuracy)} among all "
            f"{len(classifier.classes_)} classes, {percent(learned.accuracy_own)} among its own; "
            f"calibration error {percent(learned.calibration_error)}"
        )
    for name, (before, after) in learned.forgotten.items():
        if after != before:
            lines.append(f"{name}: {percent(before)} -> {percent(after)}")
    if learned.forgotten:
        pairs = list(learned.forgotten.values())
        before, after = (sum(part) / len(pairs) for part in zip(*pairs, strict=True))
        lines.append(f"watched classes: {percent(before)} -> {percent(after)}")
    size = (model / store.MODEL).stat().st_size / 1e6
    lines.append(
        f"{console.decode_file_name(str(model))}: {size:.2f} MB, learned in {learned.seconds:.1f} s"
    )
    for line in lines:
        console.print_result(line)
