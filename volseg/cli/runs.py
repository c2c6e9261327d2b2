"""Define the verbs on an existing run: report, view, status and export."""

import json
import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from volseg import experiment
from volseg.cli.options import (
    Checkpoint,
    Components,
    MadeFolder,
    Output,
    Settings,
    Source,
    check_exists,
    source_argument,
    verb,
)
from volseg.config.nearest import suggest_path
from volseg.errors import VolsegError
from volseg.streams import show

runs_app = typer.Typer()


@verb(runs_app, "Evaluate", "volseg report runs/task04_unet -o task04.html")
def report(
    run: MadeFolder,
    output: Annotated[Path | None, Output(metavar="FILE", help="Page to write; default RUN/report.html.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write the report of a run as one HTML page, also while the run trains or after it failed.

    The page loads nothing else, so it can be sent and opened anywhere.
    """
    from volseg.files import require_new  # imports no torch, but more than --help needs
    from volseg.reporting import write_report

    if output is not None:
        require_new(output, overwrite=overwrite)
    show(write_report(run, output))


@verb(runs_app, "Evaluate", "volseg view runs/task04_unet")
def view(
    source: Annotated[
        Path,
        source_argument(
            "RUN|FOLDER|IMAGE",
            "A run or a cross-validation (its validation cases), a folder of predictions, a data set, or images.",
            "name a run, a folder of predictions or images, a data set, or an image",
        ),
    ],
    labels: Annotated[
        list[Path] | None,
        Argument(
            metavar="LABELS",
            callback=check_exists("name a label map, or a folder with one for each case"),
            help="Label maps to show beside each other: files, or folders with CASE.nii.gz.",
        ),
    ] = None,
    cases: Annotated[list[str] | None, Option("--case", metavar="ID", help="Only this case; repeatable.")] = None,
    channel: Annotated[
        int | None, Option(min=0, metavar="N", help="Default logging.channel of the run, else 0.")
    ] = None,
    settings: Settings = None,
    output: Annotated[Path | None, Output(metavar="FILE", help="Page to write; default in RUN or predictions.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace FILE if it exists.")] = False,
    no_open: Annotated[bool, Option("--no-open", help="Only write the page.")] = False,
) -> None:
    """Show slices with label maps in a browser: one HTML page with the volumes in it, which loads nothing else.

    A run's page has the prediction beside the reference. Large volumes are thinned, and the page states the spacing.
    """
    page = experiment.view(
        source,
        labels or (),
        cases=cases or (),
        channel=channel,
        overrides=settings or (),
        output=output,
        overwrite=overwrite,
    )
    show(page)
    # Without a screen, a text browser would take over the terminal.
    if not no_open and (sys.platform != "linux" or os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}):
        webbrowser.open(page.absolute().as_uri())


STALE, NO_RUN = 1, 2
"""Exit statuses, besides 0 for success."""


@verb(runs_app, "Evaluate", "volseg status runs/task04_unet --max-age 10m")
def status(
    run: Annotated[Path, Argument(metavar="RUN|CV", help="Folder of a training or a cross-validation.")],
    as_json: Annotated[bool, Option("--json", help="Print everything as JSON.")] = False,
    max_age: Annotated[
        str | None, Option(metavar="AGE", help="Exit status 1 for a failure, and for a last heartbeat older than 10m.")
    ] = None,
) -> None:
    """Show the state, epoch, score, remaining time and last heartbeat of a training.

    From any machine that sees the folder. Exit status 0; with --max-age 1 if it hangs or has failed; 2 if there is no
    run.
    """
    from volseg.monitoring.run_files import list_run_folders, look_at, parse_age  # imports pydantic: not for --help

    try:
        oldest = None if max_age is None else parse_age(max_age)
    except VolsegError as refused:  # not 1, which means that the training hangs
        raise typer.BadParameter(str(refused)) from refused
    looks = [look_at(folder) for folder in list_run_folders(run)]
    faults = {} if oldest is None else {look.folder: fault for look in looks if (fault := look.find_fault(oldest))}
    if as_json:
        show(json.dumps({"runs": [look.as_json() for look in looks], "faults": [*faults.values()]}, indent=2))
    else:
        show("\n".join(line for look in looks for line in look.lines()) or f"{run} holds no run{suggest_path(run)}")
        for folder, fault in faults.items():
            show(f"volseg: {folder}: {fault}", err=True)
    if not looks or faults:
        raise typer.Exit(STALE if looks else NO_RUN)


@verb(runs_app, "Use", "volseg export runs/task04_unet -o model.zip --licence CC-BY-4.0")
def export(
    source: Source,
    output: Annotated[Path, Output(metavar="FILE", help="File, such as model.zip; for a bundle a new folder.")],
    to: Annotated[
        str, Option("--to", metavar="FORMAT", help="archive (for volseg predict), torchscript, onnx or monai-bundle.")
    ] = "archive",
    checkpoint: Checkpoint = "latest",
    licence: Annotated[str, Option(help="Licence of the weights, such as CC-BY-4.0.")] = "not stated",
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing file.")] = False,
    components: Components = None,
) -> None:
    """Write a trained network as one file: a volseg archive, TorchScript, ONNX or a MONAI bundle.

    An archive needs the folder of a training or a cross-validation. The other formats are run and compared with the
    network before they are kept.
    """
    show(experiment.export(source, output, to=to, checkpoint=checkpoint, licence=licence, overwrite=overwrite))
