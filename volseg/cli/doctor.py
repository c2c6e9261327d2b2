"""The verb that looks at the machine."""

import json
from pathlib import Path
from typing import Annotated

import typer

from volseg.streams import show

__all__ = ["doctor_app"]

doctor_app = typer.Typer()


@doctor_app.command(epilog="Example: volseg doctor --json > doctor.json")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print findings and facts as JSON.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only what takes no computing: no sums between processes, no kernel.")
    ] = False,
    cache: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Of prepared cases; default $VOLSEG_CACHE, ~/.cache/volseg.")
    ] = None,
    runs: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Of the runs; default runs.")] = None,
) -> None:
    """Look at this machine: GPUs, driver, torch, links, memory, disks, limits; say what is wrong and how to mend it.

    Exit status 1 if anything stops a training.
    """
    from volseg.diagnosis.doctor import (
        diagnose,  # pydantic: not for --help
        show_diagnosis,
    )

    diagnosis = diagnose(quick=quick, cache=cache, runs=runs)
    if as_json:
        show(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        show_diagnosis(diagnosis)
    if not diagnosis.is_sound:
        raise typer.Exit(1)
