"""Command that prepares data: shards."""

from typing import Annotated

import typer

from coda_prompt.cli.options import AsJson
from coda_prompt.console import print_json
from coda_prompt.errors import BadOption

app = typer.Typer()


@app.command(
    epilog="Examples: `coda shards photos/ shards/`, then `coda learn my-model shards:shards/`; "
    "`coda shards hub:owner/name s3://bucket/shards`, then `--set source=shards:s3://bucket/shards`"
)
def shards(
    data: Annotated[
        str,
        typer.Argument(
            help="Folder with one subfolder per class, optionally below train/ and test/ (else a "
            "fifth of the images is used for testing), or `hub:owner/name`."
        ),
    ],
    out: Annotated[str, typer.Argument(help="Folder or remote path for the shards.")],
    megabytes: Annotated[int, typer.Option(min=1, help="Maximum size of a shard in MB.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Pack images into tar shards, which can be read from remote storage.

    A Hugging Face dataset is streamed and not stored on disk. After an interruption, run the same
    command again to resume.
    """
    from coda_prompt.data.packing import pack

    if out.startswith("memory://"):
        problem = "memory:// ends with this command; use a folder or another remote path"
        raise BadOption("coda shards", "out", problem)
    written, images = pack(data, out, megabytes)
    if as_json:
        print_json({"path": out, "shards": written, "images": images})
    else:
        typer.echo(f"{out}: {written} shards of {images} images", err=True)
