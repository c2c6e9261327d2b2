"""Options and arguments that several verbs have."""

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from volseg.cli.completion import complete_key
from volseg.monitoring.console import add_to_logs

__all__ = ["Checkpoint", "Components", "JsonLogs", "NoCache", "Overrides", "Quiet", "SuggestingCommand"]

SETTINGS = {
    "--epochs": "training.epochs",
    "--iterations": "training.iterations",
    "--lr": "optimizer.lr",
    "--learning-rate": "optimizer.lr",
    "--batch": "patch.batch",
    "--batch-size": "patch.batch",
    "--patch-size": "patch.size",
    "--fold": "split.fold",
    "--seed": "seed",
}
"""What people type for a value of the config."""


class SuggestingCommand(TyperCommand):
    """A verb that takes a config, and says where a value stands that was given as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Look for such options before the others are read."""
        for argument, following in zip_longest(args, args[1:], fillvalue=""):
            option, given, value = argument.partition("=")
            if option in SETTINGS:
                value = value if given else following
                shown = value if value and not value.startswith("-") else "VALUE"
                raise typer.BadParameter(
                    f"{option} is no option but a value of the config: --set {SETTINGS[option]}={shown}"
                )
        return super().parse_args(ctx, args)


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


def _take(form: Literal["json", "quiet"]) -> Callable[[bool], bool]:
    """Return what sets up the logs when an option asks for it; eager options come before the verb runs."""

    def set_up(wanted: bool) -> bool:
        if wanted:
            add_to_logs(form)
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
