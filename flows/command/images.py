"""`headrace images`: its options. `flows.images` does the work and is imported when a verb is known."""

from __future__ import annotations

from typing import Annotated

import typer

images = typer.Typer(
    name="images", help="Build the container images of stages and flows, and list them.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@images.command()
def build(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="stage, flows; both if none.")] = None,
    base: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Build on this image, which has Python 3.11 or newer.")
    ] = None,
    index: Annotated[
        str | None, typer.Option(metavar="URL", help="One more package index, such as PyTorch's of CPU wheels.")
    ] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Tag them so, instead of latest.")] = None,
    json_: Json = False,
) -> None:
    """Build images from this checkout and record their digests. After a change of code it takes seconds."""
    from flows import images

    raise typer.Exit(images.build(list(names or []), base=base, index=index, tag=tag, as_json=json_))


@images.command(name="list")
def list_(json_: Json = False) -> None:
    """List the images that the Docker Engine has, and whether the code in them is the one here."""
    from flows import images

    raise typer.Exit(images.show(as_json=json_))
