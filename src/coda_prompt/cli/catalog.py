"""Commands that list methods, and list, convert and export backbones."""

from pathlib import Path
from typing import Annotated

import typer

from coda_prompt.cli.completion import complete_method
from coda_prompt.cli.options import AsJson
from coda_prompt.console import print_json, stdout_console, table

app = typer.Typer()


@app.command(epilog="Example: `coda methods coda-p`")
def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            autocompletion=complete_method,
            help="Show the options of one method: a name or path/to/file.py:Class.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or the options of one method."""
    from coda_prompt.research.methods import METHODS, describe

    descriptions = [describe(each) for each in ([name] if name else METHODS)]
    if as_json:
        print_json({"rows": descriptions})
    elif name:
        options = [list(option.values()) for option in descriptions[0]["options"]]
        title = f"{name}: {descriptions[0]['summary']}"
        stdout_console().print(table(["option", "default", "meaning"], options, title))
    else:
        rows = [[each["name"], each["summary"]] for each in descriptions]
        stdout_console().print(table(["method", "description"], rows))


@app.command(epilog="Example: `coda convert deit.pth deit.safetensors`")
def convert(
    checkpoint: Annotated[Path, typer.Argument(help="PyTorch checkpoint (.pth, .pt, .bin).")],
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    as_json: AsJson = False,
) -> None:
    """Convert a PyTorch checkpoint of a ViT to a safetensors file, without running code in it."""
    from coda_prompt.research.vit.catalog import convert_checkpoint

    convert_checkpoint(checkpoint, out)
    if as_json:
        print_json({"path": str(out), "bytes": out.stat().st_size})


backbones = typer.Typer(epilog="Example: `coda backbones --json`", invoke_without_command=True)
app.add_typer(backbones, name="backbones")


@backbones.callback()
def list_backbones(context: typer.Context, as_json: AsJson = False) -> None:
    """List the backbones: NAME; NAME@SIZE for another input size; NAME=PATH for a local file.

    Of a .safetensors file that is known or describes itself, the path is enough, as of a .onnx file
    with a .json file beside it, a folder that `coda backbones export` has written, and a repository
    of the hub (OWNER/NAME) with such files.
    """
    from coda_prompt.encoder.catalog import CATALOG

    if context.invoked_subcommand is not None:
        return
    names = ("name", "repository", "licence", "description")
    rows = [{name: getattr(entry, name) for name in names} for entry in CATALOG.values()]
    if as_json:
        print_json({"rows": rows})
        return
    cells = [
        [row["name"], row["repository"] or "built in", row["licence"], row["description"]]
        for row in rows
    ]
    stdout_console().print(table(["name", "weights", "licence", "description"], cells))


@backbones.command(epilog="Example: `coda backbones export deit-tiny deit-tiny/`")
def export(
    name: Annotated[str, typer.Argument(help="As for --backbone.")],
    out: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    as_json: AsJson = False,
) -> None:
    """Write a backbone as ONNX graphs and a JSON file, which can be used without torch."""
    from coda_prompt.encoder.encoder import load_encoder

    encoder = load_encoder(name)
    encoder.save(out)
    if as_json:
        print_json({"path": str(out), "fingerprint": encoder.fingerprint})
