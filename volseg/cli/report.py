"""The verb that writes a run's page: report."""

from pathlib import Path
from typing import Annotated

import typer

from volseg.streams import show

__all__ = ["report_app"]

report_app = typer.Typer()


@report_app.command(epilog="Example: volseg report runs/task04_unet -o task04.html")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or that of a cross-validation.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default RUN/report.html, which is replaced.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the FILE if it is there.")] = False,
) -> None:
    """Write what a run came to as one page of HTML, also of a run that goes on, was interrupted, or failed.

    The file asks nothing of any other: it can be sent and opened anywhere.
    """
    from volseg.files import require_new  # imports no torch, and yet more than --help needs
    from volseg.reporting import write_report

    if output is not None:
        require_new(output, overwrite=overwrite)
    show(write_report(run, output))
