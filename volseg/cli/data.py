"""The verbs below `volseg data`: list, info, fetch, make and check."""

import json
from pathlib import Path
from typing import Annotated

import typer

from volseg.cli.cache import cache_app
from volseg.cli.options import Components
from volseg.streams import show

__all__ = ["data_app"]

data_app = typer.Typer(name="data", help="Fetch, make, describe and check data sets.", no_args_is_help=True)
data_app.add_typer(cache_app)


@data_app.command("list", epilog="Example: volseg data list")
def list_tasks() -> None:
    """List the public tasks that can be fetched: the ten of the Medical Segmentation Decathlon."""
    from volseg.data.describing import tabulate_public_tasks  # imports torch: not for --help

    show(tabulate_public_tasks())


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
        show(describe_public_task(find_public_task(name)))
        return
    experiment.load_components(components or ())
    task = load_task(name)
    with count_up(len(task.training) + len(task.test), "reading") as count:
        described = describe_task(task, progress=count)
    show(described)


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

    with show_bytes() as advance:
        folder = fetch_task(find_public_task(name), output, url=url, show=advance)
    show(folder)


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
    from volseg.data.mock_msd import make_mock_task  # imports torch: not for --help
    from volseg.data.synthetic import make_task
    from volseg.errors import DataError

    if like is not None:
        show(make_mock_task(folder, like, num_cases=cases, num_test=tests, seed=seed, scale=scale))
    elif scale is not None:
        raise DataError("--scale is a fraction of a task's sides; name the task by --like, such as Task09_Spleen")
    else:
        show(make_task(folder, num_cases=cases, num_test=tests, seed=seed))


@data_app.command(epilog="Example: volseg data check Task04_Hippocampus -o check.json --fix Task04_mended")
def check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A data set in any of the layouts.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write all that was found as JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that was found as JSON.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit status 1 for what should be looked at too.")] = False,
    split: Annotated[
        Path | None,
        typer.Option(help="Split file; default the five folds. No image and no patient may train and validate."),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(metavar="PATTERN|COLUMN", help="As split.group: which cases are of one patient; or none."),
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
    from volseg.data import check_task, load_task, read_splits, repair_task  # imports torch: not for --help
    from volseg.files import require_new
    from volseg.monitoring.progress import count_up

    if output is not None:
        require_new(output, overwrite=overwrite)  # before every image is read
    experiment.load_components(components or ())
    task = load_task(folder, require_files=False)
    splits = None if split is None else read_splits(split, [case["case"] for case in task.training])
    with count_up(len(task.training) + len(task.test), "checking") as count:
        checked = check_task(task, splits=splits, group=group, progress=count)
    show(json.dumps(checked.as_dict(), indent=1) if as_json else "\n".join(checked.lines()))
    if output is not None:
        checked.write(output)
    if fix is not None:
        mended = repair_task(checked, fix, keep_bad=keep_bad)
        show("\n".join(mended.lines()), err=as_json)  # JSON alone is what a program reads
    if checked.problems or (strict and checked.remarks):
        raise typer.Exit(1)
