"""The verb postprocess: what is done to label maps after the network, where that has proved right."""

from pathlib import Path
from typing import Annotated

import typer

from volseg.cli.completion import complete_run
from volseg.cli.options import Components
from volseg.streams import show

__all__ = ["postprocessing_app"]

postprocessing_app = typer.Typer()


@postprocessing_app.command(
    epilog="Example: volseg postprocess runs/task04_unet --apply predictions --output postprocessed"
)
def postprocess(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CV", autocompletion=complete_run, help="Folder of `volseg train` or `volseg cross-validate`."
        ),
    ],
    apply: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Change these label maps; what was measured before is not measured again."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="With --apply: folder for the changed ones.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="With --apply: replace those that are there.")] = False,
    components: Components = None,
) -> None:
    """Try largest components and hole filling on the validation cases; keep what raises Dice and lowers no label's."""
    from volseg import experiment  # imports torch: not for --help

    experiment.load_components(components or ())
    if (apply is None) != (output is None):
        raise typer.BadParameter("--apply names the label maps and --output where they go; give both or neither")
    if apply is None or output is None or not experiment.RunFolder(source).postprocessing_file.exists():
        measured = experiment.determine_postprocessing(source)
        show("\n".join(measured.lines()))
        show(experiment.RunFolder(source).postprocessing_file)
    if apply is not None and output is not None:
        for path in experiment.apply_postprocessing(source, apply, output, overwrite=overwrite):
            show(path)
