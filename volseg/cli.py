"""The command line: each verb a few lines onto `volseg.experiment`.

What volseg raises on purpose is printed as one message without a traceback, with exit status 1, and so is what the
system refuses (a full disk); Ctrl-C ends with 130, SIGTERM with 143, SIGHUP with 129.
"""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from volseg.errors import VolsegError
from volseg.launched import OWN_LAUNCHER, Launch, find_launch
from volseg.lifetime import end_at_exit, end_with_launcher
from volseg.monitoring.console import BesideBars, close_bars
from volseg.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="volseg",
    help="Train 3D medical segmentation networks; several GPUs behave as one large one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
data_app = typer.Typer(name="data", help="Fetch, make, describe and check data sets.", no_args_is_help=True)
app.add_typer(data_app)
cache_app = typer.Typer(name="cache", help="Look after the cases that are kept prepared.", no_args_is_help=True)
data_app.add_typer(cache_app)

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value, such as training.epochs=5.")
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Prepare all cases anew, and keep none: data.cache=none.")]
CacheFolder = Annotated[
    str, typer.Option("--folder", help="The cache; default $VOLSEG_CACHE, else volseg in the user's cache folder.")
]
Components = Annotated[
    list[Path] | None,
    typer.Option(
        "--components", metavar="FILE", help="Run this file of Python first, which registers components of your own."
    ),
]
ENDING = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
"""What clusters end jobs with, and closed terminals; Python itself takes care of Ctrl-C."""

INTERRUPTED = tuple(128 + number for number in (signal.SIGINT, *ENDING))
"""Exit statuses."""

WAYS_ON = {
    "train": "a training that had begun is saved, go on with it by --resume",
    "cross-validate": "a training that had begun is saved, go on with it by --resume",
    "predict": "the label maps that are written are whole, go on with the others by --resume",
}
"""What to do by verb, after an interruption or a refusal of the system; the other verbs are begun again."""

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `volseg train` made.")]
Checkpoint = Annotated[
    str,
    typer.Option(
        help="latest (the end of the training), best (on the validation cases) or previous (the latest before it)."
    ),
]


Preset = Annotated[
    str, typer.Option(help="unet, resenc (residual encoder), vnet, or whole (whole volumes, cut over GPUs).")
]
GpuMemory = Annotated[str, typer.Option(metavar="SIZE", help="Of the GPU that is planned for, such as 24GiB.")]


@app.command(epilog="Example: volseg configure Task04_Hippocampus -o my_task.yaml")
def configure(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A data set.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The config to write.")],
    preset: Preset = "unet",
    gpu_memory: GpuMemory = "8GiB",
    name: Annotated[str | None, typer.Option(help="Of the experiment; default the task's and the preset's.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Plan and train without the bad cases.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Look at every case of a data set, and write a config for it in which every number says why it is what it is."""
    from volseg import experiment  # imports torch: not for --help
    from volseg.planning import parse_memory, require_new, write_config

    memory = parse_memory(gpu_memory)
    require_new(output, force=force)  # before minutes of reading
    planned = experiment.configure(folder, preset=preset, gpu_memory=memory, name=name, skip_bad=skip_bad)
    write_config(planned, output, force=force)
    typer.echo(experiment.configure_words(planned, output))


@app.command(epilog="Example: volseg train configs/task04_unet.yaml --set data.root=DIR/Task04_Hippocampus")
def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file of the experiment; or a data set, to be planned for.")
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
        int, typer.Option(min=0, help="With --gpus: start all processes again, so often, after one has failed.")
    ] = 0,
    no_cache: NoCache = False,
    components: Components = None,
    preset: Annotated[
        str | None, typer.Option(help="With a data set: what is planned, as in `volseg configure`; default unet.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="With a data set: of one GPU; default 8GiB.")
    ] = None,
) -> None:
    """Train a network, validate it, and leave a run folder."""
    from volseg import experiment  # imports torch: not for --help
    from volseg.config.loading import path_override
    from volseg.parallel.devices import count_launched, is_launched
    from volseg.planning import parse_memory

    experiment.load_components(components or ())
    overrides = [*(overrides or ()), *([path_override("output", output)] if output else ())]
    overrides += ["data.cache=none"] if no_cache else []
    if experiment.is_data_set(config):
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
        report = experiment.RunFolder(loaded.folder).finished_report(loaded)
        if report is not None:
            typer.echo(report)
            return
    resume = resume or restart
    if (gpus or 1) > 1 or (not is_launched() and experiment.count_workers(loaded, gpus) > 1):
        experiment.train_on(gpus, config, overrides, resume=resume, max_restarts=max_restarts)
        return
    if gpus is not None:
        loaded = loaded.on_one_device(count_launched())
    outcome = experiment.train(loaded, resume=resume)
    if experiment.is_main_process():
        typer.echo(experiment.closing_words(outcome))
    experiment.leave_processes()


@app.command("cross-validate", epilog="Example: volseg cross-validate configs/task04_unet.yaml --folds 0 1 --gpus 2")
def cross_validate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the experiment.")],
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
) -> None:
    """Train every fold that is not finished, and write one table of all their cases."""
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
    typer.echo(experiment.cross_validation_words(crossed))
    if crossed.failures:
        raise typer.Exit(1)


@app.command(epilog="Example: volseg validate runs/task04_unet --checkpoint best")
def validate(run: RunArgument, checkpoint: Checkpoint = "latest", components: Components = None) -> None:
    """Predict the run's validation cases and write their summary.json."""
    from volseg import experiment  # imports torch: not for --help

    experiment.load_components(components or ())
    folder = experiment.RunFolder(run)
    validated = experiment.validate(folder, checkpoint=checkpoint)
    typer.echo(experiment.dice_table(validated.summary, folder.task()))


@app.command(epilog="Example: volseg predict runs/task04_unet imagesTs/ scan.nrrd dicom_folder/ -o predictions")
def predict(
    run: RunArgument,
    images: Annotated[
        list[Path],
        typer.Argument(
            metavar="IMAGES...", help="NIfTI, MHA or NRRD files, DICOM folders, folders of files, or tables (CSV)."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the label maps; default RUN/predictions.")
    ] = None,
    checkpoint: Checkpoint = "latest",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a prediction that was interrupted; its label maps stay.")
    ] = False,
    components: Components = None,
) -> None:
    """Write a label map for each image, as NIfTI on the image's own grid."""
    from volseg import experiment  # imports torch: not for --help

    experiment.load_components(components or ())
    folder = experiment.RunFolder(run)
    for path in experiment.predict(folder, images, output, checkpoint=checkpoint, resume=resume).values():
        typer.echo(path)


@app.command(
    epilog="Example: volseg verify configs/task04_unet.yaml --set data.root=DIR/Task04_Hippocampus --network SegResNet"
)
def verify(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the experiment.")],
    overrides: Overrides = None,
    devices: Annotated[
        int, typer.Option(min=2, help="Shards or stages; without as many GPUs, one device stands for all.")
    ] = 4,
    shape: Annotated[
        tuple[int, int, int] | None,
        typer.Option(metavar="D H W", help="Sides in voxels; default small ones that the network takes."),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Another network than the config's; parameters by --set network.KEY=VALUE."),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="spatial or pipeline; default the config's, spatial where it names none.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that was compared as JSON.")] = False,
    components: Components = None,
) -> None:
    """Compare the network on several devices with itself on one, in training and evaluation, recomputed and recorded.

    Outputs, gradients, buffers, parameters after a step and after two, in float64. Exit status 1 if anything differs.
    """
    from volseg import experiment  # imports torch: not for --help

    experiment.load_components(components or ())
    named = [f"network={json.dumps({'name': network})}"] if network else []  # a JSON text is a YAML text
    loaded = experiment.load_config(config, [*named, *(overrides or ())])
    report = experiment.verify(loaded, num_devices=devices, shape=shape, strategy=strategy)
    typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else str(report))
    if not report.ok:
        raise typer.Exit(1)


@data_app.command("list", epilog="Example: volseg data list")
def list_tasks() -> None:
    """List the public tasks that can be fetched: the ten of the Medical Segmentation Decathlon."""
    from volseg.data.describing import tabulate_public_tasks  # imports torch: not for --help

    typer.echo(tabulate_public_tasks())


@data_app.command(epilog="Example: volseg data info Task04_Hippocampus")
def info(
    name: Annotated[str, typer.Argument(metavar="TASK|FOLDER", help="A public task, a folder, or a table (CSV).")],
    components: Components = None,
) -> None:
    """Say what is in a data set: of a folder cases, channels, labels, sizes and spacings; every image is read."""
    from volseg import experiment  # imports torch: not for --help
    from volseg.data import load_task
    from volseg.data.catalogue import find_public_task
    from volseg.data.describing import describe_public_task, describe_task
    from volseg.monitoring.progress import count_up

    if not Path(name).exists() and Path(name).name == name:
        typer.echo(describe_public_task(find_public_task(name)))
        return
    experiment.load_components(components or ())
    task = load_task(name)
    with count_up(len(task.training) + len(task.test), "reading") as count:
        described = describe_task(task, progress=count)
    typer.echo(described)


@data_app.command(epilog="Example: volseg data fetch Task04_Hippocampus --output data")
def fetch(
    name: Annotated[str, typer.Argument(metavar="TASK", help="One of `volseg data list`, such as Task04 or spleen.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder in which the task's own folder is made.")
    ] = Path(),
    url: Annotated[str | None, typer.Option(help="A mirror of the archive, which must be the same file.")] = None,
) -> None:
    """Fetch a public task; what has come before an interruption is not fetched again."""
    from volseg.data.catalogue import find_public_task  # imports torch: not for --help
    from volseg.data.fetching import fetch_task
    from volseg.monitoring.progress import show_bytes

    with show_bytes() as show:
        folder = fetch_task(find_public_task(name), output, url=url, show=show)
    typer.echo(folder)


@data_app.command(epilog="Example: volseg data make Task09_Twin --like Task09_Spleen --cases 8")
def make(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New or empty folder.")],
    like: Annotated[
        str | None,
        typer.Option(metavar="TASK", help="Task of the Decathlon whose channels, labels, units and grids to take."),
    ] = None,
    cases: Annotated[int, typer.Option(help="Cases with labels.")] = 24,
    tests: Annotated[int, typer.Option(help="Cases without labels.")] = 4,
    seed: Annotated[int, typer.Option(help="The same seed writes the same files.")] = 0,
    scale: Annotated[
        float | None,
        typer.Option(help="With --like: sides as a fraction of the task's; by default 48 voxels along the longest."),
    ] = None,
) -> None:
    """Make a synthetic data set in MSD layout: two structures, or a small twin of one of the Decathlon's tasks."""
    from volseg.data.synthetic import make_task  # imports torch: not for --help
    from volseg.data.twins import make_twin
    from volseg.errors import DataError

    if like is not None:
        typer.echo(make_twin(folder, like, num_cases=cases, num_test=tests, seed=seed, scale=scale))
    elif scale is not None:
        raise DataError("--scale is a fraction of a task's sides; name the task by --like, such as Task09_Spleen")
    else:
        typer.echo(make_task(folder, num_cases=cases, num_test=tests, seed=seed))


@data_app.command(epilog="Example: volseg data check Task04_Hippocampus -o check.json --fix Task04_mended")
def check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A data set in any of the layouts.")],
    output: Annotated[
        Path | None, typer.Option("--json", "--output", "-o", metavar="FILE", help="Write all that was found as JSON.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit status 1 for what should be looked at too.")] = False,
    split: Annotated[
        Path | None, typer.Option(help="Split file; default the five folds. No image may train and validate.")
    ] = None,
    fix: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write a corrected copy, as far as no guess is needed; bad cases left out."),
    ] = None,
    keep_bad: Annotated[bool, typer.Option("--keep-bad", help="With --fix: copy bad cases as they are.")] = False,
    components: Components = None,
) -> None:
    """Read every file of a data set once; say what is wrong, what is odd, and what to do about it.

    Exit status 1 if a case cannot be used.
    """
    from volseg import experiment  # imports torch: not for --help
    from volseg.data import check_task, load_task, mend_task, read_splits  # imports torch: not for --help
    from volseg.monitoring.progress import count_up

    experiment.load_components(components or ())
    task = load_task(folder, require_files=False)
    splits = None if split is None else read_splits(split, [case["case"] for case in task.training])
    with count_up(len(task.training) + len(task.test), "checking") as count:
        checked = check_task(task, splits=splits, progress=count)
    typer.echo("\n".join(checked.lines()))
    if output is not None:
        checked.write(output)
    if fix is not None:
        typer.echo("\n".join(mend_task(checked, fix, keep_bad=keep_bad).lines()))
    if checked.problems or (strict and checked.remarks):
        raise typer.Exit(1)


@cache_app.command("list", epilog="Example: volseg data cache list")
def list_cache(folder: CacheFolder = "auto") -> None:
    """Say which prepared cases are kept, from where, how large they are, and when they were last used."""
    from volseg.data.case_cache import choose_cache_folder, describe_entries  # imports torch: not for --help

    typer.echo(describe_entries(choose_cache_folder(folder)))


@cache_app.command("clear", epilog="Example: volseg data cache clear --unused 30")
def clear_cache(
    folder: CacheFolder = "auto",
    unused: Annotated[float, typer.Option(min=0, metavar="DAYS", help="Only what was not used for so long.")] = 0,
) -> None:
    """Remove prepared cases; a training that runs keeps those that it has opened."""
    from volseg.data.case_cache import choose_cache_folder, remove_entries  # imports torch: not for --help

    chosen = choose_cache_folder(folder)
    removed = [] if chosen is None else remove_entries(chosen, unused_seconds=unused * 86400)
    typer.echo(f"removed {len(removed)} case(s), {sum(entry.size for entry in removed) / 2**30:.2f} GiB")


@cache_app.command("verify", epilog="Example: volseg data cache verify")
def verify_cache(folder: CacheFolder = "auto") -> None:
    """Compare every byte that is kept with its checksum, and remove what is damaged: it will be prepared anew."""
    from volseg.data.case_cache import choose_cache_folder, verify_entries  # imports torch: not for --help

    chosen = choose_cache_folder(folder)
    found = [] if chosen is None else list(verify_entries(chosen))
    damaged = [fault for _, fault in found if fault is not None]
    for fault in damaged:
        typer.echo(f"removed: {fault}")
    typer.echo(f"{len(found) - len(damaged)} of {len(found)} case(s) are as they were written")
    if damaged:
        raise typer.Exit(1)


@app.command(epilog="Example: volseg quickstart --output first_run")
def quickstart(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for data and run; default runs/quickstart, numbered if taken."),
    ] = None,
) -> None:
    """Make data, train a small network on it, validate and predict: minutes, without data or GPU."""
    from volseg import experiment  # imports torch: not for --help

    typer.echo(experiment.quickstart(output))


@app.command("components", epilog="Example: volseg components network --components components.py")
def list_components(
    kind: Annotated[
        str | None, typer.Argument(metavar="[KIND]", help="network, loss, transform, ...; default all kinds.")
    ] = None,
    components: Components = None,
) -> None:
    """List what a config may name: built in, of installed packages, and of your own."""
    from volseg import experiment  # imports torch: not for --help

    experiment.load_components(components or ())
    for line in experiment.list_components(kind):
        typer.echo(line)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"volseg {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hold the options that come before a verb."""
    del version


@contextmanager
def _leaving_nothing_half_done() -> Iterator[None]:
    """Let the signals that end jobs unwind as Ctrl-C does: half-written files and locks are removed.

    Not in a process that a launcher started: waiting for the others in C++ it could not unwind.
    """

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    if find_launch() is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup ignores SIGHUP
    before = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    """Run the command line."""
    launch = find_launch()
    if launch is not None or OWN_LAUNCHER in os.environ:
        end_with_launcher()
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[BesideBars()])
    if launch is not None:
        _run_launched(launch)
    try:
        with _leaving_nothing_half_done():
            app()
    except VolsegError as fault:
        _say(f"volseg: {fault}", typer.colors.RED)
        sys.exit(1)
    except OSError as fault:  # a full disk, a folder that may not be written
        _say(f"volseg: {_describe_refusal(fault)}", typer.colors.RED)
        sys.exit(1)
    except SystemExit as end:  # typer turns Ctrl-C into this one
        if end.code in INTERRUPTED:
            _say(f"volseg: interrupted; {_find_way_on()}")
        raise


def _say(words: str, colour: str | None = None) -> None:
    """Print the last words of the process, on a line of their own."""
    close_bars()
    typer.secho(words, fg=colour, err=True)


def _find_way_on() -> str:
    """Return how what the command line asked for is gone on with."""
    verb = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    return WAYS_ON.get(verb, "run the same command again")


def _run_launched(launch: Launch) -> NoReturn:
    """Run the command line as one of the processes of a job, which end together and tell what happened once."""
    ending = end_at_exit()
    try:
        app()
        status = 0
    except SystemExit as end:
        if end.code in INTERRUPTED and launch.rank == 0:
            _say(f"volseg: interrupted; {_find_way_on()}")
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as fault:
        from volseg.parallel.failures import end_after  # imports torch: not for --help
        from volseg.parallel.processes import find_supervision

        # The system's refusals are no fault of ours that a traceback would help with.
        said = VolsegError(_describe_refusal(fault)) if isinstance(fault, OSError) else fault
        end_after(said, find_supervision())
    if "torch" in sys.modules:
        from volseg.parallel.processes import stop_watching  # imports torch: not for --help

        stop_watching()
    ending.status = status
    sys.exit(status)


def _describe_refusal(fault: OSError) -> str:
    where = "" if fault.filename is None else f"{fault.filename}: "
    return f"{where}{fault.strerror or fault}; free space, or name another folder; {_find_way_on()}"
