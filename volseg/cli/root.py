"""The command line as a whole: every verb, and the options before a verb."""

from typing import Annotated

import typer

from volseg.cli.data import data_app
from volseg.cli.options import JsonLogs, Quiet
from volseg.cli.planning import planning_app
from volseg.cli.prediction import prediction_app
from volseg.cli.runs import runs_app
from volseg.cli.tools import start_app, tools_app
from volseg.cli.training import training_app
from volseg.streams import show
from volseg.version import __version__

__all__ = ["app"]

app = typer.Typer(
    name="volseg",
    help="Train 3D medical segmentation networks; several GPUs behave as one large one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(start_app)
app.add_typer(data_app, rich_help_panel="Data")
for verbs in (training_app, planning_app, prediction_app, runs_app, tools_app):  # panels keep this order
    app.add_typer(verbs)  # without a name: its verbs are those of the program


def _show_version(wanted: bool) -> None:
    if wanted:
        show(f"volseg {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    json_logs: JsonLogs = False,
    quiet: Quiet = False,
) -> None:
    """Hold the options that come before a verb."""
    del version, json_logs, quiet  # their callbacks have heard them
