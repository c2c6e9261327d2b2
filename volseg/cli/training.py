"""Define the verbs for training and its cost: configure, train, cross-validate, search, plan, profile and compile."""

import gc
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from volseg import experiment
from volseg.cli.options import (
    DATA_SET,
    Channels,
    Classes,
    Components,
    ConfigFile,
    JsonLogs,
    NoCache,
    Output,
    Overrides,
    Quiet,
    config_argument,
    gather_overrides,
    require_data,
    verb,
)
from volseg.launched import read_launch
from volseg.streams import show

training_app = typer.Typer()


@verb(training_app, "Data", "volseg configure Task04_Hippocampus -o my_task.yaml")
def configure(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="A data set.", callback=DATA_SET)],
    output: Annotated[Path, Output(metavar="FILE", help="Config to write.")],
    preset: Annotated[
        str, Option(help="unet, resenc (residual encoder), vnet, whole (cut over GPUs), cascade (two configs).")
    ] = "unet",
    gpu_memory: Annotated[str, Option(metavar="SIZE", help="Memory of the GPU, such as 24GiB.")] = "8GiB",
    like: Annotated[
        Path | None,
        Option(
            metavar="SOURCE",
            help="Trained network, as for `volseg predict`: use its spacing, patch and network, and start from "
            "its weights.",
        ),
    ] = None,
    name: Annotated[str | None, Option(help="Name of the experiment; default: task and preset.")] = None,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Plan and train without the bad cases.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file if it exists.")] = False,
    components: Components = None,
) -> None:
    """Analyse a data set and write a training config; each value is commented with its reason."""
    from volseg.files import require_new  # these modules import torch: not for --help
    from volseg.planning.plan import parse_memory, write_config

    memory = parse_memory(gpu_memory)
    require_new(output, overwrite=overwrite)  # before minutes of reading
    planned = experiment.configure(folder, preset=preset, gpu_memory=memory, name=name, skip_bad=skip_bad, like=like)
    write_config(planned, output, overwrite=overwrite)
    show(experiment.format_plan(planned, output))


@verb(
    training_app,
    "Train",
    "volseg train configs/task04_unet.yaml --set data.root=DIR/Task04_Hippocampus\n\n"
    "`volseg init` explains every value of a config; `volseg components` lists what a config can name.",
)
def train(
    config: Annotated[Path, config_argument("YAML file of the experiment, or a data set to plan for.")],
    overrides: Overrides = None,
    output: Annotated[Path | None, Output(help="Run folder; default runs/NAME.")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue from the newest checkpoint, and validate.")] = False,
    restart: Annotated[
        bool, Option("--restart", help="Start or continue; if the run is finished, print its report.")
    ] = False,
    gpus: Annotated[
        int | None, Option(min=1, help="Number of GPUs; they share samples, or split a sample that does not fit.")
    ] = None,
    max_restarts: Annotated[int, Option(min=0, help="How often to restart all processes after a failure.")] = 0,
    no_cache: NoCache = False,
    components: Components = None,
    preset: Annotated[str | None, Option(help="Preset of the plan for a data set; default unet.")] = None,
    gpu_memory: Annotated[str | None, Option(metavar="SIZE", help="GPU memory to plan for; default 8GiB.")] = None,
    json_logs: JsonLogs = False,
    quiet: Quiet = False,
) -> None:
    """Train a network, validate it, and write a run folder."""
    from volseg.config.loading import is_config_file  # imports pydantic: not for --help

    overrides = gather_overrides(overrides, output, no_cache=no_cache)
    if not is_config_file(config) and experiment.is_data_set(config):
        from volseg.planning.plan import parse_memory  # imports torch: not for --help

        memory = parse_memory(gpu_memory or "8GiB")
        goes_on = resume or restart
        config = experiment.plan_run(
            config, preset=preset or "unet", gpu_memory=memory, overrides=overrides, resume=goes_on
        )
    elif preset or gpu_memory:
        raise typer.BadParameter(f"{config} is a config; --preset and --gpu-memory need a data set")
    loaded = experiment.load_config(config, overrides)
    require_data(loaded.data.root)
    launch = read_launch()
    # Not in launched processes: if only some machines see the folder, the others would wait for them.
    if restart and launch is None:
        report = experiment.load_finished_report(experiment.RunFolder(loaded.folder), loaded)
        if report is not None:
            show(report)
            return
    resume = resume or restart
    starts = max_restarts > 0 or experiment.count_workers(loaded, gpus) > 1  # a single process can restart too
    if (gpus or 1) > 1 or (launch is None and starts):
        overrides += ["parallel.devices=1"] if gpus == 1 else []
        experiment.train_on(gpus, config, overrides, resume=resume, max_restarts=max_restarts)
        return
    if gpus is not None:
        loaded = loaded.on_one_device(1 if launch is None else launch.world_size)
    begin = experiment.train  # imports the training code
    gc.freeze()  # modules live as long as this process, so collections during graph captures can skip them
    outcome = begin(loaded, resume=resume)
    if experiment.is_main_process():
        show(experiment.format_outcome(outcome))
    experiment.leave_processes()


@verb(
    training_app, "Train", "volseg cross-validate configs/task04_unet.yaml --folds 0 1 --gpus 2", name="cross-validate"
)
def cross_validate(
    config: ConfigFile,
    more_folds: Annotated[list[int] | None, Argument(hidden=True)] = None,
    overrides: Overrides = None,
    output: Annotated[Path | None, Output(help="Folder for fold_0, fold_1 ...; default runs/NAME.")] = None,
    folds: Annotated[list[int] | None, Option("--folds", metavar="K...", help="Folds to train; default all.")] = None,
    gpus: Annotated[int, Option(min=1, help="Number of folds to train at a time, each on its own GPU.")] = 1,
    resume: Annotated[bool, Option("--resume", help="Continue unfinished folds.")] = False,
    no_cache: NoCache = False,
    components: Components = None,
    json_logs: JsonLogs = False,
    quiet: Quiet = False,
) -> None:
    """Train all folds that are not finished, and write one table of all cases."""
    if more_folds and not folds:
        raise typer.BadParameter(f"got {more_folds[0]} after CONFIG; choose folds with --folds 0 1 ...")
    overrides = gather_overrides(overrides, output, no_cache=no_cache)
    # click passes one value to an option, so numbers after `--folds 0` are arguments.
    chosen = [*folds, *(more_folds or ())] if folds else None
    loaded = experiment.load_config(config, overrides)
    require_data(loaded.data.root)
    crossed = experiment.cross_validate(loaded, folds=chosen, gpus=gpus, resume=resume)
    show(experiment.format_cross_validation(crossed))
    if crossed.failures:
        raise typer.Exit(1)


@verb(
    training_app,
    "Train",
    "volseg search configs/task04_unet.yaml --over search.yaml --trials 30 --gpus 4\n\n"
    "A line of search.yaml: `optimizer.lr: {low: 1.0e-4, high: 1.0e-1, log: true}`, or a list of choices.",
)
def search(
    config: ConfigFile,
    over: Annotated[
        Path, Option("--over", metavar="FILE", help="YAML file: for each key a range or a list of choices.")
    ],
    overrides: Overrides = None,
    output: Annotated[Path | None, Output(help="Folder for trial_0, trial_1 ...; default runs/NAME.")] = None,
    trials: Annotated[int, Option(min=1, help="Total over all calls and machines that share the folder.")] = 20,
    gpus: Annotated[int, Option(min=1, help="Number of trials to train at a time, each on its own GPU.")] = 1,
    metric: Annotated[
        str, Option(help="Metric to compare, as TensorBoard names it, such as dice/LABEL.")
    ] = "dice_mean",
    minimize: Annotated[bool, Option("--minimize", help="Smaller values of the metric are better.")] = False,
    pruner: Annotated[str, Option(help="How to stop bad trials: median, halving (successive) or none.")] = "median",
    no_cache: NoCache = False,
    components: Components = None,
    json_logs: JsonLogs = False,
    quiet: Quiet = False,
) -> None:
    """Train with many values of the config and find the best; run it again to continue.

    Machines that share the folder share the trials. Needs Optuna: pip install optuna.
    """
    overrides = gather_overrides(overrides, output, no_cache=no_cache)
    require_data(experiment.load_config(config, overrides).data.root)
    record = experiment.search(
        config, over, overrides, trials=trials, gpus=gpus, metric=metric, minimize=minimize, pruner=pruner
    )
    show(experiment.format_search(record))
    if record.best is None:
        raise typer.Exit(1)


NOTHING_FITS = 3
"""Exit status if the training does not fit the machine in any way; 1 is for a config that cannot be planned."""


@verb(training_app, "Train", "volseg plan configs/task04_vnet.yaml --instance p3.8xlarge")
def plan(
    config: Annotated[Path | None, config_argument("YAML file of the experiment.")] = None,
    overrides: Overrides = None,
    gpus: Annotated[int | None, Option(min=1, help="Number of GPUs of the machine; default 1.")] = None,
    gpu_memory: Annotated[str | None, Option(metavar="SIZE", help="Memory of each GPU, such as 16GiB.")] = None,
    gpu: Annotated[str | None, Option(metavar="KIND", help="Kind of GPU, such as V100.")] = None,
    instance: Annotated[str | None, Option(metavar="NAME", help="Cloud instance, such as p3.8xlarge.")] = None,
    here: Annotated[bool, Option("--here", help="Plan for the GPUs of this machine.")] = False,
    max_volume: Annotated[bool, Option("--max-volume", help="Find the largest patch of each way to train.")] = False,
    calibrate: Annotated[bool, Option("--calibrate", help="Measure this machine's GPUs once (minutes).")] = False,
    channels: Channels = None,
    classes: Classes = None,
    thorough: Annotated[bool, Option("--all", help="Also estimate ways that cannot be the fastest.")] = False,
    numbers: Annotated[bool, Option("--numbers", help="Also estimate ways that do not fit (slower).")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON, described in docs/what-fits.md.")] = False,
    components: Components = None,
) -> None:
    """Estimate memory, time and price of a training, and choose how to use the GPUs; this needs no GPU.

    Exit status 3 if no way fits; the output then names a size that would fit.
    """
    if calibrate:
        show(experiment.calibrate_words(), err=as_json)  # a program reads only JSON
        if config is None:
            return
    if config is None:
        raise typer.BadParameter("name the CONFIG to plan for; only --calibrate works without one")
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


@verb(training_app, "Train", "volseg profile configs/task04_unet.yaml -o profile")
def profile(
    config: ConfigFile,
    overrides: Overrides = None,
    steps: Annotated[int, Option(min=1, help="Number of profiled steps, after the same number of timed steps.")] = 5,
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
    from volseg.reporting.profile import format_profile  # pydantic: not for --help

    loaded = experiment.load_config(config, overrides or ())
    profiled = experiment.profile_training(
        loaded, steps=steps, gpu=gpu, num_gpus=gpus, channels=channels, classes=classes
    )
    if experiment.is_main_process():
        page = None if output is None else profiled.write(output)
        if as_json:
            show(profiled.to_json())
        else:
            show(format_profile(profiled.report))
            if page is not None:
                show(f"written: {page}")
    experiment.leave_processes()


@verb(training_app, "Train", "volseg compile configs/task04_unet.yaml --gpu h200", name="compile")
def compile_(
    config: ConfigFile,
    gpu: Annotated[str, Option(metavar="KIND", help="GPU that will train, such as h200; this machine needs none.")],
    overrides: Overrides = None,
    channels: Channels = None,
    classes: Classes = None,
    components: Components = None,
) -> None:
    """Compile the kernels of a training ahead of time, also on a machine without a GPU.

    The kernels are cached in TRITON_CACHE_DIR. The training needs the same versions and config, except data and name.
    """
    from volseg.estimate.gpu_kinds import find_kind  # imports torch: not for --help

    loaded = experiment.load_config(config, overrides or ())
    compiled = experiment.compile_beforehand(loaded, find_kind(gpu), channels=channels, classes=classes)
    show(f"{compiled} kernels of {loaded.name} are compiled for {find_kind(gpu).name}")
