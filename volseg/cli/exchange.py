"""The verb export: a run as one file, or in a format that others run."""

from pathlib import Path
from typing import Annotated

import typer

from volseg.cli.completion import complete_run
from volseg.cli.options import Checkpoint, Components
from volseg.streams import show

__all__ = ["exchange_app"]

exchange_app = typer.Typer()


@exchange_app.command(epilog="Example: volseg export runs/task04_unet -o model.zip --licence CC-BY-4.0")
def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            autocompletion=complete_run,
            help="Folder of `volseg train` or `volseg cross-validate`; for other programs, whatever predicts.",
        ),
    ],
    old_output: Annotated[Path | None, typer.Argument(metavar="[OUT]", hidden=True)] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="To write, such as model.zip; with monai-bundle a new folder.  [required]",
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="archive (one file for volseg predict), torchscript, onnx or monai-bundle: of one network.",
        ),
    ] = "archive",
    checkpoint: Checkpoint = "latest",
    licence: Annotated[
        str, typer.Option(help="Under which the weights may be used, such as CC-BY-4.0.")
    ] = "not stated",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    components: Components = None,
) -> None:
    """Write a trained network as one file that predicts without its run, or for other programs.

    What other programs get is run and compared with the network before it is kept.
    """
    from volseg import experiment  # imports torch: not for --help

    # The file stood behind RUN before it became -o, as elsewhere.
    if (output is None) == (old_output is None):
        raise typer.BadParameter("where is it to be written? Name one file by -o, such as -o model.zip")
    output = output or old_output
    assert output is not None
    experiment.load_components(components or ())
    show(experiment.export(source, output, to=to, checkpoint=checkpoint, licence=licence, overwrite=overwrite))
