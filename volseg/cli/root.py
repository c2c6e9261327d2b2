"""The command line as a whole: every verb, and the options before a verb."""

from typing import Annotated

import typer

from volseg.cli.compiling import compiling_app
from volseg.cli.configs import configs_app
from volseg.cli.data import data_app
from volseg.cli.doctor import doctor_app
from volseg.cli.evaluation import evaluation_app
from volseg.cli.exchange import exchange_app
from volseg.cli.options import JsonLogs, Quiet
from volseg.cli.planning import planning_app
from volseg.cli.postprocessing import postprocessing_app
from volseg.cli.prediction import prediction_app
from volseg.cli.profile import profile_app
from volseg.cli.report import report_app
from volseg.cli.status import status_app
from volseg.cli.tools import tools_app
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
app.add_typer(training_app)  # without a name: its verbs are the program's own
app.add_typer(planning_app)
app.add_typer(profile_app)
app.add_typer(compiling_app)
app.add_typer(evaluation_app)
app.add_typer(prediction_app)
app.add_typer(postprocessing_app)
app.add_typer(report_app)
app.add_typer(status_app)
app.add_typer(tools_app)
app.add_typer(doctor_app)
app.add_typer(configs_app)
app.add_typer(exchange_app)
app.add_typer(data_app)


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
