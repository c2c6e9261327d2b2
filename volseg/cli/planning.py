"""Define the verbs on the cost of a training: plan, profile and compile."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from volseg import experiment
from volseg.cli.options import (
    Channels,
    Classes,
    Components,
    ConfigFile,
    Output,
    Overrides,
    SuggestingCommand,
    config_argument,
    verb,
)
from volseg.streams import show

planning_app = typer.Typer()


NOTHING_FITS = 3
"""Exit status if the training does not fit the machine in any way; 1 is for a config that cannot be planned."""


@verb(planning_app, "Train", "volseg plan configs/task04_vnet.yaml --instance p3.8xlarge")
def plan(
    config: Annotated[Path | None, config_argument("YAML file of the experiment.")] = None,
    overrides: Overrides = None,
    gpus: Annotated[int | None, Option(min=1, help="Number of GPUs of the machine; default 1.")] = None,
    gpu_memory: Annotated[str | None, Option(metavar="SIZE", help="Memory of each GPU, such as 16GiB.")] = None,
    gpu: Annotated[str | None, Option(metavar="KIND", help="Kind of GPU, such as V100.")] = None,
    instance: Annotated[str | None, Option(metavar="NAME", help="For a rented machine, such as p3.8xlarge.")] = None,
    here: Annotated[bool, Option("--here", help="For the GPUs of this machine.")] = False,
    max_volume: Annotated[bool, Option("--max-volume", help="Find the largest patch of each way to train.")] = False,
    calibrate: Annotated[bool, Option("--calibrate", help="Measure this machine's GPUs once (minutes).")] = False,
    channels: Channels = None,
    classes: Classes = None,
    thorough: Annotated[bool, Option("--all", help="Also estimate ways that cannot be the fastest.")] = False,
    numbers: Annotated[bool, Option("--numbers", help="Also estimate ways that do not fit (slower).")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON, described in docs/what-fits.md.")] = False,
    components: Components = None,
) -> None:
    """Estimate memory, time and price of a training without a GPU, and choose how to share GPUs.

    Exit status 3 if no way fits; the output then names a size that would.
    """
    if calibrate:
        show(experiment.calibrate_words(), err=as_json)  # a program reads only JSON
        if config is None:
            return
    if config is None:
        raise typer.BadParameter("which CONFIG is to be planned for? (without one there is --calibrate only)")
    loaded = experiment.load_config(config, overrides or ())
    experiment.require_weights(loaded)  # a training with missing weights cannot start
    machine = experiment.resolve_machine(num_gpus=gpus, gpu_memory=gpu_memory, kind=gpu, instance=instance, here=here)
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


@verb(planning_app, "Train", "volseg profile configs/task04_unet.yaml -o profile", cls=SuggestingCommand)
def profile(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[int, Option(min=1, help="Number of profiled steps, after as many timed ones.")] = 5,
    output: Annotated[Path | None, Output(metavar="FOLDER", help="Folder for page, table and trace.")] = None,
    gpu: Annotated[str | None, Option(metavar="KIND", help="Only estimate the step on a GPU such as h200.")] = None,
    gpus: Annotated[int | None, Option(min=1, help="Number of GPUs with --gpu; default the config's.")] = None,
    channels: Channels = None,
    classes: Classes = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, described in docs/profile.md.")] = False,
    components: Components = None,
) -> None:
    """Show where the time of a training step goes: kernels by layer and direction, waiting, bounds.

    Trains on random voxels for some seconds, without data, and leaves no run folder.
    """
    from volseg.profiling.table import show_profile  # rich: not for --help

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


@verb(
    planning_app, "Train", "volseg compile configs/task04_unet.yaml --gpu h200", name="compile", cls=SuggestingCommand
)
def compile_(
    config: ConfigFile,
    gpu: Annotated[str, Option(metavar="KIND", help="GPU that will train, such as h200; this machine needs none.")],
    overrides: Overrides = None,
    channels: Channels = None,
    classes: Classes = None,
    components: Components = None,
) -> None:
    """Compile the kernels of a training ahead of time, also on a machine without a GPU.

    The cache is the folder TRITON_CACHE_DIR. Versions and config, except data and name, must be the training's.
    """
    from volseg.estimate.gpu_kinds import find_kind  # imports torch: not for --help

    loaded = experiment.load_config(config, overrides or ())
    compiled = experiment.compile_beforehand(loaded, find_kind(gpu), channels=channels, classes=classes)
    show(f"{compiled.kernels} kernels of {loaded.name} are compiled for {find_kind(gpu).name}")


@planning_app.command(hidden=True)
def compile_kernels(components: Components = None) -> None:
    """Compile the kernels of the training that started this process, while the training reads its cases."""
    experiment.serve_kernels()
