"""The verbs from a data set to a trained network: configure, train and cross-validate."""

import gc
from pathlib import Path
from typing import Annotated

import typer

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
)
from volseg.streams import show

__all__ = ["training_app"]

training_app = typer.Typer()


@training_app.command(epilog="Example: volseg configure Task04_Hippocampus -o my_task.yaml", rich_help_panel="Data")
def configure(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A data set.", callback=DATA_SET)],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The config to write.")],
    preset: Annotated[
        str,
        typer.Option(help="unet, resenc (residual encoder), vnet, whole (cut over GPUs), or cascade (two configs)."),
    ] = "unet",
    gpu_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Of the GPU that is planned for, such as 24GiB.")
    ] = "8GiB",
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="SOURCE",
            autocompletion=complete_run,
            help="A trained network, as `volseg predict` takes it: take over its spacing, patch and network, begin "
            "with its weights.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the experiment; default the task's and the preset's.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Plan and train without the bad cases.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    components: Components = None,
) -> None:
    """Analyse a data set and write a training config; each value is commented with its reason."""
    from volseg import experiment  # imports torch: not for --help
    from volseg.files import require_new
    from volseg.planning import parse_memory, write_config

    memory = parse_memory(gpu_memory)
    require_new(output, overwrite=overwrite)  # before minutes of reading
    experiment.load_components(components or ())  # readers may be among them
    planned = experiment.configure(folder, preset=preset, gpu_memory=memory, name=name, skip_bad=skip_bad, like=like)
    write_config(planned, output, overwrite=overwrite)
    show(experiment.format_plan(planned, output))


@training_app.command(
    cls=SuggestingCommand,
    epilog="Example: volseg train configs/task04_unet.yaml --set data.root=DIR/Task04_Hippocampus\n\n"
    "`volseg init` explains every value of a config; `volseg components` lists what a config can name.",
    rich_help_panel="Train",
)
def train(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="YAML file of the experiment, or a data set to plan for.",
            autocompletion=complete_config,
            callback=check_config,
        ),
    ],
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Run folder; default runs/NAME.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run folder's newest checkpoint, and validate at the end.")
    ] = False,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="For a command that is run again and again: begin, or go on, or print the report if all is done.",
        ),
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Train on so many GPUs: the batch is dealt to them where its samples fit, else cut."),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Start all processes again, so often, after one has failed.")
    ] = 0,
    no_cache: NoCache = False,
    components: Components = None,
    preset: Annotated[
        str | None, typer.Option(help="With a data set: what is planned, as in `volseg configure`; default unet.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="With a data set: of one GPU; default 8GiB.")
    ] = None,
    json_logs: JsonLogs = False,
    quiet: Quiet = False,
) -> None:
    """Train a network, validate it, and write a run folder."""
    del json_logs, quiet  # their callbacks have heard them
    from volseg import experiment  # imports torch: not for --help
    from volseg.config.loading import is_config_file, path_override
    from volseg.parallel.devices import count_launched, is_launched

    if components:  # without, nothing that trains is imported: it may be for processes that are started
        experiment.load_components(components)
    overrides = [*(overrides or ()), *([path_override("output", output)] if output else ())]
    overrides += ["data.cache=none"] if no_cache else []
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
    # Not in launched processes: of those on another machine some may not see the folder, and would wait for the rest.
    if restart and not is_launched():
        report = experiment.load_finished_report(experiment.RunFolder(loaded.folder), loaded)
        if report is not None:
            show(report)
            return
    resume = resume or restart
    starts = max_restarts > 0 or experiment.count_workers(loaded, gpus) > 1  # one process too is started again
    if (gpus or 1) > 1 or (not is_launched() and starts):
        overrides += ["parallel.devices=1"] if gpus == 1 else []
        experiment.train_on(gpus, config, overrides, resume=resume, max_restarts=max_restarts)
        return
    if gpus is not None:
        loaded = loaded.on_one_device(count_launched())
    begin = experiment.train  # imports what trains
    gc.freeze()  # modules live as long as this process: the garbage collections of recordings need not visit them
    outcome = begin(loaded, resume=resume)
    if experiment.is_main_process():
        show(experiment.format_outcome(outcome))
    experiment.leave_processes()


@training_app.command(
    "cross-validate",
    cls=SuggestingCommand,
    epilog="Example: volseg cross-validate configs/task04_unet.yaml --folds 0 1 --gpus 2",
    rich_help_panel="Train",
)
def cross_validate(
    config: ConfigFile,
    more_folds: Annotated[list[int] | None, typer.Argument(hidden=True)] = None,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the run folders fold_0 ...; default runs/NAME.")
    ] = None,
    folds: Annotated[
        list[int] | None, typer.Option("--folds", metavar="K...", help="Which folds to train; default all.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Train so many folds at a time, each on a GPU of its own.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with folds that were begun.")] = False,
    no_cache: NoCache = False,
    components: Components = None,
    json_logs: JsonLogs = False,
    quiet: Quiet = False,
) -> None:
    """Train all folds that are not finished, and write one table of all cases."""
    del json_logs, quiet  # their callbacks have heard them
    from volseg import experiment  # imports torch: not for --help
    from volseg.config.loading import path_override

    if more_folds and not folds:
        raise typer.BadParameter(f"what does {more_folds[0]} mean after CONFIG? Folds are chosen by --folds 0 1 ...")
    experiment.load_components(components or ())
    overrides = [*(overrides or ()), *([path_override("output", output)] if output else ())]
    overrides += ["data.cache=none"] if no_cache else []
    # Numbers after `--folds 0` are arguments to click, which gives an option one value.
    chosen = [*folds, *(more_folds or ())] if folds else None
    loaded = experiment.load_config(config, overrides)
    crossed = experiment.cross_validate(loaded, folds=chosen, gpus=gpus, resume=resume)
    show(experiment.format_cross_validation(crossed))
    if crossed.failures:
        raise typer.Exit(1)
