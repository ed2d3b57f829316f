"""Command-line options: each is defined once and shared by the commands that have it."""

import functools
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coda_prompt.cli.completion import complete_backbone, complete_method, complete_preset
from coda_prompt.console import Output
from coda_prompt.errors import BadOption

if TYPE_CHECKING:
    from coda_prompt.research.bench.config import Override
    from coda_prompt.research.bench.launcher import RunOptions

# Typer reads annotations when the module is imported: no `from __future__ import annotations` here.


def _local_folder(folder: str | Path, option: str) -> Path:
    """Return the path of a folder, of its name or a default; no name would be this folder."""
    name = str(folder)
    if not name.strip():
        raise BadOption("the command", option, "its name is empty; name a folder")
    if "://" in name:
        raise BadOption("the command", option, f"{name} is remote; name a local folder")
    return Path(name)


def check_order(model: Path, *others: str) -> None:
    """Check that a model was not named after the images instead of before them.

    Raises:
        BadOption: It was.
    """
    from coda_prompt.learner.folder import MODEL

    named_later = [name for name in others if (Path(name) / MODEL).is_file()]
    if named_later and not (model / MODEL).is_file():
        problem = f"{model} is no model, and {named_later[0]} is one; name the model first"
        raise BadOption("the command", "model", problem)


Model = Annotated[
    Path,
    typer.Argument(
        help="Model folder.", parser=lambda name: _local_folder(name, "model"), metavar="model"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]
SkipBad = Annotated[bool, typer.Option(help="Skip unreadable images instead of failing.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only results, warnings and errors.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also print the program's log.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Precision = Annotated[
    Literal["32-true", "64-true", "bf16-mixed", "16-mixed"] | None,
    typer.Option(help="Floating-point precision. Default: the preset's, else 32-true."),
]
Queries = Annotated[
    Literal["exact", "cached", "one-stage"] | None,
    typer.Option(
        help="Where prompt queries come from: every augmented view (exact, the default), the plain "
        "image once (cached), or the first blocks of the prompted pass (one-stage)."
    ),
]
Fast = Annotated[
    bool,
    typer.Option(
        "--fast",
        help="Train faster: one augmented view for every two epochs, whose query is computed "
        "once, and bfloat16 where it is faster. Changes results slightly.",
    ),
]
Views = Annotated[
    int | None,
    typer.Option(min=1, help="Augmented views per image, reused. Default: a new view every epoch."),
]
Methods = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete_method,
        help="Comma-separated method names, or `all`. Default: the benchmark's.",
    ),
]
Trials = Annotated[int | None, typer.Option(min=1, help="Number of trials, seeds 0, 1, ….")]
Data = Annotated[
    Path | None, typer.Option(envvar="CODA_DATA", help="Folder with the paper's datasets.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a field: `field.field=value`. Repeatable."),
]
Out = Annotated[
    Path,
    typer.Option(
        help="Folder for the run folders.", parser=lambda name: _local_folder(name, "out")
    ),
]
Jobs = Annotated[
    int, typer.Option(min=1, help="Runs in parallel; the CPU threads are divided among them.")
]
Executor = Annotated[
    Literal["local", "ray"], typer.Option(help="Run on this machine or on a Ray cluster.")
]
ClusterAddress = Annotated[
    str | None,
    typer.Option("--address", help="Address of a running Ray cluster. Default: start a local one."),
]
Cpus = Annotated[float | None, typer.Option(min=0.1, help="CPUs per run on Ray. Default: 1.")]
Gpus = Annotated[
    float | None,
    typer.Option(min=0, help="GPUs per run on Ray; 0.5 shares a GPU between two. Default: 0."),
]
TensorBoard = Annotated[bool, typer.Option(help="Also write TensorBoard logs to the run folders.")]
Keep = Annotated[bool, typer.Option(help="Also save the learned model state in the run folders.")]
DryRun = Annotated[bool, typer.Option(help="Print the resolved runs and exit.")]

Folder = Annotated[
    str,
    typer.Argument(
        help="Folder with one subfolder of images per class, or `hub:` and the name, folder or "
        "URL of a dataset that the `datasets` library reads."
    ),
]
Backbone = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete_backbone,
        help="Backbone of a new model: `auto` (pocket for drawings, photo for photographs), or "
        "NAME, NAME@SIZE, NAME=PATH or PATH; see `coda backbones`. Default: auto.",
    ),
]
BackboneFile = Annotated[
    str | None,
    typer.Option(
        "--backbone",
        help="The model's backbone: NAME=PATH or PATH if it is a file, NAME to download it.",
    ),
]
Method = Annotated[
    Literal["auto", "ranpac", "slda", "ncm", "coda-p-ranpac", "coda-p"] | None,
    typer.Option(
        help="Method of a new model: solved from statistics (`ranpac`, `slda`, `ncm`), or with "
        "prompts, which are trained in the first lesson (`coda-p-ranpac`) or in every one "
        "(`coda-p`) and need the extra `research`. Default: auto, which is ranpac for drawings and "
        "slda for photographs.",
    ),
]
Removable = Annotated[
    bool,
    typer.Option(
        "--removable",
        help="Make a new model from which `coda forget` removes a class without a trace. Stores "
        "the second moments of each class: at most 4 bytes x images x random features (2048).",
    ),
]
FindDuplicates = Annotated[
    bool | None,
    typer.Option(
        help="Name images that resemble one of an earlier lesson that had this option. Stores a "
        "hash of 15 bytes of each image of this lesson in the model. Default: as in the lessons "
        "before.",
    ),
]
Epochs = Annotated[int | None, typer.Option(min=1, help="Passes over the images.")]
Validation = Annotated[
    float,
    typer.Option("--val", min=0, max=0.9, help="Share of each class set aside for validation."),
]
Check = Annotated[
    Path | None,
    typer.Option(help="Folder with images of old classes: report how much is forgotten."),
]


Images = Annotated[
    list[str],
    typer.Argument(help="Files, folders or glob patterns; `-` reads paths from standard input."),
]
Top = Annotated[int, typer.Option(min=1, help="Number of most probable classes to list.")]
UnknownBelow = Annotated[
    float, typer.Option(min=0, max=1, help="Unknown if the most probable class is below this.")
]
Unknown = Annotated[
    Literal["auto"] | None,
    typer.Option(help="auto: unknown if the image is not typical of the learned classes."),
]
UnknownRate = Annotated[
    float,
    typer.Option(
        help="Share of images of learned classes that `--unknown auto` may reject by mistake, "
        "between 0 and 1."
    ),
]
UnknownFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder with images of classes the model does not know: report how well it separates "
        "them from those it knows."
    ),
]
Picture = Annotated[
    Path | None, typer.Option(help="Write the confusion matrix as a picture to this .png file.")
]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV to standard output.")]
Benchmark = Annotated[
    str | None,
    typer.Argument(
        help="A preset, a YAML file, or the benchmark.json of an earlier run.",
        autocompletion=complete_preset,
    ),
]
ListPresets = Annotated[
    bool, typer.Option("--list", help="List the presets, what they measure and how long they take.")
]
SweepBenchmark = Annotated[
    str | None,
    typer.Argument(
        help="A preset or a YAML file. Default: the sweep's own.", autocompletion=complete_preset
    ),
]
SweepField = Annotated[
    str,
    typer.Argument(
        help="`components`, `length`, `tuning`, a YAML file, or a field to vary with --values: "
        "`options.…` and `training.…` are fields of the methods, all others of the benchmark.",
    ),
]
SweepValues = Annotated[
    str, typer.Option("--values", help="Comma-separated values of the field, instead of its own.")
]
UseValidation = Annotated[
    bool,
    typer.Option(
        "--validation/--no-validation",
        help="Evaluate on a fifth of the training images instead of the test images.",
    ),
]


def output_options(quiet: Quiet = False, verbose: Verbose = False) -> Output:
    """Options that decide how much a command prints."""
    if quiet and verbose:
        raise BadOption("the command", "verbose", "ask for --quiet or --verbose, not for both")
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    return Output(quiet)


def override_options(
    trials: Trials = None,
    data: Data = None,
    override: Set = None,
    precision: Precision = None,
    epochs: Epochs = None,
) -> "list[Override]":
    """Options shared by every command that loads a benchmark, as fields to override."""
    overrides: list[Override] = [] if data is None else [(("data",), str(data))]
    overrides += override or []
    fields = {("trials",): trials, ("precision",): precision, ("training", "epochs"): epochs}
    return overrides + [(field, value) for field, value in fields.items() if value is not None]


def run_options(
    out: Out = Path("runs"),
    jobs: Jobs = 1,
    device: Device = "auto",
    executor: Executor = "local",
    address: ClusterAddress = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    tensorboard: TensorBoard = False,
    keep: Keep = False,
) -> "RunOptions":
    """Options shared by every command that runs benchmarks."""
    from coda_prompt.research.bench.launcher import RunOptions
    from coda_prompt.research.bench.ray_cluster import Cluster
    from coda_prompt.research.training.devices import Devices

    values: dict[str, Any] = {"address": address, "cpus": cpus, "gpus": gpus}
    ray = {name: value for name, value in values.items() if value is not None}
    if ray and executor != "ray":
        raise BadOption("coda bench", next(iter(ray)), "add --executor ray, or leave it out")
    cluster = Cluster(**ray) if executor == "ray" else None
    return RunOptions(out, jobs, Devices(device), cluster, tensorboard, keep)


def with_options(
    **builders: Callable[..., object],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of other functions; it receives what they return.

    `@with_options(run=run_options)` replaces the parameter `run` of the command by the parameters
    of `run_options` on the command line and passes `run_options(...)` to the command.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = dict(inspect.signature(command).parameters)
        added = {name: inspect.signature(builder).parameters for name, builder in builders.items()}
        for name in builders:
            del own[name]
        parameters = {
            name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for group in (own, *added.values())
            for name, parameter in group.items()
        }

        @functools.wraps(command)
        def command_with_options(**values: Any) -> None:
            built = {
                name: builder(**{each: values.pop(each) for each in added[name]})
                for name, builder in builders.items()
            }
            command(**values, **built)

        command_with_options.__annotations__ = {
            name: parameter.annotation for name, parameter in parameters.items()
        }
        signature = inspect.Signature(list(parameters.values()))
        command_with_options.__signature__ = signature  # type: ignore[attr-defined]
        return command_with_options

    return decorate
