"""The command that learns from a growing folder: stream."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coda_prompt import console
from coda_prompt.cli import options
from coda_prompt.cli.learner import new_and_continued
from coda_prompt.errors import counted

if TYPE_CHECKING:
    from coda_prompt.learner.results import Learned

app = typer.Typer()


@app.command(
    epilog="Examples: `coda stream my-model inbox/`; `coda stream my-model inbox/ --watch`; "
    "`coda stream my-model inbox/ --watch --chunk 50 --idle 60 --json`"
)
@options.with_options(output=options.output_options)
def stream(
    model: options.Model,
    folder: Annotated[
        Path, typer.Argument(help="Folder with one subfolder of images per class; it may grow.")
    ],
    watch: Annotated[
        bool, typer.Option("--watch", help="Wait for more images, until Ctrl-C.")
    ] = False,
    chunk: Annotated[int, typer.Option(min=1, help="Most images of a lesson.")] = 100,
    idle: Annotated[
        float,
        typer.Option(
            min=0,
            help="Learn an incomplete chunk after this number of seconds without a new image.",
        ),
    ] = 10.0,
    every: options.Every = 0.5,
    backbone: options.Backbone = None,
    method: options.Method = None,
    val: options.Validation = 0.2,
    device: options.Device = "auto",
    as_json: options.AsJson = False,
    *,
    output: console.Output,
) -> None:
    """Learn the images of a folder in chunks, each image once; the model answers after each chunk.

    The same command resumes after an interruption, and learns only images that are new.
    """
    from coda_prompt.data.live import labelled_files
    from coda_prompt.learner import store
    from coda_prompt.learner.arrivals import Arrivals
    from coda_prompt.learner.classifier import load_or_create
    from coda_prompt.learner.feedback import LearnerProgress
    from coda_prompt.shutdown import ShutdownFlag
    from coda_prompt.training.devices import Devices

    stop = ShutdownFlag()
    with store.exclusive_writer(model), stop.handling_signals():
        classifier = load_or_create(model, backbone, method, Devices(device).fabric())
        if watch:
            name = console.decode_file_name(str(folder))
            output.message(f"learning the images of {name} (press Ctrl-C to stop)")
        with LearnerProgress(output.quiet) as progress:
            arrivals = Arrivals(
                classifier, model, folder, chunk, val, stop, on_event=progress.on_event
            )
            learned = None
            for learned in arrivals.lessons(watch=watch, idle=idle, poll=every):
                _print_lesson(learned, len(classifier.tasks_), as_json)
        if learned is None and not stop():
            name, images = console.decode_file_name(str(folder)), len(labelled_files(folder))
            output.message(
                f"{name}: no new image; the {counted(images, 'image')} in it were learned, or left "
                "out as unreadable, before"
                if images
                else f"{name}: no image in it; images have to be in one folder for each class"
            )


def _print_lesson(learned: "Learned", number: int, as_json: bool) -> None:
    if as_json:
        console.print_json(dataclasses.asdict(learned), line=True)
        return
    images = counted(sum(learned.images.values()), "image")
    console.print_result(f"lesson {number}: {images}; {new_and_continued(learned)}")
