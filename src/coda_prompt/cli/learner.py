"""Commands for one model: learn, evaluate, info, export."""

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coda_prompt import console
from coda_prompt.cli import options
from coda_prompt.errors import BadOption, MissingData, counted, join_names

if TYPE_CHECKING:
    from coda_prompt.learner.classifier import ContinualClassifier
    from coda_prompt.learner.folder import ModelFolder
    from coda_prompt.learner.results import Evaluation, Learned

app = typer.Typer()

FINISH_LESSON = "To finish it, repeat the 'coda learn' command that was interrupted."
ALREADY_LEARNED = (
    "coda: {}: an earlier run of this command learned these images and was interrupted while "
    "saving. The save is complete now; nothing was learned twice."
)


@app.command(
    epilog="Examples: `coda learn my-model photos/`; "
    "`coda learn my-model more-photos/ --check validation-photos/`; "
    "`coda learn my-model photos/ --backbone vit-b16-in21k --method coda-p --epochs 10`"
)
@options.with_options(output=options.output_options)
def learn(
    model: options.Model,
    folder: options.Folder,
    backbone: options.Backbone = None,
    method: options.Method = None,
    removable: options.Removable = False,
    epochs: options.Epochs = None,
    val: options.Validation = 0.2,
    check: options.Check = None,
    find_duplicates: options.FindDuplicates = None,
    skip_bad: options.SkipBad = False,
    as_json: options.AsJson = False,
    *,
    output: console.Output,
) -> None:
    """Learn classes from a folder of images; creates the model if it does not exist.

    Subfolders named like known classes continue these classes. No image is stored.
    """
    from coda_prompt.images.labelled import labelled
    from coda_prompt.learner import findings
    from coda_prompt.learner.classifier import load_or_create
    from coda_prompt.learner.feedback import LearnerProgress
    from coda_prompt.learner.folder import ModelFolder
    from coda_prompt.shutdown import ShutdownFlag

    options.check_order(model, folder)
    target, stop = ModelFolder(model), ShutdownFlag()
    with target.writing() as at_end:
        classifier = load_or_create(target, backbone, method, removable)
        images = labelled(folder, skip_bad=skip_bad)
        note = f"{images.fingerprint} {images.names}", len(classifier.tasks_)
        if target.begin_lesson(at_end, *note):
            shown = console.escape_control_characters(str(model))
            typer.echo(ALREADY_LEARNED.format(shown), err=True)
            return
        if (chosen := classifier.choose_backbone(images)) is not None:
            output.message(chosen)
        made_of = f"{classifier.method_name} on {classifier.backbone_name}"
        output.message(f"{findings.summary(images)}; {made_of}")
        with stop.handling_signals(), LearnerProgress(output.quiet) as progress:
            learned = classifier.learn(
                images,
                validation=val,
                check=None if check is None else str(check),
                skip_bad=skip_bad,
                epochs=epochs,
                find_duplicates=find_duplicates,
                progress=target.progress,
                stop=stop,
                on_progress=progress.on_progress,
            )
            classifier.write(target)
        _print_learned(learned, classifier, target, as_json, output)
        at_end.callback(target.end_lesson)  # after that, the command is a new lesson


@app.command(
    epilog="Examples: `coda evaluate my-model test-photos/ --picture confusion.png`; "
    "`coda evaluate my-model test-photos/ --unknown-folder other-photos/`"
)
@options.with_options(output=options.output_options)
def evaluate(
    model: options.Model,
    folder: options.Folder,
    unknown_folder: options.UnknownFolder = None,
    unknown_rate: options.UnknownRate = 0.05,
    picture: options.Picture = None,
    backbone: options.BackboneFile = None,
    skip_bad: options.SkipBad = False,
    as_json: options.AsJson = False,
    *,
    output: console.Output,
) -> None:
    """Measure the accuracy of a model: overall, per class and per lesson; list its confusions."""
    from coda_prompt.learner.classifier import ContinualClassifier
    from coda_prompt.learner.evaluation import check_picture, draw_confusion
    from coda_prompt.learner.feedback import LearnerProgress

    options.check_order(model, folder)
    if picture is not None:
        check_picture(picture)
    classifier = ContinualClassifier.load(model, backbone=backbone, verbose=False)
    with LearnerProgress(output.quiet) as progress:
        evaluation = classifier.evaluate(
            folder,
            unknown=unknown_folder,
            unknown_rate=unknown_rate,
            skip_bad=skip_bad,
            on_progress=progress.on_progress,
        )
    if picture is not None:
        draw_confusion(evaluation.confusion, picture)
    for problem in evaluation.left_out:
        output.message(f"left out: {problem}")
    if as_json:
        console.print_json(dataclasses.asdict(evaluation))
    else:
        _print_evaluation(evaluation, classifier)


def _print_evaluation(evaluation: "Evaluation", classifier: "ContinualClassifier") -> None:
    from coda_prompt.learner.card import FEW_IMAGES, percent, share_of

    weakest = sorted(evaluation.classes.items(), key=lambda item: item[1].accuracy)
    classes = [[name, each.images, share_of(each.accuracy, each.images)] for name, each in weakest]
    stdout = console.stdout_console()
    stdout.print(console.table(["class", "images", "accuracy"], classes, "Classes, weakest first"))
    tasks = []
    for task in evaluation.tasks:
        lesson = classifier.tasks_[task.number - 1]
        now = [share_of(each, task.images) for each in (task.accuracy, task.accuracy_own)]
        then = share_of(lesson["accuracy_own"], lesson["held_out"])
        tasks.append([task.number, join_names(task.classes, 6), task.images, *now, then])
    heads = ["lesson", "classes", "images", "accuracy", "among own classes", "when learned"]
    stdout.print(console.table(heads, tasks, "Accuracy by lesson"))
    if evaluation.confused:
        confused = [
            [
                each.true,
                each.predicted,
                each.images,
                share_of(each.share, evaluation.classes[each.true].images),
            ]
            for each in evaluation.confused
        ]
        heads = ["class", "predicted as", "images", "of the class"]
        stdout.print(console.table(heads, confused, "Most confused classes"))
    total = f"{counted(evaluation.images, 'image')}: "
    total += f"{share_of(evaluation.accuracy, evaluation.images)} correct"
    if evaluation.images >= FEW_IMAGES:
        total += f"; expected calibration error {percent(evaluation.calibration_error)}"
    stdout.print(total)
    for finding in evaluation.findings:
        stdout.print(f"hint: {finding}")
    if (unknown := evaluation.unknown) is not None:
        stdout.print(
            f"{unknown.images} images of unknown classes: AUROC {unknown.auroc:.3f}; "
            f"{share_of(unknown.false_positive_rate, unknown.images)} accepted if 95 % of the "
            f"known images are; --unknown auto at a rate of {percent(unknown.rate)} rejects, of "
            f"the known images, {share_of(unknown.rejected_known, evaluation.images)} and, of the "
            f"unknown ones, {share_of(unknown.rejected_unknown, unknown.images)}"
        )


@app.command(epilog="Example: `coda info my-model`")
def info(
    model: options.Model, backbone: options.BackboneFile = None, as_json: options.AsJson = False
) -> None:
    """Show what a model has learned, when, its size and its backbone.

    The backbone is only needed to check whether a file is it (--backbone).
    """
    from coda_prompt.learner.card import TASK_HEADS, task_rows
    from coda_prompt.learner.folder import MODEL, ModelFolder

    source = ModelFolder(model)
    unfinished = source.has_unfinished_lesson
    if unfinished and not source.exists:
        problem = "its first lesson was not finished, so there is no model yet"
        raise MissingData(model, problem, FINISH_LESSON)
    description = source.description()
    if backbone is not None:
        from coda_prompt.learner.backbones import open_encoder

        open_encoder(description.backbone, backbone, model)
    sizes = source.sizes()
    if as_json:
        fields = description.model_dump(mode="json")
        console.print_json({**fields, "bytes": sizes, "unfinished_lesson": unfinished})
        return
    earlier = sum(sizes.values()) - sizes[MODEL]
    undo = f" (and {earlier / 1e6:.2f} MB of earlier versions)" if earlier else ""
    console.print_result(
        f"{console.decode_file_name(str(model))}: {counted(len(description.classes), 'class')} in "
        f"{counted(len(description.tasks), 'lesson')}, {description.method} on "
        f"{description.backbone.name}, "
        f"{sizes[MODEL] / 1e6:.2f} MB{undo}",
    )
    made_on = description.backbone
    origin = ""
    if made_on.path:
        origin = f", file {console.decode_file_name(made_on.path)} (name it with --backbone)"
    console.print_result(
        f"backbone {made_on.name}, for {made_on.kind}s, "
        f"fingerprint {made_on.fingerprint[:16]}{origin}"
    )
    console.stdout_console().print(console.table(TASK_HEADS, task_rows(description.tasks)))
    if unfinished:
        console.print_result(f"A lesson was not finished. {FINISH_LESSON}")


@app.command(epilog="Example: `coda export my-model model.onnx`")
def export(
    model: options.Model,
    out: Annotated[Path, typer.Argument(help="The .onnx file to write.")],
    backbone: options.BackboneFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Export a model and its backbone as one ONNX graph that runs without torch."""
    from coda_prompt.learner.classifier import ContinualClassifier

    if not out.absolute().parent.is_dir():
        raise MissingData(out.parent, "there is no such folder", "Create it first.")
    if out.is_dir():
        raise BadOption("coda export", "out", f"{out} is a folder; name the file to write")
    ContinualClassifier.load(model, backbone=backbone, verbose=False).export_onnx(out)
    name, size = console.decode_file_name(str(out)), out.stat().st_size
    if as_json:
        console.print_json({"path": name, "bytes": size})
    else:
        console.print_message(f"{name}: {size / 1e6:.1f} MB")


def resume_command(changes: Mapping[str, str] | None = None) -> str:
    """Return the command that is running, for a terminal.

    Args:
        changes: Paths to name instead of others.
    """
    changes = {os.path.normpath(old): new for old, new in (changes or {}).items()}
    arguments = [changes.get(os.path.normpath(each), each) for each in sys.argv[1:]]
    return shlex.join(["coda", *arguments])


def _print_learned(
    learned: "Learned",
    classifier: "ContinualClassifier",
    folder: "ModelFolder",
    as_json: bool,
    output: console.Output,
) -> None:
    from coda_prompt.learner.card import FEW_IMAGES, percent, share_of

    for problem in learned.left_out:
        output.message(f"left out: {problem}")
    for warning in learned.warnings:
        console.print_message(f"warning: {warning}", style="yellow")
    if as_json:
        fields = dataclasses.asdict(learned)
        del fields["held_out_images"]
        console.print_json(fields)
        sys.stdout.flush()
        return
    new, continued = (join_names(names, 6) or "none" for names in (learned.new, learned.continued))
    lines = [f"new: {new}; continued: {continued}"]
    if learned.accuracy is not None:
        among_all, among_own = (
            share_of(each, learned.held_out) for each in (learned.accuracy, learned.accuracy_own)
        )
        measured = (
            f"on {counted(learned.held_out, 'held-out image')}: {among_all} right among all "
            f"{counted(len(classifier.classes_), 'class')}, {among_own} among its own"
        )
        if learned.held_out >= FEW_IMAGES:
            measured += f"; calibration error {percent(learned.calibration_error)}"
        lines.append(measured)
    lines += [f"hint: {hint}" for hint in learned.hints]
    for name, (before, after) in learned.forgotten.items():
        if after != before:
            shares = (share_of(each, learned.checked[name]) for each in (before, after))
            lines.append(f"{name}: {' -> '.join(shares)}")
    watched = classifier.model.tasks[-1].watched
    if watched is not None:
        shares = (share_of(each, watched.images) for each in (watched.before, watched.after))
        lines.append(f"checked classes: {' -> '.join(shares)}")
    size = next(iter(folder.sizes().values())) / 1e6
    lines.append(
        f"{console.decode_file_name(str(folder.path))}: {size:.2f} MB, "
        f"learned in {learned.seconds:.1f} s"
    )
    for line in lines:
        console.print_result(line)
    sys.stdout.flush()
