"""The verb that looks at a training from outside: status."""

import json
from pathlib import Path
from typing import Annotated

import typer

from volseg.errors import VolsegError
from volseg.streams import show

__all__ = ["status_app"]

status_app = typer.Typer()

STALE, NO_RUN = 1, 2
"""Exit statuses, besides 0 for what is fine."""


@status_app.command(epilog="Example: volseg status runs/task04_unet --max-age 10m")
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN|CV", help="Folder of a training or of a cross-validation.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    max_age: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Exit status 1 for a last heartbeat older than 10m, and for a failure."),
    ] = None,
) -> None:
    """Say how far a training is: state, epoch, score, time left, and the age of its last heartbeat.

    From any machine that sees the folder. Exit status 0; with --max-age 1 if it hangs or has failed; 2 if there is no
    run.
    """
    from volseg.monitoring.run_status import find_runs, look_at, parse_age  # imports pydantic: not for --help

    try:
        oldest = None if max_age is None else parse_age(max_age)
    except VolsegError as refused:  # not 1, which says that the training hangs
        raise typer.BadParameter(str(refused)) from refused
    looks = [look_at(folder) for folder in find_runs(run)]
    faults = {} if oldest is None else {look.folder: fault for look in looks if (fault := look.find_fault(oldest))}
    if as_json:
        show(json.dumps({"runs": [look.as_json() for look in looks], "faults": [*faults.values()]}, indent=2))
    else:
        show("\n".join(line for look in looks for line in look.lines()) or f"{run} holds no run")
        for folder, fault in faults.items():
            show(f"volseg: {folder}: {fault}", err=True)
    if not looks or faults:
        raise typer.Exit(STALE if looks else NO_RUN)
