"""Define the verbs from a data set to trained networks: configure, train, cross-validate and search."""

import gc
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from volseg import experiment
from volseg.cli.options import (
    DATA_SET,
    Components,
    ConfigFile,
    JsonLogs,
    NoCache,
    Overrides,
    Quiet,
    SuggestingCommand,
    check_config,
    complete_config,
    complete_run,
    gather_overrides,
    verb,
)
from volseg.streams import show

__all__ = ["training_app"]

training_app = typer.Typer()


@verb(training_app, "Data", "volseg configure Task04_Hippocampus -o my_task.yaml")
def configure(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="A data set.", callback=DATA_SET)],
    output: Annotated[Path, Option("--output", "-o", metavar="FILE", help="The config to write.")],
    preset: Annotated[
        str, Option(help="unet, resenc (residual encoder), vnet, whole (cut over GPUs), cascade (two configs).")
    ] = "unet",
    gpu_memory: Annotated[str, Option(metavar="SIZE", help="Of the GPU, such as 24GiB.")] = "8GiB",
    like: Annotated[
        Path | None,
        Option(
            metavar="SOURCE",
            autocompletion=complete_run,
            help="A trained network, as `volseg predict` takes it: take over its spacing, patch and network, begin "
            "with its weights.",
        ),
    ] = None,
    name: Annotated[str | None, Option(help="Of the experiment; default the task's and the preset's.")] = None,
    skip_bad: Annotated[bool, Option("--skip-bad", help="Plan and train without the bad cases.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file if it is there.")] = False,
    components: Components = None,
) -> None:
    """Analyse a data set and write a training config; each value is commented with its reason."""
    from volseg.files import require_new  # what follows imports torch: not for --help
    from volseg.planning import parse_memory, write_config

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
    cls=SuggestingCommand,
)
def train(
    config: Annotated[
        Path,
        Argument(
            metavar="CONFIG",
            help="YAML file of the experiment, or a data set to plan for.",
            autocompletion=complete_config,
            callback=check_config,
        ),
    ],
    overrides: Overrides = None,
    output: Annotated[Path | None, Option("--output", "-o", help="Run folder; default runs/NAME.")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue from the newest checkpoint, and validate.")] = False,
    restart: Annotated[bool, Option("--restart", help="Begin, continue, or print the report if all is done.")] = False,
    gpus: Annotated[
        int | None, Option(min=1, help="Train on so many GPUs: samples are shared among them where they fit, else cut.")
    ] = None,
    max_restarts: Annotated[int, Option(min=0, help="How often to start all processes again after a failure.")] = 0,
    no_cache: NoCache = False,
    components: Components = None,
    preset: Annotated[str | None, Option(help="For a data set, as `volseg configure`; default unet.")] = None,
    gpu_memory: Annotated[str | None, Option(metavar="SIZE", help="For a data set; default 8GiB.")] = None,
    json_logs: JsonLogs = False,
    quiet: Quiet = False,
) -> None:
    """Train a network, validate it, and write a run folder."""
    from volseg.config.loading import is_config_file  # imports pydantic: not for --help
    from volseg.parallel.devices import count_launched, is_launched

    overrides = gather_overrides(overrides, output, no_cache=no_cache)
    if not is_config_file(config) and experiment.is_data_set(config):
        from volseg.planning import parse_memory  # imports torch: not for --help

        memory = parse_memory(gpu_memory or "8GiB")
        goes_on = resume or restart
        config = experiment.plan_run(
            config, preset=preset or "unet", gpu_memory=memory, overrides=overrides, resume=goes_on
        )
    elif preset or gpu_memory:
        raise typer.BadParameter(f"{config} is a config; --preset and --gpu-memory plan for a data set")
    loaded = experiment.load_config(config, overrides)
    # Not in launched processes: one on another machine may not see the folder, and would wait for the others.
    if restart and not is_launched():
        report = experiment.load_finished_report(experiment.RunFolder(loaded.folder), loaded)
        if report is not None:
            show(report)
            return
    resume = resume or restart
    starts = max_restarts > 0 or experiment.count_workers(loaded, gpus) > 1  # a single process is restarted, too
    if (gpus or 1) > 1 or (not is_launched() and starts):
        overrides += ["parallel.devices=1"] if gpus == 1 else []
        experiment.train_on(gpus, config, overrides, resume=resume, max_restarts=max_restarts)
        return
    if gpus is not None:
        loaded = loaded.on_one_device(count_launched())
    begin = experiment.train  # imports the training code
    gc.freeze()  # modules live as long as this process: the garbage collections of recordings need not visit them
    outcome = begin(loaded, resume=resume)
    if experiment.is_main_process():
        show(experiment.format_outcome(outcome))
    experiment.leave_processes()


@verb(
    training_app,
    "Train",
    "volseg cross-validate configs/task04_unet.yaml --folds 0 1 --gpus 2",
    name="cross-validate",
    cls=SuggestingCommand,
)
def cross_validate(
    config: ConfigFile,
    more_folds: Annotated[list[int] | None, Argument(hidden=True)] = None,
    overrides: Overrides = None,
    output: Annotated[Path | None, Option("--output", "-o", help="For fold_0, fold_1 ...; default runs/NAME.")] = None,
    folds: Annotated[list[int] | None, Option("--folds", metavar="K...", help="Default all.")] = None,
    gpus: Annotated[int, Option(min=1, help="Train so many folds at a time, each on a GPU of its own.")] = 1,
    resume: Annotated[bool, Option("--resume", help="Go on with folds that were begun.")] = False,
    no_cache: NoCache = False,
    components: Components = None,
    json_logs: JsonLogs = False,
    quiet: Quiet = False,
) -> None:
    """Train all folds that are not finished, and write one table of all cases."""
    if more_folds and not folds:
        raise typer.BadParameter(f"what does {more_folds[0]} mean after CONFIG? Folds are chosen by --folds 0 1 ...")
    overrides = gather_overrides(overrides, output, no_cache=no_cache)
    # click gives an option one value, so numbers after `--folds 0` are arguments.
    chosen = [*folds, *(more_folds or ())] if folds else None
    loaded = experiment.load_config(config, overrides)
    crossed = experiment.cross_validate(loaded, folds=chosen, gpus=gpus, resume=resume)
    show(experiment.format_cross_validation(crossed))
    if crossed.failures:
        raise typer.Exit(1)


@verb(
    training_app,
    "Train",
    "volseg search configs/task04_unet.yaml --over search.yaml --trials 30 --gpus 4\n\n"
    "A line of search.yaml: `optimizer.lr: {low: 1.0e-4, high: 1.0e-1, log: true}`, or a list of choices.",
    cls=SuggestingCommand,
)
def search(
    config: ConfigFile,
    over: Annotated[
        Path,
        typer.Option("--over", metavar="FILE", help="YAML file of keys, each with a range or a list of choices."),
    ],
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the run folders trial_0 ...; default runs/NAME.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Trials in all: of earlier calls and of other machines too.")] = 20,
    gpus: Annotated[int, typer.Option(min=1, help="Train so many trials at a time, each on a GPU of its own.")] = 1,
    metric: Annotated[
        str, typer.Option(help="What is compared, as TensorBoard shows it below val/, such as dice/LABEL.")
    ] = "dice_mean",
    minimize: Annotated[bool, typer.Option("--minimize", help="Smaller values of the metric are better.")] = False,
    pruner: Annotated[
        str, typer.Option(help="Optuna's, which stops bad trials: median, halving (successive halving) or none.")
    ] = "median",
    no_cache: NoCache = False,
    components: Components = None,
    json_logs: JsonLogs = False,
    quiet: Quiet = False,
) -> None:
    """Train repeatedly with other values, and find the best ones; the same command continues a search.

    Machines that share the folder share the trials. Needs Optuna: pip install optuna.
    """
    overrides = gather_overrides(overrides, output, no_cache=no_cache)
    record = experiment.search(
        config, over, overrides, trials=trials, gpus=gpus, metric=metric, minimize=minimize, pruner=pruner
    )
    show(experiment.format_search(record))
    if record.best is None:
        raise typer.Exit(1)
