"""Arguments and options that many verbs of the command share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ArtifactName = Annotated[
    str,
    typer.Argument(metavar="ARTIFACT", help="A step (grpo), step/output, RUN/step, reference, REF@N, or digest."),
]
StoreUrl = Annotated[
    str,
    typer.Option(
        "--store", envvar="HEADRACE_STORE", metavar="URL", help="The artifact store: a folder, or s3://bucket/prefix."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SignedFolder = Annotated[
    Path | None,
    typer.Option("--signed", metavar="DIR", help="A folder that `attest --sign` signed: compare the store with it."),
]
PublicKey = Annotated[
    Path | None, typer.Option("--public-key", metavar="FILE", help="The public key that --signed is checked by (PEM).")
]
