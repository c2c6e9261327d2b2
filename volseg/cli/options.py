"""Options and arguments that several verbs have."""

from pathlib import Path
from typing import Annotated

import typer

from volseg.cli.completion import complete_key

__all__ = ["Checkpoint", "Components", "NoCache", "Overrides"]

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one value, such as training.epochs=5.",
        autocompletion=complete_key,
    ),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Prepare all cases anew, and keep none: data.cache=none.")]
Components = Annotated[
    list[Path] | None,
    typer.Option(
        "--components", metavar="FILE", help="Run this file of Python first, which registers components of your own."
    ),
]
Checkpoint = Annotated[
    str,
    typer.Option(
        help="latest (the end of the training), best (on the validation cases) or previous (the latest before it)."
    ),
]
