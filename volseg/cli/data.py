"""Define the verbs of `volseg data` (list, info, fetch, make, check) and `volseg data cache` (list, clear, verify)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from volseg.cli.options import DATA_SET, Components, Output, PlainGroup, verb
from volseg.streams import show

cache_app = typer.Typer(
    cls=PlainGroup, name="cache", help="List, clear and verify the cache of prepared cases.", no_args_is_help=True
)

CacheFolder = Annotated[
    str, Option("--folder", help="Cache folder; default $VOLSEG_CACHE, else volseg in the user's cache folder.")
]


@verb(cache_app, None, "volseg data cache list", name="list")
def list_cache(folder: CacheFolder = "auto") -> None:
    """List the prepared cases in the cache: source, size, last use."""
    from volseg.data.case_store.cache_folder import describe_entries, get_cache_folder  # imports torch: not for --help

    show(describe_entries(get_cache_folder(folder)))


@verb(cache_app, None, "volseg data cache clear --unused 30", name="clear")
def clear_cache(
    folder: CacheFolder = "auto",
    unused: Annotated[float, Option(min=0, metavar="DAYS", help="Only cases unused for this many days.")] = 0,
) -> None:
    """Remove prepared cases. A running training keeps the cases that it has opened."""
    from volseg.data.case_store.cache_folder import get_cache_folder, remove_entries  # imports torch: not for --help

    chosen = get_cache_folder(folder)
    removed = [] if chosen is None else remove_entries(chosen, unused_seconds=unused * 86400)
    show(f"removed {len(removed)} case(s), {sum(entry.size for entry in removed) / 2**30:.2f} GiB")


@verb(cache_app, None, "volseg data cache verify", name="verify")
def verify_cache(folder: CacheFolder = "auto") -> None:
    """Compare all prepared cases with their checksums and remove damaged ones."""
    from volseg.data.case_store.cache_folder import get_cache_folder, verify_entries  # imports torch: not for --help

    chosen = get_cache_folder(folder)
    found = [] if chosen is None else list(verify_entries(chosen))
    damaged = [fault for _, fault in found if fault is not None]
    for fault in damaged:
        show(f"removed: {fault}")
    show(f"{len(found) - len(damaged)} of {len(found)} case(s) are intact")
    if damaged:
        raise typer.Exit(1)


data_app = typer.Typer(
    cls=PlainGroup, name="data", help="Fetch, generate, describe and check data sets.", no_args_is_help=True
)
data_app.add_typer(cache_app)


@verb(data_app, None, "volseg data list", name="list")
def list_tasks() -> None:
    """List the public tasks that can be fetched: the ten of the Medical Segmentation Decathlon."""
    from volseg.config.catalogue import tabulate_public_tasks  # imports pydantic: not for --help

    show(tabulate_public_tasks())


@verb(data_app, None, "volseg data info Task04_Hippocampus")
def info(
    name: Annotated[str, Argument(metavar="TASK|FOLDER", help="A public task, a folder, or a table (CSV).")],
    components: Components = None,
) -> None:
    """Describe a data set: cases, channels, labels, sizes and spacings. Reads every image."""
    if not Path(name).exists() and Path(name).name == name:
        from volseg.config.catalogue import describe_public_task, get_public_task  # imports pydantic: not for --help

        show(describe_public_task(get_public_task(name)))
        return
    DATA_SET(Path(name))
    show(_describe_data(Path(name)))


def _describe_data(root: Path) -> str:
    """Return a description of a data set; read only the first image of each case, as a case has one grid."""
    # These modules import torch: not for --help.
    import numpy as np

    from volseg.config.catalogue import format_numbered  # pydantic
    from volseg.data import load_task, read_volume
    from volseg.data.groups import propose_groups
    from volseg.data.readers import list_files
    from volseg.data.threads import map_in_threads
    from volseg.formatting import align_columns
    from volseg.monitoring.progress import count_up
    from volseg.transforms.grid import measure_sides

    def measure(case: Mapping[str, Any]) -> tuple[Sequence[float], Sequence[float]]:
        volume = read_volume(list_files(case["image"])[0])
        return volume.shape[1:], measure_sides(volume.affine)

    def summarise(sides: Sequence[Sequence[float]]) -> str:
        """Return the median of each axis, and the smallest and largest of each."""
        median, least, most = (
            " x ".join(f"{side:.4g}" for side in found)
            for found in (np.median(sides, axis=0), np.min(sides, axis=0), np.max(sides, axis=0))
        )
        return median if least == most else f"{median} (median; from {least} to {most})"

    task = load_task(root)
    measured = []
    with count_up(len(task.training) + len(task.test), "reading") as count:
        for found in map_in_threads(measure, [*task.training, *task.test]):
            measured.append(found)
            count()
    shapes, spacings = zip(*measured, strict=True)
    regions = ", ".join(f"{name} = {' + '.join(map(str, values))}" for name, values in task.regions.items())
    patients = propose_groups(task)
    partly = sum("labelled" in case for case in task.training)
    facts = [
        ("task", task.name),
        ("folder", str(task.root)),
        ("cases", f"{len(task.training)} with labels, {len(task.test)} without"),
        ("channels", format_numbered(enumerate(task.modalities))),
        ("labels", format_numbered(task.labels.items())),
        ("regions", regions),
        ("ignored", "" if task.ignore is None else str(task.ignore)),
        ("partly", f"{partly} case(s) are annotated for some labels only" if partly else ""),
        ("folds", f"{len(task.splits)}, defined by the data set" if task.splits else ""),
        (
            "patients",
            f"{patients.num_patients} (split.group: {patients.group})" if patients and patients.evident else "",
        ),
        ("voxels", summarise(shapes)),
        ("spacing", f"{summarise(spacings)} mm"),
    ]
    return "\n".join(align_columns([(name, said) for name, said in facts if said]))


@verb(data_app, None, "volseg data fetch Task04_Hippocampus --output data")
def fetch(
    name: Annotated[str, Argument(metavar="TASK", help="One of `volseg data list`, such as Task04 or spleen.")],
    output: Annotated[Path, Output(help="Folder in which to create the task's folder.")] = Path(),
    url: Annotated[str | None, Option(help="Mirror with the same archive.")] = None,
) -> None:
    """Fetch a public task. An interrupted download continues."""
    from volseg.config.catalogue import get_public_task  # imports pydantic: not for --help

    task = get_public_task(name)
    from volseg.data.fetching import fetch_task  # imports torch: not for an unknown name
    from volseg.monitoring.progress import show_bytes

    with show_bytes() as advance:
        folder = fetch_task(task, output, url=url, show=advance)
    show(folder)


@verb(data_app, None, "volseg data make Task09_Twin --like Task09_Spleen --cases 8")
def make(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="New or empty folder.")],
    like: Annotated[
        str | None, Option(metavar="TASK", help="Decathlon task to imitate: channels, labels, units and grids.")
    ] = None,
    cases: Annotated[int, Option(help="Number of cases with labels.")] = 24,
    tests: Annotated[int, Option(help="Number of cases without labels.")] = 4,
    seed: Annotated[int, Option(help="The same seed writes the same files.")] = 0,
    scale: Annotated[
        float | None, Option(help="With --like: fraction of the task's sides; default 48 voxels along the longest.")
    ] = None,
) -> None:
    """Generate a synthetic data set in MSD layout, or a small imitation of a Decathlon task."""
    from volseg.data.mock_msd import make_mock_task  # imports torch: not for --help
    from volseg.data.synthetic import make_task
    from volseg.errors import DataError

    if like is not None:
        show(make_mock_task(folder, like, num_cases=cases, num_test=tests, seed=seed, scale=scale))
    elif scale is not None:
        raise DataError("--scale is a fraction of a task's sides; name the task, such as --like Task09_Spleen")
    else:
        show(make_task(folder, num_cases=cases, num_test=tests, seed=seed))


@verb(data_app, None, "volseg data check Task04_Hippocampus -o check.json --fix Task04_fixed")
def check(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="A data set.", callback=DATA_SET)],
    output: Annotated[Path | None, Output(metavar="FILE", help="Write the findings as JSON.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the findings as JSON.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file if it exists.")] = False,
    strict: Annotated[bool, Option("--strict", help="Exit with status 1 for remarks too.")] = False,
    split: Annotated[
        Path | None, Option(help="Split file to check for images and patients on both sides; default: the five folds.")
    ] = None,
    group: Annotated[
        str | None, Option(metavar="PATTERN|COLUMN", help="How to find patients, as for split.group; or none.")
    ] = None,
    fix: Annotated[Path | None, Option(metavar="DIR", help="Write a corrected copy without bad cases.")] = None,
    keep_bad: Annotated[bool, Option("--keep-bad", help="With --fix: copy bad cases as they are.")] = False,
    components: Components = None,
) -> None:
    """Check every file of a data set; report errors, unusual values, and how to fix them.

    Exit status 1 if a case cannot be used.
    """
    from volseg.data import check_task, load_task, read_splits, repair_task  # imports torch: not for --help
    from volseg.files import require_new
    from volseg.monitoring.progress import count_up

    if output is not None:
        require_new(output, overwrite=overwrite)  # before every image is read
    task = load_task(folder, require_files=False)
    splits = None if split is None else read_splits(split, [case["case"] for case in task.training])
    with count_up(len(task.training) + len(task.test), "checking") as count:
        checked = check_task(task, splits=splits, group=group, progress=count)
    show(json.dumps(checked.as_dict(), indent=1) if as_json else "\n".join(checked.lines()))
    if output is not None:
        checked.write(output)
    if fix is not None:
        repaired = repair_task(checked, fix, keep_bad=keep_bad)
        show("\n".join(repaired.lines()), err=as_json)  # a program reads only JSON
    if checked.problems or (strict and checked.remarks):
        raise typer.Exit(1)
