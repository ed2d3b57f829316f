"""Commands that prepare data: shards."""

from typing import Annotated

import typer

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
            help="Class folders (with train/ and test/, or a fifth is set apart), or "
            "`hub:owner/name`."
        ),
    ],
    out: Annotated[str, typer.Argument(help="Folder or address to write the shards to.")],
    megabytes: Annotated[int, typer.Option(min=1, help="Of images in a shard, at most.")] = 256,
) -> None:
    """Pack images into tar shards, which can be read from afar, too.

    A dataset of the hub is read as it comes and not kept on the disk. After a stop the same command
    goes on.
    """
    from coda_prompt.data.packing import pack

    if out.startswith("memory://"):
        raise BadOption("coda shards", "out", "memory ends with the command; name another place")
    written, images = pack(data, out, megabytes)
    typer.echo(f"{out}: {written} shards of {images} images", err=True)
