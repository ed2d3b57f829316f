"""Commands that list methods and backbones."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from coda_prompt.cli.options import AsJson

app = typer.Typer()


@app.command(epilog="Example: `coda methods coda-p`")
def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="Show the options of one method: a name or path/to/file.py:Class."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or the options of one method."""
    from coda_prompt.methods import METHODS, describe

    names = [name] if name else list(METHODS)
    descriptions = [describe(each) for each in names]
    if as_json:
        typer.echo(json.dumps({"rows": descriptions}, indent=2))
        return
    if name:
        table = Table("option", "default", "meaning", title=f"{name}: {descriptions[0]['summary']}")
        for option in descriptions[0]["options"]:
            table.add_row(option["name"], str(option["default"]), option["meaning"])
    else:
        table = Table("method", "description")
        for description in descriptions:
            table.add_row(description["name"], description["summary"])
    Console().print(table)


@app.command(epilog="Example: `coda convert deit.pth deit.safetensors`")
def convert(
    checkpoint: Annotated[Path, typer.Argument(help="PyTorch checkpoint (.pth, .pt, .bin).")],
    out: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
) -> None:
    """Convert a PyTorch checkpoint of a ViT to a safetensors file, without running code in it."""
    from coda_prompt.model.catalog import convert_checkpoint

    convert_checkpoint(checkpoint, out)


@app.command(epilog="Example: `coda backbones --json`")
def backbones(as_json: AsJson = False) -> None:
    """List the backbones: NAME; NAME@SIZE for another input size; NAME=PATH for a local file.

    Of a .safetensors file that is known or describes itself, the path is enough.
    """
    from coda_prompt.model.catalog import CATALOG

    if as_json:
        rows = [
            {"name": entry.name, "repository": entry.repository, "description": entry.description}
            for entry in CATALOG.values()
        ]
        typer.echo(json.dumps({"rows": rows}, indent=2))
        return
    table = Table("name", "weights", "description")
    for entry in CATALOG.values():
        table.add_row(entry.name, entry.repository or "built in", entry.description)
    Console().print(table)
