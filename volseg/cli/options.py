"""Options and arguments that several verbs have."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from volseg.cli.completion import complete_key
from volseg.monitoring.console import set_up_logs

__all__ = ["Checkpoint", "Components", "JsonLogs", "NoCache", "Overrides", "Quiet"]

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


def _take(form: str) -> Callable[[bool], bool]:
    """Return what sets up the logs when an option asks for it; eager options come before the verb runs."""

    def set_up(wanted: bool) -> bool:
        if wanted:
            set_up_logs(form)
        return wanted

    return set_up


JsonLogs = Annotated[
    bool,
    typer.Option(
        "--json-logs",
        callback=_take("json"),
        help="On standard error a JSON object for every line and every epoch; for all commands VOLSEG_LOGS=json.",
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", callback=_take("quiet"), help="Say warnings and errors alone; or VOLSEG_LOGS=quiet.")
]
