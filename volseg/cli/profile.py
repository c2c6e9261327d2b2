"""The verb that says where a training step's time goes."""

from pathlib import Path
from typing import Annotated

import typer

from volseg.cli.completion import complete_config
from volseg.cli.options import Components, Overrides, SuggestingCommand
from volseg.streams import show

__all__ = ["profile_app"]

profile_app = typer.Typer()


@profile_app.command(cls=SuggestingCommand, epilog="Example: volseg profile configs/task04_unet.yaml -o profile")
def profile(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="YAML file of the experiment.", autocompletion=complete_config),
    ],
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are watched, after as many that are timed.")] = 5,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Write page, table and trace there.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Forecast the step for a GPU that is not here, such as h200; runs nothing."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="With --gpu: how many; default what the config asks.")] = None,
    channels: Annotated[int | None, typer.Option(min=1, help="Of the images, where the data set is not there.")] = None,
    classes: Annotated[
        int | None, typer.Option(min=2, help="Of the label maps, with the background, where the data set is not there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; docs/profile.md says what is in it.")] = False,
    components: Components = None,
) -> None:
    """Say where a training step's time goes: kernels by layer and direction, waiting, and what limits it.

    Trains on random voxels for some seconds; needs no data, and leaves no run folder.
    """
    from volseg import experiment  # imports torch: not for --help
    from volseg.profiling.table import show_profile  # rich: not for --help

    experiment.load_components(components or ())
    loaded = experiment.load_config(config, overrides or ())
    profiled = experiment.profile_training(
        loaded, steps=steps, gpu=gpu, num_gpus=gpus, channels=channels, classes=classes
    )
    if experiment.is_main_process():
        page = None if output is None else profiled.write(output)
        if as_json:
            show(profiled.to_json())
        else:
            show_profile(profiled.report)
            if page is not None:
                show(f"written: {page}")
    experiment.leave_processes()
