"""The verb that says what fits, and what is fastest, before the first GPU hour."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from volseg.cli.completion import complete_config
from volseg.cli.options import Components, Overrides
from volseg.streams import show

__all__ = ["planning_app"]

planning_app = typer.Typer()

NOTHING_FITS = 3
"""Exit status where the training fits the machine in no way; 1 is for a config that cannot be planned for."""


@planning_app.command(epilog="Example: volseg plan configs/task04_vnet.yaml --instance p3.8xlarge")
def plan(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="YAML file of the experiment.", autocompletion=complete_config),
    ] = None,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of one machine; default 1.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of each of them, such as 16GiB.")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="KIND", help="What they are, such as V100.")] = None,
    instance: Annotated[
        str | None, typer.Option(metavar="NAME", help="In place of these: a rented machine, such as p3.8xlarge.")
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="In place of these: the GPUs of this machine.")] = False,
    max_volume: Annotated[
        bool, typer.Option("--max-volume", help="Find the largest patch that can be trained on, in each way.")
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure the GPUs of this machine once, minutes, and keep what was found."),
    ] = False,
    channels: Annotated[int | None, typer.Option(min=1, help="Of the images, where the data set is not there.")] = None,
    classes: Annotated[
        int | None, typer.Option(min=2, help="Of the label maps, with the background, where the data set is not there.")
    ] = None,
    thorough: Annotated[bool, typer.Option("--all", help="Look at those ways too that cannot be the fastest.")] = False,
    numbers: Annotated[
        bool, typer.Option("--numbers", help="Say how much every way needs that does not fit, too; takes longer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; docs/what-fits.md says what is in it.")] = False,
    components: Components = None,
) -> None:
    """Forecast memory, time and price of a training on a machine, without a GPU, and say how to share its GPUs.

    Exit status 3: it fits in no way, and what would is told.
    """
    from volseg import experiment  # imports torch: not for --help

    if calibrate:
        show(experiment.calibrate_words(), err=as_json)  # JSON alone is what a program reads
        if config is None:
            return
    if config is None:
        raise typer.BadParameter("which CONFIG is to be planned for? (without one there is --calibrate only)")
    experiment.load_components(components or ())
    loaded = experiment.load_config(config, overrides or ())
    experiment.require_weights(loaded)  # what no training begins with is no use to plan for
    machine = experiment.find_machine(num_gpus=gpus, gpu_memory=gpu_memory, kind=gpu, instance=instance, here=here)
    if max_volume:
        volumes = experiment.plan_volumes(loaded, machine, channels=channels, classes=classes, forks=True)
        show(volumes.to_json() if as_json else volumes.words())
        fits = volumes.fits
    else:
        planned = experiment.plan_training(
            loaded, machine, channels=channels, classes=classes, thorough=thorough, numbers=numbers, forks=True
        )
        if as_json:
            show(planned.to_json())
        else:
            show(experiment.plan_words(planned, config, overrides or (), components or ()))
        fits = planned.chosen is not None
    sys.stdout.flush()
    if not fits:
        raise typer.Exit(NOTHING_FITS)
